"""What a session shows to everybody outside transactions: settled records and documents, read and observed."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import msgspec
from msgspec import structs

from perdure.kernel import lineage as history
from perdure.kernel.context import Context, bounded
from perdure.kernel.document import Document, resolve_version
from perdure.kernel.documents import (
    ABSENT,
    DocState,
    DocumentCache,
    DocumentChange,
    LoadedDocument,
    materialise,
    read_state,
)
from perdure.kernel.errors import (
    ContextCancelled,
    ContextDeadline,
    InvalidRead,
    NotFound,
    SessionClosed,
    SessionFailed,
)
from perdure.kernel.observation import Frame, Observer, Source, State, Watch
from perdure.kernel.records import (
    Address,
    ConversationRecord,
    EntryRecord,
    SubmissionRecord,
    SubmissionStatus,
    TaskRecord,
    check_request_id,
)
from perdure.kernel.storage import ANY, Anything, Batch, Order, Segment, Storage, StoreInfo
from perdure.kernel.transaction_documents import address_of

D = TypeVar("D", bound=Document)
T = TypeVar("T")
R = TypeVar("R")
K = TypeVar("K")
Obs = TypeVar("Obs", bound=Observer[Any])
S = TypeVar("S", ConversationRecord, EntryRecord, SubmissionRecord, TaskRecord)

KEPT_CONVERSATIONS = 10_000
KEPT_SUBMISSIONS = 1_000


class Settled(msgspec.Struct, frozen=True):
    """One commit that storage accepted, as observers see it."""

    seq: int
    at: int
    batch: Batch
    documents: tuple[DocumentChange, ...]
    values: Mapping[str, object]
    """What the committing context carried."""


class LiveTasks(msgspec.Struct):
    """Every task that is not terminal, in memory: as of the settled commits, and with the staged ones."""

    settled: dict[int, TaskRecord] = msgspec.field(default_factory=dict[int, TaskRecord])
    staged: dict[int, TaskRecord] = msgspec.field(default_factory=dict[int, TaskRecord])


class StagedRecords(msgspec.Struct):
    """Records of commits that storage has not settled yet: transactions see them, nobody else does."""

    conversations: dict[int, ConversationRecord] = msgspec.field(default_factory=dict[int, ConversationRecord])
    entries: dict[int, EntryRecord] = msgspec.field(default_factory=dict[int, EntryRecord])
    submissions: dict[int, SubmissionRecord] = msgspec.field(default_factory=dict[int, SubmissionRecord])
    tasks: dict[int, TaskRecord] = msgspec.field(default_factory=dict[int, TaskRecord])
    replies: set[int] = msgspec.field(default_factory=set[int])
    """Mailbox requests that a staged commit answers."""
    deleted: set[int] = msgspec.field(default_factory=set[int])
    """Conversations that a staged commit deletes. No transaction begins meanwhile."""
    epoch: int = 0
    """The highest that a commit of this session has raised the fence to."""


class SettledReads(ABC):
    """The reading half of a Session."""

    def __init__(self, storage: Storage, info: StoreInfo, documents: DocumentCache) -> None:
        self.storage = storage
        self.info = info
        self.documents = documents
        self.seq = info.seq
        """The last settled commit."""
        self.failed: BaseException | None = None
        """Why the session failed, once it has."""
        self.closing = False
        self.storage_closed = False
        self.live = LiveTasks()
        self.staged = StagedRecords()
        self.open_submissions: dict[int, SubmissionRecord] = {}
        """Queued and placed submissions this session has seen, as of the staged commits."""
        self._settled_submissions: OrderedDict[int, SubmissionRecord] = OrderedDict()
        """The last that commits of this session wrote, as settled."""
        self._open_observers: dict[Observer[Any], None] = {}
        self._sources: dict[Source[Any], None] = {}
        self._lineages = history.Lineages()
        self._known_conversations: OrderedDict[int, ConversationRecord] = OrderedDict()
        self._old_tasks: set[int] = set()
        """Tasks that were live at open: their documents are not known from memory."""
        self._task_documents: dict[int, set[Address]] = {}
        self._deletions = 0
        """Commits so far that deleted conversations: a read that began before one may find what it deleted."""

    @abstractmethod
    def check_open(self) -> None:
        """Raises SessionFailed or SessionClosed."""

    @abstractmethod
    def fail(self, cause: BaseException) -> None:
        """Storage refused or lost something: end everything that rests on this session."""

    @abstractmethod
    def check_outside(self) -> None:
        """Raises InsideTransaction inside the calling task's own open transaction."""

    async def reading(self, read: Awaitable[R], context: Context | None = None) -> R:
        """Await one read of storage: an error in it fails the session, unless the request was invalid or its caller
        was cancelled (rules K128, K129 and K131)."""
        task = asyncio.current_task()
        cancels = 0 if task is None else task.cancelling()
        try:
            found = await bounded(read, context)
        except (InvalidRead, ContextCancelled, ContextDeadline):
            raise
        except TypeError as error:  # of untyped callers: an id that is a list, a limit that is a text
            raise InvalidRead(f"what was looked for is nothing a record can have ({error})") from error
        except Exception as error:
            if self.failed is not None and self.failed is not error:
                raise SessionFailed(self.failed) from error
            if self.storage_closed:
                raise SessionClosed("the session was closed while this read was under way") from error
            given_up = task is not None and task.cancelling() > cancels
            if not given_up and (context is None or not context.ended):
                self.fail(error)
            raise
        if self.failed is not None:
            raise SessionFailed(self.failed)
        return found

    async def load_document(self, address: Address, context: Context | None = None) -> LoadedDocument:
        """What lives at an address, in memory as this returns.

        Where the store is open for reading only another process may write it: nothing is kept, or what was kept of one
        commit would stand beside what is read of a later one (rule K2).
        """
        if self.info.read_only:
            stored = await self.reading(self.storage.document(address), context)
            state = ABSENT if stored is None else materialise(stored)
            return LoadedDocument(address, state)
        while True:
            loaded = await self.reading(self.documents.load(address), context)
            if self.documents.peek(address) is loaded:
                return loaded

    def check_read(self) -> None:
        """Whether a read outside transactions may begin. Raises InsideTransaction, SessionFailed, SessionClosed."""
        self.check_outside()
        self.check_open()

    def _forget_conversations(self, ids: Sequence[int]) -> None:
        """They are deleted."""
        self._deletions += 1
        self.staged.deleted.difference_update(ids)
        for id in ids:
            self._known_conversations.pop(id, None)
            self._lineages.forget(id)
        for submission in [s for s in self._settled_submissions.values() if s.conversation_id in ids]:
            del self._settled_submissions[submission.id]

    def knows_conversation(self, id: int) -> bool:
        """Whether memory tells that it exists, settled or staged."""
        return id in self.staged.conversations or id in self._known_conversations

    async def find_conversation(self, id: int) -> ConversationRecord | None:
        """As it is staged, which may not be settled; None if there is none."""
        found = self.staged.conversations.get(id) or self._known_conversations.get(id)
        return found or await self._settled_conversation(id, None)

    async def conversation(self, id: int, *, context: Context | None = None) -> ConversationRecord | None:
        """As settled; None if there is none."""
        self.check_read()
        return await self._settled_conversation(id, context)

    async def _settled_conversation(self, id: int, context: Context | None) -> ConversationRecord | None:
        found = self._known_conversations.get(id)
        if found is None:
            before = self._deletions
            found = await self.reading(self.storage.conversation(id), context)
            if found is not None and self._may_remember(before):
                remember(self._known_conversations, id, found, KEPT_CONVERSATIONS)
        return found

    def _may_remember(self, deletions: int) -> bool:
        """Whether what was read after so many deletions is so still, and goes on to be until this session is told."""
        return deletions == self._deletions and not self.info.read_only

    async def entry(self, id: int, *, context: Context | None = None) -> EntryRecord | None:
        """As settled; None if there is none."""
        self.check_read()
        return await self.reading(self.storage.entry(id), context)

    async def submission(self, id: int, *, context: Context | None = None) -> SubmissionRecord | None:
        """As settled; None if there is none."""
        self.check_read()
        known = self._settled_submissions.get(id)
        if known is not None:
            return known
        if id not in self.staged.submissions and id in self.open_submissions:
            return self.open_submissions[id]
        return await self.reading(self.storage.submission(id), context)

    async def task(self, id: int, *, context: Context | None = None) -> TaskRecord | None:
        """A live task from memory (if no other process may have moved it on); an ended one from storage."""
        self.check_read()
        known = None if self.info.read_only else self.live.settled.get(id)
        return known or await self.reading(self.storage.task(id), context)

    async def request(
        self, conversation_id: int, request_id: str, *, context: Context | None = None
    ) -> SubmissionRecord | None:
        """The submission that holds the request id in this conversation, whatever became of it."""
        self.check_read()
        check_request_id(request_id)
        return await self.reading(self.storage.request(conversation_id, request_id), context)

    async def lineage(self, conversation_id: int, *, staged: bool = False) -> tuple[Segment, ...]:
        """Whose entries a conversation shows. Raises NotFound."""
        known = self._lineages.get(conversation_id)
        if known is not None:
            return known
        record = self.staged.conversations.get(conversation_id) if staged else None
        if record is not None:
            parent = () if record.parent is None else await self.lineage(record.parent.conversation)
            return history.of(record, parent)
        record = self._known_conversations.get(conversation_id)
        parent = None if record is None or record.parent is None else self._lineages.get(record.parent.conversation)
        if record is not None and (record.parent is None or parent is not None):
            segments = history.of(record, parent or ())
        else:
            before = self._deletions
            segments = await self.reading(self.storage.lineage(conversation_id))
            if not self._may_remember(before) and segments:
                return segments
        if not segments:
            raise NotFound(f"there is no conversation {conversation_id}")
        self._lineages.keep(conversation_id, segments)
        return segments

    async def entries(
        self,
        conversation_id: int,
        *,
        first: int = 0,
        last: int | None = None,
        order: Order = "ascending",
        limit: int = 100,
        context: Context | None = None,
    ) -> list[EntryRecord]:
        """Entries of a conversation through its forks with ``first <= id <= last``. Raises NotFound, InvalidRead."""
        self.check_read()
        segments = await bounded(self.lineage(conversation_id), context)
        read = self.storage.entries(segments, first=first, last=last, order=order, limit=limit)
        return await self.reading(read, context)

    async def head(
        self, conversation_id: int, *, last: int | None = None, context: Context | None = None
    ) -> EntryRecord | None:
        """The newest head marker at or below ``last``: where the model's context begins."""
        self.check_read()
        segments = await bounded(self.lineage(conversation_id), context)
        return await self.reading(self.storage.head(segments, last=last), context)

    async def conversations(
        self,
        *,
        owner: int | Anything | None = ANY,
        after: int = 0,
        limit: int = 100,
        context: Context | None = None,
    ) -> list[ConversationRecord]:
        """Those with id > ``after``, at most ``limit``, by id; with ``owner`` those of that task, or of none (None)."""
        self.check_read()
        return await self.reading(self.storage.conversations(owner=owner, after=after, limit=limit), context)

    async def tasks(
        self,
        *,
        conversation_id: int | None = None,
        kind: str | None = None,
        live: bool | None = None,
        after: int = 0,
        limit: int = 100,
        context: Context | None = None,
    ) -> list[TaskRecord]:
        """Those with id > ``after`` that fit, at most ``limit``, by id. ``live``: not ended, or ended."""
        self.check_read()
        read = self.storage.tasks(conversation_id=conversation_id, kind=kind, live=live, after=after, limit=limit)
        return await self.reading(read, context)

    async def submissions(
        self,
        *,
        conversation_id: int | None = None,
        status: SubmissionStatus | None = None,
        after: int = 0,
        limit: int = 100,
        context: Context | None = None,
    ) -> list[SubmissionRecord]:
        """Those with id > ``after`` that fit, at most ``limit``, by id."""
        self.check_read()
        read = self.storage.submissions(conversation_id=conversation_id, status=status, after=after, limit=limit)
        return await self.reading(read, context)

    async def snapshot(
        self,
        kind: type[D],
        *,
        conversation: int | None = None,
        task: int | None = None,
        key: str = "",
        at: int | None = None,
        context: Context | None = None,
    ) -> D | None:
        """A detached value, as settled; None if nothing lives there.

        ``at``: the state as of the commit of that entry, found through the conversation's forks; for rewindable
        documents. Raises NotFound for an entry the conversation does not show, DocumentVersionError.
        """
        self.check_read()
        address = address_of(kind, conversation, task, key)
        if at is None:
            return read_state((await self.load_document(address, context)).settled, kind)
        return await bounded(self._snapshot_at(kind, address, at), context)

    async def _snapshot_at(self, kind: type[D], address: Address, at: int) -> D | None:
        if kind.definition.history != "rewindable":
            raise ValueError(f"{kind.definition.kind} keeps its latest value only; declare it history='rewindable'")
        entry = await self.reading(self.storage.entry(at))
        if entry is None:
            raise NotFound(f"there is no entry {at}")
        if address.scope == "conversation":
            segments = await self.lineage(address.scope_id)
            if not history.contains(segments, entry.conversation_id, entry.id):
                raise NotFound(f"entry {at} is not visible from conversation {address.scope_id}")
            address = Address(address.kind, address.scope, entry.conversation_id, address.key)
        state = await self.reading(self.read_document(address, entry.seq))
        return read_state(state, kind)

    async def read_document(self, address: Address, at: int) -> DocState:
        """What lived at an address after commit ``at``."""
        stored = await self.storage.document(address, at=at)
        return ABSENT if stored is None else materialise(stored)

    async def task_documents(self, task_id: int) -> list[Address]:
        """Addresses of the task-scoped documents that may live: from memory, or read for tasks live at open."""
        known = self._task_documents.get(task_id, set())
        if task_id in self._old_tasks:
            stored = await self.reading(self.storage.documents("task", task_id))
            known = known | {record.address for record in stored}
        return sorted(known, key=str)

    # --- observation -------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def state(
        self,
        kind: type[D],
        *,
        conversation: int | None = None,
        task: int | None = None,
        key: str = "",
        context: Context | None = None,
    ) -> AsyncGenerator[State[D]]:
        """A live value of one document: ``async with session.state(Job, conversation=1) as job: job.value``.

        Raises NotFound if nothing lives there.
        """
        source = await self._document_source(kind, address_of(kind, conversation, task, key), context)
        with self.observing(source.state()) as state:
            yield state

    @asynccontextmanager
    async def watch(
        self,
        kind: type[D],
        *,
        conversation: int | None = None,
        task: int | None = None,
        key: str = "",
        context: Context | None = None,
    ) -> AsyncGenerator[Watch[D]]:
        """Every value of one document from now on: ``async for frame in watch``. Raises NotFound if there is none."""
        source = await self._document_source(kind, address_of(kind, conversation, task, key), context)
        with self.observing(source.watch(context)) as watch:
            yield watch

    @contextmanager
    def observing(self, observer: Obs) -> Generator[Obs]:
        """Keep an observer in the session's account of open ones while the block runs, and release it after."""
        self._open_observers[observer] = None
        try:
            yield observer
        finally:
            observer.release()
            del self._open_observers[observer]

    def add_source(self, source: Source[T]) -> None:
        """A source a floor above publishes to: it ends with the session."""
        self._sources[source] = None

    def drop_source(self, source: Source[T]) -> None:
        """Forget what nobody watches any more."""
        self._sources.pop(source, None)

    async def _document_source(self, kind: type[D], address: Address, context: Context | None) -> Source[D]:
        self.check_read()
        loaded = await self.load_document(address, context)
        if loaded.settled.record is None:
            raise NotFound(f"nothing lives at {address}")
        known = loaded.sources.get(kind.definition)
        if known is not None:
            return known  # pyright: ignore[reportReturnType]  # kept by the definition it was made with
        value = read_state(loaded.settled, kind)
        assert value is not None, "a living document has a value"
        definition = kind.definition

        def detach(value: D) -> D:
            return kind.from_json(value.shared_json())

        def forget() -> None:
            loaded.sources.pop(definition, None)
            self.drop_source(source)
            self.documents.use(loaded)

        name = str(structs.replace(address, key=""))  # it is reported, and a key may be anything (rule H285)
        source: Source[D] = Source(name, seq=self.seq, value=value, on_idle=forget, detach=detach)
        loaded.sources[definition] = source  # pyright: ignore[reportArgumentType]
        self.add_source(source)
        return source

    def _publish_document(self, settled: Settled, loaded: LoadedDocument, change: DocumentChange) -> None:
        for definition, source in list(loaded.sources.items()):
            if change.after is None:
                del loaded.sources[definition]
                self.drop_source(source)
                source.end("retired")
                continue
            try:
                value, migrated = resolve_version(definition, loaded.settled.version, change.after)
                read = definition.cls.from_json(value)
            except Exception as error:  # of a migration, or a version this observer's code cannot read
                source.end("listener_error", error)
                continue
            # The operations are of the stored version: they do not lead from one migrated value to the next.
            source.publish(Frame(settled.seq, read, None if migrated else change.ops, settled.values))


def remember(kept: OrderedDict[int, K], id: int, value: K, most: int) -> None:
    kept[id] = value
    if len(kept) > most:
        kept.popitem(last=False)
