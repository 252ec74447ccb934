"""Documents as classes: declaration, drafts, snapshots, field types and versions (rules K94-K98, K108-K110)."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NewType, NotRequired, TypedDict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.kernel.document import Document, field, resolve_version
from perdure.kernel.draft import DraftList, DraftObject, Recorder
from perdure.kernel.errors import (
    DocumentFieldError,
    DocumentVersionError,
    DraftClosed,
    DraftDetached,
    NotJson,
)
from perdure.kernel.json import JsonValue, copy_json, encode_json
from perdure.kernel.ops import Append, Set, Splice, apply


class Job(Document, kind="app.job", version=3, scope="conversation", history="rewindable", fork="as_of"):
    limit: ClassVar[int] = 10

    state: Literal["new", "accepted", "shipped"] = "new"
    notes: list[str] = field(default_factory=list)
    count: int = field(default=0)
    ratio: float = 0.5
    owner: Name | None = None
    parts: dict[str, Part] = field(default_factory=dict)
    tree: list[Tree] = field(default_factory=list)
    extra: JsonValue = None
    receipt: Receipt | None = None

    @classmethod
    def migrate(cls, value: JsonValue, version: int) -> JsonValue:
        assert isinstance(value, dict)
        if version == 1:
            value["notes"] = [value.pop("note")]
        return value

    def shipped(self) -> bool:
        return self.state == "shipped"


class Plain(Document, kind="app.plain", scope="session"):
    text: str = ""


Name = NewType("Name", str)


class Part(TypedDict):
    amount: int
    tags: NotRequired[list[str]]


class Tree(TypedDict):
    name: str
    kids: list[Tree]


class Receipt(msgspec.Struct, frozen=True):
    label: str
    weight: float = 1.0
    pages: tuple[int, ...] = ()
    more: JsonValue = None


INITIAL: JsonValue = {
    "state": "new",
    "notes": [],
    "count": 0,
    "ratio": 0.5,
    "owner": None,
    "parts": {},
    "tree": [],
    "extra": None,
    "receipt": None,
}


def opened(**values: object) -> tuple[Recorder, Job]:
    recorder = Recorder(Job(**values).to_json())  # pyright: ignore[reportArgumentType]
    return recorder, Job.over(recorder)


# --- declaration -------------------------------------------------------------------------------------------------


def test_a_definition_says_what_was_declared() -> None:
    """Rules K95 and K96."""
    definition = Job.definition
    assert (definition.kind, definition.version, definition.scope) == ("app.job", 3, "conversation")
    assert (definition.history, definition.fork, definition.family) == ("rewindable", "as_of", False)
    assert definition.cls is Job
    assert definition.checkpoint_when is None
    definition = Plain.definition
    assert (definition.version, definition.history, definition.fork) == (1, "latest", "initial")


def test_the_initial_value_is_fresh_each_time() -> None:
    first: Any = Job.definition.initial()
    assert encode_json(first) == encode_json(INITIAL)
    first["notes"].append("x")
    assert Job.definition.initial() == INITIAL


def declare(**keywords: Any) -> type[Document]:
    keywords = {"kind": "app.x", "scope": "conversation"} | keywords
    return type("X", (Document,), {"__annotations__": {"n": "int"}, "n": 0}, **keywords)  # type: ignore[call-overload] # keywords of any kind are the point


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"kind": "pi.job"}, "perdure's own"),
        ({"kind": ""}, "kind ''"),
        ({"kind": "app..x"}, "kind 'app..x'"),
        ({"kind": "app x"}, "kind 'app x'"),
        ({"version": 0}, "version counts from 1"),
        ({"version": True}, "version counts from 1"),
        ({"version": "2"}, "version counts from 1"),
        ({"scope": "global"}, "scope is one of session, conversation, task, not 'global'"),
        ({"history": "all"}, "history is one of"),
        ({"history": "rewindable", "fork": "copy"}, "fork is one of"),
        ({"fork": "as_of"}, "needs history"),
        ({"history": "latest", "fork": "as_of"}, "needs history"),
        ({"scope": "session", "history": "rewindable"}, "conversation scope"),
        ({"scope": "task", "fork": "initial"}, "conversation scope"),
        ({"histroy": "latest"}, "histroy"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused_at_class_creation(keywords: dict[str, Any], message: str) -> None:
    """Rules K95-K97."""
    with pytest.raises(TypeError, match=message):
        declare(**keywords)


def test_what_makes_sense_is_accepted() -> None:
    assert declare(kind="pi.x", builtin=True).definition.kind == "pi.x"
    assert declare(fork="current").definition.fork == "current"
    assert declare(history="rewindable", fork="initial").definition.history == "rewindable"
    assert declare(family=True).definition.family


def test_kind_and_scope_are_required() -> None:
    with pytest.raises(TypeError, match="kind"):

        class NoKind(Document, scope="session"):  # type: ignore[call-arg] # what is refused
            pass

    with pytest.raises(TypeError, match="scope"):

        class NoScope(Document, kind="app.x"):  # type: ignore[call-arg] # what is refused
            pass


def test_a_field_needs_an_initial_value_a_type_and_a_free_name() -> None:
    with pytest.raises(TypeError, match=r"app\.x\.n needs an initial value"):

        class NoDefault(Document, kind="app.x", scope="session"):
            n: int

    with pytest.raises(TypeError, match=r"app\.x\.n needs a type"):

        class NoType(Document, kind="app.x", scope="session"):
            n = field(default=1)  # pyright: ignore[reportGeneralTypeIssues] # what is refused

    for name in ("_private", "to_json", "definition", "checkpoint_when", "migrate"):
        with pytest.raises(TypeError, match=name):
            type("X", (Document,), {"__annotations__": {name: "int"}, name: 0}, kind="app.x", scope="session")
    for wrong in ({}, {"default": 1, "default_factory": int}):
        with pytest.raises(TypeError, match="either"):
            field(**wrong)


def test_fields_are_inherited_and_may_be_given_another_default() -> None:
    class Base(Document, kind="app.base", scope="session"):
        a: int = 1
        b: str = "b"

    class Derived(Base, kind="app.derived", scope="session"):
        b: str = "other"
        c: bool = True

    assert Derived().to_json() == {"a": 1, "b": "other", "c": True}
    assert Base().to_json() == {"a": 1, "b": "b"}


def test_a_checkpoint_policy_is_found() -> None:
    """Rule K95."""

    class Big(Document, kind="app.big", scope="session"):
        n: int = 0

        @classmethod
        def checkpoint_when(cls, base_bytes: int, deltas: int, delta_bytes: int) -> bool:
            return deltas > base_bytes + delta_bytes

    policy = Big.definition.checkpoint_when
    assert policy is not None
    assert policy(1, 9, 1)
    assert not policy(9, 1, 1)


class Unresolved(Document, kind="app.unresolved", scope="session"):
    n: Missing = None  # type: ignore[name-defined] # noqa: F821 # what is refused  # pyright: ignore


class Mutable(msgspec.Struct):
    n: int = 0


@pytest.mark.parametrize(
    ("hint", "message"),
    [
        (set[str], "not made of JSON types"),
        (tuple[int, ...], "not made of JSON types"),
        (bytes, "not made of JSON types"),
        (dict[int, str], "keys of a JSON object are str"),
        (list[set[str]], "not made of JSON types"),
        (list[Receipt], "use a TypedDict"),
        (dict[str, Receipt | None], "use a TypedDict"),
        (Mutable, "must be frozen"),
        (Annotated[list[str], msgspec.Meta(max_length=3)], "bounds on a list or dict"),
        (Receipt | dict[str, int], "Type unions may not contain"),
        (object, "not made of JSON types|Type 'object'"),
    ],
)
def test_a_field_type_that_no_json_value_has_is_refused(hint: object, message: str) -> None:
    cls = type("X", (Document,), {"__annotations__": {"n": hint}, "n": None}, kind="app.x", scope="session")
    with pytest.raises(TypeError, match=message):
        cls.definition.initial()


Short = Annotated[str, msgspec.Meta(max_length=3)]


@pytest.mark.parametrize(
    ("hint", "fits", "not_fits"),
    [
        (Sequence[int], [1], ["1"]),
        (Mapping[str, int], {"a": 1}, {"a": 1.5}),
        (Short, "abc", "abcd"),
        (list[Short], ["abc"], ["abcd"]),
        (Literal[1, "a", None], None, 2),
        (int | str | None, "x", 1.5),
        (list[int] | dict[str, str], {"a": "b"}, ["x"]),
        (list[Part] | None, [{"amount": 1}], [{"amount": 1, "more": 1}]),
        (list, [1, "a", None], {}),
        (dict[str, Any], {"a": [1.5]}, []),
        (float, 1, True),
        (Receipt | int, Receipt("x"), "x"),
    ],
)
def test_a_field_takes_what_its_type_says(hint: object, fits: object, not_fits: object) -> None:
    cls: Any = type("X", (Document,), {"__annotations__": {"n": hint}, "n": fits}, kind="app.x", scope="session")
    assert cls().n == fits
    draft = cls.over(Recorder(cls().to_json()))
    draft.n = fits
    with pytest.raises(DocumentFieldError):
        draft.n = not_fits
    read: Any = draft.n
    assert read == fits
    if isinstance(not_fits, list) and isinstance(fits, list):
        with pytest.raises(DocumentFieldError, match=r"app\.x\.n\[1\]"):
            read.append(not_fits[0])
    if isinstance(not_fits, dict) and isinstance(fits, dict):
        with pytest.raises(DocumentFieldError, match=r"app\.x\.n\.a"):
            read.update(not_fits)


def test_a_type_that_cannot_be_resolved_is_named() -> None:
    with pytest.raises(TypeError, match=r"app\.unresolved.*Missing.*module level"):
        Unresolved()


def test_a_default_that_does_not_fit_is_refused() -> None:
    class Wrong(Document, kind="app.wrong", scope="session"):
        n: int = "one"  # type: ignore[assignment] # what is refused  # pyright: ignore

    with pytest.raises(DocumentFieldError, match=r"app\.wrong\.n: Expected `int`"):
        Wrong.definition.initial()


# --- drafts ------------------------------------------------------------------------------------------------------


def test_a_draft_reads_and_writes_like_an_object_and_records_operations() -> None:
    """Rule K50."""
    before = Job(notes=["a"], extra="text").to_json()
    recorder = Recorder(before)
    job = Job.over(recorder)
    assert job.notes == ["a"]
    job.count += 1
    job.state = "shipped"
    job.notes.append("b")
    job.notes += ["c"]
    job.extra = f"{job.extra} goes on"
    job.parts["x"] = {"amount": 1}
    job.parts["x"]["amount"] += 1
    assert job.shipped()
    assert isinstance(job.notes, DraftList)
    assert isinstance(job.parts, DraftObject)
    assert job.notes is job.notes
    assert recorder.ops == (
        Set(("count",), 1),
        Set(("state",), "shipped"),
        Splice(("notes",), 1, 0, ["b", "c"]),
        Append(("extra",), " goes on"),
        Set(("parts", "x"), {"amount": 1}),
        Set(("parts", "x", "amount"), 2),
    )
    assert apply(before, recorder.ops) == recorder.value == job.to_json()
    assert before == Job(notes=["a"], extra="text").to_json()


REFUSED: list[tuple[Callable[[Any], object], type[Exception], str]] = [
    (lambda j: setattr(j, "state", "lost"), DocumentFieldError, r"app\.job\.state: not one of the values"),
    (lambda j: setattr(j, "count", 1.0), DocumentFieldError, r"app\.job\.count: Expected `int`, got `float`"),
    (lambda j: setattr(j, "count", True), DocumentFieldError, r"app\.job\.count: Expected `int`, got `bool`"),
    (lambda j: setattr(j, "count", "1"), DocumentFieldError, r"app\.job\.count: Expected `int`, got `str`"),
    (lambda j: setattr(j, "count", 2**63), NotJson, r"app\.job\.count: an integer beyond 64 bits"),
    (lambda j: setattr(j, "count", None), DocumentFieldError, r"app\.job\.count: Expected `int`, got `null`"),
    (lambda j: setattr(j, "ratio", math.nan), NotJson, r"app\.job\.ratio: nan is not a JSON number"),
    (lambda j: setattr(j, "notes", ["a", 5]), DocumentFieldError, r"app\.job\.notes\[1\]: Expected `str`"),
    (lambda j: setattr(j, "notes", ("a",)), NotJson, r"app\.job\.notes: tuple"),
    (lambda j: j.notes.append(5), DocumentFieldError, r"app\.job\.notes\[1\]: Expected `str`"),
    (lambda j: j.notes.__setitem__(0, None), DocumentFieldError, r"app\.job\.notes\[0\]: Expected `str`"),
    (lambda j: j.notes.__setitem__(slice(0, 1), ["a", []]), DocumentFieldError, r"app\.job\.notes\[1\]"),
    (lambda j: setattr(j, "parts", {"a b": {}}), DocumentFieldError, r"app\.job\.parts\['a b'\]: .*`amount`"),
    (lambda j: setattr(j, "parts", {"a": {"amount": 1, "tag": []}}), DocumentFieldError, r"parts\.a\.tag: no such"),
    (lambda j: setattr(j, "parts", {"a": {"amount": 1, "tags": [1]}}), DocumentFieldError, r"parts\.a\.tags\[0\]"),
    (lambda j: j.parts.update(a={"amount": "1"}), DocumentFieldError, r"parts\.a\.amount: Expected `int`"),
    (lambda j: j.parts["p"].update(tag=[]), DocumentFieldError, r"app\.job\.parts\.p\.tag: no such key"),
    (lambda j: j.parts["p"]["tags"].append(1), DocumentFieldError, r"app\.job\.parts\.p\.tags\[1\]"),
    (lambda j: j.parts["p"].pop("amount"), DocumentFieldError, r"app\.job\.parts\.p\.amount: .*requires"),
    (lambda j: j.parts["p"].clear(), DocumentFieldError, r"app\.job\.parts\.p\.amount: .*requires"),
    (lambda j: j.tree[0]["kids"].append({"name": "x"}), DocumentFieldError, r"tree\[0\]\.kids\[0\]: .*`kids`"),
    (lambda j: setattr(j, "receipt", {"label": "x"}), DocumentFieldError, r"app\.job\.receipt: expected .*Receipt"),
    (lambda j: setattr(j, "receipt", Plain()), DocumentFieldError, r"app\.job\.receipt: expected .*Receipt"),
    (lambda j: setattr(j, "receipt", Receipt("x", math.nan)), DocumentFieldError, r"app\.job\.receipt"),
    (lambda j: setattr(j, "receipt", Receipt("x", more=(1,))), DocumentFieldError, "would not come back"),  # type: ignore[arg-type] # what is refused
    (lambda j: setattr(j, "stat", "new"), AttributeError, r"app\.job has no field 'stat'; its fields are state, notes"),
    (lambda j: setattr(j, "shipped", True), AttributeError, "no field 'shipped'"),
    (lambda j: setattr(j, "_value", {}), AttributeError, "no field '_value'"),
    (lambda j: delattr(j, "state"), AttributeError, "cannot be deleted"),
    (lambda j: j.stat, AttributeError, "stat"),
]


@pytest.mark.parametrize(("edit", "error", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_does_not_fit_is_refused_where_it_is_written_and_changes_nothing(
    edit: Callable[[Any], object], error: type[Exception], message: str
) -> None:
    """Rules K35 and K39; at any depth, not only at the field."""
    recorder, job = opened(notes=["a"], parts={"p": {"amount": 1, "tags": ["t"]}}, tree=[{"name": "root", "kids": []}])
    before = encode_json(recorder.value)
    with pytest.raises(error, match=message):
        edit(job)
    assert recorder.ops == ()
    assert encode_json(recorder.value) == before


def test_an_error_does_not_tell_the_value() -> None:
    _, job = opened()
    with pytest.raises(DocumentFieldError) as caught:
        job.state = "secret"  # type: ignore[assignment] # what is refused  # pyright: ignore
    assert "secret" not in str(caught.value)


def test_nothing_is_converted() -> None:
    """Rules K39 and K40: an int in a float field stays an int."""
    recorder, job = opened()
    job.ratio = 1
    job.extra = {"n": [1, 1.0, True]}
    assert recorder.ops == (Set(("ratio",), 1), Set(("extra",), {"n": [1, 1.0, True]}))
    assert type(job.ratio) is int
    assert encode_json(job.to_json()).count(b"[1,1.0,true]") == 1


def test_a_nested_key_that_may_be_absent_can_be_deleted() -> None:
    _, job = opened(parts={"p": {"amount": 1, "tags": ["t"]}})
    del job.parts["p"]["tags"]
    del job.parts["p"]
    assert job.parts == {}


def test_a_struct_is_read_from_a_draft_that_nothing_was_written_to() -> None:
    """The types of a class are looked at when they are first needed, and this read needs them (rule K50)."""

    class Fresh(Document, kind="app.fresh", scope="session"):
        receipt: Receipt | None = None

    assert Fresh.over(Recorder({"receipt": {"label": "x"}})).receipt == Receipt("x")


def test_a_struct_is_stored_as_json_and_read_as_a_value_of_its_own() -> None:
    recorder, job = opened()
    receipt = Receipt("label", 2.0, (1, 2), {"k": [1]})
    job.receipt = receipt
    stored: JsonValue = {"label": "label", "weight": 2.0, "pages": [1, 2], "more": {"k": [1]}}
    assert recorder.ops == (Set(("receipt",), stored),)
    for document in (job, Job.from_json(recorder.value)):
        read = document.receipt
        assert read == receipt
        assert read is not None
        assert isinstance(read.more, dict)
        read.more["k"] = "changed"
        assert document.to_json() == Job(receipt=receipt).to_json()
    job.receipt = None
    assert job.receipt is None


def test_a_field_takes_a_copy_of_another_field() -> None:
    """Rule K52."""
    _, job = opened(notes=["a"])
    job.extra = {"notes": job.notes}  # type: ignore[assignment] # a list as far as a checker knows  # pyright: ignore
    job.notes.append("b")
    assert job.extra == {"notes": ["a"]}


def test_handles_of_a_draft_die_like_the_draft() -> None:
    """Rules K51 and K54."""
    recorder, job = opened(notes=["a"])
    notes = job.notes
    job.notes = ["other"]
    with pytest.raises(DraftDetached):
        notes.append("x")
    recorder.close()
    for use in (lambda: job.state, lambda: job.notes, lambda: setattr(job, "count", 1), job.to_json):
        with pytest.raises(DraftClosed):
            use()


# --- snapshots ---------------------------------------------------------------------------------------------------


def test_a_snapshot_is_read_only_and_what_it_gives_is_detached() -> None:
    """Rule K32."""
    value = copy_json(Job(notes=["a"], parts={"p": {"amount": 1}}).to_json())
    one, other = Job.from_json(value), Job.from_json(value)
    with pytest.raises(AttributeError, match=r"app\.job\.state: a snapshot is read-only"):
        one.state = "shipped"
    one.notes.append("b")
    one.parts["p"]["amount"] = 2
    assert one.notes is one.notes
    assert one.notes == ["a", "b"]
    assert other.notes == ["a"]
    assert one.to_json() == value == Job(notes=["a"], parts={"p": {"amount": 1}}).to_json()
    assert type(one.notes) is list


def test_a_snapshot_does_not_copy_its_value_and_to_json_does() -> None:
    value: Any = Job(notes=["a"]).to_json()
    snapshot = Job.from_json(value)
    plain: Any = snapshot.to_json()
    plain["notes"].append("b")
    assert value["notes"] == ["a"]
    value["count"] = 7  # against the rules, but it shows
    assert snapshot.count == 7


def test_equality_tells_types_apart() -> None:
    """Rule K40."""
    assert Job(extra=1) == Job(extra=1)
    assert Job(extra=1) != Job(extra=True)
    assert Job(extra=1) != Job(extra=1.0)
    assert Job(extra={"a": 1, "b": 2}) == Job(extra={"b": 2, "a": 1})
    assert Job() != Plain()
    assert Job() != INITIAL
    with pytest.raises(TypeError):
        hash(Job())


def test_a_snapshot_can_be_made_from_fields() -> None:
    assert Job(state="shipped", receipt=Receipt("x")).receipt == Receipt("x")
    with pytest.raises(AttributeError, match="no field 'stat'"):
        Job(stat="new")  # type: ignore[call-arg] # what is refused  # pyright: ignore
    with pytest.raises(DocumentFieldError):
        Job(count="1")  # type: ignore[arg-type] # what is refused  # pyright: ignore


def test_contents_are_not_shown() -> None:
    recorder, draft = opened(extra="secret")
    shown = "of app.job: state, notes, count, ratio, owner, parts, tree, extra, receipt>"
    assert repr(draft) == f"<Job draft {shown}"
    assert repr(Job.from_json(recorder.value)) == f"<Job snapshot {shown}"


def test_copies_are_snapshots() -> None:
    _, draft = opened(notes=["a"])
    for copied in (copy.copy(draft), copy.deepcopy(draft), pickle.loads(pickle.dumps(draft))):
        assert copied == draft
        with pytest.raises(AttributeError, match="read-only"):
            copied.count = 1


def test_a_field_that_the_stored_value_lacks_is_initial() -> None:
    value: JsonValue = {"count": 5, "notes": ["a"]}
    assert Job.from_json(value) == Job(count=5, notes=["a"])
    assert value == {"count": 5, "notes": ["a"]}
    recorder = Recorder(value)
    job = Job.over(recorder)
    job.tree.append({"name": "root", "kids": []})
    assert apply(value, recorder.ops) == recorder.value == job.to_json()
    assert job == Job(count=5, notes=["a"], tree=[{"name": "root", "kids": []}])


@pytest.mark.parametrize("value", [None, 1, [], "x"])
def test_a_value_that_is_no_object_is_refused(value: JsonValue) -> None:
    for refuse in (Job.from_json, lambda v: Job.over(Recorder(v))):
        with pytest.raises(DocumentFieldError, match="object"):
            refuse(value)


@given(
    st.lists(
        st.tuples(st.just("notes"), st.lists(st.text("ab", max_size=3), max_size=3))
        | st.tuples(st.just("count"), st.integers(-3, 3))
        | st.tuples(st.just("ratio"), st.integers(0, 1) | st.sampled_from([0.0, -0.0, 1.0]))
        | st.tuples(
            st.just("parts"), st.dictionaries(st.text("ab"), st.fixed_dictionaries({"amount": st.integers(0, 3)}))
        )
        | st.tuples(st.just("extra"), st.none() | st.booleans() | st.integers(0, 1) | st.text("ab", max_size=3)),
        max_size=8,
    )
)
def test_whatever_is_assigned_reads_the_same_in_draft_snapshot_and_replay(edits: list[tuple[str, Any]]) -> None:
    before = Job.definition.initial()
    recorder = Recorder(before)
    job = Job.over(recorder)
    expected: Any = copy_json(INITIAL)
    for name, value in edits:
        setattr(job, name, value)
        expected[name] = value
        assert getattr(job, name) == value
    replayed = Job.from_json(apply(before, recorder.ops))
    assert encode_json(replayed.to_json()) == encode_json(expected)
    assert replayed == job
    assert encode_json(before) == encode_json(INITIAL)


# --- versions ----------------------------------------------------------------------------------------------------


def test_the_same_version_is_used_as_it_is() -> None:
    """Rule K108."""
    value: JsonValue = {"anything": 1}
    used, migrated = resolve_version(Job.definition, 3, value)
    assert used is value
    assert not migrated


def test_an_older_version_is_migrated_and_checked_without_touching_what_is_stored() -> None:
    """Rule K109."""
    stored: JsonValue = {"note": "first", "count": 1}
    value, migrated = resolve_version(Job.definition, 1, stored)
    assert migrated
    assert Job.from_json(value) == Job(notes=["first"], count=1)
    assert stored == {"note": "first", "count": 1}
    assert resolve_version(Job.definition, 2, {"notes": ["x"]})[0] == Job(notes=["x"]).to_json()


def test_a_migration_that_leaves_what_does_not_fit_is_refused() -> None:
    with pytest.raises(DocumentFieldError, match=r"app\.job\.old: no such field; the fields are state"):
        resolve_version(Job.definition, 2, {"old": 1})
    with pytest.raises(DocumentFieldError, match=r"app\.job\.notes\[0\]"):
        resolve_version(Job.definition, 1, {"note": 5})


def test_a_newer_version_is_refused_with_both_versions() -> None:
    """Rule K110."""
    with pytest.raises(DocumentVersionError, match=r"'app\.job'.*version 4.*version 3.*newer code") as caught:
        resolve_version(Job.definition, 4, {})
    assert (caught.value.kind, caught.value.stored, caught.value.code) == ("app.job", 4, 3)


def test_an_older_version_without_a_migration_is_refused_with_both_versions() -> None:
    """Rule K110."""

    class Second(Document, kind="app.second", version=2, scope="task"):
        n: int = 0

    with pytest.raises(DocumentVersionError, match=r"'app\.second'.*version 1.*version 2.*no migrate") as caught:
        resolve_version(Second.definition, 1, {})
    assert (caught.value.kind, caught.value.stored, caught.value.code) == ("app.second", 1, 2)


async def test_an_annotation_may_be_anything() -> None:
    """Rule K38: what stands beside a type says nothing of what is written, at whatever depth it is."""

    class Marked(Document, kind="app.marked", scope="session"):
        x: Annotated[int, {"unit": "ms"}] = 0
        many: list[Annotated[int, {"unit": "ms"}]] = field(default_factory=list)

    marked = Marked.over(Recorder(Marked.definition.initial()))
    marked.x = 3
    marked.many.append(4)
    assert marked.to_json() == {"x": 3, "many": [4]}
    with pytest.raises(DocumentFieldError, match=r"app.marked.many\[1\]"):
        marked.many.append("5")  # pyright: ignore[reportArgumentType]
