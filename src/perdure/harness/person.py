"""Questions to a person: a tool asks, and waits for the answer durably (rules H329 to H332).

A question is a task of its own, ``pi.question``, owned by the call that asks; which one a key stands for is a memo of
the call, as with nested calls. The answer is a signal of that task: so any process can list the one and send the other,
whether the host of the call runs or not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar, cast

import msgspec
from msgspec import structs
from typing_extensions import override

from perdure.harness.approvals import live_tasks
from perdure.harness.documents import Live, ToolInput
from perdure.harness.handle import CallConflict, CallRefused
from perdure.harness.nested import WaitTask
from perdure.harness.parse import CannotParse, parse_answer
from perdure.harness.repair import Schema, fits, repaired
from perdure.harness.tool import ToolError
from perdure.kernel.context import Context
from perdure.kernel.errors import PerdureError
from perdure.kernel.json import INT_MAX, JsonValue, check_json, copy_json, digest, encode_json
from perdure.kernel.records import Completed, Failed, TaskRecord, from_raw, to_raw
from perdure.kernel.session import Session
from perdure.kernel.transaction import Transaction
from perdure.tasks.definition import Next, Task
from perdure.tasks.run import Run
from perdure.tasks.values import MAX_NAME, stored_value, with_value

if TYPE_CHECKING:
    from perdure.harness.harness import Harness

T = TypeVar("T")

QUESTION: Final = "pi.question"
ANSWER: Final = "answer"
"""The signal that is one."""
ANSWERED_AT: Final = "answered_at"
"""The memo of when it came; ms UTC."""
EXPIRED: Final = "expired"
MOST_WORDS: Final = 10_000
"""Characters of a question."""
MOST_SCHEMA: Final = 64 * 1024
"""Bytes of the schema of its answer."""
MOST_TOLD: Final = 1_000
"""Characters of that schema in an error."""
MOST_QUESTIONS: Final = 64
"""That one call may ask."""
PREFIX: Final = "pi.ask:"
"""Before the key, in the name of the memo."""


class QuestionExpired(ToolError):
    """Nobody answered in time. A tool that lets it pass gives an error result with the code ``expired``."""


RefusedAnswer: TypeAlias = Literal["ended", "expired", "not_asked", "does_not_fit"]
"""The question is over; its time is; that task is no question; the answer is not what was asked for."""


class AnswerRefused(PerdureError):
    """An answer that cannot be taken, see ``reason``. Nothing was changed."""

    def __init__(self, reason: RefusedAnswer, message: str) -> None:
        super().__init__(f"{message} ({reason})")
        self.reason: RefusedAnswer = reason


class QuestionInput(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    answer: msgspec.Raw
    """The JSON Schema of the answer."""
    tool: str
    asked_at: int
    expires_at: int


class QuestionAnswer(msgspec.Struct, frozen=True):
    value: msgspec.Raw


class QuestionTask(Task[QuestionInput, QuestionAnswer], kind=QUESTION, version=1, builtin=True):
    """Asked once, and over with its answer, at its time, or with the call that asks."""

    async def start(self, run: Run[QuestionInput, QuestionAnswer, None]) -> Next[QuestionAnswer]:
        async with run.commit() as tx:
            return tx.wait_signal(ANSWER, self.answered, None, deadline=run.input.expires_at)

    async def answered(self, run: Run[QuestionInput, QuestionAnswer, None]) -> Next[QuestionAnswer]:
        async with run.commit() as tx:
            await _over(tx, run.record)
            if run.timed_out:
                return tx.fail(EXPIRED, "nobody answered in time")
            return tx.complete(QuestionAnswer(to_raw(run.signal)))

    @override
    async def on_abort(self, run: Run[QuestionInput, QuestionAnswer, object]) -> Next[QuestionAnswer]:
        async with run.commit() as tx:
            await _over(tx, run.record)
            return tx.abort(run.record.abort_reason or "aborted")

    @override
    async def cleanup(self, tx: Transaction, record: TaskRecord) -> None:
        await _over(tx, record)


async def _over(tx: Transaction, record: TaskRecord) -> None:
    """It is no longer shown at its call."""
    live = await tx.draft(Live, conversation=record.conversation_id)
    shown = live.tools.get(str(record.owner))
    if shown is not None and "questions" in shown:
        shown["questions"].pop(str(record.id), None)


# --- asking -----------------------------------------------------------------------------------------------------


class People:
    """Whom calls ask. One a session."""

    def __init__(self, session: Session, *, wait: WaitTask) -> None:
        self._session = session
        self._wait = wait

    async def ask(
        self, run: Run[ToolInput, int | None, Any], text: str, kind: type[T], expire_after_ms: int, key: str | None
    ) -> T:
        """Ask, or find the question of that key, and wait for its answer. Cancelling it cancels the wait alone.

        Raises QuestionExpired, ToolError for an answer of another type, CallRefused, CallConflict, TypeError, NotJson.
        """
        schema = schema_of(kind)
        wanted = digest([text, schema])
        name = PREFIX + (wanted[:32] if key is None else key)
        record = self._session.live.settled.get(run.id)
        made = None if record is None else stored_value(record.raw_memos, name)
        if made is None:
            _check(text, schema, expire_after_ms, name)
            made = await self._make(run, text, schema, expire_after_ms, name, wanted)
        found = cast("dict[str, Any]", from_raw(made))
        if found["digest"] != wanted:
            raise CallConflict(f"call {run.id} asked something else with that key; use a key for each question")
        outcome = await self._wait(found["task"])
        if isinstance(outcome, Completed):
            return _typed(cast("dict[str, JsonValue]", outcome.result)["value"], kind)
        if isinstance(outcome, Failed) and outcome.error.code == EXPIRED:
            raise QuestionExpired(f"Nobody answered in time: {text}")
        raise ToolError(f"The question was withdrawn: {text}")

    async def _make(
        self,
        run: Run[ToolInput, int | None, Any],
        text: str,
        schema: JsonValue,
        expire_after_ms: int,
        name: str,
        digest: str,
    ) -> msgspec.Raw:
        """The memo of the key, with the task in the same commit if it is new."""
        async with run.commit() as tx:
            record = tx.live_task(run.id)
            assert record is not None, "the run's commit found it"
            if (known := stored_value(record.raw_memos, name)) is not None:
                return known
            memos = cast("dict[str, JsonValue]", from_raw(record.raw_memos) or {})
            if sum(memo.startswith(PREFIX) for memo in memos) >= MOST_QUESTIONS:
                raise CallRefused(f"call {run.id} asked {MOST_QUESTIONS} questions; a call asks no more")
            expires_at = tx.at + expire_after_ms
            input = QuestionInput(
                text=text, answer=to_raw(schema), tool=run.input.name, asked_at=tx.at, expires_at=expires_at
            )
            task = tx.create_task(QuestionTask, input)
            live = await tx.draft(Live)
            shown = live.tools.get(str(run.id))
            if shown is not None:
                shown.setdefault("questions", {})[str(task.id)] = {"text": text, "expires_at": expires_at}
            made: JsonValue = {"task": task.id, "digest": digest}
            tx.memo(name, made)
        return to_raw(made)


def schema_of(kind: object) -> JsonValue:
    """The JSON Schema of answers of a type. Raises what pydantic or msgspec raise for one that has none."""
    if kind is str:
        return {"type": "string"}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        schema = msgspec.json.schema(kind)
    else:
        from pydantic import TypeAdapter  # slow to import: only who asks for other types pays

        schema = TypeAdapter(cast("type[object]", kind)).json_schema()
    return copy_json(schema, at="schema")


def _check(text: str, schema: JsonValue, expire_after_ms: int, name: str) -> None:
    check_json(text, at="question")
    if type(text) is not str or not 0 < len(text) <= MOST_WORDS:
        raise CallRefused(f"a question is a text of 1 to {MOST_WORDS} characters")
    if len(encode_json(schema)) > MOST_SCHEMA:
        raise CallRefused(f"the schema of an answer takes at most {MOST_SCHEMA} bytes")
    if type(expire_after_ms) is not int or not 0 < expire_after_ms <= INT_MAX // 2:
        raise CallRefused(f"expire_after_ms is a positive number of milliseconds, not {expire_after_ms!r}")
    if not len(PREFIX) < len(name) <= MAX_NAME:
        raise CallRefused(f"a key is a text of 1 to {MAX_NAME - len(PREFIX)} characters")


def _typed(value: JsonValue, kind: type[T]) -> T:
    text = value if kind is str else encode_json(value).decode()
    try:
        if not isinstance(text, str):
            raise CannotParse(kind, "it is no text")
        return parse_answer(text, kind)
    except CannotParse as error:
        raise ToolError(f"What was answered is not what was asked for: {error}") from None


# --- answering --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonQuestion:
    """A question that waits for its answer. From ``harness.questions()``."""

    task: int
    """Its number, as ``perdure questions answer`` takes it."""
    conversation_id: int
    call: int
    """The call that asks."""
    tool: str
    text: str
    """What is asked."""
    schema: Schema
    """JSON Schema of the answer."""
    asked_at: int
    """ms UTC."""
    expires_at: int
    """ms UTC."""
    _harness: Harness | None = field(default=None, repr=False, compare=False)

    async def answer(self, value: JsonValue, *, context: Context | None = None) -> bool:
        """Answer it, durably; False if that was done already: the first answer stands (rule H331).

        A text of the JSON that is asked for will do. Raises AnswerRefused, NotJson.
        """
        assert self._harness is not None, "it came from a harness"
        async with self._harness.session.commit(context=context) as tx:
            return await answer(self._harness, tx, WantedAnswer(task=self.task, value=to_raw(value)))


class WantedAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What somebody answers, also as it comes by mail."""

    task: int
    value: msgspec.Raw


