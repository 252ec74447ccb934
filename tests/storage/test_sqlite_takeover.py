"""Taking a store over from a holder that is frozen, wherever it stopped, with real processes (rules K177 to K179)."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import Process
from pathlib import Path
from typing import Any

import msgspec
import pytest
from storage_processes import end, go, line_of, start

from perdure.kernel.errors import StaleEpochError, StorageBusy
from perdure.kernel.session import Session
from perdure.kernel.storage import Segment
from perdure.storage import sqlite, sqlite_takeover
from perdure.storage.lock import Holder, OwnerLock, Sidecar, read_holder, sidecar
from perdure.storage.sqlite import SqliteStorage
from perdure.testing.conformance import Line

HOLDER = """
import asyncio, os, signal, sys, threading
import apsw
from perdure.kernel.errors import StorageError
from perdure.storage.sqlite import SqliteStorage
from perdure.storage.sqlite_writer import Writer
from perdure.testing.conformance import Line

path, point, step, armed = sys.argv[1], int(sys.argv[2]), 0, False

def here(name):
    global step
    if armed:
        step += 1
        if step == point:
            print("stopped", name, flush=True)
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

class File(apsw.VFSFile):
    def __init__(self, name, flags):
        super().__init__("", name, flags)
    def xWrite(self, data, offset):
        here("writing")
        super().xWrite(data, offset)
    def xSync(self, flags):
        here("flushing")
        super().xSync(flags)

class Stepping(apsw.VFS):
    def __init__(self):
        super().__init__("stepping", "")
    def xOpen(self, name, flags):
        return File(name, flags)

vfs = Stepping()
store = Writer._store
def stepped(self, group):
    here("before")
    stored = store(self, group)
    here("after")
    return stored
Writer._store = stepped

async def main():
    global armed
    storage = SqliteStorage(path, vfs="stepping")
    line = Line(storage, await storage.open(writer="old", log_id="log", now=1))
    await line.commit(line.batch(entries=[line.entry(1, data="old")]))
    armed = True
    try:
        while True:
            await line.commit(line.batch(entries=[line.entry(1, data="old")]))
            armed = False
            print("committed", line.seq, flush=True)
            if not await asyncio.to_thread(sys.stdin.readline):
                break
    except StorageError as error:
        print(type(error).__name__, flush=True)
    await storage.close()
asyncio.run(main())
"""
"""Stops at one point of its second commit, once; then commits for every line of input, until it is refused."""


async def opened(path: Path, *, takeover: bool = False, epoch: int | None = None) -> Line:
    storage = SqliteStorage(path)
    info = await storage.open(writer="new", log_id="log", now=1_000, takeover=takeover, epoch=epoch)
    return Line(storage, info)


async def stopped(process: Process) -> None:
    """Once the system says that it is."""
    waiting = asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    async with asyncio.timeout(60):
        await waiting


async def frozen(path: Path, point: int) -> tuple[Process, str]:
    """A holder that stopped there, and where that is; what it said if it did not get there."""
    holder = await start(HOLDER, path, point)
    said = await line_of(holder)
    if said.startswith("stopped"):
        await stopped(holder)
    return holder, said


async def freeze(process: Process) -> None:
    process.send_signal(signal.SIGSTOP)
    await stopped(process)


async def data(line: Line) -> list[str]:
    found = await line.storage.entries([Segment(1, 0, None)])
    return [msgspec.json.decode(entry.raw_data) for entry in found]


async def one_more(line: Line) -> None:
    await line.commit(line.batch(entries=[line.entry(1, data="new")]))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second instead of five."""
    monkeypatch.setattr(sqlite_takeover, "TAKEOVER_SECONDS", 0.5)


# --- a frozen holder -------------------------------------------------------------------------------------------


