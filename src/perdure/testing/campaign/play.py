"""One run: lives of the driver, what is done to them and to the Space, and the judge at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from perdure.testing.campaign.driver import Life, steps_of
from perdure.testing.campaign.judge import judge
from perdure.testing.campaign.nursery import Nursery
from perdure.testing.campaign.script import Kind, Script, Tree
from perdure.testing.campaign.tally import Tally
from perdure.testing.campaign.watch import Stand
from perdure.testing.campaign.world import Process, Stuck, World, until

MAX_LIVES: Final = 60
"""A run that needs more does not come to its end."""


@dataclass(slots=True)
class Outcome:
    """Of one run."""

    tally: Tally
    wrong: list[str]
    folder: Path | None = None
    """Kept, if something was wrong."""


@dataclass(slots=True)
class Play:
    """A run under way. A mode attacks through it; ``finish`` brings the work to its end and judges."""

    world: World
    script: int | Kind
    together: bool = False
    crash_points: bool = False
    tally: Tally = field(default_factory=lambda: Tally(runs=1))
    excuses: int = 0
    """So many drivers may end by themselves, with the error that the Space is not to be had."""
    _life: Process | None = None

    @property
    def steps(self) -> Script:
        return steps_of(self.script)

    @property
    def life(self) -> Process:
        assert self._life is not None, "a driver was started"
        return self._life

    def begin(self, *stands: Stand, takeover: bool = False) -> Process:
        """One more life of the driver."""
        self._life = self.world.start(self._described(stands, takeover=takeover))
        return self._life

    def _described(
        self, stands: tuple[Stand, ...] = (), *, takeover: bool = False, job: Literal["work", "look", "read"] = "work"
    ) -> Life:
        return Life(
            folder=str(self.world.folder),
            events=self.world.pipe(),
            script=self.script,
            together=self.together,
            stands=stands,
            crash_points=self.crash_points,
            takeover=takeover,
            job=job,
        )

    # --- what is done

    def kill(self, life: Process | None = None) -> None:
        """SIGKILL of a driver, the present one if none is named, and wait for its end."""
        life = life or self.life
        self.world.record({"runner": "kill driver", "pid": life.pid})
        life.kill()
        self._count_end(life)

    def kill_daemon(self) -> bool:
        done = self.world.kill_daemon()
        if done:
            self.tally.faults["daemon"] += 1
        return done

    def kill_processes(self) -> None:
        """Everything that lives in the Space; its files stay."""
        self.world.kill_living()
        self.tally.faults["processes"] += 1

    def lose_space(self) -> None:
        self.world.lose_space()
        self.tally.faults["lost"] += 1

    def died(self, life: Process) -> None:
        """A driver was seen to end. Raises Stuck if nobody killed it and that is not excused."""
        status = self._count_end(life)
        if status in (0, -9):
            return
        if self.excuses and life.failure.startswith(("SpaceUnavailable", "NobodyListens", "SpaceNotReady")):
            self.excuses -= 1
            self.tally.faults["gave_up"] += 1
            return
        raise Stuck(f"the driver ended by itself, with {status}: {life.failure}")

    def until_line(self, what: str, line: str) -> None:
        """Wait until the work wrote the line. Raises Stuck, at once where the driver ends before."""
        until(what, lambda: line in self.world.lines() or self.life.ended())
        if line not in self.world.lines():
            while self.life.next() is not None:
                pass
            self.died(self.life)
            raise Stuck(f"the driver ended before it came to this: {what}")

    def _count_end(self, life: Process) -> int:
        known = life.status
        status = life.reap()
        if known is None and status == -9:
            self.tally.kills += 1
            self.tally.faults["driver"] += 1
        return status

    # --- to the end

    def finish(self) -> None:
        """The work comes to its end, in as many lives as it takes; all gates are open. Raises Stuck."""
        for step in self.steps:
            if step.gated:
                self.world.open_gate(step.number)
        for _ in range(MAX_LIVES):
            life = self.life
            while life.next() is not None:
                pass
            self.died(life)
            if life.finished:
                break
            self.begin()
        else:
            raise Stuck(f"not done after {MAX_LIVES} lives")
        for job in ("look", "read"):
            life = self.world.start(self._described(job=job))
            while (event := life.next()) is not None:
                if event.get("open") is not None:
                    raise Stuck(f"a call still has the Space: {event['open']}")
            if life.reap() != 0:
                raise Stuck(f"{job} could not be done: {life.failure}")

    def wrong(self, reference: Tree | None) -> Iterator[str]:
        """What the judge finds."""
        yield from judge(self.world.folder, self.world.workspace, self.steps, reference=reference)
        for note in recoveries(self.world.folder):
            self.tally.recoveries[note] += 1


def recoveries(folder: Path) -> list[str]:
    """The kinds of all that were committed in a run, by the side file."""
    path = folder / "recoveries.jsonl"
    lines = dict.fromkeys(path.read_bytes().splitlines() if path.exists() else ())
    return [json.loads(line)["kind"] for line in lines]


def undisturbed(play: Play) -> None:
    """No attack at all."""
    for step in play.steps:
        if step.gated:
            play.world.open_gate(step.number)
    play.begin()


def play(
    nursery: Nursery,
    script: int | Kind,
    attack: Callable[[Play], None],
    *,
    reference: Tree | None = None,
    together: bool = False,
    crash_points: bool = False,
    parent: Path | None = None,
    after: Callable[[World], None] = lambda world: None,
) -> Outcome:
    """A run in a folder of its own: what ``attack`` does, then the end of the work, then the judge."""
    world = World(nursery, parent)
    played = Play(world, script, together=together, crash_points=crash_points)
    wrong: list[str] = []
    began = time.monotonic()
    try:
        attack(played)
        played.finish()
        wrong.extend(played.wrong(reference))
        after(world)
    except (Stuck, OSError) as error:
        wrong.append(str(error))
    finally:
        world.record({"wrong": wrong, "seconds": round(time.monotonic() - began, 3)})
        world.end(keep=bool(wrong))
    played.tally.failed = int(bool(wrong))
    return Outcome(played.tally, wrong, world.folder if wrong else None)
