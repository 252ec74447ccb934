"""Persistent subagents: conversations that stay, beside the one that began them (rules H163 to H165, H352 to H356).

A background task, the anchor (``pi.subagent``), owns the conversation until it is stopped. Each message to it is a
background task of the parent's (``pi.message``): it waits, durably, until the message has ended, and then tells the
parent, as an input. Both go on after a restart wherever they stand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import structs

from perdure.harness.documents import Agent, Live, Meta
from perdure.harness.host import Host
from perdure.harness.inbox import InboxFull, InputMode, input_content
from perdure.harness.messages import AssistantMessage, decode_messages
from perdure.harness.runs import final_boundary
from perdure.harness.subagents import LABEL
from perdure.kernel.context import Context
from perdure.kernel.errors import NotFound, PerdureError
from perdure.kernel.json import JsonValue
from perdure.kernel.records import Completing, Pending, SubmissionRecord, TaskRecord, Terminal, from_raw, to_raw
from perdure.kernel.transaction import Transaction
from perdure.tasks.definition import Next, Task
from perdure.tasks.errors import TaskEnded
from perdure.tasks.run import Run
from perdure.tasks.transaction import RunTransaction
from perdure.tasks.values import stored_value, with_value

if TYPE_CHECKING:
    from perdure.harness.handle import ToolCall
    from perdure.harness.harness import Harness

ANCHOR: Final = "pi.subagent"
MESSAGE: Final = "pi.message"
STOP: Final = "pi.stop"
"""The signal that stops one: of this name, to the anchor."""
MOST: Final = 32
"""Persistent subagents of one conversation, at once."""
LATER_MS: Final = 10_000
"""When a report is tried again that its parent had no room for."""
STOPPED: Final = "the subagent was stopped"


class SubagentRefused(PerdureError):
    """There is no such persistent subagent, or there is one already, or too many."""


class AnchorInput(msgspec.Struct, frozen=True, kw_only=True):
    name: str


class MessageInput(msgspec.Struct, frozen=True, kw_only=True):
    anchor: int
    conversation: int
    """The subagent's."""
    name: str
    report: InputMode
    """How the answer is put to the parent."""


class PersistentSubagent(msgspec.Struct, frozen=True, kw_only=True):
    """One that was begun and not stopped."""

    id: int
    """Its anchor's: what a stop names, so that a late one stops no other of the same name."""
    name: str
    """As its parent calls it."""
    parent: int
    """The conversation that began it."""
    conversation: int
    """Its own."""
    busy: bool
    """Whether a run goes on in it."""


class AnchorTask(Task[AnchorInput, None], kind=ANCHOR, version=1, builtin=True):
    """Owns a subagent's conversation until it is told to stop. Background: the parent's ordinary abort stops at it."""

    async def start(self, run: Run[AnchorInput, None, int]) -> Next[None]:
        """The checkpoint is the conversation, from the beginning on."""
        async with run.commit() as tx:
            return tx.wait_signal(STOP, self.stop, run.checkpoint)

    async def stop(self, run: Run[AnchorInput, None, int]) -> Next[None]:
        async with run.commit() as tx:
            tx.abort_owned(STOPPED)
            return tx.complete(None)  # and what is queued ends with it (rule H357)


