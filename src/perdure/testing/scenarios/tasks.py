"""What durable tasks promise: phases, waits, sleeps, signals, ownership, abort (chapter 2 of the rules)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

from perdure.kernel.document import Document
from perdure.kernel.document import field as document_field
from perdure.kernel.entries import Entry
from perdure.kernel.errors import SessionFailed
from perdure.kernel.records import ROOT_CONVERSATION, Aborted, Completed, Failed, Faulted, Outcome
from perdure.kernel.session import Session
from perdure.tasks import Next, Run, Task, TaskRegistry, TaskRuntime, WorkBlocked
from perdure.tasks.registry import AnyTask
from perdure.testing.normal import Records, Rules
from perdure.testing.scenarios.kernel import once, open_session
from perdure.testing.simulation import Host, Scenario

HOUR = 3_600_000


class Said(Entry, kind="app.said"):
    """What a task put on record."""

    text: str


@asynccontextmanager
async def open_tasks(host: Host, *tasks: AnyTask | type[AnyTask]) -> AsyncGenerator[tuple[Session, TaskRuntime]]:
    """A session whose tasks run."""
    async with open_session(host) as session:
        registry = TaskRegistry()
        registry.install(*tasks)
        runtime = TaskRuntime(session, registry)
        await runtime.recover()
        runtime.resume()
        yield session, runtime


async def begin(session: Session, task: type[Task[str, str]], input: str = "", *, background: bool = False) -> int:
    """The id of the one task for this input, created if it is not there yet."""
    async with session.commit(conversation_id=ROOT_CONVERSATION) as tx:
        if await once(tx, f"begin {task.kind} {input}"):
            return tx.create_task(task, input, background=background).id
    (found,) = [t for t in await session.tasks(kind=task.kind) if t.input == input and t.owner is None]
    return found.id


async def until_quiet(host: Host, session: Session) -> None:
    """Return once no code runs, or is to run: what is live waits or sleeps."""
    while any(record.status in ("pending", "running") for record in session.live.settled.values()):
        session.check_open()
        await host.clock.sleep(0.01)


def text_of(outcome: Outcome) -> str:
    match outcome:
        case Completed():
            return str(outcome.result)
        case Failed(error) | Faulted(error):
            return error.code
        case Aborted(reason):
            return reason
        case _:
            return outcome.reason


# --- phases ----------------------------------------------------------------------------------------------------


async def phases(host: Host) -> None:
    """Three phases, each with an effect that the outside world does once for the task's key."""

    class Work(Task[str, str], kind="app.phases"):
        async def start(self, run: Run[str, str, None]) -> Next[str]:
            host.effect("first", key=f"first of {run.idempotency_key}")
            async with run.commit() as tx:
                tx.append(Said(text="first"))
                return tx.go(self.second, 2)

        async def second(self, run: Run[str, str, int]) -> Next[str]:
            assert run.checkpoint == 2
            await host.clock.sleep(0.5)
            host.effect("second", key=f"second of {run.idempotency_key}")
            async with run.commit() as tx:
                tx.append(Said(text="second"))
                return tx.go(self.third, "three")

        async def third(self, run: Run[str, str, str]) -> Next[str]:
            host.effect("third", key=f"third of {run.idempotency_key}")
            async with run.commit() as tx:
                tx.append(Said(text=run.checkpoint))
                return tx.complete("done")

    async with open_tasks(host, Work) as (session, runtime):
        outcome = await runtime.wait(await begin(session, Work))
        assert text_of(outcome) == "done"


async def unsafe_phase(host: Host) -> None:
    """An effect that must not be repeated: its intent is a checkpoint, and a run that was cut off there asks nobody."""

    class Launch(Task[str, str], kind="app.launch"):
        async def start(self, run: Run[str, str, None]) -> Next[str]:
            async with run.commit() as tx:
                return tx.go(self.fire, None)

        async def fire(self, run: Run[str, str, None]) -> Next[str]:
            if run.restarts == 0:
                host.effect("launch")
            async with run.commit() as tx:
                return tx.complete("launched or not")

    async with open_tasks(host, Launch) as (session, runtime):
        await runtime.wait(await begin(session, Launch))


