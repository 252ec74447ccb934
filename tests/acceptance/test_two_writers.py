"""Faults of two writers at one session, each by its name: none may happen, and whoever loses is told.

Rules K165 to K173 (owner lock, fence), K62, K85 to K87 (code that does not stop), T25, T35, T71 (claims of work).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from acceptance_kit import (
    LONG,
    SCRIPT,
    STORE,
    Audit,
    Child,
    Counter,
    Hold,
    kinds,
    lines,
    note,
    opened,
    reading,
    records,
    run,
    transcript,
)

from perdure import (
    Next,
    Report,
    Run,
    Session,
    SessionClosed,
    SessionFailed,
    SqliteStorage,
    StaleEpochError,
    StorageBusy,
    Task,
    tool,
)
from perdure.kernel.records import Aborted
from perdure.testing.model import ScriptedModel


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / STORE


def fence(path: Path) -> tuple[int, str, int]:
    """Epoch, writer and last commit, as they stand in the file."""
    with reading(path) as found:
        return found.execute("SELECT epoch, writer, seq FROM meta").fetchone()


async def count(path: Path) -> int:
    async with Session.open(SqliteStorage(path), read_only=True) as session:
        counter = await session.snapshot(Counter)
        return 0 if counter is None else counter.n


# --- two processes open one session: duplicate turns, lost increments, the model paid twice ----------------------


async def test_a_second_process_is_refused_before_it_changes_anything_and_told_who_holds_the_session(
    tmp_path: Path, store: Path
) -> None:
    async with Child.run("agent", tmp_path, text="long", request_id="r", points=["streaming"]) as owner:
        await owner.at("streaming")
        before = fence(store)
        model = ScriptedModel(SCRIPT)
        for _ in range(2):
            with pytest.raises(StorageBusy, match=rf"process {owner.pid} on host"):
                async with opened(store, model):
                    raise AssertionError("two own it")
        assert fence(store) == before
        assert not model.requests
        owner.go()
        assert (await owner.end())["answer"] == LONG
    assert kinds(store) == ["pi.user", "pi.assistant"], "the model was asked once, and answered one turn"


async def test_of_many_processes_with_one_request_the_model_and_the_tool_are_asked_once(
    tmp_path: Path, store: Path
) -> None:
    """Each asks until it has the answer; whoever finds the session taken is refused at once."""
    refused = 0

    async def insist() -> dict[str, Any]:
        nonlocal refused
        for _ in range(100):
            said = await run("agent", tmp_path, text="work", request_id="r")
            if "answer" in said:
                return said
            assert said["refused"] == "StorageBusy"
            refused += 1
        raise AssertionError("it was never its turn")

    answers = await asyncio.gather(*(insist() for _ in range(4)))
    assert {said["answer"] for said in answers} == {"worked"}
    assert len({said["submission"] for said in answers}) == 1
    assert lines(tmp_path / "effects") == ["work"]
    assert kinds(store) == ["pi.user", "pi.assistant", "pi.tool-result", "pi.assistant"]


async def test_no_increment_is_lost_between_processes(tmp_path: Path, store: Path) -> None:
    """Also where the store is made by whoever comes first."""
    processes, times = 4, 5

    async def keep_asking(child: Child) -> int:
        refused = 0
        for _ in range(10_000):
            said = await child.next()
            assert said is not None
            if "point" in said:
                child.go()
            elif "refused" in said:
                assert said["refused"] == "StorageBusy", said["words"]
                refused += 1
            elif "done" in said:
                return refused
        raise AssertionError("it was never its turn")

    async def one() -> int:
        async with Child.run("increments", tmp_path, times=times) as child:
            return await keep_asking(child)

    refused = await asyncio.gather(*(one() for _ in range(processes)))
    assert sum(refused) > 0, "they did meet"
    assert await count(store) == processes * times
    epoch, _, seq = fence(store)
    assert (epoch, seq) == (processes * times, processes * times), "who was refused left no trace"


async def test_a_frozen_owner_keeps_its_session_until_it_is_dead(tmp_path: Path, store: Path) -> None:
    """A lock that could time out would be a second writer once its holder wakes up."""
    async with Child.run("holder", tmp_path) as owner:
        await owner.at("owned")
        os.kill(owner.pid, signal.SIGSTOP)
        with pytest.raises(StorageBusy, match=f"process {owner.pid} "):
            async with Session.open(SqliteStorage(store)):
                raise AssertionError("two own it")
        await owner.kill()
    async with Session.open(SqliteStorage(store)) as session:
        assert session.info.epoch == 2


async def test_a_dead_owner_locks_nobody_out(tmp_path: Path, store: Path) -> None:
    for epoch in (1, 2, 3):
        async with Child.run("holder", tmp_path) as owner:
            assert (await owner.at("owned"))["epoch"] == epoch
    assert (tmp_path / f"{STORE}.lock").read_text(), "its name is still in the sidecar"
    async with Session.open(SqliteStorage(store)) as session:
        assert session.info.epoch == 4


# --- two writers with the same epoch after an epoch counter restarted -----------------------------------------------


async def test_an_epoch_that_was_had_before_is_refused_naming_both_sides(store: Path) -> None:
    async with Session.open(SqliteStorage(store), epoch=5) as session:
        first = session.info
    for epoch in (5, 4, 1):
        with pytest.raises(StaleEpochError, match=rf"{epoch}.*5") as raised:
            async with Session.open(SqliteStorage(store), epoch=epoch):
                raise AssertionError("it was had before")
        assert (raised.value.mine, raised.value.stored) == (epoch, 5)
        assert raised.value.stored_writer == first.writer != raised.value.my_writer
    assert fence(store) == (5, first.writer, 0)
    async with Session.open(SqliteStorage(store), epoch=6) as session:
        assert session.info.writer != first.writer
    async with Session.open(SqliteStorage(store)) as session:
        assert session.info.epoch == 7


@pytest.mark.parametrize("epoch", [2**62 + 1, 2**63 - 1, 2**70, 1.5, True, "7"])
async def test_an_epoch_that_nobody_could_rise_above_is_refused_and_locks_nobody_out(epoch: Any, store: Path) -> None:
    """K172: at the open, and by a commit; the highest that may be asked for leaves room."""
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match="epoch"):
            async with opened(store, epoch=epoch):
                raise AssertionError("it was opened")
        async with Session.open(SqliteStorage(store)) as session:
            with pytest.raises((TypeError, ValueError), match="epoch"):
                async with session.commit() as tx:
                    tx.raise_epoch(epoch)
    async with opened(store, epoch=2**62):
        pass
    async with opened(store) as harness:
        assert harness.session.info.epoch == 2**62 + 1


async def test_a_superseded_process_adds_nothing_and_the_new_one_never_notices(tmp_path: Path, store: Path) -> None:
    """The lock file was removed under its holder: the fence in the store is what counts."""
    async with Child.run("holder", tmp_path, epoch=3) as old:
        assert (await old.at("owned"))["epoch"] == 3
        (tmp_path / f"{STORE}.lock").unlink()
        async with Session.open(SqliteStorage(store), epoch=4) as new:
            async with new.commit() as tx:
                (await tx.draft(Counter)).n = 10
            old.go()
            said = await old.next()
            assert said is not None
            assert said["refused"] == "StaleEpochError"
            assert "epoch 3" in said["words"]
            assert "epoch 4" in said["words"]
            await old.kill()
            async with new.commit() as tx:
                counter = await tx.draft(Counter)
                assert counter.n == 10
                counter.n += 1
            assert new.failed is None
    assert await count(store) == 11


async def test_a_superseded_process_is_told_by_its_next_read_too(store: Path) -> None:
    """What it would read is another writer's commit, which never settles here: it must not wait for that."""
    async with Session.open(SqliteStorage(store)) as old:
        (store.parent / f"{STORE}.lock").unlink()
        async with Session.open(SqliteStorage(store)) as new:
            async with new.commit() as tx:
                (await tx.draft(Counter)).n = 1
            with pytest.raises(StaleEpochError):
                async with asyncio.timeout(30):
                    await old.snapshot(Counter)
            with pytest.raises(SessionFailed):
                await old.conversations()
            async with new.commit() as tx:
                (await tx.draft(Counter)).n += 1
    assert await count(store) == 2


