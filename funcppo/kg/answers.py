"""Answers of open queries r(h, X) and r(X, t), whether any split holds them or not; and all new facts of a relation.

A `Predictor` lists the entities that the rules derive for each query, scores them by the score that ranks splits, and
orders them. Known true answers, of all splits and of facts.txt, are left out and counted, or listed and marked. The
rules are applied to the facts of train and of facts.txt, as in an evaluation. An evaluation ranks the entity of a query
among its own answers; on request it is left out and counted, unless some triple of the relation, or the head of a rule,
links an entity to itself. Where T_P is held in part, which is so at height 1 only, the evidence of the questions lists
the candidates.

An `Answerer` gives them names, a verdict each, and on request a proof and the evidence: the command line and the Python
interface both ask one. `derive_relation_facts` works head entity by head entity and appends what it finds to FILE.part,
a line of JSON for each fact; `finish_relation_file` sorts these lines by score into FILE. What the lines depend on
stands in FILE.settings.json beside them.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import math
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo.core import files, record_log, tree
from funcppo.core.files import Json, named_errors, shorten, write_atomically
from funcppo.core.types import F64, I32, I64, Bool
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.rules import (
    Query,
    format_atom,
    free_variable,
    proof_names,
    read_query,
)
from funcppo.kg.logic import derive, fixpoint, proof, triple_index
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.derive import (
    DerivabilityIndex,
    open_questions,
)
from funcppo.kg.logic.joins import RowBudgetExceeded
from funcppo.kg.logic.proof import Proof
from funcppo.kg.logic.prove import Program
from funcppo.kg.logic.row_index import unique_rows, unique_values
from funcppo.kg.logic.triple_index import HEAD, SIDE_NAMES, TAIL, TripleIndex
from funcppo.kg.ranking import explain, rank_metrics, ranking, scoring
from funcppo.kg.ranking.explain import Explanation
from funcppo.kg.run.run import Run, make_weights
from funcppo.kg.run.subject import Subject
from funcppo.kg.scores import aggregation, evidence, link_embedding
from funcppo.kg.scores.evidence import FactIndex
from funcppo.kg.scores.learned import LearnedScore, Weights
from funcppo.kg.scores.score import Score, Term
from funcppo.kg.search.task import ProverTask, is_unproved_fact, known_triples

PROVED, NOT_DERIVABLE, UNPROVED = "proved", "not derivable", "unproved"
NO_EMBEDDING = (
    "unproved answers: expected a run with link embeddings, which alone rank them, got none (`funcppo train` has them "
    "where valid gains by them, or by questions.embedding True)"
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
# questions whose derivations are found one question at a time; for more, the rules are applied to all facts
MAX_INDEX_QUESTIONS = 256


# -- ranked answers of open queries, as ids


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
    by: Score
    """The score of all candidates."""
    known: TripleIndex
    """True triples, of all splits and of facts.txt."""
    derivable: TripleIndex | None
    """What T_P derives; None where it is held in part."""
    facts: FactIndex | None
    """Index of the facts, where T_P is held in part."""
    has_loops: Bool[Tensor, "P+1"]
    """Relations of which a known triple, or the head of a rule, links an entity to itself."""

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
        for rows, score_rows in (
            (~is_fact, scoring.score_atoms),
            (is_fact, scoring.score_facts),
        ):
            if rows.any():
                values = self._score_distinct(atoms[rows], side, score_rows)
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
            index = derive.index_atoms(kb, sizes, task.least_model, atoms)

        # A fact may be listed too that no rule derives.
        is_derived = torch.isin(
            torch.arange(len(atoms), device=atoms.device),
            index.derivation_keys // sizes.n_rules,
        )
        model = fixpoint.partial_model(
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
        new = atoms[~is_fact].long()
        n_asked, side = min(
            (len(open_questions(new, side).entity), side)
            for side in (HEAD, TAIL)
        )
        if n_asked + int(is_fact.sum()) > MAX_INDEX_QUESTIONS:
            return None
        sizes = task.sizes
        return derive.index_derivations(
            sizes,
            kbase.index_sorted_atoms(
                atoms, sizes.n_predicates, sizes.n_constants
            ),
            torch.zeros_like(atoms[:, 0]),
            derive.iter_derivations(
                self.facts.plan,
                task.kb,
                atoms.long(),
                side,
                object_identity=task.least_model.object_identity,
            ),
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
            listed = triple_index.list_answers(self.known, atoms, side)
            parts.append(listed.query_row * base + listed.entity)
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
            listed = triple_index.list_answers(self.derivable, atoms, side)
            return listed.query_row * base + listed.entity
        assert self.facts is not None, "T_P is held in part"

        # Queries are distinct and ascend by predicate and entity, as the questions of the evidence do.
        parts = [atoms.new_zeros(0)]
        n_before = 0
        for questions, part in scoring.query_evidence(
            self.task, self.facts, atoms, side
        ):
            row = (n_before + part.question).to(atoms.device)
            parts.append(row * base + part.entity.to(atoms.device))
            n_before += len(questions.entity)
        return torch.cat(parts)

    def _score_distinct(
        self,
        atoms: Tensor,
        side: int,
        score_rows: Callable[[ProverTask, Score, Tensor, int], Tensor],
    ) -> Tensor:
        """The log-odds of atoms as answers about a side, each distinct atom scored once."""
        task = self.task
        if self.by.facts is None:  # rules or a search read what T_P holds
            task = self.task_for(unique_rows(atoms))
        scored = ranking.score_distinct_atoms(
            partial(score_rows, task, self.by), atoms, self.task.sizes, side
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
        for part in scoring.iter_task_derivations(task, ascending):
            rows.append(part.atom_row.to(atoms.device))
        is_derived = torch.isin(
            torch.arange(len(atoms), device=atoms.device), torch.cat(rows)
        )
        is_derived = is_derived[kbase.find_atoms(index, task.sizes, atoms)]
        return is_derived & ~is_unproved_fact(task, atoms)


def make_predictor(task: ProverTask, score: Score) -> Predictor:
    """Index the known and the derivable triples of a task, to rank answers by the score that ranks splits.

    Raises:
      ValueError: the score tells candidates that no rule derives apart.
    """
    if score.scores_unprovable:
        raise ValueError(
            f"--score {score.name}: expected a score of what the rules derive, {score.name} ranks all other entities "
            "too"
        )
    device = task.entity_pool.device
    n_constants = task.sizes.n_constants
    known = torch.from_numpy(known_triples(task.dataset)).to(device)
    model = task.least_model
    is_whole = model.complete
    return Predictor(
        task=task,
        by=score,
        known=triple_index.build_triple_index(known, n_constants),
        derivable=triple_index.build_triple_index(model.atoms, n_constants)
        if is_whole
        else None,
        facts=None
        if is_whole
        else evidence.index_facts(task.kb, task.sizes, task.cfg.memory_share),
        has_loops=_relations_with_loops(task, known),
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


def score_settings(subject: Subject) -> Json:
    """What the scores of a subject depend on, for the files of interrupted work."""
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
    """A hash of parameters, 16 hexadecimal digits."""
    found = hashlib.sha256()
    for leaf in tree.leaves(params):
        found.update(leaf.numpy(force=True).tobytes())
    return found.hexdigest()[:16]


# -- proofs by the policy of a run


def most_probable_proof(
    run: Run,
    atom: Tensor,
    program: Program | None = None,
    explanation: Explanation | None = None,
) -> Proof | None:
    """The proof of a ground atom that a run finds most probable; None if it finds none.

    A run that learns from questions takes the rule with the largest share, as an answer about the tail.

    Args:
      atom: [W].
      program: what `explain.build_program` returns; None builds it for this call.
      explanation: of the atom as an answer about the tail, if it is there already.
    """
    program = program or explain.build_program(run.task)
    if run.questions is None:
        return explain.most_probable_proof(
            run.task, run.cfg, run.state.best_params, atom, program=program
        )
    explanation = explanation or explain_answer(run, atom, TAIL)
    if explanation is None:
        return None
    best = explanation.rules[0]
    return explain.proof_by_rule(run.task, program, atom, best.rule, best.share)


def most_probable_proofs(
    run: Run, atoms: I64[Tensor, "n W"], program: Program
) -> list[Proof | None]:
    """The proof that a run finds most probable of each of some atoms, as `most_probable_proof` gives it."""
    if run.questions is None:
        return [most_probable_proof(run, atom, program) for atom in atoms]
    proofs: list[Proof | None] = []
    facts = explain.facts_on_host(run.task)
    for atom, best in zip(atoms, _best_rules(run, atoms)):
        if best is None:
            proofs.append(None)
            continue
        built = explain.proof_by_rule(run.task, program, atom, *best, facts)
        proofs.append(built)
    return proofs


def _best_rules(
    run: Run, atoms: I64[Tensor, "n W"]
) -> list[tuple[int, float] | None]:
    """The rule with the largest share, and its share, of each atom as an answer about its tail; None without a rule."""
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
        amounts = aggregation.firing_amounts(
            weights.cfg,
            weights.world,
            weights.params,
            aggregation.whole(part),
        )
        for row in (
            torch.isin(key, wanted.to(key.device)).nonzero().squeeze(1).tolist()
        ):
            firings = slice(*part.firing_offsets[row : row + 2].tolist())
            share = amounts[firings] / amounts[firings].sum()
            first = int(share.argmax())
            rule = int(part.rule[firings][first])
            best |= {int(key[row]): (rule, float(share[first]))}
    return [best.get(key) for key in wanted.tolist()]


def run_weights(run: Run) -> Weights:
    """The best weights of a run that learns from questions."""
    assert run.questions is not None, "the run learns from questions"
    left_out = run.run_config.questions.left_out
    assert left_out != "auto", "a stored run has what it chose"
    return make_weights(
        run.task, run.questions, run.state.best_params, left_out
    )


def explain_answer(run: Run, atom: Tensor, side: int) -> Explanation | None:
    """The evidence of an atom as an answer about one side; None if no rule derives it, or the run weighs none."""
    if run.questions is None:
        return None
    score = LearnedScore(run.score, run_weights(run))
    return explain.explain_answer(run.task, score, atom, side)


# -- answers in names


class AnswerProof(NamedTuple):
    """Why an answer is derivable."""

    dataset: Dataset
    proof: Proof | None  # None if the search found none
    # what a run weighs that learnt from questions, as an answer to the query
    evidence: Explanation | None
    # what the score of rules adds up beside them, as an answer about a side: what other facts of the relation say
    atom: tuple[int, ...] = ()
    side: int = TAIL
    terms: Sequence[Term] = ()

    def __repr__(self) -> str:
        """The lines of the proof and the evidence, for people."""
        return "\n".join(self.to_lines())

    def to_lines(self) -> list[str]:
        """The proof as an indented tree, and the evidence or what other facts add."""
        score_lines = [
            explain.other_facts_line(self.dataset, self.atom, self.side, term)
            for term in self.terms
        ]
        if self.proof is None:
            return ["no proof was found", *score_lines]
        names = proof_names(self.dataset)
        text = proof.to_text(self.proof, names.format_atom, names.format_rule)
        lines = text.rstrip("\n").split("\n")
        if self.evidence is not None:
            lines += explain.explanation_lines(self.dataset, self.evidence)
        return lines + score_lines

    def to_json(self) -> Json:
        """The proof, and the evidence or what other facts add, as JSON values."""
        fields: Json = {"proof": None}
        if self.proof is not None:
            names = proof_names(self.dataset)
            fields["proof"] = json.loads(proof.to_json(self.proof, *names))
        if self.evidence is not None:
            fields["evidence"] = explain.explanation_json(
                self.dataset, self.evidence
            )
        for term in self.terms:
            fields["other_facts"] = explain.other_facts_json(
                self.dataset, self.atom, self.side, term
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
        self.predictor = make_predictor(subject.task, subject.score)

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
            evidence = explain_answer(run, atom, side)
            found = most_probable_proof(
                run,
                atom,
                self._program,
                evidence if side == TAIL else None,
            )
        else:
            (found,) = explain.smallest_proofs(task, atom[None], self._program)
        if found is None:
            found = self._proof_from_other_facts(atom)
        terms: list[Term] = []
        if self.subject.score.facts is None:
            (terms,) = explain.explain_atoms(
                task, self.subject.score, atom[None], side
            )
        ids = tuple(atom.tolist())
        return AnswerProof(self.dataset, found, evidence, ids, side, terms)

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


# -- all new facts of a relation, in a file that a killed process can be resumed from

# head entities of a step; later steps are longer or shorter, as time and memory allow
FIRST_STEP_HEADS = 64
MAX_STEP_HEADS = 1 << 14
TARGET_STEP_SECONDS = 2.0
MAX_STEP_FACTS = 1 << 18
# quantised score that stands for 0 in FILE.part
_ZERO = -(2**53)


class Progress(NamedTuple):
    """How far the search for new facts is."""

    n_heads: int  # head entities that are done
    n_all_heads: int
    n_facts: int  # facts that were found


@dataclass(frozen=True, kw_only=True, slots=True)
class RelationFile:
    """The file of the new facts of a relation."""

    path: Path
    """FILE: CSV if it ends in .csv, else lines of JSON."""
    settings: Json
    """What its lines depend on."""

    @property
    def part_path(self) -> Path:
        """The facts that were found, in the order of head entities."""
        return record_log.part_path(self.path)

    @property
    def settings_path(self) -> Path:
        """The settings beside the facts."""
        return record_log.settings_path(self.path)


def open_relation_file(
    file: RelationFile, *, resume: bool, overwrite: bool
) -> int | None:
    """Prepare the files of new work, or find out where earlier work ended.

    Args:
      resume: continue from FILE.part, if it is there.
      overwrite: replace the files of earlier work.

    Returns:
      The head entity to continue with; facts of this one and of later ones are not in FILE.part. None if FILE is
      complete.

    Raises:
      ValueError: there is earlier work and neither is set, or it was done with other settings.
    """
    has_part = file.part_path.is_file()
    if (has_part or file.path.exists()) and not (resume or overwrite):
        got = (
            f"unfinished work in {file.part_path}"
            if has_part
            else "a file that exists"
        )
        raise ValueError(
            f"--out {file.path}: expected --resume, --overwrite or a new file, got {got}"
        )
    if resume and (has_part or file.path.exists()):
        record_log.check_settings(file.settings_path, file.settings, file.path)
        return _truncate_to_whole_heads(file.part_path) if has_part else None

    record_log.write_settings(file.settings_path, file.settings)
    write_atomically(file.part_path, lambda f: f.write(b""))
    return 1


def derive_relation_facts(
    answerer: Answerer,
    predicate: int,
    file: RelationFile,
    first_head: int,
    min_score: float = 0.0,
    *,
    with_self: bool = False,
) -> Iterator[Progress]:
    """Append the new facts of a relation to FILE.part, some head entities at a time.

    Args:
      first_head: what `open_relation_file` returns.
      min_score: leave out facts that score less.
      with_self: keep facts r(e, e) of a relation without loops too; otherwise `finish_relation_file` leaves them out.

    Returns:
      Yields the progress after each step, at which the work may end.
    """
    n_heads = answerer.dataset.n_constants
    n_facts = 0
    has_loops = bool(answerer.predictor.has_loops[predicate])
    leave_out_self = not (with_self or has_loops)
    head, size = first_head, FIRST_STEP_HEADS
    path = file.part_path
    with named_errors(path), open(path, "ab") as output:
        while head <= n_heads:
            start = time.perf_counter()
            heads = range(head, min(head + size, n_heads + 1))
            queries = [OpenQuery(predicate, TAIL, h) for h in heads]
            answers = answerer.answer(
                queries, k=None, with_self=True, min_score=min_score
            )
            lines = _part_lines(heads, answers, leave_out_self)
            output.write("".join(lines).encode())
            output.flush()

            head += len(heads)
            n_facts += len(lines)
            yield Progress(head - 1, n_heads, n_facts)
            seconds = max(time.perf_counter() - start, 1e-3)
            for_time = len(heads) * TARGET_STEP_SECONDS / seconds
            for_memory = len(heads) * MAX_STEP_FACTS / max(len(lines), 1)
            largest = min(4 * len(heads), for_time, for_memory, MAX_STEP_HEADS)
            size = max(FIRST_STEP_HEADS, int(largest))


def finish_relation_file(file: RelationFile) -> tuple[int, int]:
    """Write FILE, the facts of FILE.part with the best first, and remove FILE.part.

    Returns:
      The number of facts, and of those r(e, e) that are left out, as nothing says that the relation may link an
      entity to itself.
    """
    offsets, scores, n_self = _read_part(file.part_path)
    order = np.argsort(-np.array(scores, np.int64), kind="stable")
    starts = np.array(offsets, np.int64)[order]
    sorted_scores = np.array(scores, np.int64)[order]
    # A score that is repeated has the rank of its first fact.
    ranks = 1 + np.searchsorted(-sorted_scores, -sorted_scores)
    is_csv = file.path.suffix == ".csv"

    def write(output: IO[bytes]) -> None:
        if is_csv:
            output.write(_format_row(CSV_COLUMNS))
        with open(file.part_path, "rb") as part:
            for start, rank in zip(starts.tolist(), ranks.tolist()):
                part.seek(start)
                fields = {"rank": rank, **json.loads(part.readline())}
                del fields["head_id"], fields["is_self"]
                output.write(_format_line(fields, is_csv))

    write_atomically(file.path, write)
    file.part_path.unlink()
    return len(ranks), n_self


def _read_part(path: Path) -> tuple[array[int], array[int], int]:
    """Where the lines of FILE.part start that stand in FILE, their scores, and the number of the others."""
    offsets, scores = array("q"), array("q")
    n_self, offset = 0, 0
    with open(path, "rb") as part:
        for line in part:
            fields = json.loads(line)
            score = fields["quantised_score"]
            if fields["is_self"]:
                n_self += 1
            else:
                offsets.append(offset)
                scores.append(_ZERO if score is None else score)
            offset += len(line)
    return offsets, scores, n_self


def _format_line(fields: Json, is_csv: bool) -> bytes:
    """A fact as a line of CSV or JSON."""
    if is_csv:
        return _format_row(csv_row(fields))
    text = json.dumps(fields, ensure_ascii=False) + "\n"
    return files.escape_unprintable(text).encode()


def _format_row(values: Iterable[object]) -> bytes:
    """A row of CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue().encode()


def _part_lines(
    heads: Iterable[int], answers: Iterable[QueryAnswers], leave_out_self: bool
) -> list[str]:
    """The facts of some heads as lines of FILE.part."""
    lines: list[str] = []
    for head, found in zip(heads, answers):
        for answer in found.answers:
            is_self = leave_out_self and answer.head == answer.tail
            lines.append(_part_line(head, found.query, answer, is_self))
    return lines


def _part_line(head_id: int, query: str, answer: Answer, is_self: bool) -> str:
    """A fact as a line of FILE.part."""
    marks = {"head_id": head_id, "is_self": is_self}
    fields = {**marks, "query": query, **answer.to_json()}
    del fields["rank"]  # among the answers of the query
    return json.dumps(fields, ensure_ascii=False) + "\n"


def _truncate_to_whole_heads(path: Path) -> int:
    """Cut off the facts of the last head entity, which may be incomplete; return it, 1 if there is none."""
    with open(path, "rb+") as part:
        offset, start, head = 0, 0, 1
        for line in part:
            if not line.endswith(b"\n"):
                break
            head_id = int(json.loads(line)["head_id"])
            if head_id != head:
                head, start = head_id, offset
            offset += len(line)
        part.truncate(start)
    return head
