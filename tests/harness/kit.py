"""What tests of the harness share: opening one, holding a model's stream, looking at commits, killing a process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from perdure.harness.conversation import Conversation
from perdure.harness.documents import Inbox, Live
from perdure.harness.harness import Harness
from perdure.harness.messages import Message, decode_messages
from perdure.harness.model import ModelRequest, Models
from perdure.harness.registry import Extension
from perdure.harness.tool import AnyTool
from perdure.kernel.entries import Entry
from perdure.kernel.json import JsonValue
from perdure.kernel.reports import Report
from perdure.kernel.session import Settled
from perdure.storage.memory import MemoryStorage

TURNS = 60


async def rest() -> None:
    """Let all that was set in motion come to rest, as far as nothing holds it."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


class Hold:
    """A pace that holds the model's streams before chosen events until released."""

    def __init__(self, *events: int) -> None:
        self.events = events or (0,)
        self._open = asyncio.Event()
        self.reached = asyncio.Event()

    async def __call__(self, request: ModelRequest, event: int) -> None:
        if event in self.events and not self._open.is_set():
            self.reached.set()
            await self._open.wait()

    def release(self) -> None:
        self._open.set()


class Commits:
    """What settled, commit by commit."""

    def __init__(self, harness: Harness) -> None:
        self.all: list[Settled] = []
        harness.session.observe(self.all.append)

    @property
    def durable(self) -> list[Settled]:
        return [settled for settled in self.all if not settled.batch.progress]

    def clear(self) -> None:
        self.all.clear()


class Note(Entry, kind="app.note"):
    """A write the model reads."""

    text: str

    def messages(self) -> Sequence[JsonValue]:
        return [{"role": "user", "content": [{"type": "text", "text": self.text}]}]


class Audit(Entry, kind="app.audit"):
    """A write for people only."""

    n: int = 0


Reports = list[Report]


@asynccontextmanager
async def opened(
    model: Models | None = None,
    *,
    storage: MemoryStorage | None = None,
    tools: tuple[AnyTool, ...] = (),
    reports: Reports | None = None,
    **options,
) -> AsyncIterator[Harness]:
    extensions = [*options.pop("extensions", ())]
    if tools:
        extensions.append(Extension("tools", tools=list(tools)))
    seen = reports if reports is not None else []
    async with Harness.open(
        storage if storage is not None else MemoryStorage(),
        models=model,
        extensions=extensions,
        on_report=seen.append,
        line_bound_ms=60_000,  # that is how busy the machine is
        **options,
    ) as harness:
        yield harness
    if reports is None:
        assert not [report for report in seen if report.type not in ("task_blocked",)], seen


async def kinds(conversation: Conversation) -> list[str]:
    return [entry.kind for entry in await conversation.entries(limit=1000)]


def words(message: Message) -> str:
    return getattr(message, "text", "")


async def transcript(conversation: Conversation) -> list[str]:
    """Every entry as its kind and the words of its messages."""
    lines: list[str] = []
    for entry in await conversation.entries(limit=1000):
        said = " ".join(words(m) for m in decode_messages(entry.raw_messages))
        lines.append(f"{entry.kind.removeprefix('pi.')} {said}".strip())
    return lines


async def live(conversation: Conversation) -> Live:
    return await conversation._harness.session.snapshot(Live, conversation=conversation.id) or Live()


async def queue(conversation: Conversation) -> list[int]:
    inbox = await conversation._harness.session.snapshot(Inbox, conversation=conversation.id)
    return [item["id"] for item in inbox.items] if inbox else []


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")
