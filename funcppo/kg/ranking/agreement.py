"""Compare what funcppo says of a data set or a run with a recount on a sample (`funcppo.kg.ranking.recount`).

`compare_supports` counts rules again, `compare_ranks` lists and ranks the candidates of queries again, and
`compare_proofs` checks proofs of their answers again. Each works within its seconds, compares fewer items where these
do not suffice, and says so.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from funcppo.kg.graph.rules import proof_names
from funcppo.kg.logic.derive import LeftOut, make_label
from funcppo.kg.logic.triple_index import SIDE_NAMES
from funcppo.kg.ranking import details_lines, ranking, recount
from funcppo.kg.ranking.details_lines import (
    Details,
    Line,
    LineSample,
    RecountedOtherFacts,
    RecountedRow,
)
from funcppo.kg.ranking.evaluator import Evaluator
from funcppo.kg.ranking.explain import Explanation
from funcppo.kg.ranking.ranking import Ranking
from funcppo.kg.ranking.recount import (
    Atom,
    Atoms,
    Logic,
    OtherFactShares,
    RankCounts,
)
from funcppo.kg.scores.other_facts import other_fact_shares
from funcppo.kg.scores.score import OTHER_FACTS, Score
from funcppo.kg.search.task import ProverTask, known_triples, with_other_facts

# log-odds; float64 sums in another order, as the recount makes them, differ by less
LOG_ODDS_TOLERANCE = 1e-7
# the same of scores of a search, which are float32
SEARCH_TOLERANCE = ranking.LOG_ODDS_TOLERANCE
# The engine's probabilities of walks are float32 of whole numbers of 2 ** -60, rounded at each atom.
WALK_TOLERANCE = 1e-6
WALK_ROUNDING = 1e-12
# part of the seconds that one rule or query may take
MAX_SHARE = 0.1
# atoms that the recount of T_P holds
MAX_ATOMS = 1_000_000

RuleCounts = Mapping[int, tuple[int, int]]  # heads that are facts, all heads


class Agreement(NamedTuple):
    """How many items of a kind were compared, and where the recount differs."""

    kind: str
    unit: str  # what was compared, in the plural
    n_compared: int
    n_disagreeing: int
    n_total: int  # items that there are, compared or not
    seconds: float
    disagreements: tuple[str, ...]  # a line each, with both values
    notes: tuple[str, ...]  # on what was not compared


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is compared: an evaluator, and its data as the recount reads them."""

    evaluator: Evaluator
    logic: Logic
    facts: Atoms


class _Row(NamedTuple):
    """A query on a side, and what the engine says of it."""

    position: int  # of the query among those that are ranked
    query: Atom
    side: int
    counts: RankCounts


class _RowDifference(NamedTuple):
    """Where the recount of a row differs."""

    n_candidates: int
    verdicts: list[str]
    n_scores: int  # that were compared
    scores: list[str]
    rank: str  # empty if it agrees
    is_near_boundary: bool  # it differs by the rounding of scores alone
    line: str | None  # of a details file: empty if it agrees; None without one


def make_subject(evaluator: Evaluator) -> Subject:
    """Read the data of an evaluator's task for the recount."""
    dataset = evaluator.task.dataset
    logic = Logic(
        rules=tuple(
            tuple(recount.read_atoms(rule)) for rule in dataset.rules.tolist()
        ),
        n_constants=dataset.n_constants,
        object_identity=evaluator.task.least_model.object_identity,
    )
    facts = Atoms(
        recount.read_atoms(dataset.facts.tolist()), dataset.n_constants
    )
    return Subject(
        evaluator=evaluator,
        logic=logic,
        facts=facts,
    )


# -- supports


