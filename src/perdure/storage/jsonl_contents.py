"""Contents by hash in a JSONL store: a file each, named by its digest, with the bytes as they were given.

A file alone says nothing: what is stored is what commits say. So one that is left over by a commit that was not, or by
a reclaim that was cut off, is removed at the next open.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256

from perdure.kernel.errors import StorageCorrupt
from perdure.kernel.storage import Content
from perdure.storage import jsonl_disk as disk
from perdure.storage.jsonl_lines import CONTENTS


def path_of(store: str, digest: str) -> str:
    return os.path.join(store, CONTENTS, digest[:2], digest)


def put(store: str, content: Content, *, flushing: bool) -> set[str]:
    """Write it, whatever was there; the directories that are to be flushed then."""
    path = path_of(store, content.digest)
    directory = os.path.dirname(path)
    changed = {directory}
    if not os.path.isdir(directory):
        with suppress(FileExistsError):
            disk.make_directory(directory)
        changed.add(os.path.dirname(directory))
    disk.put(path, content.data, flushing=flushing)
    return changed


def read(store: str, digest: str, size: int) -> bytes:
    """Raises StorageCorrupt if its file is not there, or has other bytes."""
    path = path_of(store, digest)
    try:
        with open(path, "rb") as file:
            data = file.read(size + 1)
    except FileNotFoundError as error:
        raise missing(path) from error
    if len(data) != size or sha256(data).digest() != bytes.fromhex(digest):
        raise StorageCorrupt(f"{path} is not what its digest says; restore the store from a backup")
    return data


def missing(path: str) -> StorageCorrupt:
    return StorageCorrupt(f"{path} is gone, and the store needs it; restore the store from a backup")


def check_sizes(store: str, contents: dict[str, int]) -> None:
    """Raise StorageCorrupt unless each has a file of its size."""
    for digest, size in contents.items():
        path = path_of(store, digest)
        try:
            found = os.stat(path).st_size
        except FileNotFoundError as error:
            raise missing(path) from error
        if found != size:
            raise StorageCorrupt(f"{path} has {found} bytes of {size}; restore the store from a backup")


def paths(store: str) -> Iterator[str]:
    """Every file there is."""
    for directory in os.scandir(os.path.join(store, CONTENTS)):
        if directory.is_dir(follow_symlinks=False):
            yield from (file.path for file in os.scandir(directory.path))
