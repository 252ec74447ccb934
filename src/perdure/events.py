"""What ``conversation.events()`` tells: a snapshot first, then typed events as commits settle."""

from __future__ import annotations

from perdure.harness.cursor import CursorError as CursorError
from perdure.harness.events import ApprovalDecided as ApprovalDecided
from perdure.harness.events import ApprovalRequested as ApprovalRequested
from perdure.harness.events import Blocked as Blocked
from perdure.harness.events import BlockedTask as BlockedTask
from perdure.harness.events import CompactionEnd as CompactionEnd
from perdure.harness.events import CompactionRetry as CompactionRetry
from perdure.harness.events import CompactionStart as CompactionStart
from perdure.harness.events import EntryAppended as EntryAppended
from perdure.harness.events import Event as Event
from perdure.harness.events import Events as Events
from perdure.harness.events import InboxChanged as InboxChanged
from perdure.harness.events import MessageDelta as MessageDelta
from perdure.harness.events import MessageEnd as MessageEnd
from perdure.harness.events import MessageStart as MessageStart
from perdure.harness.events import QuestionAsked as QuestionAsked
from perdure.harness.events import QuestionOver as QuestionOver
from perdure.harness.events import ResponseDeferred as ResponseDeferred
from perdure.harness.events import Resumed as Resumed
from perdure.harness.events import Retry as Retry
from perdure.harness.events import RunEnd as RunEnd
from perdure.harness.events import RunStart as RunStart
from perdure.harness.events import Snapshot as Snapshot
from perdure.harness.events import ToolEnd as ToolEnd
from perdure.harness.events import ToolStart as ToolStart
from perdure.harness.events import ToolUpdate as ToolUpdate
from perdure.harness.events import Turn as Turn
from perdure.harness.events import Unblocked as Unblocked
from perdure.harness.events import UsageChanged as UsageChanged
from perdure.harness.room import ViewFrame as ViewFrame
from perdure.harness.room import ViewWatch as ViewWatch

__all__ = [
    "ApprovalDecided",
    "ApprovalRequested",
    "Blocked",
    "BlockedTask",
    "CompactionEnd",
    "CompactionRetry",
    "CompactionStart",
    "CursorError",
    "EntryAppended",
    "Event",
    "Events",
    "InboxChanged",
    "MessageDelta",
    "MessageEnd",
    "MessageStart",
    "QuestionAsked",
    "QuestionOver",
    "Resumed",
    "ResponseDeferred",
    "Retry",
    "RunEnd",
    "RunStart",
    "Snapshot",
    "ToolEnd",
    "ToolStart",
    "ToolUpdate",
    "Turn",
    "Unblocked",
    "UsageChanged",
    "ViewFrame",
    "ViewWatch",
]
