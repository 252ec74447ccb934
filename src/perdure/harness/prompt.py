"""Prompt sections, shown to the model as deltas (rules H64 to H66).

A section is a named text: the host's instructions, the conversation's, those of extensions, where its files live.
What the transcript already shows is known from its ``pi.system`` entries alone; a section that reads differently
now becomes part of one further entry, and nothing shown is ever rewritten, so that prompt caches keep hitting.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from perdure.harness.documents import SYSTEM, SystemData
from perdure.kernel.records import EntryRecord


class Shown(msgspec.Struct):
    """The prompt sections a transcript shows, from its newest head on. Fed with its entries in order."""

    sections: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    baseline: bool = False
    """One was shown since the head."""

    def feed(self, entry: EntryRecord) -> None:
        if entry.head is not None:
            # What stood before a head is gone, also where the head points back: the context leaves it out there.
            self.sections = {}
            self.baseline = False
        elif entry.kind == SYSTEM:
            try:
                data = entry.data_as(SystemData)
            except msgspec.ValidationError:
                return
            if data.baseline:
                self.sections = {}
            self.baseline = True
            for name, text in data.sections.items():
                if text is None:
                    self.sections.pop(name, None)
                else:
                    self.sections[name] = text

    def copy(self) -> Shown:
        return Shown(dict(self.sections), self.baseline)


def matters(entry: EntryRecord) -> bool:
    """Whether an entry can change what is shown."""
    return entry.head is not None or entry.kind == SYSTEM


def difference(shown: Shown, sections: Mapping[str, str]) -> SystemData | None:
    """What must be shown so that the transcript shows ``sections``; empty texts are sections that are not there."""
    wanted = {name: text for name, text in sections.items() if text}
    if not shown.baseline:
        return SystemData(sections=dict(wanted), baseline=True) if wanted else None
    changed: dict[str, str | None] = {name: text for name, text in wanted.items() if shown.sections.get(name) != text}
    changed.update({name: None for name in shown.sections if name not in wanted})
    return SystemData(sections=changed) if changed else None


def render(data: SystemData) -> str:
    """The words of a ``pi.system`` entry."""
    if data.baseline:
        return "\n\n".join(f"# {name}\n\n{text}" for name, text in data.sections.items())
    parts: list[str] = []
    for name, text in data.sections.items():
        if text is None:
            parts.append(f'The section "{name}" no longer applies.')
        else:
            parts.append(f'From here on the section "{name}" reads:\n\n{text}')
    return "\n\n".join(parts)
