"""The client against servers that answer wrongly, late, or not at all (rules S101 to S104)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from space_kit import TOKEN, key

from perdure.spaces.client import SpaceClient
from perdure.spaces.errors import (
    NobodyListens,
    SpaceBusy,
    SpaceConnectionLost,
    SpaceFault,
    SpaceProcessesRemain,
    SpaceRefused,
    SpaceUnavailable,
)
from perdure.spaces.link import ClientLimits
from perdure.spaces.provider import SpaceAddress

QUICK = ClientLimits(waits=2, controls=2, connect_s=0.05, quick_s=0.2, slow_s=0.2)
STATUS = {
    "protocol": 1, "space": "test", "generation": 1, "boot": "b", "instance": "i", "pid": 1, "python": "3.9.0",
    "workspace": "/w", "containment": "none", "testing": False, "fence": None, "advanced": False, "floor": None,
    "image": None, "restoring": False, "commands": [], "living": 0,
    "limits": {
        "header_bytes": 1, "body_bytes": 1, "wait_ms": 1, "connections": 1, "keys": 1, "running": 1, "page": 1,
        "inline_bytes": 1, "chunk_bytes": 1,
    },
}  # fmt: skip
ADVANCED = {"boot": "b", "generation": 1, "instance": "i", "image": None, "floor": None, "killed": 0, "commands": []}

Answer = Callable[[dict, asyncio.StreamWriter], Awaitable[None]]


def frame(header: object, body: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("!II", len(raw), len(body)) + raw + body


class Server:
    """Says hello, answers status and advance, and leaves everything else to ``answer``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connections = 0
        self.instance = "i"
        self.fence: dict | None = None
        self.asked: list[str] = []
        self.answer: Answer = _silent
        self.hello: Answer | None = None

    @property
    def address(self) -> SpaceAddress:
        return SpaceAddress(name="test", generation=1, address=f"unix:{self.path}", token=TOKEN, containment="none")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, OSError), contextlib.closing(writer):
            while True:
                header, body = struct.unpack("!II", await reader.readexactly(8))
                request = json.loads(await reader.readexactly(header))
                await reader.readexactly(body)
                self.asked.append(request["op"])
                if request["op"] == "hello" and self.hello is not None:
                    await self.hello(request, writer)
                elif request["op"] in ("hello", "status"):
                    status = {**STATUS, "instance": self.instance, "fence": self.fence}
                    writer.write(frame({"id": request["id"], "result": status}))
                elif request["op"] == "advance":
                    asked = {name: request[name] for name in ("epoch", "connection")}
                    writer.write(frame({"id": request["id"], "result": {**ADVANCED, **asked}}))
                else:
                    await self.answer(request, writer)
                await writer.drain()


async def _silent(request: dict, writer: asyncio.StreamWriter) -> None:
    pass


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    made = Server(tmp_path / "s")
    tasks: set[asyncio.Task] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        await made.serve(reader, writer)

    listening = await asyncio.start_unix_server(serve, made.path)
    try:
        yield made
    finally:
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def advanced(server: Server) -> AsyncIterator[SpaceClient]:
    async with await SpaceClient.connect(server.address, limits=QUICK) as client:
        await client.advance(log="l", epoch=1, writer="w")
        yield client


def says(data: bytes | Callable[[dict], bytes], *, close: bool = False) -> Answer:
    async def answer(request: dict, writer: asyncio.StreamWriter) -> None:
        writer.write(data if isinstance(data, bytes) else data(request))
        if close:
            await writer.drain()
            writer.close()

    return answer


MALFORMED = {
    "no JSON": frame(b"{"),
    "no object": frame([]),
    "a header over its bound": struct.pack("!II", 2 << 20, 0),
    "a body over its bound": struct.pack("!II", 2, 17 << 20) + b"{}",
    "the answer to another request": frame({"id": 4711, "result": {}}),
    "an error of another request": frame({"id": 4711, "error": {"code": "busy", "message": ""}}),
    "an error without a code": frame({"id": None, "error": {}}),
    "not UTF-8": frame(b'{"id": 1, "result": {"name": "\xff"}}'),
}


@pytest.mark.parametrize("case", MALFORMED)
async def test_what_is_no_answer_is_a_lost_connection(server: Server, case: str) -> None:
    """Rule S103."""
    async with advanced(server) as client:
        server.answer = says(MALFORMED[case])
        with pytest.raises(SpaceConnectionLost) as lost:
            await client.look([key()])
        assert lost.value.reason == "malformed"
        assert client.admission is None
        with pytest.raises(SpaceConnectionLost):
            await client.look([key()])
        assert server.asked.count("look") == 1, "nothing more is asked before an advance"


