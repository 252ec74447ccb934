"""Where each conversation's files and commands are: in the directory that its agent settings name."""

from __future__ import annotations

import os
from typing import Final

from perdure.harness.documents import Agent
from perdure.harness.environment import ExecutionEnvironment
from perdure.kernel.documents import read_state
from perdure.kernel.errors import PerdureError
from perdure.kernel.records import Address
from perdure.kernel.session import Session
from perdure.tools.local import LocalEnvironment

MOST: Final = 100
"""Environments that are kept."""


class Places:
    """Work of other conversations of the store goes on in this process too, each where it was."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self._environments: dict[str, LocalEnvironment] = {}

    def environment_of(self, conversation: int) -> ExecutionEnvironment | None:
        """None where no directory is named, or it is not there any more."""
        directory = self._directory(conversation)
        if directory is None:
            return None
        if directory not in self._environments:
            if not os.path.isdir(directory):
                return None
            if len(self._environments) >= MOST:
                self._environments.clear()
            self._environments[directory] = LocalEnvironment(directory)
        return self._environments[directory]

    def _directory(self, conversation: int) -> str | None:
        assert self.session is not None, "nothing runs before the session is known"
        # Whoever asks has just read the settings: they are in memory.
        address = Address(Agent.definition.kind, "conversation", conversation)
        loaded = self.session.documents.peek(address)
        if loaded is None:
            return None
        try:
            agent = read_state(loaded.settled, Agent)
        except PerdureError:  # settings of a newer release
            return None
        return None if agent is None else agent.cwd
