"""Where each conversation's files and commands are: in the directory that its agent settings name, which may be the
workspace of a Space. That a directory is one is kept in the store: a chat that goes on there is in the Space again."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from perdure.cli.errors import CommandError
from perdure.harness.documents import Agent
from perdure.harness.environment import ExecutionEnvironment
from perdure.kernel.document import Document
from perdure.kernel.documents import read_state
from perdure.kernel.errors import PerdureError
from perdure.kernel.records import Address
from perdure.kernel.session import Session
from perdure.spaces.documents import SpaceState
from perdure.spaces.durable import DurableSpace, durable_space
from perdure.spaces.local import LocalSpaces
from perdure.spaces.local_folder import name_for
from perdure.spaces.provider import SpaceAddress, SpaceProvider
from perdure.spaces.space import Space
from perdure.tools.local import LocalEnvironment

MOST: Final = 100
"""Environments that are kept."""


class ChatSpace(Document, kind="chat.space", scope="session", family=True):
    """Which directory is the workspace of a Space; keyed by the Space's name."""

    directory: str = ""


@dataclass(frozen=True, slots=True)
class Site:
    """A Space that a chat is in."""

    space: Space
    state: SpaceState | None
    """As the chat found it; None: no call was made in it yet."""

    @property
    def words(self) -> str:
        at = "no image yet" if self.state is None else f"image {self.state.image}"
        sandbox = "" if self.space.containment != "none" else ", containment none"
        return f"in the Space {self.space.name}, generation {self.space.generation}, {at}{sandbox}"


class Places:
    """Work of other conversations of the store goes on in this process too, each where it was."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._environments: dict[str, LocalEnvironment] = {}
        self._spaces: dict[str, DurableSpace] = {}
        """By directory. They are found when a call needs them."""

    async def attach(self, session: Session) -> None:
        """Before anything runs: take up which directories are workspaces."""
        self._session = session
        for name, directory in (await self._known()).items():
            self._spaces[directory] = _space_of(name, directory)

    async def settle(self, directory: str) -> None:
        """From now on this directory is the workspace of a Space. Raises CommandError, SpaceUnavailable and
        SpaceMisplaced."""
        session = self._attached()
        if directory in self._spaces:
            return
        name = name_for(directory)
        other = (await self._known()).get(name)
        if other is not None:
            raise CommandError(
                f"the Space {name} of this store has its files in {other}, and {directory} would be made like it: "
                "name another store with --db"
            )
        await LocalSpaces.at(directory)
        async with session.commit() as tx:
            (await tx.draft(ChatSpace, key=name)).directory = directory
        self._spaces[directory] = _space_of(name, directory)

    async def open(self, directory: str) -> Site | None:
        """The Space whose workspace this directory is, with its daemon running; None if it is of none.

        Raises CommandError if going on would take back what another store's agent did there, and SpaceUnavailable.
        """
        session = self._attached()
        directory = _real(directory)
        if directory not in self._spaces:
            return None
        space = await LocalSpaces.at(directory)
        state = await session.snapshot(SpaceState, key=space.name)
        async with await space.connect() as client:
            image = client.seen.image
        if state is not None and state.image and image is not None and image.log != session.info.log_id:
            raise CommandError(
                f"{directory} was worked in with another store since, and going on here would bring it back to image "
                f"{state.image} of this one. Go on there, or write that image out elsewhere: perdure space restore"
            )
        return Site(space, state)

    def environment_of(self, conversation: int) -> ExecutionEnvironment | None:
        """None where no directory is named, or it is not there any more."""
        directory = self._directory(conversation)
        if directory is None or not os.path.isdir(directory):
            return None
        space = self._spaces.get(_real(directory))
        if space is not None:
            return space
        if directory not in self._environments:
            if len(self._environments) >= MOST:
                self._environments.clear()
            self._environments[directory] = LocalEnvironment(directory)
        return self._environments[directory]

    def _directory(self, conversation: int) -> str | None:
        # Whoever asks has just read the settings: they are in memory.
        address = Address(Agent.definition.kind, "conversation", conversation)
        loaded = self._attached().documents.peek(address)
        if loaded is None:
            return None
        try:
            agent = read_state(loaded.settled, Agent)
        except PerdureError:  # settings of a newer release
            return None
        return None if agent is None else agent.cwd

    async def _known(self) -> dict[str, str]:
        """Name of a Space -> its directory."""
        session = self._attached()
        found: dict[str, str] = {}
        for record in await session.reading(session.storage.documents("session", 0)):
            if record.kind == ChatSpace.definition.kind:
                kept = await session.snapshot(ChatSpace, key=record.key)
                if kept is not None:
                    found[record.key] = kept.directory
        return found

    def _attached(self) -> Session:
        assert self._session is not None, "nothing runs before the session is known"
        return self._session


class _InDirectory(SpaceProvider):
    """The local Space of one directory: also where what was kept of it is gone, it works in no other."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    async def open(self, name: str) -> Space:
        return await LocalSpaces.at(self._directory)

    async def find(self, name: str) -> Space | None:
        return await LocalSpaces.at(self._directory)

    async def restart(self, name: str) -> Space:
        space = await LocalSpaces.at(self._directory)
        return await space.restart()

    async def delete(self, name: str) -> None:
        await (await LocalSpaces.at(self._directory)).delete()


def _real(directory: str) -> str:
    return os.path.realpath(directory)


def _space_of(name: str, directory: str) -> DurableSpace:
    # Its provider says where it is, at the first call; until then there is no address.
    nowhere = SpaceAddress(name=name, generation=0, address="", token="", containment="none")
    return durable_space(Space(nowhere, _InDirectory(directory)))
