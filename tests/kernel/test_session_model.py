"""A session against a model in plain Python: documents, entries, forks, tasks, requests, deletions; rolled back, raced,
crashed, reopened (rules K1, K23, K43, K45, K60, K61, K64, K99, K111 to K113, K115, K118 to K120, K122, K130, K193,
K195, K196)."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kernel.samples import Draft, Job, Live, Note, Scratch, Tally, begin, ended, new_task
from kernel.stores import HeldStorage, rest
from perdure.kernel.document import Document
from perdure.kernel.documents import ForkConflict
from perdure.kernel.errors import ConversationOpen, NotFound, RequestConflict
from perdure.kernel.json import same_json
from perdure.kernel.observation import Watch
from perdure.kernel.ops import apply
from perdure.kernel.session import Session
from perdure.kernel.transaction import Transaction

T = TypeVar("T")
KINDS: dict[str, type[Any]] = {"job": Job, "live": Live, "draft": Draft}
SCOPES: dict[str, type[Document]] = {**KINDS, "tally": Tally, "scratch": Scratch}


@dataclass
class Place:
    parent: tuple[int, int] | None
    own: list[int] = field(default_factory=list[int])


@dataclass
class Model:
    """What must be true. A document is its history of (commit, n), n None where nothing lives."""

    seq: int = 0
    places: dict[int, Place] = field(default_factory=dict[int, Place])
    deleted: dict[int, Place] = field(default_factory=dict[int, Place])
    entries: dict[int, tuple[int, int, int]] = field(default_factory=dict[int, tuple[int, int, int]])
    """Its place, its commit, its n."""
    documents: dict[tuple[str, int], list[tuple[int, int | None]]] = field(default_factory=dict[Any, Any])
    live: dict[int, int] = field(default_factory=dict[int, int])
    requests: dict[tuple[int, str], tuple[int, str]] = field(default_factory=dict[Any, Any])

    def shown(self, place: int) -> list[int]:
        here = self.places.get(place) or self.deleted[place]
        inherited = [] if here.parent is None else [id for id in self.shown(here.parent[0]) if id <= here.parent[1]]
        return inherited + here.own

    def value(self, kind: str, scope: int, at: int | None = None) -> int | None:
        history = self.documents.get((kind, scope), [])
        return next((n for seq, n in reversed(history) if at is None or seq <= at), None)

    def put(self, kind: str, scope: int, n: int | None) -> None:
        self.documents.setdefault((kind, scope), []).append((self.seq, n))


STEPS = "note note set set bump retire conversation fork fork task end scratch ask tally delete delete"
steps = st.tuples(st.sampled_from(STEPS.split()), st.integers(0, 50), st.integers(0, 50), st.integers(0, 5))
bumps = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=5)


class Attempt:
    """One transaction, on the session and on a copy of the model."""

    def __init__(self, model: Model, tx: Transaction) -> None:
        self.before = model
        self.model = copy.deepcopy(model)
        self.model.seq += 1
        self.tx = tx
        self.drafted: set[tuple[str, int]] = set()
        self.forked: set[int] = set()
        self.written: set[int] = set()
        """Places that this transaction may not delete: what it writes there would go nowhere."""
        self.ended: list[int] = []
        self.conflicts: type[Exception] | None = None

    async def step(self, what: str, a: int, b: int, n: int) -> None:
        model, tx = self.model, self.tx
        place = sorted(model.places)[a % len(model.places)]
        kind = sorted(KINDS)[b % 3]
        if what in ("note", "set", "bump", "task", "ask"):
            self.written.add(place)
        if what == "note":
            entry = tx.append(Note(n=n), conversation=place).id
            model.places[place].own.append(entry)
            model.entries[entry] = (place, model.seq, n)
        elif what in ("set", "bump"):
            draft = await tx.draft(KINDS[kind], conversation=place)
            assert draft.n == (model.value(kind, place) or 0)
            new = n if what == "set" else draft.n + n
            if draft.n != new or model.value(kind, place) is None:
                model.put(kind, place, new)
            draft.n = new
            self.drafted.add((kind, place))
        elif what == "retire" and (kind, place) not in self.drafted:
            if model.value(kind, place) is not None:
                await tx.retire(KINDS[kind], conversation=place)
                model.put(kind, place, None)
        elif what == "conversation":
            model.places[tx.create_conversation(owner=None).id] = Place(None)
        elif what == "fork":
            await self.fork(a, b)
        elif what == "task":
            model.live[new_task(tx, place).id] = place
        elif what in ("end", "scratch") and model.live:
            task = sorted(model.live)[b % len(model.live)]
            if what == "scratch":
                (await tx.draft(Scratch, task=task)).n = n
                model.put("scratch", task, n)
            else:
                tx.put_task(ended(await tx.task(task)))
                del model.live[task]
                self.ended.append(task)
        elif what == "ask":
            key = (place, str(b % 3))
            found = await tx.request(*key)
            assert (None if found is None else (found.id, found.digest)) == model.requests.get(key)
            if found is None:
                made = tx.new_submission(
                    type="write", status="done", digest=str(n), request_id=key[1], conversation=place
                )
                model.requests[key] = (made.id, str(n))
            elif found.digest != str(n):
                with contextlib.suppress(RequestConflict):
                    tx.check_request(found, str(n))
                    raise AssertionError("other content must conflict")
        elif what == "delete":
            await self.delete(place)
            return
        elif what == "tally":
            (await tx.draft(Tally)).n = n
            if model.value("tally", 0) != n:
                model.put("tally", 0, n)
        await self.look(place, kind)

    async def fork(self, a: int, b: int) -> None:
        model, tx, before = self.model, self.tx, self.before
        # One that this transaction has deleted is forked no more.
        places = sorted(before.places.keys() & model.places.keys())
        choices = [(place, entry) for place in places for entry in before.shown(place)]
        if not choices:
            return
        place, at = choices[(a * 51 + b) % len(choices)]
        child = (await tx.fork(place, at)).id
        model.places[child] = Place((place, at))
        self.forked.add(place)
        origin, seq, _ = model.entries[at]
        for kind, n in (("job", before.value("job", origin, seq)), ("live", before.value("live", place))):
            if n is not None:
                model.put(kind, child, n)

    async def delete(self, place: int) -> None:
        model, tx = self.model, self.tx
        if place in self.written | self.forked or place not in self.before.places or len(model.places) == 1:
            return
        if place in model.live.values():
            with contextlib.suppress(ConversationOpen):
                await tx.delete_conversation(place)
                raise AssertionError("a task in it is live")
            return
        assert await tx.delete_conversation(place) == [place]
        model.deleted[place] = model.places.pop(place)
        for kind in KINDS:
            if model.value(kind, place) is not None:
                model.put(kind, place, None)
        for key in [key for key in model.requests if key[0] == place]:
            del model.requests[key]
        with contextlib.suppress(NotFound):
            await tx.entries(place)
            raise AssertionError("it is deleted")
        assert place not in [record.id for record in await tx.conversations(limit=1_000)]
        assert await tx.tasks(conversation_id=place) == await tx.submissions(conversation_id=place) == []

    async def look(self, place: int, kind: str) -> None:
        """Rule K45: what the transaction sees is what it did."""
        read = await self.tx.read(KINDS[kind], conversation=place)
        assert (None if read is None else read.n) == self.model.value(kind, place)
        shown = [entry.id for entry in await self.tx.entries(place, limit=1_000)]
        assert shown == self.model.shown(place)
        assert sorted(task.id for task in self.tx.live_tasks()) == sorted(self.model.live)

    def finish(self) -> Model | type[Exception]:
        """The model after the commit, or what refuses it."""
        for place in self.forked:
            if self.model.documents.get(("live", place)) != self.before.documents.get(("live", place)):
                return ForkConflict
        for task in self.ended:
            if self.model.value("scratch", task) is not None:
                self.model.put("scratch", task, None)
        if all(getattr(self.model, name) == getattr(self.before, name) for name in vars(self.model) if name != "seq"):
            return self.before
        return self.model


class SessionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.storage = HeldStorage()
        self.model = Model()
        self.session = self.run(Session.start(self.storage))
        self.watch: Watch[Any] | None = None
        self.watching: Any = None
        self.watched: Any = None
        self.run(self.attempt([("conversation", 0, 0, 0)], fails=False, first=True))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 20))

    async def attempt(self, work: list[tuple[str, int, int, int]], *, fails: bool, first: bool = False) -> None:
        expected: Model | type[Exception] = self.model
        try:
            async with self.session.commit() as tx:
                attempt = Attempt(self.model, tx)
                if first:
                    attempt.model.places[tx.create_conversation(owner=None).id] = Place(None)
                else:
                    for step in work:
                        await attempt.step(*step)
                expected = attempt.finish()
                if fails:
                    expected = self.model
                    raise InterruptedError
        except InterruptedError:
            assert fails
        except ForkConflict:
            assert expected is ForkConflict
            expected = self.model
        assert isinstance(expected, Model)
        self.model = expected

    @rule(work=st.lists(steps, min_size=1, max_size=6))
    def commit(self, work: list[tuple[str, int, int, int]]) -> None:
        self.run(self.attempt(work, fails=False))

    @rule(work=st.lists(steps, min_size=1, max_size=4))
    def roll_back(self, work: list[tuple[str, int, int, int]]) -> None:
        self.run(self.attempt(work, fails=True))

    @rule(
        bumps=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=5), lost=st.integers(0, 5)
    )
    def race(self, bumps: list[tuple[int, int]], lost: int) -> None:
        """Several at once; some settle, and then the process may die with the rest unsettled."""

        async def race() -> None:
            session = self.session
            self.storage.hold()
            done: dict[int, tuple[int, int]] = {}

            async def bump(number: int, a: int, n: int) -> None:
                place = sorted(self.model.places)[a % len(self.model.places)]
                async with session.commit(conversation_id=place) as tx:
                    (await tx.draft(Live)).n += n
                    done[number] = (place, tx.append(Note(n=n)).id)

            tasks = [begin(bump(number, a, n)) for number, (a, n) in enumerate(bumps)]
            await rest()
            settled = max(len(bumps) - lost, 0)
            await self.storage.settle(settled)
            for number, (_, n) in enumerate(bumps[:settled]):
                place, entry = done[number]
                self.model = copy.deepcopy(self.model)
                self.model.seq += 1
                self.model.put("live", place, (self.model.value("live", place) or 0) + n)
                self.model.places[place].own.append(entry)
                self.model.entries[entry] = (place, self.model.seq, n)
            if settled == len(bumps):
                await self.storage.settle()
                await asyncio.gather(*tasks)
                return
            left = self.storage.snapshot()
            await self.release()
            await self.storage.refuse()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [result is None for result in results] == [number < settled for number in range(len(bumps))]
            await session.close()
            await self.take(left)

        self.run(race())

    @rule(crash=st.booleans())
    def reopen(self, crash: bool) -> None:
        async def reopen() -> None:
            left = self.storage.snapshot() if crash else self.storage
            await self.release()
            await self.session.close()
            await self.take(left)

        self.run(reopen())

    async def take(self, store: Any) -> None:
        self.storage = HeldStorage()
        self.storage._contents = store._contents
        self.session = await Session.start(self.storage, document_retention_ms=0 if self.model.seq % 2 else 600_000)

    # --- a watch that must see every frame --------------------------------------------------------------------------

    @rule(b=st.integers(0, 2), a=st.integers(0, 50))
    def begin_watch(self, a: int, b: int) -> None:
        async def attach() -> None:
            await self.release()
            place, kind = sorted(self.model.places)[a % len(self.model.places)], sorted(KINDS)[b]
            watching = self.session.watch(KINDS[kind], conversation=place)
            if self.model.value(kind, place) is None:
                with contextlib.suppress(NotFound):
                    await watching.__aenter__()
                    raise AssertionError("nothing lives there")
                return
            self.watching, self.watch = watching, await watching.__aenter__()
            self.watched = (await anext(self.watch)).value.to_json()
            assert self.watched == {"n": self.model.value(kind, place)}

        self.run(attach())

    @precondition(lambda self: self.watch is not None)
    @rule()
    def read_watch(self) -> None:
        async def follow() -> None:
            assert self.watch is not None
            while (frame := self.watch._take()) is not None:
                assert frame.ops is not None
                self.watched = apply(self.watched, frame.ops)
                assert same_json(self.watched, frame.value.to_json())

        self.run(follow())

    async def release(self) -> None:
        if self.watching is not None:
            await self.watching.__aexit__(None, None, None)
        self.watch = self.watching = None

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def outside_everything_is_as_the_model_says(self) -> None:
        self.run(self.compare())

    async def compare(self) -> None:
        session, model = self.session, self.model
        assert session.seq == model.seq
        assert session.failed is None
        assert sorted(session.live.settled) == sorted(session.live.staged) == sorted(model.live)
        assert session.staged.entries == session.staged.tasks == session.staged.conversations == {}
        assert [c.id for c in await session.conversations(limit=1_000)] == sorted(model.places)
        assert session.staged.deleted == set()
        for place in model.deleted:
            assert await session.conversation(place) is None
        for place in list(model.places)[-4:]:
            entries = await session.entries(place, limit=1_000)
            assert [entry.id for entry in entries] == model.shown(place)
            for entry in entries:
                assert (entry.seq, entry.data) == (model.entries[entry.id][1], {"n": model.entries[entry.id][2]})
            for entry in entries[-2:]:
                then = await session.snapshot(Job, conversation=place, at=entry.id)
                origin, seq, _ = model.entries[entry.id]
                assert (None if then is None else then.n) == model.value("job", origin, seq)
        for (kind, scope), _ in list(model.documents.items())[-8:]:
            where: Any = {} if kind == "tally" else {"task": scope} if kind == "scratch" else {"conversation": scope}
            read: Any = await session.snapshot(SCOPES[kind], **where)
            assert (None if read is None else read.n) == model.value(kind, scope)
        for (place, request), (id, digest) in model.requests.items():
            found = await session.request(place, request)
            assert found is not None
            assert (found.id, found.digest) == (id, digest)
        assert await self.storage.check() == []

    def teardown(self) -> None:
        self.run(self.release())
        self.run(self.session.close())
        self.loop.close()


TestSessionModel = SessionMachine.TestCase
TestSessionModel.settings = settings(max_examples=40, stateful_step_count=25)
