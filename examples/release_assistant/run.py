"""The whole story: ``python run.py [FOLDER]``. The assistant is killed twice, is asked about once, and is judged."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from agent import STORE, WITH_ISSUES
from judge import judge

HERE = Path(__file__).resolve().parent
CLI = "from perdure.cli import main; main()"
PATIENCE_S = 40.0
CHECK = """#!/bin/sh
echo begun >> checked
while [ ! -e ../go ]; do sleep 0.05; done
echo ended >> checked
"""

T = TypeVar("T")


class StoryFailed(Exception):
    """Something did not happen in time, or not as it had to."""


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "agent.py"), str(folder), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def until(agent: subprocess.Popen[str], look: Callable[[], T | None]) -> T:
    """Look again and again, while the assistant works."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if (found := look()) is not None:
            return found
        if agent.poll() is not None:
            raise StoryFailed(f"the assistant ended with {agent.returncode}")
        time.sleep(0.02)
    raise StoryFailed(f"nothing happened in {PATIENCE_S:g} s")


def perdure(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", CLI, *words], capture_output=True, text=True, check=False)


def waiting(store: Path) -> dict[str, object] | None:
    said = perdure("approvals", "ls", str(store), "--json").stdout.splitlines()
    return json.loads(said[0]) if said else None


def tell(folder: Path) -> int:
    store, project = folder / STORE, folder / "project"
    if project.exists():
        raise StoryFailed(f"{folder} has a story in it already; name another folder")
    project.mkdir(parents=True)
    (project / "check.sh").write_text(CHECK)
    (project / "check.sh").chmod(0o755)

    if not WITH_ISSUES:
        print("skipped: the list of issues, an MCP server; it needs pip install 'perdure[mcp]'")
    agent = start(folder)
    try:
        until(agent, lambda: True if (project / "checked").exists() else None)
        agent.kill()
        agent.wait()
        print("SIGKILL while the project was being checked; the check goes on in its Space")
        (folder / "go").touch()  # and comes to its end

        agent = start(folder, "--unplug")
        asked = until(agent, lambda: waiting(store))
        print(f"{asked['tool']} {json.dumps(asked['arguments'])} waits for a person")
        for who, expected in (("ada", 0), ("bob", 1)):  # two people, one decision
            said = perdure("approvals", "allow", str(store), str(asked["task"]))
            print(f"{who}: {(said.stdout or said.stderr).strip().splitlines()[0]}")
            if said.returncode != expected:
                raise StoryFailed(f"perdure approvals allow ended with {said.returncode}")
        agent.wait(PATIENCE_S)
        if agent.returncode != -signal.SIGKILL:
            raise StoryFailed(f"the assistant ended with {agent.returncode} instead of being killed")
        print("SIGKILL while it was published: the registry has it, and the store does not know")

        agent = start(folder)
        said, _ = agent.communicate(timeout=PATIENCE_S)
        if agent.returncode != 0:
            raise StoryFailed(f"the assistant ended with {agent.returncode}")
        print(said, end="")
        if waiting(store) is not None:
            raise StoryFailed("it was asked about again")
    finally:
        agent.kill()
        agent.wait()
        perdure("space", "stop", str(project))
    wrong = judge(folder)
    print(f"{wrong} things are not true" if wrong else "2 kills, nothing lost, nothing done twice")
    return 1 if wrong else 0


def main() -> int:
    if len(sys.argv) > 1:
        return tell(Path(sys.argv[1]).resolve())
    with tempfile.TemporaryDirectory(prefix="perdure-release-") as folder:
        return tell(Path(folder).resolve())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except StoryFailed as error:
        sys.exit(str(error))
