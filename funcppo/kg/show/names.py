"""Names and scores as they are shown: names on one line, of bounded length, nothing invisible."""

from __future__ import annotations

import re

# characters of a word on a page, of a text on a page, and of a name in a picture
MAX_WORD = 200
MAX_TEXT = 4000
MAX_LABEL = 36


def display(text: str) -> str:
    """A text without control characters and marks of direction, which are shown as escapes.

    Words and texts that are very long are cut, and end with how many characters they have. A word is cut by itself, so
    that a long name in an atom does not hide what follows.
    """
    text = re.sub(rf"\S{{{MAX_WORD + 1},}}", _cut_word, text)
    if len(text) > MAX_TEXT:
        text = _cut(text, MAX_TEXT)
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else ascii(char)[1:-1] for char in text
    )


def label(text: str, width: int = MAX_LABEL) -> str:
    """A text for a picture: as `display`, and short.

    Args:
      width: the most characters.
    """
    text = display(text)
    return text if len(text) <= width else text[: width - 1] + "…"


def score_text(score: float) -> str:
    """A score with its leading digits."""
    return f"{score:.4f}" if score >= 0.0001 or not score else f"{score:.1e}"


def _cut_word(match: re.Match[str]) -> str:
    return _cut(match[0], MAX_WORD)


def _cut(text: str, width: int) -> str:
    """The first characters of a text, and how many it has."""
    return f"{text[:width]}… ({len(text):,} characters)"
