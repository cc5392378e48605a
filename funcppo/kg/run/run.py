"""Training run in memory: its settings, its task, the evidence that it weighs, and the state of its checkpoint.

`build_run` makes one before its first update, `resume_run` opens one at its last checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo import checkpoint, logs, train_step
from funcppo.config import Config, PPOConfig
from funcppo.core import random
from funcppo.core.files import shorten
from funcppo.core.host import NO_DEADLINE, Deadline
from funcppo.core.types import F32, I64
from funcppo.kg.config import (
    CHECKPOINT_FILE,
    MAX_VALID_FIRINGS,
    PREVIOUS_CHECKPOINT_FILE,
    Note,
    RunConfig,
    read_config,
)
from funcppo.kg.graph import loaders
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.logic.derive import RulePlan
from funcppo.kg.ranking import ranking, scoring
from funcppo.kg.ranking.ranking import (
    RankingProtocol,
    random_rows,
    ranked_sides,
)
from funcppo.kg.run import fit
from funcppo.kg.run.budget import Choice
from funcppo.kg.run.fit import QuestionSetup, ValidEvidence
from funcppo.kg.scores import link_embedding, path_network
from funcppo.kg.scores.learned import QuestionParams
from funcppo.kg.scores.score import parse
from funcppo.kg.search import task as prover_task
from funcppo.kg.search.beam import ScoreName, SearchStep
from funcppo.kg.search.task import PhaseCallback, ProverTask, ignore_phase
from funcppo.train_step import TrainState

# environment steps of a run that sets none
DEFAULT_STEPS = 120_000
# How the policy of a run may score candidates: one that searches proofs, and one that answers questions.
PROOF_SCORES: tuple[ScoreName, ...] = ("success", "best-proof")
EVIDENCE_SCORE: Literal["evidence"] = "evidence"
RunScore = ScoreName | Literal["evidence"]
DefaultScoreReason = Literal[
    "not-compared",
    "policy-not-validated",
    "policy-ranks-valid-no-worse",
    "rules-rank-valid-better",
]
# A validation by search ranks fewer queries if it would compute more successors than this, by a rough count, but not
# fewer than the minimum.
MAX_VALIDATION_SUCCESSORS = 1_000_000
MIN_VALIDATION_QUERIES = 20
# of a search, before it is tuned for the machine
BEAM_WIDTH = 64


class RunState(NamedTuple):
    """Contents of a checkpoint: the training state, and the best parameters on the valid split so far."""

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
    """Training run in memory, at its start or at a checkpoint."""

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
    """What was chosen by other means than valid or left out, one line each."""

    search_step: SearchStep
    """A step of the search for scores, as it runs on the run's device."""

    n_validation_queries: int
    """How many valid queries a validation ranks."""

    pending_row: logs.Row | None
    """The line of the metrics log that waits for the validation of the present parameters; None if none is due."""

    choices: tuple[Choice, ...] = ()
    """What valid decided before the first update, in order."""

    questions: QuestionSetup | None = None
    """The evidence that a run weighs which learns from questions; None for one that searches proofs."""

    valid_evidence: ValidEvidence | None = None
    """The evidence of the queries of a validation; None where a run searches proofs or is not trained."""

    rule_metric: float | None = None
    """Metric on valid of the rule score that the policy is compared with; None where they are not compared."""

    rule_margin: float = 0.0
    """What the rule score must rank valid better by to be the default: more than chance gives where valid is small."""

    @property
    def validation_interval(self) -> int:
        """Return the number of updates from one validation to the next."""
        return max(1, self.cfg.ppo.n_updates // self.run_config.n_validations)

    @property
    def stopped_early(self) -> bool:
        """Return whether training ends early because so many validations in a row have not ranked valid better."""
        patience = self.run_config.early_stop_validations
        if patience is None or self.pending_row is not None:
            return False
        if not len(self.task.dataset.valid):
            return False
        interval = self.validation_interval
        update = int(self.state.train_state.update)
        best_update = int(self.state.best_update)
        return update // interval - best_update // interval >= patience

    @property
    def is_finished(self) -> bool:
        """Return whether the run has made its last update or was stopped early."""
        update = int(self.state.train_state.update)
        return update >= self.cfg.ppo.n_updates or self.stopped_early

    @property
    def default_score(self) -> str:
        """Return the name of the score that ranks answers by default.

        It is the rule score if it ranks valid better by more than the margin or the policy was not validated, else the
        policy's."""
        if self.default_score_reason in (
            "policy-not-validated",
            "rules-rank-valid-better",
        ):
            return self.run_config.rule_score
        return self.score

    @property
    def default_score_reason(self) -> DefaultScoreReason:
        """Return the reason for the default score."""
        if self.rule_metric is None:
            return "not-compared"
        policy = float(self.state.best_valid_metric)
        if policy < 0:  # the time of the run ended before its first validation
            return "policy-not-validated"
        # The metric of the policy is rounded to float32.
        if float(np.float32(self.rule_metric)) > policy + self.rule_margin:
            return "rules-rank-valid-better"
        return "policy-ranks-valid-no-worse"


def has_few_valid(task: ProverTask) -> bool:
    """Return whether valid is so small, below 500 triples, that only gains above two standard errors count.

    False without valid, and for Countries, whose metric is no mean over queries.
    """
    n_triples = len(task.dataset.valid)
    return not task.is_countries and 0 < n_triples < 500


# -- before the first update


def build_run(
    run_config: RunConfig,
    dataset: Dataset,
    on_phase: PhaseCallback = ignore_phase,
    deadline: Deadline = NO_DEADLINE,
    plan: RulePlan | None = None,
) -> Run:
    """Build a run before its first update, without a chosen score and without listed questions.

    Args:
      deadline: of what the rules derive at a height above 1.
      plan: as in `build_task`.

    Raises:
      ValueError: see `build_task`; or questions are to be learnt from at a height above 1.
    """
    prover, asks = run_config.prover, run_config.learner == "questions"
    if asks and prover.max_height != 1:
        raise ValueError(
            f"learner questions: expected height 1, got {prover.max_height}"
        )
    task = prover_task.build_task(
        dataset,
        prover,
        run_config.device,
        on_phase,
        with_derivations=not asks,
        deadline=deadline,
        plan=plan,
    )
    rule_score = parse(run_config.rule_score)
    task = scoring.with_score_counts(task, rule_score, on_phase)
    of_data = frozenset(task.dataset.notes)
    notes = [
        Note("data" if text in of_data else "cut", text) for text in task.notes
    ]

    setup, embedding, network = None, None, None
    n_queries = run_config.n_validation_queries
    if asks:
        setup = fit.set_up(task, run_config.questions)
        cfg = fit.question_learner(setup.policy, ppo_config(run_config))
        world = fit.question_world(setup)
        embedding, network = fit.blank_priors(
            task, setup.policy.aggregation, run_config
        )
        n_queries = min(n_queries or len(dataset.valid), len(dataset.valid))
    else:
        cfg = proof_learner(run_config, task)
        world = prover_task.training_world(task)
        n_wanted = min(n_queries or 1000, len(dataset.valid))
        n_queries = _count_validation_queries(task, cfg, n_wanted)
        if n_queries < n_wanted:
            note = (
                f"a validation ranks {n_queries} of {len(dataset.valid)} valid queries: more would compute over "
                f"{_max_validation_successors(task):,} successors"
            )
            notes.append(Note("cut", note))
    return Run(
        run_config=run_config,
        task=task,
        cfg=cfg,
        score="best-proof" if setup is None else EVIDENCE_SCORE,
        state=_initial_state(
            init_train_state(run_config, cfg, world), embedding, network
        ),
        notes=tuple(notes),
        search_step=scoring.make_search_step(run_config.device),
        n_validation_queries=n_queries,
        pending_row={"update": 0},
        questions=setup,
    )


def ppo_config(run_config: RunConfig) -> PPOConfig:
    """Return PPO's settings with the number of updates that the run's environment steps make."""
    ppo = run_config.ppo
    steps = run_config.steps or DEFAULT_STEPS
    n_updates = math.ceil(steps / (ppo.n_envs * ppo.n_steps))
    return replace(ppo, n_updates=n_updates)


def proof_learner(run_config: RunConfig, task: ProverTask) -> Config:
    """Return the configuration of PPO on proofs, with as many updates as the run's environment steps make."""
    is_rounded = run_config.precision == "bfloat16"
    return prover_task.build_config(
        task,
        ppo_config(run_config),
        matmul_dtype=torch.bfloat16 if is_rounded else None,
    )


def init_train_state(
    run_config: RunConfig, cfg: Config, world: Any
) -> TrainState:
    """Return the training state before the first update."""
    key = random.key(run_config.seed, run_config.device)
    return train_step.init(cfg, world, key)


def _initial_state(
    train_state: TrainState,
    embedding: link_embedding.Params | None,
    network: path_network.Params | None,
) -> RunState:
    """Return the run's state before the first validation, with the models of priors, None for no such model."""
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


def at_start(run: Run, setup: QuestionSetup, params: QuestionParams) -> Run:
    """Return the run before its first update, starting from given weights and listed questions."""
    run = _with_questions(run, setup, params)
    state = init_train_state(run.run_config, run.cfg, training_world(run))
    network = setup.facts.network
    state = _initial_state(
        state._replace(params=params),
        setup.facts.embedding,
        None if network is None else network.params,
    )
    return replace(run, state=state)


def _with_questions(
    run: Run, setup: QuestionSetup, start_params: QuestionParams
) -> Run:
    """Return the run prepared for PPO over questions from given starting parameters."""
    cfg = fit.question_learner(setup.policy, ppo_config(run.run_config))
    setup = fit.with_prior_score(setup, start_params)
    return replace(run, questions=setup, cfg=cfg)


def with_training_data(
    run: Run,
    on_phase: PhaseCallback = ignore_phase,
    *,
    for_validation: bool = True,
) -> Run:
    """Return the run with the data that an update and a validation read; questions are listed again if missing."""
    setup, config = run.questions, run.run_config
    if setup is None:
        return run
    if setup.world is None:
        setup, *_ = fit.list_questions(
            run.task, setup, config.questions, config.seed, on_phase
        )
        run = _with_questions(run, setup, run.state.start_params)
    return with_valid_evidence(run) if for_validation else run


def training_world(run: Run) -> Any:
    """Return the environment's tensors, which the training step reads and never writes."""
    if run.questions is None:
        return prover_task.training_world(run.task)
    return fit.question_world(run.questions)


# -- the queries of a validation


def validation_queries(run: Run) -> np.ndarray:
    """Return the valid queries that every validation ranks, in their order: a fixed random sample."""
    valid = run.task.dataset.valid
    rows = random_rows(len(valid), run.n_validation_queries)
    return valid[np.sort(rows)]


def _count_validation_queries(
    task: ProverTask, cfg: Config, n_wanted: int
) -> int:
    """Return how many valid queries a validation of proofs ranks: `n_wanted`, or fewer to keep within its bound."""
    if not n_wanted:
        return 0
    valid = task.dataset.valid
    queries = valid[random_rows(len(valid), n_wanted)]
    protocol = RankingProtocol(sides=ranked_sides(task))
    n_candidates = ranking.count_candidates(task, queries, protocol)
    n_successors = cfg.env.cfg.resolve.max_successors
    if task.fact_selection != "oracle":
        n_successors = count_search_successors(n_successors, task.max_height)
    most = _max_validation_successors(task)
    share = most / max(1, n_candidates * n_successors)
    if share >= 1:
        return n_wanted
    return max(int(n_wanted * share), min(MIN_VALIDATION_QUERIES, n_wanted))


def _max_validation_successors(task: ProverTask) -> int:
    """Return how many successors a validation may compute; rules alone take under a microsecond each."""
    factor = 10 if task.fact_selection == "oracle" else 1
    return factor * MAX_VALIDATION_SUCCESSORS


def count_search_successors(max_successors: int, height: int) -> int:
    """Estimate the successors in the search for one candidate: those of its partial proofs, at every step."""
    n_proofs = min(BEAM_WIDTH, max_successors)
    return n_proofs * max_successors * 3 * height  # three steps for a height


def with_valid_evidence(run: Run, seconds: float = math.inf) -> Run:
    """Return the run with the evidence of its validation's queries, of which fewer may be kept.

    Args:
      seconds: that it may take; fewer queries are a setting of the run then.
    """
    setup, valid = run.questions, run.task.dataset.valid
    if setup is None or run.valid_evidence or not len(valid):
        return run
    queries = valid[random_rows(len(valid), run.n_validation_queries)]
    held = run.run_config.questions.max_valid_firings or MAX_VALID_FIRINGS
    max_rows = held * 25  # a minute or less on one core
    max_firings = int(held * run.task.cfg.memory_share)
    n_queries, needed_seconds = scoring.count_queries_within(
        run.task,
        setup.facts,
        queries,
        ranked_sides(run.task),
        max_firings,
        max_rows,
    )
    bound = f"have over {max_firings:,} firings or {max_rows:,} rows of joins"
    config = run.run_config
    if needed_seconds > seconds:
        n_within = int(n_queries * seconds / needed_seconds)
        # The first ones are collected already.
        n_queries = min(n_queries, max(scoring.PILOT_QUERIES, n_within))
        bound = f"take over {seconds:.0f} seconds (--seconds)"
        # A resumed run validates on the same ones.
        config = replace(config, n_validation_queries=n_queries)

    notes = run.notes
    if n_queries < len(queries):
        note = f"a validation ranks {n_queries:,} of {len(valid):,} valid queries: more would {bound}"
        notes = tuple(dict.fromkeys((*notes, Note("cut", note))))
    n_queries = min(n_queries, len(queries))
    run = replace(
        run, run_config=config, notes=notes, n_validation_queries=n_queries
    )
    collected = fit.collect_valid_evidence(
        run.task, setup.facts, validation_queries(run)
    )
    return replace(run, valid_evidence=collected)


# -- a run at its checkpoint


def open_run(
    folder: Path, device: str = "cpu", on_phase: PhaseCallback = ignore_phase
) -> Run:
    """Open the run in a folder at its last checkpoint, to evaluate or to resume it.

    Raises:
      ValueError: the folder holds no run, or its data set has changed since.
    """
    run_config = replace(read_config(folder), device=device)
    return resume_run(run_config, folder, on_phase)


def resume_run(
    run_config: RunConfig, folder: Path, on_phase: PhaseCallback = ignore_phase
) -> Run:
    """Build the run of the given settings and restore it from the last checkpoint in a folder.

    Raises:
      ValueError: the data set cannot be read or has changed, or the checkpoint does not belong to it.
    """
    on_phase("reading data")
    dataset = load_dataset_of(run_config, folder)
    path, damage_notes = find_checkpoint(folder)
    _check_unchanged(path, run_config, dataset)
    run = build_run(run_config, dataset, on_phase)
    state, meta = checkpoint.restore(path, run.state, dataset.fingerprint)
    _check_meta(
        path, meta, (EVIDENCE_SCORE,) if run.questions else PROOF_SCORES
    )

    setup = run.questions
    if setup is not None and link_embedding.n_models(state.embedding):
        setup = fit.with_embedding(setup, state.embedding, "fact")
    if setup is not None and path_network.is_network(state.bellman_ford):
        network = fit.make_network(run.task, state.bellman_ford)
        setup = fit.with_network(setup, network, "fact", run_config.seed)
    # What reads a run shows the notes on its task.
    task = replace(run.task, notes=(*run.task.notes, *damage_notes))
    return replace(
        run,
        task=task,
        questions=setup,
        score=meta["score"],
        state=state,
        notes=tuple(Note(kind, text) for kind, text in meta["notes"]),
        choices=tuple(Choice(**row) for row in meta.get("choices", ())),
        pending_row=meta["pending_row"],
        rule_metric=meta["rule_metric"],
        rule_margin=meta["rule_margin"],
    )


def load_dataset_of(run_config: RunConfig, folder: Path) -> Dataset:
    """Load the data set of a trained run; an error names the run's folder.

    Raises:
      ValueError: it is not where it was in training, or cannot be read.
    """
    try:
        return loaders.load(
            run_config.dataset, run_config.rules, cfg=run_config.data
        )
    except ValueError as error:
        raise ValueError(
            f"{folder}: the run needs its data set {shorten(run_config.dataset)} as in training: {error}"
        ) from None


def _check_unchanged(
    path: Path, run_config: RunConfig, dataset: Dataset
) -> None:
    """Raise ValueError unless the data set is the one that the checkpoint's run was trained on."""
    expected = checkpoint.read(path)[1].get("fingerprint")
    if expected != dataset.fingerprint:
        rules = "" if run_config.rules is None else f" or {run_config.rules}"
        raise ValueError(
            f"{path.parent}: the run was trained on other data: {run_config.dataset}{rules} has changed since; "
            f"expected fingerprint {expected}, got {dataset.fingerprint} ({len(dataset.train):,} train triples, "
            f"{dataset.n_constants:,} entities, {len(dataset.rules):,} rules)"
        )


def _check_meta(
    path: Path, meta: checkpoint.Meta, scores: tuple[RunScore, ...]
) -> None:
    """Raise ValueError unless the checkpoint's metadata has the expected fields and types."""
    checks: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "score": (f"one of {', '.join(scores)}", lambda x: x in scores),
        "pending_row": (
            "the metrics of an update",
            lambda x: x is None or logs.is_row(x),
        ),
        "rule_metric": (
            "a number from 0 to 1 or null",
            lambda x: x is None or (isinstance(x, float) and 0 <= x <= 1),
        ),
        "rule_margin": (
            "a number from 0 on",
            lambda x: isinstance(x, float) and x >= 0,
        ),
        "notes": (
            "pairs of a kind and a text",
            lambda x: (
                isinstance(x, list)
                and all(isinstance(note, list) and len(note) == 2 for note in x)
            ),
        ),
    }

    for name, (expected, is_valid) in checks.items():
        found = meta.get(name)
        if not is_valid(found):
            raise ValueError(
                f"{path}: {name}: expected {expected}, got {found!r}"
            )


