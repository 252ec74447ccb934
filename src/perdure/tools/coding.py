"""The tools read, write, edit and bash, over whatever execution environment the conversation has."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Final

import msgspec

from perdure.harness.environment import CommandNotStarted, ExecutionEnvironment, FileError
from perdure.harness.output import OutputLimits
from perdure.harness.registry import Extension
from perdure.harness.tool import AnyTool, ToolCall, ToolError, ToolResult, tool
from perdure.kernel.json import JsonValue, decode_json
from perdure.tools import bash as command_logic
from perdure.tools import files
from perdure.tools.edits import Edit, EditIntent
from perdure.tools.files import Answer


@contextlib.contextmanager
def _for_the_model() -> Generator[None]:
    """What an environment refuses is the call's result."""
    try:
        yield
    except (FileError, CommandNotStarted) as error:
        raise ToolError(str(error)) from error


def _result(answer: Answer) -> ToolResult:
    return ToolResult(answer.content, details=answer.details)


@tool(replay="safe", effects="read", output=OutputLimits(keep="head"))
async def read(
    path: str, environment: ExecutionEnvironment, offset: int | None = None, limit: int | None = None
) -> ToolResult:
    """Read a text file, or look at an image (PNG, JPEG, GIF, WebP). Of a text at most 2000 lines and 50 KiB are shown
    at once; a note tells where to read on.

    Args:
        path: The file, relative to the working directory or absolute.
        offset: The line to begin at, counted from 1.
        limit: How many lines to read.
    """
    with _for_the_model():
        return _result(await files.read(environment, path, offset=offset, limit=limit))


@tool(replay="safe", effects="space", sequential=True)
async def write(path: str, content: str, environment: ExecutionEnvironment) -> ToolResult:
    """Create a file, or replace the whole content of an existing one. Missing directories are made.

    Args:
        path: The file, relative to the working directory or absolute.
        content: What the file is to contain.
    """
    with _for_the_model():
        return _result(await files.write(environment, path, content))


@tool(replay="safe", effects="space", sequential=True)
async def edit(path: str, edits: list[Edit], call: ToolCall, environment: ExecutionEnvironment) -> ToolResult:
    """Replace texts in a file. Every edit is matched against the file as it is now; all are made, or none. The result
    shows what was changed, as a diff.

    Args:
        path: The file, relative to the working directory or absolute.
        edits: What to replace. The texts to replace must not overlap.
    """
    with _for_the_model():
        return _result(await files.edit(environment, path, edits, msgspec.convert(call.intent, EditIntent)))


@edit.intent
async def plan(path: str, edits: list[Edit], environment: ExecutionEnvironment) -> JsonValue:
    """The hashes before and after, stored before anything is changed: a rerun sees whether it was done."""
    with _for_the_model():
        intent = await files.plan_edit(environment, path, edits)
    return decode_json(msgspec.json.encode(intent))


@tool(replay="unsafe", effects="space", adoptable=True, sequential=True)
async def bash(
    command: str, call: ToolCall, environment: ExecutionEnvironment, timeout: float | None = None
) -> ToolResult:
    """Run a bash command in the working directory and show its output (stdout and stderr together).

    The last 2000 lines or 50 KiB are shown; of a longer output all is kept in a file that is named. Do not count on
    what the command leaves running: to use a server, start and use it in one command.

    Args:
        command: The command line.
        timeout: Seconds after which the command is stopped. 600 if not given.
    """
    with _for_the_model():
        answer = await command_logic.bash(environment, command, timeout_s=timeout, on_output=call.output)
    return ToolResult(answer.text, details=answer.details, is_error=answer.failed)


CODING_TOOLS: Final[tuple[AnyTool, ...]] = (read, write, edit, bash)


def coding_tools() -> Extension:
    """The extension ``coding``: read, write, edit and bash, in the environment that the host gives a conversation."""
    return Extension("coding", tools=CODING_TOOLS)
