"""The demo's parent: starts the agent, kills it with SIGKILL where the seed says, starts it again, tells the story."""

from __future__ import annotations

import json
import os
import random
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from rich.console import Console
from rich.text import Text

from perdure.cli.demo import space
from perdure.cli.demo.judge import judge
from perdure.cli.demo.project import FILE_MODE, FILES, JOBS, SUPPLIER
from perdure.cli.space.words import went_on
from perdure.spaces.errors import SpaceError

Points: TypeAlias = Mapping[str, tuple[int, str]]
"""Where it is killed, once each: at which occurrence, at most, the seed may choose (0 is the first), and in words."""

POINTS: Final[Points] = {
    "admission": (3, "while a job is being admitted, before it is on disk"),
    "streaming": (2, "while an answer streams"),
    "before_tool": (3, "after a call's intent is stored, before the tool runs"),
    "in_safe_tool": (1, "inside a tool, its file written, its result not stored"),
    "in_command": (2, "inside bash: the command has run, its result is not stored"),
    "in_order": (2, "inside a tool that acts outside: the order is out, its result is not stored"),
    "after_tool": (3, "right after a tool's result is stored"),
    "in_sleep": (0, "while the run sleeps before it tries the model again"),
    "recovery": (4, "during recovery, before anything has resumed"),
}

MOMENTS: Final[Mapping[str, Mapping[str, tuple[int, str]]]] = {
    "daemon": {
        "command_runs": (2, "while a command runs"),
        "before_tool": (3, "after a call's intent is stored, before the tool runs"),
        "in_safe_tool": (1, "inside a tool, its file written, its result not stored"),
        "after_tool": (4, "right after a tool's result is stored"),
        "recovery": (4, "during recovery, before anything has resumed"),
    },
    "space": {
        "command_runs": (2, "while a command runs"),
        "before_tool": (3, "after a call's intent is stored, before the tool runs"),
        "in_safe_tool": (1, "inside a tool, its file written, its result not stored"),
        "after_tool": (4, "right after a tool's result is stored"),
    },
}
"""What is done to the Space, once each, at one of these moments: the occurrence as in POINTS."""

DONE: Final = {"daemon": "SIGKILL to the Space's daemon", "space": "the Space is deleted, with all files,"}

SPARE_STARTS = 3
SILENCE_S = 60.0
"""An agent that says nothing for so long is stuck, and the demo has failed."""

Event = dict[str, Any]
"""One line of the agent, as JSON."""


class DemoFailed(Exception):
    """The demo itself could not go on; the message says why."""


@dataclass(slots=True)
class Blow:
    """Something that is done to the Space, while the agent stands still."""

    point: str
    passes: int
    """How many occurrences of the point it lets pass."""
    words: str
    do: Callable[[], None]
    done: bool = False


class Agent:
    """One life of the agent's process, which ``command`` starts."""

    def __init__(self, folder: Path, command: Sequence[str], *, silence_s: float = SILENCE_S) -> None:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._errors = (folder / "agent.err").open("a+")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
        )
        self._buffer = b""
        self._silence_s = silence_s

    def next(self) -> Event | None:
        """Its next line; None once it has ended."""
        assert self.process.stdout is not None, "it was started with a pipe"
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self.process.stdout], [], [], self._silence_s)
            if not ready:
                self.kill()
                raise DemoFailed(f"the agent said nothing for {self._silence_s:.0f} s")
            read = os.read(self.process.stdout.fileno(), 65536)
            if not read:
                return None
            self._buffer += read
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def go(self) -> None:
        """Let it go on from where it stands."""
        assert self.process.stdin is not None, "it was started with a pipe"
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> int:
        """Its exit code, once it has ended by itself."""
        return self.process.wait(timeout=self._silence_s)

    def close(self) -> None:
        """Whatever happened, it has ended by then."""
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout, self._errors):
            if pipe is not None:
                pipe.close()


