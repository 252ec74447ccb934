"""Whether a storage backend keeps the rules of docs/rules/kernel.md; for ours, and for anybody's (rule K188).

Give it a ``Subject``, which says how one store of the backend is opened, killed and superseded, and run every check
on a subject of its own::

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    async def test_my_backend(check: Check, tmp_path: Path) -> None:
        await check(MySubject(tmp_path))

A check that fails raises AssertionError. Each names the rules it holds the backend to.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from perdure.testing.conformance import committing, contents, deleting, documents, histories, mailbox, opening, scans
from perdure.testing.conformance.subject import Line, Subject

__all__ = ["CHECKS", "Check", "Line", "Subject"]

Check: TypeAlias = Callable[[Subject], Awaitable[None]]
"""An async function of a fresh subject; its name says what it holds true."""

CHECKS: tuple[Check, ...] = (
    *opening.CHECKS,
    *committing.CHECKS,
    *histories.CHECKS,
    *scans.CHECKS,
    *documents.CHECKS,
    *deleting.CHECKS,
    *contents.CHECKS,
    *mailbox.CHECKS,
)
"""Every check, in order."""
