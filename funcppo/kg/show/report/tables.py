"""The numbers that a report shows: of a ranked split, of single queries, of rules, and of learnt weights.

Tables are arrays with a row for each run. `RunMeasurements` is what one run gives. Axes: K runs, U updates, B bins, P
relations, Q rows (a query and a side), R rules. Names are on one line, of bounded length, with nothing invisible.

A run that learns from queries weighs every rule that derives a candidate; the odds o that a rule adds stand for the
probability o / (1 + o), which before learning is the confidence of the rule. In a run that learns from proofs the
probability of a rule is that of choosing it to resolve an atom. All weights add to the score of a candidate, which is a
logit; they are compared as they are before and after learning.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo.core import tree
from funcppo.core.files import Json
from funcppo.core.types import F64, I64, Bool
from funcppo.kg.answers import (
    Answerer,
    AnswerProof,
    OpenQuery,
    RankedAnswers,
    explain_answer,
    format_query,
    probability,
)
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.rules import format_atom, format_rule
from funcppo.kg.logic import prove
from funcppo.kg.logic.joins import RowBudgetExceeded
from funcppo.kg.logic.proof import Proof
from funcppo.kg.logic.prove import FailedRules, QueryResult
from funcppo.kg.logic.triple_index import HEAD, SIDE_NAMES, TAIL
from funcppo.kg.ranking import (
    calibration,
    explain,
    rank_metrics,
    ranking,
    scoring,
)
from funcppo.kg.ranking.calibration import Bins
from funcppo.kg.ranking.explain import (
    MAX_FACT_PROOF_ROWS,
    prove_from_other_facts,
)
from funcppo.kg.ranking.policy_score import SearchReplay
from funcppo.kg.ranking.ranking import (
    RankedRows,
    Ranking,
    RankingProtocol,
    ranked_sides,
    stratified_sample,
)
from funcppo.kg.run import validation
from funcppo.kg.run.config import RunConfig
from funcppo.kg.run.run import QuestionSetup, Run
from funcppo.kg.run.validation import TEMPERED, TRAINED, UNTRAINED
from funcppo.kg.scores import aggregation
from funcppo.kg.search.task import PhaseCallback, ProverTask, ignore_phase
from funcppo.kg.show.report.names import display

# characters of a word on a page, of a text on a page, and of a name in a picture


# upper ends of the bins of ranks; a rank of tied answers is their mean
RANK_BINS = (1, 3, 10, 30, 100, 300, 1000)
NOT_DERIVABLE = "not derivable"


class ScoreRanks(NamedTuple):
    """How one score ranks the rows of a split."""

    rank: F64[np.ndarray, "Q"]  # mean rank of ties
    reciprocal_rank: F64[np.ndarray, "Q"]  # its expectation over ties
    metrics: Json  # what `funcppo evaluate` reports


class RuleUse(NamedTuple):
    """What a run makes of a rule, over the queries that are shown."""

    text: str
    support: int
    body_pairs: float
    before: float  # the probability that stands for it, untrained
    after: float  # and trained
    n_firings: int  # answers that it was weighed for
    n_proofs: int  # proofs of answers in which it is the last step


class MovedWeight(NamedTuple):
    """A weight of evidence that training moved."""

    kind: str
    evidence: str  # what it weighs
    relation: str  # of the questions that it counts for
    side: str  # that they ask for, head or tail
    before: float
    after: float


class MovedRelation(NamedTuple):
    """How far training moved the weights of a relation."""

    relation: str
    n_moved: int
    distance: float  # root of the sum of squared changes


class LearntWeights(NamedTuple):
    """What training moved."""

    n_moved: int  # weights
    weights: tuple[MovedWeight, ...]  # those that moved most
    relations: tuple[MovedRelation, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMeasurements:
    """What a report needs of one run; plain numbers and texts."""

    name: str
    """Folder of the run."""
    config: RunConfig
    """Settings."""
    score: str
    """Name of the score."""
    dataset: Json
    """Name and sizes of the data set."""
    data_fingerprint: str
    """Tells data sets apart, whatever the rules."""
    results: Json
    """The content of results.json; empty without one."""
    notes: tuple[str, ...]
    """What was chosen, dropped or fallen back from, one line each."""
    search_replay: SearchReplay
    """How the steps of its search were replayed."""
    update: int
    """Updates made."""
    n_updates: int
    """Updates of the whole run."""
    is_trained: bool
    """Whether the last update was made, or the run was stopped early."""
    best_update: int
    """The update whose parameters are evaluated."""
    metric_name: str
    """The metric by which valid chooses parameters."""
    default_score_note: str
    """Why `predict` ranks by another score than this one; empty if it does not."""
    log: tuple[Json, ...]
    """Lines of metrics.jsonl."""
    predicates: tuple[str, ...]
    """Names of the relations."""
    n_test: int
    """Queries of the test split."""
    n_ranked: int
    """Those that were ranked."""
    relation: I64[np.ndarray, "Q"]
    """Predicate of each row, from 1."""
    provable: Bool[np.ndarray, "Q"]
    """Whether the rules derive the answer."""
    ranked: dict[str, ScoreRanks]
    """By name of the score: rule confidences, the policy untrained and trained; empty without test queries."""
    bins: dict[str, Bins]
    """Candidates by the probability that a policy gives them, see `validation.policy_bins`."""
    rules: tuple[RuleUse, ...]
    """The rules that were used."""
    learnt: LearntWeights | None
    """The weights that training moved; None where a run searches proofs."""

    @property
    def is_finished(self) -> bool:
        """Whether the run was trained to its end, and evaluated."""
        return self.is_trained and bool(self.results)

    @property
    def trained(self) -> ScoreRanks:
        """The ranks by the trained policy, the last of its scores."""
        return list(self.ranked.values())[-1]

    @property
    def temperature(self) -> float | None:
        """The temperature of the trained policy that valid has chosen; None without one."""
        return (self.results.get("calibration") or {}).get("temperature")

    @property
    def by_rules(self) -> ScoreRanks:
        """The ranks by rule confidences alone, with the rule score of the run."""
        return self.ranked[self.config.rule_score]

    @property
    def untrained(self) -> ScoreRanks:
        """The ranks by the policy before any training."""
        return self.ranked[f"{self.score}, untrained"]


class Band(NamedTuple):
    """The mean over runs with a standard deviation on both sides; without width for one run."""

    mean: F64[np.ndarray, "n"]
    low: F64[np.ndarray, "n"]
    high: F64[np.ndarray, "n"]


class Curve(NamedTuple):
    """A quantity of the metrics log, at the updates at which all runs have it."""

    name: str
    update: I64[np.ndarray, "U"]
    value: F64[np.ndarray, "K U"]
    n_left_out: int  # updates at which only some runs have it


class Ranks(NamedTuple):
    """Shares of answers by rank; the last bin holds those that the rules do not derive."""

    bins: tuple[str, ...]
    untrained: F64[np.ndarray, "K B"]
    trained: F64[np.ndarray, "K B"]


class Relations(NamedTuple):
    """MRR by relation, the one with the most queries first."""

    names: tuple[str, ...]
    n_rows: I64[np.ndarray, "P"]  # queries and sides
    untrained: F64[np.ndarray, "K P"]
    trained: F64[np.ndarray, "K P"]
    ceiling: F64[np.ndarray, "K P"]


class Gains(NamedTuple):
    """MRR by relation beside the better of two scores without training, the relation that loses most first."""

    names: tuple[str, ...]
    n_rows: I64[np.ndarray, "P"]  # queries and sides
    rules: F64[np.ndarray, "K P"]  # of the run's rule score
    untrained: F64[np.ndarray, "K P"]
    trained: F64[np.ndarray, "K P"]
    gain: F64[np.ndarray, "K P"]  # over the better of the two
    # of the gain: by rows for one run, a standard deviation for several; NaN for one row
    error: F64[np.ndarray, "P"]


class Reliability(NamedTuple):
    """How often candidates of a probability are the answer; NaN for a bin without any."""

    edges: F64[np.ndarray, "B1"]
    n: I64[np.ndarray, "K B"]
    probability: F64[np.ndarray, "K B"]  # mean over the candidates of a bin
    frequency: F64[np.ndarray, "K B"]
    # of 95 % for one run, a standard deviation for several
    low: F64[np.ndarray, "B"]
    high: F64[np.ndarray, "B"]
    log_loss: F64[np.ndarray, "K"]
    calibration_error: F64[np.ndarray, "K"]


class Calibration(NamedTuple):
    """The reliability of a policy before and after training, and with the temperature that valid has chosen."""

    untrained: Reliability
    trained: Reliability
    trained_at_temperature: Reliability | None  # None where a run has none
    temperature: tuple[float, ...]  # of each run, where all have one


class Weights(NamedTuple):
    """Weights that training moved, the one that moved most first; means over the runs that list one."""

    kind: tuple[str, ...]
    evidence: tuple[str, ...]
    relation: tuple[str, ...]
    side: tuple[str, ...]
    n_runs: I64[np.ndarray, "W"]
    before: F64[np.ndarray, "W"]
    after: F64[np.ndarray, "W"]


class WeightsByRelation(NamedTuple):
    """How far training moved the weights of relations, the farthest first; means over runs."""

    names: tuple[str, ...]
    n_moved: F64[np.ndarray, "P"]
    distance: F64[np.ndarray, "P"]


class Rules(NamedTuple):
    """Rules that were used, the one with the most proofs first; means over the runs that have a rule."""

    texts: tuple[str, ...]
    n_runs: I64[np.ndarray, "R"]
    support: I64[np.ndarray, "R"]
    body_pairs: F64[np.ndarray, "R"]
    confidence: F64[np.ndarray, "R"]
    before: F64[np.ndarray, "R"]
    after: F64[np.ndarray, "R"]
    n_firings: I64[np.ndarray, "R"]
    n_proofs: I64[np.ndarray, "R"]


def check_same_data(runs: Sequence[RunMeasurements]) -> None:
    """Check that runs can be shown together.

    Raises:
      ValueError: two are on different data.
    """
    first = runs[0]
    for run in runs[1:]:
        if run.data_fingerprint != first.data_fingerprint:
            raise ValueError(
                f"{run.name}: expected a run on the data of {first.name} ({first.dataset['name']}), got one on "
                f"{run.dataset['name']}, with other triples"
            )


def band(values: F64[np.ndarray, "K n"]) -> Band:
    """Mean and standard deviation over runs, column by column."""
    mean = values.mean(0)
    spread = values.std(0, ddof=1) if len(values) > 1 else np.zeros_like(mean)
    return Band(mean, mean - spread, mean + spread)


def curve(runs: Sequence[RunMeasurements], name: str) -> Curve:
    """A quantity of the metrics log, such as valid_metric or loss; a line without it, or with null, is no point."""
    points = [
        {
            int(row["update"]): float(row[name])
            for row in run.log
            if row.get(name) is not None
        }
        for run in runs
    ]
    common = set.intersection(*(set(of_run) for of_run in points))
    update = sorted(common)
    return Curve(
        name=name,
        update=np.array(update, dtype=np.int64),
        value=np.array(
            [[of_run[u] for u in update] for of_run in points], dtype=np.float64
        ),
        n_left_out=len(set().union(*points)) - len(common),
    )


def ranks(runs: Sequence[RunMeasurements]) -> Ranks:
    """The histogram of ranks, for runs with ranked queries."""
    lower = (1, *(edge + 1 for edge in RANK_BINS[:-1]))
    bins = [
        f"{low}" if low == high else f"{low}-{high}"
        for low, high in zip(lower, RANK_BINS)
    ]
    return Ranks(
        bins=(*bins, f"> {RANK_BINS[-1]}", NOT_DERIVABLE),
        untrained=np.stack([_rank_shares(r, r.untrained) for r in runs]),
        trained=np.stack([_rank_shares(r, r.trained) for r in runs]),
    )


def _rank_shares(run: RunMeasurements, rows: ScoreRanks) -> np.ndarray:
    """The share of rows in each bin of ranks."""
    place = np.searchsorted(RANK_BINS, rows.rank)
    place = np.where(run.provable, place, len(RANK_BINS) + 1)
    counts = np.bincount(place, minlength=len(RANK_BINS) + 2)
    return counts / len(place)


def relations(runs: Sequence[RunMeasurements]) -> Relations:
    """MRR by relation, for runs with ranked queries; a relation counts if all of them ranked queries of it."""
    n_predicates = len(runs[0].predicates)
    counts = np.stack(
        [np.bincount(r.relation - 1, minlength=n_predicates) for r in runs]
    )
    n_rows = counts.min(0)
    order = np.argsort(-n_rows, kind="stable")
    order = order[n_rows[order] > 0]

    def means(values: Sequence[np.ndarray]) -> np.ndarray:
        sums = [
            np.bincount(r.relation - 1, weights=v, minlength=n_predicates)
            for r, v in zip(runs, values)
        ]
        return np.stack(sums)[:, order] / counts[:, order]

    return Relations(
        names=tuple(runs[0].predicates[i] for i in order),
        n_rows=n_rows[order],
        untrained=means([r.untrained.reciprocal_rank for r in runs]),
        trained=means([r.trained.reciprocal_rank for r in runs]),
        ceiling=means([r.provable.astype(np.float64) for r in runs]),
    )


def gains(runs: Sequence[RunMeasurements]) -> Gains:
    """What training gains by relation over the better of rule score and untrained policy, for runs with ranked queries.

    Relations are those of `relations`.
    """
    table = relations(runs)
    number = {name: i for i, name in enumerate(runs[0].predicates)}
    predicates = [number[name] + 1 for name in table.names]
    of_rules = np.stack(
        [
            _mean_by_predicate(run, run.by_rules.reciprocal_rank, predicates)
            for run in runs
        ]
    )
    gain = table.trained - np.maximum(of_rules, table.untrained)
    if len(runs) == 1:
        is_by_rules = of_rules[0] > table.untrained[0]
        error = np.array(
            [
                _paired_error(runs[0], p, by_rules=bool(by_rules))
                for p, by_rules in zip(predicates, is_by_rules)
            ]
        )
    else:
        error = gain.std(0, ddof=1)
    order = np.argsort(gain.mean(0), kind="stable")
    return Gains(
        names=tuple(table.names[i] for i in order),
        n_rows=table.n_rows[order],
        rules=of_rules[:, order],
        untrained=table.untrained[:, order],
        trained=table.trained[:, order],
        gain=gain[:, order],
        error=error[order],
    )


def _mean_by_predicate(
    run: RunMeasurements,
    values: F64[np.ndarray, "Q"],
    predicates: Sequence[int],
) -> F64[np.ndarray, "P"]:
    """The mean over the rows of each predicate."""
    return np.array([values[run.relation == p].mean() for p in predicates])


def _paired_error(
    run: RunMeasurements, predicate: int, *, by_rules: bool
) -> float:
    """The standard error of a relation's mean gain in reciprocal rank, rows paired; NaN for one row.

    Args:
      by_rules: the gain is over the rule score, not over the untrained policy.
    """
    base = run.by_rules if by_rules else run.untrained
    gain = run.trained.reciprocal_rank - base.reciprocal_rank
    of_relation = gain[run.relation == predicate]
    n = len(of_relation)
    return float(of_relation.std(ddof=1)) / n**0.5 if n > 1 else np.nan


def calibrations(runs: Sequence[RunMeasurements]) -> Calibration:
    """How often candidates are the answer by their probability, before and after training.

    Raises:
      ValueError: the scores of the runs are of different kinds.
    """
    scores = sorted({run.score for run in runs})
    if len(scores) > 1:
        raise ValueError(
            f"reliability: expected runs with one kind of score, got {' and '.join(scores)}"
        )
    temperatures = [run.temperature for run in runs]
    known = tuple(t for t in temperatures if t is not None)
    has_all = len(known) == len(runs)
    return Calibration(
        untrained=_reliability(runs, UNTRAINED),
        trained=_reliability(runs, TRAINED),
        trained_at_temperature=_reliability(runs, TEMPERED)
        if has_all
        else None,
        temperature=known if has_all else (),
    )


def _reliability(runs: Sequence[RunMeasurements], state: str) -> Reliability:
    """How often candidates are the answer, by their probability in a state of the policy."""
    bins = [run.bins[state] for run in runs]
    n = np.stack([counted.n for counted in bins])
    n_right = np.stack([counted.n_right for counted in bins])
    sums = np.stack([counted.probability_sum for counted in bins])
    with np.errstate(divide="ignore", invalid="ignore"):
        frequency, probability = n_right / n, sums / n

    if len(runs) == 1:
        low, high = calibration.wilson(n_right[0], n[0])
    else:
        _, low, high = band(frequency)
    return Reliability(
        edges=np.linspace(0.0, 1.0, n.shape[1] + 1),
        n=n,
        probability=probability,
        frequency=frequency,
        low=low,
        high=high,
        log_loss=np.array([calibration.log_loss(b) for b in bins]),
        calibration_error=np.array(
            [calibration.calibration_error(b) for b in bins]
        ),
    )


def weights(
    runs: Sequence[RunMeasurements],
) -> tuple[Weights, WeightsByRelation]:
    """The weights of evidence that training moved, single ones and by relation.

    Raises:
      ValueError: a run searches proofs.
    """
    learnt: list[LearntWeights] = []
    for run in runs:
        if run.learnt is None:
            raise ValueError(
                f"weights: {run.name}: expected a run that learns from questions, got one that learns from proofs"
            )
        learnt.append(run.learnt)

    moved: dict[tuple[str, ...], list[MovedWeight]] = {}
    for of_run in learnt:
        for weight in of_run.weights:
            moved.setdefault(weight[:4], []).append(weight)
    names = list(moved)
    before = np.array([np.mean([w.before for w in moved[n]]) for n in names])
    after = np.array([np.mean([w.after for w in moved[n]]) for n in names])
    order = np.argsort(-np.abs(after - before), kind="stable")
    columns = [tuple(names[i][k] for i in order) for k in range(4)]
    single = Weights(
        *columns,
        n_runs=np.array([len(moved[names[i]]) for i in order], dtype=np.int64),
        before=before[order],
        after=after[order],
    )
    return single, _weights_by_relation(learnt)


def _weights_by_relation(learnt: Sequence[LearntWeights]) -> WeightsByRelation:
    """How far training moved the weights of relations; a run that moved none of a relation counts with 0."""
    total: dict[str, np.ndarray] = {}
    for of_run in learnt:
        for name, *values in of_run.relations:
            total[name] = total.get(name, np.zeros(2)) + values
    names = sorted(total, key=lambda name: -total[name][1])
    means = np.array([total[name] for name in names]) / len(learnt)
    means = means.reshape(-1, 2)
    return WeightsByRelation(tuple(names), means[:, 0], means[:, 1])


def rules(runs: Sequence[RunMeasurements]) -> Rules:
    """The rules that were used, by their text."""
    uses: dict[str, list[RuleUse]] = {}
    for run in runs:
        for rule in run.rules:
            uses.setdefault(rule.text, []).append(rule)
    listed = sorted(
        uses.values(),
        key=lambda of_rule: (
            -sum(use.n_proofs for use in of_rule),
            -sum(use.n_firings for use in of_rule),
            of_rule[0].text,
        ),
    )

    def mean(name: str) -> np.ndarray:
        return np.array(
            [np.mean([getattr(u, name) for u in rule]) for rule in listed],
            dtype=np.float64,
        )

    def total(name: str) -> np.ndarray:
        return np.array(
            [sum(getattr(u, name) for u in rule) for rule in listed],
            dtype=np.int64,
        )

    support = mean("support")
    body_pairs = mean("body_pairs")
    return Rules(
        texts=tuple(of_rule[0].text for of_rule in listed),
        n_runs=np.array([len(rule) for rule in listed], dtype=np.int64),
        support=support.astype(np.int64),
        body_pairs=body_pairs,
        confidence=support / np.maximum(body_pairs, 1.0),
        before=mean("before"),
        after=mean("after"),
        n_firings=total("n_firings"),
        n_proofs=total("n_proofs"),
    )


def to_json(value: object) -> Any:
    """A table or a tuple of tables as JSON values; NaN is null."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    names: tuple[str, ...] = getattr(value, "_fields", ())
    if isinstance(value, tuple) and names:
        return {name: to_json(field) for name, field in zip(names, value)}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return None if isinstance(value, float) and np.isnan(value) else value


