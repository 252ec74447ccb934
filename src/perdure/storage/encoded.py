"""One batch as a database takes it: the rows of each table, and what is done to contents."""

from __future__ import annotations

import asyncio
from typing import Generic, NamedTuple, TypeVar, cast

import msgspec

from perdure.kernel.storage import Batch
from perdure.storage.rows import Row, conversation_row, document_row, entry_row, submission_row, task_row

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode


class Tables(NamedTuple, Generic[T]):
    """Something of each table; of a commit its rows, the body last in each."""

    conversations: T
    entries: T
    submissions: T
    tasks: T
    documents: T
    bases: T
    """Of a document, by commit: its version and value."""
    deltas: T
    """Of a document, by commit: its operations."""


class ContentsChange:
    """What one commit does to contents."""

    __slots__ = ("contents", "pins", "reclaimed", "seq", "size", "unpinned")

    def __init__(self, batch: Batch) -> None:
        self.seq = batch.seq
        self.contents = [(bytes.fromhex(content.digest), content.data) for content in batch.contents]
        self.pins = [(pin, bytes.fromhex(digest)) for pin, digest in batch.pins]
        self.unpinned = [(pin,) for pin in batch.unpinned]
        self.reclaimed = [(bytes.fromhex(digest),) for digest in batch.reclaimed]
        self.size = sum(len(data) for _, data in self.contents)


class EncodedCommit:
    """A batch, encoded once, and the future that tells when it is stored."""

    __slots__ = (
        "at",
        "contents",
        "deleted",
        "epoch",
        "future",
        "next_id",
        "progress",
        "reclaim",
        "replies",
        "seq",
        "size",
        "tables",
    )

    def __init__(self, batch: Batch, future: asyncio.Future[None]) -> None:
        self.seq = batch.seq
        self.at = batch.at
        self.next_id = batch.next_id
        self.progress = batch.progress
        self.deleted = batch.deleted
        self.epoch = batch.epoch
        self.contents = (
            ContentsChange(batch) if batch.contents or batch.pins or batch.unpinned or batch.reclaimed else None
        )
        """None for nearly every commit."""
        self.future = future
        documents: list[Row] = []
        bases: list[Row] = []
        deltas: list[Row] = []
        self.reclaim: list[tuple[int, int]] = []
        """Documents of which everything before a commit goes."""
        for write in batch.documents:
            record = write.record
            if record.retired_seq is not None:
                # First: an address is given up before it is taken again.
                documents.insert(0, (*document_row(record), _encode(record)))
            elif record.created_seq == batch.seq:
                documents.append((*document_row(record), _encode(record)))
            if write.base is not None:
                bases.append((record.id, batch.seq, write.version, write.base))
            elif write.ops is not None:
                deltas.append((record.id, batch.seq, write.ops))
            if write.reclaim:
                self.reclaim.append((record.id, batch.seq + (write.base is None)))
        self.replies: list[Row] = [(batch.seq, int(r.ok), bytes(r.result), r.mail_id) for r in batch.replies]
        """Commit, ok, result and mail id."""
        self.tables = Tables(
            conversations=[(*conversation_row(record), _encode(record)) for record in batch.conversations],
            entries=[(*entry_row(record), _encode(record)) for record in batch.entries],
            submissions=[(*submission_row(record), _encode(record)) for record in batch.submissions],
            tasks=[(*task_row(record), _encode(record)) for record in batch.tasks],
            documents=documents,
            bases=bases,
            deltas=deltas,
        )
        self.size = sum(len(cast(bytes, row[-1])) for table in self.tables for row in table)
        if self.contents is not None:
            self.size += self.contents.size
