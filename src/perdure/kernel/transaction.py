"""One transaction on the mutation line: what it reads, what it stages, and how its block ends (rules K41 to
K49, K59 to K66).

    async with session.commit() as tx:
        tx.append(Audit(accepted=7))

Leaving the block commits everything in one atomic batch; an exception rolls everything back. Either way the block is
left only once every commit staged before it has settled, since what it saw may rest on them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar

import msgspec
from msgspec import structs

from perdure.kernel import lineage as history
from perdure.kernel.context import Context
from perdure.kernel.document import Document
from perdure.kernel.documents import (
    DocState,
    ForkConflict,
)
from perdure.kernel.entries import Entry
from perdure.kernel.errors import InvalidTransition, NotFound, NotJson, RequestConflict, TooLarge, TransactionClosed
from perdure.kernel.json import JsonValue
from perdure.kernel.records import (
    EMPTY_LIST,
    MAX_RECORD_BYTES,
    NULL,
    ROOT_CONVERSATION,
    ConversationRecord,
    Edit,
    EntryRecord,
    ForkPoint,
    Pending,
    SubmissionRecord,
    SubmissionStatus,
    SubmissionType,
    TaskRecord,
    check_epoch,
    check_request_id,
    check_submission_move,
    check_task_move,
    to_raw,
)
from perdure.kernel.storage import Batch, DocumentWrite, MailReply
from perdure.kernel.transaction_contents import TransactionContents

if TYPE_CHECKING:
    from perdure.kernel.session import Session, Settlement

D = TypeVar("D", bound=Document)
I_contra = TypeVar("I_contra", contravariant=True)

_encoder = msgspec.json.Encoder()
_decoders: dict[type[Any], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (ConversationRecord, EntryRecord, TaskRecord, SubmissionRecord)
}


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


class Transaction(TransactionContents):
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
        super().__init__(session, conversation_id, internal=internal)
        self.by_task = by_task
        self.context = context
        self.progress = False
        """Set by code whose only writes are throttled progress in documents: the commit may be acknowledged before it
        is flushed (rule K152), unless a derivation adds records to it. Pins need no flush either (rule K206)."""
        self.default_owner: int | None = None
        self._begun = False
        self._settled: Settlement | None = None
        self._first_id = 0
        """Ids from here on are this transaction's own."""
        self._replies: dict[int, MailReply] = {}
        self._epoch: int | None = None

    # --- the block ---------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._begun:
            raise TransactionClosed("a transaction is one block; begin another")
        self._begun = True
        await self.session.enter(self)
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session = self.session
        try:
            try:
                if error is None:
                    self._check_admission()
                    for derive in session.derivations:
                        more = derive(self)
                        if more is not None:
                            await more
                    if self._tasks:
                        await self._retire_task_documents()
                    await self._check()
                    self._stage()
            finally:
                self._close()
                session.leave(self)
        finally:
            await session.wait_staged(self._settled)

    @property
    def seq(self) -> int:
        """The commit's number, once the block has ended. Raises if it made no commit."""
        settled = self._settled
        if settled is None or not settled.done() or settled.exception() is not None:
            raise TransactionClosed("a commit has its number once its block has ended, if it wrote anything")
        return self._seq

    def begin(self, at: int, seq: int) -> None:
        """The line is ours: the commit's time and number are known."""
        self.at, self._seq, self._first_id = at, seq, self.session.next_id

    def _close(self) -> None:
        self._open = False
        self._release_documents()

    # --- writing -----------------------------------------------------------------------------------------------

    def raise_epoch(self, epoch: int) -> None:
        """With this commit the epoch of the fence is ``epoch`` (rule K207). Raises ValueError if that is no higher."""
        self.check_open()
        check_epoch(epoch)
        present = self._epoch or max(self.session.info.epoch, self.session.staged.epoch)
        if epoch <= present:
            raise ValueError(f"the epoch is {present} already; it only rises, so not to {epoch}")
        self._epoch = epoch

    def new_id(self) -> int:
        """Mint an id. One of a rolled-back transaction is not used again while the store stays open."""
        self.check_open()
        return self.session.mint()

    def create_conversation(self, *, owner: int | None, root: bool = False) -> ConversationRecord:
        """A new conversation, owned by a task or ownerless. ``root`` gives it the reserved id (rule K24).

        Leaving the block raises InvalidTransition if there is a root already, NotFound if there is no such task.
        """
        self.check_open()
        if root and ROOT_CONVERSATION in self._conversations:
            raise InvalidTransition("the root conversation is created once")
        record = ConversationRecord(id=ROOT_CONVERSATION if root else self.new_id(), created_at=self.at, owner=owner)
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
        segments = await self._lineage(conversation_id)
        entry = await session.reading(session.storage.entry(at))
        if entry is None or not history.contains(segments, entry.conversation_id, entry.id):
            raise NotFound(f"entry {at} is not visible from conversation {conversation_id}")
        documents: list[DocState] = []
        then = session.storage.documents("conversation", entry.conversation_id, at=entry.seq)
        for old in await session.reading(then):
            if old.fork == "as_of":
                documents.append(await session.reading(session.read_document(old.address, entry.seq)))
        now = session.storage.documents("conversation", conversation_id)
        for old in await session.reading(now):
            if old.fork == "current":
                documents.append((await session.load_document(old.address)).staged)
        # All of it in one step: a fork that was given up while it read has left nothing.
        self.check_open()
        record = ConversationRecord(
            id=self.new_id(), created_at=self.at, parent=ForkPoint(conversation_id, at), owner=owner
        )
        self._conversations[record.id] = record
        self._forked.add(conversation_id)
        for state in documents:
            self._copy(state, record.id)
        return record

    def _copy(self, state: DocState, conversation_id: int) -> None:
        assert state.record is not None, "only what lives is copied"
        record = structs.replace(
            state.record,
            id=self.new_id(),
            scope_id=conversation_id,
            created_at=self.at,
            created_seq=self._seq,
        )
        self._hold(self._born(record.address))
        self._copies[record.address] = DocState(record, state.version, state.value)

    def append(
        self,
        entry: Entry,
        *,
        conversation: int | None = None,
        head: int | Literal["self"] | None = None,
        edits: Sequence[Edit] = (),
    ) -> EntryRecord:
        """Append a typed entry, to the transaction's conversation by default.

        ``head``: where the model's context begins from here on, "self" or an earlier entry. ``edits``: what it does to
        the messages of earlier entries. Raises NotJson if a field or message is not strict JSON; leaving the block
        raises NotFound if the conversation does not exist, or does not show an entry that is named.
        """
        messages = list(entry.messages())
        return self.append_record(
            type(entry).kind,
            messages=to_raw(messages, at=f"{entry.kind}.messages") if messages else EMPTY_LIST,
            data=to_raw(entry.to_json(), at=entry.kind),
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
        by_task: int | Unset | None = UNSET,
    ) -> EntryRecord:
        """Append an entry whose JSON is encoded already.

        ``by_task``: whose it is, by default the running task's; None: no task's.
        """
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
            by_task=self.by_task if isinstance(by_task, Unset) else by_task,
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
        checkpoint: msgspec.Raw = NULL,
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
            state=Pending(phase=phase, raw_checkpoint=checkpoint),
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
        if old is None and not self._is_new(record.id):
            raise InvalidTransition(f"task {record.id} is terminal or unknown; only a live task moves on")
        if old is not record:
            check_task_move(old, record)
            self._tasks[record.id] = record

    def _is_new(self, id: int) -> bool:
        """Whether this transaction minted the id."""
        return self._first_id <= id < self.session.next_id

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
        """A new submission. Look its request id up with ``request()`` first: leaving the block raises RequestConflict
        or InvalidTransition if it is taken."""
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
        if request_id is not None:
            check_request_id(request_id)
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
        """Answer a mailbox request in this commit. Leaving the block raises NotFound if it is not waiting."""
        self.check_open()
        if mail_id in self._replies:
            raise InvalidTransition(f"request {mail_id} of the mailbox is answered once")
        self._replies[mail_id] = MailReply(mail_id, ok, to_raw(result, at="reply"))

    # --- staging -----------------------------------------------------------------------------------------------

    def _check_admission(self) -> None:
        """Until it is admitted, a transaction ends with its caller and with the session (rules K78 and K81)."""
        self.check_open()
        if self.context is not None:
            self.context.check()

    async def _check(self) -> None:
        """Refuse what storage would refuse: there it would fail the session (rule K63)."""
        session = self.session
        if ROOT_CONVERSATION in self._conversations and await session.find_conversation(ROOT_CONVERSATION) is not None:
            raise InvalidTransition("the root conversation is there already; it is created once")
        for conversation in self._conversations.values():
            if conversation.owner is not None:
                await self.task(conversation.owner)
        for record in (*self._entries.values(), *self._tasks.values(), *self._submissions.values()):
            place = record.conversation_id
            if not self._knows(place) and self._is_new(record.id):
                await self.conversation(place)
        for entry in self._entries.values():
            if entry.edits or (entry.head is not None and entry.head != entry.id):
                await self._check_named(entry)
        asked: dict[tuple[int, str], SubmissionRecord] = {}
        for record in self._submissions.values():
            if record.request_id is not None and self._is_new(record.id):
                key = (record.conversation_id, record.request_id)
                holder = asked.setdefault(key, record)
                if holder is record and key not in self._free_requests:
                    holder = await self._earlier_request(*key) or record
                if holder is not record:
                    self.check_request(holder, record.digest)
                    raise InvalidTransition(f"submission {holder.id} has this request id already; look it up first")
        for mail_id in self._replies:
            waiting = await session.reading(session.storage.mail(after=mail_id - 1, limit=1))
            if mail_id in session.staged.replies or [mail.id for mail in waiting] != [mail_id]:
                raise NotFound(f"no request {mail_id} waits in the mailbox")

    async def _check_named(self, entry: EntryRecord) -> None:
        """A head and edits are of earlier entries of the same history."""
        named = {edit.entry for edit in entry.edits}
        if entry.head is not None and entry.head != entry.id:
            named.add(entry.head)
        segments = await self._lineage(entry.conversation_id)
        for id in named:
            if id >= entry.id or not history.contains(segments, (await self.entry(id)).conversation_id, id):
                raise NotFound(f"entry {id} is no earlier one that conversation {entry.conversation_id} shows")

    def _check_records(self, writes: list[DocumentWrite]) -> None:
        """Refuse what no store can hold, or what is too large (rules K35, K37 and K189)."""
        for record in self._conversations.values():
            _check_record("conversation", record)
        for record in self._entries.values():
            _check_record("entry", record)
        for record in self._tasks.values():
            _check_record("task", record)
        for record in self._submissions.values():
            _check_record("submission", record)
        for write in writes:
            size = len(write.base or write.ops or b"")
            if size > MAX_RECORD_BYTES:
                raise TooLarge(f"document {write.record.address}", size, MAX_RECORD_BYTES)

    def _stage(self) -> None:
        changes, states, writes = self._document_writes()
        records = any(
            (
                self._conversations,
                self._entries,
                self._tasks,
                self._submissions,
                self._replies,
                self._deleted,
                self._contents,
                self._epoch,
            )
        )
        others = any((self._pins, self._unpinned, self._reclaimed))
        if not (writes or records or others):
            return
        for change in changes:
            record = change.record
            if record.fork == "current" and record.scope == "conversation" and record.scope_id in self._forked:
                raise ForkConflict(
                    f"{record.address} belongs to a conversation this transaction forks; change it in another"
                )
        self._check_records(writes)
        self._check_admission()
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
            replies=list(self._replies.values()),
            progress=not records and (self.progress or not writes),
            deleted=sorted(self._deleted),
            contents=list(self._contents.values()),
            pins=list(self._pins),
            unpinned=list(self._unpinned),
            reclaimed=list(self._reclaimed),
            epoch=self._epoch,
        )
        values = self.context.values if self.context is not None else None
        self._settled = session.stage(batch, changes, states, values)


def _check_record(what: str, record: ConversationRecord | EntryRecord | TaskRecord | SubmissionRecord) -> None:
    """The JSON in it was checked as it was built; here it is the rest, and the whole (rule K209)."""
    try:
        encoded = _encoder.encode(record)
        _decoders[type(record)].decode(encoded)
    except msgspec.MsgspecError as error:
        raise NotJson(_name(what, record), str(error)) from None
    except (UnicodeEncodeError, OverflowError) as error:
        text = isinstance(error, UnicodeEncodeError)
        reason = "a text with a lone surrogate" if text else "an integer beyond 64 bits"
        raise NotJson(_name(what, record), reason) from None
    if len(encoded) > MAX_RECORD_BYTES:
        raise TooLarge(_name(what, record), len(encoded), MAX_RECORD_BYTES)


def _name(what: str, record: ConversationRecord | EntryRecord | TaskRecord | SubmissionRecord) -> str:
    kind = f" ({ascii(str(record.kind))[1:-1]})" if isinstance(record, (EntryRecord, TaskRecord)) else ""
    return f"{what} {record.id}{kind}"


Derivation = Callable[[Transaction], Awaitable[None] | None]
