"""An MCP server, made with the SDK, for the tests: ``python wares.py FOLDER [http PORT]``.

What its tools do is a line in FOLDER/log, so that a test counts effects. FOLDER/pid is its process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import anyio
from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, EmbeddedResource, ResourceLink, TextContent, TextResourceContents, ToolAnnotations

FOLDER = Path(sys.argv[1])
PIXEL = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x06\x00\x00\x00\x1f\x15\xc4\x89"
    b"\x00\x00\x00\nIDATx\x9cc\x00\x01\x00\x00\x05\x00\x01\r\n-\xb4\x00\x00\x00\x00IEND\xaeB`\x82"
)

server = MCPServer("wares", version="1", log_level="CRITICAL")


def done(what: str) -> int:
    """Note an effect; how often it has happened by now."""
    with (FOLDER / "log").open("a") as log:
        log.write(f"{what}\n")
    return (FOLDER / "log").read_text().splitlines().count(what)


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def order(item: str) -> str:
    """Order something; the first time the server dies of it."""
    if done(f"order {item}") == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return f"{item} is ordered"


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def look(item: str) -> str:
    """Look for something; the first two times the server dies of it."""
    if (times := done(f"look {item}")) < 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return f"{item} was found at look {times}"


@server.tool()
def doomed() -> str:
    """The server dies of it each time."""
    done("doomed")
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


@server.tool()
async def wait(name: str, ctx: Context) -> str:
    """Wait until FOLDER/go is there, and tell of it."""
    if (times := done(f"wait {name}")) == 1:
        await ctx.report_progress(1, 2, "half of it")
    try:
        while not (FOLDER / "go").exists():
            await anyio.sleep(0.01)
    except anyio.get_cancelled_exc_class():
        done(f"cancelled {name}")
        raise
    return f"waited {times} times"


@server.tool()
def fail() -> str:
    """Fail with words that hold a secret."""
    raise ToolError(f"no access with {os.environ.get('WARES_TOKEN', 'nothing')}")


@server.tool()
def show() -> CallToolResult:
    """Show one of each content."""
    return CallToolResult(
        content=[
            TextContent(text="a text"),
            Image(data=PIXEL, format="png").to_image_content(),
            EmbeddedResource(resource=TextResourceContents(uri="wares://note", text="an embedded text")),
            ResourceLink(name="note", uri="wares://note"),
        ],
    )


@server.tool()
def much(megabytes: int) -> str:
    """Answer at length."""
    return "0123456789abcde\n" * (megabytes * 65536)


@server.tool()
async def change(ctx: Context) -> str:
    """Have other tools from now on."""
    server.remove_tool("fail")
    server.add_tool(fresh)
    await ctx.notify_tools_changed()
    await ctx.session.send_tool_list_changed()
    return "changed"


def fresh() -> str:
    """A tool that was not there before."""
    return "fresh"


@server.resource("wares://note")
def note() -> str:
    """A note."""
    return "the note's text"


@server.prompt()
def greet(name: str) -> str:
    """Greet somebody."""
    return f"Say hello to {name}."


async def serve_http(port: int) -> None:
    import uvicorn

    listening = socket.create_server(("127.0.0.1", port))
    (FOLDER / "port").write_text(str(listening.getsockname()[1]))
    config = uvicorn.Config(server.streamable_http_app(), log_level="critical", lifespan="on")
    await uvicorn.Server(config).serve(sockets=[listening])


if __name__ == "__main__":
    (FOLDER / "pid").write_text(str(os.getpid()))
    if "http" in sys.argv:
        asyncio.run(serve_http(int(sys.argv[3])))
    else:
        server.run("stdio")
