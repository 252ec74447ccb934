"""``perdure inspect``: it shows what is there, and leaves everything as it was (rules K159, K160, K187)."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from busy_host import DEADLINE, WAKE
from msgspec import structs
from typer.testing import CliRunner, Result

from perdure.cli import inspect
from perdure.cli.app import app
from perdure.cli.inspect import HolderLine, StoreReport, TaskLine, look
from perdure.harness.documents import Live
from perdure.harness.harness import Harness
from perdure.kernel.records import NULL, TaskRecord
from perdure.storage import sqlite_mailbox
from perdure.storage.lock import Holder, OwnerLock, read_holder
from perdure.storage.sqlite import SqliteStorage


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["inspect", *map(str, words)])


def program(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """The installed command, in a process of its own."""
    command = [Path(sys.executable).parent / "perdure", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def report(path: Path) -> StoreReport:
    """What ``--json`` prints, read strictly."""
    result = call(path, "--json")
    assert result.exit_code == 0, result.output
    return msgspec.json.decode(result.stdout, type=StoreReport, strict=True)


def files(folder: Path, *, but: str = "nothing") -> dict[str, tuple[bytes, int]]:
    """Contents and time of change of everything in a folder."""
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.iterdir())
        if path.is_file() and not path.name.endswith(but)
    }


class Host:
    """A process with an open store."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("busy_host.py")), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip()

    def close(self) -> None:
        """Let it close the store; it must end well."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.line() == "closed"
        self.process.communicate()
        assert self.process.returncode == 0

    def end(self) -> None:
        """With SIGKILL."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The store is live as long as the tests of this module last."""
    host = Host(tmp_path_factory.mktemp("live") / "agent.db")
    yield host
    host.close()


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    host = Host(tmp_path_factory.mktemp("closed") / "agent.db")
    host.close()
    return host.path


@pytest.fixture
def killed(tmp_path: Path) -> Host:
    host = Host(tmp_path / "agent.db")
    host.end()
    return host


def by_kind(report: StoreReport) -> dict[str, TaskLine]:
    return {task.kind: task for task in report.tasks}


# --- a live store ------------------------------------------------------------------------------------------------


def test_a_live_store_names_its_holder(host: Host) -> None:
    found = report(host.path)
    assert found.holder is not None
    assert (found.holder.pid, found.holder.state) == (host.process.pid, "alive")
    assert 0 <= time.time() * 1000 - found.holder.since < 600_000
    assert f"open in process {host.process.pid} on " in call(host.path).output


def test_a_holder_that_is_frozen_is_told_as_that(host: Host) -> None:
    """K159, K178: whose store may be taken over, and whether it may go on by itself."""
    host.process.send_signal(signal.SIGSTOP)
    try:
        os.waitid(os.P_PID, host.process.pid, os.WSTOPPED | os.WNOWAIT)
        found = report(host.path)
        assert found.holder is not None
        assert (found.holder.pid, found.holder.state) == (host.process.pid, "stopped")
        assert "stands still with its process" in [task.why for task in found.tasks]
        output = call(host.path).output
        assert f"open in process {host.process.pid} on " in output
        assert f"as writer {found.writer}; that process looks frozen" in output
        assert f"kill -CONT {host.process.pid}" in output
    finally:
        host.process.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, host.process.pid, os.WCONTINUED | os.WNOWAIT)
    found = report(host.path)
    assert found.holder is not None
    assert found.holder.state == "alive"


def test_a_live_store_is_not_disturbed(host: Host) -> None:
    folder = host.path.parent
    before = files(folder, but="-shm")
    names = {path.name for path in folder.iterdir()}
    for _ in range(2):
        call(host.path)
    # What is committed meanwhile (nothing here) would be in these files; the memory that SQLite shares is not compared.
    assert files(folder, but="-shm") == before
    assert {path.name for path in folder.iterdir()} == names
    assert read_holder(f"{host.path}.lock") is not None


