"""The mailbox of a harness: inputs, aborts and signals from other processes (rules K72 to K75, T23)."""

from __future__ import annotations

import asyncio
from typing import Any

from kit import Hold, live, opened, queue, rest, transcript, until

from perdure.kernel.records import from_raw
from perdure.storage.memory import MemoryStorage
from perdure.tasks.definition import Next, Task
from perdure.tasks.run import Run
from perdure.testing.model import ScriptedModel, say


def talk(**more) -> ScriptedModel:
    return ScriptedModel(lambda request: say(f"answer to {request.messages[-1].text}"), **more)


async def answered(storage: MemoryStorage, mail: int) -> tuple[bool, Any]:
    """What became of a request."""
    await until(lambda: mail in storage._contents.replies)
    await rest()  # until the session has published what storage has
    reply = storage._contents.replies[mail]
    return reply.ok, from_raw(reply.result)


async def test_an_input_is_folded_in_and_answered_in_the_commit_of_its_admission_k74() -> None:
    storage = MemoryStorage()
    async with opened(talk(), storage=storage) as harness:
        root = await harness.root()
        harness.resume()
        seen = []
        harness.session.observe(lambda s: seen.append(s) if s.batch.replies else None)
        mail = storage.post("input", {"conversation_id": 1, "content": "hi", "request_id": "m1"}, now=0)
        ok, result = await answered(storage, mail)
        assert ok
        submission = await harness.submission(result["submission"])
        assert (await submission.answer()).text == "answer to hi"
        assert [s.id for s in seen[0].batch.submissions] == [submission.id]
        assert await root.submit("hi", request_id="m1") == submission


async def test_what_was_posted_to_a_closed_store_is_folded_in_at_open_k72_k74() -> None:
    storage = MemoryStorage()
    async with opened(talk(), storage=storage) as harness:
        await harness.root()
    mails = [storage.post("input", {"conversation_id": 1, "content": f"n{n}"}, now=0) for n in range(3)]
    async with opened(talk(), storage=storage) as harness:
        for mail in mails:
            assert (await answered(storage, mail))[0]
        await harness.idle()
        assert await transcript(await harness.root()) == [
            line for n in range(3) for line in (f"user n{n}", f"assistant answer to n{n}")
        ]


async def test_an_input_by_mail_runs_nothing_before_the_host_resumes_t37() -> None:
    storage = MemoryStorage()
    model = talk()
    async with opened(model, storage=storage) as harness:
        root = await harness.root()
        mail = storage.post("input", {"conversation_id": 1, "content": "hi"}, now=0)
        await answered(storage, mail)
        await rest()
        assert await root.busy()
        assert not model.requests


async def test_modes_and_refusals_are_the_same_as_of_a_call_h26_h32() -> None:
    storage = MemoryStorage()
    hold = Hold()
    async with opened(talk(pace=hold), storage=storage) as harness:
        root = await harness.root()
        first = await root.submit("hi", request_id="r")
        post = storage.post
        steer = post("input", {"conversation_id": 1, "content": "steer", "mode": "steer"}, now=0)
        refused = post("input", {"conversation_id": 1, "content": "x", "mode": "reject"}, now=0)
        conflict = post("input", {"conversation_id": 1, "content": "x", "request_id": "r"}, now=0)
        nowhere = post("input", {"conversation_id": 9, "content": "x"}, now=0)
        senseless = post("input", {"conversation_id": 1, "contents": "x"}, now=0)
        empty = post("input", {"conversation_id": 1, "content": []}, now=0)
        unknown = post("dance", {}, now=0)
        ok, result = await answered(storage, steer)
        assert ok
        assert await queue(root) == [result["submission"]]
        for mail, error in (
            (refused, "ConversationBusy"),
            (conflict, "RequestConflict"),
            (nowhere, "NotFound"),
            (senseless, "ValidationError"),
            (empty, "ValueError"),
            (unknown, "Refused"),
        ):
            ok, result = await answered(storage, mail)
            assert not ok
            assert result["error"] == error
        hold.release()
        await first.wait()
        await harness.idle()


