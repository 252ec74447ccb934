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
"""Its consumer left; its context was cancelled; what it watches is gone; the session closed; it failed; the listener of
``each`` raised."""

MAX_PENDING = 100
"""Frames a slow watch may have waiting before they are replaced by one with the newest full value."""

WAKE_S = 0.01
"""Watches of one source are woken together, at once after a pause and then at most this often: under a stream of
commits a consumer takes several frames a wake, which costs a fraction of a wake for each."""

NO_VALUES: Mapping[str, object] = MappingProxyType({})


class Frame(msgspec.Struct, Generic[T], frozen=True):
    """The value after one commit, and what led to it from the frame before."""

    seq: int
    """The number of the commit; it rises with each."""
    value: T
    """Whole, as of that commit."""
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


class _Link(Generic[T]):
    """A published frame and, once there is one, what was published after it. A watch follows the chain at its own pace:
    publishing costs the same however many there are, and what all have taken is let go."""

    __slots__ = ("frame", "later", "number")

    def __init__(self, frame: Frame[T], number: int) -> None:
        self.frame = frame
        self.number = number
        self.later: _Link[T] | None = None


class Source(Generic[T]):
    """One live value and who observes it."""

    __slots__ = (
        "_observers",
        "_waiting",
        "_wake_by",
        "_waking",
        "_woken_at",
        "ended",
        "keep",
        "name",
        "newest",
        "oldest",
        "on_idle",
        "own",
    )

    def __init__(
        self,
        name: str,
        *,
        seq: int,
        value: T,
        on_idle: Callable[[], None] | None = None,
        detach: Callable[[T], T] | None = None,
    ) -> None:
        """``detach`` makes a value of its own for each reader, for values that a reader could change (rule K32)."""
        self.name = name
        self.own = detach
        self.newest: _Link[T] = _Link(Frame(seq, value, None), 0)
        self.keep = 0
        """How many frames before the newest stay at hand for a watch that goes on behind one; at most MAX_PENDING."""
        self.oldest = self.newest
        self._observers: dict[Observer[T], None] = {}
        self._waiting: dict[Watch[T], None] = {}
        """The watches that have taken everything and are to be woken."""
        self._waking: asyncio.TimerHandle | None = None
        self._woken_at = -WAKE_S
        self._wake_by = MAX_PENDING // 2
        """At the frame of this number at the latest: a pause makes no slow consumer of a quick one."""
        self.ended: tuple[EndReason, BaseException | None] | None = None
        self.on_idle = on_idle

    @property
    def value(self) -> T:
        return self.newest.frame.value

    @property
    def seq(self) -> int:
        return self.newest.frame.seq

    @property
    def observed(self) -> bool:
        return bool(self._observers)

    def publish(self, frame: Frame[T]) -> None:
        """The value after a settled commit, or news of the same commit; called in commit order."""
        before = self.newest
        assert frame.seq >= before.frame.seq, "frames are published in commit order"
        self.newest = before.later = _Link(frame, before.number + 1)
        self._let_go()
        if self._waiting:
            loop = asyncio.get_running_loop()
            pause = self._woken_at + WAKE_S - loop.time()
            if pause <= 0 or self.newest.number >= self._wake_by:
                self._wake()
            elif self._waking is None:
                self._waking = loop.call_later(pause, self._wake)
        if self.newest.number % MAX_PENDING == 0:
            for observer in self._observers:
                observer.catch_up()

    def _let_go(self) -> None:
        if not self.keep:
            self.oldest = self.newest
            return
        while self.newest.number - self.oldest.number > self.keep:
            assert self.oldest.later is not None, "the chain leads to the newest"
            self.oldest = self.oldest.later

    def at_hand(self, number: int) -> Frame[T] | None:
        """The frame of this number, if it and all later ones are there."""
        link = self._find(number)
        return None if link is None else link.frame

    def _find(self, number: int) -> _Link[T] | None:
        link: _Link[T] | None = self.oldest if self.oldest.number <= number <= self.newest.number else None
        while link is not None and link.number < number:
            link = link.later
        return link

    def place(self, after: int | None) -> tuple[_Link[T], bool]:
        """Where a watch starts, and whether with the value there: behind the frame of this number, else at the newest
        one."""
        found = None if after is None else self._find(after)
        return (self.newest, True) if found is None else (found, False)

    def _wake(self) -> None:
        if self._waking is not None:
            self._waking.cancel()
            self._waking = None
        self._woken_at = asyncio.get_running_loop().time()
        self._wake_by = self.newest.number + MAX_PENDING // 2
        waiting, self._waiting = self._waiting, {}
        for watch in waiting:
            watch.rouse()

    def rouse_later(self, watch: Watch[T]) -> None:
        """``watch`` waits for what is published next."""
        self._waiting[watch] = None

    def end(self, reason: EndReason, cause: BaseException | None = None) -> None:
        if self.ended is None:
            self.ended = (reason, cause)
            for observer in list(self._observers):
                observer.finish(reason, cause)

    def state(self) -> State[T]:
        return State(self)

    def watch(self, context: Context | None = None, *, after: int | None = None) -> Watch[T]:
        return Watch(self, context, after=after)

    def attach(self, observer: Observer[T]) -> None:
        self._observers[observer] = None

    def detach(self, observer: Observer[T]) -> None:
        if isinstance(observer, Watch):
            self._waiting.pop(observer, None)
        if self._observers.pop(observer, False) is None and not self._observers and self.on_idle is not None:
            self.on_idle()


