"""From a Space to the log: what a scan found, as changes of an image, and the contents they need (S137 to S140)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from perdure.harness.environment import EnvironmentRefuses
from perdure.kernel.contents import MAX_RIDING_BYTES
from perdure.kernel.session import Session
from perdure.kernel.storage import MAX_DIGESTS
from perdure.kernel.transaction import Transaction
from perdure.spaces import image, wire
from perdure.spaces.client import SpaceClient
from perdure.spaces.errors import SpaceError
from perdure.spaces.image import Change, Directory, Entry, File, Link, Tree
from perdure.spaces.wire import ContentRange, ImageName, Scan, Unfit

_FETCH_BYTES = 16 << 20
"""What one request for contents asks for."""
_FETCH_ITEMS = 200
"""Places that one request names: as many of the longest paths fit its header."""
_PUT_BYTES = 32 << 20
"""What is kept in memory before it is stored."""
_SHOWN = 5
"""Paths that a refusal names."""


class UnfitForImage(SpaceError, EnvironmentRefuses):
    """The workspace holds what no image can: the message names it, and what to do."""


@dataclass(slots=True)
class Captured:
    """What is different, and where its contents are: stored and pinned already, or to ride in the commit."""

    scan: int
    """The daemon's number of it, for ``settle``."""
    changes: list[Change]
    riding: dict[str, bytes] = field(default_factory=dict[str, bytes])

    def stage(self, tx: Transaction) -> None:
        for digest, data in self.riding.items():
            tx.put_content(digest, data)


async def capture(
    client: SpaceClient,
    session: Session,
    tree: Tree,
    *,
    name: ImageName,
    pin: int,
    max_file_bytes: int,
    freeze: bool = False,
    sync: bool = False,
    full: bool = False,
) -> Captured:
    """How the workspace differs from the image ``name`` of the session's log, which is ``tree``.

    Contents that the log lacks are fetched; what is too much to ride in a commit is stored under ``pin``. ``freeze``:
    what lives in the Space first; ``sync``: the workspace is on its disk afterwards; ``full``: every file is looked at.
    Raises UnfitForImage, and what the client raises.
    """
    scan, body = await client.scan(
        freeze=freeze, sync=sync, full=full, inline_bytes=MAX_RIDING_BYTES, max_file_bytes=max_file_bytes
    )
    _check_fit(scan, max_file_bytes)
    found = list(scan.changes)
    at = scan.next
    while at is not None:
        page = await client.scan_page(scan.scan, at)
        found.extend(page.changes)
        at = page.next
    changes = [_change(change) for change in found]
    if scan.base is None:
        changes = image.difference(tree, changes)
    elif scan.base != name:
        # They are against another image: what that has and this has not cannot be told from them.
        assert not full, "a full scan is against nothing"
        return await capture(
            client, session, tree, name=name, pin=pin, max_file_bytes=max_file_bytes, freeze=freeze, sync=sync,
            full=True,
        )  # fmt: skip
    return await _with_contents(client, session, scan.scan, changes, _inline(found, body), pin)


def _check_fit(scan: Scan, max_file_bytes: int) -> None:
    """Raises UnfitForImage."""
    reasons: list[str] = []
    if scan.special_count:
        names = _named(scan.special, scan.special_count)
        reasons.append(f"it holds special files, which no image can hold: {names}")
    if scan.too_large_count:
        names = _named(scan.too_large, scan.too_large_count)
        reasons.append(f"it holds files above {max_file_bytes} bytes (max_file_bytes): {names}")
    if scan.unreadable_count:
        reasons.append(f"it holds what cannot be read: {_named(scan.unreadable, scan.unreadable_count)}")
    if reasons:
        raise UnfitForImage(f"the workspace cannot be kept: {'; '.join(reasons)}")


def _named(unfit: Sequence[Unfit], count: int) -> str:
    shown = ", ".join(_printable(item.path) for item in unfit[:_SHOWN])
    return shown if count <= _SHOWN else f"{shown} and {count - _SHOWN} more"


def _printable(path: str) -> str:
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def escaped(path: str) -> str:
    """A path of the protocol as images have it."""
    return image.escape(path.encode("utf-8", "surrogateescape"))


def _change(change: wire.Change) -> Change:
    path = escaped(change.path)
    return Change(path, None if change.change == "removed" else _entry(change.entry()))


def _entry(entry: wire.Entry) -> Entry:
    if entry.kind == "symlink":
        assert entry.target is not None, "a symbolic link has its target"
        return Link(escaped(entry.target))
    if entry.kind == "directory":
        return Directory(entry.mode)
    return File(entry.mode, entry.size, entry.sha256, entry.chunks)


def _inline(changes: Iterable[wire.Change], body: bytes) -> dict[str, bytes]:
    """The contents that came with a scan, by digest."""
    found: dict[str, bytes] = {}
    for change in changes:
        if change.inline is not None and change.kind == "file" and not change.chunks and change.size:
            offset, length = change.inline
            found[change.sha256] = body[offset : offset + length]
    return found


async def _with_contents(
    client: SpaceClient,
    session: Session,
    scan: int,
    changes: list[Change],
    inline: Mapping[str, bytes],
    pin: int,
) -> Captured:
    captured = Captured(scan, changes)
    # Each chunk once, with a place where it can be read.
    places: dict[str, ContentRange] = {}
    for change in changes:
        if isinstance(change.entry, File):
            path = image.unescape(change.path).decode("utf-8", "surrogateescape")
            for index, digest in enumerate(change.entry.digests):
                offset = index * wire.CHUNK_BYTES
                length = min(wire.CHUNK_BYTES, change.entry.size - offset)
                places.setdefault(digest, ContentRange(path=path, offset=offset, length=length, sha256=digest))
    if not places:
        return captured
    missing = await _missing(session, list(places), pin)
    size = sum(places[digest].length for digest in missing)
    if size <= MAX_RIDING_BYTES:
        captured.riding = {digest: inline[digest] for digest in missing if digest in inline}
        rest = [places[digest] for digest in missing if digest not in inline]
        for batch in _batches(rest):
            captured.riding.update(await _fetch(client, batch))
        return captured
    waiting: dict[str, bytes] = {}
    held = 0
    for batch in _batches([places[digest] for digest in missing]):
        fetched = await _fetch(client, batch)
        waiting.update(fetched)
        held += sum(map(len, fetched.values()))
        if held >= _PUT_BYTES:
            await session.contents.put(waiting, pin=pin)
            waiting, held = {}, 0
    if waiting:
        await session.contents.put(waiting, pin=pin)
    return captured


async def _missing(session: Session, digests: Sequence[str], pin: int) -> list[str]:
    """What the log lacks; what it has stays until the pin ends."""
    missing: list[str] = []
    for first in range(0, len(digests), MAX_DIGESTS):
        asked = digests[first : first + MAX_DIGESTS]
        known = await session.contents.has(asked, pin=pin)
        missing += [digest for digest in asked if digest not in known]
    return missing


def _batches(ranges: Sequence[ContentRange]) -> Iterable[list[ContentRange]]:
    batch: list[ContentRange] = []
    size = 0
    for item in ranges:
        if batch and (size + item.length > _FETCH_BYTES or len(batch) == _FETCH_ITEMS):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item.length
    if batch:
        yield batch


async def _fetch(client: SpaceClient, ranges: Sequence[ContentRange]) -> dict[str, bytes]:
    body = await client.chunks(ranges)
    found: dict[str, bytes] = {}
    at = 0
    for item in ranges:
        found[item.sha256] = body[at : at + item.length]
        at += item.length
    return found
