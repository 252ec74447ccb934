"""``perdure space diff``: how a workspace differs from the image of the log. Neither is changed."""

from __future__ import annotations

import asyncio
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import typer

from perdure.cli.entries import diff_lines
from perdure.cli.errors import CommandError
from perdure.cli.secrets import Secrets
from perdure.cli.space.local import chosen_local, spaces_at
from perdure.cli.space.log import chosen_space
from perdure.cli.stores import looking
from perdure.cli.style import Colours, Line, Style, line, rendered
from perdure.cli.text import counted, printable
from perdure.kernel.session import Session
from perdure.spaces import image, logged
from perdure.spaces.compare import Comparison, Difference, Kind, compare
from perdure.spaces.image import Directory, Entry, File, Link
from perdure.spaces.logged import LoggedSpace
from perdure.spaces.wire import WirePath, encode_path

MOST_PATCHED: Final = 256 * 1024
"""Bytes of a file whose text is compared."""


class Side(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What stands at a path."""

    kind: str
    mode: str | None = None
    """The twelve permission bits, octal."""
    size: int | None = None
    sha256: str | None = None
    target: WirePath | None = None


class DifferenceLine(msgspec.Struct, frozen=True, kw_only=True):
    """A difference as ``--json`` prints it."""

    path: WirePath
    """A string, or ``{"b64": ...}`` where it is not UTF-8."""
    change: Kind
    was: Side | None
    """In the image."""
    now: Side | None
    """In the workspace."""
    patch: str | None
    """With ``--patch``, for small text files."""


class UnfitLine(msgspec.Struct, frozen=True, kw_only=True):
    path: WirePath
    reason: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--json`` prints."""

    space: str
    image: int
    workspace: str
    open: int | None
    """A call that is under way: what it has changed is in no image yet."""
    differences: tuple[DifferenceLine, ...]
    unfit: tuple[UnfitLine, ...]
    """What is in the workspace and can be in no image, or cannot be read."""


@dataclass(frozen=True, slots=True)
class Found:
    space: LoggedSpace
    workspace: str
    comparison: Comparison
    patches: Mapping[bytes, str]


async def differences(store: Path, place: Path, name: str | None, *, patch: bool) -> Found:
    """``place``: where Spaces are kept, a workspace, or any other directory, such as one that was written out.

    Raises CommandError, and what opening a store raises.
    """
    workspace, wanted = str(place), name
    if await spaces_at(place):
        local = await chosen_local(place, name)
        workspace, wanted = local.workspace, local.folder.name
    async with looking(store) as session:
        space = await chosen_space(session, wanted)
        if space.state.image == 0:
            raise CommandError(f"the Space {space.name} has no image yet: it gets one with its first call")
        try:
            comparison = await asyncio.to_thread(compare, space.tree, os.fsencode(workspace))
        except OSError as error:
            raise CommandError(f"{workspace} cannot be read: {error.strerror}") from error
        patches = await _patches(session, workspace, comparison) if patch else {}
        return Found(space, workspace, comparison, patches)


async def _patches(session: Session, workspace: str, comparison: Comparison) -> dict[bytes, str]:
    found: dict[bytes, str] = {}
    for each in comparison.differences:
        sides = [side for side in (each.was, each.now) if side is not None]
        if not all(isinstance(side, File) and side.size <= MOST_PATCHED for side in sides):
            continue
        was = b"" if not isinstance(each.was, File) else await _all(session, each.was)
        now = b"" if each.now is None else await asyncio.to_thread(_read, workspace, each.path)
        text = None if now is None else _patch(each, was, now)
        if text:
            found[each.path] = text
    return found


async def _all(session: Session, file: File) -> bytes:
    return b"".join([chunk async for chunk in logged.content(session, file)])


def _read(workspace: str, path: bytes) -> bytes | None:
    """None: it is not there any more, or not as it was."""
    try:
        descriptor = os.open(
            os.path.join(os.fsencode(workspace), path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        )
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(MOST_PATCHED + 1)
    except OSError:
        return None
    return data if len(data) <= MOST_PATCHED else None


def _patch(each: Difference, was: bytes, now: bytes) -> str | None:
    """None: one of the two is no text."""
    if b"\0" in was or b"\0" in now:
        return None
    try:
        was_text, now_text = was.decode(), now.decode()
    except UnicodeDecodeError:
        return None
    shown = _shown(each.path)
    names = ("/dev/null" if each.was is None else f"a/{shown}", "/dev/null" if each.now is None else f"b/{shown}")
    lines: list[str] = []
    before, after = (text.splitlines(keepends=True) for text in (was_text, now_text))
    for text in difflib.unified_diff(before, after, *names):
        lines.append(text if text.endswith("\n") else f"{text}\n\\ No newline at end of file\n")
    return "".join(lines)


def _shown(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")


# --- printing ---------------------------------------------------------------------------------------------------


def render(found: Found, *, as_json: bool, colours: Colours) -> None:
    """A line a difference: what is added, changed (and in which way) or removed since the image."""
    space, comparison = found.space, found.comparison
    under_way = None if space.state.open is None else space.state.open.call
    if as_json:
        report = Report(
            space=space.name,
            image=space.state.image,
            workspace=found.workspace.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"),
            open=under_way,
            differences=tuple(_json(each, found.patches.get(each.path)) for each in comparison.differences),
            unfit=tuple(UnfitLine(path=encode_path(each.path), reason=each.reason) for each in comparison.unfit),
        )
        typer.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
        return
    lines: list[Line] = []
    for each in comparison.differences:
        lines.append(_line(each))
        if each.path in found.patches:
            lines += diff_lines(found.patches[each.path])
    lines += [line(f"! {printable(_shown(each.path))}: {each.reason}", "warning") for each in comparison.unfit]
    if under_way is not None:
        lines.append(line(f"Call {under_way} is under way: what it has changed is in no image yet.", "warning"))
    count = len(comparison.differences)
    against = f"image {space.state.image} of the Space {printable(space.name)}"
    where = printable(found.workspace)
    told = f"{counted(count, 'difference')} between {against} and {where}" if count else f"{where} is {against}"
    if comparison.unfit:
        told += ", as far as it can be read"
    secrets = Secrets()
    for each in [*lines, line(told, "bold")]:
        typer.echo(secrets.hide(rendered(each, colours)), color=True)


def _line(each: Difference) -> Line:
    marks: dict[Kind, tuple[str, Style]] = {
        "added": ("+", "added"),
        "changed": ("~", "warning"),
        "removed": ("-", "removed"),
    }
    mark, style = marks[each.kind]
    name = printable(_shown(each.path))
    side = each.now if each.now is not None else each.was
    if isinstance(side, Directory):
        name += "/"
    elif isinstance(side, Link):
        name += f" -> {printable(_shown(image.unescape(side.target)))}"
    how = f"  ({_how(each.was, each.now)})" if each.was is not None and each.now is not None else ""
    return line(f"{mark} {name}{how}", style)


def _how(was: Entry, now: Entry) -> str:
    if type(was) is not type(now):
        return f"was a {_side(was).kind}, is a {_side(now).kind}"
    words: list[str] = []
    if isinstance(was, File) and isinstance(now, File) and (was.size, was.sha256) != (now.size, now.sha256):
        words.append("content")
    if isinstance(was, Link):
        words.append("target")
    elif not isinstance(now, Link) and was.mode != now.mode:
        words.append(f"mode {was.mode:04o}, is {now.mode:04o}")
    return ", ".join(words)


def _json(each: Difference, patch: str | None) -> DifferenceLine:
    return DifferenceLine(
        path=encode_path(each.path),
        change=each.kind,
        was=None if each.was is None else _side(each.was),
        now=None if each.now is None else _side(each.now),
        patch=patch,
    )


def _side(entry: Entry) -> Side:
    if isinstance(entry, Link):
        return Side(kind="symbolic link", target=encode_path(image.unescape(entry.target)))
    if isinstance(entry, Directory):
        return Side(kind="directory", mode=f"{entry.mode:04o}")
    return Side(kind="file", mode=f"{entry.mode:04o}", size=entry.size, sha256=entry.sha256)
