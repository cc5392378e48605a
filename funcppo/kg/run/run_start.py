"""Start a training run with the settings by which it ranks valid best, or open one at its checkpoint."""

from __future__ import annotations

import dataclasses
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from funcppo.core.deadline import NO_DEADLINE, Deadline
from funcppo.kg.graph import loaders
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.logic import resolve
from funcppo.kg.logic.derive import RulePlan
from funcppo.kg.ranking.ranking import RankingProtocol, ranked_sides
from funcppo.kg.run import budget, evidence_fit, priors, validation
from funcppo.kg.run.budget import RunTime
from funcppo.kg.run.choices import (
    MIN_GAIN,
    HeightCandidate,
    SettingsChoice,
    best_above,
    check_rankable,
    choose_settings,
    describe_choice,
)
from funcppo.kg.run.config import Note, RunConfig, read_config
from funcppo.kg.run.evidence_fit import ListwiseFit, TrainingQuestions
from funcppo.kg.run.run import (
    DEFAULT_STEPS,
    MIN_GAIN_ERRORS,
    PROOF_SCORES,
    QuestionSetup,
    Run,
    has_few_valid,
    is_better,
    ppo_config,
    untrained_params,
    with_weights_of,
)
from funcppo.kg.run.run_build import at_start, build_run, resume_run
from funcppo.kg.scores import link_embedding
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


class _Start(NamedTuple):
    """What the choices of a new run share."""

    on_phase: PhaseCallback
    run_time: RunTime
    valid_seconds: float = 0.0  # that a ranking of valid takes


class _SearchTooLong(Exception):
    """A search has computed more successors than it may."""


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
    if not resume:
        on_phase("reading data")
        dataset = loaders.load(
            run_config.dataset, run_config.rules, cfg=run_config.data
        )
        run_time = run_time or RunTime(run_config.seconds)
        run_time.end_phase("reading")
        run_config, notes = budget.plan_settings(
            run_config, len(dataset.facts), memory_limit
        )
        run = _choose_run(run_config, dataset, _Start(on_phase, run_time))
        return dataclasses.replace(run, notes=(*notes, *run.notes))

    return resume_run(run_config, folder, on_phase)


def open_run(
    folder: Path, device: str = "cpu", on_phase: PhaseCallback = ignore_phase
) -> Run:
    """Open the run in a folder at its last checkpoint, to evaluate or to resume it.

    Raises:
      ValueError: the folder holds no run, or its data set has changed since.
    """
    run_config = dataclasses.replace(read_config(folder), device=device)
    return prepare_run(run_config, folder, resume=True, on_phase=on_phase)


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
    start: _Start,
) -> Run:
    """A new run with the settings and the score by which the untrained policy ranks valid best.

    Rule confidences choose smoothing and object identity. Of the heights that they rank, the policy chooses: a greater
    one must rank better, and none is tried after one that does not. At height 1 a run learns from questions, above it
    from proofs, unless the learner is set.
    """
    _check_splits(dataset)
    choice = _choose_settings(
        run_config,
        dataset,
        start.on_phase,
        start.run_time.until(RunTime.CHOICE),
    )
    start.run_time.end_phase("choice of settings")
    if choice.rule_counts is not None:
        dataset = dataclasses.replace(dataset, rule_counts=choice.rule_counts)
    run_config = dataclasses.replace(run_config, rule_score=choice.score)
    best, notes = _choose_height(run_config, dataset, choice, start)
    chosen = [
        Note("cut" if line in choice.notes else "detail", line)
        for line in describe_choice(choice, best.run.task.max_height)
    ]
    if best.run.questions is not None:
        best = _start_from_fit(
            best, run_config.learner == "auto", dataset, start
        )
    run = best.run
    rule_metric = run.rule_metric
    if run.questions is None and not start.run_time.until(RunTime.FIT).is_over:
        start.on_phase("ranking valid by rule confidences")
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
    start: _Start,
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
                start,
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
    plan: RulePlan | None,
    start: _Start,
) -> _ScoredRun:
    """A new run at a height, with its score.

    Args:
      best: the run at the height below; None for the first one, whose search may be long.
      plan: as in `prover.task.build_task`.

    Raises:
      _SearchTooLong: its search is.
    """
    deadline = start.run_time.until(RunTime.VALID)
    if best is None:
        run = build_run(config, dataset, start.on_phase, deadline, plan)
        start.run_time.end_phase("what the rules derive")
        deadline = start.run_time.until(RunTime.VALID)
        scored = _choose_score(run, start.on_phase, deadline)
        start.run_time.end_phase("evidence of valid")
        return scored
    _check_search(best.run.task, candidate)
    run = build_run(config, dataset, start.on_phase)
    scored = _try_height(run, start.on_phase, deadline)
    start.run_time.end_phase("greater heights")
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

    chosen = best_above(mrr)
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
        variant = with_weights_of(setup, odds_power=power)
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

    power = best_above({p: found.mrr for p, found in scored.items()})
    if len(powers) == 1:
        return scored[power]
    listing = ", ".join(f"{p:g} {found.mrr:.4f}" for p, found in scored.items())
    note = f"evidence: power {power:g} of the odds chosen: MRR untrained on valid: {listing}"
    return scored[power]._replace(notes=[Note("detail", note)])


