"""What the outside world knows of a call that was cut off, as the tool's ``reconcile`` function says it (rule H93).

It is asked where nobody else can tell (``interruption``), about a call whose intent is stored and whose result is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

RECONCILE_TIMEOUT_MS: Final = 60_000
"""After this a question to the outside counts as not answered."""


@dataclass(frozen=True, slots=True)
class Done:
    """The call took effect, and this is its result: whatever the tool itself may return."""

    result: object = None


@dataclass(frozen=True, slots=True)
class NeverHappened:
    """The call had no effect, and can have none any more: it is run, under the same idempotency key."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Nobody can tell: the call ends ``interrupted``."""

    reason: str = ""
    """For the model, behind the words that say so."""


Reconciled: TypeAlias = Done | NeverHappened | Unknown
