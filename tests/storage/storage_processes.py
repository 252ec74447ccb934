"""Other processes that do something with a store, for tests of what happens between processes."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

OWNER = """
import asyncio, sys
from perdure.kernel.errors import StorageError
from perdure.storage.sqlite import SqliteStorage
async def main():
    storage = SqliteStorage(sys.argv[1])
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        info = await storage.open(writer="other", log_id="log", now=1_000_000_000_000)
    except StorageError as error:
        print(type(error).__name__, error, flush=True)
        return
    print("open", info.epoch, flush=True)
    sys.stdin.readline()
    await storage.close()
asyncio.run(main())
"""
"""Says ready; opens the store on a line of input, and says whether it could; closes it on another."""

POST = """
import sys
from perdure.storage.sqlite_mailbox import post
print(post(sys.argv[1], "signal", {"from": "elsewhere"}, now=1))
"""

KILLS = """
import asyncio, json, os, random, signal, sys
from perdure.kernel.contents import digest_of
from perdure.kernel.storage import Content
from perdure.testing.conformance import Line

seed, kills = int(sys.argv[2]), int(sys.argv[3])
chance = random.Random(seed)

async def open_store():
    storage = make(sys.argv[1])
    return Line(storage, await storage.open(writer="writer", log_id="log", now=1))

def digest(seq):
    return digest_of(b"%d" % seq * 999)

def content(seq):
    return Content(digest(seq), b"%d" % seq * 999)

async def commit(report):
    # Several at a time, so that kills meet groups, checkpoints and flushes; each tells its number once it has settled.
    line = await open_store()
    assert line.info.seq >= acknowledged, (line.info.seq, acknowledged)
    def told(future, seq):
        if future.exception() is None:
            os.write(report, b"%d\\n" % seq)
    while True:
        for _ in range(chance.randrange(1, 6)):
            entries = [line.entry(1, data="x" * chance.choice([10, 5000])) for _ in range(2)]
            seq = line.seq + 1
            batch = line.batch(entries=entries, contents=[content(seq)], pins=[(1 + seq % 9, digest(seq))])
            future = line.storage.commit(batch)
            future.add_done_callback(lambda future, seq=line.seq: told(future, seq))
        await future

async def judge(acknowledged):
    line = await open_store()
    found, after = [], 0
    assert line.info.seq >= acknowledged, (line.info.seq, acknowledged)
    from perdure.kernel.storage import Segment
    while page := await line.storage.entries([Segment(1, 0, None)], first=after + 1):
        found += [entry.seq for entry in page]
        after = page[-1].id
    assert found == [seq for seq in range(1, line.info.seq + 1) for _ in range(2)], "no commit in part, none left out"
    stored = [seq for seq in range(1, line.info.seq + 2) if await line.storage.has_contents([digest(seq)])]
    assert stored == list(range(1, line.info.seq + 1)), "with its contents"
    assert not await line.storage.content_scan(pinned=False), "and pins"
    assert await line.storage.check() == []
    await line.storage.close()
    return line.info.seq

acknowledged, most = 0, 0
for kill in range(kills):
    reading, report = os.pipe()
    child = os.fork()  # before any thread is there
    if child == 0:
        try:
            os.close(reading)
            asyncio.run(commit(report))
        finally:
            os._exit(1)
    os.close(report)
    wanted = chance.randrange(0, 60)
    text = b""
    while text.count(b"\\n") <= wanted:
        more = os.read(reading, 4096)
        assert more, "the child ended by itself"
        text += more
    os.kill(child, signal.SIGKILL)
    while more := os.read(reading, 65536):
        text += more
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    acknowledged = int(text[: text.rindex(b"\\n")].split()[-1])
    if kill % 8 == 7 or kill == kills - 1:
        judged = os.fork()
        if judged == 0:
            code = 1
            try:
                asyncio.run(judge(acknowledged))
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(judged, 0)[1] == 0, "see above"
print(json.dumps({"kills": kill + 1, "acknowledged": acknowledged}))
"""
"""Commits, is killed at random, and judges what is left, again and again. ``make(path)``, which is to be put before it,
makes the storage."""


async def start(script: str, *arguments: str | Path | int) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, *map(str, arguments), stdin=PIPE, stdout=PIPE
    )


async def line_of(process: Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(60):
        return (await process.stdout.readline()).decode().rstrip()


def go(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")


async def end(process: Process) -> int:
    """Let it finish, and tell its exit code."""
    async with asyncio.timeout(60):
        await process.communicate(b"")
    assert process.returncode is not None
    return process.returncode
