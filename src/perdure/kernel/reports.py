"""What the session tells its host beside results and errors: each report says what it is about (rules K135 and
K136)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import msgspec

_log = logging.getLogger("perdure")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Ids, kinds and a sentence; never prompts, arguments, output or document contents."""

    type: str
    """What happened, such as ``task_blocked``: one of a fixed set of words."""
    message: str
    """The sentence."""
    task: int | None = None
    """The id of the task it is about."""
    kind: str | None = None
    """That task's, or a document's, kind."""
    conversation: int | None = None
    extension: str | None = None
    """The name of the extension it is about."""
    error: BaseException | None = None
    """What was raised. Its words may hold contents: only its type goes to the log."""

    def __str__(self) -> str:
        """A line, as it goes to the log: of an error its type alone."""
        parts = {"task": self.task, "kind": self.kind, "conversation": self.conversation, "extension": self.extension}
        error = {"error": None if self.error is None else type(self.error).__name__}
        about = [f"{name}={value}" for name, value in {**parts, **error}.items() if value is not None]
        return " ".join([f"{self.type}: {self.message}", *about])


OnReport: TypeAlias = Callable[[Report], None]


def log_line(log: logging.Logger, message: str, *about: object, level: int = logging.INFO) -> None:
    """Log a line. A filter of the host's that raises harms nobody."""
    with suppress(Exception):
        log.log(level, message, *about, stacklevel=2)


def deliver(report: Report, on_report: OnReport | None) -> None:
    """Log the report and hand it to the host; a host callback that raises harms nobody."""
    log_line(_log, "%s", report, level=logging.WARNING)
    if on_report is not None:
        try:
            on_report(report)
        except Exception as error:  # the host's own code; it must not break the session
            log_line(_log, "on_report raised %s", type(error).__name__, level=logging.WARNING)
