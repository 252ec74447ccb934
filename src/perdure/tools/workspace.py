"""The files below one directory of this machine, reached so that no path leads out of it.

Every path is walked from the root one name at a time on open directories, symbolic links are expanded by
hand, and the last step follows none: what is checked is what is used, also while somebody else swaps names
for links. All calls block; LocalEnvironment makes them in threads.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
import threading
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass

from perdure.harness.environment import (
    FileChanged,
    FileError,
    FileKind,
    FileMissing,
    FileStat,
    FileTooLarge,
    Listing,
    NotAFile,
    PathEscapes,
)

MAX_READ = 64 * 1024 * 1024
"""Bytes that one read takes into memory."""
_CHUNK = 1024 * 1024
_MAX_LINKS = 40
_MAX_PATH = 4096
"""Bytes; as much as the system takes in one call."""
IS_DIRECTORY = "is a directory, not a regular file"
IS_SPECIAL = "is a pipe, socket, device or link, not a regular file"
NO_DIRECTORY = "is not a directory, or goes through something that is none"
NOT_EMPTY = "is a directory that is not empty"
FULL = "could not be written: the disk is full"
"""What a model is told is the same in a directory of this machine and in a Space."""
_MAX_DEPTH = 100
"""Directories below the root that are open at once while a path is walked: descriptors are the whole host's."""
_WALK = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
# NONBLOCK: opening a pipe that nobody writes to must not hang; regular files ignore it.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

_replacing = threading.Lock()
"""Held from comparing a file with what is expected of it to replacing it."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A name in an open directory. ``name`` is "." where the path named the directory itself."""

    directory: int
    name: str
    path: str
    """Where it really is, for messages and for a command's working directory."""


