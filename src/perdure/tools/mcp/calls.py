"""A request to a server that may be lost under it: what is asked again, and what is said of what is not (rules H387 and
H388)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeVar

from mcp.client.session import ClientSession
from mcp.shared.dispatcher import ProgressFnT

from perdure.harness.handle import CallEnded, CallStream, ToolCall
from perdure.harness.results import INTERRUPTED
from perdure.harness.tool import ToolError, ToolResult
from perdure.tools.mcp.connection import Connection
from perdure.tools.mcp.losses import CutOff, NotTaken, Refusal, Unavailable, Unclear

MAX_TRIES: Final = 3
"""Of one request, in one process."""
FIRST_WAIT_S: Final = 0.1
"""Before it is asked again; doubled each time."""

T = TypeVar("T")
Send = Callable[[ClientSession], Awaitable[T]]


class Host(Protocol):
    """What keeps the connection to a server."""

    async def connection(self) -> Connection:
        """One that is up, waited for within the server's time. Raises Unavailable."""
        ...

    def without_secrets(self, text: str) -> str: ...


async def ask(host: Host, send: Send[T], *, safe: Callable[[], bool], check: Callable[[], None]) -> T:
    """What the server answers.

    ``safe``: whether a request that was cut off may simply be asked again; ``check`` raises Unavailable for one that
    cannot be asked any more. Raises Unavailable, CutOff, Unclear or Refusal.
    """
    cuts = 0
    why = ""
    for tried in range(MAX_TRIES):
        if tried:
            await asyncio.sleep(FIRST_WAIT_S * 2 ** (tried - 1))
        try:
            connection = await host.connection()
            check()
        except Unavailable as error:
            if cuts:  # it may have been done before
                raise CutOff(f"{why}; then {error}") from None
            raise
        try:
            return await connection.request(send)
        except NotTaken as error:
            why = str(error)
        except CutOff as error:
            cuts += 1
            why = str(error)
            if not safe():
                raise
    if cuts:
        raise CutOff(f"{why}; it was asked {MAX_TRIES} times")
    raise Unavailable(why)


async def result_of(asked: Awaitable[ToolResult], host: Host, call: ToolCall) -> ToolResult:
    """The result of a call, whatever became of what was asked for it. Raises ToolError."""
    try:
        return await asked
    except Unavailable as error:
        text = host.without_secrets(f"The MCP server cannot be used: {error}. Nothing was done.")
        return ToolResult(text, is_error=True, code="tool_unavailable")
    except CutOff as error:
        return ToolResult(host.without_secrets(_interrupted(error, call.stream)), is_error=True, code="interrupted")
    except Unclear as error:
        text = (
            f"The MCP server got the call, but {error}. Whether it took effect is not known. Look before you repeat it."
        )
        raise ToolError(host.without_secrets(text)) from None
    except Refusal as error:
        raise ToolError(host.without_secrets(f"The MCP server refused the call: {error}")) from None
    except ToolError as error:
        raise ToolError(host.without_secrets(str(error))) from None


def show_progress(call: ToolCall, host: Host) -> ProgressFnT:
    """A server's progress as what the call shows meanwhile."""

    async def show(progress: float, total: float | None, message: str | None) -> None:
        try:
            call.details({"progress": progress, "total": total})
            if message:
                call.output(f"{host.without_secrets(message)}\n")  # an error may have it in it later
        except (CallEnded, ValueError):
            return  # it came too late, or is no number that JSON has

    return show


def _interrupted(error: CutOff, stream: CallStream) -> str:
    output = stream.end().text
    text = f"{INTERRUPTED} The connection to the MCP server was lost: {error}."
    return f"{text}\nOutput until then:\n{output}" if output else text
