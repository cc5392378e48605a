"""Compare what funcppo says of a data set or a run with a recount on a sample (`funcppo.kg.ranking.recount`).

`RecountCheck` counts rules again, lists and ranks the candidates of queries again, and checks proofs and evidence of
their answers. Each comparison works within its seconds, compares fewer items where these do not suffice, and says so.
`read_details` reads a file of `funcppo evaluate --details`, whose lines are compared with the ranks.

Confidences are those of the rules that were counted again, and the engine's for the others; the shares of candidates
with other facts, and the scores of a policy, are the engine's.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from funcppo.core import files
from funcppo.core.files import Json, Record
from funcppo.kg.graph.rules import proof_names
from funcppo.kg.logic.derive import LeftOut, make_label
from funcppo.kg.logic.kb import SIDE_NAMES
from funcppo.kg.ranking import evaluate, ranking, recount, scoring
from funcppo.kg.ranking.evaluate import Evaluator
from funcppo.kg.ranking.explain import Explanation
from funcppo.kg.ranking.ranking import Ranking, random_rows
from funcppo.kg.ranking.recount import Atom, Atoms, Logic, RecountLimitError
from funcppo.kg.scores.learned import TermKind
from funcppo.kg.scores.rules import other_fact_shares
from funcppo.kg.search.task import ProverTask, known_triples, with_other_facts

# log-odds; float64 sums in another order, as the recount makes them, differ by less
LOG_ODDS_TOLERANCE = 1e-7
# atoms that the recount of T_P holds
MAX_ATOMS = 1_000_000
# settings that tell one evaluation from another, beside the split and the score
COMPARED_SETTINGS = (
    "fingerprint",
    "params_digest",
    "height",
    "smoothing",
    "object_identity",
)

# fields of a line that are compared; the last ones also where a score is near to the edge of the grid
LINE_FIELDS = (
    "n_better",
    "n_equal",
    "rank",
    "reciprocal_rank",
    "log_score",
    "quantised_score",
    "n_candidates",
    "answer_provable",
    "status",
    "relation",
    "atom",
)
_SIDES = {name: side for side, name in SIDE_NAMES.items()}

Item = TypeVar("Item")
LineKey = tuple[int, int]  # a query and a side
# gives the evidence that a run weighs; None if no rule derives the atom
Explain = Callable[[Tensor, int], Explanation | None]


class Comparison(NamedTuple):
    """Numbers of items of one kind that were compared and that differ from the recount, with the differences."""

    kind: str
    unit: str  # what was compared, in the plural
    n_compared: int
    n_disagreeing: int
    n_total: int  # items that there are, compared or not
    seconds: float
    disagreements: tuple[str, ...]  # a line each, with both values
    notes: tuple[str, ...] = ()  # on what was not compared


class _Row(NamedTuple):
    """Query on a side with the engine's rank counts."""

    position: int  # of the query among those that are ranked
    query: Atom
    side: int
    n_better: int
    n_equal: int
    n_candidates: int


class Details(NamedTuple):
    """Lines of a details file with the settings that the file was made with."""

    path: Path
    settings: Json
    lines: Mapping[LineKey, tuple[int, Record]]  # with their numbers, from 1


