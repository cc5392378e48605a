"""Compare what funcppo says of a data set or a run with a recount on a sample (`funcppo.evaluation.recount`).

`compare_supports` counts rules again, `compare_ranks` lists and ranks the candidates of queries again, and
`compare_proofs` checks proofs of their answers again. Each works within its seconds, compares fewer items where these
do not suffice, and says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from funcppo.data import proof_names
from funcppo.evaluation import ranking, recount
from funcppo.evaluation.evaluator import Evaluator
from funcppo.evaluation.evidence_explanation import Explanation
from funcppo.evaluation.ranking import Ranking
from funcppo.evaluation.recount import Atom, Atoms, Logic, RankCounts
from funcppo.evaluation.scorers import (
    DIRECTED_LINKED_LAST,
    LINKED_SHIFT,
    MAX_LINKED_LOG_ODDS,
    split_linked_last,
)
from funcppo.logic.question_types import LeftOut
from funcppo.logic.triple_index import SIDE_NAMES
from funcppo.prover.task import ProverTask, known_triples

RULE_SCORES = ("max-confidence", "noisy-or")
# log-odds; float64 sums in another order, as the recount makes them, differ by less
LOG_ODDS_TOLERANCE = 1e-7
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
    score: str  # the name of the evaluator's score
    logic: Logic
    facts: Atoms


class _Row(NamedTuple):
    """A query on a side, and what the engine says of it."""

    query: Atom
    side: int
    counts: RankCounts


class _RowDifference(NamedTuple):
    """Where the recount of a row differs."""

    n_candidates: int
    verdicts: list[str]
    rank: str  # empty if it agrees
    is_near_boundary: bool  # it differs by the rounding of scores alone


def make_subject(evaluator: Evaluator, score: str) -> Subject:
    """Read the data of an evaluator's task for the recount.

    Args:
      score: the name of the evaluator's score.
    """
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
    return Subject(evaluator=evaluator, score=score, logic=logic, facts=facts)


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
) -> list[Agreement]:
    """Find the candidates of ranked queries again, with their scores and ranks.

    Confidences are those of `rule_counts`, and the engine's for rules that were not recounted. Scores of a policy are
    taken from the engine.

    Returns:
      The comparison of verdicts on candidates, and that of ranks.
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
            difference = _compare_row(scores, row, atoms, known, deadline)
        except recount.RecountLimitError:
            continue
        differences.append(difference)
    notes = _time_notes(len(rows) - len(differences), "queries", seconds)
    if atoms is None:
        notes += (
            f"T_P to height {task.max_height - 1} takes too long, or holds more than {MAX_ATOMS:,} atoms",
        )
    return _summarise_rows(
        scores, differences, len(rows), time.monotonic() - start, notes
    )


class _ScoreSource:
    """The scores of candidates by rule counts, or by the engine's policy."""

    def __init__(
        self, subject: Subject, ranked: Ranking, rule_counts: RuleCounts
    ) -> None:
        task = subject.evaluator.task
        self.subject = subject
        self.is_policy = _is_policy_score(subject.score)
        self.lists_all = subject.evaluator.protocol.score_unprovable
        atoms = recount.read_atoms(ranked.scored_atom.tolist())
        sides = ranked.scored_side.tolist()
        keys = zip(atoms, sides, strict=True)
        self.engine_scores = dict(zip(keys, ranked.log_odds.tolist()))
        _, ending = split_linked_last(subject.score)
        self.n_links = recount.count_links(subject.facts.all if ending else ())

        counts = dict(enumerate(_engine_counts(task))) | dict(rule_counts)
        smoothing = float(task.cfg.smoothing or 0.0)
        self.confidence = {
            i: support / (pairs + smoothing) if support else 0.0
            for i, (support, pairs) in counts.items()
        }
        self.n_not_recounted = len(counts) - len(rule_counts)

    def engine_score(self, atom: Atom, side: int) -> float | None:
        """The log-odds that the engine gives a candidate of a side; None if it lists none."""
        of_all_sides = self.engine_scores.get((atom, 0))
        return self.engine_scores.get((atom, side), of_all_sides)

    def log_odds(
        self, atom: Atom, side: int, rules: Sequence[int], *, is_derivable: bool
    ) -> float:
        """The log-odds of a candidate's score.

        Args:
          rules: those that derive it.
          is_derivable: it is derived, a fact from other facts.
        """
        if not self.is_policy:
            name, ending = split_linked_last(self.subject.score)
            confidences = [self.confidence[i] for i in rules]
            score = recount.rule_score(name, confidences)
            is_directed = ending == DIRECTED_LINKED_LAST
            if ending and self._is_linked(atom, is_directed=is_directed):
                return min(score, MAX_LINKED_LOG_ODDS) - LINKED_SHIFT
            return score
        if is_derivable or self.lists_all:
            score = self.engine_score(atom, side)
            return -math.inf if score is None else score
        return -math.inf

    def _is_linked(self, atom: Atom, *, is_directed: bool) -> bool:
        """Whether a fact other than an atom itself links its entities, in its direction or in either."""
        pair, back = atom[1:], atom[:0:-1]
        n_links = self.n_links[pair]
        if not is_directed and pair != back:
            n_links += self.n_links[back]
        return n_links > (atom in self.subject.facts.all)


def _is_policy_score(score: str) -> bool:
    """Whether a score is a policy's."""
    name, _ = split_linked_last(score)
    return not name.startswith(RULE_SCORES)


