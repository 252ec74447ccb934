"""Typed values as strict JSON: what a task's input, checkpoint, result and memos go through.

A declared type is what msgspec can turn to JSON and back (Structs, dataclasses, TypedDicts, lists, plain values);
``object``, ``JsonValue`` or nothing declared means plain JSON. A value is stored only if it comes back equal, so that
nothing is converted silently (rules K35-K40).
"""

from __future__ import annotations

import re
from typing import Any, Generic, TypeVar, cast

import msgspec

from perdure.kernel.errors import NotJson
from perdure.kernel.json import changed_type, check_json, decode_json, path_text
from perdure.kernel.records import NULL, to_raw
from perdure.tasks.errors import TaskDefinitionError

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode
_LONG_NUMBER = re.compile(rb"[0-9]{19}")


class Codec(Generic[T]):
    """Encodes and decodes one declared type. ``what`` names the value in errors: ``app.ship input``."""

    __slots__ = ("_decoder", "_identity", "what")

    def __init__(self, declared: object, what: str) -> None:
        self.what = what
        self._decoder: msgspec.json.Decoder[Any] | None = None  # the type is known at run time only
        self._identity = getattr(declared, "__eq__", None) is object.__eq__
        """Instances are equal only to themselves, so coming back equal cannot be asked of them."""
        if declared is Any or declared is object or isinstance(declared, TypeVar):
            return
        try:
            self._decoder = msgspec.json.Decoder(cast("type[Any]", declared))
        except TypeError as error:
            raise TaskDefinitionError(f"{what}: its type cannot be stored as JSON: {error}") from None

    def encode(self, value: T) -> msgspec.Raw:
        """Raises NotJson for a value that is not of the declared type, or would not come back as it is."""
        decoder = self._decoder
        if decoder is None:
            return to_raw(value, at=self.what)
        try:
            raw = NULL if value is None else msgspec.Raw(_encode(value))
            back = decoder.decode(raw)
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            raise NotJson(self.what, f"{type(error).__name__}: {error}") from None
        if not self._identity:
            if back != value:
                raise NotJson(self.what, "it would not come back from JSON as it is; declare its types, and use JSON's")
            at = changed_type(back, value)
            if at is not None:
                raise NotJson(path_text(at, at=self.what), "by its declared type it would come back as another type")
        if _LONG_NUMBER.search(raw) is not None:
            check_json(msgspec.json.decode(raw), at=self.what)
        return raw

    def decode(self, raw: msgspec.Raw) -> T:
        """A fresh value. Raises msgspec.ValidationError if what is stored does not fit the declared type."""
        if self._decoder is None:
            return cast("T", decode_json(raw))
        return self._decoder.decode(raw)
