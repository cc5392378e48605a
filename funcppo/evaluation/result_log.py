"""Results of single queries as JSON Lines: written as they come, gone on with after an interruption, summed up.

A line a query and side; the settings are in a file beside it. `better`, `equal` and `candidates` are integers that
every rank follows from, so a summary needs nothing else:

    rank = better + 1 .. better + equal + 1,    E[1 / rank] = mean of 1 / r over these r
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from funcppo.atomic_io import write_atomically
from funcppo.evaluation import rank_metrics
from funcppo.evaluation import ranking as ranking_

Record = dict[str, Any]
SIDE_NAMES = {1: "head", 2: "tail"}  # by the argument that is asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultLog:
    """A file of records that is open for more."""

    path: Path
    file: IO[bytes]
    complete_records: list[Record]  # those that it held, of queries with all their sides


def open_log(path: Path, settings: dict[str, Any], n_sides: int, *, resume: bool) -> ResultLog:
    """The journal at a path: gone on with, or new in place of what is there.

    Errors: ValueError, one line, when the file to go on with holds something else; when it cannot be written.
    """
    try:
        done = _whole(path, settings, n_sides) if resume and path.is_file() and path.stat().st_size else []
        if path.is_file() or not path.exists():  # a device is written to as it is
            write_atomically(path, lambda file: _write(file, done))
            text = json.dumps(settings, indent=2) + "\n"
            write_atomically(_settings_of(path), lambda file: file.write(text.encode()))
        return ResultLog(path=path, file=open(path, "ab"), complete_records=done)
    except OSError as error:
        raise ValueError(f"{path}: want a file that can be written: {error.strerror}") from None


def check_writable(path: Path, *, resume: bool, overwrite: bool) -> None:
    """Nothing, when a journal may be begun there; asked before hours of work.

    Errors: ValueError, one line.
    """
    if path.is_file() and path.stat().st_size and not (resume or overwrite):
        raise ValueError(f"{path}: exists: want --resume, --overwrite or another file")
    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        raise ValueError(f"{path}: want a file that can be written: {error.strerror}") from None


def append(log: ResultLog, records: Sequence[Record]) -> None:
    """Write some records, all sides of a query together, and wait until they are on the disk.

    Errors: ValueError when they cannot be written; what was written before stays, and can be gone on with.
    """
    try:
        _write(log.file, records)
    except OSError as error:
        raise ValueError(f"{log.path}: {error.strerror}: what it holds stays, and --resume goes on from it") from None


def read(path: Path) -> list[Record]:
    """The records of a file; a last line without its end is left out.

    Errors: ValueError naming the line that is no record.
    """
    lines = path.read_bytes().split(b"\n")[:-1]
    return [_row(path, at, line) for at, line in enumerate(lines, 1)]


def summarise_records(records: Sequence[Record], predicates: Sequence[str], *, with_auc: bool) -> dict[str, Any]:
    """The numbers of `protocol.summarise`, from records alone, in whatever order."""
    column = lambda values: torch.tensor(list(values), dtype=torch.int64)
    number = {name: i for i, name in enumerate(predicates, 1)}
    sides = {name: side for side, name in SIDE_NAMES.items()}
    counts = rank_metrics.RankCounts(
        n_better=column(r["better"] for r in records),
        n_equal=column(r["equal"] for r in records),
        n_candidates=column(r["candidates"] for r in records),
    )
    result = ranking_.summarise_counts(
        counts,
        column(sides[r["side"]] for r in records),
        column(number[r["relation"]] for r in records),
        torch.tensor([r["provable"] for r in records]),
        list(predicates),
    )
    result |= {"n_scored": sum(r["scored"] for r in records), "lost": sum(r["status"] == "lost" for r in records)}
    result |= {"near_grid": sum(r["near_grid"] for r in records)}
    return result | ({"auc_pr": _auc_pr(records, counts)} if with_auc else {})


def _auc_pr(records: Sequence[Record], counts: rank_metrics.RankCounts) -> float:
    """The area under the precision-recall curve, from the scores that the records hold of each candidate."""
    lines = [line for r in records for line in (r["line"], *r["others"])]
    answers = [flag for r in records for flag in (True, *[False] * len(r["others"]))]
    listed = torch.tensor([rank_metrics.ZERO_SCORE if line is None else line for line in lines], dtype=torch.int64)
    n_candidates = int(counts.n_candidates.sum())
    return ranking_.pooled_average_precision(listed, torch.tensor(answers), n_candidates, len(records))


def _whole(path: Path, settings: dict[str, Any], n_sides: int) -> list[Record]:
    """The records of those queries that have one for each side, if they were made with these settings."""
    beside = _settings_of(path)
    try:
        held = json.loads(beside.read_text())
    except (OSError, ValueError):
        raise ValueError(f"{beside}: want the settings that {path.name} was made with") from None
    odd = [name for name in {**settings, **held} if settings.get(name) != held.get(name)]
    if odd:
        want, got = settings.get(odd[0]), held.get(odd[0])
        raise ValueError(f"{path}: made with {odd[0]} {got}, want {want}: --resume goes on with the same evaluation")
    found = read(path)
    sides: dict[int, int] = {}
    for record in found:
        sides[record["query"]] = sides.get(record["query"], 0) + 1
    return [record for record in found if sides[record["query"]] == n_sides]


def _settings_of(path: Path) -> Path:
    return path.with_name(path.name + ".settings.json")


def _write(file: IO[bytes], rows: Iterable[Record]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    file.write(text.encode())
    file.flush()
    os.fsync(file.fileno())


def _row(path: Path, at: int, line: bytes) -> Record:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}:{at}: want a line of JSON: {error}") from None
    if not isinstance(row, dict) or not {"query", "side", "better", "equal", "candidates"} <= row.keys():
        raise ValueError(f"{path}:{at}: want a record with query, side, better, equal, candidates")
    return row
