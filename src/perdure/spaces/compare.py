"""How a directory differs from an image of a log, found by looking at everything in it; nothing is changed."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal, TypeAlias

from perdure.spaces import image
from perdure.spaces.image import Directory, Entry, File, Link, Tree
from perdure.spaces.wire import CHUNK_BYTES

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Kind: TypeAlias = Literal["added", "changed", "removed"]


@dataclass(frozen=True, slots=True)
class Difference:
    """A path at which a directory is not as the image has it."""

    path: bytes
    was: Entry | None
    """In the image; None: nothing."""
    now: Entry | None
    """In the directory; None: nothing."""

    @property
    def kind(self) -> Kind:
        return "added" if self.was is None else "removed" if self.now is None else "changed"


@dataclass(frozen=True, slots=True)
class Unfit:
    """What stands in a directory and can be in no image, or cannot be read."""

    path: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Comparison:
    differences: tuple[Difference, ...]
    """By path."""
    unfit: tuple[Unfit, ...]


def compare(tree: Tree, directory: bytes) -> Comparison:
    """Compare all of a directory with an image, by content. Symbolic links are not followed.

    Raises OSError if the directory itself cannot be read.
    """
    was = {image.unescape(change.path): change.entry for change in image.entries(tree)}
    now: dict[bytes, Entry] = {}
    unfit: list[Unfit] = []
    for path, found in _walk(directory):
        if isinstance(found, str):
            unfit.append(Unfit(path, found))
        else:
            now[path] = found
    unseen = {each.path for each in unfit}
    differences = [
        Difference(path, was.get(path), now.get(path))
        for path in sorted(was.keys() | now.keys())
        if was.get(path) != now.get(path) and path not in unseen and not _inside(path, unseen)
    ]
    return Comparison(tuple(differences), tuple(sorted(unfit, key=lambda each: each.path)))


def _inside(path: bytes, unseen: set[bytes]) -> bool:
    """Whether a directory above it could not be looked into: nothing is known of it then."""
    while (cut := path.rfind(b"/")) > 0:
        path = path[:cut]
        if path in unseen:
            return True
    return False


def _walk(directory: bytes) -> Iterator[tuple[bytes, Entry | str]]:
    """Everything below it; in words what cannot be told as an entry."""
    waiting = [b""]
    while waiting:
        above = waiting.pop()
        try:
            with os.scandir(os.path.join(directory, above) if above else directory) as listing:
                names = [entry.name for entry in listing]
        except OSError as error:
            if not above:
                raise
            yield above, _words(error)
            continue
        for name in names:
            path = above + b"/" + name if above else name
            found = _entry(os.path.join(directory, path))
            if found is None:
                continue
            yield path, found
            if isinstance(found, Directory):
                waiting.append(path)


def _entry(path: bytes) -> Entry | str | None:
    """None: it went away meanwhile."""
    try:
        status = os.lstat(path)
        if stat.S_ISDIR(status.st_mode):
            return Directory(stat.S_IMODE(status.st_mode))
        if stat.S_ISLNK(status.st_mode):
            return Link(image.escape(os.readlink(path)))
        return _file(path) if stat.S_ISREG(status.st_mode) else "a special file, which no image can hold"
    except FileNotFoundError:
        return None
    except OSError as error:
        return _words(error)


def _file(path: bytes) -> Entry | str:
    descriptor = os.open(path, _READ)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return "it became something else while it was looked at"
        whole, chunks, size = sha256(), list[str](), 0
        while block := _chunk(descriptor):
            whole.update(block)
            chunks.append(sha256(block).hexdigest())
            size += len(block)
    finally:
        os.close(descriptor)
    return File(stat.S_IMODE(status.st_mode), size, whole.hexdigest(), tuple(chunks) if len(chunks) > 1 else ())


def _chunk(descriptor: int) -> bytes:
    """The next chunk: short reads are none at the end of a file alone."""
    parts: list[bytes] = []
    left = CHUNK_BYTES
    while left and (block := os.read(descriptor, left)):
        parts.append(block)
        left -= len(block)
    return b"".join(parts)


def _words(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "error")
    return f"it cannot be read: {error.strerror or error} ({name})"
