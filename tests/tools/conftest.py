"""A workspace and its local environment; a test file may have others of these names."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.tools.local import LocalEnvironment


@pytest.fixture
def work(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    return work


@pytest.fixture
def env(work: Path, tmp_path: Path) -> LocalEnvironment:
    return LocalEnvironment(work, output_dir=tmp_path / "outputs", grace_ms=200)