def compare_supports(
    subject: Subject, rule_ids: Sequence[int], seconds: float
) -> tuple[Agreement, RuleCounts]:
    """Count the support and the body pairs of rules again.

    Returns:
      The comparison, and the counts of the rules that were counted in time.
    """
    start = time.monotonic()
    rules = subject.logic.rules
    leave_one_out = subject.evaluator.task.cfg.smoothing is not None
    counts: dict[int, tuple[int, int]] = {}
    for i in rule_ids:
        try:
            pair = recount.count_rule(
                subject.logic,
                rules[i],
                subject.facts,
                _item_deadline(start, seconds),
                leave_one_out=leave_one_out,
            )
        except recount.RecountLimitError:
            continue
        counts |= {i: pair}

    engine = _engine_counts(subject.evaluator.task)
    format_rule = proof_names(subject.evaluator.task.dataset).format_rule
    lines = [
        f"{format_rule(i)}: support and body pairs {_pair(engine[i])}, recounted {_pair(pair)}"
        for i, pair in counts.items()
        if engine[i] != pair
    ]
    agreement = Agreement(
        kind="supports",
        unit="rules",
        n_compared=len(counts),
        n_disagreeing=len(lines),
        n_total=len(rules),
        seconds=time.monotonic() - start,
        disagreements=tuple(lines),
        notes=_time_notes(len(rule_ids) - len(counts), "rules", seconds),
    )
    return agreement, counts


def _engine_counts(task: ProverTask) -> list[tuple[int, int]]:
    """Support and body pairs of each rule as the task holds them, without the smoothing.

    A number that is no integer is not rounded away: it differs from every recount.
    """
    smoothing = float(task.cfg.smoothing or 0.0)
    pairs = task.kb.body_pairs.cpu()
    whole = (pairs.double() - smoothing).round()
    is_whole = (whole + smoothing).to(pairs.dtype) == pairs
    whole = torch.where(is_whole, whole, -1.0)
    return [
        (int(support), int(pairs))
        for support, pairs in zip(task.kb.support.tolist(), whole.tolist())
    ]


def _pair(counts: tuple[int, int]) -> str:
    """Two counts as text."""
    return f"{counts[0]:,} of {counts[1]:,}"


# -- verdicts and ranks


def compare_ranks(
    subject: Subject,
    ranked: Ranking,
    rule_counts: RuleCounts,
    seconds: float,
    lines: LineSample | None = None,
) -> list[Agreement]:
    """Find the candidates of ranked queries again, with their scores and ranks.

    Confidences are those of `rule_counts`, and the engine's for rules that were not recounted. Scores of a policy
    are taken from the engine.

    Args:
      lines: of a details file about these queries.

    Returns:
      The comparisons of verdicts on candidates, of their scores if these are of rules, of ranks, and of lines.
    """
    start = time.monotonic()
    task = subject.evaluator.task
    try:
        atoms = recount.apply_steps(
            subject.logic,
            subject.facts,
            task.max_height - 1,
            MAX_ATOMS,
            start + seconds / 2,
        )
    except recount.RecountLimitError:
        atoms = None
    scores = _ScoreSource(subject, ranked, rule_counts)
    known = set(recount.read_atoms(known_triples(task.dataset).tolist()))

    rows = _rows(ranked)
    differences: list[_RowDifference] = []
    for row in rows:
        if atoms is None:
            break
        deadline = _item_deadline(start, seconds)
        try:
            difference = _compare_row(
                scores, row, atoms, known, deadline, lines
            )
        except recount.RecountLimitError:
            continue
        differences.append(difference)
    notes = _time_notes(len(rows) - len(differences), "queries", seconds)
    if atoms is None:
        notes += (
            f"T_P to height {task.max_height - 1} takes too long, or holds more than {MAX_ATOMS:,} atoms",
        )
    return _summarise_rows(
        scores,
        differences,
        len(rows),
        None if lines is None else lines.n_total,
        time.monotonic() - start,
        notes,
    )


