"""Whole programs on a simulated machine: killed at every commit, started again, and held against a run that was not
(rules P2 to P7).

    async def program(host: Host) -> None:
        async with Session.open(host.storage, clock=host.clock, entropy=host.entropy) as session:
            ...

    explore(Scenario(name="shop:PAYING", program=program)).check()

A program does its part and returns, and must be able to begin again at any point: that is what a process does that
was killed. What it does outside goes through ``host.effect``, which alone survives a kill, beside the store.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast

from perdure.harness.documents import TOOL_RESULT, ToolResultData
from perdure.kernel.errors import PerdureError
from perdure.kernel.reports import Report
from perdure.storage.memory import MemoryStorage
from perdure.testing import invariants
from perdure.testing.faults import CrashableStorage, Fault, FaultyStorage
from perdure.testing.loop import Killed, SimulatedClock, SimulatedEntropy, SimulationLoop, SimulationStuck, run
from perdure.testing.normal import Normal, Records, Rules, differences, normal_form, read_records

DOWNTIME = 1.0
"""Virtual seconds between a kill and the next start."""
SETTLING = 120.0
"""Virtual seconds in which everything a program started must have ended once it has."""
MOST_DEATHS = 20
"""How often a program may end its own process."""
MAX_PROBLEMS = 20
"""Of one run; more would say the same again."""
SHOWN = 3
"""Failed runs that ``check`` tells of."""

Check: TypeAlias = Callable[[Records], Iterable[str]]
"""What is wrong with the records, one line each."""


class World:
    """Everything outside: what happened there stays, whatever becomes of the process."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.entropy = SimulatedEntropy(seed)
        """Goes on over restarts, as the operating system's does."""
        self.now = 0.0
        """Virtual seconds."""
        self.attempts: Counter[str] = Counter()
        """How often each effect was asked for."""
        self.effects: Counter[str] = Counter()
        """How often each effect took place."""
        self.notes: dict[str, object] = {}
        """Whatever else a scenario's outside world remembers."""
        self._keys: set[str] = set()

    def apply(self, what: str, key: str | None) -> bool:
        """Attempt an effect; False if it took place before, under the same key."""
        self.attempts[what] += 1
        if key is not None:
            if key in self._keys:
                return False
            self._keys.add(key)
        self.effects[what] += 1
        return True


class Host:
    """One life of the simulated process. Nothing in it survives a kill, and after one it reaches nobody outside."""

    def __init__(self, world: World, storage: FaultyStorage, loop: SimulationLoop, life: int) -> None:
        self.storage = storage
        self.clock = SimulatedClock(loop)
        self.entropy = world.entropy
        self.loop = loop
        self.seed = world.seed
        """For programs that do by chance what they do: the same in every life."""
        self.life = life
        """1, and one more after each restart."""
        self.reports: list[Report] = []
        self.heard_seq = 0
        self._world = world

    @property
    def notes(self) -> dict[str, object]:
        """The world's memory; a dead process sees a copy."""
        return dict(self._world.notes) if self.loop.dead else self._world.notes

    def effect(self, what: str, *, key: str | None = None) -> bool:
        """Something happens outside: ``what`` names it, one name for each thing that is to happen.

        With an idempotency key the outside world does one thing for that key, ever; False: it has done it already.
        """
        if self.loop.dead:
            raise Killed("a killed process has no effects")
        return self._world.apply(what, key)

    def die(self) -> None:
        """The process ends here, by the program's own doing."""
        self.storage.die()

    def heard(self, seq: int) -> None:
        """Somebody outside the store was told of a commit: it must be there after every crash."""
        if not self.loop.dead:
            self.heard_seq = max(self.heard_seq, seq)

    def report(self, report: Report) -> None:
        """For ``on_report``."""
        if not self.loop.dead:
            self.reports.append(report)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A program, and what is expected of it beside what holds of every program."""

    name: str
    """Of one's own scenarios ``module:NAME``, where it is found: the commands that repeat a run name it so."""
    program: Callable[[Host], Awaitable[None]]
    """What the process does each time it is started."""
    safe: frozenset[str] = frozenset()
    """Effects that must have taken place exactly once in the end, however often they were attempted."""
    unsafe: frozenset[str] = frozenset()
    """Effects that must never be attempted twice. Where no crash was, they must have taken place."""
    rules: Rules = field(default_factory=Rules)
    """What its own kinds of records and its tools need."""
    may_live: frozenset[str] = frozenset()
    """Kinds of tasks that go on when the program has ended."""
    always: Check | None = None
    """Asked of the store after each crash, and at the end."""
    ends: Check | None = None
    """Asked at the end."""
    reports: frozenset[str] = frozenset()
    """Types of reports that are expected; any other is a finding."""
    any_effects: bool = False
    """Effects need not be declared; none may take place twice."""
    deletes: bool = False
    """Conversations may go away, with all that they own."""
    steady: bool = True
    """Whether its final records are the same whatever the timing. If not, runs are held against the invariants
    alone."""
    loses_calls: bool = False
    """The program itself cuts calls off: some are ``interrupted`` though no fault was."""
    require: Callable[[], None] | None = None
    """Raises ImportError where something is not installed that the program needs."""
    storage: Callable[[], CrashableStorage] = MemoryStorage
    """Makes the empty store of each run."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What makes one run reproducible."""

    scenario: str
    """Its name."""
    seed: int = 0
    """Of nonces and chances."""
    faults: tuple[Fault, ...] = ()
    """The first ends the first life, the second the one after it, and so on; the last life goes on to the end."""
    order_seed: int | None = None
    """Of the order of tasks, and of how long commits take. None: asyncio's own order, and no delays."""

    def command(self) -> str:
        """The one command that repeats the run."""
        kill = f" --kill {','.join(map(str, self.faults))}" if self.faults else ""
        order = "" if self.order_seed is None else f" --order-seed {self.order_seed}"
        return f"perdure crash --mode simulation --scenario {self.scenario} --seed {self.seed}{kill}{order}"


