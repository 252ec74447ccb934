"""What the harness promises: runs, tools, the queue, retries, aborts (chapter 3 of the rules).

The models are scripts, so that what they say depends on the request alone; what they are asked takes some virtual
time, so that partial answers are committed and a kill may come between two of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager

from perdure.harness.conversation import Conversation
from perdure.harness.documents import TOOL_RESULT, USER, Live
from perdure.harness.handle import ToolCall
from perdure.harness.harness import Harness
from perdure.harness.hooks import Block, Hook, HookCall, after_tool, before_tool
from perdure.harness.inbox import input_content
from perdure.harness.messages import ToolResultMessage, UserMessage, decode_messages
from perdure.harness.model import ModelRequest
from perdure.harness.registry import Extension
from perdure.harness.settings import RetryPolicy
from perdure.harness.submission import Submission, Unanswered
from perdure.harness.tool import AnyTool, ToolResult, tool
from perdure.kernel.document import Document
from perdure.kernel.entries import Entry
from perdure.kernel.errors import NotFound
from perdure.kernel.json import JsonValue
from perdure.kernel.records import ROOT_CONVERSATION
from perdure.testing.model import Reply, Script, ScriptedModel, call, calls, fail, say
from perdure.testing.normal import Records, Rules
from perdure.testing.simulation import Host, Scenario

STORY = (
    "Once upon a time there was a process that was killed at every line, and told its story to the end all the same. "
)

Replies = Script | Sequence[Reply] | Mapping[str, Reply | Sequence[Reply]] | Reply


class Remark(Entry, kind="app.remark"):
    """A note for people; no model reads it."""

    text: str


class Fact(Entry, kind="app.fact"):
    """Something the model is told without being asked."""

    text: str

    def messages(self) -> Sequence[JsonValue]:
        return [{"role": "user", "content": [{"type": "text", "text": self.text}]}]


class Tally(Document, kind="app.tally", scope="conversation"):
    """What an application counts beside its conversation."""

    notes: int = 0


@asynccontextmanager
async def open_harness(
    host: Host,
    replies: Replies | None,
    *,
    tools: Sequence[AnyTool] = (),
    hooks: Sequence[Hook] = (),
    per_event: float = 0.06,
    retry: RetryPolicy | None = None,
) -> AsyncGenerator[tuple[Harness, Conversation]]:
    """A harness on the host with a scripted model (None: without models), and its root conversation."""

    async def pace(_request: ModelRequest, _number: int) -> None:
        await host.clock.sleep(per_event)

    model = None if replies is None else ScriptedModel(replies, pace=pace)
    async with Harness.open(
        host.storage,
        models=model,
        extensions=[Extension("scenario", tools=tools, hooks=hooks)],
        retry=retry,
        clock=host.clock,
        entropy=host.entropy,
        on_report=host.report,
    ) as harness:
        harness.session.observe(lambda settled: host.heard(settled.seq))
        yield harness, await harness.root()


def user_texts(request: ModelRequest) -> list[str]:
    return [message.text for message in request.messages if isinstance(message, UserMessage)]


async def ends(submission: Submission, reason: str) -> None:
    """Wait for an input that must end unanswered for this reason."""
    try:
        await submission.answer()
    except Unanswered as error:
        if error.reason != reason:
            raise
    else:
        raise AssertionError(f"submission {submission.id} was answered, and should have ended {reason}")


# --- tools -----------------------------------------------------------------------------------------------------


def measure(host: Host, *, sequential: bool = False) -> AnyTool:
    """A safe tool: it may run again, and what it does outside it does by its key."""

    @tool(name="measure", replay="safe", sequential=sequential)
    async def measure(place: str, call: ToolCall, seconds: int = 0) -> ToolResult:
        """Measure a place."""
        for part in range(seconds):
            call.output(f"{place}: {part}\n")
            call.details({"part": part})
            await host.clock.sleep(1)
        host.effect(f"measure {place}", key=call.idempotency_key)
        return ToolResult(f"{place} is 7", details={"place": place}, usage={"meters": 7})

    return measure


def launch(host: Host) -> AnyTool:
    """An unsafe tool: nobody could tell two launches apart."""

    @tool(name="launch")
    async def launch(rocket: str, call: ToolCall) -> str:
        """Launch a rocket."""
        call.output("ignition\n")
        await host.clock.sleep(0.5)
        host.effect(f"launch {rocket}")
        await host.clock.sleep(0.5)
        return f"{rocket} is away"

    return launch


def effects(*names: str) -> frozenset[str]:
    return frozenset(names)


# --- turns -----------------------------------------------------------------------------------------------------


async def turn(host: Host) -> None:
    """One question and one long answer, of which partials are committed on the way."""
    async with open_harness(host, say(STORY * 2, thinking="Let me think. ")) as (_, root):
        submission = await root.submit("Tell me a story.", request_id="story")
        assert (await submission.answer()).text == STORY * 2


async def dialogue(host: Host) -> None:
    """Three questions, one after the other, with a change of the instructions between two of them."""
    async with open_harness(host, {"one": say("1"), "two": say("2"), "three": say("3")}) as (_, root):
        for number, question in enumerate(("one", "two", "three"), 1):
            if question == "three" and (await root.agent()).instructions == "":
                await root.set_agent(instructions="Be brief.")
            submission = await root.submit(question, request_id=question)
            assert (await submission.answer()).text == str(number)


async def parallel_tools(host: Host) -> None:
    """A round of four calls at once, that end in another order than they began."""
    round = calls(
        call("measure", place="north", seconds=3),
        call("measure", place="south"),
        call("measure", place="west", seconds=1),
        call("measure", place="east", seconds=2),
        text="Let me see.",
    )
    async with open_harness(host, [round, say("All is measured.")], tools=[measure(host)]) as (_, root):
        submission = await root.submit("Measure everything.", request_id="all")
        assert (await submission.answer()).text == "All is measured."


async def sequential_tools(host: Host) -> None:
    """The calls of a round one after the other, each begun when the one before has ended."""
    places = ("first", "second", "third")
    round = calls(*(call("measure", place=place, seconds=1) for place in places))
    async with open_harness(host, [round, say("done")], tools=[measure(host, sequential=True)]) as (_, root):
        submission = await root.submit("Measure in order.", request_id="order")
        await submission.wait()


def results_in_order(records: Records) -> Iterator[str]:
    """Results of sequential calls were written in the order of the calls, at any moment."""
    texts = [
        getattr(message, "text", "")
        for entry in records.of(TOOL_RESULT)
        for message in decode_messages(entry.raw_messages)
    ]
    expected = [f"{place} is 7" for place in ("first", "second", "third")]
    if texts != expected[: len(texts)]:
        yield f"the results were written as {texts}"


async def unsafe_tool(host: Host) -> None:
    """Two rounds with a tool that must not run twice: at worst its call is interrupted."""
    replies = [
        call("launch", rocket="one"),
        calls(call("launch", rocket="two"), call("measure", place="sky")),
        say("done"),
    ]
    async with open_harness(host, replies, tools=[launch(host), measure(host)]) as (_, root):
        submission = await root.submit("Launch.", request_id="launch")
        assert (await submission.answer()).text == "done"


async def failing_tools(host: Host) -> None:
    """Calls that go wrong in every way a call can: each has its result, and the model hears of it."""

    @tool(replay="safe")
    async def raises() -> str:
        """Raise."""
        raise ValueError("on purpose")

    @tool(replay="safe", timeout_ms=500)
    async def hangs() -> str:
        """Hang."""
        await host.clock.sleep(3_600)
        return "too late"

    round = calls(call("raises"), call("hangs"), call("nowhere"), call("measure", wrong="argument"))
    async with open_harness(host, [round, say("never mind")], tools=[raises, hangs, measure(host)]) as (_, root):
        await (await root.submit("Try.", request_id="try")).answer()


FAILURES = ["tool_error", "timeout", "tool_unavailable", "invalid_arguments"]


def every_failure(records: Records) -> Iterator[str]:
    codes = [data["code"] for entry in records.of(TOOL_RESULT) if isinstance(data := entry.data, dict)]
    if sorted(map(str, codes)) != sorted(FAILURES):
        yield f"the calls ended {codes}, not {FAILURES}"


async def hooks(host: Host) -> None:
    """Hooks that rewrite arguments, block a call and replace a result; a rerun keeps what was decided."""

    @before_tool
    async def before(asked: HookCall) -> Mapping[str, JsonValue] | Block | None:
        if asked.arguments["place"] == "secret":
            return Block("not there")
        return {**asked.arguments, "place": f"{asked.arguments['place']}ern"}

    @after_tool
    async def after(_asked: HookCall, result: ToolResult) -> ToolResult | None:
        return ToolResult(f"{result.text}, roughly", usage=result.usage)

    round = calls(call("measure", place="north", seconds=1), call("measure", place="secret"))
    replies = [round, say("done")]
    async with open_harness(host, replies, tools=[measure(host)], hooks=[before, after]) as (_, root):
        await (await root.submit("Measure.", request_id="measure")).answer()


# --- the queue -------------------------------------------------------------------------------------------------


def last_user(request: ModelRequest) -> Reply:
    """Calls a tool for the first thing the user says, then repeats all that was said."""
    said = user_texts(request)
    if not any(isinstance(message, ToolResultMessage) for message in request.messages):
        return call("measure", place="here", seconds=2)
    return say(" and ".join(said))


async def steer(host: Host) -> None:
    """Inputs that join the run after its round of tools, in their order: one answer answers them all."""
    async with open_harness(host, last_user, tools=[measure(host)]) as (_, root):
        submissions = [await root.submit("this", request_id="this")]
        for text in ("that", "more"):
            submissions.append(await root.submit(text, mode="steer", request_id=text))
        answers = [await submission.answer() for submission in submissions]
        assert {answer.text for answer in answers} == {"this and that and more"}
        assert len({answer.entry.id for answer in answers}) == 1


async def follow_up(host: Host) -> None:
    """Inputs that wait for the final answer, each with a run of its own; one of them is taken back."""
    replies = {text: say(f"{text}!") for text in ("one", "two", "three")}
    async with open_harness(host, replies, per_event=0.5) as (_, root):
        submissions = [await root.submit(text, request_id=text) for text in ("one", "two", "gone", "three")]
        await submissions[2].abort()
        await ends(submissions[2], "aborted")
        for submission, text in zip(submissions, ("one", "two", "gone", "three"), strict=True):
            if text != "gone":
                assert (await submission.answer()).text == f"{text}!"


async def writes(host: Host) -> None:
    """Entries without a call of the model: at once while idle, at the boundary while busy, remarks at any time."""

    def script(request: ModelRequest) -> Reply:
        said = user_texts(request)
        if said[-1] == "measure":
            return call("measure", place="here", seconds=2)
        return say(" ".join(said))

    async with open_harness(host, script, tools=[measure(host)]) as (_, root):
        await (await root.write(Fact(text="a"), request_id="a")).wait()
        assert (await (await root.submit("b", request_id="b")).answer()).text == "a b"
        busy = await root.submit("measure", request_id="measure")
        steer = await root.submit("e", mode="steer", request_id="e")
        facts = [await root.write(Fact(text=text), request_id=text) for text in ("c", "d")]
        await (await root.write(Remark(text="for people"), request_id="remark")).wait()
        assert [(await fact.wait()).status for fact in facts] == ["done", "done"]
        assert (await busy.answer()).text == (await steer.answer()).text == "a b measure c d e"


async def reset(host: Host) -> None:
    """The context begins anew, while idle and in the middle of a run, whose input then ends ``reset``."""

    def script(request: ModelRequest) -> Reply:
        said = user_texts(request)
        if said[-1] == "measure":
            return call("measure", place="here", seconds=2)
        return say(f"I know of {', '.join(said)}")

    async with open_harness(host, script, tools=[measure(host)]) as (_, root):
        await (await root.submit("one", request_id="one")).answer()
        await (await root.reset("a fresh start", request_id="idle")).wait()
        two = await root.submit("two", request_id="two")
        assert (await two.answer()).text == "I know of a fresh start, two"
        busy = await root.submit("measure", request_id="busy")
        reset = await root.reset(request_id="in between")
        after = await root.submit("three", request_id="three")
        assert (await reset.wait()).status == "done"
        await ends(busy, "reset")
        assert (await after.answer()).text == "I know of three"


# --- models that fail ------------------------------------------------------------------------------------------


async def retry(host: Host) -> None:
    """A model that is overloaded twice, with part of an answer: asked again after a while, each attempt counted."""
    reply = fail("overloaded", times=2, partial=STORY, then=say("at last"))
    async with open_harness(host, reply) as (_, root):
        assert (await (await root.submit("Hello?", request_id="hello")).answer()).text == "at last"


async def model_error(host: Host) -> None:
    """A request that is refused ends its run; what waited goes on with the next input, oldest first."""
    replies = {
        "bad": fail("malformed", "no such thing", partial="I would"),
        "good": say("yes"),
        "later": say("later"),
    }
    async with open_harness(host, replies, per_event=0.5) as (_, root):
        bad = await root.submit("bad", request_id="bad")
        good = await root.submit("good", request_id="good")
        await ends(bad, "model_error")
        later = await root.submit("later", request_id="later")
        assert (await good.answer()).text == "yes"
        assert (await later.answer()).text == "later"


async def retries_end(host: Host) -> None:
    """A model that stays overloaded: the run ends after the last retry."""
    async with open_harness(host, fail("overloaded")) as (_, root):
        await ends(await root.submit("Hello?", request_id="hello"), "model_error")


async def no_model(host: Host) -> None:
    """A harness without models opens, and a run in it ends unanswered."""
    async with open_harness(host, None) as (_, root):
        await ends(await root.submit("Hello?", request_id="hello"), "no_model")


class BrokenPolicy(RetryPolicy):
    """A host's own code, with a mistake in it."""

    def delay(self, retry: int, *, fraction: float, retry_after_ms: int | None = None) -> int | None:
        raise ZeroDivisionError("on purpose")


