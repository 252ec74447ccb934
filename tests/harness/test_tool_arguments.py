"""What a model wrote as arguments (rule H86): repaired where that is plain, else every problem at once."""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated

import msgspec
import pytest
from pydantic import AfterValidator, BaseModel

from perdure.harness.tool import InvalidArguments, tool


class Item(BaseModel):
    name: str
    count: int = 1


@tool
async def order(items: list[Item], note: str = "", tip: float = 0.0, limits: dict[str, int] | None = None) -> None:
    """Order."""


def read(raw: str) -> dict[str, object]:
    return order.signature.read(msgspec.Raw(raw.encode()))  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    "raw",
    [
        '{"items": [{"name": "a"}]}',
        # All of it as one text, as models write it when it was no JSON, or twice encoded.
        msgspec.json.encode('{"items": [{"name": "a"}]}').decode(),
        msgspec.json.encode(msgspec.json.encode('{"items": [{"name": "a"}]}').decode()).decode(),
        msgspec.json.encode('```json\n{"items": [{"name": "a"}]}\n```').decode(),
        # One argument as a text.
        '{"items": "[{\\"name\\": \\"a\\"}]"}',
    ],
)
def test_plain_mistakes_are_repaired(raw: str) -> None:
    assert read(raw) == {"items": [{"name": "a"}]}


def test_line_breaks_inside_texts_are_read() -> None:
    text = '{"items": [], "note": "two\nlines"}'
    assert read(msgspec.json.encode(text).decode()) == {"items": [], "note": "two\nlines"}


def test_a_text_that_looks_like_json_stays_a_text_where_one_is_wanted() -> None:
    assert read('{"items": [], "note": "[1]"}') == {"items": [], "note": "[1]"}


def test_nothing_given_is_an_empty_object() -> None:
    @tool
    async def ping() -> None:
        """Ping."""

    for raw in (b"null", b'""', b"{}"):
        assert ping.signature.read(msgspec.Raw(raw)) == {}


def test_numbers_as_texts_are_taken_where_pydantic_takes_them() -> None:
    arguments = read('{"items": [{"name": "a", "count": "2"}], "tip": "1.5"}')
    values = order.signature.values(arguments)  # pyright: ignore[reportArgumentType]
    assert values == {"items": [Item(name="a", count=2)], "tip": 1.5}


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(InvalidArguments) as caught:
        read('{"items": [{"count": "many"}], "tip": [], "nope": 1, "limits": {"a": 1.5}}')
    text = str(caught.value)
    assert text.startswith("The arguments do not fit:\n- ")
    assert "items[0].name: is required and was not given" in text
    assert "items[0].count: input should be a valid integer" in text
    assert "tip: input should be a valid number" in text
    assert "limits.a: input should be a valid integer" in text
    assert "nope: there is no such argument" in text
    assert len(caught.value.problems) == 5


def test_a_flood_of_problems_is_bounded() -> None:
    with pytest.raises(InvalidArguments) as caught:
        read('{"items": [' + ",".join(["1"] * 500) + "]}")
    assert str(caught.value).endswith("- and 480 more")


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ("[1]", "they must be an object, not a list"),
        ("3", "they must be an object, not a number"),
        ('"{\\"items\\": ["', "they are not valid JSON"),
        ('"NaN"', "they are not valid JSON: NaN is not JSON"),
        ('{"items": [], "tip": 99999999999999999999}', "64 bits"),
    ],
)
def test_what_cannot_be_repaired_is_told(raw: str, problem: str) -> None:
    with pytest.raises(InvalidArguments, match=problem):
        read(raw)


def test_a_function_fills_in_its_own_defaults() -> None:
    marker = dataclasses.make_dataclass("Marker", ["a"])(1)

    @tool
    async def with_default(a: int = 1, b: str = str(marker)) -> None:
        """Defaults."""

    assert with_default.signature.values({}) == {}
    assert with_default.signature.values({"a": 2}) == {"a": 2}


def test_a_check_that_would_end_the_process_is_told_as_a_problem_h86() -> None:
    @tool
    async def leave(when: Annotated[str, AfterValidator(sys.exit)]) -> None:
        """Leave."""

    with pytest.raises(InvalidArguments, match="tried to end the process"):
        leave.signature.read(msgspec.Raw(b'{"when": "now"}'))
