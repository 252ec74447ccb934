"""The logic of read, write, edit and bash (rules H97, H115 and H116): windows, notes, safe reruns."""

from __future__ import annotations

import base64
import contextlib
import os
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perdure.harness.environment import (
    CommandNotStarted,
    FileChanged,
    FileError,
    FileMissing,
    FileTooLarge,
    NotAFile,
)
from perdure.harness.messages import Image, Text
from perdure.harness.output import DEFAULT_LIMIT_BYTES, DEFAULT_LIMIT_LINES, OutputLimits, bound
from perdure.tools import contents, files
from perdure.tools.bash import bash
from perdure.tools.edits import Edit
from perdure.tools.local import LocalEnvironment


@pytest.fixture
def env(tmp_path: Path) -> LocalEnvironment:
    (tmp_path / "work").mkdir()
    return LocalEnvironment(tmp_path / "work", output_dir=tmp_path / "outputs")


# --- read ------------------------------------------------------------------------------------------------------


async def test_a_small_file_is_read_whole(env: LocalEnvironment) -> None:
    await env.write_file("f", b"one\ntwo")
    answer = await files.read(env, "f")
    assert answer.text == "one\ntwo"
    assert answer.details == {
        "path": "f", "first_line": 1, "last_line": 2, "total_lines": 2, "file_bytes": 7, "complete": True,
    }  # fmt: skip


async def test_an_empty_file_says_so(env: LocalEnvironment) -> None:
    await env.write_file("f", b"")
    assert (await files.read(env, "f")).text == "[The file is empty.]"


async def test_reading_on_from_note_to_note_gives_the_whole_file(env: LocalEnvironment) -> None:
    lines = [f"{number} {'x' * (number % 90)}" for number in range(1, 9001)]
    await env.write_file("f", "\n".join(lines).encode())
    seen: list[str] = []
    offset: int | None = None
    for _ in range(50):
        answer = await files.read(env, "f", offset=offset)
        assert len(answer.text.encode()) <= DEFAULT_LIMIT_BYTES
        assert answer.text.count("\n") < DEFAULT_LIMIT_LINES
        shown = answer.text.split("\n")
        last = answer.details["last_line"]
        if last == len(lines):
            seen += shown
            break
        assert (
            shown[-1] == f"[Lines {offset or 1}-{last} of {len(lines)}. Read on with offset={len(seen) + len(shown)}.]"
        )
        seen += shown[:-1]
        offset = len(seen) + 1
    assert seen == lines


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.lists(st.sampled_from(["", "a", "bcd", "\u00e9" * 3]), max_size=12), st.integers(1, 14), st.integers(1, 5))
def test_a_range_is_the_lines_it_names(env: LocalEnvironment, lines: list[str], offset: int, limit: int) -> None:
    import asyncio

    text = "\n".join(lines)
    expected = text.split("\n")
    if expected[-1] == "":
        expected.pop()

    async def check() -> None:
        await env.write_file("f", text.encode())
        if offset > max(1, len(expected)):
            with pytest.raises(FileError, match=f"has {len(expected)} lines; there is no line {offset}"):
                await files.read(env, "f", offset=offset, limit=limit)
            return
        answer = await files.read(env, "f", offset=offset, limit=limit)
        part = expected[offset - 1 : offset - 1 + limit]
        whole = "\n".join(part) + ("\n" if offset - 1 + limit < len(expected) or text.endswith("\n") else "")
        assert answer.text.startswith(whole if part else "[The file is empty.]")
        assert (answer.details["last_line"], answer.details["total_lines"]) == (offset - 1 + len(part), len(expected))

    asyncio.run(check())


