"""A training run in memory: its settings, its task, and the state that its checkpoint holds."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo import checkpoint, metrics_log, train_step
from funcppo.config import Config, PPOConfig
from funcppo.core import random
from funcppo.core.types import F32, I64
from funcppo.kg.run import question_run
from funcppo.kg.run.config import (
    CHECKPOINT_FILE,
    PREVIOUS_CHECKPOINT_FILE,
    Note,
    RunConfig,
)
from funcppo.kg.run.question_run import QuestionSetup, ValidEvidence
from funcppo.kg.scores import bellman_ford, link_embedding, network_prior
from funcppo.kg.search import task as prover_task
from funcppo.kg.search.beam_search import ScoreName
from funcppo.kg.search.slot_scheduler import SearchStep
from funcppo.kg.search.task import ProverTask
from funcppo.train_step import TrainState

# environment steps of a run that sets none
DEFAULT_STEPS = 120_000
# How the policy of a run may score candidates: one that searches proofs, and one that answers questions.
PROOF_SCORES: tuple[ScoreName, ...] = ("success", "best-proof")
DefaultScoreReason = Literal[
    "not-compared",
    "policy-not-validated",
    "policy-ranks-valid-no-worse",
    "rules-rank-valid-better",
]
# reasons to rank by the rule score
RULE_SCORE_REASONS = ("policy-not-validated", "rules-rank-valid-better")
RunScore = ScoreName | Literal["evidence"]
EVIDENCE_SCORE: Literal["evidence"] = "evidence"


class RunState(NamedTuple):
    """The contents of a checkpoint: the training state, and the best parameters on the valid split so far."""

    train_state: TrainState
    start_params: Any  # the parameters before the first update
    best_params: Any
    # their metric on valid: MRR, or AUC-PR for Countries; -1 before any
    best_valid_metric: F32[Tensor, ""]
    # number of the update that gave them; 0: the initial ones
    best_update: I64[Tensor, ""]
    # without models where candidates have no prior
    embedding: link_embedding.Params
    # of a Bellman-Ford network, which there may not be
    bellman_ford: bellman_ford.Params


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A training run in memory, at its start or at a checkpoint."""

    run_config: RunConfig
    """The settings, as in config.json."""

    task: ProverTask
    """The data set and what is computed from it."""

    cfg: Config
    """Algorithm, environment and network."""

    score: RunScore
    """How the policy scores candidates."""

    state: RunState
    """Where training stands."""

    notes: tuple[Note, ...]
    """What was chosen or left out, one line each."""

    search_step: SearchStep
    """A step of the search for scores, as it runs on the run's device."""

    n_validation_queries: int
    """How many valid queries a validation ranks."""

    pending_row: metrics_log.Row | None
    """The line of the metrics log that waits for the validation of the present parameters; None if none is due."""

    questions: QuestionSetup | None = None
    """The evidence that a run weighs which learns from questions; None for one that searches proofs."""

    valid_evidence: ValidEvidence | None = None
    """The evidence of the queries of a validation; None where a run searches proofs or is not trained."""

    rule_metric: float | None = None
    """Metric on valid of the rule score that the policy is compared with; None where they are not compared."""

    rule_margin: float = 0.0
    """What the rule score must rank valid better by to be the default: more than chance gives where valid is small."""

    @property
    def default_score(self) -> str:
        """The rule score where it ranks valid better by more than the margin, otherwise the policy's."""
        if self.default_score_reason in RULE_SCORE_REASONS:
            return self.run_config.rule_score
        return self.score

    @property
    def default_score_reason(self) -> DefaultScoreReason:
        """Why the default score is the one that it is."""
        if self.rule_metric is None:
            return "not-compared"
        policy = float(self.state.best_valid_metric)
        if policy < 0:  # the time of the run ended before its first validation
            return "policy-not-validated"
        # The metric of the policy is rounded to float32.
        if float(np.float32(self.rule_metric)) > policy + self.rule_margin:
            return "rules-rank-valid-better"
        return "policy-ranks-valid-no-worse"


def ppo_config(run_config: RunConfig) -> PPOConfig:
    """PPO with the number of updates that the environment steps of the run make."""
    ppo = run_config.ppo
    steps = run_config.steps or DEFAULT_STEPS
    n_updates = math.ceil(steps / (ppo.n_envs * ppo.n_steps))
    return dataclasses.replace(ppo, n_updates=n_updates)


def learner_config(run_config: RunConfig, task: ProverTask) -> Config:
    """The learner's configuration, with the number of updates that the environment steps of the run make."""
    return prover_task.build_config(
        task,
        ppo_config(run_config),
        matmul_dtype=torch.bfloat16
        if run_config.precision == "bfloat16"
        else None,
    )


def initial_train_state(
    cfg: Config, task: ProverTask, run_config: RunConfig
) -> TrainState:
    """The training state before the first update."""
    world = prover_task.training_world(task)
    key = random.key(run_config.seed, run_config.device)
    return train_step.init(cfg, world, key)


def initial_run_state(
    train_state: TrainState,
    embedding: link_embedding.Params | None = None,
    network: bellman_ford.Params | None = None,
) -> RunState:
    """The state before the first validation.

    Args:
      embedding: what gives candidates a prior; None for nothing.
      network: a Bellman-Ford network that does; None for none.
    """
    device = train_state.update.device
    if embedding is None:
        embedding = link_embedding.without_models(device)
    if network is None:
        network = network_prior.without_network(device)
    return RunState(
        train_state=train_state,
        start_params=train_state.params,
        best_params=train_state.params,
        best_valid_metric=torch.full(
            (), -1.0, dtype=torch.float32, device=device
        ),
        best_update=torch.zeros((), dtype=torch.int64, device=device),
        embedding=embedding,
        bellman_ford=network,
    )


def training_world(run: Run) -> Any:
    """What the training step reads and never writes."""
    if run.questions is None:
        return prover_task.training_world(run.task)
    return question_run.training_world(run.questions, run.run_config.device)


def last_logged_update(run: Run) -> int:
    """Return the last update that the metrics log has a complete line for; -1 before the first validation."""
    update = int(run.state.train_state.update)
    return update if run.pending_row is None else update - 1


def save_checkpoint(run: Run, folder: Path) -> None:
    """Write the state of a run to its folder, and keep the checkpoint before."""
    meta = {
        "fingerprint": run.task.dataset.fingerprint,
        "score": run.score,
        "rule_metric": run.rule_metric,
        "rule_margin": run.rule_margin,
        "pending_row": run.pending_row,
        "notes": [(note.kind, note) for note in run.notes],
    }
    checkpoint.save(
        folder / CHECKPOINT_FILE, run.state, meta, PREVIOUS_CHECKPOINT_FILE
    )


def saved_update(folder: Path) -> int:
    """Return the number of the last update that the checkpoint of a run holds."""
    path, _ = find_checkpoint(folder)
    return int(checkpoint.read(path).arrays["train_state.update"])


def find_checkpoint(folder: Path) -> tuple[Path, list[str]]:
    """Return the latest checkpoint of a run that can be read, and a note if it is not the last one written."""
    return checkpoint.find_readable(
        folder / CHECKPOINT_FILE, PREVIOUS_CHECKPOINT_FILE
    )


def repair_checkpoint(folder: Path) -> list[str]:
    """Put the previous checkpoint of a run in the place of one that is missing or damaged; a note if it is so.

    Raises:
      DamagedCheckpointError: neither can be read.
    """
    path, notes = find_checkpoint(folder)
    # Saving would rename the damaged one over the only good one.
    if notes:
        path.replace((folder / CHECKPOINT_FILE).resolve())
    return notes
