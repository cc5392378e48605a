"""T_P: worked by hand; equal to a least model over Python sets and to Prolog; the counts known of the data sets."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.kg.logic import fixpoint, joins, kb
from funcppo.kg.logic.fixpoint import Verdict
from tests import oracles, prolog
from tests.oracles import Program, programs

MANY = 10**9  # more atoms than any test derives

# edges 1 -> 2 -> 3 -> 1 and 3 -> 4; path is their closure, loop(X) a path from X to itself, any a proposition
EDGE, PATH, LOOP, ANY = 1, 2, 3, 4
X, Y, Z = 5, 6, 7
GRAPH = Program(
    4,
    (2, 2, 1, 0),
    ((EDGE, 1, 2), (EDGE, 2, 3), (EDGE, 3, 1), (EDGE, 3, 4)),
    (
        ((PATH, X, Y), (EDGE, X, Y)),
        ((PATH, X, Y), (PATH, X, Z), (EDGE, Z, Y)),
        ((LOOP, X), (PATH, X, X)),
        ((ANY,), (LOOP, 2), (EDGE, Y, Z)),
    ),
)


def atoms_of(table):
    return [tuple(t for t in row if t) for row in table.tolist()]


def heights(model):
    return dict(zip(atoms_of(model.atoms), model.height.tolist()))


def model_of(program, max_height=None, max_atoms=MANY, **options):
    return fixpoint.least_model(
        *kb.build(**program.arrays()),
        max_height=max_height,
        max_atoms=max_atoms,
        **options,
    )


def test_a_closure_worked_by_hand():
    model = model_of(GRAPH)
    by_height = [
        {a for a, h in heights(model).items() if h == step} for step in range(6)
    ]
    assert by_height[0] == set(GRAPH.facts)
    assert by_height[1] == {
        (PATH, 1, 2),
        (PATH, 2, 3),
        (PATH, 3, 1),
        (PATH, 3, 4),
    }
    assert by_height[2] == {
        (PATH, 1, 3),
        (PATH, 2, 1),
        (PATH, 2, 4),
        (PATH, 3, 2),
    }
    assert by_height[3] == {
        (PATH, 1, 1),
        (PATH, 1, 4),
        (PATH, 2, 2),
        (PATH, 3, 3),
    }
    assert by_height[4] == {(LOOP, 1), (LOOP, 2), (LOOP, 3)}
    assert by_height[5] == {(ANY,)}
    assert model.n_atoms_after_step == (4, 8, 12, 16, 19, 20)
    assert model.complete and model.reached_fixpoint and not model.stop_reason


@given(programs)
@settings(max_examples=300)
def test_the_model_is_the_least_model_with_its_heights(program):
    model = model_of(program)
    assert heights(model) == oracles.least_model(program)
    assert atoms_of(model.atoms) == sorted(heights(model))
    assert (
        model.complete
        and model.reached_fixpoint
        and model.n_atoms_after_step[-1] == len(model.atoms)
    )


@pytest.mark.skipif(not prolog.AVAILABLE, reason="swipl is not installed")
@pytest.mark.parametrize("seed", [0, 1])
def test_answers_and_heights_are_prologs(seed):
    """1300 programs at once: Prolog's tabled answers, and what its meta-interpreter proves within height 3."""
    random = Random(seed)
    several: list[Program] = []
    while len(several) < 1300:
        drawn = oracles.random_program(random)
        if drawn.rules:  # those without derive nothing: a seventh
            several.append(drawn)
    program, shifts = oracles.together(several)
    found = heights(model_of(program))
    answers, bounded = prolog.models(program, height=3)
    wrong = {
        a[0]
        for a in set(found) ^ answers
        | {a for a in found if min(found[a], 4) != bounded.get(a, 4)}
    }
    assert not wrong, next(
        p
        for p, by in zip(several, shifts)
        if wrong & set(range(by + 1, by + 1 + len(p.arity)))
    )
    assert sum(h >= 3 for h in found.values()) > 100  # recursion was exercised


@given(programs)
@settings(max_examples=150)
def test_object_identity_binds_the_variables_of_a_rule_apart(program):
    assert heights(
        model_of(program, object_identity=True)
    ) == oracles.least_model(program, object_identity=True)


@given(programs)
@settings(max_examples=100)
def test_a_model_up_to_a_height_is_the_model_cut_there(program):
    whole = heights(model_of(program))
    for height in range(3):
        model = model_of(program, max_height=height)
        assert heights(model) == {a: h for a, h in whole.items() if h <= height}
        assert model.complete and len(model.n_atoms_after_step) <= height + 1