@dataclass(kw_only=True)
class Life:
    """How one life of the process went."""

    fault: Fault | None
    ended: Literal["done", "killed", "failed", "stuck"]
    reached: bool
    """Whether the fault took place; a fault beyond the end of the program does not."""
    opened: bool
    """Whether it came as far as to open its store."""
    commits: int
    reads: int
    steps: int


@dataclass(kw_only=True)
class Run:
    """One run of a plan, over all its lives."""

    plan: Plan
    world: World
    lives: list[Life] = field(default_factory=list[Life])
    problems: list[str] = field(default_factory=list[str])
    records: Records | None = None
    form: Normal | None = None
    interrupted: int = 0
    """Calls that ended ``interrupted``."""

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def disturbed(self) -> bool:
        """Whether anything but the end of the program ended a life."""
        return any(life.ended != "done" or life.reached for life in self.lives)

    @property
    def reached(self) -> list[Fault]:
        """The faults that took place."""
        return [life.fault for life in self.lives if life.fault is not None and life.reached]

    def __str__(self) -> str:
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        return f"{self.plan.scenario}: {'ok' if self.ok else 'FAILED'}{lines}\n  replay: {self.plan.command()}"


def simulate(scenario: Scenario, plan: Plan | None = None, *, reference: Run | None = None) -> Run:
    """Run a plan. With a ``reference``, the final records are compared with those of that uninterrupted run."""
    plan = plan or Plan(scenario=scenario.name)
    result = Run(plan=plan, world=World(plan.seed))
    store: CrashableStorage = scenario.storage()
    seen: Records | None = None
    for number in range(1, len(plan.faults) + MOST_DEATHS + 2):
        fault = plan.faults[number - 1] if number <= len(plan.faults) else None
        life, store = _live(scenario, result, store, fault, number)
        result.lives.append(life)
        if life.opened:
            records = run(read_records(store))
            result.problems += _problems_of_store(scenario, records, seen)
            seen = records
        if life.ended == "stuck" or (life.ended == "done" and not life.reached):
            break
    else:
        result.problems.append(f"the process died of itself {MOST_DEATHS} times: it would never come to an end")
    result.records = seen
    if seen is None:
        result.problems.append("the program never opened its store")
    else:
        result.problems += _problems_at_the_end(scenario, result, seen)
        result.form = normal_form(seen, scenario.rules)
    if scenario.steady and reference is not None and reference.form is not None and result.form is not None:
        result.problems += differences(reference.form, result.form, scenario.rules)
    del result.problems[MAX_PROBLEMS:]
    return result


def _caused_by(report: Report) -> str:
    error = report.error
    return "" if error is None else f" ({type(error).__name__}: {error})"