async def test_lines_beyond_a_chunk_are_found(env: LocalEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_CHUNK", 7)
    await env.write_file("f", "".join(f"line {number}\n" for number in range(1, 31)).encode())
    answer = await files.read(env, "f", offset=20, limit=2)
    assert answer.text == "line 20\nline 21\n[Lines 20-21 of 30. Read on with offset=22.]"


async def test_a_line_too_long_is_cut_and_said_so(env: LocalEnvironment) -> None:
    await env.write_file("f", b"short\n" + "\u00e9".encode() * 40_000 + b"\nend\n")
    answer = await files.read(env, "f", offset=2)
    shown, *notes = answer.text.split("\n")
    assert set(shown) == {"\u00e9"}
    assert notes == [
        "[Line 2 is too long to be shown whole; this is its beginning.]",
        "[Lines 2-2 of 3. Read on with offset=3.]",
    ]
    assert len(answer.text.encode()) <= DEFAULT_LIMIT_BYTES


async def test_a_huge_file_is_not_read_to_its_end(env: LocalEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_COUNT_LINES", 300_000)
    await env.write_file("f", b"0123456789\n" * 100_000)
    read: list[int] = []
    real = env.read_file

    async def counting(path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        data = await real(path, offset=offset, length=length)
        read.append(len(data))
        return data

    monkeypatch.setattr(env, "read_file", counting)
    answer = await files.read(env, "f")
    assert sum(read) < 600_000
    assert answer.details["total_lines"] is None
    assert answer.text.endswith("\n[Lines 1-1997; the file has 1100000 bytes. Read on with offset=1998.]")


async def test_what_is_no_text_file_is_refused(env: LocalEnvironment) -> None:
    await env.write_file("binary", b"\x7fELF\0\0")
    await env.write_file("dir/f", b"")
    with pytest.raises(NotAFile, match="is not text but an ELF program or library \\(6 bytes\\)"):
        await files.read(env, "binary")
    with pytest.raises(NotAFile, match="is a directory"):
        await files.read(env, "dir")
    with pytest.raises(FileMissing, match="does not exist"):
        await files.read(env, "none")
    with pytest.raises(FileError, match="begin at 1"):
        await files.read(env, "dir/f", offset=0)


def png(width: int, height: int) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"\0" * 9) + chunk(b"IEND", b"")


def webp(*chunks: tuple[bytes, bytes]) -> bytes:
    body = b"".join(name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2) for name, data in chunks)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


LOSSY = b"VP8 ", b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 640, 480) + b"pixels"
IMAGES = {
    "image/png": png(640, 480),
    "image/gif": b"GIF89a" + struct.pack("<HHBBB", 640, 480, 0x80, 0, 0) + b"\0" * 6  # two colours
    + b"\x21\xf9\x04\0\0\0\0\0" + b"\x2c" + struct.pack("<HHHHB", 0, 0, 640, 480, 0) + b"\x02\x02ab\0\x3b",
    "image/jpeg": b"\xff\xd8\xff\xe0\0\x10JFIF" + b"\0" * 10 + b"\xff\xff\xc2\0\x11\x08" + struct.pack(">HH", 480, 640)
    + b"\0" * 10 + b"\xff\xda\0\x02pixels\xff\xd9",
    "image/webp": webp(LOSSY),
}  # fmt: skip
WEBP = {
    "lossless": webp((b"VP8L", b"\x2f" + struct.pack("<I", 639 | 479 << 14))),
    "extended": webp((b"VP8X", b"\0" * 4 + (639).to_bytes(3, "little") + (479).to_bytes(3, "little")), LOSSY),
}


@pytest.mark.parametrize("kind", sorted(IMAGES))
async def test_an_image_is_known_by_its_content_and_shown_with_its_size_h361(env: LocalEnvironment, kind: str) -> None:
    await env.write_file("picture.txt", IMAGES[kind])
    answer = await files.read(env, "picture.txt")
    assert answer.text == f"picture.txt: {kind}, 640 x 480 pixels, {len(IMAGES[kind])} bytes"
    assert answer.image == Image(kind, base64.b64encode(IMAGES[kind]).decode())
    assert answer.content == (Text(answer.text), answer.image)
    assert (answer.details["width"], answer.details["height"]) == (640, 480)


@pytest.mark.parametrize("kind", sorted(WEBP))
def test_the_other_kinds_of_webp_tell_their_size_h361(kind: str) -> None:
    assert contents.picture(WEBP[kind]) == contents.Picture("image/webp", 640, 480)


@given(st.sampled_from(sorted(IMAGES)), st.integers(3, 90), st.binary(max_size=40))
def test_whatever_follows_the_beginning_of_an_image_harms_nothing_h361(kind: str, kept: int, rest: bytes) -> None:
    data = IMAGES[kind][:kept] + rest
    with contextlib.suppress(contents.DamagedImage):
        assert (contents.picture(data) is None) == (contents.media_type(data) is None)
    assert contents.describe(data)


@pytest.mark.parametrize("kind", sorted(IMAGES))
async def test_an_image_that_ends_too_early_is_refused_wherever_it_ends_h361(env: LocalEnvironment, kind: str) -> None:
    """A provider would refuse it, and with it every later request of the conversation."""
    whole = IMAGES[kind]
    for kept in range(24, len(whole) - 1):  # A GIF is shown without its last byte.
        with pytest.raises(contents.DamagedImage):
            contents.picture(whole[:kept])
    await env.write_file("cut", whole[:-5])
    with pytest.raises(NotAFile, match=rf"cut: is an image \({kind}, .* bytes\) that .*; it cannot be shown"):
        await files.read(env, "cut")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (png(640, 480).replace(b"IHDR", b"IHDX"), "has a wrong check sum"),
        (png(0, 480), "does not tell its size"),
        (b"\x89PNG\r\n\x1a\n" + png(1, 1)[-12:], "has no header"),
        (png(1, 1)[:33] + png(1, 1)[-12:], "has no pixels"),
        (IMAGES["image/gif"][:13] + b"\0" * 6 + b"\x3b", "has no pixels"),
        (b"\xff\xd8\xff\xd9" + b"\0" * 20, "has no pixels"),
        (webp((b"EXIF", b"1234")), "has no pixels"),
        (webp((b"VP8 ", b"1234567890")), "has no header"),
    ],
)
def test_what_only_begins_like_an_image_says_what_is_wrong_h361(data: bytes, why: str) -> None:
    with pytest.raises(contents.DamagedImage, match=why):
        contents.picture(data)


