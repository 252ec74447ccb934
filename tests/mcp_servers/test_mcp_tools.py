"""Tools that mirror a server: names, schemas, contents, what is odd of a server, its changes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp_kit import alive, harness_with, log, odd, result_of, results, until, wares

from perdure import Extension, Harness, HttpServer, McpError, MemoryStorage, StdioServer, mcp_extension, tool
from perdure.harness.arguments import InvalidArguments
from perdure.harness.messages import Image, Text
from perdure.harness.registry import ExtensionConflict
from perdure.testing.model import ScriptedModel, call, say
from perdure.tools.mcp import server as opening
from perdure.tools.mcp.mirror import shown_name

pytestmark = pytest.mark.timeout(120)


async def test_tools_of_a_server_are_offered_and_called_as_any_other_h118(tmp_path: Path) -> None:
    async with mcp_extension("w", wares(tmp_path), exclude=["much"]) as server:
        names = [tool.name for tool in server.extension.tools]
        assert names == sorted(names)
        assert {"w_add", "w_show", "w_list_resources", "w_get_prompt"} < set(names)
        assert "w_much" not in names
        assert server.problems == ()
        (add,) = [tool for tool in server.extension.tools if tool.name == "w_add"]
        assert msgspec.json.decode(add.spec.parameters) == {
            "type": "object",
            "properties": {"a": {"title": "A", "type": "integer"}, "b": {"title": "B", "type": "integer"}},
            "required": ["a", "b"],
            "title": "addArguments",
        }
        assert add.spec.description == "Add two numbers."
        script = [call("w_add", a=1, b=2), call("w_add", a="3", b=4), call("w_add", a=[]), call("w_fail")]
        async with harness_with(server.extension, *script, say("Done.")) as harness:
            await (await (await harness.root()).submit("Go.")).answer()
            three, seven, unfit, failed = await results(harness)
        assert (three.text, seven.text) == ("3", "7")
        assert unfit.code == "invalid_arguments"
        assert '- "b" is a required property' in unfit.text
        assert "- a: [] is not of type" in unfit.text
        assert failed.is_error
        assert failed.code is None
        assert failed.text.endswith("no access with nothing")


async def test_what_one_server_shows_h384_h394(tmp_path: Path) -> None:
    async with mcp_extension("w", wares(tmp_path), prefix="") as server:
        script = [
            call("show"),
            call("list_resources"),
            call("read_resource", uri="wares://note"),
            call("list_prompts"),
            call("get_prompt", name="greet", arguments={"name": "Bo"}),
            call("read_resource", uri="wares://nothing"),
            call("much", megabytes=3),
        ]
        async with harness_with(server.extension, *script, say("Done.")) as harness:
            await (await (await harness.root()).submit("Go.")).answer()
            shown, resources, read, prompts, prompt, nothing, much = await results(harness)
        text, image, rest = shown.content
        assert text == Text("a text")
        assert isinstance(image, Image)
        assert image.media_type == "image/png"
        assert rest == Text("an embedded text\n[resource note at wares://note]")
        assert json.loads(resources.text)["uri"] == "wares://note"
        assert read.text == "the note's text"
        assert json.loads(prompts.text)["name"] == "greet"
        assert prompt.text == "user:\nSay hello to Bo."
        assert nothing.code == "tool_error"
        assert nothing.text.startswith("The MCP server refused the call: ")
        assert len(much.text) < 60_000
        assert much.text.startswith("0123456789abcde\n")
        assert "after this are left out.]" in much.text


async def test_a_server_with_other_tools_replaces_its_extension_while_work_runs_h389(tmp_path: Path) -> None:
    async with mcp_extension("w", wares(tmp_path)) as server:
        model = ScriptedModel(
            [call("w_change"), call("w_wait", name="a"), call("w_fresh"), call("w_fail"), say("Done.")]
        )
        async with Harness.open(MemoryStorage(), models=model, extensions=[server.extension]) as harness:
            submission = await (await harness.root()).submit("Go.")
            await until(lambda: log(tmp_path) == ["wait a"])
            await until(lambda: any(t.name == "w_fresh" for e in harness.registry.extensions for t in e.tools))
            (tmp_path / "go").touch()
            await submission.answer()
            _, waited, fresh, gone = await results(harness)
        assert waited.text == "waited 1 times"
        assert fresh.text == "fresh"
        assert gone.code == "tool_unavailable"


async def test_what_the_host_took_out_stays_out_h389(tmp_path: Path) -> None:
    async with (
        mcp_extension("w", wares(tmp_path)) as server,
        Harness.open(MemoryStorage(), extensions=[server.extension]) as harness,
    ):
        harness.registry.remove("w")
        assert (await result_of(server.extension, "w_change")).text == "changed"
        await until(lambda: any(tool.name == "w_fresh" for tool in server.extension.tools))
        assert harness.registry.extensions == ()


async def test_names_of_other_extensions_conflict_clearly_h380(tmp_path: Path) -> None:
    @tool
    async def add(a: int) -> int:
        """Of another extension."""
        return a

    own = Extension("own", tools=[add])
    async with mcp_extension("w", wares(tmp_path), prefix="") as server:
        with pytest.raises(ExtensionConflict, match="both have a tool named 'add'"):
            async with Harness.open(MemoryStorage(), extensions=[own, server.extension]):
                pass


@given(st.text(min_size=1, max_size=100), st.sampled_from(["", "w_", "a" * 32]))
def test_a_shown_name_is_valid_and_its_own_h380(name: str, prefix: str) -> None:
    shown = shown_name(prefix, name)
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", shown)
    if shown != prefix + name:
        assert shown != shown_name(prefix, f"{name}.")


async def test_a_call_that_takes_too_long_or_is_aborted_is_cancelled_at_the_server_h390(tmp_path: Path) -> None:
    async with mcp_extension("w", wares(tmp_path), timeout_ms=5_000) as server:
        late = await result_of(server.extension, "w_wait", name="late")
        assert late.code == "timeout"
        assert late.text.endswith("Output until then:\nhalf of it\n")
        await until(lambda: log(tmp_path)[-1] == "cancelled late")
        async with harness_with(server.extension, call("w_wait", name="off"), say("Done.")) as harness:
            root = await harness.root()
            await root.submit("Go.")
            await until(lambda: log(tmp_path)[-1] == "wait off")
            await root.abort()
            (result,) = await results(harness)
            assert result.code == "aborted"
        await until(lambda: log(tmp_path)[-1] == "cancelled off")


# --- odd servers ---------------------------------------------------------------------------------------------


def listed(*names: str, **more: object) -> str:
    return repr([{"name": name, "inputSchema": {"type": "object"}, **more} for name in names])


HERE_IT_IS = "lambda id, params: answer(id, {'content': [{'type': 'text', 'text': 'here'}]})"


async def test_tools_that_cannot_be_used_are_left_out_and_told_of_h381() -> None:
    schemas = {
        "fine": {"type": "object", "properties": {"p": {"type": "string", "pattern": "^(?=a)[a-z]+$"}}},
        "not_valid": {"type": "object", "properties": {"a": {"type": "objekt"}}},
        "elsewhere": {"type": "object", "$ref": "http://127.0.0.1:9/schema"},
        "file": {"type": "object", "properties": {"a": {"$ref": "file:///etc/hostname"}}},
    }
    tools = [{"name": name, "inputSchema": schema} for name, schema in schemas.items()]
    tools += [{"name": "fine", "inputSchema": {"type": "object"}}]
    tools += [{"name": "out", "inputSchema": {"type": "object"}, "outputSchema": schemas["not_valid"]}]
    huge = "{'name': 'huge', 'inputSchema': {'type': 'object', 'description': 'x' * 300_000}}"
    wanted = [*schemas, "huge", "out", "misspelt"]
    async with mcp_extension("odd", odd(f"serve({tools!r} + [{huge}])"), include=wanted) as server:
        assert [tool.name for tool in server.extension.tools] == ["odd_fine"]
        told = "\n".join(server.problems)
        for name in ("not_valid", "elsewhere", "file", "huge", "out"):
            assert f"tool {name!r} is left out: its schema" in told
        assert "tool 'fine' is left out: there is another tool of that name" in told
        assert "the server has no tool 'misspelt', which the host names" in told
        (fine,) = server.extension.tools
        assert fine.signature.values({"p": "abc"}) == {"arguments": {"p": "abc"}}
        with pytest.raises(InvalidArguments, match="does not match"):
            fine.signature.values({"p": "b"})


async def test_a_thousand_tools_are_taken_and_no_more_h381() -> None:
    names = [f"t{number}" for number in range(1_200)]
    async with mcp_extension("odd", odd(f"serve({listed(*names)})")) as server:
        assert len(server.extension.tools) == 1_000
        assert server.problems == ("the server has more than 1000 tools; the others are left out",)


STRUCTURED = """
def called(id, params):
    answers = [{"n": 1}, {"n": "one"}, None]
    got = answers[params["arguments"]["which"]]
    answer(id, {"content": [], **({} if got is None else {"structuredContent": got})})