def _start_from_fit(
    scored: _ScoredRun,
    may_learn_from_proofs: bool,
    dataset: Dataset,
    start: _Start,
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
        setup, collected = _collect_questions(run, options, start)
    except ValueError as error:
        if not may_learn_from_proofs:
            raise ValueError(f"{dataset.name}: learner: {error}") from None
        note = Note(
            "answers", f"learner proofs: no question to learn from: {error}"
        )
        return _start_from_proofs(config, dataset, note, start)

    run = dataclasses.replace(
        run,
        questions=with_weights_of(setup, uses_bellman_ford=False),
        run_config=dataclasses.replace(config, questions=options),
    )
    start = start._replace(valid_seconds=scored.valid_seconds)
    run, fitted = _fit_with_embedding(run, start)
    run, fitted = _weigh_network(run, fitted, start)
    options = _chosen_options(options, collected.n_questions, fitted.setup)
    ppo, parts_notes = budget.split_minibatches(
        config.ppo,
        fitted.setup.policy.capacity,
        config.listwise.max_batch_firings,
    )
    config = dataclasses.replace(config, questions=options, ppo=ppo)
    seconds = start.run_time.until(RunTime.PPO).seconds_left
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
    start: _Start,
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
        start.on_phase,
        start.run_time.until(RunTime.QUESTIONS),
    )
    start.run_time.end_phase("questions", is_set=is_set)
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
    start: _Start,
) -> _ScoredRun:
    """The run that learns from proofs instead, with a note that says why."""
    config = dataclasses.replace(config, learner="proofs")
    run = build_run(config, dataset, start.on_phase)
    scored = _choose_score(
        run, start.on_phase, start.run_time.until(RunTime.FIT)
    )
    return scored._replace(notes=[note, *scored.notes])


def _fit_with_embedding(
    run: Run,
    start: _Start,
) -> tuple[Run, ListwiseFit]:
    """The listwise fit, with link embeddings where these are set or rank valid better beyond chance; and its run.

    Args:
      run: its questions are listed.
    """
    assert run.questions is not None, "the run learns from questions"
    options = run.run_config.questions
    if options.embedding is True:
        run, notes = priors.embed(
            run, run.questions, start.on_phase, start.run_time
        )
        run, plain = _fit_rules(run, start)
        plain = _adjust(run, plain)
        return run, plain._replace(notes=[*notes, *plain.notes])

    run, plain = _fit_rules(run, start)
    plain = _adjust(run, plain)
    if options.embedding is False or plain.quality is None:
        return run, plain
    embedded, notes = priors.embed(
        run, plain.setup, start.on_phase, start.run_time
    )
    if embedded is run:
        return run, plain._replace(notes=[*plain.notes, *notes])
    degrees = plain.setup.policy.aggregation.uses_degrees
    fitted = _adjust(embedded, _fit(embedded, degrees, start))
    labels = ("without link embeddings", "with them")
    is_kept, note = _keep_better("link embeddings", plain, fitted, labels)
    if not is_kept:
        return run, plain._replace(notes=[*plain.notes, *notes, note])
    before = [
        Note(one.kind, f"without link embeddings: {one}") for one in plain.notes
    ]
    notes = [*before, *notes, *fitted.notes, note]
    return embedded, fitted._replace(notes=notes)


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
    start: _Start,
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
    network, note = priors.train_network(
        run, plain.setup, start.on_phase, start.run_time
    )
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
    is_kept, note = _keep_better(
        "Bellman-Ford network",
        plain,
        fitted,
        ("without it", "with it"),
        is_open=option == "auto",
    )
    notes += [*fitted.notes, note]
    if not is_kept:
        run = dataclasses.replace(run, valid_evidence=valid)
        return run, plain._replace(notes=notes)
    notes += _asked_notes(fitted.setup)
    setup = evidence_fit.with_network(
        fitted.setup, network, left_out, config.seed, start.on_phase
    )
    start.run_time.end_phase("Bellman-Ford network", is_set=option is True)
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


