"""A driver as simple as can be, and a daemon that is killed all the time: every step happens exactly once.

The judge is the file the commands append to. The log is a list in memory: what it holds has been committed.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from spaced_wire import CONTAINMENTS, Driver, Refused, Space, file_entry, key, sha

MakeSpace = Callable[..., Space]
EXPECTED = {"stale_epoch", "stale_connection", "again", "busy"}
"""Overtaken; the command's shim was killed after or before it had started it."""


class Log:
    """What is committed: the calls that have an outcome, the open one's attempt, and the image."""

    def __init__(self) -> None:
        self.done = 0
        self.attempt = 0
        self.commit = 1
        self.epoch = 0
        self.contents: dict[str, bytes] = {}
        self.image: dict[str, dict[str, Any]] = {}
        self.recoveries: dict[str, int] = {}

    def count(self, kind: str) -> None:
        self.recoveries[kind] = self.recoveries.get(kind, 0) + 1


def script(call: int) -> str:
    kind = call % 4
    tail = {
        0: "",
        1: "sleep 0.05",
        2: "(setsid sleep 1000 &); sleep 0.01",
        3: f"mkdir -p d{call}; echo {call} > d{call}/f",
    }
    return f"echo {call} >> steps; {tail[kind]}"


def drive(space: Space, log: Log, calls: int) -> None:
    """One driver from its start to its end; raises ConnectionError or Refused when the daemon dies under it."""
    log.epoch += 1
    driver = space.driver(log.epoch)
    open_key = [key(log.done + 1, log.attempt)] if log.attempt else []
    answer = driver.advance(keep=open_key)
    image = answer["image"]
    here = image is not None and image["commit"] == log.commit
    if log.attempt:
        state = answer["commands"][0]["state"]
        if here and state in ("exited", "running"):
            log.count("adopted" if state == "exited" else "reattached")
            outcome(driver, log)
        elif here and state in ("absent", "void"):
            log.count("voided")
            found = driver.ask("void", key=open_key[0])["state"]
            if found == "void":
                log.attempt += 1
                run(driver, log)
            else:
                outcome(driver, log)
        else:
            log.count("undone")
            restore(driver, log, {"call": log.done + 1, "attempt": log.attempt + 1})
            log.attempt += 1
            run(driver, log)
    elif not here:
        log.count("restored")
        restore(driver, log, None)
    while log.done < calls:
        scan = driver.ask("scan", sync=True)
        assert drift(scan, log) == {}, "nobody else writes here"
        log.attempt = 1
        run(driver, log)


def drift(scan: dict[str, Any], log: Log) -> dict[str, Any]:
    """What differs from the image. A scan without a base names everything: the daemon was killed before it knew."""
    assert scan["next"] is None
    changed = {change["path"]: change for change in scan["changes"]}
    if scan["base"] is not None:
        return changed
    found = {path: plain(change) for path, change in changed.items()}
    return {path: found.get(path) for path in {*found, *log.image} if found.get(path) != log.image.get(path)}


def plain(change: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in change.items() if name not in ("change", "inline")}


def restore(driver: Driver, log: Log, floor: dict[str, int] | None) -> None:
    driver.restore(log.commit, list(log.image.values()), log.contents, floor=floor)


def run(driver: Driver, log: Log) -> None:
    call = log.done + 1
    driver.ask("start", key=key(call, log.attempt), shell=script(call), wait_ms=5)
    outcome(driver, log)


def outcome(driver: Driver, log: Log) -> None:
    call = log.done + 1
    result = driver.ask("wait", key=key(call, log.attempt), wait_ms=30_000)
    if result["state"] != "exited":
        raise Refused({"code": "again", "message": result["state"]})
    assert result["code"] == 0
    scan, body = driver.ask_body("scan", freeze=True, sync=True, inline_bytes=1 << 20)
    image = dict(log.image) if scan["base"] is not None else {}
    for change in scan["changes"]:
        if change["change"] == "removed":
            del image[change["path"]]
            continue
        image[change["path"]] = plain(change)
        if "inline" in change:
            start, length = change["inline"]
            log.contents[change["sha256"]] = body[start : start + length]
    log.contents[sha(b"")] = b""
    log.image, log.done, log.attempt, log.commit = image, call, 0, log.commit + 1
    driver.ask("settle", commit=log.commit, scan=scan["scan"], floor={"call": call + 1, "attempt": 0}, thaw=True)


@pytest.mark.parametrize("containment", CONTAINMENTS)
@pytest.mark.parametrize("seed", range(int(os.environ.get("SPACED_CRASH_SEEDS", "1"))))
def test_every_step_happens_once_whatever_is_killed(make_space: MakeSpace, containment: str, seed: int) -> None:
    """Rules S5, S6, S13 to S15, S19, S22, S25 to S27, S33, S34: kills of the daemon at any time, of shims too."""
    random_ = random.Random(f"{seed} {containment}")
    space = make_space("--containment", containment, "--testing-crash-points")
    try:
        space.up()
    except AssertionError as error:
        if "no such cgroup hierarchy" in str(error):
            pytest.skip(f"{containment} cannot be written here")
        raise
    log = Log()
    first = space.driver(1)
    first.advance()
    first.settle_first()
    log.epoch, calls, kills, drives = 1, 12, 0, 0
    while log.done < calls or kills < 15:
        drives += 1
        assert drives < 400
        patience = 1 + drives / 40  # on a busy machine nothing comes to anything in so short a time
        if log.done >= calls:
            calls += 4
        process = space.process
        assert process is not None
        killer = threading.Timer(patience * random_.uniform(0.0, 0.35), process.kill)
        victim = threading.Timer(patience * random_.uniform(0.0, 0.2), kill_a_shim, [space, random_])
        killer.start()
        if random_.random() < 0.3:
            victim.start()
        try:
            drive(space, log, calls)
        except (ConnectionError, TimeoutError):
            pass
        except Refused as refused:
            if refused.code not in EXPECTED:
                raise
        killer.cancel()
        victim.cancel()
        killer.join()
        if victim.is_alive():
            victim.join()
        if process.poll() is not None or random_.random() < 0.5:
            kills += 1
            space.again()
    drive(space, log, log.done)
    expected = "".join(f"{call}\n" for call in range(1, log.done + 1))
    assert (space.workspace / "steps").read_text() == expected
    assert log.image["steps"] == file_entry("steps", expected.encode())
    final = space.driver(log.epoch + 1)
    final.advance()
    assert drift(final.ask("scan"), log) == {}
    print(f"kills={kills} drives={drives} calls={log.done} recoveries={log.recoveries}")
    assert log.recoveries, "nothing was ever recovered"


def kill_a_shim(space: Space, random_: random.Random) -> None:
    shims = {}
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                line = file.read()
            with open(f"/proc/{name}/stat") as file:
                _, parent, _, session = file.read().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if str(space.state).encode() in line and name == session:
            shims[name] = parent
    for name, parent in shims.items():
        # A shim's child is a command that is not quite there yet, and no shim.
        if parent not in shims and random_.random() < 0.7:
            with_pid = int(name)
            if space.process is not None and with_pid != space.process.pid:
                os.kill(with_pid, signal.SIGKILL)