serve([{"name": "count", "inputSchema": {"type": "object"},
        "outputSchema": {"type": "object", "properties": {"n": {"type": "integer"}}}}], called)
"""


async def test_a_structured_result_is_checked_h383() -> None:
    async with mcp_extension("odd", odd(STRUCTURED)) as server:
        script = [call("odd_count", which=which) for which in range(3)]
        async with harness_with(server.extension, *script, say("Done.")) as harness:
            await (await (await harness.root()).submit("Go.")).answer()
            fits, unfit, none = await results(harness)
        assert (fits.text, fits.is_error) == ('{"n":1}', False)
        assert unfit.code == "tool_error"
        assert unfit.text.startswith("The tool was run, but its result is not what it declares:\n- n:")
        assert none.text == "The tool was run, but gave no structured result, which it declares."


CONTENTS = """
def called(id, params):
    contents = [
        {"type": "image", "data": "bm8gaW1hZ2U=", "mimeType": "image/png"},
        {"type": "image", "data": "%%%", "mimeType": "image/png"},
        {"type": "audio", "data": "AAAA", "mimeType": "audio/wav"},
        {"type": "resource", "resource": {"uri": "a://b", "blob": "AAAA", "mimeType": "application/x"}},
    ]
    if params["name"] == "none": answer(id, {"content": []})
    elif params["name"] == "shape": answer(id, {"content": [{"type": "hologram"}]})
    elif params["name"] == "what": refuse(id)
    else: answer(id, {"content": contents})
