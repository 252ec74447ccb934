"""``ask_user``: the model asks the user, and waits for the answer (rule H332)."""

from __future__ import annotations

from typing import Any, Final, Literal

from perdure.harness.handle import ToolCall
from perdure.harness.tool import ToolError, tool

MOST_CHOICES: Final = 50


@tool(replay="safe")
async def ask_user(question: str, call: ToolCall, choices: list[str] | None = None) -> str:
    """Ask the user a question and wait for the answer. Ask only what you cannot find out yourself.

    Args:
        question: What you want to know, in full: the user may see nothing else.
        choices: The possible answers, if there are only these.
    """
    if not choices:
        return await call.ask(question)
    if len(choices) > MOST_CHOICES:
        raise ToolError(f"there are {len(choices)} choices; give at most {MOST_CHOICES}")
    one_of: Any = Literal[tuple(choices)]  # pyright: ignore[reportInvalidTypeForm]  # known here only
    return str(await call.ask(question, one_of))
