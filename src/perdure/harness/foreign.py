"""What code of others says and raises (tools, hooks, prompt sections, model adapters): it fails only its unit (rule
K133)."""

from __future__ import annotations

import asyncio


def cancelled_itself() -> bool:
    """Of a CancelledError that has just come out of such code: nobody cancelled what runs it."""
    task = asyncio.current_task()
    return task is not None and not task.cancelling()


def words_of(error: BaseException) -> str:
    """Its type and what it says; an exception may raise when it is asked."""
    try:
        said = str(error)
    except Exception:
        said = ""
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def storable_text(text: str) -> str:
    """The text with question marks for what UTF-8 has no bytes for."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
