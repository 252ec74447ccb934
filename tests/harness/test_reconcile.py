"""A call that was cut off is asked about outside, if its tool knows how (rules H93, H322 and H323)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from harness.doubles import settle
from harness.tool_world import ToolWorld, until
from perdure.harness.hooks import HookCall, after_tool
from perdure.harness.reconcile import Done, NeverHappened, Reconciled, Unknown
from perdure.harness.registry import Extension
from perdure.harness.results import INTERRUPTED
from perdure.harness.tool import AnyTool, ReplayPolicy, ToolCall, ToolResult, tool

Look = Callable[[ToolCall, int], Awaitable[Reconciled]]


@pytest.fixture
async def world() -> AsyncIterator[ToolWorld]:
    world = ToolWorld()
    yield world
    await world.close()


class Charging:
    """A tool whose first run hangs with its process; what its runs and its questions were given."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, int]] = []
        self.asked: list[tuple[str, int]] = []

    def tool(self, look: Look | None, *, replay: ReplayPolicy = "unsafe", result: object = None) -> AnyTool:
        @tool(name="charge", replay=replay, result=result)
        async def charge(amount: int, call: ToolCall) -> str:
            """Charge."""
            self.runs.append((call.idempotency_key, call.attempt))
            call.output("connecting\n")
            if len(self.runs) == 1:
                await asyncio.Event().wait()
            return f"{amount} at attempt {call.attempt}"

        if look is not None:

            @charge.reconcile
            async def asked(call: ToolCall, amount: int) -> Reconciled:
                self.asked.append((call.idempotency_key, amount))
                return await look(call, amount)

        return charge


async def cut_off(world: ToolWorld, charge: AnyTool, charging: Charging) -> int:
    """A call whose process ended while its tool ran."""
    await world.open(charge)
    task = await world.call("charge", {"amount": 90})
    await until(lambda: len(charging.runs) == 1)
    await settle()
    await world.crash()
    return task


def says(answer: Reconciled) -> Look:
    async def look(_call: ToolCall, _amount: int) -> Reconciled:
        return answer

    return look


async def test_done_is_the_result_and_nothing_is_run_again_h93(world: ToolWorld) -> None:
    charging = Charging()
    charge = charging.tool(says(Done(ToolResult("90 are charged", details={"receipt": 7}, usage={"charges": 1}))))
    task = await cut_off(world, charge, charging)
    await world.open(charge)
    result = await world.result(task)
    assert (result.text, result.code, result.details) == ("90 are charged", None, {"receipt": 7})
    assert charging.asked == [(charging.runs[0][0], 90)]
    assert len(charging.runs) == 1
    assert await world.usage() == {"charge": {"calls": 1, "usage": {"charges": 1.0}}}


@pytest.mark.parametrize("replay", ["safe", "unsafe"])
async def test_never_happened_runs_it_under_the_same_key_h93(world: ToolWorld, replay: ReplayPolicy) -> None:
    charging = Charging()
    charge = charging.tool(says(NeverHappened()), replay=replay)
    task = await cut_off(world, charge, charging)
    await world.open(charge)
    assert (await world.result(task)).text == "90 at attempt 2"
    (first, _), (second, attempt) = charging.runs
    assert (first, attempt) == (second, 2)


@pytest.mark.parametrize("replay", ["safe", "unsafe"])
async def test_unknown_is_interrupted_whatever_the_replay_policy_says_h93_h322(
    world: ToolWorld, replay: ReplayPolicy
) -> None:
    charging = Charging()
    charge = charging.tool(says(Unknown("The bank does not say.")), replay=replay)
    task = await cut_off(world, charge, charging)
    await world.open(charge)
    result = await world.result(task)
    assert result.code == "interrupted"
    assert result.text == f"{INTERRUPTED} The bank does not say.\nOutput until then:\nconnecting\n"
    assert len(charging.runs) == 1


async def test_one_that_raises_or_answers_something_else_does_not_know_h322(world: ToolWorld) -> None:
    async def raises(_call: ToolCall, _amount: int) -> Reconciled:
        raise OSError("no network")

    async def exits(_call: ToolCall, _amount: int) -> Reconciled:
        raise SystemExit(3)

    async def cancels(_call: ToolCall, _amount: int) -> Reconciled:
        raise asyncio.CancelledError

    async def other(_call: ToolCall, _amount: int) -> Reconciled:
        return "done"  # pyright: ignore[reportReturnType]

    for look, reports in (
        (raises, ["reconcile_failed"]),
        (exits, []),
        (cancels, []),
        (other, ["reconcile_failed"]),
        (says(Done(object())), ["reconcile_failed"]),
    ):
        charging = Charging()
        charge = charging.tool(look)
        task = await cut_off(world, charge, charging)
        await world.open(charge)
        assert (await world.result(task)).code == "interrupted"
        assert len(charging.runs) == 1
        assert set(reports) <= {report.type for report in world.reports}
        await world.close()


