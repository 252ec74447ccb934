"""Whatever is submitted, wherever it is killed: no more is asked than a limit lets through (rules H159, H244, H246)."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from kit import Hold, opened, queue
from test_input_random import check, finish, lives_of, look, one, script, steps

from perdure.harness.limits import Limits
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import ScriptedModel


@settings(max_examples=60, deadline=None)
@given(
    steps,
    st.integers(0, 4),
    st.sampled_from(["conversation_limits", "limits"]),
    st.sampled_from(["keep", "continue", "withdraw"]),
)
def test_no_more_is_asked_than_a_limit_lets_through_h159(steps, most: int, scope: str, after_failure) -> None:
    """One conversation has one request at a time: it stops exactly there. Without the limit all of it goes on."""

    async def play() -> None:
        storage = MemoryStorage()
        options: dict[str, Any] = {"after_failure": after_failure, scope: Limits(turns=most)}
        ids: list[int] = []
        lives = lives_of(steps)
        for number, life in enumerate(lives, 1):
            model = ScriptedModel(script, pace=Hold(0, 1))
            async with opened(model, storage=storage, tools=(look,), **options) as harness:
                root = await harness.root()
                for at, step in enumerate(life):
                    id = await one(harness, root, model, step, f"{number}.{at}", ids)
                    ids += [] if id is None else [id]
                    assert (await harness.usage()).turns <= most
                if number == len(lives):
                    assert isinstance(model.pace, Hold)
                    model.pace.release()
                    await harness.idle()
                    used = await harness.usage()
                    assert used.turns <= most
                    for id in ids:
                        record = await (await harness.submission(id)).record()
                        if record.reason == "limit":
                            # It was reached when that ended, and nothing takes it back.
                            assert used.turns == most
                        assert record.settled or id in await queue(root)
                    harness.set_limits(session=None, conversation=None)
                    model.pace = Hold(0, 1)
                    await finish(harness, root, model, len(ids))
                    await check(harness, root, ids)
                storage = storage.snapshot()

    asyncio.run(play())
