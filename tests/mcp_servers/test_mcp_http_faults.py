"""Servers over HTTP that are down, hang, break off, send elsewhere or answer oddly."""

from __future__ import annotations

import asyncio
import gzip
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from mcp_kit import PATIENCE_S, HttpWares, log, result_of, until

from perdure import HttpServer, McpError, mcp_extension
from perdure.tools.mcp import http as transport

pytestmark = pytest.mark.timeout(120)

HERE = {"content": [{"type": "text", "text": "here"}]}


@dataclass
class Asked:
    verb: str
    headers: dict[str, str]
    method: str = ""
    id: object = None
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass
class Reply:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    broken: bool = False
    """The connection is ended without a word."""


def message(asked: Asked, status: int = 200, **what: object) -> Reply:
    return Reply(status, json.dumps({"jsonrpc": "2.0", "id": asked.id, **what}).encode())


SESSION = {"Content-Type": "application/json", "Mcp-Session-Id": "the-id-of-a-session"}


def usual(asked: Asked) -> Reply:
    """An old server with one tool."""
    match asked.method:
        case "initialize":
            server = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
            return message(asked, result={**server, "serverInfo": {"name": "hand", "version": "1"}})
        case "tools/list":
            return message(asked, result={"tools": [{"name": "ask", "inputSchema": {"type": "object"}}]})
        case "tools/call":
            return message(asked, result=HERE)
        case _ if asked.verb != "POST":
            return Reply(405)
        case _ if asked.id is not None:
            return message(asked, error={"code": -32601, "message": "no such method"})
        case _:
            return Reply(202)


def in_session(asked: Asked) -> Reply:
    reply = usual(asked)
    return Reply(reply.status, reply.body, SESSION) if asked.method == "initialize" else reply


@contextmanager
def served(answer: Callable[[Asked], Reply], seen: list[Asked] | None = None) -> Iterator[str]:
    """A server by hand; each request is answered in a thread of its own."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers = {key.lower(): value for key, value in self.headers.items()}
            asked = Asked(self.command, headers)
            if length := int(headers.get("content-length", 0)):
                got = json.loads(self.rfile.read(length))
                asked.method, asked.id = got.get("method", ""), got.get("id")
                asked.arguments = got.get("params", {}).get("arguments", {})
            if seen is not None:
                seen.append(asked)
            reply = answer(asked)
            if reply.broken:
                self.close_connection = True
                return
            self.send_response(reply.status)
            for key, value in reply.headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)

        do_POST = do_DELETE = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Nothing of a test goes to the terminal."""

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/mcp"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# --- a server that is down, or breaks off ------------------------------------------------------------------------


async def test_a_call_to_a_server_that_is_down_did_nothing_h387(tmp_path: Path) -> None:
    wares = HttpWares(tmp_path)
    await wares.start()
    try:
        async with mcp_extension("w", HttpServer(wares.url), connect_timeout_ms=5_000) as server:
            await wares.kill()
            down = await result_of(server.extension, "w_wait", name="a")
            assert down.code == "tool_unavailable"
            assert down.text.endswith("Connection refused. Nothing was done.")
            assert server.problems == ("it is not connected: ConnectError: Connection refused",)
            (tmp_path / "go").touch()
            await wares.start()
            assert (await result_of(server.extension, "w_wait", name="a")).text == "waited 1 times"
        assert log(tmp_path) == ["wait a"]
    finally:
        await wares.kill()


async def test_a_request_that_breaks_off_takes_no_other_along_h387() -> None:
    held = threading.Event()

    def answer(asked: Asked) -> Reply:
        if asked.method == "tools/call":
            if asked.arguments["which"] == "breaks":
                return Reply(broken=True)
            held.wait(PATIENCE_S)
        return usual(asked)

    seen: list[Asked] = []
    with served(answer, seen) as url:
        async with mcp_extension("w", HttpServer(url)) as server:
            other = asyncio.create_task(result_of(server.extension, "w_ask", which="waits"))
            await until(lambda: any(asked.method == "tools/call" for asked in seen))
            lost = await result_of(server.extension, "w_ask", which="breaks")
            assert lost.code == "interrupted"
            held.set()
            assert (await other).text == "here"
            assert server.connected
    assert [asked.method for asked in seen].count("initialize") == 1


async def test_more_calls_than_connections_are_usual_do_not_wait_for_one_another_h387() -> None:
    together = threading.Barrier(120)

    def answer(asked: Asked) -> Reply:
        if asked.method == "tools/call":
            together.wait(PATIENCE_S)
        return usual(asked)

    with served(answer) as url:
        async with mcp_extension("w", HttpServer(url)) as server:
            connection = await server._keeper.connection()
            calls = [connection.request(lambda session: session.call_tool("ask", {})) for _ in range(120)]
            answers = await asyncio.gather(*calls)
    assert all(not answer.is_error for answer in answers)


async def test_a_server_that_hangs_in_everything_holds_up_neither_the_opening_nor_the_close_h386() -> None:
    over = threading.Event()

    def answer(asked: Asked) -> Reply:
        if asked.method == "tools/list" or asked.verb == "DELETE":
            over.wait(2 * PATIENCE_S)
        return in_session(asked)

    seen: list[Asked] = []
    with served(answer, seen) as url:
        try:
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(McpError, match="it did not answer in time"):
                    async with mcp_extension("w", HttpServer(url), connect_timeout_ms=3_000):
                        pass
        finally:
            over.set()
    assert "DELETE" in [asked.verb for asked in seen], "the session was ended"


