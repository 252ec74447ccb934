"""Model adapters for the tests of the chat, found by their entry points like any other.

Before each event of a stream the model asks the test, over the socket named by ``CHAT_GATES``, whether it may go on:
``<what the user said>/<number of the event>``. What it answers follows from what was said.
"""

from __future__ import annotations

import asyncio
import os
from decimal import Decimal

from perdure.harness.messages import ToolResultMessage, Usage, UserMessage
from perdure.harness.model import ModelRequest
from perdure.kernel.errors import PerdureError
from perdure.testing.model import Reply, ScriptedModel, call, calls, fail, say

LONG = "".join(f"This is sentence number {number} of a long answer. " for number in range(1, 13))
SECRET = "sk-it-must-not-be-shown-0123456789"


def said(request: ModelRequest) -> list[str]:
    return [message.text for message in request.messages if isinstance(message, UserMessage)]


def script(request: ModelRequest) -> Reply:
    texts = said(request)
    last = request.messages[-1]
    if isinstance(last, ToolResultMessage) and last.name == "ask_user":
        answers = [message.text for message in request.messages if isinstance(message, ToolResultMessage)]
        return say(f"You answered: {' | '.join(answers)[:200]}.")
    if isinstance(last, ToolResultMessage):
        return say(f"{last.name} {'failed' if last.is_error else 'ended'}.")
    verb, _, rest = texts[-1].partition(" ")
    match verb:
        case "long":
            return say(LONG, chunk=16)
        case "think":
            return say("Therefore yes.", thinking="First this, then that.")
        case "run":
            return call("bash", command=rest)
        case "both":
            return calls(call("bash", command="echo one"), call("bash", command="echo two"))
        case "write":
            return call("write", path="notes.txt", content="one\ntwo\nthree\n")
        case "edit":
            return call("edit", path="notes.txt", edits=[{"old_text": "two", "new_text": "zwei"}])
        case "read":
            return call("read", path="notes.txt")
        case "ask":
            return call("ask_user", question=rest)
        case "choose":
            return call("ask_user", question="Which one?", choices=[*rest.split(",")])
        case "twice":
            return calls(call("ask_user", question="The first?"), call("ask_user", question="The second?"))
        case "shout":
            return call("ask_user", question="x" * 10_001)
        case "hostile":
            return call("ask_user", question="red \x1b[31mtext\x1b]0;owned\x07 \u202e\n" + "line\n" * 1_000)
        case "fail":
            return fail("authentication", f"the key {SECRET} is not one")
        case "leak":
            return say(f"I saw {SECRET} there.")
        case "escape":
            return say("red \x1b[31mtext\x1b[0m and a title \x1b]0;owned\x07 and \u202eturned")
        case "retry":
            return fail("overloaded", "come again", times=1, then=say("Now it went."))
        case "markers":
            return say(" | ".join(texts))
        case _:
            return say(f"You said: {texts[-1]}")


async def pace(request: ModelRequest, number: int) -> None:
    path = os.environ.get("CHAT_GATES")
    if path is None:
        return
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        given = 0 if not isinstance(request.messages[-1], ToolResultMessage) else 1
        writer.write(f"{said(request)[-1]}/{number + 100 * given}\n".encode())
        await writer.drain()
        await reader.readline()
    finally:
        writer.close()


def price(model: str, usage: Usage, /, *, at: int) -> Decimal | None:
    return Decimal(usage.output) / 100 if model == "fake:priced" else None


def models(default: str) -> ScriptedModel:
    return ScriptedModel(script, provider="fake", name=default.partition(":")[2], pace=pace, price=price)


def keyless(default: str) -> ScriptedModel:
    raise PerdureError("KEYLESS_API_KEY is not set")
