"""What models and their adapters get wrong ends a run, and never a transcript that cannot be read (K133, H60, H76)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from kit import Hold, Reports, opened, rest

from perdure.harness.events import MessageDelta, MessageEnd
from perdure.harness.harness import Harness
from perdure.harness.messages import AssistantMessage, Text, Thinking, ToolCallPart, Usage, decode_messages
from perdure.harness.model import Finished, ModelError, ModelEvent, ModelInfo, ModelRequest, TextDelta
from perdure.harness.registry import Extension, PromptSection
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import ScriptedModel, fail, say

untyped: Any = AssistantMessage
used: Any = Usage
USED = Usage(input=7, output=3)


def message(*content: object, **more: object) -> Any:
    return untyped(**{"content": content, "provider": "test", "model": "odd", "stop_reason": "stop", **more})


class Odd:
    """A model that gives a message, whatever that is, and then perhaps does not end."""

    default = "test:odd"

    def __init__(self, given: Any, *, ends: bool = True) -> None:
        self.given = given
        self.ends = ends
        self.closing = asyncio.Event()

    def find(self, model: str) -> ModelInfo:
        return ModelInfo(provider="test", name="odd", context_window=1000, max_output=100)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        try:
            if isinstance(self.given, BaseException):
                yield TextDelta("be")
                raise self.given
            yield Finished(self.given)
        finally:
            self.closing.set()
            if not self.ends:
                await asyncio.Event().wait()


def harness_of(model: Odd, reports: Reports) -> Any:
    return Harness.open(MemoryStorage(), models=model, on_report=reports.append)


wrong: Any = 5


@pytest.mark.parametrize(
    "given",
    [
        "no message",
        message(content=None),
        message("text"),
        message(Text(wrong)),
        message(Text("x"), stop_reason="whim"),
        message(Text("x"), provider=None),
        message(ToolCallPart("1", wrong, msgspec.Raw(b"{}"))),
        asyncio.CancelledError(),
    ],
)
async def test_a_message_that_is_none_ends_the_run_model_error(given: Any) -> None:
    reports: Reports = []
    async with harness_of(Odd(given), reports) as harness:
        root = await harness.root()
        settled = await (await root.submit("hi")).wait()
        assert (settled.status, settled.reason) == ("unanswered", "model_error")
        for entry in await root.entries():
            decode_messages(entry.raw_messages)
        assert (await root.usage()).requests == 1
    assert [report.type for report in reports] == ["model_adapter_failed"]


UNCOUNTABLE: list[Any] = [
    None,
    "many",
    Usage(input=2**70),
    Usage(input=2**62),
    Usage(output=-5),
    used(input=1.5),
    used(cache_read=float("nan")),
    used(reasoning="many"),
]


@pytest.mark.parametrize("usage", UNCOUNTABLE, ids=repr)
async def test_tokens_that_cannot_be_counted_are_untold_and_cost_no_answer_and_no_session_k133(usage: Any) -> None:
    """Of an answer, and of a failure: several times, since what fits alone may not fit as a sum."""
    failed = ModelError("other", "no", usage=usage)
    reports: Reports = []
    async with harness_of(Odd(message(Text("x"), usage=usage)), reports) as harness:
        root = await harness.root()
        for _ in range(3):
            assert (await (await root.submit("hi")).answer()).text == "x"
        assert ((await root.usage()).requests, (await root.usage()).tokens) == (3, Usage())
    async with harness_of(Odd(failed), reports) as harness:
        root = await harness.root()
        for _ in range(3):
            assert (await (await root.submit("hi")).wait()).reason == "model_error"
        assert ((await root.usage()).requests, (await root.usage()).tokens) == (3, Usage())
    assert reports == []


@pytest.mark.parametrize(
    "given",
    [
        message(Text("x\ud800"), provider="\ud800", model="\udfff"),
        message(Text("x\ud800"), Thinking("\ud800", signature="\ud800")),
    ],
)
async def test_characters_that_are_none_are_question_marks_wherever_they_are_k35(given: Any) -> None:
    async with harness_of(Odd(given), []) as harness:
        root = await harness.root()
        assert (await (await root.submit("hi")).answer()).text == "x?"


async def test_characters_that_are_none_do_not_end_what_is_shown_of_a_stream_h68() -> None:
    shown: list[str] = []

    class Streaming(Odd):
        async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
            for text in ("a\ud800", "b"):
                yield TextDelta(text)
                await seen.wait()
                seen.clear()
            yield Finished(message(Text("a?b")))

    seen = asyncio.Event()
    reports: Reports = []
    async with Harness.open(
        MemoryStorage(), models=Streaming(None), on_report=reports.append, partial_interval_ms=0
    ) as harness:
        root = await harness.root()
        async with root.events() as events:
            await root.submit("hi")
            async for event in events:
                if isinstance(event, MessageDelta):
                    shown.append(event.text)
                    seen.set()
                if isinstance(event, MessageEnd):
                    break
    assert (shown, reports) == (["a?", "b"], [])


@pytest.mark.parametrize("wait", [-5, float("inf"), float("nan"), "5", None], ids=repr)
async def test_a_wait_that_is_no_time_is_none_k133(wait: Any) -> None:
    error = ModelError("rate_limit", "no", retry_after_ms=wait)
    assert (error.retry_after_ms, ModelError("whim", "no").code) == (None, "other")  # pyright: ignore[reportArgumentType]
    assert ModelError("rate_limit", "no", retry_after_ms=1.5).retry_after_ms == 2  # pyright: ignore[reportArgumentType]


async def test_an_aborted_attempt_counts_though_nothing_of_it_was_shown_h76() -> None:
    hold = Hold(0)
    async with opened(ScriptedModel(say("late"), pace=hold)) as harness:
        root = await harness.root()
        await root.submit("hi")
        await hold.reached.wait()
        await root.abort()
        assert (await root.usage()).requests == 1
        hold.release()
        await (await root.submit("again")).answer()
        assert (await root.usage()).requests == 2


async def test_what_an_aborted_attempt_is_known_to_have_used_counts_h76() -> None:
    model = Odd(message(Text("x"), usage=USED), ends=False)
    async with harness_of(model, []) as harness:
        root = await harness.root()
        submission = await root.submit("hi")
        await model.closing.wait()
        await rest()
        await root.abort()
        assert (await submission.record()).reason == "aborted"
        usage = await root.usage()
        assert (usage.requests, usage.tokens) == (1, USED)


@pytest.mark.parametrize("text", [5, ["x"], "\ud800"])
async def test_a_prompt_section_that_is_no_text_is_reported_and_skipped_h132(text: Any) -> None:
    reports: Reports = []
    section = PromptSection("odd", lambda info: text)
    async with opened(ScriptedModel(), reports=reports, extensions=[Extension("e", sections=[section])]) as harness:
        submission = await (await harness.root()).submit("hi")
        assert (await submission.answer()).text == "hi"
    assert {report.type for report in reports} == {"section_failed"}


async def test_a_default_that_raises_is_none_h19() -> None:
    class NoDefault(Odd):
        @property
        def default(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
            raise ValueError("there is none")

    reports: Reports = []
    async with harness_of(NoDefault(None), reports) as harness:
        submission = await (await harness.root()).submit("hi")
        assert (await submission.wait()).reason == "no_model"
    assert {report.type for report in reports} == {"model_adapter_failed"}


async def test_what_a_provider_says_of_a_failure_is_bounded() -> None:
    async with opened(ScriptedModel(fail("other", "no " * 1_000_000))) as harness:
        root = await harness.root()
        settled = await (await root.submit("hi")).wait()
        assert len(settled.detail or "") < 3_000
        assert sum(len(entry.raw_messages) for entry in await root.entries()) < 5_000
