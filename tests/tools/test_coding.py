"""The tools as they are offered and run (rules H115 and H116): schemas, policies, intents, what the model reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from perdure.harness.tool import AnyTool, InvalidArguments, ToolCall, ToolError, ToolResult
from perdure.kernel.json import JsonValue
from perdure.tools.coding import CODING_TOOLS, bash, coding_tools, edit, read, write
from perdure.tools.local import LocalEnvironment


@pytest.fixture
def env(tmp_path: Path) -> LocalEnvironment:
    (tmp_path / "work").mkdir()
    return LocalEnvironment(tmp_path / "work", output_dir=tmp_path / "outputs")


def values(tool: AnyTool, arguments: JsonValue) -> dict[str, object]:
    return tool.signature.values(arguments)


async def run(tool: AnyTool, env: LocalEnvironment, arguments: JsonValue, call: ToolCall | None = None) -> ToolResult:
    """As the pipeline does it: the intent first, then the function."""
    given = values(tool, arguments)
    if call is None:
        call = ToolCall(name=tool.name)
        call.intent = await tool.prepare_intent(given, call, env)
    result = tool.to_result(await tool.run(given, call, env))
    tool.check_result(result)
    return result


def test_what_each_tool_declares() -> None:
    declared = {tool.name: (tool.replay, tool.effects_of({}), tool.adoptable, tool.sequential) for tool in CODING_TOOLS}
    assert declared == {
        "read": ("safe", "read", False, False),
        "write": ("safe", "space", False, True),
        "edit": ("safe", "space", False, True),
        "ls": ("safe", "read", False, False),
        "find": ("safe", "read", False, False),
        "grep": ("safe", "read", False, False),
        "bash": ("unsafe", "space", True, True),
        "bash_output": ("safe", "read", False, False),
        "bash_stop": ("safe", "space", True, True),
    }


def test_the_extension_has_them_all() -> None:
    extension = coding_tools()
    names = ["read", "write", "edit", "ls", "find", "grep", "bash", "bash_output", "bash_stop"]
    assert (extension.name, [tool.name for tool in extension.tools]) == ("coding", names)


def test_it_may_have_some_of_them() -> None:
    assert [tool.name for tool in coding_tools("grep", "read").tools] == ["grep", "read"]
    with pytest.raises(ValueError, match="find, grep, bash, bash_output, bash_stop, each once: there is no 'rm'"):
        coding_tools("read", "rm")
    with pytest.raises(ValueError, match="a name comes twice"):
        coding_tools("read", "read")


def test_every_parameter_is_described() -> None:
    def check(schema: dict[str, Any]) -> None:
        for name, parameter in schema["properties"].items():
            assert parameter.get("description"), name
        assert schema["additionalProperties"] is False

    for tool in CODING_TOOLS:
        assert tool.description
        schema = json.loads(bytes(tool.spec.parameters))
        assert "environment" not in schema["properties"]
        assert "call" not in schema["properties"]
        check(schema)
        for definition in schema.get("$defs", {}).values():
            check(definition)


async def test_the_tools_work_together(env: LocalEnvironment) -> None:
    await run(write, env, {"path": "f.py", "content": "print('one')\nprint('two')\n"})
    change: JsonValue = {"path": "f.py", "edits": [{"old_text": "two", "new_text": "three"}]}
    edited = await run(edit, env, change)
    assert isinstance(edited.details, dict)
    assert edited.details["first_line"] == 2
    assert (await run(read, env, {"path": "f.py", "offset": 2})).text == "print('three')\n"
    call = ToolCall(name="bash")
    ran = await run(bash, env, {"command": "cat f.py"}, call)
    assert (ran.text, ran.is_error) == ("print('one')\nprint('three')\n", False)
    assert call.stream.end().text == ran.text


async def test_an_edit_rerun_with_its_stored_intent_does_it_once(env: LocalEnvironment) -> None:
    await env.write_file("f", b"a\n")
    arguments: JsonValue = {"path": "f", "edits": [{"old_text": "a", "new_text": "aa"}]}
    intent = await edit.prepare_intent(values(edit, arguments), ToolCall(), env)
    stored = msgspec.json.decode(msgspec.json.encode(intent))
    first = await run(edit, env, arguments, ToolCall(intent=stored))
    again = await run(edit, env, arguments, ToolCall(intent=stored, attempt=2))
    assert again == first
    assert await env.read_file("f") == b"aa\n"


async def test_an_edit_that_does_not_apply_has_no_intent(env: LocalEnvironment) -> None:
    await env.write_file("f", b"a\n")
    given = values(edit, {"path": "f", "edits": [{"old_text": "b", "new_text": "c"}]})
    with pytest.raises(ToolError, match="old_text does not occur"):
        await edit.prepare_intent(given, ToolCall(), env)


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        (read, {"path": "none"}, "none: does not exist"),
        (read, {"path": "../secret"}, "leads out of the workspace"),
        (write, {"path": "/etc/motd", "content": ""}, "leads out of the workspace"),
        (bash, {"command": "true", "timeout": -1}, "time-out"),
    ],
)
async def test_what_the_environment_refuses_the_model_reads(
    env: LocalEnvironment, tool: AnyTool, arguments: JsonValue, message: str
) -> None:
    with pytest.raises(ToolError, match=message):
        await run(tool, env, arguments)


def test_an_edit_with_options_that_do_not_exist_is_refused() -> None:
    with pytest.raises(InvalidArguments, match="replace_all"):
        values(edit, {"path": "f", "edits": [{"old_text": "a", "new_text": "b", "replace_all": True}]})


async def test_a_failed_command_is_an_error_with_its_output(env: LocalEnvironment) -> None:
    result = await run(bash, env, {"command": "echo oops; exit 3"})
    assert (result.text, result.is_error) == ("oops\n[Exit code 3.]", True)
    assert isinstance(result.details, dict)
    assert result.details["exit_code"] == 3
