"""What other processes left in the store's mailbox, folded in by its owner (rules K72 to K75).

Each request is answered in the commit that does what it asks for, or in one that says why not; so none is done twice,
and one that was posted to a closed store is done at the next open.

- ``input``: ``{conversation_id, content, mode?, request_id?}``; the answer is ``{submission}``
- ``abort``: ``{conversation_id, run?}`` with the generation task it means, so that a late one stops nothing newer; or
  ``{submission}``, to withdraw it; the answer is ``{aborted}``
- ``delete``: ``{conversations, abort?}``; the answer is ``{deleted}``, all that went
- ``signal``: ``{task, name, value}``; the answer is ``{first}``
- ``answer``: ``{task, value}``, of a question; the answer is ``{first}``
- ``approval``: ``{task, allow, digest, reason?, arguments?, by?}``, a decision; the answer is ``{first}``. One with
  edited arguments is left until the tool is installed, now or after a later opening
- ``approval-rule``: ``{add: {tool, effect?, arguments?, only?, by?, note?}}`` or ``{remove: id}``; the answer is
  ``{id}``
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from perdure.harness.approval_rules import ApprovalRule, add_rule, remove_rule
from perdure.harness.approvals import Wanted, asked_of, decide, missing_tool
from perdure.harness.deletion import delete_conversations
from perdure.harness.documents import Live
from perdure.harness.inbox import InputMode, input_content, withdraw, withdraw_one
from perdure.harness.messages import UserPart
from perdure.harness.person import WantedAnswer, answer
from perdure.kernel.errors import PerdureError
from perdure.kernel.json import JsonValue
from perdure.kernel.reports import Report
from perdure.kernel.session import Straggler
from perdure.kernel.storage import Mail
from perdure.kernel.transaction import Transaction

if TYPE_CHECKING:
    from perdure.harness.harness import Harness

PAGE = 100


class InputMail(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    conversation_id: int
    content: str | list[UserPart]
    mode: InputMode = "follow_up"
    request_id: str | None = None


class AbortMail(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    conversation_id: int | None = None
    run: int | None = None
    """The generation task that is meant; None: whichever runs when the request is folded in."""
    submission: int | None = None


class SignalMail(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    task: int
    name: str
    value: msgspec.Raw = msgspec.Raw(b"null")


class DeleteMail(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    conversations: list[int]
    """Ids; all of them are deleted in one commit, or none."""
    abort: bool = False


class RuleMail(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    add: ApprovalRule | None = None
    remove: int | None = None


class _Refused(PerdureError):
    """The request makes no sense, or is about what is no longer there."""


class Mailroom:
    """One a harness."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self._kinds: dict[str, Callable[[Mail], Awaitable[None]]] = {
            "input": self._input,
            "abort": self._abort,
            "delete": self._delete,
            "signal": self._signal,
            "answer": self._answer_question,
            "approval": self._approval,
            "approval-rule": self._approval_rule,
        }
        self._seen = 0
        """The newest request that was taken up."""
        self._left: set[int] = set()
        """Those that wait for a tool; looked at again when the registry has changed."""
        self._retried: set[int] = set()
        self._again = False
        self._folding: asyncio.Task[None] | None = None
        self._aborting: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Fold in what is there, and from now on what comes."""
        session = self._harness.session
        session.on_stop(self._stop)
        session.storage.on_mail(self._arrived)
        self._harness.registry.on_change(self._installed)
        self._arrived()

    def _installed(self) -> None:
        if self._left:
            self._retried |= self._left
            self._left.clear()
            self._arrived()

    def _arrived(self) -> None:
        session = self._harness.session
        if session.closing or session.failed is not None:
            return
        self._again = True
        if self._folding is None or self._folding.done():
            self._folding = asyncio.get_running_loop().create_task(self._fold(), name="perdure mailbox")

    async def _fold(self) -> None:
        session = self._harness.session
        try:
            while self._again:
                self._again = False
                while self._retried:
                    id = self._retried.pop()
                    for mail in await session.storage.mail(after=id - 1, limit=1):
                        if mail.id == id:
                            await self._answer(mail)
                while page := await session.storage.mail(after=self._seen, limit=PAGE):
                    for mail in page:
                        self._seen = mail.id
                        await self._answer(mail)
        except PerdureError as error:
            # A session that fails or closes leaves the rest for the next open.
            if session.failed is None and not session.closing:
                session.fail(error)

    async def _answer(self, mail: Mail) -> None:
        handle = self._kinds.get(mail.kind)
        try:
            if handle is None:
                raise _Refused(f"unknown request {mail.kind!r}; known are {', '.join(self._kinds)}")
            await handle(mail)
        except Exception as error:  # whatever a request leads to, those after it are answered too
            self._harness.session.check_open()
            await self._refuse(mail, error)

    async def _refuse(self, mail: Mail, error: Exception) -> None:
        async with self._harness.session.commit() as tx:
            tx.reply(mail.id, ok=False, result={"error": type(error).__name__.lstrip("_"), "message": str(error)})

    # --- kinds of requests -------------------------------------------------------------------------------------

    async def _input(self, mail: Mail) -> None:
        wanted = msgspec.json.decode(mail.body, type=InputMail)
        content = input_content(wanted.content)
        async with self._harness.session.commit(conversation_id=wanted.conversation_id) as tx:
            record = await self._harness.admit(
                tx, wanted.conversation_id, content, mode=wanted.mode, request_id=wanted.request_id
            )
            tx.reply(mail.id, ok=True, result={"submission": record.id})

    async def _signal(self, mail: Mail) -> None:
        wanted = msgspec.json.decode(mail.body, type=SignalMail)
        value: JsonValue = msgspec.json.decode(wanted.value)
        async with self._harness.session.commit() as tx:
            first = await self._harness.tasks.put_signal(tx, wanted.task, wanted.name, value)
            tx.reply(mail.id, ok=True, result={"first": first})

    async def _answer_question(self, mail: Mail) -> None:
        wanted = msgspec.json.decode(mail.body, type=WantedAnswer)
        async with self._harness.session.commit() as tx:
            first = await answer(self._harness, tx, wanted)
            tx.reply(mail.id, ok=True, result={"first": first})

    async def _approval(self, mail: Mail) -> None:
        wanted = msgspec.json.decode(mail.body, type=Wanted)
        harness = self._harness
        record = harness.session.live.staged.get(wanted.task)
        asks = record is not None and asked_of(record) is not None
        if wanted.arguments is not None and record is not None and asks and missing_tool(harness, record):
            self._left.add(mail.id)
            return
        async with harness.session.commit() as tx:
            first = await decide(harness, tx, wanted)
            tx.reply(mail.id, ok=True, result={"first": first})

    async def _approval_rule(self, mail: Mail) -> None:
        wanted = msgspec.json.decode(mail.body, type=RuleMail)
        if (wanted.add is None) == (wanted.remove is None):
            raise _Refused("either add or remove is given")
        async with self._harness.session.commit() as tx:
            if wanted.add is not None:
                rule = await add_rule(tx, wanted.add)
            else:
                assert wanted.remove is not None, "one of them is given"
                rule = await remove_rule(tx, wanted.remove)
            tx.reply(mail.id, ok=True, result={"id": rule.id})

    async def _abort(self, mail: Mail) -> None:
        wanted = msgspec.json.decode(mail.body, type=AbortMail)
        if wanted.submission is not None:
            async with self._harness.session.commit() as tx:
                record = await tx.submission(wanted.submission)
                if record.status == "queued":
                    await withdraw_one(tx, record)
                tx.reply(mail.id, ok=True, result={"aborted": record.status == "queued"})
            return
        if wanted.conversation_id is None:
            raise _Refused("an abort names a conversation_id or a submission")
        # It returns when all has stopped, which may take long. Later requests wait for its marks alone: what they do
        # is newer, and not meant.
        marked = asyncio.Event()
        task = asyncio.get_running_loop().create_task(
            self._abort_conversation(mail, wanted.conversation_id, wanted.run, marked), name=f"abort of mail {mail.id}"
        )
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)
        await marked.wait()

    async def _abort_conversation(
        self, mail: Mail, conversation_id: int, run: int | None, marked: asyncio.Event
    ) -> None:
        answered = False

        async def before(tx: Transaction) -> None:
            nonlocal answered
            live = await tx.read(Live, conversation=conversation_id)
            if run is not None and (live is None or live.run is None or live.run["task"] != run):
                raise _Refused(f"run {run} of conversation {conversation_id} is over; nothing was aborted")
            await withdraw(tx, conversation_id, "aborted", "the conversation was aborted")
            tx.reply(mail.id, ok=True, result={"aborted": True})
            answered = True
            marked.set()  # whoever comes now waits for this commit's place on the line

        session = self._harness.session
        try:
            await self._harness.tasks.abort_conversation(conversation_id, before=before)
        except Exception as error:  # it has nobody to be raised to
            if session.failed is not None or session.closing:
                return
            if answered:
                session.report(
                    Report(
                        type="abort_failed",
                        message="what an abort by mail marked has not ended",
                        conversation=conversation_id,
                        error=error,
                    )
                )
            else:
                await self._refuse(mail, error)
        finally:
            marked.set()

    async def _delete(self, mail: Mail) -> None:
        wanted = msgspec.json.decode(mail.body, type=DeleteMail)
        if not wanted.abort:
            await self._delete_now(mail, wanted)
            return
        # Ending what goes on may take long, and what is asked for later does not wait for it.
        task = asyncio.get_running_loop().create_task(
            self._end_and_delete(mail, wanted), name=f"deletion of mail {mail.id}"
        )
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def _delete_now(self, mail: Mail, wanted: DeleteMail) -> None:
        def also(tx: Transaction, gone: list[int]) -> None:
            tx.reply(mail.id, ok=True, result={"deleted": list[JsonValue](gone)})

        await delete_conversations(self._harness, wanted.conversations, abort=wanted.abort, also=also)

    async def _end_and_delete(self, mail: Mail, wanted: DeleteMail) -> None:
        session = self._harness.session
        try:
            await self._delete_now(mail, wanted)
        except Exception as error:  # it has nobody to be raised to
            if session.failed is None and not session.closing:
                await self._refuse(mail, error)

    async def _stop(self, _drain_ms: int) -> list[Straggler]:
        running = [task for task in (self._folding, *self._aborting) if task is not None and not task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        return []
