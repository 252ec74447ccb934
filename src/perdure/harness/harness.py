"""Harness: one store, opened with models and a registry of extensions (rules H1 to H19).

async with Harness.open(SqliteStorage("agent.db"), models=models, extensions=[...]) as harness:
    root = await harness.root()
    submission = await root.submit("How many people live in Lyon?", request_id="lyon-1")
    print((await submission.answer()).text)
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial

import msgspec

from perdure.harness import persistent
from perdure.harness.approval import Approvals
from perdure.harness.approval_rules import ApprovalRule, ApprovalRules, add_rule, remove_rule, rules_of
from perdure.harness.approvals import Approval, Wanted, approval, decide, pending
from perdure.harness.calls import ToolTask
from perdure.harness.compaction import CompactionTask
from perdure.harness.compaction_policy import Compaction
from perdure.harness.contexts import Contexts
from perdure.harness.conversation import Conversation, ConversationInfo
from perdure.harness.deletion import count_deleted, delete_conversations
from perdure.harness.documents import Agent, DeletedUsage, Meta, UsageTotals
from perdure.harness.environment import ExecutionEnvironment
from perdure.harness.generation import GenerationTask
from perdure.harness.given import check_parts
from perdure.harness.hook_runner import HookRunner
from perdure.harness.host import Host
from perdure.harness.inbox import Content, InputMode, admit, place
from perdure.harness.leftover import Leftovers
from perdure.harness.limits import LimitCheck, Limits
from perdure.harness.mail import Mailroom
from perdure.harness.model import Models, installed_models
from perdure.harness.opening import Opening
from perdure.harness.person import PersonQuestion, QuestionTask, questions
from perdure.harness.prepare import give_key
from perdure.harness.progress import ProgressWriter
from perdure.harness.registry import Extension, Registry, Setup
from perdure.harness.retention import Retention, RetentionReport, apply_retention
from perdure.harness.runlog import RunLog
from perdure.harness.runs import final_boundary, start_run
from perdure.harness.scopes import EnvironmentFor
from perdure.harness.settings import AfterFailure, PollPolicy, RetryPolicy, Settings, Take
from perdure.harness.submission import Settlements, Submission
from perdure.harness.telemetry import Telemetry
from perdure.harness.tracing import Tracing
from perdure.harness.usage import UsageSummary, summed
from perdure.harness.views import Views
from perdure.kernel.clock import Clock, Entropy
from perdure.kernel.context import Context, bounded
from perdure.kernel.errors import NotFound
from perdure.kernel.json import JsonValue
from perdure.kernel.records import ROOT_CONVERSATION, ConversationRecord, Outcome, SubmissionRecord, SubmissionStatus
from perdure.kernel.reports import OnReport
from perdure.kernel.session import CloseReport, Session
from perdure.kernel.storage import ANY, MAX_SCAN, VACUUM_MS, Anything, SizeReport, Storage, VacuumReport
from perdure.kernel.transaction import UNSET, Transaction, Unset
from perdure.tasks.inspect import LiveTask, TaskNode, Wake
from perdure.tasks.registry import TaskRegistry
from perdure.tasks.runtime import RESTART_LIMIT, TaskRuntime

MOST_LOOKS = 10
"""How often the sum of usage is begun anew because something was deleted meanwhile."""


class Inspection(msgspec.Struct, frozen=True):
    """What is going on, seen without running anything (rule T46)."""

    tasks: list[LiveTask]
    """Live ones, with their state and why they are blocked."""
    queued: list[SubmissionRecord]
    placed: list[SubmissionRecord]


class Harness:
    """Open one with ``Harness.open``."""

    def __init__(
        self,
        session: Session,
        *,
        settings: Settings,
        models: Models | None,
        environment: ExecutionEnvironment | EnvironmentFor | None,
        setup: Setup | None,
        restart_limit: int,
        drain_ms: int,
        limits: Limits | None,
        conversation_limits: Limits | None,
        approvals: Approvals | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.session = session
        self.settings = settings
        self.models = models
        self.closed: CloseReport | None = None
        """What closing had to say, once the harness is closed."""
        self._environment = environment
        self._setup = setup
        task_registry = TaskRegistry()
        self.registry = Registry(task_registry)
        RunLog(session)
        tracing = None if telemetry is None else Tracing(telemetry, session, self.registry)
        contexts = Contexts(session)
        progress = ProgressWriter(session, interval_ms=settings.partial_interval_ms)
        self._host = Host(
            session=session,
            settings=settings,
            models=models,
            registry=self.registry,
            hooks=HookRunner(session, self.registry),
            contexts=contexts,
            progress=progress,
            limits=LimitCheck(session, of_session=limits, of_conversation=conversation_limits),
            tracing=tracing,
            is_blocked=lambda id: self.tasks.blocked(id) is not None,
        )
        # Before the runtime: at the end it is told last, when no call runs any more.
        calls = ToolTask(
            session,
            registry=self.registry,
            progress=progress,
            environment_for=self.environment_for,
            wait=lambda id: self.tasks.wait(id, through_blocked=True),
            approvals=approvals,
            harness=self,
            drain_ms=drain_ms,
            tracing=tracing,
        )
        self.views = Views(session)
        self.tasks = TaskRuntime(session, task_registry, restart_limit=restart_limit, drain_ms=drain_ms)
        if tracing is not None:
            tracing.attach(self.tasks)
        self.views.attach(self.tasks)
        self.settlements = Settlements(session, self.tasks)
        self._mailroom = Mailroom(self)
        generation = GenerationTask(self._host, calls)
        # After the runtime's own derivation, which decides the outcomes that this one cleans up after.
        session.derive(generation.derive)
        self._leftovers = Leftovers(session, settings)
        session.derive(count_deleted)
        task_registry.install(generation, calls, CompactionTask(self._host, drain_ms=drain_ms), QuestionTask())
        task_registry.install(persistent.AnchorTask(), persistent.MessageTask(self, self._host))

    # --- opening and closing -----------------------------------------------------------------------------------

    @staticmethod
    def open(
        storage: Storage,
        *,
        models: Models | str | None = None,
        extensions: Sequence[Extension] = (),
        environment: ExecutionEnvironment | EnvironmentFor | None = None,
        setup: Setup | None = None,
        instructions: str = "",
        steer: Take = "all",
        follow_up: Take = "first",
        after_failure: AfterFailure = "keep",
        retry: RetryPolicy | None = None,
        polling: PollPolicy | None = None,
        partial_interval_ms: int = 100,
        compaction: Compaction | None = None,
        compaction_by_model: Mapping[str, Compaction] | None = None,
        limits: Limits | None = None,
        conversation_limits: Limits | None = None,
        approvals: Approvals | None = None,
        restart_limit: int = RESTART_LIMIT,
        drain_ms: int = 10_000,
        line_bound_ms: int = 1_000,
        document_retention_ms: float = 600_000,
        read_only: bool = False,
        epoch: int | None = None,
        takeover: bool = False,
        clock: Clock | None = None,
        entropy: Entropy | None = None,
        on_report: OnReport | None = None,
        telemetry: Telemetry | None = None,
    ) -> Opening:
        """``async with Harness.open(storage, ...) as harness``: opened, recovered, and closed when the block ends.

        Opening runs nothing: work begins with ``resume()`` or the first call that asks for progress (rule T37). What
        closing had to say is in ``harness.closed``.

        models: whom conversations ask, or ``provider:name`` for an installed adapter with that model as the default;
            without any a run ends no_model.
        extensions: installed in ``harness.registry``, where they may be changed later.
        environment: where files and commands live, for every conversation, or by its id.
        setup: staged in the commit that creates a conversation, after those of extensions.
        instructions: what every conversation's model is told first.
        steer: how many queued steers join a run at once. follow_up: how many queued inputs one run answers.
        after_failure: what becomes of the queue after a run that ended model_error or no_model.
        retry: of requests to models. polling: of responses that models defer.
        partial_interval_ms: text that streams is committed at most so often.
        compaction: how contexts that grow too long are summarised, for models that ``compaction_by_model`` does not
            name; by default they are, as ``Compaction()`` says.
        limits: what all conversations together may spend, those that were deleted too; see ``set_limits``.
        conversation_limits: what each may spend, as far as it has no limits of its own.
        approvals: which calls a person has to allow beside those of tools that say so themselves, and how long a call
            waits for that (rule H300).
        restart_limit: how often a task may be cut off by crashes before it is parked.
        drain_ms: how long an abort and a close wait for code to stop.
        line_bound_ms: a commit block that keeps the others waiting longer is reported.
        document_retention_ms: how long a document that nobody uses stays in memory.
        read_only: look only, also while another process has the store open; nothing runs.
        epoch: the fence this host writes, higher than any before; without it the last one plus 1.
        takeover: also of a store that another host has open. That one adds nothing from here on and stops with
            StaleEpochError; if it stopped inside a commit and is of this machine it is killed (rules K177 to K179).
        clock, entropy: time and chance, for tests.
        on_report: called with each Report, in place of a line in Python's log.
        telemetry: where spans and metrics go, such as ``OpenTelemetry()`` (rules H280 to H289).

        Raises NoAdapter, TypeError, ValueError; entering raises StorageBusy, StorageFormatError, StorageCorrupt,
        StaleEpochError, ExtensionConflict.
        """
        settings = Settings(
            steer=steer,
            follow_up=follow_up,
            after_failure=after_failure,
            retry=RetryPolicy() if retry is None else retry,
            polling=PollPolicy() if polling is None else polling,
            partial_interval_ms=partial_interval_ms,
            instructions=instructions,
            compaction=Compaction() if compaction is None else compaction,
            compaction_by_model=dict(compaction_by_model or {}),
        )

        found = installed_models(models) if isinstance(models, str) else models
        check_parts(
            models=found, extensions=extensions, environment=environment, approvals=approvals, telemetry=telemetry
        )

        async def start() -> Harness:
            session = await Session.start(
                storage,
                clock=clock,
                entropy=entropy,
                on_report=on_report,
                read_only=read_only,
                epoch=epoch,
                takeover=takeover,
                line_bound_ms=line_bound_ms,
                drain_ms=drain_ms,
                document_retention_ms=document_retention_ms,
            )
            try:
                harness = Harness(
                    session,
                    settings=settings,
                    models=found,
                    environment=environment,
                    setup=setup,
                    restart_limit=restart_limit,
                    drain_ms=drain_ms,
                    limits=limits,
                    conversation_limits=conversation_limits,
                    approvals=approvals,
                    telemetry=telemetry,
                )
                harness.registry.install(*extensions)
                if not read_only:
                    await harness._leftovers.load()
                await harness.tasks.recover()
                if not read_only:
                    harness._mailroom.open()
            except BaseException:
                await session.close()
                raise
            return harness

        return Opening(start)

    async def close(self, *, context: Context | None = None) -> CloseReport:
        """What leaving the block does; work is kept, and goes on after the next open. Twice gives the same report."""
        self.closed = await bounded(self.session.close(), context)
        return self.closed

    def resume(self) -> None:
        """Begin to run what is due (rule T37). Raises SessionClosed, SessionFailed."""
        self.tasks.resume()

    # --- conversations -----------------------------------------------------------------------------------------

    async def root(self, *, agent: Agent | None = None, context: Context | None = None) -> Conversation:
        """Conversation 1, created in one commit if it does not exist; ``agent`` counts only then (rule H17)."""
        if await bounded(self.session.conversation(ROOT_CONVERSATION), context) is None:
            async with self.session.commit(context=context) as tx:
                try:
                    await tx.conversation(ROOT_CONVERSATION)
                except NotFound:
                    await self.create(tx, agent, owner=None, root=True)
        return self.handle(ROOT_CONVERSATION)

    async def create_conversation(
        self,
        *,
        agent: Agent | None = None,
        owner: int | None = None,
        name: str | None = None,
        labels: dict[str, str] | None = None,
        context: Context | None = None,
    ) -> Conversation:
        """A new conversation, with its settings and the set-up of extensions and host, in one commit (rule H18).

        ``owner``: the task it belongs to, or None.
        """
        async with self.session.commit(context=context) as tx:
            record = await self.create(tx, agent, owner=owner)
            if name is not None or labels:
                meta = await tx.draft(Meta, conversation=record.id)
                meta.name = name
                meta.labels = labels or {}
        return self.handle(record.id)

    async def create(
        self, tx: Transaction, agent: Agent | None, *, owner: int | None, root: bool = False
    ) -> ConversationRecord:
        """Create a conversation as part of a transaction, with all that belongs to it (rule H18)."""
        record = tx.create_conversation(owner=owner, root=root)
        wanted = agent or Agent()
        draft = await tx.draft(Agent, conversation=record.id)
        draft.model = wanted.model
        draft.thinking = wanted.thinking
        draft.extensions = wanted.extensions
        draft.tools = wanted.tools
        draft.added_tools = wanted.added_tools
        draft.instructions = wanted.instructions
        draft.cwd = wanted.cwd
        draft.limits = wanted.limits
        draft.compaction = wanted.compaction
        await give_key(tx, record.id)
        for setup in self.registry.setups(wanted):
            await setup(tx, record)
        if self._setup is not None:
            await self._setup(tx, record)
        return record

    def handle(self, id: int) -> Conversation:
        """A handle, whether such a conversation exists or not."""
        return Conversation(self, id)

    async def conversation(self, id: int, *, context: Context | None = None) -> Conversation:
        """Raises NotFound."""
        record = await bounded(self.session.conversation(id), context)
        if record is None:
            raise NotFound(f"there is no conversation {id}")
        return self.handle(record.id)

    async def conversations(
        self,
        *,
        owner: int | Anything | None = ANY,
        after: int = 0,
        limit: int = 100,
        context: Context | None = None,
    ) -> list[ConversationInfo]:
        """A page of conversations by id, from after ``after`` on (rule H154). ``owner=None``: the ownerless ones."""
        records = await bounded(self.session.conversations(owner=owner, after=after, limit=limit), context)
        found: list[ConversationInfo] = []
        for record in records:
            meta = await self.session.snapshot(Meta, conversation=record.id, context=context) or Meta()
            found.append(ConversationInfo(record=record, name=meta.name, labels=dict(meta.labels)))
        return found

    async def delete_conversations(
        self, ids: Sequence[int], *, abort: bool = False, context: Context | None = None
    ) -> list[int]:
        """Delete conversations with all that they own, in one commit; the ids of all that went (rules H156, K192).

        Forks of them go on as before (K196), and what they used stays in ``usage()``. ``abort`` first ends what goes on
        in them, background work too, and withdraws what is queued there; that stays so if they are not deleted then.

        Raises NotFound; ConversationOpen for one in which work is live, or which a live task owns; InvalidTransition
        for the root; NotStopped if code does not stop in time. Nothing is deleted then.
        """
        return await delete_conversations(self, ids, abort=abort, context=context)

    def environment_for(self, conversation_id: int) -> ExecutionEnvironment | None:
        """Where a conversation's files and commands live, as the host supplies it (rule H122)."""
        environment = self._environment
        return environment(conversation_id) if callable(environment) else environment

    # --- submissions -------------------------------------------------------------------------------------------

    async def submission(self, id: int, *, context: Context | None = None) -> Submission:
        """Find a submission again, also after a reopen (rule H23). Raises NotFound."""
        record = await bounded(self.session.submission(id), context)
        if record is None:
            raise NotFound(f"there is no submission {id}")
        return Submission(self, record.id, record.conversation_id)  # a store also finds "5" as 5

    async def admit(
        self,
        tx: Transaction,
        conversation_id: int,
        content: Content,
        *,
        mode: InputMode = "follow_up",
        request_id: str | None = None,
    ) -> SubmissionRecord:
        """Take a submission in as part of a transaction, with the run or the boundary that belongs to it."""
        admission = await admit(tx, conversation_id, content, mode=mode, request_id=request_id)
        if admission.starts_run:
            await start_run(self._host, tx, conversation_id, [admission.submission.id])
        elif admission.boundary == "final":
            await final_boundary(self._host, tx, conversation_id)
        elif admission.boundary is not None:
            await place(tx, conversation_id, admission.boundary, self.settings)
        return admission.submission

    # --- tasks -------------------------------------------------------------------------------------------------

    async def inspect(self, *, context: Context | None = None) -> Inspection:
        """Live tasks and why they are blocked, queued and placed submissions. Runs nothing (rules T38, T46)."""
        return Inspection(
            tasks=await bounded(self.tasks.inspect(), context),
            queued=await bounded(self._submissions("queued"), context),
            placed=await bounded(self._submissions("placed"), context),
        )

    async def _submissions(self, status: SubmissionStatus) -> list[SubmissionRecord]:
        found: list[SubmissionRecord] = []
        while True:
            after = found[-1].id if found else 0
            page = await self.session.submissions(status=status, after=after, limit=MAX_SCAN)
            found += page
            if len(page) < MAX_SCAN:
                return found

    async def task_graph(self, *, context: Context | None = None) -> list[TaskNode]:
        """Live tasks, and those that ended within the last hour, at most 200, with their edges (rule H152)."""
        return await self.tasks.task_graph(context=context)

    def wake(self) -> Wake:
        """When a host that may be suspended is needed next (rule T49)."""
        return self.tasks.wake()

    async def idle(
        self, *, background: bool = False, through_blocked: bool = False, context: Context | None = None
    ) -> None:
        """Return when every ownerless conversation is idle (rule T85). Starts the scheduler. Raises WorkBlocked.

        ``background``: and when every persistent subagent waits for messages, all answers told (rule H165).
        """
        wait = partial(persistent.quiet, self) if background else self.tasks.idle
        await wait(through_blocked=through_blocked, context=context)

    def subagents(self) -> list[persistent.PersistentSubagent]:
        """Persistent ones of all conversations, by id (rule H165)."""
        return persistent.running(self)

    async def wait_task(self, id: int, *, through_blocked: bool = False, context: Context | None = None) -> Outcome:
        """How a task ends, such as that of ``conversation.compact()``, once it has. Starts the scheduler.

        Raises NotFound; WorkBlocked if it cannot go on by itself, unless ``through_blocked`` (rule T47).
        """
        return await self.tasks.wait(id, context=context, through_blocked=through_blocked)

    async def abort_task(self, id: int, *, reason: str = "aborted", context: Context | None = None) -> None:
        """Abort any one task, and return once it has ended (rule T81). Raises NotFound, NotStopped."""
        await self.tasks.abort_task(id, reason=reason, context=context)

    async def retry_task(self, id: int, *, context: Context | None = None) -> None:
        """Run a parked task again (rule T43). Raises NotFound, TaskEnded, WorkBlocked."""
        await self.tasks.retry_task(id, context=context)

    async def send_signal(
        self, task: int, name: str, value: JsonValue = None, *, context: Context | None = None
    ) -> bool:
        """Store a signal for a task; False if it has one of that name, which stands (rules T23, T24).

        Raises NotFound, TaskEnded, NotJson.
        """
        return await self.tasks.send_signal(task, name, value, context=context)

    # --- people ------------------------------------------------------------------------------------------------

    async def questions(self, *, context: Context | None = None) -> list[PersonQuestion]:
        """What tools ask and wait for, by task; also of a store that another process has (rule H330). Runs nothing."""
        return await bounded(questions(self.session, self), context)

    # --- approvals ---------------------------------------------------------------------------------------------

    async def approvals(self, *, context: Context | None = None) -> list[Approval]:
        """Calls that wait for a decision, by task; also of a store that another process has (rule H111). Runs nothing.

        Those that are decided, or have expired, are not listed any more.
        """
        return [approval(self, question) for question in await bounded(pending(self.session), context)]

    async def decide(
        self,
        task: int,
        *,
        allow: bool,
        digest: str,
        reason: str = "",
        arguments: dict[str, JsonValue] | None = None,
        by: str | None = None,
        context: Context | None = None,
    ) -> bool:
        """Decide about a waiting call, durably; False if that was done already: the first decision stands (H112, H303).

        ``digest``: of the arguments it is about (``Approval.digest``). ``arguments``: those it is to run with instead.
        A process that does not have the store open sends the same through its mailbox: ``perdure approvals``.

        Raises NotFound; ApprovalRefused for other arguments than those that are asked about, and for a question that
        has expired or whose call has ended; InvalidArguments for edited ones that do not fit the tool.
        """
        wanted = Wanted(task=task, allow=allow, digest=digest, reason=reason, arguments=arguments, by=by)
        async with self.session.commit(context=context) as tx:
            return await decide(self, tx, wanted)

    async def approval_rules(self, *, context: Context | None = None) -> list[ApprovalRule]:
        """The rules that decide calls in place of a person, the oldest first (rule H306)."""
        return rules_of(await self.session.snapshot(ApprovalRules, context=context))

    async def add_approval_rule(self, rule: ApprovalRule, *, context: Context | None = None) -> ApprovalRule:
        """Let a rule decide calls from now on; those that are asked about already still are. Returns it with its id."""
        async with self.session.commit(context=context) as tx:
            return await add_rule(tx, rule)

    async def remove_approval_rule(self, id: int, *, context: Context | None = None) -> ApprovalRule:
        """Revoke a rule: it decides no call whose intent is not committed yet (rule H308). Raises NotFound."""
        async with self.session.commit(context=context) as tx:
            return await remove_rule(tx, id)

    # --- upkeep ------------------------------------------------------------------------------------------------

    async def size(self, *, context: Context | None = None) -> SizeReport:
        """What takes how much in the store, and which conversations take most (rule K220).

        Reads every record once, beside whatever goes on. Raises StorageError.
        """
        self.session.check_open()
        return await bounded(self.session.storage.size(), context)

    async def vacuum(self, *, within_ms: int = VACUUM_MS, context: Context | None = None) -> VacuumReport:
        """Give the disk back what was deleted (rules K221 to K223). Commits wait for it, some seconds a gigabyte.

        Longer than about ``within_ms``, and without room to work in, it leaves the store as it was. ``context`` ends
        the wait alone. Raises StorageError, which does not fail the session, and StaleEpochError.
        """
        self.session.check_open()
        return await bounded(self.session.storage.vacuum(within_ms=within_ms), context)

    async def apply_retention(
        self, policy: Retention, *, dry_run: bool = False, context: Context | None = None
    ) -> RetentionReport:
        """Delete the conversations that a policy names, with all that they own, in batches (rules K225 to K229).

        Each batch is a commit, so that a kill in between leaves the rest for the next call. What is live, queued or
        touched meanwhile is spared. ``dry_run`` only counts. ``vacuum()`` gives the disk back afterwards.
        """
        return await apply_retention(self.session, policy, dry_run=dry_run, context=context)

    # --- usage -------------------------------------------------------------------------------------------------

    async def usage(self, *, context: Context | None = None) -> UsageSummary:
        """What all conversations together have used and cost, deleted ones too (rules H157, H158, H184). Takes a read
        a conversation."""
        deleted = await self.session.snapshot(DeletedUsage, context=context)
        for _ in range(MOST_LOOKS):
            documents: list[UsageTotals | DeletedUsage] = [] if deleted is None else [deleted]
            documents += [totals async for totals in self._all_usage(context)]
            before, deleted = deleted, await self.session.snapshot(DeletedUsage, context=context)
            if deleted == before:
                return summed(documents)
        raise RuntimeError("conversations are deleted faster than what they used can be summed; ask again")

    def set_limits(
        self, *, session: Limits | Unset | None = UNSET, conversation: Limits | Unset | None = UNSET
    ) -> None:
        """Change what the session, and each conversation without limits of its own, may spend; None: no limits.

        It counts from the next request on, and as long as this harness is open (rules H159, H246). At a limit a run
        ends unanswered, ``limit``; what is under way then, also in other conversations, is completed and may exceed
        it. Raises TypeError.
        """
        self._host.limits.change(of_session=session, of_conversation=conversation)

    async def _all_usage(self, context: Context | None) -> AsyncGenerator[UsageTotals]:
        after = 0
        while True:
            page = await self.session.conversations(after=after, limit=MAX_SCAN, context=context)
            for record in page:
                found = await self.session.snapshot(UsageTotals, conversation=record.id, context=context)
                if found is not None:
                    yield found
            if len(page) < MAX_SCAN:
                return
            after = page[-1].id
