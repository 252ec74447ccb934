"""Answers that OpenAI makes in the background, over HTTP: begun, polled, cancelled, also after a restart (rules H75,
H168 and H408)."""

from __future__ import annotations

from pathlib import Path

import pytest
from dialects import BACKGROUND
from model_kit import LOOK, ask, models, stream, user
from replies import Answer, Made, Refusal, Tokens, call, say
from server import STORED, Provider, provider

from perdure import (
    Extension,
    Harness,
    ModelError,
    PollPolicy,
    RetryPolicy,
    SqliteStorage,
    Unanswered,
    Usage,
    tool,
)
from perdure.events import ResponseDeferred
from perdure.harness.messages import Text, Thinking
from perdure.models import Deferred, DeferredFailed, Endpoint, Finished, ProviderModels

MODEL = "openai:gpt-5.4"
QUEUED = Made(status="queued")


def background(server: Provider, **options) -> ProviderModels:
    return models(server, "openai", background=True, **options)


async def test_a_request_is_begun_polled_and_answered_h408() -> None:
    made = Answer(text="the sea", thinking="Hm.", tokens=Tokens(input=30, output=8, cache_read=5, reasoning=3))
    async with provider(QUEUED, Made(status="in_progress"), Made(answer=made)) as server:
        asking = background(server)
        assert await stream(asking, user("hi"), may_defer=True, tools=(LOOK,)) == [Deferred(handle=BACKGROUND)]
        sent = server.sent[0].body
        assert (sent["background"], sent["store"], sent["stream"]) == (True, True, False)
        assert await asking.fetch_deferred(MODEL, BACKGROUND) == Deferred(handle=BACKGROUND)
        found = await asking.fetch_deferred(MODEL, BACKGROUND)
    assert isinstance(found, Finished)
    message = found.message
    assert (message.provider, message.model, message.stop_reason) == ("openai", "gpt-5.4", "stop")
    assert message.usage == Usage(input=30, output=8, cache_read=5, reasoning=3)
    thought, text = message.content
    assert isinstance(thought, Thinking)
    assert (thought.text, thought.signature) == ("Hm.", None), "it names nothing that the provider forgets one day"
    assert text == Text("the sea")
    assert [(sent.method, sent.path) for sent in server.sent[1:]] == [("GET", STORED)] * 2


async def test_what_is_there_at_once_is_the_answer_h408() -> None:
    async with provider(Made(answer=say("now"))) as server:
        assert (await ask(background(server), user("hi"), may_defer=True)).text == "now"


async def test_without_the_option_or_where_it_must_not_wait_it_streams_h408() -> None:
    async with provider(say("one"), say("two")) as server:
        assert (await ask(models(server, "openai"), user("hi"), may_defer=True)).text == "one"
        assert (await ask(background(server), user("hi"))).text == "two"
    assert not any("background" in sent.body for sent in server.sent)


@pytest.mark.parametrize(
    ("reply", "code", "used"),
    [
        (Made(status="failed"), "overloaded", None),
        (Made(status="failed", code="rate_limit_exceeded"), "rate_limit", Usage()),
        (Made(status="failed", code="context_length_exceeded"), "overflow", None),
        (Made(status="failed", code="invalid_prompt"), "refused", None),
        (Made(status="cancelled"), "cancelled", Usage(input=100, output=20)),
        (Made(answer=Answer(text="no", stop="refusal")), "refused", Usage(input=100, output=20)),
        (Refusal(status=404, message="no such response"), "expired", None),
    ],
)
async def test_a_response_that_failed_says_why_and_is_over_h408(reply, code, used) -> None:
    async with provider(reply) as server:
        with pytest.raises(DeferredFailed) as caught:
            await background(server).fetch_deferred(MODEL, BACKGROUND)
    assert (caught.value.code, caught.value.usage) == (code, used), caught.value


@pytest.mark.parametrize(("status", "code"), [(503, "overloaded"), (429, "rate_limit"), (401, "authentication")])
async def test_asking_that_fails_says_nothing_of_the_response_h408(status, code) -> None:
    async with provider(Refusal(status=status)) as server:
        with pytest.raises(ModelError) as caught:
            await background(server).fetch_deferred(MODEL, BACKGROUND)
    assert (caught.value.code, isinstance(caught.value, DeferredFailed)) == (code, False)