class Workspace:
    """One directory tree. ``confine=False`` lets paths lead anywhere."""

    def __init__(self, root: str, *, confine: bool = True) -> None:
        self.root = os.path.abspath(root)
        self.real_root = os.path.realpath(root)
        self._confine = confine
        self._top = self.real_root if confine else "/"

    def read(self, path: str, offset: int, length: int | None) -> bytes:
        if offset < 0 or (length is not None and length < 0):
            raise ValueError(f"a range begins at 0 or later and is not negative: {offset}, {length}")
        with self._place(path) as place, _opened(path, place) as (file, info):
            # A file of /proc has more than the 0 bytes it tells of.
            left = max(0, info.st_size - offset) if info.st_size else MAX_READ
            wanted = left if length is None else min(length, left)
            if wanted > MAX_READ:
                raise FileTooLarge(path, f"{wanted} bytes are more than the {MAX_READ} one read takes; read a range")
            chunks: list[bytes] = []
            while wanted > 0:
                chunk = os.pread(file, min(wanted, _CHUNK), offset)
                if not chunk:
                    break
                chunks.append(chunk)
                offset += len(chunk)
                wanted -= len(chunk)
            return b"".join(chunks)

    def write(self, path: str, data: bytes, mode: int | None, expect: str | None) -> None:
        with self._place(path, make_parents=True) as place:
            before = _lstat(place)
            if place.name == "." or (before is not None and not stat.S_ISREG(before.st_mode)):
                raise NotAFile(path, IS_DIRECTORY if _kind(before) == "directory" else IS_SPECIAL)
            if before is not None and not os.access(
                place.name, os.W_OK, dir_fd=place.directory, effective_ids=os.access in os.supports_effective_ids
            ):
                raise FileError(path, "permission denied")
            temporary = _write_beside(place, data, before, mode)
            try:
                with _replacing:
                    if expect is not None:
                        _check_content(path, place, expect)
                    os.replace(temporary, place.name, src_dir_fd=place.directory, dst_dir_fd=place.directory)
            except BaseException:
                os.unlink(temporary, dir_fd=place.directory)
                raise
            _sync_directory(place.directory)

    def stat(self, path: str) -> FileStat | None:
        try:
            with self._place(path) as place:
                info = _lstat(place)
                return None if info is None else _file_stat(os.path.basename(place.path), info)
        except FileError as error:
            if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                return None
            raise

    def list(self, path: str, limit: int) -> Listing:
        with self._place(path) as place:
            directory = os.open(
                place.name,
                os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC,
                dir_fd=place.directory,
            )
            entries: list[FileStat] = []
            try:
                names = sorted(os.listdir(directory), key=os.fsencode)
                for name in names[:limit]:
                    with contextlib.suppress(FileNotFoundError):  # Removed meanwhile.
                        entries.append(_file_stat(name, os.lstat(name, dir_fd=directory)))
            finally:
                os.close(directory)
            return Listing(entries=tuple(entries), more=len(names) > limit)

    def remove(self, path: str) -> None:
        with self._place(path, follow_last=False) as place:
            info = _lstat(place)
            if info is None:
                raise FileMissing(path, "does not exist")
            if place.name == ".":
                raise FileError(path, "is the directory the path stands in; name it from outside to remove it")
            if stat.S_ISDIR(info.st_mode):
                os.rmdir(place.name, dir_fd=place.directory)
            else:
                os.unlink(place.name, dir_fd=place.directory)
            _sync_directory(place.directory)

    def directory(self, path: str) -> str:
        """The real path of an existing directory, for a command to start in."""
        with self._place(path) as place:
            info = _lstat(place)
            if info is None:
                raise FileMissing(path, "does not exist")
            if not stat.S_ISDIR(info.st_mode):
                raise FileError(path, "is not a directory")
            return place.path

    def relative(self, path: str) -> str | None:
        """A path as one that is relative to the root, however it is written; None: it is written as one outside."""
        return self._below(path) if os.path.isabs(path) else path

    def contains(self, path: str) -> bool:
        """Whether an absolute path is written as one below the root. It may still lead out through a link."""
        return self._below(path) is not None

    # --- walking
    # ----------------------------------------------------------------------------------------------

    def _below(self, path: str) -> str | None:
        """The part of an absolute path below the root, or None."""
        path = "/" + path.lstrip("/")
        if not self._confine:
            return path[1:]
        for root in (self.root, self.real_root):
            prefix = root.rstrip("/") + "/"
            if (path + "/").startswith(prefix):
                return path[len(prefix) :]
        return None

    def _parts(self, path: str, named: str) -> list[str]:
        below = self._below(path)
        if below is None:
            raise self._escapes(named)
        return below.split("/")

    def _escapes(self, path: str) -> PathEscapes:
        return PathEscapes(path, f"leads out of the workspace {self.root}; use a path inside it")

    @contextlib.contextmanager
    def _place(self, path: str, *, follow_last: bool = True, make_parents: bool = False) -> Generator[_Place]:
        """Walk to where ``path`` leads. The last name need not exist; those before it must, or are made where the path
        itself names them, not a link."""
        check_path(path)
        with _reported(path), contextlib.ExitStack() as opened:
            walked: list[tuple[int, str]] = [(os.open(self._top, _WALK), self._top.rstrip("/"))]
            opened.callback(lambda: [os.close(directory) for directory, _ in walked])
            if os.path.isabs(path):
                parts = deque(self._parts(path, path))
            else:
                start = "" if self._confine else self.real_root[1:] + "/"
                parts = deque((start + path).split("/"))
            links = 0
            own = len(parts) + 1
            """So many of ``parts``, at its end, are at most left of the path itself; those before are of a link."""
            while parts:
                part = parts.popleft()
                if part in ("", "."):
                    continue
                directory, where = walked[-1]
                if part == "..":
                    if len(walked) > 1:
                        os.close(walked.pop()[0])
                    elif self._confine:
                        raise self._escapes(path)
                    continue
                here = _Place(directory, part, f"{where}/{part}")
                info = _lstat(here)
                if info is not None and stat.S_ISLNK(info.st_mode) and (parts or follow_last):
                    links += 1
                    if links > _MAX_LINKS:
                        raise FileError(path, f"goes through more than {_MAX_LINKS} symbolic links")
                    own = min(own, len(parts))
                    target = os.readlink(part, dir_fd=directory)
                    if os.path.isabs(target):
                        while len(walked) > 1:
                            os.close(walked.pop()[0])
                        parts.extendleft(reversed(self._parts(target, path)))
                    else:
                        parts.extendleft(reversed(target.split("/")))
                    continue
                if not parts:
                    yield here
                    return
                if len(walked) + (len(parts) if info is None else 0) > _MAX_DEPTH:  # Before anything is made.
                    raise FileError(path, f"is more than {_MAX_DEPTH} directories deep")
                if info is None and make_parents and len(parts) < own and any(name not in ("", ".") for name in parts):
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=directory)
                    _sync_directory(directory)
                walked.append((os.open(part, _WALK | os.O_NOFOLLOW, dir_fd=directory), here.path))
            directory, where = walked[-1]
            yield _Place(directory, ".", where or "/")