class MessageTask(Task[MessageInput, None], kind=MESSAGE, version=1, builtin=True):
    """Waits until a message has ended, and puts what came of it to the parent, once: by its request id."""

    def __init__(self, harness: Harness, host: Host) -> None:
        self._harness = harness
        self._host = host

    async def start(self, run: Run[MessageInput, None, int | None]) -> Next[None]:
        """Look; and wait for the run that is in the way, which need not be the message's own."""
        try:
            async with run.commit() as tx:
                return await self._look(run, tx)
        except InboxFull:
            async with run.commit() as tx:
                return tx.sleep(tx.at + LATER_MS, self.start, (run.checkpoint or 0) + 1)

    async def _look(self, run: Run[MessageInput, None, int | None], tx: RunTransaction[None]) -> Next[None]:
        input = run.input
        sent = await tx.request(input.conversation, _request(run.id))
        assert sent is not None, "it was admitted in the commit that created this task"
        anchor = tx.live_task(input.anchor)
        stopped = anchor is None or _stopping(anchor)
        round = (run.checkpoint or 0) + 1
        if sent.settled:
            if not stopped:  # else whoever stopped it knows
                words = await self._words(tx, input.name, sent)
                await self._harness.admit(
                    tx,
                    run.conversation_id,
                    input_content(words),
                    mode=input.report,
                    request_id=f"pi.report:{run.id}",
                )
            return tx.complete(None)
        if stopped:
            return tx.wait([input.anchor], self.start, round)  # the message ends with it, and is not begun (rule H357)
        live = await tx.read(Live, conversation=input.conversation)
        if live is None or live.run is None:
            # A run that failed left it in the queue: each message is asked all the same (rule H354).
            await final_boundary(self._host, tx, input.conversation)
            live = await tx.read(Live, conversation=input.conversation)
        if live is None or live.run is None:
            return tx.go(self.start, round)  # what was placed ended at once; or this one did
        return tx.wait([live.run["task"]], self.start, round)

    async def _words(self, tx: Transaction, name: str, sent: SubmissionRecord) -> str:
        if sent.answer is None:
            why = f"{sent.reason}: {sent.detail}" if sent.detail else sent.reason
            return f"[The subagent {name!r} gave no answer ({why}).]"
        (entry,) = await tx.entries(sent.conversation_id, first=sent.answer, last=sent.answer, limit=1)
        message = decode_messages(entry.raw_messages)[-1]
        assert isinstance(message, AssistantMessage), "an answer is an assistant's"
        return f"[The subagent {name!r} answers:]\n{message.text}"


# --- by the parent's tools ---------------------------------------------------------------------------------------


async def begin(call: ToolCall, name: str, prompt: str, *, agent: Agent, kind: str, report: InputMode) -> int:
    """Begin one with its first message; a rerun of the call finds it. Returns its conversation.

    Raises SubagentRefused.
    """
    harness = call.harness
    async with harness.session.commit(conversation_id=call.conversation_id, context=call.context) as tx:
        known = _known(tx, call, ANCHOR)
        if known is None:
            if (await tx.conversation(call.conversation_id)).owner is not None:
                # It would outlive what it belongs to.
                raise SubagentRefused("This conversation belongs to a task itself, and begins no agents that stay.")
            there = running(harness, call.conversation_id, tx.live_task)
            if any(other.name == name for other in there):
                raise SubagentRefused(f"There is a subagent named {name!r} already: send it a message.")
            if len(there) >= MOST:
                raise SubagentRefused(f"There are {MOST} subagents already. Stop one first.")
            anchor = tx.create_task(AnchorTask, AnchorInput(name=name), background=True)
            known = (await harness.create(tx, agent, owner=anchor.id)).id
            tx.put_task(structs.replace(anchor, state=Pending(phase="start", raw_checkpoint=to_raw(known))))
            meta = await tx.draft(Meta, conversation=known)
            meta.name, meta.labels = name, {LABEL: kind}
            await _send(tx, harness, anchor.id, known, name, prompt, report)
            _remember(tx, call, ANCHOR, known)
    assert isinstance(known, int), "it was written here"
    return known


async def send(call: ToolCall, name: str, prompt: str, *, report: InputMode) -> None:
    """A message to one; a rerun of the call sends no second. Raises SubagentRefused, InboxFull."""
    harness = call.harness
    async with harness.session.commit(conversation_id=call.conversation_id, context=call.context) as tx:
        if _known(tx, call, MESSAGE) is None:
            found = find(running(harness, call.conversation_id, tx.live_task), name)
            await _send(tx, harness, found.id, found.conversation, name, prompt, report)
            _remember(tx, call, MESSAGE, found.id)


async def stop_by(call: ToolCall, name: str) -> None:
    """Stop one, and return once it has ended; a rerun of the call stops no other of that name.

    Raises SubagentRefused.
    """
    harness = call.harness
    async with harness.session.commit(conversation_id=call.conversation_id, context=call.context) as tx:
        known = _known(tx, call, STOP)
        if known is None:
            known = find(running(harness, call.conversation_id, tx.live_task), name).id
            await harness.tasks.put_signal(tx, known, STOP, None)
            _remember(tx, call, STOP, known)
    assert isinstance(known, int), "it was written here"
    await harness.tasks.wait(known, through_blocked=True, context=call.context)