async def test_a_holder_that_stopped_between_commits_lives_and_adds_nothing(tmp_path: Path) -> None:
    """K177: it is superseded at its next commit, and its death frees nothing."""
    path = tmp_path / "store.db"
    old, said = await frozen(path, 1_000)
    assert said == "committed 2"
    await freeze(old)
    with pytest.raises(StorageBusy, match=rf"process {old.pid} .* which is stopped; .*kill -CONT {old.pid}.*takeover"):
        await opened(path)
    new = await opened(path, takeover=True)
    assert (new.info.epoch, new.info.writer, new.info.seq) == (2, "new", 2)
    holder = read_holder(f"{path}.lock")
    assert holder is not None
    assert holder.pid == os.getpid()
    await one_more(new)
    old.send_signal(signal.SIGCONT)
    go(old)
    assert await line_of(old) == "StaleEpochError"
    assert await end(old) == 0
    await one_more(new)
    with pytest.raises(StorageBusy, match=f"process {os.getpid()} "):
        await opened(path)
    assert await data(new) == ["old", "old", "new", "new"]
    assert await new.storage.check() == []
    await new.storage.close()
    assert sorted(os.listdir(tmp_path)) == ["store.db", "store.db.lock"]


@pytest.mark.usefixtures("impatient")
async def test_wherever_it_stopped_in_a_commit_it_adds_nothing_after_the_takeover(tmp_path: Path) -> None:
    """K177, K178: killed where its transaction is in the way, superseded where it is not; its commit is whole."""
    fates: dict[str, set[str]] = {}
    for point in range(1, 30):
        path = tmp_path / str(point) / "store.db"
        path.parent.mkdir()
        old, said = await frozen(path, point)
        if said == "committed 2":
            await end(old)
            break
        new = await opened(path, takeover=True)
        assert new.info.epoch == 2
        there = await data(new)
        assert there == ["old"] * new.info.seq
        assert new.info.seq in (1, 2)
        await one_more(new)
        where = said.partition(" ")[2]
        if old.returncode is None and lives(old):
            fates.setdefault("superseded", set()).add(where)
            old.send_signal(signal.SIGCONT)
            go(old)
            words = await line_of(old)
            if words == "committed 2":  # stored before the takeover, and told after it
                assert there == ["old", "old"]
                words = await line_of(old)
            assert words == "StaleEpochError"
            assert await end(old) == 0
        else:
            fates.setdefault("killed", set()).add(where)
            assert await end(old) == -signal.SIGKILL
        await one_more(new)
        assert await data(new) == [*there, "new", "new"]
        assert await new.storage.check() == []
        await new.storage.close()
        assert sorted(os.listdir(path.parent)) == ["store.db", "store.db.lock"]
    else:
        raise AssertionError("the points come to an end")
    assert fates == {"superseded": {"before", "after"}, "killed": {"writing", "flushing"}}


def rename(sidecar: Path, holder: Holder) -> None:
    sidecar.write_bytes(msgspec.json.encode(holder))


