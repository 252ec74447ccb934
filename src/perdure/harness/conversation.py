"""Conversation: the handle on a transcript and on what goes on in it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from decimal import Decimal
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from perdure.harness.approvals import Approval, approval, pending
from perdure.harness.compaction import begin
from perdure.harness.compaction_policy import check_enabled, check_size
from perdure.harness.documents import Agent, Live, Meta, UsageTotals
from perdure.harness.events import Events
from perdure.harness.export import ExportFormat, exported
from perdure.harness.inbox import (
    Content,
    InputMode,
    input_content,
    reset_content,
    withdraw,
    write_content,
)
from perdure.harness.limits import AsHost, LimitName, change_settings
from perdure.harness.messages import UserPart
from perdure.harness.model import ThinkingLevel
from perdure.harness.persistent import PersistentSubagent, running, stop
from perdure.harness.prepare import give_key
from perdure.harness.room import ViewWatch
from perdure.harness.submission import Submission
from perdure.harness.usage import UsageSummary, summed
from perdure.harness.view import DEFAULT_WINDOW
from perdure.harness.views import View
from perdure.kernel.context import Context, bounded
from perdure.kernel.entries import Entry
from perdure.kernel.errors import DocumentFieldError, NotFound
from perdure.kernel.json import check_json
from perdure.kernel.records import ConversationRecord, Edit, EntryRecord
from perdure.kernel.storage import Order
from perdure.kernel.transaction import UNSET, Transaction, Unset

if TYPE_CHECKING:
    from perdure.harness.harness import Harness


class ConversationInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation as it is listed."""

    record: ConversationRecord
    name: str | None
    labels: dict[str, str]

    @property
    def id(self) -> int:
        return self.record.id


