"""What one more log-probability of each answer adds to the score of a run.

`list_by` lists the candidates of valid's queries with both scores; `compare` ranks them by each score and by both.
What is chosen or fitted on one half of the queries is judged on the other half, both ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import grad

from experiments.benchmarks import question_results
from funcppo import optim
from funcppo.config import AdamConfig
from funcppo.core import random
from funcppo.core.types import F32, F64, I64, Bool
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.ranking import evidence_ranking, rank_metrics
from funcppo.kg.ranking.candidates import RankingProtocol, list_candidates
from funcppo.kg.ranking.ranking import ScorerBySide
from funcppo.kg.run.run import Run
from funcppo.kg.scores import evidence
from funcppo.kg.search.task import with_answers

SIDES = question_results.SIDES
# valid queries whose candidates among all entities are held at once
QUERIES_AT_ONCE = 256
# steps and step size of the fit of the added term's weights
FIT_STEPS = 100
FIT_RATE = 0.1
# of the squares of what a label's weight is beside the weight of all
LABEL_PENALTY = 10.0


class Candidates(NamedTuple):
    """Candidates of valid's queries on both sides; a row is a query and a side."""

    row: I64[Tensor, "L"]
    label: I64[Tensor, "L"]
    given: I64[Tensor, "L"]  # the question's entity
    entity: I64[Tensor, "L"]
    is_answer: Bool[Tensor, "L"]
    run_score: F64[Tensor, "L"]
    n_candidates: I64[Tensor, "Q"]  # of each row, listed or not


class Weights(NamedTuple):
    """Weights of the combined score."""

    scale: F32[Tensor, ""]  # of the run's score
    common: F32[Tensor, ""]  # of the model's log-probability
    by_label: F32[Tensor, "B"]  # what a label adds to it


class Ranked(NamedTuple):
    """Reciprocal ranks by a model and what is fitted with it."""

    ranks: F64[Tensor, "Q"]
    step: int  # of training, when the model had its weights
    weight: float | None = None  # of the model, over the scale of the run


class Snapshot(NamedTuple):
    """What a model says during its training."""

    step: int
    log_p: F64[Tensor, "L"]  # of the candidates that rules derive
    all_ranks: F64[Tensor, "Q"]  # reciprocal ranks among all entities


class Outcome(NamedTuple):
    """Reciprocal ranks of a method, and what was chosen for each half of valid."""

    method: str
    ranks: F64[Tensor, "Q"]
    chosen: tuple[Ranked, ...] = ()


class QuestionTable(NamedTuple):
    """A model's log-probabilities of all entities for distinct questions."""

    key: I64[Tensor, "n"]  # label * C1 + given, ascending
    log_p: F32[Tensor, "n C1"]

    def look_up(self, listed: Candidates) -> F64[Tensor, "L"]:
        """The log-probability of each candidate."""
        key = listed.label * self.log_p.shape[1] + listed.given
        row = torch.searchsorted(self.key, key)
        return self.log_p[row, listed.entity].double()


def valid_questions(run: Run) -> I64[Tensor, "n"]:
    """The keys of the distinct questions that valid's queries ask on both sides, as `QuestionTable` has them."""
    base = run.task.sizes.n_constants + 1
    atom = torch.from_numpy(run.task.dataset.valid).long()
    keys = [
        evidence.make_label(atom[:, 0], side) * base
        + atom[:, HEAD + TAIL - side]
        for side in SIDES
    ]
    return torch.unique(torch.cat(keys))


def run_scorer(run: Run) -> ScorerBySide:
    """The scorer of valid's candidates by the run."""
    setup, task = run.questions, run.task
    assert setup is not None, "the run learnt from questions"
    score = evidence_ranking.make_learned_score(
        setup.policy.aggregation,
        setup.aggregation,
        run.state.best_params.score,
    )
    parts = question_results.collect_evidence(
        task, setup.facts, task.dataset.valid
    )
    return evidence_ranking.make_scorer_of(task, parts, score)


