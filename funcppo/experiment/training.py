"""A training run in a folder: train, validate, keep the best parameters, stop, and resume bit for bit.

run = prepare_run(run_config, folder, resume=False)     # or open_run(folder) for one that exists
step, note = prepare_train_step(run)
for run, metrics in train(run, folder, step, should_stop, monitor):
    ...
evaluate_policy(run, run.state.best_params, run.task.dataset.test, protocol)
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from funcppo import data, random, train_step, tree
from funcppo.config import Config, PPOConfig
from funcppo.data import Dataset
from funcppo.evaluation import (
    evidence_ranking,
    rank_metrics,
    ranking,
    scorers,
)
from funcppo.evaluation.beam_search import (
    ScoreName,
    SearchConfig,
    slots_for_rows,
)
from funcppo.evaluation.ranking import (
    RankingProtocol,
    ranked_sides,
    selection_metric,
    stratified_sample,
)
from funcppo.evaluation.settings_choice import (
    MIN_GAIN,
    HeightCandidate,
    SettingsChoice,
    check_rankable,
    choose_settings,
    describe_choice,
)
from funcppo.evaluation.slot_scheduler import (
    ProgressCallback,
    SchedulerState,
    SearchStep,
    ignore_progress,
)
from funcppo.experiment import (
    checkpoint,
    metrics_log,
    question_run,
    question_training,
)
from funcppo.experiment.capacity import with_capacity
from funcppo.experiment.config import (
    CHECKPOINT_FILE,
    METRICS_FILE,
    RunConfig,
    read_config,
)
from funcppo.experiment.question_run import (
    QuestionSetup,
    ValidEvidence,
    ValidQuality,
)
from funcppo.experiment.stored_height import with_stored_height
from funcppo.logic import resolve
from funcppo.prover import task as prover_task
from funcppo.prover.question_config import QuestionConfig
from funcppo.prover.task import PhaseCallback, ProverTask, ignore_phase
from funcppo.runtime import compile as compilation
from funcppo.runtime.capture import CapturedStep, capture
from funcppo.runtime.compile import StrategyRecord, with_capture
from funcppo.runtime.equivalence import BF16_TOLERANCE, DEFAULT_TOLERANCE
from funcppo.runtime.graphed import capture_loop_bodies
from funcppo.train_step import EAGER_PARTS, Metrics, TrainState
from funcppo.types import F32, I64

# it imports Dynamo, which the evaluation of a run does without
if TYPE_CHECKING:
    from funcppo.runtime.monitor import Monitor

# Rollout steps and minibatch updates from which a run is long enough to be compiled. Compiling takes a minute or two,
# and saves 1.5 ms on each of them on a GPU, 8 ms on a CPU.
COMPILE_MIN_CALLS = 40_000

# A validation ranks fewer queries if it would compute more successors than this, by a rough count, but not fewer than
# the minimum.
MAX_VALIDATION_SUCCESSORS = 1_000_000
MIN_VALIDATION_QUERIES = 20
# The same where rules alone score candidates, whose successors take under a microsecond.
MAX_VALIDATION_SUCCESSORS_BY_RULES = 10_000_000
# A greater height is tried only if its searches for all of valid, by every score, compute at most this many successors,
# empty places of the tables included; and if there are more test queries, if these do. A successor takes 15 to 40
# microseconds on one CPU thread, and a run ranks valid some 15 times.
MAX_TRIAL_SUCCESSORS = 400_000
# resolution steps that the rough count assumes for each height of a proof
STEPS_PER_HEIGHT = 3

# environment steps of a run that sets none
DEFAULT_STEPS = 120_000

# How the policy of a run may score candidates: one that searches proofs, and one that answers questions.
PROOF_SCORES: tuple[ScoreName, ...] = ("success", "best-proof")
RunScore = ScoreName | Literal["evidence"]
EVIDENCE_SCORE: Literal["evidence"] = "evidence"

# Search settings before they are tuned for the machine.
BEAM_WIDTH = 64
MAX_ROWS_PER_STEP = 512
MAX_SUCCESSORS_PER_STEP = 4096
GPU_ROWS_FACTOR = 16  # times as many rows on a GPU
CHUNK_SIZE = 2048


class RunState(NamedTuple):
    """The contents of a checkpoint: the training state, and the best parameters on the valid split so far."""

    train_state: TrainState
    start_params: Any  # the parameters before the first update
    best_params: Any
    # their metric on valid: MRR, or AUC-PR for Countries; -1 before any
    best_valid_metric: F32[Tensor, ""]
    # number of the update that gave them; 0: the initial ones
    best_update: I64[Tensor, ""]


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

    notes: tuple[str, ...]
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


class _ScoredRun(NamedTuple):
    """A run before its first update, with its score."""

    run: Run
    mrr: float  # of the untrained policy on valid; -1 without valid queries
    notes: list[str]  # on the score


class StopRequest(Protocol):
    """Whether training should save and stop after the current update."""

    def __call__(self) -> bool:
        """True to stop."""
        ...


class ValidationStopped(Exception):
    """A validation was asked to stop before its end."""


class _SearchTooLong(Exception):
    """A search has computed more successors than it may."""


class DivergenceError(ValueError):
    """A run whose loss or gradient stays infinite or not a number."""


def prepare_run(
    run_config: RunConfig,
    folder: Path,
    *,
    resume: bool,
    on_phase: PhaseCallback = ignore_phase,
) -> Run:
    """Build the run that a config describes.

    Args:
      run_config: the settings. A new run has those of the prover chosen on the valid split that are open.
      folder: the folder of the run; read only if `resume`.
      resume: continue from the checkpoint in the folder; otherwise start anew.
      on_phase: receives what is being done.

    Raises:
      ValueError: bad data or settings, a query of valid or test that cannot be ranked, or a checkpoint that does not
        belong to them.
    """
    on_phase("reading data")
    dataset = data.load(
        run_config.dataset, run_config.rules, cfg=run_config.data
    )
    if not resume:
        return _choose_run(run_config, dataset, on_phase)

    run = _build_run(with_stored_height(run_config, dataset), dataset, on_phase)
    state, meta = checkpoint.restore(
        folder / CHECKPOINT_FILE,
        run.state,
        dataset.fingerprint,
        optional="start_params",
    )
    meta = {"notes": list(run.notes), "pending_row": None} | meta
    scores = (EVIDENCE_SCORE,) if run.questions else PROOF_SCORES
    _check_meta(folder / CHECKPOINT_FILE, meta, scores)
    return dataclasses.replace(
        run,
        score=meta["score"],
        state=state,
        notes=tuple(meta["notes"]),
        pending_row=meta["pending_row"],
    )


def _check_meta(
    path: Path, meta: checkpoint.Meta, scores: tuple[RunScore, ...]
) -> None:
    """Check what a checkpoint says of a run beside its tensors.

    Raises:
      ValueError: names the file and what is wrong.
    """
    score, row, notes = meta.get("score"), meta["pending_row"], meta["notes"]
    if score not in scores:
        raise ValueError(
            f"{path}: score: expected one of {', '.join(scores)}, got {score!r}"
        )
    if row is not None and not metrics_log.is_row(row):
        raise ValueError(
            f"{path}: pending_row: expected the metrics of an update, got {row!r}"
        )
    if not isinstance(notes, list) or not all(
        isinstance(note, str) for note in notes
    ):
        raise ValueError(f"{path}: notes: expected texts, got {notes!r}")


def open_run(
    folder: Path, device: str = "cpu", on_phase: PhaseCallback = ignore_phase
) -> Run:
    """Open the run in a folder at its last checkpoint, to evaluate or to resume it.

    Raises:
      ValueError: the folder holds no run, or its data set has changed since.
    """
    run_config = dataclasses.replace(read_config(folder), device=device)
    return prepare_run(run_config, folder, resume=True, on_phase=on_phase)


def _build_run(
    run_config: RunConfig, dataset: Dataset, on_phase: PhaseCallback
) -> Run:
    """A run before its first update, whose score is not chosen yet."""
    if run_config.learner == "questions":
        return _build_question_run(run_config, dataset, on_phase)
    task = prover_task.build_task(
        dataset, run_config.prover, run_config.device, on_phase
    )
    notes = list(task.notes)
    settings = task.cfg
    is_default = settings.hard_negative_fraction == 0.0
    if (
        task.derived_sample is not None
        and is_default
        and settings.negatives_per_positive > 0
    ):
        # Whether a corruption is derivable is unknown where T_P is held in part.
        settings = dataclasses.replace(settings, hard_negative_fraction=1.0)
        run_config = dataclasses.replace(run_config, prover=settings)
        task = dataclasses.replace(task, cfg=settings)
        notes.append(
            "all negatives are from the sample of T_P (--prover.hard-negative-fraction 1)"
        )
    cfg = _learner_config(run_config, task)
    n_queries = _n_validation_queries(run_config, task, cfg)
    if n_queries < min(
        run_config.n_validation_queries, len(task.dataset.valid)
    ):
        notes.append(
            f"a validation ranks {n_queries} of {len(task.dataset.valid)} valid queries: "
            f"more would compute over {_max_validation_successors(task):,} successors"
        )
    return Run(
        run_config=run_config,
        task=task,
        cfg=cfg,
        score="best-proof",
        state=_initial_run_state(_initial_train_state(cfg, task, run_config)),
        notes=tuple(notes),
        search_step=scorers.make_search_step(run_config.device),
        n_validation_queries=n_queries,
        pending_row={"update": 0},
    )


def _build_question_run(
    run_config: RunConfig, dataset: Dataset, on_phase: PhaseCallback
) -> Run:
    """A run before its first update that learns from questions, which are not listed yet.

    Raises:
      ValueError: its height is not 1.
    """
    if run_config.prover.max_height != 1:
        raise ValueError(
            f"learner questions: expected height 1, got {run_config.prover.max_height}"
        )
    # Evidence is listed by joins whose sizes the host must know; training alone is on the run's device.
    task = prover_task.build_task(dataset, run_config.prover, "cpu", on_phase)
    setup = question_run.set_up(task, run_config.questions)
    cfg = question_training.learner_config(
        setup.policy, _ppo_config(run_config)
    )
    world = question_run.training_world(setup, run_config.device)
    key = random.key(run_config.seed, run_config.device)
    return Run(
        run_config=run_config,
        task=task,
        cfg=cfg,
        score=EVIDENCE_SCORE,
        state=_initial_run_state(train_step.init(cfg, world, key)),
        notes=task.notes,
        search_step=scorers.make_search_step("cpu"),
        n_validation_queries=min(
            run_config.n_validation_queries, len(dataset.valid)
        ),
        pending_row={"update": 0},
        questions=setup,
    )


def _choose_run(
    run_config: RunConfig, dataset: Dataset, on_phase: PhaseCallback
) -> Run:
    """A new run with the settings and the score by which the untrained policy ranks valid best.

    Rule confidences choose smoothing and object identity. Of the heights that they rank, the policy chooses: a greater
    one must rank better, and none is tried after one that does not. At height 1 a run learns from questions, above it
    from proofs, unless the learner is set.
    """
    _check_splits(dataset)
    choice = _choose_settings(run_config, dataset, on_phase)
    run_config = dataclasses.replace(run_config, rule_score=choice.score)
    best, notes = _choose_height(run_config, dataset, choice, on_phase)
    chosen = describe_choice(choice, best.run.task.max_height)
    if best.run.questions is not None:
        best = _start_from_fit(
            best, run_config.learner == "auto", dataset, on_phase
        )
    run = best.run
    return dataclasses.replace(
        run,
        run_config=_with_default_steps(run.run_config),
        notes=(*chosen, *notes, *run.notes, *best.notes),
    )


def _choose_height(
    run_config: RunConfig,
    dataset: Dataset,
    choice: SettingsChoice,
    on_phase: PhaseCallback,
) -> tuple[_ScoredRun, list[str]]:
    """The run with the height by which the untrained policy ranks valid best, and notes on it."""
    best: _ScoredRun | None = None
    listing: list[str] = []
    notes: list[str] = []
    for candidate in choice.by_height:
        settings = candidate.settings
        config = dataclasses.replace(
            run_config,
            prover=settings,
            learner=_learner_at(run_config, settings.max_height),
        )
        try:
            scored = _score_height(config, dataset, candidate, best, on_phase)
        except _SearchTooLong as error:
            notes.append(f"height {settings.max_height} not tried: {error}")
            break
        listing.append(f"{settings.max_height} {scored.mrr:.4f}")
        if best is not None and scored.mrr <= best.mrr + MIN_GAIN:
            break
        best = scored

    assert best is not None, "a choice has settings for a height"
    if len(listing) > 1:
        notes.append(
            f"height {best.run.task.max_height} chosen for the policy: MRR on valid, untrained, {', '.join(listing)}"
        )
    return best, notes


def _with_default_steps(config: RunConfig) -> RunConfig:
    """The settings with a number of steps."""
    if config.steps is not None:
        return config
    return dataclasses.replace(config, steps=DEFAULT_STEPS)


def _choose_settings(
    run_config: RunConfig, dataset: Dataset, on_phase: PhaseCallback
) -> SettingsChoice:
    """The settings by which rule confidences rank valid best, at height 1 where the run can have no other."""
    score = run_config.rule_score
    prover = run_config.prover
    is_of_height_1 = (
        run_config.learner == "questions" or prover.object_identity is True
    )
    if is_of_height_1 and prover.max_height is None:
        prover = dataclasses.replace(prover, max_height=1)
    return choose_settings(
        dataset, prover, None if score == "auto" else score, on_phase
    )


def _learner_at(
    run_config: RunConfig, height: int | None
) -> Literal["questions", "proofs"]:
    """What a run of a height learns from."""
    if run_config.learner == "auto":
        return "questions" if height == 1 else "proofs"
    return run_config.learner


def _start_from_fit(
    scored: _ScoredRun,
    may_learn_from_proofs: bool,
    dataset: Dataset,
    on_phase: PhaseCallback,
) -> _ScoredRun:
    """The run with its questions and the listwise fit that PPO starts from.

    Args:
      may_learn_from_proofs: where there is no question to learn from, the run learns from proofs.

    Raises:
      ValueError: there is no question to learn from.
    """
    run = scored.run
    assert run.questions is not None, "the run learns from questions"
    config = run.run_config
    options = question_run.resolve_left_out(run.task, config.questions)
    try:
        setup, collected = question_run.collect(
            run.task,
            run.questions,
            options,
            config.seed,
            config.device,
            on_phase,
        )
    except ValueError as error:
        if not may_learn_from_proofs:
            raise ValueError(f"{dataset.name}: learner: {error}") from None
        config = dataclasses.replace(config, learner="proofs")
        scored = _choose_score(_build_run(config, dataset, on_phase), on_phase)
        note = f"learner proofs: no question to learn from: {error}"
        return scored._replace(notes=[note, *scored.notes])

    degrees = options.degrees
    listwise, epoch_notes = question_run.bound_epochs(
        config.listwise, len(collected.world.question)
    )
    fitted = question_run.fit_listwise(
        setup,
        (False, True) if degrees == "auto" else (degrees,),
        listwise,
        config.seed,
        config.device,
        partial(_valid_quality, run) if run.valid_evidence else None,
        on_phase,
    )
    options = dataclasses.replace(
        options,
        max_questions=collected.n_questions,
        degrees=fitted.setup.policy.aggregation.uses_degrees,
    )
    config = dataclasses.replace(config, questions=options)
    config, steps_notes = _with_steps(config, fitted.setup)
    run = dataclasses.replace(run, run_config=config, questions=fitted.setup)
    notes = [*collected.notes, _left_out_note(options)]
    notes += [*epoch_notes, *fitted.notes, *steps_notes]
    return _ScoredRun(
        _at_start(run, fitted.params), scored.mrr, [*notes, *scored.notes]
    )


def _with_steps(
    config: RunConfig, setup: QuestionSetup
) -> tuple[RunConfig, list[str]]:
    """The settings with a number of steps: where none is set, as many as PPO has time for; a note if these are less."""
    if config.steps is not None:
        return config, []
    ppo = _ppo_config(config)
    n_updates = question_run.n_updates_within(ppo, setup)
    if n_updates >= ppo.n_updates:
        return dataclasses.replace(config, steps=DEFAULT_STEPS), []
    steps = n_updates * ppo.n_envs * ppo.n_steps
    note = (
        f"PPO makes {n_updates} of {ppo.n_updates} updates: more would weigh over "
        f"{question_run.MAX_PPO_FIRINGS:.0e} firings (--steps sets them)"
    )
    return dataclasses.replace(config, steps=steps), [note]


def _left_out_note(options: QuestionConfig) -> str:
    """What a question leaves out, in a line."""
    if options.left_out == "fact":
        return "each training question is asked without its own fact"
    return (
        "each training question is asked without the facts that link its two entities: no pair of the valid split is "
        "linked by a known fact"
    )


def _at_start(run: Run, params: Any) -> Run:
    """The run, whose questions are listed, before its first update, from given parameters on."""
    run = _with_questions(run, params)
    key = random.key(run.run_config.seed, run.run_config.device)
    state = train_step.init(run.cfg, _training_world(run), key)
    state = _initial_run_state(state._replace(params=params))
    return dataclasses.replace(run, state=state)


def _with_questions(run: Run, start_params: Any) -> Run:
    """The run, whose questions are listed, ready for PPO from given parameters on."""
    setup = run.questions
    assert setup is not None and setup.world is not None
    world = question_training.with_prior(
        setup.policy, setup.world, start_params
    )
    return dataclasses.replace(
        run,
        questions=dataclasses.replace(setup, world=world),
        cfg=question_training.learner_config(
            setup.policy, _ppo_config(run.run_config)
        ),
    )


def with_training_data(run: Run, on_phase: PhaseCallback = ignore_phase) -> Run:
    """The run with what an update or a validation reads; a run that learns from questions lists them anew."""
    setup = run.questions
    if setup is None:
        return run
    if setup.world is None:
        config = run.run_config
        setup, _ = question_run.collect(
            run.task,
            setup,
            config.questions,
            config.seed,
            config.device,
            on_phase,
        )
        run = dataclasses.replace(run, questions=setup)
        run = _with_questions(run, run.state.start_params)
    return _with_valid_evidence(run)


def _with_valid_evidence(run: Run) -> Run:
    """The run with the evidence of the queries that a validation ranks, of which there may be fewer."""
    setup = run.questions
    if setup is None or run.valid_evidence or not len(run.task.dataset.valid):
        return run
    queries = validation_queries(run)
    sides = ranked_sides(run.task)
    n_queries = evidence_ranking.count_queries_within(
        run.task, setup.facts, queries, sides, question_run.MAX_VALID_FIRINGS
    )

    notes: list[str] = []
    if n_queries < len(queries):
        notes = [
            f"a validation ranks {n_queries:,} of {len(run.task.dataset.valid):,} valid queries: more would have over "
            f"{question_run.MAX_VALID_FIRINGS:,} firings"
        ]
        run = dataclasses.replace(run, n_validation_queries=n_queries)
        queries = validation_queries(run)
    return dataclasses.replace(
        run,
        notes=tuple(dict.fromkeys((*run.notes, *notes))),
        valid_evidence=ValidEvidence(run.task, setup.facts, queries, sides),
    )


def _valid_quality(run: Run, setup: QuestionSetup, params: Any) -> ValidQuality:
    """How well weights of evidence rank the queries of a validation."""
    valid = run.valid_evidence
    assert valid is not None, "there are valid queries"
    ranked = ranking.rank_split(
        run.task,
        valid.queries,
        valid.make_scorer(setup, params),
        RankingProtocol(sides=ranked_sides(run.task)),
    )
    metrics = _summarise(run, ranked)
    return ValidQuality(
        metrics[selection_metric(run.task)],
        rank_metrics.expected_reciprocal_ranks(ranked.counts),
    )


def _check_splits(dataset: Dataset) -> None:
    """Check that the queries of valid and test can be ranked.

    Raises:
      ValueError: naming the split and the query, if one cannot.
    """
    for name, split in (("valid", dataset.valid), ("test", dataset.test)):
        try:
            check_rankable(dataset, split)
        except ValueError as error:
            raise ValueError(f"{dataset.name}: {name}: {error}") from None


def _learner_config(run_config: RunConfig, task: ProverTask) -> Config:
    """The learner's configuration, with the number of updates that the environment steps of the run make."""
    return prover_task.build_config(
        task,
        _ppo_config(run_config),
        matmul_dtype=torch.bfloat16
        if run_config.precision == "bfloat16"
        else None,
    )