def _live(
    scenario: Scenario, result: Run, store: CrashableStorage, fault: Fault | None, number: int
) -> tuple[Life, CrashableStorage]:
    """One life of the process, and the store as its end left it."""
    plan, world, problems = result.plan, result.world, result.problems
    order = None if plan.order_seed is None else plan.order_seed * 1_000 + number
    loop = SimulationLoop(order_seed=order, start=world.now)
    storage = FaultyStorage(store, fault=fault, delay_seed=None if order is None else str(order), on_death=loop.kill)
    if fault is not None and fault.kind == "step":
        loop.kill_at_step = fault.n
    host = Host(world, storage, loop, number)
    ended: Literal["done", "killed", "failed", "stuck"] = "done"
    try:
        try:
            loop.run_until_complete(scenario.program(host))
        except (Killed, SimulationStuck):
            raise
        except Exception as error:
            if not (storage.reached and _is_failure_of_storage(error)):
                raise
            ended = "failed"
        problems += _left_behind(loop)
    except Killed:
        ended = "killed"
    except SimulationStuck as error:
        ended = "stuck"
        problems.append(f"life {number}: {error}")
    except Exception as error:
        ended = "stuck"
        problems.append(f"life {number}: the program raised {type(error).__name__}: {error}")
    reached = fault is not None and (storage.reached or ended == "killed")
    # A failing store makes itself heard in many ways; what they are is not looked at.
    if not storage.reached:
        problems += [f"life {number}: nobody caught {what}" for what in loop.unhandled]
        problems += [
            f"life {number}: a report of type {report.type}: {report.message}{_caused_by(report)}"
            for report in host.reports
            if report.type not in scenario.reports
        ]
    life = Life(
        fault=fault,
        ended=ended,
        reached=reached,
        opened=storage.opened,
        commits=storage.commits,
        reads=storage.reads,
        steps=loop.steps,
    )
    world.now = loop.time() + DOWNTIME
    after = storage.snapshot()
    loop.drop()
    stored = run(_last_commit(after)) if storage.opened else 0
    for who, seq in (("the process was", storage.acknowledged), ("somebody outside was", host.heard_seq)):
        if seq > stored:
            problems.append(f"life {number}: {who} told of commit {seq}, but the last one stored is {stored}")
    return life, after


async def _last_commit(store: CrashableStorage) -> int:
    info = await store.open(read_only=True, writer="judge", log_id="", now=0)
    await store.close()
    return info.seq


def _left_behind(loop: SimulationLoop) -> Iterator[str]:
    """Whatever a program started and did not end."""
    loop.run_until_complete(asyncio.sleep(SETTLING))
    for name in loop.pending():
        yield f"after the end of the program, task {name!r} still runs"


def _is_failure_of_storage(error: BaseException) -> bool:
    """Whether a program may end so when its storage failed."""
    if isinstance(error, BaseExceptionGroup):
        inner = cast("BaseExceptionGroup[BaseException]", error).exceptions
        return all(_is_failure_of_storage(each) for each in inner)
    return isinstance(error, PerdureError)


# --- judging ---------------------------------------------------------------------------------------------------


def _problems_of_store(scenario: Scenario, records: Records, before: Records | None) -> Iterator[str]:
    yield from invariants.after_any_crash(records)
    if before is not None:
        yield from invariants.between(before, records, deletes=scenario.deletes)
    if scenario.always is not None:
        yield from scenario.always(records)


def _problems_at_the_end(scenario: Scenario, result: Run, records: Records) -> Iterator[str]:
    yield from invariants.at_the_end(records, may_live=scenario.may_live)
    if scenario.ends is not None:
        yield from scenario.ends(records)
    world = result.world
    interrupted = [
        data
        for data in (entry.data_as(ToolResultData) for entry in records.of(TOOL_RESULT))
        if data.code == "interrupted"
    ]
    result.interrupted = len(interrupted)
    for data in interrupted:
        if data.name not in scenario.rules.unsafe:
            yield f"call {data.task} of {data.name} was interrupted, which only an unsafe one may be"
        if not result.disturbed and not scenario.loses_calls:
            yield f"call {data.task} of {data.name} was interrupted, though nothing interrupted it"
    for what in sorted(world.attempts.keys() - scenario.safe - scenario.unsafe):
        if not scenario.any_effects:
            yield f"effect {what!r} is not in the scenario"
        elif world.effects[what] > 1:
            yield f"effect {what!r} took place {world.effects[what]} times"
    for what in sorted(scenario.safe):
        if world.effects[what] != 1:
            yield f"effect {what!r} took place {world.effects[what]} times ({world.attempts[what]} attempts)"
    for what in sorted(scenario.unsafe):
        if world.attempts[what] > 1:
            yield f"effect {what!r} was attempted {world.attempts[what]} times, and may be only once"
        if world.attempts[what] == 0 and not result.disturbed:
            yield f"effect {what!r} never took place"


