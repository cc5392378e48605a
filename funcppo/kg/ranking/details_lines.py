"""Lines of `funcppo evaluate --details` compared with a recount.

`read_details` reads a file; `line_errors` says where a line differs from the recount of its query and side. A value
that somebody changed, whatever it is now, is a difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from funcppo.core import record_log
from funcppo.core.files import Json
from funcppo.kg.logic.triple_index import SIDE_NAMES
from funcppo.kg.ranking import recount, result_log
from funcppo.kg.ranking.ranking import random_rows
from funcppo.kg.ranking.recount import (
    Atom,
    OtherFactShares,
    RankCounts,
)

# on the grid of scores, in place of infinite log-odds
CERTAIN_SCORE = 2**53 - 1
# log scores have four decimals
LOG_SCORE_TOLERANCE = 0.51e-4
# of ranks and their means, and of shares, which are quotients of sums
TOLERANCE = 1e-9

# what tells one evaluation from another, beside the split and the score
COMPARED_SETTINGS = (
    "fingerprint",
    "params_digest",
    "height",
    "smoothing",
    "object_identity",
)

LineKey: TypeAlias = tuple[int, int]  # a query and a side


class Line(NamedTuple):
    """A line of a details file."""

    number: int  # from 1
    query_row: int
    side: int
    record: Json


class Details(NamedTuple):
    """A details file, and what it was made with."""

    path: Path
    split: Literal["test", "valid"]
    score: str
    height: int
    smoothing: float | None
    object_identity: bool
    settings: Json  # these, and others
    lines: Sequence[Line]


class LineSample(NamedTuple):
    """Lines of a details file."""

    # by the position of the query among those that are ranked, and the side
    lines: Mapping[LineKey, Line]
    n_total: int  # lines of the file


class RecountedOtherFacts(NamedTuple):
    """What the recount says of the other facts of an answer."""

    n_facts: int
    shares: OtherFactShares
    log_odds: float  # that are added to the score


@dataclass(frozen=True, kw_only=True, slots=True)
class RecountedRow:
    """What the recount says of a query and side."""

    query: Atom
    text: str  # the query
    log_odds: Mapping[Atom, float]  # of all candidates
    listed: AbstractSet[Atom]  # the candidates that are scored
    is_provable: bool  # the answer is derived, a fact from other facts
    tolerance: float  # of log-odds
    # by a score that reads the other facts of the answer
    other_facts: RecountedOtherFacts | None


# -- reading


def read_details(path: Path) -> Details:
    """Read a details file and the settings beside it; an unfinished last line is left out.

    Raises:
      ValueError: a setting is missing or bad, there is no line, or a line, which the message names, is no record or a
        second one of its query and side.
    """
    settings = result_log.read_settings(path)
    smoothing = settings.get("smoothing")
    for name, is_valid, expected in (
        ("split", settings.get("split") in ("test", "valid"), "test or valid"),
        ("score", isinstance(settings.get("score"), str), "a name"),
        ("height", _is_whole(settings.get("height"), 1), "1 or more"),
        (
            "smoothing",
            smoothing is None or _is_between(smoothing, 0.0, math.inf),
            "null, or 0 or more",
        ),
        (
            "object_identity",
            isinstance(settings.get("object_identity"), bool),
            "true or false",
        ),
        (
            "negatives",
            settings.get("negatives") is None,
            "null, all entities as candidates",
        ),
    ):
        if not is_valid:
            raise ValueError(
                f"{record_log.settings_path(path)}: {name}: expected {expected}, got {settings.get(name)!r}"
            )
    return Details(
        path=path,
        split=settings["split"],
        score=settings["score"],
        height=settings["height"],
        smoothing=smoothing,
        object_identity=settings["object_identity"],
        settings=settings,
        lines=_read_lines(path),
    )


def _read_lines(path: Path) -> list[Line]:
    """The lines of a file."""
    sides = {name: side for side, name in SIDE_NAMES.items()}
    lines: dict[LineKey, Line] = {}
    for number, record in enumerate(result_log.read(path), 1):
        query_row, side = record["query_row"], sides[record["side"]]
        if (query_row, side) in lines:
            raise ValueError(
                f"{path}:{number}: expected one line for each query and side, got a second one of query_row "
                f"{query_row}, {SIDE_NAMES[side]}"
            )
        line = Line(number, query_row, side, record)
        lines |= {(query_row, side): line}
    if not lines:
        raise ValueError(
            f"{path}: expected a line for each query and side, got none"
        )
    return list(lines.values())


def check_settings(details: Details, settings: Json, target: str) -> None:
    """Check that a details file was made with the data, rules, parameters and settings of another evaluation.

    Args:
      settings: of that one.
      target: what it evaluates, for the error.

    Raises:
      ValueError: it was not.
    """
    for name in COMPARED_SETTINGS:
        stated = details.settings.get(name)
        if stated != settings[name]:
            raise ValueError(
                f"{record_log.settings_path(details.path)}: {name}: expected {settings[name]}, that of {target}, "
                f"got {stated}"
            )


def check_queries(
    details: Details, n_queries: int, sides: Sequence[int]
) -> None:
    """Check that the lines are about queries of a split, and sides that are ranked.

    Raises:
      ValueError: one, which the message names, is not.
    """
    for line in details.lines:
        place = f"{details.path}:{line.number}"
        if line.query_row >= n_queries:
            raise ValueError(
                f"{place}: query_row: expected less than {n_queries}, the queries of {details.split}, "
                f"got {line.query_row}"
            )
        if line.side not in sides:
            raise ValueError(
                f"{place}: side: expected one that is ranked, got {SIDE_NAMES[line.side]}"
            )


def sample_lines(details: Details, rows: Sequence[int]) -> LineSample:
    """The lines about some queries of the split."""
    position = {row: i for i, row in enumerate(rows)}
    lines = {
        (position[line.query_row], line.side): line
        for line in details.lines
        if line.query_row in position
    }
    return LineSample(lines, len(details.lines))


def missing_lines(
    details: Details, n_queries: int, sides: Sequence[int]
) -> list[str]:
    """A text for each query and side that the evaluation ranked and the file has no line about.

    Args:
      n_queries: of the split, of which the evaluation may have ranked a sample.
      sides: that are ranked.
    """
    limit = details.settings.get("queries")
    rows = range(n_queries)
    if isinstance(limit, int):
        rows = sorted(random_rows(n_queries, limit).tolist())
    present = {(line.query_row, line.side) for line in details.lines}
    return [
        f"query_row {row}, {SIDE_NAMES[side]}: no line"
        for row in rows
        for side in sides
        if (row, side) not in present
    ]


# -- comparing


def explains_counts(
    counts: RankCounts,
    answer: Atom,
    log_odds: Mapping[Atom, float],
    tolerance: float,
) -> bool:
    """Whether counts are those of some log-odds within a tolerance."""
    bounds = recount.bound_ranks(answer, log_odds, tolerance)
    return (
        counts.n_candidates == len(log_odds)
        and counts.n_better in bounds.n_better
        and counts.n_better + counts.n_equal in bounds.n_not_worse
    )


def line_errors(line: Line, row: RecountedRow) -> list[str]:
    """Where a line differs from the recount, a text for each field."""
    record = line.record
    counts = RankCounts(
        record["n_better"], record["n_equal"], record["n_candidates"]
    )
    is_scored = row.log_odds[row.query] > -math.inf

    expected: Json = {
        "atom": row.text,
        "n_candidates": len(row.log_odds),
        "n_scored": len(row.listed - {row.query}) + is_scored,
        "answer_provable": row.is_provable,
    }
    errors = [
        _difference(name, record.get(name), value)
        for name, value in expected.items()
        if record.get(name) != value
    ]
    if (record["status"] == "refuted") == row.is_provable:
        verdict = "derivable" if row.is_provable else "not derivable"
        errors.append(_difference("status", record["status"], verdict))

    errors += _rank_errors(record, counts)
    again = recount.count_ranks(row.query, row.log_odds)
    is_explained = explains_counts(
        counts, row.query, row.log_odds, row.tolerance
    )
    if counts != again and not is_explained:
        errors.append(
            f"n_better {counts.n_better} and n_equal {counts.n_equal}, recounted {again.n_better} and {again.n_equal}"
        )
    errors += _score_errors(record, row)
    errors += _log_score_errors(record)
    return errors + list(_other_fact_errors(record, row))


def _difference(name: str, value: object, again: object) -> str:
    """A field with both values."""
    return f"{name} {value}, recounted {again}"


def _is_between(value: object, low: float, high: float) -> bool:
    """Whether a value is a number within bounds."""
    return isinstance(value, int | float) and low <= value <= high


def _is_whole(value: object, low: int) -> bool:
    """Whether a value is an integer from a bound on."""
    return type(value) is int and value >= low


def _is_near(value: object, number: float, tolerance: float) -> bool:
    """Whether a value is a number about as large as another."""
    return _is_between(value, number - tolerance, number + tolerance)


def _rank_errors(record: Json, counts: RankCounts) -> list[str]:
    """Which ranks do not follow from the counts of the line."""
    first, n_equal = counts.n_better + 1, counts.n_equal
    expected = {
        "optimistic": first,
        "pessimistic": first + n_equal,
        "realistic": first + n_equal / 2,
        "reciprocal_rank": recount.expected_reciprocal_rank(counts),
    }
    ranks = record.get("rank")
    stated = ranks if isinstance(ranks, dict) else {}
    stated = {**stated, "reciprocal_rank": record.get("reciprocal_rank")}
    return [
        f"{name} {stated.get(name)}, expected {value:g} by the counts of the line"
        for name, value in expected.items()
        if not _is_near(stated.get(name), value, TOLERANCE * value)
    ]


def _score_errors(record: Json, row: RecountedRow) -> list[str]:
    """Which scores on the grid are not those of the log-odds."""
    errors: list[str] = []
    own, score = row.log_odds[row.query], record.get("quantised_score")
    if not _is_on_grid(score, own, row.tolerance):
        errors.append(_difference("quantised_score", score, _grid_score(own)))
    if "other_quantised_scores" not in record:
        return errors

    others = record["other_quantised_scores"]
    again = sorted(
        (row.log_odds[atom] for atom in row.listed - {row.query}), reverse=True
    )
    if not isinstance(others, list) or len(others) != len(again):
        n_others = len(others) if isinstance(others, list) else "no list"
        return [
            *errors,
            _difference("other_quantised_scores", n_others, len(again)),
        ]
    for place, (other, log_odds) in enumerate(zip(others, again)):
        if not _is_on_grid(other, log_odds, row.tolerance):
            name = f"other_quantised_scores[{place}]"
            errors.append(_difference(name, other, _grid_score(log_odds)))
            break
    return errors


def _grid_score(log_odds: float) -> int | None:
    """A score as a line has it."""
    if log_odds == math.inf:
        return CERTAIN_SCORE
    return None if log_odds == -math.inf else int(recount.grid_line(log_odds))


def _is_on_grid(score: object, log_odds: float, tolerance: float) -> bool:
    """Whether a score of a line is that of some log-odds within a tolerance."""
    if not math.isfinite(log_odds):
        return score == _grid_score(log_odds)
    low = recount.grid_line(log_odds - tolerance)
    high = recount.grid_line(log_odds + tolerance)
    return _is_between(score, low, high)


def _log_score_errors(record: Json) -> list[str]:
    """Whether the logarithm of the score is not that of the score on the grid."""
    score, log_score = record.get("quantised_score"), record.get("log_score")
    if not isinstance(score, int | float):
        return (
            [] if log_score is None else [f"log_score {log_score} of score 0"]
        )
    log_odds = score * recount.GRID_STEP
    again = min(log_odds, 0.0) - math.log1p(math.exp(-abs(log_odds)))
    if _is_near(log_score, again, LOG_SCORE_TOLERANCE):
        return []
    return [
        f"log_score {log_score}, expected {again:.4f} by quantised_score {score}"
    ]


def _other_fact_errors(record: Json, row: RecountedRow) -> Iterator[str]:
    """Yield where the other facts of the answer, or the shares that weigh them, differ."""
    expected, stated = row.other_facts, record.get("other_facts")
    if expected is None or "other_facts" not in record:
        return
    if not isinstance(stated, dict):
        if stated is not None or record["status"] == "proved":
            yield f"other_facts {stated}, expected an object for a proved answer, null for others"
        return
    for key, value in (
        ("relation", record["relation"]),
        ("side", record["side"]),
        ("n_facts", expected.n_facts),
    ):
        if stated.get(key) != value:
            yield _difference(f"other_facts: {key}", stated.get(key), value)
    for key, value in (
        ("share_of_facts", expected.shares.of_facts),
        ("share_of_derived", expected.shares.of_derived),
        ("log_odds", expected.log_odds),
    ):
        if not _is_near(stated.get(key), value, TOLERANCE):
            yield _difference(f"other_facts: {key}", stated.get(key), value)
