"""Tools that mirror what a server lists (rules H380 to H385 and H394)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

import msgspec
from mcp.client.session import ClientSession
from mcp_types import (
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    InputRequiredResult,
    PaginatedRequestParams,
    Tool,
)
from pydantic import TypeAdapter

from perdure.harness.handle import ToolCall
from perdure.harness.repair import Schema
from perdure.harness.tool import AnyTool, ReplayPolicy, ToolDefinition, ToolResult
from perdure.kernel.json import JsonValue
from perdure.tools.mcp.calls import Host, ask, result_of, show_progress
from perdure.tools.mcp.checking import BadSchema, Checker, ForeignSignature
from perdure.tools.mcp.connection import MAX_TOOLS, Listing
from perdure.tools.mcp.content import call_result, prompt_result, resource_result, words_of
from perdure.tools.mcp.losses import Refusal, Unavailable
from perdure.tools.mcp.settings import Settings

MAX_NAME: Final = 64
MAX_DESCRIPTION: Final = 16_000
"""Characters of what the model is told of a tool."""
MAX_LISTED: Final = 1_000
"""Resources or prompts that one listing shows."""
MAX_LIST_PAGES: Final = 20

_ANSWER: TypeAdapter[CallToolResult | InputRequiredResult] = TypeAdapter(CallToolResult | InputRequiredResult)
_TEXT: Final = {"type": "string"}
_NO_ARGUMENTS: Final[Schema] = {"type": "object", "properties": {}, "additionalProperties": False}

Function = Callable[..., Awaitable[ToolResult]]


class Mirrored(msgspec.Struct, frozen=True):
    """What a listing comes to."""

    tools: tuple[AnyTool, ...]
    """By name, so that the order of a listing changes no prompt."""
    policies: dict[str, ReplayPolicy]
    """By the server's own names: what may be called, and the replay policy of each."""
    problems: tuple[str, ...]


def shown_name(prefix: str, name: str) -> str:
    """A tool's name here. It depends on its own name alone: a call that is found in the log means the same tool,
    whatever else the server has by then."""
    whole = prefix + name
    valid = re.sub(r"[^A-Za-z0-9_-]", "_", whole)
    if valid == whole and len(valid) <= MAX_NAME:
        return valid
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:6]
    return f"{valid[: MAX_NAME - 7]}_{digest}"


