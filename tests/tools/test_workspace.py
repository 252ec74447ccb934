"""Files of the local environment: no path leads out, replacing is atomic (rule H115)."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import resource
import stat
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from perdure.harness.environment import (
    FileChanged,
    FileError,
    FileMissing,
    FileTooLarge,
    NotAFile,
    PathEscapes,
)
from perdure.tools import workspace as workspace_module
from perdure.tools.local import LocalEnvironment


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A workspace with a secret beside it."""
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "work2").mkdir()
    work = tmp_path / "work"
    (work / "sub").mkdir(parents=True)
    (work / "file").write_text("content")
    (work / "sub" / "inner").write_text("inner")
    return work


@pytest.fixture
def env(work: Path, tmp_path: Path) -> LocalEnvironment:
    return LocalEnvironment(work, output_dir=tmp_path / "outputs")


OPERATIONS: dict[str, Callable[[LocalEnvironment, str], Awaitable[object]]] = {
    "read": lambda env, path: env.read_file(path),
    "write": lambda env, path: env.write_file(path, b"overwritten"),
    "stat": lambda env, path: env.stat(path),
    "list": lambda env, path: env.list_dir(path),
    "exec": lambda env, path: env.exec("true", cwd=path),
}


def tree(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "path",
    ["../secret", "..", "sub/../../secret", "/etc/passwd", "{tmp}/secret", "{tmp}/work2", "{work}/../secret",
     "out/secret", "out", "link", "hop", "sub/up/secret", "new/../../secret"],
)  # fmt: skip
async def test_no_path_leads_out_of_a_confined_workspace(
    env: LocalEnvironment, work: Path, tmp_path: Path, operation: str, path: str
) -> None:
    (work / "out").symlink_to(tmp_path)
    (work / "link").symlink_to("../secret")
    (work / "hop").symlink_to("link")
    (work / "sub" / "up").symlink_to("../..")
    (work / "new").mkdir()
    before = tree(tmp_path)
    with pytest.raises(PathEscapes, match="leads out of the workspace"):
        await OPERATIONS[operation](env, path.format(tmp=tmp_path, work=work))
    assert tree(tmp_path) == before


async def test_removing_reaches_no_file_outside_but_takes_a_link_itself(
    env: LocalEnvironment, work: Path, tmp_path: Path
) -> None:
    (work / "out").symlink_to(tmp_path)
    with pytest.raises(PathEscapes):
        await env.remove("out/secret")
    with pytest.raises(PathEscapes):
        await env.remove("../secret")
    await env.remove("out")
    assert (tmp_path / "secret").exists()
    assert not (work / "out").is_symlink()


