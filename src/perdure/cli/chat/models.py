"""Models by name: every installed adapter, each loaded when its provider is first asked for."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Final

from perdure.cli.chat.scripted import SCRIPTED, scripted_model
from perdure.cli.errors import CommandError
from perdure.harness.messages import Usage
from perdure.harness.model import (
    Deferred,
    Defers,
    Finished,
    ModelError,
    ModelEvent,
    ModelInfo,
    ModelRequest,
    Models,
    NoAdapter,
    Priced,
    installed_models,
)
from perdure.kernel.errors import PerdureError

KEYS: Final = {"anthropic": "ANTHROPIC_API_KEY", "openai": "OPENAI_API_KEY", "openai-chat": "OPENAI_API_KEY"}
"""The variable in which a provider's key is looked for."""
_ADDRESSES: Final = {
    "anthropic": "ANTHROPIC_BASE_URL",
    "openai": "OPENAI_BASE_URL",
    "openai-chat": "OPENAI_BASE_URL",
}
"""The variable that names a server in the provider's place, which may want no key."""
MOST_ADAPTERS: Final = 100
"""Of one provider that are kept."""
INSTALL: Final = "pip install 'perdure[models]'"
TRY: Final = "To try the chat without a key: --model scripted."


class Catalogue:
    """The Models of a chat."""

    def __init__(self, default: str | None) -> None:
        self.default = default
        self._adapters: dict[str, list[Models]] = {}
        """By provider. Most adapters know all its models; of one that knows a single model there may be several."""

    def use(self, model: str) -> str:
        """Make sure that a model can be asked, and return its whole name. Raises CommandError."""
        name = SCRIPTED if model == "scripted" else model
        provider, _, rest = name.partition(":")
        if not (provider and rest):
            raise CommandError(f"a model is named provider:name, as in anthropic:claude-sonnet-5, not {model!r}. {TRY}")
        try:
            found = self._adapter(name).find(name)
        except NoAdapter as error:
            how = f". Install those that come with perdure: {INSTALL}" if INSTALL not in str(error) else ""
            raise CommandError(f"{error}{how}. {TRY}") from error
        except (PerdureError, ValueError) as error:
            raise CommandError(f"the model {name} cannot be used: {error}. {TRY}") from error
        except ImportError as error:
            raise CommandError(f"the adapter for {provider!r} lacks {error.name or error}; {INSTALL}. {TRY}") from error
        if found is None:
            raise CommandError(f"the adapter for {provider!r} does not know the model {name!r}")
        variable = KEYS.get(provider)
        if variable and not os.environ.get(variable) and not os.environ.get(_ADDRESSES[provider]):
            raise CommandError(f"{name} needs a key: set {variable} in the environment and start again. {TRY}")
        return name

    def _adapter(self, model: str) -> Models:
        """Who is asked for a model. Raises what making an adapter raises."""
        known = self._adapters.setdefault(model.partition(":")[0], [])
        for adapter in known:
            if adapter.find(model) is not None:
                return adapter
        made = scripted_model(model) if model == SCRIPTED else installed_models(model)
        if made.find(model) is not None and len(known) < MOST_ADAPTERS:
            known.append(made)
        return made

    # --- the protocol --------------------------------------------------------------------------------------------

    def find(self, model: str) -> ModelInfo | None:
        try:
            return self._adapter(model).find(model)
        except (PerdureError, ValueError, ImportError):
            return None

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        return self._asked(request.model).stream(request)

    async def fetch_deferred(self, model: str, handle: str, /) -> Deferred | Finished:
        return await self._deferring(model).fetch_deferred(model, handle)

    async def cancel_deferred(self, model: str, handle: str, /) -> None:
        await self._deferring(model).cancel_deferred(model, handle)

    def _asked(self, model: str) -> Models:
        try:
            return self._adapter(model)
        except (PerdureError, ValueError, ImportError) as error:
            raise ModelError("other", f"the model {model} cannot be asked: {error}") from error

    def _deferring(self, model: str) -> Defers:
        adapter = self._asked(model)
        if not isinstance(adapter, Defers):
            raise ModelError("other", f"the adapter for {model} knows no deferred responses")
        return adapter

    def price(self, model: str, usage: Usage, /, *, at: int) -> Decimal | None:
        """What the adapter that was asked says; in a thread, so that none is made here."""
        for adapter in self._adapters.get(model.partition(":")[0], ()):
            price = adapter.price if isinstance(adapter, Priced) and adapter.find(model) is not None else None
            if price is not None:
                return price(model, usage, at=at)
        return None
