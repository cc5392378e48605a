"""Names and scores as they are shown, the templates that show them, and the packages that this needs.

Names are on one line, of bounded length, with nothing invisible.
"""

from __future__ import annotations

import importlib.util
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jinja2

# characters of a name in a picture
MAX_LABEL = 36


def display(text: str) -> str:
    """A text without control characters and marks of direction, which are shown as escapes.

    Words and texts that are very long are cut, and end with how many characters they have. A word is cut by itself, so
    that a long name in an atom does not hide what follows.
    """
    text = re.sub(r"\S{201,}", lambda match: _cut(match[0], 200), text)
    text = _cut(text, 4000)
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


def _cut(text: str, width: int) -> str:
    """The first characters of a long text, and how many it has."""
    if len(text) <= width:
        return text
    return f"{text[:width]}… ({len(text):,} characters)"


def make_templates() -> jinja2.Environment:
    """The templates of pages, which escape every value."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("funcppo.kg.show"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["display"] = display
    environment.filters["score"] = score_text
    environment.filters["number"] = "{:,}".format
    return environment


def check_packages(what: str, extra: str, *packages: str) -> None:
    """Check that the packages of an extra are installed.

    Raises:
      ValueError: one is missing.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"{what} {package} (pip install 'funcppo[{extra}]')"
            )