async def test_a_directory_swapped_for_a_link_after_the_check_is_not_followed(
    env: LocalEnvironment, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").write_text("outside")
    real_open = os.open

    def swapping_open(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == "sub":
            (work / "sub").rename(work / "moved")
            (work / "sub").symlink_to(tmp_path)
        return real_open(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", swapping_open)
    with pytest.raises(FileError):
        await env.read_file("sub/inner")


async def test_paths_inside_may_be_written_in_any_way(env: LocalEnvironment, work: Path) -> None:
    (work / "link").symlink_to("sub/inner")
    (work / "absolute").symlink_to(work / "sub")
    for path in ("sub/inner", "./sub//inner", "sub/../sub/inner", f"{work}/sub/inner", f"/{work}/sub/inner", "link",
                 "absolute/inner", "absolute/../sub/inner"):  # fmt: skip
        assert await env.read_file(path) == b"inner", path


async def test_the_root_may_be_named_through_a_link(work: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(work)
    env = LocalEnvironment(tmp_path / "alias")
    assert env.cwd == str(tmp_path / "alias")
    for root in (tmp_path / "alias", work):
        assert await env.read_file(f"{root}/file") == b"content"


async def test_an_unconfined_environment_reaches_everything(work: Path, tmp_path: Path) -> None:
    env = LocalEnvironment(work, confine=False)
    assert await env.read_file("../secret") == b"secret"
    assert await env.read_file(str(tmp_path / "secret")) == b"secret"
    await env.write_file("../written", b"1")
    assert (tmp_path / "written").read_bytes() == b"1"


async def test_a_loop_of_links_is_an_error(env: LocalEnvironment, work: Path) -> None:
    (work / "a").symlink_to("b")
    (work / "b").symlink_to("a")
    with pytest.raises(FileError, match="symbolic links"):
        await env.read_file("a")


@pytest.mark.parametrize("path", ["nul\0byte", "lone\ud800surrogate", "x" * 300])
async def test_a_name_no_file_can_have_is_an_error(env: LocalEnvironment, path: str) -> None:
    with pytest.raises(FileError):
        await env.write_file(path, b"")


async def test_ranges_of_a_file(env: LocalEnvironment) -> None:
    assert await env.read_file("file", offset=3) == b"tent"
    assert await env.read_file("file", offset=3, length=2) == b"te"
    assert await env.read_file("file", offset=3, length=200) == b"tent"
    assert await env.read_file("file", offset=100) == b""


async def test_a_file_larger_than_one_read_is_read_in_ranges(env: LocalEnvironment, work: Path) -> None:
    (work / "large").touch()
    os.truncate(work / "large", workspace_module.MAX_READ + 1)
    with pytest.raises(FileTooLarge, match="read a range"):
        await env.read_file("large")
    assert await env.read_file("large", offset=workspace_module.MAX_READ) == b"\0"


async def test_what_is_not_a_regular_file_is_neither_read_nor_replaced(env: LocalEnvironment, work: Path) -> None:
    os.mkfifo(work / "pipe")
    for path, message in (("sub", "a directory"), (".", "a directory"), ("pipe", "a pipe")):
        for operation in (env.read_file(path), env.write_file(path, b"x")):
            with pytest.raises(NotAFile, match=message):
                await operation
    with pytest.raises(FileError, match="not a directory"):
        await env.read_file("file/below")


async def test_missing_files_say_so(env: LocalEnvironment) -> None:
    for operation in (env.read_file("none"), env.read_file("none/file"), env.list_dir("none"), env.remove("none")):
        with pytest.raises(FileMissing, match="none"):
            await operation
    assert await env.stat("none") is None
    assert await env.stat("none/file") is None


async def test_stat_and_list(env: LocalEnvironment, work: Path) -> None:
    (work / "link").symlink_to("sub")
    (work / "file").chmod(0o640)
    info = await env.stat("file")
    assert info is not None
    assert (info.name, info.kind, info.size, info.mode) == ("file", "file", 7, 0o640)
    assert info.modified_at == os.stat(work / "file").st_mtime_ns // 1_000_000
    listing = await env.list_dir(".")
    assert [(entry.name, entry.kind) for entry in listing.entries] == [
        ("file", "file"),
        ("link", "symlink"),
        ("sub", "directory"),
    ]
    assert not listing.more
    assert [entry.name for entry in (await env.list_dir("link")).entries] == ["inner"]
    bounded = await env.list_dir(".", limit=2)
    assert (len(bounded.entries), bounded.more) == (2, True)


async def test_removing_takes_files_and_empty_directories(env: LocalEnvironment, work: Path) -> None:
    with pytest.raises(FileError, match="not empty"):
        await env.remove("sub")
    await env.remove("sub/inner")
    await env.remove("sub")
    assert not (work / "sub").exists()
    with pytest.raises(FileError):
        await env.remove(".")


async def test_writing_makes_parents_and_keeps_the_mode(env: LocalEnvironment, work: Path) -> None:
    await env.write_file("a/b/c", b"new")
    assert (work / "a/b/c").read_bytes() == b"new"
    (work / "file").chmod(0o751)
    await env.write_file("file", b"replaced")
    assert (work / "file").read_bytes() == b"replaced"
    assert stat.S_IMODE((work / "file").stat().st_mode) == 0o751
    await env.write_file("script", b"#!/bin/sh\n", mode=0o755)
    assert stat.S_IMODE((work / "script").stat().st_mode) == 0o755
    (work / "plain").touch()
    await env.write_file("made", b"")
    assert (work / "made").stat().st_mode == (work / "plain").stat().st_mode


async def test_what_may_not_be_written_is_not_replaced_h372(
    env: LocalEnvironment, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []

    def denied(*args: object, **options: object) -> bool:
        """Root may write everything."""
        asked.append((*args, options["effective_ids"]))
        return False

    await env.write_file("new", b"old")
    monkeypatch.setattr(os, "access", denied)
    monkeypatch.setattr(os, "supports_effective_ids", {denied})
    with pytest.raises(FileError, match="new: permission denied"):
        await env.write_file("new", b"x")
    assert asked == [("new", os.W_OK, True)]
    assert (work / "new").read_bytes() == b"old"


async def test_writing_through_a_link_keeps_the_link(env: LocalEnvironment, work: Path) -> None:
    (work / "link").symlink_to("sub/inner")
    (work / "future").symlink_to("sub/made")
    await env.write_file("link", b"changed")
    await env.write_file("future", b"made")
    assert (work / "link").is_symlink()
    assert (work / "sub/inner").read_bytes() == b"changed"
    assert (work / "sub/made").read_bytes() == b"made"


@pytest.mark.parametrize("missing", [None, "O_TMPFILE", "link"])
@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
async def test_a_failed_write_leaves_the_old_content_and_nothing_else(
    env: LocalEnvironment, work: Path, monkeypatch: pytest.MonkeyPatch, missing: str | None, step: str
) -> None:
    def full(*args: object, **kwargs: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def forbidden(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    if missing == "O_TMPFILE":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    elif missing == "link":
        monkeypatch.setattr(os, "link", forbidden)
    before = tree(work)
    with monkeypatch.context() as broken:
        broken.setattr(os, step, full)
        with pytest.raises(FileError, match="could not be written: the disk is full"):
            await env.write_file("file", b"x" * 100)
    assert tree(work) == before
    await env.write_file("file", b"x" * 100)
    assert (work / "file").read_bytes() == b"x" * 100
    assert sorted(os.listdir(work)) == ["file", "sub"]


async def test_nobody_else_can_open_what_replaces_a_secret_before_it_is_there(
    env: LocalEnvironment, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / "secret").write_bytes(b"old")
    (work / "secret").chmod(0o600)
    real, made = os.open, list[int]()

    def seen(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        file = real(path, flags, mode, dir_fd=dir_fd)
        if flags & os.O_EXCL:
            made.append(os.fstat(file).st_mode & 0o777)
        return file

    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    monkeypatch.setattr(os, "open", seen)
    await env.write_file("secret", b"new")
    assert made == [0o600]


async def test_a_reader_sees_the_old_or_the_new_file(env: LocalEnvironment, work: Path) -> None:
    """The replaced file is another one: who has the old one open goes on reading it whole."""
    reader = os.open(work / "file", os.O_RDONLY)
    try:
        await env.write_file("file", b"new")
        assert os.read(reader, 100) == b"content"
    finally:
        os.close(reader)


async def test_a_write_that_expects_other_content_is_refused(env: LocalEnvironment, work: Path) -> None:
    expected = hashlib.sha256(b"content").hexdigest()
    await env.write_file("file", b"first", expect=expected)
    with pytest.raises(FileChanged, match="read it again"):
        await env.write_file("file", b"second", expect=expected)
    with pytest.raises(FileMissing):
        await env.write_file("none", b"second", expect=expected)
    assert (work / "file").read_bytes() == b"first"
    assert sorted(os.listdir(work)) == ["file", "sub"]


async def test_of_many_writes_that_expect_the_same_one_wins(env: LocalEnvironment, work: Path) -> None:
    expected = hashlib.sha256(b"content").hexdigest()
    writes = [env.write_file("file", b"%d" % number, expect=expected) for number in range(8)]
    results = await asyncio.gather(*writes, return_exceptions=True)
    won = [number for number, result in enumerate(results) if result is None]
    assert len(won) == 1
    assert (work / "file").read_bytes() == b"%d" % won[0]


async def test_file_operations_leave_no_descriptor_open(env: LocalEnvironment, work: Path) -> None:
    (work / "deep").symlink_to("sub/../sub/../sub")

    async def everything() -> None:
        await env.write_file("a/b/c", b"1")
        await env.read_file("deep/inner")
        await env.list_dir("deep")
        await env.stat("none/x")
        await env.remove("a/b/c")
        for path in ("../secret", "file/x", "none"):
            with pytest.raises(FileError):
                await env.read_file(path)

    await everything()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        await everything()
    assert len(os.listdir("/proc/self/fd")) == before


@contextmanager
def few_descriptors() -> Generator[None]:
    """No more than thirty beside those that are open now."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 30, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_path_that_goes_to_and_fro_takes_no_descriptors(env: LocalEnvironment, work: Path) -> None:
    """They are the whole host's, and its store needs some, too."""
    (work / "around").symlink_to("sub/../" * 100)
    with few_descriptors():
        assert await env.read_file("sub/../" * 500 + "file") == b"content"
        assert await env.read_file("around/around/file") == b"content"


async def test_a_path_has_a_bound(env: LocalEnvironment, work: Path) -> None:
    for path, message in (
        ("sub/../" * 1000 + "file", "longer than"),
        ("d/" * 500 + "file", "directories deep"),
    ):
        for operation in (env.read_file(path), env.write_file(path, b""), env.stat(path)):
            with pytest.raises(FileError, match=message):
                await operation
    deep = "d/" * (workspace_module._MAX_DEPTH - 1) + "file"
    await env.write_file(deep, b"deep")
    assert await env.read_file(deep) == b"deep"


@pytest.mark.parametrize("error", [OSError(errno.EINVAL, "Invalid argument"), PermissionError(errno.EACCES, "denied")])
async def test_a_directory_that_cannot_be_synced_is_no_failed_write(
    env: LocalEnvironment, work: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    """The file is replaced by then; an error would say that nothing was changed."""
    real = os.fsync

    def fsync(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise error
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    await env.write_file("file", b"new")
    assert (work / "file").read_bytes() == b"new"
    await env.remove("file")
    assert not (work / "file").exists()


def test_a_workspace_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileMissing, match="make the workspace first"):
        LocalEnvironment(tmp_path / "none")
