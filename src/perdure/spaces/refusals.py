"""An error code of the protocol as the exception it is."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from perdure.harness.environment import FileChanged, FileError, FileMissing, NotAFile, PathEscapes
from perdure.kernel.errors import StaleEpochError
from perdure.spaces import wire
from perdure.spaces.connection import ErrorAnswer
from perdure.spaces.errors import (
    ContentChanged,
    ContentMissing,
    KeyBelowFloor,
    KeyConflict,
    KeyVoid,
    NoImage,
    Restoring,
    ScanForgotten,
    SpaceBusy,
    SpaceConnectionLost,
    SpaceFault,
    SpaceFull,
    SpaceProcessesRemain,
    SpaceRefused,
    SpaceRequestInvalid,
    SpaceTooLarge,
)
from perdure.tools.workspace import IS_DIRECTORY, IS_SPECIAL, NO_DIRECTORY, NOT_EMPTY

LOST_CODES = frozenset({"stale_epoch", "stale_connection", "stale_boot", "workspace_gone"})
"""Codes after which this client has the Space no longer."""
FILE_OPS = frozenset({"read", "stat", "list", "walk", "glob", "grep", "write", "remove"})

_REFUSALS: dict[str, type[SpaceRefused]] = {
    "bad_request": SpaceRequestInvalid,
    "unauthorized": SpaceRequestInvalid,
    "internal": SpaceFault,
    "too_large": SpaceTooLarge,
    "busy": SpaceBusy,
    "no_space": SpaceFull,
    "void": KeyVoid,
    "below_floor": KeyBelowFloor,
    "conflict": KeyConflict,
    "no_image": NoImage,
    "restoring": Restoring,
    "unknown_scan": ScanForgotten,
}
_FILE_ERRORS: dict[str, Callable[[str, str], FileError]] = {
    "outside_workspace": lambda path, _: PathEscapes(path, "leads out of the workspace; use a path inside it"),
    "not_found": lambda path, _: FileMissing(path, "does not exist"),
    "special_file": lambda path, _: NotAFile(path, IS_SPECIAL),
    "is_a_directory": lambda path, _: NotAFile(path, IS_DIRECTORY),
    "not_a_directory": lambda path, _: FileError(path, NO_DIRECTORY),
    "not_empty": lambda path, _: FileError(path, NOT_EMPTY),
    "permission_denied": lambda path, message: FileError(path, message.lower()),
    "changed": lambda path, _: FileChanged(path, "was changed meanwhile; read it again"),
    "too_large": lambda path, message: FileError(path, f"is over a bound of the Space: {message}"),
    "io_error": lambda path, message: FileError(path, message.lower()),
}


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Whose request it was."""

    log: str
    epoch: int
    writer: str


def exception(op: str, error: ErrorAnswer, claim: Claim | None, path: str | None = None) -> Exception:
    """What to raise for an error answer (rule S103). ``path``: of a file request, as its caller named it."""
    if error.code in LOST_CODES:
        return _stale(op, error, claim)
    if op in FILE_OPS and error.code in _FILE_ERRORS:
        return _FILE_ERRORS[error.code](error.path or "." if path is None else path, error.message)
    if error.code == "processes_remain":
        return SpaceProcessesRemain(op, error.message, error.pids)
    if error.code == "changed":
        return ContentChanged(op, error.message, error.path)
    if error.code == "missing":
        return ContentMissing(op, error.message, error.digests)
    return _REFUSALS.get(error.code, SpaceRefused)(op, error.code, error.message)


def _stale(op: str, error: ErrorAnswer, claim: Claim | None) -> Exception:
    """Superseded by a newer driver, or only out of step with the daemon: by the fence it names."""
    if error.code == "workspace_gone":
        return SpaceConnectionLost("workspace_gone", error.message)
    if error.code == "stale_boot":
        return SpaceConnectionLost("stale_boot", "the machine of the Space was restarted")
    fence = error.fence
    if error.code == "stale_connection":
        return SpaceConnectionLost("stale_connection", f"{op} came over a connection that is not the Space's any more")
    if fence is None or claim is None or fence.epoch < claim.epoch:
        return SpaceConnectionLost("forgotten", "the Space knows no fence, or an older one than this driver's")
    if (fence.log, fence.epoch, fence.writer) == (claim.log, claim.epoch, claim.writer):
        return SpaceConnectionLost("stale_connection", f"{op} was overtaken by a later advance of the same driver")
    return StaleEpochError(
        mine=claim.epoch, my_writer=claim.writer, stored=fence.epoch, stored_writer=_writer(fence, claim)
    )


def _writer(fence: wire.Fence, claim: Claim) -> str:
    return fence.writer if fence.log == claim.log else f"{fence.writer} of another log, {fence.log}"