async def test_a_server_that_is_gone_is_a_failure_of_the_connection_h408() -> None:
    async with provider() as server:
        asking = background(server)
        server.address = ""
    for asked in (asking.fetch_deferred(MODEL, BACKGROUND), asking.cancel_deferred(MODEL, BACKGROUND)):
        with pytest.raises(ModelError) as caught:
            await asked
        assert (caught.value.code, isinstance(caught.value, DeferredFailed)) == ("connection", False)


async def test_a_response_is_cancelled_at_the_provider_h408() -> None:
    async with provider(Made(status="cancelled"), Refusal(status=400, message="it has ended")) as server:
        await background(server).cancel_deferred(MODEL, BACKGROUND)
        with pytest.raises(ModelError, match="it has ended"):
            await background(server).cancel_deferred(MODEL, BACKGROUND)
    assert [(sent.method, sent.path) for sent in server.sent] == [("POST", f"{STORED}/cancel")] * 2


def test_only_the_responses_api_makes_answers_in_the_background_h408() -> None:
    with pytest.raises(ValueError, match="only the protocol 'openai'"):
        Endpoint(name="local", protocol="openai-chat", base_url="http://127.0.0.1/v1", background=True)
    with pytest.raises(ValueError, match="there is no default"):
        ProviderModels(background=True)


# --- within a harness ---------------------------------------------------------------------------------------------


@tool(replay="safe")
async def look(at: str) -> str:
    """Look at something."""
    return f"{at} is blue"


def opened(server: Provider, path: Path):
    return Harness.open(
        SqliteStorage(path, durability="process"),
        models=background(server),
        extensions=[Extension("tools", tools=[look])],
        polling=PollPolicy(first_ms=1, longest_ms=50),
        retry=RetryPolicy(retries=1, first_ms=1, jitter=0),
    )


async def test_a_conversation_goes_on_with_what_was_made_in_the_background_h75_h408(tmp_path: Path) -> None:
    """What goes back to the provider names nothing that it stores."""
    called = call(("look", '{"at": "the sea"}'), thinking="I must look.")
    replies = (QUEUED, Made(answer=called), QUEUED, Made(answer=say("It is blue.", thinking="So.")), QUEUED)
    async with provider(*replies, Made(answer=say("Bye."))) as server, opened(server, tmp_path / "a.db") as harness:
        root = await harness.root()
        assert (await (await root.submit("How is the sea?")).answer()).text == "It is blue."
        assert (await (await root.submit("Thanks.")).answer()).text == "Bye."
        assert (await root.usage()).requests == 3
    assert not [item for item in server.bodies[-2]["input"] if item.get("type") == "reasoning" or "id" in item]


async def test_another_process_polls_the_same_response_and_pays_once_h75_h408(tmp_path: Path) -> None:
    async with provider(QUEUED, Refusal(status=503), *[QUEUED] * 1000) as server:
        async with opened(server, tmp_path / "a.db") as harness:
            root = await harness.root()
            async with root.events() as events:
                submission = (await root.submit("Think.")).id
                async for event in events:
                    if isinstance(event, ResponseDeferred) and event.polls:
                        assert (event.handle, event.code) == (BACKGROUND, "overloaded")
                        break
        server.replies.clear()
        server.will(Made(answer=say("At last.")))
        async with opened(server, tmp_path / "a.db") as harness:
            harness.resume()
            again = await harness.submission(submission)
            assert (await again.answer()).text == "At last."
            assert (await (await harness.root()).usage()).requests == 1
    assert [sent.method for sent in server.sent].count("POST") == 1


async def test_an_expired_response_ends_the_run_by_name_h403_h408(tmp_path: Path) -> None:
    async with provider(QUEUED, Refusal(status=404)) as server, opened(server, tmp_path / "a.db") as harness:
        root = await harness.root()
        with pytest.raises(Unanswered, match="expired: openai does not have the response any more"):
            await (await root.submit("Think.")).answer()
