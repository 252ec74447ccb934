"""Every backend answers as MemoryStorage does, whatever was written and read before (rules K137 to K142, K148)."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from postgres_server import Server
from storage_subjects import JsonlSubject, MemorySubject, PostgresSubject, SqliteSubject

from perdure.kernel.contents import digest_of
from perdure.kernel.errors import InvalidRead
from perdure.kernel.records import (
    Aborted,
    ConversationRecord,
    DocumentRecord,
    EntryRecord,
    ForkPoint,
    Running,
    SubmissionRecord,
    TaskRecord,
    Terminal,
    to_raw,
)
from perdure.kernel.storage import Batch, Content, DocumentWrite, MailReply
from perdure.testing.conformance import Line

numbers = st.integers(0, 1 << 30)
cut = msgspec.structs.replace


class TwoStores(RuleBasedStateMachine):
    make: Callable[[Path], SqliteSubject | JsonlSubject | PostgresSubject]

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = Path(tempfile.mkdtemp())
        self.subject = self.make(self.directory)
        self.memory = MemorySubject()
        self.names = 0
        self.opened = 0
        self.conversations = [1]
        self.entries: list[EntryRecord] = []
        self.submissions: dict[int, SubmissionRecord] = {}
        self.tasks: dict[int, TaskRecord] = {}
        self.documents: dict[int, DocumentRecord] = {}
        self.mail: list[int] = []
        self.answered = 0
        self.deleted: set[int] = set()
        self.contents = [Content(digest_of(data), data) for data in (b"", b"x" * 500, b"one", b"two")]
        self._open()
        self._commit([self.line.batch(conversations=[ConversationRecord(id=1, created_at=1)])])

    def teardown(self) -> None:
        self._close()
        self.loop.close()
        shutil.rmtree(self.directory)

    def _run(self, awaitable: Awaitable[Any]) -> Any:
        async def soon() -> Any:
            async with asyncio.timeout(60):
                return await awaitable

        return self.loop.run_until_complete(soon())

    def _open(self) -> None:
        self.opened += 1
        writer = f"writer {self.opened}"
        self.line: Line = self._run(Line.open(self.memory, writer=writer))
        self.other: Line = self._run(Line.open(self.subject, writer=writer))
        assert self.line.info == self.other.info

    def _close(self) -> None:
        self._run(self.line.storage.close())
        self._run(self.other.storage.close())

    def _commit(self, batches: list[Batch]) -> None:
        async def both() -> None:
            futures = [line.storage.commit(batch) for line in (self.line, self.other) for batch in batches]
            await asyncio.gather(*futures)

        self._run(both())

    def _same(self, read: str, *args: Any, **kwargs: Any) -> Any:
        async def ask(line: Line) -> Any:
            try:
                return await getattr(line.storage, read)(*args, **kwargs)
            except InvalidRead as error:
                return str(error)

        expected, found = self._run(ask(self.line)), self._run(ask(self.other))
        assert found == expected, f"{read}{args}{kwargs}"
        return expected

    # --- writing -----------------------------------------------------------------------------------------------

    @rule(choices=st.lists(st.lists(st.tuples(st.integers(0, 7), numbers), max_size=6), min_size=1, max_size=4))
    def commit(self, choices: list[list[tuple[int, int]]]) -> None:
        """A few commits, handed over together."""
        self._commit([self._batch(parts) for parts in choices])

    def _batch(self, parts: list[tuple[int, int]]) -> Batch:
        line = self.line
        conversations: list[ConversationRecord] = []
        entries: list[EntryRecord] = []
        submissions: dict[int, SubmissionRecord] = {}
        tasks: dict[int, TaskRecord] = {}
        documents: dict[int, DocumentWrite] = {}
        for what, number in parts:
            conversation = self.conversations[number % len(self.conversations)]
            if what == 0:
                parent = self.entries[number % len(self.entries)] if self.entries and number % 3 else None
                fork = None if parent is None else ForkPoint(parent.conversation_id, parent.id)
                owner = number % 4 or None
                conversations.append(line.conversation(parent=fork, owner=owner))
                self.conversations.append(conversations[-1].id)
            elif what in (1, 2):
                entries.append(line.entry(conversation, data={"n": number}, head=number % 5 == 0))
                self.entries.append(entries[-1])
            elif what == 3:
                self.names += 1
                new = line.submission(conversation, request_id=f"request {self.names}" if number % 2 else None)
                submissions[new.id] = self.submissions[new.id] = new
            elif what == 4 and self.submissions:
                old = list(self.submissions.values())[number % len(self.submissions)]
                status = ("queued", "placed", "done", "unanswered")[number % 4]
                submissions[old.id] = self.submissions[old.id] = cut(old, status=status)
            elif what == 5:
                task = line.task(conversation, kind=f"kind {number % 3}")
                if self.tasks and number % 2:
                    task = list(self.tasks.values())[number % len(self.tasks)]
                state = Terminal(Aborted("no")) if number % 3 == 0 else Running(phase=f"p{number}")
                tasks[task.id] = self.tasks[task.id] = cut(task, state=state)
            else:
                self._write(documents, number)
        return line.batch(
            conversations=conversations,
            entries=entries,
            submissions=list(submissions.values()),
            tasks=list(tasks.values()),
            documents=list(documents.values()),
        )

    def _write(self, documents: dict[int, DocumentWrite], number: int) -> None:
        line = self.line
        address = ("plan", 1 + number % 2, "" if number % 3 else "key")
        if address[1] in self.deleted:
            return
        alive = [d for d in self.documents.values() if d.retired_seq is None and (d.kind, d.scope_id, d.key) == address]
        value = b"%d" % number
        if not alive:
            record = line.document(address[0], scope_id=address[1], key=address[2])
            documents[record.id] = DocumentWrite(record, version=1, base=value)
        elif alive[0].id not in documents:
            (record,) = alive
            kind = number % 7
            if kind == 0:
                record = line.retired(record)
                documents[record.id] = DocumentWrite(record, version=1)
            elif kind == 1:
                documents[record.id] = DocumentWrite(record, version=2, base=value, reclaim=number % 2 == 0)
            else:
                documents[record.id] = DocumentWrite(record, version=2, ops=b"[%b]" % value)
        else:
            return
        self.documents[record.id] = record

    @rule(numbers=st.lists(numbers, min_size=1, max_size=3))
    def delete(self, numbers: list[int]) -> None:
        """K144, K196: conversations with what they own, if none of it is live; their forks may stay."""
        gone: set[int] = set()
        for number in numbers:
            closure = set(self._same("closure", self.conversations[number % len(self.conversations)]))
            live = {task.conversation_id for task in self.tasks.values() if task.live}
            live |= {record.conversation_id for record in self.submissions.values() if not record.settled}
            if 1 not in closure and not closure & live:
                gone |= closure
        retired: list[DocumentWrite] = []
        for record in list(self.documents.values()):
            if record.scope_id in gone and record.retired_seq is None:
                self.documents[record.id] = self.line.retired(record)
                retired.append(DocumentWrite(self.documents[record.id], version=1))
        self._commit([self.line.batch(documents=retired, deleted=sorted(gone, reverse=True))])
        self.deleted |= gone
        self.conversations = [id for id in self.conversations if id not in gone]
        self.entries = [entry for entry in self.entries if entry.conversation_id not in gone]
        self.tasks = {id: task for id, task in self.tasks.items() if task.conversation_id not in gone}
        self.submissions = {id: s for id, s in self.submissions.items() if s.conversation_id not in gone}
        for id in gone:
            assert self._same("conversation", id) is None
            assert self._same("lineage", id) == ()

    @rule(choices=st.lists(st.lists(st.tuples(st.integers(0, 4), numbers), max_size=4), min_size=1, max_size=3))
    def change_contents(self, choices: list[list[tuple[int, int]]]) -> None:
        """K204, K206: a few commits, handed over together."""
        stored = {content.digest for pinned in (True, False) for content in self._same("content_scan", pinned=pinned)}
        batches: list[Batch] = []
        for parts in choices:
            contents: list[Content] = []
            pins: list[tuple[int, str]] = []
            unpinned: list[int] = []
            reclaimed: list[str] = []
            for what, number in parts:
                content = self.contents[number % len(self.contents)]
                if what == 0:
                    contents.append(content)
                elif what == 1:
                    unpinned.append(1 + number % 3)
                elif what == 2:
                    reclaimed.append(content.digest)
                else:
                    pins.append((1 + number % 3, content.digest))
            # What may have gone with a commit of the same group is not pinned.
            there = {content.digest for content in contents} | (stored if not batches else set[str]())
            pins = [pin for pin in pins if pin[1] in there]
            batches.append(self.line.batch(contents=contents, pins=pins, unpinned=unpinned, reclaimed=reclaimed))
        self._commit(batches)
        self._same("content_pins")
        digests = [content.digest for content in self.contents]
        assert self._same("has_contents", digests) == set(self._same("contents", digests))

    @rule(number=numbers, limit=st.integers(1, 3))
    def scan_contents(self, number: int, limit: int) -> None:
        after = self.contents[number % len(self.contents)].digest
        for pinned in (True, False):
            self._same("content_scan", pinned=pinned, after=after, limit=limit)
        self._same("content_pins", after=number % 4, limit=limit)

    @rule(number=numbers)
    def post(self, number: int) -> None:
        ids = {self._run(s.post("signal", {"n": number}, now=number)) for s in (self.memory, self.subject)}
        assert len(ids) == 1
        self.mail.append(ids.pop())

    @rule(number=numbers)
    def answer(self, number: int) -> None:
        if self.answered < len(self.mail):
            reply = MailReply(self.mail[self.answered], number % 2 == 0, to_raw({"n": number}))
            self.answered += 1
            self._commit([self.line.batch(replies=[reply])])
            for subject in (self.memory, self.subject):
                assert self._run(subject.reply(reply.mail_id)) == reply

    @rule()
    def reopen(self) -> None:
        self._close()
        self._open()

    @rule()
    def crash_and_reopen(self) -> None:
        """K130: what a kill leaves is what was acknowledged."""
        crashed = self._run(self.subject.crash())
        self._close()
        self.subject = crashed
        self._open()

    @rule()
    def vacuum(self) -> None:
        """K221: no read tells that it was."""
        self._run(self.other.storage.vacuum())

    # --- reading -----------------------------------------------------------------------------------------------

    @rule(number=numbers, first=numbers, last=numbers, limit=st.integers(1, 6))
    def read_a_history(self, number: int, first: int, last: int, limit: int) -> None:
        lineage = self._same("lineage", self.conversations[number % len(self.conversations)])
        low, high = first % self.line.next_id, last % self.line.next_id
        for order in ("ascending", "descending"):
            self._same("entries", lineage, order=order)
            self._same("entries", lineage, first=low, last=high, order=order, limit=limit)
        self._same("head", lineage)
        self._same("head", lineage, last=high)

    @rule(number=numbers, after=numbers, limit=st.integers(1, 6), live=st.sampled_from([None, True, False]))
    def scan(self, number: int, after: int, limit: int, live: bool | None) -> None:
        page = {"after": after % self.line.next_id, "limit": limit}
        conversation = self.conversations[number % len(self.conversations)] if number % 2 else None
        kind = f"kind {number % 4}" if number % 3 else None
        self._same("tasks", conversation_id=conversation, kind=kind, live=live, **page)
        status = (None, "queued", "placed", "done", "unanswered")[number % 5]
        self._same("submissions", conversation_id=conversation, status=status, **page)
        self._same("conversations", owner=number % 4 or None, **page)
        self._same("conversations", **page)
        self._same("request", conversation or 1, f"request {number % (self.names + 1)}")

    @rule(first=numbers)
    def read_each(self, first: int) -> None:
        """By id, what is deleted and what forks have kept of it too."""
        for id in range(first % self.line.next_id, min(first % self.line.next_id + 40, self.line.next_id)):
            for read in ("conversation", "entry", "task", "submission", "closure"):
                self._same(read, id)

    @rule(number=numbers)
    def read_documents(self, number: int) -> None:
        for at in (None, number % (self.line.seq + 1)):
            for scope_id in (1, 2):
                for record in self._same("documents", "conversation", scope_id, at=at):
                    self._same("document", record.address, at=at)

    @rule(number=numbers)
    def read_mail(self, number: int) -> None:
        self._same("mail")
        self._same("mail", after=number % (len(self.mail) + 1), limit=1 + number % 3)

    @invariant()
    def all_is_well(self) -> None:
        assert self._run(self.other.storage.check()) == []
        sizes = [self._run(line.storage.size()) for line in (self.line, self.other)]
        assert cut(sizes[0], total=0, free=0, log=0) == cut(sizes[1], total=0, free=0, log=0)


class SqliteAndMemory(TwoStores):
    make = staticmethod(lambda directory: SqliteSubject(directory / "store.db", "process"))


class JsonlAndMemory(TwoStores):
    make = staticmethod(lambda directory: JsonlSubject(directory / "store"))


class PostgresAndMemory(TwoStores):
    server: ClassVar[Server]
    make = staticmethod(lambda _: PostgresSubject(PostgresAndMemory.server))


@pytest.fixture
def serving(postgres: Server) -> None:
    PostgresAndMemory.server = postgres


TestSqlite = SqliteAndMemory.TestCase
TestSqlite.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestJsonl = JsonlAndMemory.TestCase
TestJsonl.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestPostgres = pytest.mark.usefixtures("serving")(PostgresAndMemory.TestCase)
TestPostgres.settings = settings(max_examples=6, stateful_step_count=20, deadline=None)
