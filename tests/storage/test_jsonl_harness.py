"""An agent on a JSONL store: killed anywhere it goes on, and ends as one that nobody killed (rules H77, K130, K150)."""

from __future__ import annotations

import asyncio
import errno
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from perdure import Harness, SessionFailed, StorageError
from perdure.kernel.records import EntryRecord
from perdure.storage import jsonl_disk
from perdure.storage.jsonl import JsonlStorage
from perdure.testing.model import ScriptedModel, say

_AGENT = """
import asyncio, os, signal, sys
from perdure import Extension, Harness, tool
from perdure.storage import jsonl_disk, jsonl_writer
from perdure.storage.jsonl import JsonlStorage
from perdure.testing.model import ScriptedModel, call, say

path, turns, dies_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jsonl_writer.worth_compacting = lambda waste, all: waste >= 20_000
write, writes = jsonl_disk.write, 0

def counted(descriptor, offset, data):
    global writes
    writes += 1
    if writes == dies_at:
        write(descriptor, offset, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    write(descriptor, offset, data)

jsonl_disk.write = counted

@tool(replay="safe")
async def count(number: int) -> str:
    '''Count.'''
    return f"counted {number}"

async def main():
    script = {f"count {n}": [call("count", number=n), say(f"It is {n}.")] for n in range(turns)}
    extensions = [Extension("app", tools=[count])]
    async with Harness.open(JsonlStorage(path), models=ScriptedModel(script), extensions=extensions) as harness:
        root = await harness.root()
        for n in range(turns):
            answer = await (await root.submit(f"count {n}", request_id=f"r{n}")).answer()
            print(n, answer.text, flush=True)

asyncio.run(main())
"""


def test_killed_within_any_write_it_goes_on(tmp_path: Path) -> None:
    """With torn writes of records, markers and compactions; each question is asked once and answered once."""
    path, turns, chance = tmp_path / "store", 4, random.Random(4)
    heard: set[str] = set()
    kills = 0
    while f"{turns - 1} It is {turns - 1}." not in heard:
        dies_at = chance.randint(4, 14) if kills < 5 else 0
        command = [sys.executable, "-c", _AGENT, str(path), str(turns), str(dies_at)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode in (0, -9), done.stderr
        kills += done.returncode == -9
        heard |= set(done.stdout.splitlines())
    assert kills >= 4
    turn = ("user count {0}", "assistant", "tool-result counted {0}", "assistant It is {0}.")
    assert asyncio.run(_said(path)) == [line.format(n) for n in range(turns) for line in turn]


async def _said(path: Path) -> list[str]:
    """What is in the transcript, in short."""
    async with Harness.open(JsonlStorage(path), read_only=True) as harness:
        assert await harness.session.storage.check() == []
        return [_words(entry) for entry in await (await harness.root()).entries()]


def _words(entry: EntryRecord) -> str:
    parts: list[dict[str, str]] = [
        part for message in json.loads(bytes(entry.raw_messages)) for part in message["content"]
    ]
    return f"{entry.kind.removeprefix('pi.')} {' '.join(part.get('text', '') for part in parts)}".strip()


async def test_a_full_disk_fails_the_session_and_a_reopen_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K128 to K130: the first cause is the error, and the request id tells what became of the question."""
    path, model = tmp_path / "store", ScriptedModel({"hi": say("hello"), "more": say("more it is")})
    with pytest.raises(SessionFailed, match="the disk is full"):
        async with Harness.open(JsonlStorage(path), models=model) as harness:
            root = await harness.root()
            assert (await (await root.submit("hi", request_id="1")).answer()).text == "hello"

            def full(descriptor: int, offset: int, data: bytes) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            monkeypatch.setattr(jsonl_disk, "write", full)
            with pytest.raises(StorageError, match=r"store could not be written to: the disk is full"):
                await root.submit("more", request_id="2")
            monkeypatch.undo()
            await root.submit("more", request_id="2")
    async with Harness.open(JsonlStorage(path), models=model) as harness:
        root = await harness.root()
        assert (await (await root.submit("hi", request_id="1")).answer()).text == "hello"
        assert (await (await root.submit("more", request_id="2")).answer()).text == "more it is"
    assert await _said(path) == ["user hi", "assistant hello", "user more", "assistant more it is"]
