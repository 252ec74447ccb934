"""What attempts cost: priced one by one, added without rounding drift, unknown never 0 (rules H76, H158)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from decimal import Decimal, getcontext, localcontext

import pytest
from doubles import ManualClock
from hypothesis import given
from hypothesis import strategies as st
from kit import Hold, opened, rest, until

from perdure.events import UsageChanged
from perdure.harness.cost import MOST_DOLLARS, MOST_WAITING, PATIENCE
from perdure.harness.documents import ModelTotals, UsageTotals
from perdure.harness.messages import Usage
from perdure.harness.model import Priced
from perdure.harness.settings import RetryPolicy
from perdure.harness.usage import Attempt, UsageSummary, add_attempt, summed
from perdure.kernel.draft import Recorder
from perdure.storage.memory import MemoryStorage
from perdure.testing.loop import SimulatedClock, SimulationLoop
from perdure.testing.model import ScriptedModel, fail, say

NO_JITTER = RetryPolicy(jitter=0)
ID = "test:scripted"


class Table:
    """Two dollars a million tokens of input, twice that in long requests. It keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Usage, int]] = []
        self.threads: set[int] = set()

    def __call__(self, model: str, usage: Usage, /, *, at: int) -> Decimal | None:
        self.asked.append((model, usage, at))
        self.threads.add(threading.get_ident())
        return Decimal(2 if usage.input <= 1000 else 4) * usage.input / 1_000_000


def test_what_may_know_prices_is_seen_by_its_price_h158() -> None:
    class Unpriced:
        pass

    assert isinstance(ScriptedModel(price=Table()), Priced)
    assert not isinstance(Unpriced(), Priced)


# --- attempt by attempt ---------------------------------------------------------------------------------------------


async def test_each_attempt_is_priced_by_itself_and_once_h158() -> None:
    """Of their sum the price would be the one of a long request."""
    table, clock = Table(), ManualClock()
    model = ScriptedModel(say("x", usage=Usage(input=800, output=1)), price=table)
    async with opened(model, clock=clock) as harness:
        root = await harness.root()
        await (await root.submit("hi")).wait()
        clock.now = 7
        await (await root.submit("hi")).wait()
        used = await root.usage()
        assert used.cost == Decimal("0.0032")
        assert used.costs == {ID: Decimal("0.0032")}
        assert used.unpriced == 0
        assert used.models[ID].get("cost_nano_usd") == 3_200_000
    sent = 1_700_000_000_000
    assert table.asked == [(ID, Usage(input=800, output=1), at) for at in (sent, sent + 7000)]
    assert threading.get_ident() not in table.threads


async def test_a_failed_attempt_costs_what_it_used_h76() -> None:
    clock = ManualClock()
    model = ScriptedModel(
        fail("overloaded", times=1, then=say("ok", usage=Usage(input=7)), usage=Usage(input=5)), price=Table()
    )
    async with opened(model, clock=clock, retry=NO_JITTER) as harness:
        root = await harness.root()
        submission = await root.submit("hi")
        async with asyncio.timeout(60):
            while (await root.usage()).requests < 1:
                await rest()
        assert (await root.usage()).cost == Decimal("0.00001")
        await until(lambda: clock.sleeping == 1)
        await clock.advance(2)
        await submission.wait()
        used = await root.usage()
    assert (used.requests, used.cost, used.unpriced) == (2, Decimal("0.000024"), 0)


async def test_an_aborted_attempt_whose_usage_was_not_told_is_unpriced_h158() -> None:
    table, hold = Table(), Hold(1)
    model = ScriptedModel(say("x" * 100), pace=hold, price=table)
    async with opened(model) as harness:
        root = await harness.root()
        await root.submit("hi")
        await hold.reached.wait()
        await root.abort()
        used = await root.usage()
    assert (used.requests, used.cost, used.unpriced) == (1, None, 1)
    assert table.asked == []


