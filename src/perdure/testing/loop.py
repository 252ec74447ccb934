"""A deterministic event loop: one thread, no I/O, virtual time, and an order of tasks that a seed decides (rule P2).

Time stands still while anything is ready and jumps to the next timer when nothing is, so hours cost nothing. What
can never go on (nothing ready, no timer) raises SimulationDeadlock instead of hanging, and what never comes to an end
raises SimulationRunaway.

Order. asyncio calls back in the order of ``call_soon``, and code rests on that: futures call back in the order they
were asked to, commits settle in theirs. It promises no order among tasks, though. With a seed, tasks that
are ready next to each other take their steps in any order; plain callbacks keep their place, and no task passes one.
A little virtual time passes with each step then, so that timers come between steps too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import warnings
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from heapq import heappop
from types import CodeType, FrameType
from typing import Any, NoReturn, TypeVar, cast

from typing_extensions import TypeVarTuple, override

from perdure.kernel.errors import PerdureError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_STEPS = 200_000
"""Callbacks one loop may run before it counts as running for ever."""
LONGEST_STEP = 0.002
"""Virtual seconds that a step takes at most when a seed decides the order."""
MAX_DEPTH = 50
"""Coroutines that await one another, as far as they are looked at."""
MAX_CLOSES = 200
"""How often the coroutines of a task that go on awaiting in their clean-up are closed when their loop is dropped."""
MAX_ROUNDS = 10
"""How often clean-up may start further tasks, which are closed too."""
EPOCH_MS = 1_750_000_000_000
"""Wall time at virtual second 0, in ms UTC."""


class SimulationStuck(PerdureError):
    """The simulated program will never end."""


class SimulationDeadlock(SimulationStuck):
    """Nothing is ready and no timer is set, yet somebody waits. The message shows where each task waits."""


class SimulationRunaway(SimulationStuck):
    """More steps than a simulation may take."""


class Killed(PerdureError):
    """The simulated process was killed; nothing of it runs any more."""


class NoOutside(PerdureError, NotImplementedError):
    """The simulated program opened a socket or started a process: there are none in it."""


async def _no_outside(*_: object, **__: object) -> NoReturn:
    raise NoOutside(
        "there are no sockets and no processes in a simulation; give your code its outside as a parameter, and let the "
        "test's own go through host.effect"
    )


class SimulationLoop(asyncio.BaseEventLoop):
    """``SimulationLoop(order_seed=7).run_until_complete(main())``. Without a seed the order is asyncio's own.

    ``start``: virtual seconds at the beginning. A call into an executor runs at once, in a callback of its own: what
    waits there for something of this loop would wait for ever. Threads of their own are refused.
    """

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _asyncgens: weakref.WeakSet[AsyncGenerator[Any, Any]]
    _stopping: bool
    _thread_id: int | None

    def __init__(self, *, order_seed: int | None = None, start: float = 0.0, max_steps: int = MAX_STEPS) -> None:
        super().__init__()
        self.steps = 0
        """Callbacks run so far."""
        self.unhandled: list[str] = []
        """What nobody caught: errors of tasks nobody awaits, of callbacks."""
        self.kill_at_step: int | None = None
        self._order = None if order_seed is None else random.Random(f"order {order_seed}")  # noqa: S311
        self._now = start
        self._max_steps = max_steps
        self._dead = False
        self._held: set[asyncio.Task[Any]] = set()
        """Tasks of a loop that stopped, so that their coroutines do not go away one by one, half cleaned up."""
        self._held_generators: list[object] = []

    # --- time and order ----------------------------------------------------------------------------------------

    @override
    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        """One callback: what run_forever repeats."""
        if self._dead or self.steps == self.kill_at_step:
            self.kill()
            raise Killed("the simulated process was killed")
        scheduled = self._scheduled
        while scheduled and scheduled[0].cancelled():
            heappop(scheduled)
        if not self._ready and not self._stopping:
            if not scheduled:
                self._hold()
                raise SimulationDeadlock(f"nothing will ever happen again; waiting:\n{self.describe_tasks()}")
            self._now = max(self._now, scheduled[0].when())
        while scheduled and scheduled[0].when() <= self._now:
            timer = heappop(scheduled)
            if not timer.cancelled():
                self._ready.append(timer)
        if not self._ready:
            return
        if self.steps >= self._max_steps:
            self._hold()
            raise SimulationRunaway(f"{self.steps} steps, and no end; waiting:\n{self.describe_tasks()}")
        self.steps += 1
        handle = self._next()
        if not handle.cancelled():
            handle._run()  # pyright: ignore[reportPrivateUsage]  # what every event loop does with its handles

    def _next(self) -> asyncio.Handle:
        ready, order = self._ready, self._order
        if order is None:
            return ready.popleft()
        self._now += order.random() * LONGEST_STEP
        tasks = 0
        while tasks < len(ready) and _is_task_step(ready[tasks]):
            tasks += 1
        if tasks < 2:
            return ready.popleft()
        chosen = order.randrange(tasks)
        handle = ready[chosen]
        del ready[chosen]
        return handle

    # --- no threads --------------------------------------------------------------------------------------------

    @override
    def run_in_executor(  # pyright: ignore[reportIncompatibleMethodOverride]  # typeshed's differs between versions
        self, executor: object, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run it at once, in a callback of this loop. No thread is started; ``executor`` is not looked at."""
        future: asyncio.Future[T] = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                result = func(*args)
            except StopIteration as error:
                future.set_exception(RuntimeError(f"the call raised {error!r}, which a future cannot hold"))
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_soon(run)
        return future

    create_connection = create_unix_connection = create_datagram_endpoint = _no_outside  # pyright: ignore[reportAssignmentType]
    create_server = create_unix_server = subprocess_exec = subprocess_shell = _no_outside  # pyright: ignore[reportAssignmentType]

    def _write_to_self(self) -> None:
        """call_soon_threadsafe would wake a selector here: nothing sleeps in this loop."""
        import threading

        if self._thread_id is not None and self._thread_id != threading.get_ident():
            raise RuntimeError("a thread called into the simulated event loop; nothing that threads do is reproducible")

    # --- the end -----------------------------------------------------------------------------------------------

    @property
    def dead(self) -> bool:
        """Killed: no callback runs any more."""
        return self._dead

    def kill(self) -> None:
        """Stop after the callback that is running: run_until_complete raises Killed."""
        self._dead = True
        self._hold()

    def _hold(self) -> None:
        self._held |= asyncio.all_tasks(self)
        self._held_generators = list(self._asyncgens)

    def drop(self) -> None:
        """Let go of everything of a loop that ended or was killed, so that nothing of it runs later.

        Clean-up code of abandoned coroutines does run here (Python runs it when a frame goes), but the loop calls
        nothing back: it gets as far as its next await. What must not survive a kill is cut off before. It logs nothing.
        """
        self._dead = True
        logs_below = logging.root.manager.disable
        logging.disable()  # libraries tell at length of clean-up that fails in a process that is no more
        asyncio._set_running_loop(self)  # clean-up code may ask for it
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._close_tasks()
        finally:
            asyncio._set_running_loop(None)
            logging.disable(logs_below)
        self.close()

    def _close_tasks(self) -> None:
        closed: set[asyncio.Task[Any]] = set()
        for _ in range(MAX_ROUNDS):
            left = (asyncio.all_tasks(self) | self._held) - closed
            if not left:
                return
            for task in left:
                closed.add(task)
                self._held.discard(task)
                _close(task.get_coro())
            for generator in self._held_generators:
                for awaited in _awaits(generator)[1:]:
                    _close(awaited)

    @override
    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep what nobody caught, for the judge; of a dead loop nobody wants to know."""
        if not self._dead:
            error = context.get("exception")
            what = "" if error is None else f": {type(error).__name__}: {error}"
            task = context.get("task") or context.get("future")
            name = f" ({task.get_name()})" if isinstance(task, asyncio.Task) else ""
            self.unhandled.append(f"{context.get('message', 'an error')}{name}{what}")

    def _asyncgen_finalizer_hook(self, agen: object) -> None:
        """An abandoned generator: closed by a task as asyncio does, unless the process is dead."""
        if not self._dead and not self.is_closed():
            closing = cast("Coroutine[Any, Any, None]", cast("Any", agen).aclose())
            self.call_soon(self.create_task, closing)

    def pending(self) -> list[str]:
        """The names of tasks that have not ended."""
        return sorted(task.get_name() for task in asyncio.all_tasks(self))

    def describe_tasks(self) -> str:
        """Every task that has not ended, and where it waits."""
        return "\n".join(
            f"  {task.get_name()}: {_where(task.get_coro())}"
            for task in sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        )


def _is_task_step(handle: asyncio.Handle) -> bool:
    callback = handle._callback  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue, reportUnknownVariableType]
    return isinstance(getattr(callback, "__self__", None), asyncio.Task)


def _awaits(coro: object) -> list[object]:
    """A coroutine and what it awaits, outermost first."""
    chain: list[object] = []
    while coro is not None and len(chain) < MAX_DEPTH:
        chain.append(coro)
        coro = getattr(coro, "cr_await", None) or getattr(coro, "ag_await", None)
    return chain


def _close(coro: object) -> None:
    """Close a coroutine and what it awaits, however often their clean-up awaits again."""
    ahead = _awaits(coro)
    for _ in range(MAX_CLOSES):
        if not ahead:
            return
        first = ahead.pop(0)
        if getattr(first, "cr_frame", None) is None:
            continue
        with contextlib.suppress(BaseException):  # the process is dead: nobody is left to hear of it
            cast("Coroutine[Any, Any, Any]", first).close()
        if getattr(first, "cr_frame", None) is not None:
            ahead = _awaits(first) + ahead  # it awaited in its clean-up


def _where(coro: object) -> str:
    """Where a suspended coroutine waits: the chain of awaits, outermost first."""
    places: list[str] = []
    for each in _awaits(coro):
        frame: FrameType | None = getattr(each, "cr_frame", None) or getattr(each, "ag_frame", None)
        code: CodeType | None = getattr(each, "cr_code", None) or getattr(each, "ag_code", None)
        if code is not None:
            line = "" if frame is None else f":{frame.f_lineno}"
            places.append(f"{code.co_name} ({code.co_filename.rsplit('/', 1)[-1]}{line})")
    return " > ".join(places) or "unknown"


class SimulatedClock:
    """The Session's clock over a simulated loop. The wall clock may be stepped; the monotonic one goes on."""

    def __init__(self, loop: SimulationLoop, *, skew_ms: int = 0) -> None:
        self._loop = loop
        self.skew_ms = skew_ms

    def wall(self) -> int:
        return EPOCH_MS + int(self._loop.time() * 1000) + self.skew_ms

    def monotonic(self) -> float:
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def step_wall(self, ms: int) -> None:
        """Set the wall clock forward, or back."""
        self.skew_ms += ms


class SimulatedEntropy:
    """Nonces and chances from a seed. A process that starts again must go on with the same object, or a nonce
    would come twice."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(f"entropy {seed}")  # noqa: S311  # reproducible is what it is for

    def token(self) -> str:
        return f"{self._random.getrandbits(128):032x}"

    def fraction(self) -> float:
        return self._random.random()


def run(main: Awaitable[T], *, order_seed: int | None = None) -> T:
    """Run something to its end in a loop of its own. Raises SimulationStuck if it has none."""
    loop = SimulationLoop(order_seed=order_seed)
    try:
        return loop.run_until_complete(main)
    finally:
        loop.drop()
