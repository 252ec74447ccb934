"""Deleting conversations with all they own, and what of them stays: what they used (rules H156, H181 to H184)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from perdure.harness.documents import DeletedUsage, UsageTotals
from perdure.harness.inbox import withdraw_one
from perdure.harness.usage import summed
from perdure.kernel.context import Context
from perdure.kernel.documents import read_state
from perdure.kernel.records import Address
from perdure.kernel.storage import MAX_SCAN
from perdure.kernel.transaction import Transaction

if TYPE_CHECKING:
    from perdure.harness.harness import Harness


async def delete_conversations(
    harness: Harness,
    ids: Sequence[int],
    *,
    abort: bool,
    also: Callable[[Transaction, list[int]], None] | None = None,
    context: Context | None = None,
) -> list[int]:
    """Delete them in one commit, and return all that went. ``also`` writes in that commit too.

    ``abort``: first end what goes on in them, all of them or none. Raises what ``Harness.delete_conversations`` says.
    """
    if abort:
        async with harness.session.commit(context=context) as tx:
            for id in ids:
                await tx.check_deletable(id)
        for id in ids:
            await _end(harness, id, context)
    async with harness.session.commit(context=context) as tx:
        gone: list[int] = []
        for id in ids:
            if id not in gone:
                gone += await tx.delete_conversation(id)
        if also is not None:
            also(tx, gone)
    return gone


async def _end(harness: Harness, id: int, context: Context | None) -> None:
    """Abort all that is live in what would go, and withdraw what is queued there, writes too."""

    async def withdraw_all(tx: Transaction) -> None:
        for conversation_id in await tx.check_deletable(id):
            while queued := await tx.submissions(conversation_id=conversation_id, status="queued", limit=MAX_SCAN):
                for record in queued:
                    await withdraw_one(tx, record)

    await harness.tasks.abort_conversation(id, background=True, before=withdraw_all, context=context)


def count_deleted(tx: Transaction) -> Awaitable[None] | None:
    """A derivation: whatever deletes conversations, the session's sum keeps what they used (rule H184)."""
    return _count(tx) if tx.deleted_conversations else None


async def _count(tx: Transaction) -> None:
    used: list[UsageTotals] = []
    for id in sorted(tx.deleted_conversations):
        address = Address(UsageTotals.definition.kind, "conversation", id)
        # As it was before this transaction, which has retired it.
        totals = read_state((await tx.session.load_document(address)).staged, UsageTotals)
        if totals is not None:
            used.append(totals)
    if used:
        kept = await tx.draft(DeletedUsage)
        total = summed([kept, *used])
        kept.models, kept.tools = dict(total.models), dict(total.tools)
        kept.turns, kept.run_ms = total.turns, total.run_ms
