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

_NO_SCHEMAS: Final = frozenset({"const", "default", "enum", "example", "examples"})
_SAME_LISTS: Final = ("allOf", "anyOf", "oneOf")
_SAME: Final = ("not", "if", "then", "else")
_SAME_MAPS: Final = ("dependentSchemas", "dependencies")
_OF_ITEMS: Final = ("additionalItems", "contains", "unevaluatedItems")
_OF_KEYS: Final = ("additionalProperties", "unevaluatedProperties")


class Untraceable(ValueError):
    """A schema whose references are not followed here; the text says which."""


def require_traceable(root: Schema) -> None:
    """Raises Untraceable for a schema with references other than to a place in itself, told from its beginning."""
    base = "id" if "draft-04" in str(root.get("$schema")) else "$id"
    stack: list[JsonValue] = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack += node
        elif isinstance(node, dict):
            reference = node.get("$ref")
            if isinstance(reference, str) and _at(root, reference) is None:
                raise Untraceable(f"it refers to {reference[:80]!r}, which is no place in it")
            if any(isinstance(node.get(word), str) for word in ("$dynamicRef", "$recursiveRef")) or (
                node is not root and isinstance(node.get(base), str)
            ):
                raise Untraceable("it has schemas with addresses of their own, which are not followed")
            stack += [each for key, each in node.items() if key not in _NO_SCHEMAS]


def steps_of(root: Schema, value: JsonValue) -> int:
    """How many looks checking a value against a traceable schema takes; counted up to a little above ``MAX_STEPS``."""
    steps = 0
    stack: list[tuple[JsonValue, JsonValue]] = [(root, value)]
    while stack:
        schema, at = stack.pop()
        if isinstance(schema, dict):
            if isinstance(at, str) and "pattern" in schema:
                steps += len(at) // CHARACTERS_A_STEP
            for look in _looks(root, schema, at):
                steps += 1
                if steps > MAX_STEPS:
                    return steps
                stack.append(look)
    return steps


def _looks(root: Schema, schema: Schema, value: JsonValue) -> Iterator[tuple[JsonValue, JsonValue]]:
    """What of the value is looked at next, by which schemas; rather one too many."""
    reference = schema.get("$ref")
    if isinstance(reference, str):
        yield _at(root, reference), value
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
    everywhere = [
        *_map(schema.get("patternProperties")).values(),
        *(schema[word] for word in _OF_KEYS if word in schema),
    ]
    for key, item in value.items():
        if key in named:
            yield named[key], item
        if "propertyNames" in schema:
            yield schema["propertyNames"], key
        for each in everywhere:
            yield each, item


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
