"""One connection to an MCP server: what it lists, and requests with errors that say what is known (rule H387)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, Literal, TypeVar

import msgspec
from mcp import Client
from mcp.client.session import ClientSession
from mcp.client.subscriptions import SubscriptionLost
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    HEADER_MISMATCH,
    INTERNAL_ERROR,
    METHOD_NOT_FOUND,
    REQUEST_TIMEOUT,
    Implementation,
    PaginatedRequestParams,
    Tool,
    ToolListChangedNotification,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from perdure import __version__
from perdure.tools.mcp.heard import Between, FromServer, ToServer, kept_out_of_logs
from perdure.tools.mcp.http import Answered, answered, http_transport
from perdure.tools.mcp.losses import CutOff, Loss, NotTaken, Refusal, Unclear
from perdure.tools.mcp.settings import HttpServer, McpError, Settings
from perdure.tools.mcp.stdio import UNREAD, stdio_transport

MAX_TOOLS: Final = 1_000
MAX_PAGES: Final = 100
LISTEN_WAIT_S: Final = 1.0
"""Before a lost stream of changes is opened again; doubled each time."""
LISTEN_MOST_S: Final = 60.0
SPARE_S: Final = 5.0
"""The SDK's own time-out of a request is so much longer than the call's: it is for what no harness stops."""
NOT_OF_THE_FORM: Final = "what it answered is not of the form that the protocol has"
_UNREAD: Final = (
    UNREAD,
    "Failed to parse SSE message",
    "SSE stream failed",
    "Unexpected content type",
    "server answered a request with 202",
)
"""How the SDK begins what it says of answers that it cannot read."""

T = TypeVar("T")


class Listing(msgspec.Struct, frozen=True):
    """What a server has."""

    tools: tuple[Tool, ...]
    more_tools: bool
    """Than are taken."""
    resources: bool
    prompts: bool


class _OtherTools(NotTaken):
    """What was sent was made for tools that have changed."""


class Connection:
    """It is there until ``loss`` is told."""

    def __init__(self, client: Client, loss: Loss, changed: asyncio.Event) -> None:
        self._session = client.session
        self._capabilities = client.server_capabilities
        self._changed = changed
        self.loss = loss

    async def request(self, send: Callable[[ClientSession], Awaitable[T]]) -> T:
        """What the server answers. Raises NotTaken, CutOff, Unclear or Refusal."""
        try:
            return await self._request(send)
        except _OtherTools:
            with contextlib.suppress(McpError):
                await self.listing()  # the SDK makes the headers of what was listed last
            raise

    async def _request(self, send: Callable[[ClientSession], Awaitable[T]]) -> T:
        if self.loss.told.is_set():
            raise NotTaken(self.loss.reason)
        noted = Answered()
        token = answered.set(noted)
        try:
            with kept_out_of_logs():
                return await send(self._session)
        except MCPError as error:
            raise self._read(error, noted) from None
        except TimeoutError:
            raise CutOff("it did not take the request in time") from None
        except ValidationError:
            raise Unclear(NOT_OF_THE_FORM) from None
        except RuntimeError:  # of the SDK, for an answer that asks for something first
            raise Refusal("it asks for input of a person, which it is not given here") from None
        finally:
            answered.reset(token)

    def _read(self, error: MCPError, noted: Answered) -> NotTaken | CutOff | Unclear | Refusal:
        """The SDK gives errors of its own, in its own words, the codes that servers use for theirs."""
        said = error.message
        if noted.unsent is not None:
            self.loss.tell(noted.unsent)
            return NotTaken(noted.unsent)
        if noted.broken is not None:
            self._changed.set()  # whether it is still there, and what it has, is looked at
            return CutOff(noted.broken)
        if noted.unread is not None:
            return Unclear(noted.unread)
        if error.code == CONNECTION_CLOSED and said == "Connection closed":
            self.loss.tell("the connection ended")
            return CutOff(self.loss.reason)
        if error.code == CONNECTION_CLOSED and said.startswith("SSE stream ended"):
            self._changed.set()
            return CutOff("its answer ended too early")
        if error.code == REQUEST_TIMEOUT and said.endswith("timed out"):
            return Unclear("it did not answer in time")
        if error.code == HEADER_MISMATCH:
            return _OtherTools("its tools have changed")
        if (
            noted.in_session
            and error.code != METHOD_NOT_FOUND
            and (noted.status == 404 or (noted.status == 400 and _of_a_session(said)))
        ):
            self.loss.tell("it has ended the session")
            return NotTaken(self.loss.reason)
        if noted.status >= 500 and error.code == INTERNAL_ERROR:
            return CutOff(f"it, or what is before it, answered with HTTP status {noted.status}")
        if noted.status >= 400 and error.code == INTERNAL_ERROR:
            return Refusal(status_words(noted.status))
        if noted.status < 300 and said.startswith(_UNREAD):
            return Unclear(NOT_OF_THE_FORM)
        return Refusal(f"{said} (code {error.code})")

    async def listing(self) -> Listing:
        """Raises NotTaken, CutOff, Unclear or Refusal."""
        tools: list[Tool] = []
        cursor: str | None = None
        if self._capabilities.tools is not None:
            for _ in range(MAX_PAGES):
                page = await self._request(_page(cursor))
                tools += page.tools
                cursor = page.next_cursor
                if cursor is None or len(tools) > MAX_TOOLS:
                    break
        return Listing(
            tools=tuple(tools[:MAX_TOOLS]),
            more_tools=cursor is not None or len(tools) > MAX_TOOLS,
            resources=self._capabilities.resources is not None,
            prompts=self._capabilities.prompts is not None,
        )


def _page(cursor: str | None) -> Callable[[ClientSession], Awaitable[Any]]:  # Any: the SDK's ListToolsResult
    return lambda session: session.list_tools(params=PaginatedRequestParams(cursor=cursor))


def _of_a_session(said: str) -> bool:
    """Whether an error says that the session is none, for which servers have no code."""
    said = said.lower()
    return "session" in said or "not initialized" in said


def status_words(status: int) -> str:
    hint = "; look at the headers that it is sent" if status in (401, 403) else ""
    return f"it answered with HTTP status {status}{hint}"


@asynccontextmanager
async def connected(
    settings: Settings, *, mode: Literal["auto", "legacy"], loss: Loss, changed: asyncio.Event
) -> AsyncGenerator[Connection, None]:
    """``changed`` is set whenever the server has other tools, or may have. Raises McpError, and whatever the transport
    raises."""

    async def heard(message: object) -> None:
        if isinstance(message, ToolListChangedNotification):
            changed.set()

    noted = Answered()
    answered.set(noted)
    client = Client(
        _transport(settings, loss),
        mode=mode,
        cache=None,
        message_handler=heard,
        read_timeout_seconds=settings.timeout_ms / 1000 + SPARE_S,
        client_info=Implementation(name="perdure", version=__version__),
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(kept_out_of_logs())
        try:
            await stack.enter_async_context(client)
        except Exception:
            if why := noted.unsent or noted.broken or (noted.status >= 400 and status_words(noted.status)):
                raise McpError(why) from None
            raise
        listening: asyncio.Task[None] | None = None
        tools = client.server_capabilities.tools
        if tools is not None and tools.list_changed and client.protocol_version in MODERN_PROTOCOL_VERSIONS:
            listening = asyncio.create_task(_listen(client, loss, changed))
        try:
            yield Connection(client, loss, changed)
        finally:
            if listening is not None:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)


@asynccontextmanager
async def _transport(settings: Settings, loss: Loss) -> AsyncGenerator[tuple[FromServer, ToServer], None]:
    between = Between(settings.without_secrets, loss)
    inner: AbstractAsyncContextManager[Any]  # Any: each transport has streams of its own classes
    if isinstance(settings.server, HttpServer):
        inner = http_transport(settings.server, settings.timeout_ms)
    else:
        inner = stdio_transport(settings.server, settings.start, loss)
    async with inner as (from_server, to_server):
        yield FromServer(from_server, between), ToServer(to_server, between)


async def _listen(client: Client, loss: Loss, changed: asyncio.Event) -> None:
    """Newer servers tell of changes only to who listens. A stream that ends, as idle ones do, is opened again."""
    wait = LISTEN_WAIT_S
    loop = asyncio.get_running_loop()
    while True:
        noted = Answered()
        answered.set(noted)
        began = loop.time()
        try:
            async with client.listen(tools_list_changed=True) as events:
                changed.set()  # what changed while nobody listened
                async for _ in events:
                    changed.set()
        except (SubscriptionLost, TimeoutError):
            pass
        except MCPError as error:
            if noted.unsent is not None:
                loss.tell(noted.unsent)
                return
            if error.code != CONNECTION_CLOSED and noted.broken is None and noted.status < 500:
                return  # it has no such stream
        if loop.time() - began >= LISTEN_MOST_S:
            wait = LISTEN_WAIT_S
        await asyncio.sleep(wait)
        wait = min(2 * wait, LISTEN_MOST_S)
