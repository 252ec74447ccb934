"""``perdure space``: what is told of Spaces, compared, written out; stopped and deleted (S117, S164 to S167)."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from perdure import Harness, SqliteStorage, coding_tools
from perdure.cli.app import app
from perdure.cli.space import ending
from perdure.kernel.reports import Report
from perdure.spaces import LocalSpaces, compare, connection, durable_space
from perdure.spaces.local_processes import mark_of
from perdure.testing.model import Call, ScriptedModel, call, say

NAME = b"caf\xe9"
"""No UTF-8."""
MAKE = (
    "umask 022; mkdir -p src/deep; printf 'one\\ntwo\\n' > src/deep/text; "
    "printf 'x = 1\\n' > run.py; chmod 755 run.py; "
    "mkdir -m 700 empty; ln -s nowhere link; head -c 2500000 /dev/urandom > big; : > nothing; "
    "printf odd > \"$(printf 'caf\\351')\"; mkdir closed; echo in > closed/in; chmod 500 closed; "
    "echo s > setuid; chmod 4755 setuid"
)
WAIT = "echo one >> log; while [ ! -e ../gate ]; do sleep 0.02; done; echo two >> log"


class Place:
    """A store, and a directory of Spaces."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "agent.db"
        self.spaces = folder / "spaces"
        self.reports: list[Report] = []
        self._asked = 0

    def workspace(self, name: str = "one") -> Path:
        return self.spaces / name / "workspace"

    def call(self, *words: str | Path) -> Result:
        return CliRunner().invoke(app, ["space", *map(str, words)])

    def said(self, *words: str | Path) -> str:
        done = self.call(*words)
        assert done.exit_code == 0, done.output
        return done.output

    def work(
        self, *calls: Call, name: str = "one", meanwhile: Callable[[Harness], Awaitable[None]] | None = None
    ) -> None:
        """An agent makes these calls, while ``meanwhile`` runs."""
        asyncio.run(self._work(*calls, name=name, meanwhile=meanwhile))

    async def _work(self, *calls: Call, name: str, meanwhile: Callable[[Harness], Awaitable[None]] | None) -> None:
        space = await LocalSpaces(self.spaces).open(name)
        self._asked += 1
        async with Harness.open(
            SqliteStorage(self.store),
            models=ScriptedModel({"go": [*calls, say("done")]}),
            extensions=[coding_tools()],
            environment=durable_space(space),
            on_report=self.reports.append,
        ) as harness:
            submission = await (await harness.root()).submit("go", request_id=f"{self._asked}")
            if meanwhile is not None:
                await meanwhile(harness)
            if harness.session.failed is None:
                assert (await submission.answer()).text == "done"

    def close(self) -> None:
        async def end() -> None:
            spaces = LocalSpaces(self.spaces)
            for name in await spaces.names():
                await spaces.delete(name)

        asyncio.run(end())


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to that")


def everything(root: Path) -> dict[bytes, tuple[int, object]]:
    """Mode and content of all that is in a directory, and when it was changed."""
    found: dict[bytes, tuple[int, object]] = {}
    for folder, folders, files in os.walk(os.fsencode(root)):
        for name in [*folders, *files]:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            content: object = None
            if stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(status.st_mode):
                content = Path(os.fsdecode(path)).read_bytes()
            found[os.path.relpath(path, os.fsencode(root))] = (status.st_mode, content)
    return found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """With a workspace that has something of everything. Tests leave it as it is."""
    place = Place(tmp_path_factory.mktemp("made"))
    place.work(call("bash", command=MAKE))
    yield place
    place.close()


# --- ls and show -------------------------------------------------------------------------------------------------


def test_spaces_of_a_directory_are_listed_with_their_daemons_s164(place: Place) -> None:
    place.spaces.mkdir()
    assert place.said("ls", place.spaces) == "no Spaces yet\n"
    place.work(call("bash", command="true"))
    (line,) = [json.loads(line) for line in place.said("ls", place.spaces, "--json").splitlines()]
    assert (line["name"], line["generation"], line["state"], line["image"]) == ("one", 1, "running", 1)
    assert line["containment"] in ("none", "cgroup1", "cgroup2")
    assert line["workspace"] == str(place.workspace())
    assert f"daemon {line['daemon']}" in place.said("ls", place.spaces)
    os.kill(line["daemon"], signal.SIGKILL)
    (line,) = [json.loads(line) for line in place.said("ls", place.spaces, "--json").splitlines()]
    assert (line["state"], line["daemon"], line["containment"]) == ("ended", None, None)
    shutil.rmtree(place.spaces / "one")
    assert "one  generation 1  lost" in place.said("ls", place.spaces)
    assert not (place.spaces / "one").exists()  # looking makes nothing


