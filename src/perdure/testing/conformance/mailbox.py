"""Checks of the mailbox, of the size report and of the vacuum."""

from __future__ import annotations

import asyncio

from perdure.kernel.errors import NotFound, StorageError
from perdure.kernel.records import ForkPoint, to_raw
from perdure.kernel.storage import MAX_BIGGEST, DocumentWrite, MailReply
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


async def a_size_counts_rows_and_names_what_takes_most(subject: Subject) -> None:
    """K220: largest first, a bounded number, what forks show of deleted ones too."""
    line = await begun(subject)
    empty = (await line.storage.size()).rows
    made = [line.conversation() for _ in range(MAX_BIGGEST + 5)]
    entries = [line.entry(c.id, data="x" * 100 * n) for n, c in enumerate(made) for _ in range(2)]
    await line.commit(line.batch(conversations=made, entries=entries))
    await subject.post("test", "a request", now=5)
    size = await line.storage.size()
    assert size.mailbox >= len('"a request"')
    assert size.conversations > 0
    assert (size.rows.conversations, size.rows.entries, size.rows.mail) == (
        empty.conversations + len(made),
        empty.entries + len(entries),
        empty.mail + 1,
    )
    assert [each.id for each in size.biggest] == [c.id for c in made[::-1][:MAX_BIGGEST]]
    assert all(each.entries == 2 and each.bytes >= 200 * 5 and not each.deleted for each in size.biggest)
    fork = line.conversation(parent=ForkPoint(made[-1].id, entries[-1].id))
    await line.commit(line.batch(conversations=[fork]))
    await line.commit(line.batch(deleted=[made[-1].id]))
    biggest = (await line.storage.size()).biggest[0]
    assert (biggest.id, biggest.entries, biggest.deleted) == (made[-1].id, 2, True)
    await line.storage.close()


async def a_vacuum_changes_no_record(subject: Subject) -> None:
    """K146, K221, K223: nor what a commit after it needs."""
    line = await begun(subject)
    gone, kept = line.conversation(), line.conversation()
    entries = [line.entry(c.id, data="x" * 3000) for c in (gone, kept) for _ in range(20)]
    await line.commit(line.batch(conversations=[gone, kept], entries=entries))
    await line.commit(line.batch(deleted=[gone.id]))
    report = await line.storage.vacuum()
    assert report.freed == max(0, report.before - report.after)
    assert await line.storage.entries(await line.storage.lineage(kept.id)) == entries[20:]
    assert await line.storage.conversation(gone.id) is None
    assert await line.storage.check() == []
    later = line.entry(kept.id)
    await line.commit(line.batch(entries=[later]))
    await line.storage.close()
    reader = subject.storage()
    info = await reader.open(read_only=True, writer="reader", log_id="log", now=1)
    assert (info.seq, info.epoch) == (line.seq, line.info.epoch)
    assert await reader.entry(later.id) == later
    try:
        await reader.vacuum()
    except StorageError:
        pass
    else:
        raise AssertionError("a store that is open for reading only was vacuumed")
    await reader.close()


CHECKS = (
    mail_is_answered_in_a_commit,
    the_owner_hears_of_mail,
    a_size_counts_what_is_stored,
    a_size_counts_rows_and_names_what_takes_most,
    a_vacuum_changes_no_record,
)
