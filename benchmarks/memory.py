"""What a process takes of the machine, read from /proc (Linux). Imports neither side."""

from __future__ import annotations

import os


def status(name: str) -> float:
    """A size from /proc/self/status, in MB (2**20 bytes).

    ``VmRSS``: now. ``VmHWM``: the most since this program was started; unlike ru_maxrss it does not begin with what the
    process that started it had. ``RssAnon``: now, without mapped files.
    """
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(name + ":"):
                return int(line.split()[1]) / 1024
    raise KeyError(name)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) - 1  # the listing's own


def size_of(folder: str | os.PathLike[str]) -> int:
    """Bytes of the files in a folder."""
    return sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file())
