"""A server over streamable HTTP, on loopback: killed under a call, started again, refusing, answering at length."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from mcp_kit import HttpWares, harness_with, log, result_of, results, until
from mcp_types import HEADER_MISMATCH

from perdure import HttpServer, McpError, mcp_extension
from perdure.testing.model import call, say
from perdure.tools.mcp import http as transport

pytestmark = pytest.mark.timeout(120)


@pytest_asyncio.fixture
async def wares(tmp_path: Path) -> AsyncIterator[HttpWares]:
    started = HttpWares(tmp_path)
    await started.start()
    yield started
    await started.kill()


async def test_tools_over_http_and_a_server_that_is_started_again_h118(wares: HttpWares) -> None:
    async with mcp_extension("w", HttpServer(wares.url)) as server:
        assert (await result_of(server.extension, "w_add", a=1, b=2)).text == "3"
        assert (await result_of(server.extension, "w_change")).text == "changed"
        await until(lambda: any(tool.name == "w_fresh" for tool in server.extension.tools))
        await wares.kill()
        await wares.start()
        # It has the tools of its beginning again, and nobody notices between two calls.
        assert (await result_of(server.extension, "w_add", a=2, b=2)).text in ("4", "4")
        await until(lambda: any(tool.name == "w_fail" for tool in server.extension.tools))


@pytest.mark.parametrize("replay", ["safe", "unsafe"])
async def test_a_server_that_is_killed_under_a_call_h387(wares: HttpWares, replay) -> None:
    async with (
        mcp_extension("w", HttpServer(wares.url), replay={"wait": replay}) as server,
        harness_with(server.extension, call("w_wait", name="a"), say("Done.")) as harness,
    ):
        submission = await (await harness.root()).submit("Go.")
        await until(lambda: log(wares.folder) == ["wait a"])
        (wares.folder / "go").touch()
        await wares.kill()
        await wares.start()
        await submission.answer()
        (result,) = await results(harness)
    if replay == "safe":
        assert result.text == "waited 2 times"
    else:
        assert result.code == "interrupted"
        assert log(wares.folder) == ["wait a"]


async def test_a_call_that_is_aborted_is_cancelled_at_the_server_h390(wares: HttpWares) -> None:
    async with (
        mcp_extension("w", HttpServer(wares.url)) as server,
        harness_with(server.extension, call("w_wait", name="a"), say("Done.")) as harness,
    ):
        root = await harness.root()
        await root.submit("Go.")
        await until(lambda: log(wares.folder) == ["wait a"])
        await root.abort()
        await until(lambda: log(wares.folder)[-1] == "cancelled a")


async def test_a_server_that_is_not_there_is_told_of_h386(wares: HttpWares) -> None:
    await wares.kill()
    with pytest.raises(McpError, match="MCP server 'w' cannot be used: ConnectError"):
        async with mcp_extension("w", HttpServer(wares.url)):
            pass


# --- by hand -------------------------------------------------------------------------------------------------

Answer = tuple[int, Mapping[str, object] | bytes]


@contextmanager
def by_hand(called: Callable[[int], Answer], seen: list[dict[str, str]], *, session: bool = False) -> Iterator[str]:
    """An old server whose answer to the n-th call of a tool is given."""
    calls = 0

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal calls
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append({key.lower(): value for key, value in self.headers.items()} | {"method": asked["method"]})
            match asked["method"]:
                case "initialize":
                    result = {
                        "protocolVersion": "2025-06-18",
                        "capabilities": {"tools": {}},
                        "serverInfo": {"name": "hand", "version": "1"},
                    }
                    self.reply(200, {"result": result}, asked)
                case "tools/list":
                    tools = [{"name": "ask", "inputSchema": {"type": "object"}}]
                    self.reply(200, {"result": {"tools": tools}}, asked)
                case "tools/call":
                    calls += 1
                    self.reply(*called(calls), asked)
                case _ if "id" in asked:
                    self.reply(200, {"error": {"code": -32601, "message": "no such method"}}, asked)
                case _:
                    self.reply(202, b"", asked)

        def reply(self, status: int, body: Mapping[str, object] | bytes, asked: dict[str, object]) -> None:
            if not isinstance(body, bytes):
                body = json.dumps({"jsonrpc": "2.0", "id": asked.get("id"), **body}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json" if body[:1] == b"{" else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            if session and asked["method"] == "initialize":
                self.send_header("Mcp-Session-Id", f"session-{len(seen)}")
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.send_error(405)

        def do_DELETE(self) -> None:
            self.send_error(405)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing of a test goes to the terminal."""

    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{served.server_port}/mcp"
    finally:
        served.shutdown()
        thread.join()
        served.server_close()


