"""Results of single queries as JSON Lines: written as they come, resumed after an interruption, summarised.

A file holds one record, a line of JSON, for each query and side; the settings of the evaluation are in a file beside
it. `open_log` starts or resumes a file, `append` adds records, `summarise_records` computes all metrics from them.
Every rank follows from the integers `n_better`, `n_equal` and `n_candidates`:

    rank = n_better + 1 .. n_better + n_equal + 1,    E[1 / rank] = mean of 1 / r over these r

Files have a format number, in the settings. A file of another format is not resumed: up to format 2, scores were
compared by their logarithms, which ties more of them.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from funcppo import json_io
from funcppo.atomic_io import write_atomically
from funcppo.evaluation import ranking
from funcppo.evaluation.rank_metrics import ZERO_SCORE, Metrics, RankCounts
from funcppo.json_io import Json
from funcppo.logic.triple_index import SIDE_NAMES
from funcppo.ranges import INT32_MAX

Record = Json  # a line, as `evaluator` makes it
Settings = Json  # what tells an evaluation from others

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


SYNC_SECONDS = 1.0  # between two waits for the disk


@dataclass(kw_only=True, slots=True)
class ResultLog:
    """A file of records that is open for more."""

    path: Path
    file: IO[bytes]
    # records that it held when opened, of queries with a record for every side
    complete_records: list[Record]
    # when the disk held all of the file, on the monotonic clock
    sync_time: float = 0.0


def open_log(
    path: Path, settings: Settings, n_sides: int, *, resume: bool
) -> ResultLog:
    """Open a file for records: resume the file at a path, or replace it.

    Args:
      settings: what tells this evaluation from others, JSON values; a file with other settings is not resumed.
      n_sides: records of a query.

    Raises:
      ValueError: the file to resume holds something else, or it cannot be written. The message is one line.
    """
    try:
        records: list[Record] = []
        if resume and path.is_file() and path.stat().st_size:
            records = _read_complete(path, settings, n_sides)

        # A device or a pipe is written to as it is.
        if path.is_file() or not path.exists():
            write_atomically(path, lambda file: file.write(_to_lines(records)))
            text = json.dumps({"format": FORMAT, **settings}, indent=2) + "\n"
            write_atomically(
                settings_path(path),
                lambda file: file.write(text.encode()),
            )
        return ResultLog(
            path=path, file=open(path, "ab"), complete_records=records
        )
    except OSError as error:
        raise ValueError(
            f"{path}: expected a file that can be written, got: {error.strerror}"
        ) from None


def check_writable(path: Path, *, resume: bool, overwrite: bool) -> None:
    """Check that a file of records may be written at a path, before hours of work, and leave none there.

    Raises:
      ValueError: it may not. The message is one line.
    """
    if path.is_file() and path.stat().st_size and not (resume or overwrite):
        raise ValueError(
            f"{path}: expected --resume, --overwrite or a new file, got a file that exists"
        )
    folder = path.resolve().parent
    try:
        with (
            open(path, "ab")
            if path.exists()
            else tempfile.TemporaryFile(dir=folder)
        ):
            pass
    except OSError as error:
        raise ValueError(
            f"{path}: expected a file that can be written, got: {error.strerror}"
        ) from None


def append(log: ResultLog, records: Sequence[Record]) -> None:
    """Write records, which stay if the process is killed; a second later they stay if the power fails.

    Args:
      records: all sides of a query together.

    Raises:
      ValueError: they cannot be written. Earlier records stay and can be resumed from.
    """
    try:
        log.file.write(_to_lines(records))
        log.file.flush()
        if time.monotonic() - log.sync_time >= SYNC_SECONDS:
            _sync(log)
    except OSError as error:
        raise ValueError(
            f"{log.path}: {error.strerror}: the records written so far stay, and --resume continues after them"
        ) from None


def close(log: ResultLog) -> None:
    """Close the file when its records are on the disk."""
    _sync(log)
    log.file.close()


def _sync(log: ResultLog) -> None:
    """Wait until the file is on the disk; a device or a pipe has nothing to wait for."""
    if log.path.is_file():
        os.fsync(log.file.fileno())
    log.sync_time = time.monotonic()


def read(path: Path) -> list[Record]:
    """Read the records of a file; an unfinished last line is left out.

    Raises:
      ValueError: a line, which the message names, is no record.
    """
    lines = path.read_bytes().split(b"\n")[:-1]
    return [
        _parse_record(path, number, line)
        for number, line in enumerate(lines, 1)
    ]


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


def _read_complete(
    path: Path, settings: Settings, n_sides: int
) -> list[Record]:
    """Read the records of queries that have one for each side.

    Raises:
      ValueError: the file was made with other settings.
    """
    file_settings = read_settings(path)
    for name in (*settings, *file_settings):
        expected, actual = settings.get(name), file_settings.get(name)
        if expected != actual:
            raise ValueError(
                f"{path}: expected a file made with {name} {expected}, got {actual}: "
                "--resume continues the same evaluation only"
            )

    records = read(path)
    n_records = Counter(record["query_row"] for record in records)
    return [
        record
        for record in records
        if n_records[record["query_row"]] == n_sides
    ]


def settings_path(path: Path) -> Path:
    """Return the file beside a file of records that holds its settings."""
    return path.with_name(path.name + ".settings.json")


def read_settings(path: Path) -> Settings:
    """Read the settings that a file of records was made with, without the format.

    Raises:
      ValueError: there are none, or they are of another format.
    """
    beside = settings_path(path)
    if not beside.is_file():
        raise ValueError(
            f"{beside}: expected the settings that {path.name} was made with, got no file"
        )
    settings = json_io.parse_object(beside, beside.read_bytes())
    file_format = settings.pop("format", 1)
    if file_format != FORMAT:
        raise ValueError(
            f"{beside}: expected format {FORMAT}, got {file_format}: --overwrite starts again"
        )
    return settings


def _to_lines(records: Iterable[Record]) -> bytes:
    """Records as lines of JSON."""
    text = "".join(
        json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        for record in records
    )
    return json_io.escape_unprintable(text).encode()


def _parse_record(path: Path, line_number: int, line: bytes) -> Record:
    """Parse a line.

    Raises:
      ValueError: it is no record.
    """
    place = f"{path}:{line_number}"
    record = json_io.parse_object(place, line)
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
