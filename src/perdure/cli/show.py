"""``perdure show``: what was said in a conversation, page by page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import typer

from perdure.cli.compactions import compaction_lines
from perdure.cli.deferred import deferred_line
from perdure.cli.entries import Call, calls_of, entry_lines, heading, running_lines
from perdure.cli.secrets import Secrets
from perdure.cli.stores import chosen, looking, name_of
from perdure.cli.style import Colours, Line, line, rendered
from perdure.cli.text import lines_of, printable
from perdure.cli.unanswered import Unanswered
from perdure.harness.documents import TOOL_RESULT, Live, ToolResultData
from perdure.harness.export import entries_of
from perdure.kernel.errors import DocumentVersionError
from perdure.kernel.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of all entries there are, whatever the model's context is (rule K230)."""

    before: int | None
    """The newest ones before this entry; the newest of all, if ``after`` is not given either."""
    after: int | None
    """The oldest ones after this entry."""
    limit: int


async def show(
    path: Path,
    *,
    conversation: str | None,
    window: int,
    everything: bool,
    page: Page | None = None,
    colours: Colours,
    as_json: bool,
) -> None:
    """Print the newest ``window`` entries of the active transcript, all entries there ever were, or a page of them."""
    async with looking(path) as session:
        record = await chosen(session, conversation)
        if page is not None:
            await _show_page(session, record.id, page, colours=colours, as_json=as_json)
            return
        first, left_out = (0, False) if everything else await _start(session, record.id, window)
        if not as_json:
            name = await name_of(session, record.id)
            title = f"conversation {record.id}{f' “{printable(name)}”' if name else ''} in {printable(str(path))}"
            _echo([line(title, "bold")], colours)
            if left_out:
                _echo([line("  ┆ earlier entries: --all", "dim")], colours)
        calls: dict[int, Call] = {}
        unanswered = Unanswered(session)
        async for entry in entries_of(session, record.id, first=first):
            if as_json:
                typer.echo(msgspec.json.encode(entry).decode())
                continue
            calls.update(calls_of(entry))
            _echo([*entry_lines(entry, calls), *await unanswered.lines(entry)], colours)
            if entry.kind == TOOL_RESULT:
                calls.pop(entry.data_as(ToolResultData).task, None)
        if not as_json:
            _echo(await unanswered.never_placed(record.id, first), colours)
        live = None if as_json else await _live(session, record.id)
        if live is not None and live.run is not None:
            _echo([line("— a run is under way", "warning"), *_under_way(live, calls)], colours)
        if live is not None:
            _echo([line(f"— {words}", "warning") for words in compaction_lines(live)], colours)


async def _show_page(session: Session, conversation: int, page: Page, *, colours: Colours, as_json: bool) -> None:
    """Print a page, oldest first, and by which cursors one goes on from it."""
    if page.after is not None:
        found = await session.entries(conversation, first=page.after + 1, limit=page.limit)
    else:
        last = None if page.before is None else page.before - 1
        found = (await session.entries(conversation, last=last, order="descending", limit=page.limit))[::-1]
    if as_json:
        for entry in found:
            typer.echo(msgspec.json.encode(entry).decode())
        return
    if not found:
        _echo([line("no entries there", "dim")], colours)
        return
    first, last = found[0].id, found[-1].id
    if await session.entries(conversation, last=first - 1, order="descending", limit=1):
        _echo([line(f"  ┆ earlier entries: --before {first}", "dim")], colours)
    calls: dict[int, Call] = {}
    unanswered = Unanswered(session)
    for entry in found:
        calls.update(calls_of(entry))
        _echo([*entry_lines(entry, calls), *await unanswered.lines(entry)], colours)
    if await session.entries(conversation, first=last + 1, limit=1):
        _echo([line(f"  ┆ later entries: --after {last}", "dim")], colours)


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
    if live.deferred is not None:
        lines.append(line(f"— {deferred_line(live.deferred)}", "warning"))
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
