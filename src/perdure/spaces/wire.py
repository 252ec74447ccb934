"""The records of the daemon's protocol as values (docs/spaced-protocol.md tells what they mean).

Paths are SpacePath: str relative to the workspace, names that are not UTF-8 with surrogate escapes as in ``os``.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import Literal, TypeAlias, TypeVar

import msgspec

T = TypeVar("T")

MAX_PATH = 4096
"""Bytes of a path."""
CHUNK_BYTES = 1024 * 1024
"""Content is cut into chunks of this size."""
MAX_WAIT_MS = 30_000
"""The longest wait of one request."""

WirePath: TypeAlias = str | dict[str, str]
"""A path in JSON: a string, or ``{"b64": ...}`` where it is not UTF-8. Strict JSON, fit for the log."""


class SpacePath(str):
    """A path, or the target of a symbolic link. A str; may hold surrogate escapes."""

    __slots__ = ()


def encode_path(path: str | bytes) -> WirePath:
    """A path as JSON can hold it. Raises ValueError for what cannot be one: NUL bytes, more than 4,096 bytes."""
    raw = path if isinstance(path, bytes) else path.encode("utf-8", "surrogateescape")
    if b"\0" in raw:
        raise ValueError("a path has no NUL byte")
    if len(raw) > MAX_PATH:
        raise ValueError(f"a path of {len(raw)} bytes is longer than the {MAX_PATH} a path can have")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(raw).decode("ascii")}


def decode_path(value: object) -> SpacePath:
    """The inverse of ``encode_path``. Raises ValueError for what it did not make."""
    if isinstance(value, str):
        return SpacePath(value)
    if isinstance(value, dict) and list(value) == ["b64"]:  # pyright: ignore[reportUnknownArgumentType]
        try:
            raw = base64.b64decode(value["b64"], validate=True)  # pyright: ignore[reportUnknownArgumentType]
            return SpacePath(raw.decode("utf-8", "surrogateescape"))
        except (binascii.Error, TypeError, ValueError) as error:
            raise ValueError("a path's b64 is not base64") from error
    raise ValueError("a path is a string or {b64: string}")


def decode(raw: bytes | msgspec.Raw, type: type[T]) -> T:
    """A result of the daemon. Raises msgspec.MsgspecError."""
    return msgspec.json.decode(raw, type=type, dec_hook=_decode_special)


def _decode_special(type: type, value: object) -> object:
    assert type is SpacePath
    return decode_path(value)


class _Wire(msgspec.Struct, frozen=True, kw_only=True):
    """Fields a later daemon adds are passed over."""


# --- who has the Space --------------------------------------------------------------------------------------


class ExecKey(_Wire, frozen=True, kw_only=True):
    """Names one command of one attempt of a call. Its log is the fence's."""

    call: int
    attempt: int
    nonce: str
    ordinal: int
    """1 for the first command of the attempt."""


class Place(_Wire, frozen=True, kw_only=True):
    """An attempt of a call: the floor, or an outcome that the log has."""

    call: int
    attempt: int


class Fence(_Wire, frozen=True, kw_only=True):
    log: str
    epoch: int
    writer: str
    connection: int


class ImageName(_Wire, frozen=True, kw_only=True):
    """Which image: a log, a number, and the nonce it was made with. Stores that were copied, and went on apart from
    each other, may each have an image of a number."""

    log: str
    commit: int
    nonce: str = ""


class ImageRecord(_Wire, frozen=True, kw_only=True):
    """The image the workspace stands at."""

    log: str
    commit: int
    nonce: str = ""
    boot: str

    @property
    def name(self) -> ImageName:
        return ImageName(log=self.log, commit=self.commit, nonce=self.nonce)


CommandState: TypeAlias = Literal["absent", "void", "running", "exited", "cut_off", "unknown"]
ExitCause: TypeAlias = Literal["exit", "timeout", "aborted", "output_limit", "not_started"]
StopCause: TypeAlias = Literal["aborted", "timeout"]
Containment: TypeAlias = Literal["cgroup2", "cgroup1", "none"]
"""By what processes are held together that try to get away; ``none``: by parent and by a tag, best effort."""


