"""What becomes of a command's output: exact, bounded, kept and reclaimed (rules H115 and T90)."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
import threading
import tracemalloc
from pathlib import Path

import pytest
from local_kit import Until, alive, mode, pids

from perdure.harness.environment import PathEscapes
from perdure.tools import command, spills
from perdure.tools.bash import bash
from perdure.tools.local import LocalEnvironment

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


async def test_opening_standard_error_by_name_wipes_nothing(env: LocalEnvironment) -> None:
    result = await env.exec("echo one; echo two > /dev/stderr; echo three > /dev/stdout; echo four")
    assert result.output == b"one\ntwo\nthree\nfour\n"


async def test_a_command_may_close_its_output_and_go_on(env: LocalEnvironment, work: Path) -> None:
    result = await env.exec("echo out; exec > /dev/null 2>&1; sleep 0.05; touch finished; exit 6")
    assert (result.exit_code, result.output) == (6, b"out\n")
    assert (work / "finished").exists()


async def test_output_is_bytes_as_they_came(env: LocalEnvironment) -> None:
    until = Until()
    result = await env.exec(r"printf '\377\376\000\303'", on_output=until)
    assert result.output == until.output == b"\xff\xfe\x00\xc3"


async def test_a_small_output_is_kept_nowhere(env: LocalEnvironment, tmp_path: Path) -> None:
    result = await env.exec("seq 1000")
    assert (result.output_path, result.output_kept) == (None, 0)
    assert not (tmp_path / "outputs").exists()


async def test_a_large_output_is_counted_exactly_kept_and_bounded_in_memory(
    env: LocalEnvironment, tmp_path: Path
) -> None:
    size, lines = 30_000_000, 0

    def count(chunk: bytes) -> None:
        nonlocal lines
        lines += chunk.count(b"\n")

    tracemalloc.start()
    try:
        result = await env.exec(f"yes 123456789 | head -c {size}", on_output=count)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6_000_000
    assert (result.output_bytes, result.output_kept, lines) == (size, size, size // 10)
    assert result.output == (b"123456789\n" * 6554)[-command.INLINE_OUTPUT :]
    assert result.output_path is not None
    path = Path(result.output_path)
    assert path.parent == tmp_path / "outputs"
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)
    # A confined environment reads it, too.
    assert await env.read_file(result.output_path) == b"123456789\n" * (size // 10)
    assert await env.stat(result.output_path) is not None


async def test_what_is_kept_of_one_output_is_bounded(env: LocalEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spills, "MAX_FILE", 100_000)
    result = await env.exec("seq 1 50000")
    assert result.output_bytes > 200_000
    assert result.output_kept == 100_000
    assert result.output_path is not None
    expected = "".join(f"{number}\n" for number in range(1, 50001)).encode()
    assert await env.read_file(result.output_path) == expected[:100_000]
    assert expected.endswith(result.output)


async def test_a_file_in_which_nothing_was_kept_is_not_named(
    env: LocalEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spills, "MAX_FILE", 0)  # as a full disk
    assert (await bash(env, "seq 100000")).text.endswith(" bytes before that are not.]")


async def test_a_flood_of_output_is_stopped_and_told_h371(
    env: LocalEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.tools.local.MOST_OUTPUT", 1_000_000)
    answer = await bash(env, "yes; true")
    assert answer.failed
    assert answer.text.endswith(".log.]\n[It wrote more than 256 MiB; the command was stopped.]")
    assert answer.details["output_limit"]
    assert not (await bash(env, "yes | head -c 1000000")).failed, "so much may it write"


async def test_too_much_output_is_told_where_the_command_ended_before_it_was_read_h371(
    env: LocalEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    readable = command._Command._readable

    async def late(self: command._Command) -> None:
        await self._exited
        await readable(self)

    monkeypatch.setattr(command._Command, "_readable", late)
    monkeypatch.setattr("perdure.tools.local.MOST_OUTPUT", 1000)
    answer = await bash(env, "head -c 1001 /dev/zero")
    assert answer.failed
    assert answer.details["output_limit"]


async def test_old_outputs_are_reclaimed(
    env: LocalEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spills, "MAX_FILES", 3)
    paths = [(await env.exec("seq 1 20000")).output_path for _ in range(5)]
    kept = sorted(str(path) for path in (tmp_path / "outputs").iterdir())
    assert len(kept) == 3
    assert paths[-1] in kept
    assert set(kept) <= set(paths)


async def test_only_kept_outputs_are_reclaimed_and_read(
    env: LocalEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory may be one where others keep files, too."""
    monkeypatch.setattr(spills, "MAX_FILES", 1)
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    for name in ("app.log", "output-2024.log"):
        (outputs / name).write_text("theirs")
        os.utime(outputs / name, (1, 1))
    for _ in range(3):
        await env.exec("seq 1 20000")
    assert {"app.log", "output-2024.log"} < set(os.listdir(outputs))
    assert len(os.listdir(outputs)) == 3
    for name in ("app.log", "output-2024.log", ".", "../secret"):
        with pytest.raises(PathEscapes):
            await env.read_file(f"{outputs}/{name}")


