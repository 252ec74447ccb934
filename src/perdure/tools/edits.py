"""Exact replacements in a file's bytes: where they apply, doing and undoing them, and the diff that shows
them."""

from __future__ import annotations

import difflib
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from perdure.harness.environment import FileChanged, FileError
from perdure.tools.nearest import nearest

_CONTEXT = 3
_MAX_COMPARED = 300
"""Lines on each side of a hunk that are compared with each other, which takes their third power at worst; more are
shown as replaced whole."""
_MAX_SEARCHED = 256 * 1024 * 1024
"""Bytes that are searched for the edits of one call, each through the whole file: it is done on the event loop."""
_MAX_PLACES = 100
"""Of a text that is not unique, so many places are counted."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace one text by another."""

    # For the tool's parameters: what is not understood is refused, the texts below are for the model.
    __pydantic_config__: ClassVar = {"extra": "forbid", "use_attribute_docstrings": True}

    old_text: str
    """The text to replace, exactly as it stands in the file. It must occur there once."""
    new_text: str
    """What to put in its place."""


class EditIntent(msgspec.Struct, frozen=True, kw_only=True):
    """What an edit is about to do, stored before it does it: enough to know afterwards whether it was done."""

    before: str
    """SHA-256 of the file, hexadecimal."""
    after: str
    """SHA-256 of what it will be."""
    starts: tuple[int, ...]
    """Byte offsets before the change, of each edit in turn."""
    crlf: bool
    """All lines end in CR LF: line ends of the edits' texts are written so, too."""


