"""Secrets planted wherever words can be said or stored, and looked for wherever a host reads of them (H285, H286).

A marker is planted in each place by name, so that a finding names the leak. Words of exceptions have markers of their
own: rule H286 says where those may be read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.compaction_kit import asks_for_summary
from harness.kit import Hold, Note, until
from perdure import (
    Agent,
    Block,
    Document,
    DocumentFieldError,
    Extension,
    Harness,
    LocalEnvironment,
    Next,
    NotJson,
    PromptSection,
    Report,
    RequestConflict,
    RetryPolicy,
    Run,
    SqliteStorage,
    StoredTask,
    Task,
    ToolCall,
    ToolResult,
    Unanswered,
    coding_tools,
    tool,
)
from perdure.cli.app import app
from perdure.harness.compaction_policy import Compaction
from perdure.harness.hooks import HookCall, after_tool, before_tool
from perdure.harness.model import ModelRequest
from perdure.kernel.document import field
from perdure.kernel.session import Settled
from perdure.models import ProviderModels
from perdure.testing.model import Reply, ScriptedModel, call, calls, fail, say
from telemetry.otel_kit import Told
from telemetry.secret_log import Log, caught

SAID = "sEcReT-said-"
RAISED = "sEcReT-raised-"


def said(where: str) -> str:
    return f"{SAID}{where}"


def raised(where: str) -> str:
    return f"{RAISED}{where}"


@pytest.fixture
def log() -> Iterator[Log]:
    with caught() as log:
        yield log


class Profile(Document, kind="app.profile", version=1, scope="conversation"):
    note: str = ""
    number: int = 0
    parts: dict[str, str] = field(default_factory=dict)


class Kept(Document, kind="app.kept", version=1, scope="session", family=True):
    note: str = ""


class Faulty(Task[str, str], kind="app.faulty", version=1):
    async def start(self, run: Run[str, str, None]) -> Next[str]:
        raise ValueError(raised("phase"))


class Rejected(Task[str, str], kind="app.rejected", version=1):
    async def start(self, run: Run[str, str, None]) -> Next[str]:
        async with run.commit() as tx:
            return tx.wait_signal("go", self.start, None)


class Migrated(Task[str, str], kind="app.rejected", version=2):
    async def start(self, run: Run[str, str, None]) -> Next[str]:
        async with run.commit() as tx:
            return tx.complete("")

    @classmethod
    def migrate(cls, stored: StoredTask) -> StoredTask:
        raise ValueError(raised("migrate"))


@tool(replay="safe")
async def work(text: str, call: ToolCall) -> ToolResult:
    """Do the work."""
    call.output(said("output"))
    call.details({"key": said("details")})
    call.diagnostic(said("diagnostic"))
    await call.memo("kept", said("memo"))
    return ToolResult(said("result"), details={said("detail-key"): said("details")}, diagnostics=(said("diagnostics"),))


@tool
async def breaks(text: str) -> str:
    """Break."""
    raise LookupError(raised("tool"))


@tool(timeout_ms=1)
async def hangs(text: str, call: ToolCall) -> str:
    """Hang until it is stopped."""
    call.output(said("output-of-a-timeout"))
    await asyncio.get_running_loop().create_future()
    return said("too-late")


@tool
async def stuck(text: str, call: ToolCall) -> str:
    """Never end."""
    call.output(said("output-of-a-cut-off-call"))
    call.diagnostic(said("diagnostic"))
    await asyncio.get_running_loop().create_future()
    return said("too-late")


@tool
async def guarded(text: str) -> str:
    """Guarded by a hook that fails."""
    return said("never")


@tool
async def refused(text: str) -> str:
    """Refused by a hook."""
    return said("never")


@before_tool
async def guard(asked: HookCall) -> Block | None:
    if asked.name == "guarded":
        raise PermissionError(raised("before-hook"))
    return Block(said("block")) if asked.name == "refused" else None


@after_tool
async def after(asked: HookCall, result: ToolResult) -> ToolResult | None:
    if asked.name == "work":
        raise PermissionError(raised("after-hook"))
    return None


def section(_: object) -> str:
    raise OSError(raised("section"))


async def around(call: ToolCall, run: Callable[[], Awaitable[object]]) -> object:
    return await run()


def reply(request: ModelRequest) -> Reply:
    """By the words of the newest input; a round of tools first, then words."""
    newest = request.messages[-1]
    words = getattr(newest, "text", "")
    if asks_for_summary(request):
        bad = said("bad-summary") in str(request.messages)
        return fail("refused", raised("summary")) if bad else say(said("summary"))
    if "fail once" in words:
        return fail("overloaded", raised("provider"), times=1, partial=said("partial"), then=say(said("answer")))
    if "fail" in words:
        return fail("refused", raised("provider"), partial=said("partial"))
    if "crash" in words:
        raise RuntimeError(raised("adapter"))
    if "stuck" in words:
        return call("stuck", text=said("argument"))
    if "tools" in words:
        given = {"text": said("argument")}
        named = [call(name, **given) for name in ("work", "breaks", "hangs", "guarded", "refused")]
        made_up = [call(said("made-up-tool")), replace(call("work", **given), id=said("call-id"))]
        return calls(
            *named, *made_up, call("work", wrong=said("bad-argument")), call("bash", command=COMMAND), text=said("text")
        )
    return say(said("answer"), thinking=said("thinking"))


COMMAND = f'echo {said("command")} "$PLANTED_SECRET"'


class World:
    """One store, and all that its host reads beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "agent.db"
        self.told = Told()
        self.reports: list[Report] = []
        self.errors: list[str] = []
        self.looked: list[str] = []

    def open(self, model: object, *, tasks: Sequence[type[Task]] = (Faulty, Rejected)):
        extension = Extension(
            "app",
            tools=[work, breaks, hangs, stuck, guarded, refused],
            hooks=[guard, after],
            sections=[PromptSection("style", said("section")), PromptSection("broken", section)],
            wrappers=[around],
            tasks=tasks,
        )
        return Harness.open(
            SqliteStorage(self.path, durability="process"),
            models=model,  # pyright: ignore[reportArgumentType]
            extensions=[extension, coding_tools()],
            environment=LocalEnvironment(self.folder),
            instructions=said("instructions"),
            compaction=Compaction(keep_recent_tokens=50, background_tokens=0),
            retry=RetryPolicy(retries=1, first_ms=1, jitter=0),
            telemetry=self.told.telemetry,
            on_report=self.reports.append,
        )

    async def look(self, harness: Harness) -> None:
        """What a host sees of live work, without the words of why it is blocked."""
        for task in (await harness.inspect()).tasks:
            self.looked.append(repr(task).replace(repr(task.detail), "''") if task.detail else repr(task))

    def inspect(self) -> None:
        done = CliRunner().invoke(app, ["inspect", str(self.path), "--json"])
        assert done.exit_code == 0, done.output
        self.looked.append(done.output)


