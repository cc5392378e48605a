"""Answers of open queries r(h, X) and r(X, t), whether any split holds them or not, with their names and proofs.

An `Answerer` lists the entities that the rules derive for each query, scores them by the score that ranks splits, and
orders them. Known true answers, of all splits and of facts.txt, are left out and counted, or listed and marked. The
rules are applied to the facts of train and of facts.txt, as in an evaluation. An evaluation ranks the entity of a query
among its own answers; on request it is left out and counted, unless some triple of the relation, or the head of a rule,
links an entity to itself. Where T_P is not held, each query derives its own answers.
"""

from __future__ import annotations

import csv
import hashlib
import html
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from funcppo.core import tree
from funcppo.core.files import (
    Json,
    escape_unprintable,
    shorten,
    write_file,
)
from funcppo.core.host import Deadline
from funcppo.core.types import F64, I32, I64, Bool
from funcppo.kg.graph import drawing
from funcppo.kg.graph.dataset import (
    Dataset,
    index_entities,
    predicate_ids,
)
from funcppo.kg.graph.loaders import format_parquet
from funcppo.kg.graph.rules import (
    Query,
    check_horn,
    format_atom,
    format_rule,
    free_variable,
    read_query,
)
from funcppo.kg.graph.text import format_name, unknown_name_message
from funcppo.kg.logic import derive
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.kb import HEAD, SIDE_NAMES, TAIL, TripleIndex, other_side
from funcppo.kg.logic.proof import Proof
from funcppo.kg.logic.prove import Clauses
from funcppo.kg.logic.row_index import (
    count_to,
    row_numbers,
    true_rows,
    unique_values,
)
from funcppo.kg.ranking import (
    evaluate,
    explain,
    rank_metrics,
    ranking,
    scoring,
)
from funcppo.kg.ranking.explain import Explanation
from funcppo.kg.run.fit import make_weights
from funcppo.kg.run.run import Run
from funcppo.kg.run.subject import Subject
from funcppo.kg.scores import learned
from funcppo.kg.scores.learned import LearnedScore, Weights
from funcppo.kg.search import guide
from funcppo.kg.search.task import (
    inference_world,
    is_unproved_fact,
    known_triples,
)

if TYPE_CHECKING:
    from pandas import DataFrame  # pyright: ignore[reportMissingImports,reportUnknownVariableType,reportMissingTypeStubs]

# Of a program, whose clauses hold; of triples, whose rules may be wrong; and of neither.
PROVED, DERIVED, NO_PROOF = "proved", "derived", "no proof"


# -- results


class Table:
    """Result that prints as a table."""

    def _title(self) -> str:
        raise NotImplementedError

    def _columns(self) -> tuple[str, ...]:
        raise NotImplementedError

    def _rows(self) -> list[tuple[object, ...]]:
        raise NotImplementedError

    def __repr__(self) -> str:
        """Format the title and the table, a row on each line, with control characters escaped."""
        rows = [self._columns(), *map(_cells, self._rows())]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths))
            for row in rows
        ]
        return "\n".join([self._title(), *map(str.rstrip, lines)])

    def _repr_html_(self) -> str:
        """Format the table as HTML, with names escaped."""

        def row_of(tag: str, cells: Iterable[str]) -> str:
            inner = "".join(
                f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells
            )
            return f"<tr>{inner}</tr>"

        body = "".join(row_of("td", _cells(row)) for row in self._rows())
        return (
            f"<table><caption>{html.escape(self._title())}</caption>"
            f"<thead>{row_of('th', self._columns())}</thead><tbody>{body}</tbody></table>"
        )

    def to_dataframe(self) -> DataFrame:
        """Return the table as a pandas data frame.

        Raises:
          ImportError: pandas is not installed.
        """
        try:
            import pandas  # pyright: ignore[reportMissingImports,reportMissingTypeStubs]
        except ImportError:
            raise ImportError(
                "to_dataframe needs pandas (pip install pandas)"
            ) from None
        return pandas.DataFrame(self._rows(), columns=list(self._columns()))  # pyright: ignore[reportUnknownVariableType,reportUnknownMemberType]


def _cells(row: Iterable[object]) -> tuple[str, ...]:
    """Format the cells of a row, each on one line with control characters escaped."""
    return tuple(map(_cell, row))


def _cell(value: object) -> str:
    """Format a value on one line, with control characters escaped."""
    if isinstance(value, float):
        return f"{value:.4f}"
    text = str(value)
    return text if text.isprintable() else ascii(text)[1:-1]


def proof_html(dataset: Dataset, proof: Proof | None, text: str) -> str:
    """Format the picture of a proof, if there is one, and a text as HTML, with names escaped."""
    nodes = () if proof is None else proof.nodes
    goals = ((node.goal, node.rule) for node in nodes)
    picture = drawing.draw_proof(dataset, goals, text.partition("\n")[0])
    return f"{picture}<pre>{html.escape(text)}</pre>"


class AnswerProof(NamedTuple):
    """Proof of an answer with the evidence for its score."""

    dataset: Dataset
    proof: Proof | None  # None if the search found none
    # what a run weighs that learnt from questions, as an answer to the query
    evidence: Explanation | None
    # what other facts of the relation add to the score; empty by another score
    other_facts: Json | None = None

    def __repr__(self) -> str:
        """Format the proof and the evidence as lines of text."""
        return "\n".join(self.to_lines())

    def _repr_html_(self) -> str:
        """Format a picture of the proof and the lines as HTML, with names escaped."""
        return proof_html(self.dataset, self.proof, repr(self))

    def to_lines(self) -> list[str]:
        """Format the proof as an indented tree, followed by the evidence and by the term of other facts."""
        lines = ["no proof was found"]
        if self.proof is not None:
            lines = explain.proof_text(self.dataset, self.proof).splitlines()
            if self.evidence is not None:
                lines += explain.explanation_lines(self.dataset, self.evidence)
        if self.other_facts:
            lines.append(explain.other_facts_line(self.other_facts))
        return lines

    @property
    def rule_text(self) -> str | None:
        """Return the rule at the root of the proof; None without a proof by a rule."""
        rule = None if self.proof is None else self.proof.nodes[0].rule
        if rule is None:
            return None
        return format_rule(self.dataset, self.dataset.rules[rule])

    def to_json(self) -> Json:
        """Return the proof, null without one, with the evidence and the term of other facts as JSON values."""
        found = self.proof and explain.proof_json(self.dataset, self.proof)
        fields: Json = {"proof": found}
        if self.evidence is not None:
            fields["evidence"] = explain.explanation_json(
                self.dataset, self.evidence
            )
        if self.other_facts:
            fields["other_facts"] = self.other_facts
        return fields