@pytest.mark.parametrize(
    "result", [{}, {"commands": [{"key": {}, "state": "dancing"}], "image": None, "floor": None}, [], None, "no"]
)
async def test_a_result_of_another_shape_is_a_lost_connection(server: Server, result: object) -> None:
    async with advanced(server) as client:
        server.answer = says(lambda request: frame({"id": request["id"], "result": result}))
        with pytest.raises(SpaceConnectionLost) as lost:
            await client.look([key()])
        assert lost.value.reason == "malformed"
        assert client.admission is None


@pytest.mark.parametrize(
    "cut", [b"", b"\0\0\0", frame({"id": 3, "result": {}})[:-3], struct.pack("!II", 10, 10) + b"{}"]
)
async def test_a_cut_in_an_answer_is_a_lost_connection(server: Server, cut: bytes) -> None:
    async with advanced(server) as client:
        server.answer = says(cut, close=True)
        with pytest.raises(SpaceConnectionLost) as lost:
            await client.look([key()])
        assert lost.value.reason == "closed"
        assert client.admission is None


@pytest.mark.parametrize("begun", [b"", struct.pack("!II", 100, 0) + b'{"id"'])
async def test_an_answer_that_does_not_come_is_given_up(server: Server, begun: bytes) -> None:
    """Rule S102."""
    async with advanced(server) as client:
        server.answer = says(begun)
        with pytest.raises(SpaceConnectionLost) as lost:
            await client.look([key()])
        assert lost.value.reason == "timeout"
        await client.advance(log="l", epoch=1, writer="w")
        assert client.admission is not None


async def test_a_late_answer_is_nobodys(server: Server) -> None:
    """Rule S102: the answer to a cancelled request comes on a connection that nobody reads any more."""
    release = asyncio.Event()
    asked = asyncio.Event()

    async def late(request: dict, writer: asyncio.StreamWriter) -> None:
        if request["keys"][0]["ordinal"] == 1:
            asked.set()
            await release.wait()
        command = {"key": request["keys"][0], "state": "absent"}
        writer.write(frame({"id": request["id"], "result": {"commands": [command], "image": None, "floor": None}}))

    async with advanced(server) as client:
        server.answer = late
        first = asyncio.create_task(client.look([key(1)]))
        await asked.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        release.set()
        assert client.admission is not None
        for ordinal in range(2, 6):
            looked = await client.look([key(ordinal)])
            assert looked.commands[0].key == key(ordinal)


async def test_an_older_request_that_fails_takes_no_later_admission(server: Server) -> None:
    """Rule S102."""
    asked = asyncio.Event()
    release = asyncio.Event()

    async def answer(request: dict, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await release.wait()
        writer.write(frame({"id": request["id"], "error": {"code": "stale_connection", "message": "", "fence": None}}))

    async with advanced(server) as client:
        server.answer = answer
        old = asyncio.create_task(client.look([key()]))
        await asked.wait()
        await client.advance(log="l", epoch=1, writer="w")
        admission = client.admission
        release.set()
        with pytest.raises(SpaceConnectionLost):
            await old
        assert client.admission is admission
        assert admission is not None


async def test_a_request_that_waited_past_an_advance_is_not_sent(server: Server) -> None:
    """Rule S102: what began under the older admission is not asked under the newer one."""
    first = asyncio.Event()

    async def answer(request: dict, writer: asyncio.StreamWriter) -> None:
        first.set()

    async with await SpaceClient.connect(
        server.address, limits=ClientLimits(waits=1, controls=2, quick_s=0.3)
    ) as client:
        await client.advance(log="l", epoch=1, writer="w")
        server.answer = answer
        waits = [asyncio.create_task(client.glob(str(number))) for number in range(2)]
        await first.wait()
        await client.advance(log="l", epoch=1, writer="w")
        ended = await asyncio.gather(*waits, return_exceptions=True)
        assert [type(error) for error in ended] == [SpaceConnectionLost] * 2
        assert server.asked.count("glob") == 1
        assert client.admission is not None


async def test_the_number_of_an_advance_is_above_all_that_was_used(server: Server) -> None:
    async with advanced(server) as client:
        server.fence = {"log": "l", "epoch": 1, "writer": "w", "connection": 41}
        assert (await client.advance(log="l", epoch=1, writer="w")).connection == 42


async def test_another_instance_behind_a_new_connection_is_noticed(server: Server) -> None:
    """Rule S102: the daemon that knew of the advance is gone."""

    async def answer(request: dict, writer: asyncio.StreamWriter) -> None:
        command = {"key": request["keys"][0], "state": "absent"}
        writer.write(frame({"id": request["id"], "result": {"commands": [command], "image": None, "floor": None}}))
        await writer.drain()
        writer.close()

    async with advanced(server) as client:
        server.answer = answer
        await client.look([key()])
        server.instance = "another"
        with pytest.raises(SpaceConnectionLost):
            while True:  # The cut is seen at the latest when the answer is missing.
                await client.look([key()])
        assert client.admission is None


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("busy", SpaceBusy),
        ("internal", SpaceFault),
        ("processes_remain", SpaceProcessesRemain),
        ("a_later_code", SpaceRefused),
    ],
)
async def test_refusals_leave_the_connection_and_the_admission(
    server: Server, code: str, kind: type[SpaceRefused]
) -> None:
    """Rule S103."""
    async with advanced(server) as client:
        server.answer = says(
            lambda request: frame({"id": request["id"], "error": {"code": code, "message": "m", "pids": [7]}})
        )
        connections = server.connections
        for _ in range(3):
            with pytest.raises(kind) as refused:
                await client.look([key()])
            assert refused.value.code == code
            assert str(refused.value).startswith("the Space refused look: m")
            assert not isinstance(refused.value, SpaceProcessesRemain) or refused.value.pids == (7,)
        assert client.admission is not None
        assert server.connections == connections


