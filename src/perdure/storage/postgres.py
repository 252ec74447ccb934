"""A store in a PostgreSQL server that many sessions share, from many machines (rules K151, K166, K232 to K239).

One connection a session, with one thread: it holds the owner lock, writes, reads, and hears of mail. So a connection
that is lost cannot go unnoticed by either half, and a server has as many connections as sessions that are open. The
modules beside this one hold a step each: ``postgres_link`` (connections and what errors mean), ``postgres_schema``,
``postgres_owner``, ``postgres_writer``, ``postgres_reads``, ``postgres_contents``, ``postgres_deletion``,
``postgres_mailbox``, ``postgres_upkeep``, ``postgres_watch``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec

from perdure.kernel.errors import StorageBusy, StorageError
from perdure.kernel.storage import VACUUM_MS, Batch, SizeReport, StoreInfo, VacuumReport
from perdure.storage import postgres_owner, postgres_schema, postgres_upkeep
from perdure.storage.postgres_link import Link, ServerError, Target
from perdure.storage.postgres_mailbox import channel
from perdure.storage.postgres_owner import Owned
from perdure.storage.postgres_reads import Reader
from perdure.storage.postgres_watch import WatchedWorker
from perdure.storage.postgres_writer import Writer
from perdure.storage.reading import MailPoll, Reads, ThreadedReads
from perdure.storage.rules import check_bound, check_takeover
from perdure.storage.worker import Worker, finish, tell

T = TypeVar("T")

MAIL_POLL_SECONDS = 5.0
"""How often an open store looks for mail without having been told of any."""
_CANCEL_SECONDS = 1.0
"""After which what is done beside is cancelled once more, while the store is closed."""


class _Opening(msgspec.Struct):
    """What an open store holds: gathered while it is opened, given back in reverse."""

    worker: WatchedWorker
    link: Link | None = None
    session: int = 0
    """Its number in every table."""
    reader: Reader | None = None
    owned: Owned | None = None
    writer: Writer | None = None


class PostgresStorage(ThreadedReads):
    """A session of that name in the database that ``dsn`` leads to, made if it is not there, and its tables as well.

    ``dsn``: as libpq takes it, ``postgresql://user@host:port/database`` or ``host=... dbname=...``. Passwords are
    better left to PGPASSWORD or a passfile; one in it is never shown. ``session``: 1 to 200 characters that can be
    printed. Needs the extra ``perdure[postgres]``, PostgreSQL 14 or newer, a database with the encoding UTF8, and a
    connection to the server itself: behind a pooler it is refused.

    A commit that was acknowledged survives what the server's own commits survive, but for throttled progress. The
    connection is what owns the session: when it is lost the store fails, and may be opened again; whether a commit
    that was under way then is stored, the store tells.

    Raises what ``perdure.kernel.storage.Storage`` says, and ValueError for a dsn or a name that is none.
    """

    def __init__(self, dsn: str, session: str) -> None:
        self._target = Target(dsn, session)
        self._state: Literal["closed", "opening", "open", "closing"] = "closed"
        self._opening: _Opening | None = None
        # Any: the work beside is of every kind, and nobody looks at its results here.
        self._beside: dict[asyncio.Future[Any], list[Link]] = {}
        self._poll = MailPoll(self._newest_mail, every=MAIL_POLL_SECONDS)

    def __repr__(self) -> str:
        return f"<PostgresStorage {self._target}>"

    # --- opening and closing ---------------------------------------------------------------------------------

    async def open(
        self,
        *,
        read_only: bool = False,
        epoch: int | None = None,
        takeover: bool = False,
        writer: str,
        log_id: str,
        now: int,
    ) -> StoreInfo:
        check_takeover(takeover, read_only=read_only)
        if self._state != "closed":
            raise StorageBusy(f"this PostgresStorage of {self._target} is {self._state} already")
        opening = _Opening(WatchedWorker("perdure-postgres"))
        self._state = "opening"
        try:
            if read_only:
                job = partial(self._look, opening)
            else:
                job = partial(self._own, opening, epoch=epoch, takeover=takeover, writer=writer, log_id=log_id, now=now)
            info = await finish(opening.worker.call(job))
            assert opening.link is not None
            opening.reader = Reader(self._target, opening.link, opening.session)
            if opening.owned is not None:
                opening.writer = Writer(self._target, opening.link, opening.worker, opening.owned)
            opening.worker.watch(opening.link, self._heard)
        except BaseException:
            try:
                with suppress(StorageError):  # why it could not be opened is the error
                    await finish(asyncio.ensure_future(self._release(opening)))
            finally:
                self._state = "closed"
            raise
        self._opening = opening
        self._state = "open"
        return info

    async def close(self) -> None:
        opening = self._opening
        if self._state != "open" or opening is None:
            return
        self._state = "closing"
        self._poll.stop()
        try:
            await finish(asyncio.ensure_future(self._release(opening)))
        finally:
            self._opening = None
            self._state = "closed"

    def _own(
        self, opening: _Opening, *, epoch: int | None, takeover: bool, writer: str, log_id: str, now: int
    ) -> StoreInfo:
        """On the thread: everything from the connection to the fence."""
        target = self._target
        opening.link = target.connect()
        try:
            owned = postgres_owner.own(
                opening.link, target, epoch=epoch, takeover=takeover, writer=writer, log_id=log_id, now=now
            )
        except ServerError as error:
            raise target.explained(error, "opened") from None
        opening.owned, opening.session = owned, owned.id
        return owned.info

    def _look(self, opening: _Opening) -> StoreInfo:
        """On the thread: no lock, no fence, and nothing is made. A standby will do."""
        target = self._target
        opening.link = target.connect(write=False)
        try:
            row = postgres_owner.find(opening.link, target) if postgres_schema.look(opening.link, target) else None
        except ServerError as error:
            raise target.explained(error, "opened") from None
        if row is None:
            raise StorageError(f"there is no {target}")
        opening.session = row.id
        return row.info(read_only=True)

    async def _release(self, opening: _Opening) -> None:
        """Let what was accepted settle, free the lock and close the connection."""
        worker = opening.worker
        while beside := list(self._beside):
            await worker.call(self._end_beside)
            await asyncio.wait(beside, timeout=_CANCEL_SECONDS)  # between two statements there was nothing to cancel
        worker.unwatch()
        try:
            await worker.call(partial(_disown, opening))
        finally:
            worker.stop()

    def _end_beside(self) -> None:
        for links in list(self._beside.values()):
            for link in links:
                with suppress(ServerError):  # it has ended by itself
                    link.cancel_safe(timeout=5)

    def _open(self) -> _Opening:
        if self._opening is None or self._state != "open":
            raise StorageError(f"{self._target} is not open")
        return self._opening

    # --- committing and reading ------------------------------------------------------------------------------

    def commit(self, batch: Batch) -> asyncio.Future[None]:
        writer = self._open().writer
        if writer is None:
            raise StorageError(f"{self._target} is open for reading only")
        return writer.commit(batch)

    async def _read(self, read: Callable[[Reads], T]) -> T:
        opening = self._open()
        assert opening.reader is not None, "of an open store"
        seq, value = await opening.worker.call(partial(opening.reader.run, read))
        if opening.writer is not None:
            await opening.writer.settled(seq)
        return value

    # --- mail ------------------------------------------------------------------------------------------------

    def on_mail(self, callback: Callable[[], None]) -> None:
        opening = self._open()
        link, loop = opening.link, asyncio.get_running_loop()
        assert link is not None, "of an open store"

        def listen() -> None:
            link.add_notify_handler(lambda _: tell(loop, self._poll.look))
            with suppress(ServerError):  # the look for mail that follows meets it too
                link.execute(f"LISTEN {channel(opening.session)}".encode())

        opening.worker.post(listen)
        self._poll.begin(callback)

    def _newest_mail(self) -> asyncio.Future[tuple[int, int]]:
        opening = self._open()
        assert opening.reader is not None, "of an open store"
        return opening.worker.call(partial(opening.reader.run, Reader.newest_mail))

    def _heard(self) -> None:
        """Something has come while nothing was asked: looking takes it up, and meets the end of the connection."""
        if self._state == "open":
            self._poll.look()
            self._newest_mail().add_done_callback(_looked)

    # --- upkeep ----------------------------------------------------------------------------------------------

    async def check(self) -> list[str]:
        session = self._open().session
        return await self._work_beside(
            "checked", lambda link: postgres_upkeep.check(link, self._target, session, self._go_on)
        )

    async def size(self) -> SizeReport:
        session = self._open().session
        return await self._work_beside("measured", lambda link: postgres_upkeep.measure(link, session))

    async def vacuum(self, *, within_ms: int = VACUUM_MS) -> VacuumReport:
        """As ``Storage.vacuum``, of the tables of all sessions, and the report is of these (rule K239).

        ``within_ms`` bounds each table. Nobody's commits wait. Cancelling ends the wait, not the vacuum; closing the
        store ends it. Raises StorageError for a user who does not own the tables.
        """
        opening = self._open()
        if opening.writer is None:
            raise StorageError(f"{self._target} is open for reading only; open it for writing to vacuum it")
        check_bound(within_ms)
        await opening.worker.call(partial(self._check_fence, opening.writer))
        return await self._work_beside(
            "vacuumed", lambda link: postgres_upkeep.vacuum(link, self._target, within_ms=within_ms, go_on=self._go_on)
        )

    def _check_fence(self, writer: Writer) -> None:
        try:
            writer.check_fence()
        except ServerError as error:
            raise self._target.explained(error, "vacuumed") from None

    async def backup(self, session: str, *, log_id: str, now: int) -> None:
        """Copy the session as of one commit into a new one of the same server, while it is in use (rules K29, K184).

        ``log_id``: a new random one; the session's own only if the copy replaces it (a move). ``now`` is not needed
        here. Raises ValueError for a name that is none, StorageError if a session has it or the copy cannot be made;
        nothing is left of it then.
        """
        goal = Target("", session).session
        own = self._open().session
        await self._work_beside(
            "copied",
            lambda link: postgres_upkeep.copy(link, self._target, own, goal, log_id=log_id, go_on=self._go_on),
        )

    def _go_on(self) -> None:
        self._open()

    async def _work_beside(self, doing: str, work: Callable[[Link], T]) -> T:
        """Do something long on a thread and a connection of its own; closing the store ends it."""
        self._open()
        worker, links = Worker("perdure-beside"), list[Link]()

        def run() -> T:
            with self._target.connect(write=False, planner=True) as link:
                links.append(link)
                try:
                    self._go_on()
                    return work(link)
                except ServerError as error:
                    self._go_on()
                    raise self._target.explained(error, doing) from None

        future = worker.call(run)
        worker.stop()
        self._beside[future] = links
        future.add_done_callback(lambda future: self._beside.pop(future, None))
        return await asyncio.shield(future)


def _disown(opening: _Opening) -> None:
    """Where the connection is lost there is nothing to give back: the lock went with it."""
    link = opening.link
    if link is None:
        return
    with suppress(ServerError, StorageError):
        if opening.owned is not None and not link.closed:
            postgres_owner.disown(link, opening.owned, opening.owned.info.writer)
    link.close()


def _looked(future: asyncio.Future[tuple[int, int]]) -> None:
    """An error is met by whoever asks next."""
    if not future.cancelled():
        future.exception()
