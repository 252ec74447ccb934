"""Local Spaces: one daemon a Space, generations that only rise, nothing of the user's touched (rules S105 to S110)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from space_kit import key

from perdure.spaces import LocalSpaces, Space, SpaceMisplaced, SpaceUnavailable
from perdure.spaces.client import SpaceClient
from perdure.spaces.errors import SpaceError, SpaceUnauthorized
from perdure.spaces.local_processes import kill_tagged, mark_of
from perdure.spaces.wire import Command, ExecKey

Spaces = Callable[..., LocalSpaces]


def below(root: Path) -> list[Path]:
    return sorted(root.glob("**/*"))


def homes(root: Path) -> list[Path]:
    return sorted(root.glob("**/.perdure"))


def records(root: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in root.glob("**/.perdure/*.json")]


@pytest.fixture
async def spaces(tmp_path: Path) -> AsyncIterator[Spaces]:
    """Makes LocalSpaces below tmp_path; every Space that is left anywhere below it is ended."""
    made: list[LocalSpaces] = []

    def make(directory: str = "spaces", **options: object) -> LocalSpaces:
        spaces = LocalSpaces(tmp_path / directory, **options)  # pyright: ignore[reportArgumentType]
        made.append(spaces)
        return spaces

    try:
        yield make
    finally:
        for home in homes(tmp_path):
            left = LocalSpaces(home.parent)
            for name in await left.names():
                noted = json.loads((home / f"{name}.json").read_text())
                try:
                    await left.delete(name)
                except SpaceError:
                    if noted["daemon"]:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(noted["daemon"]["pid"], signal.SIGKILL)
                    kill_tagged(noted["tag"] or "none")


async def run(client: SpaceClient, shell: str, ordinal: int = 1, *, seconds: float = 60) -> tuple[Command, bytes]:
    await client.start(key(ordinal), shell=shell)
    deadline = time.monotonic() + seconds
    while True:
        command, _ = await client.wait(key(ordinal), wait_ms=1000)
        if command.state == "exited":
            return await client.wait(key(ordinal), length=100_000)
        assert time.monotonic() < deadline


async def taken(space: Space, epoch: int = 1, keep: tuple[ExecKey, ...] = ()) -> SpaceClient:
    client = await space.connect()
    await client.advance(log="log", epoch=epoch, writer=f"w{epoch}", keep=keep)
    if client.seen.image is None:
        await client.settle(commit=0)
    return client


def proc(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


def started(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", *words], stdout=subprocess.PIPE, start_new_session=True)


def pid_of(space: Space, root: Path) -> int:
    return next(record for record in records(root) if record["name"] == space.name)["daemon"]["pid"]


async def gone(pid: int, seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while mark_of(pid) is not None:
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


# --- making and finding


async def test_a_space_is_made_once_and_found_again(spaces: Spaces, tmp_path: Path) -> None:
    one = spaces()
    assert await one.find("build-42") is None
    assert not (tmp_path / "spaces").exists(), "looking makes nothing"
    space = await one.open("build-42")
    assert (space.name, space.generation) == ("build-42", 1)
    again = await spaces().open("build-42")
    found = await spaces().find("build-42")
    assert found is not None
    assert space.address == again.address == found.address
    assert await one.names() == ("build-42",)
    async with await taken(space) as client:
        command, output = await run(client, "pwd; echo x > file")
        assert command.code == 0
        assert output.decode() == f"{tmp_path}/spaces/build-42/workspace\n"
    assert (tmp_path / "spaces/build-42/workspace/file").read_text() == "x\n"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".hidden", "-x", "a b", "ü", "x" * 101, "a\0", "a\n"])
async def test_a_name_that_no_space_can_have(spaces: Spaces, tmp_path: Path, name: str) -> None:
    one = spaces()
    for method in (one.open, one.find, one.restart, one.delete):
        with pytest.raises(ValueError, match="is no name of a Space"):
            await method(name)
    assert not (tmp_path / "spaces").exists()


async def test_the_token_is_private_and_shown_nowhere(spaces: Spaces, tmp_path: Path) -> None:
    """Rule S101."""
    space = await spaces().open("a")
    token = tmp_path / "spaces/a/token"
    assert token.read_text() == space.address.token
    assert len(space.address.token) >= 32
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert stat.S_IMODE(token.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "spaces/.perdure").stat().st_mode) == 0o700
    pid = pid_of(space, tmp_path)
    for name in ("cmdline", "environ"):
        assert space.address.token.encode() not in proc(pid, name)
    for path in below(tmp_path):
        if path.is_file() and path != token:
            assert space.address.token.encode() not in path.read_bytes(), path
    async with await space.connect() as client:
        assert space.address.token not in repr(space) + repr(client)


async def test_what_its_containment_is_is_said(spaces: Spaces) -> None:
    """Rule S106."""
    assert (await spaces("none", containment="none").open("a")).containment == "none"
    space = await spaces("auto").open("a")
    async with await space.connect() as client:
        assert client.seen.containment == space.containment


async def test_commands_have_the_environment_that_was_given(spaces: Spaces, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule S110."""
    monkeypatch.setenv("OF_THE_STARTER", "yes")
    script = "echo $OF_THE_STARTER-$GIVEN"
    async with await taken(await spaces("all").open("a")) as client:
        assert (await run(client, script))[1] == b"yes-\n"
    given = {"GIVEN": "this", "PATH": os.environ["PATH"]}
    async with await taken(await spaces("some", env=given).open("a")) as client:
        assert (await run(client, script))[1] == b"-this\n"


