"""Compare what funcppo says of a data set or a run with a recount on a sample (`funcppo.kg.ranking.recount`).

`RecountCheck` counts rules again, lists and ranks the candidates of queries again, and checks proofs and evidence of
their answers. Each comparison works within its seconds, compares fewer items where these do not suffice, and says so.
`read_details` reads a file of `funcppo evaluate --details`, whose lines are compared with the ranks.

Confidences are those of the rules that were counted again, and the engine's for the others; the shares of candidates
with other facts, and the scores of a policy, are the engine's.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from funcppo.core import files
from funcppo.core.files import Json, Record
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.rules import comparison_tests, proof_names
from funcppo.kg.logic import proof
from funcppo.kg.logic.derive import LeftOut, make_label
from funcppo.kg.logic.kb import SIDE_NAMES
from funcppo.kg.logic.proof import Proof
from funcppo.kg.ranking import evaluate, ranking, recount, scoring
from funcppo.kg.ranking.evaluate import Evaluator
from funcppo.kg.ranking.explain import Explanation
from funcppo.kg.ranking.ranking import Ranking, random_rows
from funcppo.kg.ranking.recount import Atom, Atoms, Logic, RecountLimitError
from funcppo.kg.scores.score import other_fact_shares
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
    n_total: int  # items that there are, compared or not
    seconds: float
    disagreements: tuple[str, ...]  # a line each, with both values
    notes: tuple[str, ...] = ()  # on what was not compared

    def to_json(self) -> Json:
        """Return the comparison as JSON values."""
        return self._asdict() | {"n_disagreeing": len(self.disagreements)}


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
        dataset, kb = self.task.dataset, self.task.kb
        rules = [tuple(recount.read_atoms(x)) for x in dataset.rules.tolist()]
        self.logic = Logic(
            rules=tuple(rules),
            n_constants=dataset.n_constants,
            object_identity=self.task.object_identity,
        )
        facts = recount.read_atoms(dataset.facts.tolist())
        self.facts = Atoms(facts, dataset.n_constants)
        self.names = proof_names(dataset)
        self.n_not_recounted = len(rules)
        # heads that are facts, and all heads with the smoothing, of each rule
        self.counts = list(zip(kb.support.tolist(), kb.body_pairs.tolist()))

    def compare_supports(
        self, rule_ids: Sequence[int], seconds: float
    ) -> Comparison:
        """Count support and body pairs of rules again and compare them; later comparisons use the new counts."""
        smoothing = self.task.cfg.smoothing
        added = float(smoothing or 0.0)

        def compare(i: int, deadline: float) -> list[str]:
            heads = recount.derive(
                self.logic,
                self.logic.rules[i],
                self.facts,
                deadline,
                leave_one_out=smoothing is not None,
            )
            # The engine holds them in float32.
            pairs = float(np.float32(len(heads) + added))
            engine = self.counts[i]
            self.counts[i] = again = len(heads & self.facts.all), pairs
            name = f"{self.names.format_rule(i)}: support and body pairs"
            texts = [
                f"{support:g} of {n:.7g}" for support, n in (engine, again)
            ]
            return [f"{name} {', recounted '.join(texts)}"] * (engine != again)

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
        self, ranked: Ranking, seconds: float
    ) -> Iterator[Comparison]:
        """Recount the candidates of ranked queries with their scores, and the ranks; yield both comparisons."""
        start, height = time.monotonic(), self.task.max_height - 1
        rows, notes = _rows(ranked), self._score_notes()
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
        yield Comparison(
            "candidates",
            "candidates",
            check.n_compared,
            check.n_compared,
            time.monotonic() - start,
            tuple(check.disagreements),
        )
        yield ranks._replace(notes=(*ranks.notes, *notes))

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

    def compare_details(
        self, details: Details, split: np.ndarray, rows: Sequence[int]
    ) -> Iterator[Comparison]:
        """Compare the lines of a details file about some queries with their records; then report lines that it lacks.

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
            names = LINE_FIELDS[6 if is_near else 0 :]
            place = f"line {number}, {record['atom']}, {record['side']}"
            return _differences(place, line, record, names)

        there = [key for key in records if key in details.lines]
        n_lines = len(details.lines)
        yield _compare_items(
            "details", "lines", there, n_lines, math.inf, compare
        )
        limit = details.settings.get("queries") or len(split)
        expected = [
            (row, side)
            for row in sorted(random_rows(len(split), limit).tolist())
            for side in evaluator.protocol.sides
        ]
        missing = tuple(
            f"query_row {row}, {SIDE_NAMES[side]}: no line"
            for row, side in expected
            if (row, side) not in details.lines
        )
        n = len(expected)
        yield Comparison("lines", "lines", n, n, 0.0, missing)

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
        n = len(without_proof)
        note = (f"no proof was found of {n} provable answers",) * (n > 0)
        return found._replace(
            n_compared=found.n_compared - n, notes=found.notes + note
        )

    def _proof_errors(self, atom: Atom, query: Tensor) -> list[str] | None:
        """List the errors of the engine's proof of an atom; None if a policy's search finds no proof."""
        assert self.evaluator.prove is not None, "the evaluator finds proofs"
        try:
            (found,) = self.evaluator.prove(query[None])
        except AssertionError as error:  # the engine checks its proofs too
            return [str(error)]
        if found is None:
            is_sure = self.evaluator.score.has_recount
            return ["there is no proof"] if is_sure else None
        if recount.read_atoms([found.nodes[0].goal]) != [atom]:
            return ["it proves another atom"]
        goals = {node.goal for node in found.nodes}
        return proof.check_proof(
            found,
            {g for g in goals if recount.read_atoms([g])[0] in self.facts.all},
            self.task.dataset.rules.tolist(),
            n_constants=self.logic.n_constants,
            max_height=self.task.max_height,
            leave_one_out=True,
            object_identity=self.logic.object_identity,
        )

    def compare_evidence(
        self,
        explain: Explain,
        left_out: LeftOut,
        ranked: Ranking,
        seconds: float,
    ) -> Comparison:
        """Recount the rules behind the answers of ranked queries (groundings, fan-out) and their facts; compare them.

        Args:
          explain: gives the engine's.
          left_out: what is left out of the evidence of an answer that is a known fact.
        """
        facts = {fact for fact in self.facts.all if len(fact) == 3}

        def compare(row: _Row, deadline: float) -> list[str]:
            query, answer = row.query, row.query[row.side]
            found = explain(torch.tensor(query), row.side)
            unknown = facts & {query}
            if unknown and left_out == "pair":
                unknown = {a for a in facts if set(a[1:]) == set(query[1:])}
            again: Json = {}
            for i, rule in enumerate(self.logic.rules):
                counts = recount.count_groundings(
                    self.logic,
                    rule,
                    self.facts,
                    query,
                    row.side,
                    unknown,
                    deadline,
                )
                if answer in counts:
                    again |= _rule_counts(
                        i, counts[answer], len(counts), counts.total()
                    )
            if again:
                again["known answers"] = sum(
                    fact[0] == query[0] and fact[row.side] == answer
                    for fact in facts - {query}
                )
            engine = _evidence_counts(found) if found else {}
            names = dict.fromkeys((*engine, *again))
            return _differences(self.row_name(row), engine, again, names)

        rows = _rows(ranked)
        return _compare_items(
            "evidence", "answers", rows, len(rows), seconds, compare
        )

    def row_name(self, row: _Row) -> str:
        """Format the query of a row and its side."""
        return f"{self.names.format_atom(row.query)}, {SIDE_NAMES[row.side]}"