@given(programs)
@settings(max_examples=100)
def test_a_predicate_needs_only_what_its_rules_depend_on(program):
    whole = heights(model_of(program))
    for p in range(1, len(program.arity) + 1):
        model = model_of(program, predicates=[p])
        assert p in model.predicates
        assert heights(model) == {
            a: h for a, h in whole.items() if a[0] in model.predicates
        }


@given(programs)
@settings(max_examples=80)
def test_pieces_of_any_size_give_the_same_model(program):
    whole = heights(model_of(program))
    size, joins.MAX_CHUNK_ROWS = joins.MAX_CHUNK_ROWS, 2
    try:
        assert heights(model_of(program)) == whole
    finally:
        joins.MAX_CHUNK_ROWS = size


@given(programs)
@settings(max_examples=80)
def test_ids_too_wide_for_one_key_give_the_same_model(program):
    # three such ids take 93 bits
    big = lambda t: t if t <= 0 else t + 2**30 - oracles.N_CONSTANTS
    wide = lambda atom: (atom[0], *map(big, atom[1:]))
    moved = Program(
        2**30,
        program.arity,
        tuple(map(wide, program.facts)),
        tuple(tuple(map(wide, rule)) for rule in program.rules),
    )
    assert heights(model_of(moved)) == {
        wide(a): h for a, h in heights(model_of(program)).items()
    }


def test_a_wide_atom_is_no_other_that_shares_its_last_argument():
    # three such ids take two keys, the second of which holds the last argument
    top = 2**30
    x, y, z = top + 1, top + 2, top + 3
    facts = ((1, top, 1, 5), (1, top, 3, 5), (2, top, 2, 5), (2, top, 3, 5))
    both = ((3, x, y, z), (1, x, y, z), (2, x, y, z))
    assert set(heights(model_of(Program(top, (3, 3, 3), facts, (both,))))) == {
        *facts,
        (3, top, 3, 5),
    }


def test_a_join_is_taken_in_pieces(monkeypatch):
    """A product of 40 x 40 x 40 rows with two variables wanted: no table is larger than two pieces."""
    monkeypatch.setattr(joins, "MAX_CHUNK_ROWS", 100)
    seen = []
    project = joins.project
    monkeypatch.setattr(
        joins,
        "project",
        lambda table, *rest: seen.append(table.size) or project(table, *rest),
    )
    facts = tuple((p, 1, c) for p in (1, 2, 3) for c in range(2, 42))
    a, b, c, d = 50, 51, 52, 53
    rule = ((4, b, c), (1, a, b), (2, a, c), (3, a, d), (3, d, d))
    assert model_of(
        Program(49, (2, 2, 2, 2), facts, (rule,))
    ).n_atoms_after_step == (120,)
    assert model_of(
        Program(49, (2, 2, 2, 2), facts, (rule[:3],))
    ).n_atoms_after_step == (120, 120 + 40 * 40)
    assert 0 < max(seen) <= 200


@given(programs)
@settings(max_examples=100)
def test_max_atoms_stops_after_a_whole_step_and_says_so(program):
    whole = heights(model_of(program))
    counts = model_of(program).n_atoms_after_step
    for max_atoms in {n - 1 for n in counts[1:]}:
        model = model_of(program, max_atoms=max_atoms)
        step = max(i for i, n in enumerate(counts) if n <= max_atoms or i == 0)
        assert model.n_atoms_after_step == counts[: step + 1]
        assert heights(model) == {a: h for a, h in whole.items() if h <= step}
        assert not model.complete and not model.reached_fixpoint
        assert (
            model.stop_reason
            == f"stopped at {counts[step]} atoms: step {step + 1} exceeds max_atoms {max_atoms}, unknown beyond"
        )
        assert model.stop_code is fixpoint.StopCode.MAX_ATOMS


def test_a_budget_of_rows_stops_after_a_whole_step_and_says_so():
    whole = model_of(GRAPH)
    spent = joins.RowBudget(10**9)
    assert model_of(GRAPH, max_height=2, budget=spent).complete
    budget = joins.RowBudget(spent.n_rows)
    model = model_of(GRAPH, budget=budget)
    assert not model.complete and len(model.n_atoms_after_step) == 3
    n_atoms = whole.n_atoms_after_step[2]
    assert heights(model) == {a: h for a, h in heights(whole).items() if h <= 2}
    assert (
        model.stop_reason
        == f"stopped at {n_atoms} atoms: step 3 takes more than {spent.n_rows:,} rows of joins, unknown beyond"
    )
    assert model.stop_code is fixpoint.StopCode.MAX_ROWS