async def refuses(error: type[BaseException], work: Callable[[], Awaitable[object]], world: World) -> None:
    with pytest.raises(error) as caught:
        await work()
    world.errors.append(str(caught.value))


async def everything(world: World) -> None:
    """Turns with tools, failures, retries; documents, entries and tasks; a crash, and what recovers from it."""
    async with world.open(ScriptedModel(reply)) as harness:
        root = await harness.root(agent=Agent(instructions=said("agent-instructions")))
        await root.set_name(said("name"), labels={said("label"): said("label-value")})
        await root.write(Note(text=said("entry")))
        async with root.commit() as tx:
            profile = await tx.draft(Profile)
            profile.note, profile.parts = said("document"), {said("key"): said("value")}
            faulty = tx.create_task(Faulty, said("task-input"))
            rejected = tx.create_task(Rejected, said("task-input"))
        for text in ("tools", "fail once"):
            submission = await root.submit(f"{text} {said('prompt')}", request_id=said(f"request-{text}"))
            assert SAID in (await submission.answer()).text
        for text in ("fail", "crash"):
            submission = await root.submit(f"{text} {said('prompt')}")
            with pytest.raises(Unanswered) as unanswered:
                await submission.answer()
            assert RAISED in str(unanswered.value), "the host is told why"
        for instructions in (said("bad-summary"), said("summary-wish")):
            compaction = await root.compact(instructions=instructions)
            await harness.tasks.wait(compaction)
        await root.reset(said("handoff"))
        watch = harness.session.watch(Kept, key=said("document-key"))
        async with root.commit() as tx:
            (await tx.draft(Kept, key=said("document-key"))).note = said("document")
        await watch.__aenter__()
        await harness.tasks.wait(faulty.id)
        await harness.send_signal(rejected.id, "other", said("signal"))
        await refusals(world, harness, rejected.id)
        await world.look(harness)
    hold = Hold(2)

    async def pace(request: ModelRequest, event: int) -> None:
        if "a long answer" in getattr(request.messages[-1], "text", ""):
            await hold(request, event)

    async with world.open(ScriptedModel(reply, pace=pace)) as harness:
        root = await harness.root()
        await root.submit(f"a long answer {said('prompt')}")
        await hold.reached.wait()
        await root.submit(f"queued {said('prompt')}", request_id=None)
        shown = asyncio.Event()

        def observe(settled: Settled) -> None:
            if any(
                b"output-of-a-cut-off-call" in (write.ops or write.base or b"") for write in settled.batch.documents
            ):
                shown.set()

        harness.session.observe(observe)
        other = await harness.create_conversation(name=said("name"), labels={said("label"): said("label-value")})
        await other.submit(f"stuck {said('prompt')}")
        await shown.wait()
        await world.look(harness)
        harness.session.fail(ConnectionError(raised("storage")))
    await asyncio.to_thread(world.inspect)
    async with world.open(ScriptedModel(reply), tasks=(Faulty, Migrated)) as harness:
        harness.resume()
        await harness.send_signal(rejected.id, "go")
        await until(lambda: harness.tasks.blocked(rejected.id) == "migration_failed")
        await world.look(harness)
        await harness.tasks.idle(other.id)
        await (await harness.root()).abort()
    await asyncio.to_thread(world.inspect)


