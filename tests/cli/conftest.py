"""What chats in a terminal are tried with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chat_terminal import gates, short_folder
from test_cli_chat import Desk


@pytest.fixture
def desk() -> Iterator[Desk]:
    with short_folder() as folder, gates(folder) as made:
        desk = Desk(folder, made)
        yield desk
        desk.close()
