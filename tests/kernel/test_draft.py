"""Drafts: they work like the plain value, record what was done, and die in time (rules K50-K55)."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Callable, MutableMapping, MutableSequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.kernel.draft import DraftList, DraftObject, Recorder
from perdure.kernel.errors import DraftClosed, DraftDetached, NotJson, TransactionClosed
from perdure.kernel.json import MAX_DEPTH, JsonValue, copy_json, encode_json, same_json
from perdure.kernel.ops import Append, Delete, Op, Set, Splice, Trim, apply, decode_ops, encode_ops

keys = st.sampled_from(["a", "b", "c", "é", ""])
scalars = st.none() | st.booleans() | st.integers(-1, 1) | st.sampled_from([0.0, -0.0, 1.0]) | st.text("ab", max_size=3)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3))
roots = st.dictionaries(keys, values, max_size=4) | st.lists(values, max_size=4)


def opened(value: JsonValue) -> tuple[Recorder, Any]:
    recorder = Recorder(value)
    return recorder, recorder.root


# --- against plain Python ----------------------------------------------------------------------------------------


class Both:
    """One edit on the draft and on the plain twin: both do the same, or raise the same."""

    def __init__(self, draft: Any, plain: Any, data: st.DataObject) -> None:
        self.draft, self.plain, self.data = draft, plain, data

    def __call__(self, edit: Callable[[Any, Any], object], value: Any = None) -> None:
        mine = outcome(edit, self.draft, value)
        theirs = outcome(edit, self.plain, copy_json(value))
        assert mine == theirs

    def draw(self, strategy: st.SearchStrategy[Any]) -> Any:
        return self.data.draw(strategy)


def outcome(edit: Callable[[Any, Any], object], target: Any, value: Any) -> object:
    try:
        result = edit(target, value)
    except (IndexError, KeyError, ValueError) as error:
        return type(error)
    return None if result is target else plain_of(result)


def plain_of(value: Any) -> Any:
    return value.to_json() if isinstance(value, DraftList | DraftObject) else value


def edit_list(both: Both) -> None:
    index = both.draw(st.integers(-4, 4))
    bounds = st.none() | st.integers(-4, 4)
    part = slice(both.draw(bounds), both.draw(bounds), both.draw(st.sampled_from([None, None, 1, 2, -1])))
    value = both.draw(values)
    several = both.draw(st.lists(values, max_size=3))
    match both.draw(st.integers(0, 13)):
        case 0:
            both(lambda target, new: target.__setitem__(index, new), value)
        case 1:
            both(lambda target, new: target.insert(index, new), value)
        case 2:
            both(lambda target, new: target.append(new), value)
        case 3:
            both(lambda target, new: target.extend(new), several)
        case 4:
            both(lambda target, new: target.__iadd__(new), several)
        case 5:
            both(lambda target, _: target.pop(index))
        case 6:
            both(lambda target, _: target.__delitem__(index))
        case 7:
            both(lambda target, _: target.__delitem__(part))
        case 8:
            both(lambda target, new: target.__setitem__(part, new), several)
        case 9:
            both(lambda target, _: target.reverse())
        case 10:
            both(lambda target, _: target.sort(key=lambda item: len(json.dumps(plain_of(item)))))
        case 11:
            both(lambda target, new: target.remove(new), value)
        case 12:
            both(lambda target, _: target.clear())
        case _:
            # Of the plain list a copy, as it would hold the same items twice.
            both(lambda target, _: target.extend(target if isinstance(target, DraftList) else copy_json(target)))


def edit_dict(both: Both) -> None:
    key = both.draw(keys)
    value = both.draw(values)
    several = both.draw(st.dictionaries(keys, values, max_size=3))
    match both.draw(st.integers(0, 9)):
        case 0 | 1:
            both(lambda target, new: target.__setitem__(key, new), value)
        case 2:
            both(lambda target, _: target.__delitem__(key))
        case 3:
            both(lambda target, _: target.pop(key))
        case 4:
            both(lambda target, _: target.pop(key, "missing"))
        case 5:
            both(lambda target, _: target.popitem())
        case 6:
            both(lambda target, new: target.setdefault(key, new), value)
        case 7:
            both(lambda target, new: target.update(new), several)
        case 8:
            both(lambda target, new: target.__ior__(new), several)
        case _:
            both(lambda target, _: target.clear())


def edit_text(both: Both, key: str | int, text: str) -> None:
    new = both.draw(st.sampled_from([text + "ab", text + "é", text[:-1], text[:1], "", "other"]))
    both(lambda target, _: target.__setitem__(key, new))


def inside(plain: Any, draft: Any) -> list[tuple[Any, Any]]:
    """Every container with its handle."""
    found = [(plain, draft)]
    for key in range(len(plain)) if isinstance(plain, list) else plain:
        if isinstance(plain[key], list | dict):
            found += inside(plain[key], draft[key])
    return found


@given(roots, st.data())
def test_a_draft_does_what_the_plain_value_does_and_its_operations_lead_there(before: Any, data: st.DataObject) -> None:
    """Rules K50, K52 and K54, and that replaying is exact (rule K104): types, zeros and the order of keys too."""
    frozen = encode_json(before)
    plain = copy_json(before)
    recorder, draft = opened(before)
    followed: dict[int, tuple[Any, Any]] = {}
    given_out: list[tuple[JsonValue, bytes]] = []
    for _ in range(data.draw(st.integers(1, 8))):
        for twin, handle in inside(plain, draft):
            known = followed.setdefault(id(twin), (twin, handle))
            assert known[1] is handle  # read twice, the same handle
        twin, handle = data.draw(st.sampled_from(inside(plain, draft)))
        both = Both(handle, twin, data)
        texts = [at for at in (range(len(twin)) if isinstance(twin, list) else twin) if isinstance(twin[at], str)]
        if texts and data.draw(st.booleans()):
            at = data.draw(st.sampled_from(texts))
            edit_text(both, at, twin[at])
        elif isinstance(twin, list):
            edit_list(both)
        else:
            edit_dict(both)
        assert encode_json(draft.to_json()) == encode_json(plain)
        alive = {id(twin) for twin, _ in inside(plain, draft)}
        for twin, handle in followed.values():
            if id(twin) in alive:
                assert handle == twin
            else:
                with pytest.raises(DraftDetached):
                    len(handle)
        if data.draw(st.booleans()):
            given_out.append((recorder.value, encode_json(plain)))
    recorder.close()
    expected = encode_json(plain)
    assert encode_json(recorder.value) == expected
    assert encode_json(apply(before, recorder.ops)) == expected
    assert encode_json(apply(before, decode_ops(encode_ops(recorder.ops)))) == expected
    assert encode_json(before) == frozen
    for value, then in given_out:
        assert encode_json(value) == then
    if not recorder.ops:
        assert expected == frozen


@given(st.lists(values, max_size=5), st.dictionaries(keys, values, max_size=5), st.data())
def test_reading_is_like_reading_the_plain_value(items: list[Any], fields: dict[str, Any], data: st.DataObject) -> None:
    _, draft = opened([items, fields])
    some, many = draft
    value = data.draw(st.sampled_from([*items, *fields.values(), 1, "a"]))
    bounds = st.none() | st.integers(-6, 6)
    part = slice(data.draw(bounds), data.draw(bounds), data.draw(st.sampled_from([None, 2, -1])))
    assert len(some) == len(items)
    assert bool(some) == bool(items)
    assert list(some) == items
    assert list(reversed(some)) == items[::-1]
    assert some[part] == items[part]
    assert (value in some) == (value in items)
    assert some.count(value) == items.count(value)
    assert some + items[:1] == items + items[:1]
    assert items[:1] + some == items[:1] + items
    assert some == items
    assert items == some
    assert some != [*items, 0]
    assert some.copy() == items
    if value in items:
        assert some.index(value) == items.index(value)
    assert len(many) == len(fields)
    assert list(many) == list(fields)
    assert list(reversed(many)) == list(reversed(fields))
    assert list(many.keys()) == list(fields.keys())
    assert list(many.values()) == list(fields.values())
    assert list(many.items()) == list(fields.items())
    assert many == fields
    assert fields == many
    assert many | {"x": value} == fields | {"x": value}
    assert {"a": value} | many == {"a": value} | fields
    for key in [*fields, "absent"]:
        assert (key in many) == (key in fields)
        assert many.get(key) == fields.get(key)
        assert many.get(key, value) == fields.get(key, value)


def test_it_looks_like_a_dict_and_a_list_without_being_one() -> None:
    """Rule K55."""
    _, draft = opened({"items": [1]})
    assert isinstance(draft, MutableMapping)
    assert isinstance(draft["items"], MutableSequence)
    assert not isinstance(draft, dict)
    assert not isinstance(draft["items"], list)
    with pytest.raises(TypeError):
        json.dumps(draft)
    with pytest.raises(TypeError):
        hash(draft)


def test_errors_are_those_of_the_plain_value() -> None:
    _, draft = opened({"items": [1], "d": {}})
    with pytest.raises(KeyError):
        draft["no"]
    with pytest.raises(KeyError):
        del draft["no"]
    with pytest.raises(IndexError):
        draft["items"][1]
    with pytest.raises(IndexError):
        draft["items"][-2] = 0
    with pytest.raises(IndexError, match="empty"):
        opened([])[1].pop()
    with pytest.raises(KeyError, match="empty"):
        draft["d"].popitem()
    with pytest.raises(ValueError, match="slice of 1"):
        draft["items"][::2] = [1, 2]
    with pytest.raises(TypeError):
        draft["items"]["0"]
    with pytest.raises(RuntimeError, match="changed size"):
        for key in draft:
            draft[key + "x"] = 1
    with pytest.raises(ValueError, match="during sort"):
        draft["items"].sort(key=lambda item: draft["items"].append(item))


# --- what is recorded --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "ops"),
    [
        (lambda d: d.update(n=2), [Set(("n",), 2)]),
        (lambda d: d.update(n=1), []),
        (lambda d: d.update(n=True), [Set(("n",), True)]),
        (lambda d: d.update(n=1.0), [Set(("n",), 1.0)]),
        (lambda d: d.update(zero=-0.0), [Set(("zero",), -0.0)]),
        (lambda d: d.update(nested={"list": [True]}), [Set(("nested",), {"list": [True]})]),
        (lambda d: d.update(nested={"list": [1]}), []),
        (lambda d: d["nested"]["list"].__setitem__(0, 1.0), [Set(("nested", "list", 0), 1.0)]),
        (lambda d: d["nested"]["list"].__setitem__(slice(None), [True]), [Splice(("nested", "list"), 0, 1, [True])]),
        (lambda d: d["items"].__setitem__(slice(None), ["a", "x", "c"]), [Splice(("items",), 1, 1, ["x"])]),
        (lambda d: d["items"].__setitem__(slice(None), ["b", "c"]), [Splice(("items",), 0, 1, [])]),
        (lambda d: d["items"].__setitem__(slice(None), ["a", "b", "c"]), []),
        (lambda d: d["items"].reverse(), [Splice(("items",), 0, 3, ["c", "b", "a"])]),
        (lambda d: d["items"].sort(), []),
        (lambda d: [d["items"].append(x) for x in "de"], [Splice(("items",), 3, 0, ["d", "e"])]),
        (lambda d: d["items"].insert(0, "z"), [Splice(("items",), 0, 0, ["z"])]),
        (lambda d: d["items"].pop(), [Splice(("items",), 2, 1, [])]),
        (lambda d: d.pop("n"), [Delete(("n",))]),
        (lambda d: d["nested"].clear(), [Set(("nested",), {})]),
        (lambda d: [d.update(n=n) for n in range(2, 9)], [Set(("n",), 8)]),
        (lambda d: d.setdefault("n", 5), []),
        (lambda d: d.update(text=d["text"] + " and so on"), [Append(("text",), " and so on")]),
        (lambda d: [d.update(text=d["text"] + x) for x in "abc"], [Append(("text",), "abc")]),
        (lambda d: d.update(text="hello wor"), [Trim(("text",), 2)]),
        (lambda d: d.update(text=""), [Set(("text",), "")]),
        (lambda d: d.update(text="world"), [Set(("text",), "world")]),
        (lambda d: d.update(text="hello world"), []),
        (lambda d: d.update(empty="x"), [Set(("empty",), "x")]),
    ],
)
def test_operations_are_small_and_nothing_that_differs_in_json_is_dropped(
    edit: Callable[[Any], object], ops: list[Op]
) -> None:
    """Rules K40 and K106: 1, 1.0 and True are three values; what is the same JSON need not be written."""
    before: JsonValue = {
        "n": 1,
        "zero": 0.0,
        "text": "hello world",
        "empty": "",
        "items": ["a", "b", "c"],
        "nested": {"list": [1]},
    }
    recorder, draft = opened(before)
    edit(draft)
    assert encode_ops(recorder.ops) == encode_ops(ops)
    assert encode_json(apply(before, recorder.ops)) == encode_json(recorder.value)


def test_a_streamed_text_costs_its_tokens() -> None:
    """Rule K106."""
    recorder, draft = opened({"parts": [{"text": "x" * 100_000}]})
    for _ in range(5):
        draft["parts"][0]["text"] += " token"
    assert len(encode_ops(recorder.ops)) < 100


def test_many_appends_are_merged_within_bounds() -> None:
    recorder, draft = opened({"items": [], "text": "t"})
    for n in range(1000):
        draft["items"].append(n)
    assert 1 < len(recorder.ops) < 20
    assert apply({"items": [], "text": "t"}, recorder.ops) == recorder.value


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: (d.pop("a"), d.update(a=1)),  # the key moves to the end
        lambda d: (d["items"].append("x"), d["items"].insert(2, "y")),
        lambda d: (d["items"].append("x"), d["items"].insert(0, "y")),
        lambda d: (d["items"].append("x"), d["items"].pop()),
        lambda d: (d["items"].pop(), d["items"].append("x")),
        lambda d: (d["items"].append("x"), d.update(items=[])),
        lambda d: (d.update(t="text more"), d.update(t="text mo"), d.update(t="text mo!")),
        lambda d: (d.update(t="text more"), d.update(t="other"), d.update(t="other one")),
    ],
)
def test_merging_what_follows_at_one_place_changes_no_outcome(edit: Callable[[Any], object]) -> None:
    before: JsonValue = {"a": 0, "items": [1, 2], "t": "text"}
    plain: Any = copy_json(before)
    recorder, draft = opened(before)
    edit(draft)
    edit(plain)
    assert encode_json(apply(before, recorder.ops)) == encode_json(recorder.value) == encode_json(plain)


def test_the_second_half_of_an_augmented_assignment_is_no_write() -> None:
    recorder, draft = opened({"items": [[1]], "d": {"a": 1}})
    items, first = draft["items"], draft["items"][0]
    draft["items"] += [2]
    draft["items"][0] += [3]
    draft["d"] |= {"b": 2}
    assert draft["items"] is items
    assert draft["items"][0] is first
    assert recorder.ops == (
        Splice(("items",), 1, 0, [2]),
        Splice(("items", 0), 1, 0, [3]),
        Set(("d", "b"), 2),
    )


# --- copies and checks -------------------------------------------------------------------------------------------


def test_what_is_assigned_is_copied() -> None:
    """Rule K52."""
    recorder, draft = opened({"items": []})
    mine: dict[str, Any] = {"n": [1]}
    draft["mine"] = mine
    draft["items"].append(mine)
    draft["items"][0:0] = [mine]
    mine["n"].append(2)
    assert draft == {"items": [{"n": [1]}, {"n": [1]}], "mine": {"n": [1]}}
    draft["mine"]["n"].append(3)
    assert recorder.ops[0] == Set(("mine",), {"n": [1]})  # nor does a later edit reach into an earlier operation
    assert mine == {"n": [1, 2]}


def test_a_node_assigned_elsewhere_is_copied() -> None:
    _, draft = opened({"a": {"n": [1]}, "b": []})
    draft["c"] = draft["a"]
    draft["b"].append([draft["a"]])
    draft["a"]["self"] = draft["a"]
    draft["a"]["n"].append(2)
    assert draft == {
        "a": {"n": [1, 2], "self": {"n": [1]}},
        "b": [[{"n": [1]}]],
        "c": {"n": [1]},
    }
    assert draft["c"] is not draft["a"]
    _, other = opened({})
    other["from"] = draft["b"]
    assert other == {"from": [[{"n": [1]}]]}


def test_what_is_taken_out_is_plain() -> None:
    _, draft = opened({"a": [1], "b": [[2], [3]], "c": {"d": []}})
    assert type(draft.pop("a")) is list
    assert type(draft["b"].pop()) is list
    assert type(draft.popitem()[1]) is dict


@pytest.mark.parametrize(
    ("edit", "path"),
    [
        (lambda d: d.update(a={"b": [1, math.nan]}), "app.job.a.b[1]"),
        (lambda d: d["items"].append({1, 2}), "app.job.items[2]"),
        (lambda d: d["items"].extend([0, b"x"]), "app.job.items[3]"),
        (lambda d: d["items"].insert(0, (1,)), "app.job.items[0]"),
        (lambda d: d["items"].__setitem__(-1, "\ud800"), "app.job.items[1]"),
        (lambda d: d["items"].__setitem__(slice(0, 2), [1, 2**63]), "app.job.items[1]"),
        (lambda d: d["items"].__setitem__(slice(None, None, -1), [1, 2**63]), "app.job.items[0]"),
        (lambda d: d["items"][1].__setitem__(5, 1), "app.job.items[1]"),
        (lambda d: d["items"][1].__setitem__("\ud800", 1), "app.job.items[1]['\\ud800']"),
        (lambda d: d.setdefault("new", {"k": set()}), "app.job.new.k"),
        (lambda d: d.__ior__({"new": object()}), "app.job.new"),
    ],
)
def test_what_is_not_json_is_refused_at_the_assignment_and_changes_nothing(
    edit: Callable[[Any], object], path: str
) -> None:
    """Rules K35 and K38."""
    recorder = Recorder({"items": [0, {"k": 1}]}, at="app.job")
    draft: Any = recorder.root
    handle = draft["items"][1]
    with pytest.raises(NotJson) as caught:
        edit(draft)
    assert caught.value.path == path
    assert recorder.ops == ()
    assert draft == {"items": [0, {"k": 1}]}
    assert handle == {"k": 1}


def test_depth_is_bounded_over_the_whole_value() -> None:
    recorder, draft = opened({"next": {}})
    at, levels = draft["next"], 2
    while levels < MAX_DEPTH:
        at["next"] = {}
        at, levels = at["next"], levels + 1
    with pytest.raises(NotJson, match="nested deeper"):
        at["next"] = {}
    assert same_json(copy_json(recorder.value), recorder.value)


def test_copies_of_a_handle_are_plain() -> None:
    _, draft = opened({"items": [{"n": 1}]})
    for plain in (draft.to_json(), copy.deepcopy(draft), copy.copy(draft), pickle.loads(pickle.dumps(draft))):
        assert type(plain) is dict
        assert type(plain["items"]) is list
        plain["items"][0]["n"] = 2
    assert draft == {"items": [{"n": 1}]}


def test_what_no_edit_touched_is_shared_with_the_value_before() -> None:
    before: dict[str, Any] = {"touched": {"a": [1]}, "spared": {"b": [1]}, "list": [[1], [2]]}
    recorder, draft = opened(before)
    list(draft["spared"]["b"])
    draft["touched"]["a"].append(2)
    draft["list"].reverse()
    draft["list"][0].append(3)
    after: Any = recorder.value
    assert after["spared"] is before["spared"]
    assert after["list"][1] is before["list"][0]
    assert before == {"touched": {"a": [1]}, "spared": {"b": [1]}, "list": [[1], [2]]}
    assert after == {"touched": {"a": [1, 2]}, "spared": {"b": [1]}, "list": [[2, 3], [1]]}


def test_an_operation_keeps_what_it_recorded_when_a_reordered_item_is_edited_before_and_after() -> None:
    before: JsonValue = {"items": [[1], [2]]}
    recorder, draft = opened(before)
    first = draft["items"][0]
    first.append("before")
    draft["items"].reverse()
    first.append("after")
    assert recorder.value == {"items": [[2], [1, "before", "after"]]}
    assert apply(before, recorder.ops) == recorder.value


# --- handles -----------------------------------------------------------------------------------------------------


def test_a_handle_follows_its_object_when_positions_shift() -> None:
    """Rule K54."""
    recorder, draft = opened({"items": [{"n": n} for n in range(4)]})
    items = draft["items"]
    handle = items[2]
    items.insert(0, "new")
    del items[1]
    items[0:1] = ["p", "q"]
    items.reverse()
    items.sort(key=lambda item: item["n"] if isinstance(item, DraftObject) else 9)
    handle["n"] = 20
    assert items == [{"n": 1}, {"n": 20}, {"n": 3}, "q", "p"]
    assert items[1] is handle
    assert recorder.ops[-1] == Set(("items", 1, "n"), 20)


REMOVALS: list[Callable[[Any], object]] = [
    lambda d: d["items"].pop(1),
    lambda d: d["items"].remove({"deep": [1]}),
    lambda d: d["items"].clear(),
    lambda d: d["items"].__setitem__(1, {"other": 1}),
    lambda d: d["items"].__setitem__(1, {"deep": [1]}),
    lambda d: d["items"].__setitem__(slice(None), [0, {"deep": [1]}]),
    lambda d: d["items"].__delitem__(slice(None, None, -1)),
    lambda d: d.pop("items"),
    lambda d: d.update(items=[]),
    lambda d: d.clear(),
]


@pytest.mark.parametrize("remove", REMOVALS)
def test_a_handle_raises_once_its_object_was_removed_or_replaced(remove: Callable[[Any], object]) -> None:
    """Rule K54, also for what is inside the removed object, also if its equal took the place."""
    recorder, draft = opened({"items": [0, {"deep": [1]}]})
    handle = draft["items"][1]
    deep = handle["deep"]
    remove(draft)
    recorded = recorder.ops
    for use in (*USES, lambda h: h.append(1), lambda h: h.update(a=1)):
        for node in (handle, deep):
            with pytest.raises((DraftDetached, AttributeError)) as caught:
                use(node)
            assert caught.type is DraftDetached or "has no attribute" in str(caught.value)
    assert recorder.ops == recorded
    assert "detached" in repr(handle)


USES: list[Callable[[Any], object]] = [
    len,
    list,
    bool,
    lambda h: h[0],
    lambda h: h == 1,
    lambda h: 1 in h,
    lambda h: h.to_json(),
    lambda h: h.copy(),
    lambda h: h.clear(),
    lambda h: h.pop(0),
    lambda h: h.__delitem__(0),
    lambda h: h.__setitem__(0, 1),
    copy.deepcopy,
    copy_json,
]


def test_everything_raises_once_the_draft_is_closed() -> None:
    """Rule K51."""
    recorder, draft = opened({"items": [1]})
    items, keys_left = draft["items"], iter(draft)
    draft["n"] = 1
    recorder.close()
    for use in USES:
        for node in (draft, items):
            with pytest.raises(DraftClosed, match="ended"):
                use(node)
    with pytest.raises(DraftClosed):
        next(keys_left)
    with pytest.raises(DraftClosed):
        recorder.root  # noqa: B018 # reading it is what is refused
    assert issubclass(DraftClosed, TransactionClosed)
    assert recorder.ops == (Set(("n",), 1),)
    assert recorder.value == {"items": [1], "n": 1}
    assert "closed" in repr(items)


def test_a_handle_shows_its_place_and_not_its_contents() -> None:
    recorder = Recorder({"list": [{"token": "secret"}]}, at="app.job")
    draft: Any = recorder.root
    assert repr(draft["list"][0]) == "<DraftObject app.job.list[0], 1 items>"


def test_a_guard_may_refuse_and_then_nothing_changes() -> None:
    class Frozen:
        def check_set(self, path: tuple[str | int, ...], value: JsonValue) -> None:
            raise ValueError(f"set {path}")

        def check_delete(self, path: tuple[str | int, ...]) -> None:
            raise ValueError(f"delete {path}")

    recorder = Recorder({"list": [1], "d": {"a": [1]}}, guard=Frozen())
    draft: Any = recorder.root
    handle = draft["d"]["a"]
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: draft.update(x=1), r"set \('x',\)"),
        (lambda: draft["list"].append(2), r"set \('list', 1\)"),
        (lambda: draft["list"].__setitem__(0, 2), r"set \('list', 0\)"),
        (lambda: draft["d"].pop("a"), r"delete \('d', 'a'\)"),
        (lambda: draft["d"].clear(), r"delete \('d', 'a'\)"),
    ]
    for edit, message in refused:
        with pytest.raises(ValueError, match=message):
            edit()
    assert recorder.ops == ()
    assert handle == [1]


def test_a_scalar_has_no_handle() -> None:
    assert Recorder(5).root == 5