async def test_old_outputs_that_cannot_be_reclaimed_fail_nothing(
    env: LocalEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spills, "MAX_FILES", 1)

    def forbidden(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "unlink", forbidden)
    for _ in range(3):
        assert (await env.exec("seq 1 20000; exit 7")).exit_code == 7


async def test_an_output_in_the_making_is_not_reclaimed_by_another_environment(
    env: LocalEnvironment, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that keeps its outputs in the same directory."""
    monkeypatch.setattr(spills, "MAX_FILES", 1)
    until = Until(b"\n20000\n")
    running = asyncio.create_task(env.exec("seq 1 20000; while [ ! -e go ]; do sleep 0.02; done", on_output=until))
    await until.seen.wait()
    while not (tmp_path / "outputs").exists() or not os.listdir(tmp_path / "outputs"):
        await asyncio.sleep(0.01)
    other = LocalEnvironment(tmp_path, output_dir=tmp_path / "outputs")
    for _ in range(3):
        await other.exec("seq 1 20000")
    kept = set(os.listdir(tmp_path / "outputs"))
    (work / "go").touch()
    path = (await running).output_path
    assert path is not None
    assert os.path.basename(path) in kept


async def test_reading_outside_makes_no_place_for_outputs(env: LocalEnvironment, tmp_path: Path) -> None:
    """And is refused as such, also where outputs cannot be kept."""
    with pytest.raises(PathEscapes):
        await env.read_file("/etc/passwd")
    assert not (tmp_path / "outputs").exists()
    (tmp_path / "outputs").write_text("not a directory")
    for path in ("/etc/passwd", f"{tmp_path}/outputs/output-0123456789abcdef.log"):
        with pytest.raises(PathEscapes):
            await env.stat(path)


async def test_outputs_whose_directory_was_swept_away_fail_nothing(
    env: LocalEnvironment, work: Path, tmp_path: Path
) -> None:
    """As temporary directories are, also while a command runs."""
    until = Until(b"\n19999\n")
    running = asyncio.create_task(env.exec("seq 1 20000; while [ ! -e go ]; do sleep 0.02; done", on_output=until))
    await until.seen.wait()
    while not (tmp_path / "outputs").exists() or not os.listdir(tmp_path / "outputs"):
        await asyncio.sleep(0.01)
    shutil.rmtree(tmp_path / "outputs")
    (work / "go").touch()
    assert (await running).exit_code == 0
    result = await env.exec("seq 1 20000")
    assert result.output_path is not None
    assert len(await env.read_file(result.output_path)) == result.output_bytes


async def test_a_disk_that_hangs_does_not_keep_commands_from_being_ended(
    env: LocalEnvironment, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T90: not even when as many outputs wait for it as there are threads."""
    loop, go_on, four = asyncio.get_running_loop(), threading.Event(), asyncio.Semaphore(0)
    real = spills.Spill.write

    def write(self: spills.Spill, data: bytes) -> None:
        loop.call_soon_threadsafe(four.release)
        go_on.wait()
        real(self, data)

    monkeypatch.setattr(spills.Spill, "write", write)
    until = Until()
    task = asyncio.create_task(env.exec("echo $$ > self.pid; echo ready; sleep 600", on_output=until))
    await until.seen.wait()
    hanging = [asyncio.create_task(env.exec("seq 1 20000")) for _ in range(4)]
    try:
        for _ in range(4):
            await four.acquire()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert not alive(pids(work)["self"])
    finally:
        go_on.set()
    await asyncio.gather(*hanging)


async def test_an_output_that_cannot_be_kept_fails_nothing(env: LocalEnvironment, tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("not a directory")
    result = await env.exec("seq 1 20000; exit 2")
    assert (result.exit_code, result.output_path, result.output_kept) == (2, None, 0)
    assert result.output.endswith(b"\n20000\n")


def test_the_default_place_of_outputs_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spills.tempfile, "tempdir", str(tmp_path))
    own = spills.Spills(None, "work").directory
    assert own == spills.Spills(None, "work").directory
    assert stat.S_IMODE(os.stat(own).st_mode) == 0o700
    os.chmod(own, 0o777)
    other = spills.Spills(None, "work").directory
    assert other != own
    assert stat.S_IMODE(os.stat(other).st_mode) == 0o700
