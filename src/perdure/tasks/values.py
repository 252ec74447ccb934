"""Named JSON values in a task's record, its memos and signals: the first writer of a name wins (rules T24, T26)."""

from __future__ import annotations

import msgspec

from perdure.kernel.errors import InvalidTransition
from perdure.kernel.json import check_json
from perdure.kernel.records import EMPTY_OBJECT

MAX_NAMED = 1_000
"""Memos, and signals, one task may have."""
MAX_NAME = 200

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def stored_value(held: msgspec.Raw, name: str) -> msgspec.Raw | None:
    """The value of that name, or None."""
    return None if held == EMPTY_OBJECT else _decode(held).get(name)


def check_name(name: str) -> None:
    """Raises InvalidTransition."""
    if type(name) is not str or not 0 < len(name) <= MAX_NAME:
        raise InvalidTransition(f"a name is a str of 1 to {MAX_NAME} characters, not {name!r:.50}")
    check_json(name, at="name")


def with_value(held: msgspec.Raw, name: str, value: msgspec.Raw) -> msgspec.Raw | None:
    """The values with one more, or None if the name is taken. Raises InvalidTransition."""
    check_name(name)
    values = _decode(held)
    if name in values:
        return None
    if len(values) >= MAX_NAMED:
        raise InvalidTransition(f"a task has at most {MAX_NAMED} memos, and as many signals")
    values[name] = value
    return msgspec.Raw(_encode(values))
