"""What subagents promise: created once, answered once, aborted with their caller (rules H160 to H166)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from perdure.harness.documents import TOOL_RESULT, USER
from perdure.harness.messages import AssistantMessage, ToolResultMessage, UserMessage, decode_messages
from perdure.harness.tool import AnyTool
from perdure.tasks.errors import OwnerEnded
from perdure.testing.model import call, calls, fail, say
from perdure.testing.normal import Records
from perdure.testing.scenarios.hosting import effects, ends, measure, open_harness, scenario
from perdure.testing.simulation import Host
from perdure.tools.subagents import persistent_subagents, subagent

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


async def subagent_out_of_time(host: Host) -> None:
    """The call that asks takes longer than it may: the agent is aborted with it, and the model goes on."""
    replies = {
        "Delegate.": [call("subagent", prompt="Go on."), say("without it, then")],
        "Go on.": [call("measure", place="far", seconds=30), say("never")],
    }
    tools = [subagent(timeout_ms=5_000), measure(host)]
    async with open_harness(host, replies, tools=tools) as (_, root):
        submission = await root.submit("Delegate.", request_id="delegate")
        assert (await submission.answer()).text == "without it, then"


async def subagent_spoken_to(host: Host) -> None:
    """Somebody speaks to the agent while it is at work, and whoever asked it is aborted: all that was said ends."""
    replies = {
        "Delegate.": [call("subagent", prompt="Go on."), say("never")],
        "Go on.": [call("measure", place="far", seconds=30), say("never")],
    }
    async with open_harness(host, replies, tools=[subagent(), measure(host)]) as (harness, root):
        submission = await root.submit("Delegate.", request_id="delegate")
        await host.clock.sleep(3)
        for below in await harness.conversations():
            if below.record.owner is not None:
                with suppress(OwnerEnded):  # by the abort of an earlier process
                    await harness.handle(below.id).submit("And this.", request_id="this")
        await root.abort()
        await ends(submission, "aborted")


REPORT = "[The subagent 'w' answers:]\n"
STAYING = {
    "Begin.": [call("start_agent", name="w", prompt="Work."), say("begun")],
    "Work.": [call("measure", place="field", seconds=1), say("worked")],
    f"{REPORT}worked": say("noted"),
    "More.": [call("message_agent", name="w", prompt="Again."), say("sent")],
    "Again.": say("worked again"),
    f"{REPORT}worked again": say("noted again"),
    "Stop.": [call("stop_agent", name="w"), say("stopped")],
    "Long.": [call("start_agent", name="w", prompt="Long work."), say("begun")],
    "Long work.": [call("measure", place="far", seconds=100), say("never")],
}
"""What parent and subagent say, by what they are told."""


def staying(host: Host) -> list[AnyTool]:
    return [*persistent_subagents(report="follow_up"), measure(host)]


async def persistent_subagent(host: Host) -> None:
    """Begun, answered, told again, answered again, stopped; each answer comes back once."""
    async with open_harness(host, STAYING, tools=staying(host)) as (harness, root):
        for words in ("Begin.", "More.", "Stop."):
            await (await root.submit(words, request_id=words)).answer()
            await harness.idle(background=True)
        assert root.subagents() == []


def said_to_the_parent(records: Records) -> list[str]:
    return [
        getattr(message, "text", "")
        for entry in records.of(USER)
        if entry.conversation_id == 1
        for message in decode_messages(entry.raw_messages)
    ]


def told_once(records: Records) -> Iterator[str]:
    """At any moment: no report was put to the parent twice, and none is there without its answer."""
    reports = [text for text in said_to_the_parent(records) if text.startswith(REPORT)]
    if len(set(reports)) != len(reports):
        yield f"the parent was told {reports}"


SAID = (
    *("Begin.", "'w' is at work. What it answers will be told.", "begun", f"{REPORT}worked", "noted"),
    *("More.", "Sent.", "sent", f"{REPORT}worked again", "noted again"),
    *("Stop.", "Stopped.", "stopped"),
)


def said_in_order(records: Records) -> Iterator[str]:
    """The parent's transcript, without its calls and what a crash broke off: a call that is run again has the same
    result."""
    said = [
        message.text
        for entry in records.entries
        if entry.conversation_id == 1
        for message in decode_messages(entry.raw_messages)
        if isinstance(message, UserMessage | ToolResultMessage)
        or (isinstance(message, AssistantMessage) and message.stop_reason == "stop" and message.text)
    ]
    if tuple(said) != SAID:
        yield f"it was said {said}"


NO_ANSWER = "[The subagent 'w' gave no answer (model_error: malformed: on purpose).]"


async def persistent_after_a_failure(host: Host) -> None:
    """The model fails at a message while the next one waits: the parent is told, and the next one is asked."""
    begin, more = call("start_agent", name="w", prompt="Break."), call("message_agent", name="w", prompt="Again.")
    replies = {
        **STAYING,
        "Begin twice.": [begin, more, say("begun")],
        "Break.": [call("measure", place="field", seconds=3), fail("malformed", "on purpose")],
        NO_ANSWER: say("a pity"),
    }
    async with open_harness(host, replies, tools=staying(host)) as (harness, root):
        await (await root.submit("Begin twice.", request_id="begin")).answer()
        await harness.idle(background=True)


def told_both(records: Records) -> Iterator[str]:
    """What came of each message, in any order."""
    told = [text for text in said_to_the_parent(records) if text.startswith("[")]
    if sorted(told) != sorted([NO_ANSWER, f"{REPORT}worked again"]):
        yield f"the parent was told {told}"


async def persistent_past_an_abort(host: Host) -> None:
    """The parent is aborted while the subagent works: that goes on, and its answer comes."""
    async with open_harness(host, STAYING, tools=staying(host)) as (harness, root):
        await (await root.submit("Begin.", request_id="begin")).wait()
        await root.abort()
        await harness.idle(background=True)
        assert len(root.subagents()) == 1
        assert len(harness.subagents()) == 1


async def persistent_past_a_fork(host: Host) -> None:
    """The parent is forked while the subagent works: the fork has none, and is told nothing of what comes of it."""
    replies = {**STAYING, "Who is there?": [call("list_agents"), say("nobody")]}
    async with open_harness(host, replies, tools=staying(host)) as (harness, root):
        begun = await (await root.submit("Begin.", request_id="begin")).answer()
        forks = [other.id for other in await harness.conversations() if other.record.parent is not None]
        fork = harness.handle(forks[0]) if forks else await root.fork(begun.entry.id)
        assert (await (await fork.submit("Who is there?", request_id="who")).answer()).text == "nobody"
        await harness.idle(background=True)
        assert (len(root.subagents()), fork.subagents()) == (1, [])


def told_the_parent_alone(records: Records) -> Iterator[str]:
    """What the fork itself was told."""
    (fork,) = [conversation.id for conversation in records.conversations if conversation.parent is not None]
    own = [entry for kind in (USER, TOOL_RESULT) for entry in records.of(kind) if entry.conversation_id == fork]
    texts = [getattr(message, "text", "") for entry in own for message in decode_messages(entry.raw_messages)]
    if texts != ["Who is there?", "None."]:
        yield f"the fork was told {texts}"


async def persistent_aborted_too(host: Host) -> None:
    """The parent is aborted with all that stays: nothing goes on, and nothing is told."""
    async with open_harness(host, STAYING, tools=staying(host)) as (harness, root):
        await (await root.submit("Long.", request_id="long")).wait()
        await host.clock.sleep(2)
        await root.abort(background=True)
        assert root.subagents() == []
        assert not harness.session.live.settled


async def persistent_stopped_by_the_host(host: Host) -> None:
    """The host stops one in the middle of its work, with a message waiting: it returns when nothing of it goes on."""
    async with open_harness(host, STAYING, tools=staying(host)) as (harness, root):
        await (await root.submit("Long.", request_id="long")).wait()
        await (await root.submit("More.", request_id="more")).wait()
        await host.clock.sleep(2)
        for subagent in root.subagents():
            await root.stop_subagent(subagent.id)
        await harness.idle(background=True)
        assert not harness.session.live.settled


def told_nothing(records: Records) -> Iterator[str]:
    """Whoever stopped it is not told so by it, and what waited is not asked any more."""
    if any("Again." in str(entry.messages) for entry in records.of(USER)):
        yield "a subagent that was stopped was asked one thing more"
    if any(REPORT[:15] in str(entry.messages) for entry in records.of(USER)):
        yield "the parent was told of a subagent that was stopped"


SUBAGENTS = (
    scenario(subagents, safe=effects("measure north", "measure south"), always=asked_once, ends=told),
    scenario(subagents_below, safe=effects("measure depth"), always=asked_once),
    scenario(subagent_aborted, always=nothing_goes_on_below, steady=False),
    scenario(subagent_out_of_time, always=nothing_goes_on_below, steady=False),
    scenario(subagent_spoken_to, always=nothing_goes_on_below, steady=False),
    scenario(
        persistent_subagent,
        safe=effects("measure field"),
        always=told_once,
        ends=said_in_order,
        steady=False,  # whether a report had to wait for a run's end is a matter of time
    ),
    scenario(
        persistent_after_a_failure,
        safe=effects("measure field"),
        always=told_once,
        ends=told_both,
        steady=False,
        may_live=effects("pi.subagent"),
    ),
    scenario(
        persistent_past_an_abort, any_effects=True, always=told_once, steady=False, may_live=effects("pi.subagent")
    ),
    scenario(
        persistent_past_a_fork,
        any_effects=True,
        always=told_once,
        ends=told_the_parent_alone,
        steady=False,
        may_live=effects("pi.subagent"),
    ),
    scenario(persistent_aborted_too, always=nothing_goes_on_below, ends=told_nothing, steady=False),
    scenario(
        persistent_stopped_by_the_host,
        always=nothing_goes_on_below,
        ends=told_nothing,
        steady=False,
    ),
)
