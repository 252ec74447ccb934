"""A new store file comes whole or not at all: built beside, synced, renamed (rule K161). Copies are made so too."""

# apsw's stubs speak of collections.abc.Buffer, which Python 3.11 does not have.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

import apsw

from perdure.kernel.errors import StorageError
from perdure.storage.sqlite_schema import explained, roll_back

_PAGES_A_STEP = 1000


def create(path: str, fill: Callable[[apsw.Connection], None], *, vfs: str | None) -> None:
    """Put a store at ``path``, made by ``fill`` in an empty database. The caller holds the owner lock of ``path``."""
    directory = os.path.dirname(path)
    clear(path)
    temporary = f"{path}.creating"
    try:
        # Made here and not by SQLite, which would give it the modes of the umask.
        os.close(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        link = apsw.Connection(temporary, flags=apsw.SQLITE_OPEN_READWRITE, vfs=vfs)
        try:
            link.execute("PRAGMA journal_mode = MEMORY; PRAGMA synchronous = OFF")
            fill(link)
            link.execute("PRAGMA journal_mode = WAL")
        finally:
            link.close()
        _sync(temporary)
        if os.path.lexists(path):
            raise StorageError(f"{path} appeared while a store was being made there; it was left as it is")
        os.rename(temporary, path)
        _sync(directory)
    except (apsw.Error, OSError) as error:
        clear(path)
        raise explained(error, path, "created") from error
    except BaseException:
        clear(path)
        raise


def clear(path: str) -> None:
    """Remove what a creator that died left beside ``path``; whoever holds the owner lock is the only living one."""
    for suffix in ("", "-journal", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            os.unlink(f"{path}.creating{suffix}")


def copying(source: apsw.Connection, *, log_id: str, go_on: Callable[[], None]) -> Callable[[apsw.Connection], None]:
    """A ``fill`` that copies a store as it is at one moment, while it is in use, and gives it another log id.

    ``go_on`` is called between two steps and after the last, and raises if the copy is not to be.
    """

    def fill(target: apsw.Connection) -> None:
        # One read transaction around all steps: a copy of one commit, and never begun anew because of a writer.
        source.execute("BEGIN; SELECT seq FROM meta").fetchall()
        try:
            with target.backup("main", source, "main") as backup:
                while not backup.done:
                    backup.step(_PAGES_A_STEP)
                    go_on()
        finally:
            roll_back(source)
        target.execute("UPDATE meta SET log_id = ?", (log_id,))

    return fill


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