HERE = {"result": {"content": [{"type": "text", "text": "here"}]}}


async def test_headers_are_sent_with_each_request_and_kept_out_of_errors_h393(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    seen: list[dict[str, str]] = []
    echoed = {"error": {"code": 1, "message": "sesame-open-7 is not welcome"}}
    with by_hand(lambda n: (200, echoed), seen) as url:
        async with mcp_extension("w", HttpServer(url, headers={"Authorization": "Bearer sesame-open-7"})) as server:
            refused = await result_of(server.extension, "w_ask")
    assert refused.text == "The MCP server refused the call: *** is not welcome (code 1)"
    assert {each["authorization"] for each in seen} == {"Bearer sesame-open-7"}
    assert not [record for record in caplog.records if "sesame" in record.getMessage()]


@pytest.mark.parametrize(
    ("status", "replay", "code", "calls"),
    [
        (503, "unsafe", "interrupted", 1),
        (503, "safe", None, 2),
        (401, "safe", "tool_error", 1),
        (429, "unsafe", "tool_error", 1),
    ],
)
async def test_a_status_that_says_nothing_of_the_call_is_a_cut_one_that_refuses_is_not_h387(
    status: int, replay, code: str | None, calls: int
) -> None:
    seen: list[dict[str, str]] = []
    with by_hand(lambda n: (status, b"no") if n == 1 else (200, HERE), seen) as url:
        async with mcp_extension("w", HttpServer(url), replay=replay) as server:
            result = await result_of(server.extension, "w_ask")
    assert result.code == code
    assert result.text == "here" if code is None else f"HTTP status {status}" in result.text
    assert len([each for each in seen if each["method"] == "tools/call"]) == calls


async def test_what_an_ended_session_did_not_take_is_asked_again_in_a_new_one_h387() -> None:
    seen: list[dict[str, str]] = []
    with by_hand(lambda n: (404, b"gone") if n == 1 else (200, HERE), seen, session=True) as url:
        async with mcp_extension("w", HttpServer(url), replay="unsafe") as server:
            assert (await result_of(server.extension, "w_ask")).text == "here"
    used = [each["mcp-session-id"] for each in seen if each["method"] == "tools/call"]
    assert len(set(used)) == 2


async def test_a_call_whose_headers_are_those_of_an_older_listing_is_made_again_h387() -> None:
    seen: list[dict[str, str]] = []
    stale = {"error": {"code": HEADER_MISMATCH, "message": "header mismatch"}}
    with by_hand(lambda n: (400, stale) if n == 1 else (200, HERE), seen) as url:
        async with mcp_extension("w", HttpServer(url), replay="unsafe") as server:
            assert (await result_of(server.extension, "w_ask")).text == "here"
    methods = [each["method"] for each in seen]
    assert methods[methods.index("tools/call") :] == ["tools/call", "tools/list", "tools/call"]


async def test_an_answer_that_is_too_long_is_refused_h392(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_ANSWER", 100_000)
    seen: list[dict[str, str]] = []
    long = {"result": {"content": [{"type": "text", "text": "x" * 200_000}]}}
    with by_hand(lambda n: (200, long), seen) as url:
        async with mcp_extension("w", HttpServer(url), replay="unsafe") as server:
            result = await result_of(server.extension, "w_ask")
    assert result.is_error
    assert "more than 100000 bytes" in result.text


async def test_a_server_that_accepts_and_never_answers_ends_in_time_h386() -> None:
    held: list[asyncio.StreamWriter] = []
    listening = await asyncio.start_server(lambda reader, writer: held.append(writer), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/mcp"
    with pytest.raises(McpError, match="it did not answer in time"):
        async with mcp_extension("w", HttpServer(url), connect_timeout_ms=500):
            pass
    for writer in held:
        writer.close()
    listening.close()
