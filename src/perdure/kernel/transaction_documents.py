"""The documents a transaction reads, changes and retires, and what that writes (rules K99 to K113)."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from perdure.kernel.document import Document, DocumentDefinition, resolve_version
from perdure.kernel.documents import (
    ABSENT,
    DocState,
    DocumentChange,
    LoadedDocument,
    read_state,
    retire_state,
    write_base,
    write_change,
)
from perdure.kernel.draft import Recorder
from perdure.kernel.errors import NotFound
from perdure.kernel.json import check_json
from perdure.kernel.ops import Op, Set
from perdure.kernel.records import Address, DocumentRecord, Terminal
from perdure.kernel.storage import DocumentWrite
from perdure.kernel.transaction_reads import TransactionReads

if TYPE_CHECKING:
    from perdure.kernel.session import Session

D = TypeVar("D", bound=Document)


class OpenDraft:
    """A document this transaction may change."""

    __slots__ = ("born", "definition", "document", "loaded", "migrated", "recorder", "state")

    def __init__(
        self,
        loaded: LoadedDocument,
        state: DocState,
        document: Document,
        recorder: Recorder,
        *,
        born: bool,
        migrated: bool,
    ) -> None:
        self.loaded = loaded
        self.state = state
        self.document = document
        self.definition: DocumentDefinition = type(document).definition
        self.recorder = recorder
        self.born = born
        self.migrated = migrated


class TransactionDocuments(TransactionReads):
    """The documents' part of a Transaction."""

    def __init__(self, session: Session, conversation_id: int | None, *, internal: bool) -> None:
        super().__init__(session, conversation_id, internal=internal)
        self.at = 0
        """The commit's time, wall clock ms."""
        self._seq = 0
        self._drafts: dict[Address, OpenDraft] = {}
        self._retired: dict[Address, LoadedDocument] = {}
        self._copies: dict[Address, DocState] = {}
        """Documents a forked conversation begins with, unless they are drafted too."""
        self._held: dict[Address, LoadedDocument] = {}

    def _address(self, kind: type[Document], conversation: int | None, task: int | None, key: str) -> Address:
        return address_of(kind, self.conversation_id if conversation is None else conversation, task, key)

    async def read(
        self, kind: type[D], *, conversation: int | None = None, task: int | None = None, key: str = ""
    ) -> D | None:
        """A detached snapshot as this transaction sees it, own changes included; None if nothing lives there."""
        self.check_open()
        address = self._address(kind, conversation, task, key)
        draft = self._drafts.get(address)
        if draft is not None:
            return read_state(DocState(draft.state.record, draft.definition.version, draft.recorder.value), kind)
        return read_state(self._current(self._in_memory(address) or await self._load(address)), kind)

    async def draft(
        self, kind: type[D], *, conversation: int | None = None, task: int | None = None, key: str = ""
    ) -> D:
        """The document to change, created if nothing lives there. One draft an address; dead once the block ends.

        Raises NotFound if its conversation does not exist, or its task is not live; DocumentVersionError.
        """
        self.check_open()
        address = self._address(kind, conversation, task, key)
        if address in self._drafts:
            return self._draft(kind, address)
        loaded = self._in_memory(address) or await self._load(address)
        if self._current(loaded).record is None:
            if address.scope == "conversation":
                await self.conversation(address.scope_id)
            elif address.scope == "task" and self.live_task(address.scope_id) is None:
                raise NotFound(f"{address}: that task is not live, and documents of an ended task have retired")
        return self._draft(kind, address)

    async def retire(
        self, kind: type[Document], *, conversation: int | None = None, task: int | None = None, key: str = ""
    ) -> None:
        """End what lives at the address; opening a draft there again makes a new incarnation. Raises NotFound."""
        self.check_open()
        address = self._address(kind, conversation, task, key)
        if address in self._drafts:
            raise ValueError(f"{address}: a document is changed or retired in one transaction, not both")
        loaded = self._in_memory(address) or await self._load(address)
        if self._current(loaded).record is None:
            raise NotFound(f"nothing lives at {address}")
        if self._copies.pop(address, None) is None:
            self._retired[address] = loaded

    def _current(self, loaded: LoadedDocument) -> DocState:
        """What this transaction has at an address, drafts aside."""
        if loaded.address in self._retired:
            return ABSENT
        return self._copies.get(loaded.address, loaded.staged)

    def _in_memory(self, address: Address) -> LoadedDocument | None:
        """What is there without a read, as nearly always: it costs no step of the event loop's machinery."""
        loaded = self._held.get(address)
        if loaded is None:
            loaded = self.session.documents.peek(address)
            if loaded is not None:
                self._hold(loaded)
        return loaded

    async def _load(self, address: Address) -> LoadedDocument:
        if self._is_born(address):
            return self._hold(self._born(address))
        return self._hold(await self.session.load_document(address))

    def _born(self, address: Address) -> LoadedDocument:
        """An address where nothing can live yet, since this transaction makes what it is of."""
        documents = self.session.documents
        return documents.peek(address) or documents.put(address, ABSENT)

    def _hold(self, loaded: LoadedDocument) -> LoadedDocument:
        """Keep it in memory while the block is open: what is staged over it must be found there (rule K67)."""
        if loaded.address not in self._held:
            self._held[loaded.address] = loaded
            loaded.holds += 1
        return loaded

    def _release_documents(self) -> None:
        for draft in self._drafts.values():
            draft.recorder.close()
        if self._held:
            for loaded in self._held.values():
                loaded.holds -= 1
            self.session.documents.use(*self._held.values())
            self._held.clear()

    def _is_born(self, address: Address) -> bool:
        """Whether the conversation or task it would belong to is created by this very transaction."""
        if address.scope == "conversation":
            return address.scope_id in self._conversations
        return (
            address.scope == "task"
            and address.scope_id in self._tasks
            and address.scope_id not in (self.session.live.staged)
        )

    def _draft(self, kind: type[D], address: Address) -> D:
        open_draft = self._drafts.get(address)
        if open_draft is not None:
            if not isinstance(open_draft.document, kind):
                raise ValueError(f"{address} is open in this transaction as {type(open_draft.document).__name__}")
            return open_draft.document
        loaded = self._held[address]
        definition = kind.definition
        state = self._current(loaded)
        born, migrated = address in self._copies, False
        if state.record is None:
            born = True
            record = DocumentRecord(
                id=self.session.mint(),
                kind=definition.kind,
                scope=definition.scope,
                scope_id=address.scope_id,
                key=address.key,
                history=definition.history,
                fork=definition.fork,
                created_at=self.at,
                created_seq=self._seq,
            )
            value = definition.initial()
            state = DocState(record, definition.version, value)
        else:
            value, migrated = resolve_version(definition, state.version, state.value)
        recorder = Recorder(value, at=definition.kind)
        document = kind.over(recorder)
        self._copies.pop(address, None)
        self._drafts[address] = OpenDraft(loaded, state, document, recorder, born=born, migrated=migrated)
        return document

    async def _retire_task_documents(self) -> None:
        """Task-scoped documents retire in the commit that ends their task, changed in it or not (rule K113)."""
        for record in self._tasks.values():
            if type(record.state) is not Terminal:
                continue
            for address in [a for a in self._drafts if a.scope == "task" and a.scope_id == record.id]:
                self._drafts.pop(address).recorder.close()
            for address in await self.session.task_documents(record.id):
                loaded = self._in_memory(address) or await self._load(address)
                if loaded.staged.record is not None:
                    self._retired[address] = loaded

    def _document_writes(
        self,
    ) -> tuple[list[DocumentChange], list[tuple[LoadedDocument, DocState]], list[DocumentWrite]]:
        changes: list[DocumentChange] = []
        states: list[tuple[LoadedDocument, DocState]] = []
        writes: list[DocumentWrite] = []
        for loaded in self._retired.values():
            old = loaded.staged
            write = retire_state(old, at=self.at, seq=self._seq)
            writes.append(write)
            changes.append(DocumentChange(write.record, old.value, None, ()))
            states.append((loaded, ABSENT))
        for address, copy in self._copies.items():
            assert copy.record is not None, "only what lives is copied"
            state, write = write_base(copy.record, copy.version, copy.value)
            writes.append(write)
            changes.append(DocumentChange(write.record, None, state.value, (Set((), state.value),)))
            states.append((self._held[address], state))
        for draft in self._drafts.values():
            ops: tuple[Op, ...] = draft.recorder.ops
            if not (ops or draft.born or draft.migrated):
                continue
            record = draft.state.record
            assert record is not None, "a draft has an incarnation"
            value = draft.recorder.value
            if draft.born or draft.migrated:
                state, write = write_base(record, draft.definition.version, value)
                ops = (Set((), value),)
            else:
                state, write = write_change(draft.definition, draft.state, value, ops)
            before = None if draft.born else draft.loaded.staged.value
            writes.append(write)
            changes.append(DocumentChange(record, before, value, ops))
            states.append((draft.loaded, state))
        return changes, states, writes


def address_of(kind: type[Document], conversation: int | None, task: int | None, key: str) -> Address:
    """Where a document of this kind lives. Raises ValueError when what its scope needs was not given, NotJson for a key
    that no store can hold, TypeError for what a store would take for the text or number that it looks like (K209)."""
    definition = kind.definition
    if definition.family != bool(key):
        raise ValueError(f"{definition.kind}: " + ("a family needs a key" if definition.family else "takes no key"))
    if not isinstance(key, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # of untyped callers
        raise TypeError(f"{definition.kind}: a key is a text, not {type(key).__name__}")
    if not key.isascii():
        check_json(key, at=f"{definition.kind} key")
    if definition.scope == "session":
        return Address(definition.kind, "session", 0, key)
    scope_id = conversation if definition.scope == "conversation" else task
    if scope_id is None:
        raise ValueError(f"{definition.kind}: name the {definition.scope} it belongs to")
    if type(scope_id) is not int:
        raise TypeError(f"{definition.kind}: a {definition.scope} is named by its number, not by {scope_id!r}")
    return Address(definition.kind, definition.scope, scope_id, key)
