"""Requests that any process leaves in an SQLite store, without owning it (rules K72 to K76)."""

# apsw's stubs speak of collections.abc.Buffer, which Python 3.11 does not have.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os

import apsw

from perdure.kernel.errors import StorageError
from perdure.kernel.json import JsonValue
from perdure.kernel.storage import MailReply
from perdure.storage.rules import MAX_UNANSWERED, mail_body, mailbox_full
from perdure.storage.sqlite_header import examine
from perdure.storage.sqlite_reads import Reader
from perdure.storage.sqlite_schema import connect, explained

# One statement: a transaction that only looked first would be refused once somebody else has committed meanwhile.
_POST = (
    "INSERT INTO mailbox (kind, body, posted_at) SELECT ?, ?, ?"
    " WHERE (SELECT count(*) FROM mailbox WHERE answered_seq IS NULL) < ? RETURNING id"
)


def post(path: str | os.PathLike[str], kind: str, body: JsonValue, *, now: int) -> int:
    """Leave a request in the store at ``path``, open somewhere or closed, and return its mail id.

    It blocks for the time of one flush; ``now`` is wall time in ms. Raises NotJson; StorageError if there is no
    store, if the body is too large or if too much is waiting; StorageFormatError and StorageCorrupt as opening does.
    """
    raw = mail_body(body)
    store = _existing(path)
    try:
        link = connect(store, "write")
        try:
            id = link.execute(_POST, (kind, bytes(raw), now, MAX_UNANSWERED)).get
        finally:
            link.close()
    except (apsw.Error, OSError) as error:
        raise explained(error, store, "given a request") from error
    if id is None:
        raise mailbox_full()
    assert isinstance(id, int)
    return id


def reply(path: str | os.PathLike[str], mail_id: int) -> MailReply | None:
    """What became of a request; None while it waits. Raises NotFound if it is not there (any more)."""
    reader = Reader(_existing(path), vfs=None, live=False)
    try:
        return reader.run(lambda reader: reader.reply(mail_id))[1]
    finally:
        reader.close()


def _existing(path: str | os.PathLike[str]) -> str:
    store = os.path.realpath(path)
    if not examine(store):
        raise StorageError(f"there is no store at {store}")
    return store
