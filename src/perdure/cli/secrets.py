"""Keys that this process was given are not shown, whoever quotes them: a provider's error, a command, a model."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_NAMES = re.compile(r"(?:^|_)(?:KEY|KEYS|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:_|$)|APIKEY", re.IGNORECASE)
_SHORTEST = 8
"""A value with fewer characters is as likely a word that people use."""


class Secrets:
    """Puts the name of an environment variable in the place of its value, where the name says that it is a secret."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        named = os.environ if environment is None else environment
        self._names = {
            value: name
            for name, value in named.items()
            if _NAMES.search(name) and len(value) >= _SHORTEST and not value.startswith("/")
        }
        # The longest first: one may be the beginning of another.
        known = sorted(self._names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, known))) if known else None

    def hide(self, text: str) -> str:
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda found: f"[{self._names[found[0]]}]", text)
