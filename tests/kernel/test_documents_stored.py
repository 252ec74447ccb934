"""How a document's changes are stored: bases, deltas and when which (rules K100 to K103, K105, K106)."""

from __future__ import annotations

import pytest

from kernel.samples import Label, Note, Tally, conversation, there
from kernel.stores import HeldStorage
from perdure.kernel.document import Document, field
from perdure.kernel.session import Session
from perdure.kernel.storage import DocumentWrite


class Text(Document, kind="app.text", scope="session"):
    text: str = ""
    n: int = 0


class Kept(Document, kind="app.kept", scope="conversation", history="rewindable"):
    text: str = ""
    n: int = 0


class Eager(Document, kind="app.eager", scope="session"):
    text: str = ""
    n: int = 0

    @classmethod
    def checkpoint_when(cls, base_bytes: int, deltas: int, delta_bytes: int) -> bool:
        return deltas > 2


class Queue(Document, kind="app.queue", scope="session"):
    items: list[str] = field(default_factory=list)


class Insistent(Document, kind="app.insistent", scope="session"):
    items: list[str] = field(default_factory=list)

    @classmethod
    def checkpoint_when(cls, base_bytes: int, deltas: int, delta_bytes: int) -> bool:
        return deltas > 0


def writes(storage: HeldStorage) -> list[DocumentWrite]:
    return [write for batch in storage.batches for write in batch.documents]


async def test_a_token_appended_to_a_long_text_costs_the_token() -> None:
    """Rules K100 and K106: the base once, then deltas of the token's size."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        async with session.commit() as tx:
            (await tx.draft(Text)).text = "x" * 100_000
        for _ in range(20):
            async with session.commit() as tx:
                (await tx.draft(Text)).text += "tökén"
        base, *deltas = writes(storage)
        assert base.base is not None
        assert len(base.base) > 100_000
        assert all(write.base is None and write.ops is not None and len(write.ops) < 40 for write in deltas)
    async with Session.open(storage) as session:
        assert there(await session.snapshot(Text)).text == "x" * 100_000 + "tökén" * 20


async def test_a_base_is_written_once_replaying_would_cost_more() -> None:
    """Rule K101: by count, so that a small document does not collect deltas for ever."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        async with session.commit() as tx:
            (await tx.draft(Text)).text = "x" * 200
        for n in range(200):
            async with session.commit() as tx:
                (await tx.draft(Text)).n = n + 1
        kinds = ["base" if write.base is not None else "delta" for write in writes(storage)]
        assert kinds[0] == "base"
        assert kinds[1] == "delta"
        runs = "".join(kind[0] for kind in kinds).split("b")
        assert 2 < len(runs) < 20
        assert max(len(run) for run in runs) < 100
    async with Session.open(storage) as session:
        assert there(await session.snapshot(Text)).n == 200


async def test_a_base_is_written_once_the_deltas_are_large() -> None:
    """Rule K101: by bytes."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        async with session.commit() as tx:
            (await tx.draft(Tally)).text = "x" * 10_000
        for n in range(12):
            async with session.commit() as tx:
                (await tx.draft(Tally)).log = [str(n % 10) * 9_000]
        kinds = ["base" if write.base is not None else "delta" for write in writes(storage)]
        assert kinds == ["base", *["delta"] * 8, "base", *["delta"] * 3], "at more than four times the new one"


async def test_a_text_that_grows_is_not_stored_anew_while_it_grows() -> None:
    """Rule K101: a base that takes as much as the deltas is no gain, however much both are."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        async with session.commit() as tx:
            (await tx.draft(Tally)).text = "x" * 100
        for _ in range(300):
            async with session.commit() as tx:
                (await tx.draft(Tally)).text += "x" * 200
        assert [write.base is not None for write in writes(storage)] == [True, *[False] * 300]
        async with session.commit() as tx:
            (await tx.draft(Tally)).text = ""
        for n in range(2_500):
            async with session.commit() as tx:
                (await tx.draft(Tally)).n = n
        assert sum(write.base is not None for write in writes(storage)) > 1, "it is small again, and so is its base"


