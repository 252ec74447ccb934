"""One transaction on the mutation line: what it reads, what it stages, and how its block ends (rules of 1.2).

    async with session.commit() as tx:
        tx.append(Audit(accepted=7))

Leaving the block commits everything in one atomic batch; an exception rolls everything back. Either way the block is
left only once every commit staged before it has settled, since what it saw may rest on them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, Self, TypeVar

import msgspec
from msgspec import structs

from perdure.kernel import lineage as history
from perdure.kernel.context import Context
from perdure.kernel.document import Document, DocumentDefinition, resolve_version
from perdure.kernel.documents import (
    ABSENT,
    DocState,
    DocumentChange,
    ForkConflict,
    LoadedDocument,
    materialise,
    read_state,
    retire_state,
    write_base,
    write_change,
)
from perdure.kernel.draft import Recorder
from perdure.kernel.entries import Entry
from perdure.kernel.errors import NotFound, RequestConflict, TransactionClosed
from perdure.kernel.json import JsonValue
from perdure.kernel.ops import Op, Set
from perdure.kernel.records import (
    EMPTY_LIST,
    NULL,
    ROOT_CONVERSATION,
    Address,
    ConversationRecord,
    DocumentRecord,
    Edit,
    EntryRecord,
    ForkPoint,
    Pending,
    SubmissionRecord,
    SubmissionStatus,
    SubmissionType,
    TaskRecord,
    Terminal,
    check_submission_move,
    check_task_move,
    to_raw,
)
from perdure.kernel.storage import ANY, Anything, Batch, DocumentWrite, MailReply, Order

if TYPE_CHECKING:
    from perdure.kernel.session import Session

D = TypeVar("D", bound=Document)
I_contra = TypeVar("I_contra", contravariant=True)
_encode = msgspec.json.Encoder().encode


class TaskKind(Protocol[I_contra]):
    """What creating a task needs to know of its definition."""

    @property
    def kind(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def first_phase(self) -> str: ...
    def encode_input(self, input: I_contra, /) -> msgspec.Raw: ...


class Unset:
    """No value given, where None means something."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset()


class _OpenDraft:
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


