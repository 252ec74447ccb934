"""Notes every change that a JSONL store makes on the disk, and tells what a crash at any moment could leave of them.

A killed process leaves all that it did, and of its last write some first part. Without power, what was not flushed may
be there, or not, or in part, by sectors, whatever was done after it; and so may what was created, renamed and removed
in a directory since that was flushed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from perdure.storage import jsonl_disk

SECTOR = 512


@dataclass(frozen=True, slots=True)
class Event:
    kind: str
    """The name of what was called in ``jsonl_disk``, or ``note``."""
    path: str
    """Below the directory that is recorded."""
    target: str = ""
    offset: int = 0
    data: bytes = b""


@dataclass
class Recorder:
    root: Path
    events: list[Event] = field(default_factory=list[Event])
    before: Callable[[Event], None] = lambda event: None
    """Called before each change is made; may raise."""

    def note(self, text: str) -> None:
        self.events.append(Event("note", text))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("create", "make_directory", "rename", "link", "remove", "remove_directory", "flush_directory"):
            monkeypatch.setattr(jsonl_disk, name, self._of_paths(name, getattr(jsonl_disk, name)))
        for name in ("write", "cut", "flush"):
            monkeypatch.setattr(jsonl_disk, name, self._of_file(name, getattr(jsonl_disk, name)))

    def _of_paths(self, name: str, do: Callable[..., object]) -> Callable[..., object]:
        def recorded(path: str, target: str = "") -> object:
            event = Event(name, self._below(path), target and self._below(target))
            self.before(event)
            there = os.path.lexists(path)
            result = do(path, target) if target else do(path)
            if name != "remove" or there:
                self.events.append(event)
            return result

        return recorded

    def _of_file(self, name: str, do: Callable[..., object]) -> Callable[..., object]:
        def recorded(descriptor: int, *arguments: int | bytes) -> None:
            path = self._below(os.readlink(f"/proc/self/fd/{descriptor}"))
            numbers = [each for each in arguments if isinstance(each, int)]
            data = b"".join(each for each in arguments if isinstance(each, bytes))
            event = Event(name, path, offset=numbers[0] if numbers else 0, data=data)
            self.before(event)
            do(descriptor, *arguments)
            self.events.append(event)

        return recorded

    def _below(self, path: str) -> str:
        return os.path.relpath(path, self.root)


@dataclass(eq=False)
class File:
    now: bytearray = field(default_factory=bytearray)
    safe: bytearray = field(default_factory=bytearray)
    unsafe: list[Event] = field(default_factory=list[Event])
    """Writes and cuts since it was flushed."""


Names = dict[str, File | None]
"""Everything by its path; None: a directory."""


class Disk:
    """What the recorded events made, and what of it is safe."""

    def __init__(self) -> None:
        self.now: Names = {}
        self.safe: Names = {}
        self.pending: dict[str, list[tuple[Event, File | None]]] = {}
        """Of each directory what was created, renamed and removed since it was flushed."""

    def apply(self, event: Event) -> None:
        match event.kind:
            case "note":
                pass
            case "write" | "cut":
                file = self.now[event.path]
                assert file is not None
                _change(file.now, event)
                file.unsafe.append(event)
            case "flush":
                file = self.now[event.path]
                assert file is not None
                for earlier in file.unsafe:
                    _change(file.safe, earlier)
                file.unsafe.clear()
            case "flush_directory":
                for earlier, file in self.pending.pop(event.path, []):
                    _rename(self.safe, earlier, file)
            case _:
                file = File() if event.kind == "create" else self.now.get(event.path)
                _rename(self.now, event, file)
                directory = os.path.dirname(event.target or event.path) or "."
                self.pending.setdefault(directory, []).append((event, file))

    def killed(self) -> dict[str, bytes | None]:
        """What a killed process leaves."""
        return {path: None if file is None else bytes(file.now) for path, file in self.now.items()}

    def powerless(self, chance: Random | None) -> dict[str, bytes | None]:
        """What is left without power: of what is not safe nothing, or some by chance."""
        names = dict(self.safe)
        for some in self.pending.values() if chance is not None else ():
            assert chance is not None
            for event, file in some:
                if chance.random() < 0.6:
                    _rename(names, event, file)
        found: dict[str, bytes | None] = {}
        for path, file in names.items():
            if file is None:
                found[path] = None
                continue
            data = bytearray(file.safe)
            for event in file.unsafe if chance is not None else ():
                assert chance is not None
                for part in _sectors(event):
                    if chance.random() < 0.6:
                        _change(data, part)
            found[path] = bytes(data)
        return found


def put(root: Path, files: dict[str, bytes | None]) -> None:
    """Make these files and directories, as a store would; what is in a directory that is not there is lost."""
    root.mkdir()
    for path, data in sorted(files.items()):
        if not (root / path).parent.is_dir():
            continue
        if data is None:
            (root / path).mkdir(mode=0o700)
        else:
            (root / path).write_bytes(data)
            (root / path).chmod(0o600)


def _change(data: bytearray, event: Event) -> None:
    if event.kind == "cut":
        del data[event.offset :]
        return
    if len(data) < event.offset:
        data.extend(bytes(event.offset - len(data)))
    data[event.offset : event.offset + len(event.data)] = event.data


def _rename(names: Names, event: Event, file: File | None) -> None:
    match event.kind:
        case "remove" | "remove_directory":
            names.pop(event.path, None)
        case "rename":
            for path in [path for path in names if path == event.path or path.startswith(f"{event.path}/")]:
                names[event.target + path.removeprefix(event.path)] = names.pop(path)
            if file is not None:
                names[event.target] = file
        case _:
            names[event.target or event.path] = file


def _sectors(event: Event) -> Iterator[Event]:
    """A write as the sectors it may be torn into."""
    at, data = event.offset, event.data
    if not data:
        yield event
    while data:
        size = SECTOR - at % SECTOR
        yield Event("write", event.path, offset=at, data=data[:size])
        at, data = at + size, data[size:]
