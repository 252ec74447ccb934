"""A store in one SQLite file, the default (rules K149, K152, K153).

Two threads beside the event loop: one owns and writes, one reads. The modules beside this one hold a step each:
``sqlite_header`` (what the file is), ``lock`` (who owns it), ``sqlite_create``, ``sqlite_schema``, ``sqlite_writer``,
``sqlite_reads``, ``sqlite_mailbox``, ``sqlite_upkeep``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import apsw
import msgspec
from msgspec import structs

from perdure.kernel.errors import StorageBusy, StorageError
from perdure.kernel.storage import (
    VACUUM_MS,
    Batch,
    SizeReport,
    StoreInfo,
    VacuumReport,
)
from perdure.storage import sqlite_header, sqlite_upkeep
from perdure.storage.lock import OwnerLock, forget_replacement
from perdure.storage.reading import MailPoll, Reads, ThreadedReads
from perdure.storage.rules import FIRST_ID, check_bound, check_takeover
from perdure.storage.sqlite_create import clear, copying, create
from perdure.storage.sqlite_reads import Reader, face, quietly
from perdure.storage.sqlite_schema import Link, build, connect, explained
from perdure.storage.sqlite_takeover import take_over
from perdure.storage.sqlite_writer import Writer, raise_fence
from perdure.storage.worker import Worker, finish

T = TypeVar("T")
Durability: TypeAlias = Literal["power", "process"]
"""What an acknowledged commit survives: the loss of power, for it is flushed; or a killed process, but no more."""

_STEPS = 100_000
"""Instructions of SQLite between two looks whether the store is being closed: some milliseconds."""


class _Opening(msgspec.Struct):
    """What an open store holds: gathered while it is opened, given back in reverse."""

    reading: Worker
    reader: Reader
    writing: Worker | None = None
    lock: OwnerLock | None = None
    link: Link | None = None
    writer: Writer | None = None


class SqliteStorage(ThreadedReads):
    """A store in the file at ``path``, made if it is not there. Its directory must exist.

    ``durability="power"``: a commit is on the disk before its future ends, but for throttled progress.
    ``"process"``: it survives the end of the process, not that of the machine; nothing is flushed at a commit.

    Raises what ``perdure.kernel.storage.Storage`` says.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, durability: Durability = "power", vfs: str | None = None
    ) -> None:
        if durability not in ("power", "process"):
            raise ValueError(f"durability is 'power' or 'process', not {durability!r}")
        # Two names of one file must meet at one lock.
        self.path = os.path.realpath(path)
        self._flush = durability == "power"
        self._vfs = vfs
        self._state: Literal["closed", "opening", "open", "closing"] = "closed"
        self._opening: _Opening | None = None
        # Any: the work beside is of every kind, and nobody looks at its results here.
        self._beside: set[asyncio.Future[Any]] = set()
        self._poll = MailPoll(self._newest_mail)

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
            raise StorageBusy(f"this SqliteStorage of {self.path} is {self._state} already")
        opening = _Opening(Worker("perdure-read"), Reader(self.path, vfs=self._vfs, live=not read_only))
        self._state = "opening"
        try:
            if read_only:
                info = await finish(opening.reading.call(partial(self._look, opening)))
            else:
                opening.writing = Worker("perdure-write")
                own = partial(self._own, opening, epoch=epoch, takeover=takeover, writer=writer, log_id=log_id, now=now)
                info = await finish(opening.writing.call(own))
                assert opening.link is not None
                opening.writer = Writer(self.path, opening.link, opening.writing, info, flush=self._flush)
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
        """On the writing thread: everything from the plain read to the fence, in the order of rules K164 to K179."""
        path = self.path
        directory = os.path.dirname(path)
        if not os.path.isdir(directory):
            raise StorageError(f"{directory} is not a directory; make it first")
        exists = sqlite_header.examine(path)
        for name in (path, directory) if exists else (directory,):
            if not os.access(name, os.W_OK):
                raise StorageError(
                    f"{name} may not be written by this process; to look at the store, open it for reading only"
                )
        try:
            lock = OwnerLock.take(path, now=now)
        except StorageBusy as busy:
            if epoch is None and not takeover:
                raise
            taken = take_over(path, busy, epoch=epoch, writer=writer, now=now, kill=takeover, vfs=self._vfs)
            if taken is not None:
                opening.lock, opening.link = taken.lock, taken.link
                return structs.replace(taken.info, warnings=tuple(sqlite_header.warnings(path)))
            lock = OwnerLock.take(path, now=now)
        opening.lock = lock

        def own() -> None:
            lock.check_named()
            forget_replacement(path)

        try:
            clear(path)
            if not sqlite_header.examine(path):
                fill = partial(build, log_id=log_id, next_id=FIRST_ID, now=now)
                create(path, fill, vfs=self._vfs)
            opening.link = connect(path, "write", vfs=self._vfs)
            info = raise_fence(opening.link, path, epoch=epoch, writer=writer, own=own)
        except (apsw.Error, OSError) as error:
            raise explained(error, path, "opened") from error
        return structs.replace(info, warnings=tuple(sqlite_header.warnings(path)))

    def _look(self, opening: _Opening) -> StoreInfo:
        """On the reading thread: no lock, no fence."""
        if not sqlite_header.examine(self.path):
            raise StorageError(f"there is no store at {self.path}")
        info = opening.reader.run(Reader.info)[1]
        return structs.replace(info, warnings=tuple(sqlite_header.warnings(self.path)))

    async def _release(self, opening: _Opening) -> None:
        """Let what was accepted settle, close the connections, the writer's last, and free the lock."""
        if self._beside:
            await asyncio.wait(self._beside)
        try:
            await opening.reading.call(opening.reader.close)
        finally:
            opening.reading.stop()
            if opening.writing is not None:
                try:
                    await opening.writing.call(partial(_disown, opening, self.path))
                finally:
                    opening.writing.stop()

    def _open(self) -> _Opening:
        if self._opening is None or self._state != "open":
            raise StorageError(f"the store at {self.path} is not open")
        return self._opening

    # --- committing and reading ------------------------------------------------------------------------------

    def commit(self, batch: Batch) -> asyncio.Future[None]:
        writer = self._open().writer
        if writer is None:
            raise StorageError(f"the store at {self.path} is open for reading only")
        return writer.commit(batch)

    async def _read(self, read: Callable[[Reads], T]) -> T:
        opening = self._open()
        seq, value = await opening.reading.call(partial(opening.reader.run, read))
        if opening.writer is not None:
            await opening.writer.settled(seq)
        return value

    def on_mail(self, callback: Callable[[], None]) -> None:
        self._open()
        self._poll.begin(callback)

    def _newest_mail(self) -> asyncio.Future[tuple[int, int]]:
        opening = self._open()
        return opening.reading.call(partial(opening.reader.run, Reader.newest_mail))

    # --- upkeep ----------------------------------------------------------------------------------------------

    async def check(self) -> list[str]:
        def look(link: Link, go_on: Callable[[], None]) -> list[str]:
            found = sqlite_upkeep.check(link)
            go_on()  # or what was found may be what somebody was writing
            return found

        return await self._work_beside("checked", look)

    async def size(self) -> SizeReport:
        return await self._work_beside("measured", lambda link, _: sqlite_upkeep.measure(link, self.path))

    async def vacuum(self, *, within_ms: int = VACUUM_MS) -> VacuumReport:
        """As ``Storage.vacuum``. Needs room for two more copies of what stays; the error says where, and how much.

        Cancelling ends the wait, not the vacuum; closing the store ends it. Another process that reads an old state
        of the store keeps the file as long as it is, until a later checkpoint.
        """
        opening = self._open()
        if opening.writer is None:
            raise StorageError(f"the store at {self.path} is open for reading only; open it for writing to vacuum it")
        check_bound(within_ms)
        assert opening.writing is not None, "where there is a writer"
        stopping: Callable[[], bool] = lambda: self._state != "open"  # noqa: E731
        work = opening.writing.call(partial(opening.writer.vacuum, within_ms=within_ms, stopping=stopping))
        self._beside.add(work)
        work.add_done_callback(self._beside.discard)
        return await asyncio.shield(work)

    async def backup(self, target: str | os.PathLike[str], *, log_id: str, now: int) -> None:
        """Copy the store as of one commit into a new file, while it is in use (rules K29, K184).

        ``log_id``: a new random one; the store's own only if the copy replaces it (a move). Raises StorageError if
        something is at ``target`` or the copy cannot be made; nothing is left there then.
        """

        def copy(link: Link, go_on: Callable[[], None]) -> None:
            goal = os.path.realpath(target)
            if os.path.lexists(goal):
                raise StorageError(f"{goal} is there already; copy to a path where nothing is")
            sqlite_header.examine(goal)
            lock = OwnerLock.take(goal, now=now)
            try:
                create(goal, copying(link, log_id=log_id, go_on=go_on), vfs=self._vfs)
            finally:
                lock.release()

        await self._work_beside("copied", copy)

    async def _work_beside(self, doing: str, work: Callable[[Link, Callable[[], None]], T]) -> T:
        """Do something long on a thread and a connection of its own; closing the store ends it.

        ``work`` gets the connection, and what raises if it is not to go on: the store is being closed, or another
        process has begun to write to one that is only looked at.
        """
        opening = self._open()
        worker = Worker("perdure-beside")

        def run() -> T:
            seen = None if opening.link is not None else face(self.path)

            def go_on() -> None:
                self._open()
                if seen is not None and face(self.path) != seen:
                    raise StorageError(
                        f"{self.path} could not be {doing}: it was opened by others meanwhile; try again"
                    )

            try:
                link = connect(self.path, "read" if opening.writer else quietly(self.path), vfs=self._vfs)
                try:
                    if opening.link is not None:
                        opening.link.check_place()
                    link.set_progress_handler(lambda: self._state != "open", _STEPS)
                    value = work(link, go_on)
                finally:
                    link.close()
            except (apsw.Error, OSError) as error:
                go_on()
                raise explained(error, self.path, doing) from error
            return value

        future = worker.call(run)
        worker.stop()
        self._beside.add(future)
        future.add_done_callback(self._beside.discard)
        return await asyncio.shield(future)


def _disown(opening: _Opening, path: str) -> None:
    try:
        if opening.writer is not None:
            opening.writer.close()
        elif opening.link is not None:
            opening.link.close()
    except apsw.Error as error:
        raise explained(error, path, "closed") from error
    finally:
        if opening.lock is not None:
            opening.lock.release()
