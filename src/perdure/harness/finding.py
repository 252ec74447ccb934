"""``find_tools``: how a model comes to tools that are not offered until they are found (rules H83 and H327).

A conversation has it while there are such tools. What it finds its result adds, so that the tools of the conversation,
and with them a provider's cache of its prompt, change once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from perdure.harness.tool import AnyTool, ToolResult, tool

FIND_TOOLS: Final = "find_tools"
MOST_FOUND: Final = 10
"""Tools that one search adds."""
MOST_NAMED: Final = 50
"""Names that are told where nothing fits."""
LEAST_LETTERS: Final = 3
"""Shorter words of a query say nothing."""
IN_NAME: Final = 3.0
"""What a word in a tool's name weighs more than one in its description."""

MOST_FINDERS: Final = 100
"""Of sets of tools, that are remembered."""

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_WORD = re.compile(r"[^\W_]+")


@lru_cache(maxsize=MOST_FINDERS)
def finder(tools: tuple[AnyTool, ...]) -> AnyTool:
    """The tool that finds these."""
    index = Index(tools)

    @tool(name=FIND_TOOLS, replay="safe", effects="read", callers={"model"})
    async def find_tools(query: str) -> ToolResult:
        """Find further tools by what they do. Those that fit can be called from then on.

        Args:
            query: What the tool shall do, in a few words, or its name.
        """
        found = index.search(query)
        if not found:
            names = [tool.name for tool in tools[:MOST_NAMED]]
            more = f" and {len(tools) - len(names)} more" if len(tools) > len(names) else ""
            return ToolResult(f"Nothing fits. There are: {', '.join(names)}{more}. Search for one of them.")
        lines = [f"- {tool.name}: {tool.description.partition(chr(10))[0]}" for tool in found]
        return ToolResult("\n".join(["These tools can be called now:", *lines]), add_tools=[t.name for t in found])

    return find_tools


class Index:
    """The words of some tools. The same tools and query always give the same."""

    def __init__(self, tools: Sequence[AnyTool]) -> None:
        self._tools = tools
        self._names = [words_of(tool.name) for tool in tools]
        self._texts = [words_of(tool.description) for tool in tools]
        self._counts = Counter(word for a, b in zip(self._names, self._texts, strict=True) for word in a | b)

    def search(self, query: str) -> list[AnyTool]:
        """Those that fit best, the best first. A word that few tools have counts for more."""
        named = [tool for tool in self._tools if tool.name == query.strip()]
        if named:
            return named
        wanted = [word for word in sorted(words_of(query)) if len(word) >= LEAST_LETTERS]
        weights = [
            IN_NAME * self._weight(wanted, name) + self._weight(wanted, text)
            for name, text in zip(self._names, self._texts, strict=True)
        ]
        best = max(weights, default=0.0)
        if not best:
            return []
        order = sorted(range(len(weights)), key=lambda at: (-weights[at], at))
        return [self._tools[at] for at in order[:MOST_FOUND] if weights[at] >= best / 2]

    def _weight(self, wanted: Sequence[str], words: set[str]) -> float:
        return sum(
            max((1 / self._counts[word] for word in words if _alike(want, word)), default=0.0) for want in wanted
        )


def words_of(text: str) -> set[str]:
    """In lower case; ``send_mail`` and ``sendMail`` are two each."""
    return {word.lower() for word in _WORD.findall(_CAMEL.sub(" ", text))}


def _alike(one: str, other: str) -> bool:
    """The same, or one the beginning of the other: ``mail`` and ``mails``."""
    shorter, longer = sorted((one, other), key=len)
    return one == other or (len(shorter) > LEAST_LETTERS and longer.startswith(shorter))
