"""The way of a commit into JSONL files: sidecars first, one marker a commit last (rules K154, K155).

For a group, in this order: contents and answers, a file each; the lines of its records; with fsync all of these and
their directories are flushed; the fence is looked at; the markers of the group, in one write, which with fsync is
flushed; then the commits are acknowledged. What the markers do not confirm is a tail that the next open cuts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from perdure.kernel.errors import StaleEpochError, StorageError
from perdure.kernel.records import EntryRecord
from perdure.kernel.storage import Batch, Content, StoreInfo, VacuumReport
from perdure.storage import jsonl_compaction, jsonl_contents, jsonl_mailbox
from perdure.storage import jsonl_disk as disk
from perdure.storage.group_writer import GroupWriter
from perdure.storage.jsonl_image import Image, open_image, read_fence
from perdure.storage.jsonl_index import answer_path
from perdure.storage.jsonl_lines import KINDS, ContentsLine, Kind, LogLine, Marker, RecordLine, line_of
from perdure.storage.jsonl_reads import Live
from perdure.storage.refusal import refusal_of
from perdure.storage.worker import Worker

COMPACT_BYTES = 4 << 20
"""Less is not worth a compaction."""


class Commit:
    """One batch, encoded."""

    __slots__ = ("batch", "deleted", "entries", "future", "records", "seq", "size")

    def __init__(self, batch: Batch, future: asyncio.Future[None]) -> None:
        self.batch = batch
        self.seq = batch.seq
        self.deleted: Sequence[int] = batch.deleted
        self.future = future
        self.entries: list[tuple[EntryRecord, bytes]] = [(record, line_of(record)) for record in batch.entries]
        self.records: list[tuple[RecordLine, bytes]] = [(line, line_of(line)) for line in _lines(batch)]
        self.size = sum(len(line) for _, line in (*self.entries, *self.records))
        self.size += sum(len(content.data) for content in batch.contents)


def _lines(batch: Batch) -> list[RecordLine]:
    lines = [RecordLine(conversation=record) for record in batch.conversations]
    lines += [RecordLine(submission=record) for record in batch.submissions]
    lines += [RecordLine(task=record) for record in batch.tasks]
    for write in batch.documents:
        line = RecordLine(document=write.record, seq=batch.seq, version=write.version, reclaim=write.reclaim)
        if write.base is not None:
            line = msgspec.structs.replace(line, base=msgspec.Raw(write.base))
        elif write.ops is not None:
            line = msgspec.structs.replace(line, ops=msgspec.Raw(write.ops))
        lines.append(line)
    if batch.contents or batch.pins or batch.unpinned or batch.reclaimed:
        put = tuple((content.digest, len(content.data)) for content in batch.contents)
        change = ContentsLine(put, tuple(batch.pins), tuple(batch.unpinned), tuple(batch.reclaimed))
        lines.append(RecordLine(contents=change))
    return lines


class Writer(GroupWriter[Commit]):
    """What writes to an open store, with one thread to do it on."""

    def __init__(self, live: Live, worker: Worker, opening: StoreInfo, *, fsync: bool) -> None:
        super().__init__(live.path, worker, opening)
        self._live = live
        self._fsync = fsync
        self._unflushed: set[str] = set()
        """Without fsync: contents, answers and directories that a close or a compaction is to flush."""
        self._compact_at = 0
        """After one that failed: not before so much could be given back."""

    def _prepare(self, batch: Batch, future: asyncio.Future[None]) -> Commit:
        return Commit(batch, future)

    def _explained(self, error: BaseException, doing: str) -> StorageError:
        return disk.explained(error, self._path, doing)

    # --- on the thread ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Say in the log that it ends here, so that damage of its end is told from a torn tail. Flushed in any case:
        a store that was closed survives the loss of power."""
        image = self._live.image
        if self._failure is None and image is not None and image.is_newest():
            line = line_of(LogLine(after=image.log_end, closed=image.seq))
            self._flush_left()
            for kind in KINDS:
                disk.flush(image.files[kind])
            disk.write(image.log, image.log_end, line)
            disk.flush(image.log)

    def _flush_left(self) -> None:
        # A directory after what is in it.
        for path in sorted(self._unflushed, reverse=True):
            disk.flush_path(path)
        self._unflushed.clear()

    def _store(self, group: list[Commit]) -> int:
        with self._live.lock:
            image = self._live.get()
            self._check_fence(image, group[0].seq)
            try:
                stored = self._write(image, group)
            except BaseException:
                self._take_back(image)
                raise
        self._opening = msgspec.structs.replace(self._opening, epoch=image.epoch)
        return stored

    def _write(self, image: Image, group: list[Commit]) -> int:
        markers: list[Marker] = []
        ends = dict(image.ends)
        fresh: dict[str, Content] = {}
        for commit in group:
            why = refusal_of(image.index, commit.batch)
            if why is not None:
                if markers:
                    break
                raise StorageError(f"commit {commit.seq} was refused: {why}")
            fresh |= {c.digest: c for c in commit.batch.contents if not image.index.has_content(c.digest)}
            markers.append(_admit(image, commit, ends))
        group = group[: len(markers)]
        self._write_sidecars(image, group, fresh)
        self._check_fence(image, group[0].seq)
        lines = b"".join(line_of(LogLine(after=image.log_end, commit=marker)) for marker in markers)
        disk.write(image.log, image.log_end, lines)
        if self._fsync:
            disk.flush(image.log)
        image.log_end += len(lines)
        image.ends = ends
        with suppress(OSError):  # what is left over of these, the next open removes
            self._tidy(image, group, fresh)
        return len(group)

    def _write_sidecars(self, image: Image, group: list[Commit], fresh: dict[str, Content]) -> None:
        directories: set[str] = set()
        files = [jsonl_contents.path_of(image.path, digest) for digest in fresh]
        for content in fresh.values():
            directories |= jsonl_contents.put(image.path, content, flushing=self._fsync)
        for commit in group:
            if commit.batch.replies:
                jsonl_mailbox.put_answers(image.mailbox, commit.seq, commit.batch.replies, flushing=self._fsync)
                files += [answer_path(image.mailbox, reply.mail_id) for reply in commit.batch.replies]
                directories.add(image.mailbox)
        if not self._fsync:
            self._unflushed.update(files, directories)
        lines: dict[Kind, bytes] = {
            "entries": b"".join(line for commit in group for _, line in commit.entries),
            "records": b"".join(line for commit in group for _, line in commit.records),
        }
        for kind in KINDS:
            if lines[kind]:
                disk.write(image.files[kind], image.ends[kind], lines[kind])
        if self._fsync:
            for kind in KINDS:
                if lines[kind]:
                    disk.flush(image.files[kind])
            for directory in sorted(directories, reverse=True):
                disk.flush_directory(directory)

    def _tidy(self, image: Image, group: list[Commit], fresh: dict[str, Content]) -> None:
        """Remove what the group has confirmed that nobody reads any more."""
        stored = image.index.contents
        reclaimed = {digest for commit in group for digest in commit.batch.reclaimed} | fresh.keys()
        for digest in reclaimed - stored.keys():
            disk.remove(jsonl_contents.path_of(image.path, digest))
        answered = [reply.mail_id for commit in group for reply in commit.batch.replies]
        if answered:
            jsonl_mailbox.forget(image.mailbox, answered, image.index.answered)

    def _take_back(self, image: Image) -> None:
        """Read anew what is confirmed: the index may hold what was not stored. If that fails, nothing can be read."""
        end = image.log_end
        try:
            self._live.replace(open_image(self._path, write=True, upto=end))
        except (OSError, StorageError) as error:
            self._live.failure = self._explained(error, "read")
            self._live.replace(None)

    # --- the fence -------------------------------------------------------------------------------------------

    def _check_fence(self, image: Image, seq: int) -> None:
        """Whether the log is as this writer left it: whoever opens the store adds a line to it (rule K174)."""
        if not image.in_place() or image.unread():
            raise self._superseded(seq)

    def _superseded(self, seq: int) -> StorageError:
        mine, image, stored = self._opening, self._live.image, read_fence(self._path)
        if stored is not None and (stored.epoch, stored.writer) != (mine.epoch, mine.writer):
            return StaleEpochError(
                mine=mine.epoch, my_writer=mine.writer, stored=stored.epoch, stored_writer=stored.writer
            )
        if image is None or not image.in_place():
            return StorageError(
                f"{self._path} is no longer the directory this store has open: it, or a file in it, was moved, "
                "replaced or removed; put it back, then open the store again"
            )
        return StorageError(f"{image.log_path}: somebody who does not own the store has written to it before {seq}")

    # --- compaction ------------------------------------------------------------------------------------------

    def vacuum(self, *, within_ms: int, stopping: Callable[[], bool]) -> VacuumReport:
        """Compact between two groups. Raises StorageError, StaleEpochError; the store is as it was then."""
        if self._failure is not None:
            raise self._failure
        before = jsonl_compaction.taken(self._path)
        self._compact(jsonl_compaction.Bound(self._path, within_ms, stopping))
        return VacuumReport(before=before, after=jsonl_compaction.taken(self._path))

    def _after_group(self) -> None:
        image = self._live.get()
        waste = sum(image.index.dead.values()) + image.log_end
        if not worth_compacting(waste, sum(image.ends.values()) + image.log_end) or waste < self._compact_at:
            return
        try:
            self._compact(jsonl_compaction.Bound(self._path, None, lambda: False))
        except StaleEpochError:
            raise
        except StorageError:  # no room, as a rule: everything is as it was; it is tried again when more could be won
            self._compact_at = 2 * waste
        else:
            self._compact_at = 0

    def _compact(self, bound: jsonl_compaction.Bound) -> None:
        image = self._live.get()
        self._check_fence(image, image.seq)
        try:
            self._flush_left()
            fresh = jsonl_compaction.written(image, bound)
        except OSError as error:
            raise self._explained(error, "vacuumed, and is as it was") from error
        try:
            self._check_fence(image, image.seq)
        except BaseException:
            fresh.close()
            jsonl_compaction.forget(fresh)
            raise
        with self._live.lock:
            try:
                jsonl_compaction.put_in_place(fresh)
            except BaseException as error:  # which of the two is in place, only opening the store can tell
                fresh.close()
                self._failure = self._explained(error, "vacuumed")
                raise self._failure from error
            old = [image.file_path(kind) for kind in KINDS]
            self._live.replace(fresh)
        for path in old:
            with suppress(OSError):  # or at the next open
                disk.remove(path)


def worth_compacting(waste: int, all: int) -> bool:
    """Whether a compaction is due that gives back ``waste`` of all bytes. Where it is half of them, no more is written
    anew than was written since the last one."""
    return waste >= COMPACT_BYTES and 2 * waste >= all


def _admit(image: Image, commit: Commit, ends: dict[Kind, int]) -> Marker:
    """Put a commit into the index, where its lines are going to be."""
    for record, line in commit.entries:
        image.index.put_entry(record, ends["entries"], len(line))
        ends["entries"] += len(line)
    for record, line in commit.records:
        image.index.put_record(record, ends["records"], len(line))
        ends["records"] += len(line)
    batch = commit.batch
    marker = Marker(
        seq=batch.seq,
        at=batch.at,
        next_id=batch.next_id,
        entries=ends["entries"],
        records=ends["records"],
        epoch=batch.epoch,
        replies=tuple(reply.mail_id for reply in batch.replies),
        deleted=tuple(batch.deleted),
    )
    image.settle(marker)
    return marker
