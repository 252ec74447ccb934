"""examples/local_model, with a stand-in for llama.cpp's server: killed and counted like with the real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "examples" / "local_model" / "run.py"
STAND_IN = Path(__file__).with_name("llama_stand_in.py")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of the stand-in."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tiny.gguf").touch()
    (folder / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STAND_IN}" "$@"\n')
    (folder / "python").chmod(0o755)
    return folder


def run(model: Path, kept: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, RUN, model / "python", "--seed", "5", "--keep", kept]
    env = {**os.environ, "STAND_IN": str(model)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)


def command_of(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""  # it has ended


def is_ended(model: Path) -> bool:
    return not Path("/proc", (model / "pid").read_text()).exists()


@pytest.mark.timeout(300)  # nine processes, each of which imports a provider's SDK
def test_it_is_killed_and_counted_and_the_models_mistakes_are_no_fault_h170(model: Path, tmp_path: Path) -> None:
    done = run(model, tmp_path / "kept")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SIGKILL") == 8
    assert "10 jobs, 8 kills, nothing lost, nothing done twice." in done.stdout
    assert "6 of 9 jobs with the call that was asked for" in done.stdout
    assert "otherwise: order-bolt" in done.stdout
    assert "the project's own tests pass" in done.stdout
    effects = [json.loads(line) for line in (tmp_path / "kept" / "effects.jsonl").read_text().splitlines()]
    ordered = [(effect["item"], effect["count"]) for effect in effects if effect["tool"] == "order"]
    assert ordered == [("bolt", 7), ("washer", 7), ("hinge", 7)]
    assert is_ended(model)


def test_a_run_that_is_terminated_leaves_no_process(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, RUN, model / "python", "--seed", "5", "--keep", tmp_path / "kept"]
    env = {**os.environ, "STAND_IN": str(model)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "a new store" in line:  # the agent works
                break
        agents = [path for path in Path("/proc").glob("[0-9]*") if str(tmp_path / "kept").encode() in command_of(path)]
        assert len(agents) == 2, "the script and the agent"
        process.terminate()
    assert process.returncode == 143
    assert not any(path.exists() for path in agents)
    assert is_ended(model)


def test_a_server_that_does_not_come_up_is_told_with_its_words(model: Path, tmp_path: Path) -> None:
    (model / "dies").touch()
    done = run(model, tmp_path / "kept")
    assert done.returncode == 1
    assert "it failed: it ended with 1: no such model" in done.stdout
    assert is_ended(model)
