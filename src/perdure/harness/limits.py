"""Limits on what a session, and each conversation in it, may spend (rules H159, H242 to H248).

They are looked at before each request is pinned, in the transaction that would pin it, and again before it is sent,
which may be long after, in another process: against what counts there and then. Nothing remembers that a limit was
reached.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_FLOOR, ROUND_HALF_EVEN, Context, Decimal
from typing import Final, Literal, TypeAlias, TypedDict, cast

import msgspec

from perdure.harness.documents import Agent, LimitSettings, Live, UsageTotals
from perdure.harness.spent import NOTHING, SessionSpent, Spent, settled_spent, spent_of
from perdure.kernel.records import Address
from perdure.kernel.reports import Report
from perdure.kernel.session import Session
from perdure.kernel.transaction import Transaction, Unset

MOST: Final = 10**18
"""Of what is counted, in its unit as stored: billionths of a dollar, tokens, milliseconds. It fits in 64 bits."""

LimitName: TypeAlias = Literal["cost_usd", "tokens", "turns", "tool_calls", "seconds"]
_Stored: TypeAlias = Literal["cost_nano_usd", "tokens", "turns", "tool_calls", "run_ms"]
_STORED: Final[Mapping[LimitName, _Stored]] = {
    "cost_usd": "cost_nano_usd",
    "tokens": "tokens",
    "turns": "turns",
    "tool_calls": "tool_calls",
    "seconds": "run_ms",
}
_Scope: TypeAlias = Literal["conversation", "session"]
_EXACT: Final = Context(prec=60, rounding=ROUND_HALF_EVEN)
_AGENT: Final = Agent.definition.kind


class _Agent(TypedDict, total=False):
    """A ``pi.agent`` as its JSON is; of an older release without some of it."""

    limits: LimitSettings


class AsHost:
    """A conversation's own setting is dropped: what the host says counts, where None means no limit."""

    def __repr__(self) -> str:
        return "AS_HOST"


AS_HOST = AsHost()
"""For ``conversation.set_limits(tokens=AS_HOST)``: the host's limit counts again."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What may be spent in all, from the beginning on; None: no limit (rule H242).

    Raises TypeError, ValueError for what is no limit.
    """

    cost_usd: Decimal | int | None = None
    """US dollars, of the attempts whose price is known; a billionth is the least."""
    tokens: int | None = None
    """Of every kind together."""
    turns: int | None = None
    """Responses of models."""
    tool_calls: int | None = None
    """Calls that have ended, in errors too."""
    seconds: float | int | None = None
    """Time in runs, with what they wait for; a thousandth is the least."""

    def __post_init__(self) -> None:
        self.settings()

    def settings(self) -> LimitSettings:
        """As they are stored, without those that are none."""
        found = LimitSettings()
        for name, stored in _STORED.items():
            value = limit_setting(name, getattr(self, name))
            if value is not None:
                found[stored] = value
        return found


class LimitReached(msgspec.Struct, frozen=True):
    """As much was spent as may be: no further request (rule H244)."""

    detail: str


def limit_setting(name: LimitName, value: object) -> int | None:
    """A limit as it is stored. Raises TypeError, ValueError."""
    if value is None:
        return None
    kinds = {"cost_usd": (Decimal, int), "seconds": (int, float)}.get(name, (int,))
    if isinstance(value, bool) or not isinstance(value, kinds):
        wanted = {"cost_usd": "a Decimal or an int", "seconds": "an int or a float"}.get(name, "an int")
        raise TypeError(f"the limit {name} is {wanted}, or None for no limit, not {value!r}")
    finite = value.is_finite() if isinstance(value, Decimal) else not isinstance(value, float) or math.isfinite(value)
    if not finite or value < 0:
        raise ValueError(f"the limit {name} is a finite number, 0 or more, not {value}")
    if value > MOST:
        raise ValueError(f"the limit {name} is more than can be counted; None is no limit")
    if isinstance(value, Decimal) or name == "cost_usd":
        stored = int(_EXACT.to_integral_value(_EXACT.scaleb(Decimal(cast("Decimal | int", value)), 9)))
    else:
        stored = round(value * 1000) if name == "seconds" else int(value)
    if stored > MOST:
        raise ValueError(f"the limit {name} is more than can be counted; None is no limit")
    return stored


def change_settings(settings: LimitSettings, changes: Mapping[LimitName, object]) -> None:
    """Change a conversation's own limits, in a draft: UNSET keeps one, None is no limit, AS_HOST drops it (rule H243).

    Raises TypeError, ValueError.
    """
    for name, value in changes.items():
        if isinstance(value, AsHost):
            settings.pop(_STORED[name], None)
        elif not isinstance(value, Unset):
            settings[_STORED[name]] = limit_setting(name, value)


