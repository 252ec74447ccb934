"""What deleting promises: all of it or nothing, and forks that go on (rules K192 to K197, K225 to
K227, H181, H184)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from msgspec import structs

from perdure.harness.deletion import count_deleted
from perdure.harness.documents import USER, DeletedUsage, Meta
from perdure.harness.retention import BATCH, Retention, apply_retention
from perdure.kernel.document import Document
from perdure.kernel.errors import NotFound
from perdure.kernel.records import NULL, ROOT_CONVERSATION, Completed, Terminal
from perdure.kernel.session import Session
from perdure.testing.model import say
from perdure.testing.normal import Records, Rules
from perdure.testing.scenarios.hosting import STORY, open_harness, scenario
from perdure.testing.scenarios.kernel import Progress, Step, once, open_session
from perdure.testing.simulation import Host, Scenario


class Places(Document, kind="app.places", scope="session"):
    """Which conversations there are, or were."""

    trunk: int = 0
    owned: int = 0
    fork: int = 0
    second: int = 0


async def delete(host: Host) -> None:
    """A conversation, what it owns, and its forks, deleted one after the other; what is left goes on in between."""
    async with open_session(host) as session:
        async with session.commit(conversation_id=ROOT_CONVERSATION) as tx:
            if await once(tx, "make"):
                trunk = tx.create_conversation(owner=None)
                task = tx.new_task(kind="app.work", version=1, phase="start", input=NULL, conversation=trunk.id)
                owned = tx.create_conversation(owner=task.id)
                places = await tx.draft(Places)
                places.trunk, places.owned = trunk.id, owned.id
                tx.append(Step(number=0), conversation=owned.id)
        at = await session.snapshot(Places)
        assert at is not None
        for number in range(1, 4):
            async with session.commit(conversation_id=ROOT_CONVERSATION) as tx:
                if await once(tx, f"step-{number}"):
                    (await tx.draft(Progress, conversation=at.trunk)).steps = number
                    tx.append(Step(number=number), conversation=at.trunk)
                    if number == 3:
                        (task,) = tx.live_tasks()
                        tx.put_task(structs.replace(task, state=Terminal(Completed()), ended_at=tx.at))
        fork = await _forked(session, "fork", at.trunk, 2)
        second = await _forked(session, "second", fork, 1)
        await _delete(session, "delete trunk", at.trunk)
        for gone in (at.trunk, at.owned):
            assert await session.conversation(gone) is None, "it is deleted"
        await _go_on(session, fork, [1, 2])
        await _go_on(session, second, [1])
        await _delete(session, "delete fork", fork)
        await _go_on(session, second, [1])
        await _delete(session, "delete second", second)
        assert [record.id for record in await session.conversations()] == [ROOT_CONVERSATION]
        size = await session.storage.size()
        assert size.entries == 0, "nobody shows anything any more"


async def _forked(session: Session, name: str, where: int, number: int) -> int:
    async with session.commit(conversation_id=ROOT_CONVERSATION) as tx:
        if await once(tx, name):
            entry = next(e for e in await tx.entries(where) if Step.read(e).number == number)
            forked = await tx.fork(where, entry.id)
            places = await tx.draft(Places)
            if name == "fork":
                places.fork = forked.id
            else:
                places.second = forked.id
    at = await session.snapshot(Places)
    assert at is not None
    return at.fork if name == "fork" else at.second


async def _delete(session: Session, request_id: str, id: int) -> None:
    async with session.commit(conversation_id=ROOT_CONVERSATION) as tx:
        if await once(tx, request_id):
            await tx.delete_conversation(id)


async def _go_on(session: Session, id: int, numbers: list[int]) -> None:
    """A fork shows what it shares, with the document as of each entry, and takes another one."""
    try:
        async with session.commit(conversation_id=id) as tx:
            if await once(tx, "go on", id):
                tx.append(Step(number=100))
                (await tx.draft(Progress)).steps += 10
    except NotFound:
        return  # this very fork was deleted before the process was killed
    shown = await session.entries(id)
    assert [Step.read(entry).number for entry in shown] == [*numbers, 100], "a fork shows what it shares"
    for entry, number in zip(shown, numbers, strict=False):
        then = await session.snapshot(Progress, conversation=id, at=entry.id)
        assert then is not None
        assert then.steps == number, "a document is as of the entry"


def all_or_nothing(records: Records) -> Iterator[str]:
    """With the commit that deletes a conversation all of it is gone, and nothing before."""
    asked = {submission.request_id for submission in records.submissions}
    at = cast("dict[str, int]", records.document("app.places") or {})
    there = {record.id for record in records.conversations}
    for names, request_id in (
        (("trunk", "owned"), "delete trunk"),
        (("fork",), "delete fork"),
        (("second",), "delete second"),
    ):
        for name in names:
            id = at.get(name, 0)
            if id and (id in there) == (request_id in asked):
                yield f"{request_id!r} is stored: {request_id in asked}, but {name} is there: {id in there}"
    if "delete trunk" in asked and (records.tasks or at["owned"] in {e.conversation_id for e in records.entries}):
        yield "the trunk is deleted, but not all it owned"


async def delete_busy(host: Host) -> None:
    """A conversation that is deleted in the middle of a run, with an input waiting: it ends, and its use is kept."""
    async with open_harness(host, {"one": say("1"), "long": say(STORY), "more": say("more")}) as (harness, root):
        forks = [info for info in await harness.conversations() if info.record.parent is not None]
        named = {info.name: info.id for info in await harness.conversations()}
        if not forks or "doomed" in named:
            if "doomed" in named:
                doomed = harness.handle(named["doomed"])
            else:
                doomed = await harness.create_conversation(name="doomed")
            answer = await (await doomed.submit("one", request_id="one")).answer()
            if not forks:
                await doomed.fork(answer.entry.id)
            await doomed.submit("long", request_id="long")
            await doomed.submit("more", request_id="more")
            await doomed.delete(abort=True)
        used = await harness.session.snapshot(DeletedUsage)
        assert used is not None
        assert sum(model["requests"] for model in used.models.values()) >= 1, "what was used was paid for"
        (fork,) = [info for info in await harness.conversations() if info.record.parent is not None]
        answer = await (await harness.handle(fork.id).submit("more", request_id="after")).answer()
        assert answer.text == "more"
        shown = await harness.handle(fork.id).entries()
        assert sum(entry.kind == USER for entry in shown) == 2, "what the fork shares, and its own"
        assert [info.id for info in await harness.conversations()] == [root.id, fork.id]


async def retain(host: Host) -> None:
    """More conversations than one commit of retention takes: a kill leaves the rest for the next life (rule K227)."""
    async with open_session(host) as session:
        session.derive(count_deleted)
        async with session.commit(conversation_id=ROOT_CONVERSATION) as tx:
            if await once(tx, "make"):
                for number in range(BATCH + 4):
                    made = tx.create_conversation(owner=None)
                    tx.append(Step(number=number), conversation=made.id)
        async with session.commit(conversation_id=ROOT_CONVERSATION) as tx:
            if await once(tx, "fork"):
                last = (await tx.conversations())[-1].id
                fork = await tx.fork(last, (await tx.entries(last))[0].id)
                (await tx.draft(Meta, conversation=fork.id)).name = "kept"
        await host.clock.sleep(60)
        await apply_retention(session, Retention(older_than_ms=60_000))
        root, kept = await session.conversations()
        assert root.id == ROOT_CONVERSATION
        assert [Step.read(entry).number for entry in await session.entries(kept.id)] == [BATCH + 3], (
            "a fork shows it still"
        )
        assert (await session.storage.size()).rows.entries == 1, "and nothing else is left"


DELETION = (
    Scenario(name="delete", program=delete, deletes=True, always=all_or_nothing, rules=Rules()),
    scenario(delete_busy, deletes=True, steady=False),
    Scenario(name="retain", program=retain, deletes=True),
)
