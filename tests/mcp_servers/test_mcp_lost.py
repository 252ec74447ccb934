"""A server, or its host, that dies under a call: what is asked again, what is not, and that nothing is left alive."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mcp_kit import HERE, PATIENCE_S, alive, harness_with, live, log, odd, result_of, results, until, wares

from perdure import mcp_extension
from perdure.harness.results import INTERRUPTED
from perdure.testing.model import call, say
from perdure.tools.mcp import keeper as keeping

pytestmark = pytest.mark.timeout(120)


def pid(folder: Path) -> int:
    return int((folder / "pid").read_text())


async def test_an_unsafe_call_whose_server_dies_is_interrupted_and_never_made_twice_h387(tmp_path: Path) -> None:
    async with mcp_extension("w", wares(tmp_path)) as server:
        lost = await result_of(server.extension, "w_order", item="tea")
        assert lost.is_error
        assert lost.code == "interrupted"
        assert lost.text.startswith(INTERRUPTED)
        assert "its process ended with code -9" in lost.text
        assert log(tmp_path) == ["order tea"]
        # It is there again, and the model may decide.
        again = await result_of(server.extension, "w_order", item="tea")
        assert again.text == "tea is ordered"


async def test_a_safe_call_whose_server_dies_is_asked_again_h387(tmp_path: Path) -> None:
    async with mcp_extension("w", wares(tmp_path), replay={"look": "safe", "*": "unsafe"}) as server:
        found = await result_of(server.extension, "w_look", item="cup")
        assert (found.text, found.is_error) == ("cup was found at look 3", False)
        assert log(tmp_path) == ["look cup"] * 3


async def test_a_safe_call_that_is_always_cut_off_ends_interrupted_h387(tmp_path: Path) -> None:
    async with mcp_extension("w", wares(tmp_path), replay="safe") as server:
        lost = await result_of(server.extension, "w_doomed")
        assert lost.code == "interrupted"
        assert "it was asked 3 times" in lost.text
        assert log(tmp_path) == ["doomed"] * 3


@pytest.mark.parametrize("replay", ["safe", "unsafe"])
async def test_a_server_that_is_killed_from_outside_under_a_call_h387(tmp_path: Path, replay) -> None:
    async with (
        mcp_extension("w", wares(tmp_path), replay={"wait": replay}) as server,
        harness_with(server.extension, call("w_wait", name="a"), say("Done.")) as harness,
    ):
        submission = await (await harness.root()).submit("Go.")
        await until(lambda: log(tmp_path) == ["wait a"])
        async with asyncio.timeout(PATIENCE_S):
            while not any(tool["output"] for tool in (await live(await harness.root())).tools.values()):
                await asyncio.sleep(0.005)
        (tmp_path / "go").touch()
        os.kill(pid(tmp_path), signal.SIGKILL)
        await submission.answer()
        (result,) = await results(harness)
        if replay == "safe":
            assert result.text == "waited 2 times"
        else:
            assert result.code == "interrupted"
            assert result.text.endswith("Output until then:\nhalf of it\n")
            assert log(tmp_path) == ["wait a"]


async def test_hints_of_a_server_are_trusted_only_where_the_host_says_so_h385(tmp_path: Path) -> None:
    async with mcp_extension("w", wares(tmp_path)) as server:
        policies = {tool.name: tool.replay for tool in server.extension.tools}
        assert (policies["w_look"], policies["w_order"], policies["w_read_resource"]) == ("unsafe", "unsafe", "safe")
    async with mcp_extension("w", wares(tmp_path), trust_hints=True, replay={"read_resource": "unsafe"}) as server:
        policies = {tool.name: tool.replay for tool in server.extension.tools}
        assert (policies["w_look"], policies["w_order"], policies["w_read_resource"]) == ("safe", "unsafe", "unsafe")
    async with mcp_extension("w", wares(tmp_path), trust_hints=True, replay={"look": "unsafe"}) as server:
        policies = {tool.name: tool.replay for tool in server.extension.tools}
        assert policies["w_look"] == "unsafe"


@pytest.mark.parametrize(("replay", "made"), [("safe", 2), ("unsafe", 1)])
async def test_a_host_that_is_killed_under_a_call_goes_on_by_the_stored_policy_h91(
    tmp_path: Path, replay: str, made: int
) -> None:
    def host() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(HERE / "host.py"), str(tmp_path), "w_wait", replay], stdout=subprocess.PIPE, text=True
        )

    first = await asyncio.to_thread(host)
    await until(lambda: log(tmp_path) == ["wait a"])
    child = pid(tmp_path)
    first.kill()
    await asyncio.to_thread(first.communicate)
    await until(lambda: not alive(child))
    (tmp_path / "go").touch()
    second = await asyncio.to_thread(host)
    said, _ = await asyncio.to_thread(second.communicate)
    assert second.returncode == 0
    assert said.startswith("None: waited 2 times" if replay == "safe" else f"interrupted: {INTERRUPTED}")
    assert [line for line in log(tmp_path) if line == "wait a"] == ["wait a"] * made
    second_child = pid(tmp_path)
    await until(lambda: not alive(second_child))


DEAF = """
import signal, subprocess
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
below = subprocess.Popen(["sleep", "600"])
print(os.getpid(), below.pid, file=open(FOLDER + "/pids", "w"), flush=True)
os.rename(FOLDER + "/pids", FOLDER + "/told")
def read_or_stay():
    line = sys.stdin.readline()
    while not line: time.sleep(1)
    return json.loads(line)
