"""``perdure backup``: a copy of a store, as of one commit, while it is in use (rules K29 and K184)."""

from __future__ import annotations

from pathlib import Path

from perdure.cli.stores import check_place, storage_of
from perdure.kernel.clock import SystemClock, SystemEntropy
from perdure.kernel.session import Session


async def backup(source: Path, target: Path) -> int:
    """Make the copy; how many commits are in it. Raises StorageError, and leaves nothing behind then."""
    storage = storage_of(source)
    check_place(target)
    async with Session.open(storage, read_only=True):
        await storage.backup(target, log_id=SystemEntropy().token(), now=SystemClock().wall())
    async with Session.open(storage_of(target), read_only=True) as copy:
        return copy.info.seq
