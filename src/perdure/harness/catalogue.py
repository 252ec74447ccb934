"""Whom a conversation asks, as its settings, the host and the catalogue of models say (rules H19 and H171)."""

from __future__ import annotations

import msgspec

from perdure.harness.documents import Agent
from perdure.harness.host import Host
from perdure.harness.model import ModelInfo
from perdure.kernel.reports import Report
from perdure.kernel.transaction import Transaction


class NoModel(msgspec.Struct, frozen=True):
    """There is nobody to ask (rule H19)."""

    detail: str


class Chosen(msgspec.Struct, frozen=True):
    """Whom a conversation asks."""

    id: str
    """As the conversation or the host names it."""
    info: ModelInfo


async def choose_model(host: Host, tx: Transaction, conversation_id: int) -> str | NoModel:
    """Whom the conversation's next request would ask."""
    found = find_model(host, await tx.read(Agent, conversation=conversation_id) or Agent(), conversation_id)
    return found if isinstance(found, NoModel) else found.id


def find_model(host: Host, agent: Agent, conversation_id: int) -> Chosen | NoModel:
    """The model of a conversation with these settings."""
    if host.models is None:
        return NoModel("the harness was opened without models")
    try:
        model = agent.model or host.models.default
    except Exception as error:  # an adapter's own code
        _report(host, "the models' default raised", conversation_id, error)
        model = None
    if model is None:
        return NoModel("the conversation's agent names no model, and the harness has no default")
    info = find_info(host, model, conversation_id)
    if info is None:
        return NoModel(f"the model {model!r} is not one that the harness can reach")
    return Chosen(model, info)


def find_info(host: Host, model: str, conversation_id: int) -> ModelInfo | None:
    """What the catalogue says of a model; None: the harness has none of that name. One that raises has no models."""
    try:
        return None if host.models is None else host.models.find(model)
    except Exception as error:  # an adapter's own code
        _report(host, "the models' catalogue raised", conversation_id, error)
        return None


def _report(host: Host, message: str, conversation_id: int, error: Exception) -> None:
    host.session.report(Report(type="model_adapter_failed", message=message, conversation=conversation_id, error=error))
