"""Where outputs too large for a result are kept: private files in one directory, the oldest reclaimed."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import tempfile
import threading

MAX_FILE = 64 * 1024 * 1024
"""Bytes kept of one output, from its start."""
MAX_FILES = 64
MAX_TOTAL = 512 * 1024 * 1024
"""Bytes of all outputs together, beyond which the oldest go."""
_NAME = re.compile(r"output-[0-9a-f]{16}\.log")

_open: set[str] = set()
"""Outputs that are being written, in every directory: several environments may keep theirs in one."""


class Spill:
    """One output's file. Writing never fails: what a full disk or the bound does not take is not kept."""

    def __init__(self, path: str, file: int) -> None:
        self.path = path
        self.kept = 0
        self._file = file
        self._full = False

    def write(self, data: bytes) -> None:
        view = memoryview(data)[: MAX_FILE - self.kept]
        self._full = self._full or len(view) < len(data)
        try:
            while view:
                written = os.write(self._file, view)
                self.kept += written
                view = view[written:]
        except OSError:
            self._full = True

    @property
    def full(self) -> bool:
        """Nothing more is kept: a gap would be read as output."""
        return self._full

    def close(self) -> None:
        with contextlib.suppress(OSError):  # A server's disk may be full only now; what it took is what there is.
            os.close(self._file)


class Spills:
    """The directory. Without one given it is private to this user and workspace, below the system's temporary
    directory, so that results of an earlier process still find their files."""

    def __init__(self, directory: str | None, workspace: str) -> None:
        self._given = None if directory is None else os.path.abspath(directory)
        self._workspace = workspace
        self._directory: str | None = None
        self._lock = threading.Lock()

    @property
    def directory(self) -> str:
        """Made on first use, and again if somebody swept it away; readable by this user only."""
        with self._lock:
            if self._directory is None or not os.path.isdir(self._directory):
                self._directory = self._make()
            return self._directory

    def holds(self, path: str) -> bool:
        """Whether an absolute path is that of a kept output, by its name."""
        directory, name = os.path.split(path)
        with contextlib.suppress(OSError):
            return _NAME.fullmatch(name) is not None and directory == self.directory
        return False

    def create(self) -> Spill:
        path = os.path.join(self.directory, f"output-{secrets.token_hex(8)}.log")
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        _open.add(path)
        return Spill(path, file)

    def close(self, spill: Spill) -> None:
        """Close one output's file and reclaim what is over the bounds. Files of others are left alone."""
        spill.close()
        _open.discard(spill.path)
        with contextlib.suppress(OSError):  # It was swept away, or may no longer be changed.
            _reclaim(spill.path)

    def _make(self) -> str:
        if self._given is not None:
            os.makedirs(self._given, 0o700, exist_ok=True)
            return os.path.realpath(self._given)
        base = os.path.join(tempfile.gettempdir(), f"perdure-{os.geteuid()}")
        path = os.path.join(base, f"output-{self._workspace}")
        for directory in (base, path):
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory, 0o700)
            if not _is_private(directory):  # Somebody else's: nothing of ours goes there.
                return tempfile.mkdtemp(prefix="perdure-output-")
        return os.path.realpath(path)


def _reclaim(newest: str) -> None:
    found: list[tuple[int, int, str]] = []
    with os.scandir(os.path.dirname(newest)) as entries:
        for entry in entries:
            if entry.path not in _open and _NAME.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    info = entry.stat(follow_symlinks=False)
                    found.append((info.st_mtime_ns, info.st_size, entry.path))
    found.sort(reverse=True)
    total = 0
    for number, (_, size, path) in enumerate(found, 1):
        total += size
        if path != newest and (number > MAX_FILES or total > MAX_TOTAL):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _is_private(directory: str) -> bool:
    info = os.lstat(directory)
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077
