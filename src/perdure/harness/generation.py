"""The ``pi.generation`` task: one run, from its first request to its final answer (rules H63 to H77).

start (prepare) -> request -> tools -> request ... -> done; a retry sleeps and begins at start again, what is
deferred sleeps and is polled. Each outcome of a request is classified in one commit: an answer, a round of tools, a
failure that is retried, or the end of the run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from msgspec import structs
from msgspec.structs import replace
from typing_extensions import override

from perdure.harness.answers import Failure, append_answer, append_broken
from perdure.harness.asking import ask_or_defer
from perdure.harness.calls import ToolTask
from perdure.harness.catalogue import NoModel, choose_model
from perdure.harness.compaction import INEFFECTIVE, begin, words_of_end
from perdure.harness.compaction_need import Need, Waited, needed_after_overflow
from perdure.harness.continuing import continue_run, next_words
from perdure.harness.cost import Costs
from perdure.harness.deferral import Deferral, Deferrals, Later, attempt_of
from perdure.harness.documents import (
    Agent,
    AssistantData,
    Live,
    ToolInput,
    UnansweredReason,
    UsageTotals,
)
from perdure.harness.foreign import storable_text
from perdure.harness.hooks import AfterTools, BeforeTool, HookRequest, HookResponse, Stop
from perdure.harness.host import Host
from perdure.harness.inbox import Content, Placed, awaits_reset, place
from perdure.harness.limits import LimitReached
from perdure.harness.messages import AssistantMessage
from perdure.harness.model import Deferred, ModelError, ModelEvent, ModelRequest
from perdure.harness.partial import Partial, shown_parts
from perdure.harness.prepare import NotKnown, Pinned, build_request, prepare, prepare_along
from perdure.harness.rounds import asks_control, end_round, ended_round, round_end
from perdure.harness.runs import (
    GENERATION,
    GENERATION_VERSION,
    Answered,
    NoAnswer,
    clear_run,
    end_placed,
    end_run,
    reset_run,
)
from perdure.harness.usage import Attempt, add_attempt
from perdure.kernel.records import (
    Completed,
    Failed,
    Faulted,
    Orphaned,
    Running,
    TaskRecord,
    Terminal,
    Waiting,
)
from perdure.kernel.reports import Report, log_line
from perdure.kernel.transaction import Transaction
from perdure.tasks.definition import Next, Task
from perdure.tasks.run import Run
from perdure.tasks.transaction import RunTransaction

_log = logging.getLogger("perdure.runs")

C = TypeVar("C")

MOST_WORDS = 2_000
"""Characters of what a provider says of a failure: they are kept with the attempt and with every input of the run."""
MOST_PREPARES = 3
"""How often a history that left memory between its loading and its use is loaded again."""
ORPHANED: dict[str, UnansweredReason] = {
    "missing_task": "missing_task",
    "task_too_old": "task_too_old",
    "migration_failed": "migration_failed",
}
"""How inputs end whose task was aborted while blocked for this reason."""


class Preparing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The checkpoint before a request is pinned."""

    turn: int = 0
    attempt: int = 1
    waited: Waited = "not"


class Compacting(Preparing, frozen=True, kw_only=True, omit_defaults=True):
    """The checkpoint while a request waits for a compaction; ``waited`` counts this one."""

    task: int
    overflow: str | None = None
    """What the provider said of the request, if that was too long."""


