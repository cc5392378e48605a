"""Evaluation of a split query by query, with a record for each query and side, in a file that can be resumed.

`plan_windows` cuts a split into windows, and `rank_window` gives the records of one, so that a long evaluation can show
its progress, be shared, interrupted and resumed. `open_log` starts or resumes a file of
`core.files`, which holds a record for each query and side, and `summarise_records` computes all metrics from them.
Every rank follows from the integers `n_better`, `n_equal` and `n_candidates`:

    rank = n_better + 1 .. n_better + n_equal + 1,    E[1 / rank] = mean of 1 / r over these r

Files have a format number, in the settings. A file of another format is not resumed.

Bins tell how far the probabilities of triples can be read as chances to be true.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo.core import files
from funcppo.core.files import Json, Record, RecordLog, Settings, shorten
from funcppo.core.settings import INT32_MAX
from funcppo.core.types import F64, I32, I64, Bool
from funcppo.kg.graph.dataset import Dataset, index_entities
from funcppo.kg.graph.rules import format_atom
from funcppo.kg.graph.text import read_text
from funcppo.kg.logic.derive import Questions
from funcppo.kg.logic.kb import HEAD, SIDE_NAMES, TAIL, other_side
from funcppo.kg.logic.proof import Proof
from funcppo.kg.ranking import explain, rank_metrics, ranking, scoring
from funcppo.kg.ranking.rank_metrics import (
    SCORE_GRID_STEP,
    ZERO_SCORE,
    Metrics,
    RankCounts,
)
from funcppo.kg.ranking.ranking import Ranking, RankingProtocol
from funcppo.kg.scores.score import Need, Score
from funcppo.kg.search.task import ProverTask, with_pool_of

# version of the records and of the settings beside them
FORMAT = 3
# status of an answer that no rule derives
NO_PROOF = "no proof"
# most queries of a window whose answers are proved
PROOF_QUERIES = 256
COUNT_KEYS = ("query_row", "n_better", "n_equal", "n_candidates", "n_scored")
REQUIRED_KEYS = (
    *COUNT_KEYS,
    "side",
    "relation",
    "answer_provable",
    "status",
    "near_boundary",
)
# Finds a proof of each of some atoms [n, W]; None where no proof is to be recorded.
ProofFinder = Callable[[Tensor], list[Proof | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluator:
    """Task, protocol and score that queries are ranked by, and what their records hold."""

    task: ProverTask
    protocol: RankingProtocol
    score: Score
    # finds the proofs of proved answers; None where records hold no proofs and no terms of scores
    prove: ProofFinder | None
    # records hold the scores of all candidates that were scored
    all_scores: bool


# -- ranking


def plan_windows(
    evaluator: Evaluator,
    split: np.ndarray,
    rows: np.ndarray,
    *,
    is_shared: bool = False,
) -> list[np.ndarray]:
    """Cut queries of a split into windows to be ranked together, by the queries and their candidates alone.

    Args:
      split: atoms [n, W].
      rows: rows of the split to rank.
      is_shared: processes share the windows, which are smaller then; their number does not matter.

    Raises:
      ValueError: a query cannot be ranked (see `ranking.check_split`).
    """
    ranking.check_split(evaluator.task, split[rows], evaluator.protocol)
    n_candidates = ranking.estimate_candidates(
        evaluator.task, split[rows], evaluator.protocol
    )
    per_query = max(n_candidates // max(len(rows), 1), 1)
    # Where queries derive their own answers, a window makes as many joins whether it has few queries or many.
    is_held = evaluator.task.answers_plan is None
    size = (1 << 15 if is_held else 1 << 19) // per_query
    if is_shared:
        size = min(size, -(-len(rows) // 64))
    if evaluator.prove is not None:
        size = min(size, PROOF_QUERIES)
    # Each collection of evidence solves every rule's body.
    size = max(size, scoring.MIN_CHUNK_QUERIES if evaluator.score.facts else 1)
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def rank_window(
    evaluator: Evaluator, split: np.ndarray, rows: np.ndarray
) -> list[list[Record]]:
    """Rank queries together; return the records of each query, one for each side.

    Records do not depend on what is ranked together: corruptions are sampled by the query's row, scores depend on the
    atom and the side alone.

    Args:
      split: atoms [n, W].
      rows: rows of the split, such as one of the windows of `plan_windows`.
    """
    if evaluator.task.dataset.by_type:
        return _rank_by_type(evaluator, split, rows)
    ranked = ranking.rank_split(
        evaluator.task, split[rows], evaluator.score, evaluator.protocol, rows
    )
    records = _records(evaluator, ranked, rows)
    by_side = [
        records[start : start + len(rows)]
        for start in range(0, len(records), len(rows))
    ]
    if "other-facts" in evaluator.score.needs and evaluator.prove:
        for side, of_side in zip(evaluator.protocol.sides, by_side):
            _add_other_facts(evaluator, of_side, ranked.queries, side)
    by_query = [list(sides) for sides in zip(*by_side)]
    _add_proofs(evaluator, by_query, ranked.queries)
    return by_query


def _rank_by_type(
    evaluator: Evaluator, split: np.ndarray, rows: np.ndarray
) -> list[list[Record]]:
    """Rank queries as `rank_window` does, each among the entities of the asked place of its relation."""
    found: dict[int, list[Record]] = {row: [] for row in rows.tolist()}
    for relation in np.unique(split[rows, 0]).tolist():
        of_relation = rows[split[rows, 0] == relation]
        for side in evaluator.protocol.sides:
            typed = replace(
                evaluator,
                task=with_pool_of(evaluator.task, relation, side),
                protocol=replace(evaluator.protocol, sides=(side,)),
            )
            ranked = rank_window(typed, split, of_relation)
            for row, records in zip(of_relation.tolist(), ranked):
                found[row] += records
    return list(found.values())


# -- records


def _records(
    evaluator: Evaluator, ranked: Ranking, rows: np.ndarray
) -> list[Record]:
    """Build the records of all queries on one side after the other, without proofs."""
    dataset = evaluator.task.dataset
    provable = ranked.answer_provable.tolist()
    scores = list(map(_none_if_zero, ranked.answer_score.tolist()))
    logs = [x if x is None else rank_metrics.log_score(x) for x in scores]
    near_boundary = set(ranked.listed_row[ranked.near_boundary].tolist())
    other_scores: list[list[int]] = [[] for _ in scores]
    is_other = ~ranked.is_answer
    listed = ranked.listed_row[is_other], ranked.listed_score[is_other]
    for row, score in zip(*(column.tolist() for column in listed)):
        other_scores[row].append(score)

    sides, counts = evaluator.protocol.sides, ranked.counts
    found: dict[str, Iterable[object]] = {
        "answer_provable": provable,
        "status": [
            _answer_status(is_provable, score)
            for is_provable, score in zip(provable, logs)
        ],
        "log_score": logs,
        "quantised_score": scores,
    }
    queries = ranked.queries.numpy(force=True)
    columns = {
        **rank_columns(dataset, rows, queries, sides, counts, found),
        "n_scored": [
            len(others) + (score is not None)
            for others, score in zip(other_scores, scores)
        ],
        "near_boundary": [i in near_boundary for i in range(len(scores))],
    }
    if evaluator.all_scores or evaluator.task.is_countries:
        columns["other_quantised_scores"] = [
            list(map(_none_if_zero, sorted(others, reverse=True)))
            for others in other_scores
        ]
    if evaluator.protocol.n_best:
        columns["best"] = [
            "\t".join(
                f"{dataset.entity_name(entity)}\t{rank_metrics.probability(score)!r}"
                for entity, score in best
                if score > ZERO_SCORE
            )
            for best in ranked.best.tolist()
        ]
    return as_records(columns)


def rank_columns(
    dataset: Dataset,
    rows: I64[np.ndarray, "n"],
    queries: I32[np.ndarray, "n W"],
    sides: Sequence[int],
    counts: RankCounts,
    found: Mapping[str, Iterable[object]],
) -> dict[str, Iterable[object]]:
    """Return the columns of records that follow from rank counts, of all queries on one side after the other.

    Args:
      rows: of the queries in their split.
      found: further columns, which stand before the ranks.
    """
    n_sides, ranks = len(sides), rank_metrics.ranks(counts)[:, :3].tolist()
    relations = [dataset.predicate_name(i) for i in queries[:, 0].tolist()]
    return {
        "query_row": rows.tolist() * n_sides,
        "side": [SIDE_NAMES[side] for side in sides for _ in rows],
        "relation": relations * n_sides,
        "atom": [format_atom(dataset, atom) for atom in queries] * n_sides,
        **{k: column.tolist() for k, column in counts._asdict().items()},
        **found,
        "rank": [dict(zip(rank_metrics.TIE_POLICIES, row)) for row in ranks],
        "reciprocal_rank": rank_metrics.expected_reciprocal_ranks(
            counts
        ).tolist(),
    }


def as_records(columns: Mapping[str, Iterable[object]]) -> list[Record]:
    """Return the records that columns hold."""
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def _none_if_zero(score: int) -> int | None:
    """Return a quantised score for JSON; None for a score of 0."""
    return score if score > ZERO_SCORE else None


def _answer_status(answer_provable: bool, log_score: float | None) -> str:
    """Return an answer's status: no proof, proved, or missed (provable, but the search found no proof)."""
    if not answer_provable:
        return NO_PROOF
    if log_score is not None and log_score > -math.inf:
        return "proved"
    return "missed"


