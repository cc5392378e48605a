"""Names as they are shown: nothing invisible, nothing endless, and everything else as it is."""

import pytest

from funcppo.kg.show.names import (
    MAX_LABEL,
    MAX_TEXT,
    MAX_WORD,
    display,
    label,
    score_text,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("france", "france"),
        ("<b> & \"q\"", "<b> & \"q\""),
        ("a\x1b[31m\nb", "a\\x1b[31m\\nb"),
        ("\u202eevil", "\\u202eevil"),
        ("\u05e9\u05dc\u05d5\u05dd", "\u05e9\u05dc\u05d5\u05dd"),
        ("\u65e5\u672c\x00", "\u65e5\u672c\\x00"),
        ("", ""),
    ],
)  # fmt: skip
def test_what_cannot_be_seen_is_escaped_and_all_else_is_kept(text, shown):
    assert display(text) == shown


def test_what_is_long_is_cut_and_says_how_long_it_is():
    atom = display(f"r({'x' * 5000} , b)")
    assert atom == f"r({'x' * 198}… (5,002 characters) , b)"
    assert display("x" * MAX_WORD) == "x" * MAX_WORD
    words = display("word " * 1000)
    assert words == ("word " * 1000)[:MAX_TEXT] + "… (5,000 characters)"


def test_a_label_is_short():
    assert label("a" * MAX_LABEL) == "a" * MAX_LABEL
    assert label("a" * 37) == "a" * (MAX_LABEL - 1) + "…"
    assert label("abcdef", 3) == "ab…"


def test_small_scores_keep_their_digits():
    assert score_text(0.12345) == "0.1235"
    assert score_text(1.23e-7) == "1.2e-07"
    assert score_text(0.0) == "0.0000"
