"""Which models there are, what is known of them, and what it costs to have them around (rules H158, H169 to H179)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from decimal import Decimal
from importlib.metadata import entry_points

import pytest
from model_kit import ask, fails, local, user
from replies import say
from server import provider

from perdure.harness.messages import Usage
from perdure.harness.model import ADAPTERS, ModelInfo, NoAdapter, installed_models
from perdure.models import Endpoint, MissingExtra, ProviderModels
from perdure.models import provider as module
from perdure.models.provider import UNKNOWN_OUTPUT, UNKNOWN_WINDOW

USED = Usage(input=1_000, output=1_000)


def fresh(code: str) -> None:
    """Run it in an interpreter of its own."""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_nothing_heavy_is_imported_before_a_model_is_asked_h170() -> None:
    fresh(
        "import sys, perdure, perdure.models\n"
        "heavy = {'pydantic_ai', 'openai', 'anthropic', 'httpx2', 'genai_prices', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "models = perdure.models.ProviderModels('anthropic:claude-sonnet-5', api_key='k')\n"
        "models.find('openai:gpt-5'), models.price('openai:gpt-5', perdure.Usage(input=1))\n"
        "heavy = {'pydantic_ai', 'openai', 'anthropic'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )


def test_only_the_provider_that_is_asked_is_imported_h170() -> None:
    fresh(
        "import asyncio, sys\n"
        "from perdure.harness.messages import Text, UserMessage\n"
        "from perdure.harness.model import ModelError, ModelRequest\n"
        "from perdure.models import ProviderModels\n"
        "models = ProviderModels('openai:gpt-5', base_url='http://127.0.0.1:9', api_key='k')\n"
        "async def main():\n"
        "    try:\n"
        "        request = ModelRequest(model=models.default, messages=[UserMessage((Text('a'),))])\n"
        "        async for _ in models.stream(request):\n"
        "            pass\n"
        "    except ModelError as error:\n"
        "        assert error.code == 'connection', error\n"
        "    else:\n"
        "        raise AssertionError\n"
        "asyncio.run(main())\n"
        "assert 'openai' in sys.modules and 'anthropic' not in sys.modules\n"
    )


def test_every_built_in_endpoint_is_found_by_its_name_h179(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_COMPATIBLE_BASE_URL", "http://127.0.0.1:9/v1")
    names = {found.name for found in entry_points(group=ADAPTERS)}
    assert names == {"openai", "openai-chat", "openai-compatible", "anthropic"}
    for name in names:
        found = installed_models(f"{name}:some-model")
        assert isinstance(found, ProviderModels)
        assert found.default == f"{name}:some-model"
        info = found.find(f"{name}:some-model")
        assert info is not None
        assert info.id == f"{name}:some-model"


def test_without_the_extra_it_says_what_to_install_h179(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "installed", lambda package: package != "pydantic_ai")
    with pytest.raises(MissingExtra, match=r"pydantic_ai is not installed; pip install 'perdure\[models\]'"):
        ProviderModels("openai:gpt-5")
    monkeypatch.setattr(module, "installed", lambda package: package != "anthropic")
    with pytest.raises(NoAdapter, match="anthropic is not installed"):
        ProviderModels("anthropic:claude-sonnet-5")


@pytest.mark.parametrize(
    ("default", "options", "words"),
    [
        ("gpt-5", {}, "'provider:name', not 'gpt-5'"),
        ("openai:", {}, "'provider:name', not 'openai:'"),
        ("nobody:x", {}, "no endpoint 'nobody'; there are: anthropic, openai, openai-chat, openai-compatible"),
        ("openai-compatible:x", {}, "base_url, or set OPENAI_COMPATIBLE_BASE_URL"),
        ("mine:x", {"endpoints": [Endpoint(name="mine", protocol="anthropic")]}, "where is mine"),
        (None, {"api_key": "k"}, "there is no default"),
        ("openai:x", {"stall_ms": 0}, "stall_ms must be at least 1"),
        ("openai:x", {"endpoints": [Endpoint(name="a", protocol="openai")] * 2}, "several endpoints named 'a'"),
    ],
)
def test_what_cannot_be_is_refused_at_once_h170(default: str | None, options: Mapping[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ProviderModels(default, **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "fields",
    [{"name": "a:b"}, {"name": ""}, {"protocol": "telegraph"}, {"system_messages": "shouted"}],
)
def test_an_endpoint_that_cannot_be_is_refused_h170(fields: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        Endpoint(**{"name": "a", "protocol": "openai", **fields})  # pyright: ignore[reportArgumentType]


def test_what_is_known_of_a_model_h169() -> None:
    stated = ModelInfo(provider="local", name="tiny", context_window=4_096, max_output=512)
    there = Endpoint(name="local", protocol="openai-chat", base_url="http://127.0.0.1:9/v1")
    them = ProviderModels("openai:gpt-5", endpoints=[there], catalogue=[stated])
    known = them.find("openai:gpt-5")
    assert known is not None
    assert (known.provider, known.name) == ("openai", "gpt-5")
    assert known.context_window == 400_000
    assert them.find("local:tiny") == stated
    unknown = them.find("local:other")
    assert unknown is not None
    assert (unknown.context_window, unknown.max_output) == (UNKNOWN_WINDOW, UNKNOWN_OUTPUT)
    for model in ("nobody:x", "openai:", "openai", "openai-compatible:x"):
        assert them.find(model) is None


def test_a_known_price_is_told_and_an_unknown_one_is_none_h158() -> None:
    there = Endpoint(name="local", protocol="openai-chat", base_url="http://127.0.0.1:9/v1")
    router = Endpoint(name="router", protocol="openai-chat", base_url="https://openrouter.ai/api/v1")
    them = ProviderModels("openai:gpt-5", endpoints=[there, router])
    # 1.25 and 10 dollars a million.
    assert them.price("openai:gpt-5", USED) == Decimal("0.01125")
    assert them.price("openai-chat:gpt-5", USED) == Decimal("0.01125")
    assert them.price("anthropic:claude-opus-5", USED) is not None
    for model in ("openai:gpt-nothing", "local:qwen3", "local:gpt-5", "nobody:gpt-5", "openai-compatible:gpt-5"):
        assert them.price(model, USED) is None
    assert them.price("router:openai/gpt-5", USED) is not None


def test_a_price_tells_what_the_cache_had_from_what_is_new_h158() -> None:
    them = ProviderModels("openai:gpt-5")
    new = them.price("openai:gpt-5", Usage(input=1_000_000))
    cached = them.price("openai:gpt-5", Usage(cache_read=1_000_000))
    assert new == Decimal("1.25")
    assert cached == Decimal("0.125")
    assert them.price("openai:gpt-5", Usage()) == 0


ADDRESSES = ["", "host/v1", "ftp://host/v1", "http://", "http://host:99999", "http://host:x/v1", "//host/v1"]


@pytest.mark.parametrize("url", ADDRESSES[1:])
def test_an_address_that_is_none_is_refused_and_not_quoted_h170(url: str) -> None:
    with pytest.raises(ValueError, match="no address") as caught:
        Endpoint(name="local", protocol="openai-chat", base_url=url)
    assert url not in str(caught.value).replace("https://host/v1", "")
    with pytest.raises(ValueError, match="no address"):
        ProviderModels("openai:gpt-5", base_url=url)


@pytest.mark.parametrize("url", ADDRESSES[1:])
async def test_an_address_in_the_environment_that_is_none_is_not_tried_again_h74(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", url)
    error = await fails(ProviderModels("openai:gpt-5", api_key="k"), user("hi"))
    assert (error.code, error.retryable) == ("other", False)
    assert "OPENAI_BASE_URL" in str(error)
    assert url not in str(error).replace("https://host/v1", "")


@pytest.mark.parametrize("key", ["secret-key\n", "secret\r\nkey", "sécret-key", "secret\x00key"])
async def test_a_key_that_cannot_be_sent_is_no_connection_that_fails_h74(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model, variable in (("openai:gpt-5", "OPENAI_API_KEY"), ("anthropic:claude-opus-5", "ANTHROPIC_API_KEY")):
        if "\x00" not in key:
            monkeypatch.setenv(variable, key)
        given = None if "\x00" not in key else key
        error = await fails(ProviderModels(model, api_key=given), user("hi"))
        assert (error.code, error.retryable) == ("authentication", False)
        assert variable in str(error)
        assert "key" not in str(error).replace(variable, "").replace("the key for", "").replace("api_key", "")


async def test_without_a_key_the_variable_to_set_is_named_h74(monkeypatch: pytest.MonkeyPatch) -> None:
    for model, variable in (("openai:gpt-5", "OPENAI_API_KEY"), ("anthropic:claude-opus-5", "ANTHROPIC_API_KEY")):
        monkeypatch.delenv(variable, raising=False)
        error = await fails(ProviderModels(model), user("hi"))
        assert (error.code, error.retryable) == ("authentication", False)
        assert f"set {variable}" in str(error)


def test_a_key_shows_nowhere_h170() -> None:
    endpoint = Endpoint(
        name="mine",
        protocol="openai-chat",
        api_key="secret-key-1",
        base_url="http://me:secret-key-3@127.0.0.1:9/v1",
        settings={"extra_headers": {"X-Auth": "secret-key-4"}},
    )
    them = ProviderModels("openai:gpt-5", api_key="secret-key-2", endpoints=[endpoint])
    for shown in (repr(endpoint), repr(them), str(them), repr(them._endpoints)):
        assert "secret-key" not in shown


async def test_keys_and_addresses_are_the_environments_at_the_time_of_the_request_h170(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    them = ProviderModels("anthropic:claude-sonnet-5")
    async with provider(say("ok")) as server:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", server.url("anthropic"))
        monkeypatch.setenv("ANTHROPIC_API_KEY", "test-key-0123456789")
        assert (await ask(them, user("hi"))).text == "ok"


async def test_another_peoples_server_never_gets_openais_key_h170(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "openais-own-key")
    async with provider(say("ok")) as server:
        await ask(local(server), user("hi"))
        nokey = ProviderModels(
            "bare:x",
            endpoints=[Endpoint(name="bare", protocol="openai-chat", base_url=server.url("openai-chat"))],
        )
        server.will(say("never asked"))
        with pytest.raises(Exception, match="does not accept the key"):
            await ask(nokey, user("hi"))
        server.replies.clear()
        assert "openais-own-key" not in repr([sent.headers for sent in server.sent])