class _ScoreSource:
    """The scores of candidates by rule counts, or by the engine's policy."""

    def __init__(
        self, subject: Subject, ranked: Ranking, rule_counts: RuleCounts
    ) -> None:
        task = subject.evaluator.task
        self.subject = subject
        score = subject.evaluator.score
        self.name = score.name.removesuffix(OTHER_FACTS)
        self.has_other_facts = "other-facts" in score.needs
        self.is_recounted = has_recount(score)
        self.lists_all = subject.evaluator.protocol.score_unprovable
        atoms = recount.read_atoms(ranked.scored_atom.tolist())
        sides = ranked.scored_side.tolist()
        keys = zip(atoms, sides, strict=True)
        self.engine_scores = dict(zip(keys, ranked.log_odds.tolist()))
        self.n_listed = len(ranked.listed_score)
        facts = subject.facts.all
        self.n_facts = recount.count_entities(
            facts if self.has_other_facts else ()
        )
        self.relations_taken: set[int] = set()  # whose shares are the engine's
        self._other_facts: dict[tuple[int, int], OtherFactShares] = {}

        counts = dict(enumerate(_engine_counts(task))) | dict(rule_counts)
        # The engine holds the smoothed counts in float32.
        smoothing = float(task.cfg.smoothing or 0.0)
        self.confidence = {
            i: support / float(np.float32(pairs + smoothing))
            if support
            else 0.0
            for i, (support, pairs) in counts.items()
        }
        self.n_not_recounted = len(counts) - len(rule_counts)
        self._heads: dict[int, set[Atom]] = {}

    def engine_score(self, atom: Atom, side: int) -> float | None:
        """The log-odds that the engine gives a candidate of a side; None if it lists none."""
        of_all_sides = self.engine_scores.get((atom, 0))
        return self.engine_scores.get((atom, side), of_all_sides)

    def log_odds(
        self, derivers: Mapping[Atom, Sequence[int]], side: int, deadline: float
    ) -> dict[Atom, float]:
        """The log-odds of the scores of candidates.

        Args:
          derivers: the rules that derive each candidate, a fact from other facts.

        Raises:
          RecountLimitError: the deadline is reached.
        """
        if not self.is_recounted:
            return {
                atom: self._taken_score(atom, side, is_derivable=bool(rules))
                for atom, rules in derivers.items()
            }
        confidences = {
            atom: [self.confidence[i] for i in rules]
            for atom, rules in derivers.items()
        }
        scores: dict[Atom, float] = {}
        for atom in derivers:
            score = recount.rule_score(self.name, confidences[atom])
            if self.has_other_facts:
                others = self.other_facts(atom, side, deadline)
                score += others.log_odds
            scores |= {atom: score}
        return scores

    def other_facts(
        self, atom: Atom, side: int, deadline: float
    ) -> RecountedOtherFacts:
        """The other facts of an atom as an answer about a side.

        Args:
          deadline: after half of the time until then the shares of a relation are taken from the engine.
        """
        key = atom[0], side
        if key not in self._other_facts:
            self._other_facts |= {key: self._other_fact_shares(*key, deadline)}
        shares = self._other_facts[key]
        n_facts = self.n_facts[atom[0], side, atom[side]]
        n_others = n_facts - (atom in self.subject.facts.all)
        return RecountedOtherFacts(n_others, shares, shares.log_odds(n_others))

    def _other_fact_shares(
        self, relation: int, side: int, deadline: float
    ) -> OtherFactShares:
        """How many have another fact of a relation on a side, from what its rules derive where the time suffices."""
        facts = self.subject.facts.all
        of_facts = recount.share_of_facts_with_others(
            facts, self.n_facts, relation, side
        )
        if relation not in self.relations_taken:
            now = time.monotonic()
            until = now + (deadline - now) / 2
            derived = (
                (self.confidence[i], self._derive_heads(i, until))
                for i, (head, *_) in enumerate(self.subject.logic.rules)
                if head[0] == relation and len(head) == 3
            )
            try:
                of_derived = recount.share_of_derived_with_others(
                    derived, facts, self.n_facts, side
                )
                return OtherFactShares(of_facts=of_facts, of_derived=of_derived)
            except recount.RecountLimitError:
                self.relations_taken |= {relation}

        task = with_other_facts(self.subject.evaluator.task)
        assert task.other_facts is not None, "they are counted"
        engine = other_fact_shares(task.kb, task.other_facts)
        label = make_label(torch.tensor(relation), side)
        return OtherFactShares(
            of_facts=of_facts, of_derived=float(engine.of_derived[label])
        )

    def _derive_heads(self, rule: int, deadline: float) -> set[Atom]:
        """What a rule derives from the facts, kept for later atoms."""
        if rule not in self._heads:
            cfg = self.subject.evaluator.task.cfg
            heads = recount.derive(
                self.subject.logic,
                self.subject.logic.rules[rule],
                self.subject.facts,
                deadline,
                leave_one_out=cfg.smoothing is not None,
            )
            n_held = sum(map(len, self._heads.values()))
            if n_held + len(heads) > MAX_ATOMS:
                self._heads = {}
            self._heads |= {rule: heads}
        return self._heads[rule]

    def _taken_score(
        self, atom: Atom, side: int, *, is_derivable: bool
    ) -> float:
        """The log-odds of a score that the engine computes."""
        if is_derivable or self.lists_all:
            score = self.engine_score(atom, side)
            return -math.inf if score is None else score
        return -math.inf


