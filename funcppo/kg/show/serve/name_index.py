"""Search in names: the same name, those that start with a text, those that contain it; case does not count."""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain

# stands between names; no folded text has it
_SEPARATOR = "\n"


class NameIndex:
    """The names of one kind, joined to one text that is searched as a whole.

    Attributes:
      names: the names; the id of the first is 1.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Fold and join the names."""
        self.names = names
        folded = [fold(name) for name in names]
        self._text = _SEPARATOR.join(["", *folded, ""])
        lengths = (len(name) + 1 for name in folded)
        self._starts = list(accumulate(lengths, initial=1))

    def find(self, text: str, limit: int) -> list[int]:
        """The ids of some names that contain a text: the same ones first, then those that start with it.

        Args:
          limit: the most ids.
        """
        folded = fold(text)
        patterns = (
            f"{_SEPARATOR}{folded}{_SEPARATOR}",
            f"{_SEPARATOR}{folded}",
            folded,
        )
        found: dict[int, None] = {}
        for name in chain.from_iterable(map(self._find_pattern, patterns)):
            found[name] = None
            if len(found) >= limit:
                break
        return list(found)

    def _find_pattern(self, pattern: str) -> Iterator[int]:
        """Yield the id of every name that has a pattern, in the order of ids."""
        position = self._text.find(pattern)
        while position >= 0:
            # A pattern may start with the separator before its name.
            start = position + pattern.startswith(_SEPARATOR)
            name = bisect_right(self._starts, start)
            if name > len(self.names):
                return
            yield name
            end_of_name = self._starts[name] - 1
            position = self._text.find(pattern, end_of_name)


def fold(text: str) -> str:
    """A text as it is compared: composed, without case, on one line."""
    composed = unicodedata.normalize("NFKC", text)
    return composed.casefold().replace(_SEPARATOR, " ")
