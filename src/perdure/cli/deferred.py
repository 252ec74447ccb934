"""What a response that is made in the background looks like to people, in one line."""

from __future__ import annotations

from typing import Final

from perdure.cli.text import counted, one_line, shortened, when
from perdure.harness.documents import LiveDeferred

WIDEST: Final = 80
"""Characters of a handle."""


def deferred_line(deferred: LiveDeferred) -> str:
    """Who makes it, under which name, how often it was asked for, and when that is done next."""
    who, name = one_line(deferred["model"]), shortened(one_line(deferred["handle"]), WIDEST)
    polled = f"asked for {counted(deferred['polls'], 'time')}" if deferred["polls"] else "not yet asked for"
    failed = f" ({one_line(deferred['code'])})" if deferred["code"] is not None else ""
    return f"{who} makes the answer in the background: {name}, {polled}{failed}, next at {when(deferred['until'])}"