class Observer(Generic[T]):
    """What State and Watch share: a place at a source, and an end that says why."""

    def __init__(self, source: Source[T]) -> None:
        self._source = source
        self.ended: EndReason | None = None
        self.cause: BaseException | None = None
        source.attach(self)

    @property
    def name(self) -> str:
        return f"{type(self).__name__.lower()} of {self._source.name}"

    def release(self) -> None:
        """Stop observing; releasing twice does nothing."""
        if self.ended is None:
            self.finish("stopped", None)

    def catch_up(self) -> None:
        """Let go of frames that it will not take any more."""

    def finish(self, reason: EndReason, cause: BaseException | None) -> None:
        """It ends here, if it has not: nothing comes after what it has."""
        if self.ended is None:
            self.ended, self.cause = reason, cause
            self._source.detach(self)


class State(Observer[T]):
    """A read-only live value. After its end it keeps the last value it saw."""

    def __init__(self, source: Source[T]) -> None:
        super().__init__(source)
        self._last: Frame[T] | None = None
        """At its end."""
        if source.ended is not None:
            self.finish(*source.ended)

    @property
    def value(self) -> T:
        value = (self._last or self._source.newest.frame).value
        return value if self._source.own is None else self._source.own(value)

    @property
    def seq(self) -> int:
        """The commit this value is as of."""
        return (self._last or self._source.newest.frame).seq

    @override
    def finish(self, reason: EndReason, cause: BaseException | None) -> None:
        if self._last is None:
            self._last = self._source.newest.frame
        super().finish(reason, cause)


class Watch(Observer[T]):
    """An async iterator of frames: first the value at attachment, then one a commit. With ``after``, the number of a
    frame that is still at hand, exactly those behind that one.

    Iteration stops when the watch is released, and raises WatchEnded when it ended for another reason, after the
    frames that came before the end; ContextCancelled or ContextDeadline when its context ended; RuntimeError where
    something else awaits its next frame.
    """

    def __init__(self, source: Source[T], context: Context | None = None, *, after: int | None = None) -> None:
        super().__init__(source)
        self._at, self._anew = source.place(after)
        """With ``_anew`` the value at ``_at`` comes next, as a beginning; else what is later than that."""
        self.number = self._at.number
        """Of the frame it gave last: its place among the source's."""
        self._left: deque[tuple[Frame[T], int]] = deque()
        """Once it has ended, what was published before."""
        self._wake: asyncio.Future[None] | None = None
        self._context = context
        if source.ended is not None:
            self.finish(*source.ended)

    @override
    def catch_up(self) -> None:
        newest = self._source.newest
        if newest.number - self._at.number + self._anew > MAX_PENDING:
            self._at = newest
            self._anew = True

    @override
    def finish(self, reason: EndReason, cause: BaseException | None) -> None:
        if self.ended is None and reason not in ("stopped", "cancelled"):
            number = self.number
            while (frame := self._take()) is not None:
                self._left.append((frame, self.number))
            self.number = number
        super().finish(reason, cause)
        self._at = _Link(self._at.frame, 0)  # the end of the chain, for this watch
        self.rouse()

    def rouse(self) -> None:
        """There are frames to take, or it ended: wake whoever waits for it."""
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _take(self) -> Frame[T] | None:
        """The next frame that is there."""
        if self.ended is not None:
            if not self._left:
                return None
            frame, self.number = self._left.popleft()
            return frame
        at = self._at
        if self._source.newest.number - at.number >= MAX_PENDING:
            self.catch_up()
            at = self._at
        if self._anew:
            self._anew, self.number = False, at.number
            return Frame(at.frame.seq, at.frame.value, None, at.frame.values)
        if at.later is None:
            return None
        self._at, self.number = at.later, at.later.number
        return at.later.frame

    def __aiter__(self) -> AsyncIterator[Frame[T]]:
        return self

    async def __anext__(self) -> Frame[T]:
        if self.ended is None and self._context is not None and self._context.ended:
            self.finish("cancelled", None)
            raise self._context.error()
        while (frame := self._take()) is None:
            if self.ended == "stopped":
                raise StopAsyncIteration
            if self.ended is not None:
                raise WatchEnded(self.ended, self.cause)
            if self._wake is not None:
                raise RuntimeError(f"this {self.name} has one consumer already; open another watch")
            self._wake = asyncio.get_running_loop().create_future()
            self._source.rouse_later(self)
            try:
                await bounded(self._wake, self._context)
            except PerdureError:
                self.finish("cancelled", None)
                raise
            finally:
                self._wake = None
        own = self._source.own
        return frame if own is None else Frame(frame.seq, own(frame.value), frame.shared_ops, frame.values)

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
