"""Faults of runs that users of such systems met, each by its name: effects, the transcript, streams, aborts.

Rules H55 to H62 (context), H69, H74, H86 to H92 (calls), K72 to K75 (mailbox), K80, T71 to T77, T87 to T90 (stopping).
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from acceptance_kit import (
    LONG,
    SCRIPT,
    STORE,
    Child,
    Hold,
    alive,
    kinds,
    lines,
    note,
    opened,
    records,
    run,
    transcript,
)

from perdure import (
    Entry,
    Extension,
    Harness,
    LocalEnvironment,
    ModelRequest,
    Next,
    NotStopped,
    Report,
    Run,
    SqliteStorage,
    Task,
    Unanswered,
    WorkBlocked,
    coding_tools,
    tool,
)
from perdure.harness.events import MessageDelta, MessageEnd, Snapshot
from perdure.harness.messages import AssistantMessage, Message, ToolResultMessage
from perdure.kernel.json import JsonValue
from perdure.kernel.records import Completed
from perdure.storage.sqlite_mailbox import post, reply
from perdure.tasks.definition import StoredTask
from perdure.testing.model import ScriptedModel, call, calls, fail, say


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / STORE


def is_valid(messages: Sequence[Message]) -> bool:
    """Whether a provider would take it: each call followed by exactly its results, in order, and no other result."""
    due: list[str] = []
    for message in messages:
        if isinstance(message, ToolResultMessage):
            if not due or message.call_id != due.pop(0):
                return False
        elif due:
            return False
        elif isinstance(message, AssistantMessage):
            due = [part.id for part in message.tool_calls]
    return not due


class Strict(ScriptedModel):
    """Refuses what a provider would refuse."""

    async def stream(self, request: ModelRequest):
        if not is_valid(request.messages):
            raise AssertionError(f"no provider takes this: {list(request.messages)}")
        async for event in super().stream(request):
            yield event


# --- a resumed run executes the tool it was in, or those before, again ----------------------------------------------


async def test_completed_calls_are_read_from_the_log_and_not_executed_again(tmp_path: Path, store: Path) -> None:
    """Killed in the second call, then in the third, then several times on the way."""
    for point, step in (("step", "b"), ("step", "c"), ("admitted", ""), ("opened", "")):
        async with Child.run("agent", tmp_path, text="thrice", request_id="r", points=[point], step=step) as child:
            await child.at(point)
    again = await run("agent", tmp_path, text="thrice", request_id="r")
    assert again["answer"] == "all three"
    assert lines(tmp_path / "effects") == ["a", "b", "c"]
    results = [e["data"].get("code") for e in records(store, "entries") if e["kind"] == "pi.tool-result"]
    assert results == [None, "interrupted", "interrupted"]


async def test_a_fork_executes_no_call_of_its_parent_and_a_resume_forks_nothing(store: Path, tmp_path: Path) -> None:
    """Resume and fork are different verbs. Also a fork between a call and its result has a valid next request."""

    @tool(name="work")
    async def work() -> str:
        """Work."""
        note(tmp_path / "effects", "work")
        return "done"

    async with opened(store, Strict(SCRIPT), tools=(work,)) as harness:
        root = await harness.root()
        await (await root.submit("work")).answer()
        entries = await root.entries()
        for entry in entries:
            fork = await root.fork(entry.id)
            harness.resume()
            await fork.idle()
            assert [e.id for e in await fork.entries()] == [e.id for e in entries if e.id <= entry.id]
            assert (await (await fork.submit("hi")).answer()).text == "hello"
    async with opened(store, Strict(SCRIPT), tools=(work,)) as harness:
        await harness.idle()
        assert len(await harness.conversations()) == 1 + len(entries)
    assert lines(tmp_path / "effects") == ["work"]


# --- a stop command replayed after a crash stops newer work ----------------------------------------------------------


async def answered(path: Path, id: int) -> Any:
    """What became of a request in the mailbox."""
    async with asyncio.timeout(60):
        while (found := reply(path, id)) is None:
            await asyncio.sleep(0)
    return found


async def test_a_stop_command_that_comes_again_stops_nothing_newer(store: Path) -> None:
    """It names the run it is about: sent twice, and left in the mailbox while nobody was there."""
    hold = Hold()
    async with opened(store, ScriptedModel(SCRIPT, pace=hold)) as harness:
        root = await harness.root()
        first = await root.submit("hi")
        (task,) = (await harness.inspect()).tasks
        stop: JsonValue = {"conversation_id": root.id, "run": task.id}
        assert (await answered(store, post(store, "abort", stop, now=1))).ok
        assert (await first.wait()).reason == "aborted"
        second = await root.submit("long")
        refused = await answered(store, post(store, "abort", stop, now=2))
        assert not refused.ok
        assert await second.status() == "placed"
        assert await root.busy()
    late = post(store, "abort", stop, now=3)
    async with opened(store, ScriptedModel(SCRIPT)) as harness:
        assert not (await answered(store, late)).ok
        assert (await (await harness.submission(second.id)).answer()).text == LONG


# --- a call without a result: every later request is refused, and the other way round --------------------------------


class Odd(Entry, kind="app.odd"):
    """What another program, or a crash of one, may have left in a transcript."""

    what: list[dict[str, Any]]

    def messages(self) -> Sequence[JsonValue]:
        return self.what  # pyright: ignore


def made_call(*ids: str) -> dict[str, Any]:
    content = [{"type": "tool_call", "id": id, "name": "gone", "arguments": {}} for id in ids]
    return {"role": "assistant", "content": content, "provider": "p", "model": "m", "stop_reason": "tool_use"}


def made_result(id: str) -> dict[str, Any]:
    return {"role": "tool", "call_id": id, "name": "gone", "content": [{"type": "text", "text": id}]}


ODD = {
    "a call without a result": [[made_call("x")]],
    "a result without a call": [[made_result("x")]],
    "a result before its call": [[made_result("x")], [made_call("x")]],
    "two calls with one id, one result": [[made_call("x", "x")], [made_result("x")]],
    "two answers with one id, one result": [[made_call("x")], [made_call("x")], [made_result("x")]],
    "results in another order": [[made_call("x", "y")], [made_result("y")], [made_result("x")]],
    "two results of one call": [[made_call("x")], [made_result("x")], [made_result("x")]],
    "a result far behind its call": [[made_call("x")], [{"role": "user", "content": []}], [made_result("x")]],
}


@pytest.mark.parametrize("odd", ODD)
async def test_whatever_calls_and_results_are_in_the_transcript_the_next_request_is_valid(
    odd: str, store: Path
) -> None:
    async with opened(store, Strict(SCRIPT)) as harness:
        root = await harness.root()
        for messages in ODD[odd]:
            await root.write(Odd(what=messages))
        assert (await (await root.submit("hi")).answer()).text == "hello"
    async with opened(store, Strict(SCRIPT)) as harness:
        root = await harness.root()
        assert (await (await root.submit("long")).answer()).text == LONG


async def test_a_call_that_was_cut_off_leaves_a_valid_next_request(tmp_path: Path, store: Path) -> None:
    """By a kill, and by an abort, in a round of several: the later requests of the conversation are valid."""
    async with Child.run("agent", tmp_path, text="work", request_id="r", points=["tool"]) as child:
        await child.at("tool")
    reached = asyncio.Event()

    @tool(name="work")
    async def work() -> str:
        """Work."""
        reached.set()
        await asyncio.Event().wait()
        return ""

    @tool(name="step")
    async def step(name: str) -> str:
        """A step."""
        return name

    script = {**SCRIPT, "both": [calls(call("step", name="a"), call("work"), call("step", name="b")), say("both")]}
    async with opened(store, Strict(script), tools=(work, step)) as harness:
        root = await harness.root()
        assert (await (await root.submit("work", request_id="r")).answer()).text == "worked"
        both = await root.submit("both")
        await reached.wait()
        await root.abort()
        with pytest.raises(Unanswered, match="aborted"):
            await both.answer()
        assert (await (await root.submit("hi")).answer()).text == "hello"
    called = [e["data"]["calls"] for e in records(store, "entries") if (e.get("data") or {}).get("calls")]
    results = [e["data"]["task"] for e in records(store, "entries") if e["kind"] == "pi.tool-result"]
    assert sorted(results) == sorted(task for tasks in called for task in tasks)


# --- a malformed-request error treated as retryable: resent for six hours --------------------------------------------


async def test_a_malformed_request_is_sent_once_also_over_restarts(store: Path) -> None:
    """H74: and the conversation goes on with the next input."""
    script = {"bad": fail("malformed", "no such field"), "hi": say("hello")}
    first = ScriptedModel(script)
    async with opened(store, first) as harness:
        root = await harness.root()
        submission = await root.submit("bad", request_id="bad")
        with pytest.raises(Unanswered) as raised:
            await submission.answer()
        assert raised.value.reason == "model_error"
        assert "malformed" in str(raised.value)
        await harness.idle()
    assert len(first.requests) == 1
    second = ScriptedModel(script)
    async with opened(store, second) as harness:
        root = await harness.root()
        await harness.idle()
        assert (await (await root.submit("bad", request_id="bad")).wait()).reason == "model_error"
        assert not second.requests
        assert (await (await root.submit("hi")).answer()).text == "hello"
    assert len(second.requests) == 1


# --- streams: looks alive after a restart, nothing before the first token, text doubled ------------------------------


async def test_a_client_that_attaches_before_the_first_token_sees_that_it_is_busy(store: Path) -> None:
    """H15, H16: in the same process and in another one, by every way to look."""
    hold = Hold(0)
    async with opened(store, ScriptedModel(SCRIPT, pace=hold)) as harness:
        root = await harness.root()
        submission = await root.submit("hi")
        async with root.events() as events, root.view() as view, root.watch() as watch:
            snapshot = await anext(events)
            assert isinstance(snapshot, Snapshot)
            assert (snapshot.busy, view.value.busy, (await anext(watch)).value.busy) == (True, True, True)
        assert await root.busy()
        async with opened(store, read_only=True) as reader:
            there = await reader.conversation(root.id)
            assert await there.busy()
            async with there.view() as seen:
                assert seen.value.busy
            hold.release()
            await submission.answer()
            assert not await there.busy()


async def test_the_partial_of_a_dead_run_is_settled_before_the_answer_comes_anew(tmp_path: Path, store: Path) -> None:
    """H69: a client that was there before work went on sees the old stream end, and the new one begin empty."""
    async with Child.run("agent", tmp_path, text="long", request_id="r", points=["streaming"]) as child:
        shown = (await child.at("streaming"))["shown"]
    assert LONG.startswith(shown)
    hold = Hold(0)
    async with opened(store, ScriptedModel(SCRIPT, pace=hold)) as harness:
        root = await harness.root()
        async with root.events() as events:
            snapshot = await anext(events)
            assert isinstance(snapshot, Snapshot)
            assert snapshot.busy
            submission = await root.submit("long", request_id="r")
            async with asyncio.timeout(30):
                dead = [event async for event in up_to_end(events)]
            hold.release()
            async with asyncio.timeout(30):
                anew = [event async for event in up_to_end(events)]
        assert (await submission.answer()).text == LONG
        partial, whole = dead[-1].entry, anew[-1].entry
        assert partial is not None
        assert whole is not None
        assert text_of(partial.messages) == shown
        assert text_of(whole.messages) == LONG
        assert "".join(e.text for e in anew if isinstance(e, MessageDelta)) in (LONG, "")
        async with root.view() as view:
            assert (view.value.busy, view.value.live.message) == (False, None)
    stops = [e["messages"][0]["stop_reason"] for e in records(store, "entries") if e["kind"] == "pi.assistant"]
    assert stops == ["aborted", "stop"]


async def up_to_end(events: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for event in events:
        yield event
        if isinstance(event, MessageEnd):
            return


def text_of(messages: JsonValue) -> str:
    return "".join(part["text"] for message in messages for part in message["content"])  # pyright: ignore


async def test_a_client_that_reconnects_in_a_stream_reads_no_text_twice_and_misses_none(store: Path) -> None:
    """H149: a snapshot, and exactly what came after it."""
    told = asyncio.Semaphore(1)

    async def pace(request: object, event: int) -> None:
        await told.acquire()

    read: list[str] = []
    async with opened(store, ScriptedModel(SCRIPT, pace=pace), partial_interval_ms=0) as harness:
        root = await harness.root()
        submission = await root.submit("long")
        ended = False
        for _ in range(1_000):
            async with root.events() as events:
                text, deltas = "", 0
                async for event in events:
                    if isinstance(event, Snapshot):
                        view: Any = event.view
                        message = view["live"]["message"]
                        text = "" if message is None else "".join(part["text"] for part in message["content"])
                        ended = not event.busy
                        told.release()
                    elif isinstance(event, MessageDelta):
                        text += event.text
                        deltas += 1
                        told.release()
                    elif isinstance(event, MessageEnd):
                        assert event.entry is not None
                        assert text_of(event.entry.messages) == LONG
                        ended = True
                    if ended or deltas == 2:
                        break
            assert LONG.startswith(text)
            read.append(text)
            if ended:
                break
        assert (await submission.answer()).text == LONG
    assert len({text for text in read if text}) >= 3, f"it did reconnect in the middle: {read}"


# --- a retried request runs twice ------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["opened", "unadmitted", "unacknowledged", "admitted"])
async def test_a_request_that_is_retried_because_nobody_heard_of_it_runs_once(
    point: str, tmp_path: Path, store: Path
) -> None:
    """K132, H34: killed before, in, and after the commit that admits it."""
    async with Child.run("agent", tmp_path, text="work", request_id="r", points=[point]) as child:
        await child.at(point)
    for _ in range(2):
        again = await run("agent", tmp_path, text="work", request_id="r")
        assert again["answer"] == "worked"
    assert len(records(store, "submissions")) == 1
    assert lines(tmp_path / "effects") == ["work"]
    assert kinds(store) == ["pi.user", "pi.assistant", "pi.tool-result", "pi.assistant"]


async def test_a_request_that_is_retried_by_mail_runs_once(store: Path) -> None:
    """K72, H34: left in the mailbox twice, once while nobody was there, and submitted besides."""
    model = ScriptedModel(SCRIPT)
    wanted: dict[str, JsonValue] = {"conversation_id": 1, "content": "hi", "request_id": "r"}
    async with opened(store) as harness:
        await harness.root()
    first = post(store, "input", wanted, now=1)
    async with opened(store, model) as harness:
        second = post(store, "input", wanted, now=2)
        other = post(store, "input", {**wanted, "content": "long"}, now=3)
        replies = [await answered(store, id) for id in (first, second, other)]
        assert [found.ok for found in replies] == [True, True, False]
        submission = await (await harness.root()).submit("hi", request_id="r")
        assert [json.loads(bytes(found.result)) for found in replies[:2]] == [{"submission": submission.id}] * 2
        assert (await submission.answer()).text == "hello"
        await harness.idle()
    assert len(model.requests) == 1
    assert len(records(store, "submissions")) == 1


# --- abort reports done while the command goes on; a grandchild holds the pipe ---------------------------------------


@asynccontextmanager
async def commanding(store: Path, command: str, **options: Any) -> AsyncIterator[Harness]:
    """A harness whose model runs this command when told to go."""
    script = {"go": [call("bash", command=command), say("done")], "hi": say("hello")}
    async with Harness.open(
        SqliteStorage(store),
        models=ScriptedModel(script),
        extensions=[coding_tools()],
        environment=LocalEnvironment(store.parent, grace_ms=100),
        on_report=lambda report: None,
        **options,
    ) as harness:
        yield harness


async def told(pipe: Path) -> list[int]:
    """The process ids that a command writes into a pipe, once it has."""
    async with asyncio.timeout(60):
        return [int(word) for word in (await asyncio.to_thread(pipe.read_text)).split()]


EIGHT = """
pids=$$
for i in 1 2 3 4; do setsid sleep 1000 & pids="$pids $!"; done
for i in 1 2; do nohup sleep 1000 >/dev/null 2>&1 & pids="$pids $!"; done
for i in 1 2; do bash -c 'trap "" TERM; sleep 1000 & wait; wait' & pids="$pids $!"; done
echo $pids > pipe
wait
"""


@pytest.mark.parametrize("way", ["conversation", "task", "close"])
async def test_an_abort_returns_only_when_every_process_of_the_command_is_gone(way: str, store: Path) -> None:
    """T73, T90: eight of them, some in sessions of their own, some deaf to SIGTERM."""
    pipe = store.parent / "pipe"
    os.mkfifo(pipe)
    async with commanding(store, EIGHT) as harness:
        root = await harness.root()
        submission = await root.submit("go")
        pids = await told(pipe)
        assert len(pids) == 9
        assert all(alive(pid) for pid in pids)
        if way == "conversation":
            await root.abort()
        elif way == "task":
            (task,) = [t.id for t in (await harness.inspect()).tasks if t.kind == "pi.tool"]
            await harness.abort_task(task)
        else:
            await harness.close()
        assert [pid for pid in pids if alive(pid)] == []
        if way == "conversation":
            assert (await submission.record()).reason == "aborted"
            assert (await (await root.submit("hi")).answer()).text == "hello"


async def test_a_command_that_has_ended_is_over_though_a_grandchild_holds_its_pipe(store: Path) -> None:
    """T90: the turn ends with the command, and the grandchild with it."""
    command = "sleep 1000 & echo $! > left; echo the words"
    async with commanding(store, command) as harness:
        root = await harness.root()
        async with asyncio.timeout(30):
            answer = await (await root.submit("go")).answer()
        assert answer.text == "done"
        assert (await transcript(root))[2] == "tool-result the words\n"
        (pid,) = lines(store.parent / "left")
        assert not alive(int(pid))


async def test_what_a_killed_host_left_running_is_ended_before_the_next_command(tmp_path: Path, store: Path) -> None:
    """Its command goes on after the kill; the next host of the workspace ends it before it changes anything."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = f"sleep 1000 & echo $$ $! > {shlex.quote(str(pipe))}; wait"
    async with Child.run("coder", tmp_path, commands=[command, "echo second"], request_id="r") as child:
        pids = await told(pipe)
        await child.kill()
    assert all(alive(pid) for pid in pids), "nobody was there to end it"
    again = await run("coder", tmp_path, commands=[command, "echo second"], request_id="r")
    assert again["answer"] == "done"
    assert [pid for pid in pids if alive(pid)] == []
    results = [line for line in again["transcript"] if line.startswith("tool-result")]
    assert "interrupted" in results[0]
    assert results[1] == "tool-result second\n"


