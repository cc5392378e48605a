"""TODO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from funcppo.config import PPOConfig, Schedule
from funcppo.prover.config import ProverTaskConfig

if TYPE_CHECKING:
    pass

# Files in the folder of a run.
CONFIG_FILE = "config.json"
CHECKPOINT_FILE = "checkpoint.npz"
METRICS_FILE = "metrics.jsonl"
RESULTS_FILE = "results.json"
MINED_RULES_FILE = "rules.tsv"

@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One training run on a data set; what `config.json` in its folder holds."""

    dataset: str  # an embedded name, a folder or a program
    rules: str | None = None  # a rule file in place of the data set's own
    steps: int = 120_000  # environment steps; rounded up to whole rollouts
    seed: int = 0
    device: str = "cpu"
    strategy: str = "auto"  # how a training step is run; auto takes the fastest that works here
    precision: Literal["highest", "high", "bfloat16"] = "highest"  # of matrix products: float32, TF32, bfloat16
    score: Literal["auto", "success", "best-proof"] = "auto"  # auto takes the better of the two on valid
    n_validations: int = 12  # looks at the valid split while training; the params of the best one are kept
    n_validation_queries: int = 1000  # valid queries ranked at each, drawn evenly over relations
    max_nonfinite_updates: int = (
        5  # updates in a row with a loss or gradient that is not finite, after which the run stops
    )
    prover: ProverTaskConfig = ProverTaskConfig()
    ppo: PPOConfig = PPOConfig(
        n_envs=256,
        n_steps=8,
        n_epochs=2,
        n_minibatches=4,
        learning_rate=1e-3,
        learning_rate_schedule=Schedule(kind="linear"),
        entropy_coef=0.3,  # of the entropy relative to the prior: how far what is learnt may move the confidences
        advantage_ddof=None,  # rewards are of order 1 already, and the weight above is in their unit
    )

    def __post_init__(self) -> None:
        """Errors: ValueError naming the field."""
        for name in ("steps", "n_validations", "n_validation_queries", "max_nonfinite_updates"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: want 1 or more")
