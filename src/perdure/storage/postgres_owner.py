"""Who owns a session of a server (rules K166, K168, K169, K177 to K179).

The owner's connection holds an advisory lock, which ends with it, and the session's row says who that is. The lock's
key has the number of takeovers in it: whoever takes a session over takes another lock, so that the end of the holder
before it frees nothing.
"""

from __future__ import annotations

import time
from contextlib import suppress
from hashlib import sha256

import msgspec

from perdure.kernel.errors import StaleEpochError, StorageBusy, StorageError, StorageFormatError
from perdure.kernel.storage import FORMAT_VERSION, StoreInfo
from perdure.storage import postgres_schema
from perdure.storage.lock import Holder, held_by
from perdure.storage.postgres_link import LOCK_SECONDS, Link, ServerError, Target, errors
from perdure.storage.rules import FIRST_ID

TAKEOVER_SECONDS = 5.0
"""How long the transaction that raises the fence waits for its turn, and for how long a dead holder's lock."""
_ATTEMPTS = 10
_POLL_SECONDS = 0.02

_ROW = "SELECT id, format, log_id, epoch, writer, seq, next_id, takeovers, holder FROM perdure.sessions WHERE name = %s"
_NEW = (
    "WITH made AS (INSERT INTO perdure.sessions"
    " (name, format, log_id, epoch, writer, seq, next_id, committed_at, takeovers)"
    " VALUES (%s, %s, %s, 0, '', 0, %s, %s, 0) ON CONFLICT (name) DO NOTHING RETURNING id)"
    " INSERT INTO perdure.mailboxes SELECT id, 0 FROM made"
)
_RAISE = "UPDATE perdure.sessions SET epoch = %s, writer = %s, takeovers = %s, holder = %s WHERE id = %s"
_LEAVE = (
    "UPDATE perdure.sessions SET holder = NULL WHERE id = %s AND writer = %s AND takeovers = %s AND holder IS NOT NULL"
)
_HOLDERS = (
    "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    " AND classid = %s::int8::oid AND objid = %s::int8::oid"
)


class Row(msgspec.Struct, frozen=True):
    """What the row of a session says."""

    id: int
    format: int
    log_id: str
    epoch: int
    writer: str
    seq: int
    next_id: int
    takeovers: int
    holder: str | None

    def info(self, *, read_only: bool) -> StoreInfo:
        return StoreInfo(
            format=self.format,
            log_id=self.log_id,
            epoch=self.epoch,
            writer=self.writer,
            seq=self.seq,
            next_id=self.next_id,
            read_only=read_only,
        )


class Owned(msgspec.Struct, frozen=True):
    id: int
    """Of the session, in every table."""
    takeovers: int
    info: StoreInfo


def find(link: Link, target: Target, *, locked: bool = False) -> Row | None:
    """Raises StorageFormatError for a session of another format."""
    row = link.execute(f"{_ROW} FOR UPDATE".encode() if locked else _ROW, (target.session,)).fetchone()
    if row is None:
        return None
    found = Row(*row)
    if found.format != FORMAT_VERSION:
        raise StorageFormatError(
            f"{target} has format {found.format}, this code reads {FORMAT_VERSION}; open it with a newer perdure"
        )
    return found


def own(link: Link, target: Target, *, epoch: int | None, takeover: bool, writer: str, log_id: str, now: int) -> Owned:
    """Make the session unless it is there, lock it, and raise its fence. What it locks, the connection holds.

    Raises StorageBusy, StaleEpochError, StorageFormatError, StorageError.
    """
    postgres_schema.ensure(link, target)
    if find(link, target) is None:
        link.execute(_NEW, (target.session, FORMAT_VERSION, log_id, FIRST_ID, now))
    opener = _Opener(link, target, epoch=epoch, writer=writer, now=now)
    until = time.monotonic() + TAKEOVER_SECONDS
    nameless = 0
    while True:
        row = _there(find(link, target), target)
        if opener.lock(row, row.takeovers):
            owned = opener.raise_fence(row, row.takeovers, patience=LOCK_SECONDS)
            if owned is not None:
                return owned
            opener.unlock(row, row.takeovers)  # others have taken it over meanwhile
            continue
        holder = _holder(row)
        busy = StorageBusy(f"{target} is open already: {_words(link, row, holder)}")
        if epoch is not None or takeover:
            return opener.take_over(row, busy, end_holder=takeover)
        # A dead process' connection ends a moment later; one that has just got the lock is about to write its name.
        nameless += holder is None
        if time.monotonic() > until or nameless > _ATTEMPTS or not (holder is None or holder.gone):
            raise busy
        time.sleep(_POLL_SECONDS)


