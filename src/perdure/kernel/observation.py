"""Seeing committed values as they change: State (the newest), Watch (every frame, exact and in order).

A Source owns one live value. It is published to when a commit settles, by the code that knows what changed; its
observers attach in one synchronous step, so there is no gap and no frame twice (rules K121 to K127).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec
from typing_extensions import override

from perdure.kernel.context import Context, bounded
from perdure.kernel.errors import PerdureError
from perdure.kernel.ops import Op, copy_ops

T = TypeVar("T")

EndReason: TypeAlias = Literal["stopped", "cancelled", "retired", "session_closed", "session_failed", "listener_error"]
MAX_PENDING = 100
"""Frames a slow watch may have waiting before they are replaced by one with the newest full value."""

WAKE_S = 0.005
"""Watches of one source are woken together, at once after a pause and then at most this often: under a stream of
commits a consumer takes several frames a wake, which costs a fraction of a wake for each."""

NO_VALUES: Mapping[str, object] = MappingProxyType({})


class Frame(msgspec.Struct, Generic[T], frozen=True):
    """The value after one commit, and what led to it from the frame before."""

    seq: int
    value: T
    shared_ops: tuple[Op, ...] | None
    """The operations as every reader shares them: not to be changed."""
    values: Mapping[str, object] = msgspec.field(default_factory=lambda: NO_VALUES)
    """What the committing context carried."""

    @property
    def ops(self) -> tuple[Op, ...] | None:
        """The operations that lead here from the frame before, the caller's own; None: start anew from the value."""
        return None if self.shared_ops is None else copy_ops(self.shared_ops)


class WatchEnded(PerdureError):
    """The watch ended for a reason other than its consumer leaving."""

    def __init__(self, reason: EndReason, cause: BaseException | None = None) -> None:
        super().__init__(f"the watch ended: {reason}" + (f" ({type(cause).__name__})" if cause else ""))
        self.reason: EndReason = reason
        self.cause = cause


class Source(Generic[T]):
    """One live value and who observes it."""

    __slots__ = ("_detach", "_frame", "_observers", "_waking", "_woken_at", "ended", "name", "on_idle")

    def __init__(
        self,
        name: str,
        *,
        seq: int,
        value: T,
        on_idle: Callable[[], None] | None = None,
        detach: Callable[[T], T] | None = None,
    ) -> None:
        """``detach`` makes a value of its own for each reader, for values that a reader could change."""
        self.name = name
        self._detach = detach
        self._frame: Frame[T] = Frame(seq, value, None)
        self._observers: dict[Observer[T], None] = {}
        self._waking: asyncio.TimerHandle | None = None
        self._woken_at = -WAKE_S
        self.ended: tuple[EndReason, BaseException | None] | None = None
        self.on_idle = on_idle

    @property
    def value(self) -> T:
        return self._frame.value

    @property
    def seq(self) -> int:
        return self._frame.seq

    @property
    def observed(self) -> bool:
        return bool(self._observers)

    def publish(self, frame: Frame[T]) -> None:
        """The value after a settled commit, or news of the same commit; called in commit order."""
        assert frame.seq >= self._frame.seq, "frames are published in commit order"
        self._frame = frame
        for observer in self._observers:
            observer.take(frame)
        if self._observers and self._waking is None:
            loop = asyncio.get_running_loop()
            pause = self._woken_at + WAKE_S - loop.time()
            if pause <= 0:
                self._wake()
            else:
                self._waking = loop.call_later(pause, self._wake)

    def _wake(self) -> None:
        self._waking = None
        self._woken_at = asyncio.get_running_loop().time()
        for observer in self._observers:
            observer.rouse()

    def end(self, reason: EndReason, cause: BaseException | None = None) -> None:
        if self.ended is None:
            self.ended = (reason, cause)
            for observer in list(self._observers):
                observer.finish(reason, cause)

    def state(self) -> State[T]:
        return State(self)

    def watch(self, context: Context | None = None) -> Watch[T]:
        return Watch(self, context)

    def attach(self, observer: Observer[T]) -> Frame[T]:
        self._observers[observer] = None
        return Frame(self._frame.seq, self._frame.value, None, self._frame.values)

    def detached(self, value: T) -> T:
        """The same value, sharing nothing that one reader could change for another (rule K32)."""
        return value if self._detach is None else self._detach(value)

    def detach(self, observer: Observer[T]) -> None:
        if self._observers.pop(observer, False) is None and not self._observers and self.on_idle is not None:
            self.on_idle()


