"""ToolCall: what a running tool knows of its call, and what it may show meanwhile (rules H94 and H95)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar, overload

from perdure.harness.documents import LiveTool
from perdure.harness.output import Bounded, LiveOutput, OutputLimits
from perdure.kernel.context import BACKGROUND, Context
from perdure.kernel.errors import PerdureError
from perdure.kernel.json import JsonValue, copy_json, encode_json

if TYPE_CHECKING:
    from perdure.harness.harness import Harness
    from perdure.harness.tool import ToolResult

MAX_DETAILS: Final = 256 * 1024
"""Bytes of JSON that ``details`` may take."""
MAX_DIAGNOSTICS: Final = 100
MAX_DIAGNOSTIC: Final = 2_000
"""Characters of one diagnostic."""


class CallEnded(PerdureError):
    """A call's handle was used after its invocation had ended."""


class CallRefused(PerdureError):
    """A tool wanted to call a tool, and may not: too many, too deep, or not while its function runs in a harness."""


class CallConflict(CallRefused):
    """The key stands for another tool or other arguments."""


MakeCall: TypeAlias = "Callable[[str, Mapping[str, JsonValue], str], Awaitable[ToolResult]]"
"""Makes a nested call: the tool's name, the arguments, the key."""


AskPerson: TypeAlias = Callable[[str, type[object], int, str | None], Awaitable[object]]
"""Asks a person: the question, the type of the answer, how long it waits in ms, the key."""

T = TypeVar("T")

DAY_MS: Final = 86_400_000


class CallStream:
    """What a call shows while it runs: buffered here, written into ``pi.live`` piece by piece."""

    def __init__(self, limits: OutputLimits | None = None, *, rerun: bool = False) -> None:
        self.output = LiveOutput(limits or OutputLimits())
        self.details: JsonValue = None
        self.diagnostics: list[str] = []
        self.streamed = False
        """Whether there was any output."""
        self.touch: Callable[[], None] | None = None
        """Called after each change."""
        self._rerun = rerun
        """What an earlier run showed is still there; the first write puts this one's in its place."""
        self._new_details = False
        self._new_diagnostics = 0
        self._bounded: Bounded | None = None

    def add_output(self, chunk: str | bytes) -> None:
        self.streamed = True
        self.output.feed(chunk)
        self._changed()

    def set_details(self, value: JsonValue) -> None:
        self.details = value
        self._new_details = True
        self._changed()

    def add_diagnostic(self, text: str) -> None:
        self.diagnostics.append(text)
        self._new_diagnostics += 1
        self._changed()

    def _changed(self) -> None:
        if self.touch is not None:
            self.touch()

    def write(self, live: LiveTool) -> None:
        """Put what is new since the last time into the call's place in ``pi.live``."""
        if self._rerun:
            self._rerun = False
            live["output"], live["details"], live["diagnostics"] = "", None, []
        if self.output.changed:
            anew, text = self.output.take()
            live["output"] = text if anew else live["output"] + text
        for key, count in (
            ("dropped_bytes", self.output.dropped_bytes),
            ("dropped_lines", self.output.dropped_lines),
        ):
            if live[key] != count:
                live[key] = count
        if self._new_details:
            live["details"] = self.details
            self._new_details = False
        if self._new_diagnostics:
            live["diagnostics"].extend(self.diagnostics[-self._new_diagnostics :])
            self._new_diagnostics = 0

    def end(self) -> Bounded:
        """The output so far, bounded; nothing more comes. May be asked again."""
        if self._bounded is None:
            self._bounded = self.output.end()
        return self._bounded


