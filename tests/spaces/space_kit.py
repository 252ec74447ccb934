"""A real daemon for one test, ended with everything that lives in its Space whatever the test does."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from perdure.spaced import SPACED
from perdure.spaces.client import SpaceClient
from perdure.spaces.errors import SpaceError
from perdure.spaces.link import ClientLimits
from perdure.spaces.provider import SpaceAddress
from perdure.spaces.wire import ExecKey

TOKEN = "a-token-for-tests-0123456789"


class Attempt(TypedDict):
    call: int
    attempt: int
    nonce: str


CALL: Attempt = {"call": 1, "attempt": 1, "nonce": "n1"}
"""The attempt whose keys ``key`` gives."""


def key(ordinal: int = 1, *, call: int = 1, attempt: int = 1, nonce: str = "n1") -> ExecKey:
    return ExecKey(call=call, attempt=attempt, nonce=nonce, ordinal=ordinal)


@dataclass
class Daemon:
    """One Space's directory, and its daemon's process."""

    folder: Path
    name: str = "test"
    generation: int = 1
    process: subprocess.Popen[bytes] | None = None
    where: str = field(default="", init=False)

    @property
    def workspace(self) -> Path:
        return self.folder / "workspace"

    @property
    def address(self) -> SpaceAddress:
        return SpaceAddress(
            name=self.name, generation=self.generation, address=self.where, token=TOKEN, containment="none"
        )

    def start(self, listen: str = "") -> None:
        (self.folder / "workspace").mkdir(exist_ok=True)
        token = self.folder / "token"
        token.write_text(TOKEN)
        words = [
            sys.executable, "-I", "-S", str(SPACED), "--workspace", str(self.workspace), "--state",
            str(self.folder / "state"), "--space", self.name, "--generation", str(self.generation), "--listen",
            listen or f"unix:{self.folder}/socket", "--token-file", str(token), "--testing-crash-points",
        ]  # fmt: skip
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        assert self.process.stdout is not None
        with self.process.stdout:
            line = self.process.stdout.readline()
        assert line, f"the daemon did not start, status {self.process.wait()}"
        self.where = json.loads(line)["address"]

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def pause(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)

    async def end(self) -> None:
        """Kill what lives in the Space, then the daemon. One that is gone or does not answer is started anew for it."""
        for _ in range(3):
            if self.process is None:
                self.start()
            assert self.process is not None
            self.go_on()
            try:
                async with await SpaceClient.connect(self.address, limits=ClientLimits(connect_s=0.1)) as client:
                    await client.shutdown(kill=True)
                await asyncio.to_thread(self.process.wait, 20)
                return
            except SpaceError:
                continue
            finally:
                self.kill()
        raise AssertionError(f"what lives in {self.folder} could not be ended")


@asynccontextmanager
async def daemon(listen: str = "") -> AsyncIterator[Daemon]:
    folder = Path(tempfile.mkdtemp(prefix="space-"))
    made = Daemon(folder)
    try:
        made.start(listen)
        try:
            yield made
        finally:
            await made.end()
    finally:
        shutil.rmtree(folder)


@asynccontextmanager
async def advanced(made: Daemon, *, epoch: int = 1, writer: str = "w1", log: str = "log") -> AsyncIterator[SpaceClient]:
    """A client that has the Space, which stands at an image."""
    async with await SpaceClient.connect(made.address) as client:
        await client.advance(log=log, epoch=epoch, writer=writer)
        await client.settle(commit=0)
        yield client
