"""The release assistant: ``python agent.py FOLDER``. Kill it wherever you like and start it again.

In FOLDER are its store, the project it releases (a Space) and the registry it publishes to. With ``--unplug`` it gets
SIGKILL in the middle of publishing: the registry has the release, and nobody has written down that it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from importlib.util import find_spec
from pathlib import Path

from perdure import (
    Agent,
    Extension,
    Harness,
    Limits,
    SqliteStorage,
    StdioServer,
    Subagent,
    ToolCall,
    Unanswered,
    coding_tools,
    mcp_extension,
    subagent,
    tool,
)
from perdure.spaces import LocalSpaces, durable_space
from perdure.testing import ScriptedModel, call, say

STORE = "release.db"
VERSION = "1.2.0"
RELEASE = f"Release {VERSION}."
TELL = "Tell everybody."
WRITE_NOTES = f"Write the notes of {VERSION}."
NOTES = f"# {VERSION}\n\nOrders are counted from one.\n"
WITH_ISSUES = find_spec("mcp") is not None and find_spec("jsonschema_rs") is not None
"""Whether the extra ``perdure[mcp]`` is there; without it the list of issues is not asked."""
BUDGET = Limits(turns=7 if WITH_ISSUES else 6)
"""Of everybody together: five of the assistant, two of its writer."""

MODEL = ScriptedModel(
    {
        RELEASE: [
            *([call("issues_blocking", version=VERSION)] if WITH_ISSUES else []),
            call("bash", command="./check.sh"),
            call("subagent", agent="writer", prompt=WRITE_NOTES),
            call("publish", version=VERSION),
            say(f"{VERSION} is released."),
        ],
        WRITE_NOTES: [call("write", path="NOTES.md", content=NOTES), say("The notes are in NOTES.md.")],
        TELL: say("Everybody knows."),
    }
)


def releases(registry: Path, project: Path) -> Extension:
    @tool(requires_approval=True, replay="safe")
    async def publish(version: str, call: ToolCall) -> str:
        """Publish a version, with its notes. It cannot be taken back."""
        publish_to(registry, version, (project / "NOTES.md").read_text(), key=call.idempotency_key)
        if "--unplug" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
        return f"{version} is in the registry"

    writer = Subagent("writes notes of releases", tools=["read", "write"], limits=Limits(turns=3))
    return Extension("releases", tools=[publish, subagent({"writer": writer})])


@contextlib.asynccontextmanager
async def issues() -> AsyncGenerator[list[Extension]]:
    """The tools of the MCP server, which runs as long as this process."""
    if not WITH_ISSUES:
        yield []
        return
    server = StdioServer([sys.executable, str(Path(__file__).with_name("issues.py"))])
    async with mcp_extension("issues", server, trust_hints=True) as connected:
        yield [connected.extension]


def publish_to(registry: Path, version: str, notes: str, *, key: str) -> None:
    """Stands for a service that publishes once a key, and counts what it is asked."""
    registry.mkdir(exist_ok=True)
    with (registry / "asked.log").open("a") as log:
        log.write(f"{key}\n")
    release = registry / f"{key}.json"
    if not release.exists():
        release.write_text(json.dumps({"version": version, "notes": notes}))


async def main(folder: Path) -> None:
    project = folder / "project"
    space = await LocalSpaces.at(project)
    async with (
        issues() as tracker,
        Harness.open(
            SqliteStorage(folder / STORE),
            models=MODEL,
            extensions=[coding_tools(), releases(folder / "registry", project), *tracker],
            environment=durable_space(space),
            limits=BUDGET,
        ) as harness,
    ):
        root = await harness.root(agent=Agent(tools=["issues_blocking", "bash", "subagent", "publish"]))
        released = await root.submit(RELEASE, request_id=f"release-{VERSION}")
        told = await root.submit(TELL, request_id=f"tell-{VERSION}")
        for submission in (released, told):
            try:
                print((await submission.answer()).text)
            except Unanswered as unanswered:
                print(f"{unanswered.reason}: {unanswered.detail}")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