class RecountCheck:
    """Comparison of an evaluator's counts, ranks, proofs and evidence with a recount of its data."""

    def __init__(self, evaluator: Evaluator) -> None:
        """Read the data of the evaluator's task for the recount."""
        self.evaluator, self.task = evaluator, evaluator.task
        dataset = self.task.dataset
        rules = [tuple(recount.read_atoms(x)) for x in dataset.rules.tolist()]
        self.logic = Logic(
            rules=tuple(rules),
            n_constants=dataset.n_constants,
            object_identity=self.task.least_model.object_identity,
        )
        facts = recount.read_atoms(dataset.facts.tolist())
        self.facts = Atoms(facts, dataset.n_constants)
        self.names = proof_names(dataset)
        self.n_not_recounted = len(rules)
        # heads that are facts, and all heads, of each rule, without the smoothing; a number that is no integer is not
        # rounded away: it differs from every recount
        self.smoothing = float(self.task.cfg.smoothing or 0.0)
        pairs = self.task.kb.body_pairs.cpu()
        whole = (pairs.double() - self.smoothing).round()
        is_whole = (whole + self.smoothing).to(pairs.dtype) == pairs
        whole = torch.where(is_whole, whole, -1.0).long().tolist()
        self.counts = list(zip(self.task.kb.support.long().tolist(), whole))

    def compare_supports(
        self, rule_ids: Sequence[int], seconds: float
    ) -> Comparison:
        """Count support and body pairs of rules again and compare them; later comparisons use the new counts."""
        leave_one_out = self.task.cfg.smoothing is not None

        def compare(i: int, deadline: float) -> list[str]:
            heads = recount.derive(
                self.logic,
                self.logic.rules[i],
                self.facts,
                deadline,
                leave_one_out=leave_one_out,
            )
            engine, again = (
                self.counts[i],
                (len(heads & self.facts.all), len(heads)),
            )
            self.counts[i] = again
            name = f"{self.names.format_rule(i)}: support and body pairs"
            return _differences(name, _pair(engine), _pair(again))

        n_total = len(self.logic.rules)
        found = _compare_items(
            "supports", "rules", rule_ids, n_total, seconds, compare
        )
        self.n_not_recounted -= found.n_compared
        return found

    def rank(self, split: np.ndarray, rows: Sequence[int]) -> Ranking:
        """Rank the given rows of a split as the engine does.

        Raises:
          ValueError: a query cannot be ranked (see `ranking.check_split`).
        """
        query_id = np.array(rows, dtype=np.int64)
        queries, protocol = split[query_id], self.evaluator.protocol
        ranking.check_split(self.task, queries, protocol)
        score = self.evaluator.score
        return ranking.rank_split(self.task, queries, score, protocol, query_id)

    def compare_ranks(
        self,
        ranked: Ranking,
        seconds: float,
    ) -> Iterator[Comparison]:
        """Recount the candidates of ranked queries, their scores and ranks, and yield a comparison of each kind.

        Returns:
          The comparisons of verdicts on candidates, of their scores if these are of rules, and of ranks.
        """
        start, height = time.monotonic(), self.task.max_height - 1
        rows, score = _rows(ranked), self.evaluator.score
        notes = self._score_notes()
        try:
            atoms = recount.apply_steps(
                self.logic, self.facts, height, MAX_ATOMS, start + seconds / 2
            )
        except RecountLimitError:
            atoms, seconds = self.facts, 0.0
            notes.append(
                f"T_P to height {height} takes too long, or holds more than {MAX_ATOMS:,} atoms"
            )
        check = _RankCheck(self, ranked, atoms)
        seconds -= time.monotonic() - start
        ranks = _compare_items(
            "ranks", "queries", rows, len(rows), seconds, check.compare
        )
        n_scored = len(ranked.listed_score)
        n_candidates = check.n_compared["verdicts"]
        yield check.summarise("verdicts", "candidates", n_candidates, start)
        if score.has_recount:
            yield check.summarise("scores", "candidates", n_scored, start)
        yield ranks._replace(notes=(*ranks.notes, *notes))

    def compare_details(
        self, details: Details, split: np.ndarray, rows: Sequence[int]
    ) -> Comparison:
        """Compare the lines of a details file about some queries with the records of their ranks.

        Args:
          rows: of the split, whose ranks are recounted too.
        """
        evaluator = replace(self.evaluator, prove=None)
        query_id = np.array(rows, dtype=np.int64)
        records = {
            (record["query_row"], _SIDES[record["side"]]): record
            for query in evaluate.rank_window(evaluator, split, query_id)
            for record in query
        }

        def compare(key: LineKey, _: float) -> list[str]:
            (number, line), record = details.lines[key], records[key]
            # On another machine a score may round to the next line of the grid.
            is_near = record["near_boundary"] or line["near_boundary"]
            errors = [
                f"{name} {line.get(name)}, recounted {record[name]}"
                for name in LINE_FIELDS[6 if is_near else 0 :]
                if line.get(name) != record[name]
            ]
            place = f"line {number}, {record['atom']}, {record['side']}"
            return [f"{place}: {'; '.join(errors)}"] if errors else []

        return _compare_items(
            "details",
            "lines",
            [key for key in records if key in details.lines],
            len(details.lines),
            math.inf,
            compare,
        )

    def _score_notes(self) -> list[str]:
        """Return notes on how far the scores behind the ranks are recounted."""
        score = self.evaluator.score
        if score.needs & {"search", "questions"}:
            return [f"scores are the policy's ({score})"]
        if not score.has_recount:
            return [f"scores are taken as they are ({score})"]
        if not self.n_not_recounted:
            return []
        return [
            f"ranks take the confidences of {self.n_not_recounted:,} rules as funcppo counts them"
        ]

    def compare_proofs(self, ranked: Ranking, seconds: float) -> Comparison:
        """Check the engine's proof of each provable answer of ranked queries."""
        queries = recount.read_atoms(ranked.queries.tolist())
        provable = ranked.query_row[ranked.answer_provable].tolist()
        answers = {queries[row]: row for row in provable}
        without_proof: list[Atom] = []

        def compare(atom: Atom, deadline: float) -> list[str]:
            errors = self._proof_errors(atom, ranked.queries[answers[atom]])
            if errors is None:
                without_proof.append(atom)
            name = f"{self.names.format_atom(atom)}: proved"
            return [f"{name}, recounted: {'; '.join(errors)}"] if errors else []

        found = _compare_items(
            "proofs", "proofs", list(answers), len(answers), seconds, compare
        )
        if not without_proof:
            return found
        n = len(without_proof)
        note = f"no proof was found of {n} provable answers"
        return found._replace(
            n_compared=found.n_compared - n, notes=(*found.notes, note)
        )

    def _proof_errors(self, atom: Atom, query: Tensor) -> list[str] | None:
        """List the errors of the engine's proof of an atom; None if a policy's search finds no proof."""
        assert self.evaluator.prove is not None, "the evaluator finds proofs"
        try:
            (proof,) = self.evaluator.prove(query[None])
        except AssertionError as error:  # the engine checks its proofs too
            return [str(error)]
        if proof is None:
            is_sure = self.evaluator.score.has_recount
            return ["there is no proof"] if is_sure else None
        if recount.read_atoms([proof.nodes[0].goal]) != [atom]:
            return ["it proves another atom"]
        return recount.proof_errors(
            self.logic, proof, self.facts.all, self.task.max_height
        )

    def compare_evidence(
        self,
        explain: Explain,
        left_out: LeftOut,
        kinds: Sequence[TermKind],
        ranked: Ranking,
        seconds: float,
    ) -> Comparison:
        """Recount the evidence of the answers of ranked queries (groundings, fan-out, links, degrees) and compare it.

        Args:
          explain: gives the engine's.
          left_out: what is left out of the evidence of an answer that is a known fact.
          kinds: of evidence that are weighed.
        """
        rows = _rows(ranked)

        def compare(row: _Row, deadline: float) -> list[str]:
            engine = _evidence_counts(
                explain(torch.tensor(row.query), row.side)
            )
            again = self._recount_evidence(row, left_out, kinds, deadline)
            errors = [
                f"{key} {engine[key]}, recounted {again[key]}"
                for key in dict.fromkeys((*engine, *again))
                if engine[key] != again[key]
            ]
            name = self.row_name(row)
            return [f"{name}: {'; '.join(errors)}"] if errors else []

        return _compare_items(
            "evidence", "answers", rows, len(rows), seconds, compare
        )

    def _recount_evidence(
        self,
        row: _Row,
        left_out: LeftOut,
        kinds: Sequence[TermKind],
        deadline: float,
    ) -> Counter[str]:
        """Count the evidence of a row's answer, keyed as by `_evidence_counts`; empty if no rule derives the answer.

        Raises:
          RecountLimitError: the deadline is reached.
        """
        query, answer, given = (
            row.query,
            row.query[row.side],
            row.query[3 - row.side],
        )
        facts = {fact for fact in self.facts.all if len(fact) == 3}
        unknown = facts & {query}
        if unknown and left_out == "pair":
            unknown = {a for a in facts if set(a[1:]) == set(query[1:])}
        counts: Counter[str] = Counter()
        for i, rule in enumerate(self.logic.rules):
            found = recount.count_groundings(
                self.logic, rule, self.facts, query, row.side, unknown, deadline
            )
            if answer in found:
                counts |= _rule_counts(
                    i, found[answer], len(found), found.total()
                )
        if not counts:
            return counts

        for fact, side in itertools.product(facts, SIDE_NAMES):
            if fact[side] != answer:
                continue
            is_link = fact[3 - side] == given and fact not in unknown
            if (fact[0], side) == (query[0], row.side):
                counts["known answers"] += fact != query
                continue
            if "degrees" in kinds:
                counts[_degree_name(fact[0], side)] += 1
            if "links" in kinds and is_link:
                counts[_link_name(fact[0], side)] += 1
        return counts

    def row_name(self, row: _Row) -> str:
        """Format the query of a row and its side."""
        return f"{self.names.format_atom(row.query)}, {SIDE_NAMES[row.side]}"


