"""Running a shell command in any execution environment: what the tool of this name does.

Its answer depends on the command's exit and output alone, so that an environment which knows both may answer for a
command that already ran.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from perdure.harness.environment import CommandNotStarted, ExecResult, ExecutionEnvironment
from perdure.harness.output import DEFAULT_LIMIT_BYTES, DEFAULT_LIMIT_LINES, OutputWindow, Window
from perdure.kernel.json import JsonValue
from perdure.tools.command import MOST_OUTPUT

DEFAULT_TIMEOUT_S = 600
MAX_TIMEOUT_S = 24 * 3600
MAX_COMMAND = 130_000
"""Bytes of a command line; a little less than the system takes as one argument."""
NOTES_BYTES = 1024
NOTES_LINES = 4
"""What a result leaves to notes, so that notes and window together keep the limits of a result."""


@dataclass(frozen=True, slots=True)
class CommandAnswer:
    text: str
    details: dict[str, JsonValue]
    failed: bool
    """It did not exit with 0."""


async def bash(
    environment: ExecutionEnvironment,
    command: str,
    *,
    timeout_s: float | None = None,
    on_output: Callable[[bytes], None] | None = None,
) -> CommandAnswer:
    """Run it and show the end of its output. ``on_output`` gets the output as it comes.

    Raises what the environment's ``exec`` raises; CommandNotStarted also for a command line or a time-out that is none.
    """
    check_command(command)
    seconds = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise CommandNotStarted(f"a time-out is more than 0 and at most {MAX_TIMEOUT_S} seconds, not {seconds:g}")
    window = OutputWindow(
        limit_bytes=DEFAULT_LIMIT_BYTES - NOTES_BYTES, limit_lines=DEFAULT_LIMIT_LINES - NOTES_LINES, keep="tail"
    )

    def take(chunk: bytes) -> None:
        window.feed(chunk)
        if on_output is not None:
            on_output(chunk)

    result = await environment.exec(command, timeout_ms=max(1, round(seconds * 1000)), on_output=take)
    shown = window.window()
    details: dict[str, JsonValue] = {
        "exit_code": result.exit_code,
        "signal": result.signal,
        "timed_out": result.timed_out,
        "output_limit": result.output_limit,
        "duration_ms": result.duration_ms,
        "output_bytes": shown.total_bytes,
        "output_lines": shown.total_lines,
        "dropped_bytes": shown.dropped_bytes,
        "dropped_lines": shown.dropped_lines,
        "output_path": None if shown.complete else result.output_path,
    }
    failed = result.timed_out or result.output_limit or result.exit_code != 0
    return CommandAnswer(_text(result, shown, seconds), details, failed)


def check_command(command: str) -> None:
    """Raises CommandNotStarted for what no shell is given."""
    size = len(command.encode("utf-8", "surrogateescape"))
    if not command.strip() or "\0" in command:
        raise CommandNotStarted("a command line is not empty and has no NUL byte")
    if size > MAX_COMMAND:
        raise CommandNotStarted(
            f"a command line of {size} bytes is longer than the {MAX_COMMAND} it can have; write a file and run that"
        )


def _text(result: ExecResult, shown: Window, seconds: float) -> str:
    notes: list[str] = []
    if not shown.complete:
        notes.append(_left_out(result, shown))
    if result.timed_out:
        notes.append(f"[Timed out after {seconds:g} seconds; the command was stopped.]")
    elif result.output_limit:
        notes.append(f"[It wrote more than {MOST_OUTPUT >> 20} MiB; the command was stopped.]")
    elif result.signal is not None:
        notes.append(f"[Ended by signal {result.signal}.]")
    elif result.exit_code is None:
        notes.append("[How it ended is not known: something else in the host process took its exit status.]")
    elif result.exit_code:
        notes.append(f"[Exit code {result.exit_code}.]")
    elif not shown.total_bytes:
        notes.append("[No output.]")
    if not notes:
        return shown.text
    text = shown.text if shown.text.endswith("\n") or not shown.text else shown.text + "\n"
    return text + "\n".join(notes)


def _left_out(result: ExecResult, shown: Window) -> str:
    if shown.cut_line:
        what = f"the end of the last line of {shown.total_lines} is shown"
    else:
        what = f"the last {shown.shown_lines} of {shown.total_lines} lines are shown"
    note = f"[Output too large: {what}, {shown.dropped_bytes} bytes before that are not."
    if result.output_path is None or not result.output_kept:
        return note + "]"
    if result.output_kept < result.output_bytes:
        return f"{note} Its first {result.output_kept} bytes are in {result.output_path}.]"
    return f"{note} The complete output is in {result.output_path}.]"
