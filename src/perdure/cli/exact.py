"""Text that a person decides about: two that differ never look the same (rule H309).

Whatever a terminal would not show, would show elsewhere or would show like something else is written as ``⟨U+202E⟩``.
These brackets, and the mark for the end of a line, are written so themselves: where they stand they were never text.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from perdure.cli.text import shortened
from perdure.kernel.json import JsonValue

MOST_SPACES: Final = 40
"""In a row that are shown as such; more of them could push what follows out of sight."""
EMPTY: Final = "⟨empty⟩"
"""In the place of a text without any character."""

_UNSEEN: Final = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp"))
# Letters, marks and signs that nothing is drawn for: fillers, joiners, variation selectors, the empty braille pattern.
_EMPTY = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\uffa0\ufe00-\ufe0f\U000e0100-\U000e01ef]")
# Signs that are drawn like -, /, \, ', :, *, ~, |, !, ; and letters of phonetic writing that are like a, g, i, l, v.
_ALIKE = frozenset(
    "\u2010\u2011\u2012\u2013\u2212\u02d7\u2044\u2215\u29f8\u2216\u29f5\u2032\u02b9\u02bc\u02c8\u2236\ua789\u204e\u2217"
    "\u223c\u02dc\u2223\u01c0\u01c3\u0251\u0261\u026a\u0269\u029f\u028b\u201a\u066d\u05c0\u05c3"
)
# Letters of the Cyrillic, Greek, Armenian and Cherokee scripts that are drawn like those of ASCII.
_TWINS = frozenset(
    "\u0430\u0441\u0501\u0435\u04bb\u0456\u0458\u04cf\u043e\u0440\u051b\u0455\u0443\u0475\u051d\u0445\u04af\u0433"
    "\u0410\u0412\u0421\u0415\u041d\u0406\u0408\u041a\u041c\u041e\u0420\u0405\u0422\u0423\u0425\u04ae\u04c0\u051a\u051c"
    "\u03b1\u03b3\u03b9\u03bd\u03bf\u03c1\u03c5\u03c7\u03ba\u03f2\u03f3\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c"
    "\u039d\u039f\u03a1\u03a4\u03a5\u03a7\u03f9\u0561\u0563\u0566\u0570\u0578\u057d\u0581\u0585\u054f\u0555\u053c"
    "\u13a0\u13a1\u13a2\u13aa\u13ab\u13a9\u13b3\u13b7\u13bb\u13c0\u13c2\u13c3\u13ce\u13cf\u13d2\u13d4\u13d9\u13da\u13de"
    "\u13df\u13e2\u13e6\u13f4"
)
_WORD = re.compile(r"\w+")
_BESIDE_LATIN = ("LATIN", "CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "HANGUL", "FULLWIDTH", "IDEOGRAPHIC")
_SPACES = re.compile(f" {{{MOST_SPACES + 1},}}")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def exact(text: str) -> str:
    """One line that no other text is shown as."""
    if not (text.isascii() and text.isprintable()):
        text = "".join(_signs(text))
    text = _SPACES.sub(lambda found: f"⟨{len(found[0])} × U+0020⟩", text)
    return f"{text[:-1]}⟨U+0020⟩" if text.endswith(" ") else text


def exact_name(name: str) -> str:
    """A name, in quotation marks unless it is a plain one."""
    return name if _PLAIN_NAME.fullmatch(name) else exact_json(name)


def exact_json(value: JsonValue) -> str:
    """One line of JSON that no other value is shown as."""
    return exact(json.dumps(value, ensure_ascii=False))


def exact_words(text: str, most: int) -> str:
    """At most so many characters of a text, in one line; ``⏎`` is the end of a line, ``…`` says that there are more."""
    return shortened(exact(text[: most + 1]).replace("⟨U+000A⟩", " ⏎ "), most)


def could_be_json(text: str) -> bool:
    """Whether a text, shown as it is, could be taken for a value that is none."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def ascii_json(raw: bytes) -> str:
    """The same JSON for a terminal: what is not plain ASCII is written as an escape of JSON's."""
    return json.dumps(json.loads(raw), separators=(",", ":")).replace("\x7f", "\\u007f")


def _signs(text: str) -> Iterator[str]:
    doubtful = _doubtful(text)
    before = ""
    for at, sign in enumerate(text):
        yield _code(sign) if at in doubtful or _hides(sign) or _joins(before, sign) else sign
        before = sign


def _code(sign: str) -> str:
    return f"⟨U+{ord(sign):04X}⟩"


@lru_cache(4096)
def _hides(sign: str) -> bool:
    """Whether it is drawn as nothing, as another sign, or in a way that moves others."""
    if sign.isascii():
        return not sign.isprintable()
    if sign in "⟨⟩⏎" or sign in _ALIKE or _EMPTY.match(sign) or unicodedata.category(sign) in _UNSEEN:
        return True
    plain = unicodedata.normalize("NFKC", sign)
    twin = plain.isascii() and (len(plain) == 1 or sign.isalpha())
    return twin or unicodedata.normalize("NFC", sign) != sign


def _joins(before: str, sign: str) -> bool:
    """Whether it is a mark that makes another sign of the one before it, or is drawn over one of ASCII."""
    if not unicodedata.category(sign).startswith("M"):
        return False
    return not before or before.isascii() or unicodedata.normalize("NFC", before + sign) != before + sign


def _doubtful(text: str) -> set[int]:
    """Where letters of other scripts stand in a word of Latin ones, or make up one that looks like such a word."""
    found: set[int] = set()
    for word in _WORD.finditer(text):
        letters = [at for at in range(word.start(), word.end()) if text[at].isalpha()]
        others = [at for at in letters if not text[at].isascii() and _script(text[at]) not in _BESIDE_LATIN]
        if others and (len(others) < len(letters) or all(text[at] in _TWINS for at in others)):
            found.update(others)
    return found


@lru_cache(4096)
def _script(letter: str) -> str:
    return unicodedata.name(letter, "").partition(" ")[0]
