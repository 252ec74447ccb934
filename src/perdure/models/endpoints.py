"""Where models are reached: an address, the protocol spoken there, and the key it wants."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Final, Literal, TypeAlias, get_args
from urllib.parse import urlsplit

from perdure.kernel.json import JsonValue

Protocol: TypeAlias = Literal["openai", "openai-chat", "anthropic"]
"""``openai`` is the Responses API, ``openai-chat`` Chat Completions, ``anthropic`` the Messages API."""

SystemMessages: TypeAlias = Literal["inline", "notes"]
"""How what the prompt says anew is told in the middle of a conversation: as a system message where it stands, or as
a marked note in the user's turn, for models that take a system message only at the beginning."""


@cache
def installed(package: str) -> bool:
    return find_spec(package) is not None


def is_address(url: str) -> bool:
    """Whether requests can be sent there, as far as its looks go."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Models under ``name:``, for instance ``local:qwen3`` at a server of one's own.

        Endpoint(name="local", protocol="openai-chat", base_url="http://127.0.0.1:8080/v1")

    Its key is ``api_key``, or else what ``key_variable`` names in the environment; the address likewise.
    """

    name: str
    """What stands before the colon of a model's name."""
    protocol: Protocol
    base_url: str | None = field(default=None, repr=False)
    """None: the environment's, or else, for the built-in endpoints of a provider, the provider's own address. It may
    hold a name and a password."""
    api_key: str | None = field(default=None, repr=False)
    key_variable: str | None = None
    """None: this endpoint needs no key, or it is ``api_key``."""
    url_variable: str | None = None
    """The variable of the environment that has the address where ``base_url`` is None."""
    system_messages: SystemMessages | None = None
    """None: inline where the provider's own address is used and its model is known to take them; else notes."""
    settings: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue], repr=False)
    """More settings of every request, by the names pydantic-ai's ModelSettings of that provider give them, such as
    ``temperature``, ``cache`` or ``openai_reasoning_summary``. They win over those made here."""
    background: bool = False
    """Answers are made in the background: the provider gives a handle, which is polled, also after a restart (rule
    H408). Only with the protocol ``openai``. Nothing streams; the provider stores the answer, with what was asked."""

    def __post_init__(self) -> None:
        if not self.name or ":" in self.name or self.name != self.name.strip():
            raise ValueError(f"an endpoint's name stands before the colon of a model's; {self.name!r} cannot")
        if self.protocol not in get_args(Protocol):
            one_of = ", ".join(map(repr, get_args(Protocol)))
            raise ValueError(f"endpoint {self.name!r}: protocol must be one of {one_of}, not {self.protocol!r}")
        if self.system_messages not in (None, *get_args(SystemMessages)):
            raise ValueError(
                f"endpoint {self.name!r}: system_messages must be 'inline', 'notes' or None, not "
                f"{self.system_messages!r}"
            )
        if self.background and self.protocol != "openai":
            raise ValueError(f"endpoint {self.name!r}: only the protocol 'openai' makes answers in the background")
        if self.base_url is not None and not is_address(self.base_url):
            raise ValueError(f"endpoint {self.name!r}: base_url is no address, like https://host/v1")

    @property
    def address(self) -> str | None:
        """None: the provider's own."""
        return self.base_url or (os.environ.get(self.url_variable) if self.url_variable else None) or None

    @property
    def key(self) -> str | None:
        """None: it has none."""
        return self.api_key or (os.environ.get(self.key_variable) if self.key_variable else None) or None

    @property
    def key_hint(self) -> str:
        """What to set, in words."""
        option = f"the option api_key of endpoint {self.name!r}"
        return f"set {self.key_variable}, or {option}" if self.key_variable else f"set {option}"

    @property
    def reachable(self) -> bool:
        """Whether there is an address, and the SDK that speaks its protocol is installed."""
        return (self.name in OWN or self.address is not None) and installed(self.sdk)

    @property
    def sdk(self) -> str:
        """The package that speaks the protocol."""
        return "anthropic" if self.protocol == "anthropic" else "openai"


OWN: Final = frozenset({"openai", "openai-chat", "anthropic"})
"""Endpoints that are a provider's own service, or stand in front of it; others need an address."""

COMPATIBLE: Final = "openai-compatible"

BUILT_IN: Final = (
    Endpoint(name="openai", protocol="openai", key_variable="OPENAI_API_KEY", url_variable="OPENAI_BASE_URL"),
    Endpoint(name="openai-chat", protocol="openai-chat", key_variable="OPENAI_API_KEY", url_variable="OPENAI_BASE_URL"),
    Endpoint(
        name="anthropic", protocol="anthropic", key_variable="ANTHROPIC_API_KEY", url_variable="ANTHROPIC_BASE_URL"
    ),
    # Never OpenAI's variables: that key is not for other people's servers.
    Endpoint(
        name=COMPATIBLE,
        protocol="openai-chat",
        key_variable="OPENAI_COMPATIBLE_API_KEY",
        url_variable="OPENAI_COMPATIBLE_BASE_URL",
    ),
)
"""What every ProviderModels has, unless an endpoint of the same name is given."""
