"""``perdure demo``: it kills nine times, robs the Space and comes through; its judge lets no damaged result pass."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from perdure.cli.app import app
from perdure.cli.demo import parent
from perdure.cli.demo.judge import judge
from perdure.cli.demo.parent import MOMENTS, POINTS, Agent, Blow, DemoFailed, Story
from perdure.cli.demo.project import JOBS, TO_ORDER
from perdure.cli.demo.space import workspace_of
from perdure.spaces.local_look import look

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
    assert told.count("SIGKILL") == 9 + 1
    assert told.count(": a new process") == 10
    assert f"{len(JOBS)} jobs, 9 kills, nothing lost, nothing done twice." in told


def test_its_space_is_robbed_of_its_daemon_and_of_everything(lived: tuple[Path, str]) -> None:
    folder, told = lived
    (daemon,) = [line for line in told.splitlines() if "SIGKILL to the Space's daemon " in line]
    (deleted,) = [line for line in told.splitlines() if "the Space is deleted, with all files, " in line]
    assert any(daemon.split("daemon ")[1].startswith(words) for _, words in MOMENTS["daemon"].values())
    assert any(deleted.split("files, ")[1].startswith(words) for _, words in MOMENTS["space"].values())
    assert "restored from the log" in told
    assert json.loads((folder / "spaces" / "workshop" / "space.json").read_text())["generation"] == 2


def test_what_was_cut_off_in_the_space_went_on(lived: tuple[Path, str]) -> None:
    _, told = lived
    assert "bash: adopted, its command had ended" in told
    assert "edit: undone, and run again" in told or "write: undone, and run again" in told
    assert [line for line in told.splitlines() if "interrupted; not run again" in line and "order: " not in line] == []


def test_everything_it_started_is_ended(lived: tuple[Path, str]) -> None:
    folder, _ = lived
    (found,) = asyncio.run(look(folder / "spaces"))
    assert found.daemon is None
    assert living(folder) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_all_is_ended_with_a_demo_that_is_told_to_end(number: signal.Signals, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    command = [sys.executable, "-c", "from perdure.cli import main; main()", "demo", "--plain", "--keep", str(folder)]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert demo.stdout is not None
    with demo.stdout:
        assert any("opens the store" in line for line in demo.stdout)
        demo.send_signal(number)
        demo.stdout.read()
    assert demo.wait(60) != 0
    (found,) = asyncio.run(look(folder / "spaces"))
    assert found.daemon is None
    assert living(folder) == []


def living(folder: Path) -> list[bytes]:
    """Command lines of processes that name a folder."""
    found: list[bytes] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it ended meanwhile
            found.append(path.read_bytes())
    return [command for command in found if os.fsencode(folder) in command]


def test_plain_has_no_colours(lived: tuple[Path, str]) -> None:
    assert "\x1b" not in lived[1]
    assert f"perdure demo, seed {SEED} (repeat it with: perdure demo --seed {SEED})" in lived[1].splitlines()


def test_every_check_was_made_and_told(lived: tuple[Path, str]) -> None:
    folder, told = lived
    checks = list(judge(folder))
    assert len(checks) == 8
    assert [problem for _, problem in checks] == [None] * 8
    assert all(f"✓ {what}\n" in told for what, _ in checks)


def test_a_folder_that_is_there_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    done = CliRunner().invoke(app, ["demo", "--seed", "1", "--plain", "--keep", str(tmp_path)])
    assert done.exit_code == 1
    assert "the demo failed" in done.output
    assert f"{tmp_path} is there already; --keep takes a folder that is not" in done.output.replace("\n", " ")
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


def test_blows_follow_the_seed_and_fall_apart() -> None:
    def of(seed: int) -> list[tuple[str, int]]:
        return [(blow.point, blow.passes) for blow in parent.blows_of(seed, {what: lambda: None for what in MOMENTS})]

    drawn = [of(seed) for seed in range(200)]
    assert drawn == [of(seed) for seed in range(200)]
    assert all(daemon[0] != space[0] for daemon, space in drawn)
    for at, moments in enumerate(MOMENTS.values()):
        assert {each[at][0] for each in drawn} == moments.keys()
        assert all(0 <= each[at][1] <= moments[each[at][0]][0] for each in drawn)


def test_a_blow_falls_once_and_one_that_never_falls_fails_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say = 'print(\'{"point": "after_tool"}\', flush=True); sys.stdin.readline()'
    monkeypatch.setattr(Actor, "script", f"import sys; {say}; {say}; {say}; print('{{\"finished\": true}}')")
    fallen: list[str] = []
    blows = [
        Blow("after_tool", 1, "the second", lambda: fallen.append("second")),
        Blow("after_tool", 3, "the fourth", lambda: fallen.append("fourth")),
    ]
    with pytest.raises(DemoFailed, match="this never happened: the fourth"):
        parent.live_through(lambda: Actor(tmp_path), {}, POINTS, Story(plain=True), blows)
    assert fallen == ["second"]


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
    code = workspace_of(folder) / "stock.py"
    code.write_text(code.read_text().replace("want - have", "have - want"))


def fix_twice(folder: Path) -> None:
    with (workspace_of(folder) / "stock.py").open("a") as file:
        file.write("# fixed again\n")


def lose_the_report(folder: Path) -> None:
    (workspace_of(folder) / "REPORT.md").unlink()


def leave_litter(folder: Path) -> None:
    (workspace_of(folder) / "REPORT.md.tmp").write_text("half")


def leave_a_directory(folder: Path) -> None:
    (workspace_of(folder) / "empty").mkdir()


def link_the_report(folder: Path) -> None:
    report = workspace_of(folder) / "REPORT.md"
    report.rename(folder / "REPORT.md")
    report.symlink_to(folder / "REPORT.md")


def open_a_file_to_all(folder: Path) -> None:
    (workspace_of(folder) / "stock.csv").chmod(0o666)


def interrupt_a_command(folder: Path) -> None:
    results = [entry for entry in rows(folder, "entries") if entry["kind"] == "pi.tool-result"]
    result = next(entry for entry in results if entry["data"]["name"] == "bash")
    change(folder, "entries", {**result, "data": {**result["data"], "code": "interrupted"}})


ADMITTED = "each job was admitted once"
ANSWERED = "each job has its answer"
NOTHING_LEFT = "nothing is left running"
WELL_FORMED = "every call is followed by exactly its result"
ONCE = "no unsafe call was executed twice"
UNBROKEN = "no call in the Space was lost or interrupted"
WORKSPACE = "the workspace holds what it must and nothing else, by hash"
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
        (unfix, {WORKSPACE, TESTED}),
        (fix_twice, {WORKSPACE}),
        (lose_the_report, {WORKSPACE}),
        (leave_litter, {WORKSPACE}),
        (leave_a_directory, {WORKSPACE}),
        (link_the_report, {WORKSPACE}),
        (open_a_file_to_all, {WORKSPACE}),
        (interrupt_a_command, {UNBROKEN}),
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