async def _send(
    tx: Transaction, harness: Harness, anchor: int, conversation: int, name: str, prompt: str, report: InputMode
) -> None:
    input = MessageInput(anchor=anchor, conversation=conversation, name=name, report=report)
    task = tx.create_task(MessageTask, input, background=True)
    await harness.admit(tx, conversation, input_content(prompt), request_id=_request(task.id))


# --- by anybody --------------------------------------------------------------------------------------------------


def running(
    harness: Harness, parent: int | None = None, look: Callable[[int], TaskRecord | None] | None = None
) -> list[PersistentSubagent]:
    """Those that were begun and not stopped, of a conversation or of all. ``look``: as a transaction sees tasks."""
    settled, tree = harness.session.live.settled, harness.tasks.tree
    look = look or settled.get
    found: list[PersistentSubagent] = []
    for id in sorted(harness.session.live.staged.keys() | settled.keys()):
        record = look(id)
        if record is None or record.kind != ANCHOR or parent not in (None, record.conversation_id):
            continue
        state = record.state
        if isinstance(state, (Completing, Terminal)) or _stopping(record):
            continue
        found.append(
            PersistentSubagent(
                id=id,
                name=msgspec.json.decode(record.raw_input, type=AnchorInput).name,
                parent=record.conversation_id,
                conversation=msgspec.json.decode(state.raw_checkpoint, type=int),
                busy=tree.owns_live(id, look),
            )
        )
    return found


def find(there: list[PersistentSubagent], name: str) -> PersistentSubagent:
    for subagent in there:
        if subagent.name == name:
            return subagent
    names = ", ".join(repr(subagent.name) for subagent in there) or "none"
    raise SubagentRefused(f"There is no subagent named {name!r}. There are: {names}.")


async def stop(harness: Harness, id: int, *, parent: int, context: Context | None = None) -> None:
    """Stop one, by its anchor's id; what goes on in it is aborted. Returns once it has ended. Raises NotFound."""
    record = await harness.session.task(id, context=context)
    if record is None or record.kind != ANCHOR or record.conversation_id != parent:
        raise NotFound(f"conversation {parent} has begun no persistent subagent {id}")
    try:
        await harness.send_signal(id, STOP, None, context=context)
    except TaskEnded:
        return
    await harness.tasks.wait(id, through_blocked=True, context=context)


async def quiet(harness: Harness, *, through_blocked: bool, context: Context | None) -> None:
    """Return when nothing goes on but that subagents wait for messages: every answer has been told and dealt with."""
    while True:
        await harness.tasks.idle(through_blocked=through_blocked, context=context)
        live = harness.session.live.settled.values()
        messages = [record.id for record in live if record.kind == MESSAGE]
        busy = [subagent.conversation for subagent in running(harness) if subagent.busy]
        if not messages and not busy:
            return
        for id in messages:
            await harness.tasks.wait(id, through_blocked=through_blocked, context=context)
        for id in busy:
            await harness.tasks.idle(id, through_blocked=through_blocked, context=context)


def _stopping(anchor: TaskRecord) -> bool:
    ending = anchor.abort_requested or isinstance(anchor.state, Completing)
    return ending or stored_value(anchor.raw_signals, STOP) is not None


def _request(message: int) -> str:
    return f"pi.message:{message}"


def _known(tx: Transaction, call: ToolCall, what: str) -> JsonValue:
    """What an earlier run of the call wrote in the commit that did it."""
    record = tx.live_task(call.id)
    if record is None or record.abort_requested:
        raise SubagentRefused("The call has ended.")
    value = stored_value(record.raw_memos, what)
    return None if value is None else from_raw(value)


def _remember(tx: Transaction, call: ToolCall, what: str, value: JsonValue) -> None:
    record = tx.live_task(call.id)
    assert record is not None, "it was looked at"
    memos = with_value(record.raw_memos, what, to_raw(value))
    assert memos is not None, "nothing of that name was there"
    tx.put_task(structs.replace(record, raw_memos=memos))