def _keep_better(
    name: str,
    plain: ListwiseFit,
    fitted: ListwiseFit,
    labels: tuple[str, str],
    *,
    is_open: bool = True,
) -> tuple[bool, Note]:
    """Whether a fit with something more is kept, and a note that says why.

    Args:
      name: of what it has more.
      plain: the fit without.
      labels: how the note names the two.
      is_open: it must rank valid better beyond chance.
    """
    if plain.quality is None or fitted.quality is None:
        return True, Note("detail", f"{name} on: there is no valid split")
    without, more = labels
    text = f"valid {plain.quality.metric:.4f} {without}, {fitted.quality.metric:.4f} {more}"
    if is_open and not is_better(fitted.quality, plain.quality):
        errors = f"no gain above {MIN_GAIN_ERRORS:g} standard errors"
        return False, Note("detail", f"{name} off: {text}, {errors}")
    return True, Note("detail", f"{name} on: {text}")


def _fit_rules(
    run: Run,
    start: _Start,
) -> tuple[Run, ListwiseFit]:
    """The listwise fit, with walks where these are set or rank valid better beyond chance; and its run.

    Args:
      run: its questions are listed, with walks unless these are off.
    """
    config, setup = run.run_config, run.questions
    assert setup is not None and setup.world is not None
    if config.questions.walks != "auto":
        return run, _fit(run, config.questions.degrees, start)

    may_try = (
        run.valid_evidence is not None
        and config.listwise.learning_rate > 0
        and bool(setup.world.evidence.walk.any())
    )
    plain = _fit(
        run,
        config.questions.degrees,
        start,
        share=SHARE_WITHOUT_WALKS if may_try else 1.0,
    )
    if may_try:
        fitted = _fit_walks(run, plain, start)
        if fitted.setup.policy.aggregation.uses_walks:
            return run, fitted
        plain = fitted
    run = dataclasses.replace(run, questions=evidence_fit.without_walks(setup))
    return run, plain._replace(setup=evidence_fit.without_walks(plain.setup))


def _fit_walks(
    run: Run,
    plain: ListwiseFit,
    start: _Start,
) -> ListwiseFit:
    """The listwise fit with walks if it ranks valid better beyond chance than the one without, otherwise that one.

    Args:
      run: its questions are listed, with walks.
      plain: the fit without walks, whose other evidence is weighed, in as many epochs.
    """
    assert run.questions is not None and plain.quality is not None
    listwise = dataclasses.replace(
        run.run_config.listwise, n_epochs=plain.n_epochs
    )
    walking = dataclasses.replace(
        run,
        run_config=dataclasses.replace(run.run_config, listwise=listwise),
        questions=with_weights_of(run.questions, uses_walks=True),
    )
    degrees = plain.setup.policy.aggregation.uses_degrees
    fitted = _fit(walking, degrees, start)
    labels = ("with the share of groundings", "with walks")
    is_kept, note = _keep_better("walks", plain, fitted, labels)
    best = fitted if is_kept else plain
    return best._replace(notes=[*best.notes, note])


def _fit(
    run: Run,
    degrees: bool | Literal["auto"],
    start: _Start,
    share: float = 1.0,
) -> ListwiseFit:
    """The listwise fit that ranks valid best, of those that there is time for; its notes say which these are.

    Args:
      run: its questions are listed.
      share: of the time, where another fit follows.
    """
    config, setup = run.run_config, run.questions
    assert setup is not None and setup.world is not None
    is_set = config.listwise.max_gradients is not None
    is_embedded = link_embedding.n_models(setup.facts.embedding) > 0
    end = RunTime.EMBEDDING if is_embedded else RunTime.FIT
    deadline = NO_DEADLINE if is_set else start.run_time.until(end).share(share)
    listwise, degrees_tried, notes = budget.plan_fit(
        config.listwise,
        setup.policy,
        setup.world,
        (False, True) if degrees == "auto" else (degrees,),
        deadline.seconds_left,
        start.valid_seconds,
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
        start.on_phase,
        deadline,
    )
    start.run_time.end_phase("listwise fit", is_set=is_set)
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
