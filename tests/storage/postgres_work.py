"""Opening and looking into PostgreSQL stores, for their tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from postgres_server import Server

from perdure.storage.postgres import PostgresStorage
from perdure.testing.conformance import Line


async def opened(
    dsn: str, session: str, *, read_only: bool = False, epoch: int | None = None, takeover: bool = False
) -> Line:
    storage = PostgresStorage(dsn, session)
    info = await storage.open(
        read_only=read_only, epoch=epoch, takeover=takeover, writer=f"writer {id(storage)}", log_id="log", now=1_000
    )
    return Line(storage, info)


def backend(line: Line) -> int:
    """The server process of a store's connection."""
    assert isinstance(line.storage, PostgresStorage)
    assert line.storage._opening is not None
    assert line.storage._opening.link is not None
    return line.storage._opening.link.info.backend_pid


async def end_backend(server: Server, pid: int) -> None:
    (found,) = await asyncio.to_thread(server.execute, "SELECT pg_terminate_backend(%s::int4, 30000)", pid)
    assert found == (True,)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.01)