async def memo(host: Host) -> None:
    """A value drawn by chance, kept before it is used: the same in every run."""

    class Draw(Task[str, str], kind="app.draw"):
        async def start(self, run: Run[str, str, None]) -> Next[str]:
            lot = await run.memo("lot", host.entropy.token())
            host.effect("drawn", key=str(lot))
            async with run.commit() as tx:
                return tx.complete("drawn")

    async with open_tasks(host, Draw) as (session, runtime):
        await runtime.wait(await begin(session, Draw))


class Scratch(Document, kind="app.scratch", scope="task"):
    """What a task notes for itself; gone with it."""

    seen: list[str] = document_field(default_factory=list[str])


async def scratch(host: Host) -> None:
    """A document of a task's own: it holds what the phases before committed, and retires in the task's last commit."""

    class Notes(Task[str, str], kind="app.notes"):
        async def start(self, run: Run[str, str, int | None]) -> Next[str]:
            number = run.checkpoint or 0
            async with run.commit() as tx:
                notes = await tx.draft(Scratch, task=run.id)
                assert list(notes.seen) == [str(n) for n in range(number)], "each phase notes once"
                notes.seen.append(str(number))
                if number == 3:
                    return tx.complete(" ".join(notes.seen))
                return tx.go(self.start, number + 1)

    async with open_tasks(host, Notes) as (session, runtime):
        id = await begin(session, Notes)
        assert text_of(await runtime.wait(id)) == "0 1 2 3"
        assert await session.snapshot(Scratch, task=id) is None


async def sleep(host: Host) -> None:
    """Three hours, in three sleeps, over however many restarts; the wall clock steps back in between."""

    class Nap(Task[str, str], kind="app.nap"):
        async def start(self, run: Run[str, str, None]) -> Next[str]:
            async with run.commit() as tx:
                return tx.sleep(tx.at + HOUR, self.wake, (1, tx.at + HOUR))

        async def wake(self, run: Run[str, str, tuple[int, int]]) -> Next[str]:
            number, until = run.checkpoint
            assert host.clock.wall() >= until, "it woke early"
            async with run.commit() as tx:
                tx.append(Said(text=f"slept {number}"))
                if number == 3:
                    return tx.complete("rested")
                return tx.sleep(tx.at + HOUR, self.wake, (number + 1, tx.at + HOUR))

    async with open_tasks(host, Nap) as (session, runtime):
        id = await begin(session, Nap)
        host.clock.step_wall(-60_000)
        await runtime.wait(id)


async def signals(host: Host) -> None:
    """One task gets its signal before it waits, one while it waits, one never and gives up at its deadline."""

    class Ask(Task[str, str], kind="app.ask"):
        async def start(self, run: Run[str, str, None]) -> Next[str]:
            if run.input == "early":
                await host.clock.sleep(1)
            async with run.commit() as tx:
                deadline = tx.at + HOUR if run.input == "never" else None
                return tx.wait_signal("answer", self.told, None, deadline=deadline)

        async def told(self, run: Run[str, str, None]) -> Next[str]:
            async with run.commit() as tx:
                return tx.complete("gave up" if run.timed_out else str(run.signal))

    async with open_tasks(host, Ask) as (session, runtime):
        ids = {input: await begin(session, Ask, input) for input in ("early", "late", "never")}
        for input in ("early", "late"):
            if input == "late":
                await until_quiet(host, session)
            if ids[input] in session.live.settled:
                await runtime.send_signal(ids[input], "answer", input)
        for input, id in ids.items():
            expected = "gave up" if input == "never" else input
            assert text_of(await runtime.wait(id)) == expected


