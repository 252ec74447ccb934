"""Run a program and end it with SIGKILL in place of its n-th commit: ``python killed.py N program.py arguments``.

What was committed before is stored, or on its way there; what the program did between two commits has happened.
"""

from __future__ import annotations

import asyncio
import os
import runpy
import signal
import sys
from pathlib import Path

from perdure.kernel.storage import Batch
from perdure.storage.sqlite import SqliteStorage


def main() -> None:
    number, program = int(sys.argv[1]), sys.argv[2]
    commit, count = SqliteStorage.commit, 0

    def counted(self: SqliteStorage, batch: Batch) -> asyncio.Future[None]:
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return commit(self, batch)

    SqliteStorage.commit = counted
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(program).parent.resolve())
    runpy.run_path(program, run_name="__main__")


main()
