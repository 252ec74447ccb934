"""A terminal for tests: ``perdure`` in a pseudo-terminal, and what a person would see there.

Tests wait for what is to be seen, never for time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

import pyte

import perdure

HERE = Path(__file__).parent
PATIENCE_S = 60.0
"""So long may a slow machine take for what will come; reaching it is a failure."""


def environment(home: Path, **more: str) -> dict[str, str]:
    """Of a user with nothing configured but the fake models, and the perdure that is tested here."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
    return {
        **kept,
        "LC_ALL": "C.UTF-8",
        "HOME": str(home),
        "TERM": "xterm-256color",
        "PYTHONPATH": os.pathsep.join([str(HERE / "chat_fakes"), str(Path(perdure.__file__).parents[1])]),
        **more,
    }


class Terminal:
    """One process in a pseudo-terminal."""

    def __init__(
        self, *words: str | Path, cwd: Path, env: Mapping[str, str], rows: int = 40, columns: int = 100
    ) -> None:
        self.raw = b""
        self._screen = pyte.HistoryScreen(columns, rows, history=10_000, ratio=1.0)
        self._stream = pyte.ByteStream(self._screen)
        self._changed = threading.Condition()
        self._ended = False
        self._master, slave = pty.openpty()
        self._set_size(slave, rows, columns)
        program = Path(sys.executable).parent / "perdure"
        self.process = subprocess.Popen(
            [str(program), *map(str, words)],
            cwd=cwd,
            env=dict(env),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    # --- seeing ------------------------------------------------------------------------------------------------

    def text(self) -> str:
        """All there was to see, what has scrolled away included."""
        with self._changed:
            return self._text()

    def _text(self) -> str:
        history = ["".join(row[at].data for at in range(self._screen.columns)) for row in self._screen.history.top]
        return "\n".join(line.rstrip() for line in [*history, *self._screen.display])

    def display(self) -> list[str]:
        """What stands on the screen now."""
        with self._changed:
            return [line.rstrip() for line in self._screen.display]

    def see(self, *texts: str, since: int = 0) -> str:
        """Wait until these can be seen, and return all that can."""
        return self.wait(lambda shown: all(text in shown[since:] for text in texts), f"{texts}")

    def wait(self, true: Callable[[str], bool], what: str) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended or true(self._text()), PATIENCE_S) or not true(
                self._text()
            ):
                raise AssertionError(f"waited in vain for {what}; seen:\n{self._text()}\nraw: {self.raw[-2000:]!r}")
            return self._text()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:
                data = b""
            with self._changed:
                self.raw += data
                if data:
                    self._stream.feed(data)
                else:
                    self._ended = True
                self._changed.notify_all()
            if not data:
                return

    # --- doing -------------------------------------------------------------------------------------------------

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def enter(self, text: str) -> None:
        self.type(f"{text}\r")

    def control(self, letter: str) -> None:
        self.type(chr(ord(letter.upper()) - 64))

    def resize(self, rows: int, columns: int) -> None:
        with self._changed:
            self._screen.resize(rows, columns)
        self._set_size(self._master, rows, columns)

    @staticmethod
    def _set_size(descriptor: int, rows: int, columns: int) -> None:
        fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    @property
    def cooked(self) -> bool:
        """It echoes and takes lines, as a shell left it."""
        flags = termios.tcgetattr(self._master)[3]
        return bool(flags & termios.ECHO and flags & termios.ICANON and flags & termios.ISIG)

    # --- ending ------------------------------------------------------------------------------------------------

    def end(self) -> int:
        """Its exit code, once it has ended by itself."""
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def hang_up(self) -> None:
        """The window is closed."""
        with contextlib.suppress(OSError):
            os.close(self._master)
        self._master = -1

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        if self._master >= 0:
            self._reader.join(PATIENCE_S)
            os.close(self._master)


class Gates:
    """Where the fake model waits: held gates open when the test says so, all others are open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        self._changed = threading.Condition()
        self._held: set[str] = set()
        self._passed: list[str] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self, *names: str) -> None:
        with self._changed:
            self._held |= set(names)

    def open(self, *names: str) -> None:
        with self._changed:
            self._held -= set(names)
            self._changed.notify_all()

    def reached(self, name: str) -> None:
        """Wait until somebody stands, or stood, at this gate."""
        with self._changed:
            assert self._changed.wait_for(lambda: name in self._passed, PATIENCE_S), (
                f"nobody came to {name}; they came to {self._passed}"
            )

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        # Whoever stands at a gate may be killed there.
        with link, contextlib.suppress(OSError):
            name = b""
            while not name.endswith(b"\n"):
                name += link.recv(4096)
            with self._changed:
                self._passed.append(name.decode().rstrip())
                self._changed.notify_all()
                self._changed.wait_for(lambda: name.decode().rstrip() not in self._held)
            link.sendall(b"go\n")

    def close(self) -> None:
        self._server.close()
        with self._changed:
            self._held.clear()
            self._changed.notify_all()


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A new folder whose path fits into a line, and a socket's into its address."""
    with tempfile.TemporaryDirectory(prefix="chat") as folder:
        yield Path(folder)


@contextlib.contextmanager
def gates(folder: Path) -> Iterator[Gates]:
    made = Gates(folder / "gates")
    try:
        yield made
    finally:
        made.close()


def piped(
    *words: str | Path, cwd: Path, env: Mapping[str, str], lines: str = "", stdin: int | IO[bytes] | None = None
) -> subprocess.CompletedProcess[str]:
    """``perdure`` without a terminal."""
    program = Path(sys.executable).parent / "perdure"
    return subprocess.run(
        [str(program), *map(str, words)],
        cwd=cwd,
        env=dict(env),
        input=None if stdin is not None else lines,
        stdin=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