@contextlib.contextmanager
def _reported(path: str) -> Generator[None]:
    """Turn what the operating system says into the protocol's errors."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileMissing(path, "does not exist") from error
    except OSError as error:
        raise FileError(path, _REASONS.get(error.errno or 0) or (error.strerror or str(error)).lower()) from error


_REASONS = {
    errno.ELOOP: "became a symbolic link while it was being opened; try again",
    errno.ENOTDIR: NO_DIRECTORY,
    errno.ENOTEMPTY: NOT_EMPTY,
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
}


def check_path(path: str) -> None:
    """Raises FileError for what no file can be named."""
    try:
        raw = os.fsencode(path)
    except UnicodeEncodeError as error:
        raise FileError(repr(path[:100]), "is not a name a file can have") from error
    if b"\0" in raw:
        raise FileError(repr(path[:100]), "a path has no NUL byte")
    if len(raw) > _MAX_PATH:
        raise FileError(repr(path[:100]), f"a path of {len(raw)} bytes is longer than the {_MAX_PATH} a path can have")


@contextlib.contextmanager
def _opened(path: str, place: _Place) -> Generator[tuple[int, os.stat_result]]:
    """A regular file, open for reading, and what it is."""
    file = os.open(place.name, _READ, dir_fd=place.directory)
    try:
        info = os.fstat(file)
        if not stat.S_ISREG(info.st_mode):
            raise NotAFile(path, IS_DIRECTORY if stat.S_ISDIR(info.st_mode) else IS_SPECIAL)
        yield file, info
    finally:
        os.close(file)


def _write_beside(place: _Place, data: bytes, before: os.stat_result | None, mode: int | None) -> str:
    """Write and sync the data under a name of its own beside ``place``, and return that name.

    Where the system can, the file has no name until it is whole: a crash then leaves nothing behind.
    """
    name = f".perdure-{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CLOEXEC
    if unnamed := getattr(os, "O_TMPFILE", 0):
        with contextlib.suppress(OSError):
            file = os.open(".", flags | unnamed, 0o666, dir_fd=place.directory)
            try:
                _fill(file, data, before, mode)
                os.link(f"/proc/self/fd/{file}", name, dst_dir_fd=place.directory, follow_symlinks=True)
            finally:
                os.close(file)
            return name
    flags |= os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    # Nobody else reads what may be a secret before it has its mode.
    file = os.open(name, flags, 0o666 if mode is None and before is None else 0o600, dir_fd=place.directory)
    try:
        _fill(file, data, before, mode)
    except BaseException:
        os.unlink(name, dir_fd=place.directory)
        raise
    finally:
        os.close(file)
    return name


def _fill(file: int, data: bytes, before: os.stat_result | None, mode: int | None) -> None:
    if before is not None and (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
        with contextlib.suppress(PermissionError):
            os.fchown(file, before.st_uid, before.st_gid)
    if mode is not None:
        os.fchmod(file, mode)
    elif before is not None:
        os.fchmod(file, before.st_mode & 0o777)  # As any write: set-user-ID goes with the old content.
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
    os.fsync(file)


def _check_content(path: str, place: _Place, expect: str) -> None:
    with _opened(path, place) as (file, _):
        digest = hashlib.sha256()
        while chunk := os.read(file, 1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != expect:
        raise FileChanged(path, "was changed meanwhile; read it again")


def _sync_directory(directory: int) -> None:
    """Make a change of names last. Where the directory may not be read, or its file system has no such call, the
    change is all the same done."""
    try:
        file = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
        try:
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP):
            raise


def _lstat(place: _Place) -> os.stat_result | None:
    try:
        return os.lstat(place.name, dir_fd=place.directory)
    except FileNotFoundError:
        return None


def _kind(info: os.stat_result | None) -> FileKind:
    if info is None or stat.S_ISDIR(info.st_mode):
        return "directory"
    if stat.S_ISREG(info.st_mode):
        return "file"
    return "symlink" if stat.S_ISLNK(info.st_mode) else "other"


def _file_stat(name: str, info: os.stat_result) -> FileStat:
    return FileStat(
        name=name,
        kind=_kind(info),
        size=info.st_size,
        mode=stat.S_IMODE(info.st_mode),
        modified_at=info.st_mtime_ns // 1_000_000,
    )
