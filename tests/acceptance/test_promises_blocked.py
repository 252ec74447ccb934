"""Work that the code at hand does not fit: blocked, to be seen, and nobody waits for it in vain.

Rules T30 to T34 (fitting code), T41 to T48 (parked, blocked, waits), T82 (aborting what is blocked).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from acceptance_kit import SCRIPT, STORE, Child, lines, note, opened, records

from perdure import Extension, Harness, Next, Report, Run, Task, WorkBlocked, tool
from perdure.harness.events import Blocked, Events, Snapshot
from perdure.kernel.records import Completed, Orphaned
from perdure.tasks.definition import StoredTask
from perdure.testing.model import ScriptedModel


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / STORE


@dataclass(frozen=True)
class Order:
    item: str
    count: int = 1


class Ship(Task[str, str], kind="app.ship", version=2):
    """As it was when the work began: it waits for a word."""

    async def start(self, run: Run[str, str, None]) -> Next[str]:
        async with run.commit() as tx:
            return tx.wait_signal("ready", self.deliver, f"label of {run.input}")

    async def deliver(self, run: Run[str, str, str]) -> Next[str]:
        async with run.commit() as tx:
            return tx.complete(f"delivered {run.checkpoint} by version 2")


class Older(Task[str, str], kind="app.ship", version=1):
    async def start(self, run: Run[str, str, None]) -> Next[str]:
        raise AssertionError("older code never runs a newer record")


class Unable(Task[Order, str], kind="app.ship", version=3):
    """Newer, without a way from what is stored."""

    async def start(self, run: Run[Order, str, None]) -> Next[str]:
        raise AssertionError("code that cannot read the record never runs it")


class Raising(Task[Order, str], kind="app.ship", version=3):
    async def start(self, run: Run[Order, str, None]) -> Next[str]:
        raise AssertionError("code that cannot read the record never runs it")

    @classmethod
    def migrate(cls, stored: StoredTask) -> StoredTask:
        raise KeyError("no such item")


class Wrong(Task[Order, str], kind="app.ship", version=3):
    async def start(self, run: Run[Order, str, None]) -> Next[str]:
        raise AssertionError("code that cannot read the record never runs it")

    @classmethod
    def migrate(cls, stored: StoredTask) -> StoredTask:
        return StoredTask(version=3, input={"item": 1}, phase=stored.phase, checkpoint=None)


class Newer(Task[Order, str], kind="app.ship", version=3):
    """Reads what version 2 stored: a text was the order, and ``deliver`` is called ``hand_over`` now."""

    async def start(self, run: Run[Order, str, None]) -> Next[str]:
        raise AssertionError("it had been started already")

    async def hand_over(self, run: Run[Order, str, Order]) -> Next[str]:
        assert run.input == run.checkpoint
        async with run.commit() as tx:
            return tx.complete(f"handed over {run.checkpoint.count} {run.checkpoint.item} by version 3")

    @classmethod
    def migrate(cls, stored: StoredTask) -> StoredTask:
        assert (stored.version, stored.phase) == (2, "deliver")
        order = {"item": stored.input, "count": 1}
        return StoredTask(version=3, input=order, phase="hand_over", checkpoint=order)


async def begun(store: Path) -> int:
    """A task that was begun by version 2 and has had its word; nothing runs any more."""
    async with opened(store, tasks=(Ship,)) as harness:
        root = await harness.root()
        harness.resume()
        waiting = asyncio.Event()
        harness.session.observe(lambda s: waiting.set() if any(t.status == "waiting" for t in s.batch.tasks) else None)
        async with root.commit() as tx:
            task = tx.create_task(Ship, "bolts")
        await waiting.wait()
    async with opened(store, tasks=()) as harness:
        assert await harness.send_signal(task.id, "ready")
    return task.id


BLOCKED = {
    "missing": ((), "missing_task"),
    "older": ((Older,), "task_too_old"),
    "without a migration": ((Unable,), "migration_failed"),
    "with a migration that raises": ((Raising,), "migration_failed"),
    "with a migration that makes what does not fit": ((Wrong,), "migration_failed"),
}


@pytest.mark.parametrize("code", BLOCKED)
async def test_a_task_that_no_code_fits_is_blocked_to_be_seen_and_waits_on_it_are_answered(
    code: str, store: Path
) -> None:
    """T31, T46 to T48: the record stays as it is; fitting code that is installed runs it."""
    task = await begun(store)
    tasks, reason = BLOCKED[code]
    reports: list[Report] = []
    before = records(store, "tasks")
    async with opened(store, tasks=tasks, reports=reports) as harness:
        root = await harness.root()
        (seen,) = (await harness.inspect()).tasks
        assert (seen.id, seen.kind, seen.version, seen.status) == (task, "app.ship", 2, "pending")
        waits: list[Callable[[], Awaitable[object]]] = [
            lambda: harness.tasks.wait(task),
            lambda: root.idle(),
            lambda: harness.idle(),
        ]
        for wait in waits:
            with pytest.raises(WorkBlocked) as raised:
                async with asyncio.timeout(30):
                    await wait()
            assert (raised.value.task, raised.value.reason, raised.value.kind) == (task, reason, "app.ship")
        (seen,) = (await harness.inspect()).tasks
        assert (seen.status, seen.blocked) == ("pending", reason)
        assert [(r.type, r.task, r.kind) for r in reports] == [("task_blocked", task, "app.ship")]
        assert records(store, "tasks") == before, "what it waits to go on from is untouched"
        through = asyncio.ensure_future(harness.tasks.wait(task, through_blocked=True))
        harness.registry.replace(Extension("app", tasks=[Newer]))
        outcome = await through
        assert isinstance(outcome, Completed)
        assert outcome.result == "handed over 1 bolts by version 3"
        await harness.idle()


async def test_newer_code_migrates_what_an_older_version_stored(store: Path) -> None:
    """T31: and the record is of the new version from the next commit on."""
    task = await begun(store)
    async with opened(store, tasks=(Newer,)) as harness:
        outcome = await harness.tasks.wait(task)
        assert isinstance(outcome, Completed)
        assert outcome.result == "handed over 1 bolts by version 3"
    (record,) = records(store, "tasks")
    assert record["version"] == 3


async def test_code_of_the_same_version_goes_on_where_the_work_stood(store: Path) -> None:
    task = await begun(store)
    async with opened(store, tasks=(Ship,)) as harness:
        outcome = await harness.tasks.wait(task)
        assert isinstance(outcome, Completed)
        assert outcome.result == "delivered label of bolts by version 2"


async def test_a_wait_for_what_rests_on_blocked_work_is_answered_too(store: Path) -> None:
    """T47: the owner of a blocked task waits, so a wait for the owner is answered with the task it is about."""

    class Fleet(Task[None, None], kind="app.fleet"):
        async def start(self, run: Run[None, None, None]) -> Next[None]:
            async with run.commit() as tx:
                ship = tx.create_task(Ship, "nuts")
                return tx.wait([ship.id], self.home, None)

        async def home(self, run: Run[None, None, None]) -> Next[None]:
            async with run.commit() as tx:
                return tx.complete(None)

    async with opened(store, tasks=(Fleet,)) as harness:
        root = await harness.root()
        harness.resume()
        async with root.commit() as tx:
            fleet = tx.create_task(Fleet, None)
        with pytest.raises(WorkBlocked) as raised:
            async with asyncio.timeout(30):
                await harness.tasks.wait(fleet.id)
        assert raised.value.task != fleet.id
        assert (raised.value.reason, raised.value.kind) == ("missing_task", "app.ship")


async def test_aborting_blocked_work_settles_it_without_its_code(store: Path) -> None:
    """T82."""
    task = await begun(store)
    async with opened(store, tasks=()) as harness:
        await harness.abort_task(task)
        assert await harness.tasks.wait(task) == Orphaned("missing_task")


# --- parked ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def parked(tmp_path: Path) -> AsyncIterator[tuple[Harness, int]]:
    """A safe tool that ends its process each time, until it is not run any more."""
    options = {"text": "work", "request_id": "r", "replay": "safe", "restart_limit": 2}
    submission = 0
    for _ in range(2):
        async with Child.run("agent", tmp_path, **options, points=["tool"]) as child:
            await child.at("tool")
            submission = child.said[-2]["submission"]

    @tool(name="work", replay="safe")
    async def work() -> str:
        """Work."""
        note(tmp_path / "effects", "work")
        return "the work's result"

    async with opened(tmp_path / STORE, ScriptedModel(SCRIPT), tools=(work,), restart_limit=2) as harness:
        yield harness, submission


async def test_a_call_that_ends_its_process_again_and_again_is_parked_and_its_submission_says_so(
    tmp_path: Path,
) -> None:
    """T41 to T43, T47: the wait for the answer is answered; after a retry the answer comes."""
    async with parked(tmp_path) as (harness, id):
        submission = await harness.submission(id)
        with pytest.raises(WorkBlocked) as raised:
            async with asyncio.timeout(30):
                await submission.wait()
        assert (raised.value.reason, raised.value.kind) == ("parked", "pi.tool")
        with pytest.raises(WorkBlocked):
            await harness.idle()
        blocked = [task for task in (await harness.inspect()).tasks if task.blocked]
        assert [(task.id, task.blocked, task.restarts) for task in blocked] == [(raised.value.task, "parked", 2)]
        assert len(lines(tmp_path / "effects")) == 2
        await harness.retry_task(raised.value.task)
        assert (await submission.answer()).text == "worked"
        assert len(lines(tmp_path / "effects")) == 3


async def until_blocked(events: Events) -> AsyncIterator[Blocked]:
    async for event in events:
        if isinstance(event, Blocked):
            yield event
            return


async def test_events_tell_of_blocked_work_and_a_late_client_hears_of_it_first(tmp_path: Path) -> None:
    """T48, H149."""
    async with parked(tmp_path) as (harness, id):
        root = await harness.root()
        async with root.events() as early:
            assert isinstance(await anext(early), Snapshot)
            harness.resume()
            async with asyncio.timeout(30):
                told = [event async for event in until_blocked(early)]
            assert (told[-1].kind, told[-1].reason) == ("pi.tool", "parked")
        async with root.events() as late:
            first = await anext(late)
            assert isinstance(first, Snapshot)
            assert first.busy
            assert [(task.kind, task.reason) for task in first.blocked] == [("pi.tool", "parked")]
        await root.abort()
        record = await (await harness.submission(id)).record()
        assert (record.status, record.reason) == ("unanswered", "aborted")
