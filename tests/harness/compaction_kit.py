"""What tests of compaction share: models with small windows that write summaries, and looking at contexts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from perdure.harness.compaction_policy import Compaction
from perdure.harness.conversation import Conversation
from perdure.harness.documents import COMPACTION, CompactionData, Live
from perdure.harness.harness import Harness
from perdure.harness.messages import Message, SystemMessage, Usage, UserMessage
from perdure.harness.model import ModelRequest
from perdure.harness.summary import PREAMBLE, TASK
from perdure.kernel.records import EntryRecord
from perdure.testing.model import Reply, ScriptedModel, say

UNTOLD = Usage()
WINDOW = 4_000
"""Tokens: by default 1,000 are reserved, 1,000 stay, and a background compaction begins above 2,000."""
LONG = "word " * 300
"""Some 375 tokens."""
SUMMARY = "The goal is to test. Nothing else is known."


BLOCKING = Compaction(background_tokens=0)
"""Whatever is compacted, the run waits for it."""


def asks_for_summary(request: ModelRequest) -> bool:
    first = request.messages[0]
    return isinstance(first, SystemMessage) and first.text == TASK


def model(
    script: Callable[[ModelRequest], Reply] | None = None,
    *,
    summary: Callable[[ModelRequest], Reply] | None = None,
    window: int = WINDOW,
    **more,
) -> ScriptedModel:
    """One that answers by ``script`` ("ok" without one), and gives summaries."""

    def reply(request: ModelRequest) -> Reply:
        if asks_for_summary(request):
            return summary(request) if summary is not None else say(SUMMARY, usage=UNTOLD)
        return script(request) if script is not None else say("ok", usage=UNTOLD)

    return ScriptedModel(reply, context_window=window, max_output=2_000, **more)


Pace: TypeAlias = Callable[[ModelRequest, int], Awaitable[None]]


def held(hold: Pace, *, at: str = "hold") -> Pace:
    """Holds what answers to that text."""

    async def pace(request: ModelRequest, event: int) -> None:
        if texts(request.messages)[-1] == at:
            await hold(request, event)

    return pace


def summary_held(hold: Pace) -> Pace:
    """Holds the summaries, and nothing else."""

    async def pace(request: ModelRequest, event: int) -> None:
        if asks_for_summary(request):
            await hold(request, event)

    return pace


def summaries(scripted: ScriptedModel) -> list[ModelRequest]:
    return [request for request in scripted.requests if asks_for_summary(request)]


def turns(scripted: ScriptedModel) -> list[ModelRequest]:
    return [request for request in scripted.requests if not asks_for_summary(request)]


async def fill(root: Conversation, times: int, text: str = LONG) -> None:
    """So many turns with long inputs, without a compaction."""
    await root.set_compaction(enabled=False)
    for _ in range(times):
        await (await root.submit(text)).wait()
    await root.set_compaction(enabled=None)


async def compactions(conversation: Conversation) -> list[EntryRecord]:
    return [entry for entry in await conversation.entries(limit=1000) if entry.kind == COMPACTION]


def data_of(entry: EntryRecord) -> CompactionData:
    return entry.data_as(CompactionData)


async def failure(conversation: Conversation) -> tuple[str, str] | None:
    found = await conversation._harness.session.snapshot(Live, conversation=conversation.id)
    shown = None if found is None else found.compaction_failure
    return None if shown is None else (shown["reason"], shown["code"])


async def context(harness: Harness, conversation: Conversation) -> Sequence[Message]:
    newest = (await conversation.entries(order="descending", limit=1))[0]
    return await harness._host.contexts.messages(conversation.id, newest.id)


def texts(messages: Sequence[Message]) -> list[str]:
    return [message.text for message in messages if not isinstance(message, SystemMessage)]


def has_summary(messages: Sequence[Message]) -> bool:
    return any(isinstance(message, UserMessage) and message.text.startswith(PREAMBLE) for message in messages)
