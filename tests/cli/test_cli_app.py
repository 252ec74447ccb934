"""The ``perdure`` command itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import perdure
from perdure.cli.app import app

COMMANDS = {"demo", "inspect", "crash"}


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
