"""What the kernel asks of a store: one atomic commit, reads, a mailbox, maintenance.

A backend implements ``Storage``; the conformance suite in ``perdure.testing`` says whether it does so rightly.

Commits are handed over in order by a plain call that returns a future, and settle in that order: a backend may write
several together (group commit). A backend that fails one must fail every later one too. Reads see settled commits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeAlias

import msgspec

from perdure.kernel.records import (
    Address,
    ConversationRecord,
    DocumentRecord,
    EntryRecord,
    SubmissionRecord,
    SubmissionStatus,
    TaskRecord,
)

FORMAT_VERSION = 1
"""Of every store this code writes; an older one is migrated, a newer one refused."""

MAX_SCAN = 1000
"""The most records one scan returns; more are read page by page."""

MAX_CONTENT_BYTES = 1 << 20
"""Of one content: a file is kept in chunks of this size."""

MAX_DIGESTS = 10_000
"""Contents that one call asks for."""

MAX_CONTENTS = 64
"""Contents that one call reads."""

VACUUM_MS = 600_000
"""How long a vacuum may keep commits waiting unless it is told otherwise."""


class StoreInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a store says of itself once it is open."""

    format: int
    log_id: str
    """Random; a copy, import or restored backup gets a new one."""
    epoch: int
    writer: str
    seq: int
    """The number of the last commit; 0 for a new store."""
    next_id: int
    read_only: bool = False
    warnings: tuple[str, ...] = ()
    """What the host should hear of: files that others may read, a sentence each (rule K163)."""


class DocumentWrite(msgspec.Struct, frozen=True):
    """What one commit does to one document incarnation.

    Exactly one of: a base (``version`` and ``base``), a delta (``ops``), or neither (it is only retired).
    ``record`` is the incarnation as it is after the commit.
    """

    record: DocumentRecord
    version: int
    base: bytes | None = None
    """The whole value, encoded JSON."""
    ops: bytes | None = None
    """Encoded operations (kernel.ops) that lead from the value before to the value after."""
    reclaim: bool = False
    """With a base: what is older of this document will not be read again and may be dropped (latest history)."""


class MailReply(msgspec.Struct, frozen=True):
    """What became of one mailbox request, written in the commit that folds it in."""

    mail_id: int
    ok: bool
    result: msgspec.Raw


class Content(msgspec.Struct, frozen=True):
    """Bytes that are kept by their SHA-256 (rules K200 to K206). Who makes one has checked that they go together."""

    digest: str
    """64 hexadecimal digits, in small letters."""
    data: bytes


class StoredContent(msgspec.Struct, frozen=True):
    """What a scan says of a content."""

    digest: str
    size: int
    """Bytes, as they were given; what a backend makes of them may take less."""


class Batch(msgspec.Struct, frozen=True):
    """One commit: all of it is stored, or nothing."""

    seq: int
    """Exactly one more than the last; storage asserts it."""
    at: int
    next_id: int
    """No id at or above it has been given out in this store."""
    conversations: Sequence[ConversationRecord] = ()
    entries: Sequence[EntryRecord] = ()
    submissions: Sequence[SubmissionRecord] = ()
    """New or changed, whole."""
    tasks: Sequence[TaskRecord] = ()
    """New or changed, whole."""
    documents: Sequence[DocumentWrite] = ()
    replies: Sequence[MailReply] = ()
    progress: bool = False
    """Its only writes are throttled progress, or pins and what is reclaimed: it may be acknowledged before it is
    flushed."""
    deleted: Sequence[int] = ()
    """Conversations that are gone once it is stored, after all else it writes, with everything in them but what forks
    show (rules K192 and K196). Nothing in them is live, and ``documents`` retires what lives in them."""
    contents: Sequence[Content] = ()
    """Those that are stored already are left as they are."""
    pins: Sequence[tuple[int, str]] = ()
    """A pin and the digest of what it holds from now on, which is stored, or in ``contents``; twice is once."""
    unpinned: Sequence[int] = ()
    """Pins that hold nothing any more, after ``pins``."""
    epoch: int | None = None
    """What the epoch of the fence is from this commit on, which is stored under the present one (rule K207)."""
    reclaimed: Sequence[str] = ()
    """Digests of contents that go, after all of the above, unless a pin holds them; others than are stored are
    nothing."""


