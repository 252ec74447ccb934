"""examples/release_assistant: killed while a command runs and while it publishes; released once, decided once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import importlib.util

found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "mcp" else found(name, package)
"""
"""As if the package were not there."""
EXAMPLE = Path(__file__).parents[2] / "examples" / "release_assistant"


def run(program: str, folder: Path, hidden: Path | None) -> subprocess.CompletedProcess[str]:
    paths = [str(hidden), *os.environ.get("PYTHONPATH", "").split(os.pathsep)] if hidden is not None else None
    environment = os.environ if paths is None else {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, EXAMPLE / program, folder]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=150)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("with_issues", [True, False], ids=["with MCP", "without the extra"])
def test_it_is_killed_twice_and_releases_once_h94_h112_h162(with_issues: bool, tmp_path: Path) -> None:
    hidden: Path | None = None
    if with_issues:
        pytest.importorskip("mcp", reason="the extra perdure[mcp] is not installed")
    else:
        hidden = tmp_path / "hidden"
        hidden.mkdir()
        (hidden / "sitecustomize.py").write_text(WITHOUT)
    folder = tmp_path / "release"
    told = run("run.py", folder, hidden)
    assert told.returncode == 0, told.stdout + told.stderr
    assert told.stdout.count("SIGKILL") == 2
    assert "ada: allowed: call" in told.stdout
    assert "that decision stands" in told.stdout.partition("bob: ")[2]
    turns = 7 if with_issues else 6
    assert f"limit: the session has had {turns} of {turns} model responses" in told.stdout
    assert ("skipped: the list of issues" in told.stdout) is not with_issues
    assert told.stdout.count("✓") == 10
    assert len((folder / "registry" / "asked.log").read_text().split()) == 2, "it published again, under the same key"

    assert run("judge.py", folder, hidden).returncode == 0
    second = run("run.py", folder, hidden)
    assert (second.returncode, second.stdout.count("\n")) == (1, 0), second.stdout
    assert second.stderr == f"{folder} has a story in it already; name another folder\n"
    again = {"version": "1.2.0", "notes": "released twice"}
    (folder / "registry" / "other.json").write_text(json.dumps(again))
    with (folder / "project" / "checked").open("a") as checked:
        checked.write("begun\n")
    found = run("judge.py", folder, hidden)
    assert found.returncode == 1
    assert "NOT TRUE: it was released once" in found.stdout
    assert "NOT TRUE: the project was checked once" in found.stdout
