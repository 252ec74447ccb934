"""What a store is given, and what it keeps, as a conversation goes on: the same for each turn, however many came before
(K102, K106, H62)."""

from __future__ import annotations

from pathlib import Path

import msgspec
from acceptance_kit import STORE, opened

from perdure import Harness, tool
from perdure.kernel.session import Settled
from perdure.testing.model import ScriptedModel, call, say

TURNS = 15
"""Of each stretch; the stretches are compared."""


class Given:
    """How many bytes were handed to storage."""

    def __init__(self, harness: Harness) -> None:
        self.bytes = 0
        harness.session.observe(self.hear)

    def hear(self, settled: Settled) -> None:
        batch = settled.batch
        records = (*batch.conversations, *batch.entries, *batch.submissions, *batch.tasks)
        self.bytes += sum(len(msgspec.json.encode(record)) for record in records)
        self.bytes += sum(len(write.base or b"") + len(write.ops or b"") for write in batch.documents)


async def kept(harness: Harness) -> int:
    size = await harness.session.storage.size()
    return size.entries + size.submissions + size.tasks + size.documents


async def test_a_turn_stores_the_same_however_many_came_before_k106(tmp_path: Path) -> None:
    """Two inputs, one of them queued, a tool and two streamed answers: nothing of it is stored again later."""

    @tool(name="work", replay="safe")
    async def work() -> str:
        """Work."""
        return "It is done. " * 20

    script = {"go": [call("work"), say("It went well, as far as can be told. " * 10)], "then": say("Then that.")}
    stretches: list[tuple[int, int]] = []
    async with opened(
        tmp_path / STORE, ScriptedModel(script), tools=(work,), instructions="Be brief.", partial_interval_ms=0
    ) as harness:
        root = await harness.root()
        given, before = Given(harness), await kept(harness)
        for _ in range(5):
            for _ in range(TURNS):
                first = await root.submit("go")
                second = await root.submit("then")
                await first.answer()
                await second.answer()
            now = await kept(harness)
            stretches.append((given.bytes, now - before))
            given.bytes, before = 0, now
    for which in (0, 1):
        stored = [stretch[which] for stretch in stretches]
        assert max(stored) < 1.2 * min(stored), f"bytes a stretch of {TURNS} turns: {stored}"
