"""Workspaces as they are in the wild: undone and rebuilt byte for byte (S130 to S146).

Each goes through calls of an agent: one makes the tree; one that changes it is cut off by the end of the process and
undone by the next; it runs to its end; the Space is deleted outright and comes back from the log. What is there is
looked at by a walk that knows nothing of the product.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from durable_kit import Nasty
from workspace_walk import different

from perdure.spaces.local import LocalSpaces
from perdure.testing.model import call

FULL_SIZE = os.environ.get("PERDURE_TEST_FULL_SIZE") == "1"
"""With what takes minutes or gigabytes."""
BIG = (1 << 30) if FULL_SIZE else (64 << 20)
DIRECTORIES = 200 if FULL_SIZE else 20
"""Of a hundred files each."""


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Nasty]:
    world = Nasty(tmp_path)
    yield world
    await world.spaces.delete("one")


# --- the trees ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    name: str
    made: str
    """A shell script, in an empty workspace."""
    changed: str
    needs: str | None = None
    """A program."""
    root: bool = False
    """Only root may look into it."""


def python(*lines: str) -> str:
    return "python3 - <<'END'\nimport os, shutil\n" + "\n".join(lines) + "\nEND"


GIT = "git -c user.name=a -c user.email=a@example.com -c init.defaultBranch=main -c gc.auto=0 -c core.editor=true"

CASES = (
    Case(
        "very many files",
        python(
            f"for d in range({DIRECTORIES}):",
            "    os.mkdir(f'd{d}')",
            "    for f in range(100): open(f'd{d}/f{f}', 'w').write(f'{d} {f}' * (1 + f % 50))",
        ),
        python(
            f"for d in range(0, {DIRECTORIES}, 3): open(f'd{{d}}/f{{d % 100}}', 'a').write('more')",
            f"for d in range(1, {DIRECTORIES}, 5): os.remove(f'd{{d}}/f7')",
            f"for d in range(2, {DIRECTORIES}, 7): open(f'd{{d}}/new', 'w').write('new' * d)",
            "shutil.rmtree('d10'); os.rename('d11', 'd12/inside'); os.rename('d13', 'z')",
        ),
    ),
    Case(
        "one byte of a large file",
        python(
            f"with open('big', 'wb') as f:",  # noqa: F541
            f"    f.truncate({BIG})",
            f"    for at in range(0, {BIG}, {BIG // 16} + 4099): f.seek(at); f.write(b'block %d' % at)",
        ),
        python(f"with open('big', 'r+b') as f: f.seek({BIG // 2} + 12345); f.write(b'x')"),
    ),
    Case(
        "a git repository in the middle of a rebase",
        f"set -e; {GIT} init -q repo; cd repo; echo one > a; {GIT} add a; {GIT} commit -qm one; "
        f"{GIT} checkout -qb side; "
        f"echo side > a; {GIT} commit -qam side; echo more > b; {GIT} add b; {GIT} commit -qm more; "
        f"{GIT} checkout -q main; echo main > a; {GIT} commit -qam main; {GIT} checkout -q side; "
        f"{GIT} rebase main >/dev/null 2>&1 && exit 1; test -d .git/rebase-merge; {GIT} tag here",
        f"set -e; cd repo; echo both > a; {GIT} add a; {GIT} rebase --continue >/dev/null 2>&1; "
        f"test ! -d .git/rebase-merge; "
        f"{GIT} gc -q; {GIT} fsck",
        needs="git",
    ),
    Case(
        "renamed directories",
        "mkdir -p a/deep/er b/other c; for i in 1 2 3; do echo $i > a/deep/er/$i; echo b$i > b/other/$i; done; "
        "echo c > c/c",
        "mv a t; mv b a; mv t b; mv c b/deep/c; mv b/deep/er a/er; mkdir c",
    ),
    Case(
        "symbolic links",
        "ln -s nowhere dangling; ln -s /etc/passwd absolute; ln -s loop loop; ln -s two one; ln -s one two; mkdir d; "
        "echo x > d/x; ln -s d to-d; ln -s ../d d/up; ln -s . here; ln -s d/x to-x; "
        "ln -s \"$PWD\" me; ln -s 'a\nb ' odd",
        "ln -sfn elsewhere dangling; rm loop; mkdir loop; rm one; echo file > one; rm to-d; cp -r d to-d; "
        "ln -sfn d/up here; rm -r d; ln -s to-d d; rm absolute",
    ),
    Case(
        "modes",
        "echo s > setuid; chmod 4755 setuid; echo g > setgid; chmod 2711 setgid; mkdir sticky; chmod 1777 sticky; "
        "echo x > x; chmod 755 x; mkdir ro; echo in > ro/in; mkdir ro/sub; echo deep > ro/sub/deep; chmod 400 ro/in; "
        "chmod 555 ro/sub ro; mkdir gid; chmod 2775 gid",
        "chmod 755 setuid; echo t >> setgid; chmod 2711 setgid; chmod 700 sticky; chmod 644 x; chmod 755 ro ro/sub; "
        "rm -f ro/in; echo other > ro/sub/deep; chmod 500 ro; rmdir gid; echo gid > gid; chmod 6777 gid",
    ),
    Case(
        "what nobody may read",
        "echo hidden > none; mkdir closed; echo in > closed/in; chmod 000 closed/in closed none",
        "chmod 700 closed; rm -f closed/in none; mkdir none; chmod 000 none",
        root=True,
    ),
    Case(
        "empty directories",
        "mkdir -p e1 e2/e3/e4 full; echo x > full/x; mkdir -m 700 e5",
        "rmdir e1; rm -r e2; echo e2 > e2; rm full/x; echo in > e5/in; mkdir -p n1/n2",
    ),
    Case(
        "files turned directories, and back",
        "echo file > f; mkdir -p d/e; echo x > d/e/x; ln -s f l; mkdir m; echo m > m/m",
        "rm f; mkdir -p f/g; echo y > f/g/y; rm -r d; echo d > d; rm l; mkdir l; rm -r m; ln -s f m",
    ),
    Case(
        "names",
        python(
            r"names = [b'\xff\xfe', b'-rf', b'--', b'a\nb', b' lead', b'trail ', b'\\', b'\x22', b'\x27', b'*',",
            r"  b'$(id)',",
            r"  'e\u0301'.encode(), '\u00e9'.encode(), '\U0001f600'.encode(), b'\xed\xa0\x80', b'\x01\x7f',",
            r"  b'b64:eA==', b'...', b'.perdure-0', b'{}', b'\xc3', b'\tx', b'x' * 255, b'\xf0' * 255, b'CON', b'~']",
            r"for name in names:",
            r"    open(name, 'wb').write(name * 3)",
            r"    os.mkdir(b'd' + name[:250]); open(b'd' + name[:250] + b'/' + name, 'wb').write(name)",
            r"    os.symlink(name, b'l' + name[:250])",
        ),
        python(
            r"for name in sorted(os.listdir(b'.')):",
            r"    if os.path.islink(name): os.remove(name); os.symlink(b'\xfe' + name[:250], name)",
            r"    elif os.path.isdir(name): os.rename(name, name[:249] + b'\xfd')",
            r"    elif len(name) % 2: open(name, 'ab').write(b'\n')",
            r"    else: os.remove(name)",
        ),
    ),
    Case(
        "the same size and times, other contents",
        "for i in 1 2 3; do echo aaaa > f$i; touch -d 2001-02-03 f$i; done; sleep 0.3",
        python(
            "for name in ('f1', 'f2'):",
            "    s = os.stat(name)",
            "    with open(name, 'r+b') as f: f.write(b'bbbb')",
            "    os.utime(name, ns=(s.st_atime_ns, s.st_mtime_ns))",
            "s = os.stat('f3'); open('t', 'w').write('cccc\\n'); os.utime('t', ns=(s.st_atime_ns, s.st_mtime_ns))",
            "os.rename('t', 'f3')",
        ),
    ),
    Case(
        "hard links",
        "echo shared > a; ln a b; mkdir d; ln a d/c; echo alone > e",
        "echo changed > b; ln e f; rm d/c; ln b d/g",
    ),
    Case(
        "a very deep path",
        python(
            "for level in range(120):",
            "    os.mkdir('directory-%020d' % level); os.chdir('directory-%020d' % level)",
            "    open('file', 'w').write(str(level))",
            "open('x' * 200, 'w').write('the deepest')",
        ),
        python(
            "for level in range(119): os.chdir('directory-%020d' % level)",
            "shutil.rmtree('directory-%020d' % 119); open('file', 'w').write('other')",
        ),
    ),
    Case(
        "files and directories swapped for links to the like",
        "echo same > a; echo same > b; mkdir d e; echo in > d/in; echo in > e/in; "
        "mkdir -p ../outside; echo in > ../outside/in",
        "rm a; ln -s b a; rm -r d; ln -s ../outside d; rm -r e; ln -s d e; "
        "echo through > e/in; rm b; ln -s ../outside/in b",
    ),
    Case(
        "odd times",
        "for i in 1 2 3; do echo $i > f$i; done; touch -d 1960-01-01 f1; touch -d @0 f2; touch -d 2100-01-01 f3",
        "echo one > f1; touch -d 1960-01-01 f1; echo x > f2; touch -d @0 f2; touch -d 2100-01-01 f1",
    ),
    Case("nothing at all", "true", "mkdir d; echo x > d/x; ln -s d l"),
    Case("everything gone", "mkdir -p d/e; echo x > d/e/x; ln -s d l; echo y > y", "rm -rf * .[!.]*"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
async def test_a_nasty_workspace_survives_undo_and_rebuild_byte_for_byte_s141(case: Case, world: Nasty) -> None:
    if case.needs is not None and shutil.which(case.needs) is None:
        pytest.skip(f"needs {case.needs}")
    if case.root and os.geteuid() != 0:
        pytest.skip("only root can read what nobody may read; others are refused (rule S140)")
    await world.bash(case.made)
    made = world.seen()
    await world.cut_off(case.changed)
    assert world.seen() != made
    await world.undone(case.changed)
    assert different(made, world.seen()) == {}
    await world.bash(case.changed)
    changed = world.seen()
    assert changed != made
    await world.spaces.delete("one")
    assert not world.workspace.exists()
    await world.bash("true")
    assert different(changed, world.seen()) == {}
    await world.cut_off("rm -rf * .[!.]*; echo other > other")
    await world.undone("rm -rf * .[!.]*; echo other > other")
    assert different(changed, world.seen()) == {}


# --- what no image can hold -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            python(
                "for level in range(300): os.mkdir('deep'); os.chdir('deep')",
                "open('deepest', 'w').write('x')",
            ),
            "cannot be read",
        ),
        (
            python(
                "for level in range(25): os.mkdir('x' * 200); os.chdir('x' * 200)",
                "open('deepest', 'w').write('x')",
            ),
            "cannot be read",
        ),
        ("mkdir d; mkfifo d/pipe; echo x > x", "special files"),
        (python("import socket; socket.socket(socket.AF_UNIX).bind('socket')"), "special files"),
        ("head -c 2000000 /dev/zero > d-large", "max_file_bytes"),
    ],
    ids=["too deep", "too long a path", "pipe", "socket", "too large"],
)
async def test_what_no_image_can_hold_is_refused_and_undone_s140(script: str, said: str, world: Nasty) -> None:
    await world.bash("mkdir d; echo in > d/in; chmod 500 d; ln -s d l")
    made = world.seen()
    ((code, text),) = await world.call(call("bash", command=script), max_file_bytes=1_000_000)
    assert code is None
    assert said in text
    assert "undone" in text
    assert different(made, world.seen()) == {}
    await world.bash("chmod 700 d; echo more >> d/in")
    assert world.seen()[b"d"] == ("directory", 0o700, "")


# --- what goes on while it is captured ------------------------------------------------------------------------------


async def test_what_writes_on_after_its_command_ended_is_captured_in_one_piece_s137(world: Nasty) -> None:
    """It adds to one file and then to the other, so at any moment the first is at most one line longer. Whoever walks
    the workspace has much to look at between the two."""
    between = "mkdir a m z; (cd a; seq 1500 | xargs touch); (cd z; seq 1500 | xargs touch)"
    writer = "i=0; while :; do i=$((i+1)); echo $i >> first; echo $i >> m/second; done"
    begin = f"{between}; setsid sh -c '{writer}' > /dev/null 2>&1 < /dev/null & "
    begin += "while [ ! -s m/second ]; do sleep 0.01; done"
    look = call("bash", command="sleep 0.1; wc -l < m/second")
    results = await world.call(call("bash", command=begin), look, look)
    lines = [int(text) for _, text in results[1:]]
    assert sorted(set(lines)) == lines, "it went on after each call"
    await world.spaces.delete("one")
    await world.bash("true")
    first, second = ((world.workspace / name).read_text().splitlines() for name in ("first", "m/second"))
    assert len(second) <= len(first) <= len(second) + 1
    assert first == [str(number) for number in range(1, len(first) + 1)]
    assert first[: len(second)] == second


async def test_own_edits_between_calls_stay_and_come_back_s145(world: Nasty) -> None:
    await world.bash("mkdir d; echo agent > d/a; echo agent > b; touch -d 2001-02-03 b; ln -s b l; sleep 0.2")
    times = (world.workspace / "b").stat()
    (world.workspace / "b").write_text("owner\n")
    os.utime(world.workspace / "b", ns=(times.st_atime_ns, times.st_mtime_ns))
    (world.workspace / "d" / "a").unlink()
    (world.workspace / "d").rmdir()
    (world.workspace / "d").write_text("a file now\n")
    (world.workspace / "l").unlink()
    (world.workspace / "l").symlink_to("elsewhere")
    (world.workspace / "own").mkdir(0o700)
    edited = world.seen()
    await world.cut_off("rm -r own; echo changed > d; rm l")
    await world.undone("rm -r own; echo changed > d; rm l")
    assert different(edited, world.seen()) == {}
    await world.spaces.delete("one")
    await world.bash("true")
    assert different(edited, world.seen()) == {}


async def test_own_edits_during_an_undone_call_are_moved_aside_whole_s142(world: Nasty) -> None:
    await world.bash("mkdir -p d/e; echo agent > d/e/a; echo b > b")
    made = world.seen()
    await world.cut_off("echo changed > b")
    (world.workspace / "d" / "e" / "a").write_bytes(b"\0owner\xff" * 1000)
    (world.workspace / "d" / "note").write_text("typed meanwhile\n")
    await world.undone("echo changed > b")
    assert different(made, world.seen()) == {}
    (report,) = [report for report in world.reports if report.type == "space_recovery"]
    (folder,) = (world.workspace.parent / "state" / "recovery").iterdir()
    assert str(folder) in report.message
    assert (folder / "d" / "e" / "a").read_bytes() == b"\0owner\xff" * 1000
    assert (folder / "d" / "note").read_text() == "typed meanwhile\n"


async def test_edits_while_a_call_runs_belong_to_it_s136(world: Nasty) -> None:
    command = call("bash", command="echo agent > a; touch ../changed; while [ ! -e ../gate ]; do sleep 0.02; done")
    async with world.open(command) as harness:
        submission = await (await harness.root()).submit("go", request_id="call-1")
        harness.resume()
        await world.until((world.workspace.parent / "changed").exists)
        (world.workspace / "own").write_text("typed meanwhile\n")
        world.gate.touch()
        assert (await submission.answer()).text == "done"
    both = world.seen()
    assert {b"a", b"own"} == set(both)
    await world.spaces.delete("one")
    world.requests = 1
    await world.bash("true")
    assert different(both, world.seen()) == {}


def without_privileges(folder: Path) -> str | None:
    """An interpreter for the daemon that root's rights do not help, too; None: they do not help this user anyway."""
    if os.geteuid() != 0:
        return None
    if shutil.which("setpriv") is None:
        pytest.skip("root needs setpriv (util-linux) to be refused anything")
    script = folder / "python"
    dropped = "--bounding-set=-dac_override,-dac_read_search"
    script.write_text(f'#!/bin/sh\nexec setpriv {dropped} "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return str(script)


async def test_what_its_owner_may_not_read_is_refused_and_undone_s140(world: Nasty, tmp_path: Path) -> None:
    world.spaces = LocalSpaces(tmp_path / "spaces", python=without_privileges(tmp_path))
    await world.bash("mkdir -m 750 d e; echo in > d/in; echo in > e/in; echo f > f; chmod 640 f")
    made = world.seen()
    ((code, text),) = await world.call(
        call("bash", command="mkdir n; echo n > n/n; chmod 000 d/in d n; chmod 200 f; echo more >> f; chmod 100 e")
    )
    assert code is None
    assert "cannot be read" in text
    assert "undone" in text
    assert different(made, world.seen()) == {}
    assert await world.bash("cat d/in e/in f") == "in\nin\nf\n"


async def test_a_space_is_deleted_however_deep_and_closed_its_folder_is_s109(world: Nasty) -> None:
    deep = python("for level in range(2000): os.mkdir('deep'); os.chdir('deep')")
    ((_, text),) = await world.call(call("bash", command=deep))
    assert "undone" in text
    assert world.seen() == {}
    await world.bash("mkdir -p a/b c; echo x > a/b/x; ln -s /etc c/l; chmod 500 a/b; chmod 000 c")
    await world.spaces.delete("one")
    assert os.listdir(world.folder / "spaces") == [".perdure"]
    assert not any(name.startswith("trash") for name in os.listdir(world.folder / "spaces" / ".perdure"))
