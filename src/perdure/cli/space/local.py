"""Which Space of this machine a user means, and what is told of it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from perdure.cli.errors import CommandError
from perdure.cli.text import printable
from perdure.spaces.local_look import LocalLook, look


class LocalLine(msgspec.Struct, frozen=True, kw_only=True):
    """A Space of this machine."""

    name: str
    generation: int
    state: str
    """running: its daemon runs; ended: it is started when the Space is next used; lost: its folder or workspace is
    gone."""
    daemon: int | None
    """Its process."""
    containment: str | None
    """What the daemon can do about processes that try to get away. None: it does not answer."""
    living: int | None
    """Processes in the Space, besides the daemon's own."""
    image: int | None
    """Number of the image that the workspace stands at, in the log that had it last. None: of none, or not known."""
    log: str | None
    workspace: str
    recovery: tuple[str, ...]
    """Folders with what an undo replaced and the log did not have, the oldest first."""


def local_line(found: LocalLook) -> LocalLine:
    status = found.status
    return LocalLine(
        name=found.folder.name,
        generation=found.record.generation,
        state="lost" if found.lost else "ended" if found.daemon is None else "running",
        daemon=found.daemon,
        containment=None if status is None else status.containment,
        living=None if status is None else status.living,
        image=None if status is None or status.image is None else status.image.commit,
        log=None if status is None or status.image is None else status.image.log,
        workspace=_text(found.workspace),
        recovery=tuple(_text(path) for path in found.recoveries),
    )


def _text(path: str) -> str:
    """A path as JSON can hold it."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def told(line: LocalLine) -> list[str]:
    """What is said of it."""
    if line.state == "lost":
        return [f"its folder, or its workspace {printable(line.workspace)}, is gone; it is made anew when it is used"]
    words = [f"workspace {printable(line.workspace)}"]
    if line.daemon is None:
        words.append("no daemon runs; it is started when the Space is used")
    elif line.containment is None:
        words.append(f"daemon {line.daemon} runs and does not answer")
    else:
        words.append(f"daemon {line.daemon} runs, containment {line.containment}, {line.living} other processes")
    return [*words, *(f"recovery folder {printable(path)}" for path in line.recovery)]


async def spaces_at(place: Path) -> list[LocalLook]:
    """Those that are kept in a directory or beside a workspace in it, or whose workspace it is. Raises CommandError."""
    _check(place)
    return await look(place)


def _check(place: Path) -> None:
    if not place.is_dir():
        raise CommandError(f"{place}: there is no such directory")


async def chosen_local(place: Path, wanted: str | None) -> LocalLook:
    """The Space of a directory that a user means: by its name, or the only one. Raises CommandError."""
    found = await spaces_at(place)
    if not found:
        raise CommandError(f"no Space is kept in {place}, and it is the workspace of none")
    names = ", ".join(each.folder.name for each in found)
    if wanted is None and len(found) > 1:
        raise CommandError(f"{place} has several Spaces: {names}; say which with --name")
    meant = [each for each in found if wanted is None or each.folder.name == wanted]
    if not meant:
        raise CommandError(f"{place} has no Space named {wanted!r}; it has {names}")
    if len(meant) > 1:
        homes = ", ".join(printable(each.folder.directory) for each in meant)
        raise CommandError(f"{place} has several Spaces named {wanted!r}; say which directory it is kept in: {homes}")
    return meant[0]
