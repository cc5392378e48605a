"""Which rules do the facts support? Here are the settings of the search, which import no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypedDict

from funcppo.core.settings import (
    PositiveFloat,
    PositiveInt,
    Range,
    Seed,
    UnitInterval,
    check_fields,
)

MAX_PATH_LENGTH = 5  # body atoms of the longest path rule
# Bodies up to this length are found by extending shorter ones, longer ones from the facts that they derive.
MAX_EXTENDED_LENGTH = 3
# It turns seconds into rows, so that the rules depend on the setting and not on the machine. A core computes 2 million
# rows a second where the graph is sparse and up to 14 where it is dense, so that on a sparse one time may end first.
ROWS_PER_SECOND = 7_000_000
# A graph is tiny with at most so many facts, and dense with at least one fact for each pair of entities.
MAX_TINY_FACTS = 2_000


class MiningOptions(TypedDict, total=False):
    """Settings of `mine` beside its graph, by name: fields of `MiningConfig`."""

    max_length: int
    min_support: int
    min_confidence: float
    constants: bool
    votes_per_fact: int
    seconds: float
    max_rows: int | None
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MiningConfig:
    """Settings of rule mining: which rules to look for in a graph, and how much work to spend."""

    max_length: Annotated[int, Range(1, MAX_PATH_LENGTH)] = 3
    """Maximum number of atoms in the body of a rule; 4 and 5 are for sparse graphs."""
    min_support: PositiveInt = 5
    """Minimum number of facts that a rule derives from other facts."""
    min_confidence: UnitInterval = 0.01
    """Minimum leave-one-out confidence of a rule, from 0 to 1."""
    constants: bool = False
    """Whether to look for rules with constants too, h(X, c) :- b(X, Z) and h(X, c) :- b(X, d), and with h(X, X)."""
    votes_per_fact: PositiveInt = 1
    """A rule is kept if it is among this many best rules of some fact that it derives."""
    seconds: PositiveFloat = 120.0
    """Time limit in seconds. It also sets the rows, ROWS_PER_SECOND a second, if `max_rows` is None."""
    max_rows: PositiveInt | None = None
    """Maximum number of rows to compute, which sets what is searched whole, sampled or left out; None: by `seconds`."""
    seed: Seed = 0
    """Random seed of the samples."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)

    @property
    def row_limit(self) -> int:
        """Return the maximum number of rows to compute in all."""
        if self.max_rows is not None:
            return self.max_rows
        return max(1, int(self.seconds * ROWS_PER_SECOND))


def default_config(n_facts: int, n_entities: int) -> MiningConfig:
    """Return the default settings for a graph of this size.

    Rules with constants tell the types of entities, and the commonest answers: of generated tables, encyclopaedias,
    stars, chains, trees and dense graphs they rank valid of none worse beyond chance, and of most far better. In a
    tiny dense graph bodies of three atoms join nearly all pairs of entities, and the best of so many are best by
    chance: shorter bodies rank better there. Up to 50,000 facts there is time to weigh more rules for each fact. Of
    larger graphs those that are sparse need long bodies.
    """
    if n_facts <= MAX_TINY_FACTS and n_facts >= n_entities**2:
        return MiningConfig(
            max_length=2, min_support=3, votes_per_fact=3, constants=True
        )
    if n_facts <= 50_000:
        return MiningConfig(votes_per_fact=3, constants=True)
    if n_facts <= 3 * n_entities:
        return MiningConfig(max_length=5, constants=True)
    return MiningConfig(constants=True)
