"""find and grep on this machine: the search that a Space's daemon does, in a process of its own (rules H362 to H365).

It is the daemon's own code, so that the same arguments give the same answer here and in a Space. A process can be ended
when a pattern takes for ever, and its host goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from perdure.harness.environment import (
    FileError,
    FileKind,
    FileMissing,
    Found,
    FoundPath,
    GrepLine,
    GrepLines,
    PathEscapes,
)
from perdure.spaced import SPACED
from perdure.tools.threads import Threads
from perdure.tools.workspace import NO_DIRECTORY, Workspace, check_path

MOST_FOUND = 10_000
MOST_MATCHES = 1000
MOST_CONTEXT = 20
LINE_BYTES = 1000
"""Of a line that matches, so much is told."""
TIME_S = 10.0
"""What a search may take."""
_CHILD = Path(__file__).with_name("search_child.py")


class _Entry(msgspec.Struct, frozen=True):
    path: str | dict[str, str]
    kind: FileKind = "file"
    size: int = 0
    line: int = 0
    text: str = ""
    context: bool = False


class _Answer(msgspec.Struct, frozen=True):
    entries: tuple[_Entry, ...] = ()
    matches: tuple[_Entry, ...] = ()
    more: bool = False
    skipped: int = 0
    fail: tuple[str, str] | None = None
    """Code and message, as the daemon's protocol has them."""


def check_find(limit: int) -> None:
    """Raises ValueError for bounds that are none."""
    if not 1 <= limit <= MOST_FOUND:
        raise ValueError(f"a search finds 1 to {MOST_FOUND} paths, not {limit}")


def check_grep(limit: int, context: int) -> None:
    """Raises ValueError for bounds that are none."""
    if not 1 <= limit <= MOST_MATCHES or not 0 <= context <= MOST_CONTEXT:
        raise ValueError(
            f"a search finds 1 to {MOST_MATCHES} matches with 0 to {MOST_CONTEXT} lines around each, "
            f"not {limit} with {context}"
        )


class Searcher:
    """``workspace``: where paths are relative to, and lead out of only if ``confine`` is False. ``ripgrep``: the path
    of one that says which files are worth reading; None: all are read. The answer is the same."""

    def __init__(
        self,
        workspace: Workspace,
        threads: Threads,
        *,
        confine: bool = True,
        ripgrep: str | None = None,
        time_s: float = TIME_S,
    ) -> None:
        self._workspace = workspace
        self._root = workspace.real_root if confine else "/"
        self._confine = confine
        self._threads = threads
        self._ripgrep = ripgrep
        self._time_s = time_s

    async def find(self, path: str, *, pattern: str | None, kind: FileKind | None, ignored: bool, limit: int) -> Found:
        """As ``ExecutionEnvironment.find``."""
        check_find(limit)
        query = {"op": "walk", "pattern": pattern, "kind": kind, "hidden": True, "ignored": ignored, "limit": limit}
        answer = await self._ask(path, query)
        if answer is None:
            return Found(entries=(), more=True, timed_out=True)
        entries = (FoundPath(path=self._told(e.path), kind=e.kind, size=e.size) for e in answer.entries)
        return Found(entries=tuple(entries), more=answer.more)

    async def grep(
        self,
        pattern: str,
        *,
        path: str,
        fixed: bool,
        ignore_case: bool,
        glob: str | None,
        context: int,
        ignored: bool,
        limit: int,
    ) -> GrepLines:
        """As ``ExecutionEnvironment.grep``."""
        check_grep(limit, context)
        query = {
            "op": "grep", "pattern": pattern, "fixed": fixed, "ignore_case": ignore_case, "glob": glob,
            "context": context, "ignored": ignored, "limit": limit,
        }  # fmt: skip
        answer = await self._ask(path, query)
        if answer is None:
            return GrepLines(lines=(), more=True, timed_out=True)
        lines = (GrepLine(path=self._told(m.path), line=m.line, text=m.text, context=m.context) for m in answer.matches)
        return GrepLines(lines=tuple(lines), more=answer.more, skipped=answer.skipped)

    def _below(self, path: str) -> str:
        """A path as one below the root that is searched. Raises PathEscapes."""
        if not self._confine:
            return os.path.join(self._workspace.root, path).lstrip("/")
        inside = self._workspace.relative(path)
        if inside is None:
            raise self._error(path, "outside_workspace", "")
        return inside

    def _told(self, found: str | dict[str, str]) -> str:
        """A path of an answer as its caller may use it."""
        path = found if isinstance(found, str) else os.fsdecode(base64.b64decode(found["b64"]))
        if self._confine:
            return path
        path = os.path.normpath(f"/{path}")
        root = self._workspace.root.rstrip("/") + "/"
        return path[len(root) :] if path.startswith(root) else path

    async def _ask(self, path: str, query: dict[str, Any]) -> _Answer | None:
        """None: it took too long."""
        check_path(path)
        inside = self._below(path)
        for name in ("pattern", "glob"):
            if "\0" in (query.get(name) or ""):
                raise FileError(path, f"{name} contains a NUL character")
        try:
            words = msgspec.json.encode(
                {
                    "code": str(SPACED.parent),
                    "root": _wire(self._root),
                    "ripgrep": self._ripgrep,
                    "time_s": self._time_s,
                    "query": {**query, "path": _wire(inside)},
                }
            )
        except UnicodeEncodeError as error:
            raise FileError(path, "the pattern has a lone surrogate, which no text has") from error
        child = _Child()
        talking = asyncio.ensure_future(self._threads.call(child.talk, words, self._time_s))
        try:
            await asyncio.wait({talking})
        except asyncio.CancelledError:
            child.end()
            await asyncio.wait({talking})
            raise
        said = talking.result()
        if said is None:
            return None
        try:
            answer = msgspec.json.decode(said, type=_Answer)
        except msgspec.MsgspecError as error:
            raise FileError(path, "could not be searched: the process that searches ended too early") from error
        if answer.fail is not None:
            raise self._error(path, *answer.fail)
        return answer

    def _error(self, path: str, code: str, message: str) -> FileError:
        if code == "outside_workspace":
            return PathEscapes(path, f"leads out of the workspace {self._workspace.root}; use a path inside it")
        if code == "not_found":
            return FileMissing(path, "does not exist")
        if code == "not_a_directory":
            return FileError(path, NO_DIRECTORY)
        return FileError(path, message if code == "bad_request" else message.lower())


def found_ripgrep() -> str | None:
    return shutil.which("rg")


class _Child:
    """The process that searches. ``end`` may be called from another thread, at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = False
        self._process: subprocess.Popen[bytes] | None = None

    def talk(self, words: bytes, time_s: float) -> bytes | None:
        """Its answer; None: it was ended, because it took too long or was to end."""
        with self._lock:
            if self._ended:
                return None
            process = self._process = _start()
        with process:
            try:
                return process.communicate(words, timeout=time_s)[0]
            except subprocess.TimeoutExpired:
                return None
            finally:
                self.end()

    def end(self) -> None:
        """Also what it started: its group is its own until it is waited for."""
        with self._lock:
            self._ended = True
            process = self._process
            if process is not None and process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603  (this Python, and a file of the package)
        [sys.executable, "-I", "-S", str(_CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )


def _wire(path: str) -> str | dict[str, str]:
    """A path as the daemon's protocol has it."""
    raw = os.fsencode(path)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(raw).decode("ascii")}
