"""What a client sees of a conversation: its active transcript, as a window, and its built-in documents (rule H147).

A view is a value and never changes; the next commit makes the next one, which shares all that stayed the same: what it
costs does not grow with the window. All readers share one view, and each access to a document gives a value of one's
own. Beside the typed fields it is one JSON value, ``to_json()``, which the operations of a watch's frames are about.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias, cast

import msgspec

from perdure.harness.documents import Agent, Inbox, Live, Meta, UsageTotals
from perdure.kernel.document import Document, resolve_version
from perdure.kernel.documents import DocState, DocumentChange
from perdure.kernel.json import JsonValue, copy_json
from perdure.kernel.ops import Op, Set, Splice
from perdure.kernel.records import EntryRecord

DEFAULT_WINDOW: Final = 200
"""Entries of a view: the newest ones."""

Part: TypeAlias = Literal["live", "inbox", "agent", "usage", "meta"]

PARTS: Final[Mapping[Part, type[Document]]] = {
    "live": Live,
    "inbox": Inbox,
    "agent": Agent,
    "usage": UsageTotals,
    "meta": Meta,
}
PART_OF: Final[Mapping[str, Part]] = {kind.definition.kind: part for part, kind in PARTS.items()}


class ConversationView:
    """A conversation as of one commit."""

    __slots__ = ("_entries", "_first", "_log", "_stop", "conversation_id", "more", "start", "tree", "window")

    def __init__(
        self,
        conversation_id: int,
        *,
        window: int,
        start: int,
        more: bool,
        tree: dict[Part, JsonValue],
        log: list[EntryRecord],
        first: int,
        stop: int,
    ) -> None:
        """``log[first:stop]`` are its entries; views share the list, which may grow behind them."""
        self.conversation_id = conversation_id
        self.window = window
        """How many entries it shows at most."""
        self.start = start
        """Where the active transcript begins: no entry below this id is in it."""
        self.more = more
        """The active transcript has entries before these: ``view.before(...)`` reads them."""
        self.tree = tree
        """Its documents as JSON. Views share it: it is not to be changed, nor given away."""
        self._log = log
        self._first = first
        self._stop = stop
        self._entries: tuple[EntryRecord, ...] | None = None

    @property
    def entries(self) -> tuple[EntryRecord, ...]:
        """The newest ones of the active transcript, oldest first."""
        if self._entries is None:
            self._entries = tuple(self._log[self._first : self._stop])
        return self._entries

    def to_json(self) -> dict[str, JsonValue]:
        """A copy as JSON: entries, more, live, inbox, agent, usage, meta."""
        made: dict[str, JsonValue] = {"entries": [entry_json(entry) for entry in self.entries], "more": self.more}
        for part in PARTS:
            made[part] = copy_json(self.tree[part])
        return made

    @property
    def busy(self) -> bool:
        """A run goes on, from the commit that admitted its input on (rules H15 and H16)."""
        return cast("dict[str, JsonValue]", self.tree["live"]).get("run") is not None

    @property
    def compacting(self) -> bool:
        """A compaction is on its way."""
        return bool(cast("dict[str, JsonValue]", self.tree["live"]).get("compactions"))

    @property
    def live(self) -> Live:
        return Live.from_json(self.tree["live"])

    @property
    def inbox(self) -> Inbox:
        return Inbox.from_json(self.tree["inbox"])

    @property
    def agent(self) -> Agent:
        return Agent.from_json(self.tree["agent"])

    @property
    def usage(self) -> UsageTotals:
        return UsageTotals.from_json(self.tree["usage"])

    @property
    def meta(self) -> Meta:
        return Meta.from_json(self.tree["meta"])

    def appended(self, entry: EntryRecord) -> ConversationView:
        """With one more entry, and without the one that no longer fits."""
        log, first, stop = self._log, self._first, self._stop
        if len(log) > stop or first > self.window:
            # Another view went on from here; or as much again as it shows stands before it.
            log, first, stop = log[first:stop], 0, stop - first
        log.append(entry)
        surplus = stop - first == self.window
        return ConversationView(
            self.conversation_id,
            window=self.window,
            start=self.start,
            more=self.more or surplus,
            tree=self.tree,
            log=log,
            first=first + surplus,
            stop=stop + 1,
        )

    def begun_at(self, head: int) -> ConversationView:
        """With the active transcript beginning at this entry."""
        first = bisect_left(self._log, head, self._first, self._stop, key=lambda entry: entry.id)
        # One that reaches back takes in again what this view no longer has.
        reaches = (self.more or head < self.start) and first < self._stop and self._log[first].id > head
        return ConversationView(
            self.conversation_id,
            window=self.window,
            start=head,
            more=reaches,
            tree=self.tree,
            log=self._log,
            first=first,
            stop=self._stop,
        )

    def changed(self, tree: dict[Part, JsonValue]) -> ConversationView:
        """With these documents."""
        return ConversationView(
            self.conversation_id,
            window=self.window,
            start=self.start,
            more=self.more,
            tree=tree,
            log=self._log,
            first=self._first,
            stop=self._stop,
        )

    @property
    def shown(self) -> int:
        """How many entries it shows."""
        return self._stop - self._first


def first_view(
    conversation_id: int,
    *,
    window: int,
    marker: EntryRecord | None,
    entries: Sequence[EntryRecord],
    documents: Mapping[Part, JsonValue],
) -> ConversationView:
    """A view of ``entries``, the newest ones from the head of ``marker`` on, oldest first; one more than the window
    says that there are more."""
    log = list(entries[-window:])
    view = ConversationView(
        conversation_id,
        window=window,
        start=head_of(marker),
        more=len(entries) > window,
        tree={part: documents[part] for part in PARTS},
        log=log,
        first=0,
        stop=len(log),
    )
    for entry in log:
        # A marker that came while these were read.
        if entry.head is not None and (marker is None or entry.id > marker.id):
            view = view.begun_at(entry.head)
    return view


def head_of(marker: EntryRecord | None) -> int:
    """Where an active transcript begins whose newest marker this is."""
    return 0 if marker is None or marker.head is None else marker.head


def advance(
    view: ConversationView, entries: Sequence[EntryRecord], changes: Sequence[DocumentChange]
) -> tuple[ConversationView, tuple[Op, ...]]:
    """The view after a commit that appended these entries to its conversation and changed these documents.

    The operations lead from the JSON before to the JSON after. Nothing that the view shows: the same view.
    """
    ops: list[Op] = []
    for entry in entries:
        view = _append(view, entry, ops)
    tree: dict[Part, JsonValue] | None = None
    for change in changes:
        part = PART_OF.get(change.record.kind)
        if part is None:
            continue
        if tree is None:
            tree = dict(view.tree)
        if change.after is None:
            tree[part] = PARTS[part].definition.initial()
            ops.append(Set((part,), tree[part]))
        else:
            tree[part] = change.after
            ops += (msgspec.structs.replace(op, path=(part, *op.path)) for op in change.ops)
    return (view if tree is None else view.changed(tree)), tuple(ops)


def document_value(part: Part, state: DocState) -> JsonValue:
    """What a loaded document is, as this code's version has it; what is not there is as new."""
    definition = PARTS[part].definition
    if state.record is None:
        return definition.initial()
    value, _ = resolve_version(definition, state.version, state.value)
    return value


def entry_json(entry: EntryRecord) -> JsonValue:
    """An entry as JSON; fields that have their defaults are left out."""
    return msgspec.json.decode(msgspec.json.encode(entry))


def _append(view: ConversationView, entry: EntryRecord, ops: list[Op]) -> ConversationView:
    before, view = view, view.appended(entry)
    ops.append(Splice(("entries",), before.shown, 0, [entry_json(entry)]))
    if view.shown == before.shown:
        ops.append(Splice(("entries",), 0, 1, []))
    if view.more != before.more:
        ops.append(Set(("more",), view.more))
    if entry.head is None:
        return view
    before, view = view, view.begun_at(entry.head)
    if view.shown < before.shown:
        ops.append(Splice(("entries",), 0, before.shown - view.shown, []))
    if view.more != before.more:
        ops.append(Set(("more",), view.more))
    return view
