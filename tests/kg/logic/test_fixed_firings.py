"""Firings in fixed shapes equal the ragged ones of all questions that fit."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.core import tree
from funcppo.kg.logic import (
    chains,
    firing_chunks,
    fixed_firings,
    kb,
    question_types,
)
from funcppo.kg.logic.firings import plan_firings
from funcppo.kg.logic.question_types import (
    Firings,
    LeftOut,
    Questions,
    select_firings,
)
from funcppo.kg.logic.triple_index import TAIL
from tests.kg.logic.test_firings import (
    LIKES,
    X,
    Y,
    Z,
    all_questions,
    ask,
    path_programs,
)
from tests.oracles import Program, programs

LEFT_OUT = st.sampled_from(["fact", "pair"])


class Case:
    """The ragged firings of all questions about a program, and the plan of the fixed ones."""

    def __init__(
        self,
        program,
        left_out: LeftOut = "fact",
        identity=False,
        walks=False,
    ):
        built, sizes = kb.build(**program.arrays())
        plan = plan_firings(built, sizes, with_walks=walks)
        columns = ask(all_questions(program))
        self.questions = Questions(*(c.contiguous() for c in columns))
        self.expected = firing_chunks.sorted_firings(
            plan, self.questions, left_out, identity
        )
        self.plan = fixed_firings.plan_fixed_firings(
            plan, left_out=left_out, object_identity=identity
        )

    def check(self, listed):
        """Check that the questions that fit have their firings, and the others none."""
        n = int(listed.n_firings)
        found = Firings(*(column[:n] for column in listed.firings))
        kept = ~listed.overflow[self.expected.question]
        expected = select_firings(self.expected, kept)
        for name, ours, theirs in zip(Firings._fields, found, expected):
            assert torch.equal(ours, theirs), name
        n_questions = len(self.questions.entity)
        assert (listed.firings.question[n:] == n_questions).all()


def list_firings(plan, questions, **settings):
    """The firings in fixed shapes, not compiled."""
    cfg = replace(plan.cfg, **settings)
    return fixed_firings.list_firings(cfg, plan.world, questions)


@given(programs, LEFT_OUT, st.booleans(), st.booleans())
@settings(max_examples=150)
def test_all_firings_are_the_ragged_ones(program, left_out, identity, walks):
    """Of constants, single atoms, cycles, branches, repeated variables and repeated rules, on both sides."""
    case = Case(program, left_out, identity, walks)
    listed = list_firings(case.plan, case.questions)
    assert not listed.overflow.any()
    case.check(listed)


@given(path_programs(), LEFT_OUT, st.booleans(), st.booleans())
@settings(max_examples=60)
def test_firings_of_paths_are_the_ragged_ones(
    program, left_out, identity, walks
):
    case = Case(program, left_out, identity, walks)
    listed = list_firings(case.plan, case.questions)
    assert not listed.overflow.any()
    case.check(listed)


@given(programs | path_programs(), st.booleans(), st.data())
@settings(max_examples=150)
def test_questions_that_do_not_fit_are_marked(program, identity, data):
    """The others are complete."""
    case = Case(program, identity=identity)
    demand = list_firings(case.plan, case.questions).demand
    capacities = tuple(
        data.draw(st.integers(1, max(1, int(rows.sum())))) for rows in demand
    )
    listed = list_firings(case.plan, case.questions, capacities=capacities)
    case.check(listed)
    needed = demand.sum(1)
    is_enough = [n <= c for n, c in zip(needed.tolist(), capacities)]
    if all(is_enough):
        assert not listed.overflow.any()
    elif not is_enough[0]:
        assert listed.overflow.any()


def test_empty_sets():
    program = Program(
        3, (2,), ((LIKES, 1, 2),), (((LIKES, X, Y), (LIKES, Y, X)),)
    )
    for part in (
        replace(program, rules=()),
        replace(program, facts=()),
        replace(program, facts=(), rules=(((LIKES, X, 3), (LIKES, X, Y)),)),
    ):
        case = Case(part)
        listed = list_firings(case.plan, case.questions)
        case.check(listed)
        assert listed.n_firings == 0

    none = list_firings(Case(program).plan, ask([]))
    assert none.n_firings == 0
    assert none.overflow.shape == (0,)


def test_questions_about_predicate_0_fill_a_batch():
    program = Program(
        3, (2,), ((LIKES, 1, 2),), (((LIKES, X, Y), (LIKES, Y, X)),)
    )
    case = Case(program)
    padded = Questions(
        *(torch.nn.functional.pad(c, (0, 3)) for c in case.questions)
    )
    listed = list_firings(case.plan, padded)
    assert not listed.overflow.any()
    n = int(listed.n_firings)
    assert n == len(case.expected.rule) > 0
    for ours, theirs in zip(listed.firings[:4], case.expected[:4]):
        assert torch.equal(ours[:n], theirs)


def compiled_program():
    """Path rules of two steps, one with a common beginning, a constant, a cycle and a branch."""
    entities = range(1, 4)
    facts = [(LIKES, i, j) for i in entities for j in entities if i != j]
    w = Z + 1
    return Program(
        3,
        (2, 2),
        (*facts, (2, 1, 2), (2, 3, 1)),
        (
            ((LIKES, X, Y), (LIKES, X, Z), (LIKES, Z, Y)),
            ((LIKES, X, Y), (LIKES, X, Z), (2, Z, Y)),
            ((LIKES, X, 3), (2, X, 2)),
            ((LIKES, X, Y), (2, X, Y), (LIKES, X, Z), (2, w, Z)),
        ),
    )


@functools.cache
def compiled():
    """The one compiled function of the tests; machine code is of Inductor's making, graphs are not."""
    return torch.compile(
        fixed_firings.list_firings,
        backend="aot_eager",
        fullgraph=True,
        dynamic=False,
    )


