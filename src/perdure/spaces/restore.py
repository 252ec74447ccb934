"""From the log to a Space: its workspace is made an image again (rules S141 to S144).

What is there and not in the log is nobody else's to lose: it is moved to a recovery folder before it is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from perdure.kernel.contents import MAX_CONTENTS
from perdure.kernel.reports import Report
from perdure.kernel.session import Session
from perdure.kernel.storage import MAX_DIGESTS
from perdure.spaces import image
from perdure.spaces.client import SpaceClient
from perdure.spaces.errors import ContentChanged, ContentMissing, SpaceUnavailable
from perdure.spaces.frames import BODY_BYTES
from perdure.spaces.image import Directory, Link, Tree
from perdure.spaces.wire import CHUNK_BYTES, Displaced, Entry, ImageName, Place, Restored, SpacePath

_PUT_AT_ONCE = BODY_BYTES // CHUNK_BYTES
_TRIES = 5
"""So often a plan is made anew because the workspace was changed under it."""


async def restore(
    client: SpaceClient,
    session: Session,
    tree: Tree,
    *,
    image_name: ImageName,
    floor: Place | None,
    preserve_bytes: int,
    name: str,
) -> Restored:
    """Make the workspace the image ``image_name``, which is ``tree``. All that lives in the Space is killed first.

    ``floor``: what is below it never starts again. ``preserve_bytes``: at most so much is moved to the recovery folder
    ``name``, which is no other restore's. Raises SpaceUnavailable for contents that the log has lost, and what the
    client raises; the Space then has no image record, so that whoever comes next restores it again.
    """
    begun = await client.restore_begin(commit=image_name.commit, nonce=image_name.nonce, floor=floor)
    if not begun.known:
        await client.restore_image(begun.restore, _entries(tree))
    for tried in range(_TRIES):
        folder = f"{name}-{tried}" if tried else name
        missing, displaced = await _plan(client, begun.restore)
        await _put(client, session, missing)
        lacking = await _lacking(session, displaced)
        try:
            return await client.restore_apply(
                begun.restore, preserve=lacking, preserve_bytes=preserve_bytes, name=folder
            )
        except (ContentChanged, ContentMissing):
            _tell_cut_off(client, session, lacking, folder)
        except BaseException:
            _tell_cut_off(client, session, lacking, folder)
            raise
    raise SpaceUnavailable(
        f"the workspace of {client.address.name} is changed by something else while it is restored; end that first"
    )


def _tell_cut_off(client: SpaceClient, session: Session, lacking: Sequence[str], folder: str) -> None:
    """What a restore that is done again had moved already, it does not find any more."""
    if lacking:
        session.report(
            Report(
                type="space_recovery",
                message=f"Space {client.address.name}: a restore was cut off, and is done again; up to {len(lacking)} "
                f"files that the log did not have may be in {folder}, among its recovery folders",
            )
        )


async def _plan(client: SpaceClient, restore: int) -> tuple[list[str], list[Displaced]]:
    plan = await client.restore_plan(restore)
    missing, displaced = list(plan.missing), list(plan.displaced)
    while plan.next is not None:
        plan = await client.restore_plan(restore, start=plan.next)
        missing += plan.missing
        displaced += plan.displaced
    return missing, displaced


async def _put(client: SpaceClient, session: Session, digests: Sequence[str]) -> None:
    for first in range(0, len(digests), MAX_CONTENTS):
        asked = digests[first : first + MAX_CONTENTS]
        contents = await session.contents.get_many(asked)
        for digest in asked:
            if digest not in contents:
                raise SpaceUnavailable(
                    f"the log has lost the content {digest[:16]}... of the image of {client.address.name}: check the "
                    "store, or restore it from a backup"
                )
        for at in range(0, len(asked), _PUT_AT_ONCE):
            await client.put([contents[digest] for digest in asked[at : at + _PUT_AT_ONCE]])


async def _lacking(session: Session, displaced: Sequence[Displaced]) -> list[str]:
    """Paths of those whose content the log does not have; links, which are all name, among them."""
    links = [item.path for item in displaced if item.kind == "symlink"]
    files = [item for item in displaced if item.kind == "file"]
    parts = {item.path: item.chunks or ((item.sha256,) if item.size else ()) for item in files}
    asked = list(dict.fromkeys(digest for digests in parts.values() for digest in digests))
    known: set[str] = set()
    for first in range(0, len(asked), MAX_DIGESTS):
        known |= await session.contents.has(asked[first : first + MAX_DIGESTS])
    return [*links, *(path for path, digests in parts.items() if not known.issuperset(digests))]


def _entries(tree: Tree) -> Iterator[Entry]:
    for change in image.entries(tree):
        entry, path = change.entry, unescaped(change.path)
        if isinstance(entry, Directory):
            yield Entry(path=path, kind="directory", mode=entry.mode)
        elif isinstance(entry, Link):
            yield Entry(path=path, kind="symlink", target=unescaped(entry.target))
        elif entry is not None:
            yield Entry(
                path=path, kind="file", mode=entry.mode, size=entry.size, sha256=entry.sha256, chunks=entry.chunks
            )


def unescaped(path: str) -> SpacePath:
    """A path of an image as the protocol has it."""
    return SpacePath(image.unescape(path).decode("utf-8", "surrogateescape"))
