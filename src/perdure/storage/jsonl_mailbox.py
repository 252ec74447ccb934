"""The mailbox of a JSONL store: a folder with one file a request, which any process may add (rules K72 to K77).

An answer is a file of its own that is written before the marker of its commit and counts from then on: whoever asks
holds its commit against the end of the log. The request's file goes once the answer is confirmed. Ids are the next
after the highest there is, and the file with the highest stays, so that none is given twice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from contextlib import suppress
from typing import TypeVar

import msgspec

from perdure.kernel.errors import StorageCorrupt, StorageError
from perdure.kernel.json import JsonValue
from perdure.kernel.storage import Mail, MailReply
from perdure.storage import jsonl_disk as disk
from perdure.storage.jsonl_image import examine, last_seq
from perdure.storage.jsonl_index import answer_path, request_path
from perdure.storage.jsonl_lines import MAILBOX, is_whole, line_of
from perdure.storage.rules import MAX_UNANSWERED, mail_body, mailbox_full, no_mail

_ATTEMPTS = 1000
"""Requests that others may leave in the time in which one is left."""
_ABANDONED_SECONDS = 3600
"""A temporary file of a sender is not touched before."""


class Request(msgspec.Struct, frozen=True):
    id: int
    kind: str
    posted_at: int
    body: msgspec.Raw


class Answer(msgspec.Struct, frozen=True):
    mail_id: int
    seq: int
    """The commit that gave it."""
    ok: bool
    result: msgspec.Raw


File = TypeVar("File", Request, Answer)


def post(path: str | os.PathLike[str], kind: str, body: JsonValue, *, now: int) -> int:
    """Leave a request in the store at ``path``, open somewhere or closed, and return its mail id.

    It blocks for the time of some flushes; ``now`` is wall time in ms. Raises NotJson; StorageError if there is no
    store, if the body is too large or if too much is waiting; StorageFormatError and StorageCorrupt as opening does.
    """
    raw = mail_body(body)
    store = _existing(path)
    mailbox = os.path.join(store, MAILBOX)
    try:
        requests, answers = listed(mailbox)
        if len(requests - answers) >= MAX_UNANSWERED:
            raise mailbox_full()
        id = max((*requests, *answers), default=0)
        for _ in range(_ATTEMPTS):
            id += 1
            if _left(mailbox, Request(id=id, kind=kind, posted_at=now, body=raw)):
                return id
    except OSError as error:
        raise disk.explained(error, store, "given a request") from error
    raise StorageError(f"{store} could not be given a request: too many others are left at this moment; try again")


def _left(mailbox: str, request: Request) -> bool:
    """False if others took this id."""
    path = request_path(mailbox, request.id)
    temporary = f"{path}.{os.getpid()}{disk.TEMPORARY}"
    disk.remove(temporary)
    descriptor = disk.create(temporary)
    try:
        disk.write(descriptor, 0, line_of(request))
        disk.flush(descriptor)
        if os.path.exists(answer_path(mailbox, request.id)):
            return False
        disk.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        os.close(descriptor)
        disk.remove(temporary)
    disk.flush_directory(mailbox)
    return True


def reply(path: str | os.PathLike[str], mail_id: int) -> MailReply | None:
    """What became of a request; None while it waits. Raises NotFound if it is not there (any more), StorageError."""
    store = _existing(path)
    mailbox = os.path.join(store, MAILBOX)
    try:
        waits = os.path.exists(request_path(mailbox, mail_id))
        answer = read_answer(mailbox, mail_id)
        if answer is not None and answer.seq <= last_seq(store):
            return MailReply(mail_id, answer.ok, answer.result)
    except OSError as error:
        raise disk.explained(error, store, "read") from error
    if waits:
        return None
    raise no_mail(mail_id)


def _existing(path: str | os.PathLike[str]) -> str:
    store = os.path.realpath(path)
    if not examine(store):
        raise StorageError(f"there is no store at {store}")
    return store


# --- for whoever has the store open ----------------------------------------------------------------------------


def listed(mailbox: str) -> tuple[set[int], set[int]]:
    """The ids of the requests that have a file, and of the answers that do."""
    requests: set[int] = set()
    answers: set[int] = set()
    for name in os.listdir(mailbox):
        id, dot, rest = name.partition(".")
        if id.isascii() and id.isdigit() and dot:
            if rest == "json":
                requests.add(int(id))
            elif rest == "answer.json":
                answers.add(int(id))
    return requests, answers


def waiting(mailbox: str, answered: Collection[int], after: int, limit: int) -> list[Mail]:
    """Requests that no commit has answered, oldest first. Raises StorageCorrupt for one that cannot be read."""
    found: list[Mail] = []
    for id in sorted(id for id in listed(mailbox)[0] if id > after and id not in answered):
        request = _read(request_path(mailbox, id), Request)
        if request is not None:
            found.append(Mail(id=id, kind=request.kind, body=request.body, posted_at=request.posted_at))
            if len(found) == limit:
                break
    return found


def read_answer(mailbox: str, mail_id: int) -> Answer | None:
    """Raises StorageCorrupt."""
    return _read(answer_path(mailbox, mail_id), Answer)


def put_answers(mailbox: str, seq: int, replies: Collection[MailReply], *, flushing: bool) -> None:
    """Before the marker of commit ``seq``."""
    for each in replies:
        answer = Answer(mail_id=each.mail_id, seq=seq, ok=each.ok, result=each.result)
        disk.put(answer_path(mailbox, each.mail_id), line_of(answer), flushing=flushing)


def forget(mailbox: str, ids: Collection[int], kept: Collection[int]) -> None:
    """After the marker: remove the requests that were answered, and the answers that are not kept any more."""
    requests, answers = listed(mailbox)
    highest = max((*requests, *answers), default=0)
    for id in ids:
        disk.remove(request_path(mailbox, id))
    for id in answers:
        if id not in kept and id != highest:
            disk.remove(answer_path(mailbox, id))


def check_answers(mailbox: str, answered: Collection[int]) -> None:
    """Raise StorageCorrupt unless each answer that is kept has its file."""
    _, answers = listed(mailbox)
    for id in answered:
        if id not in answers:
            path = answer_path(mailbox, id)
            raise StorageCorrupt(f"{path} is gone, and the store needs it; restore the store from a backup")


def clean(mailbox: str, answered: dict[int, int], seq: int) -> None:
    """At an exclusive open after commit ``seq``: remove what no commit confirmed, and what a cut-off commit left."""
    requests, answers = listed(mailbox)
    for id in answers - answered.keys():
        confirmed = False
        with suppress(StorageCorrupt):  # written and not flushed by a commit that was not
            answer = read_answer(mailbox, id)
            confirmed = answer is not None and answer.seq <= seq
        if not confirmed:
            disk.remove(answer_path(mailbox, id))
    forget(mailbox, [id for id in requests if id in answered], answered)
    for name in os.listdir(mailbox):
        path = os.path.join(mailbox, name)
        with suppress(FileNotFoundError):
            if name.endswith(disk.TEMPORARY) and os.stat(path).st_mtime < time.time() - _ABANDONED_SECONDS:
                disk.remove(path)


def _read(path: str, type: type[File]) -> File | None:
    """None if it is not there."""
    try:
        with open(path, "rb") as file:
            line = file.read()
    except FileNotFoundError:
        return None
    with suppress(msgspec.MsgspecError):
        if is_whole(line):
            return msgspec.json.decode(line, type=type)
    raise StorageCorrupt(f"{path} is not what was written; remove it, or restore it from a backup")
