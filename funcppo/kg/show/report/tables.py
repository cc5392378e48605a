"""The tables that reports and pictures show, as arrays with a row for each run.

`RunMeasurements` is what one run gives; the functions make tables of the runs that are shown together. Axes: K runs, U
updates, B bins, P relations, Q rows (a query and a side), R rules. `Band` is what is drawn of K runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from funcppo.core.files import Json
from funcppo.core.types import F64, I64, Bool
from funcppo.kg.ranking import calibration
from funcppo.kg.ranking.calibration import Bins
from funcppo.kg.ranking.policy_score import SearchReplay
from funcppo.kg.run.config import RunConfig
from funcppo.kg.run.validation import TEMPERED, TRAINED, UNTRAINED

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
