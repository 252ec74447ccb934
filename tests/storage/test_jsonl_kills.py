"""Rules K130, K150, K158: a killed process loses no commit it acknowledged, wherever it was; also in compactions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from storage_processes import KILLS

_MAKE = """
from perdure.storage import jsonl_writer
from perdure.storage.jsonl import JsonlStorage
jsonl_writer.worth_compacting = lambda waste, all: waste >= 15_000
def make(path):
    return JsonlStorage(path, fsync={!r})
"""


@pytest.mark.parametrize("fsync", [True, False])
def test_kills_lose_nothing_acknowledged(fsync: bool, tmp_path: Path) -> None:
    kills = 24
    store = tmp_path / "store"
    command = [sys.executable, "-c", f"{_MAKE.format(fsync)}{KILLS}", str(store), "20", str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert f'"kills": {kills}' in done.stdout
    names = {path.name for path in store.iterdir()}
    assert "entries-1.jsonl" not in names, "compactions are part of what is tested"
    assert len(names) == 5, "nothing is left over"