def save_checkpoint(run: Run, folder: Path) -> None:
    """Write the state of a run to its folder, and keep the previous checkpoint."""
    meta = {
        "fingerprint": run.task.dataset.fingerprint,
        "score": run.score,
        "rule_metric": run.rule_metric,
        "rule_margin": run.rule_margin,
        "pending_row": run.pending_row,
        "notes": [(note.kind, note) for note in run.notes],
        "choices": [choice._asdict() for choice in run.choices],
    }
    checkpoint.save(
        folder / CHECKPOINT_FILE, run.state, meta, PREVIOUS_CHECKPOINT_FILE
    )


def last_logged_update(run: Run) -> int:
    """Return the last update that the metrics log has a complete line for; -1 before the first validation."""
    update = int(run.state.train_state.update)
    return update if run.pending_row is None else update - 1


def saved_update(folder: Path) -> int:
    """Return the number of the last update that the checkpoint of a run holds."""
    path, _ = find_checkpoint(folder)
    return int(checkpoint.read(path)[0]["train_state.update"])


def find_checkpoint(folder: Path) -> tuple[Path, list[str]]:
    """Return the latest readable checkpoint of a run, and a note if it is not the last one written."""
    return checkpoint.find_readable(
        folder / CHECKPOINT_FILE, PREVIOUS_CHECKPOINT_FILE
    )


def repair_checkpoint(folder: Path) -> list[str]:
    """Replace a missing or damaged checkpoint by the previous one; return notes on it, empty if nothing was wrong.

    Raises:
      DamagedCheckpointError: neither can be read.
    """
    path, notes = find_checkpoint(folder)
    # Saving would rename the damaged one over the only good one.
    if notes:
        path.replace((folder / CHECKPOINT_FILE).resolve())
    return notes
