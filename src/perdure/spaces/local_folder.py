"""The folder of a local Space and the record of it. Everything here is called under the Space's lock, in a thread.

DIRECTORY/.perdure/NAME.json    the record: generation, workspace, daemon; it outlives the Space
DIRECTORY/.perdure/NAME.lock    held while somebody opens, restarts or deletes the Space
DIRECTORY/NAME/space.json       which generation this folder is; written last when it is made
DIRECTORY/NAME/token            mode 0600
DIRECTORY/NAME/state/           the daemon's
DIRECTORY/NAME/socket           the daemon's address
DIRECTORY/NAME/daemon.log       what the daemon says when it cannot start
DIRECTORY/NAME/workspace/       unless the workspace is a directory of the user's
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from perdure.spaces import local_processes
from perdure.spaces.errors import SpaceError, SpaceUnavailable
from perdure.spaces.local_processes import ProcessMark
from perdure.spaces.wire import WirePath, decode_path, encode_path

T = TypeVar("T")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
HOME = ".perdure"
"""Where a directory of Spaces keeps its records. No Space's name begins with a dot."""
_MAX_RECORD = 65536
_WALK = 200_000
"""Directories of a new workspace that are looked through for other Spaces."""


class SpaceMisplaced(SpaceError, ValueError):
    """The workspace overlaps another Space, or the place where Spaces are kept; nothing was made."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a Space beside its folder. It stays when the folder is lost or deleted (rule S105)."""

    format: Literal[1] = 1
    name: str
    generation: int = 0
    """0: there has been none yet."""
    live: bool = False
    """False: it was deleted."""
    workspace: WirePath | None = None
    """A directory of the user's; None: the one in the folder."""
    daemon: ProcessMark | None = None
    tag: str = ""
    """What the Space's commands carry."""


class _Identity(msgspec.Struct, frozen=True, kw_only=True):
    format: Literal[1] = 1
    name: str
    generation: int


