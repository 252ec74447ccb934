"""``perdure inspect``: what a store says of itself, read without lock, fence or write (rules K159 and K160)."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import typer
from msgspec import structs
from rich.console import Console
from rich.table import Table
from rich.text import Text

from perdure.cli.asked import answer_words
from perdure.cli.compactions import compaction_lines
from perdure.cli.decided import decision_of, decision_words, question_words
from perdure.cli.deferred import WIDEST
from perdure.cli.exact import ascii_json, exact_json
from perdure.cli.secrets import Secrets
from perdure.cli.space.log import RecoveryLine, SpaceLine, space_lines
from perdure.cli.stores import storage_of
from perdure.cli.text import lines_of, one_line, printable, shortened, size, when
from perdure.harness.approval import APPROVAL
from perdure.harness.approvals import asked_of, question_of
from perdure.harness.deferral import Deferral
from perdure.harness.documents import GENERATION, Inbox, Live, Meta, ToolInput
from perdure.harness.person import ANSWER, QUESTION, open_question
from perdure.harness.scopes import TOOL_TASK
from perdure.kernel.errors import DocumentVersionError
from perdure.kernel.records import ConversationRecord, Pending, Sleeping, SubmissionRecord, TaskRecord, Waiting
from perdure.kernel.session import Session
from perdure.kernel.storage import MAX_SCAN
from perdure.storage.jsonl_compaction import taken
from perdure.storage.lock import Holder, read_holder
from perdure.tasks.alarm import due_at
from perdure.tasks.errors import ADVICE
from perdure.tasks.runtime import RESTART_LIMIT

MOST_CONVERSATIONS = 1000
MOST_SUBMISSIONS = 1000
MOST_TASKS = 1000
MOST_WORDS = 2000
"""Characters of what a person is asked."""

HolderState: TypeAlias = Literal["alive", "stopped", "ended", "unknown"]


NARROWEST = 100
"""Columns a table gets at least; a narrower terminal breaks its lines by itself."""
UNBROKEN = 100_000


class HolderLine(msgspec.Struct, frozen=True, kw_only=True):
    """Who opened the store last and has not closed it."""

    pid: int
    host: str
    since: int
    state: HolderState
    """stopped: it looks frozen, as Ctrl-Z, SIGSTOP and debuggers leave a process. ended: killed, or its machine was;
    what ran then goes on at the next open. unknown: it is on another host."""


class ConversationLine(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    busy: bool
    queued: int
    owner: int | None
    """The task it belongs to."""
    parent: int | None
    """The conversation it was forked from."""
    name: str | None
    compactions: str
    """In words, those on their way and the failure of the last one."""


class TaskLine(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    conversation: int
    owner: int | None
    """The task it belongs to; None: its conversation."""
    kind: str
    version: int
    tool: str | None
    """Whose call it is."""
    status: str
    phase: str | None
    restarts: int
    abort_requested: bool
    why: str
    """In words, why it is not at its end."""


class PersonLine(msgspec.Struct, frozen=True, kw_only=True):
    """What waits for a person."""

    task: int
    conversation: int
    tool: str
    wants: Literal["answer", "approval"]
    since: int
    until: int
    """ms UTC."""
    what: str
    """The question and what may be answered, or the arguments of the call: at most MOST_WORDS characters."""


class SubmissionLine(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    conversation: int
    type: str
    status: str
    entry: int | None
    request_id: str | None


Line: TypeAlias = ConversationLine | TaskLine | PersonLine | SubmissionLine | SpaceLine | RecoveryLine


class StoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--json`` prints. Times are ms UTC, sizes bytes."""

    path: str
    format: int
    log_id: str
    epoch: int
    writer: str
    commits: int
    bytes: int
    warnings: tuple[str, ...]
    """What others may do with its files that they should not."""
    holder: HolderLine | None
    """None: nobody has it open."""
    conversations: tuple[ConversationLine, ...]
    tasks: tuple[TaskLine, ...]
    """Live ones."""
    persons: tuple[PersonLine, ...]
    """What waits for a person now, the oldest first."""
    submissions: tuple[SubmissionLine, ...]
    """Queued and placed ones."""
    spaces: tuple[SpaceLine, ...]
    recoveries: tuple[RecoveryLine, ...]
    """How calls of the Spaces that were cut off went on, and what was restored; the oldest first."""
    mail: int
    """Requests from other processes that nobody has taken yet."""
    wake: int | None
    """When the next timer of a task is due, a sleep's or a wait's."""
    more: bool
    """There is more of something than is listed."""


