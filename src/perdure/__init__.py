"""perdure: durable agents for Python.

What is named here is the public face, together with ``perdure.events``, ``perdure.models``, ``perdure.spaces`` and
``perdure.testing``. Names are loaded when they are first used, so that importing the package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from perdure.harness.approval import ApprovalQuestion as ApprovalQuestion
    from perdure.harness.approval import ApprovalRefused as ApprovalRefused
    from perdure.harness.approval import Approvals as Approvals
    from perdure.harness.approval_rules import ApprovalRule as ApprovalRule
    from perdure.harness.approval_rules import ArgumentBelow as ArgumentBelow
    from perdure.harness.approval_rules import ArgumentIs as ArgumentIs
    from perdure.harness.approval_rules import ArgumentMatches as ArgumentMatches
    from perdure.harness.approvals import Approval as Approval
    from perdure.harness.arguments import InvalidArguments as InvalidArguments
    from perdure.harness.arguments import ToolDefinitionError as ToolDefinitionError
    from perdure.harness.compaction_policy import Compaction as Compaction
    from perdure.harness.control import Handoff as Handoff
    from perdure.harness.conversation import Conversation as Conversation
    from perdure.harness.documents import Agent as Agent
    from perdure.harness.environment import CommandNotStarted as CommandNotStarted
    from perdure.harness.environment import EnvironmentUnusable as EnvironmentUnusable
    from perdure.harness.environment import ExecResult as ExecResult
    from perdure.harness.environment import ExecutionEnvironment as ExecutionEnvironment
    from perdure.harness.environment import FileError as FileError
    from perdure.harness.environment import NoSuchCommand as NoSuchCommand
    from perdure.harness.environment import PathEscapes as PathEscapes
    from perdure.harness.environment import ProcessesRemain as ProcessesRemain
    from perdure.harness.handle import CallConflict as CallConflict
    from perdure.harness.handle import CallRefused as CallRefused
    from perdure.harness.handle import ToolCall as ToolCall
    from perdure.harness.harness import Harness as Harness
    from perdure.harness.hooks import Block as Block
    from perdure.harness.hooks import Decline as Decline
    from perdure.harness.hooks import EndedCall as EndedCall
    from perdure.harness.hooks import HookAnswer as HookAnswer
    from perdure.harness.hooks import HookCall as HookCall
    from perdure.harness.hooks import HookCompaction as HookCompaction
    from perdure.harness.hooks import HookRequest as HookRequest
    from perdure.harness.hooks import HookResponse as HookResponse
    from perdure.harness.hooks import HookRound as HookRound
    from perdure.harness.hooks import RequestChange as RequestChange
    from perdure.harness.hooks import Stop as Stop
    from perdure.harness.hooks import Summary as Summary
    from perdure.harness.hooks import after_response as after_response
    from perdure.harness.hooks import after_tool as after_tool
    from perdure.harness.hooks import after_tools as after_tools
    from perdure.harness.hooks import before_compact as before_compact
    from perdure.harness.hooks import before_request as before_request
    from perdure.harness.hooks import before_tool as before_tool
    from perdure.harness.hooks import gate_request as gate_request
    from perdure.harness.hooks import on_yield as on_yield
    from perdure.harness.inbox import ConversationBusy as ConversationBusy
    from perdure.harness.inbox import InboxFull as InboxFull
    from perdure.harness.limits import AS_HOST as AS_HOST
    from perdure.harness.limits import Limits as Limits
    from perdure.harness.messages import AssistantMessage as AssistantMessage
    from perdure.harness.messages import Image as Image
    from perdure.harness.messages import SystemMessage as SystemMessage
    from perdure.harness.messages import Text as Text
    from perdure.harness.messages import Thinking as Thinking
    from perdure.harness.messages import ToolCallPart as ToolCallPart
    from perdure.harness.messages import ToolResultMessage as ToolResultMessage
    from perdure.harness.messages import Usage as Usage
    from perdure.harness.messages import UserMessage as UserMessage
    from perdure.harness.model import ModelError as ModelError
    from perdure.harness.model import ModelRequest as ModelRequest
    from perdure.harness.model import Models as Models
    from perdure.harness.model import NoAdapter as NoAdapter
    from perdure.harness.output import OutputLimits as OutputLimits
    from perdure.harness.parse import CannotParse as CannotParse
    from perdure.harness.persistent import PersistentSubagent as PersistentSubagent
    from perdure.harness.person import AnswerRefused as AnswerRefused
    from perdure.harness.person import PersonQuestion as PersonQuestion
    from perdure.harness.person import QuestionExpired as QuestionExpired
    from perdure.harness.reconcile import Done as Done
    from perdure.harness.reconcile import NeverHappened as NeverHappened
    from perdure.harness.reconcile import Unknown as Unknown
    from perdure.harness.registry import Extension as Extension
    from perdure.harness.registry import ExtensionConflict as ExtensionConflict
    from perdure.harness.registry import PromptSection as PromptSection
    from perdure.harness.retention import Retention as Retention
    from perdure.harness.retention import RetentionReport as RetentionReport
    from perdure.harness.settings import PollPolicy as PollPolicy
    from perdure.harness.settings import RetryPolicy as RetryPolicy
    from perdure.harness.submission import Answer as Answer
    from perdure.harness.submission import Submission as Submission
    from perdure.harness.submission import Unanswered as Unanswered
    from perdure.harness.tool import ToolError as ToolError
    from perdure.harness.tool import ToolResult as ToolResult
    from perdure.harness.tool import tool as tool
    from perdure.kernel.context import BACKGROUND as BACKGROUND
    from perdure.kernel.context import Context as Context
    from perdure.kernel.document import Document as Document
    from perdure.kernel.document import field as field
    from perdure.kernel.entries import Entry as Entry
    from perdure.kernel.errors import ContextCancelled as ContextCancelled
    from perdure.kernel.errors import ContextDeadline as ContextDeadline
    from perdure.kernel.errors import ConversationOpen as ConversationOpen
    from perdure.kernel.errors import DocumentFieldError as DocumentFieldError
    from perdure.kernel.errors import DocumentVersionError as DocumentVersionError
    from perdure.kernel.errors import InvalidTransition as InvalidTransition
    from perdure.kernel.errors import NotFound as NotFound
    from perdure.kernel.errors import NotJson as NotJson
    from perdure.kernel.errors import PerdureError as PerdureError
    from perdure.kernel.errors import RequestConflict as RequestConflict
    from perdure.kernel.errors import SessionClosed as SessionClosed
    from perdure.kernel.errors import SessionFailed as SessionFailed
    from perdure.kernel.errors import StaleEpochError as StaleEpochError
    from perdure.kernel.errors import StorageBusy as StorageBusy
    from perdure.kernel.errors import StorageCorrupt as StorageCorrupt
    from perdure.kernel.errors import StorageError as StorageError
    from perdure.kernel.errors import StorageFormatError as StorageFormatError
    from perdure.kernel.errors import TooLarge as TooLarge
    from perdure.kernel.json import JsonValue as JsonValue
    from perdure.kernel.observation import Frame as Frame
    from perdure.kernel.observation import WatchEnded as WatchEnded
    from perdure.kernel.records import Aborted as Aborted
    from perdure.kernel.records import Completed as Completed
    from perdure.kernel.records import Failed as Failed
    from perdure.kernel.records import Faulted as Faulted
    from perdure.kernel.records import Orphaned as Orphaned
    from perdure.kernel.reports import Report as Report
    from perdure.kernel.session import Session as Session
    from perdure.storage.jsonl import JsonlStorage as JsonlStorage
    from perdure.storage.memory import MemoryStorage as MemoryStorage
    from perdure.storage.postgres import PostgresStorage as PostgresStorage
    from perdure.storage.sqlite import SqliteStorage as SqliteStorage
    from perdure.tasks.definition import Next as Next
    from perdure.tasks.definition import StoredTask as StoredTask
    from perdure.tasks.definition import Task as Task
    from perdure.tasks.errors import NotStopped as NotStopped
    from perdure.tasks.errors import TaskDefinitionError as TaskDefinitionError
    from perdure.tasks.errors import TaskEnded as TaskEnded
    from perdure.tasks.errors import WaitCycle as WaitCycle
    from perdure.tasks.errors import WorkBlocked as WorkBlocked
    from perdure.tasks.run import Run as Run
    from perdure.telemetry import OpenTelemetry as OpenTelemetry
    from perdure.tools.coding import coding_tools as coding_tools
    from perdure.tools.local import LocalEnvironment as LocalEnvironment
    from perdure.tools.mcp.server import McpServer as McpServer
    from perdure.tools.mcp.server import mcp_extension as mcp_extension
    from perdure.tools.mcp.settings import HttpServer as HttpServer
    from perdure.tools.mcp.settings import McpError as McpError
    from perdure.tools.mcp.settings import McpMissing as McpMissing
    from perdure.tools.mcp.settings import StdioServer as StdioServer
    from perdure.tools.people import ask_user as ask_user
    from perdure.tools.subagents import Subagent as Subagent
    from perdure.tools.subagents import persistent_subagents as persistent_subagents
    from perdure.tools.subagents import subagent as subagent

_HOME = {
    "perdure.harness.approval": (
        "ApprovalQuestion",
        "ApprovalRefused",
        "Approvals",
    ),
    "perdure.harness.approval_rules": (
        "ApprovalRule",
        "ArgumentBelow",
        "ArgumentIs",
        "ArgumentMatches",
    ),
    "perdure.harness.approvals": ("Approval",),
    "perdure.harness.arguments": (
        "InvalidArguments",
        "ToolDefinitionError",
    ),
    "perdure.harness.compaction_policy": ("Compaction",),
    "perdure.harness.control": ("Handoff",),
    "perdure.harness.conversation": ("Conversation",),
    "perdure.harness.documents": ("Agent",),
    "perdure.harness.environment": (
        "CommandNotStarted",
        "EnvironmentUnusable",
        "ExecResult",
        "ExecutionEnvironment",
        "FileError",
        "NoSuchCommand",
        "PathEscapes",
        "ProcessesRemain",
    ),
    "perdure.harness.handle": (
        "CallConflict",
        "CallRefused",
        "ToolCall",
    ),
    "perdure.harness.harness": ("Harness",),
    "perdure.harness.hooks": (
        "Block",
        "Decline",
        "EndedCall",
        "HookAnswer",
        "HookCall",
        "HookCompaction",
        "HookRequest",
        "HookResponse",
        "HookRound",
        "RequestChange",
        "Stop",
        "Summary",
        "after_response",
        "after_tool",
        "after_tools",
        "before_compact",
        "before_request",
        "before_tool",
        "gate_request",
        "on_yield",
    ),
    "perdure.harness.inbox": (
        "ConversationBusy",
        "InboxFull",
    ),
    "perdure.harness.limits": (
        "AS_HOST",
        "Limits",
    ),
    "perdure.harness.messages": (
        "AssistantMessage",
        "Image",
        "SystemMessage",
        "Text",
        "Thinking",
        "ToolCallPart",
        "ToolResultMessage",
        "Usage",
        "UserMessage",
    ),
    "perdure.harness.model": (
        "ModelError",
        "ModelRequest",
        "Models",
        "NoAdapter",
    ),
    "perdure.harness.output": ("OutputLimits",),
    "perdure.harness.parse": ("CannotParse",),
    "perdure.harness.persistent": ("PersistentSubagent",),
    "perdure.harness.person": (
        "AnswerRefused",
        "PersonQuestion",
        "QuestionExpired",
    ),
    "perdure.harness.reconcile": (
        "Done",
        "NeverHappened",
        "Unknown",
    ),
    "perdure.harness.registry": (
        "Extension",
        "ExtensionConflict",
        "PromptSection",
    ),
    "perdure.harness.retention": (
        "Retention",
        "RetentionReport",
    ),
    "perdure.harness.settings": ("PollPolicy", "RetryPolicy"),
    "perdure.harness.submission": (
        "Answer",
        "Submission",
        "Unanswered",
    ),
    "perdure.harness.tool": (
        "ToolError",
        "ToolResult",
        "tool",
    ),
    "perdure.kernel.context": (
        "BACKGROUND",
        "Context",
    ),
    "perdure.kernel.document": (
        "Document",
        "field",
    ),
    "perdure.kernel.entries": ("Entry",),
    "perdure.kernel.errors": (
        "ContextCancelled",
        "ContextDeadline",
        "ConversationOpen",
        "DocumentFieldError",
        "DocumentVersionError",
        "InvalidTransition",
        "NotFound",
        "NotJson",
        "PerdureError",
        "RequestConflict",
        "SessionClosed",
        "SessionFailed",
        "StaleEpochError",
        "StorageBusy",
        "StorageCorrupt",
        "StorageError",
        "StorageFormatError",
        "TooLarge",
    ),
    "perdure.kernel.json": ("JsonValue",),
    "perdure.kernel.observation": (
        "Frame",
        "WatchEnded",
    ),
    "perdure.kernel.records": (
        "Aborted",
        "Completed",
        "Failed",
        "Faulted",
        "Orphaned",
    ),
    "perdure.kernel.reports": ("Report",),
    "perdure.kernel.session": ("Session",),
    "perdure.storage.jsonl": ("JsonlStorage",),
    "perdure.storage.memory": ("MemoryStorage",),
    "perdure.storage.postgres": ("PostgresStorage",),
    "perdure.storage.sqlite": ("SqliteStorage",),
    "perdure.tasks.definition": (
        "Next",
        "StoredTask",
        "Task",
    ),
    "perdure.tasks.errors": (
        "NotStopped",
        "TaskDefinitionError",
        "TaskEnded",
        "WaitCycle",
        "WorkBlocked",
    ),
    "perdure.tasks.run": ("Run",),
    "perdure.telemetry": ("OpenTelemetry",),
    "perdure.tools.coding": ("coding_tools",),
    "perdure.tools.local": ("LocalEnvironment",),
    "perdure.tools.mcp.server": (
        "McpServer",
        "mcp_extension",
    ),
    "perdure.tools.mcp.settings": (
        "HttpServer",
        "McpError",
        "McpMissing",
        "StdioServer",
    ),
    "perdure.tools.people": ("ask_user",),
    "perdure.tools.subagents": (
        "Subagent",
        "persistent_subagents",
        "subagent",
    ),
}
"""Module -> the public names that live there."""

_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

_PACKAGE_OF = {"PostgresStorage": "psycopg"}
"""Name -> the package that it cannot be loaded without: where that is missing, ``import *`` leaves the name out."""

__all__ = ["__version__", *sorted(_MODULE_OF)]  # pyright: ignore[reportUnsupportedDunderAll]  # one table, tested
for _name, _package in _PACKAGE_OF.items():
    if PathFinder.find_spec(_package) is None:
        __all__.remove(_name)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