class LimitCheck:
    """The host's limits, and whether a conversation has reached one. Made once a session; memory only."""

    def __init__(self, session: Session, *, of_session: Limits | None, of_conversation: Limits | None) -> None:
        self._session = session
        self._spent = SessionSpent(session)
        self._of_session = _settings(of_session)
        self._of_conversation = _settings(of_conversation)
        self._told = False

    def change(self, *, of_session: Limits | Unset | None, of_conversation: Limits | Unset | None) -> None:
        """Both or none. Raises TypeError."""
        session = self._of_session if isinstance(of_session, Unset) else _settings(of_session)
        conversation = self._of_conversation if isinstance(of_conversation, Unset) else _settings(of_conversation)
        self._of_session, self._of_conversation = session, conversation

    @property
    def ready(self) -> bool:
        """Whether a transaction can look; if not, ``load`` first."""
        return not self._of_session or self._spent.loaded

    async def load(self) -> None:
        """Read what a limit of the session is held against, if there is one and it is not known. Not inside a
        transaction."""
        if not self.ready:
            await self._spent.load()

    async def reached(self, tx: Transaction, conversation_id: int, own: LimitSettings) -> LimitReached | None:
        """Whether another request of the conversation would be one too many, as a transaction sees it. ``own``: its
        own limits.

        Costs microseconds, and nothing where there are no limits.
        """
        of_conversation: LimitSettings = {**self._of_conversation, **own} if own else self._of_conversation
        # One that the host has set since this was ``ready`` counts where the request is sent.
        of_session = self._of_session if self._spent.loaded else LimitSettings()
        if not of_conversation and not of_session:
            return None
        totals = await tx.read(UsageTotals, conversation=conversation_id)
        spent = NOTHING if totals is None else spent_of(totals.shared_json())
        live = await tx.read(Live, conversation=conversation_id)
        return await self._look(of_conversation, of_session, spent, live, at=tx.at, conversation_id=conversation_id)

    async def reached_by_now(self, conversation_id: int) -> LimitReached | None:
        """The same of a request that is pinned, before it is sent, as it is settled. Not inside a transaction.

        Costs microseconds too.
        """
        session = self._session
        agent = await session.load_document(Address(_AGENT, "conversation", conversation_id))
        own = LimitSettings() if agent.settled.value is None else cast("_Agent", agent.settled.value).get("limits", {})
        if not own and not self._of_conversation and not self._of_session:
            return None
        await self.load()
        of_session = self._of_session if self._spent.loaded else LimitSettings()
        spent = await settled_spent(session, conversation_id)
        live = await session.snapshot(Live, conversation=conversation_id)
        return await self._look(
            {**self._of_conversation, **own},
            of_session,
            spent,
            live,
            at=session.clock.wall(),
            conversation_id=conversation_id,
        )

    async def _look(
        self,
        of_conversation: LimitSettings,
        of_session: LimitSettings,
        spent: Spent,
        live: Live | None,
        *,
        at: int,
        conversation_id: int,
    ) -> LimitReached | None:
        if live is not None and live.run is not None:  # ``run_ms`` has it once the run ends
            spent += Spent(run_ms=max(0, at - live.run["started_at"]))
        detail = self._over("conversation", of_conversation, spent, conversation_id)
        if detail is None and of_session:
            everywhere = await self._spent.within(conversation_id, spent)
            if "run_ms" in of_session:
                everywhere += Spent(run_ms=self._spent.elapsed_elsewhere(at, conversation_id))
            detail = self._over("session", of_session, everywhere, conversation_id)
        return None if detail is None else LimitReached(detail)

    def _over(self, scope: _Scope, settings: LimitSettings, spent: Spent, conversation_id: int) -> str | None:
        if spent.unpriced and settings.get("cost_nano_usd") is not None:
            self._tell_unpriced(scope, spent.unpriced, conversation_id)
        return limit_reached(scope, settings, spent)

    def _tell_unpriced(self, scope: _Scope, unpriced: int, conversation_id: int) -> None:
        """Once: it would be so at every request from here on."""
        if not self._told:
            self._told = True
            what = f"{_requests(unpriced)} of the {scope}"
            self._session.report(
                Report(
                    type="limit_unpriced",
                    message=f"a limit on cost cannot count {what}, the price of which is not known",
                    conversation=conversation_id,
                )
            )


def limit_reached(scope: _Scope, settings: LimitSettings, spent: Spent) -> str | None:
    """Which limit was reached, for a user to read; None: none was. At a limit it is reached, not only beyond it."""
    cost = settings.get("cost_nano_usd")
    if cost is not None and spent.cost_nano_usd >= cost:
        uncounted = f", without {_requests(spent.unpriced)} of unknown price" if spent.unpriced else ""
        of = f"{_dollars(spent.cost_nano_usd, cost)} of {_dollars(cost, cost)} US dollars"
        return f"the {scope} has cost {of}{uncounted}"
    tokens = settings.get("tokens")
    if tokens is not None and spent.tokens >= tokens:
        return f"the {scope} has used {spent.tokens:,} of {tokens:,} tokens"
    turns = settings.get("turns")
    if turns is not None and spent.turns >= turns:
        return f"the {scope} has had {spent.turns:,} of {turns:,} model responses"
    calls = settings.get("tool_calls")
    if calls is not None and spent.tool_calls >= calls:
        return f"the {scope} has made {spent.tool_calls:,} of {calls:,} tool calls"
    time = settings.get("run_ms")
    if time is not None and spent.run_ms >= time:
        return f"the {scope} has run for {_seconds(spent.run_ms)} of {_seconds(time)} seconds"
    return None


def _settings(limits: Limits | None) -> LimitSettings:
    if limits is None:
        return LimitSettings()
    if not isinstance(limits, Limits):  # pyright: ignore[reportUnnecessaryIsInstance]  # of untyped callers
        raise TypeError(f"limits are given as Limits(...), not as {type(limits).__name__}")
    return limits.settings()


def _dollars(nano: int, limit: int) -> str:
    """As precise as the limit is, cents at least, and rounded down: what is shown as less is less."""
    exact = Decimal(limit).scaleb(-9, _EXACT).normalize(_EXACT).as_tuple().exponent
    places = max(2, -cast("int", exact))
    return f"{Decimal(nano).scaleb(-9, _EXACT).quantize(Decimal(1).scaleb(-places), ROUND_FLOOR, _EXACT):,f}"


def _seconds(ms: int) -> str:
    return f"{ms / 1000:,.3f}".rstrip("0").rstrip(".")


def _requests(number: int) -> str:
    return f"{number:,} {'request' if number == 1 else 'requests'}"
