"""Settings of the rule miner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from funcppo.ranges import (
    PositiveFloat,
    PositiveInt,
    Range,
    Seed,
    UnitInterval,
    check_fields,
)

MAX_PATH_LENGTH = 3  # body atoms of the longest path rule


@dataclass(frozen=True, kw_only=True, slots=True)
class MiningConfig:
    """Which rules to look for in a graph, and how much work to spend."""

    max_length: Annotated[int, Range(1, MAX_PATH_LENGTH)] = 3
    """Maximum number of atoms in the body of a rule."""
    min_support: PositiveInt = 5
    """Minimum number of facts that a rule derives from other facts."""
    min_confidence: UnitInterval = 0.01
    """Minimum leave-one-out confidence of a rule, from 0 to 1."""
    constants: bool = False
    """Whether to look for rules with constants too: h(X, c) :- b(X, Z) and h(X, c) :- b(X, d)."""
    votes_per_fact: PositiveInt = 1
    """A rule is kept if it is among this many best rules of some fact that it derives."""
    max_rows: PositiveInt = 200_000_000
    """Approximate number of rows that one stage may compute; what exceeds it is sampled."""
    time_limit: PositiveFloat | None = None
    """Seconds after which the search stops; the rules found by then depend on the machine. None sets no limit."""
    seed: Seed = 0
    """Random seed of the samples."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)
