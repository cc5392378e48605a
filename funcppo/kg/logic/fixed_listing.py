"""Batches of questions whose firings are listed in fixed shapes by compiled code, for `firing_chunks`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from funcppo.kg.logic import fixed_firings
from funcppo.kg.logic.firings import FiringPlan
from funcppo.kg.logic.fixed_firings import FixedFirings, FixedShapes, FixedWorld
from funcppo.kg.logic.question_types import (
    Firings,
    FittingFirings,
    LeftOut,
    Questions,
    select_questions,
)

# Fewer questions are not worth compiling for.
MIN_QUESTIONS = 64
# of all stages of a batch, with the whole memory of a run
MAX_BATCH_BYTES = 1 << 30


class ListFirings(Protocol):
    """`fixed_firings.list_firings`, or compiled code of it."""

    def __call__(
        self, cfg: FixedShapes, world: FixedWorld, questions: Questions, /
    ) -> FixedFirings:
        """All firings for the questions that fit."""
        ...


class _Prepared(NamedTuple):
    """A listing of one kind, which holds what it was prepared for."""

    plan: FiringPlan
    left_out: LeftOut
    object_identity: bool
    listing: PreparedListing | str  # or why there is none


@dataclass(frozen=True, slots=True)
class FixedListing:
    """Lists firings in fixed shapes; see `firings.FixedLister`.

    Attributes:
      compile: compiles a pure function.
      prepared: the kinds of listings so far.
    """

    compile: Callable[[ListFirings], ListFirings]
    prepared: list[_Prepared] = field(default_factory=list[_Prepared])

    def prepare(
        self,
        plan: FiringPlan,
        questions: Questions,
        left_out: LeftOut,
        object_identity: bool,
    ) -> PreparedListing | str:
        """The listing of such questions, or why there is none; its capacities are those that the first ones need.

        Args:
          questions: those to be listed; of few nothing is prepared.
        """
        for known in self.prepared:
            is_same = (
                known.plan.chains is plan.chains
                and known.plan.with_walks == plan.with_walks
                and known.left_out == left_out
                and known.object_identity == object_identity
            )
            if is_same:
                return known.listing
        n_questions = len(questions.entity)
        if n_questions < MIN_QUESTIONS:
            return f"fewer than {MIN_QUESTIONS} questions"

        listing: PreparedListing | str
        try:
            fixed = fixed_firings.plan_fixed_firings(
                plan, left_out=left_out, object_identity=object_identity
            )
            number = torch.arange(MIN_QUESTIONS, device=questions.entity.device)
            sample = number * n_questions // MIN_QUESTIONS
            cfg = fixed_firings.choose_capacities(
                fixed,
                select_questions(questions, sample),
                int(MAX_BATCH_BYTES * plan.memory_share),
            )
            list_firings = self.compile(fixed_firings.list_firings)
            listing = PreparedListing(cfg, fixed.world, list_firings)
            listing(select_questions(questions, slice(1)))  # compiles
        except ValueError as error:
            listing = str(error)
        self.prepared.append(
            _Prepared(plan, left_out, object_identity, listing)
        )
        return listing


class PreparedListing(NamedTuple):
    """A listing whose shapes are chosen."""

    cfg: FixedShapes
    world: FixedWorld
    list_firings: ListFirings

    def __call__(self, questions: Questions) -> FittingFirings:
        """The firings of all questions that fit, a batch at a time."""
        size = self.cfg.n_questions
        none = questions.entity[:0]
        parts = [Firings(none, none, none, none, none)]
        overflow: list[Tensor] = []
        n_rows = 0
        for first in range(0, len(questions.entity), size):
            batch = select_questions(questions, slice(first, first + size))
            n_asked = len(batch.entity)
            padding = (0, size - n_asked)
            listed = self.list_firings(
                self.cfg,
                self.world,
                Questions(
                    *(torch.nn.functional.pad(c, padding) for c in batch)
                ),
            )
            # copies: slices would keep the memory of the whole tables
            n_firings = int(listed.n_firings)
            found = Firings(*(c[:n_firings].clone() for c in listed.firings))
            parts.append(found._replace(question=found.question + first))
            overflow.append(listed.overflow[:n_asked])
            fitting = torch.where(listed.overflow, 0, listed.demand)
            n_rows += int(fitting.sum())
        return FittingFirings(
            Firings(*(torch.cat(columns) for columns in zip(*parts))),
            torch.cat([none.bool(), *overflow]),
            n_rows,
        )
