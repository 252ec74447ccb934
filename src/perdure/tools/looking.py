"""Looking around in any execution environment: what the tools ls, find and grep do (rules H178, H362 to H365).

They change nothing and may be run again. What they show is bounded in lines and bytes; a note says what is left out.
"""

from __future__ import annotations

import os

from perdure.harness.environment import ExecutionEnvironment, FileError, FileKind
from perdure.harness.output import DEFAULT_LIMIT_BYTES, DEFAULT_LIMIT_LINES, OutputWindow
from perdure.kernel.json import JsonValue
from perdure.tools.files import Answer
from perdure.tools.searching import LINE_BYTES, MOST_CONTEXT, MOST_MATCHES

LISTED = 500
FOUND = 500
MATCHES = 100
MOST_SHOWN = 2000
_NOTES_BYTES = 512
_NOTES_LINES = 4
"""What a result leaves to notes."""
_HINT = ", or search without the patterns of .gitignore files (ignored)"


async def ls(environment: ExecutionEnvironment, path: str, *, limit: int = LISTED) -> Answer:
    """The names in a directory, in the order of their bytes."""
    _check(path, "limit", limit, 1, MOST_SHOWN)
    listing = await environment.list_dir(path, limit=limit)
    lines = [named(entry.name, entry.kind) + _size(entry.kind, entry.size) for entry in listing.entries]
    notes = [f"[There are more than these {len(lines)}; use find with a pattern, or a higher limit.]"]
    text, shown = _text(lines, notes if listing.more else [], "[The directory is empty.]")
    return Answer(text, {"path": path, "entries": shown, "complete": shown == len(lines) and not listing.more})


async def find(
    environment: ExecutionEnvironment,
    path: str,
    *,
    pattern: str | None = None,
    kind: FileKind | None = None,
    ignored: bool = False,
    limit: int = FOUND,
) -> Answer:
    """Paths below a directory."""
    _check(path, "limit", limit, 1, MOST_SHOWN)
    found = await environment.find(path, pattern=pattern or None, kind=kind, ignored=ignored, limit=limit)
    if found.timed_out:
        raise FileError(path, "takes too long to search; name a smaller directory" + ("" if ignored else _HINT))
    lines = [named(entry.path, entry.kind) for entry in found.entries]
    notes = [f"[There are more than these {len(lines)}; narrow the pattern or the path.]"] if found.more else []
    text, shown = _text(lines, notes, "[Nothing found.]")
    return Answer(text, {"path": path, "found": shown, "complete": shown == len(lines) and not found.more})


async def grep(
    environment: ExecutionEnvironment,
    pattern: str,
    *,
    path: str = ".",
    glob: str | None = None,
    ignore_case: bool = False,
    fixed: bool = False,
    context: int = 0,
    ignored: bool = False,
    limit: int = MATCHES,
) -> Answer:
    """Lines that match, in the order of the files, and lines around them."""
    _check(path, "limit", limit, 1, MOST_MATCHES)
    _check(path, "context", context, 0, MOST_CONTEXT)
    found = await environment.grep(
        pattern, path=path, fixed=fixed, ignore_case=ignore_case, glob=glob or None, context=context, ignored=ignored,
        limit=limit,
    )  # fmt: skip
    if found.timed_out:
        todo = "simplify the pattern, or name fewer files (path, glob)" + ("" if ignored else _HINT)
        raise FileError(path, f"takes too long to search; {todo}")
    lines: list[str] = []
    before: tuple[str, int] | None = None
    for line in found.lines:
        if context and before is not None and before != (line.path, line.line - 1):
            lines.append("--")
        mark = "-" if line.context else ":"
        lines.append(f"{quoted(line.path)}{mark}{line.line}{mark}{line.text}")
        before = line.path, line.line
    matches = sum(not line.context for line in found.lines)
    notes: list[str] = []
    if any(len(line.text.encode("utf-8", "surrogateescape")) >= LINE_BYTES for line in found.lines):
        notes.append(f"[Lines are cut after {LINE_BYTES} bytes.]")
    if found.more:
        notes.append(f"[There are more matches than these {matches}; narrow the pattern, the path or the glob.]")
    if found.skipped:
        notes.append(f"[Not searched, because binary, above 8 MiB, or not to be read: {found.skipped}.]")
    text, shown = _text(lines, notes, "[No match.]")
    details: dict[str, JsonValue] = {
        "path": path,
        "matches": matches,
        "skipped": found.skipped,
        "complete": shown == len(lines) and not found.more,
    }
    return Answer(text, details)


def named(path: str, kind: FileKind) -> str:
    return quoted(path) + {"directory": "/", "symlink": "@", "file": "", "other": "="}[kind]


def quoted(path: str) -> str:
    """A path in one line of text: as it is, or as bash reads it where it holds what no line of text can."""
    if path.isprintable():
        return path
    out = ""
    for char in path:
        if char in "'\\":
            out += "\\" + char
        elif char.isprintable():
            out += char
        else:
            out += "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))
    return f"$'{out}'"


def _size(kind: FileKind, size: int) -> str:
    return f"  {size}" if kind == "file" else ""


def _check(path: str, name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise FileError(path, f"{name} is {least} to {most}, not {value}")


def _text(lines: list[str], notes: list[str], nothing: str) -> tuple[str, int]:
    """The lines that a result holds, with notes behind them; and how many they are."""
    window = OutputWindow(
        keep="head", limit_bytes=DEFAULT_LIMIT_BYTES - _NOTES_BYTES, limit_lines=DEFAULT_LIMIT_LINES - _NOTES_LINES
    )
    for line in lines:
        window.feed(line.encode("utf-8", "replace") + b"\n")
    shown = window.window()
    if not shown.complete:
        notes = [f"[{shown.dropped_lines} more lines do not fit.]", *notes]
    text = shown.text if lines else nothing + "\n"
    return (text + "\n".join(notes)).removesuffix("\n"), shown.shown_lines
