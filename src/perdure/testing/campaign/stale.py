"""The mode ``stale``: a driver is frozen with SIGSTOP, replaced, and resumed; it adds nothing, anywhere (rule P19)."""

from __future__ import annotations

import hashlib
import random
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Final

from perdure.testing.campaign.judge import walk
from perdure.testing.campaign.play import Play
from perdure.testing.campaign.script import CALLS, Tree
from perdure.testing.campaign.steps import DRIVER_IN_CALL
from perdure.testing.campaign.tally import Claims
from perdure.testing.campaign.watch import Stand
from perdure.testing.campaign.world import Event, Process, Stuck, until

RESUMED: Final = ("opened", "advanced", "finished", "finished")
"""How far its successor is when the frozen one goes on."""
NEW_SPACE_EVERY: Final = 5
"""In every so many runs the frozen one reaches a new Space before its successor does."""


def claims(runs: int) -> Claims:
    return Claims(faults={"frozen": runs, "refused": runs // 2})


def attack(seed: int) -> Callable[[Play], None]:
    def act(play: Play) -> None:
        chance = random.Random(f"stale {seed}")  # noqa: S311  # reproducible is what it is for
        for step in play.steps:
            if step.gated:
                play.world.open_gate(step.number)
        if seed % NEW_SPACE_EVERY == 0:
            _new_space(play, chance)
        else:
            _anywhere(play, chance)

    return act


def _anywhere(play: Play, chance: random.Random) -> None:
    stand = Stand(point=chance.choice(DRIVER_IN_CALL), action="stop", step=chance.randint(2, CALLS))
    moment = chance.choice(RESUMED)
    old = _frozen(play, stand)
    new = play.begin(takeover=True)
    new.wait_for("it has the store", lambda event: "opened" in event)
    if moment == "opened":
        _resume(play, old)
    elif moment == "advanced":
        new.wait_for("it has the Space", _advanced)
        _resume(play, old)
    else:
        play.finish()
        before = _everything(play)
        _resume(play, old)
        for what, found, was in zip(("workspace", "log", "ledger"), _everything(play), before, strict=True):
            if found != was:
                raise Stuck(f"a driver that was replaced changed the {what}")


def _new_space(play: Play, chance: random.Random) -> None:
    """The Space is lost; the old driver makes the new one, and has it before its successor has."""
    play.begin(Stand(point="commit.outcome.after", action="kill", step=chance.randint(1, CALLS - 1)))
    while play.life.next() is not None:
        pass
    play.died(play.life)
    play.lose_space()
    old = _frozen(play, Stand(point="commit.connect.after", action="stop"))
    new = play.begin(Stand(point="commit.connect.before", action="stop"), takeover=True)
    new.wait_for("it is about to take the Space", lambda event: "stands" in event)
    until("the new driver stands still", new.stopped)
    _resume(play, old)
    new.signal(signal.SIGCONT)


def _frozen(play: Play, stand: Stand) -> Process:
    old = play.begin(stand)
    old.wait_for("it stands still", lambda event: "stands" in event)
    until("the driver is frozen", old.stopped)
    play.tally.faults["frozen"] += 1
    return old


def _advanced(event: Event) -> bool:
    return event.get("at") in ("enter.end", "recover.end") or "answered" in event


def _resume(play: Play, old: Process) -> None:
    """It goes on, and ends because it was replaced; or it was in the way, and is dead. Raises Stuck."""
    if not old.ended():
        old.signal(signal.SIGCONT)
    while old.next() is not None:
        pass
    status = old.reap()
    if status == -signal.SIGKILL:
        play.tally.faults["in_the_way"] += 1
    elif status == 0 or "StaleEpochError" not in old.failure:
        raise Stuck(f"a driver that was replaced ended with {status}: {old.failure or 'as if it had not been'}")
    else:
        play.tally.faults["refused"] += 1


def _everything(play: Play) -> tuple[Tree, str, str]:
    """The workspace, the log and the daemon's ledger."""
    with closing(sqlite3.connect(f"file:{play.world.store}?mode=ro", uri=True)) as link:
        log = hashlib.sha256("\n".join(link.iterdump()).encode()).hexdigest()
    ledger = hashlib.sha256()
    for path in sorted((play.world.space / "state").iterdir()):
        with suppress(OSError):
            if path.is_file():
                ledger.update(path.name.encode() + b"\0" + path.read_bytes())
    return walk(play.world.workspace), log, ledger.hexdigest()
