"""Tools of a campaign's work beside the package's own: what nobody can adopt has to be undone and run again."""

from __future__ import annotations

from perdure.harness.environment import ExecutionEnvironment
from perdure.harness.registry import Extension
from perdure.harness.tool import tool
from perdure.testing.campaign.script import MANY_DONE, NOTE_DONE, wait_for_gate


@tool(effects="space", sequential=True)
async def many(step: int, environment: ExecutionEnvironment) -> str:
    """Several commands, the second of which waits for its gate, and a file request between them."""
    await environment.exec(f"echo 'step {step} begins' >> log.txt")
    await environment.exec(f"echo 'step {step} goes on' >> log.txt; {wait_for_gate(step)}")
    await environment.write_file(f"many-{step}.txt", f"many {step}\n".encode())
    await environment.exec(f"echo 'step {step}' >> log.txt")
    return MANY_DONE.format(step=step)


@tool(effects="space", sequential=True)
async def note(step: int, environment: ExecutionEnvironment) -> str:
    """A line more in a file, by file requests that cannot be made twice."""
    before = b"" if await environment.stat("notes.txt") is None else await environment.read_file("notes.txt")
    await environment.write_file("draft.txt", before + f"step {step}\n".encode())
    await environment.write_file("notes.txt", await environment.read_file("draft.txt"))
    await environment.remove("draft.txt")
    return NOTE_DONE.format(step=step)


def campaign_tools() -> Extension:
    return Extension("campaign", tools=[many, note])