async def test_an_abort_by_mail_names_the_run_it_means_t71() -> None:
    storage = MemoryStorage()
    async with opened(talk(pace=Hold()), storage=storage) as harness:
        root = await harness.root()
        first = await root.submit("hi")
        queued = await root.submit("more")
        run = (await live(root)).run
        assert run is not None
        stale = storage.post("abort", {"conversation_id": 1, "run": run["task"] - 1}, now=0)
        ok, result = await answered(storage, stale)
        assert not ok
        assert "nothing was aborted" in result["message"]
        assert await root.busy()
        mail = storage.post("abort", {"conversation_id": 1, "run": run["task"]}, now=0)
        assert await answered(storage, mail) == (True, {"aborted": True})
        assert (await first.wait()).reason == "aborted"
        assert (await queued.wait()).reason == "aborted"


async def test_a_submission_is_withdrawn_by_mail_h53() -> None:
    storage = MemoryStorage()
    hold = Hold()
    async with opened(talk(pace=hold), storage=storage) as harness:
        root = await harness.root()
        first = await root.submit("hi")
        queued = await root.submit("more")
        for submission, aborted in ((queued, True), (first, False)):
            mail = storage.post("abort", {"submission": submission.id}, now=0)
            assert await answered(storage, mail) == (True, {"aborted": aborted})
        nothing = storage.post("abort", {}, now=0)
        assert (await answered(storage, nothing))[0] is False
        hold.release()
        await first.wait()
        assert (await queued.record()).reason == "aborted"


class Ask(Task[None, str], kind="app.ask"):
    async def start(self, run: Run[None, str, None]) -> Next[str]:
        async with run.commit() as tx:
            return tx.wait_signal("go", self.told, None)

    async def told(self, run: Run[None, str, None]) -> Next[str]:
        async with run.commit() as tx:
            return tx.complete(str(run.signal))


async def test_signals_come_by_mail_the_first_of_a_name_wins_t23_t24() -> None:
    storage = MemoryStorage()
    async with opened(talk(), storage=storage) as harness:
        root = await harness.root()
        harness.tasks.registry.install(Ask)
        harness.resume()
        async with root.commit() as tx:
            task = tx.create_task(Ask, None)
        mails = [storage.post("signal", {"task": task.id, "name": "go", "value": n}, now=0) for n in (1, 2)]
        assert await answered(storage, mails[0]) == (True, {"first": True})
        outcome = await harness.tasks.wait(task.id)
        assert getattr(outcome, "result", None) == "1"
        # The second came before or after the task had ended: it changes nothing either way.
        assert (await answered(storage, mails[1]))[1].get("first", False) is False
        missing = storage.post("signal", {"task": 999, "name": "go", "value": 1}, now=0)
        assert (await answered(storage, missing))[0] is False


async def test_mail_that_a_close_interrupts_is_done_at_the_next_open_once_k74() -> None:
    storage = MemoryStorage()
    async with opened(talk(), storage=storage) as harness:
        await harness.root()
        mails = [storage.post("input", {"conversation_id": 1, "content": f"n{n}"}, now=0) for n in range(5)]
        await asyncio.sleep(0)
    async with opened(talk(), storage=storage) as harness:
        for mail in mails:
            assert (await answered(storage, mail))[0]
        await harness.idle()
        users = [line for line in await transcript(await harness.root()) if line.startswith("user")]
        assert users == [f"user n{n}" for n in range(5)]


async def test_an_abort_by_mail_does_not_reach_the_input_that_was_posted_after_it_k74() -> None:
    storage = MemoryStorage()
    hold = Hold(0)
    async with opened(talk(pace=hold), storage=storage) as harness:
        root = await harness.root()
        await root.submit("first")
        await hold.reached.wait()
        run = (await live(root)).run
        assert run is not None
        storage.post("abort", {"conversation_id": 1, "run": run["task"]}, now=0)
        mail = storage.post("input", {"conversation_id": 1, "content": "second"}, now=0)
        ok, result = await answered(storage, mail)
        assert ok
        assert await (await harness.submission(result["submission"])).status() == "queued"
        hold.release()
