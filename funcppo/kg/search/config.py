"""Settings of learning to prove: the proof search, its rewards and training queries, and the size of the network.

`ProverTaskConfig` holds the settings that a data set does not fix; the command line offers each as `--prover.*`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from funcppo.core.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Share,
    Size,
    UnitInterval,
    check_fields,
)

RewardScheme = Literal["proof", "signed", "balanced"]
FactSelection = Literal["policy", "oracle"]
FactSelectionOption = Literal["auto", "policy", "oracle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProverTaskConfig:
    """Settings of the proof search and of the prover network."""

    max_height: Size | None = None
    """Maximum height of a proof: rule applications on one branch. Default: the one of 1, 2, 3 that ranks the valid
    split best."""

    max_depth: Size = 20
    """Maximum number of resolution steps in one search; beyond it the search counts as not proved."""

    max_successors: Size | None = None
    """Maximum number of successors of a search state; a state with more is marked as overflowed. Default: the largest
    number that can occur, so that none is dropped."""

    reward: RewardScheme = "balanced"
    """Reward of an episode. proof: +1 for proving a positive query; signed: +1 for proving a positive and -1 for
    proving a negative; balanced: +1 for a correct and -1 for a wrong result, where a negative correctly left unproved
    counts 1 / prover.negatives_per_positive."""

    fact_selection: FactSelectionOption = "auto"
    """Who selects the facts of a proof. policy: the policy selects rules and facts; oracle: the policy selects rules,
    and facts come from the precomputed fixpoint (height 1 only); auto: oracle at height 1, otherwise policy."""

    negatives_per_positive: NonNegativeFloat = 1.0
    """Number of negative training queries per positive one."""

    hard_negative_fraction: UnitInterval = 0.0
    """Fraction, 0 to 1, of the negative training queries that are sampled from what the rules derive; the rest are
    uniform corruptions. Many derived negatives may be true facts held out for testing."""

    embed_dim: Size = 32
    """Dimension of the embeddings of constants, predicates and rules."""

    hidden_dim: Size = 64
    """Width of the hidden layers."""

    n_residual_blocks: NonNegativeInt = 0
    """Number of residual blocks applied to the state vector."""

    memory_share: Share = 1.0
    """Share of the largest chunks of firings, and of the evidence of a validation, that are held at once. `funcppo
    train` lowers it where its memory is small (--memory)."""

    max_atoms: PositiveInt = 5_000_000
    """Maximum number of derived atoms (T_P) to hold; if height 1 exceeds it, training uses a sample of the derived
    atoms, and a larger prover.max_height is an error."""

    smoothing: NonNegativeFloat | Literal["auto"] | None = None
    """Pseudo-count of wrong predictions added to each rule's leave-one-out body count before its confidence is
    computed. None: plain counts, without leave-one-out; auto: the one of None, 5 and 20 that ranks the valid split
    best."""

    object_identity: bool | Literal["auto"] = False
    """Bind the variables of a rule to different constants, none of which the rule names (object identity, as AnyBURL
    counts). auto: what ranks the valid split best."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class ProofSettings(NamedTuple):
    """What counts as a proof, and how confidences are counted."""

    max_height: int
    smoothing: float | None
    object_identity: bool


def proof_settings(cfg: ProverTaskConfig) -> ProofSettings:
    """Return the settings of a config in which nothing is left to choose.

    Raises:
      ValueError: a setting is not chosen yet; the message names it.
    """
    if cfg.max_height is None:
        raise ValueError("max_height: expected a height, got none")
    if cfg.smoothing == "auto":
        raise ValueError("smoothing: expected a number or None, got auto")
    if cfg.object_identity == "auto":
        raise ValueError("object_identity: expected true or false, got auto")
    return ProofSettings(cfg.max_height, cfg.smoothing, cfg.object_identity)
