"""An SQLite file layer that notes every write, and what a loss of power could leave of them.

SQLite runs with the production settings on real files; what is noted is replayed afterwards. A write is safe once its
file was flushed; one that was not may be there, or not, or in part, by sectors, whatever was written after it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import apsw

SECTOR = 512


@dataclass(frozen=True, slots=True)
class Event:
    kind: Literal["write", "truncate", "sync", "delete", "note"]
    file: str
    offset: int = 0
    data: bytes = b""


@dataclass
class Recorder:
    """What happened to the files of one store, in order. The tests add notes of their own between."""

    name: str
    events: list[Event] = field(default_factory=list)
    reads: int = 0
    fail_sync: bool = False
    gate: threading.Event = field(default_factory=threading.Event)
    """A flush waits until it is set."""

    def __post_init__(self) -> None:
        self.gate.set()

    def note(self, text: str) -> None:
        self.events.append(Event("note", text))

    def files_after(self, before: dict[str, bytes], count: int, chance: Random | None) -> dict[str, bytes]:
        """The files if the power went after ``count`` events: all unflushed writes lost, or some kept by chance."""
        safe: dict[str, bytearray] = {file: bytearray(data) for file, data in before.items()}
        unsafe: dict[str, list[Event]] = {}
        for event in self.events[:count]:
            if event.kind == "note":
                continue
            if event.kind == "delete":
                if chance is not None and chance.random() < 0.5:
                    continue  # the directory was not flushed: the file is back
                safe.pop(event.file, None)
                unsafe.pop(event.file, None)
            elif event.kind == "sync":
                for earlier in unsafe.pop(event.file, []):
                    _apply(safe, earlier)
                safe.setdefault(event.file, bytearray())
            else:
                unsafe.setdefault(event.file, []).append(event)
        if chance is not None:
            for events in unsafe.values():
                for event in events:
                    for part in _sectors(event):
                        if chance.random() < 0.6:
                            _apply(safe, part)
        return {file: bytes(data) for file, data in safe.items()}


def _apply(files: dict[str, bytearray], event: Event) -> None:
    data = files.setdefault(event.file, bytearray())
    if event.kind == "truncate":
        del data[event.offset :]
        return
    if len(data) < event.offset:
        data.extend(bytes(event.offset - len(data)))
    data[event.offset : event.offset + len(event.data)] = event.data


def _sectors(event: Event) -> list[Event]:
    """A write as the sectors it may be torn into."""
    if event.kind != "write":
        return [event]
    parts: list[Event] = []
    at, data = event.offset, event.data
    while data:
        size = SECTOR - at % SECTOR
        parts.append(Event("write", event.file, at, data[:size]))
        at, data = at + size, data[size:]
    return parts


class RecordingVFS(apsw.VFS):
    """Registered under the recorder's name for as long as it is referenced."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        super().__init__(recorder.name, "")

    def xOpen(self, name: Any, flags: list[int]) -> _RecordedFile:
        return _RecordedFile(self.recorder, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        super().xDelete(filename, syncdir)
        self.recorder.events.append(Event("delete", Path(filename).name))


class _RecordedFile(apsw.VFSFile):
    def __init__(self, recorder: Recorder, name: Any, flags: list[int]) -> None:
        self._recorder = recorder
        self._name = Path(name.filename() if isinstance(name, apsw.URIFilename) else name or "temporary").name
        super().__init__("", name, flags)

    def xWrite(self, data: bytes, offset: int) -> None:
        super().xWrite(data, offset)
        self._recorder.events.append(Event("write", self._name, offset, bytes(data)))

    def xTruncate(self, newsize: int) -> None:
        super().xTruncate(newsize)
        self._recorder.events.append(Event("truncate", self._name, newsize))

    def xRead(self, amount: int, offset: int) -> bytes:
        self._recorder.reads += 1
        return super().xRead(amount, offset)

    def xSync(self, flags: int) -> None:
        self._recorder.gate.wait(60)
        if self._recorder.fail_sync:
            raise apsw.IOError("the disk refused to flush")
        super().xSync(flags)
        self._recorder.events.append(Event("sync", self._name))
