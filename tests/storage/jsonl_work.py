"""A short life of a store with one of everything in it, and what must be in it after each commit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from perdure.kernel.contents import digest_of
from perdure.kernel.records import Completed, ConversationRecord, ForkPoint, Terminal, to_raw
from perdure.kernel.storage import Batch, Content, DocumentWrite, MailReply
from perdure.storage import jsonl_mailbox
from perdure.storage.jsonl import JsonlStorage
from perdure.storage.jsonl_reads import Reader
from perdure.storage.memory import MemoryStorage
from perdure.testing.conformance import Line

CONTENTS = [Content(digest_of(data), data) for data in (b"one", b"two" * 300, b"three")]
_DIGESTS = [content.digest for content in CONTENTS]

Dump = list[object]


async def opened(path: Path, *, fsync: bool = False, **options: Any) -> Line:
    storage = JsonlStorage(path, fsync=fsync)
    return Line(storage, await storage.open(writer="writer", log_id="log", now=1_000, **options))


def dump(read: Callable[..., Any], next_id: int) -> Iterator[Any]:
    """Everything that reads tell of a store, one call each."""
    for id in range(next_id):
        for kind in ("conversation", "entry", "submission", "task", "closure", "lineage"):
            yield read(kind, id)
        yield read("documents", "conversation", id)
    yield read("has_contents", _DIGESTS)
    yield read("contents", _DIGESTS)
    yield read("content_pins")


async def dump_memory(storage: MemoryStorage, next_id: int) -> Dump:
    found: Dump = [await value for value in dump(lambda name, *values: getattr(storage, name)(*values), next_id)]
    for id in range(next_id):
        for record in await storage.documents("conversation", id):
            found.append(await storage.document(record.address))
    return found


async def dump_jsonl(storage: JsonlStorage, next_id: int) -> Dump:
    defaults: dict[str, tuple[object, ...]] = {"documents": (None,), "content_pins": (0, 1000)}

    def look(reader: Any) -> Dump:
        assert isinstance(reader, Reader)
        read = lambda name, *values: getattr(reader, name)(*values, *defaults.get(name, ()))  # noqa: E731
        found: Dump = list(dump(read, next_id))
        for id in range(next_id):
            for record in reader.documents("conversation", id, None):
                found.append(reader.document(record.address, None))
        return found

    return await storage._read(look)


class Life:
    """Commits to a store and to the reference beside it."""

    def __init__(self, path: Path, *, fsync: bool) -> None:
        self.path = path
        self.fsync = fsync
        self.memory = MemoryStorage()
        self.dumps: dict[int, Dump] = {}
        """By commit."""
        self.answers: dict[int, int] = {}
        """Requests, and the commits that answered them."""
        self.last_id = 40
        self.note: Callable[[str], None] = lambda what: None
        """Told ``commit N`` and ``mail N`` once they are acknowledged."""

    async def begin(self) -> None:
        await self.memory.open(writer="reference", log_id="log", now=1)
        self.line = await opened(self.path, fsync=self.fsync)
        self.dumps[0] = await dump_memory(self.memory, self.last_id)

    async def end(self) -> None:
        await self.line.storage.close()
        await self.memory.close()

    async def commit(self, *batches: Batch) -> None:
        futures = [self.line.storage.commit(batch) for batch in batches]
        await asyncio.gather(*futures)
        for batch in batches:
            await self.memory.commit(batch)
            self.dumps[batch.seq] = await dump_memory(self.memory, self.last_id)
            self.answers |= {reply.mail_id: batch.seq for reply in batch.replies}
        self.note(f"commit {batches[-1].seq}")

    def post(self) -> int:
        id = self.memory.post("signal", {"n": 1}, now=5)
        assert jsonl_mailbox.post(self.path, "signal", {"n": 1}, now=5) == id
        self.note(f"mail {id}")
        return id

    async def live(self) -> None:
        line = self.line
        cut = msgspec.structs.replace
        await self.commit(line.batch(conversations=[ConversationRecord(id=1, created_at=1)]))
        other, task, plan = line.conversation(), line.task(1), line.document()
        asked = line.submission(1, request_id="asked")
        notes = cut(line.document("notes"), history="latest", fork="current")
        born = [
            DocumentWrite(plan, version=1, base=b"[0]"),
            DocumentWrite(notes, version=1, base=b'"%s"' % (b"x" * 40)),
        ]
        await self.commit(
            line.batch(
                conversations=[other],
                entries=[line.entry(1, head=True), line.entry(other.id, data="of the other")],
                tasks=[task],
                submissions=[asked],
                documents=born,
                contents=CONTENTS[:2],
                pins=[(7, _DIGESTS[0]), (8, _DIGESTS[1])],
            )
        )
        first = line.entry(1, data="x" * 600)
        changes = [DocumentWrite(each, version=1, ops=b"[1]") for each in (plan, notes)]
        await self.commit(line.batch(entries=[first], documents=changes, unpinned=[8]))
        mail = self.post()
        fork = line.conversation(parent=ForkPoint(1, first.id))
        await self.commit(
            line.batch(tasks=[cut(task, state=Terminal(Completed(to_raw([1]))), ended_at=3)], conversations=[fork]),
            line.batch(replies=[MailReply(mail, True, to_raw("yes"))], reclaimed=[_DIGESTS[1]]),
            line.batch(entries=[line.entry(fork.id)], contents=CONTENTS[1:], pins=[(9, _DIGESTS[2])]),
        )
        await self.commit(line.batch(documents=[DocumentWrite(notes, version=1, base=b'"new"', reclaim=True)]))
        await self.commit(line.batch(deleted=[other.id], submissions=[cut(asked, status="done")]))
        self.post()
        gone = [DocumentWrite(line.retired(plan), version=1), DocumentWrite(line.document(), version=1, base=b"{}")]
        await self.commit(line.batch(documents=gone))
        await self.commit(line.batch(entries=[line.entry(1)], reclaimed=_DIGESTS, unpinned=[7], progress=True))
