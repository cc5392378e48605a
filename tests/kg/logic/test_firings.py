"""Firings equal those found by trying every grounding, whatever a question leaves out."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.kg.logic import derive, joins, kb
from funcppo.kg.logic.derive import (
    WALK_UNIT,
    Questions,
    iter_firings,
    plan_firings,
)
from funcppo.kg.logic.joins import RowBudget, RowBudgetExceeded
from funcppo.kg.logic.triple_index import HEAD, TAIL
from tests import oracles
from tests.oracles import Program, programs

LIKES = 1
X, Y, Z = 4, 5, 6


def ask(rows) -> Questions:
    table = torch.tensor(rows, dtype=torch.int64).view(-1, 4)
    return Questions(*table.unbind(1))


def fire(program, rows, **options):
    """The groundings of each (question, candidate, rule)."""
    built, sizes = kb.build(**program.arrays())
    found: Counter = Counter()
    for part in iter_firings(plan_firings(built, sizes), ask(rows), **options):
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
    for part in iter_firings(plan, ask(rows), **options):
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
    rows = ask(all_questions(program))
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
