"""TODO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class ProverTaskConfig:
    """What a data set does not fix about learning to prove its facts."""

    max_height: int | None = None  # rule applications on a branch of a proof; None chooses by the valid split
    max_depth: int = 20  # resolution steps of one search
    max_successors: int | None = None  # None: as many as a search can meet, so that none is dropped
    reward: Literal["proof", "signed", "balanced"] = "balanced"
    fact_selection: Literal["auto", "policy", "oracle"] = (
        "auto"  # whether the policy picks facts too; auto: above height 1
    )
    negatives_per_positive: float = 1.0  # training negatives for each positive
    hard_negative_fraction: float = 0.0  # share of them that the rules derive; many of those may be true
    embed_dim: int = 32
    hidden_dim: int = 64
    n_residual_blocks: int = 0  # residual layers that the state passes
    max_atoms: int = 5_000_000  # atoms of T_P held at most
    smoothing: float | None = None  # wrong pairs added to each rule's leave-one-out counts; None: its plain counts
    object_identity: bool = False  # different variables of a rule bind different constants

    def __post_init__(self) -> None:
        """Errors: ValueError naming the field."""
        for name in ("max_height", "max_depth", "max_successors", "embed_dim", "hidden_dim", "max_atoms"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value}: want 1 or more")
        if self.n_residual_blocks < 0:
            raise ValueError(f"n_residual_blocks={self.n_residual_blocks}: want 0 or more")
        if not 0.0 <= self.hard_negative_fraction <= 1.0:
            raise ValueError(f"hard_negative_fraction={self.hard_negative_fraction}: want a share from 0 to 1")
        if self.negatives_per_positive < 0.0:
            raise ValueError(f"negatives_per_positive={self.negatives_per_positive}: want 0 or more")
        if self.smoothing is not None and self.smoothing < 0.0:
            raise ValueError(f"smoothing={self.smoothing}: want 0 or more")