def has_recount(score: Score) -> bool:
    """Whether the recount knows a score: those that follow from the confidences of rules and other facts."""
    return score.name.removesuffix(OTHER_FACTS).startswith(
        ("max-confidence", "noisy-or")
    )


def _rows(ranked: Ranking) -> list[_Row]:
    """The rows of a ranking, both sides of a query together."""
    queries = recount.read_atoms(ranked.queries.tolist())
    counts = zip(*(column.tolist() for column in ranked.counts))
    rows = [
        _Row(query_row, queries[query_row], side, RankCounts(*row_counts))
        for query_row, side, row_counts in zip(
            ranked.query_row.tolist(), ranked.side.tolist(), counts
        )
    ]
    return sorted(rows, key=lambda row: row.position)


def _compare_row(
    scores: _ScoreSource,
    row: _Row,
    atoms: Atoms,
    known: set[Atom],
    deadline: float,
    lines: LineSample | None,
) -> _RowDifference:
    """The differences of a row.

    Args:
      atoms: what T_P derives below the height of the task.
      known: all triples of the splits, and the facts.
      lines: of a details file.

    Raises:
      RecountLimitError: the deadline is reached.
    """
    task = scores.subject.evaluator.task
    derivers = _derive_candidates(scores.subject, row, atoms, known, deadline)
    log_odds = scores.log_odds(derivers, row.side, deadline)
    format_atom = proof_names(task.dataset).format_atom
    verdicts: list[str] = []
    score_lines: list[str] = []
    n_scores = 0
    for atom, rules in derivers.items():
        score = scores.engine_score(atom, row.side)
        if (score is not None) != bool(rules) and not scores.lists_all:
            verdicts.append(
                f"{format_atom(atom)}: {_verdict(score is not None)}, recounted {_verdict(bool(rules))}"
            )
        if score is None or not scores.is_recounted:
            continue
        n_scores += 1
        if not _are_close(score, log_odds[atom]):
            score_lines.append(
                f"{format_atom(atom)}: log-odds {score:.6f}, recounted {log_odds[atom]:.6f}"
            )

    counts = recount.count_ranks(row.query, log_odds)
    is_equal = counts == row.counts
    is_near = not is_equal and _is_near(scores, row, log_odds)
    name = f"{format_atom(row.query)}, {SIDE_NAMES[row.side]}"
    text = f"{name}: {_rank_text(row.counts)}, recounted {_rank_text(counts)}"
    key = row.position, row.side
    line = None if lines is None else lines.lines.get(key)
    return _RowDifference(
        n_candidates=len(log_odds),
        verdicts=verdicts,
        n_scores=n_scores,
        scores=score_lines,
        rank="" if is_equal or is_near else text,
        is_near_boundary=is_near,
        line=None
        if line is None
        else _compare_line(scores, row, derivers, log_odds, line, deadline),
    )


