"""Where an MCP server is, and what its host says of its tools. Nothing of the SDK is imported here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, TypeAlias, get_args
from urllib.parse import unquote_plus, urlsplit

from perdure.harness.output import OutputLimits
from perdure.harness.tool import ReplayPolicy
from perdure.kernel.errors import PerdureError
from perdure.tools.mcp.process import Start, start

LEAST_SECRET: Final = 8
"""Characters of the shortest value of an environment or a header that is kept out of errors: shorter ones are flags and
numbers."""
LEAST_PATH_SECRET: Final = 20
"""Characters of the shortest part of an address's path that may be a key, and is kept out too."""
HIDDEN: Final = "***"

Stderr: TypeAlias = Literal["discard", "inherit"]


class McpError(PerdureError):
    """An MCP server cannot be used, or does not do what its protocol says. The message names the server."""


class McpMissing(McpError, ImportError):
    """The extra is not installed."""


@dataclass(frozen=True, slots=True)
class StdioServer:
    """A server that is a program: started with the host, ended with it."""

    command: Sequence[str]
    """The program and its arguments; no shell reads them."""
    _: KW_ONLY
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Beside HOME, LOGNAME, PATH, SHELL, TERM and USER of the host; nothing else of its environment is passed on."""
    cwd: str | Path | None = None
    """Where it is started; None: where the host is."""
    stderr: Stderr = "discard"
    """What becomes of what it prints there; ``inherit``: it goes where the host's own goes."""

    def __post_init__(self) -> None:
        if isinstance(self.command, str) or not self.command:
            raise ValueError(
                f"a server's command is a list of words, such as ['uvx', 'a-server'], not {self.command!r}"
            )
        if self.stderr not in get_args(Stderr):
            raise ValueError(f"stderr is one of {get_args(Stderr)}, not {self.stderr!r}")
        object.__setattr__(self, "command", tuple(self.command))
        object.__setattr__(self, "env", MappingProxyType(dict(self.env)))

    @property
    def secrets(self) -> tuple[str, ...]:
        """What is kept out of errors and the log."""
        return tuple(self.env.values())


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A server at an address, over streamable HTTP."""

    url: str
    """With http:// or https://, without a user or password."""
    _: KW_ONLY
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Sent with each request, to this address only."""

    def __repr__(self) -> str:
        """Without its path, which is a secret at some places."""
        parts = urlsplit(self.url)
        return f"HttpServer('{parts.scheme}://{parts.netloc}')"

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("a server's url begins with http:// or https:// and names a host")
        if parts.username is not None or parts.password is not None:
            raise ValueError("a server's url holds no user and password; put them into headers={'Authorization': ...}")
        object.__setattr__(self, "headers", MappingProxyType(dict(self.headers)))

    @property
    def secrets(self) -> tuple[str, ...]:
        """What is kept out of errors and the log."""
        # Of "Bearer abc" a server may repeat the second word alone.
        headers = [text for value in self.headers.values() for text in (value, value.split(" ")[-1])]
        parts = urlsplit(self.url)
        asked = [pair.partition("=")[2] for pair in parts.query.split("&")]
        keys = [part for part in parts.path.split("/") if len(part) >= LEAST_PATH_SECRET]
        return (*headers, *asked, *map(unquote_plus, asked), *keys)


Server: TypeAlias = StdioServer | HttpServer
Replay: TypeAlias = ReplayPolicy | Mapping[str, ReplayPolicy]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the host says of a server and its tools."""

    name: str
    server: Server
    prefix: str
    replay: Mapping[str, ReplayPolicy]
    """By the server's own name of a tool; ``*``: the others."""
    trust_hints: bool
    include: frozenset[str] | None
    exclude: frozenset[str]
    timeout_ms: int
    connect_timeout_ms: int
    output: OutputLimits
    start: Start = start

    def wants(self, name: str) -> bool:
        return name not in self.exclude and (self.include is None or name in self.include)

    def policy(self, name: str, *, hinted_safe: bool) -> ReplayPolicy:
        """The replay policy of a tool. What a server says of itself counts only where the host trusts it."""
        if name in self.replay:
            return self.replay[name]
        if self.trust_hints and hinted_safe:
            return "safe"
        return self.replay.get("*", "unsafe")

    @property
    def named(self) -> frozenset[str]:
        """The server's tools that the host names."""
        return (self.include or frozenset()) | self.exclude | (self.replay.keys() - {"*"})

    def without_secrets(self, text: str) -> str:
        """Words of the server, as they may be shown."""
        for secret in sorted({s for s in self.server.secrets if len(s) >= LEAST_SECRET}, key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
        return text


def policies(replay: Replay) -> Mapping[str, ReplayPolicy]:
    """Raises ValueError for what is no policy."""
    by_name: Mapping[str, ReplayPolicy] = {"*": replay} if isinstance(replay, str) else dict(replay)
    for name, policy in by_name.items():
        if policy not in get_args(ReplayPolicy):
            raise ValueError(f"replay of {name!r} is one of {get_args(ReplayPolicy)}, not {policy!r}")
    return by_name
