"""spaced: the daemon inside a Space. It owns the workspace's files, runs its commands and keeps, synced to disk,
what must outlive it: the fence, the exec ledger and the image record.

One file, standard library only, Python 3.9 or newer, Linux. ``docs/spaced-protocol.md`` describes what it speaks,
``docs/rules/spaces.md`` what it promises (rules S1 to S40).

How it is built: the **daemon** is one thread. Every request is a generator that it steps; between two ``yield``
nothing else happens, so that a check and its effect are one step, and at each step a request that a newer driver has
overtaken is ended. Slow system calls run in helper threads. The **zygote** is a small process that forks before
there are threads; it makes **shims**, which run the commands and outlive the daemon. Daemon and shims meet in the
**journal**, one append-only file under one lock.
"""

from __future__ import annotations

import argparse
import base64
import collections
import contextlib
import ctypes
import errno
import fcntl
import functools
import gc
import hashlib
import heapq
import hmac
import ipaddress
import json
import os
import re
import resource
import secrets
import select
import selectors
import signal
import socket
import stat
import struct
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple, NoReturn, Optional, cast

# --- bounds ---------------------------------------------------------------------------------------------------

PROTOCOL = 1
HEADER_BYTES = 1024 * 1024
BODY_BYTES = 16 * 1024 * 1024
HELLO_BYTES = 4096
HELLO_S = 5.0
STALL_S = 30.0
"""A frame begun, or an answer not taken, for so long ends its connection."""
STRANGERS = 64
"""Connections that have not said hello."""
CONNECTIONS = 128
KEYS = 2_000
ITEMS = 10_000
LEDGER = 10_000
"""Commands between two forgettings."""
RUNNING = 64
LASTING = 32
"""Lasting commands that have ended, of which record and output are kept."""
WAIT_MS = 30_000
TIMEOUT_MS = 7 * 24 * 3600 * 1000
CHUNK = 1024 * 1024
INLINE_BYTES = 1024 * 1024
OUTPUT_BYTES = 256 * 1024 * 1024
FILE_BYTES = 256 * 1024 * 1024
MOST_FILE_BYTES = 4 * 1024 * 1024 * 1024
"""The digests of its chunks fit a page."""
PRESERVE_BYTES = 256 * 1024 * 1024
RECOVERY_BYTES = 4 * 1024 * 1024 * 1024
PAGE = 5_000
PAGE_BYTES = 512 * 1024
NAMED = 1_000
IMAGE_ENTRIES = 2_000_000
LIST_ENTRIES = 10_000
GREP_FILE_BYTES = 8 * 1024 * 1024
GREP_LINE_BYTES = 1000
GREP_CONTEXT = 20
GLOBS = 100
"""Patterns that one with braces stands for."""
SIEVED = 4000
"""Files that a sieve gets at once."""
IGNORE_BYTES = 64 * 1024
"""So much of a .gitignore is read."""
KINDS = ("file", "directory", "symlink", "other")
DEPTH = 256
PATH_BYTES = 4096
LINKS = 40
NONCE = 128
"""Characters of one."""
GONE_S = 10.0
"""How long what was killed may take to be gone."""
LOCK_S = 10.0
GLANCE_S = 3.0
"""Between two looks whether the state directory is still there, and what ended commands left writing."""
WRITING_S = 0.25
"""The same while an output grows whose command has ended, or may."""
LEFT_BYTES = 1024 * 1024
"""So much may be written to a command's output after its end, before it is cut back to what it was then."""
JOURNAL_BYTES = 256 * 1024
JOURNAL_MARGIN = 16 * 1024
"""Room that a start leaves in the journal, so that its exit and an undo can be recorded on a full disk."""
SLICE_S = 0.005
"""A request works for so long before others have their turn."""
SHIM_RUNS = 1000
IDLE_SHIMS = 2
SIGNALLED = 100
"""Processes that are signalled at once."""
RACY_NS = 100_000_000
"""A file changed so shortly before it was hashed may change again without its times showing it."""
TAG = "PERDURE_SPACE"
"""Environment variable of every command: ``space/exec``, of those it runs inside of too."""

Json = dict[str, Any]  # what a peer or a file said: checked field by field where it is used
Key = tuple[str, int, int, str, int]
"""log, call, attempt, nonce, ordinal"""


