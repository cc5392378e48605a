"""Settings of the rule miner."""

from __future__ import annotations

from dataclasses import dataclass

MAX_PATH_LENGTH = 3  # body atoms of the longest path rule


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
    max_rows: int = 200_000_000
    """Approximate number of rows that one stage may compute; what exceeds it is sampled."""
    time_limit: float | None = None
    """Seconds after which the search stops; the rules found by then depend on the machine. None sets no limit."""
    seed: int = 0
    """Random seed of the samples."""

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that is out of range."""
        if not 1 <= self.max_length <= MAX_PATH_LENGTH:
            raise ValueError(
                f"max_length={self.max_length}: expected 1, 2 or 3"
            )
        for name in ("min_support", "votes_per_fact", "max_rows"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name}={getattr(self, name)}: expected 1 or more"
                )
        if not 0.0 <= self.min_confidence <= 1.0:
            raise ValueError(
                f"min_confidence={self.min_confidence}: expected a number from 0 to 1"
            )
        if self.time_limit is not None and not self.time_limit > 0.0:
            raise ValueError(
                f"time_limit={self.time_limit}: expected more than 0"
            )
