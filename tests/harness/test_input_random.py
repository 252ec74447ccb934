"""Whatever is submitted in whatever order, every submission ends, in its order, and every request is well-formed."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from kit import Audit, Hold, Note, opened, queue, rest
from test_context import assert_well_formed

from perdure.harness.documents import USER
from perdure.harness.inbox import ConversationBusy
from perdure.harness.tool import tool
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import ScriptedModel, call, calls, fail, say

steps = st.lists(
    st.sampled_from(
        ["follow_up", "steer", "reject", "tools", "bad", "write", "audit", "reset", "withdraw", "abort", "rest", "kill"]
    ),
    min_size=1,
    max_size=14,
)


def script(request):
    last = next((m.text for m in reversed(request.messages) if m.text), "")
    if last.startswith("tools"):
        return calls(call("look"), call("look"))
    return fail("malformed") if last.startswith("bad") else say(f"answer to {last}")


@tool(replay="safe")
async def look() -> str:
    """Look."""
    await asyncio.sleep(0)
    return "seen"


@settings(max_examples=60)
@given(
    steps,
    st.sampled_from(["first", "all"]),
    st.sampled_from(["first", "all"]),
    st.sampled_from(["keep", "continue", "withdraw"]),
)
def test_every_submission_ends_h21_h36_h43(steps, steer, follow_up, after_failure) -> None:
    async def play() -> None:
        storage = MemoryStorage()
        modes: dict[str, Any] = {"steer": steer, "follow_up": follow_up, "after_failure": after_failure}
        ids: list[int] = []
        requests = []
        lives = lives_of(steps)
        for number, life in enumerate(lives, 1):
            model = ScriptedModel(script, pace=Hold(0, 1))
            async with opened(model, storage=storage, tools=(look,), **modes) as harness:
                root = await harness.root()
                for at, step in enumerate(life):
                    id = await one(harness, root, model, step, f"{number}.{at}", ids)
                    ids += [] if id is None else [id]
                if number == len(lives):
                    await finish(harness, root, model, len(ids))
                    await check(harness, root, ids)
                storage = storage.snapshot()
            requests += model.requests
        for request in requests:
            assert_well_formed(request.messages)

    asyncio.run(play())


def lives_of(steps: list[str]) -> list[list[str]]:
    """The steps between one kill and the next."""
    lives: list[list[str]] = [[]]
    for step in steps:
        if step == "kill":
            lives.append([])
        else:
            lives[-1].append(step)
    return lives


async def one(harness, root, model, step: str, name: str, ids: list[int]) -> int | None:
    """Take one step; the id of what it submitted."""
    match step:
        case "follow_up" | "steer" | "reject":
            try:
                return (await root.submit(f"say {name}", mode=step)).id
            except ConversationBusy:
                return None
        case "tools" | "bad":
            return (await root.submit(f"{step} {name}")).id
        case "write":
            return (await root.write(Note(text=f"note {name}"))).id
        case "audit":
            return (await root.write(Audit(n=1))).id
        case "reset":
            return (await root.reset(f"handoff {name}")).id
        case "withdraw" if ids:
            await (await harness.submission(ids[-1])).abort()
        case "abort":
            await root.abort()
        case "rest":
            model.pace.release()
            await rest()
            model.pace = Hold(0, 1)
        case _:
            pass
    return None


async def finish(harness, root, model, most: int) -> None:
    model.pace.release()
    await harness.idle()
    # What a failed or aborted run left behind, the next inputs place.
    for _ in range(2 * most + 1):
        if not await queue(root):
            return
        await root.submit("say at last")
        await harness.idle()


async def check(harness, root, ids: list[int]) -> None:
    assert not await root.busy()
    assert await queue(root) == []
    inspection = await harness.inspect()
    assert (inspection.queued, inspection.placed, inspection.tasks) == ([], [], [])
    placed: dict[str, list[int]] = {"input": [], "write": []}
    for id in ids:
        record = await (await harness.submission(id)).record()
        assert record.settled, record
        if record.status == "done":
            assert record.entry is not None
            entry = await harness.session.entry(record.entry)
            assert entry is not None
            if record.type == "input":
                assert entry.kind == USER
                assert record.answer is not None
                assert record.answer > record.entry
            if entry.messages:
                placed[record.type].append(record.entry)
    # Resets and writes keep their order among themselves.
    assert placed["write"] == sorted(placed["write"])