class Mirror:
    """Makes the tools of one server."""

    def __init__(self, settings: Settings, host: Host) -> None:
        self._settings = settings
        self._host = host
        self._policies: dict[str, ReplayPolicy] = {}
        """As the server is now."""

    def of(self, listing: Listing) -> Mirrored:
        """The tools; those that cannot be used are left out, and the problems say why."""
        settings = self._settings
        tools: dict[str, AnyTool] = {}
        policies: dict[str, ReplayPolicy] = {}
        problems: list[str] = []
        if listing.more_tools:
            problems.append(f"the server has more than {MAX_TOOLS} tools; the others are left out")
        for tool in listing.tools:
            if not settings.wants(tool.name):
                continue
            name = shown_name(settings.prefix, tool.name)
            try:
                if name in tools:
                    raise BadSchema("there is another tool of that name")
                policy = settings.policy(tool.name, hinted_safe=_hinted_safe(tool))
                tools[name] = self._mirrored(tool, name, policy)
                policies[tool.name] = policy
            except (BadSchema, ValueError) as error:
                problems.append(f"tool {tool.name[:MAX_NAME]!r} is left out: {error}")
        for own, made in self._own(listing):
            name = shown_name(settings.prefix, own)
            if name in tools:
                problems.append(f"{own!r} is left out: the server has a tool of that name")
            elif settings.wants(own):
                tools[name] = made(name, settings.replay.get(own, "safe"))
                policies[own] = tools[name].replay
        listed = {tool.name for tool in listing.tools} | policies.keys()
        problems += [
            f"the server has no tool {name!r}, which the host names" for name in sorted(settings.named - listed)
        ]
        self._policies = policies
        return Mirrored(tuple(tools[name] for name in sorted(tools)), policies, tuple(problems))

    def _mirrored(self, tool: Tool, name: str, policy: ReplayPolicy) -> AnyTool:
        checker = (
            None if tool.output_schema is None else Checker(cast("Schema", tool.output_schema), mask="what it gave")
        )
        own = tool.name

        async def send(session: ClientSession, arguments: dict[str, Any], call: ToolCall) -> ToolResult:
            answer = await session.send_request(
                CallToolRequest(params=CallToolRequestParams(name=own, arguments=arguments)),
                _ANSWER,
                progress_callback=show_progress(call, self._host),
            )
            if isinstance(answer, InputRequiredResult):
                raise Refusal("it asks for input of a person, which it is not given here")
            words = self._host.without_secrets(words_of(answer)) if answer.is_error else ""
            return call_result(answer, checker, words)

        title = tool.annotations.title if tool.annotations is not None else None
        return self._tool(name, own, tool.description or tool.title or title or "", tool.input_schema, policy, send)

    def _tool(
        self,
        name: str,
        own: str,
        description: str,
        schema: Schema,
        policy: ReplayPolicy,
        send: Callable[[ClientSession, dict[str, Any], ToolCall], Awaitable[ToolResult]],
    ) -> AnyTool:
        """Raises BadSchema."""

        def safe() -> bool:
            # As after a crash: by the policy of the call's intent and by the present one.
            return policy == "safe" and self._policies.get(own) == "safe"

        def check() -> None:
            if own not in self._policies:
                raise Unavailable(f"it has no tool {own!r} any more")

        async def function(arguments: dict[str, object], call: ToolCall) -> ToolResult:
            asked = ask(self._host, lambda session: send(session, arguments, call), safe=safe, check=check)
            return await result_of(asked, self._host, call)

        return ToolDefinition(
            function=function,
            name=name,
            description=description[:MAX_DESCRIPTION],
            replay=policy,
            output=self._settings.output,
            timeout_ms=self._settings.timeout_ms,
            signature=ForeignSignature(function, name=name, schema=schema),
        )

    # --- resources and prompts ---------------------------------------------------------------------------------

    def _own(self, listing: Listing) -> list[tuple[str, Callable[[str, ReplayPolicy], AnyTool]]]:
        """Tools for what a server has beside tools. By the protocol these only read."""
        made: list[tuple[str, Callable[[str, ReplayPolicy], AnyTool]]] = []
        if listing.resources:
            made += [("list_resources", self._list_resources), ("read_resource", self._read_resource)]
        if listing.prompts:
            made += [("list_prompts", self._list_prompts), ("get_prompt", self._get_prompt)]
        return made

    def _list_resources(self, name: str, policy: ReplayPolicy) -> AnyTool:
        async def send(session: ClientSession, arguments: dict[str, Any], call: ToolCall) -> ToolResult:
            listed = await _all(lambda params: session.list_resources(params=params), "resources")
            templates = await _all(lambda params: session.list_resource_templates(params=params), "resource_templates")
            return _lines([*listed, *templates])

        text = f"List the resources of {self._settings.name}, one a line, and templates of further addresses."
        return self._tool(name, "list_resources", text, _NO_ARGUMENTS, policy, send)

    def _read_resource(self, name: str, policy: ReplayPolicy) -> AnyTool:
        async def send(session: ClientSession, arguments: dict[str, Any], call: ToolCall) -> ToolResult:
            return resource_result(await session.read_resource(arguments["uri"]))

        schema: Schema = {
            "type": "object",
            "properties": {"uri": {**_TEXT, "description": "As it is listed, or made of a listed template."}},
            "required": ["uri"],
            "additionalProperties": False,
        }
        return self._tool(name, "read_resource", f"Read a resource of {self._settings.name}.", schema, policy, send)

    def _list_prompts(self, name: str, policy: ReplayPolicy) -> AnyTool:
        async def send(session: ClientSession, arguments: dict[str, Any], call: ToolCall) -> ToolResult:
            return _lines(await _all(lambda params: session.list_prompts(params=params), "prompts"))

        text = f"List the prompts of {self._settings.name}, one a line."
        return self._tool(name, "list_prompts", text, _NO_ARGUMENTS, policy, send)

    def _get_prompt(self, name: str, policy: ReplayPolicy) -> AnyTool:
        async def send(session: ClientSession, arguments: dict[str, Any], call: ToolCall) -> ToolResult:
            return prompt_result(await session.get_prompt(arguments["name"], arguments.get("arguments")))

        schema: Schema = {
            "type": "object",
            "properties": {"name": dict(_TEXT), "arguments": {"type": "object", "additionalProperties": dict(_TEXT)}},
            "required": ["name"],
            "additionalProperties": False,
        }
        text = f"Get the text of a prompt of {self._settings.name}, filled with arguments."
        return self._tool(name, "get_prompt", text, schema, policy, send)


def _hinted_safe(tool: Tool) -> bool:
    """Whether the server says that a call may be made again."""
    hints = tool.annotations
    return hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)


async def _all(ask_page: Callable[[PaginatedRequestParams], Awaitable[Any]], field: str) -> list[JsonValue]:
    """What a listing has, page by page, as plain JSON without what is for screens."""
    found: list[JsonValue] = []
    cursor: str | None = None
    for _ in range(MAX_LIST_PAGES):
        page = await ask_page(PaginatedRequestParams(cursor=cursor))
        items: list[Any] = getattr(page, field)
        found += [
            item.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"icons", "meta", "annotations"})
            for item in items
        ]
        cursor = page.next_cursor
        if cursor is None or len(found) >= MAX_LISTED:
            break
    return found[:MAX_LISTED]


def _lines(items: list[JsonValue]) -> ToolResult:
    return ToolResult("\n".join(msgspec.json.encode(item).decode() for item in items) or "There are none.")
