"""Throttled progress (rules H68 and H95): the first at once, then at most every interval, never after the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import cast

import pytest

from harness.doubles import ManualClock, settle
from perdure.harness.documents import Live, LiveTool
from perdure.harness.progress import ProgressWriter
from perdure.kernel.reports import Report
from perdure.kernel.session import Session, Settled
from perdure.storage.memory import MemoryStorage

CONVERSATION = 1


class Bench:
    """A session, its progress writer, and every commit it made."""

    def __init__(self, session: Session, clock: ManualClock, reports: list[Report]) -> None:
        self.session = session
        self.clock = clock
        self.reports = reports
        self.writer = ProgressWriter(session, interval_ms=100)
        self.commits: list[Settled] = []
        session.observe(self.commits.append)

    def stream(self, key: str) -> tuple[Callable[[str], None], Callable[[], None]]:
        """Open a stream of text: what adds to it, and what closes it."""
        pending: list[str] = []

        def write(live: Live) -> None:
            tool = live.tools[key]
            tool["output"] += "".join(pending)
            pending.clear()

        progress = self.writer.open(CONVERSATION, write)

        def add(text: str) -> None:
            pending.append(text)
            progress.touch()

        return add, progress.close

    async def shown(self) -> dict[str, str]:
        live = await self.session.snapshot(Live, conversation=CONVERSATION)
        assert live is not None
        return {key: tool["output"] for key, tool in live.tools.items()}


def empty_tool() -> LiveTool:
    return {
        "call_id": "c",
        "name": "t",
        "state": "running",
        "output": "",
        "dropped_lines": 0,
        "dropped_bytes": 0,
        "details": None,
        "diagnostics": [],
    }


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    clock = ManualClock()
    reports: list[Report] = []
    async with Session.open(MemoryStorage(), clock=clock, on_report=reports.append) as session:
        async with session.commit() as tx:
            tx.create_conversation(owner=None, root=True)
            live = await tx.draft(Live, conversation=CONVERSATION)
            for key in ("a", "b"):
                live.tools[key] = empty_tool()
        yield Bench(session, clock, reports)


async def test_the_first_is_committed_at_once_and_the_next_after_the_interval(bench: Bench) -> None:
    add, close = bench.stream("a")
    add("1")
    await settle()
    assert (await bench.shown())["a"] == "1"
    add("2")
    add("3")
    await settle()
    assert len(bench.commits) == 1
    await bench.clock.advance(0.099)
    assert len(bench.commits) == 1
    await bench.clock.advance(0.002)
    assert (await bench.shown())["a"] == "123"
    assert len(bench.commits) == 2
    assert all(commit.batch.progress for commit in bench.commits)
    close()


async def test_a_pause_longer_than_the_interval_is_not_prolonged(bench: Bench) -> None:
    add, close = bench.stream("a")
    add("1")
    await settle()
    await bench.clock.advance(5)
    add("2")
    await settle()
    assert (await bench.shown())["a"] == "12"
    close()


async def test_one_commit_takes_all_that_waits_in_a_conversation(bench: Bench) -> None:
    add_a, close_a = bench.stream("a")
    add_b, close_b = bench.stream("b")
    add_a("a")
    add_b("b")
    await settle()
    before = len(bench.commits)
    add_a("A")
    add_b("B")
    await bench.clock.advance(0.1)
    assert len(bench.commits) == before + 1
    assert await bench.shown() == {"a": "aA", "b": "bB"}
    close_a()
    close_b()


async def test_a_new_stream_does_not_wait_for_the_interval_of_another(bench: Bench) -> None:
    add_a, close_a = bench.stream("a")
    add_a("1")
    await settle()
    add_a("2")
    await settle()
    add_b, close_b = bench.stream("b")
    add_b("x")
    await settle()
    assert await bench.shown() == {"a": "12", "b": "x"}
    close_a()
    close_b()


async def test_only_what_is_new_is_written(bench: Bench) -> None:
    add, close = bench.stream("a")
    add("x" * 5000)
    await settle()
    add("y")
    await bench.clock.advance(0.1)
    (write,) = bench.commits[-1].batch.documents
    assert write.ops is not None
    assert len(write.ops) < 100
    close()


async def test_closing_drops_what_waits_and_no_commit_follows(bench: Bench) -> None:
    add, close = bench.stream("a")
    add("1")
    await settle()
    add("2")
    close()
    add("3")
    await bench.clock.advance(1)
    assert (await bench.shown())["a"] == "1"
    assert len(bench.commits) == 1
    assert bench.clock.sleeping == 0


async def test_a_commit_that_waits_its_turn_writes_nothing_once_the_stream_is_closed(bench: Bench) -> None:
    add, close = bench.stream("a")
    async with bench.session.commit() as tx:
        add("late")
        await settle()  # its transaction now waits for this one
        close()
        live = await tx.draft(Live, conversation=CONVERSATION)
        del live.tools["a"]
    await settle()
    assert len(bench.commits) == 1
    assert bench.reports == []
    assert set(await bench.shown()) == {"b"}


async def test_a_stream_whose_writing_raises_is_reported_and_ends_alone(bench: Bench) -> None:
    def broken(live: Live) -> None:
        raise RuntimeError("no")

    progress = bench.writer.open(CONVERSATION, broken)
    add, close = bench.stream("b")
    progress.touch()
    add("1")
    await settle()
    assert progress.closed
    assert (await bench.shown())["b"] == "1"
    assert [report.type for report in bench.reports] == ["progress_failed"]
    close()


async def test_a_closing_session_is_no_news(bench: Bench) -> None:
    add, close = bench.stream("a")
    await bench.session.close()
    add("1")
    await settle()
    close()
    assert bench.reports == []


def test_an_interval_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        ProgressWriter(cast("Session", None), interval_ms=-1)
