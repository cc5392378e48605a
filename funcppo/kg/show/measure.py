"""What a report shows of one run: results of its training, reliability, rules, and single queries with their ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from funcppo import logs
from funcppo.core import files
from funcppo.core.files import Json
from funcppo.core.host import NO_DEADLINE
from funcppo.core.settings import METRICS_FILE, iter_differences
from funcppo.kg.answers import (
    Answerer,
    AnswerProof,
    OpenQuery,
    calibrate,
    format_query,
)
from funcppo.kg.config import RESULTS_FILE, RunConfig
from funcppo.kg.graph.rules import (
    describe_failures,
    format_atom,
    format_rule,
)
from funcppo.kg.logic import prove
from funcppo.kg.logic.fixpoint import Verdict
from funcppo.kg.logic.kb import TAIL, other_side
from funcppo.kg.logic.proof import Proof
from funcppo.kg.ranking import evaluate, rank_metrics, ranking, scoring
from funcppo.kg.ranking.explain import (
    MAX_FACT_PROOF_ROWS,
    prove_from_other_facts,
)
from funcppo.kg.ranking.ranking import (
    Ranking,
    RankingProtocol,
    stratified_sample,
)
from funcppo.kg.run import held_out
from funcppo.kg.run.run import Run
from funcppo.kg.run.subject import describe_default_score, run_subject
from funcppo.kg.search.task import PhaseCallback, ProverTask, ignore_phase


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
    """Test queries that the end of the training ranked."""
    metrics: dict[str, Json]
    """By name of the score, the learnt one last; empty where no test query was ranked."""
    reliability: Json
    """Triples of valid in bins of the probability of `funcppo score`, see `bins_to_json`; empty without any."""
    labels: Mapping[str, str]
    """What people call relations, by name."""
    rules: tuple[Json, ...]
    """The rules that were used, see `count_uses`."""
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
    def changed_settings(self) -> list[tuple[str, str]]:
        """Return the settings that differ from the defaults, by name."""
        default = RunConfig(dataset=self.config.dataset)
        return [
            (name, str(value))
            for name, _, value in iter_differences(default, self.config)
        ]


def measure(
    run: Run,
    folder: Path,
    *,
    n_queries: int = 0,
    with_entries: bool = False,
    on_phase: PhaseCallback = ignore_phase,
) -> RunMeasurements:
    """Measure a run for its report; metrics on test are those of results.json, or else counted as the training counts.

    Args:
      run: at its last checkpoint.
      folder: of the run, with its metrics log and its results.
      n_queries: queries over which rules are counted, and which are shown.
      with_entries: whether single queries are shown.
      on_phase: receives what is being done.

    Raises:
      ValueError: a file of the run is damaged, or a query of test cannot be ranked.
    """
    log, results, notes = _read_files(folder, run.learner is not None)
    notes = [*run.task.notes, *run.notes, *results.get("notes", []), *notes]
    notes += scoring.graph_fallback_notes(run.search_step)
    metrics, n_ranked = results.get("test"), results.get("n_test_queries", 0)
    if metrics is None:  # a run that is unfinished, or of fp.fit
        test = held_out.TestRanking(held_out.rule_rows(run))
        test.rank_by_all(run, NO_DEADLINE, on_phase)
        metrics, n_ranked = test.metrics(run), test.n_queries
    fit = calibrate(Answerer(run_subject(run))) if metrics else None
    reliability = {} if fit is None else evaluate.bins_to_json(fit.bins)

    # The report is on the policy, whatever ranks valid better.
    answerer = Answerer(run_subject(run, run.score))
    ranked, found = _rank_sample(answerer, n_queries, on_phase)
    entries: list[Json] = []
    if with_entries and ranked is not None:
        entries = [
            query_entry(answerer, ranked, row, why)
            for row, why in enumerate(found)
        ]

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
        n_ranked=n_ranked,
        metrics=metrics,
        reliability=reliability,
        labels=run.task.dataset.labels,
        rules=tuple(count_uses(run.task, [why.proof for why in found if why])),
        entries=tuple(entries),
    )


def _rank_sample(
    answerer: Answerer, n_queries: int, on_phase: PhaseCallback
) -> tuple[Ranking | None, list[AnswerProof | None]]:
    """Rank and prove test queries, spread over relations; return no ranking of none.

    Raises:
      ValueError: a query cannot be ranked.
    """
    test = answerer.dataset.test
    queries = test[stratified_sample(test, n_queries)]
    if not len(queries):
        return None, []
    subject = answerer.subject
    protocol = RankingProtocol(sides=ranking.ranked_sides(subject.task))
    ranking.check_split(subject.task, queries, protocol)
    on_phase("ranking queries")
    ranked = ranking.rank_split(subject.task, queries, subject.score, protocol)
    found: list[AnswerProof | None] = []
    for atom, is_provable in zip(ranked.queries.long(), ranked.answer_provable):
        on_phase("proving queries", len(found), len(queries))
        found.append(answerer.explain(atom, TAIL) if is_provable else None)
    return ranked, found


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
        results = files.read_object(path)
    else:
        notes.append(
            f"{RESULTS_FILE} is missing: times and versions of the training are not known"
        )

    n_skipped = sum(row.get("n_nonfinite_minibatches") or 0 for row in log)
    if n_skipped:
        notes.append(
            f"{n_skipped:,.0f} minibatches were skipped: loss or gradient not finite"
        )
    return log, results, notes


# -- rules


def count_uses(task: ProverTask, proofs: Sequence[Proof | None]) -> list[Json]:
    """Return the rules that are the last step of a proof, with their counts, most proofs first."""
    dataset, kb = task.dataset.shown, task.kb
    smoothing = float(task.cfg.smoothing or 0.0)
    n_proofs = Counter(proof.nodes[0].rule for proof in proofs if proof)
    n_proofs.pop(None, None)
    rows: list[Json] = []
    for rule, n in n_proofs.most_common():
        support, pairs = float(kb.support[rule]), float(kb.body_pairs[rule])
        row = {
            "rule": format_rule(dataset, dataset.rules[rule]),
            "right_in_train": round(support),
            "of": round(pairs - smoothing),
            "confidence": support / max(pairs - smoothing, 1),
            "last_step_of": n,
        }
        rows.append(row)
    return rows


# -- single queries


def query_entry(
    answerer: Answerer, ranked: Ranking, row: int, why: AnswerProof | None
) -> Json:
    """Describe a query for a report: its atom, status, both sides, and its proof or the reasons for having none.

    The status is "derived", "no proof" or "missed by the search".

    Args:
      row: of the query among the ranked ones.
      why: its proof, with the evidence for its tail; None without a proof.
    """
    atom, dataset = ranked.queries[row].long(), answerer.dataset.shown
    sides: list[Json] = []
    for place in range(row, len(ranked.side), len(ranked.queries)):
        side = int(ranked.side[place])
        query = OpenQuery(int(atom[0]), side, int(atom[other_side(side)]))
        n_better, n_equal, n_candidates = (int(x[place]) for x in ranked.counts)
        described = {
            "question": format_query(dataset, query),
            "rank": 1 + n_better + n_equal / 2,
            "score": rank_metrics.probability(int(ranked.answer_score[place])),
            "n_better": n_better,
            "n_candidates": n_candidates,
        }
        sides.append(described)

    entry: Json = {"atom": format_atom(dataset, atom.numpy()), "sides": sides}
    if why is None:
        failure = explain_failure(answerer.subject.task, atom)
        return entry | {"status": "no proof", "failure": failure}
    is_found = any(side["score"] > 0 for side in sides)
    status = "derived" if is_found else "missed by the search"
    return entry | {"status": status, "proof": why.to_lines()}


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
    return failure | {
        "verdict": found.verdict,
        "failed_rules": describe_failures(dataset, failed.rules, "goals"),
        "n_matching_rules": failed.n_matching,
    }
