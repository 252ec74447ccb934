"""What is left of a JSONL store when its process is killed, or the power goes, at any moment (rules K154 to K158)."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from jsonl_work import CONTENTS, Dump, Life, dump_jsonl, opened
from recording_disk import Disk, Event, Recorder, put

from perdure.kernel.errors import StorageCorrupt, StorageError
from perdure.storage import jsonl_contents, jsonl_mailbox
from perdure.storage.jsonl import JsonlStorage
from perdure.storage.jsonl_lines import KINDS, LOG, log_line


async def lived(
    place: Path, monkeypatch: pytest.MonkeyPatch, *, fsync: bool, vacuum: bool = False
) -> tuple[Life, Recorder]:
    """A life that was recorded, from before the store was made until it was closed."""
    place.mkdir()  # noqa: ASYNC240 - nothing else runs
    recorder = Recorder(place)
    life = Life(place / "store", fsync=fsync)
    life.note = recorder.note
    recorder.install(monkeypatch)
    await life.begin()
    await life.live()
    if vacuum:
        await life.line.storage.vacuum()
        await life.commit(life.line.batch(entries=[life.line.entry(1)]))
    await life.end()
    monkeypatch.undo()
    return life, recorder


class Told:
    """What was acknowledged so far."""

    def __init__(self) -> None:
        self.seq = 0
        self.mail: set[int] = set()

    def hear(self, event: Event) -> None:
        if event.kind == "note":
            what, number = event.path.split()
            if what == "commit":
                self.seq = int(number)
            else:
                self.mail.add(int(number))


async def left(place: Path, life: Life, files: dict[str, bytes | None], told: Told) -> int:
    """Open what is left, see that it is as it was after one of the commits, and that it goes on; the commit."""
    put(place, files)
    line = await opened(place / "store")
    assert isinstance(line.storage, JsonlStorage)
    seq = line.info.seq
    assert seq >= told.seq
    assert await dump_jsonl(line.storage, life.last_id) == life.dumps[seq]
    waiting = {mail.id for mail in await line.storage.mail()}
    answered = {id for id, at in life.answers.items() if at <= seq}
    assert told.mail - answered <= waiting, "no request is lost"
    assert not waiting & answered, "none is answered twice"
    assert all(jsonl_mailbox.reply(place / "store", id) for id in answered)
    assert all(jsonl_mailbox.reply(place / "store", id) is None for id in waiting)
    assert await line.storage.check() == []
    entry = line.entry(1)
    await line.commit(line.batch(entries=[entry]))
    await line.storage.close()
    again = await opened(place / "store", read_only=True)
    assert again.info.seq == seq + 1
    assert await again.storage.entry(entry.id) == entry
    await again.storage.close()
    shutil.rmtree(place)
    return seq


def parts(event: Event) -> Iterator[int]:
    """Where a write may be torn: at the ends of its lines, and within them."""
    ends = [at + 1 for at, byte in enumerate(event.data) if byte == ord("\n")][:-1]
    yield from {0, 1, 30, len(event.data) // 2, len(event.data) - 1, *ends} & set(range(len(event.data)))


async def test_killed_at_any_byte_nothing_acknowledged_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K130, K150, K154, K156, K158, K161: also while the store is made, compacted and closed."""
    life, recorder = await lived(tmp_path / "life", monkeypatch, fsync=False, vacuum=True)
    told, seen, disk = Told(), set[int](), Disk()
    for count, event in enumerate(recorder.events):
        told.hear(event)
        if event.kind == "write":
            for part in parts(event):
                torn = Disk()
                for earlier in recorder.events[:count]:
                    torn.apply(earlier)
                torn.apply(Event("write", event.path, offset=event.offset, data=event.data[:part]))
                seen.add(await left(tmp_path / f"{count}-{part}", life, torn.killed(), told))
        disk.apply(event)
        seen.add(await left(tmp_path / f"{count}", life, disk.killed(), told))
    assert seen == set(life.dumps), "each commit was the last once"


