"""One connection to a daemon: it says hello, then carries one request at a time.

A request that does not get its answer, because of a time-out, a cancellation or a cut, ends its connection: the
answer would come later and be taken for that of another request (rule S102).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Generator, Mapping

import msgspec

from perdure.spaces import frames, wire
from perdure.spaces.errors import (
    NobodyListens,
    SpaceConnectionLost,
    SpaceNotReady,
    SpaceRequestInvalid,
    SpaceTooLarge,
    SpaceUnauthorized,
    SpaceUnavailable,
)

PROTOCOL = 1
HELLO_S = 10.0
"""The longest a daemon may take for its hello."""
_READ_AHEAD = 1024 * 1024
MAX_SUN_PATH = 107
"""Bytes that a unix socket's path can have; a longer one is reached through its directory."""


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An error as the daemon tells it."""

    code: str
    message: str = ""
    path: wire.SpacePath | None = None
    fence: wire.Fence | None = None
    pids: tuple[int, ...] = ()
    digests: tuple[str, ...] = ()


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """One answer: a result with its body, or an error."""

    result: msgspec.Raw
    body: bytes
    error: ErrorAnswer | None
    last: bool = False
    """The daemon could not read the request and closes the connection."""


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    id: int | None = None
    result: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class Connection:
    """``open`` makes one. ``status``: what the daemon said of itself at hello."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._id = 0
        self._open = True
        self._busy = False
        self.status: wire.Status | None = None

    @classmethod
    async def open(cls, address: str, token: str, *, patience_s: float) -> Connection:
        """Connect and say hello, trying again for ``patience_s`` while nobody listens or too many are connected.

        Raises SpaceUnavailable; NobodyListens, SpaceNotReady and SpaceUnauthorized are kinds of it.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + patience_s
        pause = 0.01
        while True:
            try:
                return await cls._open_once(address, token)
            except (NobodyListens, SpaceNotReady):
                if clock() + pause > deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.25)

    @classmethod
    async def _open_once(cls, address: str, token: str) -> Connection:
        try:
            async with asyncio.timeout(HELLO_S):
                reader, writer = await _connect(address)
                connection = cls(reader, writer)
                try:
                    await connection._hello(address, token)
                except BaseException:
                    connection.abort()
                    raise
                return connection
        except TimeoutError as error:
            raise SpaceUnavailable(
                f"the Space at {address} did not answer within {HELLO_S:g} s; if its daemon hangs, restart it"
            ) from error
        except (ConnectionRefusedError, FileNotFoundError) as error:
            raise NobodyListens(f"no daemon listens at {address}; open the Space again through its provider") from error
        except OSError as error:
            raise SpaceNotReady(f"the Space at {address} cannot be reached: {error.strerror or error}") from error

    async def _hello(self, address: str, token: str) -> None:
        try:
            reply = await self.request("hello", {"token": token, "protocol": PROTOCOL}, b"", timeout_s=HELLO_S)
            if reply.error is None:
                self.status = wire.decode(reply.result, wire.Status)
                return
        except SpaceConnectionLost as error:
            raise SpaceNotReady(f"the Space at {address} ended the connection before it said hello") from error
        except (msgspec.MsgspecError, ValueError) as error:
            raise SpaceUnavailable(
                f"what answers at {address} is no daemon of a Space that this version knows"
            ) from error
        if reply.error.code == "unauthorized":
            raise SpaceUnauthorized(f"the Space at {address} has another token; take its address from its provider")
        kind = SpaceNotReady if reply.error.code == "busy" else SpaceUnavailable
        raise kind(f"the Space at {address} refused the connection: {reply.error.message} ({reply.error.code})")

    @property
    def usable(self) -> bool:
        """It is open, as far as can be seen, and nothing is under way on it."""
        return self._open and not self._busy and not self._reader.at_eof() and not self._writer.is_closing()

    async def request(self, op: str, fields: Mapping[str, object], body: bytes, *, timeout_s: float) -> Reply:
        """Raises SpaceConnectionLost and what a bound refuses (nothing was sent then, the connection is as before)."""
        assert not self._busy, "one request at a time"
        assert self._open, "a connection that was given up is not used again"
        self._id += 1
        header = _encode(op, self._id, fields, body)
        self._busy = True
        whole = False
        try:
            async with asyncio.timeout(timeout_s):
                frames.send(self._writer, header, body)
                await self._writer.drain()
                raw, content = await frames.receive(self._reader)
            reply = _reply(raw, content, self._id)
            whole = not reply.last
            return reply
        except TimeoutError as error:
            raise SpaceConnectionLost("timeout", f"the Space did not answer {op} within {timeout_s:g} s") from error
        except (EOFError, OSError) as error:
            raise SpaceConnectionLost("closed", f"the connection to the Space ended during {op}") from error
        except (frames.MalformedFrame, msgspec.MsgspecError, ValueError) as error:
            raise SpaceConnectionLost("malformed", f"the answer to {op} is none of this protocol ({error})") from error
        finally:
            self._busy = False
            if not whole:
                self.abort()

    def abort(self) -> None:
        """Close it at once."""
        if self._open:
            self._open = False
            self._writer.transport.abort()

    async def aclose(self) -> None:
        """Close it and wait until it is closed."""
        self.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


def _encode(op: str, number: int, fields: Mapping[str, object], body: bytes) -> bytes:
    header: bytes | None = None
    with contextlib.suppress(UnicodeEncodeError):
        header = msgspec.json.encode({"op": op, "id": number, **fields})
    if header is None:  # Raised here and not above: the error of the encoder carries the text.
        raise SpaceRequestInvalid(op, "bad_request", "a text has characters that are not valid Unicode")
    if len(header) > frames.HEADER_BYTES:
        raise SpaceTooLarge(op, "too_large", f"its {len(header)} bytes are more than the {frames.HEADER_BYTES} allowed")
    if len(body) > frames.BODY_BYTES:
        raise SpaceTooLarge(
            op, "too_large", f"{len(body)} bytes are more than the {frames.BODY_BYTES} one request takes"
        )
    return header


def _reply(raw: bytes, body: bytes, number: int) -> Reply:
    answer = msgspec.json.decode(raw, type=_Answer)
    if answer.error is not msgspec.UNSET:
        error = wire.decode(answer.error, ErrorAnswer)
        if answer.id not in (number, None):
            raise ValueError("it answers another request")
        return Reply(result=msgspec.Raw(b"null"), body=b"", error=error, last=answer.id is None)
    if answer.id != number:
        raise ValueError("it answers another request")
    if answer.result is msgspec.UNSET:
        raise ValueError("it has neither a result nor an error")
    return Reply(result=answer.result, body=body, error=None)


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    kind, _, where = address.partition(":")
    if kind == "unix" and where.startswith("/"):
        with _reachable(where) as path:
            return await asyncio.open_unix_connection(path, limit=_READ_AHEAD)
    host, _, port = where.rpartition(":")
    if kind == "tcp" and host and port.isdigit():
        return await asyncio.open_connection(host.strip("[]"), int(port), limit=_READ_AHEAD)
    raise SpaceUnavailable(f"{address} is no address of a Space; it is unix:/PATH or tcp:HOST:PORT")


@contextlib.contextmanager
def _reachable(path: str) -> Generator[str]:
    """A name of a unix socket that fits a socket address, however long its path is."""
    if len(os.fsencode(path)) <= MAX_SUN_PATH:
        yield path
        return
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
