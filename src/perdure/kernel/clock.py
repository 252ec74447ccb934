"""The Session's clock and entropy: the two things a simulation replaces to be deterministic."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Protocol


class Clock(Protocol):
    """Time as the session sees it. Wall time is integer milliseconds UTC; monotonic is seconds."""

    def wall(self) -> int: ...

    def monotonic(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clock."""

    def wall(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Entropy(Protocol):
    """Where nonces come from: keys given to the outside world rest on these, never on ids alone."""

    def token(self) -> str:
        """128 random bits as 32 hexadecimal digits."""
        ...

    def fraction(self) -> float:
        """A number in [0, 1), for jitter."""
        ...


class SystemEntropy:
    """The operating system's randomness."""

    def token(self) -> str:
        return os.urandom(16).hex()

    def fraction(self) -> float:
        return (int.from_bytes(os.urandom(7), "big") >> 3) / (1 << 53)