def _add_other_facts(
    evaluator: Evaluator, records: Sequence[Record], answers: Tensor, side: int
) -> None:
    """Add to each record the log-odds that other facts add to the answer's score; None where it is not proved."""
    is_proved = [record["status"] == "proved" for record in records]
    found = iter(
        explain.other_facts(
            evaluator.task, evaluator.score, answers[is_proved], side
        )
    )
    for record, proved in zip(records, is_proved):
        record["other_facts"] = next(found) if proved else None


def _add_proofs(
    evaluator: Evaluator, records: Sequence[list[Record]], answers: Tensor
) -> None:
    """Add to each record a proof of its answer, found once for all sides; None where the answer is not proved."""
    is_proved = [
        any(record["status"] == "proved" for record in sides)
        for sides in records
    ]
    proofs = iter(())
    if evaluator.prove is not None and any(is_proved):
        proofs = iter(evaluator.prove(answers[is_proved]))
    for sides, proved in zip(records, is_proved):
        found = next(proofs, None) if proved else None
        fields = found and explain.proof_json(evaluator.task.dataset, found)
        for side in sides:
            side["proof"] = fields if side["status"] == "proved" else None


# -- files of records


def open_log(
    path: Path, settings: Settings, n_sides: int, *, resume: bool
) -> RecordLog:
    """Open a file for records: resume the file at the path, or replace it.

    Args:
      settings: what tells this evaluation from others, JSON values; a file with other settings is not resumed.
      n_sides: records of a query; a query that has fewer is ranked again.

    Raises:
      ValueError: the file to resume holds something else, or it cannot be written. The message is one line.
    """
    return files.open_log(
        path,
        files.settings_path(path),
        {files.FORMAT_KEY: FORMAT, **settings},
        resume=resume,
        parse=_parse_record,
        select=partial(_select_complete, n_sides=n_sides),
    )


