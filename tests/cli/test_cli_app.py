"""The ``perdure`` command itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import perdure
import perdure.testing.campaign.campaign
import perdure.testing.crash
from perdure.cli.app import app
from perdure.testing.scenarios import SCENARIOS

COMMANDS = {"backup", "chat", "crash", "demo", "export", "inspect", "ls", "send", "show"}


def test_the_installed_command_says_what_there_is() -> None:
    program = Path(sys.executable).parent / "perdure"
    done = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    listed = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("│ ") and line[2] != " "}
    assert listed >= COMMANDS


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_each_command_explains_itself(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"])
    assert done.exit_code == 0
    assert f"perdure {command}" in done.output.replace("root ", "perdure ")


def test_without_a_command_it_helps() -> None:
    done = CliRunner().invoke(app, [])
    assert done.exit_code == 2
    assert "Commands" in done.output


def test_what_is_misspelt_is_an_error() -> None:
    for words in (["inspekt", "a.db"], ["demo", "--sead", "7"], ["inspect"], ["demo", "--seed", "seven"]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2, words


def test_the_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"perdure {perdure.__version__}\n")


def test_asking_for_help_loads_no_agent() -> None:
    code = (
        "import sys\n"
        "from perdure.cli.app import app\n"
        "try:\n"
        "    app(['--help'])\n"
        "except SystemExit:\n"
        "    print([m for m in ('perdure.harness', 'perdure.storage', 'apsw', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# --- crash --------------------------------------------------------------------------------------------------------


def test_a_campaign_says_what_it_did() -> None:
    done = CliRunner().invoke(app, ["crash", "--runs", "6", "--seed", "3"])
    assert done.exit_code == 0
    (line,) = done.output.splitlines()
    assert line.startswith("SUMMARY mode=simulation scenarios=6 runs=6 ok=6 failed=0 kills=")


def test_a_seed_repeats_a_campaign_and_a_fault_a_run() -> None:
    words = ["crash", "--mode", "simulation", "--runs", "4", "--seed", "9"]
    assert CliRunner().invoke(app, words).output == CliRunner().invoke(app, words).output
    name = next(iter(SCENARIOS))
    for more in (["--kill", "before:2,3"], ["--order-seed", "5"]):
        done = CliRunner().invoke(app, ["crash", "--scenario", name, "--seed", "2", *more])
        assert done.exit_code == 0, done.output
        assert "life 1: " in done.output
        assert ("killed by before:2" in done.output) == ("--kill" in more)


def test_every_option_reaches_the_campaign(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def record(**options: object) -> int:
        asked.append(options)
        return 1

    monkeypatch.setattr(perdure.testing.crash, "run_simulation", record)
    words = ["crash", "--runs", "2", "--seed", "3", "--scenario", "a", "--kill", "3,before:4", "--order-seed", "5"]
    assert CliRunner().invoke(app, words).exit_code == 1
    del asked[0]["echo"]
    assert asked == [{"runs": 2, "seed": 3, "scenario": "a", "kill": ["3", "before:4"], "order_seed": 5}]


@pytest.mark.parametrize(
    "words",
    [
        ["--scenario", "of nobody"],
        ["--kill", "3"],
        ["--scenario", next(iter(SCENARIOS)), "--kill", "x"],
        ["--runs", "0"],
        ["--mode", "machine"],
        ["--jobs", "2"],
        ["--only", "daemon"],
        ["--mode", "stale", "--kill", "3"],
        ["--mode", "transactional", "--only", "daemon"],
        ["--mode", "transactional", "--every", "2"],
        ["--mode", "steps", "--only", "no step has this in its name"],
    ],
)
def test_what_cannot_be_run_is_an_error(words: list[str]) -> None:
    assert CliRunner().invoke(app, ["crash", *words]).exit_code == 2


def test_a_campaign_of_real_processes_p8() -> None:
    words = ["crash", "--mode", "steps", "--only", "under_way.slow+commit.intent.after/driver", "--jobs", "2"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "SUMMARY mode=steps runs=3 ok=3 failed=0 kills=" in done.output
    assert " interrupted=0" in done.output


@pytest.mark.parametrize("mode", ["transactional", "stale"])
def test_every_option_reaches_a_campaign_of_real_processes(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def record(**options: object) -> int:
        asked.append(options)
        return 1

    monkeypatch.setattr(perdure.testing.campaign.campaign, f"run_{mode}", record)
    assert (
        CliRunner().invoke(app, ["crash", "--mode", mode, "--runs", "2", "--seed", "3", "--jobs", "4"]).exit_code == 1
    )
    del asked[0]["echo"]
    assert asked == [{"runs": 2, "seed": 3, "jobs": 4}]
