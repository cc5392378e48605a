"""Display of names and scores, the templates of pages, and the check for the packages that they need.

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
    """Escape control characters and marks of direction in a text, and cut it if it is very long.

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
    """Escape and shorten a text for a picture.

    Args:
      width: the most characters.
    """
    text = display(text)
    return text if len(text) <= width else text[: width - 1] + "…"


def score_text(score: float) -> str:
    """Format a score with its leading digits."""
    return f"{score:.4f}" if score >= 0.0001 or not score else f"{score:.1e}"


def _cut(text: str, width: int) -> str:
    """Return the first characters of a long text, followed by its length; a short text as it is."""
    if len(text) <= width:
        return text
    return f"{text[:width]}… ({len(text):,} characters)"


def make_templates() -> jinja2.Environment:
    """Return the environment of the page templates, which escape every value."""
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