def read(path: Path) -> list[Record]:
    """Read the records of a file; an unfinished last line is omitted.

    Raises:
      ValueError: a line, which the message names, is no record.
    """
    return files.read_records(path, _parse_record)


def read_settings(path: Path) -> Settings:
    """Read the settings that a file of records was made with, without the format.

    Raises:
      ValueError: there are none, or they are of another format.
    """
    beside = files.settings_path(path)
    return files.read_settings(beside, path, FORMAT)


def summarise_records(
    records: Sequence[Record], predicates: Sequence[str], *, with_auc: bool
) -> Metrics:
    """Summarise records as `ranking.summarise_ranking` does, with counts of missed and near-boundary answers.

    Args:
      predicates: names of predicates 1, 2, ... in order.
      with_auc: also compute the area under the precision-recall curve, from records that hold the scores of all
        candidates.

    Returns:
      The metrics with `n_scored` counted once a query, `mrr_scored` (an answer that scores 0 counts 0, as in the Eval
      of AnyBURL), `n_missed` (provable answers that the search did not find) and
      `n_near_boundary` (records that another machine could rank otherwise).
    """
    predicate_id = {name: i for i, name in enumerate(predicates, 1)}
    side_id = {name: side for side, name in SIDE_NAMES.items()}
    counts = RankCounts(
        *(
            _integers(record[name] for record in records)
            for name in RankCounts._fields
        )
    )
    rows = ranking.RankedRows(
        counts,
        _integers(side_id[record["side"]] for record in records),
        _integers(predicate_id[record["relation"]] for record in records),
        torch.tensor([record["answer_provable"] for record in records]),
        sum(record["n_scored"] for record in records),
    )
    metrics = ranking.summarise_rows([rows], list(predicates))

    # Counts that the rank counts do not hold.
    metrics["mrr_scored"] = sum(
        record["reciprocal_rank"]
        for record in records
        if record.get("quantised_score", 0) is not None
    ) / len(records)
    metrics["n_missed"] = sum(
        record["status"] == "missed" for record in records
    )
    metrics["n_near_boundary"] = sum(
        record["near_boundary"] for record in records
    )
    if with_auc:
        metrics["auc_pr"] = _auc_pr(records, int(counts.n_candidates.sum()))
    return metrics


