"""Plain mistakes in what a model wrote as arguments, put right by the schema (rules H86, H320 and H321).

Pure, and asked only about what does not fit as it is. What could be meant in two ways is left alone: the model is told
of it and corrects itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final, TypeAlias, cast

from perdure.kernel.json import JsonValue, check_json

Schema: TypeAlias = dict[str, JsonValue]
"""A JSON Schema, as pydantic or an MCP server writes it. A keyword that is not known here allows anything."""

MAX_DEPTH: Final = 40
"""Levels of schema that are looked at; below that a value is left as it is."""
MAX_STEPS: Final = 100_000
"""Looks at a value by a schema that repairing one may take: unions below one another multiply. With more it is left
as it is."""
STEP: Final = 64
"""Characters of a text that are read as JSON in one step: each branch of a union reads it."""
BOOLEANS: Final = {"true": True, "yes": True, "y": True, "false": False, "no": False, "n": False}
"""By their texts in lower case."""

_FENCE = "```"
_LANGUAGE = re.compile(r"[A-Za-z0-9]*")
# A text without its end is one token too: else each quotation mark in it would be looked at as the beginning of one.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"?|,(?=\s*[\]}])', re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d{0,17})(?P<rest>\.\d{1,17})?(?:[eE][-+]?\d{1,3})?")


def json_in_text(text: str) -> JsonValue:
    """The JSON in a text, perhaps fenced, with line breaks inside its strings or a comma before a closing bracket.
    Raises ValueError."""
    text = text.strip()
    if not text:
        return {}
    text = unfenced(text)
    try:
        value = _parsed(text)
    except ValueError as error:
        try:
            value = _parsed(_without_last_commas(text))
        except ValueError:
            raise error from None
    check_json(value, at="arguments")
    return cast("JsonValue", value)


def unfenced(text: str) -> str:
    """What is inside a fence that is around a whole text, without the name of its language; else the text."""
    if len(text) < 2 * len(_FENCE) or not (text.startswith(_FENCE) and text.endswith(_FENCE)):
        return text
    language = _LANGUAGE.match(text, len(_FENCE))
    return text[len(_FENCE) if language is None else language.end() : -len(_FENCE)].strip()


def _parsed(text: str) -> object:
    try:
        return json.loads(text, strict=False, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _without_last_commas(text: str) -> str:
    return _TOKEN.sub(lambda found: "" if found[0] == "," else found[0], text)


def repaired(value: JsonValue, schema: Schema) -> JsonValue:
    """The value with what is plainly mistaken put right. The value itself if there is nothing of the kind; never
    changed in place."""
    try:
        return _Repair(schema).repaired(value, schema, 0)
    except _TooMuch:
        return value


def fits(value: JsonValue, schema: Schema) -> bool:
    """Whether a value is of the shape that a schema wants: its types, choices and keys. Bounds and patterns are not
    looked at, and a value that takes more than ``MAX_STEPS`` fits."""
    try:
        return _Repair(schema).fits(value, schema, 0)
    except _TooMuch:
        return True


class _TooMuch(Exception):
    """More steps than are taken."""


class _Repair:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._steps = 0

    def _step(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise _TooMuch

    # --- what a schema says ----------------------------------------------------------------------------------

    def _resolved(self, schema: JsonValue) -> Schema:
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict):
                return {}  # true: anything
            reference = schema.get("$ref")
            if not isinstance(reference, str):
                return schema
            found: JsonValue = self._root
            for step in filter(None, reference.removeprefix("#").split("/")):
                found = found.get(step) if isinstance(found, dict) else None
            schema = found
        return {}

    def _branches(self, schema: Schema) -> Sequence[JsonValue]:
        """What it may be one of; empty: it is no union."""
        for keyword in ("anyOf", "oneOf"):
            branches = schema.get(keyword)
            if isinstance(branches, list):
                return branches
        types = schema.get("type")
        if isinstance(types, list):
            return [{**schema, "type": name} for name in types]
        return ()

    def fits(self, value: JsonValue, schema: JsonValue, depth: int) -> bool:
        self._step()
        if depth > MAX_DEPTH:
            return True
        schema = self._resolved(schema)
        branches = self._branches(schema)
        if branches and not any(self.fits(value, branch, depth + 1) for branch in branches):
            return False
        if "const" in schema and not _same(value, schema["const"]):
            return False
        choices = schema.get("enum")
        if isinstance(choices, list) and not any(_same(value, choice) for choice in choices):
            return False
        if not branches and not _is_of(value, schema.get("type")):
            return False
        if isinstance(value, list):
            return all(self.fits(item, self._item(schema, at), depth + 1) for at, item in enumerate(value))
        if isinstance(value, dict):
            required = schema.get("required")
            if isinstance(required, list) and any(name not in value for name in required):
                return False
            return all(self._key_fits(schema, name, item, depth) for name, item in value.items())
        return True

    def _key_fits(self, schema: Schema, name: str, item: JsonValue, depth: int) -> bool:
        wanted = self._property(schema, name)
        return wanted is not False and self.fits(item, wanted, depth + 1)

    def _property(self, schema: Schema, name: str) -> JsonValue:
        """The schema of a key; False: there is no such key."""
        properties = schema.get("properties")
        if isinstance(properties, dict) and name in properties:
            return properties[name]
        if "patternProperties" in schema:
            return True
        return schema.get("additionalProperties", True)

    def _item(self, schema: Schema, at: int) -> JsonValue:
        prefix = schema.get("prefixItems")
        if isinstance(prefix, list) and at < len(prefix):
            return prefix[at]
        return schema.get("items", True)

    # --- what is put right -----------------------------------------------------------------------------------

    def repaired(self, value: JsonValue, schema: JsonValue, depth: int) -> JsonValue:
        if depth > MAX_DEPTH or self.fits(value, schema, depth):
            return value
        schema = self._resolved(schema)
        branches = self._branches(schema)
        if branches:
            for branch in branches:
                candidate = self.repaired(value, branch, depth + 1)
                if candidate is not value and self.fits(candidate, branch, depth + 1):
                    return candidate
            return value
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(choices, list):
            return self._chosen(value, choices)
        kind = schema.get("type")
        match kind:
            case "object":
                return self._object(value, schema, depth)
            case "array":
                return self._array(value, schema, depth)
            case "integer" | "number" if isinstance(value, str):
                number = _number(value)
                return value if number is None or not _is_of(number, kind) else number
            case "boolean" if isinstance(value, str):
                return BOOLEANS.get(value.strip().lower(), value)
            case "null" if value in ("null", "None"):
                return None
            case "string" if type(value) in (int, float):
                return json.dumps(value)
            case _:
                return value

    def _chosen(self, value: JsonValue, choices: Sequence[JsonValue]) -> JsonValue:
        """The one choice that the value is the text of, or that is the text of the value."""
        found = [choice for choice in choices if _text_of(choice) == _text_of(value)]
        return found[0] if len(found) == 1 and isinstance(value, (str, int, float)) else value

    def _object(self, value: JsonValue, schema: Schema, depth: int) -> JsonValue:
        given = self._unpacked(value, dict)
        if not isinstance(given, dict):
            return value
        required = schema.get("required")
        changed: dict[str, JsonValue] = {}
        for name, item in given.items():
            wanted = self._property(schema, name)
            if wanted is False:
                changed[name] = item  # the model is told that there is no such key
                continue
            repaired = self.repaired(item, wanted, depth + 1)
            left_out = isinstance(required, list) and name in required
            if repaired is None and not left_out and not self.fits(None, wanted, depth + 1):
                continue  # nothing was meant: it is as if it had not been given
            changed[name] = repaired
        same = len(changed) == len(given) and all(changed[name] is given[name] for name in changed)
        return given if same else changed

    def _array(self, value: JsonValue, schema: Schema, depth: int) -> JsonValue:
        given = self._unpacked(value, list)
        if not isinstance(given, list):
            if value is None or (isinstance(value, str) and value.lstrip()[:1] == "["):
                return value
            single = self.repaired(value, self._item(schema, 0), depth + 1)
            return [single] if self.fits(single, self._item(schema, 0), depth + 1) else value
        changed = [self.repaired(item, self._item(schema, at), depth + 1) for at, item in enumerate(given)]
        return given if all(new is old for new, old in zip(changed, given, strict=True)) else changed

    def _unpacked(self, value: JsonValue, wanted: type[list[JsonValue]] | type[dict[str, JsonValue]]) -> JsonValue:
        """What a text holds, if that is what was wanted."""
        if isinstance(value, str) and value.lstrip()[:1] in ("{", "[", "`"):
            self._step(len(value) // STEP)
            try:
                found = json_in_text(value)
            except ValueError:
                return value
            return found if isinstance(found, wanted) else value
        return value


def _number(text: str) -> int | float | None:
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        return None
    number = json.loads(found[0])
    return number if isinstance(number, int) or abs(number) != float("inf") else None


def _text_of(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _is_of(value: JsonValue, kind: JsonValue | object) -> bool:
    match kind:
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            return type(value) is int or (type(value) is float and value.is_integer())
        case "number":
            return type(value) in (int, float)
        case _:
            return True


def _same(one: JsonValue, other: JsonValue) -> bool:
    """Equal as JSON: true is not 1."""
    return isinstance(one, bool) == isinstance(other, bool) and one == other
