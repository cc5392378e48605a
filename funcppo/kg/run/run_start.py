"""Start a training run with the settings by which it ranks valid best, or open one at its checkpoint."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from funcppo import checkpoint, metrics_log
from funcppo.core.deadline import NO_DEADLINE, Deadline
from funcppo.core.files import shorten
from funcppo.kg.graph import loaders
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.logic import resolve
from funcppo.kg.logic.firings import FiringPlan
from funcppo.kg.ranking.ranking import RankingProtocol, ranked_sides
from funcppo.kg.run import budget, evidence_fit, priors, validation
from funcppo.kg.run.budget import RunTime
from funcppo.kg.run.choices import (
    MIN_GAIN,
    HeightCandidate,
    SettingsChoice,
    check_rankable,
    choose_settings,
    describe_choice,
)
from funcppo.kg.run.config import Note, RunConfig, read_config
from funcppo.kg.run.evidence_fit import ListwiseFit, TrainingQuestions
from funcppo.kg.run.run import (
    DEFAULT_STEPS,
    EVIDENCE_SCORE,
    MIN_GAIN_ERRORS,
    PROOF_SCORES,
    QuestionSetup,
    Run,
    RunScore,
    RunState,
    find_checkpoint,
    has_few_valid,
    is_better,
    ppo_config,
    untrained_params,
    with_odds_power,
)
from funcppo.kg.run.run_build import at_start, build_run
from funcppo.kg.scores import link_embedding, network_prior
from funcppo.kg.scores.question_config import QuestionConfig
from funcppo.kg.search.beam_search import ScoreName, SearchConfig
from funcppo.kg.search.slot_scheduler import SchedulerState, ignore_progress
from funcppo.kg.search.task import PhaseCallback, ProverTask, ignore_phase

# A greater height is tried only if its searches for all of valid, by every score, compute at most this many successors,
# empty places of the tables included; and if there are more test queries, if these do. A successor takes 15 to 40
# microseconds on one CPU thread, and a run ranks valid some 15 times.
MAX_TRIAL_SUCCESSORS = 400_000
# of the time of the listwise fits, where one with walks follows those with and without degrees
SHARE_WITHOUT_WALKS = 2 / 3


class _ScoredRun(NamedTuple):
    """A run before its first update, with its score."""

    run: Run
    mrr: float  # of the untrained policy on valid; -1 without valid queries
    notes: list[Note]  # on the score
    valid_seconds: float = 0.0  # that a ranking of valid takes, if it was timed


class _SearchTooLong(Exception):
    """A search has computed more successors than it may."""


def load_dataset_of(run_config: RunConfig, folder: Path) -> Dataset:
    """Load the data set of a trained run.

    Args:
      folder: of the run, for the error.

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


def prepare_run(
    run_config: RunConfig,
    folder: Path,
    *,
    resume: bool,
    on_phase: PhaseCallback = ignore_phase,
    run_time: RunTime | None = None,
    memory_limit: int | None = None,
) -> Run:
    """Build the run that a config describes.

    Args:
      run_config: the settings. A new run has those of the prover chosen on the valid split that are open.
      folder: the folder of the run; read only if `resume`.
      resume: continue from the checkpoint in the folder; otherwise start anew.
      on_phase: receives what is being done.
      run_time: of a new run; None begins it, with the seconds of its settings.
      memory_limit: of a new run, in bytes; None for no limit. A run that is resumed keeps its settings.

    Raises:
      ValueError: bad data or settings, too little memory, a query of valid or test that cannot be ranked, or a
        checkpoint that does not belong to them.
    """
    on_phase("reading data")
    if resume:
        dataset = load_dataset_of(run_config, folder)
    else:
        dataset = loaders.load(
            run_config.dataset, run_config.rules, cfg=run_config.data
        )
    if not resume:
        run_time = run_time or RunTime(run_config.seconds)
        run_time.end_phase("reading")
        run_config, notes = budget.plan_settings(
            run_config, len(dataset.facts), memory_limit
        )
        run = _choose_run(run_config, dataset, on_phase, run_time)
        return dataclasses.replace(run, notes=(*notes, *run.notes))

    path, damage_notes = find_checkpoint(folder)
    _check_unchanged(path, run_config, dataset)
    run = build_run(run_config, dataset, on_phase)
    state, meta = checkpoint.restore(path, run.state, dataset.fingerprint)
    scores = (EVIDENCE_SCORE,) if run.questions else PROOF_SCORES
    _check_meta(path, meta, scores)
    # What reads a run shows the notes on its task.
    task = dataclasses.replace(run.task, notes=(*run.task.notes, *damage_notes))
    return dataclasses.replace(
        run,
        task=task,
        questions=_with_stored_priors(run, state),
        score=meta["score"],
        state=state,
        notes=tuple(Note(kind, text) for kind, text in meta["notes"]),
        pending_row=meta["pending_row"],
        rule_metric=meta["rule_metric"],
        rule_margin=meta["rule_margin"],
    )