async def faulted_run(host: Host) -> None:
    """A run that ends by a mistake in the host's code: its inputs are settled, and the conversation goes on."""
    replies = {"one": fail("overloaded", partial="I"), "two": say("fine")}
    async with open_harness(host, replies, retry=BrokenPolicy()) as (_, root):
        await ends(await root.submit("one", request_id="one"), "faulted")
        assert (await (await root.submit("two", request_id="two")).answer()).text == "fine"


# --- aborts ----------------------------------------------------------------------------------------------------


async def abort(host: Host) -> None:
    """A conversation is aborted while a tool hangs: calls and inputs end aborted, a queued write stays."""

    @tool(replay="safe")
    async def hang(call: ToolCall) -> str:
        """Hang."""
        call.output("so far\n")
        await host.clock.sleep(1_000_000)
        return "never"

    replies = {"go": calls(call("hang"), call("measure", place="here")), "again": say("hello again")}
    async with open_harness(host, replies, tools=[hang, measure(host)]) as (harness, root):
        go = await root.submit("go", request_id="go")
        queued = await root.submit("queued", request_id="queued")
        write = await root.write(Fact(text="kept"), request_id="write")
        await until_quiet_but(host, harness, "hang")
        if await go.status() == "placed":
            await root.abort()
        await ends(go, "aborted")
        await ends(queued, "aborted")
        again = await root.submit("again", request_id="again")
        await again.answer()
        assert (await write.wait()).status == "done"


