"""Rules K130, K151, K234: whoever is killed, the client, its connection or the server, nothing acknowledged is lost,
and nothing is there twice."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest
from postgres_server import Server, fresh_session
from postgres_work import backend, end_backend, opened
from storage_processes import KILLS

from perdure import Harness
from perdure.kernel.contents import digest_of
from perdure.kernel.errors import StorageError
from perdure.kernel.storage import Content, Segment
from perdure.storage.postgres import PostgresStorage
from perdure.testing.conformance import Line

_MAKE = """
from perdure.storage.postgres import PostgresStorage
def make(place):
    return PostgresStorage(*place.split("|"))
"""


@pytest.fixture
def durable() -> Iterator[Server]:
    """A server of one's own, which flushes, to be killed."""
    server = Server(fsync=True)
    try:
        yield server
    finally:
        server.remove()


def test_kills_of_the_client_lose_nothing_acknowledged(postgres: Server) -> None:
    kills = 16
    place = f"{postgres.dsn()}|{fresh_session()}"
    command = [sys.executable, "-c", f"{_MAKE}{KILLS}", place, "20", str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert f'"kills": {kills}' in done.stdout


async def _commit_until_lost(line: Line, told: list[int], enough: asyncio.Event, wanted: int) -> None:
    """Commits, some at a time, until the store fails; notes those that were acknowledged."""

    def note(future: asyncio.Future[None], seq: int) -> None:
        if not future.cancelled() and future.exception() is None:
            told.append(seq)
            if len(told) >= wanted:
                enough.set()

    while True:
        futures: list[asyncio.Future[None]] = []
        for number in range(4):
            data = b"%d" % (line.seq + 1) * 99
            contents = [Content(digest_of(data), data)] if number == 3 else []
            pins = [(line.seq + 1, content.digest) for content in contents]
            entries = [line.entry(1, data=number) for _ in range(2)]
            batch = line.batch(entries=entries, contents=contents, pins=pins)
            future = line.storage.commit(batch)
            future.add_done_callback(lambda future, seq=line.seq: note(future, seq))
            futures.append(future)
        for future in futures:
            try:
                await future
            except StorageError:
                return


async def _judge(line: Line, acknowledged: int) -> None:
    assert line.info.seq >= acknowledged
    found: list[int] = []
    after = 0
    while page := await line.storage.entries([Segment(1, 0, None)], first=after + 1):
        found += [entry.seq for entry in page]
        after = page[-1].id
    assert found == [seq for seq in range(1, line.info.seq + 1) for _ in range(2)], "none in part, twice, or left out"
    assert await line.storage.check() == []


async def test_ended_connections_lose_nothing_acknowledged(postgres: Server) -> None:
    """K234: also where a commit is on its way."""
    dsn, session, chance = postgres.dsn(), fresh_session(), random.Random(3)
    acknowledged = 0
    for _ in range(8):
        line = await opened(dsn, session)
        await _judge(line, acknowledged)
        told: list[int] = []
        enough = asyncio.Event()
        committing = asyncio.ensure_future(_commit_until_lost(line, told, enough, chance.randrange(1, 60)))
        await asyncio.wait_for(enough.wait(), 60)
        await end_backend(postgres, backend(line))
        await asyncio.wait_for(committing, 60)
        acknowledged = max(told)
        await line.storage.close()
    line = await opened(dsn, session)
    await _judge(line, acknowledged)
    await line.storage.close()


async def test_a_killed_server_loses_nothing_acknowledged(durable: Server) -> None:
    """K151, K232: it is started again, and has what it acknowledged."""
    session, chance = fresh_session(), random.Random(5)
    acknowledged = 0
    for _ in range(3):
        line = await opened(durable.dsn(), session)
        await _judge(line, acknowledged)
        told: list[int] = []
        enough = asyncio.Event()
        committing = asyncio.ensure_future(_commit_until_lost(line, told, enough, chance.randrange(1, 60)))
        await asyncio.wait_for(enough.wait(), 60)
        await asyncio.to_thread(durable.kill)
        await asyncio.wait_for(committing, 60)
        acknowledged = max(told)
        with pytest.raises(StorageError, match="the connection was lost"):
            await line.storage.entry(2)
        await line.storage.close()
        with pytest.raises(StorageError, match="Look whether the server runs"):
            await opened(durable.dsn(), session)
        await asyncio.to_thread(durable.start)
    line = await opened(durable.dsn(), session)
    await _judge(line, acknowledged)
    await line.storage.close()


_AGENT = """
import asyncio, os, signal, sys
from perdure import Extension, Harness, PostgresStorage, tool
from perdure.storage import postgres_writer
from perdure.testing.model import ScriptedModel, call, say

dsn, session, turns, dies_at = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
store, stores = postgres_writer.Writer._store, 0

def counted(self, group):
    global stores
    stores += 1
    if stores * 2 == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)
    stored = store(self, group)
    if stores * 2 + 1 == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)
    return stored

postgres_writer.Writer._store = counted

@tool(replay="safe")
async def count(number: int) -> str:
    '''Count.'''
    return f"counted {number}"

async def main():
    script = {f"count {n}": [call("count", number=n), say(f"It is {n}.")] for n in range(turns)}
    extensions = [Extension("app", tools=[count])]
    storage = PostgresStorage(dsn, session)
    async with Harness.open(storage, models=ScriptedModel(script), extensions=extensions) as harness:
        root = await harness.root()
        for n in range(turns):
            answer = await (await root.submit(f"count {n}", request_id=f"r{n}")).answer()
            print(n, answer.text, flush=True)

asyncio.run(main())
"""


def test_an_agent_killed_at_any_commit_is_resumed_by_another_process(postgres: Server) -> None:
    """K130, H77: before and after a commit; each question is asked once and answered once."""
    dsn, session, turns = postgres.dsn(), fresh_session(), 3
    heard: set[str] = set()
    for dies_at in (4, 5, 6, 9, 8, 0):
        command = [sys.executable, "-c", _AGENT, dsn, session, str(turns), str(dies_at)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode == (-9 if dies_at else 0), done.stderr
        heard |= set(done.stdout.splitlines())
    assert heard >= {f"{n} It is {n}." for n in range(turns)}
    assert asyncio.run(_said(dsn, session)) == ["pi.user", "pi.assistant", "pi.tool-result", "pi.assistant"] * turns


async def _said(dsn: str, session: str) -> list[str]:
    async with Harness.open(PostgresStorage(dsn, session), read_only=True) as harness:
        assert await harness.session.storage.check() == []
        return [entry.kind for entry in await (await harness.root()).entries()]
