"""What a streamed answer costs storage, and how soon it is seen (rule H68): counts and virtual time, no measuring."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from statistics import median
from typing import Any

import msgspec
import pytest
from kit import opened

from perdure.harness.messages import AssistantMessage, Text, Usage
from perdure.harness.model import Finished, ModelEvent, ModelInfo, ModelRequest, TextDelta
from perdure.kernel.session import Settled
from perdure.kernel.storage import Batch
from perdure.storage.memory import MemoryStorage
from perdure.testing.loop import SimulatedClock, SimulationLoop

DELTAS = 2_000


class Paced:
    """An answer in so many deltas, a pause before each."""

    default = "test:paced"

    def __init__(self, delta: str, pause: float, deltas: int = DELTAS) -> None:
        self.delta, self.pause, self.deltas = delta, pause, deltas
        self.begun: list[float] = []
        """When the first delta of each stream came."""

    def find(self, model: str) -> ModelInfo | None:
        return ModelInfo(provider="test", name="paced", context_window=10**9, max_output=10**6)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        for number in range(self.deltas):
            await asyncio.sleep(self.pause)
            if number == 0:
                self.begun.append(asyncio.get_running_loop().time())
            yield TextDelta(self.delta)
        yield Finished(
            AssistantMessage(
                content=(Text(self.delta * self.deltas),),
                provider="test",
                model="paced",
                stop_reason="stop",
                usage=Usage(input=1, output=1),
            )
        )


class Weighing(MemoryStorage):
    """Sums what it is handed, encoded."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    def commit(self, batch: Batch) -> asyncio.Future[None]:
        self.batches.append(weight(batch))
        return super().commit(batch)


def weight(batch: Batch) -> int:
    records = (*batch.conversations, *batch.entries, *batch.submissions, *batch.tasks)
    written = sum(len(msgspec.json.encode(record)) for record in records)
    for write in batch.documents:
        written += len(msgspec.json.encode(write.record)) + len(write.base or b"") + len(write.ops or b"")
    return written


def played(main: Coroutine[Any, Any, None], *, order_seed: int | None = None) -> None:
    loop = SimulationLoop(order_seed=order_seed, max_steps=2_000_000)
    try:
        loop.run_until_complete(main)
    finally:
        loop.drop()


@pytest.mark.parametrize("pause", [0.0, 0.002, 0.005, 0.02, 0.05, 0.15])
@pytest.mark.parametrize("delta", ["word ", "x" * 41, "x" * 200])
def test_an_answer_is_handed_over_twice_and_a_commit_of_it_costs_little_h68_k101(delta: str, pause: float) -> None:
    """Once as it streams and once as it is: never a third time, as when a partial is stored anew as it grows."""
    model, storage = Paced(delta, pause), Weighing()

    async def main() -> None:
        async with opened(model, storage=storage, clock=clock()) as harness:
            root = await harness.root()
            storage.batches.clear()
            assert len((await (await root.submit("hi")).answer()).text) == DELTAS * len(delta)
        seconds = DELTAS * pause
        assert len(storage.batches) >= min(seconds / 0.1, DELTAS if pause else 0), "it was seen as it came"
        assert sum(storage.batches) <= 2 * DELTAS * len(delta) + 300 * len(storage.batches)

    played(main())


@pytest.mark.parametrize("pause", [0.001, 0.02, 0.3])
def test_the_first_partial_is_stored_within_20_ms_of_the_first_delta_h68(pause: float) -> None:
    """Whatever the turn before it streamed last. Time passes with each step here, and tasks step in any order."""
    late: list[float] = []

    async def main() -> None:
        model = Paced("word ", pause, deltas=30)
        async with opened(model, clock=clock()) as harness:
            root = await harness.root()
            loop = asyncio.get_running_loop()
            first: list[float] = []

            def note(settled: Settled) -> None:
                if settled.batch.progress and len(first) < len(model.begun):
                    first.append(loop.time())

            harness.session.observe(note)
            for _ in range(10):
                await (await root.submit("hi")).wait()
            late.extend(seen - begun for begun, seen in zip(model.begun, first, strict=True))

    for seed in range(5):
        played(main(), order_seed=seed)
    assert len(late) == 50
    assert median(late) <= 0.02


def clock() -> SimulatedClock:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulationLoop)
    return SimulatedClock(loop)
