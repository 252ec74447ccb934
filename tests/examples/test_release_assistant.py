"""examples/release_assistant: killed while a command runs and while it publishes; released once, decided once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "release_assistant"


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, EXAMPLE / program, folder], capture_output=True, text=True, check=False, timeout=150
    )


@pytest.mark.timeout(240)
def test_it_is_killed_twice_and_releases_once_h94_h112_h162(tmp_path: Path) -> None:
    folder = tmp_path / "release"
    told = run("run.py", folder)
    assert told.returncode == 0, told.stdout + told.stderr
    assert told.stdout.count("SIGKILL") == 2
    assert "ada: allowed: call" in told.stdout
    assert "waits for approval" in told.stdout.partition("bob: ")[2]
    assert "limit: the session has had 6 of 6 model responses" in told.stdout
    assert told.stdout.count("✓") == 10
    assert len((folder / "registry" / "asked.log").read_text().split()) == 2, "it published again, under the same key"

    assert run("judge.py", folder).returncode == 0
    again = {"version": "1.2.0", "notes": "released twice"}
    (folder / "registry" / "other.json").write_text(json.dumps(again))
    with (folder / "project" / "checked").open("a") as checked:
        checked.write("begun\n")
    found = run("judge.py", folder)
    assert found.returncode == 1
    assert "NOT TRUE: it was released once" in found.stdout
    assert "NOT TRUE: the project was checked once" in found.stdout