serve(TOOLS, called)
"""


async def test_contents_that_no_model_reads_are_told_in_words_h384() -> None:
    text = f"TOOLS = {listed('all', 'none', 'shape', 'what')}{CONTENTS}"
    async with mcp_extension("odd", odd(text)) as server:
        script = [call(f"odd_{name}") for name in ("all", "none", "shape", "what")]
        async with harness_with(server.extension, *script, say("Done.")) as harness:
            await (await (await harness.root()).submit("Go.")).answer()
            all, none, shape, what = await results(harness)
    assert all.text.splitlines() == [
        "[image/png, 8 bytes, which is not shown]",
        "[image/png, whose base64 is damaged]",
        "[audio, audio/wav, which is not shown]",
        "[application/x, 3 bytes, which is not shown]",
    ]
    assert none.text == "Done; the tool gave no content."
    assert (
        "what it answered is not of the form that the protocol has. Whether it took effect is not known." in shape.text
    )
    assert what.text == "The MCP server refused the call: no such method (code -32601)"


async def test_lines_that_are_no_messages_are_skipped_h392() -> None:
    text = f"print('Welcome!', flush=True)\nprint('{{}}', flush=True)\nserve({listed('ask')}, {HERE_IT_IS})"
    async with mcp_extension("odd", odd(text)) as server:
        assert (await result_of(server.extension, "odd_ask")).text == "here"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("sys.exit(7)", "its process ended with code 7"),
        ("read(); os._exit(8)", "its process ended with code 8"),
        ("while True: print('garbage', flush=True)", "1000 lines in a row"),
        ("while True: sys.stdout.write('x' * 1000000)", "more than 33554432 bytes"),
        ("os.close(1); time.sleep(600)", "it closed its output"),
        ("while True: refuse(read()['id'])", "no such method"),
        ("serve([{'name': 1}])", "not of the form"),
        ("serve([{'name': 'a', 'inputSchema': {'type': 'string'}}])", "not of the form"),
    ],
)
async def test_a_server_that_is_none_is_told_clearly_h392(text: str, why: str) -> None:
    with pytest.raises(McpError, match=re.escape(why)) as raised:
        async with mcp_extension("odd", odd(text)):
            pass
    assert str(raised.value).startswith("MCP server 'odd' cannot be used: ")


async def test_a_server_that_never_answers_ends_in_time_h386(tmp_path: Path) -> None:
    text = f"print(os.getpid(), file=open({str(tmp_path / 'pid')!r}, 'w'), flush=True)\nwhile True: read()"
    with pytest.raises(McpError, match="it did not answer in time"):
        async with mcp_extension("odd", odd(text), connect_timeout_ms=4_000):
            pass
    assert not alive(int((tmp_path / "pid").read_text()))


async def test_a_server_that_dies_of_the_newer_handshake_is_asked_by_the_older_one_h386() -> None:
    text = f"""