async def test_the_machine_of_the_space_was_restarted(server: Server) -> None:
    async with advanced(server) as client:
        server.answer = says(
            lambda request: frame({"id": request["id"], "error": {"code": "stale_boot", "message": ""}})
        )
        with pytest.raises(SpaceConnectionLost) as lost:
            await client.look([key()])
        assert lost.value.reason == "stale_boot"
        assert client.admission is None


async def test_a_space_that_forgot_its_fence_is_lost_not_superseded(server: Server) -> None:
    """Rule S103: a state that was put back from a copy knows an older fence."""
    async with await SpaceClient.connect(server.address, limits=QUICK) as client:
        for fence in (None, {"log": "l", "epoch": 4, "writer": "w", "connection": 1}):
            await client.advance(log="l", epoch=5, writer="w")
            error = {"code": "stale_epoch", "message": "", "fence": fence}
            server.answer = says(lambda request, error=error: frame({"id": request["id"], "error": error}))
            with pytest.raises(SpaceConnectionLost) as lost:
                await client.look([key()])
            assert lost.value.reason == "forgotten"


# --- hello


@pytest.mark.parametrize(
    "answer",
    [
        frame({"id": 1, "result": {}}),
        frame(b"HTTP/1.1 400 Bad Request"),
        b"220 smtp.example.org ESMTP\r\n",
        frame({"id": 1, "error": {"code": "bad_request", "message": "this daemon speaks protocol 2"}}),
    ],
)
async def test_what_says_no_hello_of_ours_is_no_space(server: Server, answer: bytes) -> None:
    server.hello = says(answer, close=True)
    with pytest.raises(SpaceUnavailable) as refused:
        await SpaceClient.connect(server.address, limits=QUICK)
    assert not isinstance(refused.value, NobodyListens)
    assert TOKEN not in str(refused.value)


async def test_too_many_connections_are_tried_again(server: Server) -> None:
    """Rule S104."""

    async def busy(request: dict, writer: asyncio.StreamWriter) -> None:
        if server.connections == 3:
            server.hello = None
            writer.write(frame({"id": request["id"], "result": STATUS}))
            return
        writer.write(frame({"id": request["id"], "error": {"code": "busy", "message": "too many"}}))
        await writer.drain()
        writer.close()

    server.hello = busy
    async with await SpaceClient.connect(server.address, limits=ClientLimits(connect_s=5)) as client:
        assert client.seen.space == "test"
    assert server.connections == 3


@pytest.mark.parametrize("address", ["", "unix:relative", "tcp:host", "http://x", "tcp:127.0.0.1:x"])
async def test_an_address_that_is_none(address: str) -> None:
    where = SpaceAddress(name="test", generation=1, address=address, token=TOKEN, containment="none")
    with pytest.raises(SpaceUnavailable, match="is no address of a Space"):
        await SpaceClient.connect(where, limits=QUICK)
