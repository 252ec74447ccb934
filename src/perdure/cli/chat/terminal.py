"""Standard output and input, each on a thread of its own: a terminal that stands still holds up nobody."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import struct
import termios
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

MOST_WAITING: Final = 256 * 1024
"""Bytes that may wait to be written before whoever writes more is asked to wait (``Writer.room``)."""
MOST_LINES: Final = 100
"""Lines that are read ahead."""
MOST_LINE: Final = 4 * 1024 * 1024
"""Bytes of a line; a longer one comes in pieces."""
COUNTS: Final = 1_000
"""How often it is tried to count what was typed, a millisecond each."""
_FINISH_S: Final = 2.0


class Writer:
    """Writes text to a descriptor, in order. Where nobody reads it any more it says so, once, and writes nothing."""

    def __init__(self, descriptor: int, *, encoding: str = "utf-8", on_broken: Callable[[], None]) -> None:
        self.descriptor = descriptor
        self.broken = False
        self._encoding = encoding
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._queue: deque[bytes] = deque()
        self._waiting = 0
        """Bytes that are not written yet; changed under the condition."""
        self._ended = False
        self._eased = asyncio.Event()
        self._eased.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._thread = threading.Thread(target=self._run, name="perdure-terminal", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        data = text.encode(self._encoding, "replace")
        if not data or self.broken:
            return
        with self._changed:
            self._queue.append(data)
            self._waiting += len(data)
            self._empty.clear()
            if self._waiting > MOST_WAITING:
                self._eased.clear()
            self._changed.notify_all()

    @property
    def crowded(self) -> bool:
        return not self._eased.is_set()

    async def room(self) -> None:
        """Wait until little enough waits to be written."""
        await self._eased.wait()

    async def written(self) -> None:
        """Wait until all that was given here has been written, or nobody reads it any more."""
        await self._empty.wait()

    async def finish(self) -> None:
        """Let what was written reach its reader, within a bound. Nothing is written after that."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        ended = asyncio.Event()

        def wait() -> None:
            self._thread.join(_FINISH_S)
            self._call(ended.set)

        threading.Thread(target=wait, name="perdure-terminal-end", daemon=True).start()
        await ended.wait()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._ended:
                    self._changed.wait()
                if not self._queue:
                    return
                data = b"".join(self._queue)
                self._queue.clear()
            try:
                _write_all(self.descriptor, data)
            except OSError:
                self.broken = True
                self._call(self._break)
                return
            with self._changed:
                self._waiting -= len(data)
            self._call(self._ease)

    def _ease(self) -> None:
        if self._waiting <= MOST_WAITING:
            self._eased.set()
        if self._waiting == 0:
            self._empty.set()

    def _break(self) -> None:
        self._eased.set()
        self._empty.set()
        self._on_broken()

    def _call(self, function: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed; nobody waits any more
            return


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # somebody who shares the terminal made it so
            os.set_blocking(descriptor, True)


class TypedLine(NamedTuple):
    text: str
    begins: int
    """Of its first byte, how many were read before it."""


class LineReader:
    """The lines of a descriptor, without their ends; None once there are no more."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._slots = threading.Semaphore(MOST_LINES)
        self._lines: asyncio.Queue[TypedLine | None] = asyncio.Queue()
        self._read = 0
        """Bytes so far."""
        self._reading = False
        """Some have been taken from the descriptor, perhaps, and are not counted yet."""
        self._forgets = False
        threading.Thread(target=self._run, name="perdure-input", daemon=True).start()

    async def line(self) -> TypedLine | None:
        found = await self._lines.get()
        if found is None:
            self._lines.put_nowait(None)
        else:
            self._slots.release()
        return found

    def forget(self) -> None:
        """Of a line that has no end yet, what was read: whoever typed it has taken it back."""
        self._forgets = True

    async def typed(self) -> int:
        """How many bytes have been typed or written by now, read or not."""
        for _ in range(COUNTS):
            read, waiting = self._read, bytes_waiting(self._descriptor)
            # In this order: the thread counts what it has taken before it says that it reads no more.
            if not self._reading and read == self._read:
                return read + waiting
            await asyncio.sleep(0.001)
        return self._read + bytes_waiting(self._descriptor)  # whatever holds up the thread, it is no data

    def _run(self) -> None:
        rest, begins = b"", 0
        while True:
            data = self._take()
            if self._forgets:
                rest, self._forgets, begins = b"", False, self._read - len(data)
            *lines, rest = (rest + data).split(b"\n")
            if rest and (not data or len(rest) > MOST_LINE):
                lines.append(rest)
                rest = b""
            for line in lines:
                self._slots.acquire()
                if not self._give(TypedLine(line.decode("utf-8", "replace").rstrip("\r"), begins)):
                    return
                begins += len(line) + 1
            begins = self._read - len(rest)
            if not data:
                self._give(None)
                return

    def _take(self) -> bytes:
        """The next bytes; none: there are no more."""
        try:
            select.select([self._descriptor], [], [])
            self._reading = True
            data = os.read(self._descriptor, 65536)
        except (OSError, ValueError):
            data = b""
        self._read += len(data)
        self._reading = False
        return data

    def _give(self, line: TypedLine | None) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._lines.put_nowait, line)
        except RuntimeError:  # the loop is closed
            return False
        return True


def bytes_waiting(descriptor: int) -> int:
    """Bytes that can be read from a descriptor; of a terminal also those of a line that has no end yet."""
    with contextlib.suppress(OSError, termios.error):
        modes = termios.tcgetattr(descriptor)
        if modes[3] & termios.ICANON:
            # What is typed of a line is counted only while lines do not matter; it is read as a part of its line.
            raw = [*modes[:3], modes[3] & ~termios.ICANON, *modes[4:]]
            termios.tcsetattr(descriptor, termios.TCSANOW, raw)
            try:
                return _readable(descriptor)
            finally:
                termios.tcsetattr(descriptor, termios.TCSANOW, modes)
    with contextlib.suppress(OSError):
        return _readable(descriptor)
    return 0


def _readable(descriptor: int) -> int:
    (count,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4))
    return max(0, count)
