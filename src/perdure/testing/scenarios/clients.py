"""Somebody who follows a conversation from outside, leaves and comes back (rules H147 to H151, H260 to H266)."""

from __future__ import annotations

import asyncio
from typing import cast

import msgspec

from perdure.harness.documents import ASSISTANT
from perdure.harness.events import (
    EntryAppended,
    Event,
    MessageDelta,
    MessageEnd,
    MessageStart,
    RunEnd,
    RunStart,
    Snapshot,
    ToolEnd,
)
from perdure.harness.messages import AssistantMessage, decode_messages
from perdure.kernel.json import JsonValue
from perdure.kernel.records import EntryRecord
from perdure.testing.model import call, say
from perdure.testing.scenarios.hosting import STORY, effects, measure, open_harness, scenario
from perdure.testing.simulation import Host

MOST_TAKEN = 2
"""Events a client takes before it leaves and comes back."""


class Client(msgspec.Struct, frozen=True):
    """What a page in a browser knows, all of it from events."""

    cursor: str | None = None
    entries: tuple[tuple[int, str], ...] = ()
    """Each with its kind."""
    text: str = ""
    """Of the answer that is on its way."""
    busy: bool = False

    @property
    def satisfied(self) -> bool:
        return not self.busy and bool(self.entries) and self.entries[-1][1] == ASSISTANT

    def told(self, event: Event) -> Client:
        after = msgspec.structs.replace(self, cursor=event.cursor)
        match event:
            case Snapshot():
                view = cast("dict[str, list[dict[str, JsonValue]]]", event.view)
                shown = tuple((cast("int", entry["id"]), str(entry["kind"])) for entry in view["entries"])
                assert shown[: len(self.entries)] == self.entries, f"{shown} in place of {self.entries}"
                return msgspec.structs.replace(after, entries=shown, text=partial(event.view), busy=event.busy)
            case RunStart() | RunEnd():
                return msgspec.structs.replace(after, busy=isinstance(event, RunStart))
            case MessageStart():
                return msgspec.structs.replace(after, text="")
            case MessageDelta(part="text"):
                return msgspec.structs.replace(after, text=self.text + event.text)
            case MessageEnd(entry=EntryRecord() as entry):
                (message,) = decode_messages(entry.raw_messages)
                assert isinstance(message, AssistantMessage)
                assert message.text.startswith(self.text), f"{self.text!r} became {message.text!r}"
                return msgspec.structs.replace(after._with(entry), text="")
            case EntryAppended() | ToolEnd():
                return after._with(event.entry)
            case _:
                return after

    def _with(self, entry: EntryRecord) -> Client:
        assert not self.entries or self.entries[-1][0] < entry.id, f"entry {entry.id} after {self.entries}"
        return msgspec.structs.replace(self, entries=(*self.entries, (entry.id, entry.kind)))


def partial(view: JsonValue) -> str:
    live = cast("dict[str, dict[str, dict[str, list[dict[str, str]]]]]", view)["live"]
    message = live.get("message")
    return "".join(part["text"] for part in message["content"] if part["type"] == "text") if message else ""


async def coming_back(host: Host) -> None:
    """A client that takes two events at a time, and comes back with its cursor, also to the next process: it is told of
    every entry once, and of no text twice."""

    async with open_harness(host, [call("measure", place="here", seconds=1), say(STORY)], tools=[measure(host)]) as (
        _,
        root,
    ):

        def known() -> Client:
            return cast("Client", host.notes.get("client", Client()))

        async def follow() -> None:
            while not known().satisfied:
                async with root.events(after=known().cursor) as events:
                    for _ in range(MOST_TAKEN):
                        event = await anext(events)
                        host.heard(event.seq)
                        host.notes["client"] = known().told(event)
                        if known().satisfied:
                            return

        following = asyncio.create_task(follow())
        await (await root.submit("Measure and tell.", request_id="tell")).answer()
        await following
        stored = [(entry.id, entry.kind) for entry in await root.entries(limit=1000)]
        assert list(known().entries) == stored, f"told of {known().entries}, stored are {stored}"


CLIENTS = (scenario(coming_back, name="coming-back", safe=effects("measure here")),)