async def look(path: Path) -> StoreReport:
    """Read a closed or a live store. Raises what opening it for reading raises."""
    storage = storage_of(path)
    async with Session.open(storage, read_only=True) as session:
        holder = holder_line(read_holder(f"{storage.path}.lock"))
        info = session.info
        page = await session.conversations(limit=MOST_CONVERSATIONS)
        conversations = [await _conversation(session, record) for record in page]
        tasks = sorted(session.live.settled.values(), key=lambda task: task.id)
        live = {task.id for task in tasks}
        queued = await session.submissions(status="queued", limit=MOST_SUBMISSIONS)
        placed = await session.submissions(status="placed", limit=MOST_SUBMISSIONS)
        spaces, recoveries = await space_lines(session)
        mail = await storage.mail(limit=MAX_SCAN)
        now = session.clock.wall()
        persons = [line for task in tasks if (line := _person(task, now)) is not None]
        timers = [at for task in tasks if not task.abort_requested and (at := due_at(task)) is not None]
        return StoreReport(
            path=str(path),
            format=info.format,
            log_id=info.log_id,
            epoch=info.epoch,
            writer=info.writer,
            commits=info.seq,
            bytes=_size(storage.path),
            warnings=info.warnings,
            holder=holder,
            conversations=tuple(conversations),
            tasks=tuple(_task(task, live, holder, now) for task in tasks[:MOST_TASKS]),
            persons=tuple(persons[:MOST_TASKS]),
            submissions=tuple(_submission(record) for record in sorted([*queued, *placed], key=lambda s: s.id)),
            spaces=tuple(spaces),
            recoveries=tuple(recoveries),
            mail=len(mail),
            wake=min(timers, default=None),
            more=len(page) == MOST_CONVERSATIONS
            or len(tasks) > MOST_TASKS
            or MOST_SUBMISSIONS in (len(queued), len(placed))
            or len(mail) == MAX_SCAN,
        )


def holder_line(holder: Holder | None) -> HolderLine | None:
    """Who a lock file names, and whether that process is still there."""
    if holder is None:
        return None
    state: HolderState
    if holder.host != socket.gethostname():
        state = "unknown"
    elif holder.gone or holder.boot_id != Path("/proc/sys/kernel/random/boot_id").read_text().strip():
        state = "ended"
    else:
        state = "stopped" if holder.stopped else "alive"
    return HolderLine(pid=holder.pid, host=holder.host, since=holder.since, state=state)


def _size(path: str) -> int:
    if os.path.isdir(path):
        return taken(path)
    total = 0
    for name in (path, f"{path}-wal"):
        with suppress(FileNotFoundError):
            total += os.stat(name).st_size
    return total


async def _conversation(session: Session, record: ConversationRecord) -> ConversationLine:
    try:
        live = await session.snapshot(Live, conversation=record.id)
        inbox = await session.snapshot(Inbox, conversation=record.id)
        meta = await session.snapshot(Meta, conversation=record.id)
    except DocumentVersionError:  # written by a newer release; the records beside it can still be told
        live = inbox = meta = None
    return ConversationLine(
        id=record.id,
        busy=live is not None and live.run is not None,
        queued=0 if inbox is None else len(inbox.items),
        owner=record.owner,
        parent=None if record.parent is None else record.parent.conversation,
        name=None if meta is None else meta.name,
        compactions="" if live is None else "; ".join(compaction_lines(live)),
    )


