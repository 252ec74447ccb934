"""Responses that a provider makes in the background: their handle is kept, and polled until there is an answer (rules
H75, H400 to H406). The phase of it is ``GenerationTask.poll``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeAlias

import msgspec
from msgspec import structs

from perdure.harness.answers import Failure
from perdure.harness.asking import storable, unkept, unusable
from perdure.harness.catalogue import NoModel, find_info
from perdure.harness.documents import Live
from perdure.harness.foreign import cancelled_itself, words_of
from perdure.harness.host import Host
from perdure.harness.messages import AssistantMessage, Usage
from perdure.harness.model import Deferred, DeferredFailed, Defers, Finished, ModelError, wait_ms
from perdure.harness.patience import TimedOut, within
from perdure.harness.prepare import Pinned
from perdure.harness.usage import Attempt
from perdure.kernel.records import TaskRecord
from perdure.kernel.reports import Report
from perdure.kernel.transaction import Transaction
from perdure.tasks.run import Run

FETCH_MS: Final = 120_000
"""How long one poll may take."""
CANCEL_MS: Final = 5_000
"""How long a provider may take to hear that nobody wants a response any more."""
SHOWN: Final = 100
"""Characters of a handle that errors tell."""
DRAIN_MS: Final = 10_000
"""An adapter that does not stop within that time is reported."""


class Deferral(Pinned, frozen=True, kw_only=True, omit_defaults=True):
    """The checkpoint while a response is made in the background: its request, and what it is fetched by."""

    handle: str
    sent: int
    """When the request was sent, in milliseconds UTC."""
    polls: int = 0


class Later(msgspec.Struct, frozen=True):
    """There is no answer yet: poll again."""

    at: Deferral
    pause: int
    """Milliseconds."""
    code: str | None = None
    """Why this poll failed, if it did."""


Fetched: TypeAlias = AssistantMessage | Failure | Later | NoModel


class Deferrals:
    """One a session."""

    def __init__(self, host: Host, kind: str) -> None:
        self._host = host
        self._kind = kind
        self._given: dict[int, tuple[str, str]] = {}
        """Model and handle of responses that no commit tells of yet, by task."""

    # --- into storage ------------------------------------------------------------------------------------------

    def given(self, task: int, model: str, told: Deferred) -> None:
        """The model answered a request with a handle."""
        self._given[task] = (model, told.handle)

    def saved(self, task: int) -> None:
        """The handle that was given is stored."""
        self._given.pop(task, None)

    async def forsake(self, record: TaskRecord) -> None:
        """A handle that will not be stored leads nowhere: nobody can ask for that response any more."""
        given = self._given.pop(record.id, None)
        if given is not None:
            await self.cancel(record, *given)

    def first(self, pinned: Pinned, told: Deferred, *, sent: int) -> Later:
        """The first wait of a response."""
        return self._later(Deferral(**structs.asdict(pinned), handle=told.handle, sent=sent), told.poll_after_ms)

    async def show(self, tx: Transaction, run: Run[None, None, object], later: Later) -> int:
        """Tell in ``pi.live`` what is waited for, in the commit that stores it; until when (ms UTC)."""
        at = later.at
        until = tx.at + later.pause
        (await tx.draft(Live, conversation=run.conversation_id)).deferred = {
            "task": run.id,
            "model": at.model,
            "attempt": at.attempt,
            "handle": at.handle,
            "sent": at.sent,
            "polls": at.polls,
            "until": until,
            "code": later.code,
        }
        return until

    # --- asking for it -----------------------------------------------------------------------------------------

    async def fetch(self, run: Run[None, None, Deferral]) -> Fetched:
        """One poll, and what it means. A response that is given up is cancelled before anybody is told."""
        at, host = run.checkpoint, self._host
        models = host.models
        if find_info(host, at.model, run.conversation_id) is None:
            return NoModel(f"the model {at.model!r}, which is making the response {_shown(at.handle)}, is not at hand")
        if not isinstance(models, Defers):
            words = (
                f"the response {_shown(at.handle)} of {at.model} is made in the background, and this host's models "
                "have no fetch_deferred: it can be fetched with those that sent the request"
            )
            return Failure(ModelError("other", words), may_repeat=False)
        at = structs.replace(at, polls=at.polls + 1)
        found = await self._ask(run, models, at)
        if isinstance(found, DeferredFailed):
            return Failure(found, may_repeat=_unpaid(found))
        if isinstance(found, AssistantMessage):
            error = unusable(found)
            return found if error is None else Failure(error, may_repeat=False)
        if isinstance(found, Deferred) or found.retryable:
            deadline = host.settings.polling.deadline_ms
            if host.session.clock.wall() < at.sent + deadline:
                if isinstance(found, Deferred):
                    return self._later(structs.replace(at, handle=found.handle), found.poll_after_ms)
                return self._later(at, found.retry_after_ms, found.code)
            why = "" if isinstance(found, Deferred) else f"; asking for it failed: {found}"
            found = ModelError("expired", f"there is no answer after {deadline / 1000:,.0f} seconds{why}")
        await self.cancel(run.record, at.model, at.handle)
        words = f"{found}; the response {_shown(at.handle)} is given up"
        return Failure(ModelError(found.code, words, usage=found.usage), may_repeat=False)

    def _later(self, at: Deferral, asked_ms: int | None, code: str | None = None) -> Later:
        polling = self._host.settings.polling
        pause = polling.pause(at.polls, asked_ms=wait_ms(asked_ms))
        left = at.sent + polling.deadline_ms - self._host.session.clock.wall()
        return Later(at, max(1, min(pause, left)), code)

    async def _ask(
        self, run: Run[None, None, Deferral], models: Defers, at: Deferral
    ) -> AssistantMessage | Deferred | ModelError:
        """Whatever the model or its adapter raises is a failure of the poll."""
        try:
            found = await self._in_time(run.record, FETCH_MS, partial(models.fetch_deferred, at.model, at.handle))
            if isinstance(found, Finished):
                return storable(found.message)
            if isinstance(found, Deferred):
                return unkept(found) or found
            return ModelError("malformed", f"the model's adapter gave a {type(found).__name__} for a deferred response")
        except ModelError as error:
            return error
        except TimedOut:
            return ModelError("connection", f"asking for the response took longer than {FETCH_MS / 1000:g} seconds")
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # an adapter's own code
            if isinstance(error, asyncio.CancelledError) and not cancelled_itself():
                raise
            self._report(run.record, "model_adapter_failed", "the model's adapter raised", error)
            return ModelError("other", f"the model's adapter raised {words_of(error)}")

    # --- nobody wants it any more ------------------------------------------------------------------------------

    async def drop(self, record: TaskRecord) -> None:
        """Cancel what an aborted run waits for."""
        live = await self._host.session.snapshot(Live, conversation=record.conversation_id)
        waits = None if live is None else live.deferred
        if waits is not None and waits["task"] == record.id:
            await self.cancel(record, waits["model"], waits["handle"])

    async def cancel(self, record: TaskRecord, model: str, handle: str) -> None:
        """At best effort: what goes wrong is reported, and not tried again (rule H404)."""
        models = self._host.models
        if not isinstance(models, Defers):
            return
        try:
            await self._in_time(record, CANCEL_MS, partial(models.cancel_deferred, model, handle))
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # an adapter's own code
            if isinstance(error, asyncio.CancelledError) and not cancelled_itself():
                raise
            self._report(record, "deferred_not_cancelled", "a deferred response could not be cancelled", error)

    # --- inside ------------------------------------------------------------------------------------------------

    def _in_time(self, record: TaskRecord, ms: int, call: Callable[[], Awaitable[object]]) -> Awaitable[object]:
        def overdue(stack: str) -> None:
            self._report(record, "not_stopped", f"a model's adapter did not stop within {DRAIN_MS} ms:\n{stack}")

        return within(self._host.session.clock, ms, call, drain_ms=DRAIN_MS, on_overdue=overdue)

    def _report(self, record: TaskRecord, type: str, message: str, error: BaseException | None = None) -> None:
        self._host.session.report(
            Report(
                type=type,
                message=message,
                task=record.id,
                kind=self._kind,
                conversation=record.conversation_id,
                error=error,
            )
        )


def attempt_of(live: Live, task: int) -> Attempt | None:
    """The request that a run waits for the response of; None: it waits for none."""
    waits = live.deferred
    if waits is None or waits["task"] != task:
        return None
    return Attempt(model=waits["model"], at=waits["sent"])


def _shown(handle: str) -> str:
    return repr(handle if len(handle) <= SHOWN else handle[:SHOWN] + "...")


def _unpaid(error: DeferredFailed) -> bool:
    """Whether nothing would be paid twice: the provider says that nothing was used, or refused to read it at all."""
    return error.usage == Usage() or (error.code == "overflow" and error.usage is None)
