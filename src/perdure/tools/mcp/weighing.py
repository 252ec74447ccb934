"""How much work a check against a foreign schema is, told before it is done (rule H396).

A few hundred bytes of schema can make a check take years: branches below branches multiply, and so does what refers to
itself in two branches at once. The checking library knows no deadline, so each look at a value by a schema is counted
here first, every branch taken, until there are too many.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from urllib.parse import unquote

from perdure.harness.repair import Schema
from perdure.kernel.json import JsonValue

MAX_STEPS: Final = 100_000
"""Looks at a value by a schema that one check may take."""
CHARACTERS_A_STEP: Final = 16
"""Of a text that a pattern is looked for in."""
COUNTED_A_STEP: Final = 1024
"""Characters of a text that are only counted."""
WORDS_A_STEP: Final = 16
"""Names or values of the schema, or items of a list, that are compared with each other."""

_NO_SCHEMAS: Final = frozenset({"const", "default", "enum", "example", "examples"})
_BY_NAME: Final = frozenset(
    {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}
)
_SAME_LISTS: Final = ("allOf", "anyOf", "oneOf")
_SAME: Final = ("not", "if", "then", "else")
_SAME_MAPS: Final = ("dependentSchemas", "dependencies")
_OF_ITEMS: Final = ("additionalItems", "contains", "unevaluatedItems")
_OF_KEYS: Final = ("additionalProperties", "unevaluatedProperties")
_ADDRESSES: Final = frozenset({"$dynamicRef", "$id", "$recursiveRef", "$ref", "$schema", "id"})


class Untraceable(ValueError):
    """A schema whose references are not followed here; the text says which."""


def require_traceable(root: Schema) -> None:
    """Raises Untraceable for a schema with references other than to a place in itself, told from its beginning."""
    places = _Places(root)
    stack: list[tuple[JsonValue, bool]] = [(root, False)]
    while stack:
        node, by_name = stack.pop()
        if isinstance(node, list):
            stack += [(each, False) for each in node]
        elif isinstance(node, dict):
            if not by_name:
                places.require_traceable(node)
            for key, each in node.items():
                if by_name or key not in _NO_SCHEMAS:
                    stack.append((each, not by_name and key in _BY_NAME))


def steps_of(root: Schema, value: JsonValue) -> int:
    """How many looks checking a value against a schema takes; counted up to a little above ``MAX_STEPS``. More than
    these too where it leads to a schema that is not traceable: a reference may lead to what stands for a value."""
    places = _Places(root)
    steps = 0
    stack: list[tuple[JsonValue, JsonValue]] = [(root, value)]
    while stack:
        schema, at = stack.pop()
        if isinstance(schema, dict):
            try:
                places.require_traceable(schema)
            except Untraceable:
                return MAX_STEPS + 1
            steps += _own_steps(schema, at)
            if steps > MAX_STEPS:
                return steps
            for look in _looks(places, schema, at):
                steps += 1
                if steps > MAX_STEPS:
                    return steps
                stack.append(look)
    return steps


class _Places:
    """Where references of a schema lead, each found once: their texts may be long."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._old = _is_old(root)
        self._found: dict[str, JsonValue] = {}

    def at(self, reference: str) -> JsonValue:
        if reference not in self._found:
            self._found[reference] = _at(self._root, reference)
        return self._found[reference]

    def require_traceable(self, node: Schema) -> None:
        """Raises Untraceable for what this schema itself says."""
        if not node.keys() & _ADDRESSES:
            return
        reference = node.get("$ref")
        if isinstance(reference, str) and self.at(reference) is None:
            raise Untraceable(f"it refers to {reference[:80]!r}, which is no place in it")
        if (
            isinstance(node.get("$dynamicRef"), str)
            or isinstance(node.get("$recursiveRef"), str)
            or (
                node is not self._root
                and (
                    isinstance(node.get("$id"), str) or _is_old(node) or (self._old and isinstance(node.get("id"), str))
                )
            )
        ):
            raise Untraceable("it has schemas with addresses of their own, which are not followed")


def _is_old(schema: Schema) -> bool:
    """Whether it says that ``id`` is the address of a schema."""
    version = schema.get("$schema")
    return isinstance(version, str) and "draft-04" in version[:80]


def _own_steps(schema: Schema, value: JsonValue) -> int:
    """What looking at this value takes beyond one step, without what is in it."""
    steps = len(_list(schema.get("enum"))) // WORDS_A_STEP
    match value:
        case str():
            if "pattern" in schema or "format" in schema:
                steps += len(value) // CHARACTERS_A_STEP
            if "maxLength" in schema or "minLength" in schema:
                steps += len(value) // COUNTED_A_STEP
        case list():
            if "uniqueItems" in schema:
                steps += len(value) // WORDS_A_STEP
        case dict():
            steps += min(len(_map(schema.get("properties"))), len(value)) // WORDS_A_STEP
            steps += len(_list(schema.get("required"))) // WORDS_A_STEP
            if patterns := len(_map(schema.get("patternProperties"))):
                steps += patterns // WORDS_A_STEP + patterns * sum(map(len, value)) // CHARACTERS_A_STEP
        case _:
            pass
    return steps


def _looks(places: _Places, schema: Schema, value: JsonValue) -> Iterator[tuple[JsonValue, JsonValue]]:
    """What of the value is looked at next, by which schemas; rather one too many."""
    reference = schema.get("$ref")
    if isinstance(reference, str):
        yield places.at(reference), value
    for word in _SAME_LISTS:
        for each in _list(schema.get(word)):
            yield each, value
    for word in _SAME:
        if word in schema:
            yield schema[word], value
    for word in _SAME_MAPS:
        for each in _map(schema.get(word)).values():
            yield each, value
    if isinstance(value, list):
        yield from _looks_at_items(schema, value)
    elif isinstance(value, dict):
        yield from _looks_at_keys(schema, value)


def _looks_at_items(schema: Schema, value: list[JsonValue]) -> Iterator[tuple[JsonValue, JsonValue]]:
    items = schema.get("items")
    yield from zip(_list(items), value, strict=False)
    yield from zip(_list(schema.get("prefixItems")), value, strict=False)
    everywhere = [schema[word] for word in _OF_ITEMS if word in schema]
    if isinstance(items, dict):
        everywhere.append(items)
    for each in everywhere:
        for item in value:
            yield each, item


def _looks_at_keys(schema: Schema, value: dict[str, JsonValue]) -> Iterator[tuple[JsonValue, JsonValue]]:
    named = _map(schema.get("properties"))
    for key in named if len(named) < len(value) else value:
        if key in named and key in value:
            yield named[key], value[key]
    if "propertyNames" in schema:
        for key in value:
            yield schema["propertyNames"], key
    for each in _map(schema.get("patternProperties")).values():
        for item in value.values():
            yield each, item
    for word in _OF_KEYS:
        if word in schema:
            for item in value.values():
                yield schema[word], item


def _at(root: Schema, reference: str) -> JsonValue:
    """What is at a place in the schema; None: there is nothing."""
    if not (reference == "#" or reference.startswith("#/")):
        return None
    found: JsonValue = root
    for step in reference[2:].split("/") if len(reference) > 1 else ():
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        match found:
            case dict():
                found = found.get(step)
            case list() if step.isdecimal() and int(step) < len(found):
                found = found[int(step)]
            case _:
                return None
    return found


def _list(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else []


def _map(value: JsonValue) -> dict[str, JsonValue]:
    return value if isinstance(value, dict) else {}
