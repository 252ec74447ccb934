"""Rules K130, K149: a killed process loses no commit it acknowledged, and the next one opens at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from storage_processes import KILLS

_MAKE = """
from perdure.storage.sqlite import SqliteStorage
def make(path):
    return SqliteStorage(path, durability={!r})
"""


@pytest.mark.parametrize("durability", ["power", "process"])
def test_forty_kills_lose_nothing_acknowledged(durability: str, tmp_path: Path) -> None:
    kills = 40
    script = f"{_MAKE.format(durability)}{KILLS}"
    command = [sys.executable, "-c", script, str(tmp_path / "store.db"), "20", str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert f'"kills": {kills}' in done.stdout
