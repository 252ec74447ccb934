"""A JSONL store as it is on the disk: opened, read once from its first line to its last, and followed from there.

Reading is what tells whether a store is whole, so it changes nothing. What is not confirmed is left alone; what is
confirmed and not there is damage, named by file and offset (rules K156, K157).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import BinaryIO

import msgspec

from perdure.kernel.errors import StorageCorrupt, StorageError, StorageFormatError
from perdure.kernel.storage import FORMAT_VERSION, StoreInfo
from perdure.storage.jsonl_index import Index, Place
from perdure.storage.jsonl_lines import (
    BEGIN,
    KINDS,
    LOG,
    MAILBOX,
    MAX_LINE,
    STORE,
    Fence,
    Foreign,
    Header,
    Kind,
    LogLine,
    Marker,
    Sidecar,
    entry_line,
    header_line,
    is_whole,
    log_line,
    record_line,
)

_ATTEMPTS = 10
"""How often a compaction may put other files in place while the store is opened for reading."""
_TAIL = 1 << 16


class Image:
    """An open store: its files, its index, and how far it has been read."""

    def __init__(self, path: str, *, write: bool, log: str = LOG, go_on: Callable[[], None] = lambda: None) -> None:
        """Open the files and read the header; ``load`` reads the rest. Raises OSError, StorageError.

        ``go_on`` is called again and again while it is read, and raises if it is not to be.
        """
        self.path = path
        self._go_on = go_on
        self.log_path = os.path.join(path, log)
        self.mailbox = os.path.join(path, MAILBOX)
        self.index = Index(self.mailbox)
        self.files: dict[Kind, int] = {}
        mode = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC
        self.log = os.open(self.log_path, mode)
        try:
            with _reading(self.log) as file:
                first = file.readline(MAX_LINE)
            self.header = judge_header(self.log_path, first)
            self.log_end = len(first)
            for kind in KINDS:
                self.files[kind] = os.open(self.file_path(kind), mode)
        except BaseException:
            self.close()
            raise
        header = self.header
        self.ends: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self.seq, self.next_id, self.at = header.seq, header.next_id, header.at
        self.epoch, self.writer = header.epoch, header.writer
        self.closed = True
        """Whoever wrote the last line has flushed everything: by a clean close, or in making these files."""
        self.index.answered = dict.fromkeys(header.answered, header.seq)

    def close(self) -> None:
        for descriptor in (self.log, *self.files.values()):
            os.close(descriptor)
        self.files = {}

    def file_path(self, kind: Kind) -> str:
        sidecar: Sidecar = getattr(self.header, kind)
        return os.path.join(self.path, sidecar.name)

    def info(self, *, read_only: bool) -> StoreInfo:
        return StoreInfo(
            format=self.header.format,
            log_id=self.header.log_id,
            epoch=self.epoch,
            writer=self.writer,
            seq=self.seq,
            next_id=self.next_id,
            read_only=read_only,
        )

    # --- reading it whole --------------------------------------------------------------------------------------

    def load(self, *, upto: int | None = None) -> None:
        """Read everything that is confirmed, or what the log confirms up to an offset. Raises StorageCorrupt."""
        with ExitStack() as stack:
            readers = self._readers(stack)
            for kind in KINDS:
                self._confirm(readers, kind, getattr(self.header, kind).end, self.header.seq, exact=False)
        self.follow(upto=upto)

    def follow(self, *, upto: int | None = None) -> None:
        """Read what was confirmed since. Raises StorageCorrupt."""
        with ExitStack() as stack:
            file = stack.enter_context(_reading(self.log, self.log_end))
            readers = self._readers(stack)
            while upto is None or self.log_end < upto:
                raw = file.readline(MAX_LINE)
                if not raw:
                    break
                line = self._log_line(raw)
                if line is None:
                    damage = self._judge_tail(raw, file)
                    file.seek(self.log_end)
                    if damage is not None and file.readline(MAX_LINE) != raw:
                        file.seek(self.log_end)  # its owner was writing it
                        continue
                    if damage is not None:
                        raise damage
                    break
                if line.after > self.log_end:
                    raise self._damaged(f"written behind offset {line.after}, so that lines before it are missing")
                self._go_on()
                self._take(line, readers)
                self.log_end += len(raw)

    def _readers(self, stack: ExitStack) -> dict[Kind, BinaryIO]:
        return {kind: stack.enter_context(_reading(self.files[kind], self.ends[kind])) for kind in KINDS}

    def _log_line(self, raw: bytes) -> LogLine | None:
        try:
            return log_line(raw)
        except msgspec.MsgspecError as error:
            raise self._damaged(f"no line of a log ({error})") from error

    def _judge_tail(self, raw: bytes, file: BinaryIO) -> StorageCorrupt | None:
        """A line that is not whole is a torn tail, unless something behind it says that it was confirmed."""
        while raw:
            # What took the end of the line before has not taken this one.
            line = self._log_line(raw[max(0, raw.rfind(BEGIN)) :])
            if line is not None and line.after > self.log_end:
                return self._damaged("not what was written, and later lines confirm it")
            raw = file.readline(MAX_LINE)
        return None

    def _take(self, line: LogLine, readers: dict[Kind, BinaryIO]) -> None:
        self.closed = line.closed is not None
        if line.fence is not None:
            self.epoch, self.writer = line.fence.epoch, line.fence.writer
        elif line.commit is not None:
            marker = line.commit
            if marker.seq != self.seq + 1:
                raise self._damaged(f"of commit {marker.seq}, and the one before is {self.seq}")
            for kind in KINDS:
                self._confirm(readers, kind, getattr(marker, kind), marker.seq, exact=True)
            self.settle(marker)

    def settle(self, marker: Marker) -> None:
        """Its records are in the index."""
        self.index.settle(marker)
        self.seq, self.next_id, self.at = marker.seq, marker.next_id, marker.at
        if marker.epoch is not None:
            self.epoch = max(self.epoch, marker.epoch)

    def _confirm(self, readers: dict[Kind, BinaryIO], kind: Kind, end: int, seq: int, *, exact: bool) -> None:
        """Read a sidecar up to ``end``, which commit ``seq`` confirms."""
        if end < self.ends[kind]:
            raise self._damaged(f"of commit {seq}, which ends {kind} at {end}, before {self.ends[kind]}")
        path = self.file_path(kind)
        while (offset := self.ends[kind]) < end:
            raw = readers[kind].readline(min(MAX_LINE, end - offset))
            try:
                if not self._put(kind, raw, seq if exact else None):
                    size = os.fstat(self.files[kind]).st_size
                    why = f"the file has only {size} bytes" if size < end else "it is not what was written"
                    raise damaged(path, offset, f"{why}, and commit {seq} confirms it up to {end}")
            except msgspec.MsgspecError as error:
                raise damaged(path, offset, f"it is no record ({error})") from error
            self.ends[kind] = offset + len(raw)

    def _put(self, kind: Kind, raw: bytes, seq: int | None) -> bool:
        offset = self.ends[kind]
        if kind == "entries":
            entry = entry_line(raw)
            if entry is None or (seq is not None and entry.seq != seq):
                return False
            self.index.put_entry(entry, offset, len(raw))
        else:
            record = record_line(raw)
            if record is None:
                return False
            self.index.put_record(record, offset, len(raw))
        return True

    def _damaged(self, why: str) -> StorageCorrupt:
        return damaged(self.log_path, self.log_end, f"it is {why}")

    # --- reading a line ----------------------------------------------------------------------------------------

    def line(self, kind: Kind, place: Place) -> bytes:
        """A line as it stands in a sidecar. Raises StorageCorrupt if it is not what was written."""
        raw = os.pread(self.files[kind], place.length, place.offset)
        if len(raw) != place.length or not is_whole(raw):
            raise damaged(self.file_path(kind), place.offset, "it is no longer what was written")
        return raw

    # --- whether it is in its place ----------------------------------------------------------------------------

    def in_place(self) -> bool:
        """Whether the paths still name the files that are open."""
        names = [(self.log_path, self.log), *((self.file_path(kind), self.files[kind]) for kind in KINDS)]
        with suppress(FileNotFoundError, NotADirectoryError):
            return all(os.path.samestat(os.stat(path), os.fstat(descriptor)) for path, descriptor in names)
        return False

    def is_newest(self) -> bool:
        """Whether nothing was confirmed since it was read."""
        return self.in_place() and not self.unread()

    def unread(self) -> int:
        """Bytes of the log beyond what has been read: unconfirmed, or written by somebody else."""
        return os.fstat(self.log).st_size - self.log_end


def damaged(path: str, offset: int, why: str) -> StorageCorrupt:
    return StorageCorrupt(f"{path} is damaged at offset {offset}: {why}; restore the store from a backup")


def open_image(path: str, *, write: bool, upto: int | None = None, go_on: Callable[[], None] = lambda: None) -> Image:
    """Open and read the store at ``path``, which exists. Raises StorageError, OSError."""
    image = _opened(path, write=write, go_on=go_on)
    try:
        image.load(upto=upto)
    except BaseException:
        image.close()
        raise
    return image


def _opened(path: str, *, write: bool, go_on: Callable[[], None]) -> Image:
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return Image(path, write=write, go_on=go_on)
        except FileNotFoundError as error:
            # A compaction has put other files in place, or it is gone.
            if attempt == _ATTEMPTS or not os.path.exists(os.path.join(path, LOG)):
                why = f"{error.filename} is gone, and the store needs it; restore the store from a backup"
                raise StorageCorrupt(why) from error
    raise AssertionError("the last attempt returns or raises")


def examine(path: str) -> bool:
    """Whether a store of our format is at ``path``, by a look at its header, the end of its log and the sizes of its
    files (rule K164); False if nothing is, or an empty directory.

    Raises StorageFormatError (foreign, newer), StorageCorrupt (truncated), StorageError (unreadable).
    """
    log = os.path.join(path, LOG)
    try:
        try:
            names = os.listdir(path)
        except FileNotFoundError:
            if os.path.islink(path):
                raise StorageError(f"{path} is a link to nowhere; remove it or restore what it names") from None
            return False
        except NotADirectoryError:
            raise StorageFormatError(
                f"{path} is a file; a JSONL store is a directory, and SqliteStorage opens stores in one file"
            ) from None
        if not names:
            return False
        if LOG not in names:
            raise StorageFormatError(
                f"{path} is a directory without {LOG}, and so no store; give the store another path"
            )
        descriptor = os.open(log, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with _reading(descriptor) as file:
                first = file.readline(MAX_LINE)
            header = judge_header(log, first)
            last = _last_marker(descriptor, len(first))
        finally:
            os.close(descriptor)
        for kind in KINDS:
            sidecar: Sidecar = getattr(header, kind)
            end = sidecar.end if last is None else getattr(last, kind)
            name = os.path.join(path, sidecar.name)
            try:
                size = os.stat(name).st_size
            except FileNotFoundError:
                if os.path.exists(log) and not _same_header(log, first):
                    return examine(path)  # compacted meanwhile
                raise StorageCorrupt(
                    f"{name} is gone, and the store needs it; restore the store from a backup"
                ) from None
            if size < end:
                raise damaged(name, size, f"it ends there, and {LOG} confirms it up to {end}")
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error.strerror})") from error
    return True


def judge_header(log: str, first: bytes) -> Header:
    """Raises StorageFormatError, StorageCorrupt."""
    if not first:
        raise StorageCorrupt(f"{log} is empty; restore the store from a backup")
    try:
        foreign = msgspec.json.decode(first, type=Foreign)
    except msgspec.MsgspecError:
        if first.startswith(BEGIN):
            raise damaged(log, 0, "its header is not what was written") from None
        foreign = None
    if foreign is None or foreign.store != STORE:
        raise StorageFormatError(f"{log} is not the log of a store; give the store another path")
    if foreign.format > FORMAT_VERSION:
        raise StorageFormatError(
            f"{log} has format {foreign.format}, this code reads up to format {FORMAT_VERSION}; open it with a newer "
            "perdure"
        )
    if foreign.format < 1:
        raise StorageFormatError(f"{log} has format {foreign.format}, which never existed")
    try:
        header = header_line(first)
    except msgspec.MsgspecError as error:
        raise damaged(log, 0, f"its header is none ({error})") from error
    if header is None:
        raise damaged(log, 0, "its header is not what was written")
    return header


def read_fence(path: str) -> Fence | None:
    """Who opened the store at ``path`` last, by its log alone; None if that cannot be told."""
    with suppress(OSError, StorageError, msgspec.MsgspecError), open(os.path.join(path, LOG), "rb") as file:
        header = judge_header(path, file.readline(MAX_LINE))
        found = Fence(header.epoch, header.writer)
        for raw in iter(lambda: file.readline(MAX_LINE), b""):
            line = log_line(raw)
            if line is None:
                break
            if line.fence is not None:
                found = line.fence
            elif line.commit is not None and line.commit.epoch is not None:
                found = Fence(max(found.epoch, line.commit.epoch), found.writer)
        return found
    return None


def last_seq(path: str) -> int:
    """The last commit that is confirmed, by the log alone. Raises OSError, StorageError."""
    with open(os.path.join(path, LOG), "rb") as file:
        first = file.readline(MAX_LINE)
        header = judge_header(os.path.join(path, LOG), first)
        last = _last_marker(file.fileno(), len(first))
    return header.seq if last is None else last.seq


def _last_marker(descriptor: int, begin: int) -> Marker | None:
    """The last whole one of a log whose header ends at ``begin``, found from the end."""
    size = os.fstat(descriptor).st_size
    tail = _TAIL
    while True:
        start = max(begin, size - tail)
        for raw in _backwards(os.pread(descriptor, size - start, start), whole=start == begin):
            with suppress(msgspec.MsgspecError):  # what it is, reading the store tells
                line = log_line(raw)
                if line is not None and line.commit is not None:
                    return line.commit
        if start == begin:
            return None
        tail *= 8


def _backwards(data: bytes, *, whole: bool) -> Iterator[bytes]:
    """Lines, the last first; the first only if ``whole``, for otherwise it may be the end of one."""
    lines = data.splitlines(keepends=True)
    return reversed(lines if whole else lines[1:])


def _same_header(log: str, first: bytes) -> bool:
    with open(log, "rb") as file:
        return file.read(len(first)) == first


def _reading(descriptor: int, offset: int = 0) -> BinaryIO:
    """A buffered reader of an open file; closing it leaves that open."""
    file = open(descriptor, "rb", closefd=False)  # noqa: SIM115 - the caller's
    file.seek(offset)
    return file
