"""What subagents promise: created once, answered once, aborted with their caller (rules H160 to H166)."""

from __future__ import annotations

from collections.abc import Iterator

from perdure.harness.documents import TOOL_RESULT, USER
from perdure.harness.messages import decode_messages
from perdure.testing.model import call, calls, say
from perdure.testing.normal import Records
from perdure.testing.scenarios.hosting import effects, ends, measure, open_harness, scenario
from perdure.testing.simulation import Host
from perdure.tools.subagents import subagent

ANSWERS = ["It is 7 there.", "Seven, too."]


async def subagents(host: Host) -> None:
    """Two agents at once for one question, each with a tool of its own; then the answer."""
    replies = {
        "Compare.": [
            calls(call("subagent", prompt="North?"), call("subagent", prompt="South?")),
            say("They are the same."),
        ],
        "North?": [call("measure", place="north", seconds=1), say(ANSWERS[0])],
        "South?": [call("measure", place="south"), say(ANSWERS[1])],
    }
    async with open_harness(host, replies, tools=[subagent(), measure(host)]) as (_, root):
        submission = await root.submit("Compare.", request_id="compare")
        assert (await submission.answer()).text == "They are the same."
        assert (await root.usage(deep=True)).turns == 6


def asked_once(records: Records) -> Iterator[str]:
    """At any moment: no call owns two conversations, and none was asked twice."""
    owners = [conversation.owner for conversation in records.conversations if conversation.owner is not None]
    if len(set(owners)) != len(owners):
        yield f"conversations are owned by tasks {owners}"
    for conversation in records.conversations:
        asked = [e for e in records.entries if e.conversation_id == conversation.id and e.kind == USER]
        if len(asked) > 1:
            yield f"conversation {conversation.id} was asked {len(asked)} times"


def told(records: Records) -> Iterator[str]:
    """Each answer came to the call that asked for it."""
    root = [entry for entry in records.of(TOOL_RESULT) if entry.conversation_id == 1]
    texts = [getattr(message, "text", "") for entry in root for message in decode_messages(entry.raw_messages)]
    if sorted(texts) != sorted(ANSWERS):
        yield f"the caller was told {texts}"


async def subagents_below(host: Host) -> None:
    """An agent below an agent, whose caller is no model but a tool."""
    replies = {
        "Delegate.": [call("subagent", prompt="Go on."), say("done")],
        "Go on.": [call("subagent", prompt="You do it."), say("passed on")],
        "You do it.": [call("measure", place="depth"), say("it is deep")],
    }
    async with open_harness(host, replies, tools=[subagent(), measure(host)]) as (_, root):
        await (await root.submit("Delegate.", request_id="delegate")).answer()


async def subagent_aborted(host: Host) -> None:
    """The one who asked is aborted while the agent is at work."""
    replies = {
        "Delegate.": [call("subagent", prompt="Go on."), say("never")],
        "Go on.": [call("measure", place="far", seconds=30), say("never")],
    }
    async with open_harness(host, replies, tools=[subagent(), measure(host)]) as (_, root):
        submission = await root.submit("Delegate.", request_id="delegate")
        await host.clock.sleep(3)
        await root.abort()
        await ends(submission, "aborted")


def nothing_goes_on_below(records: Records) -> Iterator[str]:
    """No work of a conversation outlives the task that owns the conversation (rule H162)."""
    tasks = {task.id: task for task in records.tasks}
    owners = {conversation.id: conversation.owner for conversation in records.conversations}
    for task in records.tasks:
        owner = owners[task.conversation_id]
        if task.live and owner is not None and not tasks[owner].live:
            yield f"{task.kind} task {task.id} goes on below task {owner}, which has ended"


SUBAGENTS = (
    scenario(subagents, safe=effects("measure north", "measure south"), always=asked_once, ends=told),
    scenario(subagents_below, safe=effects("measure depth"), always=asked_once),
    scenario(subagent_aborted, any_effects=True, always=nothing_goes_on_below, steady=False),
)
