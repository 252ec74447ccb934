"""A driver's client of a daemon: the requests of its protocol as typed methods.

What each one does and promises is told in docs/spaced-protocol.md, under the same name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Literal, Self, TypeAlias

import msgspec

from perdure.harness.environment import FileError
from perdure.spaces import frames, wire
from perdure.spaces.errors import SpaceConnectionLost
from perdure.spaces.link import Admission, ClientLimits, Link
from perdure.spaces.provider import SpaceAddress
from perdure.spaces.refusals import Claim
from perdure.spaces.wire import (
    Advanced,
    Command,
    ContentRange,
    Entry,
    ExecKey,
    FileInfo,
    FileList,
    FileRead,
    Globbed,
    Grepped,
    Limits,
    Looked,
    Place,
    RestoreBegun,
    Restored,
    RestorePlan,
    Scan,
    ScanPage,
    Stand,
    Status,
    StopCause,
    Walked,
    Written,
)

AnyPath: TypeAlias = str | bytes
"""Relative to the workspace. A name that is not UTF-8 is bytes, or str with surrogate escapes."""


class _Nothing(msgspec.Struct, frozen=True):
    pass


class _Living(msgspec.Struct, frozen=True):
    living: int


class _Digests(msgspec.Struct, frozen=True):
    digests: tuple[str, ...]


class _Missing(msgspec.Struct, frozen=True):
    missing: tuple[str, ...]


class _MaybeInfo(msgspec.Struct, frozen=True):
    kind: str | None
    name: wire.SpacePath = wire.SpacePath()
    size: int = 0
    mode: int = 0
    modified_at: int = 0


class Armed(msgspec.Struct, frozen=True):
    """The crash points of a daemon under test."""

    held: tuple[str, ...]
    armed: tuple[str, ...]


class SpaceClient:
    """``connect`` makes one; ``advance`` takes the Space, and everything else but ``status`` and ``shutdown`` needs it.

    Every method may raise SpaceConnectionLost, StaleEpochError (neither is ever a tool's result) and SpaceRefused;
    methods about files also FileError (rule S103). A method that is cancelled leaves open whether its request took
    effect (rule S102).
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._advancing = asyncio.Lock()
        self._number = 0

    @classmethod
    async def connect(cls, address: SpaceAddress, *, limits: ClientLimits | None = None) -> SpaceClient:
        """Connect and say hello. Raises SpaceUnavailable, also if another Space or generation answers."""
        link = Link(address, limits or ClientLimits())
        await link.open()
        return cls(link)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection. Requests under way raise SpaceConnectionLost; commands run on."""
        await self._link.aclose()

    def __repr__(self) -> str:
        return f"<SpaceClient of {self.address!r}{', advanced' if self.admission else ''}>"

    @property
    def address(self) -> SpaceAddress:
        return self._link.address

    @property
    def seen(self) -> Status:
        """What the daemon said of itself at the newest hello or ``status``."""
        assert self._link.status is not None, "connect() says hello"
        return self._link.status

    @property
    def admission(self) -> Admission | None:
        """None: this client does not have the Space; it has not advanced, or has lost it since."""
        return self._link.admission

    # --- who has the Space

    async def status(self) -> Status:
        status = await self._link.ask_open("status", {}, Status)
        self._link.take_status(status)
        return status

    async def advance(
        self, *, log: str, epoch: int, writer: str, keep: Sequence[ExecKey] = (), outcomes: Sequence[Place] = ()
    ) -> Advanced:
        """Take the Space for this driver. It may be repeated, and must be after SpaceConnectionLost.

        Raises StaleEpochError if a newer driver has it, SpaceProcessesRemain if something did not die: nothing else
        is admitted then, advance again.
        """
        async with self._advancing:
            self._link.end_admission(self.admission, "not_advanced", "an advance was begun and did not succeed")
            claim = Claim(log=log, epoch=epoch, writer=writer)
            fence = (await self.status()).fence
            # Above what any client of this writer has used, so that an advance is never refused for its number.
            self._number = max(self._number, fence.connection if fence is not None else 0) + 1
            fields = {"log": log, "epoch": epoch, "writer": writer, "connection": self._number}
            advanced = await self._link.ask_open(
                "advance",
                {**fields, "keep": keep, "outcomes": outcomes},
                Advanced,
                timeout_s=self._link.limits.slow_s,
                claim=claim,
            )
            if (advanced.epoch, advanced.connection) != (epoch, self._number):
                raise SpaceConnectionLost("malformed", "the Space answered the advance of another driver")
            self._link.admission = Admission(claim=claim, connection=self._number, boot=advanced.boot)
            return advanced

    async def shutdown(self, *, kill: bool = False) -> None:
        """End the daemon; with ``kill`` first everything that lives in the Space. Whoever has the token may."""
        await self._link.ask_open("shutdown", {"kill": kill}, _Nothing)

    # --- commands

    async def start(
        self,
        key: ExecKey,
        *,
        argv: Sequence[str] | None = None,
        shell: str | None = None,
        cwd: AnyPath = "",
        env: Mapping[str, str | None] | None = None,
        timeout_ms: int | None = None,
        limits: Limits | None = None,
        wait_ms: int = 0,
        offset: int = 0,
        length: int = 0,
        until_exit: bool = False,
        lasting: bool = False,
    ) -> tuple[Command, bytes]:
        """Exactly one of ``argv`` and ``shell``. The bytes are output from ``offset``, at most ``length``.
        ``until_exit``: output that is there ends no wait. ``lasting``: it may be read and killed after its call is over
        (rule S42).

        Raises KeyVoid, KeyBelowFloor, KeyConflict, NoImage, SpaceFull, SpaceBusy.
        """
        if (argv is None) == (shell is None):
            raise ValueError("a command is either argv or shell")
        fields: dict[str, object] = {"key": key, "cwd": _path(cwd), "wait_ms": wait_ms}
        fields |= {"argv": argv} if shell is None else {"shell": shell}
        if env:
            fields["env"] = env
        if timeout_ms is not None:
            fields["timeout_ms"] = timeout_ms
        if limits is not None:
            fields["limits"] = limits
        fields |= {"offset": offset, "length": length}
        if until_exit:
            fields["until_exit"] = True
        if lasting:
            fields["lasting"] = True
        return await self._link.ask("start", fields, Command, wide=wait_ms > 0, timeout_s=self._waited(wait_ms))

    async def wait(
        self, key: ExecKey, *, wait_ms: int = 0, offset: int = 0, length: int = 0, until_exit: bool = False
    ) -> tuple[Command, bytes]:
        """``wait_ms`` is at most 30,000: ask again. The rest as in ``start``."""
        fields: dict[str, object] = {"key": key, "wait_ms": wait_ms, "offset": offset, "length": length}
        if until_exit:
            fields["until_exit"] = True
        return await self._link.ask("wait", fields, Command, wide=wait_ms > 0, timeout_s=self._waited(wait_ms))

    async def look(self, keys: Sequence[ExecKey]) -> Looked:
        return (await self._link.ask("look", {"keys": keys}, Looked))[0]

    async def void(self, key: ExecKey) -> Command:
        return (await self._link.ask("void", {"key": key}, Command))[0]

    async def kill(self, key: ExecKey, cause: StopCause) -> Command:
        """Raises SpaceProcessesRemain."""
        return (await self._link.ask("kill", {"key": key, "cause": cause}, Command))[0]

    async def freeze(self) -> int:
        """How many processes live. Raises SpaceProcessesRemain."""
        return (await self._link.ask("freeze", {}, _Living))[0].living

    async def thaw(self) -> int:
        return (await self._link.ask("thaw", {}, _Living))[0].living

    # --- images

    async def scan(
        self,
        *,
        freeze: bool = False,
        sync: bool = False,
        full: bool = False,
        inline_bytes: int = 0,
        max_file_bytes: int | None = None,
        page: int | None = None,
    ) -> tuple[Scan, bytes]:
        """The bytes are the contents that ``Change.inline`` points into."""
        fields: dict[str, object] = {"freeze": freeze, "sync": sync, "full": full, "inline_bytes": inline_bytes}
        if max_file_bytes is not None:
            fields["max_file_bytes"] = max_file_bytes
        if page is not None:
            fields["page"] = page
        return await self._link.ask("scan", fields, Scan, timeout_s=self._link.limits.slow_s)

    async def scan_page(self, scan: int, start: int) -> ScanPage:
        """Raises ScanForgotten."""
        return (await self._link.ask("scan_page", {"scan": scan, "from": start}, ScanPage))[0]

    async def chunks(self, items: Sequence[ContentRange]) -> bytes:
        """The contents one after the other, at most 16 MiB. Raises ContentChanged naming the first that differs."""
        wanted = [
            {"path": _path(item.path), "offset": item.offset, "length": item.length, "sha256": item.sha256}
            for item in items
        ]
        body = (await self._link.ask("chunks", {"items": wanted}, _Nothing))[1]
        if len(body) != sum(item.length for item in items):
            raise SpaceConnectionLost("malformed", "the answer to chunks has another length than was asked for")
        return body

    async def settle(
        self,
        *,
        commit: int | None = None,
        nonce: str = "",
        scan: int | None = None,
        floor: Place | None = None,
        thaw: bool = False,
    ) -> Stand:
        """``commit`` and ``nonce``: the image's. Raises Restoring, ScanForgotten, SpaceFull."""
        fields: dict[str, object] = {"thaw": thaw, "nonce": nonce}
        fields |= {
            name: value for name, value in (("commit", commit), ("scan", scan), ("floor", floor)) if value is not None
        }
        return (await self._link.ask("settle", fields, Stand, timeout_s=self._link.limits.slow_s))[0]

    # --- restore and undo

    async def restore_begin(self, *, commit: int, nonce: str = "", floor: Place | None = None) -> RestoreBegun:
        """``commit`` and ``nonce``: the image's. Raises SpaceProcessesRemain."""
        fields: dict[str, object] = {"commit": commit, "nonce": nonce}
        if floor is not None:
            fields["floor"] = floor
        return (await self._link.ask("restore_begin", fields, RestoreBegun))[0]

    async def restore_image(self, restore: int, entries: Iterable[Entry]) -> None:
        """The whole image, in as many requests as it takes. Raises Restoring."""
        for body in wire.batches(entries, frames.BODY_BYTES):
            await self._link.ask("restore_image", {"restore": restore}, _Nothing, body=body)

    async def restore_plan(self, restore: int, *, start: int = 0, page: int | None = None) -> RestorePlan:
        """``start`` 0 makes the plan; later pages begin where ``next`` says. Raises Restoring."""
        fields: dict[str, object] = {"restore": restore, "from": start}
        if page is not None:
            fields["page"] = page
        return (await self._link.ask("restore_plan", fields, RestorePlan, timeout_s=self._link.limits.slow_s))[0]

    async def missing(self, digests: Sequence[str]) -> tuple[str, ...]:
        """Which of at most 10,000 chunks are not staged."""
        return (await self._link.ask("missing", {"digests": digests}, _Missing))[0].missing

    async def put(self, chunks: Sequence[bytes]) -> tuple[str, ...]:
        """Stage chunks of at most 1 MiB each, at most 16 MiB in all; their digests. Raises SpaceFull."""
        fields = {"sizes": [len(chunk) for chunk in chunks]}
        return (await self._link.ask("put", fields, _Digests, body=b"".join(chunks)))[0].digests

    async def restore_apply(
        self,
        restore: int,
        *,
        preserve: Literal["all", "none"] | Sequence[AnyPath] = "all",
        preserve_bytes: int | None = None,
        name: str | None = None,
    ) -> Restored:
        """``preserve``: which of the displaced files are moved aside; a sequence lists them.

        Raises ContentChanged (plan anew), ContentMissing (put, then again), Restoring, SpaceFull.
        """
        fields: dict[str, object] = {"restore": restore}
        body = b""
        if isinstance(preserve, str):
            fields["preserve"] = preserve
        else:
            fields["preserve"] = "listed"
            body = msgspec.json.encode([_path(path) for path in preserve])
        if preserve_bytes is not None:
            fields["preserve_bytes"] = preserve_bytes
        if name is not None:
            fields["name"] = name
        timeout_s = self._link.limits.slow_s
        return (await self._link.ask("restore_apply", fields, Restored, body=body, timeout_s=timeout_s))[0]

    # --- files

    async def read(self, path: AnyPath, *, offset: int = 0, length: int = frames.BODY_BYTES) -> tuple[FileRead, bytes]:
        """At most 16 MiB."""
        fields = {"path": _path(path), "offset": offset, "length": length}
        return await self._link.ask("read", fields, FileRead, path=_shown(path))

    async def stat(self, path: AnyPath, *, follow: bool = True) -> FileInfo | None:
        """None: nothing is there."""
        fields = {"path": _path(path), "follow": follow}
        found, _ = await self._link.ask("stat", fields, _MaybeInfo, path=_shown(path))
        if found.kind is None:
            return None
        return FileInfo(
            name=found.name, kind=found.kind, size=found.size, mode=found.mode, modified_at=found.modified_at
        )

    async def list_dir(self, path: AnyPath = "", *, limit: int = 10_000) -> FileList:
        """``limit`` is at most 10,000."""
        fields = {"path": _path(path), "limit": limit}
        return (await self._link.ask("list", fields, FileList, path=_shown(path)))[0]

    async def walk(
        self,
        path: AnyPath = "",
        *,
        pattern: str | None = None,
        kind: str | None = None,
        ignored: bool = True,
        limit: int = 10_000,
        hidden: bool = True,
        wait_ms: int = wire.MAX_WAIT_MS,
    ) -> Walked:
        """``ignored``: with .git and what .gitignore files name."""
        fields: dict[str, object] = {
            "path": _path(path), "limit": limit, "hidden": hidden, "ignored": ignored, "wait_ms": wait_ms,
        }  # fmt: skip
        fields |= {name: value for name, value in (("pattern", pattern), ("kind", kind)) if value is not None}
        timeout_s = self._waited(wait_ms)
        return (await self._link.ask("walk", fields, Walked, wide=True, timeout_s=timeout_s, path=_shown(path)))[0]

    async def glob(self, pattern: str, *, path: AnyPath = "", limit: int = 10_000) -> Globbed:
        fields = {"path": _path(path), "pattern": pattern, "limit": limit}
        return (await self._link.ask("glob", fields, Globbed, wide=True, path=_shown(path)))[0]

    async def grep(
        self,
        pattern: str,
        *,
        path: AnyPath = "",
        fixed: bool = False,
        ignore_case: bool = False,
        glob: str | None = None,
        context: int = 0,
        ignored: bool = True,
        limit: int = 1000,
        wait_ms: int = 10_000,
    ) -> Grepped:
        """``context``: lines around each match, at most 20. ``ignored``: as in ``walk``."""
        fields: dict[str, object] = {
            "path": _path(path), "pattern": pattern, "fixed": fixed, "ignore_case": ignore_case, "limit": limit,
            "context": context, "ignored": ignored, "wait_ms": wait_ms,
        }  # fmt: skip
        if glob is not None:
            fields["glob"] = glob
        timeout_s = self._waited(wait_ms)
        return (await self._link.ask("grep", fields, Grepped, wide=True, timeout_s=timeout_s, path=_shown(path)))[0]

    async def write(
        self,
        path: AnyPath,
        data: bytes | Sequence[str],
        *,
        call: int,
        attempt: int,
        nonce: str,
        mode: int | None = None,
        parents: bool = True,
        expect: str | None = None,
    ) -> Written:
        """``data``: the content, at most 16 MiB, or the digests of chunks that were put.

        ``expect``: the digest of the content that is replaced, or "absent"; else FileChanged. Raises KeyBelowFloor,
        NoImage, SpaceFull, ContentMissing.
        """
        fields: dict[str, object] = {
            "path": _path(path), "call": call, "attempt": attempt, "nonce": nonce, "parents": parents,
        }  # fmt: skip
        if mode is not None:
            fields["mode"] = mode
        if expect is not None:
            fields["expect"] = expect
        body = b""
        if isinstance(data, bytes):
            body = data
        else:
            fields["chunks"] = data
        return (await self._link.ask("write", fields, Written, body=body, path=_shown(path)))[0]

    async def remove(self, path: AnyPath, *, call: int, attempt: int, nonce: str) -> None:
        """A file, a symbolic link itself, or an empty directory. Raises KeyBelowFloor, NoImage."""
        fields = {"path": _path(path), "call": call, "attempt": attempt, "nonce": nonce}
        await self._link.ask("remove", fields, _Nothing, path=_shown(path))

    # --- crash points, of a daemon under test

    async def arm(self, point: str, action: Literal["kill", "hold"], *, skip: int = 0) -> None:
        await self._link.ask_open("arm", {"point": point, "action": action, "skip": skip}, _Nothing)

    async def release(self, point: str) -> None:
        await self._link.ask_open("release", {"point": point}, _Nothing)

    async def armed(self) -> Armed:
        return await self._link.ask_open("armed", {}, Armed)

    def _waited(self, wait_ms: int) -> float:
        return wait_ms / 1000 + self._link.limits.quick_s


def _path(path: AnyPath) -> wire.WirePath:
    try:
        return wire.encode_path(path)
    except ValueError as error:
        shown = _shown(path)
        reason = "is not a name a file can have" if isinstance(error, UnicodeError) else str(error)
        raise FileError(repr(shown[:100]), reason) from error


def _shown(path: AnyPath) -> str:
    return path.decode("utf-8", "surrogateescape") if isinstance(path, bytes) else path