@pytest.mark.parametrize("usage", [None, Usage()])
async def test_without_told_usage_no_price_is_asked_h158(usage: Usage | None) -> None:
    table = Table()
    async with opened(ScriptedModel(fail("refused", usage=usage), price=table)) as harness:
        root = await harness.root()
        await (await root.submit("hi")).wait()
        used = await root.usage()
    assert (used.requests, used.cost, used.unpriced) == (1, None, 1)
    assert table.asked == []


@pytest.mark.parametrize("price", [None, lambda _model, _usage, /, *, at: None])
async def test_a_model_without_a_known_price_has_no_cost_and_not_0_h158(price) -> None:
    async with opened(ScriptedModel(say("x"), price=price)) as harness:
        root = await harness.root()
        await (await root.submit("hi")).wait()
        used = await root.usage()
    assert used.cost is None
    assert used.costs == {}
    assert used.unpriced == 1
    assert "cost_nano_usd" not in used.models[ID]


async def test_what_is_free_costs_0_h158() -> None:
    async with opened(ScriptedModel(say("x"), price=lambda _model, _usage, /, *, at: Decimal(0))) as harness:
        root = await harness.root()
        await (await root.submit("hi")).wait()
        used = await root.usage()
    assert used.cost == 0
    assert used.unpriced == 0


# --- views, sums, stores --------------------------------------------------------------------------------------------


async def test_events_and_views_show_the_cost_and_the_session_sums_it_h158() -> None:
    async with opened(ScriptedModel(say("x", usage=Usage(input=50)), price=Table())) as harness:
        one, two = await harness.root(), await harness.create_conversation()
        async with one.events() as events:
            await (await one.submit("hi")).wait()
            async for event in events:
                if isinstance(event, UsageChanged):
                    assert event.models[ID].get("cost_nano_usd") == 100_000
                    assert event.models[ID].get("unpriced") == 0
                    break
        await (await two.submit("hi")).wait()
        async with one.view() as view:
            assert UsageSummary(models=view.value.usage.models).cost == Decimal("0.0001")
        assert (await harness.usage()).cost == Decimal("0.0002")


async def test_a_reopened_store_has_the_cost_and_goes_on_with_it_h158() -> None:
    """Also where the model has a price no longer: what is known stays, what is not is counted."""
    storage = MemoryStorage()
    async with opened(ScriptedModel(say("x", usage=Usage(input=50)), price=Table()), storage=storage) as harness:
        await (await (await harness.root()).submit("hi")).wait()
    async with opened(ScriptedModel(say("x", usage=Usage(input=50))), storage=storage) as harness:
        root = await harness.root()
        await (await root.submit("hi")).wait()
        used = await root.usage()
    assert (used.requests, used.cost, used.unpriced) == (2, Decimal("0.0001"), 1)


async def test_what_was_stored_before_there_were_prices_is_unpriced_h158() -> None:
    async with opened(ScriptedModel(say("x", usage=Usage(input=50)), price=Table())) as harness:
        root = await harness.root()
        async with root.commit() as tx:
            old = ModelTotals(requests=3, input=30, output=30, cache_read=0, cache_write=0, reasoning=0)
            (await tx.draft(UsageTotals)).models[ID] = old
        used = await root.usage()
        assert (used.requests, used.cost, used.unpriced) == (3, None, 3)
        await (await root.submit("hi")).wait()
        used = await root.usage()
    assert (used.requests, used.cost, used.unpriced) == (4, Decimal("0.0001"), 3)


COSTS = st.lists(st.none() | st.integers(0, MOST_DOLLARS * 10**9), max_size=20)


@given(COSTS, COSTS)
def test_costs_add_up_exactly_h158(one: list[int | None], other: list[int | None]) -> None:
    documents = []
    for costs in (one, other):
        document = UsageTotals.over(Recorder({}, at="pi.usage"))
        for cost in costs:
            add_attempt(document, Attempt(model=ID, at=0, usage=Usage(input=1), cost=cost))
        documents.append(document)
    with localcontext() as context:
        context.prec = 3
        used = summed(documents)
        known = [cost for cost in one + other if cost is not None]
        assert used.unpriced == len(one + other) - len(known)
        total = used.cost
    assert total == (Decimal(sum(known)) / 10**9 if known else None)
    assert getcontext().prec == 28


