"""The model's context, derived from entries as they come (rules H55 to H62).

A ModelContext is fed the entries of one conversation in order and gives, at any point, the messages a request sends:
from the newest head on, edits applied, every call followed by exactly its results. Feeding one more entry costs that
entry; what was handed out before never changes and is shared, not copied. Messages are kept as they are stored,
and decoded where somebody first looks at them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, overload

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
from perdure.harness.tokens import LEFT_OUT, Count, tokens_of
from perdure.kernel.records import NULL, EntryRecord

OVERHEAD = 250
"""Bytes that an entry takes in memory beside its messages as JSON once somebody looked at them, roughly."""
MOST_OPEN = 65_535
"""Open calls that are counted at a place; nothing is cut where there are so many."""
NO_RESULT = "No result of this call was recorded; whether it had an effect is unknown."


def weight(entry: EntryRecord) -> int:
    """Bytes that an entry takes in a context, roughly."""
    return OVERHEAD + len(entry.raw_messages)


_Piece: TypeAlias = Message | bytes
"""A message, or the JSON list that holds it alone."""


class Messages(Sequence[Message]):
    """The first messages of a list that may have grown since. Reading it is safe for as long as one likes.

    A message is decoded when it is first looked at, and is the same object in every request from then on.
    """

    __slots__ = ("_list", "_start", "_stop")

    def __init__(self, pieces: list[_Piece], start: int, stop: int) -> None:
        self._list = pieces
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
            return [self._at(self._start + at) for at in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"message {index} of {len(self)}")
        return self._at(self._start + at)

    @override
    def __iter__(self) -> Iterator[Message]:
        for at in range(self._start, self._stop):
            yield self._at(at)

    @override
    def __repr__(self) -> str:
        return f"<Messages, {len(self)}>"

    def _at(self, place: int) -> Message:
        piece = self._list[place]
        if type(piece) is bytes:
            (piece,) = decode_messages(piece)
            self._list[place] = piece
        return piece  # pyright: ignore[reportReturnType]  # type() narrows no alias


class _Item(msgspec.Struct, frozen=True):
    """One entry of the context that is more to it than one message to be passed on."""

    system: bool
    raw: bytes
    tasks: tuple[int, ...] = ()
    """Of an answer: the task of each call. Of a result: the task of its call, alone."""


_NOTHING = _Item(False, b"[]")


class _Kept(NamedTuple):
    """One entry, to be added again."""

    id: int
    item: _Item | _Piece
    weighs: int
    tokens: int
    """As estimated."""


class _Call(msgspec.Struct):
    """A call whose result has not come."""

    slot: int
    id: str
    task: int | None
    answer: int
    """Where the message that makes the call stands."""


class Replaceable(msgspec.Struct, frozen=True):
    """What stands before an entry of a context."""

    marker: Messages
    """What the newest head begins with, as an earlier summary."""
    messages: Messages
    """The rest."""
    tokens: int
    """Of both together, as estimated."""


class ModelContext:
    """What one conversation's model sees. Entries are fed in id order.

    ``marker`` is the newest head marker of the history to be fed, or None: feeding begins at its head then (the first
    entry without one). Markers that come later are acted on as they come.
    """

    __slots__ = (
        "_baseline",
        "_before",
        "_edits",
        "_ids",
        "_leading",
        "_list",
        "_odd",
        "_open",
        "_opened",
        "_places",
        "_shared",
        "_sums",
        "_weights",
        "bytes",
        "count",
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
        self._edits: dict[int, list[Message]] = {}
        self._before: list[_Kept] = []
        """What was fed before the newest head and is kept by it, until that comes."""
        self._reset()

    def _reset(self) -> None:
        self.bytes = 0
        """What its entries weigh together."""
        # Of each entry, in id order, but for a marker that points back: that one is first.
        self._ids = array("q")
        self._places = array("q")
        """Where it begins in the list."""
        self._opened = array("H")
        """How many calls before it wait for a result there."""
        self._weights = array("q")
        self._sums = array("q")
        """Estimated tokens through it, of what a head keeps."""
        self.count = Count()
        """The tokens of all of it."""
        self._odd: dict[int, _Item] = {}
        """By entry. An entry that is not here stands for the one message in its place."""
        # The first place is the leading system message's; before there is one, handed-out messages begin behind it.
        self._list: list[_Piece] = [SystemMessage("")]
        self._leading = False
        self._baseline: int | None = None
        """The first system entry since the newest head."""
        self._open: list[_Call] = []
        self._shared = 0
        """So many messages of the list may be in somebody's hands."""

    # --- feeding --------------------------------------------------------------------------------------------

    def feed(self, entry: EntryRecord) -> bool:
        """Take in the next entry of the conversation's history.

        False: it is a head that reaches back before the entries this context holds. The context is then of no use any
        more; a new one must be fed from that head on.
        """
        id = entry.id
        assert id > self.through, "entries are fed in order, once each"
        self.through = id
        for edit in entry.edits:
            if edit.entry >= self.start:
                self._edits[edit.entry] = [] if edit.replace == NULL else self._decode(id, edit.replace)
        if self.marker is not None and id < self.marker:
            # Before the newest head: what it keeps. A system entry is replaced by the baseline that follows the head,
            # and an older marker that points back told of what the newest one tells of.
            if entry.kind != SYSTEM and entry.head in (None, id):
                self._before.append(_Kept(id, self._read(entry), weight(entry), Count().feed(entry)))
                self.bytes += weight(entry)
            return True
        if entry.head is not None:
            return self._begin(entry, entry.head)
        if entry.edits:
            self._edit([edit.entry for edit in entry.edits])
        self._add(id, self._read(entry), weight(entry), self.count.feed(entry))
        return True

    def _begin(self, marker: EntryRecord, head: int) -> bool:
        """A head: what was before it is gone, the marker's own messages come first (rule H56)."""
        if head < self.start:
            return False
        pointed_back = self.marker if self.start != self.marker else None
        kept = [item for item in (*self._before, *self._items(0)) if item.id >= head and item.id != pointed_back]
        self._edits = {id: edit for id, edit in self._edits.items() if id >= head}
        self.marker, self.start = marker.id, head
        self._before = []
        self._reset()
        self._add(marker.id, self._read(marker), weight(marker), Count().feed(marker))
        for id, item, weighs, tokens in kept:
            if not (isinstance(item, _Item) and item.system):
                self._add(id, item, weighs, tokens)
        self.count = Count(since=self._sums[-1])
        return True

    def _read(self, entry: EntryRecord) -> _Item | bytes:
        messages = self._decode(entry.id, entry.raw_messages)
        if not messages:
            return _NOTHING if entry.kind != SYSTEM else _Item(True, b"[]")
        raw = bytes(entry.raw_messages)
        if len(messages) == 1 and entry.kind != SYSTEM and _plain(messages[0]):
            return raw
        tasks: tuple[int, ...] = ()
        try:
            if entry.kind == ASSISTANT:
                tasks = entry.data_as(AssistantData).calls
            elif entry.kind == TOOL_RESULT:
                tasks = (entry.data_as(ToolResultData).task,)
        except msgspec.ValidationError:
            pass  # an entry of another program: its calls are told apart by their labels alone
        return _Item(entry.kind == SYSTEM, raw, tasks)

    def _decode(self, entry: int, raw: msgspec.Raw) -> list[Message]:
        try:
            return decode_messages(raw)
        except msgspec.MsgspecError:
            self.invalid.append(entry)
            return []

    def _edit(self, targets: Sequence[int]) -> None:
        """Edits of entries that were fed before: derive anew from the last point before them that no call crosses."""
        places = [at for at in map(self._place, targets) if at is not None]
        if not places:
            return
        at = min(places)
        while self._opened[at]:
            at -= 1
        again = list(self._items(at))
        if self._baseline is not None and any(kept.id == self._baseline for kept in again):
            self._baseline = None
            self._leading = False
        self._list = self._list[: self._places[at]]
        self._shared = 0
        self.bytes -= sum(self._weights[at:])
        del self._ids[at:], self._places[at:], self._opened[at:], self._weights[at:], self._sums[at:]
        self._open.clear()
        for id, item, weighs, tokens in again:
            self._add(id, item, weighs, tokens)

    def _place(self, entry: int) -> int | None:
        """Where an entry stands among the others."""
        ids = self._ids
        if not ids:
            return None
        if ids[0] == entry:
            return 0
        at = bisect_left(ids, entry, lo=1)
        return at if at < len(ids) and ids[at] == entry else None

    def _items(self, at: int) -> Iterator[_Kept]:
        """The entries from that place on."""
        for place in range(at, len(self._ids)):
            id = self._ids[place]
            item = self._odd.get(id)
            if item is None:
                # Of one that was edited nothing of its own is needed any more.
                item = _NOTHING if id in self._edits else self._list[self._places[place]]
            yield _Kept(id, item, self._weights[place], self._tokens(place))

    def _tokens(self, place: int) -> int:
        return self._sums[place] - (self._sums[place - 1] if place else 0)

    def _add(self, id: int, item: _Item | _Piece, weighs: int, tokens: int) -> None:
        edit = self._edits.get(id)
        self._ids.append(id)
        self._places.append(len(self._list))
        self._opened.append(min(len(self._open), MOST_OPEN))
        self._weights.append(weighs)
        if isinstance(item, _Item) and item.system:
            tokens = 0  # no head keeps it
        elif edit is not None:
            tokens = tokens_of(edit) if edit else 0
        self._sums.append(tokens + (self._sums[-1] if self._sums else 0))
        self.bytes += weighs
        if not isinstance(item, _Item):
            if edit is None:
                self._list.append(item)
                return
            item = _NOTHING
        self._odd[id] = item
        messages = decode_messages(item.raw) if edit is None else edit
        pieces: Sequence[_Piece] = (item.raw,) if edit is None and len(messages) == 1 else messages
        if item.system and self._baseline is None:
            self._baseline = id
            if messages and isinstance(messages[0], SystemMessage):
                # Views handed out so far begin behind the first place: it may be written.
                self._leading = True
                self._list[0] = messages[0]
                messages, pieces = messages[1:], pieces[1:]
        for message, piece in zip(messages, pieces, strict=True):
            if isinstance(message, AssistantMessage):
                self._answer(message, piece, item)
            elif isinstance(message, ToolResultMessage):
                self._result(message, piece, item)
            else:
                self._list.append(piece)

    def _answer(self, message: AssistantMessage, piece: _Piece, item: _Item) -> None:
        if message.stop_reason in LEFT_OUT:
            return
        answer = len(self._list)
        self._list.append(piece)
        calls = message.tool_calls
        tasks = item.tasks if len(item.tasks) == len(calls) else (None,) * len(calls)
        for call, task in zip(calls, tasks, strict=True):
            self._open.append(_Call(len(self._list), call.id, task, answer))
            self._list.append(missing_result(call))

    def _result(self, message: ToolResultMessage, piece: _Piece, item: _Item) -> None:
        """Put a result behind its call; without one it is dropped (rules H58, H59)."""
        at = self._find(message.call_id, item.tasks[0] if item.tasks else None)
        if at is None:
            return
        slot = self._open.pop(at).slot
        if slot < self._shared:
            # Somebody holds a context in which this result was missing: theirs stays as it was.
            self._list = list(self._list)
            self._shared = 0
        self._list[slot] = piece

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

    # --- where it may be cut ----------------------------------------------------------------------------------

    def cut(self, keep: int, *, least: int, alive: Callable[[int], bool]) -> int | None:
        """The first entry that stays if the newest ``keep`` tokens do and what is before becomes a summary.

        Never where a call and its result would be separated (rules H138, H202); of a call whose task is not ``alive``
        none comes any more. None: what is before, and no earlier summary, is less than ``least`` tokens. The newest
        entry that counts always stays.
        """
        sums, first = self._sums, self._first
        if not sums:
            return None
        # The newest place behind which enough is kept; the prompt, told behind an input, counts as nothing.
        at = min(bisect_right(sums, sums[-1] - keep), bisect_left(sums, sums[-1]))
        over = [call.slot for call in self._open if call.task is None or not alive(call.task)]
        before = sums[0] if first else 0
        while at > first and sums[at - 1] - before >= max(least, 1):
            if self._opened[at] == bisect_left(over, self._places[at]):
                return self._ids[at]
            at -= 1
        return None

    def before(self, entry: int) -> Replaceable | None:
        """What stands before an entry, the leading system message left out; None if that is nothing, or the context
        has no such entry."""
        at, first = self._place(entry), self._first
        if at is None or at <= first:
            return None
        self._shared = len(self._list)
        rest = self._places[first]
        return Replaceable(
            Messages(self._list, 1, rest), Messages(self._list, rest, self._places[at]), self._sums[at - 1]
        )

    @property
    def _first(self) -> int:
        """1 if the newest head's own entry comes first, else 0."""
        return int(bool(self._ids) and self._ids[0] == self.marker)


def _plain(message: Message) -> bool:
    """Whether it is passed on as it is, whatever stands around it."""
    if isinstance(message, AssistantMessage):
        if message.stop_reason in LEFT_OUT:
            return False
        for part in message.content:  # noqa: SIM110  # of a long history each of them comes by here
            if isinstance(part, ToolCallPart):
                return False
        return True
    return not isinstance(message, ToolResultMessage)


def missing_result(call: ToolCallPart) -> ToolResultMessage:
    """What stands for the result of a call that has none (rule H59)."""
    return ToolResultMessage(
        call_id=call.id, name=call.name, content=(Text(NO_RESULT),), is_error=True, code="interrupted"
    )