class Answer(NamedTuple):
    """Answer of a query with its rank, score and verdict."""

    rank: int  # 1 + the number of answers that score more
    entity: str
    # a probability by every score but evidence, whose log-odds are a sum of weights
    score: float
    known: bool  # in some split or in facts.txt
    # proved by the clauses of a program, derived by rules of triples, from other facts, or no proof
    verdict: str
    head: str
    relation: str
    tail: str
    log_score: float | None  # as in the lines of --details; None for 0
    quantised_score: int | None  # the same
    # log-odds by all other evidence, of an answer without a proof alone
    prior: float | None = None
    explanation: AnswerProof | None = None
    label: str | None = None  # of the entity, if it has one

    def to_json(self) -> Json:
        """Return the answer as JSON values."""
        fields: Json = self._asdict()
        del fields["explanation"]
        for name in ("prior", "label"):
            if fields[name] is None:
                del fields[name]
        if self.explanation is not None:
            fields |= self.explanation.to_json()
        return fields


@dataclass(frozen=True, repr=False)
class Predictions(Table, Sequence[Answer]):
    """Ranked answers of a query, best first: a sequence of `Answer` objects."""

    query: str
    """The query, with a variable for what is asked."""
    side: str
    """head or tail: what is asked for."""
    answers: tuple[Answer, ...]
    """The best answers."""
    score: str
    """The name of the score."""
    n_new: int
    """All answers that the rules derive and that are not known."""
    n_known: int
    """Known answers, in some split or in facts.txt, listed or not."""
    n_self: int
    """1 if the entity of the query is derivable and left out."""
    n_entities: int
    """All entities."""
    n_unproved: int | None = None
    """Those that no rule derives and that are not known; None where they are not asked for."""
    notes: tuple[str, ...] = ()
    """How the names of a query were read, where they could be read otherwise."""

    def __len__(self) -> int:
        """Return the number of listed answers."""
        return len(self.answers)

    @overload
    def __getitem__(self, index: int) -> Answer: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Answer]: ...
    def __getitem__(self, index: int | slice) -> Answer | Sequence[Answer]:
        """Return the answer at a position, or the answers of a slice."""
        return self.answers[index]

    def to_json(self) -> list[Json]:
        """Return the answers as JSON values."""
        return [answer.to_json() for answer in self.answers]

    def to_record(self) -> Json:
        """Return the query and its answers as one JSON object."""
        names = ["query", "side", "answers", "n_new", "n_known", "n_self"]
        names.append("n_entities")
        if self.n_unproved is not None:
            names.append("n_unproved")
        fields = {name: getattr(self, name) for name in names}
        return fields | {"answers": self.to_json()}

    def _repr_html_(self) -> str:
        """Format the table, and the explanation of the best answer if it has one, as HTML."""
        best = self.answers[0].explanation if self.answers else None
        return super()._repr_html_() + (best._repr_html_() if best else "")

    def _title(self) -> str:
        left_out = ", itself left out (with_self keeps it)" * self.n_self
        return (
            f"{self.query}: {self.n_new:,} new answer{'s' * (self.n_new != 1)}, {self.n_known:,} known{left_out}, "
            f"score {self.score}{''.join(f'; note: {note}' for note in self.notes)}"
        )

    def _columns(self) -> tuple[str, ...]:
        columns = ("rank", "entity", "score", "known", "verdict")
        has_label = any(a.label for a in self.answers)
        return (*columns, *["label"] * has_label)

    def _rows(self) -> list[tuple[object, ...]]:
        columns = self._columns()
        return [
            tuple(getattr(answer, name) for name in columns)
            for answer in self.answers
        ]


# -- answers of open queries


class OpenQuery(NamedTuple):
    """Query with one variable: relation(given, X) or relation(X, given)."""

    predicate: int
    side: int  # the place of the variable, HEAD or TAIL
    given: int  # the entity in the other place


class RankedAnswers(NamedTuple):
    """Answers of a query, best first; answers of equal score are in the order of entity ids."""

    query: OpenQuery
    entity: I64[Tensor, "n"]
    score: I64[Tensor, "n"]  # quantised log-odds, as in the lines of --details
    rank: I64[Tensor, "n"]  # 1 + the number of answers that score more
    is_known: Bool[Tensor, "n"]  # in some split or in facts.txt
    is_derivable: Bool[Tensor, "n"]  # by the rules, from other facts
    n_known: int  # known answers, listed or not
    n_self: int  # 1 if the entity of the query is derivable and left out
    # log-odds by all other evidence of those that no rule derives, NaN for others
    prior: F64[Tensor, "n"]


