"""What a directory must be to be opened as a JSONL store, and what damage is called (rules K150, K156 to K164)."""

# ruff: noqa: ASYNC221, ASYNC240 - nothing else runs in these loops

from __future__ import annotations

import asyncio
import json
import shutil
import stat
import subprocess
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonl_work import CONTENTS, Life, dump_jsonl, opened

from perdure.kernel.errors import StorageCorrupt, StorageError, StorageFormatError
from perdure.kernel.records import TaskRecord, to_raw
from perdure.kernel.storage import DocumentWrite, MailReply
from perdure.storage import jsonl_contents, jsonl_mailbox
from perdure.storage.jsonl import JsonlStorage
from perdure.storage.jsonl_image import Image, open_image
from perdure.storage.jsonl_lines import FRAME, LOG, Fence, LogLine, Marker, is_whole, line_of

Bytes = dict[str, bytes]


def bytes_of(place: Path) -> Bytes:
    return {str(path.relative_to(place)): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}


async def made(place: Path) -> Life:
    life = Life(place / "store", fsync=False)
    await life.begin()
    await life.live()
    return life


@pytest.fixture
async def life(tmp_path: Path) -> Life:
    """A store that was closed."""
    life = await made(tmp_path)
    await life.end()
    return life


async def refuses(
    place: Path, match: str, error: type[StorageError] = StorageCorrupt, *, read_only: tuple[bool, ...] = (True, False)
) -> None:
    before = bytes_of(place.parent)
    for option in read_only:
        with pytest.raises(error, match=match):
            await opened(place, read_only=option)
    after = bytes_of(place.parent)
    after.pop(f"{place.name}.lock", None)
    before.pop(f"{place.name}.lock", None)
    assert after == before, "nothing is changed"


# --- as people read it -----------------------------------------------------------------------------------------


async def test_its_files_are_lines_of_json(life: Life) -> None:
    """K150: each a whole object, with the records as they are."""
    lines = {name: (life.path / name).read_text().splitlines() for name in (LOG, "entries-1.jsonl", "records-1.jsonl")}
    parsed = {name: [json.loads(line) for line in some] for name, some in lines.items()}
    assert parsed[LOG][0]["store"] == "perdure-jsonl"
    assert [line["commit"]["seq"] for line in parsed[LOG] if "commit" in line] == list(life.dumps)[1:]
    entry = parsed["entries-1.jsonl"][0]
    assert (entry["kind"], entry["messages"][0]["role"]) == ("note", "user")
    kinds = {key for line in parsed["records-1.jsonl"] for key in line}
    assert {"conversation", "submission", "task", "document", "contents", "base", "ops"} <= kinds
    assert (life.path / "mailbox" / "2.json").exists()
    assert {path.name for path in (life.path / "contents").rglob("*") if path.is_file()} == {CONTENTS[2].digest}


def test_a_line_is_its_record_and_a_checksum() -> None:
    """And JSON of others with line ends between its values stays one line."""
    marker = LogLine(after=7, fence=Fence(1, "w"))
    line = line_of(marker)
    assert is_whole(line)
    assert len(line) == FRAME + len(b'{"after":7,"fence":{"epoch":1,"writer":"w"}}')
    for at in range(len(line)):
        assert not is_whole(line[:at] + bytes([line[at] ^ 1]) + line[at + 1 :])
        assert not is_whole(line[:at])


