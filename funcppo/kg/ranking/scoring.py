"""Where scores find the evidence of candidates: what a task holds or derives, and the evidence of their questions.

`score_atoms` gives the log-odds of atoms as answers about a side by any score. A score that reads the evidence of
questions has it collected for what it scores, or by `query_evidence` once for many scores (`CollectedEvidence`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo.core.types import F64, I32, I64, Bool
from funcppo.kg.logic import (
    derive,
    fixpoint,
    joins,
    triple_index,
)
from funcppo.kg.logic.derive import (
    GroundingWork,
    Questions,
    make_label,
    open_questions,
    select_questions,
)
from funcppo.kg.logic.fixpoint import Derivations
from funcppo.kg.logic.kb import KBSizes
from funcppo.kg.logic.row_index import sort_keys
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.scores import evidence, other_facts, rules
from funcppo.kg.scores.evidence import Evidence, EvidenceConfig, FactIndex
from funcppo.kg.scores.other_facts import OtherFactCounts
from funcppo.kg.scores.score import Candidates, Score
from funcppo.kg.search.slot_scheduler import ProgressCallback, ignore_progress
from funcppo.kg.search.task import (
    PhaseCallback,
    ProverTask,
    ignore_phase,
    is_unproved_fact,
    with_answers,
    with_other_facts,
)

# Each collection of evidence solves every rule's body, so it ranks at least as many queries.
MIN_CHUNK_QUERIES = 256
# queries whose firings tell how many queries keep within a bound
PILOT_QUERIES = 64


class TaskCandidates(Candidates):
    """Candidates with what a task holds of them, or derives."""

    def __init__(
        self, task: ProverTask, atoms: I32[Tensor, "L W"], side: int
    ) -> None:
        """Take the task, distinct atoms in lexicographic order, and the side that they answer."""
        self.kb, self.atoms, self.index = (
            task.kb,
            atoms,
            task.derivability_index,
        )
        self._task, self._side = task, side

    def __len__(self) -> int:
        """The number of candidates."""
        return len(self.atoms)

    def derivations(self) -> Iterable[Derivations]:
        """The rules that derive each candidate, a fact from other facts."""
        if derives_by_question(self._task):
            return iter_answer_derivations(self._task, self._side, self.atoms)
        return iter_task_derivations(self._task, self.atoms)

    def derived_within(self, height: int) -> Bool[Tensor, "L"]:
        """Whether T_P derives each candidate within a height, a fact from other facts."""
        task = with_answers(self._task, self.atoms, (TAIL,))
        is_derived = rules.is_derived(task.least_model, height, self.atoms)
        is_unproved = is_unproved_fact(task, self.atoms)
        return is_derived & ~is_unproved.to(is_derived.device)

    def labels(self) -> I64[Tensor, "L"]:
        """The relation and the side that each candidate answers."""
        atoms = self.atoms.long().to(self.kb.facts.device)
        return make_label(atoms[:, 0], self._side)

    def other_fact_counts(self) -> OtherFactCounts:
        """The counts of the task, or new ones."""
        return _count_other_facts(self._task)

    def n_other_facts(self) -> I64[Tensor, "L"]:
        """How many other facts of its relation each candidate has on the asked side."""
        return other_facts.count_other_facts_of(
            self.kb,
            self._task.sizes,
            self.other_fact_counts().degrees,
            self.atoms.long().to(self.kb.facts.device),
            self._side,
        )


class QuestionCandidates(Candidates):
    """The candidates of questions with their evidence, by which a fact may be derived from itself."""

    def __init__(self, task: ProverTask, evidence: Evidence) -> None:
        """Take the evidence, collected from the facts of a task."""
        self.kb, self.evidence = task.kb, evidence
        self._task = task

    def __len__(self) -> int:
        """The number of candidates."""
        return len(self.evidence.entity)

    def derivations(self) -> Iterable[Derivations]:
        """The rules that derive each candidate."""
        n_firings = self.evidence.firing_offsets.diff()
        row = torch.repeat_interleave(n_firings)
        return [Derivations(row, self.evidence.rule)]

    def derived_within(self, height: int) -> Bool[Tensor, "L"]:
        """True: a rule derives each of them from facts."""
        return torch.ones_like(self.evidence.entity, dtype=torch.bool)

    def labels(self) -> I64[Tensor, "L"]:
        """The relation and the side that each candidate answers."""
        return self.evidence.label[self.evidence.question]

    def other_fact_counts(self) -> OtherFactCounts:
        """The counts of the task, or new ones."""
        return _count_other_facts(self._task)

    def n_other_facts(self) -> I64[Tensor, "L"]:
        """How many other facts of its relation each candidate has on the asked side."""
        return self.evidence.own_degree


def _count_other_facts(task: ProverTask) -> OtherFactCounts:
    """The counts of other facts of a task, which are made here where it has none."""
    counts = with_other_facts(task).other_facts
    assert counts is not None, "they are counted"
    return counts


class QuestionEvidence(NamedTuple):
    """Distinct questions about one side, ascending by predicate and entity, and their evidence."""

    questions: Questions
    evidence: Evidence


class QueryEstimate(NamedTuple):
    """How many queries keep within bounds."""

    n_queries: int
    # to collect their evidence, as the first of them did; many together take less
    seconds: float


# -- scores of atoms


def is_by_side(task: ProverTask, score: Score) -> bool:
    """Whether a score is asked for each side of an atom apart."""
    by_question = "rules" in score.needs and derives_by_question(task)
    return score.is_by_side or by_question


def with_score_counts(
    task: ProverTask, score: Score, on_phase: PhaseCallback = ignore_phase
) -> ProverTask:
    """The task with the counts of other facts, if a score reads them.

    Args:
      on_phase: receives how many rules are applied.
    """
    if "other-facts" in score.needs:
        return with_other_facts(task, on_phase)
    return task


def score_atoms(
    task: ProverTask,
    score: Score,
    atoms: I32[Tensor, "n W"],
    side: int,
    on_progress: ProgressCallback = ignore_progress,
) -> F64[Tensor, "n"]:
    """The log-odds of atoms as answers about a side, on the device of the atoms; -inf for a score of 0.

    Args:
      task: with the counts of `with_score_counts`, or they are made here.
      atoms: distinct, in lexicographic order.
      side: 0 for a score that is the same for all sides.
      on_progress: called with the number of atoms that have a score, and of all, where their evidence is collected.
    """
    if score.facts is None:
        found = TaskCandidates(task, atoms, side)
        return score.log_odds(found).double().to(atoms.device)
    parts = query_evidence(task, score.facts, atoms, side)
    return _score_parts(task, [score], parts, atoms, side, on_progress)[:, 0]


def score_facts(
    task: ProverTask, score: Score, atoms: I32[Tensor, "n W"], side: int
) -> F64[Tensor, "n"]:
    """The log-odds of known facts as answers about a side, each left out of the facts for its question.

    Args:
      atoms: distinct, in lexicographic order.
    """
    if score.facts is None:
        return score_atoms(task, score, atoms, side)
    kb, sizes = task.kb, task.sizes
    known = triple_index.build_triple_index(
        evidence.binary_facts(kb), sizes.n_constants
    )
    cfg = EvidenceConfig(
        left_out=score.left_out,
        object_identity=task.least_model.object_identity,
    )
    triple = atoms.long().to(kb.facts.device)
    questions = derive.own_questions(triple, side)
    scores = [torch.zeros(0, dtype=torch.float64, device=triple.device)]
    for part in evidence.iter_evidence(
        kb, sizes, score.facts, questions, known, cfg
    ):
        values = score.log_odds(QuestionCandidates(task, part)).double()
        # Row -1, of an answer that no rule derives, is the added one.
        values = torch.nn.functional.pad(values, (0, 1), value=-torch.inf)
        scores.append(values[part.answer])
    return torch.cat(scores).to(atoms.device)


def score_by_questions(
    task: ProverTask,
    facts: FactIndex,
    scores: Sequence[Score],
    atoms: I32[Tensor, "n W"],
    side: int,
    on_progress: ProgressCallback = ignore_progress,
) -> F64[Tensor, "n S"]:
    """The log-odds of atoms by several scores, for which the evidence of their questions is collected once."""
    parts = query_evidence(task, facts, atoms, side)
    return _score_parts(task, scores, parts, atoms, side, on_progress)


def _score_parts(
    task: ProverTask,
    scores: Sequence[Score],
    parts: Iterable[QuestionEvidence],
    atoms: I32[Tensor, "n W"],
    side: int,
    on_progress: ProgressCallback,
) -> F64[Tensor, "n S"]:
    """The log-odds of atoms by the evidence of the questions that they answer; -inf where no rule derives one."""
    atom, base = atoms.long(), task.sizes.n_constants + 1
    given, answer = atom[:, HEAD + TAIL - side], atom[:, side]
    question = atom[:, 0] * base + given
    wanted, order = sort_keys(question * base + answer)
    question = question[order]

    found = torch.full(
        (len(atom), len(scores)),
        -torch.inf,
        dtype=torch.float64,
        device=atom.device,
    )
    on_progress(0, len(atom))
    for questions, part in parts:
        prefix = questions.predicate * base + questions.entity
        key = prefix[part.question] * base + part.entity
        # The atoms that answer these questions are next to each other.
        ends = torch.stack([prefix[0], prefix[-1] + 1]).to(question.device)
        start, stop = torch.searchsorted(question, ends).tolist()
        candidates = QuestionCandidates(task, part)
        values = torch.stack(
            [score.log_odds(candidates).double() for score in scores], 1
        )
        found[order[start:stop]] = _look_up(
            key, values, wanted[start:stop].to(key.device)
        ).to(atom.device)
        on_progress(stop, len(atom))
    return found


def _look_up(
    key: I64[Tensor, "L"], value: F64[Tensor, "L S"], wanted: I64[Tensor, "n"]
) -> F64[Tensor, "n S"]:
    """The rows of values of the keys that are wanted; -inf where there is none.

    Args:
      key: ascending.
    """
    if not len(key):
        return value.new_full((len(wanted), value.shape[1]), -torch.inf)
    position = torch.searchsorted(key, wanted).clamp_max(len(key) - 1)
    is_there = key[position] == wanted
    return torch.where(is_there[:, None], value[position], -torch.inf)


# -- evidence of questions


def query_evidence(
    task: ProverTask,
    facts: FactIndex,
    atoms: Tensor,
    side: int,
    work: GroundingWork | None = None,
) -> Iterator[QuestionEvidence]:
    """Yield the evidence of all questions that some atoms ask about one side, some after others.

    Args:
      facts: of the task's knowledge base.
      atoms: ground and of two arguments [n, W].
      work: counts the work; None not to count it.
    """
    queries = atoms.long().to(task.kb.facts.device)
    questions = open_questions(queries, side)
    start = 0
    for part in evidence.iter_evidence(
        task.kb,
        task.sizes,
        facts,
        questions,
        None,
        EvidenceConfig(object_identity=task.least_model.object_identity),
        work,
    ):
        stop = start + len(part.label)
        chunk = select_questions(questions, slice(start, stop))
        yield QuestionEvidence(chunk, part)
        start = stop


def evidence_atoms(
    part: QuestionEvidence, sizes: KBSizes
) -> I32[Tensor, "n W"]:
    """The atoms of the candidates that have evidence."""
    questions, listed = part
    return derive.candidate_atoms(
        questions, listed.question, listed.entity, sizes
    )


def score_collected(
    task: ProverTask,
    parts: Mapping[int, Sequence[QuestionEvidence]],
    score: Score,
    atoms: I32[Tensor, "n W"],
    side: int,
) -> F64[Tensor, "n"]:
    """The log-odds of atoms that answer the questions of collected evidence.

    Args:
      parts: by side, as `query_evidence` yields them.
    """
    of_side = parts.get(side, ())
    found = _score_parts(task, [score], of_side, atoms, side, ignore_progress)
    return found[:, 0]


def count_queries_within(
    task: ProverTask,
    facts: FactIndex,
    queries: np.ndarray,
    sides: Sequence[int],
    max_firings: float,
    max_rows: float,
) -> QueryEstimate:
    """Estimate how many of some queries keep two bounds together, from the first of them; at least one.

    Args:
      max_firings: the most firings.
      max_rows: the most rows that the joins make for them.
    """
    start = time.monotonic()
    pilot = torch.from_numpy(np.ascontiguousarray(queries[:PILOT_QUERIES]))
    work = GroundingWork()
    n_firings = sum(
        len(part.evidence.rule)
        for side in sides
        for part in query_evidence(task, facts, pilot, side, work)
    )
    share = max(n_firings / max_firings, work.n_rows / max_rows)
    n_pilot = max(len(pilot), 1)
    per_query = max(share / n_pilot, 1e-12)
    n_queries = min(len(queries), max(1, int(1 / per_query)))
    seconds = (time.monotonic() - start) * n_queries / n_pilot
    return QueryEstimate(n_queries, seconds)


# -- derivations of a task


def derives_by_question(task: ProverTask) -> bool:
    """Whether the rules that derive an atom are found by its question, because no derivations are held."""
    return task.answers_plan is not None and task.derivability_index is None


def iter_answer_derivations(
    task: ProverTask, side: int, atoms: Tensor
) -> Iterator[Derivations]:
    """The rules that derive each atom, a fact from other facts, found by the questions about a side.

    Args:
      task: one that `derives_by_question`.
      atoms: of two arguments, distinct, in lexicographic order.
    """
    assert task.answers_plan is not None, "each query derives its own answers"
    return derive.iter_derivations(
        task.answers_plan,
        task.kb,
        atoms.long().to(task.kb.facts.device),
        side,
        object_identity=task.least_model.object_identity,
    )


def iter_task_derivations(
    task: ProverTask, atoms: Tensor
) -> Iterator[Derivations]:
    """The rules that derive each atom, a fact from other facts: from the index where it holds them, else by joins.

    Args:
      atoms: distinct, in lexicographic order.
    """
    if task.max_height == 1 and task.derivability_index is not None:
        return derive.iter_indexed_derivations(
            task.derivability_index,
            task.sizes,
            atoms,
            joins.MAX_CHUNK_ROWS,
        )
    return fixpoint.iter_derivations(
        task.kb,
        task.sizes,
        task.least_model,
        task.max_height,
        atoms,
    )
