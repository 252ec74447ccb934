"""``perdure inspect``: what a store says of itself, read without lock, fence or write (rule: read-only opening)."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import structs
from rich.console import Console
from rich.table import Table
from rich.text import Text

from perdure.harness.documents import Inbox, Live, Meta
from perdure.kernel.errors import DocumentVersionError
from perdure.kernel.records import Sleeping, SubmissionRecord, TaskRecord, Waiting
from perdure.kernel.session import Session
from perdure.kernel.storage import MAX_SCAN
from perdure.storage.lock import read_holder
from perdure.storage.sqlite import SqliteStorage

MOST_CONVERSATIONS = 1000
MOST_SUBMISSIONS = 1000


class ConversationLine(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    name: str | None
    owner: int | None
    parent: int | None
    busy: bool
    queued: int


class TaskLine(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    conversation: int
    kind: str
    version: int
    owner: int | None
    status: str
    phase: str | None
    restarts: int
    abort_requested: bool
    why: str


class SubmissionLine(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    conversation: int
    type: str
    status: str
    request_id: str | None
    entry: int | None


class StoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--json`` prints. Times are ms UTC, sizes bytes."""

    path: str
    format: int
    log_id: str
    epoch: int
    writer: str
    commits: int
    bytes: int
    holder: str | None
    """Who has the store open, or None."""
    conversations: tuple[ConversationLine, ...]
    tasks: tuple[TaskLine, ...]
    """Live ones."""
    submissions: tuple[SubmissionLine, ...]
    """Queued and placed ones."""
    mail: int
    """Requests from other processes that nobody has taken yet."""
    wake: int | None
    """When the earliest sleeper wants to be woken."""
    more: bool
    """There is more of something than is listed."""


async def look(path: Path) -> StoreReport:
    """Read a closed or a live store. Raises what opening it for reading raises."""
    holder = read_holder(f"{path}.lock")
    async with Session.open(SqliteStorage(path), read_only=True) as session:
        info = session.info
        page = await session.conversations(limit=MOST_CONVERSATIONS)
        conversations = [await _conversation(session, record.id) for record in page]
        tasks = sorted(session.live.settled.values(), key=lambda task: task.id)
        queued = await session.submissions(status="queued", limit=MOST_SUBMISSIONS)
        placed = await session.submissions(status="placed", limit=MOST_SUBMISSIONS)
        mail = await session.storage.mail(limit=MAX_SCAN)
        size = await session.storage.size()
        sleepers = [task.state.until for task in tasks if isinstance(task.state, Sleeping)]
        return StoreReport(
            path=str(path),
            format=info.format,
            log_id=info.log_id,
            epoch=info.epoch,
            writer=info.writer,
            commits=info.seq,
            bytes=size.total,
            holder=None if holder is None or holder.gone else str(holder),
            conversations=tuple(conversations),
            tasks=tuple(_task(task, {other.id for other in tasks}) for task in tasks),
            submissions=tuple(_submission(record) for record in sorted([*queued, *placed], key=lambda s: s.id)),
            mail=len(mail),
            wake=min(sleepers, default=None),
            more=len(page) == MOST_CONVERSATIONS or MOST_SUBMISSIONS in (len(queued), len(placed)),
        )


async def _conversation(session: Session, id: int) -> ConversationLine:
    record = await session.conversation(id)
    assert record is not None, "it was just listed"
    try:
        live = await session.snapshot(Live, conversation=id)
        inbox = await session.snapshot(Inbox, conversation=id)
        meta = await session.snapshot(Meta, conversation=id)
    except DocumentVersionError:  # written by a newer release; the records beside it can still be told
        live = inbox = meta = None
    return ConversationLine(
        id=id,
        name=None if meta is None else meta.name,
        owner=record.owner,
        parent=None if record.parent is None else record.parent.conversation,
        busy=live is not None and live.run is not None,
        queued=0 if inbox is None else len(inbox.items),
    )


def _task(record: TaskRecord, live: set[int]) -> TaskLine:
    state = record.state
    return TaskLine(
        id=record.id,
        conversation=record.conversation_id,
        kind=record.kind,
        version=record.version,
        owner=record.owner,
        status=record.status,
        phase=getattr(state, "phase", None),
        restarts=record.restarts,
        abort_requested=record.abort_requested,
        why=_why(record, live),
    )


def _why(record: TaskRecord, live: set[int]) -> str:
    """In words, what a live task waits for."""
    state = record.state
    words: list[str] = []
    if isinstance(state, Waiting):
        if state.signal is not None:
            words.append(f"waits for the signal {state.signal!r}")
            if state.deadline is not None:
                words.append(f"until {_when(state.deadline)}")
        else:
            words.append("waits for task " + ", ".join(str(id) for id in state.on if id in live))
    elif isinstance(state, Sleeping):
        words.append(f"sleeps until {_when(state.until)}")
    elif record.status == "running":
        words.append("runs, or ran when its process ended")
    elif record.status == "pending":
        words.append("starts when a host with its code resumes")
    elif record.outcome is not None:
        words.append("has its outcome; work it owns is not done")
    if record.restarts:
        words.append(f"cut off {record.restarts} times")
    if record.abort_requested:
        words.append("to be aborted")
    return "; ".join(words)


def _submission(record: SubmissionRecord) -> SubmissionLine:
    return SubmissionLine(
        id=record.id,
        conversation=record.conversation_id,
        type=record.type,
        status=record.status,
        request_id=record.request_id,
        entry=record.entry,
    )


def _when(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("the last unit always fits")


def render(report: StoreReport, *, as_json: bool) -> None:
    """Print the report."""
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
        return
    console = Console()
    console.print(Text(report.path, style="bold"))
    console.print(
        f"format {report.format}, log {report.log_id}, epoch {report.epoch}, "
        f"{report.commits} commits, {_bytes(report.bytes)}",
        markup=False,
        highlight=False,
    )
    console.print(f"open in {report.holder}" if report.holder else "not open anywhere", markup=False, highlight=False)
    if report.mail:
        console.print(f"{report.mail} requests wait in the mailbox", highlight=False)
    if report.wake is not None:
        console.print(f"the earliest sleeper wakes at {_when(report.wake)}", highlight=False)
    _table(console, "Conversations", report.conversations, ConversationLine)
    _table(console, "Live tasks", report.tasks, TaskLine)
    _table(console, "Submissions queued or placed", report.submissions, SubmissionLine)
    if report.more:
        console.print("(there are more; only the first are listed)")


def _table(
    console: Console,
    title: str,
    lines: tuple[ConversationLine, ...] | tuple[TaskLine, ...] | tuple[SubmissionLine, ...],
    kind: type[msgspec.Struct],
) -> None:
    if not lines:
        console.print(f"{title}: none", highlight=False)
        return
    table = Table(title=title, title_justify="left")
    names = [name.replace("_", " ") for name in kind.__struct_fields__]
    for name in names:
        table.add_column(name)
    for line in lines:
        table.add_row(*(Text(_cell(value)) for value in structs.astuple(line)))
    console.print(table)


def _cell(value: object) -> str:
    if value is None or value is False:
        return ""
    return "yes" if value is True else str(value)
