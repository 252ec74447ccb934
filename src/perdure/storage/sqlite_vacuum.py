"""Giving the disk back what an SQLite store no longer uses (rules K146, K221 to K224).

VACUUM writes the store anew into a temporary file without a name, then into the write-ahead log, as one transaction.
So a kill or an error at any moment leaves the store as it was. Incremental vacuum works in small steps and needs no
room, but only in files that were made for it, where every commit writes more pages; and it takes as long.
"""

# apsw's stubs speak of collections.abc.Buffer, which Python 3.11 does not have.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import cast

import apsw

from perdure.kernel.errors import StorageError
from perdure.kernel.storage import VacuumReport
from perdure.storage.sqlite_schema import BUSY_MS, Link
from perdure.storage.sqlite_upkeep import taken

_STEPS = 1_000
"""Instructions of SQLite between two looks whether it may go on."""

_CHECKPOINT_BUSY_MS = 250
"""How long the log waits for readers of an old state before it is left to a later checkpoint."""

_FRAME_HEADER = 24
_TEMPORARY = ("/var/tmp", "/usr/tmp", "/tmp", ".")  # noqa: S108 - where SQLite looks, after two variables


def vacuum(link: Link, path: str, *, within_ms: int, stopping: Callable[[], bool]) -> VacuumReport:
    """Vacuum the store on its writer's thread, outside a transaction.

    Raises StorageError, and what SQLite and the system raise; the store is as it was then.

    ``stopping`` says that the store is being closed. It and the bound are looked at while the store is written anew;
    copying that into the log, the last part of it, is not interrupted.
    """
    before = taken(path)
    until = time.monotonic() + within_ms / 1000
    _checkpoint(link)
    room = _Room(link, path)
    room.check(path)
    link.set_progress_handler(lambda: stopping() or time.monotonic() > until, _STEPS)
    try:
        link.execute("VACUUM")
    except apsw.FullError as error:
        raise StorageError(f"{path} could not be vacuumed and is as it was: the disk is full; {room}") from error
    except apsw.InterruptError as error:
        why = "the store is being closed" if stopping() else f"it took longer than {within_ms} ms; allow it more"
        raise StorageError(f"{path} was not vacuumed and is as it was: {why}") from error
    finally:
        link.set_progress_handler(None)
        _checkpoint(link)
    return VacuumReport(before=before, after=taken(path))


def _checkpoint(link: Link) -> None:
    """Copy the log into the store and cut both to what they need, unless somebody reads an old state."""
    link.set_busy_timeout(_CHECKPOINT_BUSY_MS)
    try:
        # What goes wrong here goes wrong again at the next commit's checkpoint, which tells.
        with suppress(apsw.BusyError, apsw.FullError, apsw.IOError):
            link.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    finally:
        link.set_busy_timeout(BUSY_MS)


class _Room:
    """The room a vacuum needs: a copy of what stays in a temporary file, and one in the log beside the store."""

    def __init__(self, link: Link, path: str) -> None:
        def number(sql: str) -> int:
            return cast("int", link.execute(sql).get)

        page = number("PRAGMA page_size")
        pages = number("PRAGMA page_count") - number("PRAGMA freelist_count")
        self.temporary = pages * page
        self.log = pages * (page + _FRAME_HEADER)
        self.places = (_temporary_directory(), os.path.dirname(path))

    def check(self, path: str) -> None:
        """Raise StorageError if it is known beforehand that there is not enough."""
        needed: dict[int, tuple[int, int]] = {}
        for place, amount in zip(self.places, (self.temporary, self.log), strict=True):
            device, found = os.stat(place).st_dev, os.statvfs(place)
            needed[device] = (needed.get(device, (0, 0))[0] + amount, found.f_bavail * found.f_frsize)
        for amount, there in needed.values():
            if there < amount:
                raise StorageError(
                    f"{path} was not vacuumed and is as it was: there are only {there} bytes where {amount} are "
                    f"needed; {self}"
                )

    def __str__(self) -> str:
        temporary, beside = self.places
        return (
            f"it needs {self.temporary} bytes in {temporary} (SQLITE_TMPDIR names another directory) and {self.log} "
            f"bytes in {beside}: free them, then vacuum again"
        )


def _temporary_directory() -> str:
    """Where SQLite puts temporary files."""
    for place in (os.environ.get("SQLITE_TMPDIR"), os.environ.get("TMPDIR"), *_TEMPORARY):
        if place and os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK):
            return place
    return "."