async def faults(host: Host) -> None:
    """A phase that raises, one that makes no progress and one that fails by its own word; their owner sees which."""

    class Bad(Task[str, str], kind="app.bad"):
        async def start(self, run: Run[str, str, None]) -> Next[str]:
            if run.input == "raises":
                raise ValueError("on purpose")
            if run.input == "idles":
                return Next("nothing")
            async with run.commit() as tx:
                return tx.fail("own_word", "on purpose")

    class Owner(Task[str, str], kind="app.owner"):
        async def start(self, run: Run[str, str, None]) -> Next[str]:
            async with run.commit() as tx:
                ids = [tx.create_task(Bad, input).id for input in ("raises", "idles", "fails")]
                return tx.wait(ids, self.ended, None)

        async def ended(self, run: Run[str, str, None]) -> Next[str]:
            async with run.commit() as tx:
                return tx.complete(" ".join(text_of(run.results[id]) for id in sorted(run.results)))

    async with open_tasks(host, Bad, Owner) as (session, runtime):
        outcome = await runtime.wait(await begin(session, Owner))
        assert text_of(outcome) == "exception no_progress own_word"


# --- ownership -------------------------------------------------------------------------------------------------


async def graph(host: Host) -> None:
    """A tree of tasks, two levels of owners who wait for what they own, leaves with effects."""

    class Leaf(Task[str, str], kind="app.leaf"):
        async def start(self, run: Run[str, str, None]) -> Next[str]:
            await host.clock.sleep(len(run.input) % 3)
            host.effect(run.input, key=run.idempotency_key)
            async with run.commit() as tx:
                tx.append(Said(text=run.input))
                return tx.complete(run.input)

    class Branch(Task[str, str], kind="app.branch"):
        async def start(self, run: Run[str, str, None]) -> Next[str]:
            async with run.commit() as tx:
                if len(run.input) < 2:
                    ids = [tx.create_task(Branch, run.input + letter).id for letter in "xy"]
                else:
                    ids = [tx.create_task(Leaf, run.input + letter).id for letter in "xy"]
                return tx.wait(ids, self.gather, None)

        async def gather(self, run: Run[str, str, None]) -> Next[str]:
            async with run.commit() as tx:
                return tx.complete("+".join(text_of(run.results[id]) for id in sorted(run.results)))

    async with open_tasks(host, Leaf, Branch) as (session, runtime):
        outcome = await runtime.wait(await begin(session, Branch, "a"))
        assert text_of(outcome) == "axx+axy+ayx+ayy"


LEAVES = frozenset(f"a{one}{two}" for one in "xy" for two in "xy")


async def fail_fast(host: Host) -> None:
    """Three children waited for fail_fast: one fails, the others are aborted and compensate, their owner goes on."""

    class Child(Task[str, str], kind="app.child"):
        async def start(self, run: Run[str, str, None]) -> Next[str]:
            if run.input == "fails":
                await host.clock.sleep(1)
                async with run.commit() as tx:
                    return tx.fail("enough", "on purpose")
            async with run.commit() as tx:
                return tx.wait_signal("never", self.start, None)

        async def on_abort(self, run: Run[str, str, object], /) -> Next[str]:
            host.effect(f"undo {run.input}", key=run.idempotency_key)
            async with run.commit() as tx:
                tx.append(Said(text=f"undone {run.input}"))
                return tx.abort("undone")

    class Owner(Task[str, str], kind="app.owner"):
        async def start(self, run: Run[str, str, None]) -> Next[str]:
            async with run.commit() as tx:
                ids = [tx.create_task(Child, input).id for input in ("one", "fails", "two")]
                return tx.wait(ids, self.ended, None, policy="fail_fast")

        async def ended(self, run: Run[str, str, None]) -> Next[str]:
            assert len(run.results) == 3
            async with run.commit() as tx:
                return tx.complete(" ".join(text_of(run.results[id]) for id in sorted(run.results)))

    async with open_tasks(host, Child, Owner) as (session, runtime):
        outcome = await runtime.wait(await begin(session, Owner))
        assert text_of(outcome) == "undone enough undone"


async def held(host: Host) -> None:
    """An owner that decides its outcome while what it owns still works: held until all of that has ended."""

    class Slow(Task[str, str], kind="app.slow"):
        async def start(self, run: Run[str, str, None]) -> Next[str]:
            async with run.commit() as tx:
                return tx.sleep(tx.at + HOUR, self.end, None)

        async def end(self, run: Run[str, str, None]) -> Next[str]:
            async with run.commit() as tx:
                tx.append(Said(text="the slow one ends"))
                return tx.complete("slow")

    class Hasty(Task[str, str], kind="app.hasty"):
        async def start(self, run: Run[str, str, None]) -> Next[str]:
            async with run.commit() as tx:
                own = tx.create_conversation(owner=run.id)
                tx.create_task(Slow, "in its own conversation", owner=None, conversation=own.id)
                tx.create_task(Slow, "below it")
                tx.append(Said(text="the hasty one has decided"))
                return tx.complete("hasty")

    async with open_tasks(host, Slow, Hasty) as (session, runtime):
        assert text_of(await runtime.wait(await begin(session, Hasty))) == "hasty"


