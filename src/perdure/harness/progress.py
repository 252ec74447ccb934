"""Throttled progress in ``pi.live``: what a request or a tool streams, before its result (rules H68 and H95).

Whoever streams opens a Progress with a function that writes what is new into the document, buffers on its
own, and calls ``touch()``. The first touch is committed at once, later ones at most every interval, all of a
conversation in one commit. Nobody waits for such a commit, and none follows ``close()``: the commit that ends
the work is neither delayed nor undone by a late one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from perdure.harness.documents import Live
from perdure.kernel.errors import PerdureError
from perdure.kernel.reports import Report
from perdure.kernel.session import Session

DEFAULT_INTERVAL_MS = 100


class ProgressWriter:
    """Every progress of one session. Make one, share it."""

    def __init__(self, session: Session, *, interval_ms: int = DEFAULT_INTERVAL_MS) -> None:
        if interval_ms < 0:
            raise ValueError(f"an interval cannot be negative: {interval_ms} ms")
        self.session = session
        self.interval = interval_ms / 1000
        self._lines: dict[int, _Line] = {}

    def open(self, conversation_id: int, write: Callable[[Live], None]) -> Progress:
        """``write(live)`` puts what is new since the last time into a draft of ``pi.live``.

        It is called inside a transaction, at most once a touch, and never after ``close()``.
        """
        line = self._lines.get(conversation_id)
        if line is None:
            line = self._lines[conversation_id] = _Line(self, conversation_id)
        return line.add(write)

    def forget(self, conversation_id: int) -> None:
        del self._lines[conversation_id]


class Progress:
    """One stream's way into ``pi.live``. Close it before the commit that ends the work."""

    __slots__ = ("_line", "closed", "fresh", "write")

    def __init__(self, line: _Line, write: Callable[[Live], None]) -> None:
        self._line = line
        self.write = write
        self.fresh = True
        self.closed = False

    def touch(self) -> None:
        """There is something new to write. After ``close()`` this does nothing."""
        if not self.closed:
            self._line.touch(self)

    def close(self) -> None:
        """Nothing is written any more; what was not committed yet is dropped. Closing twice does nothing."""
        if not self.closed:
            self.closed = True
            self._line.remove(self)


class _Line:
    """What streams in one conversation: one commit on its way at a time."""

    def __init__(self, writer: ProgressWriter, conversation_id: int) -> None:
        self._writer = writer
        self._conversation_id = conversation_id
        self._open: dict[Progress, None] = {}
        self._dirty: dict[Progress, None] = {}
        self._running: asyncio.Task[None] | None = None
        self._sleeping = False
        self._urgent = False
        self._last: float | None = None
        """When the newest commit was begun."""

    def add(self, write: Callable[[Live], None]) -> Progress:
        progress = Progress(self, write)
        self._open[progress] = None
        return progress

    def remove(self, progress: Progress) -> None:
        del self._open[progress]
        self._dirty.pop(progress, None)
        if not self._open:
            self._writer.forget(self._conversation_id)
            if self._sleeping and self._running is not None:
                self._running.cancel()

    def touch(self, progress: Progress) -> None:
        self._dirty[progress] = None
        if progress.fresh:
            progress.fresh = False
            self._urgent = True
            if self._sleeping and self._running is not None:
                self._running.cancel()
                self._running = None
        if self._running is None or self._running.done():
            self._sleeping = False
            self._running = asyncio.create_task(self._run(), name=f"progress of {self._conversation_id}")

    async def _run(self) -> None:
        clock = self._writer.session.clock
        while self._dirty:
            if not self._urgent and self._last is not None:
                wait = self._last + self._writer.interval - clock.monotonic()
                if wait > 0:
                    self._sleeping = True
                    await clock.sleep(wait)
                    self._sleeping = False
            self._urgent = False
            self._last = clock.monotonic()
            if not await self._commit():
                return

    async def _commit(self) -> bool:
        """False: the session takes no more."""
        session = self._writer.session
        try:
            async with session.commit(conversation_id=self._conversation_id) as tx:
                tx.progress = True
                if self._dirty:
                    live = await tx.draft(Live)
                    dirty, self._dirty = self._dirty, {}
                    for progress in dirty:
                        self._write(progress, live)
        except PerdureError as error:
            # What was streamed is only a preview. A session that fails or closes tells so itself.
            if session.failed is None and not session.closing:
                self._report("progress could not be committed", error)
            return False
        return True

    def _write(self, progress: Progress, live: Live) -> None:
        try:
            progress.write(live)
        except Exception as error:
            progress.close()
            self._report("writing progress raised; this stream shows no more of it", error)

    def _report(self, message: str, error: Exception) -> None:
        self._writer.session.report(
            Report(type="progress_failed", message=message, conversation=self._conversation_id, error=error)
        )