async def test_a_socket_may_have_a_long_path(spaces: Spaces, tmp_path: Path) -> None:
    space = await spaces("/".join(["d" * 60] * 3)).open("a" * 100)
    assert len(space.address.address) > 250
    async with await taken(space) as client:
        assert (await run(client, "echo here"))[1] == b"here\n"
    assert (await spaces("/".join(["d" * 60] * 3)).open("a" * 100)).address == space.address


async def test_what_does_not_start_says_why_and_leaves_no_daemon(spaces: Spaces, tmp_path: Path) -> None:
    with pytest.raises(SpaceUnavailable, match="could not be started"):
        await spaces(python=str(tmp_path / "no-python")).open("a")
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 1000\n")
    silent.chmod(0o755)
    with pytest.raises(SpaceUnavailable, match="did not serve within"):
        await spaces(python=str(silent), start_s=0.3).open("a")
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho it is broken >&2\nexit 2\n")
    failing.chmod(0o755)
    with pytest.raises(SpaceUnavailable, match="it is broken"):
        await spaces(python=str(failing)).open("a")
    assert (await spaces().open("a")).generation == 1


async def test_a_place_where_nothing_can_be_made_is_told(spaces: Spaces, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpaceUnavailable, match="cannot be used: Not a directory"):
        await spaces("file/spaces").open("a")


async def test_a_folder_of_somebody_elses_is_left_alone(spaces: Spaces, tmp_path: Path) -> None:
    theirs = tmp_path / "spaces/a/file"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs")
    with pytest.raises(SpaceUnavailable, match="holds something that is no Space"):
        await spaces().open("a")
    assert [path.name for path in theirs.parent.iterdir()] == ["file"]


# --- one daemon


async def test_many_processes_that_open_a_space_at_once_start_one_daemon(spaces: Spaces, tmp_path: Path) -> None:
    """Rule S107."""
    program = """
import asyncio, sys
from perdure.spaces import LocalSpaces

async def main():
    space = await LocalSpaces(sys.argv[1]).open("a")
    async with await space.connect() as client:
        print(space.generation, client.seen.pid, client.seen.instance)

asyncio.run(main())
"""
    others = [started(program, str(tmp_path / "spaces")) for _ in range(3)]
    here = spaces()
    opened = await asyncio.gather(*(here.open("a") for _ in range(3)))
    said = [await asyncio.to_thread(other.communicate, timeout=60) for other in others]
    async with await opened[0].connect() as client:
        mine = f"1 {client.seen.pid} {client.seen.instance}\n".encode()
    assert {out for out, _ in said} == {mine}
    assert len({space.address for space in opened}) == 1


async def test_a_daemon_outlives_who_started_it(spaces: Spaces, tmp_path: Path) -> None:
    """Rule S107: killed or not, and in a session of its own."""
    program = """
import asyncio, os, signal, sys
from perdure.spaces import LocalSpaces
asyncio.run(LocalSpaces(sys.argv[1]).open("a"))
os.killpg(0, signal.SIGKILL)
"""
    starter = started(program, str(tmp_path / "spaces"))
    out, _ = await asyncio.to_thread(starter.communicate, timeout=60)  # Ends only if the daemon holds no output.
    assert (starter.returncode, out) == (-signal.SIGKILL, b"")
    pid = records(tmp_path)[0]["daemon"]["pid"]
    space = await spaces().open("a")
    async with await space.connect() as client:
        assert client.seen.pid == pid


