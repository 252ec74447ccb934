"""Handles on what was submitted: its status, the wait for it, its answer (rules H20 to H23, H37 to H41, H53)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar, overload

import msgspec

from perdure.harness.documents import TOOL_RESULT, AssistantData
from perdure.harness.inbox import withdraw_one
from perdure.harness.messages import AssistantMessage, decode_messages
from perdure.harness.parse import CannotParse, parse_answer
from perdure.harness.runs import GENERATION
from perdure.kernel.context import Context, bounded
from perdure.kernel.errors import NotFound, PerdureError, SessionClosed, SessionFailed
from perdure.kernel.json import digest
from perdure.kernel.records import EntryRecord, SubmissionRecord, SubmissionStatus, TaskRecord
from perdure.kernel.session import Session, Settled, Straggler
from perdure.kernel.storage import MAX_SCAN
from perdure.tasks.errors import WorkBlocked
from perdure.tasks.runtime import TaskRuntime

if TYPE_CHECKING:
    from perdure.harness.conversation import Conversation
    from perdure.harness.harness import Harness

T = TypeVar("T")

Withdrawal: TypeAlias = Literal["withdrawn", "already_placed", "already_settled"]
"""What an abort of a submission found. Only ``withdrawn`` changed anything."""

CORRECTIONS = 2
"""How often a model is asked to correct an answer that does not parse."""


class Unanswered(PerdureError):
    """An input ended without an answer. ``detail`` says more, where there is more to say.

    ``reason`` is ``aborted``, ``reset``, ``limit``, ``gate`` (a hook stopped it), ``model_error``, ``no_model``,
    ``run_failed`` (the run before it failed, and the queue was withdrawn), ``faulted``, or what its run lacked:
    ``missing_task``, ``task_too_old``, ``migration_failed``; of a write ``stale`` (rule H47).
    """

    def __init__(self, submission: int, reason: str, detail: str | None) -> None:
        super().__init__(f"submission {submission} ended unanswered: {reason}{f' ({detail})' if detail else ''}")
        self.submission = submission
        self.reason = reason
        self.detail = detail


class Answer(msgspec.Struct, frozen=True):
    """The answer to an input."""

    entry: EntryRecord
    """As it is stored."""
    message: AssistantMessage
    """What the model wrote."""

    @property
    def text(self) -> str:
        """Its texts, one behind the other, without thinking."""
        return self.message.text


class _Waiting(msgspec.Struct, eq=False):
    """One wait for one submission."""

    id: int
    conversation_id: int
    through_blocked: bool
    future: asyncio.Future[SubmissionRecord]


class Settlements:
    """Who waits for which submission; told by the commits that settle them. Made once a session."""

    def __init__(self, session: Session, tasks: TaskRuntime) -> None:
        self._session = session
        self._tasks = tasks
        self._waiting: dict[int, dict[_Waiting, None]] = {}
        session.observe(self._observe)
        session.on_failure(self._fail)
        session.on_stop(self._stop)
        tasks.on_blocked(self._blocked)

    async def settled(self, id: int, conversation_id: int, *, through_blocked: bool) -> SubmissionRecord:
        """The submission, once it is done or unanswered. Raises NotFound, WorkBlocked, WaitCycle."""
        # First in line, then looked up: no gap in which it might settle unseen.
        waiting = _Waiting(id, conversation_id, through_blocked, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(id, {})[waiting] = None
        try:
            record = await self._session.submission(id)
            if record is None:
                raise NotFound(f"there is no submission {id}")
            # Storage may know of a commit a step before the session publishes it: then that is waited for, so that
            # whoever looks at anything else next finds it settled too.
            if record.settled and id not in self._session.staged.submissions:
                return record
            self._tasks.refuse_own(self._runs(conversation_id))
            if not through_blocked:
                self._refuse_blocked(conversation_id)
            return await waiting.future
        finally:
            self._forget(waiting)

    def _forget(self, waiting: _Waiting) -> None:
        others = self._waiting.get(waiting.id)
        if others is not None:
            others.pop(waiting, None)
            if not others:
                del self._waiting[waiting.id]
        if waiting.future.done() and not waiting.future.cancelled():
            waiting.future.exception()  # seen, or of no interest any more

    def _observe(self, settled: Settled) -> None:
        for record in settled.batch.submissions:
            if record.settled:
                for waiting in self._waiting.pop(record.id, ()):
                    if not waiting.future.done():
                        waiting.future.set_result(record)

    def _refuse_blocked(self, conversation_id: int) -> None:
        """Raise WorkBlocked if the conversation's run cannot go on by itself (rule T47)."""
        if self._tasks.blocked_tasks:
            for id in self._runs(conversation_id):
                self._tasks.refuse_blocked(id)

    def _runs(self, conversation_id: int) -> Iterator[int]:
        for record in self._session.live.settled.values():
            if record.kind == GENERATION and record.conversation_id == conversation_id:
                yield record.id

    def _blocked(self, _record: TaskRecord) -> None:
        for waits in self._waiting.values():
            for waiting in waits:
                if not waiting.through_blocked and not waiting.future.done():
                    try:
                        self._refuse_blocked(waiting.conversation_id)
                    except WorkBlocked as error:
                        waiting.future.set_exception(error)

    def _fail(self, cause: BaseException) -> None:
        self._end(SessionFailed(cause))

    async def _stop(self, _drain_ms: int) -> list[Straggler]:
        self._end(SessionClosed("the session closed while this waited; the work is kept"))
        return []

    def _end(self, error: PerdureError) -> None:
        for waits in self._waiting.values():
            for waiting in waits:
                if not waiting.future.done():
                    waiting.future.set_exception(error)


