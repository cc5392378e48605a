"""How well the policy of a run ranks: at a validation, which keeps the best parameters, and on any split."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo.config import Config
from funcppo.core import tree
from funcppo.core.deadline import NO_DEADLINE, Deadline
from funcppo.core.settings import is_cuda
from funcppo.core.types import F64
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.joins import RowBudgetExceeded
from funcppo.kg.ranking import calibration, rank_metrics, ranking, scoring
from funcppo.kg.ranking.calibration import Bins
from funcppo.kg.ranking.policy_score import (
    PolicyScore,
    needs_search,
    search_config,
)
from funcppo.kg.ranking.ranking import (
    RankedRows,
    RankingProtocol,
    random_rows,
    ranked_sides,
    selection_metric,
)
from funcppo.kg.run import budget
from funcppo.kg.run.choices import MIN_GAIN
from funcppo.kg.run.config import Note, RunConfig
from funcppo.kg.run.run import (
    EVIDENCE_SCORE,
    MIN_GAIN_ERRORS,
    QuestionSetup,
    Run,
    RunScore,
    ValidEvidence,
    ValidQuality,
    has_few_valid,
    is_better,
    make_weights,
    untrained_params,
)
from funcppo.kg.scores.learned import LearnedScore
from funcppo.kg.scores.score import OTHER_FACTS, Score, parse
from funcppo.kg.search import task as prover_task
from funcppo.kg.search.beam_search import (
    ScoreName,
    SearchConfig,
    slots_for_rows,
)
from funcppo.kg.search.slot_scheduler import ProgressCallback, ignore_progress
from funcppo.kg.search.task import PhaseCallback, ProverTask, ignore_phase

# A validation ranks fewer queries if it would compute more successors than this, by a rough count, but not fewer than
# the minimum.
MAX_VALIDATION_SUCCESSORS = 1_000_000
MIN_VALIDATION_QUERIES = 20
# The same where rules alone score candidates, whose successors take under a microsecond.
MAX_VALIDATION_SUCCESSORS_BY_RULES = 10_000_000
# queries of a validation of proofs, unless a number is set
MAX_PROOF_QUERIES = 1000
# of a search, before it is tuned for the machine
BEAM_WIDTH = 64
# test queries whose ranking tells how many there is time for
FIRST_ROUND = 16
# rows of joins to count the other facts of candidates by
MAX_OTHER_FACT_ROWS = 100_000_000
# Where T_P is not held: queries whose answers tell how many queries are ranked together, and answers of these.
FIRST_CHUNK_QUERIES = 64
MAX_CHUNK_ANSWERS = 4_000_000


def validate(
    run: Run, on_progress: ProgressCallback = ignore_progress
) -> tuple[Run, float | None]:
    """Rank the valid queries, and keep the current parameters as the best if they rank better than any before.

    Without valid queries the current parameters are kept. Those of a policy that proves replace the untrained ones only
    where valid gains more than chance gives: on a few queries the best of some ten validations gains a little anyway.
    Where a run learns from questions and valid is small, the current parameters are kept unless they rank valid worse
    than those before the first update by more than chance gives: the best of some ten validations is mostly luck, and
    the last one has learnt most.

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
        quality = validation_quality(run, params, on_progress)
        # Rounded before the comparison: an equal metric in a higher precision may be above or below the rounded best.
        valid_metric = torch.full_like(
            state.best_valid_metric, quality[selection_metric(run.task)]
        )
        if _chooses_by_errors(run):
            is_kept = not _loses_beyond_chance(run)
        else:
            is_better = bool(valid_metric > state.best_valid_metric)
            is_kept = is_better and _gains_beyond_chance(run, on_progress)
        if not is_kept:
            return run, float(valid_metric)

    # Clones, because the next update overwrites the leaves of the training state.
    best = state._replace(
        best_params=tree.map(torch.clone, state.train_state.params),
        best_valid_metric=valid_metric,
        best_update=state.train_state.update.clone(),
    )
    run = dataclasses.replace(run, state=best)
    if _chooses_by_errors(run):
        run = dataclasses.replace(run, rule_margin=_rule_margin(run))
    return run, float(valid_metric) if has_queries else None


def _chooses_by_errors(run: Run) -> bool:
    """Whether only differences above two standard errors count on valid: in a run that learns from few questions."""
    has_evidence = run.questions is not None and run.valid_evidence is not None
    return has_evidence and has_few_valid(run.task)