def lives(process: Process) -> bool:
    state = Path(f"/proc/{process.pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.usefixtures("impatient")
async def test_without_leave_to_kill_the_error_names_the_holder(tmp_path: Path) -> None:
    """K179: an epoch alone is none; the holder goes on as if nothing had been."""
    path = tmp_path / "store.db"
    old, said = await frozen(path, 2)
    assert said == "stopped writing"
    with pytest.raises(StorageBusy, match=rf"process {old.pid} on host .* could not begin within 0.5 s.*takeover=True"):
        await opened(path, epoch=7)
    holder = read_holder(f"{path}.lock")
    assert holder is not None
    assert holder.pid == old.pid
    old.send_signal(signal.SIGCONT)
    assert await line_of(old) == "committed 2"
    go(old)
    assert await line_of(old) == "committed 3"
    assert sorted(os.listdir(tmp_path)) == ["store.db", "store.db-shm", "store.db-wal", "store.db.lock"]
    new = await opened(path, epoch=7)
    assert (new.info.epoch, new.info.seq) == (7, 3), "a higher epoch takes over without a kill"
    go(old)
    assert await line_of(old) == "StaleEpochError"
    await end(old)
    await new.storage.close()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("what", ["start_ticks", "boot_id", "host", "nobody"])
async def test_what_cannot_be_told_from_others_is_not_killed(what: str, tmp_path: Path) -> None:
    """K178: the number of a process alone says nothing."""
    path = tmp_path / "store.db"
    old, _ = await frozen(path, 2)
    holder = read_holder(f"{path}.lock")
    assert holder is not None
    names = Path(f"{path}.lock")
    changed = {"start_ticks": holder.start_ticks + 1, "boot_id": "another", "host": "another"}
    if what == "nobody":
        os.truncate(names, 0)
    else:
        rename(names, msgspec.structs.replace(holder, **{what: changed[what]}))
    # Of this boot and with other start ticks it has ended, says its name; who has the lock is not known then.
    words = "cannot be seen" if what == "start_ticks" else "was not killed: it is not a process of this machine"
    with pytest.raises(StorageBusy, match=words):
        await opened(path, takeover=True)
    assert lives(old)
    old.send_signal(signal.SIGKILL)
    await end(old)


async def test_a_session_that_was_superseded_halts(tmp_path: Path) -> None:
    """K129, K177: whatever it does next; reads of it fail too."""
    path = tmp_path / "store.db"
    old = await start(SESSION, path)
    assert await line_of(old) == "open 1"
    await freeze(old)
    async with Session.open(SqliteStorage(path), takeover=True) as new:
        assert new.info.epoch == 2
        async with new.commit() as tx:
            tx.create_conversation(owner=None)
        old.send_signal(signal.SIGCONT)
        assert await line_of(old) == "commit StaleEpochError"
        assert await line_of(old) == "read SessionFailed"
        assert await line_of(old) == "closed StaleEpochError"
        assert await end(old) == 0
        assert [record.id for record in await new.conversations()] == [1, 2]
        assert new.failed is None


SESSION = """
import asyncio, os, signal, sys
from perdure.kernel.session import Session
from perdure.kernel.storage import Segment
from perdure.storage.sqlite import SqliteStorage

async def main():
    session = await Session.start(SqliteStorage(sys.argv[1]))
    thawed = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGCONT, thawed.set)
    async with session.commit() as tx:
        tx.create_conversation(owner=None, root=True)
    print("open", session.info.epoch, flush=True)
    await thawed.wait()
    try:
        async with session.commit() as tx:
            tx.create_conversation(owner=None)
    except Exception as error:
        print("commit", type(error).__name__, flush=True)
    try:
        await session.conversations()
    except Exception as error:
        print("read", type(error).__name__, flush=True)
    print("closed", type((await session.close()).failed).__name__, flush=True)
asyncio.run(main())
"""


# --- takers ----------------------------------------------------------------------------------------------------


TAKER = """
import asyncio, os, signal, sys
from perdure.kernel.errors import StorageError
from perdure.storage import lock, sqlite, sqlite_takeover, sqlite_writer
from perdure.storage.sqlite import SqliteStorage
point, step = int(sys.argv[2]), 0
sqlite_takeover.TAKEOVER_SECONDS = 0.5
def here():
    global step
    step += 1
    if step == point:
        os.kill(os.getpid(), signal.SIGKILL)
def around(home, name):
    function = getattr(home, name)
    def wrapped(*args, **kwargs):
        here()
        result = function(*args, **kwargs)
        here()
        return result
    setattr(home, name, wrapped)
async def main():
    if point:
        around(sqlite, "take_over")
        around(sqlite_takeover, "connect")
        around(sqlite_writer, "add_tables")  # the fence is written and not committed
        around(lock, "forget_replacement")
        around(lock, "_write")
        around(lock.os, "rename")
        around(lock.signal, "pidfd_send_signal")
        around(lock.select, "select")
    print("ready", flush=True)
    sys.stdin.readline()
    storage = SqliteStorage(sys.argv[1])
    try:
        info = await storage.open(writer="taker", log_id="log", now=1, takeover=True)
    except StorageError as error:
        print(type(error).__name__, error, flush=True)
        return
    print("open", info.epoch, flush=True)
    sys.stdin.readline()
    await storage.close()
asyncio.run(main())
"""


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("where", "least"), [(1_000, 9), (2, 6)], ids=["between commits", "inside a commit"])
async def test_a_taker_killed_at_any_step_leaves_nothing_in_the_way(where: int, least: int, tmp_path: Path) -> None:
    """K177: the next one takes over, or finds the store free, and the frozen one adds nothing either way."""
    for point in range(1, 40):
        path = tmp_path / str(point) / "store.db"
        path.parent.mkdir()
        old, _ = await frozen(path, where)
        if where == 1_000:
            await freeze(old)
        taker = await start(TAKER, path, point)
        assert await line_of(taker) == "ready"
        go(taker)
        finished = await line_of(taker) == "open 2"
        await end(taker)
        new = await opened(path, takeover=True)
        assert new.info.epoch in ((3,) if finished else (2, 3))
        there = await data(new)
        if lives(old):
            old.send_signal(signal.SIGCONT)
            go(old)
            assert await line_of(old) == "StaleEpochError"
        await end(old)
        await one_more(new)
        assert await data(new) == [*there, "new"]
        assert await new.storage.check() == []
        await new.storage.close()
        assert sorted(os.listdir(path.parent)) == ["store.db", "store.db.lock"]
        if finished:
            break
    else:
        raise AssertionError("the steps come to an end")
    assert point > least


