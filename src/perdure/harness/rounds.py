"""A round of tools that is complete: as hooks are told of it (rules H126 and H226), and what its results ask of the run
(rules H104 to H106)."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from perdure.harness.context import missing_result
from perdure.harness.documents import ASSISTANT, RESET, TOOL_RESULT, AssistantData, Live, LiveRun
from perdure.harness.hooks import EndedCall, HookRound
from perdure.harness.host import Host
from perdure.harness.inbox import reset_content
from perdure.harness.messages import AssistantMessage, ToolResultMessage, decode_messages
from perdure.harness.runs import Answered, end_run
from perdure.kernel.records import EntryRecord, to_raw
from perdure.kernel.session import Session
from perdure.kernel.storage import MAX_SCAN
from perdure.kernel.transaction import Transaction


class RoundEnd(msgspec.Struct, frozen=True):
    """The results of a round end its run."""

    handoff: str | None
    """What the context begins with then; None: it goes on as it is."""


async def asks_control(tx: Transaction, conversation_id: int) -> bool:
    """Whether any result of the open round asks something of the run."""
    live = await tx.read(Live, conversation=conversation_id)
    return live is not None and live.run is not None and "control" in live.run


async def round_end(tx: Transaction, conversation_id: int, calls: Collection[int]) -> RoundEnd | None:
    """What the results of a complete round come to; what they asked for is over with that. None: the run goes on."""
    if not await asks_control(tx, conversation_id):
        return None
    live = await tx.draft(Live, conversation=conversation_id)
    assert live.run is not None, "the run lasts until its generation ends"
    end = end_asked_for(live.run, calls)
    del live.run["control"]
    return end


def end_asked_for(run: LiveRun, calls: Collection[int]) -> RoundEnd | None:
    """One handoff is enough; of several, all are handed over, in the order of the calls. Else all must terminate."""
    asked = {control["task"]: control["handoff"] for control in run.get("control", ()) if control["task"] in calls}
    handoffs = [handoff for _, handoff in sorted(asked.items()) if handoff is not None]
    if handoffs:
        return RoundEnd("\n\n".join(filter(None, handoffs)))
    return RoundEnd(None) if len(asked) == len(calls) else None


async def end_round(host: Host, tx: Transaction, conversation_id: int, end: RoundEnd, calls: Collection[int]) -> None:
    """End the run as its tools ask: its inputs are done with the answer that made the calls."""
    (answer,) = await tx.entries(conversation_id, first=min(calls), limit=1)
    assert answer.kind == ASSISTANT, "calls are created in the commit of their answer, right before it"
    if end.handoff is not None:
        messages = reset_content(end.handoff).messages
        tx.append_record(
            RESET, messages=to_raw(messages) if messages else None, conversation=conversation_id, head="self"
        )
    await end_run(host, tx, conversation_id, Answered(answer.id))


async def ended_round(
    session: Session, conversation_id: int, *, task: int, turn: int, calls: Collection[int]
) -> HookRound:
    """The round of a generation task whose call tasks are ``calls``. Reads what came since it began."""
    answer: EntryRecord | None = None
    results: dict[int, ToolResultMessage] = {}
    first = min(calls)  # they are created in the commit of their answer, before it
    while answer is None or len(results) < len(calls):
        page = await session.entries(conversation_id, first=first, limit=MAX_SCAN)
        for entry in page:
            if entry.kind == ASSISTANT:  # the only one since: the conversation's run waits for these calls
                answer = entry
            elif entry.kind == TOOL_RESULT and entry.by_task is not None and entry.by_task in calls:
                (message,) = decode_messages(entry.raw_messages)
                assert isinstance(message, ToolResultMessage), "that is what a result is"
                results[entry.by_task] = message
        if len(page) < MAX_SCAN:
            break
        first = page[-1].id + 1
    assert answer is not None, "calls are stored with their answer"
    (message,) = decode_messages(answer.raw_messages)
    assert isinstance(message, AssistantMessage), "that is what an answer is"
    ids = answer.data_as(AssistantData).calls
    ended = tuple(
        EndedCall(id=id, call=call, result=results.get(id) or missing_result(call))
        for id, call in zip(ids, message.tool_calls, strict=True)
    )
    return HookRound(id=task, conversation_id=conversation_id, turn=turn, calls=ended)
