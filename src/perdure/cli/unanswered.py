"""Inputs that ended without an answer, and why: told beside what was said (rule H41)."""

from __future__ import annotations

from typing import Final

from perdure.cli.style import Line, line
from perdure.cli.text import counted, one_line, shortened, when
from perdure.harness.documents import USER
from perdure.kernel.records import EntryRecord, SubmissionRecord
from perdure.kernel.session import Session
from perdure.kernel.storage import MAX_SCAN

MOST_NAMED: Final = 10
"""Inputs that were never placed and are named one by one."""
WIDEST: Final = 500
"""Characters of a reason."""


class Unanswered:
    """Those of the conversations that are shown, each read once. Costs what ended unanswered there."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: dict[int, dict[int | None, list[SubmissionRecord]]] = {}
        """By conversation and by the entry that each became, if any."""

    async def lines(self, entry: EntryRecord) -> list[Line]:
        """What is to be said below an entry: nothing, but of an input that has no answer and gets none."""
        if entry.kind != USER:
            return []
        of = await self._of(entry.conversation_id)  # a fork shows entries of others
        return [line(f"  ✗ no answer: {why(record)}", "warning") for record in of.get(entry.id, ())]

    async def never_placed(self, conversation: int, since: int) -> list[Line]:
        """Those that became no entry, of which nothing but this is kept, from the id ``since`` on."""
        gone = [each for each in (await self._of(conversation)).get(None, ()) if each.id >= since]
        shown = [
            line(f"— input {each.id} of {when(each.created_at)} was never placed: {why(each)}", "warning")
            for each in gone[-MOST_NAMED:]
        ]
        more = len(gone) - len(shown)
        return [line(f"  ┆ {counted(more, 'earlier input')} never placed", "dim"), *shown] if more else shown

    async def _of(self, conversation: int) -> dict[int | None, list[SubmissionRecord]]:
        if conversation not in self._known:
            found: dict[int | None, list[SubmissionRecord]] = {}
            after = 0
            while True:
                page = await self._session.submissions(
                    conversation_id=conversation, status="unanswered", after=after, limit=MAX_SCAN
                )
                for record in page:
                    if record.type == "input":
                        found.setdefault(record.entry, []).append(record)
                if len(page) < MAX_SCAN:
                    break
                after = page[-1].id
            self._known[conversation] = found
        return self._known[conversation]


def why(record: SubmissionRecord) -> str:
    """The reason, and what is known beyond it."""
    words = record.reason or "unknown"
    return shortened(one_line(f"{words}: {record.detail}".replace("\n", " ") if record.detail else words), WIDEST)
