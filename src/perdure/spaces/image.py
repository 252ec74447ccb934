"""Images of a workspace: the files, links and directories it has, and what changes one into the next (S130-S134).

An image is plain JSON: directory -> name -> entry, where ``""`` is the workspace itself and only directories that hold
something are keys. Entries are short JSON arrays (``encode``), so that one changed file is one small operation of the
document that keeps the image, whatever the size of the tree. Nothing here reads or writes anything.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, TypeAlias

import msgspec

from perdure.kernel.json import JsonValue


class File(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    mode: int
    """The twelve permission bits."""
    size: int
    """Bytes."""
    sha256: str
    chunks: tuple[str, ...] = ()
    """SHA-256 of each chunk; empty for a file of one chunk, whose digest is the file's."""

    @property
    def digests(self) -> tuple[str, ...]:
        """Of its chunks, in order; none for an empty file."""
        if not self.size:
            return ()
        return self.chunks or (self.sha256,)


class Link(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    target: str
    """Escaped like a path."""


class Directory(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    mode: int


Entry: TypeAlias = File | Link | Directory
Tree: TypeAlias = Mapping[str, Mapping[str, JsonValue]]


class Change(msgspec.Struct, frozen=True):
    """What stands at a path from now on; None: nothing."""

    path: str
    """Escaped; relative to the workspace, with ``/`` between names."""
    entry: Entry | None


def decode(value: JsonValue) -> Entry:
    """An entry of a tree. Raises msgspec.ValidationError."""
    return msgspec.convert(value, Entry)


def encode(entry: Entry) -> JsonValue:
    return msgspec.json.decode(msgspec.json.encode(entry))


# --- paths ------------------------------------------------------------------------------------------------------

_ESCAPE = "\0"
"""No path holds this byte, so what begins with it is nothing else."""


def escape(path: bytes) -> str:
    """A path as JSON holds it: its text, or, where it is not UTF-8, its base64 behind a NUL."""
    try:
        return path.decode()
    except UnicodeDecodeError:
        return _ESCAPE + base64.b64encode(path).decode()


def unescape(path: str) -> bytes:
    return base64.b64decode(path[1:], validate=True) if path.startswith(_ESCAPE) else path.encode()


def split(path: str) -> tuple[str, str]:
    """The directory of an escaped path, and the name in it, both escaped."""
    if not path.startswith(_ESCAPE):
        directory, _, name = path.rpartition("/")
        return directory, name
    directory, _, name = unescape(path).rpartition(b"/")
    return escape(directory), escape(name)


def join(directory: str, name: str) -> str:
    if not directory:
        return name
    if directory.startswith(_ESCAPE) or name.startswith(_ESCAPE):
        return escape(unescape(directory) + b"/" + unescape(name))
    return f"{directory}/{name}"


# --- trees ------------------------------------------------------------------------------------------------------


def find(tree: Tree, path: str) -> Entry | None:
    directory, name = split(path)
    found = tree.get(directory, {}).get(name)
    return None if found is None else decode(found)


def entries(tree: Tree) -> Iterator[Change]:
    """Everything in an image, each directory before what it holds."""
    waiting = [""]
    while waiting:
        directory = waiting.pop()
        for name, value in tree.get(directory, {}).items():
            path, entry = join(directory, name), decode(value)
            yield Change(path, entry)
            if isinstance(entry, Directory):
                waiting.append(path)


def digests(tree: Tree) -> Iterator[str]:
    """Of every chunk of every file; what several files hold comes several times."""
    for names in tree.values():
        for value in names.values():
            entry = decode(value)
            if isinstance(entry, File):
                yield from entry.digests


# Any: plain dicts and the handles of a draft have no type in common.
def apply(tree: MutableMapping[str, Any], changes: Iterable[Change]) -> None:
    """Change a tree, which may be a draft's: one operation a change, and one where a directory begins or ends to hold
    something.

    What a directory held that is one no longer has to be named by the changes too. Raises ValueError for an entry whose
    directory is none, and for one that is left in what is no directory any more.
    """
    touched: dict[str, None] = {}
    for change in changes:
        directory, name = split(change.path)
        touched[directory] = None
        names = tree.get(directory)
        if change.entry is None:
            if names is not None and name in names:
                del names[name]
        elif names is None:
            tree[directory] = {name: encode(change.entry)}
        elif names.get(name) != (value := encode(change.entry)):
            names[name] = value
    for directory in touched:
        names = tree.get(directory)
        if names is not None and not names:
            del tree[directory]
        elif names is not None and directory and not _is_directory(tree, directory):
            raise ValueError(f"{directory!r} holds something and is no directory")


def _is_directory(tree: MutableMapping[str, Any], path: str) -> bool:
    directory, name = split(path)
    value = tree.get(directory, {}).get(name)
    return value is not None and value[0] == "d"


def difference(tree: Tree, wanted: Iterable[Change]) -> list[Change]:
    """What changes a tree into one that holds exactly what is ``wanted``; what is gone comes first, deepest first."""
    changes: list[Change] = []
    kept: set[str] = set()
    for change in wanted:
        kept.add(change.path)
        if find(tree, change.path) != change.entry:
            changes.append(change)
    gone = [Change(change.path, None) for change in entries(tree) if change.path not in kept]
    return [*reversed(gone), *changes]
