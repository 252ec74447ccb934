"""An answer's text as a typed value (rule H38)."""

from __future__ import annotations

from typing import TypeVar, cast

import msgspec

from perdure.harness.repair import unfenced
from perdure.kernel.errors import PerdureError

T = TypeVar("T")

_MOST_WORDS = 2_000
"""Characters of what is wrong that the model is told."""


class CannotParse(PerdureError, ValueError):
    """An answer is not JSON of the wanted type. ``request`` asks the model to correct itself."""

    def __init__(self, kind: object, problem: str) -> None:
        name = getattr(kind, "__name__", str(kind))
        super().__init__(f"the answer is not a {name}: {problem}")
        self.request = (
            f"Your answer could not be read as {name}: {problem}\n"
            "Answer again with the corrected JSON value alone, without any other words."
        )


def parse_answer(text: str, kind: type[T]) -> T:
    """Strictly: nothing is turned into another type. A fence around the JSON is no matter. Raises CannotParse.

    ``str`` is the text itself.
    """
    if kind is str:
        return text  # pyright: ignore[reportReturnType]  # T is str
    text = unfenced(text.strip())
    try:
        # What is asked for may be no class at all, such as list[int].
        if isinstance(cast("object", kind), type) and issubclass(kind, msgspec.Struct):
            return msgspec.json.decode(text, type=kind)
        from pydantic import TypeAdapter  # slow to import: only who asks for types pays

        return TypeAdapter(kind).validate_json(text, strict=True)
    except (ValueError, RecursionError) as error:  # msgspec's and pydantic's validation errors are ValueErrors
        raise CannotParse(kind, _without_input(str(error))[:_MOST_WORDS]) from None


def _without_input(words: str) -> str:
    return "\n".join(line for line in words.splitlines() if "errors.pydantic.dev" not in line)
