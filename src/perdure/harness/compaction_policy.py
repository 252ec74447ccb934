"""When a conversation's context is compacted, and how much of it stays: the policy, and what it comes to for a model
(rules H134, H201)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Final

import msgspec

from perdure.harness.documents import CompactionSettings

MOST_RESERVE: Final = 16_384
MOST_KEPT: Final = 20_000
MOST_BACKGROUND: Final = 32_768
SHARE: Final = 4
"""What is not set is so large, but at most this part of the model's window."""
MOST_TOKENS: Final = 1_000_000_000
ASSUMED_WINDOW: Final = 128_000
"""Of a model whose window is not known, for a compaction by hand; no other is begun there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compaction:
    """How contexts that grow too long are summarised. Sizes in tokens; None: by the model's window.

    Raises ValueError for what makes no sense.
    """

    enabled: bool = True
    """Whether a run compacts by itself. ``conversation.compact()`` works all the same."""
    reserve_tokens: int | None = None
    """Of the window, left free for the answer: above the rest a run waits for a compaction. None: 16,384, at most a
    quarter of the window."""
    keep_recent_tokens: int | None = None
    """So much of the newest stays as it is. None: 20,000, at most a quarter of the window."""
    background_tokens: int | None = None
    """So much before a run would have to wait, a compaction begins beside it. 0: never. None: 32,768, at most a
    quarter of the window."""
    deadline_ms: int = 300_000
    """Of one request for a summary."""
    model: str | None = None
    """Who writes the summaries, as ``provider:name``. None: the conversation's own model."""

    def __post_init__(self) -> None:
        check_enabled(self.enabled)
        for name in SIZES:
            check_size(name, getattr(self, name))
        if type(self.deadline_ms) is not int or not 1 <= self.deadline_ms <= MOST_TOKENS:
            raise ValueError(f"deadline_ms is a number of milliseconds from 1 on, not {self.deadline_ms!r}")
        if self.model is not None and (type(self.model) is not str or not all(self.model.partition(":"))):
            raise ValueError(f"a model is named 'provider:name', not {self.model!r}")


SIZES: Final = ("reserve_tokens", "keep_recent_tokens", "background_tokens")
assert set(SIZES) < {field.name for field in fields(Compaction)}


def check_enabled(value: object) -> None:
    if type(value) is not bool:
        raise ValueError(f"enabled is True or False, not {value!r}")


def check_size(name: str, value: object) -> None:
    """None is the default of whoever asks. Raises ValueError."""
    if value is not None and (type(value) is not int or not 0 <= value <= MOST_TOKENS):
        raise ValueError(f"{name} is a number of tokens from 0 to {MOST_TOKENS:,}, not {value!r}")


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """A policy for one model's window. Whatever was set, there is room for a request between its points."""

    window: int
    enabled: bool
    reserve: int
    keep: int
    background: int

    @property
    def waits_above(self) -> int:
        """A request that takes more waits for a compaction."""
        return self.window - self.reserve

    @property
    def begins_above(self) -> int:
        """A request that takes more has a compaction begun beside it."""
        return self.window - self.reserve - self.background

    @property
    def least(self) -> int:
        """Tokens a compaction must replace at least: for less, the summary would be no gain."""
        return max(1, self.keep // 10)

    @property
    def least_beside(self) -> int:
        """The same for one that nobody waits for: it would be followed by the next one soon."""
        return max(self.least, self.background // 2)


@lru_cache(maxsize=100)
def host_room(policy: Compaction, window: int) -> Room:
    """What the policy comes to where a conversation has no settings of its own."""
    return room_for(policy, {}, window)


def room_for(policy: Compaction, own: CompactionSettings, window: int) -> Room:
    """What the policy comes to where a conversation's own settings win, field by field. A window that is 0 or less is
    not known."""
    known = window > 0
    window = window if known else ASSUMED_WINDOW

    def size(name: str, most: int) -> int:
        said: int | None = own.get(name, getattr(policy, name))  # pyright: ignore[reportAssignmentType]  # by name
        return min(most, window // SHARE) if said is None else said

    reserve = min(size("reserve_tokens", MOST_RESERVE), window // 2)
    keep = min(size("keep_recent_tokens", MOST_KEPT), (window - reserve) // 2)
    background = min(size("background_tokens", MOST_BACKGROUND), window - reserve - keep)
    return Room(
        window=window,
        enabled=own.get("enabled", policy.enabled) and known,
        reserve=reserve,
        keep=keep,
        background=background,
    )
