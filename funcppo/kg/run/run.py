"""A training run in memory: its settings, its task, the evidence that it weighs, and the state of its checkpoint."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo import checkpoint, logs, train_step
from funcppo.config import Config, PPOConfig
from funcppo.core import random, tree
from funcppo.core.settings import Size, UnitInterval
from funcppo.core.types import F32, F64, I64
from funcppo.kg.logic.derive import LeftOut
from funcppo.kg.ranking import ranking, scoring
from funcppo.kg.ranking.ranking import Ranking, RankingProtocol
from funcppo.kg.ranking.scoring import QuestionEvidence
from funcppo.kg.run.config import (
    CHECKPOINT_FILE,
    PREVIOUS_CHECKPOINT_FILE,
    Note,
    RunConfig,
)
from funcppo.kg.scores import (
    aggregation,
    evidence,
    link_embedding,
    path_network,
    questions,
)
from funcppo.kg.scores.aggregation import (
    AggregationConfig,
    AggregationWorld,
    Capacity,
)
from funcppo.kg.scores.evidence import Evidence, FactIndex
from funcppo.kg.scores.learned import LearnedScore, Weights
from funcppo.kg.scores.path_network import PathNetwork
from funcppo.kg.scores.question_config import (
    QuestionConfig,
)
from funcppo.kg.scores.questions import Params, PolicyConfig, QuestionWorld
from funcppo.kg.scores.score import Score, parse
from funcppo.kg.search import task as prover_task
from funcppo.kg.search.beam_search import ScoreName
from funcppo.kg.search.slot_scheduler import (
    SearchStep,
)
from funcppo.kg.search.task import (
    ProverTask,
    with_answers,
)
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
# standard errors that the fit must gain on valid
MIN_GAIN_ERRORS = 2.0
# Of fewer valid triples small gains and losses are mostly chance: only those above two standard errors count.
MIN_VALID_TRIPLES = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstEpoch:
    """Settings of the first epoch of a listwise fit, which takes questions in the order of their list."""

    batch_size: Size
    """Number of questions of a gradient step."""
    max_size_quantile: UnitInterval
    """Questions with more firings than this share of their group are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionSetup:
    """The evidence of a task, on its device, and the policy that weighs it."""

    facts: FactIndex
    """Index of the facts."""
    aggregation: AggregationWorld
    """What the score reads beside evidence."""
    policy: PolicyConfig
    """Which evidence is weighed; its capacity is that of the questions, where there are some."""
    world: QuestionWorld | None = None
    """The questions to learn from; None before they are listed."""
    first_epoch: FirstEpoch | None = None
    """The first epoch of a listwise fit, if it is in the order of the list."""


class ValidQuality(NamedTuple):
    """How well some weights rank valid."""

    metric: float  # larger is better
    reciprocal_rank: F64[Tensor, "Q"]  # of each query and side


def set_up(task: ProverTask, cfg: QuestionConfig) -> QuestionSetup:
    """Index the facts of a task of height 1.

    Args:
      cfg: degrees, walks and priors that are left open are not weighed, and odds start with power 1. Evidence has the
        probabilities of walks unless these are off.
    """
    facts = evidence.index_facts(
        task.kb,
        task.sizes,
        task.cfg.memory_share,
        with_walks=cfg.walks is not False,
        plan=task.answers_plan,
    )
    world = aggregation.make_world(task.kb, task.sizes, facts)
    weighed = AggregationConfig(
        sizes=task.sizes,
        n_shapes=aggregation.n_shapes(world),
        uses_links=cfg.links,
        uses_degrees=cfg.degrees is True,
        uses_walks=cfg.walks is True,
        uses_embedding=cfg.embedding is True,
        uses_bellman_ford=cfg.bellman_ford is True,
        odds_power=1.0 if cfg.odds_power == "auto" else cfg.odds_power,
    )
    return QuestionSetup(
        facts=facts,
        aggregation=world,
        policy=PolicyConfig(aggregation=weighed, capacity=Capacity(1, 1, 1)),
    )


def question_world(setup: QuestionSetup, device: str) -> QuestionWorld:
    """The questions, or a stand-in for them: the shapes of the training state are the same."""
    if setup.world is not None:
        return setup.world
    world = questions.blank_world(setup.aggregation)
    return tree.map(lambda x: x.to(device), world)


def untrained_params(setup: QuestionSetup, device: str) -> Params:
    """The weights that add the odds of the rule confidences, each to the power of the settings."""
    return questions.init(setup.policy, random.key(0, device))


def reweigh(policy: PolicyConfig, **settings: bool | float) -> PolicyConfig:
    """The policy with other settings of its aggregation."""
    aggregation = dataclasses.replace(policy.aggregation, **settings)
    return dataclasses.replace(policy, aggregation=aggregation)


