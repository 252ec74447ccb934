"""What is known of the local Spaces of a directory, without making, starting or changing anything."""

from __future__ import annotations

import os
from dataclasses import dataclass

from perdure.spaces import local_folder, local_processes
from perdure.spaces.client import SpaceClient
from perdure.spaces.errors import SpaceError
from perdure.spaces.link import ClientLimits
from perdure.spaces.local_folder import Folder, Record
from perdure.spaces.provider import SpaceAddress
from perdure.spaces.wire import Status

_LIMITS = ClientLimits(connect_s=0.0, quick_s=5.0)


@dataclass(frozen=True, slots=True)
class LocalLook:
    """A Space that was made and not deleted."""

    folder: Folder
    record: Record
    daemon: int | None
    """The process of its daemon, if it runs."""
    status: Status | None
    """What the daemon says of itself, if it answers."""
    lost: bool
    """Its folder, or its workspace, is gone."""

    @property
    def workspace(self) -> str:
        return self.folder.workspace(self.record)

    @property
    def recoveries(self) -> list[str]:
        """Its recovery folders, where undone changes of others are kept, the oldest first."""
        home = f"{self.folder.state}/recovery"
        try:
            found = [f"{home}/{name}" for name in os.listdir(home)]
            return sorted(found, key=os.path.getmtime)
        except OSError:
            return []


async def look(directory: str | os.PathLike[str]) -> list[LocalLook]:
    """The Spaces that are kept in a directory, those kept beside the workspaces in it, or the one whose workspace it
    is; none if there are none.

    Raises SpaceUnavailable if what is stored of one is damaged.
    """
    return [await _look(folder) for folder in _folders(directory)]


def _folders(directory: str | os.PathLike[str]) -> list[Folder]:
    root = os.path.realpath(directory)
    if not os.path.isdir(root):
        return []
    inside = [folder for kept in (root, *local_folder.besides(root)) for folder in _kept(kept)]
    if inside or os.path.dirname(root) == root:
        return inside
    return [folder for folder in _kept(local_folder.beside(root)) if folder.workspace(folder.read_record()) == root]


def _kept(directory: str) -> list[Folder]:
    return [local_folder.folder_of(directory, name) for name in local_folder.names(directory)]


async def _look(folder: Folder) -> LocalLook:
    record = folder.read_record()
    status = await _status(folder, record)
    daemon = _daemon(record) if status is None else status.pid
    return LocalLook(folder, record, daemon, status, _lost(folder, record))


def _daemon(record: Record) -> int | None:
    mark = record.daemon
    return mark.pid if mark is not None and local_processes.mark_of(mark.pid) == mark else None


def _lost(folder: Folder, record: Record) -> bool:
    return not os.path.isdir(folder.state) or not os.path.isdir(folder.workspace(record))


async def _status(folder: Folder, record: Record) -> Status | None:
    try:
        address = SpaceAddress(
            name=folder.name,
            generation=record.generation,
            address=f"unix:{folder.socket}",
            token=folder.read_token(),
            containment="none",
        )
        async with await SpaceClient.connect(address, limits=_LIMITS) as client:
            return client.seen
    except (OSError, SpaceError):
        return None
