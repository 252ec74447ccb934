"""What a store has of its Spaces, in lines: how far each one is, and how calls that were cut off went on."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Final

import msgspec

from perdure.cli.errors import CommandError
from perdure.harness.documents import TOOL_RESULT, ToolInput, ToolResultData
from perdure.kernel.errors import DocumentVersionError
from perdure.kernel.session import Session
from perdure.kernel.storage import MAX_SCAN
from perdure.spaces import image, logged
from perdure.spaces.documents import RecoveryKind, RecoveryNote
from perdure.spaces.image import File
from perdure.spaces.logged import LoggedSpace

MOST_PAGES: Final = 5
"""Pages of a conversation's newest entries in which results are looked for."""


class SpaceLine(msgspec.Struct, frozen=True, kw_only=True):
    """How far a Space is, as its log has it."""

    name: str
    generation: int
    """That a driver was last connected to; 0: none was yet."""
    image: int
    """Number of the image; 0: there is none yet."""
    files: int
    bytes: int
    calls: int
    """How many have had it."""
    external: int
    """How many images came from changes that no call made, the first one included."""
    recovered: int
    """How many recoveries are listed."""
    open: int | None
    """The call that has it now."""
    attempt: int | None
    tool: str | None


class RecoveryLine(msgspec.Struct, frozen=True, kw_only=True):
    """How a call that was cut off went on, or why the workspace was restored."""

    at: int
    """Ms UTC."""
    space: str
    call: int | None
    """None: it was no call's."""
    tool: str | None
    attempt: int
    went_on: RecoveryKind
    why: str
    result: str | None
    """How the call ended in the end: done, failed, or the code of an error. None: it is open, or not among the newest
    entries."""


async def space_lines(session: Session) -> tuple[list[SpaceLine], list[RecoveryLine]]:
    """Of every Space of a log, the recoveries with the oldest first."""
    lines: list[SpaceLine] = []
    recoveries: list[RecoveryLine] = []
    for name in await logged.names(session):
        try:
            space = await logged.read(session, name)
        except DocumentVersionError:  # written by a newer release; the others can still be told
            continue
        if space is not None:
            lines.append(await space_line(session, space))
            recoveries += await recovery_lines(session, space)
    return lines, sorted(recoveries, key=lambda line: line.at)


async def space_line(session: Session, space: LoggedSpace) -> SpaceLine:
    state = space.state
    files = [change.entry for change in image.entries(space.tree) if isinstance(change.entry, File)]
    return SpaceLine(
        name=space.name,
        generation=state.generation,
        image=state.image,
        files=len(files),
        bytes=sum(file.size for file in files),
        calls=state.calls,
        external=state.external,
        recovered=len(state.recoveries),
        open=None if state.open is None else state.open.call,
        attempt=None if state.open is None else state.open.attempt,
        tool=None if state.open is None else await _tool(session, state.open.call),
    )


async def recovery_lines(session: Session, space: LoggedSpace) -> list[RecoveryLine]:
    notes = list(space.state.recoveries)
    results = await _results(session, {note["call"] for note in notes if note["call"] is not None})
    return [await _recovery(session, space.name, note, results) for note in notes]


async def _recovery(session: Session, space: str, note: RecoveryNote, results: dict[int, str]) -> RecoveryLine:
    call = note["call"]
    return RecoveryLine(
        at=note["at"],
        space=space,
        call=call,
        tool=None if call is None else await _tool(session, call),
        attempt=note["attempt"],
        went_on=note["kind"],
        why=note["why"],
        result=None if call is None else results.get(call),
    )


async def _tool(session: Session, call: int) -> str | None:
    record = await session.task(call)
    if record is not None:
        with suppress(msgspec.MsgspecError):  # written by a newer release
            return msgspec.json.decode(record.raw_input, type=ToolInput).name
    return None  # deleted with its conversation


async def _results(session: Session, calls: Collection[int]) -> dict[int, str]:
    """How these calls ended, as far as their results are among the newest entries of their conversations."""
    wanted: dict[int, set[int]] = {}
    for call in calls:
        record = await session.task(call)
        if record is not None:
            wanted.setdefault(record.conversation_id, set()).add(call)
    found: dict[int, str] = {}
    for conversation, left in wanted.items():
        last: int | None = None
        for _ in range(MOST_PAGES):
            page = await session.entries(conversation, order="descending", last=last, limit=MAX_SCAN)
            for entry in page:
                if entry.kind == TOOL_RESULT:
                    with suppress(msgspec.MsgspecError):  # written by a newer release
                        data = entry.data_as(ToolResultData)
                        if data.task in left:
                            found[data.task] = data.code or ("failed" if data.is_error else "done")
            if len(page) < MAX_SCAN or left <= found.keys():
                break
            last = page[-1].id - 1
    return found


async def chosen_space(session: Session, wanted: str | None) -> LoggedSpace:
    """The Space of a store that a user means: by its name, or the only one. Raises CommandError."""
    known = await logged.names(session)
    name = wanted if wanted is not None else known[0] if len(known) == 1 else None
    if name is None:
        raise CommandError(
            f"the store has several Spaces: {', '.join(known)}; say which with --name" if known
            else "the store has no Space: no call of its conversations was made in one yet"
        )  # fmt: skip
    space = await logged.read(session, name) if name in known else None
    if space is None:
        raise CommandError(f"the store has no Space named {name!r}; it has {', '.join(known) or 'none'}")
    return space
