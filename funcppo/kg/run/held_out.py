"""Ranking by a run: its scores by name, the queries of a validation, and test in the time that there is."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo.core.files import Json
from funcppo.core.host import NO_DEADLINE, Deadline
from funcppo.core.settings import is_cuda
from funcppo.core.types import F64, I32
from funcppo.kg.config import MAX_VALID_FIRINGS
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.prove import Clauses
from funcppo.kg.ranking import evaluate, rank_metrics, ranking
from funcppo.kg.ranking.ranking import (
    RankedRows,
    Ranking,
    random_rows,
    ranked_sides,
    selection_metric,
)
from funcppo.kg.ranking.scoring import (
    PolicyScore,
    needs_search,
    search_config,
)
from funcppo.kg.run import fit
from funcppo.kg.run.fit import SplitEvidence
from funcppo.kg.run.run import (
    BEAM_WIDTH,
    EVIDENCE_SCORE,
    NO_PROOF_ROW,
    Run,
    RunScore,
    validation_queries,
)
from funcppo.kg.scores.learned import LearnedScore
from funcppo.kg.scores.score import OTHER_FACTS, Score, parse
from funcppo.kg.search import guide
from funcppo.kg.search.beam import (
    ProgressCallback,
    ScoreName,
    SearchConfig,
    ignore_progress,
    slots_for_rows,
)
from funcppo.kg.search.task import (
    PhaseCallback,
    ignore_phase,
    inference_world,
)

# queries that are ranked together first; the time that they take tells how many more there is time for
FIRST_ROUND = 16
FIRST_SECONDS = 1.0  # for the first queries of valid and of test, however little time is left
GUIDE_STEPS = 200  # resolution steps for a goal of valid
# that are ranked at least, where there are as many queries and each takes as long
N_ROUNDS, ROUND_SECONDS = 16, 0.25


class TimeOver(Exception):
    """Raised where a ranking or a count has not ended in time."""


class RankedPart(NamedTuple):
    """Part of a split, ranked by one score."""

    queries: I32[Tensor, "q W"]
    rows: RankedRows
    reciprocal_rank: F64[Tensor, "q"]  # of each query, the mean of its sides
    auc_pr: float | None  # of Countries


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
    """Return the parameters to evaluate a run with, by name: untrained, then after each stage or training."""
    state, untrained = run.state, f"{run.score}, untrained"
    learnt = {f"{run.score}, trained": state.best_params}
    if run.questions is not None:
        learnt = dict(zip(run.step_names, state.steps, strict=True))
    return {untrained: state.start_params, **learnt}


def answering_row(run: Run) -> str:
    """Return the name of the score that ranks answers, of those by rules and by `policies`."""
    if run.default_score == run.score:
        return list(policies(run))[-1]
    return run.default_score


def rule_rows(run: Run) -> tuple[str, ...]:
    """Return the names of the scores by rules in the table of results, that of the run last."""
    name = run.run_config.rule_score
    return (
        f"exists@{run.task.max_height}",
        "max-confidence",
        "noisy-or",
        name.removesuffix(OTHER_FACTS),
        name,
    )


def trained_scores(run: Run) -> dict[str, Score]:
    """Return the scores of candidates by the best parameters of a run, by name."""
    names: tuple[RunScore, ...] = ("success", "best-proof")
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
    on_gpu = is_cuda(run.run_config.device)
    max_successors = run.cfg.env.cfg.resolve.max_successors
    rows = min(512, 4096 // max_successors) * (16 if on_gpu else 1)
    rows_per_step = max(BEAM_WIDTH, rows)
    cfg = search_config(
        run.task,
        run.cfg,
        score,
        slots=slots_for_rows(rows_per_step),
        beam=BEAM_WIDTH,
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
) -> Ranking:
    """Rank the queries of a validation by a policy.

    Args:
      on_progress: called with the number of candidates started, and of all.
    """
    if run.questions is not None and run.valid_evidence is not None:
        on_progress(0, len(run.valid_evidence.queries))
        return run.valid_evidence.rank_by_weights(run.questions, params)
    return ranking.rank_split(
        run.task,
        validation_queries(run),
        policy_score(run, params, run.score, on_progress),
        on_progress=on_progress,
    )


def rank_guide(run: Run, params: Any) -> F64[Tensor, "Q"]:
    """Return 1 / (1 + log2 n) for each goal of valid that the search of a guide proves in n steps, 0 for the others."""
    clauses = Clauses(run.task.kb, run.task.sizes)
    program = guide.SearchProgram(clauses, run.task.max_height)
    goals = validation_queries(run).tolist()
    searches = [guide.ProofSearch(program, tuple(goal)) for goal in goals]
    world = inference_world(run.task)
    order = guide.policy_order(run.cfg, world, params)
    guide.search(searches, order, GUIDE_STEPS)
    return torch.tensor(
        [
            0.0 if one.leaves is None else 1 / (1 + math.log2(one.n_steps))
            for one in searches
        ],
        dtype=torch.float64,
    )


def rank_valid_by_rules(run: Run) -> Ranking | None:
    """Rank the queries of a validation by the rule score of the run; None without these queries or without T_P.

    In a run that learns from questions a query that is a fact may be derived from itself, as in the evidence that the
    policy weighs.
    """
    score = parse(run.run_config.rule_score)
    task, valid = run.task, run.valid_evidence
    if valid is not None:
        return valid.rank(score)
    queries = validation_queries(run)
    is_held = run.questions is None and task.least_model.complete
    if not is_held or not len(queries):
        return None
    return ranking.rank_split(task, queries, score)


def metric_of(run: Run, ranked: Ranking) -> float:
    """Return the metric of a ranking by which results are told: MRR, or AUC-PR for Countries."""
    metrics = ranking.summarise_ranking(
        ranked,
        list(run.task.dataset.predicates),
        with_auc=run.task.is_countries,
    )
    return metrics[selection_metric(run.task)]


# -- test


def _count_to_hold(run: Run, collected: SplitEvidence) -> int:
    """Return how many queries' evidence is held at once, by that of some."""
    most = run.run_config.questions.max_valid_firings or MAX_VALID_FIRINGS
    most *= run.task.cfg.memory_share
    n_each = max(collected.n_firings, 1) / len(collected.queries)
    return int(most / n_each)