async def test_a_dead_daemon_is_started_again_and_its_commands_run_on(spaces: Spaces, tmp_path: Path) -> None:
    """Rule S107."""
    space = await spaces().open("a")
    async with await taken(space) as client:
        await client.start(key(), shell="sleep 1000")
    os.kill(pid_of(space, tmp_path), signal.SIGKILL)
    assert await gone(pid_of(space, tmp_path))
    again = await space.reopen()
    assert again.address == space.address
    async with await taken(again, 2, keep=(key(),)) as client:
        command, _ = await client.wait(key())
        assert command.state == "running"
        assert (await client.kill(key(), "aborted")).signal == signal.SIGKILL


async def test_a_daemon_that_hangs_is_restarted(spaces: Spaces, tmp_path: Path) -> None:
    """Rule S107."""
    space = await spaces().open("a")
    async with await taken(space) as client:
        await client.start(key(), shell="sleep 1000")
    pid = pid_of(space, tmp_path)
    os.kill(pid, signal.SIGSTOP)
    again = await space.restart()
    assert again.address == space.address
    assert pid_of(space, tmp_path) != pid
    async with await taken(again, 2, keep=(key(),)) as client:
        assert (await client.wait(key()))[0].state == "running"


async def test_what_is_not_there_is_not_restarted(spaces: Spaces, tmp_path: Path) -> None:
    with pytest.raises(SpaceUnavailable, match="there is no Space a"):
        await spaces().restart("a")
    assert not (tmp_path / "spaces").exists()


async def test_a_daemon_with_another_token_is_not_talked_to(spaces: Spaces, tmp_path: Path) -> None:
    space = await spaces().open("a")
    (tmp_path / "spaces/a/token").write_text("x" * 40)
    with pytest.raises(SpaceUnauthorized):
        await space.reopen()
    again = await space.restart()
    assert again.address.token == "x" * 40


# --- losing and deleting


async def test_a_lost_space_comes_back_under_a_higher_generation(spaces: Spaces, tmp_path: Path) -> None:
    """Rule S105: and nothing of the lost one lives that could write into the new one."""
    space = await spaces().open("a")
    client = await taken(space)
    victim = tmp_path / "spaces/a/workspace/victim"
    await client.start(key(), shell=f"setsid sh -c 'while sleep 0.01; do echo x >> {victim}; done' & sleep 1000")
    await client.wait(key(), wait_ms=1)
    daemon = pid_of(space, tmp_path)
    shutil.rmtree(tmp_path / "spaces/a", ignore_errors=True)
    shutil.rmtree(tmp_path / "spaces/a", ignore_errors=True)
    await client.aclose()
    assert await spaces().find("a") is None
    again = await space.reopen()
    assert again.generation == 2
    assert again.address.token != space.address.token
    assert await gone(daemon)
    assert list((tmp_path / "spaces/a/workspace").iterdir()) == []
    with pytest.raises(SpaceUnavailable):
        await space.connect()
    shutil.rmtree(tmp_path / "spaces/a")
    assert (await again.reopen()).generation == 3


@pytest.mark.parametrize("part", ["state", "token", "space.json", "workspace"])
async def test_a_space_that_lost_a_part_is_another_generation_and_keeps_its_files(
    spaces: Spaces, tmp_path: Path, part: str
) -> None:
    """Rule S105."""
    space = await spaces().open("a")
    folder = tmp_path / "spaces/a"
    (folder / "workspace/file").write_text("kept")
    (folder / "state/recovery/file").write_text("kept")
    if (folder / part).is_dir():
        shutil.rmtree(folder / part)
    else:
        (folder / part).unlink()
    assert (await space.reopen()).generation == 2
    assert part == "workspace" or (folder / "workspace/file").read_text() == "kept"
    assert part == "state" or [path.read_text() for path in folder.glob("lost-1-*/recovery/file")] == ["kept"]


async def test_a_folder_that_is_newer_than_its_record_is_told(spaces: Spaces, tmp_path: Path) -> None:
    """Rule S105: a number is never given twice because a record was lost."""
    space = await spaces().open("a")
    await space.delete()
    space = await spaces().open("a")
    record = tmp_path / "spaces/.perdure/a.json"
    kept = record.read_text()
    record.unlink()
    with pytest.raises(SpaceUnavailable, match="generation 2"):
        await spaces().open("a")
    record.write_text("{")
    with pytest.raises(SpaceUnavailable, match="cannot be read"):
        await spaces().open("a")
    record.write_text(kept)
    assert (await spaces().open("a")).address == space.address


