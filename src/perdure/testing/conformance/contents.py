"""Checks of contents by hash: what is put, what pins hold, what is reclaimed."""

from __future__ import annotations

from collections.abc import Callable

from perdure.kernel.contents import digest_of
from perdure.kernel.errors import InvalidRead, StaleEpochError, StorageError
from perdure.kernel.storage import MAX_CONTENT_BYTES, MAX_CONTENTS, MAX_DIGESTS, Batch, Content, Storage, StoredContent
from perdure.testing.conformance.subject import Line, Subject, begun, refused, soon


def _content(data: bytes) -> Content:
    return Content(digest_of(data), data)


_EMPTY = _content(b"")
_SMALL = _content(b"a small one")
_LONG = _content(b"line of a file\n" * 60_000)
_NOISE = _content(b"".join(bytes.fromhex(digest_of(b"%d" % n)) for n in range(MAX_CONTENT_BYTES // 32)))
"""As large as one may be, and no smaller in any packing."""
_ALL = (_EMPTY, _SMALL, _LONG, _NOISE)


async def _stored(storage: Storage) -> list[Content]:
    """Of ``_ALL``, by every read there is."""
    digests = [content.digest for content in _ALL]
    has = await storage.has_contents(digests)
    got = await storage.contents(digests)
    pages = [await storage.content_scan(pinned=pinned) for pinned in (True, False)]
    scanned = [content for page in pages for content in page]
    assert has == set(got) == {content.digest for content in scanned}
    found = [content for content in _ALL if content.digest in has]
    assert [Content(content.digest, got[content.digest]) for content in found] == found
    assert set(scanned) == {StoredContent(content.digest, len(content.data)) for content in found}
    assert (await storage.size()).contents == sum(len(content.data) for content in found)
    assert await storage.check() == []
    return found


async def what_is_put_is_there(subject: Subject) -> None:
    """K141, K200: of every size; once, however often it is put; and after a crash."""
    line = await begun(subject)
    assert await _stored(line.storage) == []
    await line.commit(line.batch(contents=_ALL[:3], entries=[line.entry(1)]))
    assert await _stored(line.storage) == list(_ALL[:3])
    # In several commits at once, one of which has it twice.
    batches = [line.batch(contents=contents) for contents in ([_NOISE, _LONG, _NOISE], [_NOISE], [_EMPTY, _SMALL])]
    for future in [line.storage.commit(batch) for batch in batches]:
        await soon(future)
    assert await _stored(line.storage) == list(_ALL)
    crashed = await subject.crash()
    await line.storage.close()
    for place in (subject, crashed):
        again = await Line.open(place)
        assert await _stored(again.storage) == list(_ALL)
        await again.storage.close()


async def what_a_pin_holds_is_not_reclaimed(subject: Subject) -> None:
    """K204: until every pin that holds it is gone; pins are as durable as what they hold."""
    line = await begun(subject)
    all = [content.digest for content in _ALL]
    pins = [(7, _SMALL.digest), (9, _SMALL.digest), (7, _LONG.digest), (7, _LONG.digest)]
    await line.commit(line.batch(contents=_ALL, pins=pins))
    await line.commit(line.batch(pins=pins[:1]))
    assert await line.storage.content_pins() == [7, 9]
    crashed = await subject.crash()
    await line.storage.close()
    for place in (subject, crashed):
        line = await Line.open(place)
        await line.commit(line.batch(reclaimed=[*all, "0" * 64]))
        assert await _stored(line.storage) == [_SMALL, _LONG]
        assert {content.digest for content in await line.storage.content_scan(pinned=True)} == set(all[1:3])
        await line.commit(line.batch(unpinned=[7, 8]))
        assert await line.storage.content_pins() == [9]
        await line.commit(line.batch(reclaimed=all))
        assert await _stored(line.storage) == [_SMALL]
        await line.commit(line.batch(unpinned=[9], reclaimed=all))
        assert await _stored(line.storage) == []
        assert await line.storage.content_pins() == []
        await line.storage.close()


async def contents_change_in_the_order_of_commits(subject: Subject) -> None:
    """K206: also of commits that are written together; and within one: put, pinned, unpinned, reclaimed."""
    line = await begun(subject)
    small, digest = [_SMALL], [_SMALL.digest]
    pin = [(7, _SMALL.digest)]
    for batches, left in (
        ([line.batch(contents=small), line.batch(reclaimed=digest), line.batch(contents=small)], True),
        ([line.batch(pins=pin), line.batch(reclaimed=digest), line.batch(unpinned=[7])], True),
        ([line.batch(unpinned=[7]), line.batch(pins=pin), line.batch(reclaimed=digest)], True),
        ([line.batch(unpinned=[7]), line.batch(reclaimed=digest)], False),
        ([line.batch(contents=small, pins=pin, reclaimed=digest)], True),
        ([line.batch(pins=pin, unpinned=[7], reclaimed=digest)], False),
        ([line.batch(contents=small, reclaimed=digest)], False),
    ):
        for future in [line.storage.commit(batch) for batch in batches]:
            await soon(future)
        assert await _stored(line.storage) == (small if left else [])
    await line.storage.close()


async def scans_of_contents_are_paged(subject: Subject) -> None:
    """K139, K206: by digest, in order; those that a pin holds apart from the others."""
    line = await begun(subject)
    contents = [_content(b"%d" % n) for n in range(20)]
    pins = [(pin, content.digest) for pin, content in enumerate(contents[:9], 1)]
    await line.commit(line.batch(contents=contents, pins=[*pins, *((1, digest) for _, digest in pins)]))
    for pinned, some in ((True, contents[:9]), (False, contents[9:])):
        expected = sorted((StoredContent(c.digest, len(c.data)) for c in some), key=lambda found: found.digest)
        found: list[StoredContent] = []
        while page := await line.storage.content_scan(pinned=pinned, after=found[-1].digest if found else "", limit=2):
            assert len(page) <= 2
            found += page
        assert found == expected
    found_pins: list[int] = []
    while some_pins := await line.storage.content_pins(after=found_pins[-1] if found_pins else 0, limit=4):
        found_pins += some_pins
    assert found_pins == list(range(1, 10))
    await line.storage.close()


async def what_is_asked_for_is_bounded(subject: Subject) -> None:
    """K131, K200: and is a digest; nothing else fails anything."""
    line = await begun(subject)
    many = [digest_of(b"%d" % n) for n in range(MAX_DIGESTS + 1)]
    await line.commit(line.batch(contents=[_content(b"5")]))
    assert await line.storage.has_contents(many[:-1]) == {many[5]}
    assert await line.storage.contents(many[:MAX_CONTENTS]) == {many[5]: b"5"}
    assert await line.storage.has_contents([]) == set()
    await refused(InvalidRead, line.storage.has_contents(many))
    await refused(InvalidRead, line.storage.contents(many[: MAX_CONTENTS + 1]))
    for wrong in ("", many[5].upper(), many[5][:-1], f"{many[5]}\n", "x" * 64):
        await refused(InvalidRead, line.storage.has_contents([wrong]))
        await refused(InvalidRead, line.storage.contents([wrong]))
    await line.commit(line.batch(entries=[line.entry(1)]))
    await line.storage.close()


async def a_superseded_writer_changes_no_contents(subject: Subject) -> None:
    """K173, K202: it stores none, and deletes none."""
    line = await begun(subject)
    await line.commit(line.batch(contents=[_SMALL], pins=[(7, _SMALL.digest)]))
    await subject.supersede(line.info.epoch + 1, "another")
    changes = line.batch(contents=[_LONG], unpinned=[7], reclaimed=[_SMALL.digest])
    await refused(StaleEpochError, line.storage.commit(changes))
    await line.storage.close()
    line = await Line.open(subject)
    assert await _stored(line.storage) == [_SMALL]
    assert await line.storage.content_pins() == [7]
    await line.storage.close()


async def a_commit_with_wrong_contents_stores_nothing(subject: Subject) -> None:
    """K137, K200: one content too large, or a pin of what is not there."""
    line = await begun(subject)
    seq = line.seq
    await line.storage.close()
    wrong: dict[str, Callable[[Line], Batch]] = {
        "a large one": lambda line: line.batch(contents=[_SMALL, _content(b"x" * (MAX_CONTENT_BYTES + 1))]),
        "a pin of nothing": lambda line: line.batch(contents=[_SMALL], pins=[(7, _LONG.digest)]),
    }
    for name, batch in wrong.items():
        line = await Line.open(subject)
        try:
            await refused(StorageError, line.storage.commit(batch(line)))
        except AssertionError as error:
            raise AssertionError(f"{name} was stored") from error
        await line.storage.close()
        line = await Line.open(subject)
        assert line.info.seq == seq, name
        assert await _stored(line.storage) == []
        assert await line.storage.content_pins() == []
        await line.storage.close()


CHECKS = (
    what_is_put_is_there,
    what_a_pin_holds_is_not_reclaimed,
    contents_change_in_the_order_of_commits,
    scans_of_contents_are_paged,
    what_is_asked_for_is_bounded,
    a_superseded_writer_changes_no_contents,
    a_commit_with_wrong_contents_stores_nothing,
)
