"""``mcp_extension``: an MCP server that a host keeps, and the extension of its tools (rule H118).

async with mcp_extension("github", StdioServer(["github-server"], env={"TOKEN": token})) as github:
    async with Harness.open(SqliteStorage("agent.db"), models=..., extensions=[github.extension]) as harness:
        ...
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.util import find_spec

from perdure.harness.output import OutputLimits
from perdure.harness.registry import Extension
from perdure.tools.mcp.keeper import Keeper
from perdure.tools.mcp.settings import (
    HttpServer,
    McpMissing,
    Replay,
    Server,
    Settings,
    StdioServer,
    policies,
)

_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")


def mcp_extension(
    name: str,
    server: Server,
    *,
    replay: Replay = "unsafe",
    trust_hints: bool = False,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    prefix: str | None = None,
    timeout_ms: int = 300_000,
    connect_timeout_ms: int = 30_000,
    output: OutputLimits | None = None,
    required: bool = True,
) -> McpServer:
    """An MCP server as an extension: ``async with`` connects it, ``extension`` is for ``Harness.open``.

    - ``replay``: whether a call that was cut off may be made again: for all tools, or by the server's own name of each,
      with ``*`` for the others. Unsafe where nothing is said.
    - ``trust_hints``: what the server says of a tool (read only, idempotent) counts where ``replay`` does not name it.
    - ``include``, ``exclude``: the server's tools that are wanted, or not.
    - ``prefix``: before the name of each tool; the extension's name and ``_`` if it is not given.
    - ``timeout_ms``: after this a call is cancelled, here and at the server.
    - ``connect_timeout_ms``: for the server to start and list its tools, and for a call to wait for that.
    - ``output``: how much of a result is kept; the beginning, if it is not given.
    - ``required``: a server that cannot be connected at first is an error; else it is tried again meanwhile.

    Raises ValueError for what cannot be, and McpMissing without the extra.
    """
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"the name is 1 to 32 letters, digits, '_' and '-', not {name!r}")
    if not isinstance(server, (StdioServer, HttpServer)):  # pyright: ignore[reportUnnecessaryIsInstance]  # untyped callers
        raise TypeError(f"server is a StdioServer or an HttpServer, not {type(server).__name__}")
    if prefix is not None and prefix and _NAME.fullmatch(prefix) is None:
        raise ValueError(f"prefix is at most 32 letters, digits, '_' and '-', not {prefix!r}")
    if isinstance(include, str) or isinstance(exclude, str):
        raise TypeError("include and exclude are lists of names")
    if timeout_ms <= 0 or connect_timeout_ms <= 0:
        raise ValueError("timeout_ms and connect_timeout_ms must be positive")
    require_extra()
    settings = Settings(
        name=name,
        server=server,
        prefix=f"{name}_" if prefix is None else prefix,
        replay=policies(replay),
        trust_hints=trust_hints,
        include=None if include is None else frozenset(include),
        exclude=frozenset(exclude),
        timeout_ms=timeout_ms,
        connect_timeout_ms=connect_timeout_ms,
        output=OutputLimits(keep="head") if output is None else output,
    )
    return McpServer(Keeper(settings, required=required))


def require_extra() -> None:
    """Raises McpMissing without the extra."""
    for package in ("mcp", "jsonschema_rs"):
        if find_spec(package) is None:
            raise McpMissing(f"{package} is not installed; pip install 'perdure[mcp]'")


class McpServer:
    """A server that the host keeps. Make one with ``mcp_extension``."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    @property
    def extension(self) -> Extension:
        """Its tools as they are now. In a harness it is replaced by itself when the server has others."""
        return self._keeper.extension

    @property
    def connected(self) -> bool:
        """Whether its tools can be called now."""
        return self._keeper.connected

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with the server, in words: tools that are left out, and why it is not connected."""
        return self._keeper.problems

    async def __aenter__(self) -> McpServer:
        """Connect. Raises McpError if the server is required and cannot be used."""
        await self._keeper.open()
        return self

    async def __aexit__(self, *ended: object) -> None:
        await self._keeper.close()
