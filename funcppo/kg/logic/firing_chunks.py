"""The firings of many questions, as many at once as bounds on memory allow.

`iter_firing_chunks` is the entry point, and `map_firing_chunks` where something is computed from each chunk. Several
threads compute the parts of a chunk; any number of them gives the same firings. `derive_answers` lists the atoms that
rules derive for some queries.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from funcppo.core.cores import MAX_THREADS, map_in_threads
from funcppo.core.deadline import NO_DEADLINE, Deadline
from funcppo.core.types import I32, I64
from funcppo.kg.logic import row_index, sorting
from funcppo.kg.logic.firings import FiringPlan, iter_firings
from funcppo.kg.logic.joins import (
    JOIN_OVERHEAD_ROWS,
    RowBudget,
    RowBudgetExceeded,
)
from funcppo.kg.logic.kb import KBSizes
from funcppo.kg.logic.question_types import (
    Firings,
    LeftOut,
    Questions,
    select_firings,
    select_questions,
)
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.logic.typed_torch import unique_rows

# firings to hold at once, about 300 bytes each
MAX_CHUNK_FIRINGS = 4_000_000
# rows that the joins of a chunk of questions make, about 40 bytes each for those that are held at once
MAX_CHUNK_JOIN_ROWS = 24_000_000
# links of the candidates of a chunk, about 60 bytes each while they are looked up
MAX_CHUNK_LINKS = 8_000_000
# a shorter time tells no speed
MIN_TIMED_SECONDS = 1e-3
# A GPU takes larger chunks, of some 10 GB, in the same time.
GPU_CHUNK_FACTOR = 8
# questions whose work tells how many questions fit a chunk
PILOT_QUESTIONS = 16
MAX_CHUNK_GROWTH = 32  # factor from one chunk of questions to the next
# Parts of a chunk, any of which a thread may take; the same for any number of threads, so that bounds on rows are too.
# Several times the threads: those computed at once then hold a part of a chunk, whatever the number of threads.
MAX_PARTS = 4 * MAX_THREADS
# rows of joins and firings that a part has, at least: some 50 ms, less is slower by two threads than by one
MIN_PART_ROWS = 500_000

Computed = TypeVar("Computed")


@dataclass(slots=True)
class FiringWork:
    """The work of listing firings, and what is left out because of it.

    Attributes:
      leaves_out: a question whose joins alone make more rows than a chunk may is left out: it has no firings.
      n_rows: the rows that joins have made, of chunks that were too large included.
      n_left_out: the questions left out so far.
      n_links: what the caller holds beside firings, links of candidates, counted by the caller.
      deadline: a chunk has no more questions than there is time for, at the speed of those before.
    """

    leaves_out: bool = False
    n_rows: int = 0
    n_left_out: int = 0
    n_links: int = 0
    deadline: Deadline = NO_DEADLINE


class FiringChunk(NamedTuple):
    """Some questions and all their firings, in the order of question, candidate and rule."""

    questions: Questions
    firings: Firings


def iter_firing_chunks(
    plan: FiringPlan,
    questions: Questions,
    *,
    left_out: LeftOut = "fact",
    object_identity: bool = False,
    work: FiringWork | None = None,
    budget: RowBudget | None = None,
) -> Iterator[FiringChunk]:
    """Yield the firings of some questions after others: see `map_firing_chunks`."""
    return map_firing_chunks(
        FiringChunk,
        plan,
        questions,
        left_out=left_out,
        object_identity=object_identity,
        work=work,
        budget=budget,
    )


def map_firing_chunks(
    compute: Callable[[Questions, Firings], Computed],
    plan: FiringPlan,
    questions: Questions,
    *,
    left_out: LeftOut = "fact",
    object_identity: bool = False,
    work: FiringWork | None = None,
    budget: RowBudget | None = None,
    n_threads: int | None = None,
) -> Iterator[Computed]:
    """Yield what is computed from the firings of some questions after others.

    A chunk whose joins make too many rows is halved, down to one question, which may make any number unless `work`
    leaves it out.

    Args:
      compute: of some questions and all their firings, in the order of question, candidate and rule; called by several
        threads.
      questions: distinct.
      left_out: see `firings.iter_firings`.
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      work: counts the work, and says what to do with a question that is too large.
      budget: bounds the rows of all chunks together; None for no bound.
      n_threads: that share a chunk on a CPU; None for those of `cores.count_threads`.

    Raises:
      RowBudgetExceeded: all chunks make more rows than the budget allows.
    """
    work = FiringWork() if work is None else work
    fire = _Firing(plan, left_out, object_identity, work, n_threads)
    done = _Done(began=work.deadline.clock(), n_links_before=work.n_links)
    factor = _chunk_factor(plan, questions)
    size = PILOT_QUESTIONS
    while done.n_questions < len(questions.entity):
        rows = slice(done.n_questions, done.n_questions + size)
        chunk = select_questions(questions, rows)
        # A GPU works on a whole chunk at once.
        is_shared = not questions.entity.is_cuda
        n_parts = done.count_parts(len(chunk.entity)) if is_shared else 1
        computed = _compute_chunk(fire, compute, chunk, n_parts)
        work.n_rows += computed.n_rows
        if budget is not None:
            budget.spend(computed.cost)
        if computed.parts is None:
            size = len(chunk.entity) // 2
            continue
        yield from computed.parts
        done.n_questions += len(chunk.entity)
        done.n_firings += computed.n_firings
        done.n_rows += computed.n_rows
        size = done.next_size(size, factor, work)


@dataclass(slots=True)
class _Done:
    """What was computed before a chunk of questions, which says how large that may be."""

    began: float  # on the clock of the deadline
    n_links_before: int
    n_questions: int = 0
    n_firings: int = 0
    n_rows: int = 0

    def count_parts(self, n_asked: int) -> int:
        """The parts of a chunk of so many questions, by the work of those before."""
        expected = n_asked * (self.n_firings + self.n_rows)
        expected //= max(1, self.n_questions)
        return max(1, min(MAX_PARTS, n_asked // 2, expected // MIN_PART_ROWS))

    def next_size(self, size: int, factor: float, work: FiringWork) -> int:
        """The questions of a chunk after one of so many.

        Args:
          factor: how many times the bounds of a chunk apply.
        """
        fitting = min(
            int(factor * self.n_questions * bound) // max(1, count)
            for bound, count in (
                (MAX_CHUNK_FIRINGS, self.n_firings),
                (MAX_CHUNK_LINKS, work.n_links - self.n_links_before),
                (MAX_CHUNK_JOIN_ROWS, self.n_rows),
            )
        )
        left = work.deadline.seconds_left
        if not math.isinf(left):
            seconds = work.deadline.clock() - self.began
            in_time = self.n_questions * left / max(seconds, MIN_TIMED_SECONDS)
            fitting = min(fitting, int(in_time))
        return max(1, min(fitting, size * MAX_CHUNK_GROWTH))


@dataclass(frozen=True, slots=True)
class _Firing:
    """How the firings of questions are computed."""

    plan: FiringPlan
    left_out: LeftOut
    object_identity: bool
    work: FiringWork
    n_threads: int | None


class _ComputedChunk(NamedTuple, Generic[Computed]):
    """What is computed from the questions of a chunk."""

    parts: list[Computed] | None  # None where joins make too many rows
    n_firings: int
    n_rows: int  # that joins made
    cost: int  # in rows of joins


def _compute_chunk(
    fire: _Firing,
    compute: Callable[[Questions, Firings], Computed],
    chunk: Questions,
    n_parts: int,
) -> _ComputedChunk[Computed]:
    """Compute something from the firings of a chunk, in parts of about as many questions.

    Args:
      n_parts: if several, each has two questions or more.
    """
    most = _max_chunk_rows(fire.plan, chunk, fire.work)
    bounds = [len(chunk.entity) * i // n_parts for i in range(n_parts + 1)]
    parts = [select_questions(chunk, slice(*ends)) for ends in pairwise(bounds)]
    # Parts that are computed at once make at most four times the rows of a chunk.
    of_part = min(most, 4 * most // min(n_parts, MAX_THREADS))
    budgets = [RowBudget(of_part, overhead=0) for _ in parts]

    def compute_part(
        job: tuple[Questions, RowBudget],
    ) -> tuple[Computed, int] | None:
        part, budget = job
        firings = _bounded_firings(fire, part, budget)
        if firings is None:
            return None
        return compute(part, firings), len(firings.rule)

    jobs = list(zip(parts, budgets, strict=True))
    computed = map_in_threads(compute_part, jobs, fire.n_threads)
    done = [part for part in computed if part is not None]
    n_rows = sum(budget.n_rows for budget in budgets)
    fits = len(done) == n_parts and (n_parts == 1 or n_rows <= most)
    return _ComputedChunk(
        parts=[part for part, _ in done] if fits else None,
        n_firings=sum(n for _, n in done),
        n_rows=n_rows,
        # The joins of the parts are those of the chunk.
        cost=n_rows + max(b.n_joins for b in budgets) * JOIN_OVERHEAD_ROWS,
    )


def _chunk_factor(plan: FiringPlan, questions: Questions) -> float:
    """How many times the bounds of a chunk apply where the questions are."""
    largest = GPU_CHUNK_FACTOR if questions.entity.is_cuda else 1
    return plan.memory_share * largest


def max_join_rows(plan: FiringPlan, questions: Questions) -> int:
    """The rows that the joins of a chunk may make."""
    return int(_chunk_factor(plan, questions) * MAX_CHUNK_JOIN_ROWS)


def _max_chunk_rows(
    plan: FiringPlan, questions: Questions, work: FiringWork
) -> int:
    """The rows that the joins of a chunk may make; any number for a question that is not to be left out."""
    is_bounded = work.leaves_out or len(questions.entity) > 1
    return max_join_rows(plan, questions) if is_bounded else sys.maxsize


def _bounded_firings(
    fire: _Firing, questions: Questions, budget: RowBudget
) -> Firings | None:
    """The firings for some questions; None if joins make too many rows, and there is more than one question."""
    try:
        return sorted_firings(
            fire.plan, questions, fire.left_out, fire.object_identity, budget
        )
    except RowBudgetExceeded:
        if len(questions.entity) > 1:
            return None
        fire.work.n_left_out += 1
        none = questions.entity[:0]
        return Firings(none, none, none, none, none)


def sorted_firings(
    plan: FiringPlan,
    questions: Questions,
    left_out: LeftOut,
    object_identity: bool,
    budget: RowBudget | None = None,
) -> Firings:
    """All firings for the questions, in the order of question, candidate and rule; see `firings.iter_firings`."""
    parts = iter_firings(
        plan,
        questions,
        left_out=left_out,
        object_identity=object_identity,
        budget=budget,
    )
    none = questions.entity[:0]
    empty = Firings(none, none, none, none, none)
    firings = Firings(*(torch.cat(columns) for columns in zip(empty, *parts)))
    key = firings.question, firings.candidate, firings.rule
    bounds = len(questions.entity), plan.sizes.n_constants, plan.sizes.n_rules
    _, code = row_index.encode_rows(key, [n.bit_length() for n in bounds])
    return select_firings(firings, sorting.sort_keys(code).order)


def open_questions(queries: I64[Tensor, "Q W"], side: int) -> Questions:
    """The distinct questions that some queries ask about one side, ascending by predicate and entity.

    Args:
      queries: atoms of two arguments.
    """
    rows = unique_rows(queries[:, [0, HEAD + TAIL - side]])
    predicate, given = rows.unbind(1)
    return Questions(
        predicate=predicate,
        side=torch.full_like(predicate, side),
        entity=given,
        left_out=torch.zeros_like(given),
    )


def derive_answers(
    plan: FiringPlan,
    queries: I64[Tensor, "Q W"],
    sides: Sequence[int],
    *,
    object_identity: bool = False,
) -> I32[Tensor, "n W"]:
    """All atoms with an entity in place of an argument of a query that one application of a rule derives.

    Args:
      queries: atoms of two arguments.
      sides: the arguments that are replaced, each in turn.
      object_identity: different variables of a rule bind different constants, none of which the rule names.

    Returns:
      The atoms, for each side those of its questions, each once; facts are among them.
    """
    parts = [queries[:0].to(torch.int32)]
    for side in sides:
        chunks = iter_firing_chunks(
            plan, open_questions(queries, side), object_identity=object_identity
        )
        parts += [_answers(chunk, plan.sizes) for chunk in chunks]
    return torch.cat(parts)


def _answers(chunk: FiringChunk, sizes: KBSizes) -> I32[Tensor, "n W"]:
    """The atoms that the rules derive for the questions of a chunk, each once."""
    firings = chunk.firings
    base = sizes.n_constants + 1
    is_first = sorting.first_of_run(firings.question * base + firings.candidate)
    return fired_atoms(
        chunk.questions,
        select_firings(firings, is_first),
        sizes,
    )


def fired_atoms(
    questions: Questions, firings: Firings, sizes: KBSizes
) -> I32[Tensor, "n W"]:
    """The atom that each firing derives."""
    return candidate_atoms(
        questions, firings.question, firings.candidate, sizes
    )


def candidate_atoms(
    questions: Questions,
    question: I64[Tensor, "n"],
    candidate: I64[Tensor, "n"],
    sizes: KBSizes,
) -> I32[Tensor, "n W"]:
    """The atom of each candidate.

    Args:
      question: the row of the question that each one is a candidate of.
    """
    given = questions.entity[question]
    is_head = questions.side[question] == HEAD
    columns = (
        questions.predicate[question],
        torch.where(is_head, candidate, given),
        torch.where(is_head, given, candidate),
    )
    atoms = torch.stack(columns, dim=1).to(torch.int32)
    return torch.nn.functional.pad(atoms, (0, sizes.atom_width - len(columns)))