async def refusals(world: World, harness: Harness, task: int) -> None:
    """Errors that name what was wrong, and do not quote it."""
    root = await harness.root()

    async def bad_document() -> None:
        async with root.commit() as tx:
            (await tx.draft(Profile)).number = said("wrong-type")  # pyright: ignore[reportAttributeAccessIssue]

    async def bad_json() -> None:
        await harness.send_signal(task, "name", {"at": [{said("set")}]})  # pyright: ignore[reportArgumentType]

    again = said("request-tools")
    await refuses(DocumentFieldError, bad_document, world)
    await refuses(NotJson, bad_json, world)
    await refuses(RequestConflict, lambda: root.submit(said("other-content"), request_id=again), world)
    world.errors[-1] = world.errors[-1].replace(again, "")  # told to who gave it


def leaks(texts: Sequence[str], marker: str) -> list[str]:
    return [text[max(0, text.index(marker) - 100) : text.index(marker) + 60] for text in texts if marker in text]


async def test_no_secret_is_told_logged_reported_or_inspected_h285_h286(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_SECRET", said("environment"))
    monkeypatch.setenv("OPENAI_API_KEY", said("api-key"))
    world = World(tmp_path)
    await everything(world)
    planted = world.path.read_bytes()
    for where in ("prompt", "result", "document", "made-up-tool", "task-input", "environment"):
        assert said(where).encode() in planted, f"{where} was not planted"
    assert raised("provider").encode() in planted
    kinds = {report.type for report in world.reports}
    assert {
        "tool_raised",
        "compaction_failed",
        "unreleased",
        "hook_failed",
        "model_adapter_failed",
        "task_faulted",
        "session_failed",
        "task_blocked",
    } <= kinds
    assert {RAISED in str(report.error) for report in world.reports if report.error} >= {True}, (
        "the error itself is there"
    )
    codes = {code for _, code in world.told.counts("perdure.tool_calls")}
    assert codes >= {"ok", "tool_error", "timeout", "blocked", "invalid_arguments", "tool_unavailable", "interrupted"}
    assert {outcome for outcome, _ in world.told.counts("perdure.compactions")} == {"completed", "failed"}
    assert world.told.spans.open == []
    names = {line.partition(" ")[0] for line in log.lines}
    assert {"perdure", "perdure.runs", "perdure.calls", "perdure.tasks", "perdure.commits"} <= names
    messages = [f"{report.type} {report.message} {report.kind} {report.extension}" for report in world.reports]
    for marker in (SAID, RAISED):
        assert leaks([world.told.everything()], marker) == []
        assert leaks(log.lines, marker) == []
        assert leaks(messages, marker) == []
    # Names and request ids are shown to who inspects; nothing else that others wrote.
    named = [said("name"), said("request-tools"), said("request-fail once"), said("made-up-tool")]
    for text in world.looked:
        shown = text
        for name in named:
            shown = shown.replace(name, "")
        assert leaks([shown], SAID) == []
        assert leaks([shown], RAISED) == []
    assert leaks(world.errors, SAID) == []


async def test_a_provider_that_cannot_be_reached_gives_no_key_and_no_address_away_h285(
    tmp_path: Path, log: Log
) -> None:
    world = World(tmp_path)
    model = ProviderModels(
        "openai-compatible:small",
        base_url=f"http://127.0.0.1:9/v1/{said('path')}?key={said('query')}",
        api_key=said("key"),
    )
    async with world.open(model) as harness:
        root = await harness.root()
        with pytest.raises(Unanswered) as unanswered:
            await (await root.submit(said("prompt"))).answer()
        world.errors.append(str(unanswered.value))
    assert world.told.counts("perdure.runs") == {("model_error",): 1}
    assert leaks([world.told.everything(), *(line for line in log.lines if line.startswith("perdure"))], SAID) == []
    assert leaks([*map(str, world.reports), *world.errors], SAID) == []
    assert said("key") not in "".join(log.lines), "not even where libraries log"
