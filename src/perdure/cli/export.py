"""``perdure export``: conversations as JSON lines or as Markdown, a page of entries in memory at a time."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from perdure.cli.errors import CommandError
from perdure.cli.stores import chosen, looking
from perdure.harness.export import ExportFormat, exported
from perdure.kernel.records import ConversationRecord
from perdure.kernel.session import Session
from perdure.kernel.storage import MAX_SCAN


async def export(
    path: Path, *, format: ExportFormat, conversation: str | None, everything: bool, output: Path | None
) -> None:
    """Write to ``output``, a new file of mode 0600, or to standard output."""
    async with looking(path) as session:
        only = None if everything else await chosen(session, conversation)
        with _target(output) as file:
            async for record in _conversations(session, only):
                async for text in exported(session, record, format):
                    file.write(text)


async def _conversations(session: Session, only: ConversationRecord | None) -> AsyncGenerator[ConversationRecord]:
    if only is not None:
        yield only
        return
    after = 0
    while page := await session.conversations(after=after, limit=MAX_SCAN):
        for record in page:
            yield record
        after = page[-1].id


@contextmanager
def _target(output: Path | None) -> Generator[TextIO]:
    """Where it goes. A file that could not be written to its end is taken away again."""
    if output is None:
        with open(1, "w", encoding="utf-8", closefd=False) as file:
            yield file
        return
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise CommandError(f"{output} is there already; export to a path where nothing is") from None
    except OSError as error:
        raise CommandError(f"{output} cannot be made ({error.strerror})") from error
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            yield file
    except BaseException:
        output.unlink(missing_ok=True)
        raise
