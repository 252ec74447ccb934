"""Rules that decide calls in place of a person (rules H306 to H308)."""

from __future__ import annotations

import posixpath
from datetime import date, datetime
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator, StringConstraints

from harness.kit import opened, rest
from harness.test_approvals import Killed, Till, ask, model, results, the_one
from perdure.harness import approval_rules as module
from perdure.harness.approval_rules import (
    ApprovalRule,
    ArgumentBelow,
    ArgumentIs,
    ArgumentMatches,
    ArgumentPattern,
    deciding,
)
from perdure.harness.hooks import Block, HookCall, before_tool
from perdure.harness.permission import Permissions
from perdure.harness.registry import Extension
from perdure.harness.tool import AnyTool, ToolResult, tool
from perdure.kernel.errors import NotFound
from perdure.kernel.json import JsonValue
from perdure.testing.model import call
from perdure.tools.mcp.checking import ForeignSignature

# --- pure ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "value", "fits"),
    [
        (ArgumentIs(1), 1, True),
        (ArgumentIs(1), 1.0, True),
        (ArgumentIs([100.0]), [100], True),
        (ArgumentIs(1), 1.5, False),
        (ArgumentIs(1), "1", False),
        (ArgumentIs(True), 1, False),
        (ArgumentIs(1), True, False),
        (ArgumentIs({"a": [1, None]}), {"a": [1, None]}, True),
        (ArgumentMatches("git *"), "git status", True),
        (ArgumentMatches("git *"), "agit status", False),
        (ArgumentMatches("git *"), 7, False),
        (ArgumentMatches("Git"), "git", False),
        (ArgumentBelow("src"), "src", True),
        (ArgumentBelow("src"), "src/a/b.py", True),
        (ArgumentBelow("src"), "./src//a", True),
        (ArgumentBelow("src"), "srcs/a", False),
        (ArgumentBelow("src"), "src/../secret", False),
        (ArgumentBelow("src"), "/src/a", False),
        (ArgumentBelow("src"), "../src/a", False),
        (ArgumentBelow("src"), "", False),
        (ArgumentBelow("src"), ["src"], False),
        (ArgumentBelow("."), "a", True),
        (ArgumentBelow("."), "..", False),
        (ArgumentBelow("."), "../a", False),
        (ArgumentBelow("."), "~/a", False),
        (ArgumentBelow("."), "/a", False),
        (ArgumentBelow("."), "a\0/../../b", False),
        (ArgumentBelow("/home/me/"), "/home/me/x", True),
        (ArgumentBelow("/home/me"), "/home/me/../you", False),
        (ArgumentBelow("/home/me"), "//home/me/x", True),
        (ArgumentBelow("/home/me"), "home/me/x", False),
        (ArgumentBelow("/"), "/etc/passwd", True),
        (ArgumentBelow("/"), "etc", False),
    ],
)
def test_what_an_argument_must_be_h306(pattern: ArgumentPattern, value: JsonValue, fits: bool) -> None:
    assert pattern.fits(value) is fits


STEPS = st.lists(st.sampled_from(["a", "b", "..", ".", ""]), max_size=6)


@given(STEPS, STEPS)
def test_a_path_that_fits_never_leaves_the_folder_h306(folder: list[str], steps: list[str]) -> None:
    below = ArgumentBelow("/root/" + "/".join(folder))
    path = below.folder + "/" + "/".join(steps)
    inside = posixpath.commonpath([posixpath.normpath(below.folder), posixpath.normpath(path)])
    assert below.fits(path) is (inside == posixpath.normpath(below.folder))


def test_a_rule_is_about_the_arguments_it_names_and_only_says_no_others_h306() -> None:
    rule = ApprovalRule(tool="p*y", arguments={"to": ArgumentIs("me")})
    assert rule.fits("pay", {"to": "me"})
    assert rule.fits("pay", {"to": "me", "amount": 3})
    assert not rule.fits("pay", {"amount": 3})
    assert not rule.fits("payment", {"to": "me"})
    only = ApprovalRule(tool="pay", arguments={"to": ArgumentIs("me")}, only=True)
    assert only.fits("pay", {"to": "me"})
    assert not only.fits("pay", {"to": "me", "amount": 3})
    assert ApprovalRule(tool="*").fits("anything", {"at": "all"})


RULES = st.lists(
    st.builds(
        ApprovalRule,
        tool=st.sampled_from(["pay", "*", "other"]),
        effect=st.sampled_from(["allow", "deny"]),
        arguments=st.sampled_from([{}, {"to": ArgumentIs("me")}, {"to": ArgumentIs("you")}]),
    ),
    max_size=6,
)


