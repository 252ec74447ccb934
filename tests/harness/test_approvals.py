"""Approval of calls (rules H84, H110 to H114, H300 to H305): asked, decided, consumed, refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import msgspec
import pytest

from harness.doubles import ManualClock
from harness.kit import Commits, opened, rest, until
from harness.test_tool_scopes import Environment
from perdure.events import ApprovalDecided, ApprovalRequested, ToolEnd
from perdure.harness.approval import ApprovalQuestion, ApprovalRefused, Approvals, RequiresApproval, call_digest
from perdure.harness.approvals import Approval
from perdure.harness.arguments import InvalidArguments
from perdure.harness.calls import EXECUTE
from perdure.harness.conversation import Conversation
from perdure.harness.documents import TOOL_RESULT, Live, ToolResultData
from perdure.harness.environment import ExecutionEnvironment
from perdure.harness.harness import Harness
from perdure.harness.hooks import Block, HookCall, before_tool
from perdure.harness.messages import ToolResultMessage, decode_messages
from perdure.harness.registry import Extension
from perdure.harness.scopes import stored_intent
from perdure.harness.submission import Submission, Unanswered
from perdure.harness.tool import AnyTool, ReplayPolicy, ToolCall, tool
from perdure.kernel.errors import NotFound, StorageError
from perdure.kernel.json import JsonValue
from perdure.kernel.records import Completed
from perdure.storage.memory import MemoryStorage
from perdure.storage.sqlite import SqliteStorage
from perdure.testing.model import ScriptedModel, call, calls, say


class Till:
    """A tool that pays, and what was paid."""

    def __init__(self, *, requires_approval: RequiresApproval = True, replay: ReplayPolicy = "unsafe") -> None:
        self.paid: list[str] = []
        self.tool: AnyTool

        @tool(requires_approval=requires_approval, replay=replay)
        async def pay(to: str, amount: int = 1) -> str:
            """Pay somebody."""
            self.paid.append(f"{to} {amount}")
            return f"paid {to} {amount}"

        self.tool = pay


def model(*asked) -> ScriptedModel:
    return ScriptedModel([asked[0] if len(asked) == 1 else calls(*asked), say("done")])


async def ask(harness: Harness, text: str = "Pay.") -> tuple[Submission, Conversation]:
    """Submit, and let everything come to rest."""
    root = await harness.root()
    submission = await root.submit(text, request_id="pay")
    await rest()
    return submission, root


async def the_one(harness: Harness) -> Approval:
    (found,) = await harness.approvals()
    return found


async def results(conversation: Conversation) -> list[tuple[str | None, str]]:
    """Code and text of each result."""
    found: list[tuple[str | None, str]] = []
    for entry in await conversation.entries():
        if entry.kind == TOOL_RESULT:
            (message,) = decode_messages(entry.raw_messages)
            assert isinstance(message, ToolResultMessage)
            assert entry.data_as(ToolResultData).code == message.code
            found.append((message.code, message.text))
    return found


async def state_of(conversation: Conversation, harness: Harness) -> list[str]:
    live = await harness.session.snapshot(Live, conversation=conversation.id)
    assert live is not None
    return [shown["state"] for shown in live.tools.values()]


# --- asking ----------------------------------------------------------------------------------------------------


async def test_a_call_that_needs_approval_waits_and_runs_once_it_is_allowed_h84_h110() -> None:
    till = Till()
    async with opened(model(call("pay", to="me")), tools=(till.tool,)) as harness:
        submission, root = await ask(harness)
        approval = await the_one(harness)
        assert (approval.tool, approval.arguments) == ("pay", {"to": "me"})
        assert approval.digest == call_digest("pay", {"to": "me"})
        assert approval.expires_at - approval.asked_at == 24 * 60 * 60 * 1000
        assert (till.paid, await state_of(root, harness)) == ([], ["approval"])
        assert await approval.allow(by="ada") is True
        assert (await submission.answer()).text == "done"
        assert till.paid == ["me 1"]
        assert await results(root) == [(None, "paid me 1")]
        assert await harness.approvals() == []


async def test_a_function_of_the_typed_arguments_says_which_calls_need_it_h84() -> None:
    seen: list[ApprovalQuestion] = []

    def large(question: ApprovalQuestion) -> bool:
        seen.append(question)
        return question.values.get("amount") != 1

    till = Till(requires_approval=large)
    async with opened(model(call("pay", to="a", amount=1), call("pay", to="b", amount=9)), tools=(till.tool,)) as h:
        submission, root = await ask(h)
        assert till.paid == ["a 1"]
        approval = await the_one(h)
        assert approval.arguments == {"to": "b", "amount": 9}
        assert [(q.tool, q.conversation_id, dict(q.arguments)) for q in seen] == [
            ("pay", root.id, {"to": "a", "amount": 1}),
            ("pay", root.id, {"to": "b", "amount": 9}),
        ]
        await approval.allow()
        await submission.answer()
        assert till.paid == ["a 1", "b 9"]


async def test_what_a_function_does_to_its_question_does_not_run_h110() -> None:
    @tool(requires_approval=lambda question: cast("list[str]", question.values["to"]).clear() is not None)
    async def pay(to: list[str]) -> str:
        """Pay some."""
        return f"paid {', '.join(to)}"

    async with opened(model(call("pay", to=["me"])), tools=(pay,)) as harness:
        submission, root = await ask(harness)
        await submission.answer()
        assert await results(root) == [(None, "paid me")]


@pytest.mark.parametrize("error", [ValueError("on purpose"), SystemExit(3)])
async def test_a_function_that_raises_counts_as_yes_and_is_reported_h300(error: BaseException) -> None:
    def broken(_question: ApprovalQuestion) -> bool:
        raise error

    till, reports = Till(requires_approval=broken), []
    async with opened(model(call("pay", to="me")), tools=(till.tool,), reports=reports) as harness:
        await ask(harness)
        assert (await the_one(harness)).tool == "pay"
    assert [report.type for report in reports] == ["approval_check_failed"]


async def test_the_host_may_require_it_by_name_and_pattern_and_say_how_long_h300() -> None:
    till = Till(requires_approval=False)
    policy = Approvals(tools=("p?y",), expire_after_ms=1_000)
    async with opened(model(call("pay", to="me")), tools=(till.tool,), approvals=policy) as harness:
        await ask(harness)
        approval = await the_one(harness)
        assert approval.expires_at - approval.asked_at == 1_000
        assert till.paid == []


@pytest.mark.parametrize(("options", "error"), [({"tools": "pay"}, TypeError), ({"tools": ("",)}, TypeError)])
def test_a_policy_that_is_none_is_refused_h300(options: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        msgspec.structs.replace(Approvals(), **options)
    with pytest.raises(ValueError, match="expire_after_ms"):
        Approvals(expire_after_ms=0)


@pytest.mark.parametrize("wrong", [None, 1, "yes"])
def test_requires_approval_is_a_bool_or_a_plain_function_h84(wrong: object) -> None:
    async def asynchronous(_question: ApprovalQuestion) -> bool:
        return False

    for value in (wrong, asynchronous):
        with pytest.raises(ValueError, match="requires_approval"):
            tool(requires_approval=value)(Till().tool.function)  # pyright: ignore


async def test_a_call_that_needs_it_is_never_foreseen_and_others_pay_nothing_h185_h301() -> None:
    for till, durable in ((Till(requires_approval=False, replay="safe"), 4), (Till(replay="safe"), 7)):
        async with opened(model(call("pay", to="me")), tools=(till.tool,)) as harness:
            await harness.root()
            commits = Commits(harness)
            submission, _ = await ask(harness)
            for approval in await harness.approvals():
                await approval.allow()
            await submission.answer()
            # Beside those of any one-tool turn: the question, the decision, the intent.
            assert len(commits.durable) == durable


async def test_hooks_come_first_and_what_one_blocks_nobody_is_asked_about_h301() -> None:
    till = Till()

    @before_tool
    async def guard(asked: HookCall) -> Block | dict[str, JsonValue] | None:
        return Block("no") if asked.arguments["to"] == "thief" else {"to": f"dr. {asked.arguments['to']}"}

    asked = model(call("pay", to="thief"), call("pay", to="who"), call("pay", wrong=1))
    async with opened(asked, extensions=[Extension("x", tools=[till.tool], hooks=[guard])]) as harness:
        submission, root = await ask(harness)
        approval = await the_one(harness)
        assert approval.arguments == {"to": "dr. who"}
        await approval.allow()
        await submission.answer()
        assert sorted(str(code) for code, _ in await results(root)) == ["None", "blocked", "invalid_arguments"]
        assert till.paid == ["dr. who 1"]


# --- deciding --------------------------------------------------------------------------------------------------


async def test_a_denial_is_an_error_result_with_its_reason_h102_h114() -> None:
    till = Till()
    async with opened(model(call("pay", to="me")), tools=(till.tool,)) as harness:
        submission, root = await ask(harness)
        assert await (await the_one(harness)).deny("too much") is True
        assert (await submission.answer()).text == "done"
        assert await results(root) == [("denied", "The call was denied: too much")]
        assert till.paid == []


async def test_a_question_expires_into_an_error_result_h102_h114() -> None:
    till, clock = Till(), ManualClock()
    async with opened(
        model(call("pay", to="me")), tools=(till.tool,), clock=clock, approvals=Approvals(expire_after_ms=5_000)
    ) as harness:
        submission, root = await ask(harness)
        approval = await the_one(harness)
        assert harness.wake().at == approval.expires_at
        await clock.advance(5)
        assert (await submission.answer()).text == "done"
        assert [code for code, _ in await results(root)] == ["expired"]
        with pytest.raises(ApprovalRefused) as refused:
            await approval.allow()
        assert (refused.value.reason, till.paid) == ("ended", [])


async def test_the_first_decision_stands_h303() -> None:
    till = Till()
    async with opened(model(call("pay", to="me")), tools=(till.tool,)) as harness:
        submission, root = await ask(harness)
        approval = await the_one(harness)
        said = await asyncio.gather(approval.deny("no"), approval.allow(), approval.allow())
        assert said == [True, False, False]
        await submission.answer()
        assert [code for code, _ in await results(root)] == ["denied"]
        with pytest.raises(ApprovalRefused, match="ended"):
            await approval.allow()


async def test_decisions_about_anything_else_are_refused_by_name_h303() -> None:
    till, clock = Till(), ManualClock()
    policy = Approvals(expire_after_ms=1_000)
    async with opened(model(call("pay", to="me")), tools=(till.tool,), clock=clock, approvals=policy) as harness:
        submission, root = await ask(harness)
        approval = await the_one(harness)
        generation = next(t.id for t in (await harness.inspect()).tasks if t.kind == "pi.generation")
        refused = []
        for task, digest in ((approval.task, call_digest("pay", {"to": "you"})), (generation, approval.digest)):
            with pytest.raises(ApprovalRefused) as error:
                await harness.decide(task, allow=True, digest=digest)
            refused.append(error.value.reason)
        with pytest.raises(NotFound):
            await harness.decide(99_999, allow=True, digest=approval.digest)
        clock.now += 1  # and nothing has woken for it
        assert await harness.approvals() == []
        with pytest.raises(ApprovalRefused) as error:
            await approval.allow()
        refused.append(error.value.reason)
        assert refused == ["other_arguments", "not_asked", "expired"]
        assert await state_of(root, harness) == ["approval"]
        await root.abort()
        with pytest.raises(Unanswered):
            await submission.answer()


async def test_what_is_no_decision_denies_the_call_h305() -> None:
    other: JsonValue = {"allow": True, "digest": "d", "expires_at": 1, "at": 1}
    wrong: list[JsonValue] = ["yes", None, {"allow": True}, other]
    for value in wrong:
        till = Till()
        async with opened(model(call("pay", to="me")), tools=(till.tool,)) as harness:
            submission, root = await ask(harness)
            task = (await the_one(harness)).task
            await harness.send_signal(task, "approval", value)
            await submission.answer()
            assert [code for code, _ in await results(root)] == ["denied"]
            assert till.paid == []


@pytest.mark.parametrize(
    "wrong", [{"reason": 1}, {"by": "x" * 3_000}, {"reason": "\ud800"}, {"allow": False, "arguments": {"to": "x"}}]
)
async def test_words_that_cannot_be_stored_are_refused_h303(wrong: dict[str, object]) -> None:
    till = Till()
    async with opened(model(call("pay", to="me")), tools=(till.tool,)) as harness:
        await ask(harness)
        approval = await the_one(harness)
        options = {"allow": True, "digest": approval.digest, **wrong}
        with pytest.raises((TypeError, ValueError)):
            await harness.decide(approval.task, **options)  # pyright: ignore
        assert await the_one(harness) == approval


# --- edited arguments ------------------------------------------------------------------------------------------


async def test_edited_arguments_are_what_runs_and_the_model_is_told_h304() -> None:
    till = Till()
    async with opened(model(call("pay", to="me", amount=100)), tools=(till.tool,)) as harness:
        submission, root = await ask(harness)
        approval = await the_one(harness)
        await approval.allow(arguments={"to": "me", "amount": 3}, by="ada")
        await submission.answer()
        assert till.paid == ["me 3"]
        ((code, text),) = await results(root)
        assert code is None
        assert text.endswith('{"to":"me","amount":3}\npaid me 3')
        task = await harness.session.task(approval.task)
        assert task is not None
        signal = task.signals["approval"]
        assert isinstance(signal, dict)
        assert signal["edited"] == call_digest("pay", {"to": "me", "amount": 3})
        assert (signal["digest"], signal["by"]) == (approval.digest, "ada")


async def test_a_call_that_failed_with_edited_arguments_says_so_h304() -> None:
    @tool(requires_approval=True)
    async def pay(to: str) -> str:
        """Pay somebody, and break."""
        raise GeneratorExit

    reports = []
    async with opened(model(call("pay", to="me")), tools=(pay,), reports=reports) as harness:
        submission, root = await ask(harness)
        await (await the_one(harness)).allow(arguments={"to": "you"})
        await submission.answer()
        ((code, text),) = await results(root)
    assert (code, '{"to":"you"}' in text) == ("interrupted", True)
    assert [report.type for report in reports] == ["task_faulted"]


async def test_the_same_arguments_are_no_edit_h304() -> None:
    till = Till()
    async with opened(model(call("pay", to="me")), tools=(till.tool,)) as harness:
        submission, root = await ask(harness)
        await (await the_one(harness)).allow(arguments={"to": "me"})
        await submission.answer()
        assert await results(root) == [(None, "paid me 1")]


async def test_edited_arguments_that_do_not_fit_decide_nothing_h304() -> None:
    till = Till()
    async with opened(model(call("pay", to="me")), tools=(till.tool,)) as harness:
        await ask(harness)
        approval = await the_one(harness)
        with pytest.raises(InvalidArguments, match="amount"):
            await approval.allow(arguments={"to": "me", "amount": "much"})
        assert await the_one(harness) == approval


@pytest.mark.parametrize("answer", [Block("never"), {"to": "somebody else"}])
async def test_a_hook_that_blocks_or_would_change_edited_arguments_blocks_h304(
    answer: Block | dict[str, JsonValue],
) -> None:
    till = Till()

    @before_tool
    async def guard(asked: HookCall) -> Block | dict[str, JsonValue] | None:
        return answer if asked.arguments["to"] == "thief" else None

    extensions = [Extension("x", tools=[till.tool], hooks=[guard])]
    async with opened(model(call("pay", to="me")), extensions=extensions) as harness:
        submission, root = await ask(harness)
        await (await the_one(harness)).allow(arguments={"to": "thief"})
        await submission.answer()
        assert [code for code, _ in await results(root)] == ["blocked"]
        assert till.paid == []


# --- while it waits --------------------------------------------------------------------------------------------


async def test_a_run_whose_call_waits_is_busy_and_not_blocked_h301() -> None:
    till = Till()
    async with opened(model(call("pay", to="me")), tools=(till.tool,)) as harness:
        submission, root = await ask(harness)
        waiting = [asyncio.create_task(work) for work in (submission.answer(), root.idle(), harness.idle())]
        steer = await root.submit("Hurry.", mode="steer")
        await rest()
        assert not any(task.done() for task in waiting)
        assert (await root.busy(), await steer.status()) == (True, "queued")
        (waits,) = [task for task in (await harness.inspect()).tasks if task.kind == "pi.tool"]
        assert (waits.status, waits.signal, waits.blocked) == ("waiting", "approval", None)
        assert waits.due_at == (await the_one(harness)).expires_at
        await (await the_one(harness)).allow()
        await asyncio.gather(*waiting)
        assert await steer.status() == "done"


async def test_an_abort_ends_a_call_that_waits_aborted_h301() -> None:
    till = Till()
    async with opened(model(call("pay", to="me")), tools=(till.tool,)) as harness:
        _, root = await ask(harness)
        approval = await the_one(harness)
        await root.abort()
        assert [code for code, _ in await results(root)] == ["aborted"]
        assert (await harness.approvals(), till.paid) == ([], [])
        with pytest.raises(ApprovalRefused, match="ended"):
            await approval.allow()


async def test_the_calls_of_a_round_wait_each_by_itself_h110() -> None:
    till = Till()
    asked = model(call("pay", to="a"), call("pay", to="b"), call("pay", to="c"))
    async with opened(asked, tools=(till.tool,)) as harness:
        submission, root = await ask(harness)
        by = {str(approval.arguments["to"]): approval for approval in await root.approvals()}
        assert sorted(by) == ["a", "b", "c"]
        await by["c"].allow()
        await rest()
        assert till.paid == ["c 1"]
        await by["a"].deny()
        await by["b"].allow()
        await submission.answer()
        assert till.paid == ["c 1", "b 1"]


async def test_events_tell_of_questions_and_decisions_h268() -> None:
    till = Till()
    async with opened(model(call("pay", to="me")), tools=(till.tool,)) as harness:
        root = await harness.root()
        async with root.events() as events:
            await ask(harness)
            approval = await the_one(harness)
            await approval.allow(arguments={"to": "you"}, by="ada")
            told = []
            async for event in events:
                if isinstance(event, ApprovalRequested | ApprovalDecided | ToolEnd):
                    told.append(event)
                if isinstance(event, ToolEnd):
                    break
        asked, decided, ended = told
        assert isinstance(asked, ApprovalRequested)
        assert (asked.task, asked.name, asked.arguments) == (approval.task, "pay", {"to": "me"})
        assert (asked.digest, asked.expires_at) == (approval.digest, approval.expires_at)
        assert isinstance(decided, ApprovalDecided)
        assert (decided.allow, decided.by, decided.edited, decided.task) == (True, "ada", True, approval.task)
        assert isinstance(ended, ToolEnd)


# --- over a reopen ---------------------------------------------------------------------------------------------


class Killed:
    """A store whose process is killed at chosen moments."""

    def __init__(self, till: Till) -> None:
        self.storage = MemoryStorage()
        self.till = till
        self.model = model(call("pay", to="me"))

    def open(self, **options):
        return opened(self.model, storage=self.storage, tools=(self.till.tool,), reports=[], **options)

    def kill(self, harness: Harness) -> None:
        self.storage = self.storage.snapshot()
        harness.session.fail(ConnectionError("the test's crash"))


async def test_approvals_outlive_a_kill_and_are_listed_and_decided_afterwards_h110_h111() -> None:
    """Kept in memory they would be lost at a restart, and nobody could list them."""
    world = Killed(Till())
    async with world.open() as harness:
        submission, _ = await ask(harness)
        first = await the_one(harness)
        world.kill(harness)
    async with world.open() as harness:
        again = await the_one(harness)
        assert again == first
        await again.allow()
        assert (await (await harness.submission(submission.id)).answer()).text == "done"
    assert world.till.paid == ["me 1"]


async def test_a_decision_is_not_lost_between_it_and_the_intent_h113_h302() -> None:
    """The process ends after the decision and before the tool ran: the answer of whoever decided is not lost."""
    world = Killed(Till())
    async with world.open() as harness:
        submission, root = await ask(harness)
        world.kill(harness)
    async with world.open() as harness:  # nothing runs here
        approval = await the_one(harness)
        assert await approval.allow() is True
        record = harness.session.live.settled[approval.task]
        assert (record.status, stored_intent(record)) == ("pending", None)
        assert await harness.approvals() == []
        assert await approval.deny() is False
        world.kill(harness)
    async with world.open() as harness:
        found = await harness.submission(submission.id)
        assert (await found.answer()).text == "done"
        assert await results(harness.handle(root.id)) == [(None, "paid me 1")]
    assert world.till.paid == ["me 1"]


async def test_a_decision_that_is_used_too_late_has_expired_h113() -> None:
    world, clock = Killed(Till()), ManualClock()
    async with world.open(clock=clock, approvals=Approvals(expire_after_ms=1_000)) as harness:
        submission, root = await ask(harness)
        world.kill(harness)
    async with world.open(clock=clock) as harness:
        await (await the_one(harness)).allow()
        world.kill(harness)
    clock.now += 2
    async with world.open(clock=clock) as harness:
        await (await harness.submission(submission.id)).answer()
        assert [code for code, _ in await results(harness.handle(root.id))] == ["expired"]
    assert world.till.paid == []


async def interrupted(world: Killed, started: asyncio.Event) -> tuple[Submission, Conversation]:
    """Allowed, begun, and killed in the middle."""
    async with world.open() as harness:
        submission, root = await ask(harness)
        await (await the_one(harness)).allow()
        await started.wait()
        record = next(r for r in harness.session.live.settled.values() if r.kind == "pi.tool")
        assert getattr(record.state, "phase", None) == EXECUTE
        intent = stored_intent(record)
        assert intent is not None
        assert intent.approval is not None
        assert intent.approval.digest == call_digest("pay", {"to": "me"})
        world.kill(harness)
    return submission, root


@pytest.mark.parametrize(("replay", "code", "runs"), [("unsafe", "interrupted", 1), ("safe", None, 2)])
async def test_an_interrupted_call_is_recovered_as_ever_without_being_asked_about_again_h302(
    replay: ReplayPolicy, code: str | None, runs: int
) -> None:
    till, started, begun = Till(), asyncio.Event(), 0

    @tool(name="pay", requires_approval=True, replay=replay)
    async def pay(to: str, call: ToolCall, environment: ExecutionEnvironment | None) -> str:
        """Pay somebody."""
        nonlocal begun
        begun += 1
        started.set()
        if begun == 1:
            await asyncio.Event().wait()
        return f"paid {to}"

    till.tool = pay
    world = Killed(till)
    submission, root = await interrupted(world, started)
    async with world.open() as harness:
        await (await harness.submission(submission.id)).answer()
        assert [found for found, _ in await results(harness.handle(root.id))] == [code]
        (task,) = [t for t in await harness.task_graph() if t.kind == "pi.tool"]
        assert isinstance(task.outcome, Completed)
    assert begun == runs


async def test_a_reader_lists_them_and_cannot_decide_h111() -> None:
    till = Till()
    storage = MemoryStorage()
    async with opened(model(call("pay", to="me")), storage=storage, tools=(till.tool,)) as harness:
        await ask(harness)
    async with opened(storage=storage.snapshot(), read_only=True) as reader:
        approval = await the_one(reader)
        assert approval.arguments == {"to": "me"}
        with pytest.raises(StorageError, match="reading only"):
            await approval.allow()


async def test_a_reader_that_is_open_sees_what_its_host_asks_meanwhile_h111(tmp_path: Path) -> None:
    till, path = Till(), tmp_path / "agent.db"
    async with Harness.open(
        SqliteStorage(path), models=model(call("pay", to="me")), extensions=[Extension("x", tools=[till.tool])]
    ) as harness:
        await harness.root()
        async with Harness.open(SqliteStorage(path), read_only=True) as reader:
            assert await reader.approvals() == []
            submission = await (await harness.root()).submit("Pay.")
            while not (asked := await harness.approvals()):
                await asyncio.sleep(0)
            assert await reader.approvals() == asked
            assert await reader.handle(1).approvals() == asked
            assert await reader.handle(2).approvals() == []
            await asked[0].allow()
            await submission.answer()
            assert await reader.approvals() == []


# --- with scopes and nested calls ------------------------------------------------------------------------------


async def test_a_call_that_waits_has_not_entered_its_environment_h301() -> None:
    environment = Environment()
    held = environment.scope.asked

    @tool(requires_approval=True)
    async def work(env: ExecutionEnvironment) -> str:
        """Work."""
        return "worked"

    clock, policy = ManualClock(), Approvals(expire_after_ms=1_000)
    async with opened(
        model(call("work"), call("work")),
        tools=(work,),
        environment=cast("ExecutionEnvironment", environment),
        clock=clock,
        approvals=policy,
    ) as harness:
        submission, root = await ask(harness)
        assert held == ["attach []"]
        first, second = await harness.approvals()
        await first.allow()
        await rest()
        assert [what.split()[0] for what in held[1:]] == ["enter", "before_intent", "capture", "before_result", "leave"]
        held.clear()
        async with environment.scope.turn:  # another call has it
            await second.allow()
            await rest()
            clock.now += 1
        await submission.answer()
        assert held == ["enter work", "leave False"]
        assert sorted(str(code) for code, _ in await results(root)) == ["None", "expired"]


async def test_a_nested_call_is_asked_about_too_and_its_caller_waits_h109_h110() -> None:
    till, got = Till(), []

    @tool
    async def outer(call: ToolCall) -> str:
        """Call another tool."""
        for key, to in (("a", "me"), ("b", "you")):
            got.append(await call.call("pay", {"to": to}, key=key))
        return "called"

    async with opened(model(call("outer")), tools=(outer, till.tool)) as harness:
        submission, root = await ask(harness)
        first = await the_one(harness)
        assert (first.tool, got) == ("pay", [])
        await first.allow(arguments={"to": "ada", "amount": 3})
        await rest()
        await (await the_one(harness)).deny("no")
        assert (await submission.answer()).text == "done"
        assert [(result.text, result.code) for result in got] == [
            ("paid ada 3", None),
            ("The call was denied: no", "denied"),
        ]
        entry = next(e for e in await root.entries() if e.kind == TOOL_RESULT and e.by_task == first.task)
        (told,) = entry.data_as(ToolResultData).diagnostics
        assert '{"to":"ada","amount":3}' in told


async def test_edited_arguments_by_mail_are_taken_up_once_the_tool_is_installed_h304() -> None:
    till, storage, talk = Till(), MemoryStorage(), model(call("pay", to="me"))
    async with opened(talk, storage=storage, tools=(till.tool,)) as harness:
        await ask(harness)
        asked = await the_one(harness)
    body: JsonValue = {"task": asked.task, "allow": True, "digest": asked.digest, "arguments": {"to": "you"}}
    mail = storage.post("approval", body, now=0)
    later = storage.post("signal", {"task": 999, "name": "go"}, now=0)
    async with opened(talk, storage=storage) as harness:
        await until(lambda: later in storage._contents.replies)
        assert mail not in storage._contents.replies
        harness.registry.install(Extension("others", tools=[]))
        await rest()
        assert mail not in storage._contents.replies
        harness.registry.install(Extension("late", tools=[till.tool]))
        await until(lambda: mail in storage._contents.replies)
        submission = await (await harness.root()).submit("Pay.", request_id="pay")
        await submission.answer()
        assert till.paid == ["you 1"]
