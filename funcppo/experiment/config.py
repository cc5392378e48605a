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

    dataset: str
    """Data set: an embedded name (countries_s1, countries_s2, countries_s3, family_tree:PEOPLE:SEED), a folder with
    train.txt, or a Prolog program FILE.pl."""
    rules: str | None = None
    """Rule file to use instead of the data set's own rules; None: the data set's."""
    steps: int = 120_000
    """Total number of environment steps, rounded up to whole rollouts."""
    seed: int = 0
    """Random seed of the initial weights, the training queries and the actions."""
    device: str = "cpu"
    """Device to train on: cpu or cuda."""
    strategy: str = "auto"
    """How the training step is executed: auto, one-graph, two-graphs, forward or eager."""
    precision: Literal["highest", "high", "bfloat16"] = "highest"
    """Precision of matrix products: highest (float32), high (TF32) or bfloat16."""
    score: Literal["auto", "success", "best-proof"] = "auto"
    """How the policy scores a candidate: success, best-proof, or auto (the better of the two on the valid split)."""
    n_validations: int = 12
    """Number of evaluations on the valid split during training; the best parameters are kept."""
    n_validation_queries: int = 1000
    """Number of valid queries ranked at each validation, sampled evenly over relations."""
    max_nonfinite_updates: int = 5
    """Number of consecutive updates with a non-finite loss or gradient after which the run stops."""
    prover: ProverTaskConfig = ProverTaskConfig()
    """Settings of the proof search and of the prover network."""
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
    """Settings of proximal policy optimisation (PPO)."""

    def __post_init__(self) -> None:
        """Errors: ValueError naming the field."""
        for name in ("steps", "n_validations", "n_validation_queries", "max_nonfinite_updates"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: want 1 or more")