async def test_an_abort_that_cannot_stop_code_says_so_and_is_carried_out_when_it_returns(store: Path) -> None:
    """T86 to T89: a synchronous tool runs in a thread, which nobody can stop."""
    gate, reached, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()

    @tool(name="work")
    def work() -> str:
        """Work."""
        loop.call_soon_threadsafe(reached.set)
        gate.wait(60)
        return "too late"

    reports: list[Report] = []
    model = ScriptedModel(SCRIPT)
    async with opened(store, model, tools=(work,), drain_ms=20, reports=reports) as harness:
        root = await harness.root()
        submission = await root.submit("work")
        await reached.wait()
        with pytest.raises(NotStopped, match=r"pi\.tool") as raised:
            await root.abort()
        assert len(raised.value.names) == 1
        assert [report.type for report in reports] == ["not_stopped"]
        assert "tool" in reports[0].message
        assert await submission.status() == "placed", "nothing is said to have ended that has not"
        assert all(task.abort_requested for task in (await harness.inspect()).tasks)
        gate.set()
        assert (await submission.wait()).reason == "aborted"
        await harness.idle()
        assert (await (await root.submit("hi")).answer()).text == "hello"
    (result,) = [e["data"] for e in records(store, "entries") if e["kind"] == "pi.tool-result"]
    assert result["code"] == "aborted"


