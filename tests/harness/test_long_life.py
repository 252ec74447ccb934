"""What a long life takes: growth a turn is flat, and opening costs what is live (rules K99, K101, K106, K185, K229)."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from kit import opened

from perdure import Document, Harness, SqliteStorage, field
from perdure.kernel.records import Address
from perdure.kernel.session import Settled
from perdure.storage.sqlite_reads import Reader
from perdure.testing.model import ScriptedModel, say

TURNS = 2_000
QUARTER = TURNS // 4


class Journal(Document, kind="app.journal", scope="conversation", history="rewindable", fork="as_of"):
    """Grows with every turn, and each of its states can be asked for."""

    lines: list[str] = field(default_factory=list)


class Board(Document, kind="app.board", scope="session"):
    """Grows with every turn; only the newest state counts."""

    notes: dict[str, str] = field(default_factory=dict)
    text: str = ""


@asynccontextmanager
async def host(path: Path) -> AsyncIterator[Harness]:
    model = ScriptedModel(lambda _request: say("all is well with it"))
    storage = SqliteStorage(path, durability="process")
    async with opened(model, storage=storage) as harness:  # pyright: ignore[reportArgumentType]
        yield harness


async def turns(harness: Harness, first: int, last: int, *, place: int = 1) -> None:
    """Turns, of which each also makes both documents longer."""
    conversation = harness.handle(place)
    for number in range(first, last):
        await (await conversation.submit(f"look after item {number:6}")).wait()
        async with conversation.commit() as tx:
            (await tx.draft(Journal)).lines.append(f"item {number:6} was looked after")
            board = await tx.draft(Board)
            board.notes[f"{number:6}"] = "done and well"
            board.text += f"{number:6}, "


def written(settled: Settled) -> int:
    """Bytes of all that a commit hands to storage."""
    batch = settled.batch
    records = (*batch.entries, *batch.submissions, *batch.tasks, *batch.conversations)
    documents = sum(len(write.base or b"") + len(write.ops or b"") for write in batch.documents)
    return documents + sum(len(bytes(getattr(record, "raw_messages", b""))) + 300 for record in records)


async def test_growth_a_turn_is_flat_over_two_thousand_turns_k99_k106(tmp_path: Path) -> None:
    """A state that was stored whole each time would make the last quarter take seven times what the first one does."""
    path = tmp_path / "agent.db"
    stored: list[int] = []
    taken: list[int] = []
    wrote: list[int] = []
    total = 0

    def note(settled: Settled) -> None:
        nonlocal total
        total += written(settled)

    for quarter in range(4):
        async with host(path) as harness:
            await harness.root()
            harness.session.observe(note)
            await turns(harness, quarter * QUARTER, (quarter + 1) * QUARTER)
            size = await harness.size()
            stored.append(size.entries + size.tasks + size.submissions + size.documents)
            wrote.append(total)
        taken.append(os.stat(path).st_size)  # closed, so that nothing of it is in the log
    for name, levels, share in (("records", stored, 1.25), ("file", taken, 1.25), ("written", wrote, 1.5)):
        grown = [after - before for before, after in zip([0, *levels[:-1]], levels, strict=True)]
        # Bases of growing documents are rare and large: halves of the run even them out.
        early, late = sum(grown[:2]), sum(grown[2:])
        assert late <= share * early, f"{name}: {grown}"
    async with host(path) as harness:
        journal = await harness.session.snapshot(Journal, conversation=1)
        assert journal is not None
        assert len(journal.lines) == TURNS
        entry = (await harness.handle(1).entries(first=0, limit=1000))[999]
        then = await harness.session.snapshot(Journal, conversation=1, at=entry.id)
        assert then is not None
        assert 495 <= len(then.lines) <= 500, "and every state between is there"


async def test_opening_reads_what_is_live_and_not_what_is_stored_k185(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By counting reads, and what SQLite does for them, for a history and documents ten times as long."""
    costs: list[tuple[int, int]] = []
    reads, steps = 0, 0
    run = Reader.run

    def counting(self: Reader, read):
        nonlocal reads
        reads += 1

        def looked(reader: Reader):
            nonlocal steps
            assert reader._link is not None

            def tick() -> bool:
                nonlocal steps
                steps += 1
                return False

            reader._link.set_progress_handler(tick, 10)
            return read(reader)

        return run(self, looked)

    for many in (60, 600):
        path = tmp_path / f"{many}.db"
        async with host(path) as harness:
            await harness.root()
            await turns(harness, 0, many)
            for _ in range(many // 10):
                await harness.create_conversation()
        with monkeypatch.context() as patched:
            patched.setattr(Reader, "run", counting)
            reads = steps = 0
            async with host(path) as harness:
                await harness.root()
                harness.resume()
                await harness.idle()
                assert (await harness.inspect()).tasks == []
                costs.append((reads, steps))
                assert harness.session.documents.peek(Address(Journal.definition.kind, "conversation", 1)) is None
    assert costs[1][0] == costs[0][0], "as many reads"
    assert costs[1][1] <= costs[0][1] + 5, "of the same size"