async def until_quiet_but(host: Host, harness: Harness, name: str) -> None:
    """Return once nothing runs but calls of one tool, or nothing at all."""
    while True:
        harness.session.check_open()
        records = [r for r in harness.session.live.settled.values() if r.status in ("pending", "running")]
        hanging = [r for r in records if isinstance(r.input, dict) and r.input.get("name") == name]
        if not harness.session.live.settled or (len(hanging) == len(records) == 1 and await _shows(harness, name)):
            return
        await host.clock.sleep(0.05)


async def _shows(harness: Harness, name: str) -> bool:
    """Whether a running call of the tool has shown anything yet."""
    live = await harness.session.snapshot(Live, conversation=ROOT_CONVERSATION)
    return live is not None and any(shown["name"] == name and shown["output"] for shown in live.tools.values())


# --- beside the conversation -----------------------------------------------------------------------------------


async def fork(host: Host) -> None:
    """A conversation forked after its first answer; both go on, with what each of them heard."""

    def script(request: ModelRequest) -> Reply:
        return say(", ".join(user_texts(request)))

    async with open_harness(host, script) as (harness, root):
        first = await (await root.submit("one", request_id="one")).answer()
        forks = [info for info in await harness.conversations() if info.record.parent is not None]
        other = harness.handle(forks[0].id) if forks else await root.fork(first.entry.id)
        for conversation, text in ((root, "two"), (other, "three")):
            answer = await (await conversation.submit(text, request_id="next")).answer()
            assert answer.text == f"one, {text}"


