"""Settings every test shares, and what no test may leave behind."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Machines are slow at times: a deadline would test the machine. Examples are the same in every run.
settings.register_profile("perdure", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("perdure")

GONE_S = 60
"""How long what the last test has ended may take to be gone."""


@pytest.fixture(scope="session", autouse=True)
def nothing_runs_on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No process that was started on a folder of these tests outlives them."""
    yield
    deadline = time.monotonic() + GONE_S
    while (left := _running_on(tmp_path_factory.getbasetemp())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, "these run on after the tests"


def _running_on(folder: Path) -> list[str]:
    found: list[str] = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                command = Path("/proc", name, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if f"{folder}/" in command:
                    found.append(f"{name}: {command[:300]}")
    return found
