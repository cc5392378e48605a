"""Results of single queries as JSON Lines: resumed after an interruption, summarised.

A file of `record_log` holds one record for each query and side. `open_log` starts or resumes a file,
`record_log.append` adds records, `summarise_records` computes all metrics from them.
Every rank follows from the integers `n_better`, `n_equal` and `n_candidates`:

    rank = n_better + 1 .. n_better + n_equal + 1,    E[1 / rank] = mean of 1 / r over these r

Files have a format number, in the settings. A file of another format is not resumed: up to format 2, scores were
compared by their logarithms, which ties more of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from funcppo.core import files, record_log
from funcppo.core.record_log import Record, RecordLog, Settings
from funcppo.core.settings import INT32_MAX
from funcppo.kg.logic.triple_index import SIDE_NAMES
from funcppo.kg.ranking import ranking
from funcppo.kg.ranking.rank_metrics import ZERO_SCORE, Metrics, RankCounts

# version of the records and of the settings beside them; 1 had no version
FORMAT = 3
COUNT_KEYS = ("query_row", "n_better", "n_equal", "n_candidates", "n_scored")
REQUIRED_KEYS = (
    *COUNT_KEYS,
    "side",
    "relation",
    "answer_provable",
    "status",
    "near_boundary",
)


def open_log(
    path: Path, settings: Settings, n_sides: int, *, resume: bool
) -> RecordLog:
    """Open a file for records: resume the file at a path, or replace it.

    Args:
      settings: what tells this evaluation from others, JSON values; a file with other settings is not resumed.
      n_sides: records of a query; a query that has fewer is ranked again.

    Raises:
      ValueError: the file to resume holds something else, or it cannot be written. The message is one line.
    """
    return record_log.open_log(
        path,
        record_log.settings_path(path),
        {record_log.FORMAT: FORMAT, **settings},
        resume=resume,
        parse=_parse_record,
        select=partial(_select_complete, n_sides=n_sides),
    )


def read(path: Path) -> list[Record]:
    """Read the records of a file; an unfinished last line is left out.

    Raises:
      ValueError: a line, which the message names, is no record.
    """
    return record_log.read(path, _parse_record)


def read_settings(path: Path) -> Settings:
    """Read the settings that a file of records was made with, without the format.

    Raises:
      ValueError: there are none, or they are of another format.
    """
    beside = record_log.settings_path(path)
    return record_log.read_settings(beside, path, FORMAT)


def summarise_records(
    records: Sequence[Record], predicates: Sequence[str], *, with_auc: bool
) -> Metrics:
    """Summarise records, in any order: the metrics of `ranking.summarise_ranking`, and some counts.

    Args:
      predicates: names of predicates 1, 2, ... in order.
      with_auc: also compute the area under the precision-recall curve, from records that hold the scores of all
        candidates.

    Returns:
      The metrics with `n_scored` counted once a query, `n_missed` (provable answers that the search did not find) and
      `n_near_boundary` (records that another machine could rank otherwise).
    """
    predicate_id = {name: i for i, name in enumerate(predicates, 1)}
    side_id = {name: side for side, name in SIDE_NAMES.items()}
    counts = RankCounts(
        n_better=_integers(record["n_better"] for record in records),
        n_equal=_integers(record["n_equal"] for record in records),
        n_candidates=_integers(record["n_candidates"] for record in records),
    )
    metrics = ranking.summarise_counts(
        counts,
        _integers(side_id[record["side"]] for record in records),
        _integers(predicate_id[record["relation"]] for record in records),
        torch.tensor([record["answer_provable"] for record in records]),
        list(predicates),
    )

    # Counts that the rank counts do not hold.
    metrics["n_scored"] = sum(record["n_scored"] for record in records)
    metrics["n_missed"] = sum(
        record["status"] == "missed" for record in records
    )
    metrics["n_near_boundary"] = sum(
        record["near_boundary"] for record in records
    )
    if with_auc:
        metrics["auc_pr"] = _auc_pr(records, counts)
    return metrics


def _integers(values: Iterable[int]) -> Tensor:
    """A column of integers."""
    return torch.tensor(list(values), dtype=torch.int64)


def _auc_pr(records: Sequence[Record], counts: RankCounts) -> float:
    """The area under the precision-recall curve, from the scores of all candidates in the records."""
    scores: list[int] = []
    is_answer: list[bool] = []
    for record in records:
        others = record["other_quantised_scores"]
        for score in (record["quantised_score"], *others):
            scores.append(ZERO_SCORE if score is None else score)
        is_answer += [True] + [False] * len(others)

    n_candidates = int(counts.n_candidates.sum())
    return ranking.pooled_average_precision(
        _integers(scores),
        torch.tensor(is_answer),
        n_candidates,
        len(records),
    )


def _select_complete(records: list[Record], n_sides: int) -> list[Record]:
    """The records of queries that have one for each side."""
    n_records = Counter(record["query_row"] for record in records)
    return [
        record
        for record in records
        if n_records[record["query_row"]] == n_sides
    ]


def _parse_record(place: str, line: bytes) -> Record:
    """Parse a line.

    Raises:
      ValueError: it is no record.
    """
    record = files.parse_object(place, line)
    for name in REQUIRED_KEYS:
        if name not in record:
            raise ValueError(f"{place}: expected a record with {name}")
    for name in COUNT_KEYS:
        value = record[name]
        if not isinstance(value, int) or not 0 <= value <= INT32_MAX:
            raise ValueError(
                f"{place}: {name}: expected a count, got {value!r}"
            )
    sides = tuple(SIDE_NAMES.values())
    if record["side"] not in sides:
        raise ValueError(
            f"{place}: side: expected one of {', '.join(sides)}, got {record['side']!r}"
        )
    return record
