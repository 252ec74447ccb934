"""The tables in a PostgreSQL database: a schema ``perdure`` with all its sessions, made by whoever comes first.

Records stand in ``body`` as the JSON they are; beside it stand only the columns that are looked up by. What may be
long, or have a NUL in it, is bytea, and indexed by its SHA-256: an index takes no more than some 2,700 bytes.
"""

from __future__ import annotations

from perdure.kernel.errors import StorageFormatError
from perdure.storage.postgres_link import Link, Target

LAYOUT = 1
"""Of the tables; what is in a session has a format of its own, as in every backend."""

_MAKING = 0x7065_7264_7572_65
"""The advisory lock of whoever makes the tables."""

TABLES = """
CREATE TABLE perdure.store (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    layout integer NOT NULL
);

CREATE TABLE perdure.sessions (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE,
    format integer NOT NULL,
    log_id text NOT NULL,
    epoch bigint NOT NULL,
    writer text NOT NULL,
    seq bigint NOT NULL,
    next_id bigint NOT NULL,
    committed_at bigint NOT NULL,
    takeovers bigint NOT NULL,
    holder text
) WITH (fillfactor = 50);

CREATE TABLE perdure.conversations (
    session bigint, id bigint, owner bigint, parent bigint, forked_at bigint, body bytea NOT NULL,
    PRIMARY KEY (session, id)
);
CREATE INDEX conversations_by_owner ON perdure.conversations (session, owner, id);
CREATE INDEX conversations_forks ON perdure.conversations (session, parent) WHERE parent IS NOT NULL;

CREATE TABLE perdure.entries (
    session bigint, id bigint, conversation_id bigint NOT NULL, head bigint, body bytea NOT NULL,
    PRIMARY KEY (session, id)
);
CREATE INDEX entries_by_conversation ON perdure.entries (session, conversation_id, id);
CREATE INDEX entries_heads ON perdure.entries (session, conversation_id, id) WHERE head IS NOT NULL;

CREATE TABLE perdure.submissions (
    session bigint, id bigint, conversation_id bigint NOT NULL, status text NOT NULL, request_id bytea,
    body bytea NOT NULL,
    PRIMARY KEY (session, id)
);
CREATE INDEX submissions_by_conversation ON perdure.submissions (session, conversation_id, id);
CREATE UNIQUE INDEX submissions_by_request ON perdure.submissions (session, conversation_id, sha256(request_id))
    WHERE request_id IS NOT NULL;
CREATE INDEX submissions_open ON perdure.submissions (session, status, id) WHERE status IN ('queued', 'placed');

CREATE TABLE perdure.tasks (
    session bigint, id bigint, conversation_id bigint NOT NULL, kind text NOT NULL, live smallint NOT NULL,
    body bytea NOT NULL,
    PRIMARY KEY (session, id)
);
CREATE INDEX tasks_by_conversation ON perdure.tasks (session, conversation_id, id);
CREATE INDEX tasks_by_kind ON perdure.tasks (session, kind, id);
CREATE INDEX tasks_live ON perdure.tasks (session, id) WHERE live = 1;

CREATE TABLE perdure.documents (
    session bigint, id bigint, scope text NOT NULL, scope_id bigint NOT NULL, kind text NOT NULL, key bytea NOT NULL,
    created_seq bigint NOT NULL, retired_seq bigint, body bytea NOT NULL,
    PRIMARY KEY (session, id)
);
CREATE INDEX documents_by_address ON perdure.documents (session, scope, scope_id, kind, sha256(key), id);
CREATE UNIQUE INDEX documents_alive ON perdure.documents (session, scope, scope_id, kind, sha256(key))
    WHERE retired_seq IS NULL;

CREATE TABLE perdure.bases (
    session bigint, document_id bigint, seq bigint, version bigint NOT NULL, value bytea NOT NULL,
    PRIMARY KEY (session, document_id, seq)
);

CREATE TABLE perdure.deltas (
    session bigint, document_id bigint, seq bigint, ops bytea NOT NULL,
    PRIMARY KEY (session, document_id, seq)
);

CREATE TABLE perdure.contents (
    session bigint, digest bytea, size bigint NOT NULL, packing smallint NOT NULL, data bytea NOT NULL,
    PRIMARY KEY (session, digest)
);
ALTER TABLE perdure.contents ALTER COLUMN data SET STORAGE EXTERNAL;

CREATE TABLE perdure.pins (
    session bigint, pin bigint, digest bytea,
    PRIMARY KEY (session, pin, digest)
);
CREATE INDEX pins_by_digest ON perdure.pins (session, digest);

CREATE TABLE perdure.mailboxes (
    session bigint PRIMARY KEY,
    last bigint NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE perdure.mailbox (
    session bigint, id bigint, kind text NOT NULL, body bytea NOT NULL, posted_at bigint NOT NULL,
    answered_seq bigint, ok smallint, result bytea,
    PRIMARY KEY (session, id)
);
CREATE INDEX mailbox_waiting ON perdure.mailbox (session, id) WHERE answered_seq IS NULL;
CREATE INDEX mailbox_answered ON perdure.mailbox (session, answered_seq, id) WHERE answered_seq IS NOT NULL;
"""

COLUMNS = {
    "conversations": "id, owner, parent, forked_at, body",
    "entries": "id, conversation_id, head, body",
    "submissions": "id, conversation_id, status, request_id, body",
    "tasks": "id, conversation_id, kind, live, body",
    "documents": "id, scope, scope_id, kind, key, created_seq, retired_seq, body",
    "bases": "document_id, seq, version, value",
    "deltas": "document_id, seq, ops",
    "contents": "digest, size, packing, data",
    "pins": "pin, digest",
    "mailbox": "id, kind, body, posted_at, answered_seq, ok, result",
}
"""Of each table of records, all but the session."""

# Of the catalogue's rows: what looks names up may not see, in the same transaction, what others have just made.
_HAS_TABLES = (
    "SELECT count(*) > 0 FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace"
    " WHERE n.nspname = 'perdure' AND c.relname = 'store'"
)
_HAS_SOMETHING = (
    "SELECT count(*) > 0 FROM pg_class WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = 'perdure')"
)
_HAS_SCHEMA = "SELECT count(*) > 0 FROM pg_namespace WHERE nspname = 'perdure'"


def look(link: Link, target: Target) -> bool:
    """Whether the tables are there. Raises StorageFormatError if they are others than this code knows."""
    if not _value(link, _HAS_TABLES):
        return False
    layout = _value(link, "SELECT layout FROM perdure.store")
    if layout != LAYOUT:
        raise StorageFormatError(
            f"{target.where} has tables of layout {layout}, this code knows {LAYOUT}; use the perdure that made them"
        )
    return True


def ensure(link: Link, target: Target) -> None:
    """Make the tables unless they are there, in one transaction, however many do at once. As ``look``."""
    if look(link, target):
        return
    with link.transaction():
        link.execute("SELECT pg_advisory_xact_lock(%s)", (_MAKING,))
        if not _value(link, _HAS_TABLES):
            if _value(link, _HAS_SOMETHING):
                raise StorageFormatError(
                    f"{target.where} has a schema perdure in which something else is; use another database"
                )
            if not _value(link, _HAS_SCHEMA):
                link.execute("CREATE SCHEMA perdure")
            link.execute(TABLES)
            link.execute("INSERT INTO perdure.store (layout) VALUES (%s)", (LAYOUT,))
    look(link, target)


def _value(link: Link, sql: str) -> object:
    row = link.execute(sql.encode()).fetchone()
    return None if row is None else row[0]
