"""A harness over SQLite that asks real protocols: turns, tools, failures, kills (rules H63 to H77, H170)."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from model_kit import PICTURE, PNG, PROTOCOLS, models
from replies import Answer, Broken, Refusal, Tokens, call, say
from server import KEY, Provider, provider

from perdure import (
    Agent,
    Conversation,
    Extension,
    Harness,
    RetryPolicy,
    SqliteStorage,
    Text,
    ToolError,
    ToolResult,
    Unanswered,
    Usage,
    tool,
)
from perdure.harness.events import MessageDelta
from perdure.harness.messages import AssistantMessage, decode_messages
from perdure.harness.tool import AnyTool
from perdure.kernel.reports import Report
from perdure.models import ProviderModels

each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)
QUICKLY = RetryPolicy(retries=3, first_ms=1, jitter=0)


@tool(replay="safe")
async def look(at: str) -> str:
    """Look at something."""
    return f"{at} is blue"


@asynccontextmanager
async def harness(
    server: Provider, protocol: str, path: Path, *, tools: Sequence[AnyTool] = (look,), **options: Any
) -> AsyncIterator[Harness]:
    reports: list[Report] = []
    async with Harness.open(
        SqliteStorage(path, durability="process"),
        models=options.pop("models", None) or models(server, protocol),
        extensions=[Extension("tools", tools=list(tools))],
        instructions="Be kind.",
        retry=QUICKLY,
        on_report=reports.append,
        **options,
    ) as opened:
        yield opened
    assert [report.type for report in reports] == []


def killed(path: Path) -> Path:
    """The store as a kill would leave it now. Copied by another process, which takes no lock of ours with it."""
    crashed = path.with_name("crashed.db")
    for suffix in ("", "-wal"):
        if Path(f"{path}{suffix}").exists():
            subprocess.run(["cp", f"{path}{suffix}", f"{crashed}{suffix}"], check=True)
    return crashed


async def ask(conversation: Conversation, content: Any) -> str:
    return (await (await conversation.submit(content)).answer()).text


async def kinds(conversation: Conversation) -> list[str]:
    return [entry.kind.removeprefix("pi.") for entry in await conversation.entries(limit=1000)]


async def answers(conversation: Conversation) -> list[AssistantMessage]:
    messages = [decode_messages(entry.raw_messages) for entry in await conversation.entries(limit=1000)]
    return [message for several in messages for message in several if isinstance(message, AssistantMessage)]


@each_protocol
async def test_turns_of_a_conversation_h63(protocol: str, tmp_path: Path) -> None:
    tokens = Tokens(input=10, output=5, cache_read=90)
    async with provider(say("Hello."), say("Well.", tokens=tokens)) as server:
        async with harness(server, protocol, tmp_path / "s.db") as them:
            root = await them.root()
            assert await ask(root, "hi") == "Hello."
            assert await ask(root, "how are you?") == "Well."
            used = await root.usage()
            (totals,) = used.models.values()
        server.check_prefixes()
        assert "Be kind." in json.dumps(server.bodies[0])
        them = models(server, protocol)
    assert them.default is not None
    costs = [
        them.price(them.default, Usage(input=each.input, output=each.output, cache_read=each.cache_read))
        for each in (Tokens(), tokens)
    ]
    assert None not in costs
    assert used.cost is not None
    assert used.cost == sum(cost for cost in costs if cost is not None)
    assert totals == {
        "requests": 2,
        "input": 110,
        "output": 25,
        "cache_read": 90,
        "cache_write": 0,
        "reasoning": 0,
        "cost_nano_usd": used.cost * 10**9,
        "unpriced": 0,
    }


@each_protocol
async def test_a_round_of_parallel_tools_with_thinking_over_a_restart_h77(protocol: str, tmp_path: Path) -> None:
    """The calls are answered by one process, what comes of them by the next; what was thought is signed still."""
    two = call(("look", '{"at": "the sea"}'), ("look", '{"at": "the sky"}'), thinking="Both.", text="I look.")
    async with provider(two, Broken(answer=say("Both are"), after=1, how="stall"), say("Both are blue.")) as server:
        async with harness(server, protocol, tmp_path / "s.db") as them:
            root = await them.root(agent=Agent(thinking="medium"))
            submission = await root.submit("look")
            await server.stalled.wait()
            crashed = killed(tmp_path / "s.db")
            await root.abort()
        async with harness(server, protocol, crashed) as them:
            again = await them.submission(submission.id)
            assert (await again.answer()).text == "Both are blue."
            assert await kinds(await them.root()) == [
                "user",
                "system",
                "assistant",
                "tool-result",
                "tool-result",
                "assistant",
            ]
        # Byte for byte what was sent before the kill.
        assert server.bodies[1] == server.bodies[2]
        server.check_prefixes()
        sent = json.dumps(server.bodies[2])
    assert sent.index("the sea is blue") < sent.index("the sky is blue")
    assert "Both." in sent


@each_protocol
async def test_what_streamed_before_a_kill_is_no_part_of_what_is_sent_again_h69(protocol: str, tmp_path: Path) -> None:
    half = Broken(answer=say("Once upon a time there was a princess."), after=8, how="stall")
    async with provider(half, say("The end.")) as server:
        async with harness(server, protocol, tmp_path / "s.db", partial_interval_ms=0) as them:
            root = await them.root()
            async with root.events() as events:
                submission = await root.submit("a story")
                async for event in events:
                    if isinstance(event, MessageDelta):
                        break
            crashed = killed(tmp_path / "s.db")
            await root.abort()
        async with harness(server, protocol, crashed) as them:
            assert (await (await them.submission(submission.id)).answer()).text == "The end."
            told = await answers(await them.root())
        assert server.bodies[0] == server.bodies[1]
    assert [message.stop_reason for message in told] == ["aborted", "stop"]
    assert told[0].text.startswith("Once")


@each_protocol
async def test_a_tool_that_was_killed_is_told_as_interrupted_h92(protocol: str, tmp_path: Path) -> None:
    entered = asyncio.Event()

    @tool(name="look")
    async def stuck(at: str) -> str:
        """Look at something."""
        entered.set()
        await asyncio.Event().wait()
        return at

    async with provider(call(("look", '{"at": "it"}')), say("I do not know.")) as server:
        async with harness(server, protocol, tmp_path / "s.db", tools=[stuck]) as them:
            root = await them.root()
            submission = await root.submit("look")
            await entered.wait()
            crashed = killed(tmp_path / "s.db")
            await root.abort()
        async with harness(server, protocol, crashed, tools=[stuck]) as them:
            assert (await (await them.submission(submission.id)).answer()).text == "I do not know."
        assert "was interrupted" in json.dumps(server.bodies[1])
        server.check_prefixes()


@each_protocol
async def test_an_answer_cut_off_by_an_abort_leaves_a_transcript_that_can_be_told_h60(
    protocol: str, tmp_path: Path
) -> None:
    """And the provider need not say to the end what nobody hears."""
    half = Broken(answer=call(("look", '{"at": "the sea"}'), text="I look."), after=4, how="stall")
    async with provider(half, say("Yes?")) as server, harness(server, protocol, tmp_path / "s.db") as them:
        root = await them.root()
        await root.submit("look")
        await server.stalled.wait()
        await root.abort()
        await server.left.wait()
        assert await ask(root, "never mind") == "Yes?"


@each_protocol
async def test_errors_of_tools_are_told_to_the_model_h101(protocol: str, tmp_path: Path) -> None:
    @tool(name="look")
    async def blind(at: str) -> str:
        """Look at something."""
        raise ToolError(f"it is too dark to see {at}")

    wrong = call(("look", '{"at": "it"}'), ("look", '{"wrong": 1}'), ("nothing", "{}"), ("look", '{"at": "cut'))
    async with provider(wrong, say("Sorry.")) as server:
        async with harness(server, protocol, tmp_path / "s.db", tools=[blind]) as them:
            assert await ask(await them.root(), "look") == "Sorry."
        sent = json.dumps(server.bodies[1])
    for words in ("it is too dark to see it", "there is no such argument", "not valid JSON", "nothing"):
        assert words in sent


@each_protocol
@pytest.mark.parametrize("arguments", [' {"at": "the sea"}', '{"at": "the sea"}\n', '\r\n\t{ "at":\n"the sea" }  '])
async def test_white_space_around_arguments_harms_nothing_h86(protocol: str, arguments: str, tmp_path: Path) -> None:
    async with provider(call(("look", arguments)), say("It is blue.")) as server:
        async with harness(server, protocol, tmp_path / "s.db") as them:
            assert await ask(await them.root(), "look") == "It is blue."
        assert "the sea is blue" in json.dumps(server.bodies[1])


@each_protocol
async def test_a_steer_joins_behind_the_results_h24(protocol: str, tmp_path: Path) -> None:
    entered, released = asyncio.Event(), asyncio.Event()

    @tool(name="look")
    async def held(at: str) -> str:
        """Look at something."""
        entered.set()
        await released.wait()
        return f"{at} is blue"

    async with provider(call(("look", '{"at": "it"}')), say("Done.")) as server:
        async with harness(server, protocol, tmp_path / "s.db", tools=[held]) as them:
            root = await them.root()
            first = await root.submit("look")
            await entered.wait()
            steer = await root.submit("and be quick", mode="steer")
            released.set()
            assert (await steer.answer()).text == "Done."
            assert (await first.answer()).text == "Done."
        server.check_prefixes()
        sent = json.dumps(server.bodies[1])
    assert sent.index("it is blue") < sent.index("and be quick")


@each_protocol
async def test_a_changed_prompt_is_told_where_it_changed_h65(protocol: str, tmp_path: Path) -> None:
    async with provider(say("Hello."), say("Hm."), say("Yes.")) as server:
        async with harness(server, protocol, tmp_path / "s.db") as them:
            root = await them.root()
            await ask(root, "hi")
            await root.set_agent(instructions="Be brief.")
            await ask(root, "how are you?")
            await ask(root, "really?")
        # Nothing that was told before is told otherwise: the cache still hits.
        server.check_prefixes()
        assert "Be brief." not in json.dumps(server.bodies[0])
        assert json.dumps(server.bodies[2]).index("how are you?") < json.dumps(server.bodies[2]).index("Be brief.")


@each_protocol
async def test_pictures_h170(protocol: str, tmp_path: Path) -> None:
    @tool(name="look")
    async def camera(at: str) -> ToolResult:
        """Look at something."""
        return ToolResult([Text(f"this is {at}"), PICTURE])

    async with provider(call(("look", '{"at": "it"}'), ("look", '{"at": "that"}')), say("Cats.")) as server:
        async with harness(server, protocol, tmp_path / "s.db", tools=[camera]) as them:
            assert await ask(await them.root(), [Text("Like this?"), PICTURE]) == "Cats."
        assert json.dumps(server.bodies[1]).count(PNG) == 3
        server.check_prefixes()


@each_protocol
async def test_a_rate_limit_is_waited_for_and_asked_again_h73(protocol: str, tmp_path: Path) -> None:
    limit = Refusal(status=429, message="slowly", headers={"retry-after-ms": "20"})
    async with provider(limit, Refusal(status=529), say("There.")) as server:
        async with harness(server, protocol, tmp_path / "s.db") as them:
            root = await them.root()
            assert await ask(root, "hi") == "There."
            (totals,) = (await root.usage()).models.values()
        assert server.bodies[0] == server.bodies[1] == server.bodies[2]
    assert totals["requests"] == 3


@each_protocol
async def test_a_stream_that_breaks_is_asked_for_again_h72(protocol: str, tmp_path: Path) -> None:
    async with provider(Broken(answer=say("Once upon a time"), after=5, how="cut"), say("There.")) as server:
        async with harness(server, protocol, tmp_path / "s.db") as them:
            assert await ask(await them.root(), "hi") == "There."
        assert server.bodies[0] == server.bodies[1]


@each_protocol
@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (400, "malformed", "no such field"),
        (401, "authentication", "API_KEY"),
        (413, "overflow", "too much"),
        (402, "other", "pay"),
    ],
)
async def test_what_will_not_get_better_is_sent_once_h74(
    protocol: str, status: int, code: str, words: str, tmp_path: Path
) -> None:
    """Not by the SDK, not by the library, not by the harness, not after a restart."""
    async with provider(Refusal(status=status, message=f"{words}: no")) as server:
        async with harness(server, protocol, tmp_path / "s.db") as them:
            submission = await (await them.root()).submit("hi")
            with pytest.raises(Unanswered) as caught:
                await submission.answer()
            crashed = killed(tmp_path / "s.db")
        async with harness(server, protocol, crashed) as them:
            them.resume()
            await them.idle()
            with pytest.raises(Unanswered):
                await (await them.submission(submission.id)).answer()
        assert len(server.sent) == 1
    assert caught.value.reason == "model_error"
    assert caught.value.detail is not None
    assert caught.value.detail.startswith(f"{code}: ")
    assert words in caught.value.detail


@each_protocol
async def test_a_key_is_in_no_entry_and_no_report_h74(protocol: str, tmp_path: Path) -> None:
    wrong = "sk-wrong-0123456789"
    path = tmp_path / "s.db"
    async with (
        provider() as server,
        harness(server, protocol, path, models=models(server, protocol, key=wrong)) as them,
    ):
        with pytest.raises(Unanswered) as caught:
            await ask(await them.root(), "hi")
    assert wrong not in str(caught.value)
    assert wrong.encode() not in path.read_bytes()


async def test_one_conversation_with_every_provider_in_turn_h171(tmp_path: Path) -> None:
    """Whatever one said, thought and called, the next is told as its own rules have it."""
    replies: list[Answer] = []
    for name in ("one", "two", "three"):
        replies += [call(("look", '{"at": "it"}'), thinking=f"{name} thinks", text=f"{name} looks."), say(f"{name}.")]
    async with provider(*replies, *replies) as server:
        them = ProviderModels(
            endpoints=[*(models(server, protocol)._endpoints[protocol] for protocol in PROTOCOLS)],
        )
        async with harness(server, "", tmp_path / "s.db", models=them) as opened:
            root = await opened.root(agent=Agent(thinking="low"))
            for model in ("openai:gpt-5.4", "anthropic:claude-sonnet-5", "openai-chat:gpt-5.4") * 2:
                await root.set_agent(model=model)
                await ask(root, f"look, {model}")
            assert len((await root.usage()).models) == 3


async def test_a_model_by_its_name_alone_h179(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with provider(say("Hello."), say("Hello again.")) as server:
        monkeypatch.setenv("OPENAI_COMPATIBLE_BASE_URL", server.url("openai-chat"))
        monkeypatch.setenv("OPENAI_COMPATIBLE_API_KEY", KEY)
        async with Harness.open(SqliteStorage(tmp_path / "a.db"), models="openai-compatible:qwen3") as them:
            assert await ask(await them.root(), "hi") == "Hello."
        monkeypatch.setenv("ANTHROPIC_BASE_URL", server.url("anthropic"))
        monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
        async with Harness.open(SqliteStorage(tmp_path / "b.db"), models="anthropic:claude-sonnet-5") as them:
            assert await ask(await them.root(), "hi") == "Hello again."
