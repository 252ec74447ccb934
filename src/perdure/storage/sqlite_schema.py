"""Format 1 of an SQLite store: its tables, how connections to it are made, and what SQLite's errors mean.

Records stand in ``body`` as the JSON they are; beside it stand only the columns that are looked up by. Times are
integer milliseconds, ids are rowids.
"""

# apsw's stubs speak of collections.abc.Buffer, which Python 3.11 does not have.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
from contextlib import suppress
from typing import Literal

import apsw

from perdure.kernel.errors import StorageCorrupt, StorageError, StorageFormatError
from perdure.kernel.storage import FORMAT_VERSION
from perdure.storage.sqlite_contents import add_tables
from perdure.storage.sqlite_header import APPLICATION_ID, check_format, guard, in_use

BUSY_MS = 10_000
"""How long a statement waits for another process (a sender of mail, a backup, a shell) before it fails."""

OLDEST_SQLITE = (3, 51, 3)
"""Before it, a write-ahead log that is reset while another connection reads can corrupt the database."""

TABLES = """
CREATE TABLE meta (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    format INTEGER NOT NULL,
    log_id TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    writer TEXT NOT NULL,
    seq INTEGER NOT NULL,
    next_id INTEGER NOT NULL,
    committed_at INTEGER NOT NULL
) STRICT;

CREATE TABLE conversations (
    id INTEGER PRIMARY KEY,
    owner INTEGER,
    parent INTEGER,
    forked_at INTEGER,
    body BLOB NOT NULL
) STRICT;
CREATE INDEX conversations_by_owner ON conversations (owner, id);
CREATE INDEX conversations_forks ON conversations (parent) WHERE parent IS NOT NULL;

CREATE TABLE entries (
    id INTEGER PRIMARY KEY,
    conversation_id INTEGER NOT NULL,
    head INTEGER,
    body BLOB NOT NULL
) STRICT;
CREATE INDEX entries_by_conversation ON entries (conversation_id, id);
CREATE INDEX entries_heads ON entries (conversation_id, id) WHERE head IS NOT NULL;

CREATE TABLE submissions (
    id INTEGER PRIMARY KEY,
    conversation_id INTEGER NOT NULL,
    status TEXT NOT NULL,
    request_id TEXT,
    body BLOB NOT NULL
) STRICT;
CREATE INDEX submissions_by_conversation ON submissions (conversation_id, id);
CREATE UNIQUE INDEX submissions_by_request ON submissions (conversation_id, request_id)
    WHERE request_id IS NOT NULL;
CREATE INDEX submissions_open ON submissions (status, id) WHERE status IN ('queued', 'placed');

CREATE TABLE tasks (
    id INTEGER PRIMARY KEY,
    conversation_id INTEGER NOT NULL,
    kind TEXT NOT NULL,
    live INTEGER NOT NULL,
    body BLOB NOT NULL
) STRICT;
CREATE INDEX tasks_by_conversation ON tasks (conversation_id, id);
CREATE INDEX tasks_by_kind ON tasks (kind, id);
CREATE INDEX tasks_live ON tasks (id) WHERE live = 1;

CREATE TABLE documents (
    id INTEGER PRIMARY KEY,
    scope TEXT NOT NULL,
    scope_id INTEGER NOT NULL,
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    created_seq INTEGER NOT NULL,
    retired_seq INTEGER,
    body BLOB NOT NULL
) STRICT;
CREATE INDEX documents_by_address ON documents (scope, scope_id, kind, key, id);
CREATE UNIQUE INDEX documents_alive ON documents (scope, scope_id, kind, key) WHERE retired_seq IS NULL;

CREATE TABLE bases (
    document_id INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    version INTEGER NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (document_id, seq)
) STRICT, WITHOUT ROWID;

CREATE TABLE deltas (
    document_id INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    ops BLOB NOT NULL,
    PRIMARY KEY (document_id, seq)
) STRICT, WITHOUT ROWID;

CREATE TABLE mailbox (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    body BLOB NOT NULL,
    posted_at INTEGER NOT NULL,
    answered_seq INTEGER,
    ok INTEGER,
    result BLOB
) STRICT;
CREATE INDEX mailbox_waiting ON mailbox (id) WHERE answered_seq IS NULL;
CREATE INDEX mailbox_answered ON mailbox (answered_seq, id) WHERE answered_seq IS NOT NULL;
"""


