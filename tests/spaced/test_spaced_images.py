"""Scans and restores: what they see, what they leave out, and that a restore makes exactly the image."""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from spaced_wire import CHUNK, Driver, Refused, Space, chunked, eventually, file_entry, key, sha

from perdure.spaced import spaced

MakeSpace = Callable[..., Space]


def entries_of(root: Path) -> list[dict[str, Any]]:
    """The image of a folder, computed here and not by the daemon."""
    found: list[dict[str, Any]] = []
    for folder, names, files in os.walk(os.fsencode(root)):
        for name in sorted(names + files):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            shown = text(os.path.relpath(path, os.fsencode(root)))
            if stat.S_ISLNK(status.st_mode):
                found.append({"path": shown, "kind": "symlink", "target": text(os.readlink(path))})
            elif stat.S_ISDIR(status.st_mode):
                found.append({"path": shown, "kind": "directory", "mode": status.st_mode & 0o7777})
            else:
                found.append(
                    {**file_entry("", Path(os.fsdecode(path)).read_bytes(), status.st_mode & 0o7777), "path": shown}
                )
    return sorted(found, key=lambda entry: json.dumps(entry["path"]))


def text(raw: bytes) -> Any:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(raw).decode()}


def whole_scan(driver: Driver, **more: Any) -> list[dict[str, Any]]:
    """All pages of a scan."""
    scan = driver.ask("scan", **more)
    changes, following = scan["changes"], scan["next"]
    while following is not None:
        page = driver.ask("scan_page", scan=scan["scan"], **{"from": following})
        changes, following = changes + page["changes"], page["next"]
    assert len(changes) == scan["total"]
    return changes