class _RankCheck:
    """Comparison of the candidates, scores and ranks of one row after another."""

    def __init__(
        self,
        check: RecountCheck,
        ranked: Ranking,
        atoms: Atoms,
    ) -> None:
        """Take the atoms that T_P derives one step below the task's height."""
        score, task = check.evaluator.score, check.task
        self.check, self.atoms = check, atoms
        self.score, self.is_recounted = score, score.has_recount
        self.lists_all = check.evaluator.protocol.score_unprovable
        # The engine holds the smoothed counts in float32.
        self.confidence = [
            support / float(np.float32(pairs + check.smoothing))
            if support
            else 0.0
            for support, pairs in check.counts
        ]
        known = recount.read_atoms(known_triples(task.dataset).tolist())
        self.known, self.pool = set(known), task.entity_pool.tolist()
        scored = recount.read_atoms(ranked.scored_atom.tolist())
        keys = zip(scored, ranked.scored_side.tolist(), strict=True)
        self.engine_scores = dict(zip(keys, ranked.log_odds.tolist()))
        self.n_compared: Counter[str] = Counter()
        self.differences: dict[str, list[str]] = {}

        self.other_facts: list[tuple[float, float]] = []
        if "other-facts" in score.needs:
            self.other_facts = _other_fact_terms(task)
        self.n_facts = Counter(
            (fact[0], side, fact[side])
            for fact in check.facts.all
            if len(fact) == 3
            for side in SIDE_NAMES
        )

    def compare(self, row: _Row, deadline: float) -> list[str]:
        """Recount a row and return the differences of its rank; differences of other kinds go to `differences`.

        Raises:
          RecountLimitError: the deadline is reached.
        """
        check = self.check
        rules = self._derive_candidates(row, deadline)
        log_odds = {a: self._log_odds(a, row.side, rules[a]) for a in rules}
        others = sorted(a for a in rules if not rules[a])
        if self.score.ranks_all and others:
            # They have no recount: the engine's are taken.
            values = scoring.score_without_rules(
                self.score, torch.tensor(others), row.side
            )
            log_odds |= dict(zip(others, values.tolist()))
        for atom in rules:
            self._compare_candidate(
                atom,
                self._engine_score(atom, row.side),
                bool(rules[atom]),
                log_odds[atom],
            )
        # Scores that are taken are the engine's to the last digit.
        tolerance = LOG_ODDS_TOLERANCE if self.is_recounted else 0.0
        return [
            f"{check.row_name(row)}: {error}"
            for error in _count_errors(row[3:], row.query, log_odds, tolerance)
        ]

    def _compare_candidate(
        self, atom: Atom, score: float | None, is_derivable: bool, again: float
    ) -> None:
        """Compare the verdict on a candidate, and its score where the engine lists it."""
        name = self.check.names.format_atom(atom)
        verdicts = [
            "derivable" if x else "not derivable"
            for x in (score is not None, is_derivable)
        ]
        if not self.lists_all:
            self._add("verdicts", _differences(f"{name}:", *verdicts))
        if score is not None:
            is_close = (
                score == again or abs(score - again) <= LOG_ODDS_TOLERANCE
            )
            text = f"{name}: log-odds {score:.6f}, recounted {again:.6f}"
            self._add("scores", [] if is_close else [text])

    def _derive_candidates(
        self, row: _Row, deadline: float
    ) -> dict[Atom, list[int]]:
        """Return the rules that derive each candidate of a row; none for a known fact that other facts do not prove."""
        logic, facts = self.check.logic, self.check.facts
        height = self.check.task.max_height
        derivers = recount.find_derivers(
            logic, self.atoms, row.query, row.side, deadline
        )
        found: dict[Atom, list[int]] = {}
        for atom in recount.list_candidates(
            row.query, row.side, self.pool, self.known
        ):
            is_out = atom in facts.all and not recount.is_proved(
                logic, facts, atom, height, MAX_ATOMS, deadline
            )
            found[atom] = [] if is_out else derivers.get(atom[row.side], [])
        return found

    def _engine_score(self, atom: Atom, side: int) -> float | None:
        """Return the engine's log-odds of a candidate on a side; None if the engine does not list it."""
        of_all_sides = self.engine_scores.get((atom, 0))
        return self.engine_scores.get((atom, side), of_all_sides)

    def _log_odds(self, atom: Atom, side: int, rules: Sequence[int]) -> float:
        """Return a candidate's log-odds by the rules that derive it, or the engine's where the score has no recount."""
        if not self.is_recounted:
            score = self._engine_score(atom, side)
            is_listed = bool(rules) or self.lists_all
            return -math.inf if score is None or not is_listed else score
        confidences = [self.confidence[i] for i in rules]
        score = self.score.recount(confidences)
        if self.other_facts:
            n_others = self.n_facts[atom[0], side, atom[side]]
            n_others -= atom in self.check.facts.all
            label = int(make_label(torch.tensor(atom[0]), side))
            score += self.other_facts[label][n_others > 0]
        return score

    def _add(self, kind: str, differences: list[str]) -> None:
        """Count one compared item of a kind and keep its differences."""
        self.n_compared[kind] += 1
        self.differences.setdefault(kind, []).extend(differences)

    def summarise(
        self, kind: str, unit: str, n_total: int, start: float
    ) -> Comparison:
        """Build the comparison of a kind from the items counted so far."""
        lines = tuple(self.differences.get(kind, ()))
        n_compared, seconds = self.n_compared[kind], time.monotonic() - start
        return Comparison(
            kind, unit, n_compared, len(lines), n_total, seconds, lines
        )


