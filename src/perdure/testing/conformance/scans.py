"""Checks of the scans over conversations, tasks and submissions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from perdure.kernel.errors import InvalidRead
from perdure.kernel.records import (
    Completed,
    ConversationRecord,
    Sleeping,
    SubmissionRecord,
    TaskRecord,
    Terminal,
    to_raw,
)
from perdure.testing.conformance.subject import Subject, begun, refused

T = TypeVar("T")


async def _pages(scan: Callable[[int, int], Awaitable[list[T]]], id_of: Callable[[T], int]) -> list[T]:
    """Everything a scan finds, read two at a time; it must be the same as in one page."""
    found: list[T] = []
    while page := await scan(id_of(found[-1]) if found else 0, 2):
        assert len(page) <= 2
        found += page
    assert found == await scan(0, 1000)
    return found


async def conversations_are_found_by_owner(subject: Subject) -> None:
    """K139: those of one task, those of none, or all."""
    line = await begun(subject)
    task = line.task(1)
    owned = [line.conversation(owner=task.id) for _ in range(5)]
    free = [line.conversation() for _ in range(3)]
    await line.commit(line.batch(conversations=[*owned, *free], tasks=[task]))
    storage = line.storage
    root = await storage.conversation(1)

    async def scan_owned(after: int, limit: int) -> list[ConversationRecord]:
        return await storage.conversations(owner=task.id, after=after, limit=limit)

    async def scan_free(after: int, limit: int) -> list[ConversationRecord]:
        return await storage.conversations(owner=None, after=after, limit=limit)

    async def scan_all(after: int, limit: int) -> list[ConversationRecord]:
        return await storage.conversations(after=after, limit=limit)

    assert await _pages(scan_owned, lambda c: c.id) == owned
    assert await _pages(scan_free, lambda c: c.id) == [root, *free]
    assert await _pages(scan_all, lambda c: c.id) == [root, *owned, *free]
    await storage.close()


async def tasks_are_found_by_conversation_kind_and_life(subject: Subject) -> None:
    """K18, K139: as they are after their last change, in id order."""
    line = await begun(subject)
    other = line.conversation()
    tasks = [line.task(1 if n % 2 else other.id, kind="call" if n % 3 else "turn") for n in range(12)]
    await line.commit(line.batch(conversations=[other], tasks=tasks))
    for number in (2, 3, 7):
        tasks[number] = msgspec.structs.replace(tasks[number], state=Sleeping(phase="wait", until=9))
    await line.commit(line.batch(tasks=[tasks[number] for number in (2, 3, 7)]))
    for number in (0, 1, 2, 5):
        tasks[number] = msgspec.structs.replace(
            tasks[number], state=Terminal(outcome=Completed(to_raw({"n": number}))), ended_at=line.now
        )
    await line.commit(line.batch(tasks=[tasks[number] for number in (5, 0, 1, 2)]))
    storage = line.storage
    for conversation_id in (None, 1, other.id):
        for kind in (None, "call", "turn", "unknown"):
            for live in (None, True, False):

                async def scan(
                    after: int,
                    limit: int,
                    c: int | None = conversation_id,
                    k: str | None = kind,
                    v: bool | None = live,
                ) -> list[TaskRecord]:
                    return await storage.tasks(conversation_id=c, kind=k, live=v, after=after, limit=limit)

                expected = [
                    task
                    for task in tasks
                    if conversation_id in (None, task.conversation_id)
                    and kind in (None, task.kind)
                    and live in (None, task.live)
                ]
                assert await _pages(scan, lambda task: task.id) == expected
    await storage.close()


async def submissions_are_found_by_status_and_request(subject: Subject) -> None:
    """K139, K119: within their conversation, whatever became of them."""
    line = await begun(subject)
    other = line.conversation()
    all = [line.submission(1 if n % 2 else other.id, request_id=f"r{n // 2}") for n in range(8)]
    all.append(line.submission(1))
    await line.commit(line.batch(conversations=[other], submissions=all))
    for number, status in ((0, "placed"), (1, "placed"), (3, "done"), (4, "unanswered")):
        all[number] = msgspec.structs.replace(all[number], status=status)
    await line.commit(line.batch(submissions=[all[number] for number in (4, 0, 1, 3)]))
    storage = line.storage
    for conversation_id in (None, 1, other.id):
        for status in (None, "queued", "placed", "done", "unanswered"):

            async def scan(
                after: int, limit: int, c: int | None = conversation_id, s: Any = status
            ) -> list[SubmissionRecord]:
                return await storage.submissions(conversation_id=c, status=s, after=after, limit=limit)

            expected = [
                submission
                for submission in all
                if conversation_id in (None, submission.conversation_id) and status in (None, submission.status)
            ]
            assert await _pages(scan, lambda submission: submission.id) == expected
    assert await storage.request(1, "r1") == all[3]
    assert await storage.request(other.id, "r2") == all[4]
    assert await storage.request(1, "r9") is None
    assert await storage.request(line.next_id, "r1") is None
    await storage.close()


async def a_senseless_read_is_refused_and_harms_nothing(subject: Subject) -> None:
    """K131: a page of no records or of too many, an order that is none."""
    line = await begun(subject)
    storage = line.storage
    lineage = await storage.lineage(1)
    untyped: Any = storage
    for order in ("newest", "", None, 1):
        await refused(InvalidRead, untyped.entries(lineage, order=order))
    for live in ("yes", -1, 0.5):
        await refused(InvalidRead, untyped.tasks(live=live))
    for limit in (0, -1, 1001, 1.5, True):
        await refused(InvalidRead, untyped.entries(lineage, limit=limit))
        await refused(InvalidRead, untyped.tasks(limit=limit))
        await refused(InvalidRead, untyped.submissions(limit=limit))
        await refused(InvalidRead, untyped.conversations(limit=limit))
    await line.commit(line.batch(entries=[line.entry(1)]))
    await storage.close()


CHECKS = (
    conversations_are_found_by_owner,
    tasks_are_found_by_conversation_kind_and_life,
    submissions_are_found_by_status_and_request,
    a_senseless_read_is_refused_and_harms_nothing,
)