def list_derived(run: Run) -> Candidates:
    """The candidates of valid that the rules derive, with the run's score."""
    queries = run.task.dataset.valid
    return list_by(run, queries, RankingProtocol(), run_scorer(run))


def list_by(
    run: Run,
    queries: np.ndarray,
    protocol: RankingProtocol,
    scorer: ScorerBySide | None,
) -> Candidates:
    """The candidates of queries by a protocol.

    Args:
      scorer: gives the run's score; None leaves it at 0.
    """
    atoms = torch.from_numpy(np.ascontiguousarray(queries)).long()
    task = with_answers(run.task, atoms, SIDES)
    query_id = torch.arange(len(atoms))
    parts: list[Candidates] = []
    for i, side in enumerate(SIDES):
        listed = list_candidates(
            protocol, task.filter_index, atoms, query_id, task.entity_pool, side
        )
        atom = listed.atom
        score = torch.zeros(len(atom), dtype=torch.float64)
        if scorer is not None:
            score = scorer.of(side)(atom.int())
        parts.append(
            Candidates(
                row=listed.query_row + i * len(atoms),
                label=evidence.make_label(atom[:, 0], side),
                given=atom[:, HEAD + TAIL - side],
                entity=atom[:, side],
                is_answer=listed.is_answer,
                run_score=score,
                n_candidates=listed.n_candidates,
            )
        )
    return Candidates(*(torch.cat(columns) for columns in zip(*parts)))


def rank_all(run: Run, table: QuestionTable) -> F64[Tensor, "Q"]:
    """Reciprocal ranks of valid among all entities by the model."""
    protocol = RankingProtocol(score_unprovable=True)
    queries = run.task.dataset.valid
    by_side: list[list[Tensor]] = [[], []]
    for first in range(0, len(queries), QUERIES_AT_ONCE):
        part = queries[first : first + QUERIES_AT_ONCE]
        listed = list_by(run, part, protocol, None)
        ranks = reciprocal_ranks(listed, table.look_up(listed))
        for of_side, values in zip(by_side, ranks.split(len(part))):
            of_side.append(values)
    return torch.cat([torch.cat(of_side) for of_side in by_side])


def reciprocal_ranks(
    listed: Candidates, score: F64[Tensor, "L"]
) -> F64[Tensor, "Q"]:
    """The reciprocal rank of each row by a score of its listed candidates; others tie below them."""
    line = rank_metrics.quantise_in_order(score, listed.row)
    counts = rank_metrics.rank_counts_listed(
        listed.row, line, listed.is_answer, listed.n_candidates
    )
    return rank_metrics.expected_reciprocal_ranks(counts)


# -- the added term


