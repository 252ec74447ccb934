"""Format 1 of a JSONL store: what is in its files, line by line.

Every line is a JSON object that begins with a checksum of the rest of the line, so that damage is seen and named by
its offset, and ``jq`` reads it all the same. A place in a file is its offset in bytes.

    commits.jsonl     a header; then a line for each opening (its fence), each commit and each clean close
    entries-N.jsonl   an entry a line: the transcripts
    records-N.jsonl   everything else: {"conversation": ...}, {"submission": ...}, {"task": ...}, {"contents": ...},
                      {"document": ..., "seq": ..., "version": ..., "base": ...} or, of a change, "ops"
    mailbox/          ID.json: a request; ID.answer.json: what became of it
    contents/         contents by their SHA-256, as they were given
"""

from __future__ import annotations

from typing import Literal, TypeAlias
from zlib import crc32

import msgspec

from perdure.kernel.records import (
    MAX_RECORD_BYTES,
    ConversationRecord,
    DocumentRecord,
    EntryRecord,
    SubmissionRecord,
    TaskRecord,
)

LOG = "commits.jsonl"
MAILBOX = "mailbox"
CONTENTS = "contents"
STORE = "perdure-jsonl"
"""What the header says it is a header of."""

Kind: TypeAlias = Literal["entries", "records"]
KINDS: tuple[Kind, ...] = ("entries", "records")
"""The sidecars: what a commit writes before its marker."""

BEGIN = b'{"crc":"'
"""Of every line; nowhere else in one, for what is in a string is escaped."""
FRAME = 18
"""Bytes that a line has more than the JSON of its object."""
MAX_LINE = 4 * MAX_RECORD_BYTES
"""No line is longer: a write of a document beside its record, or a commit that deletes a million conversations."""

NOTHING = msgspec.Raw(b"")
"""In place of a value: there is none."""


class ContentsLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a commit does to contents, in this order."""

    put: tuple[tuple[str, int], ...] = ()
    """Digest and size."""
    pins: tuple[tuple[int, str], ...] = ()
    unpinned: tuple[int, ...] = ()
    reclaimed: tuple[str, ...] = ()


class RecordLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of: a conversation, a submission, a task, a write of a document, changes of contents."""

    conversation: ConversationRecord | None = None
    submission: SubmissionRecord | None = None
    task: TaskRecord | None = None
    document: DocumentRecord | None = None
    """As it is after the write; alone, it is only retired."""
    seq: int = 0
    """The commit of the write."""
    version: int = 0
    base: msgspec.Raw = NOTHING
    ops: msgspec.Raw = NOTHING
    reclaim: bool = False
    """What is older of this document is given up."""
    contents: ContentsLine | None = None


class Sidecar(msgspec.Struct, frozen=True):
    name: str
    end: int
    """What is confirmed of it."""


class Header(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first line of the log: what the store was when its files were made, empty or compacted."""

    store: str
    format: int
    log_id: str
    created_at: int
    at: int
    seq: int
    next_id: int
    epoch: int
    writer: str
    entries: Sidecar
    records: Sidecar
    answered: tuple[int, ...] = ()
    """Requests whose answers are kept, in the order of their answers."""


class Foreign(msgspec.Struct, frozen=True):
    """What a header of any format must have."""

    store: str
    format: int


class Marker(msgspec.Struct, frozen=True, omit_defaults=True):
    """Confirms a commit: everything in the sidecars up to these places."""

    seq: int
    at: int
    next_id: int
    entries: int
    records: int
    epoch: int | None = None
    replies: tuple[int, ...] = ()
    """Requests that it answers."""
    deleted: tuple[int, ...] = ()


class Fence(msgspec.Struct, frozen=True):
    """An opening (rule K170)."""

    epoch: int
    writer: str


class LogLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of: a commit, a fence, the commit at a clean close.

    ``after``: the log up to there was confirmed when this was written. So a line that cannot be read is a torn tail
    if no later one says more than its own place, and damage if one does.
    """

    after: int
    commit: Marker | None = None
    fence: Fence | None = None
    closed: int | None = None


_encode = msgspec.json.Encoder().encode
_decode_log = msgspec.json.Decoder(LogLine).decode
_decode_header = msgspec.json.Decoder(Header).decode
_decode_record = msgspec.json.Decoder(RecordLine).decode
_decode_entry = msgspec.json.Decoder(EntryRecord).decode


def line_of(value: msgspec.Struct) -> bytes:
    """A line, its end included."""
    rest = _encode(value)[1:]
    if b"\n" in rest:  # only where JSON that somebody else encoded has it between values
        rest = rest.replace(b"\n", b" ")
    return b'{"crc":"%08x",%b\n' % (crc32(rest), rest)


def is_whole(line: bytes) -> bool:
    """Whether a line is as it was written."""
    return line[-1:] == b"\n" and line[:18] == b'{"crc":"%08x",' % crc32(line[18:-1])


def log_line(line: bytes) -> LogLine | None:
    """None for a line that is not whole."""
    return _decode_log(line) if is_whole(line) else None


def header_line(line: bytes) -> Header | None:
    return _decode_header(line) if is_whole(line) else None


def record_line(line: bytes) -> RecordLine | None:
    return _decode_record(line) if is_whole(line) else None


def entry_line(line: bytes) -> EntryRecord | None:
    return _decode_entry(line) if is_whole(line) else None
