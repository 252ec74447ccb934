"""The model's context, derived from entries as they come (rules H55 to H62).

A ModelContext is fed the entries of one conversation in order and gives, at any point, the messages a request sends:
from the newest head on, edits applied, every call followed by exactly its results. Feeding one more entry costs that
entry; what was handed out before never changes and is shared, not copied.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import msgspec
from typing_extensions import override

from perdure.harness.documents import (
    ASSISTANT,
    SYSTEM,
    TOOL_RESULT,
    AssistantData,
    ToolResultData,
)
from perdure.harness.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    Text,
    ToolCallPart,
    ToolResultMessage,
    decode_messages,
)
from perdure.kernel.records import EMPTY_LIST, NULL, EntryRecord

LEFT_OUT = frozenset({"error", "aborted"})
"""Stop reasons of answers that the model never sees again (rule H60)."""

OVERHEAD = 500
"""Bytes that an entry takes in memory beside its messages, roughly."""
NO_RESULT = "No result of this call was recorded; whether it had an effect is unknown."


def weight(entry: EntryRecord) -> int:
    """Bytes that an entry takes in a context, roughly."""
    return OVERHEAD + len(entry.raw_messages)


class Messages(Sequence[Message]):
    """The first messages of a list that may have grown since. Reading it is safe for as long as one likes."""

    __slots__ = ("_list", "_start", "_stop")

    def __init__(self, messages: list[Message], start: int, stop: int) -> None:
        self._list = messages
        self._start = start
        self._stop = stop

    @override
    def __len__(self) -> int:
        return self._stop - self._start

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Message]: ...
    @override
    def __getitem__(self, index: int | slice) -> Message | Sequence[Message]:
        if isinstance(index, slice):
            return [self._list[self._start + at] for at in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"message {index} of {len(self)}")
        return self._list[self._start + at]

    @override
    def __iter__(self) -> Iterator[Message]:
        for at in range(self._start, self._stop):
            yield self._list[at]

    @override
    def __repr__(self) -> str:
        return f"<Messages, {len(self)}>"


@dataclass(frozen=True, slots=True)
class _Item:
    """One entry of the context, decoded once."""

    id: int
    kind: str
    messages: tuple[Message, ...]
    tasks: tuple[int, ...]
    """Of an answer: the task of each call. Of a result: the task of its call, alone."""
    bytes: int


@dataclass(slots=True)
class _Mark:
    """Where an item begins in the list, and whether no call before it waits for a result there."""

    offset: int
    clean: bool


@dataclass(slots=True)
class _Call:
    """A call whose result has not come."""

    slot: int
    id: str
    task: int | None
    answer: int
    """Where the message that makes the call stands."""


class ModelContext:
    """What one conversation's model sees. Entries are fed in id order.

    ``marker`` is the newest head marker of the history to be fed, or None: feeding begins at its head then (the first
    entry without one). Markers that come later are acted on as they come.
    """

    __slots__ = (
        "_baseline",
        "_edits",
        "_items",
        "_leading",
        "_list",
        "_marks",
        "_open",
        "_shared",
        "bytes",
        "invalid",
        "marker",
        "start",
        "through",
    )

    def __init__(self, marker: EntryRecord | None = None) -> None:
        self.marker: int | None = None if marker is None else marker.id
        """The newest head marker, or None."""
        self.start: int = 0 if marker is None else marker.head or 0
        """The entry the context begins at."""
        self.through = 0
        """The newest entry that was fed."""
        self.invalid: list[int] = []
        """Entries whose messages no model could read; they are left out."""
        self.bytes = 0
        """What its entries weigh together."""
        self._items: list[_Item] = []
        """In id order, but for a marker that points back: that one is first."""
        self._edits: dict[int, tuple[Message, ...]] = {}
        self._reset()

    def _reset(self) -> None:
        # The first place is the leading system message's; before there is one, handed-out messages begin behind it.
        self._list: list[Message] = [SystemMessage("")]
        self._leading = False
        self._baseline: int | None = None
        """The first system entry since the newest head."""
        self._marks: list[_Mark] = []
        self._open: list[_Call] = []
        self._shared = 0
        """So many messages of the list may be in somebody's hands."""

    # --- feeding --------------------------------------------------------------------------------------------

    def feed(self, entry: EntryRecord) -> bool:
        """Take in the next entry of the conversation's history.

        False: it is a head that reaches back before the entries this context holds. The context is then of no use any
        more; a new one must be fed from that head on.
        """
        assert entry.id > self.through, "entries are fed in order, once each"
        self.through = entry.id
        for edit in entry.edits:
            if edit.entry >= self.start:
                self._edits[edit.entry] = () if edit.replace == NULL else self._decode(entry.id, edit.replace)
        if self.marker is not None and entry.id < self.marker:
            # Before the newest head: what it keeps. A system entry is replaced by the baseline that follows the head,
            # and an older marker that points back told of what the newest one tells of.
            if entry.kind != SYSTEM and entry.head in (None, entry.id):
                item = self._read(entry)
                self._items.append(item)
                self.bytes += item.bytes
            return True
        if entry.head is not None:
            return self._begin(entry, entry.head)
        self._edit([edit.entry for edit in entry.edits])
        self._add(self._read(entry))
        return True

    def _begin(self, marker: EntryRecord, head: int) -> bool:
        """A head: what was before it is gone, the marker's own messages come first (rule H56)."""
        if head < self.start:
            return False
        pointed_back = self.marker if self.start != self.marker else None
        kept = [i for i in self._items if i.id >= head and i.kind != SYSTEM and i.id != pointed_back]
        self._edits = {id: edit for id, edit in self._edits.items() if id >= head}
        self.marker, self.start = marker.id, head
        self._items = []
        self.bytes = 0
        self._reset()
        self._add(self._read(marker))
        for item in kept:
            self._add(item)
        return True

    def _read(self, entry: EntryRecord) -> _Item:
        messages = () if entry.raw_messages == EMPTY_LIST else self._decode(entry.id, entry.raw_messages)
        tasks: tuple[int, ...] = ()
        try:
            if entry.kind == ASSISTANT:
                tasks = entry.data_as(AssistantData).calls
            elif entry.kind == TOOL_RESULT:
                tasks = (entry.data_as(ToolResultData).task,)
        except msgspec.ValidationError:
            pass  # an entry of another program: its calls are told apart by their labels alone
        return _Item(entry.id, entry.kind, messages, tasks, weight(entry))

    def _decode(self, entry: int, raw: msgspec.Raw) -> tuple[Message, ...]:
        try:
            return tuple(decode_messages(raw))
        except msgspec.MsgspecError:
            self.invalid.append(entry)
            return ()

    def _edit(self, targets: Sequence[int]) -> None:
        """Edits of entries that were fed before: derive anew from the last point before them that no call crosses."""
        places = [at for at in map(self._place, targets) if at is not None]
        if not places:
            return
        at = min(places)
        while not self._marks[at].clean:
            at -= 1
        again = self._items[at:]
        if self._baseline is not None and any(item.id == self._baseline for item in again):
            self._baseline = None
            self._leading = False
        self._list = self._list[: self._marks[at].offset]
        self._shared = 0
        del self._items[at:], self._marks[at:]
        self.bytes -= sum(item.bytes for item in again)
        self._open.clear()
        for item in again:
            self._add(item)

    def _place(self, entry: int) -> int | None:
        """Where an entry stands among the items."""
        items = self._items
        if not items:
            return None
        if items[0].id == entry:
            return 0
        at = bisect_left(items, entry, lo=1, key=lambda item: item.id)
        return at if at < len(items) and items[at].id == entry else None

    def _add(self, item: _Item) -> None:
        self._items.append(item)
        self.bytes += item.bytes
        self._marks.append(_Mark(len(self._list), not self._open))
        messages = self._edits.get(item.id, item.messages)
        if item.kind == SYSTEM and self._baseline is None:
            self._baseline = item.id
            if messages and isinstance(messages[0], SystemMessage):
                # Views handed out so far begin behind the first place: it may be written.
                self._leading = True
                self._list[0] = messages[0]
                messages = messages[1:]
        for message in messages:
            if isinstance(message, AssistantMessage):
                self._answer(message, item)
            elif isinstance(message, ToolResultMessage):
                self._result(message, item)
            else:
                self._list.append(message)

    def _answer(self, message: AssistantMessage, item: _Item) -> None:
        if message.stop_reason in LEFT_OUT:
            return
        answer = len(self._list)
        self._list.append(message)
        calls = message.tool_calls
        tasks = item.tasks if len(item.tasks) == len(calls) else (None,) * len(calls)
        for call, task in zip(calls, tasks, strict=True):
            self._open.append(_Call(len(self._list), call.id, task, answer))
            self._list.append(_missing(call))

    def _result(self, message: ToolResultMessage, item: _Item) -> None:
        """Put a result behind its call; without one it is dropped (rules H58, H59)."""
        at = self._find(message.call_id, item.tasks[0] if item.tasks else None)
        if at is None:
            return
        slot = self._open.pop(at).slot
        if slot < self._shared:
            # Somebody holds a context in which this result was missing: theirs stays as it was.
            self._list = list(self._list)
            self._shared = 0
        self._list[slot] = message

    def _find(self, call_id: str, task: int | None) -> int | None:
        """Which open call a result is for: its task's; else of the nearest answer with that id, the first."""
        if task is not None:
            for at, call in enumerate(self._open):
                if call.task == task:
                    return at
        found: int | None = None
        for at in range(len(self._open) - 1, -1, -1):
            call = self._open[at]
            if found is not None and call.answer != self._open[found].answer:
                break
            if call.id == call_id and (task is None or call.task is None):
                found = at
        return found

    # --- what it gives --------------------------------------------------------------------------------------

    def messages(self) -> Messages:
        """The context as it is now. What is fed later does not show in it."""
        self._shared = len(self._list)
        return Messages(self._list, 0 if self._leading else 1, len(self._list))


def _missing(call: ToolCallPart) -> ToolResultMessage:
    return ToolResultMessage(
        call_id=call.id, name=call.name, content=(Text(NO_RESULT),), is_error=True, code="interrupted"
    )
