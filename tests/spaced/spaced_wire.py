"""A client of spaced as its protocol page describes it, and daemons to talk to. Blocking: tests are simple."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perdure.spaced import SPACED

TOKEN = "a-token-for-tests-0123456789"
CHUNK = 1 << 20
CONTAINMENTS = ("cgroup2", "cgroup1", "none")
OPENED: list[socket.socket] = []
"""Every socket dialled; closed when the test that dialled it has ended."""
VARIANT = Path(__file__).with_name("spaced_variant.py")


class Refused(Exception):
    """The daemon answered with an error."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(f"{error['code']}: {error['message']} {error}")
        self.code = error["code"]
        self.error = error


def dial(address: str, timeout: float = 30) -> socket.socket:
    kind, _, where = address.partition(":")
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX)
        OPENED.append(sock)
        sock.settimeout(timeout)
        sock.connect(where)
        return sock
    host, _, port = where.rpartition(":")
    sock = socket.create_connection((host.strip("[]"), int(port)), timeout)
    OPENED.append(sock)
    return sock


def hang_up() -> None:
    while OPENED:
        OPENED.pop().close()


class Wire:
    """One connection. ``call`` sends a request and returns (result, body); ``send`` and ``receive`` do half of it."""

    def __init__(self, address: str, token: str | None = TOKEN) -> None:
        self.sock = dial(address)
        self.admission: dict[str, Any] = {}
        if token is not None:
            self.hello = self.call("hello", token=token, protocol=1)[0]

    def send(self, op: str, body: bytes = b"", /, **fields: Any) -> None:
        self.send_raw({"op": op, **fields}, body)

    def send_raw(self, header: dict[str, Any], body: bytes = b"") -> None:
        head = json.dumps(header).encode()
        self.sock.sendall(struct.pack("!II", len(head), len(body)) + head + body)

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            block = self.sock.recv(min(1 << 20, size - len(data)))
            if not block:
                raise ConnectionError("the daemon closed the connection")
            data += block
        return bytes(data)

    def receive(self) -> tuple[dict[str, Any], bytes]:
        head, size = struct.unpack("!II", self._exactly(8))
        header = json.loads(self._exactly(head))
        body = self._exactly(size)
        if "error" in header:
            raise Refused(header["error"])
        return header["result"], body

    def call(self, op: str, body: bytes = b"", /, **fields: Any) -> tuple[dict[str, Any], bytes]:
        self.send(op, body, **fields)
        return self.receive()

    def close(self) -> None:
        self.sock.close()


