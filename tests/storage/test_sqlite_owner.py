"""Who owns an SQLite store: the lock beside it, and kills while it is created (rules K161, K165 to K169)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from storage_processes import OWNER, POST, end, go, line_of, start

from perdure.kernel.errors import StorageBusy
from perdure.storage import lock as lock_module
from perdure.storage import sqlite_mailbox
from perdure.storage.lock import OwnerLock, read_holder
from perdure.storage.sqlite import SqliteStorage
from perdure.testing.conformance import Line


async def opened(path: Path) -> Line:
    storage = SqliteStorage(path)
    return Line(storage, await storage.open(writer="writer", log_id="log", now=1_000))


# --- between processes -----------------------------------------------------------------------------------------


async def test_a_second_process_is_told_who_holds_the_store(tmp_path: Path) -> None:
    """K168, K169: at once; and the lock of one that was killed is free."""
    path = tmp_path / "store.db"
    owner = await start(OWNER, path)
    go(owner)
    assert (await line_of(owner), await line_of(owner)) == ("ready", "open 1")
    with pytest.raises(StorageBusy) as raised:
        await opened(path)
    assert f"process {owner.pid} on host {socket.gethostname()}" in str(raised.value)
    assert "since 2001-09-09T01:46:40+00:00" in str(raised.value)
    owner.send_signal(signal.SIGKILL)
    await end(owner)
    line = await opened(path)
    assert line.info.epoch == 2
    await line.storage.close()


def test_an_owner_that_was_killed_is_gone_though_nobody_waited_for_it(tmp_path: Path) -> None:
    """K169: what is left of it has a process id and a start, and holds nothing."""
    path = tmp_path / "store.db"
    owner = _killed_owner(path)
    holder = read_holder(f"{path}.lock")
    assert holder is not None
    assert (holder.pid, holder.gone, holder.here, holder.stopped) == (owner, True, False, False)
    assert holder.kill(patience=60), "it has ended"
    assert os.waitid(os.P_PID, owner, os.WEXITED) is not None, "and was there until now"


def _killed_owner(path: Path) -> int:
    """A process that owned a store and was killed; nobody has waited for it yet."""
    said, says = os.pipe()
    owner = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", _OWN, str(path)],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, says, 1), (os.POSIX_SPAWN_CLOSE, said)],
    )
    os.close(says)
    assert os.read(said, 1) == b"!"
    os.close(said)
    os.kill(owner, signal.SIGKILL)
    os.waitid(os.P_PID, owner, os.WEXITED | os.WNOWAIT)
    return owner


_OWN = """
import signal, sys, threading
from perdure.storage.lock import OwnerLock
lock = OwnerLock.take(sys.argv[1], now=1)
threading.Thread(target=signal.pause).start()
print("!", end="", flush=True)
signal.pause()
"""


async def test_of_many_openers_one_wins_and_the_others_hear_of_it(tmp_path: Path) -> None:
    """K168: none waits for a lock of SQLite or finds the database locked, also when the store is still to be made."""
    path = tmp_path / "store.db"
    processes = [await start(OWNER, path) for _ in range(6)]
    for process in processes:
        assert await line_of(process) == "ready"
    for process in processes:
        go(process)
    said = {process.pid: await line_of(process) for process in processes}
    (winner,) = (pid for pid, words in said.items() if words.startswith("open"))
    for pid, words in said.items():
        if pid != winner:
            assert words.startswith("StorageBusy")
            assert f"process {winner} " in words
    for process in processes:
        assert await end(process) == 0
    line = await opened(path)
    assert line.info.epoch == 2, "nobody else wrote a fence"
    await line.storage.close()


def _posix_locks(path: Path) -> int:
    """How many POSIX locks this process has on a file, by what the kernel says."""
    inode = os.stat(path).st_ino
    locks = Path("/proc/locks").read_text().splitlines()
    return sum(" POSIX " in lock and f" {os.getpid()} " in lock and f":{inode} " in lock for lock in locks)


async def test_what_this_process_reads_frees_no_lock_of_sqlite(tmp_path: Path) -> None:
    """K164: closing any descriptor of a file frees the POSIX locks its process has on it.

    Were the header of an open store read past SQLite, another process could think itself the last to close the
    store, and remove the log under its owner.
    """
    path = tmp_path / "store.db"
    line = await opened(path)
    await line.commit(line.batch(entries=[line.entry(1)]))
    held = _posix_locks(path)
    assert held > 0
    with pytest.raises(StorageBusy):
        await opened(path)
    assert _posix_locks(path) == held
    sqlite_mailbox.post(path, "signal", 1, now=1)
    assert _posix_locks(path) == held
    sqlite_mailbox.reply(path, 1)
    assert _posix_locks(path) == held
    reader = SqliteStorage(path)
    await reader.open(read_only=True, writer="reader", log_id="log", now=1)
    await reader.close()
    assert _posix_locks(path) == held
    await line.storage.close()
    assert _posix_locks(path) == 0


async def test_mail_from_another_process_reaches_the_owner(tmp_path: Path) -> None:
    """K72, K74."""
    path = tmp_path / "store.db"
    line = await opened(path)
    heard = asyncio.Event()
    line.storage.on_mail(heard.set)
    poster = await start(POST, path)
    async with asyncio.timeout(60):
        await heard.wait()
    (mail,) = await line.storage.mail()
    assert bytes(mail.body) == b'{"from":"elsewhere"}'
    assert await end(poster) == 0
    await line.storage.close()


_CREATE = """
import asyncio, os, signal, sys
from perdure.storage import sqlite, sqlite_create
from perdure.storage.lock import OwnerLock
point, step = int(sys.argv[2]), 0
def here():
    global step
    step += 1
    if step == point:
        os.kill(os.getpid(), signal.SIGKILL)