def disown(link: Link, owned: Owned, writer: str) -> None:
    """Take the name off the row, unless it is another's, and free the lock at once."""
    link.execute(_LEAVE, (owned.id, writer, owned.takeovers))
    link.execute("SELECT pg_advisory_unlock(%s)", (_key(owned.id, owned.takeovers),))


class _Opener:
    def __init__(self, link: Link, target: Target, *, epoch: int | None, writer: str, now: int) -> None:
        self._link = link
        self._target = target
        self._epoch = epoch
        self._writer = writer
        self._holder = msgspec.json.encode(Holder.of_this_process(since=now)).decode()

    def lock(self, row: Row, takeovers: int) -> bool:
        found = self._link.execute("SELECT pg_try_advisory_lock(%s)", (_key(row.id, takeovers),)).fetchone()
        return found is not None and bool(found[0])

    def unlock(self, row: Row, takeovers: int) -> None:
        self._link.execute("SELECT pg_advisory_unlock(%s)", (_key(row.id, takeovers),))

    def raise_fence(self, seen: Row, takeovers: int, *, patience: float) -> Owned | None:
        """The first transaction of every exclusive open (rules K170 to K172). None: others took over meanwhile.

        Raises StaleEpochError; LockNotAvailable if the row is not let go of within ``patience`` seconds.
        """
        with self._link.transaction():
            self._link.execute("SELECT set_config('lock_timeout', %s, true)", (f"{int(patience * 1000)}ms",))
            stored = _there(find(self._link, self._target, locked=True), self._target)
            if (stored.id, stored.takeovers) != (seen.id, seen.takeovers):
                return None
            mine = stored.epoch + 1 if self._epoch is None else self._epoch
            if mine <= stored.epoch:
                raise StaleEpochError(
                    mine=mine, my_writer=self._writer, stored=stored.epoch, stored_writer=stored.writer
                )
            self._link.execute(_RAISE, (mine, self._writer, takeovers, self._holder, stored.id))
        info = msgspec.structs.replace(stored.info(read_only=False), epoch=mine, writer=self._writer)
        return Owned(stored.id, takeovers, info)

    def take_over(self, row: Row, busy: StorageBusy, *, end_holder: bool) -> Owned:
        """Own it beside a holder that is alive; what that still commits, the fence refuses."""
        if not self.lock(row, row.takeovers + 1):
            raise StorageBusy(f"{self._target} is being taken over by others at this moment") from busy
        try:
            try:
                owned = self.raise_fence(row, row.takeovers + 1, patience=TAKEOVER_SECONDS)
            except errors.LockNotAvailable:
                waited = f"a transaction on it could not begin within {TAKEOVER_SECONDS:g} s"
                if not end_holder:
                    raise StorageBusy(
                        f"{busy}; {waited}. With takeover=True (perdure chat --takeover) its connection is ended"
                    ) from busy
                self._end(row, busy, waited)
                owned = self.raise_fence(row, row.takeovers + 1, patience=TAKEOVER_SECONDS)
            if owned is None:
                raise StorageBusy(f"{self._target} was taken over by others meanwhile") from busy
        except BaseException:
            with suppress(ServerError):  # what made it necessary is the error
                self.unlock(row, row.takeovers + 1)
            raise
        return owned

    def _end(self, row: Row, busy: StorageBusy, waited: str) -> None:
        """End the connection that holds the lock: a transaction in which its process stopped ends with it (K178)."""
        for pid in _pids(self._link, row):
            try:
                self._link.execute("SELECT pg_terminate_backend(%s::int4, 5000)", (pid,))
            except errors.InsufficientPrivilege as error:
                raise StorageBusy(
                    f"{busy}; {waited}, and its connection was not ended: this user may not, only the holder's own "
                    "(or a member of pg_signal_backend)"
                ) from error


def _there(row: Row | None, target: Target) -> Row:
    if row is None:
        raise StorageError(f"{target} was removed while it was opened")
    return row


def _holder(row: Row) -> Holder | None:
    try:
        return None if row.holder is None else msgspec.json.decode(row.holder, type=Holder)
    except msgspec.MsgspecError:
        return None


def _words(link: Link, row: Row, holder: Holder | None) -> str:
    if holder is not None and not holder.gone:
        return held_by(holder)
    pids = ", ".join(map(str, _pids(link, row))) or "that has just ended"
    named = "left no name yet" if holder is None else f"named {holder}, which has ended"
    return f"it is held by server process {pids}, whose client {named}"


def _pids(link: Link, row: Row) -> list[int]:
    key = _key(row.id, row.takeovers) & (2**64 - 1)
    return [pid for (pid,) in link.execute(_HOLDERS, (key >> 32, key & (2**32 - 1)))]


def _key(session: int, takeovers: int) -> int:
    """The advisory lock of a session; others that use such locks in the database are as good as never in the way."""
    digest = sha256(f"perdure session {session} takeover {takeovers}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
