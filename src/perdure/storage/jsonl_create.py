"""A new JSONL store comes whole or not at all: built beside, flushed, renamed (rule K161). Copies are made so too."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from perdure.kernel.errors import StorageError
from perdure.kernel.storage import FORMAT_VERSION
from perdure.storage import jsonl_contents, jsonl_mailbox
from perdure.storage import jsonl_disk as disk
from perdure.storage.jsonl_compaction import sidecar_name, write_anew, write_log
from perdure.storage.jsonl_image import Image
from perdure.storage.jsonl_index import answer_path, request_path
from perdure.storage.jsonl_lines import CONTENTS, KINDS, LOG, MAILBOX, STORE, Header, Sidecar
from perdure.storage.rules import FIRST_ID

_READ_BYTES = 2 << 20
"""More than a content or a request has."""


def create(path: str, fill: Callable[[str], None]) -> None:
    """Put a store at ``path``, where nothing is or an empty directory, made by ``fill`` in a directory with two empty
    folders. The caller holds the owner lock of ``path``. Raises StorageError."""
    temporary = f"{path}.creating"
    try:
        clear(path)
        disk.make_directory(temporary)
        for name in (MAILBOX, CONTENTS):
            disk.make_directory(os.path.join(temporary, name))
        fill(temporary)
        for name in (MAILBOX, CONTENTS, ""):
            disk.flush_directory(os.path.join(temporary, name))
        if os.path.lexists(path) and (not os.path.isdir(path) or os.listdir(path)):
            raise StorageError(f"{path} appeared while a store was being made there; it was left as it is")
        disk.rename(temporary, path)
        disk.flush_directory(os.path.dirname(path))
    except BaseException as error:
        with suppress(OSError):
            clear(path)
        if isinstance(error, OSError):
            raise disk.explained(error, path, "created") from error
        raise


def clear(path: str) -> None:
    """Remove what a creation that died left beside ``path``; whoever holds the owner lock is the only living one."""
    disk.clear_directory(f"{path}.creating")


def empty(*, log_id: str, now: int) -> Callable[[str], None]:
    """A ``fill`` that makes a store with nothing in it."""

    def fill(directory: str) -> None:
        for kind in KINDS:
            descriptor = disk.create(os.path.join(directory, sidecar_name(kind, 1)))
            try:
                disk.flush(descriptor)
            finally:
                os.close(descriptor)
        header = Header(
            store=STORE,
            format=FORMAT_VERSION,
            log_id=log_id,
            created_at=now,
            at=now,
            seq=0,
            next_id=FIRST_ID,
            epoch=0,
            writer="",
            entries=Sidecar(sidecar_name("entries", 1), 0),
            records=Sidecar(sidecar_name("records", 1), 0),
        )
        write_log(directory, LOG, header)

    return fill


def copying(path: str, opened: Callable[[], Image], *, log_id: str, go_on: Callable[[], None]) -> Callable[[str], None]:
    """A ``fill`` that copies the store at ``path`` as of one commit, while it is in use, and gives it another log id.

    ``opened`` makes an image of it. ``go_on`` is called between two steps and after the last, and raises if the copy
    is not to be. Raises FileNotFoundError where something was compacted or reclaimed meanwhile.
    """

    def fill(directory: str) -> None:
        # Before the commit is chosen that the copy is of: what is answered after that is not missing in it.
        mailbox, copied = os.path.join(directory, MAILBOX), os.path.join(path, MAILBOX)
        requests, _ = jsonl_mailbox.listed(copied)
        for id in sorted(requests):
            with suppress(FileNotFoundError):  # answered meanwhile
                _copy(request_path(copied, id), request_path(mailbox, id))
        image = opened()
        try:
            _copy_image(image, directory, log_id=log_id, go_on=go_on)
        finally:
            image.close()
        for id in requests & image.index.answered.keys():
            disk.remove(request_path(mailbox, id))
        go_on()

    return fill


def _copy_image(image: Image, directory: str, *, log_id: str, go_on: Callable[[], None]) -> None:
    write_anew(image, directory, log=LOG, generation=1, log_id=log_id, go_on=go_on)
    made: set[str] = set()
    for digest in image.index.contents:
        target = jsonl_contents.path_of(directory, digest)
        folder = os.path.dirname(target)
        if folder not in made:
            disk.make_directory(folder)
            made.add(folder)
        _copy(jsonl_contents.path_of(image.path, digest), target)
        go_on()
    for id in image.index.answered:
        _copy(answer_path(image.mailbox, id), answer_path(os.path.join(directory, MAILBOX), id))
    for folder in made:
        disk.flush_directory(folder)


def _copy(source: str, target: str) -> None:
    with open(source, "rb") as file:
        data = file.read(_READ_BYTES)
    descriptor = disk.create(target)
    try:
        disk.write(descriptor, 0, data)
        disk.flush(descriptor)
    finally:
        os.close(descriptor)
