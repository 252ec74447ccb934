"""What the log keeps of a Space: how far it is, and the image of its workspace (rules S135, S136)."""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias, TypedDict

import msgspec

from perdure.kernel.document import Document, field

Mode: TypeAlias = Literal["transactional"]
RecoveryKind: TypeAlias = Literal["adopted", "reattached", "not_started", "rerun", "interrupted", "restored"]
"""How a call that was cut off went on. ``restored``: the workspace was brought back to its image, because the Space was
new or stood at another one, or (with its call) because a call left what no image can hold."""

KEPT_RECOVERIES: Final = 50
"""The newest ones are shown; each is also with the result of its call."""


class OpenIntent(msgspec.Struct, frozen=True, kw_only=True):
    """The call that has the Space: from its intent to its outcome."""

    call: int
    number: int
    """The call's number in this Space, which rises in the order of intents: the daemon knows calls by it."""
    attempt: int
    nonce: str
    """Of this attempt; part of the keys of its commands."""
    generation: int
    boot: str
    image: int
    """The image the attempt began at; ``image_nonce`` is its."""
    image_nonce: str = ""


class RecoveryNote(TypedDict):
    kind: RecoveryKind
    call: int | None
    attempt: int
    at: int
    """Milliseconds UTC."""
    why: str


KEPT_BACKGROUND: Final = 32


class BackgroundNote(TypedDict):
    """A command in the background: its key, and what is told of it (perdure.spaces.background)."""

    id: str
    number: int
    """Of its call in this Space."""
    attempt: int
    nonce: str
    ordinal: int
    command: str
    at: int
    """Milliseconds UTC."""


class SpaceState(Document, kind="pi.space", scope="session", family=True, builtin=True):
    """Keyed by the Space's name."""

    mode: Mode = "transactional"
    generation: int = 0
    """That a driver of this log was last connected to."""
    boot: str = ""
    directory: str = ""
    """Of the user's, that it last worked in, with escapes (image.escape); empty: one of its own."""
    calls: int = 0
    """How many calls have had it; after a store was brought back from a copy more, since their numbers only rise."""
    connected: int = 0
    """How often drivers took the Space; raised by a commit of its own before each time."""
    image: int = 0
    """Number of the image the log implies; 0: there is none yet. It rises with each that differs, and where the Space
    stood at one of a later life of this log (rule S148)."""
    image_nonce: str = ""
    """New with each image: copies of this log may each have made one of that number. Images of old have none."""
    open: OpenIntent | None = None
    external: int = 0
    """How many images came from outside of calls."""
    recoveries: list[RecoveryNote] = field(default_factory=list[RecoveryNote])
    """The newest last."""
    background: list[BackgroundNote] = field(default_factory=list[BackgroundNote])
    """The newest last: those that may run, and those whose output may still be read. In the commit of the result of
    the call that started them."""


class SpaceImage(Document, kind="pi.space-image", scope="session", family=True, builtin=True):
    """The image itself (image.Tree), keyed by the Space's name. Read ``shared_json()``: a field is copied."""

    # Any: entries are checked as they are encoded (image.encode); a tree has tens of thousands of them.
    dirs: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