async def beside(host: Host) -> None:
    """What an application commits in one transaction: its document, an entry and an input, all or nothing."""
    async with open_harness(host, {"note 1": say("ok"), "note 2": say("ok")}) as (harness, root):
        for number in (1, 2):
            request_id = f"note-{number}"
            async with root.commit() as tx:
                if await tx.request(root.id, request_id) is None:
                    (await tx.draft(Tally)).notes += 1
                    tx.append(Remark(text=request_id))
                    await harness.admit(tx, root.id, input_content(f"note {number}"), request_id=request_id)
            harness.resume()
            found = await harness.session.request(root.id, request_id)
            if found is None:
                raise NotFound("what was committed is not there")
            await (await harness.submission(found.id)).answer()


def tallied(records: Records) -> Iterator[str]:
    tally = records.document("app.tally", ROOT_CONVERSATION)
    counted = tally["notes"] if isinstance(tally, dict) else 0
    if not counted == len(records.of("app.remark")) == len(records.of(USER)):
        yield f"{counted} notes, {len(records.of('app.remark'))} remarks, {len(records.of(USER))} inputs"


async def watched(host: Host) -> None:
    """Somebody who follows events and the view is told of nothing that a crash takes back, and of the whole answer."""
    async with open_harness(host, [call("measure", place="here", seconds=1), say(STORY)], tools=[measure(host)]) as (
        harness,
        root,
    ):

        async def follow() -> None:
            async with root.watch() as frames:
                async for frame in frames:
                    host.heard(frame.seq)

        async def listen() -> None:
            async with root.events() as events:
                async for event in events:
                    host.heard(harness.session.seq)
                    assert event is not None

        following = [asyncio.create_task(follow()), asyncio.create_task(listen())]
        await (await root.submit("Measure and tell.", request_id="tell")).answer()
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)


