"""What a provider wants back with its answer, word for word, and that our messages have no place for.

Thinking has one: its ``signature``. It holds a ``Kept`` as JSON: the provider's own signature and name of the item,
and those of the words or the call that stand right behind it. Where nothing was thought and there is something to
keep, an empty Thinking carries it. Whoever did not write it does not read it: an answer of another model is told
without (see ``transcript``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from perdure.kernel.json import JsonValue

WANTED: Final = ("phase", "extra_content", "namespace", "raw_content")
"""Of what pydantic-ai calls ``provider_details``, what goes back to the provider."""


ITEM: Final = "|"
"""Between a call's name and that of its item, of which the Responses API has both."""


class KeptItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The name and details of one item of an answer."""

    id: str | None = None
    details: dict[str, JsonValue] = msgspec.field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return self.id is None and not self.details


class Kept(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of a ``signature``."""

    id: str | None = None
    signature: str | None = None
    details: dict[str, JsonValue] = msgspec.field(default_factory=dict)
    next: KeptItem | None = None
    """Of the words or the call behind this thinking."""

    def encode(self) -> str | None:
        return None if self == Kept() else msgspec.json.encode(self).decode()


_decoder = msgspec.json.Decoder(Kept)


def read_kept(signature: str | None) -> Kept | None:
    """None for one that was not written here."""
    if signature is None:
        return None
    try:
        return _decoder.decode(signature)
    except msgspec.MsgspecError:
        return None


def wanted(details: Mapping[str, object] | None) -> dict[str, JsonValue]:
    """The details that go back, as JSON."""
    found = {name: value for name in WANTED if (value := (details or {}).get(name)) is not None}
    decoded: dict[str, JsonValue] = msgspec.json.decode(msgspec.json.encode(found))
    return decoded
