"""Strict JSON: what may be stored, how it is checked, copied, encoded and compared (rules K34-K38).

A value is strict JSON when it is made of None, bool, int (64-bit signed), finite float, str without lone
surrogates, list, and dict with str keys, and of exactly these types: a subclass such as an IntEnum or an
OrderedDict would come back as something else, so it is refused. 1, 1.0 and True are three values; so are 0.0
and -0.0.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec

from perdure.kernel.errors import NotJson

if TYPE_CHECKING:
    JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
    """What is stored: strict JSON. Numbers are finite, integers fit 64 bits, keys are texts."""
else:
    # A recursive alias cannot be resolved by get_type_hints, nor read by msgspec. Both understand Any.
    JsonValue = Any

JsonPath: TypeAlias = tuple[str | int, ...]
"""Where something is inside a value: keys of objects and indices of lists, from the root."""

MAX_DEPTH = 200
"""How many containers may be nested in one value."""

INT_MIN = -(2**63)
INT_MAX = 2**63 - 1


class JsonView(ABC):
    """Something that stands for a JSON value without being one, such as a handle into a draft.

    Where a value is copied, a view inside it is copied as the value it stands for.
    """

    __slots__ = ()

    @abstractmethod
    def to_json(self) -> JsonValue:
        """A plain copy that shares nothing with the view."""


def check_json(value: object, *, at: str = "$") -> None:
    """Refuse ``value`` unless it is strict JSON: NotJson tells the path of what is not, below ``at``."""
    try:
        _walk(value, 0, False)
    except _Fault as fault:
        raise NotJson(_blame(value, fault, at), fault.reason) from None


def copy_json(value: object, *, at: str = "$", path: JsonPath = ()) -> JsonValue:
    """Check like check_json and copy deeply, in one walk; views become plain values.

    ``path`` is where the copy will stand below ``at``: it goes into the error and counts as depth.
    """
    if value is None or (type(value) is str and value.isascii()):
        return value
    try:
        return _walk(value, len(path), True)
    except _Fault as fault:
        raise NotJson(_blame(value, fault, path_text(path, at=at)), fault.reason) from None


def path_text(path: JsonPath, *, at: str = "$") -> str:
    """A path as people read it: ``$.items[3].name``."""
    parts = [at]
    for step in path:
        if isinstance(step, int):
            parts.append(f"[{step}]")
        elif step.isascii() and step.isidentifier():
            parts.append(f".{step}")
        else:
            parts.append(f"[{step!a}]")
    return "".join(parts)


class _Fault(Exception):
    """Carries a reason up the walk, gathering the path on its way: the good case pays for no path."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.trail: list[str | int] = []
        """From the fault to the root."""


_TOO_DEEP = f"nested deeper than {MAX_DEPTH} containers"


def _walk(value: object, depth: int, views: bool) -> JsonValue:
    kind = type(value)
    if kind is str:
        text = cast("str", value)
        if not text.isascii():
            _check_text(text)
        return text
    if kind is int:
        number = cast("int", value)
        if not INT_MIN <= number <= INT_MAX:
            raise _Fault("an integer beyond 64 bits; store it as a string")
        return number
    if value is None or kind is bool:
        return cast("bool | None", value)
    if kind is float:
        real = cast("float", value)
        if not math.isfinite(real):
            raise _Fault(f"{real} is not a JSON number")
        return real
    if kind is dict:
        if depth >= MAX_DEPTH:
            raise _Fault(_TOO_DEEP)
        fields: dict[str, JsonValue] = {}
        key: object = None
        try:
            for key, item in cast("dict[object, object]", value).items():
                if type(key) is not str:
                    break
                # A plain text is the commonest leaf by far: it is worth sparing the call.
                if type(item) is str and item.isascii():
                    fields[key] = item
                else:
                    fields[key] = _walk(item, depth + 1, views)
                if not key.isascii():
                    _check_key(key)
            else:
                return fields
        except _Fault as fault:
            fault.trail.append(cast("str", key))
            raise
        raise _Fault(f"an object's keys must be str, not {type(key).__name__}")
    if kind is list:
        if depth >= MAX_DEPTH:
            raise _Fault(_TOO_DEEP)
        items: list[JsonValue] = []
        try:
            for item in cast("list[object]", value):
                items.append(_walk(item, depth + 1, views))
        except _Fault as fault:
            fault.trail.append(len(items))
            raise
        return items
    if views and isinstance(value, JsonView):
        return _walk(value.to_json(), depth, False)
    raise _Fault(_why_not(value))


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _Fault(f"a text with a lone surrogate, at code point {error.start}") from None


