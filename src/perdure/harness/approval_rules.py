"""Rules that decide calls which need approval, in place of a person (rules H306 to H308).

    await harness.add_approval_rule(ApprovalRule(tool="write", arguments={"path": ArgumentBelow("notes")}))

They are stored in the session document ``pi.approval-rules``. Where a denying rule fits, it decides; else the oldest
that allows. A rule is asked after before_tool: what a hook blocks, no rule allows.

What a model writes, and what the tool makes of it by its types, need not be the same: ``"true"`` for true, spaces
around a text, a default for what is left out. What denies looks at either, what allows wants both.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Final, Literal, TypeAlias

import msgspec

from perdure.harness.approval import check_words
from perdure.kernel.document import Document, field
from perdure.kernel.errors import NotFound
from perdure.kernel.json import JsonValue, check_json, encode_json, same_json
from perdure.kernel.transaction import Transaction

MOST_RULES: Final = 1_000


class ArgumentIs(msgspec.Struct, frozen=True, tag="is"):
    """The argument is exactly this JSON value. 1 and 1.0 are one number; true is none."""

    value: JsonValue

    def fits(self, value: JsonValue) -> bool:
        """Whether an argument is like that."""
        return same_json(_one_way(self.value), _one_way(value))


class ArgumentMatches(msgspec.Struct, frozen=True, tag="matches"):
    """The argument is a text that fits a pattern with ``*``, ``?`` and ``[...]``, as a whole.

    ``*`` stands for any characters. A pattern knows nothing of what a tool makes of the text: ``git *`` fits
    ``git status; rm -r .`` too.
    """

    pattern: str

    def fits(self, value: JsonValue) -> bool:
        """Whether an argument is like that."""
        return isinstance(value, str) and fnmatchcase(value, self.pattern)


class ArgumentBelow(msgspec.Struct, frozen=True, tag="below"):
    """The argument is the path of this folder or of what is below it, by its words: links are not followed.

    A relative folder is about relative paths, an absolute one about absolute paths; ``~`` is neither.
    """

    folder: str

    def fits(self, value: JsonValue) -> bool:
        """Whether an argument is like that."""
        if not isinstance(value, str) or not value or value.startswith("~") or "\0" in value:
            return False
        folder, path = _normal(self.folder), _normal(value)
        if folder == ".":
            return not path.startswith("/") and path.split("/")[0] != ".."
        return path == folder or path.startswith(f"{folder.rstrip('/')}/")


ArgumentPattern: TypeAlias = ArgumentIs | ArgumentMatches | ArgumentBelow


class ApprovalRule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Decides calls of a tool that need approval. Raises TypeError, ValueError for what is no rule."""

    tool: str
    """Its name, or a pattern of names such as ``mcp_*``."""
    effect: Literal["allow", "deny"] = "allow"
    arguments: dict[str, ArgumentPattern] = msgspec.field(default_factory=dict[str, ArgumentPattern])
    """What each of these must be. A call without one of them does not fit, unless the rule denies and the default is
    like that."""
    only: bool = False
    """A call with any other argument does not fit."""
    by: str | None = None
    """Who made it."""
    note: str = ""
    """Why."""
    id: int = 0
    """Given when it is stored."""
    at: int = 0
    """When it was stored; ms UTC."""

    def __post_init__(self) -> None:
        _check_text(self.tool, "tool")
        if type(self.only) is not bool:
            raise TypeError(f"only is True or False, not {self.only!r}")
        if type(self.arguments) is not dict or not all(type(name) is str for name in self.arguments):
            raise TypeError(
                f"arguments are given by name, as {{'path': ArgumentBelow('notes')}}, not {self.arguments!r}"
            )
        if self.effect not in ("allow", "deny"):
            raise ValueError(f"a rule's effect is 'allow' or 'deny', not {self.effect!r}")
        check_words(self.by, "by")
        check_words(self.note, "note")
        for name, pattern in self.arguments.items():
            match pattern:
                case ArgumentIs():
                    check_json(pattern.value, at=f"arguments.{name}")
                case ArgumentMatches():
                    _check_text(pattern.pattern, f"arguments.{name}.pattern")
                case ArgumentBelow():
                    _check_text(pattern.folder, f"arguments.{name}.folder")
                    if _normal(pattern.folder).split("/")[0] in ("..", "~"):
                        raise ValueError(f"arguments.{name}: a folder is absolute, or below the working directory")
                case _:  # pyright: ignore[reportUnnecessaryComparison]  # of untyped callers
                    raise TypeError(f"arguments.{name} is an ArgumentIs, ArgumentMatches or ArgumentBelow")

    def fits(self, tool: str, arguments: Mapping[str, JsonValue], taken: Mapping[str, JsonValue] | None = None) -> bool:
        """Whether it is about such a call. ``taken``: the arguments as the tool takes them (``Signature.taken``)."""
        if not fnmatchcase(tool, self.tool) or (self.only and not arguments.keys() <= self.arguments.keys()):
            return False
        taken = arguments if taken is None else taken
        if self.effect == "deny":
            return all(
                any(name in given and _resembles(pattern, given[name]) for given in (arguments, taken))
                for name, pattern in self.arguments.items()
            )
        return all(
            name in arguments and pattern.fits(arguments[name]) and pattern.fits(taken.get(name, arguments[name]))
            for name, pattern in self.arguments.items()
        )


