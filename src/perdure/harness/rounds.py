"""A round of tools that is complete, as hooks are told of it (rules H126 and H226)."""

from __future__ import annotations

from collections.abc import Collection

from perdure.harness.context import missing_result
from perdure.harness.documents import ASSISTANT, TOOL_RESULT, AssistantData
from perdure.harness.hooks import EndedCall, HookRound
from perdure.harness.messages import AssistantMessage, ToolResultMessage, decode_messages
from perdure.kernel.records import EntryRecord
from perdure.kernel.session import Session
from perdure.kernel.storage import MAX_SCAN


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
