"""Contents by hash as part of a transaction (rules K202 to K206)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from perdure.kernel.contents import MAX_RIDING_BYTES, check_pin, verified
from perdure.kernel.storage import Content
from perdure.kernel.transaction_deletion import TransactionDeletion

if TYPE_CHECKING:
    from perdure.kernel.session import Session


class TransactionContents(TransactionDeletion):
    """The part of a Transaction that is about contents."""

    def __init__(self, session: Session, conversation_id: int | None, *, internal: bool) -> None:
        super().__init__(session, conversation_id, internal=internal)
        self._contents: dict[str, Content] = {}
        self._pins: dict[tuple[int, str], None] = {}
        self._unpinned: dict[int, None] = {}
        self._reclaimed: dict[str, None] = {}
        self._riding = 0

    def put_content(self, digest: str, data: bytes) -> None:
        """Store a content in this commit, which refers to it; one that is stored already is left as it is.

        Raises ValueError if the bytes are not what their digest says, and beyond 1 MiB a commit, which
        ``session.contents.put`` is for.
        """
        self.check_open()
        content = verified(digest, data)
        if digest not in self._contents:
            if self._riding + len(data) > MAX_RIDING_BYTES:
                raise ValueError(
                    f"at most {MAX_RIDING_BYTES} bytes of contents ride in a commit; put them before it with "
                    "session.contents.put()"
                )
            self._riding += len(data)
            self._contents[digest] = content
        self.session.contents.spare([digest])

    def unpin_contents(self, pin: int) -> None:
        """With this commit the pin holds nothing any more, whether it did or not."""
        self.check_open()
        check_pin(pin)
        self._unpinned[pin] = None

    def pin_contents(self, pin: int, digests: Sequence[str], contents: Sequence[Content]) -> None:
        """Store contents that were verified, and pin them and others that are stored; ``session.contents.put``."""
        self.check_open()
        self._contents.update({content.digest: content for content in contents})
        self._pins.update(dict.fromkeys((pin, digest) for digest in digests))

    def reclaim_contents(self, digests: Sequence[str]) -> None:
        """Delete contents, but for pinned ones, that nothing refers to; ``session.contents.reclaim``."""
        self.check_open()
        self._reclaimed.update(dict.fromkeys(digests))