async def test_files_are_made_for_their_owner_alone(tmp_path: Path) -> None:
    """K163: whatever the umask; wider modes are reported."""
    life = await made(tmp_path)
    for path in (life.path, *life.path.rglob("*"), tmp_path / "store.lock"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    await life.end()
    life.path.chmod(0o750)
    (life.path / LOG).chmod(0o640)
    for read_only in (True, False):
        line = await opened(life.path, read_only=read_only)
        assert line.info.warnings == (
            f"{life.path} is open to other users (mode 0750); run: chmod 700 {life.path}",
            f"{life.path / LOG} is open to other users (mode 0640); run: chmod 600 {life.path / LOG}",
        )
        await line.storage.close()


async def test_what_is_kept_in_memory_is_where_records_are_and_not_what_they_say(tmp_path: Path) -> None:
    """K231: of long entries, tasks and documents as little as of short ones."""
    kept: list[int] = []
    for size in (10, 20_000):
        path = tmp_path / str(size)
        line = await opened(path)
        long = to_raw("x" * size)
        for _ in range(50):
            task = msgspec.structs.replace(line.task(1), raw_input=long)
            write = DocumentWrite(line.document(key=str(line.next_id)), version=1, base=bytes(long))
            await line.commit(line.batch(entries=[line.entry(1, data="x" * size)], tasks=[task], documents=[write]))
        await line.storage.close()
        tracemalloc.start()
        image = open_image(str(path), write=False)
        kept.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert sum(image.ends.values()) > 150 * size
        image.close()
    assert kept[1] < kept[0] + 100_000, "three million bytes are on the disk"


# --- what is no store ------------------------------------------------------------------------------------------


async def test_what_is_no_store_is_refused_untouched(tmp_path: Path) -> None:
    """K162, K164, K182, K187: and no lock is left beside it."""
    file = tmp_path / "file"
    file.write_text("text")
    await refuses(file, "is a file; a JSONL store is a directory", StorageFormatError)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "letter").write_text("dear")
    await refuses(foreign, rf"foreign is a directory without {LOG}, and so no store", StorageFormatError)
    for text, match, error in (
        ("", "is empty; restore the store", StorageCorrupt),
        ("hello\n", "is not the log of a store", StorageFormatError),
        ('{"store":"another","format":1}\n', "is not the log of a store", StorageFormatError),
        ('{"store":"perdure-jsonl","format":2}\n', "has format 2, this code reads up to format 1", StorageFormatError),
        ('{"store":"perdure-jsonl","format":0}\n', "has format 0, which never existed", StorageFormatError),
        ('{"store":"perdure-jsonl","format":1}\n', "damaged at offset 0: its header", StorageCorrupt),
    ):
        (foreign / LOG).write_text(text)
        await refuses(foreign, match, error)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(StorageError, match="there is no store at"):
        await opened(link, read_only=True)
    with pytest.raises(StorageError, match="is not a directory; make it first"):
        await opened(tmp_path / "none" / "store")
    assert not list(tmp_path.glob("*.lock"))


async def test_an_empty_directory_becomes_a_store(tmp_path: Path) -> None:
    """K161: in one step; what a creation that was killed left beside it is in nobody's way."""
    path = tmp_path / "store"
    path.mkdir()
    (tmp_path / "store.creating" / "contents").mkdir(parents=True)
    (tmp_path / "store.creating" / LOG).write_text("half")
    with pytest.raises(StorageError, match="there is no store at"):
        await opened(path, read_only=True)
    assert not list(path.iterdir())
    line = await opened(path)
    assert line.info.seq == 0
    await line.storage.close()
    assert not (tmp_path / "store.creating").exists()


# --- damage ----------------------------------------------------------------------------------------------------


async def test_every_damaged_line_is_named_by_file_and_offset(life: Life) -> None:
    """K157: one bit, one line left out, zeros in place of one, the end cut off."""
    for name in ("entries-1.jsonl", "records-1.jsonl", LOG):
        path = life.path / name
        good = path.read_bytes()
        lines, offset = good.splitlines(keepends=True), 0
        for number, line in enumerate(lines[: -1 if name == LOG else None]):
            half = offset + len(line) // 2
            wrong = {
                "a bit": good[:half] + bytes([good[half] ^ 4]) + good[half + 1 :],
                "its end": good[: offset + len(line) - 1] + b" " + good[offset + len(line) :],
                "zeros": good[:offset] + bytes(len(line)) + good[offset + len(line) :],
                "left out": good[:offset] + good[offset + len(line) :],
            }
            if name != LOG:
                wrong["cut off"] = good[:half]
            for what, data in wrong.items():
                path.write_bytes(data)
                place = rf"{name} is damaged at offset {offset}: " if what != "left out" else name
                if name == LOG and number == 0:
                    await refuses(life.path, LOG, StorageError)
                elif what == "cut off":
                    await refuses(life.path, rf"{name} is damaged at offset \d+: ")
                else:
                    await refuses(life.path, place)
            offset += len(line)
        path.write_bytes(good)
    line = await opened(life.path)
    assert isinstance(line.storage, JsonlStorage)
    assert await dump_jsonl(line.storage, life.last_id) == life.dumps[line.info.seq]
    await line.storage.close()


