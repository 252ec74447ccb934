"""What is typed: an input, a steering input, or a command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from perdure.cli.errors import CommandError
from perdure.cli.style import Line, line
from perdure.harness.model import ThinkingLevel

Name: TypeAlias = Literal["help", "name", "model", "thinking", "compact", "reset", "answer", "later", "abort", "quit"]

HELP: Final = (
    ("Enter", "sends; while the model works: queues for after its answer"),
    ("!text", "steers: joins the run after the calls that are under way"),
    ("Ctrl-S, Alt-Enter", "steer with what is typed"),
    ("\\ Enter", "goes on in a new line"),
    ("Ctrl-C", "aborts, and takes back what is queued; again: leaves"),
    ("/name [text]", "names the conversation, or says its name"),
    ("/model [name]", "asks provider:name from now on, or says who is asked"),
    ("/thinking [level]", "lets the model think so long from now on, or says how long it may"),
    ("/compact [text]", "sums up the older part of the model's context; the text says what matters"),
    ("/reset [text]", "begins the model's context anew, with this text"),
    ("/later", "leaves the question for later; what is typed then is sent as ever"),
    ("/answer [text]", "answers the question; without a text those for later are asked again"),
    ("/abort", "what Ctrl-C does"),
    ("/quit", "leaves; what runs goes on at the next start"),
)


@dataclass(frozen=True, slots=True)
class Command:
    name: Name
    argument: str


@dataclass(frozen=True, slots=True)
class Said:
    text: str
    steer: bool


def parse(text: str, *, steer: bool) -> Command | Said:
    """A line that begins with a space is sent as it is. Raises CommandError for a command that is none."""
    if text.startswith(" "):
        return Said(text[1:], steer)
    if text.startswith("!"):
        return Said(text[1:].strip(), True)
    if not text.startswith("/"):
        return Said(text, steer)
    word, _, argument = text[1:].partition(" ")
    for name in get_args(Name):
        if word == name:
            return Command(name, argument.strip())
    raise CommandError(f"there is no command /{word}; /help lists them. To send it as text, begin with a space")


def level(text: str) -> ThinkingLevel:
    """A thinking level by its name. Raises CommandError for one that is none."""
    for name in get_args(ThinkingLevel):
        if text == name:
            return name
    raise CommandError(f"thinking is one of {', '.join(get_args(ThinkingLevel))}, not {text!r}")


def help_lines() -> list[Line]:
    width = max(len(keys) for keys, _ in HELP)
    lines: list[Line] = [(("bold", f"  {keys.ljust(width)}"), ("plain", f"  {what}")) for keys, what in HELP]
    return [*lines, line("  A line that begins with a space is sent as it is.", "dim")]
