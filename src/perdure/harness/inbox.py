"""What is submitted: its content and digest, the queue it may wait in, and how it is placed (rules H24 to H36, H47).

Everything here works inside a transaction of somebody else's: an admission, or a boundary of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, cast

import msgspec
from msgspec import structs

from perdure.harness.boundary import Boundary, plan
from perdure.harness.documents import RESET, USER, Inbox, InboxEntry, InboxItem, InboxMode, Live
from perdure.harness.messages import Image, Text, UserPart, decode_messages, user_content
from perdure.harness.settings import Settings
from perdure.kernel.entries import Entry
from perdure.kernel.errors import NotFound, PerdureError
from perdure.kernel.json import JsonValue, check_json, copy_json, digest
from perdure.kernel.records import (
    NULL,
    Edit,
    EntryRecord,
    SubmissionRecord,
    SubmissionStatus,
    SubmissionType,
    from_raw,
    to_raw,
)
from perdure.kernel.transaction import Transaction

MOST_QUEUED = 1_000
"""Submissions that may wait in one conversation."""

InputMode: TypeAlias = Literal["follow_up", "steer", "reject"]
"""What becomes of an input that finds its conversation busy: it waits for the final answer, joins the run after the
current tool round, or is refused."""


class ConversationBusy(PerdureError):
    """An input with mode ``reject`` found a run or a queue. Nothing was written."""

    def __init__(self, conversation: int, *, queued: bool) -> None:
        why = "has inputs waiting from before" if queued else "is busy with a run"
        super().__init__(f"conversation {conversation} {why}; submit with mode 'follow_up' or 'steer', or wait for it")
        self.conversation = conversation


class InboxFull(PerdureError):
    """Too many submissions wait in the conversation already. Nothing was written."""

    def __init__(self, conversation: int) -> None:
        super().__init__(f"{MOST_QUEUED} submissions wait in conversation {conversation}; wait for some, or abort them")
        self.conversation = conversation


class Content(msgspec.Struct, frozen=True):
    """What is submitted, as the entry it will become; all of it strict JSON."""

    type: SubmissionType
    kind: str
    messages: list[JsonValue]
    data: JsonValue = None
    head: int | Literal["self"] | None = None
    edits: tuple[Edit, ...] = ()

    @property
    def display_only(self) -> bool:
        """A write that no model ever reads (rule H28)."""
        return self.type == "write" and not (self.messages or self.edits) and self.head is None

    def digest(self) -> str:
        """What a repeated request id is compared by (rule H33)."""
        return digest(
            {
                "type": self.type,
                "content": self.messages,
                "kind": self.kind,
                "data": self.data,
                "head": self.head,
                "edits": _plain_edits(self.edits),
            }
        )

    def queued(self) -> InboxEntry:
        return {
            "kind": self.kind,
            "messages": self.messages,
            "data": self.data,
            "head": self.head,
            "edits": _plain_edits(self.edits),
        }

    def append(self, tx: Transaction, conversation_id: int) -> EntryRecord:
        return tx.append_record(
            self.kind,
            messages=to_raw(self.messages) if self.messages else None,
            data=None if self.data is None else to_raw(self.data),
            conversation=conversation_id,
            head=self.head,
            edits=self.edits,
            # It is its author's, whoever places it.
            by_task=None,
        )


def input_content(content: str | Sequence[UserPart]) -> Content:
    """A user message. Raises NotJson, ValueError for one without anything in it."""
    parts = _said(content)
    if not parts:
        raise ValueError("an input needs content: a text that is not empty, or another part")
    return Content("input", USER, [_user_message(parts, "content")])


def write_content(entry: Entry, *, head: int | Literal["self"] | None, edits: Sequence[Edit]) -> Content:
    """A typed entry. Raises NotJson, and ValueError for messages that are not what a model reads."""
    kind = type(entry).kind
    messages = list(entry.messages())
    check_json(messages, at=f"{kind}.messages")
    _check_messages(messages, f"{kind}.messages")
    for edit in edits:
        if edit.replace != NULL:
            _check_messages(from_raw(edit.replace), f"the edit of entry {edit.entry}")
    return Content("write", kind, messages, entry.to_json(), head, tuple(edits))


def reset_content(handoff: str | Sequence[UserPart] | None) -> Content:
    """A head that points at itself; the handoff is what the model's context begins with (rules H29, H30)."""
    parts = () if handoff is None else _said(handoff)
    messages = [_user_message(parts, "handoff")] if parts else []
    return Content("write", RESET, messages, head="self")


