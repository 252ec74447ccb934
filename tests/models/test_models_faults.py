"""Failures of providers and of the way to them, as the codes that decide what becomes of a run (rules H71 to H74)."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from model_kit import PROTOCOLS, ask, fails, local, models, user
from replies import Broken, Refusal, call, say
from server import KEY, provider

from perdure.harness.messages import Usage
from perdure.harness.model import ModelError, ModelRequest, TextDelta

each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)

# Status, the provider's code and words, and what they mean. An asterisk: in every protocol.
STATUSES = [
    ("*", 400, "", "something is wrong with the request", "malformed"),
    ("*", 422, "", "something is wrong with the request", "malformed"),
    ("*", 401, "", "who are you?", "authentication"),
    ("*", 403, "", "not for you", "authentication"),
    ("*", 404, "", "there is no such model", "other"),
    ("*", 402, "", "pay first", "other"),
    ("*", 405, "", "not like this", "other"),
    ("*", 408, "", "that took too long", "overloaded"),
    ("*", 409, "", "somebody else is at it", "overloaded"),
    ("*", 413, "", "that is too much", "overflow"),
    ("*", 429, "", "slowly", "rate_limit"),
    ("*", 500, "", "oh", "overloaded"),
    ("*", 502, "", "oh", "overloaded"),
    ("*", 503, "", "oh", "overloaded"),
    ("*", 504, "", "oh", "overloaded"),
    ("*", 529, "", "too many of you", "overloaded"),
    ("openai", 400, "context_length_exceeded", "Your input exceeds the context window of this model.", "overflow"),
    ("openai-chat", 400, "context_length_exceeded", "This model's maximum context length is 8 tokens.", "overflow"),
    ("anthropic", 400, "", "prompt is too long: 205000 tokens > 200000 maximum", "overflow"),
    ("anthropic", 400, "", "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000", "overflow"),
    ("anthropic", 400, "", "Your credit balance is too low to access the Anthropic API.", "other"),
    ("openai", 429, "insufficient_quota", "You exceeded your current quota.", "other"),
    ("openai", 400, "content_policy_violation", "not that", "refused"),
    ("openai", 404, "model_not_found", "The model does not exist", "other"),
]
CASES = [
    pytest.param(protocol, *case[1:], id=f"{protocol}-{case[1]}-{case[4]}-{number}")
    for number, case in enumerate(STATUSES)
    for protocol in (PROTOCOLS if case[0] == "*" else (case[0],))
]


@pytest.mark.parametrize(("protocol", "status", "code", "words", "meaning"), CASES)
async def test_what_a_status_means_h74(protocol: str, status: int, code: str, words: str, meaning: str) -> None:
    async with provider(Refusal(status=status, code=code, message=words)) as server:
        error = await fails(models(server, protocol), user("hi"))
        assert len(server.sent) == 1, "the SDK must not send it again"
    assert error.code == meaning
    assert error.retryable == (meaning in ("rate_limit", "overloaded", "connection"))
    if meaning != "authentication":
        assert words in str(error)


@pytest.mark.parametrize(
    "words",
    [
        "request (5000 tokens) exceeds the available context size (4096 tokens), try increasing it",
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens",
        "Trying to keep the first 5000 tokens when context the overflows: the number of tokens to keep from the "
        "initial prompt is greater than the context length",
        "The input token count (40000) exceeds the maximum number of tokens allowed (32768).",
        "prompt is too long for the context window",
        "too many tokens: maximum prompt length is 131072",
    ],
)
async def test_how_other_servers_say_that_it_is_too_long_h71(words: str) -> None:
    async with provider(Refusal(status=400, message=words)) as server:
        assert (await fails(local(server), user("hi"))).code == "overflow"


@each_protocol
@pytest.mark.parametrize("status", [429, 503, 529])
async def test_how_long_to_wait_is_told_in_milliseconds_h73(protocol: str, status: int) -> None:
    async with provider(
        Refusal(status=status, headers={"retry-after": "7"}),
        Refusal(status=status, headers={"retry-after-ms": "1500", "retry-after": "2"}),
        Refusal(status=status, headers={"retry-after": format_datetime(datetime.now(UTC) + timedelta(hours=1), True)}),
        Refusal(status=status, headers={"retry-after": "soon"}),
        Refusal(status=status),
        Refusal(status=400, headers={"retry-after": "7"}),
    ) as server:
        them = models(server, protocol)
        waits = [(await fails(them, user("hi"))).retry_after_ms for _ in range(6)]
    assert waits[:2] == [7_000, 1_500]
    assert waits[2] is not None
    assert 3_000_000 < waits[2] <= 3_600_000
    assert waits[3:] == [None, None, None]


@each_protocol
@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("how", ["cut", "end", "garbage", "shape", "stall"])
async def test_a_stream_that_breaks_is_the_connections_fault_h72(protocol: str, how, after: int) -> None:
    """Whatever of it came, and though it may look like the end."""
    broken = Broken(answer=say("Once upon a time there was a princess."), after=after, how=how)
    async with provider(broken) as server:
        error = await fails(models(server, protocol, stall_ms=300 if how == "stall" else 60_000), user("hi"))
        assert len(server.sent) == 1
    assert (error.code, error.retryable) == ("connection", True)


@each_protocol
async def test_what_came_before_the_break_was_told_h72(protocol: str) -> None:
    broken = Broken(answer=say("Once upon a time there was a princess."), after=8, how="cut")
    told: list[str] = []
    async with provider(broken) as server:
        them = models(server, protocol)
        assert them.default is not None
        with pytest.raises(ModelError) as caught:
            async for event in them.stream(ModelRequest(model=them.default, messages=[user("hi")])):
                assert isinstance(event, TextDelta)
                told.append(event.text)
    assert "Once upon a time there was a princess.".startswith("".join(told))
    assert told
    assert caught.value.code == "connection"


async def test_tokens_of_a_broken_answer_are_told_as_far_as_they_are_known_h76() -> None:
    """Anthropic tells what it read before the first word."""
    async with provider(Broken(answer=say("Once upon a time"), after=5, how="cut")) as server:
        error = await fails(models(server, "anthropic"), user("hi"))
    assert error.usage == Usage(input=100, output=1)


async def test_a_call_cut_off_by_the_connection_is_none_h72() -> None:
    for protocol in PROTOCOLS:
        async with provider(Broken(answer=call(("look", '{"at": "the sea"}')), after=5, how="end")) as server:
            assert (await fails(models(server, protocol), user("hi"))).code == "connection"


@each_protocol
@pytest.mark.parametrize("after", [0, 5])
async def test_an_error_on_the_way_means_what_it_would_have_meant_before_h72(protocol: str, after: int) -> None:
    for code, meaning in (("overloaded", "overloaded"), ("rate_limit", "rate_limit")):
        name = {"openai": "rate_limit_exceeded", "openai-chat": "rate_limit_exceeded"}.get(protocol, code)
        sent = name if code == "rate_limit" else code
        broken = Broken(answer=say("Once upon a time there was"), after=after, how="error", code=sent)
        async with provider(broken) as server:
            assert (await fails(models(server, protocol), user("hi"))).code == meaning


@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        ("server_error", "overloaded"),
        ("rate_limit_exceeded", "rate_limit"),
        ("context_length_exceeded", "overflow"),
        ("invalid_prompt", "refused"),
        ("insufficient_quota", "other"),
        ("a_new_one", "other"),
    ],
)
async def test_a_response_that_failed_says_why_h72(code: str, meaning: str) -> None:
    response: dict[str, object] = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": "m",
        "status": "failed",
        "output": [],
    }
    response |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    failed: dict[str, object] = {"type": "response.failed", "sequence_number": 9}
    failed["response"] = {**response, "error": {"code": code, "message": "that is why"}}
    async with provider(Broken(answer=say("Once upon a time"), after=5, how="event", event=failed)) as server:
        error = await fails(models(server, "openai"), user("hi"))
    assert error.code == meaning
    assert "that is why" in str(error)


@pytest.mark.parametrize("reason", ["error", "abort", "insufficient_system_resource"])
async def test_an_answer_that_its_server_broke_off_is_none_h72(reason: str) -> None:
    """Words of it came, and the stream ended well."""
    last: dict[str, object] = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    last["choices"] = [{"index": 0, "delta": {}, "finish_reason": reason}]
    async with provider(Broken(answer=say("Once upon a time"), after=3, how="event", event=last)) as server:
        error = await fails(local(server), user("hi"))
    assert (error.code, error.retryable) == ("overloaded", True)


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        ({"code": "context_length_exceeded", "message": "too long"}, "overflow"),
        (
            {"code": 400, "type": "exceed_context_size_error", "message": "exceeds the available context size"},
            "overflow",
        ),
        ({"code": 401, "type": "authentication_error", "message": "who?"}, "authentication"),
        ({"code": 429, "message": "slowly"}, "rate_limit"),
        ({"code": 502, "message": "nobody there"}, "overloaded"),
        ({"code": None, "type": "server_error", "message": "oh"}, "overloaded"),
    ],
)
async def test_other_servers_errors_on_the_way_h72(error: dict[str, object], meaning: str) -> None:
    broken = Broken(answer=say("Once upon a time"), after=3, how="event", event={"error": error})
    async with provider(broken) as server:
        assert (await fails(local(server), user("hi"))).code == meaning


@each_protocol
@pytest.mark.parametrize("stop", ["refusal", "filter"])
async def test_a_refusal_is_no_answer_h74(protocol: str, stop) -> None:
    async with provider(say("I will not.", stop=stop)) as server:
        error = await fails(models(server, protocol), user("hi"))
    assert (error.code, error.retryable) == ("refused", False)
    assert error.usage == Usage(input=100, output=20)


async def test_why_it_was_refused_is_told_h74() -> None:
    async with provider(say("I will not.", stop="refusal")) as server:
        assert "I will not." in str(await fails(models(server, "openai"), user("hi")))


async def test_nobody_there_h72() -> None:
    async with provider() as server:
        pass  # the port is free now
    for protocol in PROTOCOLS:
        error = await fails(models(server, protocol), user("hi"))
        assert error.code == "connection"


@each_protocol
async def test_a_request_that_takes_too_long_in_all_fails_h72(protocol: str) -> None:
    """Though something comes now and then."""
    async with provider(Broken(answer=say("Once upon a time there was"), after=5, how="stall")) as server:
        error = await fails(models(server, protocol, deadline_ms=2_000), user("hi"))
        await server.left.wait()
    assert error.code == "connection"
    assert "2 seconds" in str(error)


@each_protocol
async def test_a_proxys_page_is_no_message_h72(protocol: str) -> None:
    page = "<html><body>Bad gateway</body></html>"
    async with provider(Refusal(status=502, body=page)) as server:
        error = await fails(models(server, protocol), user("hi"))
    assert error.code == "overloaded"
    assert "<html>" not in str(error)


async def test_what_validation_quotes_of_a_request_is_not_told_h74() -> None:
    body = (
        '{"detail": [{"loc": ["body", "messages", 0], "msg": "field required", "type": "missing", '
        '"input": {"content": "my secret question"}}]}'
    )
    async with provider(Refusal(status=422, body=body)) as server:
        error = await fails(local(server), user("my secret question"))
    assert error.code == "malformed"
    assert "secret" not in str(error)


@each_protocol
async def test_no_key_is_told_what_to_set_and_nothing_is_sent_h74(protocol: str) -> None:
    async with provider() as server:
        error = await fails(models(server, protocol, key=None), user("hi"))
        assert not server.sent
    assert error.code == "authentication"
    variable = "ANTHROPIC_API_KEY" if protocol == "anthropic" else "OPENAI_API_KEY"
    assert variable in str(error)


@each_protocol
async def test_a_wrong_key_is_in_no_error_and_no_log_h74(protocol: str, caplog: pytest.LogCaptureFixture) -> None:
    """The server quotes the key that it was given, as some do."""
    wrong = "sk-wrong-key-0123456789"
    caplog.set_level(logging.DEBUG)
    async with provider() as server:
        them = models(server, protocol, key=wrong)
        error = await fails(them, user("hi"))
    assert error.code == "authentication"
    for text in (str(error), repr(error), repr(them), caplog.text, repr(error.__cause__)):
        assert wrong not in text
    assert error.__cause__ is None
    assert error.__suppress_context__


async def test_a_key_within_another_error_is_left_out_h74() -> None:
    async with provider(Refusal(status=400, message=f"bad header: Bearer {KEY} or sk-other-1234567890")) as server:
        error = await fails(models(server, "openai-chat"), user("hi"))
    assert KEY not in str(error)
    assert "sk-other" not in str(error)


async def test_words_of_a_provider_are_cut_short_h74() -> None:
    async with provider(Refusal(status=400, message="x" * 100_000)) as server:
        assert len(str(await fails(models(server, "anthropic"), user("hi")))) < 1_000


async def test_after_a_failure_the_next_request_is_as_good_as_any_h72() -> None:
    async with provider(Refusal(status=500), say("ok")) as server:
        them = models(server, "anthropic")
        assert (await fails(them, user("hi"))).code == "overloaded"
        assert (await ask(them, user("hi"))).text == "ok"


async def test_an_endpoint_that_is_not_there_h74() -> None:
    async with provider() as server:
        them = models(server, "anthropic")
        with pytest.raises(ModelError) as caught:
            async for _ in them.stream(ModelRequest(model="nobody:x", messages=[user("hi")])):
                pass
    assert caught.value.code == "other"
