"""``perdure approvals rules``: which calls are decided in place of a person."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import typer

from perdure.cli.approvals.arguments import who
from perdure.cli.approvals.ask import KEPT, NOT_YET, done
from perdure.cli.errors import CommandError
from perdure.cli.exact import ascii_json, exact_json, exact_name
from perdure.cli.stores import looking
from perdure.cli.text import when
from perdure.harness.approval_rules import (
    ApprovalRule,
    ApprovalRules,
    ArgumentBelow,
    ArgumentIs,
    ArgumentMatches,
    ArgumentPattern,
    rules_of,
)
from perdure.harness.harness import Harness
from perdure.kernel.errors import NotJson
from perdure.kernel.json import JsonValue, decode_json

_NAMES = re.compile(r"[A-Za-z0-9_.*?\[\]!-]+")
"""A name of a tool, or a plain pattern of names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A rule as it is typed."""

    tool: str
    deny: bool
    exact: Sequence[str]
    matches: Sequence[str]
    below: Sequence[str]
    only: bool
    note: str

    def rule(self) -> ApprovalRule:
        """Raises CommandError."""
        arguments: dict[str, ArgumentPattern] = {}
        try:
            for text in self.exact:
                name, value = _pair(text, "--is")
                arguments[name] = ArgumentIs(_value(value))
            for text in self.matches:
                name, value = _pair(text, "--matches")
                arguments[name] = ArgumentMatches(value)
            for text in self.below:
                name, value = _pair(text, "--below")
                arguments[name] = ArgumentBelow(value)
            if len(arguments) < len(self.exact) + len(self.matches) + len(self.below):
                raise CommandError("each argument is named once")
            return ApprovalRule(
                tool=self.tool,
                effect="deny" if self.deny else "allow",
                arguments=arguments,
                only=self.only,
                by=who(),
                note=self.note,
            )
        except ValueError as error:
            raise CommandError(str(error)) from error


def _pair(text: str, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise CommandError(f"{option} is NAME=VALUE, not {text!r}")
    return name, value


def _value(text: str) -> JsonValue:
    """JSON, or else the text itself."""
    try:
        return decode_json(text.encode("utf-8", "replace"))
    except NotJson:
        return text


async def listed(path: Path) -> list[ApprovalRule]:
    """Raises what opening a store raises."""
    async with looking(path) as session:
        return rules_of(await session.snapshot(ApprovalRules))


def render(found: Sequence[ApprovalRule], *, as_json: bool) -> None:
    if as_json:
        for rule in found:
            typer.echo(ascii_json(msgspec.json.encode(rule)))
        return
    if not found:
        typer.echo("no rules: a person is asked about every call that needs approval")
    for rule in found:
        typer.echo(words_of(rule))


def words_of(rule: ApprovalRule) -> str:
    """A rule in one line, so that two are never shown alike."""
    said = [f"{exact_name(name)} {_pattern(pattern)}" for name, pattern in rule.arguments.items()]
    if rule.only:
        said.append("no other arguments")
    where = f" where {', '.join(said)}" if said else ""
    by = f" by {exact_name(rule.by)}" if rule.by else ""
    note = f": {exact_json(rule.note)}" if rule.note else ""
    return f"{rule.id}  {rule.effect} {_tools(rule.tool)}{where} ({when(rule.at)}{by}{note})"


def _tools(pattern: str) -> str:
    return pattern if _NAMES.fullmatch(pattern) else exact_json(pattern)


def _pattern(pattern: ArgumentPattern) -> str:
    match pattern:
        case ArgumentIs():
            return f"is {exact_json(pattern.value)}"
        case ArgumentMatches():
            return f"matches {exact_json(pattern.pattern)}"
        case ArgumentBelow():
            return f"is below {exact_json(pattern.folder)}"


async def add(path: Path, wanted: Wanted) -> int:
    """The exit code. Raises CommandError."""
    rule = wanted.rule()

    async def here(harness: Harness) -> dict[str, JsonValue]:
        return {"id": (await harness.add_approval_rule(rule)).id}

    result = await done(path, "approval-rule", {"add": msgspec.to_builtins(rule)}, here)
    return _said(result, "rule {} is in force")


async def remove(path: Path, id: int) -> int:
    """The exit code. Raises CommandError, NotFound."""

    async def here(harness: Harness) -> dict[str, JsonValue]:
        return {"id": (await harness.remove_approval_rule(id)).id}

    return _said(await done(path, "approval-rule", {"remove": id}, here), "rule {} is revoked")


def _said(result: dict[str, JsonValue] | None, words: str) -> int:
    if result is None:
        typer.echo(KEPT, err=True)
        return NOT_YET
    typer.echo(words.format(result["id"]))
    return 0
