"""What rules derive for questions: walks counted by hand, every grounding by brute force, chunks, bounds."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.core import host
from funcppo.core.deadline import Deadline
from funcppo.kg.logic import derive, fixpoint, joins, kb
from funcppo.kg.logic.derive import (
    WALK_UNIT,
    FiringWork,
    Questions,
    iter_firings,
    plan_firings,
    select_questions,
)
from funcppo.kg.logic.joins import RowBudget, RowBudgetExceeded, Rule
from funcppo.kg.logic.triple_index import HEAD, TAIL
from tests import oracles
from tests.oracles import Program, programs


def test_a_selection_takes_the_same_rows_of_every_column():
    questions = Questions(*torch.arange(20).view(4, 5))
    rows = torch.tensor([4, 1])
    assert [c.tolist() for c in select_questions(questions, rows)] == [
        [4, 1],
        [9, 6],
        [14, 11],
        [19, 16],
    ]
    part = select_questions(questions, slice(2, 4))
    assert part.entity.tolist() == [12, 13]


# -- test chains

N_CONSTANTS = 9
X1, Y1, Z1, W1 = 10, 11, 12, 13
H, A, B = 1, 2, 3


def steps(head, *body):
    return derive.chain_steps(Rule(0, head, body), N_CONSTANTS)


def test_the_steps_of_a_chain_lead_from_the_given_argument_to_the_other():
    rule = (
        (H, X1, Y1),
        (B, W1, Z1),
        (A, X1, Z1),
        (A, W1, Y1),
    )  # atoms in any order
    assert steps(*rule) == (2 * A, 2 * B + 1, 2 * A)
    assert steps((H, X1, Y1), (A, Y1, X1)) == (2 * A + 1,)
    assert steps((H, X1, Y1, 0), (A, X1, Y1, 0)) == (2 * A,)  # padded


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ((H, X1, Y1), [(A, X1, Z1)]),  # does not reach the end
        ((H, X1, Y1), [(A, X1, Z1), (B, W1, Y1)]),  # is in two parts
        ((H, X1, Y1), [(A, X1, Y1), (B, X1, Y1)]),  # goes two ways
        ((H, X1, Y1), [(A, X1, Z1), (B, Z1, X1), (A, X1, Y1)]),  # comes back
        ((H, X1, Y1), [(A, X1, Y1), (B, Y1, Z1)]),  # goes on
        ((H, X1, Y1), [(A, X1, Z1), (B, Z1, Z1), (A, Z1, Y1)]),  # has a loop
        ((H, X1, X1), [(A, X1, X1)]),
        ((H, X1, 5), [(A, X1, 5)]),
        ((H, X1, Y1), [(A, X1, 5), (A, 5, Y1)]),
        ((H, 5, Y1), [(A, 5, Y1)]),
        ((H, X1), [(A, X1)]),
        ((H, X1, Y1, Z1), [(A, X1, Y1, Z1)]),
        ((H, X1, Y1), [(A, X1, 0), (B, X1, Y1)]),  # a unary atom, padded
        ((H, X1, Y1), []),
        ((H, X1, X1), []),
    ],
)
def test_other_bodies_are_no_chains(head, body):
    assert steps(head, *body) is None


def ladder(n):
    """Two facts from each rung to both entities of the next: 2 ** n ways from the first to the last."""
    facts = [(A, 1, 2), (A, 1, 3)]
    for rung in range(1, n):
        low = 2 * rung
        facts += [(A, i, j) for i in (low, low + 1) for j in (low + 2, low + 3)]
    return facts


def walk(questions, n_atoms, **options):
    """All firings of a chain of atoms over a ladder as long as it."""
    variables = [20, *range(22, 21 + n_atoms), 21]
    body = [(A, i, j) for i, j in itertools.pairwise(variables)]
    facts = sorted(ladder(n_atoms))
    program = Program(19, (2, 2), tuple(facts), (((H, 20, 21), *body),))
    built, sizes = kb.build(**program.arrays())
    plan = plan_firings(built, sizes)
    assert not plan.groups  # no rule is left to joins
    options = dict(left_out="fact", object_identity=False) | options
    return list(
        derive.iter_chain_firings(plan.chains, sizes, questions, **options)
    )


def ask(*rows):
    return Questions(*torch.tensor(rows).unbind(1))


@pytest.mark.parametrize("object_identity", [False, True])
def test_ways_are_counted(object_identity):
    (fired,) = walk(ask((H, TAIL, 1, 0)), 5, object_identity=object_identity)
    assert fired.candidate.tolist() == [10, 11]
    assert fired.n_groundings.tolist() == [16, 16]
    assert not len(fired.walk)


@pytest.mark.parametrize("object_identity", [False, True])
def test_probabilities_of_walks_that_meet_add_up(object_identity):
    options = dict(object_identity=object_identity, with_walks=True)
    (fired,) = walk(ask((H, TAIL, 1, 0)), 5, **options)
    assert fired.n_groundings.tolist() == [16, 16]
    assert fired.walk.tolist() == [1 << 59, 1 << 59]
    assert fired.rule.tolist() == [0, 0]


@pytest.mark.parametrize("object_identity", [False, True])
def test_walks_are_the_same_in_small_pieces(object_identity, monkeypatch):
    """Also where the neighbours of an entity are in two of them."""
    questions = ask((H, TAIL, 1, 0), (H, HEAD, 8, 0), (H, HEAD, 9, 0))
    options = dict(object_identity=object_identity, with_walks=True)
    whole = walk(questions, 4, **options)
    assert all(len(part.walk) for part in whole)
    monkeypatch.setattr(joins, "MAX_CHUNK_ROWS", 1)
    pieces = walk(questions, 4, **options)
    for expected, found in zip(whole, pieces, strict=True):
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other)


def test_neighbours_are_the_same_found_by_search(monkeypatch):
    """Where a table of all offsets would be too large."""
    questions = ask((H, TAIL, 1, 0), (H, HEAD, 8, 0), (H, TAIL, 19, 0))
    whole = walk(questions, 4, with_walks=True)
    monkeypatch.setattr(derive, "MAX_OFFSETS", 0)
    searched = walk(questions, 4, with_walks=True)
    for expected, found in zip(whole, searched, strict=True):
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other)

    none = Program(3, (2, 2), (), (((H, 4, 5), (A, 4, 6), (A, 6, 5)),))
    built, sizes = kb.build(**none.arrays())
    plan = plan_firings(built, sizes).chains
    assert not list(
        derive.iter_chain_firings(
            plan,
            sizes,
            ask((H, TAIL, 1, 0)),
            left_out="fact",
            object_identity=False,
        )
    )


def test_walks_spend_their_budget():
    questions = ask((H, TAIL, 1, 0))
    with pytest.raises(RowBudgetExceeded):
        walk(questions, 3, budget=RowBudget(6 * joins.JOIN_OVERHEAD_ROWS))
    # Two joins for each of three steps, over at most eight rows.
    assert walk(
        questions, 3, budget=RowBudget(6 * joins.JOIN_OVERHEAD_ROWS + 30)
    )


@pytest.mark.parametrize("left_out", ["fact", "pair"])
def test_a_fact_that_is_left_out_is_not_walked_backwards_either(left_out):
    """h(x, y) :- a(x, z), h(w, z), a(w, y): from 1 over 2 back to 1, along h(1, 2), and on to 2 and 3."""
    body = [(A, X1, Z1), (H, W1, Z1), (A, W1, Y1)]
    facts = ((H, 1, 2), (A, 1, 2), (A, 1, 3))
    program = Program(N_CONSTANTS, (2, 2), facts, (((H, X1, Y1), *body),))
    plan = plan_firings(*kb.build(**program.arrays()))

    def candidates(answer):
        parts = derive.iter_chain_firings(
            plan.chains,
            plan.sizes,
            ask((H, TAIL, 1, answer)),
            left_out=left_out,
            object_identity=False,
        )
        return [entity for p in parts for entity in p.candidate.tolist()]

    assert candidates(0) == [2, 3]
    assert candidates(2) == []
    # What links 1 and 3 is no part of the way to 2.
    assert candidates(3) == ([2, 3] if left_out == "fact" else [2])


# -- test firings

LIKES = 1
X, Y, Z = 4, 5, 6


def ask_all(rows) -> Questions:
    table = torch.tensor(rows, dtype=torch.int64).view(-1, 4)
    return Questions(*table.unbind(1))


def fire(program, rows, **options):
    """The groundings of each (question, candidate, rule)."""
    built, sizes = kb.build(**program.arrays())
    found: Counter = Counter()
    for part in iter_firings(
        plan_firings(built, sizes), ask_all(rows), **options
    ):
        assert not len(part.walk), "nobody asks for walks"
        columns = (column.tolist() for column in part[:4])
        for *triple, count in zip(*columns, strict=True):
            assert count > 0 and tuple(triple) not in found, "each once"
            found[tuple(triple)] = count
    return found


def unknown_facts(row, left_out):
    """What a question leaves out, as a test of an atom."""
    predicate, side, entity, answer = row
    pair = (entity, answer) if side == TAIL else (answer, entity)

    def is_unknown(atom):
        if not answer or len(atom) != 3:
            return False
        if left_out == "pair":
            return atom[1:] in (pair, pair[::-1])
        return atom == (predicate, *pair)

    return is_unknown


def brute_force(program, rows, left_out="fact", object_identity=False):
    found: Counter = Counter()
    for question, row in enumerate(rows):
        predicate, side, entity, _ = row
        is_unknown = unknown_facts(row, left_out)
        facts = {fact for fact in program.facts if not is_unknown(fact)}
        for i, rule in enumerate(program.rules):
            if rule[0][0] != predicate:
                continue
            for substitution in oracles.groundings(
                rule, facts, program.n_constants, object_identity
            ):
                head = oracles.put(rule[0], substitution)
                if head[HEAD + TAIL - side] == entity:
                    found[question, head[side], i] += 1
    return found


def walks(program, rows, **options):
    """The probability of each (question, candidate, rule) in units, as firings have it."""
    built, sizes = kb.build(**program.arrays())
    plan = plan_firings(built, sizes, with_walks=True)
    found: dict[tuple[int, ...], int] = {}
    for part in iter_firings(plan, ask_all(rows), **options):
        columns = (part.question, part.candidate, part.rule)
        keys = zip(*(column.tolist() for column in columns))
        found |= dict(zip(keys, part.walk.tolist(), strict=True))
    return found


def is_path(rule, n_constants):
    """Whether the body leads from one argument of the head to the other, through each variable once."""
    head, *body = rule
    if len(head) != 3 or any(len(atom) != 3 for atom in body):
        return False
    places = Counter(term for atom in body for term in atom[1:])
    ends = {term for term, n in places.items() if n == 1}
    inner = {term for term, n in places.items() if n == 2}
    if min(places, default=0) <= n_constants or ends | inner != set(places):
        return False
    if ends != set(head[1:]) or len(ends) != 2:
        return False
    reached, goals = {head[1]}, list(body)
    for _ in body:
        goals = [a for a in goals if not reached & set(a[1:])]
        reached |= {t for a in body if a not in goals for t in a[1:]}
    return reached == set(places)


def walk_by_hand(program, rule, row, left_out, object_identity):
    """{candidate: (probability, ways)} of a path rule, one fact after the other."""
    _, side, entity, _ = row
    is_unknown = unknown_facts(row, left_out)
    facts = [fact for fact in program.facts if not is_unknown(fact)]
    head, *body = rule
    ends: dict[int, list[Fraction]] = {}

    def walk_on(term, visited, goals, chance):
        here = visited[-1]
        if not goals:
            ends.setdefault(here, []).append(chance)
            return
        # the one atom with the variable that was reached last
        (goal,) = (goal for goal in goals if term in goal[1:])
        place = HEAD if goal[HEAD] == term else TAIL
        other = HEAD + TAIL - place
        there = [
            fact[other]
            for fact in facts
            if len(fact) == 3 and fact[0] == goal[0] and fact[place] == here
        ]
        others = [g for g in goals if g is not goal]
        for end in there:
            if object_identity and end in visited:
                continue
            walk_on(goal[other], [*visited, end], others, chance / len(there))

    walk_on(head[HEAD + TAIL - side], [entity], body, Fraction(1))
    return {end: (sum(parts), len(parts)) for end, parts in ends.items()}


@given(programs, st.sampled_from(["fact", "pair"]), st.booleans())
@settings(max_examples=150)
def test_walks_are_those_along_single_facts(program, left_out, identity):
    """A probability is off by less than a unit for each atom of each grounding; other bodies have none."""
    rows = all_questions(program)
    found = walks(program, rows, left_out=left_out, object_identity=identity)
    assert set(found) == set(
        brute_force(program, rows, left_out, object_identity=identity)
    )
    for (question, candidate, i), units in found.items():
        rule = program.rules[i]
        if not is_path(rule, program.n_constants):
            assert units == 0
            continue
        expected, n_ways = walk_by_hand(
            program, rule, rows[question], left_out, identity
        )[candidate]
        error = abs(units * Fraction(WALK_UNIT) - expected)
        assert units > 0
        assert error < (len(rule) - 1) * n_ways * Fraction(WALK_UNIT)


def test_a_walk_divides_by_the_facts_that_are_left():
    """likes(X, Y) <- likes(X, Z), likes(Z, Y), from 1: to 2 and to 3, and from 3 to 1 and to 2."""
    program = Program(
        3,
        (2,),
        ((LIKES, 1, 2), (LIKES, 1, 3), (LIKES, 3, 1), (LIKES, 3, 2)),
        (((LIKES, X, Y), (LIKES, X, Z), (LIKES, Z, Y)),),
    )

    def probabilities(row, **options):
        found = walks(program, [row], **options)
        return {end: n * WALK_UNIT for (_, end, _), n in found.items()}

    assert probabilities((LIKES, TAIL, 1, 0)) == {1: 0.25, 2: 0.25}
    # Without likes(1, 2), the first step leads to 3 alone.
    assert probabilities((LIKES, TAIL, 1, 2)) == {1: 0.5, 2: 0.5}
    # Without all facts of 1 and 3 it leads to 2, where the walk ends.
    assert probabilities((LIKES, TAIL, 1, 3), left_out="pair") == {}
    # Under object identity a walk that comes back ends.
    assert probabilities((LIKES, TAIL, 1, 0), object_identity=True) == {2: 0.25}


@pytest.mark.parametrize("left_out", ["fact", "pair"])
def test_a_walk_does_not_go_back_along_what_is_left_out(left_out):
    """likes(X, Y) <- knows(X, Z), likes(W, Z), knows(W, Y), from 1: to 2 or 3, and from 2 back to 1 or 4."""
    w, knows = 7, 2
    program = Program(
        4,
        (2, 2),
        (
            *((LIKES, 1, 2), (LIKES, 4, 2)),
            *((knows, 1, 2), (knows, 1, 3), (knows, 4, 3), (knows, 2, 4)),
        ),
        (((LIKES, X + 1, Y + 1), (knows, X + 1, Z + 1), (LIKES, w + 1, Z + 1),
          (knows, w + 1, Y + 1)),),
    )  # fmt: skip

    def probabilities(answer):
        row = (LIKES, TAIL, 1, answer)
        found = walks(program, [row], left_out=left_out)
        return {end: n * WALK_UNIT for (_, end, _), n in found.items()}

    assert probabilities(0) == {2: 0.125, 3: 0.125 + 0.25}
    # From 2 it goes to 4 alone; without all facts of 1 and 2 it does not come to 2.
    assert probabilities(2) == ({3: 0.5} if left_out == "fact" else {})


def test_a_walk_keeps_a_unit_however_unlikely_it_is():
    """Eight steps, each to one of 256 entities, have a chance of 2 ** -64."""
    n_wide, n_steps = 256, 8
    variables = [n_wide + 1, *range(n_wide + 3, n_wide + 2 + n_steps)]
    variables.append(n_wide + 2)
    body = [(LIKES, i, j) for i, j in itertools.pairwise(variables)]
    rule = ((LIKES, n_wide + 1, n_wide + 2), *body)
    star = tuple((LIKES, 1, j) for j in range(1, n_wide + 1))
    program = Program(n_wide, (2,), star, (rule,))
    # All ways but the loop of 1 end at once, and the walk stays there.
    found = walks(program, [(LIKES, TAIL, 1, 0)])
    assert found[0, 2, 0] == 1
    assert found[0, 1, 0] == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("identity", [False, True])
def test_walks_are_the_same_bits_on_a_gpu(identity):
    n = 30
    facts = tuple(
        (LIKES, i, j) for i in range(1, n) for j in range(1, n) if i * j % 7 < 3
    )
    x, y, z, w = range(n + 1, n + 5)
    rules = (
        ((LIKES, x, y), (LIKES, x, z), (LIKES, z, w), (LIKES, w, y)),
        ((LIKES, x, y), (LIKES, z, x), (LIKES, z, y)),
        ((LIKES, x, 1), (LIKES, x, z)),
    )
    program = Program(n, (2,), facts, rules)
    rows = ask_all(all_questions(program))
    found = {}
    for device in ("cpu", "cuda"):
        built, sizes = kb.build(**program.arrays(), device=device)
        plan = plan_firings(built, sizes, with_walks=True)
        asked = Questions(*(column.to(device) for column in rows))
        found[device] = derive.sorted_firings(plan, asked, "fact", identity)
    for one, other in zip(found["cpu"], found["cuda"], strict=True):
        assert torch.equal(one, other.cpu())


def all_questions(program):
    """Every question about a binary predicate, with and without an answer to leave out."""
    constants = range(1, program.n_constants + 1)
    predicates = [p for p, arity in enumerate(program.arity, 1) if arity == 2]
    rows = [
        (p, side, entity, 0)
        for p, side, entity in itertools.product(
            predicates, (HEAD, TAIL), constants
        )
    ]
    for p, *arguments in program.facts:
        if p in predicates:
            head, tail = arguments
            rows += [(p, HEAD, tail, head), (p, TAIL, head, tail)]
    return rows


@given(programs, st.sampled_from(["fact", "pair"]), st.booleans())
@settings(max_examples=150)
def test_firings_are_those_of_every_grounding(program, left_out, identity):
    rows = all_questions(program)
    options = dict(left_out=left_out, object_identity=identity)
    assert fire(program, rows, **options) == brute_force(
        program, rows, **options
    )


@st.composite
def path_programs(draw):
    """Rules whose bodies are paths that share beginnings, over a dense graph."""
    entity = st.integers(1, 5)
    fact = st.tuples(st.integers(1, 2), entity, entity)
    facts = draw(st.sets(fact, min_size=8, max_size=20))
    step = st.tuples(st.integers(1, 2), st.booleans())
    paths = draw(
        st.lists(st.lists(step, min_size=1, max_size=5), min_size=1, max_size=4)
    )
    rules = []
    for path in paths:
        body = []
        for i, (predicate, is_forward) in enumerate(path, 6):
            ends = (i, i + 1) if is_forward else (i + 1, i)
            body.append((predicate, *ends))
        rules.append(((1, 6, 6 + len(path)), *body))
    return Program(5, (2, 2), tuple(sorted(facts)), tuple(rules))


@given(path_programs(), st.sampled_from(["fact", "pair"]))
@settings(max_examples=60)
def test_paths_that_come_back_to_an_entity_do_not_count(program, left_out):
    """Under object identity, where walks are merged before their last step."""
    rows = [row for row in all_questions(program) if row[0] == 1]
    expected = brute_force(program, rows, left_out, object_identity=True)
    options = {"left_out": left_out, "object_identity": True}
    assert fire(program, rows, **options) == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(derive, "MAX_OFFSETS", 0)
        patch.setattr(joins, "MAX_CHUNK_ROWS", 3)
        assert fire(program, rows, **options) == expected


def test_two_ways_to_one_answer_count_twice():
    program = Program(
        3,
        (2,),
        ((LIKES, 1, 2), (LIKES, 1, 3), (LIKES, 2, 3), (LIKES, 3, 3)),
        (((LIKES, X, Y), (LIKES, X, Z), (LIKES, Z, Y)),),
    )
    assert fire(program, [(LIKES, TAIL, 1, 0)]) == {(0, 3, 0): 2}
    # likes(1, 3) is the second atom's fact of one way only, likes(3, 3).
    assert fire(program, [(LIKES, TAIL, 1, 3)]) == {(0, 3, 0): 1}


def test_rules_that_differ_in_constants_alone_are_told_apart():
    program = Program(
        3,
        (2, 2),
        ((2, 1, 2), (2, 1, 3), (2, 2, 3)),
        (
            ((LIKES, X, 3), (2, X, 2)),
            ((LIKES, X, 1), (2, X, 3)),
            ((LIKES, X, 1), (2, X, 3)),  # the same rule again
        ),
    )
    found = fire(program, [(LIKES, TAIL, 1, 0), (LIKES, TAIL, 2, 0)])
    assert found == {(0, 3, 0): 1, (0, 1, 1): 1, (0, 1, 2): 1} | {
        (1, 1, 1): 1,
        (1, 1, 2): 1,
    }


def test_rules_of_one_shape_about_many_predicates_are_solved_as_one():
    # more predicates than constants, whose numbers no variable may have
    n_predicates = 9
    facts = tuple((p, 1 + p % 2, 2) for p in range(1, n_predicates + 1))
    a, b = 3, 4  # variables
    rules = tuple(
        ((p, a, 1 + p % 2), (q, a, b))
        for p in range(1, n_predicates + 1)
        for q in range(1, n_predicates + 1)
    )
    program = Program(2, (2,) * n_predicates, facts, rules)
    plan = plan_firings(*kb.build(**program.arrays()))
    assert len(plan.groups) == 1
    rows = all_questions(program)
    found = fire(program, rows)
    assert found == brute_force(program, rows)
    assert len({rule for _, _, rule in found}) == len(rules)


def test_rules_about_other_predicates_cost_a_question_no_join():
    program = Program(
        3,
        (2, 2),
        ((LIKES, 1, 2), (2, 1, 2)),
        (((2, X, Y), (LIKES, Y, X), (LIKES, X, Y)),),
    )
    budget = RowBudget(10**6)
    assert not fire(program, [(LIKES, TAIL, 1, 0)], budget=budget)
    assert not budget.n_joins
    fire(program, [(2, TAIL, 1, 0)], budget=budget)
    assert budget.n_joins


def test_the_work_is_bounded_by_the_budget():
    program = Program(
        3, (2,), ((LIKES, 1, 2),), (((LIKES, X, Y), (LIKES, Y, X)),)
    )
    with pytest.raises(RowBudgetExceeded):
        fire(program, [(LIKES, TAIL, 2, 0)], budget=RowBudget(1))
    assert fire(program, [(LIKES, TAIL, 2, 0)], budget=RowBudget(10**6))


# -- test firing chunks


@given(programs, st.booleans())
@settings(max_examples=100)
def test_derived_answers_are_the_atoms_of_one_step_that_agree_with_a_query(
    program, identity
):
    world, sizes = kb.build(**program.arrays())
    plan = derive.plan_firings(world, sizes)
    model = fixpoint.least_model(
        world, sizes, max_height=1, max_atoms=10**6, object_identity=identity
    )
    atoms = [
        atom
        for atom in map(tuple, model.atoms.tolist())
        if len(atom) > TAIL and atom[TAIL] and not any(atom[TAIL + 1 :])
    ]
    queries = atoms[::2]
    if not queries:
        return
    for sides in ((HEAD,), (TAIL,), (HEAD, TAIL)):
        found = derive.derive_answers(
            plan,
            torch.tensor(queries),
            sides,
            object_identity=identity,
        )
        given = {(s, q[0], q[HEAD + TAIL - s]) for q in queries for s in sides}
        asked = {
            atom
            for atom in atoms
            for side in sides
            if (side, atom[0], atom[HEAD + TAIL - side]) in given
        }
        derived = {tuple(atom) for atom in found.tolist()}
        # A fact is listed where a rule derives it too.
        facts = {tuple(atom) for atom in world.facts.tolist()}
        assert derived - facts == asked - facts
        assert derived <= asked


X3, Y3, Z3 = 6, 7, 8
# near(X3, Y3) <- near(X3, Z3), near(Z3, Y3) over a chain of five entities.
CHAIN = Program(
    facts=tuple((1, i, i + 1) for i in range(1, 5)),
    rules=(((1, X3, Y3), (1, X3, Z3), (1, Z3, Y3)),),
    n_constants=5,
    arity=(2,),
)


# like(X3, Y3) <- near(X3, Y3) over nine pairs: one firing a question
STARS = Program(
    facts=tuple((1, i, i + 1) for i in range(1, 10)),
    rules=(((2, 11, 12), (1, 11, 12)),),
    n_constants=10,
    arity=(2, 2),
)


def test_half_of_the_memory_halves_the_chunks_and_not_what_they_hold(
    monkeypatch,
):
    monkeypatch.setattr(derive, "PILOT_QUESTIONS", 1)
    monkeypatch.setattr(derive, "MAX_CHUNK_FIRINGS", 4)
    world, sizes = kb.build(**STARS.arrays())
    queries = world.facts.long() + torch.tensor([1, 0, 0])  # like(X3, ?)
    asked = derive.open_questions(queries, TAIL)
    sizes_of: dict[float, list[int]] = {}
    found: dict[float, list[int]] = {}
    for share in (1.0, 0.5):
        plan = derive.plan_firings(world, sizes, share)
        chunks = list(derive.iter_firing_chunks(plan, asked))
        sizes_of[share] = [len(chunk.questions.entity) for chunk in chunks]
        candidates = [chunk.firings.candidate for chunk in chunks]
        found[share] = torch.cat(candidates).tolist()
    assert sizes_of == {1.0: [1, 4, 4], 0.5: [1, 2, 2, 2, 2]}
    assert found[1.0] == found[0.5] == list(range(2, 11))


def joined(chunks):
    """The columns of all chunks, whose questions are numbered from the first one of all."""
    start, parts = 0, []
    for questions, found in chunks:
        own = found._replace(question=found.question + start)
        parts.append((*questions, *own))
        start += len(questions.entity)
    return [torch.cat(columns) for columns in zip(*parts, strict=True)]


@given(programs, st.booleans(), st.integers(2, 4))
@settings(max_examples=40)
def test_any_number_of_threads_gives_the_same_firings(
    program, identity, n_threads
):
    world, sizes = kb.build(**program.arrays())
    plan = derive.plan_firings(world, sizes)
    queries = world.facts.long()
    if not len(queries) or world.facts.shape[1] <= TAIL:
        return
    asked = derive.open_questions(queries, TAIL)
    threads_of_parts = set()

    def compute(questions, found):
        threads_of_parts.add(threading.get_ident())
        return questions, found

    def run(n_threads, work, most_rows=10**6):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(derive, "PILOT_QUESTIONS", 1)
            patch.setattr(derive, "MIN_PART_ROWS", 1)
            patch.setattr(derive, "MAX_CHUNK_JOIN_ROWS", most_rows)
            return joined(
                derive.map_firing_chunks(
                    compute,
                    plan,
                    asked,
                    object_identity=identity,
                    work=work,
                    n_threads=n_threads,
                )
            )

    one, several = FiringWork(), FiringWork()
    alone = run(1, one)
    assert threads_of_parts == {threading.get_ident()}
    for column, expected in zip(run(n_threads, several), alone, strict=True):
        assert torch.equal(column, expected)
    assert several.n_rows == one.n_rows
    # Chunks that are too large are halved, down to one question.
    for column, expected in zip(run(n_threads, FiringWork(), 1), alone):
        assert torch.equal(column, expected)


def test_a_chunk_has_as_many_parts_as_there_is_work_for(monkeypatch):
    """The first one, whose work is unknown, has one, and each of several has two questions."""
    world, sizes = kb.build(**STARS.arrays())
    plan = derive.plan_firings(world, sizes)
    queries = world.facts.long() + torch.tensor([1, 0, 0])
    asked = derive.open_questions(queries, TAIL)
    monkeypatch.setattr(derive, "PILOT_QUESTIONS", 1)
    monkeypatch.setattr(derive, "MIN_PART_ROWS", 1)

    def sizes_of_parts():
        chunks = derive.iter_firing_chunks(plan, asked)
        return [len(chunk.questions.entity) for chunk in chunks]

    for n_threads in ("1", "3"):
        monkeypatch.setenv("OMP_NUM_THREADS", n_threads)
        assert sizes_of_parts() == [1, 2, 2, 2, 2]
    monkeypatch.setattr(derive, "MAX_PARTS", 3)
    assert sizes_of_parts() == [1, 2, 3, 3]
    monkeypatch.setattr(derive, "MIN_PART_ROWS", 1000)
    assert sizes_of_parts() == [1, 8]


def test_parts_that_are_computed_at_once_are_half_of_a_chunk_at_most(
    monkeypatch,
):
    """Temporary tensors of each are held: with as many parts as threads they were those of the whole chunk."""
    monkeypatch.setattr(derive, "MIN_PART_ROWS", 1)
    done = derive._Done(
        began=0.0, n_links_before=0, n_questions=16, n_firings=160, n_rows=1600
    )
    n_parts = done.count_parts(4096)
    assert n_parts // 2 >= host.MAX_THREADS


def test_a_chunk_has_no_more_questions_than_there_is_time_for(monkeypatch):
    monkeypatch.setattr(derive, "PILOT_QUESTIONS", 1)
    monkeypatch.setattr(derive, "MAX_CHUNK_GROWTH", 100)
    world, sizes = kb.build(**STARS.arrays())
    plan = derive.plan_firings(world, sizes)
    queries = world.facts.long() + torch.tensor([1, 0, 0])
    asked = derive.open_questions(queries, TAIL)
    now = [0.0]
    work = FiringWork(deadline=Deadline(at=6.0, clock=lambda: now[0]))
    n_questions = []
    for chunk in derive.iter_firing_chunks(plan, asked, work=work):
        n_questions.append(len(chunk.questions.entity))
        now[0] += n_questions[-1]  # a second each
        if work.deadline.is_over:
            break
    assert n_questions == [1, 5]


def test_the_budget_bounds_the_rows_and_the_joins_of_all_chunks(monkeypatch):
    world, sizes = kb.build(**CHAIN.arrays())
    plan = derive.plan_firings(world, sizes)
    asked = derive.open_questions(world.facts.long(), TAIL)
    monkeypatch.setattr(derive, "PILOT_QUESTIONS", 1)
    monkeypatch.setattr(derive, "MAX_CHUNK_GROWTH", 1)

    def run(budget, work=None):
        chunks = derive.iter_firing_chunks(
            plan, asked, work=work, budget=budget
        )
        return sum(len(chunk.firings.rule) for chunk in chunks)

    spent, work = RowBudget(10**9), FiringWork()
    assert run(spent, work) == 3
    n_joins, rest = divmod(spent.n_rows - work.n_rows, joins.JOIN_OVERHEAD_ROWS)
    assert n_joins >= 4 and not rest
    assert run(RowBudget(spent.n_rows)) == 3
    with pytest.raises(RowBudgetExceeded):
        run(RowBudget(spent.n_rows - 1))