def changed_settings(run: RunMeasurements) -> list[tuple[str, str]]:
    """The settings of a run that differ from the defaults, by name."""
    default = RunConfig(dataset=run.config.dataset)
    changed = _flat(dataclasses.asdict(run.config))
    defaults = _flat(dataclasses.asdict(default))
    return [
        (name, str(value))
        for name, value in changed.items()
        if value != defaults[name]
    ]


def _flat(settings: Json, prefix: str = "") -> Json:
    """Nested settings by their names with dots."""
    flat: Json = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedSplit:
    """Ranked queries; a row is a query and a side, all queries of a side after each other."""

    queries: I64[Tensor, "Q0 W"]
    """The queries."""
    side: I64[np.ndarray, "Q"]
    """The argument that is asked for."""
    query_row: I64[np.ndarray, "Q"]
    """Row of the query in `queries`."""
    provable: Bool[np.ndarray, "Q"]
    """Whether the rules derive the answer."""
    ranked: dict[str, ScoreRanks]
    """By name of the score, the trained policy last; empty without queries."""
    n_better: I64[np.ndarray, "Q"]
    """Candidates that score more than the answer under the trained policy."""
    n_candidates: I64[np.ndarray, "Q"]
    """All candidates."""
    answer_score: I64[np.ndarray, "Q"]
    """Quantised score of the answer under the trained policy."""
    bins: dict[str, Bins]
    """Candidates by their probability, see `validation.policy_bins`; empty without queries."""


