"""What the standard log says of a harness's work (rule H288)."""

from __future__ import annotations

import logging

import pytest

from harness.kit import Hold, Reports, opened
from perdure import MemoryStorage, RetryPolicy, Unanswered, tool
from perdure.harness.handle import ToolCall
from perdure.testing.model import ScriptedModel, call, fail, say


@tool(replay="safe")
async def again(call: ToolCall) -> str:
    """May run again."""
    return "done"


@tool
async def broken() -> str:
    """Raises, which is reported."""
    raise ValueError("on cue")


def lines(caplog: pytest.LogCaptureFixture, *names: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name in names]


async def test_a_turn_is_one_line_at_info_h288(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "perdure")
    async with opened(ScriptedModel([call("again"), say("ok")]), tools=(again,)) as harness:
        root = await harness.root()
        submission = await root.submit("hi")
        await submission.answer()
        seq = harness.session.seq
    task = submission.id + 1
    assert [record.getMessage() for record in caplog.records if record.name.startswith("perdure")] == [
        f"run ended task={task} conversation=1 reason=answered submissions={submission.id} seq={seq}"
    ]


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("perdure.runs", logging.INFO),
        ("perdure.commits", logging.DEBUG),
        ("perdure.tasks", logging.DEBUG),
        ("perdure.calls", logging.DEBUG),
    ],
)
async def test_each_logger_is_set_up_by_itself_h288(name: str, level: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "perdure")
    caplog.set_level(level, name)
    async with opened(ScriptedModel([call("again"), say("ok")]), tools=(again,)) as harness:
        await (await (await harness.root()).submit("hi")).answer()
    assert {record.name for record in caplog.records if record.name.startswith("perdure")} == {name}


async def test_a_retry_and_the_reason_of_an_ending_are_told_h288(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "perdure")
    model = ScriptedModel(fail("overloaded", "words", times=1, then=fail("refused", "more words")))
    async with opened(model, retry=RetryPolicy(first_ms=1, jitter=0)) as harness:
        submission = await (await harness.root()).submit("hi")
        with pytest.raises(Unanswered):
            await submission.answer()
    retry, ended = lines(caplog, "perdure.runs")
    assert retry.startswith("retry ")
    assert retry.endswith("attempt=2 code=overloaded in 1 ms")
    assert "reason=model_error" in ended


@pytest.mark.parametrize(("replay", "decision"), [("safe", "run_again"), ("unsafe", "interrupted")])
async def test_what_is_recovered_and_how_is_told_h288(
    replay: str, decision: str, caplog: pytest.LogCaptureFixture
) -> None:
    storage, hold = MemoryStorage(), Hold()

    @tool(replay=replay)  # pyright: ignore[reportArgumentType]
    async def slow() -> str:
        """Take long the first time."""
        await hold(None, 0)  # pyright: ignore[reportArgumentType]
        return "done"

    model = ScriptedModel([call("slow"), say("ok")])
    async with opened(model, tools=(slow,), storage=storage, reports=[]) as harness:
        submission = await (await harness.root()).submit("hi")
        await hold.reached.wait()
        storage = storage.snapshot()
        harness.session.fail(ConnectionError("the test's crash"))
    hold.release()
    caplog.set_level(logging.INFO, "perdure")
    async with opened(model, tools=(slow,), storage=storage) as harness:
        assert lines(caplog, "perdure.tasks") == ["recovered 1 of 2 live tasks"]
        await (await harness.submission(submission.id)).wait()
    assert [line.partition("decision=")[2] for line in lines(caplog, "perdure.calls")] == [decision]
    *_, ended = lines(caplog, "perdure.runs")
    assert "reason=answered" in ended


async def test_a_run_that_goes_on_is_told_once_h288(caplog: pytest.LogCaptureFixture) -> None:
    storage, hold = MemoryStorage(), Hold(1)
    async with opened(ScriptedModel([say("ok")], pace=hold), storage=storage) as harness:
        submission = await (await harness.root()).submit("hi")
        await hold.reached.wait()
    caplog.set_level(logging.INFO, "perdure")
    async with opened(ScriptedModel([say("ok")]), storage=storage) as harness:
        await (await harness.submission(submission.id)).wait()
    goes_on, ended = lines(caplog, "perdure.runs")
    assert goes_on.startswith(f"run goes on task={submission.id + 1} conversation=1 phase=request restarts=")
    assert ended.startswith("run ended ")


async def test_commits_tasks_and_calls_are_told_at_debug_h288(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "perdure")
    async with opened(ScriptedModel([call("again"), say("ok")]), tools=(again,)) as harness:
        await (await (await harness.root()).submit("hi")).answer()
        seq = harness.session.seq
    assert len(lines(caplog, "perdure.commits")) == seq
    assert [line.rpartition(" ")[2] for line in lines(caplog, "perdure.calls")] == ["code=ok"]
    assert any("kind=pi.tool status=running phase=execute" in line for line in lines(caplog, "perdure.tasks"))


async def test_a_filter_that_raises_harms_no_commit_h288(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "perdure")
    asked: list[str] = []

    def refuse(record: logging.LogRecord) -> bool:
        asked.append(record.name)
        raise RuntimeError("a filter of the host's")

    loggers = [logging.getLogger(f"perdure{name}") for name in ("", ".commits", ".tasks", ".runs", ".calls")]
    for logger in loggers:
        logger.addFilter(refuse)
    try:
        seen: Reports = []
        model = ScriptedModel([fail("overloaded", times=1, then=call("broken")), say("ok")])
        async with opened(model, tools=(broken,), retry=RetryPolicy(first_ms=1), reports=seen) as harness:
            assert (await (await (await harness.root()).submit("hi")).answer()).text == "ok"
        assert [report.type for report in seen] == ["tool_raised"]
    finally:
        for logger in loggers:
            logger.removeFilter(refuse)
    assert set(asked) >= {"perdure", "perdure.commits", "perdure.runs"}
