"""Crash campaigns, a small part of each with fixed seeds (rules P8 to P12, P17 to P19, P24, P29, P32)."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from perdure.testing.campaign import stale, steps, transactional
from perdure.testing.campaign.campaign import Campaign, Case, steps_cases, transactional_cases
from perdure.testing.campaign.judge import judge
from perdure.testing.campaign.nursery import Nursery
from perdure.testing.campaign.play import Play, play, undisturbed
from perdure.testing.campaign.script import VARIANTS, Script, script_of
from perdure.testing.campaign.tally import Claims, Tally
from perdure.testing.campaign.watch import Stand
from perdure.testing.campaign.world import World, until

STEPS = (
    "under_way.slow+commit.intent.after/driver",
    "under_way.slow+shim.started@commit.intent.after/shim",
    "under_way.slow+shim.exit@commit.intent.after/driver",
    "under_way.slow+scan.synced@capture.begin/both",
    "under_way.note+write.renamed@commit.intent.after/daemon",
    "under_way.slow+settle.synced@leave.begin/cut",
    "running.slow+recover.end/driver",
    "absent.slow+void.synced@commit.connect.after/daemon",
    "half.many+restore.swapped@commit.connect.after/driver+restore.swapped@commit.connect.after/driver",
    "lost.slow+restore.image@commit.connect.after/both",
)
"""At least one of each situation and victim."""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.mark.parametrize("seed", [3, 5, 25])
def test_random_kills_p18(nursery: Nursery, tmp_path: Path, seed: int) -> None:
    (case,) = transactional_cases([seed])
    outcome = play(nursery, case.script, case.attack, together=case.together, parent=tmp_path)
    assert outcome.wrong == []
    assert outcome.tally.kills
    assert not outcome.tally.recoveries["interrupted"]


@pytest.mark.parametrize("name", STEPS)
def test_a_fault_at_one_step_p17(nursery: Nursery, tmp_path: Path, name: str) -> None:
    (case,) = [case for case in steps_cases() if case.name == name]
    outcome = play(nursery, case.script, case.attack, crash_points=True, parent=tmp_path)
    assert outcome.wrong == []
    assert outcome.tally.faults.total()
    assert not outcome.tally.faults["missed"]


def test_a_frozen_driver_that_was_replaced_p19(nursery: Nursery, tmp_path: Path) -> None:
    outcome = play(nursery, 4, stale.attack(4), parent=tmp_path)
    assert outcome.wrong == []
    assert outcome.tally.faults["frozen"] == 1


# --- what fails a campaign --------------------------------------------------------------------------------------


def spoiling(play: Play) -> None:
    undisturbed(play)
    play.finish()
    with (play.world.workspace / "log.txt").open("a") as file:
        file.write("step 10\n")


def test_a_run_that_went_wrong_is_kept_and_told_how_to_repeat_p15(tmp_path: Path) -> None:
    said: list[str] = []
    campaign = Campaign(echo=said.append, parent=tmp_path)
    assert campaign.run("transactional", [Case("7", 7, spoiling)], Claims()) == 1
    assert "  again: perdure crash --mode transactional --seed 7 --runs 1" in said
    assert any("step 10 (bash) was applied 2 times" in line for line in said)
    assert said[-1].startswith("SUMMARY mode=transactional runs=1 ok=0 failed=1 kills=0 faults: none recoveries: ")
    (kept,) = tmp_path.iterdir()
    assert (kept / "events.jsonl").exists()
    assert str(kept) in said[0]


def test_a_campaign_that_saw_too_little_fails_p32(tmp_path: Path) -> None:
    said: list[str] = []
    campaign = Campaign(echo=said.append, parent=tmp_path)
    claims = Claims(kills=1, faults={"lost": 1}, recoveries={"adopted": 1})
    assert campaign.run("transactional", [Case("8", 8, undisturbed)], claims) == 1
    assert [line for line in said if "proves too little" in line] == [
        "this proves too little: 0 kills of drivers, of at least 1",
        "this proves too little: 0 faults of kind lost, of at least 1",
        "this proves too little: 0 recoveries of kind adopted, of at least 1",
    ]
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_call_fails_a_campaign_p11() -> None:
    found = Tally(runs=1)
    assert list(Claims().broken(found)) == []
    found.recoveries["interrupted"] += 1
    assert list(Claims().broken(found)) == ["1 recoveries of kind interrupted, of which there must be none"]


def test_the_long_campaign_claims_what_it_says_p32() -> None:
    claims = transactional.claims(100)
    assert claims.kills == 250
    assert claims.faults == {"daemon": 40, "lost": 25}
    assert claims.recoveries == dict.fromkeys(("adopted", "reattached", "restored", "rerun"), 20)
    assert {case.situation for case in steps.all_cases()} == {
        "under_way",
        "running",
        "exited",
        "absent",
        "half",
        "lost",
    }


# --- the judge --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an undisturbed run leaves: the store, the log's image, the workspace."""
    kept = tmp_path_factory.mktemp("finished")

    def keep(world: World) -> None:
        shutil.copytree(world.workspace, kept / "workspace", symlinks=True)
        shutil.copy(world.folder / "image.json", kept)
        with closing(sqlite3.connect(world.store)) as store, closing(sqlite3.connect(kept / "agent.db")) as copy:
            store.backup(copy)

    assert play(nursery, JUDGED, undisturbed, after=keep).wrong == []
    return kept


