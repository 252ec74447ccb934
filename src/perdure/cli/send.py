"""``perdure send``: an input from another terminal, through the store's mailbox (rules K72 to K75)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import typer

from perdure.cli import mailbox
from perdure.cli.entries import answer_of
from perdure.cli.errors import CommandError
from perdure.cli.stores import chosen, looking
from perdure.cli.text import lines_of, printable
from perdure.kernel.json import JsonValue
from perdure.kernel.records import SubmissionRecord
from perdure.kernel.session import Session

Became: TypeAlias = Literal["kept", "queued", "placed", "done", "unanswered"]
"""What has become of an input: kept in the mailbox, or the status of its submission."""


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--json`` prints."""

    conversation: int
    mail: int
    submission: int | None
    """None: nobody has taken it from the mailbox yet."""
    status: Became
    reason: str | None = None
    """Of an input that ended unanswered."""
    detail: str | None = None
    answer: str | None = None
    """The answer's words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be sent."""

    text: str
    conversation: str | None
    steer: bool
    request_id: str | None
    wait: bool
    timeout_s: float


async def send(path: Path, wanted: Wanted) -> Sent:
    """Leave the input in the store's mailbox, and tell what became of it.

    Raises CommandError if it is refused, and what opening and writing the store raise.
    """
    if not wanted.text.strip():
        raise CommandError("there is nothing to send: the text is empty")
    until = time.monotonic() + wanted.timeout_s
    async with looking(path) as session:
        conversation = (await chosen(session, wanted.conversation)).id
    body: JsonValue = {
        "conversation_id": conversation,
        "content": wanted.text,
        "mode": "steer" if wanted.steer else "follow_up",
        "request_id": wanted.request_id,
    }
    mail = await mailbox.post(path, "input", body)
    patience = until if wanted.wait else time.monotonic() + mailbox.TAKEN_S
    reply = await mailbox.reply(path, mail, patience, wait=wanted.wait)
    if reply is None:
        return Sent(conversation=conversation, mail=mail, submission=None, status="kept")
    result: dict[str, JsonValue] = msgspec.json.decode(reply.result)
    if not reply.ok:
        raise CommandError(f"it was refused: {printable(str(result.get('message')))}")
    submission = result["submission"]
    assert isinstance(submission, int), "an input's reply names its submission"
    while True:
        sent = await _look(path, mail, submission)
        if sent.status in ("done", "unanswered") or not wanted.wait or time.monotonic() > until:
            return sent
        await asyncio.sleep(mailbox.POLL_S)


async def _look(path: Path, mail: int, submission: int) -> Sent:
    async with looking(path) as session:
        record = await session.submission(submission)
        if record is None:
            raise CommandError(f"submission {submission} is not in the store any more")
        return Sent(
            conversation=record.conversation_id,
            mail=mail,
            submission=submission,
            status=record.status,
            reason=record.reason,
            detail=record.detail,
            answer=await _answer(session, record),
        )


async def _answer(session: Session, record: SubmissionRecord) -> str | None:
    entry = None if record.answer is None else await session.entry(record.answer)
    message = None if entry is None else answer_of(entry)
    return None if message is None else message.text


def render(sent: Sent, *, wait: bool, as_json: bool) -> int:
    """Print it; the exit code: 1 for no answer, 3 where waiting for it took too long."""
    if as_json:
        typer.echo(msgspec.json.encode(sent).decode())
    else:
        _say(sent, wait=wait)
    if sent.status == "unanswered":
        return 1
    return 3 if wait and sent.status != "done" else 0


def _say(sent: Sent, *, wait: bool) -> None:
    where = f"conversation {sent.conversation}"
    match sent.status:
        case "done" if wait:
            for text in lines_of(sent.answer or ""):
                typer.echo(text)
        case "unanswered":
            why = f": {printable(sent.detail)}" if sent.detail else ""
            typer.echo(f"submission {sent.submission} in {where} has no answer: {sent.reason}{why}", err=True)
        case "kept":
            typer.echo(f"kept in the mailbox for {where}; it is taken up when the store is opened", err=wait)
        case _:
            typer.echo(f"{sent.status} in {where}: submission {sent.submission}", err=wait)
