"""A writer into memory."""

from __future__ import annotations

from typing_extensions import override

from perdure.cli.chat.terminal import Writer


class Paper(Writer):
    """What was written."""

    def __init__(self) -> None:
        self.text = ""

    @override
    def write(self, text: str) -> None:
        self.text += text

    @override
    async def written(self) -> None:
        """It is, always."""
