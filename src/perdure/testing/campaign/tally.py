"""What a campaign did, and whether that is enough to prove anything (rules P13, P14, P32)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

RECOVERIES: Final = ("adopted", "reattached", "restored", "rerun", "interrupted")
"""How calls go on after crashes, and workspaces; beside ``not_started``."""


@dataclass(slots=True)
class Tally:
    """Of one run, or of many."""

    runs: int = 0
    failed: int = 0
    kills: int = 0
    """SIGKILLs of drivers."""
    faults: Counter[str] = field(default_factory=Counter[str])
    """By kind: everything that was done to a run, kills included."""
    recoveries: Counter[str] = field(default_factory=Counter[str])

    def add(self, other: Tally) -> None:
        self.runs += other.runs
        self.failed += other.failed
        self.kills += other.kills
        self.faults += other.faults
        self.recoveries += other.recoveries

    def summary(self, mode: str) -> str:
        faults = " ".join(f"{kind}={count}" for kind, count in sorted(self.faults.items())) or "none"
        kinds = [*RECOVERIES, *sorted(self.recoveries.keys() - set(RECOVERIES))]
        recoveries = " ".join(f"{kind}={self.recoveries[kind]}" for kind in kinds)
        return (
            f"SUMMARY mode={mode} runs={self.runs} ok={self.runs - self.failed} failed={self.failed} "
            f"kills={self.kills} faults: {faults} recoveries: {recoveries}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What a campaign must have seen at least, and what it must not have."""

    kills: int = 0
    faults: Mapping[str, int] = field(default_factory=dict[str, int])
    recoveries: Mapping[str, int] = field(default_factory=dict[str, int])
    never: tuple[str, ...] = ("interrupted",)
    """Recoveries that fail it."""

    def broken(self, found: Tally) -> Iterator[str]:
        if found.kills < self.kills:
            yield f"{found.kills} kills of drivers, of at least {self.kills}"
        for kind, least in self.faults.items():
            if found.faults[kind] < least:
                yield f"{found.faults[kind]} faults of kind {kind}, of at least {least}"
        for kind, least in self.recoveries.items():
            if found.recoveries[kind] < least:
                yield f"{found.recoveries[kind]} recoveries of kind {kind}, of at least {least}"
        for kind in self.never:
            if found.recoveries[kind]:
                yield f"{found.recoveries[kind]} recoveries of kind {kind}, of which there must be none"
