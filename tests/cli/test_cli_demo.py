"""``perdure demo``: it kills nine times and comes through, and its judge does not let a damaged result pass."""

from __future__ import annotations

import io
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from perdure.cli.app import app
from perdure.cli.demo import parent
from perdure.cli.demo.judge import judge
from perdure.cli.demo.parent import POINTS, Agent, DemoFailed, Story
from perdure.cli.demo.project import JOBS, TO_ORDER

SEED = 7


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What a demo left, and what it said."""
    folder = tmp_path_factory.mktemp("demo") / "kept"
    command = [sys.executable, "-c", "from perdure.cli import main; main()"]
    done = subprocess.run(
        [*command, "demo", "--seed", str(SEED), "--plain", "--keep", str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "40", "FORCE_COLOR": "1"},
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return folder, done.stdout


@pytest.fixture
def result(lived: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy of what the demo left, to be damaged."""
    return Path(shutil.copytree(lived[0], tmp_path / "demo"))


def wrong(folder: Path) -> dict[str, str]:
    return {what: problem for what, problem in judge(folder) if problem is not None}


# --- the demo ----------------------------------------------------------------------------------------------------


def test_it_is_killed_once_at_each_of_nine_points(lived: tuple[Path, str]) -> None:
    _, told = lived
    assert len(POINTS) == 9
    for where in (where for _, where in POINTS.values()):
        assert sum(f"SIGKILL {where}" in line for line in told.splitlines()) == 1, where
    assert told.count("SIGKILL") == 9
    assert told.count(": a new process") == 10
    assert f"{len(JOBS)} jobs, 9 kills, nothing lost, nothing done twice." in told


def test_plain_has_no_colours(lived: tuple[Path, str]) -> None:
    assert "\x1b" not in lived[1]
    assert f"perdure demo, seed {SEED} (repeat it with: perdure demo --seed {SEED})" in lived[1].splitlines()


def test_every_check_was_made_and_told(lived: tuple[Path, str]) -> None:
    folder, told = lived
    checks = list(judge(folder))
    assert len(checks) == 7
    assert [problem for _, problem in checks] == [None] * 7
    assert all(f"✓ {what}\n" in told for what, _ in checks)


def test_a_folder_that_is_there_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    done = CliRunner().invoke(app, ["demo", "--seed", "1", "--plain", "--keep", str(tmp_path)])
    assert done.exit_code == 1
    assert "the demo failed" in done.output
    assert str(tmp_path) in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_seed_is_drawn_and_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["demo", "--plain", "--keep", str(tmp_path)])
    seed = done.output.split("seed ")[1].split()[0]
    assert seed.isdecimal()
    assert f"perdure demo --seed {seed})" in done.output


def test_kills_follow_the_seed() -> None:
    plans = [parent.plan_of(seed, POINTS) for seed in range(50)]
    assert plans == [parent.plan_of(seed, POINTS) for seed in range(50)]
    assert len({tuple(plan.items()) for plan in plans}) > 40
    for plan in plans:
        assert plan.keys() == POINTS.keys()
        assert all(0 <= plan[point] <= latest for point, (latest, _) in POINTS.items())


# --- a demo that goes wrong --------------------------------------------------------------------------------------


class Actor(Agent):
    """A process that says what it is told to, in place of the agent."""

    script = ""

    def __init__(self, folder: Path, command: Sequence[str] = ()) -> None:
        self._silence_s = parent.SILENCE_S
        self._errors = (folder / "agent.err").open("a+")
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        self._buffer = b""


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("import sys; sys.exit('no module named nonsense')", "the agent ended with exit code 1"),
        ("pass", "the agent ended without finishing"),
        ("print('{\"finished\": true}')", "it was never killed at: admission"),
        ("import time; time.sleep(600)", "the agent said nothing for"),
    ],
    ids=["crashes", "ends early", "is not killed", "hangs"],
)
def test_an_agent_that_goes_wrong_fails_the_demo(
    script: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Actor, "script", script)
    monkeypatch.setattr(parent, "Agent", Actor)
    if "sleep" in script:
        monkeypatch.setattr(parent, "SILENCE_S", 0.0)
    assert parent.run_demo(seed=SEED, plain=True, keep=tmp_path / "demo") == 1
    said = capsys.readouterr().out
    assert f"the demo failed: {told}" in said
    assert ("no module named nonsense" in said) == ("nonsense" in script)


def test_an_agent_that_never_finishes_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = "; ".join(f'print(\'{{"point": "{point}"}}\', flush=True); sys.stdin.readline()' for point in POINTS)
    monkeypatch.setattr(Actor, "script", f"import sys; {points}; sys.exit(3)")
    plan = dict.fromkeys(POINTS, 0)
    monkeypatch.setattr(parent, "SPARE_STARTS", 4 - len(POINTS))
    with pytest.raises(DemoFailed, match="it did not finish in 4 starts"):
        parent.live_through(lambda: Actor(tmp_path), plan, POINTS, Story(plain=True))
    assert len(plan) == len(POINTS) - 4


def test_another_answer_the_second_time_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    story = Story(plain=True)
    story.console = Console(file=io.StringIO(), width=200)
    story.event({"job": "job-1", "answered": "yes"})
    story.event({"job": "job-1", "answered": "no"})
    output = story.console.file
    assert isinstance(output, io.StringIO)
    assert "ANOTHER ANSWER: no" in output.getvalue()


# --- the judge ---------------------------------------------------------------------------------------------------


def rows(folder: Path, table: str) -> list[dict]:
    with closing(sqlite3.connect(folder / "agent.db")) as store:
        return [json.loads(body) for (body,) in store.execute(f"SELECT body FROM {table} ORDER BY id")]


