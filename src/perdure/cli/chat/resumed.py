"""What is said when a chat goes on where another process stopped: what was cut off, what waits, what else runs on."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.cli.chat.scene import Scene
from perdure.cli.chat.story import Story
from perdure.cli.deferred import deferred_line
from perdure.cli.entries import Call, heading, running_lines
from perdure.cli.inspect import HolderLine
from perdure.cli.style import Line, line
from perdure.cli.text import one_line, shortened
from perdure.harness.documents import Agent, LiveTool
from perdure.harness.registry import Registry
from perdure.spaces.documents import SpaceState
from perdure.tasks.inspect import LiveTask

BEGUN = 200
"""Characters of a broken-off answer that are quoted."""


def resumed(
    scene: Scene,
    story: Story,
    *,
    conversation: int,
    killed: HolderLine | None,
    opened_at: int,
    registry: Registry,
    agent: Agent,
    tasks: Sequence[LiveTask],
    space: SpaceState | None = None,
) -> list[Line]:
    """Nothing, if the conversation was at rest, or its run has begun since the store was opened.

    ``killed``: who had the store before, and ended without closing it. ``space``: of the Space the conversation works
    in, as it was then.
    """
    lines: list[Line] = []
    if scene.run is not None and scene.run["started_at"] < opened_at:
        who = f"Process {killed.pid} was killed" if killed is not None else "The last chat was left"
        lines += [(), line(f"{who} in the middle of a run. It goes on from what is stored.", "bold")]
        lines += _cut_off(scene)
        lines += _recovered(scene.run["started_at"], space)
        for task, tool in scene.tools.items():
            call = story.call_of(int(task), tool)
            lines.append(heading(call))
            lines += _call(tool, call, registry, agent, in_space=space is not None)
    queue = story.queue_lines()
    if queue and not scene.busy:
        lines += [(), line("This waits from before; the next input starts it.", "bold")]
    return [*lines, *queue, *_elsewhere(conversation, tasks)]


def _cut_off(scene: Scene) -> list[Line]:
    if scene.message is not None:
        texts = [part["text"] for part in scene.message["content"] if part["type"] == "text"]
        said = one_line(" ".join("".join(texts).split()))
        begun = f", after “{shortened(said, BEGUN)}”" if said else ""
        return [line(f"  The answer was cut off{begun}. It is asked for again.", "warning")]
    if scene.retry is not None:
        return [line(f"  The request had failed ({one_line(scene.retry['code'])}). It is sent again.", "warning")]
    if scene.deferred is not None:
        return [line(f"  {deferred_line(scene.deferred)}", "warning")]
    if not scene.tools:
        return [line("  The answer had not begun. It is asked for again.", "warning")]
    return []


def _recovered(since: int, space: SpaceState | None) -> list[Line]:
    """What was cut off before in this run, and went on."""
    lines: list[Line] = []
    for note in () if space is None else space.recoveries:
        if note["at"] >= since:
            what = "its Space" if note["call"] is None else f"call {note['call']}"
            lines.append(line(f"  ↻ {what}: {note['kind']}, {one_line(note['why'])}", "dim"))
    return lines


def _call(tool: LiveTool, call: Call, registry: Registry, agent: Agent, *, in_space: bool) -> list[Line]:
    if tool["state"] == "waiting":
        return [line("  had not begun; it runs now", "warning")]
    if tool["state"] == "approval" or tool.get("questions"):
        return running_lines(tool)
    lines = running_lines(tool)
    known = registry.find_tool(agent, tool["name"], by="tool" if "caller" in tool else "model")
    if in_space and known is not None and (known.adoptable or known.effects_of(call.arguments) == "space"):
        what = "its command goes on there, or is undone" if known.adoptable else "it is undone and runs again"
        return [*lines, line(f"  was running in its Space: {what}", "warning")]
    if known is not None and known.reconciles:
        return [*lines, line("  was running; its tool asks outside what became of it", "warning")]
    if known is not None and known.replay == "safe":
        return [*lines, line("  was running; it is safe to repeat and runs again", "warning")]
    return [*lines, line("  was running, with the output above until then; it may have had its effect", "warning")]


def _elsewhere(conversation: int, tasks: Sequence[LiveTask]) -> list[Line]:
    """What the scheduler goes on with beside this conversation."""
    others = sorted({task.conversation_id for task in tasks} - {conversation})
    if not others:
        return []
    names = ", ".join(str(id) for id in others[:10]) + (", …" if len(others) > 10 else "")
    what = f"conversation {names}" if len(others) == 1 else f"conversations {names}"
    return [line(f"· Work of {what} goes on as well.", "dim")]
