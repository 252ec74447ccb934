"""Drafts: a value edited like plain Python while every change is recorded as operations (rules K50-K55).

A Recorder holds the value and what was done to it. Its handles, DraftObject and DraftList, read and write
like dict and list without being subclasses of them, so that no code in C can write past the record. A
container is copied when first written, with those above it: whoever reads the value from before is not
disturbed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from operator import index as as_index
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeAlias, TypeVar, cast, overload

from typing_extensions import override

from perdure.kernel.errors import DraftClosed, DraftDetached, NotJson
from perdure.kernel.json import JsonPath, JsonValue, JsonView, check_json, copy_json, encode_json, path_text
from perdure.kernel.ops import Append, Delete, Op, Set, Splice, Trim

DraftValue: TypeAlias = "bool | int | float | str | DraftObject | DraftList | None"
"""What reading a draft gives: a scalar, or a handle on the container that stands there."""

_Item: TypeAlias = "DraftValue | JsonValue"
"""What goes in and out of a handle: reads give handles, what is taken out is plain."""

T = TypeVar("T")

_MERGE_ITEMS: Final = 64
_MERGE_TEXT: Final = 4096
"""Up to this size following appends are merged into one operation: merging copies what it merges."""


_MISSING: Final = object()


class Guard(Protocol):
    """What a recorder asks before it takes a change; it raises to refuse. Paths are from the root."""

    def check_set(self, path: JsonPath, value: JsonValue) -> None: ...
    def check_delete(self, path: JsonPath) -> None: ...


class Recorder:
    """One draft: the current value, the operations that led to it, and whether it may still be changed.

    ``value`` is not copied and never changed. ``at`` names the root in errors.
    """

    __slots__ = ("_ops", "_root", "at", "closed", "current", "era", "guard")

    def __init__(self, value: JsonValue, *, at: str = "$", guard: Guard | None = None) -> None:
        self.at: str = at
        self.guard: Guard | None = guard
        self.closed: bool = False
        self.current: JsonValue = value
        """The value as the handles keep it; what was copied for this draft is changed in place."""
        self.era: int = 1
        """A container is the draft's own if copied in this era; giving the value out begins another."""
        self._ops: list[Op] = []
        self._root: DraftObject | DraftList | None = None

    @property
    def root(self) -> DraftValue:
        """The handle on the whole value; a scalar is given as it is. Raises DraftClosed."""
        self.check_open()
        value = self.current
        if not isinstance(value, (dict, list)):
            return value
        if self._root is None:
            self._root = _handle(self, None, "", value)
        return self._root

    @property
    def value(self) -> JsonValue:
        """The value after the operations so far. It is shared, so not to be changed; later edits spare it."""
        self.era += 1
        return self.current

    @property
    def ops(self) -> tuple[Op, ...]:
        """What was done, in order: ``apply(before, ops)`` equals ``value``. Empty if nothing changed."""
        return tuple(self._ops)

    def close(self) -> None:
        """End the draft: every handle raises DraftClosed from here on; ``value`` and ``ops`` stay."""
        self.closed = True

    def check_open(self) -> None:
        if self.closed:
            raise DraftClosed(f"the draft of {self.at} was used after its transaction ended; open another")

    def record(self, op: Op) -> None:
        """Add an operation, merged into the one before if that was about the same place."""
        if self._ops and self._ops[-1].path == op.path:
            merged = _merge(self._ops[-1], op)
            if merged is not None:
                self._ops[-1] = merged
                return
        self._ops.append(op)


def _merge(last: Op, op: Op) -> Op | None:
    match last, op:
        case Set() | Append() | Trim() | Splice(), Set():
            return op
        case Set(path, str(text)), Append(text=more) if len(text) <= _MERGE_TEXT:
            return Set(path, text + more)
        case Append(path, text), Append(text=more) if len(text) <= _MERGE_TEXT:
            return Append(path, text + more)
        case Splice(path, index, remove, items), Splice(index=then, remove=0, insert=more) if (
            then == index + len(items) and len(items) <= _MERGE_ITEMS
        ):
            return Splice(path, index, remove, items + more)
        case _:
            return None


