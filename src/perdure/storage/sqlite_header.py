"""What a file is, told by a plain read before SQLite touches it (rules K162, K164, K187).

SQLite creates files beside what it opens, takes an empty file for a new database, and finds out late that a file was
cut short. So the header is read first, and a file that is not a whole store is left exactly as it is.
"""

from __future__ import annotations

import os
import stat
import sys
from collections import Counter
from contextlib import suppress
from threading import Lock

from perdure.kernel.errors import StorageCorrupt, StorageError, StorageFormatError
from perdure.kernel.storage import FORMAT_VERSION

APPLICATION_ID = 0x50724475
"""Says in the header of an SQLite file that it is ours ("PrDu"); the format version is its user version."""

MAX_PATH = 480
"""Bytes of a store's path: SQLite takes 511, and the names of the files beside it are longer."""

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

    Raises StorageFormatError (foreign, newer), StorageCorrupt (empty, truncated, lost but for its log), StorageError
    (unreadable, a path that no store can have).
    """
    _check_path(path)
    try:
        with guard:
            found = os.stat(path)
            if not stat.S_ISREG(found.st_mode):
                raise StorageFormatError(
                    f"{path} is not a file; SqliteStorage has its store in one file, and JsonlStorage in a directory"
                )
            if in_use[found.st_dev, found.st_ino]:
                return True
            with open(path, "rb") as file:
                header = file.read(_HEADER)
        _judge(path, header, found.st_size)
    except FileNotFoundError:
        if os.path.islink(path):
            raise StorageError(f"{path} is a link to nowhere; remove it or restore what it names") from None
        for log in (f"{path}-wal", f"{path}-journal"):
            if os.path.exists(log):  # SQLite would play it into whatever is made here
                if os.path.lexists(path):  # somebody has made the store since it was not found
                    return examine(path)
                raise StorageCorrupt(
                    f"{path} is gone, but its log {log} is there; put the file back beside it, or remove the log to "
                    "begin a new store"
                ) from None
        return False
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error.strerror})") from error
    return True


def _check_path(path: str) -> None:
    """SQLite takes paths of a bounded length and in UTF-8, whatever the system's encoding is."""
    try:
        known = os.fsencode(path) == path.encode()
    except UnicodeEncodeError:
        known = False
    if not known:
        raise StorageError(
            f"{path!r}: the path of a store is UTF-8, which this is not in the encoding {sys.getfilesystemencoding()}; "
            "rename it, or run Python with PYTHONUTF8=1"
        )
    if len(path.encode()) > MAX_PATH:
        raise StorageError(f"{path}: the path of a store is at most {MAX_PATH} bytes long; choose a shorter one")


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
        logged = _pages_in_log(f"{path}-wal", page_size)
        # Its owner may be at work. A checkpoint makes the file longer before the log begins anew, so now again:
        size = os.stat(path).st_size
        missing = next((page for page in range(size // page_size + 1, pages + 1) if page not in logged), None)
        if missing is not None:
            raise StorageCorrupt(
                f"{path} was cut to {size} bytes of {pages * page_size}: page {missing} is missing; "
                "restore it from a backup"
            )


def _pages_in_log(path: str, page_size: int) -> set[int]:
    """The pages a write-ahead log holds, by its frame headers."""
    found: set[int] = set()
    with suppress(FileNotFoundError), open(path, "rb") as log:
        frames = (os.fstat(log.fileno()).st_size - _WAL_HEADER) // (_FRAME_HEADER + page_size)
        salts = log.read(_WAL_HEADER)[16:24]
        for _ in range(frames):
            frame = log.read(_FRAME_HEADER)
            if frame[8:16] == salts:
                found.add(int.from_bytes(frame[:4], "big"))
            log.seek(page_size, os.SEEK_CUR)
    return found