def test_what_goes_on_is_told(host: Host) -> None:
    found = report(host.path)
    assert (found.path, found.format, found.mail, found.more) == (str(host.path), 1, 0, False)
    assert len(found.log_id) == 32
    assert (found.epoch, found.wake) == (1, DEADLINE)
    assert found.commits > 5
    assert found.bytes == sum(os.path.getsize(f"{host.path}{end}") for end in ("", "-wal"))

    root, other, fork = found.conversations
    assert (root.id, root.busy, root.queued, root.parent) == (1, True, 1, None)
    assert root.name == "the \x1b[31mroot\n"
    assert (other.busy, other.queued, other.owner, other.parent) == (False, 0, None, None)
    assert (fork.parent, fork.busy) == (1, False)

    first, second = found.submissions
    assert (first.conversation, first.type, first.status, first.request_id) == (1, "input", "placed", "dig-1")
    assert first.entry is not None
    assert (second.status, second.request_id, second.entry) == ("queued", "then-1", None)


def test_why_each_task_is_not_at_its_end(host: Host) -> None:
    found = report(host.path)
    tasks = by_kind(found)
    dig, run = tasks["pi.tool"], tasks["pi.generation"]
    assert (dig.tool, dig.status, dig.phase, dig.owner, dig.why) == ("dig", "running", "execute", run.id, "runs")
    assert (run.tool, run.status, run.why) == (None, "waiting", f"waits for task {dig.id}")
    assert tasks["app.ask"].why == "waits for the signal 'answer'; until 2100-01-01 00:00:00 UTC"
    naps = [task.id for task in found.tasks if task.owner == tasks["app.parent"].id]
    assert tasks["app.parent"].why == f"waits for tasks {naps[0]}, {naps[1]}"
    assert (tasks["app.nap"].status, tasks["app.nap"].why) == ("sleeping", "sleeps until 2100-01-01 00:00:00 UTC")
    assert (tasks["app.early"].status, tasks["app.early"].phase) == ("completing", None)
    assert tasks["app.early"].why == "has its outcome; work it owns is not done"
    assert (tasks["app.stubborn"].abort_requested, tasks["app.stubborn"].why) == (True, "runs; to be aborted")
    assert WAKE > DEADLINE


def test_people_see_the_same_in_columns(host: Host) -> None:
    lines = call(host.path).output.splitlines()
    assert lines[0] == str(host.path)
    assert "the next timer is due at 2100-01-01 00:00:00 UTC" in lines
    tasks = lines[lines.index("live tasks") + 1 :]
    head, *rows = tasks[: tasks.index("")]
    assert " ".join(head.split()) == "id conversation owner kind version tool status phase abort requested why"
    dig = next(row for row in rows if "pi.tool" in row)
    for name, value in {"kind": "pi.tool", "tool": "dig", "status": "running", "why": "runs"}.items():
        assert dig[head.index(name) :].startswith(value)
    assert len(rows) == len(report(host.path).tasks)


def test_a_store_does_not_speak_to_the_terminal(host: Host) -> None:
    output = call(host.path).output
    assert "\x1b" not in output
    assert r"the \x1b[31mroot\n" in output


# --- closed and killed -------------------------------------------------------------------------------------------


def test_a_closed_store_stays_byte_for_byte(closed: Path) -> None:
    before = files(closed.parent)
    found = report(closed)
    assert call(closed).exit_code == 0
    assert files(closed.parent) == before
    assert found.holder is None
    assert "not open\n" in call(closed).output
    assert by_kind(found)["pi.tool"].why == "starts when a host with its code resumes"


def test_a_store_whose_process_was_killed(killed: Host) -> None:
    folder = killed.path.parent
    before = files(folder, but="-shm")
    names = {path.name for path in folder.iterdir()}
    found = report(killed.path)
    assert files(folder, but="-shm") == before
    assert {path.name for path in folder.iterdir()} == names
    assert found.holder is not None
    assert (found.holder.pid, found.holder.state) == (killed.process.pid, "ended")
    assert by_kind(found)["pi.tool"].why == "ran when its process ended"
    assert "had it open, and ended without closing it" in call(killed.path).output