def _loses_beyond_chance(run: Run) -> bool:
    """Whether the current parameters rank valid worse than those before the first update, queries paired."""
    assert run.questions is not None, "the run learns from questions"
    start, current = (
        evidence_quality(run, run.questions, params)
        for params in (run.state.start_params, run.state.train_state.params)
    )
    return is_better(start, current)


def _rule_margin(run: Run) -> float:
    """Two standard errors of what the rule score ranks valid better than the best parameters, queries paired."""
    valid = run.valid_evidence
    assert run.questions is not None and valid is not None
    by_rules = valid.rank_by_rules(run.run_config.rule_score)
    gain = rank_metrics.expected_reciprocal_ranks(by_rules.counts)
    quality = evidence_quality(run, run.questions, run.state.best_params)
    gain = gain - quality.reciprocal_rank
    error = float(gain.std()) / len(gain) ** 0.5
    return MIN_GAIN_ERRORS * error


def _gains_beyond_chance(run: Run, on_progress: ProgressCallback) -> bool:
    """Whether the parameters of a policy that proves rank valid better than the untrained ones, queries paired.

    True where others than the untrained ones are the best so far, and where a run learns from questions, whose start is
    chosen so.
    """
    state = run.state
    is_first = float(state.best_valid_metric) < 0
    if is_first or int(state.best_update) > 0 or run.questions is not None:
        return True

    queries = validation_queries(run)
    protocol = RankingProtocol(sides=ranked_sides(run.task))
    qualities: list[ValidQuality] = []
    for params in (state.train_state.params, state.start_params):
        score = policy_score(run, params, run.score, on_progress)
        ranked = ranking.rank_split(
            run.task, queries, score, protocol, on_progress=on_progress
        )
        ranks = rank_metrics.expected_reciprocal_ranks(ranked.counts)
        qualities.append(ValidQuality(float(ranks.mean()), ranks))
    return is_better(*qualities)


def validation_quality(
    run: Run, params: Any, on_progress: ProgressCallback
) -> dict[str, Any]:
    """The metrics of the queries that every validation ranks."""
    if run.questions is None or run.valid_evidence is None:
        return evaluate_policy(
            run,
            params,
            validation_queries(run),
            RankingProtocol(sides=ranked_sides(run.task)),
            on_progress=on_progress,
        )
    on_progress(0, len(run.valid_evidence.queries))
    return summarise(run, run.valid_evidence.rank(run.questions, params))


def rule_metric(run: Run, name: str | None = None) -> float | None:
    """The metric of a rule score on the queries of a validation; None where they or T_P are not held.

    In a run that learns from questions a query that is a fact may be derived from itself, as in the evidence that the
    policy weighs.

    Args:
      name: of the score; None for that of the run.
    """
    name, valid = name or run.run_config.rule_score, run.valid_evidence
    if valid is not None:
        ranked = valid.rank_by_rules(name)
    elif run.questions is None and run.task.least_model.complete:
        queries = validation_queries(run)
        if not len(queries):
            return None
        protocol = RankingProtocol(sides=ranked_sides(run.task))
        ranked = ranking.rank_split(run.task, queries, parse(name), protocol)
    else:
        return None
    return summarise(run, ranked)[selection_metric(run.task)]


def choose_other_facts(
    run: Run, deadline: Deadline = NO_DEADLINE
) -> tuple[Run, str | None, list[Note]]:
    """The variant of the run's rule score with other facts, where it ranks valid better.

    Args:
      deadline: ends the count of other facts.

    Returns:
      The run, with the counts that the variant reads; the variant, None where valid does not prefer it; and a note on
      what valid said, or why it was not asked.
    """
    name, before = run.run_config.rule_score, run.rule_metric
    if before is None or not parse(name).takes_other_facts:
        return run, None, []
    variant = f"{name}{OTHER_FACTS}"
    report_or_stop = partial(_report_or_stop, ignore_phase, deadline)
    try:
        report_or_stop("counting")
        task = prover_task.with_other_facts(
            run.task, report_or_stop, MAX_OTHER_FACT_ROWS
        )
    except (_TimeOver, RowBudgetExceeded) as error:
        reason = "there was no time for it (--seconds)"
        if isinstance(error, RowBudgetExceeded):
            reason = f"counting other facts makes more than {MAX_OTHER_FACT_ROWS:,} rows of joins"
        note = f"{variant}: not tried on valid: {reason}"
        return run, None, [Note("cut", note)]

    valid = run.valid_evidence
    counted = dataclasses.replace(
        run,
        task=task,
        valid_evidence=valid and valid.with_other_facts(task),
    )
    after = rule_metric(counted, variant) or 0.0
    if after <= before + MIN_GAIN:
        return run, None, []
    note = (
        f"{variant}: valid is ranked better, {after:.4f} for {before:.4f}, where it counts whether a candidate has "
        "other facts of the relation; test is ranked with it and without"
    )
    return counted, variant, [Note("detail", note)]