def _said(content: str | Sequence[UserPart]) -> tuple[UserPart, ...]:
    """The parts that hold something: models refuse empty texts. Raises TypeError for what is no part."""
    parts = user_content(content)
    for at, part in enumerate(parts):
        if type(part) is not Text and type(part) is not Image:  # of untyped callers
            raise TypeError(f"content[{at}] is a Text or an Image, not {type(part).__name__}")
    return tuple(part for part in parts if not (isinstance(part, Text) and not part.text))


def _user_message(parts: Sequence[UserPart], at: str) -> JsonValue:
    content = [cast("JsonValue", msgspec.to_builtins(part)) for part in parts]
    check_json(content, at=at)
    message: JsonValue = {"role": "user", "content": content}
    _check_messages([message], at)
    return message


def _check_messages(messages: object, what: str) -> None:
    try:
        decode_messages(to_raw(messages, at=what))
    except msgspec.ValidationError as error:
        raise ValueError(f"{what}: not what a model reads: {error}") from None


def _plain_edits(edits: Sequence[Edit]) -> list[JsonValue]:
    return [{"entry": edit.entry, "replace": from_raw(edit.replace)} for edit in edits]


def _stored(entry: InboxEntry, type: SubmissionType) -> Content:
    """What was queued, as it was submitted. ``entry`` may be of a draft."""
    entry = cast("InboxEntry", copy_json(entry))
    edits: list[Edit] = []
    for plain in entry["edits"]:
        assert isinstance(plain, dict)
        target, replace = plain["entry"], plain["replace"]
        assert isinstance(target, int)
        edits.append(Edit(entry=target, replace=to_raw(replace)))
    return Content(type, entry["kind"], entry["messages"], entry["data"], entry["head"], tuple(edits))


# --- admission --------------------------------------------------------------------------------------------------


class Admission(msgspec.Struct, frozen=True):
    """What an admission did, and what its caller has to do in the same transaction."""

    submission: SubmissionRecord
    boundary: Boundary | None = None
    """A boundary belongs into this commit; ``final``: what it places starts a run."""
    starts_run: bool = False
    """This very input starts a run."""


async def admit(
    tx: Transaction,
    conversation_id: int,
    content: Content,
    *,
    mode: InputMode = "follow_up",
    request_id: str | None = None,
) -> Admission:
    """Take a submission in, by the table of rules H24 to H29.

    Raises NotFound, ConversationBusy, InboxFull, RequestConflict; nothing is written then.
    """
    await tx.conversation(conversation_id)
    digest = content.digest()
    if request_id is not None:
        existing = await tx.request(conversation_id, request_id)
        if existing is not None:
            tx.check_request(existing, digest)
            return Admission(existing)
    live = await tx.read(Live, conversation=conversation_id)
    busy = live is not None and live.run is not None
    items = await _items(tx, conversation_id)

    async def create(status: SubmissionStatus, entry: int | None = None) -> SubmissionRecord:
        return tx.new_submission(
            type=content.type,
            status=status,
            digest=digest,
            request_id=request_id,
            conversation=conversation_id,
            entry=entry,
        )

    async def queue(mode: InboxMode) -> SubmissionRecord:
        if len(items) >= MOST_QUEUED:
            raise InboxFull(conversation_id)
        submission = await create("queued")
        inbox = await tx.draft(Inbox, conversation=conversation_id)
        inbox.items.append({"id": submission.id, "mode": mode, "entry": content.queued()})
        return submission

    if content.type == "input":
        if not busy and not items:
            entry = content.append(tx, conversation_id)
            return Admission(await create("placed", entry.id), starts_run=True)
        if mode == "reject":
            raise ConversationBusy(conversation_id, queued=not busy)
        return Admission(await queue(mode), None if busy else "final")

    await _check_references(tx, conversation_id, content)
    if content.display_only:
        behind_reset = busy and any(item["entry"]["kind"] == RESET for item in items)
        if not behind_reset:
            return Admission(await create("done", content.append(tx, conversation_id).id))
    if busy or items:
        return Admission(await queue("write"), None if busy else "writes")
    if await is_stale(tx, conversation_id, content.head):
        submission = await create("queued")
        return Admission(await _unanswered(tx, submission, "stale", _STALE))
    return Admission(await create("done", content.append(tx, conversation_id).id))


