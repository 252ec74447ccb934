"""What is done to a whole JSONL store beside its daily work: making it ready at an open, checking, measuring."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from perdure.kernel.errors import StorageError
from perdure.kernel.storage import MAX_BIGGEST, ConversationSize, RowCounts, SizeReport
from perdure.storage import jsonl_compaction, jsonl_contents, jsonl_mailbox
from perdure.storage import jsonl_disk as disk
from perdure.storage.jsonl_image import Image
from perdure.storage.jsonl_index import History, WorkRow, answer_path
from perdure.storage.jsonl_lines import CONTENTS, FRAME, KINDS

_MOST_FINDINGS = 100
_SUBMISSION = FRAME + len('{"submission":}')
_TASK = FRAME + len('{"task":}')

_encode = msgspec.json.Encoder().encode


def check_files(image: Image) -> None:
    """Raise StorageCorrupt unless the files beside the log and the sidecars are there that commits confirm."""
    jsonl_contents.check_sizes(image.path, image.index.contents)
    jsonl_mailbox.check_answers(image.mailbox, image.index.answered)


def make_ready(image: Image, *, flushing: bool) -> None:
    """For whoever owns the store: cut what is not confirmed, and remove what is left over (rule K156).

    ``flushing``: what an earlier opening confirmed is on the disk afterwards, for commits are going to rest on it; as
    it is anyway, if that opening was cut off.
    """
    if image.unread():
        disk.cut(image.log, image.log_end)
    for kind in KINDS:
        if os.fstat(image.files[kind]).st_size > image.ends[kind]:
            disk.cut(image.files[kind], image.ends[kind])
    if not image.closed:
        contents = list(jsonl_contents.paths(image.path))
        answers = [answer_path(image.mailbox, id) for id in image.index.answered]
        for path in (*contents, *answers, *sorted({os.path.dirname(path) for path in contents})):
            disk.flush_path(path)
    if flushing or not image.closed:
        for descriptor in (*image.files.values(), image.log):
            disk.flush(descriptor)
        for name in ("", CONTENTS, os.path.basename(image.mailbox)):
            disk.flush_directory(os.path.join(image.path, name))
    for path in jsonl_compaction.left_over(image):
        disk.remove(path)
    wanted = {jsonl_contents.path_of(image.path, digest) for digest in image.index.contents}
    for path in list(jsonl_contents.paths(image.path)):
        if path not in wanted:
            disk.remove(path)
    jsonl_mailbox.clean(image.mailbox, image.index.answered, image.seq)


def check(image: Image, go_on: Callable[[], None]) -> list[str]:
    """What is wrong with a store that could be read, one line each, at most a hundred. ``go_on`` is called between
    two files, and raises if it is not to be."""
    index, found = image.index, list[str]()
    for name, ids in (
        ("conversation", index.conversations),
        ("entry", index.entries.rows),
        ("submission", index.submissions.rows),
        ("task", index.tasks.rows),
        ("document", index.documents),
    ):
        found += [f"{name} {id} is not below the next id, {image.next_id}" for id in ids if id >= image.next_id]
    found += [f"document {id} has no base" for id, h in index.documents.items() if h.alive(None) and not h.bases]
    found += [f"a pin holds {digest}, which is not stored" for digest in index.held if digest not in index.contents]
    for digest, size in index.contents.items():
        go_on()
        found += _wrong(lambda digest=digest, size=size: jsonl_contents.read(image.path, digest, size))
    found += _wrong(lambda: jsonl_mailbox.check_answers(image.mailbox, index.answered))
    for id in index.answered:
        found += _wrong(lambda id=id: jsonl_mailbox.read_answer(image.mailbox, id))
    found += _wrong(lambda: jsonl_mailbox.waiting(image.mailbox, index.answered, 0, jsonl_mailbox.MAX_UNANSWERED))
    return found[:_MOST_FINDINGS]


def _wrong(look: Callable[[], object]) -> list[str]:
    try:
        look()
    except StorageError as error:
        return [str(error)]
    return []


def measure(image: Image) -> SizeReport:
    """What is in the files, as of the commit that an image is of."""
    index = image.index
    entries = {row.id: row.length - FRAME for row in index.entries.rows.values()}
    documents = {id: _document(history) for id, history in index.documents.items()}
    owned: Counter[int] = Counter()
    for row in index.entries.rows.values():
        owned[row.conversation_id] += entries[row.id]
    submissions = _work(index.submissions.rows.values(), _SUBMISSION, owned)
    tasks = _work(index.tasks.rows.values(), _TASK, owned)
    for id, history in index.documents.items():
        if history.record.scope == "conversation":
            owned[history.record.scope_id] += documents[id]
    waiting = jsonl_mailbox.waiting(image.mailbox, index.answered, 0, jsonl_mailbox.MAX_UNANSWERED)
    answers = [jsonl_mailbox.read_answer(image.mailbox, id) for id in index.answered]
    return SizeReport(
        total=jsonl_compaction.taken(image.path),
        conversations=sum(len(_encode(record)) for record in index.conversations.values()),
        entries=sum(entries.values()),
        submissions=submissions,
        tasks=tasks,
        documents=sum(documents.values()),
        contents=sum(index.contents.values()),
        mailbox=sum(len(bytes(mail.body)) for mail in waiting)
        + sum(len(bytes(answer.result)) for answer in answers if answer is not None),
        free=sum(index.dead.values()),
        log=0,
        rows=RowCounts(
            conversations=len(index.conversations),
            entries=len(index.entries.rows),
            submissions=len(index.submissions.rows),
            tasks=len(index.tasks.rows),
            documents=len(index.documents),
            states=sum(len(history.bases) + len(history.deltas) for history in index.documents.values()),
            contents=len(index.contents),
            mail=len(waiting) + len(index.answered),
        ),
        biggest=tuple(
            ConversationSize(
                id=id,
                entries=len(index.entries.of.get(id, ())),
                bytes=size,
                deleted=index.there(id) is None and id in index.conversations,
            )
            for id, size in sorted(owned.items(), key=lambda item: (-item[1], item[0]))[:MAX_BIGGEST]
        ),
    )


def _work(rows: Iterable[WorkRow], frame: int, owned: Counter[int]) -> int:
    total = 0
    for row in rows:
        owned[row.conversation_id] += row.length - frame
        total += row.length - frame
    return total


def _document(history: History) -> int:
    return len(_encode(history.record)) + sum(state.size for state in (*history.bases, *history.deltas))
