"""Retention: what nobody touched for long is deleted, and nothing else (rules K225 to K229)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from kit import Hold, Note, opened, queue, transcript

from perdure import Retention
from perdure.harness import retention
from perdure.harness.conversation import Conversation
from perdure.harness.documents import Meta
from perdure.harness.harness import Harness
from perdure.kernel.clock import SystemClock
from perdure.kernel.errors import NotFound
from perdure.kernel.transaction import Transaction
from perdure.storage.memory import MemoryStorage
from perdure.tasks.definition import Next, Task
from perdure.tasks.run import Run
from perdure.testing.model import ScriptedModel, fail, say

DAY = 86_400_000


class Calendar(SystemClock):
    """The day is what the test says; time to wait is real."""

    day = 100

    def wall(self) -> int:
        return self.day * DAY


@asynccontextmanager
async def on_a_calendar(**more: Any) -> AsyncIterator[tuple[Harness, Calendar]]:
    clock = Calendar()
    model = ScriptedModel(lambda request: say("answer"), **{k: more.pop(k) for k in ("pace",) if k in more})
    async with opened(model, clock=clock, **more) as harness:
        await harness.root()
        yield harness, clock


async def asked(harness: Harness, text: str = "hi", **more: Any) -> Conversation:
    conversation = await harness.create_conversation(**more)
    await (await conversation.submit(text)).wait()
    return conversation


async def there(harness: Harness) -> set[int]:
    return {info.id for info in await harness.conversations(limit=1000)}


class Child(Task[None, int], kind="app.child"):
    """Makes a conversation of its own, and ends."""

    async def start(self, run: Run[None, int, None]) -> Next[int]:
        async with run.commit() as tx:
            child = tx.create_conversation(owner=run.id)
            tx.append(Note(text="of the child"), conversation=child.id)
            return tx.complete(child.id)


async def test_what_nobody_touched_goes_and_the_rest_stays_k225_k226() -> None:
    async with on_a_calendar() as (harness, clock):
        root = await harness.root()
        await (await root.submit("old, but the root")).wait()
        old = await asked(harness)
        unused = await harness.create_conversation()
        named = await asked(harness, name="mine")
        touched = await asked(harness)
        forked = await asked(harness)
        clock.day += 20
        await (await touched.submit("again")).wait()
        young = await asked(harness)
        fork = await forked.fork((await forked.entries())[-1].id)
        clock.day += 15
        report = await harness.apply_retention(Retention(older_than_ms=30 * DAY))
        assert (report.matched, report.looked_at, report.owned, report.open) == (3, 7, 0, 0)
        assert report.ids == (old.id, unused.id, forked.id)
        assert await there(harness) == {root.id, named.id, touched.id, young.id, fork.id}
        assert await transcript(fork) == ["user hi", "assistant answer"], "forks go on (K196)"
        assert (await harness.usage()).requests == 7, "what went stays in the sum (H184)"
        again = await harness.apply_retention(Retention(older_than_ms=30 * DAY))
        assert (again.matched, again.looked_at) == (0, 4)
        both = await harness.apply_retention(Retention(older_than_ms=30 * DAY, named=True))
        assert both.ids == (named.id,)


async def test_an_age_is_met_to_the_millisecond_k226() -> None:
    async with on_a_calendar() as (harness, clock):
        old = await asked(harness)
        clock.day += 30
        assert (await harness.apply_retention(Retention(older_than_ms=30 * DAY + 1))).matched == 0
        assert (await harness.apply_retention(Retention(older_than_ms=30 * DAY))).ids == (old.id,)


async def test_only_those_with_all_labels_go_k225() -> None:
    async with on_a_calendar() as (harness, clock):
        both = await asked(harness, labels={"a": "1", "b": "2", "c": "3"})
        await asked(harness, labels={"a": "1"})
        await asked(harness, labels={"a": "1", "b": "3"})
        await asked(harness)
        clock.day += 2
        report = await harness.apply_retention(Retention(older_than_ms=DAY, labels={"a": "1", "b": "2"}))
        assert report.ids == (both.id,)


async def test_a_dry_run_says_the_same_and_changes_nothing_k228() -> None:
    hold = Hold()
    storage = MemoryStorage()
    async with on_a_calendar(storage=storage, pace=hold, extensions=()) as (harness, clock):
        old = await harness.create_conversation()
        await old.write(Note(text="x"))
        busy = await harness.create_conversation()
        submission = await busy.submit("long")
        await hold.reached.wait()
        clock.day += 9
        seq = harness.session.seq
        policy = Retention(older_than_ms=DAY)
        said = await harness.apply_retention(policy, dry_run=True)
        assert harness.session.seq == seq
        assert (said.dry_run, said.ids, said.open) == (True, (old.id,), 1)
        done = await harness.apply_retention(policy)
        assert (done.dry_run, done.ids, done.open, done.looked_at) == (False, said.ids, said.open, said.looked_at)
        assert await there(harness) == {1, busy.id}
        hold.release()
        assert (await submission.answer()).text == "answer"


async def test_what_is_queued_is_no_leftover_k225() -> None:
    """Also without anything live: an input that waits behind a failed run."""
    hold = Hold()
    clock = Calendar()
    model = ScriptedModel(lambda request: fail("refused", "no"), pace=hold)
    async with opened(model, clock=clock) as harness:
        await harness.root()
        waiting = await harness.create_conversation()
        first = await waiting.submit("one")
        await hold.reached.wait()
        await waiting.submit("two")
        hold.release()
        await first.wait()
        await harness.idle()
        assert await queue(waiting)
        clock.day += 9
        report = await harness.apply_retention(Retention(older_than_ms=DAY))
        assert (report.matched, report.open) == (0, 1)
        assert waiting.id in await there(harness)


async def test_what_is_owned_goes_along_and_counts_as_touched_k225_k226() -> None:
    async with on_a_calendar() as (harness, clock):
        harness.tasks.registry.install(Child())
        parent = await harness.create_conversation()
        async with parent.commit() as tx:
            task = tx.create_task(Child, None)
        harness.resume()
        await harness.idle()
        clock.day += 9
        (owned,) = await harness.conversations(owner=task.id)
        async with harness.session.commit() as tx:
            tx.append(Note(text="late"), conversation=owned.id)
        clock.day += 1
        assert (await harness.apply_retention(Retention(older_than_ms=5 * DAY))).matched == 0
        clock.day += 9
        report = await harness.apply_retention(Retention(older_than_ms=5 * DAY))
        assert (report.ids, report.owned) == ((parent.id,), 1)
        assert await there(harness) == {1}


async def test_batches_are_bounded_and_what_was_touched_meanwhile_stays_k227(monkeypatch: pytest.MonkeyPatch) -> None:
    async with on_a_calendar() as (harness, clock):
        made = [await harness.create_conversation() for _ in range(retention.BATCH * 2 + 5)]
        clock.day += 9
        deleted: list[int] = []
        harness.session.observe(lambda settled: deleted.append(len(settled.batch.deleted)))
        enter = Transaction.__aenter__
        touched, renamed, gone = made[3], made[5], made[7]

        async def late(self: Transaction) -> Transaction:
            # Between the look and the commit.
            monkeypatch.setattr(Transaction, "__aenter__", enter)
            await touched.write(Note(text="late"))
            await renamed.set_name("mine")
            await gone.delete()
            return await enter(self)

        monkeypatch.setattr(Transaction, "__aenter__", late)
        report = await harness.apply_retention(Retention(older_than_ms=DAY))
        assert report.matched == len(made) - 3
        assert await there(harness) == {1, touched.id, renamed.id}
        sizes = [size for size in deleted if size]
        assert sizes == [1, retention.BATCH - 3, retention.BATCH, 5]


async def test_a_retention_that_was_cut_off_goes_on_the_next_time_k227() -> None:
    storage = MemoryStorage()
    async with on_a_calendar(storage=storage) as (harness, clock):
        made = [await harness.create_conversation() for _ in range(retention.BATCH * 3)]
        clock.day += 9
        cut = asyncio.Event()
        harness.session.observe(lambda settled: cut.set() if settled.batch.deleted else None)
        work = asyncio.ensure_future(harness.apply_retention(Retention(older_than_ms=DAY)))
        await cut.wait()
        work.cancel()
        await asyncio.wait([work])
        left = storage.snapshot()
    async with on_a_calendar(storage=left) as (harness, clock):
        some = await there(harness)
        assert 1 < len(some) < len(made)
        clock.day += 9
        report = await harness.apply_retention(Retention(older_than_ms=DAY))
        assert report.matched == len(some) - 1
        assert await there(harness) == {1}


async def test_kept_conversations_keep_all_that_was_promised_k229() -> None:
    async with on_a_calendar() as (harness, clock):
        kept = await harness.create_conversation(name="kept")
        submission = await kept.submit("one", request_id="r")
        answer = await submission.answer()
        before = await harness.size()
        clock.day += 9
        assert (await harness.apply_retention(Retention(older_than_ms=DAY))).matched == 0
        assert await harness.size() == before
        assert await kept.submit("one", request_id="r") == submission, "a request id holds for ever (H34)"
        assert (await submission.answer()).entry.id == answer.entry.id
        assert await harness.session.snapshot(Meta, conversation=kept.id) is not None


def test_a_policy_says_how_long() -> None:
    for age in (0, -1):
        with pytest.raises(ValueError, match=f"older_than_ms must be an integer of at least 1, not {age}"):
            Retention(older_than_ms=age)
    with pytest.raises(TypeError):
        Retention(older_than_ms=1, more=1)  # pyright: ignore[reportCallIssue]


async def test_a_closed_session_is_said() -> None:
    async with on_a_calendar() as (harness, _):
        old = await harness.create_conversation()
    with pytest.raises(Exception, match="closed"):
        await harness.apply_retention(Retention(older_than_ms=DAY))
    with pytest.raises(Exception, match="closed") as refused:
        await old.info()
    assert not isinstance(refused.value, NotFound)


@pytest.mark.parametrize(
    "wrong",
    [
        {"older_than_ms": 0},
        {"older_than_ms": float("nan")},
        {"older_than_ms": True},
        {"older_than_ms": "30d"},
        {"older_than_ms": DAY, "named": "no"},
        {"older_than_ms": DAY, "labels": {"a": 1}},
        {"older_than_ms": DAY, "labels": ["a"]},
    ],
)
def test_a_policy_that_says_nothing_clear_deletes_nothing_k225(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Retention"):
        Retention(**wrong)