class _RankCheck:
    """Comparison of the candidates, scores and ranks of one row after another."""

    def __init__(
        self, check: RecountCheck, ranked: Ranking, atoms: Atoms
    ) -> None:
        """Take the atoms that T_P derives one step below the task's height."""
        task = check.task
        self.check, self.atoms, self.score = check, atoms, check.evaluator.score
        self.confidence = [
            support / pairs if support else 0.0
            for support, pairs in check.counts
        ]
        known = recount.read_atoms(known_triples(task.dataset).tolist())
        self.known, self.pool = set(known), task.entity_pool.tolist()
        scored = recount.read_atoms(ranked.scored_atom.tolist())
        keys = zip(scored, ranked.scored_side.tolist(), strict=True)
        self.engine_scores = dict(zip(keys, ranked.log_odds.tolist()))
        self.n_compared = 0
        self.disagreements: list[str] = []

        self.other_facts: list[tuple[float, float]] = []
        if "other-facts" in self.score.needs:
            self.other_facts = _other_fact_terms(task)
        self.n_facts = Counter(
            (fact[0], side, fact[side])
            for fact in check.facts.all
            if len(fact) == 3
            for side in SIDE_NAMES
        )

    def compare(self, row: _Row, deadline: float) -> list[str]:
        """Recount a row and return the differences of its rank; those of its candidates go to `disagreements`.

        Raises:
          RecountLimitError: the deadline is reached.
        """
        rules = self._derive_candidates(row, deadline)
        # None for a candidate that the engine does not list.
        engine = {
            atom: self.engine_scores.get(
                (atom, row.side), self.engine_scores.get((atom, 0))
            )
            for atom in rules
        }
        log_odds = {
            atom: self._log_odds(atom, row.side, rules[atom], engine[atom])
            for atom in rules
        }
        others = sorted(atom for atom in rules if not rules[atom])
        if self.score.ranks_all and others:
            # They have no recount: the engine's are taken.
            values = scoring.score_without_rules(
                self.score, torch.tensor(others), row.side
            )
            log_odds |= dict(zip(others, values.tolist()))
        for atom, score in engine.items():
            self._compare_candidate(
                atom, score, bool(rules[atom]), log_odds[atom]
            )
        # Scores that are taken are the engine's to the last digit.
        tolerance = LOG_ODDS_TOLERANCE if self.score.has_recount else 0.0
        better, not_worse = recount.bound_ranks(row.query, log_odds, tolerance)
        n_better, n_equal, n_candidates = row[3:]
        if (
            n_candidates == len(log_odds)
            and n_better in better
            and n_better + n_equal in not_worse
        ):
            return []
        again = better.start
        texts = [
            _rank_text(*row[3:]),
            _rank_text(again, not_worse.start - again, len(log_odds)),
        ]
        return [f"{self.check.row_name(row)}: {', recounted '.join(texts)}"]

    def _compare_candidate(
        self, atom: Atom, score: float | None, is_derivable: bool, again: float
    ) -> None:
        """Compare whether a candidate is derivable, and its score where the engine lists it."""
        self.n_compared += 1
        is_listed = score is not None
        texts: list[str] = []
        if is_listed != is_derivable:
            texts = [
                "derivable" if x else "not derivable"
                for x in (is_listed, is_derivable)
            ]
        # both may be infinite
        elif score is not None and not (
            score == again or abs(score - again) <= LOG_ODDS_TOLERANCE
        ):
            texts = [f"log-odds {score:.6f}", f"{again:.6f}"]
        if texts:
            name = self.check.names.format_atom(atom)
            self.disagreements.append(f"{name}: {', recounted '.join(texts)}")

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

    def _log_odds(
        self, atom: Atom, side: int, rules: Sequence[int], engine: float | None
    ) -> float:
        """Return a candidate's log-odds by the rules that derive it, or the engine's where the score has no recount."""
        if not self.score.has_recount:
            return engine if engine is not None and rules else -math.inf
        score = self.score.recount([self.confidence[i] for i in rules])
        if self.other_facts:
            n_others = self.n_facts[atom[0], side, atom[side]]
            n_others -= atom in self.check.facts.all
            label = int(make_label(torch.tensor(atom[0]), side))
            score += self.other_facts[label][n_others > 0]
        return score


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
      ValueError: it was ranked against sampled candidates, a line, which the message names, is bad, or there is none.
    """
    settings = evaluate.read_settings(path)
    if settings.get("negatives") is not None:
        raise ValueError(
            f"{files.settings_path(path)}: negatives: expected None, got {settings['negatives']!r}"
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


# -- a file of proofs


def compare_proof_file(path: Path, dataset: Dataset) -> Comparison:
    """Check the proofs in a file of JSON that a program wrote: their steps, texts and names.

    Args:
      dataset: the facts and rules that they are of.

    Raises:
      ValueError: the file is no JSON object, or holds no proof.
    """
    start = time.monotonic()
    settings = files.read_object(path)
    holders = list(_iter_holders(settings))
    if not holders:
        raise ValueError(
            f"{path}: expected a proof, as `funcppo prove --json` writes it, got none"
        )
    facts = set(map(tuple, dataset.facts.tolist()))
    rules, n_constants = dataset.rules.tolist(), dataset.n_constants
    object_identity = settings.get("object_identity") is True
    facts_of: dict[int, list[proof.Atom]] = defaultdict(list)
    for fact in facts:
        facts_of[fact[0]].append(fact)
    conditions = proof.Conditions(
        facts_of.__getitem__,
        rules,
        comparison_tests(dataset),
        n_constants,
        object_identity,
    )
    check = partial(
        proof.check_proof,
        facts=facts,
        rules=rules,
        n_constants=n_constants,
        max_height=None,
        leave_one_out=True,
        object_identity=object_identity,
        holds=conditions.hold,
    )

    lines: list[str] = []
    for holder in holders:
        try:
            read = proof.from_json(holder["proof"])
            errors = check(read) or _text_errors(read, holder, dataset)
        except ValueError as error:
            errors = [str(error)]
        lines += errors[:1]
    n, seconds = len(holders), time.monotonic() - start
    return Comparison("proofs", "proofs", n, n, seconds, tuple(lines))


def _iter_holders(document: Json) -> Iterator[Json]:
    """Yield each object of a JSON document that holds a proof."""
    stack: list[Any] = [document]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            if isinstance(value.get("proof"), dict):
                yield value
            value = list(value.values())
        if isinstance(value, list):
            stack += reversed(value)


def _text_errors(read: Proof, holder: Json, dataset: Dataset) -> list[str]:
    """Return the differences between a proof that holds, as a program writes it, and its JSON, with what holds it."""
    names = proof_names(dataset)
    expected: Json = json.loads(proof.to_json(read, *names))
    predicate, *terms = read.nodes[0].goal
    text = names.format_atom(read.nodes[0].goal)
    answer = {"query": text, "atom": text}
    answer["relation"] = names.format_predicate(predicate)
    answer |= zip(("head", "tail"), map(names.format_term, filter(None, terms)))

    found = holder["proof"]
    nodes = enumerate(zip(expected["nodes"], found["nodes"]))
    pairs = [(f"node {i}", *node) for i, node in nodes]
    pairs += [("proof", expected, found), ("answer", answer, answer | holder)]
    return [
        f"{place}: {name}: expected {wanted[name]}, got {got.get(name)}"
        for place, wanted, got in pairs
        for name in wanted
        if json.dumps(wanted[name]) != json.dumps(got.get(name))
    ]


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
    start, n_compared = time.monotonic(), 0
    lines: list[str] = []
    for item in items:
        now = time.monotonic()
        deadline = min(start + seconds, now + 0.1 * seconds)
        if now > deadline:
            break
        try:
            lines += compare(item, deadline)
            n_compared += 1
        except RecountLimitError:
            continue
    n_late = len(items) - n_compared
    note = (
        f"{n_late:,} {unit} not compared within {max(seconds, 0.0):g} seconds"
    )
    return Comparison(
        kind,
        unit,
        n_compared,
        n_total,
        time.monotonic() - start,
        tuple(lines),
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


def _rank_text(n_better: int, n_equal: int, n_candidates: int) -> str:
    """Format rank counts with the expected reciprocal rank."""
    reciprocal = recount.expected_reciprocal_rank(n_better, n_equal)
    return f"{n_better} better and {n_equal} equal of {n_candidates} (1/rank {reciprocal:.4f})"


def _differences(
    item: str, engine: Json, again: Json, names: Iterable[str]
) -> list[str]:
    """Return a line on an item with the values of all names for which the two differ; empty without any."""
    errors = [
        f"{name} {engine.get(name)}, recounted {again.get(name)}"
        for name in names
        if engine.get(name) != again.get(name)
    ]
    return [f"{item}: {'; '.join(errors)}"] if errors else []


def _evidence_counts(found: Explanation) -> Json:
    """Return the engine's counts of rules and known answers, by what they count."""
    counts: Json = {}
    for rule in found.rules:
        counts |= _rule_counts(
            rule.rule, rule.n_groundings, rule.fan_out, rule.n_all_groundings
        )
    (own,) = found.of_kind("own-degree")
    return counts | {"known answers": own.detail}


def _rule_counts(rule: int, *counts: int) -> Json:
    """Return a rule's groundings, fan-out and all groundings, by what they count."""
    names = ("groundings", "fan-out", "all groundings")
    return {f"{name} of rule {rule}": n for name, n in zip(names, counts)}