async def test_one_that_takes_too_long_does_not_know_h322(world: ToolWorld) -> None:
    async def hangs(_call: ToolCall, _amount: int) -> Reconciled:
        await asyncio.Event().wait()
        return NeverHappened()

    charging = Charging()
    charge = charging.tool(hangs)
    task = await cut_off(world, charge, charging)
    await world.open(charge)
    await until(lambda: len(charging.asked) == 1)
    await world.clock.advance(60)
    result = await world.result(task)
    assert result.code == "interrupted"
    assert "took longer than 60000 ms" in result.text


async def test_it_is_asked_again_after_a_crash_while_it_was_asked_h93(world: ToolWorld) -> None:
    async def hangs(_call: ToolCall, _amount: int) -> Reconciled:
        await asyncio.Event().wait()
        return NeverHappened()

    charging = Charging()
    task = await cut_off(world, charging.tool(hangs), charging)
    await world.open(charging.tool(hangs))
    await until(lambda: len(charging.asked) == 1)
    await world.crash()
    charge = charging.tool(says(Done("charged")))
    await world.open(charge)
    assert (await world.result(task)).text == "charged"
    assert charging.asked == [charging.asked[0]] * 2


async def test_a_call_that_is_run_after_it_never_happened_may_be_cut_off_again_h93(world: ToolWorld) -> None:
    charging = Charging()

    @tool(name="charge")
    async def hangs(amount: int, call: ToolCall) -> str:
        """Charge."""
        charging.runs.append((call.idempotency_key, call.attempt))
        await asyncio.Event().wait()
        return str(amount)

    @hangs.reconcile
    async def never() -> Reconciled:
        return NeverHappened()

    await world.open(hangs)
    task = await world.call("charge", {"amount": 90})
    for runs in (1, 2, 3):
        await until(lambda runs=runs: len(charging.runs) == runs)
        await settle()
        await world.crash()
        if runs < 3:
            await world.open(hangs)
    await world.open(charging.tool(says(Done("charged"))))
    assert (await world.result(task)).text == "charged"
    assert len({key for key, _ in charging.runs}) == 1


async def test_what_it_gives_goes_through_hooks_and_checks_like_any_result_h323(world: ToolWorld) -> None:
    @after_tool
    async def hide(_asked: HookCall, result: ToolResult) -> ToolResult:
        return ToolResult(result.text.replace("4711", "…"))

    hiding = Extension("hiding", hooks=[hide])
    charging = Charging()
    charge = charging.tool(says(Done("account 4711")))
    task = await cut_off(world, charge, charging)
    await world.open(charge, extensions=(hiding,))
    assert (await world.result(task)).text == "account …"
    await world.close()

    charging = Charging()
    charge = charging.tool(says(Done({"amount": "much"})), result=dict[str, int])
    task = await cut_off(world, charge, charging)
    await world.open(charge)
    result = await world.result(task)
    assert result.code == "tool_error"
    assert "not what charge declares" in result.text


async def test_what_it_shows_is_the_result_if_it_gives_none_h323(world: ToolWorld) -> None:
    async def shows(call: ToolCall, amount: int) -> Reconciled:
        call.output(f"{amount} are charged\n")
        return Done()

    charging = Charging()
    charge = charging.tool(shows)
    task = await cut_off(world, charge, charging)
    await world.open(charge)
    assert (await world.result(task)).text == "90 are charged\n"


async def test_the_tool_that_is_there_now_is_asked_if_it_takes_the_arguments_h322(world: ToolWorld) -> None:
    charging = Charging()
    task = await cut_off(world, charging.tool(None), charging)
    charge = charging.tool(says(Done("charged")))
    await world.open(charge)
    assert (await world.result(task)).text == "charged", "a function that came later is asked"
    await world.close()

    @tool(name="charge")
    async def changed(cents: int) -> str:
        """Charge."""
        return str(cents)

    @changed.reconcile
    async def look(cents: int) -> Reconciled:
        raise AssertionError(cents)

    charging = Charging()
    task = await cut_off(world, charging.tool(says(Done())), charging)
    await world.open(changed)
    assert (await world.result(task)).code == "interrupted"
    await world.close()

    charging = Charging()
    task = await cut_off(world, charging.tool(says(Done())), charging)
    await world.open(charging.tool(None))
    assert (await world.result(task)).code == "interrupted", "without one nobody is asked"


async def test_a_call_that_nothing_cut_off_is_not_asked_about_h93(world: ToolWorld) -> None:
    charging = Charging()
    charging.runs.append(("", 0))
    await world.open(charging.tool(says(NeverHappened())))
    assert (await world.run("charge", {"amount": 5})).text == "5 at attempt 1"
    assert charging.asked == []


async def test_an_abort_ends_the_question_h93(world: ToolWorld) -> None:
    async def hangs(_call: ToolCall, _amount: int) -> Reconciled:
        await asyncio.Event().wait()
        return NeverHappened()

    charging = Charging()
    charge = charging.tool(hangs)
    task = await cut_off(world, charge, charging)
    await world.open(charge)
    await until(lambda: len(charging.asked) == 1)
    await world.runtime.abort_task(task)
    assert (await world.result(task)).code == "aborted"
    assert len(charging.runs) == 1
