"""How a driver takes a Space: found or made by its provider, committed to the log, then advanced (S147 to S149)."""

from __future__ import annotations

import os
from collections.abc import Sequence

from perdure.kernel.session import Session
from perdure.spaces import image
from perdure.spaces.client import SpaceClient
from perdure.spaces.documents import SpaceState
from perdure.spaces.errors import (
    NobodyListens,
    SpaceConnectionLost,
    SpaceNotReady,
    SpaceProcessesRemain,
    SpaceUnavailable,
)
from perdure.spaces.link import ClientLimits
from perdure.spaces.provider import SpaceProvider
from perdure.spaces.wire import Advanced, ExecKey, Fence, ImageRecord, Status

_LIMITS = ClientLimits(connect_s=0.5)
"""A daemon that is gone is not waited for: its provider starts another."""


class Hold:
    """What one session has of a Space. ``generation``, ``boot`` and ``image``: as it was found, and since settled."""

    def __init__(self, session: Session, provider: SpaceProvider, name: str) -> None:
        self._session = session
        self._provider = provider
        self._name = name
        self.client: SpaceClient | None = None
        self.generation = 0
        self.boot = ""
        self.image: ImageRecord | None = None

    @property
    def taken(self) -> bool:
        return self.client is not None and self.client.admission is not None

    async def take(self, *, keep: Sequence[ExecKey]) -> Advanced:
        """Take the Space, from whoever had it: what older drivers started is gone afterwards, but for ``keep``.

        Raises StaleEpochError if a newer driver has it, SpaceConnectionLost, SpaceUnavailable.
        """
        client = await self._connect()
        status = await client.status()
        fence, address = status.fence, client.address
        async with self._session.commit() as tx:
            state = await tx.draft(SpaceState, key=self._name)
            state.directory = self._directory(state, status)
            above = self._stands_above(fence)
            if fence is not None and fence.log == self._session.info.log_id:
                _go_on_above(state, status, fence.log, self._session.entropy.token(), above=above)
            if above:
                assert fence is not None
                tx.raise_epoch(fence.epoch + 1)
            state.generation = address.generation
            state.boot = client.seen.boot
            state.connected += 1
        info = self._session.info
        try:
            advanced = await client.advance(log=info.log_id, epoch=info.epoch, writer=info.writer, keep=keep)
        except SpaceProcessesRemain as error:
            raise SpaceUnavailable(
                f"the Space {self._name} cannot be had: {error}. End those processes, then open the store again"
            ) from error
        if advanced.generation != address.generation:
            raise SpaceConnectionLost("generation", f"the Space {self._name} was made anew meanwhile")
        self.generation, self.boot, self.image = advanced.generation, advanced.boot, advanced.image
        return advanced

    async def close(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            await client.aclose()

    async def _connect(self) -> SpaceClient:
        """A client of the Space as it is now. One that goes away just while it is opened was lost, like any other."""
        try:
            address = (await self._provider.open(self._name)).address
            if self.client is not None and self.client.address != address:
                await self.close()
            if self.client is None:
                self.client = await SpaceClient.connect(address, limits=_LIMITS)
        except (NobodyListens, SpaceNotReady) as error:
            raise SpaceConnectionLost("closed", str(error)) from error
        return self.client

    def _directory(self, state: SpaceState, status: Status) -> str:
        """The directory of the user's that the Space works in. Raises SpaceUnavailable for another than the log knows,
        which would be made like that one (rule S172)."""
        assert self.client is not None, "it is connected"
        workspace = self.client.address.workspace
        if workspace is None:
            return ""
        mine = image.escape(os.fsencode(workspace))
        stands = status.image is not None and status.image.log == self._session.info.log_id
        if state.directory not in ("", mine) and not stands:
            other = os.fsdecode(image.unescape(state.directory))
            if os.path.isdir(other):
                raise SpaceUnavailable(
                    f"the Space {self._name} of this store has its files in {other}, and {workspace} would be made "
                    "like it: give each directory a store, or a Space of another name with "
                    "LocalSpaces(...).open(name, workspace=...)"
                )
        return mine

    def _stands_above(self, fence: Fence | None) -> bool:
        """Whether this log's epoch has to rise above the Space's first: the Space was another log's, or this one's
        before it was brought back from a copy. A log that another driver has refuses that commit (rule S148)."""
        info = self._session.info
        if fence is None or fence.epoch < info.epoch:
            return False
        return (fence.log, fence.epoch, fence.writer) != (info.log_id, info.epoch, info.writer)


def _go_on_above(state: SpaceState, status: Status, log: str, nonce: str, *, above: bool) -> None:
    """Where the Space has seen a later life of this log, which was brought back from a copy, no number of that counts
    as this life's: what it left is no change of the user's, and its calls are not those to come (rule S148)."""
    reached = status.image.commit if status.image is not None and status.image.log == log else 0
    if state.image and (above or reached > state.image):
        state.image = max(state.image, reached) + 1
        state.image_nonce = nonce
    if status.floor is not None and status.floor.call > state.calls:
        state.calls = status.floor.call
