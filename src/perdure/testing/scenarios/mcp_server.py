"""The server of the MCP scenarios, made with the SDK: it needs the extra ``mcp``, and so does whoever imports this.

It runs on the SDK's own transport for standard input and output. What it does is the shop's, which outlives it.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ToolsListChanged
from mcp_types import (
    CallToolRequestParams,
    CallToolResult,
    GetPromptRequestParams,
    GetPromptResult,
    ListPromptsResult,
    ListResourcesResult,
    ListResourceTemplatesResult,
    ListToolsResult,
    PaginatedRequestParams,
    Prompt,
    PromptArgument,
    PromptMessage,
    ReadResourceRequestParams,
    ReadResourceResult,
    Resource,
    TextContent,
    TextResourceContents,
    Tool,
)

from perdure.testing.scenarios.mcp_shop import HOURS, WORDS, Shop
from perdure.testing.wire import SimulatedProgram

TAKES_ITEM: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"item": {"type": "string"}},
    "required": ["item"],
}
TAKES_NOTHING: Final[dict[str, Any]] = {"type": "object"}
PACKING_S: Final = 0.5
"""That an order takes before it is done, and again after that."""

Context = ServerRequestContext[Any, Any]
Paging = PaginatedRequestParams | None


async def serve(shop: Shop, program: SimulatedProgram) -> None:
    """What the program is. Its pipes stand for the two files that the transport takes, of which it uses no more."""
    server = _Server(shop, program).served()
    pipes: tuple[Any, Any] = program.lines(), _Output(shop, program)
    async with stdio_server(*pipes) as (read, write):
        await server.run(read, write, server.create_initialization_options())


class _Output:
    def __init__(self, shop: Shop, program: SimulatedProgram) -> None:
        self._shop = shop
        self._program = program

    async def write(self, text: str) -> None:
        """One message."""
        self._shop.says(self._program, text)

    async def flush(self) -> None:
        await asyncio.sleep(0)


class _Server:
    def __init__(self, shop: Shop, program: SimulatedProgram) -> None:
        self._shop = shop
        self._program = program
        self._changes = InMemorySubscriptionBus()

    def served(self) -> Server[Any]:
        return Server(
            "shop",
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_list_resources=self._list_resources,
            on_list_resource_templates=self._list_templates,
            on_read_resource=self._read_resource,
            on_list_prompts=self._list_prompts,
            on_get_prompt=self._get_prompt,
            on_subscriptions_listen=ListenHandler(self._changes),
        )

    # --- tools ---------------------------------------------------------------------------------------------------

    async def _list_tools(self, _ctx: Context, _params: Paging) -> ListToolsResult:
        return ListToolsResult(
            tools=[
                Tool(name=name, input_schema=TAKES_NOTHING if name == "restock" else TAKES_ITEM)
                for name in self._shop.tools
            ]
        )

    async def _call_tool(self, ctx: Context, params: CallToolRequestParams) -> CallToolResult:
        name, item = params.name, str((params.arguments or {}).get("item", ""))
        if name not in self._shop.tools:
            return CallToolResult(content=[TextContent(text=f"no tool {name}")], is_error=True)
        if name == "restock":
            self._shop.state.add("stocked")
            await self._changes.publish(ToolsListChanged())
            return _text("there is more now")
        async with self._shop.called(self._program, f"{name} {item}"):
            if name == "order":
                await ctx.session.report_progress(1, 2, f"packing {item}")
                await asyncio.sleep(PACKING_S)
            await self._shop.do(self._program, f"{name} {item}")
            if name == "order":
                await asyncio.sleep(PACKING_S)
        return _text(WORDS[name].format(item))

    # --- resources and prompts -----------------------------------------------------------------------------------

    async def _list_resources(self, _ctx: Context, _params: Paging) -> ListResourcesResult:
        return ListResourcesResult(resources=[Resource(name="hours", uri=HOURS)])

    async def _list_templates(self, _ctx: Context, _params: Paging) -> ListResourceTemplatesResult:
        return ListResourceTemplatesResult(resource_templates=[])

    async def _read_resource(self, _ctx: Context, params: ReadResourceRequestParams) -> ReadResourceResult:
        async with self._shop.called(self._program, f"read {params.uri}"):
            return ReadResourceResult(contents=[TextResourceContents(uri=params.uri, text="always")])

    async def _list_prompts(self, _ctx: Context, _params: Paging) -> ListPromptsResult:
        return ListPromptsResult(prompts=[Prompt(name="greet", arguments=[PromptArgument(name="name")])])

    async def _get_prompt(self, _ctx: Context, params: GetPromptRequestParams) -> GetPromptResult:
        async with self._shop.called(self._program, f"get {params.name}"):
            words = f"Say hello to {(params.arguments or {})['name']}."
            return GetPromptResult(messages=[PromptMessage(role="user", content=TextContent(text=words))])


def _text(words: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(text=words)])
