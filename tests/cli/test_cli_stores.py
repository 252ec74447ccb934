"""``perdure ls``, ``show``, ``send``, ``export`` and ``backup``, on stores that are live and stores that are closed
(rules K72 to K75, K159, K184, H154, H155)."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from perdure import Agent, Entry, Extension, Harness, SqliteStorage, tool
from perdure.cli.app import app
from perdure.cli.inspect import look
from perdure.cli.ls import Listed
from perdure.cli.send import Sent
from perdure.harness.conversation import Conversation
from perdure.harness.export import ConversationLine, EntryLine, fenced
from perdure.kernel.records import EntryRecord
from perdure.testing.model import ScriptedModel, call, fail, say

SAID = {
    "Dig.": [call("dig", depth=3), say("Dug.")],
    "Think.": say("So it is.", thinking="How is it?"),
    "Fail.": fail("refused", "not this"),
    "Fence.": say("```\ncode\n```"),
}


class Note(Entry, kind="app.note"):
    text: str


class Pit:
    """A tool that waits until it is told to go on."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.enough = asyncio.Event()

        @tool
        async def dig(depth: int) -> str:
            """Dig."""
            self.begun.set()
            await self.enough.wait()
            return f"a hole of {depth}"

        self.extension = Extension("app", tools=[dig])


@asynccontextmanager
async def host(path: Path, pit: Pit) -> AsyncGenerator[Harness]:
    model = ScriptedModel(SAID)
    async with Harness.open(SqliteStorage(path), models=model, extensions=[pit.extension]) as harness:
        harness.resume()
        yield harness


