"""Calls whose intent rides in the commit that stores the model's answer (rule H185)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perdure.harness.documents import Agent, ToolInput
from perdure.harness.environment import ExecutionEnvironment
from perdure.harness.permission import Permissions
from perdure.harness.registry import Registry
from perdure.harness.scopes import CallIntent, EnvironmentFor
from perdure.harness.tool import AnyTool
from perdure.kernel.records import to_raw


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A call whose intent needs nothing that has to be waited for."""

    tool: AnyTool
    agent: Agent
    values: Mapping[str, object]
    intent: CallIntent
    environment: ExecutionEnvironment | None


def foresee(
    registry: Registry,
    permissions: Permissions,
    environment_for: EnvironmentFor,
    conversation_id: int,
    agent: Agent,
    input: ToolInput,
) -> Foreseen | None:
    """The call, if no intent function, scope or person has to be asked before its intent, and nothing is wrong with it.
    That no hook has to be asked is known."""
    try:
        return _foresee(registry, permissions, environment_for, conversation_id, agent, input)
    except Exception:  # of the call, its tool or the host: it is the call's, not that of the run
        return None


def _foresee(
    registry: Registry,
    permissions: Permissions,
    environment_for: EnvironmentFor,
    conversation_id: int,
    agent: Agent,
    input: ToolInput,
) -> Foreseen | None:
    tool = registry.called(agent, input)
    if tool is None or tool.prepares_intent or permissions.may_ask(tool):
        return None
    environment = environment_for(conversation_id) if tool.uses_environment else None
    if environment is not None and environment.scope is not None:
        return None
    if environment is None and tool.needs_environment:
        return None
    read = tool.signature.read(input.arguments)
    values = tool.signature.values(read)
    intent = CallIntent(arguments=to_raw(read, at="arguments"), replay=tool.replay)
    return Foreseen(tool, agent, values, intent, environment)