@dataclass(frozen=True, slots=True)
class Folder:
    """The places of one Space."""

    directory: str
    name: str

    @property
    def home(self) -> str:
        return f"{self.directory}/{HOME}"

    @property
    def path(self) -> str:
        return f"{self.directory}/{self.name}"

    @property
    def state(self) -> str:
        return f"{self.path}/state"

    @property
    def token(self) -> str:
        return f"{self.path}/token"

    @property
    def socket(self) -> str:
        return f"{self.path}/socket"

    @property
    def log(self) -> str:
        return f"{self.path}/daemon.log"

    def workspace(self, record: Record) -> str:
        return f"{self.path}/workspace" if record.workspace is None else decode_path(record.workspace)

    # --- the record

    def read_record(self) -> Record:
        """As it was stored, or a new one. Raises SpaceUnavailable if it is damaged."""
        record = _read(f"{self.home}/{self.name}.json", Record)
        return Record(name=self.name) if record is None else record

    def write_record(self, record: Record) -> None:
        _write(f"{self.home}/{self.name}.json", msgspec.json.encode(record))

    def read_token(self) -> str:
        with open(self.token, encoding="ascii") as file:
            return file.read().strip()

    # --- making and losing

    def find(self, record: Record) -> Record | None:
        """The record if the folder is whole and of its generation; None: there is none, or it was lost."""
        identity = _read(f"{self.path}/space.json", _Identity)
        if identity is not None and identity.generation > record.generation:
            raise SpaceUnavailable(
                f"{self.path} is generation {identity.generation} of its Space, the record in {self.home} knows only "
                f"{record.generation}; put the record back, or move the folder away"
            )
        if not record.live or identity is None or identity.generation != record.generation:
            return None
        if not os.path.isdir(self.state) or not os.path.isfile(self.token):
            return None
        if record.workspace is None:
            return record if os.path.isdir(self.workspace(record)) else None
        self._check_workspace(record)
        return record

    def _check_workspace(self, record: Record) -> None:
        """Raises SpaceUnavailable where there is none and none may be made."""
        where = self.workspace(record)
        if os.path.isdir(where):
            return
        if os.path.lexists(where):
            raise SpaceUnavailable(
                f"{where}, the workspace of the Space {self.name}, is no directory any more; move what is there away"
                + (", and another is made" if record.workspace is None else ", and put the directory back")
            )
        if record.workspace is not None:
            raise SpaceUnavailable(
                f"{where}, the workspace of the Space {self.name}, is gone; put the directory back where it was"
            )

    def make(self, record: Record, workspace: str | None) -> Record:
        """A new generation (rule S105). What the lost one left running is killed first, what is left of its state is
        moved aside, and its workspace, if it is still there, is kept."""
        if record.generation == 0 and os.path.isdir(self.path) and os.listdir(self.path):
            raise SpaceUnavailable(f"{self.path} holds something that is no Space; move it away or take another name")
        self.end_lost(record)
        if record.workspace is None:
            check_place(self, workspace)
            record = msgspec.structs.replace(record, workspace=None if workspace is None else encode_path(workspace))
        self._check_workspace(record)
        old = record.generation
        made = Record(name=self.name, generation=old + 1, live=True, workspace=record.workspace)
        self.write_record(made)
        _make_directory(self.path)
        if os.path.isdir(self.state):
            os.rename(self.state, f"{self.path}/lost-{old}-{secrets.token_hex(4)}")
        _make_directory(self.state)
        if made.workspace is None:
            _make_directory(self.workspace(made))
        _write(self.token, secrets.token_urlsafe(32).encode("ascii"))
        _write(f"{self.path}/space.json", msgspec.json.encode(_Identity(name=self.name, generation=made.generation)))
        _sync_directory(self.directory)
        return made

    def end_lost(self, record: Record) -> None:
        """Kill the daemon and the commands of a Space that can no longer be asked to."""
        if record.daemon is not None:
            local_processes.end(record.daemon, term_s=0.0)
        if record.tag:
            local_processes.kill_tagged(record.tag)

    def remove(self, record: Record) -> None:
        """Remove the folder, as one step; a workspace of the user's stays."""
        with contextlib.suppress(FileNotFoundError):
            trash = f"{self.home}/trash-{secrets.token_hex(8)}"
            os.rename(self.path, trash)
            self.write_record(Record(name=self.name, generation=record.generation))
            _remove_tree(trash)
            return
        self.write_record(Record(name=self.name, generation=record.generation))

    def note_daemon(self, record: Record, pid: int) -> None:
        """Remember who the daemon is, for the day that the folder is gone."""
        tag = ""
        with contextlib.suppress(OSError, msgspec.MsgspecError), open(f"{self.state}/space.json", "rb") as file:
            tag = msgspec.json.decode(file.read(65536), type=_Tag).id
        noted = msgspec.structs.replace(record, daemon=local_processes.mark_of(pid), tag=tag)
        if noted != record:
            self.write_record(noted)


class _Tag(msgspec.Struct, frozen=True):
    id: str = ""


def folder_of(directory: str, name: str) -> Folder:
    """Raises ValueError for a name that no Space can have."""
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is no name of a Space: 1 to 100 letters, digits, dots, dashes and underscores, beginning with "
            "a letter or digit"
        )
    return Folder(directory, name)


def prepare_directory(directory: str) -> None:
    """Make the directory of Spaces. Its mode lets nobody else in."""
    os.makedirs(f"{directory}/{HOME}", 0o700, exist_ok=True)


def names(directory: str) -> tuple[str, ...]:
    """Those of the Spaces that were made and not deleted."""
    return tuple(record.name for record in _records(directory) if record.live)


def has_record(folder: Folder) -> bool:
    """Whether there may be such a Space."""
    return os.path.exists(f"{folder.home}/{folder.name}.json")


