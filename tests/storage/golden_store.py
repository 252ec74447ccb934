"""What the golden stores hold: one for each format there has been, which every later version must open (rule K181).

To make those of the current format, once, when it is new: ``python tests/storage/golden_store.py``.
"""

from __future__ import annotations

import asyncio
import gzip
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from postgres_server import Server

from perdure.kernel.records import (
    Completed,
    ConversationRecord,
    DocumentRecord,
    Edit,
    EntryRecord,
    ForkPoint,
    Pending,
    SubmissionRecord,
    TaskRecord,
    Terminal,
    to_raw,
)
from perdure.kernel.storage import FORMAT_VERSION, Batch, DocumentWrite, MailReply
from perdure.storage import jsonl_mailbox, postgres_mailbox, sqlite_mailbox
from perdure.storage.jsonl import JsonlStorage
from perdure.storage.postgres import PostgresStorage
from perdure.storage.postgres_schema import LAYOUT
from perdure.storage.sqlite import SqliteStorage

GOLDEN = Path(__file__).parent / "golden"
SESSION = "golden"
"""The name of the session in PostgreSQL."""

ROOT = ConversationRecord(id=1, created_at=100)
FORK = ConversationRecord(id=7, created_at=300, parent=ForkPoint(1, 6), owner=4)
ASKED = EntryRecord(
    id=2,
    seq=1,
    created_at=100,
    conversation_id=1,
    kind="user",
    raw_messages=to_raw([{"role": "user", "content": "hello, \u00fcber"}]),
    raw_data=to_raw({"numbers": [1, 1.0, True, None]}),
    head=2,
)
ANSWERED = EntryRecord(id=6, seq=2, created_at=200, conversation_id=1, kind="assistant", by_task=4)
EDITED = EntryRecord(
    id=8,
    seq=3,
    created_at=300,
    conversation_id=7,
    kind="edit",
    edits=(Edit(entry=2), Edit(entry=6, replace=to_raw([{"role": "assistant"}]))),
)
DONE = SubmissionRecord(
    id=3,
    conversation_id=1,
    type="input",
    status="done",
    digest="d",
    created_at=100,
    request_id="r",
    entry=2,
    answer=6,
)
QUEUED = SubmissionRecord(id=9, conversation_id=7, type="write", status="queued", digest="e", created_at=300)
ENDED = TaskRecord(
    id=4,
    conversation_id=1,
    kind="turn",
    version=1,
    created_at=100,
    state=Terminal(Completed(to_raw({"ok": True}))),
    nonce="n",
    started_at=100,
    ended_at=200,
)
PENDING = TaskRecord(
    id=10, conversation_id=7, kind="turn", version=1, created_at=300, state=Pending(phase="begin"), nonce="m"
)
PLAN = DocumentRecord(
    id=5,
    kind="plan",
    scope="conversation",
    scope_id=1,
    history="rewindable",
    fork="as_of",
    created_at=100,
    created_seq=1,
)
BASE, OPS = b'{"steps":[]}', b"[[1]]"
REPLY = MailReply(1, True, to_raw("done"))
BATCHES = [
    Batch(
        seq=1,
        at=100,
        next_id=6,
        conversations=[ROOT],
        entries=[ASKED],
        submissions=[msgspec.structs.replace(DONE, status="placed", answer=None)],
        tasks=[msgspec.structs.replace(ENDED, state=Pending(phase="begin"), ended_at=None)],
        documents=[DocumentWrite(PLAN, version=1, base=BASE)],
    ),
    Batch(
        seq=2,
        at=200,
        next_id=7,
        entries=[ANSWERED],
        submissions=[DONE],
        tasks=[ENDED],
        documents=[DocumentWrite(PLAN, version=1, ops=OPS)],
    ),
    Batch(
        seq=3,
        at=300,
        next_id=11,
        conversations=[FORK],
        entries=[EDITED],
        submissions=[QUEUED],
        tasks=[PENDING],
        replies=[REPLY],
    ),
]


async def make(path: Path) -> None:
    await _fill(SqliteStorage(path), partial(sqlite_mailbox.post, path))


async def make_jsonl(path: Path) -> None:
    await _fill(JsonlStorage(path), partial(jsonl_mailbox.post, path))


async def make_postgres(dsn: str) -> None:
    await _fill(PostgresStorage(dsn, SESSION), partial(postgres_mailbox.post, dsn, SESSION))


async def _fill(storage: SqliteStorage | JsonlStorage | PostgresStorage, post: Callable[..., int]) -> None:
    await storage.open(epoch=3, writer="golden writer", log_id="golden log", now=50)
    post("signal", {"answered": True}, now=60)
    post("signal", {"answered": False}, now=70)
    for batch in BATCHES:
        await storage.commit(batch)
    await storage.close()


def main() -> None:
    """A format is never made anew."""
    GOLDEN.mkdir(exist_ok=True)
    target, lines = GOLDEN / f"format-{FORMAT_VERSION}.gz", GOLDEN / f"jsonl-format-{FORMAT_VERSION}"
    tables = GOLDEN / f"postgres-layout-{LAYOUT}.sql"
    with tempfile.TemporaryDirectory() as directory:
        if not target.exists():
            path = Path(directory) / "store.db"
            asyncio.run(make(path))
            target.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        if not lines.exists():
            asyncio.run(make_jsonl(Path(directory) / "store"))
            shutil.copytree(Path(directory) / "store", lines)
    if not tables.exists():
        server = Server()
        try:
            asyncio.run(make_postgres(server.dsn()))
            tables.write_text(server.dump())
        finally:
            server.remove()


if __name__ == "__main__":
    main()
