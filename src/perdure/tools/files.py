"""Reading, writing and editing files of any execution environment: what the tools of these names do.

What cannot be done is a FileError whose words are for the model. All three may be run again after a crash:
reading and writing give the same again, an edit looks whether it was done already (rule H116).
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from perdure.harness.environment import (
    ExecutionEnvironment,
    FileChanged,
    FileError,
    FileMissing,
    FileStat,
    FileTooLarge,
    NotAFile,
)
from perdure.harness.messages import Image, Text, UserPart
from perdure.harness.output import DEFAULT_LIMIT_BYTES, DEFAULT_LIMIT_LINES, OutputWindow, Window
from perdure.kernel.json import JsonValue
from perdure.tools import contents
from perdure.tools import edits as editing
from perdure.tools.edits import Edit, EditIntent
from perdure.tools.workspace import IS_DIRECTORY, IS_SPECIAL

MAX_EDIT = 16 * 1024 * 1024
"""Bytes of the largest file that is edited."""
MAX_IMAGE = 3_750_000
"""Bytes of the largest image that is shown: with base64 they are the 5 MB that providers take."""
MAX_SIDE = 8000
"""Pixels of the longer side of an image; so many do providers take."""
_CHUNK = 256 * 1024
_COUNT_LINES = 16 * 1024 * 1024
"""Files up to so many bytes are read to their end to tell how many lines they have."""
MAX_SKIPPED = 1024 * 1024 * 1024
"""Bytes that are read to come to a line."""
_PROBE = 8192
_NOTES_BYTES = 512
_NOTES_LINES = 3
"""What a result leaves to notes, so that notes and window together keep the limits of a result."""
_DIFF_LINES = 40
_DIFF_BYTES = 4096
"""Of the diff, so much is in the text of an edit's result; all of it that a result holds is in the details."""


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    details: dict[str, JsonValue]
    image: Image | None = None

    @property
    def content(self) -> str | tuple[UserPart, ...]:
        return self.text if self.image is None else (Text(self.text), self.image)


async def read(
    environment: ExecutionEnvironment, path: str, *, offset: int | None = None, limit: int | None = None
) -> Answer:
    """Whole lines of a text file from line ``offset`` (from 1), at most ``limit`` and what a result holds; or an image
    (rule H361)."""
    first = 1 if offset is None else offset
    if first < 1 or (limit is not None and limit < 1):
        raise FileError(path, "offset and limit are line numbers and begin at 1")
    info = await _regular_file(environment, path)
    reader = _Lines(environment, path)
    head = await reader.begin()
    if b"\0" in head[:_PROBE]:  # All images have one; a text may begin as if it were one.
        if (kind := contents.media_type(head)) is not None:
            return await _image(environment, path, kind, info.size)
        raise NotAFile(path, f"is not text but {contents.describe(head)} ({info.size} bytes)")
    skipped = await reader.skip(first - 1)
    if skipped < first - 1 or (first > 1 and reader.ended):
        raise FileError(path, f"has {skipped} lines; there is no line {first}")
    window = await reader.window(limit)
    last = first - 1 + window.shown_lines
    total = first - 1 + window.total_lines if reader.ended else None
    complete = window.complete and first == 1 and reader.ended
    return Answer(
        _with_notes(window, first, last, total, info.size),
        {
            "path": path,
            "first_line": first,
            "last_line": last,
            "total_lines": total,
            "file_bytes": info.size,
            "complete": complete,
        },
    )


async def _image(environment: ExecutionEnvironment, path: str, kind: str, size: int) -> Answer:
    if size > MAX_IMAGE:
        raise FileTooLarge(path, f"is an image ({kind}) of {size} bytes, more than the {MAX_IMAGE} that can be shown")
    data = await environment.read_file(path, length=MAX_IMAGE)
    # What a provider refuses it refuses in every later request, too: nothing that may be so is shown.
    try:
        found = contents.picture(data)
    except contents.DamagedImage as error:
        raise NotAFile(path, f"is an image ({kind}, {size} bytes) that {error}; it cannot be shown") from error
    if found is None:
        raise FileChanged(path, "was changed while it was read; try again")
    measure = f"{found.width} x {found.height} pixels"
    if max(found.width, found.height) > MAX_SIDE:
        raise FileTooLarge(path, f"is an image ({kind}) of {measure}, more than the {MAX_SIDE} a side can have")
    return Answer(
        f"{path}: {found.media_type}, {measure}, {len(data)} bytes",
        {
            "path": path,
            "media_type": found.media_type,
            "width": found.width,
            "height": found.height,
            "file_bytes": len(data),
        },
        Image(found.media_type, base64.b64encode(data).decode("ascii")),
    )


async def write(environment: ExecutionEnvironment, path: str, content: str) -> Answer:
    """Create or replace a file."""
    data = _encoded(path, content)
    before = await environment.stat(path)
    await environment.write_file(path, data)
    created = before is None
    return Answer(
        f"{'Created' if created else 'Replaced'} {path} ({len(data)} bytes).",
        {"path": path, "bytes": len(data), "created": created},
    )


