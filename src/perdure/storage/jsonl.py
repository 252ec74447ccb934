"""A store in a directory of append-only files that ``less`` and ``jq`` read (rules K150, K154 to K158).

A commit writes its records into sidecars (``entries-N.jsonl``, ``records-N.jsonl``, contents and answers a file each)
and then one line into ``commits.jsonl``, its marker, which says how far the sidecars go. What no marker confirms is
cut at the next open; what one confirms must be there. Each line begins with a checksum of its rest. The fence is a
line of the same log, so that a writer sees by its length alone whether anybody opened the store after it.

Two threads beside the event loop: one owns and writes, one reads. They share an index of where each record is, under
a lock that a group of commits holds while it is written. The modules beside this one hold a step each:
``jsonl_lines`` (the format), ``jsonl_disk`` (every change of a file), ``jsonl_image`` (reading a store whole),
``jsonl_index``, ``jsonl_create``, ``jsonl_writer``, ``jsonl_reads``, ``jsonl_contents``, ``jsonl_mailbox``,
``jsonl_compaction``, ``jsonl_upkeep``.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import structs

from perdure.kernel.errors import StaleEpochError, StorageBusy, StorageCorrupt, StorageError
from perdure.kernel.storage import VACUUM_MS, Batch, SizeReport, StoreInfo, VacuumReport
from perdure.storage import jsonl_disk as disk
from perdure.storage import jsonl_upkeep
from perdure.storage.holder import end_holder
from perdure.storage.jsonl_create import clear, copying, create, empty
from perdure.storage.jsonl_image import Image, examine, open_image
from perdure.storage.jsonl_lines import KINDS, LOG, Fence, LogLine, line_of
from perdure.storage.jsonl_reads import Live, Reader
from perdure.storage.jsonl_writer import Writer
from perdure.storage.lock import OwnerLock, sidecar
from perdure.storage.reading import MailPoll, Reads, ThreadedReads
from perdure.storage.rules import check_bound, check_takeover
from perdure.storage.worker import Worker, finish

T = TypeVar("T")

TAKEOVER_SECONDS = 5.0
"""How long a holder that is taken over from may take to close the store before it is killed."""
_POLL_SECONDS = 0.05
_ATTEMPTS = 3
"""How often a copy or a check is begun anew because something was compacted or reclaimed meanwhile."""


class _Opening(msgspec.Struct):
    """What an open store holds: gathered while it is opened, given back in reverse."""

    reading: Worker
    reader: Reader
    live: Live
    log_id: str = ""
    """Of the store that was opened."""
    writing: Worker | None = None
    lock: OwnerLock | None = None
    writer: Writer | None = None


class JsonlStorage(ThreadedReads):
    """A store in the directory at ``path``, made if nothing is there. The directory above it must exist.

    For sessions of moderate size that a person wants to read with ``less`` and ``jq``. Opening it reads all of it, and
    some 200 to 350 bytes of memory are kept for each entry, submission, task and state of a document; the records
    themselves are read from the disk when they are asked for. Superseded records are reclaimed when they are half of
    the files, which writes what stays anew, while commits wait. ``SqliteStorage`` opens at once however long the
    session is (rule K231).

    A commit that was acknowledged survives the end of the process. With ``fsync=True`` it survives the loss of power
    too, and costs two flushes, or three with entries (rule K155); without, the loss of power may leave a store that
    is damaged, and whose opening says so: only what was there at the last clean close is sure to be read again.

    Raises what ``perdure.kernel.storage.Storage`` says. A store that somebody holds is taken over only with
    ``takeover=True``, which kills the holder if it does not close it (rule K174).
    """

    def __init__(self, path: str | os.PathLike[str], *, fsync: bool = False) -> None:
        # Two names of one directory must meet at one lock.
        self.path = os.path.realpath(path)
        self._fsync = fsync
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
            raise StorageBusy(f"this JsonlStorage of {self.path} is {self._state} already")
        live = Live(self.path)
        opening = _Opening(Worker("perdure-read"), Reader(live, owned=not read_only), live)
        self._state = "opening"
        try:
            if read_only:
                info = await finish(opening.reading.call(partial(self._look, opening)))
            else:
                opening.writing = Worker("perdure-write")
                own = partial(self._own, opening, epoch=epoch, takeover=takeover, writer=writer, log_id=log_id, now=now)
                info = await finish(opening.writing.call(own))
                opening.writer = Writer(live, opening.writing, info, fsync=self._fsync)
        except BaseException:
            try:
                with suppress(StorageError):  # why it could not be opened is the error
                    await finish(asyncio.ensure_future(self._release(opening)))
            finally:
                self._state = "closed"
            raise
        opening.log_id = info.log_id
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
        """On the writing thread: everything from the plain read to the fence, in the order of rules K164 to K175."""
        path, directory = self.path, os.path.dirname(self.path)
        if not os.path.isdir(directory):
            raise StorageError(f"{directory} is not a directory; make it first")
        exists = examine(path)
        for name in (directory, path, os.path.join(path, LOG)) if exists else (directory,):
            if not os.access(name, os.W_OK):
                raise StorageError(
                    f"{name} may not be written by this process; to look at the store, open it for reading only"
                )
        try:
            lock = OwnerLock.take(path, now=now)
        except StorageBusy as busy:
            if not takeover:
                raise
            lock = _taken_over(path, busy, now=now)
        opening.lock = lock
        try:
            clear(path)
            if not examine(path):
                create(path, empty(log_id=log_id, now=now))
            image = open_image(path, write=True)
            opening.live.image = image
            jsonl_upkeep.check_files(image)
            mine = image.epoch + 1 if epoch is None else epoch
            if mine <= image.epoch:
                raise StaleEpochError(mine=mine, my_writer=writer, stored=image.epoch, stored_writer=image.writer)
            lock.check_named()
            jsonl_upkeep.make_ready(image, flushing=self._fsync)
            self._raise_fence(image, Fence(mine, writer))
        except OSError as error:
            raise disk.explained(error, path, "opened") from error
        return structs.replace(image.info(read_only=False), warnings=tuple(self._warnings(image)))

    def _raise_fence(self, image: Image, fence: Fence) -> None:
        line = line_of(LogLine(after=image.log_end, fence=fence))
        disk.write(image.log, image.log_end, line)
        if self._fsync:
            disk.flush(image.log)
        image.log_end += len(line)
        image.epoch, image.writer = fence.epoch, fence.writer
        # What was read before it must still be all there is (rule K175).
        if image.unread() or not image.in_place():
            raise StorageError(f"{image.log_path} was written to by others while the store was opened; try again")

    def _warnings(self, image: Image) -> list[str]:
        names = (self.path, image.log_path, *map(image.file_path, KINDS), f"{self.path}.lock")
        return disk.warnings(names)

    def _look(self, opening: _Opening) -> StoreInfo:
        """On the reading thread: no lock, no fence, and nothing is changed."""
        if not examine(self.path):
            raise StorageError(f"there is no store at {self.path}")
        info = opening.reader.run(Reader.info)[1]
        return structs.replace(info, warnings=tuple(self._warnings(opening.live.get())))

    async def _release(self, opening: _Opening) -> None:
        """Let what was accepted settle, close the files and free the lock."""
        if self._beside:
            await asyncio.wait(self._beside)
        try:
            if opening.writing is not None:
                try:
                    await opening.writing.call(partial(self._disown, opening))
                finally:
                    opening.writing.stop()
        finally:
            try:
                await opening.reading.call(opening.reader.close)
            finally:
                opening.reading.stop()

    def _disown(self, opening: _Opening) -> None:
        try:
            if opening.writer is not None:
                opening.writer.close()
        except OSError as error:
            raise disk.explained(error, self.path, "closed") from error
        finally:
            if opening.lock is not None:
                opening.lock.release()

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
        def look() -> list[str]:
            found: list[str] = []
            for _ in range(_ATTEMPTS):
                try:
                    found, newest = self._with_image(self._checked)
                except StorageCorrupt as error:
                    return [str(error)]
                if not found or newest:
                    break  # else what was not found may have been reclaimed meanwhile
            return found

        return await self._work_beside("checked", look)

    def _checked(self, image: Image) -> tuple[list[str], bool]:
        found = jsonl_upkeep.check(image, self._go_on)
        return found, image.is_newest()

    async def size(self) -> SizeReport:
        return await self._work_beside("measured", lambda: self._with_image(jsonl_upkeep.measure))

    def _with_image(self, look: Callable[[Image], T]) -> T:
        image = self._fresh_image()
        try:
            return look(image)
        finally:
            image.close()

    def _fresh_image(self) -> Image:
        """Of the files as they are now. Raises StorageError if they are those of another store by now."""
        image = open_image(self.path, write=False, go_on=self._go_on)
        if image.header.log_id != self._open().log_id:
            image.close()
            raise StorageError(f"{self.path} is no longer the store that was opened; put that back, then open it again")
        return image

    async def vacuum(self, *, within_ms: int = VACUUM_MS) -> VacuumReport:
        """As ``Storage.vacuum``. Needs room for another copy of what stays; the error says where, and how much.

        Cancelling ends the wait, not the vacuum; closing the store ends it.
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
        """Copy the store as of one commit into a new directory, while it is in use (rules K29, K184).

        ``log_id``: a new random one; the store's own only if the copy replaces it (a move). Raises StorageError if
        something is at ``target`` or the copy cannot be made; nothing is left there then.
        """

        def copy() -> None:
            goal = os.path.realpath(target)
            if os.path.lexists(goal):
                raise StorageError(f"{goal} is there already; copy to a path where nothing is")
            lock = OwnerLock.take(goal, now=now)
            try:
                for attempt in range(1, _ATTEMPTS + 1):
                    try:
                        create(goal, copying(self.path, self._fresh_image, log_id=log_id, go_on=self._go_on))
                        return
                    except StorageError as error:
                        if attempt == _ATTEMPTS or not isinstance(error.__cause__, FileNotFoundError):
                            raise
            finally:
                lock.release()

        await self._work_beside("copied", copy)

    def _go_on(self) -> None:
        """Raise StorageError once the store is being closed."""
        self._open()

    async def _work_beside(self, doing: str, work: Callable[[], T]) -> T:
        """Do something long on a thread of its own, which reads the files anew."""
        self._open()
        worker = Worker("perdure-beside")

        def run() -> T:
            try:
                return work()
            except OSError as error:
                raise disk.explained(error, self.path, doing) from error

        future = worker.call(run)
        worker.stop()
        self._beside.add(future)
        future.add_done_callback(self._beside.discard)
        return await asyncio.shield(future)


def _taken_over(path: str, busy: StorageBusy, *, now: int) -> OwnerLock:
    """The lock of a store that somebody holds, once that has closed it or is dead (rule K174). Raises StorageBusy."""
    seen, until = sidecar(path), time.monotonic() + TAKEOVER_SECONDS
    while time.monotonic() < until:
        with suppress(StorageBusy):
            return OwnerLock.take(path, now=now)
        time.sleep(_POLL_SECONDS)
    waited = f"it did not close the store within {TAKEOVER_SECONDS:g} s"
    end_holder(path, busy, seen, kill=True, waited=waited, cause=busy)
    return OwnerLock.take(path, now=now)
