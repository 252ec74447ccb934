"""Checks of opening, owning, fencing and closing."""

from __future__ import annotations

from msgspec.structs import replace

from perdure.kernel.errors import StaleEpochError, StorageBusy, StorageError
from perdure.kernel.storage import FORMAT_VERSION, Batch, StoreInfo
from perdure.testing.conformance.subject import Line, Subject, begun, refused


async def a_new_store_is_empty(subject: Subject) -> None:
    """K24, K28, K171: nothing in it, its log id given, the root's id spent, epoch 1."""
    storage = subject.storage()
    info = await storage.open(writer="first", log_id="a random id", now=1_000)
    assert info == StoreInfo(format=FORMAT_VERSION, log_id="a random id", epoch=1, writer="first", seq=0, next_id=2)
    assert await storage.conversation(1) is None
    assert await storage.lineage(1) == ()
    assert await storage.tasks(live=True) == []
    assert await storage.mail() == []
    assert await storage.check() == []
    await storage.close()


async def reopening_keeps_everything_and_raises_the_epoch(subject: Subject) -> None:
    """K23, K170, K171: numbers go on where they were, ids are not given out again."""
    line = await begun(subject)
    entry = line.entry(1)
    await line.commit(line.batch(entries=[entry]))
    await line.storage.close()
    again = await Line.open(subject, writer="second")
    assert (again.info.epoch, again.info.writer) == (line.info.epoch + 1, "second")
    assert (again.info.seq, again.info.next_id) == (line.seq, line.next_id)
    assert again.info.log_id == line.info.log_id, "the log id is the store's, not the opening's"
    assert await again.storage.entry(entry.id) == entry
    await again.commit(again.batch(entries=[again.entry(1)]))
    await again.storage.close()


async def a_second_opener_is_refused_at_once(subject: Subject) -> None:
    """K168: while it is open; and it opens when it is closed."""
    line = await begun(subject)
    error = await refused(StorageBusy, subject.storage().open(writer="other", log_id="log", now=1_000))
    assert str(error), "it says who holds the store"
    await line.commit(line.batch(entries=[line.entry(1)]))
    await line.storage.close()
    await (await Line.open(subject)).storage.close()


async def an_epoch_must_be_newer_than_the_stored_one(subject: Subject) -> None:
    """K172: an older and an equal one are refused, with both sides named; nothing is changed by that."""
    line = await Line.open(subject, epoch=7, writer="seven")
    assert line.info.epoch == 7
    await line.storage.close()
    for epoch in (6, 7):
        error = await refused(StaleEpochError, Line.open(subject, epoch=epoch, writer="late"))
        assert isinstance(error, StaleEpochError)
        assert (error.mine, error.my_writer, error.stored, error.stored_writer) == (epoch, "late", 7, "seven")
    line = await Line.open(subject)
    assert line.info.epoch == 8
    await line.storage.close()
    line = await Line.open(subject, epoch=20)
    assert line.info.epoch == 20
    await line.storage.close()


async def a_superseded_writer_adds_nothing(subject: Subject) -> None:
    """K173: neither an epoch above nor another writer of the same one lets a commit through; later ones fail too."""
    line = await begun(subject)
    before = line.seq
    await subject.supersede(line.info.epoch + 1, "usurper")
    late, later = line.batch(entries=[line.entry(1)]), line.batch(entries=[line.entry(1)])
    first, second = line.storage.commit(late), line.storage.commit(later)
    error = await refused(StaleEpochError, first)
    assert isinstance(error, StaleEpochError)
    assert (error.stored, error.stored_writer) == (line.info.epoch + 1, "usurper")
    await refused(StorageError, second)
    await line.storage.close()
    again = await Line.open(subject)
    assert (again.info.seq, again.info.epoch) == (before, line.info.epoch + 2)
    await subject.supersede(again.info.epoch, "twin")
    await refused(StaleEpochError, again.commit(again.batch(entries=[again.entry(1)])))
    await again.storage.close()


async def reading_only_owns_nothing(subject: Subject) -> None:
    """K143, K159: no fence is written, no commit is taken; a store that is not there is not made."""
    await refused(StorageError, subject.storage().open(read_only=True, writer="reader", log_id="log", now=1_000))
    line = await begun(subject)
    await line.storage.close()
    reader = subject.storage()
    info = await reader.open(read_only=True, writer="reader", log_id="log", now=1_000)
    assert info.read_only
    assert (info.epoch, info.writer, info.seq) == (line.info.epoch, line.info.writer, line.seq)
    assert await reader.conversation(1) is not None
    try:
        reader.commit(Batch(seq=line.seq + 1, at=1_000, next_id=line.next_id))
    except StorageError:
        pass
    else:
        raise AssertionError("a store open for reading took a commit")
    await reader.close()
    again = await Line.open(subject)
    assert again.info.epoch == line.info.epoch + 1
    await again.storage.close()


async def a_closed_store_refuses(subject: Subject) -> None:
    """K147: close lets what was accepted settle, closing twice does nothing, and afterwards nothing is answered."""
    line = await begun(subject)
    futures = [line.storage.commit(line.batch(entries=[line.entry(1)])) for _ in range(5)]
    await line.storage.close()
    assert all(future.done() and future.exception() is None for future in futures)
    await line.storage.close()
    await refused(StorageError, line.storage.conversation(1))
    again = await Line.open(subject)
    assert again.info.seq == line.seq
    await again.storage.close()


async def a_commit_may_raise_the_epoch(subject: Subject) -> None:
    """Rule K207: it is stored under the present fence, and what comes later under the raised one."""
    line = await begun(subject)
    raised = line.info.epoch + 5
    await line.commit(replace(line.batch(entries=[line.entry(1)]), epoch=raised))
    # Never lowered, whatever a later commit says.
    await line.commit(replace(line.batch(entries=[line.entry(1)]), epoch=raised - 1))
    await line.commit(line.batch(entries=[line.entry(1)]))
    await line.storage.close()
    again = await Line.open(subject)
    assert again.info.epoch == raised + 1
    await again.commit(again.batch(entries=[again.entry(1)]))
    await again.storage.close()


CHECKS = (
    a_new_store_is_empty,
    reopening_keeps_everything_and_raises_the_epoch,
    a_second_opener_is_refused_at_once,
    an_epoch_must_be_newer_than_the_stored_one,
    a_superseded_writer_adds_nothing,
    a_commit_may_raise_the_epoch,
    reading_only_owns_nothing,
    a_closed_store_refuses,
)
