"""Extensions and the one registry of them, changeable while the harness runs (rules H119 to H121).

A conversation selects by name, in ``pi.agent``. A name that is not installed is skipped until it is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import TypeAlias, cast

import msgspec

from perdure.harness.documents import Agent, ToolInput
from perdure.harness.finding import FIND_TOOLS, finder
from perdure.harness.hooks import H, Hook, Installed, check_hook
from perdure.harness.tool import AnyTool, Caller, ToolDefinition
from perdure.harness.wrappers import Wrapper
from perdure.kernel.errors import PerdureError
from perdure.kernel.records import ConversationRecord
from perdure.kernel.transaction import Transaction
from perdure.tasks.registry import AnyTask, TaskRegistry

MAX_SELECTIONS = 1000
"""Different selections that are remembered until the next change."""

Setup: TypeAlias = Callable[[Transaction, ConversationRecord], Awaitable[None]]
"""Stages what a new conversation shall have from the start, in the commit that creates it."""


class ExtensionConflict(PerdureError, ValueError):
    """An extension cannot be installed beside what is there; the message names both. Nothing was changed."""


class ConversationInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt section may depend on."""

    id: int
    agent: Agent
    tools: Sequence[AnyTool]
    """Those offered to the conversation."""


class PromptSection(msgspec.Struct, frozen=True):
    """A part of what the model is told first. Its text should change seldom: each change is told anew."""

    name: str
    text: str | Callable[[ConversationInfo], str]
    """Or a function of the conversation that it is for."""

    def render(self, info: ConversationInfo) -> str:
        """The text for one conversation."""
        return self.text if isinstance(self.text, str) else self.text(info)


