"""Typed entries: a class names an entry kind, its fields are the entry's data.

``class Audit(Entry, kind="app.audit"): accepted: int`` is a frozen, keyword-only dataclass;
``tx.append(Audit(accepted=7))`` stores one, ``Audit.read(record)`` reads one back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Self, dataclass_transform

import msgspec

from perdure.kernel.json import JsonValue
from perdure.kernel.records import EntryRecord

RESERVED_PREFIX = "pi."


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Entry:
    """The base of an application's typed entries. Field types are what msgspec can turn to JSON and back."""

    kind: ClassVar[str]

    def __init_subclass__(cls, *, kind: str, builtin: bool = False) -> None:
        super().__init_subclass__()
        if not kind:
            raise TypeError(f"{cls.__name__}: an entry kind needs a name")
        if kind.startswith(RESERVED_PREFIX) and not builtin:
            raise TypeError(f"{cls.__name__}: kinds beginning with {RESERVED_PREFIX!r} are reserved, not {kind!r}")
        cls.kind = kind
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def messages(self) -> Sequence[JsonValue]:
        """What the model reads for this entry, as JSON; nothing unless overridden."""
        return ()

    @classmethod
    def read(cls, record: EntryRecord) -> Self:
        """Raises ValueError for a record of another kind, msgspec.ValidationError for data that does not fit."""
        if record.kind != cls.kind:
            raise ValueError(f"entry {record.id} is a {record.kind!r}, not a {cls.kind!r}")
        return msgspec.json.decode(record.raw_data, type=cls)
