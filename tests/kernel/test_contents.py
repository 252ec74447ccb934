"""Contents by hash of a session: putting, pins, what rides in a commit, and reclaiming beside commits (K200-K206)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

import pytest

from kernel.samples import Note, conversation
from kernel.stores import HeldStorage, rest
from perdure.kernel.contents import MAX_RIDING_BYTES, Contents, digest_of
from perdure.kernel.context import Context
from perdure.kernel.errors import (
    ContextCancelled,
    InsideTransaction,
    InvalidRead,
    InvalidTransition,
    NotFound,
    SessionClosed,
    SessionFailed,
    StaleEpochError,
    StorageError,
)
from perdure.kernel.session import Session
from perdure.kernel.storage import MAX_CONTENT_BYTES, MAX_CONTENTS, MAX_DIGESTS
from perdure.storage.memory import MemoryStorage

CALL, OTHER = 7, 8


def some(*texts: str) -> dict[str, bytes]:
    return {digest_of(text.encode()): text.encode() for text in texts}


def digest(text: str) -> str:
    return digest_of(text.encode())


ABC = [digest(text) for text in "abc"]
A, B, C = ABC


def looking(*digests: str) -> Callable[[], AsyncIterator[Sequence[str]]]:
    """As somebody who found that these are referred to, one a look."""

    async def referenced() -> AsyncIterator[Sequence[str]]:
        for digest in digests:
            await asyncio.sleep(0)
            yield [digest]

    return referenced


@asynccontextmanager
async def opened(storage: MemoryStorage | None = None) -> AsyncGenerator[Session]:
    async with Session.open(storage or MemoryStorage()) as session:
        await conversation(session, root=True)
        yield session


async def unpin(session: Session, pin: int) -> None:
    async with session.commit() as tx:
        tx.unpin_contents(pin)


# --- putting and getting ---------------------------------------------------------------------------------------


async def test_what_is_put_is_there_and_pinned_k200_k202() -> None:
    storage = HeldStorage()
    async with opened(storage) as session:
        contents = session.contents
        assert await contents.has(ABC) == set()
        await contents.put(some("a", "b"), pin=CALL)
        assert await contents.has(ABC) == {A, B}
        assert await contents.get(A) == b"a"
        assert await contents.get_many(ABC) == some("a", "b")
        assert await contents.pins() == [CALL]
        with pytest.raises(NotFound, match=f"there is no content {C}"):
            await contents.get(C)
        assert not storage.batches[-1].progress, "it is flushed before put returns"
        await contents.put({}, pin=CALL)
        commits = session.seq
        await contents.put(some("b", "c"), pin=OTHER)
        assert session.seq == commits + 1
        assert {content.digest for content in storage.batches[-1].contents} == {C}, "only what is missing"
        assert await contents.pins() == [CALL, OTHER]
        assert session.failed is None


async def test_putting_what_is_stored_pins_it_without_a_flush_k204() -> None:
    storage = HeldStorage()
    async with opened(storage) as session:
        await session.contents.put(some("a"), pin=CALL)
        await session.contents.put(some("a"), pin=OTHER)
        assert storage.batches[-1].progress
        await unpin(session, CALL)
        assert storage.batches[-1].progress
        assert await session.contents.reclaim(looking()) == 0
        await unpin(session, OTHER)
        assert await session.contents.reclaim(looking()) == 1


async def test_bytes_are_held_against_their_digest_k201() -> None:
    async with opened() as session:
        before = session.seq
        for wrong in ({A: b"b"}, {"no digest": b"a"}, {A.upper(): b"a"}, some("b") | {A: b""}):
            with pytest.raises(ValueError, match="are not content"):
                await session.contents.put(wrong, pin=CALL)
            async with session.commit() as tx:
                for name, data in wrong.items():
                    if name != B:
                        with pytest.raises(ValueError, match="are not content"):
                            tx.put_content(name, data)
        assert session.seq == before
        assert await session.contents.has(ABC) == set()
        assert await session.contents.pins() == []


async def test_sizes_are_bounded_k200() -> None:
    large = b"x" * (MAX_CONTENT_BYTES + 1)
    async with opened() as session:
        contents = session.contents
        with pytest.raises(ValueError, match="keep a file in chunks"):
            await contents.put({digest_of(large): large}, pin=CALL)
        many = {digest_of(data): data for n in range(65) if (data := bytes([n]) * MAX_CONTENT_BYTES)}
        with pytest.raises(ValueError, match="put them in parts"):
            await contents.put(many, pin=CALL)
        del many[next(iter(many))]
        before = session.seq
        await contents.put(many, pin=CALL)
        assert session.seq == before + 16, "in commits of a bounded size"
        assert await contents.get_many(many) == many
        for ask, most in ((contents.has, MAX_DIGESTS), (contents.get_many, MAX_CONTENTS)):
            with pytest.raises(InvalidRead, match="ask in parts"):
                await ask([digest(str(n)) for n in range(most + 1)])
        for ask in (contents.has, contents.get_many):
            with pytest.raises(InvalidRead, match="no digest"):
                await ask(["a"])
        for pin in (0, -1, 2**63):
            with pytest.raises(ValueError, match="a pin is a positive number"):
                await contents.put(some("a"), pin=pin)
            with pytest.raises(ValueError, match="a pin is a positive number"):
                await contents.has(ABC, pin=pin)
        assert session.failed is None


async def test_many_small_ones_are_put_at_once_k202() -> None:
    async with opened() as session:
        many = some(*map(str, range(MAX_DIGESTS + 5)))
        await session.contents.put(many, pin=CALL)
        assert len(await session.contents.has(list(many)[-100:])) == 100
        assert await session.contents.reclaim(looking()) == 0


# --- in a commit -----------------------------------------------------------------------------------------------


async def test_a_small_change_is_one_commit_k203() -> None:
    storage = HeldStorage()
    async with opened(storage) as session:
        await session.contents.put(some("a"), pin=CALL)
        before = session.seq
        async with session.commit(conversation_id=1) as tx:
            tx.append(Note(n=1))
            tx.put_content(B, b"b")
            tx.put_content(B, b"b")
            tx.put_content(A, b"a")
            tx.unpin_contents(CALL)
        assert session.seq == before + 1
        assert not storage.batches[-1].progress
        assert await session.contents.get_many(ABC) == some("a", "b")
        assert await session.contents.pins() == []


async def test_a_content_alone_is_a_commit_that_is_flushed_k203() -> None:
    storage = HeldStorage()
    async with opened(storage) as session:
        async with session.commit() as tx:
            tx.progress = True
            tx.put_content(A, b"a")
        assert not storage.batches[-1].progress


async def test_what_rides_in_a_commit_is_bounded_k203() -> None:
    async with opened() as session, session.commit() as tx:
        half, more = b"x" * (MAX_RIDING_BYTES // 2), b"y" * (MAX_RIDING_BYTES // 2)
        for data in (half, more, half):
            tx.put_content(digest_of(data), data)
        with pytest.raises(ValueError, match="put them before it"):
            tx.put_content(A, b"a")


async def test_a_transaction_that_rolls_back_stores_none_and_unpins_none_k203() -> None:
    async with opened() as session:
        await session.contents.put(some("b"), pin=CALL)
        await session.contents.has([B], pin=OTHER)
        with pytest.raises(ZeroDivisionError):
            async with session.commit() as tx:
                tx.put_content(A, b"a")
                tx.unpin_contents(CALL)
                tx.unpin_contents(OTHER)
                raise ZeroDivisionError
        assert await session.contents.has(ABC) == {B}
        assert await session.contents.pins() == [CALL]
        await unpin(session, CALL)
        assert await session.contents.reclaim(looking()) == 0, "the other one holds it"


async def test_only_settled_contents_are_seen_k61() -> None:
    storage = HeldStorage()
    async with opened(storage) as session:
        storage.hold()
        put = asyncio.ensure_future(session.contents.put(some("a"), pin=CALL))
        await rest()
        assert not put.done()
        assert await session.contents.has(ABC) == set()
        await storage.settle()
        await put
        assert await session.contents.has(ABC) == {A}


async def test_it_is_refused_inside_a_transaction_and_once_closed_k57_k81() -> None:
    async def refused(error: type[Exception], contents: Contents) -> None:
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: contents.has(ABC),
            lambda: contents.get(A),
            lambda: contents.get_many(ABC),
            contents.pins,
            lambda: contents.put(some("a"), pin=CALL),
            lambda: contents.reclaim(looking()),
        ]
        for call in calls:
            with pytest.raises(error):
                await call()

    async with opened() as session:
        async with session.commit():
            await refused(InsideTransaction, session.contents)
        context = Context()
        context.cancel()
        with pytest.raises(ContextCancelled):
            await session.contents.put(some("a"), pin=CALL, context=context)
        with pytest.raises(ContextCancelled):
            await session.contents.reclaim(looking(), context=context)
        assert session.failed is None
    await refused(SessionClosed, session.contents)


async def test_a_put_that_fails_fails_the_session_k128() -> None:
    storage = HeldStorage()
    async with Session.open(storage) as session:
        await conversation(session, root=True)
        storage.hold()
        put = asyncio.ensure_future(session.contents.put(some("a"), pin=CALL))
        await rest()
        await storage.refuse(StorageError("no"))
        with pytest.raises(StorageError, match="no"):
            await put
        with pytest.raises(SessionFailed):
            await session.contents.has(ABC)


async def test_a_superseded_writer_puts_and_reclaims_nothing_k202() -> None:
    for what in ("put", "reclaim"):
        storage = MemoryStorage()
        async with Session.open(storage) as session:
            await conversation(session, root=True)
            async with session.commit() as tx:
                tx.put_content(A, b"a")
            storage._contents.epoch += 1
            with pytest.raises(StaleEpochError):
                if what == "put":
                    await session.contents.put(some("b"), pin=CALL)
                else:
                    await session.contents.reclaim(looking())
        assert storage._contents.contents == some("a")


# --- pins over a crash -----------------------------------------------------------------------------------------


async def test_pins_last_over_a_crash_and_what_has_held_does_not_k204() -> None:
    storage = MemoryStorage()
    async with opened(storage) as session:
        async with session.commit() as tx:
            tx.put_content(B, b"b")
        await session.contents.put(some("a"), pin=CALL)
        await session.contents.has([B], pin=OTHER)
        crashed = storage.snapshot()
        assert await session.contents.reclaim(looking()) == 0
    async with Session.open(crashed) as session:
        assert await session.contents.pins() == [CALL]
        assert await session.contents.reclaim(looking()) == 1
        assert await session.contents.has(ABC) == {A}
        await unpin(session, CALL)
        assert await session.contents.reclaim(looking()) == 1


# --- reclaiming ------------------------------------------------------------------------------------------------


async def test_what_nobody_refers_to_is_reclaimed_k206() -> None:
    storage = HeldStorage()
    async with opened(storage) as session:
        await session.contents.put(some("a", "b", "c", "d"), pin=CALL)
        assert await session.contents.reclaim(looking(A)) == 0
        await unpin(session, CALL)
        assert await session.contents.reclaim(looking(A, C, digest("not stored"))) == 2
        assert await session.contents.has([*ABC, digest("d")]) == {A, C}
        assert storage.batches[-1].progress, "it needs no flush: what comes back goes again"
        seq = session.seq
        assert await session.contents.reclaim(looking(A, C)) == 0
        assert session.seq == seq, "nothing to do is no commit"
        assert await session.contents.reclaim(looking()) == 2
        assert (await storage.size()).contents == 0


async def test_if_the_look_fails_nothing_is_deleted_k206() -> None:
    async def fails() -> AsyncIterator[Sequence[str]]:
        yield [A]
        raise ZeroDivisionError

    async def nonsense() -> AsyncIterator[Sequence[str]]:
        yield ["nonsense"]

    async with opened() as session:
        async with session.commit() as tx:
            for name, data in some("a", "b").items():
                tx.put_content(name, data)
        with pytest.raises(ZeroDivisionError):
            await session.contents.reclaim(fails)
        with pytest.raises(ValueError, match="hexadecimal"):
            await session.contents.reclaim(nonsense)
        assert await session.contents.has(ABC) == {A, B}
        assert await session.contents.reclaim(looking(A)) == 1, "it can be tried again"


async def test_it_is_done_once_at_a_time_k206() -> None:
    async with opened() as session:
        first = asyncio.ensure_future(session.contents.reclaim(looking(*ABC)))
        await asyncio.sleep(0)
        with pytest.raises(InvalidTransition, match="already"):
            await session.contents.reclaim(looking())
        await first


async def test_steps_are_bounded_k206() -> None:
    storage = HeldStorage()
    async with opened(storage) as session:
        many = some(*map(str, range(2_500)))
        await session.contents.put(many, pin=CALL)
        large = {digest_of(data): data for n in range(64) if (data := bytes([n]) * MAX_CONTENT_BYTES)}
        await session.contents.put(large, pin=CALL)
        await unpin(session, CALL)
        before = len(storage.batches)
        assert await session.contents.reclaim(looking()) == 2_564
        steps = [[(many | large)[name] for name in batch.reclaimed] for batch in storage.batches[before:]]
        assert sum(map(len, steps)) == 2_564
        assert all(len(step) <= 1_000 and sum(map(len, step)) <= 64 << 20 for step in steps)


class Look:
    """A look at what is referred to, that waits where the test lets something happen."""

    def __init__(self, *found: str) -> None:
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self._found = found

    async def __call__(self) -> AsyncIterator[Sequence[str]]:
        yield list(self._found)
        self.begun.set()
        await self.go_on.wait()


async def _ride(session: Session) -> None:
    async with session.commit(conversation_id=1) as tx:
        tx.append(Note(n=1))
        tx.put_content(A, b"a")


async def _put(session: Session) -> None:
    await session.contents.put(some("a"), pin=CALL)
    async with session.commit(conversation_id=1) as tx:
        tx.append(Note(n=1))
        tx.unpin_contents(CALL)


async def _ask(session: Session) -> None:
    assert await session.contents.has([A], pin=CALL) == {A}
    async with session.commit(conversation_id=1) as tx:
        tx.append(Note(n=1))
        tx.unpin_contents(CALL)


async def _unpin(session: Session) -> None:
    """What was pinned before it began: the commit that refers to it comes after the look."""
    await unpin(session, OTHER)


@pytest.mark.parametrize("refer", [_ride, _put, _ask])
@pytest.mark.parametrize("moment", ["before", "meanwhile"])
async def test_what_a_commit_begins_to_refer_to_meanwhile_stays_k205(
    refer: Callable[[Session], Awaitable[None]], moment: str
) -> None:
    """It was garbage when the look began, and is stored; the look does not see the commit."""
    async with opened() as session:
        async with session.commit() as tx:
            for name, data in some("a", "b").items():
                tx.put_content(name, data)
        look = Look()
        reclaiming = asyncio.ensure_future(session.contents.reclaim(look))
        if moment == "before":
            await asyncio.sleep(0)  # it waits for its first turn on the line
        else:
            await look.begun.wait()
        await refer(session)
        await look.begun.wait()
        look.go_on.set()
        count = await reclaiming
        assert (await session.contents.has(ABC), count) == ({A}, 1)
        assert await session.contents.reclaim(looking()) == 1, "the next one does not spare it"


@pytest.mark.parametrize("pinned", ["put", "has"])
async def test_what_was_pinned_as_it_began_stays_k206(pinned: str) -> None:
    """Though it is unpinned meanwhile, by the commit that refers to it, which the look does not see."""
    async with opened() as session:
        async with session.commit() as tx:
            for name, data in some("a", "b").items():
                tx.put_content(name, data)
        if pinned == "put":
            await session.contents.put(some("a"), pin=OTHER)
        else:
            await session.contents.has([A], pin=OTHER)
        look = Look()
        reclaiming = asyncio.ensure_future(session.contents.reclaim(look))
        await look.begun.wait()
        await unpin(session, OTHER)
        look.go_on.set()
        assert await reclaiming == 1
        assert await session.contents.has(ABC) == {A}


async def test_a_pin_of_an_earlier_session_that_is_unpinned_meanwhile_k206() -> None:
    """As a call that goes on after a crash does, in the commit of its outcome."""
    storage = MemoryStorage()
    async with opened(storage) as session:
        await session.contents.put(some("a", "b"), pin=CALL)
        await session.contents.put(some("b"), pin=OTHER)
        crashed = storage.snapshot()
    async with Session.open(crashed) as session:
        await unpin(session, OTHER)
        look = Look()
        reclaiming = asyncio.ensure_future(session.contents.reclaim(look))
        await look.begun.wait()
        await unpin(session, CALL)
        look.go_on.set()
        assert await reclaiming == 0
        assert await session.contents.reclaim(looking()) == 2


async def test_what_was_staged_as_it_began_is_seen_by_the_look_k206() -> None:
    storage = HeldStorage()
    async with opened(storage) as session:
        storage.hold()
        riding = asyncio.ensure_future(_ride(session))
        await rest()

        async def referenced() -> AsyncIterator[Sequence[str]]:
            entries = await session.entries(1)
            yield [A] if any(entry.kind == Note.kind for entry in entries) else []

        reclaiming = asyncio.ensure_future(session.contents.reclaim(referenced))
        await rest()
        await storage.settle()
        await riding
        assert await reclaiming == 0
        assert await session.contents.has(ABC) == {A}


async def test_what_a_staged_step_deletes_is_not_there_any_more_k206() -> None:
    """Whoever asks while it is on its way puts it again, and it stays."""
    storage = HeldStorage()
    async with opened(storage) as session:
        async with session.commit() as tx:
            tx.put_content(A, b"a")
        look = Look()
        reclaiming = asyncio.ensure_future(session.contents.reclaim(look))
        await look.begun.wait()
        storage.hold()
        look.go_on.set()
        await rest()
        assert storage.batches[-1].reclaimed == [A]
        assert await session.contents.has(ABC) == set()
        put = asyncio.ensure_future(session.contents.put(some("a"), pin=CALL))
        await rest()
        await storage.settle()
        await put
        await reclaiming
        assert await session.contents.get(A) == b"a"


async def test_one_that_is_given_up_spares_nothing_later_k206() -> None:
    async with opened() as session:
        async with session.commit() as tx:
            tx.put_content(A, b"a")
        look = Look()
        reclaiming = asyncio.ensure_future(session.contents.reclaim(look))
        await look.begun.wait()
        await session.contents.has([A], pin=CALL)
        reclaiming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reclaiming
        assert await session.contents.has(ABC) == {A}
        assert await session.contents.reclaim(looking()) == 0
        await unpin(session, CALL)
        assert await session.contents.reclaim(looking()) == 1


async def test_chance_never_deletes_what_is_referred_to_k205_k206() -> None:
    """Calls that refer to and drop contents in every way, beside reclaims that look at settled entries."""
    import random

    names = [str(n) for n in range(12)]
    for seed in range(40):
        chance = random.Random(seed)
        storage = HeldStorage()
        async with opened(storage) as session:
            refers: dict[int, set[str]] = {}
            """What each settled or staged commit refers to, as a document would say."""

            async def call(
                pin: int,
                session: Session = session,
                chance: random.Random = chance,
                refers: dict[int, set[str]] = refers,
            ) -> None:
                for _ in range(6):
                    wanted = some(*chance.sample(names, 3))
                    stored = await session.contents.has(wanted, pin=pin)
                    missing = {name: data for name, data in wanted.items() if name not in stored}
                    way = chance.randrange(3)
                    if way == 0:
                        await session.contents.put(missing, pin=pin)
                    elif way == 1:
                        await session.contents.put(wanted, pin=pin)
                    for _ in range(chance.randrange(8)):
                        await asyncio.sleep(0)
                    async with session.commit(conversation_id=1) as tx:
                        tx.append(Note(n=pin))
                        if way == 2:
                            for name, data in missing.items():
                                tx.put_content(name, data)
                        tx.unpin_contents(pin)
                    refers[pin] = set(wanted)  # it is settled: from now on this call refers to nothing else
                    assert await session.contents.has(wanted) == set(wanted)

            async def reclaim(
                session: Session = session, chance: random.Random = chance, refers: dict[int, set[str]] = refers
            ) -> None:
                async def referenced() -> AsyncIterator[Sequence[str]]:
                    for pin in (1, 2, 3):
                        for _ in range(chance.randrange(20)):
                            await asyncio.sleep(0)
                        yield list(refers.get(pin, ()))

                for _ in range(8):
                    await session.contents.reclaim(referenced)

            await asyncio.gather(*(call(pin) for pin in (1, 2, 3)), reclaim())
            for wanted in refers.values():
                assert await session.contents.has(wanted) == wanted
            await session.contents.reclaim(looking(*_all(refers.values())))
            assert {c.digest for c in await storage.content_scan(pinned=False)} == _all(refers.values())


def _all(sets: Iterable[set[str]]) -> set[str]:
    return set[str]().union(*sets)