def test_a_workspace_of_the_users_is_found_by_itself_s164(place: Place) -> None:
    work = place.folder / "work"
    work.mkdir()

    async def open() -> None:
        space = await LocalSpaces.at(work)
        assert (await space.provider.open(space.name)).generation == 1

    asyncio.run(open())
    try:
        (line,) = [json.loads(line) for line in place.said("ls", work, "--json").splitlines()]
        assert (line["name"], line["workspace"], line["state"]) == ("work", str(work), "running")
    finally:
        asyncio.run(LocalSpaces(place.folder / ".work.perdure").delete("work"))


def test_spaces_of_a_store_are_listed_and_shown_s135(made: Place) -> None:
    (line,) = [json.loads(line) for line in made.said("ls", made.store, "--json").splitlines()]
    assert line["name"] == "one"
    assert (line["image"], line["files"], line["calls"], line["external"], line["open"]) == (2, 7, 1, 1, None)
    assert "one  generation 1  image 2  7 files, 2.4 MiB\n" in made.said("ls", made.store)
    shown = made.said("show", made.store)
    assert "image 2: 7 files, 2.4 MiB\ngeneration 1; 1 call, 1 external change\n" in shown
    assert str(made.workspace()) not in shown
    assert f"workspace {made.workspace()}\ndaemon " in made.said("show", made.store, made.spaces)
    found = json.loads(made.said("show", made.store, made.spaces, "--json"))
    assert found["local"]["log"] == found["log"]
    assert found["recoveries"] == []


def test_an_open_call_and_how_it_went_on_are_shown_s162(place: Place) -> None:
    log = place.workspace() / "log"

    async def die(harness: Harness) -> None:
        await until(log.exists)
        shown = json.loads(await asyncio.to_thread(place.said, "show", place.store, "--json"))
        assert (shown["space"]["tool"], shown["space"]["attempt"]) == ("bash", 1)
        differs = json.loads(await asyncio.to_thread(place.said, "diff", place.store, place.spaces, "--json"))
        assert differs["open"] == shown["space"]["open"]
        assert [each["path"] for each in differs["differences"]] == ["log"]
        harness.session.fail(ConnectionError("killed"))

    place.work(call("bash", command=WAIT), meanwhile=die)
    assert "call " in place.said("show", place.store)
    assert ", bash, is under way: attempt 1\n" in place.said("show", place.store)
    (place.workspace().parent / "gate").touch()
    place._asked -= 1
    place.work(call("bash", command=WAIT))
    found = json.loads(place.said("show", place.store, "--json"))
    (recovery,) = found["recoveries"]
    assert found["space"]["open"] is None
    assert recovery["went_on"] in ("reattached", "adopted")
    assert (recovery["tool"], recovery["result"]) == ("bash", "done")
    assert recovery["why"] in ("its command was still running", "its command had ended")
    assert recovery["why"] in place.said("show", place.store)
    told = CliRunner().invoke(app, ["inspect", str(place.store)]).output
    assert "recoveries of Spaces" in told
    assert recovery["why"] in told
    report = json.loads(CliRunner().invoke(app, ["inspect", str(place.store), "--json"]).output)
    assert report["recoveries"] == [recovery]
    assert report["spaces"] == [found["space"]]


def test_recovery_folders_are_named_s142(place: Place) -> None:
    gate = place.workspace().parent / "gate"

    async def lose(harness: Harness) -> None:
        await until((place.workspace() / "log").exists)
        (place.workspace() / "mine").write_text("mine")
        (line,) = [
            json.loads(line)
            for line in (await asyncio.to_thread(place.said, "ls", place.spaces, "--json")).splitlines()
        ]
        harness.session.fail(ConnectionError("killed"))
        os.kill(line["daemon"], signal.SIGKILL)

    place.work(call("bash", command=WAIT), meanwhile=lose)
    for path in (place.workspace().parent / "state").glob("space.json"):
        assert path.exists()
    # Without its ledger nobody can adopt the command: the Space is made anew from the log.
    shutil.rmtree(place.workspace().parent / "state")
    gate.touch()
    place._asked -= 1
    place.work(call("bash", command=WAIT))
    local = json.loads(place.said("show", place.store, place.spaces, "--json"))["local"]
    kept = [Path(folder) / "mine" for folder in local["recovery"]]
    assert [path.read_text() for path in kept if path.exists()] == ["mine"]
    assert f"recovery folder {local['recovery'][0]}" in place.said("show", place.store, place.spaces)