read = read_or_stay
serve([])
"""


async def test_a_server_that_will_not_end_ends_with_what_it_started_h391(tmp_path: Path) -> None:
    async with mcp_extension("deaf", odd(f"FOLDER = {str(tmp_path)!r}\n{DEAF}")):
        pids = [int(word) for word in (tmp_path / "told").read_text().split()]
        assert all(map(alive, pids))
    await until(lambda: not any(map(alive, pids)))


async def test_a_server_that_will_not_end_ends_with_a_host_that_was_killed_h391(tmp_path: Path) -> None:
    program = f"""
import asyncio
from mcp_kit import odd
from perdure import mcp_extension
async def main():
    async with mcp_extension("deaf", odd({f"FOLDER = {str(tmp_path)!r}{chr(10)}{DEAF}"!r})):
        print("up", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    host = await asyncio.to_thread(
        subprocess.Popen,
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(HERE)])},
    )
    assert host.stdout is not None
    assert await asyncio.to_thread(host.stdout.readline) == b"up\n"
    pids = [int(word) for word in (tmp_path / "told").read_text().split()]
    host.kill()
    await asyncio.to_thread(host.communicate)
    await until(lambda: not any(map(alive, pids)))


async def test_a_server_that_dies_again_and_again_is_given_up_until_a_call_wants_it_h386(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "FIRST_WAIT_S", 0.001)
    tool = {"name": "ask", "inputSchema": {"type": "object"}}
    starts = tmp_path / "starts"
    text = f"""
print("x", file=open({str(starts)!r}, "a"), flush=True)
if os.path.exists({str(tmp_path / "dead")!r}): sys.exit(3)
serve([{tool}], lambda id, params: answer(id, {{"content": [{{"type": "text", "text": "here"}}]}}))
"""
    async with mcp_extension("odd", odd(text)) as server:
        assert (await result_of(server.extension, "odd_ask")).text == "here"
        (tmp_path / "dead").touch()
        before = len(starts.read_text().split())
        connection = await server._keeper.connection()
        connection.loss.tell("the test says so")
        await until(lambda: server._keeper.given_up)
        given_up = len(starts.read_text().split())
        assert given_up - before == keeping.MOST_FAILURES - 1
        assert server.problems == ("it is not connected: its process ended with code 3",)
        down = await result_of(server.extension, "odd_ask")
        assert down.code == "tool_unavailable"
        assert "its process ended with code 3. Nothing was done." in down.text
        assert len(starts.read_text().split()) == given_up + 1
        (tmp_path / "dead").unlink()
        assert (await result_of(server.extension, "odd_ask")).text == "here"
