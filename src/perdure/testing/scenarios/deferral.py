"""What responses made in the background promise: answered, failed, expired, aborted; none is asked for twice (rules H75
and H400 to H406)."""

from __future__ import annotations

from collections import Counter
from typing import cast

from perdure.harness.conversation import Conversation
from perdure.harness.documents import Live
from perdure.harness.harness import Harness
from perdure.harness.messages import ToolResultMessage, Usage
from perdure.harness.model import ModelRequest
from perdure.harness.settings import PollPolicy
from perdure.testing.model import Reply, call, defer, fail, say
from perdure.testing.scenarios.hosting import STORY, ends, measure, open_harness, scenario, user_texts
from perdure.testing.simulation import Host


def _asked(host: Host) -> Counter[str]:
    """How often the provider was asked for each text."""
    return cast("Counter[str]", host.notes.setdefault("asked", Counter[str]()))


async def _kept(host: Host, harness: Harness, root: Conversation) -> None:
    """A handle that the process before left in storage: from here on its request must not be sent again."""
    live = await harness.session.snapshot(Live, conversation=root.id)
    if live is not None and live.deferred is not None:
        kept = cast("dict[str, int]", host.notes.setdefault("kept", {}))
        for text, times in _asked(host).items():
            kept.setdefault(text, times)


def _check(host: Host) -> None:
    for text, times in cast("dict[str, int]", host.notes.get("kept", {})).items():
        assert _asked(host)[text] == times, f"{text!r} was asked for again though its handle was kept"


async def deferred_response(host: Host) -> None:
    """Answers with and without calls that are there after some polls, and some that never come."""

    def script(request: ModelRequest) -> Reply:
        text = user_texts(request)[-1]
        if any(isinstance(message, ToolResultMessage) for message in request.messages) and text == "measure":
            text = "measured"
        _asked(host)[text] += 1
        return replies[text]

    replies: dict[str, Reply] = {
        "measure": defer(call("measure", place="here"), polls=1),
        "measured": defer(say(STORY), polls=3),
        "gone": defer(fail("expired", "it is not there any more", usage=Usage(input=9, output=4)), polls=1),
        "refused": defer(fail("refused", "not that"), polls=0),
        "at once": say("now"),
    }
    async with open_harness(host, script, tools=[measure(host)]) as (harness, root):
        await _kept(host, harness, root)
        measured = await root.submit("measure", request_id="measure")
        assert (await measured.answer()).text == STORY
        for text in ("gone", "refused"):
            await ends(await root.submit(text, request_id=text), "model_error")
        assert (await (await root.submit("at once", request_id="at once")).answer()).text == "now"
        _check(host)


async def deferred_too_long(host: Host) -> None:
    """A response that is not there by the deadline is given up; one that is there is taken, however late it is asked
    for. What waited behind is answered."""
    replies = {"slow": defer(say("never"), polls=1_000), "next": defer(say("yes"), polls=0)}
    async with open_harness(host, replies, polling=PollPolicy(deadline_ms=20_000)) as (_, root):
        slow = await root.submit("slow", request_id="slow")
        following = await root.submit("next", request_id="next")
        await ends(slow, "model_error")
        last = await root.submit("next", request_id="again")
        assert (await following.answer()).text == "yes"
        assert (await last.answer()).text == "yes"


async def deferred_aborted(host: Host) -> None:
    """A response that is waited for is aborted; the conversation goes on."""
    replies = {"slow": defer(say("never"), polls=1_000), "next": defer(say("yes"))}
    async with open_harness(host, replies) as (harness, root):
        slow = await root.submit("slow", request_id="slow")
        while await slow.status() == "placed":
            live = await harness.session.snapshot(Live, conversation=root.id)
            if live is not None and live.deferred is not None:
                await root.abort()
                break
            harness.session.check_open()
            await host.clock.sleep(0.05)
        await ends(slow, "aborted")
        assert (await (await root.submit("next", request_id="next")).answer()).text == "yes"


DEFERRAL = (
    scenario(deferred_response, safe=frozenset({"measure here"})),
    scenario(deferred_too_long),
    scenario(deferred_aborted),
)
