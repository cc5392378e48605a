"""JSON of people and for people.

Reading what a person or a crash may have changed: one line of error, with the place. Writing names so that a terminal
shows them as they are and obeys none.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]  # an object of a JSON file

FORMAT = 2  # version of the files that a run writes
FORMAT_KEY = "format"
MAX_SHOWN_BYTES = 60  # of a text that is no object
# all but letters and digits of any script, line breaks and the rest of ASCII
_MAYBE_UNPRINTABLE = re.compile(r"[^\w\x20-\x7e\n]")


def parse_object(place: object, text: bytes) -> Json:
    """The object that a text in UTF-8 holds.

    Args:
      place: a file, or FILE:LINE, for the error.

    Raises:
      ValueError: the text is not valid JSON, or not an object.
    """
    try:
        value = json.loads(text)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(
            f"{place}: expected UTF-8, got byte 0x{byte:02x} at {error.start}"
        ) from None
    # Nested brackets by the thousand are an error of recursion.
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{place}: expected a JSON object, got {error}"
        ) from None
    if not isinstance(value, dict):
        shown = text[:MAX_SHOWN_BYTES].decode(errors="replace").strip()
        raise ValueError(f"{place}: expected a JSON object, got {shown}")
    return value


def escape_unprintable(text: str) -> str:
    """The same JSON without control characters and marks of direction, which become escapes (`\\u202e`).

    Args:
      text: JSON; letters of all scripts may stand in it as they are.
    """
    return _MAYBE_UNPRINTABLE.sub(_escape_unprintable, text)


def _escape_unprintable(match: re.Match[str]) -> str:
    """One character, as an escape if it cannot be seen."""
    char = match[0]
    return char if char.isprintable() else json.dumps(char)[1:-1]


def shorten(text: str, width: int = 60) -> str:
    """The text on one line as Python would quote it, cut to `width` characters; for error messages."""
    if len(text) > width:
        text = text[: width - 3] + "..."
    return repr(text)


def check_format(path: object, version: object) -> None:
    """Raise ValueError unless a file of a run has the format version that this package writes.

    Args:
      path: the file, named in the error.
      version: the value under "format" in the file; None if there is none.
    """
    if type(version) is int and version == FORMAT:
        return
    is_newer = type(version) is int and version > FORMAT
    hint = ": written by a newer version of funcppo" if is_newer else ""
    raise ValueError(
        f"{path}: expected format version {FORMAT}, got {version!r}{hint}"
    )
