"""Single queries of a report: ranks and scores, proof, evidence, better candidates, or why there is no proof.

Scores and candidates are those of `Answerer`, which `funcppo predict` asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from funcppo.kg.answers import (
    Answerer,
    AnswerProof,
    OpenQuery,
    RankedAnswers,
    explain_answer,
    format_query,
    probability,
)
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.rules import format_atom, format_rule
from funcppo.kg.logic import prove
from funcppo.kg.logic.joins import RowBudgetExceeded
from funcppo.kg.logic.proof import Proof
from funcppo.kg.logic.prove import FailedRules, QueryResult
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.ranking import explain, rank_metrics
from funcppo.kg.ranking.explain import (
    MAX_FACT_PROOF_ROWS,
    prove_from_other_facts,
)
from funcppo.kg.ranking.ranking import stratified_sample
from funcppo.kg.search.task import PhaseCallback, ProverTask, ignore_phase
from funcppo.kg.show.report.names import display
from funcppo.kg.show.report.ranked_split import RankedSplit

# better candidates of a query and side that are listed, and those of them with a proof
MAX_BETTER = 5
MAX_BETTER_PROOFS = 1
# rules that are listed for a query without a proof
MAX_FAILED_RULES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class BetterAnswer:
    """A candidate that scores more than the answer; no split holds it."""

    entity: str
    score: float
    why: tuple[str, ...]
    """Its proof; empty where it is not given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SideEntry:
    """A query as a question about one side."""

    question: str
    rank: float
    """The mean rank of ties."""
    score: float
    n_better: int
    n_candidates: int
    evidence: tuple[str, ...]
    """What adds to the score; empty for a run that weighs none."""
    better: tuple[BetterAnswer, ...]
    """The first of the better candidates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryEntry:
    """A query."""

    atom: str
    relation: str
    status: str
    """proved, not derivable, or missed by the search."""
    proof: tuple[str, ...]
    """Why it is derivable, or which rules fail."""
    sides: tuple[SideEntry, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownQueries:
    """The queries that a report shows, with their proofs."""

    rows: np.ndarray
    """Rows among the ranked queries."""
    atoms: Tensor
    """[n, W]."""
    proofs: tuple[Proof | None, ...]


def choose_queries(
    answerer: Answerer,
    ranked: RankedSplit,
    n_queries: int,
    on_phase: PhaseCallback = ignore_phase,
) -> ShownQueries:
    """Choose queries, spread over relations, and prove them.

    Args:
      ranked: the ranked queries.
      n_queries: the most queries.
      on_phase: receives what is being done.
    """
    if not ranked.ranked:
        return ShownQueries(
            rows=np.arange(0), atoms=ranked.queries[:0], proofs=()
        )
    rows = stratified_sample(ranked.queries.numpy(), n_queries)
    atoms = ranked.queries[torch.from_numpy(rows)]
    provable = ranked.provable[: len(ranked.queries)][rows]
    proofs: list[Proof | None] = []
    for atom, is_provable in zip(atoms, provable):
        on_phase("proving queries", len(proofs), len(rows))
        found = answerer.explain(atom, TAIL).proof if is_provable else None
        proofs.append(found)
    return ShownQueries(rows=rows, atoms=atoms, proofs=tuple(proofs))


def iter_entries(
    answerer: Answerer, ranked: RankedSplit, shown: ShownQueries
) -> Iterator[QueryEntry]:
    """Yield what a report says of each query."""
    dataset = answerer.dataset
    n_sides = len(ranked.side) // max(len(ranked.queries), 1)
    for row, atom, proof in zip(shown.rows.tolist(), shown.atoms, shown.proofs):
        places = [side * len(ranked.queries) + row for side in range(n_sides)]
        is_provable = bool(ranked.provable[places[0]])
        is_scored = any(
            ranked.answer_score[i] > rank_metrics.ZERO_SCORE for i in places
        )

        status = "proved" if is_scored else "missed by the search"
        yield QueryEntry(
            atom=_atom_text(dataset, atom),
            relation=display(dataset.predicates[int(atom[0]) - 1]),
            status=status if is_provable else "not derivable",
            proof=_display_lines(AnswerProof(dataset, proof, None).to_lines())
            if is_provable
            else _display_lines(why_not(answerer.subject.task, atom)),
            sides=tuple(
                _side_entry(answerer, ranked, place, atom) for place in places
            ),
        )


def _side_entry(
    answerer: Answerer, ranked: RankedSplit, place: int, atom: Tensor
) -> SideEntry:
    """A query as a question about the side of its row."""
    side = int(ranked.side[place])
    score = int(ranked.answer_score[place])
    query = OpenQuery(int(atom[0]), side, int(atom[HEAD + TAIL - side]))
    run = answerer.subject.policy_run
    assert run is not None, "a run gives the scores"
    explanation = explain_answer(run, atom, side)
    evidence: list[str] = []
    if explanation is not None:
        evidence = explain.explanation_lines(answerer.dataset, explanation)

    n_better = int(ranked.n_better[place])
    trained = list(ranked.ranked.values())[-1]
    return SideEntry(
        question=display(format_query(answerer.dataset, query)),
        rank=float(trained.rank[place]),
        score=probability(score),
        n_better=n_better,
        n_candidates=int(ranked.n_candidates[place]),
        evidence=_display_lines(evidence),
        better=_better_answers(answerer, query, score) if n_better else (),
    )


def better_entities(
    answerer: Answerer, query: OpenQuery, score: int
) -> RankedAnswers:
    """The entities of the task's pool that score more than an answer, best first; no split holds them.

    Args:
      score: quantised, of the answer.
    """
    (answers,) = answerer.predictor.rank([query])
    pool = answerer.subject.task.entity_pool
    is_better = (answers.score > score) & torch.isin(answers.entity, pool)
    return answers._replace(
        entity=answers.entity[is_better],
        score=answers.score[is_better],
        rank=answers.rank[is_better],
        is_known=answers.is_known[is_better],
        is_derivable=answers.is_derivable[is_better],
    )


def _better_answers(
    answerer: Answerer, query: OpenQuery, score: int
) -> tuple[BetterAnswer, ...]:
    """The first entities that score more than an answer, with the proof of the first."""
    better = better_entities(answerer, query, score)
    dataset = answerer.dataset
    found: list[BetterAnswer] = []
    for entity, value in zip(
        better.entity[:MAX_BETTER].tolist(), better.score.tolist()
    ):
        why: list[str] = []
        if len(found) < MAX_BETTER_PROOFS:
            atom = [query.predicate, entity, query.given]
            if query.side == TAIL:
                atom = [query.predicate, query.given, entity]
            width = answerer.subject.task.sizes.atom_width
            padded = torch.tensor([*atom, *[0] * (width - len(atom))])
            proof = answerer.explain(padded, query.side)
            why = proof._replace(evidence=None).to_lines()

        answer = BetterAnswer(
            entity=display(dataset.entities[int(entity) - 1]),
            score=probability(value),
            why=_display_lines(why),
        )
        found.append(answer)
    return tuple(found)


def why_not(task: ProverTask, atom: Tensor) -> list[str]:
    """Lines on the rules whose head matches an atom, and on what they lack.

    Args:
      atom: ground [W], not derivable.
    """
    dataset = task.dataset
    try:
        found = prove_from_other_facts(task, atom, MAX_FACT_PROOF_ROWS)
    except RowBudgetExceeded:
        return [
            f"why not: more than {MAX_FACT_PROOF_ROWS:,} rows of joins (`funcppo prove` allows more)"
        ]

    failed = failed_rules(task, found, atom)
    if not failed.n_matching:
        return ["no rule's head matches it"]
    lines: list[str] = []
    for rule, goals in failed.rules:
        lines.append(
            f"rule {rule}: {format_rule(dataset, dataset.rules[rule])}"
        )
        text = ", ".join(format_atom(dataset, np.array(goal)) for goal in goals)
        lines.append(f"    nothing derived satisfies {text}")
    n_more = failed.n_matching - len(failed.rules)
    if n_more:
        lines.append(f"... and {n_more} more of {failed.n_matching} rules")
    return lines


def failed_rules(
    task: ProverTask, found: QueryResult, atom: Tensor
) -> FailedRules:
    """The first rules whose head matches an atom that is not proved, each with the goals that nothing satisfies.

    Args:
      found: what the attempt to prove it has found.
      atom: ground [W].
    """
    return prove.failed_rules(
        task.kb,
        task.sizes,
        found.model,
        tuple(atom.tolist()),
        object_identity=task.least_model.object_identity,
        n_rules=MAX_FAILED_RULES,
    )


def _atom_text(dataset: Dataset, atom: Tensor) -> str:
    """An atom as text."""
    return display(format_atom(dataset, atom.numpy()))


def _display_lines(lines: list[str]) -> tuple[str, ...]:
    """Lines as they are shown."""
    return tuple(map(display, lines))
