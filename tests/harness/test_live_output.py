"""Output on its way (rules H97 and H98): whatever the chunks and the timing, the same is kept."""

from __future__ import annotations

import codecs

from hypothesis import given
from hypothesis import strategies as st

from perdure.harness.output import LiveOutput, OutputLimits, bound

pieces = st.sampled_from([b"\n", b"\n\n", b"a", b"long line ", b"\xc3\xa9", b"\xf0\x9f\x98\x80", b"\xf0\x9f", b"\x80"])
limits = st.builds(
    OutputLimits,
    max_bytes=st.integers(4, 24),
    max_lines=st.integers(1, 5),
    keep=st.sampled_from(["head", "tail"]),
)


@given(st.lists(pieces, max_size=80), st.lists(st.integers(1, 9), max_size=40), limits, st.data())
def test_live_text_bounded_again_is_the_window_over_everything(parts, cuts, limits, data) -> None:
    whole = b"".join(parts)
    live = LiveOutput(limits)
    shown = ""
    at = 0
    for size in [*cuts, len(whole)]:
        live.feed(whole[at : at + size])
        at += size
        if data.draw(st.booleans()):
            anew, text = live.take()
            shown = text if anew else shown + text
            assert len(shown.encode()) <= 2 * limits.max_bytes + 8
            committed = bound(shown, limits, dropped_bytes=live.dropped_bytes, dropped_lines=live.dropped_lines)
            reference = limits.window()
            reference.feed(whole[:at])
            so_far = reference.window()
            if ends_whole(whole[:at]):
                assert (committed.text, committed.dropped_bytes, committed.dropped_lines) == (
                    so_far.text,
                    so_far.dropped_bytes,
                    so_far.dropped_lines,
                )
    reference = limits.window()
    reference.feed(whole)
    expected = reference.window()
    end = live.end()
    assert (end.text, end.dropped_bytes, end.dropped_lines) == (
        expected.text,
        expected.dropped_bytes,
        expected.dropped_lines,
    )


def ends_whole(prefix: bytes) -> bool:
    """No character was cut at its end (a live text waits for the rest of one)."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(prefix)
    return not decoder.getstate()[0]


@given(st.lists(pieces, max_size=60), st.lists(st.integers(1, 9), max_size=40), limits)
def test_what_is_shown_does_not_depend_on_the_chunks(parts, cuts, limits) -> None:
    whole = b"".join(parts)
    chunked, at_once = LiveOutput(limits), LiveOutput(limits)
    at_once.feed(whole)
    at = 0
    for size in [*cuts, len(whole)]:
        chunked.feed(whole[at : at + size])
        at += size
    assert chunked.take()[1] == at_once.take()[1]
    assert (chunked.dropped_bytes, chunked.dropped_lines) == (at_once.dropped_bytes, at_once.dropped_lines)


def test_a_chunk_costs_the_chunk() -> None:
    live = LiveOutput(OutputLimits())
    live.feed("a line\n" * 1000)
    live.take()
    live.feed("one more\n")
    assert live.take() == (False, "one more\n")
    assert not live.changed


def test_a_lone_surrogate_is_shown_as_replacement_characters() -> None:
    live = LiveOutput(OutputLimits())
    live.feed("a\ud800b")
    assert live.end().text == "a���b"