@dataclass(frozen=True, slots=True)
class Replacement:
    start: int
    old: bytes
    new: bytes

    @property
    def end(self) -> int:
        return self.start + len(self.old)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def plan(path: str, data: bytes, edits: Sequence[Edit]) -> EditIntent:
    """Find where each edit applies: exactly once, in the file as it is, apart from the others.

    Raises FileError with the number of the edit (from 1) and what to do.
    """
    if not edits:
        raise FileError(path, "no edits were given")
    if len(edits) * len(data) > _MAX_SEARCHED:
        most = max(1, _MAX_SEARCHED // len(data))
        raise FileError(path, f"{len(edits)} edits at once are too many for {len(data)} bytes; make {most} at a time")
    crlf = b"\r\n" in data and data.count(b"\r\n") == data.count(b"\n")
    found = [_locate(path, data, number, edit, crlf) for number, edit in enumerate(edits, 1)]
    by_place = sorted(range(len(found)), key=lambda index: found[index].start)
    for first, second in itertools.pairwise(by_place):
        if found[second].start < found[first].end:
            low, high = sorted((first + 1, second + 1))
            raise FileError(path, f"edits {low} and {high} overlap; make them one edit")
    after = apply(data, [found[index] for index in by_place])
    if after == data:
        raise FileError(path, "the edits together change nothing")
    return EditIntent(
        before=digest(data),
        after=digest(after),
        starts=tuple(replacement.start for replacement in found),
        crlf=crlf,
    )


def replacements(edits: Sequence[Edit], intent: EditIntent) -> list[Replacement]:
    """The planned replacements, in the order of their places."""
    found = [
        Replacement(start, _encode(edit.old_text, intent.crlf), _encode(edit.new_text, intent.crlf))
        for start, edit in zip(intent.starts, edits, strict=True)
    ]
    return sorted(found, key=lambda replacement: replacement.start)


def apply(data: bytes, ordered: Sequence[Replacement]) -> bytes:
    pieces: list[bytes] = []
    at = 0
    for replacement in ordered:
        assert data[replacement.start : replacement.end] == replacement.old
        pieces += (data[at : replacement.start], replacement.new)
        at = replacement.end
    return b"".join((*pieces, data[at:]))


def revert(path: str, data: bytes, ordered: Sequence[Replacement], intent: EditIntent) -> bytes:
    """The file as it was before. ``data`` is the file as the edits left it."""
    pieces: list[bytes] = []
    at = shift = 0
    for replacement in ordered:
        pieces += (data[at : replacement.start + shift], replacement.old)
        at = replacement.start + shift + len(replacement.new)
        shift += len(replacement.new) - len(replacement.old)
    before = b"".join((*pieces, data[at:]))
    if digest(before) != intent.before:
        raise FileChanged(path, "is not what this edit left; read it again")
    return before


def diff(before: bytes, ordered: Sequence[Replacement]) -> str:
    """The replacements as a unified diff without file names, three lines of context."""
    hunks: list[str] = []
    group: list[Replacement] = []
    group_end = shift = 0
    for replacement in ordered:
        start, end = _surroundings(before, replacement)
        if group and start > group_end:
            hunk, shift = _hunk(before, group, shift)
            hunks.append(hunk)
            group = []
        group.append(replacement)
        group_end = end
    hunks.append(_hunk(before, group, shift)[0])
    return "".join(hunks)


def first_line(before: bytes, ordered: Sequence[Replacement]) -> int:
    """The line, from 1, where the first replacement stands."""
    return before.count(b"\n", 0, ordered[0].start) + 1


def _locate(path: str, data: bytes, number: int, edit: Edit, crlf: bool) -> Replacement:
    old, new = _encode(edit.old_text, crlf), _encode(edit.new_text, crlf)
    if not old:
        raise FileError(path, f"edit {number}: old_text is empty; give the text to be replaced")
    if old == new:
        raise FileError(path, f"edit {number}: old_text and new_text are the same")
    start = data.find(old)
    if start < 0:
        near = nearest(data, old)
        hint = "" if near is None else f" (the nearest: {near})"
        raise FileError(
            path,
            f"edit {number}: old_text does not occur{hint}; read the file and copy the text exactly, white space "
            "included",
        )
    places = [start]
    while (start := data.find(old, start + 1)) >= 0 and len(places) <= _MAX_PLACES:
        places.append(start)
    if len(places) > 1:
        many = f"{len(places)} times" if len(places) <= _MAX_PLACES else f"more than {_MAX_PLACES} times"
        lines = ", ".join(str(data.count(b"\n", 0, place) + 1) for place in places[:5])
        more = ", ..." if len(places) > 5 else ""
        raise FileError(
            path,
            f"edit {number}: old_text occurs {many} (at lines {lines}{more}); add surrounding text until it is unique",
        )
    return Replacement(places[0], old, new)


def _encode(text: str, crlf: bool) -> bytes:
    data = text.encode()
    return data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n") if crlf else data


def _surroundings(before: bytes, replacement: Replacement) -> tuple[int, int]:
    """The whole lines a replacement touches, and the lines around them."""
    start = before.rfind(b"\n", 0, replacement.start) + 1
    end = _after_line(before, replacement.end)
    for _ in range(_CONTEXT):
        start = before.rfind(b"\n", 0, max(0, start - 1)) + 1
        end = _after_line(before, end)
    return start, end


def _after_line(data: bytes, at: int) -> int:
    end = data.find(b"\n", at)
    return len(data) if end < 0 else end + 1


def _hunk(before: bytes, group: Sequence[Replacement], shift: int) -> tuple[str, int]:
    """One group's lines, and by how many lines what follows has moved."""
    start = _surroundings(before, group[0])[0]
    end = max(_surroundings(before, replacement)[1] for replacement in group)
    here = [Replacement(one.start - start, one.old, one.new) for one in group]
    old = _lines(before[start:end])
    new = _lines(apply(before[start:end], here))
    first = before.count(b"\n", 0, start)
    if max(len(old), len(new)) > _MAX_COMPARED:
        grouped = [[("replace", 0, len(old), 0, len(new))]]
    else:
        grouped = list(difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(_CONTEXT))
    out: list[str] = []
    for opcodes in grouped:
        old_from, old_to = opcodes[0][1], opcodes[-1][2]
        new_from, new_to = opcodes[0][3], opcodes[-1][4]
        # A range without lines names the line before it, as in diff.
        old_at = first + old_from + (old_to > old_from)
        new_at = first + shift + new_from + (new_to > new_from)
        out.append(f"@@ -{old_at},{old_to - old_from} +{new_at},{new_to - new_from} @@\n")
        for tag, a, b, c, d in opcodes:
            if tag == "equal":
                out += (" " + line for line in old[a:b])
                continue
            out += ("-" + line for line in old[a:b])
            out += ("+" + line for line in new[c:d])
    return "".join(out), shift + len(new) - len(old)


def _lines(data: bytes) -> list[str]:
    """Lines to show; a last one without a line end says so as diff does."""
    lines = data.decode("utf-8", "replace").split("\n")
    last = lines.pop()
    shown = [line + "\n" for line in lines]
    return [*shown, last + "\n\\ No newline at end of file\n"] if last else shown