class Observer(Generic[T]):
    """What State and Watch share: a place at a source, and an end that says why."""

    def __init__(self, source: Source[T]) -> None:
        self._source = source
        self.ended: EndReason | None = None
        self.cause: BaseException | None = None

    @property
    def name(self) -> str:
        return f"{type(self).__name__.lower()} of {self._source.name}"

    def release(self) -> None:
        """Stop observing; releasing twice does nothing."""
        if self.ended is None:
            self.finish("stopped", None)

    def take(self, frame: Frame[T]) -> None:
        raise AssertionError("an observer takes frames")

    def rouse(self) -> None:
        """There are frames to take: wake whoever waits for one."""

    def finish(self, reason: EndReason, cause: BaseException | None) -> None:
        if self.ended is None:
            self.ended, self.cause = reason, cause
            self._source.detach(self)


class State(Observer[T]):
    """A read-only live value. After its end it keeps the last value it saw."""

    def __init__(self, source: Source[T]) -> None:
        super().__init__(source)
        self._last = source.attach(self)
        if source.ended is not None:
            self.finish(*source.ended)

    @property
    def value(self) -> T:
        return self._source.detached(self._last.value)

    @property
    def seq(self) -> int:
        """The commit this value is as of."""
        return self._last.seq

    def take(self, frame: Frame[T]) -> None:
        self._last = frame


class Watch(Observer[T]):
    """An async iterator of frames: first the value at attachment, then one a commit.

    Iteration stops when the watch is released, and raises WatchEnded when it ended for another reason, after the
    frames that came before the end; ContextCancelled or ContextDeadline when its context ended; RuntimeError where
    something else awaits its next frame.
    """

    def __init__(self, source: Source[T], context: Context | None = None) -> None:
        super().__init__(source)
        self._pending: deque[Frame[T]] = deque([source.attach(self)])
        self._wake: asyncio.Future[None] | None = None
        self._context = context
        if source.ended is not None:
            self.finish(*source.ended)

    def take(self, frame: Frame[T]) -> None:
        if len(self._pending) >= MAX_PENDING:
            self._pending.clear()
            frame = Frame(frame.seq, frame.value, None, frame.values)
        self._pending.append(frame)

    def finish(self, reason: EndReason, cause: BaseException | None) -> None:
        super().finish(reason, cause)
        if reason in ("stopped", "cancelled"):
            self._pending.clear()
        self.rouse()

    @override
    def rouse(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def __aiter__(self) -> AsyncIterator[Frame[T]]:
        return self

    async def __anext__(self) -> Frame[T]:
        if self.ended is None and self._context is not None and self._context.ended:
            self.finish("cancelled", None)
            raise self._context.error()
        while not self._pending:
            if self.ended == "stopped":
                raise StopAsyncIteration
            if self.ended is not None:
                raise WatchEnded(self.ended, self.cause)
            if self._wake is not None:
                raise RuntimeError(f"this {self.name} has one consumer already; open another watch")
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await bounded(self._wake, self._context)
            except PerdureError:
                self.finish("cancelled", None)
                raise
            finally:
                self._wake = None
        frame = self._pending.popleft()
        value = self._source.detached(frame.value)
        return frame if value is frame.value else Frame(frame.seq, value, frame.shared_ops, frame.values)

    async def each(self, listener: Callable[[Frame[T]], Awaitable[None] | None]) -> None:
        """Call ``listener`` with every frame, in order, until the watch ends.

        A listener that raises ends this watch alone (``listener_error``), and the error is raised here.
        """
        async for frame in self:
            try:
                result = listener(frame)
                if result is not None:
                    await result
            except Exception as error:
                self.finish("listener_error", error)
                raise
