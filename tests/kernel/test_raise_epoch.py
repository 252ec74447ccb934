"""Raising the epoch of a store that is open (rule K207)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from perdure.kernel.session import Session
from perdure.kernel.storage import Storage
from perdure.storage.memory import MemoryStorage
from perdure.storage.sqlite import SqliteStorage


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_the_epoch_rises_with_a_commit_k207(kind: str, tmp_path: Path) -> None:
    storage: Storage = MemoryStorage() if kind == "memory" else SqliteStorage(tmp_path / "s.db")
    async with Session.open(storage) as session:
        before = session.info.epoch
        async with session.commit() as tx:
            tx.raise_epoch(before + 10)
            assert session.info.epoch == before
        assert session.info.epoch == before + 10
        async with session.commit() as tx:
            tx.create_conversation(owner=None)
        async with session.commit() as tx:
            with pytest.raises(ValueError, match="only rises"):
                tx.raise_epoch(before + 10)
        assert session.failed is None
    async with Session.open(storage) as session:
        assert session.info.epoch == before + 11


async def test_a_block_that_fails_raises_nothing_k207() -> None:
    async with Session.open(MemoryStorage()) as session:
        before = session.info.epoch
        with pytest.raises(KeyError):
            async with session.commit() as tx:
                tx.raise_epoch(before + 10)
                raise KeyError
        assert session.info.epoch == before


async def test_the_epoch_rises_above_what_is_staged_k207() -> None:
    async with Session.open(MemoryStorage()) as session:
        before = session.info.epoch
        first, second = session.commit(), session.commit()

        async def raise_first() -> None:
            async with first:
                first.raise_epoch(before + 10)

        raising = asyncio.ensure_future(raise_first())
        await asyncio.sleep(0)
        async with second:
            assert session.info.epoch == before, "the first is on its way"
            with pytest.raises(ValueError, match=f"{before + 10} already"):
                second.raise_epoch(before + 5)
            second.raise_epoch(before + 11)
        await raising
        assert session.info.epoch == before + 11
