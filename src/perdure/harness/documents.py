"""The built-in documents and entries, their shapes, and the inputs of the built-in tasks (rules H3 to H12).

They change only through commits of the built-in tasks and of a Conversation's own calls.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypeAlias, TypedDict

import msgspec

from perdure.harness.messages import UserPart
from perdure.harness.model import ThinkingLevel
from perdure.kernel.document import Document, field
from perdure.kernel.json import JsonValue
from perdure.kernel.records import EMPTY_OBJECT, NULL

# --- documents ----------------------------------------------------------------------------------------------


class CompactionSettings(TypedDict, total=False):
    """What a conversation says of its own compaction, in place of the host's policy; absent: as the host says."""

    enabled: bool
    reserve_tokens: int
    keep_recent_tokens: int
    background_tokens: int


class LimitSettings(TypedDict, total=False):
    """A conversation's own limits, in place of the host's for each conversation; absent: as the host says; None:
    none."""

    cost_nano_usd: int | None
    """Billionths of a US dollar."""
    tokens: int | None
    """Of every kind together."""
    turns: int | None
    tool_calls: int | None
    run_ms: int | None
    """Time in runs."""


class Agent(
    Document, kind="pi.agent", version=1, scope="conversation", history="rewindable", fork="as_of", builtin=True
):
    """A conversation's agent settings."""

    model: str | None = None
    """``provider:name``; None: the host's default."""
    thinking: ThinkingLevel = "off"
    """How long its model may think before it answers."""
    extensions: list[str] | None = None
    """Selected by name; None: all that are installed. Names that are missing are skipped until installed."""
    tools: list[str] | None = None
    """Selected by name; None: all of the selected extensions'."""
    added_tools: list[str] = field(default_factory=list)
    """What results added to those, by name."""
    instructions: str = ""
    """What its model is told, behind what the host tells every one."""
    cwd: str | None = None
    """The directory it works in, for whoever makes its environment."""
    compaction: CompactionSettings = field(default_factory=CompactionSettings)
    """What of ``Compaction`` is different here."""
    limits: LimitSettings = field(default_factory=LimitSettings)
    """Set by ``conversation.set_limits``; where nothing is set the host's count."""


class Meta(Document, kind="pi.meta", version=1, scope="conversation", fork="initial", builtin=True):
    """A conversation's name and labels."""

    name: str | None = None
    labels: dict[str, str] = field(default_factory=dict)


class ProviderKey(Document, kind="pi.provider", version=1, scope="conversation", fork="initial", builtin=True):
    """What providers route their caches by; a new one per conversation."""

    id: str = ""


class LiveControl(TypedDict):
    """A result that asks for the end of its run."""

    task: int
    """Of the call."""
    handoff: str | None
    """What the context begins with then; None: it goes on as it is."""


class LiveRun(TypedDict):
    task: int
    """The generation task."""
    inputs: list[int]
    """Submissions this run answers, in the order they were placed."""
    started_at: int
    turn: int
    """Model responses so far."""
    compacted: NotRequired[bool]
    """It has waited for a compaction."""
    compaction_failed: NotRequired[Literal["background", "waited"]]
    """Of those that runs begin by themselves, one failed in it, or even one that it waited for: none of its kind is
    begun again until one was placed. Absent: none has failed."""
    control: NotRequired[list[LiveControl]]
    """What results of the open round ask of the run; absent: nothing."""
    continued: NotRequired[int]
    """How often hooks have continued it after an answer; absent: never."""


class LivePart(TypedDict):
    type: Literal["text", "thinking", "tool_call"]
    text: str
    """The text so far; for a tool call its arguments."""
    id: str
    name: str


class LiveMessage(TypedDict):
    """The partial answer of a request on its way."""

    task: int
    model: str
    """``provider:name``."""
    attempt: int
    content: list[LivePart]


class LiveDecision(TypedDict):
    """What was decided about a call that waits for approval."""

    allow: bool
    reason: str
    by: str | None
    edited: bool
    """The arguments were changed."""


