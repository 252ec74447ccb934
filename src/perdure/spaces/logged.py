"""What a log has of its Spaces, for those who only read it: also while another process goes on with it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TypeVar, cast

from perdure.kernel.document import Document
from perdure.kernel.documents import materialise, read_state
from perdure.kernel.records import Address
from perdure.kernel.session import Session
from perdure.kernel.storage import MAX_CONTENTS
from perdure.spaces.documents import SpaceImage, SpaceState
from perdure.spaces.errors import SpaceError
from perdure.spaces.image import File, Tree

D = TypeVar("D", bound=Document)

_TRIES = 20
"""So often a Space is read again whose log goes on meanwhile."""


@dataclass(frozen=True, slots=True)
class LoggedSpace:
    """A Space as of one commit."""

    name: str
    state: SpaceState
    tree: Tree


async def names(session: Session) -> list[str]:
    """Of the Spaces in a log, in the order of the alphabet."""
    stored = await session.reading(session.storage.documents("session", 0))
    return sorted(record.key for record in stored if record.kind == SpaceState.definition.kind)


async def read(session: Session, name: str) -> LoggedSpace | None:
    """None: the log knows none of that name. Raises DocumentVersionError for one of a newer release, and SpaceError if
    its image never holds still."""
    before = await _stored(session, SpaceState, name)
    for _ in range(_TRIES):
        if before is None:
            return None
        image = await _stored(session, SpaceImage, name)
        after = await _stored(session, SpaceState, name)
        if after is not None and after.image == before.image:
            # Of two documents read one after the other, the state is the newer; its image is the one that was read.
            return LoggedSpace(name, after, _tree(image))
        before = after
    raise SpaceError(f"the Space {name} has a new image each time it is looked at; try again when it has less to do")


async def content(session: Session, file: File) -> AsyncGenerator[bytes]:
    """A file's content from the store, chunk by chunk. Raises SpaceError if it is not there any more."""
    digests = file.digests
    for first in range(0, len(digests), MAX_CONTENTS):
        asked = digests[first : first + MAX_CONTENTS]
        found = await session.contents.get_many(asked)
        for digest in asked:
            if digest not in found:
                raise SpaceError(
                    f"the store has no content {digest[:16]}... any more; if somebody has it open, it went on "
                    "meanwhile: try again. Else check it, or take a backup"
                )
            yield found[digest]


async def _stored(session: Session, kind: type[D], name: str) -> D | None:
    """As it is in the store now, whatever this session has in memory."""
    address = Address(kind.definition.kind, "session", 0, name)
    stored = await session.reading(session.storage.document(address))
    return None if stored is None else read_state(materialise(stored), kind)


def _tree(image: SpaceImage | None) -> Tree:
    if image is None:
        return {}
    plain = image.shared_json()
    assert isinstance(plain, dict), "a document is an object"
    return cast("Tree", plain["dirs"])
