"""What keeps the connection to a server, and the extension of its tools, up to date (rules H386, H388 and H389).

One asyncio task holds the connection. What is lost is connected anew with growing waits, a bounded number of times;
after that, when a call wants it; where there are no tools that could be called, at the longest wait. Calls wait for the
connection, not the other way round.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final, Literal, cast
from weakref import WeakSet

from perdure.harness.foreign import cancelled_itself
from perdure.harness.registry import Extension, ExtensionConflict, Registry
from perdure.tools.mcp.losses import Loss, Unavailable
from perdure.tools.mcp.settings import McpError, Settings

if TYPE_CHECKING:
    from perdure.tools.mcp.connection import Connection, Listing
    from perdure.tools.mcp.mirror import Mirror

FIRST_WAIT_S: Final = 0.1
"""Before a lost server is connected again; doubled each time."""
MOST_WAIT_S: Final = 30.0
_MOST_DOUBLED: Final = 16
"""Times: far beyond the longest wait, and no number too large."""
MOST_FAILURES: Final = 8
"""In a row; then it is connected when a call wants it, if there is anything to call."""
STEADY_S: Final = 30.0
"""A connection that stood so long ends the row."""
CLOSE_S: Final = 10.0
"""For a connection to end: longer than a server has that will not."""
MAX_PROBLEMS: Final = 100
MAX_WORDS: Final = 1_000
"""Characters of what is told of one problem."""

_log = logging.getLogger("perdure.mcp")


class Keeper:
    """Of one server, for as long as its host has it open."""

    def __init__(self, settings: Settings, *, required: bool) -> None:
        self._settings = settings
        self._required = required
        self._extension = Extension(settings.name, on_install=self._came_into)
        self._registries: WeakSet[Registry] = WeakSet()
        self._connection: Connection | None = None
        self._mirror: Mirror | None = None
        self._listing: Listing | None = None
        self._problems: tuple[str, ...] = ()
        self._conflict: str | None = None
        self._unlisted: str | None = None
        """Why its tools are still those of an older listing."""
        self._failure = "it was not connected yet"
        self._tried = asyncio.Event()
        """Set after each attempt, and while there is a connection."""
        self._wanted = asyncio.Event()
        """A call waits for a connection: it is tried again at once."""
        self.given_up = False
        """It is connected again when a call wants it."""
        self._closing = False
        self._holding: asyncio.Task[None] | None = None

    @property
    def extension(self) -> Extension:
        """Its tools as they are now. In a harness it is replaced by itself when the server has others."""
        return self._extension

    @property
    def connected(self) -> bool:
        return self._connection is not None

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with the server, in words: tools that are left out, and why it is not connected."""
        first = f"it is not connected: {self._failure}" if self._connection is None else self._unlisted
        told = (each for each in (first, self._conflict) if each is not None)
        return (*told, *self._problems)[:MAX_PROBLEMS]

    async def open(self) -> None:
        """Connect. Raises McpError if the server is required and cannot be used, or was opened before."""
        if self._holding is not None:
            raise McpError(f"MCP server {self._settings.name!r} is in use already; make another with mcp_extension()")
        self._holding = asyncio.create_task(self._keep(), name=f"mcp {self._settings.name}")
        try:
            await self._first_attempts()
        except BaseException:
            await self.close()
            raise

    async def _first_attempts(self) -> None:
        # The second attempt is by the older handshake.
        for _ in range(2):
            await self._tried.wait()
            if self._connection is not None or not self._required:
                return
            self._tried.clear()
        raise McpError(f"MCP server {self._settings.name!r} cannot be used: {self._failure}")

    async def close(self) -> None:
        holding = self._holding
        assert holding is not None, "it was opened"
        self._closing = True
        self._tried.set()
        cancelled: asyncio.CancelledError | None = None
        while not holding.done():
            # Again, should the end of a connection have swallowed it: the SDK's own scopes may.
            holding.cancel()
            try:
                await asyncio.wait((holding,), timeout=CLOSE_S)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    # --- for its tools -----------------------------------------------------------------------------------------

    async def connection(self) -> Connection:
        """One that is up. Raises Unavailable if there is none within the time to connect."""
        asked = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.connect_timeout_ms / 1000):
                while self._holding is not None and not self._closing:
                    if self._connection is not None and not self._connection.loss.told.is_set():
                        return self._connection
                    if not asked:
                        asked = True
                        self._wanted.set()
                    elif self.given_up:
                        break
                    self._tried.clear()
                    await self._tried.wait()
        raise Unavailable(f"it is not connected: {self._failure}")

    def without_secrets(self, text: str) -> str:
        return self._settings.without_secrets(text)

    def _told(self, text: str) -> str:
        return self.without_secrets(text)[:MAX_WORDS]

    # --- the connection ----------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        modern = True
        while not self._closing:
            began = loop.time()
            loss = Loss()
            try:
                await self._hold("auto" if modern else "legacy", loss)
            except asyncio.CancelledError:
                if not cancelled_itself():
                    raise
            except Exception as error:  # whatever the SDK or a transport raises: there is no connection
                loss.tell(_words(error))
            stood = self._connection is not None
            self._connection = None
            if self._closing:
                return
            self._failure = self._told(loss.reason)
            if not stood:
                modern = not modern  # an old server may end at the first question of the newer handshake
            failures = 1 if stood and loop.time() - began >= STEADY_S else failures + 1
            self.given_up = failures >= MOST_FAILURES and bool(self._extension.tools)
            self._wanted.clear()
            self._tried.set()
            level = logging.WARNING if self.given_up or failures == MOST_FAILURES else logging.INFO
            _log.log(level, "not connected extension=%s failures=%d stood=%s", self._settings.name, failures, stood)
            if self.given_up:
                await self._wanted.wait()
            else:
                wait = FIRST_WAIT_S * 2 ** min(failures - 1, _MOST_DOUBLED)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wanted.wait(), min(wait, MOST_WAIT_S))

    async def _hold(self, mode: Literal["auto", "legacy"], loss: Loss) -> None:
        """Connect, and hold the connection until it is lost."""
        from perdure.tools.mcp.connection import connected

        changed = asyncio.Event()
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(self._settings.connect_timeout_ms / 1000):
                connection = await stack.enter_async_context(
                    connected(self._settings, mode=mode, loss=loss, changed=changed)
                )
                self._take(await connection.listing())
            self._connection = connection
            self._tried.set()
            _log.info("connected extension=%s tools=%d", self._settings.name, len(self._extension.tools))
            await self._follow(connection, changed)
        if not loss.told.is_set():
            loss.tell("it ended")

    async def _follow(self, connection: Connection, changed: asyncio.Event) -> None:
        """List the tools again whenever they have changed, until the connection is lost."""
        loop = asyncio.get_running_loop()
        lost = connection.loss.told
        wait, listed_at = 0.0, -STEADY_S
        while await _any_of(lost, changed):
            # A server may say so again whenever it is asked.
            wait = 0.0 if loop.time() - listed_at >= STEADY_S else min(max(2 * wait, FIRST_WAIT_S), MOST_WAIT_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(lost.wait(), wait)
                return
            changed.clear()
            try:
                async with asyncio.timeout(self._settings.connect_timeout_ms / 1000):
                    self._take(await connection.listing())
            except (McpError, TimeoutError) as error:
                self._unlisted = self._told(f"its tools could not be listed: {_words(error)}")
            listed_at = loop.time()

    # --- its tools ---------------------------------------------------------------------------------------------

    def _take(self, listing: Listing) -> None:
        """What the server has now, here and wherever the extension is installed."""
        self._unlisted = None
        if listing == self._listing:
            return
        if self._mirror is None:
            from perdure.tools.mcp.mirror import Mirror

            self._mirror = Mirror(self._settings, self)
        mirrored = self._mirror.of(listing)
        self._problems = tuple(map(self._told, mirrored.problems))
        if mirrored.problems:
            _log.warning("problems extension=%s count=%d", self._settings.name, len(mirrored.problems))
        self._listing = listing
        self._extension = Extension(self._settings.name, tools=mirrored.tools, on_install=self._came_into)
        for registry in list(self._registries):
            self._replace(registry)

    def _came_into(self, registry: Registry) -> None:
        self._registries.add(registry)

    def _replace(self, registry: Registry) -> None:
        if not any(other.on_install == self._came_into for other in registry.extensions):
            self._registries.discard(registry)  # the host took it out, or put another in its place
            return
        try:
            registry.replace(self._extension)
            self._conflict = None
        except ExtensionConflict as error:
            self._conflict = f"its new tools cannot be installed: {error}"


async def _any_of(lost: asyncio.Event, changed: asyncio.Event) -> bool:
    """Wait for one of them; False once the connection is lost."""
    waits = [asyncio.ensure_future(event.wait()) for event in (lost, changed)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return not lost.is_set()


def _words(error: Exception) -> str:
    """Of the innermost cause. Of foreign exceptions the type alone: an address or a header may stand in their words."""
    from mcp.shared.exceptions import MCPError
    from pydantic import ValidationError

    from perdure.tools.mcp.connection import NOT_OF_THE_FORM

    while isinstance(error, ExceptionGroup):
        causes = cast("tuple[Exception, ...]", error.exceptions)
        error = causes[0]
    match error:
        case TimeoutError():
            return "it did not answer in time (connect_timeout_ms)"
        case FileNotFoundError():
            return "its program, or the folder it is to run in, was not found; install it, or give its whole path"
        case McpError() | MCPError():
            return str(error)
        case ValidationError():
            return NOT_OF_THE_FORM
        case RuntimeError() if "protocol version" in str(error):  # of the SDK
            return "it speaks no version of the protocol that is known here"
        case OSError(strerror=str() as said):
            return said
        case _:
            return type(error).__name__
