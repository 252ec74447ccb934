"""The mode ``transactional``: kills at random moments, of the driver, its daemon and the whole Space (rule P18)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from perdure.testing.campaign.play import Play
from perdure.testing.campaign.script import Step
from perdure.testing.campaign.tally import Claims
from perdure.testing.campaign.world import Event, until

POINTS: Final = (
    "commit.call.after",
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
"""Where a moment to strike begins; it is there, or up to some time later."""
SOON_MS: Final = 40
RECOVERY_MS: Final = 80

CLAIMS: Final = Claims(
    kills=250,
    faults={"daemon": 40, "lost": 25},
    recoveries={"adopted": 20, "reattached": 20, "restored": 20, "rerun": 20},
)
"""Of the long campaign: 100 runs."""


def claims(runs: int) -> Claims:
    """What that many runs must have seen: their share of the long campaign's, from ten runs on."""
    if runs < 10:
        return Claims()
    share = min(runs, 100) / 100
    if share < 1:
        share *= 0.6  # fewer runs scatter more
    return Claims(
        kills=int(CLAIMS.kills * share),
        faults={kind: int(least * share) for kind, least in CLAIMS.faults.items()},
        recoveries={kind: int(least * share) for kind, least in CLAIMS.recoveries.items()},
    )


@dataclass(frozen=True, slots=True)
class Blow:
    """What is done to one step."""

    step: Step
    act: Callable[[Play, Blow, random.Random], None]
    gate: bool = False
    """It strikes while the step waits for its gate."""


def attack(seed: int) -> Callable[[Play], None]:
    """What is done to the run of a seed."""

    def act(play: Play) -> None:
        chance = random.Random(f"transactional {seed}")  # noqa: S311  # reproducible is what it is for
        blows = [blow for step in play.steps if (blow := _draw(step, chance)) is not None]
        struck = {blow.step.number for blow in blows if blow.gate}
        for step in play.steps:
            if step.gated and step.number not in struck:
                play.world.open_gate(step.number)
        play.begin()
        for blow in blows:
            blow.act(play, blow, chance)
            if play.life.finished:
                return

    return act


def _draw(step: Step, chance: random.Random) -> Blow | None:
    if step.gated and chance.random() < 0.7:
        acts = [_rerun, _lost_under] if step.kind == "many" else [_adopt, _adopt, _reattach, _reattach, _lost_under]
        return Blow(step, chance.choice(acts), gate=True)
    if chance.random() < 0.4:
        return Blow(step, chance.choice((_killed, _killed, _killed, _daemon, _both, _lost, _lost_down)))
    return None


# --- at a random moment -----------------------------------------------------------------------------------------


def _killed(play: Play, blow: Blow, chance: random.Random) -> None:
    if _moment(play, blow, chance):
        play.kill()
        _again(play, chance)


def _daemon(play: Play, blow: Blow, chance: random.Random) -> None:
    if _moment(play, blow, chance):
        play.kill_daemon()


def _both(play: Play, blow: Blow, chance: random.Random) -> None:
    if _moment(play, blow, chance):
        play.kill()
        play.kill_daemon()
        _again(play, chance)


def _lost(play: Play, blow: Blow, chance: random.Random) -> None:
    if _moment(play, blow, chance):
        play.lose_space()


def _lost_down(play: Play, blow: Blow, chance: random.Random) -> None:
    if _moment(play, blow, chance):
        play.kill()
        play.lose_space()
        _again(play, chance)


def _moment(play: Play, blow: Blow, chance: random.Random) -> bool:
    """Wait for a moment of the step; False if it went by."""
    point = chance.choice(POINTS)
    delay = chance.choice((0, chance.randrange(SOON_MS)))
    if not reached(play, lambda event: event.get("at") == point, blow.step.number):
        return False
    time.sleep(delay / 1000)
    return True


def reached(play: Play, wanted: Callable[[Event], bool], step: int) -> bool:
    """Wait for an event of the step; False if there is none. A driver that ends by itself meanwhile is followed by
    another. Raises Stuck."""
    while True:
        event = play.life.next()
        if event is None:
            play.died(play.life)
            if play.life.finished:
                return False
            play.begin()
        elif event.get("step") == step and wanted(event):
            return True
        elif event.get("step", 0) > step or "answered" in event:
            return False


def _again(play: Play, chance: random.Random) -> None:
    """The next life, which may be struck while it recovers."""
    play.begin()
    if chance.random() < 0.4:
        delay = chance.randrange(RECOVERY_MS)
        act = chance.choice((play.kill, play.kill, play.kill_daemon, play.lose_space))
        if _recovering(play):
            time.sleep(delay / 1000)
            act()
            if act == play.kill:
                play.begin()


def _recovering(play: Play) -> bool:
    """Wait until the life recovers a call, or enters the next one."""
    while (event := play.life.next()) is not None:
        if event.get("at") in ("recover.begin", "enter.begin"):
            return True
        if "answered" in event:
            return False
    return False


# --- while a command waits --------------------------------------------------------------------------------------


_BEGINS: Final = ("commit.intent.after", "commit.attempt.after", "recover.end")
"""The last of them if the step had begun in a life that an earlier blow ended."""


def _waits(play: Play, blow: Blow) -> bool:
    """Wait until the step's command waits for its gate; False if there is none."""
    number = blow.step.number
    if not reached(play, lambda event: event.get("at") in _BEGINS, number):
        return False
    line = f"step {number} begins" if blow.step.kind == "slow" else f"step {number} goes on"
    play.until_line(f"the command of step {number} waits", line)
    return True


def _adopt(play: Play, blow: Blow, chance: random.Random) -> None:
    """Its command ends while there is no driver."""
    if _waits(play, blow):
        play.kill()
        if chance.random() < 0.3:
            play.kill_daemon()
        play.world.open_gate(blow.step.number)
        until("the command has ended", lambda: f"step {blow.step.number}" in play.world.lines())
        _again(play, chance)
    play.world.open_gate(blow.step.number)


def _reattach(play: Play, blow: Blow, chance: random.Random) -> None:
    """Its command outlives its driver, twice sometimes, and its daemon."""
    if _waits(play, blow):
        for _ in range(chance.choice((1, 1, 2))):
            play.kill()
            if chance.random() < 0.3:
                play.kill_daemon()
            play.begin()
            reached(play, lambda event: event.get("at") == "recover.end", blow.step.number)
        if chance.random() < 0.2:
            play.kill_daemon()
        time.sleep(chance.randrange(SOON_MS) / 1000)
    play.world.open_gate(blow.step.number)


def _rerun(play: Play, blow: Blow, chance: random.Random) -> None:
    """It has done half of it."""
    if _waits(play, blow):
        if chance.random() < 0.3:
            play.kill_daemon()
        if chance.random() < 0.8:
            play.kill()
            _again(play, chance)
    play.world.open_gate(blow.step.number)


def _lost_under(play: Play, blow: Blow, chance: random.Random) -> None:
    """The Space is lost under a command that runs."""
    if _waits(play, blow):
        if chance.random() < 0.4:
            play.kill()
            play.lose_space()
            _again(play, chance)
        else:
            play.lose_space()
    play.world.open_gate(blow.step.number)
