"""The journal by itself: what a killed writer leaves never counts, and damage is never taken for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from perdure.spaced import spaced


def opened(folder: Path) -> spaced.Journal:
    journal = spaced.Journal(os.open(folder, os.O_RDONLY), spaced.Ledger())
    journal.create()
    return journal


def shut(journal: spaced.Journal) -> None:
    for descriptor in (journal.fd, journal.lock_fd, journal.state_fd):
        os.close(descriptor)


def fence(epoch: int, log: str = "l") -> dict[str, Any]:
    return {"t": "fence", "keep": [], "log": log, "epoch": epoch, "writer": "w", "connection": 1}


def started(number: int) -> dict[str, Any]:
    return {
        "t": "started", "x": f"x{number}", "key": ["l", number, 1, "n", 1], "epoch": 1, "pid": 1, "ticks": 1,
        "boot": "b", "namespace": 1, "digest": "d", "at": 1, "cgroup": None,
    }  # fmt: skip


def state(folder: Path) -> list[Any]:
    journal = opened(folder)
    with journal.locked():
        found = list(journal.ledger.records())
    shut(journal)
    return found


def written(folder: Path, *steps: list[dict[str, Any]]) -> None:
    journal = opened(folder)
    for step in steps:
        with journal.locked():
            journal.append(step)
    shut(journal)


def test_an_image_record_of_before_there_were_nonces_is_read_s27(tmp_path: Path) -> None:
    record = {"log": "l", "commit": 7, "boot": "b"}
    written(tmp_path, [fence(1), {"t": "image", "image": record}])
    assert {"t": "image", "image": {**record, "nonce": ""}} in state(tmp_path)


def test_an_index_of_before_there_were_nonces_is_read_s28(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    record = {"boot": "b", "label": ["l", 7], "whole": True, "set": [], "del": []}
    (tmp_path / "index").write_bytes(spaced._line([record]))  # pyright: ignore[reportPrivateUsage]
    assert spaced.Index(folder, "b").label == ("l", 7, "")
    os.close(folder)


STEPS = [
    [fence(1)],
    [started(1)],
    [{"t": "exit", "x": "x1", "boot": "b", "cause": "exit", "code": 0}],
    [{"t": "floor", "at": [2, 0]}],
]


def test_every_prefix_is_some_earlier_state(tmp_path: Path) -> None:
    """Rule S6: whatever part of the last line reached the disk, it counts whole or not at all."""
    states: list[list[Any]] = []
    for count in range(len(STEPS) + 1):
        folder = tmp_path / f"whole{count}"
        folder.mkdir()
        written(folder, *STEPS[:count])
        states.append(state(folder))
    whole = (tmp_path / f"whole{len(STEPS)}" / "journal").read_bytes()
    used = len(whole.rstrip(b"\0"))
    assert len(whole) == spaced.JOURNAL_BYTES
    starts = [at for at in range(used + 1) if at == 0 or whole[at - 1 : at] == b"\n"]
    for cut in range(0, used + 1, 7):
        folder = tmp_path / f"cut{cut}"
        folder.mkdir()
        (folder / "journal").write_bytes(whole[:cut] + bytes(len(whole) - cut))
        done = max(0, sum(start <= cut for start in starts) - 2)  # the first line is that of a new journal
        assert state(folder) == states[done], cut
        written(folder, *STEPS[done:])
        assert state(folder) == states[-1], "and it goes on from there"


def test_damage_before_the_end_is_told_and_changes_nothing(tmp_path: Path) -> None:
    """Rule S6."""
    written(tmp_path, *STEPS)
    content = bytearray((tmp_path / "journal").read_bytes())
    content[30] ^= 1
    (tmp_path / "journal").write_bytes(content)
    with pytest.raises(spaced.Fail, match="damaged at byte 0"):
        state(tmp_path)
    assert (tmp_path / "journal").read_bytes() == content


def test_two_writers_see_each_other_also_when_the_file_is_written_anew(tmp_path: Path) -> None:
    """Rules S6, S13: daemon and shim, in turns."""
    one, two = opened(tmp_path), opened(tmp_path)
    for number in range(1, 3000):
        writer, other = (one, two) if number % 3 else (two, one)
        with writer.locked():
            if writer is one:
                writer.make_room()
            writer.append([started(number), {"t": "drop", "x": [f"x{number - 5}"]}])
        if number % 50 == 0:
            with other.locked():
                assert sorted(other.ledger.commands) == sorted(f"x{n}" for n in range(max(1, number - 4), number + 1))
    assert (tmp_path / "journal").stat().st_size <= 2 * spaced.JOURNAL_BYTES
    shut(one)
    shut(two)


def test_what_another_wrote_is_flushed_before_it_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule S19: a shim may have been killed between its write and its flush."""
    one, two = opened(tmp_path), opened(tmp_path)
    with two.locked():
        two.confirm()
    with one.locked():
        one.append([started(1)])
    flushed: list[int] = []
    monkeypatch.setattr(spaced.os, "fdatasync", flushed.append)
    with two.locked():
        two.confirm()
    assert flushed == [two.fd]
    with two.locked():
        two.confirm()
    assert flushed == [two.fd]
    shut(one)
    shut(two)


def test_a_line_longer_than_a_read_is_one_line(tmp_path: Path) -> None:
    steps = [[started(number) for number in range(1, 2000)], [fence(1)]]
    written(tmp_path, *steps)
    assert len(state(tmp_path)) == 2001


def test_what_is_added_up(tmp_path: Path) -> None:
    """Rules S9, S12, S15, S25: the ledger is a pure function of its records, and its own history adds up to it."""
    ledger = spaced.Ledger()
    for record in [
        fence(1),
        started(1),
        started(2),
        started(3),
        {"t": "cut", "x": ["x1", "gone"]},
        {"t": "exit", "x": "x1", "boot": "b", "cause": "exit", "code": 0},
        {"t": "stop", "x": "x2", "cause": "aborted"},
        {"t": "floor", "at": [2, 5]},
        {"t": "floor", "at": [2, 1]},
        {"t": "void", "x": "x9", "key": ["l", 9, 1, "n", 1]},
        {"t": "image", "image": {"log": "l", "commit": 1, "boot": "b"}},
        {**fence(4), "keep": ["x3", "gone"]},
    ]:
        ledger.apply(record)
    assert ledger.floor == (2, 5)
    assert ledger.commands["x1"].cut
    assert ledger.commands["x1"].exit is None, "cut off beats an exit that comes later"
    assert [ledger.commands[name].epoch for name in ("x1", "x2", "x3")] == [1, 1, 4]
    assert ledger.below_floor(("l", 2, 4, "n", 1))
    assert not ledger.below_floor(("l", 2, 5, "n", 1))
    assert ledger.below_floor(("other", 9, 9, "n", 1))
    again = spaced.Ledger()
    for record in ledger.records():
        again.apply(record)
    assert list(again.records()) == list(ledger.records())
    again.apply(fence(5, "other"))
    assert again.floor is None
