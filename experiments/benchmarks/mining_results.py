"""Mined rules alone: how well they rank valid and test, and how much CPU time mining takes.

    python experiments/benchmarks/mining_results.py

Rules are mined from the known facts, written, read back, and ranked with as `funcppo evaluate` would: filtered, both
sides, expected ties (Countries: tails among the five regions). Each set is ranked twice: `plain`, by its counts as they
are, and `chosen`, by the settings of `SETS`, which the valid split chose. The record is written after each set; sets
that it holds are kept unless --again names them. What training adds is measured by `main_results.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments import tables
from experiments.benchmarks.side_by_side import write_record
from experiments.paths import DATA, RESULTS
from experiments.provenance import current_commit, describe_machine
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.loaders import load
from funcppo.kg.logic import derivability
from funcppo.kg.mining.config import MiningConfig
from funcppo.kg.mining.mined_rules import SMOOTHING_COUNT
from funcppo.kg.ranking import ranking
from funcppo.kg.ranking.ranking import RankingProtocol
from funcppo.kg.ranking.scorers import make_untrained_scorer
from funcppo.kg.run import rule_files
from funcppo.kg.run.choices import choose_settings
from funcppo.kg.search import task as prover_task
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.kg.search.task import ProverTask

SMOOTHED = ProverTaskConfig(
    smoothing=SMOOTHING_COUNT
)  # the valid split chooses the height
OBJECT_IDENTITY = ProverTaskConfig(
    smoothing=SMOOTHING_COUNT, object_identity=True, max_height=1
)
SCORES = (
    "max-confidence",
    "noisy-or",
    "noisy-or@3",
    "noisy-or-top-5",
)


class MiningSet(NamedTuple):
    """How the rules of a data set are mined, and how they are applied."""

    mining: MiningConfig
    task: ProverTaskConfig


SETS = {
    "countries_S1": MiningSet(MiningConfig(), SMOOTHED),
    "countries_S2": MiningSet(MiningConfig(), SMOOTHED),
    "countries_S3": MiningSet(MiningConfig(), SMOOTHED),
    "family": MiningSet(MiningConfig(), OBJECT_IDENTITY),
    "kinships": MiningSet(MiningConfig(general_rules=True), OBJECT_IDENTITY),
    "nations": MiningSet(
        MiningConfig(max_length=2, min_support=3, votes_per_fact=3),
        OBJECT_IDENTITY,
    ),
    "umls": MiningSet(
        MiningConfig(
            constants=True, max_length=2, min_support=3, votes_per_fact=3
        ),
        OBJECT_IDENTITY,
    ),
    "wn18rr": MiningSet(
        MiningConfig(
            constants=True,
            max_length=5,
            min_support=2,
            min_confidence=0.001,
            votes_per_fact=5,
        ),
        OBJECT_IDENTITY,
    ),
    "fb15k-237": MiningSet(
        MiningConfig(constants=True, seconds=300.0),
        replace(OBJECT_IDENTITY, object_identity=False),
    ),
}


def main() -> None:
    """Measure what the record does not hold yet, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=DATA,
        help="folder of the standard data sets",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS / "mining_results.json",
        help="record to complete",
    )
    parser.add_argument("--only", choices=SETS, action="append")
    parser.add_argument(
        "--again",
        choices=SETS,
        action="append",
        default=[],
        help="measure again",
    )
    parser.add_argument(
        "--settings",
        choices=("plain", "chosen"),
        nargs="+",
        default=("plain", "chosen"),
    )
    args = parser.parse_args()
    record = (
        json.loads(args.out.read_text()) if args.out.exists() else {"sets": {}}
    )
    for name in args.only or SETS:
        if name in args.again or name not in record["sets"]:
            record["sets"][name] = measure(
                args.data / name, SETS[name], args.settings
            ) | {"commit": current_commit()}
            record["machine"] = describe_machine()
            write_record(args.out, record)
    print(tables.mining_table(record))


def measure(
    folder: Path, settings: MiningSet, settings_names: tuple[str, ...]
) -> dict[str, Any]:
    """Mining and the untrained scores of one set."""
    dataset = load(folder)
    with tempfile.TemporaryDirectory() as scratch:
        rule_file = Path(scratch) / "rules.tsv"
        start, clock_start = time.process_time(), time.perf_counter()
        rules, counts, result = rule_files.mine_dataset(
            dataset, settings.mining
        )
        rule_files.write_rule_file(rule_file, rules, counts, "tsv")
        seconds = time.process_time() - start
        clock_seconds = time.perf_counter() - clock_start

        tasks = {
            "plain": replace(
                settings.task, smoothing=None, object_identity=False
            ),
            "chosen": settings.task,
        }
        rankings = {
            name: rank(load(folder, rule_file), tasks[name])
            for name in settings_names
        }
    return {
        "settings": {
            field: getattr(settings.mining, field)
            for field in settings.mining.__slots__
        },
        "rules": len(rules.rules),
        "candidates": result.n_candidates,
        "estimated": int((result.rules.std_error > 0).sum()),
        "mining_cpu_seconds": round(seconds, 1),
        "mining_clock_seconds": round(clock_seconds, 1),
        "notes": list(result.notes),
        "rankings": rankings,
    }


def build_rankable_task(
    dataset: Dataset, settings: ProverTaskConfig
) -> ProverTask:
    """The task, with what the rules derive, or where that is too much at height 1 to be derived by query."""
    try:
        return prover_task.build_task(dataset, settings)
    except ValueError:
        if settings.max_height != 1:
            raise
        return prover_task.build_task(dataset, settings, with_derivations=False)


def rank(
    dataset: Dataset,
    settings: ProverTaskConfig,
    *,
    scores: Sequence[str] = SCORES,
    splits: Sequence[str] = ("valid", "test"),
    n_negatives: int | None = None,
    n_queries: int | None = None,
) -> dict[str, Any]:
    """Each score's summary on each split.

    Args:
      n_negatives: corruptions that an answer is ranked against; None for all entities.
      n_queries: queries of a split, sampled evenly over relations; None for all.
    """
    start = time.perf_counter()
    choice = choose_settings(dataset, settings, SCORES[0])
    task = build_rankable_task(dataset, choice.settings)
    if task.derivability_index is None and task.answers_plan is None:
        # what derives each candidate is computed once for all scores
        index = derivability.build_derivability_index_for_atoms(
            task.kb, task.sizes, task.least_model, task.least_model.atoms
        )
        task = replace(task, derivability_index=index)
    row: dict[str, Any] = {
        "smoothing": settings.smoothing,
        "object_identity": settings.object_identity,
        "height": task.max_height,
        "notes": list(task.notes),
    }

    protocol = RankingProtocol(
        sides=ranking.ranked_sides(task), n_negatives=n_negatives
    )
    scorers = {name: make_untrained_scorer(task, name) for name in scores}
    for split in splits:
        queries = getattr(dataset, split)
        query_id = ranking.stratified_sample(
            queries, len(queries) if n_queries is None else n_queries
        )
        row[split] = {}
        for name, scorer in scorers.items():
            ranked = ranking.rank_split(
                task, queries[query_id], scorer, protocol, query_id
            )
            summary = ranking.summarise_ranking(
                ranked, list(dataset.predicates), with_auc=task.is_countries
            )
            del summary["by_group"]
            row[split][name] = summary
    return row | {"seconds": round(time.perf_counter() - start, 1)}


if __name__ == "__main__":
    main()
