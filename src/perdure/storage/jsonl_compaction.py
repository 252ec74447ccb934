"""Writing a JSONL store anew without what nobody reads any more (rules K158, K221, K222); copies are made so too.

The live lines go into new sidecars, as they are; then a new log is made, whose header names them. All of it is
flushed, and read back whole, before the log takes the place of the old one, in one rename: before it the old files
are the store, after it the new ones. Whichever are left over, the next open removes.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import TypeVar

from msgspec import structs

from perdure.kernel.errors import StorageCorrupt, StorageError
from perdure.storage import jsonl_disk as disk
from perdure.storage.jsonl_image import Image
from perdure.storage.jsonl_index import Index, Place
from perdure.storage.jsonl_lines import (
    KINDS,
    LOG,
    ContentsLine,
    Header,
    Kind,
    RecordLine,
    Sidecar,
    line_of,
)

T = TypeVar("T")

_CHUNK = 1 << 20
_DIGESTS = 1000
"""Contents, or pins, that one line tells of."""
_LINES = 256
"""Between two looks whether it may go on."""
_NAME = re.compile(r"(?:entries|records)-([0-9]+)\.jsonl").fullmatch


class Bound:
    """How long it may take, and whether it may go on."""

    def __init__(self, path: str, within_ms: int | None, stopping: Callable[[], bool]) -> None:
        self._path = path
        self._within_ms = within_ms
        self._until = None if within_ms is None else time.monotonic() + within_ms / 1000
        self._stopping = stopping

    def check(self) -> None:
        """Raise StorageError if it may not."""
        why = ""
        if self._stopping():
            why = "the store is being closed"
        elif self._until is not None and time.monotonic() > self._until:
            why = f"it took longer than {self._within_ms} ms; allow it more"
        if why:
            raise StorageError(f"{self._path} was not vacuumed and is as it was: {why}")


def written(image: Image, bound: Bound) -> Image:
    """Write what is live beside the old files, and read it back. Raises OSError, StorageError, and leaves nothing."""
    header = image.header
    generation = 1 + max(generation_of(header.entries.name), generation_of(header.records.name))
    _check_room(image)
    log = LOG + disk.TEMPORARY
    try:
        write_anew(image, image.path, log=log, generation=generation, log_id=header.log_id, go_on=bound.check)
        fresh = Image(image.path, write=True, log=log)
        try:
            fresh.load()
            if _counts(fresh.index) != _counts(image.index):
                raise StorageCorrupt(
                    f"{image.path} was not vacuumed and is as it was: what was written is not the same"
                )
        except BaseException:
            fresh.close()
            raise
    except BaseException:
        with suppress(OSError):
            _remove(image.path, log, generation)
        raise
    return fresh


def put_in_place(fresh: Image) -> None:
    """Make it the store."""
    log = os.path.join(fresh.path, LOG)
    disk.rename(fresh.log_path, log)
    fresh.log_path = log
    disk.flush_directory(fresh.path)


def forget(fresh: Image) -> None:
    """Remove one that is not to take the place of the old."""
    with suppress(OSError):
        _remove(fresh.path, os.path.basename(fresh.log_path), generation_of(fresh.header.entries.name))


def write_anew(
    image: Image, directory: str, *, log: str, generation: int, log_id: str, go_on: Callable[[], None]
) -> None:
    """Write the sidecars and the log of everything that an image has, and flush them. Raises OSError, StorageError."""
    _remove(directory, log, generation)
    ends: dict[Kind, int] = {}
    for kind in KINDS:
        descriptor = disk.create(os.path.join(directory, sidecar_name(kind, generation)))
        try:
            ends[kind] = 0
            lines = _entries(image) if kind == "entries" else _records(image)
            for chunk in _chunks(lines, go_on):
                disk.write(descriptor, ends[kind], chunk)
                ends[kind] += len(chunk)
            disk.flush(descriptor)
        finally:
            os.close(descriptor)
    header = structs.replace(
        image.header,
        log_id=log_id,
        at=image.at,
        seq=image.seq,
        next_id=image.next_id,
        epoch=image.epoch,
        writer=image.writer,
        entries=Sidecar(sidecar_name("entries", generation), ends["entries"]),
        records=Sidecar(sidecar_name("records", generation), ends["records"]),
        answered=tuple(image.index.answered),
    )
    write_log(directory, log, header)
    # What the log names must be there before the log is.
    disk.flush_directory(directory)


def write_log(directory: str, log: str, header: Header) -> None:
    descriptor = disk.create(os.path.join(directory, log))
    try:
        disk.write(descriptor, 0, line_of(header))
        disk.flush(descriptor)
    finally:
        os.close(descriptor)


def sidecar_name(kind: Kind, generation: int) -> str:
    return f"{kind}-{generation}.jsonl"


def generation_of(name: str) -> int:
    """Of a sidecar; 0 for what is none."""
    found = _NAME(name)
    return 0 if found is None else int(found[1])


def left_over(image: Image) -> list[str]:
    """Files of compactions that did not come to their end, or to their last step."""
    named = {image.header.entries.name, image.header.records.name}
    return [
        os.path.join(image.path, name)
        for name in os.listdir(image.path)
        if name == LOG + disk.TEMPORARY or (generation_of(name) and name not in named)
    ]


def taken(path: str) -> int:
    """Bytes of all files of a store."""
    found = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                found += os.stat(os.path.join(directory, name)).st_size
    return found


def _remove(directory: str, log: str, generation: int) -> None:
    for name in (log, *(sidecar_name(kind, generation) for kind in KINDS)):
        disk.remove(os.path.join(directory, name))


def _entries(image: Image) -> Iterator[bytes]:
    return _copied(image, "entries", image.index.entries.rows.values())


def _records(image: Image) -> Iterator[bytes]:
    index = image.index
    for record in index.conversations.values():
        yield line_of(RecordLine(conversation=record))
    for put in _parts(list(index.contents.items()), _DIGESTS):
        yield line_of(RecordLine(contents=ContentsLine(put=tuple(put))))
    pins = [(pin, digest) for pin, digests in index.pins.items() for digest in sorted(digests)]
    for some in _parts(pins, _DIGESTS):
        yield line_of(RecordLine(contents=ContentsLine(pins=tuple(some))))
    places: list[Place] = [*index.submissions.rows.values(), *index.tasks.rows.values()]
    for history in index.documents.values():
        places += [*history.bases, *history.deltas]
    yield from _copied(image, "records", places)
    for history in index.documents.values():
        # Its writes tell of it as it was then; and there may be none.
        if history.record.retired_seq is not None:
            yield line_of(RecordLine(document=history.record))


def _copied(image: Image, kind: Kind, places: Iterable[Place]) -> Iterator[bytes]:
    """In the order in which they were written, so that a later one is read later."""
    return (image.line(kind, place) for place in sorted(places, key=attrgetter("offset")))


def _chunks(lines: Iterable[bytes], go_on: Callable[[], None]) -> Iterator[bytes]:
    chunk = bytearray()
    for number, line in enumerate(lines):
        if number % _LINES == 0:
            go_on()
        chunk += line
        if len(chunk) >= _CHUNK:
            yield bytes(chunk)
            chunk.clear()
    go_on()
    if chunk:
        yield bytes(chunk)


def _parts(all: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (all[at : at + size] for at in range(0, len(all), size))


def _counts(index: Index) -> tuple[int, ...]:
    """What two indexes of the same records have the same."""
    tables = (index.entries, index.submissions, index.tasks)
    return (
        len(index.conversations),
        *(len(table.rows) for table in tables),
        *(sum(map(len, table.marked.values())) for table in tables),
        len(index.requests),
        len(index.documents),
        sum(len(history.bases) + len(history.deltas) for history in index.documents.values()),
        sum(history.alive(None) for history in index.documents.values()),
        len(index.contents),
        sum(map(len, index.pins.values())),
        len(index.answered),
    )


def _check_room(image: Image) -> None:
    """Raise StorageError if it is known beforehand that there is not enough."""
    needed = sum(image.ends.values()) - sum(image.index.dead.values())
    found = os.statvfs(image.path)
    if found.f_bavail * found.f_frsize < needed:
        raise StorageError(
            f"{image.path} was not vacuumed and is as it was: it needs {needed} bytes there, and "
            f"{found.f_bavail * found.f_frsize} are free; free some, then vacuum again"
        )
