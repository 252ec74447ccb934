"""Durable agents: kill the process at any instruction, open it again, and it is where its log says."""

from __future__ import annotations

from typing import Final

__version__: Final = "0.1.0"