class ApprovalRules(Document, kind="pi.approval-rules", version=1, scope="session", builtin=True):
    """The rules of a store."""

    rules: dict[str, JsonValue] = field(default_factory=dict)
    """By id."""
    last_id: int = 0


def rules_of(document: ApprovalRules | None) -> list[ApprovalRule]:
    """As they are stored, the oldest first."""
    if document is None:
        return []
    return [msgspec.convert(rule, ApprovalRule) for _, rule in sorted(document.rules.items(), key=lambda r: int(r[0]))]


def deciding(
    rules: Iterable[ApprovalRule],
    tool: str,
    arguments: Mapping[str, JsonValue],
    taken: Mapping[str, JsonValue] | None = None,
) -> ApprovalRule | None:
    """The rule that decides a call: the oldest that denies it, else the oldest that allows it. Pure."""
    fitting = [rule for rule in rules if rule.fits(tool, arguments, taken)]
    denying = (rule for rule in fitting if rule.effect == "deny")
    return next(denying, fitting[0] if fitting else None)


async def add_rule(tx: Transaction, rule: ApprovalRule) -> ApprovalRule:
    """Store a rule; it is returned with its id and time. Raises ValueError where there are too many."""
    document = await tx.draft(ApprovalRules)
    if len(document.rules) >= MOST_RULES:
        raise ValueError(f"a store keeps at most {MOST_RULES} approval rules; remove some that are not needed")
    document.last_id += 1
    stored = msgspec.structs.replace(rule, id=document.last_id, at=tx.at)
    document.rules[str(stored.id)] = msgspec.to_builtins(stored)
    return stored


async def remove_rule(tx: Transaction, id: int) -> ApprovalRule:
    """Revoke a rule: it decides no call whose intent is not committed yet. Raises NotFound."""
    known = {rule.id: rule for rule in rules_of(await tx.read(ApprovalRules))}
    if id not in known:
        raise NotFound(f"there is no approval rule {id}; approval_rules(), and perdure approvals rules ls, list them")
    del (await tx.draft(ApprovalRules)).rules[str(id)]
    return known[id]


def _check_text(text: object, what: str) -> None:
    if not isinstance(text, str) or not text:
        raise ValueError(f"{what} is a text that is not empty, not {text!r}")


def _normal(path: str) -> str:
    normal = posixpath.normpath(path)
    return normal[1:] if normal.startswith("//") else normal


def _resembles(pattern: ArgumentPattern, value: JsonValue) -> bool:
    """Whether what denies is meant: 5 and the text "5" are one then, whichever of them a rule or a model wrote, and a
    path without any words is the folder that all is below."""
    if pattern.fits(value):
        return True
    match pattern:
        case ArgumentIs():
            return _text_of(pattern.value) == _text_of(value)
        case ArgumentMatches():
            return pattern.fits(_text_of(value))
        case ArgumentBelow():
            return value == "" and pattern.fits(".")


def _text_of(value: JsonValue) -> str:
    return value if isinstance(value, str) else encode_json(_one_way(value)).decode()


def _one_way(value: JsonValue) -> JsonValue:
    """With whole numbers written in one way, as integers."""
    if isinstance(value, list):
        return [_one_way(item) for item in value]
    if isinstance(value, dict):
        return {name: _one_way(item) for name, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
