"""What waits in a conversation whose owner ends: it ends in that same commit (rule H357)."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Final

from perdure.harness.inbox import place, withdraw
from perdure.harness.settings import Settings
from perdure.kernel.records import ConversationRecord, TaskRecord, Terminal
from perdure.kernel.session import Session, Settled
from perdure.kernel.storage import MAX_SCAN
from perdure.kernel.transaction import Transaction

OWNER_ENDED: Final = "what the conversation belongs to has ended"


class Leftovers:
    """Made once a session, after what decides how tasks end. Only conversations that are owned and had a queue are
    known here, so that the end of any other task costs nothing."""

    def __init__(self, session: Session, settings: Settings) -> None:
        self._session = session
        self._settings = settings
        self._waiting: dict[int, set[int]] = {}
        """Conversations in which something may wait, by the task that owns them."""
        session.derive(self._derive)
        session.observe(self._observe)

    async def load(self) -> None:
        """At open, before anything may end."""
        after = 0
        while page := await self._session.submissions(status="queued", after=after, limit=MAX_SCAN):
            for submission in page:
                conversation = await self._session.conversation(submission.conversation_id)
                assert conversation is not None, "a conversation in which something waits is not deleted"
                self._queued(conversation, self._session.live.settled)
            after = page[-1].id

    def _queued(self, conversation: ConversationRecord, *owners: Mapping[int, TaskRecord]) -> None:
        """Something waits in it from now on. One whose owner has ended belongs to nobody, and is not kept here."""
        if conversation.owner is not None and any(conversation.owner in known for known in owners):
            self._waiting.setdefault(conversation.owner, set()).add(conversation.id)

    def _derive(self, tx: Transaction) -> Awaitable[None] | None:
        queued = {record.conversation_id for record in tx.changed_submissions.values() if record.status == "queued"}
        return self._follow(tx, queued) if queued or self._ended(tx) else None

    def _ended(self, tx: Transaction) -> list[int]:
        """Conversations in which something may wait, whose owners end here."""
        if not self._waiting:
            return []
        ended = [
            id for id, record in tx.changed_tasks.items() if id in self._waiting and type(record.state) is Terminal
        ]
        return [id for task in ended for id in sorted(self._waiting[task])]

    async def _follow(self, tx: Transaction, queued: Collection[int]) -> None:
        for id in queued:
            self._queued(await tx.conversation(id), tx.changed_tasks, self._session.live.staged)
        await self._end(tx, self._ended(tx))

    async def _end(self, tx: Transaction, conversations: Sequence[int]) -> None:
        for id in conversations:
            await withdraw(tx, id, "aborted", OWNER_ENDED)
            await place(tx, id, "writes", self._settings)

    def _observe(self, settled: Settled) -> None:
        if self._waiting:
            for record in settled.batch.tasks:
                if type(record.state) is Terminal:
                    self._waiting.pop(record.id, None)
