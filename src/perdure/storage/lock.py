"""The owner lock: an OS lock on a file beside the store (rules K165 to K169).

The lock is ``flock``: it belongs to one opening of the sidecar, so two openings inside one process refuse each other
too, and it ends with its process, however that ends. The sidecar itself stays: removing it would let two openers lock
two different files.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import NamedTuple
from weakref import WeakSet

import msgspec

from perdure.kernel.errors import StorageBusy, StorageError

_ATTEMPTS = 10
"""How often a sidecar may be replaced under our hands, and a holder be caught before it wrote its name."""

_FRESH = ".taking"


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who owns a store. The start ticks and the boot id tell a process from a later one with the same pid."""

    pid: int
    start_ticks: int
    boot_id: str
    host: str
    since: int

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since / 1000, UTC).isoformat(timespec="seconds")
        started = f"started at tick {self.start_ticks} of boot {self.boot_id}"
        return f"process {self.pid} on host {self.host} since {since} ({started})"

    @classmethod
    def of_this_process(cls, *, since: int) -> Holder:
        pid = os.getpid()
        return cls(pid=pid, start_ticks=_start_ticks(pid), boot_id=_boot_id(), host=socket.gethostname(), since=since)

    @property
    def gone(self) -> bool:
        """Whether it ran on this boot of this machine and does so no longer."""
        return self.boot_id == _boot_id() and _start_ticks(self.pid) != self.start_ticks

    @property
    def here(self) -> bool:
        """Whether it runs on this machine, where this process can see it."""
        return self.boot_id == _boot_id() and self.host == socket.gethostname() and not self.gone

    @property
    def stopped(self) -> bool:
        """Whether it runs here and somebody has stopped it, as Ctrl-Z, SIGSTOP and debuggers do (state T)."""
        return self.here and _stat(self.pid)[:1] in (["T"], ["t"])

    def kill(self, *, patience: float) -> bool:
        """Kill it, and wait until it has ended, for at most ``patience`` seconds; whether it has (rule K178).

        False too if it is not here or is this process: then nothing is killed. Raises OSError if it may not be.
        """
        try:
            # From here on it cannot be mistaken for a later process of the same number.
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return self.gone
        try:
            if not self.here or self.pid == os.getpid():
                return self.gone
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            return bool(select.select([descriptor], [], [], patience)[0])
        finally:
            os.close(descriptor)


class Sidecar(NamedTuple):
    """The lock file of a store at some moment: which file it is, and whom it names. Two are equal while nobody else
    has begun to own the store."""

    file: tuple[int, int] | None
    holder: Holder | None


class OwnerLock:
    """A held lock. ``release`` frees it; so does the end of the process."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor
        _held.add(self)

    @classmethod
    def take(cls, store: str, *, now: int) -> OwnerLock:
        """Lock ``<store>.lock``. Raises StorageBusy at once if somebody holds it, StorageError if it cannot be."""
        path = f"{store}.lock"
        for _ in range(_ATTEMPTS):
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                descriptor = os.open(path, flags, 0o600)
            except OSError as error:
                raise StorageError(
                    f"{path}: the owner lock cannot be made ({error.strerror}); to look at the store without "
                    "owning it, open it for reading only"
                ) from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _names(path, descriptor):
                    _write(path, descriptor, now)
                    return cls(path, descriptor)
                os.close(descriptor)  # somebody put another sidecar in its place between the open and the lock
            except BlockingIOError:
                os.close(descriptor)
                raise StorageBusy(f"{store} is open already: {_describe(path)}") from None
            except OSError as error:
                os.close(descriptor)
                raise StorageError(f"{path}: the owner lock cannot be taken ({error.strerror})") from error
        raise StorageBusy(f"{store}: its lock file is being replaced again and again; try later")

    @classmethod
    def replace(cls, store: str, *, seen: Sidecar, now: int) -> OwnerLock:
        """Put a fresh sidecar, locked and named, over the one that was ``seen``, whatever holds that (rule K177).

        Its holder keeps a lock on a file without a name, so that its death frees nothing. The caller holds the write
        lock of the store, so there is one at a time. Raises StorageBusy if another sidecar is there by now.
        """
        path = f"{store}.lock"
        fresh = f"{path}{_FRESH}"
        forget_replacement(store)
        descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(fresh, descriptor, now)
            if sidecar(store) != seen:
                raise StorageBusy(f"{store} was taken over by others meanwhile: {_describe(path)}")
            os.rename(fresh, path)
        except BaseException:
            os.close(descriptor)
            forget_replacement(store)
            raise
        return cls(path, descriptor)

    def check_named(self) -> None:
        """Raise StorageBusy if another sidecar is in the place of this one: somebody has taken over."""
        assert self._descriptor is not None, "a held lock"
        if not _names(self.path, self._descriptor):
            raise StorageBusy(f"{self.path} was replaced while the store was opened: {_describe(self.path)}")

    def release(self) -> None:
        """Free the lock. Twice does nothing."""
        if self._descriptor is not None:
            with suppress(OSError):  # what is left in the file names a process that is gone or holds nothing
                os.ftruncate(self._descriptor, 0)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.drop()

    def drop(self) -> None:
        """Close our end without freeing it: what a forked child does, or it would hold its parent's lock."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


_held: WeakSet[OwnerLock] = WeakSet()


def _drop_inherited() -> None:
    for lock in list(_held):
        lock.drop()


os.register_at_fork(after_in_child=_drop_inherited)


def sidecar(store: str) -> Sidecar:
    """What the sidecar of a store is now."""
    path = f"{store}.lock"
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return Sidecar(None, None)
    return Sidecar((found.st_dev, found.st_ino), read_holder(path))


def forget_replacement(store: str) -> None:
    """Remove what a taker that died left beside the sidecar. The caller holds the write lock of the store."""
    with suppress(FileNotFoundError):
        os.unlink(f"{store}.lock{_FRESH}")


def read_holder(path: str) -> Holder | None:
    """Who a lock file names; None if it names nobody."""
    try:
        return msgspec.json.decode(_contents(path), type=Holder)
    except (OSError, msgspec.DecodeError):
        return None


def held_by(holder: Holder) -> str:
    """Who has it, and what to do."""
    if holder.stopped:
        return (
            f"it is held by {holder}, which is stopped; let it go on (kill -CONT {holder.pid}) and close it "
            "there, or take the store over: takeover=True, or perdure chat --takeover"
        )
    return f"it is held by {holder}; close it there first"


def _describe(path: str) -> str:
    holder = None
    for _ in range(_ATTEMPTS):
        holder = read_holder(path)
        if holder is not None and not holder.gone:
            return held_by(holder)
        time.sleep(0.005)  # it has locked the file and is about to write its name
    if holder is None:
        return f"its holder left no name in {path}"
    return f"its holder cannot be seen from here, as one in another container; {path} names {holder}"


def _write(path: str, descriptor: int, now: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, msgspec.json.encode(Holder.of_this_process(since=now)), 0)


def _names(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _contents(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _boot_id() -> str:
    return _contents("/proc/sys/kernel/random/boot_id").decode().strip()


def _start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 if it does not run.

    One that has ended and that nobody waited for does not run: its threads are gone, and with them its locks.
    """
    found = _stat(pid)
    ended = not found or (found[0] in ("Z", "X") and int(found[17]) <= 1)
    return 0 if ended else int(found[19])


def _stat(pid: int) -> list[str]:
    """What the system says of a process, from its state on; nothing if it does not run."""
    try:
        stat = _contents(f"/proc/{pid}/stat")  # a name in it may be any bytes
    except OSError:
        return []
    return stat.rpartition(b")")[2].decode().split()