def compare(
    listed: Candidates,
    snapshots: Sequence[Snapshot],
    n_labels: int,
    seed: int,
    name: str,
) -> list[Outcome]:
    """The run, the run with the added term by each kind of weight, and the term alone.

    Args:
      listed: the candidates that rules derive.
      seed: of the division of valid into halves.
      name: of what is added.
    """
    n_queries = len(listed.n_candidates) // len(SIDES)
    order = random.permutation(random.key(seed), n_queries)
    # Both sides of a query are in the same half.
    is_first = torch.zeros(n_queries, dtype=torch.bool)
    is_first = is_first.index_fill(0, order[: n_queries // 2], True)
    is_first = is_first.repeat(len(SIDES))
    halves = (is_first, ~is_first)

    by_one = [
        [
            rank_combined(listed, x, half, n_labels, by_label=False)
            for x in snapshots
        ]
        for half in halves
    ]
    # One weight chooses the step for a weight each too, whose fit takes longer.
    of_step = {x.step: x for x in snapshots}
    by_label = [
        [
            rank_combined(
                listed,
                of_step[best(ranked, half).step],
                half,
                n_labels,
                by_label=True,
            )
        ]
        for ranked, half in zip(by_one, halves)
    ]
    among_derived = [
        Ranked(reciprocal_ranks(listed, x.log_p), x.step) for x in snapshots
    ]
    among_all = [Ranked(x.all_ranks, x.step) for x in snapshots]
    run = reciprocal_ranks(listed, listed.run_score)
    return [
        Outcome("run", run),
        judge(f"run and {name}, one weight", halves, by_one),
        judge(f"run and {name}, by label", halves, by_label),
        judge(f"{name}, derived candidates", halves, [among_derived] * 2),
        judge(f"{name}, all entities", halves, [among_all] * 2),
    ]


def judge(
    method: str,
    halves: tuple[Bool[Tensor, "Q"], Bool[Tensor, "Q"]],
    rankings: Sequence[Sequence[Ranked]],
) -> Outcome:
    """Rank each half of the rows by what ranks the other half best.

    Args:
      rankings: of all rows, for each half those by what is fitted on it.
    """
    first, second = (
        best(ranked, half) for ranked, half in zip(rankings, halves)
    )
    ranks = torch.where(halves[0], second.ranks, first.ranks)
    return Outcome(method, ranks, (first, second))


def best(rankings: Sequence[Ranked], half: Bool[Tensor, "Q"]) -> Ranked:
    """What ranks some rows best."""
    return max(rankings, key=lambda x: float(x.ranks[half].mean()))


def rank_combined(
    listed: Candidates,
    snapshot: Snapshot,
    half: Bool[Tensor, "Q"],
    n_labels: int,
    *,
    by_label: bool,
) -> Ranked:
    """All rows by the run and the model, weighed as fits some rows."""
    log_p = snapshot.log_p
    weights = fit_weights(listed, log_p, half, n_labels, by_label=by_label)
    return Ranked(
        reciprocal_ranks(listed, combined(weights, listed, log_p)),
        snapshot.step,
        float(weights.common / weights.scale),
    )


def combined(
    weights: Weights, listed: Candidates, log_p: F64[Tensor, "L"]
) -> F64[Tensor, "L"]:
    """The run's score and the model's log-probability, weighed."""
    weight = weights.common + weights.by_label[listed.label]
    return weights.scale * listed.run_score + weight * log_p


def fit_weights(
    listed: Candidates,
    log_p: F64[Tensor, "L"],
    row_is_seen: Bool[Tensor, "Q"],
    n_labels: int,
    *,
    by_label: bool,
) -> Weights:
    """The weights by the listwise loss on some rows, where the answer is listed."""
    n_rows = len(row_is_seen)
    has_answer = torch.zeros(n_rows, dtype=torch.bool)
    has_answer = has_answer.index_fill(0, listed.row[listed.is_answer], True)
    is_used = (row_is_seen & has_answer)[listed.row]
    is_used = is_used & listed.run_score.isfinite()
    columns = [column[is_used] for column in listed[:-1]]
    seen = Candidates(*columns, n_candidates=listed.n_candidates)
    seen_log_p = log_p[is_used]

    def loss(weights: Weights) -> Tensor:
        score = combined(weights, seen, seen_log_p)
        top = score.new_full((n_rows,), -torch.inf)
        top = top.scatter_reduce(0, seen.row, score.detach(), "amax")[seen.row]
        total = score.new_zeros(n_rows).index_add(
            0, seen.row, (score - top).exp()
        )
        chosen = score - top - total[seen.row].log()
        squares = (weights.by_label**2).sum()
        return LABEL_PENALTY * squares - chosen[seen.is_answer].sum()

    one = torch.ones((), dtype=torch.float64)
    weights = Weights(one, 0.0 * one, one.new_zeros(n_labels))
    state = optim.init(weights)
    for step in range(FIT_STEPS):
        gradient = grad(loss)(weights)
        if not by_label:
            none = torch.zeros_like(gradient.by_label)
            gradient = gradient._replace(by_label=none)
        rate = FIT_RATE * (1.0 - step / FIT_STEPS)
        weights, state = optim.update(
            AdamConfig(), gradient, state, weights, rate
        )
    return weights
