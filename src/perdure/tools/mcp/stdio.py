"""The SDK's transport over a server's standard input and output: one JSON-RPC message a line, each bounded.

Not the SDK's own: that one reads lines of any length, logs what it cannot read, and waits for the end of a pipe that a
grandchild may hold open.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import PARSE_ERROR, ErrorData, JSONRPCError, JSONRPCMessage, jsonrpc_message_adapter

from perdure.tools.mcp.losses import Loss
from perdure.tools.mcp.process import Program, Start
from perdure.tools.mcp.settings import StdioServer

MAX_MESSAGE: Final = 32 * 1024 * 1024
"""Bytes of one message."""
MOST_GARBAGE: Final = 1_000
"""Lines in a row that are no messages."""
UNREAD: Final = "Failed to parse JSON response"
"""How the SDK begins what it says of answers that it cannot read; over HTTP it sees them itself."""
DRAIN_S: Final = 1.0
"""For what a server wrote before it ended, while something else holds its output open."""

Streams = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]


@asynccontextmanager
async def stdio_transport(server: StdioServer, start: Start, loss: Loss) -> AsyncGenerator[Streams, None]:
    """Start the server; it ends with the block. Why its output ended is told to ``loss``. Raises OSError."""
    process = await start(
        server.command,
        env={**get_default_environment(), **server.env},
        cwd=server.cwd,
        stderr=asyncio.subprocess.DEVNULL if server.stderr == "discard" else None,
        limit=MAX_MESSAGE,
    )
    to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    to_server, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    tasks = [
        asyncio.create_task(_read(process, to_session, loss)),
        asyncio.create_task(_write(process, from_session, to_session, loss)),
    ]
    try:
        yield from_server, to_server
    finally:
        for task in tasks:
            task.cancel()
        try:
            await process.end()
        finally:
            await asyncio.gather(*tasks, return_exceptions=True)
            for stream in (to_session, from_server, to_server, from_session):
                stream.close()


async def _read(process: Program, to_session: MemoryObjectSendStream[SessionMessage | Exception], loss: Loss) -> None:
    lines = asyncio.create_task(_read_lines(process.stdout, to_session))
    exit = asyncio.create_task(process.exited.wait())
    try:
        await asyncio.wait((lines, exit), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((lines, exit), timeout=DRAIN_S)
        why = lines.result() if lines.done() and not lines.cancelled() else None
        if process.code is not None:
            loss.tell(f"its process ended with code {process.code}")
        else:
            loss.tell(why or "it closed its output")
    except Exception as error:  # nothing else tells of it
        loss.tell(f"its output could not be read: {type(error).__name__}")
    finally:
        lines.cancel()
        exit.cancel()
        to_session.close()  # the session ends what waits for an answer


async def _read_lines(
    stdout: asyncio.StreamReader, to_session: MemoryObjectSendStream[SessionMessage | Exception]
) -> str | None:
    """Until the output ends, or cannot be read; then why."""
    garbage = 0
    while garbage < MOST_GARBAGE:
        try:
            line = await stdout.readline()
        except ValueError:
            return f"it sent a message of more than {MAX_MESSAGE} bytes"
        if not line:
            return None
        message = _message(line)
        if message is None:
            garbage += 1
            continue
        garbage = 0
        try:
            await to_session.send(SessionMessage(message))
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            return None
    return f"it printed {MOST_GARBAGE} lines in a row that are no messages of the protocol"


def _message(line: bytes) -> JSONRPCMessage | None:
    """An answer that cannot be read is an error of it: whoever asked would wait in vain."""
    try:
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        pass
    try:
        read = json.loads(line)  # it takes more than the protocol does
    except (ValueError, RecursionError):
        return None
    match read:
        case {"jsonrpc": "2.0", "id": int() as id, **rest} if type(id) is int and "method" not in rest:
            return JSONRPCError(jsonrpc="2.0", id=id, error=ErrorData(code=PARSE_ERROR, message=UNREAD))
        case _:
            return None


async def _write(
    process: Program,
    from_session: MemoryObjectReceiveStream[SessionMessage],
    to_session: MemoryObjectSendStream[SessionMessage | Exception],
    loss: Loss,
) -> None:
    try:
        async for sent in from_session:
            process.stdin.write(sent.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
            await process.stdin.drain()
    except Exception as error:  # nothing else tells of it
        # Mostly it has ended, which its exit tells better; else nobody would ever read what is sent to it.
        await asyncio.wait((asyncio.ensure_future(process.exited.wait()),), timeout=DRAIN_S)
        if process.code is None:
            closed = isinstance(error, OSError)
            loss.tell("it closed its input" if closed else f"nothing can be sent to it: {type(error).__name__}")
            to_session.close()