def _other_fact_terms(task: ProverTask) -> list[tuple[float, float]]:
    """Return, by relation and side, the log-odds added to a candidate without and with other facts of its relation."""
    counts = with_other_facts(task).other_facts
    assert counts is not None, "they are counted"
    shares = other_fact_shares(task.kb, counts)
    return [
        (math.log((1 - a) / (1 - b)), math.log(a / b))
        for a, b in zip(*(column.tolist() for column in shares))
    ]


# -- a file of details


def read_details(path: Path) -> Details:
    """Read a details file and the settings beside it; an unfinished last line is left out.

    Raises:
      ValueError: a setting or a line, which the message names, is bad, or there is no line.
    """
    settings = evaluate.read_settings(path)
    for name, values in (("split", ("test", "valid")), ("negatives", (None,))):
        if settings.get(name) not in values:
            raise ValueError(
                f"{files.settings_path(path)}: {name}: expected one of {values}, got {settings.get(name)!r}"
            )
    lines: dict[LineKey, tuple[int, Record]] = {}
    for number, record in enumerate(evaluate.read(path), 1):
        key = record["query_row"], _SIDES[record["side"]]
        if key in lines:
            raise ValueError(
                f"{path}:{number}: expected one line for each query and side, got a second one of query_row "
                f"{key[0]}, {record['side']}"
            )
        lines[key] = number, record
    if not lines:
        raise ValueError(
            f"{path}: expected a line for each query and side, got none"
        )
    return Details(path, settings, lines)


