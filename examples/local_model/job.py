"""The demo's work, cut into steps that a very small model can do.

Which tool a step takes is the plan's, as any host may decide with ``tool_choice``; the server holds what the model
writes to the tool's schema. What stands in a call, and in an answer, is the model's own.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from perdure import Extension, ToolCall, tool
from perdure.cli.demo.agent import stand
from perdure.cli.demo.project import FIXED, TO_ORDER
from perdure.harness.messages import Message, ToolResultMessage, UserMessage
from perdure.harness.model import ModelEvent, ModelInfo, ModelRequest
from perdure.models import Endpoint, ProviderModels

MODEL: Final = "local:SmolLM2-135M-Instruct"
WINDOW: Final = 4096
MOST_TOKENS: Final = 96
"""Of one answer. Enough for every call; words are cut off there, and so is a model that does not stop."""
STREAMED: Final = 4
"""The event of each call at which it may be killed in streaming."""
EFFECTS: Final = "effects.jsonl"
"""What really happened outside, a line for each time that a tool which must not be repeated ran."""
INSTRUCTIONS: Final = "You work on a small project. Use exactly the names and numbers of the user."

TESTS: Final = "python3 -B -m unittest -q"
LISTING: Final = "python3 -B stock.py"
BUG: Final = "have - want"
REPORT: Final = ", ".join(f"{count} {item}s" for item, count in TO_ORDER)


@dataclass(frozen=True)
class Job:
    """One submission. ``asked``: what its call says if the model gets it right."""

    request_id: str
    text: str
    tool: str | None = None
    asked: Mapping[str, Any] = field(default_factory=dict[str, Any])


JOBS: Final = (
    Job("read", "Read the file stock.py.", "read", {"path": "stock.py"}),
    Job("test", f"Run {TESTS}", "run", {"command": TESTS}),
    Job(
        "fix",
        f"In stock.py, replace the text {BUG} with the text {FIXED}.",
        "edit",
        {"path": "stock.py", "old_text": BUG, "new_text": FIXED},
    ),
    Job("test-again", f"Run {TESTS} again.", "run", {"command": TESTS}),
    Job("list", f"Run {LISTING}", "run", {"command": LISTING}),
    Job("report", f"Write this text into REPORT.md: {REPORT}", "write", {"path": "REPORT.md", "content": REPORT}),
    *(
        Job(f"order-{item}", f"Order {item}, count {count}.", "order", {"item": item, "count": count})
        for item, count in TO_ORDER
    ),
    Job("say", "What did you do today? Say it in one sentence."),
)
BY_TEXT: Final = {job.text: job for job in JOBS}
UNSAFE: Final = frozenset({"run", "order"})


def next_tool(messages: Sequence[Message]) -> str | None:
    """The tool to call now; None: answer in words. A pure function of the transcript, so no kill can derail it.

    An order that was interrupted may be out: look into the book first, and order again only what is not there.
    """
    at = max(index for index, message in enumerate(messages) if isinstance(message, UserMessage))
    asked = messages[at]
    assert isinstance(asked, UserMessage), "the index points at one"
    job = BY_TEXT[asked.text]
    results = [message for message in messages[at + 1 :] if isinstance(message, ToolResultMessage)]
    if not results:
        return job.tool
    last = results[-1]
    if last.name == "orders":
        return None if f'"{job.asked["item"]}"' in last.text else job.tool
    if last.code == "interrupted":
        return "orders" if job.tool == "order" else job.tool
    return None


class Guided:
    """The model at the server, told by the plan which tool to call."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self._by_tool: dict[str | None, ProviderModels] = {}

    @property
    def default(self) -> str:
        return MODEL

    def find(self, model: str) -> ModelInfo | None:
        return self._asking(None).find(model)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        tool = next_tool(request.messages)
        async with aclosing(self._asking(tool).stream(request)) as events:
            number = 0
            async for event in events:
                yield event
                number += 1
                if number == STREAMED:
                    stand("streaming", tool=tool or "words")

    def _asking(self, tool: str | None) -> ProviderModels:
        if tool not in self._by_tool:
            provider, _, name = MODEL.partition(":")
            settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": MOST_TOKENS}
            if tool is not None:
                settings["extra_body"] = {"tool_choice": {"type": "function", "function": {"name": tool}}}
            endpoint = Endpoint(name=provider, protocol="openai-chat", base_url=self._base_url, settings=settings)
            known = ModelInfo(provider=provider, name=name, context_window=WINDOW, max_output=MOST_TOKENS)
            self._by_tool[tool] = ProviderModels(MODEL, endpoints=[endpoint], catalogue=[known])
        return self._by_tool[tool]


def tools(folder: Path) -> Extension:
    project, effects = folder / "project", folder / EFFECTS

    def happened(call: ToolCall, **what: object) -> None:
        with effects.open("a") as file:
            file.write(msgspec.json.encode({"call": call.id, "tool": call.name, **what}).decode() + "\n")

    @tool(replay="safe")
    async def read(path: Literal["stock.py", "test_stock.py", "stock.csv"]) -> str:
        """Read a file."""
        return (project / path).read_text()

    @tool(replay="safe")
    async def edit(
        path: Literal["stock.py"],
        old_text: Literal["have < want", "have - want", "want - have"],
        new_text: Literal["have > want", "have - want", "want - have"],
    ) -> str:
        """Replace a text in a file."""
        text = (project / path).read_text()
        (project / path).write_text(text.replace(old_text, new_text, 1))
        return "replaced" if old_text in text else "it is not there"

    @tool(replay="safe")
    async def write(path: Literal["REPORT.md"], content: str) -> str:
        """Write a file."""
        (project / path).write_text(content)
        stand("in_write", path=path)
        return "written"

    @tool(replay="unsafe", sequential=True)
    async def run(command: Literal["python3 -B -m unittest -q", "python3 -B stock.py"], call: ToolCall) -> str:
        """Run a command."""
        happened(call, command=command)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command.split()[1:],
            cwd=project,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await process.communicate()
        stand("in_run", tool=command)
        return f"exit code {process.returncode}\n{out.decode(errors='replace')[-300:]}"

    @tool(replay="unsafe", sequential=True)
    async def order(item: Literal["bolt", "washer", "hinge"], count: int, call: ToolCall) -> str:
        """Order from the supplier. Ordering twice delivers twice."""
        happened(call, item=item, count=count)
        stand("in_order", tool=item)
        return f"ordered {count} x {item}"

    @tool(replay="safe")
    async def orders() -> str:
        """The supplier's book: what was ordered so far."""
        lines = effects.read_text().splitlines() if effects.exists() else []
        return "\n".join(line for line in lines if '"tool":"order"' in line)

    return Extension("work", tools=[read, edit, write, run, order, orders])