async def test_less_than_a_billionth_is_rounded_to_even_h158() -> None:
    prices = iter([Decimal("0.0000000005"), Decimal("0.0000000015"), Decimal("1e-99999"), Decimal("0.0000000026")])
    async with opened(ScriptedModel(say("x"), price=lambda _model, _usage, /, *, at: next(prices))) as harness:
        root = await harness.root()
        for _ in range(4):
            await (await root.submit("hi")).wait()
        assert (await root.usage()).cost == Decimal("0.000000005")


# --- tables that fail -----------------------------------------------------------------------------------------------


def _raises(error: BaseException):
    def price(_model: str, _usage: Usage, /, *, at: int) -> Decimal | None:
        raise error

    return price


@pytest.mark.parametrize(
    "price",
    [
        _raises(ValueError("no")),
        _raises(StopIteration()),
        _raises(SystemExit(3)),
        _raises(asyncio.CancelledError()),
        lambda *_, at: 0.01,
        lambda *_, at: 1,
        lambda *_, at: Decimal("NaN"),
        lambda *_, at: Decimal("sNaN"),
        lambda *_, at: Decimal("Infinity"),
        lambda *_, at: Decimal("-0.01"),
        lambda *_, at: Decimal(MOST_DOLLARS) + 1,
        lambda *_, at: Decimal("1e999999"),
        lambda _model: Decimal(1),
    ],
)
async def test_a_table_that_fails_harms_nothing_and_is_told_once_h158(price) -> None:
    reports = []
    async with opened(ScriptedModel(say("x"), price=price), reports=reports) as harness:
        root = await harness.root()
        for _ in range(2):
            assert (await (await root.submit("hi")).answer()).text == "x"
        used = await root.usage()
    assert (used.requests, used.cost, used.unpriced) == (2, None, 2)
    assert [report.type for report in reports] == ["price_lookup_failed"]


async def test_a_table_that_failed_is_asked_again_h158() -> None:
    answers = iter([None, Decimal(1), Decimal(2)])

    def price(_model: str, _usage: Usage, /, *, at: int) -> Decimal | None:
        answer = next(answers)
        if answer == 1:
            raise ConnectionError
        return answer

    reports = []
    async with opened(ScriptedModel(say("x"), price=price), reports=reports) as harness:
        root = await harness.root()
        for _ in range(3):
            await (await root.submit("hi")).wait()
        used = await root.usage()
    assert (used.cost, used.unpriced, len(reports)) == (2, 2, 1)


async def test_a_table_that_hangs_is_told_once_and_asked_no_more_h158() -> None:
    clock, reached, hang, asked = ManualClock(), threading.Event(), threading.Event(), []

    def price(_model: str, _usage: Usage, /, *, at: int) -> Decimal | None:
        asked.append(at)
        reached.set()
        hang.wait()
        return Decimal(1)

    reports = []
    try:
        async with opened(ScriptedModel(say("x"), price=price), clock=clock, reports=reports) as harness:
            root = await harness.root()
            submission = await root.submit("hi")
            await until(lambda: clock.sleeping == 1)
            await asyncio.to_thread(reached.wait)
            await clock.advance(PATIENCE)
            assert (await submission.answer()).text == "x"
            assert (await (await root.submit("hi")).answer()).text == "x"
            used = await root.usage()
    finally:
        hang.set()
    assert (used.requests, used.cost, used.unpriced) == (2, None, 2)
    assert [report.type for report in reports] == ["price_lookup_failed"]
    assert len(asked) == 1


async def test_lookups_one_after_another_take_no_thread_each_h158() -> None:
    """Starting one takes many times what a lookup does."""
    table = Table()
    async with opened(ScriptedModel(say("x"), price=table)) as harness:
        root = await harness.root()
        for _ in range(20):
            await (await root.submit("hi")).wait()
    assert len(table.asked) == 20
    assert len(table.threads) == 1


