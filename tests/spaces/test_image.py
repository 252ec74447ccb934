"""Images: what changes one into the next, and how names that are no text are kept (rules S130 to S134)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.kernel.draft import DraftObject, Recorder
from perdure.kernel.ops import apply as replay
from perdure.spaces import image
from perdure.spaces.image import Change, Directory, Entry, File, Link
from perdure.spaces.wire import CHUNK_BYTES

NAMES = st.sampled_from([b"a", b"b", b"\xff\xfe", b"-n", b"new\nline", "é".encode(), b" "])
FILES = st.builds(
    File,
    mode=st.sampled_from([0o644, 0o755, 0o4755]),
    size=st.integers(1, 3),
    sha256=st.sampled_from(["0" * 64, "1" * 64]),
)
LINKS = st.builds(Link, target=st.sampled_from(["", "/abs", image.escape(b"\xff")]))


@st.composite
def trees(draw: st.DrawFn) -> dict[bytes, Entry]:
    """A tree as paths in bytes, each directory of which is there."""
    made: dict[bytes, Entry] = {}
    directories = [b""]
    for _ in range(draw(st.integers(0, 12))):
        directory = draw(st.sampled_from(directories))
        path = (directory + b"/" if directory else b"") + draw(NAMES)
        if path in made:
            continue
        made[path] = entry = draw(st.one_of(FILES, LINKS, st.just(Directory(0o755)), st.just(Directory(0o700))))
        if isinstance(entry, Directory):
            directories.append(path)
    return made


def built(wanted: dict[bytes, Entry]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    image.apply(tree, image.difference(tree, changes(wanted)))
    return tree


def changes(wanted: dict[bytes, Entry]) -> list[Change]:
    return [Change(image.escape(path), entry) for path, entry in wanted.items()]


def read(tree: image.Tree) -> dict[bytes, Entry | None]:
    return {image.unescape(change.path): change.entry for change in image.entries(tree)}


@given(trees(), trees())
def test_the_difference_leads_from_one_image_to_the_other_s132(
    before: dict[bytes, Entry], after: dict[bytes, Entry]
) -> None:
    tree = built(before)
    assert read(tree) == before
    image.apply(tree, image.difference(tree, changes(after)))
    assert read(tree) == after
    assert tree == built(after)
    assert all(tree.values()), "a directory that holds nothing is an entry of its own only"
    assert json.loads(json.dumps(tree)) == tree
    assert image.difference(tree, changes(after)) == []


@given(trees(), trees())
def test_a_draft_takes_the_same_changes_as_operations_s131(
    before: dict[bytes, Entry], after: dict[bytes, Entry]
) -> None:
    plain = built(before)
    recorder = Recorder(plain)
    root = recorder.root
    assert isinstance(root, DraftObject)
    found = image.difference(plain, changes(after))
    image.apply(root, found)  # pyright: ignore[reportArgumentType]  # a draft reads and writes like a dict
    assert recorder.value == built(after)
    assert replay(plain, recorder.ops) == built(after)
    assert len(recorder.ops) <= 2 * len(found)


@given(trees())
def test_directories_come_before_what_they_hold_s130(wanted: dict[bytes, Entry]) -> None:
    seen = {b""}
    for change in image.entries(built(wanted)):
        path = image.unescape(change.path)
        assert path.rpartition(b"/")[0] in seen
        if isinstance(change.entry, Directory):
            seen.add(path)


@given(st.binary(min_size=1).filter(lambda path: b"\0" not in path))
def test_every_name_comes_back_s133(path: bytes) -> None:
    escaped = image.escape(path)
    json.dumps(escaped).encode()  # no lone surrogate
    assert image.unescape(escaped) == path
    directory, name = image.split(escaped)
    assert image.unescape(directory) == path.rpartition(b"/")[0]
    if directory and name:
        assert image.join(directory, name) == escaped


def test_what_is_unchanged_is_no_operation_s131() -> None:
    tree = built({b"a": File(0o644, 1, "0" * 64)})
    recorder = Recorder(tree)
    image.apply(recorder.root, [Change("a", File(0o644, 1, "0" * 64))])  # pyright: ignore[reportArgumentType]
    assert recorder.ops == ()


def test_a_file_in_what_is_no_directory_is_refused_s132() -> None:
    with pytest.raises(ValueError, match="is no directory"):
        image.apply({}, [Change("a", File(0o644, 1, "0" * 64)), Change("a/b", File(0o644, 1, "0" * 64))])
    tree = built({b"a": Directory(0o755), b"a/b": Link("x")})
    with pytest.raises(ValueError, match="is no directory"):
        image.apply(tree, [Change("a", Link("y")), Change("a/c", Link("z"))])


def test_the_digests_of_an_image_are_those_of_its_chunks_s134() -> None:
    tree = built(
        {
            b"empty": File(0o644, 0, "e" * 64),
            b"small": File(0o644, 5, "1" * 64),
            b"large": File(0o644, CHUNK_BYTES + 1, "2" * 64, ("3" * 64, "4" * 64)),
            b"link": Link("small"),
        }
    )
    assert sorted(image.digests(tree)) == ["1" * 64, "3" * 64, "4" * 64]
