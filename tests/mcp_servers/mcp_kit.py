"""What tests of MCP servers share: the server that the SDK made, a call through a whole harness, waiting."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from perdure import Extension, Harness, MemoryStorage, StdioServer
from perdure.harness.conversation import Conversation
from perdure.harness.documents import Live
from perdure.harness.messages import ToolResultMessage, decode_messages
from perdure.kernel.json import JsonValue
from perdure.testing.model import ScriptedModel, call, say

HERE = Path(__file__).parent
WARES = HERE / "wares.py"
PATIENCE_S = 60


def wares(folder: Path, **options) -> StdioServer:
    return StdioServer([sys.executable, str(WARES), str(folder)], **options)


def odd(text: str, **options) -> StdioServer:
    """A server of one's own, as Python code; ``read()`` gives the next request, ``answer(id, result)`` answers it."""
    return StdioServer([sys.executable, "-c", f"{ODD}\n{text}"], **options)


ODD = '''
import json, os, sys, time
def read():
    line = sys.stdin.readline()
    if not line: sys.exit()
    return json.loads(line)
def send(message): print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)
def answer(id, result): send({"id": id, "result": result})
def refuse(id): send({"id": id, "error": {"code": -32601, "message": "no such method"}})
def serve(tools, called=None):
    """An old server, by hand."""
    while True:
        got = read()
        method, id = got["method"], got.get("id")
        if method == "initialize":
            answer(id, {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                        "serverInfo": {"name": "odd", "version": "1"}})
        elif method == "tools/list": answer(id, {"tools": tools})
        elif method == "tools/call": called(id, got["params"])
        elif id is not None: refuse(id)
'''


async def results(harness: Harness) -> list[ToolResultMessage]:
    root = await harness.root()
    messages = [m for entry in await root.entries(limit=1000) for m in decode_messages(entry.raw_messages)]
    return [message for message in messages if isinstance(message, ToolResultMessage)]


@asynccontextmanager
async def harness_with(extension: Extension, *script, **options) -> AsyncIterator[Harness]:
    reports = []
    async with Harness.open(
        MemoryStorage(), models=ScriptedModel([*script]), extensions=[extension], on_report=reports.append, **options
    ) as harness:
        yield harness
    # A machine under load may take a second for what takes none.
    assert not [report for report in reports if report.type != "line_held"], reports


async def result_of(extension: Extension, tool: str, **arguments: JsonValue) -> ToolResultMessage:
    """The result of one call, made by a model in a harness."""
    async with harness_with(extension, call(tool, **arguments), say("Done.")) as harness:
        await (await (await harness.root()).submit("Go.")).answer()
        (result,) = await results(harness)
        return result


async def live(conversation: Conversation) -> Live:
    return await conversation._harness.session.snapshot(Live, conversation=conversation.id) or Live()


def log(folder: Path) -> list[str]:
    path = folder / "log"
    return path.read_text().splitlines() if path.exists() else []


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another process does."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


class HttpWares:
    """The server over HTTP, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        (self.folder / "port").unlink(missing_ok=True)
        self.process = await asyncio.to_thread(
            subprocess.Popen, [sys.executable, str(WARES), str(self.folder), "http", str(self.port)]
        )
        await until(lambda: (self.folder / "port").exists() and (self.folder / "port").read_text() != "")
        self.port = int((self.folder / "port").read_text())

    async def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        await asyncio.to_thread(self.process.wait)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"
