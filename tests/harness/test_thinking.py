"""The thinking level of a conversation: set, refused, pinned (rule H249)."""

from __future__ import annotations

from typing import Any

import pytest
from kit import Hold, opened

from perdure.harness.documents import Agent
from perdure.kernel.errors import DocumentFieldError
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import ScriptedModel, say


@pytest.mark.parametrize("level", ["max", "", None, True, 3])
async def test_a_level_that_is_none_is_refused_where_it_is_set_h249(level: Any) -> None:
    async with opened(ScriptedModel(say("hi"))) as harness:
        root = await harness.root()
        with pytest.raises(ValueError, match="'off', 'minimal', 'low', 'medium', 'high'"):
            await root.set_agent(thinking=level, instructions="changed")
        assert (await root.agent()).instructions == "", "nothing of it was set"
        with pytest.raises(DocumentFieldError):
            Agent(thinking=level)


async def test_the_level_counts_from_the_next_request_on_and_is_pinned_h249() -> None:
    storage, hold = MemoryStorage(), Hold(0)
    async with opened(ScriptedModel(say("hi"), pace=hold), storage=storage) as harness:
        root = await harness.root(agent=Agent(thinking="low"))
        submission = await root.submit("hi")
        await hold.reached.wait()
        await root.set_agent(thinking="high")
        storage = storage.snapshot()
    model = ScriptedModel(say("hi"))
    async with opened(model, storage=storage) as harness:
        await (await harness.submission(submission.id)).answer()
        await (await (await harness.root()).submit("hi")).answer()
    assert [request.thinking for request in model.requests] == ["low", "high"]
