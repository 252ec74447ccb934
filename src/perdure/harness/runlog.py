"""What settled commits say to the log: of commits, tasks, runs and calls (rule H288). Ids, kinds, phases and codes.

At INFO ``perdure.runs`` tells how a run ended, that one goes on after a restart, and each retry;
``perdure.compactions`` how one ended; ``perdure.calls`` what was decided about a call that had been cut off. At DEBUG
there is a line a commit (``perdure.commits``), a task that moved (``perdure.tasks``) and a call that ended. Reports are
warnings of ``perdure`` itself.
"""

from __future__ import annotations

import logging
from contextlib import suppress

import msgspec

from perdure.harness.documents import COMPACTION, TOOL_RESULT
from perdure.harness.runs import GENERATION
from perdure.harness.scopes import TOOL_TASK
from perdure.kernel.records import Completing, Failed, Running, SubmissionRecord, TaskRecord, Terminal
from perdure.kernel.session import Session, Settled

_commits = logging.getLogger("perdure.commits")
_tasks = logging.getLogger("perdure.tasks")
_runs = logging.getLogger("perdure.runs")
_calls = logging.getLogger("perdure.calls")
_compactions = logging.getLogger("perdure.compactions")


class _Result(msgspec.Struct, frozen=True):
    """What of a ``pi.tool-result`` is told."""

    is_error: bool = False
    code: str | None = None


def inputs_of(record: TaskRecord, settled: Settled) -> list[SubmissionRecord]:
    """The inputs that the end of a run settled; not those that its failure withdrew."""
    return [
        submission
        for submission in settled.batch.submissions
        if submission.conversation_id == record.conversation_id
        and submission.type == "input"
        and submission.settled
        and submission.reason != "run_failed"
    ]


def ending_of(record: TaskRecord, settled: Settled) -> str:
    """How a run ended: ``answered``, or the reason that its inputs have."""
    for submission in inputs_of(record, settled):
        return "answered" if submission.status == "done" else submission.reason or "unanswered"
    return outcome_of(record)


def outcome_of(record: TaskRecord) -> str:
    """``completed``, ``failed``, ``aborted``, ``faulted`` or ``orphaned``."""
    return type(record.outcome).__name__.lower()


def code_of(record: TaskRecord, settled: Settled) -> str:
    """How a call ended: ``ok``, ``error`` if the tool says so itself, or the code that the harness gave (H101)."""
    for entry in settled.batch.entries:
        if entry.by_task == record.id and entry.kind == TOOL_RESULT:
            result = msgspec.json.decode(entry.raw_data, type=_Result)
            return result.code or ("error" if result.is_error else "ok")
    return outcome_of(record)


def failure_code(record: TaskRecord) -> str | None:
    """The code of a built-in task that failed."""
    return record.outcome.error.code if isinstance(record.outcome, Failed) else None


_LEVELS = (
    (_runs, logging.INFO),
    (_compactions, logging.INFO),
    (_calls, logging.DEBUG),
    (_tasks, logging.DEBUG),
    (_commits, logging.DEBUG),
)
"""What this module tells at all; each logger may be set up by itself."""


class RunLog:
    """An observer of the session. It costs five tests a commit where nobody wants a line."""

    def __init__(self, session: Session) -> None:
        self._found = {record.id for record in session.live.settled.values() if record.kind == GENERATION}
        """Runs of earlier processes that were not taken up yet."""
        session.observe(self._observe)

    def _observe(self, settled: Settled) -> None:
        for logger, level in _LEVELS:
            if logger.isEnabledFor(level):
                with suppress(Exception):  # a filter of the host's; the commit has settled
                    self._tell(settled)
                return

    def _tell(self, settled: Settled) -> None:
        batch = settled.batch
        _commits.debug(
            "commit seq=%d entries=%d tasks=%d submissions=%d documents=%d progress=%s",
            settled.seq,
            len(batch.entries),
            len(batch.tasks),
            len(batch.submissions),
            len(batch.documents),
            batch.progress,
        )
        calls, tasks = _calls.isEnabledFor(logging.DEBUG), _tasks.isEnabledFor(logging.DEBUG)
        for record in batch.tasks:
            if tasks:
                state = record.state
                phase = "-" if isinstance(state, (Completing, Terminal)) else state.phase
                _tasks.debug("task=%d kind=%s status=%s phase=%s", record.id, record.kind, record.status, phase)
            if record.kind == GENERATION:
                self._tell_run(record, settled)
            elif record.kind == COMPACTION and type(record.state) is Terminal:
                _compactions.info(
                    "compaction ended task=%d conversation=%d outcome=%s code=%s seq=%d",
                    record.id,
                    record.conversation_id,
                    outcome_of(record),
                    failure_code(record),
                    settled.seq,
                )
            elif calls and record.kind == TOOL_TASK and type(record.state) is Terminal:
                _calls.debug("call ended task=%d code=%s", record.id, code_of(record, settled))

    def _tell_run(self, record: TaskRecord, settled: Settled) -> None:
        if type(record.state) is Terminal:
            self._found.discard(record.id)
            _runs.info(
                "run ended task=%d conversation=%d reason=%s submissions=%s seq=%d",
                record.id,
                record.conversation_id,
                ending_of(record, settled),
                ",".join(str(submission.id) for submission in inputs_of(record, settled)),
                settled.seq,
            )
        elif type(record.state) is Running and record.id in self._found:
            self._found.discard(record.id)
            _runs.info(
                "run goes on task=%d conversation=%d phase=%s restarts=%d",
                record.id,
                record.conversation_id,
                record.state.phase,
                record.restarts,
            )
