"""The task runtime: runs what is due, and is asked about tasks, waits, signals and aborts.

What becomes of records is derived (derive.py); this room watches what has settled and acts on it: a running record
without an invocation gets one, a pending one is begun, a marked one is stopped. So nothing runs before the commit
that allows it has settled (rule K62), and after a crash the records alone say where to go on (T1).
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from msgspec import structs

from perdure.kernel.context import Context, bounded
from perdure.kernel.errors import NotFound, SessionClosed, SessionFailed, StorageError
from perdure.kernel.json import JsonValue
from perdure.kernel.records import Completing, Outcome, Pending, Running, TaskRecord, Terminal, Waiting, to_raw
from perdure.kernel.reports import Report
from perdure.kernel.session import Session, Settled, Straggler
from perdure.kernel.transaction import Transaction
from perdure.tasks import abort, recovery
from perdure.tasks import inspect as looking
from perdure.tasks.alarm import Alarm, due_at
from perdure.tasks.blocking import Blocked, Fit, quick_verdict, resolve
from perdure.tasks.derive import Derivation, Mode, began, resumed, stood_down
from perdure.tasks.errors import BlockedReason, TaskEnded, WaitCycle, WorkBlocked
from perdure.tasks.inspect import LiveTask, TaskNode, Wake
from perdure.tasks.invocation import Invocation
from perdure.tasks.ownership import WorkTree
from perdure.tasks.registry import AnyTask, TaskRegistry
from perdure.tasks.values import check_name, with_value
from perdure.tasks.waits import Waits

PAGE = 1_000
"""Tasks one commit of the scheduler moves at most."""
RESTART_LIMIT = 5
"""How often a task may be cut off before it is parked, where a host says nothing else (rule T42)."""
KEPT_ENDED = looking.GRAPH_ENDED
"""Ended tasks that are in memory."""

OnTask = Callable[[TaskRecord], None]


class TaskRuntime:
    """The tasks of one session. Make it, ``await recover()``, then ``resume()`` when work may run."""

    def __init__(
        self, session: Session, registry: TaskRegistry, *, restart_limit: int = RESTART_LIMIT, drain_ms: int = 10_000
    ) -> None:
        if restart_limit < 1 or drain_ms < 0:
            raise ValueError(f"restart_limit is 1 or more, drain_ms 0 or more: not {restart_limit} and {drain_ms}")
        self.session = session
        self.registry = registry
        self.restart_limit = restart_limit
        self.drain_ms = drain_ms
        self.tree = WorkTree()
        self.mode: Mode = "off"
        self.waits = Waits()
        self.invocations: dict[int, Invocation] = {}
        self._code: dict[asyncio.Task[None], int] = {}
        """Whose code an asyncio task runs."""
        self.overdue: dict[int, Invocation] = {}
        """Those that were asked to stop and did not within the drain bound."""
        self.blocked_tasks: dict[int, Blocked] = {}
        self._derivation = Derivation(self)
        self._alarm = Alarm(session.clock, look=session.live.settled.get, fire=self._fire, spawn=self._spawn)
        self.ended: OrderedDict[int, TaskRecord] = OrderedDict()
        self._due: dict[int, None] = {}
        """Tasks the scheduler's next commit looks at."""
        self._beginning = False
        self._recovered = False
        self._on_blocked: list[OnTask] = []
        self._on_unblocked: list[OnTask] = []
        self._on_resumed: list[Callable[[], None]] = []
        self._errands: set[asyncio.Task[None]] = set()
        # Phases run with the variables of whoever made the runtime, not of whoever happened to commit.
        self._variables = contextvars.copy_context()
        session.derive(self._derivation)
        session.observe(self._observe)
        session.on_stop(self._stop)
        session.on_failure(self._fail)
        registry.on_change(self._look_at_blocked)

    # --- opening and running -----------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Once, at open: load who owns what, and commit what a crash left to do. Runs nothing (rules T35-T37)."""
        assert not self._recovered, "a store is recovered once, as it is opened"
        await recovery.load_tree(self)
        if not self.session.info.read_only:
            try:
                await recovery.recover(self)
            except Exception as error:
                self.session.fail(error)  # rule T44
                raise
        for record in self.session.live.settled.values():
            self._alarm.set(record)
        self._recovered = True

    def resume(self) -> None:
        """Begin to run what is due, from now on. Does nothing if that is so already.

        Raises SessionClosed, SessionFailed, StorageError for a store that is open for reading only.
        """
        self.session.check_open()
        if self.mode == "on":
            return
        if self.session.info.read_only:
            raise StorageError("this store is open for reading only: nothing can run; open it without read_only")
        self._switch("on")
        self._alarm.start()

    def enable_aborts(self) -> None:
        """Let abort handlers run, and nothing else that does not yet (rule T39)."""
        if self.mode == "off" and self.running:
            self._switch("aborting")

    def _switch(self, mode: Mode) -> None:
        assert self._recovered, "recover() comes first"
        self.mode = mode
        if mode == "on":
            for observer in self._on_resumed:
                observer()
        for record in list(self.session.live.settled.values()):
            self._consider(record)

    @property
    def running(self) -> bool:
        """Whether code may run at all: the session is neither closing nor failed."""
        return not self.session.closing and self.session.failed is None

    # --- what the rules and the invocations ask -----------------------------------------------------------------

    def before(self, id: int) -> TaskRecord | None:
        """The live task as the transactions staged so far leave it."""
        return self.session.live.staged.get(id)

    def is_live(self, id: int) -> bool:
        live = self.session.live
        return id in live.settled or id in live.staged

    def is_active(self, id: int) -> bool:
        return id in self.invocations

    def code(self, kind: str) -> AnyTask | None:
        return self.registry.find(kind)

    def verdict(self, record: TaskRecord, *, closely: bool = False) -> AnyTask | Blocked:
        """The code that fits, or why none does; stored values are looked at if asked for, or to be migrated."""
        found = quick_verdict(record, self.registry, self.restart_limit)
        if isinstance(found, Blocked) or (found.version == record.version and not closely):
            return found
        fit = self.resolve(record)
        return fit if isinstance(fit, Blocked) else fit.task

    def resolve(self, record: TaskRecord) -> Fit | Blocked:
        return resolve(record, self.registry, self.restart_limit)

    async def outcome(self, id: int, *, context: Context | None = None) -> Outcome | None:
        """How a task ended; None while it has not. Raises NotFound."""
        record = self.ended.get(id) or await self.session.task(id, context=context)
        if record is None:
            raise NotFound(f"there is no task {id}")
        return record.state.outcome if isinstance(record.state, Terminal) else None

    def report(self, report: Report) -> None:
        self.session.report(report)

    # --- waiting -----------------------------------------------------------------------------------------------

    async def wait(self, task_id: int, *, context: Context | None = None, through_blocked: bool = False) -> Outcome:
        """How the task ends, once it has. Starts the scheduler. Cancelling the wait leaves the work alone (rule T77).

        Raises WorkBlocked if the task, or something it needs to end, cannot go on by itself, unless
        ``through_blocked`` asks to wait for that too (rule T47); WaitCycle (T68); NotFound; SessionClosed,
        SessionFailed.
        """
        outcome = await self.outcome(task_id, context=context)
        if outcome is not None:
            return outcome
        self.resume()
        self.refuse_own([task_id])

        def check() -> Outcome | None:
            record = self.session.live.settled.get(task_id)
            if record is not None:
                if not through_blocked:
                    self.refuse_blocked(task_id)
                return None
            ended = self.ended[task_id].state
            assert isinstance(ended, Terminal)
            return ended.outcome

        return await self.waits.until(check, task=task_id, context=context)

    async def idle(
        self, conversation_id: int | None = None, *, context: Context | None = None, through_blocked: bool = False
    ) -> None:
        """Return once no ordinary work under the conversation is live; None: under any ownerless one (T84, T85).

        Starts the scheduler. Raises as ``wait`` does.
        """
        here = conversation_id
        if here is not None and await self.session.conversation(here, context=context) is None:
            raise NotFound(f"there is no conversation {here}")
        self.resume()
        tree, live = self.tree, self.session.live.settled

        def counts(record: TaskRecord) -> bool:
            """Whether it keeps the scope from being idle; what is further below a conversation hangs on such a one."""
            if here is None:
                return tree.ordinary_to_root(record, live.get)
            return record.conversation_id == here and record.owner is None and not record.background

        def under() -> Iterable[TaskRecord]:
            return live.values() if here is None else tree.owned_by_conversation(here, live.get)

        self.refuse_own(record.id for record in under() if counts(record))
        seen: int | None = None

        def check() -> bool | None:
            nonlocal seen
            if seen not in live:  # as long as that one is live, no other need be looked for
                seen = next((record.id for record in under() if counts(record)), None)
                if seen is None:
                    return True
            if not through_blocked:
                self._refuse_blocked(counts)
            return None

        await self.waits.until(check, task=None, context=context)

    def refuse_own(self, on: Iterable[int]) -> None:
        """Raise WaitCycle if this is the code of a task that one of these needs to end first (rule T68). What such code
        has begun beside itself may wait."""
        mine = None if (task := asyncio.current_task()) is None else self._code.get(task)
        if mine is not None:
            cycle = self.tree.cycle(mine, on, self.session.live.settled.get)
            if cycle is not None:
                raise WaitCycle(cycle)

    def _refuse_blocked(self, needed: Callable[[TaskRecord], bool]) -> None:
        """Raise WorkBlocked if any live task that ``needed`` accepts needs something blocked to end first."""
        live = self.session.live.settled
        for id, blocker in self.tree.held_up(self.blocked_tasks, live.get).items():
            if needed(live[id]):
                blocked = self.blocked_tasks[blocker]
                raise WorkBlocked(blocker, blocked.reason, live[blocker].kind, blocked.detail)

    def refuse_blocked(self, task_id: int) -> None:
        """Raise WorkBlocked if the task, or something it needs to end, cannot go on by itself (rule T47)."""
        self._refuse_blocked(lambda record: record.id == task_id)

    # --- acting on tasks ---------------------------------------------------------------------------------------

    async def abort_task(self, id: int, *, reason: str = "aborted", context: Context | None = None) -> None:
        """Abort any one task and its ordinary owned work; return once it is terminal (rules T71-T74, T81).

        Does nothing to a task that has ended. By itself it lets only abort handlers run.
        Raises NotFound; NotStopped if code does not stop within the drain bound: the marks stay.
        """
        await abort.abort_task(self, id, reason=reason, context=context)

    async def abort_conversation(
        self,
        id: int,
        *,
        reason: str = "aborted",
        background: bool = False,
        before: abort.Before | None = None,
        context: Context | None = None,
    ) -> None:
        """Abort the live ordinary work under a conversation, ``background`` work too if asked for (rules T78-T80).

        ``before(tx)`` writes in the commit of the marks. Returns once all that was live then has ended. Raises as
        ``abort_task`` does.
        """
        await abort.abort_conversation(self, id, reason=reason, background=background, before=before, context=context)

    async def send_signal(self, task_id: int, name: str, value: JsonValue, *, context: Context | None = None) -> bool:
        """Store a signal for a task; False if one of that name was there, which stands (rules T23, T24).

        Raises NotFound, TaskEnded, NotJson.
        """
        async with self.session.commit(context=context) as tx:
            return await self.put_signal(tx, task_id, name, value)

    async def put_signal(self, tx: Transaction, task_id: int, name: str, value: JsonValue) -> bool:
        """``send_signal`` as part of a transaction."""
        check_name(name)
        record = tx.live_task(task_id)
        if record is None:
            ended = await tx.task(task_id)
            raise TaskEnded(f"{ended.kind} task {task_id} has ended; signal {name!r} comes too late")
        added = with_value(record.raw_signals, name, to_raw(value, at=f"signal {name!r}"))
        if added is None:
            return False
        tx.put_task(structs.replace(record, raw_signals=added))
        return True

    async def retry_task(self, id: int, *, context: Context | None = None) -> None:
        """Run a parked task again, its restarts forgotten (rule T43). Starts the scheduler.

        Does nothing to a task that is not blocked. Raises WorkBlocked if it is for lack of fitting code, NotFound,
        TaskEnded.
        """
        async with self.session.commit(context=context) as tx:
            record = tx.live_task(id)
            if record is None:
                ended = await tx.task(id)
                raise TaskEnded(f"{ended.kind} task {id} has ended; there is nothing to retry")
            verdict = self.verdict(record)
            if isinstance(verdict, Blocked) and verdict.reason == "parked" and isinstance(record.state, Pending):
                tx.put_task(structs.replace(record, restarts=0))
        self.resume()
        blocked, record = self.blocked_tasks.get(id), self.session.live.settled.get(id)
        if blocked is not None and record is not None:
            raise WorkBlocked(id, blocked.reason, record.kind, blocked.detail)

    # --- looking -----------------------------------------------------------------------------------------------

    async def inspect(self, *, context: Context | None = None) -> list[LiveTask]:
        """Every live task by id, with its state and why it is blocked. Runs nothing."""
        self.session.check_open()
        if context is not None:
            context.check()
        return looking.live_tasks(self)

    async def task_graph(self, *, context: Context | None = None) -> list[TaskNode]:
        """Every live task and those that ended within an hour, at most 200, by id, with their edges. Runs nothing.

        Of tasks that ended before this opening of the store it knows those that were created late (rule H152).
        """
        self.session.check_open()
        return await bounded(looking.graph(self), context)

    def wake(self) -> Wake:
        """When a host that may be suspended is next needed (rule T49)."""
        return looking.wake(self)

    def blocked(self, id: int) -> BlockedReason | None:
        """Why a task that was to run could not; None if it is not blocked."""
        known = self.blocked_tasks.get(id)
        return None if known is None else known.reason

    def on_blocked(self, observer: OnTask) -> None:
        """Call this each time a task becomes blocked; why is in ``blocked_tasks`` (rule T48)."""
        self._on_blocked.append(observer)

    def on_unblocked(self, observer: OnTask) -> None:
        """Call this each time a blocked task goes on, is to be aborted, or has ended."""
        self._on_unblocked.append(observer)

    def on_resumed(self, observer: Callable[[], None]) -> None:
        """Call this when work may run from now on."""
        self._on_resumed.append(observer)

    # --- what has settled --------------------------------------------------------------------------------------

    def _observe(self, settled: Settled) -> None:
        tasks = settled.batch.tasks
        if tasks:
            self._observe_tasks(tasks)
        if settled.batch.deleted:
            gone = set(settled.batch.deleted)
            for record in [record for record in self.ended.values() if record.conversation_id in gone]:
                del self.ended[record.id]

    def _observe_tasks(self, tasks: Sequence[TaskRecord]) -> None:
        # What has ended comes first: looking at the others may stir waits for it.
        ended = [record.id for record in tasks if not record.live]
        for record in tasks:
            if not record.live:
                self.tree.forget_task(record)
                self._unblock(record)
                self.ended[record.id] = record
        for record in tasks:
            if record.live:
                self._alarm.set(record)
                self._consider(record)
        if ended:
            self._look_above(tasks)
            self.waits.ended(ended)
            while len(self.ended) > KEPT_ENDED:
                self.ended.popitem(last=False)
        if self.blocked_tasks:
            self.waits.stir()

    def _look_above(self, tasks: Sequence[TaskRecord]) -> None:
        """A marked owner whose last work ended goes on: its record need not have changed in that commit."""
        for record in tasks:
            if not record.live and not record.background:
                above = self.tree.owner_task(record)
                owner = None if above is None else self.session.live.settled.get(above)
                if owner is not None and owner.abort_requested:
                    self._consider(owner)

    def _consider(self, record: TaskRecord) -> None:
        """Do what a settled record asks for: stop, start or begin its code. Looking again does no harm."""
        id, state = record.id, record.state
        invocation = self.invocations.get(id)
        if invocation is not None:
            if record.abort_requested and not invocation.aborting:
                self._stop_one(invocation)
            return
        if isinstance(state, (Completing, Terminal)):
            self._unblock(record)  # no code of it is needed any more (T56)
            return
        if not self.running or self.mode == "off":
            return
        staged = self.session.live.staged.get(id)
        if staged is None or staged.state is not state or staged.abort_requested != record.abort_requested:
            return  # a later commit is on its way, and is looked at when it has settled
        if record.abort_requested:
            self._consider_marked(record)
        elif self.mode != "on":
            return
        elif isinstance(state, Running):
            self._start(record)
        elif isinstance(state, Pending):
            fit = self.resolve(record)
            if isinstance(fit, Blocked):
                self._block(record, fit)
            else:
                self._unblock(record)
                self._begin_soon(id)

    def _consider_marked(self, record: TaskRecord) -> None:
        if self.tree.owns_live(record.id, self.session.live.settled.get):
            return
        self._unblock(record)
        task = self.verdict(record, closely=True)
        ready = isinstance(record.state, Running) and record.restarts < self.restart_limit
        if ready and not isinstance(task, Blocked) and task.definition.handles_abort:
            self._start(record)
        else:
            self._begin_soon(record.id)

    def _start(self, record: TaskRecord) -> None:
        invocation = Invocation(self, record, self._variables.copy())
        self.invocations[record.id] = invocation
        self._code[invocation.task] = record.id
        invocation.task.add_done_callback(lambda _: self._invocation_ended(invocation))

    def _stop_one(self, invocation: Invocation) -> None:
        if not invocation.stopping:
            invocation.stop()
            self._spawn(abort.watch_stop(self, invocation), f"stopping {invocation.name}")

    def _invocation_ended(self, invocation: Invocation) -> None:
        id, task = invocation.id, invocation.task
        self._code.pop(task, None)
        if self.invocations.get(id) is invocation:
            del self.invocations[id]
            self.overdue.pop(id, None)
        error = None if task.cancelled() else task.exception()
        if error is not None and self.running:
            self.session.fail(error)  # not the phase's own error, which faults its task: the runtime's commit failed
        record = self.session.live.settled.get(id)
        if record is None or not self.running:
            return
        if task.cancelled() and not invocation.stopping and isinstance(record.state, Running):
            # Somebody else cancelled it, such as an event loop that shuts down: a cut-off run like a crash's.
            self._spawn(self._count_cut_off(record), f"cut off {invocation.name}")
        else:
            self._consider(record)

    async def _count_cut_off(self, record: TaskRecord) -> None:
        async with Transaction(self.session) as tx:
            now = tx.live_task(record.id)
            if now is not None and now.state is record.state:
                tx.put_task(structs.replace(stood_down(now), restarts=now.restarts + 1))

    # --- the scheduler's commits -------------------------------------------------------------------------------

    def _begin_soon(self, id: int) -> None:
        self._due[id] = None
        if not self._beginning:
            self._beginning = True
            self._spawn(self._begin(), "perdure task scheduler")

    async def _begin(self) -> None:
        """Commit all that is due as running, or as decided, together."""
        try:
            while self._due and self.running:
                ids = list(self._due)[:PAGE]
                for id in ids:
                    del self._due[id]
                async with Transaction(self.session) as tx:
                    for id in ids:
                        record = tx.live_task(id)
                        if record is None or isinstance(record.state, Completing):
                            continue
                        if record.abort_requested:
                            self._derivation.advance(tx, record)
                        elif isinstance(record.state, Pending) and self.mode == "on":
                            tx.put_task(began(record, tx.at))
        finally:
            self._beginning = False

    def _fire(self, ids: list[int]) -> None:
        self._spawn(self._wake_up(ids), "perdure task alarm rings")

    async def _wake_up(self, ids: list[int]) -> None:
        """Commit those that sleep, or wait with a deadline, and are due."""
        for first in range(0, len(ids), PAGE):
            async with Transaction(self.session) as tx:
                for id in ids[first : first + PAGE]:
                    record = tx.live_task(id)
                    at = None if record is None else due_at(record)
                    if record is None or at is None or record.abort_requested:
                        continue
                    if at > tx.at:  # the wall clock stepped back meanwhile
                        self._alarm.set(record)
                    else:
                        tx.put_task(resumed(self, record, tx.at, timed_out=isinstance(record.state, Waiting)))

    # --- blocked work ------------------------------------------------------------------------------------------

    def _block(self, record: TaskRecord, why: Blocked) -> None:
        known = self.blocked_tasks.get(record.id)
        self.blocked_tasks[record.id] = why
        if known is not None and known.reason == why.reason:
            return
        self.report(
            Report(
                type="task_blocked",
                message=f"{record.kind} cannot run: {why.reason}",
                task=record.id,
                kind=record.kind,
                conversation=record.conversation_id,
            )
        )
        for observer in self._on_blocked:
            observer(record)
        self.waits.stir()

    def _unblock(self, record: TaskRecord) -> None:
        if self.blocked_tasks.pop(record.id, None) is not None:
            for observer in self._on_unblocked:
                observer(record)

    def _look_at_blocked(self) -> None:
        """The code at hand changed: what it unblocks runs (rule T33)."""
        if self.running:
            for id in list(self.blocked_tasks):
                record = self.session.live.settled.get(id)
                if record is not None:
                    self._consider(record)

    # --- ending ------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Something the runtime does by itself; if it fails while the session is well, the session fails."""
        task = asyncio.get_running_loop().create_task(work, name=name, context=self._variables.copy())
        self._errands.add(task)
        task.add_done_callback(self._errand_ended)
        return task

    def _errand_ended(self, task: asyncio.Task[None]) -> None:
        self._errands.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self.running:
            self.session.fail(error)

    def _fail(self, cause: BaseException) -> None:
        self.mode = "off"
        self._alarm.stop()
        for invocation in self.invocations.values():
            invocation.stop()
        self.waits.fail(SessionFailed(cause))

    async def _stop(self, drain_ms: int) -> list[Straggler]:
        """At close: stop all code, and write what was stopped back as pending (rule T40)."""
        self.mode = "off"
        self._alarm.stop()
        if self.session.failed is None:
            self.waits.fail(SessionClosed("the session closed while this waited; the work is kept"))
        stragglers = await abort.stop_all(self, drain_ms)
        for errand in list(self._errands):
            errand.cancel()
        if self._errands:
            await asyncio.wait(list(self._errands))
        if self.session.failed is None and not self.session.info.read_only:
            await self._write_back()
        return stragglers

    async def _write_back(self) -> None:
        at_work = {id for id, invocation in self.invocations.items() if not invocation.task.done()}
        live = self.session.live.staged
        ids = [id for id, r in live.items() if isinstance(r.state, Running) and id not in at_work]
        for first in range(0, len(ids), PAGE):
            async with Transaction(self.session, internal=True) as tx:
                for id in ids[first : first + PAGE]:
                    record = tx.live_task(id)
                    if record is not None and isinstance(record.state, Running):
                        tx.put_task(stood_down(record))  # nothing is counted: it was no crash