# --- what is shipped -------------------------------------------------------------------------------------------


def _scenario(
    program: Callable[[Host], Awaitable[None]],
    *,
    safe: frozenset[str] = frozenset(),
    unsafe: frozenset[str] = frozenset(),
    tools: frozenset[str] = frozenset(),
    reports: frozenset[str] = frozenset(),
    always: Callable[[Records], Iterator[str]] | None = None,
    ends: Callable[[Records], Iterator[str]] | None = None,
    name: str | None = None,
) -> Scenario:
    return Scenario(
        name=name or program.__name__.replace("_", "-"),
        program=program,
        safe=safe,
        unsafe=unsafe,
        rules=Rules(unsafe=tools, unordered=frozenset({Remark.kind})),
        reports=reports,
        always=always,
        ends=ends,
    )


_HERE = effects("measure here")

HARNESS = (
    _scenario(turn),
    _scenario(dialogue),
    _scenario(parallel_tools, safe=effects(*(f"measure {place}" for place in ("north", "south", "west", "east")))),
    _scenario(
        sequential_tools,
        safe=effects(*(f"measure {place}" for place in ("first", "second", "third"))),
        always=results_in_order,
    ),
    _scenario(
        unsafe_tool,
        safe=effects("measure sky"),
        unsafe=effects("launch one", "launch two"),
        tools=effects("launch"),
    ),
    _scenario(failing_tools, reports=effects("tool_raised"), ends=every_failure),
    _scenario(hooks, safe=effects("measure northern")),
    _scenario(steer, safe=_HERE),
    _scenario(follow_up),
    _scenario(writes, safe=_HERE),
    _scenario(reset, safe=_HERE),
    _scenario(retry),
    _scenario(model_error),
    _scenario(retries_end),
    _scenario(no_model),
    _scenario(faulted_run, reports=effects("task_faulted")),
    _scenario(abort, safe=_HERE),
    _scenario(fork, name="fork-conversation"),
    _scenario(beside, always=tallied),
    _scenario(watched, safe=_HERE),
)
