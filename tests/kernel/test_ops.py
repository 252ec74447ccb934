"""Operations: applying them, their stored form, and their rendering as JSON Patch (rules K104-K107)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jsonpatch
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.kernel.errors import NotJson, OperationError
from perdure.kernel.json import JsonPath, JsonValue, copy_json, encode_json, same_json
from perdure.kernel.ops import (
    Append,
    Delete,
    Op,
    Set,
    Splice,
    Trim,
    _Target,
    apply,
    decode_ops,
    encode_ops,
    to_json_patch,
)

keys = st.sampled_from(["a", "b", "~", "/", "a/b~1", "", "0", "é", "-"])
scalars = (
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.0, -0.0, 1.0]) | st.text("aé𝄞", max_size=4)
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4))

STORED: list[tuple[Op, bytes]] = [
    (Set((), {"a": 1.0}), b'["s",[],{"a":1.0}]'),
    (Set(("a", 0), None), b'["s",["a",0],null]'),
    (Delete(("a", "b")), b'["d",["a","b"]]'),
    (Splice(("a",), 1, 2, [True, 1]), b'["l",["a"],1,2,[true,1]]'),
    (Append(("t",), "é"), '["a",["t"],"é"]'.encode()),
    (Trim(("t",), 3), b'["t",["t"],3]'),
]


@pytest.mark.parametrize(("op", "stored"), STORED)
def test_the_stored_form_is_fixed_and_small(op: Op, stored: bytes) -> None:
    """Rule K106."""
    assert encode_ops([op]) == b"[" + stored + b"]"
    assert decode_ops(b"[" + stored + b"]") == (op,)


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b'[["x",[]]]', b'[["s",[1.5],0]]', b'[["s"]]', b'[["a",[],1]]', b'[["l",[],"1",0,[]]]', b"[" * 9000],
)
def test_bytes_that_are_no_operations_are_refused(data: bytes) -> None:
    with pytest.raises(NotJson):
        decode_ops(data)


SAMPLE: JsonValue = {"list": [1, {"n": 1}, [2]], "text": "aé𝄞z", "object": {"k": {"deep": [0]}}}


@pytest.mark.parametrize(
    ("ops", "change"),
    [
        ([Set(("text",), 1)], lambda v: v.update(text=1)),
        ([Set(("new",), [])], lambda v: v.update(new=[])),
        ([Set(("list", 1, "n"), True)], lambda v: v["list"][1].update(n=True)),
        ([Delete(("object", "k", "deep"))], lambda v: v["object"]["k"].pop("deep")),
        ([Splice(("list",), 1, 1, [7, 8])], lambda v: v["list"].__setitem__(slice(1, 2), [7, 8])),
        ([Splice(("list",), 3, 0, [7])], lambda v: v["list"].append(7)),
        ([Splice(("list",), 0, 3, [])], lambda v: v["list"].clear()),
        ([Append(("text",), "𝄞")], lambda v: v.update(text="aé𝄞z𝄞")),
        ([Trim(("text",), 2)], lambda v: v.update(text="aé")),  # code points: rule K105
        ([Trim(("text",), 4)], lambda v: v.update(text="")),
        ([Set(("list", 2), {}), Set(("list", 2, "x"), 1)], lambda v: v["list"].__setitem__(2, {"x": 1})),
    ],
)
def test_each_operation_does_its_work_and_leaves_the_value_before_alone(
    ops: list[Op], change: Callable[[Any], object]
) -> None:
    """Rule K104."""
    before = copy_json(SAMPLE)
    expected = copy_json(SAMPLE)
    change(expected)
    given_ops = encode_ops(ops)
    assert same_json(apply(before, ops), expected)
    assert same_json(before, SAMPLE)
    assert encode_ops(ops) == given_ops  # nor the values inside the operations


@pytest.mark.parametrize(
    ("op", "path"),
    [
        (Set(("no", "x"), 1), "$.no"),
        (Set(("list", "x"), 1), "$.list.x"),
        (Set(("list", 3), 1), "$.list[3]"),
        (Set(("list", -1), 1), "$.list[-1]"),
        (Set(("list", 7, "n"), 1), "$.list[7]"),
        (Set(("text", 0), "b"), "$.text[0]"),
        (Set(("object", 0), "b"), "$.object[0]"),
        (Delete(()), "$"),
        (Delete(("no",)), "$.no"),
        (Delete(("list", 0)), "$.list[0]"),
        (Splice(("text",), 0, 0, []), "$.text"),
        (Splice(("list",), 4, 0, []), "$.list"),
        (Splice(("list",), 2, 2, []), "$.list"),
        (Splice(("list",), -1, 1, []), "$.list"),
        (Splice(("list",), 2, -1, []), "$.list"),
        (Append(("list",), "x"), "$.list"),
        (Append(("no",), "x"), "$.no"),
        (Trim(("text",), 5), "$.text"),
        (Trim(("text",), -1), "$.text"),
        (Trim(("object", "k"), 0), "$.object.k"),
    ],
)
def test_an_operation_that_does_not_fit_is_refused_with_its_path(op: Op, path: str) -> None:
    before = copy_json(SAMPLE)
    with pytest.raises(OperationError) as caught:
        apply(before, [Set(("list", 1, "n"), 2), op])
    assert caught.value.path == path
    assert same_json(before, SAMPLE)


def test_applying_copies_the_containers_on_the_path_only_and_each_once() -> None:
    before: dict[str, Any] = {"touched": {"list": [1, [2]]}, "spared": {"big": list(range(100))}}
    after: Any = apply(before, [Set(("touched", "list", 0), 5)])
    assert after["spared"] is before["spared"]
    assert after["touched"]["list"][1] is before["touched"]["list"][1]
    assert after["touched"] is not before["touched"]
    assert after["touched"]["list"] is not before["touched"]["list"]

    target = _Target({"big": [0]})
    target.apply(Set(("big", 0), 1))
    own: Any = target.value
    big = own["big"]
    target.apply(Set(("big", 0), 2))
    assert target.value is own
    assert own["big"] is big


@st.composite
def programs(draw: st.DrawFn) -> tuple[JsonValue, list[Op]]:
    """A value and operations that fit it, one after the other."""
    before = draw(values)
    now = copy_json(before)
    ops: list[Op] = []
    for _ in range(draw(st.integers(0, 5))):
        op = fitting(draw, now)
        now = apply(now, [op])
        ops.append(op)
    return before, ops


def fitting(draw: st.DrawFn, value: JsonValue) -> Op:
    path, node = draw(st.sampled_from(places(value, ())))
    way = draw(st.integers(0, 2))
    if way and isinstance(node, list):
        start = draw(st.integers(0, len(node)))
        remove = draw(st.integers(0, len(node) - start))
        return Splice(path, start, remove, draw(st.lists(values, max_size=3)))
    if way == 1 and isinstance(node, dict) and node:
        return Delete((*path, draw(st.sampled_from(list(node)))))
    if way == 2 and isinstance(node, dict):
        return Set((*path, draw(keys)), draw(values))
    if way == 1 and isinstance(node, str):
        return Append(path, draw(st.text("aé𝄞", max_size=3)))
    if way == 2 and isinstance(node, str):
        return Trim(path, draw(st.integers(0, len(node))))
    return Set(path, draw(values))


def places(value: JsonValue, path: JsonPath) -> list[tuple[JsonPath, JsonValue]]:
    found = [(path, value)]
    if isinstance(value, dict):
        found += [place for key, item in value.items() for place in places(item, (*path, key))]
    if isinstance(value, list):
        found += [place for at, item in enumerate(value) for place in places(item, (*path, at))]
    return found


@given(programs())
def test_together_is_the_same_as_one_by_one_and_as_the_stored_form(program: tuple[JsonValue, list[Op]]) -> None:
    before, ops = program
    frozen, stored = encode_json(before), encode_ops(ops)
    one_by_one = before
    for op in ops:
        one_by_one = apply(one_by_one, [op])
    assert encode_json(apply(before, ops)) == encode_json(one_by_one)
    assert encode_json(apply(before, decode_ops(stored))) == encode_json(one_by_one)
    assert encode_json(before) == frozen
    assert encode_ops(ops) == stored


@given(programs())
def test_the_json_patch_leads_to_the_same_value(program: tuple[JsonValue, list[Op]]) -> None:
    """Rule K107, with another implementation of RFC 6902 as the judge."""
    before, ops = program
    patch: Any = to_json_patch(before, ops)
    judged: Any = jsonpatch.apply_patch(copy_json(before), patch)
    assert same_json(judged, apply(before, ops))


def test_a_json_patch_shares_nothing_with_the_operations() -> None:
    op = Set(("a",), {"inner": [1]})
    patch: Any = to_json_patch({}, [op])
    patch[0]["value"]["inner"].append(2)
    assert op.value == {"inner": [1]}


def test_patches_are_standard_operations() -> None:
    ops: list[Op] = [
        Set(("new/~",), 1),
        Set(("text",), "x"),
        Append(("text",), "y"),
        Splice(("list",), 1, 2, ["p"]),
        Splice(("list",), 1, 0, ["o"]),
        Delete(("object",)),
    ]
    assert to_json_patch(SAMPLE, ops) == [
        {"op": "add", "path": "/new~1~0", "value": 1},
        {"op": "replace", "path": "/text", "value": "x"},
        {"op": "replace", "path": "/text", "value": "xy"},
        {"op": "replace", "path": "/list/1", "value": "p"},
        {"op": "remove", "path": "/list/2"},
        {"op": "add", "path": "/list/1", "value": "o"},
        {"op": "remove", "path": "/object"},
    ]


def test_a_token_costs_the_token_however_long_the_text() -> None:
    """Rule K106."""
    assert len(encode_ops([Append(("message", "content", 0, "text"), " token")])) < 50


def test_operations_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Set((), 1).value = 2  # pyright: ignore[reportAttributeAccessIssue]
