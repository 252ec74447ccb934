"""What goes on in the conversation, told on a screen: a conversation's events in, lines out.

A story remembers what it has told. When the events begin anew with a snapshot, because the screen could not keep up,
it tells what it has missed and nothing twice.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from perdure.cli.chat.questions import Find, Questions
from perdure.cli.chat.scene import Queued, Scene, parts_of, queued_of, rest_of
from perdure.cli.chat.screen import Screen
from perdure.cli.chat.usage import spent
from perdure.cli.entries import (
    BAR,
    WIDEST,
    Call,
    answer_lines,
    answer_of,
    calls_of,
    ending_lines,
    entry_lines,
    heading,
    messages_of,
    result_lines,
    user_lines,
)
from perdure.cli.style import Line, line
from perdure.cli.text import counted, lines_of, one_line, shortened
from perdure.events import (
    ApprovalDecided,
    ApprovalRequested,
    Blocked,
    CompactionEnd,
    CompactionRetry,
    CompactionStart,
    EntryAppended,
    Event,
    InboxChanged,
    MessageDelta,
    MessageEnd,
    MessageStart,
    QuestionAsked,
    QuestionOver,
    ResponseDeferred,
    Resumed,
    Retry,
    RunEnd,
    RunStart,
    Snapshot,
    ToolEnd,
    ToolStart,
    ToolUpdate,
    Turn,
    Unblocked,
    UsageChanged,
)
from perdure.harness.documents import (
    ASSISTANT,
    TOOL_RESULT,
    USER,
    InboxItem,
    LiveTool,
    ToolResultData,
)
from perdure.harness.messages import (
    Message,
    UserMessage,
)
from perdure.harness.usage import UsageSummary
from perdure.kernel.records import EntryRecord
from perdure.tasks.errors import ADVICE, BlockedReason

FOLLOWED: Final = 20
"""Lines of a call's output that are printed as they come."""
LIVE_LINES: Final = 5
"""Lines of a call's output that are shown while it runs, where they can be redrawn."""
LIVE_CALLS: Final = 4
LIVE_QUEUED: Final = 5
LOOKED_BACK: Final = 12
"""Entries that are told when a conversation is continued."""
REMEMBERED: Final = 1000
"""Submissions of which it is known that they have ended."""


@dataclass(slots=True)
class _Running:
    """A call on its way."""

    call: Call
    newest: deque[str] = field(default_factory=lambda: deque[str](maxlen=LIVE_LINES))
    rest: str = ""
    """The beginning of a line."""
    printed: list[str] = field(default_factory=list[str])
    """Lines of its output that stand on the screen for good."""
    hidden: int = 0

    def feed(self, text: str, *, anew: bool) -> list[str]:
        """The lines that are complete by this."""
        if anew:
            self.newest.clear()
            self.rest = ""
        *whole, rest = (self.rest + text).split("\n")
        self.rest = rest[-WIDEST:]
        lines = [one_line(each) for each in whole]
        self.newest.extend(lines)
        return lines

    def shown(self) -> list[str]:
        return [*self.newest, one_line(self.rest)][-LIVE_LINES:] if self.rest else list(self.newest)