class Driver(Wire):
    """A driver's connection: it advances, then everything it asks carries the admission."""

    def __init__(
        self, address: str, token: str = TOKEN, *, epoch: int, log: str = "log-1", writer: str | None = None
    ) -> None:
        super().__init__(address, token)
        self.log = log
        self.epoch = epoch
        self.writer = writer or f"writer-{epoch}"
        self.number = 0

    def advance(self, keep: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
        self.send_advance(keep, **more)
        return self.advanced()

    def send_advance(self, keep: list[dict[str, Any]] | None = None, **more: Any) -> None:
        self.number += 1
        fields: dict[str, Any] = {
            "log": self.log,
            "epoch": self.epoch,
            "writer": self.writer,
            "connection": self.number,
            "keep": keep or [],
            "outcomes": [],
            **more,
        }
        self.send("advance", **fields)

    def advanced(self) -> dict[str, Any]:
        result = self.receive()[0]
        self.admission = {"epoch": result["epoch"], "connection": result["connection"], "boot": result["boot"]}
        return result

    def twin(self, address: str, token: str = TOKEN) -> Driver:
        """Another connection of the same driver, under the same advance."""
        other = Driver(address, token, epoch=self.epoch, log=self.log, writer=self.writer)
        other.number, other.admission = self.number, dict(self.admission)
        return other

    def ask(self, op: str, body: bytes = b"", /, **fields: Any) -> dict[str, Any]:
        return self.call(op, body, **self.admission, **fields)[0]

    def ask_body(self, op: str, body: bytes = b"", /, **fields: Any) -> tuple[dict[str, Any], bytes]:
        return self.call(op, body, **self.admission, **fields)

    def send_asked(self, op: str, body: bytes = b"", /, **fields: Any) -> None:
        self.send(op, body, **self.admission, **fields)

    # --- what tests do all the time

    def settle_first(self, commit: int = 1) -> None:
        """The workspace as it is becomes the image."""
        scan = self.ask("scan")
        self.ask("settle", commit=commit, scan=scan["scan"])

    def run(self, shell: str, call: int = 1, attempt: int = 1, ordinal: int = 1, **fields: Any) -> dict[str, Any]:
        """Start a command and wait until it runs no longer."""
        result = self.ask("start", key=key(call, attempt, ordinal), shell=shell, wait_ms=30_000, **fields)
        while result["state"] == "running":
            result = self.ask("wait", key=key(call, attempt, ordinal), wait_ms=30_000)
        return result

    def start(self, shell: str, call: int = 1, attempt: int = 1, ordinal: int = 1, **fields: Any) -> dict[str, Any]:
        return self.ask("start", key=key(call, attempt, ordinal), shell=shell, **fields)

    def state(self, call: int = 1, attempt: int = 1, ordinal: int = 1) -> str:
        return self.ask("look", keys=[key(call, attempt, ordinal)])["commands"][0]["state"]

    def output(self, call: int = 1, attempt: int = 1, ordinal: int = 1, offset: int = 0) -> bytes:
        return self.ask_body("wait", key=key(call, attempt, ordinal), offset=offset, length=1 << 20)[1]

    def write(self, path: Any, data: bytes, call: int = 1, attempt: int = 1, **fields: Any) -> dict[str, Any]:
        return self.ask("write", data, path=path, call=call, attempt=attempt, nonce="n", **fields)

    def restore(
        self,
        commit: int,
        image: list[dict[str, Any]] | None,
        contents: dict[str, bytes],
        floor: Any = None,
        **apply: Any,
    ) -> dict[str, Any]:
        """Begin, send the image, plan, put what is missing, apply."""
        begun = self.ask("restore_begin", commit=commit, floor=floor)
        if image is not None:
            self.ask("restore_image", json.dumps(image).encode(), restore=begun["restore"])
        plan = self.ask("restore_plan", restore=begun["restore"])
        for digest in plan["missing"]:
            self.ask("put", contents[digest])
        return self.ask("restore_apply", restore=begun["restore"], preserve=apply.pop("preserve", "none"), **apply)


def key(call: int = 1, attempt: int = 1, ordinal: int = 1, nonce: str = "n") -> dict[str, Any]:
    return {"call": call, "attempt": attempt, "nonce": nonce, "ordinal": ordinal}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_entry(path: str, data: bytes, mode: int = 0o644) -> dict[str, Any]:
    entry: dict[str, Any] = {"path": path, "kind": "file", "mode": mode, "size": len(data), "sha256": sha(data)}
    if len(data) > CHUNK:
        entry["chunks"] = [sha(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK)]
    return entry


def chunked(*contents: bytes) -> dict[str, bytes]:
    """Contents by chunk digest."""
    return {sha(data[at : at + CHUNK]): data[at : at + CHUNK] for data in contents for at in range(0, len(data), CHUNK)}


class Space:
    """A workspace, its state, and the daemon on them: may be killed and started again."""

    def __init__(self, folder: Path, *words: str, python: str = sys.executable, listen: str | None = None) -> None:
        self.folder = folder
        self.workspace = folder / "work"
        self.state = folder / "state"
        self.workspace.mkdir(parents=True, exist_ok=True)
        self.token = folder / "token"
        self.token.write_text(TOKEN + "\n")
        self.token.chmod(0o600)
        self.words = words
        self.python = python
        self.patches: list[str] = []
        """Parts to replace, see spaced_variant."""
        self.listen = listen or f"unix:{socket_path()}"
        self.process: subprocess.Popen[bytes] | None = None
        self.address = ""

    def command(self, *more: str) -> list[str]:
        program = [str(VARIANT), *self.patches, "--"] if self.patches else [str(SPACED)]
        return [
            self.python, *program, "--workspace", str(self.workspace), "--state", str(self.state), "--space", "test",
            "--generation", "1", "--listen", self.listen, "--token-file", str(self.token), *self.words, *more,
        ]  # fmt: skip

    def up(self, *more: str, env: dict[str, str] | None = None) -> Space:
        self.process = subprocess.Popen(
            self.command(*more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(env or {})},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            _, said = self.process.communicate()
            raise AssertionError(f"the daemon did not start: {said.decode()}")
        self.address = json.loads(line)["address"]
        return self

    def kill(self) -> None:
        """SIGKILL of the daemon alone."""
        assert self.process is not None
        self.process.kill()
        self.ended()

    def ended(self) -> int:
        assert self.process is not None
        status = self.process.wait(20)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self.process = None
        return status

    def again(self, *more: str) -> Space:
        self.kill()
        return self.up(*more)

    def driver(self, epoch: int = 1, **more: Any) -> Driver:
        return Driver(self.address, epoch=epoch, **more)

    def down(self) -> None:
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(Exception):
                wire = Wire(self.address)
                with contextlib.suppress(Refused, ConnectionError):
                    wire.call("shutdown", kill=True)
                wire.close()
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
            self.process.kill()
        if self.process is not None:
            self.ended()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.listen.partition(":")[2])
        self.remove_cgroups()

    def remove_cgroups(self) -> None:
        """A daemon that was killed leaves its empty groups behind."""
        with contextlib.suppress(FileNotFoundError):
            name = json.loads((self.state / "space.json").read_text())["id"]
            for folder in Path("/sys/fs/cgroup").glob(f"**/spaced-{name}"):
                for path, _, _ in os.walk(folder, topdown=False):
                    with contextlib.suppress(OSError):
                        os.rmdir(path)

    def files(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.workspace)): path.read_bytes()
            for path in sorted(self.workspace.rglob("*"))
            if path.is_file()
        }


def socket_path() -> str:
    """Short enough for a unix socket, wherever the test's folder is."""
    return f"/tmp/spaced-{os.getpid()}-{secrets.token_hex(6)}.sock"


def eventually(check: Any, seconds: float = 60) -> Any:
    """Wait for a condition outside our hands: another process has got somewhere."""
    deadline = time.monotonic() + seconds
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.005)


def alive(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
