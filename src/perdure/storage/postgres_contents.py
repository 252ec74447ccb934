"""Contents by hash in a PostgreSQL store (rules K200 to K206)."""

from __future__ import annotations

from collections.abc import Iterator

from perdure.kernel.errors import StorageError
from perdure.storage.encoded import ContentsChange
from perdure.storage.packing import pack, unpack
from perdure.storage.postgres_link import Byteas, Cursor, Int8s, Link

_STORED = "SELECT digest FROM perdure.contents WHERE session = %s AND digest = ANY (%s)"
_PUT = "INSERT INTO perdure.contents VALUES (%s, %s, %s, %s, %s) ON CONFLICT DO NOTHING"
_PIN = (
    "WITH given AS (SELECT * FROM unnest(%s::int8[], %s::bytea[]) AS given (pin, digest)),"
    " missing AS (SELECT digest FROM given WHERE NOT EXISTS"
    " (SELECT 1 FROM perdure.contents AS c WHERE c.session = %s AND c.digest = given.digest)),"
    " pinned AS (INSERT INTO perdure.pins SELECT DISTINCT %s::int8, pin, digest FROM given ON CONFLICT DO NOTHING)"
    " SELECT digest FROM missing LIMIT 1"
)
_UNPIN = "DELETE FROM perdure.pins WHERE session = %s AND pin = ANY (%s)"
_RECLAIM = (
    "DELETE FROM perdure.contents AS c WHERE session = %s AND digest = ANY (%s)"
    " AND NOT EXISTS (SELECT 1 FROM perdure.pins AS p WHERE p.session = c.session AND p.digest = c.digest)"
)
_ALL = "SELECT digest, size, packing, data FROM perdure.contents WHERE session = %s"
_DANGLING = (
    "SELECT pin, digest FROM perdure.pins AS p WHERE session = %s AND NOT EXISTS"
    " (SELECT 1 FROM perdure.contents AS c WHERE c.session = p.session AND c.digest = p.digest) LIMIT 100"
)


def apply(change: ContentsChange, cursor: Cursor, session: int, path: str) -> None:
    """In the transaction of the commit, in the order of commits: each sees what those before it did."""
    if change.contents:
        asked = Byteas(digest for digest, _ in change.contents)
        there = {bytes(digest) for (digest,) in cursor.execute(_STORED, (session, asked))}
        for digest, data in change.contents:
            if digest not in there:
                packing, packed = pack(data)
                cursor.execute(_PUT, (session, digest, len(data), packing, packed))
    if change.pins:
        pins, digests = zip(*change.pins, strict=True)
        for (digest,) in cursor.execute(_PIN, (Int8s(pins), Byteas(digests), session, session)):
            raise StorageError(f"{path}: commit {change.seq} pins content {digest.hex()}, which is not stored")
    if change.unpinned:
        cursor.execute(_UNPIN, (session, Int8s(pin for (pin,) in change.unpinned)))
    if change.reclaimed:
        cursor.execute(_RECLAIM, (session, Byteas(digest for (digest,) in change.reclaimed)))


def check(link: Link, session: int) -> Iterator[str]:
    """What is wrong with the contents and pins, one line each. Inside a transaction."""
    with link.cursor("contents", binary=True) as cursor:
        cursor.itersize = 20
        for row in cursor.execute(_ALL, (session,)):
            try:
                unpack(*row)
            except StorageError as error:
                yield f"contents: {error}"
    for pin, digest in link.execute(_DANGLING, (session,)):
        yield f"contents: pin {pin} holds {digest.hex()}, which is not stored"
