"""Measurements for the report of one run: ranks of test, reliability, rules, learned weights, single queries.

A run that learns from queries weighs every rule that derives a candidate; the odds o that a rule adds stand for the
probability o / (1 + o), which before learning is the confidence of the rule. In a run that learns from proofs the
probability of a rule is that of choosing it to resolve an atom. All weights add to the score of a candidate, which is a
logit; they are compared as they are before and after learning.

Axes: Q rows (a query and a side; all queries of a side after each other), B bins.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo import logs
from funcppo.core import files, tree
from funcppo.core.files import Json
from funcppo.core.settings import METRICS_FILE
from funcppo.core.types import F64, I64, Bool
from funcppo.kg.answers import (
    Answerer,
    AnswerProof,
    OpenQuery,
    explain_answer,
    format_query,
    probability,
)
from funcppo.kg.config import RESULTS_FILE, RunConfig
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.rules import format_atom, format_rule
from funcppo.kg.logic import prove
from funcppo.kg.logic.fixpoint import Verdict
from funcppo.kg.logic.kb import HEAD, SIDE_NAMES, TAIL
from funcppo.kg.logic.proof import Proof
from funcppo.kg.ranking import evaluate, explain, rank_metrics, ranking, scoring
from funcppo.kg.ranking.evaluate import Bins
from funcppo.kg.ranking.explain import (
    MAX_FACT_PROOF_ROWS,
    prove_from_other_facts,
)
from funcppo.kg.ranking.rank_metrics import ZERO_SCORE
from funcppo.kg.ranking.ranking import (
    RankedRows,
    Ranking,
    random_rows,
    ranked_sides,
    selection_metric,
    stratified_sample,
)
from funcppo.kg.ranking.scoring import SearchReplay
from funcppo.kg.run import held_out
from funcppo.kg.run.fit import QuestionSetup
from funcppo.kg.run.run import Run, present_graph
from funcppo.kg.run.subject import describe_default_score, run_subject
from funcppo.kg.scores import learned
from funcppo.kg.search.task import PhaseCallback, ProverTask, ignore_phase

# weights that are listed of a run, those that moved most
MAX_WEIGHTS = 500
FEATURE_NAMES = (
    "log-odds of the confidence",
    "log of the support",
    "log of the fan-out",
    "log of the groundings",
    "log of the probability of a random walk (of the share of groundings where there is none)",
    "constant",
)
# the kind of evidence that each tensor of weights is for
WEIGHT_KINDS = {
    "rule_weight": "rule",
    "feature_weight": "feature of rules",
    "own_degree_weight": "known answers",
    "linked_weight": "linked",
    "link_weight": "link",
    "degree_weight": "degree",
    "prior_weight": "prior",
    "network_prior_weight": "prior",
}


class ScoreRanks(NamedTuple):
    """Ranks of the rows of a split by one score."""

    rank: F64[np.ndarray, "Q"]  # mean rank of ties
    reciprocal_rank: F64[np.ndarray, "Q"]  # its expectation over ties
    metrics: Json  # what `funcppo evaluate` reports


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedSplit:
    """Rows of queries, ranked by several scores."""

    n_queries: int
    """Queries; each has a row for each side."""
    atom: I64[Tensor, "Q W"]
    """The query."""
    side: I64[np.ndarray, "Q"]
    """The argument that is asked for."""
    provable: Bool[np.ndarray, "Q"]
    """Whether the rules derive the answer."""
    n_better: I64[np.ndarray, "Q"]
    """Candidates that score more than the answer under the trained policy."""
    n_candidates: I64[np.ndarray, "Q"]
    """All candidates."""
    answer_score: I64[np.ndarray, "Q"]
    """Quantised score of the answer under the trained policy."""
    ranked: dict[str, ScoreRanks]
    """By name of the score, the trained policy last; empty without queries."""
    bins: dict[str, Bins]
    """Candidates by their probability, see `held_out.policy_bins`; empty without queries."""

    @property
    def queries(self) -> I64[Tensor, "Q0 W"]:
        """Return the queries, [Q0, W]."""
        return self.atom[: self.n_queries]


class RuleUse(NamedTuple):
    """Counts and learned probability of a rule over a sample of queries."""

    text: str
    support: int
    body_pairs: float
    before: float  # the probability that stands for it, untrained
    after: float  # and trained
    n_firings: int  # answers that it was weighed for
    n_proofs: int  # proofs of answers in which it is the last step


class MovedWeight(NamedTuple):
    """Weight of evidence that training moved."""

    kind: str
    evidence: str  # what it weighs
    relation: str  # of the queries that it counts for
    side: str  # that they ask for, head or tail
    before: float
    after: float


class LearntWeights(NamedTuple):
    """Weights that training moved, and sums of their changes by relation."""

    n_moved: int  # weights
    weights: tuple[MovedWeight, ...]  # those that moved most
    # relation, weights of it that moved, root of the sum of their squared changes
    relations: tuple[tuple[str, int, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMeasurements:
    """Measurements of one run for a report, as plain numbers and texts."""

    name: str
    """Folder of the run."""
    config: RunConfig
    """Settings."""
    score: str
    """Name of the score."""
    sizes: Json
    """Name and sizes of the data set, as attributes of the page."""
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
    n_ranked: int
    """Test queries that were ranked."""
    relation: I64[np.ndarray, "Q"]
    """Predicate of each row, from 1."""
    provable: Bool[np.ndarray, "Q"]
    """Whether the rules derive the answer."""
    ranked: dict[str, ScoreRanks]
    """By name of the score: rule confidences, the policy untrained and trained; empty without test queries."""
    bins: dict[str, Bins]
    """Candidates by the probability that a policy gives them, see `held_out.policy_bins`."""
    rules: tuple[RuleUse, ...]
    """The rules that were used."""
    learnt: LearntWeights | None
    """The weights that training moved; None where a run searches proofs."""
    entries: tuple[Json, ...] = ()
    """The queries that are shown, see `query_entry`."""

    @property
    def trained(self) -> ScoreRanks:
        """Return the ranks by the trained policy."""
        return list(self.ranked.values())[-1]

    @property
    def untrained(self) -> ScoreRanks:
        """Return the ranks by the policy before any training."""
        return self.ranked[f"{self.score}, untrained"]

    @property
    def by_rules(self) -> ScoreRanks:
        """Return the ranks by rule confidences alone."""
        return self.ranked[self.config.rule_score]

    @property
    def temperature(self) -> float | None:
        """Return the trained policy's temperature chosen on valid; None without a temperature."""
        return (self.results.get("calibration") or {}).get("temperature")

    @property
    def changed_settings(self) -> list[tuple[str, str]]:
        """Return the settings that differ from the defaults, by name."""
        default = _flat(asdict(RunConfig(dataset=self.config.dataset)))
        return [
            (name, str(value))
            for name, value in _flat(asdict(self.config)).items()
            if value != default[name]
        ]


