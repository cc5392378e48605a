"""Batches in fixed shapes, and what `firing_chunks` makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from funcppo.kg.logic import (
    firing_chunks,
    fixed_firings,
    fixed_listing,
    joins,
    kb,
)
from funcppo.kg.logic.firing_chunks import FiringChunk, FiringWork
from funcppo.kg.logic.firings import plan_firings
from funcppo.kg.logic.fixed_listing import FixedListing
from funcppo.kg.logic.question_types import select_firings
from tests.kg.logic.test_firings import LIKES, all_questions, ask
from tests.kg.logic.test_fixed_firings import compiled_program
from tests.oracles import Program


def eager(list_firings):
    """The function as it is."""
    return list_firings


def star():
    """Many questions about a hub and its rays, by paths and by a rule with a constant; those of the hub have most."""
    n = 30
    x, y, z = n + 1, n + 2, n + 3
    facts = [(LIKES, 1, i) for i in range(2, 21)]
    facts += [(LIKES, i, i + 1) for i in range(20, n)]
    rules = (
        ((LIKES, x, y), (LIKES, x, z), (LIKES, y, z)),
        ((LIKES, x, y), (LIKES, z, x), (LIKES, z, y)),
        ((LIKES, x, 3), (LIKES, 1, x)),
    )
    return Program(n, (2,), tuple(facts), rules)


def plan_with(program, lister, **options):
    built, sizes = kb.build(**program.arrays())
    plan = plan_firings(built, sizes, **options)
    return replace(plan, fixed_lister=lister)


def list_all(plan, questions, work=None, **options):
    """The firings of all chunks, with the questions' rows among all."""
    parts, n = [], 0
    for chunk in firing_chunks.iter_firing_chunks(
        plan, questions, work=work, **options
    ):
        assert isinstance(chunk, FiringChunk)
        parts.append(
            chunk.firings._replace(question=chunk.firings.question + n)
        )
        n += len(chunk.questions.entity)
    return [torch.cat(columns) for columns in zip(*parts)]


@pytest.mark.parametrize("walks", [False, True])
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("batch", [1, 7, 1024])
def test_chunks_are_those_of_the_ragged_listing(
    monkeypatch, walks, share, batch
):
    """Whatever fits; what does not is counted, and listed all the same."""
    monkeypatch.setattr(fixed_firings, "FITTING_SHARE", share)
    monkeypatch.setattr(fixed_firings, "CAPACITY_DEVIATIONS", 0)
    monkeypatch.setattr(fixed_firings, "MAX_BATCH_QUESTIONS", batch)
    monkeypatch.setattr(fixed_listing, "MIN_QUESTIONS", 20)
    questions = ask(all_questions(star()))
    work = FiringWork()
    lister = FixedListing(eager)
    plan = plan_with(star(), lister, with_walks=walks)
    found = list_all(plan, questions, work, left_out="pair")
    expected = list_all(
        replace(plan, fixed_lister=None), questions, left_out="pair"
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert not work.not_fixed
    assert work.n_rows > 0
    n_questions = len(questions.entity)
    assert work.n_overflowed < n_questions
    if share < 1 and batch == 1:
        assert work.n_overflowed > 0


def test_a_listing_is_prepared_once_for_each_kind():
    calls = []

    def compile_listing(list_firings):
        calls.append(list_firings)
        return list_firings

    lister = FixedListing(compile_listing)
    questions = ask(all_questions(star()))
    assert len(questions.entity) >= fixed_listing.MIN_QUESTIONS
    plan = plan_with(star(), lister)
    for _ in range(2):
        for identity in (False, True):
            list_all(plan, questions, object_identity=identity)
            walking = replace(plan, with_walks=True)
            list_all(walking, questions, object_identity=identity)
    assert len(calls) == 4
    # Other rules are another kind.
    other = plan_with(replace(star(), rules=star().rules[:1]), lister)
    list_all(other, questions)
    assert len(calls) == 5


def test_what_cannot_be_listed_in_fixed_shapes_is_listed_without():
    questions = ask(all_questions(star()))
    for rows, reason in ((slice(3), "fewer than"), (slice(None), "expected")):
        work = FiringWork()
        asked = type(questions)(*(column[rows] for column in questions))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fixed_listing, "MAX_BATCH_BYTES", 1)
            plan = plan_with(star(), FixedListing(eager))
            found = list_all(plan, asked, work)
        assert reason in work.not_fixed
        assert work.n_overflowed == 0
        expected = list_all(replace(plan, fixed_lister=None), asked)
        assert all(map(torch.equal, found, expected))


def test_rows_in_fixed_shapes_count_against_the_budget():
    plan = plan_with(star(), FixedListing(eager))
    questions = ask(all_questions(star()))
    with pytest.raises(joins.RowBudgetExceeded):
        list_all(plan, questions, budget=joins.RowBudget(10, overhead=0))


def test_a_batch_is_filled_with_questions_without_firings():
    program = compiled_program()
    plan = plan_with(program, None)
    fixed = fixed_firings.plan_fixed_firings(
        plan, left_out="fact", object_identity=False
    )
    questions = ask(all_questions(program))
    n_questions = len(questions.entity)
    cfg = fixed_firings.choose_capacities(fixed, questions, 1 << 24)
    cfg = replace(cfg, n_questions=10)
    listing = fixed_listing.PreparedListing(
        cfg, fixed.world, fixed_firings.list_firings
    )
    fitting = listing(questions)
    assert fitting.overflow.shape == (n_questions,)
    expected = firing_chunks.sorted_firings(plan, questions, "fact", False)
    kept = select_firings(expected, ~fitting.overflow[expected.question])
    assert len(kept.rule) > 0
    assert all(map(torch.equal, fitting.firings, kept))
    assert fitting.n_rows >= len(kept.rule)
    assert (kept.question >= cfg.n_questions).any(), "of the second batch too"

    none = listing(ask([]))
    assert none.n_rows == 0
    assert none.overflow.shape == (0,)