def _integers(values: Iterable[int]) -> Tensor:
    """Return the values as an int64 tensor."""
    return torch.tensor(list(values), dtype=torch.int64)


def _auc_pr(records: Sequence[Record], n_candidates: int) -> float:
    """Compute the area under the precision-recall curve from the scores of all candidates in the records."""
    scores: list[int] = []
    is_answer: list[bool] = []
    for record in records:
        others = record["other_quantised_scores"]
        for score in (record["quantised_score"], *others):
            scores.append(ZERO_SCORE if score is None else score)
        is_answer += [True] + [False] * len(others)
    return ranking.pooled_average_precision(
        _integers(scores), torch.tensor(is_answer), n_candidates, len(records)
    )


def _select_complete(records: list[Record], n_sides: int) -> list[Record]:
    """Return the records of every query that has one for each side."""
    n_records = Counter(record["query_row"] for record in records)
    return [x for x in records if n_records[x["query_row"]] == n_sides]


def _parse_record(place: str, line: bytes) -> Record:
    """Parse a line of a file of records.

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


# -- files of rankings, as AnyBURL writes them: a triple, then candidates with their scores, for its head and its tail


def format_rankings(
    records: Iterable[Record], dataset: Dataset, split: np.ndarray
) -> str:
    """Format the best candidates in the records of a split's queries as AnyBURL's file of rankings.

    The names of a triple have spaces between them, as AnyBURL reads it, or tabs where a name has a space.
    """
    best: dict[str, dict[str, str]] = {}
    for record in records:
        relation, head, tail = split[record["query_row"], :3].tolist()
        names = [str(dataset.entity_name(i)) for i in (head, tail)]
        names.insert(1, dataset.predicate_name(relation))
        is_plain = len(" ".join(names).split()) == 3
        triple = (" " if is_plain else "\t").join(names)
        best.setdefault(triple, {})[record["side"]] = record["best"]
    return "".join(
        f"{triple}\nHeads: {x.get('head', '')}\nTails: {x['tail']}\n"
        for triple, x in best.items()
    )


class RankedFile(Score):
    """Score that a file of rankings gives to candidates; what it does not list ties behind what it lists.

    Of a question with several answers, which the file has for each, all candidates count.
    """

    needs: frozenset[Need] = frozenset({"questions"})
    takes_other_facts = False
    ranks_all = True

    def __init__(self, path: Path, dataset: Dataset) -> None:
        """Read the file.

        Raises:
          ValueError: a line, which the message names, is of another form, has an unknown name, no number as a score, or
            a candidate with two scores; or there are no rankings.
        """
        super().__init__(path.name)
        self._lists = _read_rankings(path, dataset)
        self._n_entities = dataset.n_constants
        # The place of a score among all keeps any difference.
        scores = {x for listed in self._lists.values() for x in listed.values()}
        self._line = {x: line for line, x in enumerate(sorted(scores))}

    def count_missing(
        self, split: I32[np.ndarray, "n W"], sides: Sequence[int]
    ) -> int:
        """Count the questions of triples on some sides that the file does not have."""
        asked = split[:, : TAIL + 1].tolist()
        return sum(
            (atom[0], side, atom[other_side(side)]) not in self._lists
            for atom in asked
            for side in sides
        )

    def log_odds_of_all(self, questions: Questions) -> F64[Tensor, "Q E"]:
        """Return the line of the grid that a score stands on, of every entity; -inf where the file does not list it."""
        shape = len(questions.entity), self._n_entities
        table = torch.full(shape, -torch.inf, dtype=torch.float64)
        columns = (x.tolist() for x in questions[:3])
        for row, key in enumerate(zip(*columns)):
            listed = self._lists.get(key, {})
            lines = [self._line[x] for x in listed.values()]
            values = torch.tensor(lines, dtype=table.dtype)
            table[row, [*listed]] = values * SCORE_GRID_STEP
        return table


def _add_candidates(
    listed: dict[int, float], cells: list[str], entities: Mapping[str, int]
) -> None:
    """Add candidates and their scores, each after its candidate, to those of a question.

    Raises:
      ValueError: a score is missing or no number, or a candidate has two scores.
      KeyError: there is no such entity.
    """
    places = [entities[name] - 1 for name in cells[::2]]
    added = dict(zip(places, map(float, cells[1::2]), strict=True))
    # NaN is not the same either.
    is_same = (listed.get(x, y) == y for x, y in added.items())
    if len(added) < len(places) or not all(is_same):
        raise ValueError("expected one number for each candidate")
    listed.update(added)


def _read_rankings(
    path: Path, dataset: Dataset
) -> dict[tuple[int, int, int], dict[int, float]]:
    """Read a file of rankings as {(relation, side, entity): {place of a candidate among entities: its score}}.

    Raises:
      ValueError: as for `RankedFile`.
    """
    entities = index_entities(dataset)
    relations = {name: i for i, name in enumerate(dataset.predicates, 1)}
    found: dict[tuple[int, int, int], dict[int, float]] = {}
    asked: dict[str, tuple[int, int, int]] = {}
    for number, line in enumerate(read_text(path).split("\n"), 1):
        word, _, text = line.rstrip().partition(" ")
        try:
            if word in asked:
                cells = text.split("\t") if text else []
                listed = found.setdefault(asked[word], {})
                _add_candidates(listed, cells, entities)
            elif line.strip():
                head, relation, tail = line.split(
                    "\t" if "\t" in line else None
                )
                predicate = relations[relation]
                asked = {
                    "Heads:": (predicate, HEAD, entities[tail]),
                    "Tails:": (predicate, TAIL, entities[head]),
                }
        except (KeyError, ValueError) as error:
            is_unknown = isinstance(error, KeyError)
            unknown = f", which the data do not have: {error}" * is_unknown
            raise ValueError(
                f"{path}:{number}: expected a triple of the data, or Heads: or Tails: with candidates and their scores "
                f"between tabs, each with one score for a question, got {shorten(line)}{unknown}"
            ) from None
    if not found:
        raise ValueError(f"{path}: expected rankings, got none")
    return found


N_PROBABILITY_BINS = 10
# quantile of the normal distribution for an interval of 95 %
NORMAL_95 = 1.959963984540054
# probabilities are clipped to [p, 1 - p] before their logarithm
MIN_PROBABILITY = 1e-9


class Bins(NamedTuple):
    """Counts and sums over triples, binned by their probability."""

    n: I64[np.ndarray, "B"]
    n_right: I64[np.ndarray, "B"]  # triples that are true
    probability_sum: F64[np.ndarray, "B"]
    # of -log p of what is the case, that the triple is true or not
    log_loss_sum: F64[np.ndarray, "B"]


def bin_probabilities(
    probability: F64[np.ndarray, "n"], is_right: Bool[np.ndarray, "n"]
) -> Bins:
    """Count candidates and right answers in bins of equal width by the candidates' probability."""
    place = (probability * N_PROBABILITY_BINS).astype(np.int64)
    place = place.clip(0, N_PROBABILITY_BINS - 1)

    def count(weights: np.ndarray | None = None) -> np.ndarray:
        return np.bincount(place, weights, minlength=N_PROBABILITY_BINS)

    # -log of the chance of what is the case
    chance = np.where(is_right, probability, 1.0 - probability)
    log_loss = -np.log(chance.clip(MIN_PROBABILITY, 1.0))
    return Bins(
        n=count(),
        n_right=count(is_right.astype(np.float64)).astype(np.int64),
        probability_sum=count(probability),
        log_loss_sum=count(log_loss),
    )


