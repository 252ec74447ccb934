"""What calls of an MCP server promise when it dies under them and comes back, comes back with other tools, or does not
come back in time (rules H386 to H389 and H394)."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

from perdure.harness.conversation import Conversation
from perdure.harness.harness import Harness
from perdure.harness.messages import AssistantMessage, ToolResultMessage, decode_messages
from perdure.harness.model import ModelRequest
from perdure.harness.results import INTERRUPTED
from perdure.kernel.records import EntryRecord, from_raw
from perdure.testing.model import Reply, call, calls, say
from perdure.testing.normal import Records
from perdure.testing.scenarios.hosting import Replies, effects, open_harness, scenario
from perdure.testing.scenarios.mcp_shop import HOURS, WORDS, Shop, Strike, open_shop
from perdure.testing.simulation import Host
from perdure.tools.mcp.server import McpServer, require_extra

UNSAFE: Final = effects("shop_order", "shop_buy", "shop_restock")
"""Tools of which a call may end ``interrupted``."""
DONE: Final = "done"
"""A call that the shop answered."""
EITHER: Final = (DONE, "interrupted")
"""One that the server answers, and that its host may cut off."""
LOST: Final = ("interrupted",)
"""One of which nobody can tell."""


@asynccontextmanager
async def open_agent(
    host: Host, shop: Shop, replies: Replies, *, required: bool = True
) -> AsyncGenerator[tuple[McpServer, Harness, Conversation]]:
    """A harness that uses the shop. At its end, what the model was told is held against what the shop did."""
    async with (
        open_shop(shop, required=required) as server,
        open_harness(host, replies, extensions=[server.extension]) as (harness, root),
    ):
        yield server, harness, root
        for what, result in results(await root.entries(limit=1000)):
            if not result.is_error and what.startswith(("order", "buy", "price", "look")):
                assert what in shop.done, f"the model was told {result.text!r}, and nobody did it"


def results(entries: Sequence[EntryRecord]) -> Iterator[tuple[str, ToolResultMessage]]:
    """What was called, such as ``order cup``, and its result."""
    called: dict[str, str] = {}
    for entry in entries:
        for message in decode_messages(entry.raw_messages):
            if isinstance(message, AssistantMessage):
                for part in message.tool_calls:
                    arguments = from_raw(part.arguments)
                    given = arguments.values() if isinstance(arguments, dict) else ()
                    called[part.id] = " ".join([part.name.removeprefix("shop_"), *map(str, given)])
            elif isinstance(message, ToolResultMessage):
                yield called[message.call_id], message


def became(result: ToolResultMessage) -> str:
    return result.code or ("failed" if result.is_error else DONE)


def told(expected: Mapping[str, Sequence[str]]) -> Callable[[Records], Iterator[str]]:
    """In the end each call has one result, which became one of these, and says so."""

    def judge(records: Records) -> Iterator[str]:
        found = list(results(records.entries))
        if sorted(what for what, _ in found) != sorted(expected):
            yield f"there are results of {[what for what, _ in found]}"
        for what, result in found:
            if became(result) not in expected.get(what, ()):
                yield f"{what} became {became(result)}: {result.text}"
            verb, _, item = what.partition(" ")
            unknown = result.text.startswith(INTERRUPTED)
            if unknown != (became(result) == "interrupted"):
                yield f"of {what}, which became {became(result)}, the model was told {result.text!r}"
            if became(result) == DONE and verb in WORDS and result.text != WORDS[verb].format(item):
                yield f"{what} was answered {result.text!r}"

    return judge


async def shopped(host: Host, shop: Shop, replies: Replies) -> None:
    """One input, which the agent does what it does for."""
    async with open_agent(host, shop, replies) as (_, _, root):
        answer = await (await root.submit("Shop.", request_id="shop")).answer()
        assert answer.text == "done", answer.text


# --- it comes back ---------------------------------------------------------------------------------------------


async def mcp_safe_calls_lost(host: Host) -> None:
    """The server dies of calls that may be asked again: before one, after one, in an answer. All are answered."""
    strikes = {"price tea": Strike("before"), "price milk": Strike("after"), "price salt": Strike("torn")}
    replies = [
        calls(call("shop_price", item="tea"), call("shop_price", item="milk")),
        call("shop_price", item="salt"),
        call("shop_look", item="shelf"),
        say("done"),
    ]
    await shopped(host, Shop(host, strikes), replies)


SAFE_TOLD: Final[Mapping[str, Sequence[str]]] = dict.fromkeys(
    ("price tea", "price milk", "price salt", "look shelf"), (DONE,)
)


async def mcp_unsafe_calls_lost(host: Host) -> None:
    """The server dies of calls that may not be asked again: of what was not answered, the model is told that nobody
    knows. The next call finds it there again, or waits for it."""
    strikes = {
        "order cup": Strike("after"),
        "order pot": Strike("before"),
        "order plate": Strike("answered"),
        "order spoon": Strike("torn"),
    }
    replies = [*(call("shop_order", item=item) for item in ("cup", "pot", "plate", "spoon", "fork")), say("done")]
    await shopped(host, Shop(host, strikes), replies)


UNSAFE_TOLD: Final = {
    "order cup": LOST,
    "order pot": LOST,
    "order plate": EITHER,
    "order spoon": LOST,
    "order fork": EITHER,
}


async def mcp_resources(host: Host) -> None:
    """Resources and prompts of a server that dies of reading them: they only read, and are asked again."""
    strikes = {f"read {HOURS}": Strike("before"), "get greet": Strike("torn")}
    replies = [
        calls(call("shop_list_resources"), call("shop_read_resource", uri=HOURS)),
        calls(call("shop_list_prompts"), call("shop_get_prompt", name="greet", arguments={"name": "Ada"})),
        say("done"),
    ]
    async with open_agent(host, Shop(host, strikes), replies) as (_, _, root):
        submission = await root.submit("Read.", request_id="read")
        assert (await submission.answer()).text == "done"
        texts = [result.text for _, result in results(await root.entries(limit=1000))]
        assert any("Say hello to Ada." in text for text in texts), texts
        assert "always" in texts, texts
        assert sum('"uri":"shop://hours"' in text for text in texts) == 1, texts


# --- it comes back with other tools ----------------------------------------------------------------------------


async def mcp_tools_changed(host: Host) -> None:
    """It dies of a safe call and comes back without that tool: then nobody can tell. Its new tool is offered."""
    shop = Shop(host, {"look shelf": Strike("before", then="changed"), "buy pot": Strike("after")})
    replies = [
        call("shop_look", item="shelf"),
        calls(call("shop_order", item="cup"), call("shop_buy", item="cup")),
        call("shop_buy", item="pot"),
        say("done"),
    ]

    def script(request: ModelRequest) -> Reply:
        given = sum(isinstance(message, AssistantMessage) for message in request.messages)
        offered = {tool.name for tool in request.tools}
        if given and ("shop_buy" not in offered or "shop_order" in offered):
            return say(f"what is offered is {sorted(offered)}")
        return replies[given]

    await shopped(host, shop, script)


CHANGED_TOLD: Final = {
    "look shelf": LOST,
    "order cup": ("tool_unavailable",),
    "buy cup": EITHER,
    "buy pot": LOST,
}


async def mcp_tools_added(host: Host) -> None:
    """The server says that it has one more tool: it is offered within some requests, and is there after a kill."""

    def script(request: ModelRequest) -> Reply:
        given = sum(isinstance(message, AssistantMessage) for message in request.messages)
        if not given:
            return call("shop_restock")
        if given < 10 and "shop_buy" not in {tool.name for tool in request.tools}:
            return call("shop_price", item="tea")
        last = request.messages[-1]
        assert isinstance(last, ToolResultMessage)
        return say("done") if last.name == "shop_buy" else call("shop_buy", item="cup")

    shop = Shop(host)
    async with open_agent(host, shop, script) as (_, _, root):
        submission = await root.submit("Shop.", request_id="shop")
        assert (await submission.answer()).text == "done"
        outcome = dict(results(await root.entries(limit=1000)))
        if "stocked" in shop.state:
            assert became(outcome["buy cup"]) in EITHER, outcome


# --- it does not come back in time -----------------------------------------------------------------------------


async def mcp_server_away(host: Host) -> None:
    """It dies of a safe call, and stays away for longer than calls wait. Later it is there again."""
    shop = Shop(host, {"price tea": Strike("before", then="closed")})
    replies = {
        "Shop.": [call("shop_price", item="tea"), call("shop_order", item="cup"), say("It is closed.")],
        "Again.": [calls(call("shop_price", item="salt"), call("shop_order", item="pot")), say("done")],
    }
    async with open_agent(host, shop, replies, required=False) as (server, _, root):
        submission = await root.submit("Shop.", request_id="shop")
        assert (await submission.answer()).text == "It is closed."
        shop.reopen()
        while not server.connected:
            await host.clock.sleep(1)
        submission = await root.submit("Again.", request_id="again")
        assert (await submission.answer()).text == "done"


AWAY_TOLD: Final = {
    "price tea": LOST,
    "order cup": ("tool_unavailable", "interrupted"),
    "price salt": (DONE,),
    "order pot": EITHER,
}


# --- anywhere --------------------------------------------------------------------------------------------------

MOST_SEQ: Final = 24
"""Commits of the program, about."""
LONGEST_S: Final = 0.8
"""That the server stays away: less than a host is down between two lives, so that the next one finds it there."""


async def mcp_lost_at_a_commit(host: Host) -> None:
    """The server dies at one commit, and again some commits later: at that moment, a moment later, or in the middle of
    what it says next. The seed says where."""
    chance = random.Random(f"mcp {host.seed}")  # noqa: S311  # reproducible is what it is for
    first = 1 + host.seed % MOST_SEQ
    points = {"first": first, "second": first + chance.randint(1, 8)}
    ways = {name: (chance.choice(("now", "later", "torn")), chance.random(), chance.random()) for name in points}
    shop = Shop(host)

    def settled(seq: int) -> None:
        for name, point in points.items():
            if seq >= point and shop.once(name):
                way, wait, away = ways[name]
                if way == "torn":
                    shop.tear()
                else:
                    away *= LONGEST_S
                    host.loop.call_later(wait if way == "later" else 0, lambda away=away: shop.kill(away_s=away))

    replies = [
        calls(
            call("shop_order", item="cup"),
            call("shop_price", item="tea"),
            call("shop_order", item="pot"),
            call("shop_price", item="milk"),
        ),
        call("shop_read_resource", uri=HOURS),
        call("shop_order", item="plate"),
        call("shop_price", item="salt"),
        say("done"),
    ]
    async with open_agent(host, shop, replies) as (_, harness, root):
        harness.session.observe(lambda each: settled(each.seq))
        submission = await root.submit("Shop.", request_id="shop")
        assert (await submission.answer()).text == "done"


ANYWHERE_TOLD: Final = {
    **{f"order {item}": EITHER for item in ("cup", "pot", "plate")},
    **{f"price {item}": (DONE,) for item in ("tea", "milk", "salt")},
    "read_resource shop://hours": (DONE,),
}

MCP = (
    scenario(
        mcp_safe_calls_lost,
        safe=effects("price tea", "price milk", "price salt", "look shelf"),
        ends=told(SAFE_TOLD),
        require=require_extra,
    ),
    scenario(
        mcp_unsafe_calls_lost,
        unsafe=effects("order cup", "order plate", "order spoon", "order fork"),
        tools=UNSAFE,
        ends=told(UNSAFE_TOLD),
        loses_calls=True,
        require=require_extra,
    ),
    scenario(mcp_resources, require=require_extra),
    scenario(
        mcp_tools_changed,
        unsafe=effects("buy cup", "buy pot"),
        tools=UNSAFE | {"shop_look"},  # a tool that is gone cannot be asked again
        ends=told(CHANGED_TOLD),
        loses_calls=True,
        require=require_extra,
    ),
    scenario(
        mcp_tools_added,
        any_effects=True,  # what it buys must not be bought twice
        tools=UNSAFE,
        steady=False,  # how many requests it takes is a matter of time
        require=require_extra,
    ),
    scenario(
        mcp_server_away,
        safe=effects("price salt"),
        unsafe=effects("order pot"),
        tools=UNSAFE | {"shop_price"},  # what may have been done, and cannot be asked again in time
        ends=told(AWAY_TOLD),
        loses_calls=True,
        steady=False,  # a host that is started while it is away has none of its tools, and says so in other words
        require=require_extra,
    ),
    scenario(
        mcp_lost_at_a_commit,
        safe=effects("price tea", "price milk", "price salt"),
        any_effects=True,  # an order may have been lost, and must not take place twice
        tools=UNSAFE,
        ends=told(ANYWHERE_TOLD),
        loses_calls=True,
        steady=False,  # which calls it dies under is a matter of time
        require=require_extra,
    ),
)
