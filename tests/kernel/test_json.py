"""Strict JSON: what is refused and where, and that nothing comes back as another type (rules K34-K40)."""

from __future__ import annotations

import enum
import json
import math
from collections import OrderedDict
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.kernel.errors import NotJson
from perdure.kernel.json import (
    INT_MAX,
    INT_MIN,
    MAX_DEPTH,
    JsonValue,
    JsonView,
    canonical_json,
    check_json,
    copy_json,
    decode_json,
    digest,
    encode_json,
    path_text,
    same_json,
)

texts = st.text(max_size=8)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(INT_MIN, INT_MAX)
    | st.integers(-2, 2)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([0.0, -0.0, 1.0, 1e16, 5e-324])
    | texts
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4))


class Number(enum.IntEnum):
    ONE = 1


class Word(enum.StrEnum):
    A = "a"


class Items(list[int]):
    pass


def cyclic() -> list[Any]:
    loop: list[Any] = [1]
    loop.append({"again": loop})
    return loop


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


REFUSED: list[tuple[object, str, str]] = [
    ({"items": [0, 1, 2, {"name": math.nan}]}, "$.items[3].name", "not a JSON number"),
    ([math.inf], "$[0]", "not a JSON number"),
    ({"a": -math.inf}, "$.a", "not a JSON number"),
    ({"a": {1, 2}}, "$.a", "set is not JSON"),
    (b"bytes", "$", "bytes is not JSON"),
    ([bytearray(b"x")], "$[0]", "bytearray is not JSON"),
    ({"a": (1, 2)}, "$.a", "tuple would come back as list"),
    (object(), "$", "object is not JSON"),
    (1j, "$", "complex is not JSON"),
    ({"a": {3: "x"}}, "$.a", "keys must be str, not int"),
    ({None: "x"}, "$", "keys must be str, not NoneType"),
    ({True: 1}, "$", "keys must be str, not bool"),
    ({Word.A: 1}, "$", "keys must be str, not Word"),
    (["ok", "\ud800"], "$[1]", "lone surrogate, at code point 0"),
    ({"a": {"x\udfff": 1}}, "$.a['x\\udfff']", "key with a lone surrogate"),
    ({"x\udfff": math.nan}, "$['x\\udfff']", "not a JSON number"),
    ([INT_MAX + 1], "$[0]", "beyond 64 bits"),
    ([INT_MIN - 1], "$[0]", "beyond 64 bits"),
    ([Number.ONE], "$[0]", "Number is a subclass of int"),
    ([Word.A], "$[0]", "Word is a subclass of str"),
    (OrderedDict(a=1), "$", "OrderedDict is a subclass of dict"),
    ({"a b": Items()}, "$['a b']", "Items is a subclass of list"),
    (cyclic(), "$[1].again", "a cycle"),
    (nested(MAX_DEPTH + 1), "$[0][0][0][0][0][0][0][0]...", "nested deeper"),
]


@pytest.mark.parametrize(("value", "path", "reason"), REFUSED, ids=[reason for _, _, reason in REFUSED])
@pytest.mark.parametrize("refuse", [check_json, copy_json])
def test_what_is_not_json_is_refused_with_its_path(refuse: Any, value: object, path: str, reason: str) -> None:
    """Rules K35-K37."""
    with pytest.raises(NotJson) as caught:
        refuse(value)
    assert caught.value.path == path
    assert reason in caught.value.reason


def test_the_path_begins_where_the_caller_says() -> None:
    with pytest.raises(NotJson, match=r"^app\.job\.notes\[1\]: set"):
        check_json(["a", set()], at="app.job.notes")
    with pytest.raises(NotJson, match=r"^app\.job\.notes\[2\]\.x: set"):
        copy_json({"x": set()}, at="app.job", path=("notes", 2))


def test_the_deepest_value_allowed_passes_everywhere() -> None:
    deepest = nested(MAX_DEPTH)
    assert copy_json(deepest) == deepest
    assert decode_json(encode_json(deepest)) == deepest
    with pytest.raises(NotJson, match="nested deeper"):
        copy_json(deepest, path=("one more",))