async def test_a_text_that_begins_like_an_image_is_a_text_h361(env: LocalEnvironment) -> None:
    for text in ("GIF89a is a format\n", "RIFFabcdWEBP\n"):
        await env.write_file("f", text.encode())
        assert (await files.read(env, "f")).content == text


async def test_an_image_of_too_many_pixels_is_refused_h361(env: LocalEnvironment) -> None:
    await env.write_file("wide", png(8000, 1))
    assert (await files.read(env, "wide")).image is not None
    await env.write_file("bomb", png(60_000, 60_000))
    with pytest.raises(FileTooLarge, match=r"bomb: is an image .* 60000 x 60000 pixels, more than the 8000"):
        await files.read(env, "bomb")


async def test_an_image_that_is_too_large_is_refused_h361(
    env: LocalEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = png(1, 1)
    await env.write_file("image", data)
    monkeypatch.setattr(files, "MAX_IMAGE", len(data))
    assert (await files.read(env, "image")).image is not None
    monkeypatch.setattr(files, "MAX_IMAGE", len(data) - 1)
    with pytest.raises(FileTooLarge, match=rf"image: is an image \(image/png\) of {len(data)} bytes, more than the "):
        await files.read(env, "image")


async def test_text_that_is_not_utf_8_is_shown_as_it_can_be(env: LocalEnvironment) -> None:
    await env.write_file("f", b"caf\xe9\n")
    assert (await files.read(env, "f")).text == (
        "caf\ufffd\n[\ufffd may stand for bytes that are not UTF-8; no old_text of an edit can name those.]"
    )


@pytest.mark.parametrize("limit", [None, 2000, 5000])
async def test_no_note_is_lost_to_the_limits_of_a_result(env: LocalEnvironment, limit: int | None) -> None:
    await env.write_file("f", b"\xff\n" * 3000)
    answer = await files.read(env, "f", limit=limit)
    shown = bound(answer.text, OutputLimits(keep="head"))
    assert (shown.text, shown.dropped_lines) == (answer.text, 0)
    assert "[Lines 1-1997 of 3000. Read on with offset=1998.]\n[\ufffd may stand for" in answer.text


async def test_a_line_is_looked_for_in_so_much_of_a_file(
    env: LocalEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse file may have a terabyte."""
    monkeypatch.setattr(files, "MAX_SKIPPED", 1_000_000)
    await env.write_file("f", b"text\n" * 2000)
    os.truncate(Path(env.cwd, "f"), 1 << 40)
    assert (await files.read(env, "f", offset=2000, limit=1)).text.startswith("text\n")
    with pytest.raises(FileTooLarge, match="has line 3000 beyond its first 1000000 bytes; use bash"):
        await files.read(env, "f", offset=3000)


async def test_a_file_that_does_not_tell_its_size_is_read(env: LocalEnvironment) -> None:
    """As those of /proc."""
    anywhere = LocalEnvironment(env.cwd, confine=False)
    assert (await files.read(anywhere, "/proc/self/status", limit=1)).text.startswith("Name:")


# --- write -----------------------------------------------------------------------------------------------------


async def test_writing_tells_what_it_did_and_may_be_done_again(env: LocalEnvironment) -> None:
    answer = await files.write(env, "a/f", "h\u00e9\n")
    assert (answer.text, answer.details) == ("Created a/f (4 bytes).", {"path": "a/f", "bytes": 4, "created": True})
    assert (await files.write(env, "a/f", "h\u00e9\n")).text == "Replaced a/f (4 bytes)."
    assert await env.read_file("a/f") == b"h\xc3\xa9\n"
    with pytest.raises(FileError, match="lone surrogate"):
        await files.write(env, "a/f", "\ud800")


# --- edit ------------------------------------------------------------------------------------------------------

EDITS = [Edit("two", "2"), Edit("four\n", "")]
BEFORE, AFTER = b"one\ntwo\nthree\nfour\n", b"one\n2\nthree\n"


async def test_an_edit_run_again_after_any_crash_gives_the_same(env: LocalEnvironment) -> None:
    await env.write_file("f", BEFORE, mode=0o755)
    intent = await files.plan_edit(env, "f", EDITS)
    first = await files.edit(env, "f", EDITS, intent)
    assert await env.read_file("f") == AFTER
    again = await files.edit(env, "f", EDITS, intent)
    assert again == first
    assert await env.read_file("f") == AFTER
    assert first.text == f"Edited f: 2 replacements, the first at line 2.\n{first.details['diff']}".rstrip("\n")
    assert first.details["diff"] == "@@ -1,4 +1,3 @@\n one\n-two\n+2\n three\n-four\n"
    info = await env.stat("f")
    assert info is not None
    assert info.mode == 0o755


async def test_an_edit_of_a_file_that_changed_meanwhile_is_refused(env: LocalEnvironment) -> None:
    await env.write_file("f", BEFORE)
    intent = await files.plan_edit(env, "f", EDITS)
    await env.write_file("f", BEFORE + b"five\n")
    with pytest.raises(FileChanged, match="read it again"):
        await files.edit(env, "f", EDITS, intent)
    assert await env.read_file("f") == BEFORE + b"five\n"


async def test_a_change_between_reading_and_replacing_is_seen(
    env: LocalEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    await env.write_file("f", BEFORE)
    intent = await files.plan_edit(env, "f", EDITS)
    real = env.write_file

    async def late(path: str, data: bytes, *, mode: int | None = None, expect: str | None = None) -> None:
        await real(path, b"other")
        await real(path, data, mode=mode, expect=expect)

    monkeypatch.setattr(env, "write_file", late)
    with pytest.raises(FileChanged):
        await files.edit(env, "f", EDITS, intent)
    assert await env.read_file("f") == b"other"


async def test_a_file_too_large_to_edit_is_refused(env: LocalEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_EDIT", 5)
    await env.write_file("f", BEFORE)
    with pytest.raises(FileError, match="more than the 5"):
        await files.plan_edit(env, "f", EDITS)


# --- bash ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "text", "failed"),
    [
        ("echo hi", "hi\n", False),
        ("true", "[No output.]", False),
        ("printf out; exit 3", "out\n[Exit code 3.]", True),
        ("exit 3", "[Exit code 3.]", True),
        ("kill -9 $$", "[Ended by signal 9.]", True),
        (r"printf 'a\377\303'", "a\ufffd\ufffd", False),
    ],
)
async def test_how_a_command_ended_is_in_its_answer(
    env: LocalEnvironment, command: str, text: str, failed: bool
) -> None:
    answer = await bash(env, command)
    assert (answer.text, answer.failed) == (text, failed)


async def test_a_time_out_is_told_with_the_output_so_far(env: LocalEnvironment) -> None:
    answer = await bash(env, "echo begun; sleep 600", timeout_s=0.5)
    assert answer.text == "begun\n[Timed out after 0.5 seconds; the command was stopped.]"
    assert answer.failed
    assert answer.details["timed_out"] is True


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), 1e9])
async def test_a_time_out_that_is_none_runs_nothing(env: LocalEnvironment, timeout_s: float) -> None:
    with pytest.raises(CommandNotStarted, match="time-out"):
        await bash(env, "touch ran", timeout_s=timeout_s)
    assert await env.stat("ran") is None


async def test_a_large_output_shows_its_end_and_names_the_rest(env: LocalEnvironment) -> None:
    chunks: list[bytes] = []
    answer = await bash(env, "seq 1 50000; exit 1", on_output=chunks.append)
    complete = "".join(f"{number}\n" for number in range(1, 50001))
    assert b"".join(chunks).decode() == complete
    *shown, note, code = answer.text.split("\n")
    assert shown == [str(number) for number in range(48005, 50001)]
    path = answer.details["output_path"]
    dropped = len(complete) - len("\n".join(shown)) - 1
    assert note == (
        f"[Output too large: the last 1996 of 50000 lines are shown, {dropped} bytes before that are not. "
        f"The complete output is in {path}.]"
    )
    assert code == "[Exit code 1.]"
    assert (answer.details["dropped_lines"], answer.details["dropped_bytes"]) == (48004, dropped)
    assert (await files.read(env, str(path), offset=48004, limit=1)).text.startswith("48004\n")
    assert len(answer.text.encode()) <= DEFAULT_LIMIT_BYTES


async def test_one_line_too_long_shows_its_end(env: LocalEnvironment) -> None:
    answer = await bash(env, "head -c 100000 /dev/zero | tr '\\0' x; printf end")
    assert answer.text.startswith("x" * 1000)
    assert "xend\n[Output too large: the end of the last line of 1 is shown, " in answer.text
    assert len(answer.text.encode()) <= DEFAULT_LIMIT_BYTES
