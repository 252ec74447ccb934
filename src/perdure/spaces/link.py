"""The way to a daemon: a small pool of connections, and whether this driver has the Space.

Two lanes share the pool, so that a kill never waits behind commands that are being waited for: requests that wait
long take the wide one, everything else the narrow one.

What the link knows of the Space is its **admission**: epoch, connection and boot as the last advance answered them.
Every request carries the one it began under; a request that gets no answer, or a stale one, ends the admission it
began under and no later one (rule S102).
"""

from __future__ import annotations

from asyncio import Semaphore
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from perdure.spaces import wire
from perdure.spaces.connection import Connection, Reply
from perdure.spaces.errors import LostReason, SpaceConnectionLost, SpaceUnavailable
from perdure.spaces.provider import SpaceAddress
from perdure.spaces.refusals import LOST_CODES, Claim, exception

T = TypeVar("T")

_ADMITTED_CONNECT_S = 1.0
"""How long an admitted request tries to connect: a daemon that is gone took the admission with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Bounds of one client."""

    waits: int = 12
    """Connections for long waits: as many commands can be waited for at once."""
    controls: int = 4
    """Connections for everything else."""
    connect_s: float = 5.0
    """How long connecting is tried again while nobody listens."""
    quick_s: float = 60.0
    """The longest an answer may take whose work is small, beside the wait it asked for."""
    slow_s: float = 1800.0
    """The longest an answer may take that looks at or changes the whole workspace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What an advance gave: whose the Space is, and what its requests carry."""

    claim: Claim
    connection: int
    boot: str

    @property
    def fields(self) -> dict[str, object]:
        return {"epoch": self.claim.epoch, "connection": self.connection, "boot": self.boot}


class Link:
    """``status``: what the daemon said of itself last."""

    def __init__(self, address: SpaceAddress, limits: ClientLimits) -> None:
        self.address = address
        self.limits = limits
        self.status: wire.Status | None = None
        self.admission: Admission | None = None
        self._lost: tuple[LostReason, str] = ("not_advanced", "this client has not advanced")
        self._wide = Semaphore(limits.waits)
        self._narrow = Semaphore(limits.controls)
        self._idle: list[Connection] = []
        self._used: set[Connection] = set()
        self._closed = False

    async def open(self) -> None:
        """Make the first connection. Raises SpaceUnavailable."""
        try:
            self._idle.append(await self._connect(self.limits.connect_s))
        except SpaceConnectionLost as error:
            raise SpaceUnavailable(str(error)) from error

    async def aclose(self) -> None:
        self._closed = True
        self.admission = None
        self._lost = ("closed", "the client was closed")
        connections = [*self._idle, *self._used]
        self._idle.clear()
        for connection in connections:
            connection.abort()
        for connection in connections:
            await connection.aclose()

    # --- the admission

    def take_status(self, status: wire.Status) -> None:
        """Learn what answers. Raises SpaceConnectionLost if it is not the Space that was meant."""
        if (status.space, status.generation) != (self.address.name, self.address.generation):
            raise SpaceConnectionLost(
                "generation",
                f"generation {status.generation} of the Space {status.space!r} answers at {self.address.address}, "
                f"not generation {self.address.generation} of {self.address.name!r}",
            )
        if self.status is not None and self.status.instance != status.instance:
            self.end_admission(self.admission, "restarted", "the daemon of the Space was restarted")
        self.status = status

    def end_admission(self, admission: Admission | None, reason: LostReason, message: str) -> None:
        """That one has the Space no longer; a later one is not touched."""
        if admission is not None and admission is self.admission:
            self.admission = None
            self._lost = (reason, message)

    # --- requests

    async def ask(
        self,
        op: str,
        fields: Mapping[str, object],
        type: type[T],
        *,
        body: bytes = b"",
        wide: bool = False,
        timeout_s: float | None = None,
        path: str | None = None,
    ) -> tuple[T, bytes]:
        """An admitted request. ``path``: what a refusal about a file names. ``timeout_s``: None is the quick one."""
        admission = self.admission
        if admission is None:
            raise SpaceConnectionLost(*self._lost)
        fields = {**fields, **admission.fields}
        reply = await self._exchange(op, fields, body, admission, True, wide, timeout_s)
        return self._result(op, reply, type, admission, admission.claim, path), reply.body

    async def ask_open(
        self,
        op: str,
        fields: Mapping[str, object],
        type: type[T],
        *,
        timeout_s: float | None = None,
        claim: Claim | None = None,
    ) -> T:
        """A request that needs no admission."""
        admission = self.admission
        reply = await self._exchange(op, fields, b"", admission, False, False, timeout_s)
        return self._result(op, reply, type, admission, claim, None)

    async def _exchange(
        self,
        op: str,
        fields: Mapping[str, object],
        body: bytes,
        admission: Admission | None,
        admitted: bool,
        wide: bool,
        timeout_s: float | None,
    ) -> Reply:
        async with self._wide if wide else self._narrow:
            try:
                connection = await self._take(admission, admitted)
                try:
                    timeout_s = self.limits.quick_s if timeout_s is None else timeout_s
                    return await connection.request(op, fields, body, timeout_s=timeout_s)
                finally:
                    self._give_back(connection)
            except SpaceConnectionLost as error:
                self._lose(admission, error.reason)
                raise

    def _result(
        self, op: str, reply: Reply, type: type[T], admission: Admission | None, claim: Claim | None, path: str | None
    ) -> T:
        if reply.error is not None:
            error = exception(op, reply.error, claim, path)
            if reply.error.code in LOST_CODES:
                reason: LostReason = error.reason if isinstance(error, SpaceConnectionLost) else "stale_connection"
                self.end_admission(admission, reason, f"an earlier request was answered {reply.error.code}")
            raise error
        try:
            return wire.decode(reply.result, type)
        except (msgspec.MsgspecError, ValueError) as error:
            self._lose(admission, "malformed")
            raise SpaceConnectionLost("malformed", f"the answer to {op} is none of this protocol ({error})") from error

    def _lose(self, admission: Admission | None, reason: LostReason) -> None:
        """What else is open is most likely dead, too."""
        self.end_admission(admission, reason, f"an earlier request got no answer ({reason})")
        while self._idle:
            self._idle.pop().abort()

    async def _take(self, admission: Admission | None, admitted: bool) -> Connection:
        if self._closed:
            raise SpaceConnectionLost(*self._lost)
        connection = self._idle_connection()
        if connection is None:
            patience_s = self.limits.connect_s
            try:
                connection = await self._connect(min(patience_s, _ADMITTED_CONNECT_S) if admitted else patience_s)
            except SpaceUnavailable as error:
                raise SpaceConnectionLost("closed", str(error)) from error
        self._used.add(connection)
        if self._closed or (admitted and admission is not self.admission):
            # Closed, lost or advanced anew while this request waited for its turn.
            self._give_back(connection)
            if self.admission is None:
                raise SpaceConnectionLost(*self._lost)
            raise SpaceConnectionLost("stale_connection", "the driver has advanced since this request began")
        return connection

    def _idle_connection(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            connection.abort()
        return None

    async def _connect(self, patience_s: float) -> Connection:
        connection = await Connection.open(self.address.address, self.address.token, patience_s=patience_s)
        try:
            assert connection.status is not None, "it said hello"
            self.take_status(connection.status)
        except BaseException:
            connection.abort()
            raise
        return connection

    def _give_back(self, connection: Connection) -> None:
        self._used.discard(connection)
        if connection.usable and not self._closed:
            self._idle.append(connection)
        else:
            connection.abort()
