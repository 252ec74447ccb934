"""``--model scripted``: no key, no network. It says what it is told, and runs what it is asked to run."""

from __future__ import annotations

from typing import Final

from perdure.harness.messages import SystemMessage, ToolResultMessage, UserMessage
from perdure.harness.model import ModelRequest
from perdure.testing.model import Reply, ScriptedModel, call, say

SCRIPTED: Final = "scripted:echo"


def script(request: ModelRequest) -> Reply:
    """``run COMMAND`` calls bash with the command and says how it ended; anything else is said back."""
    # What the prompt says anew may stand behind what was said.
    last = next((message for message in reversed(request.messages) if not isinstance(message, SystemMessage)), None)
    if isinstance(last, ToolResultMessage):
        return say(f"It ended with: {last.text.rstrip().rpartition(chr(10))[2]}")
    said = last.text if isinstance(last, UserMessage) else ""
    verb, _, rest = said.partition(" ")
    if verb == "run" and rest.strip():
        return call("bash", command=rest.strip())
    return say(said or "…")


def scripted_model(_default: str) -> ScriptedModel:
    provider, _, name = SCRIPTED.partition(":")
    return ScriptedModel(script, provider=provider, name=name)