class Transaction:
    """A block on the mutation line. Made by ``session.commit()``; usable only inside its block."""

    def __init__(
        self,
        session: Session,
        *,
        conversation_id: int | None = None,
        by_task: int | None = None,
        context: Context | None = None,
        internal: bool = False,
    ) -> None:
        self.session = session
        self.conversation_id = conversation_id
        self.by_task = by_task
        self.context = context
        self.internal = internal
        self.progress = False
        """Set by code whose only writes are throttled progress: the commit may be acknowledged before it is flushed."""
        self.default_owner: int | None = None
        self.at = 0
        self._seq = 0
        self._open = False
        self._settled: asyncio.Future[None] | None = None
        self._conversations: dict[int, ConversationRecord] = {}
        self._entries: dict[int, EntryRecord] = {}
        self._tasks: dict[int, TaskRecord] = {}
        self._submissions: dict[int, SubmissionRecord] = {}
        self._drafts: dict[Address, _OpenDraft] = {}
        self._retired: dict[Address, LoadedDocument] = {}
        self._copies: list[tuple[LoadedDocument, DocState, DocumentWrite]] = []
        self._forked: set[int] = set()
        self._replies: list[MailReply] = []

    # --- the block ---------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._seq or self._open:
            raise TransactionClosed("a transaction is one block; begin another")
        await self.session.enter(self)
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session = self.session
        try:
            if error is None:
                for derive in session.derivations:
                    derive(self)
                await self._retire_task_documents()
                self._stage()
        finally:
            self._close()
            session.leave(self)
        await session.wait_staged(self._settled)

    @property
    def seq(self) -> int:
        """The commit's number, once the block has ended. Raises if it made no commit."""
        if self._open or self._settled is None:
            raise TransactionClosed("a commit has its number once its block has ended, if it wrote anything")
        return self._seq

    def begin(self, at: int, seq: int) -> None:
        """The line is ours: the commit's time and number are known."""
        self.at, self._seq = at, seq

    def _close(self) -> None:
        self._open = False
        for draft in self._drafts.values():
            draft.recorder.close()

    def check_open(self) -> None:
        if not self._open:
            raise TransactionClosed("this transaction's block has ended; begin another with commit()")

    def _here(self, conversation: int | None) -> int:
        where = self.conversation_id if conversation is None else conversation
        if where is None:
            raise ValueError("name the conversation, or use conversation.commit()")
        return where

    # --- reading -----------------------------------------------------------------------------------------------

    async def conversation(self, id: int) -> ConversationRecord:
        """Raises NotFound."""
        self.check_open()
        found = self._conversations.get(id) or await self.session.find_conversation(id)
        return _found(found, "conversation", id)

    async def entry(self, id: int) -> EntryRecord:
        """Raises NotFound."""
        self.check_open()
        found = self._entries.get(id) or self.session.staged.entries.get(id) or await self.session.storage.entry(id)
        return _found(found, "entry", id)

    async def submission(self, id: int) -> SubmissionRecord:
        """Raises NotFound."""
        self.check_open()
        found = (
            self._submissions.get(id)
            or self.session.staged.submissions.get(id)
            or self.session.open_submissions.get(id)
            or await self.session.storage.submission(id)
        )
        return _found(found, "submission", id)

    async def task(self, id: int) -> TaskRecord:
        """Raises NotFound."""
        self.check_open()
        found = self.live_task(id) or self._tasks.get(id) or self.session.staged.tasks.get(id)
        return _found(found or await self.session.storage.task(id), "task", id)

    async def request(self, conversation_id: int, request_id: str) -> SubmissionRecord | None:
        """The submission that holds the request id in this conversation, whatever became of it."""
        self.check_open()
        for submissions in (self._submissions, self.session.staged.submissions):
            for record in submissions.values():
                if record.request_id == request_id and record.conversation_id == conversation_id:
                    return record
        return await self.session.storage.request(conversation_id, request_id)

    async def entries(
        self,
        conversation: int | None = None,
        *,
        first: int = 0,
        last: int | None = None,
        order: Order = "ascending",
        limit: int = 100,
    ) -> list[EntryRecord]:
        """Entries of a conversation through its forks, in id order, own writes included."""
        self.check_open()
        segments = await self._lineage(self._here(conversation))
        await self.session.settled_here()
        stored = await self.session.storage.entries(segments, first=first, last=last, order=order, limit=limit)
        own = [e for e in self._entries.values() if history.contains(segments, e.conversation_id, e.id)]
        inside = [e for e in own if e.id >= first and (last is None or e.id <= last)]
        return _merge(stored, inside, limit, descending=order == "descending")

    async def head(self, conversation: int | None = None, *, last: int | None = None) -> EntryRecord | None:
        """The newest head marker at or below ``last``."""
        self.check_open()
        segments = await self._lineage(self._here(conversation))
        own = [
            e
            for e in self._entries.values()
            if e.head is not None
            and (last is None or e.id <= last)
            and history.contains(segments, e.conversation_id, e.id)
        ]
        if own:
            return max(own, key=_by_id)
        await self.session.settled_here()
        return await self.session.storage.head(segments, last=last)

    async def conversations(
        self, *, owner: int | Anything | None = ANY, after: int = 0, limit: int = 100
    ) -> list[ConversationRecord]:
        """Conversations with id > ``after``, by owner."""
        self.check_open()
        await self.session.settled_here()
        stored = await self.session.storage.conversations(owner=owner, after=after, limit=limit)
        own = [c for c in self._conversations.values() if c.id > after and owner in (ANY, c.owner)]
        return _merge(stored, own, limit)

    async def tasks(
        self,
        *,
        conversation_id: int | None = None,
        kind: str | None = None,
        live: bool | None = None,
        after: int = 0,
        limit: int = 100,
    ) -> list[TaskRecord]:
        """Tasks with id > ``after``, in id order."""
        self.check_open()
        await self.session.settled_here()
        limit_stored = min(limit + len(self._tasks), 1000)
        stored = await self.session.storage.tasks(
            conversation_id=conversation_id, kind=kind, live=live, after=after, limit=limit_stored
        )
        own = [
            t
            for t in self._tasks.values()
            if t.id > after
            and conversation_id in (None, t.conversation_id)
            and kind in (None, t.kind)
            and live in (None, t.live)
        ]
        return _merge([t for t in stored if t.id not in self._tasks], own, limit)

    async def submissions(
        self,
        *,
        conversation_id: int | None = None,
        status: SubmissionStatus | None = None,
        after: int = 0,
        limit: int = 100,
    ) -> list[SubmissionRecord]:
        """Submissions with id > ``after``, in id order."""
        self.check_open()
        await self.session.settled_here()
        limit_stored = min(limit + len(self._submissions), 1000)
        stored = await self.session.storage.submissions(
            conversation_id=conversation_id, status=status, after=after, limit=limit_stored
        )
        own = [
            s
            for s in self._submissions.values()
            if s.id > after and conversation_id in (None, s.conversation_id) and status in (None, s.status)
        ]
        return _merge([s for s in stored if s.id not in self._submissions], own, limit)

    def live_task(self, id: int) -> TaskRecord | None:
        """The live task as this transaction leaves it so far, from memory; None if it is terminal or unknown."""
        own = self._tasks.get(id)
        if own is not None:
            return own if own.live else None
        return self.session.live.staged.get(id)

    def live_tasks(self) -> Iterator[TaskRecord]:
        """Every live task as this transaction leaves it so far, from memory."""
        own = self._tasks
        for id, record in self.session.live.staged.items():
            if id not in own:
                yield record
        for record in own.values():
            if record.live:
                yield record

    @property
    def changed_tasks(self) -> Mapping[int, TaskRecord]:
        """The tasks this transaction created or changed so far."""
        return self._tasks

    @property
    def new_entries(self) -> Sequence[EntryRecord]:
        """The entries this transaction appended so far, in order."""
        return list(self._entries.values())

    @property
    def new_conversations(self) -> Mapping[int, ConversationRecord]:
        return self._conversations

    @property
    def changed_submissions(self) -> Mapping[int, SubmissionRecord]:
        return self._submissions

    async def _lineage(self, conversation_id: int) -> tuple[history.Segment, ...]:
        own = self._conversations.get(conversation_id)
        if own is None:
            return await self.session.lineage(conversation_id, staged=True)
        if own.parent is None:
            return (history.Segment(own.id, 0, None),)
        return history.fork(await self._lineage(own.parent.conversation), own.parent.at, own.id)

    # --- documents ---------------------------------------------------------------------------------------------

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
            return kind.from_json(draft.recorder.value)
        if address in self._retired:
            return None
        return read_state((await self._load(address)).staged, kind)

    async def draft(
        self, kind: type[D], *, conversation: int | None = None, task: int | None = None, key: str = ""
    ) -> D:
        """The document to change, created if nothing lives there. One draft an address; dead once the block ends."""
        self.check_open()
        address = self._address(kind, conversation, task, key)
        if address not in self._drafts:
            await self._load(address)
        return self._draft(kind, address)

    def loaded_draft(
        self, kind: type[D], *, conversation: int | None = None, task: int | None = None, key: str = ""
    ) -> D | None:
        """The same without reading storage: None when the document is absent or not in memory (for derivations)."""
        self.check_open()
        address = self._address(kind, conversation, task, key)
        if address not in self._drafts:
            loaded = self.session.documents.peek(address)
            if loaded is None or loaded.staged.record is None or address in self._retired:
                return None
        return self._draft(kind, address)

    async def retire(
        self, kind: type[Document], *, conversation: int | None = None, task: int | None = None, key: str = ""
    ) -> None:
        """End what lives at the address; opening a draft there again makes a new incarnation. Raises NotFound."""
        self.check_open()
        address = self._address(kind, conversation, task, key)
        if address in self._drafts:
            raise ValueError(f"{address}: a document is changed or retired in one transaction, not both")
        loaded = await self._load(address)
        if loaded.staged.record is None or address in self._retired:
            raise NotFound(f"nothing lives at {address}")
        self._retired[address] = loaded

    async def _load(self, address: Address) -> LoadedDocument:
        documents = self.session.documents
        loaded = documents.peek(address)
        if loaded is None and self._is_born(address):
            return documents.put(address, ABSENT)
        return loaded or await documents.load(address)

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
        loaded = self.session.documents.peek(address)
        assert loaded is not None, "a draft opens over a loaded document"
        definition = kind.definition
        state = loaded.staged
        born = migrated = False
        if state.record is None or address in self._retired:
            born = True
            record = DocumentRecord(
                id=self.new_id(),
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
        self._drafts[address] = _OpenDraft(loaded, state, document, recorder, born=born, migrated=migrated)
        return document

    async def _retire_task_documents(self) -> None:
        """Task-scoped documents retire in the commit that makes their task terminal (rule 1.4)."""
        for record in self._tasks.values():
            if type(record.state) is Terminal:
                for address in await self.session.task_documents(record.id):
                    if address not in self._retired and address not in self._drafts:
                        loaded = await self._load(address)
                        if loaded.staged.record is not None:
                            self._retired[address] = loaded

    # --- writing -----------------------------------------------------------------------------------------------

    def new_id(self) -> int:
        """Mint an id. One of a rolled-back transaction is not used again while the store stays open."""
        self.check_open()
        return self.session.mint()

    def create_conversation(self, *, owner: int | None, root: bool = False) -> ConversationRecord:
        """A new conversation, owned by a task or ownerless. ``root`` gives it the reserved id (once)."""
        record = ConversationRecord(id=ROOT_CONVERSATION if root else self.new_id(), created_at=self.at, owner=owner)
        self.check_open()
        self._conversations[record.id] = record
        return record

    async def fork(self, conversation_id: int, at: int, *, owner: int | None = None) -> ConversationRecord:
        """A conversation whose history is that one's through entry ``at``; documents follow their fork policy.

        Raises NotFound if the entry is not visible from that conversation, ValueError for one of this transaction.
        """
        self.check_open()
        if at in self._entries or conversation_id in self._conversations:
            raise ValueError("fork at an entry of an earlier commit, not of this transaction")
        session = self.session
        await session.settled_here()
        segments = await session.lineage(conversation_id, staged=True)
        entry = await session.storage.entry(at)
        if entry is None or not history.contains(segments, entry.conversation_id, entry.id):
            raise NotFound(f"entry {at} is not visible from conversation {conversation_id}")
        record = ConversationRecord(
            id=self.new_id(), created_at=self.at, parent=ForkPoint(conversation_id, at), owner=owner
        )
        self._conversations[record.id] = record
        self._forked.add(conversation_id)
        for old in await session.storage.documents("conversation", entry.conversation_id, at=entry.seq):
            if old.fork == "as_of":
                stored = await session.storage.document(old.address, at=entry.seq)
                assert stored is not None, "a document alive at a commit can be read there"
                self._copy_document(materialise(stored), record.id)
        for old in await session.storage.documents("conversation", conversation_id):
            if old.fork == "current":
                self._copy_document((await session.documents.load(old.address)).staged, record.id)
        return record

    def _copy_document(self, state: DocState, conversation_id: int) -> None:
        assert state.record is not None, "only what lives is copied"
        record = structs.replace(
            state.record,
            id=self.new_id(),
            scope_id=conversation_id,
            created_at=self.at,
            created_seq=self._seq,
        )
        copied, write = write_base(record, state.version, state.value)
        self._copies.append((self.session.documents.put(record.address, ABSENT), copied, write))

    def append(
        self,
        entry: Entry,
        *,
        conversation: int | None = None,
        head: int | Literal["self"] | None = None,
        edits: Sequence[Edit] = (),
    ) -> EntryRecord:
        """Append a typed entry. Raises NotJson if a field or message is not strict JSON."""
        return self.append_record(
            type(entry).kind,
            messages=to_raw(list(entry.messages()), at=f"{entry.kind}.messages"),
            data=to_raw(msgspec.to_builtins(entry), at=entry.kind),
            conversation=conversation,
            head=head,
            edits=edits,
        )

    def append_record(
        self,
        kind: str,
        *,
        messages: msgspec.Raw | None = None,
        data: msgspec.Raw | None = None,
        conversation: int | None = None,
        head: int | Literal["self"] | None = None,
        edits: Sequence[Edit] = (),
    ) -> EntryRecord:
        """Append an entry whose JSON is encoded already."""
        id = self.new_id()
        record = EntryRecord(
            id=id,
            seq=self._seq,
            created_at=self.at,
            conversation_id=self._here(conversation),
            kind=kind,
            raw_messages=EMPTY_LIST if messages is None else messages,
            raw_data=NULL if data is None else data,
            head=id if head == "self" else head,
            edits=tuple(edits),
            by_task=self.by_task,
        )
        self._entries[id] = record
        return record

    def new_task(
        self,
        *,
        kind: str,
        version: int,
        phase: str,
        input: msgspec.Raw,
        conversation: int | None = None,
        owner: int | None = None,
        background: bool = False,
    ) -> TaskRecord:
        """A new pending task."""
        record = TaskRecord(
            id=self.new_id(),
            conversation_id=self._here(conversation),
            kind=kind,
            version=version,
            created_at=self.at,
            state=Pending(phase=phase),
            raw_input=input,
            owner=owner,
            background=background,
            nonce=self.session.entropy.token(),
        )
        self.put_task(record)
        return record

    def create_task(
        self,
        kind: TaskKind[I_contra],
        input: I_contra,
        *,
        owner: int | Unset | None = UNSET,
        conversation: int | None = None,
        background: bool = False,
    ) -> TaskRecord:
        """A new task of that kind. ``owner``: a task of the same conversation, or None: the conversation.

        Inside a phase the default owner is the running task; elsewhere the conversation. ``background`` is for tasks
        the conversation owns.
        """
        if isinstance(owner, Unset):
            owner = None if background else self.default_owner
        return self.new_task(
            kind=kind.kind,
            version=kind.version,
            phase=kind.first_phase,
            input=kind.encode_input(input),
            conversation=conversation,
            owner=owner,
            background=background,
        )

    def put_task(self, record: TaskRecord) -> None:
        """Stage a task record, whole. Raises InvalidTransition."""
        self.check_open()
        old = self._tasks.get(record.id) or self.session.live.staged.get(record.id)
        if old is not record:
            check_task_move(old, record)
            self._tasks[record.id] = record

    def new_submission(
        self,
        *,
        type: SubmissionType,
        status: SubmissionStatus,
        digest: str,
        request_id: str | None = None,
        conversation: int | None = None,
        entry: int | None = None,
    ) -> SubmissionRecord:
        """A new submission. Look its request id up with ``request()`` first."""
        record = SubmissionRecord(
            id=self.new_id(),
            conversation_id=self._here(conversation),
            type=type,
            status=status,
            digest=digest,
            created_at=self.at,
            request_id=request_id,
            entry=entry,
        )
        check_submission_move(None, record)
        self._submissions[record.id] = record
        return record

    async def put_submission(self, record: SubmissionRecord) -> None:
        """Stage a submission's next state, whole. Raises InvalidTransition, NotFound."""
        old = await self.submission(record.id)
        if old is not record:
            check_submission_move(old, record)
            self._submissions[record.id] = record

    def check_request(self, existing: SubmissionRecord, digest: str) -> None:
        """Raise RequestConflict unless a repeated request id came with the same content."""
        if existing.digest != digest:
            assert existing.request_id is not None, "found by its request id"
            raise RequestConflict(existing.request_id, existing.id)

    def reply(self, mail_id: int, *, ok: bool, result: JsonValue = None) -> None:
        """Answer a mailbox request in this commit."""
        self.check_open()
        self._replies.append(MailReply(mail_id, ok, to_raw(result, at="reply")))

    # --- staging -----------------------------------------------------------------------------------------------

    def _stage(self) -> None:
        changes, states, writes = self._document_writes()
        if not (writes or self._conversations or self._entries or self._tasks or self._submissions or self._replies):
            return
        for change in changes:
            record = change.record
            if record.fork == "current" and record.scope == "conversation" and record.scope_id in self._forked:
                raise ForkConflict(
                    f"{record.address} belongs to a conversation this transaction forks; change it in another"
                )
        session = self.session
        batch = Batch(
            seq=self._seq,
            at=self.at,
            next_id=session.next_id,
            conversations=list(self._conversations.values()),
            entries=list(self._entries.values()),
            submissions=list(self._submissions.values()),
            tasks=list(self._tasks.values()),
            documents=writes,
            replies=self._replies,
            progress=self.progress,
        )
        values = self.context.values if self.context is not None else None
        self._settled = session.stage(batch, changes, states, values)

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
        for loaded, state, write in self._copies:
            writes.append(write)
            changes.append(DocumentChange(write.record, None, state.value, (Set((), state.value),)))
            states.append((loaded, state))
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
    """Where a document of this kind lives. Raises ValueError when what its scope needs was not given."""
    definition = kind.definition
    if definition.family != bool(key):
        raise ValueError(f"{definition.kind}: " + ("a family needs a key" if definition.family else "takes no key"))
    if definition.scope == "session":
        return Address(definition.kind, "session", 0, key)
    scope_id = conversation if definition.scope == "conversation" else task
    if scope_id is None:
        raise ValueError(f"{definition.kind}: name the {definition.scope} it belongs to")
    return Address(definition.kind, definition.scope, scope_id, key)


R = TypeVar("R", ConversationRecord, EntryRecord, SubmissionRecord, TaskRecord)


def _found(record: R | None, what: str, id: int) -> R:
    if record is None:
        raise NotFound(f"there is no {what} {id}")
    return record


def _by_id(record: ConversationRecord | EntryRecord | SubmissionRecord | TaskRecord) -> int:
    return record.id


def _merge(stored: list[R], own: list[R], limit: int, *, descending: bool = False) -> list[R]:
    """Stored records and this transaction's own, in id order."""
    if not own:
        return stored[:limit]
    return sorted([*stored, *own], key=_by_id, reverse=descending)[:limit]


Derivation = Callable[[Transaction], None]
