"""The public face is snapshot-tested: a change of it is a decision, seen in a diff. So are the pages of docs/api.

Write both anew with ``python tests/test_api_snapshot.py``.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

import perdure
from perdure import events, models, spaces, testing

BUILD = Path(__file__).parent.parent / "docs" / "api" / "build.py"
SNAPSHOT = Path(__file__).parent / "golden" / "public-api.txt"
FACES = (perdure, events, models, spaces, testing)


def described() -> Iterator[str]:
    for home, name in [(module, name) for module in FACES for name in module.__all__]:
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


def build() -> ModuleType:
    """The script that writes the reference."""
    spec = importlib.util.spec_from_file_location("api_reference", BUILD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_docstrings_say() -> None:
    assert build().outdated() == [], f"run: python {Path(__file__).name}"


def test_every_public_name_is_in_the_reference_with_its_methods() -> None:
    pages = "".join(path.read_text() for path in BUILD.parent.glob("*.md"))
    for home in FACES:
        missing = [name for name in home.__all__ if name != "__version__" and f"\n## {name}\n" not in pages]
        assert missing == [], home.__name__
    for name in ("Harness.open", "Conversation.submit", "Session.commit", "Submission.answer", "Approval.allow"):
        assert f"\n### {name}\n" in pages


def silent(page: str) -> list[str]:
    """The names of a page of the reference under which no sentence stands: only a signature, or a list of fields."""
    found: list[str] = []
    for part in re.split(r"^##+ ", page, flags=re.MULTILINE)[1:]:
        name, _, body = part.partition("\n")
        said = re.sub(r"^```text\n(?:.*\n)*?```$|^`from .*`$|^- .*$", "", body, flags=re.MULTILINE)
        if not said.strip():
            found.append(name)
    return found


def test_every_public_name_and_every_method_says_what_it_is() -> None:
    pages = build().pages()
    found = {name: quiet for name, page in pages.items() if name != "README.md" and (quiet := silent(page))}
    assert found == {}


def test_a_name_that_says_nothing_is_found() -> None:
    page = "# P\n\n## A\n\n`from p import A`\n\n```text\nclass A\n```\n\n- `b: int`: Its b.\n"
    assert silent(page) == ["A"]
    assert silent(f"{page}\n### A.c\n\n```text\ndef c()\n```\n\nIt does c.\n") == ["A"]
    assert silent(page.replace("- `b", "What it is.\n\n- `b")) == []


def test_a_page_that_is_not_as_the_sources_say_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = build()
    monkeypatch.setattr(script, "HERE", tmp_path)
    script.write()
    assert script.outdated() == []
    (tmp_path / "hooks.md").write_text("by hand")
    (tmp_path / "gone.md").write_text("of a release before")
    assert script.outdated() == ["gone.md", "hooks.md"]
    script.write()
    assert script.outdated() == []


if __name__ == "__main__":
    build().write()
    SNAPSHOT.parent.mkdir(exist_ok=True)
    SNAPSHOT.write_text(face())