def around(function):
    def wrapped(*args, **kwargs):
        here()
        result = function(*args, **kwargs)
        here()
        return result
    return wrapped
OwnerLock.take = around(OwnerLock.take)
sqlite_create._sync = around(sqlite_create._sync)
sqlite_create.os.rename = around(os.rename)
sqlite.build = around(sqlite.build)
sqlite.connect = around(sqlite.connect)
sqlite.raise_fence = around(sqlite.raise_fence)
async def main():
    storage = sqlite.SqliteStorage(sys.argv[1])
    await storage.open(writer="creator", log_id="log", now=1)
    await storage.close()
asyncio.run(main())
"""


async def test_a_creator_killed_at_any_point_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    """K161: the next open finds no store, or a whole one, and clears what was left."""
    finished, left = False, 0
    for point in range(1, 30):
        directory = tmp_path / str(point)
        os.mkdir(directory)
        creator = await start(_CREATE, directory / "store.db", point)
        finished = await end(creator) == 0
        left += any("creating" in name for name in os.listdir(directory))
        line = await opened(directory / "store.db")
        await line.commit(line.batch(entries=[line.entry(1)]))
        assert await line.storage.check() == []
        await line.storage.close()
        assert sorted(os.listdir(directory)) == ["store.db", "store.db.lock"]
        if finished:
            break
    assert finished
    assert left >= 3, "kills in the middle of building are part of what is tested"


# --- the lock itself -------------------------------------------------------------------------------------------


def test_a_holder_is_named_so_that_it_cannot_be_mistaken(tmp_path: Path) -> None:
    """K168."""
    lock = OwnerLock.take(f"{tmp_path}/store.db", now=7)
    holder = read_holder(lock.path)
    assert holder is not None
    assert (holder.pid, holder.host, holder.since) == (os.getpid(), socket.gethostname(), 7)
    assert holder.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert holder.start_ticks == int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    assert not holder.gone
    lock.release()
    lock.release()
    assert read_holder(lock.path) is None
    OwnerLock.take(f"{tmp_path}/store.db", now=8).release()


def test_one_process_cannot_take_it_twice(tmp_path: Path) -> None:
    """K165: and no program it starts holds it on."""
    lock = OwnerLock.take(f"{tmp_path}/store.db", now=7)
    assert lock._descriptor is not None
    assert not os.get_inheritable(lock._descriptor)
    with pytest.raises(StorageBusy, match=f"process {os.getpid()} "):
        OwnerLock.take(f"{tmp_path}/store.db", now=8)
    lock.release()


def test_the_name_a_dead_holder_left_is_not_told_as_the_holders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K168: the new one has locked and not yet written its name; or it is one we cannot see, in another container."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    lock = OwnerLock.take(f"{tmp_path}/store.db", now=7)
    text = Path(lock.path).read_text()
    holder = read_holder(lock.path)
    assert holder is not None
    Path(lock.path).write_text(text.replace(str(holder.start_ticks), str(holder.start_ticks + 1)))
    with pytest.raises(StorageBusy, match=f"cannot be seen from here.* names process {os.getpid()} on host"):
        OwnerLock.take(f"{tmp_path}/store.db", now=8)
    Path(lock.path).write_text("")
    with pytest.raises(StorageBusy, match="its holder left no name"):
        OwnerLock.take(f"{tmp_path}/store.db", now=8)
    lock.release()


_NAMED = """
import ctypes, sys
from perdure.storage.lock import OwnerLock
ctypes.CDLL(None).prctl(15, "\u0436".encode() * 8)  # cut to 15 bytes, in the middle of a character
OwnerLock.take(sys.argv[1], now=1).release()
print("taken", flush=True)
"""


async def test_a_process_may_have_any_name(tmp_path: Path) -> None:
    """K168: the kernel cuts a name to 15 bytes, wherever that is."""
    process = await start(_NAMED, tmp_path / "store.db")
    assert await line_of(process) == "taken"
    assert await end(process) == 0


_FORKED_STORE = """
import asyncio, os, sys
from perdure.kernel.errors import StorageError
from perdure.storage.sqlite import SqliteStorage
storage = SqliteStorage(sys.argv[1])
loop = asyncio.new_event_loop()
loop.run_until_complete(storage.open(writer="writer", log_id="log", now=1))
child = os.fork()
if child == 0:
    try:
        asyncio.new_event_loop().run_until_complete(storage.entry(1))
    except StorageError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
