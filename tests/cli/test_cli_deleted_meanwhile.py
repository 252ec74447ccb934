"""Looking at a store in which its owner deletes conversations (rule K159)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure import Harness, SqliteStorage
from perdure.cli.inspect import look
from perdure.cli.ls import listed
from perdure.kernel.records import ConversationRecord
from perdure.kernel.session import Session

conversations = Session.conversations


@pytest.mark.parametrize("command", [look, listed])
async def test_what_is_deleted_while_one_looks_is_no_error_k159(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "agent.db"
    async with Harness.open(SqliteStorage(path)) as harness:
        root = await harness.root()
        gone = await harness.create_conversation()

        async def then_deleted(session: Session, **more: Any) -> list[ConversationRecord]:
            page = await conversations(session, **more)
            assert [record.id for record in page] == [root.id, gone.id]
            await gone.delete()
            return page

        monkeypatch.setattr(Session, "conversations", then_deleted)
        await command(path)
        monkeypatch.undo()
        assert [info.id for info in await harness.conversations()] == [root.id]
