"""Frames: two lengths, a JSON object, bytes. The bounds are the protocol's, in both directions."""

from __future__ import annotations

import asyncio
import struct

HEADER_BYTES = 1024 * 1024
BODY_BYTES = 16 * 1024 * 1024
_LENGTHS = struct.Struct("!II")


class MalformedFrame(Exception):
    """What came is no frame of this protocol."""


def send(writer: asyncio.StreamWriter, header: bytes, body: bytes) -> None:
    """Hand one frame to the transport; the caller drains."""
    assert len(header) <= HEADER_BYTES, "checked before anything is sent"
    assert len(body) <= BODY_BYTES, "checked before anything is sent"
    writer.write(_LENGTHS.pack(len(header), len(body)) + header)
    if body:
        writer.write(body)


async def receive(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """The next frame: header and body. Raises MalformedFrame, EOFError (asyncio.IncompleteReadError), OSError."""
    header, body = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
    if header > HEADER_BYTES or body > BODY_BYTES:
        raise MalformedFrame(f"an answer with a header of {header} and a body of {body} bytes")
    return await reader.readexactly(header), await reader.readexactly(body) if body else b""
