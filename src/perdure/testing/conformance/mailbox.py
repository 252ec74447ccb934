"""Checks of the mailbox and of the size report."""

from __future__ import annotations

import asyncio

from perdure.kernel.errors import NotFound, StorageError
from perdure.kernel.records import (
    to_raw,
)
from perdure.kernel.storage import DocumentWrite, MailReply
from perdure.testing.conformance.subject import Line, Subject, begun, refused, soon


async def mail_is_answered_in_a_commit(subject: Subject) -> None:
    """K72, K75, K142: left before or while the store is open, it stays until a commit answers it, once."""
    line = await begun(subject)
    await line.storage.close()
    first = await subject.post("decision", {"allow": True}, now=5)
    line = await Line.open(subject)
    storage = line.storage
    second = await subject.post("signal", ["x"], now=6)
    (one, two) = await storage.mail()
    assert (one.id, one.kind, bytes(one.body), one.posted_at) == (first, "decision", b'{"allow":true}', 5)
    assert (two.id, two.kind, bytes(two.body), two.posted_at) == (second, "signal", b'["x"]', 6)
    assert first < second
    assert await storage.mail(after=first) == [two]
    assert await storage.mail(limit=1) == [one]
    assert await subject.reply(first) is None
    answer = MailReply(first, True, to_raw({"seq": 3}))
    await line.commit(line.batch(replies=[answer]))
    assert await subject.reply(first) == answer
    assert await subject.reply(second) is None
    assert await storage.mail() == [two]
    await refused(NotFound, subject.reply(second + 100))
    await refused(StorageError, storage.commit(line.batch(replies=[MailReply(first, False, to_raw(None))])))
    await storage.close()
    assert await subject.reply(first) == answer
    again = await Line.open(subject)
    assert await again.storage.mail() == [two]
    await again.storage.close()


async def the_owner_hears_of_mail(subject: Subject) -> None:
    """K74: of what waited when it began to listen, and of what comes while it is open."""
    line = await begun(subject)
    await subject.post("signal", 1, now=1)
    heard = asyncio.Event()
    line.storage.on_mail(heard.set)
    await soon(heard.wait())
    assert len(await line.storage.mail()) == 1
    heard.clear()
    await subject.post("signal", 2, now=2)
    await soon(heard.wait())
    assert len(await line.storage.mail()) == 2
    await line.storage.close()


async def a_size_counts_what_is_stored(subject: Subject) -> None:
    """K145: by what it is for."""
    line = await begun(subject)
    empty = await line.storage.size()
    await line.commit(
        line.batch(
            entries=[line.entry(1, data="x" * 1000)],
            submissions=[line.submission(1)],
            tasks=[line.task(1)],
            documents=[DocumentWrite(line.document(), version=1, base=b'"%s"' % (b"y" * 500))],
        )
    )
    full = await line.storage.size()
    assert full.entries >= empty.entries + 1000
    assert full.documents >= empty.documents + 500
    assert full.submissions > empty.submissions
    assert full.tasks > empty.tasks
    assert full.total >= full.entries
    await line.storage.close()


CHECKS = (
    mail_is_answered_in_a_commit,
    the_owner_hears_of_mail,
    a_size_counts_what_is_stored,
)