class _Node(JsonView):
    """What both kinds of handle are: a place in the draft, and the container that stands there now."""

    __slots__ = ("_children", "_detached", "_era", "_key", "_parent", "_recorder", "_value")

    def __init__(
        self,
        recorder: Recorder,
        parent: DraftObject | DraftList | None,
        key: str | int,
        value: list[JsonValue] | dict[str, JsonValue],
    ) -> None:
        self._recorder: Recorder = recorder
        self._parent: DraftObject | DraftList | None = parent
        self._key: str | int = key
        """Its place in the parent; a list keeps those of its children up to date."""
        # Any: each subclass holds its own kind of container and narrows it in _live and _own.
        self._value: Any = value
        self._children: dict[str | int, DraftObject | DraftList] = {}
        self._era: int = 0
        self._detached: bool = False

    @override
    def to_json(self) -> JsonValue:
        """A plain copy that has nothing more to do with the draft."""
        return copy_json(self._checked())

    def __copy__(self) -> JsonValue:
        return self.to_json()

    def __deepcopy__(self, memo: object) -> JsonValue:
        return self.to_json()

    @override
    def __reduce__(self) -> tuple[Callable[[JsonValue], JsonValue], tuple[JsonValue]]:
        return copy_json, (self.to_json(),)

    @override
    def __eq__(self, other: object) -> bool:
        mine = self._checked()
        return mine == (other._checked() if isinstance(other, _Node) else other)

    __hash__ = None  # pyright: ignore[reportAssignmentType] # as of every mutable container

    def __len__(self) -> int:
        return len(self._checked())

    def __contains__(self, item: object) -> bool:
        return item in self._checked()

    @override
    def __repr__(self) -> str:
        # Contents may be secret, so none are shown.
        name = type(self).__name__
        if self._recorder.closed or self._detached:
            return f"<{name} {'detached' if self._detached else 'closed'}>"
        return f"<{name} {self._text()}, {len(self._value)} items>"

    def _checked(self) -> Any:
        """The container, if this handle may still be used."""
        if self._recorder.closed:
            self._recorder.check_open()
        if self._detached:
            raise DraftDetached(
                f"the object of this handle into {self._recorder.at} was removed or replaced; read it again"
            )
        return self._value

    def _own(self) -> Any:
        """The container, as the draft's own copy: it may be changed in place."""
        recorder = self._recorder
        if self._era != recorder.era:
            copy = self._value.copy()
            if self._parent is None:
                recorder.current = copy
            else:
                self._parent._own()[self._key] = copy
            self._value = copy
            self._era = recorder.era
        return self._value

    def _path(self) -> JsonPath:
        steps: list[str | int] = []
        node: _Node = self
        while node._parent is not None:
            steps.append(node._key)
            node = node._parent
        steps.reverse()
        return tuple(steps)

    def _text(self) -> str:
        return path_text(self._path(), at=self._recorder.at)

    def _detach(self) -> None:
        self._detached = True
        for child in self._children.values():
            child._detach()

    def _drop(self, key: str | int) -> None:
        """The child at ``key`` is no longer there."""
        child = self._children.pop(key, None)
        if child is not None:
            child._detach()

    def _read(self, key: str | int, value: JsonValue) -> DraftValue:
        """What stands at ``key``, as a caller may have it."""
        if not isinstance(value, (dict, list)):
            return value
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = _handle(self._recorder, cast("DraftObject", self), key, value)
        return child

    def _copied(self, path: JsonPath, value: object) -> JsonValue:
        """``value`` as it will stand at ``path``: checked, copied, accepted by the guard."""
        recorder = self._recorder
        new = copy_json(value, at=recorder.at, path=path)
        if recorder.guard is not None:
            recorder.guard.check_set(path, new)
        return new

    def _put(self, key: str | int, value: object, *, new: bool) -> None:
        """Write at one key or (existing) index; what is the same JSON already leaves no operation."""
        if not new and (value is None or isinstance(value, (str, int))) and _same(self._value[key], value):
            return  # what stands there was checked as it was written
        if value is not None and self._children.get(key) is value:
            return  # the second half of ``draft.items += more``: the handle is put back where it is
        path = (key,) if self._parent is None else (*self._path(), key)
        plain = self._copied(path, value)
        op: Op = Set(path, plain)
        if not new:
            old: JsonValue = self._value[key]
            if _same(old, plain):
                self._drop(key)  # replaced by its equal: the handle's object is gone all the same
                return
            if type(old) is str and type(plain) is str:
                op = _text_op(path, old, plain)
        self._own()[key] = plain
        if self._children:
            self._drop(key)
        self._recorder.record(op)