async def test_a_writer_of_the_same_epoch_and_another_identity_is_refused(store: Path) -> None:
    """An epoch counter that restarted gives two writers one number; they are told apart all the same."""
    async with Session.open(SqliteStorage(store), epoch=1) as session:
        async with session.commit() as tx:
            (await tx.draft(Counter)).n = 1
        with closing(sqlite3.connect(store)) as other, other:
            other.execute("UPDATE meta SET writer = 'the other one'")
        with pytest.raises(StaleEpochError, match="the other one") as raised:
            async with session.commit() as tx:
                (await tx.draft(Counter)).n = 2
        assert (raised.value.mine, raised.value.stored) == (1, 1)
        assert session.failed is raised.value
    assert await count(store) == 1


async def test_a_superseded_agent_stops_and_none_of_its_work_is_stored(store: Path, tmp_path: Path) -> None:
    """K62, K64: its tool ended after the fence was raised; the result is refused, and waits say why."""
    gate, reached = asyncio.Event(), asyncio.Event()

    @tool(name="work")
    async def work() -> str:
        """Work."""
        reached.set()
        await gate.wait()
        return "too late"

    async with opened(store, ScriptedModel(SCRIPT), tools=(work,)) as harness:
        root = await harness.root()
        submission = await root.submit("work")
        waiting = asyncio.ensure_future(submission.answer())
        await reached.wait()
        before = records(store, "entries")
        with closing(sqlite3.connect(store)) as other, other:
            other.execute("UPDATE meta SET epoch = epoch + 1, writer = 'the new one'")
        gate.set()
        with pytest.raises(SessionFailed) as raised:
            await waiting
        assert isinstance(raised.value.cause, StaleEpochError)
        with pytest.raises(SessionFailed):
            await root.submit("hi")
    assert records(store, "entries") == before
    assert fence(store)[1] == "the new one"


