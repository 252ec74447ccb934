"""What a directory holds, byte for byte, looked at without anything of the product."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import TypeAlias

Seen: TypeAlias = tuple[str, int, str | bytes]
"""Kind, permission bits, and the digest of a file or the target of a link."""

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def seen(root: Path) -> dict[bytes, Seen]:
    """Path to what is there; the root itself is not among them. Needs to be allowed to read all of it."""
    found: dict[bytes, Seen] = {}
    descriptor = os.open(root, _OPEN | os.O_DIRECTORY)
    try:
        _into(found, descriptor, b"")
    finally:
        os.close(descriptor)
    return found


def _into(found: dict[bytes, Seen], directory: int, prefix: bytes) -> None:
    for name in map(os.fsencode, os.listdir(directory)):
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        path, mode = prefix + name, stat.S_IMODE(status.st_mode)
        if stat.S_ISLNK(status.st_mode):
            found[path] = ("link", 0, os.readlink(name, dir_fd=directory))
        elif stat.S_ISDIR(status.st_mode):
            found[path] = ("directory", mode, "")
            descriptor = os.open(name, _OPEN | os.O_DIRECTORY, dir_fd=directory)
            try:
                _into(found, descriptor, path + b"/")
            finally:
                os.close(descriptor)
        elif stat.S_ISREG(status.st_mode):
            with open(os.open(name, _OPEN, dir_fd=directory), "rb") as file:
                found[path] = ("file", mode, hashlib.file_digest(file, "sha256").hexdigest())
        else:
            found[path] = ("special", mode, "")


def different(was: dict[bytes, Seen], now: dict[bytes, Seen]) -> dict[bytes, tuple[Seen | None, Seen | None]]:
    """What is at each path that differs, in both: short to look at where trees are large."""
    return {
        path: (was.get(path), now.get(path))
        for path in sorted(was.keys() | now.keys())
        if was.get(path) != now.get(path)
    }