def _derive_candidates(
    subject: Subject,
    row: _Row,
    atoms: Atoms,
    known: set[Atom],
    deadline: float,
) -> dict[Atom, list[int]]:
    """The candidates of a row, each with the rules that derive it, a fact from other facts."""
    task = subject.evaluator.task
    derivers = recount.find_derivers(
        subject.logic, atoms, row.query, row.side, deadline
    )
    pool = task.entity_pool.tolist()

    candidates: dict[Atom, list[int]] = {}
    for atom in recount.list_candidates(row.query, row.side, pool, known):
        rules = derivers.get(atom[row.side], [])
        if atom in subject.facts.all and not recount.is_proved(
            subject.logic,
            subject.facts,
            atom,
            task.max_height,
            MAX_ATOMS,
            deadline,
        ):
            rules = []
        candidates |= {atom: rules}
    return candidates


def _compare_line(
    scores: _ScoreSource,
    row: _Row,
    derivers: Mapping[Atom, Sequence[int]],
    log_odds: Mapping[Atom, float],
    line: Line,
    deadline: float,
) -> str:
    """Where a line of a details file differs, as text; empty if it agrees."""
    others = None
    if scores.has_other_facts:
        others = scores.other_facts(row.query, row.side, deadline)
    is_exact = scores.is_recounted

    recounted = RecountedRow(
        query=row.query,
        text=proof_names(scores.subject.evaluator.task.dataset).format_atom(
            row.query
        ),
        log_odds=log_odds,
        listed=frozenset(
            atom for atom in derivers if derivers[atom] or scores.lists_all
        ),
        is_provable=bool(derivers[row.query]),
        tolerance=LOG_ODDS_TOLERANCE if is_exact else SEARCH_TOLERANCE,
        other_facts=others,
    )
    errors = details_lines.line_errors(line, recounted)
    return (
        f"line {line.number}, {recounted.text}, {SIDE_NAMES[row.side]}: {'; '.join(errors)}"
        if errors
        else ""
    )


def _are_close(one: float, other: float) -> bool:
    """Whether two log-odds differ by rounding alone."""
    return one == other or abs(one - other) <= LOG_ODDS_TOLERANCE


def _is_near(
    scores: _ScoreSource, row: _Row, log_odds: Mapping[Atom, float]
) -> bool:
    """Whether the rounding of scores alone explains the engine's counts; scores that are taken are the engine's."""
    return scores.is_recounted and details_lines.explains_counts(
        row.counts, row.query, log_odds, LOG_ODDS_TOLERANCE
    )


def _verdict(is_derivable: bool) -> str:
    """A verdict on an atom as text."""
    return "derivable" if is_derivable else "not derivable"


def _rank_text(counts: RankCounts) -> str:
    """Counts as text, with the reciprocal rank that follows from them."""
    reciprocal = recount.expected_reciprocal_rank(counts)
    return (
        f"{counts.n_better} better and {counts.n_equal} equal "
        f"of {counts.n_candidates} (1/rank {reciprocal:.4f})"
    )


def _summarise_rows(
    scores: _ScoreSource,
    differences: Sequence[_RowDifference],
    n_rows: int,
    n_lines: int | None,
    seconds: float,
    time_notes: Sequence[str],
) -> list[Agreement]:
    """The comparisons of verdicts, scores, ranks and lines, which took so many seconds.

    Args:
      n_lines: of a details file; None without one.
    """
    verdict_notes: list[str] = []
    n_candidates = sum(row.n_candidates for row in differences)
    n_verdicts = 0 if scores.lists_all else n_candidates
    if scores.lists_all:
        verdict_notes = [
            f"verdicts not compared: {scores.subject.evaluator.score} scores every candidate"
        ]
    agreements = [
        _summarise(
            "verdicts", "candidates", n_verdicts, n_verdicts, seconds,
            [line for row in differences for line in row.verdicts], (),
        )
    ]  # fmt: skip
    if scores.is_recounted:
        n_scores = sum(row.n_scores for row in differences)
        agreements.append(
            _summarise(
                "scores", "candidates", n_scores, scores.n_listed,
                seconds, [line for row in differences for line in row.scores],
                (),
            )
        )  # fmt: skip
    notes = [*time_notes, *_rank_notes(scores, differences), *verdict_notes]
    ranks = [row.rank for row in differences if row.rank]
    agreements.append(
        _summarise(
            "ranks", "queries", len(differences), n_rows, seconds, ranks, notes
        )
    )
    if n_lines is not None:
        lines = [row.line for row in differences if row.line is not None]
        agreements.append(
            _summarise(
                "details", "lines", len(lines), n_lines, seconds,
                [line for line in lines if line], (),
            )
        )  # fmt: skip
    return agreements