def _ppo_config(run_config: RunConfig) -> PPOConfig:
    """PPO with the number of updates that the environment steps of the run make."""
    ppo = run_config.ppo
    steps = run_config.steps or DEFAULT_STEPS
    n_updates = math.ceil(steps / (ppo.n_envs * ppo.n_steps))
    return dataclasses.replace(ppo, n_updates=n_updates)


def _initial_train_state(
    cfg: Config, task: ProverTask, run_config: RunConfig
) -> TrainState:
    """The training state before the first update."""
    world = prover_task.training_world(task)
    key = random.key(run_config.seed, run_config.device)
    return train_step.init(cfg, world, key)


def _initial_run_state(train_state: TrainState) -> RunState:
    """The state before the first validation."""
    device = train_state.update.device
    return RunState(
        train_state=train_state,
        start_params=train_state.params,
        best_params=train_state.params,
        best_valid_metric=torch.full(
            (), -1.0, dtype=torch.float32, device=device
        ),
        best_update=torch.zeros((), dtype=torch.int64, device=device),
    )


def prepare_train_step(
    run: Run,
) -> tuple[CapturedStep[TrainState, Metrics], str]:
    """Compile or capture the training step of a run, starting from its state.

    With strategy auto, a run too short to repay compilation is not compiled.

    Returns:
      The step, and a line that says which strategy it uses and why.

    Raises:
      Exception: whatever a strategy raises that was set by name and fails.
    """
    run_config = run.run_config
    world = _training_world(run)
    train_state = run.state.train_state
    is_short = (
        run_config.strategy == "auto"
        and _n_calls(run.cfg.ppo) < COMPILE_MIN_CALLS
    )

    # The capacity depends on the first state of the run, so that a resumed run has the same.
    cfg = run.cfg
    if run.questions is None:
        first = _initial_train_state(cfg, run.task, run_config)
        cfg = with_capacity(cfg, world, first)
    parts, record = compilation.select_strategy(
        train_step.collect,
        EAGER_PARTS,
        cfg,
        world,
        train_state,
        "eager" if is_short else run_config.strategy,
        tolerance=BF16_TOLERANCE
        if run_config.precision == "bfloat16"
        else DEFAULT_TOLERANCE,
    )

    # Recording all kernels of an uncompiled iteration takes seconds, so a short run records one step of each loop.
    step = partial(train_step.train_step, cfg, world)
    if is_short and run_config.device != "cpu":
        captured = capture_loop_bodies(step, parts, train_state)
    else:
        captured = capture(partial(step, parts=parts), train_state)
    return captured, _describe_strategy(
        with_capture(record, captured), is_short
    )


