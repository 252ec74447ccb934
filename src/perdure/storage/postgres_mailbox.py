"""Requests that any process leaves in a PostgreSQL store, without owning it (rules K72 to K77)."""

from __future__ import annotations

from perdure.kernel.errors import StorageError
from perdure.kernel.json import JsonValue
from perdure.kernel.storage import MailReply
from perdure.storage import postgres_schema
from perdure.storage.postgres_link import Link, ServerError, Target
from perdure.storage.postgres_owner import Row, find
from perdure.storage.postgres_reads import Reader
from perdure.storage.rules import MAX_UNANSWERED, mail_body, mailbox_full

# Senders wait for each other here. A statement sees what was there when it began, so one that both waits and counts
# would not count the requests of those it waited for.
_TURN = "SELECT FROM perdure.mailboxes WHERE session = %s FOR UPDATE"
# Ids are taken in turn, each in the transaction that leaves its request: none is seen before a lower one.
_POST = (
    "WITH box AS (UPDATE perdure.mailboxes SET last = last + 1 WHERE session = %(session)s AND"
    " (SELECT count(*) FROM perdure.mailbox WHERE session = %(session)s AND answered_seq IS NULL) < %(most)s"
    " RETURNING last),"
    " mail AS (INSERT INTO perdure.mailbox (session, id, kind, body, posted_at)"
    " SELECT %(session)s, last, %(kind)s, %(body)s, %(now)s FROM box)"
    " SELECT last, pg_notify(%(channel)s, '') FROM box"
)


def post(dsn: str, session: str, kind: str, body: JsonValue, *, now: int) -> int:
    """Leave a request in a session, open somewhere or not, and return its mail id.

    It blocks for the time of some exchanges with the server and a flush; ``now`` is wall time in ms. Raises NotJson,
    ValueError for a dsn that is none; StorageError if there is no such session, if the body is too large or if too
    much is waiting.
    """
    raw = mail_body(body)
    target = Target(dsn, session)
    link = target.connect()
    try:
        values = {
            "session": _existing(link, target).id,
            "most": MAX_UNANSWERED,
            "kind": kind,
            "body": bytes(raw),
            "now": now,
        }
        with link.transaction():
            link.execute(_TURN, (values["session"],))
            row = link.execute(_POST, {**values, "channel": channel(values["session"])}).fetchone()
    except ServerError as error:
        why = target.explained(error, "given a request")
        if link.closed:
            raise StorageError(
                f"{why}; whether the request is there nobody told: give inputs a request_id before they are sent again"
            ) from None
        raise why from None
    finally:
        link.close()
    if row is None:
        raise mailbox_full()
    return int(row[0])


def reply(dsn: str, session: str, mail_id: int) -> MailReply | None:
    """What became of a request; None while it waits. Raises NotFound if it is not there (any more), StorageError."""
    target = Target(dsn, session)
    link = target.connect(write=False)
    try:
        reader = Reader(target, link, _existing(link, target).id)
        return reader.run(lambda reader: reader.reply(mail_id))[1]
    except ServerError as error:
        raise target.explained(error, "read") from None
    finally:
        link.close()


def channel(session: object) -> str:
    """Where senders tell of mail."""
    return f"perdure_{session}"


def _existing(link: Link, target: Target) -> Row:
    row = find(link, target) if postgres_schema.look(link, target) else None
    if row is None:
        raise StorageError(f"there is no {target}")
    return row
