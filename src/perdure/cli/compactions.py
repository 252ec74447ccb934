"""What a conversation's compactions look like to people, in one line each."""

from __future__ import annotations

from typing import Final

from perdure.cli.text import one_line, shortened, when
from perdure.harness.documents import CompactionFailure, CompactionReason, Live, LiveCompaction

WIDEST: Final = 200
"""Characters of what a provider said."""

_WHY: Final[dict[CompactionReason, str]] = {
    "manual": "as somebody asked",
    "background": "in the background",
    "threshold": "and a run waits for it",
    "overflow": "and a run waits for it: the provider found it too long",
}


def compaction_lines(live: Live) -> list[str]:
    """Those on their way, and the failure of the last one."""
    lines = [_under_way(task, live.compactions[task]) for task in sorted(live.compactions, key=int)]
    if live.compaction_failure is not None:
        lines.append(_failed(live.compaction_failure))
    return lines


def _under_way(task: str, compaction: LiveCompaction) -> str:
    line = f"task {task} sums up the context, {_WHY[compaction['reason']]}"
    if compaction["until"] is None:
        return line if compaction["attempt"] == 1 else f"{line} (attempt {compaction['attempt']})"
    said = _said(compaction["code"] or "failed", compaction["message"] or "")
    return f"{line}; attempt {compaction['attempt']} at {when(compaction['until'])}, for {said}"


def _failed(failure: CompactionFailure) -> str:
    return f"the compaction of {when(failure['at'])} failed: {_said(failure['code'], failure['message'])}"


def _said(code: str, message: str) -> str:
    return shortened(one_line(f"{code}: {message}".replace("\n", " ")) if message else code, WIDEST)