def measure(
    run: Run,
    folder: Path,
    *,
    max_ranked: int | None = None,
    n_queries: int = 0,
    with_entries: bool = False,
    on_phase: PhaseCallback = ignore_phase,
) -> RunMeasurements:
    """Measure a run for its report.

    Args:
      run: at its last checkpoint.
      folder: of the run, with its metrics log and its results.
      max_ranked: the most test queries to rank, spread over relations; None for as many as the end of training ranks.
      n_queries: queries over which rules are counted, and which are shown.
      with_entries: whether single queries are shown.
      on_phase: receives what is being done.

    Raises:
      ValueError: a file of the run is damaged, or a query of test cannot be ranked.
    """
    log, results, file_notes = _read_files(folder, run.learner is not None)
    temperature = (results.get("calibration") or {}).get("temperature")
    ranked = rank_test(
        run, max_ranked, on_phase, temperature, results.get("n_test_queries")
    )
    # The report is on the policy, whatever ranks valid better.
    answerer = Answerer(run_subject(run, run.score))
    rows, proofs = prove_queries(answerer, ranked, n_queries, on_phase)
    entries: list[Json] = []
    if with_entries:
        for row, proof in zip(rows.tolist(), proofs):
            entries.append(query_entry(answerer, ranked, row, proof))
            on_phase("explaining queries", len(entries), len(rows))

    notes = [*run.task.notes, *run.notes, *results.get("notes", [])]
    notes += scoring.graph_fallback_notes(run.search_step)
    atoms = ranked.queries[torch.from_numpy(rows)]
    is_by_policy = run.default_score == run.score
    return RunMeasurements(
        name=str(folder),
        config=run.run_config,
        score=run.score,
        sizes=_measure_data(run.task),
        results=results,
        notes=tuple(dict.fromkeys(notes + file_notes)),
        search_replay=scoring.search_replay(run.search_step),
        update=run.update,
        n_updates=run.n_updates,
        is_trained=run.is_finished,
        best_update=int(run.state.best_update),
        metric_name=selection_metric(run.task),
        default_score_note="" if is_by_policy else describe_default_score(run),
        log=tuple(log),
        predicates=tuple(run.task.dataset.predicates),
        n_ranked=ranked.n_queries,
        relation=ranked.atom[:, 0].numpy(),
        provable=ranked.provable,
        ranked=ranked.ranked,
        bins=ranked.bins,
        rules=tuple(uses_by_rule(run, atoms, proofs).values()),
        learnt=learnt_weights(run),
        entries=tuple(entries),
    )