first = sys.stdin.readline
def read():
    got = json.loads(first())
    if got["method"] == "server/discover": os._exit(1)
    return got
serve({listed("ask")}, {HERE_IT_IS})
"""
    async with mcp_extension("odd", odd(text)) as server:
        assert (await result_of(server.extension, "odd_ask")).text == "here"


async def test_a_program_that_is_not_there_is_told_of() -> None:
    with pytest.raises(McpError, match="its program, or the folder it is to run in, was not found"):
        async with mcp_extension("odd", StdioServer(["/no/such/program"])):
            pass


async def test_a_server_that_is_not_required_is_tried_again_meanwhile_h386(tmp_path: Path) -> None:
    text = f"if not os.path.exists({str(tmp_path / 'up')!r}): sys.exit(1)\nserve({listed('ask')}, {HERE_IT_IS})"
    async with (
        mcp_extension("odd", odd(text), required=False) as server,
        Harness.open(MemoryStorage(), extensions=[server.extension]) as harness,
    ):
        assert not server.connected
        (tmp_path / "up").touch()
        await until(lambda: server.connected)
        assert [tool.name for e in harness.registry.extensions for tool in e.tools] == ["odd_ask"]
        assert server.problems == ()


# --- imports, secrets, options ---------------------------------------------------------------------------------


def test_nothing_of_the_sdk_is_imported_before_a_server_is_connected_h395() -> None:
    program = """
import sys
from perdure import StdioServer, mcp_extension
mcp_extension("w", StdioServer(["true"]))
assert not {"mcp", "jsonschema_rs", "anyio", "httpx2", "pydantic"} & set(sys.modules), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ)


def test_without_the_extra_it_says_how_to_install_it_h395(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=re.escape("mcp is not installed; pip install 'perdure[mcp]'")):
        mcp_extension("w", StdioServer(["true"]))


async def test_secrets_are_in_no_error_line_or_repr_h393(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    secret = "sesame-open-7"
    assert secret not in repr(HttpServer("http://127.0.0.1:1/mcp", headers={"Authorization": f"Bearer {secret}"}))
    place = wares(tmp_path, env={"WARES_TOKEN": secret})
    assert secret not in repr(place)
    async with mcp_extension("w", place) as server:
        failed = await result_of(server.extension, "w_fail")
        assert failed.text.endswith("no access with ***")
        assert secret not in " ".join(place.command)
        await result_of(server.extension, "w_order", item="tea")
    words = "send({'id': read()['id'], 'error': {'code': 1, 'message': os.environ['T']}})"
    with pytest.raises(McpError) as raised:
        async with mcp_extension("w", odd(f"while True: {words}", env={"T": secret})):
            pass
    assert "***" in str(raised.value)
    assert secret not in str(raised.value)
    assert not [record for record in caplog.records if secret in record.getMessage()]


async def test_a_server_sees_nothing_else_of_the_hosts_environment_h393(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARES_TOKEN", "of-the-host")
    async with mcp_extension("w", wares(tmp_path)) as server:
        assert (await result_of(server.extension, "w_fail")).text.endswith("no access with nothing")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"name": "a b"}, "the name is"),
        ({"prefix": "a b"}, "prefix is"),
        ({"replay": "sometimes"}, "replay of"),
        ({"replay": {"a": "yes"}}, "replay of 'a'"),
        ({"timeout_ms": 0}, "must be positive"),
        ({"include": "a"}, "lists of names"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(why)):
        mcp_extension(options.pop("name", "w"), StdioServer(["true"]), **options)


def test_servers_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="list of words"):
        StdioServer("program --option")
    with pytest.raises(ValueError, match="no user and password"):
        HttpServer("https://me:secret@example.com/mcp")
    with pytest.raises(ValueError, match="begins with"):
        HttpServer("example.com")


async def test_a_server_object_is_for_one_use(tmp_path: Path) -> None:
    server = mcp_extension("odd", odd(f"serve({listed('ask')})"))
    async with server:
        pass
    with pytest.raises(McpError, match="in use already"):
        async with server:
            pass
    assert asyncio.all_tasks() == {asyncio.current_task()}