async def test_a_stream_that_is_ended_as_soon_as_it_is_there_is_not_opened_again_at_once_h392(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "STREAMS_AT_ONCE", 3)
    opened = 0

    def answer(asked: Asked) -> Reply:
        nonlocal opened
        opened += asked.verb == "GET"
        if asked.verb == "GET" or asked.method == "tools/call":
            return Reply(body=b"id: 1\nretry: 0\ndata:\n\n", headers={"Content-Type": "text/event-stream"})
        return in_session(asked)

    began = asyncio.get_running_loop().time()
    with served(answer) as url:
        async with mcp_extension("w", HttpServer(url), timeout_ms=6_000) as server:
            call = asyncio.create_task(result_of(server.extension, "w_ask"))
            await until(lambda: opened >= 6)
            assert asyncio.get_running_loop().time() - began >= 2.0
            assert (await call).code == "timeout"


# --- what it answers ---------------------------------------------------------------------------------------------


def bomb(asked: Asked) -> Reply:
    text = json.dumps(
        {"jsonrpc": "2.0", "id": asked.id, "result": {"content": [{"type": "text", "text": "x" * 50_000_000}]}}
    )
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    return Reply(body=gzip.compress(text.encode()), headers=headers)


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (bomb, "it is compressed, which was not asked for"),
        (lambda asked: Reply(202), "not of the form"),
        (lambda asked: Reply(body=b"<html>", headers={"Content-Type": "text/html"}), "not of the form"),
        (lambda asked: Reply(body=b"{"), "not of the form"),
    ],
)
async def test_an_answer_that_cannot_be_read_is_no_refusal_h387(reply: Callable[[Asked], Reply], why: str) -> None:
    seen: list[Asked] = []
    with served(lambda asked: reply(asked) if asked.method == "tools/call" else usual(asked), seen) as url:
        async with mcp_extension("w", HttpServer(url), replay="safe") as server:
            unread = await result_of(server.extension, "w_ask")
    assert unread.code == "tool_error"
    assert unread.text.startswith("The MCP server got the call, but ")
    assert why in unread.text
    assert [asked.method for asked in seen].count("tools/call") == 1


@pytest.mark.parametrize("status", [400, 404])
async def test_words_of_a_session_outside_of_one_are_a_refusal_h387(status: int) -> None:
    def answer(asked: Asked) -> Reply:
        if asked.method == "tools/call":
            return message(asked, status, error={"code": -32602, "message": "no such browser session"})
        return usual(asked)

    seen: list[Asked] = []
    with served(answer, seen) as url:
        async with mcp_extension("w", HttpServer(url)) as server:
            refused = await result_of(server.extension, "w_ask")
    assert refused.text == "The MCP server refused the call: no such browser session (code -32602)"
    assert [asked.method for asked in seen].count("tools/call") == 1


@pytest.mark.parametrize(("status", "hint"), [(401, "; look at the headers that it is sent"), (404, ""), (500, "")])
async def test_a_server_that_does_not_let_us_in_is_told_with_its_status_h386(status: int, hint: str) -> None:
    with (
        served(lambda asked: Reply(status, b"no", {"Content-Type": "text/plain"})) as url,
        pytest.raises(McpError) as raised,
    ):
        async with mcp_extension("w", HttpServer(url)):
            pass
    assert str(raised.value) == f"MCP server 'w' cannot be used: it answered with HTTP status {status}{hint}"


async def test_a_redirect_elsewhere_is_not_followed_and_takes_no_header_along_h393() -> None:
    elsewhere: list[Asked] = []
    headers = {"Authorization": "Bearer sesame-open-7"}
    with (
        served(usual, elsewhere) as other,
        served(lambda asked: Reply(307, headers={"Location": other})) as url,
        pytest.raises(McpError, match="not followed"),
    ):
        async with mcp_extension("w", HttpServer(url, headers=headers)):
            pass
    assert elsewhere == []


# --- secrets -----------------------------------------------------------------------------------------------------


def test_an_address_is_shown_without_what_may_be_a_key_h393() -> None:
    server = HttpServer("https://example.com:8443/s/0123456789abcdef0123/mcp?key=sesame-open-7&x=a%20long%20word")
    assert repr(server) == "HttpServer('https://example.com:8443')"
    assert {"0123456789abcdef0123", "sesame-open-7", "a long word", "a%20long%20word"} <= set(server.secrets)


async def test_keys_of_an_address_and_of_a_session_are_in_no_error_or_log_line_h393(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(0)

    def answer(asked: Asked) -> Reply:
        if asked.method != "tools/call":
            return in_session(asked)
        if asked.arguments:
            return message(asked, error={"code": 1, "message": "sesame-open-7 is not known"})
        return Reply(body=b'{"sesame-open-7": "Bearer open-sesame-8"}')

    with served(answer) as url:
        place = HttpServer(f"{url}?key=sesame-open-7", headers={"Authorization": "Bearer open-sesame-8"})
        async with mcp_extension("w", place) as server:
            assert "*** is not known" in (await result_of(server.extension, "w_ask", a=1)).text
            await result_of(server.extension, "w_ask")
    for secret in ("sesame-open", "open-sesame", "the-id-of-a-session"):
        assert secret not in caplog.text
