"""Approval of calls: when one is asked for, what is asked, and what is decided (rules H84, H110 to H114, H300 to H305).

A call that needs approval waits for a signal. The question and the decision each name the digest of the tool and its
exact arguments; the intent is committed only if they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Final, Literal, TypeAlias

import msgspec

from perdure.kernel.errors import PerdureError
from perdure.kernel.json import INT_MAX, JsonValue, check_json, digest

APPROVAL: Final = "approval"
"""The phase in which a call waits for a decision, and the signal that is one."""
DAY_MS: Final = 86_400_000
MOST_WORDS: Final = 2_000
"""Characters of a reason, a note or a name of who decided."""


class ApprovalQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """The call that a tool's ``requires_approval`` is asked about."""

    id: int
    """Of its task."""
    conversation_id: int
    tool: str
    arguments: Mapping[str, JsonValue]
    """As JSON, after before_tool."""
    values: Mapping[str, object]
    """The same, as the tool's function gets them."""


RequiresApproval: TypeAlias = bool | Callable[[ApprovalQuestion], bool]
"""Whether calls of a tool need approval, or what says so of each."""


class Approvals(msgspec.Struct, frozen=True, kw_only=True):
    """What a host wants to be asked about, beside the tools that ask for it themselves (rule H300).

    Raises TypeError, ValueError.
    """

    tools: tuple[str, ...] = ()
    """Names of tools, or patterns of them such as ``mcp_*``."""
    expire_after_ms: int = DAY_MS
    """How long a call waits for a decision, and how long that decision may be used."""

    def __post_init__(self) -> None:
        if type(self.tools) is not tuple or not all(type(name) is str and name for name in self.tools):
            raise TypeError(f"Approvals.tools is a tuple of names or patterns, not {self.tools!r}")
        if type(self.expire_after_ms) is not int or not 0 < self.expire_after_ms <= INT_MAX // 2:
            raise ValueError(f"expire_after_ms is a positive number of milliseconds, not {self.expire_after_ms!r}")

    def names(self, tool: str) -> bool:
        """Whether the host wants to be asked about this tool."""
        return any(fnmatchcase(tool, pattern) for pattern in self.tools)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint of a call that waits for a decision."""

    arguments: msgspec.Raw
    digest: str
    """Of these arguments, see ``call_digest``."""
    asked_at: int
    expires_at: int


class Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The signal: what was decided, about which question. The first one stands."""

    allow: bool
    digest: str
    """Of the question."""
    expires_at: int
    """Of the question."""
    at: int
    reason: str = ""
    by: str | None = None
    arguments: dict[str, JsonValue] | None = None
    """Those that are allowed in place of the ones that were asked about."""
    edited: str | None = None
    """The digest of those."""


class Permission(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """By what a call was allowed: a part of its intent, whose commit consumes it."""

    digest: str
    """Of the arguments that are executed."""
    expires_at: int | None = None
    """Of the decision; None: a rule allows it."""
    rule: int | None = None
    by: str | None = None
    edited: bool = False
    """A person changed the arguments."""


RefusedReason: TypeAlias = Literal["ended", "expired", "not_asked", "other_arguments", "tool_unavailable"]
"""The call has ended, or is being aborted; its question has expired; nothing is asked about it; the decision is about
other arguments; the tool that would check edited ones is not there."""


class ApprovalRefused(PerdureError):
    """A decision that cannot be taken, see ``reason``. Nothing was changed."""

    def __init__(self, reason: RefusedReason, message: str) -> None:
        super().__init__(f"{message} ({reason})")
        self.reason: RefusedReason = reason


def call_digest(tool: str, arguments: JsonValue) -> str:
    """What a decision is bound to: SHA-256 of the canonical JSON of a tool's name and its exact arguments."""
    return digest({"tool": tool, "arguments": arguments})


def check_words(text: str | None, what: str) -> None:
    """Raises TypeError, ValueError, NotJson."""
    if text is None:
        return
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # of untyped callers
        raise TypeError(f"{what} is a text, not {text!r}")
    check_json(text, at=what)
    if len(text) > MOST_WORDS:
        raise ValueError(f"{what} has {len(text)} characters; at most {MOST_WORDS} are kept")
