"""Commands in the background of any execution environment: what bash with ``background``, bash_output and bash_stop do.

What a result says of a command is told by the environment, which knows it after a crash too (rules H366 to H369).
"""

from __future__ import annotations

from typing import Literal

from perdure.harness.environment import BackgroundCommand, ExecutionEnvironment
from perdure.harness.tool import ToolError
from perdure.kernel.json import JsonValue
from perdure.tools.background import MOST_WAIT_MS
from perdure.tools.bash import check_command
from perdure.tools.files import Answer
from perdure.tools.looking import quoted

_SHOWN_BYTES = 48 * 1024
_SHOWN_LINES = 1990


async def start(environment: ExecutionEnvironment, command: str) -> Answer:
    check_command(command)
    started = await environment.start_background(command)
    # Where it is found running after a crash the result is to be the same: nothing of its state is in it.
    text = (
        f"Started in the background with the id {started.id}. bash_output(id={started.id!r}) shows what it writes, "
        f"bash_stop(id={started.id!r}) ends it."
    )
    return Answer(text, {"id": started.id})


async def listed(environment: ExecutionEnvironment) -> Answer:
    commands = await environment.background()
    lines = [f"{command.id}  {_state(command)}  {quoted(command.command)}" for command in commands]
    return Answer("\n".join(lines) or "[None.]", {"commands": [_details(command) for command in commands]})


async def output(
    environment: ExecutionEnvironment,
    id: str,
    *,
    offset: int | None = None,
    wait_s: float = 0,
    until: Literal["exit", "output"] = "exit",
) -> Answer:
    """Its output from ``offset``, or the end of it, as much as a result holds."""
    if not 0 <= wait_s <= MOST_WAIT_MS / 1000 or (offset is not None and offset < 0):
        raise ToolError(f"offset is 0 or more and wait 0 to {MOST_WAIT_MS // 1000} seconds, not {offset} and {wait_s}")
    first = offset
    if first is None or wait_s:
        seen, _ = await environment.read_background(id)
        first = seen.output_bytes if first is None else first
        if wait_s:
            seen, _ = await environment.read_background(
                id, offset=first, wait_ms=round(wait_s * 1000), until_exit=until == "exit"
            )
        if offset is None:
            first = max(0, seen.output_bytes - _SHOWN_BYTES)
    command, data = await environment.read_background(id, offset=first, length=_SHOWN_BYTES)
    if offset is None:
        start = _last_lines(data, cut=first > 0)
        first, data = first + start, data[start:]
    shown = _whole_lines(data, more=command.state == "running" or first + len(data) < command.output_bytes)
    after = first + len(shown)
    details = _details(command)
    details |= {"offset": first, "next_offset": after}
    text = shown.decode("utf-8", "replace")
    if text and not text.endswith("\n"):
        text += "\n"
    return Answer(text + _note(command, first, after), details)


async def stop(environment: ExecutionEnvironment, id: str) -> Answer:
    command = await environment.stop_background(id)
    return Answer(f"{command.id}: {_state(command)}.", _details(command))


def _last_lines(data: bytes, *, cut: bool) -> int:
    """Where the last lines begin that a result holds. ``cut``: the first line may be there in part."""
    at = len(data) - 1
    for _ in range(_SHOWN_LINES):
        at = data.rfind(b"\n", 0, max(0, at))
        if at < 0:
            return data.find(b"\n") + 1 if cut else 0
    return at + 1


def _whole_lines(data: bytes, *, more: bool) -> bytes:
    """What is shown of a range: so many lines, and no part of a line whose rest may still come, unless it is one."""
    at = -1
    for _ in range(_SHOWN_LINES):
        found = data.find(b"\n", at + 1)
        if found < 0:
            break
        at = found
    else:
        return data[: at + 1]
    return data[: at + 1] if more and at >= 0 else data


def _note(command: BackgroundCommand, first: int, after: int) -> str:
    part = f"bytes {first} to {after} of {command.output_bytes}" if command.output_bytes else "no output"
    on = f" Read on with offset={after}." if command.state == "running" or after < command.output_bytes else ""
    return f"[{command.id}: {_state(command)}; {part}.{on}]"


def _state(command: BackgroundCommand) -> str:
    state: str = command.state
    if command.state == "exited":
        state = "ended" if command.exit_code is None else f"exited with code {command.exit_code}"
        state = state if command.signal is None else f"ended by signal {command.signal}"
    return f"{state} ({command.reason})" if command.reason else state


def _details(command: BackgroundCommand) -> dict[str, JsonValue]:
    return {
        "id": command.id,
        "state": command.state,
        "exit_code": command.exit_code,
        "signal": command.signal,
        "output_bytes": command.output_bytes,
        "reason": command.reason,
    }
