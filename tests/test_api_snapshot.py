"""The public face is snapshot-tested: a change of it is a decision, seen in a diff.

Write the snapshot anew with ``python tests/test_api_snapshot.py``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

import perdure
from perdure import events, spaces

SNAPSHOT = Path(__file__).parent / "golden" / "public-api.txt"


def described() -> Iterator[str]:
    for home, name in [(module, name) for module in (perdure, events, spaces) for name in module.__all__]:
        value = getattr(home, name)
        if isinstance(value, type):
            bases = ", ".join(base.__name__ for base in value.__bases__)
            yield f"class {name}({bases})"
            yield from (f"    {line}" for line in members(value))
        elif callable(value):
            yield f"{name}{inspect.signature(value)}"
        else:
            yield f"{name}: {type(value).__name__}"


def members(cls: type) -> Iterator[str]:
    if issubclass(cls, msgspec.Struct):
        yield f"__init__{untyped(inspect.signature(cls))}"
    own = {name: member for base in reversed(cls.__mro__) for name, member in vars(base).items() if is_ours(base)}
    for name, member in sorted(own.items()):
        if name.startswith("_") and name not in ("__init__", "__getattr__"):
            continue
        plain = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if isinstance(member, property):
            yield f"{name}: property"
        elif inspect.isfunction(plain):
            kind = "async " if inspect.iscoroutinefunction(plain) else ""
            yield f"{kind}{name}{inspect.signature(plain)}"
    fields = [*getattr(cls, "__struct_fields__", ()), *getattr(cls, "__dataclass_fields__", {})]
    yield from (f"{name}: field" for name in fields)


def untyped(made: inspect.Signature) -> inspect.Signature:
    """A Struct's types are resolved, and how those are spelled differs between versions of Python."""
    return made.replace(parameters=[each.replace(annotation=each.empty) for each in made.parameters.values()])


def is_ours(base: type) -> bool:
    return base.__module__.partition(".")[0] == "perdure"


def face() -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", "\n".join(described()) + "\n")


def test_the_public_api_is_as_recorded() -> None:
    assert face() == SNAPSHOT.read_text(), f"if meant, run: python {Path(__file__).name}"


if __name__ == "__main__":
    SNAPSHOT.parent.mkdir(exist_ok=True)
    SNAPSHOT.write_text(face())
