"""What ``Harness.open`` returns, and what it says to whoever forgets to enter it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from perdure.harness.harness import Harness

_ENTER = "async with Harness.open(...) as harness"


class Opening:
    """What ``Harness.open`` returns: enter it once."""

    def __init__(self, start: Callable[[], Awaitable[Harness]]) -> None:
        self._start = start
        self._harness: Harness | None = None

    async def __aenter__(self) -> Harness:
        if self._harness is not None:
            raise RuntimeError("an opening is entered once; call Harness.open() again")
        self._harness = await self._start()
        return self._harness

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._harness is not None, "what is left was entered"
        await self._harness.close()

    if not TYPE_CHECKING:  # a checker says it by itself

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"no {name!r} before the harness is open: {_ENTER}", name=name, obj=self)

        def __await__(self) -> NoReturn:
            raise TypeError(f"an opening is entered, not awaited: {_ENTER}")