def _person(record: TaskRecord, now: int) -> PersonLine | None:
    """What a task wants of a person, if it can be given at that time (ms UTC)."""
    try:
        question, call = open_question(record, now), question_of(record, now)
    except msgspec.MsgspecError:  # written by a newer release
        return None
    if question is not None:
        answer = "" if question.schema == {"type": "string"} else f" (answer: {answer_words(question.schema)})"
        tool, wants, what = question.tool, "answer", f"{' '.join(lines_of(question.text))}{answer}"
    elif call is not None:
        tool, wants, what = call.tool, "approval", exact_json(call.arguments)
    else:
        return None
    asked = question or call
    assert asked is not None, "one of them is there"
    return PersonLine(
        task=record.id,
        conversation=record.conversation_id,
        tool=tool,
        wants=wants,
        since=asked.asked_at,
        until=asked.expires_at,
        what=shortened(what, MOST_WORDS),
    )


def _task(record: TaskRecord, live: set[int], holder: HolderLine | None, now: int) -> TaskLine:
    tool: str | None = None
    if record.kind == TOOL_TASK:
        with suppress(msgspec.MsgspecError):  # written by a newer release
            tool = msgspec.json.decode(record.raw_input, type=ToolInput).name
    return TaskLine(
        id=record.id,
        conversation=record.conversation_id,
        owner=record.owner,
        kind=record.kind,
        version=record.version,
        tool=tool,
        status=record.status,
        phase=getattr(record.state, "phase", None),
        restarts=record.restarts,
        abort_requested=record.abort_requested,
        why=_why(record, live, holder, now),
    )


def _why(record: TaskRecord, live: set[int], holder: HolderLine | None, now: int) -> str:
    state = record.state
    words: list[str] = []
    if isinstance(state, Waiting):
        if state.signal is not None:
            words += _signal(record, state, now)
        else:
            waited = [str(id) for id in state.on if id in live]
            words.append(f"waits for task{'s' if len(waited) > 1 else ''} {', '.join(waited)}")
    elif isinstance(state, Sleeping):
        words += _deferred(record, state)
        words.append(f"sleeps until {when(state.until)}")
    elif record.status == "running":
        words.append(_RUNNING["ended" if holder is None else holder.state])
    elif isinstance(state, Pending):
        words += _over(record, now)
        words.append("starts when a host with its code resumes")
    elif record.outcome is not None:
        words.append("has its outcome; work it owns is not done")
    if record.restarts:
        words.append(f"cut off {record.restarts} time{'s' if record.restarts > 1 else ''}")
    if record.restarts >= RESTART_LIMIT and not record.abort_requested:
        words.append(f"parked, unless its host allows more: {ADVICE['parked']}")
    if record.abort_requested:
        words.append("to be aborted")
    return "; ".join(words)


def _deferred(record: TaskRecord, state: Sleeping) -> list[str]:
    """Which response it polls, if it does."""
    if record.kind == GENERATION and state.phase == "poll":
        with suppress(msgspec.MsgspecError):  # written by a newer release
            at = msgspec.json.decode(state.raw_checkpoint, type=Deferral)
            handle = shortened(one_line(at.handle), WIDEST)
            return [f"{one_line(at.model)} makes the answer in the background: {handle}"]
    return []


def _signal(record: TaskRecord, state: Waiting, now: int) -> list[str]:
    over = _over(record, now)
    if over and not record.abort_requested:
        return over
    asks = {(TOOL_TASK, APPROVAL): "waits to be allowed or denied", (QUESTION, ANSWER): "waits to be answered"}
    wants = asks.get((record.kind, state.signal or ""), f"waits for the signal {state.signal!r}")
    return [wants] if state.deadline is None else [wants, f"until {when(state.deadline)}"]


