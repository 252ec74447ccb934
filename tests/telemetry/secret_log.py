"""Everything that anybody logs, at every level, as a formatter would write it."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.NOTSET)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.name} {record.levelname} {logging.Formatter().format(record)}")


@contextmanager
def caught() -> Generator[Log]:
    handler, root = Log(), logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield handler
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
