"""What waits for the user: calls for a word (``y``, ``n``, ``always``), and questions for an answer.

One after the other is asked, the oldest first. What is typed is about the one that stood on the screen when its line
was begun, and about no other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from perdure.cli.approvals.arguments import argument_lines, who
from perdure.cli.asked import answer_words, choice_text, choices_of, question_lines
from perdure.cli.errors import CommandError
from perdure.cli.exact import exact, exact_words
from perdure.cli.style import Line, line
from perdure.cli.text import counted, shortened
from perdure.events import ApprovalDecided, ApprovalRequested, QuestionAsked, QuestionOver
from perdure.harness.approval_rules import ApprovalRule, ArgumentIs, add_rule
from perdure.harness.approvals import Question as WaitingCall
from perdure.harness.approvals import Wanted, decide
from perdure.harness.documents import LiveTool
from perdure.harness.harness import Harness
from perdure.harness.person import PersonQuestion, WantedAnswer
from perdure.harness.person import answer as store_answer
from perdure.harness.repair import Schema
from perdure.kernel.json import JsonValue
from perdure.kernel.records import to_raw

HOW: Final = "y allows it · n [why] denies it · always allows it from now on"
ANSWER: Final = "Enter answers · /later does not now"
CHOOSE: Final = "Enter answers, with a number or a text · /later does not now"
MOST_CHOICES: Final = 100
"""Choices that are shown."""
WIDEST: Final = 500
"""Characters of one of them, or of an answer."""
MOST_SCHEMA: Final = 200
"""Characters of what an answer has to be, where one is typed."""
MOST_ANSWERED: Final = 1_000
"""Questions that were answered here, and are not said to have been answered elsewhere."""


@dataclass(frozen=True, slots=True)
class Question:
    """A call that waits for a word."""

    task: int
    name: str
    arguments: JsonValue = field(compare=False)
    digest: str

    @property
    def how(self) -> str:
        return HOW


@dataclass(frozen=True, slots=True)
class Asking:
    """A question to a person that waits for an answer."""

    task: int
    name: str
    """Of the tool that asks."""
    text: str
    schema: Schema = field(compare=False)

    @property
    def how(self) -> str:
        if choices_of(self.schema):
            return CHOOSE
        if self.schema.get("type") == "string":
            return ANSWER
        return f"{ANSWER} · it is {self.shape}"

    @property
    def shape(self) -> str:
        """What an answer has to be."""
        return shortened(answer_words(self.schema), MOST_SCHEMA)


Asked: TypeAlias = Question | Asking
Find: TypeAlias = Callable[[int], PersonQuestion | WaitingCall | None]
"""What can be answered or decided now, by its task."""
Word: TypeAlias = Literal["yes", "no", "always"]


@dataclass(frozen=True, slots=True)
class Reply:
    """What the user says about a call."""

    word: Word
    reason: str = ""


def reply_of(text: str) -> Reply | None:
    """None: what was typed is no word about a call."""
    word, _, rest = text.strip().partition(" ")
    match word.lower(), rest.strip():
        case (("y" | "yes"), ""):
            return Reply("yes")
        case "always", "":
            return Reply("always")
        case (("n" | "no"), reason):
            return Reply("no", reason)
        case _:
            return None


def chosen(schema: Schema, text: str) -> JsonValue:
    """The answer that was typed: the text, or the choice that it is the text or the number of. Raises CommandError."""
    choices = choices_of(schema)
    if not choices:
        return text
    texts = [choice_text(choice) for choice in choices]
    typed = text.strip()
    for wanted in (text, typed):
        if wanted in texts:
            return choices[texts.index(wanted)]
    number = re.fullmatch(r"(#?)([0-9]{1,6})", typed)
    if number is not None and (number[1] or not _mark(texts)) and 1 <= int(number[2]) <= len(choices):
        return choices[int(number[2]) - 1]
    alike = [at for at, each in enumerate(texts) if each.strip().casefold() == typed.casefold()]
    if len(alike) == 1:
        return choices[alike[0]]
    mark = _mark(texts)
    raise CommandError(f"that is none of the choices: type a number from {mark}1 to {mark}{len(texts)}, or its text")


def _mark(texts: list[str]) -> str:
    """What stands before a number, so that it is not taken for the text of another choice."""
    return "#" if any(re.fullmatch(r"#?[0-9]+", text.strip()) for text in texts) else ""


class Questions:
    """Those of one conversation that are open, in the order in which they were asked."""

    def __init__(self, find: Find | None = None) -> None:
        """``find``: what is open now; without it a question is taken as the event has it."""
        self._find = find
        self._open: dict[int, Asked] = {}
        self._aside: dict[int, Asked] = {}
        self._told: Asked | None = None
        """What was presented last."""
        self._answered: dict[int, None] = {}

    @property
    def first(self) -> Asked | None:
        """The one that is asked now. None while it is over and not told to be: what ends with it is not asked."""
        asked = next(iter(self._open.values()), None)
        return None if asked is None or (self._find is not None and self._find(asked.task) is None) else asked

    @property
    def behind(self) -> int:
        """How many wait behind it."""
        return max(0, len(self._open) - 1)

    @property
    def aside(self) -> int:
        """How many are not to be answered now."""
        return len(self._aside)

    def present(self) -> list[Line] | None:
        """What is to be told of the one that is asked now; None: it is told already."""
        first, told = self.first, self._told
        if first is told:
            return None
        self._told = first
        return [] if first is None else _lines(first)

    # --- what happens ------------------------------------------------------------------------------------------------

    def asked(self, event: ApprovalRequested | QuestionAsked, name: str = "") -> None:
        """``name``: of the tool that asks a question."""
        if isinstance(event, ApprovalRequested):
            self._open[event.task] = Question(event.task, event.name, event.arguments, event.digest)
        elif (asking := self._asking(event.task, name, event.text)) is not None:
            self._open[event.task] = asking

    def _asking(self, task: int, name: str, text: str) -> Asking | None:
        """None: it is over by now."""
        if self._find is None:
            return Asking(task, name, text, {"type": "string"})
        found = self._find(task)
        return Asking(task, found.tool, found.text, found.schema) if isinstance(found, PersonQuestion) else None

    def take_over(self, tools: Mapping[str, LiveTool]) -> list[Line]:
        """Those of a snapshot; what is to be said of those that are gone."""
        found: dict[int, Asked] = {}
        since: dict[int, int] = {}
        for call, tool in tools.items():
            approval = tool.get("approval")
            if approval is not None and approval["decision"] is None:
                task = int(call)
                found[task] = Question(task, tool["name"], approval["arguments"], approval["digest"])
                since[task] = approval["asked_at"]
            for key, question in tool.get("questions", {}).items():
                asking = self._asking(int(key), tool["name"], question["text"])
                if asking is not None:
                    found[int(key)] = asking
                    open = None if self._find is None else self._find(int(key))
                    since[int(key)] = 0 if open is None else open.asked_at
        gone = [line(f"  {_named(task)} is over", "dim") for task in self._questions() if task not in found]
        order = sorted(found, key=lambda task: (since[task], task))
        known = {**self._open, **self._aside}
        self._aside = {task: asked for task, asked in self._aside.items() if task in found}
        # What is asked already stays the one that it is.
        self._open = {task: known.get(task, found[task]) for task in order if task not in self._aside}
        return gone

    def _questions(self) -> list[int]:
        return [task for task, asked in [*self._open.items(), *self._aside.items()] if isinstance(asked, Asking)]

    def decided(self, event: ApprovalDecided) -> list[Line]:
        self.over(event.task)
        what = "allowed with other arguments" if event.edited else "allowed" if event.allow else "denied"
        by = f" by {exact(event.by)}" if event.by else ""
        return [line(f"  {what}{by}", "dim")]

    def question_over(self, event: QuestionOver) -> list[Line]:
        """What is to be said of it, unless it was answered here."""
        if not self.over(event.task) or event.task in self._answered:
            return []
        words = {
            "answered": "was answered elsewhere",
            "expired": "expired: nobody answered in time",
            "withdrawn": "was withdrawn",
        }
        return [line(f"  {_named(event.task)} {words[event.outcome]}", "warning")]

    def over(self, task: int) -> bool:
        """Whether it was open."""
        return self._open.pop(task, None) is not None or self._aside.pop(task, None) is not None

    # --- what the user does ------------------------------------------------------------------------------------------

    def is_open(self, asked: Asked) -> bool:
        return asked.task in self._open

    def answered_here(self, task: int) -> None:
        self.over(task)
        self._answered[task] = None
        while len(self._answered) > MOST_ANSWERED:
            del self._answered[next(iter(self._answered))]

    def set_aside(self) -> Asked | None:
        """The one that is asked now is not to be answered now."""
        first = self.first
        if first is not None:
            self._aside[first.task] = self._open.pop(first.task)
        return first

    def bring_back(self) -> int:
        """How many of those are asked again, before all others."""
        count = len(self._aside)
        self._open = {**dict(sorted(self._aside.items())), **self._open}
        self._aside = {}
        return count


def _named(task: int) -> str:
    return f"question {task}"


def _lines(asked: Asked) -> list[Line]:
    if isinstance(asked, Question):
        head: Line = (("tool", f"? {exact(asked.name)}"), ("warning", "  waits for your word"))
        return [head, *argument_lines(asked.arguments, indent="  │ ")]
    head = (("tool", f"? {exact(asked.name)}"), ("warning", f"  asks you, question {asked.task}"))
    return [head, *(line(f"  │ {text}") for text in question_lines(asked.text)), *_choice_lines(asked.schema)]


def _choice_lines(schema: Schema) -> list[Line]:
    texts = [choice_text(choice) for choice in choices_of(schema)]
    mark = _mark(texts)
    lines: list[Line] = []
    for number, text in enumerate(texts[:MOST_CHOICES], 1):
        lines.append((("bold", f"  {mark}{number}"), ("plain", f"  {_whole(text)}")))
    more = len(texts) - MOST_CHOICES
    return [*lines, line(f"  ┆ {counted(more, 'more choice')}", "dim")] if more > 0 else lines


def answer_line(value: JsonValue) -> Line:
    """What was answered here."""
    return (("dim", "  answered: "), ("user", _whole(choice_text(value))))


def _whole(answer: str) -> str:
    """On one line. Not as a terminal would show it at the end: what is overwritten there is answered all the same."""
    return exact_words(answer, WIDEST)


async def decide_here(harness: Harness, question: Question, reply: Reply) -> list[Line]:
    """Decide, and make the rule that ``always`` asks for, both or neither. Raises what deciding raises."""
    wanted = Wanted(task=question.task, allow=reply.word != "no", digest=question.digest, reason=reply.reason, by=who())
    async with harness.session.commit() as tx:
        if not await decide(harness, tx, wanted):
            return [line("  it was decided already", "dim")]
        if reply.word != "always" or not isinstance(question.arguments, dict):
            return []
        exact = {name: ArgumentIs(value) for name, value in question.arguments.items()}
        rule = await add_rule(
            tx, ApprovalRule(tool=_literal(question.name), arguments={**exact}, only=True, by=who(), note="always")
        )
    words = f"  rule {rule.id} allows exactly this from now on; perdure approvals rules rm takes it back"
    return [line(words, "dim")]


async def answer_here(harness: Harness, asking: Asking, value: JsonValue) -> bool:
    """Answer; False if that was done already. Raises AnswerRefused, NotJson, NotFound."""
    async with harness.session.commit() as tx:
        return await store_answer(harness, tx, WantedAnswer(task=asking.task, value=to_raw(value)))


def _literal(name: str) -> str:
    """A tool's name as a pattern that fits no other: names have no special characters."""
    assert not any(sign in name for sign in "*?["), "checked where a tool is made"
    return name
