"""Calls that wait for the user's word: told, and answered by ``y``, ``n`` or ``always``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from perdure.cli.approvals.arguments import argument_lines, who
from perdure.cli.style import Line, line
from perdure.cli.text import lines_of, one_line
from perdure.events import ApprovalDecided, ApprovalRequested, QuestionAsked
from perdure.harness.approval_rules import ApprovalRule, ArgumentIs, add_rule
from perdure.harness.approvals import Wanted, decide
from perdure.harness.documents import LiveTool
from perdure.harness.harness import Harness
from perdure.kernel.json import JsonValue

HOW: Final = "y allows it · n [why] denies it · always allows it from now on"


@dataclass(frozen=True, slots=True)
class Question:
    """A call that waits."""

    task: int
    name: str
    arguments: JsonValue
    digest: str


Word: TypeAlias = Literal["yes", "no", "always"]


@dataclass(frozen=True, slots=True)
class Reply:
    """What the user says to a question."""

    word: Word
    reason: str = ""


def reply_of(text: str) -> Reply | None:
    """None: what was typed is no answer to a question."""
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


def question_lines(event: QuestionAsked) -> list[Line]:
    """What a tool asks a person: it is answered from another terminal."""
    text = [line(f"  {words}") for words in lines_of(event.text)]
    how = f"  perdure questions answer STORE {event.task} ANSWER, from another terminal"
    return [line("? a tool asks and waits for the answer", "warning"), *text, line(how, "dim")]


class Questions:
    """Those of one conversation that are open, in the order in which they were asked."""

    def __init__(self) -> None:
        self._open: dict[int, Question] = {}

    @property
    def first(self) -> Question | None:
        """The one that an answer is about."""
        return next(iter(self._open.values()), None)

    def asked(self, event: ApprovalRequested) -> list[Line]:
        return self._ask(Question(event.task, event.name, event.arguments, event.digest))

    def take_over(self, tools: Mapping[str, LiveTool]) -> list[Line]:
        """Those of a snapshot; what was told of them is not told again."""
        found: dict[int, Question] = {}
        for task, tool in tools.items():
            approval = tool.get("approval")
            if approval is not None and approval["decision"] is None:
                found[int(task)] = Question(int(task), tool["name"], approval["arguments"], approval["digest"])
        for task in self._open.keys() - found.keys():
            del self._open[task]
        return [told for task, question in found.items() if task not in self._open for told in self._ask(question)]

    def decided(self, event: ApprovalDecided) -> list[Line]:
        self._open.pop(event.task, None)
        what = "allowed with other arguments" if event.edited else "allowed" if event.allow else "denied"
        by = f" by {one_line(event.by)}" if event.by else ""
        return [line(f"  {what}{by}", "dim"), *self._next()]

    def over(self, task: int) -> None:
        self._open.pop(task, None)

    def _ask(self, question: Question) -> list[Line]:
        self._open[question.task] = question
        head: Line = (("tool", f"? {one_line(question.name)}"), ("warning", "  waits for your word"))
        lines = [head, *argument_lines(question.arguments, indent="  │ ")]
        return [*lines, line(f"  {HOW}", "dim")] if len(self._open) == 1 else lines

    def _next(self) -> list[Line]:
        following = self.first
        return [] if following is None else [line(f"  next: {one_line(following.name)} · {HOW}", "dim")]


async def answer(harness: Harness, question: Question, reply: Reply) -> list[Line]:
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


def _literal(name: str) -> str:
    """A tool's name as a pattern that fits no other: names have no special characters."""
    assert not any(sign in name for sign in "*?["), "checked where a tool is made"
    return name