class StoredDocument(msgspec.Struct, frozen=True):
    """A document incarnation as stored: the newest base at or before the point read, and the deltas after it."""

    record: DocumentRecord
    version: int
    base: bytes
    deltas: Sequence[bytes] = ()


class Segment(msgspec.Struct, frozen=True):
    """One conversation's share of a history: its entries with ``first <= id <= last`` (None: open)."""

    conversation_id: int
    first: int
    last: int | None


class Mail(msgspec.Struct, frozen=True, kw_only=True):
    """A request another process left for the owner."""

    id: int
    kind: str
    body: msgspec.Raw
    posted_at: int


MAX_BIGGEST = 20
"""Conversations that a size report names."""


class RowCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many there are, each counted from the data."""

    conversations: int
    """Those of which forks still show something after they were deleted included."""
    entries: int
    submissions: int
    tasks: int
    documents: int
    """Incarnations, retired ones too."""
    states: int
    """Bases and deltas of documents."""
    contents: int
    mail: int
    """Requests that wait, and answered ones that are kept."""


class ConversationSize(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored of one conversation."""

    id: int
    entries: int
    """Its own; those it shows of what it was forked from are counted there."""
    bytes: int
    """Of its entries, submissions and tasks, and of its documents with their states."""
    deleted: bool = False
    """What forks still show of it (rule K196) is all that is left."""


class SizeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes, by what they are for (rule K220). ``total`` is what the store takes on disk (or in memory, about)."""

    total: int
    conversations: int
    entries: int
    submissions: int
    tasks: int
    documents: int
    """Their records, bases and deltas."""
    contents: int
    """As they were given, before anything made them smaller."""
    mailbox: int
    free: int
    """Of pages with nothing in them: what is written next uses them; or of superseded records. A vacuum gives them
    back."""
    log: int
    """Of the write-ahead log, which is part of ``total``; 0 where there is none."""
    rows: RowCounts
    biggest: tuple[ConversationSize, ...]
    """The conversations that take most, largest first, at most ``MAX_BIGGEST``."""


class VacuumReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a store took on disk before and after a vacuum, in bytes, its log included."""

    before: int
    after: int

    @property
    def freed(self) -> int:
        """Not negative: what others wrote meanwhile is not held against it."""
        return max(0, self.before - self.after)


class Anything:
    def __repr__(self) -> str:
        return "ANY"


ANY = Anything()
"""In a scan: do not look at this field."""

Order: TypeAlias = Literal["ascending", "descending"]