# -- data, files and settings


def _measure_data(task: ProverTask) -> Json:
    """Return the name and the sizes of a data set."""
    dataset = task.dataset
    return {
        "name": dataset.name,
        "entities": dataset.n_constants,
        "relations": dataset.n_predicates,
        "train": len(dataset.train),
        "valid": len(dataset.valid),
        "test": len(dataset.test),
        "rules": len(dataset.rules),
        "height": task.max_height,
    }


def check_same_data(folders: Sequence[Path]) -> None:
    """Check that runs are on the same data; their rules may differ.

    Raises:
      ValueError: two are not, or a folder holds no run.
    """
    loaded = [present_graph(folder).dataset for folder in folders]
    first = loaded[0]
    for folder, dataset in zip(folders[1:], loaded[1:]):
        if fingerprint(dataset) != fingerprint(first):
            raise ValueError(
                f"{folder}: expected a run on the data of {folders[0]} ({first.name}), got one on {dataset.name}, with "
                "other triples"
            )


def fingerprint(dataset: Dataset) -> str:
    """Return a hash of names and splits, which does not depend on the rules."""
    no_rules = dataset.rules[:0, :0]  # the longest rule widens the table
    return dataclasses.replace(dataset, rules=no_rules).fingerprint


def _read_files(
    folder: Path, has_updates: bool
) -> tuple[list[Json], Json, list[str]]:
    """Read the metrics log and the results of a run; return them with notes on missing parts.

    Raises:
      ValueError: a file is damaged.
    """
    log: list[Json] = []
    results: Json = {}
    notes: list[str] = []
    path = folder / METRICS_FILE
    if path.is_file():
        log = logs.read(path)
    elif has_updates:
        notes.append(f"{METRICS_FILE} is missing: there are no learning curves")
    path = folder / RESULTS_FILE
    if path.is_file():
        results = files.parse_object(path, path.read_bytes())
    else:
        notes.append(
            f"{RESULTS_FILE} is missing: times and versions of the training are not known"
        )

    updates = {row["update"] for row in log} | {0}
    n_missing = max(updates) + 1 - len(updates)
    if n_missing:
        notes.append(f"{METRICS_FILE}: {n_missing:,} updates have no line")
    n_skipped = np.nansum(
        [row.get("n_nonfinite_minibatches") or 0 for row in log]
    )
    if n_skipped:
        notes.append(
            f"{n_skipped:,.0f} minibatches were skipped: loss or gradient not finite"
        )
    reasons = {row.get("fallback_reason") or "" for row in log} - {""}
    notes += [f"no CUDA graph in training: {text}" for text in sorted(reasons)]
    return log, results, notes