async def test_a_torn_tail_is_told_from_damage_by_what_follows(life: Life) -> None:
    """K156, K157: what was written together may be torn anywhere; what a later line confirms may not."""
    log = life.path / LOG
    good = log.read_bytes().splitlines(keepends=True)
    closed = b"".join(good)
    markers = [at for at, line in enumerate(good) if b'"commit"' in line]
    last = markers[-1]
    records = (life.path / "records-1.jsonl").stat().st_size
    entries = (life.path / "entries-1.jsonl").stat().st_size
    for follows, torn in ((0, True), (1, False)):
        after = len(closed) + follows
        later = Marker(seq=99, at=1, next_id=99, entries=entries, records=records)
        log.write_bytes(closed + b'{"crc":"00000000","torn"}\n' + line_of(LogLine(after=after, commit=later)))
        if torn:
            line = await opened(life.path, read_only=True)
            assert line.info.seq == len(life.dumps) - 1
            await line.storage.close()
            assert log.read_bytes() != closed, "who only reads cuts nothing"
            line = await opened(life.path)
            assert line.info.seq == len(life.dumps) - 1
            await line.storage.close()
            assert log.read_bytes().startswith(closed + b'{"crc":"')
            assert b"torn" not in log.read_bytes()
            assert await _same(life)
            log.write_bytes(closed)
        else:
            await refuses(life.path, rf"{LOG} is damaged at offset {len(closed)}: ")
    assert good[last + 1].find(b'"closed"') > 0, "a clean close says that what was before it was confirmed"
    log.write_bytes(b"".join(good[:last]) + good[last][:-2] + b"\n" + b"".join(good[last + 1 :]))
    await refuses(life.path, rf"{LOG} is damaged at offset {len(b''.join(good[:last]))}: ")


async def _same(life: Life) -> bool:
    line = await opened(life.path, read_only=True)
    assert isinstance(line.storage, JsonlStorage)
    same = await dump_jsonl(line.storage, life.last_id) == life.dumps[line.info.seq]
    await line.storage.close()
    return same


async def test_a_file_that_is_gone_is_named(life: Life) -> None:
    """K157, K162, K164."""
    content = jsonl_contents.path_of(str(life.path), CONTENTS[2].digest)
    for path, only in (
        (life.path / "entries-1.jsonl", (True, False)),
        (life.path / "records-1.jsonl", (True, False)),
        (Path(content), (False,)),
        (life.path / "mailbox" / "1.answer.json", (False,)),
    ):
        data = path.read_bytes()
        path.unlink()
        await refuses(life.path, rf"{path.name} is gone, and the store needs it", read_only=only)
        path.write_bytes(data)
    Path(content).write_bytes(b"thre")
    await refuses(life.path, rf"{CONTENTS[2].digest} has 4 bytes of 5", read_only=(False,))
    (life.path / LOG).unlink()
    await refuses(life.path, f"is a directory without {LOG}", StorageFormatError)


