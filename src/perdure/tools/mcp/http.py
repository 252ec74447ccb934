"""The SDK's transport over streamable HTTP: our headers, bounded answers, and what became of each request.

A post that fails fails alone: the SDK would end the whole connection with it, and every other call.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, Final

import httpx2
from mcp.client.streamable_http import MCP_SESSION_ID, streamable_http_client
from mcp.shared._stream_protocols import ReadStream, WriteStream
from mcp.shared.message import SessionMessage

from perdure.tools.mcp.settings import HttpServer

MAX_ANSWER: Final = 32 * 1024 * 1024
"""Bytes of one answer, and of one event of a stream."""
CONNECT_S: Final = 30.0
LEAST_READ_S: Final = 300.0
"""Seconds without a byte after which a stream is given up; at least those of the longest call, and some."""
END_S: Final = 2.0
"""For a server to hear that its session is over."""
STREAMS_AT_ONCE: Final = 50
"""Streams that are opened, or opened again, without a wait."""
STREAMS_A_S: Final = 1.0
"""Beyond these: a server may end each as soon as it is there."""

Streams = tuple[ReadStream[SessionMessage | Exception], WriteStream[SessionMessage]]


class Answered:
    """What became of a request."""

    def __init__(self) -> None:
        self.status = 0
        """Of the last response; 0: there was none."""
        self.in_session = False
        """Whether it was sent as a part of a session."""
        self.unsent: str | None = None
        """Why the server certainly got nothing of it."""
        self.broken: str | None = None
        """Why there was no whole response to it."""
        self.unread: str | None = None
        """Why its answer was not read."""


answered: ContextVar[Answered] = ContextVar("answered")
"""Whoever sends a request sets it: the transport posts it in a copy of the sender's context."""


class _Unread(httpx2.StreamError):
    """An answer is not read on."""


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, noted: Answered | None, most: int | None) -> None:
        self._stream = stream
        self._noted = noted
        self._most = most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._most is None:
            raise self._unread("it is compressed, which was not asked for")
        taken = 0
        async for chunk in self._stream:
            taken += len(chunk)
            if taken > self._most:
                raise self._unread(f"it takes more than {self._most} bytes")
            yield chunk

    def _unread(self, why: str) -> _Unread:
        if self._noted is not None:
            self._noted.unread = why
        return _Unread(why)

    async def aclose(self) -> None:
        await self._stream.aclose()


class _Client(httpx2.AsyncClient):
    """Sends as it is told, within bounds of its own."""

    def __init__(self, **options: Any) -> None:  # Any: those of httpx2
        super().__init__(**options)
        self._streams = float(STREAMS_AT_ONCE)
        self._filled_at = 0.0

    async def send(self, request: httpx2.Request, **how: Any) -> httpx2.Response:  # Any: those of httpx2
        noted = answered.get(None) if request.method == "POST" else None
        if request.method == "GET":
            await self._wait_for_turn()
        elif request.method == "DELETE":
            request.extensions["timeout"] = httpx2.Timeout(END_S).as_dict()
        try:
            response = await super().send(request, **how)
        except httpx2.TransportError as error:
            if request.method != "POST":
                raise
            if noted is not None:
                # Before there is a connection nothing was sent.
                if isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout)):
                    noted.unsent = words_of(error)
                else:
                    noted.broken = words_of(error)
            return httpx2.Response(503, request=request)
        if noted is not None:
            noted.status = response.status_code
            noted.in_session = MCP_SESSION_ID in request.headers
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            del response.headers["content-encoding"]
            response.stream = _Bounded(response.stream, noted, None)
        # Of a stream of events each event has a bound of its own.
        elif not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
            response.stream = _Bounded(response.stream, noted, MAX_ANSWER)
        return response

    async def _wait_for_turn(self) -> None:
        now = asyncio.get_running_loop().time()
        self._streams = min(STREAMS_AT_ONCE, self._streams + (now - self._filled_at) * STREAMS_A_S)
        self._filled_at = now
        self._streams -= 1
        if self._streams < 0:
            await asyncio.sleep(-self._streams / STREAMS_A_S)


def words_of(error: httpx2.TransportError) -> str:
    """Its type, and what the system said: its own words may hold an address."""
    below: BaseException | None = error
    while below is not None:
        if isinstance(below, (socket.gaierror, ssl.SSLError)):
            return f"{type(error).__name__}: {below.strerror}"
        if isinstance(below, OSError) and below.errno is not None:
            return f"{type(error).__name__}: {os.strerror(below.errno)}"
        below = below.__cause__ or below.__context__
    return type(error).__name__


@asynccontextmanager
async def http_transport(server: HttpServer, timeout_ms: int) -> AsyncGenerator[Streams, None]:
    read_s = max(LEAST_READ_S, timeout_ms / 1000) + CONNECT_S
    async with (
        _Client(
            headers={**server.headers, "Accept-Encoding": "identity"},  # the bounds are of what is on the wire
            # Calls wait for their own time, and not for one another's connection.
            timeout=httpx2.Timeout(CONNECT_S, read=read_s, pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=20),
        ) as client,
        streamable_http_client(server.url, http_client=client, max_sse_event_size=MAX_ANSWER) as streams,
    ):
        yield streams
