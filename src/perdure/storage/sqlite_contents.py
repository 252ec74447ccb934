"""Contents by hash in an SQLite store, in tables that older code ignores (rule K183)."""

# apsw's stubs speak of collections.abc.Buffer, which Python 3.11 does not have.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import apsw
import msgspec

from perdure.kernel.errors import StorageError
from perdure.kernel.storage import StoredContent
from perdure.storage.encoded import ContentsChange
from perdure.storage.packing import pack, unpack

TABLES = """
CREATE TABLE contents (
    digest BLOB NOT NULL,
    size INTEGER NOT NULL,
    packing INTEGER NOT NULL,
    data BLOB NOT NULL
) STRICT;
CREATE UNIQUE INDEX contents_by_digest ON contents (digest, size);

CREATE TABLE pins (
    pin INTEGER NOT NULL,
    digest BLOB NOT NULL,
    PRIMARY KEY (pin, digest)
) STRICT, WITHOUT ROWID;
CREATE INDEX pins_by_digest ON pins (digest);
"""

_THERE = "SELECT count(*) FROM sqlite_schema WHERE name = 'pins'"
_PUT = "INSERT OR IGNORE INTO contents VALUES (?, ?, ?, ?)"
_STORED = "SELECT count(*) FROM contents WHERE digest = ?"
_PIN = "INSERT OR IGNORE INTO pins SELECT ?1, ?2 WHERE EXISTS (SELECT 1 FROM contents WHERE digest = ?2)"
_PINNED = "SELECT count(*) FROM pins WHERE pin = ? AND digest = ?"
_UNPIN = "DELETE FROM pins WHERE pin = ?"
_RECLAIM = "DELETE FROM contents WHERE digest = ?1 AND NOT EXISTS (SELECT 1 FROM pins WHERE digest = ?1)"
_ASKED = "SELECT unhex(value) FROM json_each(?)"
_HAS = f"SELECT hex(digest) FROM contents WHERE digest IN ({_ASKED})"  # noqa: S608 - a constant
_GET = f"SELECT digest, size, packing, data FROM contents WHERE digest IN ({_ASKED})"  # noqa: S608 - a constant
_SCAN = (
    "SELECT hex(digest), size FROM contents INDEXED BY contents_by_digest WHERE digest > ?"
    " AND digest {} (SELECT digest FROM pins) ORDER BY digest LIMIT ?"
)
_PINS = "SELECT DISTINCT pin FROM pins WHERE pin > ? ORDER BY pin LIMIT ?"

_encode = msgspec.json.Encoder().encode


def has_tables(link: apsw.Connection) -> bool:
    """A store that was last opened by an older version has none."""
    return link.execute(_THERE).get == 1


def add_tables(link: apsw.Connection) -> None:
    """In the first transaction of an exclusive open."""
    if not has_tables(link):
        link.execute(TABLES)


def apply(change: ContentsChange, cursor: apsw.Cursor, path: str) -> None:
    """In the transaction of the commit, in the order of commits: each sees what those before it did."""
    for digest, data in change.contents:
        if cursor.execute(_STORED, (digest,)).get == 0:
            cursor.execute(_PUT, (digest, len(data), *pack(data)))
    for row in change.pins:
        cursor.execute(_PIN, row)
        if cursor.connection.changes() == 0 and cursor.execute(_PINNED, row).get == 0:
            raise StorageError(f"{path}: commit {change.seq} pins content {row[1].hex()}, which is not stored")
    if change.unpinned:
        cursor.executemany(_UNPIN, change.unpinned)
    if change.reclaimed:
        cursor.executemany(_RECLAIM, change.reclaimed)


# --- reading ---------------------------------------------------------------------------------------------------


def has(link: apsw.Connection, digests: Sequence[str]) -> set[str]:
    if not has_tables(link):
        return set()
    return {str(digest).lower() for (digest,) in link.execute(_HAS, (_encode(digests).decode(),))}


def get(link: apsw.Connection, digests: Sequence[str]) -> dict[str, bytes]:
    if not has_tables(link):
        return {}
    rows = cast("Iterator[tuple[bytes, int, int, bytes]]", link.execute(_GET, (_encode(digests).decode(),)))
    return {digest.hex(): unpack(digest, size, packing, data) for digest, size, packing, data in rows}


def scan(link: apsw.Connection, pinned: bool, after: str, limit: int) -> list[StoredContent]:
    if not has_tables(link):
        return []
    rows = link.execute(_SCAN.format("IN" if pinned else "NOT IN"), (bytes.fromhex(after), limit))
    return [StoredContent(str(digest).lower(), cast("int", size)) for digest, size in rows]


def pins(link: apsw.Connection, after: int, limit: int) -> list[int]:
    if not has_tables(link):
        return []
    return [cast("int", pin) for (pin,) in link.execute(_PINS, (after, limit))]


# --- upkeep ----------------------------------------------------------------------------------------------------


def check(link: apsw.Connection) -> Iterator[str]:
    """What is wrong with the contents and pins, one line each."""
    if not has_tables(link):
        return
    rows = cast(
        "Iterator[tuple[bytes, int, int, bytes]]", link.execute("SELECT digest, size, packing, data FROM contents")
    )
    for row in rows:
        try:
            unpack(*row)
        except StorageError as error:
            yield f"contents: {error}"
    sql = "SELECT pin, digest FROM pins WHERE digest NOT IN (SELECT digest FROM contents) LIMIT 100"
    for pin, digest in cast("Iterator[tuple[int, bytes]]", link.execute(sql)):
        yield f"contents: pin {pin} holds {digest.hex()}, which is not stored"


class Amount(NamedTuple):
    """How many rows a table has, and what is in them."""

    rows: int
    bytes: int


def measure(link: apsw.Connection) -> Amount:
    if not has_tables(link):
        return Amount(0, 0)
    sql = "SELECT count(*), coalesce(sum(size), 0) FROM contents INDEXED BY contents_by_digest"
    (found,) = link.execute(sql)
    return Amount(*cast("tuple[int, int]", found))