async def test_damage_that_comes_while_it_is_open_is_found_and_told(tmp_path: Path) -> None:
    """K145, K157, K201: by a check, and by the read that meets it."""
    life = await made(tmp_path)
    storage = life.line.storage
    path = life.path / "entries-1.jsonl"
    good = path.read_bytes()
    (first,) = await storage.entries(await storage.lineage(1), limit=1)
    for name, data in (("entries-1.jsonl", good.replace(b'"role"', b'"rule"', 1)), ("entries-1.jsonl", good[:10])):
        (life.path / name).write_bytes(data)
        (told,) = await storage.check()
        assert f"{name} is damaged at offset 0: " in told
        with pytest.raises(StorageCorrupt, match=rf"{name} is damaged at offset 0: it is no longer what was written"):
            await storage.entry(first.id)
        path.write_bytes(good)
    content = Path(jsonl_contents.path_of(str(life.path), CONTENTS[2].digest))
    content.write_bytes(b"Three")
    answer = life.path / "mailbox" / "1.answer.json"
    answer.write_bytes(answer.read_bytes().replace(b"yes", b"yea"))
    assert [text.split(" is ")[0] for text in await storage.check()] == [str(content), str(answer)]
    with pytest.raises(StorageCorrupt, match="is not what its digest says"):
        await storage.contents([CONTENTS[2].digest])
    with pytest.raises(StorageCorrupt, match=r"1\.answer\.json is not what was written"):
        jsonl_mailbox.reply(life.path, 1)
    await storage.close()


# --- reading beside the owner ----------------------------------------------------------------------------------


async def test_who_only_reads_changes_nothing_and_sees_what_the_owner_commits(tmp_path: Path) -> None:
    """K143, K159: also over a compaction, and after one that found nobody."""
    life = await made(tmp_path)
    before = bytes_of(tmp_path)
    reader = await opened(life.path, read_only=True)
    assert isinstance(reader.storage, JsonlStorage)
    for step in range(3):
        assert await dump_jsonl(reader.storage, life.last_id) == life.dumps[life.line.seq]
        if step == 0:
            assert bytes_of(tmp_path) == before
        await life.commit(life.line.batch(entries=[life.line.entry(1)], tasks=[life.line.task(1)]))
        if step == 1:
            await life.line.storage.vacuum()
    with pytest.raises(StorageError, match="open for reading only"):
        await reader.storage.vacuum()
    await life.end()
    assert await dump_jsonl(reader.storage, life.last_id) == life.dumps[life.line.seq]
    await reader.storage.close()


async def test_a_line_that_is_being_written_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K157: though a later one confirms it by the time that is looked for."""
    life = await made(tmp_path)
    await life.end()
    log = life.path / LOG
    whole = log.read_bytes()
    log.write_bytes(whole[: whole.rindex(b'{"crc":"', 0, whole.rindex(b'{"crc":"')) + 40])
    judge = Image._judge_tail

    def late(self: Image, *arguments: Any) -> StorageCorrupt | None:
        log.write_bytes(whole)
        return judge(self, *arguments)

    monkeypatch.setattr(Image, "_judge_tail", late)
    reader = await opened(life.path, read_only=True)
    assert reader.info.seq == max(life.dumps)
    await reader.storage.close()


async def test_what_is_reclaimed_during_a_check_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K145: what is found is held against what was committed meanwhile."""
    life = await made(tmp_path)
    line, loop, read = life.line, asyncio.get_running_loop(), jsonl_contents.read
    todo = [line.batch(unpinned=[9], reclaimed=[CONTENTS[2].digest])]

    def late(store: str, digest: str, size: int) -> bytes:
        while todo:
            asyncio.run_coroutine_threadsafe(line.commit(todo.pop()), loop).result(60)
        return read(store, digest, size)

    monkeypatch.setattr(jsonl_contents, "read", late)
    assert await line.storage.check() == []
    assert not todo
    await line.storage.close()


async def test_another_store_in_its_place_is_not_read_for_it(tmp_path: Path) -> None:
    life = await made(tmp_path)
    await life.end()
    reader = await opened(life.path, read_only=True)
    assert isinstance(reader.storage, JsonlStorage)
    life.path.rename(tmp_path / "moved")
    other = JsonlStorage(life.path)
    await other.open(writer="other", log_id="another", now=1)
    await other.close()
    for read in (reader.storage.conversation(1), reader.storage.check(), reader.storage.size()):
        with pytest.raises(StorageError, match=r"replaced by another store|no longer the store that was opened"):
            await read
    await reader.storage.close()


# --- copies and compactions ------------------------------------------------------------------------------------


