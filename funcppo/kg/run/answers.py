"""Answers of open queries in names: ranked, with a verdict each, and on request with a proof and the evidence.

The command line and the Python interface both ask an `Answerer`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo.core.json_io import Json, shorten
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.queries import Query, read_query
from funcppo.kg.graph.writers import format_atom, free_variable, proof_names
from funcppo.kg.logic import proof
from funcppo.kg.logic.joins import RowBudgetExceeded
from funcppo.kg.logic.proof import Proof
from funcppo.kg.logic.proof_builder import Program
from funcppo.kg.logic.triple_index import HEAD, SIDE_NAMES, TAIL
from funcppo.kg.ranking import (
    evidence_explanation,
    explain,
    other_facts_explanation,
    rank_metrics,
    scorers,
)
from funcppo.kg.ranking.evidence_explanation import Explanation
from funcppo.kg.ranking.other_facts_explanation import OtherFacts
from funcppo.kg.ranking.prediction import (
    OpenQuery,
    RankedAnswers,
    UnprovedAnswers,
    probability,
)
from funcppo.kg.run import run_proofs
from funcppo.kg.run.subject import Subject, make_subject_predictor

PROVED, NOT_DERIVABLE, UNPROVED = "proved", "not derivable", "unproved"
NO_EMBEDDING = (
    "unproved answers: expected a run with link embeddings, which alone rank them, got none (`funcppo train` has them "
    "where valid gains by them, or by --questions.embedding True)"
)


# columns of answers in CSV
CSV_COLUMNS = (
    "query",
    "rank",
    "entity",
    "score",
    "known",
    "verdict",
    "head",
    "relation",
    "tail",
)


class AnswerProof(NamedTuple):
    """Why an answer is derivable."""

    dataset: Dataset
    proof: Proof | None  # None if the search found none
    # what a run weighs that learnt from questions, as an answer to the query
    evidence: Explanation | None
    # what other facts of the relation add, by a score that reads them
    other_facts: OtherFacts | None = None

    def __repr__(self) -> str:
        """The lines of the proof and the evidence, for people."""
        return "\n".join(self.to_lines())

    def to_lines(self) -> list[str]:
        """The proof as an indented tree, and the evidence or what other facts add."""
        score_lines: list[str] = []
        if self.other_facts is not None:
            score_lines.append(
                other_facts_explanation.to_line(self.dataset, self.other_facts)
            )
        if self.proof is None:
            return ["no proof was found", *score_lines]
        names = proof_names(self.dataset)
        text = proof.to_text(self.proof, names.format_atom, names.format_rule)
        lines = text.rstrip("\n").split("\n")
        if self.evidence is not None:
            lines += evidence_explanation.to_lines(self.dataset, self.evidence)
        return lines + score_lines

    def to_json(self) -> Json:
        """The proof, and the evidence or what other facts add, as JSON values."""
        fields: Json = {"proof": None}
        if self.proof is not None:
            names = proof_names(self.dataset)
            fields["proof"] = json.loads(proof.to_json(self.proof, *names))
        if self.evidence is not None:
            fields["evidence"] = evidence_explanation.to_json(
                self.dataset, self.evidence
            )
        if self.other_facts is not None:
            fields["other_facts"] = other_facts_explanation.to_json(
                self.dataset, self.other_facts
            )
        return fields


class Answer(NamedTuple):
    """One answer of a query."""

    rank: int  # 1 + the number of answers that score more
    entity: str
    # a probability by every score but evidence, whose log-odds are a sum of weights
    score: float
    known: bool  # in some split or in facts.txt
    # proved, not derivable (from other facts), or unproved: not derivable, ranked by its prior
    verdict: str
    head: str
    relation: str
    tail: str
    log_score: float | None  # as in the lines of --details; None for 0
    quantised_score: int | None  # the same
    # by link embeddings, of an unproved answer alone
    prior: float | None = None
    explanation: AnswerProof | None = None

    def to_json(self) -> Json:
        """The answer as JSON values."""
        fields: Json = self._asdict()
        del fields["explanation"]
        if self.prior is None:
            del fields["prior"]
        if self.explanation is not None:
            fields |= self.explanation.to_json()
        return fields


class QueryAnswers(NamedTuple):
    """The best answers of a query."""

    query: str
    side: str  # head or tail: what is asked for
    answers: tuple[Answer, ...]  # best first
    n_new: int  # all answers that the rules derive and that are not known
    n_known: int  # known answers
    # 1 if the entity of the query is derivable, and left out
    n_self: int
    n_entities: int  # all entities
    # that no rule derives and that are not known; None where they are not asked for
    n_unproved: int | None = None

    def to_json(self) -> Json:
        """The answers as JSON values."""
        fields: Json = self._asdict()
        fields["answers"] = [answer.to_json() for answer in self.answers]
        if self.n_unproved is None:
            del fields["n_unproved"]
        return fields


def csv_row(fields: Mapping[str, object]) -> list[object]:
    """A row of CSV of an answer with its query, by the names of the columns; true and false are written as in JSON."""
    known = "true" if fields["known"] else "false"
    return [{**fields, "known": known}[name] for name in CSV_COLUMNS]


class Answerer:
    """Answers open queries by the score of a subject.

    Attributes:
      subject: what scores candidates.
      predictor: lists, scores and ranks them.
    """

    def __init__(self, subject: Subject) -> None:
        """Index what is known and derivable.

        Raises:
          ValueError: the score is greedy.
        """
        self.subject = subject
        self.predictor = make_subject_predictor(subject)

    @property
    def dataset(self) -> Dataset:
        """The data set."""
        return self.subject.task.dataset

    @cached_property
    def _program(self) -> Program:
        return explain.build_program(self.subject.task)

    def answer(
        self,
        queries: Sequence[OpenQuery],
        *,
        k: int | None = 10,
        with_known: bool = False,
        with_self: bool = False,
        min_score: float = 0.0,
        with_explanations: bool = False,
        with_unproved: bool = False,
    ) -> list[QueryAnswers]:
        """The best answers of some queries.

        Args:
          queries: in any order.
          k: answers of a query, those of `with_known` included; None for all.
          with_known: list known answers too, among the others.
          with_self: list the entity of a query among its own answers, also where nothing says that the relation may
            link an entity to itself.
          min_score: leave out answers that score less.
          with_explanations: give each listed answer its proof and evidence.
          with_unproved: list after all of these the entities that no rule derives, by their prior by link embeddings.

        Raises:
          ValueError: unproved answers are asked for, and the subject has no link embeddings.
        """
        embedding = self.subject.embedding
        if with_unproved and embedding is None:
            raise ValueError(NO_EMBEDDING)
        found: list[QueryAnswers] = []
        for ranked in self.predictor.rank(
            queries, with_known=with_known, with_self=with_self
        ):
            named = self._name_answers(ranked, k, min_score, with_explanations)
            if with_unproved and embedding is not None:
                unproved = self.predictor.rank_unproved(
                    ranked, embedding, with_self=with_self
                )
                named = self._add_unproved(named, ranked.query, unproved, k)
            found.append(named)
        return found

    def _add_unproved(
        self,
        named: QueryAnswers,
        query: OpenQuery,
        unproved: UnprovedAnswers,
        k: int | None,
    ) -> QueryAnswers:
        """The answers of a query, and after them the first unproved ones, at most k in all."""
        n_left = None if k is None else k - len(named.answers)
        columns = (column[:n_left].tolist() for column in unproved)
        answers = [
            self._answer(query, entity, rank_metrics.ZERO_SCORE)._replace(
                rank=rank, verdict=UNPROVED, prior=prior
            )
            for entity, prior, rank in zip(*columns)
        ]
        return named._replace(
            answers=(*named.answers, *answers), n_unproved=len(unproved.entity)
        )

    def _name_answers(
        self,
        ranked: RankedAnswers,
        k: int | None,
        min_score: float,
        with_explanations: bool,
    ) -> QueryAnswers:
        """The first answers of a query, in names."""
        dataset, query = self.dataset, ranked.query
        listed: list[Answer] = []
        columns = (
            column[:k].tolist()
            for column in (
                ranked.entity,
                ranked.score,
                ranked.rank,
                ranked.is_known,
                ranked.is_derivable,
            )
        )

        for entity, score, rank, is_known, is_derivable in zip(*columns):
            if probability(score) < min_score:
                break
            answer = self._answer(query, entity, score)
            listed.append(
                answer._replace(
                    rank=rank,
                    known=is_known,
                    verdict=PROVED if is_derivable else NOT_DERIVABLE,
                    explanation=self.explain(
                        self._atom(query, entity), query.side
                    )
                    if with_explanations and is_derivable
                    else None,
                )
            )
        return QueryAnswers(
            query=format_query(dataset, query),
            side=SIDE_NAMES[query.side],
            answers=tuple(listed),
            n_new=ranked.n_new,
            n_known=ranked.n_known,
            n_self=ranked.n_self,
            n_entities=dataset.n_constants,
        )

    def _atom(self, query: OpenQuery, entity: int) -> Tensor:
        """The query with an entity in place of its variable, [W]."""
        head, tail = (
            (entity, query.given)
            if query.side == HEAD
            else (query.given, entity)
        )
        width = self.subject.task.sizes.atom_width
        padding = [0] * (width - TAIL - 1)
        return torch.tensor([query.predicate, head, tail, *padding])

    def _answer(self, query: OpenQuery, entity: int, score: int) -> Answer:
        """An answer with its names and its score."""
        dataset = self.dataset
        atom: list[int] = self._atom(query, entity)[: TAIL + 1].tolist()  # pyright: ignore[reportUnknownMemberType]
        relation, head, tail = atom
        is_zero = score <= rank_metrics.ZERO_SCORE
        return Answer(
            rank=0,
            entity=dataset.entities[entity - 1],
            score=probability(score),
            known=False,
            verdict=PROVED,
            head=dataset.entities[head - 1],
            relation=dataset.predicates[relation - 1],
            tail=dataset.entities[tail - 1],
            log_score=None if is_zero else rank_metrics.log_score(score),
            quantised_score=None if is_zero else score,
        )

    def score(self, atoms: Tensor, side: int) -> list[float]:
        """The scores of ground atoms of two arguments as answers about a side, of facts without themselves.

        Args:
          atoms: [n, W].
        """
        log_odds = self.predictor.score(atoms, side)
        scores = rank_metrics.quantise(log_odds).tolist()
        return [probability(score) for score in scores]

    def explain(self, atom: Tensor, side: int) -> AnswerProof:
        """The proof of a derivable atom and, of a run that weighs evidence, what it weighs for one side.

        By a score with other facts, also what these add.

        Args:
          atom: ground and of two arguments [W]; a known fact is proved from other facts.
        """
        run = self.subject.policy_run
        task = self.subject.task
        is_by_query = run is None and task.answers_plan is not None
        if not is_by_query and (run is None or run.questions is None):
            task = self.predictor.task_for(atom[None])
        evidence = None
        if run is not None:
            run = dataclasses.replace(run, task=task)
            evidence = run_proofs.explain_answer(run, atom, side)
            found = run_proofs.most_probable_proof(
                run,
                atom,
                self._program,
                evidence if side == TAIL else None,
            )
        else:
            found = explain.smallest_proof(task, atom, self._program)
        if found is None:
            found = self._proof_from_other_facts(atom)
        others = None
        if scorers.has_other_facts(self.subject.score):
            (others,) = other_facts_explanation.explain_answers(
                task, atom[None], side
            )
        return AnswerProof(self.dataset, found, evidence, others)

    def _proof_from_other_facts(self, atom: Tensor) -> Proof | None:
        """A smallest proof of an atom that may be a fact; None if there is none, or it takes too much work."""
        try:
            return explain.prove_from_other_facts(
                self.subject.task, atom, explain.MAX_FACT_PROOF_ROWS
            ).proof
        except RowBudgetExceeded:
            return None


def read_open_query(dataset: Dataset, text: str) -> tuple[OpenQuery, Query]:
    """Read a query with one variable, such as `locatedIn(france, X)`.

    Returns:
      The query, and how its names were read.

    Raises:
      ValueError: as `read_query` does, or not two arguments of which one is a variable.
    """
    if not text.strip():
        raise ValueError("query: expected an atom such as r(h, X), got nothing")
    query = read_query(dataset, text)
    predicate, *arguments = query.atom.tolist()
    arity = dataset.arities[predicate - 1]
    given = [term for term in arguments if 0 < term <= dataset.n_constants]
    if arity != TAIL or len(given) != 1:
        n_variables = arity - len(given)
        notes = "".join(f"; {note}" for note in query.notes)
        raise ValueError(
            f"query {shorten(text)}: expected two arguments, one of them a variable, as in r(h, X) or r(X, t), got "
            f"{arity} with {n_variables} variables (`funcppo prove` answers other queries){notes}"
        )
    side = TAIL if 0 < arguments[0] <= dataset.n_constants else HEAD
    return OpenQuery(predicate, side, given[0]), query


def format_query(dataset: Dataset, query: OpenQuery) -> str:
    """A query as text, with a variable for what is asked that is no entity's name."""
    variable = free_variable(dataset)
    arguments = (
        (variable, query.given)
        if query.side == HEAD
        else (query.given, variable)
    )
    return format_atom(dataset, np.array([query.predicate, *arguments]))


def score_atoms(subject: Subject, atoms: Tensor, side: int) -> list[float]:
    """The scores of ground atoms of two arguments as answers about a side, of facts without themselves."""
    return Answerer(subject).score(atoms, side)