def try_lock(folder: Folder) -> int | None:
    """The descriptor that holds the Space's lock, or None if somebody else does."""
    descriptor = os.open(f"{folder.home}/{folder.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


# --- where a workspace may be ---------------------------------------------------------------------------------


def beside(workspace: str) -> str:
    """Where the Spaces of ``LocalSpaces.at`` are kept: beside the workspace, never inside."""
    parent, name = os.path.split(workspace)
    if not name:
        raise SpaceMisplaced("the root directory has nothing beside it; give LocalSpaces a directory of its own")
    return os.path.join(parent, f".{name}{HOME}")


def besides(directory: str) -> list[str]:
    """Where the Spaces of the workspaces in a directory are kept, by name; none where it cannot be read."""
    try:
        with os.scandir(directory) as entries:
            found = [entry.path for entry in entries if entry.name.startswith(".") and entry.name.endswith(HOME)]
    except OSError:
        return []
    return sorted(path for path in found if os.path.basename(path) != HOME)


def name_for(workspace: str) -> str:
    """A name for the Space of a directory: the directory's own, as far as a Space can have it."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", os.path.basename(workspace))[:100]
    return name if NAME.fullmatch(name) else f"space-{name}"[:100]


def check_place(folder: Folder, workspace: str | None) -> None:
    """Refuse a workspace that overlaps the directory of Spaces or another Space (rule S108). None: its own."""
    if workspace is None:
        _check_around(folder.path)
        return
    if not os.path.isdir(workspace):
        raise SpaceMisplaced(f"{workspace} is not a directory; make the workspace first")
    if _overlap(workspace, folder.directory):
        raise SpaceMisplaced(f"the workspace {workspace} and {folder.directory}, where Spaces are kept, overlap")
    for record in _records(folder.directory):
        if record.live and record.name != folder.name and record.workspace is not None:
            other = decode_path(record.workspace)
            if _overlap(workspace, other):
                raise SpaceMisplaced(f"{workspace} overlaps {other}, the workspace of the Space {record.name!r}")
    _check_around(workspace, but=folder.directory)
    for path, folders, _ in itertools.islice(os.walk(workspace), _WALK):
        if HOME in folders and any(record.live for record in _records(path)):
            raise SpaceMisplaced(f"{workspace} has Spaces in it, kept in {path}; delete them or take another workspace")


def _check_around(path: str, but: str = "") -> None:
    """Refuse a place inside the workspace of another Space."""
    here = path
    while os.path.dirname(here) != here:
        kept = beside(here)
        for record in _records(kept) if kept != but else ():
            if record.live and record.workspace is not None and _overlap(path, decode_path(record.workspace)):
                raise SpaceMisplaced(
                    f"{path} is in {here}, the workspace of the Space {record.name!r}; keep it elsewhere, or delete "
                    f"that Space, whose files stay: perdure space rm {here}"
                )
        here = os.path.dirname(here)


def _overlap(one: str, other: str) -> bool:
    return one == other or one.startswith(other.rstrip("/") + "/") or other.startswith(one.rstrip("/") + "/")


def _records(directory: str) -> Iterator[Record]:
    try:
        found = sorted(os.listdir(f"{directory}/{HOME}"))
    except OSError:
        return
    for name in found:
        if name.endswith(".json") and (record := _read(f"{directory}/{HOME}/{name}", Record)) is not None:
            yield record


# --- files ----------------------------------------------------------------------------------------------------


def _read(path: str, type: type[T]) -> T | None:
    """None: there is no such file. Raises SpaceUnavailable if it is damaged or of a later version."""
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(_MAX_RECORD), type=type)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except msgspec.MsgspecError as error:
        raise SpaceUnavailable(f"{path} cannot be read ({error}); put it back as it was, or move it away") from error


def _write(path: str, data: bytes) -> None:
    """Replace a private file, atomically and synced."""
    temporary = f"{path}.{secrets.token_hex(8)}.new"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_directory(os.path.dirname(path))


def _remove_tree(path: str) -> None:
    """A directory with all in it, however deep that is and however it is closed to its owner: what is below a directory
    of it is moved up first, so that nothing is deeper than two."""
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        moved = itertools.count()
        prefix = f".{secrets.token_hex(8)}-"
        while directories := _unlink_files(top):
            for name in directories:
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
                try:
                    for below in _unlink_files(inner):
                        os.rename(below, f"{prefix}{next(moved)}", src_dir_fd=inner, dst_dir_fd=top)
                finally:
                    os.close(inner)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(path)


def _unlink_files(directory: int) -> list[str]:
    """The directories that are left in it, open to their owner."""
    left: list[str] = []
    with os.scandir(directory) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_directory in found:
        if is_directory:
            os.chmod(name, 0o700, dir_fd=directory)
            left.append(name)
        else:
            os.unlink(name, dir_fd=directory)
    return left


def _make_directory(path: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)


def _sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)