async def test_a_deleted_space_leaves_nothing_living(spaces: Spaces, tmp_path: Path) -> None:
    """Rule S109."""
    one = spaces()
    space = await one.open("a")
    pidfile = tmp_path / "pid"
    async with await taken(space) as client:
        await run(client, f"setsid sleep 1000 >/dev/null & echo $! > {pidfile}")
    left = int(pidfile.read_text())
    daemon = pid_of(space, tmp_path)
    assert mark_of(left) is not None
    await one.delete("a")
    assert mark_of(left) is None
    assert mark_of(daemon) is None
    assert sorted(path.name for path in (tmp_path / "spaces").iterdir()) == [".perdure"]
    assert await one.find("a") is None
    assert await one.names() == ()
    await one.delete("a")
    assert (await one.open("a")).generation == 2


async def test_a_space_whose_daemon_is_dead_is_deleted_with_what_it_left(spaces: Spaces, tmp_path: Path) -> None:
    """Rule S109."""
    space = await spaces().open("a")
    async with await taken(space) as client:
        command, _ = await client.start(key(), shell="exec sleep 1000", wait_ms=1)
    assert command.pid is not None
    os.kill(pid_of(space, tmp_path), signal.SIGKILL)
    await space.delete()
    assert mark_of(command.pid) is None


# --- workspaces of the user's


async def test_a_users_directory_is_a_workspace_with_nothing_of_ours_in_it(spaces: Spaces, tmp_path: Path) -> None:
    """Rules S108 and S109."""
    project = tmp_path / "my project"
    project.mkdir()
    (project / "file").write_text("theirs")
    space = await LocalSpaces.at(project)
    assert space.name == "my-project"
    async with await taken(space) as client:
        _, output = await run(client, "cat file; echo more > new; pwd")
        assert output.decode() == f"theirs{project}\n"
    again = await LocalSpaces.at(project)
    assert again.address == space.address
    assert sorted(path.name for path in project.iterdir()) == ["file", "new"]
    await space.delete()
    assert sorted(path.name for path in project.iterdir()) == ["file", "new"]
    assert (await LocalSpaces.at(f"{project}/../my project")).generation == 2


async def test_a_directory_may_be_given_to_a_named_space(spaces: Spaces, tmp_path: Path) -> None:
    project = tmp_path / "project"
    other = tmp_path / "other"
    project.mkdir()
    other.mkdir()
    space = await spaces().open("a", workspace=project)
    assert (await space.reopen()).address == space.address
    assert (await spaces().open("a", workspace=project)).address == space.address
    with pytest.raises(SpaceMisplaced, match=f"works in {project}"):
        await spaces().open("a", workspace=other)
    with pytest.raises(SpaceMisplaced, match="is not a directory"):
        await spaces().open("b", workspace=tmp_path / "none")


async def test_workspaces_that_overlap_are_refused_before_anything_is_made(spaces: Spaces, tmp_path: Path) -> None:
    """Rule S108."""
    outer = tmp_path / "outer"
    project = outer / "project"
    inner = project / "inner"
    inner.mkdir(parents=True)
    await LocalSpaces.at(project)
    before = below(tmp_path)
    for workspace in (outer, inner, tmp_path):
        with pytest.raises(SpaceMisplaced):
            await LocalSpaces.at(workspace)
        with pytest.raises(SpaceMisplaced):
            await spaces("elsewhere").open("a", workspace=workspace)
    for directory in ("outer/project/spaces", "outer/project"):
        with pytest.raises(SpaceMisplaced, match="keep it elsewhere, or delete"):
            await spaces(directory).open("a")
    link = tmp_path / "link"
    link.symlink_to(inner)
    with pytest.raises(SpaceMisplaced):
        await LocalSpaces.at(link)
    link.unlink()
    after = [path for path in below(tmp_path) if "outer/.project.perdure/project/" not in f"{path}/"]
    assert after == [path for path in before if "outer/.project.perdure/project/" not in f"{path}/"]


async def test_two_spaces_of_one_directory_do_not_share_a_workspace(spaces: Spaces, tmp_path: Path) -> None:
    """Rule S108."""
    project = tmp_path / "project"
    (project / "sub").mkdir(parents=True)
    await spaces().open("a", workspace=project)
    for workspace in (project, project / "sub", tmp_path, tmp_path / "spaces"):
        with pytest.raises(SpaceMisplaced):
            await spaces().open("b", workspace=workspace)
    await spaces().delete("a")
    await spaces().open("b", workspace=project / "sub")


async def test_a_workspace_of_the_users_that_is_gone_is_told(spaces: Spaces, tmp_path: Path) -> None:
    """Nobody makes a directory where the user removed one."""
    project = tmp_path / "project"
    project.mkdir()
    space = await spaces().open("a", workspace=project)
    project.rename(tmp_path / "moved")
    with pytest.raises(SpaceUnavailable, match="is gone"):
        await space.reopen()
    assert not project.exists()
    (tmp_path / "moved").rename(project)
    assert (await space.reopen()).generation == 1