def _summarise(
    kind: str,
    unit: str,
    n_compared: int,
    n_total: int,
    seconds: float,
    disagreements: Sequence[str],
    notes: Sequence[str],
) -> Agreement:
    """A comparison with a line for each item that differs."""
    return Agreement(
        kind=kind,
        unit=unit,
        n_compared=n_compared,
        n_disagreeing=len(disagreements),
        n_total=n_total,
        seconds=seconds,
        disagreements=tuple(disagreements),
        notes=tuple(notes),
    )


def compare_line_numbers(
    details: Details, n_queries: int, sides: Sequence[int]
) -> Agreement:
    """Find the lines that a details file lacks.

    Args:
      n_queries: of its split.
      sides: that are ranked.
    """
    missing = details_lines.missing_lines(details, n_queries, sides)
    n_expected = len(details.lines) + len(missing)
    return _summarise(
        "lines", "lines", n_expected, n_expected, 0.0, missing, ()
    )


def _rank_notes(
    scores: _ScoreSource, differences: Sequence[_RowDifference]
) -> list[str]:
    """Lines on the scores behind the ranks."""
    notes: list[str] = []
    n_near = sum(row.is_near_boundary for row in differences)
    if n_near:
        notes.append(
            f"{n_near} ranks differ by the rounding of scores alone, and count as equal"
        )
    score = scores.subject.evaluator.score
    if score.needs & {"search", "questions"}:
        notes.append(f"scores are the policy's ({score})")
    elif not scores.is_recounted:
        notes.append(f"scores are taken as they are ({score})")
    elif scores.n_not_recounted and differences:
        notes.append(
            f"ranks take the confidences of {scores.n_not_recounted:,} rules as funcppo counts them"
        )
    if scores.relations_taken:
        notes.append(
            f"of {len(scores.relations_taken)} relations the share of derived atoms with other facts is as funcppo "
            "counts it: there was no time to derive them all"
        )
    return notes


# -- proofs


def compare_proofs(
    subject: Subject, ranked: Ranking, seconds: float
) -> Agreement:
    """Check a proof of each answer of ranked queries that the engine proves.

    Args:
      ranked: the queries.
    """
    start = time.monotonic()
    answers = _answers_to_prove(ranked)
    format_atom = proof_names(subject.evaluator.task.dataset).format_atom
    n_checked, n_without = 0, 0
    lines: list[str] = []
    for atom, row in answers.items():
        if time.monotonic() > start + seconds:
            break
        errors = _proof_errors(subject, atom, ranked.queries[row])
        if errors is None:
            n_without += 1
            continue
        n_checked += 1
        if errors:
            lines.append(
                f"{format_atom(atom)}: proved, recounted: {'; '.join(errors)}"
            )

    n_late = len(answers) - n_checked - n_without
    notes = list(_time_notes(n_late, "proofs", seconds))
    if n_without:
        notes.append(f"no proof was found of {n_without} provable answers")
    return Agreement(
        kind="proofs",
        unit="proofs",
        n_compared=n_checked,
        n_disagreeing=len(lines),
        n_total=len(answers),
        seconds=time.monotonic() - start,
        disagreements=tuple(lines),
        notes=tuple(notes),
    )