def _rank(
    run: Run,
    queries: np.ndarray,
    collected: SplitEvidence | None,
    name: str,
    params: Any,
    on_progress: ProgressCallback = ignore_progress,
) -> Ranking:
    """Rank queries by a score.

    Args:
      collected: their evidence; None where a run searches proofs.
      name: of the score.
      params: of a policy; None for a rule score.
    """
    task = run.task
    if params is None:
        score = parse(name)
        atoms = torch.from_numpy(queries).long().to(task.device)
        # A query that is a fact must not be derived from itself, as it is where evidence is collected.
        has_facts = bool(kbase.contains(task.kb, task.sizes, atoms).any())
        if collected is not None and not has_facts:
            return collected.rank(score)
    elif collected is not None:
        assert run.questions is not None, "evidence is collected"
        on_progress(0, len(queries))
        setup = run.questions
        if NO_PROOF_ROW in run.step_names and name != NO_PROOF_ROW:
            setup = fit.with_weights_of(setup, no_proof=None)
        return collected.rank_by_weights(setup, params)
    else:
        score = policy_score(run, params, run.score, on_progress)
    return ranking.rank_split(task, queries, score)


@dataclass(kw_only=True, slots=True)
class _Round:
    """Queries of test that are ranked together."""

    queries: np.ndarray
    evidence: SplitEvidence | None
    """None where a run searches proofs."""
    parts: dict[str, RankedPart] = field(default_factory=dict)
    """By the name of the score."""