def check_details(
    details: Details,
    settings: Json,
    target: str,
    n_queries: int,
    sides: Sequence[int],
) -> None:
    """Check that a details file was made with the same data, rules, parameters and settings as another evaluation.

    Args:
      settings: of that one.
      target: what it evaluates, for the error.
      n_queries: of the split.
      sides: that are ranked.

    Raises:
      ValueError: it was not, or it has lines about other queries.
    """
    for name in COMPARED_SETTINGS:
        stated = details.settings.get(name)
        if stated != settings[name]:
            raise ValueError(
                f"{files.settings_path(details.path)}: {name}: expected {settings[name]}, that of {target}, "
                f"got {stated}"
            )
    for (query_row, side), (number, _) in details.lines.items():
        if query_row >= n_queries or side not in sides:
            raise ValueError(
                f"{details.path}:{number}: expected one of {n_queries} queries and a side that is ranked, got "
                f"query_row {query_row}, {SIDE_NAMES[side]}"
            )


def compare_line_numbers(
    details: Details, n_queries: int, sides: Sequence[int]
) -> Comparison:
    """Report each query and side of the evaluated sample for which a details file has no line.

    Args:
      n_queries: of its split, of which the evaluation may have ranked a sample.
      sides: that are ranked.
    """
    limit = details.settings.get("queries")
    rows = random_rows(n_queries, n_queries if limit is None else limit)
    keys = [(row, side) for row in sorted(rows.tolist()) for side in sides]

    def compare(key: LineKey, _: float) -> list[str]:
        name = f"query_row {key[0]}, {SIDE_NAMES[key[1]]}"
        return [] if key in details.lines else [f"{name}: no line"]

    return _compare_items("lines", "lines", keys, len(keys), math.inf, compare)