class Story:
    """Tells one conversation on one screen."""

    def __init__(self, screen: Screen, *, now: Callable[[], int], echoed: bool, find: Find | None = None) -> None:
        """``echoed``: what is typed stands on the screen already. ``find``: what is asked of a person now."""
        self._screen = screen
        self._now = now
        self._echoed = echoed
        self.busy = False
        self.stopping = False
        """An abort is under way."""
        self.stuck = False
        """The run cannot go on by itself."""
        self.questions = Questions(find)
        self._task: int | None = None
        self._inputs: tuple[int, ...] = ()
        self._seen = 0
        """The newest entry that was told."""
        self._calls: dict[int, Call] = {}
        self._running: dict[int, _Running] = {}
        self._headed: int | None = None
        """The call whose heading is the last thing that was printed of any call."""
        self._queue: dict[int, Queued] = {}
        self._placed: set[int] = set()
        """Of the queue, what the commit that is being told has placed."""
        self._typed: deque[str] = deque(maxlen=100)
        """Inputs that stand on the screen, and whose entries are not told again."""
        self._parts: dict[int, tuple[str, str]] = {}
        """What was told of the answer on its way: type and text of each part."""
        self._drafting: tuple[str, int] | None = None
        """The call that is being written: its tool, and how many characters there are of it."""
        self._usage = UsageSummary()
        self._usage_before = UsageSummary()
        self._ended: OrderedDict[int, None] = OrderedDict()

    # --- what others ask -----------------------------------------------------------------------------------------

    def has_ended(self, submission: int) -> bool:
        """Whether an input is over, as far as it was told."""
        return submission in self._ended

    @property
    def waiting_inputs(self) -> int:
        return sum(queued.mode != "write" for queued in self._queue.values())

    def typed(self, text: str) -> None:
        """The user has typed this, and it is about to be submitted."""
        if self._echoed:
            self._typed.append(text)

    def not_placed(self, text: str) -> None:
        """What was typed has to wait: it is told when it is placed."""
        if text in self._typed:
            self._typed.remove(text)

    # --- beginning -----------------------------------------------------------------------------------------------

    def begin(self, scene: Scene) -> None:
        """Tell the newest entries, and take over the rest as known."""
        shown = scene.entries[-LOOKED_BACK:]
        for entry in scene.entries:
            self._learn(entry)
        if shown and (scene.more or len(scene.entries) > len(shown)):
            self._screen.put(line("  ┆ earlier entries: perdure show", "dim"))
        for entry in shown:
            self._screen.put(*entry_lines(entry, self._calls))
        self._take_over(scene)
        if scene.message is not None:
            self._parts = parts_of(scene.message)
        self._queue = {item["id"]: queued_of(item) for item in scene.queued}
        self._usage = self._usage_before = scene.usage
        self._tell_blocked(scene)
        self.questions.take_over(scene.tools)
        self._tell_ready()

    def ask(self) -> None:
        """Show what is asked of the user now, unless that stands there already."""
        lines, first = self.questions.present(), self.questions.first
        if lines is None:
            return
        if lines:
            self._screen.end_stream()
            self._screen.put(*lines)
        self._screen.invite(first, () if first is None else line(f"  {first.how}", "dim"))

    def call_of(self, task: int, tool: LiveTool) -> Call:
        """A call on its way, as the model wrote it."""
        return self._calls.get(task, Call(tool["name"]))

    def queue_lines(self) -> list[Line]:
        return [self._queue_line(queued) for queued in self._queue.values()]

    def _learn(self, entry: EntryRecord) -> None:
        self._calls.update(calls_of(entry))
        self._seen = max(self._seen, entry.id)

    def _take_over(self, scene: Scene) -> None:
        """What goes on now, as far as nothing is printed of it."""
        self.busy = scene.busy
        self._task = None if scene.run is None else scene.run["task"]
        self._inputs = () if scene.run is None else tuple(scene.run["inputs"])
        running = {int(task): tool for task, tool in scene.tools.items() if tool["state"] == "running"}
        for task in self._running.keys() - running.keys():
            del self._running[task]
        for task, tool in running.items():
            known = self._running.setdefault(task, _Running(self.call_of(task, tool)))
            known.feed(tool["output"], anew=True)
            known.hidden += 1  # which of these lines were printed is not known any more
        self._drafting = None
        if not scene.busy:
            self.stopping = self.stuck = False

    # --- events --------------------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        match event:
            case Snapshot():
                self._catch_up(Scene.of(event))
            case RunStart():
                self.busy, self.stuck = True, False
                self._task, self._inputs = event.task, event.inputs
                self._usage_before = self._usage
            case RunEnd():
                self._run_end(event)
            case Turn():
                pass
            case MessageStart():
                self._parts = {}
                self.stuck = False
            case MessageDelta():
                self._message_delta(event)
            case MessageEnd():
                self._message_end(event.entry)
            case ToolStart():
                self._tool_start(event)
            case ToolUpdate():
                self._tool_update(event)
            case ToolEnd():
                self._tool_end(event.task, event.entry)
            case ApprovalRequested():
                self.questions.asked(event)
            case ApprovalDecided():
                self._screen.put(*self.questions.decided(event))
            case QuestionAsked():
                asking = self._running.get(event.call)
                self.questions.asked(event, "" if asking is None else asking.call.name)
            case QuestionOver():
                self._screen.put(*self.questions.question_over(event))
            case EntryAppended():
                self._entry(event.entry)
            case InboxChanged():
                self._inbox(event.items)
            case Retry():
                self._retry(event.code, event.message, event.until)
            case ResponseDeferred():
                if event.polls == 0 or event.code is not None:
                    self._deferred(event.model, event.handle, event.code)
            case UsageChanged():
                self._usage = UsageSummary(models=event.models, tools=event.tools)
            case Blocked():
                self._blocked(event.task, event.kind, event.reason)
            case Unblocked():
                self._unblocked(event)
            case CompactionStart():
                self._screen.put(line("· the context is being summed up", "dim"))
            case CompactionRetry():
                self._retry(event.code, event.message, event.until)
            case CompactionEnd():
                self._compaction_end(event)
            case Resumed():
                pass
        self.ask()
        self._tell_ready()

    def _tell_ready(self) -> None:
        if not self.busy:
            self._screen.ready()
        self._screen.refresh()

    # --- runs ----------------------------------------------------------------------------------------------------

    def _run_end(self, event: RunEnd) -> None:
        why = None if event.answer is not None else _unanswered(event.reason or "aborted", event.detail)
        self._end_run(event.inputs, why)

    def _end_run(self, inputs: tuple[int, ...], why: Line | None = None) -> None:
        """``why`` there is no answer."""
        self.busy = self.stopping = self.stuck = False
        self._task, self._inputs = None, ()
        self._drafting = None
        self._running.clear()
        for id in inputs:
            self._end(id)
        self._screen.end_stream()
        if why is not None:
            self._screen.put(why)
        self._screen.put(spent(self._usage_before, self._usage))
        self._usage_before = self._usage

    def _end(self, submission: int) -> None:
        self._ended[submission] = None
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def _tell_blocked(self, scene: Scene) -> None:
        for blocked in scene.blocked:
            self._blocked(blocked.task, blocked.kind, blocked.reason)

    def _blocked(self, task: int, kind: str, reason: BlockedReason) -> None:
        self.stuck = self.busy
        what = f"task {task} ({one_line(kind)}) cannot go on: {reason}; {ADVICE[reason]}"
        self._screen.put(line(f"! {what}", "error"))

    def _unblocked(self, event: Unblocked) -> None:
        self.stuck = False
        said = "was aborted" if event.ended else "goes on"
        self._screen.put(line(f"· task {event.task} ({one_line(event.kind)}) {said}", "dim"))

    def _compaction_end(self, event: CompactionEnd) -> None:
        if event.entry is not None:
            self._entry(event.entry)
        elif event.outcome == "failed" or (event.reason == "manual" and event.outcome in ("declined", "stale")):
            message = event.message or "the context begins anew by now"
            said = one_line(f"{event.code or event.outcome}: {message}".replace("\n", " "))
            self._screen.end_stream()
            self._screen.put(line(f"! the context was not summed up: {shortened(said, WIDEST)}", "warning"))

    def _retry(self, code: str, message: str, until: int) -> None:
        seconds = max(0, round((until - self._now()) / 1000))
        self._screen.end_stream()
        self._screen.put(line(f"· {code}: {one_line(message)}; asked again in {counted(seconds, 'second')}", "warning"))

    def _deferred(self, model: str, handle: str, code: str | None) -> None:
        self._screen.end_stream()
        name = shortened(one_line(handle), WIDEST)
        if code is None:
            self._screen.put(line(f"· {one_line(model)} makes the answer in the background: {name}", "dim"))
        else:
            self._screen.put(line(f"· {one_line(code)}; {name} is asked for again", "warning"))

    # --- answers -------------------------------------------------------------------------------------------------

    def _message_delta(self, event: MessageDelta) -> None:
        if event.part == "tool_call":
            was = self._drafting[1] if self._drafting is not None and self._drafting[0] == event.name else 0
            self._drafting = (event.name, was + len(event.text))
            return
        type, text = self._parts.get(event.index, (event.part, ""))
        if event.index not in self._parts:
            self._screen.end_stream()
        self._parts[event.index] = (type, text + event.text)
        self._screen.stream("dim" if type == "thinking" else "plain", event.text)

    def _message_end(self, entry: EntryRecord | None) -> None:
        told, self._parts = [self._parts[index] for index in sorted(self._parts)], {}
        self._drafting = None
        if entry is None:
            self._screen.end_stream()
            if told:
                self._screen.put(line("— cut off; it is asked again", "warning"))
            return
        self._learn(entry)
        message = answer_of(entry)
        if message is None:
            self._screen.end_stream()
            return
        rest = rest_of(told, message)
        if rest is None:
            self._screen.end_stream()
            self._screen.put(line("— the answer, as it is stored:", "dim"), *answer_lines(message))
            return
        for begins, type, text in rest:
            if begins:
                self._screen.end_stream()
            self._screen.stream("dim" if type == "thinking" else "plain", text)
        self._screen.end_stream()
        # What the retry or the run's end says is not said twice.
        if message.stop_reason != "error" and message.error != "aborted":
            self._screen.put(*ending_lines(message))

    # --- calls ---------------------------------------------------------------------------------------------------

    def _tool_start(self, event: ToolStart) -> None:
        call = self._calls.get(event.task, Call(event.name))
        self._running.setdefault(event.task, _Running(call))
        if self._screen.follows:
            self._head(event.task, call)

    def _head(self, task: int, call: Call) -> None:
        self._screen.put(heading(call))
        self._headed = task

    def _tool_update(self, event: ToolUpdate) -> None:
        running = self._running.get(event.task)
        if running is None:
            return
        lines = running.feed(event.text, anew=event.anew)
        if event.anew:
            running.hidden += 1
        if self._screen.follows:
            self._follow(event.task, running, lines)
        for text in event.diagnostics:
            self._screen.put(*(line(f"  ! {shortened(each, WIDEST)}", "warning") for each in lines_of(text)))

    def _follow(self, task: int, running: _Running, lines: list[str]) -> None:
        """Print what has come of a call's output, up to a bound."""
        for text in lines:
            if running.hidden or len(running.printed) >= FOLLOWED:
                running.hidden += 1
                continue
            if self._headed != task:
                self._head(task, running.call)
            running.printed.append(text)
            self._screen.put(line(f"{BAR}{shortened(text, WIDEST)}", "dim"))

    def _tool_end(self, task: int, entry: EntryRecord) -> None:
        self._seen = max(self._seen, entry.id)
        self.questions.over(task)
        data = entry.data_as(ToolResultData)
        running = self._running.pop(task, None)
        call = self._calls.pop(task, Call(data.name))
        if not self._screen.follows or self._headed != task:
            self._head(task, call)
        self._screen.put(*result_lines(entry, data, shown=running.printed if running is not None else ()))

    # --- entries and the queue -----------------------------------------------------------------------------------

    def _entry(self, entry: EntryRecord) -> None:
        self._seen = max(self._seen, entry.id)
        if entry.kind != USER:
            self._screen.end_stream()
            self._screen.put(*entry_lines(entry, self._calls))
            self._place(messages_of(entry))
            return
        messages = messages_of(entry)
        said = "".join(message.text for message in messages if isinstance(message, UserMessage))
        placed = self._place(messages)
        if placed is None and said in self._typed:
            self._typed.remove(said)
            return
        self._screen.end_stream()
        self._screen.put(*user_lines(entry, "!" if placed is not None and placed.mode == "steer" else ">"))

    def _place(self, messages: list[Message]) -> Queued | None:
        """The one of the queue that has become this entry, if any."""
        for id, queued in self._queue.items():
            if id not in self._placed and queued.messages == messages:
                self._placed.add(id)
                return queued
        return None

    def _inbox(self, items: list[InboxItem]) -> None:
        placed, self._placed = self._placed, set()
        known, self._queue = self._queue, {item["id"]: queued_of(item) for item in items}
        for id, queued in known.items():
            if id not in self._queue and id not in placed:
                self._end(id)
                self._screen.put((("warning", "withdrawn "), ("plain", shortened(queued.text, WIDEST))))
        if self._screen.follows:
            fresh = [queued for id, queued in self._queue.items() if id not in known]
            self._screen.put(*(self._queue_line(queued) for queued in fresh))

    @staticmethod
    def _queue_line(queued: Queued) -> Line:
        return (queued.span, ("plain", f"  {shortened(queued.text, WIDEST)}"))

    # --- beginning anew ------------------------------------------------------------------------------------------

    def _catch_up(self, scene: Scene) -> None:
        """The screen could not keep up: tell what was missed, as far as it is in the snapshot."""
        was, inputs = self._task, self._inputs
        fresh = [entry for entry in scene.entries if entry.id > self._seen]
        if scene.more and len(fresh) == len(scene.entries):
            self._screen.end_stream()
            self._screen.put(line("  ┆ entries in between: perdure show --all", "dim"))
        for entry in fresh:
            if entry.kind == ASSISTANT:
                self._message_end(entry)
            elif entry.kind == TOOL_RESULT:
                self._tool_end(entry.data_as(ToolResultData).task, entry)
            else:
                self._entry(entry)
            self._learn(entry)
        if scene.message is None or parts_of(scene.message).keys() < self._parts.keys():
            self._message_end(None)
        self._usage = scene.usage
        if was is not None and (scene.run is None or scene.run["task"] != was):
            self._end_run(inputs)
        self._take_over(scene)
        if scene.message is not None:
            self._stream_on(parts_of(scene.message))
        self._inbox(scene.queued)
        self._screen.put(*self.questions.take_over(scene.tools))
        if scene.deferred is not None:
            self._deferred(scene.deferred["model"], scene.deferred["handle"], scene.deferred["code"])
        if scene.retry is not None:
            self._retry(scene.retry["code"], scene.retry["message"], scene.retry["until"])
        self._tell_blocked(scene)

    def _stream_on(self, parts: Mapping[int, tuple[str, str]]) -> None:
        """Tell what an answer on its way has become meanwhile."""
        for index, (type, text) in parts.items():
            _, told = self._parts.get(index, (type, ""))
            if not text.startswith(told):
                self._screen.end_stream()
                told = ""
            if index not in self._parts:
                self._screen.end_stream()
            self._screen.stream("dim" if type == "thinking" else "plain", text[len(told) :])
        self._parts = dict(parts)

    # --- what can be redrawn -------------------------------------------------------------------------------------

    def running(self) -> list[Line]:
        lines: list[Line] = []
        for running in list(self._running.values())[:LIVE_CALLS]:
            lines.append(heading(running.call))
            lines += [line(f"{BAR}{text}", "dim") for text in running.shown()]
        if len(self._running) > LIVE_CALLS:
            lines.append(line(f"  and {counted(len(self._running) - LIVE_CALLS, 'more call')}", "dim"))
        if self._drafting is not None:
            name, size = self._drafting
            lines.append((("tool", f"▸ {one_line(name)}"), ("dim", f"  {counted(size, 'character')} so far")))
        return lines

    def waiting(self) -> list[Line]:
        lines = self.queue_lines()
        more = len(lines) - LIVE_QUEUED
        if more > 0:
            lines = [*lines[:LIVE_QUEUED], line(f"  and {more:,} more", "dim")]
        return lines

    def status(self) -> Line:
        if self.stopping:
            return (("warning", "● stopping"), ("dim", " · Ctrl-C again leaves"))
        if self.stuck:
            return (("error", "● blocked"), ("dim", " · Ctrl-C aborts · /quit leaves"))
        first, aside = self.questions.first, self.questions.aside
        if first is not None and self._screen.invited is first:
            more = f" and {self.questions.behind} more" if self.questions.behind else ""
            return (("warning", f"? {one_line(first.name)}{more}"), ("dim", f" · {first.how} · Ctrl-C aborts"))
        if aside:
            return line(f"{counted(aside, 'question')} for later: /answer asks again · Ctrl-C aborts", "warning")
        if self.busy:
            return (("good", "● working"), ("dim", " · Enter queues · ! or Ctrl-S steers · Ctrl-C aborts"))
        if self.waiting_inputs:
            return line(f"{counted(self.waiting_inputs, 'input')} waiting; the next one starts them", "queued")
        return line("Enter sends · /help · Ctrl-C leaves", "dim")


def _unanswered(reason: str, detail: str | None) -> Line:
    if reason == "aborted":
        return line("— aborted", "warning")
    if reason == "reset":
        return line("— ended by the reset; its inputs have no answer", "warning")
    words = f"{reason}: {one_line(detail)}" if detail else reason
    return line(f"! the run ended without an answer. {words}", "error")
