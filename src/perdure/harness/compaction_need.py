"""Whether a request needs a compaction before it or beside it (rules H136, H137, H139, H141)."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from perdure.harness.catalogue import find_info
from perdure.harness.compaction_policy import Compaction, Room, host_room, room_for
from perdure.harness.documents import COMPACTION, Agent, CompactionReason, Inbox, Live
from perdure.harness.host import Host
from perdure.harness.model import ModelInfo
from perdure.kernel.transaction import Transaction

Waited: TypeAlias = Literal["not", "other", "own"]
"""What a request has waited for: nothing, a compaction that was under way, one of its own run."""


WAITED_FOR: frozenset[CompactionReason] = frozenset({"threshold", "overflow"})
"""Of compactions that a run begins by itself, those that it waits for."""
BEGUN: frozenset[CompactionReason] = frozenset({"background", "threshold", "overflow"})


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """A compaction is due. Either it is begun at ``cut``, or the run waits for one that is ``underway``."""

    reason: Literal["background", "threshold", "overflow"]
    tokens: int
    """Of the context, as estimated."""
    cut: int = 0
    """The first entry that stays."""
    through: int = 0
    """The newest entry of the context that is compacted."""
    underway: int | None = None


def policy_for(host: Host, model: str) -> Compaction:
    """The host's policy for conversations with that model."""
    return host.settings.compaction_by_model.get(model, host.settings.compaction)


def room_of(host: Host, agent: Agent, model: str, info: ModelInfo) -> Room:
    """``model``: as the conversation names it, which need not be the name in the catalogue."""
    policy, own = policy_for(host, model), agent.compaction
    return room_for(policy, own, info.context_window) if own else host_room(policy, info.context_window)


async def needed(
    host: Host, tx: Transaction, conversation_id: int, room: Room, *, tokens: int, waited: Waited
) -> Need | None:
    """What a request that takes so many tokens needs first, where compaction is enabled. Asked inside the transaction
    that would pin it."""
    if tokens <= room.begins_above or waited == "own":
        return None
    live = await tx.read(Live, conversation=conversation_id) or Live()
    blocking = tokens > room.waits_above
    failed = None if live.run is None else live.run.get("compaction_failed")
    if failed == "waited" or (failed is not None and not blocking):
        return None  # nothing is tried twice in a run
    underway = next((id for id in map(int, live.compactions) if tx.live_task(id) and not host.is_blocked(id)), None)
    if blocking and underway is not None and waited == "not":
        return Need(reason="threshold", tokens=tokens, underway=underway)
    if (underway is not None and not blocking) or await _is_queued(tx, conversation_id):
        return None
    least = room.least if blocking else room.least_beside
    return _cut(host, conversation_id, "threshold" if blocking else "background", tokens, room.keep, least)


async def needed_after_overflow(host: Host, tx: Transaction, conversation_id: int, model: str) -> Need | None:
    """What may help a request that its provider found too long; None: nothing, or not any more (rule H139)."""
    info = find_info(host, model, conversation_id)
    live = await tx.read(Live, conversation=conversation_id)
    if info is None or live is None or live.run is None or live.run.get("compacted"):
        return None
    count = host.contexts.count(tx, conversation_id)
    agent = await tx.read(Agent, conversation=conversation_id) or Agent()
    room = room_of(host, agent, model, info)
    if count is None or not room.enabled:
        return None
    keep = room.keep
    if count.tokens < room.window:
        # The estimate is too low, by this much at least; what is kept is counted by the same measure.
        keep = keep * count.tokens // room.window
    return _cut(host, conversation_id, "overflow", count.tokens, keep, max(1, keep // 10))


def _cut(
    host: Host,
    conversation_id: int,
    reason: Literal["background", "threshold", "overflow"],
    tokens: int,
    keep: int,
    least: int,
) -> Need | None:
    cut = host.contexts.cut(conversation_id, keep, least=least)
    context = host.contexts.settled(conversation_id)
    if cut is None or context is None:
        return None
    return Need(reason=reason, tokens=tokens, cut=cut, through=context.through)


async def _is_queued(tx: Transaction, conversation_id: int) -> bool:
    """Whether a summary that is ready waits to be placed."""
    inbox = await tx.read(Inbox, conversation=conversation_id)
    return inbox is not None and any(item["entry"]["kind"] == COMPACTION for item in inbox.items)