class Answerer:
    """Answers open queries by the score of a subject.

    Attributes:
      subject: what scores candidates.
      dataset: the data set.
      known: true triples, of all splits and of facts.txt.
    """

    def __init__(self, subject: Subject) -> None:
        """Index the known and the derivable triples.

        Raises:
          ValueError: candidates are limited by types, which evaluations alone do.
        """
        task = subject.task
        if task.dataset.by_type:
            raise ValueError(
                "candidates: expected a file of entities, got types, which `funcppo evaluate` takes for --holes entity"
            )
        self.subject = subject
        self.dataset = task.dataset
        n_constants = task.sizes.n_constants
        known = torch.from_numpy(known_triples(task.dataset))
        known = known.to(task.entity_pool.device)
        self.known = kbase.build_triple_index(known, n_constants)
        self._derivable: TripleIndex | None = None
        if task.answers_plan is None:
            self._derivable = kbase.build_triple_index(
                task.least_model.atoms, n_constants
            )

        # Relations of which a known triple, or the head of a rule, links an entity to itself.
        heads = torch.from_numpy(task.dataset.rules[:, 0]).to(known)
        atoms = kbase.binary_atoms(torch.cat([known, heads]).long())
        loops = atoms[atoms[:, HEAD] == atoms[:, TAIL], 0]
        self._has_loops = torch.isin(
            count_to(task.sizes.n_predicates + 1, known),
            loops,
        )

    @cached_property
    def clauses(self) -> Clauses:
        """Return the facts and rules of the subject for proofs."""
        return Clauses(self.subject.task.kb, self.subject.task.sizes)

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
    ) -> list[Predictions]:
        """Return the best answers of each query with names, one `Predictions` per query in the given order.

        Args:
          queries: in any order.
          k: answers of a query, those of `with_known` included; None for all.
          with_known: list known answers too, among the others.
          with_self: list the entity of a query among its own answers, also where nothing says that the relation may
            link an entity to itself.
          min_score: leave out answers that score less.
          with_explanations: give each listed answer its proof and evidence.
          with_unproved: list the entities that no rule derives too, by all other evidence: among these where the score
            ranks them so, otherwise after all of them.

        Raises:
          ValueError: unproved answers are asked for, and the subject has no score of every entity.
        """
        if with_unproved and self.subject.others is None:
            raise ValueError(
                "unproved answers: expected a run that learnt from questions, whose evidence alone ranks them, got none"
            )
        # All entities of the queries of a chunk are in memory.
        size = ranking.MAX_CHUNK_SCORES // max(self.dataset.n_constants, 1)
        size = max(size, 1) if with_unproved else max(len(queries), 1)
        ranked_answers = chain.from_iterable(
            self.rank(
                queries[i : i + size],
                with_known=with_known,
                with_self=with_self,
                with_unproved=with_unproved,
            )
            for i in range(0, len(queries), size)
        )
        found: list[Predictions] = []
        for ranked in ranked_answers:
            is_new, n_unproved = ~ranked.is_known, None
            n_new = int((is_new & ranked.is_derivable).sum())
            if with_unproved:
                n_unproved = int(is_new.sum()) - n_new
            answers = self._iter_answers(ranked, k, with_explanations)
            found.append(
                Predictions(
                    query=format_query(self.dataset, ranked.query),
                    side=SIDE_NAMES[ranked.query.side],
                    answers=tuple(
                        takewhile(lambda x: x.score >= min_score, answers)
                    ),
                    score=self.subject.score.name,
                    n_new=n_new,
                    n_known=ranked.n_known,
                    n_self=ranked.n_self,
                    n_entities=self.dataset.n_constants,
                    n_unproved=n_unproved,
                )
            )
        return found

    def rank(
        self,
        queries: Sequence[OpenQuery],
        *,
        with_known: bool = False,
        with_self: bool = True,
        with_unproved: bool = False,
    ) -> list[RankedAnswers]:
        """Rank the answers of each query; return entity ids, one ranking per query in the given order.

        Args:
          queries: in any order, repetitions allowed.
          with_known: list the known true answers too.
          with_self: list the entity of a query among its answers, as an evaluation does; otherwise only where the
            relation has loops.
          with_unproved: list the entities that no rule derives too, as in `answer`.
        """
        found: dict[OpenQuery, RankedAnswers] = {}
        for side in (HEAD, TAIL):
            of_side = sorted({query for query in queries if query.side == side})
            if of_side:
                with_ = with_known, with_self, with_unproved
                found |= self._rank_side(of_side, side, *with_)
        return [found[query] for query in queries]

    def score(self, atoms: Tensor, side: int) -> list[float]:
        """Score ground binary atoms as answers on a side; a known fact is scored without itself among the facts.

        Args:
          atoms: [n, W], in any order; repetitions allowed.
        """
        scores = rank_metrics.quantise(self.log_odds(atoms, side)).tolist()
        return [rank_metrics.probability(score) for score in scores]

    def explain(self, atom: Tensor, side: int) -> AnswerProof:
        """Return the proof of a derivable atom with the evidence that the score weighs for it on one side.

        By a score with other facts, also what these add.

        Args:
          atom: ground and of two arguments [W]; a known fact is proved from other facts.
        """
        task, run = self.subject.task, self.subject.policy_run
        weighed = None
        if run is None:
            (found,) = explain.smallest_proofs(task, atom[None])
        else:
            weighed = explain_answer(run, atom, side)
            found = most_probable_proof(run, atom, self.clauses, weighed, side)
        if found is None:
            found = explain.prove_from_other_facts(
                task, atom, explain.MAX_FACT_PROOF_ROWS
            ).proof
        terms: Json = {}
        if self.subject.score.facts is None:
            (terms,) = explain.other_facts(
                task, self.subject.score, atom[None], side
            )
        return AnswerProof(self.dataset, found, weighed, terms)

    # -- names

    def _iter_answers(
        self, ranked: RankedAnswers, k: int | None, with_explanations: bool
    ) -> Iterator[Answer]:
        """Yield the first answers of a query by names."""
        names, query = self.dataset.entities, ranked.query
        (atom,) = self._query_atoms([query], query.side).cpu()
        columns = (x[:k].tolist() for x in (*ranked[1:6], ranked.prior))
        for entity, score, rank, is_known, is_derivable, value in zip(*columns):
            atom = atom.index_fill(0, torch.tensor(query.side), entity)
            explanation = None
            if with_explanations and is_derivable:
                explanation = self.explain(atom, query.side)
            is_zero = score <= rank_metrics.ZERO_SCORE
            yield Answer(
                rank=rank,
                entity=names[int(entity) - 1],
                score=rank_metrics.probability(score),
                known=is_known,
                verdict=self.verdict(is_derivable),
                head=names[int(atom[HEAD]) - 1],
                relation=self.dataset.predicate_name(query.predicate),
                tail=names[int(atom[TAIL]) - 1],
                log_score=None if is_zero else rank_metrics.log_score(score),
                quantised_score=None if is_zero else score,
                prior=None if math.isnan(value) else value,
                explanation=explanation,
                label=self.dataset.labels.get(names[int(entity) - 1]),
            )

    def verdict(self, is_derivable: bool) -> str:
        """Return the word for what rules derive, or not."""
        if not is_derivable:
            return NO_PROOF
        return PROVED if self.dataset.is_program else DERIVED

    # -- ids

    def _rank_side(
        self,
        queries: list[OpenQuery],
        side: int,
        with_known: bool,
        with_self: bool,
        with_unproved: bool,
    ) -> dict[OpenQuery, RankedAnswers]:
        """Rank the answers of distinct, ascending queries on one side."""
        atoms = self._query_atoms(queries, side)
        derivable, answers = self._derivable_by(atoms, side)
        query, atom = self._list(
            atoms, side, derivable, with_known, with_unproved
        )
        is_known = kbase.contains_triple(self.known, atom, side)
        is_held = kbase.contains_triple(derivable, atom, side)
        is_self = ~self._has_loops[atom[:, 0]] & (not with_self)
        is_self = is_self & (atom[:, HEAD] == atom[:, TAIL])
        n_self = torch.bincount(
            query[is_self & is_held], minlength=len(queries)
        ).tolist()
        columns = (query, atom, is_known, is_held & ~is_known)
        query, atom, is_known, is_derivable = (
            column[~is_self & (~is_known | with_known)] for column in columns
        )
        if is_known.any():
            is_derivable = is_derivable.masked_scatter(
                is_known, self.is_derivable(atom[is_known], side)
            )
        is_derived = is_known | is_derivable
        score, prior = self._score_listed(atom, side, is_derived, answers)
        start, stop = kbase.answer_range(self.known, atoms, side)

        line = rank_metrics.quantise(prior)
        if self.subject.score.ranks_all:  # the prior is in the score
            line = torch.zeros_like(line)
        order, rank = _order_answers(query, score, line)
        columns = (atom[:, side], score, is_known, is_derivable, prior)
        n_listed = torch.bincount(query, minlength=len(queries)).tolist()
        parts = (x[order].split(n_listed) for x in columns)
        rows = zip(queries, rank.split(n_listed), *parts)
        counts = zip((stop - start).tolist(), n_self)
        return {
            asked: RankedAnswers(
                asked, entity, score, rank, known, derivable, *n, prior=prior
            )
            for (asked, rank, entity, score, known, derivable, prior), n in zip(
                rows, counts
            )
        }

    def _score_listed(
        self,
        atom: I64[Tensor, "n W"],
        side: int,
        is_derived: Bool[Tensor, "n"],
        answers: scoring.AnswerScores | None,
    ) -> tuple[I64[Tensor, "n"], F64[Tensor, "n"]]:
        """Return the quantised score of each answer, and the log-odds by all other evidence of those not derived.

        These have them as their score too if it ranks all entities.
        """
        score, is_other = self.subject.score, ~is_derived
        log_odds = torch.full_like(atom[:, 0], -torch.inf, dtype=torch.float64)
        prior = torch.full_like(log_odds, torch.nan)
        derived = self.log_odds(atom[is_derived], side, answers)
        log_odds = log_odds.masked_scatter(is_derived, derived)
        if is_other.any():
            scorer = score if score.ranks_all else self.subject.others
            assert scorer is not None, "it knows every entity"
            asked = atom[is_other].to(self.subject.task.device)
            values = scoring.score_without_rules(scorer, asked, side)
            prior = prior.masked_scatter(is_other, values.to(prior.device))
            if score.ranks_all:
                log_odds = torch.where(is_other, prior, log_odds)
        return rank_metrics.quantise(log_odds), prior

    def _query_atoms(self, queries: list[OpenQuery], side: int) -> Tensor:
        """Return the queries as atoms with 0 for the variable, [Q, W]."""
        task = self.subject.task
        rows = [[x.predicate, x.given] for x in queries]
        asked = torch.tensor(rows, device=task.entity_pool.device)
        atoms = asked.new_zeros((len(queries), task.sizes.atom_width))
        places = torch.tensor([0, other_side(side)], device=asked.device)
        return atoms.index_copy(1, places, asked)

    def _list(
        self,
        atoms: Tensor,
        side: int,
        derivable: TripleIndex,
        with_known: bool,
        with_unproved: bool,
    ) -> tuple[Tensor, Tensor]:
        """List each query's derivable answers in the pool, and known ones, or all entities, on request.

        Returns:
          The row of the query, and the atom of each answer, ascending by both.
        """
        base = self.subject.task.sizes.n_constants + 1
        indices = [derivable, *[self.known] * with_known]
        listed = [kbase.list_answers(x, atoms, side) for x in indices]
        codes = [x.query_row * base + x.entity for x in listed]
        pool = self.subject.task.entity_pool.long()
        if with_unproved:
            row = row_numbers(atoms)
            codes.append((row[:, None] * base + pool).flatten())
        code = unique_values(torch.cat(codes))
        if self.dataset.candidates is not None:
            code = code[torch.isin(code % base, pool)]
        query, entity = code // base, code % base
        column = count_to(atoms.shape[1], atoms)
        return query, torch.where(column == side, entity[:, None], atoms[query])

    def _derivable_by(
        self, atoms: Tensor, side: int
    ) -> tuple[TripleIndex, scoring.AnswerScores | None]:
        """Return an index of the derivable triples, all that are held or else those that answer the given queries.

        Also the scores of these, where the evidence of the queries lists them.
        """
        if self._derivable is not None:
            return self._derivable, None
        task, score = self.subject.task, self.subject.score
        assert task.answers_plan is not None, "each query derives its answers"
        queries, answers = atoms.to(task.device), None
        if score.facts is not None:
            answers = scoring.score_answers(task, score, queries, side)
            derived = answers.atom
        else:
            derived = derive.derive_answers(
                task.answers_plan,
                queries,
                (side,),
                object_identity=task.object_identity,
            )
        index = kbase.build_triple_index(
            derived.to(atoms.device), task.sizes.n_constants
        )
        return index, answers

    def log_odds(
        self,
        atoms: I64[Tensor, "n W"],
        side: int,
        answers: scoring.AnswerScores | None = None,
    ) -> F64[Tensor, "n"]:
        """Compute the log-odds of ground atoms as answers on a side; a known fact is scored without itself.

        Args:
          answers: scores of the answers of their queries, if they are there.
        """
        task = self.subject.task
        score_atoms = partial(
            scoring.score_atoms, task, self.subject.score, answers=answers
        )
        return ranking.score_distinct_atoms(
            score_atoms,
            atoms.long().to(task.entity_pool.device),
            task.sizes,
            side,
        )

    def is_derivable(self, atoms: Tensor, side: int) -> Bool[Tensor, "n"]:
        """Return whether the rules derive each atom; a known fact must be derived from other facts."""
        task = self.subject.task

        def is_derived(distinct: Tensor, side: int) -> Tensor:
            found = scoring.TaskCandidates(task, distinct.to(task.device), side)
            derived = torch.zeros(len(distinct), dtype=torch.float64)
            for part in found.derivations():
                derived = derived.index_fill(0, part.atom_row.cpu(), 1.0)
            is_proved = ~is_unproved_fact(task, distinct.long())
            return derived.to(distinct.device) * is_proved

        return (
            ranking.score_distinct_atoms(is_derived, atoms, task.sizes, side)
            > 0
        )