# --- exploring -------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Tally:
    """What came of many runs."""

    runs: int = 0
    failures: list[Run] = field(default_factory=list[Run])
    faults: Counter[str] = field(default_factory=Counter[str])
    """Faults that took place, by kind."""
    reruns: int = 0
    """Safe effects that were attempted again."""
    interrupted: int = 0
    """Calls that ended so."""

    def add(self, result: Run, scenario: Scenario) -> None:
        """Count one more run."""
        self.runs += 1
        if not result.ok:
            self.failures.append(result)
        self.faults.update(fault.kind for fault in result.reached)
        self.reruns += sum(result.world.attempts[what] > 1 for what in scenario.safe)
        self.interrupted += result.interrupted


@dataclass(kw_only=True)
class Exploration(Tally):
    """What came of running one scenario under many faults."""

    reference: Run
    """The run that nothing interrupted."""

    def check(self) -> None:
        """Raise AssertionError with what went wrong and the command that repeats it; also for a program that commits
        nothing, of which a kill says nothing."""
        if self.failures:
            said = "\n".join(map(str, self.failures[:SHOWN]))
            raise AssertionError(f"{len(self.failures)} of {self.runs} runs failed\n{said}")
        if not self.reference.lives[0].commits:
            raise AssertionError("the program commits nothing: there is nothing that a kill could cut off")


def run_reference(scenario: Scenario, *, seed: int = 0) -> Run:
    """The run nothing interrupts. What it leaks is looked for here, once."""
    reference = simulate(scenario, Plan(scenario=scenario.name, seed=seed))
    gc.collect()
    return reference


def edges(commits: int) -> list[Fault]:
    """Both edges of every commit: right after each is stored, and as each is handed over."""
    return [Fault("after", n) for n in range(commits + 1)] + [Fault("before", n) for n in range(1, commits + 1)]


def failures(commits: int) -> list[Fault]:
    """Each commit refused, and each stored but not acknowledged."""
    return [Fault(kind, n) for n in range(1, commits + 1) for kind in ("fail", "unacknowledged")]


def explore(
    scenario: Scenario,
    *,
    seed: int = 0,
    twice: int | None = None,
    schedules: int = 0,
    steps: int = 0,
    reads: int = 0,
    storage_failures: bool = True,
) -> Exploration:
    """Stop the scenario after and before each of its commits, refuse each, and compare what it comes to.

    ``twice``: how many runs are killed again during the recovery (None: once for each first kill).
    ``schedules``: how many orders of tasks are tried, each with one kill. ``steps``: how many kills at any
    callback of the event loop. ``reads``: how many reads that fail. Which ones, the seed decides.
    """
    chosen = random.Random(f"{scenario.name} {seed}")  # noqa: S311
    reference = run_reference(scenario, seed=seed)
    found = Exploration(reference=reference)
    found.add(reference, scenario)
    if not reference.ok:
        return found
    life = reference.lives[0]

    def try_out(*faults: Fault, order_seed: int | None = None) -> Run:
        plan = Plan(scenario=scenario.name, seed=seed, faults=faults, order_seed=order_seed)
        result = simulate(scenario, plan, reference=reference)
        found.add(result, scenario)
        return result

    recoveries: list[tuple[Fault, int]] = []
    for fault in edges(life.commits):
        result = try_out(fault)
        recoveries.append((fault, result.lives[-1].commits))
    if storage_failures:
        for fault in failures(life.commits):
            try_out(fault)
    firsts = recoveries if twice is None else chosen.sample(recoveries, min(twice, len(recoveries)))
    for fault, commits in firsts:
        try_out(fault, chosen.choice(edges(commits)))
    for _ in range(schedules):
        try_out(chosen.choice(edges(life.commits)), order_seed=chosen.randrange(1_000_000))
    for _ in range(steps):
        try_out(Fault("step", chosen.randrange(1, life.steps)))
    for _ in range(reads if life.reads else 0):
        try_out(Fault("read", chosen.randint(1, life.reads)))
    return found