# --- abort -----------------------------------------------------------------------------------------------------


def abort_tasks(host: Host) -> tuple[type[Task[str, str]], type[Task[str, str]]]:
    """A task that owns a task and a conversation with a task, all of which wait for ever, and one that waits alone."""

    class Waits(Task[str, str], kind="app.waits"):
        async def start(self, run: Run[str, str, None]) -> Next[str]:
            async with run.commit() as tx:
                return tx.wait_signal("go", self.told, None)

        async def told(self, run: Run[str, str, None]) -> Next[str]:
            async with run.commit() as tx:
                return tx.complete(str(run.signal))

        async def on_abort(self, run: Run[str, str, object], /) -> Next[str]:
            host.effect(f"undo {run.input}", key=run.idempotency_key)
            async with run.commit() as tx:
                tx.append(Said(text=f"{run.input} is undone"), conversation=ROOT_CONVERSATION)
                return tx.abort("by its handler")

    class Tree(Task[str, str], kind="app.tree"):
        async def start(self, run: Run[str, str, None]) -> Next[str]:
            async with run.commit() as tx:
                own = tx.create_conversation(owner=run.id)
                inner = tx.create_task(Waits, "inner", owner=None, conversation=own.id)
                below = tx.create_task(Waits, "below")
                return tx.wait([inner.id, below.id], self.ended, None)

        async def ended(self, run: Run[str, str, None]) -> Next[str]:
            async with run.commit() as tx:
                return tx.complete("not aborted")

        async def on_abort(self, run: Run[str, str, object], /) -> Next[str]:
            async with run.commit() as tx:
                below = sorted(text_of(outcome) for outcome in run.results.values())
                tx.append(Said(text=f"the owner, after {below}"))
                return tx.abort("last")

    return Waits, Tree


async def abort_cascade(host: Host) -> None:
    """A conversation is aborted: handlers run bottom-up, and what must not be touched is not."""
    waits, tree = abort_tasks(host)
    async with open_tasks(host, waits, tree) as (session, runtime):
        await begin(session, tree)
        await until_quiet(host, session)
        await runtime.abort_conversation(ROOT_CONVERSATION)
        assert not session.live.settled


def bottom_up(records: Records) -> Iterator[str]:
    """An owner's handler writes only when those of all it owns have written."""
    said = [Said.read(entry).text for entry in records.of(Said.kind)]
    if any(text.startswith("the owner") for text in said[:2]) or len(said) > 3:
        yield f"the handlers wrote {said}"


async def background(host: Host) -> None:
    """An ordinary abort stops at a background task, which ends by its signal; another abort crosses the boundary."""
    waits, tree = abort_tasks(host)
    async with open_tasks(host, waits, tree) as (session, runtime):
        survivor = await begin(session, waits, "survivor", background=True)
        await begin(session, waits, "ordinary")
        await until_quiet(host, session)
        if not await session.request(ROOT_CONVERSATION, "signalled"):
            await runtime.abort_conversation(ROOT_CONVERSATION)
        await runtime.idle(ROOT_CONVERSATION)
        if survivor in session.live.settled:
            assert not session.live.settled[survivor].abort_requested
            async with session.commit(conversation_id=ROOT_CONVERSATION) as tx:
                if await once(tx, "signalled"):
                    await runtime.put_signal(tx, survivor, "go", "survived")
        assert text_of(await runtime.wait(survivor)) == "survived"
        hidden = await begin(session, waits, "hidden", background=True)
        await until_quiet(host, session)
        await runtime.abort_conversation(ROOT_CONVERSATION, background=True)
        assert text_of(await runtime.wait(hidden)) == "by its handler"


