"""The firings of many questions, as many at once as bounds on memory allow.

`iter_firing_chunks` is the entry point. `derive_answers` lists the atoms that rules derive for some queries.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.deadline import NO_DEADLINE, Deadline
from funcppo.logic import row_index, sorting
from funcppo.logic.firings import FiringPlan, iter_firings
from funcppo.logic.joins import (
    JOIN_OVERHEAD_ROWS,
    RowBudget,
    RowBudgetExceeded,
)
from funcppo.logic.kb import KBSizes
from funcppo.logic.question_types import (
    Firings,
    LeftOut,
    Questions,
    select_firings,
    select_questions,
)
from funcppo.logic.triple_index import HEAD, TAIL
from funcppo.logic.typed_torch import unique_rows
from funcppo.types import I32, I64

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
    """Yield the firings of some questions after others.

    A chunk whose joins make too many rows is halved, down to one question, which may make any number unless `work`
    leaves it out.

    Args:
      questions: distinct.
      left_out: see `firings.iter_firings`.
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      work: counts the work, and says what to do with a question that is too large.
      budget: bounds the rows of all chunks together; None for no bound.

    Raises:
      RowBudgetExceeded: all chunks make more rows than the budget allows.
    """
    work = FiringWork() if work is None else work
    start, size = 0, PILOT_QUESTIONS
    n_firings, n_rows, n_links_before = 0, 0, work.n_links
    began = work.deadline.clock()
    while start < len(questions.entity):
        chunk = select_questions(questions, slice(start, start + size))
        rows = _chunk_budget(plan, chunk, work)
        firings = _bounded_firings(
            plan, chunk, left_out, object_identity, rows, work
        )
        work.n_rows += rows.n_rows
        if budget is not None:
            budget.spend(rows.n_rows + rows.n_joins * JOIN_OVERHEAD_ROWS)
        if firings is None:
            size = len(chunk.entity) // 2
            continue
        yield FiringChunk(chunk, firings)

        start += len(chunk.entity)
        n_firings += len(firings.rule)
        n_rows += rows.n_rows
        factor = _chunk_factor(plan, questions)
        fitting = min(
            int(factor * start * bound) // max(1, count)
            for bound, count in (
                (MAX_CHUNK_FIRINGS, n_firings),
                (MAX_CHUNK_LINKS, work.n_links - n_links_before),
                (MAX_CHUNK_JOIN_ROWS, n_rows),
            )
        )
        if not math.isinf(work.deadline.at):
            seconds = max(work.deadline.clock() - began, MIN_TIMED_SECONDS)
            in_time = int(start * work.deadline.seconds_left / seconds)
            fitting = min(fitting, in_time)
        size = max(1, min(fitting, size * MAX_CHUNK_GROWTH))


def _chunk_factor(plan: FiringPlan, questions: Questions) -> float:
    """How many times the bounds of a chunk apply where the questions are."""
    largest = GPU_CHUNK_FACTOR if questions.entity.is_cuda else 1
    return plan.memory_share * largest


def max_join_rows(plan: FiringPlan, questions: Questions) -> int:
    """The rows that the joins of a chunk may make."""
    return int(_chunk_factor(plan, questions) * MAX_CHUNK_JOIN_ROWS)


def _chunk_budget(
    plan: FiringPlan, questions: Questions, work: FiringWork
) -> RowBudget:
    """The rows that the joins of a chunk may make; any number for a question that is not to be left out."""
    most = max_join_rows(plan, questions)
    is_bounded = work.leaves_out or len(questions.entity) > 1
    return RowBudget(most if is_bounded else sys.maxsize, overhead=0)


def _bounded_firings(
    plan: FiringPlan,
    questions: Questions,
    left_out: LeftOut,
    object_identity: bool,
    budget: RowBudget,
    work: FiringWork,
) -> Firings | None:
    """The firings for some questions; None if joins make too many rows, and there is more than one question."""
    try:
        return sorted_firings(
            plan, questions, left_out, object_identity, budget
        )
    except RowBudgetExceeded:
        if len(questions.entity) > 1:
            return None
        work.n_left_out += 1
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
    given = questions.entity[firings.question]
    is_head = questions.side[firings.question] == HEAD
    columns = (
        questions.predicate[firings.question],
        torch.where(is_head, firings.candidate, given),
        torch.where(is_head, given, firings.candidate),
    )
    atoms = torch.stack(columns, dim=1).to(torch.int32)
    return torch.nn.functional.pad(atoms, (0, sizes.atom_width - len(columns)))
