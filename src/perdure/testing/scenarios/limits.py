"""What limits promise: nothing is sent beyond one, what has begun is completed, and raised it goes on (rules H49, H159,
H244 to H246)."""

from __future__ import annotations

from collections.abc import Iterator

from perdure.harness.documents import TOOL_RESULT
from perdure.harness.limits import Limits
from perdure.harness.messages import ToolResultMessage
from perdure.harness.model import ModelRequest
from perdure.harness.settings import AfterFailure
from perdure.testing.model import Reply, call, calls, say
from perdure.testing.normal import Records
from perdure.testing.scenarios.hosting import effects, ends, measure, open_harness, scenario, user_texts
from perdure.testing.simulation import Host

ONE_TURN = Limits(turns=1)


def repeat(request: ModelRequest) -> Reply:
    return say(f"{user_texts(request)[-1]}!")


async def limit_at_admission(host: Host) -> None:
    """An input that comes at a limit ends at once, and the next one is answered when the limit was raised."""
    async with open_harness(host, repeat, conversation_limits=ONE_TURN) as (_, root):
        assert (await (await root.submit("one", request_id="one")).answer()).text == "one!"
        await ends(await root.submit("two", request_id="two"), "limit")
        await root.set_limits(turns=2)
        assert (await (await root.submit("three", request_id="three")).answer()).text == "three!"


async def limit_of_session(host: Host) -> None:
    """A limit of the session: what a conversation used that is deleted counts, also in a process that was not there."""
    async with open_harness(host, repeat, limits=Limits(turns=3)) as (harness, root):
        if await harness.session.request(root.id, "two") is None:
            named = {info.name: info.id for info in await harness.conversations()}
            if "other" in named:
                other = harness.handle(named["other"])
            else:
                other = await harness.create_conversation(name="other")
            for text in ("one", "more"):
                assert (await (await other.submit(text, request_id=text)).answer()).text == f"{text}!"
        assert (await (await root.submit("two", request_id="two")).answer()).text == "two!"
        await ends(await root.submit("three", request_id="three"), "limit")
        for info in await harness.conversations():
            if info.name == "other":
                await harness.handle(info.id).delete()
        await ends(await root.submit("four", request_id="four"), "limit")


async def limit_in_run(host: Host) -> None:
    """A limit that is reached in the middle of a run: its round is completed, and the next run is told of it."""

    def script(request: ModelRequest) -> Reply:
        if user_texts(request)[-1] == "measure":
            return calls(call("measure", place="here", seconds=2), call("measure", place="there"))
        return say(" and ".join(message.text for message in request.messages if isinstance(message, ToolResultMessage)))

    async with open_harness(host, script, tools=[measure(host)], conversation_limits=Limits(tool_calls=1)) as (_, root):
        busy = await root.submit("measure", request_id="measure")
        steer = await root.submit("and then?", mode="steer", request_id="steer")
        await ends(busy, "limit")
        await ends(steer, "limit")
        await root.set_limits(tool_calls=None)
        told = await root.submit("tell", request_id="tell")
        assert (await told.answer()).text == "here is 7 and there is 7"


def completed(records: Records) -> Iterator[str]:
    if len(records.of(TOOL_RESULT)) != 2:
        yield f"the round has {len(records.of(TOOL_RESULT))} results, and two calls"


async def _queue(host: Host, after_failure: AfterFailure) -> None:
    async with open_harness(host, repeat, per_event=0.5, conversation_limits=ONE_TURN, after_failure=after_failure) as (
        _,
        root,
    ):
        one, two, three = [await root.submit(text, request_id=text) for text in ("one", "two", "three")]
        assert (await one.answer()).text == "one!"
        await ends(two, "limit")
        if after_failure != "keep":
            await ends(three, "limit" if after_failure == "continue" else "run_failed")
        await root.set_limits(turns=None)
        four = await root.submit("four", request_id="four")
        if after_failure == "keep":
            assert (await three.answer()).text == "three!"
        assert (await four.answer()).text == "four!"


async def limit_keeps_queue(host: Host) -> None:
    """What waited behind a run that ended at a limit waits on; it goes first when the limit was dropped."""
    await _queue(host, "keep")


async def limit_continues(host: Host) -> None:
    """Each of what waited is tried, and ends at the limit."""
    await _queue(host, "continue")


async def limit_withdraws(host: Host) -> None:
    """What waited is withdrawn."""
    await _queue(host, "withdraw")


async def limit_in_later_lives(host: Host) -> None:
    """A host that comes back with a limit sends nothing any more: not what it has admitted, nor what was cut off."""
    later = bool(host.notes.get("begun"))
    host.notes["begun"] = True

    def script(request: ModelRequest) -> Reply:
        assert not later, "a request is sent beyond the limit"
        if isinstance(request.messages[-1], ToolResultMessage):
            return say(f"It is {request.messages[-1].text}, as far as can be told.")
        return call("measure", place="here")

    limits = Limits(turns=0) if later else None
    async with open_harness(
        host, script, tools=[measure(host)], per_event=0.5, conversation_limits=limits, limits=limits
    ) as (_, root):
        record = await (await root.submit("measure", request_id="measure")).wait()
        assert record.reason == "limit" or record.answer is not None


LIMITS = (
    scenario(limit_at_admission),
    scenario(limit_of_session, deletes=True),
    scenario(limit_in_run, safe=effects("measure here", "measure there"), ends=completed),
    scenario(limit_keeps_queue),
    scenario(limit_continues),
    scenario(limit_withdraws),
    scenario(limit_in_later_lives, any_effects=True, steady=False),
)