def _flat(settings: Json, prefix: str = "") -> Json:
    """Flatten nested settings; names are joined by dots."""
    flat: Json = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


# -- ranks of test


def rank_test(
    run: Run,
    max_ranked: int | None,
    on_phase: PhaseCallback = ignore_phase,
    temperature: float | None = None,
    n_ranked: int | None = None,
) -> RankedSplit:
    """Rank the test split of a run against all entities, as the end of its training does.

    Args:
      max_ranked: the most queries, spread over relations; None for as many as the end of training ranks.
      temperature: of the trained policy's probabilities; None for none.
      n_ranked: queries that the end of training has ranked; None for all.

    Raises:
      ValueError: a query cannot be ranked (see `ranking.check_split`).
    """
    test = run.task.dataset.test
    rows = (
        np.sort(random_rows(len(test), n_ranked or len(test)))
        if max_ranked is None
        else stratified_sample(test, max_ranked)
    )
    chosen = test[rows]
    if not len(chosen):
        nothing = np.zeros(0, dtype=np.int64)
        return RankedSplit(
            n_queries=0,
            atom=torch.from_numpy(chosen).long(),
            side=nothing,
            provable=nothing.astype(bool),
            n_better=nothing,
            n_candidates=nothing,
            answer_score=nothing,
            ranked={},
            bins={},
        )

    # Some rankings come in parts, the same parts for all scores.
    columns: dict[str, list[list[Tensor]]] = {}
    parts: dict[str, list[RankedRows]] = {}
    bins: dict[str, list[Bins]] = {}
    auc: dict[str, float] = {}
    for name, ranked in held_out.iter_rankings(
        run, chosen, (run.run_config.rule_score,), on_phase
    ):
        columns.setdefault(name, []).append(_row_columns(ranked))
        parts.setdefault(name, []).append(ranking.ranked_rows(ranked))
        counted = held_out.policy_bins(run, name, ranked, temperature)
        for state, of_state in counted.items():
            bins.setdefault(state, []).append(of_state)
        if run.task.is_countries:  # which are ranked in one part
            auc[name] = ranking.auc_pr(ranked)

    # All queries of a side after each other, in the order of the parts.
    rows_of: dict[str, list[np.ndarray]] = {}
    for name, of_score in columns.items():
        joined = [torch.cat(column) for column in zip(*of_score)]
        order = torch.argsort(joined[0], stable=True)
        rows_of[name] = [column[order].numpy() for column in joined]
    *_, last = rows_of.values()
    return RankedSplit(
        n_queries=len(chosen),
        side=last[0],
        atom=torch.from_numpy(last[1]),
        provable=last[2],
        n_better=last[3],
        n_candidates=last[4],
        answer_score=last[5],
        ranked={
            name: ScoreRanks(
                rows_of[name][6],
                rows_of[name][7],
                held_out.summarise_parts(run, of_score, auc.get(name)),
            )
            for name, of_score in parts.items()
        },
        bins={state: evaluate.add_bins(of) for state, of in bins.items()},
    )


def _row_columns(ranked: Ranking) -> list[Tensor]:
    """Return the columns of a ranking that `RankedSplit` and `ScoreRanks` keep, on the host."""
    counts = ranked.counts
    columns = (
        ranked.side,
        ranked.queries.long()[ranked.query_row],
        ranked.answer_provable,
        counts.n_better,
        counts.n_candidates,
        ranked.answer_score,
        rank_metrics.ranks(counts)[:, -1],
        rank_metrics.expected_reciprocal_ranks(counts),
    )
    return [column.cpu() for column in columns]


# -- rules


