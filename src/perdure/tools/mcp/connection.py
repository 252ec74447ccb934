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
from perdure.tools.mcp.http import Answered, answered, http_transport
from perdure.tools.mcp.losses import CutOff, Loss, NotTaken, Refusal
from perdure.tools.mcp.settings import HttpServer, McpError, Settings
from perdure.tools.mcp.stdio import stdio_transport

MAX_TOOLS: Final = 1_000
MAX_PAGES: Final = 100
LISTEN_WAIT_S: Final = 1.0
"""Before a lost stream of changes is opened again; doubled each time."""
LISTEN_MOST_S: Final = 60.0

T = TypeVar("T")


class Listing(msgspec.Struct, frozen=True):
    """What a server has."""

    tools: tuple[Tool, ...]
    more_tools: bool
    """Than are taken."""
    resources: bool
    prompts: bool


class Connection:
    """It is there until ``loss`` is told."""

    def __init__(self, client: Client, loss: Loss) -> None:
        self._session = client.session
        self._capabilities = client.server_capabilities
        self.loss = loss

    async def request(self, send: Callable[[ClientSession], Awaitable[T]]) -> T:
        """What the server answers. Raises NotTaken, CutOff or Refusal."""
        if self.loss.told.is_set():
            raise NotTaken(self.loss.reason)
        noted = Answered()
        token = answered.set(noted)
        try:
            return await send(self._session)
        except MCPError as error:
            if error.code == HEADER_MISMATCH:
                with contextlib.suppress(McpError):
                    await self.listing()  # the SDK makes the headers of what was listed last
                raise NotTaken("its tools have changed") from None
            raise self._read(error, noted.status) from None
        except TimeoutError:
            raise CutOff("it did not take the request in time") from None
        except ValidationError:
            raise Refusal("what it answered is not of the form that the protocol has") from None
        except RuntimeError:  # of the SDK, for an answer that asks for something first
            raise Refusal("it asks for input of a person, which it is not given here") from None
        finally:
            answered.reset(token)

    def _read(self, error: MCPError, status: int) -> NotTaken | CutOff | Refusal:
        said = error.message
        if error.code == CONNECTION_CLOSED:
            return CutOff(self.loss.reason if self.loss.told.is_set() else "the connection was lost")
        if error.code == REQUEST_TIMEOUT:
            return Refusal("it did not answer in time")
        if status in (400, 404) and error.code != METHOD_NOT_FOUND and "session" in said.lower():
            self.loss.tell("it has ended the session")
            return NotTaken(self.loss.reason)
        if status >= 500 and error.code == INTERNAL_ERROR:
            return CutOff(f"it, or what is before it, answered with HTTP status {status}")
        if status >= 400 and error.code == INTERNAL_ERROR:
            return Refusal(f"it answered with HTTP status {status}")
        return Refusal(f"{said} (code {error.code})")

    async def listing(self) -> Listing:
        """Raises NotTaken, CutOff or Refusal."""
        tools: list[Tool] = []
        cursor: str | None = None
        if self._capabilities.tools is not None:
            for _ in range(MAX_PAGES):
                page = await self.request(_page(cursor))
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


@asynccontextmanager
async def connected(
    settings: Settings, *, mode: Literal["auto", "legacy"], loss: Loss, changed: asyncio.Event
) -> AsyncGenerator[Connection, None]:
    """``changed`` is set whenever the server says that it has other tools. Raises whatever the transport raises."""

    async def heard(message: object) -> None:
        if isinstance(message, ToolListChangedNotification):
            changed.set()

    transport: AbstractAsyncContextManager[Any]  # Any: each transport has streams of its own classes
    if isinstance(settings.server, HttpServer):
        transport = http_transport(settings.server, settings.timeout_ms)
    else:
        transport = stdio_transport(settings.server, settings.start, loss)
    client = Client(
        transport,
        mode=mode,
        cache=None,
        message_handler=heard,
        read_timeout_seconds=settings.connect_timeout_ms / 1000,
        client_info=Implementation(name="perdure", version=__version__),
    )
    async with client:
        listening: asyncio.Task[None] | None = None
        tools = client.server_capabilities.tools
        if tools is not None and tools.list_changed and client.protocol_version in MODERN_PROTOCOL_VERSIONS:
            listening = asyncio.create_task(_listen(client, changed))
        try:
            yield Connection(client, loss)
        finally:
            if listening is not None:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)


async def _listen(client: Client, changed: asyncio.Event) -> None:
    """Newer servers tell of changes only to who listens. A stream that ends, as idle ones do, is opened again."""
    wait = LISTEN_WAIT_S
    while True:
        try:
            async with client.listen(tools_list_changed=True) as events:
                changed.set()  # what changed while nobody listened
                async for _ in events:
                    changed.set()
        except (SubscriptionLost, TimeoutError):
            pass
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                return  # it has no such stream
        await asyncio.sleep(wait)
        wait = min(2 * wait, LISTEN_MOST_S)