def _order_answers(
    query: I64[Tensor, "n"], score: I64[Tensor, "n"], line: I64[Tensor, "n"]
) -> tuple[I64[Tensor, "n"], I64[Tensor, "n"]]:
    """Order answers by query, then the best score first, then the best line, and return their ranks in this order.

    What is repeated has the rank of its first answer.
    """
    order = row_numbers(query)
    for column in (-line, -score, query):
        order = order[torch.argsort(column[order], stable=True)]
    key = torch.stack([query, score, line])[:, order]
    _, group = torch.unique_consecutive(key, dim=1, return_inverse=True)
    asked = query[order]
    before = torch.searchsorted(asked, asked)
    return order, 1 + torch.searchsorted(group, group) - before


# -- scores of given triples

# triples that are ranked together, and that probabilities are fitted on
CHUNK_TRIPLES = 4096
MAX_CALIBRATION_TRIPLES = 500
# log-odds and logs of shares are clipped to [-c, c] before probabilities are fitted
MAX_LOGIT = 15.0


class ScoredTriples(NamedTuple):
    """Scores and ranks of triples; the columns are those of the head's side and of the tail's."""

    atoms: I64[np.ndarray, "n W"]
    score: I64[np.ndarray, "n 2"]  # quantised log-odds
    # natural log of the share among the candidates that rules derive; 0 where no rule derives the triple
    log_share: F64[np.ndarray, "n 2"]
    rank: F64[np.ndarray, "n 2"]  # in the middle of equals
    is_derived: Bool[np.ndarray, "n"]  # by rules, from other facts
    is_known: Bool[np.ndarray, "n"]  # in some split or in facts.txt

    def features(self) -> F64[np.ndarray, "n F"]:
        """Return what a probability is fitted on."""
        has_score = self.score > rank_metrics.ZERO_SCORE
        logit = self.score * rank_metrics.SCORE_GRID_STEP
        logit = np.where(has_score, logit.clip(-MAX_LOGIT, MAX_LOGIT), 0.0)
        share = self.log_share.clip(-MAX_LOGIT, 0.0)
        closeness = -np.log(self.rank)
        constant = np.ones((len(self.score), 1))
        derived = self.is_derived[:, None].astype(np.float64)
        return np.concatenate(
            [logit, share, closeness, derived, constant], axis=1
        )


