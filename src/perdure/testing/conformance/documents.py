"""Checks of documents: bases, deltas, incarnations, what is given up."""

from __future__ import annotations

from typing import Any

import msgspec

from perdure.kernel.errors import InvalidRead
from perdure.kernel.records import (
    Address,
)
from perdure.kernel.storage import DocumentWrite, StoredDocument
from perdure.testing.conformance.subject import Subject, begun, refused


async def a_document_is_its_base_and_what_followed(subject: Subject) -> None:
    """K100, K103, K140: now, and exactly as it was after each commit."""
    line = await begun(subject)
    record = line.document()
    states: dict[int, StoredDocument | None] = {line.seq: None}

    async def write(expected: tuple[int, bytes, list[bytes]], **value: Any) -> None:  # Any: fields of DocumentWrite
        await line.commit(line.batch(documents=[DocumentWrite(record, **value)]))
        version, base, deltas = expected
        states[line.seq] = StoredDocument(record, version, base, deltas)

    await write((1, b"[0]", []), version=1, base=b"[0]")
    await write((1, b"[0]", [b"[1]"]), version=1, ops=b"[1]")
    await write((1, b"[0]", [b"[1]", b"[2]"]), version=1, ops=b"[2]")
    await write((2, b"[9]", []), version=2, base=b"[9]")
    await line.commit(line.batch())
    states[line.seq] = states[line.seq - 1]
    await write((2, b"[9]", [b"[3]"]), version=2, ops=b"[3]")
    storage = line.storage
    for seq, state in states.items():
        assert await storage.document(record.address, at=seq) == state
        assert await storage.documents("conversation", 1, at=seq) == ([] if state is None else [record])
    assert await storage.document(record.address) == states[line.seq]
    assert await storage.documents("conversation", 1) == [record]
    assert await storage.documents("conversation", 2) == []
    assert await storage.documents("session", 1) == []
    assert await storage.document(Address("plan", "conversation", 1, "other key")) is None
    await storage.close()


async def a_document_made_anew_is_another_one(subject: Subject) -> None:
    """K112: at one address, one incarnation is alive at a time; a past commit gives the one that lived then."""
    line = await begun(subject)
    old = line.document()
    born = line.seq + 1
    await line.commit(line.batch(documents=[DocumentWrite(old, version=1, base=b'"old"')]))
    await line.commit(line.batch(documents=[DocumentWrite(line.retired(old), version=1)]))
    gone = line.seq
    storage = line.storage
    assert await storage.document(old.address) is None
    assert await storage.documents("conversation", 1) == []
    new = line.document()
    await line.commit(line.batch(documents=[DocumentWrite(new, version=1, base=b'"new"')]))
    assert await storage.document(new.address) == StoredDocument(new, 1, b'"new"', [])
    newest = line.document()
    # In one commit, and in whichever order it is told: the address is free once the old one is retired.
    await line.commit(
        line.batch(
            documents=[
                DocumentWrite(newest, version=1, base=b'"newest"'),
                DocumentWrite(msgspec.structs.replace(new, retired_at=1, retired_seq=newest.created_seq), version=1),
            ]
        )
    )
    assert await storage.document(new.address) == StoredDocument(newest, 1, b'"newest"', [])
    assert await storage.documents("conversation", 1) == [newest]
    for at, expected in ((born, old), (gone, None), (gone + 1, new), (line.seq, newest)):
        found = await storage.document(old.address, at=at)
        assert (None if found is None else found.record) == expected
        assert await storage.documents("conversation", 1, at=at) == ([] if expected is None else [expected])
    await storage.close()


async def latest_history_gives_up_what_is_older(subject: Subject) -> None:
    """K102: with a base that says so; the state of an older commit is then refused, not invented."""
    line = await begun(subject)
    record = msgspec.structs.replace(line.document("notes"), history="latest", fork="current")
    other = line.document("plan")
    await line.commit(
        line.batch(
            documents=[
                DocumentWrite(record, version=1, base=b"0"),
                DocumentWrite(other, version=1, base=b"0"),
            ]
        )
    )
    first = line.seq
    await line.commit(line.batch(documents=[DocumentWrite(record, version=1, ops=b"[1]")]))
    before = await line.storage.size()
    await line.commit(line.batch(documents=[DocumentWrite(record, version=1, base=b"9", reclaim=True)]))
    await line.commit(line.batch(documents=[DocumentWrite(record, version=1, ops=b"[2]")]))
    storage = line.storage
    assert await storage.document(record.address) == StoredDocument(record, 1, b"9", [b"[2]"])
    assert await storage.document(other.address, at=first) == StoredDocument(other, 1, b"0", [])
    assert (await storage.size()).documents <= before.documents
    await refused(InvalidRead, storage.document(record.address, at=first))
    await line.commit(line.batch(documents=[DocumentWrite(line.retired(record), version=1, reclaim=True)]))
    await refused(InvalidRead, storage.document(record.address, at=line.seq - 1))
    assert await storage.check() == []
    await storage.close()


CHECKS = (
    a_document_is_its_base_and_what_followed,
    a_document_made_anew_is_another_one,
    latest_history_gives_up_what_is_older,
)
