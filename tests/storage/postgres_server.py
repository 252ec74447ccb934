"""A PostgreSQL server for tests: Debian's binaries, in a directory of its own, reached by a socket in it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest

USER = "perdure"
_WAIT_SECONDS = 60
_HBA = "local all secretive scram-sha-256\nlocal all all trust\n"
_numbers = count()


def _binaries() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None


class Server:
    """``fsync``: it survives its own death with what it acknowledged."""

    def __init__(self, *, fsync: bool = False) -> None:
        binaries = _binaries()
        if binaries is None:
            pytest.skip("PostgreSQL is not installed: sudo apt-get install postgresql")
        # Not below pytest's directory: the server's user may not enter that, and a socket's path is short.
        self.place = Path(tempfile.mkdtemp(prefix="perdure-pg-"))
        self._binaries = binaries
        self._fsync = fsync
        self._process: subprocess.Popen[bytes] | None = None
        self._as: dict[str, Any] = {}
        if os.getuid() == 0:  # the server does not run as root
            self._as = {"user": "postgres", "group": "postgres", "extra_groups": []}
            shutil.chown(self.place, "postgres", "postgres")
        self._data = self.place / "data"
        make = ["initdb", "-D", self._data, "-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
        made = subprocess.run([binaries / make[0], *make[1:]], capture_output=True, cwd=self.place, **self._as)
        assert made.returncode == 0, made.stderr.decode()
        (self._data / "pg_hba.conf").write_text(_HBA)
        self.start()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def dsn(self, database: str = "postgres", user: str = USER) -> str:
        return f"postgresql://{user}@/{database}?host={self.place}"

    def start(self) -> None:
        options = {"listen_addresses": "", "unix_socket_directories": self.place, "max_connections": 40}
        options |= {"shared_buffers": "16MB", "fsync": "on" if self._fsync else "off", "lc_messages": "C"}
        command = [self._binaries / "postgres", "-D", self._data]
        command += [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        with (self.place / "log").open("ab") as log:
            process = self._process = subprocess.Popen[bytes](
                command, stdout=log, stderr=log, cwd=self.place, **self._as
            )
        until = time.monotonic() + _WAIT_SECONDS
        while True:
            try:
                psycopg.connect(self.dsn(), connect_timeout=5).close()
                return
            except psycopg.OperationalError:
                assert process.poll() is None, (self.place / "log").read_text()
                assert time.monotonic() < until, (self.place / "log").read_text()
                time.sleep(0.02)

    def kill(self) -> None:
        """At once, as the loss of its machine would be; its children follow it."""
        assert self._process is not None
        children = self._children()
        self._process.kill()
        self._process.wait(_WAIT_SECONDS)
        for child in children:
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                continue
        until = time.monotonic() + _WAIT_SECONDS
        while any(Path(f"/proc/{child}/exe").exists() for child in children) and time.monotonic() < until:
            time.sleep(0.01)

    def _children(self) -> list[int]:
        found = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [int(pid) for pid in found.split()]

    def stop(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(_WAIT_SECONDS)

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.place)

    def execute(self, sql: str, *values: object, database: str = "postgres") -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn(database), autocommit=True) as link:
            cursor = link.execute(sql.encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    def dump(self) -> str:
        """All sessions, as statements that any server takes."""
        command = [self._binaries / "pg_dump", "--schema=perdure", "--inserts", "--no-owner", "--no-privileges"]
        done = subprocess.run([*command, self.dsn()], capture_output=True, check=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line and not line.startswith(("--", "SET ", "\\"))]
        return "\n".join(lines) + "\n"

    def database(self) -> str:
        """The dsn of a new one."""
        name = f"other{next(_numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.dsn(name)


def fresh_session() -> str:
    """A name that no session has."""
    return f"session {next(_numbers)}"