# -- parts of comparisons


def _compare_items(
    kind: str,
    unit: str,
    items: Sequence[Item],
    n_total: int,
    seconds: float,
    compare: Callable[[Item, float], list[str]],
) -> Comparison:
    """Compare as many items as the seconds allow, each for at most a tenth of them.

    Args:
      compare: gives the differences of an item, a line each; gets its deadline.
    """
    start = time.monotonic()
    found: list[list[str]] = []
    for item in items:
        now = time.monotonic()
        deadline = min(start + seconds, now + 0.1 * seconds)
        if now > deadline:
            break
        try:
            found.append(compare(item, deadline))
        except RecountLimitError:
            continue
    lines = tuple(line for part in found for line in part)
    n_late = len(items) - len(found)
    note = (
        f"{n_late:,} {unit} not compared within {max(seconds, 0.0):g} seconds"
    )
    return Comparison(
        kind,
        unit,
        len(found),
        len(lines),
        n_total,
        time.monotonic() - start,
        lines,
        (note,) if n_late else (),
    )


def _rows(ranked: Ranking) -> list[_Row]:
    """Return the rows of a ranking, both sides of a query next to each other."""
    queries = recount.read_atoms(ranked.queries.tolist())
    columns = (ranked.query_row, ranked.side, *ranked.counts)
    rows = [
        _Row(position, queries[position], *others)
        for position, *others in zip(*(x.tolist() for x in columns))
    ]
    return sorted(rows, key=lambda row: row.position)


def _count_errors(
    counts: Sequence[int],
    answer: Atom,
    log_odds: Mapping[Atom, float],
    tolerance: float,
) -> list[str]:
    """Return a difference if the rank counts (better, equal, all) do not fit the log-odds within a tolerance."""
    n_better, n_equal, n_candidates = counts
    bounds = recount.bound_ranks(answer, log_odds, tolerance)
    if (
        n_candidates == len(log_odds)
        and n_better in bounds.n_better
        and n_better + n_equal in bounds.n_not_worse
    ):
        return []
    again = bounds.n_better.start
    n_ties = bounds.n_not_worse.start - again
    return _differences(
        "",
        _rank_text(*counts),
        _rank_text(again, n_ties, len(log_odds)),
    )


def _rank_text(n_better: int, n_equal: int, n_candidates: int) -> str:
    """Format rank counts with the expected reciprocal rank."""
    reciprocal = recount.expected_reciprocal_rank(n_better, n_equal)
    return f"{n_better} better and {n_equal} equal of {n_candidates} (1/rank {reciprocal:.4f})"


def _pair(counts: tuple[int, int]) -> str:
    """Format two counts as "n of m"."""
    return f"{counts[0]:,} of {counts[1]:,}"


def _differences(name: str, value: object, again: object) -> list[str]:
    """Return a line with both values if they differ, else an empty list."""
    text = f"{name} {value}, recounted {again}".lstrip()
    return [] if value == again else [text]


def _evidence_counts(found: Explanation | None) -> Counter[str]:
    """Return the engine's evidence counts, keyed by what they count; empty if no rule derives the candidate."""
    counts: Counter[str] = Counter()
    if found is None:
        return counts
    for rule in found.rules:
        counts |= _rule_counts(
            rule.rule, rule.n_groundings, rule.fan_out, rule.n_all_groundings
        )
    for term in found.terms:
        if term.kind == "own-degree":
            counts["known answers"] = term.detail
        elif term.kind == "degree":
            predicate, place, n_facts = term.detail
            counts[_degree_name(predicate, place)] = n_facts
        elif term.kind == "fact":
            counts[_link_name(*term.detail[:2])] += 1
    return counts


def _rule_counts(
    rule: int, n_groundings: int, fan_out: int, n_all_groundings: int
) -> Counter[str]:
    """Return a rule's groundings, fan-out and all groundings, keyed by what they count."""
    return Counter(
        {
            f"groundings of rule {rule}": n_groundings,
            f"fan-out of rule {rule}": fan_out,
            f"all groundings of rule {rule}": n_all_groundings,
        }
    )


def _degree_name(predicate: int, place: int) -> str:
    """Name the count of facts of a relation that hold the answer at an argument position."""
    return f"facts of relation {predicate} whose {SIDE_NAMES[place]} it is"


def _link_name(predicate: int, place: int) -> str:
    """Name the count of facts of a relation that link the answer to the query's entity."""
    return f"{_degree_name(predicate, place)} between the two"
