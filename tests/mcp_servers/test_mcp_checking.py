"""Checks against the schemas of strangers: what is followed, and how much work one may be."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.tools.mcp.checking import BadSchema, Checker

pytestmark = pytest.mark.timeout(120)


def doubling(levels: int) -> dict[str, Any]:
    """A schema of a few hundred bytes, which is looked at 2 ** levels times."""
    names = [f"#/$defs/{level}" for level in range(levels + 1)]
    twice = {str(level): {"anyOf": [{"$ref": names[level + 1]}] * 2} for level in range(levels)}
    return {
        "type": "object",
        "properties": {"x": {"$ref": names[0]}},
        "$defs": {**twice, str(levels): {"type": "null"}},
    }


def branching() -> dict[str, Any]:
    """A schema that refers to itself twice, so that each level of a value doubles the work."""
    below = [{"properties": {"x": {"$ref": "#"}}, "required": [name]} for name in ("y", "z")]
    return {"type": "object", "anyOf": [*below, {"maxProperties": 0}]}


def branching_at(reference: str) -> dict[str, Any]:
    """The same, with an anchor, where the reference leads."""
    below = [{"properties": {"x": {"$ref": reference}}, "required": [name]} for name in ("y", "z")]
    return {"anyOf": [*below, {"maxProperties": 0}], "$anchor": "a"}


def a_thousand_times(part: dict[str, Any]) -> dict[str, Any]:
    return {"allOf": [{"$ref": "#/$defs/part"}] * 1000, "$defs": {"part": part}}


def deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"x": value}
    return value


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (doubling(60), {"x": "s"}),
        (branching(), deep(80)),
        ({"type": "object", "allOf": [{"$ref": "#"}]}, {}),
        ({"type": "object", "items": True, "properties": {"a": {"items": {}}}}, {"a": [0] * 200_000}),
        # A reference that leads to what stands for a value, and from there to an anchor.
        ({"$ref": "#/$defs/b", "$defs": {"b": branching_at("#/default")}, "default": {"$ref": "#a"}}, deep(80)),
        # One look is much work where a schema or a value is long.
        (a_thousand_times({"uniqueItems": True}), list(range(10_000))),
        (a_thousand_times({"required": [str(name) for name in range(10_000)]}), {}),
        (a_thousand_times({"enum": list(range(10_000))}), 1),
        (a_thousand_times({"minLength": 1}), "s" * 1_000_000),
        (a_thousand_times({"pattern": "s"}), "s" * 10_000),
        (a_thousand_times({"patternProperties": {"s": True}}), {"s" * 10_000: 1}),
        ({"items": {"patternProperties": {f"^{name}": True for name in range(5000)}}}, [{}] * 1000),
        (
            a_thousand_times({"properties": {str(name): True for name in range(10_000)}}),
            dict.fromkeys(map(str, range(10_000, 20_000))),
        ),
    ],
)
def test_a_check_that_would_take_years_is_not_begun_h396(schema: dict[str, Any], value: Any) -> None:
    assert Checker(schema).problems(value) == [
        "it takes more than 100000 steps to check by the schema, which is too much"
    ]


def test_problems_that_take_long_to_tell_are_not_told_one_by_one_h396() -> None:
    assert Checker(doubling(4)).problems({"x": "s"})[0].startswith('x: "s" is not valid')
    assert Checker(doubling(13)).problems({"x": None}) == []
    assert Checker(doubling(13)).problems({"x": "s"}) == ["it does not fit the schema, which is too large to say where"]


@pytest.mark.parametrize(
    "part",
    [
        {"$ref": "#a"},
        {"$ref": "other.json"},
        {"$ref": "#/$defs/none"},
        {"$dynamicRef": "#a"},
        {"$id": "http://127.0.0.1:9/b", "type": "object"},
        {"$schema": "http://json-schema.org/draft-04/schema#", "id": "http://127.0.0.1:9/b"},
        {"properties": {"default": {"$ref": "#a"}}},
        {"$defs": {"const": {"$ref": "other.json"}}},
    ],
)
def test_a_schema_whose_references_are_not_followed_is_not_valid_h396(part: dict[str, Any]) -> None:
    anchored = {"$anchor": "a", "$dynamicAnchor": "a"}
    schema: dict[str, Any] = {"type": "object", "properties": {"p": part}, "$defs": {"a": anchored}}
    with pytest.raises(BadSchema):
        Checker(schema)


def test_many_values_by_a_long_reference_are_checked_h396() -> None:
    name = "n" * 100_000
    many: list[Any] = [{}] * 30_000
    schema: dict[str, Any] = {"items": {"$ref": f"#/$defs/{name}"}, "$defs": {name: {"type": "object"}}}
    assert Checker(schema).problems(many) == []


def test_references_to_places_in_a_schema_are_followed_h396() -> None:
    schema: dict[str, Any] = {
        "$id": "http://127.0.0.1:9/whole",
        "type": "object",
        "properties": {
            "$ref": {"type": "integer"},
            "tree": {"$ref": "#/$defs/a~1b%25"},
        },
        "$defs": {"a/b%": {"type": "object", "properties": {"below": {"items": {"$ref": "#/$defs/a~1b%25"}}}}},
        "examples": [{"$ref": "other.json"}],
        "default": {"properties": {"p": {"$ref": "#a"}}},
    }
    checker = Checker(schema)
    assert checker.problems({"tree": {"below": [{"below": []}]}, "$ref": 1}) == []
    (found,) = checker.problems({"tree": {"below": [{"below": [1]}]}})
    assert found.startswith("tree.below[0].below[0]: 1 is not of type")


@given(
    st.recursive(
        st.sampled_from([{"type": "integer"}, {"$ref": "#/$defs/n"}, {}, {"minProperties": 1}]),
        lambda below: st.one_of(
            st.builds(lambda each: {"anyOf": each}, st.lists(below, min_size=1, max_size=3)),
            st.builds(lambda each: {"properties": {"x": each}}, below),
            st.builds(lambda each: {"additionalProperties": each}, below),
            st.builds(lambda each: {"items": each}, below),
        ),
        max_leaves=12,
    ),
    st.recursive(st.integers(), lambda b: st.lists(b, max_size=3) | st.dictionaries(st.sampled_from("xy"), b)),
)
def test_a_check_tells_what_the_library_tells_where_it_is_no_work_h396(schema: Any, value: Any) -> None:
    whole: dict[str, Any] = {"$defs": {"n": {"type": "array"}}, "allOf": [schema]}
    fits = jsonschema_rs.validator_for(whole).is_valid(value)
    assert (Checker(whole).problems(value) == []) is fits