def _handle(
    recorder: Recorder,
    parent: DraftObject | DraftList | None,
    key: str | int,
    value: list[JsonValue] | dict[str, JsonValue],
) -> DraftObject | DraftList:
    return (DraftObject if type(value) is dict else DraftList)(recorder, parent, key, value)


def _same(old: JsonValue, new: JsonValue) -> bool:
    """Whether a write would change nothing: same types, same values, same order of keys."""
    if type(old) is not type(new):
        return False
    if isinstance(old, (str, int)) or old is None:
        return old == new
    return encode_json(old) == encode_json(new)


def _text_op(path: JsonPath, old: str, new: str) -> Op:
    """The smallest operation between two texts that differ."""
    if old and new.startswith(old):
        return Append(path, new[len(old) :])
    count = len(old) - len(new)
    if count > 0 and old.startswith(new) and len(str(count)) < len(new) + len('""'):
        return Trim(path, count)
    return Set(path, new)


class DraftObject(_Node, MutableMapping[str, _Item]):
    """A handle on an object of a draft: works like a dict; a container inside it is read as a handle."""

    __slots__ = ()

    @override
    def __getitem__(self, key: str) -> DraftValue:
        return self._read(key, self._live()[key])

    @override
    def __setitem__(self, key: str, value: object) -> None:
        live = self._live()
        if type(key) is not str:
            raise NotJson(self._text(), f"an object's keys must be str, not {type(key).__name__}")
        if key not in live and not key.isascii():
            check_json({key: None}, at=self._text())
        self._put(key, value, new=key not in live)

    @override
    def __delitem__(self, key: str) -> None:
        if key not in self._live():
            raise KeyError(key)
        path = (*self._path(), key)
        if self._recorder.guard is not None:
            self._recorder.guard.check_delete(path)
        del self._own()[key]
        self._drop(key)
        self._recorder.record(Delete(path))

    @override
    def __iter__(self) -> Iterator[str]:
        return self._keys(iter)

    def __reversed__(self) -> Iterator[str]:
        return self._keys(reversed)

    def _keys(self, order: Callable[[dict[str, JsonValue]], Iterator[str]]) -> Iterator[str]:
        # Copying on write would let a loop run on over the old keys: it fails as a dict's does.
        size = len(self._live())
        for key in order(self._live()):
            if len(self._live()) != size:
                raise RuntimeError("draft object changed size during iteration")
            yield key

    # Reads give handles and what is taken out is plain: narrower than _Item; the overload check misses it.
    @overload
    def get(self, key: str, /) -> DraftValue: ...
    @overload
    def get(self, key: str, default: T, /) -> DraftValue | T: ...
    @override
    def get(self, key: str, default: object = None, /) -> object:  # pyright: ignore[reportIncompatibleMethodOverride]
        live = self._live()
        return self._read(key, live[key]) if key in live else default

    @overload
    def pop(self, key: str, /) -> JsonValue: ...
    @overload
    def pop(self, key: str, default: T, /) -> JsonValue | T: ...
    @override
    def pop(self, key: str, default: object = _MISSING, /) -> object:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Remove a key and return what stood there, as a plain copy."""
        live = self._live()
        if key not in live and default is not _MISSING:
            return default
        taken = copy_json(live[key])
        del self[key]
        return taken

    @override
    def popitem(self) -> tuple[str, JsonValue]:
        """Remove the newest key and return it with what stood there, as a plain copy."""
        if not self._live():
            raise KeyError("popitem(): draft object is empty")
        key = next(reversed(self))
        return key, self.pop(key)

    @override
    def clear(self) -> None:
        live, path, guard = self._live(), self._path(), self._recorder.guard
        if not live:
            return
        if guard is not None:
            for key in live:
                guard.check_delete((*path, key))
        for key in list(self._children):
            self._drop(key)
        self._own().clear()
        self._recorder.record(Set(path, {}))

    @override
    def setdefault(self, key: str, default: object = None) -> DraftValue:
        if key not in self._live():
            self[key] = default
        return self[key]

    def copy(self) -> dict[str, JsonValue]:
        """A plain copy, deep."""
        return cast("dict[str, JsonValue]", self.to_json())

    def __or__(self, other: Mapping[str, object]) -> dict[str, JsonValue]:
        return self.copy() | cast("dict[str, JsonValue]", copy_json(dict(other)))

    def __ror__(self, other: Mapping[str, object]) -> dict[str, JsonValue]:
        return cast("dict[str, JsonValue]", copy_json(dict(other))) | self.copy()

    def __ior__(self, other: Mapping[str, object] | Iterable[tuple[str, object]]) -> Self:
        self.update(cast("Mapping[str, _Item]", other))
        return self

    if TYPE_CHECKING:

        def _live(self) -> dict[str, JsonValue]: ...
    else:
        _live = _Node._checked


class DraftList(_Node, MutableSequence[_Item]):
    """A handle on a list of a draft: works like a list; a container inside it is read as a handle."""

    __slots__ = ()

    @overload
    def __getitem__(self, index: int) -> DraftValue: ...
    @overload
    def __getitem__(self, index: slice) -> list[_Item]: ...
    @override
    def __getitem__(self, index: int | slice) -> DraftValue | list[_Item]:
        live = self._live()
        if isinstance(index, slice):
            return [self._read(at, live[at]) for at in range(*index.indices(len(live)))]
        at = self._at(index)
        return self._read(at, live[at])

    @overload
    def __setitem__(self, index: int, value: object) -> None: ...
    @overload
    def __setitem__(self, index: slice, value: Iterable[object]) -> None: ...
    @override
    def __setitem__(self, index: int | slice, value: object) -> None:
        live = self._live()
        if not isinstance(index, slice):
            self._put(self._at(index), value, new=False)
            return
        values = list(cast("Iterable[object]", value))
        start, stop, step = index.indices(len(live))
        if step == 1:
            self._splice(start, max(stop - start, 0), values)
            return
        places = range(start, stop, step)
        if len(values) != len(places):
            raise ValueError(f"{len(values)} values cannot be assigned to a slice of {len(places)} items")
        path = self._path()
        copies = [self._copied((*path, at), item) for at, item in zip(places, values, strict=True)]
        for at, item in zip(places, copies, strict=True):
            self._put(at, item, new=False)

    @override
    def __delitem__(self, index: int | slice) -> None:
        live = self._live()
        if not isinstance(index, slice):
            self._splice(self._at(index), 1, [])
            return
        start, stop, step = index.indices(len(live))
        if step == 1:
            self._splice(start, max(stop - start, 0), [])
            return
        for at in sorted(range(start, stop, step), reverse=True):
            self._splice(at, 1, [])

    @override
    def __iter__(self) -> Iterator[DraftValue]:
        at = 0
        while at < len(self._live()):
            yield self[at]
            at += 1

    @override
    def __reversed__(self) -> Iterator[DraftValue]:
        for at in range(len(self._live()) - 1, -1, -1):
            yield self[at]

    @override
    def insert(self, index: int, value: object) -> None:
        size = len(self._live())
        at = as_index(index)
        self._splice(min(max(at + size if at < 0 else at, 0), size), 0, [value])

    @override
    def append(self, value: object) -> None:
        self._splice(len(self._live()), 0, [value])

    @override
    def extend(self, values: Iterable[object]) -> None:
        items = list(values)
        self._splice(len(self._live()), 0, items)

    @override
    def pop(self, index: int = -1) -> JsonValue:
        """Remove an item and return it as a plain copy."""
        if not self._live():
            raise IndexError("pop from empty draft list")
        at = self._at(index)
        taken = copy_json(self._live()[at])
        self._splice(at, 1, [])
        return taken

    @override
    def remove(self, value: object) -> None:
        self._splice(self.index(value), 1, [])

    @override
    def clear(self) -> None:
        self._splice(0, len(self._live()), [])

    @override
    def index(self, value: object, start: int = 0, stop: int | None = None) -> int:
        live = self._live()
        return live.index(cast("JsonValue", value), start, len(live) if stop is None else stop)

    @override
    def count(self, value: object) -> int:
        return self._live().count(cast("JsonValue", value))

    @override
    def reverse(self) -> None:
        """Reverse in place; handles follow their objects."""
        self._rearrange(list(range(len(self._live()) - 1, -1, -1)))

    def sort(self, *, key: Callable[[Any], Any] | None = None, reverse: bool = False) -> None:
        """Sort in place, stably; handles follow their objects. ``key`` gets items as the draft gives them."""
        # Any: a key function takes the items as its author knows them, and returns whatever compares.
        items = list(self)
        ranks: list[Any] = items if key is None else [key(item) for item in items]
        order = sorted(range(len(items)), key=ranks.__getitem__, reverse=reverse)
        if len(self._live()) != len(items):
            raise ValueError("draft list modified during sort")
        self._rearrange(order)

    def copy(self) -> list[JsonValue]:
        """A plain copy, deep."""
        return cast("list[JsonValue]", self.to_json())

    def __add__(self, other: Iterable[object]) -> list[JsonValue]:
        return self.copy() + cast("list[JsonValue]", copy_json(list(other)))

    def __radd__(self, other: Iterable[object]) -> list[JsonValue]:
        return cast("list[JsonValue]", copy_json(list(other))) + self.copy()

    @override
    def __iadd__(self, values: Iterable[object]) -> Self:
        self.extend(values)
        return self

    if TYPE_CHECKING:

        def _live(self) -> list[JsonValue]: ...
    else:
        _live = _Node._checked

    def _at(self, index: int) -> int:
        """An index as Python understands it, as a place from the start."""
        at, size = as_index(index), len(self._live())
        if not -size <= at < size:
            raise IndexError(f"draft list index {at} out of range of {size}")
        return at + size if at < 0 else at

    def _splice(self, start: int, remove: int, values: list[object]) -> None:
        """Put copies of ``values`` in the place of ``remove`` items; handles behind them follow."""
        path = self._path()
        items = [self._copied((*path, start + offset), value) for offset, value in enumerate(values)]
        for at in range(start, start + remove):
            self._drop(at)
        live = self._live()
        # What is equal at both ends of the range stays unwritten.
        most = min(remove, len(items))
        head = 0
        while head < most and _same(live[start + head], items[head]):
            head += 1
        tail = 0
        while tail < most - head and _same(live[start + remove - 1 - tail], items[-1 - tail]):
            tail += 1
        start, remove, items = start + head, remove - head - tail, items[head : len(items) - tail]
        if not remove and not items:
            return
        behind, shift = start + remove, len(items) - remove
        if shift:
            self._reindex(lambda at: at + shift if at >= behind else at)
        self._own()[start : start + remove] = items
        self._recorder.record(Splice(path, start, remove, items))

    def _rearrange(self, order: list[int]) -> None:
        """Put the item of ``order[i]`` at ``i``."""
        moved = [at for at, origin in enumerate(order) if at != origin]
        if not moved:
            return
        start, stop = moved[0], moved[-1] + 1
        place = {origin: at for at, origin in enumerate(order)}
        path = self._path()
        own: list[JsonValue] = self._own()
        items = [own[origin] for origin in order[start:stop]]
        own[start:stop] = items
        self._reindex(place.__getitem__)
        # The operation holds containers that may be the draft's own copies: no longer only its own.
        self._recorder.era += 1
        self._recorder.record(Splice(path, start, stop - start, items))

    def _reindex(self, place: Callable[[int], int]) -> None:
        """Handles follow their objects to new positions."""
        children = [(place(cast("int", at)), child) for at, child in self._children.items()]
        self._children = dict(children)
        for at, child in children:
            child._key = at
