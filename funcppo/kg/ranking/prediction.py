"""Ranked answers of open queries r(h, X) and r(X, t), whether any split holds them or not.

`Predictor.rank` lists the entities that the rules derive for each query, scores them by the scorers that rank splits,
and orders them. Known true answers, of all splits and of facts.txt, are left out and counted, or listed and marked.
What the rules are applied to are the facts of train and of facts.txt, as in an evaluation.

An evaluation ranks the entity of a query among its own answers. On request it is left out and counted, unless some
triple of the relation, or the head of a rule, links an entity to itself.

Where T_P is held in part, which is so at height 1 only, the candidates are listed by the evidence of the questions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from funcppo.core.types import F64, I32, I64, Bool
from funcppo.kg.logic import derivability, partial_fixpoint, triple_index
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.derivability import DerivabilityIndex
from funcppo.kg.logic.firing_chunks import (
    fired_atoms,
    iter_firing_chunks,
    open_questions,
)
from funcppo.kg.logic.question_types import Questions
from funcppo.kg.logic.sorting import unique_values
from funcppo.kg.logic.triple_index import HEAD, TAIL, TripleIndex
from funcppo.kg.logic.typed_torch import unique_rows
from funcppo.kg.ranking import evidence_ranking, rank_metrics, ranking, scorers
from funcppo.kg.ranking.ranking import Scorer, ScorerBySide
from funcppo.kg.scores import evidence, link_embedding
from funcppo.kg.scores.evidence import FactIndex
from funcppo.kg.search.task import ProverTask, is_unproved_fact, known_triples

# questions whose derivations are found one question at a time; for more, the rules are applied to all facts
MAX_INDEX_QUESTIONS = 256


class OpenQuery(NamedTuple):
    """A query with one variable: the entities in one place of a relation, given the other."""

    predicate: int
    side: int  # the place of the variable, HEAD or TAIL
    given: int  # the entity in the other place


class RankedAnswers(NamedTuple):
    """The answers of a query, best first; answers of one score in the order of entity ids."""

    query: OpenQuery
    entity: I64[Tensor, "n"]
    score: I64[Tensor, "n"]  # quantised log-odds, as in the lines of --details
    rank: I64[Tensor, "n"]  # 1 + the number of answers that score more
    is_known: Bool[Tensor, "n"]  # in some split or in facts.txt
    is_derivable: Bool[Tensor, "n"]  # by the rules, from other facts
    n_new: int  # answers that are derivable and not known
    n_known: int  # known answers, listed or not
    n_self: int  # 1 if the entity of the query is derivable and left out


class UnprovedAnswers(NamedTuple):
    """Entities that no rule derives as answers of a query, best first; of one prior in the order of entity ids."""

    entity: I64[Tensor, "n"]
    prior: F64[
        Tensor, "n"
    ]  # by link embeddings, above the mean of all entities
    rank: I64[Tensor, "n"]  # after all ranked answers


class ScorerMaker(Protocol):
    """Makes the scorer of a task."""

    def __call__(self, task: ProverTask, /) -> Scorer | ScorerBySide:
        """The scorer; the task may have an index of other atoms than the one that the maker was made for."""
        ...


class _Listing(NamedTuple):
    """The entities listed for some queries of one side, each pair once, ascending by query and entity."""

    query: I64[Tensor, "L"]  # row of the query
    entity: I64[Tensor, "L"]
    atom: I64[Tensor, "L W"]
    is_known: Bool[Tensor, "L"]
    is_left_out: Bool[Tensor, "Q"]  # the entity of the query is an answer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Predictor:
    """Scores and ranks the candidates of open queries."""

    task: ProverTask
    """The data set and what its rules derive."""
    make_scorer: ScorerMaker
    """The scorer of all candidates."""
    make_fact_scorer: ScorerMaker
    """The scorer of facts, each of which is left out while it is scored."""
    known: TripleIndex
    """True triples, of all splits and of facts.txt."""
    derivable: TripleIndex | None
    """What T_P derives; None where it is held in part."""
    facts: FactIndex | None
    """Index of the facts, where T_P is held in part."""
    has_loops: Bool[Tensor, "P+1"]
    """Relations of which a known triple, or the head of a rule, links an entity to itself."""
    reads_derivations: bool
    """Whether the scorers read which rules derive an atom."""

    def rank(
        self,
        queries: Sequence[OpenQuery],
        *,
        with_known: bool = False,
        with_self: bool = True,
    ) -> list[RankedAnswers]:
        """The answers of some queries, in the order of the queries.

        Args:
          queries: in any order, repetitions allowed.
          with_known: list the known true answers too.
          with_self: list the entity of a query among its answers, as an evaluation does; otherwise only where the
            relation has loops.
        """
        found: dict[OpenQuery, RankedAnswers] = {}
        for side in (HEAD, TAIL):
            of_side = sorted({query for query in queries if query.side == side})
            if of_side:
                found |= self._rank_side(of_side, side, with_known, with_self)
        return [found[query] for query in queries]

    def rank_unproved(
        self,
        ranked: RankedAnswers,
        embedding: link_embedding.Params,
        *,
        with_self: bool = True,
    ) -> UnprovedAnswers:
        """The entities that the rules do not derive as answers of a query, nor any split holds, by their prior.

        Args:
          ranked: the answers of the query, all that are to be listed before.
          embedding: gives the prior; the model that has seen all facts is asked.
          with_self: as in `rank`.
        """
        query = ranked.query
        (atom,) = self._query_atoms([query], query.side)
        known = triple_index.list_answers(self.known, atom[None], query.side)
        entity = unique_values(self.task.entity_pool.long())
        is_listed = torch.isin(entity, torch.cat([ranked.entity, known.entity]))
        if not with_self and not self.has_loops[query.predicate]:
            is_listed = is_listed | (entity == query.given)
        entity = entity[~is_listed]

        label = evidence.make_label(torch.tensor(query.predicate), query.side)
        device = embedding.entity.device
        n_models = link_embedding.n_models(embedding)
        asked = torch.tensor([n_models - 1, int(label), query.given])
        model, labels, given = asked.to(device)[:, None].expand(3, len(entity))
        prior = link_embedding.prior(
            embedding, model, labels, given, entity.to(device)
        )
        prior, order = torch.sort(
            prior.double().to(entity.device), descending=True, stable=True
        )
        before = len(ranked.entity) + torch.searchsorted(-prior, -prior)
        return UnprovedAnswers(entity[order], prior, 1 + before)

    def score(self, atoms: I64[Tensor, "n W"], side: int) -> F64[Tensor, "n"]:
        """The log-odds of ground atoms as answers about a side, of facts without themselves.

        Args:
          atoms: of two arguments, in any order; repetitions allowed.
        """
        atoms = atoms.long().to(self.task.entity_pool.device)
        is_fact = self._is_fact(atoms)
        log_odds = torch.full(
            (len(atoms),), -torch.inf, dtype=torch.float64, device=atoms.device
        )
        for rows, make_scorer in (
            (~is_fact, self.make_scorer),
            (is_fact, self.make_fact_scorer),
        ):
            if rows.any():
                values = self._score_distinct(atoms[rows], side, make_scorer)
                log_odds = log_odds.masked_scatter(rows, values)
        return log_odds

    def task_for(self, atoms: I64[Tensor, "n W"]) -> ProverTask:
        """The task, with what is held of T_P extended by those of some atoms that it has where it is held in part.

        Args:
          atoms: distinct, in lexicographic order.
        """
        task = self.task
        if self.derivable is not None:
            return task
        kb, sizes = task.kb, task.sizes
        atoms = atoms.to(kb.facts.device, torch.int32)
        index = self._index_by_questions(atoms)
        if index is None:
            index = derivability.build_derivability_index_for_atoms(
                kb, sizes, task.least_model, atoms
            )

        # A fact may be listed too that no rule derives.
        is_derived = torch.isin(
            torch.arange(len(atoms), device=atoms.device),
            index.derivation_keys // sizes.n_rules,
        )
        model = partial_fixpoint.partial_model(
            kb,
            sizes,
            atoms[is_derived],
            object_identity=task.least_model.object_identity,
        )
        return dataclasses.replace(
            task, least_model=model, derivability_index=index
        )

    def _index_by_questions(
        self, atoms: I32[Tensor, "n W"]
    ) -> DerivabilityIndex | None:
        """The rules that derive some atoms, found without applying every rule to all facts.

        Args:
          atoms: of two arguments, distinct, in lexicographic order.

        Returns:
          The index; None if the atoms answer so many questions that applying the rules takes less.
        """
        task = self.task
        assert self.facts is not None, "T_P is held in part"
        is_fact = kbase.contains(task.kb, task.sizes, atoms)
        new, facts = atoms[~is_fact].long(), atoms[is_fact].long()
        asked = min(
            (open_questions(new, side) for side in (HEAD, TAIL)),
            key=lambda questions: len(questions.entity),
        )
        # A fact is left out of the question that it answers.
        without_fact = Questions(
            predicate=facts[:, 0],
            side=torch.full_like(facts[:, 0], TAIL),
            entity=facts[:, HEAD],
            left_out=facts[:, TAIL],
        )
        if len(asked.entity) + len(facts) > MAX_INDEX_QUESTIONS:
            return None

        index = kbase.index_sorted_atoms(
            atoms, task.sizes.n_predicates, task.sizes.n_constants
        )
        keys = [atoms.new_zeros(0, dtype=torch.int64)]
        for part in (asked, without_fact):
            for questions, firings in iter_firing_chunks(
                self.facts.plan,
                part,
                object_identity=task.least_model.object_identity,
            ):
                derived = fired_atoms(questions, firings, task.sizes)
                row = kbase.find_atoms(index, task.sizes, derived.long())
                left_out = questions.left_out[firings.question]
                is_asked = torch.where(
                    left_out > 0,
                    firings.candidate == left_out,
                    ~is_fact[row.clamp(min=0)],
                )
                kept = is_asked & (row >= 0)
                keys.append(row[kept] * task.sizes.n_rules + firings.rule[kept])
        return DerivabilityIndex(
            atom_index=index,
            height=torch.zeros_like(atoms[:, 0]),
            derivation_keys=unique_values(torch.cat(keys)),
        )

    def _rank_side(
        self,
        queries: list[OpenQuery],
        side: int,
        with_known: bool,
        with_self: bool,
    ) -> dict[OpenQuery, RankedAnswers]:
        """The answers of distinct, ascending queries about one side."""
        atoms = self._query_atoms(queries, side)
        listing = self._list(atoms, side, with_known, with_self)
        log_odds = self.score(listing.atom, side)
        score = rank_metrics.quantise(log_odds)
        is_derivable = ~listing.is_known
        if with_known:
            known = listing.atom[listing.is_known]
            is_derivable = is_derivable.masked_scatter(
                listing.is_known, self._is_derivable(known)
            )
        known_range = triple_index.answer_range(self.known, atoms, side)
        n_known = (known_range.stop - known_range.start).tolist()
        is_left_out = listing.is_left_out.tolist()

        bounds = torch.searchsorted(
            listing.query,
            torch.arange(len(queries) + 1, device=listing.query.device),
        ).tolist()
        answers: dict[OpenQuery, RankedAnswers] = {}
        for row, query in enumerate(queries):
            span = slice(bounds[row], bounds[row + 1])
            answers |= {
                query: _order(
                    query,
                    listing.entity[span],
                    score[span],
                    listing.is_known[span],
                    is_derivable[span],
                    n_known[row],
                    int(is_left_out[row]),
                )
            }
        return answers

    def _query_atoms(self, queries: list[OpenQuery], side: int) -> Tensor:
        """The queries as atoms with 0 in the place of the variable, [Q, W]."""
        width = self.task.sizes.atom_width
        rows: list[list[int]] = []
        for predicate, _, given in queries:
            arguments = [0, given] if side == HEAD else [given, 0]
            rows.append([predicate, *arguments, *[0] * (width - TAIL - 1)])
        return torch.tensor(rows, device=self.task.entity_pool.device)

    def _list(
        self, atoms: Tensor, side: int, with_known: bool, with_self: bool
    ) -> _Listing:
        """The derivable entities of each query, and perhaps the known ones and its own."""
        base = self.task.sizes.n_constants + 1
        parts = [self._derivable_codes(atoms, side)]
        if with_known:
            answers = triple_index.list_answers(self.known, atoms, side)
            parts.append(answers.query_row * base + answers.entity)
        code = unique_values(torch.cat(parts))
        query, entity = code // base, code % base
        column = torch.arange(atoms.shape[1], device=atoms.device)
        atom = torch.where(column == side, entity[:, None], atoms[query])
        is_known = triple_index.contains(self.known, atom, side)
        is_left_out = torch.zeros_like(is_known)
        if not with_self:
            is_loop = atom[:, HEAD] == atom[:, TAIL]
            is_left_out = is_loop & ~self.has_loops[atom[:, 0]]

        keep = ~is_left_out if with_known else ~is_left_out & ~is_known
        rows = torch.arange(len(atoms), device=atoms.device)
        of_query = torch.isin(rows, query[is_left_out])
        return _Listing(
            query[keep], entity[keep], atom[keep], is_known[keep], of_query
        )

    def _derivable_codes(self, atoms: Tensor, side: int) -> Tensor:
        """row * (C + 1) + entity for the derivable entities of each query."""
        base = self.task.sizes.n_constants + 1
        if self.derivable is not None:
            answers = triple_index.list_answers(self.derivable, atoms, side)
            return answers.query_row * base + answers.entity
        assert self.facts is not None, "T_P is held in part"

        # Queries are distinct and ascend by predicate and entity, as the questions of the evidence do.
        parts = [atoms.new_zeros(0)]
        n_before = 0
        for questions, part in evidence_ranking.query_evidence(
            self.task, self.facts, atoms, side
        ):
            row = (n_before + part.question).to(atoms.device)
            parts.append(row * base + part.entity.to(atoms.device))
            n_before += len(questions.entity)
        return torch.cat(parts)

    def _score_distinct(
        self, atoms: Tensor, side: int, make_scorer: ScorerMaker
    ) -> Tensor:
        """The log-odds of atoms by the scorer of a side, each distinct atom scored once."""
        distinct = unique_rows(atoms)
        task = self.task_for(distinct) if self.reads_derivations else self.task
        scorer = make_scorer(task)
        if isinstance(scorer, ScorerBySide):
            scorer = scorer.of(side)
        scored = ranking.score_distinct_atoms(
            scorer, atoms, self.task.sizes, side
        )
        return scored.log_odds[scored.row]

    def _is_fact(self, atoms: Tensor) -> Tensor:
        """Whether each atom is a fact that the rules are applied to."""
        kb = self.task.kb
        is_fact = kbase.contains(kb, self.task.sizes, atoms.to(kb.facts.device))
        return is_fact.to(atoms.device)

    def _is_derivable(self, atoms: Tensor) -> Tensor:
        """Whether the rules derive each distinct atom, a fact from other facts."""
        if not len(atoms):
            return atoms.new_zeros(0, dtype=torch.bool)
        task = self.task_for(unique_rows(atoms))
        order, index = kbase.sort_and_index_atoms(
            atoms, task.sizes.n_predicates, task.sizes.n_constants
        )
        ascending = atoms[order].to(task.kb.facts.device, torch.int32)
        rows = [atoms.new_zeros(0)]
        for part in scorers.iter_task_derivations(task, ascending):
            rows.append(part.atom_row.to(atoms.device))
        is_derived = torch.isin(
            torch.arange(len(atoms), device=atoms.device), torch.cat(rows)
        )
        is_derived = is_derived[kbase.find_atoms(index, task.sizes, atoms)]
        return is_derived & ~is_unproved_fact(task, atoms)


def make_predictor(
    task: ProverTask,
    make_scorer: ScorerMaker,
    make_fact_scorer: ScorerMaker | None = None,
    *,
    reads_derivations: bool = True,
) -> Predictor:
    """Index the known and the derivable triples of a task.

    Args:
      make_scorer: the scorer that ranks splits.
      make_fact_scorer: where that does not leave a fact out of its own score; None for the same scorer.
      reads_derivations: whether the scorers read which rules derive an atom.
    """
    device = task.entity_pool.device
    n_constants = task.sizes.n_constants
    known = torch.from_numpy(known_triples(task.dataset)).to(device)
    model = task.least_model
    is_whole = model.complete
    return Predictor(
        task=task,
        make_scorer=make_scorer,
        make_fact_scorer=make_fact_scorer or make_scorer,
        known=triple_index.build_triple_index(known, n_constants),
        derivable=triple_index.build_triple_index(model.atoms, n_constants)
        if is_whole
        else None,
        facts=None
        if is_whole
        else evidence.index_facts(task.kb, task.sizes, task.cfg.memory_share),
        has_loops=_relations_with_loops(task, known),
        reads_derivations=reads_derivations,
    )


def _relations_with_loops(
    task: ProverTask, known: I64[Tensor, "n W"]
) -> Bool[Tensor, "P+1"]:
    """Relations of which a known triple, or the head of a rule, has the same two arguments."""
    heads = torch.from_numpy(task.dataset.rules[:, 0]).to(known)
    atoms = torch.cat([known, heads])
    predicates = torch.arange(task.sizes.n_predicates + 1, device=known.device)
    if atoms.shape[1] <= TAIL:
        return torch.zeros_like(predicates, dtype=torch.bool)
    is_loop = atoms[:, HEAD] == atoms[:, TAIL]
    return torch.isin(predicates, atoms[is_loop, 0])


def probability(score: int) -> float:
    """The probability that a quantised score stands for."""
    if score <= rank_metrics.ZERO_SCORE:
        return 0.0
    log_odds = score * rank_metrics.SCORE_GRID_STEP
    smaller = 1.0 / (1.0 + math.exp(min(abs(log_odds), 700.0)))
    return smaller if log_odds < 0 else 1.0 - smaller


def _order(
    query: OpenQuery,
    entity: Tensor,
    score: Tensor,
    is_known: Tensor,
    is_derivable: Tensor,
    n_known: int,
    n_self: int,
) -> RankedAnswers:
    """The answers of a query, listed by ascending entity, with the best score first."""
    score, order = torch.sort(score, descending=True, stable=True)
    # A score that is repeated has the rank of its first answer.
    rank = 1 + torch.searchsorted(-score, -score)
    return RankedAnswers(
        query=query,
        entity=entity[order],
        score=score,
        rank=rank,
        is_known=is_known[order],
        is_derivable=is_derivable[order],
        n_new=int((~is_known).sum()),
        n_known=n_known,
        n_self=n_self,
    )
