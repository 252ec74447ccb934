"""The coding tools do and say the same in a Space and in a directory of this machine (rule H370)."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from space_kit import advanced, daemon

from perdure.harness.environment import ExecutionEnvironment
from perdure.harness.tool import AnyTool, ToolCall, ToolError
from perdure.kernel.json import JsonValue
from perdure.spaces.environment import SpaceEnvironment
from perdure.spaces.outputs import Outputs
from perdure.tools.coding import CODING_TOOLS
from perdure.tools.local import LocalEnvironment

TOOLS: Mapping[str, AnyTool] = {tool.name: tool for tool in CODING_TOOLS}
Both = tuple[LocalEnvironment, SpaceEnvironment]

PATHS = [
    "text", "text/", "text/x", "text/../text", "none", "none/x", "none/", "d", "d/", "d/.", "", ".", "..", "../x", "/",
    "/etc/passwd", "pipe", "pipe/x", "link", "link/", "dlink", "dlink/", "dlink/../text", "dangling", "far", "out",
    "up", "up/x", "loop", "x\0y", "n" * 256, "n/" * 2100, "line\nend", "-dash", "empty", "latin", "binary", "d/../text",
]  # fmt: skip


def grow(root: Path) -> None:
    (root / "text").write_text("one\r\ntwo\r\nthree")
    (root / "empty").touch()
    (root / "latin").write_bytes(b"caf\xe9 one\ntwo\n")
    (root / "binary").write_bytes(b"\x7fELF\0one")
    (root / "line\nend").write_text("one\n")
    (root / "-dash").write_text("one\n")
    (root / "d").mkdir()
    (root / "d" / "x.py").write_text("one = 1\n")
    (root / "d" / "y.ts").write_text("one\n" * 3)
    os.mkfifo(root / "pipe")
    links = {
        "link": "text", "dlink": "d", "dangling": "missing", "far": "missing/there", "out": "/etc/passwd", "up": "..",
        "loop": "loop",
    }  # fmt: skip
    for name, target in links.items():
        (root / name).symlink_to(target)
    for name, mode in (("run", 0o755), ("suid", 0o4755), ("secret", 0o600)):
        (root / name).write_text("one\n")
        (root / name).chmod(mode)
    (root / "owned").write_text("one\n")
    if os.geteuid() == 0:
        os.chown(root / "owned", 1234, 2345)


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[Both]:
    here = tmp_path / "workspace"
    here.mkdir()
    grow(here)
    async with daemon() as made, advanced(made) as client:
        grow(made.workspace)
        there = SpaceEnvironment(client, call=1, attempt=1, nonce="n1", outputs=Outputs("alike", tmp_path / "there"))
        yield LocalEnvironment(here, output_dir=tmp_path / "here", grace_ms=200), there


async def said(env: ExecutionEnvironment, name: str, arguments: JsonValue) -> str:
    tool = TOOLS[name]
    given = tool.signature.values(arguments)
    call = ToolCall(name=name)
    try:
        call.intent = await tool.prepare_intent(given, call, env)
        result = tool.to_result(await tool.run(given, call, env))
    except ToolError as error:
        text = f"refused: {error}"
    else:
        text = f"{'failed' if result.is_error else 'done'}: {result.content}"
    return re.sub(r"\S*/output-[0-9a-f]{16}\.log", "OUTPUT", text.replace(env.cwd, "WORKSPACE"))


async def alike(both: Both, name: str, **arguments: JsonValue) -> str:
    """What both say."""
    here, there = [await said(env, name, {**arguments}) for env in both]
    assert there == here, (name, arguments)
    return here


def seen(root: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in Path(root).rglob("*"):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path.relative_to(root))] = status.st_mode, status.st_uid, status.st_gid, content
    return found


async def test_every_path_is_taken_alike_h370(both: Both) -> None:
    for path in PATHS:
        await alike(both, "read", path=path)
        await alike(both, "ls", path=path)
        await alike(both, "find", path=path)
        await alike(both, "grep", path=path, pattern="one")
        await alike(both, "edit", path=path, edits=[{"old_text": "two", "new_text": "zwei"}])
        await alike(both, "write", path=path, content="one\n")
        assert seen(both[0].cwd) == seen(both[1].cwd), path
    assert await alike(both, "read", path="n/" * 2100) == (
        f"refused: {'n/' * 50!r}: a path of 4200 bytes is longer than the 4096 a path can have"
    )


async def test_a_write_that_is_refused_makes_no_directory_h370(both: Both) -> None:
    """Nor does a link to where nothing is."""
    before = seen(both[0].cwd)
    for path in ("new/", "new/.", "far", "text/new/x"):
        assert (await alike(both, "write", path=path, content="x")).startswith("refused"), path
    assert seen(both[0].cwd) == seen(both[1].cwd) == before
    assert (await alike(both, "write", path="dlink/new/deep", content="x")).startswith("done")
    assert seen(both[0].cwd)["d/new/deep"] == seen(both[1].cwd)["d/new/deep"]


async def test_a_file_that_is_replaced_keeps_its_mode_and_owner_but_not_the_right_to_be_another_h370(
    both: Both,
) -> None:
    for path in ("run", "suid", "secret", "owned"):
        await alike(both, "write", path=path, content="two\n")
        await alike(both, "edit", path=path, edits=[{"old_text": "two", "new_text": "three"}])
    found = seen(both[0].cwd)
    assert seen(both[1].cwd) == found
    assert [oct(os.stat(f"{both[1].cwd}/{path}").st_mode & 0o7777) for path in ("run", "suid", "secret")] == [
        "0o755", "0o755", "0o600",
    ]  # fmt: skip
    if os.geteuid() == 0:
        assert os.stat(f"{both[1].cwd}/owned").st_uid == 1234


PATTERNS = [
    "(", "[", "*a", "a{99999999999}", "(?P=x)", "\0", "", "one$", "é", "*.py", "d/**", "**", "{", "*.{py,ts}",
    "{a,b}" * 9, "\\",
]  # fmt: skip


@pytest.mark.parametrize("name", ["pattern", "glob"])
async def test_patterns_are_taken_and_refused_alike_h370(both: Both, name: str) -> None:
    for pattern in PATTERNS:
        if name == "glob":
            await alike(both, "find", pattern=pattern)
        await alike(both, "grep", **{"pattern": "one", name: pattern})
    assert await alike(both, "grep", pattern="(") == (
        "refused: .: pattern: missing ), unterminated subpattern at position 0"
    )


COMMANDS = [
    "echo out; echo err >&2", "exit 3", "kill -9 $$", "cat", "cd d; ls", "", " ", "\0", "x" * 130_001, "seq 30000",
    "printf 'a\\xff\\n'", "true", "head -c 70000 /dev/zero | tr '\\0' x", "exec >&- 2>&-; exit 4", "umask",
]  # fmt: skip


async def test_commands_end_and_are_refused_alike_h370(both: Both) -> None:
    for command in COMMANDS:
        await alike(both, "bash", command=command)
    for timeout in (0, -1, 86_401):
        await alike(both, "bash", command="true", timeout=timeout)
    assert await alike(both, "bash", command="trap '' TERM; echo hi; exec sleep 30", timeout=3) == (
        "failed: hi\n[Timed out after 3 seconds; the command was stopped.]"
    )
    for command in ("", "\0", "x" * 130_001):
        assert (await alike(both, "bash", command=command, background=True)).startswith("refused")
    for id in ("nope", "../../x", "1" * 100):
        await alike(both, "bash_output", id=id)
        await alike(both, "bash_stop", id=id)
    assert await alike(both, "bash_output") == "done: [None.]"
