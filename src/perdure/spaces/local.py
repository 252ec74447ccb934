"""Spaces of this machine: processes of this user in a folder, and a daemon that outlives whoever started it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

from perdure.spaces import local_daemon, local_folder, local_processes
from perdure.spaces.client import SpaceClient
from perdure.spaces.errors import NobodyListens, SpaceConnectionLost, SpaceNotReady, SpaceUnavailable
from perdure.spaces.link import ClientLimits
from perdure.spaces.local_daemon import ContainmentChoice, DaemonOptions
from perdure.spaces.local_folder import Folder, Record, SpaceMisplaced
from perdure.spaces.provider import SpaceAddress
from perdure.spaces.space import Space
from perdure.spaces.wire import Status
from perdure.tools.threads import Threads

P = ParamSpec("P")
T = TypeVar("T")

_TERM_S = 2.0
"""Between SIGTERM and SIGKILL for a daemon that is restarted."""
_READY_S = 5.0
"""How long a daemon is greeted again that is too busy, or just ending."""


class LocalSpaces:
    """One folder a Space, in ``directory``, which is made if it is missing.

    No sandbox: commands are processes of this user and may do whatever this user may. What the daemon can do about
    their processes, ``Space.containment`` says: with a cgroup that this user may write it kills and freezes all of
    them; without, it finds them by parent and by a tag in their environment, best effort (rule S106).

    The daemon is started by ``open`` and ends with ``stop``, ``delete`` or the machine, not with this process. It, and
    so every command, has the environment it was started with: ``env``, or all of this process's as it is then, keys
    and secrets included; a daemon that runs already keeps its own.

    ``python``: the interpreter of the daemon, 3.9 or newer; None: this process's. ``containment``: "auto" takes the
    best there is, another choice refuses to start without it. ``start_s``: how long a daemon may take to serve.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        env: Mapping[str, str] | None = None,
        python: str | None = None,
        containment: ContainmentChoice = "auto",
        start_s: float = 20.0,
        testing_crash_points: bool = False,
    ) -> None:
        self._directory = os.path.realpath(directory)
        self._options = DaemonOptions(
            python=python,
            env=None if env is None else dict(env),
            containment=containment,
            start_s=start_s,
            testing_crash_points=testing_crash_points,
        )
        self._threads = Threads("spaces", 4)

    @classmethod
    async def at(
        cls,
        workspace: str | os.PathLike[str],
        *,
        env: Mapping[str, str] | None = None,
        python: str | None = None,
        containment: ContainmentChoice = "auto",
        start_s: float = 20.0,
        testing_crash_points: bool = False,
    ) -> Space:
        """The Space whose workspace is this directory, which exists. Its state is kept beside it, in
        ``.NAME.perdure``. Raises SpaceMisplaced (rule S108), SpaceUnavailable."""
        root = _real(workspace)
        spaces = cls(
            local_folder.beside(root),
            env=env,
            python=python,
            containment=containment,
            start_s=start_s,
            testing_crash_points=testing_crash_points,
        )
        return await spaces.open(local_folder.name_for(root), workspace=root)

    @property
    def directory(self) -> str:
        """Where they are, absolute."""
        return self._directory

    def __repr__(self) -> str:
        return f"LocalSpaces({self._directory!r})"

    # --- the provider

    async def open(self, name: str, *, workspace: str | os.PathLike[str] | None = None) -> Space:
        """The Space of this name with its daemon running, made if there is none or its folder is gone.

        ``workspace``: a directory of the user's that the Space works in; None: one of its own, or the one it was made
        with. Raises SpaceUnavailable; SpaceNotReady, where the daemon or the Space went away just then and opening it
        again may do; SpaceMisplaced if the workspace overlaps another Space's or the place where Spaces are kept (rule
        S108); ValueError for a name that is none.
        """
        given = None if workspace is None else _real(workspace)
        if not await self._known(name):  # Before anything is made, here or in the directory of somebody else.
            await self._call(local_folder.check_place, self._folder(name), given)
        async with self._locked(name) as folder:
            return await self._running(folder, await self._call(_found_or_made, folder, given))

    async def find(self, name: str) -> Space | None:
        """As ``open``; None where there is no such Space or its folder is gone."""
        if not await self._known(name):
            return None
        async with self._locked(name) as folder:
            record = await self._call(_found, folder)
            return None if record is None else await self._running(folder, record)

    async def restart(self, name: str) -> Space:
        """End the daemon, which may hang, and start another; commands run on meanwhile (rule S107)."""
        if not await self._known(name):
            raise self._absent(name)
        async with self._locked(name) as folder:
            record = await self._call(_found, folder)
            if record is None:
                raise self._absent(name)
            if record.daemon is not None:
                await self._call(local_processes.end, record.daemon, term_s=_TERM_S)
            return await self._running(folder, record)

    async def stop(self, name: str) -> Status | None:
        """End the daemon and kill everything that lives in the Space; its folder and workspace stay, and the next
        ``open`` starts a daemon. What is killed is done by a daemon: where none answers, one is started for it.

        What the daemon said before it ended; None: the Space was lost, and what was known of it is killed. Raises
        SpaceUnavailable, also if there is no such Space, and SpaceProcessesRemain.
        """
        if not await self._known(name):
            raise self._absent(name)
        async with self._locked(name) as folder:
            record = await self._call(folder.read_record)
            if not record.live:
                raise self._absent(name)
            if await self._call(folder.find, record) is None:
                await self._call(folder.end_lost, record)
                return None
            try:
                space = await self._running(folder, record)
            except SpaceUnavailable:
                if record.daemon is None:
                    raise
                await self._call(local_processes.end, record.daemon, term_s=_TERM_S)  # it hangs
                space = await self._running(folder, record)
            return await self._shut_down(space, folder)

    async def delete(self, name: str) -> None:
        """Kill everything that lives in the Space and remove its folder; a workspace of the user's stays as it is.
        The next Space of this name has a higher generation. Raises SpaceUnavailable and SpaceProcessesRemain: then
        nothing was removed."""
        if not await self._known(name):
            return
        async with self._locked(name) as folder:
            record = await self._call(folder.read_record)
            if not record.live:
                return
            if await self._call(folder.find, record) is not None:
                await self._shut_down(await self._running(folder, record), folder)
                record = await self._call(folder.read_record)
            await self._call(_end_and_remove, folder, record)

    async def names(self) -> tuple[str, ...]:
        """The Spaces that were made here and not deleted, by name."""
        return await self._call(local_folder.names, self._directory)

    # --- one daemon

    async def _call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await self._threads.call(function, *args, **kwargs)
        except OSError as error:
            # A folder that is gone was most likely moved away in between; then another is made next time.
            kind = SpaceNotReady if isinstance(error, FileNotFoundError) else SpaceUnavailable
            raise kind(
                f"the Spaces in {self._directory} cannot be used: {error.strerror or error}"
                + (f" ({error.filename})" if error.filename else "")
            ) from error

    def _absent(self, name: str) -> SpaceUnavailable:
        return SpaceUnavailable(f"there is no Space {name} in {self._directory}; open it to make one")

    def _folder(self, name: str) -> Folder:
        return local_folder.folder_of(self._directory, name)

    async def _known(self, name: str) -> bool:
        return await self._call(local_folder.has_record, self._folder(name))

    @asynccontextmanager
    async def _locked(self, name: str) -> AsyncGenerator[Folder]:
        """Only one process at a time makes, starts or deletes a Space (rule S107)."""
        folder = self._folder(name)
        await self._call(local_folder.prepare_directory, self._directory)
        clock = asyncio.get_running_loop().time
        deadline = clock() + 2 * self._options.start_s + 30.0
        pause = 0.005
        # Not in a thread: a cancellation there would lose the descriptor, and the lock with it.
        while (lock := local_folder.try_lock(folder)) is None:
            if clock() > deadline:
                raise SpaceUnavailable(
                    f"another process has been opening or deleting the Space {name} for too long; it holds "
                    f"{folder.home}/{name}.lock"
                )
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.1)
        try:
            yield folder
        finally:
            os.close(lock)

    async def _running(self, folder: Folder, record: Record) -> Space:
        """The Space with a daemon that answers; one is started if nobody listens. Raises SpaceUnavailable, also
        (SpaceNotReady) if the Space was lost meanwhile."""
        try:
            return await self._served(folder, record)
        except SpaceUnavailable as error:
            if not isinstance(error, SpaceNotReady) and await self._call(folder.find, record) is None:
                raise SpaceNotReady(
                    f"the Space {folder.name} was lost while it was opened; open it again, to make another"
                ) from error
            raise

    async def _served(self, folder: Folder, record: Record) -> Space:
        address = SpaceAddress(
            name=folder.name,
            generation=record.generation,
            address=f"unix:{folder.socket}",
            token=await self._call(folder.read_token),
            containment="none",
            workspace=None if record.workspace is None else folder.workspace(record),
        )
        try:
            status = await _status(address)
        except NobodyListens:
            await self._call(local_daemon.start, folder, record, self._options)
            status = await _status(address)
        await self._call(folder.note_daemon, record, status.pid)
        return Space(address.contained(status.containment), self)

    async def _shut_down(self, space: Space, folder: Folder) -> Status:
        """What the daemon said before."""
        async with await space.connect() as client:
            seen = client.seen
            mark = local_processes.mark_of(seen.pid)
            try:
                await client.shutdown(kill=True)
            except SpaceConnectionLost as error:
                raise SpaceUnavailable(f"the Space {space.name} did not end: {error}") from error
        if mark is not None and not await self._call(local_processes.wait_gone, mark, local_processes.GONE_S):
            raise SpaceUnavailable(f"the daemon of the Space {space.name}, process {mark.pid}, does not end")
        return seen


async def _status(address: SpaceAddress) -> Status:
    """What the daemon says of itself. Raises NobodyListens, SpaceUnavailable."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + _READY_S
    while True:
        try:
            async with await SpaceClient.connect(address, limits=ClientLimits(connect_s=0.0)) as client:
                return client.seen
        except SpaceNotReady:
            if clock() > deadline:
                raise
        await asyncio.sleep(0.02)


def _real(path: str | os.PathLike[str]) -> str:
    return os.path.realpath(path)


def _found(folder: Folder) -> Record | None:
    return folder.find(folder.read_record())


def _found_or_made(folder: Folder, workspace: str | None) -> Record:
    record = folder.read_record()
    if record.live and workspace is not None and folder.workspace(record) != workspace:
        raise SpaceMisplaced(f"the Space {folder.name} works in {folder.workspace(record)}, not in {workspace}")
    return folder.find(record) or folder.make(record, workspace)


def _end_and_remove(folder: Folder, record: Record) -> None:
    folder.end_lost(record)
    folder.remove(record)
