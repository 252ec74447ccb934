"""How the bytes of a content are kept in a database: compressed where that helps.

The plain bytes are at most a megabyte, so packing one takes some milliseconds; the threads that write and read do it.
"""

from __future__ import annotations

import sys
from functools import cache
from hashlib import sha256
from typing import Protocol, cast

from perdure.kernel.errors import StorageCorrupt, StorageError
from perdure.kernel.storage import MAX_CONTENT_BYTES

_PLAIN, _ZSTD = 0, 1
_LEVEL = 1
_SMALLEST = 64
"""Fewer bytes are kept plain: packing does not make them smaller."""


class Zstd(Protocol):
    """What is used of the module."""

    def compress(self, data: bytes, level: int) -> bytes: ...
    def decompress(self, data: bytes) -> bytes: ...


@cache
def zstd() -> Zstd:
    """Part of the standard library from Python 3.14 on. Loaded by the first content that is packed."""
    if sys.version_info >= (3, 14):
        from compression import zstd  # pyright: ignore
    else:
        from backports import zstd
    return cast("Zstd", zstd)


def pack(data: bytes) -> tuple[int, bytes]:
    """How the bytes are kept, and what is kept."""
    if len(data) >= _SMALLEST:
        packed = zstd().compress(data, _LEVEL)
        if len(packed) < len(data) - len(data) // 32:
            return _ZSTD, packed
    return _PLAIN, data


def unpack(digest: bytes, size: int, packing: int, data: bytes) -> bytes:
    """The bytes as they were given. Raises StorageCorrupt if they cannot be had, or are others."""
    assert size <= MAX_CONTENT_BYTES, "as it was put"
    plain: bytes | None = data
    if packing == _ZSTD:
        try:
            plain = zstd().decompress(data)
        except Exception:  # zstd's own, of a damaged frame
            plain = None
    elif packing != _PLAIN:
        raise StorageError(f"content {digest.hex()} is packed in a way this code does not know; use a newer perdure")
    if plain is None or len(plain) != size or sha256(plain).digest() != digest:
        raise StorageCorrupt(f"content {digest.hex()} is not what its digest says; restore the store from a backup")
    return plain
