"""A question to a person, as people see it: its text, and what may be answered."""

from __future__ import annotations

from typing import Final

import msgspec

from perdure.cli.exact import exact_json
from perdure.cli.text import counted, lines_of, one_line, shortened
from perdure.harness.repair import Schema
from perdure.kernel.json import JsonValue, encode_json

MOST_LINES: Final = 100
"""Lines of a question that are shown."""
WIDEST: Final = 4_000
"""Characters of one of them, and of what an answer has to be."""


def question_lines(text: str) -> list[str]:
    """The text, each line fit to be printed. What does not fit is counted, never left out silently."""
    lines = lines_of(text)
    shown = [shortened(each, WIDEST) for each in lines[:MOST_LINES]]
    more = len(lines) - MOST_LINES
    if more > 0 or any(len(each) > WIDEST for each in lines[:MOST_LINES]):
        what = counted(more, "more line") if more > 0 else "lines that are too long"
        shown.append(f"┆ {what}: perdure questions ls --json shows all")
    return shown


def choices_of(schema: Schema) -> list[JsonValue]:
    """What may be answered, if there are only these; else nothing."""
    if "const" in schema:
        return [schema["const"]]
    found = schema.get("enum")
    return found if isinstance(found, list) else []


def choice_text(choice: JsonValue) -> str:
    return choice if isinstance(choice, str) else msgspec.json.encode(choice).decode()


def answer_words(schema: Schema) -> str:
    """What an answer has to be: its choices, or its JSON Schema."""
    choices = choices_of(schema)
    if choices:
        words = ", ".join(exact_json(choice) for choice in choices)
        return shortened(words if len(choices) == 1 else f"one of {words}", WIDEST)
    return shortened(one_line(encode_json(schema).decode()), WIDEST)
