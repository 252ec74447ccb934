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