class Submission:
    """A handle on one submission. It holds nothing; two are equal if they name the same one of the same harness."""

    __slots__ = ("_harness", "conversation_id", "id")

    def __init__(self, harness: Harness, id: int, conversation_id: int) -> None:
        self._harness = harness
        self.id = id
        self.conversation_id = conversation_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Submission) and (other._harness, other.id) == (self._harness, self.id)

    def __hash__(self) -> int:
        return hash((Submission, self.id))

    def __repr__(self) -> str:
        return f"<Submission {self.id} of conversation {self.conversation_id}>"

    @property
    def conversation(self) -> Conversation:
        """The one it was admitted to."""
        return self._harness.handle(self.conversation_id)

    # --- looking -----------------------------------------------------------------------------------------------

    async def record(self, *, context: Context | None = None) -> SubmissionRecord:
        """As settled now. Never waits for it, never starts work."""
        found = await bounded(self._harness.session.submission(self.id), context)
        if found is None:
            raise NotFound(f"there is no submission {self.id}")
        return found

    async def status(self, *, context: Context | None = None) -> SubmissionStatus:
        """``queued``, ``placed``, ``done`` or ``unanswered``. Never waits for it (rule H22)."""
        return (await self.record(context=context)).status

    # --- waiting -----------------------------------------------------------------------------------------------

    async def wait(self, *, through_blocked: bool = False, context: Context | None = None) -> SubmissionRecord:
        """Wait until it is done or unanswered, durably (rule H21). Starts the scheduler.

        One that a failed run left in the queue waits on, for the next input to place it (rule H51).

        Raises WorkBlocked if the run it waits for cannot go on by itself, unless ``through_blocked``; WaitCycle in the
        code of a tool or a hook that this run waits for. Cancelling this wait, or its context, ends the wait alone.
        """
        self._harness.resume()
        settled = self._harness.settlements.settled(self.id, self.conversation_id, through_blocked=through_blocked)
        return await bounded(settled, context)

    @overload
    async def answer(self, kind: None = None, /, *, context: Context | None = None) -> Answer: ...
    @overload
    async def answer(self, kind: type[T], /, *, context: Context | None = None) -> T: ...
    async def answer(self, kind: type[T] | None = None, /, *, context: Context | None = None) -> Answer | T:
        """The answer, once there is one. With a type: the answer's JSON as that type (rules H37, H38).

        An answer that does not parse is sent back to the model with what is wrong, as a further input, at most twice;
        asking again, also after a restart, finds those same inputs. Raises Unanswered, CannotParse, WorkBlocked, and
        ValueError for a write.
        """
        found = await self._answer(context)
        if kind is None:
            return found
        submission = self
        for correction in range(CORRECTIONS + 1):
            try:
                return parse_answer(found.text, kind)
            except CannotParse as error:
                if correction == CORRECTIONS:
                    raise
                submission = await self.conversation.submit(
                    error.request,
                    # What is asked for is part of it: the same answer may be wanted as another type later.
                    request_id=f"pi.correct:{self.id}:{correction + 1}:{digest(error.request)[:16]}",
                    context=context,
                )
                found = await submission._answer(context)
        raise AssertionError("the last correction returns or raises")

    async def _answer(self, context: Context | None) -> Answer:
        record = await self.wait(context=context)
        if record.type == "write":
            raise ValueError(f"submission {self.id} is a write; only inputs have answers")
        if record.status == "unanswered":
            raise Unanswered(self.id, record.reason or "aborted", record.detail)
        assert record.answer is not None, "an input that is done has its answer"
        entry = await bounded(self._harness.session.entry(record.answer), context)
        assert entry is not None, "an answer is an entry"
        message = decode_messages(entry.raw_messages)[-1]
        assert isinstance(message, AssistantMessage), "an answer is an assistant's"
        return Answer(entry, message)

    async def run(self, *, context: Context | None = None) -> list[EntryRecord]:
        """Every entry this input led to, from its own to its answer, once it is done (rule H39). Where a tool ended the
        run (rule H106), the results of the answer's calls are behind it.

        A write gives its entry. Raises Unanswered, WorkBlocked.
        """
        record = await self.wait(context=context)
        if record.status == "unanswered":
            raise Unanswered(self.id, record.reason or "aborted", record.detail)
        assert record.entry is not None, "what is done has its entry"
        entries: list[EntryRecord] = []
        first, last = record.entry, record.answer or record.entry
        while True:
            page = await self._harness.session.entries(
                self.conversation_id, first=first, last=last, limit=MAX_SCAN, context=context
            )
            entries += page
            if len(page) < MAX_SCAN:
                break
            first = page[-1].id + 1
        if record.answer is not None and (calls := set(entries[-1].data_as(AssistantData).calls)):
            entries += await self._results(calls, record.answer, context)
        return entries

    async def _results(self, calls: set[int], after: int, context: Context | None) -> list[EntryRecord]:
        """Those of calls, which all have one."""
        results: list[EntryRecord] = []
        while len(results) < len(calls):
            page = await self._harness.session.entries(
                self.conversation_id, first=after + 1, limit=MAX_SCAN, context=context
            )
            assert page, "a run ends once all calls of its last round have ended"
            results += [entry for entry in page if entry.kind == TOOL_RESULT and entry.by_task in calls]
            after = page[-1].id
        return results

    # --- taking it back ----------------------------------------------------------------------------------------

    async def abort(self, *, context: Context | None = None) -> Withdrawal:
        """Take a queued input or write back; it ends unanswered: aborted. A placed one stays (rule H53)."""
        async with self._harness.session.commit(conversation_id=self.conversation_id, context=context) as tx:
            record = await tx.submission(self.id)
            if record.status == "queued":
                await withdraw_one(tx, record)
                return "withdrawn"
            return "already_settled" if record.settled else "already_placed"
