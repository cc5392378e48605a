"""Ranking by a run: its scores by name, the queries of a validation, test in the time there is, and calibration."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo.core.files import Json
from funcppo.core.host import NO_DEADLINE, Deadline
from funcppo.core.settings import is_cuda
from funcppo.core.types import F64
from funcppo.kg.logic import kb as kbase
from funcppo.kg.ranking import evaluate, rank_metrics, ranking, scoring
from funcppo.kg.ranking.evaluate import Bins
from funcppo.kg.ranking.ranking import (
    RankedRows,
    Ranking,
    RankingProtocol,
    random_rows,
    ranked_sides,
    selection_metric,
)
from funcppo.kg.ranking.scoring import (
    PolicyScore,
    needs_search,
    search_config,
)
from funcppo.kg.run import budget, fit
from funcppo.kg.run.run import (
    BEAM_WIDTH,
    EVIDENCE_SCORE,
    Run,
    RunScore,
    validation_queries,
)
from funcppo.kg.scores.learned import LearnedScore
from funcppo.kg.scores.score import Score, parse
from funcppo.kg.search import task as prover_task
from funcppo.kg.search.beam import (
    ProgressCallback,
    ScoreName,
    SearchConfig,
    ignore_progress,
    slots_for_rows,
)
from funcppo.kg.search.task import PhaseCallback, ProverTask, ignore_phase

# The policy before training, after it, and with the temperature that valid has chosen.
UNTRAINED, TRAINED, TEMPERED = "untrained", "trained", "trained_at_temperature"
# Where T_P is not held: queries whose answers tell how many queries are ranked together, and answers of these.
FIRST_CHUNK_QUERIES = 64
MAX_CHUNK_ANSWERS = 4_000_000


class TimeOver(Exception):
    """Raised where a ranking or a count has not ended in time."""


class _RankedPart(NamedTuple):
    """Part of a split, ranked by one score."""

    rows: RankedRows
    reciprocal_rank: F64[Tensor, "q"]  # of each query, the mean of its sides
    auc_pr: float | None  # of Countries
    bins: dict[str, Bins]  # see `policy_bins`


def stopping_at(
    deadline: Deadline, on_phase: PhaseCallback = ignore_phase
) -> PhaseCallback:
    """Return a phase callback that raises `TimeOver` once the deadline is over."""

    def report(
        text: str,
        done: int = 0,
        total: int | None = None,
        _: Deadline = NO_DEADLINE,
        /,
    ) -> None:
        if deadline.is_over:
            raise TimeOver
        on_phase(text, done, total, deadline)

    return report


# -- the scores of a run


def policies(run: Run) -> Json:
    """Return the parameters to evaluate a run with, by name: untrained, after the listwise fit if any, trained."""
    start, best = run.state.start_params, run.state.best_params
    if run.questions is None:
        return {f"{run.score}, untrained": start, f"{run.score}, trained": best}
    return {
        "evidence, untrained": fit.untrained_params(run.questions),
        "evidence, listwise fit": start,
        "evidence, trained": best,
    }


def trained_scores(run: Run) -> dict[str, Score]:
    """Return the scores of candidates by the best parameters of a run, by name."""
    names: tuple[RunScore, ...] = ("success", "best-proof", "greedy")
    if run.questions is not None:
        names = (EVIDENCE_SCORE,)
    best = run.state.best_params
    return {name: policy_score(run, best, name) for name in names}


def policy_score(
    run: Run,
    params: Any,
    name: RunScore,
    on_progress: ProgressCallback = ignore_progress,
) -> Score:
    """Return the score of candidates by a policy, with the search settings of `run_search_config`.

    Args:
      on_progress: called with the number of candidates that a search has started, and of all.
    """
    if name == EVIDENCE_SCORE:
        assert run.questions is not None, "the run learns from questions"
        left_out = fit.left_out_of(run.run_config.questions)
        weights = fit.make_weights(run.task, run.questions, params, left_out)
        return LearnedScore(name, weights)
    cfg = run_search_config(run, name)
    return PolicyScore(cfg, run.task, params, run.search_step, on_progress)


def run_search_config(run: Run, score: ScoreName) -> SearchConfig:
    """Return the settings of a search for scores, before `tune_slots` fits them to the machine."""
    beam = 1 if score == "greedy" else BEAM_WIDTH
    on_gpu = is_cuda(run.run_config.device)
    max_successors = run.cfg.env.cfg.resolve.max_successors
    rows = min(512, 4096 // max_successors) * (16 if on_gpu else 1)
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
    if on_gpu or needs_search(run.task, cfg):
        return cfg
    # Without a search a chunk holds the successors of all its candidates, and a deadline or a signal ends a ranking
    # between two chunks.
    most = max(1, (1 << 16) // max_successors)
    return replace(cfg, chunk_size=min(cfg.chunk_size, most))


# -- valid


def rank_valid(
    run: Run,
    params: Any,
    on_progress: ProgressCallback = ignore_progress,
    score: RunScore | None = None,
) -> Ranking:
    """Rank the queries of a validation by a policy.

    Args:
      on_progress: called with the number of candidates started, and of all.
      score: how candidates are scored; None: as the run does.
    """
    if run.questions is not None and run.valid_evidence is not None:
        on_progress(0, len(run.valid_evidence.queries))
        return run.valid_evidence.rank_by_weights(run.questions, params)
    return ranking.rank_split(
        run.task,
        validation_queries(run),
        policy_score(run, params, score or run.score, on_progress),
        RankingProtocol(sides=ranked_sides(run.task)),
        on_progress=on_progress,
    )


def rule_metric(run: Run, name: str | None = None) -> float | None:
    """Return a rule score's metric on the queries of a validation; None without these queries or without T_P.

    In a run that learns from questions a query that is a fact may be derived from itself, as in the evidence that the
    policy weighs.

    Args:
      name: of the score; None for that of the run.
    """
    score = parse(name or run.run_config.rule_score)
    task, valid = run.task, run.valid_evidence
    if valid is not None:
        ranked = valid.rank(score)
    elif run.questions is not None or not task.least_model.complete:
        return None
    else:
        queries = validation_queries(run)
        if not len(queries):
            return None
        protocol = RankingProtocol(sides=ranked_sides(task))
        ranked = ranking.rank_split(task, queries, score, protocol)
    return fit.summarise(task, ranked)[selection_metric(task)]


# -- any split


def iter_rankings(
    run: Run,
    split: np.ndarray,
    protocol: RankingProtocol,
    rule_scores: Sequence[str],
    on_phase: PhaseCallback = ignore_phase,
) -> Iterator[tuple[str, Ranking]]:
    """Yield each score's name and its ranking of a split: rule scores first, then those by `policies`.

    A ranking is of the whole split, or where answers are derived by query of a part of it: the same parts for all
    scores, in the same order.

    Args:
      rule_scores: names of scores that need no training.

    Raises:
      ValueError: a query cannot be ranked (see `ranking.check_split`).
    """
    task = run.task
    ranking.check_split(task, split, protocol)
    atoms = torch.from_numpy(split).long().to(task.kb.facts.device)
    # A query that is a fact must not be derived from itself, as it is where evidence is collected.
    has_facts = bool(kbase.contains(task.kb, task.sizes, atoms).any())
    if run.questions is not None and not has_facts:
        yield from _rank_by_evidence(
            run, split, protocol, rule_scores, on_phase
        )
        return

    for name in rule_scores:
        on_phase(f"ranking by {name}")
        yield name, ranking.rank_split(task, split, parse(name), protocol)
    if run.questions is not None:
        yield from _rank_by_evidence(run, split, protocol, (), on_phase)
        return
    for name, params in policies(run).items():
        on_progress = partial(on_phase, f"ranking by {name}")
        policy = policy_score(run, params, run.score, on_progress)
        yield name, ranking.rank_split(task, split, policy, protocol)


def _rank_by_evidence(
    run: Run,
    split: np.ndarray,
    protocol: RankingProtocol,
    rule_scores: Sequence[str],
    on_phase: PhaseCallback,
) -> Iterator[tuple[str, Ranking]]:
    """Yield the rankings of a split by rule scores and by weights of evidence, which is collected once for all.

    Where answers are derived by query, a ranking is of a part of the split."""
    task, setup = run.task, run.questions
    assert setup is not None, "the run learns from questions"
    scores: list[Score] = [parse(name) for name in rule_scores]
    scores += [
        LearnedScore(name, fit.make_weights(task, setup, params))
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
    """Yield queries of a split in parts, each with the task that holds all their answers; a bound limits a part."""
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


def metrics_within(
    run: Run,
    split: np.ndarray,
    protocol: RankingProtocol,
    rule_scores: Sequence[str],
    deadline: Deadline = NO_DEADLINE,
    on_phase: PhaseCallback = ignore_phase,
    temperature: float | None = None,
) -> tuple[dict[str, Json], int, dict[str, Bins]]:
    """Rank as many queries of a split as the time allows, by rule scores and by `policies`.

    Where a ranking of the first queries says that all fit, they are ranked together. Otherwise rounds of random queries
    are ranked, each planned by the time of the one before; a round that does not end in time is dropped.

    Args:
      rule_scores: names of scores that need no training.
      temperature: for the probabilities of the trained policy, which are counted without and with it; None for none.

    Returns:
      The metrics by the name of the score, those of a sample with intervals; the number of queries; and the candidates
      by their probability (see `policy_bins`).

    Raises:
      ValueError: a query cannot be ranked (see `ranking.check_split`).
    """
    order = np.random.default_rng(0).permutation(len(split))
    order = order[: _count_queries(run, split)]
    size = _first_round(run, split[order], protocol, deadline)
    parts: dict[str, list[_RankedPart]] = {}
    start = 0
    while size > 0 and start < len(order):
        began = time.monotonic()
        queries = split[np.sort(order[start : start + size])]
        try:
            found = _rank_parts(
                run,
                queries,
                protocol,
                rule_scores,
                stopping_at(deadline, on_phase),
                temperature,
            )
        except TimeOver:
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

    bins: dict[str, list[Bins]] = {}
    for part in (part for of_name in parts.values() for part in of_name):
        for state, counted in part.bins.items():
            bins.setdefault(state, []).append(counted)
    return (
        {
            name: _summarise_sample(run, of_name, len(split))
            for name, of_name in parts.items()
        },
        start,
        {state: evaluate.add_bins(of) for state, of in bins.items()},
    )


def _first_round(
    run: Run, queries: np.ndarray, protocol: RankingProtocol, deadline: Deadline
) -> int:
    """Return the number of queries to rank first: all if a ranking of 16 says that all fit in time, else 16."""
    if math.isinf(deadline.at) or not len(queries):
        return len(queries)
    start, size = time.monotonic(), min(16, len(queries))
    try:
        _rank_parts(run, queries[:size], protocol, (), stopping_at(deadline))
    except TimeOver:
        return size
    seconds = time.monotonic() - start
    fits = seconds * len(queries) / size <= deadline.seconds_left
    return len(queries) if fits else size


def _rank_parts(
    run: Run,
    split: np.ndarray,
    protocol: RankingProtocol,
    rule_scores: Sequence[str],
    on_phase: PhaseCallback,
    temperature: float | None = None,
) -> dict[str, list[_RankedPart]]:
    """Rank a split by all scores; return the ranked parts by the name of the score."""
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


def _summarise_sample(
    run: Run, parts: Sequence[_RankedPart], n_all: int
) -> Json:
    """Summarise a ranking; a sample of the `n_all` queries also gets the 95 % interval of its MRR."""
    auc = parts[0].auc_pr if len(parts) == 1 else None
    metrics = summarise_parts(run, [part.rows for part in parts], auc)
    rank = torch.cat([part.reciprocal_rank for part in parts])
    n = len(rank)
    if 1 < n < n_all:
        error = float(rank.std()) * ((1 - n / n_all) / n) ** 0.5
        half, mean = evaluate.NORMAL_95 * error, float(rank.mean())
        metrics["mrr_interval"] = [mean - half, mean + half]
    return metrics


def summarise_parts(
    run: Run, parts: Sequence[RankedRows], auc: float | None
) -> Json:
    """Summarise the parts of a ranking, with the area under the precision-recall curve where it is not None."""
    predicates = list(run.task.dataset.predicates)
    metrics = ranking.summarise_rows(parts, predicates)
    return metrics if auc is None else metrics | {"auc_pr": auc}


def test_rows(run: Run) -> np.ndarray:
    """Return the rows of test that the end of a run ranks if its time allows: all, or a random sample."""
    test = run.task.dataset.test
    if not len(test):
        return np.arange(0)
    return np.sort(random_rows(len(test), _count_queries(run, test)))


def _count_queries(run: Run, split: np.ndarray) -> int:
    """Return how many queries the end of a run ranks: all, or as many as it has time to weigh the evidence of."""
    if run.questions is None:
        return len(split)
    factor = budget.work_factor(run.task.kb.facts.device.type)
    return scoring.count_queries_within(
        run.task,
        run.questions.facts,
        split[random_rows(len(split), len(split))],
        ranked_sides(run.task),
        # some two minutes each, a chunk of questions at a time
        max_firings=factor * 100_000_000,
        max_rows=factor * 400_000_000,
    ).n_queries


# -- calibration


def policy_bins(
    run: Run, name: str, ranked: Ranking, temperature: float | None
) -> dict[str, Bins]:
    """Bin a ranking's listed candidates by probability, under `UNTRAINED`, or under `TRAINED` and `TEMPERED`.

    Args:
      name: of the score that ranks; nothing is counted of scores other than the first and the last of `policies`.
      temperature: of the trained policy; None for none.
    """
    among = run.score == EVIDENCE_SCORE
    count = partial(evaluate.bin_ranking, ranked, among_candidates=among)
    first, *_, last = policies(run)
    if name == first:
        return {UNTRAINED: count()}
    if name != last:
        return {}
    if temperature is None:
        return {TRAINED: count()}
    return {TRAINED: count(), TEMPERED: count(temperature=temperature)}


def calibrate(
    run: Run, deadline: Deadline, on_phase: PhaseCallback = ignore_phase
) -> tuple[float | None, dict[str, Bins]]:
    """Choose a temperature on the queries of a validation; return it with the bins of their candidates.

    The temperature is None without queries or without time."""
    if not len(validation_queries(run)):
        return None, {}
    (first, start), *_, (last, best) = policies(run).items()
    report = partial(stopping_at(deadline, on_phase), "calibrating on valid")
    try:
        untrained = rank_valid(run, start, report)
        trained = rank_valid(run, best, report)
    except TimeOver:
        return None, {}
    temperature = evaluate.choose_temperature(
        trained, among_candidates=run.score == EVIDENCE_SCORE
    )
    before = policy_bins(run, first, untrained, None)
    return temperature, before | policy_bins(run, last, trained, temperature)