class Round(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The checkpoint while the tools of a turn run."""

    turn: int


class GenerationTask(Task[None, None], kind=GENERATION, version=GENERATION_VERSION, builtin=True):
    """Owned by its conversation; it owns the tool tasks of its turns. Its inputs are those of ``pi.live.run``."""

    def __init__(self, host: Host, calls: ToolTask) -> None:
        self._host = host
        self._calls = calls
        self._costs = Costs(host.session, host.models)
        self._deferrals = Deferrals(host, self.kind)
        self._sent: dict[int, Attempt] = {}
        """Requests of this process that are not counted yet, by task."""

    # --- prepare -----------------------------------------------------------------------------------------------

    async def start(self, run: Run[None, None, Preparing | None]) -> Next[None]:
        """Pin the next request."""
        at = run.checkpoint or Preparing()
        return await self._in_memory(run, lambda run, tx: self._pin(run, tx, at))

    async def _in_memory(
        self,
        run: Run[None, None, C],
        step: Callable[[Run[None, None, C], RunTransaction[None]], Awaitable[Next[None] | None]],
    ) -> Next[None]:
        """A step in a commit of its own, with all in memory that it looks at. It gives None if that was let go of."""
        for _ in range(MOST_PREPARES):
            self._host.registry.describe()
            await self._host.contexts.load(run.conversation_id)
            await self._host.limits.load()
            async with run.commit() as tx:
                moved = await step(run, tx)
            if moved is not None:
                return moved
        raise RuntimeError("the conversation's context does not stay in memory; there are too many in use at once")

    # A phase of any checkpoint may lead to a request.
    async def _pin(self, run: Run[None, None, Any], tx: RunTransaction[None], at: Preparing) -> Next[None] | None:
        """On to the request, or first to the compaction it needs; or the end, without a model or at a limit. None: what
        is needed is not in memory, nothing was written."""
        conversation_id = run.conversation_id
        pinned = await self._prepare(run, tx, at, compact=True)
        if isinstance(pinned, NotKnown):
            if run.phase != "start":
                return tx.go(self.start, _preparing(at))
            pinned = await self._prepare(run, tx, at, compact=False)
        if isinstance(pinned, Need):
            if pinned.reason != "background":
                return await self._wait(tx, conversation_id, pinned, at)
            await begin(tx, conversation_id, "background", need=pinned)
            pinned = await self._prepare(run, tx, at, compact=False)
        if pinned is None:
            return None
        if isinstance(pinned, (NoModel, LimitReached)):
            reason = "no_model" if isinstance(pinned, NoModel) else "limit"
            await end_run(self._host, tx, conversation_id, NoAnswer(reason, pinned.detail))
            return tx.fail(reason, pinned.detail)
        assert isinstance(pinned, Pinned), "nothing else is needed any more"
        live = await tx.read(Live, conversation=conversation_id)
        if live is not None and live.retry is not None:
            (await tx.draft(Live, conversation=conversation_id)).retry = None
        return tx.go(self.request, pinned)

    def _prepare(
        self, run: Run[None, None, Any], tx: RunTransaction[None], at: Preparing, *, compact: bool
    ) -> Awaitable[Pinned | Need | NotKnown | NoModel | LimitReached | None]:
        return prepare(
            self._host,
            tx,
            run.conversation_id,
            task=run.id,
            turn=at.turn,
            attempt=at.attempt,
            waited=at.waited,
            compact=compact,
        )

    # --- compaction --------------------------------------------------------------------------------------------

    async def _wait(
        self,
        tx: RunTransaction[None],
        conversation_id: int,
        need: Need,
        at: Preparing | Pinned,
        overflow: str | None = None,
    ) -> Next[None]:
        """Wait for a compaction before the request: for one that is under way, else for one of this run's own."""
        live = await tx.draft(Live, conversation=conversation_id)
        assert live.run is not None, "the run lasts until its generation ends"
        live.run["compacted"] = True
        live.retry = None
        task = need.underway
        waited: Waited = "other"
        if task is None:
            task, waited = await begin(tx, conversation_id, need.reason, need=need), "own"
        checkpoint = Compacting(turn=at.turn, attempt=at.attempt, waited=waited, task=task, overflow=overflow)
        return tx.wait([task], self.compacted, checkpoint)

    async def compacted(self, run: Run[None, None, Compacting]) -> Next[None]:
        """The compaction has ended: prepare again, or end the run if that makes no sense (rules H139, H140)."""
        return await self._in_memory(run, self._after_compaction)

    async def _after_compaction(self, run: Run[None, None, Compacting], tx: RunTransaction[None]) -> Next[None] | None:
        at = run.checkpoint
        outcome = run.results.get(at.task)
        code, message = words_of_end(outcome)
        if at.waited == "own" and code not in ("completed", "stale"):  # stale: another was placed that cuts later
            words = f"{code}: {message}"
            if at.overflow is not None and code != INEFFECTIVE:
                words = f"{at.overflow}; the compaction for it ended {words}"
            if at.overflow is not None or code == INEFFECTIVE:
                await end_run(self._host, tx, run.conversation_id, NoAnswer("model_error", words))
                return tx.fail("overflow" if code != INEFFECTIVE else code, words)
        return await self._pin(run, tx, at)

    # --- request -----------------------------------------------------------------------------------------------

    async def request(self, run: Run[None, None, Pinned]) -> Next[None]:
        """Send what is pinned, show what streams, classify what it came to."""
        pinned = run.checkpoint
        await self._keep_partial(run)
        limit = await self._host.limits.reached_by_now(run.conversation_id)
        if limit is not None:
            return await self._unsent(run, NoAnswer("limit", limit.detail))
        request = await build_request(self._host, run.conversation_id, pinned)
        if request is None:
            async with run.commit() as tx:
                return tx.go(self.start, _preparing(pinned))
        asked = HookRequest(id=run.id, conversation_id=run.conversation_id, turn=pinned.turn, request=request)
        request = await self._host.hooks.before_request(asked)
        if isinstance(request, Stop):
            return await self._unsent(run, NoAnswer("gate", request.reason[:MOST_WORDS]))
        try:
            outcome = await self._send(run, request)
            if isinstance(outcome, Deferred):
                return await self._poll_later(run, self._deferrals.first(pinned, outcome, sent=self._sent[run.id].at))
        finally:
            await self._deferrals.forsake(run.record)
        return await self._settle(run, pinned, outcome)

    async def poll(self, run: Run[None, None, Deferral]) -> Next[None]:
        """Ask for a deferred response: its answer, later again, or the end (rules H75, H401 to H403)."""
        at = run.checkpoint
        found = await self._deferrals.fetch(run)
        if isinstance(found, Later):
            return await self._poll_later(run, found)
        if isinstance(found, NoModel):
            return await self._unsent(run, NoAnswer("no_model", found.detail))
        self._sent[run.id] = Attempt(model=at.model, at=at.sent)
        if self._host.tracing is not None:
            asked = ModelRequest(model=at.model, messages=(), attempt=at.attempt)
            self._host.tracing.fetched(asked, run.record, found.error if isinstance(found, Failure) else found)
        return await self._settle(run, at, found)

    async def _poll_later(self, run: Run[None, None, Any], later: Later) -> Next[None]:
        """The handle is stored in the commit that tells of it; the attempt is counted once it has come to something."""
        try:
            async with run.commit() as tx:
                (await tx.draft(Live)).message = None
                return tx.sleep(await self._deferrals.show(tx, run, later), self.poll, later.at)
        finally:
            if run.moved:  # or what ends the run counts the attempt
                self._sent.pop(run.id, None)
                self._deferrals.saved(run.id)

    async def _settle(
        self, run: Run[None, None, Any], pinned: Pinned, outcome: AssistantMessage | Failure
    ) -> Next[None]:
        """Count and classify what a request came to."""
        usage = outcome.usage if isinstance(outcome, AssistantMessage) else outcome.error.usage
        sent = self._sent[run.id] = replace(self._sent[run.id], usage=usage)
        self._sent[run.id] = await self._costs.priced(sent)
        words: Content | None = None
        if isinstance(outcome, AssistantMessage):
            outcome, words = await self._after_response(run, pinned, outcome)
        if isinstance(outcome, Failure):
            await self._host.contexts.load(run.conversation_id)  # where it may be cut, if it was too long
        try:
            async with run.commit() as tx:
                totals = await tx.draft(UsageTotals)
                add_attempt(totals, self._sent[run.id])
                if isinstance(outcome, AssistantMessage):
                    totals.turns += 1
                live = await tx.draft(Live)
                live.message = live.deferred = None
                return await self._classify(run, tx, pinned, outcome, words)
        finally:
            if run.moved:  # or what ends the run counts it
                self._sent.pop(run.id, None)

    async def _classify(
        self,
        run: Run[None, None, Any],
        tx: RunTransaction[None],
        pinned: Pinned,
        outcome: AssistantMessage | Failure,
        words: Content | None,
    ) -> Next[None]:
        if isinstance(outcome, Failure):
            return await self._failed(run, tx, pinned, outcome)
        if outcome.tool_calls:
            return await self._round(run, tx, pinned, outcome)
        answer = append_answer(tx, outcome, AssistantData(attempt=pinned.attempt))
        if words is not None:
            return await self._continue(run, tx, pinned, Answered(answer.id), words)
        await end_run(self._host, tx, run.conversation_id, Answered(answer.id))
        return tx.complete(None)

    async def _unsent(self, run: Run[None, None, Any], ending: NoAnswer) -> Next[None]:
        """A gate or a limit ends the run before anything is sent (rules H130, H159); or nobody can fetch a response."""
        async with run.commit() as tx:
            await self._abort_partial(tx, run.conversation_id, run.id, ending.reason)
            await end_run(self._host, tx, run.conversation_id, ending)
            return tx.fail(ending.reason, ending.detail or "")

    async def _after_response(
        self, run: Run[None, None, Any], pinned: Pinned, message: AssistantMessage
    ) -> tuple[AssistantMessage, Content | None]:
        """What hooks make of a message, and what they want said after it if it is final."""
        id, conversation_id, turn = run.id, run.conversation_id, pinned.turn
        asked = HookResponse(id=id, conversation_id=conversation_id, turn=turn, message=message)
        message = await self._host.hooks.after_response(asked)
        if message.tool_calls:
            return message, None
        return message, await next_words(self._host, conversation_id, task=id, turn=turn, message=message)

    async def _continue(
        self, run: Run[None, None, Any], tx: RunTransaction[None], pinned: Pinned, answer: Answered, words: Content
    ) -> Next[None]:
        """The run goes on after an answer, unless the boundary there ends it (rule H131)."""
        host, conversation_id, turn = self._host, run.conversation_id, pinned.turn + 1
        placed = await continue_run(host, tx, conversation_id, turn=turn, words=words)
        if placed is not None:
            await end_placed(host, tx, conversation_id, answer, placed)
            return tx.complete(None)
        next = await prepare_along(host, tx, conversation_id, task=run.id, turn=turn, attempt=1)
        return tx.go(self.start, Preparing(turn=turn)) if next is None else tx.go(self.request, next)

    async def _keep_partial(self, run: Run[None, None, Pinned]) -> None:
        """What an earlier run of this request had shown becomes an aborted answer; the request is sent again (H69).

        The task is not moved on by it: a request that ends its process every time is parked at last.
        """
        live = await run.session.snapshot(Live, conversation=run.conversation_id)
        if live is None or live.message is None or live.message["task"] != run.id:
            return
        async with run.commit() as tx:
            await self._abort_partial(tx, run.conversation_id, run.id, "the process ended before the answer did")

    async def _send(self, run: Run[None, None, Pinned], request: ModelRequest) -> AssistantMessage | Deferred | Failure:
        """One attempt. Whatever the model or its adapter raises is a failure of the attempt."""
        host = self._host
        self._sent[run.id] = Attempt(model=request.model, at=host.session.clock.wall())
        partial = Partial(run.id, request.model, request.attempt)
        progress = host.progress.open(run.conversation_id, partial.write)

        def heard(event: ModelEvent) -> None:
            partial.add(event)
            progress.touch()

        def finished(message: AssistantMessage) -> None:
            self._sent[run.id] = replace(self._sent[run.id], usage=message.usage)

        try:
            outcome = await ask_or_defer(
                host.asked_for(run.record),
                request,
                heard=heard,
                finished=finished,
                given=lambda told: self._deferrals.given(run.id, request.model, told),
                raised=lambda said, error: self._report(run, said, error),
            )
        finally:
            progress.close()
        return Failure(outcome, partial.parts()) if isinstance(outcome, ModelError) else outcome

    def _report(self, run: Run[None, None, Pinned], message: str, error: BaseException) -> None:
        self._host.session.report(
            Report(
                type="model_adapter_failed",
                message=message,
                task=run.id,
                kind=self.kind,
                conversation=run.conversation_id,
                error=error,
            )
        )

    # --- what a request came to --------------------------------------------------------------------------------

    async def _failed(
        self, run: Run[None, None, Any], tx: RunTransaction[None], pinned: Pinned, failure: Failure
    ) -> Next[None]:
        """Sleep and prepare again, or end the run (rules H72 to H74)."""
        error, host = failure.error, self._host
        said = storable_text(str(error)[:MOST_WORDS])
        words = f"{error.code}: {said}"
        delay: int | None = None
        if error.retryable and failure.may_repeat:
            delay = host.settings.retry.delay(
                pinned.attempt, fraction=host.session.entropy.fraction(), retry_after_ms=error.retry_after_ms
            )
            if delay is None and error.retry_after_ms:
                words = f"{words} (it asks to be left alone for {math.ceil(error.retry_after_ms / 1000):,} seconds)"
        need: Need | None = None
        if error.code == "overflow" and failure.may_repeat:
            need = await needed_after_overflow(host, tx, run.conversation_id, pinned.model)
        if (delay is None and need is None) or failure.parts:
            append_broken(
                tx, run.conversation_id, pinned.model, pinned.attempt, failure.parts, "error", words, error.usage
            )
        if need is not None:
            return await self._wait(tx, run.conversation_id, need, pinned, overflow=words)
        if delay is None:
            await end_run(host, tx, run.conversation_id, NoAnswer("model_error", words))
            return tx.fail(error.code, said)
        log_line(_log, "retry task=%d attempt=%d code=%s in %d ms", run.id, pinned.attempt + 1, error.code, delay)
        if host.tracing is not None:
            host.tracing.retried(error.code)
        until = tx.at + delay
        attempt = pinned.attempt + 1
        live = await tx.draft(Live)
        live.retry = {"attempt": attempt, "until": until, "code": error.code, "message": said}
        return tx.sleep(until, self.start, replace(_preparing(pinned), attempt=attempt))

    async def _round(
        self, run: Run[None, None, Any], tx: RunTransaction[None], pinned: Pinned, message: AssistantMessage
    ) -> Next[None]:
        """A task for each call, created in the commit that stores the calls."""
        agent = await tx.read(Agent) or Agent()
        tools = [self._host.registry.find_tool(agent, call.name) for call in message.tool_calls]
        one_by_one = any(tool is not None and tool.sequential for tool in tools)
        live = await tx.draft(Live)
        hooked = bool(await self._host.hooks.applying(BeforeTool, run.conversation_id, tx=tx))
        # What depends on settings is foreseen under those that hold in this commit; it takes microseconds a call.
        tasks: list[int] = []
        for index, call in enumerate(message.tool_calls):
            input = ToolInput(
                call_id=call.id,
                name=call.name,
                arguments=call.arguments,
                index=index,
                after=tasks[-1] if one_by_one and tasks else None,
            )
            tasks.append(self._calls.begin_call(run, tx, live, agent, input, hooked=hooked).id)
        append_answer(tx, message, AssistantData(calls=tuple(tasks), attempt=pinned.attempt))
        assert live.run is not None, "the run lasts until its generation ends"
        live.run["turn"] = pinned.turn + 1
        return tx.wait(tasks, self.tools, Round(turn=pinned.turn + 1))

    # --- after the tools ---------------------------------------------------------------------------------------

    async def tools(self, run: Run[None, None, Round]) -> Next[None]:
        """The boundary after a round, and the next request pinned in the same commit."""
        hooks = await self._host.hooks.applying(AfterTools, run.conversation_id)
        if hooks:
            turn, calls = run.checkpoint.turn, run.results
            ended = await ended_round(run.session, run.conversation_id, task=run.id, turn=turn, calls=calls)
            await self._host.hooks.after_tools(hooks, ended)
        return await self._in_memory(run, self._after_tools)

    async def _ride(self, tx: Transaction, record: TaskRecord) -> None:
        """The boundary after a round in the commit of the round's last result (rule H186): the task, which resumes in
        this commit, begins with the request, or with ``start`` if that cannot be prepared. Whatever else comes of the
        boundary is left to the phase ``tools``."""
        state, host, conversation_id = record.state, self._host, record.conversation_id
        assert isinstance(state, Running), "it was looked at"
        if host.contexts.shown(tx, conversation_id) is None:
            return
        if isinstance(await choose_model(host, tx, conversation_id), NoModel):
            return
        if await awaits_reset(tx, conversation_id) or await asks_control(tx, conversation_id):
            return
        if await host.hooks.applying(AfterTools, conversation_id, tx=tx):  # they are told before the boundary
            return
        await self._join_inputs(tx, conversation_id, await place(tx, conversation_id, "after_tools", host.settings))
        turn = msgspec.json.decode(state.raw_checkpoint, type=Round).turn
        pinned = await prepare_along(host, tx, conversation_id, task=record.id, turn=turn, attempt=1)
        if pinned is not None:
            state = Running(phase="request", raw_checkpoint=pinned.encode())
        else:  # the history left memory meanwhile, the model went, or a limit is reached
            state = Running(phase="start", raw_checkpoint=msgspec.Raw(msgspec.json.encode(Preparing(turn=turn))))
        tx.put_task(structs.replace(record, state=state, restarts=0))

    async def _join_inputs(self, tx: Transaction, conversation_id: int, placed: Placed) -> None:
        """What was placed after the tools belongs to the run."""
        if placed.inputs:
            live = await tx.draft(Live, conversation=conversation_id)
            assert live.run is not None, "the run lasts until its generation ends"
            live.run["inputs"].extend(placed.inputs)

    async def _after_tools(self, run: Run[None, None, Round], tx: RunTransaction[None]) -> Next[None] | None:
        if self._host.contexts.shown(tx, run.conversation_id) is None:
            return None
        end = await round_end(tx, run.conversation_id, run.results)
        if end is not None:
            await end_round(self._host, tx, run.conversation_id, end, run.results)
            return tx.complete(None)
        placed = await place(tx, run.conversation_id, "after_tools", self._host.settings)
        if placed.ends_run:
            await reset_run(self._host, tx, run.conversation_id, placed)
            return tx.complete(None)
        await self._join_inputs(tx, run.conversation_id, placed)
        return await self._pin(run, tx, Preparing(turn=run.checkpoint.turn))

    # --- ends that are not its own -----------------------------------------------------------------------------

    @override
    async def on_abort(self, run: Run[None, None, object]) -> Next[None]:
        reason = run.record.abort_reason or "aborted"
        await self._deferrals.drop(run.record)
        async with run.commit() as tx:
            await self._clear(tx, run.record, NoAnswer("aborted", reason))
            return tx.abort(reason)

    def derive(self, tx: Transaction) -> Awaitable[None] | None:
        """Registered with the session. An outcome that the scheduler wrote ends the run in the same commit (T60, H41);
        that is not left to ``cleanup``, which is not called where the code is missing. And a round that ends here has
        its boundary here (H186).
        """
        foreign: list[TaskRecord] = []
        resumed: list[TaskRecord] = []
        for record in tx.changed_tasks.values():
            if record.kind == GENERATION:
                if type(record.state) is Terminal:
                    if not isinstance(record.outcome, (Completed, Failed)):
                        foreign.append(record)
                elif self._resumes_after_tools(record):
                    resumed.append(record)
        return self._follow(tx, foreign, resumed) if foreign or resumed else None

    def _resumes_after_tools(self, record: TaskRecord) -> bool:
        """Whether it waited for tools before this commit, and goes on with this very code."""
        if type(record.state) is not Running or record.state.phase != "tools" or record.version != GENERATION_VERSION:
            return False
        before = self._host.session.live.staged.get(record.id)
        return before is not None and type(before.state) is Waiting and not record.abort_requested

    async def _follow(self, tx: Transaction, ended: list[TaskRecord], resumed: list[TaskRecord]) -> None:
        for record in resumed:
            await self._ride(tx, record)
        for record in ended:
            outcome = record.outcome
            if isinstance(outcome, Faulted):
                ending = NoAnswer("faulted", f"{outcome.error.code}: {outcome.error.message}")
            elif isinstance(outcome, Orphaned):
                ending = NoAnswer(ORPHANED.get(outcome.reason, "aborted"), outcome.reason)
            else:
                ending = NoAnswer("aborted", record.abort_reason)
            await self._clear(tx, record, ending)

    async def _clear(self, tx: Transaction, record: TaskRecord, ending: NoAnswer) -> None:
        """End the run if it is still this task's; the queue is kept (rule H50)."""
        conversation_id = record.conversation_id
        live = await tx.read(Live, conversation=conversation_id)
        if live is None or live.run is None or live.run["task"] != record.id:
            return
        await self._abort_partial(tx, conversation_id, record.id, ending.detail or ending.reason)
        await clear_run(tx, conversation_id, ending)

    async def _abort_partial(self, tx: Transaction, conversation_id: int, task: int, why: str) -> None:
        """What was under way ends: the attempt counts, and the partial that was committed becomes an aborted answer.

        A process that ended took with it whether anything was sent, unless a partial tells, and what it used.
        """
        live = await tx.draft(Live, conversation=conversation_id)
        partial = live.message
        attempt = self._sent.pop(task, None) or attempt_of(live, task)
        if partial is not None and partial["task"] == task:
            attempt = attempt or Attempt(model=partial["model"], at=tx.at)
            parts = shown_parts(partial)
            append_broken(tx, conversation_id, attempt.model, partial["attempt"], parts, "aborted", why, attempt.usage)
            live.message = None
        if attempt is not None:
            add_attempt(await tx.draft(UsageTotals, conversation=conversation_id), attempt)


def _preparing(at: Preparing | Pinned) -> Preparing:
    return Preparing(turn=at.turn, attempt=at.attempt, waited=at.waited)
