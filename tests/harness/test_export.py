"""Conversations as JSON lines and as Markdown (rule H155)."""

from __future__ import annotations

import msgspec
import pytest
from kit import Audit, Note, opened

from perdure.harness.conversation import Conversation
from perdure.harness.export import PAGE, ConversationLine, EntryLine
from perdure.harness.tool import tool
from perdure.kernel.errors import NotFound
from perdure.kernel.records import EntryRecord, to_raw
from perdure.testing.model import ScriptedModel, call, say


async def text_of(conversation: Conversation, format: str) -> str:
    return "".join([text async for text in conversation.export(format)])  # pyright: ignore[reportArgumentType]


async def test_json_lines_are_every_entry_as_it_is_stored_h155() -> None:
    async with opened(ScriptedModel(say("hello"))) as harness:
        conversation = await harness.create_conversation(name="plan", labels={"a": "b"})
        async with conversation.commit() as tx:
            for n in range(2 * PAGE):
                tx.append(Audit(n=n))
        await (await conversation.submit("hi")).answer()
        first, *rest = (await text_of(conversation, "jsonl")).splitlines()
        head = msgspec.json.decode(first, type=ConversationLine)
        info = await conversation.info()
        assert head == ConversationLine(
            log_id=harness.session.info.log_id, record=info.record, name="plan", labels={"a": "b"}
        )
        found: list[EntryRecord] = []
        for line in rest:
            entry = msgspec.json.decode(line, type=EntryLine)
            assert entry.conversation == conversation.id
            found.append(entry.entry)
        assert found == await conversation.entries(limit=1000)
        assert len(found) == 2 * PAGE + 2


async def test_a_fork_is_exported_with_what_it_shares_h155() -> None:
    async with opened(ScriptedModel(say("hello"))) as harness:
        trunk = await harness.create_conversation()
        answer = await (await trunk.submit("hi")).answer()
        fork = await trunk.fork(answer.entry.id)
        await trunk.delete()
        lines = (await text_of(fork, "jsonl")).splitlines()[1:]
        shared = [msgspec.json.decode(line, type=EntryLine) for line in lines]
        assert {line.conversation for line in shared} == {fork.id}
        assert [line.entry.kind for line in shared] == ["pi.user", "pi.assistant"]


async def test_markdown_is_what_was_said_and_done_h155() -> None:
    @tool(replay="safe")
    async def count(word: str) -> str:
        """Count."""
        return "```\nthree\n```"

    replies = {"count": [call("count", word="x"), say("It is *three*.")]}
    async with opened(ScriptedModel(replies), tools=(count,)) as harness:
        conversation = await harness.create_conversation(name="a\nplan")
        await (await conversation.submit("count")).answer()
        await conversation.write(Note(text="for the model"))
        await conversation.reset("go on")
        text = await text_of(conversation, "markdown")
        assert text.startswith("# a plan\n\nBegun ")
        for piece in (
            "\n## User\n",
            "\ncount\n",
            'Calls `count`:\n\n```json\n{\n  "word": "x"\n}\n```\n',
            "\n### Result of `count`\n\n````text\n```\nthree\n```\n````\n",
            "\nIt is *three*.\n",
            "\n## app.note\n",
            "\n## The context begins anew\n",
            "\ngo on\n",
        ):
            assert piece in text, piece


async def test_results_of_another_release_are_exported_as_far_as_they_are_understood_h155() -> None:
    result = {"role": "tool", "call_id": "c", "name": "look", "content": [{"type": "text", "text": "seen"}]}
    async with opened() as harness:
        conversation = await harness.create_conversation()
        async with conversation.commit() as tx:
            tx.append_record("pi.tool-result", messages=to_raw([result]), data=to_raw({"shape": "of tomorrow"}))
            tx.append_record("pi.tool-result", messages=to_raw([{"role": "of tomorrow"}]))
        assert "\n### Result of `look`\n\n```text\nseen\n```\n" in await text_of(conversation, "markdown")


async def test_what_cannot_be_exported_is_refused_h155() -> None:
    async with opened() as harness:
        conversation = await harness.create_conversation()
        with pytest.raises(ValueError, match="'jsonl' or 'markdown', not 'html'"):
            await text_of(conversation, "html")
        with pytest.raises(NotFound):
            await text_of(harness.handle(99), "jsonl")