def _with_stored_priors(run: Run, state: RunState) -> QuestionSetup | None:
    """The evidence of a run, with which its questions are listed, with the priors of a checkpoint."""
    setup = run.questions
    if setup is None:
        return None
    if link_embedding.n_models(state.embedding):
        setup = evidence_fit.with_embedding(setup, state.embedding, "fact")
    if network_prior.is_network(state.bellman_ford):
        network = priors.make_network(run.task, state.bellman_ford)
        setup = evidence_fit.with_network(
            setup, network, "fact", run.run_config.seed
        )
    return setup


def _check_unchanged(
    path: Path, run_config: RunConfig, dataset: Dataset
) -> None:
    """Check that the data set of a run is the one that it was trained on.

    Args:
      path: of the run's checkpoint.

    Raises:
      ValueError: it is not; names the run, the data set and the rule file.
    """
    expected = checkpoint.read(path)[1].get("fingerprint")
    if expected != dataset.fingerprint:
        rules = "" if run_config.rules is None else f" or {run_config.rules}"
        raise ValueError(
            f"{path.parent}: the run was trained on other data: {run_config.dataset}{rules} has changed since; "
            f"expected fingerprint {expected}, got {dataset.fingerprint} ({len(dataset.train):,} train triples, "
            f"{dataset.n_constants:,} entities, {len(dataset.rules):,} rules)"
        )


def open_run(
    folder: Path, device: str = "cpu", on_phase: PhaseCallback = ignore_phase
) -> Run:
    """Open the run in a folder at its last checkpoint, to evaluate or to resume it.

    Raises:
      ValueError: the folder holds no run, or its data set has changed since.
    """
    run_config = dataclasses.replace(read_config(folder), device=device)
    return prepare_run(run_config, folder, resume=True, on_phase=on_phase)


