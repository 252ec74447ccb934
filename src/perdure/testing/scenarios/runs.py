"""What runs promise: turns, the queue, failures of models, aborts, forks, mail (chapter 3 of the rules)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import cast

from perdure.harness.documents import USER, Live
from perdure.harness.handle import ToolCall
from perdure.harness.harness import Harness
from perdure.harness.inbox import input_content
from perdure.harness.messages import ToolResultMessage
from perdure.harness.model import ModelRequest
from perdure.harness.settings import RetryPolicy
from perdure.harness.tool import tool
from perdure.kernel.document import Document
from perdure.kernel.errors import NotFound
from perdure.kernel.json import JsonValue
from perdure.kernel.records import ROOT_CONVERSATION
from perdure.storage.memory import MemoryStorage
from perdure.tasks import WorkBlocked
from perdure.testing.faulty_models import Cue
from perdure.testing.model import Reply, call, calls, fail, say
from perdure.testing.normal import Records
from perdure.testing.scenarios.hosting import (
    STORY,
    Fact,
    Remark,
    effects,
    ends,
    measure,
    open_harness,
    scenario,
    user_texts,
)
from perdure.testing.simulation import Host

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


async def truncated(host: Host) -> None:
    """A stream that ends without its message ends the run: nothing is made up, and what was shown is kept."""

    def cue(request: ModelRequest) -> Cue | None:
        return "truncate" if user_texts(request)[-1] == "one" else None

    async with open_harness(host, {"one": say(STORY), "two": say("fine")}, cue=cue) as (_, root):
        await ends(await root.submit("one", request_id="one"), "model_error")
        assert (await (await root.submit("two", request_id="two")).answer()).text == "fine"


async def stalled(host: Host) -> None:
    """A model from which nothing more comes, until its conversation is aborted."""

    def cue(request: ModelRequest) -> Cue | None:
        return "stall" if user_texts(request)[-1] == "one" else None

    async with open_harness(host, {"one": say(STORY), "two": say("fine")}, cue=cue) as (harness, root):
        one = await root.submit("one", request_id="one")
        await host.clock.sleep(5)
        harness.session.check_open()
        if await one.status() == "placed":
            await root.abort()
        await ends(one, "aborted")
        assert (await (await root.submit("two", request_id="two")).answer()).text == "fine"


async def poisoned_run(host: Host) -> None:
    """A request of which the process dies each time: its run is parked at last, can be aborted, and what comes after
    it is answered."""

    def cue(request: ModelRequest) -> Cue | None:
        if user_texts(request)[-1] == "poison":
            host.die()
            return "stall"
        return None

    async with open_harness(host, say("fine"), cue=cue) as (_, root):
        poison = await root.submit("poison", request_id="poison")
        try:
            await ends(poison, "aborted")
        except WorkBlocked as error:
            if error.reason != "parked":
                raise
            await root.abort()
            await ends(poison, "aborted")
        assert (await (await root.submit("water", request_id="water")).answer()).text == "fine"


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


class Tally(Document, kind="app.tally", scope="conversation"):
    """What an application counts beside its conversation."""

    notes: int = 0


# --- beside the conversation -----------------------------------------------------------------------------------


async def fork(host: Host) -> None:
    """A conversation forked after its first answer, with the settings of then; both go on with what each has heard."""

    def script(request: ModelRequest) -> Reply:
        return say(", ".join(user_texts(request)))

    async with open_harness(host, script) as (harness, root):
        first = await (await root.submit("one", request_id="one")).answer()
        await root.set_agent(instructions="Be brief.")
        forks = [info for info in await harness.conversations() if info.record.parent is not None]
        other = harness.handle(forks[0].id) if forks else await root.fork(first.entry.id)
        assert (await other.agent()).instructions == "", "a fork has the settings of its entry"
        for conversation, text in ((root, "two"), (other, "three")):
            answer = await (await conversation.submit(text, request_id="next")).answer()
            assert answer.text == f"one, {text}"


async def side_by_side(host: Host) -> None:
    """Two conversations at once, whose runs and calls have nothing to do with each other."""

    def script(request: ModelRequest) -> Reply:
        place = user_texts(request)[-1]
        if not any(isinstance(message, ToolResultMessage) for message in request.messages):
            return call("measure", place=place, seconds=2)
        return say(f"{place} is done")

    async with open_harness(host, script, tools=[measure(host)]) as (harness, root):
        found = [info.id for info in await harness.conversations() if info.name == "other"]
        other = harness.handle(found[0]) if found else await harness.create_conversation(name="other")
        left, right = await root.submit("left", request_id="left"), await other.submit("right", request_id="right")
        answers = await asyncio.gather(left.answer(), right.answer())
        assert [answer.text for answer in answers] == ["left is done", "right is done"]


async def mail(host: Host) -> None:
    """Another process leaves an input in the mailbox, once; it is folded in, answered and replied to, once."""
    store = host.storage.inner
    assert isinstance(store, MemoryStorage), "what another process does to the store is simulated for this one only"

    def post(request: str, kind: str, body: dict[str, JsonValue]) -> None:
        if request not in host.notes:
            host.notes[request] = store.post(kind, body, now=host.clock.wall())

    async with open_harness(host, {"by mail": say("by return"), "hello": say("hi")}) as (harness, root):
        body: dict[str, JsonValue] = {"conversation_id": root.id, "content": "by mail", "request_id": "letter"}
        post("input", "input", body)
        post("nonsense", "nonsense", {})
        while await harness.session.request(root.id, "letter") is None:
            harness.session.check_open()
            await host.clock.sleep(0.05)
        hello = await root.submit("hello", request_id="hello")
        assert (await hello.answer()).text == "hi"
        found = await harness.session.request(root.id, "letter")
        assert found is not None
        assert (await (await harness.submission(found.id)).answer()).text == "by return"
        for request, ok in (("input", True), ("nonsense", False)):
            reply = store.reply(cast("int", host.notes[request]))
            assert reply is not None, f"nobody answered the mail {request!r}"
            assert reply.ok == ok


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

HERE = effects("measure here")

RUNS = (
    scenario(turn),
    scenario(dialogue),
    scenario(steer, safe=HERE),
    scenario(follow_up),
    scenario(writes, safe=HERE),
    scenario(reset, safe=HERE),
    scenario(retry),
    scenario(model_error),
    scenario(retries_end),
    scenario(no_model),
    scenario(faulted_run, reports=effects("task_faulted")),
    scenario(poisoned_run, reports=effects("task_blocked")),
    scenario(truncated),
    scenario(stalled),
    scenario(abort, safe=HERE),
    scenario(fork, name="fork-conversation"),
    scenario(side_by_side, safe=effects("measure left", "measure right")),
    scenario(mail),
    scenario(beside, always=tallied),
    scenario(watched, safe=HERE),
)