# --- closing, and code that is missing -------------------------------------------------------------------------


async def closing(host: Host) -> None:
    """A session closed in the middle of a phase: the task is pending again, nothing is counted, and it goes on."""

    class Long(Task[str, str], kind="app.long"):
        async def start(self, run: Run[str, str, None]) -> Next[str]:
            await host.clock.sleep(10)
            host.effect("long", key=run.idempotency_key)
            async with run.commit() as tx:
                return tx.complete("done")

    async with open_tasks(host, Long) as (session, _):
        id = await begin(session, Long)
        await host.clock.sleep(1)
        before = session.live.settled.get(id)
    if session.failed is not None:
        raise SessionFailed(session.failed)  # what was stopped could not be written back
    async with open_session(host) as session:
        after = session.live.settled.get(id)
        if before is not None:
            assert after is not None, "a close is no outcome"
            assert (after.status, after.restarts) == ("pending", before.restarts), "a close counts nothing"
    async with open_tasks(host, Long) as (session, runtime):
        assert text_of(await runtime.wait(id)) == "done"


async def poison(host: Host) -> None:
    """A task of which the process dies each time: parked at last, it harms nobody, until somebody retries it."""

    class Poison(Task[str, str], kind="app.poison"):
        async def start(self, run: Run[str, str, None]) -> Next[str]:
            async with run.commit() as tx:
                return tx.go(self.drink, None)

        async def drink(self, run: Run[str, str, None]) -> Next[str]:
            if "antidote" not in host.notes:
                host.die()
                await host.clock.sleep(1)
            async with run.commit() as tx:
                return tx.complete("survived")

    async with open_tasks(host, Poison) as (session, runtime):
        id = await begin(session, Poison)
        try:
            outcome = await runtime.wait(id)
        except WorkBlocked as error:
            if (error.task, error.reason) != (id, "parked"):
                raise
            host.notes["antidote"] = True
            await runtime.retry_task(id)
            outcome = await runtime.wait(id)
        assert text_of(outcome) == "survived"


async def blocked(host: Host) -> None:
    """A task whose code is not there stays as it is, a wait for it says so, and it runs once the code is installed."""

    class Late(Task[str, str], kind="app.late"):
        async def start(self, run: Run[str, str, None]) -> Next[str]:
            async with run.commit() as tx:
                return tx.complete("ran")

    async with open_tasks(host) as (session, runtime):
        id = await begin(session, Late)
        try:
            outcome = await runtime.wait(id)
        except WorkBlocked as error:
            if (error.task, error.reason) != (id, "missing_task"):
                raise
            runtime.registry.install(Late)
            outcome = await runtime.wait(id)
        assert text_of(outcome) == "ran"


SAID = Rules(unordered=frozenset({Said.kind}))


def _scenario(
    program: Callable[[Host], Awaitable[None]], *, safe: frozenset[str] = frozenset(), name: str | None = None
) -> Scenario:
    return Scenario(name=name or program.__name__.replace("_", "-"), program=program, safe=safe, rules=SAID)


TASKS = (
    _scenario(phases, safe=frozenset({"first", "second", "third"})),
    Scenario(name="unsafe-phase", program=unsafe_phase, unsafe=frozenset({"launch"})),
    _scenario(memo, safe=frozenset({"drawn"})),
    _scenario(scratch),
    _scenario(sleep),
    _scenario(signals),
    Scenario(name="faults", program=faults, reports=frozenset({"task_faulted"})),
    _scenario(graph, safe=LEAVES),
    _scenario(fail_fast, safe=frozenset({"undo one", "undo two"})),
    _scenario(held),
    Scenario(
        name="abort-cascade",
        program=abort_cascade,
        safe=frozenset({"undo inner", "undo below"}),
        rules=SAID,
        always=bottom_up,
    ),
    _scenario(background, safe=frozenset({"undo ordinary", "undo hidden"})),
    _scenario(closing, safe=frozenset({"long"})),
    Scenario(name="poison", program=poison, reports=frozenset({"task_blocked"})),
    Scenario(name="blocked", program=blocked, reports=frozenset({"task_blocked"})),
)