class Calibration(NamedTuple):
    """Logistic regression of the truth of a triple on its scores, and how right it was on triples left out."""

    weight: F64[np.ndarray, "F"]
    n_triples: int  # of valid
    threshold: float  # of the probability, with which most triples of valid and false ones are told apart
    bins: evaluate.Bins  # of triples that the weights were not fitted on

    def probability(self, found: ScoredTriples) -> F64[np.ndarray, "n"]:
        """Return the probability that each triple is true."""
        return _logistic(found.features() @ self.weight)

    def to_json(self) -> Json:
        """Return the fit as JSON values."""
        return {
            "weight": self.weight.tolist(),
            "n_triples": self.n_triples,
            "threshold": self.threshold,
            "calibration_error": evaluate.calibration_error(self.bins),
            "log_loss": evaluate.log_loss(self.bins),
        }


def score_triples(
    answerer: Answerer, atoms: I64[np.ndarray, "n W"]
) -> ScoredTriples:
    """Score and rank ground binary triples on both sides; a known fact is scored without itself among the facts."""
    task, score = answerer.subject.task, answerer.subject.score
    protocol = ranking.RankingProtocol(sides=(HEAD, TAIL))
    found = ranking.rank_split(task, atoms, score, protocol)
    is_other = ~found.is_answer & (found.listed_score > rank_metrics.ZERO_SCORE)
    listed = found.listed_score.double() * rank_metrics.SCORE_GRID_STEP
    log_share = _log_shares(
        found.answer_score, listed[is_other], found.listed_row[is_other]
    )
    rank = rank_metrics.ranks(found.counts)[:, -1]

    # T_P holds known facts, whatever proves them.
    table = found.queries.long()
    facts = kbase.contains(task.kb, task.sizes, table.to(task.device))
    is_fact = facts.to(table.device)
    is_derived = found.answer_provable.view(2, -1).any(0)
    if is_fact.any():
        proved = answerer.is_derivable(table[is_fact], TAIL)
        is_derived = is_derived.masked_scatter(is_fact, proved)
    score, log_share, rank = (
        column.view(2, -1).T.numpy(force=True)
        for column in (found.answer_score, log_share, rank)
    )
    known = kbase.contains_triple(answerer.known, table, TAIL)
    return ScoredTriples(
        atoms,
        score,
        log_share,
        rank,
        is_derived.numpy(force=True),
        known.numpy(force=True),
    )


def _log_shares(
    score: I64[Tensor, "Q"], listed: F64[Tensor, "L"], row: I64[Tensor, "L"]
) -> F64[Tensor, "Q"]:
    """Return the log of each answer's share among its listed candidates and itself, by a softmax; 0 without a score."""
    has_score = score > rank_metrics.ZERO_SCORE
    own = torch.where(
        has_score, score.double() * rank_metrics.SCORE_GRID_STEP, 0.0
    )
    largest = own.scatter_reduce(0, row, listed, "amax")
    total = torch.where(has_score, torch.exp(own - largest), 0.0)
    total = total.index_add(0, row, torch.exp(listed - largest[row]))
    share = own - largest - torch.log(total.clamp_min(1e-300))
    return torch.where(has_score, share, 0.0)


def _logistic(log_odds: F64[np.ndarray, "n"]) -> F64[np.ndarray, "n"]:
    return 1.0 / (1.0 + np.exp(-log_odds.clip(-700, 700)))


def calibrate(answerer: Answerer, seed: int = 0) -> Calibration | None:
    """Fit the probability that a triple is true, on valid against as many sampled and as many hard false triples.

    A false triple has another entity in place of the head or the tail: one of all, or one that the rules derive there;
    none is known to be true. None without two triples of valid, or without a false one.
    """
    task = answerer.subject.task
    valid, rng = task.dataset.valid, np.random.default_rng(seed)
    valid = valid[np.array(task.dataset.arities)[valid[:, 0] - 1] == TAIL]
    rows = ranking.random_rows(len(valid), MAX_CALIBRATION_TRIPLES)
    true = valid[np.sort(rows)]
    false = _false_triples(answerer, true, rng)
    if len(true) < 2 or len(false) < 2:
        return None
    found = [score_triples(answerer, part) for part in (true, false)]
    x = np.concatenate([part.features() for part in found])
    y = np.repeat([1.0, 0.0], [len(true), len(false)])
    place = np.concatenate([np.arange(len(true)), np.arange(len(false))])

    # How right it is, on halves that did not fit it.
    p = np.zeros(len(y))
    for half in (0, 1):
        is_held_out = place % 2 == half
        weight = _fit_logistic(x[~is_held_out], y[~is_held_out])
        p[is_held_out] = _logistic(x[is_held_out] @ weight)
    bins = evaluate.bin_probabilities(p, y > 0)
    order = np.argsort(p)
    # With the threshold at i, those before are taken as false.
    n_right = np.concatenate([[0], np.cumsum(1 - 2 * y[order])])
    edges = np.concatenate([[0.0], p[order], [1.0]])
    best = int(n_right.argmax())
    return Calibration(
        _fit_logistic(x, y),
        len(true),
        float(edges[best : best + 2].mean()),
        bins,
    )


