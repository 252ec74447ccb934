"""Connections to a PostgreSQL server: where it is, how they are made, and what its errors mean.

A password never leaves the dsn: neither the words for a place nor any error has it, nor details that quote records.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from struct import Struct
from typing import Any, TypeAlias
from weakref import WeakSet

from perdure.kernel.errors import StorageCorrupt, StorageError

try:
    import psycopg
    from psycopg import conninfo, errors
    from psycopg.adapt import Dumper
    from psycopg.pq import Format
    from psycopg.types.numeric import Int8BinaryDumper
except ImportError as error:
    raise ImportError(
        "PostgresStorage needs psycopg, which is not installed; pip install 'perdure[postgres]'"
    ) from error

ServerError: TypeAlias = psycopg.Error
Diagnostic: TypeAlias = errors.Diagnostic
Cursor: TypeAlias = "psycopg.Cursor[tuple[Any, ...]]"
Link: TypeAlias = "psycopg.Connection[tuple[Any, ...]]"  # Any: what a statement answers, it alone knows

OLDEST_SERVER = 14
LOCK_SECONDS = 60
"""How long a statement waits for a lock of others (a shell, an ALTER TABLE) before it fails."""
MAX_NAME = 200
"""Characters of a session's name."""
_CONNECT_SECONDS = 10
_NAMED = ("service", "host", "hostaddr", "port", "dbname", "user")
"""What of a dsn may be told."""
_PORTS = re.compile(r"[0-9]*(,[0-9]*)*")

# Both sides notice within half a minute that the other's machine is gone: a lost client's lock is free then.
_CLIENT: dict[str, str] = {
    "application_name": "perdure",
    "connect_timeout": str(_CONNECT_SECONDS),
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "25000",
}
"""Where the dsn says nothing else."""
_SERVER: dict[str, str] = {
    "search_path": "pg_catalog",
    "default_transaction_isolation": "read committed",
    "statement_timeout": "0",
    "lock_timeout": f"{LOCK_SECONDS}s",
    "idle_in_transaction_session_timeout": "60s",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "25000",  # keepalives are not sent while anything is unacknowledged, as a notification is
    "jit": "off",
}
_SET = "SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS setting (name, value)"
# A server or role that does not wait for its own disk would lose what was acknowledged (rule K232).
_DURABLE = "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
_FACE = "SELECT pg_backend_pid(), current_setting('server_encoding'), pg_is_in_recovery()"


class Target:
    """A session of a server. As a text it names both, without secrets."""

    __slots__ = ("_conninfo", "session", "where")

    def __init__(self, dsn: str, session: str) -> None:
        """Raises ValueError for a dsn that libpq cannot read, or a name that no session can have."""
        if type(dsn) is not str or type(session) is not str:  # of untyped callers
            raise TypeError("PostgresStorage takes a dsn and the name of a session, both texts")
        if not 1 <= len(session) <= MAX_NAME or not session.isprintable():
            raise ValueError(f"the name of a session has 1 to {MAX_NAME} characters that can be printed")
        try:
            given = {name: str(value) for name, value in conninfo.conninfo_to_dict(dsn).items()}
        except (psycopg.Error, UnicodeError):
            given = None
        # Outside of the handler: what libpq says quotes the dsn, and so may the password in it.
        if given is None or _misread(dsn, given):
            raise ValueError(
                "the dsn is none that libpq can read (it is not shown, for it may have a password in it): write "
                "postgresql://user@host:port/database, percent-encode special characters, and leave a password to "
                "PGPASSWORD or a passfile"
            )
        self.session = session
        self._conninfo = conninfo.make_conninfo("", **{**_CLIENT, **given, "client_encoding": "UTF8"})
        told = " ".join(f"{name}={given[name]}" for name in _NAMED if name in given)
        self.where = f"PostgreSQL ({told or 'where libpq looks by itself'})"

    def __str__(self) -> str:
        return f"session {self.session!r} of {self.where}"

    def __repr__(self) -> str:
        return f"<Target {self}>"

    def connect(self, *, write: bool = True, planner: bool = False) -> Link:
        """A new connection, with nothing on it. ``planner``: whole tables may be read, for work beside.

        Raises StorageError.
        """
        try:
            link = psycopg.Connection[tuple[Any, ...]].connect(self._conninfo, autocommit=True)
        except psycopg.Error as error:
            raise self.explained(error, "reached") from error
        _links.add(link)  # before anything is asked: a fork may come meanwhile
        try:
            self._prepare(link, write=write, planner=planner)
        except BaseException as error:
            link.close()
            if isinstance(error, psycopg.Error):
                raise self.explained(error, "opened") from None
            raise
        return link

    def _prepare(self, link: Link, *, write: bool, planner: bool) -> None:
        if link.info.server_version < OLDEST_SERVER * 10_000:
            found = link.info.server_version // 10_000
            raise StorageError(f"{self.where} has version {found}; at least PostgreSQL {OLDEST_SERVER} is needed")
        link.adapters.register_dumper(int, Int8BinaryDumper)
        for kind, dumper in _ARRAYS.items():
            link.adapters.register_dumper(kind, dumper)
        link.prepared_max = 200
        link.add_notify_handler(_ignore)  # else psycopg keeps them for ever
        settings = {**_SERVER, "enable_seqscan": "on" if planner else "off"}
        with link.cursor() as cursor:
            cursor.execute(_SET, (Texts(settings), Texts(settings.values())))
            cursor.execute(_DURABLE)
            pid, encoding, standby = cursor.execute(_FACE).fetchone() or (0, "", False)
        if pid != link.info.backend_pid:
            raise StorageError(
                f"between this process and {self.where} is a pooler, which may give the connection to others, and "
                "with it the owner lock; connect to the server itself"
            )
        if encoding != "UTF8":
            raise StorageError(f"the database of {self.where} has the encoding {encoding}; make one with UTF8")
        if standby and write:
            raise StorageError(f"{self.where} is a standby, which takes no writes; connect to the primary")

    def explained(self, error: BaseException, doing: str) -> StorageError:
        """What an error of the server or of the way to it means for whoever runs the store."""
        if isinstance(error, StorageError):
            return error
        what = f"{self} could not be {doing}"
        if not isinstance(error, psycopg.Error):
            return StorageError(f"{what} ({type(error).__name__}: {error})")
        state = error.sqlstate or ""
        # Never str(error) where there is more than that: the detail quotes what was to be stored.
        said = error.diag.message_primary or str(error).strip().partition("\n")[0]
        why = f"{state}: {said}" if state else said
        if doing == "reached":
            said = "; ".join(line.strip() for line in str(error).strip().splitlines())
            return StorageError(
                f"{what}: {said}. Look whether the server runs, and at the host, port, user and database of the dsn; a "
                "password comes from PGPASSWORD, a passfile or the dsn"
            )
        if state in _LOST or (not state and isinstance(error, errors.OperationalError)):
            return StorageError(f"{what}: the connection was lost ({why}); open the store again")
        if state == "42501":
            return StorageError(
                f"{what}: this user may not ({why}). To make what perdure needs takes CREATE on the database; to use "
                "it, USAGE on the schema perdure and SELECT, INSERT, UPDATE and DELETE on its tables; to look, "
                "USAGE and SELECT"
            )
        if state == "25006":
            return StorageError(
                f"{what}: the server takes no writes on this connection ({why}); connect to the primary"
            )
        if state == "53100":
            return StorageError(f"{what}: the disk of the server is full ({why}); free some space, then open it again")
        if state == "55P03":
            return StorageError(f"{what}: another connection has held a lock on it for too long ({why}); end it")
        if state in ("54000", "53200"):
            return StorageError(f"{what}: it is more than the server takes at a time ({why})")
        if state in ("XX001", "XX002"):
            return StorageCorrupt(f"{what}: the server finds its files damaged ({why}); restore it from a backup")
        return StorageError(f"{what} ({type(error).__name__} {why})")


