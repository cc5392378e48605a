"""Measure a run for a report: its files, the ranks of its test split, its rules, and single queries."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from funcppo import logs
from funcppo.core import files
from funcppo.core.files import Json
from funcppo.core.settings import METRICS_FILE
from funcppo.kg.answers import Answerer
from funcppo.kg.graph import loaders
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.ranking import policy_score
from funcppo.kg.ranking.ranking import selection_metric
from funcppo.kg.run import training
from funcppo.kg.run.config import RESULTS_FILE, read_config
from funcppo.kg.run.run import Run
from funcppo.kg.run.subject import describe_default_score, run_subject
from funcppo.kg.search.task import PhaseCallback, ignore_phase
from funcppo.kg.show.report import (
    learnt_weights,
    query_entries,
    ranked_split,
    rule_uses,
)
from funcppo.kg.show.report.query_entries import QueryEntry
from funcppo.kg.show.report.ranked_split import RankedSplit
from funcppo.kg.show.report.tables import RuleUse, RunMeasurements


class RunReport(NamedTuple):
    """A run as a report shows it."""

    measured: RunMeasurements
    entries: list[QueryEntry]


class _Files(NamedTuple):
    """What the folder of a run says beside its checkpoint."""

    log: list[Json]
    results: Json
    notes: list[str]


def check_same_data(folders: Sequence[Path]) -> None:
    """Check that runs are on the same data, before any of them is measured.

    Raises:
      ValueError: two are not, or a folder holds no run.
    """
    configs = [read_config(folder) for folder in folders]
    sources = [(config.dataset, config.data) for config in configs]
    if all(source == sources[0] for source in sources):
        return
    loaded = [loaders.load(name, cfg=cfg) for name, cfg in sources]
    first = loaded[0]
    for folder, dataset in zip(folders[1:], loaded[1:]):
        if fingerprint(dataset) != fingerprint(first):
            raise ValueError(
                f"{folder}: expected a run on the data of {folders[0]} ({first.name}), got one on {dataset.name}, with "
                "other triples"
            )


def fingerprint(dataset: Dataset) -> str:
    """A hash of names and splits, whatever the rules."""
    no_rules = dataset.rules[:0, :0]  # the longest rule widens the table
    return dataclasses.replace(dataset, rules=no_rules).fingerprint


def measure(
    run: Run,
    folder: Path,
    *,
    max_ranked: int | None = None,
    n_queries: int = 0,
    with_entries: bool = False,
    on_phase: PhaseCallback = ignore_phase,
) -> RunReport:
    """Measure a run.

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
    files = _read_files(folder)
    calibrated = files.results.get("calibration") or {}
    ranked = ranked_split.rank_test(
        run, max_ranked, on_phase, calibrated.get("temperature")
    )
    # The report is on the policy, whatever ranks valid better.
    answerer = Answerer(run_subject(run, run.score))
    shown = query_entries.choose_queries(answerer, ranked, n_queries, on_phase)

    entries: list[QueryEntry] = []
    if with_entries:
        for entry in query_entries.iter_entries(answerer, ranked, shown):
            entries.append(entry)
            on_phase("explaining queries", len(entries), len(shown.rows))
    rules = rule_uses.rule_uses(run, shown.atoms, shown.proofs)
    return RunReport(_measure_run(run, folder, files, ranked, rules), entries)


def _measure_run(
    run: Run,
    folder: Path,
    files: _Files,
    ranked: RankedSplit,
    rules: tuple[RuleUse, ...],
) -> RunMeasurements:
    """The numbers of a run."""
    task, dataset = run.task, run.task.dataset
    notes = [*task.notes, *run.notes, *files.results.get("notes", [])]
    notes += policy_score.graph_fallback_notes(run.search_step)
    notes += [*files.notes, *_iter_log_notes(files.log)]

    return RunMeasurements(
        name=str(folder),
        config=run.run_config,
        score=run.score,
        dataset={
            "name": dataset.name,
            "entities": dataset.n_constants,
            "relations": dataset.n_predicates,
            "train": len(dataset.train),
            "valid": len(dataset.valid),
            "test": len(dataset.test),
            "rules": len(dataset.rules),
            "height": task.max_height,
        },
        data_fingerprint=fingerprint(dataset),
        results=files.results,
        notes=tuple(dict.fromkeys(notes)),
        search_replay=policy_score.search_replay(run.search_step),
        update=int(run.state.train_state.update),
        n_updates=run.cfg.ppo.n_updates,
        is_trained=training.is_finished(run),
        best_update=int(run.state.best_update),
        metric_name=selection_metric(task),
        default_score_note=(
            describe_default_score(run)
            if run.default_score != run.score
            else ""
        ),
        log=tuple(files.log),
        predicates=tuple(dataset.predicates),
        n_test=len(dataset.test),
        n_ranked=len(ranked.queries),
        relation=ranked.queries[:, 0].numpy()[ranked.query_row],
        provable=ranked.provable,
        ranked=ranked.ranked,
        bins=ranked.bins,
        rules=rules,
        learnt=learnt_weights.learnt_weights(run),
    )


def _read_files(folder: Path) -> _Files:
    """Read the metrics log and the results.

    Raises:
      ValueError: a file is damaged.
    """
    log: list[Json] = []
    results: Json = {}
    notes: list[str] = []
    path = folder / METRICS_FILE
    if path.is_file():
        log = logs.read(path)
    else:
        notes.append(f"{METRICS_FILE} is missing: there are no learning curves")
    path = folder / RESULTS_FILE
    if path.is_file():
        results = files.parse_object(path, path.read_bytes())
    else:
        notes.append(
            f"{RESULTS_FILE} is missing: times and versions of the training are not known"
        )
    return _Files(log, results, notes)


def _iter_log_notes(log: list[Json]) -> Iterator[str]:
    """Yield lines on what the metrics log says of missing lines, skipped minibatches and fallbacks."""
    updates = [row["update"] for row in log if row["update"] > 0]
    n_missing = max(updates, default=0) - len(set(updates))
    if n_missing > 0:
        yield f"{METRICS_FILE}: {n_missing:,} updates have no line"
    n_skipped = np.nansum(
        [row.get("n_nonfinite_minibatches") or 0 for row in log]
    )
    if n_skipped:
        yield f"{n_skipped:,.0f} minibatches were skipped: loss or gradient not finite"
    reasons = {row.get("fallback_reason") or "" for row in log} - {""}
    for reason in sorted(reasons):
        yield f"no CUDA graph in training: {reason}"
