"""Commands in the background of a Space: lasting commands of its daemon, found again by the log (rules S168 to S171).

The daemon keeps the process, its output and its end; the log says which keys they have. Neither alone is enough: a
command whose call was undone is in no log, and one that a restore or another driver killed runs no longer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final, Protocol

from msgspec.structs import replace

from perdure.harness.environment import BackgroundCommand
from perdure.spaces.client import SpaceClient
from perdure.spaces.documents import BackgroundNote
from perdure.spaces.wire import MAX_WAIT_MS, Command, ExecKey
from perdure.tools.background import OUTPUT_LIMIT, SHOWN, STOPPED, check_range, check_room, no_such

KILLED: Final = (
    "killed: the workspace was brought back to an earlier state, or another driver took the Space; what it did until "
    "then may be undone"
)
GONE: Final = "the Space or the machine that it ran in is gone"


class BackgroundLog(Protocol):
    """Where an attempt's environment finds and leaves what is known of commands in the background."""

    async def notes(self) -> Sequence[BackgroundNote]: ...

    def add(self, note: BackgroundNote) -> None:
        """The attempt has started one."""
        ...


class NoLog:
    """For an environment outside of a log: it knows its own."""

    def __init__(self) -> None:
        self._own: list[BackgroundNote] = []

    async def notes(self) -> Sequence[BackgroundNote]:
        return tuple(self._own)

    def add(self, note: BackgroundNote) -> None:
        self._own.append(note)


def key_of(note: BackgroundNote) -> ExecKey:
    return ExecKey(call=note["number"], attempt=note["attempt"], nonce=note["nonce"], ordinal=note["ordinal"])


def note_of(key: ExecKey, command: str) -> BackgroundNote:
    """How the log keeps it. The id is that of its call in this Space, which no other has."""
    return {
        "id": f"{key.call}" if key.ordinal == 1 else f"{key.call}.{key.ordinal}",
        "number": key.call,
        "attempt": key.attempt,
        "nonce": key.nonce,
        "ordinal": key.ordinal,
        "command": command[:SHOWN],
        "at": time.time_ns() // 1_000_000,
    }


def told(note: BackgroundNote, command: Command) -> BackgroundCommand:
    """A command as its tool's caller sees it."""
    known = BackgroundCommand(
        id=note["id"],
        command=note["command"],
        state="running",
        started_at=note["at"],
        output_bytes=command.output_size,
    )
    match command.state, command.cause:
        case "running", _:
            return known
        case "exited", "exit" | "not_started":
            return replace(known, state="exited", exit_code=command.code, signal=command.signal)
        case "exited", cause:
            return replace(known, state="stopped", reason=OUTPUT_LIMIT if cause == "output_limit" else STOPPED)
        case "cut_off", _:
            return replace(known, state="lost", reason=KILLED)
        case _:
            return replace(known, state="lost", reason=GONE)


class SpaceBackground:
    """Those of ``notes``, through a driver's client, which raises what it raises."""

    def __init__(self, client: SpaceClient, notes: Sequence[BackgroundNote]) -> None:
        self._client = client
        self._notes = {note["id"]: note for note in notes}

    async def all(self) -> tuple[BackgroundCommand, ...]:
        if not self._notes:
            return ()
        looked = await self._client.look([key_of(note) for note in self._notes.values()])
        return tuple(told(note, command) for note, command in zip(self._notes.values(), looked.commands, strict=True))

    async def check_room(self) -> None:
        """Raises CommandNotStarted."""
        check_room(sum(command.state == "running" for command in await self.all()))

    async def read(
        self, id: str, *, offset: int, length: int, wait_ms: int, until_exit: bool
    ) -> tuple[BackgroundCommand, bytes]:
        """Raises NoSuchCommand, ValueError."""
        check_range(offset, length, wait_ms)
        note = self._note(id)
        clock = asyncio.get_running_loop().time
        deadline = clock() + wait_ms / 1000
        while True:
            left = max(0, round((deadline - clock()) * 1000))
            command, data = await self._client.wait(
                key_of(note), wait_ms=min(left, MAX_WAIT_MS), offset=offset, length=max(1, length),
                until_exit=until_exit,
            )  # fmt: skip
            if command.state != "running" or left <= MAX_WAIT_MS or (data and not until_exit):
                seen = told(note, command)
                return seen, data[: max(0, min(length, seen.output_bytes - offset))]

    async def stop(self, id: str) -> BackgroundCommand:
        """Raises NoSuchCommand, SpaceProcessesRemain."""
        note = self._note(id)
        return told(note, await self._client.kill(key_of(note), "aborted"))

    def _note(self, id: str) -> BackgroundNote:
        if id not in self._notes:
            raise no_such(id)
        return self._notes[id]
