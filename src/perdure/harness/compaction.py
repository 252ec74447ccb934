"""The ``pi.compaction`` task: a summary in place of the older part of a context (rules H133 to H146, H200 to H215).

start -> request -> done; a retry sleeps and asks again. What is cut, the model and the newest entry of the context are
pinned before anything is sent. The outcome, what it used, and the entry or the place in the queue are one commit.
"""

from __future__ import annotations

import logging
from typing import Any, TypeAlias, cast

import msgspec
from msgspec.structs import replace
from typing_extensions import override

from perdure.harness.asking import ask
from perdure.harness.catalogue import Chosen, NoModel, find_info, find_model
from perdure.harness.compaction_need import BEGUN, WAITED_FOR, Need, policy_for, room_of
from perdure.harness.compaction_policy import room_for
from perdure.harness.context import Replaceable
from perdure.harness.cost import Costs
from perdure.harness.documents import (
    COMPACTION,
    Agent,
    CompactionData,
    CompactionFailure,
    CompactionReason,
    Inbox,
    InboxEntry,
    Live,
    LiveCompaction,
    UsageTotals,
)
from perdure.harness.foreign import storable_text
from perdure.harness.hooks import Decline, HookCompaction, Summary
from perdure.harness.host import Host
from perdure.harness.inbox import Content, InboxFull, admit, is_stale, place
from perdure.harness.messages import AssistantMessage, encode_messages
from perdure.harness.model import ModelError, ModelRequest
from perdure.harness.patience import TimedOut, within
from perdure.harness.runs import BEFORE_REQUEST
from perdure.harness.summary import summary_message, summary_request
from perdure.harness.tokens import tokens_of
from perdure.harness.usage import Attempt, add_attempt
from perdure.kernel.json import JsonValue
from perdure.kernel.records import Aborted, Failed, Faulted, Orphaned, Outcome, TaskRecord, from_raw
from perdure.kernel.reports import Report, log_line
from perdure.kernel.transaction import Transaction
from perdure.tasks.definition import Next, Task
from perdure.tasks.run import Run
from perdure.tasks.transaction import RunTransaction

_log = logging.getLogger("perdure.compactions")

MOST_SHRINKS = 3
"""How often a request for a summary that is too long all the same is sent again with half the text."""
LEAST_SHARE = 8
"""The part of its model's window that a summary may take at least, however little is reserved."""
MOST_WORDS = 2_000
"""Characters of what a provider says of a failure, and a hook of why it declines."""
MOST_LOADS = 3
"""How often a history that left memory between its loading and its use is loaded again."""
INEFFECTIVE = "compaction_ineffective"
QUIET = frozenset({"stale", "nothing_to_compact", "declined", "limit"})
"""Codes of ends that are no faults: nobody is reported to."""


class CompactionInput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    reason: CompactionReason
    instructions: str = ""
    """What whoever asked for it wants of the summary."""
    cut: int | None = None
    """The first entry that stays; None: to be chosen."""
    through: int | None = None
    """The newest entry of the context that is compacted; with ``cut``."""
    tokens: int = 0
    """Of that context, as estimated; with ``cut``."""


class CompactionResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    entry: int | None = None
    """The ``pi.compaction`` entry; None: it waits for a boundary."""
    submission: int | None = None
    """The write it is or waits as; None: it was placed at once in the middle of a run."""


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """What is compacted: a checkpoint's part."""

    cut: int
    through: int
    tokens: int
    """Of the whole context, as estimated."""


class Summarising(Cut, frozen=True, kw_only=True, omit_defaults=True):
    """The checkpoint of the request, as it is sent again after a crash."""

    model: str
    attempt: int = 1
    shrunk: int = 0
    """So often was the text halved, because the provider found it too long."""


# Any phase may end the task.
_Run: TypeAlias = Run[CompactionInput, CompactionResult, Any]


class _End(msgspec.Struct, frozen=True):
    """It fails."""

    code: str
    message: str


