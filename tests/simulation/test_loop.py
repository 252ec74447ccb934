"""The deterministic event loop (rule P2)."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from perdure.testing.loop import (
    EPOCH_MS,
    Killed,
    NoOutside,
    SimulatedClock,
    SimulatedEntropy,
    SimulationDeadlock,
    SimulationLoop,
    SimulationRunaway,
    run,
)


async def tasks_in_order(names: str) -> str:
    """The order in which tasks that are ready together take two steps each."""
    steps: list[str] = []

    async def walk(name: str) -> None:
        steps.append(name)
        await asyncio.sleep(0)
        steps.append(name)

    await asyncio.gather(*(walk(name) for name in names))
    return "".join(steps)


def test_what_is_left_of_a_killed_process_logs_nothing_p2(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        try:
            await asyncio.sleep(1)
        finally:
            logging.getLogger("a.library").error("it was not closed")

    loop = SimulationLoop()
    loop.kill_at_step = 1
    with pytest.raises(Killed):
        loop.run_until_complete(main())
    loop.drop()
    logging.getLogger("a.library").error("now it is heard")
    assert [record.getMessage() for record in caplog.records] == ["now it is heard"]


def test_time_is_virtual_p2() -> None:
    async def main() -> tuple[int, int]:
        clock = SimulatedClock(loop)
        before = clock.wall()
        await asyncio.gather(clock.sleep(86_400), clock.sleep(3_600))
        return before, clock.wall()

    loop = SimulationLoop(start=10.0)
    assert loop.run_until_complete(main()) == (EPOCH_MS + 10_000, EPOCH_MS + 86_410_000)
    loop.drop()


def test_timers_fire_in_order_of_time_p2() -> None:
    async def main() -> str:
        fired: list[str] = []
        loop = asyncio.get_running_loop()
        for name, delay in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
            loop.call_later(delay, fired.append, name)
        loop.call_later(1.5, fired.append, "x").cancel()
        await asyncio.sleep(4)
        return "".join(fired)

    assert run(main()) == "abc"


def test_the_wall_clock_may_step_back_the_monotonic_one_never_p2() -> None:
    async def main() -> tuple[int, float]:
        clock = SimulatedClock(loop)
        clock.step_wall(-3_000)
        return clock.wall(), clock.monotonic()

    loop = SimulationLoop(start=5.0)
    assert loop.run_until_complete(main()) == (EPOCH_MS + 2_000, 5.0)
    loop.drop()


def test_without_a_seed_the_order_is_asyncios_own_p2() -> None:
    assert run(tasks_in_order("abcd")) == asyncio.run(tasks_in_order("abcd")) == "abcdabcd"


def test_a_seed_decides_the_order_of_tasks_and_repeats_it_p2() -> None:
    orders = [run(tasks_in_order("abcd"), order_seed=seed) for seed in range(20)]
    assert orders == [run(tasks_in_order("abcd"), order_seed=seed) for seed in range(20)]
    assert len(set(orders)) > 5


@pytest.mark.parametrize("seed", range(10))
def test_plain_callbacks_keep_their_order_and_no_task_passes_one_p2(seed: int) -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        seen: list[str] = []

        async def note(name: str) -> None:
            seen.append(name)

        async with asyncio.TaskGroup() as group:
            group.create_task(note("early"))
            group.create_task(note("early"))
            for number in range(5):
                loop.call_soon(seen.append, str(number))
            group.create_task(note("late"))
        return seen

    assert run(main(), order_seed=seed) == ["early", "early", "0", "1", "2", "3", "4", "late"]


def test_what_can_never_go_on_is_named_p2() -> None:
    async def forgotten() -> None:
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        task = asyncio.create_task(forgotten(), name="the forgotten one")
        await task

    with pytest.raises(SimulationDeadlock, match=r"the forgotten one: forgotten \(test_loop.py:\d+\)"):
        run(main())


def test_what_never_ends_is_stopped_p2() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(1)

    loop = SimulationLoop(max_steps=100)
    with pytest.raises(SimulationRunaway):
        loop.run_until_complete(main())
    loop.drop()


def test_executors_start_no_thread_p2() -> None:
    async def main() -> tuple[int, str]:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return await asyncio.to_thread(threading.get_ident), await asyncio.to_thread("{}-{}".format, 1, 2)

    assert run(main()) == (threading.get_ident(), "1-2")


def test_a_thread_that_calls_into_the_loop_is_refused_p2() -> None:
    refused: list[BaseException] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def call() -> None:
            try:
                loop.call_soon_threadsafe(list)
            except RuntimeError as error:
                refused.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    run(main())
    assert len(refused) == 1


def test_nothing_of_a_killed_loop_runs_later_p2() -> None:
    log: list[str] = []

    @asynccontextmanager
    async def opened():
        try:
            yield
        finally:
            await asyncio.sleep(0)
            log.append("after an await in clean-up")

    async def work() -> None:
        async with opened():
            await asyncio.sleep(1_000)

    async def main() -> None:
        asyncio.create_task(work())  # noqa: RUF006
        await asyncio.sleep(1)
        loop.kill()
        log.append("the callback that runs ends")
        await asyncio.sleep(0)
        log.append("never")

    loop = SimulationLoop()
    with pytest.raises(Killed):
        loop.run_until_complete(main())
    loop.drop()
    assert "never" not in log
    assert log[0] == "the callback that runs ends"
    assert loop.unhandled == []


def test_killed_before_a_step_p5() -> None:
    log: list[int] = []

    async def main() -> None:
        for number in range(10):
            log.append(number)
            await asyncio.sleep(0)

    loop = SimulationLoop()
    loop.kill_at_step = 3
    with pytest.raises(Killed):
        loop.run_until_complete(main())
    loop.drop()
    assert log == [0, 1, 2]


def test_errors_nobody_catches_are_kept_for_the_judge_p2() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.sleep(1)

    loop = SimulationLoop()
    loop.run_until_complete(main())
    assert len(loop.unhandled) == 1
    assert "ZeroDivisionError" in loop.unhandled[0]
    loop.drop()


@pytest.mark.parametrize(
    "act",
    [
        lambda: asyncio.open_connection("127.0.0.1", 9),
        lambda: asyncio.open_unix_connection("nowhere"),
        lambda: asyncio.start_server(lambda *_: None, "127.0.0.1", 0),
        lambda: asyncio.create_subprocess_exec("true"),
        lambda: asyncio.create_subprocess_shell("true"),
    ],
)
def test_sockets_and_processes_are_refused_with_what_to_do_p2(act: Callable[[], Awaitable[object]]) -> None:
    async def main() -> None:
        await act()

    with pytest.raises(NoOutside, match=r"through host\.effect"):
        run(main())


def test_entropy_repeats_with_its_seed_p16() -> None:
    first, second, other = SimulatedEntropy(1), SimulatedEntropy(1), SimulatedEntropy(2)
    tokens = [first.token() for _ in range(3)]
    assert tokens == [second.token() for _ in range(3)]
    assert len({*tokens, other.token()}) == 4
    assert all(len(token) == 32 for token in tokens)
    assert 0 <= first.fraction() < 1
