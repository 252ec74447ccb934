"""What goes between a transport and the SDK: of a server's messages no more than is used, without secrets (rules H392
and H393).

The SDK puts the words of errors into spans, and what it cannot read into the log; it begins a task for each thing that
a server tells or asks, however many these are.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final, Self

import anyio
from mcp.shared._stream_protocols import ReadStream, WriteStream
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCError, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse

from perdure.tools.mcp.losses import Loss

MOST_ASKED: Final = 1_000
"""Requests of a server that wait for their answer."""

_USED: Final = frozenset(
    {
        "notifications/cancelled",
        "notifications/progress",
        "notifications/subscriptions/acknowledged",
        "notifications/tools/list_changed",
    }
)
_LOGGERS: Final = (
    "client",
    "httpcore2.connection",
    "httpcore2.http11",
    "httpcore2.http2",
    "httpcore2.proxy",
    "httpcore2.socks",
    "httpx2",
    "mcp.client.client",
    "mcp.client.streamable_http",
    "mcp.shared.dispatcher",
    "mcp.shared.jsonrpc_dispatcher",
)

_ours: ContextVar[bool] = ContextVar("ours", default=False)


class _NotOurs(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not _ours.get()


_NOT_OURS: Final = _NotOurs()


@contextmanager
def kept_out_of_logs() -> Generator[None]:
    """Nothing that the SDK and its HTTP client do for this block, and for the tasks that it starts, is logged by them:
    addresses, ids of sessions and words of the server stand in it. What others do with them is logged as before."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_NOT_OURS)  # once, however often
    token = _ours.set(True)
    try:
        yield
    finally:
        with suppress(ValueError):  # what nobody runs any more is closed in the context of whoever drops it
            _ours.reset(token)


class Between:
    """What both directions share."""

    def __init__(self, without_secrets: Callable[[str], str], loss: Loss) -> None:
        self._without_secrets = without_secrets
        self._loss = loss
        self._asked: set[str] = set()
        """Ids of requests of the server that wait for their answer; 7 and "7" are one to the SDK."""

    def used(self, item: SessionMessage | Exception) -> bool:
        """Whether the SDK is to get what came from the server."""
        if isinstance(item, Exception):
            return False
        match item.message:
            case JSONRPCNotification(method=method, params=params):
                if method == "notifications/cancelled":  # the SDK answers it no more
                    self._asked.discard(str((params or {}).get("requestId")))
                return method in _USED
            case JSONRPCRequest(id=id):
                if str(id) in self._asked:
                    self._loss.tell("it asked for something under an id that waits for its answer already")
                    return False
                if len(self._asked) >= MOST_ASKED:
                    self._loss.tell(f"it asked for {MOST_ASKED} things and did not read what it was answered")
                    return False
                self._asked.add(str(id))
            case JSONRPCError(error=error):
                error.message = self._without_secrets(error.message)
            case _:
                pass
        return True

    def sent(self, item: SessionMessage) -> None:
        if isinstance(item.message, (JSONRPCResponse, JSONRPCError)):
            self._asked.discard(str(item.message.id))

    def ended(self) -> None:
        self._loss.tell("the connection ended")


class _Stream:
    """What the SDK asks of either direction."""

    def __init__(self, inner: Any, between: Between) -> None:  # Any: each transport has streams of its own classes
        self._inner = inner
        self._between = between

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.aclose()


class FromServer(_Stream, ReadStream[SessionMessage | Exception]):
    @property
    def last_context(self) -> contextvars.Context | None:
        """Of the sender, which the SDK goes on in."""
        return getattr(self._inner, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        while True:
            item: SessionMessage | Exception = await self._inner.receive()
            if self._between.used(item):
                return item

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            self._between.ended()
            raise StopAsyncIteration from None


class ToServer(_Stream, WriteStream[SessionMessage]):
    async def send(self, item: SessionMessage, /) -> None:
        await self._inner.send(item)
        self._between.sent(item)