def rank_test(
    run: Run,
    max_ranked: int | None,
    on_phase: PhaseCallback,
    temperature: float | None = None,
) -> RankedSplit:
    """Rank the test split of a run against all entities, as the end of its training does.

    Args:
      max_ranked: the most queries, spread over relations; None for as many as the end of training ranks.
      temperature: of the trained policy's probabilities; None for none.

    Raises:
      ValueError: a query cannot be ranked (see `ranking.check_split`).
    """
    test = run.task.dataset.test
    rows = (
        validation.test_rows(run)
        if max_ranked is None
        else stratified_sample(test, max_ranked)
    )
    queries = test[rows]
    if not len(queries):
        return _no_queries(torch.from_numpy(queries))

    protocol = RankingProtocol(sides=ranked_sides(run.task))
    trained = list(validation.policies(run))[-1]
    parts: dict[str, list[RankedRows]] = {}
    scores: dict[str, list[_Scores]] = {}
    bins: dict[str, list[Bins]] = {}
    auc: dict[str, float] = {}
    for name, ranked in validation.iter_rankings(
        run, queries, protocol, (run.run_config.rule_score,), on_phase
    ):
        parts.setdefault(name, []).append(ranking.ranked_rows(ranked))
        scores.setdefault(name, []).append(_scores(ranked))
        counted = validation.policy_bins(run, name, ranked, temperature)
        for state, of_state in counted.items():
            bins.setdefault(state, []).append(of_state)
        if run.task.is_countries:  # which are ranked in one part
            auc[name] = ranking.auc_pr(ranked)

    whole = {name: _concatenate(of_name) for name, of_name in scores.items()}
    last = whole[trained]
    side = _column(parts[trained], "side")
    # The rows of each part are ordered by side and query, and so shall all be.
    order = np.lexsort((last.query_row, side))
    return RankedSplit(
        queries=last.queries,
        side=side[order],
        query_row=last.query_row[order],
        provable=_column(parts[trained], "answer_provable")[order],
        ranked={
            name: ScoreRanks(
                rank=whole[name].rank[order],
                reciprocal_rank=whole[name].reciprocal[order],
                metrics=validation.summarise_parts(run, of_name, auc.get(name)),
            )
            for name, of_name in parts.items()
        },
        n_better=last.n_better[order],
        n_candidates=last.n_candidates[order],
        answer_score=last.answer_score[order],
        bins={
            state: calibration.add_bins(counted)
            for state, counted in bins.items()
        },
    )