async def test_a_change_as_large_as_the_whole_is_stored_as_the_whole() -> None:
    """Rule K101."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        for n in range(3):
            async with session.commit() as tx:
                (await tx.draft(Label, key="a")).n = n + 1
        assert all(write.base is not None for write in writes(storage))


async def test_a_definition_may_say_when_a_base_is_due() -> None:
    """Rule K95: its own checkpoint policy."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        async with session.commit() as tx:
            (await tx.draft(Eager)).text = "x" * 10_000
        for n in range(6):
            async with session.commit() as tx:
                (await tx.draft(Eager)).n = n + 1
        kinds = ["base" if write.base is not None else "delta" for write in writes(storage)]
        assert kinds == ["base", "delta", "delta", "base", "delta", "delta", "base"]


async def test_the_policy_counts_on_after_reopening() -> None:
    """Rule K101: what replaying costs is known from what was read."""
    storage = HeldStorage()
    async with Session.open(storage) as session, session.commit() as tx:
        (await tx.draft(Eager)).text = "x" * 10_000
    for n in range(4):
        async with Session.open(storage) as session, session.commit() as tx:
            (await tx.draft(Eager)).n = n + 1
    kinds = ["base" if write.base is not None else "delta" for write in writes(storage)]
    assert kinds == ["base", "delta", "delta", "base", "delta"]


async def test_a_base_lets_storage_reclaim_what_is_older_of_latest_history_only() -> None:
    """Rules K102 and K103."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        points: list[int] = []
        for n in range(150):
            async with session.commit(conversation_id=place) as tx:
                (await tx.draft(Text)).n = n
                (await tx.draft(Kept)).n = n
                points.append(tx.append(Note(n=n)).id)
        assert all(write.reclaim for write in writes(storage) if write.record.kind == "app.text" and write.base)
        assert not any(write.reclaim for write in writes(storage) if write.record.kind == "app.kept")
        for n in (0, 1, 77, 149):
            assert there(await session.snapshot(Kept, conversation=place, at=points[n])).n == n


async def test_what_is_stored_replays_to_what_was_in_memory() -> None:
    """Rule K100: nested changes, lists, code points beyond the first plane."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        async with session.commit() as tx:
            draft = await tx.draft(Tally)
            draft.text = "x" * 2_000
            draft.log = ["𝄞"] * 3
        for n in range(30):
            async with session.commit() as tx:
                draft = await tx.draft(Tally)
                draft.log.insert(n % 3, f"é{n}")
                draft.log.pop()
                draft.text = draft.text[:-1] if n % 2 else draft.text + "𝄞"
                draft.n += 1
        memory = there(await session.snapshot(Tally))
    async with Session.open(storage) as session:
        assert there(await session.snapshot(Tally)) == memory


@pytest.mark.parametrize("kind", [Queue, Insistent])
async def test_a_document_larger_than_a_write_may_be_goes_on_by_its_changes(
    kind: type[Queue | Insistent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules K101 and K189: it grows, is reopened, and shrinks again, and no base that is due refuses a change."""
    for module in ("documents", "transaction"):
        monkeypatch.setattr(f"perdure.kernel.{module}.MAX_RECORD_BYTES", 8_000)
    storage = HeldStorage()
    async with Session.open(storage) as session:
        for n in range(60):
            async with session.commit() as tx:
                (await tx.draft(kind)).items.append(f"{n} " + "x" * 1_000)
    for left in range(59, -1, -1):
        async with Session.open(storage) as session:  # what was weighed before is forgotten
            async with session.commit() as tx:
                del (await tx.draft(kind)).items[0]
            assert len(there(await session.snapshot(kind)).items) == left
    assert max(len(write.base or b"") for write in writes(storage)) > 1_000, "bases come again once they fit"
    assert all(len(write.base or write.ops or b"") <= 8_000 for write in writes(storage))
