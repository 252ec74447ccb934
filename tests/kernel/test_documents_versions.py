"""Documents stored by other versions of the code (rules K108 to K110)."""

from __future__ import annotations

from typing import ClassVar, cast

import pytest

from kernel.samples import begin, there
from kernel.stores import HeldStorage, rest
from perdure.kernel.document import Document, field
from perdure.kernel.errors import DocumentVersionError
from perdure.kernel.json import JsonValue
from perdure.kernel.observation import WatchEnded
from perdure.kernel.ops import Set
from perdure.kernel.session import Session


class One(Document, kind="app.form", scope="session"):
    name: str = ""


class Two(Document, kind="app.form", scope="session", version=2):
    """Knows nothing of version 1."""

    names: list[str] = field(default_factory=list)


class Three(Document, kind="app.form", scope="session", version=3):
    names: list[str] = field(default_factory=list)

    @classmethod
    def migrate(cls, value: JsonValue, version: int) -> JsonValue:
        Log.calls.append(version)
        old = cast("dict[str, str]", value)
        return {"names": [old["name"]]} if version == 1 else value


class Log:
    calls: ClassVar[list[int]] = []


class Broken(Document, kind="app.form", scope="session", version=4):
    count: int = 0

    @classmethod
    def migrate(cls, value: JsonValue, version: int) -> JsonValue:
        raise KeyError("nothing fits")


async def stored_by_one(storage: HeldStorage) -> None:
    async with Session.open(storage) as session, session.commit() as tx:
        (await tx.draft(One)).name = "Ada"


async def test_a_document_of_the_same_version_is_used_as_it_is() -> None:
    """Rule K108: no operation is added by opening it."""
    storage = HeldStorage()
    await stored_by_one(storage)
    async with Session.open(storage) as session:
        async with session.commit() as tx:
            assert (await tx.draft(One)).name == "Ada"
        assert len(storage.batches) == 1


async def test_a_read_migrates_in_memory_only() -> None:
    """Rule K109: outside, in a transaction, and in a watch."""
    storage = HeldStorage()
    await stored_by_one(storage)
    async with Session.open(storage) as session:
        assert there(await session.snapshot(Three)).names == ["Ada"]
        async with session.commit() as tx:
            assert there(await tx.read(Three)).names == ["Ada"]
        async with session.state(Three) as state:
            assert state.value.names == ["Ada"]
        assert len(storage.batches) == 1
        assert there(await session.snapshot(One)).name == "Ada"


async def test_a_draft_makes_the_migrated_base_part_of_its_commit() -> None:
    """Rule K109: also a draft that changes nothing else; from then on nothing migrates, and older code is refused."""
    storage = HeldStorage()
    await stored_by_one(storage)
    async with Session.open(storage) as session:
        async with session.commit() as tx:
            await tx.draft(Three)
        (write,) = storage.batches[-1].documents
        assert (write.version, write.base) == (3, b'{"names":["Ada"]}')
        assert write.record.id == storage.batches[0].documents[0].record.id, "the same incarnation"
        Log.calls.clear()
        assert there(await session.snapshot(Three)).names == ["Ada"]
        assert Log.calls == []
        with pytest.raises(DocumentVersionError):
            await session.snapshot(One)
    async with Session.open(storage) as session:
        assert there(await session.snapshot(Three)).names == ["Ada"]


async def test_a_draft_is_read_in_the_version_it_has() -> None:
    """Rules K45, K109 and K110: older code is refused in the very transaction that migrates."""
    storage = HeldStorage()
    await stored_by_one(storage)
    async with Session.open(storage) as session, session.commit() as tx:
        (await tx.draft(Three)).names.append("Bob")
        assert there(await tx.read(Three)).names == ["Ada", "Bob"]
        with pytest.raises(DocumentVersionError):
            await tx.read(One)


async def test_a_rolled_back_draft_leaves_the_old_version() -> None:
    """Rules K43 and K109."""
    storage = HeldStorage()
    await stored_by_one(storage)
    async with Session.open(storage) as session:
        with pytest.raises(LookupError):
            async with session.commit() as tx:
                (await tx.draft(Three)).names.append("Bob")
                raise LookupError
        assert there(await session.snapshot(One)).name == "Ada"


