"""An agent host at steady work for a long time: memory, open files and all else it holds must stay flat.

    python benchmarks/soak.py [--minutes 60] [--every 10] [--rate 10] [--log samples.jsonl]

One host, power-safe, takes turns at a steady rate: plain ones, ones with a tool, streamed ones, some of them aborted.
Conversations are made, talked in for 20 turns and forgotten; old ones are found again by id; one lives for the whole
run, reset now and then, and is watched throughout. Watches, views and events are attached and detached. A second store
is opened and closed over and over. Ends with 1, and says what grew, if the last sixth of the run holds more than the
second by more than the tolerances in flat.py. Age limits of caches are a twelfth of the run, at most ten minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path

import flat
import memory
from perdure import Agent, AssistantMessage, Conversation, Extension, Harness, SqliteStorage, Text, Usage, tool
from perdure.harness import contexts
from perdure.harness.messages import ToolCallPart, UserMessage
from perdure.harness.model import Finished, ModelEvent, ModelInfo, ModelRequest, TextDelta
from perdure.kernel.records import to_raw
from perdure.kernel.reports import Report

LIFETIME = 20
"""Turns of a conversation before it is forgotten."""
RESET_EVERY = 50
"""Turns of the one that lives on, between two resets."""
DELTAS, DELTA_S = 40, 0.005
WARM = 12
"""What caches by age, and what the load itself gathers, is full after a sixth of the run: each gets a share of it."""
ANSWER = "Item looked after. " + "All went well and nothing needs to be done about it now. " * 3


@tool(replay="safe")
async def echo(text: str) -> str:
    """Echo."""
    return "echo " + text


EXTENSION = Extension("soak", tools=[echo])


class Model:
    """Answers at once, calls the tool first, or streams: by its name. Keeps nothing."""

    default = "soak:plain"

    def find(self, model: str) -> ModelInfo | None:
        provider, _, name = model.partition(":")
        return ModelInfo(provider=provider, name=name, context_window=10**9, max_output=8192)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        content: tuple[Text | ToolCallPart, ...] = (Text(ANSWER),)
        calls = request.model == "soak:tool" and isinstance(request.messages[-1], UserMessage)
        if calls:
            content = (ToolCallPart(f"c{len(request.messages)}", "echo", to_raw({"text": "hello"})),)
        elif request.model == "soak:stream":
            for _ in range(DELTAS):
                await asyncio.sleep(DELTA_S)
                yield TextDelta("word ")
            content = (Text("word " * DELTAS),)
        yield Finished(
            AssistantMessage(
                content=content,
                provider="soak",
                model=request.model.partition(":")[2],
                stop_reason="tool_use" if calls else "stop",
                usage=Usage(input=10, output=10),
            )
        )


class Soak:
    """The load. Every actor is a loop with a pace of its own; a turn counts when it is answered."""

    def __init__(self, harness: Harness, second: Path, *, rate: float, remembered: int, seed: int) -> None:
        """``remembered``: how many of the last forgotten conversations may be found again."""
        self.harness = harness
        self.turns = 0
        self.old: deque[int] = deque(maxlen=remembered)
        self._second = second
        self._rate = rate
        self._random = random.Random(seed)

    def actors(self) -> list[Coroutine[None, None, None]]:
        # Shares of the rate, of which they add up to 1.
        return [
            self._pace(self._talking("plain"), 0.25),
            self._pace(self._talking("plain"), 0.25),
            self._pace(self._talking("tool"), 0.2),
            self._pace(self._talking("stream", aborted_every=10), 0.1),
            self._pace(self._living_on(), 0.1),
            self._pace(self._finding_again(), 0.05),
            self._pace(self._opening_another(), 0.05),
            self._watching_all_along(),
        ]

    async def _pace(self, step: Callable[[], Awaitable[None]], share: float) -> None:
        """A step every so often; one that comes late is not made up for."""
        interval = 1 / (self._rate * share)
        loop = asyncio.get_running_loop()
        due = loop.time() + interval * self._random.random()
        while True:
            await asyncio.sleep(due - loop.time())
            await step()
            due = max(due + interval, loop.time())

    async def turn(self, conversation: Conversation) -> None:
        submission = await conversation.submit(f"Please look after item number {self.turns:07d} of the list.")
        await submission.answer()
        self.turns += 1

    def _talking(self, kind: str, *, aborted_every: int = 0) -> Callable[[], Awaitable[None]]:
        """A conversation for so many turns, then the next; every third turn somebody looks on."""
        conversation: Conversation | None = None
        taken = 0

        async def step() -> None:
            nonlocal conversation, taken
            if conversation is None:
                conversation = await self.harness.create_conversation(
                    agent=Agent(model=f"soak:{kind}"), name=f"a {kind} one", labels={"kind": kind}
                )
            taken += 1
            if aborted_every and taken % aborted_every == 0:
                await self._abort(conversation)
            elif taken % 3 == 0:
                await self._looked_on(conversation, taken // 3 % 3)
            else:
                await self.turn(conversation)
            if taken % LIFETIME == 0:
                self.old.append(conversation.id)
                conversation = None

        return step

    async def _abort(self, conversation: Conversation) -> None:
        submission = await conversation.submit("Please begin, and be stopped.")
        await asyncio.sleep(DELTAS * DELTA_S / 2)
        await conversation.abort()
        await submission.wait()
        self.turns += 1

    async def _looked_on(self, conversation: Conversation, how: int) -> None:
        """A turn with a watch, a view or an event stream attached for as long as it takes."""
        if how == 0:
            async with conversation.watch() as watch:
                reading = asyncio.ensure_future(self._read(watch))
                await self.turn(conversation)
            await reading
        elif how == 1:
            async with conversation.view() as view:
                await self.turn(conversation)
                assert view.value.entries, "a turn shows entries"
        else:
            async with conversation.events() as events:
                await self.turn(conversation)
                await anext(aiter(events))

    async def _read(self, frames: AsyncIterator[object]) -> None:
        async for _ in frames:
            pass

    def _living_on(self) -> Callable[[], Awaitable[None]]:
        taken = 0

        async def step() -> None:
            nonlocal taken
            root = await self.harness.root()
            taken += 1
            if taken % RESET_EVERY == 0:
                await (await root.reset("Go on from here.")).wait()
            await self.turn(root)

        return step

    async def _watching_all_along(self) -> None:
        root = await self.harness.root()
        async with root.watch() as watch:
            async for frame in watch:
                assert frame.value.conversation_id == root.id

    def _finding_again(self) -> Callable[[], Awaitable[None]]:
        async def step() -> None:
            if not self.old:
                return
            conversation = await self.harness.conversation(self._random.choice(self.old))
            await conversation.info()
            assert len(await conversation.entries(limit=20, order="descending")) == 20
            await self.turn(conversation)
            await self.harness.inspect()

        return step

    def _opening_another(self) -> Callable[[], Awaitable[None]]:
        async def step() -> None:
            async with Harness.open(SqliteStorage(self._second), models=Model(), extensions=[EXTENSION]) as harness:
                root = await harness.root()
                await (await root.reset("Begin anew.")).wait()
                await self.turn(root)

        return step


def sample(soak: Soak, store: Path, begun: float) -> flat.Sample:
    gc.collect()
    times = os.times()
    wal = Path(f"{store}-wal")
    return flat.Sample(
        at=round(time.monotonic() - begun, 3),
        turns=soak.turns,
        cpu=times.user + times.system,
        rss=memory.status("VmRSS"),
        anonymous=memory.status("RssAnon"),
        open_files=memory.open_files(),
        threads=memory.threads(),
        tasks=len(asyncio.all_tasks()),
        objects=len(gc.get_objects()),
        store=store.stat().st_size,
        wal=wal.stat().st_size / 2**20 if wal.exists() else 0.0,
    )


def kinds() -> Counter[str]:
    """How many objects of each type there are."""
    return Counter(f"{type(found).__module__}.{type(found).__qualname__}" for found in gc.get_objects())


async def run(folder: Path, *, minutes: float, every: float, rate: float, log: Path | None) -> int:
    store = folder / "soak.db"
    retention = min(600.0, minutes * 60 / WARM)
    remembered = 1 + int(rate / LIFETIME * minutes * 60 / WARM / 2)
    contexts.RETENTION_S = min(contexts.RETENTION_S, retention)
    reports: Counter[str] = Counter()

    def note(report: Report) -> None:
        reports[f"{report.type}: {report.message.splitlines()[0][:100]}"] += 1

    async with Harness.open(
        SqliteStorage(store),
        models=Model(),
        extensions=[EXTENSION],
        document_retention_ms=retention * 1000,
        on_report=note,
    ) as harness:
        soak = Soak(harness, folder / "second.db", rate=rate, remembered=remembered, seed=1)
        actors = [asyncio.ensure_future(actor) for actor in soak.actors()]
        begun = time.monotonic()
        samples: list[flat.Sample] = []
        early: Counter[str] = Counter()
        try:
            while (now := time.monotonic() - begun) < minutes * 60:
                done, _ = await asyncio.wait(actors, timeout=every, return_when=asyncio.FIRST_COMPLETED)
                for actor in done:
                    actor.result()
                    raise AssertionError("an actor ended")
                samples.append(sample(soak, store, begun))
                if log is not None:
                    with log.open("a") as file:
                        file.write(json.dumps(dataclasses.asdict(samples[-1])) + "\n")
                if not early and now > minutes * 60 / 4:
                    early = kinds()
        finally:
            for actor in actors:
                actor.cancel()
            await asyncio.wait(actors)
        grown = kinds() - early
    return tell(samples, grown, reports)


def tell(samples: list[flat.Sample], grown: Counter[str], reports: Counter[str]) -> int:
    cut = flat.parts(samples)
    last = samples[-1]
    print(f"{last.turns} turns in {last.at / 60:.1f} minutes, {last.turns / last.at:.1f} a second.")
    print(f"CPU a turn, all told: {flat.cpu(cut[1]):.2f} ms in the second sixth, {flat.cpu(cut[-1]):.2f} in the last.")
    print(f"Memory by a straight line: {flat.slope(samples):+.0f} bytes a turn. Database: {last.store / 2**20:.1f} MB.")
    print(flat.table(samples))
    for text, count in reports.most_common(20):
        print(f"reported {count} times: {text}")
    failed = [found for found in flat.judge(samples) if not found.flat]
    for found in failed:
        print(f"GREW: {found.name} from {found.early:.5g} to {found.late:.5g} {found.unit}".rstrip())
    if failed:
        print("Objects that there are more of than after a quarter of the run:")
        for name, count in grown.most_common(20):
            print(f"  {count:+7d} {name}")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--every", type=float, default=10, help="seconds between two samples")
    parser.add_argument("--rate", type=float, default=10, help="turns a second")
    parser.add_argument("--log", type=Path, help="append every sample to this file, a JSON line each")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="perdure-soak-") as folder, suppress(KeyboardInterrupt):
        return asyncio.run(
            run(
                Path(folder),
                minutes=arguments.minutes,
                every=arguments.every,
                rate=arguments.rate,
                log=arguments.log,
            )
        )
    return 130


if __name__ == "__main__":
    sys.exit(main())
