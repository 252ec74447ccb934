"""Arguments and results of foreign tools, checked against the schema that the server gave (rules H382 and H383)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cached_property
from itertools import islice
from typing import Any, Final, cast

import jsonschema_rs
import msgspec

from perdure.harness.arguments import MAX_PROBLEMS, InvalidArguments, Signature, as_object
from perdure.harness.repair import Schema, repaired
from perdure.harness.tool import ToolResult
from perdure.kernel.errors import NotJson
from perdure.kernel.json import JsonValue, check_json, encode_json
from perdure.tools.mcp.weighing import MAX_STEPS, require_traceable, steps_of

MAX_SCHEMA: Final = 256 * 1024
"""Bytes of JSON that one schema may take."""
BACKTRACKS: Final = 10_000
"""Steps back of one pattern of a schema: some patterns need ever more of them."""
MAX_PATTERN: Final = 1024 * 1024
"""Bytes that one pattern of a schema may take, once it is made ready."""
MAX_TOLD_STEPS: Final = 5_000
"""Of a check whose problems are told: to tell them takes a thousand times as long as to find that there are some."""
MAX_PROBLEM: Final = 300
"""Characters of what is told of one problem; a value stands in it."""

Function = Callable[..., Awaitable[ToolResult]]


class BadSchema(ValueError):
    """A server's schema that nothing can be checked against; the text says why."""


class Checker:
    """Checks values against one schema, in bounded time. Nothing outside of the schema is ever fetched for it."""

    def __init__(self, schema: Schema, *, mask: str | None = None) -> None:
        """``mask`` stands for values in what is told. Raises BadSchema."""
        self._schema = schema
        try:
            check_json(schema, at="schema")
            if len(encode_json(schema)) > MAX_SCHEMA:
                raise BadSchema(f"its schema takes more than {MAX_SCHEMA} bytes")
            require_traceable(schema)
            self._validator = jsonschema_rs.validator_for(
                cast("dict[str, Any]", schema),
                retriever=_fetch_nothing,
                mask=mask,
                pattern_options=jsonschema_rs.FancyRegexOptions(backtrack_limit=BACKTRACKS, size_limit=MAX_PATTERN),
            )
        except NotJson as error:
            raise BadSchema(f"its schema is no JSON: {error}") from None
        except ValueError as error:
            if isinstance(error, BadSchema):
                raise
            raise BadSchema(f"its schema is not valid: {_message(error)}") from None

    def problems(self, value: JsonValue) -> list[str]:
        steps = steps_of(self._schema, value)
        if steps > MAX_STEPS:
            return [f"it takes more than {MAX_STEPS} steps to check by the schema, which is too much"]
        if self._validator.is_valid(cast("Any", value)):
            return []
        if steps > MAX_TOLD_STEPS:
            return ["it does not fit the schema, which is too large to say where"]
        found: list[str] = []
        for error in islice(self._validator.iter_errors(cast("Any", value)), MAX_PROBLEMS + 1):
            where = "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in error.instance_path).lstrip(".")
            found.append(f"{where}: {_message(error)}" if where else _message(error))
        return found


class ForeignSignature(Signature):
    """What a tool of a server takes: one object, as the server's own schema says."""

    def __init__(self, function: Function, *, name: str, schema: Schema) -> None:
        """Raises BadSchema."""
        super().__init__(function, name=name, descriptions={})
        if schema.get("type") != "object":
            raise BadSchema("its schema is not one of an object")
        self._checker = Checker(schema)
        self._foreign = schema

    @cached_property
    def schema(self) -> msgspec.Raw:
        """As the server gave it."""
        return msgspec.Raw(encode_json(self._foreign))

    def read(self, raw: msgspec.Raw) -> dict[str, JsonValue]:
        """The arguments as a model wrote them, repaired where that is plain, and checked. Raises InvalidArguments."""
        arguments = as_object(raw)
        problems = self._problems(arguments)
        if problems:
            changed = repaired(arguments, self._foreign)
            if not isinstance(changed, dict) or self._problems(changed):
                raise InvalidArguments(problems)
            return changed
        return arguments

    def values(self, arguments: JsonValue) -> dict[str, object]:
        """The function's one parameter. Raises InvalidArguments."""
        if not isinstance(arguments, dict):
            raise InvalidArguments(["they must be an object"])
        if problems := self._problems(arguments):
            raise InvalidArguments(problems)
        return {"arguments": arguments}

    def taken(self, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
        """With the defaults that the schema tells: the server makes the rest of it."""
        properties = self._foreign.get("properties")
        known = properties.items() if isinstance(properties, dict) else ()
        defaults = {name: each["default"] for name, each in known if isinstance(each, dict) and "default" in each}
        return {**defaults, **arguments}

    def _problems(self, arguments: dict[str, JsonValue]) -> list[str]:
        try:
            check_json(arguments, at="arguments")
        except NotJson as error:
            return [str(error)]
        return self._checker.problems(arguments)


def _fetch_nothing(uri: str) -> Any:  # Any: what the library has a retriever give
    raise ValueError("it refers to a document elsewhere, and those are not fetched")


def _message(error: ValueError) -> str:
    said: str = getattr(error, "message", str(error))
    return said[:MAX_PROBLEM].encode("utf-8", "replace").decode()
