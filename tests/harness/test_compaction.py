"""Compaction: when a run waits for one, when one runs beside it, and what becomes of it (rules H133 to H146)."""

from __future__ import annotations

from compaction_kit import (
    LONG,
    compactions,
    data_of,
    failure,
    fill,
    has_summary,
    model,
    summaries,
    texts,
    turns,
)
from kit import live, opened

from perdure.harness.compaction_policy import Compaction

BLOCKING = Compaction(background_tokens=0)


# --- before a request -------------------------------------------------------------------------------------------


async def test_above_the_window_less_the_reserve_a_run_waits_for_a_compaction_h136() -> None:
    scripted = model()
    async with opened(scripted, compaction=BLOCKING) as harness:
        root = await harness.root()
        await fill(root, 9)
        submission = await root.submit("and now?")
        assert (await submission.answer()).text == "ok"
        (entry,) = await compactions(root)
        data = data_of(entry)
        assert (data.reason, data.model) == ("threshold", "test:scripted")
        assert data.tokens_before > 3_000
        sent = turns(scripted)[-1].messages
        assert has_summary(sent)
        assert texts(sent)[-1] == "and now?"
        assert len(summaries(scripted)) == 1
        assert (await live(root)).compactions == {}
        assert await failure(root) is None
        assert (await root.usage()).requests == 11


async def test_below_it_nothing_happens_h136() -> None:
    scripted = model()
    async with opened(scripted, compaction=BLOCKING) as harness:
        root = await harness.root()
        for _ in range(6):
            await (await root.submit(LONG)).answer()
        assert await compactions(root) == []
        assert summaries(scripted) == []