loop.run_until_complete(storage.close())
"""


async def test_a_forked_child_is_told_that_the_store_is_not_its_own(tmp_path: Path) -> None:
    """K165: instead of waiting for ever for threads it does not have."""
    process = await start(_FORKED_STORE, tmp_path / "store.db")
    assert await line_of(process) == f"process {process.pid} opened this store; a fork of it must open its own"
    assert await end(process) == 0


def test_a_sidecar_replaced_under_our_hands_is_not_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K167: what is locked must be what the path names."""
    real, path = lock_module.fcntl.flock, tmp_path / "store.db.lock"
    replaced: list[int] = []

    def flock(descriptor: int, operation: int) -> None:
        if not replaced:
            replaced.append(os.fstat(descriptor).st_ino)
            (tmp_path / "fresh").touch()
            os.rename(tmp_path / "fresh", path)
        real(descriptor, operation)

    monkeypatch.setattr(lock_module.fcntl, "flock", flock)
    lock = OwnerLock.take(f"{tmp_path}/store.db", now=7)
    assert lock._descriptor is not None
    assert os.fstat(lock._descriptor).st_ino == path.stat().st_ino != replaced[0]
    lock.release()


_FORK = """
import os, signal, sys
from perdure.storage.lock import OwnerLock
lock = OwnerLock.take(sys.argv[1], now=1)
child = os.fork()
if child:
    print(child, flush=True)
    os._exit(0)
os.closerange(0, 3)  # or the parent would seem to live on
signal.pause()
"""


async def test_a_forked_child_does_not_hold_its_parents_lock(tmp_path: Path) -> None:
    """K169: the parent is dead, so the lock is free, though a child of it lives on."""
    parent = await start(_FORK, tmp_path / "store.db")
    child = int(await line_of(parent))
    async with asyncio.timeout(60):
        await parent.wait()
    os.kill(child, 0)
    OwnerLock.take(f"{tmp_path}/store.db", now=2).release()
    os.kill(child, signal.SIGKILL)
