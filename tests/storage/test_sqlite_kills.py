"""Rules K130, K149: a killed process loses no commit it acknowledged, and the next one opens at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_KILLS = """
import asyncio, json, os, random, signal, sys
from perdure.storage.sqlite import SqliteStorage
from perdure.kernel.contents import digest_of
from perdure.kernel.storage import Content
from perdure.testing.conformance import Line

path, durability, seed, kills = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
chance = random.Random(seed)

async def open_store():
    storage = SqliteStorage(path, durability=durability)
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


@pytest.mark.parametrize("durability", ["power", "process"])
def test_forty_kills_lose_nothing_acknowledged(durability: str, tmp_path: Path) -> None:
    kills = 40
    command = [sys.executable, "-c", _KILLS, str(tmp_path / "store.db"), durability, "20", str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert f'"kills": {kills}' in done.stdout