class Conversation:
    """A handle. It holds nothing; two are equal if they name the same conversation of the same harness (rule K33)."""

    __slots__ = ("_harness", "id")

    def __init__(self, harness: Harness, id: int) -> None:
        self._harness = harness
        self.id = id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Conversation) and (other._harness, other.id) == (self._harness, self.id)

    def __hash__(self) -> int:
        return hash((Conversation, self.id))

    def __repr__(self) -> str:
        return f"<Conversation {self.id}>"

    # --- submitting --------------------------------------------------------------------------------------------

    async def submit(
        self,
        content: str | Sequence[UserPart],
        *,
        mode: InputMode = "follow_up",
        request_id: str | None = None,
        context: Context | None = None,
    ) -> Submission:
        """An input. Returns once it is durably admitted (rule H20); starts the scheduler.

        In an idle conversation it starts a run. In a busy one ``follow_up`` waits for the final answer, ``steer`` joins
        the run after the current round of tools, ``reject`` raises ConversationBusy. A ``request_id`` makes repeating
        safe: the same one gives the same submission for ever, whatever became of it.

        Raises NotJson, ConversationBusy, InboxFull, RequestConflict.
        """
        if mode not in get_args(InputMode):
            raise ValueError(f"mode is 'follow_up', 'steer' or 'reject', not {mode!r}")
        made = input_content(content)
        self._harness.resume()
        return await self._submit(made, mode, request_id, context)

    async def write(
        self,
        entry: Entry,
        *,
        head: int | Literal["self"] | None = None,
        edits: Sequence[Edit] = (),
        request_id: str | None = None,
        context: Context | None = None,
    ) -> Submission:
        """An entry without a call of the model. In a busy conversation it waits for the next boundary; one that no
        model reads (no messages, head or edits) is appended at once.

        Raises NotJson, ValueError for messages that are not what a model reads, NotFound for a head or an edited entry
        that the conversation does not show, InboxFull, RequestConflict.
        """
        return await self._submit(write_content(entry, head=head, edits=edits), "follow_up", request_id, context)

    async def reset(
        self,
        handoff: str | Sequence[UserPart] | None = None,
        *,
        request_id: str | None = None,
        context: Context | None = None,
    ) -> Submission:
        """Begin the model's context anew, with the handoff as a user message; older entries stay stored (rule H29).

        In a busy conversation it waits for the next boundary. After a round of tools that ends the run: its inputs end
        unanswered, ``reset``.
        """
        return await self._submit(reset_content(handoff), "follow_up", request_id, context)

    async def _submit(
        self, content: Content, mode: InputMode, request_id: str | None, context: Context | None
    ) -> Submission:
        self._harness.registry.describe()
        async with self._harness.session.commit(conversation_id=self.id, context=context) as tx:
            record = await self._harness.admit(tx, self.id, content, mode=mode, request_id=request_id)
        return Submission(self._harness, record.id, self.id)

    # --- committing and forking --------------------------------------------------------------------------------

    def commit(self, *, context: Context | None = None) -> Transaction:
        """``async with conversation.commit() as tx``: new tasks are this conversation's, new entries go here (K49)."""
        return self._harness.session.commit(conversation_id=self.id, context=context)

    async def fork(self, entry: int, *, context: Context | None = None) -> Conversation:
        """A conversation whose history is this one's through that entry, with the agent settings of then.

        It has no owner, and inherits no submissions, queue or usage. Raises NotFound.
        """
        async with self._harness.session.commit(context=context) as tx:
            record = await tx.fork(self.id, entry)
            await give_key(tx, record.id)
        return Conversation(self._harness, record.id)

    async def delete(self, *, abort: bool = False, context: Context | None = None) -> list[int]:
        """Delete the conversation with all that it owns; the ids of all that went (rule H156).

        As ``Harness.delete_conversations``: forks go on, and ``abort`` first ends what goes on in it.

        Raises NotFound, ConversationOpen, InvalidTransition for the root, NotStopped.
        """
        return await self._harness.delete_conversations([self.id], abort=abort, context=context)

    # --- aborting and waiting ----------------------------------------------------------------------------------

    async def abort(self, *, background: bool = False, context: Context | None = None) -> None:
        """Abort what goes on here, and withdraw queued inputs; queued writes stay (rules T78 to T80).

        Durable: the marks and the withdrawals are one commit. Returns when all of it has ended. Background work and
        what is under it goes on, unless ``background``. Raises NotStopped if code does not stop in time.
        """

        async def before(tx: Transaction) -> None:
            await withdraw(tx, self.id, "aborted", "the conversation was aborted")

        await self._harness.tasks.abort_conversation(self.id, background=background, before=before, context=context)

    async def idle(self, *, through_blocked: bool = False, context: Context | None = None) -> None:
        """Return when no ordinary work is live here (rule T84). Starts the scheduler. Raises WorkBlocked."""
        await self._harness.tasks.idle(self.id, through_blocked=through_blocked, context=context)

    async def busy(self, *, context: Context | None = None) -> bool:
        """Whether a run goes on, from the commit that admitted its input to that of its last outcome (rule H15)."""
        live = await self._harness.session.snapshot(Live, conversation=self.id, context=context)
        return live is not None and live.run is not None

    async def approvals(self, *, context: Context | None = None) -> list[Approval]:
        """Its calls that wait for a decision, by task. As ``Harness.approvals``."""
        harness = self._harness
        found = await bounded(pending(harness.session, conversation_id=self.id), context)
        return [approval(harness, question) for question in found]

    def subagents(self) -> list[PersistentSubagent]:
        """The persistent subagents that were begun here and not stopped (rule H165)."""
        return running(self._harness, self.id)

    async def stop_subagent(self, id: int, *, context: Context | None = None) -> None:
        """Stop one of them: returns once nothing goes on in it any more. Its conversation stays to be read.

        Raises NotFound for what is none of this conversation's. One that has ended is left alone.
        """
        await stop(self._harness, id, parent=self.id, context=context)

    # --- settings ----------------------------------------------------------------------------------------------

    async def agent(self, *, at: int | None = None, context: Context | None = None) -> Agent:
        """The agent settings, now or as of an entry."""
        found = await self._harness.session.snapshot(Agent, conversation=self.id, at=at, context=context)
        return found or Agent()

    async def set_agent(
        self,
        *,
        model: str | Unset | None = UNSET,
        thinking: ThinkingLevel | Unset = UNSET,
        extensions: Sequence[str] | Unset | None = UNSET,
        tools: Sequence[str] | Unset | None = UNSET,
        instructions: str | Unset = UNSET,
        cwd: str | Unset | None = UNSET,
        context: Context | None = None,
    ) -> None:
        """Change the settings that are given; they count from the next request on.

        ``thinking`` is how long the model may think, as far as it can (rules H249, H250). Raises DocumentFieldError for
        a level that is none, NotJson.
        """
        if not isinstance(thinking, Unset) and thinking not in get_args(ThinkingLevel):
            levels = ", ".join(map(repr, get_args(ThinkingLevel)))
            raise DocumentFieldError("pi.agent.thinking", f"one of {levels}, not {thinking!r}")
        async with self.commit(context=context) as tx:
            await tx.conversation(self.id)
            agent = await tx.draft(Agent)
            if not isinstance(model, Unset):
                agent.model = model
            if not isinstance(thinking, Unset):
                agent.thinking = thinking
            if not isinstance(extensions, Unset):
                agent.extensions = _names(extensions)
            if not isinstance(tools, Unset):
                agent.tools = _names(tools)
                agent.added_tools = []
            if not isinstance(instructions, Unset):
                agent.instructions = instructions
            if not isinstance(cwd, Unset):
                agent.cwd = cwd

    async def set_compaction(
        self,
        *,
        enabled: bool | Unset | None = UNSET,
        reserve_tokens: int | Unset | None = UNSET,
        keep_recent_tokens: int | Unset | None = UNSET,
        background_tokens: int | Unset | None = UNSET,
        context: Context | None = None,
    ) -> None:
        """Change what this conversation says of its own compaction, field by field; None: as the host says (H134).

        It counts from the next request on. See Compaction. Raises ValueError.
        """
        if enabled is not None and not isinstance(enabled, Unset):
            check_enabled(enabled)
        sizes = (
            ("reserve_tokens", reserve_tokens),
            ("keep_recent_tokens", keep_recent_tokens),
            ("background_tokens", background_tokens),
        )
        for name, value in sizes:
            if not isinstance(value, Unset):
                check_size(name, value)
        async with self.commit(context=context) as tx:
            await tx.conversation(self.id)
            own = (await tx.draft(Agent)).compaction
            if enabled is None:
                own.pop("enabled", None)
            elif not isinstance(enabled, Unset):
                own["enabled"] = enabled
            for name, value in sizes:
                if value is None:
                    own.pop(name, None)
                elif not isinstance(value, Unset):
                    own[name] = value

    async def compact(self, instructions: str = "", *, context: Context | None = None) -> int:
        """Summarise the older part of the context, whatever the policy says; the id of the task that does (H142).

        Returns once that is durably begun; it runs beside the conversation. The summary is placed at once where no run
        is, else at the next boundary. ``await harness.wait_task(id)`` tells how it ended: it fails
        ``nothing_to_compact`` where little more is there than what stays as it is. ``instructions``: what is wanted of
        the summary. Raises NotFound, NotJson.
        """
        check_json(instructions, at="instructions")
        self._harness.resume()
        async with self.commit(context=context) as tx:
            await tx.conversation(self.id)
            return await begin(tx, self.id, "manual", instructions=instructions)

    async def set_limits(
        self,
        *,
        cost_usd: Decimal | int | AsHost | Unset | None = UNSET,
        tokens: int | AsHost | Unset | None = UNSET,
        turns: int | AsHost | Unset | None = UNSET,
        tool_calls: int | AsHost | Unset | None = UNSET,
        seconds: float | AsHost | Unset | None = UNSET,
        context: Context | None = None,
    ) -> None:
        """Change the limits that are given, of this conversation and from its beginning on (rule H243). See Limits.

        They win over those of the host, each by itself: None is no limit, AS_HOST goes back to what the host says.
        They are stored with the conversation, and a fork has those of its entry. Raises TypeError, ValueError.
        """
        changes: dict[LimitName, object] = {
            "cost_usd": cost_usd,
            "tokens": tokens,
            "turns": turns,
            "tool_calls": tool_calls,
            "seconds": seconds,
        }
        async with self.commit(context=context) as tx:
            await tx.conversation(self.id)
            change_settings((await tx.draft(Agent)).limits, changes)

    async def set_name(
        self,
        name: str | Unset | None = UNSET,
        *,
        labels: dict[str, str] | Unset = UNSET,
        context: Context | None = None,
    ) -> None:
        """Name the conversation, and give it labels in place of those it has."""
        async with self.commit(context=context) as tx:
            await tx.conversation(self.id)
            meta = await tx.draft(Meta)
            if not isinstance(name, Unset):
                meta.name = name
            if not isinstance(labels, Unset):
                meta.labels = labels

    # --- watching ----------------------------------------------------------------------------------------------

    def view(
        self, *, window: int = DEFAULT_WINDOW, context: Context | None = None
    ) -> AbstractAsyncContextManager[View]:
        """``async with conversation.view() as view: view.value``: its active transcript and documents, kept up.

        ``view.value`` shows the ``window`` newest entries; ``await view.before(entry)`` reads those before one.
        Runs nothing. Entering raises NotFound.
        """
        return self._harness.views.state(self.id, window=window, context=context)

    def watch(
        self, *, after: str | None = None, window: int = DEFAULT_WINDOW, context: Context | None = None
    ) -> AbstractAsyncContextManager[ViewWatch]:
        """``async with conversation.watch() as watch: async for frame in watch``: the view after each commit.

        ``frame.ops`` lead from the JSON of the view before to that of ``frame.value``; None: begin anew. A consumer
        that is more than 100 frames behind gets one with the newest view in place of them.

        ``after``: the ``cursor`` of a frame. The first frame is the one that followed it, if that is still at hand:
        this opening of the store, the same window, at most 100 frames and a minute behind. Else its ops are None.

        Entering raises NotFound, CursorError.
        """
        return self._harness.views.watch(self.id, after=after, window=window, context=context)

    def events(
        self, *, after: str | None = None, window: int = DEFAULT_WINDOW, context: Context | None = None
    ) -> AbstractAsyncContextManager[Events]:
        """``async with conversation.events() as events: async for event in events``: what happens, from a snapshot on.

        ``window``: how many entries a snapshot shows. A consumer that is more than 100 commits behind gets a fresh
        snapshot in place of what it missed. Runs nothing.

        ``after``: the ``cursor`` of an event. The first event is the one that followed it, if that is still at hand (at
        most 100 commits of this conversation, for a minute after the last consumer of this window left) or nothing has
        happened since; else a snapshot, whose reason says so. After the store was opened anew a cursor goes on if no
        commit followed it and nothing was under way (rules H260 to H264).

        Entering raises NotFound; CursorError for a cursor of another store or conversation, a damaged one, and one that
        is ahead of the store.
        """
        return self._harness.views.events(self.id, after=after, window=window, context=context)

    # --- looking -----------------------------------------------------------------------------------------------

    async def info(self, *, context: Context | None = None) -> ConversationInfo:
        """Its record, name and labels. Raises NotFound."""
        session = self._harness.session
        record = await bounded(session.conversation(self.id), context)
        if record is None:
            raise NotFound(f"there is no conversation {self.id}")
        meta = await session.snapshot(Meta, conversation=self.id, context=context) or Meta()
        return ConversationInfo(record=record, name=meta.name, labels=dict(meta.labels))

    async def entries(
        self,
        *,
        first: int = 0,
        last: int | None = None,
        order: Order = "ascending",
        limit: int = 100,
        context: Context | None = None,
    ) -> list[EntryRecord]:
        """A page of its entries with ``first <= id <= last``, those it inherited by a fork included."""
        return await self._harness.session.entries(
            self.id, first=first, last=last, order=order, limit=limit, context=context
        )

    async def export(self, format: ExportFormat = "jsonl", *, context: Context | None = None) -> AsyncGenerator[str]:
        """``async for text in conversation.export("markdown")``: all of it, piece by piece (rule H155).

        As JSON lines, the first is about the conversation, and one follows for each entry, as it is stored. Raises
        NotFound, ValueError.
        """
        record = (await self.info(context=context)).record
        async for text in exported(self._harness.session, record, format, context):
            yield text

    async def usage(self, *, deep: bool = False, context: Context | None = None) -> UsageSummary:
        """What its models and tools have used and cost, every attempt counted (rules H157, H158).

        ``deep``: together with all conversations that its tasks own, as its subagents' (rule H166).
        """
        session = self._harness.session
        ids = await bounded(session.storage.closure(self.id), context) if deep else [self.id]
        found = [await session.snapshot(UsageTotals, conversation=id, context=context) for id in ids]
        return summed([totals for totals in found if totals is not None])


def _names(given: Sequence[str] | None) -> list[str] | None:
    if isinstance(given, str):
        raise TypeError(f"a list of names is wanted, not the text {given!r}")
    return None if given is None else list(given)
