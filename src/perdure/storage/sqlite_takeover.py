"""Taking an SQLite store over from a holder that is alive and does not answer (rules K177 to K179).

The holder keeps the lock of a sidecar that no path names any more, and the fence refuses what it still commits. Only
one thing of it can be in the way: a transaction in which it stopped.
"""

from __future__ import annotations

import time

import apsw
import msgspec

from perdure.kernel.errors import StorageBusy
from perdure.kernel.storage import StoreInfo
from perdure.storage.holder import end_holder
from perdure.storage.lock import OwnerLock, Sidecar, sidecar
from perdure.storage.sqlite_header import examine
from perdure.storage.sqlite_schema import BUSY_MS, Link, connect, explained
from perdure.storage.sqlite_writer import raise_fence

TAKEOVER_SECONDS = 5.0
"""How long the transaction that raises the fence waits for its turn."""

_POLL_SECONDS = 0.02


class Taken(msgspec.Struct, frozen=True):
    lock: OwnerLock
    link: Link
    info: StoreInfo


def take_over(
    path: str, busy: StorageBusy, *, epoch: int | None, writer: str, now: int, kill: bool, vfs: str | None
) -> Taken | None:
    """Raise the fence of a store whose owner lock is held, as ``busy`` says. None: the holder has ended.

    ``kill``: a holder that is in the way is killed, if it is a process of this machine. Raises StorageBusy naming a
    holder that stays in the way, or somebody who took the store over at the same time; StaleEpochError; what SQLite's
    errors mean.
    """
    seen = sidecar(path)
    try:
        return _raised(path, seen, epoch=epoch, writer=writer, now=now, vfs=vfs)
    except _InTheWay as error:
        waited = f"a transaction on it could not begin within {TAKEOVER_SECONDS:g} s"
        end_holder(path, busy, seen, kill=kill, waited=waited, cause=error)
        return None


class _InTheWay(Exception):
    """The transaction could not begin."""


def _raised(path: str, seen: Sidecar, *, epoch: int | None, writer: str, now: int, vfs: str | None) -> Taken:
    until = time.monotonic() + TAKEOVER_SECONDS
    while not examine(path):  # its holder is making it
        if time.monotonic() > until:
            raise _InTheWay(f"no store is at {path} yet")
        time.sleep(_POLL_SECONDS)
    locks: list[OwnerLock] = []

    def own() -> None:
        locks.append(OwnerLock.replace(path, seen=seen, now=now))

    link: Link | None = None
    try:
        link = connect(path, "write", vfs=vfs, busy_ms=_left(until))
        link.set_busy_timeout(_left(until))
        info = raise_fence(link, path, epoch=epoch, writer=writer, own=own)
        link.set_busy_timeout(BUSY_MS)
    except BaseException as error:
        if link is not None:
            link.close()
        for lock in locks:
            lock.release()
        if isinstance(error, apsw.BusyError) or isinstance(error.__cause__, apsw.BusyError):
            raise _InTheWay(str(error)) from error
        if isinstance(error, (apsw.Error, OSError)):
            raise explained(error, path, "taken over") from error
        raise
    return Taken(locks[0], link, info)


def _left(until: float) -> int:
    return max(1, int((until - time.monotonic()) * 1000))