def uses_by_rule(
    run: Run, atoms: I64[Tensor, "n W"], proofs: Sequence[Proof | None]
) -> dict[int, RuleUse]:
    """Return counts and mean probabilities of the rules that derive the atoms, by rule id, ascending.

    Args:
      atoms: ground and of two arguments.
      proofs: of these atoms, which count the last steps.
    """
    if not len(atoms):
        return {}
    dataset, kb = run.task.dataset, run.task.kb
    sums = torch.zeros(len(dataset.rules), 3, dtype=torch.float64)
    for rule, before, after in _iter_rule_probabilities(run, atoms):
        values = torch.stack([torch.ones_like(before), before, after], 1)
        sums = sums.index_add(0, rule.cpu(), values.double().cpu())

    smoothing = float(run.task.cfg.smoothing or 0.0)
    n_proofs = Counter(proof.nodes[0].rule for proof in proofs if proof)
    return {
        rule: RuleUse(
            text=format_rule(dataset, dataset.rules[rule]),
            support=int(kb.support[rule]),
            body_pairs=float(kb.body_pairs[rule]) - smoothing,
            before=before / max(n, 1),
            after=after / max(n, 1),
            n_firings=int(n),
            n_proofs=n_proofs[rule],
        )
        for rule, (n, before, after) in enumerate(sums.tolist())
        if n or n_proofs[rule]
    }