def test_it_may_be_looked_at_by_another_name(closed: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(closed)
    assert structs.replace(report(link), path="") == structs.replace(report(closed), path="")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.db"]


def holder_of(closed: Path, tmp_path: Path, **changes: object) -> HolderLine | None:
    """What is said of a holder that differs from this process in this."""
    path = tmp_path / "agent.db"
    shutil.copy(closed, path)
    lock = OwnerLock.take(str(path), now=1_000)
    try:
        mine = read_holder(f"{path}.lock")
        assert mine is not None
        Path(f"{path}.lock").write_bytes(msgspec.json.encode(structs.replace(mine, **changes)))
        return report(path).holder
    finally:
        lock.release()


def test_who_holds_it_is_not_guessed(closed: Path, tmp_path: Path) -> None:
    mine = holder_of(closed, tmp_path)
    assert mine is not None
    assert mine.state == "alive"
    for changes, state in (
        ({"start_ticks": 1}, "ended"),  # another process has that number now
        ({"boot_id": "of-another-day"}, "ended"),  # the machine was started anew
        ({"host": "elsewhere"}, "unknown"),
        ({"host": "elsewhere", "boot_id": "of-another-machine"}, "unknown"),
    ):
        found = holder_of(closed, tmp_path, **changes)
        assert found is not None
        assert found.state == state, changes


def test_another_host_is_named_with_doubt(closed: Path, tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    shutil.copy(closed, path)
    away = Holder(pid=7, start_ticks=7, boot_id="x", host="else\x1b[2Jwhere", since=0)
    Path(f"{path}.lock").write_bytes(msgspec.json.encode(away))
    output = call(path).output
    assert r"perhaps open in process 7 on else\x1b[2Jwhere since 1970-01-01 00:00:00 UTC" in output
    running = by_kind(report(path))["pi.tool"]
    assert running.status == "pending"


# --- mail, more, newer records -----------------------------------------------------------------------------------


def test_mail_is_counted_and_not_taken(closed: Path, tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    shutil.copy(closed, path)
    for name in ("a", "b"):
        sqlite_mailbox.post(path, "signal", {"task": 1, "name": name, "value": None}, now=1)
    assert report(path).mail == 2
    assert "requests in the mailbox: 2" in call(path).output
    assert report(path).mail == 2


@pytest.mark.parametrize("bound", ["MOST_CONVERSATIONS", "MOST_TASKS", "MOST_SUBMISSIONS"])
def test_it_is_said_when_there_is_more(bound: str, closed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "There are more" not in call(closed).output
    monkeypatch.setattr(inspect, bound, 1)
    assert report(closed).more
    assert "There are more; only the first are listed." in call(closed).output


def test_records_of_a_newer_release_do_not_hide_the_rest(closed: Path, tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    shutil.copy(closed, path)
    with closing(sqlite3.connect(path)) as store:
        live = "SELECT id FROM documents WHERE kind = 'pi.live'"
        store.execute(f"UPDATE bases SET version = 99 WHERE document_id IN ({live})")
        ((id, body),) = store.execute("SELECT id, body FROM tasks WHERE kind = 'pi.tool'")
        record = msgspec.json.decode(body, type=TaskRecord)
        newer = structs.replace(record, raw_input=msgspec.Raw(b'{"shape":"another"}'), restarts=2)
        store.execute("UPDATE tasks SET body = ? WHERE id = ?", (msgspec.json.encode(newer), id))
        store.commit()
    found = report(path)
    assert [line.name for line in found.conversations] == [None, None, None]
    tool = by_kind(found)["pi.tool"]
    assert (tool.tool, tool.status) == (None, "pending")
    assert tool.why == "starts when a host with its code resumes; cut off 2 times"


def test_files_that_others_may_read_are_warned_of(closed: Path, tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    shutil.copy(closed, path)
    assert report(path).warnings == ()
    path.chmod(0o644)
    warning = f"{path} is open to other users (mode 0644); run: chmod 600 {path}"
    assert report(path).warnings == (warning,)
    done = program("inspect", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines().count(warning) == 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("UPDATE tasks SET body = x'7b7d'", "holds a record that is not one"),
        ("UPDATE submissions SET body = x'7b7d'", "holds a record that is not one"),
        ("UPDATE bases SET value = x'7b'", "cannot be put together from what is stored"),
    ],
)
def test_damage_is_one_line(damage: str, words: str, closed: Path, tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    shutil.copy(closed, path)
    with closing(sqlite3.connect(path)) as store:
        store.execute(damage)
        store.commit()
    done = program("inspect", path)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("perdure inspect: ")
    assert words in line


async def test_an_empty_store(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    async with Harness.open(SqliteStorage(path)):
        pass
    found = await look(path)
    assert (found.conversations, found.tasks, found.submissions, found.wake) == ((), (), (), None)
    inspect.render(found, as_json=False)
    output = (await asyncio.to_thread(call, path)).output
    assert [line for line in output.splitlines() if line.endswith(": none")] == [
        "conversations: none",
        "live tasks: none",
        "submissions queued or placed: none",
    ]


async def test_compactions_and_parked_work_are_told_in_words_h150_h153(tmp_path: Path) -> None:
    """By inspect beside their conversation and their task, by show below the transcript."""
    path = tmp_path / "agent.db"
    async with Harness.open(SqliteStorage(path)) as harness:
        root = await harness.root()
        async with root.commit() as tx:
            live = await tx.draft(Live)
            live.compactions["100"] = {
                "reason": "manual",
                "started_at": 1,
                "attempt": 1,
                "until": None,
                "code": None,
                "message": None,
            }
            live.compactions["99"] = {
                "reason": "background",
                "started_at": 1,
                "attempt": 2,
                "until": 3_600_000,
                "code": "overloaded",
                "message": "no\x1b[1m\nroom",
            }
            live.compaction_failure = {
                "task": 98,
                "reason": "threshold",
                "at": 60_000,
                "code": "deadline",
                "message": "too late",
                "run": None,
            }
            task = tx.new_task(kind="app.job", version=1, phase="start", input=NULL, conversation=root.id)
            tx.put_task(structs.replace(task, restarts=5))
    lines = [
        "task 99 sums up the context, in the background; attempt 2 at 1970-01-01 01:00:00 UTC, for overloaded: no room",
        "task 100 sums up the context, as somebody asked",
        "the compaction of 1970-01-01 00:01:00 UTC failed: deadline: too late",
    ]
    found = await look(path)
    assert found.conversations[0].compactions == "; ".join(lines)
    (told,) = found.tasks
    assert told.why == (
        "starts when a host with its code resumes; cut off 5 times; parked, unless its host allows more: its runs were "
        "cut off too often: find out why, then retry_task() or abort_task()"
    )
    shown = await asyncio.to_thread(CliRunner().invoke, app, ["show", str(path)])
    assert shown.output.splitlines()[-3:] == [f"— {line}" for line in lines]


# --- what is no store --------------------------------------------------------------------------------------------


def test_what_is_not_there(tmp_path: Path) -> None:
    for name in ("agent.db", "no/such/folder/agent.db"):
        result = call(tmp_path / name)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr == f"perdure inspect: there is no store at {tmp_path / name}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_folder(tmp_path: Path) -> None:
    result = call(tmp_path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"perdure inspect: there is no store at {tmp_path}\n"
    (tmp_path / "letter").write_text("dear")
    result = call(tmp_path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"{tmp_path} is a directory without commits.jsonl, and so no store" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["letter"]


def foreign(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE theirs (id INTEGER)")
        database.commit()


def numbered(version: int) -> bytes:
    return version.to_bytes(4, "big")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("empty", "is empty"),
        ("text", "is not a store but another kind of file"),
        ("database of another program", "is an SQLite database of another program"),
        ("newer", "has format 2, this code reads up to format 1; open it with a newer perdure"),
        ("cut", "was cut to"),
    ],
)
@pytest.mark.parametrize("how", [(), ("--json",)], ids=["people", "json"])
def test_what_is_no_store_is_said_and_left_alone(
    kind: str, words: str, how: tuple[str, ...], closed: Path, tmp_path: Path
) -> None:
    path = tmp_path / "agent.db"
    whole = closed.read_bytes()
    match kind:
        case "empty":
            path.touch()
        case "text":
            path.write_text("a letter to somebody\n" * 100)
        case "newer":
            path.write_bytes(whole[:60] + numbered(2) + whole[64:])
        case "cut":
            path.write_bytes(whole[: len(whole) // 2])
        case _:
            foreign(path)
    before = files(tmp_path)
    result = call(path, *how)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"perdure inspect: {path} ")
    assert words in result.stderr
    assert files(tmp_path) == before