def test_a_space_beside_a_workspace_is_found_from_the_directory_of_both_s164(place: Place) -> None:
    for name in ("work", "other"):
        (place.folder / name).mkdir()
        asyncio.run(open_at(place.folder / name))
    (place.folder / ".none.perdure").touch()
    try:
        lines = [json.loads(line) for line in place.said("ls", place.folder, "--json").splitlines()]
        assert [(line["name"], line["workspace"]) for line in lines] == [
            ("other", str(place.folder / "other")),
            ("work", str(place.folder / "work")),
        ]
        assert "say which with --name" in place.call("stop", place.folder).output
        assert "daemon" in place.said("stop", place.folder, "--name", "work")
        assert "  ended  " in place.said("ls", place.folder / "work")
        assert "  daemon " in place.said("ls", place.folder / "other")
    finally:
        for name in ("work", "other"):
            asyncio.run(LocalSpaces(place.folder / f".{name}.perdure").delete(name))


async def open_at(work: Path) -> None:
    await LocalSpaces.at(work)


# --- stop and rm -------------------------------------------------------------------------------------------------


def test_a_space_is_stopped_with_all_that_lives_in_it_s117(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.work(call("bash", command="echo kept > file; setsid sleep 1000 > /dev/null 2>&1 & echo $! > ../pid"))
    left = int((place.workspace().parent / "pid").read_text())
    (line,) = [json.loads(line) for line in place.said("ls", place.spaces, "--json").splitlines()]
    assert line["living"] == 1
    monkeypatch.chdir(place.spaces)
    assert place.said("stop", "one") == (
        f"Space one: ended daemon {line['daemon']} and 1 process; its files and its state stay\n"
    )
    assert mark_of(left) is None
    assert mark_of(line["daemon"]) is None
    assert (place.workspace() / "file").read_text() == "kept\n"
    assert place.said("stop", place.spaces) == "Space one: nothing ran\n"
    refused = place.call("stop", "two")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "has no Space named 'two'; it has one" in refused.stderr
    place.work(call("bash", command="cat file"))
    assert place.said("show", place.store).splitlines()[2].startswith("generation 1; 2 calls")


@pytest.mark.parametrize("daemon", ["killed", "frozen"])
def test_commands_without_a_daemon_that_answers_are_stopped_s117(
    place: Place, daemon: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.work(call("bash", command="setsid sleep 1000 > /dev/null 2>&1 & echo $! > ../pid"))
    left = int((place.workspace().parent / "pid").read_text())
    (line,) = [json.loads(line) for line in place.said("ls", place.spaces, "--json").splitlines()]
    os.kill(line["daemon"], signal.SIGKILL if daemon == "killed" else signal.SIGSTOP)
    monkeypatch.setattr(connection, "HELLO_S", 2.0)
    ended = "" if daemon == "killed" else f"daemon {line['daemon']} and "
    assert place.said("stop", place.spaces) == f"Space one: ended {ended}1 process; its files and its state stay\n"
    assert mark_of(left) is None
    assert mark_of(line["daemon"]) is None


def test_a_space_is_deleted_only_if_that_is_confirmed_s167(place: Place) -> None:
    work = place.folder / "work"
    work.mkdir()
    (work / "mine").write_text("mine")
    asyncio.run(open_at(work))
    refused = place.call("rm", work)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "--yes deletes without asking" in refused.stderr
    assert "  daemon " in place.said("ls", work)
    kept = place.folder / ".work.perdure"
    assert place.said("rm", work, "--yes") == f"deleted the Space work in {kept}; its workspace {work} stays\n"
    assert (work / "mine").read_text() == "mine"
    assert place.said("ls", work) == "no Spaces yet\n"
    place.work(call("bash", command="true"))
    assert place.said("rm", place.spaces, "--yes") == f"deleted the Space one in {place.spaces}\n"
    assert not place.workspace().exists()


@pytest.mark.parametrize("answer", ["y", "n"])
def test_at_a_terminal_it_is_asked_first_s167(place: Place, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place.work(call("bash", command="true"))

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(ending, "sys", SimpleNamespace(stdin=Terminal()))
    done = CliRunner().invoke(app, ["space", "rm", str(place.spaces)], input=f"{answer}\n")
    assert f"the Space one in {place.spaces}, with its workspace {place.workspace()}" in done.stderr
    assert (done.exit_code == 0, place.workspace().exists()) == (answer == "y", answer == "n")


# --- diff --------------------------------------------------------------------------------------------------------


def test_a_workspace_that_is_the_image_has_no_differences_s165(made: Place) -> None:
    assert made.said("diff", made.store, made.spaces) == f"{made.workspace()} is image 2 of the Space one\n"


def test_every_difference_is_told_and_nothing_is_changed_s165(made: Place, tmp_path: Path) -> None:
    work = tmp_path / "work"
    shutil.copytree(made.workspace(), work, symlinks=True)
    (work / "src/deep/text").write_text("one\ntwo, changed\n")
    os.chmod(work / "run.py", 0o644)
    (work / "nothing").unlink()
    (work / "nothing").mkdir()
    (work / "empty").rmdir()
    (work / "link").unlink()
    (work / "link").symlink_to("elsewhere")
    (work / "big").write_bytes((work / "big").read_bytes()[:-1] + b"?")
    os.utime(work / "setuid", (1, 1))  # times are no part of an image
    Path(os.fsdecode(os.fsencode(work) + b"/" + NAME)).unlink()
    (work / "new").write_text("no end of line")
    (work / "data").write_bytes(b"\0\1")
    os.mkfifo(work / "pipe")  # opening it would wait for ever
    store, before = made.store.read_bytes(), everything(work)
    told = made.said("diff", made.store, work, "--patch")
    assert everything(work) == before
    assert made.store.read_bytes() == store
    assert told == (
        "~ big  (content)\n"
        "- caf\\xe9\n"
        "  --- a/caf\\xe9\n  +++ /dev/null\n  @@ -1 +0,0 @@\n  -odd\n  \\ No newline at end of file\n"
        "+ data\n"
        "- empty/\n"
        "~ link -> elsewhere  (target)\n"
        "+ new\n"
        "  --- /dev/null\n  +++ b/new\n  @@ -0,0 +1 @@\n  +no end of line\n  \\ No newline at end of file\n"
        "~ nothing/  (was a file, is a directory)\n"
        "~ run.py  (mode 0755, is 0644)\n"
        "~ src/deep/text  (content)\n"
        "  --- a/src/deep/text\n  +++ b/src/deep/text\n  @@ -1,2 +1,2 @@\n   one\n  -two\n  +two, changed\n"
        "! pipe: a special file, which no image can hold\n"
        f"9 differences between image 2 of the Space one and {work}, as far as it can be read\n"
    )
    report = json.loads(made.said("diff", made.store, work, "--json"))
    by_path = {str(each["path"]): each for each in report["differences"]}
    assert by_path["{'b64': 'Y2Fm6Q=='}"]["change"] == "removed"
    assert by_path["run.py"]["was"] == {**by_path["run.py"]["now"], "mode": "0755"}
    assert by_path["new"]["patch"] is None
    assert report["unfit"] == [{"path": "pipe", "reason": "a special file, which no image can hold"}]


def test_what_cannot_be_read_is_told_and_not_called_removed_s165(
    made: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    shutil.copytree(made.workspace(), work, symlinks=True)
    closed = {os.fsencode(work / "src"), os.fsencode(work / "run.py")}
    scandir, open_file = os.scandir, os.open

    def refuse(path: object) -> None:
        if path in closed:
            raise PermissionError(errno.EACCES, "Permission denied", path)

    def scan(path: bytes) -> object:  # root may read everything
        refuse(path)
        return scandir(path)

    def read(path: bytes, *words: int, **more: int) -> int:
        refuse(path)
        return open_file(path, *words, **more)

    monkeypatch.setattr(compare.os, "scandir", scan)
    monkeypatch.setattr(compare.os, "open", read)
    told = made.said("diff", made.store, work)
    assert told == (
        "! run.py: it cannot be read: Permission denied (EACCES)\n"
        "! src: it cannot be read: Permission denied (EACCES)\n"
        f"{work} is image 2 of the Space one, as far as it can be read\n"
    )


def test_a_store_that_is_open_elsewhere_is_compared_all_the_same_s164(place: Place) -> None:
    async def compare(harness: Harness) -> None:
        await harness.idle()
        (place.workspace() / "mine").write_text("mine")
        told = await asyncio.to_thread(place.said, "diff", place.store, place.spaces)
        assert told.startswith("+ mine\n1 difference between image 2")
        assert (await asyncio.to_thread(place.call, "restore", place.store, place.folder / "new")).exit_code == 0

    place.work(call("bash", command="echo a > a"), meanwhile=compare)
    assert everything(place.folder / "new") == {b"a": (stat.S_IFREG | 0o644, b"a\n")}


# --- restore -----------------------------------------------------------------------------------------------------


def test_the_image_is_written_out_byte_for_byte_s166(made: Place, tmp_path: Path) -> None:
    target = tmp_path / "new"
    told = made.said("restore", made.store, target)
    assert told == f"{target}: image 2 of the Space one, 7 files, 2.4 MiB\n"
    assert everything(target) == everything(made.workspace())
    assert len(everything(target)) == 12
    assert target.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert made.said("diff", made.store, target).startswith(str(target))


@pytest.mark.parametrize("there", ["file", "empty directory", "dangling link"])
def test_nothing_is_written_over_s166(there: str, made: Place, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    if there == "file":
        target.write_text("precious")
    elif there == "empty directory":
        target.mkdir()
    else:
        target.symlink_to(tmp_path / "nowhere")
    before = everything(tmp_path)
    done = made.call("restore", made.store, target)
    assert done.exit_code == 1
    assert done.output == f"perdure space restore: {target} is there already; name a directory that is not\n"
    assert everything(tmp_path) == before


def test_a_target_without_a_parent_is_said_s166(made: Place, tmp_path: Path) -> None:
    done = made.call("restore", made.store, tmp_path / "no" / "new")
    assert done.exit_code == 1
    assert "cannot be made: No such file or directory" in done.output


@pytest.mark.parametrize("damage", ["lost", "other bytes"])
def test_a_content_that_is_not_there_leaves_nothing_s166(damage: str, made: Place, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    shutil.copy(made.store, copy)
    with closing(sqlite3.connect(copy)) as store:
        largest = store.execute("SELECT rowid FROM contents ORDER BY length(data) DESC LIMIT 1").fetchone()[0]
        if damage == "lost":
            store.execute("DELETE FROM contents WHERE rowid = ?", (largest,))
        else:
            store.execute("UPDATE contents SET data = zeroblob(length(data)) WHERE rowid = ?", (largest,))
        store.commit()
    done = made.call("restore", copy, tmp_path / "new")
    assert done.exit_code == 1
    assert done.output.startswith("perdure space restore: ")
    assert "content" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["copy.db"]


# --- shell -------------------------------------------------------------------------------------------------------


def test_a_command_runs_in_the_workspace_and_is_an_external_change_s145(place: Place) -> None:
    place.work(call("bash", command="echo a > a"))
    program = [Path(sys.executable).parent / "perdure", "space", "shell", place.spaces]

    def shell(*words: str, lines: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run([*program, *words], input=lines, capture_output=True, text=True, timeout=60, check=False)

    done = shell("cat a; echo mine > mine; exit 7")
    assert (done.returncode, done.stdout) == (7, "a\n")
    assert "external change" in done.stderr
    assert shell("ls", "-1").stdout == "a\nmine\n"
    assert shell(lines="pwd\n").stdout == f"{place.workspace()}\n"
    missing = shell("no-such-program", "x")
    assert missing.returncode == 1
    assert "no-such-program cannot be run in" in missing.stderr
    place.work(call("bash", command="cat mine"))
    assert json.loads(place.said("show", place.store, "--json"))["space"]["external"] == 2


# --- which one ---------------------------------------------------------------------------------------------------


def test_one_of_several_is_named(place: Place) -> None:
    place.work(call("bash", command="echo a > a"), name="one")
    place.work(call("bash", command="echo b > b"), name="two")
    done = place.call("diff", place.store, place.spaces)
    assert done.exit_code == 1
    assert "has several Spaces: one, two; say which with --name" in done.output
    assert "is image 2 of the Space two" in place.said("diff", place.store, place.spaces, "--name", "two")
    assert "the store has several Spaces: one, two" in place.call("restore", place.store, place.folder / "new").output
    place.said("restore", place.store, place.folder / "new", "--name", "two")
    assert everything(place.folder / "new").keys() == {b"b"}
    for words in (["show", place.store], ["shell", place.spaces, "true"]):
        done = place.call(*words, "--name", "three")
        assert done.exit_code == 1
        assert "'three'" in done.output


def test_what_is_not_there_is_said(place: Place) -> None:
    assert "there is neither a directory nor a store" in place.call("ls", place.folder / "no").output
    assert "there is no such directory" in place.call("shell", place.folder / "no", "true").output
    assert "no Space is kept in" in place.call("shell", place.folder, "true").output

    async def nothing(_: Harness) -> None:
        pass

    place.work(meanwhile=nothing)
    assert "the store has no Space" in place.call("restore", place.store, place.folder / "new").output
    assert place.said("ls", place.store) == "no Spaces yet\n"
    assert not (place.folder / "new").exists()