async def _items(tx: Transaction, conversation_id: int) -> Sequence[InboxItem]:
    """The queue as it stands in this transaction, not copied."""
    if await tx.read(Inbox, conversation=conversation_id) is None:
        return ()
    return (await tx.draft(Inbox, conversation=conversation_id)).items


async def _check_references(tx: Transaction, conversation_id: int, content: Content) -> None:
    """A head and edits name entries that the conversation shows. Raises NotFound."""
    named = [edit.entry for edit in content.edits]
    if isinstance(content.head, int):
        named.append(content.head)
    for id in named:
        if not await tx.entries(conversation_id, first=id, last=id, limit=1):
            raise NotFound(f"conversation {conversation_id} shows no entry {id}")


_STALE = "its head reaches back before what the context begins with by now"


async def is_stale(tx: Transaction, conversation_id: int, head: int | Literal["self"] | None) -> bool:
    """Whether a head reaches back before the active range (rule H47)."""
    if not isinstance(head, int):
        return False
    marker = await tx.head(conversation_id)
    return marker is not None and marker.head is not None and head < marker.head


async def _unanswered(tx: Transaction, submission: SubmissionRecord, reason: str, detail: str) -> SubmissionRecord:
    settled = structs.replace(submission, status="unanswered", reason=reason, detail=detail)
    await tx.put_submission(settled)
    return settled


# --- boundaries -------------------------------------------------------------------------------------------------


class Placed(msgspec.Struct, frozen=True):
    """What a boundary placed."""

    inputs: list[int]
    ends_run: bool


async def place(tx: Transaction, conversation_id: int, boundary: Boundary, settings: Settings) -> Placed:
    """Write what a boundary takes from the queue: writes first, then inputs, each by id (rule H43)."""
    items = await _items(tx, conversation_id)
    if not items:
        return Placed([], False)
    placement = plan(items, boundary, steer=settings.steer, follow_up=settings.follow_up)
    for item in placement.writes:
        submission = await tx.submission(item["id"])
        content = _stored(item["entry"], "write")
        if await is_stale(tx, conversation_id, content.head):
            await _unanswered(tx, submission, "stale", _STALE)
        else:
            entry = content.append(tx, conversation_id)
            await tx.put_submission(structs.replace(submission, status="done", entry=entry.id))
    for item in placement.inputs:
        submission = await tx.submission(item["id"])
        entry = _stored(item["entry"], "input").append(tx, conversation_id)
        await tx.put_submission(structs.replace(submission, status="placed", entry=entry.id))
    placed = Placed([item["id"] for item in placement.inputs], placement.ends_run)
    await _remove(tx, conversation_id, {item["id"] for item in (*placement.writes, *placement.inputs)})
    return placed


async def awaits_reset(tx: Transaction, conversation_id: int) -> bool:
    """Whether a reset waits in the queue."""
    return any(item["entry"]["kind"] == RESET for item in await _items(tx, conversation_id))


async def withdraw(tx: Transaction, conversation_id: int, reason: str, detail: str | None = None) -> None:
    """End every queued input unanswered; queued writes stay (rule H54)."""
    gone = {item["id"] for item in await _items(tx, conversation_id) if item["mode"] != "write"}
    for id in sorted(gone):
        submission = await tx.submission(id)
        await tx.put_submission(structs.replace(submission, status="unanswered", reason=reason, detail=detail))
    await _remove(tx, conversation_id, gone)


async def withdraw_one(tx: Transaction, submission: SubmissionRecord) -> None:
    """Take one queued submission back (rule H53)."""
    await tx.put_submission(structs.replace(submission, status="unanswered", reason="aborted"))
    await _remove(tx, submission.conversation_id, {submission.id})


async def _remove(tx: Transaction, conversation_id: int, gone: set[int]) -> None:
    if not gone:
        return
    inbox = await tx.draft(Inbox, conversation=conversation_id)
    for at in range(len(inbox.items) - 1, -1, -1):
        if inbox.items[at]["id"] in gone:
            del inbox.items[at]
