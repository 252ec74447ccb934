"""Checks of deletion: what goes, what forks keep, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from perdure.kernel.errors import StorageError
from perdure.kernel.records import (
    Completed,
    ConversationRecord,
    DocumentRecord,
    EntryRecord,
    ForkPoint,
    SubmissionRecord,
    TaskRecord,
    Terminal,
)
from perdure.kernel.storage import Batch, DocumentWrite, StoredDocument
from perdure.testing.conformance.subject import Line, Subject, begun, refused


@dataclass(frozen=True, slots=True)
class _Made:
    """A conversation with one of everything, nothing of it live."""

    conversation: ConversationRecord
    entry: EntryRecord
    task: TaskRecord
    submission: SubmissionRecord
    document: DocumentRecord
    """Of the conversation; it lives."""
    of_task: DocumentRecord


async def _made(line: Line, owner: int | None = None) -> _Made:
    conversation = line.conversation(owner=owner)
    task = line.task(conversation.id)
    of_task = msgspec.structs.replace(line.document("of task", scope_id=task.id), scope="task")
    made = _Made(
        conversation,
        line.entry(conversation.id, head=True),
        msgspec.structs.replace(task, state=Terminal(outcome=Completed()), ended_at=line.now),
        msgspec.structs.replace(line.submission(conversation.id, request_id="request"), type="write", status="done"),
        line.document(scope_id=conversation.id),
        of_task,
    )
    await line.commit(
        line.batch(
            conversations=[conversation],
            entries=[made.entry],
            tasks=[task],
            submissions=[made.submission],
            documents=[
                DocumentWrite(made.document, version=1, base=b'"value"'),
                DocumentWrite(of_task, version=1, base=b'"value"'),
            ],
        )
    )
    retired = DocumentWrite(line.retired(of_task), version=1)
    change = DocumentWrite(made.document, version=1, ops=b"[1]")
    await line.commit(line.batch(tasks=[made.task], documents=[retired, change]))
    return made


def _deleting(line: Line, *all: _Made) -> Batch:
    """As the kernel deletes: what lives is retired in the same commit."""
    retired = [DocumentWrite(line.retired(made.document), version=1) for made in all]
    return line.batch(documents=retired, deleted=[made.conversation.id for made in all])


async def _gone(line: Line, made: _Made) -> None:
    storage, id = line.storage, made.conversation.id
    assert await storage.conversation(id) is None
    assert await storage.closure(id) == []
    assert await storage.lineage(id) == ()
    assert await storage.request(id, "request") is None
    assert await storage.entry(made.entry.id) is None
    assert await storage.task(made.task.id) is None
    assert await storage.submission(made.submission.id) is None
    for record in (made.document, made.of_task):
        for at in (None, record.created_seq, line.seq):
            assert await storage.document(record.address, at=at) is None
            assert await storage.documents(record.scope, record.scope_id, at=at) == []
    assert id not in [record.id for record in await storage.conversations()]
    assert id not in [record.id for record in await storage.conversations(owner=made.conversation.owner)]
    assert await storage.tasks(conversation_id=id) == []
    assert await storage.submissions(conversation_id=id) == []


async def a_deleted_conversation_is_gone(subject: Subject) -> None:
    """K144, K192, K195: by every read, and with the space it took; what is beside it stays; a crash changes nothing."""
    line = await begun(subject)
    other = await _made(line)
    before = await line.storage.size()
    made = await _made(line)
    await line.commit(_deleting(line, made))
    await _gone(line, made)
    after = await line.storage.size()
    parts = [(size.entries, size.submissions, size.tasks, size.documents) for size in (before, after)]
    assert parts[0] == parts[1]
    next_id = line.next_id
    crashed = await subject.crash()
    await line.storage.close()
    for place in (subject, crashed):
        again = await Line.open(place)
        assert again.info.next_id == next_id, "no id is given twice"
        await _gone(again, made)
        storage = again.storage
        assert await storage.conversation(other.conversation.id) == other.conversation
        assert await storage.entry(other.entry.id) == other.entry
        assert await storage.task(other.task.id) == other.task
        assert await storage.request(other.conversation.id, "request") == other.submission
        found = await storage.document(other.document.address)
        assert found == StoredDocument(other.document, 1, b'"value"', [b"[1]"])
        assert await storage.check() == []
        await storage.close()


async def a_closure_is_what_tasks_own(subject: Subject) -> None:
    """K192: down to the last, and no fork that nobody owns."""
    line = await begun(subject)
    top = await _made(line)
    child = await _made(line, owner=top.task.id)
    below = [await _made(line, owner=child.task.id) for _ in range(3)]
    other = await _made(line)
    owned_fork = line.conversation(parent=ForkPoint(1, top.entry.id), owner=other.task.id)
    free_fork = line.conversation(parent=ForkPoint(top.conversation.id, top.entry.id))
    await line.commit(line.batch(conversations=[owned_fork, free_fork]))
    storage = line.storage
    all = [top, child, *below]
    found = await storage.closure(top.conversation.id)
    assert found[0] == top.conversation.id
    assert sorted(found) == [made.conversation.id for made in all]
    assert await storage.closure(child.conversation.id) == sorted(found)[1:]
    assert sorted(await storage.closure(other.conversation.id)) == [other.conversation.id, owned_fork.id]
    assert await storage.closure(free_fork.id) == [free_fork.id]
    assert await storage.closure(line.next_id) == []
    await line.commit(_deleting(line, child, *below))
    assert await storage.closure(top.conversation.id) == [top.conversation.id]
    for made in (child, *below):
        await _gone(line, made)
    await storage.close()


async def what_forks_show_stays(subject: Subject) -> None:
    """K196: through the newest entry that one of them shows, with the documents of then; it goes with the last."""
    line = await begun(subject)
    storage = line.storage
    empty = await storage.size()
    trunk = line.conversation()
    plan, notes = line.document(scope_id=trunk.id), line.document("notes", scope_id=trunk.id)
    notes = msgspec.structs.replace(notes, history="latest")
    born = [DocumentWrite(record, version=1, base=b"[]") for record in (plan, notes)]
    await line.commit(line.batch(conversations=[trunk], documents=born))
    entries: list[EntryRecord] = []
    states: list[StoredDocument | None] = []

    async def grow(*more: DocumentWrite) -> None:
        entries.append(line.entry(trunk.id, head=len(entries) == 1))
        changes = [DocumentWrite(record, version=1, ops=b"[%d]" % len(entries)) for record in (plan, notes)]
        await line.commit(line.batch(entries=entries[-1:], documents=[*changes, *more]))
        states.append(await storage.document(plan.address))

    for _ in range(4):
        await grow()
    late = line.document("late", scope_id=trunk.id)
    await grow(DocumentWrite(late, version=1, base=b"0"))
    # One forked at the fourth entry; one from that at the third, which it inherited; one from there at the second.
    fork = line.conversation(parent=ForkPoint(trunk.id, entries[3].id))
    await line.commit(line.batch(conversations=[fork]))
    second = line.conversation(parent=ForkPoint(fork.id, entries[2].id))
    await line.commit(line.batch(conversations=[second]))
    third = line.conversation(parent=ForkPoint(second.id, entries[1].id))
    await line.commit(line.batch(conversations=[third], entries=[line.entry(fork.id)]))

    async def shown(record: ConversationRecord) -> list[EntryRecord]:
        return await storage.entries(await storage.lineage(record.id))

    async def kept(count: int) -> None:
        """The trunk is deleted, and its first entries are there."""
        assert await storage.conversation(trunk.id) is None
        assert await storage.lineage(trunk.id) == ()
        assert await storage.closure(trunk.id) == []
        assert trunk.id not in [record.id for record in await storage.conversations()]
        assert [await storage.entry(entry.id) for entry in entries] == entries[:count] + [None] * (5 - count)
        for entry, state in zip(entries[:count], states, strict=False):
            found = await storage.document(plan.address, at=entry.seq)
            assert found == state
            assert await storage.documents("conversation", trunk.id, at=entry.seq) == [plan]
        for record in (plan, notes, late):
            assert await storage.document(record.address) is None
        assert await storage.documents("conversation", trunk.id) == []
        assert await storage.check() == []

    before = {record.id: await shown(record) for record in (fork, second, third)}
    retired = [DocumentWrite(line.retired(record), version=1) for record in (plan, notes, late)]
    await line.commit(line.batch(documents=retired, deleted=[trunk.id]))
    await kept(4)
    assert {record.id: await shown(record) for record in (fork, second, third)} == before
    assert await storage.head(await storage.lineage(third.id)) == entries[1]
    later = line.conversation(parent=ForkPoint(fork.id, entries[0].id))
    await line.commit(line.batch(conversations=[later]))
    assert await shown(later) == entries[:1]
    await line.commit(line.batch(deleted=[fork.id]))
    await kept(3)
    await line.commit(line.batch(deleted=[second.id]))
    await kept(2)
    assert await shown(third) == entries[:2]
    await storage.close()
    line = await Line.open(subject)
    storage = line.storage
    await kept(2)
    await line.commit(line.batch(deleted=[third.id]))
    await kept(1)
    assert await shown(later) == entries[:1]
    await line.commit(line.batch(deleted=[later.id]))
    await kept(0)
    size = await storage.size()
    assert (size.entries, size.documents) == (empty.entries, empty.documents)
    assert [record.id for record in await storage.conversations()] == [1]
    await storage.close()


async def a_fork_that_goes_too_keeps_nothing(subject: Subject) -> None:
    """K192, K196: a conversation and its forks deleted together leave nothing; what is handed over after is stored."""
    line = await begun(subject)
    made = await _made(line)
    at = ForkPoint(made.conversation.id, made.entry.id)
    fork, other = line.conversation(parent=at), line.conversation(parent=at)
    await line.commit(line.batch(conversations=[fork, other]))
    retired = [DocumentWrite(line.retired(made.document), version=1)]
    # In whichever order they are told, and with the next commit on its heels.
    first = line.storage.commit(line.batch(documents=retired, deleted=[fork.id, made.conversation.id, other.id]))
    entry = line.entry(1)
    second = line.storage.commit(line.batch(entries=[entry]))
    await first
    await second
    await _gone(line, made)
    assert await line.storage.lineage(fork.id) == await line.storage.lineage(other.id) == ()
    assert await line.storage.entry(entry.id) == entry
    await line.storage.close()


async def what_is_live_is_not_deleted(subject: Subject) -> None:
    """K144, K193: nor what is not there, or deleted already; the store is as it was."""
    line = await begun(subject)
    made = await _made(line)
    id = made.conversation.id
    live, queued = await _made(line), await _made(line)
    task, submission = line.task(live.conversation.id), line.submission(queued.conversation.id)
    await line.commit(line.batch(tasks=[task], submissions=[submission]))
    gone = await _made(line)
    fork = line.conversation(parent=ForkPoint(gone.conversation.id, gone.entry.id))
    await line.commit(line.batch(conversations=[fork]))
    await line.commit(_deleting(line, gone))
    seq = line.seq
    await line.storage.close()
    wrong: dict[str, Callable[[Line], Batch]] = {
        "one with a live task": lambda line: _deleting(line, made, live),
        "one with an open submission": lambda line: _deleting(line, queued, made),
        "one in which a document lives": lambda line: line.batch(deleted=[id]),
        "one that is not there": lambda line: line.batch(deleted=[line.id()]),
        "one that is deleted": lambda line: line.batch(deleted=[gone.conversation.id]),
    }
    for name, batch in wrong.items():
        line = await Line.open(subject)
        try:
            await refused(StorageError, line.storage.commit(batch(line)))
        except AssertionError as error:
            raise AssertionError(f"{name} was deleted") from error
        await line.storage.close()
        line = await Line.open(subject)
        assert line.info.seq == seq, name
        assert await line.storage.conversation(id) == made.conversation
        assert await line.storage.entry(made.entry.id) == made.entry
        assert await line.storage.check() == []
        await line.storage.close()


CHECKS = (
    a_deleted_conversation_is_gone,
    a_closure_is_what_tasks_own,
    what_forks_show_stays,
    a_fork_that_goes_too_keeps_nothing,
    what_is_live_is_not_deleted,
)