class Command(_Wire, frozen=True, kw_only=True):
    """What the ledger and a look at the processes say of a key."""

    key: ExecKey
    state: CommandState
    pid: int | None = None
    started_at: int | None = None
    """Milliseconds UTC; of a running one."""
    output_size: int = 0
    """Bytes of output so far; of one that has ended, in all."""
    cause: ExitCause | None = None
    code: int | None = None
    signal: int | None = None
    errno: str | None = None
    reason: str | None = None
    duration_ms: int = 0
    left: int = 0
    """Processes it left living."""
    below_floor: bool = False
    fresh: bool = False
    """In the answer of ``start``: this request started it."""


class ServerLimits(_Wire, frozen=True, kw_only=True):
    header_bytes: int
    body_bytes: int
    wait_ms: int
    connections: int
    keys: int
    running: int
    page: int
    inline_bytes: int
    chunk_bytes: int


class Status(_Wire, frozen=True, kw_only=True):
    """What a daemon tells of itself. ``instance`` is new with each start of it, ``boot`` with each of its machine."""

    protocol: int
    space: str
    generation: int
    boot: str
    instance: str
    pid: int
    python: str
    workspace: SpacePath
    """Absolute, inside the Space."""
    containment: Containment
    testing: bool
    fence: Fence | None
    advanced: bool
    floor: Place | None
    image: ImageRecord | None
    restoring: bool
    commands: tuple[Command, ...]
    living: int
    limits: ServerLimits


class Advanced(_Wire, frozen=True, kw_only=True):
    epoch: int
    connection: int
    boot: str
    generation: int
    instance: str
    image: ImageRecord | None
    floor: Place | None
    killed: int
    commands: tuple[Command, ...]
    """Those of ``keep``, in its order."""


class Stand(_Wire, frozen=True, kw_only=True):
    image: ImageRecord | None
    floor: Place | None


class Looked(_Wire, frozen=True, kw_only=True):
    commands: tuple[Command, ...]
    image: ImageRecord | None
    floor: Place | None


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Bounds of one command. None: the daemon's (256 MiB of output) or the system's."""

    output_bytes: int | None = None
    file_bytes: int | None = None
    open_files: int | None = None
    cpu_s: int | None = None
    address_bytes: int | None = None


# --- images -------------------------------------------------------------------------------------------------

EntryKind: TypeAlias = Literal["file", "symlink", "directory"]


class Entry(_Wire, frozen=True, kw_only=True):
    """One path of an image."""

    path: SpacePath
    kind: EntryKind
    mode: int = 0o777
    """The twelve permission bits; of a symbolic link nothing is meant by it."""
    size: int = 0
    sha256: str = ""
    chunks: tuple[str, ...] = ()
    """Digests of its chunks; only of a file larger than one chunk."""
    target: SpacePath | None = None

    def parts(self) -> tuple[str, ...]:
        """The digests of a file's contents, chunk by chunk."""
        if self.kind != "file" or self.size == 0:
            return ()
        return self.chunks or (self.sha256,)

    def to_wire(self) -> dict[str, object]:
        path = encode_path(self.path)
        if self.kind == "symlink":
            return {"path": path, "kind": "symlink", "target": encode_path(self.target or "")}
        if self.kind == "directory":
            return {"path": path, "kind": "directory", "mode": self.mode}
        fields: dict[str, object] = {
            "path": path, "kind": "file", "mode": self.mode, "size": self.size, "sha256": self.sha256,
        }  # fmt: skip
        if self.chunks:
            fields["chunks"] = self.chunks
        return fields


class Change(_Wire, frozen=True, kw_only=True):
    """How a path differs from an image."""

    path: SpacePath
    change: Literal["added", "changed", "removed"]
    kind: EntryKind | None = None
    """None: removed."""
    mode: int = 0o777
    size: int = 0
    sha256: str = ""
    chunks: tuple[str, ...] = ()
    target: SpacePath | None = None
    inline: tuple[int, int] | None = None
    """(offset, length) of the whole content in the answer's body."""

    def entry(self) -> Entry:
        """What is there now. Not of a removed path."""
        assert self.kind is not None, "a removed path has no entry"
        return Entry(
            path=self.path,
            kind=self.kind,
            mode=self.mode,
            size=self.size,
            sha256=self.sha256,
            chunks=self.chunks,
            target=self.target,
        )


