"""Names of a data set that are spelled like one that it does not have, in a time that their number bounds.

`difflib` compares a name with each other one. Of many names, those are compared that share most pairs of neighbouring
characters with it, which a few passes over the text of all names find.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import islice, pairwise

import numpy as np

from funcppo.core.files import shorten
from funcppo.kg.graph.lexer import quote

N_SUGGESTIONS = 3
# characters of a name for which similar names are searched, and of those that can be similar to it
MAX_LENGTH = 100
MAX_SIMILAR_LENGTH = 240
# names that are compared one by one
MAX_COMPARED = 2000
# names that are looked at: about two seconds of work
MAX_NAMES = 2_000_000

_SEPARATOR = "\n"


def find_similar_names(name: str, known: Sequence[str]) -> list[str]:
    """The known names that are spelled most like a name, the most similar first."""
    if len(name) > MAX_LENGTH:
        return []
    if len(known) > MAX_COMPARED:
        known = _names_with_shared_pairs(name, known)
    return difflib.get_close_matches(name, known, n=N_SUGGESTIONS)


def similar_names_hint(name: str, known: Sequence[str]) -> str:
    """The known names that are spelled like a name, as a query or a shell takes them, or that there are none."""
    similar = find_similar_names(name, known)
    if similar:
        return "close: " + ", ".join(map(quote, similar))
    return f"none of {len(known)} is spelled like it"


def unknown_name_message(kind: str, name: str, known: Sequence[str]) -> str:
    """The message for a name that is not among the known ones; suggests some of similar spelling.

    Args:
      kind: relation or entity.
      name: the unknown name.
      known: all names of this kind.
    """
    hint = similar_names_hint(name, known)
    return (
        f"unknown {kind} {shorten(name)}: expected one of the data's ({hint})"
    )


def _names_with_shared_pairs(name: str, known: Sequence[str]) -> list[str]:
    """The names that share the largest part of their pairs of neighbouring characters with a name."""
    names = list(islice(known, MAX_NAMES))
    on_one_line = (
        name[:MAX_SIMILAR_LENGTH].replace(_SEPARATOR, " ") for name in names
    )
    text = _SEPARATOR.join(["", *on_one_line, ""])
    characters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    ends = np.flatnonzero(characters == ord(_SEPARATOR))

    # A pair that a name has twice counts twice; the part is of all pairs of both names.
    n_shared = np.zeros(len(names), np.int64)
    for first, second in dict.fromkeys(
        pairwise(_SEPARATOR + name + _SEPARATOR)
    ):
        has_pair = characters[:-1] == ord(first)
        has_pair &= characters[1:] == ord(second)
        position = np.flatnonzero(has_pair)
        row = np.searchsorted(ends, position, side="right") - 1
        n_shared += np.bincount(row, minlength=len(names))
    part = n_shared / (np.diff(ends) + len(name) + 1)

    best = np.argpartition(-part, MAX_COMPARED)[:MAX_COMPARED]
    return [names[i] for i in sorted(best.tolist())]
