"""Measurements for the report of one run: ranks of test, reliability, rules, single queries.

Axes: Q0 queries, Q rows (a query and a side; all queries of a side after each other).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo import logs
from funcppo.core import files
from funcppo.core.files import Json
from funcppo.core.settings import METRICS_FILE
from funcppo.core.types import I64, Bool
from funcppo.kg.answers import (
    Answerer,
    AnswerProof,
    OpenQuery,
    calibrate,
    explain_answer,
    format_query,
    probability,
)
from funcppo.kg.config import RESULTS_FILE, RunConfig
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.rules import format_atom, format_rule
from funcppo.kg.logic import prove
from funcppo.kg.logic.fixpoint import Verdict
from funcppo.kg.logic.kb import HEAD, TAIL
from funcppo.kg.logic.proof import Proof
from funcppo.kg.ranking import evaluate, explain, ranking, scoring
from funcppo.kg.ranking.evaluate import Bins
from funcppo.kg.ranking.explain import (
    MAX_FACT_PROOF_ROWS,
    prove_from_other_facts,
)
from funcppo.kg.ranking.rank_metrics import ZERO_SCORE, RankCounts
from funcppo.kg.ranking.ranking import (
    RankedRows,
    random_rows,
    stratified_sample,
)
from funcppo.kg.run import held_out
from funcppo.kg.run.run import Run, present_graph
from funcppo.kg.run.subject import describe_default_score, run_subject
from funcppo.kg.search.task import PhaseCallback, ProverTask, ignore_phase

# the name of the bins of what `funcppo score` says of triples
OF_TRIPLES = "funcppo score, of triples"


class RankedTest(NamedTuple):
    """Test queries of a run with its metrics; rows are those of its policy, all queries of a side after each other."""

    queries: I64[Tensor, "Q0 W"]
    side: I64[Tensor, "Q"]  # the argument that is asked for
    provable: Bool[Tensor, "Q"]  # whether the rules derive the answer
    answer_score: I64[Tensor, "Q"]  # quantised
    counts: RankCounts
    metrics: dict[
        str, Json
    ]  # by name of the score, the policy last; empty without queries
    bins: dict[
        str, Bins
    ]  # candidates by their probability, see `held_out.policy_bins`


class RuleUse(NamedTuple):
    """Counts of a rule, and of proofs of a sample of queries in which it is the last step."""

    text: str
    support: int
    body_pairs: float
    n_proofs: int


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
    update: int
    """Updates made."""
    n_updates: int
    """Updates of the whole run."""
    is_trained: bool
    """Whether the last update was made, or the run was stopped early."""
    best_update: int
    """The update whose parameters are evaluated."""
    default_score_note: str
    """Why `predict` ranks by another score than this one; empty if it does not."""
    log: tuple[Json, ...]
    """Lines of metrics.jsonl."""
    n_ranked: int
    """Test queries that were ranked."""
    metrics: dict[str, Json]
    """By name of the score: rule confidences, the policy untrained and trained; empty without test queries."""
    bins: dict[str, Bins]
    """Candidates by the probability that a policy gives them, see `held_out.policy_bins`; triples of `OF_TRIPLES`."""
    rules: tuple[RuleUse, ...]
    """The rules that were used."""
    entries: tuple[Json, ...] = ()
    """The queries that are shown, see `query_entry`."""

    @property
    def trained(self) -> Json:
        """Return the metrics of the trained policy."""
        return list(self.metrics.values())[-1]

    @property
    def untrained(self) -> Json:
        """Return the metrics of the policy before any training."""
        return self.metrics[f"{self.score}, untrained"]

    @property
    def by_rules(self) -> Json:
        """Return the metrics of rule confidences alone."""
        return self.metrics[self.config.rule_score]

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
    n_test = len(run.task.dataset.test)
    if max_ranked is None:
        rows = np.sort(
            random_rows(n_test, results.get("n_test_queries", n_test))
        )
    else:
        rows = stratified_sample(run.task.dataset.test, max_ranked)
    ranked = rank_test(run, rows, on_phase, temperature)

    # The report is on the policy, whatever ranks valid better.
    answerer = Answerer(run_subject(run, run.score))
    places = stratified_sample(ranked.queries.numpy(), n_queries).tolist()
    entries: list[Json] = []
    proofs: list[Proof | None] = []
    for place in places:
        on_phase("proving queries", len(proofs), len(places))
        proof = None
        if ranked.provable[place]:
            proof = answerer.explain(ranked.queries[place], TAIL).proof
        proofs.append(proof)
        if with_entries:
            entries.append(query_entry(answerer, ranked, place, proof))

    notes = [*run.task.notes, *run.notes, *results.get("notes", [])]
    notes += scoring.graph_fallback_notes(run.search_step) + file_notes
    is_by_policy = run.default_score == run.score
    return RunMeasurements(
        name=str(folder),
        config=run.run_config,
        score=run.score,
        sizes=_measure_data(run.task),
        results=results,
        notes=tuple(dict.fromkeys(notes)),
        update=run.update,
        n_updates=run.n_updates,
        is_trained=run.is_finished,
        best_update=int(run.state.best_update),
        default_score_note="" if is_by_policy else describe_default_score(run),
        log=tuple(log),
        n_ranked=len(ranked.queries),
        metrics=ranked.metrics,
        bins=ranked.bins | _triple_bins(run, ranked),
        rules=tuple(count_uses(run.task, proofs)),
        entries=tuple(entries),
    )


def _triple_bins(run: Run, ranked: RankedTest) -> dict[str, Bins]:
    """Return triples by the probability that `funcppo score` gives them, if queries of test are ranked."""
    if not ranked.metrics:
        return {}
    fit = calibrate(Answerer(run_subject(run)))
    return {} if fit is None else {OF_TRIPLES: fit.bins}


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

    n_skipped = sum(row.get("n_nonfinite_minibatches") or 0 for row in log)
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
    rows: I64[np.ndarray, "Q0"],
    on_phase: PhaseCallback = ignore_phase,
    temperature: float | None = None,
) -> RankedTest:
    """Rank test queries of a run against all entities, as the end of its training does.

    Args:
      rows: of the test split.
      temperature: of the trained policy's probabilities; None for none.

    Raises:
      ValueError: a query cannot be ranked (see `ranking.check_split`).
    """
    queries = run.task.dataset.test[rows]
    if not len(queries):
        none = torch.zeros(0, dtype=torch.int64)
        atoms, counts = (
            torch.from_numpy(queries).long(),
            RankCounts(*[none] * 3),
        )
        return RankedTest(atoms, none, none.bool(), none, counts, {}, {})

    # Some rankings come in parts, the same parts for all scores.
    parts: dict[str, list[RankedRows]] = {}
    bins: dict[str, list[Bins]] = {}
    auc: dict[str, float] = {}
    of_policy: list[list[Tensor]] = []
    policy = list(held_out.policies(run))[-1]
    for name, ranked in held_out.iter_rankings(
        run, queries, (run.run_config.rule_score,), on_phase
    ):
        parts.setdefault(name, []).append(ranking.ranked_rows(ranked))
        counted = held_out.policy_bins(run, name, ranked, temperature)
        for state, of_state in counted.items():
            bins.setdefault(state, []).append(of_state)
        if run.task.is_countries:  # which are ranked in one part
            auc[name] = ranking.auc_pr(ranked)
        if name == policy:
            rows_of = (ranked.side, ranked.answer_provable, ranked.answer_score)
            of_policy.append([ranked.queries, *rows_of, *ranked.counts])

    atoms, *columns = (torch.cat(x).cpu() for x in zip(*of_policy))
    order = torch.argsort(columns[0], stable=True)
    side, provable, score, *counts = (column[order] for column in columns)
    return RankedTest(
        atoms.long(),
        side,
        provable,
        score,
        RankCounts(*counts),
        {
            name: held_out.summarise_parts(run, of_score, auc.get(name))
            for name, of_score in parts.items()
        },
        {state: evaluate.add_bins(of) for state, of in bins.items()},
    )


# -- rules


def count_uses(
    task: ProverTask, proofs: Sequence[Proof | None]
) -> list[RuleUse]:
    """Count the proofs in which each rule is the last step, of the rules that are so in any."""
    dataset, kb = task.dataset.shown, task.kb
    smoothing = float(task.cfg.smoothing or 0.0)
    n_proofs = Counter(proof.nodes[0].rule for proof in proofs if proof)
    return [
        RuleUse(
            format_rule(dataset, dataset.rules[rule]),
            int(kb.support[rule]),
            float(kb.body_pairs[rule]) - smoothing,
            n,
        )
        for rule, n in n_proofs.items()
        if rule is not None
    ]


# -- single queries


def query_entry(
    answerer: Answerer, ranked: RankedTest, row: int, proof: Proof | None
) -> Json:
    """Describe a query for a report: its atom, status, proof or the reasons for having none, and both sides.

    The status is "derived", "no proof" or "missed by the search".

    Args:
      row: of the query among the ranked ones.
    """
    atom = ranked.queries[row]
    places = range(row, len(ranked.side), len(ranked.queries))
    entry: Json = {
        "atom": format_atom(answerer.dataset.shown, atom.numpy()),
        "sides": [_describe_side(answerer, ranked, i, atom) for i in places],
    }
    if not ranked.provable[row]:
        failure = explain_failure(answerer.subject.task, atom)
        return entry | {"status": "no proof", "failure": failure}
    best = int(ranked.answer_score[list(places)].max())
    status = "derived" if best > ZERO_SCORE else "missed by the search"
    lines = AnswerProof(answerer.dataset, proof, None).to_lines()
    return entry | {"status": status, "proof": lines}


def _describe_side(
    answerer: Answerer, ranked: RankedTest, place: int, atom: Tensor
) -> Json:
    """Describe one side of a query for a report: rank, score, evidence, and the first better candidates."""
    run = answerer.subject.policy_run
    assert run is not None, "a run gives the scores"
    side, score = int(ranked.side[place]), int(ranked.answer_score[place])
    query = OpenQuery(int(atom[0]), side, int(atom[HEAD + TAIL - side]))
    weighed = explain_answer(run, atom, side)
    n_better, n_equal, n_candidates = (int(x[place]) for x in ranked.counts)
    evidence: list[str] = []
    if weighed:
        evidence = explain.explanation_lines(answerer.dataset, weighed)
    return {
        "question": format_query(answerer.dataset.shown, query),
        "rank": 1 + n_better + n_equal / 2,
        "score": probability(score),
        "n_better": n_better,
        "n_candidates": n_candidates,
        "evidence": evidence,
        "better": list_better(answerer, atom, query, score) if n_better else [],
    }


def list_better(
    answerer: Answerer, atom: Tensor, query: OpenQuery, score: int
) -> list[Json]:
    """Return the first five entities that score more than an answer and are in no split, with a proof of the first.

    Args:
      atom: the query with its answer.
      score: quantised, of the answer.
    """
    (answers,) = answerer.rank([query])
    pool = answerer.subject.task.entity_pool
    is_better = (answers.score > score) & torch.isin(answers.entity, pool)
    found: list[Json] = []
    columns = (x[is_better][:5].tolist() for x in answers[1:3])
    for entity, value in zip(*columns):
        why: list[str] = []
        if not found:
            place = torch.tensor([query.side])
            other = atom.index_fill(0, place, entity)
            proof = answerer.explain(other, query.side)
            why = proof._replace(evidence=None).to_lines()
        name = answerer.dataset.shown.entities[entity - 1]
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
    dataset = task.dataset.shown
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
