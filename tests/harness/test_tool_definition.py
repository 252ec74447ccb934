"""Tools from functions (rules H78 to H85): schema, description, options, results, and the plain call."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import pytest
from pydantic import BaseModel, Field

from perdure.harness.environment import Effects, ExecutionEnvironment
from perdure.harness.messages import Image, Text
from perdure.harness.reconcile import Done, Reconciled
from perdure.harness.tool import (
    AnyTool,
    CallEnded,
    CallStream,
    OutputLimits,
    ToolCall,
    ToolDefinition,
    ToolError,
    ToolResult,
    tool,
)
from perdure.kernel.errors import NotJson
from perdure.kernel.json import JsonValue


@tool(replay="safe")
async def population(city: str, year: int = 2020) -> int:
    """How many people live in a city.

    Args:
        city: Its name.
        year: When.
    """
    return len(city) * year


@tool
def shout(text: str) -> str:
    """Say it loudly."""
    return text.upper()


def schema_of(definition: AnyTool) -> dict[str, object]:
    return msgspec.json.decode(definition.spec.parameters, type=dict)


async def run(definition: AnyTool, **values: object) -> object:
    return await definition.run(values, ToolCall(), None)


async def test_a_tool_is_called_as_its_function() -> None:
    assert await population("Lyon", year=2) == 8
    assert shout("a") == "A"


def test_name_description_and_schema_come_from_the_function() -> None:
    assert population.spec.name == "population"
    assert population.spec.description == "How many people live in a city."
    assert schema_of(population) == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Its name."},
            "year": {"type": "integer", "default": 2020, "description": "When."},
        },
        "required": ["city"],
        "additionalProperties": False,
    }
    assert population.__doc__ is not None
    assert population.__doc__.startswith("How many")


def test_defaults_are_the_careful_ones() -> None:
    assert shout.replay == "unsafe"
    assert shout.effects == "world"
    assert not shout.sequential
    assert shout.output == OutputLimits(max_bytes=50 * 1024, max_lines=2000, keep="tail")


def test_parameters_are_described_by_annotations_first() -> None:
    @tool
    async def find(
        schema: Annotated[str, "a text"],
        copy: Annotated[int, Field(description="a field", ge=1)],
        model_config: Literal["a", "b"] = "a",
    ) -> None:
        """Find.

        Args:
            schema: not this
            model_config: this
        """

    properties = schema_of(find)["properties"]
    assert properties == {
        "schema": {"type": "string", "description": "a text"},
        "copy": {"type": "integer", "minimum": 1, "description": "a field"},
        "model_config": {"enum": ["a", "b"], "type": "string", "default": "a", "description": "this"},
    }


def test_types_of_the_defining_function_are_found() -> None:
    class Point(BaseModel):
        x: int

    @tool
    async def move(to: Point, by: Point | None = None) -> None:
        """Move."""

    assert move.signature.values({"to": {"x": 1}}) == {"to": Point(x=1)}


@tool
async def forward(to: Later) -> None:
    """Name a class that is defined further down."""


class Later(BaseModel):
    y: int


def test_types_of_the_module_may_be_defined_later() -> None:
    assert forward.signature.values({"to": {"y": 1}}) == {"to": Later(y=1)}


def test_a_tool_without_parameters_takes_an_empty_object() -> None:
    @tool
    async def ping() -> str:
        """Ping."""
        return "pong"

    assert schema_of(ping) == {"type": "object", "properties": {}, "additionalProperties": False}


def test_call_and_environment_are_injected_and_not_offered() -> None:
    @tool
    async def work(text: str, call: ToolCall, env: ExecutionEnvironment, maybe: ToolCall | None = None) -> str:
        """Work."""
        return text

    @tool
    async def perhaps(env: ExecutionEnvironment | None) -> str:
        """Work, or not."""
        return "no" if env is None else "yes"

    assert list(schema_of(work)["properties"]) == ["text"]  # pyright: ignore[reportCallIssue,reportArgumentType]
    assert work.signature.needs_environment
    assert not perhaps.signature.needs_environment


def test_functions_that_make_no_tool_are_refused() -> None:
    with pytest.raises(TypeError, match="'anything' needs a type annotation"):

        @tool
        async def untyped(anything) -> None: ...

    with pytest.raises(TypeError, match="'args' must be one with a name of its own, not variadic positional"):

        @tool
        async def many(*args: int) -> None: ...

    with pytest.raises(TypeError, match="not positional-only"):

        @tool
        async def positional(a: int, /) -> None: ...


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="letters, digits"):
        tool(name="a tool")(shout.function)
    with pytest.raises(ValueError, match="replay is one of"):
        tool(replay="sometimes")(shout.function)  # pyright: ignore[reportArgumentType,reportCallIssue]
    with pytest.raises(ValueError, match="timeout_ms must be positive"):
        tool(timeout_ms=0)(shout.function)
    with pytest.raises(ValueError, match="adoptable"):
        tool(adoptable=True)(shout.function)
    with pytest.raises(ValueError, match="a window needs"):
        OutputLimits(max_lines=0)
    with pytest.raises(TypeError, match="unexpected keyword"):
        tool(replays="safe")  # pyright: ignore[reportCallIssue]


def test_an_annotation_that_names_nothing_is_told_at_first_use() -> None:
    @tool
    async def odd(value: Missing) -> None:  # pyright: ignore[reportUndefinedVariable]  # noqa: F821
        """Odd."""

    with pytest.raises(TypeError, match="names 'Missing'"):
        _ = odd.spec


async def test_a_synchronous_tool_runs_in_a_thread() -> None:
    @tool
    def where() -> int:
        """Where it runs."""
        return threading.get_ident()

    assert await run(where) != threading.get_ident()


async def test_cancelling_a_synchronous_tool_waits_for_its_thread() -> None:
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    @tool
    def stubborn() -> None:
        """Take its time."""
        began.set()
        go_on.wait()
        ended.set()

    running = asyncio.ensure_future(run(stubborn))
    await asyncio.to_thread(began.wait)
    running.cancel()
    await asyncio.sleep(0)
    assert not running.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()


@dataclass
class Place:
    name: str
    size: float


class Stored(msgspec.Struct):
    names: list[str]


class Checked(BaseModel):
    x: int


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        (3, "3"),
        (True, "true"),
        ([1, {"a": None}], '[1,{"a":null}]'),
        (Place("Lyon", 1.5), '{"name":"Lyon","size":1.5}'),
        ([Place("Lyon", 2.0)], '[{"name":"Lyon","size":2.0}]'),
        (Stored(["é"]), '{"names":["é"]}'),
        ({"at": Checked(x=1)}, '{"at":{"x":1}}'),
    ],
)
def test_returned_values_become_text(value: object, text: str) -> None:
    assert shout.to_result(value).text == text


def test_what_has_no_json_is_refused() -> None:
    with pytest.raises(ToolError, match="object, which has no JSON"):
        shout.to_result([object()])
    with pytest.raises(NotJson, match="result\\[0\\]"):
        shout.to_result([float("nan")])
    with pytest.raises(NotJson, match="details"):
        ToolResult("x", details={"a": {1}})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="usage"):
        ToolResult("x", usage={"cost": float("inf")})


def test_a_result_may_have_parts_and_more() -> None:
    result = ToolResult([Text("a"), Image("image/png", "AA=="), Text("b")], details={"k": 1})
    assert shout.to_result(result) is result
    assert result.text == "ab"
    assert shout.to_result(None).content is None


def test_results_are_checked_against_the_declared_type() -> None:
    @tool(result=list[int])
    async def numbers() -> list[int]:
        """Numbers."""
        return []

    numbers.check_result(ToolResult("[1, 2]"))
    numbers.check_result(ToolResult("oops", is_error=True))
    with pytest.raises(ToolError, match=r"result\[1\]"):
        numbers.check_result(ToolResult('[1, "a"]'))
    with pytest.raises(ToolError, match="not what numbers declares"):
        numbers.check_result(ToolResult("no json"))


async def test_an_intent_function_takes_the_parameters_it_names() -> None:
    @tool
    async def edit(path: str, text: str, call: ToolCall) -> str:
        """Edit."""
        return f"{call.intent}"

    @edit.intent
    async def prepare(path: str) -> str:
        return f"hash of {path}"

    assert await prepare("a") == "hash of a"
    assert await edit.prepare_intent({"path": "p", "text": "t"}, ToolCall(), None) == "hash of p"
    assert await shout.prepare_intent({"text": "t"}, ToolCall(), None) is None
    with pytest.raises(ValueError, match="has its intent function already"):
        edit.intent(prepare)
    with pytest.raises(TypeError, match="takes size, which the tool does not take"):

        @shout.intent
        async def other(size: int) -> None: ...

    with pytest.raises(TypeError, match=r"shout.intent must be an async function"):
        shout.intent(lambda text: text)


async def test_functions_beside_a_tool_get_its_defaults_for_what_was_not_given() -> None:
    @tool
    async def pay(amount: int = 5, note: str = "", *, call: ToolCall | None = None) -> str:
        """Pay."""
        return f"{amount}{note}"

    @pay.reconcile
    async def look(amount: int, asked: ToolCall, note: str = "own") -> Reconciled:
        return Done(f"{amount} {note} {asked.id}")

    @pay.intent
    async def prepare(amount: int) -> int:
        return amount

    assert await pay.ask_outside({}, ToolCall(id=3), None) == Done("5 own 3")
    assert await pay.ask_outside({"amount": 6, "note": "given"}, ToolCall(id=3), None) == Done("6 given 3")
    assert await pay.prepare_intent({}, ToolCall(), None) == 5
    assert (await look(1, ToolCall(id=2)), await prepare(1)) == (Done("1 own 2"), 1)
    assert (pay.reconciles, shout.reconciles) == (True, False)


async def test_a_call_outside_a_harness_keeps_what_it_shows() -> None:
    call = ToolCall(name="t")
    call.output("a")
    call.output(b"b\n")
    call.details({"done": 1})
    call.diagnostic("slow")
    assert await call.memo("k", 1) == 1
    assert await call.memo("k", 2) == 1
    assert call.stream.end().text == "ab\n"
    assert (call.stream.details, call.stream.diagnostics) == ({"done": 1}, ["slow"])


async def test_an_ended_call_raises_whatever_is_done_with_it() -> None:
    call = ToolCall(id=7, name="t")
    call.end()
    for use in (lambda: call.output("x"), lambda: call.details(1), lambda: call.diagnostic("x")):
        with pytest.raises(CallEnded, match="call 7 of 't'"):
            use()
    with pytest.raises(CallEnded):
        await call.memo("k", 1)


async def test_a_thread_shows_its_output_in_order() -> None:
    call = ToolCall(stream=CallStream(OutputLimits()))

    def work() -> None:
        for number in range(100):
            call.output(f"{number}\n")

    await asyncio.to_thread(work)
    assert call.stream.end().text == "".join(f"{number}\n" for number in range(100))


def test_what_a_call_shows_is_bounded() -> None:
    call = ToolCall()
    with pytest.raises(ValueError, match="at most"):
        call.details("x" * 300_000)
    with pytest.raises(NotJson):
        call.details({1, 2})  # pyright: ignore[reportArgumentType]
    for _ in range(100):
        call.diagnostic("x" * 3_000)
    assert len(call.stream.diagnostics[0]) == 2_000
    with pytest.raises(ValueError, match="at most 100"):
        call.diagnostic("one more")


def test_pydantic_is_not_imported_before_a_tool_is_used() -> None:
    program = (
        "import sys\n"
        "from perdure.harness.tool import tool\n"
        "@tool\n"
        "async def f(a: int) -> int:\n    'F.'\n    return a\n"
        "assert 'pydantic' not in sys.modules, 'imported too early'\n"
        "f.spec\n"
        "assert 'pydantic' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_type_of_a_tool_is_its_functions() -> None:
    definition: ToolDefinition[[str], str] = shout
    assert isinstance(definition, ToolDefinition)


def test_a_tool_may_say_of_each_call_what_it_changes_s159() -> None:
    """Anything, where its function says nothing that is an effect."""

    def which(arguments: Mapping[str, JsonValue]) -> Effects:
        assert isinstance(arguments, dict)
        said = arguments.pop("where")
        assert said == "here" or said == "nowhere"
        return "space" if said == "here" else "nothing"  # pyright: ignore[reportReturnType]  # what it is about

    @tool(effects=which)
    async def go(where: str) -> str:
        return where

    given: list[JsonValue] = [{"where": where} for where in ("here", "nowhere", "there")]
    assert [go.effects_of(arguments) for arguments in given] == ["space", "world", "world"]
    assert given == [{"where": where} for where in ("here", "nowhere", "there")]
    with pytest.raises(ValueError, match=r"effects is one of .* or a plain function"):
        tool(effects="all")(shout.function)  # pyright: ignore[reportArgumentType]
