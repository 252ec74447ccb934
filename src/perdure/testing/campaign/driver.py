"""One life of the process that is killed: a host like any other, with the script's agent in a durable Space.

It tells the runner what it does on a pipe, and keeps a side file of how calls went on after crashes, since the document
that has this is bounded.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
from typing_extensions import override

from perdure.harness.environment import CallScope
from perdure.harness.harness import Harness
from perdure.kernel.reports import Report
from perdure.kernel.settled import Settled
from perdure.spaces.documents import SpaceImage, SpaceState
from perdure.spaces.durable import DurableSpace
from perdure.spaces.local import LocalSpaces
from perdure.spaces.settings import SpaceSettings
from perdure.spaces.space import Space
from perdure.storage.sqlite import SqliteStorage
from perdure.testing.campaign.script import JOB, LOOK, RUN_VARIABLE, Kind, Script, answers, one_call, script_of
from perdure.testing.campaign.tools import campaign_tools
from perdure.testing.campaign.watch import Stand, Watch, WatchedScope, WatchedStorage
from perdure.testing.model import ScriptedModel
from perdure.tools.coding import coding_tools

SPACE = "one"
"""The name of the Space of a run."""


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """What one process is told."""

    folder: str
    events: str
    """Where it tells: a pipe with a name."""
    script: int | Kind
    """A variant, or the kind of the one call in the middle."""
    together: bool = False
    """Two calls an answer."""
    stands: tuple[Stand, ...] = ()
    crash_points: bool = False
    """Its daemon can be told where to stop or to die."""
    takeover: bool = False
    """It takes the store over from a process that has it open."""
    job: Literal["work", "look", "read"] = "work"
    """The script; to see whether all is there, with one call that only reads; or only what the log has."""


def steps_of(script: int | Kind) -> Script:
    return script_of(script) if isinstance(script, int) else one_call(script)


class WatchedSpace(DurableSpace):
    """The real environment, whose part in calls is watched."""

    def __init__(self, space: Space, watch: Watch) -> None:
        super().__init__(space, SpaceSettings())
        inner = super().scope
        assert inner is not None, "a durable Space takes part in calls"
        self._watched = WatchedScope(inner, watch)

    @property
    @override
    def scope(self) -> CallScope | None:
        return self._watched


def main(life: Life) -> int:
    descriptor = os.open(life.events, os.O_WRONLY | os.O_CLOEXEC)
    watch = Watch(descriptor, life.stands)
    try:
        asyncio.run(_read(life, watch) if life.job == "read" else _work(life, watch))
    except Exception as error:
        watch.tell(failed=type(error).__name__, message=str(error))
        raise
    return 0


def _reported(watch: Watch, report: Report) -> None:
    watch.tell(report=report.type, message=report.message)


async def _work(life: Life, watch: Watch) -> None:
    folder = Path(life.folder)
    spaces = LocalSpaces(
        folder / "spaces",
        env={"PATH": os.environ.get("PATH", os.defpath), RUN_VARIABLE: life.folder},
        testing_crash_points=life.crash_points,
    )
    storage = WatchedStorage(folder / "agent.db")
    storage.watch = watch
    environment = WatchedSpace(await spaces.open(SPACE), watch)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _cut)
    async with Harness.open(
        storage,
        models=ScriptedModel(answers(steps_of(life.script), together=life.together)),
        extensions=[coding_tools(), campaign_tools()],
        environment=environment,
        on_report=lambda report: _reported(watch, report),
        drain_ms=2_000,
        takeover=life.takeover,
    ) as harness:
        side = _Side(folder / "recoveries.jsonl", harness)
        await side.write()
        harness.session.observe(side)
        root = await harness.root()
        watch.tell(opened=os.getpid(), epoch=harness.session.info.epoch)
        submission = await root.submit(JOB if life.job == "work" else LOOK, request_id=life.job)
        answer = await submission.answer()
        await side.write()
        watch.tell(answered=answer.text)
    watch.tell(finished=True)


def _cut() -> None:
    """Every connection to a daemon ends, while that works on."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
            if found.family == socket.AF_UNIX and found.getpeername():
                found.shutdown(socket.SHUT_RDWR)


class _Side:
    """The recoveries of ``pi.space`` as commits bring them, in a file that only grows."""

    def __init__(self, path: Path, harness: Harness) -> None:
        self._file = path.open("ab", buffering=0)
        self._harness = harness
        self._seen: set[bytes] = set()
        self._writing: set[asyncio.Task[None]] = set()

    def __call__(self, settled: Settled) -> None:
        if any(write.record.kind == "pi.space" for write in settled.batch.documents):
            task = asyncio.get_running_loop().create_task(self.write())
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def write(self) -> None:
        state = await self._harness.session.snapshot(SpaceState, key=SPACE)
        for note in () if state is None else state.recoveries:
            line = msgspec.json.encode(note)
            if line not in self._seen:
                self._seen.add(line)
                self._file.write(line + b"\n")


async def _read(life: Life, watch: Watch) -> None:
    """What the log has of the Space, with nothing set going."""
    async with Harness.open(SqliteStorage(Path(life.folder) / "agent.db"), read_only=True) as harness:
        state = await harness.session.snapshot(SpaceState, key=SPACE)
        found = await harness.session.snapshot(SpaceImage, key=SPACE)
        assert state is not None, "the Space was used"
        image = None if found is None else found.shared_json()
        (Path(life.folder) / "image.json").write_bytes(msgspec.json.encode(image))
        watch.tell(open=msgspec.to_builtins(state.open), external=state.external, calls=state.calls)
    watch.tell(finished=True)


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=Life)))