async def test_lookups_at_the_same_time_do_not_wait_for_each_other_and_leave_few_threads_h158() -> None:
    together = threading.Barrier(20)

    def price(_model: str, _usage: Usage, /, *, at: int) -> Decimal | None:
        together.wait(60)
        return Decimal(1)

    async with opened(ScriptedModel(say("x"), price=price)) as harness:
        several = [await harness.create_conversation() for _ in range(20)]
        for submission in [await one.submit("hi") for one in several]:
            await submission.wait()
        assert (await harness.usage()).cost == 20
        async with asyncio.timeout(60):
            while sum(thread.name == "perdure-price" for thread in threading.enumerate()) > MOST_WAITING:
                await rest()


async def test_a_table_that_hangs_holds_up_no_other_harness_h158() -> None:
    reached, hang = threading.Event(), threading.Event()

    def stuck(_model: str, _usage: Usage, /, *, at: int) -> Decimal | None:
        reached.set()
        hang.wait()
        return Decimal(1)

    try:
        async with (
            opened(ScriptedModel(say("x"), price=stuck)) as one,
            opened(ScriptedModel(say("x"), price=Table())) as other,
        ):
            await (await one.root()).submit("hi")
            await asyncio.to_thread(reached.wait)
            root = await other.root()
            await (await root.submit("hi")).wait()
            assert (await root.usage()).unpriced == 0
            hang.set()
    finally:
        hang.set()


async def test_a_run_is_aborted_while_its_price_is_looked_up_h158() -> None:
    """What the attempt used is known by then, and counted."""
    clock, hang = ManualClock(), threading.Event()

    def price(_model: str, _usage: Usage, /, *, at: int) -> Decimal | None:
        hang.wait()
        return Decimal(1)

    try:
        model = ScriptedModel(fail("refused", usage=Usage(input=5)), price=price)
        async with opened(model, clock=clock) as harness:
            root = await harness.root()
            submission = await root.submit("hi")
            await until(lambda: model.closed == 1 and clock.sleeping == 1)
            await root.abort()
            assert (await submission.wait()).status == "unanswered"
            used = await root.usage()
    finally:
        hang.set()
    assert (used.requests, used.tokens.input, used.cost, used.unpriced) == (1, 5, None, 1)


def test_in_a_simulation_prices_are_asked_without_threads_p2() -> None:
    table, loop = Table(), SimulationLoop(order_seed=7)

    async def main() -> UsageSummary:
        model = ScriptedModel(say("x", usage=Usage(input=50)), price=table)
        async with opened(model, clock=SimulatedClock(loop)) as harness:
            root = await harness.root()
            await (await root.submit("hi")).wait()
            return await root.usage()

    try:
        assert loop.run_until_complete(main()).cost == Decimal("0.0001")
    finally:
        loop.drop()
    assert table.threads == {threading.get_ident()}


HANGS = """
import asyncio, threading
from kit import opened
from perdure.testing.model import ScriptedModel, say

reached = threading.Event()

def price(_model, _usage, /, *, at):
    reached.set()
    threading.Event().wait()

async def main():
    async with opened(ScriptedModel(say("x"), price=price)) as harness:
        await (await harness.root()).submit("hi")
        await asyncio.to_thread(reached.wait)
    print("closed")

asyncio.run(main())
"""


FORKED = """
import asyncio, os
from decimal import Decimal
from kit import opened
from perdure.testing.model import ScriptedModel, say

def price(_model, _usage, /, *, at):
    return Decimal(1)

async def main():
    async with opened(ScriptedModel(say("x"), price=price)) as harness:
        root = await harness.root()
        await (await root.submit("hi")).wait()
        print((await root.usage()).cost, flush=True)

asyncio.run(main())
if os.fork() == 0:
    asyncio.run(main())
    os._exit(0)
os.wait()
"""


def test_a_process_that_is_forked_off_asks_threads_of_its_own_h158() -> None:
    env = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED]
    out = subprocess.run(command, stdout=subprocess.PIPE, env=env, text=True, timeout=60).stdout
    assert out.split() == ["1.000000000"] * 2


def test_a_table_that_hangs_does_not_keep_the_process_from_ending_h158() -> None:
    env = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    process = subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, env=env, text=True)
    try:
        out, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
    assert (out, process.returncode) == ("closed\n", 0)