class ToolCall:
    """A tool gets it for a parameter annotated ``ToolCall``. Usable until the invocation ends, from any thread.

    Outside a harness, in a test of the tool's own function, make one with the values that matter there: what
    it shows is kept in ``stream``.
    """

    def __init__(
        self,
        *,
        id: int = 0,
        name: str = "",
        conversation_id: int = 0,
        idempotency_key: str = "",
        attempt: int = 1,
        intent: JsonValue = None,
        stream: CallStream | None = None,
        context: Context | None = None,
        memo: Callable[[str, JsonValue], Awaitable[JsonValue]] | None = None,
        make_call: MakeCall | None = None,
        harness: Harness | None = None,
        ask_person: AskPerson | None = None,
    ) -> None:
        self.id = id
        """The call's own id, the one of its task. (A provider's id of it is only a label and may repeat.)"""
        self.name = name
        self.conversation_id = conversation_id
        self.idempotency_key = idempotency_key
        """The same in every rerun of this call, unique in the world: for services that take such a key."""
        self.attempt = attempt
        """1, and one more for each rerun."""
        self.intent = intent
        """What the tool's ``intent`` function gave, as stored before the call began."""
        self.context = BACKGROUND.child() if context is None else context
        """Ends with the call, also when that is stopped or takes too long: for calls that take ``context=`` (K92)."""
        self.stream = stream if stream is not None else CallStream()
        self._memo = memo
        self._make_call = make_call
        self._harness = harness
        self._ask_person = ask_person
        self._memos: dict[str, JsonValue] = {}
        self._ended = False
        self._thread = threading.get_ident()
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None

    @property
    def harness(self) -> Harness:
        """The one that the call runs in: for conversations that the call owns, which are aborted with it, and whatever
        else goes by ids. Waiting in a call for its own conversation raises WaitCycle. Raises CallRefused outside."""
        if self._harness is None:
            raise CallRefused(f"call {self.id} of {self.name!r} runs in no harness")
        return self._harness

    def output(self, text: str | bytes) -> None:
        """Add to the output that is shown meanwhile. Bytes are read as UTF-8, split anywhere.

        If the tool returns None, this output is its result.
        """
        if not isinstance(text, (str, bytes)):  # pyright: ignore[reportUnnecessaryIsInstance]  # of untyped callers
            raise TypeError(f"output is a text or bytes, not {type(text).__name__}")
        self._apply(lambda: self.stream.add_output(text))

    def details(self, value: JsonValue) -> None:
        """Show structured progress, in place of what was shown before. Raises NotJson, ValueError if too large."""
        copied = copy_json(value, at="details")
        if (size := len(encode_json(copied))) > MAX_DETAILS:
            raise ValueError(f"details take {size} bytes of JSON; at most {MAX_DETAILS} are kept")
        self._apply(lambda: self.stream.set_details(copied))

    def diagnostic(self, text: str) -> None:
        """Note something for people who watch the call; the model does not see it.

        Raises ValueError for more than 100 in a call. One of more than 2,000 characters is cut.
        """
        clean = text[:MAX_DIAGNOSTIC].encode("utf-8", "replace").decode()
        if len(self.stream.diagnostics) >= MAX_DIAGNOSTICS:
            raise ValueError(f"a call keeps at most {MAX_DIAGNOSTICS} diagnostics")
        self._apply(lambda: self.stream.add_diagnostic(clean))

    async def memo(self, name: str, value: JsonValue) -> JsonValue:
        """Store a value under a name, durably; a rerun gets what the first writer of the name stored.

        Raises ValueError for a name that begins with ``pi.``, NotJson.
        """
        self._check()
        if name.startswith("pi."):
            raise ValueError(f"names of memos beginning with 'pi.' are reserved: {name!r:.50}")
        if self._memo is None:
            return self._memos.setdefault(name, copy_json(value, at="memo"))
        return await self._memo(name, value)

    @overload
    async def ask(self, question: str, /, *, expire_after_ms: int = DAY_MS, key: str | None = None) -> str: ...
    @overload
    async def ask(
        self, question: str, kind: type[T], /, *, expire_after_ms: int = DAY_MS, key: str | None = None
    ) -> T: ...
    async def ask(
        self, question: str, kind: type[object] = str, /, *, expire_after_ms: int = DAY_MS, key: str | None = None
    ) -> object:
        """Ask a person, and return the answer as ``kind`` (rules H329 to H332).

        The question is stored, with the JSON Schema of its answer, and waits for ``harness.questions()`` of this or any
        later process; a rerun finds it, and its answer. So the tool is one that may be run again: ``replay="safe"``.
        The same question of the same kind is one question; ``key`` makes it another.

        Raises QuestionExpired after ``expire_after_ms`` (a day); CallConflict, CallRefused; ToolError if it was
        withdrawn.
        """
        self._check()
        if self._ask_person is None:
            raise CallRefused(f"call {self.id} of {self.name!r} can ask nobody here: only a running tool can")
        return await self._ask_person(question, kind, expire_after_ms, key)

    async def call(self, name: str, arguments: Mapping[str, JsonValue] | None = None, *, key: str) -> ToolResult:
        """Call a tool of the conversation, and return its result; errors are results too (rules H109, H340 to H346).

        ``key`` names the call within this one: asked again with it, also in a rerun, the same call is found, under way
        or ended, and its tool is not begun a second time. Several may be made at once. Cancelling this cancels the wait
        alone; what this call has not waited for is aborted as it ends.

        Raises CallConflict if the key was used for another tool or other arguments, CallRefused, NotJson.
        """
        self._check()
        if self._make_call is None:
            raise CallRefused(f"call {self.id} of {self.name!r} can call no tools here: only a running tool can")
        return await self._make_call(name, {} if arguments is None else arguments, key)

    def end(self) -> None:
        """The invocation has ended: every later use raises CallEnded."""
        self._ended = True
        self.context.cancel("its call has ended")

    def _check(self) -> None:
        if self._ended:
            raise CallEnded(f"call {self.id} of {self.name!r} has ended; its handle cannot be used any more")

    def _apply(self, change: Callable[[], None]) -> None:
        self._check()
        if self._loop is None or threading.get_ident() == self._thread:
            change()
        else:
            # A synchronous tool runs in a thread. Its changes come in order, and before its end.
            self._loop.call_soon_threadsafe(change)
