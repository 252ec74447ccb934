"""Plain mistakes in arguments are put right by the schema, and nothing else is touched (rules H86, H320, H321)."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from perdure.harness import repair
from perdure.harness.arguments import InvalidArguments
from perdure.harness.parse import CannotParse, parse_answer
from perdure.harness.repair import fits, json_in_text, repaired, unfenced
from perdure.harness.tool import tool
from perdure.kernel.json import JsonValue, copy_json, decode_json


class Place(BaseModel):
    name: str
    zone: int = 0
    tags: list[str] = []


@tool
async def survey(
    places: list[Place],
    words: list[str],
    level: Literal["low", "high"] = "low",
    year: Literal[1, 2] = 1,
    depth: int | None = None,
    share: float = 0.5,
    exact: bool = False,
    note: str = "",
    counts: dict[str, int] | None = None,
    pair: tuple[int, str] = (0, ""),
    either: int | list[int] = 0,
) -> None:
    """Survey."""


SCHEMA: Any = decode_json(survey.signature.schema)

texts = st.text(max_size=8)
places = st.fixed_dictionaries(
    {"name": texts}, optional={"zone": st.integers(-9, 9), "tags": st.lists(texts, max_size=3)}
)
arguments = st.fixed_dictionaries(
    {"places": st.lists(places, max_size=3), "words": st.lists(texts, max_size=3)},
    optional={
        "level": st.sampled_from(["low", "high"]),
        "year": st.sampled_from([1, 2]),
        "depth": st.none() | st.integers(-9, 9),
        "share": st.floats(-9, 9) | st.integers(-9, 9),
        "exact": st.booleans(),
        "note": texts | st.sampled_from(["[1]", '{"a": 1}', "null", "1", "true"]),
        "counts": st.none() | st.dictionaries(texts, st.integers(0, 9), max_size=3),
        "pair": st.tuples(st.integers(0, 9), texts).map(list),
        "either": st.integers(0, 9) | st.lists(st.integers(0, 9), max_size=3),
    },
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.floats(-99, 99) | texts | st.sampled_from(["1", "[", "null"]),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(texts, children, max_size=3),
    max_leaves=8,
)


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


@given(arguments)
def test_what_is_valid_is_never_changed_h320(given: dict[str, Any]) -> None:
    assert survey.signature.read(raw(given)) == given
    assert fits(given, SCHEMA)
    assert repaired(given, SCHEMA) is given


MISTAKES = {
    "places": lambda value: msgspec.json.encode(value).decode(),
    "words": lambda value: f"```json\n{msgspec.json.encode(value).decode()}\n```",
    "year": str,
    "depth": str,
    "share": str,
    "exact": str,
    "counts": lambda value: msgspec.json.encode(value).decode(),
    "either": lambda value: msgspec.json.encode(value).decode(),
}
"""By argument: a fault that says the same."""


@given(arguments, st.sets(st.sampled_from(sorted(MISTAKES))))
def test_the_usual_mistakes_come_to_the_values_that_were_meant_h321(given: dict[str, Any], wrong: set[str]) -> None:
    written = {name: MISTAKES[name](value) if name in wrong else value for name, value in given.items()}
    assert survey.signature.values(survey.signature.read(raw(written))) == survey.signature.values(copy_json(given))


@given(anything)
def test_it_changes_nothing_in_place_and_comes_to_rest_h320(value: Any) -> None:
    before = copy_json(value)
    once = repaired(value, SCHEMA)
    assert value == before
    assert repaired(once, SCHEMA) == once


@given(st.dictionaries(st.sampled_from([*SCHEMA["properties"], "other"]), anything))
def test_whatever_is_written_is_read_or_refused_h86(value: dict[str, Any]) -> None:
    with suppress(InvalidArguments):
        survey.signature.values(copy_json(survey.signature.read(raw(value))))


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"words": "one"}, {"words": ["one"]}),
        ({"places": {"name": "north"}}, {"places": [{"name": "north"}]}),
        ({"places": '{"name": "north"}'}, {"places": [{"name": "north"}]}),
        ({"places": [{"name": "north", "tags": "cold"}]}, {"places": [{"name": "north", "tags": ["cold"]}]}),
        ({"places": ['{"name": "north"}']}, {"places": [{"name": "north"}]}),
        ({"places": [{"name": 7}]}, {"places": [{"name": "7"}]}),
        ({"note": 1.5}, {"note": "1.5"}),
        ({"year": "2"}, {"year": 2}),
        ({"depth": "null"}, {"depth": None}),
        ({"exact": "True", "words": "one"}, {"exact": True, "words": ["one"]}),
        ({"share": None}, {}),
        ({"counts": '{"a": "1",}'}, {"counts": {"a": "1"}}),
        ({"pair": '[1, "two",]'}, {"pair": [1, "two"]}),
    ],
)
def test_each_mistake_h321(written: dict[str, Any], meant: dict[str, Any]) -> None:
    rest: dict[str, Any] = {"places": [], "words": []}
    read = survey.signature.read(raw({**rest, **written}))
    wanted = survey.signature.values({**rest, **meant})
    assert survey.signature.values(read) == wanted
    assert set(read) == {*rest, *meant}


def test_an_argument_that_fits_is_left_alone_beside_one_that_does_not_h320() -> None:
    @tool
    async def wait(how_long: timedelta, at: datetime, places: list[str]) -> None:
        """Wait."""

    written = {"how_long": 30, "at": 1_700_000_000, "places": "north"}
    assert wait.signature.read(raw(written)) == {**written, "places": ["north"]}


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ({"words": '["one"'}, "words: input should be a valid array"),
        ({"level": "medium"}, "level: input should be 'low' or 'high'"),
        ({"other": 1}, "other: there is no such argument"),
        ({"places": None}, "places: input should be a valid array"),
        ({"note": True}, "note: input should be a valid string"),
        ({"depth": "1,000"}, "depth: input should be a valid integer"),
        ({"either": "some"}, "either"),
    ],
)
def test_what_could_mean_two_things_is_told_instead_h321(written: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArguments, match=problem.replace("[", r"\[")):
        survey.signature.read(raw({"places": [], "words": [], **written}))


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1, 2]}',
        '{"a": [1, 2,],}',
        ' ```json\n{"a": [1, 2]}\n``` ',
        '```\n{"a": [1, 2,]}```',
        '{"a": [1, 2,\n]\n}',
    ],
)
def test_json_in_a_text(text: str) -> None:
    assert json_in_text(text) == {"a": [1, 2]}


def test_commas_inside_texts_stay() -> None:
    assert json_in_text('{"a": "b,]", "c": "\\",}",}') == {"a": "b,]", "c": '",}'}


def test_no_json_in_a_text_is_told_as_it_was_written() -> None:
    with pytest.raises(ValueError, match="column 7"):
        json_in_text('{"a": ,}')


def test_a_schema_that_refers_to_itself_ends() -> None:
    schema: Any = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    assert repaired("1", schema) == "1"
    tree: Any = {"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "properties": {"t": {"$ref": "#/$defs/t"}}}}}
    value: Any = "1"
    for _ in range(100):
        value = {"t": value}
    assert repaired(value, tree) is value


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("```json\n{}\n```", "{}"),
        ("```{}```", "{}"),
        ("``` \n [1] \n\n```", "[1]"),
        ("``````", ""),
        ("```", "```"),
        ("`````", "`````"),
        ("```json\n{}", "```json\n{}"),
        ("{} ```", "{} ```"),
        ("see:\n```\n{}\n```", "see:\n```\n{}\n```"),
    ],
)
def test_a_fence_is_around_the_whole_text_h321(text: str, inside: str) -> None:
    assert unfenced(text) == inside


@pytest.mark.parametrize(
    "text", ["```" + " " * 100_000 + "x", "```" + "\n" * 100_000 + "x```y", "```" + "a" * 100_000, "``` " * 50_000]
)
def test_a_long_text_is_read_in_one_pass_h321(text: str) -> None:
    """What backtracks over it takes hours."""
    with pytest.raises(ValueError, match="Expecting value"):
        json_in_text(text)
    with pytest.raises(CannotParse):
        parse_answer(text, list[int])


def test_a_text_without_its_end_is_read_in_one_pass_h321() -> None:
    """Each of its quotation marks could be taken for the beginning of another text."""
    with pytest.raises(ValueError, match="Unterminated string"):
        json_in_text('{"a": "' + '\\"' * 100_000)


def test_a_text_that_each_branch_of_a_union_would_read_is_read_a_bounded_number_of_times_h320(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = 0

    def reading(text: str) -> JsonValue:
        nonlocal read
        read += len(text)
        return json_in_text(text)

    monkeypatch.setattr(repair, "json_in_text", reading)
    branches: list[JsonValue] = [{"type": "object", "properties": {"op": {"const": str(n)}}} for n in range(300)]
    value = json.dumps({"op": "another", "text": "x" * 100_000})
    assert repaired(value, {"anyOf": branches}) is value
    assert read <= repair.STEP * repair.MAX_STEPS


EXPRESSION: Any = {
    "$ref": "#/$defs/E",
    "$defs": {
        "E": {
            "anyOf": [
                *(
                    {
                        "type": "object",
                        "properties": {
                            "op": {"const": op},
                            "args": {"type": "array", "items": {"$ref": "#/$defs/E"}},
                        },
                        "required": ["op", "args"],
                    }
                    for op in ("and", "or", "xor")
                ),
                {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
            ]
        }
    },
}


def expression(depth: int, n: JsonValue) -> JsonValue:
    found: JsonValue = {"n": n}
    for level in range(depth):
        found = {"op": ("and", "or", "xor")[level % 3], "args": [found]}
    return found


def test_unions_below_one_another_take_bounded_time_h320() -> None:
    """Each level multiplies: what is too much is left as it is."""
    assert repaired(expression(5, "3"), EXPRESSION) == expression(5, 3)
    wrong = expression(12, "no number")
    assert repaired(wrong, EXPRESSION) is wrong
    endless: Any = {"anyOf": [{"$ref": "#"}, {"$ref": "#"}], "const": 1}
    assert repaired("x", endless) == "x"
    assert fits("x", endless)
