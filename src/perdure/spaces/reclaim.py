"""Contents that no image refers to any more are deleted from the log (rule S163)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import islice
from typing import Final, cast

from perdure.kernel.errors import InvalidTransition, SessionClosed, SessionFailed
from perdure.kernel.reports import Report
from perdure.kernel.session import Session
from perdure.spaces import image
from perdure.spaces.documents import SpaceImage
from perdure.spaces.image import Tree

EVERY: Final = 256
"""Images between two sweeps: what they leave behind is bounded by what they changed."""
_PAGE = 10_000


class Reclaiming:
    """Sweeps now and then, beside the calls, one sweep at a time."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._images = EVERY - 1
        """The first image of a session is followed by a sweep: the last session may have left something."""
        self._task: asyncio.Task[None] | None = None

    def image_made(self) -> None:
        self._images += 1
        if self._images >= EVERY and self._task is None:
            self._images = 0
            self._task = asyncio.get_running_loop().create_task(self._sweep(), name="perdure contents")
            self._task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """A sweep that is under way is given up between two of its commits; the next goes on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        error = None if task.cancelled() else task.exception()
        # Another Space of this session may be sweeping; a session that ends sweeps no more.
        if error is not None and not isinstance(error, (InvalidTransition, SessionClosed, SessionFailed)):
            self._session.report(
                Report(type="reclaim_failed", message="contents could not be reclaimed; nothing is lost", error=error)
            )

    async def _sweep(self) -> None:
        session = self._session
        # A call that ended without its scope left its pin.
        left = [pin for pin in await session.contents.pins() if pin not in session.live.settled]
        if left:
            async with session.commit() as tx:
                for pin in left:
                    tx.unpin_contents(pin)
        await session.contents.reclaim(lambda: referenced(session))


async def referenced(session: Session) -> AsyncIterator[Sequence[str]]:
    """The digests that the images of all Spaces in the log refer to."""
    kind = SpaceImage.definition.kind
    for record in await session.reading(session.storage.documents("session", 0)):
        if record.kind != kind:
            continue
        found = await session.snapshot(SpaceImage, key=record.key)
        if found is None:
            continue
        plain = found.shared_json()
        assert isinstance(plain, dict), "a document is an object"
        digests = image.digests(cast("Tree", plain["dirs"]))
        while page := list(islice(digests, _PAGE)):
            yield page
            await asyncio.sleep(0)
