"""Bounded output (rules H97, H98): whole lines, exact counts, the same whatever the chunks and the timing."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.harness.output import OutputWindow, Window

Keep = Literal["head", "tail"]

# Lines, broken and whole characters of every length, long runs.
pieces = st.sampled_from(
    [
        b"\n",
        b"\n\n",
        b"a",
        b"long line ",
        b"\xc3\xa9",
        b"\xe2\x82\xac",
        b"\xf0\x9f\x98\x80",
        b"\xf0\x9f",
        b"\x80",
        b"\xff",
        b"\xc3",
        b"\r\n",
        b"\x00",
    ]
)
outputs = st.lists(pieces, max_size=60).map(b"".join)
limits = st.tuples(st.integers(4, 40), st.integers(1, 6))
keeps: st.SearchStrategy[Keep] = st.sampled_from(["head", "tail"])


def by_definition(data: bytes, limit_bytes: int, limit_lines: int, keep: Keep) -> Window:
    """The rule again, the slow and plain way: split everything, take lines while they fit."""
    text = data.decode("utf-8", "replace")
    lines = [line + "\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    if not lines[-1]:
        lines.pop()
    ordered = lines if keep == "head" else lines[::-1]
    kept: list[str] = []
    size = 0
    for line in ordered[:limit_lines]:
        size += len(line.encode())
        if size > limit_bytes:
            break
        kept.append(line)
    cut = bool(lines) and not kept
    if cut:
        part = ""
        for character in ordered[0] if keep == "head" else reversed(ordered[0]):
            if len((part + character).encode()) > limit_bytes:
                break
            part = part + character if keep == "head" else character + part
        kept.append(part)
    shown = "".join(kept if keep == "head" else kept[::-1])
    total = len(text.encode())
    return Window(
        text=shown,
        total_bytes=total,
        total_lines=len(lines),
        shown_lines=len(kept),
        dropped_bytes=total - len(shown.encode()),
        dropped_lines=len(lines) - len(kept),
        cut_line=cut,
    )


def chunked(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(places)] or [b""]


@given(outputs, limits, keeps, st.lists(st.integers(0, 200), max_size=12), st.booleans())
def test_a_window_is_a_function_of_the_bytes_alone(
    data: bytes, limit: tuple[int, int], keep: Keep, cuts: list[int], look: bool
) -> None:
    window = OutputWindow(limit_bytes=limit[0], limit_lines=limit[1], keep=keep)
    taken = b""
    for chunk in chunked(data, cuts):
        window.feed(chunk)
        taken += chunk
        if look:
            assert window.window() == by_definition(taken, *limit, keep)
    assert window.window() == by_definition(data, *limit, keep)


@given(outputs, limits, keeps)
def test_a_window_keeps_its_limits(data: bytes, limit: tuple[int, int], keep: Keep) -> None:
    window = OutputWindow(limit_bytes=limit[0], limit_lines=limit[1], keep=keep)
    window.feed(data)
    shown = window.window()
    assert len(shown.text.encode()) <= limit[0]
    assert shown.shown_lines <= limit[1]
    assert shown.complete == (shown.text == data.decode("utf-8", "replace"))


@pytest.mark.parametrize("keep", ["head", "tail"])
@pytest.mark.parametrize("line", [b"x" * 79 + b"\n", b"\xff" * 200])
def test_memory_is_bounded_and_counts_are_exact_for_huge_output(keep: Keep, line: bytes) -> None:
    window = OutputWindow(keep=keep)
    chunk = line * 800
    rounds = 300
    tracemalloc.start()
    try:
        for _ in range(rounds):
            window.feed(chunk)
        shown = window.window()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    total = len(chunk.decode("utf-8", "replace").encode()) * rounds
    assert total > 15_000_000
    assert peak < 4_000_000
    assert shown.total_bytes == total
    assert shown.dropped_bytes == total - len(shown.text.encode())
    if line.endswith(b"\n"):
        assert (shown.total_lines, shown.shown_lines) == (800 * rounds, 640)
    else:
        assert (shown.total_lines, shown.cut_line) == (1, True)


def test_limits_too_small_to_show_anything_are_refused() -> None:
    with pytest.raises(ValueError, match="4 bytes"):
        OutputWindow(limit_bytes=3)
