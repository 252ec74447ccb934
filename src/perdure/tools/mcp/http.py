"""The SDK's transport over streamable HTTP: our headers, bounded answers, and the status that each request had."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Final

import httpx2
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._stream_protocols import ReadStream, WriteStream
from mcp.shared.message import SessionMessage

from perdure.tools.mcp.settings import HttpServer

MAX_ANSWER: Final = 32 * 1024 * 1024
"""Bytes of one answer, and of one event of a stream."""
CONNECT_S: Final = 30.0
LEAST_READ_S: Final = 300.0
"""Seconds without a byte after which a stream is given up; at least those of the longest call, and some."""

Streams = tuple[ReadStream[SessionMessage | Exception], WriteStream[SessionMessage]]


class Answered:
    """The status of the response to a request; 0: there was none."""

    def __init__(self) -> None:
        self.status = 0


answered: ContextVar[Answered] = ContextVar("answered")
"""Whoever sends a request sets it: the transport posts it in a copy of the sender's context."""


class AnswerTooLong(httpx2.StreamError):
    """An answer is longer than is read."""


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        taken = 0
        async for chunk in self._stream:
            taken += len(chunk)
            if taken > MAX_ANSWER:
                raise AnswerTooLong(f"the server's answer takes more than {MAX_ANSWER} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _note(response: httpx2.Response) -> None:
    noted = answered.get(None)
    if noted is not None:
        noted.status = response.status_code
    # Of a stream of events each event has a bound of its own.
    if not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Bounded(response.stream)


@asynccontextmanager
async def http_transport(server: HttpServer, timeout_ms: int) -> AsyncGenerator[Streams, None]:
    """A post that gets no response at all ends the block with the error of ``httpx2``."""
    read_s = max(LEAST_READ_S, timeout_ms / 1000) + CONNECT_S
    async with (
        httpx2.AsyncClient(
            headers={**server.headers, "Accept-Encoding": "identity"},  # the bounds are of what is on the wire
            timeout=httpx2.Timeout(CONNECT_S, read=read_s),
            event_hooks={"response": [_note]},
        ) as client,
        streamable_http_client(server.url, http_client=client, max_sse_event_size=MAX_ANSWER) as streams,
    ):
        yield streams