def call_now(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


async def perdure(*words: str | Path) -> Result:
    """The command, beside the loop of this test."""
    if "--wait" in words and "--timeout" not in words:
        words = (*words, "--timeout", "60")  # or a failure would wait for its thread
    return await asyncio.to_thread(call_now, *words)


def program(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "perdure"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.db"


async def fill(harness: Harness) -> tuple[Conversation, Conversation]:
    """A root with thoughts and failures, and another one with a name."""
    root = await harness.root()
    await (await root.submit("Think.")).wait()
    await (await root.submit("Fail.")).wait()
    other = await harness.create_conversation(name="the other\n")
    await (await other.submit("Dig.")).wait()
    return root, other


@pytest.fixture
async def closed(path: Path) -> Path:
    pit = Pit()
    pit.enough.set()
    async with host(path, pit) as harness:
        await fill(harness)
    return path


# --- ls ----------------------------------------------------------------------------------------------------------


async def test_conversations_are_listed(closed: Path) -> None:
    done = await perdure("ls", closed)
    assert done.exit_code == 0
    first, second = done.output.splitlines()
    assert re.fullmatch(r" *1  \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", first)
    assert second.endswith("UTC  the other\\n")


async def test_what_is_busy_and_what_waits_is_listed(path: Path) -> None:
    pit = Pit()
    async with host(path, pit) as harness:
        root = await harness.root()
        await root.submit("Dig.")
        await pit.begun.wait()
        await root.submit("Think.")
        await root.submit("Think.")
        entry = (await root.entries())[0]
        fork = await root.fork(entry.id)
        lines = (await perdure("ls", path)).output.splitlines()
        shown = (await perdure("show", path, "--conversation", "1")).output
        assert shown.endswith('— a run is under way\n▸ dig  {"depth": 3}\n')
        assert "▸" not in (await perdure("show", path, "--conversation", f"{fork.id}")).output
        assert "  busy, 2 inputs waiting" in lines[0]
        assert lines[1].startswith(f"{fork.id}  ")
        assert lines[1].endswith("  forked from 1")
        found = [
            msgspec.json.decode(line, type=Listed, strict=True)
            for line in (await perdure("ls", path, "--json")).output.splitlines()
        ]
        assert [(each.id, each.busy, each.queued, each.parent) for each in found] == [
            (1, True, 2, None),
            (fork.id, False, 0, 1),
        ]
        assert found[0].newest >= entry.created_at
        pit.enough.set()
        await root.idle()
    assert "busy" not in (await perdure("ls", path)).output


async def test_there_may_be_none(path: Path) -> None:
    async with host(path, Pit()):
        pass
    assert (await perdure("ls", path)).output == "no conversations yet\n"
    assert (await perdure("ls", path, "--json")).output == ""
    shown = await perdure("show", path)
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert shown.stderr == "perdure show: the store has no conversation yet\n"


@pytest.mark.parametrize("command", ["ls", "show", "export", "backup", "send", "rm"])
def test_what_is_no_store_is_said(command: str, tmp_path: Path) -> None:
    more = {"backup": ["copy.db"], "send": ["hello"], "rm": ["1", "--yes"]}.get(command, [])
    done = call_now(command, tmp_path / "agent.db", *more)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"perdure {command}: there is no store at {tmp_path / 'agent.db'}\n"
    assert list(tmp_path.iterdir()) == []


# --- show --------------------------------------------------------------------------------------------------------


async def test_a_conversation_is_shown(closed: Path) -> None:
    # The newest one, if none is named.
    done = await perdure("show", closed)
    assert done.exit_code == 0
    assert re.fullmatch(
        r"conversation \d+ “the other\\n” in .*\n\n> Dig\.\n▸ dig  \{\"depth\": 3\}\n  │ a hole of 3\nDug\.\n",
        done.output,
    )
    shown = (await perdure("show", closed, "--conversation", "1")).output
    assert "> Think.\nHow is it?\nSo it is.\n" in shown
    assert "> Fail.\n  ✗ no answer: model_error: " in shown
    assert (await perdure("show", closed, "--conversation", "the other\n")).output == done.output
    missing = await perdure("show", closed, "--conversation", "nobody")
    assert (missing.exit_code, missing.stdout) == (1, "")
    assert "there is no conversation named 'nobody'" in missing.stderr


async def test_an_input_without_an_answer_is_shown_with_its_reason_h41(path: Path) -> None:
    pit = Pit()
    async with host(path, pit) as harness:
        root = await harness.root()
        await (await root.submit("Fail.")).wait()
        await root.submit("Dig.")
        await pit.begun.wait()
        late = await root.submit("And then?")
        running = (await perdure("show", path)).output
        assert "> Fail.\n  ✗ no answer: model_error: refused: not this\n" in running
        assert running.count("no answer") == 1
        await root.abort()
        shown = (await perdure("show", path)).output
        assert "> Dig.\n  ✗ no answer: aborted" in shown
        assert f"— input {late.id} of " in shown
        assert "UTC was never placed: aborted: the conversation was aborted\n" in shown
        entries = await root.entries()
        fork = await root.fork(entries[-1].id)
        forked = (await perdure("show", path, "--conversation", str(fork.id))).output
        assert (forked.count("no answer"), "never placed" in forked) == (2, False)
        page = (await perdure("show", path, "--conversation", "1", "--before", str(entries[1].id))).output
        assert "> Fail.\n  ✗ no answer: model_error" in page


async def test_a_window_and_everything_are_shown(path: Path) -> None:
    async with host(path, Pit()) as harness:
        root = await harness.root()
        for text in ("Think.", "Fence."):
            await (await root.submit(text)).wait()
        await root.reset("Go on.")
        await root.write(Note(text="by the way"))
        shown = (await perdure("show", path)).output
        assert "— the model's context begins anew —\n\n> Go on.\n· app.note\n" in shown
        assert "Think." not in shown
        assert "earlier entries: --all" in shown
        everything = (await perdure("show", path, "--all")).output
        assert "> Think.\n" in everything
        assert "earlier entries" not in everything
        last = (await perdure("show", path, "--window", "1")).output
        assert last.splitlines()[1:] == ["  ┆ earlier entries: --all", "· app.note"]
        lines = (await perdure("show", path, "--all", "--json")).output.splitlines()
        assert [msgspec.json.decode(line, type=EntryRecord) for line in lines] == await root.entries()


async def test_a_run_that_is_under_way_is_said_to_be(path: Path) -> None:
    pit = Pit()
    async with host(path, pit) as harness:
        root = await harness.root()
        await root.submit("Dig.")
        await pit.begun.wait()
        assert "\n— a run is under way\n▸ dig" in (await perdure("show", path)).output
        pit.enough.set()
        await root.idle()
        assert "under way" not in (await perdure("show", path)).output


# --- send --------------------------------------------------------------------------------------------------------


async def test_a_live_store_takes_it_up(path: Path) -> None:
    pit = Pit()
    async with host(path, pit) as harness:
        root = await harness.root()
        done = await perdure("send", path, "Think.", "--wait")
        assert (done.exit_code, done.stdout) == (0, "So it is.\n")
        await root.submit("Dig.")
        await pit.begun.wait()
        done = await perdure("send", path, "Think.", "--steer")
        assert re.fullmatch(r"queued in conversation 1: submission \d+\n", done.output)
        sent = msgspec.json.decode((await perdure("send", path, "Fence.", "--json")).output, type=Sent)
        assert (sent.conversation, sent.status, sent.answer) == (1, "queued", None)
        assert sent.submission is not None
        waiting = asyncio.create_task(perdure("send", path, "Fence.", "--wait", "--json"))
        while len((await harness.inspect()).queued) < 3:
            await asyncio.sleep(0.01)
        pit.enough.set()
        answered = msgspec.json.decode((await waiting).output, type=Sent)
        assert (answered.status, answered.answer) == ("done", "```\ncode\n```")
        # The steer joined the run; what was queued came after its answer.
        found = json.dumps([entry.messages for entry in await root.entries()])
        places = [found.rindex(text) for text in ("Dig.", "Think.", "So it is.", "Fence.")]
        assert places == sorted(places)


async def test_the_same_request_is_sent_once(path: Path) -> None:
    async with host(path, Pit()) as harness:
        root = await harness.root()
        words = ("send", path, "Think.", "--wait", "--json", "--request-id", "r1")
        first, second = [msgspec.json.decode((await perdure(*words)).output, type=Sent) for _ in range(2)]
        assert first.submission == second.submission
        assert len([entry for entry in await root.entries() if entry.kind == "pi.user"]) == 1
        conflict = await perdure("send", path, "Fail.", "--request-id", "r1")
        assert (conflict.exit_code, conflict.stdout) == (1, "")
        assert "it was refused: request id 'r1' already belongs to submission" in conflict.stderr


async def test_what_is_not_answered_is_said(path: Path) -> None:
    async with host(path, Pit()) as harness:
        await harness.root()
        done = await perdure("send", path, "Fail.", "--wait")
        assert (done.exit_code, done.stdout) == (1, "")
        assert "has no answer: model_error: refused: not this" in done.stderr
        sent = msgspec.json.decode((await perdure("send", path, "Fail.", "--wait", "--json")).stdout, type=Sent)
        assert (sent.status, sent.reason) == ("unanswered", "model_error")


async def test_a_closed_store_keeps_it(closed: Path) -> None:
    done = await perdure("send", closed, "Think.", "--conversation", "1")
    assert (done.exit_code, done.stdout) == (
        0,
        "kept in the mailbox for conversation 1; it is taken up when the store is opened\n",
    )
    late = await perdure("send", closed, "Think.", "--conversation", "1", "--wait", "--timeout", "0")
    assert (late.exit_code, late.stdout) == (3, "")
    assert "kept in the mailbox" in late.stderr
    async with host(closed, Pit()) as harness:
        root = await harness.root()
        while await harness.session.storage.mail():
            await asyncio.sleep(0.01)
        await root.idle()
        said = [entry.messages for entry in await root.entries() if entry.kind == "pi.user"]
        assert json.dumps(said).count("Think.") == 3


async def test_a_wait_for_a_closed_store_ends_when_somebody_opens_it(closed: Path) -> None:
    words = ("send", closed, "Think.", "--conversation", "1", "--wait", "--timeout", "60")
    waiting = asyncio.create_task(asyncio.to_thread(program, *words))
    while (await look(closed)).mail == 0:
        await asyncio.sleep(0.01)
    async with host(closed, Pit()):
        done = await waiting
    assert (done.returncode, done.stdout) == (0, "So it is.\n")


async def test_nothing_is_not_sent(closed: Path) -> None:
    done = await perdure("send", closed, "  ")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "there is nothing to send" in done.stderr


# --- rm ----------------------------------------------------------------------------------------------------------


async def ids_of(path: Path) -> list[int]:
    lines = (await perdure("ls", path, "--json")).stdout.splitlines()
    return [msgspec.json.decode(line, type=Listed).id for line in lines]


async def test_conversations_of_a_closed_store_are_deleted_h156(closed: Path) -> None:
    async with host(closed, Pit()) as harness:
        named = await harness.create_conversation(name="plan")
        await (await named.submit("Think.")).wait()
        fork = await named.fork((await named.entries())[0].id)
        used = (await harness.usage()).requests
    (one, other, *_) = await ids_of(closed)
    done = await perdure("rm", closed, "plan", str(other), str(other), "--yes")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"deleted conversation {named.id} “plan”\ndeleted conversation {other} “the other\\n”\n"
    assert await ids_of(closed) == [one, fork.id]
    assert "Think." in (await perdure("show", closed, "--conversation", str(fork.id))).stdout
    again = await perdure("rm", closed, "plan", "-y")
    assert (again.exit_code, again.stdout) == (1, "")
    assert again.stderr == "perdure rm: there is no conversation named 'plan'; perdure ls lists those there are\n"
    async with host(closed, Pit()) as harness:
        assert (await harness.usage()).requests == used, "H184"
        assert await harness.session.storage.check() == []


async def test_nothing_is_deleted_unasked_h156(closed: Path) -> None:
    before = await ids_of(closed)
    done = await perdure("rm", closed, str(before[-1]))
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "perdure rm: nobody is at a terminal to be asked; --yes deletes without asking\n"
    assert await ids_of(closed) == before


@pytest.mark.parametrize(("typed", "deleted"), [("y\n", True), ("n\n", False), ("\n", False), ("", False)])
async def test_a_person_is_asked_h156(closed: Path, typed: str, deleted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    before = await ids_of(closed)
    monkeypatch.setattr("perdure.cli.rm._at_a_terminal", lambda: True)
    words = ["rm", str(closed), str(before[-1])]
    done = await asyncio.to_thread(CliRunner().invoke, app, words, input=typed)
    assert f"conversation {before[-1]} “the other\\n”\nDelete for ever? [y/N]:" in done.stderr
    assert (done.exit_code == 0, await ids_of(closed) == before[:-1]) == (deleted, deleted)


async def test_all_or_none_are_deleted_k195(closed: Path) -> None:
    before = await ids_of(closed)
    done = await perdure("rm", closed, str(before[-1]), "1", "--yes")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "the root conversation is not deleted" in done.stderr
    done = await perdure("rm", closed, str(before[-1]), "999", "--yes")
    assert "there is no conversation 999" in done.stderr
    assert await ids_of(closed) == before


async def test_a_name_that_several_have_deletes_none_of_them_h180(path: Path) -> None:
    async with host(path, Pit()) as harness:
        ids = [(await harness.create_conversation(name="plan")).id for _ in range(2)]
    done = await perdure("rm", path, "plan", "--yes")
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"2 conversations are named 'plan': say which of {ids[0]}, {ids[1]} by its number" in done.stderr
    assert await ids_of(path) == ids
    # Elsewhere a name is the newest one's.
    shown = await perdure("show", path, "--conversation", "plan")
    assert f"conversation {ids[1]} “plan”" in shown.stdout


async def test_the_process_that_has_the_store_open_deletes_h183(path: Path) -> None:
    pit = Pit()
    async with host(path, pit) as harness:
        one, busy = await harness.create_conversation(), await harness.create_conversation(name="busy")
        submission = await busy.submit("Dig.")
        await pit.begun.wait()
        done = await perdure("rm", path, str(one.id), "--yes")
        assert (done.exit_code, done.stdout, done.stderr) == (0, f"deleted conversation {one.id}\n", "")
        done = await perdure("rm", path, "busy", "--yes")
        assert (done.exit_code, done.stdout) == (1, "")
        assert re.search(r"task \d+ is \w+; end or abort that first; --abort ends what goes on in it\n$", done.stderr)
        assert await busy.busy()
        waiting = asyncio.create_task(submission.wait())
        done = await perdure("rm", path, "busy", "--yes", "--abort")
        assert (done.exit_code, done.stdout) == (0, f"deleted conversation {busy.id} “busy”\n")
        assert (await waiting).status == "unanswered"
        assert await harness.conversations() == []
    assert await ids_of(path) == []


async def test_what_a_killed_process_left_is_aborted_and_deleted_h181(path: Path) -> None:
    pit = Pit()
    async with host(path, pit) as harness:
        root = await harness.root()
        busy, other = await harness.create_conversation(), await harness.create_conversation()
        await busy.submit("Dig.")
        await pit.begun.wait()
        await other.submit("Dig.")
    done = await perdure("rm", path, str(busy.id), "--yes")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "--abort ends what goes on in it" in done.stderr
    done = await perdure("rm", path, str(busy.id), "--yes", "--abort")
    assert (done.exit_code, done.stdout) == (0, f"deleted conversation {busy.id}\n")
    assert await ids_of(path) == [root.id, other.id]
    pit.enough.set()
    async with host(path, pit) as harness:
        await harness.idle()
        assert not await harness.handle(other.id).busy()


# --- export ------------------------------------------------------------------------------------------------------


async def test_json_lines_are_all_there_is(path: Path) -> None:
    pit = Pit()
    pit.enough.set()
    async with host(path, pit) as harness:
        root, other = await fill(harness)
        live = await asyncio.to_thread(program, "export", path, "--all")
        entries = {each.id: await each.entries(limit=1000) for each in (root, other)}
    closed = await asyncio.to_thread(program, "export", path, "--all")
    assert (closed.returncode, closed.stderr) == (0, "")
    assert closed.stdout == live.stdout
    lines = [
        msgspec.json.decode(line, type=ConversationLine | EntryLine, strict=True) for line in closed.stdout.splitlines()
    ]
    conversations = [line for line in lines if isinstance(line, ConversationLine)]
    assert [(line.record.id, line.name) for line in conversations] == [(root.id, None), (other.id, "the other\n")]
    for conversation, stored in entries.items():
        exported = [line.entry for line in lines if isinstance(line, EntryLine) and line.conversation == conversation]
        assert exported == stored


async def test_a_long_conversation_is_exported_page_by_page(path: Path, tmp_path: Path) -> None:
    async with host(path, Pit()) as harness:
        root = await harness.root()
        async with root.commit() as tx:
            for number in range(250):
                tx.append(Note(text=str(number)))
        fork = await root.fork((await root.entries(limit=1000))[-1].id)
        target = tmp_path / "fork.jsonl"
        done = await perdure("export", path, "--conversation", str(fork.id), "--output", target)
        assert (done.exit_code, done.output) == (0, "")
        lines = [json.loads(line) for line in target.read_text().splitlines()]
        assert [line["entry"]["data"]["text"] for line in lines[1:]] == [str(number) for number in range(250)]
        assert target.stat().st_mode & 0o777 == 0o600
        again = await perdure("export", path, "--output", target)
        assert again.exit_code == 1
        assert "is there already" in again.stderr


async def test_markdown_is_for_people(closed: Path) -> None:
    text = (await asyncio.to_thread(program, "export", closed, "--format", "markdown")).stdout
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", "<time>", text)
    assert text == (
        "# the other\n\nBegun <time>.\n"
        "\n## User\n\n*<time>*\n\nDig.\n"
        '\n## Assistant\n\n*<time>*\n\nCalls `dig`:\n\n```json\n{\n  "depth": 3\n}\n```\n'
        "\n### Result of `dig`\n\n```text\na hole of 3\n```\n"
        "\n## Assistant\n\n*<time>*\n\nDug.\n\n"
    )


def test_a_fence_is_longer_than_what_it_holds() -> None:
    assert fenced("a", "text") == "```text\na\n```"
    assert fenced("```\na\n```\n", "md") == "````md\n```\na\n```\n````"
    assert fenced("a ````` b", "") == "``````\na ````` b\n``````"


def test_a_reader_may_go_away(path: Path) -> None:
    async def prepare() -> None:
        async with host(path, Pit()) as harness, (await harness.root()).commit() as tx:
            for number in range(2000):
                tx.append(Note(text=str(number) * 100))

    asyncio.run(prepare())
    for command in (["export", str(path)], ["show", str(path), "--all"]):
        perdure = str(Path(sys.executable).parent / "perdure")
        process = subprocess.Popen([perdure, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (1, b""), command


# --- backup ------------------------------------------------------------------------------------------------------


async def test_a_live_store_is_copied(path: Path, tmp_path: Path) -> None:
    pit = Pit()
    async with host(path, pit) as harness:
        root = await harness.root(agent=Agent(instructions="Dig."))
        await root.submit("Dig.")
        await pit.begun.wait()
        done = await perdure("backup", path, tmp_path / "copy.db")
        assert done.exit_code == 0
        assert re.fullmatch(r".*copy\.db: a copy of .*agent\.db as of \d+ commits\n", done.output)
        pit.enough.set()
        await root.idle()
    reports = [await perdure("inspect", each, "--json") for each in (path, tmp_path / "copy.db")]
    log_ids = {json.loads(report.output)["log_id"] for report in reports}
    assert len(log_ids) == 2
    # The copy is a store of its own, and stands in the middle of the run.
    assert "busy" in (await perdure("ls", tmp_path / "copy.db")).output
    assert "busy" not in (await perdure("ls", path)).output


async def test_nothing_is_overwritten(closed: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy.db"
    assert (await perdure("backup", closed, target)).exit_code == 0
    before = target.read_bytes()
    again = await perdure("backup", closed, target)
    assert (again.exit_code, again.stdout) == (1, "")
    assert "is there already" in again.stderr
    assert target.read_bytes() == before
