"""One command on this machine, from its start until nothing of it is left.

Its output comes through a pipe that is read as it fills. What ends the command is its exit, never the end of
the pipe: a process that outlives it and holds the pipe open delays nothing. (A file as standard output would
need no reading, but `echo x > /dev/stderr` would open it anew and wipe what was written before.) After the
exit, whatever is left of the command is ended too, then the pipe is drained once and closed.

Waiting is on the event loop's clock: processes run in real time, no simulation reaches in here.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from perdure.harness.environment import CommandNotStarted, ExecResult, ProcessesRemain
from perdure.tools import processes
from perdure.tools.processes import Process
from perdure.tools.spills import Spill, Spills
from perdure.tools.threads import Threads

MOST_OUTPUT = 256 * 1024 * 1024
"""Bytes of output after which a command is stopped, as the daemon of a Space does it."""
INLINE_OUTPUT = 64 * 1024
"""Bytes of output that a result carries itself; more goes to a spill file, too."""
_CHUNK = 256 * 1024
_KILL_WAIT = 30.0
"""Seconds in which processes must have gone after SIGKILL."""
_POLL = (0.01, 0.1)
"""Seconds between two looks at the processes being ended: at first, and at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec:
    argv: list[str]
    cwd: str
    env: dict[str, str]
    tag: str
    timeout_ms: int | None
    grace_ms: int
    """Between SIGTERM and SIGKILL."""
    output_bytes: int
    """It is stopped when it has written more."""
    on_start: Callable[[], None] | None = None
    """Called when its process is there."""


async def run(spec: CommandSpec, output: CommandOutput, threads: Threads) -> ExecResult:
    """Run it until nothing of it is left, also when the caller is cancelled: then that is raised afterwards.

    ``output`` has threads of its own: a disk that hangs there does not keep ``threads`` from ending processes.
    Raises CommandNotStarted; ProcessesRemain, in place of the cancellation too; and what taking the output
    raises.
    """
    command = _Command(spec, threads, output)
    # In a task of its own, because ending the processes takes several steps that no cancellation may cut off.
    task = asyncio.create_task(command.supervise())
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
            command.stop()
    if cancelled is None:
        return task.result()
    if not task.cancelled() and isinstance(problem := task.exception(), ProcessesRemain):
        raise problem from cancelled
    raise cancelled


async def end(
    members: Callable[[], list[Process]], grace_ms: int, threads: Threads, *, leader: int | None = None
) -> None:
    """End processes, new ones among them included: SIGTERM, after the grace SIGKILL. Raises ProcessesRemain.

    ``leader``: of a process group that is ended with them, also where no look found its processes.
    """
    clock = asyncio.get_running_loop().time
    pause, longest = _POLL
    found = await threads.call(members)
    if found:
        await threads.call(_send_all, found, signal.SIGTERM, signal.SIGCONT)
    deadline = clock() + grace_ms / 1000
    while found and (left := deadline - clock()) > 0:
        await asyncio.sleep(min(pause, left))
        pause = min(pause * 2, longest)
        found = await threads.call(members)
    deadline = clock() + _KILL_WAIT
    pause = _POLL[0]
    while True:
        refused = await threads.call(_kill_all, found, leader)
        if not found:
            return
        await asyncio.sleep(pause)
        pause = min(pause * 2, longest)
        found = await threads.call(members)
        if found and (clock() > deadline or refused >= set(found)):
            raise ProcessesRemain([process.pid for process in found])


def _kill_all(found: list[Process], leader: int | None) -> set[Process]:
    """Those that this user may not signal."""
    if leader is not None:
        processes.kill_group(leader)
    return _send_all(found, signal.SIGKILL)


def _send_all(found: list[Process], *signals: signal.Signals) -> set[Process]:
    """Those that this user may not signal."""
    refused: set[Process] = set()
    for process in found:
        for number in signals:
            if not processes.send(process, number):
                refused.add(process)
    return refused