async def questions(session: Session, harness: Harness | None = None) -> list[PersonQuestion]:
    """Those that can be answered now, by task. A store that is open for reading only is read as it is now."""
    now = session.clock.wall()
    found = [open_question(record, now, harness) for record in await live_tasks(session)]
    return [question for question in found if question is not None]


def open_question(record: TaskRecord, now: int, harness: Harness | None = None) -> PersonQuestion | None:
    """What a task asks, if it is a question that can be answered at that time (ms UTC)."""
    if record.kind != QUESTION or not record.live or record.abort_requested or has_answer(record):
        return None
    input = input_of(record)
    if now >= input.expires_at:
        return None
    return PersonQuestion(
        task=record.id,
        conversation_id=record.conversation_id,
        call=cast("int", record.owner),  # a call's own
        tool=input.tool,
        text=input.text,
        schema=cast("Schema", from_raw(input.answer)),
        asked_at=input.asked_at,
        expires_at=input.expires_at,
        _harness=harness,
    )


async def answer(harness: Harness, tx: Transaction, wanted: WantedAnswer) -> bool:
    """Store an answer; False if there is one, which stands. Raises NotFound, AnswerRefused."""
    record = tx.live_task(wanted.task)
    if record is None:
        record = await tx.task(wanted.task)
        raise AnswerRefused("ended", f"task {wanted.task} has ended; nothing is asked any more")
    if record.kind != QUESTION:
        raise AnswerRefused("not_asked", f"task {wanted.task} is no question; harness.questions() lists them")
    if record.abort_requested:
        raise AnswerRefused("ended", f"question {wanted.task} is being aborted")
    if has_answer(record):
        return False
    input = input_of(record)
    if tx.at >= input.expires_at:
        raise AnswerRefused("expired", f"the time of question {wanted.task} is over; its tool is told so")
    schema = cast("Schema", from_raw(input.answer))
    value = repaired(from_raw(wanted.value), schema)
    if not fits(value, schema):
        told = encode_json(schema).decode()
        told = told if len(told) <= MOST_TOLD else f"{told[:MOST_TOLD]}…"
        raise AnswerRefused("does_not_fit", f"the answer to question {wanted.task} must fit {told}")
    first = await harness.tasks.put_signal(tx, record.id, ANSWER, value)
    assert first, "there was none, and nothing comes between"
    answered = tx.live_task(record.id)
    assert answered is not None, "it has just been answered"
    memos = with_value(answered.raw_memos, ANSWERED_AT, to_raw(tx.at))
    if memos is not None:
        tx.put_task(structs.replace(answered, raw_memos=memos))
    return True


def input_of(record: TaskRecord) -> QuestionInput:
    return msgspec.json.decode(record.raw_input, type=QuestionInput)


def has_answer(record: TaskRecord) -> bool:
    return stored_value(record.raw_signals, ANSWER) is not None


def answered_at(record: TaskRecord) -> int | None:
    """When its answer was stored, in ms UTC; None: it has none, or one that came as a plain signal."""
    at = stored_value(record.raw_memos, ANSWERED_AT)
    return None if at is None else msgspec.json.decode(at, type=int)
