"""What tests of local commands share: scripts, processes that are looked at, and waiting for output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import stat
from pathlib import Path

from perdure.harness.environment import ExecResult
from perdure.tools.local import LocalEnvironment

# Children that leave in the known ways; each writes its pid. "ready" is printed when all have.
DAEMONS = """
keep() { echo $$ > $1.tmp; mv $1.tmp $1.pid; exec sleep 600; }
export -f keep
keep_in=$(pwd)
sleep 600 & echo $! > plain.pid
bash -c 'keep session' & true
setsid bash -c 'keep setsid' &
(setsid nohup bash -c 'keep double' > /dev/null 2>&1 &)
setsid bash -c "(cd / && exec bash -c 'cd '$keep_in' && keep third') & exit" &
while [ $(ls *.pid | wc -l) -lt 5 ]; do sleep 0.02; done
echo ready
"""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def pids(work: Path) -> dict[str, int]:
    return {path.stem: int(path.read_text()) for path in work.glob("*.pid")}


def kill_and_see_gone(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    see_gone(pid)


def see_gone(pid: int) -> None:
    """It was killed and needs a moment to end."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            select.select([handle], [], [])
        finally:
            os.close(handle)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


class Until:
    """An ``on_output`` that tells when a word has come."""

    def __init__(self, word: bytes = b"ready") -> None:
        self.seen = asyncio.Event()
        self.output = b""
        self._word = word

    def __call__(self, chunk: bytes) -> None:
        self.output += chunk
        if self._word in self.output:
            self.seen.set()


async def cancel_when_ready(env: LocalEnvironment, script: str, *, times: int = 1) -> asyncio.Task[ExecResult]:
    until = Until()
    task = asyncio.create_task(env.exec(script, on_output=until))
    seen = asyncio.create_task(until.seen.wait())
    await asyncio.wait({task, seen}, return_when=asyncio.FIRST_COMPLETED)
    seen.cancel()
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait({task})
    return task


async def time_out_when_ready(env: LocalEnvironment, script: str) -> ExecResult:
    """Run into a time-out that was long enough for the script to get ready."""
    for timeout_ms in (500, 4000, 30_000):
        result = await env.exec(script, timeout_ms=timeout_ms)
        assert result.timed_out
        if b"ready" in result.output:
            return result
    raise AssertionError("the script never got ready")
