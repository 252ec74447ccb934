"""What the bytes of a file are, told by the bytes and never by a name: images with their size, and binary data.

Pure. Only the beginning of a file is needed, but for the size of a JPEG, which stands behind its other segments.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG markers of segments that tell the size."""
_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})
"""JPEG markers that no segment follows."""
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


@dataclass(frozen=True, slots=True)
class Picture:
    media_type: str
    width: int
    """Pixels; 0 if its data do not tell."""
    height: int

    @property
    def size(self) -> str:
        return f"{self.width} x {self.height} pixels" if self.width and self.height else "size not told"


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
    """The image that these are the bytes of."""
    kind = media_type(data)
    if kind is None:
        return None
    measure = {"image/png": _png, "image/jpeg": _jpeg, "image/gif": _gif, "image/webp": _webp}[kind]
    try:
        width, height = measure(data)
    except (struct.error, IndexError):  # It ends before it tells.
        width = height = 0
    return Picture(kind, width, height)


def describe(head: bytes) -> str:
    """What binary data are, in words for a sentence like "is ... (n bytes)"."""
    if head[4:8] == b"ftyp":
        return "MP4 media or a HEIF image"
    if head[257:262] == b"ustar":
        return "a tar archive"
    return next((words for magic, words in _KINDS if head.startswith(magic)), "binary data")


def _png(data: bytes) -> tuple[int, int]:
    width, height = struct.unpack_from(">II", data, 16)
    return (width, height) if data[12:16] == b"IHDR" else (0, 0)


def _gif(data: bytes) -> tuple[int, int]:
    width, height = struct.unpack_from("<HH", data, 6)
    return width, height


def _jpeg(data: bytes) -> tuple[int, int]:
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # Fill bytes may stand before a marker.
            at += 1
        elif marker in _ALONE:
            at += 2
        elif marker in _START_OF_FRAME:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        else:
            at += 2 + max(2, struct.unpack_from(">H", data, at + 2)[0])
    return 0, 0


def _webp(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L":
        bits = struct.unpack_from("<I", data, 21)[0]
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    return 0, 0