def _misread(dsn: str, given: dict[str, str]) -> bool:
    """Whether a part that would be told may hold what was meant as a password, with a special character in it."""
    path = dsn.partition("://")[2].partition("/")[2].partition("?")[0]
    database = given.get("dbname", "")
    return (
        "@" in given.get("host", "")
        or "@" in (path if dsn.startswith(("postgresql://", "postgres://")) else "")
        or "://" in database
        or not _PORTS.fullmatch(given.get("port", ""))
    )


_LOST = ("57P01", "57P02", "57P03", "57P05", "25P03", "08000", "08003", "08006")
"""The server ends the connection, and says so."""


def _ignore(_: object) -> None:
    """Whoever waits for a notification hears of it by a handler of its own."""


# --- values ----------------------------------------------------------------------------------------------------


class Int8s(list["int | None"]):
    """A bigint[]. Plain lists would be sent as the smallest type that fits, and prepared anew for each."""


class Texts(list[str]):
    """A text[]."""


class Byteas(list["bytes | str | None"]):
    """A bytea[]; texts go as UTF-8, for a text of PostgreSQL has no NUL and is bounded where it is indexed."""


_EMPTY = Struct("!iiI")
_HEAD = Struct("!iiIii")
_LENGTH = Struct("!i")
_NUMBER = Struct("!iq")
_ABSENT = _LENGTH.pack(-1)


class _ArrayDumper(Dumper):
    format = Format.BINARY
    element = 0

    def dump(self, obj: list[Any]) -> bytes:
        if not obj:
            return _EMPTY.pack(0, 0, self.element)
        parts = [_HEAD.pack(1, None in obj, self.element, len(obj), 1)]
        parts += [_ABSENT if value is None else self.one(value) for value in obj]
        return b"".join(parts)

    def one(self, value: Any) -> bytes:
        data = value.encode() if isinstance(value, str) else value
        return _LENGTH.pack(len(data)) + data


class _Int8sDumper(_ArrayDumper):
    oid, element = 1016, 20

    def one(self, value: Any) -> bytes:
        return _NUMBER.pack(8, value)


class _TextsDumper(_ArrayDumper):
    oid, element = 1009, 25


class _ByteasDumper(_ArrayDumper):
    oid, element = 1001, 17


_ARRAYS: dict[type, type[Dumper]] = {Int8s: _Int8sDumper, Texts: _TextsDumper, Byteas: _ByteasDumper}


# --- forks -----------------------------------------------------------------------------------------------------

_links: WeakSet[Link] = WeakSet()


def _drop_inherited() -> None:
    """A forked child closes its end, or its parent's connection, and lock, would outlive the parent."""
    for link in list(_links):
        with suppress(psycopg.Error, OSError):
            os.close(link.fileno())


os.register_at_fork(after_in_child=_drop_inherited)
