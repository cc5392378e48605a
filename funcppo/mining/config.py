"""Settings of the rule miner."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_PATH_LENGTH = 3  # body atoms of the longest path rule
# Rows that a slow core, or a core shared with another program, computes in a second; an idle one computes twice as
# many. It turns seconds into rows, so that the rules depend on the setting and not on the machine.
ROWS_PER_SECOND = 7_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class MiningConfig:
    """Which rules to look for in a graph, and how much work to spend."""

    max_length: int = 3
    """Maximum number of atoms in the body of a rule."""
    min_support: int = 5
    """Minimum number of facts that a rule derives from other facts."""
    min_confidence: float = 0.01
    """Minimum leave-one-out confidence of a rule, from 0 to 1."""
    constants: bool = False
    """Whether to look for rules with constants too: h(X, c) :- b(X, Z) and h(X, c) :- b(X, d)."""
    votes_per_fact: int = 1
    """A rule is kept if it is among this many best rules of some fact that it derives."""
    seconds: float = 60.0
    """Time limit. It also sets the work, ROWS_PER_SECOND rows a second, if `work` is None."""
    work: int | None = None
    """Maximum number of rows to compute, which sets what is searched whole, sampled or left out; None: by `seconds`."""
    seed: int = 0
    """Random seed of the samples."""

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that is out of range."""
        if not 1 <= self.max_length <= MAX_PATH_LENGTH:
            raise ValueError(
                f"max_length={self.max_length}: expected 1, 2 or 3"
            )
        for name in ("min_support", "votes_per_fact"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name}={getattr(self, name)}: expected 1 or more"
                )
        if self.work is not None and self.work < 1:
            raise ValueError(f"work={self.work}: expected 1 or more")
        if not 0.0 <= self.min_confidence <= 1.0:
            raise ValueError(
                f"min_confidence={self.min_confidence}: expected a number from 0 to 1"
            )
        if not 0.0 < self.seconds < math.inf:
            raise ValueError(
                f"seconds={self.seconds}: expected a number above 0"
            )

    @property
    def max_rows(self) -> int:
        """Maximum number of rows to compute in all."""
        if self.work is not None:
            return self.work
        return max(1, int(self.seconds * ROWS_PER_SECOND))