class Storage(Protocol):
    """One store. Not thread-safe: everything is called from the event loop that opened it."""

    async def open(
        self,
        *,
        read_only: bool = False,
        epoch: int | None = None,
        takeover: bool = False,
        writer: str,
        log_id: str,
        now: int,
    ) -> StoreInfo:
        """Create or open the store, own it, and write the fence (not when read_only).

        ``writer`` is this open's random identity; ``log_id`` becomes the store's if it is created now; ``now`` is
        wall time in ms. Without ``epoch`` the fence becomes the stored epoch + 1. ``takeover``: also of a store that
        somebody holds, alive or frozen; a backend that others cannot hold, or that has no way to, goes on without it
        (rules K177 to K179).
        Raises StorageBusy, StorageFormatError, StorageCorrupt, StaleEpochError, StorageError.
        """
        ...

    def commit(self, batch: Batch) -> asyncio.Future[None]:
        """Take over one commit, in call order. The future ends when it is stored (and flushed where promised)."""
        ...

    async def conversation(self, id: int) -> ConversationRecord | None: ...

    async def entry(self, id: int) -> EntryRecord | None: ...

    async def submission(self, id: int) -> SubmissionRecord | None: ...

    async def task(self, id: int) -> TaskRecord | None: ...

    async def request(self, conversation_id: int, request_id: str) -> SubmissionRecord | None:
        """The submission that holds this request id in this conversation, whatever became of it."""
        ...

    async def lineage(self, conversation_id: int) -> tuple[Segment, ...]:
        """The whole history of a conversation as segments, oldest first; disjoint and ascending in entry id.

        Empty if the conversation does not exist. One call, however long the chain of forks.
        """
        ...

    async def closure(self, conversation_id: int) -> list[int]:
        """The conversation and every one that tasks of the closure own, itself first (rule K192); empty if it does not
        exist."""
        ...

    async def entries(
        self,
        lineage: Sequence[Segment],
        *,
        first: int = 0,
        last: int | None = None,
        order: Order = "ascending",
        limit: int = MAX_SCAN,
    ) -> list[EntryRecord]:
        """Entries of a history with ``first <= id <= last``, in id order, at most ``limit``."""
        ...

    async def head(self, lineage: Sequence[Segment], *, last: int | None = None) -> EntryRecord | None:
        """The newest head marker of a history at or below ``last``."""
        ...

    async def conversations(
        self, *, owner: int | Anything | None = ANY, after: int = 0, limit: int = MAX_SCAN
    ) -> list[ConversationRecord]:
        """Conversations with id > ``after``, in id order; ``owner=None`` finds the ownerless ones."""
        ...

    async def tasks(
        self,
        *,
        conversation_id: int | None = None,
        kind: str | None = None,
        live: bool | None = None,
        after: int = 0,
        limit: int = MAX_SCAN,
    ) -> list[TaskRecord]:
        """Tasks with id > ``after``, in id order. Finding the live ones costs what is live."""
        ...

    async def submissions(
        self,
        *,
        conversation_id: int | None = None,
        status: SubmissionStatus | None = None,
        after: int = 0,
        limit: int = MAX_SCAN,
    ) -> list[SubmissionRecord]:
        """Submissions with id > ``after``, in id order. Finding queued and placed ones costs what there is of them."""
        ...

    async def documents(self, scope: str, scope_id: int, *, at: int | None = None) -> list[DocumentRecord]:
        """The incarnations alive in a scope after commit ``at`` (None: now), in id order."""
        ...

    async def document(self, address: Address, *, at: int | None = None) -> StoredDocument | None:
        """What lives at an address after commit ``at`` (None: now). A past commit is exact for rewindable documents."""
        ...

    async def has_contents(self, digests: Sequence[str]) -> set[str]:
        """Which of these contents are stored; at most ``MAX_DIGESTS`` are asked for."""
        ...

    async def contents(self, digests: Sequence[str]) -> dict[str, bytes]:
        """Those of these contents that are stored, by digest; at most ``MAX_CONTENTS`` are asked for.

        Raises StorageCorrupt for one whose bytes are not what its digest says.
        """
        ...

    async def content_scan(self, *, pinned: bool, after: str = "", limit: int = MAX_SCAN) -> list[StoredContent]:
        """Contents with a digest > ``after``, in order: those that a pin holds, or those that none does."""
        ...

    async def content_pins(self, *, after: int = 0, limit: int = MAX_SCAN) -> list[int]:
        """Pins > ``after`` that hold something, in order."""
        ...

    async def mail(self, *, after: int = 0, limit: int = 100) -> list[Mail]:
        """Requests that no commit has answered yet, oldest first."""
        ...

    def on_mail(self, callback: Callable[[], None]) -> None:
        """Have ``callback()`` called on the event loop when mail may have come (it may be called for nothing)."""
        ...

    async def check(self) -> list[str]:
        """An integrity check: what is wrong, one line each; empty when all is well."""
        ...

    async def size(self) -> SizeReport:
        """What takes how much, by reading every record once, beside whatever else goes on (rule K220)."""
        ...

    async def vacuum(self, *, within_ms: int = VACUUM_MS) -> VacuumReport:
        """Give back what deleted and reclaimed records took; no record changes (rules K146, K221 to K224).

        Commits wait for it meanwhile, at most about ``within_ms``; then, and if there is no room to work in, the store
        is left as it was. Raises StorageError, StaleEpochError.
        """
        ...

    async def close(self) -> None:
        """Let accepted commits settle, release the lock. Closing twice does nothing."""
        ...