@given(RULES)
def test_a_rule_that_denies_wins_and_else_the_oldest_decides_h307(rules: list[ApprovalRule]) -> None:
    fitting = [rule for rule in rules if rule.fits("pay", {"to": "me"})]
    found = deciding(rules, "pay", {"to": "me"})
    denying = [rule for rule in fitting if rule.effect == "deny"]
    assert found is (denying[0] if denying else fitting[0] if fitting else None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tool": ""},
        {"tool": 7},
        {"only": 1},
        {"arguments": None},
        {"arguments": {7: ArgumentIs(1)}},
        {"effect": "maybe"},
        {"note": "x" * 3_000},
        {"by": 7},
        {"arguments": {"to": "me"}},
        {"arguments": {"to": ArgumentIs({1})}},  # pyright: ignore[reportArgumentType]
        {"arguments": {"to": ArgumentMatches("")}},
        {"arguments": {"to": ArgumentBelow("")}},
        {"arguments": {"to": ArgumentBelow("../x")}},
        {"arguments": {"to": ArgumentBelow("~/x")}},
    ],
)
def test_what_is_no_rule_is_refused_h306(wrong: dict[str, object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        ApprovalRule(**{"tool": "pay", **wrong})  # pyright: ignore


# --- in a harness ----------------------------------------------------------------------------------------------

MINE = ApprovalRule(tool="pay", arguments={"to": ArgumentIs("me")}, by="ada", note="my own")


async def test_rules_are_stored_listed_and_revoked_h306() -> None:
    world = Killed(Till())
    async with world.open() as harness:
        made = await harness.add_approval_rule(MINE)
        assert (made.id, made.by, made.note) == (1, "ada", "my own")
        assert made.at > 0
        world.kill(harness)
    async with world.open() as harness:
        assert await harness.approval_rules() == [made]
        await harness.remove_approval_rule(1)
        with pytest.raises(NotFound):
            await harness.remove_approval_rule(1)
        assert (await harness.add_approval_rule(MINE)).id == 2


async def test_too_many_rules_are_refused_h306(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_RULES", 1)
    async with opened() as harness:
        await harness.add_approval_rule(MINE)
        with pytest.raises(ValueError, match="at most 1"):
            await harness.add_approval_rule(MINE)


async def test_a_rule_allows_without_a_question_and_is_noted_with_the_intent_h306() -> None:
    till = Till()
    async with opened(model(call("pay", to="me"), call("pay", to="you")), tools=(till.tool,)) as harness:
        await harness.add_approval_rule(MINE)
        submission, root = await ask(harness)
        assert till.paid == ["me 1"]
        approval = await the_one(harness)
        assert approval.arguments == {"to": "you"}
        # A rule that is made now decides what is called from now on.
        await harness.add_approval_rule(ApprovalRule(tool="*"))
        await rest()
        assert await the_one(harness) == approval
        await approval.deny()
        await submission.answer()
        assert sorted(str(code) for code, _ in await results(root)) == ["None", "denied"]


async def test_a_rule_denies_and_wins_h307() -> None:
    till = Till()
    async with opened(model(call("pay", to="me")), tools=(till.tool,)) as harness:
        await harness.add_approval_rule(MINE)
        await harness.add_approval_rule(ApprovalRule(tool="pay", effect="deny", note="the till is closed"))
        submission, root = await ask(harness)
        await submission.answer()
        assert await results(root) == [("denied", "A rule denies this call: the till is closed")]
        assert till.paid == []


async def test_no_rule_is_asked_about_a_call_that_needs_no_approval_h307() -> None:
    till = Till(requires_approval=False)
    async with opened(model(call("pay", to="me")), tools=(till.tool,)) as harness:
        await harness.add_approval_rule(ApprovalRule(tool="pay", effect="deny"))
        submission, _ = await ask(harness)
        await submission.answer()
        assert till.paid == ["me 1"]


async def test_a_rule_allows_nothing_that_a_hook_blocks_h307() -> None:
    till = Till()

    @before_tool
    async def guard(_asked: HookCall) -> Block:
        return Block("never")

    extensions = [Extension("x", tools=[till.tool], hooks=[guard])]
    async with opened(model(call("pay", to="me")), extensions=extensions) as harness:
        await harness.add_approval_rule(MINE)
        submission, root = await ask(harness)
        await submission.answer()
        assert [code for code, _ in await results(root)] == ["blocked"]


async def test_a_rule_that_is_revoked_before_the_intent_allows_nothing_h308(monkeypatch: pytest.MonkeyPatch) -> None:
    till, found = Till(), Permissions.by_rule

    async with opened(model(call("pay", to="me")), tools=(till.tool,)) as harness:
        rule = await harness.add_approval_rule(MINE)

        async def then_revoked(self, opened):
            permission = await found(self, opened)
            if permission is not None:
                await harness.remove_approval_rule(rule.id)
            return permission

        monkeypatch.setattr(Permissions, "by_rule", then_revoked)
        submission, root = await ask(harness)
        assert till.paid == []
        await (await the_one(harness)).allow()
        await submission.answer()
        assert await results(root) == [(None, "paid me 1")]


async def test_a_rule_that_denies_since_just_now_wins_over_one_that_allowed_h307_h308(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    till, found = Till(), Permissions.by_rule
    async with opened(model(call("pay", to="me")), tools=(till.tool,)) as harness:
        await harness.add_approval_rule(MINE)

        async def then_denied(self, opened):
            permission = await found(self, opened)
            await harness.add_approval_rule(ApprovalRule(tool="pay", effect="deny"))
            return permission

        monkeypatch.setattr(Permissions, "by_rule", then_denied)
        submission, root = await ask(harness)
        await submission.answer()
        assert await results(root) == [("denied", "A rule denies this call.")]
        assert till.paid == []


@pytest.mark.parametrize(
    ("denied", "given"),
    [
        ({"force": ArgumentIs(True)}, {"target": "x", "force": "true"}),
        ({"force": ArgumentIs(True)}, {"target": "x", "force": 1}),
        ({"count": ArgumentIs(3)}, {"target": "x", "count": "3"}),
        ({"count": ArgumentIs(3)}, {"target": "x", "count": 3.0}),
        ({"target": ArgumentIs("prod")}, {"target": " prod "}),
        ({"target": ArgumentBelow("prod")}, {"target": " prod/a"}),
        ({"count": ArgumentIs(7)}, {"target": "x"}),
        ({"target": ArgumentIs(12345)}, {"target": "12345"}),
        ({"count": ArgumentIs("3")}, {"target": "x", "count": 3}),
        ({"count": ArgumentMatches("3*")}, {"target": "x", "count": 31}),
        ({"force": ArgumentMatches("t*")}, {"target": "x", "force": True}),
        ({"target": ArgumentBelow(".")}, {"target": ""}),
        ({"target": ArgumentBelow(".")}, {"target": "  "}),
    ],
)
async def test_what_denies_looks_at_what_the_tool_takes_too_h307(
    denied: dict[str, ArgumentPattern], given: dict[str, JsonValue]
) -> None:
    wiper = Wiper()
    async with opened(model(call("wipe", **given)), tools=(wiper.tool,)) as harness:
        await harness.add_approval_rule(ApprovalRule(tool="wipe"))
        await harness.add_approval_rule(ApprovalRule(tool="wipe", effect="deny", arguments=denied))
        submission, root = await ask(harness)
        await submission.answer()
        assert (wiper.wiped, [code for code, _ in await results(root)]) == ([], ["denied"])


@pytest.mark.parametrize("target", ["notes/.. ", "notes/a/../.. "])
async def test_what_allows_wants_what_the_tool_takes_to_fit_too_h306(target: str) -> None:
    wiper = Wiper()
    async with opened(model(call("wipe", target=target)), tools=(wiper.tool,)) as harness:
        await harness.add_approval_rule(ApprovalRule(tool="wipe", arguments={"target": ArgumentBelow("notes")}))
        submission, _ = await ask(harness)
        await (await the_one(harness)).allow()
        await submission.answer()
        assert wiper.wiped == [f"{target.strip()} False 7"]


async def test_arguments_that_no_longer_fit_when_rules_are_asked_end_the_call_h86() -> None:
    """Such as a day that has to be to come, at midnight."""
    looks = 0

    def until_the_third(text: str) -> str:
        nonlocal looks
        looks += 1
        if looks > 2:
            raise ValueError("too late")
        return text

    @tool(requires_approval=True)
    async def book(day: Annotated[str, AfterValidator(until_the_third)]) -> str:
        """Book a day."""
        return day

    async with opened(model(call("book", day="today")), tools=(book,)) as harness:
        await harness.add_approval_rule(ApprovalRule(tool="book"))
        submission, root = await ask(harness)
        await submission.answer()
        assert [code for code, _ in await results(root)] == ["invalid_arguments"]


class Wiper:
    """A tool that takes more than it is written."""

    def __init__(self) -> None:
        self.wiped: list[str] = []
        self.tool: AnyTool

        @tool(requires_approval=True)
        async def wipe(
            target: Annotated[str, StringConstraints(strip_whitespace=True)], force: bool = False, count: int = 7
        ) -> str:
            """Wipe something."""
            self.wiped.append(f"{target} {force} {count}")
            return "wiped"

        self.tool = wipe


def test_what_has_no_json_is_as_it_was_written_h307() -> None:
    class Odd:
        pass

    @tool
    async def take(at: datetime, when: date = date(2026, 1, 2), odd: Annotated[Any, Odd()] = Odd(), n: int = 1) -> None:  # noqa: B008
        """Take."""

    assert take.signature.taken({"at": "2026-01-02T03:04:05+00:00", "n": "7"}) == {
        "at": "2026-01-02T03:04:05Z",
        "when": "2026-01-02",
        "n": 7,
    }


def test_a_default_that_a_server_tells_counts_h307() -> None:
    async def function(arguments: dict[str, JsonValue]) -> ToolResult:
        return ToolResult(str(arguments))

    schema: JsonValue = {"type": "object", "properties": {"force": {"default": True}, "n": {}, "any": True}}
    taken = ForeignSignature(function, name="wipe", schema=schema).taken({"n": 1})
    assert taken == {"force": True, "n": 1}
    rule = ApprovalRule(tool="wipe", effect="deny", arguments={"force": ArgumentIs(True)})
    assert deciding([ApprovalRule(tool="*"), rule], "wipe", {"n": 1}, taken) is rule
