"""Rules K117, K139: every scan goes by an index, and costs what it returns, not what is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import pytest

from perdure.kernel.records import Address, ConversationRecord, ForkPoint
from perdure.kernel.storage import DocumentWrite
from perdure.storage.sqlite import SqliteStorage
from perdure.storage.sqlite_reads import Reader
from perdure.testing.conformance import Line


async def opened(path: Path) -> Line:
    storage = SqliteStorage(path, durability="process")
    return Line(storage, await storage.open(writer="writer", log_id="log", now=1_000))


def reads() -> Iterator[tuple[str, Callable[[Reader], Any]]]:
    history = "history"
    yield history, lambda reader: reader.entries(reader.lineage(1), 5, 90, "ascending", 50)
    yield history, lambda reader: reader.entries(reader.lineage(1), 5, 90, "descending", 50)
    yield "head", lambda reader: reader.head(reader.lineage(1), 90)
    yield "request", lambda reader: reader.request(1, "r")
    for owner in (None, 3):
        yield f"conversations of {owner}", lambda reader, owner=owner: reader.conversations(owner, 2, 50)
    for conversation in (None, 1):
        for kind in (None, "k"):
            for live in (None, True, False):
                scan = partial(Reader.tasks, conversation_id=conversation, kind=kind, live=live, after=2, limit=50)
                yield f"tasks {conversation} {kind} {live}", scan
        for status in (None, "queued", "placed", "done"):
            scan = partial(Reader.submissions, conversation_id=conversation, status=status, after=2, limit=50)
            yield f"submissions {conversation} {status}", scan
    address = Address("plan", "conversation", 1)
    for at in (None, 5):
        yield f"document at {at}", lambda reader, at=at: reader.document(address, at)
        yield f"documents at {at}", lambda reader, at=at: reader.documents("conversation", 1, at)
    yield "mail", lambda reader: reader.mail(3, 50)
    yield "newest mail", Reader.newest_mail


# What may be sorted: documents alive in one scope, which is what is returned; conversations of one lineage.
_SORTED = ("documents at", "history", "head")


@pytest.mark.parametrize(("name", "read"), list(reads()))
async def test_no_read_scans_a_table(name: str, read: Callable[[Reader], Any], tmp_path: Path) -> None:
    line = await opened(tmp_path / "store.db")
    plan = DocumentWrite(line.document(), version=1, base=b"0")
    root = ConversationRecord(id=1, created_at=1)
    await line.commit(line.batch(conversations=[root], entries=[line.entry(1)], documents=[plan]))
    await line.storage.close()
    statements: list[str] = []
    reader = Reader(str(tmp_path / "store.db"), vfs=None, live=False)
    reader.run(Reader.newest_mail)
    assert reader._link is not None
    reader._link.set_exec_trace(lambda cursor, sql, values: bool(statements.append(sql)) or True)
    reader.run(read)
    reader._link.set_exec_trace(None)
    looked = [
        sql
        for sql in statements
        if sql.lstrip().startswith(("SELECT body", "SELECT id", "SELECT ops", "SELECT seq, v", "WITH"))
    ]
    looked += [sql for sql in statements if "mailbox" in sql]
    assert looked
    for sql in looked:
        values = (1,) * sql.count("?")
        for *_, detail in reader._link.execute(f"EXPLAIN QUERY PLAN {sql}", values):
            assert not str(detail).startswith("SCAN") or str(detail) == "SCAN chain", f"{sql}: {detail}"
            assert "TEMP B-TREE" not in str(detail) or name.startswith(_SORTED), f"{sql}: {detail}"
    reader.close()


def _steps(path: Path, read: Callable[[Reader], Any]) -> int:
    """How much SQLite did for a read, in hundreds of instructions of its machine."""
    reader = Reader(str(path), vfs=None, live=False)
    reader.run(read)
    assert isinstance(reader._link, apsw.Connection)
    count: list[None] = []
    reader._link.set_progress_handler(lambda: bool(count.append(None)), 100)
    reader.run(read)
    reader.close()
    return len(count)


async def test_a_page_at_the_end_of_a_long_history_costs_a_page(tmp_path: Path) -> None:
    costs: list[int] = []
    for hundreds in (2, 200):
        path = tmp_path / f"{hundreds}.db"
        line = await opened(path)
        await line.commit(line.batch(conversations=[ConversationRecord(id=1, created_at=1)]))
        for _ in range(hundreds):
            tasks = [line.task(1)] if line.seq < 3 else []
            await line.commit(line.batch(entries=[line.entry(1) for _ in range(100)], tasks=tasks))
        await line.storage.close()
        last = line.next_id
        costs.append(
            _steps(path, lambda reader, last=last: reader.entries(reader.lineage(1), 0, last, "descending", 50))
        )
        assert _steps(path, lambda reader: reader.tasks(None, None, True, 0, 50)) <= 2
        assert _steps(path, lambda reader: reader.head(reader.lineage(1), None)) <= 2
    assert costs[1] <= costs[0] + 2


async def test_a_page_at_the_end_of_a_thousand_forks_costs_a_page(tmp_path: Path) -> None:
    """K117: once the lineage is known, which takes one statement, as many steps as there are forks."""
    path = tmp_path / "store.db"
    line = await opened(path)
    entries = [line.entry(1)]
    conversations = [ConversationRecord(id=1, created_at=1)]
    for _ in range(1000):
        last = entries[-1]
        conversations.append(line.conversation(parent=ForkPoint(last.conversation_id, last.id)))
        entries.append(line.entry(conversations[-1].id))
    await line.commit(line.batch(conversations=conversations, entries=entries))
    await line.storage.close()
    reader = Reader(str(path), vfs=None, live=False)
    lineage = reader.run(lambda reader: reader.lineage(conversations[-1].id))[1]
    reader.close()
    assert len(lineage) == 1001
    assert _steps(path, lambda reader: reader.entries(lineage, 0, None, "descending", 50)) <= 50
    assert _steps(path, lambda reader: reader.entries(lineage, entries[900].id, None, "ascending", 50)) <= 50
    assert _steps(path, lambda reader: reader.lineage(conversations[-1].id)) <= 1000
    statements: list[str] = []
    reader = Reader(str(path), vfs=None, live=False)
    reader.run(Reader.newest_mail)
    assert reader._link is not None
    reader._link.set_exec_trace(lambda cursor, sql, values: bool(statements.append(sql)) or True)
    assert reader.run(lambda reader: reader.head(lineage, None))[1] is None
    assert sum("entries_heads" in sql for sql in statements) <= 5, "a head that is not there is not asked for a fork"
    reader.close()
