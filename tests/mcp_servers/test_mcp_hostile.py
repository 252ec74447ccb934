"""Servers that flood, lie, ask, fall silent or change without end: what each of them cannot do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from mcp.shared.message import SessionMessage
from mcp_kit import PATIENCE_S, harness_with, log, odd, result_of, results, until, wares
from mcp_types import JSONRPCNotification, JSONRPCRequest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from perdure import Approvals, Harness, McpError, SqliteStorage, mcp_extension
from perdure.testing.model import ScriptedModel, call, say
from perdure.tools.mcp.heard import MOST_ASKED, Between
from perdure.tools.mcp.losses import Loss

pytestmark = pytest.mark.timeout(120)

ASK = [{"name": "ask", "inputSchema": {"type": "object"}}]
HERE = "{'content': [{'type': 'text', 'text': 'here'}]}"


def asking(body: str, tools: object = ASK) -> str:
    """An old server that does this at each call: ``id`` and ``params`` are of it."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return f"def called(id, params):\n{lines}\nserve({tools!r}, called)"


async def test_requests_that_a_server_takes_back_are_not_counted_h392() -> None:
    loss = Loss()
    between = Between(lambda text: text, loss)

    def heard(method: str, id: int | None = None, params: dict[str, int] | None = None) -> bool:
        kind = JSONRPCNotification if id is None else JSONRPCRequest
        more = {} if id is None else {"id": id}
        message = kind.model_validate({"jsonrpc": "2.0", "method": method, "params": params, **more})
        return between.used(SessionMessage(message))

    for id in range(2 * MOST_ASKED):
        assert heard("ping", id)
        assert heard("notifications/cancelled", params={"requestId": id})
    assert all(heard("ping", id) for id in range(MOST_ASKED))
    assert not loss.told.is_set()
    assert not heard("ping", MOST_ASKED)
    assert loss.told.is_set()


# --- what it answers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [-32000, -32001, -32700])
async def test_words_of_a_server_are_told_whatever_their_code_h387(code: int) -> None:
    text = asking(f"send({{'id': id, 'error': {{'code': {code}, 'message': 'the quota is used up'}}}})")
    async with mcp_extension("odd", odd(text), replay="safe") as server:
        refused = await result_of(server.extension, "odd_ask")
    assert refused.text == f"The MCP server refused the call: the quota is used up (code {code})"
    assert refused.code == "tool_error"


@pytest.mark.parametrize("value", ["[" * 400 + "]" * 400, '"\\ud800"'])
async def test_an_answer_that_cannot_be_read_is_no_refusal_and_not_waited_for_h392(value: str) -> None:
    line = '{"jsonrpc": "2.0", "id": %d, "result": {"content": [], "structuredContent": {"v": ' + value + "}}}"
    async with mcp_extension("odd", odd(asking(f"print({line!r} % id, flush=True)"))) as server:
        unread = await result_of(server.extension, "odd_ask")
    assert unread.code == "tool_error"
    assert unread.text.startswith("The MCP server got the call, but what it answered is not of the form")
    assert "Whether it took effect is not known." in unread.text


async def test_an_answer_whose_id_is_none_of_a_request_is_skipped_h392() -> None:
    odd_id = {"jsonrpc": "2.0", "id": True, "answer": 1}
    text = asking(f"send({odd_id!r}); send({{'id': id, 'result': {{'content': []}}}})")
    async with mcp_extension("odd", odd(text)) as server:
        assert (await result_of(server.extension, "odd_ask")).code is None
        assert server.connected