def _iter_rule_probabilities(
    run: Run, atoms: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield rules that derive the atoms, with their probabilities before and after learning."""
    found = list(held_out.policies(run).values())
    first, last = found[0], found[-1]
    setup = run.questions
    if setup is None:
        for part in atoms.split(64):
            (rule, before), (_, after) = (
                explain.rule_choices(run.task, run.cfg, params, part)
                for params in (first, last)
            )
            yield rule, before, after
        return

    device = setup.facts.degree.device
    weights = [
        tree.map(lambda x: x.to(device), params) for params in (first, last)
    ]
    for side in ranked_sides(run.task):
        for _, part in scoring.query_evidence(
            run.task, setup.facts, atoms, side
        ):
            batch = learned.whole(part)
            with torch.no_grad():
                before, after = (
                    learned.firing_amounts(
                        setup.weighed, setup.aggregation, w, batch
                    )
                    for w in weights
                )
            yield part.rule.long(), before / (1 + before), after / (1 + after)


# -- learnt weights


def learnt_weights(run: Run) -> LearntWeights | None:
    """Return the weights that training moved; None for a run that searches proofs."""
    setup = run.questions
    if setup is None:
        return None
    dataset = run.task.dataset
    found = list(held_out.policies(run).values())
    untrained, trained = found[0], found[-1]
    weights: list[MovedWeight] = []
    counts = np.zeros(dataset.n_predicates + 1)
    squares = np.zeros_like(counts)
    for name, kind in WEIGHT_KINDS.items():
        before, after = (
            getattr(params, name).double().cpu()
            for params in (untrained, trained)
        )
        at = (after != before).nonzero()
        change = (after - before)[at.unbind(1)]
        label = _query_labels(dataset, name, at)
        counts += np.bincount(label // 2, minlength=len(counts))
        squares += np.bincount(label // 2, change**2, len(counts))
        largest = torch.argsort(-change.abs(), stable=True)[:MAX_WEIGHTS]
        for i in largest.tolist():
            place = tuple(at[i].tolist())
            weight = MovedWeight(
                kind=kind,
                evidence=evidence_text(dataset, setup, name, place),
                relation=dataset.predicates[int(label[i]) // 2 - 1],
                side=_side_name(int(label[i])),
                before=float(before[place]),
                after=float(after[place]),
            )
            weights.append(weight)

    weights.sort(key=lambda weight: -abs(weight.after - weight.before))
    relations = tuple(
        (dataset.predicates[p - 1], int(counts[p]), float(squares[p] ** 0.5))
        for p in np.argsort(-squares, kind="stable").tolist()
        if counts[p]
    )
    n_moved = int(counts.sum())
    return LearntWeights(n_moved, tuple(weights[:MAX_WEIGHTS]), relations)


def _query_labels(dataset: Dataset, name: str, at: Tensor) -> Tensor:
    """Return the label of the queries that each weight counts for.

    Args:
      name: of their tensor.
      at: [n, d], their places in it.
    """
    if name == "rule_weight":
        head = torch.from_numpy(dataset.rules[:, 0, 0].astype(np.int64))
        return 2 * head[at[:, 1]] + at[:, 0]
    # Weights of pairs have the label of the query last, all others first.
    return at[:, -1 if name in ("link_weight", "degree_weight") else 0]


def evidence_text(
    dataset: Dataset, setup: QuestionSetup, name: str, place: Sequence[int]
) -> str:
    """Describe the evidence that a weight weighs.

    Args:
      name: of its tensor.
      place: in the tensor.
    """
    match name:
        case "rule_weight":
            return format_rule(dataset, dataset.rules[place[1]])
        case "feature_weight":
            return _feature_text(dataset, setup, place)
        case "own_degree_weight":
            return f"it is {_bucket_text(place[1], 'known answer')}"
        case "linked_weight":
            return "some fact links it"
        case "link_weight":
            return _link_text(dataset, place[0])
        case "degree_weight":
            label, bucket = divmod(place[0], learned.N_BUCKETS)
            number = _bucket_text(bucket, "fact")
            return f"{number} of {_link_text(dataset, label)}"
        case "prior_weight":
            return "prior by link embeddings"
        case _:
            return "prior by a Bellman-Ford network"


def _link_text(dataset: Dataset, label: int) -> str:
    """Describe a label: its relation, with the candidate as head or tail."""
    relation = dataset.predicates[label // 2 - 1]
    return f"{relation} with the candidate as {_side_name(label)}"


def _feature_text(
    dataset: Dataset, setup: QuestionSetup, place: Sequence[int]
) -> str:
    """Describe a feature of the rules of one shape."""
    feature = FEATURE_NAMES[place[2]]
    rule = dataset.rules[setup.aggregation.shape.tolist().index(place[1])]
    terms = rule[:, 1:]
    is_constant = (terms > 0) & (terms <= dataset.n_constants)
    atoms = _plural(int((rule[:, 0] > 0).sum()), "atom")
    constants = _plural(int(is_constant.sum()), "constant")
    return f"{feature}, rules of {atoms} and {constants}"


def _bucket_text(bucket: int, noun: str) -> str:
    """Format the degrees of a bucket with the noun that they count."""
    edges = (0, *learned.DEGREE_BUCKETS)
    if bucket == len(edges) - 1:
        return f"{edges[bucket]} or more {noun}s"
    low, high = edges[bucket], edges[bucket + 1] - 1
    return _plural(low, noun) if low == high else f"{low} to {high} {noun}s"


def _plural(n: int, noun: str) -> str:
    """Format a number with its noun, in the plural unless the number is 1."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _side_name(label: int) -> str:
    """Return the side that queries of a label ask for."""
    return SIDE_NAMES[HEAD + label % 2]


# -- single queries


def prove_queries(
    answerer: Answerer,
    ranked: RankedSplit,
    n_queries: int,
    on_phase: PhaseCallback = ignore_phase,
) -> tuple[I64[np.ndarray, "n"], list[Proof | None]]:
    """Choose ranked queries, spread over relations; return their rows and a proof of each, None if it is not derivable.

    Args:
      n_queries: the most queries.
      on_phase: receives what is being done.
    """
    if not ranked.ranked:
        return np.arange(0), []
    rows = stratified_sample(ranked.queries.numpy(), n_queries)
    proofs: list[Proof | None] = []
    for row in rows.tolist():
        on_phase("proving queries", len(proofs), len(rows))
        found = None
        if ranked.provable[row]:
            found = answerer.explain(ranked.queries[row], TAIL).proof
        proofs.append(found)
    return rows, proofs


def query_entry(
    answerer: Answerer, ranked: RankedSplit, row: int, proof: Proof | None
) -> Json:
    """Describe a query for a report: its atom, status, proof or the reasons for having none, and both sides.

    The status is "proved", "not derivable" or "missed by the search".

    Args:
      row: of the query among the ranked ones.
    """
    atom = ranked.queries[row]
    places = range(row, len(ranked.side), ranked.n_queries)
    entry: Json = {
        "atom": format_atom(answerer.dataset, atom.numpy()),
        "sides": [_describe_side(answerer, ranked, i, atom) for i in places],
    }
    if not ranked.provable[row]:
        failure = explain_failure(answerer.subject.task, atom)
        return entry | {"status": "not derivable", "failure": failure}
    best = max(ranked.answer_score[place] for place in places)
    status = "proved" if best > ZERO_SCORE else "missed by the search"
    lines = AnswerProof(answerer.dataset, proof, None).to_lines()
    return entry | {"status": status, "proof": lines}


def _describe_side(
    answerer: Answerer, ranked: RankedSplit, place: int, atom: Tensor
) -> Json:
    """Describe one side of a query for a report: rank, score, evidence, and the first better candidates."""
    dataset, run = answerer.dataset, answerer.subject.policy_run
    assert run is not None, "a run gives the scores"
    side, score = int(ranked.side[place]), int(ranked.answer_score[place])
    query = OpenQuery(int(atom[0]), side, int(atom[HEAD + TAIL - side]))
    weighed = explain_answer(run, atom, side)
    n_better = int(ranked.n_better[place])
    trained = list(ranked.ranked.values())[-1]
    return {
        "question": format_query(dataset, query),
        "rank": float(trained.rank[place]),
        "score": probability(score),
        "n_better": n_better,
        "n_candidates": int(ranked.n_candidates[place]),
        "evidence": explain.explanation_lines(dataset, weighed)
        if weighed
        else [],
        "better": _list_better(answerer, query, score) if n_better else [],
    }


def better_entities(
    answerer: Answerer, query: OpenQuery, score: int
) -> tuple[list[int], list[int]]:
    """Return the entities that score more than an answer and that no split holds, best first, and their scores.

    Args:
      score: quantised, of the answer.
    """
    (answers,) = answerer.rank([query])
    pool = answerer.subject.task.entity_pool
    is_better = (answers.score > score) & torch.isin(answers.entity, pool)
    entities, scores = answers.entity[is_better], answers.score[is_better]
    return entities.tolist(), scores.tolist()


def _list_better(
    answerer: Answerer, query: OpenQuery, score: int
) -> list[Json]:
    """Return the first entities that score more than an answer, with a proof of the first."""
    found: list[Json] = []
    better = zip(*better_entities(answerer, query, score))
    for entity, value in islice(better, 5):
        why: list[str] = []
        if not found:
            atom = torch.zeros(answerer.subject.task.sizes.atom_width).long()
            atom[0], atom[query.side] = query.predicate, entity
            atom[HEAD + TAIL - query.side] = query.given
            proof = answerer.explain(atom, query.side)
            why = proof._replace(evidence=None).to_lines()
        name = answerer.dataset.entities[entity - 1]
        found.append({"entity": name, "score": probability(value), "why": why})
    return found


def explain_failure(task: ProverTask, atom: Tensor) -> Json:
    """Explain why an atom has no proof, by the rules whose heads match it.

    Args:
      atom: ground [W].

    Returns:
      The verdict, the first rules whose head matches the atom, each with the goals that nothing satisfies, the number
      of all such rules, and a note where the work was stopped.
    """
    failure: Json = {
        "verdict": Verdict.UNKNOWN,
        "failed_rules": [],
        "n_matching_rules": 0,
        "note": "",
    }
    found = prove_from_other_facts(task, atom, MAX_FACT_PROOF_ROWS)
    if found.verdict is Verdict.UNKNOWN:
        note = (
            f"stopped: a proof from other facts takes more than {MAX_FACT_PROOF_ROWS:,} rows of joins (`funcppo prove` "
            "allows more)"
        )
        return failure | {"note": note}

    failed = prove.failed_rules(found.answers, tuple(atom.tolist()), n_rules=5)
    dataset = task.dataset
    rules = [
        {
            "rule": rule,
            "rule_text": format_rule(dataset, dataset.rules[rule]),
            "goals": [format_atom(dataset, np.array(goal)) for goal in goals],
        }
        for rule, goals in failed.rules
    ]
    return failure | {
        "verdict": found.verdict,
        "failed_rules": rules,
        "n_matching_rules": failed.n_matching,
    }
