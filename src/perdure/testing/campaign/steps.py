"""The mode ``steps``: one fault at every step of a call and of its recovery, and again during what follows (rule P17).

A case is a situation (how the call came to be cut off, or that it is under way) and one or two faults. A fault strikes
at a point: of the driver, where it stops itself, or of the daemon or a shim, where it is armed while the driver stands
still just before.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from perdure.testing.campaign.control import Control, wait_held
from perdure.testing.campaign.play import Play
from perdure.testing.campaign.script import Kind
from perdure.testing.campaign.tally import Claims
from perdure.testing.campaign.watch import Stand
from perdure.testing.campaign.world import Stuck, until

Victim: TypeAlias = Literal["driver", "daemon", "shim", "both", "cut", "processes"]
"""What is killed; ``cut``: the connection alone, the daemon works on; ``processes``: all that live in the Space."""
Situation: TypeAlias = Literal["under_way", "running", "exited", "absent", "half", "lost"]

TARGET: Final = 2
"""The step that is attacked."""
HELD_S: Final = 20.0
AGAIN_S: Final = 4.0
"""How long a point may take to be reached; and one that a recovery need not come to."""

CLAIMS: Final = Claims(
    kills=600,
    faults={"daemon": 300, "shim": 5, "cut": 30, "processes": 15, "lost": 60},
    recoveries={"adopted": 120, "reattached": 20, "restored": 120, "rerun": 200, "not_started": 40},
)
"""Of all cases."""

DRIVER_IN_CALL: Final = (
    "commit.call.before",
    "commit.call.after",
    "enter.begin",
    "enter.end",
    "commit.intent.before",
    "commit.intent.after",
    "capture.begin",
    "capture.end",
    "commit.outcome.before",
    "commit.outcome.after",
    "leave.begin",
    "leave.end",
)
DAEMON_IN_CALL: Final[dict[Kind, dict[str, tuple[str, ...]]]] = {
    "slow": {
        "enter.begin": ("scan.walked",),
        "commit.intent.after": (
            "start.admitted",
            "start.forked",
            "shim.before_started",
            "shim.started",
            "start.answered",
            "shim.running",
            "shim.before_exit",
            "shim.exit",
        ),
        "capture.begin": ("scan.frozen", "scan.walked", "scan.synced"),
        "leave.begin": ("settle.begin", "settle.synced"),
    },
    "many": {"commit.intent.after": ("shim.exit", "write.renamed")},
    "note": {"commit.intent.after": ("write.admitted", "write.staged", "write.renamed")},
}
"""By where the driver stands when they are armed."""
DRIVER_IN_RECOVERY: Final = ("recover.begin", "commit.connect.before", "commit.connect.after", "recover.end")
ADVANCE: Final = ("advance.begin", "advance.fenced", "advance.cut", "advance.killed")
RESTORE: Final = (
    "restore.begin",
    "restore.floor",
    "restore.killed",
    "restore.staged",
    "restore.swap",
    "restore.swapped",
    "restore.image",
)


@dataclass(frozen=True, slots=True)
class Fault:
    victim: Victim
    point: str
    armed_at: str = ""
    """The driver's point where a point of the daemon is armed; empty for one of the driver's own."""

    def stand(self) -> Stand:
        point = self.armed_at or self.point
        return Stand(point=point, action="stop", step=0 if "connect" in point else TARGET)


@dataclass(frozen=True, slots=True)
class StepCase:
    situation: Situation
    kind: Kind
    faults: tuple[Fault, ...]

    @property
    def name(self) -> str:
        faults = [f"{fault.point}@{fault.armed_at}/{fault.victim}".replace("@/", "/") for fault in self.faults]
        return "+".join([f"{self.situation}.{self.kind}", *faults])


# --- all of them ------------------------------------------------------------------------------------------------


def all_cases() -> list[StepCase]:
    """In an order in which every n-th of them are of every sort."""
    cases: list[StepCase] = []
    for case in _single():
        cases.append(case)
        fault = case.faults[0]
        if fault.victim in ("driver", "daemon", "both"):
            cases.append(StepCase(case.situation, case.kind, (fault, fault)))
            after = _AFTER[len(cases) % len(_AFTER)]
            if after != fault:
                cases.append(StepCase(case.situation, case.kind, (fault, after)))
    assert len({case.name for case in cases}) == len(cases), "a name repeats one case"
    return cases


_AFTER: Final = (
    Fault("driver", "commit.connect.after"),
    Fault("driver", "advance.fenced", "commit.connect.after"),
    Fault("daemon", "advance.killed", "commit.connect.after"),
    Fault("driver", "commit.connect.before"),
    Fault("cut", "advance.fenced", "commit.connect.after"),
    Fault("both", "advance.killed", "commit.connect.after"),
)
"""Faults of the recovery that follows another one."""


_ALIVE: Final = ("commit.call.before", "enter.begin", "commit.intent.after", "capture.begin", "commit.outcome.before")
"""Where the daemon, or all that lives in the Space, dies under a driver that lives."""


def _single() -> Iterator[StepCase]:
    for kind in ("slow", "many", "note", "write"):
        for point in DRIVER_IN_CALL:
            yield StepCase("under_way", kind, (Fault("driver", point),))
        for point in _ALIVE:
            for victim in ("daemon", "processes"):
                yield StepCase("under_way", kind, (Fault(victim, point),))
    for kind, armed in DAEMON_IN_CALL.items():
        for armed_at, points in armed.items():
            for point in points:
                yield from _of_daemon("under_way", kind, point, armed_at)
    yield from _recoveries("running", "slow", ("capture.end", "commit.outcome.before"), ADVANCE)
    yield from _recoveries("exited", "slow", ("capture.end", "commit.outcome.before"), ("advance.killed",))
    yield from _recoveries("absent", "slow", ("commit.attempt.before", "commit.attempt.after"), ("void.synced",))
    attempts = ("commit.attempt.before", "commit.attempt.after")
    yield from _recoveries("half", "many", attempts, (*ADVANCE, *RESTORE))
    yield from _recoveries("lost", "slow", attempts, RESTORE)


def _recoveries(situation: Situation, kind: Kind, own: Sequence[str], points: Sequence[str]) -> Iterator[StepCase]:
    for point in (*DRIVER_IN_RECOVERY, *own):
        yield StepCase(situation, kind, (Fault("driver", point),))
        yield StepCase(situation, kind, (Fault("daemon", point),))
    for point in points:
        if (situation, point) not in _NEVER:
            yield from _of_daemon(situation, kind, point, "commit.connect.after")


_NEVER: Final = {("running", "advance.cut"), ("lost", "restore.floor")}
"""Nothing is cut off where the only command is kept."""


def _of_daemon(situation: Situation, kind: Kind, point: str, armed_at: str) -> Iterator[StepCase]:
    victims: tuple[Victim, ...] = ("daemon", "driver", "both", "cut")
    if point.startswith("shim."):
        victims = (*victims, "shim", "processes")
    for victim in victims:
        yield StepCase(situation, kind, (Fault(victim, point, armed_at),))


# --- one of them ------------------------------------------------------------------------------------------------


def attack(case: StepCase) -> Callable[[Play], None]:
    def act(play: Play) -> None:
        waits = case.situation in ("running", "half", "lost")
        for step in play.steps:
            if step.gated and not (waits and step.number == TARGET):
                play.world.open_gate(step.number)
        if case.situation != "under_way":
            _SITUATIONS[case.situation](play, case.kind)
        faults = list(case.faults)
        play.begin(*_stands(faults))
        while faults:
            fault = faults.pop(0)
            first = len(faults) == len(case.faults) - 1
            if not _strike(play, fault, faults, patience=HELD_S if first else AGAIN_S):
                if first:
                    raise Stuck(f"it never came to {fault.point}")
                play.tally.faults["missed"] += 1
                play.world.record({"runner": f"it never came to {fault.point}"})
        if case.situation == "running":
            _stands_still(play, None)
        play.world.open_gate(TARGET)

    return act


def _stands(faults: Sequence[Fault]) -> list[Stand]:
    """Where a life stands still: for all faults up to the first that it does not survive."""
    ends = [number for number, fault in enumerate(faults) if fault.victim in ("driver", "both")]
    return [fault.stand() for fault in faults[: ends[0] + 1 if ends else None]]


def _strike(play: Play, fault: Fault, rest: Sequence[Fault], *, patience: float) -> bool:
    """Wait for the point and do it; False if it does not come to that. The driver, killed, is followed by another."""
    life = play.life
    stand = fault.stand()
    if not _stands_still(play, stand):
        return False
    until("the driver stands still", life.stopped)
    if fault.armed_at:
        kills = fault.victim == "shim" or (fault.victim == "daemon" and not fault.point.startswith("shim."))
        before = play.world.daemon()
        try:
            with Control(play.world.space) as control:
                control.arm(fault.point, "kill" if kills else "hold")
        except OSError as error:
            play.world.record({"runner": f"nothing is armed: {error}"})
            return False
        finally:
            life.signal(signal.SIGCONT)
        if kills:
            try:
                if fault.victim == "daemon":
                    until("the daemon died", lambda: play.world.daemon() != before, patience)
            except Stuck:
                return False
            play.tally.faults[fault.victim] += 1
            return True
        if not wait_held(play.world.space, fault.point, patience):
            return False
    _kill(play, fault.victim)
    if fault.victim in ("driver", "both"):
        play.begin(*_stands(rest))
        if fault.armed_at:
            _release(play, fault.point)
    elif fault.armed_at:
        if fault.victim == "cut":
            time.sleep(0.02)  # the daemon works on, for nobody
        _release(play, fault.point)
    else:
        life.signal(signal.SIGCONT)
    return True


def _stands_still(play: Play, stand: Stand | None) -> bool:
    """Wait for it; None: until the call was recovered. What comes after its recovery needs its gate open."""
    while (event := play.life.next()) is not None:
        if stand is not None and event.get("at") == stand.point and "stands" in event:
            return True
        if event.get("at") == "recover.end":
            play.world.open_gate(TARGET)
            if stand is None:
                return True
        if "answered" in event:
            return False
    play.died(play.life)
    return False


def _kill(play: Play, victim: Victim) -> None:
    if victim in ("driver", "both"):
        play.kill()
    if victim in ("daemon", "both"):
        play.kill_daemon()
    if victim == "cut":
        play.life.signal(signal.SIGUSR1)
        play.tally.faults["cut"] += 1
    if victim == "processes":
        play.kill_processes()


def _release(play: Play, point: str) -> None:
    """What is held goes on; it may be gone. A shim may be held by a daemon that is."""
    if point.startswith("shim."):
        with suppress(Stuck):  # It says that it is held before it stops; or somebody has killed it.
            until("a shim is stopped", play.world.go_on, 1.0)
        return
    try:
        with Control(play.world.space) as control:
            control.release(point)
    except OSError:
        play.world.record({"runner": f"nothing to release at {point}"})


# --- situations -------------------------------------------------------------------------------------------------


def _cut_off(play: Play, kind: Kind) -> None:
    """The driver is killed while the command waits for its gate."""
    play.begin()
    line = f"step {TARGET} begins" if kind == "slow" else f"step {TARGET} goes on"
    play.until_line("the command waits", line)
    play.kill()


def _exited(play: Play, kind: Kind) -> None:
    play.begin(Stand(point="capture.begin", action="kill", step=TARGET))
    _ends(play)


def _absent(play: Play, kind: Kind) -> None:
    play.begin(Stand(point="commit.intent.after", action="kill", step=TARGET))
    _ends(play)


def _lost(play: Play, kind: Kind) -> None:
    _cut_off(play, kind)
    play.lose_space()
    play.world.open_gate(TARGET)


def _ends(play: Play) -> None:
    while play.life.next() is not None:
        pass
    play.died(play.life)


_SITUATIONS: Final[dict[Situation, Callable[[Play, Kind], None]]] = {
    "running": _cut_off,
    "half": _cut_off,
    "exited": _exited,
    "absent": _absent,
    "lost": _lost,
}
