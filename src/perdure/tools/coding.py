"""The tools for files and commands, over whatever execution environment the conversation has (rules H115 and H178)."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from typing import Final, Literal

import msgspec

from perdure.harness.environment import CommandNotStarted, Effects, ExecutionEnvironment, FileError, NoSuchCommand
from perdure.harness.output import OutputLimits
from perdure.harness.registry import Extension
from perdure.harness.tool import AnyTool, ToolCall, ToolError, ToolResult, tool
from perdure.kernel.json import JsonValue, decode_json
from perdure.tools import bash as command_logic
from perdure.tools import files, in_background, looking
from perdure.tools.edits import Edit, EditIntent
from perdure.tools.files import Answer


@contextlib.contextmanager
def _for_the_model() -> Generator[None]:
    """What an environment refuses is the call's result."""
    try:
        yield
    except (FileError, CommandNotStarted, NoSuchCommand) as error:
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


@tool(replay="safe", effects="read", output=OutputLimits(keep="head"))
async def ls(environment: ExecutionEnvironment, path: str = ".", limit: int = looking.LISTED) -> ToolResult:
    """List a directory, by name. Directories end in /, symbolic links in @; files are followed by their size in bytes.
    A name that is not plain text is written as bash reads it: $'...'.

    Args:
        path: The directory, relative to the working directory or absolute.
        limit: How many names to show, at most 2000.
    """
    with _for_the_model():
        return _result(await looking.ls(environment, path, limit=limit))


@tool(replay="safe", effects="read", output=OutputLimits(keep="head"))
async def find(
    environment: ExecutionEnvironment,
    pattern: str | None = None,
    path: str = ".",
    type: Literal["file", "directory", "symlink"] | None = None,
    ignored: bool = False,
    limit: int = looking.FOUND,
) -> ToolResult:
    """Find files and directories below a directory. Symbolic links are not followed.

    Args:
        pattern: A glob for the name (*.{c,h}) or for the path below the directory (src/**/test_*.py). All if not given.
        path: The directory to search.
        type: Only these.
        ignored: Also .git and what .gitignore files name.
        limit: How many paths to show, at most 2000.
    """
    with _for_the_model():
        return _result(await looking.find(environment, path, pattern=pattern, kind=type, ignored=ignored, limit=limit))


@tool(replay="safe", effects="read", output=OutputLimits(keep="head"))
async def grep(
    pattern: str,
    environment: ExecutionEnvironment,
    path: str = ".",
    glob: str | None = None,
    ignore_case: bool = False,
    fixed: bool = False,
    context: int = 0,
    ignored: bool = False,
    limit: int = looking.MATCHES,
) -> ToolResult:
    """Search the lines of files: path:line:text for each that matches, path-line-text for those around it. Binary files
    and files above 8 MiB are left out, and so is what lies behind a symbolic link.

    Args:
        pattern: A regular expression (as in Python's re).
        path: A file, or a directory to search in.
        glob: Only files whose name (*.py) or path below the directory (src/**/*.py) it fits.
        ignore_case: Upper and lower case (of ASCII letters) are the same.
        fixed: The pattern is a text, not an expression.
        context: How many lines around each match to show, at most 20.
        ignored: Also .git and what .gitignore files name.
        limit: How many matches to show, at most 1000.
    """
    with _for_the_model():
        return _result(
            await looking.grep(
                environment, pattern, path=path, glob=glob, ignore_case=ignore_case, fixed=fixed, context=context,
                ignored=ignored, limit=limit,
            )
        )  # fmt: skip


def _of_command(arguments: Mapping[str, JsonValue]) -> Effects:
    return "world" if arguments.get("outside", False) else "space"


@tool(replay="unsafe", effects=_of_command, adoptable=True, sequential=True)
async def bash(
    command: str,
    call: ToolCall,
    environment: ExecutionEnvironment,
    timeout: float | None = None,
    background: bool = False,
    outside: bool = False,
) -> ToolResult:
    """Run a bash command in the working directory and show its output (stdout and stderr together).

    Each begins there in a new shell: cd and variables do not last. The last 2000 lines or 50 KiB are shown; of a longer
    output all is kept in a file that is named. What the command leaves running may be ended with it: run a server in
    the background.

    Args:
        command: The command line.
        timeout: Seconds after which the command is stopped. 600 if not given.
        background: Return at once, with an id for bash_output and bash_stop. At most 8 run at once. One that writes
            more than 64 MiB is stopped. It may be gone after an interruption; bash_output tells.
        outside: Say true if it changes anything elsewhere, like a push, an upload or a deployment: then it is not run
            again by itself after an interruption.
    """
    with _for_the_model():
        if background:
            if timeout is not None:
                raise CommandNotStarted("a command in the background has no time-out; stop it with bash_stop")
            return _result(await in_background.start(environment, command))
        answer = await command_logic.bash(environment, command, timeout_s=timeout, on_output=call.output)
    return ToolResult(answer.text, details=answer.details, is_error=answer.failed)


@tool(replay="safe", effects="read", output=OutputLimits(keep="head"))
async def bash_output(
    environment: ExecutionEnvironment,
    id: str | None = None,
    offset: int | None = None,
    wait: float = 0,
    until: Literal["exit", "output"] = "exit",
) -> ToolResult:
    """Show the state of a background command and what it wrote, or list them all.

    Args:
        id: Which one. All are listed if not given.
        offset: The byte of its output to begin at; each result tells where to read on. The end of the output if not
            given.
        wait: Seconds to wait while it runs, at most 600.
        until: What to wait for, its exit or output past the offset.
    """
    with _for_the_model():
        if not id:
            return _result(await in_background.listed(environment))
        return _result(await in_background.output(environment, id, offset=offset, wait_s=wait, until=until))


# It runs no command and changes no file: cut off, it is done again. An undo would kill all that runs in the background.
@tool(replay="safe", effects="space", adoptable=True, sequential=True)
async def bash_stop(id: str, environment: ExecutionEnvironment) -> ToolResult:
    """Stop a background command and all that it started.

    Args:
        id: Which one.
    """
    with _for_the_model():
        return _result(await in_background.stop(environment, id))


CODING_TOOLS: Final[tuple[AnyTool, ...]] = (
    read,
    write,
    edit,
    ls,
    find,
    grep,
    bash,
    bash_output,
    bash_stop,
)


def coding_tools(*names: str) -> Extension:
    """The extension ``coding``: tools for files and commands, in the environment that the host gives a conversation.

    ``names``: which of ``read``, ``write``, ``edit``, ``ls``, ``find``, ``grep``, ``bash``, ``bash_output`` and
    ``bash_stop``; all of them if none are given. Raises ValueError for another name, or one that comes twice.
    """
    known = {tool.name: tool for tool in CODING_TOOLS}
    wrong = [name for name in names if name not in known]
    if wrong or len(set(names)) < len(names):
        what = f"there is no {', '.join(map(repr, wrong))}" if wrong else "a name comes twice"
        raise ValueError(f"coding_tools takes any of {', '.join(known)}, each once: {what}")
    return Extension("coding", tools=[known[name] for name in names] if names else CODING_TOOLS)