def has(words: str) -> Callable[[Script], bool]:
    return lambda script: any(words.encode() in bytes(step.call.arguments) for step in script)


JUDGED = next(variant for variant in range(VARIANTS) if has("tree-")(script_of(variant)))


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def found(run: Path) -> list[str]:
    return list(judge(run, run / "workspace", script_of(JUDGED)))


def test_the_judge_finds_nothing_wrong_with_an_undisturbed_run_p12(run: Path) -> None:
    assert found(run) == []


def line_twice(run: Path) -> None:
    text = (run / "workspace" / "notes.txt").read_text()
    (run / "workspace" / "notes.txt").write_text(text + text)


def file_more(run: Path) -> None:
    (run / "workspace" / "draft.txt").touch()


def file_less(run: Path) -> None:
    (run / "workspace" / "ledger.txt").unlink()


def mode(run: Path) -> None:
    (run / "workspace" / "log.txt").chmod(0o600)


def link(run: Path) -> None:
    path, *_ = (run / "workspace").glob("tree-*/link")
    path.unlink()
    path.symlink_to("elsewhere")


def directory(run: Path) -> None:
    path, *_ = (run / "workspace").glob("tree-*/empty")
    path.rmdir()


def image(run: Path) -> None:
    kept = json.loads((run / "image.json").read_text())
    kept["dirs"][""]["log.txt"][3] = "0" * 64
    (run / "image.json").write_text(json.dumps(kept))


def rewrite(run: Path, table: str, path: str, value: str, where: str) -> None:
    """Change the records of a store, as SQL has them."""
    with closing(sqlite3.connect(run / "agent.db")) as store, store:
        store.execute(
            f"UPDATE {table} SET body = CAST(json_set(CAST(body AS TEXT), '{path}', {value}) AS BLOB) {where}"
        )


def of_step(number: int) -> str:
    return f"WHERE json_extract(CAST(body AS TEXT), '$.messages[0].call_id') = 'step-{number}'"


def result_twice(run: Path) -> None:
    rewrite(run, "entries", "$.messages[0].call_id", "'step-1'", of_step(2))


def error(run: Path) -> None:
    rewrite(run, "entries", "$.messages[0].is_error", "json('true')", of_step(2))


def output(run: Path) -> None:
    rewrite(run, "entries", "$.messages[0].content[0].text", "'did it'", of_step(10))


def task_left(run: Path) -> None:
    rewrite(run, "tasks", "$.state.type", "'pending'", "WHERE id IN (SELECT max(id) FROM tasks)")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (line_twice, "(note) was applied 2 times"),
        (file_more, "draft.txt is Node"),
        (file_less, "ledger.txt is not there"),
        (mode, "log.txt is Node"),
        (link, "/link is Node"),
        (directory, "/empty is not there"),
        (image, "the log's image is not the workspace: log.txt"),
        (result_twice, "the results in the log are step-1, step-1"),
        (error, "ended in an error"),
        (output, "answered 'did it'"),
        (task_left, "is left"),
    ],
)
def test_the_judge_finds_what_is_wrong_p12(run: Path, spoil: Callable[[Path], None], words: str) -> None:
    spoil(run)
    assert any(words in line for line in found(run)), found(run)


# --- the end of a runner ----------------------------------------------------------------------------------------


def test_processes_of_a_campaign_end_with_its_runner(tmp_path: Path) -> None:
    nursery = Nursery()
    played = Play(World(nursery, tmp_path), 1)
    life = played.begin(Stand(point="commit.intent.after", action="stop", step=1))
    life.wait_for("it stands still", lambda event: "stands" in event)
    until("it is frozen", life.stopped)
    nursery.close()
    until("it is gone", life.ended)
    played.world.lose_space()
    played.world._told.close()
    os.close(life._events)