def _training_world(run: Run) -> Any:
    """What the training step reads and never writes."""
    if run.questions is None:
        return prover_task.training_world(run.task)
    return question_run.training_world(run.questions, run.run_config.device)


def _n_calls(ppo: PPOConfig) -> int:
    """Number of rollout steps and microbatches in a whole run."""
    microbatches_per_update = (
        ppo.n_epochs * ppo.n_minibatches * ppo.n_microbatches
    )
    return ppo.n_updates * (ppo.n_steps + microbatches_per_update)


def _describe_strategy(record: StrategyRecord, is_short: bool) -> str:
    """A line that says which strategy is used, and why not another."""
    line = f"strategy {record.strategy} on {record.device}, replayed by: {record.replay_mode}"
    if is_short:
        line += "; compiling would take longer than it saves (--strategy one-graph compiles)"
    failures = [
        f"not {failure.name}: {failure.error_type}: {failure.message}"
        for failure in record.failures
    ]
    if failures:
        line += f" ({'; '.join(failures)})"
    return line


def last_logged_update(run: Run) -> int:
    """Return the last update that the metrics log has a complete line for; -1 before the first validation."""
    update = int(run.state.train_state.update)
    return update if run.pending_row is None else update - 1


def _begin(
    run: Run,
    folder: Path,
    captured: CapturedStep[TrainState, Metrics],
    on_validation: ProgressCallback,
    monitor: Monitor,
) -> Run:
    """The run with its state in the step's buffers, its metrics log as it was, and no validation due.

    Raises:
      ValidationStopped: a validation was due, and `on_validation` stops it.
    """
    metrics_log.truncate(folder / METRICS_FILE, last_logged_update(run))
    run = dataclasses.replace(
        run, state=run.state._replace(train_state=captured.state)
    )
    if run.pending_row is None:
        return run
    return _validate_and_save(run, folder, on_validation, monitor)


