"""Every change that a JSONL store makes to files and directories, and what the system's errors mean for it.

Nothing else here writes: what is on the disk when the process or the power goes follows from these calls alone.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from contextlib import suppress

from perdure.kernel.errors import StorageError

TEMPORARY = ".tmp"
"""The end of a name that nothing reads: a file that is being made. Left over, it is removed at the next open."""


def create(path: str) -> int:
    """A new file, open for reading and writing, for its user alone (rule K163)."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def make_directory(path: str) -> None:
    os.mkdir(path, 0o700)


def write(descriptor: int, offset: int, data: bytes) -> None:
    """All of it, at that place."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def cut(descriptor: int, size: int) -> None:
    os.ftruncate(descriptor, size)


def flush(descriptor: int) -> None:
    os.fdatasync(descriptor)


def flush_path(path: str) -> None:
    """Flush a file or a directory; nothing if it is not there any more."""
    if os.path.isdir(path):
        flush_directory(path)
        return
    with suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            flush(descriptor)
        finally:
            os.close(descriptor)


def flush_directory(path: str) -> None:
    """Make what was created, renamed and removed in it last."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: str, target: str) -> None:
    os.rename(source, target)


def link(source: str, target: str) -> None:
    """Give a file another name. Raises FileExistsError if that is taken."""
    os.link(source, target)


def remove(path: str) -> None:
    """Nothing if it is not there."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def remove_directory(path: str) -> None:
    os.rmdir(path)


def put(path: str, data: bytes, *, flushing: bool) -> None:
    """A whole file in one step; its directory is the caller's to flush."""
    temporary = path + TEMPORARY
    remove(temporary)
    descriptor = create(temporary)
    try:
        write(descriptor, 0, data)
        if flushing:
            flush(descriptor)
    except BaseException:
        with suppress(OSError):
            remove(temporary)
        raise
    finally:
        os.close(descriptor)
    rename(temporary, path)


def clear_directory(path: str) -> None:
    """Remove a directory of ours and all in it; nothing if it is not there."""
    try:
        found = list(os.scandir(path))
    except FileNotFoundError:
        return
    for each in found:
        if each.is_dir(follow_symlinks=False):
            clear_directory(each.path)
        else:
            remove(each.path)
    remove_directory(path)


def warnings(paths: Iterable[str]) -> list[str]:
    """What others may do with a store's files that they should not (rule K163)."""
    found: list[str] = []
    for path in paths:
        try:
            status = os.stat(path)
        except FileNotFoundError:
            continue
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o077:
            right = "700" if stat.S_ISDIR(status.st_mode) else "600"
            found.append(f"{path} is open to other users (mode {mode:04o}); run: chmod {right} {path}")
    return found


def explained(error: BaseException, path: str, doing: str) -> StorageError:
    """What an error of the system means for whoever runs the store, with the error as its cause."""
    if isinstance(error, StorageError):
        return error
    explanation = _explanation(error, f"{path} could not be {doing}")
    explanation.__cause__ = error
    return explanation


def _explanation(error: BaseException, what: str) -> StorageError:
    if not isinstance(error, OSError):
        return StorageError(f"{what} ({type(error).__name__}: {error})")
    why = str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"{what}: the disk is full ({why}); free some space, then open the store again")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StorageError(f"{what}: this process may not ({why}); check the modes of the files and their directories")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return StorageError(f"{what}: too many files are open ({why}); raise the limit (ulimit -n), then open it again")
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
        return StorageError(f"{what}: a part of it is gone ({why}); put it back, then open the store again")
    return StorageError(f"{what}: the disk or file system refused ({why}); see the system's log")
