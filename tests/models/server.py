"""A provider on this machine: three protocols, strict about what it is sent, and failing on cue.

Each test tells it what it answers, in order. What it refused as a breach of a provider's rules is in ``breaches``.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from dialects import BACKGROUND, DIALECTS, Dialect, Responses
from replies import Answer, Broken, Made, Refusal, Reply

KEY = "test-key-0123456789"
STORED = f"/v1/responses/{BACKGROUND}"
"""Where what is made in the background is asked for."""


@dataclass(frozen=True)
class Sent:
    """A request as it came."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    method: str = "POST"


@dataclass
class Provider:
    """Answers ``replies`` in order, whatever protocol they are asked for in."""

    replies: deque[Reply] = field(default_factory=deque)
    sent: list[Sent] = field(default_factory=list)
    breaches: list[str] = field(default_factory=list)
    open: int = 0
    """Connections."""
    dialects: dict[str, Dialect[Any]] = field(default_factory=lambda: {path: make() for path, make in DIALECTS.items()})
    address: str = ""
    slivers: int = 0
    """Bytes that arrive at a time, wherever that cuts; 0: an event at a time."""
    stalled: asyncio.Event = field(default_factory=asyncio.Event)
    """A stream stands still."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """The client has closed a stream that stood still."""

    def will(self, *replies: Reply) -> None:
        self.replies.extend(replies)

    def url(self, protocol: str) -> str:
        return self.address if protocol == "anthropic" else f"{self.address}/v1"

    def dialect(self, protocol: str) -> Dialect[Any]:
        path = {"openai": "/v1/responses", "openai-chat": "/v1/chat/completions", "anthropic": "/v1/messages"}
        return self.dialects[path[protocol]]

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [sent.body for sent in self.sent]

    def check_prefixes(self) -> None:
        """Every request told the one before it in the same bytes, so that a cache would have hit."""
        transcripts = [self.dialects[sent.path].rules.transcript(sent.body) for sent in self.sent]
        for shorter, longer in pairwise(transcripts):
            assert longer[: len(shorter)] == shorter

    # --- HTTP ------------------------------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            while (head := await self._head(reader)) is not None:
                method, path, headers = head
                raw = await reader.readexactly(int(headers.get("content-length", "0")))
                await self._answer(Sent(path, headers, json.loads(raw or b"{}"), method), reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _head(self, reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str]] | None:
        line = await reader.readline()
        if not line:
            return None
        method, path, _ = line.decode().split(" ")
        headers: dict[str, str] = {}
        while (line := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode().partition(":")
            headers[name.strip().lower()] = value.strip()
        return method, path.partition("?")[0], headers

    async def _answer(self, sent: Sent, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.sent.append(sent)
        stored = sent.path == (f"{STORED}/cancel" if sent.method == "POST" else STORED)
        dialect = self.dialects.get("/v1/responses" if stored else sent.path)
        if dialect is None:
            await self._refuse(writer, OTHER, Refusal(status=404, message=f"no {sent.path} here"))
            return
        if KEY not in (sent.headers.get("x-api-key"), sent.headers.get("authorization", "").removeprefix("Bearer ")):
            given = sent.headers.get("x-api-key") or sent.headers.get("authorization", "")
            refusal = Refusal(status=401, code="invalid_api_key", message=f"Incorrect API key: {given}")
            await self._refuse(writer, dialect, refusal)
            return
        found = [] if stored else dialect.rules.check(sent.body)
        if not self.replies:
            found.append("a request that nobody waits for")
        if found:
            self.breaches += [f"{sent.path}: {breach}" for breach in found]
            await self._refuse(writer, dialect, Refusal(status=400, message="; ".join(found)))
            return
        reply = self.replies.popleft()
        if isinstance(reply, Refusal):
            await self._refuse(writer, dialect, reply)
        elif isinstance(reply, Made):
            assert isinstance(dialect, Responses)
            await self._whole(writer, json.dumps(dialect.made(reply, sent.body.get("model", "m"))))
        else:
            await self._stream(reply, sent, dialect, reader, writer)

    async def _refuse(self, writer: asyncio.StreamWriter, dialect: Dialect[Any], refusal: Refusal) -> None:
        body = (json.dumps(dialect.error(refusal)) if refusal.body is None else refusal.body).encode()
        kind = "application/json" if refusal.body is None else "text/html"
        headers = {"content-type": kind, "content-length": str(len(body)), **refusal.headers}
        lines = [f"HTTP/1.1 {refusal.status} Nope", *(f"{name}: {value}" for name, value in headers.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()

    async def _whole(self, writer: asyncio.StreamWriter, body: str) -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body.encode())}\r\n\r\n"
        writer.write((head + body).encode())
        await writer.drain()

    async def _stream(
        self,
        reply: Answer | Broken,
        sent: Sent,
        dialect: Dialect[Any],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        answer = reply if isinstance(reply, Answer) else reply.answer
        events = list(dialect.events(answer, sent.body))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        if isinstance(reply, Broken):
            assert reply.after < len(events), f"there are only {len(events)} events"
            events = events[: reply.after]
        for event in events:
            self._chunk(writer, dialect.frame(event))
        await writer.drain()
        if isinstance(reply, Broken):
            match reply.how:
                case "cut":
                    transport = writer.transport
                    assert isinstance(transport, asyncio.Transport)
                    transport.abort()
                    return
                case "stall":
                    self.stalled.set()
                    await reader.read()  # until the client goes
                    self.left.set()
                    return
                case "garbage":
                    self._chunk(writer, 'event: message\ndata: {"nothing": \n\n')
                case "shape":
                    self._chunk(writer, 'data: ["no", "event"]\n\n')
                case "error":
                    self._chunk(writer, dialect.frame(dialect.failed(reply.code)))
                case "event":
                    self._chunk(writer, dialect.frame(dict(reply.event)))
                case "end":
                    pass
        else:
            self._chunk(writer, dialect.end)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _chunk(self, writer: asyncio.StreamWriter, text: str) -> None:
        data = text.encode()
        size = self.slivers or max(len(data), 1)
        for piece in (data[at : at + size] for at in range(0, len(data), size)):
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")


OTHER = DIALECTS["/v1/chat/completions"]()


@asynccontextmanager
async def provider(*replies: Reply) -> AsyncIterator[Provider]:
    """A running server. In the end it must have answered all it was told to, and been sent nothing it refused."""
    found = Provider(deque(replies))
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await found.serve(reader, writer)
        except asyncio.CancelledError:
            pass  # the test is over
        except Exception as error:
            found.breaches.append(f"the server failed: {error!r}")
            found.stalled.set()
        finally:
            tasks.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    found.address = f"http://{host}:{port}"
    try:
        yield found
        assert not found.breaches, found.breaches
        assert not found.replies, "it was asked less often than expected"
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
