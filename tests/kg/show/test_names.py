"""Names as they are shown: nothing invisible, nothing endless, and everything else as it is."""

import pytest

from funcppo.kg.show.names import (
    display,
    label,
    score_text,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<b> & \"q\"", "<b> & \"q\""),
        ("a\x1b[31m\nb", "a\\x1b[31m\\nb"),
        ("\u202eevil", "\\u202eevil"),
        ("\u05e9\u05dc\u05d5\u05dd", "\u05e9\u05dc\u05d5\u05dd"),
        ("\u65e5\u672c\x00", "\u65e5\u672c\\x00"),
        ("", ""),
        ("x" * 200, "x" * 200),
        (f"r({'x' * 5000} , b)", f"r({'x' * 198}… (5,002 characters) , b)"),
        ("word " * 1000, "word " * 800 + "… (5,000 characters)"),
    ],
)  # fmt: skip
def test_what_cannot_be_seen_is_escaped_and_what_is_long_is_cut(text, shown):
    assert display(text) == shown


def test_labels_are_short_and_small_scores_keep_their_digits():
    assert label("a" * 36) == "a" * 36
    assert label("a" * 37) == "a" * 35 + "…"
    assert label("abcdef", 3) == "ab…"
    texts = [score_text(score) for score in (0.12345, 1.23e-7, 0.0)]
    assert texts == ["0.1235", "1.2e-07", "0.0000"]