def _rows(ranked: Ranking) -> list[_Row]:
    """The rows of a ranking, both sides of a query together."""
    queries = recount.read_atoms(ranked.queries.tolist())
    counts = zip(*(column.tolist() for column in ranked.counts))
    rows = [
        (query_row, _Row(queries[query_row], side, RankCounts(*row_counts)))
        for query_row, side, row_counts in zip(
            ranked.query_row.tolist(), ranked.side.tolist(), counts
        )
    ]
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def _compare_row(
    scores: _ScoreSource,
    row: _Row,
    atoms: Atoms,
    known: set[Atom],
    deadline: float,
) -> _RowDifference:
    """The differences of a row.

    Args:
      atoms: what T_P derives below the height of the task.
      known: all triples of the splits, and the facts.

    Raises:
      OutOfTime: the deadline is reached.
    """
    task = scores.subject.evaluator.task
    derivers = recount.find_derivers(
        scores.subject.logic, atoms, row.query, row.side, deadline
    )
    log_odds: dict[Atom, float] = {}
    verdicts: list[str] = []
    format_atom = proof_names(task.dataset).format_atom
    pool = task.entity_pool.tolist()
    for atom in recount.list_candidates(row.query, row.side, pool, known):
        rules = derivers.get(atom[row.side], [])
        if atom in scores.subject.facts.all and not recount.is_proved(
            scores.subject.logic,
            scores.subject.facts,
            atom,
            task.max_height,
            MAX_ATOMS,
            deadline,
        ):
            rules = []
        is_derivable = bool(rules)
        score = scores.log_odds(
            atom, row.side, rules, is_derivable=is_derivable
        )
        log_odds |= {atom: score}
        is_listed = scores.engine_score(atom, row.side) is not None
        if is_listed != is_derivable and not scores.lists_all:
            verdicts.append(
                f"{format_atom(atom)}: {_verdict(is_listed)}, recounted {_verdict(is_derivable)}"
            )

    counts = recount.count_ranks(row.query, log_odds)
    is_equal = counts == row.counts
    is_near = not is_equal and _is_near(scores, row, log_odds)
    name = f"{format_atom(row.query)}, {SIDE_NAMES[row.side]}"
    text = f"{name}: {_rank_text(row.counts)}, recounted {_rank_text(counts)}"
    return _RowDifference(
        n_candidates=len(log_odds),
        verdicts=verdicts,
        rank="" if is_equal or is_near else text,
        is_near_boundary=is_near,
    )


def _is_near(
    scores: _ScoreSource, row: _Row, log_odds: Mapping[Atom, float]
) -> bool:
    """Whether the rounding of scores alone explains the engine's counts; the scores of a policy are the engine's."""
    if scores.is_policy:
        return False
    bounds = recount.bound_ranks(row.query, log_odds, LOG_ODDS_TOLERANCE)
    n_better, n_equal, n_candidates = row.counts
    return (
        n_candidates == len(log_odds)
        and n_better in bounds.n_better
        and n_better + n_equal in bounds.n_not_worse
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
    seconds: float,
    time_notes: Sequence[str],
) -> list[Agreement]:
    """The comparisons of verdicts and of ranks, which took so many seconds."""
    notes = list(time_notes)
    n_near = sum(row.is_near_boundary for row in differences)
    if n_near:
        notes.append(
            f"{n_near} ranks differ by the rounding of scores alone, and count as equal"
        )
    if scores.is_policy:
        notes.append(f"scores are the policy's ({scores.subject.score})")
    elif scores.n_not_recounted and differences:
        notes.append(
            f"ranks take the confidences of {scores.n_not_recounted:,} rules as funcppo counts them"
        )

    verdicts = [line for row in differences for line in row.verdicts]
    n_verdicts = sum(row.n_candidates for row in differences)
    if scores.lists_all:
        n_verdicts = 0
        notes.append(
            f"verdicts not compared: {scores.subject.score} scores every candidate"
        )
    ranks = [row.rank for row in differences if row.rank]
    return [
        Agreement(
            "verdicts", "candidates", n_verdicts, len(verdicts), n_verdicts,
            seconds, tuple(verdicts), (),
        ),
        Agreement(
            "ranks", "queries", len(differences), len(ranks), n_rows,
            seconds, tuple(ranks), tuple(notes),
        ),
    ]  # fmt: skip


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
    try:
        (proof,) = evaluator.prove(query[None])
    except AssertionError as error:  # the engine checks its proofs too
        return [str(error)]
    if proof is None:
        is_policy = _is_policy_score(subject.score)
        return None if is_policy else ["there is no proof"]
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
    weighs_walks: bool = False,
) -> Agreement:
    """Count the evidence of answers of ranked queries again: rules, groundings, fan-out, linking facts, degrees.

    Args:
      explain: gives the engine's.
      left_out: what is left out of the evidence of an answer that is a known fact.
      weighs_walks: the probabilities of random walks are evidence too.
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
    counts: dict[str, object] = {"known answers": found.own_degree}
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
    links = sorted((fact.predicate, fact.place) for fact in found.facts)
    return counts | {"linking facts": links}


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
    pair = {answer, given}
    unknown: set[Atom] = set()
    if row.query in facts:
        unknown = {row.query}
        if left_out == "pair":
            unknown = {a for a in facts if len(a) == 3 and set(a[1:]) == pair}

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
        evaluator.task, queries, evaluator.scorer, evaluator.protocol, query_id
    )