async def plan_edit(environment: ExecutionEnvironment, path: str, edits: Sequence[Edit]) -> EditIntent:
    """What ``edit`` will do, to be stored before it does it."""
    for edit in edits:
        _encoded(path, edit.old_text + edit.new_text)
    return editing.plan(path, await _whole(environment, path), edits)


async def edit(environment: ExecutionEnvironment, path: str, edits: Sequence[Edit], intent: EditIntent) -> Answer:
    """Do what was planned, unless it is done: the file's hash tells. Any other content is a FileChanged."""
    data = await _whole(environment, path)
    found = editing.digest(data)
    ordered = editing.replacements(edits, intent)
    if found == intent.before:
        before = data
        after = editing.apply(before, ordered)
        await environment.write_file(path, after, expect=intent.before)
    elif found == intent.after:
        before = editing.revert(path, data, ordered, intent)
    else:
        raise FileChanged(path, "was changed after this edit was planned; read it again")
    difference = editing.diff(before, ordered).encode()
    window = _head(difference, OutputWindow(keep="head"))
    short = _head(difference, OutputWindow(keep="head", limit_bytes=_DIFF_BYTES, limit_lines=_DIFF_LINES))
    line = editing.first_line(before, ordered)
    count = len(ordered)
    more = "" if short.complete else f"\n[{short.dropped_lines} more lines of the diff are not shown.]"
    return Answer(
        f"Edited {path}: {count} replacement{'s' if count > 1 else ''}, the first at line {line}.\n"
        + short.text.removesuffix("\n")
        + more,
        {
            "path": path,
            "replacements": count,
            "first_line": line,
            "diff": window.text,
            "diff_complete": window.complete,
        },
    )


def _head(data: bytes, window: OutputWindow) -> Window:
    window.feed(data)
    return window.window()


class _Lines:
    """A file read once from its beginning, in chunks."""

    def __init__(self, environment: ExecutionEnvironment, path: str) -> None:
        self._environment = environment
        self._path = path
        self._at = 0
        self._rest = b""
        self.ended = False

    async def begin(self) -> bytes:
        """The first chunk, which is still to be read."""
        self._rest = await self._next()
        return self._rest

    async def _next(self) -> bytes:
        if self._rest:
            chunk, self._rest = self._rest, b""
            return chunk
        chunk = await self._environment.read_file(self._path, offset=self._at, length=_CHUNK)
        self._at += len(chunk)
        self.ended = not chunk
        return chunk

    async def skip(self, lines: int) -> int:
        """Pass so many lines. Fewer: there were no more. ``ended`` tells whether nothing follows."""
        passed = 0
        partial = False
        while passed < lines:
            if self._at > MAX_SKIPPED:
                raise FileTooLarge(
                    self._path, f"has line {lines + 1} beyond its first {MAX_SKIPPED} bytes; use bash to come to it"
                )
            chunk = await self._next()
            if not chunk:
                return passed + partial
            parts = chunk.split(b"\n", lines - passed)
            passed += len(parts) - 1
            self._rest = parts[-1] if passed == lines else b""
            partial = bool(parts[-1])
        self._rest = await self._next()
        return passed

    async def window(self, limit: int | None) -> Window:
        window = OutputWindow(
            keep="head",
            limit_bytes=DEFAULT_LIMIT_BYTES - _NOTES_BYTES,
            limit_lines=min(limit or DEFAULT_LIMIT_LINES, DEFAULT_LIMIT_LINES - _NOTES_LINES),
        )
        while chunk := await self._next():
            window.feed(chunk)
            if self._at > _COUNT_LINES and not window.window().complete:
                break
        return window.window()


def _with_notes(window: Window, first: int, last: int, total: int | None, size: int) -> str:
    notes: list[str] = []
    if window.cut_line:
        notes.append(f"[Line {last} is too long to be shown whole; this is its beginning.]")
    if total is None:
        notes.append(f"[Lines {first}-{last}; the file has {size} bytes. Read on with offset={last + 1}.]")
    elif last < total:
        notes.append(f"[Lines {first}-{last} of {total}. Read on with offset={last + 1}.]")
    elif total == 0:
        notes.append("[The file is empty.]")
    if "\ufffd" in window.text:
        notes.append("[\ufffd may stand for bytes that are not UTF-8; no old_text of an edit can name those.]")
    if not notes:
        return window.text
    text = window.text if window.text.endswith("\n") or not window.text else window.text + "\n"
    return text + "\n".join(notes)


async def _regular_file(environment: ExecutionEnvironment, path: str) -> FileStat:
    info = await environment.stat(path)
    if info is None:
        raise FileMissing(path, "does not exist")
    if info.kind != "file":
        raise NotAFile(path, IS_DIRECTORY if info.kind == "directory" else IS_SPECIAL)
    return info


async def _whole(environment: ExecutionEnvironment, path: str) -> bytes:
    info = await _regular_file(environment, path)
    if info.size > MAX_EDIT:
        raise FileTooLarge(path, f"has {info.size} bytes, more than the {MAX_EDIT} that can be edited")
    return await environment.read_file(path, length=MAX_EDIT)


def _encoded(path: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise FileError(path, f"the text has a lone surrogate at {error.start}, which no file can hold") from error
