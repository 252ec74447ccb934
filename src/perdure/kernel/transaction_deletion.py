"""Deleting conversations, with all they own, as part of a transaction (rules K192 to K198).

What goes is known here and written by storage, which alone sees what forks still show of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from perdure.kernel.documents import LoadedDocument
from perdure.kernel.errors import ConversationOpen, InvalidTransition
from perdure.kernel.records import ROOT_CONVERSATION, SubmissionRecord
from perdure.kernel.storage import MAX_SCAN
from perdure.kernel.transaction_documents import TransactionDocuments

if TYPE_CHECKING:
    from perdure.kernel.session import Session


class TransactionDeletion(TransactionDocuments):
    """The deleting part of a Transaction."""

    def __init__(self, session: Session, conversation_id: int | None, *, internal: bool) -> None:
        super().__init__(session, conversation_id, internal=internal)
        self._forked: set[int] = set()
        """Conversations that this transaction forks."""

    async def closure(self, conversation_id: int) -> list[int]:
        """The conversation and every one that goes with it if it is deleted (rule K192). Raises NotFound."""
        await self.conversation(conversation_id)
        if conversation_id in self._conversations:
            return [conversation_id]  # nothing in it has ended yet, so that it could own a closed one
        await self.session.settled_here()
        found = await self.session.reading(self.session.storage.closure(conversation_id))
        return [id for id in found if id not in self._deleted]

    async def check_deletable(self, id: int) -> list[int]:
        """The closure of a conversation that may be deleted once nothing in it is live.

        Raises NotFound, InvalidTransition for the root, ConversationOpen if a live task owns it.
        """
        closure = await self.closure(id)
        if ROOT_CONVERSATION in closure:
            raise InvalidTransition(
                "the root conversation is not deleted, since its id would be given twice; reset() begins it anew"
            )
        owner = (await self.conversation(id)).owner
        above = None if owner is None else self.live_task(owner)
        if above is not None:
            raise ConversationOpen(id, f"it belongs to {above.kind} task {above.id}, which is {above.status}")
        return closure

    async def delete_conversation(self, id: int) -> list[int]:
        """Delete a closed conversation with everything it owns; returns the ids of the conversations that go.

        From here on the transaction finds none of it any more, but for single entries. Raises NotFound;
        ConversationOpen for one that is not closed; InvalidTransition for the root, and for one that this transaction
        made, forked or has drafts of. Nothing is changed then.
        """
        closure = await self.check_deletable(id)
        gone = set(closure)
        drafted = {address.scope_id for address in self._drafts if address.scope == "conversation"}
        if gone & (self._conversations.keys() | self._forked | drafted):
            raise InvalidTransition(f"conversation {id} is written to by this transaction; delete it in another")
        await self._check_closed(id, gone)
        living: list[LoadedDocument] = []
        for conversation_id in closure:
            read = self.session.storage.documents("conversation", conversation_id)
            for record in await self.session.reading(read):
                living.append(await self._load(record.address))
        # All of it in one step: a deletion that was given up while it read has changed nothing.
        self.check_open()
        self._deleted |= gone
        self._retired.update({loaded.address: loaded for loaded in living if self._current(loaded).record is not None})
        return closure

    async def _check_closed(self, id: int, gone: set[int]) -> None:
        """Raise ConversationOpen unless nothing of it is live (rule K193)."""
        for task in self.live_tasks():
            if task.conversation_id in gone:
                raise ConversationOpen(
                    id, f"{task.kind} task {task.id}{_of(id, task.conversation_id)} is {task.status}"
                )
        for status in ("queued", "placed"):
            after = 0
            while page := await self.submissions(status=status, after=after, limit=MAX_SCAN):
                _refuse_open(id, gone, page)
                after = page[-1].id


def _refuse_open(id: int, gone: set[int], submissions: Sequence[SubmissionRecord]) -> None:
    for record in submissions:
        if record.conversation_id in gone:
            where = _of(id, record.conversation_id)
            raise ConversationOpen(id, f"submission {record.id}{where} is {record.status}")


def _of(conversation: int, where: int) -> str:
    return "" if where == conversation else f" of conversation {where}, which it owns,"
