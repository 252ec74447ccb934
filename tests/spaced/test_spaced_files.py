"""Files: nothing outside the workspace is ever touched, and a write happens whole or not at all."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

import pytest
from spaced_wire import Driver, Refused, Space, sha

from perdure.spaced import spaced


def code_of(driver: Driver, op: str, body: bytes = b"", /, **fields: Any) -> str:
    with pytest.raises(Refused) as caught:
        driver.ask(op, body, **fields)
    return caught.value.code


CHANGING = {"call": 1, "attempt": 1, "nonce": "n"}
OUTSIDE = [
    "../secret", "..", "a/../../secret", "/etc/passwd", "{folder}/secret", "./../secret", "out", "out/secret",
    "chain/secret", "absolute", "dir/up/out/secret", "a/b/../../../secret",
]  # fmt: skip


@pytest.mark.parametrize("path", OUTSIDE)
@pytest.mark.parametrize("op", ["read", "stat", "list", "walk", "glob", "grep", "write", "remove"])
def test_no_path_leads_out(shared_space: Space, shared: Driver, op: str, path: str) -> None:
    """Rule S36: by dots, by being absolute, by symlinks of files and of directories."""
    space, driver = shared_space, shared
    secret = space.folder / "secret"
    secret.write_text("precious")
    work = space.workspace
    (work / "dir").mkdir(exist_ok=True)
    (work / "a" / "b").mkdir(parents=True, exist_ok=True)
    links = {"out": "..", "chain": "out", "absolute": str(secret), "dir/up": ".."}
    for name, target in links.items():
        if not os.path.lexists(work / name):
            (work / name).symlink_to(target)
    fields: dict[str, Any] = {"path": path.format(folder=space.folder)}
    body = b""
    if op in ("write", "remove"):
        fields.update(CHANGING)
        body = b"overwritten" if op == "write" else b""
    if op in ("glob", "grep"):
        fields["pattern"] = "precious"
    if op == "remove" and path in ("out", "chain", "absolute"):
        driver.ask(op, body, **fields)
        assert not os.path.lexists(work / path), "the link itself is inside"
    elif op == "remove" and path == "..":
        assert code_of(driver, op, body, **fields) == "outside_workspace"
    else:
        assert code_of(driver, op, body, **fields) == "outside_workspace"
    assert secret.read_text() == "precious"


def test_links_inside_are_followed(space: Space, driver: Driver) -> None:
    """Rule S36."""
    driver.write("d/f", b"x")
    (space.workspace / "l").symlink_to("d")
    (space.workspace / "abs").symlink_to(space.workspace / "d" / "f")
    (space.workspace / "d" / "up").symlink_to("../d/f")
    for path in ("l/f", "abs", "d/up", "./d//f", "d/../l/f", "l/../d/f"):
        assert driver.ask_body("read", path=path)[1] == b"x", path
    driver.write("abs", b"through")
    assert (space.workspace / "d" / "f").read_bytes() == b"through"
    assert (space.workspace / "abs").is_symlink()
    assert driver.ask("stat", path="abs", follow=False)["kind"] == "symlink"
    assert driver.ask("stat", path="abs")["kind"] == "file"
    (space.workspace / "loop").symlink_to("loop")
    assert code_of(driver, "read", path="loop") == "io_error"


def test_special_files_are_neither_read_nor_written(space: Space, driver: Driver) -> None:
    """Rule S36: and nothing hangs on a pipe that nobody writes."""
    os.mkfifo(space.workspace / "pipe")
    assert code_of(driver, "read", path="pipe") == "special_file"
    assert code_of(driver, "write", b"x", path="pipe", **CHANGING) == "special_file"
    assert code_of(driver, "remove", path="pipe", **CHANGING) == "special_file"
    assert code_of(driver, "read", path="") == "is_a_directory"
    assert code_of(driver, "write", b"x", path="", **CHANGING) == "is_a_directory"
    assert driver.ask("grep", pattern="x")["matches"] == []
    assert driver.ask("stat", path="pipe")["kind"] == "other"


def test_nobody_else_can_open_what_replaces_a_secret_before_it_is_there(space: Space, driver: Driver) -> None:
    driver.write("secret", b"old", mode=0o600)
    over, modes = threading.Event(), set[int]()

    def look() -> None:
        while not over.is_set():
            for name in os.listdir(space.workspace):
                if name.startswith(".perdure-"):
                    with contextlib.suppress(FileNotFoundError):
                        modes.add(os.stat(space.workspace / name).st_mode & 0o777)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(1000):
            driver.write("secret", b"x" * (1 << 20))
            if modes:
                break
    finally:
        over.set()
        looking.join()
    assert modes == {0o600}


def test_a_write_is_atomic_keeps_the_mode_and_may_expect(space: Space, driver: Driver) -> None:
    """Rule S37."""
    assert driver.write("a/b/f", b"one") == {"created": True, "size": 3, "mode": 0o644}
    (space.workspace / "a/b/f").chmod(0o751)
    inode = (space.workspace / "a/b/f").stat().st_ino
    assert driver.write("a/b/f", b"two!") == {"created": False, "size": 4, "mode": 0o751}
    assert (space.workspace / "a/b/f").stat().st_ino != inode
    assert driver.write("a/b/f", b"", mode=0o600)["mode"] == 0o600
    assert code_of(driver, "write", b"x", path="a/b/f", expect=sha(b"other"), **CHANGING) == "changed"
    assert code_of(driver, "write", b"x", path="a/b/f", expect="absent", **CHANGING) == "changed"
    assert code_of(driver, "write", b"x", path="new", expect=sha(b""), **CHANGING) == "changed"
    driver.write("a/b/f", b"three", expect=sha(b""))
    driver.write("new", b"", expect="absent")
    assert code_of(driver, "write", b"x", path="no/parent", parents=False, **CHANGING) == "not_found"
    assert space.files() == {"a/b/f": b"three", "new": b""}


def test_a_large_file_is_written_from_staged_chunks_and_read_in_ranges(space: Space, driver: Driver) -> None:
    content = os.urandom((1 << 20) + 100)
    sizes = [min(1 << 20, len(content) - at) for at in range(0, len(content), 1 << 20)]
    digests = driver.ask("put", content, sizes=sizes)["digests"]
    assert driver.ask("write", path="big", chunks=digests, **CHANGING)["size"] == len(content)
    assert (space.workspace / "big").read_bytes() == content
    assert driver.ask_body("read", path="big", offset=1 << 20, length=50)[1] == content[1 << 20 :][:50]
    assert driver.ask_body("read", path="big", offset=1 << 30)[1] == b""
    assert code_of(driver, "write", path="big", chunks=[sha(b"absent")], **CHANGING) == "missing"
    assert (space.workspace / "big").read_bytes() == content


def test_names_that_are_not_utf8_go_both_ways(space: Space, driver: Driver) -> None:
    name = {"b64": "YS//LnR4dA=="}  # a/\xff.txt
    driver.write(name, b"needle")
    assert (space.workspace / "a" / os.fsdecode(b"\xff.txt")).read_bytes() == b"needle"
    assert driver.ask_body("read", path=name)[1] == b"needle"
    assert driver.ask("list", path="a")["entries"][0]["name"] == {"b64": "/y50eHQ="}
    assert driver.ask("grep", pattern="needle")["matches"][0]["path"] == name
    assert driver.ask("glob", pattern="**/*.txt")["paths"] == [name]
    assert [entry["path"] for entry in driver.ask("walk")["entries"]] == ["a", name]
    driver.ask("remove", path=name, **CHANGING)
    assert space.files() == {}


def test_looking_around(space: Space, driver: Driver) -> None:
    for path in ("a.py", "b.txt", "src/c.py", "src/deep/d.py", ".hidden/e.py"):
        driver.write(path, f"one\nimport {path}\n".encode())
    assert driver.ask("glob", pattern="*.py")["paths"] == ["a.py"]
    assert driver.ask("glob", pattern="**/*.py")["paths"] == [".hidden/e.py", "a.py", "src/c.py", "src/deep/d.py"]
    assert driver.ask("glob", path="src", pattern="**/[cd].py")["paths"] == ["src/c.py", "src/deep/d.py"]
    assert driver.ask("glob", pattern="**/*.py", limit=2) == {"paths": [".hidden/e.py", "a.py"], "more": True}
    assert driver.ask("glob", pattern="src/**")["paths"] == ["src/c.py", "src/deep", "src/deep/d.py"]
    assert [entry["name"] for entry in driver.ask("list", path="")["entries"]] == [".hidden", "a.py", "b.txt", "src"]
    assert driver.ask("list", path="", limit=1)["more"]
    shown = [entry["path"] for entry in driver.ask("walk", hidden=False)["entries"]]
    assert shown == ["a.py", "b.txt", "src", "src/c.py", "src/deep", "src/deep/d.py"]
    found = driver.ask("grep", pattern="^IMPORT", ignore_case=True, glob="*.py", path="src")["matches"]
    assert found == [
        {"path": "src/c.py", "line": 2, "text": "import src/c.py"},
        {"path": "src/deep/d.py", "line": 2, "text": "import src/deep/d.py"},
    ]
    assert driver.ask("grep", pattern="a.py", fixed=True)["matches"][0]["line"] == 2
    driver.write("binary", b"import\0")
    assert driver.ask("grep", pattern="import", glob="binary") == {
        "matches": [],
        "more": False,
        "timed_out": False,
        "skipped": 1,
    }
    assert driver.ask("stat", path="none") == {"kind": None}
    assert driver.ask("stat", path="a.py/below") == {"kind": None}
    assert code_of(driver, "list", path="a.py") == "not_a_directory"
    assert code_of(driver, "read", path="none") == "not_found"
    assert code_of(driver, "remove", path="src", **CHANGING) == "not_empty"
    assert code_of(driver, "remove", path="none", **CHANGING) == "not_found"


def test_a_pattern_that_takes_for_ever_is_ended_and_others_go_on_meanwhile(space: Space, driver: Driver) -> None:
    """Rule S38."""
    driver.write("evil", b"a" * 5000)
    driver.send_asked("grep", pattern="(a+)+$b", wait_ms=1500)
    other = driver.twin(space.address)
    assert other.ask("stat", path="evil")["size"] == 5000
    answer = driver.receive()[0]
    assert (answer["timed_out"], answer["more"]) == (True, True)
    assert driver.ask("grep", pattern="a", limit=1)["matches"][0]["line"] == 1


@pytest.mark.parametrize(
    ("pattern", "matches", "others"),
    [
        ("*", ["a", "ab"], ["a/b"]),
        ("?", ["a"], ["ab", "/"]),
        ("**", ["a", "a/b/c"], []),
        ("a/**/b", ["a/b", "a/x/b", "a/x/y/b"], ["ab", "a/b/c"]),
        ("[ab]", ["a", "b"], ["c", "]"]),
        ("[!ab]", ["c", "!"], ["a", "/"]),
        ("[]]", ["]"], ["["]),
        ("[", ["["], ["a"]),
        ("a.b", ["a.b"], ["axb"]),
        ("x\\y", ["x\\y"], ["xy"]),
        ("**/a", ["a", "x/a"], ["xa"]),
        ("*.{c,h}", ["a.c", "a.h"], ["a.", "a.ch", "a.{c,h}", "x/a.c"]),
        ("{a,b/{c,d*}}/e", ["a/e", "b/c/e", "b/dx/e"], ["b/e", "c/e"]),
        ("{a}{", ["{a}{"], ["a"]),
        ("a{,b}", ["a", "ab"], ["a{,b}"]),
    ],
)
def test_patterns(pattern: str, matches: list[str], others: list[str]) -> None:
    compiled = spaced.glob(pattern)
    assert [text for text in matches if not compiled.fullmatch(text)] == []
    assert [text for text in others if compiled.fullmatch(text)] == []


def test_the_patterns_that_braces_stand_for_are_bounded(driver: Driver) -> None:
    assert driver.ask("glob", pattern="{a,b}" * 6)["paths"] == []
    assert code_of(driver, "glob", pattern="{a,b}" * 7) == "bad_request"
    assert code_of(driver, "glob", pattern="{a,b}" * 500) == "bad_request"


def test_a_tree_deeper_than_the_bound_is_named_not_followed(space: Space, driver: Driver) -> None:
    """Rule S7."""
    path = space.workspace
    descriptor = os.open(path, os.O_RDONLY)
    for _ in range(300):
        os.mkdir("d", dir_fd=descriptor)
        below = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)
    scan = driver.ask("scan")
    assert scan["unreadable_count"] == 1
    assert scan["unreadable"][0]["errno"] == "ELOOP"
