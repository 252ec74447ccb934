"""Runs spaced with parts of it replaced, for what a test cannot bring about: ``spaced_variant.py PATCH... -- WORDS...``

- ``boot=ID``: another boot of the machine
- ``syncs=FILE``: a line in FILE for every flush of the workspace
- ``stall=SECONDS``: the bound on slow clients
- ``glance=SECONDS``: how often it is looked whether the state directory is there
- ``immortal``: commands that outlive SIGKILL
- ``stranger=FILE``: the kernel lists the process whose number is in FILE as everybody's child, too
- ``no-children``: a kernel without /proc/PID/task/TID/children
"""

from __future__ import annotations

import signal
import sys

from perdure.spaced import spaced


def main() -> int:
    words = sys.argv[1:]
    patches, words = words[: words.index("--")], words[words.index("--") + 1 :]
    flush, send, children = spaced.sync_filesystem, signal.pidfd_send_signal, spaced.children_of
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
            signal.pidfd_send_signal = lambda handle, number: None if number == signal.SIGKILL else send(handle, number)
        elif name == "stranger":

            def with_stranger(pid: int, path: str = value) -> list[int]:
                with open(path) as file:
                    return [*children(pid), int(file.read())]

            spaced.children_of = with_stranger
        elif name == "no-children":

            def refused(pid: int) -> list[int]:
                raise OSError("no such file")

            spaced.children_of = refused
        else:
            raise AssertionError(patch)
    return spaced.main(words)


if __name__ == "__main__":
    sys.exit(main())