def evidence_quality(
    run: Run, setup: QuestionSetup, params: Any
) -> ValidQuality:
    """How well weights of evidence rank the queries of a validation."""
    assert run.valid_evidence is not None, "there are valid queries"
    ranked = run.valid_evidence.rank(setup, params)
    metrics = summarise(run, ranked)
    return ValidQuality(
        metrics[selection_metric(run.task)],
        rank_metrics.expected_reciprocal_ranks(ranked.counts),
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
    ranked = ranking.rank_split(
        run.task,
        split,
        policy_score(run, params, score or run.score, on_progress),
        ranking_protocol,
        on_progress=on_progress,
    )
    return summarise(run, ranked)


def evaluate_scores(
    run: Run,
    split: np.ndarray,
    protocol: RankingProtocol,
    rule_scores: Sequence[str],
    on_phase: PhaseCallback = ignore_phase,
) -> dict[str, dict[str, Any]]:
    """The metrics of scores that need no training and of the parameters that a run is evaluated with, by name.

    Args:
      rule_scores: names of scores that need no training.

    Raises:
      ValueError: a query cannot be ranked (see `ranking.check_split`).
    """
    parts = _rank_parts(run, split, protocol, rule_scores, on_phase)
    return _summarise_by_score(run, parts, len(split))


class SampledMetrics(NamedTuple):
    """Metrics by the name of the score, and of how many queries."""

    metrics: dict[str, dict[str, Any]]
    n_queries: int  # random ones, where these are not all
    # candidates by their probability, see `policy_bins`; empty without queries
    bins: dict[str, Bins]


class Calibration(NamedTuple):
    """A temperature that valid has chosen for the trained policy, and valid's candidates by their probability."""

    temperature: float
    bins: dict[str, Bins]  # see `policy_bins`


class _RankedPart(NamedTuple):
    """A part of a split, ranked by one score."""

    rows: RankedRows
    reciprocal_rank: F64[Tensor, "q"]  # of each query, the mean of its sides
    auc_pr: float | None  # of Countries
    bins: dict[str, Bins]  # see `policy_bins`


class _TimeOver(Exception):
    """A ranking has not ended in time."""


def evaluate_within(
    run: Run,
    split: np.ndarray,
    protocol: RankingProtocol,
    rule_scores: Sequence[str],
    deadline: Deadline,
    on_phase: PhaseCallback = ignore_phase,
    temperature: float | None = None,
) -> SampledMetrics:
    """The metrics of `evaluate_scores` of as many queries as there is time for; a random sample has intervals too.

    Where a ranking of the first queries says that all fit, they are ranked together. Otherwise rounds of random queries
    are ranked, each planned by the time of the one before; a round that does not end in time is dropped.

    Args:
      temperature: for the probabilities of the trained policy, which are counted without and with it; None for none.

    Raises:
      ValueError: a query cannot be ranked (see `ranking.check_split`).
    """
    order = np.random.default_rng(0).permutation(len(split))
    order = order[: count_test_queries(run)]
    size = min(FIRST_ROUND, len(order))
    seconds = _seconds_of(run, split[order[:size]], protocol, deadline)
    if seconds * len(order) / max(size, 1) <= deadline.seconds_left:
        size = len(order)

    report_or_stop = partial(_report_or_stop, on_phase, deadline)
    parts: dict[str, list[_RankedPart]] = {}
    start = 0
    while size > 0 and start < len(order):
        began = time.monotonic()
        queries = split[np.sort(order[start : start + size])]
        try:
            found = _rank_parts(
                run, queries, protocol, rule_scores, report_or_stop, temperature
            )
        except _TimeOver:
            break
        for name, of_name in found.items():
            parts.setdefault(name, []).extend(of_name)
        start += len(queries)
        each = (time.monotonic() - began) / len(queries)
        n_left = len(order) - start
        # Without a deadline the seconds left are infinite.
        n_fitting = int(min(deadline.seconds_left / max(each, 1e-9), n_left))
        is_last = n_fitting == n_left
        size = n_fitting if is_last else min(n_fitting // 2, 8 * size)
    return SampledMetrics(
        metrics=_summarise_by_score(run, parts, len(split)),
        n_queries=start,
        bins=_add_bins(parts),
    )


def _add_bins(
    parts: Mapping[str, Sequence[_RankedPart]],
) -> dict[str, Bins]:
    """The candidates of all parts by their probability."""
    bins: dict[str, list[Bins]] = {}
    for of_name in parts.values():
        for part in of_name:
            for state, counted in part.bins.items():
                bins.setdefault(state, []).append(counted)
    return {
        state: calibration.add_bins(counted) for state, counted in bins.items()
    }


def _seconds_of(
    run: Run, queries: np.ndarray, protocol: RankingProtocol, deadline: Deadline
) -> float:
    """What a ranking of some queries takes; infinity if it does not end in time, 0 where there is no bound."""
    if math.isinf(deadline.at) or not len(queries):
        return 0.0

    start = time.monotonic()
    report_or_stop = partial(_report_or_stop, ignore_phase, deadline)
    try:
        _rank_parts(run, queries, protocol, (), report_or_stop)
    except _TimeOver:
        return math.inf
    return time.monotonic() - start


def _report_or_stop(
    on_phase: PhaseCallback,
    limit: Deadline,
    text: str,
    done: int = 0,
    total: int | None = None,
    _: Deadline = NO_DEADLINE,
    /,
) -> None:
    """Report the progress of a ranking or a count.

    Args:
      limit: when it ends, whatever is left.

    Raises:
      _TimeOver: the limit has passed.
    """
    if limit.is_over:
        raise _TimeOver
    on_phase(text, done, total, limit)


def _rank_parts(
    run: Run,
    split: np.ndarray,
    protocol: RankingProtocol,
    rule_scores: Sequence[str],
    on_phase: PhaseCallback,
    temperature: float | None = None,
) -> dict[str, list[_RankedPart]]:
    """The rankings of a split, by the name of the score."""
    parts: dict[str, list[_RankedPart]] = {}
    for name, ranked in iter_rankings(
        run, split, protocol, rule_scores, on_phase
    ):
        of_rows = rank_metrics.expected_reciprocal_ranks(ranked.counts)
        total = of_rows.new_zeros(len(ranked.queries))
        total = total.index_add(0, ranked.query_row, of_rows)
        part = _RankedPart(
            ranking.ranked_rows(ranked),
            total / len(protocol.sides),
            ranking.auc_pr(ranked) if run.task.is_countries else None,
            policy_bins(run, name, ranked, temperature),
        )
        parts.setdefault(name, []).append(part)
    return parts


def _summarise_by_score(
    run: Run, parts: Mapping[str, Sequence[_RankedPart]], n_all: int
) -> dict[str, dict[str, Any]]:
    """The metrics of each score; those of a sample with the 95 % interval of its MRR.

    Args:
      n_all: the queries that are ranked or were sampled from.
    """
    summary: dict[str, dict[str, Any]] = {}
    for name, of_name in parts.items():
        rows = [part.rows for part in of_name]
        auc = of_name[0].auc_pr if len(of_name) == 1 else None
        metrics = summarise_parts(run, rows, auc)
        rank = torch.cat([part.reciprocal_rank for part in of_name])
        n = len(rank)
        if 1 < n < n_all:
            error = float(rank.std()) * ((1 - n / n_all) / n) ** 0.5
            mean = float(rank.mean())
            metrics["mrr_interval"] = [
                mean - calibration.NORMAL_95 * error,
                mean + calibration.NORMAL_95 * error,
            ]
        summary[name] = metrics
    return summary


def summarise_parts(
    run: Run, parts: Sequence[RankedRows], auc: float | None
) -> dict[str, Any]:
    """The metrics of the parts of a ranking.

    Args:
      auc: the area under the precision-recall curve; None but for Countries.
    """
    predicates = list(run.task.dataset.predicates)
    metrics = ranking.summarise_rows(parts, predicates)
    return metrics if auc is None else metrics | {"auc_pr": auc}


def iter_rankings(
    run: Run,
    split: np.ndarray,
    protocol: RankingProtocol,
    rule_scores: Sequence[str],
    on_phase: PhaseCallback = ignore_phase,
) -> Iterator[tuple[str, ranking.Ranking]]:
    """Yield the rankings that `evaluate_scores` summarises, with the name of the score, the trained policy last.

    A ranking is of the whole split, or where answers are derived by query of a part of it: the same parts for all
    scores, in the same order.

    Args:
      rule_scores: names of scores that need no training.

    Raises:
      ValueError: a query cannot be ranked (see `ranking.check_split`).
    """
    ranking.check_split(run.task, split, protocol)
    if run.questions is not None and not _has_facts(run, split):
        yield from _rank_by_evidence_of(
            run, split, protocol, rule_scores, on_phase
        )
        return

    for name in rule_scores:
        on_phase(f"ranking by {name}")
        yield name, ranking.rank_split(run.task, split, parse(name), protocol)
    if run.questions is not None:
        yield from _rank_by_evidence_of(run, split, protocol, (), on_phase)
        return
    for name, params in policies(run).items():
        on_progress = partial(on_phase, f"ranking by {name}")
        policy = policy_score(run, params, run.score, on_progress)
        yield name, ranking.rank_split(run.task, split, policy, protocol)


def _has_facts(run: Run, split: np.ndarray) -> bool:
    """Whether a query is a fact, which no rule score may derive from itself."""
    task = run.task
    atoms = torch.from_numpy(split).long().to(task.kb.facts.device)
    return bool(kbase.contains(task.kb, task.sizes, atoms).any())


def _rank_by_evidence_of(
    run: Run,
    split: np.ndarray,
    protocol: RankingProtocol,
    rule_scores: Sequence[str],
    on_phase: PhaseCallback,
) -> Iterator[tuple[str, ranking.Ranking]]:
    """Yield the rankings of a split by rules and by weights of evidence, collected once; of its parts by query."""
    task, setup = run.task, run.questions
    assert setup is not None, "the run learns from questions"
    scores: list[Score] = [parse(name) for name in rule_scores]
    scores += [
        LearnedScore(name, make_weights(task, setup, params))
        for name, params in policies(run).items()
    ]
    parts = [(task, split)]
    if task.answers_plan is not None:
        parts = _iter_answered(task, split, protocol)
    for answered, queries in parts:
        rankings = ranking.rank_by_questions(
            answered,
            queries,
            setup.facts,
            scores,
            protocol,
            partial(on_phase, "ranking by evidence"),
        )
        for score, ranked in zip(scores, rankings, strict=True):
            yield score.name, ranked


def _iter_answered(
    task: ProverTask, split: np.ndarray, protocol: RankingProtocol
) -> Iterator[tuple[ProverTask, np.ndarray]]:
    """Yield some queries of a split after others, and the task with all their answers, as many as a bound allows."""
    split = split[np.lexsort((split[:, 1], split[:, 0]))]
    start, size = 0, FIRST_CHUNK_QUERIES
    while start < len(split):
        queries = split[start : start + size]
        answered = prover_task.with_answers(
            task, torch.from_numpy(queries), protocol.sides
        )
        yield answered, queries
        start += size
        n_derived = int((answered.least_model.height > 0).sum())
        most = int(size * task.cfg.memory_share * MAX_CHUNK_ANSWERS)
        size = max(1, most // max(n_derived, 1))


def summarise(run: Run, ranked: ranking.Ranking) -> dict[str, Any]:
    """The metrics of a ranking, for Countries also "auc_pr"."""
    return ranking.summarise_ranking(
        ranked,
        list(run.task.dataset.predicates),
        with_auc=run.task.is_countries,
    )


# -- calibration

# The policy before training, after it, and with the temperature that valid has chosen.
UNTRAINED, TRAINED, TEMPERED = "untrained", "trained", "trained_at_temperature"


def policy_bins(
    run: Run, name: str, ranked: ranking.Ranking, temperature: float | None
) -> dict[str, Bins]:
    """The listed candidates of a ranking by their probability: by `UNTRAINED`, or by `TRAINED` and `TEMPERED`.

    Args:
      name: of the score that ranks; nothing is counted of scores other than the first and the last of `policies`.
      temperature: of the trained policy; None for none.
    """
    count = partial(
        calibration.bin_ranking,
        ranked,
        among_candidates=run.score == EVIDENCE_SCORE,
    )
    names = list(policies(run))
    if name == names[0]:
        return {UNTRAINED: count()}
    if name != names[-1]:
        return {}
    if temperature is None:
        return {TRAINED: count()}
    return {TRAINED: count(), TEMPERED: count(temperature=temperature)}


def calibrate(
    run: Run, deadline: Deadline, on_phase: PhaseCallback = ignore_phase
) -> Calibration | None:
    """Choose a temperature on the queries of a validation; None without any, or where it does not end in time."""
    queries = validation_queries(run)
    if not len(queries):
        return None

    first, *_, last = policies(run).items()
    report = partial(
        _report_or_stop, on_phase, deadline, "calibrating on valid"
    )
    try:
        untrained, trained = (
            _rank_valid(run, params, queries, report)
            for _, params in (first, last)
        )
    except _TimeOver:
        return None

    temperature = calibration.choose_temperature(
        trained, among_candidates=run.score == EVIDENCE_SCORE
    )
    return Calibration(
        temperature,
        policy_bins(run, first[0], untrained, None)
        | policy_bins(run, last[0], trained, temperature),
    )


def _rank_valid(
    run: Run, params: Any, queries: np.ndarray, on_progress: ProgressCallback
) -> ranking.Ranking:
    """The queries of a validation, ranked by a policy."""
    on_progress(0, len(queries))
    if run.questions is not None and run.valid_evidence is not None:
        return run.valid_evidence.rank(run.questions, params)
    score = policy_score(run, params, run.score, on_progress)
    protocol = RankingProtocol(sides=ranked_sides(run.task))
    return ranking.rank_split(
        run.task, queries, score, protocol, on_progress=on_progress
    )


def policies(run: Run) -> dict[str, Any]:
    """The parameters that a run is evaluated with, by name: untrained, after the listwise fit if any, trained."""
    if run.questions is None:
        return {
            f"{run.score}, untrained": run.state.start_params,
            f"{run.score}, trained": run.state.best_params,
        }
    device = run.run_config.device
    return {
        "evidence, untrained": untrained_params(run.questions, device),
        "evidence, listwise fit": run.state.start_params,
        "evidence, trained": run.state.best_params,
    }


def policy_score(
    run: Run,
    params: Any,
    name: RunScore,
    on_progress: ProgressCallback = ignore_progress,
) -> Score:
    """The score of candidates by a policy, with the search settings of `run_search_config`.

    Args:
      on_progress: called with the number of candidates that a search has started, and of all.
    """
    if name == EVIDENCE_SCORE:
        assert run.questions is not None, "the run learns from questions"
        left_out = run.run_config.questions.left_out
        weights = make_weights(
            run.task,
            run.questions,
            params,
            "fact" if left_out == "auto" else left_out,
        )
        return LearnedScore(name, weights)
    cfg = run_search_config(run, name)
    return PolicyScore(cfg, run.task, params, run.search_step, on_progress)


def run_search_config(run: Run, score: ScoreName) -> SearchConfig:
    """The settings of a search for scores, before `evaluate` has tuned them to the machine."""
    beam = 1 if score == "greedy" else BEAM_WIDTH
    max_successors = run.cfg.env.cfg.resolve.max_successors
    rows = min(512, 4096 // max_successors)
    if is_cuda(run.run_config.device):
        rows *= 16
    rows_per_step = max(beam, rows)

    cfg = search_config(
        run.task,
        run.cfg,
        score,
        slots=slots_for_rows(rows_per_step, beam),
        beam=beam,
        rows_per_step=rows_per_step,
        chunk_size=2048,
    )
    if is_cuda(run.run_config.device) or needs_search(run.task, cfg):
        return cfg
    # Without a search a chunk holds the successors of all its candidates, and a deadline or a signal ends a ranking
    # between two chunks.
    most = max(1, (1 << 16) // max_successors)
    return dataclasses.replace(cfg, chunk_size=min(cfg.chunk_size, most))


def validation_queries(run: Run) -> np.ndarray:
    """The valid queries that every validation ranks, in their order: a fixed sample."""
    valid = run.task.dataset.valid
    rows = random_rows(len(valid), run.n_validation_queries)
    return valid[np.sort(rows)]


def count_validation_queries(
    run_config: RunConfig, task: ProverTask, cfg: Config
) -> int:
    """How many valid queries a validation of proofs ranks: as set, or as many as keep it within its bound."""
    valid = task.dataset.valid
    n_queries = most_validation_queries(run_config, task)
    if not n_queries:
        return 0

    queries = valid[random_rows(len(valid), n_queries)]
    protocol = RankingProtocol(sides=ranked_sides(task))
    n_candidates = ranking.count_candidates(task, queries, protocol)
    n_successors = cfg.env.cfg.resolve.max_successors
    if task.fact_selection != "oracle":
        n_successors = count_search_successors(n_successors, task.max_height)
    share = max_validation_successors(task) / max(
        1, n_candidates * n_successors
    )
    if share >= 1:
        return n_queries
    return max(int(n_queries * share), min(MIN_VALIDATION_QUERIES, n_queries))


def most_validation_queries(run_config: RunConfig, task: ProverTask) -> int:
    """How many valid queries a validation of proofs may rank, if they keep it within its bound."""
    n_queries = run_config.n_validation_queries or MAX_PROOF_QUERIES
    return min(n_queries, len(task.dataset.valid))


def count_test_queries(run: Run) -> int:
    """How many test queries the end of a run ranks: all, or as many as weighing their evidence has time for."""
    test = run.task.dataset.test
    if run.questions is None:
        return len(test)
    factor = budget.work_factor(run.task.kb.facts.device.type)
    return scoring.count_queries_within(
        run.task,
        run.questions.facts,
        test[random_rows(len(test), len(test))],
        ranked_sides(run.task),
        # some two minutes each, a chunk of questions at a time
        max_firings=factor * 100_000_000,
        max_rows=factor * 400_000_000,
    ).n_queries


def test_rows(run: Run) -> np.ndarray:
    """The rows of test that the end of a run ranks if its time allows it: all, or a random sample."""
    test = run.task.dataset.test
    if not len(test):
        return np.arange(0)
    return np.sort(random_rows(len(test), count_test_queries(run)))


def max_validation_successors(task: ProverTask) -> int:
    """How many successors a validation may compute."""
    if task.fact_selection == "oracle":
        return MAX_VALIDATION_SUCCESSORS_BY_RULES
    return MAX_VALIDATION_SUCCESSORS


def count_search_successors(max_successors: int, height: int) -> int:
    """A rough count of the successors in the search for one candidate: of its partial proofs, at every step."""
    n_proofs = min(BEAM_WIDTH, max_successors)
    return n_proofs * max_successors * 3 * height  # three steps for a height


def with_valid_evidence(run: Run, seconds: float = math.inf) -> Run:
    """The run with the evidence of the queries that a validation ranks, of which there may be fewer.

    Args:
      seconds: that it may take; fewer queries are a setting of the run then.
    """
    setup = run.questions
    if setup is None or run.valid_evidence or not len(run.task.dataset.valid):
        return run
    valid = run.task.dataset.valid
    queries = valid[random_rows(len(valid), run.n_validation_queries)]
    sides = ranked_sides(run.task)
    held = budget.max_valid_firings(run.run_config)
    max_rows = held * 25  # a minute or less on one core
    max_firings = int(held * run.task.cfg.memory_share)
    n_queries, needed_seconds = scoring.count_queries_within(
        run.task, setup.facts, queries, sides, max_firings, max_rows
    )
    bound = f"have over {max_firings:,} firings or {max_rows:,} rows of joins"
    if needed_seconds > seconds:
        n_within = int(n_queries * seconds / needed_seconds)
        # The first ones are collected already.
        n_queries = min(n_queries, max(scoring.PILOT_QUERIES, n_within))
        bound = f"take over {seconds:.0f} seconds (--seconds)"
        # A resumed run validates on the same ones.
        config = dataclasses.replace(
            run.run_config, n_validation_queries=n_queries
        )
        run = dataclasses.replace(run, run_config=config)

    notes: list[Note] = []
    if n_queries < len(queries):
        note = f"a validation ranks {n_queries:,} of {len(valid):,} valid queries: more would {bound}"
        notes = [Note("cut", note)]
        run = dataclasses.replace(run, n_validation_queries=n_queries)
    queries = validation_queries(run)
    return dataclasses.replace(
        run,
        notes=tuple(dict.fromkeys((*run.notes, *notes))),
        valid_evidence=ValidEvidence(run.task, setup.facts, queries, sides),
    )