def wilson(
    n_right: I64[np.ndarray, "B"], n: I64[np.ndarray, "B"]
) -> tuple[F64[np.ndarray, "B"], F64[np.ndarray, "B"]]:
    """Compute the 95 % interval of a share of `n_right` among `n` independent cases; NaN where `n` is 0.

        (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Source: Wilson 1927, JASA 22.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        share = n_right / n
        z2 = NORMAL_95**2 / n
        middle = share + z2 / 2
        width = NORMAL_95 * np.sqrt(share * (1 - share) / n + z2 / n / 4)
        return (middle - width) / (1 + z2), (middle + width) / (1 + z2)


def log_loss(bins: Bins) -> float:
    """Return the mean log loss over all candidates of the bins; NaN without candidates."""
    n = int(bins.n.sum())
    return float(bins.log_loss_sum.sum()) / n if n else np.nan


def calibration_error(bins: Bins) -> float:
    """Compute the expected calibration error; NaN without candidates.

    sum_bins n |share that is right - mean probability| / sum_bins n
    """
    n = int(bins.n.sum())
    gap = np.abs(bins.n_right - bins.probability_sum).sum()
    return float(gap) / n if n else np.nan


def bins_to_json(bins: Bins) -> Json:
    """Return log loss, calibration error and the bins that hold candidates as JSON values; null without candidates."""
    is_used = bins.n > 0
    low, high = wilson(bins.n_right, bins.n)
    edges = np.arange(N_PROBABILITY_BINS + 1) / N_PROBABILITY_BINS
    with np.errstate(divide="ignore", invalid="ignore"):
        mean, share = bins.probability_sum / bins.n, bins.n_right / bins.n

    columns = {
        "from": edges[:-1],
        "to": edges[1:],
        "n_candidates": bins.n,
        "mean_probability": mean,
        "share_right": share,
        "low": low,
        "high": high,
    }

    # Bins without candidates are left out.
    rows = zip(*(column[is_used].tolist() for column in columns.values()))
    has_any = bool(is_used.any())
    return {
        "log_loss": log_loss(bins) if has_any else None,
        "calibration_error": calibration_error(bins) if has_any else None,
        "bins": [dict(zip(columns, row)) for row in rows],
    }
