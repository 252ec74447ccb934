"""Answers of models as entries: whole ones, and those that failed or were aborted (rules H60 and H69)."""

from __future__ import annotations

import msgspec

from perdure.harness.asking import storable
from perdure.harness.documents import ASSISTANT, AssistantData
from perdure.harness.messages import AssistantMessage, AssistantPart, StopReason, Usage, encode_messages
from perdure.harness.model import ModelError
from perdure.kernel.records import EntryRecord
from perdure.kernel.transaction import Transaction


class Failure(msgspec.Struct, frozen=True):
    """A request that gave no message to use, and what of it had come."""

    error: ModelError
    parts: tuple[AssistantPart, ...] = ()
    may_repeat: bool = True
    """It may be sent again, if its error passes."""


def append_answer(
    tx: Transaction, message: AssistantMessage, data: AssistantData, conversation_id: int | None = None
) -> EntryRecord:
    """To the transaction's conversation by default."""
    return tx.append_record(
        ASSISTANT,
        messages=encode_messages([message]),
        data=msgspec.Raw(msgspec.json.encode(data)),
        conversation=conversation_id,
    )


def append_broken(
    tx: Transaction,
    conversation_id: int,
    model: str,
    attempt: int,
    parts: tuple[AssistantPart, ...],
    stop: StopReason,
    why: str,
    usage: Usage | None = None,
) -> None:
    """An answer that failed or was aborted: kept for people, left out of every context (rule H60)."""
    provider, _, name = model.partition(":")
    message = AssistantMessage(
        content=parts, provider=provider, model=name, stop_reason=stop, usage=usage or Usage(), error=why
    )
    append_answer(tx, storable(message), AssistantData(attempt=attempt), conversation_id)