@dataclass(slots=True)
class CommandOutput:
    """What came out of the pipe: counted, handed on, the end of it in memory, a large one in a file."""

    spills: Spills
    threads: Threads
    on_output: Callable[[bytes], None] | None
    size: int = 0
    recent: bytearray = field(default_factory=bytearray)
    spill: Spill | None = None
    unkept: bool = False

    async def take(self, data: bytes) -> None:
        self.size += len(data)
        self.recent += data
        if self.on_output is not None:
            self.on_output(data)
        if self.spill is not None:
            if not self.spill.full:
                await self.threads.call(self.spill.write, data)
        elif self.size > INLINE_OUTPUT and not self.unkept:
            await self.threads.call(self._begin)
        if len(self.recent) > 4 * INLINE_OUTPUT:
            del self.recent[:-INLINE_OUTPUT]

    def _begin(self) -> None:
        try:
            self.spill = self.spills.create()
        except OSError:
            self.unkept = True
        else:
            self.spill.write(bytes(self.recent))  # Nothing of it was let go yet.

    async def close(self) -> None:
        if self.spill is not None:
            await self.threads.call(self.spills.close, self.spill)


class _Command:
    def __init__(self, spec: CommandSpec, threads: Threads, output: CommandOutput) -> None:
        self._spec = spec
        self._threads = threads
        self._output = output
        self._loop = asyncio.get_running_loop()
        self._stopped: asyncio.Future[None] = self._loop.create_future()
        self._exited: asyncio.Future[None] = self._loop.create_future()
        self._draining: asyncio.Future[None] = self._loop.create_future()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._pidfd = -1
        self._flooded = False

    def stop(self) -> None:
        _resolve(self._stopped)

    async def supervise(self) -> ExecResult:
        began = self._loop.time()
        pump: asyncio.Task[None] | None = None
        over = False
        try:
            await self._threads.call(self._spawn)
            process = self._process
            assert process is not None
            self._watch_exit(process)
            if self._spec.on_start is not None:
                self._spec.on_start()
            pump = asyncio.create_task(self._pump())
            timed_out = await self._first_event(pump, began)
            duration = self._loop.time() - began
            await end(self._members, self._spec.grace_ms, self._threads, leader=process.pid)
            await self._exited
            code = _reap(process)
            if processes.group_remains(process.pid):  # What no look found was killed unseen: wait for its end.
                await end(self._members, 0, self._threads)
            _resolve(self._draining)
            await pump
            over = True
        except ProcessesRemain:
            over = True  # All that could be done was done.
            raise
        finally:
            if not over:
                self._kill_now()
            if pump is not None and not pump.done():
                pump.cancel()
                await asyncio.wait({pump})
            self._release()
            await self._output.close()
        output = self._output
        return ExecResult(
            exit_code=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            timed_out=timed_out,
            output_limit=self._flooded,  # also where it had ended before that was seen: some of it is gone
            duration_ms=round(duration * 1000),
            output=bytes(output.recent if output.size <= INLINE_OUTPUT else output.recent[-INLINE_OUTPUT:]),
            output_bytes=output.size,
            output_path=output.spill.path if output.spill else None,
            output_kept=output.spill.kept if output.spill else 0,
        )

    async def _first_event(self, pump: asyncio.Task[None], began: float) -> bool:
        """Wait for the exit, the time-out, a stop, too much output, or output that cannot be handed on. True: the
        time-out."""
        timeout_ms = self._spec.timeout_ms
        waits: set[asyncio.Future[None]] = {self._exited, self._stopped, pump}
        while True:
            left = None if timeout_ms is None else max(0.0, began + timeout_ms / 1000 - self._loop.time())
            try:
                done, _ = await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:  # The loop itself is ending: as if stopped.
                self.stop()
                return False
            if self._exited in done or self._stopped in done:
                return False
            if pump not in done:
                return True
            if self._flooded or pump.cancelled() or pump.exception() is not None:
                return False
            waits.discard(pump)  # The command closed its output and goes on.

    # --- the process
    # ------------------------------------------------------------------------------------------

    def _spawn(self) -> None:
        spec = self._spec
        theirs = -1
        try:
            self._pipe, theirs = os.pipe()
            os.set_blocking(self._pipe, False)
            with contextlib.suppress(OSError, AttributeError):
                fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, _CHUNK)
            self._process = subprocess.Popen(  # noqa: S603  (running what the agent asks for is the purpose)
                spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=subprocess.STDOUT,
                cwd=spec.cwd,
                env=spec.env,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise CommandNotStarted(f"{spec.argv[0]} could not be started in {spec.cwd}: {reason}") from error
        finally:
            if theirs >= 0:
                os.close(theirs)

    def _watch_exit(self, process: subprocess.Popen[bytes]) -> None:
        """Learn of the exit without reaping: until it is reaped its id, and so its group's, is nobody
        else's."""
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:  # Its exit was taken by somebody else in this process.
            _resolve(self._exited)
        except (OSError, AttributeError):
            threading.Thread(target=self._wait_for_exit, args=(process,), name="perdure-wait", daemon=True).start()
        else:
            self._loop.add_reader(self._pidfd, self._saw_exit)

    def _wait_for_exit(self, process: subprocess.Popen[bytes]) -> None:
        """In a thread of its own, where there are no pidfds."""
        if hasattr(os, "waitid"):
            with contextlib.suppress(ChildProcessError):  # As above.
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        else:
            process.wait()
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            self._loop.call_soon_threadsafe(_resolve, self._exited)

    def _saw_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        _resolve(self._exited)

    def _members(self) -> list[Process]:
        assert self._process is not None
        return processes.of_command(self._process.pid, self._spec.tag)

    def _kill_now(self) -> None:
        """The last resort when ``supervise`` itself is cut off: a moment of blocking beats processes left
        behind."""
        if self._process is None:
            return
        with contextlib.suppress(OSError):  # They cannot be looked at; their group is killed unseen.
            for _ in range(50):
                processes.kill_group(self._process.pid)
                found = self._members()
                if not found:
                    return
                _send_all(found, signal.SIGKILL)
                time.sleep(_POLL[0])

    def _release(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        if self._pipe >= 0:
            os.close(self._pipe)
        if self._process is not None and self._process.poll() is None:
            # It could not be ended; whenever it does end, somebody must have waited for it.
            threading.Thread(target=self._process.wait, name="perdure-reap", daemon=True).start()

    # --- its output
    # -------------------------------------------------------------------------------------------

    async def _pump(self) -> None:
        """Read the pipe until its end, or there was too much; or, once draining, until it is empty."""
        taken, left = 0, _CHUNK
        while left > 0:
            try:
                data = os.read(self._pipe, _CHUNK)
            except BlockingIOError:
                if self._draining.done():
                    return
                await self._readable()
                continue
            if not data:
                return
            if self._draining.done():
                # What the command wrote fits in the pipe; a process that was not found could go on for ever.
                left -= len(data)
            await self._output.take(data)
            taken += len(data)
            if taken > self._spec.output_bytes:
                self._flooded = True
                return
            await asyncio.sleep(0)

    async def _readable(self) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._pipe, _resolve, ready)
        try:
            await asyncio.wait({ready, self._draining}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._loop.remove_reader(self._pipe)


def _reap(process: subprocess.Popen[bytes]) -> int | None:
    """How a process that has exited ended, as ``returncode`` says it.

    None if that was taken by somebody else: a handler that waits for every child, or the system where SIGCHLD is
    ignored. Popen would say 0 then.
    """
    if process.returncode is None:
        try:
            _, status = os.waitpid(process.pid, 0)
        except ChildProcessError:
            return None
        process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