@pytest.mark.parametrize(
    ("path", "text"),
    [((), "$"), (("a", 0, "b_1"), "$.a[0].b_1"), (("a.b", "é", ""), "$['a.b']['\\xe9']['']"), (("1",), "$['1']")],
)
def test_paths_are_written_unambiguously(path: tuple[str | int, ...], text: str) -> None:
    assert path_text(path) == text


@given(values)
def test_a_copy_is_the_same_and_shares_no_container(value: JsonValue) -> None:
    copied = copy_json(value)
    assert encode_json(copied) == encode_json(value)  # types and the order of keys too
    assert not containers(copied) & containers(value)
    check_json(value)


def containers(value: JsonValue) -> set[int]:
    if isinstance(value, dict):
        return {id(value)}.union(*map(containers, value.values()))
    if isinstance(value, list):
        return {id(value)}.union(*map(containers, value))
    return set()


@given(values)
def test_what_is_encoded_comes_back_with_its_types(value: JsonValue) -> None:
    """Rule K40."""
    for back in (decode_json(encode_json(value)), decode_json(canonical_json(value))):
        assert spelled(back) == spelled(value)
        assert same_json(back, value)


def spelled(value: JsonValue) -> str:
    """Python's own spelling tells types and zeros apart; keys in order."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{spelled(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(spelled, value)) + "]"
    return repr(value)


@given(values.flatmap(lambda value: st.tuples(st.just(value), values | st.just(copy_json(value)))))
def test_same_json_is_equality_that_tells_types_apart(pair: tuple[JsonValue, JsonValue]) -> None:
    """Rule K40: 1, 1.0 and True are three values."""
    a, b = pair
    same = spelled(a) == spelled(b)
    assert same_json(a, b) == same
    assert (canonical_json(a) == canonical_json(b)) == same
    assert (digest(a) == digest(b)) == same


def test_values_that_python_takes_for_equal_are_told_apart() -> None:
    alike: list[JsonValue] = [1, 1.0, True, "1", [1], [1.0], {"a": 1}, {"a": True}]
    for i, a in enumerate(alike):
        for j, b in enumerate(alike):
            assert same_json(a, b) == (i == j)
    assert not same_json(0.0, -0.0)
    assert same_json({"a": 1, "b": 2}, {"b": 2, "a": 1})


def test_the_canonical_form_is_fixed() -> None:
    value: JsonValue = {"b": [1, 1.0, True, None], "a": "é\n", "B": -0.0}
    assert canonical_json(value) == '{"B":-0.0,"a":"é\\n","b":[1,1.0,true,null]}'.encode()
    assert digest({"a": 1}) == "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"NaN",
        b"[1,]",
        b"1e400",
        b'"\xff"',
        b'"\\ud800"',
        b"[9223372036854775808]",
        b"[-9223372036854775809]",
        b"99999999999999999999999",
        b"[" * 100_000,
    ],
)
def test_bytes_that_are_not_strict_json_are_refused(data: bytes) -> None:
    with pytest.raises(NotJson):
        decode_json(data)


def test_long_digits_in_texts_and_floats_are_no_long_integers() -> None:
    data = b'["99999999999999999999", 0.12345678901234567890123, 9223372036854775807]'
    assert decode_json(data) == json.loads(data)
    assert decode_json(msgspec.Raw(data)) == json.loads(data)


def test_a_view_is_copied_as_the_value_it_stands_for_but_does_not_pass_as_one() -> None:
    class View(JsonView):
        def to_json(self) -> JsonValue:
            return {"seen": [1]}

    assert copy_json([View()]) == [{"seen": [1]}]
    with pytest.raises(NotJson, match=r"\$\[0\]: View is a view"):
        check_json([View()])


def test_the_type_alias_can_be_resolved_at_run_time() -> None:
    class Holder(msgspec.Struct):
        value: JsonValue = None

    assert get_type_hints(Holder, globals(), locals())["value"] is Any
    assert msgspec.json.decode(b'{"value": {"a": [1]}}', type=Holder).value == {"a": [1]}
