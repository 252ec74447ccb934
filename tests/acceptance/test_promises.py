"""What the package promises its user, each promise by its name: on real files, with real processes that are killed.

Rules H20 to H54 (input), H69 and H86 to H92 (after an interruption), K1, K2, K80 and K121 to K127 (what others see),
T30 to T47 (blocked work), T71 to T81 (aborts), K115 to K120 (forks).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from acceptance_kit import (
    LONG,
    SCRIPT,
    STORE,
    Child,
    Hold,
    Note,
    Stander,
    kinds,
    lines,
    opened,
    records,
    run,
    transcript,
)

from perdure import (
    Context,
    Harness,
    Next,
    Run,
    Task,
    Unanswered,
)
from perdure.kernel.errors import ContextCancelled, ContextDeadline
from perdure.kernel.records import Aborted, Completed
from perdure.testing.model import ScriptedModel


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / STORE


async def never() -> None:
    await asyncio.Event().wait()


# --- killed, and found again -----------------------------------------------------------------------------------

KILLS = {
    "admitted": ("long", ["user long", f"assistant {LONG}"]),
    "streaming": ("long", ["user long", "assistant It is a ", f"assistant {LONG}"]),
    "tool": ("work", ["user work", "assistant <tool_call>", "tool-result", "assistant worked"]),
}


@pytest.mark.parametrize("found_by", ["id", "request id"])
@pytest.mark.parametrize("point", KILLS)
async def test_killed_after_admission_in_generation_or_in_a_tool_call_the_original_submission_is_answered_once(
    point: str, found_by: str, tmp_path: Path, store: Path
) -> None:
    """H20, H23, H31, H69, H77: in a new process, whether it knows the submission's id or only its request id."""
    text, wanted = KILLS[point]
    async with Child.run("agent", tmp_path, text=text, request_id="r", points=[point]) as child:
        await child.at(point)
        await child.kill()
        submission = child.said[-2 if point != "admitted" else -1]["submission"]
    if found_by == "id":
        again = await run("agent", tmp_path, submission=submission)
    else:
        again = await run("agent", tmp_path, text=text, request_id="r")
    assert again["submission"] == submission
    assert again["answer"] == (LONG if text == "long" else "worked")
    found = [line if not line.startswith("tool-result") else "tool-result" for line in again["transcript"]]
    if point == "streaming":
        # How much of the answer was committed is chance; that it is the beginning of it is not.
        assert found[1].startswith("assistant It is a")
        assert f"assistant {LONG}".startswith(found[1])
        found[1] = wanted[1]
    assert found == wanted
    (record,) = records(store, "submissions")
    assert (record["id"], record["status"], record["request_id"]) == (submission, "done", "r")
    answers = [e for e in records(store, "entries") if e["kind"] == "pi.assistant"]
    whole = [e["id"] for e in answers if e["messages"][0]["stop_reason"] == "stop"]
    assert whole == [record["answer"]], "one answer"


async def test_killed_again_and_again_the_original_submission_is_answered_once(tmp_path: Path, store: Path) -> None:
    """H20, H77: after admission, then in the stream of the first answer, in the tool, and in no place at all."""
    async with Child.run("agent", tmp_path, text="work", request_id="r", replay="safe", points=["admitted"]) as child:
        submission = (await child.at("admitted"))["submission"]
    for _ in range(2):
        options = {"text": "work", "request_id": "r", "replay": "safe"}
        async with Child.run("agent", tmp_path, **options, points=["tool"]) as child:
            await child.at("tool")
    again = await run("agent", tmp_path, text="work", request_id="r", replay="safe")
    assert (again["submission"], again["same"], again["answer"]) == (submission, True, "worked")
    assert lines(tmp_path / "effects") == ["work"] * 3, "two runs that were killed, and one that ended"
    assert kinds(store) == ["pi.user", "pi.assistant", "pi.tool-result", "pi.assistant"]


async def test_an_unsafe_tool_that_was_killed_is_interrupted_and_not_run_again(tmp_path: Path, store: Path) -> None:
    """H92: executed once, by its own count; the model hears that nobody knows; the run goes on to its answer."""
    async with Child.run("agent", tmp_path, text="work", request_id="r", replay="unsafe", points=["tool"]) as child:
        await child.at("tool")
    again = await run("agent", tmp_path, text="work", request_id="r", replay="unsafe")
    assert again["answer"] == "worked"
    assert lines(tmp_path / "effects") == ["work"]
    (result,) = [entry for entry in records(store, "entries") if entry["kind"] == "pi.tool-result"]
    assert (result["data"]["is_error"], result["data"]["code"]) == (True, "interrupted")


