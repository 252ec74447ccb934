"""What the host decides for every conversation of a harness; an option of ``Harness.open`` each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import msgspec

from perdure.harness.compaction_policy import Compaction
from perdure.kernel.json import check_json

Take: TypeAlias = Literal["first", "all"]
"""How many queued inputs of one mode a boundary places (rule H44)."""

AfterFailure: TypeAlias = Literal["keep", "continue", "withdraw"]
"""What becomes of the queue after a run that ended model_error, no_model or limit (rules H48, H49)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How often, and how long apart, a request that failed for a passing reason is sent again (rules H72, H73)."""

    retries: int = 3
    """How many times a request is sent again. 0: never."""
    first_ms: int = 2_000
    """Before the first retry; it doubles with each."""
    longest_ms: int = 60_000
    """Doubling ends here."""
    jitter: float = 0.25
    """How much of a wait may be added to it, by chance: 0.25 makes it up to a quarter longer."""
    longest_retry_after_ms: int = 3_600_000
    """A provider that asks for more patience than this ends the run instead."""

    def __post_init__(self) -> None:
        for name, least in (
            ("retries", 0),
            ("first_ms", 1),
            ("longest_ms", 1),
            ("longest_retry_after_ms", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"RetryPolicy.{name} must be at least {least}, not {getattr(self, name)}")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"RetryPolicy.jitter must be between 0 and 1, not {self.jitter}")

    def delay(self, retry: int, *, fraction: float, retry_after_ms: int | None = None) -> int | None:
        """Milliseconds to wait before the ``retry``-th retry (the first is 1); None: do not send it again.

        ``fraction`` in [0, 1) is this wait's chance. What the provider asks for is waited for at least.
        """
        if retry > self.retries:
            return None
        if retry_after_ms is not None and retry_after_ms > self.longest_retry_after_ms:
            return None
        # The exponent is bounded too: 2 ** retries of a host that retries for days would be a very large number.
        backoff = min(self.first_ms * 2 ** min(retry - 1, 32), self.longest_ms)
        backoff += int(backoff * self.jitter * fraction)
        return max(backoff, retry_after_ms or 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PollPolicy:
    """How often a deferred response is asked for, and for how long (rule H401)."""

    first_ms: int = 2_000
    """Before it is asked for the first time; the pause doubles with each."""
    longest_ms: int = 30_000
    """Doubling ends here. A provider may ask for more patience."""
    deadline_ms: int = 86_400_000
    """From the request on. A response that is not there by then is cancelled, and the run ends."""

    def __post_init__(self) -> None:
        for name in ("first_ms", "longest_ms", "deadline_ms"):
            if getattr(self, name) < 1:
                raise ValueError(f"PollPolicy.{name} must be at least 1, not {getattr(self, name)}")

    def pause(self, polls: int, *, asked_ms: int | None = None) -> int:
        """Milliseconds to wait after so many polls; ``asked_ms``: what the provider asks for, at least."""
        return max(min(self.first_ms * 2 ** min(polls, 32), self.longest_ms), asked_ms or 0)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The host settings of the generation side."""

    steer: Take = "all"
    """How many queued steers a boundary places: every one, or the first."""
    follow_up: Take = "first"
    """How many queued follow-ups a final boundary places: each in a run of its own, or all in one."""
    after_failure: AfterFailure = "keep"
    retry: RetryPolicy = RetryPolicy()
    polling: PollPolicy = PollPolicy()
    partial_interval_ms: int = 100
    """At most one commit of streamed text in this time (rule H68)."""
    instructions: str = ""
    """What every conversation's model is told first."""
    compaction: Compaction = Compaction()
    compaction_by_model: Mapping[str, Compaction] = msgspec.field(default_factory=dict[str, Compaction])
    """By ``provider:name``, in place of ``compaction``."""

    def __post_init__(self) -> None:
        for name, choices in (("steer", Take), ("follow_up", Take), ("after_failure", AfterFailure)):
            if getattr(self, name) not in get_args(choices):
                one_of = ", ".join(repr(choice) for choice in get_args(choices))
                raise ValueError(f"{name} must be one of {one_of}, not {getattr(self, name)!r}")
        if not isinstance(self.instructions, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # of untyped callers
            raise TypeError(f"instructions are a text, not {type(self.instructions).__name__}")
        check_json(self.instructions, at="instructions")
        if not isinstance(self.retry, RetryPolicy):  # pyright: ignore[reportUnnecessaryIsInstance]  # of untyped callers
            raise TypeError(f"a RetryPolicy is wanted, not {self.retry!r}; one with retries=0 never retries")
        if not isinstance(self.polling, PollPolicy):  # pyright: ignore[reportUnnecessaryIsInstance]  # as above
            raise TypeError(f"a PollPolicy is wanted, not {self.polling!r}")
        for policy in (self.compaction, *self.compaction_by_model.values()):
            if not isinstance(policy, Compaction):  # pyright: ignore[reportUnnecessaryIsInstance]  # of untyped callers
                raise TypeError(f"a Compaction is wanted, not {policy!r}; one with enabled=False compacts nothing")
        for name in self.compaction_by_model:
            if not all(name.partition(":")):
                raise ValueError(f"compaction_by_model: a model is named 'provider:name', not {name!r}")
        if self.partial_interval_ms < 0:
            raise ValueError(f"partial_interval_ms must not be negative, not {self.partial_interval_ms}")