# --- one waiter's time-out cancels another's wait --------------------------------------------------------------------


async def test_a_waiter_that_gives_up_cancels_nobody_elses_wait(store: Path) -> None:
    """K80, T77: on one submission, one task and idle, many wait, and some give up in between."""
    hold, gate, reached = Hold(1), asyncio.Event(), asyncio.Event()

    class Slow(Task[None, str], kind="app.slow"):
        async def start(self, run: Run[None, str, None]) -> Next[str]:
            reached.set()
            await gate.wait()
            async with run.commit() as tx:
                return tx.complete("slow")

    async with opened(store, ScriptedModel(SCRIPT, pace=hold), tasks=(Slow,)) as harness:
        root = await harness.root()
        submission = await root.submit("hi")
        async with root.commit() as tx:
            task = tx.create_task(Slow, None)
        await hold.reached.wait()
        await reached.wait()
        waits: list[Callable[[], Any]] = [
            submission.wait,
            submission.answer,
            lambda: harness.tasks.wait(task.id),
            harness.idle,
            root.idle,
        ]
        stay = [asyncio.ensure_future(wait()) for wait in waits]
        go = [asyncio.ensure_future(asyncio.wait_for(wait(), 0.02)) for wait in waits]
        assert [type(error) for error in await asyncio.gather(*go, return_exceptions=True)] == [TimeoutError] * 5
        for wait in waits:
            leaving = asyncio.ensure_future(wait())
            await asyncio.sleep(0)
            leaving.cancel()
        assert not any(waiting.done() for waiting in stay)
        hold.release()
        gate.set()
        done = await asyncio.gather(*stay)
        assert (done[0].status, done[1].text) == ("done", "hello")
        assert isinstance(done[2], Completed)