def test_verdicts_worked_by_hand():
    asked = torch.tensor(
        [[PATH, 1, 4], [PATH, 4, 1], [EDGE, 1, 2], [LOOP, 4, 0]]
    )
    yes, no, open_ = Verdict.PROVED, Verdict.REFUTED, Verdict.UNKNOWN
    assert fixpoint.verdict(model_of(GRAPH), asked).tolist() == [
        yes,
        no,
        yes,
        no,
    ]
    assert fixpoint.verdict(model_of(GRAPH, max_height=2), asked).tolist() == [
        no,
        no,
        yes,
        no,
    ]
    assert fixpoint.verdict(model_of(GRAPH, max_atoms=15), asked).tolist() == [
        open_,
        open_,
        yes,
        open_,
    ]
    assert fixpoint.verdict(
        model_of(GRAPH, predicates=[EDGE]), asked
    ).tolist() == [open_, open_, yes, open_]


@given(programs)
@settings(max_examples=100)
def test_matching_atoms_are_those_that_an_open_atom_matches(program):
    model, n = model_of(program), program.n_constants
    found, random = heights(model), Random(len(program.rules))
    for p, arity in enumerate(program.arity, 1):
        for _ in range(4):
            goal = (
                p,
                *(random.choice([1, 2, n + 1, n + 2]) for _ in range(arity)),
            )
            padded = goal + (0,) * (model.sizes.atom_width - len(goal))
            atoms, height = fixpoint.matching_atoms(model, padded)
            expected = {
                a: h
                for a, h in found.items()
                if oracles.match(goal, a, {}, n) is not None
            }
            assert dict(zip(atoms_of(atoms), height.tolist())) == expected


@given(programs)
@settings(max_examples=100)
def test_the_height_of_an_absent_atom_is_minus_one(program):
    model = model_of(program)
    found, width = heights(model), model.sizes.atom_width
    asked = [
        (p, *[c] * n, *[0] * (width - 1 - n))
        for p, n in enumerate(program.arity, 1)
        for c in (1, 2, 7, 9)
    ]
    expected = [found.get(tuple(t for t in a if t), -1) for a in asked]
    assert fixpoint.atom_height(model, torch.tensor(asked)).tolist() == expected


@given(programs, st.integers(0, 2), st.booleans())
@settings(max_examples=300, deadline=None)
def test_the_step_after_a_model_derives_what_the_next_model_has_more(
    program, h, identity
):
    world, sizes = kb.build(**program.arrays())
    model, after, whole = (
        fixpoint.least_model(
            world,
            sizes,
            max_height=steps,
            max_atoms=MANY,
            object_identity=identity,
        )
        for steps in (h, h + 1, None)
    )
    others = whole.atoms.long()[
        fixpoint.atom_height(model, whole.atoms.long()) < 0
    ]
    is_derived = fixpoint.derived_in_next_step(world, model, others)
    assert (
        is_derived.tolist()
        == (fixpoint.atom_height(after, others) >= 0).tolist()
    )
    assert not fixpoint.derived_in_next_step(world, model, others[:0]).numel()


def test_progress_is_reported_before_each_step_and_after_each_rule():
    reports = []
    model = model_of(GRAPH, progress=lambda *report: reports.append(report))
    expected = []
    for step, n_atoms in enumerate(model.n_atoms_after_step):
        n_rules = next(r[3] for r in reports if r[0] == step)
        expected += [(step, n_atoms, i, n_rules) for i in range(n_rules + 1)]
    assert reports == expected
    # All rules are applied in the first step.
    assert reports[0][3] == len(GRAPH.rules)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gives_the_same_model():
    random = Random(7)
    program, _ = oracles.together(
        [oracles.random_program(random) for _ in range(200)]
    )
    world, sizes = kb.build(**program.arrays(), device="cuda")
    model = fixpoint.least_model(world, sizes, max_height=None, max_atoms=MANY)
    other = model_of(program)
    assert torch.equal(model.atoms.cpu(), other.atoms) and torch.equal(
        model.height.cpu(), other.height
    )
