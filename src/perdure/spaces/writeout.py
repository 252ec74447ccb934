"""An image of a log, written into a new directory from the contents in the store."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from perdure.kernel.session import Session
from perdure.spaces import image, logged
from perdure.spaces.errors import SpaceError
from perdure.spaces.image import Directory, File, Link, Tree

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class WrittenOut:
    files: int
    bytes: int


async def write_out(session: Session, tree: Tree, target: Path) -> WrittenOut:
    """Make ``target``, which must not exist, exactly the image: contents, permission bits, links, empty directories.

    It is filled under another name beside it and gets its own when it is whole. Nothing is left if it fails; a process
    that is killed leaves the empty target, and ``.TARGET.*.part`` beside it. Only its user may look into the new
    directory, since an image does not say who may. Raises SpaceError.
    """
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    _claim(target)
    try:
        os.mkdir(part, 0o700)
        written = await _fill(session, tree, os.fsencode(part))
        os.sync()
        os.rename(part, target)  # only over an empty directory
    except BaseException as error:
        _remove(part)
        with contextlib.suppress(OSError):
            os.rmdir(target)
        if isinstance(error, OSError):
            raise SpaceError(f"{target} cannot be written: {error.strerror or error}") from error
        raise
    return written


def _claim(target: Path) -> None:
    """Whoever else wants this name is refused from now on."""
    try:
        target.mkdir(0o700)
    except FileExistsError:
        raise SpaceError(f"{target} is there already; name a directory that is not") from None
    except OSError as error:
        raise SpaceError(f"{target} cannot be made: {error.strerror}") from error


async def _fill(session: Session, tree: Tree, root: bytes) -> WrittenOut:
    modes: list[tuple[bytes, int]] = []
    files = size = 0
    for change in image.entries(tree):
        path = os.path.join(root, image.unescape(change.path))
        entry = change.entry
        if isinstance(entry, Directory):
            os.mkdir(path, 0o700)
            modes.append((path, entry.mode))
        elif isinstance(entry, Link):
            os.symlink(image.unescape(entry.target), path)
        elif entry is not None:
            await _write(session, path, entry)
            files += 1
            size += entry.size
    for path, mode in reversed(modes):  # what lies below comes first: a directory may be closed to its own user
        os.chmod(path, mode)
    return WrittenOut(files, size)


async def _write(session: Session, path: bytes, file: File) -> None:
    whole, size = sha256(), 0
    with os.fdopen(os.open(path, _NEW, 0o600), "wb") as out:
        async for chunk in logged.content(session, file):
            out.write(chunk)
            whole.update(chunk)
            size += len(chunk)
        out.flush()
        os.fchmod(out.fileno(), file.mode)
    if size != file.size or (size and whole.hexdigest() != file.sha256):
        raise SpaceError(f"the contents in the store are not those of {os.fsdecode(path)!r}; check the store")


def _remove(path: Path) -> None:
    """Also what is closed to its own user."""
    with contextlib.suppress(OSError):
        for folder, folders, _ in os.walk(path):
            for name in folders:
                below = os.path.join(folder, name)
                if not os.path.islink(below):
                    os.chmod(below, 0o700)
        shutil.rmtree(path)