def _check_meta(
    path: Path, meta: checkpoint.Meta, scores: tuple[RunScore, ...]
) -> None:
    """Check what a checkpoint says of a run beside its tensors.

    Raises:
      ValueError: names the file and what is wrong.
    """
    checks: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "score": (f"one of {', '.join(scores)}", lambda x: x in scores),
        "pending_row": (
            "the metrics of an update",
            lambda x: x is None or metrics_log.is_row(x),
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
            lambda x: isinstance(x, list) and all(len(note) == 2 for note in x),
        ),
    }
    for name, (expected, is_valid) in checks.items():
        found = meta.get(name)
        if not is_valid(found):
            raise ValueError(
                f"{path}: {name}: expected {expected}, got {found!r}"
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


def _choose_run(
    run_config: RunConfig,
    dataset: Dataset,
    on_phase: PhaseCallback,
    run_time: RunTime,
) -> Run:
    """A new run with the settings and the score by which the untrained policy ranks valid best.

    Rule confidences choose smoothing and object identity. Of the heights that they rank, the policy chooses: a greater
    one must rank better, and none is tried after one that does not. At height 1 a run learns from questions, above it
    from proofs, unless the learner is set.
    """
    _check_splits(dataset)
    choice = _choose_settings(
        run_config, dataset, on_phase, run_time.until(run_time.CHOICE)
    )
    run_time.end_phase("choice of settings")
    if choice.rule_counts is not None:
        dataset = dataclasses.replace(dataset, rule_counts=choice.rule_counts)
    run_config = dataclasses.replace(run_config, rule_score=choice.score)
    best, notes = _choose_height(
        run_config, dataset, choice, on_phase, run_time
    )
    chosen = [
        Note("cut" if line in choice.notes else "detail", line)
        for line in describe_choice(choice, best.run.task.max_height)
    ]
    if best.run.questions is not None:
        best = _start_from_fit(
            best, run_config.learner == "auto", dataset, on_phase, run_time
        )
    run = best.run
    rule_metric = run.rule_metric
    if run.questions is None and not run_time.until(run_time.FIT).is_over:
        on_phase("ranking valid by rule confidences")
        rule_metric = validation.rule_metric(run)
    return dataclasses.replace(
        run,
        run_config=_with_default_steps(run.run_config),
        rule_metric=rule_metric,
        notes=(*chosen, *notes, *run.notes, *best.notes),
    )


def _choose_settings(
    run_config: RunConfig,
    dataset: Dataset,
    on_phase: PhaseCallback,
    deadline: Deadline,
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
        dataset, prover, None if score == "auto" else score, on_phase, deadline
    )


def _choose_height(
    run_config: RunConfig,
    dataset: Dataset,
    choice: SettingsChoice,
    on_phase: PhaseCallback,
    run_time: RunTime,
) -> tuple[_ScoredRun, list[Note]]:
    """The run with the height by which the untrained policy ranks valid best, and notes on it."""
    best: _ScoredRun | None = None
    listing: list[str] = []
    notes: list[Note] = []
    for candidate in choice.by_height:
        settings = candidate.settings
        config = dataclasses.replace(
            run_config,
            prover=settings,
            learner=_learner_at(run_config, settings.max_height),
        )
        try:
            scored = _score_height(
                config,
                dataset,
                candidate,
                best,
                choice.plan,
                on_phase,
                run_time,
            )
        except _SearchTooLong as error:
            note = f"policy: height {settings.max_height} not tried: {error}"
            notes.append(Note("cut", note))
            break
        listing.append(f"{settings.max_height} {scored.mrr:.4f}")
        if best is not None and scored.mrr <= best.mrr + MIN_GAIN:
            break
        best = scored

    assert best is not None, "a choice has settings for a height"
    if len(listing) > 1:
        note = f"policy: height {best.run.task.max_height} chosen: MRR untrained on valid: {', '.join(listing)}"
        notes.append(Note("detail", note))
    return best, notes


def _learner_at(
    run_config: RunConfig, height: int | None
) -> Literal["questions", "proofs"]:
    """What a run of a height learns from."""
    if run_config.learner == "auto":
        return "questions" if height == 1 else "proofs"
    return run_config.learner


def _score_height(
    config: RunConfig,
    dataset: Dataset,
    candidate: HeightCandidate,
    best: _ScoredRun | None,
    plan: FiringPlan | None,
    on_phase: PhaseCallback,
    run_time: RunTime,
) -> _ScoredRun:
    """A new run at a height, with its score.

    Args:
      best: the run at the height below; None for the first one, whose search may be long.
      plan: as in `prover.task.build_task`.

    Raises:
      _SearchTooLong: its search is.
    """
    deadline = run_time.until(run_time.VALID)
    if best is None:
        run = build_run(config, dataset, on_phase, deadline, plan)
        run_time.end_phase("what the rules derive")
        deadline = run_time.until(run_time.VALID)
        scored = _choose_score(run, on_phase, deadline)
        run_time.end_phase("evidence of valid")
        return scored
    _check_search(best.run.task, candidate)
    run = build_run(config, dataset, on_phase)
    scored = _try_height(run, on_phase, deadline)
    run_time.end_phase("greater heights")
    return scored


def _check_search(task: ProverTask, candidate: HeightCandidate) -> None:
    """Check that the smallest validation by search at a height is within its bound, by a rough count.

    Raises:
      _SearchTooLong: it is not.
    """
    height = candidate.settings.max_height or 1
    n_queries = min(validation.MIN_VALIDATION_QUERIES, len(task.dataset.valid))
    shape = resolve.make_resolve_config(task.kb, task.sizes, height)
    n_successors = validation.count_search_successors(
        shape.max_successors, height
    )
    n_atoms = candidate.atoms_per_query * n_queries
    if (
        height > 1
        and n_atoms * n_successors > validation.MAX_VALIDATION_SUCCESSORS
    ):
        raise _SearchTooLong(
            f"a search for {n_queries} valid queries would compute over {validation.MAX_VALIDATION_SUCCESSORS:,} "
            "successors, by a rough count"
        )


def _try_height(
    run: Run, on_phase: PhaseCallback, deadline: Deadline
) -> _ScoredRun:
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
        if deadline.is_over:
            raise _SearchTooLong("there was no time left")
        return run.search_step(cfg, *inputs)

    bounded = dataclasses.replace(run, search_step=bounded_step)
    scored = _choose_score(bounded, on_phase, deadline)
    return scored._replace(
        run=dataclasses.replace(scored.run, search_step=run.search_step)
    )


def _choose_score(
    run: Run, on_phase: PhaseCallback, deadline: Deadline = NO_DEADLINE
) -> _ScoredRun:
    """The run with the score that is set, or with the one that ranks valid better before any training."""
    if run.questions is not None:
        return _score_by_evidence(run, on_phase, deadline)
    queries = validation.validation_queries(run)
    if not len(queries):
        score = run.run_config.score
        if score != "auto":
            return _ScoredRun(dataclasses.replace(run, score=score), -1.0, [])
        note = (
            "policy: score best-proof: there are no valid triples to choose by"
        )
        return _ScoredRun(run, -1.0, [Note("detail", note)])

    protocol = RankingProtocol(sides=ranked_sides(run.task))
    candidates = PROOF_SCORES
    if run.run_config.score != "auto":
        candidates = (run.run_config.score,)
    mrr: dict[ScoreName, float] = {}
    for score in candidates:
        quality = validation.evaluate_policy(
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
    notes: list[Note] = []
    if len(candidates) > 1:
        listing = ", ".join(
            f"{score} {value:.4f}" for score, value in mrr.items()
        )
        note = f"policy: score {chosen} chosen: MRR untrained on {len(queries)} valid triples: {listing}"
        notes = [Note("detail", note)]
    return _ScoredRun(
        dataclasses.replace(run, score=chosen), mrr[chosen], notes
    )


def _score_by_evidence(
    run: Run, on_phase: PhaseCallback, deadline: Deadline
) -> _ScoredRun:
    """A run that learns from questions, with the evidence of valid and the MRR of the untrained weights."""
    on_phase("listing evidence of valid queries")
    run = validation.with_valid_evidence(run, deadline.seconds_left)
    if run.valid_evidence is None:
        return _ScoredRun(run, -1.0, [])
    run, mrr, notes, seconds = _choose_odds_power(run, deadline)
    run = dataclasses.replace(run, rule_metric=validation.rule_metric(run))
    return _ScoredRun(run, mrr, notes, seconds)


def _choose_odds_power(run: Run, deadline: Deadline) -> _ScoredRun:
    """A run that learns from questions, with the power of the odds whose untrained weights rank valid best.

    Args:
      run: with the evidence of valid.
      deadline: ends the choice, but for its first power.
    """
    config, setup = run.run_config, run.questions
    assert setup is not None, "the run learns from questions"
    powers = evidence_fit.ODDS_POWERS
    if config.questions.odds_power != "auto":
        powers = (config.questions.odds_power,)

    scored: dict[float, _ScoredRun] = {}
    for power in powers:
        if scored and deadline.is_over:
            break
        variant = with_odds_power(setup, power)
        options = dataclasses.replace(config.questions, odds_power=power)
        chosen = dataclasses.replace(
            run,
            questions=variant,
            run_config=dataclasses.replace(config, questions=options),
        )
        params = untrained_params(variant, config.device)
        start = time.monotonic()
        quality = validation.validation_quality(chosen, params, ignore_progress)
        seconds = time.monotonic() - start
        scored[power] = _ScoredRun(chosen, quality["mrr"], [], seconds)

    # The first one is chosen if they are equal.
    power = max(scored, key=lambda power: scored[power].mrr)
    if len(powers) == 1:
        return scored[power]
    listing = ", ".join(f"{p:g} {found.mrr:.4f}" for p, found in scored.items())
    note = f"evidence: power {power:g} of the odds chosen: MRR untrained on valid: {listing}"
    return scored[power]._replace(notes=[Note("detail", note)])


def _start_from_fit(
    scored: _ScoredRun,
    may_learn_from_proofs: bool,
    dataset: Dataset,
    on_phase: PhaseCallback,
    run_time: RunTime,
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
    options = evidence_fit.resolve_left_out(run.task, config.questions)
    try:
        setup, collected = _collect_questions(run, options, on_phase, run_time)
    except ValueError as error:
        if not may_learn_from_proofs:
            raise ValueError(f"{dataset.name}: learner: {error}") from None
        note = f"learner proofs: no question to learn from: {error}"
        note = Note("answers", note)
        return _start_from_proofs(config, dataset, note, on_phase, run_time)

    run = dataclasses.replace(
        run,
        questions=evidence_fit.without_network(setup),
        run_config=dataclasses.replace(config, questions=options),
    )
    run, fitted = _fit_with_embedding(
        run, scored.valid_seconds, on_phase, run_time
    )
    run, fitted = _weigh_network(run, fitted, on_phase, run_time)
    options = _chosen_options(options, collected.n_questions, fitted.setup)
    ppo, parts_notes = budget.split_minibatches(
        config.ppo,
        fitted.setup.policy.capacity,
        config.listwise.max_batch_firings,
    )
    config = dataclasses.replace(config, questions=options, ppo=ppo)
    seconds = run_time.until(run_time.PPO).seconds_left
    seconds -= config.n_validations * scored.valid_seconds
    config, steps_notes = _with_steps(config, fitted.setup, seconds)
    run = dataclasses.replace(run, run_config=config, questions=fitted.setup)
    notes = [*collected.notes, _left_out_note(options)]
    notes += [*fitted.notes, *parts_notes, *steps_notes]
    notes += _few_valid_notes(run.task)
    return _ScoredRun(
        at_start(run, fitted.params), scored.mrr, [*notes, *scored.notes]
    )


def _collect_questions(
    run: Run,
    options: QuestionConfig,
    on_phase: PhaseCallback,
    run_time: RunTime,
) -> tuple[QuestionSetup, TrainingQuestions]:
    """List the questions to learn from.

    Raises:
      ValueError: there is no question to learn from.
    """
    config, setup = run.run_config, run.questions
    assert setup is not None, "the run learns from questions"
    is_set = options.max_questions is not None
    setup, collected = evidence_fit.collect(
        run.task,
        setup,
        options,
        config.seed,
        config.device,
        on_phase,
        run_time.until(run_time.QUESTIONS),
    )
    run_time.end_phase("questions", is_set=is_set)
    first_epoch = evidence_fit.plan_first_epoch(
        run.task, config.listwise, options.max_size_quantile
    )
    return dataclasses.replace(setup, first_epoch=first_epoch), collected


def _chosen_options(
    options: QuestionConfig, n_questions: int, setup: QuestionSetup
) -> QuestionConfig:
    """The options of a run with what was chosen in place of None and "auto"."""
    weighed = setup.policy.aggregation
    return dataclasses.replace(
        options,
        max_questions=n_questions,
        degrees=weighed.uses_degrees,
        walks=weighed.uses_walks,
        embedding=weighed.uses_embedding,
        bellman_ford=weighed.uses_bellman_ford,
    )


def _start_from_proofs(
    config: RunConfig,
    dataset: Dataset,
    note: Note,
    on_phase: PhaseCallback,
    run_time: RunTime,
) -> _ScoredRun:
    """The run that learns from proofs instead, with a note that says why."""
    config = dataclasses.replace(config, learner="proofs")
    run = build_run(config, dataset, on_phase)
    scored = _choose_score(run, on_phase, run_time.until(run_time.FIT))
    return scored._replace(notes=[note, *scored.notes])


def _fit_with_embedding(
    run: Run,
    valid_seconds: float,
    on_phase: PhaseCallback,
    run_time: RunTime,
) -> tuple[Run, ListwiseFit]:
    """The listwise fit, with link embeddings where these are set or rank valid better beyond chance; and its run.

    Args:
      run: its questions are listed.
      valid_seconds: that a ranking of valid takes.
    """
    assert run.questions is not None, "the run learns from questions"
    options = run.run_config.questions
    if options.embedding is True:
        run, notes = priors.embed(run, run.questions, on_phase, run_time)
        run, plain = _fit_rules(run, valid_seconds, on_phase, run_time)
        plain = _adjust(run, plain)
        return run, plain._replace(notes=[*notes, *plain.notes])

    run, plain = _fit_rules(run, valid_seconds, on_phase, run_time)
    plain = _adjust(run, plain)
    if options.embedding is False or plain.quality is None:
        return run, plain
    embedded, notes = priors.embed(run, plain.setup, on_phase, run_time)
    if embedded is run:
        return run, plain._replace(notes=[*plain.notes, *notes])
    degrees = plain.setup.policy.aggregation.uses_degrees
    fitted = _adjust(
        embedded,
        _fit(embedded, degrees, valid_seconds, on_phase, run_time),
    )
    assert fitted.quality is not None, "there are valid queries"
    comparison = f"{plain.quality.metric:.4f} without link embeddings, {fitted.quality.metric:.4f} with them"
    if is_better(fitted.quality, plain.quality):
        notes = [
            *(
                Note(note.kind, f"without link embeddings: {note}")
                for note in plain.notes
            ),
            *notes,
            *fitted.notes,
            Note("detail", f"link embeddings on: valid {comparison}"),
        ]
        return embedded, fitted._replace(notes=notes)
    comparison += f", no gain above {MIN_GAIN_ERRORS:g} standard errors"
    note = f"link embeddings off: valid {comparison}"
    notes = [*plain.notes, *notes, Note("detail", note)]
    return run, plain._replace(notes=notes)


def _adjust(run: Run, fitted: ListwiseFit) -> ListwiseFit:
    """The fit with what valid adds to weights of all labels, unless PPO is to start from the rule confidences."""
    if not run.run_config.listwise.learning_rate:
        return fitted
    metric = _metric(run)
    is_few = has_few_valid(run.task)
    fitted = evidence_fit.raise_prior(fitted, metric, beyond_chance=is_few)
    return evidence_fit.lower_linked(fitted, metric, beyond_chance=is_few)


def _weigh_network(
    run: Run,
    plain: ListwiseFit,
    on_phase: PhaseCallback,
    run_time: RunTime,
) -> tuple[Run, ListwiseFit]:
    """The fit with a Bellman-Ford network beside it, where it is set or ranks valid better beyond chance; and its run.

    Args:
      plain: the fit without it.
    """
    config, valid = run.run_config, run.valid_evidence
    option, left_out = config.questions.bellman_ford, config.questions.left_out
    assert left_out != "auto", "what is left out is chosen before"
    starts_at_rules = not config.listwise.learning_rate
    cannot_gain = plain.quality is None or starts_at_rules
    if not option or (option == "auto" and cannot_gain):
        return run, plain
    network, note = priors.train_network(run, plain.setup, on_phase, run_time)
    notes = [*plain.notes, note]
    if network is None:
        return run, plain._replace(notes=notes)

    if valid is not None:
        run = dataclasses.replace(
            run, valid_evidence=valid.with_network(network)
        )
    fitted = evidence_fit.weigh_network(
        plain, network, _metric(run), starts_at_rules=starts_at_rules
    )
    is_kept, note = _judge_network(option == "auto", plain, fitted)
    notes += [*fitted.notes, Note("detail", note)]
    if not is_kept:
        run = dataclasses.replace(run, valid_evidence=valid)
        return run, plain._replace(notes=notes)
    notes += _asked_notes(fitted.setup)
    setup = evidence_fit.with_network(
        fitted.setup, network, left_out, config.seed, on_phase
    )
    run_time.end_phase("Bellman-Ford network", is_set=option is True)
    return run, fitted._replace(setup=setup, notes=notes)


def _asked_notes(setup: QuestionSetup) -> list[Note]:
    """A note where PPO cannot ask all questions beside a network."""
    assert setup.world is not None, "the questions are listed"
    n_questions = len(setup.world.question)
    n_asked = evidence_fit.n_asked(setup.world)
    if n_asked == n_questions:
        return []
    note = f"PPO asks {n_asked:,} of {n_questions:,} questions, drawn at random: each needs a pass through the network"
    return [Note("cut", note)]


def _judge_network(
    is_open: bool, plain: ListwiseFit, fitted: ListwiseFit
) -> tuple[bool, str]:
    """Whether a fit keeps its Bellman-Ford network, and a note that says why.

    Args:
      is_open: it must rank valid better beyond chance.
      plain: the fit without it.
    """
    if plain.quality is None or fitted.quality is None:
        return True, "Bellman-Ford network on: there is no valid split"
    comparison = f"valid {plain.quality.metric:.4f} without it, {fitted.quality.metric:.4f} with it"
    if is_open and not is_better(fitted.quality, plain.quality):
        errors = f"{MIN_GAIN_ERRORS:g} standard errors"
        return (
            False,
            f"Bellman-Ford network off: {comparison}, no gain above {errors}",
        )
    return True, f"Bellman-Ford network on: {comparison}"


def _fit_rules(
    run: Run,
    valid_seconds: float,
    on_phase: PhaseCallback,
    run_time: RunTime,
) -> tuple[Run, ListwiseFit]:
    """The listwise fit, with walks where these are set or rank valid better beyond chance; and its run.

    Args:
      run: its questions are listed, with walks unless these are off.
      valid_seconds: that a ranking of valid takes.
    """
    config, setup = run.run_config, run.questions
    assert setup is not None and setup.world is not None
    if config.questions.walks != "auto":
        return run, _fit(
            run, config.questions.degrees, valid_seconds, on_phase, run_time
        )

    may_try = (
        run.valid_evidence is not None
        and config.listwise.learning_rate > 0
        and bool(setup.world.evidence.walk.any())
    )
    plain = _fit(
        run,
        config.questions.degrees,
        valid_seconds,
        on_phase,
        run_time,
        share=SHARE_WITHOUT_WALKS if may_try else 1.0,
    )
    if may_try:
        fitted = _fit_walks(run, plain, valid_seconds, on_phase, run_time)
        if fitted.setup.policy.aggregation.uses_walks:
            return run, fitted
        plain = fitted
    run = dataclasses.replace(run, questions=evidence_fit.without_walks(setup))
    return run, plain._replace(setup=evidence_fit.without_walks(plain.setup))


def _fit_walks(
    run: Run,
    plain: ListwiseFit,
    valid_seconds: float,
    on_phase: PhaseCallback,
    run_time: RunTime,
) -> ListwiseFit:
    """The listwise fit with walks if it ranks valid better beyond chance than the one without, otherwise that one.

    Args:
      run: its questions are listed, with walks.
      plain: the fit without walks, whose other evidence is weighed, in as many epochs.
      valid_seconds: that a ranking of valid takes.
    """
    assert run.questions is not None and plain.quality is not None
    listwise = dataclasses.replace(
        run.run_config.listwise, n_epochs=plain.n_epochs
    )
    walking = dataclasses.replace(
        run,
        run_config=dataclasses.replace(run.run_config, listwise=listwise),
        questions=evidence_fit.with_walks(run.questions),
    )
    degrees = plain.setup.policy.aggregation.uses_degrees
    fitted = _fit(walking, degrees, valid_seconds, on_phase, run_time)
    assert fitted.quality is not None, "there are valid queries"
    comparison = f"{plain.quality.metric:.4f} with the share of groundings, {fitted.quality.metric:.4f} with walks"
    if is_better(fitted.quality, plain.quality):
        note = f"walks on: valid {comparison}"
        return fitted._replace(notes=[*fitted.notes, Note("detail", note)])
    note = f"walks off: valid {comparison}, no gain above {MIN_GAIN_ERRORS:g} standard errors"
    return plain._replace(notes=[*plain.notes, Note("detail", note)])


def _fit(
    run: Run,
    degrees: bool | Literal["auto"],
    valid_seconds: float,
    on_phase: PhaseCallback,
    run_time: RunTime,
    share: float = 1.0,
) -> ListwiseFit:
    """The listwise fit that ranks valid best, of those that there is time for; its notes say which these are.

    Args:
      run: its questions are listed.
      valid_seconds: that a ranking of valid takes.
      share: of the time, where another fit follows.
    """
    config, setup = run.run_config, run.questions
    assert setup is not None and setup.world is not None
    is_set = config.listwise.max_gradients is not None
    is_embedded = link_embedding.n_models(setup.facts.embedding) > 0
    end = run_time.EMBEDDING if is_embedded else run_time.FIT
    deadline = NO_DEADLINE if is_set else run_time.until(end).share(share)
    listwise, degrees_tried, notes = budget.plan_fit(
        config.listwise,
        setup.policy,
        setup.world,
        (False, True) if degrees == "auto" else (degrees,),
        deadline.seconds_left,
        valid_seconds,
        budget.time_factor(config.seconds),
        min_epochs=1 if setup.first_epoch is None else 2,
    )
    fitted = evidence_fit.fit_listwise(
        setup,
        degrees_tried,
        listwise,
        config.seed,
        config.device,
        _metric(run),
        on_phase,
        deadline,
    )
    run_time.end_phase("listwise fit", is_set=is_set)
    return fitted._replace(notes=[*notes, *fitted.notes])


def _with_default_steps(config: RunConfig) -> RunConfig:
    """The settings with a number of steps."""
    if config.steps is not None:
        return config
    return dataclasses.replace(config, steps=DEFAULT_STEPS)


def _with_steps(
    config: RunConfig, setup: QuestionSetup, seconds: float
) -> tuple[RunConfig, list[Note]]:
    """The settings with a number of steps: where none is set, as many as PPO has time for; a note if these are less.

    Args:
      seconds: of PPO without its validations.
    """
    if config.steps is not None:
        return config, []
    ppo = ppo_config(config)
    n_updates = budget.n_updates_within(
        ppo, setup.policy, config.device, max(seconds, 0.0)
    )
    if n_updates >= ppo.n_updates:
        return dataclasses.replace(config, steps=DEFAULT_STEPS), []
    steps = n_updates * ppo.n_envs * ppo.n_steps
    note = (
        f"PPO makes {n_updates} of {ppo.n_updates} updates: more would weigh over "
        f"{budget.work_factor(config.device) * budget.MAX_PPO_FIRINGS:.0e} firings or take over "
        f"{max(seconds, 0.0):.0f} s (--steps sets them)"
    )
    return dataclasses.replace(config, steps=steps), [Note("cut", note)]


def _left_out_note(options: QuestionConfig) -> Note:
    """What a question leaves out, in a line."""
    if options.left_out == "fact":
        return Note(
            "detail", "each training question is asked without its own fact"
        )
    return Note(
        "detail",
        "each training question is asked without the facts that link its two entities: no pair of the valid split is "
        "linked by a known fact",
    )


def _few_valid_notes(task: ProverTask) -> list[Note]:
    """A note where valid is so small that only differences above two standard errors count."""
    if not has_few_valid(task):
        return []
    n_triples = len(task.dataset.valid)
    errors = f"{MIN_GAIN_ERRORS:g} standard errors"
    note = (
        f"{n_triples:,} valid triples tell small differences by chance alone: the last update of PPO is kept unless it "
        f"ranks them worse than its start by more than {errors}, and rules rank answers only if they rank them better "
        "by as much"
    )
    return [Note("data", note)]


def _metric(run: Run) -> evidence_fit.Metric | None:
    """How well weights rank valid; None where there is no valid split."""
    if run.valid_evidence is None:
        return None
    return partial(validation.evidence_quality, run)