async def test_a_safe_tool_that_was_killed_runs_again(tmp_path: Path, store: Path) -> None:
    """H91."""
    async with Child.run("agent", tmp_path, text="work", request_id="r", replay="safe", points=["tool"]) as child:
        await child.at("tool")
    again = await run("agent", tmp_path, text="work", request_id="r", replay="safe")
    assert again["answer"] == "worked"
    assert lines(tmp_path / "effects") == ["work", "work"]
    (result,) = [entry for entry in records(store, "entries") if entry["kind"] == "pi.tool-result"]
    assert result["messages"][0]["content"] == [{"type": "text", "text": "the work's result"}]
    assert not result["data"].get("is_error")


async def test_a_tool_that_was_safe_when_it_began_and_is_not_any_more_is_interrupted(tmp_path: Path) -> None:
    """H91, H92: the stored and the current policy must both say safe."""
    for before, now in (("safe", "unsafe"), ("unsafe", "safe")):
        folder = tmp_path / before
        folder.mkdir()
        async with Child.run("agent", folder, text="work", request_id="r", replay=before, points=["tool"]) as child:
            await child.at("tool")
        again = await run("agent", folder, text="work", request_id="r", replay=now)
        assert again["answer"] == "worked"
        assert lines(folder / "effects") == ["work"]


async def test_a_tool_that_was_killed_finds_the_conversation_it_owns_again(tmp_path: Path, store: Path) -> None:
    """K47, K139, H31, T53: by its owner and a request id, so that there is one child, asked and answered once."""
    for _ in range(2):
        async with Child.run("boss", tmp_path, points=["asked"]) as child:
            await child.at("asked")
    assert (await run("boss", tmp_path))["answer"] == "it said so"
    assert len(records(store, "conversations")) == 2
    assert [record["status"] for record in records(store, "submissions")] == ["done", "done"]
    (result,) = [entry for entry in records(store, "entries") if entry["kind"] == "pi.tool-result"]
    assert result["messages"][0]["content"][0]["text"] == LONG
    whole = [e for e in records(store, "entries") if e["kind"] == "pi.assistant" and LONG in str(e["messages"])]
    assert len(whole) == 1


# --- a wait is only a wait -------------------------------------------------------------------------------------


class Slow(Task[None, str], kind="app.slow"):
    """Ends when told to, whatever it is asked before."""

    def __init__(self, *, stubborn: bool = False) -> None:
        self.gate = asyncio.Event()
        self.began = asyncio.Event()
        self._stubborn = stubborn

    async def start(self, run: Run[None, str, None]) -> Next[str]:
        self.began.set()
        while not self.gate.is_set():
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                if not self._stubborn:
                    raise
        async with run.commit() as tx:
            return tx.complete("slow and sure")


async def rest() -> None:
    """Let what was begun go as far as it goes by itself."""
    for _ in range(20):
        await asyncio.sleep(0)


Wait = Callable[[Context | None], Awaitable[object]]
GIVEN_UP = ["cancelled", "asyncio.timeout", "deadline", "context cancelled"]


async def give_up(way: str, wait: Wait, begun: asyncio.Event | None = None) -> None:
    """Begin to wait and, once it has begun, give the wait up in this way."""

    async def has_begun() -> None:
        await (rest() if begun is None else begun.wait())

    if way == "cancelled":
        waiting = asyncio.ensure_future(wait(None))
        await has_begun()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    elif way == "asyncio.timeout":
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as bound:

                async def expire() -> None:
                    await has_begun()
                    bound.reschedule(asyncio.get_running_loop().time())

                await asyncio.gather(expire(), wait(None))
    elif way == "deadline":
        # A deadline cannot be moved: where it matters that the wait has begun, it is given the time to.
        with pytest.raises(ContextDeadline):
            await wait(Context().child(timeout=0.02 if begun is None else 2))
        assert begun is None or begun.is_set()
    else:
        context = Context()
        waiting = asyncio.ensure_future(wait(context))
        await has_begun()
        context.cancel("enough")
        with pytest.raises(ContextCancelled, match="enough"):
            await waiting


