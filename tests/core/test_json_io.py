"""JSON that is damaged or no object is one line of error with its place."""

from __future__ import annotations

import json

import pytest

from funcppo.core.json_io import escape_unprintable, parse_object


def test_an_object_is_read_with_or_without_a_byte_order_mark():
    assert parse_object("f", '{"name": "Zoë"}'.encode()) == {"name": "Zoë"}
    assert parse_object("f", b'\xef\xbb\xbf{"n": 1}\r\n') == {"n": 1}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "expected a JSON object, got Expecting value: line 1 column 1"),
        (b'{"n": ', "expected a JSON object, got Expecting value"),
        (b"[]", r"expected a JSON object, got \[\]$"),
        (b"5", "expected a JSON object, got 5$"),
        (b"[" * 10**5, "expected a JSON object, got "),
        (b"9" * 5000, "expected a JSON object, got "),
        (b'{"n": "\xff"}', "expected UTF-8, got byte 0xff at 7$"),
    ],
)
def test_what_is_no_object_is_refused_with_its_place(text, problem):
    with pytest.raises(ValueError, match=f"^f.jsonl:3: {problem}") as error:
        parse_object("f.jsonl:3", text)
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


def test_names_are_written_as_they_are_but_for_what_cannot_be_seen():
    names = {"seen": "Zoë, 北京 e\u0301 \U0001f600", "lines": ["a\nb", 1]}
    hidden = "\x1b[31m \x7f \x9b \u202e \u200b \u2028 \U000e0041 \ud800"
    written = json.dumps(
        {"hidden": hidden, **names}, ensure_ascii=False, indent=2
    )

    text = escape_unprintable(written)

    assert json.loads(text) == {"hidden": hidden, **names}
    assert all(char.isprintable() or char == "\n" for char in text)
    assert "Zoë, 北京 e\u0301 \U0001f600" in text
    assert r"\u009b \u202e" in text
