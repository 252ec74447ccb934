"""Limits: what ends at them, how it is said, and how it goes on (rules H49, H159, H242 to H248)."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import Any

import pytest
from doubles import ManualClock
from hypothesis import given
from hypothesis import strategies as st
from kit import Commits, Hold, opened, queue, rest, transcript, until

from perdure.harness.documents import Agent, UsageTotals
from perdure.harness.limits import AS_HOST, MOST, Limits, limit_reached
from perdure.harness.messages import Usage
from perdure.harness.settings import RetryPolicy
from perdure.harness.spent import Spent
from perdure.harness.submission import Unanswered
from perdure.harness.tool import tool
from perdure.kernel.reports import Report
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import ScriptedModel, call, calls, fail, say

NO_JITTER = RetryPolicy(jitter=0)


def dollar(_model: str, _usage: Usage, /, *, at: int) -> Decimal:
    """Each attempt costs a dollar."""
    return Decimal(1)


@tool(replay="safe")
async def look(at: str = "") -> str:
    """Look."""
    return f"seen {at}"


def talk(**more: Any) -> ScriptedModel:
    """Answers what was said last; ``tools`` makes it look first, twice at once."""
    more.setdefault("price", dollar)
    replies = {
        "hi": say("hello", usage=Usage(input=100, output=20, cache_read=3, cache_write=7, reasoning=5)),
        "more": say("more it is"),
        "steer": say("steered"),
        "tools": [calls(call("look", at="here"), call("look", at="there")), say("done looking")],
    }
    return ScriptedModel(replies, **more)


async def detail(submission) -> str:
    """Why it ended at a limit."""
    with pytest.raises(Unanswered) as raised:
        await submission.answer()
    assert raised.value.reason == "limit"
    assert raised.value.detail is not None
    return raised.value.detail


# --- what a limit is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("cost_usd", 0.5, TypeError),
        ("cost_usd", "5", TypeError),
        ("cost_usd", Decimal("-1"), ValueError),
        ("cost_usd", Decimal("NaN"), ValueError),
        ("cost_usd", Decimal("Infinity"), ValueError),
        ("cost_usd", 10**12, ValueError),
        ("cost_usd", 10**400, ValueError),
        ("cost_usd", Decimal("sNaN"), ValueError),
        ("cost_usd", Decimal("1e999999"), ValueError),
        ("tokens", 1.5, TypeError),
        ("tokens", -1, ValueError),
        ("turns", True, TypeError),
        ("tool_calls", MOST + 1, ValueError),
        ("tokens", 10**400, ValueError),
        ("seconds", float("inf"), ValueError),
        ("seconds", 1e308, ValueError),
        ("seconds", 10**17, ValueError),
        ("seconds", -0.1, ValueError),
        ("seconds", "1", TypeError),
    ],
)
async def test_what_is_no_limit_is_refused_by_name_h242(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=name):
        Limits(**{name: value})
    async with opened(talk()) as harness:
        root = await harness.root()
        with pytest.raises(error, match=name):
            await root.set_limits(**{name: value})
        assert (await root.agent()).limits == {}


async def test_limits_are_no_plain_numbers_h242() -> None:
    with pytest.raises(TypeError, match="Limits"):
        wrong: dict[str, Any] = {"limits": {"turns": 1}}
        async with opened(talk(), **wrong):
            raise AssertionError("it is not opened")
    async with opened(talk()) as harness:
        odd: Any = {"turns": 1}
        with pytest.raises(TypeError, match="Limits"):
            harness.set_limits(session=Limits(turns=0), conversation=odd)
        assert (await (await (await harness.root()).submit("hi")).answer()).text == "hello", "nothing was set"


async def test_limits_are_stored_exactly_and_win_one_by_one_h243() -> None:
    async with opened(talk()) as harness:
        root = await harness.root(agent=Agent(limits={"turns": 9}))
        await root.set_limits(cost_usd=Decimal("0.0000000015"), seconds=0.25, tokens=None)
        stored = {"turns": 9, "cost_nano_usd": 2, "run_ms": 250, "tokens": None}
        assert (await root.agent()).limits == stored
        await root.set_limits(turns=AS_HOST, tool_calls=3)
        await root.set_limits()
        del stored["turns"]
        assert (await root.agent()).limits == {**stored, "tool_calls": 3}
        await root.set_agent(instructions="Be brief.")
        assert (await root.agent()).limits == {**stored, "tool_calls": 3}


# --- each of them ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["conversation", "session"])
@pytest.mark.parametrize(
    ("name", "at", "said"),
    [
        ("cost_usd", 1, "the {} has cost 1.00 of 1.00 US dollars"),
        ("cost_usd", Decimal("0.125"), "the {} has cost 1.000 of 0.125 US dollars"),
        ("tokens", 130, "the {} has used 130 of 130 tokens"),
        ("tokens", 1, "the {} has used 130 of 1 tokens"),
        ("turns", 1, "the {} has had 1 of 1 model responses"),
        ("seconds", 3, "the {} has run for 3 of 3 seconds"),
        ("seconds", 2.75, "the {} has run for 3 of 2.75 seconds"),
    ],
)
async def test_at_a_limit_no_request_is_sent_h159_h244_h245(scope: str, name: str, at: Any, said: str) -> None:
    clock, hold = ManualClock(), Hold(0)
    model = talk(pace=hold)
    options: dict[str, Any] = {"limits" if scope == "session" else "conversation_limits": Limits(**{name: at})}
    async with opened(model, clock=clock, **options) as harness:
        root = await harness.root()
        first = await root.submit("hi")
        await hold.reached.wait()
        await clock.advance(3)
        hold.release()
        assert (await first.answer()).text == "hello"
        late = await root.submit("more", request_id="late")
        assert await detail(late) == said.format(scope)
        assert len(model.requests) == 1
        assert await root.submit("more", request_id="late") == late, "its request id holds"
        assert await transcript(root) == ["user hi", "assistant hello", "user more"]
        assert not await root.busy()
        assert await queue(root) == []


@pytest.mark.parametrize("scope", ["conversation", "session"])
async def test_below_a_limit_nothing_changes_h159(scope: str) -> None:
    limits = Limits(cost_usd=2, tokens=131, turns=2, tool_calls=1, seconds=1)
    options: dict[str, Any] = {"limits" if scope == "session" else "conversation_limits": limits}
    async with opened(talk(), clock=ManualClock(), **options) as harness:
        root = await harness.root()
        assert (await (await root.submit("hi")).answer()).text == "hello"
        assert (await (await root.submit("more")).answer()).text == "more it is"


async def test_a_limit_of_nothing_lets_nothing_through_h244() -> None:
    model = talk()
    async with opened(model, conversation_limits=Limits(tool_calls=0)) as harness:
        root = await harness.root()
        assert await detail(await root.submit("hi")) == "the conversation has made 0 of 0 tool calls"
    assert not model.requests


async def test_a_round_that_has_begun_is_completed_h244() -> None:
    model = talk()
    async with opened(model, tools=(look,), conversation_limits=Limits(tool_calls=1)) as harness:
        root = await harness.root()
        submission = await root.submit("tools")
        assert await detail(submission) == "the conversation has made 2 of 1 tool calls"
        assert await transcript(root) == ["user tools", "assistant", "tool-result seen here", "tool-result seen there"]
        assert len(model.requests) == 1
        await root.set_limits(tool_calls=None)
        assert (await (await root.submit("hi")).answer()).text == "hello"
        assert [message.text for message in model.requests[-1].messages if hasattr(message, "call_id")] == [
            "seen here",
            "seen there",
        ]


async def test_what_steers_into_a_run_at_its_limit_ends_with_it_h244() -> None:
    gate, begun = asyncio.Event(), asyncio.Event()

    @tool(name="look", replay="safe")
    async def slow(at: str = "") -> str:
        """Look for long."""
        begun.set()
        await gate.wait()
        return "seen"

    async with opened(talk(), tools=(slow,), conversation_limits=Limits(turns=1)) as harness:
        root = await harness.root()
        first = await root.submit("tools")
        await begun.wait()
        steer = await root.submit("steer", mode="steer")
        behind = await root.submit("more")
        gate.set()
        assert await detail(first) == await detail(steer) == "the conversation has had 1 of 1 model responses"
        assert await queue(root) == [behind.id]


async def test_it_is_looked_at_before_each_attempt_h159() -> None:
    clock = ManualClock()
    model = ScriptedModel(fail("overloaded", usage=Usage(input=50)))
    async with opened(model, clock=clock, retry=NO_JITTER, conversation_limits=Limits(tokens=100)) as harness:
        root = await harness.root()
        submission = await root.submit("hi")
        for seconds in (2, 4):
            await until(lambda: clock.sleeping == 1)
            await clock.advance(seconds)
        assert await detail(submission) == "the conversation has used 100 of 100 tokens"
        assert len(model.requests) == 2
        assert not await root.busy()


async def test_the_time_of_the_run_under_way_counts_h242() -> None:
    clock, gate, begun = ManualClock(), asyncio.Event(), asyncio.Event()

    @tool(name="look", replay="safe")
    async def slow(at: str = "") -> str:
        """Look for long."""
        begun.set()
        await gate.wait()
        return "seen"

    async with opened(talk(), tools=(slow,), clock=clock, conversation_limits=Limits(seconds=5)) as harness:
        root = await harness.root()
        submission = await root.submit("tools")
        await begun.wait()
        await clock.advance(6)
        gate.set()
        assert await detail(submission) == "the conversation has run for 6 of 5 seconds"


async def test_the_time_of_other_runs_under_way_counts_for_the_session_h242() -> None:
    clock, hold = ManualClock(), Hold(0)
    async with opened(talk(pace=hold), clock=clock, limits=Limits(seconds=5)) as harness:
        root, other = await harness.root(), await harness.create_conversation()
        first = await root.submit("hi")
        await hold.reached.wait()
        await clock.advance(5)
        assert await detail(await other.submit("hi")) == "the session has run for 5 of 5 seconds"
        hold.release()
        assert (await first.answer()).text == "hello", "what is under way is completed"
        assert (await harness.usage()).run_ms == 5000


# --- how it goes on -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_failure", ["keep", "continue", "withdraw"])
async def test_the_queue_after_a_limit_is_as_the_host_has_set_h49(after_failure) -> None:
    hold = Hold(0)
    model = talk(pace=hold)
    options: dict[str, Any] = {"after_failure": after_failure}
    async with opened(model, conversation_limits=Limits(turns=1), **options) as harness:
        root = await harness.root()
        first, second, third = [await root.submit(text) for text in ("hi", "more", "steer")]
        hold.release()
        await first.answer()
        assert await detail(second) == "the conversation has had 1 of 1 model responses"
        if after_failure == "keep":
            assert await queue(root) == [third.id]
            await root.set_limits(turns=10)
            await rest()
            assert await third.status() == "queued", "raising a limit starts nothing by itself"
            last = await root.submit("hi")
            assert (await third.answer()).text == "steered"
            assert (await last.answer()).text == "hello"
            assert [request.messages[-1].text for request in model.requests] == ["hi", "steer", "hi"]
        elif after_failure == "continue":
            assert await detail(third) == "the conversation has had 1 of 1 model responses"
            assert await queue(root) == []
        else:
            record = await third.wait()
            assert (record.reason, record.detail) == ("run_failed", "the run before it ended limit")
        assert len(model.requests) == (3 if after_failure == "keep" else 1)


async def test_nothing_remembers_that_a_limit_was_reached_h246() -> None:
    async with opened(talk(), conversation_limits=Limits(turns=1), limits=Limits(turns=2)) as harness:
        root = await harness.root()
        await (await root.submit("hi")).answer()
        await detail(await root.submit("hi"))
        await root.set_limits(turns=None)
        assert (await (await root.submit("hi")).answer()).text == "hello"
        assert await detail(await root.submit("hi")) == "the session has had 2 of 2 model responses"
        harness.set_limits(session=Limits(turns=3))
        assert (await (await root.submit("hi")).answer()).text == "hello"
        await detail(await root.submit("hi"))
        harness.set_limits(session=None)
        assert (await (await root.submit("hi")).answer()).text == "hello"
        await root.set_limits(turns=AS_HOST)
        assert await detail(await root.submit("hi")) == "the conversation has had 4 of 1 model responses"
        harness.set_limits(conversation=Limits(turns=5))
        assert (await (await root.submit("hi")).answer()).text == "hello"
        await detail(await root.submit("hi"))
        harness.set_limits()
        await detail(await root.submit("hi"))


async def test_a_conversations_limits_last_and_the_hosts_do_not_h243() -> None:
    storage = MemoryStorage()
    async with opened(talk(), storage=storage, limits=Limits(turns=0)) as harness:
        root = await harness.root()
        await root.set_limits(turns=1)
        await detail(await root.submit("hi"))
    async with opened(talk(), storage=storage) as harness:
        root = await harness.root()
        answer = await (await root.submit("hi")).answer()
        assert await detail(await root.submit("hi")) == "the conversation has had 1 of 1 model responses"
        fork = await root.fork(answer.entry.id)
        assert (await (await fork.submit("hi")).answer()).text == "hello", "a fork begins at nothing"
        assert await detail(await fork.submit("hi")) == "the conversation has had 1 of 1 model responses"


async def test_a_queued_input_is_held_against_what_the_run_before_it_used_h159() -> None:
    """It would be pinned in the very commit that counts the answer."""
    hold = Hold(0)
    model = talk(pace=hold)
    async with opened(model, limits=Limits(cost_usd=1)) as harness:
        root = await harness.root()
        first, second = await root.submit("hi"), await root.submit("more")
        hold.release()
        await first.answer()
        assert await detail(second) == "the session has cost 1.00 of 1.00 US dollars"
        assert len(model.requests) == 1


# --- the session ----------------------------------------------------------------------------------------------------


async def test_all_conversations_count_for_the_session_deleted_ones_too_h242() -> None:
    storage = MemoryStorage()
    async with opened(talk(), storage=storage) as harness:
        one, two = await harness.create_conversation(), await harness.create_conversation()
        await (await one.submit("hi")).answer()
        await (await two.submit("hi")).answer()
        await one.delete()
    async with opened(talk(), storage=storage, limits=Limits(tokens=390)) as harness:
        root = await harness.root()
        assert (await (await root.submit("hi")).answer()).text == "hello"
        assert await detail(await root.submit("hi")) == "the session has used 390 of 390 tokens"
        await harness.handle(two.id).delete()
        assert await detail(await root.submit("hi")) == "the session has used 390 of 390 tokens"


async def test_a_limit_costs_no_commit_once_the_sum_is_known_h248() -> None:
    limits = Limits(cost_usd=100, tokens=10**9, turns=100, tool_calls=100, seconds=1000)
    model = ScriptedModel([say("hello", chunk=0), call("look"), say("seen", chunk=0)], price=dollar)
    async with opened(model, tools=(look,), limits=limits, conversation_limits=limits) as harness:
        root = await harness.root()
        commits = Commits(harness)
        await (await root.submit("hi")).answer()
        assert len(commits.durable) == 3, "the first request waits for the sum, in a commit of its own"
        commits.clear()
        await (await root.submit("hi")).answer()
        assert len(commits.durable) == 4, "a turn with a tool and a plain one"


async def test_the_sum_is_read_only_if_the_session_has_a_limit_h248(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(talk(), conversation_limits=Limits(turns=100)) as harness:
        spent = harness._host.limits._spent
        root = await harness.root()
        await (await root.submit("hi")).answer()
        assert not spent.loaded
        harness.set_limits(session=Limits())
        await (await root.submit("hi")).answer()
        assert not spent.loaded, "limits of nothing are none"
        harness.set_limits(session=Limits(turns=100))
        await (await root.submit("hi")).answer()
        assert spent.loaded

        async def again(self) -> None:
            raise AssertionError("it is read once")

        monkeypatch.setattr(type(spent), "_read", again)
        await (await root.submit("hi")).answer()


# --- unknown prices -------------------------------------------------------------------------------------------------


async def test_unknown_prices_are_told_once_and_shown_h247() -> None:
    reports: list[Report] = []
    prices = iter([None, None, Decimal(5)])
    async with opened(
        talk(price=lambda _model, _usage, /, *, at: next(prices)),
        reports=reports,
        limits=Limits(cost_usd=5),
        conversation_limits=Limits(cost_usd=5),
    ) as harness:
        root = await harness.root()
        await (await root.submit("hi")).answer()
        assert reports == []
        await (await root.submit("hi")).answer()
        (report,) = reports
        assert (report.type, report.conversation) == ("limit_unpriced", root.id)
        assert "1 request of the conversation" in report.message
        await (await root.submit("hi")).answer()
        said = "the conversation has cost 5.00 of 5.00 US dollars, without 2 requests of unknown price"
        assert await detail(await root.submit("hi")) == said
    assert len(reports) == 1


async def test_without_a_limit_on_cost_nobody_asks_for_prices_h247() -> None:
    reports: list[Report] = []
    async with opened(talk(price=None), reports=reports, limits=Limits(turns=5)) as harness:
        root = await harness.root()
        await (await root.submit("hi")).answer()
        await (await root.submit("hi")).answer()
    assert reports == []


# --- the check by itself --------------------------------------------------------------------------------------------

AMOUNTS = st.integers(0, 20)


@given(st.tuples(*[AMOUNTS] * 5), st.tuples(*[st.none() | AMOUNTS] * 5))
def test_a_limit_is_reached_exactly_when_as_much_was_spent_h244(spent, limits) -> None:
    names = ("cost_nano_usd", "tokens", "turns", "tool_calls", "run_ms")
    settings: Any = dict(zip(names, limits, strict=True))
    found = limit_reached("session", settings, Spent(**dict(zip(names, spent, strict=True))))
    over = any(limit is not None and used >= limit for used, limit in zip(spent, limits, strict=True))
    assert (found is not None) == over


async def test_usage_of_an_older_release_counts_h159() -> None:
    async with opened(talk(), limits=Limits(tokens=60)) as harness:
        root = await harness.root()
        async with root.commit() as tx:
            totals = await tx.draft(UsageTotals)
            totals.models["test:old"] = {
                "requests": 3,
                "input": 30,
                "output": 30,
                "cache_read": 0,
                "cache_write": 0,
                "reasoning": 0,
            }
        assert await detail(await root.submit("hi")) == "the session has used 60 of 60 tokens"