@dataclass(frozen=True, slots=True)
class Extension:
    """What belongs together, under a name. Raises TypeError or ValueError for what cannot be."""

    name: str
    _: KW_ONLY
    tools: Sequence[AnyTool] = ()
    """What ``@tool`` has made."""
    sections: Sequence[PromptSection] = ()
    """Parts of what the model is told first."""
    hooks: Sequence[Hook] = ()
    """What ``@before_tool`` and its kin have made."""
    wrappers: Sequence[Wrapper] = ()
    """``async def around(call, run): return await run()``, around every call's function."""
    setup: Setup | None = None
    """Stages what a new conversation has from the start, in the commit that creates it."""
    tasks: Sequence[AnyTask | type[AnyTask]] = ()
    """Classes of tasks, or such objects where a class takes parameters."""
    on_install: Callable[[Registry], None] | None = None
    """Called with each registry that it has come into: what changes by itself is replaced there."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("an extension needs a name")
        # Their own: a hook that is put into the caller's list later would be asked from some other change on.
        for part in ("tools", "sections", "hooks", "wrappers", "tasks"):
            object.__setattr__(self, part, tuple(getattr(self, part)))
        for tool in self.tools:
            if not isinstance(tool, ToolDefinition):  # pyright: ignore[reportUnnecessaryIsInstance]  # of untyped callers
                raise TypeError(f"extension {self.name!r}: {tool!r} is no tool; decorate the function with @tool")
        for hook in self.hooks:
            check_hook(hook)
        for wrapper in self.wrappers:
            if not callable(wrapper):
                raise TypeError(f"extension {self.name!r}: {wrapper!r} is no wrapper, which is an async function")
        for what, names in _named(self):
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(f"extension {self.name!r} has two {what}s named {name!r}")


class _Selection(msgspec.Struct, frozen=True):
    """What one selection of names comes to, as installed now."""

    extensions: tuple[Extension, ...]
    tools: dict[str, AnyTool]
    """All that the conversation has, whoever may call them."""
    offered: tuple[AnyTool, ...]
    """To the model."""
    deferred: frozenset[str]
    """What the model has not found."""
    sections: tuple[PromptSection, ...]
    hooks: dict[type[Hook], tuple[Installed[Hook], ...]]
    """By kind."""
    wrappers: tuple[Wrapper, ...]


class Registry:
    """The extensions at hand. A change counts from the next request and the next call on."""

    def __init__(self, tasks: TaskRegistry | None = None) -> None:
        self._tasks = tasks if tasks is not None else TaskRegistry()
        self._extensions: dict[str, Extension] = {}
        self._host_hooks: tuple[Installed[Hook], ...] = ()
        self._hook_kinds: frozenset[type[Hook]] = frozenset()
        self._selections: dict[tuple[tuple[str, ...] | None, ...], _Selection] = {}
        self._described = False
        self._observers: list[Callable[[], None]] = []

    # --- changing it -------------------------------------------------------------------------------------------

    def install(self, *extensions: Extension) -> None:
        """Add extensions, all or none. Raises ExtensionConflict."""
        proposed = dict(self._extensions)
        for extension in extensions:
            _check_extension(extension)
            if extension.name in proposed:
                raise ExtensionConflict(
                    f"an extension named {extension.name!r} is installed; replace() puts another in its place"
                )
            proposed[extension.name] = extension
        self._apply(proposed, extensions)

    def replace(self, extension: Extension) -> None:
        """Put an extension in the place of the one of its name, or add it. Raises ExtensionConflict."""
        _check_extension(extension)
        self._apply({**self._extensions, extension.name: extension}, (extension,))

    def remove(self, name: str) -> None:
        """Take an extension out; nothing happens if there is none. Calls of its tools that run go on."""
        if name in self._extensions:
            self._apply({other: kept for other, kept in self._extensions.items() if other != name}, ())

    def add_hook(self, hook: Hook) -> Callable[[], None]:
        """A hook of the host's own, for every conversation in its scope whatever that selects; returns what
        removes it."""
        check_hook(hook)
        installed = Installed(None, hook)
        self._host_hooks = (*self._host_hooks, installed)
        self._select_anew()

        def remove() -> None:
            self._host_hooks = tuple(other for other in self._host_hooks if other is not installed)
            self._select_anew()

        return remove

    def on_change(self, observer: Callable[[], None]) -> None:
        """Call this after each change of the extensions."""
        self._observers.append(observer)

    def _apply(self, proposed: dict[str, Extension], new: Sequence[Extension]) -> None:
        owners: dict[tuple[str, str], str] = {("tool", FIND_TOOLS): "perdure"}
        for extension in proposed.values():
            for what, names in _named(extension):
                for name in names:
                    other = owners.setdefault((what, name), extension.name)
                    if other != extension.name:
                        raise ExtensionConflict(
                            f"extensions {other!r} and {extension.name!r} both have a {what} named {name!r}; rename one"
                        )
        self._tasks.install(*(task for extension in new for task in extension.tasks))
        for extension in self._extensions.values():
            for task in extension.tasks:
                if ("task", task.kind) not in owners:
                    self._tasks.remove(task.kind)
        self._extensions = proposed
        self._select_anew()
        for observer in self._observers:
            observer()
        for extension in new:
            if extension.on_install is not None:
                extension.on_install(self)

    def _select_anew(self) -> None:
        self._selections.clear()
        self._described = False
        hooks = [installed.hook for installed in self._host_hooks]
        for extension in self._extensions.values():
            hooks += extension.hooks
        self._hook_kinds = frozenset(type(hook) for hook in hooks)

    # --- what is there -----------------------------------------------------------------------------------------

    @property
    def extensions(self) -> tuple[Extension, ...]:
        return tuple(self._extensions.values())

    def describe(self) -> None:
        """Make the schemas of all tools now: before the first transaction that needs them, since that imports pydantic
        and would hold the mutation line meanwhile. One that cannot be made is told where it is offered."""
        if not self._described:
            self._described = True
            for extension in self._extensions.values():
                for tool in extension.tools:
                    with suppress(Exception):
                        _ = tool.spec

    def offered(self, agent: Agent) -> list[AnyTool]:
        """The tools that the model of a conversation with these settings is offered, in the order of installation."""
        return list(self._select(agent).offered)

    def find_tool(self, agent: Agent, name: str, *, by: Caller = "model") -> AnyTool | None:
        """The tool of that name, if the conversation has it, and that caller may call it (rules H83, H175)."""
        selection = self._select(agent)
        tool = selection.tools.get(name)
        if tool is None or by not in tool.callers or (by == "model" and name in selection.deferred):
            return None
        return tool

    def called(self, agent: Agent, input: ToolInput) -> AnyTool | None:
        """The tool that a call is of, as it is now."""
        return self.find_tool(agent, input.name, by="model" if input.caller is None else "tool")

    def has_tool(self, name: str) -> bool:
        """Whether any conversation may have such a tool."""
        tools = [tool for extension in self._extensions.values() for tool in extension.tools]
        return name == FIND_TOOLS or any(tool.name == name for tool in tools)

    def sections(self, agent: Agent) -> list[PromptSection]:
        return list(self._select(agent).sections)

    def has_hooks(self, kind: type[Hook]) -> bool:
        """Whether any conversation may have a hook of that kind."""
        return kind in self._hook_kinds

    def hooks(self, agent: Agent, kind: type[H]) -> Sequence[Installed[H]]:
        """The host's own hooks of a kind, then those of the conversation's extensions. Their scopes are still to be
        asked."""
        return cast("tuple[Installed[H], ...]", self._select(agent).hooks.get(kind, ()))

    def wrappers(self, agent: Agent) -> Sequence[Wrapper]:
        """Outermost first."""
        return self._select(agent).wrappers

    def setups(self, agent: Agent) -> list[Setup]:
        return [extension.setup for extension in self._select(agent).extensions if extension.setup is not None]

    def _select(self, agent: Agent) -> _Selection:
        extensions = None if agent.extensions is None else tuple(agent.extensions)
        tools = None if agent.tools is None else tuple(agent.tools)
        added = tuple(agent.added_tools)
        selection = self._selections.get((extensions, tools, added))
        if selection is None:
            if len(self._selections) >= MAX_SELECTIONS:
                self._selections.clear()
            selection = self._selections[extensions, tools, added] = self._make(extensions, tools, added)
        return selection

    def _make(
        self, extensions: tuple[str, ...] | None, tools: tuple[str, ...] | None, added: tuple[str, ...]
    ) -> _Selection:
        chosen = tuple(e for e in self._extensions.values() if extensions is None or e.name in extensions)
        hooks: dict[type[Hook], tuple[Installed[Hook], ...]] = {}
        for installed in (*self._host_hooks, *(Installed(e.name, hook) for e in chosen for hook in e.hooks)):
            kind = type(installed.hook)
            hooks[kind] = (*hooks.get(kind, ()), installed)
        had = {t.name: t for e in chosen for t in e.tools if tools is None or t.name in tools or t.name in added}
        deferred = frozenset(t.name for t in had.values() if t.deferred and t.name not in added)
        offered = [t for t in had.values() if "model" in t.callers and t.name not in deferred]
        findable = tuple(t for t in had.values() if t.deferred)
        if findable:  # also once all are found: calls of it may be under way
            had[FIND_TOOLS] = finder(findable)
            offered += [had[FIND_TOOLS]] if deferred else []
        return _Selection(
            extensions=chosen,
            tools=had,
            offered=tuple(offered),
            deferred=deferred,
            sections=tuple(section for extension in chosen for section in extension.sections),
            hooks=hooks,
            wrappers=tuple(wrapper for extension in chosen for wrapper in extension.wrappers),
        )


def _check_extension(extension: Extension) -> None:
    if not isinstance(extension, Extension):  # pyright: ignore[reportUnnecessaryIsInstance]  # of untyped callers
        raise TypeError(
            f"a {type(extension).__name__} is no extension; put tools into one: Extension('name', tools=[...])"
        )


def _named(extension: Extension) -> Iterator[tuple[str, list[str]]]:
    """What an extension has that no other may have under the same name."""
    yield "tool", [tool.name for tool in extension.tools]
    yield "section", [section.name for section in extension.sections]
    yield "task", [task.kind for task in extension.tasks]
