"""Ending a holder of a store that is in the way of whoever takes it over (rules K174, K178, K179)."""

from __future__ import annotations

import os

from perdure.kernel.errors import StorageBusy
from perdure.storage.lock import Sidecar, sidecar

_DEATH_SECONDS = 5.0


def end_holder(path: str, busy: StorageBusy, seen: Sidecar, *, kill: bool, waited: str, cause: Exception) -> None:
    """See that the holder is dead. Raises StorageBusy, which says what was ``waited`` for, if that cannot be."""
    holder = seen.holder
    if sidecar(path) != seen:
        raise StorageBusy(f"{path} was opened by others meanwhile; try again") from cause
    if holder is not None and holder.gone:
        return
    if not kill:
        raise StorageBusy(
            f"{busy}; {waited}. With takeover=True (perdure chat --takeover) the holder is killed, if it is on "
            "this machine"
        ) from cause
    why = "it is not a process of this machine that can be told from others"
    if holder is not None and holder.pid == os.getpid():
        why = "it is this process"
    elif holder is not None and holder.here:
        why = f"it did not end within {_DEATH_SECONDS:g} s"
        try:
            if holder.kill(patience=_DEATH_SECONDS):
                return
        except OSError as error:
            why = f"this process may not kill it ({error.strerror})"
    raise StorageBusy(f"{busy}; {waited}, and the holder was not killed: {why}") from cause