class Unfit(_Wire, frozen=True, kw_only=True):
    """A path that cannot be part of an image."""

    path: SpacePath
    kind: str = ""
    size: int = 0
    errno: str = ""


class Scan(_Wire, frozen=True, kw_only=True):
    scan: int
    base: ImageName | None
    """The image that ``changes`` are against; None: against an empty one."""
    changes: tuple[Change, ...]
    next: int | None
    """Where the next page begins."""
    total: int
    hashed_bytes: int
    special: tuple[Unfit, ...]
    special_count: int
    too_large: tuple[Unfit, ...]
    too_large_count: int
    unreadable: tuple[Unfit, ...]
    unreadable_count: int
    living: int
    left: tuple[ExecKey, ...]
    """Ended commands of which something lives."""
    image: ImageRecord | None
    entries: int
    bytes: int


class ScanPage(_Wire, frozen=True, kw_only=True):
    changes: tuple[Change, ...]
    next: int | None


class ContentRange(_Wire, frozen=True, kw_only=True):
    """A part of a file, and the digest it must have."""

    path: str
    offset: int
    length: int
    sha256: str


class RestoreBegun(_Wire, frozen=True, kw_only=True):
    restore: int
    known: bool
    """The daemon knows this image; it need not be sent."""


class Displaced(_Wire, frozen=True, kw_only=True):
    """A file that a restore replaces or removes, as it is now."""

    path: SpacePath
    kind: EntryKind
    size: int = 0
    sha256: str = ""
    chunks: tuple[str, ...] = ()


class RestorePlan(_Wire, frozen=True, kw_only=True):
    missing: tuple[str, ...]
    missing_total: int
    displaced: tuple[Displaced, ...]
    displaced_total: int
    next: int | None


class Restored(_Wire, frozen=True, kw_only=True):
    image: ImageRecord
    written: int
    removed: int
    preserved: int
    recovery: SpacePath | None
    not_preserved: tuple[SpacePath, ...]
    not_preserved_count: int = 0


# --- files --------------------------------------------------------------------------------------------------


class FileRead(_Wire, frozen=True, kw_only=True):
    size: int
    """Of the whole file."""
    mode: int
    length: int


class FileInfo(_Wire, frozen=True, kw_only=True):
    name: SpacePath
    kind: str
    """file, directory, symlink, or special."""
    size: int
    mode: int
    modified_at: int


class FileList(_Wire, frozen=True, kw_only=True):
    entries: tuple[FileInfo, ...]
    more: bool


class WalkEntry(_Wire, frozen=True, kw_only=True):
    path: SpacePath
    kind: str
    size: int = 0


class Walked(_Wire, frozen=True, kw_only=True):
    entries: tuple[WalkEntry, ...]
    more: bool
    timed_out: bool = False


class Globbed(_Wire, frozen=True, kw_only=True):
    paths: tuple[SpacePath, ...]
    more: bool


class GrepMatch(_Wire, frozen=True, kw_only=True):
    path: SpacePath
    line: int
    text: SpacePath
    """The line, cut at 1,000 bytes; bytes that are not UTF-8 as the daemon gives them."""
    context: bool = False
    """It does not match, but stands near a line that does."""


class Grepped(_Wire, frozen=True, kw_only=True):
    matches: tuple[GrepMatch, ...]
    more: bool
    timed_out: bool
    skipped: int


class Written(_Wire, frozen=True, kw_only=True):
    created: bool
    size: int
    mode: int


def batches(entries: Iterable[Entry], most: int) -> Iterable[bytes]:
    """Entries as JSON arrays of at most ``most`` bytes each; at least one array."""
    items: list[bytes] = []
    size = 2
    sent = False
    for entry in entries:
        item = msgspec.json.encode(entry.to_wire())
        if items and size + len(item) + 1 > most:
            yield b"[" + b",".join(items) + b"]"
            items, size, sent = [], 2, True
        items.append(item)
        size += len(item) + 1
    if items or not sent:
        yield b"[" + b",".join(items) + b"]"
