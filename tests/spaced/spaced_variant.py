"""Runs spaced with parts of it replaced, for what a test cannot bring about: ``spaced_variant.py PATCH... -- WORDS...``

- ``boot=ID``: another boot of the machine
- ``syncs=FILE``: a line in FILE for every flush of the workspace
- ``stall=SECONDS``: the bound on slow clients
- ``glance=SECONDS``: how often it is looked whether the state directory is there
- ``immortal``: commands that outlive SIGKILL
- ``no-children``: a kernel without /proc/PID/task/TID/children
"""

from __future__ import annotations

import os
import signal
import sys

from perdure.spaced import spaced


def main() -> int:
    words = sys.argv[1:]
    patches, words = words[: words.index("--")], words[words.index("--") + 1 :]
    flush, kill = spaced.sync_filesystem, os.kill
    for patch in patches:
        name, _, value = patch.partition("=")
        if name == "boot":
            spaced.boot_id = lambda boot=value: boot
        elif name == "syncs":

            def logged(fd: int, path: str = value) -> None:
                flush(fd)
                with open(path, "a") as file:
                    file.write("sync\n")

            spaced.sync_filesystem = logged
        elif name == "stall":
            spaced.STALL_S = float(value)
        elif name == "glance":
            spaced.GLANCE_S = float(value)
        elif name == "immortal":
            spaced.GONE_S = 0.5
            spaced.Cgroup.kill = lambda self: None
            os.kill = lambda pid, number: None if number == signal.SIGKILL else kill(pid, number)
        elif name == "no-children":

            def refused(pid: int) -> list[int]:
                raise OSError("no such file")

            spaced.children_of = refused
        else:
            raise AssertionError(patch)
    return spaced.main(words)


if __name__ == "__main__":
    sys.exit(main())
