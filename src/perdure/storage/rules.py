"""What every backend holds a batch and a read request to, before it does anything with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from perdure.kernel.errors import InvalidRead, NotFound, StorageError
from perdure.kernel.json import JsonValue
from perdure.kernel.records import ROOT_CONVERSATION, DocumentRecord, to_raw
from perdure.kernel.storage import MAX_CONTENT_BYTES, MAX_SCAN, Batch, Order, Segment

FIRST_ID = ROOT_CONVERSATION + 1
"""The next id of a new store: the root's is given away already (rule K24)."""

MAX_PENDING = 100_000
"""Commits that may wait for storage at once. Each has a caller waiting: this many mean a runaway."""

KEPT_ANSWERS = 1000
"""Answered mail stays readable until this many more requests have been answered."""

MAX_UNANSWERED = 10_000
"""Requests that may wait in a mailbox; a sender beyond that is refused."""

MAX_MAIL_BYTES = 1 << 20
"""The largest body of one request, encoded."""

MAX_ID = 2**63 - 1


def check_batch(batch: Batch, *, seq: int, next_id: int) -> None:
    """Refuse what no kernel in order would hand over, given the last staged seq and next id (rules K23, K26).

    Raises StorageError. What only stored records can tell (a duplicate id) the backend refuses itself.
    """
    if batch.seq != seq + 1:
        raise StorageError(f"commit {batch.seq} does not follow commit {seq}; the store was left as it is")
    if batch.next_id < next_id:
        raise StorageError(f"commit {batch.seq}: the next id went back from {next_id} to {batch.next_id}")
    fresh = [c.id for c in batch.conversations if c.id != ROOT_CONVERSATION]
    for entry in batch.entries:
        if entry.seq != batch.seq:
            raise StorageError(f"commit {batch.seq}: entry {entry.id} says it belongs to commit {entry.seq}")
        fresh.append(entry.id)
    for write in batch.documents:
        _check_document(batch.seq, write.record, base=write.base is not None, ops=write.ops is not None)
        if write.record.created_seq == batch.seq:
            fresh.append(write.record.id)
    for content in batch.contents:
        if len(content.data) > MAX_CONTENT_BYTES:
            raise StorageError(f"commit {batch.seq}: content {content.digest} has {len(content.data)} bytes")
    for id in fresh:
        if not next_id <= id < batch.next_id:
            raise StorageError(
                f"commit {batch.seq}: new record {id} is outside its ids, {next_id} to {batch.next_id - 1}"
            )


def _check_document(seq: int, record: DocumentRecord, *, base: bool, ops: bool) -> None:
    retiring = record.retired_seq is not None
    if (base and ops) or not (base or ops or retiring):
        raise StorageError(f"commit {seq}: document {record.id} must get a base or operations, or be retired")
    if retiring and record.retired_seq != seq:
        raise StorageError(f"commit {seq}: document {record.id} was retired in commit {record.retired_seq}")
    if record.created_seq == seq and not base:
        raise StorageError(f"commit {seq}: document {record.id} is new and has no base")


def check_takeover(takeover: bool, *, read_only: bool) -> None:
    """Raise ValueError for options of an open that contradict each other."""
    if takeover and read_only:
        raise ValueError("opening for reading takes nothing over; leave out takeover, or read_only")


def check_limit(limit: int, *, most: int = MAX_SCAN) -> None:
    """Raise InvalidRead unless ``1 <= limit <= most``."""
    if type(limit) is not int or not 1 <= limit <= most:
        raise InvalidRead(f"a scan returns 1 to {most} records, not {limit!r}; read page by page")


def check_order(order: Order) -> None:
    """Raise InvalidRead for what an untyped caller may take for an order."""
    if order not in ("ascending", "descending"):
        raise InvalidRead(f"entries are read in the order 'ascending' or 'descending', not {order!r}")


def check_live(live: bool | None) -> None:
    """Raise InvalidRead for what an untyped caller may take for a choice of tasks."""
    if live not in (True, False, None):
        raise InvalidRead(f"tasks are looked for with live=True, False or None, not {live!r}")


def check_bound(within_ms: int) -> None:
    """Raise ValueError unless a bound of a wait is one."""
    if type(within_ms) is not int or within_ms < 1:
        raise ValueError(f"a bound is a number of milliseconds, 1 or more, not {within_ms!r}")


def lineage_of(ancestry: Iterable[tuple[int, int | None]]) -> tuple[Segment, ...]:
    """The segments of a history (rule K117), from (conversation, the entry it was forked at), nearest first.

    A fork at an entry its parent itself inherited takes nothing of the parent's own entries.
    """
    owned: list[tuple[int, int | None]] = []
    cut: int | None = None
    for id, forked_at in ancestry:
        if cut is None or cut > (forked_at or 0):
            owned.append((id, cut))
        if forked_at is not None:
            cut = forked_at if cut is None else min(cut, forked_at)
    segments: list[Segment] = []
    first = 0
    for id, last in reversed(owned):
        segments.append(Segment(id, first, last))
        first = 0 if last is None else last + 1
    return tuple(segments)


def ranges(lineage: Sequence[Segment], first: int, last: int | None, order: Order) -> list[tuple[int, int, int]]:
    """The (conversation, lowest, highest id) to look through, in reading order: what the range touches."""
    top = MAX_ID if last is None else last
    touched = [
        (
            segment.conversation_id,
            max(segment.first, first),
            top if segment.last is None else min(segment.last, top),
        )
        for segment in lineage
        if segment.first <= top and (segment.last is None or segment.last >= first)
    ]
    return touched if order == "ascending" else touched[::-1]


def no_history(record: DocumentRecord, at: int | None) -> InvalidRead:
    """Latest history keeps nothing older than its last base."""
    return InvalidRead(f"{record.address} no longer has its state of commit {at}; only rewindable history keeps that")


def as_of(record: DocumentRecord, at: int | None) -> DocumentRecord:
    """The record as it was after commit ``at``: a retirement that came later had not happened."""
    if at is None or record.retired_seq is None:
        return record
    return msgspec.structs.replace(record, retired_at=None, retired_seq=None)


def mail_body(body: JsonValue) -> msgspec.Raw:
    """Encode the body of a request. Raises NotJson, and StorageError if it is too large."""
    raw = to_raw(body)
    if len(bytes(raw)) > MAX_MAIL_BYTES:
        raise StorageError(f"the body of a request is at most {MAX_MAIL_BYTES} bytes, not {len(bytes(raw))}")
    return raw


def mailbox_full() -> StorageError:
    return StorageError(f"{MAX_UNANSWERED} requests wait in the mailbox; open the store, so that it answers them")


def no_mail(mail_id: int) -> NotFound:
    return NotFound(
        f"there is no request {mail_id} in the mailbox, or its answer is older than the {KEPT_ANSWERS} kept"
    )
