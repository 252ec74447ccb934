"""Documents in memory: what each address holds, staged and settled, and how a changed one is written.

A document that is in use is here with two values: as of the newest staged commit (what transactions see) and as of
the newest settled one (what everybody else sees). Values are plain JSON trees that are never changed in place:
operations make new ones that share structure (kernel.ops.apply), so both may be handed to readers.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from msgspec import structs

from perdure.kernel.document import Document, DocumentDefinition, resolve_version
from perdure.kernel.errors import NotJson, OperationError, PerdureError, StorageCorrupt
from perdure.kernel.json import JsonValue, decode_json, encode_json
from perdure.kernel.observation import Source
from perdure.kernel.ops import Op, apply, decode_ops, encode_ops
from perdure.kernel.records import MAX_RECORD_BYTES, Address, DocumentRecord
from perdure.kernel.storage import DocumentWrite, StoredDocument

D = TypeVar("D", bound=Document)

REPLAY_FACTOR = 4
"""A base is written once replaying what follows the last one would cost more than this many times the new one."""
OP_COST = 64
"""What replaying one delta costs beside its bytes, in bytes."""
SMALL_BASE = 1024
"""Bases below this many bytes count as this many when that is judged."""


class DocState(msgspec.Struct, frozen=True):
    """One value of one address. ``record`` None: nothing lives there."""

    record: DocumentRecord | None
    version: int
    value: JsonValue
    base_bytes: int = 0
    deltas: int = 0
    delta_bytes: int = 0
    weighed: int = 0
    """Bytes that a new base would have taken when that was last found too much; 0: never, since the last base."""


ABSENT = DocState(None, 0, None)


class DocumentChange(msgspec.Struct, frozen=True):
    """What one commit did to one document. ``before`` is None for a new one, ``after`` for a retired one."""

    record: DocumentRecord
    before: JsonValue
    after: JsonValue
    ops: tuple[Op, ...]
    """Lead from before to after; for a new or migrated document, one Set of the whole."""


class LoadedDocument:
    """An address in use."""

    __slots__ = ("address", "holds", "kept", "settled", "sources", "staged", "used_at")

    def __init__(self, address: Address, state: DocState) -> None:
        self.address = address
        self.kept = False
        """In the cache."""
        self.staged = state
        self.settled = state
        self.sources: dict[DocumentDefinition, Source[Document]] = {}
        """Observers, by the definition they read with."""
        self.used_at = 0.0
        """On the monotonic clock."""
        self.holds = 0
        """Open transactions that read or change it."""

    @property
    def needed(self) -> bool:
        """In memory regardless of age (rules K67 and K114): its values differ, a transaction has it open, or somebody
        observes it."""
        observed = any(source.observed for source in self.sources.values())
        return self.staged is not self.settled or self.holds > 0 or observed


def read_state(state: DocState, kind: type[D]) -> D | None:
    """What a reader using ``kind`` sees; an older stored version is migrated in memory only (rule K109)."""
    if state.record is None:
        return None
    value, _ = resolve_version(kind.definition, state.version, state.value)
    return kind.from_json(value)


def materialise(stored: StoredDocument) -> DocState:
    """The value of a stored document: its base and the deltas after it. Raises StorageCorrupt."""
    delta_bytes = 0
    try:
        value = decode_json(stored.base)
        for delta in stored.deltas:
            value = apply(value, decode_ops(delta))
            delta_bytes += len(delta)
    except (NotJson, OperationError) as error:
        raise StorageCorrupt(f"{stored.record.address} cannot be put together from what is stored: {error}") from error
    return DocState(stored.record, stored.version, value, len(stored.base), len(stored.deltas), delta_bytes)


def write_base(
    record: DocumentRecord, version: int, value: JsonValue, base: bytes | None = None
) -> tuple[DocState, DocumentWrite]:
    """``base``: the value encoded, where that is known."""
    base = encode_json(value) if base is None else base
    reclaim = record.history == "latest"
    return (
        DocState(record, version, value, len(base)),
        DocumentWrite(record, version, base=base, reclaim=reclaim),
    )


def write_change(
    definition: DocumentDefinition, state: DocState, value: JsonValue, ops: tuple[Op, ...]
) -> tuple[DocState, DocumentWrite]:
    """A delta, or a base where replaying would cost more than the base."""
    record = state.record
    assert record is not None, "a change needs an incarnation"
    delta = encode_ops(ops)
    deltas, delta_bytes, weighed = state.deltas + 1, state.delta_bytes + len(delta), state.weighed
    replay, base = delta_bytes + OP_COST * deltas, None
    if definition.checkpoint_when is not None:
        as_base = due = definition.checkpoint_when(state.base_bytes, deltas, delta_bytes)
    else:
        as_base, due = False, replay > REPLAY_FACTOR * max(state.base_bytes, weighed, SMALL_BASE)
    if not as_base and (due or len(delta) >= state.base_bytes + state.delta_bytes):
        # What a base takes is known once it is encoded. Of a text that grows it would store everything once more.
        base = encode_json(value)
        weighed = len(base)
        as_base = weighed <= len(delta) or (due and REPLAY_FACTOR * weighed < replay)
    if as_base and base is None:
        base = encode_json(value)
    # A value may be larger than a write may be: its changes go on all the same.
    if as_base and base is not None and len(base) <= MAX_RECORD_BYTES:
        return write_base(record, state.version, value, base)
    return (
        DocState(record, state.version, value, state.base_bytes, deltas, delta_bytes, weighed),
        DocumentWrite(record, state.version, ops=delta),
    )


def retire_state(state: DocState, *, at: int, seq: int) -> DocumentWrite:
    assert state.record is not None, "only a living document retires"
    return DocumentWrite(structs.replace(state.record, retired_at=at, retired_seq=seq), state.version)


class DocumentCache:
    """The addresses in use. Bounded by age: what nobody needs leaves after the retention."""

    def __init__(
        self,
        read: Callable[[Address], Awaitable[StoredDocument | None]],
        now: Callable[[], float],
        retention: float,
    ) -> None:
        self._read = read
        self._now = now
        self._retention = retention
        self._loaded: dict[Address, LoadedDocument] = {}
        self._loading: dict[Address, asyncio.Future[LoadedDocument]] = {}
        self._aging: OrderedDict[LoadedDocument, None] = OrderedDict()
        """The longest unused first. One that is needed may be missing: it is used once more when it no longer is."""

    def peek(self, address: Address) -> LoadedDocument | None:
        return self._loaded.get(address)

    def loaded(self) -> list[LoadedDocument]:
        return list(self._loaded.values())

    def put(self, address: Address, state: DocState) -> LoadedDocument:
        """Bring in an address whose stored state is known without reading (nothing can live there yet)."""
        assert address not in self._loaded, "an address is loaded once"
        document = self._loaded[address] = LoadedDocument(address, state)
        document.kept = True
        self.use(document)
        return document

    def use(self, *documents: LoadedDocument) -> None:
        """They were used just now: the retention counts from here."""
        now = self._now()
        for document in documents:
            if document.kept:
                document.used_at = now
                self._aging[document] = None
                self._aging.move_to_end(document)

    async def load(self, address: Address) -> LoadedDocument:
        """From memory, or one read however many ask. A document cannot change while it is not loaded.

        Whoever awaits this must look whether the document still is in memory (``peek``) before relying on it.
        """
        document = self._loaded.get(address)
        if document is not None:
            self.use(document)
            return document
        self.sweep()
        loading = self._loading.get(address)
        if loading is None:
            loading = asyncio.ensure_future(self._load(address))
            self._loading[address] = loading
            loading.add_done_callback(lambda done: self._finish(address, done))
        return await asyncio.shield(loading)

    def _finish(self, address: Address, done: asyncio.Future[LoadedDocument]) -> None:
        del self._loading[address]
        if not done.cancelled():
            done.exception()  # nobody is left to look at it when all who asked were cancelled

    async def _load(self, address: Address) -> LoadedDocument:
        stored = await self._read(address)
        present = self._loaded.get(address)
        if present is None:
            return self.put(address, ABSENT if stored is None else materialise(stored))
        self.use(present)
        return present

    def sweep(self) -> None:
        """Let go of what was not used for the retention; called with every load and every settled commit."""
        horizon = self._now() - self._retention
        while self._aging:
            document = next(iter(self._aging))
            if document.used_at > horizon:
                return
            del self._aging[document]
            # What is being read must find here what a transaction put meanwhile, not read past it.
            if not document.needed and document.address not in self._loading:
                del self._loaded[document.address]
                document.kept = False


class ForkConflict(PerdureError):
    """A fork takes the parent's ``current`` documents as they are; the same transaction may not change them too."""