@pytest.mark.parametrize("identity", [False, True])
def test_one_graph_lists_them(identity):
    """Compiled it equals the ragged listing, with and without overflow, and another batch takes no other graph."""
    case = Case(compiled_program(), "pair", identity, walks=True)
    demand = list_firings(case.plan, case.questions).demand
    rows = demand.sum(1).clamp_min(1).tolist()
    cfg = replace(case.plan.cfg, capacities=tuple(rows))
    listed = compiled()(cfg, case.plan.world, case.questions)
    assert not listed.overflow.any()
    case.check(listed)

    with torch.compiler.set_stance("fail_on_recompile"):
        order = torch.arange(len(case.questions.entity)).flip(0)
        others = question_types.select_questions(case.questions, order)
        again = compiled()(cfg, case.plan.world, others)
    assert int(again.n_firings) == int(listed.n_firings)

    cfg = replace(cfg, capacities=tuple(max(1, n // 2) for n in rows))
    tight = compiled()(cfg, case.plan.world, case.questions)
    assert tight.overflow.any()
    case.check(tight)


def test_no_argument_is_written_to():
    case = Case(compiled_program())
    before = [column.clone() for column in case.questions]
    world = tree.map(torch.clone, case.plan.world)
    list_firings(case.plan, case.questions)
    for ours, theirs in zip(
        tree.leaves((case.questions, case.plan.world)),
        tree.leaves((tuple(before), world)),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def hub_program():
    """One entity with many neighbours, and many with one."""
    n = 40
    x, y, z = n + 1, n + 2, n + 3
    facts = [(LIKES, 1, i) for i in range(2, 31)]
    facts += [(LIKES, i, i + 1) for i in range(31, n)]
    rule = ((LIKES, x, y), (LIKES, x, z), (LIKES, y, z))
    return Program(n, (2,), tuple(facts), (rule,))


def test_capacities_are_those_of_most_questions():
    case = Case(hub_program())
    cfg = fixed_firings.choose_capacities(
        case.plan, case.questions, max_bytes=1 << 24
    )
    n_questions = len(case.questions.entity)
    assert cfg.n_questions > n_questions
    listed = list_firings(case.plan, case.questions, capacities=cfg.capacities)
    assert not listed.overflow.any()

    # With less memory fewer questions are listed at once, down to one.
    small = fixed_firings.choose_capacities(
        case.plan, case.questions, max_bytes=1 << 17
    )
    assert 1 <= small.n_questions < cfg.n_questions
    assert isinstance(small.capacities, tuple)
    assert sum(small.capacities) * fixed_firings.ROW_BYTES <= 1 << 17
    with pytest.raises(ValueError, match="expected memory for"):
        fixed_firings.choose_capacities(case.plan, case.questions, max_bytes=1)


def test_the_largest_questions_need_not_fit(monkeypatch):
    """Those of the hub are left to the ragged listing if a smaller share is to fit."""
    monkeypatch.setattr(fixed_firings, "FITTING_SHARE", 0.5)
    monkeypatch.setattr(fixed_firings, "CAPACITY_DEVIATIONS", 0)
    monkeypatch.setattr(fixed_firings, "MAX_BATCH_QUESTIONS", 1)
    case = Case(hub_program())
    cfg = fixed_firings.choose_capacities(case.plan, case.questions, 1 << 24)
    hub = ask([(LIKES, TAIL, 1, 0)])
    other = ask([(LIKES, TAIL, 40, 0)])
    assert list_firings(case.plan, hub, capacities=cfg.capacities).overflow[0]
    listed = list_firings(case.plan, other, capacities=cfg.capacities)
    assert not listed.overflow[0]


def test_what_is_too_large_is_an_error(monkeypatch):
    case = Case(compiled_program())
    monkeypatch.setattr(fixed_firings, "KEY_BITS", 4)
    with pytest.raises(ValueError, match="expected ids of at most 4 bits"):
        fixed_firings.choose_capacities(case.plan, case.questions, 1 << 24)
    monkeypatch.setattr(chains, "MAX_OFFSETS", 0)
    with pytest.raises(ValueError, match="expected at most 0 pairs"):
        Case(compiled_program())