@pytest.mark.parametrize("way", GIVEN_UP)
@pytest.mark.parametrize(
    "what", ["Submission.wait", "Submission.answer", "Submission.run", "task wait", "conversation.idle", "idle"]
)
async def test_giving_up_a_wait_leaves_the_work(what: str, way: str, store: Path) -> None:
    """K80, K88, K89, T77."""
    hold, slow = Hold(1), Slow()
    async with opened(store, ScriptedModel(SCRIPT, pace=hold), tasks=(slow,)) as harness:
        root = await harness.root()
        submission = await root.submit("hi")
        async with root.commit() as tx:
            task = tx.create_task(Slow, None)
        await hold.reached.wait()
        waits: dict[str, Wait] = {
            "Submission.wait": lambda context: submission.wait(context=context),
            "Submission.answer": lambda context: submission.answer(context=context),
            "Submission.run": lambda context: submission.run(context=context),
            "task wait": lambda context: harness.tasks.wait(task.id, context=context),
            "conversation.idle": lambda context: root.idle(context=context),
            "idle": lambda context: harness.idle(context=context),
        }
        others = asyncio.gather(submission.wait(), harness.tasks.wait(task.id), harness.idle())
        await give_up(way, waits[what])
        assert not others.done(), "the others still wait"
        assert await submission.status() == "placed"
        assert [found.abort_requested for found in (await harness.inspect()).tasks] == [False, False]
        hold.release()
        slow.gate.set()
        assert (await submission.answer()).text == "hello"
        assert isinstance(await harness.tasks.wait(task.id), Completed)
        await others


@pytest.mark.parametrize("way", GIVEN_UP)
async def test_giving_up_the_wait_for_an_abort_leaves_the_abort(way: str, store: Path) -> None:
    """K80, T71: the marks are durable, and what they began goes on."""
    slow = Slow(stubborn=True)
    async with opened(store, tasks=(slow,)) as harness:
        root = await harness.root()
        harness.resume()
        async with root.commit() as tx:
            task = tx.create_task(Slow, None)
        await slow.began.wait()
        marked = asyncio.Event()
        harness.session.observe(lambda settled: marked.set() if settled.batch.tasks[0].abort_requested else None)
        await give_up(way, lambda context: harness.abort_task(task.id, context=context), marked)
        slow.gate.set()
        assert isinstance(await harness.tasks.wait(task.id), Aborted)


@pytest.mark.parametrize("way", GIVEN_UP)
async def test_giving_up_the_wait_for_a_close_leaves_the_close(way: str, store: Path) -> None:
    """K80: a shutdown goes on whoever stopped waiting for it."""
    slow = Slow(stubborn=True)
    async with opened(store, tasks=(slow,)) as harness:
        root = await harness.root()
        harness.resume()
        async with root.commit() as tx:
            task = tx.create_task(Slow, None)
        await slow.began.wait()
        await give_up(way, lambda context: harness.close(context=context))
        slow.gate.set()
        report = await harness.close()
        assert report.stragglers == ()
    async with opened(store, tasks=(slow,)) as harness:
        assert isinstance(await harness.tasks.wait(task.id), Completed), "the work was kept"


# --- the four aborts -------------------------------------------------------------------------------------------


class Ordered(Task[str, None], kind="app.ordered"):
    """Stands still until it is aborted, and then says so."""

    said: list[str]

    def __init__(self, said: list[str]) -> None:
        self.said = said

    async def start(self, run: Run[str, None, None]) -> Next[None]:
        self.said.append(f"began {run.input}")
        await never()
        raise AssertionError("unreachable")

    async def on_abort(self, run: Run[str, None, object]) -> Next[None]:
        self.said.append(f"aborted {run.input}")
        async with run.commit() as tx:
            return tx.abort(run.record.abort_reason or "aborted")


async def live(harness: Harness) -> dict[int, bool]:
    """Live tasks of the application, and whether they are being aborted."""
    return {t.id: t.abort_requested for t in (await harness.inspect()).tasks if t.kind.startswith("app.")}


async def said_all(said: list[str], *wanted: str) -> None:
    async with asyncio.timeout(30):
        while not set(wanted) <= set(said):
            await asyncio.sleep(0)