class Story:
    """What the demo says."""

    def __init__(self, *, plain: bool) -> None:
        self.console = Console(color_system=None if plain else "auto", highlight=False, soft_wrap=True)
        self._started = time.monotonic()
        self._answers: dict[str, str] = {}
        self._again: list[str] = []
        """Jobs this life was told again and had answered before."""

    def say(self, text: str, style: str = "", mark: str = " ") -> None:
        stamp = f"{time.monotonic() - self._started:5.1f}s "
        self.console.print(Text.assemble((stamp, "dim"), (f"{mark} ", style), (text, style)))

    def event(self, event: Event) -> None:
        if self._again and event.get("job") not in self._answers:
            self.say(f"{', '.join(self._again)}: submitted again, same submission, same answer", "dim")
            self._again.clear()
        if "found" in event:
            self._found(event["found"], event["commits"])
        elif "result" in event:
            code = event["code"]
            if code == "interrupted":
                self.say(f"{event['result']}: interrupted; not run again by itself, the model is told", "yellow", "!")
            else:
                lines = [line for line in event["text"].splitlines() if line.strip()]
                told = 0 if event["result"] == "edit" else -1  # A diff follows what it says of itself.
                self.say(f"{event['result']}: {code or (lines[told][:70] if lines else 'done')}", "dim", "·")
        elif event.get("stop") == "aborted":
            self.say(
                f"the broken-off answer ({len(event['answer'])} characters) is kept as aborted; asked again", "yellow"
            )
        elif "answered" in event:
            self._answered(event["job"], event["answered"])
        elif "report" in event:
            self._reported(event["report"], event["message"])

    def _reported(self, kind: str, message: str) -> None:
        told = went_on(kind, message)
        if told is not None:
            self.say(told, "cyan", "↻")
        elif kind == "space_recovery":
            self.say("what the log does not have was moved to the Space's recovery folder", "dim")
        else:
            self.say(f"report: {kind}: {message}", "yellow")

    def _answered(self, job: str, answer: str) -> None:
        if job not in self._answers:
            self._answers[job] = answer
            self.say(f"{job}: {answer}", "green", "✓")
        elif self._answers[job] == answer:
            self._again.append(job)
        else:
            self.say(f"{job}: ANOTHER ANSWER: {answer}", "bold red", "✗")

    def _found(self, tasks: list[Event], commits: int) -> None:
        if not commits:
            self.say("a new store")
            return
        live = ", ".join(f"{task['kind']} {task['status']}" for task in tasks)
        self.say(f"opens the store at commit {commits}, finds: {live or 'nothing in progress'}", "cyan", "↻")


def run_demo(*, seed: int | None = None, plain: bool = False, keep: Path | None = None) -> int:
    """Run it. The exit code: 0 if everything was as it must be."""
    seed = secrets.randbelow(10_000) if seed is None else seed
    story = Story(plain=plain)
    story.console.print(f"perdure demo, seed {seed} (repeat it with: perdure demo --seed {seed})", style="bold")
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    folder = Path(tempfile.mkdtemp(prefix="perdure-demo-")) if keep is None else keep
    try:
        if keep is not None:
            try:
                keep.mkdir(parents=True)
            except FileExistsError as error:
                raise DemoFailed(f"{keep} is there already; --keep takes a folder that is not") from error
        try:
            return _live_and_judge(folder, seed, story)
        finally:
            space.end(folder)
    except (DemoFailed, SpaceError, OSError) as error:
        story.say(f"the demo failed: {error}", "bold red", "✗")
        _show_errors(folder, story)
        return 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def _leave(number: int, _: object) -> None:
    """What was started is ended all the same."""
    raise SystemExit(128 + number)


def _live_and_judge(folder: Path, seed: int, story: Story) -> int:
    _lay_out(folder)
    command = [sys.executable, "-m", "perdure.cli.demo.agent", str(folder)]
    blows = blows_of(seed, {"daemon": lambda: space.kill_daemon(folder), "space": lambda: space.delete(folder)})
    kills = live_through(lambda: Agent(folder, command), plan_of(seed, POINTS), POINTS, story, blows)
    return _verdict(folder, kills, story)


