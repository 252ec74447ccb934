"""A shop that is an MCP server in the simulated loop: the SDK's own server and transport (``mcp_server``), the SDK's
client, and all that perdure has between. What is made up is the process and its pipes (``perdure.testing.wire``).

The server dies where a scenario says so, once for each place, and is started again by whoever keeps the connection.
What it did stays done. A server over HTTP cannot be here: its transport opens sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias, cast

from perdure.harness.output import OutputLimits
from perdure.testing.simulation import Host
from perdure.testing.wire import SimulatedProgram
from perdure.tools.mcp.keeper import Keeper
from perdure.tools.mcp.server import McpServer, require_extra
from perdure.tools.mcp.settings import Settings, StdioServer, policies

SAFE: Final = ("price", "look")
"""Tools that may be asked again; of the others, nobody could tell two calls apart."""
WORDS: Final = {"price": "{} is 3", "look": "{} is there", "order": "{} is ordered", "buy": "{} is bought"}
"""What it answers."""
HOURS: Final = "shop://hours"
"""A resource."""
CONNECT_S: Final = 5.0
"""How long a call waits for the server."""

When: TypeAlias = Literal["before", "after", "answered", "torn"]
"""Of a call: before it does anything; when it has done it; once its answer is written; in the middle of writing it."""
Then: TypeAlias = Literal["back", "changed", "closed"]
"""The server may be started again; it has other tools then; it may not until ``Shop.reopen``."""


@dataclass(frozen=True, slots=True)
class Strike:
    """The server dies of a call."""

    when: When
    then: Then = "back"


class Shop:
    """The server's program, as one life of the host has it; and what stays of it in the world."""

    def __init__(self, host: Host, strikes: Mapping[str, Strike] | None = None) -> None:
        """``strikes``: by what is called, such as ``order cup``; each once in the life of the world."""
        self._host = host
        self._strikes = strikes or {}
        self._program: SimulatedProgram | None = None
        self._last_words: When | None = None
        """It dies with the next thing it says."""
        self._away_until = 0.0

    @property
    def state(self) -> set[str]:
        """What has become of it: ``changed``, ``closed``, ``stocked``."""
        return self._noted("state")

    @property
    def tools(self) -> tuple[str, ...]:
        """That it has now."""
        if "changed" in self.state:
            return ("price", "buy")
        return ("price", "look", "order", "restock", *(("buy",) if "stocked" in self.state else ()))

    @property
    def done(self) -> set[str]:
        """What it did, in all lives."""
        return self._noted("done")

    def reopen(self) -> None:
        self.state.discard("closed")

    def once(self, what: str) -> bool:
        """Whether this is to happen now: only once in the life of the world."""
        happened = self._noted("happened")
        if what in happened:
            return False
        happened.add(what)
        return True

    def kill(self, *, away_s: float = 0.0) -> None:
        """It cannot be started for so many seconds."""
        if self._program is not None:
            self._away_until = self._host.loop.time() + away_s
            self._program.kill()

    def tear(self) -> None:
        """It dies in the middle of the next thing it says."""
        self._last_words = "torn"

    # --- the process ---------------------------------------------------------------------------------------------

    async def start(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: str | Path | None, stderr: int | None, limit: int
    ) -> SimulatedProgram:
        """Stands for ``perdure.tools.mcp.process.start``. Raises OSError while the shop is away."""
        from perdure.testing.scenarios.mcp_server import serve

        await asyncio.sleep(0)
        if "closed" in self.state or self._host.loop.time() < self._away_until:
            raise FileNotFoundError("the shop is closed")
        self._last_words = None
        self._program = SimulatedProgram(lambda program: serve(self, program), limit=limit)
        return self._program

    # --- for the server ------------------------------------------------------------------------------------------

    def says(self, program: SimulatedProgram, text: str) -> None:
        """One message to its host."""
        last, self._last_words = self._last_words, None
        program.say(text[: len(text) // 2] if last == "torn" else text)
        if last is not None:
            program.kill()

    @asynccontextmanager
    async def called(self, program: SimulatedProgram, what: str) -> AsyncGenerator[None]:
        """Around what a call does: it may die of it."""
        strike = self._strikes.get(what)
        if strike is not None and strike.when == "before":
            await self._strike(program, what, strike)
        yield
        if strike is not None and strike.when != "before":
            await self._strike(program, what, strike)

    async def do(self, program: SimulatedProgram, what: str) -> None:
        """Something happens; if it is safe, only the first time. A program that was killed gets no further."""
        if program.code is not None:
            await asyncio.Event().wait()
        self._host.effect(what, key=what if what.startswith(SAFE) else None)
        self.done.add(what)

    async def _strike(self, program: SimulatedProgram, what: str, strike: Strike) -> None:
        if program.code is not None or not self.once(what):
            return
        if strike.then != "back":
            self.state.add(strike.then)
        if strike.when in ("answered", "torn"):
            self._last_words = strike.when
        else:
            program.kill()
            await asyncio.Event().wait()

    def _noted(self, name: str) -> set[str]:
        return cast("set[str]", self._host.notes.setdefault(f"shop {name}", set[str]()))


@asynccontextmanager
async def open_shop(shop: Shop, *, required: bool = True) -> AsyncGenerator[McpServer]:
    """What ``mcp_extension("shop", StdioServer([...]), replay={...})`` gives, but started by the shop.

    Raises McpMissing without the extra, and McpError if the shop is required and cannot be started.
    """
    require_extra()
    settings = Settings(
        name="shop",
        server=StdioServer(["shop"]),
        prefix="shop_",
        replay=policies({**dict.fromkeys(SAFE, "safe"), "*": "unsafe"}),
        trust_hints=False,
        include=None,
        exclude=frozenset(),
        timeout_ms=60_000,
        connect_timeout_ms=int(CONNECT_S * 1000),
        output=OutputLimits(keep="head"),
        start=shop.start,
    )
    async with McpServer(Keeper(settings, required=required)) as server:
        yield server
