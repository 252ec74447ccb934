"""What a client sees of a conversation: its active transcript, as a window, and its built-in documents (rule H147).

A view is a value and never changes; the next commit makes the next one, which shares all that stayed the same.
Beside the typed fields it is one JSON value, ``to_json()``, which the operations of a watch's frames are about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
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

    def __init__(
        self,
        conversation_id: int,
        *,
        window: int,
        start: int,
        entries: tuple[EntryRecord, ...],
        tree: dict[str, JsonValue],
    ) -> None:
        self.conversation_id = conversation_id
        self.window = window
        """How many entries it shows at most."""
        self.start = start
        """Where the active transcript begins: no entry below this id is in it."""
        self.entries = entries
        """The newest ones of the active transcript, oldest first."""
        self.tree = tree
        """All of it as JSON. Views share it: it is not to be changed, nor given away."""

    def to_json(self) -> dict[str, JsonValue]:
        """A copy as JSON: entries, more, live, inbox, agent, usage, meta."""
        copied = copy_json(self.tree)
        assert isinstance(copied, dict), "a copy is of the same type"
        return copied

    def own(self) -> ConversationView:
        """The same view for one reader alone, whatever that does to the values of its fields."""
        return ConversationView(
            self.conversation_id, window=self.window, start=self.start, entries=self.entries, tree=self.tree
        )

    @property
    def more(self) -> bool:
        """The active transcript has entries before these: ``view.before(...)`` reads them."""
        return self.tree["more"] is True

    @property
    def busy(self) -> bool:
        """A run goes on, from the commit that admitted its input on (rules H15 and H16)."""
        return cast("dict[str, JsonValue]", self.tree["live"]).get("run") is not None

    @cached_property
    def live(self) -> Live:
        return Live.from_json(self.tree["live"])

    @cached_property
    def inbox(self) -> Inbox:
        return Inbox.from_json(self.tree["inbox"])

    @cached_property
    def agent(self) -> Agent:
        return Agent.from_json(self.tree["agent"])

    @cached_property
    def usage(self) -> UsageTotals:
        return UsageTotals.from_json(self.tree["usage"])

    @cached_property
    def meta(self) -> Meta:
        return Meta.from_json(self.tree["meta"])


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
    start = head_of(marker)
    shown = tuple(entries[-window:])
    tree: dict[str, JsonValue] = {
        "entries": [entry_json(entry) for entry in shown],
        "more": len(entries) > window,
    }
    for part in PARTS:
        tree[part] = documents[part]
    view = ConversationView(conversation_id, window=window, start=start, entries=shown, tree=tree)
    for entry in shown:
        # A marker that came while these were read.
        if entry.head is not None and (marker is None or entry.id > marker.id):
            view, _ = _begin_at(view, entry.head)
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
        view, more = _append(view, entry)
        ops += more
    tree = dict(view.tree)
    changed = False
    for change in changes:
        part = PART_OF.get(change.record.kind)
        if part is None:
            continue
        changed = True
        if change.after is None:
            tree[part] = PARTS[part].definition.initial()
            ops.append(Set((part,), tree[part]))
        else:
            tree[part] = change.after
            ops += (msgspec.structs.replace(op, path=(part, *op.path)) for op in change.ops)
    if changed:
        view = ConversationView(
            view.conversation_id, window=view.window, start=view.start, entries=view.entries, tree=tree
        )
    return view, tuple(ops)


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


def _append(view: ConversationView, entry: EntryRecord) -> tuple[ConversationView, list[Op]]:
    made = entry_json(entry)
    ops: list[Op] = [Splice(("entries",), len(view.entries), 0, [made])]
    entries = (*view.entries, entry)
    listed = [*cast("list[JsonValue]", view.tree["entries"]), made]
    tree: dict[str, JsonValue] = {**view.tree, "entries": listed}
    surplus = len(entries) - view.window
    if surplus > 0:
        ops.append(Splice(("entries",), 0, surplus, []))
        entries = entries[surplus:]
        tree["entries"] = listed[surplus:]
        if not view.more:
            tree["more"] = True
            ops.append(Set(("more",), True))
    view = ConversationView(view.conversation_id, window=view.window, start=view.start, entries=entries, tree=tree)
    if entry.head is None:
        return view, ops
    view, more = _begin_at(view, entry.head)
    return view, ops + more


def _begin_at(view: ConversationView, head: int) -> tuple[ConversationView, list[Op]]:
    """The active transcript begins at this entry from now on."""
    gone = sum(entry.id < head for entry in view.entries)
    entries = view.entries[gone:]
    tree = dict(view.tree)
    ops: list[Op] = []
    if gone:
        tree["entries"] = cast("list[JsonValue]", view.tree["entries"])[gone:]
        ops.append(Splice(("entries",), 0, gone, []))
    # One that reaches back takes in again what this view no longer has.
    more = (view.more or head < view.start) and bool(entries) and entries[0].id > head
    if more != view.more:
        tree["more"] = more
        ops.append(Set(("more",), more))
    view = ConversationView(view.conversation_id, window=view.window, start=head, entries=entries, tree=tree)
    return view, ops