class TestRanking:
    """Ranking of test in rounds of random queries: by rules before anything is learnt, then by what is learnt too.

    Attributes:
      rates: seconds of a query, by rules and by what is learnt, in the round that took the least for each.
    """

    __test__ = False  # no class of tests

    def __init__(self, rule_scores: Sequence[str]) -> None:
        """Start without a round.

        Args:
          rule_scores: names of scores that need no training.
        """
        self.rule_scores = tuple(dict.fromkeys(rule_scores))
        self.rates = {"rules": math.inf, "learnt": math.inf}
        self._rounds: list[_Round] = []

    @property
    def n_queries(self) -> int:
        """Return the number of queries that are ranked."""
        return sum(len(one.queries) for one in self._rounds)

    def rank_by_rules(
        self,
        run: Run,
        deadline: Deadline,
        on_phase: PhaseCallback = ignore_phase,
        each: float = 0.0,
    ) -> None:
        """Rank as many queries by rules as there is time for; the first ones are ranked whatever the time.

        Args:
          each: seconds that a query is expected to take.
        """
        for one in self._iter_rounds(run, deadline, on_phase, each):
            self._rounds.append(one)

    def rank_by_all(
        self,
        run: Run,
        deadline: Deadline,
        on_phase: PhaseCallback = ignore_phase,
    ) -> None:
        """Rank what rules have ranked by `policies` too, and more queries by both while there is time.

        Where evidence is held, the first round is ranked whatever the time.
        """
        if not self._rounds:
            self.rank_by_rules(run, deadline.share(0.2), on_phase)
        ranked, self._rounds = self._rounds, []
        with suppress(TimeOver):
            for one in ranked:
                is_free = not self._rounds and one.evidence is not None
                limit = NO_DEADLINE if is_free else deadline
                self._learnt(run, one, stopping_at(limit, on_phase))
                self._rounds.append(one)
            for one in self._iter_rounds(run, deadline, on_phase):
                self._learnt(run, one, stopping_at(deadline, on_phase))
                self._rounds.append(one)
        if not self._rounds:
            self._rounds = ranked

    def _iter_rounds(
        self,
        run: Run,
        deadline: Deadline,
        on_phase: PhaseCallback,
        each: float = 0.0,
    ) -> Iterator[_Round]:
        """Yield more rounds, ranked by rules, each as large as the time of the others says that there is time for."""
        test = run.task.dataset.test
        order = random_rows(len(test), len(test))
        # The area under the curve of Countries is that of one ranking.
        size = len(test) if run.task.is_countries else FIRST_ROUND
        most = max(deadline.seconds_left, FIRST_SECONDS)
        if each * size > most:
            size = max(1, int(most / each))
        start = self.n_queries
        if self._rounds:
            size = self._count_next(run, len(order) - start, deadline)
        while size > 0 and start < len(order):
            queries = test[np.sort(order[start : start + size])]
            limit = deadline if self._rounds else NO_DEADLINE
            began = time.monotonic()
            try:
                one = self._by_rules(run, queries, stopping_at(limit, on_phase))
            except TimeOver:
                return
            self._measure("rules", began, one)
            yield one
            start += len(queries)
            size = self._count_next(run, len(order) - start, deadline)

    def _count_next(self, run: Run, n_left: int, deadline: Deadline) -> int:
        """Return how many queries to rank next, by the seconds of each so far and by what is held."""
        each = sum(x for x in self.rates.values() if math.isfinite(x))
        # Without a deadline the seconds left are infinite.
        n_fitting = int(min(deadline.seconds_left / max(each, 1e-9), n_left))
        last = self._rounds[-1]
        is_last = n_fitting == n_left
        size = n_fitting
        if not is_last:
            size = min(n_fitting // 2, 8 * len(last.queries))
        # The time may end a round, whose work is lost; each small round takes as long as some of its queries.
        n_all = n_left + self.n_queries
        n_quick = int(ROUND_SECONDS / max(each, 1e-9))
        size = min(size, max(FIRST_ROUND, n_all // N_ROUNDS, n_quick))
        if last.evidence is not None:
            size = min(size, max(1, _count_to_hold(run, last.evidence)))
        return size

    def _by_rules(
        self, run: Run, queries: np.ndarray, report: PhaseCallback
    ) -> _Round:
        """Rank queries by rules.

        Raises:
          TimeOver: the report says so.
        """
        one = _Round(queries=queries, evidence=None)
        report("ranking test by rules", self.n_queries)
        if run.questions is not None:
            facts = run.questions.facts
            one.evidence = fit.collect_evidence(run.task, facts, queries)
        for name in self.rule_scores:
            report(f"ranking test by {name}")
            ranked = _rank(run, queries, one.evidence, name, None)
            one.parts[name] = _rank_part(run, ranked)
        if self._rounds and not self._holds(run, one):
            one.evidence = None
        return one

    def _holds(self, run: Run, one: _Round) -> bool:
        """Return whether the evidence of another round is held, beside that of the rounds so far."""
        held = [r.evidence for r in self._rounds if r.evidence is not None]
        if one.evidence is None or not held:
            return False
        n_held = sum(len(part.queries) for part in (*held, one.evidence))
        return n_held <= _count_to_hold(run, one.evidence)

    def _learnt(self, run: Run, one: _Round, report: PhaseCallback) -> None:
        """Rank the queries of a round by `policies`.

        Raises:
          TimeOver: the report says so.
        """
        began = time.monotonic()
        evidence, setup = one.evidence, run.questions
        if setup is not None:
            report("ranking test by what is learnt", self.n_queries)
            if evidence is None:
                evidence = fit.collect_evidence(
                    run.task, setup.facts, one.queries
                )
            else:
                evidence = fit.with_priors(evidence, setup)
        for name, params in policies(run).items():
            on_progress = partial(report, f"ranking test by {name}")
            ranked = _rank(
                run, one.queries, evidence, name, params, on_progress
            )
            one.parts[name] = _rank_part(run, ranked)
        self._measure("learnt", began, one)

    def _measure(self, name: str, began: float, one: _Round) -> None:
        """Record the seconds of a query in a round; those of a small round are more."""
        each = (time.monotonic() - began) / len(one.queries)
        self.rates[name] = min(self.rates[name], each)

    @property
    def parts(self) -> dict[str, list[RankedPart]]:
        """Return the parts that are ranked, by the name of the score."""
        names = self._rounds[0].parts if self._rounds else ()
        return {
            name: [one.parts[name] for one in self._rounds] for name in names
        }

    def metrics(self, run: Run) -> dict[str, Json]:
        """Return the metrics by the name of the score, those of a sample with intervals."""
        n_all = len(run.task.dataset.test)
        return {
            name: _summarise_sample(run, parts, n_all)
            for name, parts in self.parts.items()
        }


def _rank_part(run: Run, ranked: Ranking) -> RankedPart:
    """Return what is kept of the ranking of a part of a split by a score."""
    of_rows = rank_metrics.expected_reciprocal_ranks(ranked.counts)
    total = of_rows.new_zeros(len(ranked.queries))
    total = total.index_add(0, ranked.query_row, of_rows)
    return RankedPart(
        ranked.queries,
        ranking.ranked_rows(ranked),
        total / len(ranked_sides(run.task)),
        ranking.auc_pr(ranked) if run.task.is_countries else None,
    )


def _summarise_sample(
    run: Run, parts: Sequence[RankedPart], n_all: int
) -> Json:
    """Summarise a ranking; a sample of the `n_all` queries also gets the 95 % interval of its MRR."""
    predicates = list(run.task.dataset.predicates)
    rows = [part.rows for part in parts]
    metrics = ranking.summarise_rows(rows, predicates)
    if parts[0].auc_pr is not None and len(parts) == 1:
        metrics["auc_pr"] = parts[0].auc_pr
    rank = torch.cat([part.reciprocal_rank for part in parts])
    n = len(rank)
    if 1 < n < n_all:
        error = float(rank.std()) * ((1 - n / n_all) / n) ** 0.5
        half, mean = evaluate.NORMAL_95 * error, float(rank.mean())
        metrics["mrr_interval"] = [mean - half, mean + half]
    return metrics
