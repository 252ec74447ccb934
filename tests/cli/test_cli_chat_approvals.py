"""``perdure chat --ask``: the user is asked before calls, in a real terminal (rules H84, H110, H306)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from test_cli_chat import IDLE, Desk, count

from perdure import Harness, MemoryStorage, SqliteStorage
from perdure.cli.chat.questions import HOW, Question, Questions, Reply, decide_here, reply_of
from perdure.cli.style import Line, rendered
from perdure.events import ApprovalDecided, ApprovalRequested
from perdure.harness.approval import ApprovalRefused
from perdure.harness.approval_rules import ArgumentIs
from perdure.harness.documents import LiveTool
from perdure.harness.registry import Extension
from perdure.harness.tool import tool
from perdure.kernel.json import JsonValue
from perdure.testing.model import ScriptedModel, call, calls, say

ASKS = "? bash  waits for your word"
INVITED = f"\n  {HOW}"
"""What is typed from now on is about the call."""


def invited(times: int) -> Callable[[str], bool]:
    return lambda shown: shown.count(INVITED) == times


def test_a_call_is_shown_and_allowed_denied_or_always_allowed_h306(desk: Desk) -> None:
    chat = desk.chat("--ask", "bash")
    chat.see(IDLE)
    chat.enter("run touch one")
    chat.see(ASKS, "  │ command: touch one", INVITED)
    assert not (desk.work / "one").exists()
    chat.enter("y")
    chat.see("▸ bash  touch one", "bash ended.", IDLE)
    assert (desk.work / "one").exists()
    chat.enter("run touch two")
    chat.wait(invited(2), "the second question")
    chat.enter("n not in my house")
    chat.see("✗ failed: denied", "not in my house", "bash failed.", IDLE)
    chat.enter("run touch three")
    chat.wait(invited(3), "the third question")
    chat.enter("always")
    chat.see("rule 1 allows exactly this from now on", IDLE)
    chat.wait(count("bash ended.", 2), "the third call's end")
    chat.enter("run touch three")
    chat.wait(count("bash ended.", 3), "the end of a call that a rule allows")
    assert chat.text().count(ASKS) == 3
    assert (desk.work / "three").exists()
    assert not (desk.work / "two").exists()
    chat.enter("/quit")
    assert chat.end() == 0


def test_killed_while_it_asks_it_asks_again_h110(desk: Desk) -> None:
    chat = desk.chat("--ask", "bash")
    chat.see(IDLE)
    chat.enter("run touch one")
    chat.see(ASKS)
    chat.kill()
    again = desk.chat()  # what was asked is asked, whatever is asked about from now on
    again.see(ASKS, "  │ command: touch one", "waits to be allowed; nothing of it was done", INVITED)
    assert again.text().count(ASKS) == 1
    again.enter("y")
    again.see("bash ended.", IDLE)
    assert (desk.work / "one").exists()


def test_two_calls_are_answered_one_after_the_other_and_what_is_no_answer_is_queued_h110(desk: Desk) -> None:
    chat = desk.chat("--ask", "b*")
    chat.see(IDLE)
    chat.enter("both")
    chat.see(ASKS, "  │ command: echo one", INVITED)
    chat.enter("what now?")
    chat.see("queued    what now?")
    chat.enter("y")
    chat.wait(invited(2), "the second question")
    chat.enter("no")
    chat.see("  │ one", "✗ failed: denied", "You said: what now?", IDLE)
    assert "  │ two\n" not in chat.text()


def test_what_another_terminal_decides_is_seen_h111(desk: Desk) -> None:
    chat = desk.chat("--ask", "bash")
    chat.see(IDLE)
    chat.enter("run touch one")
    chat.see(ASKS)

    async def task() -> int:
        async with Harness.open(SqliteStorage(desk.store), read_only=True) as reader:
            (approval,) = await reader.approvals()
            return approval.task

    other = desk.piped("approvals", "deny", str(desk.store), str(asyncio.run(task())), "--reason", "from there")
    assert other.returncode == 0, other.stderr
    chat.see("denied by", "from there", "bash failed.", IDLE)


def test_control_c_ends_a_run_whose_call_waits_h301(desk: Desk) -> None:
    chat = desk.chat("--ask", "bash")
    chat.see(IDLE)
    chat.enter("run touch one")
    chat.see(ASKS)
    chat.control("c")
    chat.see("— aborted", IDLE)
    chat.enter("y")
    chat.see("You said: y", IDLE)


def test_lines_of_a_pipe_answer_questions_and_where_they_end_the_call_waits_h110(desk: Desk) -> None:
    done = desk.piped(
        *("chat", "--db", str(desk.store), "--model", "fake:one", "--ask", "bash"),
        lines="run touch one\nmaybe\ny\nrun touch two\n",
    )
    assert "a call waits for your word: y, n [why] or always" in done.stdout
    assert done.stdout.count(ASKS) == 2
    assert "Left while a call waits for your word; it still does." in done.stdout
    assert done.returncode == 1
    assert (desk.work / "one").exists()
    again = desk.piped("chat", "--db", str(desk.store), "--model", "fake:one", lines="n\n")
    assert "bash failed." in again.stdout
    assert again.returncode == 0, again.stdout
    assert not (desk.work / "two").exists()


def test_several_questions_are_answered_in_their_order_and_told_once_h110() -> None:
    def words(lines: list[Line]) -> str:
        return "\n".join(rendered(each, "none") for each in lines)

    def asked(task: int) -> ApprovalRequested:
        arguments: JsonValue = {"n": task, "text": "a\nrm -r .\rls\x1b[31m", "many": "x\n" * 300}
        return ApprovalRequested(
            seq=1, task=task, call_id="c", name="pay", arguments=arguments, digest="d", expires_at=9
        )

    questions = Questions()
    questions.asked(asked(1))
    first = words(questions.present() or [])
    assert (
        "? pay  waits for your word\n  │ n: 1\n  │ text: a\n  │ │ rm -r .⟨U+000D⟩ls⟨U+001B⟩[31m\n  │ many: x\n" in first
    )
    assert "104 more lines: perdure approvals ls --json shows all" in first
    questions.asked(asked(2))
    assert questions.present() is None
    assert questions.behind == 1
    decided = ApprovalDecided(seq=2, task=1, allow=True, reason="", by="ada", edited=True)
    assert words(questions.decided(decided)) == "  allowed with other arguments by ada"
    assert "  │ n: 2\n" in words(questions.present() or [])
    shown: LiveTool = {
        "call_id": "c",
        "name": "pay",
        "state": "approval",
        "output": "",
        "dropped_lines": 0,
        "dropped_bytes": 0,
        "details": None,
        "diagnostics": [],
        "approval": {"arguments": {}, "digest": "d", "asked_at": 1, "expires_at": 9, "decision": None},
    }
    assert questions.take_over({"2": shown}) == []
    assert questions.present() is None
    assert questions.take_over({"3": shown}) == []
    assert "waits for your word" in words(questions.present() or [])
    assert questions.take_over({}) == []
    assert questions.first is None
    assert questions.present() == []


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("y", Reply("yes")),
        (" Yes ", Reply("yes")),
        ("always", Reply("always")),
        ("n", Reply("no")),
        ("no, thanks", None),
        ("no never", Reply("no", "never")),
        ("yes please", None),
        ("", None),
        ("yeah", None),
    ],
)
def test_what_answers_a_question_h110(text: str, reply: Reply | None) -> None:
    assert reply_of(text) == reply


async def test_always_makes_a_rule_only_where_it_decides_h306() -> None:
    @tool(requires_approval=True)
    async def pay(to: str) -> str:
        """Pay somebody."""
        return f"paid {to}"

    model = ScriptedModel([calls(call("pay", to="me"), call("pay", to="you")), say("done")])
    async with Harness.open(MemoryStorage(), models=model, extensions=[Extension("till", tools=[pay])]) as harness:
        submission = await (await harness.root()).submit("Pay.")
        while len(asked := await harness.approvals()) < 2:
            await asyncio.sleep(0)
        mine, yours = [Question(each.task, each.tool, dict(each.arguments), each.digest) for each in asked]
        with pytest.raises(ApprovalRefused, match="other_arguments"):
            await decide_here(harness, replace(mine, digest="other"), Reply("always"))
        first, second = await asyncio.gather(asked[0].deny(), decide_here(harness, mine, Reply("always")))
        assert (first, _words(second)) == (True, "  it was decided already")
        assert await harness.approval_rules() == []
        assert "rule 1 allows exactly this" in _words(await decide_here(harness, yours, Reply("always")))
        (rule,) = await harness.approval_rules()
        assert (rule.tool, rule.arguments, rule.only) == ("pay", {"to": ArgumentIs("you")}, True)
        await submission.answer()


def _words(lines: list[Line]) -> str:
    return "\n".join(rendered(each, "none") for each in lines)
