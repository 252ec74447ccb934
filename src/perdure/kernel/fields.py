"""The types of a document's fields: resolved from its annotations, checked at every write (rules K38, K39).

A field holds JSON (scalars, Literal, list, dict, TypedDict, JsonValue, unions of those) or a frozen msgspec
Struct, stored as JSON and read as a value of its own. Nothing is converted: what fits is stored as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, MutableMapping, MutableSequence, Sequence
from functools import lru_cache
from types import UnionType
from typing import (
    Annotated,
    Any,
    NotRequired,
    Required,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import msgspec

from perdure.kernel.errors import DocumentFieldError
from perdure.kernel.json import JsonPath, JsonValue, changed_type, copy_json, path_text

_LISTS = (list, Sequence, MutableSequence, Collection)
_DICTS = (dict, Mapping, MutableMapping)


class Schema:
    """The fields of one document class: their types, their initial values, and what may be written where.

    Annotations are resolved at first use, so they may name what the module defines further down.
    """

    def __init__(self, owner: type, kind: str, defaults: Mapping[str, Callable[[], object]]) -> None:
        self.kind: str = kind
        self._owner: type = owner
        self._defaults: Mapping[str, Callable[[], object]] = defaults
        self._types: dict[str, object] | None = None
        self._places: dict[str | int, _Place] = {}
        self.structs: frozenset[str] = frozenset()
        """Fields that are read as Structs; known once a type was asked for."""

    @property
    def names(self) -> list[str]:
        return list(self._defaults)

    def types(self) -> dict[str, object]:
        if self._types is None:
            try:
                hints = get_type_hints(self._owner, include_extras=True)
            except NameError as error:
                raise TypeError(
                    f"a field type of document {self.kind!r} cannot be resolved: {error}; "
                    "define it at module level, and import it at run time"
                ) from None
            types = {name: hints[name] for name in self._defaults}
            self.structs = frozenset(name for name, hint in types.items() if _check_type(hint, f"{self.kind}.{name}"))
            self._places = {name: _Place(hint) for name, hint in types.items()}
            self._types = types
        return self._types

    def plain(self, name: str, value: object) -> object:
        """``value`` as it can be put into the field ``name``: a Struct becomes JSON, all else stays."""
        hint = self.types()[name]
        if name not in self.structs or value is None or isinstance(value, (bool, int, float, str)):
            return value
        at = f"{self.kind}.{name}"
        if not isinstance(value, msgspec.Struct):
            raise DocumentFieldError(at, f"expected {_spell(hint)}, not {type(value).__name__}")
        try:
            stored: JsonValue = msgspec.json.decode(msgspec.json.encode(value))
            back: object = msgspec.convert(stored, hint)
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            raise DocumentFieldError(at, reason_of(error)[0]) from None
        if back != value or changed_type(back, value) is not None:
            raise DocumentFieldError(at, f"this {type(value).__name__} would not come back from JSON as it is")
        return stored

    def rich(self, name: str, value: JsonValue) -> object:
        """The Struct that a struct field's stored value stands for; it shares nothing with it."""
        return msgspec.convert(copy_json(value), self.types()[name])

    def filled(self, value: JsonValue) -> dict[str, JsonValue]:
        """``value`` with the initial values of the fields it lacks. It is not copied if it lacks none."""
        if not isinstance(value, dict):
            raise DocumentFieldError(self.kind, f"a document is an object, not {type(value).__name__}")
        if self._defaults.keys() <= value.keys():
            return value
        full = value.copy()
        for name, make in self._defaults.items():
            if name not in full:
                full[name] = copy_json(self.plain(name, make()), at=self.kind, path=(name,))
                self.check_set((name,), full[name])
        return full

    def check_value(self, value: JsonValue) -> None:
        """Every field of a whole value is known and fits."""
        if not isinstance(value, dict):
            raise DocumentFieldError(self.kind, f"a document is an object, not {type(value).__name__}")
        for name, item in value.items():
            self.check_set((name,), item)

    def check_set(self, path: JsonPath, value: JsonValue) -> None:
        """Asked by the recorder before a write. Raises DocumentFieldError."""
        place = self._at(path)
        hint = place.hint
        if hint is type(value) or hint is Any:
            return
        try:
            taken = place.converted(value)
        except msgspec.ValidationError as error:
            reason, below = reason_of(error)
            below = below.removeprefix("[0]")  # the box
            if "[...]" in below and isinstance(value, dict):  # it does not say which key: ask one by one
                for key, item in value.items():
                    self.check_set((*path, key), item)
            raise DocumentFieldError(path_text(path, at=self.kind) + below, reason) from None
        if len(path) == 1 and path[0] in self.structs:
            return
        if taken != value:  # converting leaves out what a TypedDict does not name
            surplus = _surplus(value, cast("JsonValue", taken))
            raise DocumentFieldError(path_text((*path, *surplus), at=self.kind), "no such key in its TypedDict")

    def check_delete(self, path: JsonPath) -> None:
        """Asked by the recorder before a key is removed. Raises DocumentFieldError."""
        at = path_text(path, at=self.kind)
        if len(path) == 1:
            raise DocumentFieldError(at, "a document's field cannot be deleted; assign another value")
        if self._at(path[:-1]).requires(path[-1]):
            raise DocumentFieldError(at, "its TypedDict requires this key")

    def _at(self, path: JsonPath) -> _Place:
        """The type of what stands at ``path``."""
        if self._types is None:
            self.types()
        place = self._places.get(path[0])
        if place is None:
            raise DocumentFieldError(
                path_text(path, at=self.kind), f"no such field; the fields are {', '.join(self.names)}"
            )
        for length in range(1, len(path)):
            place = place.below(path[length])
            if place is None:
                raise DocumentFieldError(path_text(path[: length + 1], at=self.kind), "no such key in its TypedDict")
        return place