async def test_of_many_takers_one_wins_and_the_others_hear_of_it(tmp_path: Path) -> None:
    """K168, K177: nobody is taken over from who has just taken over."""
    path = tmp_path / "store.db"
    old, _ = await frozen(path, 1_000)
    await freeze(old)
    takers = [await start(TAKER, path, 0) for _ in range(5)]
    for taker in takers:
        assert await line_of(taker) == "ready"
    for taker in takers:
        go(taker)
    said = {taker.pid: await line_of(taker) for taker in takers}
    opened_by = [pid for pid, words in said.items() if words.startswith("open")]
    # One that came late found the winner there, and took over from it: it was asked to.
    assert sorted(words for words in said.values() if words.startswith("open")) == [
        f"open {epoch}" for epoch in range(2, 2 + len(opened_by))
    ]
    assert opened_by
    for pid, words in said.items():
        if pid not in opened_by:
            assert words.startswith("StorageBusy")
            assert "meanwhile" in words
    old.send_signal(signal.SIGKILL)
    for process in (old, *takers):
        await end(process)
    line = await opened(path)
    assert line.info.epoch == 2 + len(opened_by)
    assert await line.storage.check() == []
    await line.storage.close()


async def test_a_sidecar_that_changed_meanwhile_is_left_alone(tmp_path: Path) -> None:
    """K177: somebody has begun to own the store since it was found busy, in a file of its own or in the same one."""
    store = f"{tmp_path}/store.db"
    lock = OwnerLock.take(store, now=7)
    now = sidecar(store)
    assert now.holder is not None
    earlier = msgspec.structs.replace(now.holder, since=6)
    for seen in (Sidecar((1, 2), now.holder), Sidecar(now.file, earlier), Sidecar(None, None)):
        with pytest.raises(StorageBusy, match=f"meanwhile: it is held by process {os.getpid()} "):
            OwnerLock.replace(store, seen=seen, now=8)
        assert sidecar(store) == now
        assert os.listdir(tmp_path) == ["store.db.lock"]
    lock.check_named()
    other = OwnerLock.replace(store, seen=now, now=8)
    with pytest.raises(StorageBusy, match="was replaced while the store was opened"):
        lock.check_named()
    lock.release()
    with pytest.raises(StorageBusy):
        OwnerLock.take(store, now=9)
    other.release()
    OwnerLock.take(store, now=9).release()