@pytest.mark.parametrize("variant", range(3))
async def test_without_power_nothing_acknowledged_is_lost_with_fsync(
    variant: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K155, K158: of what was not flushed nothing is left, or any of it, in any order."""
    life, recorder = await lived(tmp_path / "life", monkeypatch, fsync=True, vacuum=True)
    told, newest, disk = Told(), 0, Disk()
    for count, event in enumerate(recorder.events):
        told.hear(event)
        disk.apply(event)
        chance = Random(variant * 10_000 + count) if variant else None
        newest = max(newest, await left(tmp_path / f"{count}", life, disk.powerless(chance), told))
    assert newest == max(life.dumps)


async def test_without_fsync_the_loss_of_power_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K150, and that the test above can fail: nothing is flushed before the store is closed, and then everything."""
    life, recorder = await lived(tmp_path / "life", monkeypatch, fsync=False)
    last = max(count for count, event in enumerate(recorder.events) if event.kind == "note")
    assert not [event for event in recorder.events[:last] if event.kind == "flush" and event.path == f"store/{LOG}"]
    disk = Disk()
    for event in recorder.events[: last + 1]:
        disk.apply(event)
    assert await left(tmp_path / "lost", life, disk.powerless(None), Told()) == 0
    for event in recorder.events[last + 1 :]:
        disk.apply(event)
    told = Told()
    for event in recorder.events:
        told.hear(event)
    assert await left(tmp_path / "closed", life, disk.powerless(None), told) == max(life.dumps)


async def test_what_a_killed_process_left_is_flushed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K150, K155: so that a clean close vouches for all there is, and a commit with fsync rests on nothing less."""
    life, recorder = await lived(tmp_path / "life", monkeypatch, fsync=False)
    last = max(count for count, event in enumerate(recorder.events) if event.kind == "note")
    for fsync in (True, False):
        place, disk, told = tmp_path / f"killed-{fsync}", Disk(), Told()
        for event in recorder.events[: last + 1]:
            disk.apply(event)
            told.hear(event)
        put(place, disk.killed())
        following = Recorder(place)
        following.install(monkeypatch)
        line = await opened(place / "store", fsync=fsync)
        if not fsync:
            await line.storage.close()
        monkeypatch.undo()
        for event in following.events:
            disk.apply(event)
        assert await left(tmp_path / f"left-{fsync}", life, disk.powerless(None), told) == max(life.dumps)
        await line.storage.close()


async def test_the_order_of_a_commit_is_as_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K155: the sidecars are written and flushed, then the marker is, then it is acknowledged; one marker a commit."""
    _, recorder = await lived(tmp_path / "life", monkeypatch, fsync=True)
    notes = [at for at, event in enumerate(recorder.events) if event.kind == "note" and "commit" in event.path]
    for before, after in itertools.pairwise(notes):
        events = [event for event in recorder.events[before + 1 : after] if event.path.startswith("store/")]
        log = f"store/{LOG}"
        (marked,) = [at for at, event in enumerate(events) if event.path == log and event.kind == "write"]
        (flushed,) = [at for at, event in enumerate(events) if event.path == log and event.kind == "flush"]
        assert marked < flushed
        sidecars = {event.path for event in events if event.kind == "write" and "-1.jsonl" in event.path}
        for path in sidecars:
            kinds = [event.kind for event in events[:marked] if event.path == path]
            assert kinds == ["write", "flush"]
        first, last = (int(recorder.events[at].path.split()[1]) for at in (before, after))
        commits = last - first
        assert events[marked].data.count(b'"commit":') == events[marked].data.count(b"\n") == commits
        made = [at for at, event in enumerate(events) if event.kind == "rename"]
        for at in made:
            directory = str(Path(events[at].target).parent)
            flush = ("flush_directory", directory)
            assert flush in [(event.kind, event.path) for event in events[at:marked]], "of what was renamed"


async def test_any_sidecar_may_be_ahead_of_the_log_and_none_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K156, K157: every combination, at each end of a commit and within its last line."""
    life, _ = await lived(tmp_path / "life", monkeypatch, fsync=False)
    store = tmp_path / "life" / "store"
    lines = _lines((store / LOG).read_bytes())
    markers = [found.commit for line in lines[1:] if (found := log_line(line)) is not None and found.commit is not None]
    fence = lines[1]
    logs = [lines[0] + fence + b"".join(lines[2 : 2 + count]) for count in range(len(markers) + 1)]
    data = {kind: (store / f"{kind}-1.jsonl").read_bytes() for kind in KINDS}
    ends = {kind: sorted({0, *(getattr(marker, kind) for marker in markers)}) for kind in KINDS}
    sizes = {kind: sorted({*ends[kind], *(end - 3 for end in ends[kind][::2] if end)}) for kind in KINDS}
    outcomes = {True: 0, False: 0}
    for count in range(0, len(markers) + 1, 3):
        wanted = markers[count - 1] if count else None
        for each in itertools.product(*(sizes[kind] for kind in KINDS)):
            size = dict(zip(KINDS, each, strict=True))
            whole = all(size[kind] >= (getattr(wanted, kind) if wanted else 0) for kind in KINDS)
            place = _variant(
                tmp_path / "variant", store, logs[count] + b'{"crc":"torn', {k: data[k][: size[k]] for k in KINDS}
            )
            outcomes[whole] += 1
            if whole:
                line = await opened(place)
                assert line.info.seq == count
                assert isinstance(line.storage, JsonlStorage)
                await _same_records(line.storage, life, life.dumps[count])
                await line.storage.close()
                assert {k: (place / f"{k}-1.jsonl").stat().st_size for k in KINDS} == {
                    k: getattr(wanted, k) if wanted else 0 for k in KINDS
                }
            else:
                before = _bytes(place)
                with pytest.raises(StorageCorrupt, match=r"(entries|records)-1\.jsonl is damaged at offset \d+: "):
                    await opened(place)
                assert _bytes(place) == before, "nothing is changed"
    assert min(outcomes.values()) > 20


async def _same_records(storage: JsonlStorage, life: Life, expected: Dump) -> None:
    """But for contents, whose files are those of the end."""
    assert (await dump_jsonl(storage, life.last_id))[: 7 * life.last_id] == expected[: 7 * life.last_id]


def _variant(place: Path, store: Path, log: bytes, data: dict[str, bytes]) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(store, place)
    (place / LOG).write_bytes(log)
    for kind, part in data.items():
        (place / f"{kind}-1.jsonl").write_bytes(part)
    for content in CONTENTS:
        jsonl_contents.put(str(place), content, flushing=False)
    return place


def _bytes(place: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}


def _lines(data: bytes | None) -> list[bytes]:
    assert data is not None
    return data.splitlines(keepends=True)


async def test_a_compaction_that_fails_at_any_step_leaves_the_store_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K158, K222: an error before the new log is in place fails no session, and leaves nothing behind."""
    life = Life(tmp_path / "store", fsync=True)
    await life.begin()
    await life.live()
    recorder = Recorder(tmp_path)
    steps, failed = 0, 0
    while True:
        recorder.events.clear()

        def fail(event: Event, at: int = steps) -> None:
            if event.kind == "rename":
                raise _InPlaceError
            if len(recorder.events) == at and event.kind != "remove":
                raise OSError(5, "Input/output error")

        recorder.before = fail
        recorder.install(monkeypatch)
        before = _bytes(tmp_path / "store")
        with pytest.raises(StorageError, match=r"store could not be vacuumed") as caught:
            await life.line.storage.vacuum()
        monkeypatch.undo()
        if isinstance(caught.value.__cause__, _InPlaceError):
            break
        if "as it was" in str(caught.value):
            failed += 1
        assert _bytes(tmp_path / "store") == before
        await life.commit(life.line.batch(entries=[life.line.entry(1)]))
        steps += 1
    assert failed >= 8
    with pytest.raises(StorageError, match="could not be vacuumed"):
        await life.line.commit(life.line.batch())
    await life.end()
    line = await opened(tmp_path / "store")
    assert await line.storage.check() == []
    await line.storage.close()


class _InPlaceError(OSError):
    """In the one step after which nobody knows which log is in place."""
