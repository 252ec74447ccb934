"""Where a consumer of events or frames stands: a short text that it keeps and comes back with (rules H260 to H264).

A cursor names a store, a conversation, and the last thing its consumer was given. It is no secret and no proof of
anything: whoever may look at a conversation may use it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
from typing import Final, Literal, TypeAlias

import msgspec

from perdure.kernel.errors import PerdureError

VERSION: Final = 1
ALL: Final = 0xFFFF_FFFF
"""As ``index``: all that its batch brought."""

_LAYOUT: Final = struct.Struct(">BB7s8sQQII")
"""Version, flags, log, stream, conversation, commit, number, index; then the check sum of them."""
_CHECK: Final = struct.Struct(">I")
_LENGTH: Final = 60
"""Characters of a cursor; another version may have others."""
_LONGEST: Final = 500

Kind: TypeAlias = Literal["events", "view"]
CursorFault: TypeAlias = Literal["damaged", "version", "kind", "store", "conversation", "ahead"]

_REMEDY: Final = "start without a cursor"
_FAULTS: Final[dict[CursorFault, str]] = {
    "damaged": "this is no cursor, or it was changed on its way",
    "version": "this cursor was made by another release of perdure",
    "kind": "a cursor of events() is not one of watch()",
    "store": "this cursor is of another store",
    "conversation": "this cursor is of another conversation",
    "ahead": "this cursor is ahead of the store, which has lost commits or is an older copy",
}


class CursorError(PerdureError, ValueError):
    """A cursor that cannot be used here, ever: start without one. What is merely too old is no error."""

    def __init__(self, fault: CursorFault) -> None:
        super().__init__(f"{_FAULTS[fault]}; {_REMEDY}")
        self.fault: CursorFault = fault


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind
    log: bytes
    """A mark of the store's log id."""
    stream: bytes
    """Which run of numbers ``number`` is of; another opening of the store has others."""
    conversation: int
    seq: int
    """The commit it is of."""
    number: int
    """The batch of events, or the frame."""
    index: int = ALL
    """Of events: the last one taken of that batch."""
    whole: bool = True
    """Nothing of its commit comes after it."""
    quiet: bool = False
    """Nothing went on that a crash would leave to be told of."""
    running: bool = True
    """Work could run then."""

    def encode(self) -> str:
        flags = self.whole | self.quiet << 1 | (self.kind == "view") << 2 | self.running << 3
        body = _LAYOUT.pack(VERSION, flags, self.log, self.stream, self.conversation, self.seq, self.number, self.index)
        return base64.urlsafe_b64encode(body + _CHECK.pack(binascii.crc32(body))).decode()

    @staticmethod
    def decode(text: str) -> Cursor:
        """Raises CursorError; TypeError for what is no text."""
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # of untyped callers
            raise TypeError(f"a cursor is the text an event or a frame has, not {type(text).__name__}")
        if len(text) > _LONGEST:
            raise CursorError("damaged")
        try:
            raw = base64.b64decode(text, altchars=b"-_", validate=True)
        except ValueError:
            raise CursorError("damaged") from None
        if not raw or binascii.crc32(raw[: -_CHECK.size]) != int.from_bytes(raw[-_CHECK.size :], "big"):
            raise CursorError("damaged")
        if raw[0] != VERSION:
            raise CursorError("version")
        if len(text) != _LENGTH:
            raise CursorError("damaged")
        _, flags, log, stream, conversation, seq, number, index = _LAYOUT.unpack(raw[: -_CHECK.size])
        return Cursor(
            kind="view" if flags & 4 else "events",
            log=log,
            stream=stream,
            conversation=conversation,
            seq=seq,
            number=number,
            index=index,
            whole=bool(flags & 1),
            quiet=bool(flags & 2),
            running=bool(flags & 8),
        )


class Stream(msgspec.Struct, frozen=True):
    """What cursors have in common that are made in one place."""

    kind: Kind
    log: bytes
    mark: bytes
    conversation: int

    def cursor(
        self,
        seq: int,
        number: int,
        *,
        index: int = ALL,
        whole: bool = True,
        quiet: bool = False,
        running: bool = True,
    ) -> str:
        return Cursor(
            kind=self.kind,
            log=self.log,
            stream=self.mark,
            conversation=self.conversation,
            seq=seq,
            number=number,
            index=index,
            whole=whole,
            quiet=quiet,
            running=running,
        ).encode()

    def has(self, cursor: Cursor) -> bool:
        """Whether its number is one of this stream's."""
        return cursor.kind == self.kind and cursor.stream == self.mark


def read_cursor(text: str, kind: Kind, *, log: bytes, conversation: int, seq: int | None) -> Cursor:
    """A cursor of this conversation; ``seq``: the store's newest commit, if that is known. Raises CursorError."""
    cursor = Cursor.decode(text)
    if cursor.kind != kind:
        raise CursorError("kind")
    if cursor.log != log:
        raise CursorError("store")
    if cursor.conversation != conversation:
        raise CursorError("conversation")
    if seq is not None and cursor.seq > seq:
        raise CursorError("ahead")
    return cursor


def log_mark(log_id: str) -> bytes:
    """What cursors keep of a store's log id."""
    return hashlib.sha256(log_id.encode()).digest()[:7]
