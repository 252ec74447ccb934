"""Contents by hash: bytes of the files of workspaces, each kept once, found by its SHA-256 (K141, K200 to K206).

What refers to contents is unknown here: documents of the floors above do. So contents go by mark and sweep, and what
keeps the sweep safe from commits that settle meanwhile is one rule for those who refer: a commit that begins to refer
to a content carries it, or a pin holds that content until it settles. Reclaiming takes note of everything that pins
and commits name from its beginning on, and leaves all of that alone.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

from perdure.kernel.context import Context, bounded
from perdure.kernel.errors import InvalidRead, InvalidTransition, NotFound
from perdure.kernel.storage import (
    MAX_CONTENT_BYTES,
    MAX_CONTENTS,
    MAX_DIGESTS,
    MAX_SCAN,
    Batch,
    Content,
    StoredContent,
)

if TYPE_CHECKING:
    from perdure.kernel.session import Session

MAX_PUT_BYTES = 64 << 20
"""What one ``put`` takes."""

MAX_RIDING_BYTES = 1 << 20
"""Of the contents that ride in a commit."""

_COMMIT_BYTES = 4 << 20
"""Of the contents that one commit of a ``put`` stores."""

_STEP_BYTES = 64 << 20
"""Of the contents that one commit of a reclaim deletes: freeing a page reads it."""

_is_digest = re.compile(r"[0-9a-f]{64}").fullmatch


def digest_of(data: bytes) -> str:
    return sha256(data).hexdigest()


def verified(digest: str, data: bytes) -> Content:
    """Raises ValueError unless these are bytes that may be kept under this digest (rule K201)."""
    if len(data) > MAX_CONTENT_BYTES:
        raise ValueError(f"a content has at most {MAX_CONTENT_BYTES} bytes, not {len(data)}; keep a file in chunks")
    if digest_of(data) != digest:
        raise ValueError(f"these {len(data)} bytes are not content {digest!r}; put them under their own SHA-256")
    return Content(digest, data)


def check_digests(digests: Iterable[str], *, most: int) -> list[str]:
    """Each once, in order. Raises InvalidRead."""
    found = list(dict.fromkeys(digests))
    if len(found) > most:
        raise InvalidRead(f"at most {most} contents are asked for at once, not {len(found)}; ask in parts")
    for digest in found:
        if not _is_digest(digest):
            raise InvalidRead(f"{digest!r} is no digest; a digest is 64 hexadecimal digits in small letters")
    return found


class Contents:
    """The contents of a session's store; ``session.contents``.

    ``pin`` is a positive number, as a rule the id of the call that is going to refer to what it holds. A pin holds
    contents until a commit unpins it (``tx.unpin_contents``), also over crashes.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._held: dict[int, set[str]] = {}
        """By pin, what ``has`` was asked to hold and what a put is about to pin. It ends with the pin, or the session:
        nobody else could delete them meanwhile."""
        self._spared: set[str] | None = None
        """While contents are reclaimed: what pins and commits have named since it began, or held then."""
        self._going: set[str] = set()
        """What staged commits delete."""

    # --- reading -----------------------------------------------------------------------------------------------

    async def has(self, digests: Iterable[str], *, pin: int | None = None, context: Context | None = None) -> set[str]:
        """Which of these contents are stored; at most 10,000 are asked for.

        With ``pin`` they stay until it is unpinned or the session ends: what a later commit refers to without carrying
        it is asked for so. Raises InvalidRead.
        """
        session = self._session
        session.check_read()
        asked = check_digests(digests, most=MAX_DIGESTS)
        if pin is not None:
            self._hold(pin, asked)
        going = self._going.intersection(asked)
        found = await session.reading(session.storage.has_contents(asked), context)
        return found - going

    async def get(self, digest: str, *, context: Context | None = None) -> bytes:
        """Raises NotFound, InvalidRead; StorageCorrupt for bytes that are not what their digest says."""
        found = await self.get_many([digest], context=context)
        if digest not in found:
            raise NotFound(f"there is no content {digest}")
        return found[digest]

    async def get_many(self, digests: Iterable[str], *, context: Context | None = None) -> dict[str, bytes]:
        """Those of these contents that are stored; at most 64 are asked for. Raises as ``get`` does."""
        session = self._session
        session.check_read()
        asked = check_digests(digests, most=MAX_CONTENTS)
        return await session.reading(session.storage.contents(asked), context)

    async def pins(self, *, context: Context | None = None) -> list[int]:
        """Every pin that holds something, of earlier sessions too; each is of a call that was open when it ended."""
        session = self._session
        session.check_read()
        found: list[int] = []
        while True:
            after = found[-1] if found else 0
            page = await session.reading(session.storage.content_pins(after=after, limit=MAX_SCAN), context)
            found += page
            if len(page) < MAX_SCAN:
                return found

    # --- putting -----------------------------------------------------------------------------------------------

    async def put(self, items: Mapping[str, bytes], *, pin: int, context: Context | None = None) -> None:
        """Store those that are missing, by digest, and pin all of them. They are flushed once it returns.

        At most 64 MiB. What a commit refers to that is small rides in it for less: ``tx.put_content``. Raises
        ValueError for bytes that are not what their digest says, or too many; then nothing is stored. Cancelled, it
        may have stored some.
        """
        session = self._session
        session.check_read()
        size = sum(map(len, items.values()))
        if size > MAX_PUT_BYTES:
            raise ValueError(
                f"at most {MAX_PUT_BYTES} bytes of contents are put at once, not {size}; put them in parts"
            )
        contents: list[Content] = []
        for digest, data in items.items():
            contents.append(verified(digest, data))
            await asyncio.sleep(0)  # hashing a megabyte takes about one millisecond
        stored: set[str] = set()
        for at in range(0, len(contents), MAX_DIGESTS):
            stored |= await self.has([c.digest for c in contents[at : at + MAX_DIGESTS]], pin=pin, context=context)
        missing = [content for content in contents if content.digest not in stored]
        pinned: list[str] = sorted(stored)
        while missing or pinned:
            part: list[Content] = []
            size = 0
            while missing and (not part or size + len(missing[-1].data) <= _COMMIT_BYTES):
                size += len(missing[-1].data)
                part.append(missing.pop())
            async with session.commit(context=context) as tx:
                tx.pin_contents(pin, [*pinned, *(content.digest for content in part)], part)
            pinned = []

    def _hold(self, pin: int, digests: Sequence[str]) -> None:
        check_pin(pin)
        self._held.setdefault(pin, set()).update(digests)
        self.spare(digests)

    def spare(self, digests: Iterable[str]) -> None:
        """A commit is going to refer to these: whatever is being reclaimed, they are not."""
        if self._spared is not None:
            self._spared.update(digests)

    # --- the way of a commit -----------------------------------------------------------------------------------

    def staged(self, batch: Batch) -> None:
        self._going.update(batch.reclaimed)
        for pin in batch.unpinned:
            self._held.pop(pin, None)

    def settled(self, batch: Batch) -> None:
        self._going.difference_update(batch.reclaimed)

    # --- reclaiming --------------------------------------------------------------------------------------------

    async def reclaim(
        self, referenced: Callable[[], AsyncIterator[Sequence[str]]], *, context: Context | None = None
    ) -> int:
        """Delete the contents that nobody refers to and no pin holds (rules K204 to K206); returns how many.

        ``referenced()`` yields, in parts, the digests of every content that something stored refers to, as settled
        after it was called; all histories that can still be read count. If it raises nothing is deleted. Contents that
        pins or commits name after this began stay, whether it yields them or not. Deletes in commits of bounded size;
        given up or killed between two of them, what is left goes the next time.

        Raises InvalidTransition if it is going on already.
        """
        self._session.check_read()
        if self._spared is not None:
            raise InvalidTransition("contents are being reclaimed already; it is done once at a time")
        self._spared = set()
        try:
            return await bounded(self._reclaim(referenced), context)
        finally:
            self._spared = None

    async def _reclaim(self, referenced: Callable[[], AsyncIterator[Sequence[str]]]) -> int:
        session, spared = self._session, self._spared
        assert spared is not None, "set by the caller"
        async with session.commit():  # left once all has settled that was staged before: whoever looks then sees it
            for held in self._held.values():
                spared |= held
        async for page in self._pages(pinned=True):
            spared.update(content.digest for content in page)
        # As bytes they take half the memory: there may be millions.
        kept: set[bytes] = set()
        async for digests in referenced():
            kept.update(map(bytes.fromhex, digests))
        count = 0
        async for page in self._pages(pinned=False):
            idle = [content for content in page if bytes.fromhex(content.digest) not in kept]
            while idle:
                size, step = 0, list[str]()
                while idle and (not step or size + idle[-1].size <= _STEP_BYTES):
                    size += idle[-1].size
                    step.append(idle.pop().digest)
                async with session.commit() as tx:
                    gone = [digest for digest in step if digest not in spared]
                    tx.reclaim_contents(gone)
                count += len(gone)
        return count

    async def _pages(self, *, pinned: bool) -> AsyncIterator[list[StoredContent]]:
        session, after = self._session, ""
        while True:
            page = await session.reading(session.storage.content_scan(pinned=pinned, after=after, limit=MAX_SCAN))
            yield page
            if len(page) < MAX_SCAN:
                return
            after = page[-1].digest


def check_pin(pin: int) -> None:
    """Raises ValueError unless it can be a pin."""
    if not 1 <= pin < 2**63:
        raise ValueError(f"a pin is a positive number, as the id of a call, not {pin}")
