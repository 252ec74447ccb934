"""The stores the conformance suite runs on."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import apsw
import psycopg
from postgres_server import Server, fresh_session

from perdure.kernel.json import JsonValue
from perdure.kernel.storage import MailReply, Storage
from perdure.storage import jsonl_mailbox, postgres_mailbox, postgres_upkeep, sqlite_mailbox
from perdure.storage.jsonl import JsonlStorage
from perdure.storage.jsonl_lines import LOG, Fence, LogLine, line_of
from perdure.storage.memory import MemoryStorage
from perdure.storage.postgres import PostgresStorage
from perdure.storage.postgres_link import Target
from perdure.storage.postgres_owner import find
from perdure.storage.sqlite import Durability, SqliteStorage


class MemorySubject:
    def __init__(self, storage: MemoryStorage | None = None) -> None:
        self._storage = MemoryStorage() if storage is None else storage

    def storage(self) -> MemoryStorage:
        return self._storage

    async def crash(self) -> MemorySubject:
        return MemorySubject(self._storage.snapshot())

    async def supersede(self, epoch: int, writer: str) -> None:
        self._storage._contents.epoch = epoch
        self._storage._contents.writer = writer

    async def post(self, kind: str, body: JsonValue, *, now: int) -> int:
        return self._storage.post(kind, body, now=now)

    async def reply(self, mail_id: int) -> MailReply | None:
        return self._storage.reply(mail_id)


class SqliteSubject:
    def __init__(self, path: Path, durability: Durability = "power") -> None:
        self.path = path
        self._durability: Durability = durability

    def storage(self) -> Storage:
        return SqliteStorage(self.path, durability=self._durability)

    async def crash(self) -> SqliteSubject:
        crashed = self.path.with_name(f"crashed-{self.path.name}")
        copy_files(self.path, crashed)
        return SqliteSubject(crashed, self._durability)

    async def supersede(self, epoch: int, writer: str) -> None:
        with apsw.Connection(os.fspath(self.path)) as connection:
            connection.execute("UPDATE meta SET epoch = ?, writer = ?", (epoch, writer))
        connection.close()

    async def post(self, kind: str, body: JsonValue, *, now: int) -> int:
        return sqlite_mailbox.post(self.path, kind, body, now=now)

    async def reply(self, mail_id: int) -> MailReply | None:
        return sqlite_mailbox.reply(self.path, mail_id)


class JsonlSubject:
    def __init__(self, path: Path, *, fsync: bool = False) -> None:
        self.path = path
        self._fsync = fsync

    def storage(self) -> Storage:
        return JsonlStorage(self.path, fsync=self._fsync)

    async def crash(self) -> JsonlSubject:
        crashed = self.path.with_name(f"crashed-{self.path.name}")
        shutil.copytree(self.path, crashed)
        return JsonlSubject(crashed, fsync=self._fsync)

    async def supersede(self, epoch: int, writer: str) -> None:
        add_fence(self.path, epoch, writer)

    async def post(self, kind: str, body: JsonValue, *, now: int) -> int:
        return jsonl_mailbox.post(self.path, kind, body, now=now)

    async def reply(self, mail_id: int) -> MailReply | None:
        return jsonl_mailbox.reply(self.path, mail_id)


class PostgresSubject:
    def __init__(self, server: Server, dsn: str | None = None, session: str | None = None) -> None:
        self._server = server
        self.dsn = server.dsn() if dsn is None else dsn
        self.session = fresh_session() if session is None else session

    def storage(self) -> Storage:
        return PostgresStorage(self.dsn, self.session)

    async def crash(self) -> PostgresSubject:
        crashed = PostgresSubject(self._server, self.dsn)
        await asyncio.to_thread(self._copy, crashed.session)
        return crashed

    def _copy(self, goal: str) -> None:
        target = Target(self.dsn, self.session)
        with target.connect() as link:
            row = find(link, target)
            assert row is not None
            postgres_upkeep.copy(link, target, row.id, goal, log_id=row.log_id, go_on=lambda: None)

    async def supersede(self, epoch: int, writer: str) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as link:
            sql = "UPDATE perdure.sessions SET epoch = %s, writer = %s WHERE name = %s"
            link.execute(sql, (epoch, writer, self.session))

    async def post(self, kind: str, body: JsonValue, *, now: int) -> int:
        return postgres_mailbox.post(self.dsn, self.session, kind, body, now=now)

    async def reply(self, mail_id: int) -> MailReply | None:
        return postgres_mailbox.reply(self.dsn, self.session, mail_id)


def add_fence(store: Path, epoch: int, writer: str) -> None:
    """As whoever opens it does."""
    log = store / LOG
    with log.open("ab") as file:
        file.write(line_of(LogLine(after=log.stat().st_size, fence=Fence(epoch, writer))))


def copy_files(source: Path, target: Path) -> None:
    """Copy a store as a kill would leave it: without what only lives in memory.

    By another process: one that closes a file frees its own POSIX locks on it, also those SQLite holds.
    """
    for suffix in ("", "-wal"):
        if Path(f"{source}{suffix}").exists():
            subprocess.run(["cp", f"{source}{suffix}", f"{target}{suffix}"], check=True)