async def test_a_copy_of_a_live_store_is_one_commit_of_it(tmp_path: Path) -> None:
    """K29, K184: with its contents and its mail, and an id of its own."""
    life = await made(tmp_path)
    assert isinstance(life.line.storage, JsonlStorage)
    seq = life.line.seq
    await life.line.storage.backup(tmp_path / "copy", log_id="copied", now=1)
    with pytest.raises(StorageError, match="is there already"):
        await life.line.storage.backup(tmp_path / "copy", log_id="copied", now=1)
    await life.commit(life.line.batch(entries=[life.line.entry(1)]))
    line = await opened(tmp_path / "copy")
    assert isinstance(line.storage, JsonlStorage)
    assert (line.info.log_id, line.info.seq) == ("copied", seq)
    assert await dump_jsonl(line.storage, life.last_id) == life.dumps[seq]
    assert [mail.id for mail in await line.storage.mail()] == [2]
    assert jsonl_mailbox.reply(tmp_path / "copy", 1) == MailReply(1, True, to_raw("yes"))
    assert await line.storage.check() == []
    await line.storage.close()
    await life.end()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["copy", "store"]


async def test_superseded_records_are_reclaimed_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K158: once they are half of the files; so the files stay within a bound, whatever is written."""
    monkeypatch.setattr("perdure.storage.jsonl_writer.COMPACT_BYTES", 20_000)
    life = await made(tmp_path)
    task = life.line.task(1)
    most = 0
    for number in range(200):
        await life.line.commit(life.line.batch(tasks=[task_of(task, number)]))
        most = max(most, sum(map(len, bytes_of(life.path).values())))
    assert most < 60_000
    assert await life.line.storage.task(task.id) == task_of(task, 199)
    assert await life.line.storage.check() == []
    await life.end()


def task_of(task: TaskRecord, number: int) -> TaskRecord:
    return msgspec.structs.replace(task, restarts=number, raw_memos=to_raw({"x": "x" * 500}))


async def test_a_vacuum_has_a_bound_and_ends_with_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K222, K223: and leaves the store as it was."""
    life = await made(tmp_path)
    before = bytes_of(life.path)
    clock = iter(range(10_000))
    monkeypatch.setattr("perdure.storage.jsonl_compaction.time.monotonic", lambda: next(clock))
    with pytest.raises(
        StorageError, match="was not vacuumed and is as it was: it took longer than 1 ms; allow it more"
    ):
        await life.line.storage.vacuum(within_ms=1)
    monkeypatch.undo()
    assert bytes_of(life.path) == before
    assert isinstance(life.line.storage, JsonlStorage)
    vacuum = life.line.storage.vacuum()
    work = asyncio.ensure_future(vacuum)
    await asyncio.sleep(0)
    await life.line.storage.close()
    outcome = (await asyncio.gather(work, return_exceptions=True))[0]
    assert "the store is being closed" in str(outcome) or not isinstance(outcome, BaseException)
    line = await opened(life.path)
    assert await line.storage.check() == []
    await line.storage.close()


async def test_damage_stops_a_compaction_and_nothing_is_lost(tmp_path: Path) -> None:
    """K157, K158: what is damaged is not copied as if it were not."""
    life = await made(tmp_path)
    path = life.path / "entries-1.jsonl"
    good = path.read_bytes()
    path.write_bytes(good.replace(b'"role"', b'"rule"', 1))
    with pytest.raises(StorageCorrupt, match=r"entries-1\.jsonl is damaged at offset 0"):
        await life.line.storage.vacuum()
    path.write_bytes(good)
    assert {path.name for path in life.path.iterdir()} == {
        LOG,
        "entries-1.jsonl",
        "records-1.jsonl",
        "mailbox",
        "contents",
    }
    await life.commit(life.line.batch(entries=[life.line.entry(1)]))
    await life.line.storage.vacuum()
    await life.end()
    assert await _same(life)


async def test_jq_reads_it(life: Life) -> None:
    """K150: with the tools at hand."""
    if shutil.which("jq") is None:
        pytest.skip("jq is not installed")
    names = [str(life.path / name) for name in (LOG, "entries-1.jsonl", "records-1.jsonl")]
    done = subprocess.run(["jq", "-c", ".crc", *names], capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == sum(len(Path(name).read_text().splitlines()) for name in names)