async def begin(
    tx: Transaction, conversation_id: int, reason: CompactionReason, *, need: Need | None = None, instructions: str = ""
) -> int:
    """Create the task, shown in ``pi.live``. Inside a phase the running task owns it, but for a background one."""
    input = CompactionInput(reason=reason, instructions=instructions)
    if need is not None:
        input = replace(input, cut=need.cut, through=need.through, tokens=need.tokens)
    background = reason == "background"
    task = tx.create_task(CompactionTask, input, conversation=conversation_id, background=background)
    live = await tx.draft(Live, conversation=conversation_id)
    live.compactions[str(task.id)] = LiveCompaction(
        reason=reason, started_at=tx.at, attempt=1, until=None, code=None, message=None
    )
    return task.id


class CompactionTask(Task[CompactionInput, CompactionResult], kind="pi.compaction", version=1, builtin=True):
    """Owned by the generation that waits for it, or by the conversation. Its cut never moves; what else happens to
    the conversation meanwhile makes it stale at most."""

    def __init__(self, host: Host, *, drain_ms: int) -> None:
        self._host = host
        self._drain_ms = drain_ms
        self._costs = Costs(host.session, host.models)
        self._sent: dict[int, Attempt] = {}
        """Requests of this process that are not counted yet, by task."""

    # --- start -------------------------------------------------------------------------------------------------

    async def start(self, run: Run[CompactionInput, CompactionResult, None]) -> Next[CompactionResult]:
        """Choose the cut, ask the hooks, pin the request."""
        agent = await run.session.snapshot(Agent, conversation=run.conversation_id) or Agent()
        own = find_model(self._host, agent, run.conversation_id)
        if isinstance(own, NoModel):
            return await self._fail(run, _End("no_model", own.detail))
        cut = await self._choose(run, agent, own)
        if cut is None:
            return await self._fail(run, _End("nothing_to_compact", "there is little beside what is to stay as it is"))
        found = await self._host.contexts.replaceable(run.conversation_id, cut.cut, cut.through)
        if found is None:
            return await self._fail(run, _STALE)
        answer = await self._host.hooks.before_compact(
            HookCompaction(
                id=run.id,
                conversation_id=run.conversation_id,
                reason=run.input.reason,
                tokens=cut.tokens,
                messages=[*found.marker, *found.messages],
                instructions=run.input.instructions or None,
            )
        )
        if isinstance(answer, Decline):
            return await self._fail(run, _End("declined", answer.reason[:MOST_WORDS]))
        if isinstance(answer, Summary):
            return await self._finish(run, cut, found, answer.text.strip(), model=None)
        writer = policy_for(self._host, own.id).model or own.id
        await self._host.limits.load()
        async with run.commit() as tx:
            limit = await self._limit(run, tx)
            stale = await is_stale(tx, run.conversation_id, cut.cut)
            if limit is None and not stale:
                at = Summarising(cut=cut.cut, through=cut.through, tokens=cut.tokens, model=writer)
                return tx.go(self.request, at)
        return await self._fail(run, limit or _STALE)

    async def _limit(self, run: _Run, tx: RunTransaction[CompactionResult]) -> _End | None:
        """Whether a request for a summary is one too many (rule H159)."""
        own = await tx.read(Agent, conversation=run.conversation_id) or Agent()
        limit = await self._host.limits.reached(tx, run.conversation_id, own.limits)
        return None if limit is None else _End("limit", limit.detail)

    async def _choose(self, run: Run[CompactionInput, CompactionResult, None], agent: Agent, own: Chosen) -> Cut | None:
        input, contexts = run.input, self._host.contexts
        if input.cut is not None and input.through is not None:
            return Cut(cut=input.cut, through=input.through, tokens=input.tokens)
        room = room_of(self._host, agent, own.id, own.info)
        for _ in range(MOST_LOADS):
            await contexts.load(run.conversation_id)
            context = contexts.settled(run.conversation_id)
            if context is not None:
                cut = contexts.cut(run.conversation_id, room.keep, least=room.least)
                return None if cut is None else Cut(cut=cut, through=context.through, tokens=context.count.tokens)
        raise RuntimeError("the conversation's context does not stay in memory; there are too many in use at once")

    # --- request -----------------------------------------------------------------------------------------------

    async def request(self, run: Run[CompactionInput, CompactionResult, Summarising]) -> Next[CompactionResult]:
        """Ask for the summary that is pinned; place it, or ask again later, or fail."""
        at, host = run.checkpoint, self._host
        found = await host.contexts.replaceable(run.conversation_id, at.cut, at.through)
        info = find_info(host, at.model, run.conversation_id)
        if found is None:
            return await self._fail(run, _STALE)
        if info is None:
            return await self._fail(run, _End("no_model", f"the model {at.model!r} cannot be reached"))
        limit = await host.limits.reached_by_now(run.conversation_id)
        if limit is not None:
            return await self._fail(run, _End("limit", limit.detail))
        agent = await run.session.snapshot(Agent, conversation=run.conversation_id) or Agent()
        own = find_model(host, agent, run.conversation_id)
        # Whoever writes, the policy is that of the conversation's model; its sizes are for the writer's window here.
        policy = policy_for(host, at.model if isinstance(own, NoModel) else own.id)
        room = room_for(policy, agent.compaction, info.context_window)
        output = max(room.reserve, room.window // LEAST_SHARE)
        if info.max_output > 0:  # else it is not known
            output = min(output, info.max_output)
        request = ModelRequest(
            model=at.model,
            messages=summary_request(
                found.marker,
                found.messages,
                instructions=run.input.instructions,
                tokens=(room.window - output) >> at.shrunk,
            ),
            max_output=output,
            attempt=at.attempt,
        )
        outcome = await self._send(run, request, policy.deadline_ms)
        self._sent[run.id] = await self._costs.priced(self._sent[run.id])
        if isinstance(outcome, AssistantMessage):
            text = outcome.text.strip()
            if outcome.stop_reason == "length":
                most = f"the summary is longer than {request.max_output:,} tokens; raise reserve_tokens"
                outcome = _End("summary_cut_off", most)
            elif not text:
                outcome = _End("summary_empty", "the model answered without any text")
            else:
                return await self._finish(run, at, found, text, model=at.model)
        if isinstance(outcome, _End):
            return await self._fail(run, outcome)
        return await self._failed(run, at, outcome)

    async def _send(
        self, run: Run[CompactionInput, CompactionResult, Summarising], request: ModelRequest, deadline_ms: int
    ) -> AssistantMessage | ModelError | _End:
        host = self._host
        models = host.asked_for(run.record)
        self._sent[run.id] = Attempt(model=request.model, at=host.session.clock.wall())

        def finished(message: AssistantMessage) -> None:
            self._sent[run.id] = replace(self._sent[run.id], usage=message.usage)

        async def work() -> AssistantMessage | ModelError:
            return await ask(
                models,
                request,
                heard=lambda _: None,
                finished=finished,
                raised=lambda said, error: self._report(run.record, "model_adapter_failed", said, error),
            )

        def overdue(stack: str) -> None:
            self._report(run.record, "not_stopped", f"a request for a summary did not stop in time:\n{stack}")

        try:
            outcome = await within(host.session.clock, deadline_ms, work, drain_ms=self._drain_ms, on_overdue=overdue)
        except TimedOut:
            return _End("deadline", f"the summary did not come within {deadline_ms:,} ms")
        if isinstance(outcome, ModelError) and outcome.usage is not None:
            self._sent[run.id] = replace(self._sent[run.id], usage=outcome.usage)
        return cast("AssistantMessage | ModelError", outcome)

    async def _failed(
        self, run: Run[CompactionInput, CompactionResult, Summarising], at: Summarising, error: ModelError
    ) -> Next[CompactionResult]:
        """Ask again with less, or later, or not any more."""
        host, said = self._host, storable_text(str(error)[:MOST_WORDS])
        await host.limits.load()
        if error.code == "overflow" and at.shrunk < MOST_SHRINKS:
            async with run.commit() as tx:
                await self._count(run, tx)
                limit = await self._limit(run, tx)
                if limit is not None:
                    return await self._end(run, tx, limit)
                return tx.go(self.request, replace(at, shrunk=at.shrunk + 1))
        delay: int | None = None
        if error.retryable:
            delay = host.settings.retry.delay(
                at.attempt, fraction=host.session.entropy.fraction(), retry_after_ms=error.retry_after_ms
            )
        if delay is None:
            return await self._fail(run, _End(error.code, said))
        log_line(_log, "retry task=%d attempt=%d code=%s in %d ms", run.id, at.attempt + 1, error.code, delay)
        if host.tracing is not None:
            host.tracing.retried(error.code)
        async with run.commit() as tx:
            await self._count(run, tx)
            limit = await self._limit(run, tx)
            if limit is not None:
                return await self._end(run, tx, limit)
            until = tx.at + delay
            live = await tx.draft(Live)
            shown = live.compactions.get(str(run.id))
            if shown is not None:
                shown["attempt"], shown["until"] = at.attempt + 1, until
                shown["code"], shown["message"] = error.code, said
            return tx.sleep(until, self.request, replace(at, attempt=at.attempt + 1))

    # --- ends --------------------------------------------------------------------------------------------------

    async def _finish(
        self,
        run: _Run,
        at: Cut,
        found: Replaceable,
        text: str,
        *,
        model: str | None,
    ) -> Next[CompactionResult]:
        """Place the summary, if it is one: shorter than what it stands for, and not too late."""
        message = summary_message(text)
        takes = tokens_of([message])
        if not text or takes >= found.tokens:
            said = f"the summary would take {takes:,} tokens in place of {found.tokens:,}"
            return await self._fail(run, _End(INEFFECTIVE, said if text else "the summary is empty"))
        data = CompactionData(task=run.id, reason=run.input.reason, tokens_before=at.tokens, model=model)
        content = Content(
            "write",
            COMPACTION,
            cast("list[JsonValue]", from_raw(encode_messages([message]))),
            cast("JsonValue", msgspec.to_builtins(data)),
            at.cut,
        )
        async with run.commit() as tx:
            placed = await self._place(run, tx, content, at.through)
            if isinstance(placed, _End):
                moved = await self._end(run, tx, placed)
            else:
                await self._count(run, tx)
                live = await tx.draft(Live)
                live.compactions.pop(str(run.id), None)
                live.compaction_failure = None
                if live.run is not None:
                    live.run.pop("compaction_failed", None)
                moved = tx.complete(placed)
        if isinstance(placed, _End):
            self._tell(run, placed)
        return moved

    async def _place(
        self,
        run: _Run,
        tx: RunTransaction[CompactionResult],
        content: Content,
        through: int,
    ) -> CompactionResult | _End:
        """At once where no request is on its way or to follow a round, else at the next boundary (rules H142, H143)."""
        conversation_id = run.conversation_id
        assert isinstance(content.head, int), "a cut"
        if await is_stale(tx, conversation_id, content.head) or await _has_begun_anew(tx, conversation_id, through):
            return _STALE
        live = await tx.read(Live)
        generation = None if live is None or live.run is None else tx.live_task(live.run["task"])
        if generation is not None and getattr(generation.state, "phase", None) in BEFORE_REQUEST:
            return CompactionResult(entry=content.append(tx, conversation_id).id)
        inbox = await tx.read(Inbox, conversation=conversation_id)
        if inbox is not None and any(_is_beginning(item["entry"]) for item in inbox.items):
            return _STALE  # it would be placed behind that
        try:
            admission = await admit(tx, conversation_id, content)
        except InboxFull as error:
            return _End("inbox_full", str(error))
        if admission.boundary is not None:  # never one that starts a run (rule H52)
            await place(tx, conversation_id, "writes", self._host.settings)
        submission = await tx.submission(admission.submission.id)
        return CompactionResult(entry=submission.entry, submission=submission.id)

    async def _fail(
        self,
        run: _Run,
        end: _End,
    ) -> Next[CompactionResult]:
        async with run.commit() as tx:
            moved = await self._end(run, tx, end)
        self._tell(run, end)
        return moved

    def _tell(self, run: _Run, end: _End) -> None:
        if end.code not in QUIET:
            self._report(run.record, "compaction_failed", f"a {run.input.reason} compaction failed: {end.code}")

    async def _end(
        self,
        run: _Run,
        tx: RunTransaction[CompactionResult],
        end: _End,
    ) -> Next[CompactionResult]:
        await self._count(run, tx)
        await _show_end(tx, run.record, run.input.reason, end)
        return tx.fail(end.code, end.message)

    async def _count(
        self,
        run: _Run,
        tx: RunTransaction[CompactionResult],
    ) -> None:
        """What was sent is counted once, in the commit of what came of it (rule H146)."""
        attempt = self._sent.pop(run.id, None)
        if attempt is not None:
            add_attempt(await tx.draft(UsageTotals), attempt)

    @override
    async def on_abort(self, run: Run[CompactionInput, CompactionResult, object]) -> Next[CompactionResult]:
        reason = run.record.abort_reason or "aborted"
        async with run.commit() as tx:
            await self._count(run, tx)
            await _show_end(tx, run.record, run.input.reason, _End("aborted", reason))
            return tx.abort(reason)

    @override
    async def cleanup(self, tx: Transaction, record: TaskRecord) -> None:
        outcome = record.outcome
        if isinstance(outcome, Faulted):
            end = _End("faulted", f"{outcome.error.code}: {outcome.error.message}")
        else:
            end = _End("orphaned" if isinstance(outcome, Orphaned) else "aborted", getattr(outcome, "reason", ""))
        attempt = self._sent.pop(record.id, None)
        if attempt is not None:
            add_attempt(await tx.draft(UsageTotals, conversation=record.conversation_id), attempt)
        live = await tx.read(Live, conversation=record.conversation_id)
        shown = None if live is None else live.compactions.get(str(record.id))
        if shown is not None:
            await _show_end(tx, record, shown["reason"], end)

    def _report(self, record: TaskRecord, type: str, message: str, error: BaseException | None = None) -> None:
        self._host.session.report(
            Report(
                type=type,
                message=message,
                task=record.id,
                kind=record.kind,
                conversation=record.conversation_id,
                error=error,
            )
        )


def words_of_end(outcome: Outcome | None) -> tuple[str, str]:
    """Code and words of how a task ended that did not complete."""
    match outcome:
        case Failed(error) | Faulted(error):
            return error.code, error.message
        case Aborted(reason):
            return "aborted", reason
        case Orphaned(reason):
            return "orphaned", reason
        case _:
            return "completed", ""


async def _has_begun_anew(tx: Transaction, conversation_id: int, through: int) -> bool:
    """Whether the context begins with words of somebody that came after ``through``: a summary of what was there before
    does not tell of them, and would replace them (rule H215)."""
    marker = await tx.head(conversation_id)
    return marker is not None and marker.id > through and marker.kind != COMPACTION


def _is_beginning(entry: InboxEntry) -> bool:
    """Whether it will begin the context with words of its own, and with what followed an entry."""
    return isinstance(entry["head"], int) and entry["kind"] != COMPACTION


_STALE = _End("stale", "the context begins behind its cut by now")


async def _show_end(tx: Transaction, record: TaskRecord, reason: CompactionReason, end: _End) -> None:
    """``pi.live`` without it, and with why it failed, if that says anything of the next one."""
    live = await tx.draft(Live, conversation=record.conversation_id)
    live.compactions.pop(str(record.id), None)
    owner = None if record.owner is None else tx.live_task(record.owner)
    if end.code in ("stale", "nothing_to_compact") or (owner is not None and owner.abort_requested):
        return
    if live.run is not None and reason in BEGUN and live.run.get("compaction_failed") != "waited":
        live.run["compaction_failed"] = "waited" if reason in WAITED_FOR else "background"
    live.compaction_failure = CompactionFailure(
        task=record.id,
        reason=reason,
        at=tx.at,
        code=end.code,
        message=end.message,
        run=None if live.run is None else live.run["task"],
    )
