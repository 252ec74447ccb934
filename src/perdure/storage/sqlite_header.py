"""What a file is, told by a plain read before SQLite touches it (rules K162, K164, K187).

SQLite creates files beside what it opens, takes an empty file for a new database, and finds out late that a file was
cut short. So the header is read first, and a file that is not a whole store is left exactly as it is.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from pathlib import Path
from threading import Lock

from perdure.kernel.errors import StorageCorrupt, StorageError, StorageFormatError
from perdure.kernel.storage import FORMAT_VERSION

APPLICATION_ID = 0x50724475
"""Says in the header of an SQLite file that it is ours ("PrDu"); the format version is its user version."""

_MAGIC = b"SQLite format 3\x00"
_HEADER = 100
_WAL_HEADER = 32
_FRAME_HEADER = 24

guard = Lock()
in_use: Counter[tuple[int, int]] = Counter()
"""Files this process has connections to, by device and inode, under ``guard``. Closing any descriptor of such a
file would free every POSIX lock SQLite holds on it in this process, so they are not read past SQLite."""


def examine(path: str) -> bool:
    """Whether a whole store of our format is at ``path``; False if nothing is.

    Raises StorageFormatError (foreign, newer), StorageCorrupt (empty, truncated), StorageError (unreadable).
    """
    try:
        with guard:
            found = os.stat(path)
            if not stat.S_ISREG(found.st_mode):
                raise StorageFormatError(f"{path} is not a file; a store is one file")
            if in_use[found.st_dev, found.st_ino]:
                return True
            with open(path, "rb") as file:
                header = file.read(_HEADER)
    except FileNotFoundError:
        if os.path.islink(path):
            raise StorageError(f"{path} is a link to nowhere; remove it or restore what it names") from None
        return False
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error.strerror})") from error
    _judge(path, header, found.st_size)
    return True


def check_format(path: str, application: int, version: int) -> None:
    """Raise StorageFormatError unless these two numbers of an SQLite header are a store's we can read."""
    if application != APPLICATION_ID:
        raise StorageFormatError(f"{path} is an SQLite database of another program; give the store another path")
    if version > FORMAT_VERSION:
        raise StorageFormatError(
            f"{path} has format {version}, this code reads up to format {FORMAT_VERSION}; open it with a newer perdure"
        )
    if version < 1:
        raise StorageFormatError(f"{path} has format {version}, which never existed")


def warnings(path: str) -> list[str]:
    """What others may do with a store's files that they should not (rule K163)."""
    found: list[str] = []
    for name in (path, f"{path}.lock", f"{path}-wal", f"{path}-shm"):
        try:
            mode = stat.S_IMODE(os.stat(name).st_mode)
        except FileNotFoundError:
            continue
        if mode & 0o077:
            found.append(f"{name} is open to other users (mode {mode:04o}); run: chmod 600 {name}")
    return found


def _judge(path: str, header: bytes, size: int) -> None:
    if size == 0:
        raise StorageCorrupt(
            f"{path} is empty; if it was a store, restore it from a backup, else remove the file to begin a new one"
        )
    if header[: len(_MAGIC)] != _MAGIC[: len(header)]:
        raise StorageFormatError(f"{path} is not a store but another kind of file; give the store another path")
    if len(header) < _HEADER:
        raise StorageCorrupt(f"{path} was cut to {size} bytes; restore it from a backup")

    def number(offset: int) -> int:
        return int.from_bytes(header[offset : offset + 4], "big")

    check_format(path, number(68), number(60))
    page_size = int.from_bytes(header[16:18], "big")
    page_size = 65536 if page_size == 1 else page_size
    pages = number(28)
    # The page count holds if it was written together with the change counter. A checkpoint writes the header first,
    # so pages that are still to come are all in the write-ahead log.
    if number(24) == number(92) and size < pages * page_size:
        missing = set(range(size // page_size + 1, pages + 1)) - _pages_in_log(f"{path}-wal", page_size)
        if missing:
            raise StorageCorrupt(
                f"{path} was cut to {size} bytes of {pages * page_size}: page {min(missing)} is missing; "
                "restore it from a backup"
            )


def _pages_in_log(path: str, page_size: int) -> set[int]:
    """The pages a write-ahead log holds, by its frame headers."""
    try:
        log = Path(path).read_bytes()
    except FileNotFoundError:
        return set()
    salts = log[16:24]
    starts = range(_WAL_HEADER, len(log) - _FRAME_HEADER - page_size + 1, _FRAME_HEADER + page_size)
    return {int.from_bytes(log[at : at + 4], "big") for at in starts if log[at + 8 : at + 16] == salts}
