"""``perdure approvals``: other processes list and decide, whether the host runs, was killed, or comes back (H111 to
H114)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import perdure as package
from perdure import Extension, Harness, SqliteStorage, tool
from perdure.cli.app import app
from perdure.cli.approvals import decide as module
from perdure.harness.approval import Approvals
from perdure.harness.approval_rules import ApprovalRule
from perdure.harness.documents import TOOL_RESULT, ToolResultData
from perdure.harness.scopes import TOOL_TASK
from perdure.kernel.json import JsonValue
from perdure.testing.model import ScriptedModel, call, calls, say


async def perdure(*words: str | Path | int) -> Result:
    """The command, beside the loop of this test."""
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, [str(word) for word in words]))


class Process:
    """A host in a process of its own."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self._child = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "till_host.py"), str(store)],
            env={**os.environ, "PYTHONPATH": str(Path(package.__file__).parents[1])},
            stdout=subprocess.PIPE,
            text=True,
        )

    def hears(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline().strip()

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()

    def ends(self) -> int:
        return self._child.wait(60)


@pytest.fixture
def hosts() -> Iterator[list[Process]]:
    found: list[Process] = []
    yield found
    for process in found:
        process.kill()


def paid(store: Path) -> str:
    try:
        return Path(f"{store}.paid").read_text()
    except FileNotFoundError:
        return ""


async def task_of(store: Path) -> int:
    listed = await perdure("approvals", "ls", store, "--json")
    assert listed.exit_code == 0, listed.output
    (line,) = listed.output.splitlines()
    return json.loads(line)["task"]


# --- real processes --------------------------------------------------------------------------------------------


async def test_a_killed_host_finds_what_was_decided_while_nobody_had_the_store_h111_h113(
    tmp_path: Path, hosts: list[Process]
) -> None:
    """What is asked and what is said to it are in the store, not in a process."""
    store = tmp_path / "till.db"
    hosts.append(Process(store))
    assert hosts[0].hears() == "asked"
    hosts[0].kill()
    listed = await perdure("approvals", "ls", store)
    assert "pay  in conversation 1, asked" in listed.output
    assert "    to: ada\n    amount: 5\n" in listed.output
    assert "waits to be allowed; nothing of it was done" in (await perdure("show", store)).output
    assert "waits to be allowed or denied" in (await perdure("inspect", store, "--json")).output
    assert re.search(r'pay +approval .* UTC +\{"to": "ada", "amount": 5\}\n', (await perdure("inspect", store)).output)
    task = await task_of(store)
    allowed = await perdure("approvals", "allow", store, task)
    assert allowed.exit_code == 0, allowed.output
    assert (await perdure("approvals", "ls", store)).output == "no call waits for approval\n"
    for other in ("allow", "deny"):
        late = await perdure("approvals", other, store, task)
        assert (late.exit_code, f"call {task} was allowed at " in late.output) == (1, True)
        assert late.output.endswith("; that decision stands\n")
    assert "was allowed at " in (await perdure("inspect", store)).output
    assert paid(store) == ""
    hosts.append(Process(store))
    assert hosts[1].hears() == "done"
    assert hosts[1].ends() == 0
    assert paid(store) == "ada 5\n"


async def test_a_host_that_runs_is_told_through_the_mailbox_h112(tmp_path: Path, hosts: list[Process]) -> None:
    store = tmp_path / "till.db"
    hosts.append(Process(store))
    assert hosts[0].hears() == "asked"
    task = await task_of(store)
    wrong = await perdure("approvals", "allow", store, task, "--edit", '{"amount": 7}')
    assert (wrong.exit_code, "to" in wrong.output) == (1, True)
    edited = await perdure("approvals", "allow", store, task, "--edit", '{"to": "ada", "amount": 2}')
    assert edited.exit_code == 0, edited.output
    assert hosts[0].hears() == "done"
    assert hosts[0].ends() == 0
    assert paid(store) == "ada 2\n"


async def test_edited_arguments_wait_for_a_host_that_can_check_them_h304(tmp_path: Path, hosts: list[Process]) -> None:
    store = tmp_path / "till.db"
    hosts.append(Process(store))
    assert hosts[0].hears() == "asked"
    hosts[0].kill()
    task = await task_of(store)
    kept = await perdure("approvals", "allow", store, task, "--edit", '{"to": "bob"}')
    assert (kept.exit_code, "kept in the mailbox" in kept.output) == (3, True)
    # Another opening without the tool leaves it there.
    assert (await perdure("approvals", "rules", "add", store, "other")).exit_code == 0
    assert await task_of(store) == task
    hosts.append(Process(store))
    while (said := hosts[1].hears()) == "asked":
        continue
    assert (said, hosts[1].ends(), paid(store)) == ("done", 0, "bob 1\n")


# --- beside a host of this process ------------------------------------------------------------------------------


@tool(requires_approval=True)
async def pay(to: str) -> str:
    """Pay somebody."""
    return f"paid {to}"


@asynccontextmanager
async def host(path: Path, *replies) -> AsyncGenerator[Harness]:
    model = ScriptedModel([*replies, say("done")])
    async with Harness.open(SqliteStorage(path), models=model, extensions=[Extension("x", tools=[pay])]) as harness:
        yield harness


async def test_calls_are_denied_with_a_reason_and_decided_once_h303_h114(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "agent.db"
    async with host(store, calls(call("pay", to="a\x1b[31m\nb"), call("pay", to="c"))) as harness:
        root = await harness.root()
        submission = await root.submit("Pay.")
        while len(pending := await harness.approvals()) < 2:
            await asyncio.sleep(0)
        listed = await perdure("approvals", "ls", store)
        assert "    to: a⟨U+001B⟩[31m\n    │ b\n" in listed.output
        denied = await perdure("approvals", "deny", store, pending[0].task, "--reason", "not\x07today")
        assert denied.output == f"denied: call {pending[0].task} of pay\n", denied.output
        stale = [question for question in await module.waiting(store) if question.task == pending[1].task]
        await pending[1].allow()
        await submission.answer()

        async def as_before(_: Path):
            return stale

        with monkeypatch.context() as patched:  # somebody else was faster
            patched.setattr(module, "waiting", as_before)
            late = await perdure("approvals", "deny", store, pending[1].task)
            assert (late.exit_code, f"call {pending[1].task} was allowed at " in late.output) == (1, True)
        results = [e.data_as(ToolResultData).code for e in await root.entries() if e.kind == TOOL_RESULT]
        assert sorted(map(str, results)) == ["None", "denied"]
        none = await perdure("approvals", "allow", store, pending[0].task)
        assert (none.exit_code, f"call {pending[0].task} was denied at " in none.output) == (1, True)
        assert none.output.endswith("; that decision stands\n")


async def test_why_nothing_is_decided_about_a_call_is_said_h303(tmp_path: Path) -> None:
    store = tmp_path / "agent.db"
    model = ScriptedModel([call("pay", to="me"), say("done"), call("pay", to="you"), call("pay", to="us"), say("done")])
    approvals = Approvals(expire_after_ms=1)
    extension = Extension("x", tools=[pay])
    ids: list[int] = []
    async with Harness.open(SqliteStorage(store), models=model, extensions=[extension], approvals=approvals) as harness:
        await (await (await harness.root()).submit("Pay.")).answer()  # nobody was fast enough
        ids += [task.id for task in await harness.session.tasks(kind=TOOL_TASK)]
    async with Harness.open(SqliteStorage(store), models=model, extensions=[extension]) as harness:
        root = await harness.root()
        await root.submit("Pay.")
        while not (pending := await harness.approvals()):
            await asyncio.sleep(0)
        await root.abort()
        ids += [pending[0].task]
        await harness.add_approval_rule(ApprovalRule(tool="pay"))
        await (await root.submit("Pay.")).answer()
        ids += [(await harness.session.tasks(kind=TOOL_TASK))[-1].id]
        run = (await harness.session.tasks())[0].id
    words = ("expired at ", "was aborted at ", "has ended at ")
    for id, said in zip(ids, words, strict=True):
        done = await perdure("approvals", "allow", store, id)
        assert (done.exit_code, f"call {id} {said}" in done.output) == (1, True), done.output
    wrong = await perdure("approvals", "deny", store, run)
    assert f"task {run} is no call; perdure approvals ls {store} lists" in wrong.output


@pytest.mark.parametrize("owned", [False, True])
async def test_rules_are_added_listed_and_revoked_whoever_has_the_store_h306(tmp_path: Path, owned: bool) -> None:
    store = tmp_path / "agent.db"
    async with host(store) as harness:
        await harness.root()
        if owned:
            await _rules(store)
    if not owned:
        await _rules(store)


async def _rules(store: Path) -> None:
    words = ("--is", "to=me", "--is", "n=[1]", "--below", "path=src", "--only", "--note", "why\nnot")
    assert (await perdure("approvals", "rules", "add", store, "pay", *words)).output == "rule 1 is in force\n"
    denying = await perdure("approvals", "rules", "add", store, "b*", "--deny", "--matches", "command=rm *")
    assert denying.output == "rule 2 is in force\n"
    first, second = (await perdure("approvals", "rules", "ls", store)).output.splitlines()
    what = '1  allow pay where to is "me", n is [1], path is below "src", no other arguments ('
    assert first.startswith(what)
    assert first.endswith(r': "why\nnot")')
    assert second.startswith('2  deny b* where command matches "rm *" (')
    (_, shown) = (await perdure("approvals", "rules", "ls", store, "--json")).output.splitlines()
    assert json.loads(shown)["effect"] == "deny"
    assert (await perdure("approvals", "rules", "rm", store, 1)).output == "rule 1 is revoked\n"
    gone = await perdure("approvals", "rules", "rm", store, 1)
    assert (gone.exit_code, "there is no approval rule 1" in gone.output) == (1, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("allow", 7, "--edit", "{"), "there is no call 7; perdure approvals ls"),
        (("rules", "add", "pay", "--is", "to"), "--is is NAME=VALUE"),
        (("rules", "add", "pay", "--is", "to=1", "--matches", "to=2"), "named once"),
        (("rules", "add", "pay", "--below", "path=../x"), "below the working directory"),
        (("deny", 7, "--reason", "x" * 3_000), "at most"),
    ],
)
async def test_what_makes_no_sense_is_said_in_a_sentence_h303(
    tmp_path: Path, words: tuple[str | int, ...], said: str
) -> None:
    store = tmp_path / "agent.db"
    async with host(store) as harness:
        await harness.root()
    at = 2 if words[0] == "rules" else 1
    done = await perdure("approvals", *words[:at], store, *words[at:])
    assert done.exit_code == 1, done.output
    assert said in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(("edit", "said"), [("{", "not JSON"), ("[1]", "one JSON object")])