class TripleScorer:
    """Scores of triples by names, with the probability that is fitted on valid.

    Attributes:
      calibration: None without a valid split.
    """

    def __init__(self, answerer: Answerer, with_proofs: bool = False) -> None:
        """Fit the probability.

        Args:
          with_proofs: add the rule that says most for each triple and its proof.
        """
        self._answerer, self._with_proofs = answerer, with_proofs
        self._entities = index_entities(answerer.dataset)
        names = zip(answerer.dataset.predicates, answerer.dataset.arities)
        self._relations = {
            name: i for i, (name, arity) in enumerate(names, 1) if arity == TAIL
        }
        self.calibration = calibrate(answerer)

    def score(self, triples: Sequence[tuple[str, str, str]]) -> list[Json]:
        """Return for each (head, relation, tail) its probability, scores, ranks and verdict as JSON values."""
        found: list[Json] = []
        places: list[int] = []
        width = self._answerer.subject.task.sizes.atom_width
        atoms = np.zeros((len(triples), width), np.int32)
        for place, (head, relation, tail) in enumerate(triples):
            fields = {"head": head, "relation": relation, "tail": tail}
            found.append(fields | dict.fromkeys(_SCORE_VALUES))
            if self._with_proofs:
                found[-1] |= {"rule": None, "proof": None}
            if relation not in self._relations:
                found[-1]["verdict"] = "unknown relation"
            elif head not in self._entities or tail not in self._entities:
                found[-1]["verdict"] = "unknown entity"
            else:
                entities = self._entities[head], self._entities[tail]
                atoms[place, : TAIL + 1] = self._relations[relation], *entities
                places.append(place)
        if places:
            values = self._describe(atoms[places])
            for place, fields in zip(places, values):
                found[place] |= fields
        return found

    def relations(
        self, head: str, tail: str, *, with_known: bool
    ) -> list[Json]:
        """Return the triples of all relations between two entities as `score` does, the most probable first.

        Args:
          with_known: those of known triples too.
        """
        ends = np.array([[0, self._entities[head], self._entities[tail]]])
        found, value = self._score_relations(ends)
        records = self.score([(head, x, tail) for x in self._relations])
        is_listed = ~found.is_known | with_known
        order = np.argsort(-value[0], kind="stable")
        return [records[i] for i in order.tolist() if is_listed[i]]

    def relation_windows(
        self, rows: I64[np.ndarray, "Q"]
    ) -> list[I64[np.ndarray, "n"]]:
        """Cut rows of a split into windows for `rank_relations`."""
        size = max(1, CHUNK_TRIPLES // len(self._relations))
        return np.split(rows, range(size, len(rows), size))

    def rank_relations(
        self, split: I32[np.ndarray, "n W"], rows: I64[np.ndarray, "Q"]
    ) -> list[list[Json]]:
        """Rank the relations of triples among all of their pairs, without those of other known triples.

        Returns:
          For each of the rows of the split a list of one record, as in `evaluate`, without scores.
        """
        n, queries = len(self._relations), split[rows]
        found, value = self._score_relations(queries)
        is_own = found.atoms[:, 0].reshape(-1, n) == queries[:, :1]
        is_other = ~is_own & ~found.is_known.reshape(-1, n)
        own = value[is_own][:, None]
        counts = rank_metrics.RankCounts(
            *map(
                torch.from_numpy,
                (
                    (is_other & (value > own)).sum(1),
                    (is_other & (value == own)).sum(1),
                    is_other.sum(1) + 1,
                ),
            )
        )
        is_derived = found.is_derived.reshape(-1, n)[is_own].tolist()
        columns = evaluate.rank_columns(
            self._answerer.dataset,
            rows,
            queries,
            [TAIL],
            counts,
            {
                "answer_provable": is_derived,
                "status": ["proved" if x else NO_PROOF for x in is_derived],
                "n_scored": [n] * len(rows),
                "near_boundary": [False] * len(rows),
            },
        )
        return [[record] for record in evaluate.as_records(columns)]

    def _score_relations(
        self, rows: I32[np.ndarray, "n W"]
    ) -> tuple[ScoredTriples, F64[np.ndarray, "n R"]]:
        """Score the triples of all relations between the entities of each row, and return by what they are ordered.

        That is the probability. Without a valid split those that rules derive come first, by the larger one of the
        scores on both sides.
        """
        relations = [*self._relations.values()]
        atoms = rows.repeat(len(relations), axis=0).astype(np.int32)
        atoms[:, 0] = np.tile(relations, len(rows))
        found = score_triples(self._answerer, atoms)
        if self.calibration is not None:
            value = self.calibration.probability(found)
        else:
            best = found.score.max(1).clip(-rank_metrics.CERTAIN_SCORE)
            value = best + np.where(found.is_derived, 1 << 60, 0)
        return found, value.reshape(len(rows), -1)

    def _describe(self, atoms: I32[np.ndarray, "n W"]) -> Iterator[Json]:
        """Yield the numbers and the verdict of each triple, with its rule and proof if asked for."""
        found = score_triples(self._answerer, atoms)
        p: list[float | None] = [None] * len(atoms)
        if self.calibration is not None:
            p = self.calibration.probability(found).tolist()
        columns = (found.score, found.rank, found.is_known, found.is_derived)
        rows = zip(atoms, p, *(column.tolist() for column in columns))
        for atom, chance, scores, ranks, known, derived in rows:
            chances = map(rank_metrics.probability, scores)
            verdict = self._answerer.verdict(derived)
            values = (chance, *chances, *ranks, known, verdict)
            record: Json = dict(zip(_SCORE_VALUES, values))
            if self._with_proofs and derived:
                ids = torch.from_numpy(atom).long()
                why = self._answerer.explain(ids, TAIL)
                record["rule"] = why.rule_text
                record["proof"] = why.to_json()["proof"]
            yield record


_SCORE_VALUES = (
    "probability",
    "score_head",
    "score_tail",
    "rank_head",
    "rank_tail",
    "known",
    "verdict",
)
SCORE_COLUMNS = ("head", "relation", "tail", *_SCORE_VALUES, "rule")


def summarise_labels(
    probability: Sequence[float | None],
    labels: Sequence[bool],
    threshold: float,
) -> Json:
    """Return the area under the ROC curve and the accuracy at a threshold; triples of unknown names count as 0.

    The area is None without a true or a false label.
    """
    p, y = np.array([x or 0.0 for x in probability]), np.array(labels)
    true, false = p[y], np.sort(p[~y])
    auc = None
    if len(true) and len(false):
        # of a pair of equals half
        sides = [
            np.searchsorted(false, true, side) for side in ("left", "right")
        ]
        auc = float(np.mean(sides) / len(false))
    accuracy = float(((p >= threshold) == y).mean())
    return {"auc": auc, "accuracy": accuracy, "n_true": len(true)}


def _fit_logistic(
    x: F64[np.ndarray, "n F"], y: F64[np.ndarray, "n"]
) -> F64[np.ndarray, "F"]:
    """Fit a logistic regression by Newton's method, with a small Gaussian prior of its weights."""
    weight, prior = np.zeros(x.shape[1]), 0.1
    for _ in range(30):
        p = _logistic(x @ weight)
        gradient = x.T @ (p - y) + prior * weight
        hessian = (x.T * (p * (1 - p))) @ x + prior * np.eye(x.shape[1])
        step = np.linalg.solve(hessian, gradient)
        weight = weight - step * min(1.0, 5.0 / np.abs(step).max(initial=1e-9))
    return weight


def _false_triples(
    answerer: Answerer, true: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Return sampled and hard corruptions of triples, none of them known to be true; see `calibrate`."""
    task = answerer.subject.task
    pool = task.entity_pool.cpu().numpy()
    sides = rng.integers(HEAD, TAIL + 1, len(true))
    sampled = true.copy()
    sampled[np.arange(len(true)), sides] = rng.choice(pool, len(true))
    queries = [
        OpenQuery(int(atom[0]), int(side), int(atom[other_side(side)]))
        for atom, side in zip(true, sides)
    ]
    parts = [sampled]
    for atom, side, ranked in zip(true, sides, answerer.rank(queries)):
        others = ranked.entity.cpu().numpy()
        if len(others):
            hard = atom.copy()
            # The better an answer ranks, the harder it is: half are of the first ten.
            most = len(others) if rng.random() < 0.5 else min(10, len(others))
            hard[side] = others[rng.integers(most)]
            parts.append(hard[None])
    false = np.concatenate(parts)
    device = task.entity_pool.device
    atoms = torch.from_numpy(false).long().to(device)
    is_known = kbase.contains_triple(answerer.known, atoms, TAIL)
    return false[~is_known.cpu().numpy()]


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


def read_pair(dataset: Dataset, text: str) -> tuple[str, str] | None:
    """Return head and tail of a query for the relation between two entities, `?r(h, t)`; None for another query.

    Raises:
      ValueError: a name is unknown, or there are not two entities.
    """
    match = re.fullmatch(r"\s*\?\w*\s*(\(.*\))\s*\.?\s*", text, re.DOTALL)
    binary = [
        name
        for name, arity in zip(dataset.predicates, dataset.arities)
        if arity == TAIL
    ]
    if match is None or not binary:
        return None
    query = read_query(dataset, format_name(binary[0]) + match[1])
    if query.variables or query.dataset is not dataset:
        raise ValueError(
            f"query {shorten(text)}: expected two entities of the data, as in ?r(h, t)"
        )
    _, head, tail = query.atom.tolist()[: TAIL + 1]
    return dataset.entity_name(int(head)), dataset.entity_name(int(tail))


def relation_queries(dataset: Dataset, name: str | None) -> list[OpenQuery]:
    """Return the queries for the tails of every entity by a binary relation, or by each of them for None.

    Raises:
      ValueError: the data have none of that name.
    """
    arities = zip(dataset.predicates, dataset.arities)
    binary = [x for x, arity in arities if arity == TAIL]
    if name is not None and name not in binary:
        raise ValueError(unknown_name_message("relation", name, tuple(binary)))
    return [
        OpenQuery(dataset.predicates.index(relation) + 1, TAIL, entity)
        for relation in (binary if name is None else [name])
        for entity in range(1, dataset.n_constants + 1)
    ]


def format_query(dataset: Dataset, query: OpenQuery) -> str:
    """Format a query with a variable, which is no entity's name, for the argument asked for."""
    variable = free_variable(dataset)
    arguments = (
        (variable, query.given)
        if query.side == HEAD
        else (query.given, variable)
    )
    return format_atom(dataset, np.array([query.predicate, *arguments]))


# -- records in files

JSON_ENDINGS = (".json", ".jsonl", ".ndjson")
# types of DuckDB; other columns hold text
_COLUMN_TYPES = {
    "rank": "BIGINT",
    **dict.fromkeys(("known", "label"), "BOOLEAN"),
    **dict.fromkeys(
        (
            "score",
            "probability",
            "score_head",
            "score_tail",
            "rank_head",
            "rank_tail",
        ),
        "DOUBLE",
    ),
}


def records_text(
    records: Iterable[Json],
    columns: Sequence[str],
    *,
    as_json: bool = False,
    with_header: bool = True,
) -> str:
    """Format columns of records as CSV, booleans as in JSON and missing values empty, or all as lines of JSON."""
    if as_json:
        lines = (json.dumps(x, ensure_ascii=False) for x in records)
        return "".join(f"{escape_unprintable(line)}\n" for line in lines)
    text = io.StringIO()
    writer = csv.DictWriter(
        text, columns, lineterminator="\n", extrasaction="ignore"
    )
    if with_header:
        writer.writeheader()
    words = {True: "true", False: "false"}
    for record in records:
        booleans = {
            k: words[x] for k, x in record.items() if isinstance(x, bool)
        }
        writer.writerow(record | booleans)
    return text.getvalue()


def write_records(path: Path, text: str, columns: Sequence[str]) -> None:
    """Write the text of records to a file, as Parquet if its name says so.

    Raises:
      ValueError: DuckDB, which writes Parquet, is not installed.
    """
    content = text
    if path.suffix == ".parquet":
        types = {name: _COLUMN_TYPES.get(name, "VARCHAR") for name in columns}
        content = format_parquet(text, types)
    write_file(path, content)


# -- what a run finds


def score_settings(subject: Subject) -> Json:
    """Return all settings that a subject's scores depend on, as JSON values, to recognise files of interrupted work."""
    run, cfg = subject.policy_run, subject.task.cfg
    return {
        "fingerprint": subject.task.dataset.fingerprint,
        "height": subject.task.max_height,
        "smoothing": cfg.smoothing,
        "object_identity": cfg.object_identity,
        "score": subject.score.name,
        "params_digest": run and digest(run.state.best_params),
    }


def digest(params: object) -> str:
    """Return a hash of parameters, 16 hexadecimal digits."""
    found = hashlib.sha256()
    for leaf in tree.leaves(params):
        found.update(leaf.numpy(force=True).tobytes())
    return found.hexdigest()[:16]


def find_guided_facts(
    run: Run,
    dataset: Dataset,
    atom: tuple[int, ...],
    max_height: int | None,
    deadline: Deadline,
) -> tuple[list[tuple[int, ...]], int]:
    """Return facts from which a search in the order of a run's policy proves a ground atom, and its resolution steps.

    There are no facts where it finds no proof.

    Args:
      run: learns from proofs, opened on the facts of the data set. Rules are those of the run.
      dataset: whose ids the atom and the result have.
      max_height: of the proof; None for that of the run.
      deadline: ends the search.

    Raises:
      ValueError: a rule of the data set has a negation or a comparison, of which some facts say nothing.
    """
    check_horn(dataset)
    task = run.task
    height = min(task.max_height, max_height or task.max_height)
    query = _translate_atom(atom, dataset, task.dataset)
    if query is None or max_height == 0:
        return [], 0
    found, n_steps = guide.find_facts(
        Clauses(task.kb, task.sizes),
        query,
        guide.policy_order(
            run.cfg, inference_world(task), run.state.best_params
        ),
        height,
        deadline,
    )
    facts = [_translate_atom(x, task.dataset, dataset) for x in found or ()]
    return [fact for fact in facts if fact is not None], n_steps


def _translate_atom(
    atom: tuple[int, ...], source: Dataset, target: Dataset
) -> tuple[int, ...] | None:
    """Return an atom by the ids of another data set; None if that lacks one of its names."""
    entities = index_entities(target)
    place = atom[0] - 1
    key = source.predicates[place], source.arities[place]
    ids = [predicate_ids(target).get(key, 0)]
    for constant in atom[1 : 1 + key[1]]:
        ids.append(entities.get(source.entity_name(constant), 0))
    padding = [0] * (target.atom_width - len(ids))
    return (*ids, *padding) if all(ids) else None


def most_probable_proof(
    run: Run,
    atom: Tensor,
    clauses: Clauses | None = None,
    explanation: Explanation | None = None,
    side: int = TAIL,
) -> Proof | None:
    """Return the proof of a ground atom that a run finds most probable; None if it finds none.

    A run that learns from questions takes the rule with the largest share in the answer on a side.

    Args:
      atom: [W].
      clauses: of the run's task, for many atoms; None to read them for this one.
      explanation: of the atom as an answer on the side, if it is there already.
      side: of the question that the atom answers.
    """
    clauses = clauses or Clauses(run.task.kb, run.task.sizes)
    if run.questions is None:
        return explain.most_probable_proof(
            run.task, run.cfg, run.state.best_params, atom, clauses=clauses
        )
    explanation = explanation or explain_answer(run, atom, side)
    if explanation is None:
        return None
    best = explanation.rules[0]
    return explain.proof_by_rule(run.task, atom, best.rule, best.share, clauses)


def most_probable_proofs(
    run: Run, atoms: I64[Tensor, "n W"]
) -> list[Proof | None]:
    """Return for each atom the proof that a run finds most probable; None if it finds none."""
    clauses = Clauses(run.task.kb, run.task.sizes)
    if run.questions is None:
        return [most_probable_proof(run, atom, clauses) for atom in atoms]
    proofs: list[Proof | None] = []
    for atom, best in zip(atoms, _best_rules(run, atoms)):
        if best is None:
            proofs.append(None)
            continue
        built = explain.proof_by_rule(run.task, atom, *best, clauses)
        proofs.append(built)
    return proofs


def _best_rules(
    run: Run, atoms: I64[Tensor, "n W"]
) -> list[tuple[int, float] | None]:
    """Return each atom's rule with the largest share as an answer on the tail, and that share; None without a rule."""
    setup = run.questions
    assert setup is not None, "the run learns from questions"
    base = run.task.sizes.n_constants + 1
    atoms = atoms.long()
    wanted = (atoms[:, 0] * base + atoms[:, HEAD]) * base + atoms[:, TAIL]
    weights = run_weights(run)
    best: dict[int, tuple[int, float]] = {}

    for questions, part in scoring.query_evidence(
        run.task, setup.facts, atoms, TAIL
    ):
        prefix = questions.predicate * base + questions.entity
        key = prefix[part.question] * base + part.entity
        amounts = learned.firing_amounts(
            weights.cfg,
            weights.world,
            weights.params,
            learned.whole(part),
        )
        for row in true_rows(torch.isin(key, wanted.to(key.device))).tolist():
            firings = slice(*part.firing_offsets[row : row + 2].tolist())
            share = amounts[firings] / amounts[firings].sum()
            first = int(share.argmax())
            rule = int(part.rule[firings][first])
            best |= {int(key[row]): (rule, float(share[first]))}
    return [best.get(key) for key in wanted.tolist()]


def run_weights(run: Run) -> Weights:
    """Return the best weights of a run that learns from questions."""
    assert run.questions is not None, "the run learns from questions"
    left_out = run.run_config.questions.left_out
    assert left_out != "auto", "a stored run has what it chose"
    return make_weights(
        run.task, run.questions, run.state.best_params, left_out
    )


def explain_answer(run: Run, atom: Tensor, side: int) -> Explanation | None:
    """Explain the score of an atom as an answer on a side; None if no rule derives it or the run weighs no evidence."""
    if run.questions is None:
        return None
    score = LearnedScore(run.score, run_weights(run))
    return explain.explain_answer(run.task, score, atom, side)