async def test_aborting_a_submission_withdraws_it_while_it_is_queued_and_never_later(store: Path) -> None:
    """H53."""
    hold = Hold()
    async with opened(store, ScriptedModel(SCRIPT, pace=hold)) as harness:
        root = await harness.root()
        first = await root.submit("hi")
        queued, kept = await root.submit("one"), await root.submit("long")
        write = await root.write(Note(text="a note"))
        assert await queued.abort() == "withdrawn"
        assert await write.abort() == "withdrawn"
        assert await first.abort() == "already_placed"
        with pytest.raises(Unanswered) as raised:
            await queued.answer()
        assert raised.value.reason == "aborted"
        assert await queued.abort() == "already_settled"
        hold.release()
        assert (await first.answer()).text == "hello"
        assert (await kept.answer()).text == LONG
        assert await transcript(root) == ["user hi", "assistant hello", "user long", f"assistant {LONG}"]


async def test_aborting_a_task_ends_it_and_nothing_beside_it(store: Path) -> None:
    """T71, T81."""
    said: list[str] = []
    async with opened(store, tasks=(Ordered(said),)) as harness:
        root = await harness.root()
        harness.resume()
        async with root.commit() as tx:
            one, other = tx.create_task(Ordered, "one"), tx.create_task(Ordered, "other")
            background = tx.create_task(Ordered, "background", background=True)
        await said_all(said, "began one", "began other", "began background")
        await harness.abort_task(one.id, reason="not wanted")
        assert await harness.tasks.wait(one.id) == Aborted("not wanted")
        assert await live(harness) == {other.id: False, background.id: False}
        await harness.abort_task(background.id)
        assert await live(harness) == {other.id: False}
        assert said[3:] == ["aborted one", "aborted background"]


async def test_aborting_a_conversation_ends_what_is_in_its_foreground(store: Path) -> None:
    """T78, T79, H54: the run and ordinary work end, queued inputs are withdrawn; writes and background work stay."""
    hold, said = Hold(), []
    async with opened(store, ScriptedModel(SCRIPT, pace=hold), tasks=(Ordered(said),)) as harness:
        root, other = await harness.root(), await harness.create_conversation()
        first, queued = await root.submit("hi"), await root.submit("long")
        write = await root.write(Note(text="a note"))
        elsewhere = await other.submit("hi")
        async with root.commit() as tx:
            tx.create_task(Ordered, "ordinary")
            background = tx.create_task(Ordered, "background", background=True)
        await said_all(said, "began ordinary", "began background")
        await root.abort()
        assert not await root.busy()
        assert await live(harness) == {background.id: False}
        for submission in (first, queued):
            assert ((await submission.record()).status, (await submission.record()).reason) == ("unanswered", "aborted")
        assert await write.status() == "queued"
        assert said[2:] == ["aborted ordinary"]
        assert await elsewhere.status() == "placed", "another conversation goes on"
        hold.release()
        assert (await elsewhere.answer()).text == "hello"
        assert (await (await root.submit("hi")).answer()).text == "hello", "and so does this one"
        assert await write.status() == "done"


async def test_aborting_with_background_ends_what_is_behind_it_too(store: Path) -> None:
    """T80."""
    said: list[str] = []
    async with opened(store, tasks=(Ordered(said),)) as harness:
        root, other = await harness.root(), await harness.create_conversation()
        harness.resume()
        async with root.commit() as tx:
            background = tx.create_task(Ordered, "background", background=True)
            inner = tx.create_conversation(owner=background.id)
            below = tx.create_task(Ordered, "below", conversation=inner.id)
            again = tx.create_task(Ordered, "background below", conversation=inner.id, background=True)
            elsewhere = tx.create_task(Ordered, "elsewhere", conversation=other.id)
        await said_all(said, *(f"began {name}" for name in ("background", "below", "background below", "elsewhere")))
        await root.abort()
        assert not any((await live(harness)).values()), "an ordinary abort stops at the boundary"
        await root.abort(background=True)
        assert await live(harness) == {elsewhere.id: False}
        for task in (background, below, again):
            assert isinstance(await harness.tasks.wait(task.id), Aborted)
        assert said.index("aborted below") < said.index("aborted background")


# --- bottom-up, and no further than a background task -----------------------------------------------------------