class LiveApproval(TypedDict):
    """What is asked about a call."""

    arguments: JsonValue
    """The exact ones, after before_tool."""
    digest: str
    asked_at: int
    expires_at: int
    decision: LiveDecision | None
    """None: it is still asked."""


class LiveQuestion(TypedDict):
    """What a call asks a person."""

    text: str
    expires_at: int


class LiveTool(TypedDict):
    """A tool call on its way, by task id."""

    call_id: str
    name: str
    state: Literal["waiting", "approval", "running"]
    """It waits for another call; for a decision, or for the intent after one; its intent is committed."""
    approval: NotRequired[LiveApproval]
    """In the state approval."""
    output: str
    dropped_lines: int
    dropped_bytes: int
    details: JsonValue
    diagnostics: list[str]
    caller: NotRequired[int]
    """The call that made this one; absent: the model did."""
    questions: NotRequired[dict[str, LiveQuestion]]
    """What it asks a person and waits for, by task id."""


class LiveRetry(TypedDict):
    attempt: int
    until: int
    code: str
    message: str


class LiveDeferred(TypedDict):
    """A response that its provider makes in the background."""

    task: int
    """The generation task."""
    model: str
    """``provider:name``."""
    attempt: int
    handle: str
    """What the provider knows it by."""
    sent: int
    """When it was asked for, in milliseconds UTC."""
    polls: int
    """How often it was polled."""
    until: int
    """When it is polled next, in milliseconds UTC."""
    code: str | None
    """Why the newest poll failed; None: it did not."""


CompactionReason: TypeAlias = Literal["manual", "background", "threshold", "overflow"]
"""Somebody asked for it; the context comes near the point where a run waits; it is beyond that point; the provider
said that it is too long."""


class LiveCompaction(TypedDict):
    """A compaction on its way, by task id."""

    reason: CompactionReason
    started_at: int
    attempt: int
    until: int | None
    """When the summary is asked for again, after a failure that passes; None: it is being made."""
    code: str | None
    """Of the failure it waits after."""
    message: str | None


class CompactionFailure(TypedDict):
    """The newest compaction that failed; None once another was placed."""

    task: int
    reason: CompactionReason
    at: int
    code: str
    message: str
    run: int | None
    """The generation task of the run it failed in; None: there was none."""


class Live(Document, kind="pi.live", version=1, scope="conversation", fork="initial", builtin=True):
    """What goes on right now. The conversation is busy exactly while ``run`` is set."""

    run: LiveRun | None = None
    message: LiveMessage | None = None
    tools: dict[str, LiveTool] = field(default_factory=dict)
    retry: LiveRetry | None = None
    deferred: LiveDeferred | None = None
    compactions: dict[str, LiveCompaction] = field(default_factory=dict)
    compaction_failure: CompactionFailure | None = None


InboxMode: TypeAlias = Literal["steer", "follow_up", "write"]


class InboxEntry(TypedDict):
    """The entry a queued submission will become; messages and data as JSON."""

    kind: str
    messages: list[JsonValue]
    data: JsonValue
    head: int | Literal["self"] | None
    edits: list[JsonValue]


class InboxItem(TypedDict):
    id: int
    """The submission."""
    mode: InboxMode
    entry: InboxEntry


class Inbox(Document, kind="pi.inbox", version=1, scope="conversation", fork="initial", builtin=True):
    """Queued submissions, in id order."""

    items: list[InboxItem] = field(default_factory=list)


class ModelTotals(TypedDict):
    requests: int
    input: int
    output: int
    cache_read: int
    cache_write: int
    reasoning: int
    cost_nano_usd: NotRequired[int]
    """Billionths of a US dollar, of the attempts whose price is known; absent, never 0, if that is none of them."""
    unpriced: NotRequired[int]
    """Attempts whose price is not known. Absent in what was stored before there were prices: all of them."""


class ToolTotals(TypedDict):
    calls: int
    usage: dict[str, float]