class Fail(Exception):
    """A refusal, told to the client as it is. Its text holds paths and numbers, never contents or secrets."""

    def __init__(self, code: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.more = more


def fail_of(error: OSError, path: bytes | None = None) -> Fail:
    """The refusal that a system error means."""
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    about = {} if path is None else {"path": text_of(path)}
    text = f"{error.strerror or name}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Fail("no_space", f"the disk is full ({text}); free some and try again", errno=name, **about)
    codes = {
        errno.ENOENT: "not_found",
        errno.ENOTDIR: "not_a_directory",
        errno.EISDIR: "is_a_directory",
        errno.ENOTEMPTY: "not_empty",
        errno.EACCES: "permission_denied",
        errno.EPERM: "permission_denied",
        errno.EROFS: "permission_denied",
        errno.ENXIO: "special_file",
    }
    return Fail(codes.get(error.errno or 0, "io_error"), text, errno=name, **about)


# --- names, paths, numbers --------------------------------------------------------------------------------------


def text_of(raw: bytes) -> str | dict[str, str]:
    """A path or link target as JSON."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(raw).decode("ascii")}


def raw_of(value: object, name: str) -> bytes:
    """The inverse of text_of."""
    if isinstance(value, str):
        try:
            raw = value.encode("utf-8")
        except UnicodeEncodeError:
            raise Fail("bad_request", f"{name} is not valid Unicode; send its bytes as b64") from None
    elif isinstance(value, dict):
        encoded = cast(Json, value).get("b64")
        if not isinstance(encoded, str) or len(cast(Json, value)) != 1:
            raise Fail("bad_request", f"{name} must be a string or {{b64: string}}")
        try:
            raw = base64.b64decode(encoded, validate=True)
        except ValueError:
            raise Fail("bad_request", f"{name}: b64 is not base64") from None
    else:
        raise Fail("bad_request", f"{name} must be a string or {{b64: string}}")
    if b"\0" in raw:
        raise Fail("bad_request", f"{name} contains a NUL byte")
    if len(raw) > PATH_BYTES:
        raise Fail("too_large", f"{name} has {len(raw)} bytes", limit=PATH_BYTES)
    return raw


def object_of(value: object, name: str) -> Json:
    if not isinstance(value, dict):
        raise Fail("bad_request", f"{name} must be an object")
    return cast(Json, value)


def array_of(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise Fail("bad_request", f"{name} must be an array")
    return cast("list[Any]", value)


def json_array(body: bytes) -> list[Any]:
    try:
        return array_of(json.loads(body), "the body")
    except (ValueError, RecursionError):
        raise Fail("bad_request", "the body must be a JSON array") from None


def compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def read_small(path: str, limit: int = 65536) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, limit)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def replace_file(name: str, data: bytes, dir_fd: int) -> None:
    """Replace a file of the state directory, atomically and synced."""
    temporary = f"{name}.new"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=dir_fd)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    os.fsync(dir_fd)


def sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def now_ms() -> int:
    return int(time.time() * 1000)


def boot_id() -> str:
    return read_small("/proc/sys/kernel/random/boot_id").decode("ascii").strip()


def pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def start_ticks(pid: int) -> int | None:
    """When a process began, in ticks after boot; with its pid its identity. None if it is gone or a zombie."""
    try:
        text = read_small(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def is_stopped(pid: int) -> bool:
    try:
        text = read_small(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text[text.rindex(b")") + 2 :][:1] == b"T"


def send_signal(pid: int, ticks: int | None, number: int) -> bool:
    """Signal the process that began at ``ticks``: by pidfd, and its identity is checked once that is open. False if it
    is gone (``ticks`` None: it was when it was looked at), or this user may not."""
    if ticks is None:
        return False
    with contextlib.suppress(ProcessLookupError, PermissionError):
        handle = os.pidfd_open(pid)
        try:
            if start_ticks(pid) == ticks:
                signal.pidfd_send_signal(handle, number)
                return True
        finally:
            os.close(handle)
    return False


_libc = ctypes.CDLL(None, use_errno=True)


def sync_filesystem(fd: int) -> None:
    """Flush the file system that fd is on: one flush, whatever the number of files."""
    if _libc.syncfs(fd) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


# --- the ledger -------------------------------------------------------------------------------------------------


class Command:
    """What the journal knows of one exec key. Mutable: each record of the journal changes it."""

    __slots__ = (
        "at", "boot", "cgroup", "cut", "digest", "epoch", "exit", "id", "key", "lasting", "namespace", "pid", "stop",
        "ticks", "void",
    )  # fmt: skip

    def __init__(self, exec_id: str, key: Key) -> None:
        self.id = exec_id
        self.key = key
        self.void = False
        self.cut = False
        self.epoch = 0
        self.pid = 0
        self.ticks = 0
        self.boot = ""
        self.namespace = 0
        self.digest = ""
        self.at = 0
        self.lasting = False
        self.cgroup: str | None = None
        self.stop: str | None = None
        self.exit: Json | None = None

    @property
    def place(self) -> tuple[int, int]:
        return self.key[1], self.key[2]

    def records(self) -> list[Json]:
        """The records that would make this command anew."""
        if self.void:
            return [{"t": "void", "x": self.id, "key": self.key}]
        fields = ("epoch", "pid", "ticks", "boot", "namespace", "digest", "at", "cgroup")
        found: list[Json] = [{"t": "started", "x": self.id, "key": self.key, **{f: getattr(self, f) for f in fields}}]
        if self.lasting:
            found[0]["lasting"] = True
        if self.cut:
            found.append({"t": "cut", "x": [self.id]})
        if self.stop is not None:
            found.append({"t": "stop", "x": self.id, "cause": self.stop})
        if self.exit is not None:
            found.append({"t": "exit", "x": self.id, **self.exit})
        return found


@functools.lru_cache(maxsize=1024)
def exec_id(key: Key) -> str:
    return sha256(compact(key))[:32]


def key_json(key: Key) -> Json:
    return {"call": key[1], "attempt": key[2], "nonce": key[3], "ordinal": key[4]}


class Ledger:
    """The state the journal's records add up to. Pure: no I/O."""

    def __init__(self) -> None:
        self.fence: Json | None = None
        self.floor: tuple[int, int] | None = None
        self.image: Json | None = None
        self.commands: dict[str, Command] = {}

    def apply(self, record: Json) -> None:
        kind = record["t"]
        if kind == "fence":
            if self.fence is not None and self.fence["log"] != record["log"]:
                self.floor = None
            self.fence = {name: record[name] for name in ("log", "epoch", "writer", "connection")}
            for kept in record["keep"]:
                if kept in self.commands:
                    self.commands[kept].epoch = max(self.commands[kept].epoch, record["epoch"])
        elif kind == "floor":
            place = (record["at"][0], record["at"][1])
            self.floor = place if self.floor is None else max(self.floor, place)
        elif kind == "image":
            image = record["image"]
            self.image = None if image is None else {"nonce": "", **image}  # records of old have none
        elif kind == "started":
            command = self._made(record)
            for name in ("epoch", "pid", "ticks", "boot", "namespace", "digest", "at", "cgroup"):
                setattr(command, name, record[name])
            command.lasting = record.get("lasting", False)
        elif kind == "void":
            self._made(record).void = True
        elif kind == "drop":
            for dropped in record["x"]:
                self.commands.pop(dropped, None)
        elif kind == "cut":
            for cut in record["x"]:
                if cut in self.commands:
                    self.commands[cut].cut = True
        elif record["x"] in self.commands:
            command = self.commands[record["x"]]
            if kind == "stop":
                command.stop = record["cause"]
            elif kind == "exit" and not command.cut:
                command.exit = {name: value for name, value in record.items() if name not in ("t", "x")}

    def _made(self, record: Json) -> Command:
        made = Command(record["x"], tuple(record["key"]))
        self.commands[made.id] = made
        return made

    def records(self) -> Iterator[Json]:
        """A minimal history that adds up to the present state."""
        if self.fence is not None:
            yield {"t": "fence", "keep": [], **self.fence}
        if self.floor is not None:
            yield {"t": "floor", "at": self.floor}
        yield {"t": "image", "image": self.image}
        for command in self.commands.values():
            yield from command.records()

    def lasts(self, key: Key) -> bool:
        """Whether it may be read and killed below the floor, too (rule S42)."""
        command = self.commands.get(exec_id(key))
        return command is not None and command.lasting and self.fence is not None and key[0] == self.fence["log"]

    def below_floor(self, key: Key) -> bool:
        """Undone, forgotten, or of a log that is not the fence's."""
        if self.fence is None or key[0] != self.fence["log"]:
            return True
        return self.floor is not None and (key[1], key[2]) < self.floor


class Journal:
    """One file of checksummed lines, shared by daemon and shims under a lock, written ahead with zeros.

    A line is the records of one step: it counts whole or not at all. Zeros follow the last line, so that an append
    neither grows the file nor needs room on the disk. Every append is flushed before the lock is let go. A torn
    last line is what a killed writer left; it never counted. Anything behind a line that does not count is damage.
    """

    NAME = "journal"

    def __init__(self, state_fd: int, ledger: Ledger) -> None:
        self.state_fd = state_fd
        self.ledger = ledger
        self.fd = -1
        self.inode = 0
        self.size = 0
        self.position = 0
        self.flushed = 0
        """Up to here it is known to be on disk; a killed writer may have left a line it did not flush."""
        self.broken = False
        self.lock_fd = os.open(
            "ledger.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=state_fd
        )

    def create(self) -> None:
        """Make the file if there is none. Only the daemon does, before anything else uses it."""
        try:
            os.stat(self.NAME, dir_fd=self.state_fd)
        except FileNotFoundError:
            self._write_anew()

    @contextlib.contextmanager
    def locked(self, seconds: float = LOCK_S) -> Generator[None, None, None]:
        """Hold the lock, with all that others wrote applied."""
        deadline = time.monotonic() + seconds
        pause = 0.0005
        while True:
            try:
                fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Fail("busy", f"the ledger is locked by another process for {seconds:g} s") from None
                time.sleep(pause)
                pause = min(pause * 2, 0.01)
        try:
            self._catch_up()
            yield
        finally:
            fcntl.flock(self.lock_fd, fcntl.LOCK_UN)

    def append(self, records: Sequence[Json]) -> None:
        """Add records as one step, flushed. Under the lock."""
        if self.broken:
            raise Fail("io_error", "the journal could not be flushed; restart the daemon", errno="EIO")
        line = _line(records)
        try:
            written = os.pwrite(self.fd, line, self.position)
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            if self.position + len(line) > self.size:
                os.ftruncate(self.fd, max(self.size, self.position))
            self._blank(self.position, min(len(line), max(0, self.size - self.position)))
            raise
        try:
            os.fdatasync(self.fd)
        except OSError:
            self.broken = True
            raise
        self.position += len(line)
        self.size = max(self.size, self.position)
        self.flushed = self.position
        for record in records:
            self.ledger.apply(record)

    def confirm(self) -> None:
        """Flush what others wrote, unless it is known to be flushed. Under the lock."""
        if self.flushed < self.position:
            os.fdatasync(self.fd)
            self.flushed = self.position

    def make_room(self) -> None:
        """Write the file anew when it is mostly history. Under the lock, by the daemon only."""
        if self.position + 4 * JOURNAL_MARGIN > self.size:
            try:
                self._write_anew()
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{self.NAME}.new", dir_fd=self.state_fd)

    @property
    def room(self) -> int:
        return self.size - self.position

    def _write_anew(self) -> None:
        lines = b"".join(_line([record]) for record in self.ledger.records())
        size = max(JOURNAL_BYTES, -(-4 * len(lines) // JOURNAL_BYTES) * JOURNAL_BYTES)
        replace_file(self.NAME, lines + bytes(size - len(lines)), self.state_fd)
        self._open()
        self.position = self.flushed = len(lines)

    def _open(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = os.open(self.NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self.state_fd)
        found = os.fstat(self.fd)
        self.inode, self.size, self.position, self.flushed = found.st_ino, found.st_size, 0, 0

    def _catch_up(self) -> None:
        if self.fd < 0 or os.stat(self.NAME, dir_fd=self.state_fd).st_ino != self.inode:
            self._open()
            fresh = Ledger()
            self.ledger.__dict__.update(fresh.__dict__)
        while True:
            block = os.pread(self.fd, 2048, self.position)
            if not block or block[0] == 0:
                return
            end = block.find(b"\n")
            while end < 0 and b"\0" not in block:
                more = os.pread(self.fd, 65536, self.position + len(block))
                if not more:
                    break
                block += more
                end = block.find(b"\n")
            used = 0
            while end >= 0:
                records = _records(block[used : end + 1])
                if records is None:
                    break
                for record in records:
                    self.ledger.apply(record)
                used = end + 1
                end = block.find(b"\n", used)
            self.position += used
            self.size = max(self.size, self.position)
            if used == 0:
                self._cut_torn()
                return

    def _cut_torn(self) -> None:
        rest = b""
        while True:
            block = os.pread(self.fd, 1 << 20, self.position + len(rest))
            if not block:
                break
            rest += block
        rest = rest.rstrip(b"\0")
        for line in rest.split(b"\n")[1:]:
            if _records(line.lstrip(b"\0") + b"\n") is not None:
                raise Fail(
                    "internal", f"the journal is damaged at byte {self.position}: valid lines follow an invalid one"
                )
        self._blank(self.position, len(rest))

    def _blank(self, start: int, length: int) -> None:
        if length > 0:
            with contextlib.suppress(OSError):
                os.pwrite(self.fd, bytes(length), start)


def _line(records: Sequence[Json]) -> bytes:
    payload = compact(records)
    return b"%08x %s\n" % (zlib.crc32(payload), payload)


def _records(line: bytes) -> list[Json] | None:
    if len(line) < 11 or line[8:9] != b" " or not line.endswith(b"\n"):
        return None
    payload = line[9:-1]
    if b"%08x" % zlib.crc32(payload) != line[:8]:
        return None
    return json.loads(payload)


# --- containment ------------------------------------------------------------------------------------------------


class Cgroup:
    """One cgroup of one command. ``version`` 2 or 1 (freezer). Commands may make groups below it."""

    def __init__(self, path: str, version: int) -> None:
        self.path = path
        self.version = version

    def make(self) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path)

    def _put(self, name: str, value: bytes, path: str | None = None) -> None:
        with self._there():
            fd = os.open(f"{path or self.path}/{name}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, value)
            finally:
                os.close(fd)

    def _read(self, name: str) -> bytes:
        with self._there():
            return read_small(f"{self.path}/{name}")

    @staticmethod
    @contextlib.contextmanager
    def _there() -> Generator[None, None, None]:
        """A file that was open as its group was removed is as gone as one that cannot be opened any more."""
        try:
            yield
        except OSError as error:
            if error.errno == errno.ENODEV:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from error
            raise

    def enter(self) -> None:
        """Move the calling process here."""
        self._put("cgroup.procs", b"0")

    def groups(self) -> list[str]:
        """It and those below it, deepest first."""
        return [path for path, _, _ in os.walk(self.path, topdown=False)]

    def pids(self) -> list[int]:
        found: list[int] = []
        for path in self.groups():
            with contextlib.suppress(FileNotFoundError, OSError):
                found += [int(pid) for pid in read_small(f"{path}/cgroup.procs", 1 << 20).split()]
        return found

    def freeze(self, frozen: bool) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self.version == 2:
                self._put("cgroup.freeze", b"1" if frozen else b"0")
            else:
                self._put("freezer.state", b"FROZEN" if frozen else b"THAWED")

    def is_frozen(self) -> bool:
        try:
            if self.version == 2:
                return b"frozen 1" in self._read("cgroup.events") or not self.pids()
            return self._read("freezer.state").strip() == b"FROZEN"
        except FileNotFoundError:
            return True

    def kill(self) -> None:
        """SIGKILL to all of it, what comes of its forks included. It may take a moment until they are gone."""
        try:
            self._put("cgroup.kill", b"1")
        except FileNotFoundError:  # version 1, or a kernel before 5.14
            self.freeze(True)
            pids = self.pids()
            for first in range(0, len(pids), SIGNALLED):
                self._signal(pids[first : first + SIGNALLED], signal.SIGKILL)
        self.freeze(False)

    def _signal(self, pids: Sequence[int], number: int) -> None:
        """Those that are here once their pidfds are open: a number may be another process's by then."""
        handles: dict[int, int] = {}
        try:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    handles[pid] = os.pidfd_open(pid)
            here = set(self.pids())
            for pid, handle in handles.items():
                if pid in here:
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(handle, number)
        finally:
            for handle in handles.values():
                os.close(handle)

    def remove(self) -> bool:
        """Remove it if nothing lives in it. True: it is gone."""
        try:
            os.rmdir(self.path)
            return True
        except FileNotFoundError:
            return True
        except OSError:
            pass
        try:
            for path in self.groups():
                os.rmdir(path)
            return True
        except FileNotFoundError:
            return not os.path.exists(self.path)
        except OSError:
            return False


def own_cgroups() -> list[tuple[int, str]]:
    """Where the calling process is: (version, directory) of every hierarchy that can freeze."""
    mounts: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for line in read_small("/proc/self/mountinfo", 1 << 20).decode("utf-8", "surrogateescape").splitlines():
            left, _, right = line.partition(" - ")
            kind, _, rest = right.partition(" ")
            if kind == "cgroup2":
                mounts.setdefault(2, left.split()[4])
            elif kind == "cgroup" and "freezer" in rest.split()[-1].split(","):
                mounts.setdefault(1, left.split()[4])
    found: list[tuple[int, str]] = []
    with contextlib.suppress(OSError):
        for line in read_small("/proc/self/cgroup").decode("utf-8", "surrogateescape").splitlines():
            number, controllers, path = line.split(":", 2)
            version = 2 if number == "0" else 1 if "freezer" in controllers.split(",") else 0
            if version in mounts:
                found.append((version, mounts[version] + path.rstrip("/")))
    return sorted(found, reverse=True)


def probe_cgroups(wanted: str, name: str) -> tuple[int, str, str]:
    """(version, base, home) of the first hierarchy that works; version 0 if none does.

    It works if a process can be moved into a new group and back, and the group can be frozen and thawed.
    """
    for version, home in own_cgroups():
        if wanted not in ("auto", f"cgroup{version}"):
            continue
        base = Cgroup(f"{home}/{name}", version)
        trial = Cgroup(f"{base.path}/probe-{os.getpid()}", version)
        try:
            base.make()
            trial.make()
            pid = os.fork()
            if pid == 0:
                try:
                    trial.enter()
                    Cgroup(home, version).enter()
                    os._exit(0)
                except BaseException:
                    os._exit(1)
            if os.waitpid(pid, 0)[1] == 0:
                trial.freeze(True)
                trial.freeze(False)
                trial.remove()
                return version, base.path, home
        except OSError:
            pass
        trial.remove()
        with contextlib.suppress(OSError):
            os.rmdir(base.path)
    return 0, "", ""


class Process:
    """A process seen in /proc: enough to tell it from a later one."""

    __slots__ = ("group", "parent", "pid", "state", "ticks")

    def __init__(self, pid: int, parent: int, group: int, state: str, ticks: int) -> None:
        self.pid = pid
        self.parent = parent
        self.group = group
        self.state = state
        self.ticks = ticks


class Living(NamedTuple):
    """A process in the Space."""

    command: str | None
    """None: nobody can tell."""
    pid: int
    ticks: int | None
    """None: it is in the group of its command, and signalled with that; else its identity."""

    def send(self, number: int) -> None:
        send_signal(self.pid, self.ticks, number)


def read_process(pid: int) -> Process | None:
    try:
        text = read_small(f"/proc/{pid}/stat")
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    if fields[0] in (b"Z", b"X"):
        return None
    return Process(pid, int(fields[1]), int(fields[2]), fields[0].decode("ascii"), int(fields[19]))


def all_processes() -> dict[int, Process]:
    found: dict[int, Process] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            process = read_process(int(name))
            if process is not None:
                found[process.pid] = process
    return found


def tags_of(pid: int) -> list[str]:
    """The tags a process carries in its environment."""
    try:
        environ = read_small(f"/proc/{pid}/environ", 1 << 20)
    except OSError:
        return []
    prefix = f"{TAG}=".encode("ascii")
    for variable in environ.split(b"\0"):
        if variable.startswith(prefix):
            return variable[len(prefix) :].decode("ascii", "replace").split()
    return []


def descendants(root: int, processes: dict[int, Process]) -> set[int]:
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    queue = [root]
    while queue:
        for pid in children.get(queue.pop(), ()):
            if pid not in found:
                found.add(pid)
                queue.append(pid)
    return found


def children_of(pid: int) -> list[int]:
    """Its children by the kernel's own list, all threads. Raises OSError where the kernel has none."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return found
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):
            found += [int(child) for child in read_small(f"/proc/{pid}/task/{thread}/children", 1 << 20).split()]
    return found


def tagged_processes(space: str, exec_tag: str | None) -> list[Process]:
    """Every process that carries a tag of this space (of one command, if given), and all below any of them."""
    processes = all_processes()
    prefix = f"{space}/"
    chosen: set[int] = set()
    for pid in processes:
        tags = tags_of(pid)
        if (f"{prefix}{exec_tag}" in tags) if exec_tag else any(tag.startswith(prefix) for tag in tags):
            chosen.add(pid)
            chosen |= descendants(pid, processes)
    chosen.discard(os.getpid())
    return [processes[pid] for pid in chosen]


# --- shims ------------------------------------------------------------------------------------------------------


class Setting:
    """What zygote and shims need to know; fixed before they are forked."""

    def __init__(
        self, workspace: str, state: str, space: str, version: int, base: str, home: str, testing: bool
    ) -> None:
        self.workspace = workspace
        self.state = state
        self.space = space
        self.version = version
        self.base = base
        self.home = home
        self.testing = testing


def send_message(channel: socket.socket, message: Json) -> None:
    data = compact(message)
    channel.sendall(struct.pack("!I", len(data)) + data)


def receive_message(channel: socket.socket) -> Json | None:
    """The next message; None at the end. Blocks."""
    head = _receive(channel, 4)
    if head is None:
        return None
    data = _receive(channel, struct.unpack("!I", head)[0])
    return None if data is None else json.loads(data)


def _receive(channel: socket.socket, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        try:
            block = channel.recv(size - len(data))
        except ConnectionError:
            return None
        if not block:
            return None
        data += block
    return data


def zygote_main(channel: socket.socket, setting: Setting) -> NoReturn:
    """Fork a shim for every descriptor that comes, until the daemon is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # shims, and orphans that come to us, need no reaping
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans of commands stay below the zygote
    gc.collect()
    gc.freeze()
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(channel, 16, 1)
        except OSError:
            os._exit(1)
        if not data or not descriptors:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                shim_main(descriptors[0], setting)
                code = 0
            finally:
                os._exit(code)
        os.close(descriptors[0])
        channel.send(struct.pack("!I", pid))


def keep_only(descriptor: int) -> None:
    """Close every descriptor but this one, which no command inherits; 0 to 2 become /dev/null."""
    os.set_inheritable(descriptor, False)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != descriptor:
            with contextlib.suppress(OSError):
                os.close(int(name))
    null = os.open("/dev/null", os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.close(null)


def shim_main(descriptor: int, setting: Setting) -> None:
    """Run the commands the daemon sends, one at a time. It ends when it has none and the daemon is gone."""
    keep_only(descriptor)
    os.setsid()
    os.chdir("/")
    os.umask(0o022)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    channel = socket.socket(fileno=descriptor)
    shim = Shim(channel, setting)
    for _ in range(SHIM_RUNS):
        job = receive_message(channel)
        if job is None:
            return
        answer: Json
        if "look" in job:
            try:
                answer = {"found": look_through(setting.workspace, job["look"])}
            except Fail as fail:
                answer = {"fail": [fail.code, fail.message, fail.more]}
            except OSError as error:
                fail = fail_of(error)
                answer = {"fail": [fail.code, fail.message, fail.more]}
        else:
            answer = shim.run(job)
        try:
            send_message(channel, answer)
        except OSError:
            return


class Shim:
    """Runs commands: record started, run, record exit."""

    def __init__(self, channel: socket.socket, setting: Setting) -> None:
        self.channel = channel
        self.setting = setting
        self.job: Json = {}
        self.id = ""
        self.state_fd = os.open(setting.state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.ledger = Ledger()
        self.journal = Journal(self.state_fd, self.ledger)
        self.resolver = Resolver(setting.workspace)
        self.boot = boot_id()
        self.environment = dict(os.environ)
        self.identity = {
            "pid": os.getpid(),
            "ticks": start_ticks(os.getpid()),
            "boot": self.boot,
            "namespace": pid_namespace(),
        }

    def run(self, job: Json) -> Json:
        self.job = job
        self.id = job["x"]
        try:
            return self._run()
        finally:
            os.chdir("/")

    def _run(self) -> Json:
        self.point("shim.before_started")
        if self.journal.fd < 0:
            self._adopt_knowledge()
        cgroup = self._cgroup()
        try:
            output = self._record_started(cgroup)
        except Fail as fail:
            return {"refused": [fail.code, fail.message, fail.more]}
        except OSError as error:
            fail = fail_of(error)
            return {"refused": [fail.code, fail.message, fail.more]}
        self.point("shim.started")
        begun = time.monotonic()
        pid = 0
        end: Json
        try:
            pid = self._spawn(output, cgroup)
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, str(error.errno))
            end = {"cause": "not_started", "errno": name, "reason": os.strerror(error.errno or 0)}
            self._tell({"started": self._flushed(), "pid": 0})
        else:
            self._tell({"started": self._flushed(), "pid": pid})
            self.point("shim.running")
            end = self._wait(pid, output, cgroup, begun)
        end["ms"] = int((time.monotonic() - begun) * 1000)
        end["size"] = os.fstat(output).st_size
        os.close(output)
        self.point("shim.before_exit")
        self._record_exit(end)
        self.point("shim.exit")
        left = False if cgroup is None else not cgroup.remove()
        return {"exit": self._flushed(), "left": left}

    def _flushed(self) -> list[int]:
        return [self.journal.inode, self.journal.position]

    def _tell(self, message: Json) -> None:
        with contextlib.suppress(OSError):  # the daemon is gone; the next one reads the ledger
            send_message(self.channel, message)

    def point(self, name: str) -> None:
        action = self.job["armed"].get(name) if self.setting.testing else None
        if action is not None:
            if action == "hold":
                self._tell({"held": name})
            os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)

    def _adopt_knowledge(self) -> None:
        """What the daemon knew of the journal up to a position, so that only what follows has to be read."""
        self.journal._open()  # pyright: ignore[reportPrivateUsage]
        if self.journal.inode == self.job["inode"]:
            self.journal.position = self.journal.flushed = self.job["position"]
            self.ledger.fence = self.job["fence"]
            self.ledger.floor = None if self.job["floor"] is None else (self.job["floor"][0], self.job["floor"][1])

    def _cgroup(self) -> Cgroup | None:
        return Cgroup(f"{self.setting.base}/{self.id}", self.setting.version) if self.setting.version else None

    def _record_started(self, cgroup: Cgroup | None) -> int:
        """Check and record under one lock (rule S13)."""
        job, ledger = self.job, self.ledger
        key: Key = tuple(job["key"])
        with self.journal.locked():
            fence = ledger.fence
            if fence is None or [fence["log"], fence["epoch"], fence["connection"]] != job["fenced"]:
                raise Fail("stale_epoch", "a newer driver has the Space", fence=fence)
            if ledger.below_floor(key):
                raise Fail("below_floor", "this call was undone or forgotten")
            if self.id in ledger.commands:
                if ledger.commands[self.id].void:
                    raise Fail("void", "this key was voided")
                raise Fail("conflict", "this key has been started")
            if self.journal.room < JOURNAL_MARGIN:
                raise Fail("no_space", "the disk is full; free some and try again")
            output = os.open(
                f"outputs/{self.id}",
                os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW,
                0o600,
                dir_fd=self.state_fd,
            )
            try:
                self.journal.append(
                    [
                        {
                            "t": "started",
                            "x": self.id,
                            "key": key,
                            "epoch": fence["epoch"],
                            **self.identity,
                            "digest": job["digest"],
                            "at": now_ms(),
                            "cgroup": None if cgroup is None else cgroup.path,
                            **({"lasting": True} if job["lasting"] else {}),
                        }
                    ]
                )
            except BaseException:
                os.unlink(f"outputs/{self.id}", dir_fd=self.state_fd)
                os.close(output)
                raise
        return output

    def _record_exit(self, end: Json) -> None:
        """A cut-off that came first stands; a stop that was asked for names the cause (rules S15, S16)."""
        deadline = time.monotonic() + 60
        while True:
            try:
                with self.journal.locked(60):
                    command = self.ledger.commands.get(self.id)
                    if command is None or command.cut:
                        return
                    if command.stop is not None and end["cause"] == "exit":
                        end["cause"] = command.stop
                    self.journal.append([{"t": "exit", "x": self.id, "boot": self.boot, **end}])
                    return
            except (OSError, Fail):
                if time.monotonic() > deadline:
                    os._exit(1)  # no exit on record: its outcome is unknown, which is the truth
                time.sleep(0.1)

    def _spawn(self, output: int, cgroup: Cgroup | None) -> int:
        job = self.job
        try:
            self.resolver.renew()
            with self.resolver.directory(raw_of(job["cwd"], "cwd")) as directory:
                os.fchdir(directory)
        except Fail as fail:
            numbers = {"not_found": errno.ENOENT, "not_a_directory": errno.ENOTDIR, "outside_workspace": errno.EXDEV}
            raise OSError(numbers.get(fail.code, errno.EACCES), "cwd") from None
        environment = dict(self.environment)
        for name, value in job["env"].items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value
        environment[TAG] = " ".join([*self.environment.get(TAG, "").split()[-15:], f"{self.setting.space}/{self.id}"])
        argv: list[str] = job["argv"]
        program = find_program(argv[0], environment.get("PATH", os.defpath))
        if cgroup is not None:
            cgroup.make()
        if not job["limits"]:
            with contextlib.suppress(NotImplementedError):  # a libc without POSIX_SPAWN_SETSID
                return self._posix_spawn(program, argv, environment, output, cgroup)
        return self._fork(program, argv, environment, output, cgroup)

    def _posix_spawn(
        self, program: str, argv: list[str], environment: dict[str, str], output: int, cgroup: Cgroup | None
    ) -> int:
        """The cheap way: the child shares the shim's memory until it has its own program."""
        if cgroup is not None:
            cgroup.enter()
        try:
            return os.posix_spawn(
                program,
                argv,
                environment,
                file_actions=[(os.POSIX_SPAWN_DUP2, output, 1), (os.POSIX_SPAWN_DUP2, output, 2)],
                setsid=True,
                setsigmask=[],
                setsigdef=_DEFAULTED,
            )
        finally:
            if cgroup is not None:
                Cgroup(self.setting.home, self.setting.version).enter()

    def _fork(
        self, program: str, argv: list[str], environment: dict[str, str], output: int, cgroup: Cgroup | None
    ) -> int:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                if cgroup is not None:
                    cgroup.enter()
                for number in _DEFAULTED:
                    signal.signal(number, signal.SIG_DFL)
                os.dup2(output, 1)
                os.dup2(output, 2)
                limits: dict[str, int] = self.job["limits"]
                for name, which in _RLIMITS.items():
                    if name in limits:
                        hard = resource.getrlimit(which)[1]
                        value = limits[name] if hard == resource.RLIM_INFINITY else min(limits[name], hard)
                        resource.setrlimit(which, (value, value))
                os.execve(program, argv, environment)  # noqa: S606
            except OSError as error:
                os.write(writer, struct.pack("!I", error.errno or errno.EIO))
            finally:
                os._exit(127)
        os.close(writer)
        failed = os.read(reader, 4)
        os.close(reader)
        if failed:
            os.waitpid(pid, 0)
            number = struct.unpack("!I", failed)[0]
            raise OSError(number, os.strerror(number))
        return pid

    def _wait(self, pid: int, output: int, cgroup: Cgroup | None, begun: float) -> Json:
        """Until the command itself has ended; what it left does not count."""
        handle = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        timeout_ms: int | None = self.job["timeout_ms"]
        deadline = None if timeout_ms is None else begun + timeout_ms / 1000
        largest: int = self.job["output_bytes"]
        look = 0.05
        cause = "exit"
        while True:
            now = time.monotonic()
            if cause == "exit" and deadline is not None and now >= deadline:
                cause = "timeout"
            if cause == "exit" and os.fstat(output).st_size > largest:
                cause = "output_limit"
            if cause != "exit":
                self._kill(pid, cgroup)
            pause = look if deadline is None else min(look, max(0.001, deadline - now))
            if poll.poll(pause * 1000):
                break
            look = min(look * 1.5, 0.2)
        os.close(handle)
        if cause != "exit":
            self._kill(pid, cgroup)
            stop = time.monotonic() + GONE_S
            while self._remains(cgroup) and time.monotonic() < stop:
                self._kill(pid, cgroup)
                time.sleep(0.002)
        status = os.waitpid(pid, 0)[1]  # not before: until then the number of its group is nobody else's
        if cause == "output_limit":
            os.ftruncate(output, largest)  # it wrote on until it was seen
        if os.WIFSIGNALED(status):
            return {"cause": cause, "signal": os.WTERMSIG(status)}
        return {"cause": cause, "code": os.WEXITSTATUS(status)}

    def _kill(self, pid: int, cgroup: Cgroup | None) -> None:
        if cgroup is not None:
            cgroup.kill()
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        for process in tagged_processes(self.setting.space, self.id):
            send_signal(process.pid, process.ticks, signal.SIGKILL)

    def _remains(self, cgroup: Cgroup | None) -> bool:
        return bool(cgroup.pids() if cgroup is not None else tagged_processes(self.setting.space, self.id))


_DEFAULTED = [
    signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGQUIT, signal.SIGTERM, signal.SIGXFSZ,
    signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU,
]  # fmt: skip
_RLIMITS = {
    "file_bytes": resource.RLIMIT_FSIZE,
    "open_files": resource.RLIMIT_NOFILE,
    "cpu_s": resource.RLIMIT_CPU,
    "address_bytes": resource.RLIMIT_AS,
}


def find_program(name: str, path: str) -> str:
    """Where execvp would find it, in the command's own PATH."""
    if "/" in name:
        return name
    denied = False
    for folder in path.split(os.pathsep):
        candidate = os.path.join(folder or ".", name)
        if os.path.isfile(candidate):
            if os.access(candidate, os.X_OK):
                return candidate
            denied = True
    raise OSError(errno.EACCES if denied else errno.ENOENT, name)


# --- the workspace ----------------------------------------------------------------------------------------------


def kind_of(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "symlink" if stat.S_ISLNK(mode) else "other"


def lock_workspace(descriptor: int) -> None:
    """Raises BlockingIOError if another daemon has it (rule S2)."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass  # a file system without locks: the state directory's has to do


class Resolver:
    """Finds paths below one directory, name by name, so that none leads out of it, whoever changes it meanwhile."""

    def __init__(self, workspace: str) -> None:
        self.root = os.open(workspace, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.prefix = os.fsencode(os.path.realpath(workspace)).rstrip(b"/")

    def close(self) -> None:
        os.close(self.root)

    def renew(self, lock: bool = False) -> bool:
        """Take the directory that the path names now, if it is another one; False: it names none (rule S39).

        ``lock``: take its lock as well. Raises BlockingIOError if another daemon has it.
        """
        try:
            now = os.open(self.prefix, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            if not os.path.samestat(os.fstat(now), os.fstat(self.root)):
                if lock:
                    lock_workspace(now)
                os.dup2(now, self.root, inheritable=False)
        finally:
            os.close(now)
        return True

    def _walk(self, path: bytes, follow: bool, opened: list[int]) -> bytes:
        """Open the directories on the way into ``opened``; the last name, or b"." for the last of ``opened``."""
        if path.startswith(b"/"):
            raise self._outside(path)
        pending = path.split(b"/")[::-1]
        links = 0
        while pending:
            part = pending.pop()
            if part in (b"", b"."):
                continue
            here = opened[-1] if opened else self.root
            if part == b"..":
                if not opened:
                    raise self._outside(path)
                os.close(opened.pop())
                continue
            last = not pending
            if last and not follow:
                return part
            if not last:
                try:
                    opened.append(os.open(part, _THROUGH, dir_fd=here))
                    continue
                except OSError as error:
                    if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                        raise
            try:
                target = os.readlink(part, dir_fd=here)
            except OSError as error:
                if last and error.errno in (errno.EINVAL, errno.ENOENT):
                    return part
                if error.errno != errno.EINVAL:
                    raise
                raise fail_of(OSError(errno.ENOTDIR, "not a directory"), path) from None
            links += 1
            if links > LINKS:
                raise Fail(
                    "io_error", f"goes through more than {LINKS} symbolic links", path=text_of(path), errno="ELOOP"
                )
            if target.startswith(b"/"):
                if target != self.prefix and not target.startswith(self.prefix + b"/"):
                    raise self._outside(path)
                while opened:
                    os.close(opened.pop())
                target = target[len(self.prefix) :]
            pending.extend(target.split(b"/")[::-1])
        return b"."

    def _outside(self, path: bytes) -> Fail:
        return Fail("outside_workspace", "the path leads out of the workspace", path=text_of(path))

    @contextlib.contextmanager
    def parent(self, path: bytes, follow: bool = True) -> Generator[tuple[int, bytes], None, None]:
        """The directory a path's last name is in, and that name; b"." for the workspace itself."""
        opened: list[int] = []
        try:
            name = self._walk(path, follow, opened)
            yield (opened[-1] if opened else self.root), name
        except OSError as error:
            raise fail_of(error, path) from None
        finally:
            for descriptor in opened:
                os.close(descriptor)

    @contextlib.contextmanager
    def directory(self, path: bytes) -> Generator[int, None, None]:
        with self.parent(path) as (parent, name):
            found = os.open(name, _LISTED, dir_fd=parent)
            try:
                yield found
            finally:
                os.close(found)

    @contextlib.contextmanager
    def regular(self, path: bytes) -> Generator[int, None, None]:
        """A regular file, open for reading."""
        with self.parent(path) as (parent, name):
            found = open_regular(name, parent, path)
            try:
                yield found
            finally:
                os.close(found)


_THROUGH = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


def open_regular(name: bytes, parent: int, path: bytes) -> int:
    found = os.stat(name, dir_fd=parent, follow_symlinks=False)  # first: opening a device may have effects
    if not stat.S_ISREG(found.st_mode):
        raise Fail(
            "is_a_directory" if stat.S_ISDIR(found.st_mode) else "special_file",
            "not a regular file",
            path=text_of(path),
        )
    descriptor = os.open(name, _READ, dir_fd=parent)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise Fail("special_file", "not a regular file", path=text_of(path))


def _name_of(item: tuple[bytes, object]) -> bytes:
    return item[0]


def list_directory(descriptor: int) -> list[tuple[bytes, os.stat_result]]:
    """Names and their own status, by name. What vanishes meanwhile is left out."""
    found: list[tuple[bytes, os.stat_result]] = []
    with os.scandir(descriptor) as entries:
        for entry in entries:
            try:
                found.append((entry.name.encode("utf-8", "surrogateescape"), entry.stat(follow_symlinks=False)))
            except FileNotFoundError:
                continue
    found.sort(key=_name_of)
    return found


def tree(
    descriptor: int, prefix: bytes, ignored: Ignored | None = None
) -> Iterator[tuple[bytes, int, bytes, os.stat_result | OSError]]:
    """Everything below an open directory, depth first: (path, its directory, its name, its status).

    A directory that cannot be listed comes a second time, with the error in place of its status. What is ``ignored``
    does not come, nor what is below it.
    """
    stack: list[tuple[int, bytes, Iterator[tuple[bytes, os.stat_result]]]] = []
    stack.append((os.dup(descriptor), prefix, iter(list_directory(descriptor))))
    if ignored is not None:
        ignored.enter(descriptor, prefix)
    try:
        while stack:
            parent, below, names = stack[-1]
            for name, status in names:
                path = below + name
                if ignored is not None and ignored.covers(path, stat.S_ISDIR(status.st_mode)):
                    continue
                yield path, parent, name, status
                if stat.S_ISDIR(status.st_mode):
                    if len(stack) >= DEPTH:
                        yield path, parent, name, OSError(errno.ELOOP, "too deep")
                        continue
                    child = -1
                    try:
                        child = os.open(name, _LISTED, dir_fd=parent)
                        listed = list_directory(child)
                    except OSError as error:
                        if child >= 0:
                            os.close(child)
                        if error.errno != errno.ENOENT:
                            yield path, parent, name, error
                        continue
                    stack.append((child, path + b"/", iter(listed)))
                    if ignored is not None:
                        ignored.enter(child, path + b"/")
                    break
            else:
                os.close(parent)
                stack.pop()
                if ignored is not None:
                    ignored.leave()
    finally:
        for parent, _, _ in stack:
            os.close(parent)


class Ignored:
    """What the .gitignore files say, from the workspace down to the directory a walk is in; and .git itself (rule S41).

    Paths are relative to the workspace. The last pattern that fits counts, of the deepest file that has one.
    """

    def __init__(self) -> None:
        self.levels: list[tuple[int, list[IgnoreRun]]] = []

    def enter(self, directory: int, path: bytes) -> None:
        """``path``: of the directory, with a slash at its end but for the workspace itself."""
        runs: list[IgnoreRun] = []
        try:
            descriptor = open_regular(b".gitignore", directory, path)
        except (OSError, Fail):
            pass
        else:
            try:
                content = os.read(descriptor, IGNORE_BYTES)
                if len(content) == IGNORE_BYTES:  # a part of a line is another pattern
                    content = content[: content.rfind(b"\n") + 1]
                runs = ignore_runs(content)
            except OSError:
                pass
            finally:
                os.close(descriptor)
        self.levels.append((len(path), runs))

    def leave(self) -> None:
        self.levels.pop()

    def covers(self, path: bytes, directory: bool) -> bool:
        if path.endswith((b"/.git",)) or path == b".git":
            return True
        text = path.decode("latin-1")
        name = text[text.rfind("/") + 1 :]
        for below, runs in reversed(self.levels):
            for run in reversed(runs):
                if run.fits(text[below:], name, directory):
                    return not run.negated
        return False


class IgnoreRun:
    """Patterns that follow each other in one .gitignore and are all negated, or all not."""

    __slots__ = ("matchers", "negated")

    def __init__(self, negated: bool, patterns: Sequence[tuple[str, bool, bool]]) -> None:
        self.negated = negated
        self.matchers: list[tuple[re.Pattern[str], bool, bool]] = []
        for anchored in (False, True):
            for directories in (False, True):
                chosen = [text for text, *kind in patterns if kind == [anchored, directories]]
                if chosen:
                    self.matchers.append((re.compile("|".join(chosen), re.DOTALL), anchored, directories))

    def fits(self, path: str, name: str, directory: bool) -> bool:
        return any(
            matcher.fullmatch(path if anchored else name) is not None
            for matcher, anchored, directories in self.matchers
            if directory or not directories
        )


def ignore_runs(content: bytes) -> list[IgnoreRun]:
    """The patterns of a .gitignore. One that is none is passed over."""
    runs: list[tuple[bool, list[tuple[str, bool, bool]]]] = []
    for line in content.decode("latin-1").split("\n"):
        line = line.rstrip("\r")
        while line.endswith(" ") and not line.endswith("\\ "):
            line = line[:-1]
        negated = line.startswith("!")
        line = line[negated:]
        if not line or line.startswith("#"):
            continue
        directories = line.endswith("/")
        anchored = "/" in line[:-1]
        try:
            text = glob_pattern(line, escapes=True).pattern
        except Fail:
            continue
        if not text:
            continue
        if not runs or runs[-1][0] != negated:
            runs.append((negated, []))
        runs[-1][1].append((f"(?:{text})", anchored, directories))
    return [IgnoreRun(negated, patterns) for negated, patterns in runs]


def make_readable(name: bytes, parent: int) -> int | None:
    """Let its owner read a file, or list a directory; its permission bits now, None where that may not be."""
    try:
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
            return None
        mode = status.st_mode & 0o7777 | (0o700 if stat.S_ISDIR(status.st_mode) else 0o400)
        os.chmod(f"/proc/self/fd/{descriptor}", mode)
        return mode
    except OSError:
        return None
    finally:
        os.close(descriptor)


Sieve = Callable[[Sequence[bytes]], "set[bytes] | None"]
"""Which of these files may have a match; None: any of them."""


def look_through(workspace: str, query: Json, sieve: Sieve | None = None) -> Json:
    """walk, glob and grep. They run in a process of their own: a pattern can take for ever (rule S38)."""
    resolver = Resolver(workspace)
    try:
        base = raw_of(query["path"], "path") or b"."
        if b".." not in base.split(b"/"):  # else it is not the same place, behind a link
            base = os.path.normpath(base)
        base = base.rstrip(b"/") or b"/"
        prefix = b"" if base == b"." else base + b"/"
        if query["op"] == "grep":
            return Grep(resolver, query, sieve).run(base, prefix)
        with resolver.directory(base) as descriptor:
            return {"walk": _walk, "glob": _glob}[query["op"]](resolver, descriptor, prefix, query)
    finally:
        resolver.close()


def entries_of(
    resolver: Resolver, descriptor: int, prefix: bytes, query: Json
) -> Iterator[tuple[bytes, int, bytes, os.stat_result | OSError]]:
    """What is below a directory of the workspace, without what is ignored if the query says so."""
    if query.get("ignored", True):
        return tree(descriptor, prefix)
    ignored = Ignored()
    parts = prefix.split(b"/")[:-1]
    for count in range(len(parts)):
        above = b"/".join(parts[:count])
        with resolver.directory(above) as directory:
            ignored.enter(directory, above + b"/" if above else b"")
    return tree(descriptor, prefix, ignored)


def json_size(raw: bytes) -> int:
    """At most so long is a path as JSON."""
    return 6 * len(raw) + 2


def named(paths: Sequence[Json]) -> list[Json]:
    """As many as fit beside other things."""
    out = Bounded(NAMED, PAGE_BYTES // 8)
    for item in paths:
        if not out.add(item, len(compact(item))):
            break
    return out.found


class Bounded:
    """A list of results, bounded in number and in bytes."""

    def __init__(self, limit: int, most: int = PAGE_BYTES) -> None:
        self.found: list[Any] = []
        self.limit = limit
        self.most = most
        self.bytes = 0
        self.more = False

    def add(self, item: object, size: int) -> bool:
        """False if there is no room for it."""
        self.bytes += size
        if len(self.found) >= self.limit or self.bytes > self.most:
            self.more = True
            return False
        self.found.append(item)
        return True


def _walk(resolver: Resolver, descriptor: int, prefix: bytes, query: Json) -> Json:
    out = Bounded(query["limit"])
    wanted = query.get("kind")
    fits = name_matcher(query.get("pattern"))
    for path, _, _, status in entries_of(resolver, descriptor, prefix, query):
        if isinstance(status, OSError) or (not query["hidden"] and b"/." in b"/" + path[len(prefix) :]):
            continue
        kind = kind_of(status.st_mode)
        if (wanted is not None and kind != wanted) or not fits(path[len(prefix) :]):
            continue
        if not out.add({"path": text_of(path), "kind": kind, "size": status.st_size}, json_size(path) + 60):
            break
    return {"entries": out.found, "more": out.more, "timed_out": False}


def name_matcher(pattern: str | None) -> Callable[[bytes], bool]:
    """Whether a glob fits a path below where is searched, or its last name."""
    if pattern is None:
        return lambda path: True
    compiled = glob(pattern)

    def fits(path: bytes) -> bool:
        text = path.decode("utf-8", "surrogateescape")
        return bool(compiled.fullmatch(text) or compiled.fullmatch(text[text.rfind("/") + 1 :]))

    return fits


_BRACES = re.compile(r"\{([^{}]*)\}")


def glob(pattern: str) -> re.Pattern[str]:
    """Of what is searched for: ``{a,b}`` is either."""
    todo, plain = [pattern], list[str]()
    while todo:
        one = todo.pop()
        either = next((found for found in _BRACES.finditer(one) if "," in found[1]), None)  # the innermost first
        if either is None:
            plain.append(glob_pattern(one).pattern)
        else:
            todo += [one[: either.start()] + word + one[either.end() :] for word in either[1].split(",")]
        if len(plain) + len(todo) > GLOBS:
            raise Fail("bad_request", f"pattern: its braces stand for more than {GLOBS} patterns")
    return re.compile("|".join(f"(?:{text})" for text in plain), re.DOTALL)


def glob_pattern(pattern: str, escapes: bool = False) -> re.Pattern[str]:
    """``*``, ``?``, ``[...]`` within a name; ``**`` as a whole name: any number of directories. ``escapes``: a
    backslash takes what follows it as it is."""
    out = ""
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        if part == "**":
            out += ".*" if last else "(?:[^/]+/)*"
            continue
        at = 0
        while at < len(part):
            char = part[at]
            end = part.find("]", at + 2) if char == "[" else -1
            if char == "*":
                if not out.endswith("[^/]*"):
                    out += "[^/]*"
            elif char == "?":
                out += "[^/]"
            elif char == "\\" and escapes and at + 1 < len(part):
                at += 1
                out += re.escape(part[at])
            elif end > 0:
                inside = part[at + 1 : end].replace("\\", "\\\\").replace("[", "\\[")
                out += "(?!/)[" + ("^" + inside[1:] if inside[0] in "!^" else inside) + "]"
                at = end
            else:
                out += re.escape(char)
            at += 1
        if not last:
            out += "/"
    try:
        return re.compile(out, re.DOTALL)
    except re.error as error:
        raise Fail("bad_request", f"pattern: {error}") from None


def _glob(resolver: Resolver, descriptor: int, prefix: bytes, query: Json) -> Json:
    pattern = glob(query["pattern"])
    out = Bounded(query["limit"])
    for path, _, _, status in entries_of(resolver, descriptor, prefix, query):
        if isinstance(status, OSError):
            continue
        name = path[len(prefix) :].decode("utf-8", "surrogateescape")
        if pattern.fullmatch(name) and not out.add(text_of(path), json_size(path)):
            break
    return {"paths": out.found, "more": out.more}


class Grep:
    """One search in the lines of files. A match and the lines around it come in the order of the walk."""

    def __init__(self, resolver: Resolver, query: Json, sieve: Sieve | None) -> None:
        wanted = query["pattern"].encode("utf-8")
        try:
            self.pattern = re.compile(
                re.escape(wanted) if query["fixed"] else wanted, re.IGNORECASE if query["ignore_case"] else 0
            )
        except (re.error, OverflowError, RecursionError) as error:
            raise Fail("bad_request", f"pattern: {error}") from None
        self.resolver = resolver
        self.query = query
        self.sieve = sieve
        self.fits = name_matcher(query["glob"])
        self.context = query.get("context", 0)
        self.out = Bounded(1 << 30)
        self.matches = 0
        self.skipped = 0
        self.waiting: list[bytes] = []

    def run(self, base: bytes, prefix: bytes) -> Json:
        with self.resolver.parent(base) as (parent, name):
            one = stat.S_ISREG(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
        if one:
            self.take(base, self.resolver.regular(base))
        else:
            with self.resolver.directory(base) as descriptor:
                self.search(entries_of(self.resolver, descriptor, prefix, self.query), len(prefix))
        return {"matches": self.out.found, "more": self.out.more, "timed_out": False, "skipped": self.skipped}

    def search(self, entries: Iterable[tuple[bytes, int, bytes, os.stat_result | OSError]], below: int) -> None:
        for path, parent, name, status in entries:
            if isinstance(status, OSError) or not stat.S_ISREG(status.st_mode) or not status.st_size:
                continue
            if not self.fits(path[below:]):
                continue
            if status.st_size > GREP_FILE_BYTES:
                self.skipped += 1
            elif self.sieve is None:
                self.take(path, opened_regular(name, parent, path))
            else:
                self.waiting.append(path)
                if len(self.waiting) == SIEVED:
                    self.take_waiting()
            if self.out.more:
                return
        self.take_waiting()

    def take_waiting(self) -> None:
        """Only those that may have a match are read, one after the other as they came."""
        chosen = self.sieve(self.waiting) if self.sieve is not None and self.waiting else None
        for path in self.waiting:
            if not self.out.more and (chosen is None or path in chosen):
                self.take(path, self.resolver.regular(path))
        self.waiting.clear()

    def take(self, path: bytes, opening: contextlib.AbstractContextManager[int]) -> None:
        try:
            with opening as descriptor:
                content = read_regular(descriptor)
        except (OSError, Fail):
            self.skipped += 1
            return
        if len(content) > GREP_FILE_BYTES:  # it has grown since it was looked at
            self.skipped += 1
            return
        lines = content.split(b"\n")
        if not lines[-1]:
            lines.pop()
        binary = b"\0" in content[:8192]
        shown = until = -1
        for index, line in enumerate(lines):
            if self.pattern.search(line):
                if binary:
                    self.skipped += 1
                    return
                if self.matches == self.query["limit"]:
                    self.out.more = True
                    return
                self.matches += 1
                for before in range(max(shown + 1, index - self.context), index):
                    if not self.add(path, before, lines[before], context=True):
                        return
                if not self.add(path, index, line):
                    return
                shown, until = index, index + self.context
            elif index <= until:
                if not self.add(path, index, line, context=True):
                    return
                shown = index

    def add(self, path: bytes, index: int, line: bytes, context: bool = False) -> bool:
        text = line[:GREP_LINE_BYTES].decode("utf-8", "replace")
        match: Json = {"path": text_of(path), "line": index + 1, "text": text}
        if context:
            match["context"] = True
        return self.out.add(match, json_size(path) + 6 * len(text) + 80)


@contextlib.contextmanager
def opened_regular(name: bytes, parent: int, path: bytes) -> Generator[int, None, None]:
    descriptor = open_regular(name, parent, path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_regular(descriptor: int) -> bytes:
    """Its content; one byte more than a search takes where it is longer."""
    content = b""
    while len(content) <= GREP_FILE_BYTES:
        block = os.read(descriptor, GREP_FILE_BYTES + 1 - len(content))
        if not block:
            break
        content += block
    return content


# --- images -----------------------------------------------------------------------------------------------------


class Item:
    """One path of an image, and the status its content was seen with."""

    __slots__ = ("chunks", "ctime", "inode", "kind", "mode", "mtime", "racy", "sha", "size", "target")

    def __init__(self, kind: str, mode: int, size: int = 0, sha: str = "", target: bytes = b"") -> None:
        self.kind = kind
        self.mode = mode
        self.size = size
        self.sha = sha
        self.chunks: list[str] = []
        self.target = target
        self.mtime = 0
        self.ctime = 0
        self.inode = 0
        self.racy = True

    def seen(self, status: os.stat_result, racy: bool) -> None:
        self.mtime, self.ctime, self.inode = status.st_mtime_ns, status.st_ctime_ns, status.st_ino
        self.racy = racy

    def looks_like(self, status: os.stat_result) -> bool:
        """Its content cannot have changed since: nothing of its status did, and it was not too fresh."""
        return (
            not self.racy
            and self.ctime == status.st_ctime_ns
            and self.mtime == status.st_mtime_ns
            and self.inode == status.st_ino
            and self.size == status.st_size
            and self.mode == status.st_mode & 0o7777
        )

    def same(self, other: Item) -> bool:
        if self.kind != other.kind:
            return False
        if self.kind == "symlink":
            return self.target == other.target
        return self.mode == other.mode and self.sha == other.sha

    def parts(self) -> list[str]:
        """The digests of its chunks."""
        if self.kind != "file" or self.size == 0:
            return []
        return self.chunks or [self.sha]

    def entry(self, path: bytes) -> Json:
        if self.kind == "symlink":
            return {"path": text_of(path), "kind": "symlink", "target": text_of(self.target)}
        if self.kind == "directory":
            return {"path": text_of(path), "kind": "directory", "mode": self.mode}
        entry: Json = {"path": text_of(path), "kind": "file", "mode": self.mode, "size": self.size, "sha256": self.sha}
        if self.chunks:
            entry["chunks"] = self.chunks
        return entry

    def row(self, path: bytes) -> list[Any]:
        return [
            text_of(path), self.kind, self.mode, self.size, self.sha, self.chunks, text_of(self.target), self.mtime,
            self.ctime, self.inode, self.racy,
        ]  # fmt: skip

    @classmethod
    def of_row(cls, row: Sequence[Any]) -> tuple[bytes, Item]:
        item = cls(row[1], row[2], row[3], row[4], raw_of(row[6], "target"))
        item.chunks, item.mtime, item.ctime, item.inode, item.racy = row[5], row[7], row[8], row[9], row[10]
        return raw_of(row[0], "path"), item


_DIGEST = re.compile("[0-9a-f]{64}")


def digest_of(value: object, name: str) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise Fail("bad_request", f"{name} must be 64 lower-case hexadecimal digits")
    return value


def count_of(value: object, name: str, largest: int, smallest: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
        raise Fail("bad_request", f"{name} must be an integer of at least {smallest}")
    if value > largest:
        raise Fail("too_large", f"{name} is {value}", limit=largest)
    return value


def image_entry(entry: object) -> tuple[bytes, Item]:
    """An Entry of the protocol, checked."""
    fields = object_of(entry, "an entry")
    path = image_path(fields.get("path"))
    kind = fields.get("kind")
    if kind == "symlink":
        target = raw_of(fields.get("target"), "target")
        if not target:
            raise Fail("bad_request", "a symlink needs a target", path=text_of(path))
        return path, Item(kind, 0o777, target=target)
    mode = count_of(fields.get("mode"), "mode", 0o7777)
    if kind == "directory":
        return path, Item(kind, mode)
    if kind != "file":
        raise Fail("bad_request", "kind must be file, symlink or directory", path=text_of(path))
    size = count_of(fields.get("size"), "size", 1 << 50)
    item = Item(kind, mode, size, digest_of(fields.get("sha256"), "sha256"))
    item.chunks = [digest_of(chunk, "chunk") for chunk in array_of(fields.get("chunks", []), "chunks")]
    if len(item.chunks) != (-(-size // CHUNK) if size > CHUNK else 0):
        raise Fail("bad_request", "chunks: one digest for each MiB begun of a file larger than one", path=text_of(path))
    return path, item


def image_path(value: object) -> bytes:
    path = raw_of(value, "path")
    if any(part in (b"", b".", b"..") for part in path.split(b"/")):
        raise Fail("outside_workspace", "an entry's path has plain names only", path=text_of(path))
    return path


class Survey:
    """The workspace as one walk found it."""

    def __init__(self) -> None:
        self.items: dict[bytes, Item] = {}
        self.fresh: list[bytes] = []
        """What is not the very item that was known."""
        self.matched = 0
        """How many of the known paths are still there, as whatever."""
        self.special: list[Json] = []
        self.too_large: list[Json] = []
        self.unreadable: list[Json] = []
        self.beyond: list[bytes] = []
        """Directories that hold what is too deep or has too long a path, when a restore looks."""
        self.bytes = 0
        self.hashed = 0
        self.touched = False
        """Something was written since the index: there is something to flush."""

    def add(self, path: bytes, item: Item) -> None:
        self.items[path] = item
        self.fresh.append(path)
        if item.kind == "file":
            self.bytes += item.size


def hash_regular(name: bytes, parent: int, path: bytes) -> Item:
    """Read and hash a file, chunk by chunk. Read again, twice at most, if it changes under our hands."""
    descriptor = open_regular(name, parent, path)
    try:
        item, steady = _hash_once(descriptor)
        for _ in range(2):
            if not steady:
                item, steady = _hash_once(descriptor)
        return item
    finally:
        os.close(descriptor)


def _hash_once(descriptor: int) -> tuple[Item, bool]:
    begun = time.time_ns()
    before = os.fstat(descriptor)
    whole = hashlib.sha256()
    chunks: list[str] = []
    size = 0
    while True:
        block = os.pread(descriptor, CHUNK, size)
        while block and len(block) < CHUNK:
            more = os.pread(descriptor, CHUNK - len(block), size + len(block))
            if not more:
                break
            block += more
        if not block:
            break
        chunks.append(sha256(block))
        size += len(block)
        if before.st_size > CHUNK:
            whole.update(block)
        if len(block) < CHUNK or size > before.st_size:
            break
    after = os.fstat(descriptor)
    steady = after.st_ctime_ns == before.st_ctime_ns and before.st_size == after.st_size == size
    item = Item("file", after.st_mode & 0o7777, size)
    if size > CHUNK:
        item.sha, item.chunks = whole.hexdigest(), chunks
    else:
        item.sha = chunks[0] if chunks else sha256(b"")
    fresh = max(after.st_ctime_ns, after.st_mtime_ns) >= begun - RACY_NS
    item.seen(after, racy=fresh or not steady)
    return item, steady


def written_files(pids: Iterable[int]) -> set[tuple[int, int]]:
    """(device, inode) of what these processes have open for writing or mapped so: it may change at any time."""
    found: set[tuple[int, int]] = set()
    for pid in pids:
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for name in names:
            with contextlib.suppress(OSError, ValueError, IndexError):
                for line in read_small(f"/proc/{pid}/fdinfo/{name}", 1024).splitlines():
                    if line.startswith(b"flags:") and int(line.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY:
                        status = os.stat(f"/proc/{pid}/fd/{name}")
                        found.add((status.st_dev, status.st_ino))
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in read_small(f"/proc/{pid}/maps", 1 << 22).splitlines():
                fields = line.split(None, 5)
                if b"w" in fields[1] and b"s" in fields[1]:
                    major, _, minor = fields[3].partition(b":")
                    found.add((os.makedev(int(major, 16), int(minor, 16)), int(fields[4])))
    return found


class Surveying:
    """A walk through the workspace that hashes what may differ from what is known (rules S28, S29, S32).

    Each directory is looked at with all above it open, so that nothing leads out. ``written``: (device, inode) of what
    may change at any time. ``opening``, for a restore, which sets all modes afterwards: what its owner may not read is
    made readable first.
    """

    def __init__(
        self, loop: Loop, known: dict[bytes, Item], largest: int, written: set[tuple[int, int]], opening: bool
    ) -> None:
        self.loop = loop
        self.known = known
        self.largest = largest
        self.written = written
        self.opening = opening
        self.found = Survey()
        self.until = time.monotonic() + SLICE_S

    def run(self, root: int) -> Quiet:
        opened: list[tuple[int, bytes, list[bytes]]] = []
        try:
            top = os.dup(root)
            opened.append((top, b"", []))
            opened[0][2].extend((yield from self._list(top, b"")))
            while opened:
                parent, prefix, below = opened[-1]
                if not below:
                    os.close(parent)
                    opened.pop()
                    continue
                name = below.pop()
                path = prefix + name
                try:
                    if len(opened) >= DEPTH:
                        raise OSError(errno.ELOOP, "too deep")
                    try:
                        child, inside = yield from self._enter(parent, name, path)
                    except PermissionError:
                        mode = make_readable(name, parent) if self.opening else None
                        if mode is None:
                            raise
                        self.found.add(path, Item("directory", mode))
                        child, inside = yield from self._enter(parent, name, path)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    if self.opening and error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
                        del self.found.items[path]
                        self.found.beyond.append(path)
                    else:
                        self._unreadable(path, error)
                    continue
                opened.append((child, path + b"/", inside))
        finally:
            for descriptor, _, _ in opened:
                os.close(descriptor)

    def _enter(self, parent: int, name: bytes, path: bytes) -> Generator[Wait | None, None, tuple[int, list[bytes]]]:
        child = os.open(name, _LISTED, dir_fd=parent)
        try:
            return child, (yield from self._list(child, path + b"/"))
        except BaseException:
            os.close(child)
            raise

    def _list(self, descriptor: int, prefix: bytes) -> Generator[Wait | None, None, list[bytes]]:
        """Look at all that a directory holds; the names of the directories in it. What takes most of a scan's time."""
        if len(prefix) + 255 > PATH_BYTES and any(
            len(prefix) + len(os.fsencode(name)) > PATH_BYTES for name in os.listdir(descriptor)
        ):
            raise OSError(errno.ENAMETOOLONG, "too long a path")
        known, found, written = self.known.get, self.found, self.written
        items = found.items
        matched = size = 0
        below: list[bytes] = []
        with os.scandir(descriptor) as entries:
            for number, entry in enumerate(entries):
                if not number & 127 and time.monotonic() > self.until:
                    if len(items) > IMAGE_ENTRIES:
                        raise Fail("too_large", "the workspace has too many entries", limit=IMAGE_ENTRIES)
                    yield None
                    self.until = time.monotonic() + SLICE_S
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                name = entry.name.encode("utf-8", "surrogateescape")
                path = prefix + name
                old = known(path)
                mode = status.st_mode
                kind = mode & 0o170000
                if old is not None:
                    matched += 1
                    if (
                        kind == stat.S_IFREG  # and as Item.looks_like, without the call
                        and old.ctime == status.st_ctime_ns
                        and old.mtime == status.st_mtime_ns
                        and old.inode == status.st_ino
                        and old.size == status.st_size
                        and old.mode == mode & 0o7777
                        and not old.racy
                        and old.kind == "file"
                        and not (written and (status.st_dev, status.st_ino) in written)
                    ):
                        items[path] = old
                        size += old.size
                        continue
                if kind == stat.S_IFDIR:
                    below.append(name)
                    if old is not None and old.kind == "directory" and old.mode == mode & 0o7777:
                        items[path] = old
                    else:
                        found.add(path, Item("directory", mode & 0o7777))
                elif kind == stat.S_IFLNK:
                    self._link(descriptor, name, path, status, old)
                elif kind != stat.S_IFREG:
                    found.special.append({"path": text_of(path), "kind": "special"})
                elif status.st_size > self.largest:
                    found.too_large.append({"path": text_of(path), "size": status.st_size})
                else:
                    yield from self._file(descriptor, name, path, status, old)
        found.matched += matched
        found.bytes += size
        return below

    def _link(self, parent: int, name: bytes, path: bytes, status: os.stat_result, old: Item | None) -> None:
        if old is not None and old.kind == "symlink" and old.looks_like(status):
            self.found.items[path] = old
            return
        try:
            item = Item("symlink", 0o777, status.st_size, target=os.readlink(name, dir_fd=parent))
        except OSError:
            self.found.matched -= old is not None
            return
        item.seen(status, racy=status.st_ctime_ns >= time.time_ns() - RACY_NS)
        self.found.touched = self.found.touched or old is None or old.ctime != item.ctime
        self.found.add(path, item)

    def _file(self, parent: int, name: bytes, path: bytes, status: os.stat_result, old: Item | None) -> Quiet:
        try:
            try:
                item = yield from self._hashed(parent, name, path, status.st_size)
            except PermissionError:
                if not self.opening or make_readable(name, parent) is None:
                    raise
                item = yield from self._hashed(parent, name, path, status.st_size)
        except FileNotFoundError:
            self.found.matched -= old is not None
            return
        except OSError as error:
            self._unreadable(path, error)
            return
        found = self.found
        found.hashed += item.size
        item.racy = item.racy or (status.st_dev, status.st_ino) in self.written
        found.touched = found.touched or old is None or not old.same(item) or old.ctime != item.ctime
        found.add(path, item)
        if item.size > CHUNK // 4 or time.monotonic() > self.until:
            yield None
            self.until = time.monotonic() + SLICE_S

    def _hashed(self, parent: int, name: bytes, path: bytes, size: int) -> Generator[Wait | None, None, Item]:
        if size <= 2 * CHUNK:
            return hash_regular(name, parent, path)
        return (yield from self.loop.offload(lambda: hash_regular(name, parent, path)))

    def _unreadable(self, path: bytes, error: OSError) -> None:
        self.found.unreadable.append({"path": text_of(path), "errno": errno.errorcode.get(error.errno or 0, "")})


Label = tuple[str, int, str]
"""The name of an image: log, commit, nonce. Two lives of a log may each have an image of a number, of other nonces."""


def label_of(log: str, commit: int, nonce: str = "") -> Label:
    return log, commit, nonce


class Index:
    """What the workspace held when it stood at an image: the base of the next scan. A cache: never flushed.

    Written line by line beside the journal; a torn end only means that it stands at an older image.
    """

    NAME = "index"

    def __init__(self, state_fd: int, boot: str) -> None:
        self.state_fd = state_fd
        self.boot = boot
        self.items: dict[bytes, Item] = {}
        self.label: Label | None = None
        self.lines = 0
        self._load()

    def _load(self) -> None:
        try:
            descriptor = os.open(self.NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self.state_fd)
        except FileNotFoundError:
            return
        boot = ""
        with os.fdopen(descriptor, "rb+") as file:
            end = 0
            for line in file:
                records = _records(line)
                if records is None:
                    break
                end += len(line)
                self.lines += 1
                for record in records:
                    boot = record["boot"]
                    self.label = None if record["label"] is None else label_of(*record["label"])
                    if record["whole"]:
                        self.items = {}
                    self.items.update(Item.of_row(row) for row in record["set"])
                    for path in record["del"]:
                        self.items.pop(raw_of(path, "path"), None)
            file.truncate(end)
        if boot != self.boot:
            for item in self.items.values():
                item.racy = True  # what was not flushed when the machine stopped may be lost, its times kept

    def stand(self, label: Label | None, items: dict[bytes, Item], changed: Iterable[bytes] | None) -> None:
        """It stands at another image now. ``changed`` names what differs, None if that is not known."""
        whole = changed is None or self.lines > 200
        names = list(items) if whole else [path for path in changed or () if path in items]
        gone = [] if whole else [text_of(path) for path in changed or () if path not in items]
        record = {
            "boot": self.boot,
            "label": label,
            "whole": whole,
            "set": [items[path].row(path) for path in names],
            "del": gone,
        }
        self.items, self.label = items, label
        line = _line([record])
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_TRUNC if whole else os.O_APPEND)
        try:
            descriptor = os.open(self.NAME, flags, 0o600, dir_fd=self.state_fd)
        except OSError:
            return
        try:
            write_all(descriptor, line)
            self.lines = 1 if whole else self.lines + 1
        except OSError:  # a full disk: without a file the next daemon hashes everything
            with contextlib.suppress(OSError):
                os.unlink(self.NAME, dir_fd=self.state_fd)
            self.lines = 10**9
        finally:
            os.close(descriptor)


# --- the loop ---------------------------------------------------------------------------------------------------


class Event:
    """Something requests wait for."""

    def __init__(self) -> None:
        self.waiting: set[Task] = set()

    def set(self) -> None:
        waiting, self.waiting = self.waiting, set()
        for task in waiting:
            task.wake()


class Wait:
    """What a generator yields: go on when one of the events is set or the time has come."""

    __slots__ = ("events", "until")

    def __init__(self, until: float | None, *events: Event) -> None:
        self.until = until
        self.events = events


Answer = tuple[Json, bytes]
Steps = Generator[Optional[Wait], None, Answer]
Quiet = Generator[Optional[Wait], None, None]


class Task:
    """One request at work."""

    def __init__(self, loop: Loop, connection: Connection, request_id: object, op: str) -> None:
        self.loop = loop
        self.connection = connection
        self.request_id = request_id
        self.op = op
        self.admitted: tuple[int, int] | None = None
        self.steps: Steps | None = None
        self.waits: tuple[Event, ...] = ()
        self.number = 0
        self.queued = False

    def wake(self) -> None:
        if not self.queued:
            self.queued = True
            self.loop.ready.append(self)

    def suspend(self, wait: Wait | None) -> None:
        if wait is None:
            self.wake()
            return
        self.waits = wait.events
        for event in wait.events:
            event.waiting.add(self)
        if wait.until is not None:
            self.number += 1
            self.loop.counter += 1
            heapq.heappush(self.loop.timers, (wait.until, self.loop.counter, self, self.number))

    def resume(self) -> None:
        """Before it goes on: nothing else shall wake it."""
        self.queued = False
        self.number += 1
        for event in self.waits:
            event.waiting.discard(self)
        self.waits = ()


class Connection:
    """One client: reads a frame, has it answered, reads the next."""

    def __init__(self, loop: Loop, sock: socket.socket) -> None:
        self.loop = loop
        self.sock = sock
        self.known = False
        self.busy = False
        self.reading = True
        self.open = True
        self.data = bytearray()
        self.out = memoryview(b"")
        self.closing = False
        self.deadline = loop.now + HELLO_S
        sock.setblocking(False)
        loop.selector.register(sock, selectors.EVENT_READ, self.on_ready)

    def on_ready(self, mask: int) -> None:
        """It may have been closed earlier in the same round of events, or by the first of these steps."""
        if mask & selectors.EVENT_WRITE and self.open:
            self.flush()
        if mask & selectors.EVENT_READ and self.open:
            self.on_readable()

    def _listen(self) -> None:
        mask = selectors.EVENT_WRITE if self.out else 0
        if not self.busy and not self.out:
            mask |= selectors.EVENT_READ
        if mask:
            try:
                self.loop.selector.modify(self.sock, mask, self.on_ready)
            except KeyError:
                self.loop.selector.register(self.sock, mask, self.on_ready)
        else:
            with contextlib.suppress(KeyError):
                self.loop.selector.unregister(self.sock)

    def on_readable(self) -> None:
        if self.busy or self.out:
            self._listen()  # one request at a time: what comes early waits in the kernel
            return
        try:
            block = self.sock.recv(max(65536, min(self._missing(), 1 << 20)))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        if not block:
            self.close()
            return
        self.data += block
        if self.known:
            self.deadline = self.loop.now + STALL_S
        self.take()

    def _missing(self) -> int:
        if len(self.data) < 8:
            return 0
        header, body = struct.unpack_from("!II", self.data)
        return 8 + header + body - len(self.data)

    def take(self) -> None:
        """Begin the next request if all of it is there."""
        if self.busy or len(self.data) < 8:
            return
        header, body = struct.unpack_from("!II", self.data)
        most_header, most_body = (HEADER_BYTES, BODY_BYTES) if self.known else (HELLO_BYTES, 0)
        if header > most_header or body > most_body:
            if not self.known:
                self.refuse(None, Fail("unauthorized", "say hello first"))
            elif header > most_header:
                self.refuse(None, Fail("too_large", f"a header of {header} bytes", limit=most_header))
            else:
                self.refuse(None, Fail("too_large", f"a body of {body} bytes", limit=most_body))
            return
        if len(self.data) < 8 + header + body:
            return
        raw = bytes(self.data[8 : 8 + header])
        content = bytes(self.data[8 + header : 8 + header + body])
        del self.data[: 8 + header + body]
        try:
            request = json.loads(raw)
        except (ValueError, RecursionError):
            request = None
        if not isinstance(request, dict) or not isinstance(cast(Json, request).get("op"), str):
            stranger = Fail("unauthorized", "say hello first")
            self.refuse(None, Fail("bad_request", "not a JSON object with an op") if self.known else stranger)
            return
        self.busy = True
        self.loop.begin(self, cast(Json, request), content)

    def refuse(self, request_id: object, fail: Fail) -> None:
        self.closing = True
        self.answer({"id": request_id, "error": {"code": fail.code, "message": fail.message, **fail.more}}, b"")

    def answer(self, header: Json, body: bytes) -> None:
        self.busy = False
        if not self.open:
            return
        head = compact(header)
        self.deadline = self.loop.now + STALL_S
        self.out = memoryview(struct.pack("!II", len(head), len(body)) + head + body)
        self.flush()

    def flush(self) -> None:
        try:
            while self.out:
                sent = self.sock.send(self.out)
                self.out = self.out[sent:]
                self.deadline = self.loop.now + STALL_S
        except (BlockingIOError, InterruptedError):
            self._listen()
            return
        except OSError:
            self.close()
            return
        self.out = memoryview(b"")
        if self.closing:
            self.close()
            return
        self._listen()
        if self.data and not self.busy:
            self.loop.later(self.take)

    def is_late(self, now: float) -> bool:
        """It has not said hello in time, or is stuck in a frame or an answer."""
        if not self.known:
            return now > self.deadline
        return bool(self.data or self.out) and not self.busy and now > self.deadline

    def close(self) -> None:
        if self.open:
            self.open = False
            with contextlib.suppress(KeyError):
                self.loop.selector.unregister(self.sock)
            self.sock.close()
            self.data = bytearray()
            self.out = memoryview(b"")
            self.loop.connections.discard(self)


class Loop:
    """The one thread: sockets, timers, requests; and the helper threads for calls that take long."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.ready: deque[Task] = deque()
        self.timers: list[tuple[float, int, Task, int]] = []
        self.counter = 0
        self.connections: set[Connection] = set()
        self.tasks: set[Task] = set()
        self.task_ended = Event()
        self.stopping = False
        self.now = time.monotonic()
        self.swept = self.now
        self.glanced = self.now
        self.glance_s = GLANCE_S
        self.glance: Callable[[], None] = _never
        self.callbacks: deque[Callable[[], None]] = deque()
        self.begin: Callable[[Connection, Json, bytes], None] = _never
        self.step: Callable[[Task], None] = _never
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._done: deque[Event] = deque()
        self._threads = 0
        self._waker, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.selector.register(self._waker, selectors.EVENT_READ, self._on_woken)

    def later(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def run(self) -> None:
        while not self.stopping:
            timeout = 0.0 if self.ready or self.callbacks else self._pause()
            for key, mask in self.selector.select(timeout):
                key.data(mask)
            self.now = time.monotonic()
            while self.timers and self.timers[0][0] <= self.now:
                _, _, task, number = heapq.heappop(self.timers)
                if task.number == number and not task.queued:
                    task.wake()
            for _ in range(len(self.callbacks)):
                self.callbacks.popleft()()
            for _ in range(len(self.ready)):
                self.step(self.ready.popleft())
            if self.now - self.swept > 1.0:
                self.swept = self.now
                for connection in [c for c in self.connections if c.is_late(self.now)]:
                    connection.close()
            if self.now - self.glanced >= self.glance_s:
                self.glanced = self.now
                self.glance()

    def _pause(self) -> float:
        most = min(1.0, self.glance_s) if self.connections else self.glance_s
        return min(most, max(0.0, self.timers[0][0] - time.monotonic())) if self.timers else most

    def offload(self, work: Callable[[], Any]) -> Generator[Wait | None, None, Any]:
        """Run a call in a helper thread. A request that is ended meanwhile waits for it all the same."""
        done = Event()
        state: list[Any] = [False, None, None]

        def job() -> None:
            try:
                state[1] = work()
            except BaseException as error:
                state[2] = error
            state[0] = True
            self._done.append(done)
            with contextlib.suppress(BlockingIOError):
                os.write(self._woken, b"!")

        if self._threads < 2:
            self._threads += 1
            threading.Thread(target=self._work, daemon=True).start()
        self._jobs.put(job)
        ended: Fail | None = None
        while not state[0]:
            try:
                yield Wait(None, done)
            except Fail as fail:
                ended = fail
        if ended is not None:
            raise ended
        if state[2] is not None:
            raise state[2]
        return state[1]

    def _work(self) -> None:
        while True:
            self._jobs.get()()

    def _on_woken(self, _mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._waker, 4096)
        while self._done:
            self._done.popleft().set()


def _never(*_: Any) -> None:
    raise AssertionError("not bound")


# --- requests ---------------------------------------------------------------------------------------------------

_REQUIRED = object()


class Args:
    """The fields of one request: each is taken once, checked, and none may be left over."""

    def __init__(self, request: Json, body: bytes) -> None:
        self.fields = request
        self.body = body

    def _take(self, name: str, default: object) -> Any:
        if name in self.fields:
            value = self.fields.pop(name)
            if value is not None or default is _REQUIRED:
                return value
            return default
        if default is _REQUIRED:
            raise Fail("bad_request", f"{name} is missing")
        return default

    def number(self, name: str, largest: int, smallest: int = 0, default: object = _REQUIRED) -> Any:
        value = self._take(name, default)
        return value if value is default else count_of(value, name, largest, smallest)

    def text(self, name: str, longest: int, default: object = _REQUIRED) -> Any:
        value = self._take(name, default)
        return value if value is default else checked_text(value, name, longest)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise Fail("bad_request", f"{name} must be true or false")
        return value

    def choice(self, name: str, choices: Sequence[str], default: object = _REQUIRED) -> str:
        value = self._take(name, default)
        if value not in choices:
            raise Fail("bad_request", f"{name} must be one of {', '.join(choices)}")
        return value

    def path(self, name: str = "path", default: object = _REQUIRED) -> bytes:
        return raw_of(self._take(name, default), name)

    def items(self, name: str, most: int, default: object = _REQUIRED) -> list[Any]:
        value = array_of(self._take(name, default), name)
        if len(value) > most:
            raise Fail("too_large", f"{name} has {len(value)} items", limit=most)
        return value

    def mapping(self, name: str, default: object = _REQUIRED) -> Json:
        return object_of(self._take(name, default), name)

    def place(self, name: str) -> tuple[int, int] | None:
        if self.fields.get(name) is None:
            self.fields.pop(name, None)
            return None
        found = Args(self.mapping(name), b"")
        place = (found.number("call", _BIG), found.number("attempt", _BIG))
        found.done()
        return place

    def done(self, body: bool = False) -> None:
        if self.fields:
            raise Fail("bad_request", f"unknown field {sorted(self.fields)[0][:100]}")
        if self.body and not body:
            raise Fail("bad_request", "this op takes no body")


_BIG = (1 << 63) - 1


def checked_text(value: object, name: str, longest: int) -> str:
    if not isinstance(value, str):
        raise Fail("bad_request", f"{name} must be a string")
    if "\0" in value:
        raise Fail("bad_request", f"{name} contains a NUL character")
    if len(value) > longest:
        raise Fail("too_large", f"{name} has {len(value)} characters", limit=longest)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise Fail("bad_request", f"{name} is not valid Unicode") from None
    return value


def key_of(value: object, log: str) -> Key:
    args = Args(dict(object_of(value, "a key")), b"")
    key = (
        log,
        args.number("call", _BIG),
        args.number("attempt", _BIG),
        args.text("nonce", NONCE),
        args.number("ordinal", _BIG, 1),
    )
    args.done()
    return key


class ShimHandle:
    """A shim as the daemon sees it. Without a channel: one of an earlier daemon. Raises ProcessLookupError if it is
    gone."""

    def __init__(self, daemon: Daemon, pid: int, ticks: int, channel: socket.socket | None) -> None:
        self.daemon = daemon
        self.pid = pid
        self.channel = channel
        self.handle = os.pidfd_open(pid)
        self.gone = False
        if start_ticks(pid) != ticks:
            os.close(self.handle)
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        self.current: str | None = None
        self.pending = False
        self.child = 0
        self.refusal: Fail | None = None
        self.found: Json | None = None
        self.left = False
        self.changed = Event()
        self.data = b""
        selector = daemon.loop.selector
        selector.register(self.handle, selectors.EVENT_READ, self.on_gone)
        if channel is not None:
            channel.setblocking(True)
            selector.register(channel, selectors.EVENT_READ, self.on_message)

    def send(self, job: Json) -> None:
        assert self.channel is not None
        self.channel.settimeout(STALL_S)
        send_message(self.channel, job)

    def on_message(self, _mask: int) -> None:
        if self.channel is None:
            return  # it was let go earlier in the same round of events
        try:
            block = self.channel.recv(1 << 18, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            block = b""
        if not block:
            self._forget_channel()  # what it said last has been read; that it is gone its pidfd says
            return
        self.data += block
        while len(self.data) >= 4:
            size = struct.unpack_from("!I", self.data)[0]
            if len(self.data) < 4 + size:
                return
            message, self.data = json.loads(self.data[4 : 4 + size]), self.data[4 + size :]
            self.take(message)

    def take(self, message: Json) -> None:
        daemon = self.daemon
        if "held" in message:
            daemon.held_shims[message["held"]] = self
        elif "started" in message:
            self.pending = False
            self.child = message["pid"]
            daemon.flushed_to(message["started"])
        elif "refused" in message:
            code, text, more = message["refused"]
            self.refusal = Fail(code, text, **more)
            self._finish()
        elif "exit" in message:
            self.left = message["left"]
            daemon.flushed_to(message["exit"])
            self._finish()
        elif "fail" in message:
            code, text, more = message["fail"]
            self.refusal = Fail(code, text, **more)
            self._finish()
        else:
            self.found = message["found"]
            self._finish()
        self.changed.set()

    def _finish(self) -> None:
        ended, self.current, self.pending = self.current, None, False
        if ended is not None:
            self.daemon.run_ended(ended, self)

    def _forget_channel(self) -> None:
        if self.channel is not None:
            self.daemon.loop.selector.unregister(self.channel)
            self.channel.close()
            self.channel = None

    def on_gone(self, _mask: int) -> None:
        while self.channel is not None and select.select([self.channel], [], [], 0)[0]:
            self.on_message(selectors.EVENT_READ)  # its last words first
        self._forget_channel()
        self.gone = True
        self.daemon.loop.selector.unregister(self.handle)
        os.close(self.handle)
        self._finish()
        self.daemon.shims.discard(self)
        self.changed.set()

    def kill(self, number: int = signal.SIGKILL) -> None:
        if not self.gone:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.handle, number)


class Scan:
    """The newest scan, kept for its pages and for settle."""

    def __init__(
        self,
        number: int,
        survey: Survey,
        known: dict[bytes, Item],
        changes: list[tuple[bytes, str]],
        based: bool,
    ) -> None:
        self.number = number
        self.survey = survey
        self.known = known
        """What the survey knew: the index's items, as long as it stands there."""
        self.changes = changes
        self.based = based
        self.inline: dict[bytes, tuple[int, int]] = {}
        self.flushed = False

    def page(self, start: int, most: int) -> tuple[list[Json], int | None]:
        out: list[Json] = []
        size = 0
        at = start
        while at < len(self.changes) and len(out) < most and size < PAGE_BYTES:
            path, how = self.changes[at]
            change: Json = {"path": text_of(path)} if how == "removed" else self.survey.items[path].entry(path)
            change["change"] = how
            if path in self.inline:
                change["inline"] = list(self.inline[path])
            out.append(change)
            size += 200 + json_size(path) + 70 * len(change.get("chunks", ())) + 6 * len(str(change.get("target", "")))
            at += 1
        return out, at if at < len(self.changes) else None


class Restore:
    """A restore under way: what it shall be, and the plan to get there."""

    def __init__(self, number: int, label: Label) -> None:
        self.number = number
        self.label = label
        self.target: dict[bytes, Item] = {}
        self.known = False
        self.given = False
        self.survey: Survey | None = None
        self.differing: list[bytes] = []
        """Where the workspace is not what it shall be, by path."""
        self.missing: list[str] = []
        self.displaced: list[bytes] = []


class Daemon:
    """Everything a Space has one of."""

    def __init__(self, setting: Setting, zygote: socket.socket, zygote_pid: int, options: Options) -> None:
        self.setting = setting
        self.options = options
        self.zygote = zygote
        self.zygote_pid = zygote_pid
        self.boot = boot_id()
        self.instance = secrets.token_hex(8)
        self.state_fd = os.open(setting.state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.ledger = Ledger()
        self.journal = Journal(self.state_fd, self.ledger)
        self.resolver = Resolver(setting.workspace)
        self.device = os.fstat(self.resolver.root).st_dev
        self.loop = Loop()
        self.loop.begin = self.begin
        self.loop.step = self.step
        self.loop.glance = self.glance
        self.abandoned = False
        self.advanced = False
        self.shims: set[ShimHandle] = set()
        self.runs: dict[str, ShimHandle] = {}
        self.ends: dict[str, Event] = {}
        self.groups: dict[str, Cgroup] = {}
        self.look_for_tags = True
        self.scans = 0
        self.scan: Scan | None = None
        self.restores = 0
        self.restore: Restore | None = None
        self.staged: dict[str, int] = {}
        self.armed: dict[str, list[Any]] = {}
        self.held: dict[str, Event] = {}
        self.held_shims: dict[str, ShimHandle] = {}
        self.written: dict[str, int] = {}
        """How large the outputs of ended commands were at the last look."""
        self._open_state()
        self.index = Index(self.state_fd, self.boot)

    # --- coming up

    def _open_state(self) -> None:
        for name in ("outputs", "staging", "recovery"):
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.state_fd)
        self.journal.create()
        with self.journal.locked():
            os.fdatasync(self.journal.fd)
            self.journal.flushed = self.journal.position
            self.journal.make_room()
        for command in self.ledger.commands.values():
            if command.cgroup is not None:
                version = 1 if os.path.exists(f"{command.cgroup}/freezer.state") else 2
                self.groups[command.id] = Cgroup(command.cgroup, version)
            if command.exit is None and self._shim_lives(command):
                with contextlib.suppress(ProcessLookupError):
                    shim = ShimHandle(self, command.pid, command.ticks, None)
                    shim.current = command.id
                    self.shims.add(shim)
                    self.runs[command.id] = shim
        self._reap_groups()
        for name in os.listdir(f"{self.setting.state}/outputs"):
            if name not in self.ledger.commands:
                os.unlink(f"outputs/{name}", dir_fd=self.state_fd)
        for name in os.listdir(f"{self.setting.state}/staging"):
            os.unlink(f"staging/{name}", dir_fd=self.state_fd) if not _DIGEST.fullmatch(name) else None
        for name in os.listdir(f"{self.setting.state}/staging"):
            self.staged[name] = os.stat(f"staging/{name}", dir_fd=self.state_fd).st_size

    def _shim_lives(self, command: Command) -> bool:
        if command.void or command.boot != self.boot or command.namespace != pid_namespace():
            return False
        return start_ticks(command.pid) == command.ticks

    def begin(self, connection: Connection, request: Json, body: bytes) -> None:
        """A request is there: find its op, admit it, take its first step."""
        op: str = request.pop("op")
        task = Task(self.loop, connection, request.pop("id", None), op)
        try:
            if task.request_id is not None and not isinstance(task.request_id, int):
                task.request_id = None
                raise Fail("bad_request", "id must be an integer")
            if not connection.known:
                self._hello(connection, op, request)
                task.steps = self.op_status(task, Args({}, b""))
            elif op in _OPEN_OPS:
                task.steps = _OPEN_OPS[op](self, task, Args(request, body))
            elif op in _TEST_OPS and self.setting.testing:
                task.steps = _TEST_OPS[op](self, task, Args(request, body))
            elif op in _OPS:
                self._admit(task, Args(request, b""))
                task.steps = _OPS[op](self, task, Args(request, body))
            else:
                raise Fail("bad_request", "unknown op")
        except Fail as fail:
            connection.closing = connection.closing or fail.code == "unauthorized"
            self._respond(task, fail)
            return
        self.loop.tasks.add(task)
        self.step(task)

    def _hello(self, connection: Connection, op: str, request: Json) -> None:
        token = request.pop("token", None)
        given = token.encode("utf-8", "surrogatepass") if isinstance(token, str) else b""
        if op != "hello" or not hmac.compare_digest(sha256(given), sha256(self.options.token)):
            raise Fail("unauthorized", "no hello, or a wrong token")
        if request.pop("protocol", None) != PROTOCOL:
            connection.closing = True
            raise Fail("bad_request", f"this daemon speaks protocol {PROTOCOL}", protocol=PROTOCOL)
        if request:
            connection.closing = True
            raise Fail("bad_request", "unknown field in hello")
        if sum(c.known for c in self.loop.connections) >= self.options.connections:
            connection.closing = True
            raise Fail("busy", "too many connections", limit=self.options.connections)
        connection.known = True

    def _admit(self, task: Task, args: Args) -> None:
        """Rule S4. From here on the request is ended as soon as it is overtaken."""
        epoch = args.number("epoch", _BIG)
        number = args.number("connection", _BIG)
        boot = args.text("boot", 64)
        fence = self.ledger.fence
        if fence is None or epoch != fence["epoch"]:
            raise Fail("stale_epoch", "the fence stands elsewhere", fence=fence, given={"epoch": epoch})
        if boot != self.boot:
            raise Fail("stale_boot", "the machine was restarted; advance and recover", boot=self.boot)
        if number != fence["connection"] or not self.advanced:
            raise Fail("stale_connection", "advance first", fence=fence, given={"connection": number})
        task.admitted = (epoch, number)

    def step(self, task: Task) -> None:
        task.resume()
        steps = task.steps
        assert steps is not None
        fence = self.ledger.fence
        try:
            if task.admitted is not None and (fence is None or task.admitted != (fence["epoch"], fence["connection"])):
                code = "stale_connection" if fence and fence["epoch"] == task.admitted[0] else "stale_epoch"
                wait = steps.throw(Fail(code, "overtaken by a newer advance", fence=fence))
            else:
                wait = next(steps)
        except StopIteration as stop:
            self._respond(task, stop.value)
        except Fail as fail:
            self._respond(task, fail)
        except OSError as error:
            self._respond(task, fail_of(error))
        except Exception as error:
            place = error.__traceback__
            while place is not None and place.tb_next is not None:
                place = place.tb_next
            line = 0 if place is None else place.tb_lineno
            self._respond(task, Fail("internal", f"{type(error).__name__} at line {line}"))
        else:
            task.suspend(wait)

    def _respond(self, task: Task, answer: Answer | Fail) -> None:
        self.loop.tasks.discard(task)
        if isinstance(answer, Fail):
            error = {"code": answer.code, "message": answer.message, **answer.more}
            task.connection.answer({"id": task.request_id, "error": error}, b"")
        else:
            task.connection.answer({"id": task.request_id, "result": answer[0]}, answer[1])
        if task.admitted is not None:
            self.loop.task_ended.set()

    # --- tests stop and kill us here

    def point(self, name: str) -> Quiet:
        if not self.setting.testing or name not in self.armed:
            return
        entry = self.armed[name]
        if entry[1] > 0:
            entry[1] -= 1
            return
        del self.armed[name]
        if entry[0] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        event = self.held[name] = Event()
        try:
            while self.held.get(name) is event:
                yield Wait(None, event)
        finally:
            if self.held.get(name) is event:
                del self.held[name]

    def op_arm(self, _task: Task, args: Args) -> Steps:
        name = args.choice("point", POINTS)
        action = args.choice("action", ("kill", "hold"))
        skip = args.number("skip", 1_000_000, default=0)
        args.done()
        self.armed[name] = [action, skip]
        return {}, b""
        yield

    def op_release(self, _task: Task, args: Args) -> Steps:
        name = args.choice("point", POINTS)
        args.done()
        if name in self.held:
            self.held.pop(name).set()
        elif name in self.held_shims:
            shim = self.held_shims.pop(name)
            deadline = time.monotonic() + GONE_S
            while not shim.gone and not is_stopped(shim.pid):  # it tells that it is held, and then stops
                self._late(deadline, [shim.pid])
                yield Wait(time.monotonic() + 0.001)
            shim.kill(signal.SIGCONT)
        else:
            raise Fail("not_found", "nothing is held there")
        return {}, b""

    def op_armed(self, _task: Task, args: Args) -> Steps:
        args.done()
        held = [*self.held, *(name for name, shim in self.held_shims.items() if not shim.gone)]
        return {"held": sorted(held), "armed": sorted(self.armed)}, b""
        yield

    def _armed_for_shim(self) -> Json:
        """A shim's points go with its job; one that shall be skipped some times is counted here."""
        out: Json = {}
        for name in [name for name in self.armed if name.startswith("shim.")]:
            if self.armed[name][1] > 0:
                self.armed[name][1] -= 1
            else:
                out[name] = self.armed.pop(name)[0]
        return out

    # --- what lives in the Space

    def flushed_to(self, place: Sequence[int]) -> None:
        """A shim says that the journal of this inode is flushed to here."""
        if place[0] == self.journal.inode:
            self.journal.flushed = max(self.journal.flushed, place[1])

    def refresh(self) -> None:
        """See what shims wrote, and only what is on disk."""
        with self.journal.locked():
            self.journal.confirm()

    def run_ended(self, command: str, shim: ShimHandle) -> None:
        self.runs.pop(command, None)
        self.loop.glance_s = min(WRITING_S, GLANCE_S)
        if not shim.gone and not shim.left and command in self.groups and shim.refusal is None:
            del self.groups[command]
        event = self.ends.pop(command, None)
        if event is not None:
            event.set()

    def _reap_groups(self) -> None:
        for name in [name for name, group in self.groups.items() if name not in self.runs and group.remove()]:
            del self.groups[name]

    def living(self) -> list[Living]:
        """Every process in the Space besides ours."""
        found: list[Living] = []
        self._reap_groups()
        for name, group in self.groups.items():
            found += [Living(name, pid, None) for pid in group.pids()]
        if self.setting.version == 0 or self.look_for_tags:
            found += self._tagged({process.pid for process in found})
        known = {shim.pid for shim in self.shims}
        out: list[Living] = []
        for process in found:
            if process.pid not in known:
                known.add(process.pid)
                out.append(process)
        return out

    def _tagged(self, grouped: set[int]) -> list[Living]:
        """Without cgroups: all below the zygote but shims, and, while that may not be all, all that carry a tag."""
        shims = {shim.pid: shim for shim in self.shims}
        found: dict[int, Living] = {}
        queue: list[tuple[int, str | None]] = [(self.zygote_pid, None)]
        try:
            while queue:
                pid, owner = queue.pop()
                for child in children_of(pid):
                    name = shims[child].current if child in shims else owner
                    if child not in shims:
                        process = read_process(child)
                        if process is None or not (process.parent in (pid, self.zygote_pid) or process.parent in found):
                            continue  # it has ended; the number may be another process's by now
                        found[child] = Living(name or self._owner(child), child, process.ticks)
                    queue.append((child, name))
        except OSError:
            processes = all_processes()
            for pid in descendants(self.zygote_pid, processes):
                if pid not in shims:
                    found[pid] = Living(self._owner(pid), pid, processes[pid].ticks)
        if self.look_for_tags:
            known = grouped if self.setting.version else set[int]()
            tagged = [p for p in tagged_processes(self.setting.space, None) if p.pid not in {*shims, *known}]
            for process in tagged:
                found.setdefault(process.pid, Living(self._owner(process.pid), process.pid, process.ticks))
            if not tagged and all(shim.channel is not None for shim in self.shims):
                self.look_for_tags = False
        return list(found.values())

    def _owner(self, pid: int) -> str | None:
        prefix = f"{self.setting.space}/"
        for tag in reversed(tags_of(pid)):
            if tag.startswith(prefix):
                return tag[len(prefix) :]
        for number in (1, 2):  # one that shed its tag, and still has the output of its command
            with contextlib.suppress(OSError):
                folder, _, name = os.readlink(f"/proc/{pid}/fd/{number}").rpartition("/")
                if name in self.ledger.commands and folder.endswith("/outputs"):
                    return name
        return None

    def freeze(self) -> Generator[Wait | None, None, int]:
        """Stop everything living where it is."""
        if not self.living():
            return 0
        deadline = time.monotonic() + GONE_S
        for group in self.groups.values():
            group.freeze(True)
        stopped: set[int] = set()
        while True:
            living = self.living()
            fresh = False
            for process in living:
                if process.ticks is not None and process.pid not in stopped:
                    process.send(signal.SIGSTOP)
                    stopped.add(process.pid)
                    fresh = True
            moving = any(not group.is_frozen() for group in self.groups.values())
            for process in living:
                if process.ticks is not None:
                    now = read_process(process.pid)
                    moving = moving or (now is not None and now.ticks == process.ticks and now.state not in "Tt")
            if not moving and not fresh:
                return len(living)
            if time.monotonic() > deadline:
                raise Fail("processes_remain", "processes could not be frozen", pids=[p.pid for p in living][:100])
            yield Wait(time.monotonic() + 0.002)

    def thaw(self, but: frozenset[str] = frozenset()) -> int:
        living = self.living()
        for name, group in self.groups.items():
            if name not in but:
                group.freeze(False)
        for process in living:
            if process.command not in but:
                process.send(signal.SIGCONT)
        return len(living)

    def kill(
        self, chosen: Callable[[Command], bool], strays: bool, point: str | None = None
    ) -> Generator[Wait | None, None, int]:
        """Cut off and kill commands and what they left; done when nothing of them is there (rules S15, S17, S18)."""
        deadline = time.monotonic() + GONE_S
        for shim in [shim for shim in self.shims if shim.pending]:
            shim.kill()
            while not shim.gone:
                self._late(deadline, [shim.pid])
                yield Wait(deadline, shim.changed)
        with self.journal.locked():
            self.journal.make_room()
            cut = [
                command.id
                for command in self.ledger.commands.values()
                if chosen(command)
                and command.exit is None
                and not command.cut
                and not command.void
                and command.id in self.runs
            ]
            if cut:
                self.journal.append([{"t": "cut", "x": cut}])
            self.journal.confirm()
        if point is not None:
            yield from self.point(point)
        marked = {command.id for command in self.ledger.commands.values() if chosen(command)}
        killed: set[int] = set()
        for name in marked & set(self.runs):
            shim = self.runs[name]
            shim.kill()  # first: it could start the command yet
            while not shim.gone:
                self._late(deadline, [shim.pid])
                yield Wait(deadline, shim.changed)
        while True:
            remaining = [
                process
                for process in self.living()
                if process.command in marked or (strays and process.command not in self.ledger.commands)
            ]
            if not remaining:
                return len(killed)
            self._late(deadline, [process.pid for process in remaining])
            self._kill_all(remaining)
            killed.update(process.pid for process in remaining)
            yield Wait(time.monotonic() + 0.001)

    def _kill_all(self, processes: Sequence[Living]) -> None:
        """With the groups they are in. A process of a group's command may have left the group: it by itself, too."""
        for name in {process.command for process in processes if process.command in self.groups}:
            self.groups[name].kill()
        for process in processes:
            process.send(signal.SIGKILL)

    def _late(self, deadline: float, pids: Sequence[int]) -> None:
        if time.monotonic() > deadline:
            raise Fail("processes_remain", f"still there after SIGKILL and {GONE_S:g} s", pids=list(pids)[:100])

    # --- commands

    def command_json(self, key: Key) -> Json:
        """Record and liveness as one: what a shim wrote is read after it was seen to be gone (rule S20)."""
        name = exec_id(key)
        out: Json = {"key": key_json(key)}
        running = name in self.runs
        if not running or self.runs[name].channel is None or name not in self.ledger.commands:
            self.refresh()
        command = self.ledger.commands.get(name)
        if self.ledger.below_floor(key) and not self.ledger.lasts(key):
            out.update(state="cut_off", below_floor=True)
        elif command is None:
            out["state"] = "absent"
        elif command.void:
            out["state"] = "void"
        elif command.cut:
            out.update(state="cut_off", below_floor=False, output_size=self._output_size(name))
        elif command.exit is not None:
            end = command.exit
            if end["boot"] != self.boot:
                out["state"] = "unknown"
                return out
            out.update(state="exited", cause=end["cause"], duration_ms=end["ms"], output_size=end["size"])
            out.update({field: end[field] for field in ("code", "signal", "errno", "reason") if field in end})
            out["left"] = self._left(name)
        elif running:
            shim = self.runs[name]
            out.update(state="running", pid=shim.child, started_at=command.at, output_size=self._output_size(name))
        else:
            out["state"] = "unknown"
        return out

    def _left(self, name: str) -> int:
        if self.setting.version and name not in self.groups and not self.look_for_tags:
            return 0
        return sum(process.command == name for process in self.living())

    def _output_size(self, name: str) -> int:
        try:
            return os.stat(f"outputs/{name}", dir_fd=self.state_fd).st_size
        except FileNotFoundError:
            return 0

    def _output(self, key: Key, offset: int, length: int) -> bytes:
        if length == 0:
            return b""
        try:
            descriptor = os.open(
                f"outputs/{exec_id(key)}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self.state_fd
            )
        except FileNotFoundError:
            return b""
        try:
            return os.pread(descriptor, min(length, max(0, os.fstat(descriptor).st_size - offset)), offset)
        finally:
            os.close(descriptor)

    def _may_change(self, place: tuple[int, int]) -> None:
        """Whether a request of this call and attempt may change the workspace now (rules S24, S25)."""
        fence, floor, image = self.ledger.fence, self.ledger.floor, self.ledger.image
        assert fence is not None
        if floor is not None and place < floor:
            raise Fail(
                "below_floor", "this call was undone or forgotten", floor={"call": floor[0], "attempt": floor[1]}
            )
        if image is None or image["log"] != fence["log"] or self.restore is not None:
            raise Fail(
                "no_image", "the workspace does not stand at an image of this log: restore or settle first", image=image
            )

    def follow_workspace(self) -> bool:
        """Work in the directory that the workspace's path names now; whether it is there, and this daemon's."""
        try:
            return self.resolver.renew(lock=True)
        except BlockingIOError:
            return False

    def find_workspace(self, make: bool) -> None:
        """The same; ``make``: a new one where there is none (rule S39)."""
        if self.follow_workspace():
            return
        if make:
            with contextlib.suppress(OSError):
                os.mkdir(self.resolver.prefix, os.fstat(self.resolver.root).st_mode & 0o7777)
            if self.follow_workspace():
                return
        path = text_of(self.resolver.prefix)
        raise Fail(
            "workspace_gone", "the workspace is gone, or is no directory of this daemon's; put it back", path=path
        )

    def _idle_shim(self) -> ShimHandle:
        idle = [shim for shim in self.shims if shim.current is None and shim.channel is not None and not shim.gone]
        for spare in idle[IDLE_SHIMS:]:
            spare._forget_channel()  # pyright: ignore[reportPrivateUsage]
        if idle:
            return idle[0]
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self.zygote, [b"f"], [theirs.fileno()])
                pid = struct.unpack("!I", self.zygote.recv(4))[0]
            except (OSError, struct.error):
                ours.close()
                self.loop.stopping = True
                raise Fail("internal", "the zygote is gone; restart the daemon") from None
        process = read_process(pid)
        if process is None or process.parent != self.zygote_pid:
            ours.close()
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        shim = ShimHandle(self, pid, process.ticks, ours)
        self.shims.add(shim)
        return shim

    def _hand_over(self, job: Json) -> ShimHandle:
        """Give a job to an idle shim. One that was killed while it idled has not got it: then to another one."""
        for _ in range(IDLE_SHIMS + 2):
            shim = None
            try:
                shim = self._idle_shim()
                shim.send(job)
            except OSError:
                if shim is not None:
                    shim.kill()
                    shim._forget_channel()  # pyright: ignore[reportPrivateUsage]
                continue
            shim.refusal, shim.found, shim.left, shim.child = None, None, False, 0
            return shim
        raise Fail("busy", "every shim is killed before it gets its job")

    def op_start(self, task: Task, args: Args) -> Steps:
        fence = self.ledger.fence
        assert fence is not None
        assert task.admitted is not None
        key = key_of(args.mapping("key"), fence["log"])
        shell = args.text("shell", 131_000, None)
        argv = args.items("argv", 10_000, None) if shell is None else ["/bin/sh", "-c", shell]
        words = [checked_text(word, "argv", 131_000) for word in argv]
        if not words or not words[0]:
            raise Fail("bad_request", "argv must name a program")
        cwd = args.path("cwd", "")
        env = args.mapping("env", {})
        for name, value in env.items():
            if not name or "=" in checked_text(name, "env", 1000):
                raise Fail("bad_request", "a name in env is empty or contains =")
            if value is not None:
                checked_text(value, "env", 131_000)
        timeout_ms = args.number("timeout_ms", TIMEOUT_MS, 1, None)
        limits = args.mapping("limits", {})
        for name, value in limits.items():
            if name != "output_bytes" and name not in _RLIMITS:
                raise Fail("bad_request", f"unknown limit {name[:100]}")
            count_of(value, name, 1 << 50, 1)
        wait_ms = args.number("wait_ms", WAIT_MS, default=0)
        offset, length = args.number("offset", 1 << 50, default=0), args.number("length", BODY_BYTES, default=0)
        patient = args.flag("until_exit")
        lasting = args.flag("lasting")
        args.done()
        digest = sha256(compact([words, text_of(cwd), timeout_ms, sorted(limits.items()), *["lasting"] * lasting]))
        yield from self.point("start.admitted")
        name = exec_id(key)
        fresh = False
        patience = time.monotonic() + STALL_S
        while name in self.runs and self.runs[name].pending:
            self._patient(patience)
            yield Wait(patience, self.runs[name].changed)
        self.refresh()
        known = self.ledger.commands.get(name)
        if self.ledger.below_floor(key):
            raise Fail("below_floor", "this call was undone or forgotten")
        if known is not None and known.void:
            raise Fail("void", "this key was voided; go on under a new attempt")
        if known is not None and known.digest != digest:
            raise Fail("conflict", "this key was started as another command")
        if known is None:
            self._may_change((key[1], key[2]))
            self.find_workspace(make=True)
            if len(self.runs) >= RUNNING:
                raise Fail("busy", "too many commands run", limit=RUNNING)
            if len(self.ledger.commands) >= LEDGER:
                raise Fail("busy", "too many keys are not forgotten", limit=LEDGER)
            if self.journal.room < 2 * JOURNAL_MARGIN:
                with self.journal.locked():
                    self.journal.make_room()
                if self.journal.room < 2 * JOURNAL_MARGIN:
                    raise Fail("no_space", "the disk is full; free some and try again")
            fresh = True
            job: Json = {
                "x": name, "key": key, "argv": words, "cwd": text_of(cwd), "env": env, "timeout_ms": timeout_ms,
                "limits": {k: v for k, v in limits.items() if k != "output_bytes"}, "digest": digest,
                "output_bytes": limits.get("output_bytes", OUTPUT_BYTES), "inode": self.journal.inode,
                "position": self.journal.position, "fence": fence, "floor": self.ledger.floor,
                "fenced": [fence["log"], *task.admitted], "armed": self._armed_for_shim(), "lasting": lasting,
            }  # fmt: skip
            shim = self._hand_over(job)
            shim.current, shim.pending = name, True
            self.runs[name] = shim
            if self.setting.version:
                self.groups[name] = Cgroup(f"{self.setting.base}/{name}", self.setting.version)
            yield from self.point("start.forked")
            while shim.current == name and shim.pending:
                self._patient(patience)
                yield Wait(patience, shim.changed)
            if shim.refusal is not None:
                self.groups.pop(name, None)
                raise shim.refusal
            if shim.gone and name not in self.ledger.commands:
                self.refresh()
                if name not in self.ledger.commands:
                    raise Fail(
                        "busy", "the shim was killed before it recorded anything; void the key or start it again"
                    )
            yield from self.point("start.answered")
        result, body = yield from self._waited(key, wait_ms, offset, length, patient)
        result["fresh"] = fresh
        return result, body

    def _patient(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise Fail("busy", f"the shim has not recorded anything for {STALL_S:g} s; look, or void the key")

    def _waited(self, key: Key, wait_ms: int, offset: int, length: int, patient: bool) -> Steps:
        name = exec_id(key)
        deadline = time.monotonic() + wait_ms / 1000
        pause = 0.01
        while True:
            if name not in self.runs or time.monotonic() >= deadline:
                break
            watches = length > 0 and not patient
            if watches and self._output_size(name) > offset:
                break
            end = self.ends.setdefault(name, Event())
            until = deadline if not watches else min(deadline, time.monotonic() + pause)
            pause = min(pause * 1.5, 0.1)
            yield Wait(until, end)
        result = self.command_json(key)
        return result, self._output(key, offset, length) if result["state"] != "absent" else b""

    def _key(self, args: Args) -> Key:
        assert self.ledger.fence is not None
        return key_of(args.mapping("key"), self.ledger.fence["log"])

    def op_wait(self, _task: Task, args: Args) -> Steps:
        key = self._key(args)
        wait_ms = args.number("wait_ms", WAIT_MS, default=0)
        offset, length = args.number("offset", 1 << 50, default=0), args.number("length", BODY_BYTES, default=0)
        patient = args.flag("until_exit")
        args.done()
        return (yield from self._waited(key, wait_ms, offset, length, patient))

    def op_look(self, _task: Task, args: Args) -> Steps:
        assert self.ledger.fence is not None
        keys = [key_of(key, self.ledger.fence["log"]) for key in args.items("keys", KEYS)]
        args.done()
        return {"commands": [self.command_json(key) for key in keys], **self._stand()}, b""
        yield

    def _stand(self) -> Json:
        floor = self.ledger.floor
        return {
            "image": self.ledger.image,
            "floor": None if floor is None else {"call": floor[0], "attempt": floor[1]},
        }

    def op_void(self, _task: Task, args: Args) -> Steps:
        key = self._key(args)
        args.done()
        name = exec_id(key)
        with self.journal.locked():
            if name not in self.ledger.commands and not self.ledger.below_floor(key):
                self.journal.make_room()
                self.journal.append([{"t": "void", "x": name, "key": key}])
        yield from self.point("void.synced")
        return self.command_json(key), b""

    def op_kill(self, _task: Task, args: Args) -> Steps:
        key = self._key(args)
        cause = args.choice("cause", ("aborted", "timeout"))
        args.done()
        name = exec_id(key)
        deadline = time.monotonic() + GONE_S
        with self.journal.locked():
            command = self.ledger.commands.get(name)
            if command is not None and command.exit is None and not command.cut and command.stop is None:
                self.journal.append([{"t": "stop", "x": name, "cause": cause}])
        yield from self.point("kill.recorded")
        while True:
            living = [process for process in self.living() if process.command == name]
            if not living and name not in self.runs:
                break
            self._late(deadline, [process.pid for process in living])
            self._kill_all(living)
            end = [self.ends.setdefault(name, Event())] if name in self.runs else []
            yield Wait(time.monotonic() + 0.005, *end)
        return self.command_json(key), b""

    def op_freeze(self, _task: Task, args: Args) -> Steps:
        args.done()
        return {"living": (yield from self.freeze())}, b""

    def op_thaw(self, _task: Task, args: Args) -> Steps:
        args.done()
        return {"living": self.thaw()}, b""
        yield

    # --- who has the Space

    def op_status(self, _task: Task, args: Args) -> Steps:
        args.done()
        self.refresh()
        living = self.living()
        shown = {process.command for process in living if process.command is not None} | set(self.runs)
        commands = [
            self.command_json(self.ledger.commands[name].key)
            for name in sorted(name for name in shown if name in self.ledger.commands)[:NAMED]
        ]
        return {
            "protocol": PROTOCOL,
            "space": self.options.space,
            "generation": self.options.generation,
            "boot": self.boot,
            "instance": self.instance,
            "pid": os.getpid(),
            "python": ".".join(map(str, sys.version_info[:3])),
            "workspace": text_of(self.resolver.prefix),
            "containment": f"cgroup{self.setting.version}" if self.setting.version else "none",
            "testing": self.setting.testing,
            "fence": self.ledger.fence,
            "advanced": self.advanced,
            **self._stand(),
            "restoring": self.restore is not None,
            "commands": commands,
            "living": len(living),
            "connections": sum(connection.known for connection in self.loop.connections),
            "limits": {
                "header_bytes": HEADER_BYTES, "body_bytes": BODY_BYTES, "wait_ms": WAIT_MS,
                "connections": self.options.connections, "keys": KEYS, "running": RUNNING, "page": PAGE,
                "inline_bytes": INLINE_BYTES, "chunk_bytes": CHUNK,
            },
        }, b""  # fmt: skip
        yield

    def op_advance(self, task: Task, args: Args) -> Steps:
        log = args.text("log", 128)
        epoch = args.number("epoch", _BIG, 1)
        writer = args.text("writer", 128)
        number = args.number("connection", _BIG, 1)
        keys = [key_of(key, log) for key in args.items("keep", KEYS)]
        for outcome in args.items("outcomes", ITEMS):
            if Args({"place": outcome}, b"").place("place") is None:
                raise Fail("bad_request", "an outcome must be {call, attempt}")
        args.done()
        kept = frozenset(exec_id(key) for key in keys)
        yield from self.point("advance.begin")
        with self.journal.locked():
            fence = self.ledger.fence
            given = {"log": log, "epoch": epoch, "writer": writer, "connection": number}
            if fence is not None:
                if epoch < fence["epoch"]:
                    raise Fail("stale_epoch", "a newer driver has the Space", fence=fence, given=given)
                if epoch == fence["epoch"] and (writer, log) != (fence["writer"], fence["log"]):
                    raise Fail("stale_epoch", "another driver has the Space at this epoch", fence=fence, given=given)
                if epoch == fence["epoch"] and number <= fence["connection"]:
                    raise Fail("stale_connection", "advance needs a higher connection number", fence=fence, given=given)
            self.journal.make_room()
            keep = [name for name in kept if name in self.ledger.commands]
            self.journal.append([{"t": "fence", "keep": keep, **given}])
        task.admitted = (epoch, number)
        self.advanced = False
        self.restore = None
        self.scan = None
        for other in self.loop.tasks:
            if other is not task and other.admitted is not None:
                other.wake()
        yield from self.point("advance.fenced")
        while any(other is not task and other.admitted not in (None, task.admitted) for other in self.loop.tasks):
            yield Wait(None, self.loop.task_ended)
        killed = yield from self.kill(lambda command: command.epoch < epoch, True, "advance.cut")
        self.thaw(kept)
        self._drop_old()
        yield from self.point("advance.killed")
        self.advanced = True
        return {
            "epoch": epoch,
            "connection": number,
            "boot": self.boot,
            "generation": self.options.generation,
            "instance": self.instance,
            **self._stand(),
            "killed": killed,
            "commands": [self.command_json(key) for key in keys],
        }, b""

    def _drop_old(self) -> None:
        gone = self._forgettable()
        if gone:
            with self.journal.locked():
                self.journal.append([{"t": "drop", "x": gone}])
            self._unlink_outputs(gone)

    def _forgettable(self, floor: tuple[int, int] | None = None) -> list[str]:
        """Commands that count no longer and of which nothing lives."""
        alive = {process.command for process in self.living()}
        ended = [
            command
            for command in self.ledger.commands.values()
            if (self.ledger.below_floor(command.key) or (floor is not None and command.place < floor))
            and command.id not in alive
            and command.id not in self.runs
        ]
        lasting = sorted((c for c in ended if self.ledger.lasts(c.key)), key=lambda c: (c.at, c.key))
        kept = {command.id for command in lasting[-LASTING:]}
        return [command.id for command in ended if command.id not in kept]

    def _unlink_outputs(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"outputs/{name}", dir_fd=self.state_fd)

    def op_shutdown(self, _task: Task, args: Args) -> Steps:
        kill = args.flag("kill")
        args.done()
        if kill:
            self.advanced = False
            yield from self.kill(lambda command: True, True)
        self.loop.later(self._stop)
        return {}, b""

    def _stop(self) -> None:
        self.loop.stopping = True

    def glance(self) -> None:
        """Without its state nobody finds this daemon again: it kills what lives in the Space, and ends (rule S40)."""
        try:
            os.stat(Journal.NAME, dir_fd=self.state_fd)  # wherever the directory was moved to
        except FileNotFoundError:
            self.abandoned = True
            self._kill_abandoned()
            self._stop()
            return
        except OSError:
            return  # a file system in trouble is still there
        grew = False
        with contextlib.suppress(OSError, Fail):
            grew = self._cut_outputs()
        self.loop.glance_s = min(WRITING_S, GLANCE_S) if grew else GLANCE_S

    def _cut_outputs(self) -> bool:
        """What ended commands left has its outputs yet, and may write to them for ever: that is bounded (rule S7).
        Whether one grew since the last look."""
        before, self.written = self.written, {}
        folder = os.open("outputs", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.state_fd)
        try:
            for name in os.listdir(folder):
                if name not in self.runs:
                    self.written[name] = os.stat(name, dir_fd=folder).st_size
            if any(size > LEFT_BYTES for size in self.written.values()):
                self.refresh()
            for name, size in self.written.items():
                command = self.ledger.commands.get(name)
                end = None if command is None else command.exit
                its_own = OUTPUT_BYTES if end is None else end["size"]
                if size > its_own + LEFT_BYTES:
                    output = os.open(name, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
                    try:
                        os.ftruncate(output, its_own)
                    finally:
                        os.close(output)
        finally:
            os.close(folder)
        return any(size > before.get(name, size) for name, size in self.written.items())

    def _kill_abandoned(self) -> None:
        """Without the journal, and in one step: no request goes on after it."""
        deadline = time.monotonic() + GONE_S
        for shim in self.shims:
            shim.kill()
        while (living := self.living()) and time.monotonic() < deadline:
            for group in self.groups.values():
                group.kill()
            self._kill_all(living)
            time.sleep(0.005)

    # --- images

    def survey(
        self, known: dict[bytes, Item], largest: int, opening: bool = False
    ) -> Generator[Wait | None, None, Survey]:
        living = self.living()
        written = written_files(process.pid for process in living) if living else set[tuple[int, int]]()
        surveying = Surveying(self.loop, known, largest, written, opening)
        try:
            yield from surveying.run(self.resolver.root)
        except OSError as error:
            raise fail_of(error) from None
        return surveying.found

    def op_scan(self, _task: Task, args: Args) -> Steps:
        freeze, sync, full = args.flag("freeze"), args.flag("sync"), args.flag("full")
        inline = args.number("inline_bytes", INLINE_BYTES, default=0)
        largest = args.number("max_file_bytes", MOST_FILE_BYTES, default=FILE_BYTES)
        page = args.number("page", PAGE, 1, PAGE)
        args.done()
        if freeze:
            yield from self.freeze()
        self.find_workspace(make=freeze)
        yield from self.point("scan.frozen")
        known: dict[bytes, Item] = {} if full else self.index.items
        survey = yield from self.survey(known, largest)
        yield from self.point("scan.walked")
        image = self.ledger.image
        label = self.index.label
        based = not full and image is not None and label == (image["log"], image["commit"], image["nonce"])
        base = self.index.items if based else {}
        changes: list[tuple[bytes, str]] = []
        for path in sorted(survey.fresh if base is known else survey.items):
            old, item = base.get(path), survey.items[path]
            if old is None:
                changes.append((path, "added"))
            elif old is not item and not old.same(item):
                changes.append((path, "changed"))
        skipped = {raw_of(named["path"], "path") for named in [*survey.too_large, *survey.special, *survey.unreadable]}
        if base is not known or survey.matched != len(base):
            changes += [(path, "removed") for path in base if path not in survey.items and path not in skipped]
        written = survey.touched or bool(changes)
        if sync and written:
            yield from self._flush_workspace()
        yield from self.point("scan.synced")
        self.scans += 1
        scan = self.scan = Scan(self.scans, survey, known, changes, based)
        scan.flushed = sync or not written
        body = self._inline(scan, inline)
        shown, following = scan.page(0, page)
        living = self.living()
        return {
            "scan": scan.number,
            "base": None if not based or label is None else dict(zip(("log", "commit", "nonce"), label)),
            "changes": shown,
            "next": following,
            "total": len(changes),
            "hashed_bytes": survey.hashed,
            "special": named(survey.special),
            "special_count": len(survey.special),
            "too_large": named(survey.too_large),
            "too_large_count": len(survey.too_large),
            "unreadable": named(survey.unreadable),
            "unreadable_count": len(survey.unreadable),
            "living": len(living),
            "left": [
                key_json(self.ledger.commands[name].key)
                for name in sorted({p.command for p in living if p.command is not None} - set(self.runs))
                if name in self.ledger.commands
            ],
            "image": image,
            "entries": len(survey.items),
            "bytes": survey.bytes,
        }, body

    def _inline(self, scan: Scan, most: int) -> bytes:
        body = bytearray()
        for path, how in scan.changes:
            if how == "removed":
                continue
            item = scan.survey.items[path]
            if item.kind != "file" or item.size == 0 or len(body) + item.size > most:
                continue
            try:
                content = self._content(path, 0, item.size)
            except (Fail, OSError):
                continue
            if sha256(content) == item.sha:
                scan.inline[path] = (len(body), item.size)
                body += content
        return bytes(body)

    def _content(self, path: bytes, offset: int, length: int) -> bytes:
        with self.resolver.parent(path, follow=False) as (parent, name):
            descriptor = open_regular(name, parent, path)
            try:
                out = b""
                while len(out) < length:
                    block = os.pread(descriptor, length - len(out), offset + len(out))
                    if not block:
                        break
                    out += block
                return out
            finally:
                os.close(descriptor)

    def _flush_workspace(self) -> Quiet:
        root = self.resolver.root
        yield from self.loop.offload(lambda: sync_filesystem(root))

    def _scan(self, number: int) -> Scan:
        if self.scan is None or self.scan.number != number:
            raise Fail("unknown_scan", "only the newest scan is kept; scan again")
        return self.scan

    def op_scan_page(self, _task: Task, args: Args) -> Steps:
        scan = self._scan(args.number("scan", _BIG))
        start = args.number("from", _BIG)
        args.done()
        changes, following = scan.page(start, PAGE)
        return {"changes": changes, "next": following}, b""
        yield

    def op_chunks(self, _task: Task, args: Args) -> Steps:
        wanted: list[tuple[bytes, int, int, str]] = []
        total = 0
        for entry in args.items("items", ITEMS):
            item = Args(dict(object_of(entry, "an item")), b"")
            path, offset, length = item.path(), item.number("offset", 1 << 50), item.number("length", BODY_BYTES)
            wanted.append((path, offset, length, digest_of(item.text("sha256", 64), "sha256")))
            item.done()
            total += length
            if total > BODY_BYTES:
                raise Fail("too_large", "the items are more than a body", limit=BODY_BYTES)
        args.done()
        body = bytearray()
        for path, offset, length, digest in wanted:
            content = self._content(path, offset, length)
            if sha256(content) != digest:
                raise Fail("changed", "the file holds something else by now", path=text_of(path))
            body += content
            yield None
        return {}, bytes(body)

    def op_settle(self, _task: Task, args: Args) -> Steps:
        commit = args.number("commit", _BIG, default=None)
        nonce = args.text("nonce", NONCE, "")
        number = args.number("scan", _BIG, default=None)
        floor = args.place("floor")
        thaw = args.flag("thaw")
        args.done()
        scan = None if number is None else self._scan(number)
        if scan is not None and commit is None:
            raise Fail("bad_request", "scan needs commit")
        yield from self.point("settle.begin")
        if self.restore is not None:
            raise Fail("restoring", "a restore is under way; it sets the image record itself")
        if scan is not None and not scan.flushed:
            yield from self._flush_workspace()
            scan.flushed = True
            if self.restore is not None:
                raise Fail("restoring", "a restore is under way; it sets the image record itself")
        fence = self.ledger.fence
        assert fence is not None
        with self.journal.locked():
            self.journal.make_room()
            records: list[Json] = []
            if commit is not None:
                records.append(self._image_record(commit, nonce))
            if floor is not None:
                records.append({"t": "floor", "at": floor})
            gone = self._forgettable(floor)
            if gone:
                records.append({"t": "drop", "x": gone})
            if records:
                self.journal.append(records)
        self._unlink_outputs(gone)
        if commit is not None:
            label = label_of(fence["log"], commit, nonce)
            if scan is None:
                self.index.stand(None, self.index.items, [])
            else:
                self._index_scan(label, scan)
        yield from self.point("settle.synced")
        if thaw:
            self.thaw()
        return self._stand(), b""

    def _image_record(self, commit: int, nonce: str) -> Json:
        assert self.ledger.fence is not None
        image = {"log": self.ledger.fence["log"], "commit": commit, "nonce": nonce, "boot": self.boot}
        return {"t": "image", "image": image}

    def _index_scan(self, label: Label, scan: Scan) -> None:
        changed = {*scan.survey.fresh, *(path for path, _ in scan.changes)}
        self.index.stand(label, scan.survey.items, changed if self.index.items is scan.known else None)

    # --- restore

    def _restore(self, args: Args) -> Restore:
        number = args.number("restore", _BIG)
        if self.restore is None or self.restore.number != number:
            raise Fail("restoring", "no such restore is under way")
        return self.restore

    def op_restore_begin(self, _task: Task, args: Args) -> Steps:
        floor = args.place("floor")
        commit = args.number("commit", _BIG)
        nonce = args.text("nonce", NONCE, "")
        args.done()
        yield from self.point("restore.begin")
        with self.journal.locked():
            self.journal.make_room()
            records: list[Json] = [] if floor is None else [{"t": "floor", "at": floor}]
            self.journal.append([*records, {"t": "image", "image": None}])
        self.scan = None
        self.restores += 1
        assert self.ledger.fence is not None
        restore = self.restore = Restore(self.restores, label_of(self.ledger.fence["log"], commit, nonce))
        yield from self.point("restore.floor")
        yield from self.kill(lambda command: True, True)
        self.find_workspace(make=True)
        yield from self.point("restore.killed")
        restore.known = self.index.label == restore.label
        return {"restore": restore.number, "known": restore.known}, b""

    def op_restore_image(self, _task: Task, args: Args) -> Steps:
        restore = self._restore(args)
        args.done(body=True)
        found: dict[bytes, Item] = {}
        for entry in json_array(args.body):
            path, item = image_entry(entry)
            found[path] = item
        if len(restore.target) + len(found) > IMAGE_ENTRIES:
            raise Fail("too_large", "the image has too many entries", limit=IMAGE_ENTRIES)
        restore.target.update(found)
        restore.given, restore.survey = True, None
        return {"entries": len(restore.target)}, b""
        yield

    def op_restore_plan(self, _task: Task, args: Args) -> Steps:
        restore = self._restore(args)
        start = args.number("from", _BIG, default=0)
        page = args.number("page", PAGE, 1, PAGE)
        args.done()
        if start == 0 or restore.survey is None:
            yield from self._plan(restore)
        assert restore.survey is not None
        missing: list[str] = []
        displaced: list[Json] = []
        size, at, both = 0, start, len(restore.missing) + len(restore.displaced)
        while at < both and len(missing) + len(displaced) < page and size < PAGE_BYTES:
            if at < len(restore.missing):
                missing.append(restore.missing[at])
                size += 70
            else:
                path = restore.displaced[at - len(restore.missing)]
                entry = restore.survey.items[path].entry(path)
                if entry["size"] > MOST_FILE_BYTES:
                    del entry["chunks"]
                displaced.append(entry)
                size += 200 + json_size(path) + 70 * len(entry.get("chunks", ()))
            at += 1
        return {
            "missing": missing,
            "missing_total": len(restore.missing),
            "displaced": displaced,
            "displaced_total": len(restore.displaced),
            "next": at if at < both else None,
        }, b""

    def _plan(self, restore: Restore) -> Quiet:
        known = self.index.items
        if restore.given:
            self._add_parents(restore.target)
        elif restore.known:
            restore.target = known
        else:
            raise Fail("bad_request", "send the image first: the index does not stand at it")
        survey = yield from self.survey(known, 1 << 62, opening=True)
        if survey.unreadable:
            raise Fail("permission_denied", "a path of the workspace cannot be read", **survey.unreadable[0])
        target = restore.target
        looked = {*survey.beyond, *(raw_of(named["path"], "path") for named in survey.special)}
        if target is not known:
            looked.update(target, survey.items)
        else:
            looked.update(survey.fresh)
            if survey.matched != len(known):
                looked.update(path for path in known if path not in survey.items)
        restore.differing = []
        needed: dict[str, None] = {}
        displaced: list[bytes] = []
        for path in sorted(looked):
            now, wanted = survey.items.get(path), target.get(path)
            if now is None and wanted is None:
                continue
            if now is not None and wanted is not None and (now is wanted or now.same(wanted)):
                continue
            restore.differing.append(path)
            same = now is not None and wanted is not None and now.kind == wanted.kind and now.sha == wanted.sha
            if wanted is not None and wanted.kind == "file" and not same:
                needed.update(dict.fromkeys(wanted.parts()))
            if now is not None and now.kind == "file" and not same:
                displaced.append(path)
        restore.survey, restore.displaced = survey, displaced
        restore.missing = [digest for digest in needed if digest not in self.staged]

    def _add_parents(self, target: dict[bytes, Item]) -> None:
        for path in list(target):
            while b"/" in path:
                path = path.rpartition(b"/")[0]
                if path not in target:
                    target[path] = Item("directory", 0o755)
                elif target[path].kind != "directory":
                    raise Fail("bad_request", "an entry lies below one that is no directory", path=text_of(path))
                else:
                    break

    def op_missing(self, _task: Task, args: Args) -> Steps:
        digests = [digest_of(digest, "digests") for digest in args.items("digests", ITEMS)]
        args.done()
        return {"missing": [digest for digest in digests if digest not in self.staged]}, b""
        yield

    def op_put(self, _task: Task, args: Args) -> Steps:
        sizes = [count_of(size, "sizes", CHUNK) for size in args.items("sizes", ITEMS, default=[len(args.body)])]
        args.done(body=True)
        if sum(sizes) != len(args.body):
            raise Fail("bad_request", "the sizes are not those of the body")
        digests: list[str] = []
        at = 0
        for size in sizes:
            chunk = args.body[at : at + size]
            at += size
            digest = sha256(chunk)
            digests.append(digest)
            if digest not in self.staged:
                self._write_state(f"staging/{digest}", [chunk])
                self.staged[digest] = size
                yield None
        return {"digests": digests}, b""

    def _write_state(self, name: str, blocks: Iterable[bytes]) -> None:
        """A file of the state directory, whole or not at all."""
        temporary = f"{name}.new"
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=self.state_fd
        )
        try:
            for block in blocks:
                write_all(descriptor, block)
        except BaseException:
            os.unlink(temporary, dir_fd=self.state_fd)
            raise
        finally:
            os.close(descriptor)
        os.rename(temporary, name, src_dir_fd=self.state_fd, dst_dir_fd=self.state_fd)

    def _staged_chunk(self, digest: str) -> bytes:
        try:
            descriptor = os.open(f"staging/{digest}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self.state_fd)
        except FileNotFoundError:
            content = b""
        else:
            try:
                content = os.read(descriptor, CHUNK + 1)
            finally:
                os.close(descriptor)
        if sha256(content) != digest:
            self.staged.pop(digest, None)
            raise Fail("missing", "contents were not put", digests=[digest])
        return content

    def op_restore_apply(self, _task: Task, args: Args) -> Steps:
        restore = self._restore(args)
        preserve = args.choice("preserve", ("all", "none", "listed"))
        most = args.number("preserve_bytes", RECOVERY_BYTES, default=PRESERVE_BYTES)
        name = args.text("name", 200, None)
        args.done(body=preserve == "listed")
        if name is not None and (not name or name.startswith(".") or "/" in name):
            raise Fail("bad_request", "name must be a plain file name")
        survey = restore.survey
        if survey is None:
            raise Fail("bad_request", "plan first")
        absent = [digest for digest in restore.missing if digest not in self.staged]
        if absent:
            raise Fail("missing", "contents were not put", digests=absent[:1000], total=len(absent))
        keep: set[bytes] = set()
        if preserve == "all":
            keep = set(restore.displaced)
        elif preserve == "listed":
            keep = {raw_of(path, "path") for path in json_array(args.body)} & set(restore.displaced)
        mover = Mover(self, restore, survey, keep, most, name)
        step = restore.target is self.index.items
        try:
            yield from mover.stage()
            yield from self.point("restore.staged")
            yield from mover.swap()
            yield from self.point("restore.swapped")
            yield from self._flush_workspace()
            items, changed = mover.result()
        except (FileNotFoundError, NotADirectoryError):
            raise Fail("changed", "something was removed since the plan; plan anew") from None
        except OSError as error:
            raise fail_of(error) from None
        finally:
            mover.clean()
        with self.journal.locked():
            self.journal.make_room()
            self.journal.append([self._image_record(*restore.label[1:])])
        self.restore = None
        self.index.stand(restore.label, items, changed if step else None)
        for digest in list(self.staged):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"staging/{digest}", dir_fd=self.state_fd)
        self.staged.clear()
        yield from self.point("restore.image")
        return {
            "image": self.ledger.image,
            "written": mover.written,
            "removed": mover.removed,
            "preserved": mover.preserved,
            "recovery": mover.recovery,
            "not_preserved": [item["path"] for item in named([{"path": text_of(path)} for path in mover.dropped])],
            "not_preserved_count": len(mover.dropped),
        }, b""

    # --- files

    def op_read(self, _task: Task, args: Args) -> Steps:
        path = args.path()
        offset, length = (
            args.number("offset", 1 << 50, default=0),
            args.number("length", BODY_BYTES, default=BODY_BYTES),
        )
        args.done()
        self.follow_workspace()
        with self.resolver.regular(path) as descriptor:
            status = os.fstat(descriptor)
            body = os.pread(descriptor, min(length, max(0, status.st_size - offset) or length), offset)
        return {"size": status.st_size, "mode": status.st_mode & 0o7777, "length": len(body)}, body
        yield

    def op_stat(self, _task: Task, args: Args) -> Steps:
        path = args.path()
        follow = args.flag("follow", True)
        args.done()
        self.follow_workspace()
        try:
            with self.resolver.parent(path, follow) as (parent, name):
                status = os.stat(name, dir_fd=parent, follow_symlinks=False)
                return stat_json(name, status), b""
        except Fail as fail:
            if fail.code in ("not_found", "not_a_directory"):
                return {"kind": None}, b""
            raise
        yield

    def op_list(self, _task: Task, args: Args) -> Steps:
        path = args.path()
        out = Bounded(args.number("limit", LIST_ENTRIES, 1, LIST_ENTRIES))
        args.done()
        self.follow_workspace()
        with self.resolver.directory(path) as descriptor:
            for name, status in list_directory(descriptor):
                if not out.add(stat_json(name, status), json_size(name) + 120):
                    break
        return {"entries": out.found, "more": out.more}, b""
        yield

    def _look_through(self, query: Json, wait_ms: int, late: Json) -> Steps:
        """In a process of its own, which is killed when it takes too long."""
        while sum(shim.current == "" for shim in self.shims) >= 4:
            yield Wait(time.monotonic() + 0.01)
        shim = self._hand_over({"look": query})
        shim.current = ""
        deadline = time.monotonic() + wait_ms / 1000
        try:
            while shim.current == "" and not shim.gone and time.monotonic() < deadline:
                yield Wait(deadline, shim.changed)
            if shim.refusal is not None:
                raise shim.refusal
            return (late if shim.found is None else shim.found), b""
        finally:
            if shim.current == "":
                shim.kill()

    def op_walk(self, _task: Task, args: Args) -> Steps:
        query = {
            "op": "walk", "path": text_of(args.path(default="")), "pattern": args.text("pattern", 4096, None),
            "kind": args.choice("kind", KINDS) if "kind" in args.fields else None,
            "ignored": args.flag("ignored", True), "hidden": args.flag("hidden", True),
            "limit": args.number("limit", LIST_ENTRIES, 1, LIST_ENTRIES),
        }  # fmt: skip
        wait_ms = args.number("wait_ms", WAIT_MS, 1, WAIT_MS)
        args.done()
        return (yield from self._look_through(query, wait_ms, {"entries": [], "more": True, "timed_out": True}))

    def op_glob(self, _task: Task, args: Args) -> Steps:
        query = {
            "op": "glob", "path": text_of(args.path(default="")), "pattern": args.text("pattern", 4096),
            "limit": args.number("limit", LIST_ENTRIES, 1, LIST_ENTRIES),
        }  # fmt: skip
        args.done()
        return (yield from self._look_through(query, WAIT_MS, {"paths": [], "more": True}))

    def op_grep(self, _task: Task, args: Args) -> Steps:
        query = {
            "op": "grep", "path": text_of(args.path(default="")), "pattern": args.text("pattern", 4096),
            "fixed": args.flag("fixed"), "ignore_case": args.flag("ignore_case"), "glob": args.text("glob", 4096, None),
            "limit": args.number("limit", LIST_ENTRIES, 1, 1000), "ignored": args.flag("ignored", True),
            "context": args.number("context", GREP_CONTEXT, default=0),
        }  # fmt: skip
        wait_ms = args.number("wait_ms", WAIT_MS, 1, 10_000)
        args.done()
        late: Json = {"matches": [], "more": True, "timed_out": True, "skipped": 0}
        return (yield from self._look_through(query, wait_ms, late))

    def _place(self, args: Args) -> tuple[int, int]:
        place = (args.number("call", _BIG), args.number("attempt", _BIG))
        args.text("nonce", NONCE)
        return place

    def op_write(self, _task: Task, args: Args) -> Steps:
        path = args.path()
        place = self._place(args)
        mode = args.number("mode", 0o7777, default=None)
        parents = args.flag("parents", True)
        expect = args.text("expect", 64, None)
        if expect is not None and expect != "absent":
            digest_of(expect, "expect")
        chunks = args.items("chunks", ITEMS, None) if "chunks" in args.fields else None
        args.done(body=chunks is None)
        digests = None if chunks is None else [digest_of(chunk, "chunks") for chunk in chunks]
        yield from self.point("write.admitted")
        self._may_change(place)
        self.find_workspace(make=True)
        if parents:
            self._make_parents(path)
        with self.resolver.parent(path) as (parent, name):
            if name == b".":
                raise Fail("is_a_directory", "a directory, not a file", path=text_of(path))
            old = self._replaceable(parent, name, path, expect)
            temporary = b".perdure-" + secrets.token_hex(8).encode("ascii")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            # nobody else reads what may be a secret before it has its mode
            descriptor = os.open(temporary, flags, 0o666 if mode is None and old is None else 0o600, dir_fd=parent)
            try:
                try:
                    if digests is None:
                        write_all(descriptor, args.body)
                    else:
                        yield from self.loop.offload(lambda: self._compose(descriptor, digests))
                    size = os.fstat(descriptor).st_size
                    if old is not None:
                        keep_owner(descriptor, old)
                    if mode is not None or old is not None:
                        # as any write: set-user-ID goes with the old content
                        os.fchmod(descriptor, mode if mode is not None else (old.st_mode & 0o777 if old else 0))
                    final = os.fstat(descriptor).st_mode & 0o7777
                finally:
                    os.close(descriptor)
                yield from self.point("write.staged")
                self._may_change(place)
                if expect is not None:
                    self._replaceable(parent, name, path, expect)
                os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=parent)
                raise
        yield from self.point("write.renamed")
        return {"created": old is None, "size": size, "mode": final}, b""

    def _compose(self, descriptor: int, digests: Sequence[str]) -> None:
        for digest in digests:
            write_all(descriptor, self._staged_chunk(digest))

    def _replaceable(self, parent: int, name: bytes, path: bytes, expect: str | None) -> os.stat_result | None:
        try:
            old = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            if expect not in (None, "absent"):
                raise Fail("changed", "there is no such file", path=text_of(path)) from None
            return None
        if not stat.S_ISREG(old.st_mode):
            code = "is_a_directory" if stat.S_ISDIR(old.st_mode) else "special_file"
            raise Fail(code, "not a regular file", path=text_of(path))
        if not os.access(name, os.W_OK, dir_fd=parent, effective_ids=True):
            raise Fail("permission_denied", "permission denied", path=text_of(path))
        if expect == "absent" or (expect is not None and hash_regular(name, parent, path).sha != expect):
            raise Fail("changed", "the file holds something else than expected", path=text_of(path))
        return old

    def _make_parents(self, path: bytes) -> None:
        parts = [part for part in path.split(b"/") if part not in (b"", b".")]
        for count in range(1, len(parts)):
            with self.resolver.parent(b"/".join(parts[:count])) as (parent, name):
                if name != b".":
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, 0o777, dir_fd=parent)

    def op_remove(self, _task: Task, args: Args) -> Steps:
        path = args.path()
        place = self._place(args)
        args.done()
        yield from self.point("write.admitted")
        self._may_change(place)
        self.find_workspace(make=True)
        with self.resolver.parent(path, follow=False) as (parent, name):
            if name == b".":
                raise Fail("permission_denied", "the workspace itself", path=text_of(path))
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                os.rmdir(name, dir_fd=parent)
            elif stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
                os.unlink(name, dir_fd=parent)
            else:
                raise Fail("special_file", "not a regular file", path=text_of(path))
        yield from self.point("write.renamed")
        return {}, b""


def keep_owner(descriptor: int, old: os.stat_result) -> None:
    """As far as this user may."""
    if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, old.st_uid, old.st_gid)


def stat_json(name: bytes, status: os.stat_result) -> Json:
    return {
        "name": text_of(name),
        "kind": kind_of(status.st_mode),
        "size": status.st_size,
        "mode": status.st_mode & 0o7777,
        "modified_at": status.st_mtime_ns // 1_000_000,
    }


class Mover:
    """Makes the workspace equal to an image: contents are staged whole, then it is changed name by name."""

    def __init__(
        self, daemon: Daemon, restore: Restore, survey: Survey, keep: set[bytes], most: int, name: str | None
    ) -> None:
        self.daemon = daemon
        self.target = restore.target
        self.survey = survey
        self.keep = keep
        self.most = most
        self.name = name or f"{now_ms()}-{secrets.token_hex(4)}"
        self.differing = restore.differing
        self.writes = [
            path
            for path in restore.differing
            if (item := self.target.get(path)) is not None
            and item.kind == "file"
            and ((now := survey.items.get(path)) is None or now.kind != "file" or now.sha != item.sha)
        ]
        self.staged: dict[bytes, str] = {}
        self.taken: dict[bytes, str] = {}
        """Of those, the ones that were a staged chunk, with its digest."""
        self.written = self.removed = self.preserved = 0
        self.kept_bytes = 0
        self.recovery: str | None = None
        self.dropped: list[bytes] = []
        self.touched: set[bytes] = set()
        self._parent: tuple[bytes, int] | None = None

    def stage(self) -> Quiet:
        daemon = self.daemon
        uses = collections.Counter(digest for path in self.writes for digest in self.target[path].parts())
        for number, path in enumerate(self.writes):
            item = self.target[path]
            name = f"staging/file-{number}"
            if uses[item.sha] == 1 and item.parts() == [item.sha]:
                self._take_chunk(path, item, name)
                yield None
                continue
            whole = hashlib.sha256()

            def blocks(item: Item = item, whole: Any = whole) -> Iterator[bytes]:
                for digest in item.parts():
                    block = daemon._staged_chunk(digest)  # pyright: ignore[reportPrivateUsage]
                    whole.update(block)
                    yield block

            self.staged[path] = name

            def write(name: str = name, blocks: Callable[[], Iterator[bytes]] = blocks) -> None:
                daemon._write_state(name, blocks())  # pyright: ignore[reportPrivateUsage]

            if item.size <= 4 * CHUNK:
                write()
            else:
                yield from daemon.loop.offload(write)
            status = os.stat(name, dir_fd=daemon.state_fd)
            if whole.hexdigest() != item.sha or status.st_size != item.size:
                raise Fail("bad_request", "the chunks are not the file", path=text_of(path))
            os.chmod(name, item.mode, dir_fd=daemon.state_fd)
            yield None

    def _take_chunk(self, path: bytes, item: Item, name: str) -> None:
        """A chunk that is the content of this file and of no other becomes it, uncopied."""
        daemon = self.daemon
        content = daemon._staged_chunk(item.sha)  # pyright: ignore[reportPrivateUsage]
        if len(content) != item.size:
            raise Fail("bad_request", "the chunks are not the file", path=text_of(path))
        os.rename(f"staging/{item.sha}", name, src_dir_fd=daemon.state_fd, dst_dir_fd=daemon.state_fd)
        self.staged[path] = name
        self.taken[path] = item.sha
        del daemon.staged[item.sha]
        os.chmod(name, item.mode, dir_fd=daemon.state_fd)

    def clean(self) -> None:
        self._leave()
        daemon = self.daemon
        for path, name in self.staged.items():
            with contextlib.suppress(FileNotFoundError):
                if path in self.taken:
                    digest = self.taken[path]
                    os.rename(name, f"staging/{digest}", src_dir_fd=daemon.state_fd, dst_dir_fd=daemon.state_fd)
                    daemon.staged[digest] = self.target[path].size
                else:
                    os.unlink(name, dir_fd=daemon.state_fd)

    def swap(self) -> Quiet:
        now, target = self.survey.items, self.target
        specials = [raw_of(named["path"], "path") for named in self.survey.special]
        for path in self.survey.beyond:
            yield from self._before(path)
            self._move_whole(path)
        gone = [
            path
            for path in self.differing
            if path in now and (path not in target or target[path].kind != now[path].kind)
        ]
        gone += specials
        for path in sorted(gone, reverse=True):  # what lies below comes first
            yield from self._before(path)
            self._remove(path)
        for path in self.differing:
            item = target.get(path)
            if item is None:
                continue
            old = now.get(path)
            there = old is not None and old.kind == item.kind
            if item.kind == "directory":
                if not there:
                    yield from self._before(path)
                    os.mkdir(self._name(path), 0o700, dir_fd=self._into(path))
                    self.touched.add(path)
                    self.written += 1
                elif old is not None and old.mode != item.mode:
                    self.touched.add(path)
                    self.written += 1
            elif item.kind == "symlink":
                if not (there and old is not None and old.target == item.target):
                    yield from self._before(path)
                    self._link(path, item, old if there else None)
            elif path in self.staged:
                yield from self._before(path)
                self._write(path, old if there else None)
            elif old is not None and old.mode != item.mode:
                yield from self._before(path)
                self._unchanged(path, old)
                self._chmod(path, item.mode)
                self.written += 1
        for path in sorted(self.touched, reverse=True):
            if path in target:
                yield from self._before(path)
                self._chmod(path, target[path].mode)

    def _before(self, path: bytes) -> Quiet:
        yield from self.daemon.point("restore.swap")
        yield None  # a newer driver may have come: then this is the end

    def _into(self, path: bytes) -> int:
        """The directory a path is in, opened name by name and writable."""
        above = path.rpartition(b"/")[0]
        if self._parent is not None and self._parent[0] == above:
            return self._parent[1]
        self._leave()
        at = os.dup(self.daemon.resolver.root)
        walked = b""
        for part in above.split(b"/") if above else ():
            walked = walked + b"/" + part if walked else part
            below = os.open(part, _THROUGH, dir_fd=at)
            status = os.fstat(below)
            if status.st_mode & 0o300 != 0o300:
                os.chmod(part, status.st_mode & 0o7777 | 0o700, dir_fd=at)
                self.touched.add(walked)
            os.close(at)
            at = below
        self._parent = (above, at)
        return at

    def _leave(self) -> None:
        if self._parent is not None:
            os.close(self._parent[1])
            self._parent = None

    def _name(self, path: bytes) -> bytes:
        return path.rpartition(b"/")[2]

    def _unchanged(self, path: bytes, old: Item) -> None:
        """It is still what the plan saw, or nothing is done to it."""
        status = os.stat(self._name(path), dir_fd=self._into(path), follow_symlinks=False)
        seen = (old.size, old.mtime, old.ctime, old.inode)
        if seen != (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino):
            raise Fail("changed", "it was changed since the plan; plan anew", path=text_of(path))

    def _remove(self, path: bytes) -> None:
        old = self.survey.items.get(path)
        into, name = self._into(path), self._name(path)
        if old is not None and old.kind == "directory":
            try:
                os.rmdir(name, dir_fd=into)
            except OSError as error:
                if error.errno == errno.ENOTEMPTY:
                    raise Fail("changed", "something was added since the plan; plan anew", path=text_of(path)) from None
                raise
        else:
            if old is not None:
                self._unchanged(path, old)
            if not (path in self.keep and self._preserve(path, into, name)):
                os.unlink(name, dir_fd=into)
        self.removed += 1

    def _write(self, path: bytes, old: Item | None) -> None:
        into, name = self._into(path), self._name(path)
        if old is not None:
            self._unchanged(path, old)
            if path in self.keep:
                self._preserve(path, into, name)
        else:
            self._absent(path, into, name)
        self._move_in(self.staged.pop(path), into, name, self.target[path].mode)
        self.written += 1

    def _absent(self, path: bytes, into: int, name: bytes) -> None:
        try:
            os.stat(name, dir_fd=into, follow_symlinks=False)
        except FileNotFoundError:
            return
        raise Fail("changed", "something was added since the plan; plan anew", path=text_of(path))

    def _link(self, path: bytes, item: Item, old: Item | None) -> None:
        into, name = self._into(path), self._name(path)
        if old is not None:
            self._unchanged(path, old)
        else:
            self._absent(path, into, name)
        temporary = b".perdure-" + secrets.token_hex(8).encode("ascii")
        os.symlink(item.target, temporary, dir_fd=into)
        try:
            os.rename(temporary, name, src_dir_fd=into, dst_dir_fd=into)
        except BaseException:
            os.unlink(temporary, dir_fd=into)
            raise
        self.written += 1

    def _chmod(self, path: bytes, mode: int) -> None:
        """Without following a link: the file is opened first."""
        descriptor = os.open(self._name(path), os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._into(path))
        try:
            if stat.S_ISLNK(os.fstat(descriptor).st_mode):
                raise Fail("changed", "it was changed since the plan; plan anew", path=text_of(path))
            os.chmod(f"/proc/self/fd/{descriptor}", mode)
        finally:
            os.close(descriptor)

    def _preserve(self, path: bytes, into: int, name: bytes) -> bool:
        """Move what the log lacks to the recovery folder. False: there was no room for it."""
        size = self.survey.items[path].size
        if self.kept_bytes + size > self.most:
            self.dropped.append(path)
            return False
        folder = f"{self.daemon.setting.state}/recovery/{self.name}"
        where = os.path.join(os.fsencode(folder), path)
        try:
            os.makedirs(os.path.dirname(where), 0o700, exist_ok=True)
            try:
                os.rename(name, where, src_dir_fd=into)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                self._copy(name, into, where)
                os.unlink(name, dir_fd=into)
        except OSError as error:
            raise fail_of(error, path) from None  # rather no undo than what is not ours destroyed
        self.kept_bytes += size
        self.recovery = folder
        self.preserved += 1
        return True

    def _move_whole(self, path: bytes) -> None:
        """A directory with what no path reaches, whatever its size: nobody can tell what of it the log lacks."""
        folder = f"{self.daemon.setting.state}/recovery/{self.name}"
        try:
            os.makedirs(folder, 0o700, exist_ok=True)
            where = os.path.join(os.fsencode(folder), b".beyond-" + secrets.token_hex(8).encode("ascii"))
            os.rename(self._name(path), where, src_dir_fd=self._into(path))
        except OSError as error:
            raise fail_of(error, path) from None
        self.recovery = folder
        self.preserved += 1

    def _copy(self, name: bytes, into: int, where: bytes) -> None:
        source = os.open(name, _READ, dir_fd=into)
        try:
            target = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                while block := os.read(source, CHUNK):
                    write_all(target, block)
                os.fsync(target)
            finally:
                os.close(target)
        finally:
            os.close(source)

    def _move_in(self, staged: str, into: int, name: bytes, mode: int) -> None:
        try:
            os.rename(staged, name, src_dir_fd=self.daemon.state_fd, dst_dir_fd=into)
            return
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        temporary = b".perdure-" + secrets.token_hex(8).encode("ascii")
        source = os.open(staged, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.daemon.state_fd)
        try:
            target = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=into)
            try:
                while block := os.read(source, CHUNK):
                    write_all(target, block)
                os.fchmod(target, mode)
            finally:
                os.close(target)
            os.rename(temporary, name, src_dir_fd=into, dst_dir_fd=into)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=into)
            raise
        finally:
            os.close(source)
        os.unlink(staged, dir_fd=self.daemon.state_fd)

    def _status(self, path: bytes) -> os.stat_result:
        try:
            with self.daemon.resolver.parent(path, follow=False) as (parent, name):
                return os.stat(name, dir_fd=parent, follow_symlinks=False)
        except Fail as fail:
            raise Fail("changed", fail.message, path=text_of(path)) from None

    def result(self) -> tuple[dict[bytes, Item], set[bytes]]:
        """The image with the status it has now, and the paths it had another one of. What was changed must be there
        exactly. What somebody else changes elsewhere meanwhile, the next scan tells from the status it had."""
        self._leave()
        items = dict(self.survey.items)
        for path in {*self.differing, *self.touched}:
            item = self.target.get(path)
            if item is None:
                items.pop(path, None)
                continue
            status = self._status(path)
            if kind_of(status.st_mode) != item.kind or (item.kind == "file" and status.st_size != item.size):
                raise Fail("changed", "the workspace is not the image; plan anew", path=text_of(path))
            made = Item(item.kind, item.mode, item.size, item.sha, item.target)
            made.chunks = item.chunks
            old = self.survey.items.get(path)
            racy = old is None or old.ctime != status.st_ctime_ns or old.racy
            made.seen(status, racy=racy and item.kind == "file")
            if item.kind == "symlink":
                made.size = status.st_size
            items[path] = made
        if len(items) != len(self.target):
            path = next(iter(items.keys() ^ self.target.keys()))
            raise Fail("changed", "the workspace is not the image; plan anew", path=text_of(path))
        return items, {*self.survey.fresh, *self.differing, *self.touched}


Op = Callable[[Daemon, Task, Args], Steps]
_OPEN_OPS: dict[str, Op] = {"status": Daemon.op_status, "advance": Daemon.op_advance, "shutdown": Daemon.op_shutdown}
_TEST_OPS: dict[str, Op] = {"arm": Daemon.op_arm, "release": Daemon.op_release, "armed": Daemon.op_armed}
_OPS: dict[str, Op] = {
    "start": Daemon.op_start,
    "wait": Daemon.op_wait,
    "look": Daemon.op_look,
    "void": Daemon.op_void,
    "kill": Daemon.op_kill,
    "freeze": Daemon.op_freeze,
    "thaw": Daemon.op_thaw,
    "scan": Daemon.op_scan,
    "scan_page": Daemon.op_scan_page,
    "chunks": Daemon.op_chunks,
    "settle": Daemon.op_settle,
    "restore_begin": Daemon.op_restore_begin,
    "restore_image": Daemon.op_restore_image,
    "restore_plan": Daemon.op_restore_plan,
    "restore_apply": Daemon.op_restore_apply,
    "missing": Daemon.op_missing,
    "put": Daemon.op_put,
    "read": Daemon.op_read,
    "stat": Daemon.op_stat,
    "list": Daemon.op_list,
    "walk": Daemon.op_walk,
    "glob": Daemon.op_glob,
    "grep": Daemon.op_grep,
    "write": Daemon.op_write,
    "remove": Daemon.op_remove,
}
POINTS = (
    "advance.begin", "advance.fenced", "advance.cut", "advance.killed", "start.admitted", "start.forked",
    "shim.before_started", "shim.started", "shim.running", "shim.before_exit", "shim.exit", "start.answered",
    "void.synced", "kill.recorded", "scan.frozen", "scan.walked", "scan.synced", "settle.begin", "settle.synced",
    "restore.begin", "restore.floor", "restore.killed", "restore.staged", "restore.swap", "restore.swapped",
    "restore.image", "write.admitted", "write.staged", "write.renamed",
)  # fmt: skip
"""Where a daemon started with --testing-crash-points can be killed or held."""


# --- coming up --------------------------------------------------------------------------------------------------


class Options:
    """The command line, checked."""

    def __init__(self, words: Sequence[str] | None = None) -> None:
        parser = argparse.ArgumentParser(prog="spaced", description="The daemon inside a Space.")
        parser.add_argument("--workspace", required=True)
        parser.add_argument("--state", required=True)
        parser.add_argument("--space", required=True)
        parser.add_argument("--generation", required=True, type=int)
        parser.add_argument("--listen", required=True, help="unix:PATH or tcp:HOST:PORT")
        parser.add_argument("--token-file", required=True)
        parser.add_argument("--allow-remote", action="store_true")
        parser.add_argument("--containment", default="auto", choices=("auto", "cgroup2", "cgroup1", "none"))
        parser.add_argument("--connections", type=int, default=CONNECTIONS)
        parser.add_argument("--testing-crash-points", action="store_true")
        given = parser.parse_args(words)
        self.workspace: str = os.path.realpath(given.workspace)
        self.state: str = os.path.realpath(given.state)
        self.space: str = given.space
        self.generation: int = given.generation
        self.listen: str = given.listen
        self.allow_remote: bool = given.allow_remote
        self.containment: str = given.containment
        self.connections: int = given.connections
        self.testing: bool = given.testing_crash_points
        if not os.path.isdir(self.workspace):
            raise Unable(f"{self.workspace}: the workspace is not a directory")
        for inner, outer in ((self.workspace, self.state), (self.state, self.workspace)):
            if inner == outer or inner.startswith(outer.rstrip("/") + "/"):
                raise Unable(f"{self.state} and {self.workspace}: state and workspace must lie beside each other")
        if not 0 < self.connections <= 1000 or self.generation < 0 or not self.space or len(self.space) > 200:
            raise Unable("--connections is 1 to 1000, --generation not negative, --space 1 to 200 characters")
        try:
            self.token = read_small(given.token_file).strip()
        except OSError as error:
            raise Unable(f"{given.token_file}: the token cannot be read ({error.strerror})") from None
        if len(self.token) < 16:
            raise Unable(f"{given.token_file}: a token has at least 16 characters")


class Unable(Exception):
    """The daemon cannot start; the text says why and what to do."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


def holder_of(path: str, state_fd: int | None) -> str:
    """Who holds a lock, as far as it can be told."""
    if state_fd is not None:
        try:
            descriptor = os.open("lock", os.O_RDONLY | os.O_CLOEXEC, dir_fd=state_fd)
            with os.fdopen(descriptor, "rb") as file:
                held = json.loads(file.read(4096))
            identity = f"started at tick {held['ticks']} of boot {held['boot']}"
            return f"process {held['pid']} ({identity}, holding it since {held['since']})"
        except (OSError, ValueError, KeyError, TypeError):
            return "a process that left no name"
    inode = os.stat(path).st_ino
    with contextlib.suppress(OSError):
        for line in read_small("/proc/locks", 1 << 20).decode("ascii", "replace").splitlines():
            fields = line.split()
            if "FLOCK" in fields and fields[5].rpartition(":")[2] == str(inode):
                return f"process {fields[4]}"
    return "a process that cannot be seen from here"


def lock_directories(options: Options) -> tuple[int, int]:
    """One daemon a state directory, and one a workspace (rule S2). The descriptors hold the locks."""
    try:
        os.makedirs(options.state, 0o700, exist_ok=True)
        os.chmod(options.state, 0o700)
        state_fd = os.open(options.state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        lock = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=state_fd)
    except OSError as error:
        raise Unable(f"{options.state}: the state directory cannot be used ({error.strerror})") from None
    for _ in range(20):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.01)  # a shim that is just being forked holds it for a moment
    else:
        raise Unable(f"{options.state} is in use by {holder_of(options.state, state_fd)}; stop it first", 3)
    workspace = os.open(options.workspace, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        lock_workspace(workspace)
    except BlockingIOError:
        raise Unable(
            f"{options.workspace} is in use by another daemon, {holder_of(options.workspace, None)}; stop it first", 3
        ) from None
    holder = {"pid": os.getpid(), "ticks": start_ticks(os.getpid()), "boot": boot_id(), "since": now_ms()}
    os.ftruncate(lock, 0)
    os.pwrite(lock, compact(holder), 0)
    os.close(state_fd)
    return lock, workspace


def identify(options: Options) -> str:
    """The random name of this Space on this machine; the state directory belongs to one workspace and generation."""
    state_fd = os.open(options.state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    mine = {"format": 1, "space": options.space, "generation": options.generation, "workspace": options.workspace}
    try:
        try:
            found = json.loads(read_small(f"{options.state}/space.json"))
        except FileNotFoundError:
            found = {**mine, "id": secrets.token_hex(8)}
            replace_file("space.json", json.dumps(found).encode("utf-8"), state_fd)
        except ValueError:
            raise Unable(f"{options.state}/space.json is damaged; give the Space a new state directory") from None
        for name, value in mine.items():
            if found.get(name) != value:
                raise Unable(
                    f"{options.state} belongs to {name} {found.get(name)!r}, not {value!r}; give another --state"
                )
        return str(found["id"])
    except OSError as error:
        raise Unable(f"{options.state}: {error.strerror}") from None
    finally:
        os.close(state_fd)


def bind(options: Options) -> tuple[socket.socket, str]:
    kind, _, where = options.listen.partition(":")
    try:
        if kind == "unix" and where:
            path = os.path.abspath(where)
            sock = socket.socket(socket.AF_UNIX)
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISSOCK(os.lstat(path).st_mode):
                    os.unlink(path)  # of a daemon before us: we hold the lock
            old = os.umask(0o177)
            try:
                sock.bind(path)
            finally:
                os.umask(old)
            address = f"unix:{path}"
        elif kind == "tcp" and where.rpartition(":")[2].isdigit():
            host, _, port = where.rpartition(":")
            host = host.strip("[]")
            if not options.allow_remote and not _is_loopback(host):
                raise Unable(f"{options.listen} is not a loopback address; --allow-remote if that is meant")
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, int(port)))
            name = sock.getsockname()
            address = f"tcp:[{name[0]}]:{name[1]}" if ":" in host else f"tcp:{name[0]}:{name[1]}"
        else:
            raise Unable("--listen is unix:PATH or tcp:HOST:PORT")
        sock.listen(256)
    except OSError as error:
        raise Unable(f"{options.listen}: cannot listen ({error.strerror})") from None
    sock.setblocking(False)
    return sock, address


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def accept_from(sock: socket.socket, loop: Loop) -> Callable[[int], None]:
    def on_ready(_mask: int) -> None:
        for _ in range(64):
            try:
                client, _address = sock.accept()
            except OSError:
                return
            if client.family != socket.AF_UNIX:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            loop.now = time.monotonic()
            loop.connections.add(Connection(loop, client))
            strangers = [connection for connection in loop.connections if not connection.known]
            if len(strangers) > STRANGERS:
                min(strangers, key=lambda connection: connection.deadline).close()

    return on_ready


def serve(options: Options) -> None:
    locks = lock_directories(options)
    space = identify(options)
    version, base, home = (
        (0, "", "") if options.containment == "none" else probe_cgroups(options.containment, f"spaced-{space}")
    )
    if options.containment not in ("auto", "none") and not version:
        raise Unable(f"--containment {options.containment}: no such cgroup hierarchy can be written here")
    setting = Setting(options.workspace, options.state, space, version, base, home, options.testing)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for name in [name for name in os.environ if name.startswith("SPACED_") and name != "SPACED_CRASH"]:
        del os.environ[name]
    crash = os.environ.pop("SPACED_CRASH", None)
    zygote_pid = os.fork()
    if zygote_pid == 0:
        for descriptor in locks:
            os.close(descriptor)
        ours.close()
        zygote_main(theirs, setting)
    theirs.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else 65536, hard))
    try:
        daemon = Daemon(setting, ours, zygote_pid, options)
    except Fail as fail:
        raise Unable(f"{options.state}: {fail.message}") from None
    except OSError as error:
        raise Unable(f"{options.state}: {error.strerror}") from None
    if crash is not None and options.testing:
        point, _, skip = crash.partition(":")
        if point not in POINTS:
            raise Unable(f"SPACED_CRASH: no point {point}")
        daemon.armed[point] = ["kill", int(skip or 0)]
    sock, address = bind(options)
    daemon.loop.selector.register(sock, selectors.EVENT_READ, accept_from(sock, daemon.loop))
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writer)

    def drain(_mask: int) -> None:
        os.read(reader, 64)

    daemon.loop.selector.register(reader, selectors.EVENT_READ, drain)
    signal.signal(signal.SIGTERM, lambda _number, _frame: daemon._stop())  # pyright: ignore[reportPrivateUsage]
    signal.signal(signal.SIGINT, lambda _number, _frame: daemon._stop())  # pyright: ignore[reportPrivateUsage]
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    announcement = json.dumps({"address": address, "pid": os.getpid(), "protocol": PROTOCOL})
    daemon._write_state("address", [announcement.encode("ascii")])  # pyright: ignore[reportPrivateUsage]
    print(announcement, flush=True)
    daemon.loop.run()
    for connection in list(daemon.loop.connections):
        connection.close()
    daemon._reap_groups()  # pyright: ignore[reportPrivateUsage]
    if base:
        with contextlib.suppress(OSError):
            os.rmdir(base)
    sock.close()
    if address.startswith("unix:") and not daemon.abandoned:  # there, it may be another daemon's by now
        with contextlib.suppress(OSError):
            os.unlink(address[len("unix:") :])
    for descriptor in locks:
        os.close(descriptor)


def main(words: Sequence[str] | None = None) -> int:
    if sys.platform != "linux":
        print("spaced needs Linux", file=sys.stderr)
        return 2
    try:
        serve(Options(words))
    except Unable as unable:
        print(f"spaced: {unable}", file=sys.stderr)
        return unable.status
    return 0


if __name__ == "__main__":
    sys.exit(main())
