"""Definitions and the code at hand (rules T2, T3, T30, K34-K40)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import pytest

from perdure.kernel.errors import NotJson
from perdure.kernel.json import JsonValue
from perdure.kernel.records import NULL
from perdure.tasks import Next, Run, Task, TaskDefinitionError, TaskRegistry
from perdure.tasks.codec import Codec

X = TypeVar("X")


class Order(msgspec.Struct, frozen=True):
    id: str
    count: int = 1
    extra: object = None


@dataclass(frozen=True)
class Parcel:
    label: str
    weight: float


class Ship(Task[Order, str], kind="app.ship", version=2):
    async def start(self, run: Run[Order, str, None]) -> Next[str]:
        async with run.commit() as tx:
            return tx.go(self.deliver, Parcel("a", 1.5))

    async def deliver(self, run: Run[Order, str, Parcel]) -> Next[str]:
        async with run.commit() as tx:
            return tx.complete(run.checkpoint.label)

    async def helper(self, text: str) -> str:
        return text


class TestShape:
    def test_T3_kind_version_and_types_are_the_classes(self) -> None:
        assert (Ship.kind, Ship.version, Ship.first_phase) == ("app.ship", 2, "start")
        Ship.definition.check()
        assert Ship.definition.input.decode(Ship.encode_input(Order("a"))) == Order("a")

    def test_T2_a_checkpoint_is_typed_by_its_phase(self) -> None:
        codec = Ship.definition.phase("deliver")
        parcel = Parcel("x", 2.0)
        assert codec.decode(codec.encode(parcel)) == parcel
        with pytest.raises(NotJson):
            codec.encode("no parcel")
        with pytest.raises(NotJson):
            Ship.definition.phase("start").encode(parcel)

    def test_T3_a_phase_is_named_by_its_method(self) -> None:
        assert Ship.definition.name_of(Ship().deliver) == "deliver"
        for no_phase in (Ship().helper, Ship().on_abort, Ship.deliver, len):
            with pytest.raises(TaskDefinitionError):
                Ship.definition.name_of(no_phase)
        with pytest.raises(TaskDefinitionError, match="no phase 'helper'"):
            Ship.definition.phase("helper")

    def test_T3_local_types_and_generic_bases_resolve(self) -> None:
        class Point(msgspec.Struct, frozen=True):
            x: int

        class Base(Task[X, list[X]]):
            async def start(self, run: Run[X, list[X], None]) -> Next[list[X]]:
                async with run.commit() as tx:
                    return tx.complete([run.input])

        class Points(Base[Point], kind="app.points"):
            async def more(self, run: Run[Point, list[Point], Point]) -> Next[list[Point]]:
                async with run.commit() as tx:
                    return tx.complete([run.checkpoint])

        Points.definition.check()
        assert Points.definition.result.encode([Point(1)]) == msgspec.Raw(b'[{"x":1}]')
        assert Points.definition.phase("more").decode(msgspec.Raw(b'{"x":3}')) == Point(3)

    def test_T3_types_resolve_when_first_used_and_say_what_is_missing(self) -> None:
        class Odd(Task[None, None], kind="app.odd"):
            async def start(self, run: Run[None, None, NoSuchThing]) -> Next[None]:  # noqa: F821  # pyright: ignore
                async with run.commit() as tx:
                    return tx.complete(None)

        registry = TaskRegistry()
        with pytest.raises(TaskDefinitionError, match=r"Odd \(app.odd\).*NoSuchThing"):
            registry.install(Odd)
        assert registry.find("app.odd") is None

    def test_T3_nonsense_is_refused_where_it_is_written(self) -> None:
        with pytest.raises(TaskDefinitionError, match="first phase"):

            class NoStart(Task[None, None], kind="app.none"):
                pass

        with pytest.raises(TaskDefinitionError, match="reserved"):

            class Reserved(Task[None, None], kind="pi.mine"):
                async def start(self, run: Run[None, None, None]) -> Next[None]: ...

        with pytest.raises(TaskDefinitionError, match="no kind"):

            class Odd(Task[None, None], kind="two words"):
                async def start(self, run: Run[None, None, None]) -> Next[None]: ...

        with pytest.raises(TaskDefinitionError, match="count from 1"):

            class Zero(Task[None, None], kind="app.zero", version=0):
                async def start(self, run: Run[None, None, None]) -> Next[None]: ...

        with pytest.raises(TypeError):

            class Misspelt(Task[None, None], kind="app.m", verison=2):  # pyright: ignore
                async def start(self, run: Run[None, None, None]) -> Next[None]: ...

    def test_T3_a_builtin_may_have_a_reserved_kind(self) -> None:
        class Builtin(Task[None, None], kind="pi.own", builtin=True):
            async def start(self, run: Run[None, None, None]) -> Next[None]: ...

        assert Builtin.kind == "pi.own"


class TestValues:
    @pytest.mark.parametrize(
        "value", [None, True, 0, 1, -(2**63), 1.0, "é", [], [1, 1.0, True, None], {"a": {"b": [2]}}]
    )
    def test_K40_plain_values_come_back_with_their_types(self, value: JsonValue) -> None:
        codec: Codec[JsonValue] = Codec(Any, "it")
        back = codec.decode(codec.encode(value))
        assert repr(back) == repr(value)

    @pytest.mark.parametrize("value", [math.nan, math.inf, {1}, b"x", (1,), {1: 2}, "\ud800", 2**63, object()])
    def test_K35_what_is_not_json_is_refused(self, value: object) -> None:
        with pytest.raises(NotJson):
            Codec(Any, "it").encode(value)
        with pytest.raises(NotJson):
            Codec(Order, "it").encode(Order("a", extra=value))

    def test_K35_a_cycle_is_refused(self) -> None:
        cycle: list[object] = []
        cycle.append(cycle)
        with pytest.raises(NotJson):
            Codec(Any, "it").encode(cycle)
        with pytest.raises(NotJson):
            Codec(Order, "it").encode(Order("a", extra=cycle))

    def test_K39_fields_of_the_wrong_type_are_refused(self) -> None:
        for wrong in (Order("a", count="two"), Order("a", count=1.5), Order(5)):  # pyright: ignore
            with pytest.raises(NotJson, match="it"):
                Codec(Order, "it").encode(wrong)

    def test_K35_types_that_have_no_json_are_refused_at_the_definition(self) -> None:
        class Other(msgspec.Struct):
            id: str

        with pytest.raises(TaskDefinitionError, match="cannot be stored"):
            Codec(Order | Other, "it")

    def test_K32_what_is_decoded_is_a_fresh_value(self) -> None:
        codec: Codec[Any] = Codec(list[int], "it")
        raw = codec.encode([1, 2])
        codec.decode(raw).append(3)
        assert codec.decode(raw) == [1, 2]

    def test_none_is_null(self) -> None:
        assert Codec(None, "it").encode(None) == NULL
        with pytest.raises(NotJson):
            Codec(None, "it").encode(1)


class TestRegistry:
    def test_T30_code_is_found_by_kind_and_replaced(self) -> None:
        registry = TaskRegistry()
        changes: list[int] = []
        registry.on_change(lambda: changes.append(1))
        first, second = Ship(), Ship()
        registry.install(first)
        assert registry.find("app.ship") is first
        registry.install(second)
        assert registry.find("app.ship") is second
        registry.remove("app.ship")
        registry.remove("app.ship")
        assert registry.find("app.ship") is None
        assert len(changes) == 3

    def test_T30_one_bad_definition_leaves_all_out(self) -> None:
        class Base(Task[None, None]):
            pass

        registry = TaskRegistry()
        for bad in (Base, Ship):
            with pytest.raises(TaskDefinitionError):
                registry.install(Ship, bad)
        assert registry.find("app.ship") is None