class UsageTotals(Document, kind="pi.usage", version=1, scope="conversation", fork="initial", builtin=True):
    """What a conversation has used, every attempt counted."""

    models: dict[str, ModelTotals] = field(default_factory=dict)
    """By ``provider:name``."""
    tools: dict[str, ToolTotals] = field(default_factory=dict)
    """By tool name, as its results report."""
    turns: int = 0
    """Responses of models."""
    run_ms: int = 0
    """Time in runs that have ended, from the commit that admitted the input to that of the last outcome."""


class DeletedUsage(Document, kind="pi.usage-deleted", version=1, scope="session", builtin=True):
    """What conversations that were deleted had used, all of them together."""

    models: dict[str, ModelTotals] = field(default_factory=dict)
    tools: dict[str, ToolTotals] = field(default_factory=dict)
    turns: int = 0
    run_ms: int = 0


# --- entries ------------------------------------------------------------------------------------------------

USER = "pi.user"
ASSISTANT = "pi.assistant"
SYSTEM = "pi.system"
TOOL_RESULT = "pi.tool-result"
RESET = "pi.reset"
COMPACTION = "pi.compaction"


# --- built-in tasks -----------------------------------------------------------------------------------------

GENERATION = "pi.generation"


class ToolInput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call: the input of a ``pi.tool`` task."""

    call_id: str
    name: str
    arguments: msgspec.Raw = EMPTY_OBJECT
    index: int = 0
    """Its place among the calls of its message."""
    after: int | None = None
    """A task that must be terminal before this call begins (a round with a sequential tool)."""
    caller: int | None = None
    """The call that made this one; None: the model did."""
    depth: int = 0
    """How many callers are above it."""


class AssistantData(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``data`` of a ``pi.assistant`` entry, beside its one message."""

    calls: tuple[int, ...] = ()
    """The task of each call, in the order of the message: what results are matched by."""
    attempt: int = 1


class SystemData(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``data`` of a ``pi.system`` entry: the prompt sections it shows, by name; None: no longer there."""

    sections: dict[str, str | None]
    baseline: bool = False
    """Every section of its time, in place of all that was shown before."""


class CompactionData(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``data`` of a ``pi.compaction`` entry, beside the one user message that holds the summary."""

    task: int
    reason: CompactionReason
    tokens_before: int
    """Of the context it replaced, as estimated."""
    model: str | None = None
    """``provider:name``; None: a hook gave the summary."""


class ToolResultData(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``data`` of a ``pi.tool-result`` entry, beside its one message; that of a nested call has none."""

    task: int
    call_id: str
    name: str
    is_error: bool = False
    code: str | None = None
    details: msgspec.Raw = NULL
    diagnostics: tuple[str, ...] = ()
    usage: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """What the tool says it used, by a name of its choice."""
    control: Literal["terminate", "handoff"] | None = None
    """What it asked of the run."""
    added_tools: tuple[str, ...] = ()
    dropped_lines: int = 0
    """Of the output, beyond the tool's limits."""
    dropped_bytes: int = 0
    caller: int | None = None
    """Of a nested call: the call that made it."""
    content: tuple[UserPart, ...] = ()
    """Of a nested call, whose caller reads it and no model does: what the message of another has."""


ToolErrorCode: TypeAlias = Literal[
    "tool_unavailable",
    "invalid_arguments",
    "blocked",
    "denied",
    "expired",
    "interrupted",
    "aborted",
    "tool_error",
    "timeout",
]
"""The conversation has no such tool; the arguments do not fit; a hook blocked it; a person or a rule denied it; nobody
decided, or answered, in time; it was cut off, and may have had its effect; it was aborted; the tool failed; it took
longer than its ``timeout_ms`` (rules H101, H102)."""
UnansweredReason: TypeAlias = Literal[
    "aborted",
    "stale",
    "reset",
    "run_failed",
    "model_error",
    "no_model",
    "limit",
    "gate",
    "faulted",
    "missing_task",
    "task_too_old",
    "migration_failed",
]