async def test_a_server_whose_tools_have_always_just_changed_is_asked_a_few_times_h387(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    text = f"""
first = sys.stdin.readline
listed = 0
def read():
    global listed
    while True:
        got = json.loads(first())
        print(got["method"], file=open({str(seen)!r}, "a"), flush=True)
        listed += got["method"] == "tools/list"
        if got["method"] != "tools/call" and (got["method"] != "tools/list" or listed == 1): return got
        send({{"id": got["id"], "error": {{"code": -32020, "message": "header mismatch"}}}})
serve({ASK!r})
"""
    async with mcp_extension("odd", odd(text)) as server:
        never = await result_of(server.extension, "odd_ask")
    assert never.code == "tool_unavailable"
    asked = seen.read_text().split()
    assert (asked.count("tools/call"), asked.count("tools/list")) == (3, 4)


@pytest.mark.parametrize(
    ("version", "why"),
    [("'1999-01-01'", "it speaks no version of the protocol that is known here"), ("7", "not of the form")],
)
async def test_a_server_of_another_protocol_is_told_clearly_h386(version: str, why: str) -> None:
    text = f"""
while True:
    got = read()
    if got["method"] == "initialize":
        answer(got["id"], {{"protocolVersion": {version}, "capabilities": {{}},
                            "serverInfo": {{"name": "odd", "version": "1"}}}})
    elif "id" in got: refuse(got["id"])
"""
    with pytest.raises(McpError, match=why):
        async with mcp_extension("odd", odd(text)):
            pass


async def test_what_is_told_of_a_server_is_bounded_h386() -> None:
    text = "while True: send({'id': read()['id'], 'error': {'code': 1, 'message': 'x' * 1_000_000}})"
    with pytest.raises(McpError) as raised:
        async with mcp_extension("odd", odd(text)):
            pass
    assert len(str(raised.value)) < 1_100


# --- what it asks and tells ----------------------------------------------------------------------------------------

REQUESTS = """
asked = [("ping", {}), ("roots/list", {}), ("nonsense", {}),
         ("elicitation/create", {"message": "Your password?", "requestedSchema": {"type": "object", "properties": {}}}),
         ("sampling/createMessage", {"messages": [], "maxTokens": 1})]
answers = []
for number, (method, params) in enumerate(asked):
    send({"id": f"s{number}", "method": method, "params": params})
    got = json.loads(sys.stdin.readline())
    answers.append(f"{method} {'answered' if 'result' in got else 'refused'}")
answer(id, {"content": [{"type": "text", "text": "\\n".join(answers)}]})
"""


async def test_what_a_server_asks_of_its_host_is_refused_but_for_a_ping_h390() -> None:
    async with mcp_extension("odd", odd(asking(REQUESTS))) as server:
        told = await result_of(server.extension, "odd_ask")
    refused = ["roots/list", "nonsense", "elicitation/create", "sampling/createMessage"]
    assert told.text.splitlines() == ["ping answered", *(f"{method} refused" for method in refused)]


@pytest.mark.parametrize(
    ("id", "why"),
    [
        ("f'{next(numbers)}' * 100", "it asked for 1000 things and did not read what it was answered"),
        ("'ping' * 100", "it asked for something under an id that waits for its answer already"),
    ],
)
async def test_a_server_that_asks_without_end_and_reads_nothing_loses_its_connection_h392(id: str, why: str) -> None:
    text = asking(f"import itertools\nnumbers = itertools.count(1)\nwhile True: send({{'id': {id}, 'method': 'ping'}})")
    async with mcp_extension("odd", odd(text)) as server:
        lost = await result_of(server.extension, "odd_ask")
    assert lost.code == "interrupted"
    assert why in lost.text


async def test_a_server_that_stays_but_reads_no_more_has_lost_its_connection_h392() -> None:
    text = f"serve({ASK!r}, lambda id, params: (os.close(0), answer(id, {HERE}), time.sleep(600)))"
    async with mcp_extension("odd", odd(text), replay="safe") as server:
        for _ in range(3):
            assert (await result_of(server.extension, "odd_ask")).text == "here"


async def test_a_server_that_changes_its_tools_whenever_they_are_listed_is_listed_seldom_h389(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    text = f"""
lists = 0
answered = answer
def answer(id, result):
    global lists
    if "tools" in result:
        lists += 1
        print(lists, file=open({str(seen)!r}, "a"), flush=True)
        result = {{"tools": [{{"name": f"t{{lists}}", "inputSchema": {{"type": "object"}}}}]}}
    answered(id, result)
    if "tools" in result: send({{"method": "notifications/tools/list_changed"}})
serve([])
"""
    async with mcp_extension("odd", odd(text)) as server:
        began = asyncio.get_running_loop().time()
        await until(lambda: len(seen.read_text().split()) >= 6)
        # 0, 0.1, 0.2, 0.4 and 0.8 seconds are waited before the second and each one after it.
        assert asyncio.get_running_loop().time() - began >= 1.0
        assert server.connected


async def test_a_listing_that_fails_is_told_of_until_one_succeeds_h389(tmp_path: Path) -> None:
    text = f"""
answered = answer
def answer(id, result):
    if "tools" in result and os.path.exists({str(tmp_path / "busy")!r}):
        send({{"id": id, "error": {{"code": 1, "message": "not now"}}}})
    else: answered(id, result)
serve({ASK!r}, lambda id, params: (answered(id, {HERE}), send({{"method": "notifications/tools/list_changed"}})))
"""
    async with mcp_extension("odd", odd(text)) as server:
        (tmp_path / "busy").touch()
        assert (await result_of(server.extension, "odd_ask")).text == "here"
        await until(lambda: server.problems == ("its tools could not be listed: not now (code 1)",))
        (tmp_path / "busy").unlink()
        assert (await result_of(server.extension, "odd_ask")).text == "here"
        await until(lambda: server.problems == ())


# --- secrets -------------------------------------------------------------------------------------------------------

SECRET = "sesame-open-7"
LEAKS = """
word = os.environ["WORD"]
send({"method": "notifications/message", "params": {"level": word, "data": word}})
send({"method": "notifications/progress", "params": {word: word}})
send({"method": "notifications/progress",
      "params": {"progressToken": params["_meta"]["progressToken"], "progress": 1, "message": word}})
if params["name"] == "structured": answer(id, {"content": [], "structuredContent": {"n": "x" * 250 + word * 9}})
elif params["name"] == "dead": os._exit(1)
else: send({"id": id, "error": {"code": 1, "message": word}})
"""


async def test_secrets_are_in_no_error_log_line_or_span_h393(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(0)
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr("mcp.shared._otel._tracer", trace.get_tracer("test", tracer_provider=provider))
    tools: list[object] = [{"name": name, "inputSchema": {"type": "object"}} for name in ("refused", "dead")]
    declared = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tools.append({"name": "structured", "inputSchema": {"type": "object"}, "outputSchema": declared})
    async with mcp_extension("odd", odd(asking(LEAKS, tools), env={"WORD": SECRET})) as server:
        script = [call(f"odd_{name}") for name in ("refused", "structured", "dead")]
        async with harness_with(server.extension, *script, say("Done.")) as harness:
            await (await (await harness.root()).submit("Go.")).answer()
            refused, structured, dead = await results(harness)
    assert refused.text == "The MCP server refused the call: *** (code 1)"
    assert "- n: what it gave is not of type" in structured.text
    assert dead.text.endswith("Output until then:\n***\n")
    told = "\n".join([refused.text, structured.text, dead.text, caplog.text])
    told += "".join(span.to_json() for span in spans.get_finished_spans())
    assert "tools/call" in told, "there are spans"
    assert SECRET[:6] not in told


# --- waiting, and what is there after it -----------------------------------------------------------------------------


async def test_a_resource_may_take_as_long_as_a_call_h390(tmp_path: Path) -> None:
    text = f"""
answered = answer
def answer(id, result):
    if "capabilities" in result: result["capabilities"]["resources"] = {{}}
    answered(id, result)
def refuse(id):
    if got_uri:
        print("asked", file=open({str(tmp_path / "log")!r}, "a"), flush=True)
        while not os.path.exists({str(tmp_path / "go")!r}): time.sleep(0.01)
        answered(id, {{"contents": [{{"uri": "a://b", "text": "late"}}]}})
    else: send({{"id": id, "error": {{"code": -32601, "message": "no such method"}}}})
got_uri = False
first = read
def read():
    global got_uri
    got = first()
    got_uri = got["method"] == "resources/read"
    return got
serve([])
"""
    async with (
        mcp_extension("odd", odd(text), connect_timeout_ms=5_000) as server,
        harness_with(server.extension, call("odd_read_resource", uri="a://b"), say("Done.")) as harness,
    ):
        submission = await (await harness.root()).submit("Go.")
        await until(lambda: log(tmp_path) == ["asked"])
        await asyncio.sleep(5.5)  # longer than connecting may take: that it ends too early is the fault
        (tmp_path / "go").touch()
        await submission.answer()
        (result,) = await results(harness)
    assert result.text == "late"


async def test_the_handshake_that_a_server_takes_is_remembered_h386(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    text = f"""
print("x", file=open({str(starts)!r}, "a"), flush=True)
first = sys.stdin.readline
def read():
    got = json.loads(first())
    if got["method"] == "server/discover": os._exit(1)
    return got
serve({ASK!r}, lambda id, params: answer(id, {HERE}))
"""
    async with mcp_extension("odd", odd(text)) as server:
        assert len(starts.read_text().split()) == 2
        (await server._keeper.connection()).loss.tell("the test says so")
        assert (await result_of(server.extension, "odd_ask")).text == "here"
        assert len(starts.read_text().split()) == 3


async def test_a_host_that_is_opened_again_without_the_tool_does_not_make_the_call_h389(tmp_path: Path) -> None:
    model = ScriptedModel([call("w_wait", name="a"), call("w_add", a=1, b=2), say("Done.")])
    storage = tmp_path / "agent.db"
    approvals = Approvals(tools=("w_add",))
    async with (
        mcp_extension("w", wares(tmp_path), replay="safe") as server,
        Harness.open(
            SqliteStorage(storage), models=model, extensions=[server.extension], approvals=approvals
        ) as harness,
    ):
        await (await harness.root()).submit("Go.", request_id="go")
        await until(lambda: log(tmp_path) == ["wait a"])
    async with (
        mcp_extension("w", wares(tmp_path), replay="safe", exclude=["wait"]) as server,
        Harness.open(
            SqliteStorage(storage), models=model, extensions=[server.extension], approvals=approvals
        ) as harness,
    ):
        await (await harness.root()).submit("Go.", request_id="go")
        async with asyncio.timeout(PATIENCE_S):
            while not await harness.approvals():
                await asyncio.sleep(0.005)
        assert [result.code for result in await results(harness)] == ["interrupted"]
    async with (
        mcp_extension("w", odd("sys.exit(1)"), required=False) as server,
        Harness.open(
            SqliteStorage(storage), models=model, extensions=[server.extension], approvals=approvals
        ) as harness,
    ):
        (pending,) = await harness.approvals()
        await harness.decide(pending.task, allow=True, digest=pending.digest)
        await (await (await harness.root()).submit("Go.", request_id="go")).answer()
        _, added = await results(harness)
    assert added.code == "tool_unavailable"
    assert log(tmp_path).count("wait a") == 1
