"""KnowledgeBase: lookups equal to scanning lists; what is refused; one fact less equals building without it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.logic import fixpoint, kb
from funcppo.kg.logic.kb import HEAD, TAIL
from tests.shapes import check_shapes_and_dtypes

C = 5
# one fact twice
TABLE = np.array([[2, 1, 2], [1, 3, 3], [2, 1, 1], [2, 1, 2], [1, 2, 3]])


@st.composite
def tables(draw):
    """Facts over 3 predicates of arity 0 to 3, padded, and the id of the largest constant."""
    arity = draw(st.lists(st.integers(0, 3), min_size=3, max_size=3))
    width = 1 + max(1, *arity)
    # three ids of the latter do not fit one key
    top = draw(st.sampled_from([C, 2**30]))
    constant = st.integers(1, C).map(lambda c: c + top - C)
    atom = st.integers(1, 3).flatmap(
        lambda p: st.lists(
            constant, min_size=arity[p - 1], max_size=arity[p - 1]
        ).map(lambda args: [p, *args, *[0] * (width - 1 - len(args))])
    )
    atoms = np.array(draw(st.lists(atom, max_size=12)), dtype=int)
    return atoms.reshape(-1, width), top


def build(facts, top=C, rules=None):
    rules = np.zeros((0, 1, facts.shape[1]), int) if rules is None else rules
    return kb.build(facts, rules, n_constants=top, n_predicates=3)


def goals_of(facts, top):
    """Every fact, and every fact with one term replaced by another constant, a padding or a variable."""
    rows = [list(map(int, row)) for row in facts]
    changed = [
        [*row[:j], t, *row[j + 1 :]]
        for row in rows
        for j in range(1, len(row))
        for t in (0, top - 1, top + 1)
    ]
    return torch.tensor(rows + changed + [[3] + [top] * (facts.shape[1] - 1)])


def test_facts_are_distinct_and_sorted_and_a_row_is_an_id():
    world, sizes = build(TABLE)
    assert world.facts.tolist() == [[1, 2, 3], [1, 3, 3], [2, 1, 1], [2, 1, 2]]
    asked = torch.tensor(
        [[2, 1, 1], [1, 2, 3], [2, 2, 1], [1, 2, C + 1], [0, 0, 0]]
    )
    assert kb.fact_id(world, sizes, asked).tolist() == [2, 0, -1, -1, -1]
    check_shapes_and_dtypes(world)


@given(tables())
def test_an_atom_is_found_exactly_when_it_is_in_the_list(case):
    facts, top = case
    world, sizes = build(facts, top)
    known = sorted({tuple(row) for row in facts.tolist()})
    assert [tuple(row) for row in world.facts.tolist()] == known
    goals = goals_of(facts, top)
    expected = [
        known.index(tuple(g)) if tuple(g) in known else -1
        for g in goals.tolist()
    ]
    assert kb.fact_id(world, sizes, goals).tolist() == expected
    found = kb.contains(world, sizes, goals).tolist()
    assert found == [i >= 0 for i in expected]


@given(tables())
def test_no_fact_that_matches_a_goal_is_missed_or_uncounted(case):
    """The ids agree with the goal in its most selective argument, so they hold all facts that match."""
    facts, top = case
    world, sizes = build(facts, top)
    known = world.facts.tolist()
    goals = goals_of(facts, top)
    ids, filled, count = kb.lookup_facts(world, sizes, goals, 12)
    for goal, row, ok, n in zip(goals.tolist(), ids, filled, count.tolist()):
        found = row[ok].tolist()
        assert found == sorted(set(found)) and len(found) == n
        bound = [j for j in range(1, len(goal)) if 0 < goal[j] <= top]
        same = [[f[j] == t for j, t in enumerate(goal)] for f in known]
        assert {
            i for i, s in enumerate(same) if s[0] and all(s[j] for j in bound)
        } <= set(found)
        assert n == min(sum(s[0] and s[j] for s in same) for j in bound or [0])


def test_rules_of_a_predicate_come_in_file_order():
    heads = [2, 1, 2, 3, 2]
    rules = np.array([[[p, C + 1, C + 1], [1, C + 1, C + 1]] for p in heads])
    world, sizes = build(TABLE, rules=rules)
    ids, filled = kb.lookup_rules(world, sizes, torch.tensor([1, 2, 3]))
    rows = [row[ok].tolist() for row, ok in zip(ids, filled)]
    assert rows == [[1], [0, 2, 4], [3]]


# -- triples by the two sides of a query


def table(atoms):
    return torch.tensor(sorted(atoms), dtype=torch.int32).reshape(-1, 3)


@st.composite
def indexed_triples(draw):
    """Constants, a pool of them or None, triples, and queries on a side."""
    n_constants = draw(st.integers(1, 6))
    constant = st.integers(1, n_constants)
    atom = st.tuples(st.integers(1, 2), constant, constant)
    triples = draw(st.sets(atom, max_size=20))
    pool = draw(st.none() | st.sets(st.integers(1, n_constants), min_size=1))
    queries = draw(st.lists(atom, min_size=1, max_size=5))
    side = draw(st.sampled_from([HEAD, TAIL]))
    return n_constants, pool, triples, side, queries


def build_index(n_constants, pool, triples):
    pool = None if pool is None else torch.tensor(sorted(pool))
    return kb.build_triple_index(table(triples), n_constants, pool)


# -- equality with Python sets


@given(indexed_triples())
def test_answers_are_those_of_python_sets(case):
    n_constants, pool, triples, side, queries = case
    index = build_index(n_constants, pool, triples)
    rows = torch.tensor(queries)
    indexed = {t for t in triples if pool is None or t[side] in pool}
    given_argument = TAIL if side == HEAD else HEAD
    expected = []
    for i, query in enumerate(queries):
        asked = lambda t, q=query: all(
            t[x] == q[x] for x in (0, given_argument)
        )
        answers = sorted(t[side] for t in indexed if asked(t))
        expected += [(i, entity) for entity in answers]
    answers = kb.list_answers(index, rows, side)
    found = zip(answers.query_row.tolist(), answers.entity.tolist())
    assert list(found) == expected
    assert kb.contains_key(index, answers.triple_key, side).all()
    start, stop = kb.answer_range(index, rows, side)
    asked = [row for row, _ in expected]
    assert (stop - start).tolist() == [*map(asked.count, range(len(queries)))]
    found = kb.contains_triple(index, rows, side).tolist()
    assert found == [query in indexed for query in queries]


# -- limits


def test_keys_beyond_63_bits_are_refused():
    problem = "63 bits, got 9 predicates and 2147483648 constants"
    with pytest.raises(ValueError, match=problem):
        kb.build_triple_index(torch.tensor([[9, 1, 2]]), 2**31)
    # (1 + 1) * (2**31 - 1)**2 < 2**63
    kb.build_triple_index(torch.tensor([[1, 1, 2]]), 2**31 - 2)


def test_a_filter_index_holds_the_true_and_the_derivable_triples_of_the_pool():
    """q(X, Y) :- p(X, Y) derives q(1, 2) and q(3, 2); facts are derivable too. Entity 3 is outside the pool."""
    facts = np.array([[1, 1, 2], [1, 3, 2]])
    rules = np.array([[[2, 4, 5], [1, 4, 5]]])
    base, sizes = kb.build(facts, rules, n_constants=3, n_predicates=2)
    model = fixpoint.least_model(base, sizes, max_height=1, max_atoms=100)
    true_atoms = torch.tensor(
        [[1, 1, 2], [1, 3, 2], [2, 2, 2]], dtype=torch.int32
    )
    pool = torch.tensor([1, 2])
    index = fixpoint.build_filter_index(sizes, model, true_atoms, pool)
    queries = torch.tensor(
        [[1, 1, 2], [1, 3, 2], [2, 1, 2], [2, 3, 2], [2, 2, 2]]
    )
    for side, in_pool in (
        (HEAD, [True, False, True, False, True]),
        (TAIL, [True] * 5),
    ):
        true = kb.contains_triple(index.true_triples, queries, side).tolist()
        derivable = kb.contains_triple(
            index.derivable_triples, queries, side
        ).tolist()
        assert true == [
            a and b for a, b in zip([True, True, False, False, True], in_pool)
        ]
        assert derivable == [
            a and b for a, b in zip([True, True, True, True, False], in_pool)
        ]