# --- a code change between crash and resume breaks replay silently ---------------------------------------------------


class Older(Task[str, str], kind="app.parcel", version=1):
    async def start(self, run: Run[str, str, None]) -> Next[str]:
        raise AssertionError("older code never runs it")


class Renamed(Task[str, str], kind="app.parcel", version=2):
    """The same version, and the phase is not there any more."""

    async def start(self, run: Run[str, str, None]) -> Next[str]:
        raise AssertionError("it was past its start")


class Reshaped(Task[str, str], kind="app.parcel", version=2):
    """The same version, and its checkpoint is another thing now."""

    async def start(self, run: Run[str, str, None]) -> Next[str]:
        raise AssertionError("it was past its start")

    async def deliver(self, run: Run[str, str, int]) -> Next[str]:
        raise AssertionError("what is stored is no int")


class Newer(Task[str, str], kind="app.parcel", version=3):
    async def start(self, run: Run[str, str, None]) -> Next[str]:
        raise AssertionError("it was past its start")

    async def deliver(self, run: Run[str, str, list[str]]) -> Next[str]:
        async with run.commit() as tx:
            return tx.complete(" ".join(run.checkpoint))

    @classmethod
    def migrate(cls, stored: StoredTask) -> StoredTask:
        return StoredTask(
            version=3, input=stored.input, phase="deliver", checkpoint=["migrated", str(stored.checkpoint)]
        )


@pytest.mark.parametrize(
    ("code", "reason"),
    [(None, "missing_task"), (Older, "task_too_old"), (Renamed, "migration_failed"), (Reshaped, "migration_failed")],
)
async def test_a_code_change_between_crash_and_resume_blocks_with_a_reason_and_fitting_code_goes_on(
    code: Any, reason: str, tmp_path: Path, store: Path
) -> None:
    """T31 to T33: killed in the second phase."""
    async with Child.run("shipper", tmp_path) as child:
        task = (await child.at("delivering"))["task"]
    async with opened(store, tasks=() if code is None else (code,)) as harness:
        with pytest.raises(WorkBlocked) as raised:
            async with asyncio.timeout(30):
                await harness.tasks.wait(task)
        assert raised.value.reason == reason
        (seen,) = (await harness.inspect()).tasks
        assert (seen.blocked, seen.phase, seen.version) == (reason, "deliver", 2)
        harness.registry.replace(Extension("app", tasks=[Newer]))
        outcome = await harness.tasks.wait(task)
        assert isinstance(outcome, Completed)
        assert outcome.result == "migrated label of bolts"
