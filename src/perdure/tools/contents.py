"""What the bytes of a file are, told by the bytes and never by a name: images and their size, and binary data."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

_START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG markers of segments that tell the size."""
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})
"""JPEG markers that no segment follows."""
_NO_PIXELS = "has no pixels"
_KINDS = (
    (b"\x7fELF", "an ELF program or library"),
    (b"MZ", "a Windows program"),
    (b"\xca\xfe\xba\xbe", "compiled Java or a Mach-O program"),
    (b"\xcf\xfa\xed\xfe", "a Mach-O program"),
    (b"%PDF-", "a PDF document"),
    (b"PK\x03\x04", "a ZIP archive, or a document in one"),
    (b"\x1f\x8b", "gzip data"),
    (b"BZh", "bzip2 data"),
    (b"\xfd7zXZ\x00", "xz data"),
    (b"\x28\xb5\x2f\xfd", "zstd data"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"SQLite format 3\x00", "an SQLite database"),
    (b"\xff\xfe", "UTF-16 text"),
    (b"\xfe\xff", "UTF-16 text"),
    (b"\x00asm", "a WebAssembly module"),
    (b"\x00\x00\x01\x00", "an icon"),
    (b"BM", "a BMP image"),
    (b"II*\x00", "a TIFF image"),
    (b"MM\x00*", "a TIFF image"),
    (b"OggS", "Ogg media"),
    (b"ID3", "MP3 audio"),
    (b"fLaC", "FLAC audio"),
    (b"RIFF", "RIFF media"),
)


class DamagedImage(ValueError):
    """It begins like an image, and is none that a model could look at. Says why, to go on after "an image that"."""


@dataclass(frozen=True, slots=True)
class Picture:
    media_type: str
    width: int
    """Pixels."""
    height: int


def media_type(head: bytes) -> str | None:
    """Of an image that models can look at (PNG, JPEG, GIF, WebP); None for anything else. 16 bytes are enough."""
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if head.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if head[:6] in (b"GIF87a", b"GIF89a"):
        return "image/gif"
    return "image/webp" if head[:4] == b"RIFF" and head[8:12] == b"WEBP" else None


def picture(data: bytes) -> Picture | None:
    """The image that these are the bytes of; None if they begin as none. Its parts are looked at, not its pixels.

    Raises DamagedImage.
    """
    kind = media_type(data)
    if kind is None:
        return None
    measure = {"image/png": _png, "image/jpeg": _jpeg, "image/gif": _gif, "image/webp": _webp}[kind]
    try:
        width, height = measure(data)
    except (struct.error, IndexError) as error:
        raise DamagedImage("ends too early") from error
    if not width or not height:
        raise DamagedImage("does not tell its size")
    return Picture(kind, width, height)


def describe(head: bytes) -> str:
    """What binary data are, in words for a sentence like "is ... (n bytes)"."""
    if head[4:8] == b"ftyp":
        return "MP4 media or a HEIF image"
    if head[257:262] == b"ustar":
        return "a tar archive"
    return next((words for magic, words in _KINDS if head.startswith(magic)), "binary data")


def _png(data: bytes) -> tuple[int, int]:
    at, name, has_pixels = 8, b"", False
    while name != b"IEND":
        length, name = struct.unpack_from(">I4s", data, at)
        end = at + 8 + length
        if struct.unpack_from(">I", data, end)[0] != zlib.crc32(data[at + 4 : end]):
            raise DamagedImage("has a wrong check sum")
        if at == 8 and (name, length) != (b"IHDR", 13):
            raise DamagedImage("has no header")
        has_pixels = has_pixels or name == b"IDAT"
        at = end + 4
    if not has_pixels:
        raise DamagedImage(_NO_PIXELS)
    width, height = struct.unpack_from(">II", data, 16)
    return width, height


def _gif(data: bytes) -> tuple[int, int]:
    """Models look at the first of its pictures."""
    width, height = struct.unpack_from("<HH", data, 6)
    at = 13 + _colours(data[10])
    while data[at] == 0x21:
        at = _behind_blocks(data, at + 2)
    if data[at] != 0x2C:
        raise DamagedImage(_NO_PIXELS)
    _behind_blocks(data, at + 11 + _colours(data[at + 9]))
    return width, height


def _colours(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _behind_blocks(data: bytes, at: int) -> int:
    while size := data[at]:
        at += size + 1
    return at + 1


def _jpeg(data: bytes) -> tuple[int, int]:
    at = 2
    width = height = 0
    while (marker := data[at + 1]) != _START_OF_SCAN:
        if data[at] != 0xFF or marker == _END_OF_IMAGE:
            raise DamagedImage(_NO_PIXELS)
        if marker == 0xFF:  # Fill bytes may stand before a marker.
            at += 1
            continue
        if marker in _START_OF_FRAME:
            height, width = struct.unpack_from(">HH", data, at + 5)
        at += 2 if marker in _ALONE else 2 + max(2, struct.unpack_from(">H", data, at + 2)[0])
    if data.rfind(bytes((0xFF, _END_OF_IMAGE)), at) < 0:
        raise DamagedImage("ends too early")
    return width, height


def _webp(data: bytes) -> tuple[int, int]:
    at, names = 12, set[bytes]()
    end = 8 + struct.unpack_from("<I", data, 4)[0]
    while at < end:
        name, length = struct.unpack_from("<4sI", data, at)
        at += 8 + length + length % 2
        names.add(name)
    if at > len(data):
        raise DamagedImage("ends too early")
    if not names & {b"VP8 ", b"VP8L", b"ANMF"}:
        raise DamagedImage(_NO_PIXELS)
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L" and data[20] == 0x2F:
        bits = struct.unpack_from("<I", data, 21)[0]
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise DamagedImage("has no header")
