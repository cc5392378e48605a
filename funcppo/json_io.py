"""Reading JSON that a person or a crash may have changed: one line of error, with the place."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]  # an object of a JSON file

MAX_SHOWN_BYTES = 60  # of a text that is no object


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