async def test_an_opener_whose_sidecar_is_replaced_before_its_fence_owns_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K167, K177: a taker was faster, though the lock that is left was to be had."""
    path = tmp_path / "store.db"
    await (await opened(path)).storage.close()
    real = sqlite.connect

    def connect(*args: Any, **options: Any) -> Any:
        OwnerLock.replace(str(path), seen=sidecar(str(path)), now=8).release()
        return real(*args, **options)

    with monkeypatch.context() as patched, pytest.raises(StorageBusy, match="was replaced while"):
        patched.setattr(sqlite, "connect", connect)
        await opened(path)
    line = await opened(path)
    assert line.info.epoch == 2, "it wrote no fence"
    await line.storage.close()


async def test_an_open_removes_what_a_taker_that_died_left(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    (tmp_path / "store.db.lock.taking").touch()
    await (await opened(path)).storage.close()
    assert sorted(os.listdir(tmp_path)) == ["store.db", "store.db.lock"]


async def test_only_the_process_that_is_named_is_killed(tmp_path: Path) -> None:
    """K178: not a later one of its number, nor this one; and it has ended when that is said."""
    path = tmp_path / "store.db"
    old, _ = await frozen(path, 1_000)
    holder = read_holder(f"{path}.lock")
    assert holder is not None
    cut = msgspec.structs.replace
    assert not holder.stopped
    assert not cut(holder, boot_id="another").kill(patience=0)
    assert not cut(holder, host="another").kill(patience=0)
    assert cut(holder, start_ticks=1).kill(patience=0), "that one has ended"
    own = OwnerLock.take(f"{tmp_path}/other.db", now=1)
    mine = read_holder(own.path)
    assert mine is not None
    assert not mine.kill(patience=0)
    own.release()
    assert lives(old)
    assert holder.kill(patience=60)
    assert not lives(old)
    assert await end(old) == -signal.SIGKILL
    assert holder.kill(patience=0)
    assert not holder.here


async def test_a_holder_that_works_is_superseded_too_also_in_the_same_process(tmp_path: Path) -> None:
    """K177: by whoever asks for it."""
    path = tmp_path / "store.db"
    old = await opened(path)
    await one_more(old)
    with pytest.raises(StorageBusy):
        await opened(path)
    new = await opened(path, takeover=True)
    with pytest.raises(StaleEpochError):
        await one_more(old)
    await old.storage.close()
    with pytest.raises(StorageBusy):
        await opened(path)
    await one_more(new)
    assert await data(new) == ["new", "new"]
    await new.storage.close()
    for epoch in (1, 2):
        with pytest.raises(StaleEpochError):
            await opened(path, takeover=True, epoch=epoch)
    free = await opened(path, takeover=True)
    assert free.info.epoch == 3, "a free one is simply opened"
    with pytest.raises(StaleEpochError):
        await opened(path, takeover=True, epoch=3)
    await one_more(free)
    await free.storage.close()
    with pytest.raises(ValueError, match="takes nothing over"):
        await SqliteStorage(path).open(read_only=True, takeover=True, writer="w", log_id="l", now=1)


@pytest.mark.usefixtures("impatient")
async def test_a_store_that_its_holder_was_making_as_it_stopped(tmp_path: Path) -> None:
    """K178: there is nothing to take over yet, so it is ended, and the store made."""
    path = tmp_path / "store.db"
    maker = await start(MAKER, path)
    await stopped(maker)
    with pytest.raises(StorageBusy, match=f"process {maker.pid} "):
        await opened(path, epoch=4)
    new = await opened(path, takeover=True)
    assert new.info.epoch == 1
    assert await end(maker) == -signal.SIGKILL
    await one_more(new)
    await new.storage.close()
    assert sorted(os.listdir(tmp_path)) == ["store.db", "store.db.lock"]


MAKER = """
import asyncio, os, signal, sys, threading
from perdure.storage import sqlite
def build(*args, **kwargs):
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
sqlite.build = build
asyncio.run(sqlite.SqliteStorage(sys.argv[1]).open(writer="maker", log_id="log", now=1))
"""


async def test_one_that_stopped_while_it_checkpointed_holds_up_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K177: the log grows meanwhile, and shrinks once that one has ended."""
    path = tmp_path / "store.db"
    await (await opened(path)).storage.close()
    checkpointer = await start(CHECKPOINTER, path)
    await stopped(checkpointer)
    monkeypatch.setattr("perdure.storage.sqlite_writer.CHECKPOINT_PAGES", 4)
    new = await opened(path, takeover=True)
    for _ in range(50):
        await one_more(new)
    checkpointer.send_signal(signal.SIGKILL)
    await end(checkpointer)
    for _ in range(10):
        await one_more(new)
    assert await new.storage.check() == []
    await new.storage.close()


CHECKPOINTER = """
import asyncio, os, signal, sys, threading
import apsw
from perdure.storage import sqlite_writer
from perdure.storage.sqlite import SqliteStorage
from perdure.testing.conformance import Line

class File(apsw.VFSFile):
    def __init__(self, name, flags):
        super().__init__("", name, flags)
        self.main = bool(flags[0] & apsw.SQLITE_OPEN_MAIN_DB)
    def xWrite(self, data, offset):
        if self.main:
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        super().xWrite(data, offset)

class Stopping(apsw.VFS):
    def __init__(self):
        super().__init__("stopping", "")
    def xOpen(self, name, flags):
        return File(name, flags)

vfs = Stopping()
sqlite_writer.CHECKPOINT_PAGES = 4
async def main():
    storage = SqliteStorage(sys.argv[1], vfs="stopping")
    line = Line(storage, await storage.open(writer="old", log_id="log", now=1))
    while True:
        await line.commit(line.batch(entries=[line.entry(1, data="x" * 5000)]))
asyncio.run(main())
"""
