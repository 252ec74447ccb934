"""Typed entries: a class names an entry kind, its fields are the entry's data.

``class Audit(Entry, kind="app.audit"): accepted: int`` is a frozen, keyword-only dataclass;
``tx.append(Audit(accepted=7))`` stores one, ``Audit.read(record)`` reads one back.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any, ClassVar, Self, cast, dataclass_transform

import msgspec

from perdure.kernel.errors import NotJson
from perdure.kernel.fields import reason_of
from perdure.kernel.json import JsonValue, copy_json, path_text, same_json
from perdure.kernel.records import EntryRecord

RESERVED_PREFIX = "pi."


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Entry:
    """The base of an application's typed entries. Fields hold strict JSON, and frozen msgspec Structs for parts."""

    kind: ClassVar[str]
    _names: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, *, kind: str, builtin: bool = False) -> None:
        super().__init_subclass__()
        if not kind:
            raise TypeError(f"{cls.__name__}: an entry kind needs a name")
        if kind.startswith(RESERVED_PREFIX) and not builtin:
            raise TypeError(f"{cls.__name__}: kinds beginning with {RESERVED_PREFIX!r} are reserved, not {kind!r}")
        taken = [name for name in inspect.get_annotations(cls) if name in _TAKEN]
        if taken:
            raise TypeError(f"{cls.__name__}: a field cannot be named {', '.join(taken)}")
        cls.kind = kind
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        cls._names = tuple(field.name for field in dataclasses.fields(cast("Any", cls)))  # made a dataclass just now

    def messages(self) -> Sequence[JsonValue]:
        """What the model reads for this entry, as JSON; nothing unless overridden."""
        return ()

    def to_json(self) -> JsonValue:
        """The data as it is stored (rules K35 to K40): refused is what would not come back as it is.

        Raises NotJson, with the path of the value where it is not JSON.
        """
        data: JsonValue = {name: _json(self.kind, name, getattr(self, name)) for name in self._names}
        try:
            back = msgspec.convert(data, type(self))
        except msgspec.ValidationError as error:
            reason, below = reason_of(error)
            raise NotJson(self.kind + below, f"it could not be read again: {reason}") from None
        for name in self._names:
            value: object = getattr(back, name)
            own: object = getattr(self, name)
            if value is own is data[name]:
                continue  # one that does not change: nothing is made of it
            if value != own or not same_json(_json(self.kind, name, value), data[name]):
                raise NotJson(
                    path_text((name,), at=self.kind), "by its declared type it would come back as another value"
                )
        return data

    @classmethod
    def read(cls, record: EntryRecord) -> Self:
        """Raises ValueError for a record of another kind, msgspec.ValidationError for data that does not fit."""
        if record.kind != cls.kind:
            raise ValueError(f"entry {record.id} is a {record.kind!r}, not a {cls.kind!r}")
        return msgspec.json.decode(record.raw_data, type=cls)


_TAKEN = frozenset(dir(Entry)) | {"kind"}


def _json(kind: str, name: str, value: object) -> JsonValue:
    try:
        return copy_json(value, at=kind, path=(name,))
    except NotJson as refusal:  # which a Struct in it is too
        try:
            return copy_json(_plain(value), at=kind, path=(name,))
        except RecursionError:
            raise refusal from None


def _plain(value: object) -> object:
    """The value with every Struct in it as the JSON it stands for."""
    if isinstance(value, msgspec.Struct):
        return msgspec.json.decode(msgspec.json.encode(value))
    if type(value) is list:
        return [_plain(item) for item in cast("list[object]", value)]
    if type(value) is dict:
        return {key: _plain(item) for key, item in cast("dict[object, object]", value).items()}
    return value