async def test_edited_arguments_are_one_json_object_h304(tmp_path: Path, edit: str, said: str) -> None:
    store = tmp_path / "agent.db"
    async with host(store, call("pay", to="me")) as harness:
        await (await harness.root()).submit("Pay.")
        while not (pending := await harness.approvals()):
            await asyncio.sleep(0)
        done = await perdure("approvals", "allow", store, pending[0].task, "--edit", edit)
        assert (done.exit_code, said in done.output) == (1, True), done.output
        assert await harness.approvals() == pending


async def test_requests_by_mail_that_make_no_sense_are_refused_h112(tmp_path: Path) -> None:
    from perdure.cli import mailbox

    store = tmp_path / "agent.db"
    async with host(store, call("pay", to="me")) as harness:
        await (await harness.root()).submit("Pay.")
        while not (pending := await harness.approvals()):
            await asyncio.sleep(0)
        task, digest = pending[0].task, pending[0].digest
        told = []
        posted: list[tuple[str, dict[str, JsonValue]]] = [
            ("approval", {"task": task, "allow": True, "digest": "other"}),
            ("approval", {"task": task, "allow": True, "digest": digest, "more": 1}),
            ("approval", {"task": 99_999, "allow": True, "digest": digest, "arguments": {}}),
            ("approval-rule", {}),
            ("approval-rule", {"remove": 5}),
            ("approval-rule", {"add": {"tool": "pay", "effect": "perhaps"}}),
        ]
        for kind, body in posted:
            mail = await mailbox.post(store, kind, body)
            reply = await mailbox.reply(store, mail, float("inf"), wait=True)
            assert reply is not None
            assert not reply.ok
            told.append(json.loads(bytes(reply.result))["error"])
        assert told[0] == "ApprovalRefused"
        assert told[2] == "NotFound"
        assert told[4] == "NotFound"
        assert await harness.approvals() == pending
