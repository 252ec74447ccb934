"""``perdure show``: what was said in a conversation, page by page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import typer

from perdure.cli.entries import Call, calls_of, entry_lines, heading, running_lines
from perdure.cli.secrets import Secrets
from perdure.cli.stores import chosen, looking, name_of
from perdure.cli.style import Colours, Line, line, rendered
from perdure.cli.text import lines_of, printable
from perdure.harness.documents import TOOL_RESULT, Live, ToolResultData
from perdure.harness.export import entries_of
from perdure.kernel.errors import DocumentVersionError
from perdure.kernel.session import Session


async def show(
    path: Path, *, conversation: str | None, window: int, everything: bool, colours: Colours, as_json: bool
) -> None:
    """Print the newest ``window`` entries of the active transcript, or all entries there ever were."""
    async with looking(path) as session:
        record = await chosen(session, conversation)
        first, left_out = (0, False) if everything else await _start(session, record.id, window)
        if not as_json:
            name = await name_of(session, record.id)
            title = f"conversation {record.id}{f' “{printable(name)}”' if name else ''} in {printable(str(path))}"
            _echo([line(title, "bold")], colours)
            if left_out:
                _echo([line("  ┆ earlier entries: --all", "dim")], colours)
        calls: dict[int, Call] = {}
        async for entry in entries_of(session, record.id, first=first):
            if as_json:
                typer.echo(msgspec.json.encode(entry).decode())
                continue
            calls.update(calls_of(entry))
            _echo(entry_lines(entry, calls), colours)
            if entry.kind == TOOL_RESULT:
                calls.pop(entry.data_as(ToolResultData).task, None)
        live = None if as_json else await _live(session, record.id)
        if live is not None and live.run is not None:
            _echo([line("— a run is under way", "warning"), *_under_way(live, calls)], colours)


async def _start(session: Session, conversation: int, window: int) -> tuple[int, bool]:
    """From which entry on, and whether the active transcript has earlier ones."""
    head = await session.head(conversation)
    begins = 0 if head is None or head.head is None else head.head
    newest = await session.entries(conversation, first=begins, order="descending", limit=window + 1)
    if len(newest) <= window:
        return begins, begins > 0
    return newest[window - 1].id, True


async def _live(session: Session, conversation: int) -> Live | None:
    try:
        return await session.snapshot(Live, conversation=conversation)
    except DocumentVersionError:  # written by a newer release
        return None


def _under_way(live: Live, calls: Mapping[int, Call]) -> list[Line]:
    """What is stored of an answer on its way, and the calls that are open, with the end of their output."""
    lines: list[Line] = []
    for part in () if live.message is None else live.message["content"]:
        if part["type"] == "tool_call":
            lines.append(heading(Call(part["name"])))  # its arguments are not whole yet
        else:
            lines += [line(text, "dim" if part["type"] == "thinking" else "plain") for text in lines_of(part["text"])]
    for task, tool in live.tools.items():
        lines += [heading(calls.get(int(task), Call(tool["name"]))), *running_lines(tool)]
    return lines


def _echo(lines: list[Line], colours: Colours) -> None:
    for each in lines:
        typer.echo(_secrets.hide(rendered(each, colours)), color=True)


_secrets = Secrets()