def with_weights_of(
    setup: QuestionSetup, **settings: bool | float
) -> QuestionSetup:
    """The setup with a policy of other settings of its aggregation, such as uses_walks or odds_power."""
    return dataclasses.replace(setup, policy=reweigh(setup.policy, **settings))


def make_weights(
    task: ProverTask,
    setup: QuestionSetup,
    params: Params,
    left_out: LeftOut = "fact",
) -> Weights:
    """Given weights with what the score reads beside evidence.

    Args:
      left_out: what a question about a known fact leaves out, as in training.
    """
    device = setup.facts.degree.device
    return Weights(
        facts=setup.facts,
        cfg=setup.policy.aggregation,
        world=setup.aggregation,
        params=tree.map(lambda x: x.to(device), params.score),
        left_out=left_out,
        smoothing=float(task.cfg.smoothing or 0.0),
    )


class ValidEvidence:
    """The evidence of the queries that every validation ranks, collected once.

    Attributes:
      queries: the queries [Q, W].
      task: the task with all their answers.
    """

    def __init__(
        self,
        task: ProverTask,
        facts: FactIndex,
        queries: np.ndarray,
        sides: Sequence[int],
    ) -> None:
        self.queries = queries
        atoms = torch.from_numpy(np.ascontiguousarray(queries))
        self._parts: Mapping[int, list[QuestionEvidence]] = {
            side: list(scoring.query_evidence(task, facts, atoms, side))
            for side in sides
        }
        # The candidates that have evidence are the answers that rules derive.
        derived = [
            scoring.evidence_atoms(part, task.sizes)
            for parts in self._parts.values()
            for part in parts
        ]
        self.task = with_answers(task, atoms, sides, torch.cat(derived))
        self._listed = ranking.list_split(
            self.task,
            queries,
            RankingProtocol(sides=tuple(sides)),
            by_side=True,
        )

    def with_embedding(self, embedding: link_embedding.Params) -> ValidEvidence:
        """The evidence with priors by link embeddings."""
        return self._map(
            lambda part: evidence.with_embedding_scores(part, embedding, "fact")
        )

    def with_network(self, network: PathNetwork) -> ValidEvidence:
        """The evidence with priors by a Bellman-Ford network."""
        return self._map(
            lambda part: evidence.with_path_scores(part, network, "fact")
        )

    def with_other_facts(self, task: ProverTask) -> ValidEvidence:
        """The evidence with the counts of other facts of a task."""
        changed = copy.copy(self)
        changed.task = dataclasses.replace(
            self.task, other_facts=task.other_facts
        )
        return changed

    def _map(self, change: Callable[[Evidence], Evidence]) -> ValidEvidence:
        """The evidence with a change in every part."""
        changed = copy.copy(self)
        changed._parts = {
            side: [
                part._replace(evidence=change(part.evidence)) for part in parts
            ]
            for side, parts in self._parts.items()
        }
        return changed

    @property
    def n_questions(self) -> int:
        """The number of distinct questions."""
        return sum(
            len(part.evidence.label)
            for parts in self._parts.values()
            for part in parts
        )

    def rank(self, setup: QuestionSetup, params: Params) -> Ranking:
        """The queries, ranked by given weights."""
        weights = make_weights(self.task, setup, params)
        return self._rank_by(LearnedScore("evidence", weights))

    def rank_by_rules(self, name: str) -> Ranking:
        """The queries, ranked by a rule score, such as noisy-or."""
        return self._rank_by(parse(name))

    def _rank_by(self, score: Score) -> Ranking:
        """The queries, ranked by a score of their evidence."""
        score_atoms = partial(
            scoring.score_collected, self.task, self._parts, score
        )
        return ranking.rank_listed(self._listed, score_atoms)


def has_few_valid(task: ProverTask) -> bool:
    """Whether valid is so small that only differences above two standard errors count.

    False without valid, and for Countries, whose metric is no mean over queries.
    """
    n_triples = len(task.dataset.valid)
    return not task.is_countries and 0 < n_triples < MIN_VALID_TRIPLES


def is_better(quality: ValidQuality, other: ValidQuality) -> bool:
    """Whether the mean gain in reciprocal rank is above two standard errors of it, which pairs the queries.

    The best of some 16 epochs gains a standard error or more by chance alone.
    """
    gain = quality.reciprocal_rank - other.reciprocal_rank
    error = gain.std() / len(gain) ** 0.5
    return bool(gain.mean() > MIN_GAIN_ERRORS * error)


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
    bellman_ford: path_network.Params


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

    pending_row: logs.Row | None
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
    network: path_network.Params | None = None,
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
        network = path_network.without_network(device)
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
    return question_world(run.questions, run.run_config.device)


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
    return int(checkpoint.read(path)[0]["train_state.update"])


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
