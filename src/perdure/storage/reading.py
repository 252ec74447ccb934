"""The reads of a store whose backend does them on a thread: what a request must be, and one method each."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from perdure.kernel.contents import check_digests
from perdure.kernel.records import (
    Address,
    ConversationRecord,
    DocumentRecord,
    EntryRecord,
    SubmissionRecord,
    SubmissionStatus,
    TaskRecord,
)
from perdure.kernel.storage import (
    ANY,
    MAX_CONTENTS,
    MAX_DIGESTS,
    MAX_SCAN,
    Anything,
    Mail,
    Order,
    Segment,
    StoredContent,
    StoredDocument,
)
from perdure.storage.rules import check_limit, check_live, check_order

T = TypeVar("T")

MAIL_POLL_SECONDS = 0.15
"""How often an open store looks for mail, so that it is folded in within 250 ms (rule K74)."""


class Reads(Protocol):
    """What a backend answers on its thread, as one commit left it; the requests were checked."""

    def conversation(self, id: int) -> ConversationRecord | None: ...
    def entry(self, id: int) -> EntryRecord | None: ...
    def submission(self, id: int) -> SubmissionRecord | None: ...
    def task(self, id: int) -> TaskRecord | None: ...
    def request(self, conversation_id: int, request_id: str) -> SubmissionRecord | None: ...
    def lineage(self, conversation_id: int) -> tuple[Segment, ...]: ...
    def closure(self, conversation_id: int) -> list[int]: ...
    def entries(
        self, lineage: Sequence[Segment], first: int, last: int | None, order: Order, limit: int
    ) -> list[EntryRecord]: ...
    def head(self, lineage: Sequence[Segment], last: int | None) -> EntryRecord | None: ...
    def conversations(self, owner: int | Anything | None, after: int, limit: int) -> list[ConversationRecord]: ...
    def tasks(
        self, conversation_id: int | None, kind: str | None, live: bool | None, after: int, limit: int
    ) -> list[TaskRecord]: ...
    def submissions(
        self, conversation_id: int | None, status: str | None, after: int, limit: int
    ) -> list[SubmissionRecord]: ...
    def documents(self, scope: str, scope_id: int, at: int | None) -> list[DocumentRecord]: ...
    def document(self, address: Address, at: int | None) -> StoredDocument | None: ...
    def has_contents(self, digests: Sequence[str]) -> set[str]: ...
    def contents(self, digests: Sequence[str]) -> dict[str, bytes]: ...
    def content_scan(self, pinned: bool, after: str, limit: int) -> list[StoredContent]: ...
    def content_pins(self, after: int, limit: int) -> list[int]: ...
    def mail(self, after: int, limit: int) -> list[Mail]: ...


class ThreadedReads(ABC):
    """The reading methods of ``Storage``, for a backend that says how one is done."""

    @abstractmethod
    async def _read(self, read: Callable[[Reads], T]) -> T: ...

    async def conversation(self, id: int) -> ConversationRecord | None:
        return await self._read(lambda reader: reader.conversation(id))

    async def entry(self, id: int) -> EntryRecord | None:
        return await self._read(lambda reader: reader.entry(id))

    async def submission(self, id: int) -> SubmissionRecord | None:
        return await self._read(lambda reader: reader.submission(id))

    async def task(self, id: int) -> TaskRecord | None:
        return await self._read(lambda reader: reader.task(id))

    async def request(self, conversation_id: int, request_id: str) -> SubmissionRecord | None:
        return await self._read(lambda reader: reader.request(conversation_id, request_id))

    async def lineage(self, conversation_id: int) -> tuple[Segment, ...]:
        return await self._read(lambda reader: reader.lineage(conversation_id))

    async def closure(self, conversation_id: int) -> list[int]:
        return await self._read(lambda reader: reader.closure(conversation_id))

    async def entries(
        self,
        lineage: Sequence[Segment],
        *,
        first: int = 0,
        last: int | None = None,
        order: Order = "ascending",
        limit: int = MAX_SCAN,
    ) -> list[EntryRecord]:
        check_limit(limit)
        check_order(order)
        return await self._read(lambda reader: reader.entries(lineage, first, last, order, limit))

    async def head(self, lineage: Sequence[Segment], *, last: int | None = None) -> EntryRecord | None:
        return await self._read(lambda reader: reader.head(lineage, last))

    async def conversations(
        self, *, owner: int | Anything | None = ANY, after: int = 0, limit: int = MAX_SCAN
    ) -> list[ConversationRecord]:
        check_limit(limit)
        return await self._read(lambda reader: reader.conversations(owner, after, limit))

    async def tasks(
        self,
        *,
        conversation_id: int | None = None,
        kind: str | None = None,
        live: bool | None = None,
        after: int = 0,
        limit: int = MAX_SCAN,
    ) -> list[TaskRecord]:
        check_limit(limit)
        check_live(live)
        return await self._read(lambda reader: reader.tasks(conversation_id, kind, live, after, limit))

    async def submissions(
        self,
        *,
        conversation_id: int | None = None,
        status: SubmissionStatus | None = None,
        after: int = 0,
        limit: int = MAX_SCAN,
    ) -> list[SubmissionRecord]:
        check_limit(limit)
        return await self._read(lambda reader: reader.submissions(conversation_id, status, after, limit))

    async def documents(self, scope: str, scope_id: int, *, at: int | None = None) -> list[DocumentRecord]:
        return await self._read(lambda reader: reader.documents(scope, scope_id, at))

    async def document(self, address: Address, *, at: int | None = None) -> StoredDocument | None:
        return await self._read(lambda reader: reader.document(address, at))

    # --- contents --------------------------------------------------------------------------------------------

    async def has_contents(self, digests: Sequence[str]) -> set[str]:
        asked = check_digests(digests, most=MAX_DIGESTS)
        return await self._read(lambda reader: reader.has_contents(asked))

    async def contents(self, digests: Sequence[str]) -> dict[str, bytes]:
        asked = check_digests(digests, most=MAX_CONTENTS)
        return await self._read(lambda reader: reader.contents(asked))

    async def content_scan(self, *, pinned: bool, after: str = "", limit: int = MAX_SCAN) -> list[StoredContent]:
        check_limit(limit)
        return await self._read(lambda reader: reader.content_scan(pinned, after, limit))

    async def content_pins(self, *, after: int = 0, limit: int = MAX_SCAN) -> list[int]:
        check_limit(limit)
        return await self._read(lambda reader: reader.content_pins(after, limit))

    # --- mailbox ---------------------------------------------------------------------------------------------

    async def mail(self, *, after: int = 0, limit: int = 100) -> list[Mail]:
        check_limit(limit)
        return await self._read(lambda reader: reader.mail(after, limit))


class MailPoll:
    """Looks for mail again and again, in the running loop, and tells of any newer than it knew."""

    def __init__(self, newest: Callable[[], asyncio.Future[tuple[int, int]]], *, every: float | None = None) -> None:
        """``newest``: begins to look for the newest request without an answer; its future has a commit and the id.

        ``every``: seconds between two looks, instead of ``MAIL_POLL_SECONDS``.
        """
        self._newest = newest
        self._every = every
        self._callback: Callable[[], None] | None = None
        self._seen = 0
        self._next: asyncio.TimerHandle | None = None

    def begin(self, callback: Callable[[], None]) -> None:
        """Have ``callback()`` called, instead of whoever was to be before."""
        self.stop()
        self._callback = callback
        self._seen = 0
        self.look()

    def stop(self) -> None:
        self._callback = None
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def look(self) -> None:
        """Now, and not only when it is time."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._callback is not None:
            self._newest().add_done_callback(self._note)

    def _note(self, looking: asyncio.Future[tuple[int, int]]) -> None:
        if self._callback is None or looking.cancelled():
            return
        if looking.exception() is not None:
            self._callback()  # whoever reads the mail now meets the error
        elif (newest := looking.result()[1]) > self._seen:
            self._seen = newest
            self._callback()
        if self._next is not None:
            self._next.cancel()  # begun anew while this look was under way
        self._next = looking.get_loop().call_later(self._every or MAIL_POLL_SECONDS, self.look)