def _proof_errors(
    subject: Subject, atom: Atom, query: Tensor
) -> list[str] | None:
    """What is wrong with the engine's proof of an atom; None if a policy's search finds none."""
    evaluator = subject.evaluator
    assert evaluator.prove is not None, "the evaluator finds proofs"
    try:
        (proof,) = evaluator.prove(query[None])
    except AssertionError as error:  # the engine checks its proofs too
        return [str(error)]
    if proof is None:
        return ["there is no proof"] if has_recount(evaluator.score) else None
    if recount.read_atoms([proof.nodes[0].goal]) != [atom]:
        return ["it proves another atom"]
    return recount.proof_errors(
        subject.logic, proof, subject.facts.all, evaluator.task.max_height
    )


def _answers_to_prove(ranked: Ranking) -> dict[Atom, int]:
    """The answers that the engine derives, with their rows among the queries."""
    queries = recount.read_atoms(ranked.queries.tolist())
    provable = ranked.query_row[ranked.answer_provable].tolist()
    return {queries[row]: row for row in provable}


# -- evidence


class Explain(Protocol):
    """Gives the evidence that a run weighs."""

    def __call__(self, atom: Tensor, side: int, /) -> Explanation | None:
        """The evidence of an atom as an answer about one side; None if no rule derives it."""
        ...


def compare_evidence(
    subject: Subject,
    explain: Explain,
    left_out: LeftOut,
    ranked: Ranking,
    seconds: float,
    *,
    weighs_links: bool = True,
    weighs_walks: bool = False,
    weighs_degrees: bool = False,
) -> Agreement:
    """Count the evidence of answers of ranked queries again: rules, groundings, fan-out, linking facts, degrees.

    Args:
      explain: gives the engine's.
      left_out: what is left out of the evidence of an answer that is a known fact.
      weighs_links: the facts that link the two entities are evidence.
      weighs_walks: the probabilities of random walks are evidence too.
      weighs_degrees: the answer's degrees in all relations are evidence too.
    """
    start = time.monotonic()
    format_atom = proof_names(subject.evaluator.task.dataset).format_atom
    rows = _rows(ranked)
    lines: list[str] = []
    n_compared, n_late = 0, 0
    for i, row in enumerate(rows):
        if time.monotonic() > start + seconds:
            n_late += len(rows) - i
            break
        found = explain(torch.tensor(row.query), row.side)
        deadline = _item_deadline(start, seconds)
        try:
            again = _recount_evidence(
                subject, row, left_out, weighs_walks, deadline
            )
        except recount.RecountLimitError:
            n_late += 1
            continue
        if again and not weighs_links:
            again |= {"linking facts": []}
        if again and weighs_degrees:
            again |= _recount_degrees(subject, row)
        n_compared += 1

        engine = _evidence_counts(found)
        name = f"{format_atom(row.query)}, {SIDE_NAMES[row.side]}"
        lines += [
            f"{name}: {key} {engine.get(key, 0)}, recounted {again.get(key, 0)}"
            for key in dict.fromkeys((*engine, *again))
            if _differ(engine.get(key, 0), again.get(key, 0))
        ]
    return Agreement(
        kind="evidence",
        unit="answers",
        n_compared=n_compared,
        n_disagreeing=len({line.split(": ")[0] for line in lines}),
        n_total=len(rows),
        seconds=time.monotonic() - start,
        disagreements=tuple(lines),
        notes=_time_notes(n_late, "answers", seconds),
    )


def _evidence_counts(found: Explanation | None) -> dict[str, object]:
    """The counts of the engine, by what they count; empty if no rule derives the candidate."""
    if found is None:
        return {}
    (own_degree,) = found.of_kind("own-degree")
    counts: dict[str, object] = {"known answers": own_degree.detail}
    for rule in found.rules:
        counts |= {
            f"rule {rule.rule}": (
                rule.n_groundings,
                rule.fan_out,
                rule.n_all_groundings,
            )
        }
        if rule.walk is not None:
            counts |= {f"walk of rule {rule.rule}": rule.walk}
    # Those of no fact are not listed.
    for term in found.of_kind("degree"):
        predicate, place, n_facts = term.detail
        counts |= {_degree_name(predicate, place): n_facts}
    links = sorted(term.detail[:2] for term in found.of_kind("fact"))
    return counts | {"linking facts": links}