@pytest.mark.parametrize(("kind", "code"), [(Two, 2), (One, 1)])
async def test_what_this_code_cannot_read_is_refused_and_kept(kind: type[Document], code: int) -> None:
    """Rule K110: older without a migration, newer; the error has both versions, the bytes stay, only that access
    fails."""
    storage = HeldStorage()
    stored = 1 if kind is Two else 3
    await stored_by_one(storage)
    if kind is One:
        async with Session.open(storage) as session, session.commit() as tx:
            await tx.draft(Three)
    before = storage.snapshot()
    async with Session.open(storage) as session:
        with pytest.raises(DocumentVersionError) as refused:
            await session.snapshot(kind)
        assert (refused.value.stored, refused.value.code) == (stored, code)
        assert f"version {stored}" in str(refused.value)
        assert f"version {code}" in str(refused.value)
        with pytest.raises(DocumentVersionError):
            async with session.watch(kind):
                pass
        async with session.commit() as tx:
            for access in (tx.read, tx.draft):
                with pytest.raises(DocumentVersionError):
                    await access(kind)
            tx.create_conversation(owner=None)
        assert session.failed is None
        assert there(await session.snapshot(Three)).names == ["Ada"]
    async with Session.open(before) as a, Session.open(storage) as b:
        assert there(await a.snapshot(Three)) == there(await b.snapshot(Three))


async def test_a_refused_document_can_be_retired() -> None:
    """Rule K110: retiring reads nothing of it."""
    storage = HeldStorage()
    await stored_by_one(storage)
    async with Session.open(storage) as session:
        async with session.commit() as tx:
            await tx.retire(Two)
            assert (await tx.draft(Two)).names == []
        assert there(await session.snapshot(Two)).names == []


async def test_a_migration_that_raises_fails_only_that_access() -> None:
    """Rules K110 and K133."""
    storage = HeldStorage()
    await stored_by_one(storage)
    async with Session.open(storage) as session:
        with pytest.raises(KeyError):
            await session.snapshot(Broken)
        with pytest.raises(KeyError):
            async with session.commit() as tx:
                await tx.draft(Broken)
        assert session.failed is None
        assert there(await session.snapshot(One)).name == "Ada"


async def test_a_watch_of_older_code_ends_when_the_document_is_migrated() -> None:
    """Rules K110, K122 and K127: it says why, and neither the commit nor other watches are harmed."""
    storage = HeldStorage()
    await stored_by_one(storage)
    async with Session.open(storage) as session, session.watch(One) as old, session.watch(Three) as new:
        assert (await anext(old)).value.name == "Ada"
        assert (await anext(new)).value.names == ["Ada"]
        async with session.commit() as tx:
            (await tx.draft(Three)).names.append("Bob")
        with pytest.raises(WatchEnded) as ended:
            await anext(old)
        assert isinstance(ended.value.cause, DocumentVersionError)
        frame = await anext(new)
        assert frame.value.names == ["Ada", "Bob"]
        assert frame.ops == (Set((), {"names": ["Ada", "Bob"]}),)


async def test_a_watch_of_newer_code_gets_whole_values_while_older_code_writes() -> None:
    """Rules K109 and K122: the operations of another version would not lead from one migrated value to the next."""
    storage = HeldStorage()
    await stored_by_one(storage)
    async with Session.open(storage) as session, session.watch(Three) as new:
        await anext(new)
        async with session.commit() as tx:
            (await tx.draft(One)).name = "Ada Lovelace"
        frame = await anext(new)
        assert frame.value.names == ["Ada Lovelace"]
        assert frame.ops is None


async def test_a_migration_that_raises_ends_only_that_codes_watches() -> None:
    """Rules K126 and K133: the commit settles, the session goes on."""

    class Fussy(Document, kind="app.form", scope="session", version=5):
        name: str = ""

        @classmethod
        def migrate(cls, value: JsonValue, version: int) -> JsonValue:
            if cast("dict[str, str]", value)["name"] == "Bob":
                raise KeyError("no Bobs")
            return value

    storage = HeldStorage()
    await stored_by_one(storage)
    async with Session.open(storage) as session, session.watch(Fussy) as fussy, session.watch(One) as plain:
        await anext(fussy)
        await anext(plain)
        async with session.commit() as tx:
            (await tx.draft(One)).name = "Bob"
        with pytest.raises(WatchEnded) as ended:
            await anext(fussy)
        assert isinstance(ended.value.cause, KeyError)
        assert (await anext(plain)).value.name == "Bob"
        assert session.failed is None


async def test_a_migrated_base_that_is_staged_is_what_the_next_transaction_builds_on() -> None:
    """Rules K60 and K109."""
    storage = HeldStorage()
    await stored_by_one(storage)
    async with Session.open(storage) as session:
        storage.hold()

        async def add(name: str) -> None:
            async with session.commit() as tx:
                (await tx.draft(Three)).names.append(name)

        writers = [begin(add(name)) for name in ("B", "C")]
        await rest()
        assert there(await session.snapshot(One)).name == "Ada", "outside it is still version 1"
        await storage.settle()
        for writer in writers:
            await writer
        assert there(await session.snapshot(Three)).names == ["Ada", "B", "C"]
    async with Session.open(storage) as session:
        assert there(await session.snapshot(Three)).names == ["Ada", "B", "C"]