class _Scores(NamedTuple):
    """What is kept of the ranking of a part."""

    queries: I64[Tensor, "Q0 W"]
    query_row: I64[np.ndarray, "Q"]
    rank: F64[np.ndarray, "Q"]
    reciprocal: F64[np.ndarray, "Q"]
    n_better: I64[np.ndarray, "Q"]
    n_candidates: I64[np.ndarray, "Q"]
    answer_score: I64[np.ndarray, "Q"]


def _scores(ranked: Ranking) -> _Scores:
    """What is kept of the ranking of a part."""
    counts = ranked.counts
    reciprocal = rank_metrics.expected_reciprocal_ranks(counts)
    return _Scores(
        queries=ranked.queries.long().cpu(),
        query_row=ranked.query_row.numpy(force=True),
        rank=rank_metrics.ranks(counts)[:, -1].numpy(force=True),
        reciprocal=reciprocal.numpy(force=True),
        n_better=counts.n_better.numpy(force=True),
        n_candidates=counts.n_candidates.numpy(force=True),
        answer_score=ranked.answer_score.numpy(force=True),
    )


def _concatenate(parts: Sequence[_Scores]) -> _Scores:
    """The parts one after the other."""
    sizes = np.cumsum([0, *(len(part.queries) for part in parts)])

    def concatenate(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    return _Scores(
        queries=torch.cat([part.queries for part in parts]),
        query_row=np.concatenate(
            [part.query_row + n for part, n in zip(parts, sizes)]
        ),
        rank=concatenate("rank"),
        reciprocal=concatenate("reciprocal"),
        n_better=concatenate("n_better"),
        n_candidates=concatenate("n_candidates"),
        answer_score=concatenate("answer_score"),
    )


def _column(parts: Sequence[RankedRows], name: str) -> np.ndarray:
    """A column of the rows of all parts."""
    columns = [getattr(part, name).numpy(force=True) for part in parts]
    return np.concatenate(columns)


def _no_queries(queries: Tensor) -> RankedSplit:
    """The ranks of no queries."""
    nothing = np.zeros(0, dtype=np.int64)
    return RankedSplit(
        queries=queries.long(),
        side=nothing,
        query_row=nothing,
        provable=nothing.astype(bool),
        ranked={},
        n_better=nothing,
        n_candidates=nothing,
        answer_score=nothing,
        bins={},
    )


# atoms whose first choices are computed together
CHUNK_ATOMS = 64


class _RuleProbabilities(NamedTuple):
    """Rules with the probabilities that stand for them, before and after learning."""

    rule: I64[Tensor, "n"]
    before: F64[Tensor, "n"]
    after: F64[Tensor, "n"]


def rule_uses(
    run: Run, atoms: I64[Tensor, "n W"], proofs: Sequence[Proof | None]
) -> tuple[RuleUse, ...]:
    """What a run makes of the rules that derive answers to some atoms, in the order of rules; see `uses_by_rule`."""
    return tuple(uses_by_rule(run, atoms, proofs).values())


def uses_by_rule(
    run: Run, atoms: I64[Tensor, "n W"], proofs: Sequence[Proof | None]
) -> dict[int, RuleUse]:
    """What a run makes of the rules that derive answers to some atoms, by the id of the rule, ascending.

    Args:
      atoms: ground and of two arguments.
      proofs: of these atoms, which count the last steps.
    """
    if not len(atoms):
        return {}
    n_rules = len(run.task.dataset.rules)
    sums = torch.zeros(n_rules, 3, dtype=torch.float64)
    parts = (
        _first_choices(run, atoms)
        if run.questions is None
        else _weigh_evidence(run, run.questions, atoms)
    )
    for rule, before, after in parts:
        values = torch.stack([torch.ones_like(before), before, after], 1)
        sums = sums.index_add(0, rule.cpu(), values.cpu())

    kb = run.task.kb
    smoothing = float(run.task.cfg.smoothing or 0.0)
    n_proofs = Counter(proof.nodes[0].rule for proof in proofs if proof)
    uses: dict[int, RuleUse] = {}
    for rule, (n, before, after) in enumerate(sums.tolist()):
        if n or n_proofs[rule]:
            uses[rule] = RuleUse(
                text=format_rule(
                    run.task.dataset, run.task.dataset.rules[rule]
                ),
                support=int(kb.support[rule]),
                body_pairs=float(kb.body_pairs[rule]) - smoothing,
                before=before / max(n, 1),
                after=after / max(n, 1),
                n_firings=int(n),
                n_proofs=n_proofs[rule],
            )
    return uses


def _weigh_evidence(
    run: Run, setup: QuestionSetup, atoms: Tensor
) -> Iterator[_RuleProbabilities]:
    """Yield all firings of the questions that some atoms ask."""
    policies = list(validation.policies(run).values())
    for side in ranked_sides(run.task):
        for _, part in scoring.query_evidence(
            run.task, setup.facts, atoms, side
        ):
            batch = aggregation.whole(part)
            before, after = (
                _as_probability(setup, params, batch)
                for params in (policies[0], policies[-1])
            )
            yield _RuleProbabilities(part.rule.long(), before, after)


def _as_probability(
    setup: QuestionSetup, params: Any, batch: aggregation.Batch
) -> Tensor:
    """The probability that stands for each firing."""
    weights = tree.map(lambda x: x.to(setup.facts.degree.device), params.score)
    with torch.no_grad():
        odds = aggregation.firing_amounts(
            setup.policy.aggregation, setup.aggregation, weights, batch
        )
    return (odds / (1 + odds)).double()


def _first_choices(run: Run, atoms: Tensor) -> Iterator[_RuleProbabilities]:
    """Yield the rules that some atoms can be resolved with first."""
    policies = list(validation.policies(run).values())
    for part in atoms.split(CHUNK_ATOMS):
        choices = [
            explain.rule_choices(run.task, run.cfg, params, part)
            for params in (policies[0], policies[-1])
        ]
        yield _RuleProbabilities(
            choices[0].rule,
            choices[0].probability.double(),
            choices[1].probability.double(),
        )


# weights that are listed of a run, those that moved most
MAX_WEIGHTS = 500
SHARE_NAME = "log of the share of groundings"
FEATURE_NAMES = (
    "log-odds of the confidence",
    "log of the support",
    "log of the fan-out",
    "log of the groundings",
    SHARE_NAME,
    "constant",
)
# in place of the share of groundings
WALK_NAME = "log of the probability of a random walk (of the share of groundings where there is none)"


class _Moves(NamedTuple):
    """The weights of a kind that moved."""

    kind: str
    place: I64[np.ndarray, "n d"]  # in their tensor
    label: I64[np.ndarray, "n"]  # of the questions that they count for
    before: F64[np.ndarray, "n"]
    after: F64[np.ndarray, "n"]
    describe: Callable[[list[int]], str]  # says what a place weighs


def learnt_weights(run: Run) -> LearntWeights | None:
    """The weights that differ between the untrained policy and the trained one; None where a run searches proofs."""
    setup = run.questions
    if setup is None:
        return None
    untrained, *_, trained = validation.policies(run).values()
    moves = list(
        _iter_moves(run.task.dataset, setup, untrained.score, trained.score)
    )

    # The largest changes of all kinds together.
    change = np.concatenate([np.abs(m.after - m.before) for m in moves])
    largest = np.argsort(-change, kind="stable")[:MAX_WEIGHTS]
    start = np.cumsum([0, *(len(m.label) for m in moves)])
    kind = np.searchsorted(start, largest, side="right") - 1
    return LearntWeights(
        n_moved=len(change),
        weights=tuple(
            _weight(run.task.dataset, moves[k], int(i - start[k]))
            for i, k in zip(largest, kind)
        ),
        relations=_by_relation(
            run.task.dataset,
            np.concatenate([m.label for m in moves]) // 2,
            change,
        ),
    )


def _weight(dataset: Dataset, moves: _Moves, i: int) -> MovedWeight:
    """One of the weights of a kind."""
    label = int(moves.label[i])
    return MovedWeight(
        kind=moves.kind,
        evidence=moves.describe(moves.place[i].tolist()),
        relation=_relation_name(dataset, label // 2),
        side=_side_name(label),
        before=float(moves.before[i]),
        after=float(moves.after[i]),
    )


def _by_relation(
    dataset: Dataset, predicate: I64[np.ndarray, "n"], change: np.ndarray
) -> tuple[MovedRelation, ...]:
    """How far the weights of each relation moved together, the farthest first."""
    squares = np.bincount(predicate, weights=change**2)
    counts = np.bincount(predicate)
    order = np.argsort(-squares, kind="stable")
    return tuple(
        MovedRelation(
            _relation_name(dataset, int(p)),
            int(counts[p]),
            float(np.sqrt(squares[p])),
        )
        for p in order
        if counts[p]
    )


def _iter_moves(
    dataset: Dataset,
    setup: QuestionSetup,
    before: aggregation.Params,
    after: aggregation.Params,
) -> Iterator[_Moves]:
    """Yield the weights that moved, by kind."""
    head = torch.from_numpy(np.ascontiguousarray(dataset.rules[:, 0, 0])).long()
    rule_label = 2 * head + torch.arange(2)[:, None]
    described = _describe_places(dataset, setup)
    for name, (kind, describe) in described.items():
        new: Tensor = getattr(after, name).double().cpu()
        old: Tensor = getattr(before, name).double().cpu()
        place = (new != old).nonzero()
        at = place.unbind(1)
        # Weights of pairs have the label of the question last, all others first.
        label = at[-1] if name in ("link_weight", "degree_weight") else at[0]
        if name == "rule_weight":
            label = rule_label[at]
        yield _Moves(
            kind=kind,
            place=place.numpy(),
            label=label.numpy(),
            before=old[at].numpy(),
            after=new[at].numpy(),
            describe=describe,
        )


def _describe_places(
    dataset: Dataset, setup: QuestionSetup
) -> dict[str, tuple[str, Callable[[list[int]], str]]]:
    """The kind of each tensor of weights, and what says which evidence one of them weighs."""
    shape = setup.aggregation.shape.tolist()
    share_name = SHARE_NAME
    if setup.policy.aggregation.uses_walks:
        share_name = WALK_NAME
    names = [share_name if n == SHARE_NAME else n for n in FEATURE_NAMES]

    def link(label: int) -> str:
        return f"{_relation_name(dataset, label // 2)} with the candidate as {_side_name(label)}"

    def feature(place: list[int]) -> str:
        rule = dataset.rules[shape.index(place[1])]
        n_atoms = int((rule[:, 0] > 0).sum())
        terms = rule[:, 1:]
        n_constants = int(((terms > 0) & (terms <= dataset.n_constants)).sum())
        atoms, constants = (
            _plural(n_atoms, "atom"),
            _plural(n_constants, "constant"),
        )
        return f"{names[place[2]]}, rules of {atoms} and {constants}"

    def degree(place: list[int]) -> str:
        label, bucket = divmod(place[0], aggregation.N_BUCKETS)
        return f"{_count_text(bucket, 'fact')} of {link(label)}"

    return {
        "rule_weight": (
            "rule",
            lambda at: format_rule(dataset, dataset.rules[at[1]]),
        ),
        "feature_weight": ("feature of rules", feature),
        "own_degree_weight": (
            "known answers",
            lambda at: f"it is {_count_text(at[1], 'known answer')}",
        ),
        "linked_weight": ("linked", lambda _: "some fact links it"),
        "link_weight": ("link", lambda at: link(at[0])),
        "degree_weight": ("degree", degree),
        "prior_weight": ("prior", lambda _: "prior by link embeddings"),
        "network_prior_weight": (
            "prior",
            lambda _: "prior by a Bellman-Ford network",
        ),
    }


def _count_text(bucket: int, noun: str) -> str:
    """The degrees of a bucket, of what the noun names."""
    edges = (0, *aggregation.DEGREE_BUCKETS)
    if bucket == len(edges) - 1:
        return f"{edges[bucket]} or more {noun}s"
    low, high = edges[bucket], edges[bucket + 1] - 1
    return _plural(low, noun) if low == high else f"{low} to {high} {noun}s"


def _plural(n: int, noun: str) -> str:
    """A number of things."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _relation_name(dataset: Dataset, predicate: int) -> str:
    return dataset.predicates[predicate - 1]


def _side_name(label: int) -> str:
    return SIDE_NAMES[HEAD + label % 2]


# better candidates of a query and side that are listed, and those of them with a proof
MAX_BETTER = 5
MAX_BETTER_PROOFS = 1
# rules that are listed for a query without a proof
MAX_FAILED_RULES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class BetterAnswer:
    """A candidate that scores more than the answer; no split holds it."""

    entity: str
    score: float
    why: tuple[str, ...]
    """Its proof; empty where it is not given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SideEntry:
    """A query as a question about one side."""

    question: str
    rank: float
    """The mean rank of ties."""
    score: float
    n_better: int
    n_candidates: int
    evidence: tuple[str, ...]
    """What adds to the score; empty for a run that weighs none."""
    better: tuple[BetterAnswer, ...]
    """The first of the better candidates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryEntry:
    """A query."""

    atom: str
    relation: str
    status: str
    """proved, not derivable, or missed by the search."""
    proof: tuple[str, ...]
    """Why it is derivable, or which rules fail."""
    sides: tuple[SideEntry, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownQueries:
    """The queries that a report shows, with their proofs."""

    rows: np.ndarray
    """Rows among the ranked queries."""
    atoms: Tensor
    """[n, W]."""
    proofs: tuple[Proof | None, ...]


def choose_queries(
    answerer: Answerer,
    ranked: RankedSplit,
    n_queries: int,
    on_phase: PhaseCallback = ignore_phase,
) -> ShownQueries:
    """Choose queries, spread over relations, and prove them.

    Args:
      ranked: the ranked queries.
      n_queries: the most queries.
      on_phase: receives what is being done.
    """
    if not ranked.ranked:
        return ShownQueries(
            rows=np.arange(0), atoms=ranked.queries[:0], proofs=()
        )
    rows = stratified_sample(ranked.queries.numpy(), n_queries)
    atoms = ranked.queries[torch.from_numpy(rows)]
    provable = ranked.provable[: len(ranked.queries)][rows]
    proofs: list[Proof | None] = []
    for atom, is_provable in zip(atoms, provable):
        on_phase("proving queries", len(proofs), len(rows))
        found = answerer.explain(atom, TAIL).proof if is_provable else None
        proofs.append(found)
    return ShownQueries(rows=rows, atoms=atoms, proofs=tuple(proofs))


def iter_entries(
    answerer: Answerer, ranked: RankedSplit, shown: ShownQueries
) -> Iterator[QueryEntry]:
    """Yield what a report says of each query."""
    dataset = answerer.dataset
    n_sides = len(ranked.side) // max(len(ranked.queries), 1)
    for row, atom, proof in zip(shown.rows.tolist(), shown.atoms, shown.proofs):
        places = [side * len(ranked.queries) + row for side in range(n_sides)]
        is_provable = bool(ranked.provable[places[0]])
        is_scored = any(
            ranked.answer_score[i] > rank_metrics.ZERO_SCORE for i in places
        )

        status = "proved" if is_scored else "missed by the search"
        yield QueryEntry(
            atom=_atom_text(dataset, atom),
            relation=display(dataset.predicates[int(atom[0]) - 1]),
            status=status if is_provable else "not derivable",
            proof=_display_lines(AnswerProof(dataset, proof, None).to_lines())
            if is_provable
            else _display_lines(why_not(answerer.subject.task, atom)),
            sides=tuple(
                _side_entry(answerer, ranked, place, atom) for place in places
            ),
        )


def _side_entry(
    answerer: Answerer, ranked: RankedSplit, place: int, atom: Tensor
) -> SideEntry:
    """A query as a question about the side of its row."""
    side = int(ranked.side[place])
    score = int(ranked.answer_score[place])
    query = OpenQuery(int(atom[0]), side, int(atom[HEAD + TAIL - side]))
    run = answerer.subject.policy_run
    assert run is not None, "a run gives the scores"
    explanation = explain_answer(run, atom, side)
    evidence: list[str] = []
    if explanation is not None:
        evidence = explain.explanation_lines(answerer.dataset, explanation)

    n_better = int(ranked.n_better[place])
    trained = list(ranked.ranked.values())[-1]
    return SideEntry(
        question=display(format_query(answerer.dataset, query)),
        rank=float(trained.rank[place]),
        score=probability(score),
        n_better=n_better,
        n_candidates=int(ranked.n_candidates[place]),
        evidence=_display_lines(evidence),
        better=_better_answers(answerer, query, score) if n_better else (),
    )


def better_entities(
    answerer: Answerer, query: OpenQuery, score: int
) -> RankedAnswers:
    """The entities of the task's pool that score more than an answer, best first; no split holds them.

    Args:
      score: quantised, of the answer.
    """
    (answers,) = answerer.predictor.rank([query])
    pool = answerer.subject.task.entity_pool
    is_better = (answers.score > score) & torch.isin(answers.entity, pool)
    return answers._replace(
        entity=answers.entity[is_better],
        score=answers.score[is_better],
        rank=answers.rank[is_better],
        is_known=answers.is_known[is_better],
        is_derivable=answers.is_derivable[is_better],
    )


def _better_answers(
    answerer: Answerer, query: OpenQuery, score: int
) -> tuple[BetterAnswer, ...]:
    """The first entities that score more than an answer, with the proof of the first."""
    better = better_entities(answerer, query, score)
    dataset = answerer.dataset
    found: list[BetterAnswer] = []
    for entity, value in zip(
        better.entity[:MAX_BETTER].tolist(), better.score.tolist()
    ):
        why: list[str] = []
        if len(found) < MAX_BETTER_PROOFS:
            atom = [query.predicate, entity, query.given]
            if query.side == TAIL:
                atom = [query.predicate, query.given, entity]
            width = answerer.subject.task.sizes.atom_width
            padded = torch.tensor([*atom, *[0] * (width - len(atom))])
            proof = answerer.explain(padded, query.side)
            why = proof._replace(evidence=None).to_lines()

        answer = BetterAnswer(
            entity=display(dataset.entities[int(entity) - 1]),
            score=probability(value),
            why=_display_lines(why),
        )
        found.append(answer)
    return tuple(found)


def why_not(task: ProverTask, atom: Tensor) -> list[str]:
    """Lines on the rules whose head matches an atom, and on what they lack.

    Args:
      atom: ground [W], not derivable.
    """
    dataset = task.dataset
    try:
        found = prove_from_other_facts(task, atom, MAX_FACT_PROOF_ROWS)
    except RowBudgetExceeded:
        return [
            f"why not: more than {MAX_FACT_PROOF_ROWS:,} rows of joins (`funcppo prove` allows more)"
        ]

    failed = failed_rules(task, found, atom)
    if not failed.n_matching:
        return ["no rule's head matches it"]
    lines: list[str] = []
    for rule, goals in failed.rules:
        lines.append(
            f"rule {rule}: {format_rule(dataset, dataset.rules[rule])}"
        )
        text = ", ".join(format_atom(dataset, np.array(goal)) for goal in goals)
        lines.append(f"    nothing derived satisfies {text}")
    n_more = failed.n_matching - len(failed.rules)
    if n_more:
        lines.append(f"... and {n_more} more of {failed.n_matching} rules")
    return lines


def failed_rules(
    task: ProverTask, found: QueryResult, atom: Tensor
) -> FailedRules:
    """The first rules whose head matches an atom that is not proved, each with the goals that nothing satisfies.

    Args:
      found: what the attempt to prove it has found.
      atom: ground [W].
    """
    return prove.failed_rules(
        task.kb,
        task.sizes,
        found.model,
        tuple(atom.tolist()),
        object_identity=task.least_model.object_identity,
        n_rules=MAX_FAILED_RULES,
    )


def _atom_text(dataset: Dataset, atom: Tensor) -> str:
    """An atom as text."""
    return display(format_atom(dataset, atom.numpy()))


def _display_lines(lines: list[str]) -> tuple[str, ...]:
    """Lines as they are shown."""
    return tuple(map(display, lines))