def _degree_name(predicate: int, place: int) -> str:
    """What a degree counts."""
    return f"facts of relation {predicate} whose {SIDE_NAMES[place]} it is"


def _differ(one: object, other: object) -> bool:
    """Whether two numbers of an answer differ, probabilities by more than their rounding."""
    if isinstance(one, float) and isinstance(other, float):
        return not math.isclose(
            one, other, rel_tol=WALK_TOLERANCE, abs_tol=WALK_ROUNDING
        )
    return one != other


def _recount_evidence(
    subject: Subject,
    row: _Row,
    left_out: LeftOut,
    weighs_walks: bool,
    deadline: float,
) -> dict[str, object]:
    """The counts of `_evidence_counts` over the sets of the recount.

    Raises:
      OutOfTime: the deadline is reached.
    """
    facts = subject.facts.all
    answer, given = row.query[row.side], row.query[3 - row.side]
    unknown = _unknown_facts(subject, row, left_out)
    counts: dict[str, object] = {}
    for i, rule in enumerate(subject.logic.rules):
        arguments = (
            subject.logic,
            rule,
            subject.facts,
            row.query,
            row.side,
            unknown,
            deadline,
        )
        found = recount.count_groundings(*arguments)
        if answer not in found:
            continue
        groundings = found[answer], len(found), sum(found.values())
        counts |= {f"rule {i}": groundings}
        walks = recount.walk_probabilities(*arguments) if weighs_walks else None
        if walks is not None:
            counts |= {f"walk of rule {i}": float(walks.get(answer, 0))}
    if not counts:
        return {}
    links = [
        (fact[0], place)
        for fact in facts - unknown
        if len(fact) == 3
        for place in (1, 2)
        if (fact[place], fact[3 - place]) == (answer, given)
        and (fact[0], place) != (row.query[0], row.side)
    ]
    known = sum(
        fact[0] == row.query[0] and fact[row.side] == answer
        for fact in facts - {row.query}
    )
    return counts | {"known answers": known, "linking facts": sorted(links)}


def _recount_degrees(subject: Subject, row: _Row) -> dict[str, object]:
    """How many facts an answer has by relation and place, other than those of the query."""
    answer = row.query[row.side]
    counts: dict[str, object] = {}
    places = [
        (fact[0], place)
        for fact in subject.facts.all
        if len(fact) == 3
        for place in SIDE_NAMES
        if fact[place] == answer
    ]
    for place, n_facts in Counter(places).items():
        if place != (row.query[0], row.side):
            counts |= {_degree_name(*place): n_facts}
    return counts


def _unknown_facts(subject: Subject, row: _Row, left_out: LeftOut) -> set[Atom]:
    """The facts that a query leaves out; none if its atom is no known one."""
    facts = subject.facts.all
    if row.query not in facts:
        return set()
    if left_out == "fact":
        return {row.query}
    pair = set(row.query[1:])
    return {a for a in facts if len(a) == 3 and set(a[1:]) == pair}


# -- time


def _item_deadline(start: float, seconds: float) -> float:
    """The time until which one item may be worked on."""
    return min(start + seconds, time.monotonic() + MAX_SHARE * seconds)


def _time_notes(n: int, unit: str, seconds: float) -> tuple[str, ...]:
    """A line on the items for which there was no time."""
    if not n:
        return ()
    return (f"{n:,} {unit} not compared within {seconds:g} seconds",)


def rank_sample(
    evaluator: Evaluator, split: np.ndarray, rows: Iterable[int]
) -> Ranking:
    """Rank some queries of a split as the engine does.

    Raises:
      ValueError: a query cannot be ranked (see `ranking.check_split`).
    """
    query_id = np.array(list(rows), dtype=np.int64)
    queries = split[query_id]
    ranking.check_split(evaluator.task, queries, evaluator.protocol)
    return ranking.rank_split(
        evaluator.task, queries, evaluator.score, evaluator.protocol, query_id
    )