class Parent(Task[int, str], kind="app.parent"):
    """Owns another one of its kind, so many deep, and says what became of it when it is aborted itself."""

    def __init__(self, said: list[str]) -> None:
        self.said = said

    async def start(self, run: Run[int, str, None]) -> Next[str]:
        if run.input == 0:
            self.said.append("all began")
            await never()
        async with run.commit() as tx:
            child = tx.create_task(Parent, run.input - 1)
            return tx.wait([child.id], self.on, child.id)

    async def on(self, run: Run[int, str, int]) -> Next[str]:
        raise AssertionError("nobody goes on once the abort is there")

    async def on_abort(self, run: Run[int, str, object]) -> Next[str]:
        child = ""
        if isinstance(run.checkpoint, int):
            record = await run.session.task(run.checkpoint)
            assert record is not None
            child = f", its child {record.status} as {type(record.outcome).__name__}"
        self.said.append(f"aborted {run.input}{child}")
        async with run.commit() as tx:
            return tx.abort(f"level {run.input}")


async def test_a_nested_abort_settles_bottom_up(store: Path) -> None:
    """T72 to T74: each handler finds what it owns ended, with its final outcome."""
    said: list[str] = []
    async with opened(store, tasks=(Parent(said),)) as harness:
        root = await harness.root()
        harness.resume()
        async with root.commit() as tx:
            top = tx.create_task(Parent, 3)
        await said_all(said, "all began")
        ends: list[int] = []
        harness.session.observe(lambda settled: ends.extend(t.id for t in settled.batch.tasks if not t.live))
        await root.abort()
        assert said[1:] == [
            "aborted 0",
            "aborted 1, its child terminal as Aborted",
            "aborted 2, its child terminal as Aborted",
            "aborted 3, its child terminal as Aborted",
        ]
        ended = [record for record in await harness.session.tasks() if record.kind == "app.parent"]
        assert [record.outcome for record in ended] == [Aborted(f"level {n}") for n in (3, 2, 1, 0)]
        assert ends == [record.id for record in ended[::-1]]
        assert ends[-1] == top.id


@pytest.mark.parametrize("point", ["marks 3", "handler 0", "handler 1", "handler 2"])
async def test_an_abort_whose_process_is_killed_is_carried_out_by_the_next(
    point: str, tmp_path: Path, store: Path
) -> None:
    """T72 to T76: after the marks, and in each handler; bottom-up all the same."""
    async with Child.run("aborter", tmp_path, point=point) as child:
        await child.at(point)
    async with opened(store, tasks=(Stander(tmp_path),)) as harness:
        marked = [task.abort_requested for task in (await harness.inspect()).tasks]
        assert marked == [True] * len(marked), "marks reach all that is owned, before anything runs"
        await harness.idle()
        outcomes = [record.outcome for record in await harness.session.tasks()]
        assert outcomes == [Aborted("level 2"), Aborted("level 1"), Aborted("level 0")]
    levels = [int(level) for level in lines(tmp_path / "aborts")]
    assert levels == sorted(levels), "bottom-up, whichever was cut off and run again"
    assert set(levels) == {0, 1, 2}


async def test_an_abort_of_a_parent_stops_at_a_background_task(store: Path) -> None:
    """T53, T72, T84, T85: work behind a background task is nobody's ordinary work, in aborts and in idle waits."""
    said: list[str] = []
    async with opened(store, tasks=(Ordered(said),)) as harness:
        root = await harness.root()
        harness.resume()
        async with root.commit() as tx:
            parent = tx.create_task(Ordered, "parent")
            inner = tx.create_conversation(owner=parent.id)
            tx.create_task(Ordered, "child", conversation=inner.id)
            background = tx.create_task(Ordered, "background", conversation=inner.id, background=True)
            beyond = tx.create_conversation(owner=background.id)
            behind = tx.create_task(Ordered, "behind", conversation=beyond.id)
        await said_all(said, *(f"began {name}" for name in ("parent", "child", "background", "behind")))
        await harness.abort_task(parent.id)
        assert said[4:] == ["aborted child", "aborted parent"]
        assert await live(harness) == {background.id: False, behind.id: False}
        await harness.idle()
        await root.idle()
    async with opened(store, tasks=(Ordered(said),)) as harness:
        assert await live(harness) == {background.id: False, behind.id: False}, "nor does a reopen carry it further"
        await harness.abort_task(background.id)
        assert said[-2:] == ["aborted behind", "aborted background"]
