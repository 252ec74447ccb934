"""The thread that has the connection of a session, which is watched while there is nothing to do on it.

What the server says by itself is either that mail has come, or that the connection ends: both are heard at once, and
nobody has to ask for it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from perdure.storage.postgres_link import Link
from perdure.storage.worker import Worker, tell


class WatchedWorker(Worker):
    """As ``Worker``. Made on the event loop, which does the watching."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._left = 0
        """Jobs that have not ended."""
        self._link: Link | None = None
        self._watched: int | None = None
        """The descriptor that the loop watches."""
        self._heard: Callable[[], None] | None = None

    def watch(self, link: Link, heard: Callable[[], None]) -> None:
        """Have ``heard()`` called on the loop when something comes on an idle connection. It has to take that up."""
        self._link = link
        self._heard = heard
        self._resume()

    def unwatch(self) -> None:
        """Before the connection is closed: its number is another's then."""
        self._pause()
        self._link = None

    def post(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._left += 1
            first = self._left == 1
        if first:  # then no job is running, and this is the loop's thread
            self._pause()

        def counted() -> None:
            job()
            with self._lock:
                self._left -= 1
                last = not self._left
            if last and self._link is not None:
                tell(self._loop, self._resume)

        super().post(counted)

    def _pause(self) -> None:
        if self._watched is not None:
            self._loop.remove_reader(self._watched)
            self._watched = None

    def _resume(self) -> None:
        if self._left or self._watched is not None or self._link is None:
            return
        if not self._link.closed:  # a job that lost the connection closed its descriptor, whose number may be another's
            self._watched = self._link.fileno()
            self._loop.add_reader(self._watched, self._event)

    def _event(self) -> None:
        self._pause()
        if self._heard is not None:
            self._heard()
