"""Before a request: resolve the agent, show what the prompt says now, pin what is sent (rules H64 to H67)."""

from __future__ import annotations

import msgspec

from perdure.harness.catalogue import NoModel, find_info, find_model
from perdure.harness.compaction_need import Need, Waited, needed, room_of
from perdure.harness.documents import SYSTEM, Agent, ProviderKey
from perdure.harness.host import Host
from perdure.harness.limits import LimitReached
from perdure.harness.messages import SystemMessage, encode_messages
from perdure.harness.model import Defers, ModelRequest, ThinkingLevel, ToolSpec
from perdure.harness.prompt import Shown, difference, render
from perdure.harness.registry import ConversationInfo
from perdure.harness.tokens import tokens_of_bytes, tokens_of_spec
from perdure.harness.tool import AnyTool
from perdure.kernel.errors import PerdureError
from perdure.kernel.json import check_json, digest
from perdure.kernel.records import from_raw
from perdure.kernel.reports import Report
from perdure.kernel.transaction import Transaction


class OfferedTool(msgspec.Struct, frozen=True, array_like=True):
    """A tool as it was offered: ``digest`` is of the spec that the model saw."""

    name: str
    digest: str


class Pinned(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request, as it will be sent, also after a crash: a checkpoint."""

    model: str
    through: int
    """The last entry of its context."""
    thinking: ThinkingLevel = "off"
    tools: tuple[OfferedTool, ...] = ()
    session_key: str = ""
    turn: int = 0
    """Responses the run had before."""
    attempt: int = 1
    waited: Waited = "not"

    def encode(self) -> msgspec.Raw:
        return msgspec.Raw(msgspec.json.encode(self))


class NotKnown(msgspec.Struct, frozen=True):
    """How long the context is, is known once a head that is on its way has settled."""


async def prepare(
    host: Host,
    tx: Transaction,
    conversation_id: int,
    *,
    task: int,
    turn: int,
    attempt: int,
    waited: Waited = "not",
    compact: bool = True,
) -> Pinned | Need | NotKnown | NoModel | LimitReached | None:
    """Pin the next request of a generation task in a transaction, after showing what the prompt says now.

    With ``compact`` it first says what compaction the request needs, or that it cannot tell. None: the conversation's
    history is not in memory, or not what limits are held against; ``host.contexts.load`` and ``host.limits.load``
    outside of the transaction.
    """
    if not host.limits.ready:
        return None
    known = host.contexts.shown(tx, conversation_id)
    if known is None:
        return None
    shown, newest = known
    agent = await tx.read(Agent, conversation=conversation_id) or Agent()
    model = find_model(host, agent, conversation_id)
    if isinstance(model, NoModel):
        return model
    limit = await host.limits.reached(tx, conversation_id, agent.limits)
    if limit is not None:
        return limit
    tools, offered = _usable(host, agent, conversation_id)
    data = difference(shown, _sections(host, conversation_id, agent, tools, shown))
    text = "" if data is None else render(data)
    room = room_of(host, agent, model.id, model.info) if compact else None
    if room is not None and room.enabled:
        count = host.contexts.count(tx, conversation_id)
        if count is None:
            return NotKnown()
        takes = count.tokens + tokens_of_bytes(len(text.encode()))
        if count.exact is None:
            takes += sum(tokens_of_spec(tool.spec) for tool in tools)
        need = await needed(host, tx, conversation_id, room, tokens=takes, waited=waited)
        if need is not None:
            return need
    if data is not None:
        entry = tx.append_record(
            SYSTEM,
            messages=encode_messages([SystemMessage(text)]),
            data=msgspec.Raw(msgspec.json.encode(data)),
            conversation=conversation_id,
            by_task=task,
        )
        newest = entry.id
    return Pinned(
        model=model.id,
        through=newest,
        thinking=agent.thinking,
        tools=offered,
        session_key=await _session_key(tx, conversation_id),
        turn=turn,
        attempt=attempt,
        waited=waited,
    )


async def prepare_along(
    host: Host, tx: Transaction, conversation_id: int, *, task: int, turn: int, attempt: int
) -> Pinned | None:
    """``prepare`` in a commit that holds something else: an answer, a result, an input. None for whatever keeps the
    request from being pinned there: the run meets it again in a commit of its own, and that is refused at most."""
    try:
        pinned = await prepare(host, tx, conversation_id, task=task, turn=turn, attempt=attempt)
    except Exception:  # told when it is met again
        return None
    return pinned if isinstance(pinned, Pinned) else None


async def build_request(host: Host, conversation_id: int, pinned: Pinned) -> ModelRequest | None:
    """The pinned request, whole. None: its model or a tool it offers is not what it was; prepare again."""
    if find_info(host, pinned.model, conversation_id) is None:
        return None
    specs: list[ToolSpec] = []
    if pinned.tools:
        agent = await host.session.snapshot(Agent, conversation=conversation_id) or Agent()
        for offered in pinned.tools:
            tool = host.registry.find_tool(agent, offered.name)
            if tool is None or spec_digest(tool.spec) != offered.digest:
                return None
            specs.append(tool.spec)
    return ModelRequest(
        model=pinned.model,
        messages=await host.contexts.messages(conversation_id, pinned.through),
        tools=tuple(specs),  # hooks and adapters look at it, and change nothing
        thinking=pinned.thinking,
        session_key=pinned.session_key,
        attempt=pinned.attempt,
        may_defer=isinstance(host.models, Defers),
    )


def _usable(host: Host, agent: Agent, conversation_id: int) -> tuple[list[AnyTool], tuple[OfferedTool, ...]]:
    """The conversation's tools, and what the model is offered of them. One whose schema cannot be made is left out."""
    tools: list[AnyTool] = []
    offered: list[OfferedTool] = []
    for tool in host.registry.offered(agent):
        try:
            offered.append(OfferedTool(tool.name, spec_digest(tool.spec)))
        except PerdureError as error:
            _report(host, "tool_unusable", f"the tool {tool.name!r} cannot be offered", conversation_id, error)
        else:
            tools.append(tool)
    return tools, tuple(offered)


def _report(host: Host, type: str, message: str, conversation_id: int, error: BaseException) -> None:
    host.session.report(Report(type=type, message=message, conversation=conversation_id, error=error))


def _sections(host: Host, conversation_id: int, agent: Agent, tools: list[AnyTool], shown: Shown) -> dict[str, str]:
    """What the prompt says now, by section; of those with one name, all. One that raises says what it said before."""
    texts = [("host", host.settings.instructions)]
    failed: set[str] = set()
    info = ConversationInfo(id=conversation_id, agent=agent, tools=tools)
    for section in host.registry.sections(agent):
        try:
            text = section.render(info)
            check_json(text)
            if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # of untyped callers
                raise TypeError(f"a section renders as a text, not as {type(text).__name__}")
            texts.append((section.name, text))
        except (Exception, SystemExit) as error:  # an extension's own code
            failed.add(section.name)
            said = f"the prompt section {section.name!r} raised; what was shown of it stays"
            _report(host, "section_failed", said, conversation_id, error)
    texts += [("instructions", agent.instructions), ("working directory", agent.cwd or "")]
    sections: dict[str, str] = {}
    for name, text in texts:
        sections[name] = "\n\n".join(part for part in (sections.get(name, ""), text) if part)
    for name in failed:
        sections[name] = shown.sections.get(name, "")
    return sections


async def _session_key(tx: Transaction, conversation_id: int) -> str:
    known = await tx.read(ProviderKey, conversation=conversation_id)
    if known is not None and known.id:
        return known.id
    return await give_key(tx, conversation_id)


async def give_key(tx: Transaction, conversation_id: int) -> str:
    """A new conversation's id with providers, never a parent's (rule H12)."""
    draft = await tx.draft(ProviderKey, conversation=conversation_id)
    draft.id = tx.session.entropy.token()
    return draft.id


_digests: dict[int, tuple[ToolSpec, str]] = {}
"""By identity: a tool's spec is made once and kept by it."""
_MOST_DIGESTS = 10_000


def spec_digest(spec: ToolSpec) -> str:
    """What tells two specs of one tool apart."""
    known = _digests.get(id(spec))
    if known is not None and known[0] is spec:
        return known[1]
    if len(_digests) >= _MOST_DIGESTS:
        _digests.clear()
    made = digest([spec.name, spec.description, from_raw(spec.parameters)])[:16]
    _digests[id(spec)] = (spec, made)
    return made