def train(
    run: Run,
    folder: Path,
    captured: CapturedStep[TrainState, Metrics],
    should_stop: StopRequest,
    monitor: Monitor,
    on_validation: ProgressCallback = ignore_progress,
) -> Iterator[tuple[Run, dict[str, float]]]:
    """Train to the end or until stopped; yield the run after each update, with the metrics of the update.

    The training state of a yielded run is the buffers of the step, which the next update overwrites. The metrics log
    gets a line at every update, and one before the first update for the validation of the initial parameters. The
    checkpoint is written before and after every validation, at a stop, and when a KeyboardInterrupt ends an update.

    Args:
      run: the run, at its start or resumed.
      folder: where its files are.
      captured: the training step, from `prepare_train_step`.
      should_stop: called after each update and often in a validation; if true, training ends with a checkpoint, and a
        resumed run makes the validation anew.
      monitor: times the steps, and reports compilations at each validation.
      on_validation: receives the candidates of a validation that are started, and all of them.

    Raises:
      DivergenceError: `max_nonfinite_updates` updates in a row met a number that is not finite. None of these is saved.
    """
    n_updates = run.cfg.ppo.n_updates
    validation_interval = max(1, n_updates // run.run_config.n_validations)
    n_bad_updates = 0  # consecutive updates with a number that is not finite
    report_or_stop = partial(_report_or_stop, should_stop, on_validation)
    try:
        run = _begin(run, folder, captured, report_or_stop, monitor)
        first_update = int(run.state.train_state.update) + 1
        for update in range(first_update, n_updates + 1):
            with _saved_at_interrupt(update, run, folder, n_bad_updates > 0):
                row, metrics = _step(update, captured, monitor)
            stopping = should_stop()
            n_bad_updates = (
                n_bad_updates + 1 if metrics["n_nonfinite_minibatches"] else 0
            )

            # State and parameters of a bad update are neither validated nor saved.
            is_due = update % validation_interval == 0 or update == n_updates
            if is_due and not n_bad_updates:
                run = dataclasses.replace(run, pending_row=row)
                save_checkpoint(run, folder)
                run = _validate_and_save(run, folder, report_or_stop, monitor)
            else:
                metrics_log.append(folder / METRICS_FILE, row)
            if stopping and not n_bad_updates:
                save_checkpoint(run, folder)

            yield run, metrics
            _check_divergence(run, folder, update, n_bad_updates)
            if stopping:
                break
    except ValidationStopped:
        return


def _step(
    update: int, captured: CapturedStep[TrainState, Metrics], monitor: Monitor
) -> tuple[metrics_log.Row, dict[str, float]]:
    """Make one update; its line of the metrics log, and its metrics alone."""
    start = time.perf_counter()
    with monitor.timer("replay"):
        device_metrics = captured.step()
    metrics = metrics_log.to_scalars(device_metrics)  # waits for the device
    seconds = time.perf_counter() - start
    return {"update": update, "seconds": seconds} | metrics, metrics


def _report_or_stop(
    should_stop: StopRequest,
    on_validation: ProgressCallback,
    n_started: int,
    n_candidates: int,
    /,
) -> None:
    """Report the progress of a validation.

    Raises:
      ValidationStopped: `should_stop` says so.
    """
    if should_stop():
        raise ValidationStopped
    on_validation(n_started, n_candidates)


@contextmanager
def _saved_at_interrupt(
    update: int, run: Run, folder: Path, is_bad: bool
) -> Generator[None, None, None]:
    """Save the state before an update that a KeyboardInterrupt ends midway.

    On a CPU a step overwrites its buffers all at once, at its end. On a GPU it may have changed a part of them, so the
    last checkpoint stays; there steps are short.

    Args:
      is_bad: that state has met a number that is not finite.
    """
    try:
        yield
    except KeyboardInterrupt:
        is_whole = run.run_config.device == "cpu" and not is_bad
        if is_whole and int(run.state.train_state.update) == update - 1:
            save_checkpoint(run, folder)
        raise


def _validate_and_save(
    run: Run, folder: Path, on_validation: ProgressCallback, monitor: Monitor
) -> Run:
    """The run after the validation that is due, whose metrics complete the pending line of the log.

    Raises:
      ValidationStopped: `on_validation` stops it.
    """
    row = dict(run.pending_row or {})
    run, valid_metric = validate(run, on_validation)
    row |= {
        "valid_metric": valid_metric,
        "best_valid_metric": float(run.state.best_valid_metric),
        "best_update": int(run.state.best_update),
    }
    if row["update"] > 0:
        row |= monitor.report()
    metrics_log.append(folder / METRICS_FILE, row)
    run = dataclasses.replace(run, pending_row=None)
    save_checkpoint(run, folder)
    return run


def _check_divergence(
    run: Run, folder: Path, update: int, n_bad_updates: int
) -> None:
    """Check that not too many updates in a row met a number that is not finite.

    Raises:
      DivergenceError: why the run ends, and what its checkpoint still holds.
    """
    if n_bad_updates < run.run_config.max_nonfinite_updates:
        return
    raise DivergenceError(
        f"{folder}: expected finite numbers, got a loss or gradient not finite in each of the {n_bad_updates} updates "
        f"up to {update}; none of them was saved, and {CHECKPOINT_FILE} holds update {saved_update(folder)}"
    )


def saved_update(folder: Path) -> int:
    """Return the number of the last update that the checkpoint of a run holds."""
    saved = checkpoint.read(folder / CHECKPOINT_FILE)
    return int(saved.arrays["train_state.update"])


def validate(
    run: Run, on_progress: ProgressCallback = ignore_progress
) -> tuple[Run, float | None]:
    """Rank the valid queries, and keep the current parameters as the best if they rank better than any before.

    Without valid queries the current parameters are kept.

    Args:
      run: at the parameters to validate.
      on_progress: called several times a second; what it raises ends the validation.

    Returns:
      The run, and the metric of the current parameters on valid; None without valid queries.
    """
    state = run.state
    has_queries = len(run.task.dataset.valid) > 0
    valid_metric = state.best_valid_metric
    if has_queries:
        params = state.train_state.params
        quality = _validation_quality(run, params, on_progress)
        # Rounded before the comparison: an equal metric in a higher precision may be above or below the rounded best.
        valid_metric = torch.full_like(
            state.best_valid_metric, quality[selection_metric(run.task)]
        )
        if valid_metric <= state.best_valid_metric:
            return run, float(valid_metric)

    # Clones, because the next update overwrites the leaves of the training state.
    best = state._replace(
        best_params=tree.map(torch.clone, state.train_state.params),
        best_valid_metric=valid_metric,
        best_update=state.train_state.update.clone(),
    )
    run = dataclasses.replace(run, state=best)
    return run, float(valid_metric) if has_queries else None


def _validation_quality(
    run: Run, params: Any, on_progress: ProgressCallback
) -> dict[str, Any]:
    """The metrics of the queries that every validation ranks."""
    protocol = RankingProtocol(sides=ranked_sides(run.task))
    if run.questions is None or run.valid_evidence is None:
        queries = validation_queries(run)
        return evaluate_policy(
            run, params, queries, protocol, on_progress=on_progress
        )
    queries = run.valid_evidence.queries
    on_progress(0, len(queries))
    scorer = run.valid_evidence.make_scorer(run.questions, params)
    return _evaluate_scorer(run, scorer, queries, protocol)


def _evaluate_scorer(
    run: Run,
    scorer: ranking.Scorer | ranking.ScorerBySide,
    split: np.ndarray,
    protocol: RankingProtocol,
) -> dict[str, Any]:
    """The ranking metrics of a scorer on a split."""
    ranked = ranking.rank_split(run.task, split, scorer, protocol)
    return _summarise(run, ranked)


def _summarise(run: Run, ranked: ranking.Ranking) -> dict[str, Any]:
    """The metrics of a ranking, for Countries also "auc_pr"."""
    return ranking.summarise_ranking(
        ranked,
        list(run.task.dataset.predicates),
        with_auc=run.task.is_countries,
    )


def evaluate_policy(
    run: Run,
    params: Any,
    split: np.ndarray,
    ranking_protocol: RankingProtocol,
    score: RunScore | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> dict[str, Any]:
    """The ranking metrics of a policy on a split.

    Args:
      run: the task, and how it is searched.
      params: the parameters of the policy.
      split: the queries, one row each.
      ranking_protocol: sides and candidates.
      score: how candidates are scored; None: as the run does.
      on_progress: called with the number of candidates started, and of all.

    Returns:
      The metrics of `ranking.summarise_ranking`, such as "mrr"; for Countries also "auc_pr".

    Raises:
      ValueError: a query cannot be ranked (see `ranking.check_split`).
    """
    ranking.check_split(run.task, split, ranking_protocol)
    scorer = run_policy_scorer(run, params, score or run.score, on_progress)
    return _evaluate_scorer(run, scorer, split, ranking_protocol)


def evaluate_policies(
    run: Run,
    split: np.ndarray,
    protocol: RankingProtocol,
    on_phase: PhaseCallback = ignore_phase,
) -> dict[str, dict[str, Any]]:
    """The metrics of the parameters that a run is judged by, by name.

    Raises:
      ValueError: a query cannot be ranked (see `ranking.check_split`).
    """
    judged = policies(run)
    if run.questions is None:
        return {
            name: evaluate_policy(
                run,
                params,
                split,
                protocol,
                on_progress=partial(on_phase, f"ranking by {name}"),
            )
            for name, params in judged.items()
        }

    # The evidence of the split is collected once for all.
    ranking.check_split(run.task, split, protocol)
    scorers_by_name = question_run.make_scorers(
        run.task,
        run.questions,
        list(judged.values()),
        partial(on_phase, "ranking by evidence"),
    )
    return {
        name: _evaluate_scorer(run, scorer, split, protocol)
        for name, scorer in zip(judged, scorers_by_name)
    }


def policies(run: Run) -> dict[str, Any]:
    """The parameters that a run is judged by, by name: untrained, after the listwise fit if there is one, trained."""
    if run.questions is None:
        return {
            f"{run.score}, untrained": run.state.start_params,
            f"{run.score}, trained": run.state.best_params,
        }
    device = run.run_config.device
    return {
        "evidence, untrained": question_run.untrained_params(
            run.questions, device
        ),
        "evidence, listwise fit": run.state.start_params,
        "evidence, trained": run.state.best_params,
    }


def run_policy_scorer(
    run: Run,
    params: Any,
    score: RunScore,
    on_progress: ProgressCallback = ignore_progress,
) -> ranking.Scorer | ranking.ScorerBySide:
    """The scorer of candidates by a policy, with the search settings of `run_search_config`."""
    if score == EVIDENCE_SCORE:
        assert run.questions is not None, "the run learns from questions"
        return question_run.make_scorer(
            run.task, run.questions, params, on_progress
        )
    cfg = run_search_config(run, score)
    return scorers.make_policy_scorer(
        cfg, run.task, params, run.search_step, on_progress
    )


def run_search_config(run: Run, score: ScoreName) -> SearchConfig:
    """The settings of a search for scores, before `autotune` has adapted them to the machine."""
    beam = 1 if score == "greedy" else BEAM_WIDTH
    max_successors = run.cfg.env.cfg.resolve.max_successors
    rows = min(MAX_ROWS_PER_STEP, MAX_SUCCESSORS_PER_STEP // max_successors)
    if run.run_config.device == "cuda":
        rows *= GPU_ROWS_FACTOR
    rows_per_step = max(beam, rows)
    return scorers.search_config(
        run.task,
        run.cfg,
        score,
        slots=slots_for_rows(rows_per_step, beam),
        beam=beam,
        rows_per_step=rows_per_step,
        chunk_size=CHUNK_SIZE,
    )


def validation_queries(run: Run) -> np.ndarray:
    """The valid queries that every validation ranks: a fixed sample, stratified by relation."""
    valid = run.task.dataset.valid
    return valid[stratified_sample(valid, run.n_validation_queries)]


def save_checkpoint(run: Run, folder: Path) -> None:
    """Write the state of a run to its folder."""
    meta = {
        "fingerprint": run.task.dataset.fingerprint,
        "score": run.score,
        "pending_row": run.pending_row,
        "notes": list(run.notes),
    }
    checkpoint.save(folder / CHECKPOINT_FILE, run.state, meta)


def _choose_score(run: Run, on_phase: PhaseCallback) -> _ScoredRun:
    """The run with the score that is set, or with the one that ranks valid better before any training."""
    if run.questions is not None:
        return _score_by_evidence(run, on_phase)
    queries = validation_queries(run)
    if not len(queries):
        score = run.run_config.score
        if score != "auto":
            return _ScoredRun(dataclasses.replace(run, score=score), -1.0, [])
        note = "score best-proof: there are no valid queries to choose by"
        return _ScoredRun(run, -1.0, [note])

    protocol = RankingProtocol(sides=ranked_sides(run.task))
    candidates = PROOF_SCORES
    if run.run_config.score != "auto":
        candidates = (run.run_config.score,)
    mrr: dict[ScoreName, float] = {}
    for score in candidates:
        quality = evaluate_policy(
            run,
            run.state.best_params,
            queries,
            protocol,
            score,
            partial(on_phase, f"ranking valid by {score}, untrained"),
        )
        mrr[score] = quality["mrr"]

    # The first one is chosen if they are equal.
    chosen = max(candidates, key=lambda score: mrr[score])
    notes: list[str] = []
    if len(candidates) > 1:
        listing = ", ".join(
            f"{score} {value:.4f}" for score, value in mrr.items()
        )
        notes = [
            f"score {chosen} chosen by MRR on {len(queries)} valid queries: {listing}"
        ]
    return _ScoredRun(
        dataclasses.replace(run, score=chosen), mrr[chosen], notes
    )


def _score_by_evidence(run: Run, on_phase: PhaseCallback) -> _ScoredRun:
    """A run that learns from questions, with the evidence of valid and the MRR of the untrained weights."""
    on_phase("listing evidence of valid queries")
    run = _with_valid_evidence(run)
    if run.valid_evidence is None:
        return _ScoredRun(run, -1.0, [])
    untrained = run.state.start_params
    quality = _validation_quality(run, untrained, ignore_progress)
    return _ScoredRun(run, quality["mrr"], [])


def _n_validation_queries(
    run_config: RunConfig, task: ProverTask, cfg: Config
) -> int:
    """How many valid queries a validation ranks: as set, or as many as keep it within its bound."""
    valid = task.dataset.valid
    n_queries = min(run_config.n_validation_queries, len(valid))
    if not n_queries:
        return 0

    queries = valid[stratified_sample(valid, n_queries)]
    protocol = RankingProtocol(sides=ranked_sides(task))
    n_candidates = ranking.count_candidates(task, queries, protocol)
    n_successors = cfg.env.cfg.resolve.max_successors
    if task.fact_selection != "oracle":
        n_successors = _n_search_successors(n_successors, task.max_height)
    share = _max_validation_successors(task) / max(
        1, n_candidates * n_successors
    )
    if share >= 1:
        return n_queries
    return max(int(n_queries * share), min(MIN_VALIDATION_QUERIES, n_queries))


def _max_validation_successors(task: ProverTask) -> int:
    """How many successors a validation may compute."""
    if task.fact_selection == "oracle":
        return MAX_VALIDATION_SUCCESSORS_BY_RULES
    return MAX_VALIDATION_SUCCESSORS


def _check_search(task: ProverTask, candidate: HeightCandidate) -> None:
    """Check that the smallest validation by search at a height is within its bound, by a rough count.

    Raises:
      _SearchTooLong: it is not.
    """
    height = candidate.settings.max_height or 1
    n_queries = min(MIN_VALIDATION_QUERIES, len(task.dataset.valid))
    shape = resolve.make_resolve_config(task.kb, task.sizes, height)
    n_successors = _n_search_successors(shape.max_successors, height)
    n_atoms = candidate.atoms_per_query * n_queries
    if height > 1 and n_atoms * n_successors > MAX_VALIDATION_SUCCESSORS:
        raise _SearchTooLong(
            f"a search for {n_queries} valid queries would compute over {MAX_VALIDATION_SUCCESSORS:,} "
            "successors, by a rough count"
        )


def _score_height(
    config: RunConfig,
    dataset: Dataset,
    candidate: HeightCandidate,
    best: _ScoredRun | None,
    on_phase: PhaseCallback,
) -> _ScoredRun:
    """A new run at a height, with its score.

    Args:
      best: the run at the height below; None for the first one, whose search may be long.

    Raises:
      _SearchTooLong: its search is.
    """
    if best is None:
        return _choose_score(_build_run(config, dataset, on_phase), on_phase)
    _check_search(best.run.task, candidate)
    return _try_height(_build_run(config, dataset, on_phase), on_phase)


def _try_height(run: Run, on_phase: PhaseCallback) -> _ScoredRun:
    """The run with its score, if ranking by search is within its bound.

    Raises:
      _SearchTooLong: it is not.
    """
    n_valid, n_test = run.n_validation_queries, len(run.task.dataset.test)
    limit = MAX_TRIAL_SUCCESSORS * n_valid // max(n_valid, n_test)
    n_successors = 0

    def bounded_step(cfg: SearchConfig, *inputs: Any) -> SchedulerState:
        nonlocal n_successors
        n_successors += cfg.rows_per_step * cfg.resolve.max_successors
        if n_successors > limit:
            raise _SearchTooLong(
                f"a search for {n_valid} valid queries computes over {limit:,} successors"
            )
        return run.search_step(cfg, *inputs)

    bounded = dataclasses.replace(run, search_step=bounded_step)
    scored = _choose_score(bounded, on_phase)
    return scored._replace(
        run=dataclasses.replace(scored.run, search_step=run.search_step)
    )


def _n_search_successors(max_successors: int, height: int) -> int:
    """A rough count of the successors in the search for one candidate: of its partial proofs, at every step."""
    n_proofs = min(BEAM_WIDTH, max_successors)
    return n_proofs * max_successors * STEPS_PER_HEIGHT * height