def _over(record: TaskRecord, now: int) -> list[str]:
    """What a person has said, or that the time for it is over, while the task has not taken that up."""
    with suppress(msgspec.MsgspecError):  # written by a newer release
        if record.kind == QUESTION:
            words = question_words(record, now)
            return [] if words is None else [words.partition(";")[0]]
        decision, asked = decision_of(record), asked_of(record)
        if decision is not None:
            return [decision_words(decision)]
        return ["nobody decided in time"] if asked is not None and now >= asked.expires_at else []
    return []


_RUNNING: dict[HolderState, str] = {
    "alive": "runs",
    "stopped": "stands still with its process",
    "ended": "ran when its process ended",
    "unknown": "runs, or ran when its process ended",
}


def _submission(record: SubmissionRecord) -> SubmissionLine:
    return SubmissionLine(
        id=record.id,
        conversation=record.conversation_id,
        type=record.type,
        status=record.status,
        entry=record.entry,
        request_id=record.request_id,
    )


# --- printing --------------------------------------------------------------------------------------------------


def render(report: StoreReport, *, as_json: bool) -> None:
    """Print the report."""
    if as_json:
        typer.echo(msgspec.json.format(ascii_json(msgspec.json.encode(report))))
        return
    typer.secho(printable(report.path), bold=True)
    typer.echo(
        f"format {report.format}, log {report.log_id}, epoch {report.epoch}, "
        f"{report.commits} commits, {size(report.bytes)}"
    )
    typer.echo(_opened(report.holder, report.writer))
    for warning in report.warnings:
        typer.echo(printable(warning))
    if report.mail:
        typer.echo(f"requests in the mailbox: {report.mail}")
    if report.wake is not None:
        typer.echo(f"the next timer is due at {when(report.wake)}")
    console = console_for_tables()
    table(console, "conversations", report.conversations)
    table(console, "live tasks", report.tasks)
    if report.persons:
        table(console, "waits for a person: perdure questions, perdure approvals", report.persons)
    table(console, "submissions queued or placed", report.submissions)
    if report.spaces:
        table(console, "Spaces", report.spaces)
        table(console, "recoveries of Spaces", report.recoveries)
    if report.more:
        typer.echo("\nThere are more; only the first are listed.")


def _opened(holder: HolderLine | None, writer: str) -> str:
    if holder is None:
        return "not open"
    who = f"process {holder.pid} on {printable(holder.host)} since {when(holder.since)}"
    match holder.state:
        case "alive":
            return f"open in {who}, as writer {printable(writer)}"
        case "stopped":
            return (
                f"open in {who}, as writer {printable(writer)}; that process looks frozen: it is stopped, and goes on "
                f"with kill -CONT {holder.pid}"
            )
        case "ended":
            return f"not open; {who} had it open, and ended without closing it"
        case "unknown":
            return f"perhaps open in {who}, which cannot be seen from here"


def table(console: Console, title: str, lines: Sequence[Line]) -> None:
    """Columns in which nothing stands, or zero throughout, are left out."""
    console.print()
    if not lines:
        console.print(f"{title}: none")
        return
    console.print(title, style="bold")
    names = [name.replace("_", " ") for name in lines[0].__struct_fields__]
    rows = [[_cell(name, value) for name, value in structs.asdict(line).items()] for line in lines]
    shown = [index for index in range(len(names)) if any(row[index] for row in rows)]
    drawn = Table(box=None, padding=(0, 0, 0, 2), header_style="", show_edge=False)
    for index in shown:
        # In a narrow terminal only the last column, which explains, is folded.
        drawn.add_column(names[index], no_wrap=index != shown[-1], overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(row[index]) for index in shown))
    console.print(drawn)


def console_for_tables() -> Console:
    """As wide as the terminal, if that leaves room for a table; where there is none a line is a line, however long."""
    console = Console(highlight=False, markup=False, emoji=False)
    console.width = max(console.width, NARROWEST) if console.is_terminal else UNBROKEN
    return console


def _cell(name: str, value: object) -> str:
    if not value:
        return ""
    if name in ("at", "since", "until") and isinstance(value, int):
        return when(value)
    return "yes" if value is True else _secrets.hide(printable(str(value)))


_secrets = Secrets()
