"""A run that goes on after an answer: a hook says what a user would say next (rules H131 and H225)."""

from __future__ import annotations

from typing import Final

from perdure.harness.documents import Live
from perdure.harness.hooks import HookAnswer, OnYield
from perdure.harness.host import Host
from perdure.harness.inbox import Content, Placed, awaits_reset, place
from perdure.harness.messages import AssistantMessage
from perdure.kernel.records import to_raw
from perdure.kernel.reports import Report
from perdure.kernel.transaction import Transaction

MOST_CONTINUATIONS: Final = 50
"""How often hooks may continue one run; its next answer is final."""


async def next_words(
    host: Host, conversation_id: int, *, task: int, turn: int, message: AssistantMessage
) -> Content | None:
    """What hooks want said after a final answer; None: nothing. Not inside a transaction."""
    hooks = await host.hooks.applying(OnYield, conversation_id)
    if not hooks:
        return None
    live = await host.session.snapshot(Live, conversation=conversation_id)
    assert live is not None, "the run lasts until its generation ends"
    assert live.run is not None, "the run lasts until its generation ends"
    continued = live.run.get("continued", 0)
    if continued >= MOST_CONTINUATIONS:
        host.session.report(
            Report(
                type="continuations_exhausted",
                message=f"hooks on_yield continued a run {continued} times; its answer stands",
                task=task,
                kind=OnYield.task,
                conversation=conversation_id,
            )
        )
        return None
    asked = HookAnswer(id=task, conversation_id=conversation_id, turn=turn, continued=continued, message=message)
    return await host.hooks.on_yield(hooks, asked)


async def continue_run(
    host: Host, tx: Transaction, conversation_id: int, *, turn: int, words: Content
) -> Placed | None:
    """The final boundary of an answer, and the words behind it, if it placed no input and no reset: the run goes on,
    its inputs are open (rule H131). Else what was placed: the run ends."""
    resets = await awaits_reset(tx, conversation_id)
    placed = await place(tx, conversation_id, "final", host.settings)
    if resets or placed.inputs:
        return placed
    # The task's own words, not those of a user: the entry names it.
    tx.append_record(words.kind, messages=to_raw(words.messages), conversation=conversation_id)
    live = await tx.draft(Live, conversation=conversation_id)
    assert live.run is not None, "the run lasts until its generation ends"
    live.run["turn"] = turn
    live.run["continued"] = live.run.get("continued", 0) + 1
    return None