# --- a cancelled run's late checkpoint overwrites a newer one --------------------------------------------------------


class Late(Task[None, str], kind="app.late"):
    """Goes on after it was told to stop, and tries to write what it has."""

    def __init__(self) -> None:
        self.began, self.gate = asyncio.Event(), asyncio.Event()
        self.refused: list[str] = []

    async def start(self, run: Run[None, str, None]) -> Next[str]:
        self.began.set()
        while not self.gate.is_set():
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                continue
        for _ in range(2):
            try:
                async with run.commit() as tx:
                    (await tx.draft(Counter)).n += 1
                    tx.append(Audit(n=1))
                    return tx.complete("late")
            except Exception as error:
                self.refused.append(type(error).__name__)
        raise RuntimeError("nothing it tried was taken")


async def test_what_a_cancelled_run_writes_late_is_refused(store: Path) -> None:
    """T71, K93: the abort was first; it decides."""
    late = Late()
    async with opened(store, tasks=(late,)) as harness:
        root = await harness.root()
        harness.resume()
        async with root.commit() as tx:
            task = tx.create_task(Late, None)
        await late.began.wait()
        aborting = asyncio.ensure_future(harness.abort_task(task.id, reason="not wanted"))
        marked = asyncio.Event()
        harness.session.observe(lambda settled: marked.set())
        await marked.wait()
        late.gate.set()
        await aborting
        assert len(late.refused) == 2
        assert set(late.refused) <= {"RunEnded", "ContextCancelled"}
        assert await harness.tasks.wait(task.id) == Aborted("not wanted")
        assert await transcript(root) == []
    assert await count(store) == 0