def _lay_out(folder: Path) -> None:
    space.make(folder)
    (folder / SUPPLIER).mkdir()
    for name, text in FILES.items():
        path = space.workspace_of(folder) / name
        path.write_text(text)
        path.chmod(FILE_MODE)


def plan_of(seed: int, points: Points) -> dict[str, int]:
    """Point -> how many occurrences to let pass before the kill."""
    chance = random.Random(seed)
    return {point: chance.randint(0, latest) for point, (latest, _) in points.items()}


def blows_of(seed: int, ways: Mapping[str, Callable[[], None]]) -> list[Blow]:
    """When each of these is done."""
    chance = random.Random(f"{seed} blows")
    blows: list[Blow] = []
    for what, do in ways.items():
        point = chance.choice(sorted(MOMENTS[what].keys() - {blow.point for blow in blows}))
        latest, words = MOMENTS[what][point]
        blows.append(Blow(point, chance.randint(0, latest), f"{DONE[what]} {words}", do))
    return blows


def live_through(
    start: Callable[[], Agent], plan: dict[str, int], points: Points, story: Story, blows: Sequence[Blow] = ()
) -> int:
    """Start the agent until it finishes, killed where ``plan`` says; how often that was. ``blows`` fall meanwhile.

    Raises DemoFailed.
    """
    most = len(points) + SPARE_STARTS
    for number in range(1, most + 1):
        story.say(f"start {number}: a new process", "bold", "▶")
        agent = start()
        try:
            if _live(agent, plan, points, story, blows):
                code = agent.end()
                if code:
                    raise DemoFailed(f"the agent ended with exit code {code}")
                if plan:
                    raise DemoFailed(f"it was never killed at: {', '.join(plan)}")
                if missed := [blow.words for blow in blows if not blow.done]:
                    raise DemoFailed(f"this never happened: {', '.join(missed)}")
                return number - 1
        finally:
            agent.close()
    raise DemoFailed(f"it did not finish in {most} starts")


def _live(agent: Agent, plan: dict[str, int], points: Points, story: Story, blows: Sequence[Blow]) -> bool:
    """Follow one life. True: it finished; False: it was killed."""
    finished = False
    while True:
        event = agent.next()
        if event is None:
            if not finished and agent.end() == 0:
                raise DemoFailed("the agent ended without finishing")
            return True
        if "finished" in event:
            finished = True
        point = event.get("point")
        if point is None:
            story.event(event)
            continue
        for blow in blows:
            _fall(blow, point, event, story)
        if point in plan and plan[point] == 0:
            del plan[point]
            agent.kill()
            story.event({})
            story.say(f"SIGKILL {points[point][1]}{_detail(event)}", "bold red", "✗")
            return False
        else:
            if point in plan:
                plan[point] -= 1
            agent.go()


def _fall(blow: Blow, point: str, event: Event, story: Story) -> None:
    if blow.done or blow.point != point:
        return
    if blow.passes:
        blow.passes -= 1
        return
    blow.do()
    blow.done = True
    story.event({})
    story.say(f"{blow.words}{_detail(event)}", "bold red", "✗")


def _detail(event: Event) -> str:
    detail = event.get("job") or event.get("tool") or event.get("path")
    return f" ({detail})" if detail else ""


def _verdict(folder: Path, kills: int, story: Story) -> int:
    story.say(f"{kills} kills, a daemon killed, a Space deleted. Now count, from the files alone:", "bold")
    wrong = 0
    for what, problem in judge(folder):
        if problem is None:
            story.say(what, "green", "✓")
        else:
            wrong += 1
            story.say(f"NOT TRUE: {what}: {problem}", "bold red", "✗")
    if wrong:
        story.say(f"{wrong} checks failed", "bold red")
        return 1
    story.say(f"{len(JOBS)} jobs, {kills} kills, nothing lost, nothing done twice.", "bold green")
    return 0


def _show_errors(folder: Path, story: Story) -> None:
    errors = folder / "agent.err"
    if errors.exists():
        for line in errors.read_text(errors="replace").splitlines()[-20:]:
            story.say(line, "dim")