def as_image(changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = [{name: value for name, value in change.items() if name not in ("change", "inline")} for change in changes]
    return sorted(kept, key=lambda entry: json.dumps(entry["path"]))


def settle(driver: Driver, commit: int) -> dict[str, Any]:
    scan = driver.ask("scan")
    driver.ask("settle", commit=commit, scan=scan["scan"])
    return scan


def grow(random_: random.Random, root: Path) -> None:
    """A random tree, or random changes to one."""
    names = ["a", "b", "c.txt", "d d", "ä", os.fsdecode(b"\xff\xfe"), "x" * 200, "-rf", "new\nline"]
    folders = [root, *[path for path in root.rglob("*") if path.is_dir() and not path.is_symlink()]]
    for _ in range(random_.randrange(3, 12)):
        folder = random_.choice(folders)
        if not folder.exists():
            continue
        path = folder / random_.choice(names)
        what = random_.randrange(8)
        if what == 0 and path.exists() and not path.is_symlink() and path.is_dir():
            shutil.rmtree(path)
        elif what == 0 and os.path.lexists(path):
            path.unlink()
        elif what == 1 and os.path.lexists(path) and not path.is_symlink():
            path.chmod(random_.choice([0o644, 0o755, 0o600, 0o700, 0o4755]) | (0o700 if path.is_dir() else 0))
        elif what == 2 and not os.path.lexists(path):
            path.symlink_to(random_.choice(["a", "../b", "/nowhere", "."]))
        elif what == 3 and not os.path.lexists(path):
            path.mkdir()
            folders.append(path)
        elif not os.path.lexists(path) or path.is_file():
            size = random_.choice([0, 1, 100, 5000, CHUNK, CHUNK + 1, 2 * CHUNK + 17])
            path.unlink(missing_ok=True)
            path.write_bytes(random_.randbytes(size))


@pytest.mark.parametrize("seed", range(6))
def test_a_restore_brings_back_any_tree_from_any_other(shared_space: Space, shared: Driver, seed: int) -> None:
    """Rules S28, S30, S34: also the changes a scan names are exactly the difference."""
    random_ = random.Random(seed)
    root = shared_space.workspace
    shared.restore(2, [], {})
    contents: dict[str, bytes] = {}
    images: list[list[dict[str, Any]]] = [[]]
    for commit in range(3, 7):
        grow(random_, root)
        changes = whole_scan(shared, page=3)
        before = {json.dumps(entry["path"]): entry for entry in images[-1]}
        for change in changes:
            if change["change"] == "removed":
                del before[json.dumps(change["path"])]
            else:
                assert (change["change"] == "added") == (json.dumps(change["path"]) not in before)
                before[json.dumps(change["path"])] = as_image([change])[0]
        image = entries_of(root)
        assert sorted(before.values(), key=lambda entry: json.dumps(entry["path"])) == image
        images.append(image)
        for entry in image:
            if entry["kind"] == "file":
                raw = os.fsencode(root) + b"/" + spaced.raw_of(entry["path"], "path")
                contents.update(chunked(Path(os.fsdecode(raw)).read_bytes()))
        settle(shared, commit)
    for commit in (3, 6, 2, 5, 4, 6):
        answer = shared.restore(commit, images[commit - 2], contents)
        assert answer["image"]["commit"] == commit
        assert entries_of(root) == images[commit - 2]
        assert whole_scan(shared) == []
    grow(random_, root)
    assert shared.restore(6, None, contents)["image"]["commit"] == 6, "the index knows the image it stood at"
    assert entries_of(root) == images[4]
    shared.restore(7, [], {})


def test_a_scan_without_an_index_names_everything(space: Space, driver: Driver) -> None:
    """Rule S28: a new daemon without its index file, or one that stands at another image."""
    driver.write("d/f", b"x")
    settle(driver, 2)
    assert whole_scan(driver) == []
    assert len(whole_scan(driver, full=True)) == 2
    driver.ask("settle", commit=3)
    scan = driver.ask("scan")
    assert scan["base"] is None
    assert len(scan["changes"]) == 2
    driver.ask("settle", commit=3, scan=scan["scan"])
    space.again()
    again = space.driver(2)
    again.advance()
    assert again.ask("scan")["base"] == {"log": "log-1", "commit": 3, "nonce": ""}
    assert whole_scan(again) == []
    space.kill()
    (space.state / "index").unlink()
    space.up()
    third = space.driver(3)
    third.advance()
    assert third.ask("scan")["base"] is None


def test_an_unchanged_file_is_not_hashed_again_and_a_fresh_one_is(space: Space, driver: Driver) -> None:
    """Rule S29."""
    path = space.workspace / "f"
    path.write_bytes(bytes(1000))
    settle(driver, 2)

    def rested() -> bool:
        """Old enough that its times tell of every change."""
        return time.time_ns() - path.stat().st_ctime_ns > 2 * spaced.RACY_NS

    eventually(rested)
    assert settle(driver, 3)["hashed_bytes"] == 1000, "it was too fresh when it was hashed"
    assert settle(driver, 4)["hashed_bytes"] == 0
    times = path.stat()
    path.write_bytes(b"x" * 1000)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert [change["sha256"] for change in whole_scan(driver)] == [sha(b"x" * 1000)]


def test_a_change_right_after_a_scan_is_seen_by_the_next(space: Space, driver: Driver) -> None:
    """Rule S29: racily clean. Same size, perhaps the same tick of the clock."""
    path = space.workspace / "f"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    for number in range(30):
        os.pwrite(descriptor, b"%09d" % number, 0)
        changes = whole_scan(driver)
        assert [change["sha256"] for change in changes] == [sha(b"%09d" % number)]
        settle(driver, number + 2)
    os.close(descriptor)


def test_what_is_mapped_for_writing_is_hashed(space: Space, driver: Driver) -> None:
    """Rule S29: a page that is dirty already changes without the file's times. Here between the walk and the answer."""
    script = (
        "import mmap,os,time\n"
        "f=open('f','wb+'); f.write(bytes(4096)); f.flush(); m=mmap.mmap(f.fileno(),4096); m[0]=1\n"
        "f.close(); open('ready','w').close()\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
        "m[100]=7; open('done','w').close(); time.sleep(1000)\n"
    )
    (space.workspace / "script").write_text(script)
    driver.start("exec python3 script", env={"PATH": os.environ["PATH"]})
    eventually(lambda: (space.workspace / "ready").exists())
    path = space.workspace / "f"
    eventually(lambda: time.time_ns() - path.stat().st_ctime_ns > 2 * spaced.RACY_NS)
    driver.call("arm", point="scan.walked", action="hold")
    driver.send_asked("scan")
    other = driver.twin(space.address)
    eventually(lambda: other.call("armed")[0]["held"])
    (space.workspace / "go").touch()
    eventually(lambda: (space.workspace / "done").exists())
    other.call("release", point="scan.walked")
    scan = driver.receive()[0]
    driver.ask("settle", commit=2, scan=scan["scan"])
    changed = {change["path"]: change for change in whole_scan(driver, freeze=True)}
    assert changed["f"]["sha256"] == sha(path.read_bytes())


def test_after_a_restart_of_the_machine_everything_is_hashed(make_space: MakeSpace) -> None:
    """Rule S29."""
    space = make_space()
    space.patches = ["boot=first"]
    driver = space.up().driver(1)
    driver.advance()
    (space.workspace / "f").write_bytes(bytes(1000))
    eventually(lambda: time.time_ns() - (space.workspace / "f").stat().st_ctime_ns > 2 * spaced.RACY_NS)
    driver.settle_first()
    assert driver.ask("scan")["hashed_bytes"] == 0
    space.patches = ["boot=second"]
    space.again()
    second = space.driver(2)
    second.advance()
    scan = second.ask("scan")
    assert (scan["hashed_bytes"], scan["changes"]) == (1000, [])


def test_contents_come_inline_or_by_the_chunk_and_verified(space: Space, driver: Driver) -> None:
    """Rule S30."""
    big = os.urandom(2 * CHUNK + 5)
    (space.workspace / "big").write_bytes(big)
    (space.workspace / "small").write_bytes(b"small")
    (space.workspace / "empty").write_bytes(b"")
    scan, body = driver.ask_body("scan", inline_bytes=1 << 20)
    small = next(change for change in scan["changes"] if change["path"] == "small")
    assert body[small["inline"][0] :][: small["inline"][1]] == b"small"
    assert body == b"small"
    entry = next(change for change in scan["changes"] if change["path"] == "big")
    items = [
        {"path": "big", "offset": number * CHUNK, "length": min(CHUNK, len(big) - number * CHUNK), "sha256": digest}
        for number, digest in enumerate(entry["chunks"])
    ]
    assert driver.ask_body("chunks", items=items)[1] == big
    assert entry["sha256"] == sha(big)
    (space.workspace / "big").write_bytes(big[:-1] + b"?")
    with pytest.raises(Refused) as caught:
        driver.ask("chunks", items=items)
    assert (caught.value.code, caught.value.error["path"]) == ("changed", "big")


def test_what_cannot_be_in_an_image_is_named(space: Space, driver: Driver) -> None:
    """Rule S32."""
    os.mkfifo(space.workspace / "pipe")
    sock = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(space.workspace)
    sock.bind("sock")
    os.chdir(here)
    sock.close()
    (space.workspace / "large").write_bytes(bytes(5000))
    scan = driver.ask("scan", max_file_bytes=4096)
    assert sorted(named["path"] for named in scan["special"]) == ["pipe", "sock"]
    assert scan["too_large"] == [{"path": "large", "size": 5000}]
    assert scan["changes"] == []
    assert (scan["special_count"], scan["too_large_count"], scan["unreadable_count"]) == (2, 1, 0)
    driver.restore(1, None, {})
    assert list(space.workspace.iterdir()) == []


def test_only_the_newest_scan_is_kept(driver: Driver) -> None:
    first = driver.ask("scan")
    driver.ask("scan")
    with pytest.raises(Refused) as caught:
        driver.ask("settle", commit=2, scan=first["scan"])
    assert caught.value.code == "unknown_scan"


def test_what_an_undo_would_destroy_is_kept_up_to_a_size(space: Space, driver: Driver) -> None:
    """Rule S35: replaced and removed files, in the tree they were in; the rest is named."""
    driver.write("d/replaced", b"old")
    settle(driver, 2)
    (space.workspace / "d" / "replaced").write_bytes(b"users own")
    (space.workspace / "d" / "new").write_bytes(b"another")
    (space.workspace / "huge").write_bytes(bytes(5000))
    answer = driver.restore(2, None, chunked(b"old"), preserve="all", preserve_bytes=4000, name="undo-1")
    recovery = Path(answer["recovery"])
    assert recovery == space.state / "recovery" / "undo-1"
    assert (recovery / "d" / "replaced").read_bytes() == b"users own"
    assert (recovery / "d" / "new").read_bytes() == b"another"
    assert answer["not_preserved"] == ["huge"]
    assert answer["preserved"] == 2
    assert space.files() == {"d/replaced": b"old"}


def test_a_plan_names_what_it_displaces_and_only_what_is_listed_is_kept(space: Space, driver: Driver) -> None:
    """Rule S35."""
    for name in ("one", "two"):
        (space.workspace / name).write_text(name)
    begun = driver.ask("restore_begin", commit=1)
    plan = driver.ask("restore_plan", restore=begun["restore"])
    assert [(item["path"], item["sha256"]) for item in plan["displaced"]] == [
        ("one", sha(b"one")),
        ("two", sha(b"two")),
    ]
    page = driver.ask("restore_plan", restore=begun["restore"], page=1, **{"from": 1})
    assert [item["path"] for item in page["displaced"]] == ["two"]
    answer = driver.ask("restore_apply", json.dumps(["two"]).encode(), restore=begun["restore"], preserve="listed")
    assert answer["preserved"] == 1
    assert (Path(answer["recovery"]) / "two").read_text() == "two"


@pytest.mark.parametrize("change", ["edit", "add", "replace", "remove"])
def test_what_was_changed_since_the_plan_is_left_alone(space: Space, driver: Driver, change: str) -> None:
    """Rules S34, S35."""
    (space.workspace / "d").mkdir()
    (space.workspace / "d" / "f").write_text("first")
    begun = driver.ask("restore_begin", commit=1)
    driver.ask("restore_plan", restore=begun["restore"])
    if change == "edit":
        (space.workspace / "d" / "f").write_text("later")
    elif change == "add":
        (space.workspace / "d" / "g").write_text("later")
    elif change == "replace":
        (space.workspace / "d" / "g").write_text("later")
        (space.workspace / "d" / "g").rename(space.workspace / "d" / "f")
    else:
        (space.workspace / "d" / "f").unlink()
    with pytest.raises(Refused) as caught:
        driver.ask("restore_apply", restore=begun["restore"], preserve="none")
    assert caught.value.code in ("changed", "not_found")
    if change != "remove":
        assert b"later" in space.files().values()
    assert driver.call("status")[0]["image"] is None
    driver.ask("restore_plan", restore=begun["restore"])
    driver.ask("restore_apply", restore=begun["restore"], preserve="none")
    assert space.files() == {}


@pytest.mark.parametrize(
    "entry",
    [
        {"path": "../out", "kind": "file", "mode": 0o644, "size": 0, "sha256": sha(b"")},
        {"path": "/out", "kind": "file", "mode": 0o644, "size": 0, "sha256": sha(b"")},
        {"path": "a/./b", "kind": "directory", "mode": 0o755},
        {"path": "", "kind": "directory", "mode": 0o755},
        {"path": "f", "kind": "fifo", "mode": 0o644},
        {"path": "f", "kind": "file", "mode": 0o644, "size": 5, "sha256": "x"},
        {"path": "f", "kind": "file", "mode": 0o644, "size": 5 << 20, "sha256": sha(b"")},
        {"path": "f", "kind": "file", "mode": 0o100644, "size": 0, "sha256": sha(b"")},
        {"path": "l", "kind": "symlink"},
        {"path": "l", "kind": "symlink", "target": ""},
        "f",
    ],
)
def test_an_image_that_cannot_be_is_refused_before_anything_changes(space: Space, driver: Driver, entry: Any) -> None:
    """Rule S34."""
    (space.workspace / "f").write_text("mine")
    begun = driver.ask("restore_begin", commit=2)
    with pytest.raises(Refused) as caught:
        driver.ask("restore_image", json.dumps([entry]).encode(), restore=begun["restore"])
    assert caught.value.code in ("bad_request", "outside_workspace", "too_large")
    assert space.files() == {"f": b"mine"}


def test_a_restore_through_symlinks_that_appear_meanwhile_stays_inside(space: Space, driver: Driver) -> None:
    """Rules S35, S36: a directory of the plan has become a link to somewhere else."""
    outside = space.folder / "outside"
    outside.mkdir()
    (outside / "f").write_text("precious")
    (space.workspace / "d").mkdir()
    (space.workspace / "d" / "f").write_text("x")
    begun = driver.ask("restore_begin", commit=2)
    image = [file_entry("d/f", b"new"), file_entry("d/g", b"new")]
    driver.ask("restore_image", json.dumps(image).encode(), restore=begun["restore"])
    driver.ask("restore_plan", restore=begun["restore"])
    driver.ask("put", b"new")
    (space.workspace / "d" / "f").unlink()
    (space.workspace / "d").rmdir()
    (space.workspace / "d").symlink_to(outside)
    with pytest.raises(Refused):
        driver.ask("restore_apply", restore=begun["restore"], preserve="none")
    assert sorted(path.name for path in outside.iterdir()) == ["f"]
    assert (outside / "f").read_text() == "precious"


def test_a_restore_needs_all_contents_and_they_must_be_the_files(space: Space, driver: Driver) -> None:
    """Rules S30, S34."""
    big = os.urandom(CHUNK + 10)
    entry = file_entry("big", big)
    begun = driver.ask("restore_begin", commit=2)
    driver.ask("restore_image", json.dumps([entry]).encode(), restore=begun["restore"])
    plan = driver.ask("restore_plan", restore=begun["restore"])
    assert plan["missing"] == entry["chunks"]
    driver.ask("put", big[:CHUNK])
    assert driver.ask("missing", digests=entry["chunks"])["missing"] == entry["chunks"][1:]
    with pytest.raises(Refused) as caught:
        driver.ask("restore_apply", restore=begun["restore"], preserve="none")
    assert (caught.value.code, caught.value.error["digests"]) == ("missing", entry["chunks"][1:])
    wrong = {**entry, "chunks": [entry["chunks"][0], entry["chunks"][0]]}
    begun = driver.ask("restore_begin", commit=2)
    driver.ask("restore_image", json.dumps([wrong]).encode(), restore=begun["restore"])
    driver.ask("restore_plan", restore=begun["restore"])
    with pytest.raises(Refused) as caught:
        driver.ask("restore_apply", restore=begun["restore"], preserve="none")
    assert caught.value.code == "bad_request"
    assert space.files() == {}


def test_staged_contents_outlive_the_daemon_and_are_checked_again(space: Space, driver: Driver) -> None:
    """Rule S30: a chunk that was damaged on disk is asked for again."""
    driver.ask("put", b"content")
    driver.ask("put", b"other")
    space.kill()
    (space.state / "staging" / sha(b"other")).write_bytes(b"damaged")
    space.up()
    again = space.driver(2)
    again.advance()
    begun = again.ask("restore_begin", commit=2)
    image = [file_entry("a", b"content"), file_entry("b", b"other")]
    again.ask("restore_image", json.dumps(image).encode(), restore=begun["restore"])
    assert again.ask("restore_plan", restore=begun["restore"])["missing"] == []
    with pytest.raises(Refused) as caught:
        again.ask("restore_apply", restore=begun["restore"], preserve="none")
    assert (caught.value.code, caught.value.error["digests"]) == ("missing", [sha(b"other")])
    again.ask("restore_plan", restore=begun["restore"])
    again.ask("put", b"other")
    again.ask("restore_apply", restore=begun["restore"], preserve="none")
    assert space.files() == {"a": b"content", "b": b"other"}


def test_another_restore_ends_the_one_before(driver: Driver) -> None:
    first = driver.ask("restore_begin", commit=2)["restore"]
    second = driver.ask("restore_begin", commit=3)["restore"]
    for op in ("restore_plan", "restore_apply"):
        with pytest.raises(Refused) as caught:
            driver.ask(op, restore=first, **({"preserve": "none"} if op == "restore_apply" else {}))
        assert caught.value.code == "restoring"
    with pytest.raises(Refused) as caught:
        driver.ask("settle", commit=4)
    assert caught.value.code == "restoring"
    driver.ask("restore_image", b"[]", restore=second)
    driver.ask("restore_plan", restore=second)
    assert driver.ask("restore_apply", restore=second, preserve="none")["image"]["commit"] == 3


def test_forgetting_sets_image_and_floor_as_one_and_drops_the_keys(space: Space, driver: Driver) -> None:
    """Rule S26."""
    driver.run("echo x > f")
    scan = driver.ask("scan", freeze=True, sync=True)
    driver.call("arm", point="settle.synced", action="kill")
    with pytest.raises(ConnectionError):
        driver.ask("settle", commit=2, scan=scan["scan"], floor={"call": 2, "attempt": 0}, thaw=True)
    space.ended()
    space.up()
    again = space.driver(2)
    answer = again.advance(keep=[key()])
    assert answer["image"]["commit"] == 2
    assert answer["floor"] == {"call": 2, "attempt": 0}
    assert answer["commands"][0]["state"] == "cut_off"
    assert list((space.state / "outputs").iterdir()) == []
    assert whole_scan(again) == []


def test_a_workspace_on_another_file_system_is_restored_all_the_same(
    make_space: MakeSpace, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Rules S34, S35: nothing can be renamed from the state directory into it, nor back."""
    other = Path(tempfile.mkdtemp(dir="/dev/shm"))
    request.addfinalizer(lambda: shutil.rmtree(other))
    if other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no other file system here")
    space = make_space()
    space.workspace = other
    driver = space.up().driver(1)
    driver.advance()
    driver.settle_first()
    (other / "mine").write_bytes(b"users own")
    big = os.urandom(CHUNK + 3)
    image = [file_entry("d/big", big, 0o640), file_entry("mine", b"agents")]
    answer = driver.restore(2, image, chunked(big, b"agents"), preserve="all")
    assert (Path(answer["recovery"]) / "mine").read_bytes() == b"users own"
    assert space.files() == {"d/big": big, "mine": b"agents"}
    assert (other / "d" / "big").stat().st_mode & 0o7777 == 0o640
    assert whole_scan(driver) == []
    assert sorted(path.name for path in other.iterdir()) == ["d", "mine"]


def test_many_chunks_are_put_at_once_and_each_is_what_its_size_says(space: Space, driver: Driver) -> None:
    """Rules S7, S30."""
    body = b"one" + b"two" + b"one" + b""
    assert driver.ask("put", body, sizes=[3, 3, 3, 0])["digests"] == [sha(b"one"), sha(b"two"), sha(b"one"), sha(b"")]
    for sizes in ([3, 3], [9, 1], [-1, 10], [CHUNK + 1], ["3"]):
        with pytest.raises(Refused) as caught:
            driver.ask("put", body, sizes=sizes)
        assert caught.value.code in ("bad_request", "too_large")
    assert driver.ask("missing", digests=[sha(b"one"), sha(b"two")])["missing"] == []


def test_a_chunk_of_one_file_moves_and_one_of_several_is_copied(space: Space, driver: Driver) -> None:
    """Rule S34: whichever way, and after a restore that was refused half way."""
    image = [file_entry("a", b"one"), file_entry("b", b"two"), file_entry("c", b"two"), file_entry("d/e", b"three")]
    begun = driver.ask("restore_begin", commit=2)
    driver.ask("restore_image", json.dumps(image).encode(), restore=begun["restore"])
    driver.ask("restore_plan", restore=begun["restore"])
    driver.ask("put", b"onetwothree", sizes=[3, 3, 5])
    (space.workspace / "c").write_text("somebody else's")
    with pytest.raises(Refused) as caught:
        driver.ask("restore_apply", restore=begun["restore"], preserve="none")
    assert caught.value.code == "changed"
    plan = driver.ask("restore_plan", restore=begun["restore"])
    contents = {sha(content): content for content in (b"one", b"two", b"three")}
    for digest in plan["missing"]:
        driver.ask("put", contents[digest])
    driver.ask("restore_apply", restore=begun["restore"], preserve="all")
    assert space.files() == {"a": b"one", "b": b"two", "c": b"two", "d/e": b"three"}
    assert list((space.state / "staging").iterdir()) == []
    assert whole_scan(driver) == []


@pytest.mark.parametrize("how", ["edited", "added", "removed", "mode"])
def test_what_others_change_elsewhere_while_it_is_restored_is_seen_by_the_next_scan(
    space: Space, driver: Driver, how: str
) -> None:
    """Rules S28, S35: a restore looks once, and leaves alone what it has no business with."""
    for name in ("a", "b", "c"):
        (space.workspace / name).write_text(name)
    time.sleep(0.2)
    scan = driver.ask("scan", sync=True)
    driver.ask("settle", commit=2, scan=scan["scan"])
    (space.workspace / "a").write_text("x")
    begun = driver.ask("restore_begin", commit=2)
    assert begun["known"]
    driver.ask("restore_plan", restore=begun["restore"])
    driver.ask("put", b"a")
    other = space.workspace / "b"
    if how == "edited":
        other.write_text("y")
    elif how == "added":
        (space.workspace / "new").write_text("new")
    elif how == "removed":
        other.unlink()
    else:
        other.chmod(0o600)
    driver.ask("restore_apply", restore=begun["restore"], preserve="none")
    assert (space.workspace / "a").read_text() == "a"
    seen = [(change["path"], change["change"]) for change in whole_scan(driver)]
    expected = {"added": ("new", "added"), "removed": ("b", "removed")}.get(how, ("b", "changed"))
    assert seen == [expected]
    space.kill()
    space.up()
    again = space.driver(2)
    again.advance()
    assert [(change["path"], change["change"]) for change in whole_scan(again)] == [expected]


def test_what_is_too_deep_is_named_and_a_restore_moves_it_aside_whole(space: Space, driver: Driver) -> None:
    """Rules S32, S35."""
    (space.workspace / "a").write_text("a")
    scan = driver.ask("scan", sync=True)
    driver.ask("settle", commit=2, scan=scan["scan"])
    at = os.open(space.workspace, os.O_RDONLY)
    for _ in range(spaced.DEPTH + 5):
        os.mkdir("d", dir_fd=at)
        at, above = os.open("d", os.O_RDONLY, dir_fd=at), at
        os.close(above)
    os.close(os.open("precious", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=at))
    os.close(at)
    found = driver.ask("scan")
    assert [item["errno"] for item in found["unreadable"]] == ["ELOOP"]
    begun = driver.ask("restore_begin", commit=2)
    driver.ask("restore_plan", restore=begun["restore"])
    done = driver.ask("restore_apply", restore=begun["restore"], preserve="all")
    assert space.files() == {"a": b"a"}
    assert os.listdir(space.workspace) == ["a"]
    assert done["preserved"] == 1
    assert [path.name for path in Path(done["recovery"]).rglob("precious")] == ["precious"]
