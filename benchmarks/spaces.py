"""What durable Spaces cost, beside a bare scan of the tree and what people use now: git, tar with zstd, rsync.

    python benchmarks/spaces.py [--files 200,10000,50000] [--repeat 5] [--quick] [--write] [--scratch DIR]

Calls: the same call of the tool ``bash`` in a local environment and in a durable Space, turn by turn in one process,
and its command as a plain subprocess. CPU is that of everything: driver, daemon, shims, commands. Flushes are counted
with strace. Trees: one file of 4 KiB is changed, captured, and brought back. ``--write`` puts the tables into the
README.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import apsw

from perdure import Harness, SqliteStorage
from perdure.harness.environment import ExecutionEnvironment
from perdure.spaces.durable import durable_space
from perdure.spaces.local import LocalSpaces
from perdure.spaces.scope import SpaceScope
from perdure.testing.model import ScriptedModel, call, say
from perdure.tools.coding import coding_tools
from perdure.tools.local import LocalEnvironment
from table import between_markers
from usage import FLUSHES, Cpu, Samples, flushes, have

T = TypeVar("T")

README = Path(__file__).resolve().parent / "README.md"
BEGIN, END = "<!-- spaces: written by spaces.py --write -->", "<!-- end of spaces -->"
CHANGED = "d000/changed"
SIZE = 4096
COMMAND = f"head -c {SIZE} /dev/urandom > changed"
BYTES = {200: 5120, 10_000: 4096, 50_000: 1024}
"""Of a file, by how many there are."""
PIN = 1 << 40
"""Who needs the contents of a capture, where a call would stand: none has such an id."""
MOST_CPU_MS, MOST_FLUSHES, MOST_SCANS = 4.0, 6, 1.5


@asynccontextmanager
async def opened(store: Path, environment: ExecutionEnvironment) -> AsyncIterator[Harness]:
    async with Harness.open(
        SqliteStorage(store),
        models=ScriptedModel({"go": [call("bash", command=COMMAND), say("done")]}),
        extensions=[coding_tools()],
        environment=environment,
    ) as harness:
        yield harness


async def turns(harness: Harness, count: int) -> None:
    """Turns of one tool call; what is left to do after the last answer is done, too."""
    root = await harness.root()
    for _ in range(count):
        submission = await root.submit("go")
        assert (await submission.answer()).text == "done"
    await asyncio.sleep(0.05)


async def plain(folder: Path, count: int) -> None:
    for _ in range(count):
        process = await asyncio.create_subprocess_exec("bash", "-c", COMMAND, cwd=folder)
        assert await process.wait() == 0


# --- calls ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def sides(folder: Path) -> AsyncIterator[dict[str, Callable[[int], Awaitable[None]]]]:
    """How to make so many calls, by side."""
    for name in ("plain", "local"):
        (folder / name).mkdir(parents=True)
    spaces = LocalSpaces(folder / "spaces")
    try:
        space = await spaces.open("one")
        async with (
            opened(folder / "local.db", LocalEnvironment(folder / "local")) as local,
            opened(folder / "durable.db", durable_space(space)) as durable,
        ):
            yield {
                "plain": lambda count: plain(folder / "plain", count),
                "local": lambda count: turns(local, count),
                "durable": lambda count: turns(durable, count),
            }
    finally:
        await spaces.delete("one")


async def time_calls(cpu: Cpu, folder: Path, rounds: int, each: int) -> dict[str, Samples]:
    found: dict[str, Samples] = {}
    async with sides(folder) as made:
        for make in made.values():
            await make(5)
        for number in range(rounds):
            for name in list(made) if number % 2 else reversed(list(made)):
                begun = cpu.begun()
                await made[name](each)
                found.setdefault(name, Samples()).add(begun, cpu.ended(), each)
    return found


async def traced(folder: Path, count: int) -> None:
    """In a process that is traced: prints when the calls of each side were made."""
    async with sides(folder) as made:
        spans: dict[str, tuple[float, float]] = {}
        for name, make in made.items():
            await make(5)
            await asyncio.sleep(0.5)
            begun = time.time()
            await make(count)
            await asyncio.sleep(0.5)
            spans[name] = (begun, time.time())
        print(json.dumps(spans), flush=True)


def count_flushes(scratch: Path, count: int) -> dict[str, float]:
    if not have("strace"):
        return {}
    trace = scratch / "trace"
    words = ["strace", "-f", "-qq", "-ttt", "-e", f"trace={','.join(FLUSHES)}", "-o", str(trace)]
    words += [sys.executable, __file__, "--traced", str(count), "--scratch", str(scratch / "traced")]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    spans: dict[str, tuple[float, float]] = json.loads(done.stdout.splitlines()[-1])
    counted = flushes(trace.read_text(), list(spans.values()))
    return {name: number / count for name, number in zip(spans, counted, strict=True)}


# --- trees ----------------------------------------------------------------------------------------------------------


@dataclass
class Way:
    """Something done to a tree, over and over."""

    label: str
    samples: Samples = field(default_factory=Samples)
    stored: float = float("nan")
    """Bytes each time."""
    goal: bool = False


def make_tree(folder: Path, files: int) -> None:
    random_bytes = random.Random(1).randbytes
    for number in range(files):
        directory = folder / f"d{number // 100:03d}"
        if number % 100 == 0:
            directory.mkdir(parents=True)
        (directory / f"f{number:05d}").write_bytes(random_bytes(BYTES.get(files, 1024) // 2).hex().encode())


def change(folder: Path) -> None:
    (folder / CHANGED).write_bytes(os.urandom(SIZE))


def bare(folder: str) -> int:
    """Look at everything below: what no way of finding a change can do without."""
    seen = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            seen += 1
            if entry.is_dir(follow_symlinks=False):
                seen += bare(entry.path)
            assert status.st_ctime_ns
    return seen


def shell(command: str, folder: Path) -> None:
    author = {f"GIT_{who}_{what}": "a" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = {**os.environ, **author, "GIT_CONFIG_GLOBAL": "/dev/null"}
    done = subprocess.run(["sh", "-c", command], cwd=folder, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, (command, done.stderr[-300:])


@dataclass(frozen=True)
class Tool:
    """What people use now. ``{at}`` is its store, ``{n}`` the number of the snapshot, ``{p}`` that before it."""

    name: str
    programs: tuple[str, ...]
    begin: str
    snapshot: str
    restore: str
    """The changed file, as of the snapshot before."""


GIT = "git --git-dir={at} --work-tree=. "
TOOLS = (
    Tool(
        "git commit",
        ("git",),
        f"git init -q --bare {{at}} && {GIT}config core.bare false && {GIT}config gc.auto 0 && {GIT}add -A "
        f"&& {GIT}commit -qm 0",
        f"{GIT}add -A && {GIT}commit -qm {{n}}",
        f"{GIT}checkout -q HEAD~1 -- {CHANGED}",
    ),
    Tool(
        "tar with zstd",
        ("tar", "zstd"),
        "mkdir {at} && tar cf - . | zstd -q -o {at}/0",
        "tar cf - . | zstd -q -o {at}/{n}",
        f"zstd -dcq {{at}}/{{p}} | tar xf - ./{CHANGED}",
    ),
    Tool(
        "rsync --link-dest",
        ("rsync",),
        "mkdir {at} && rsync -a ./ {at}/0/",
        "rsync -a --link-dest={at}/{p} ./ {at}/{n}/",
        f"rsync -a --checksum {{at}}/{{p}}/{CHANGED} {CHANGED}",
    ),
)


def used(folder: Path) -> int:
    return int(subprocess.run(["du", "-s", "--block-size=1", folder], capture_output=True, text=True).stdout.split()[0])


class Tree:
    """One tree, and everything that is done to it in turn."""

    def __init__(self, cpu: Cpu, scratch: Path, files: int) -> None:
        self._cpu = cpu
        self._scratch = scratch / f"tree-{files}"
        self.folder = self._scratch / "tree"
        self.files = files
        make_tree(self.folder, files)
        change(self.folder)
        self.ways: dict[str, Way] = {}

    async def measure(self, repeat: int) -> None:
        store = self._scratch / "store.db"
        space = await LocalSpaces.at(self.folder)
        try:
            environment = durable_space(space)
            async with opened(store, environment) as harness:
                await turns(harness, 2)  # the first of them takes the whole tree into the log
                scope = environment.scope
                assert isinstance(scope, SpaceScope)
                await self._alone(harness, scope, repeat)
            before = self._store_bytes(store)
            async with opened(store, durable_space(space)) as harness:
                await turns(harness, 20)
            self._way("durable capture").stored = (self._store_bytes(store) - before) / 20
        finally:
            await space.delete()
        for tool in TOOLS:
            if all(map(have, tool.programs)):
                self._with_tool(tool, min(repeat, 3))

    async def _alone(self, harness: Harness, scope: SpaceScope, repeat: int) -> None:
        for number in range(repeat + 1):
            ways = {name: self._way(name) for name in ("bare scan", "find", "durable capture", "durable undo", "call")}
            if number == 0:
                ways = {name: Way(name) for name in ways}  # to warm up
            content = (self.folder / CHANGED).read_bytes()
            await asyncio.sleep(0.15)
            self._time(ways["bare scan"], lambda: bare(str(self.folder)))
            self._time(ways["find"], lambda: shell("find . -newer ../store.db > /dev/null", self.folder))
            change(self.folder)
            captured = await self._wait(ways["durable capture"], scope._capture(pin=PIN, freeze=True, sync=True))
            assert [found.path for found in captured.changes] == [CHANGED]
            await self._wait(ways["durable undo"], scope._restore(floor=None))
            assert (self.folder / CHANGED).read_bytes() == content
            await self._wait(ways["call"], turns(harness, 1))
        for name in ("durable capture", "durable undo"):
            self._way(name).goal = True

    def _with_tool(self, tool: Tool, repeat: int) -> None:
        at = self._scratch / tool.name.split()[0]
        snapshot, restore = self._way(tool.name), self._way(f"{tool.name}: one file back")
        shell(tool.begin.format(at=at), self.folder)
        first = used(at)
        for number in range(1, repeat + 1):
            content = (self.folder / CHANGED).read_bytes()
            time.sleep(1.1)  # or rsync does not see a change of the same size
            change(self.folder)
            names = {"at": at, "n": number, "p": number - 1}
            self._time(snapshot, partial(shell, tool.snapshot.format(**names), self.folder))
            newer = (self.folder / CHANGED).read_bytes()
            self._time(restore, partial(shell, tool.restore.format(**names), self.folder))
            assert (self.folder / CHANGED).read_bytes() == content
            (self.folder / CHANGED).write_bytes(newer)
        snapshot.stored = (used(at) - first) / repeat
        shutil.rmtree(at)

    def _way(self, name: str) -> Way:
        return self.ways.setdefault(name, Way(name))

    def _store_bytes(self, store: Path) -> int:
        """What is used of the store, once it is closed: pages that were freed are used again."""
        connection = apsw.Connection(str(store))
        try:
            pages, free, size = (
                next(connection.execute(f"PRAGMA {name}"))[0] for name in ("page_count", "freelist_count", "page_size")
            )
        finally:
            connection.close()
        return (pages - free) * size

    def _time(self, way: Way, work: Callable[[], object]) -> None:
        begun = self._cpu.begun()
        work()
        way.samples.add(begun, self._cpu.ended())

    async def _wait(self, way: Way, work: Awaitable[T]) -> T:
        begun = self._cpu.begun()
        done = await work
        way.samples.add(begun, self._cpu.ended())
        return done


# --- the tables -----------------------------------------------------------------------------------------------------


def ms(values: list[float]) -> float:
    return 1e3 * statistics.median(values)


def verdict(met: bool) -> str:
    return "met" if met else "**not met**"


def call_table(found: dict[str, Samples], flushed: dict[str, float]) -> list[str]:
    labels = {
        "plain": "the command, a plain subprocess",
        "local": "the turn, in a local environment",
        "durable": "the turn, in a durable Space",
    }
    lines = ["| call | CPU ms | wall ms | flushes |", "|---|---|---|---|"]
    for name, label in labels.items():
        samples = found[name]
        count = f"{flushed[name]:.1f}" if flushed else ""
        lines.append(f"| {label} | {ms(samples.cpu):.1f} | {ms(samples.wall):.1f} | {count} |")
    more = [durable - local for durable, local in zip(found["durable"].cpu, found["local"].cpu, strict=True)]
    goals = f"at most {MOST_CPU_MS:g} ms: {verdict(ms(more) <= MOST_CPU_MS)}"
    count = ""
    if flushed:
        extra = flushed["durable"] - flushed["local"]
        count = f"{extra:.1f}"
        goals += f"; at most {MOST_FLUSHES} flushes: {verdict(extra <= MOST_FLUSHES)}"
    lines.append(f"| what the durable one takes more ({goals}) | {ms(more):.1f} | | {count} |")
    return lines


TREE_HEAD = [
    "| tree | | CPU ms | wall ms | CPU / bare scan | wall / bare scan | bytes kept |",
    "|---|---|---|---|---|---|---|",
]


def tree_table(tree: Tree) -> list[str]:
    lines: list[str] = []
    scan = tree.ways["bare scan"].samples
    for way in tree.ways.values():
        times = [
            statistics.median(a) / statistics.median(b)
            for a, b in ((way.samples.cpu, scan.cpu), (way.samples.wall, scan.wall))
        ]
        said = f"{times[0]:.2f}"
        if way.goal:
            said += f" (at most {MOST_SCANS:g}: {verdict(times[0] <= MOST_SCANS)})"
        stored = "" if way.stored != way.stored else f"{way.stored:,.0f}"
        cpu, wall = ms(way.samples.cpu), ms(way.samples.wall)
        label = "a whole turn with such a call" if way.label == "call" else way.label
        lines.append(
            f"| {tree.files:,} files | {label} | {cpu:.1f} | {wall:.1f} | {said} | {times[1]:.2f} | {stored} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", default="200,10000,50000")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that everything runs")
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    parser.add_argument("--scratch", type=Path, help="where the trees are made, on the file system to measure")
    parser.add_argument("--traced", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.traced is not None:
        asyncio.run(traced(arguments.scratch, arguments.traced))
        return
    files = [200] if arguments.quick else [int(each) for each in arguments.files.split(",") if each]
    repeat = 2 if arguments.quick else arguments.repeat
    logging.getLogger("perdure").setLevel(logging.ERROR)  # not that each restore moved a file aside
    said: list[str] = []

    def tell(lines: list[str]) -> None:
        said.extend(lines)
        print("\n".join(lines), flush=True)

    cpu = Cpu()
    with tempfile.TemporaryDirectory(prefix="perdure-bench-", dir=arguments.scratch) as scratch, cpu.counting():
        found = asyncio.run(time_calls(cpu, Path(scratch, "calls"), repeat, 5 if arguments.quick else 10))
        flushed = count_flushes(Path(scratch), 10)
        tell([heading(repeat, cpu), "", *call_table(found, flushed), "", *TREE_HEAD])
        for count in files:
            tree = Tree(cpu, Path(scratch), count)
            asyncio.run(tree.measure(repeat))
            tell(tree_table(tree))
    if arguments.write:
        README.write_text(between_markers(README.read_text(), "\n".join(said), BEGIN, END))


def heading(repeat: int, cpu: Cpu) -> str:
    return (
        f"{time.strftime('%Y-%m-%d')}, CPython {platform.python_version()}, {os.cpu_count()} cores. Medians of "
        f"{repeat} (git, tar, rsync: of 3); CPU {cpu.how}."
    )


if __name__ == "__main__":
    main()