class _Box(msgspec.Struct):
    value: object


class _Place:
    """A type, and those of what may stand inside a value of it: worked out once, at the first step down, since types
    may be recursive and telling what they are made of is slow."""

    __slots__ = ("_box", "_items", "_keys", "_required", "_resolved", "_values", "hint")

    def __init__(self, hint: object) -> None:
        self.hint = hint
        self._box: type[_Box] | None = None
        self._resolved = False
        self._items: _Place = self
        self._values: _Place = self
        self._keys: dict[str | int, _Place] | None = None
        self._required: frozenset[str | int] = frozenset()

    def converted(self, value: JsonValue) -> object:
        """``value`` as msgspec takes it for this type. Raises msgspec.ValidationError, its paths below ``[0]``.

        A Struct around the type is what msgspec remembers a type by: 0.4 us a call, 2.5 with the bare type.
        """
        if self._box is None:
            # As a class statement does it: defstruct() takes seven times as long.
            names = {"__annotations__": {"value": self.hint}}
            self._box = cast("type[_Box]", msgspec.StructMeta("Box", (_Box,), names, array_like=True))
        return msgspec.convert((value,), self._box).value

    def below(self, step: str | int) -> _Place | None:
        """What stands at a key or index; None for a key that its TypedDict does not have."""
        if not self._resolved:
            self._resolve()
        if type(step) is int:
            return self._items
        return self._values if self._keys is None else self._keys.get(step)

    def requires(self, key: str | int) -> bool:
        """Whether it is a TypedDict that cannot be without this key."""
        if not self._resolved:
            self._resolve()
        return key in self._required

    def _resolve(self) -> None:
        self._items = _place(_argument(_container(self.hint, True)))
        holder = _container(self.hint, False)
        if is_typeddict(holder):
            keys = _keys(cast("type", holder))
            self._keys = {name: _place(hint) for name, (hint, _) in keys.items()}
            self._required = frozenset(name for name, (_, required) in keys.items() if required)
        else:
            self._values = _place(_argument(holder))
        self._resolved = True


_shared_place = lru_cache(maxsize=1024)(_Place)


def _place(hint: object) -> _Place:
    try:
        return _shared_place(hint)
    except TypeError:  # it is annotated with something that has no hash
        return _Place(hint)


def _argument(holder: object) -> object:
    """The type of the items or values of a list or dict type."""
    arguments = get_args(holder)
    return arguments[-1] if arguments else Any


