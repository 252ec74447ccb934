"""What a command says when it cannot do what it was asked."""

from __future__ import annotations

from perdure.kernel.errors import PerdureError


class CommandError(PerdureError):
    """What is wrong, and what to do about it: for the person who typed the command."""
