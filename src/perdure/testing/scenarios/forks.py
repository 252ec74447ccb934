"""What forking promises where work goes on: both go on, and neither knows of the other (rules K115 to K119)."""

from __future__ import annotations

from collections.abc import Iterator

from perdure.harness.conversation import Conversation
from perdure.harness.documents import ASSISTANT, TOOL_RESULT, USER, AssistantData
from perdure.harness.harness import Harness
from perdure.harness.messages import AssistantMessage, decode_messages
from perdure.kernel.records import ROOT_CONVERSATION
from perdure.testing.model import call, say
from perdure.testing.normal import Records
from perdure.testing.scenarios.hosting import effects, measure, open_harness, scenario
from perdure.testing.simulation import Host

_LOOKS = 1000
"""How often the run is looked at, a hundredth of a second apart, before it is said that it never asked for a tool."""


async def fork_in_mid_run(host: Host) -> None:
    """A fork at the entry that asks for a tool, made while the tool runs; a fork of that; all three go on."""
    replies = {
        "Measure.": [call("measure", place="sky", seconds=3), say("It is 7.")],
        "And?": say("I was cut off."),
        "So?": say("So it is."),
    }
    async with open_harness(host, replies, tools=[measure(host)]) as (harness, root):
        submission = await root.submit("Measure.", request_id="r")
        fork = await _forked(harness, root, await _asking(host, root))
        # The request id is the fork's own, and so is the run: nothing of the root's is waited for.
        answered = await fork.submit("And?", request_id="r")
        assert answered != submission
        assert (await answered.answer()).text == "I was cut off."
        deeper = await _forked(harness, fork, await _asking(host, fork))  # an entry the fork inherited
        assert (await (await deeper.submit("So?", request_id="r")).answer()).text == "So it is."
        assert (await submission.answer()).text == "It is 7."
        root_shows = await _said(root)
        assert root_shows == ["Measure.", "", "sky is 7", "It is 7."]
        assert await _said(fork) == ["Measure.", "", "And?", "I was cut off."], "what it shares, and its own"
        assert await _said(deeper) == ["Measure.", "", "So?", "So it is."]


async def _asking(host: Host, conversation: Conversation) -> int:
    """The entry that asks for the tool, once it is there."""
    for _ in range(_LOOKS):
        for entry in await conversation.entries():
            if entry.kind == ASSISTANT and entry.data_as(AssistantData).calls:
                return entry.id
        await host.clock.sleep(0.01)
    raise AssertionError("the model never answered")


async def _said(conversation: Conversation) -> list[str]:
    """The words of each entry, but for what a kill left of an answer on its way."""
    found: list[str] = []
    for entry in await conversation.entries():
        (message,) = decode_messages(entry.raw_messages)
        if not isinstance(message, AssistantMessage) or message.stop_reason != "aborted":
            found.append(message.text)
    return found


async def _forked(harness: Harness, parent: Conversation, at: int) -> Conversation:
    """The fork of that conversation, made in this life or an earlier one."""
    for info in await harness.conversations():
        if info.record.parent is not None and info.record.parent.conversation == parent.id:
            return harness.handle(info.id)
    return await parent.fork(at)


def nothing_inherited(records: Records) -> Iterator[str]:
    """Each conversation has the tasks, submissions and entries of its own run alone."""
    forks = [record for record in records.conversations if record.parent is not None]
    for fork in forks:
        own = [entry for entry in records.entries if entry.conversation_id == fork.id]
        # None of its own before its first answer is stored.
        if len([entry for entry in own if entry.kind == USER]) > 1 or any(entry.kind == TOOL_RESULT for entry in own):
            yield f"fork {fork.id} has entries that are another's"
        if len([each for each in records.submissions if each.conversation_id == fork.id]) > 1:
            yield f"fork {fork.id} has submissions that are another's"
        kinds = [task.kind for task in records.tasks if task.conversation_id == fork.id]
        if len(kinds) > 1:
            yield f"fork {fork.id} has the tasks {kinds}"
    results = [entry for entry in records.entries if entry.kind == TOOL_RESULT]
    if any(entry.conversation_id != ROOT_CONVERSATION for entry in results):
        yield "a result was written where its call does not run"


FORKS = (scenario(fork_in_mid_run, safe=effects("measure sky"), always=nothing_inherited, steady=False),)
"""Of forks."""