def _container(hint: object, is_list: bool) -> object:
    """The one member of ``hint`` that is a list (or an object): of JSON types, a union has at most one."""
    hint = _bare(hint)
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        found = [_container(member, is_list) for member in get_args(hint)]
        return next((member for member in found if member is not Any), Any)
    if (origin or hint) in (_LISTS if is_list else _DICTS) or (not is_list and is_typeddict(hint)):
        return hint
    return Any


def _keys(typed_dict: type) -> dict[str, tuple[object, bool]]:
    """Each key's type, and whether it is required."""
    keys: dict[str, tuple[object, bool]] = {}
    for name, hint in get_type_hints(typed_dict, include_extras=True).items():
        # With postponed annotations __required_keys__ knows of total only, not of Required and NotRequired.
        required = name in cast("Any", typed_dict).__required_keys__
        origin = get_origin(hint)
        if origin is Required or origin is NotRequired:
            hint, required = get_args(hint)[0], origin is Required
        keys[name] = (hint, required)
    return keys


def _bare(hint: object) -> object:
    """A type without its annotations and names."""
    while True:
        if get_origin(hint) is Annotated:
            hint = get_args(hint)[0]
        elif hasattr(hint, "__supertype__"):  # a NewType
            hint = cast("Any", hint).__supertype__
        elif hasattr(hint, "__value__"):  # an alias made by a type statement
            hint = cast("Any", hint).__value__
        else:
            return hint


def _check_type(hint: object, at: str) -> bool:
    """Refuse a type that no JSON value has; whether it has a Struct in it."""
    from msgspec import inspect as types  # only when a document is first used

    def walk(info: types.Type, inside: bool) -> bool:
        if isinstance(info, types.Metadata):
            info = info.type
        match info:
            case types.UnionType():
                # A set, so that every member is walked.
                return True in {walk(member, inside) for member in info.types}
            case types.StructType(cls) if not inside:
                if not cls.__struct_config__.frozen:
                    raise TypeError(f"{at}: {cls.__name__} must be frozen: what is read is a value of its own")
                return True
            case types.ListType() | types.DictType() if info.min_length is not None or info.max_length is not None:
                raise TypeError(f"{at}: bounds on a list or dict cannot be kept while it is edited in place")
            case types.ListType():
                walk(info.item_type, True)
            case types.DictType():
                if not isinstance(info.key_type, types.StrType):
                    raise TypeError(f"{at}: the keys of a JSON object are str")
                walk(info.value_type, True)
            case types.TypedDictType():
                if id(info) not in seen:
                    seen.add(id(info))
                    for entry in info.fields:
                        walk(entry.type, True)
            case (
                types.AnyType()
                | types.NoneType()
                | types.BoolType()
                | types.IntType()
                | types.FloatType()
                | types.StrType()
                | types.LiteralType()
            ):
                pass
            case types.StructType(cls):
                raise TypeError(f"{at}: a Struct inside a list or dict would be read as a dict; use a TypedDict")
            case _:
                raise TypeError(f"{at}: {_spell(hint)} is not made of JSON types")
        return False

    seen: set[int] = set()
    try:
        info = types.type_info(hint)
    except TypeError as error:
        raise TypeError(f"{at}: {error}") from None
    return walk(info, False)


_PLACE = re.compile(r" - at `\$(.*)`$")


def reason_of(error: Exception) -> tuple[str, str]:
    """What a msgspec error says, without the value, and the path below the value it complains of."""
    text = str(error)
    place = _PLACE.search(text)
    below = place[1] if place else ""
    if place:
        text = text[: place.start()]
    if text.startswith("Invalid enum value"):
        text = "not one of the values its Literal allows"
    elif text.startswith("Invalid value"):
        text = "the tag of no Struct its type allows"
    return text, below


def _surplus(value: JsonValue, taken: JsonValue) -> JsonPath:
    """The path to the first key that converting left out."""
    if isinstance(value, dict) and isinstance(taken, dict):
        for key, item in value.items():
            if key not in taken:
                return (key,)
            if taken[key] != item:
                return (key, *_surplus(item, taken[key]))
    if isinstance(value, list) and isinstance(taken, list):
        for at, (item, kept) in enumerate(zip(value, taken, strict=True)):
            if item != kept:
                return (at, *_surplus(item, kept))
    return ()


def _spell(hint: object) -> str:
    return getattr(hint, "__name__", None) or str(hint)
