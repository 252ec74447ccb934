"""That a connection to an MCP server was lost, and what is known of what was asked over it."""

from __future__ import annotations

import asyncio

from perdure.tools.mcp.settings import McpError


class Loss:
    """Of one connection: told once, by whoever sees it first."""

    def __init__(self) -> None:
        self.told = asyncio.Event()
        self.reason = "it ended"

    def tell(self, reason: str) -> None:
        if not self.told.is_set():
            self.reason = reason
            self.told.set()


class Unavailable(McpError):
    """There is no connection, or no such tool: nothing was done."""


class NotTaken(McpError):
    """The server certainly did not begin what was asked: it may be asked again, whatever it is."""


class CutOff(McpError):
    """The connection was lost under a request: whether it took effect is not known."""


class Unclear(McpError):
    """What the server answered cannot be used: whether it did what was asked is not known, and asking again is no
    help."""


class Refusal(McpError):
    """The server answered that it will not."""
