"""TODO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class MiningConfig:
    """Which rules are looked for in a graph, and how hard."""

    max_length: int = 3
    """Maximum number of atoms in a rule body, 1 to 3."""
    min_support: int = 5
    """Minimum support: facts that a rule derives from other facts."""
    min_confidence: float = 0.01
    """Minimum leave-one-out confidence, 0 to 1."""
    constants: bool = False
    """Also mine rules with constants, h(X,c) :- b(X,Z) and h(X,c) :- b(X,d). Default: off."""
    votes_per_fact: int = 1
    """Keep a rule if it is among the N best rules for at least one fact that it derives."""
    max_rows: int = 200_000_000
    """Maximum number of rows, about 40 bytes each, that one stage may materialise; larger joins are estimated from a
    sample and marked."""
    time_limit: float | None = None
    """Seconds after which the search stops; None: no limit. The result then depends on the machine."""
    seed: int = 0
    """Random seed of the samples."""

    def __post_init__(self) -> None:
        """Errors: ValueError naming the field."""
        if not 1 <= self.max_length <= 3:
            raise ValueError(f"max_length={self.max_length}: want 1, 2 or 3")
        for name in ("min_support", "votes_per_fact", "max_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: want 1 or more")
        if not 0.0 <= self.min_confidence <= 1.0:
            raise ValueError(f"min_confidence={self.min_confidence}: want a number from 0 to 1")
        if self.time_limit is not None and not self.time_limit > 0.0:
            raise ValueError(f"time_limit={self.time_limit}: want more than 0")
