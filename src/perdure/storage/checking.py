"""What an integrity check of a database finds wrong with records, the same for every backend that has rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from perdure.kernel.records import EntryRecord
from perdure.storage.rows import TABLES, Record, Row, row_of

MOST_FINDINGS = 100


def record_check(table: str, *, seq: int, next_id: int) -> Callable[[Row, bytes], Iterator[str]]:
    """What says of a stored row, and its body, what is wrong; ``seq`` and ``next_id`` are the store's."""
    return partial(_check, table, msgspec.json.Decoder(TABLES[table]).decode, seq, next_id)


def _check(
    table: str, decode: Callable[[bytes], Record], seq: int, next_id: int, stored: Row, body: bytes
) -> Iterator[str]:
    id = stored[0]
    assert isinstance(id, int), "the first column of each of these tables"
    try:
        record = decode(body)
    except msgspec.MsgspecError as error:
        yield f"{table}: record {id} cannot be read: {error}"
        return
    if stored != row_of(record):
        yield f"{table}: record {id} contradicts what it is found by"
    if id >= next_id:
        yield f"{table}: record {id} is not below the next id, {next_id}"
    if isinstance(record, EntryRecord) and record.seq > seq:
        yield f"{table}: record {id} is of commit {record.seq}, after the last, {seq}"