def _check_key(key: str) -> None:
    try:
        key.encode()
    except UnicodeEncodeError:
        raise _Fault("a key with a lone surrogate") from None


def _why_not(value: object) -> str:
    name = type(value).__name__
    for base in (bool, int, float, str, list, dict):
        if isinstance(value, base):
            plain = base.__name__
            return f"{name} is a subclass of {plain} and would come back as {plain}; convert it first"
    if isinstance(value, tuple):
        return f"{name} would come back as list; convert it first"
    if isinstance(value, JsonView):
        return f"{name} is a view of a value; pass its to_json()"
    return f"{name} is not JSON"


def _blame(value: object, fault: _Fault, at: str) -> str:
    """The path of a fault; a cycle shows itself as endless depth and is blamed where it closes."""
    trail = tuple(reversed(fault.trail))
    if fault.reason is not _TOO_DEEP:
        return path_text(trail, at=at)
    above: set[int] = set()
    node: object = value
    for length, step in enumerate(trail):
        above.add(id(node))
        node = cast("dict[str | int, object]", node)[step]
        if id(node) in above:
            fault.reason = "a cycle: the value contains itself"
            return path_text(trail[: length + 1], at=at)
    return path_text(trail[:8], at=at) + "..."


_encoder = msgspec.json.Encoder()
_canonical_encoder = msgspec.json.Encoder(order="deterministic")
_decoder: msgspec.json.Decoder[JsonValue] = msgspec.json.Decoder(JsonValue)
_LONG_NUMBER = re.compile(rb"[0-9]{19}")


def encode_json(value: JsonValue) -> bytes:
    """UTF-8 JSON of a value that was checked before (the encoder itself would turn NaN into null)."""
    return _encoder.encode(value)


def decode_json(data: bytes | msgspec.Raw) -> JsonValue:
    """A fresh value. Raises NotJson for bytes that are not strict JSON."""
    try:
        value = _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise NotJson("$", f"not JSON: {error}") from None
    # The decoder goes beyond 64 bits: a cheap scan says whether such an integer may be there.
    if _LONG_NUMBER.search(data) is not None:
        check_json(value)
    return value


def canonical_json(value: JsonValue) -> bytes:
    """The one encoding of a value: keys sorted, no spaces. Equal bytes if and only if same_json."""
    return _canonical_encoder.encode(value)


def digest(value: JsonValue) -> str:
    """SHA-256 of the canonical encoding, in hex."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def same_json(a: JsonValue, b: JsonValue) -> bool:
    """Deep equality that tells types apart; the order of an object's keys is no part of the value."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (str, int)) or a is None:
        return a == b
    return canonical_json(a) == canonical_json(b)


def changed_type(back: object, value: object) -> JsonPath | None:
    """Where a typed value that came back equal did so as another type; None: nowhere (rule K40).

    1, 1.0 and an IntEnum's 1 are equal, and not the same.
    """
    if type(back) is not type(value):
        return ()
    for step, one, other in _parts(back, value):
        below = changed_type(one, other)
        if below is not None:
            return (step, *below)
    return None


def _parts(one: Any, other: Any) -> Iterator[tuple[str | int, object, object]]:  # two of one type, whatever it is
    if isinstance(one, (list, tuple)):
        for index, item in enumerate(cast("list[object]", one)):
            yield index, item, other[index]
    elif isinstance(one, dict):
        for key, item in cast("dict[object, object]", one).items():
            yield str(key), item, other[key]
    elif isinstance(one, msgspec.Struct) or dataclasses.is_dataclass(one):
        for name in one.__struct_fields__ if isinstance(one, msgspec.Struct) else one.__dataclass_fields__:
            yield name, getattr(one, name), getattr(other, name)
