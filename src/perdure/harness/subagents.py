"""Conversations that a call asks and waits for: its foreground subagents (rules H160 to H162, H349)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from perdure.harness.documents import Agent, Meta
from perdure.harness.inbox import input_content
from perdure.harness.submission import Submission

if TYPE_CHECKING:
    from perdure.harness.handle import ToolCall
    from perdure.harness.harness import Harness

LABEL: Final = "subagent"
"""The label of a subagent's conversation: which of the configured ones it is."""


async def ask_owned(call: ToolCall, prompt: str, *, agent: Agent, name: str) -> Submission:
    """Ask the conversation that the call owns, and create it if there is none: one commit, once.

    A rerun of the call finds the conversation by its owner, and the input by its request id. Raises RequestConflict if
    the call asked something else before, OwnerEnded if it is being aborted.
    """
    harness = call.harness
    owned = await harness.conversations(owner=call.id, limit=1, context=call.context)
    async with harness.session.commit(context=call.context) as tx:
        if owned:
            id = owned[0].id
        else:
            id = (await harness.create(tx, agent, owner=call.id)).id
            (await tx.draft(Meta, conversation=id)).labels = {LABEL: name}
        record = await harness.admit(tx, id, input_content(prompt), request_id=f"pi.subagent:{call.id}")
    return Submission(harness, record.id, id)


async def depth_of(harness: Harness, conversation_id: int, *, most: int) -> int:
    """How many tasks are above a conversation that own one on the way up to it; no more than ``most`` are looked at."""
    depth = 0
    while depth < most:
        conversation = await harness.session.conversation(conversation_id)
        owner = None if conversation is None or conversation.owner is None else conversation.owner
        task = None if owner is None else await harness.session.task(owner)
        if task is None:
            break
        depth, conversation_id = depth + 1, task.conversation_id
    return depth
