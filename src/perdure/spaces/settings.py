"""What a host decides about a durable Space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

RerunPolicy: TypeAlias = Literal["rerun", "interrupt"]
"""What becomes of a call whose effects were undone: it runs again, or it ends interrupted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceSettings:
    rerun: RerunPolicy = "rerun"
    max_file_bytes: int = 1 << 30
    """A call that leaves a larger file is undone."""
    preserve_bytes: int = 256 << 20
    """So much of what a restore replaces, and the log does not have, is moved to a recovery folder."""

    def __post_init__(self) -> None:
        if self.rerun not in ("rerun", "interrupt"):
            raise ValueError(f"rerun is 'rerun' or 'interrupt', not {self.rerun!r}")
        if self.max_file_bytes < 1 or self.preserve_bytes < 0:
            raise ValueError("max_file_bytes is at least 1, preserve_bytes at least 0")