# --- recovery at launch adopts work that still runs in the same process ----------------------------------------------


async def test_a_second_harness_in_the_same_process_is_refused_and_adopts_nothing(store: Path, tmp_path: Path) -> None:
    gate, reached = asyncio.Event(), asyncio.Event()

    @tool(name="work", replay="safe")
    async def work() -> str:
        """Work."""
        note(tmp_path / "effects", "work")
        reached.set()
        await gate.wait()
        return "done"

    async with opened(store, ScriptedModel(SCRIPT), tools=(work,)) as harness:
        submission = await (await harness.root()).submit("work")
        await reached.wait()
        before = records(store, "tasks")
        # The same file by another name is the same session.
        (tmp_path / "another name").symlink_to(store)
        for name in (store, tmp_path / "another name"):
            with pytest.raises(StorageBusy, match=f"process {os.getpid()} "):
                async with opened(name, ScriptedModel(SCRIPT), tools=(work,)):
                    raise AssertionError("two own it")
        assert records(store, "tasks") == before
        gate.set()
        assert (await submission.answer()).text == "worked"
    assert lines(tmp_path / "effects") == ["work"]


async def test_code_that_outlives_its_harness_keeps_the_session_until_it_returns(store: Path, tmp_path: Path) -> None:
    """K85 to K87: nobody may start it a second time beside itself; then it was cut off, and is run again."""
    gate, reached = asyncio.Event(), asyncio.Event()

    @tool(name="work", replay="safe")
    async def work() -> str:
        """Work."""
        note(tmp_path / "effects", "began")
        reached.set()
        while not gate.is_set():
            try:
                await gate.wait()
            except asyncio.CancelledError:
                continue
        note(tmp_path / "effects", "ended")
        return "done"

    reports: list[Report] = []
    model = ScriptedModel(SCRIPT)
    async with opened(store, model, tools=(work,), drain_ms=20, reports=reports) as harness:
        submission = await (await harness.root()).submit("work")
        await reached.wait()
        report = await harness.close()
        assert len(report.stragglers) == 1
        assert "pi.tool" in report.stragglers[0]
        assert "not_stopped" in {report.type for report in reports}
        with pytest.raises(SessionClosed):
            await submission.status()
        with pytest.raises(StorageBusy):
            async with opened(store, model, tools=(work,)):
                raise AssertionError("it still runs")
        (call,) = [task for task in records(store, "tasks") if task["kind"] == "pi.tool"]
        assert call["state"]["type"] == "running"
        gate.set()
        async with asyncio.timeout(30):
            while lines(tmp_path / "effects") != ["began", "ended"] or not await free(store):
                await asyncio.sleep(0)
    async with opened(store, model, tools=(work,)) as harness:
        assert (await (await harness.submission(submission.id)).answer()).text == "worked"
    assert lines(tmp_path / "effects") == ["began", "ended"] * 2


async def free(store: Path) -> bool:
    try:
        async with Session.open(SqliteStorage(store)):
            return True
    except StorageBusy:
        return False


async def test_a_stream_that_is_held_is_not_adopted_by_the_next_open(store: Path) -> None:
    """What a harness was doing when it closed is begun anew by the next one, once, however often it is opened."""
    hold = Hold(1)
    async with opened(store, ScriptedModel(SCRIPT, pace=hold)) as harness:
        submission = await (await harness.root()).submit("long")
        await hold.reached.wait()
    for _ in range(2):
        async with opened(store, ScriptedModel(SCRIPT)) as harness:
            (task,) = (await harness.inspect()).tasks
            assert (task.status, task.restarts) == ("pending", 0), "a close counts nothing"
    async with opened(store, ScriptedModel(SCRIPT)) as harness:
        assert (await (await harness.submission(submission.id)).answer()).text == LONG
    assert [e["messages"][0].get("stop_reason") for e in records(store, "entries")][-1] == "stop"