def change(folder: Path, table: str, record: dict) -> None:
    with closing(sqlite3.connect(folder / "agent.db")) as store:
        store.execute(f"UPDATE {table} SET body = ? WHERE id = ?", (json.dumps(record).encode(), record["id"]))
        store.commit()


def remove(folder: Path, table: str, id: int) -> None:
    with closing(sqlite3.connect(folder / "agent.db")) as store:
        assert store.execute(f"DELETE FROM {table} WHERE id = ?", (id,)).rowcount == 1
        store.commit()


def entry_of(folder: Path, kind: str) -> dict:
    return next(entry for entry in rows(folder, "entries") if entry["kind"] == kind)


def order_again(folder: Path) -> None:
    with (folder / "supplier" / "orders.jsonl").open("a") as book:
        book.write(json.dumps({"item": TO_ORDER[0][0], "count": TO_ORDER[0][1]}) + "\n")


def lose_an_order(folder: Path) -> None:
    book = folder / "supplier" / "orders.jsonl"
    book.write_text("".join(book.read_text().splitlines(keepends=True)[1:]))


def never_order(folder: Path) -> None:
    (folder / "supplier" / "orders.jsonl").unlink()


def lose_a_submission(folder: Path) -> None:
    remove(folder, "submissions", rows(folder, "submissions")[2]["id"])


def admit_twice(folder: Path) -> None:
    first, second = rows(folder, "submissions")[:2]
    change(folder, "submissions", {**second, "request_id": first["request_id"]})


def forget_an_answer(folder: Path) -> None:
    submission = rows(folder, "submissions")[1]
    remove(folder, "entries", submission["answer"])


def leave_unanswered(folder: Path) -> None:
    submission = rows(folder, "submissions")[1]
    change(folder, "submissions", {**submission, "status": "unanswered", "reason": "aborted"})


def answer_with_something_else(folder: Path) -> None:
    submission = rows(folder, "submissions")[1]
    change(folder, "submissions", {**submission, "answer": submission["entry"]})


def leave_a_task(folder: Path) -> None:
    task = rows(folder, "tasks")[0]
    change(folder, "tasks", {**task, "state": {"type": "pending", "phase": "start", "checkpoint": None}})


def lose_a_result(folder: Path) -> None:
    remove(folder, "entries", entry_of(folder, "pi.tool-result")["id"])


def lose_the_last_result(folder: Path) -> None:
    """Nothing comes after it that would be in the wrong place."""
    results = [entry for entry in rows(folder, "entries") if entry["kind"] == "pi.tool-result"]
    for entry in rows(folder, "entries"):
        if entry["id"] >= results[-1]["id"]:
            remove(folder, "entries", entry["id"])


def add_a_result(folder: Path) -> None:
    entry = entry_of(folder, "pi.tool-result")
    change(folder, "entries", {**entry, "messages": entry["messages"] * 2})


def answer_another_call(folder: Path) -> None:
    entry = entry_of(folder, "pi.tool-result")
    change(folder, "entries", {**entry, "messages": [{**entry["messages"][0], "call_id": "of nobody"}]})


def unfix(folder: Path) -> None:
    code = folder / "project" / "stock.py"
    code.write_text(code.read_text().replace("want - have", "have - want"))


def fix_twice(folder: Path) -> None:
    with (folder / "project" / "stock.py").open("a") as file:
        file.write("# fixed again\n")


def lose_the_report(folder: Path) -> None:
    (folder / "project" / "REPORT.md").unlink()


def leave_litter(folder: Path) -> None:
    (folder / "project" / "REPORT.md.tmp").write_text("half")


ADMITTED = "each job was admitted once"
ANSWERED = "each job has its answer"
NOTHING_LEFT = "nothing is left running"
WELL_FORMED = "every call is followed by exactly its result"
ONCE = "no unsafe call was executed twice"
APPLIED = "every safe call was applied"
TESTED = "the project's own tests pass"


@pytest.mark.parametrize(
    ("damage", "checks"),
    [
        (order_again, {ONCE}),
        (lose_an_order, {ONCE}),
        (never_order, {ONCE}),
        (lose_a_submission, {ADMITTED}),
        (admit_twice, {ADMITTED}),
        (forget_an_answer, {ANSWERED}),
        (leave_unanswered, {ANSWERED}),
        (answer_with_something_else, {ANSWERED}),
        (leave_a_task, {NOTHING_LEFT}),
        (lose_a_result, {WELL_FORMED}),
        (lose_the_last_result, {WELL_FORMED, ANSWERED}),
        (add_a_result, {WELL_FORMED}),
        (answer_another_call, {WELL_FORMED}),
        (unfix, {APPLIED, TESTED}),
        (fix_twice, {APPLIED}),
        (lose_the_report, {APPLIED}),
        (leave_litter, {APPLIED}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_the_judge_sees_damage(damage: Callable[[Path], None], checks: set[str], result: Path) -> None:
    damage(result)
    assert wrong(result).keys() == checks


def test_a_damaged_result_fails_the_demo(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parent._verdict(result, 9, Story(plain=True)) == 0
    order_again(result)
    never_answered = rows(result, "submissions")[0]
    change(result, "submissions", {**never_answered, "status": "placed"})
    capsys.readouterr()
    assert parent._verdict(result, 9, Story(plain=True)) == 1
    told = capsys.readouterr().out
    assert f"NOT TRUE: {ONCE}: the supplier's book says" in told
    assert f"NOT TRUE: {ANSWERED}: job-1 is placed" in told
    assert "2 checks failed" in told
    assert "nothing done twice" not in told