class Link(apsw.Connection):
    """A connection to a store. While it is open, nothing in this process reads the file past SQLite."""

    def __init__(self, path: str, flags: int, vfs: str | None, *, name: str) -> None:
        self._path = path
        self._open = True
        with guard:
            self.file = _identity(path)
            """Which file it is a connection to."""
            in_use[self.file] += 1
        try:
            super().__init__(name, flags=flags, vfs=vfs)
        except BaseException:
            self._forget()
            raise

    def check_place(self) -> None:
        """Raise StorageError unless the path still names this file: what is written to another one is lost."""
        try:
            there = _identity(self._path)
        except FileNotFoundError:
            there = None
        if there != self.file:
            raise StorageError(
                f"{self._path} is no longer the file this store has open: it was moved, replaced or removed; put it "
                "back, then open the store again"
            )

    def close(self, force: bool = False) -> None:
        super().close(force)
        self._forget()

    def _forget(self) -> None:
        with guard:
            if self._open:
                in_use[self.file] -= 1
                if not in_use[self.file]:
                    del in_use[self.file]
                self._open = False


def _identity(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def connect(
    path: str, mode: Literal["write", "read", "still"], *, vfs: str | None = None, busy_ms: int | None = None
) -> Link:
    """A connection to the store at ``path``, which must exist; "still" is for a file that nobody writes to.

    ``busy_ms``: how long its statements wait for another process; None: BUSY_MS.
    Raises what ``explained`` makes of SQLite's errors.
    """
    version = apsw.sqlite_lib_version()
    if tuple(int(part) for part in version.split(".")) < OLDEST_SQLITE:
        raise StorageError(
            f"this apsw brings SQLite {version}; at least {'.'.join(map(str, OLDEST_SQLITE))} is needed: "
            "install apsw from PyPI, not from the distribution"
        )
    try:
        if mode == "write":
            link = Link(path, apsw.SQLITE_OPEN_READWRITE, vfs, name=path)
        else:
            uri = f"file:{_escaped(path)}?mode=ro{'&immutable=1' if mode == 'still' else ''}"
            link = Link(path, apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI, vfs, name=uri)
        try:
            link.set_busy_timeout(BUSY_MS if busy_ms is None else busy_ms)
            link.execute("PRAGMA trusted_schema = OFF")
            if mode != "write":
                link.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            (application,), (version,) = link.execute("PRAGMA application_id; PRAGMA user_version")
            check_format(path, int(application), int(version))
        except BaseException:
            link.close()
            raise
    except (apsw.Error, OSError) as error:
        raise explained(error, path, "opened") from error
    return link


def _escaped(path: str) -> str:
    """A path as SQLite takes it in a URI (``urllib.parse`` would take 3 ms to import)."""
    return path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")


def build(link: apsw.Connection, *, log_id: str, next_id: int, now: int) -> None:
    """Make the tables of an empty store."""
    with link:
        link.execute(f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {FORMAT_VERSION}")
        link.execute(TABLES)
        add_tables(link)
        link.execute("INSERT INTO meta VALUES (1, ?, ?, 0, '', 0, ?, ?)", (FORMAT_VERSION, log_id, next_id, now))


def roll_back(link: apsw.Connection) -> None:
    """End the transaction, if there is one. If that fails it says nothing: what made it necessary is the error, or
    what follows will tell (rule K186)."""
    with suppress(apsw.Error):
        if link.in_transaction:
            link.execute("ROLLBACK")


def explained(error: BaseException, path: str, doing: str) -> StorageError:
    """What an error of SQLite or of the system means for whoever runs the store, with the error as its cause."""
    if isinstance(error, StorageError):
        return error
    explanation = _explanation(error, path, doing)
    explanation.__cause__ = error
    return explanation


def _explanation(error: BaseException, path: str, doing: str) -> StorageError:
    code = getattr(error, "extendedresult", None)
    name = apsw.mapping_extended_result_codes.get(code) if isinstance(code, int) else None
    what = f"{path} could not be {doing}"
    why = f"{name}: {error}" if isinstance(name, str) else str(error)
    if isinstance(error, apsw.FullError):
        return StorageError(f"{what}: the disk is full ({why}); free some space, then open the store again")
    if isinstance(error, (apsw.BusyError, apsw.LockedError)):
        return StorageError(f"{what}: another process has held a lock on it for {BUSY_MS} ms ({why}); end it")
    if isinstance(error, apsw.NotADBError):
        return StorageFormatError(f"{what}: it is not an SQLite database ({why})")
    if isinstance(error, apsw.CorruptError):
        return StorageCorrupt(f"{what}: its pages contradict each other ({why}); restore it from a backup")
    if isinstance(error, (apsw.ReadOnlyError, apsw.PermissionsError, apsw.CantOpenError, PermissionError)):
        return StorageError(f"{what}: this process may not ({why}); check the modes of the file and its directory")
    if isinstance(error, (apsw.IOError, OSError)):
        return StorageError(f"{what}: the disk or file system refused ({why}); see the system's log")
    return StorageError(f"{what} ({type(error).__name__}: {why})")
