"""Views of relations, conjunctive queries against brute force, and rules as queries."""

import collections
import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcppo.core.host import Deadline
from funcppo.kg.logic import joins
from tests import sld

N_VIEW_CONSTANTS = 4
X, Y = 5, 6  # variables
row = st.tuples(*[st.integers(1, N_VIEW_CONSTANTS)] * 3)
rows_of_three = st.sets(row, min_size=1, max_size=20).map(sorted)


def view_relation(rows) -> joins.Relation:
    table = torch.tensor(rows, dtype=torch.int64)
    return joins.Relation(tuple(table.unbind(1)))


def as_rows(columns):
    return list(zip(*(column.tolist() for column in columns)))


@given(
    rows_of_three,
    st.tuples(*[st.sampled_from([1, 2, X, Y])] * 3),
    st.booleans(),
    st.integers(0, 2),
)
def test_a_view_holds_the_rows_that_match(rows, terms, reverse, n_indexed):
    relation = view_relation(rows)
    literal = joins.make_literal(relation, terms, N_VIEW_CONSTANTS)
    variables = tuple(sorted(literal.variables, reverse=reverse))
    if not variables:
        return
    n_indexed = min(n_indexed, len(variables))
    view = joins.indexed_view(literal, variables, n_indexed, N_VIEW_CONSTANTS)

    expected = set()
    for row in rows:
        binding = {1: 1, 2: 2}  # the constants
        if all(v == binding.setdefault(t, v) for t, v in zip(terms, row)):
            expected.add(tuple(binding[v] for v in variables))
    assert as_rows(view.columns) == sorted(expected)
    assert view.size == len(expected)


@given(rows_of_three, st.lists(row, min_size=1, max_size=10))
def test_rows_are_found_where_they_stand(rows, probes):
    columns = tuple(torch.tensor(probes).unbind(1))
    found = joins.find_rows(columns, view_relation(rows), N_VIEW_CONSTANTS)
    for position, is_row, probe in zip(*(x.tolist() for x in found), probes):
        assert is_row == (probe in rows)
        assert not is_row or rows[position] == probe


# -- test joins

N_CONSTANTS = 3
VARIABLES = (4, 5, 6, 7)
terms = st.sampled_from([1, 2, *VARIABLES])


def relation_of(rows) -> joins.Relation:
    table = torch.tensor(sorted(rows), dtype=torch.int64).view(-1, 2)
    return joins.Relation(
        tuple(column.contiguous() for column in table.unbind(1))
    )


@st.composite
def queries(draw):
    """Up to three binary literals over four variables, inequalities between them, and some output variables."""
    pair = st.tuples(st.integers(1, N_CONSTANTS), st.integers(1, N_CONSTANTS))
    atom = st.tuples(st.frozensets(pair, min_size=1, max_size=6), terms, terms)
    atoms = draw(st.lists(atom, min_size=1, max_size=3))
    used = variables_of(atoms)
    if not used:
        return atoms, (), []
    variable = st.sampled_from(used)
    output = draw(st.lists(variable, unique=True, max_size=3))
    others = st.tuples(variable, st.sampled_from([1, *used]))
    several = draw(st.lists(others, max_size=2))
    return atoms, tuple(output), [((a,), (b,)) for a, b in several]


def variables_of(atoms):
    return sorted({t for _, *atom in atoms for t in atom if t > N_CONSTANTS})


def query_of(atoms, output, unequal, **options):
    literals = tuple(
        joins.make_literal(relation_of(rows), (a, b), N_CONSTANTS)
        for rows, a, b in atoms
    )
    return joins.ConjunctiveQuery(
        literals, output, tuple(unequal), N_CONSTANTS, **options
    )


def answers_of(atoms, output, unequal):
    query = query_of(atoms, output, unequal)
    tables = list(joins.iter_answers(query))
    assert all(table.size and table.variables == output for table in tables)
    return {row for table in tables for row in rows_of(table)}


def rows_of(table):
    return as_rows(table.columns) if table.columns else [()]


def assignments(atoms, output, unequal):
    """The output of each assignment of the variables that satisfies the query."""
    used, constants = variables_of(atoms), range(1, N_CONSTANTS + 1)
    for values in itertools.product(constants, repeat=len(used)):
        value = dict(zip(used, values)) | {c: c for c in constants}
        holds = all((value[a], value[b]) in rows for rows, a, b in atoms)
        if holds and all(value[x] != value[y] for (x,), (y,) in unequal):
            yield tuple(value[v] for v in output)


def counts_of(atoms, output, unequal):
    """The answers and their counts, chunks added."""
    query = query_of(atoms, output, unequal, is_counted=True)
    counts: dict[tuple[int, ...], int] = collections.Counter()
    for table in joins.iter_answers(query):
        assert table.size == len(table.counts) > 0
        for row, count in zip(
            rows_of(table), table.counts.tolist(), strict=True
        ):
            counts[row] += count
    return counts


@given(queries())
def test_answers_and_counts_are_those_of_a_nested_loop(query):
    """Also in chunks of two rows."""
    expected = collections.Counter(assignments(*query))
    for n_rows in (joins.MAX_CHUNK_ROWS, 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(joins, "MAX_CHUNK_ROWS", n_rows)
            assert answers_of(*query) == set(expected)
            assert counts_of(*query) == expected


# -- the budget


def test_a_budget_counts_rows_and_ends_a_join_that_exceeds_it():
    edges = set(itertools.product((1, 2, 3), repeat=2))
    query = query_of([(edges, 4, 5), (edges, 5, 6)], (4, 6), [])
    # 9 rows of the first literal, 27 of the join, and the overhead of both
    n_rows = 9 + 27 + 2 * joins.JOIN_OVERHEAD_ROWS
    budget = joins.RowBudget(n_rows)
    within = dataclasses.replace(query, budget=budget)
    assert sum(table.size for table in joins.iter_answers(within)) == 9
    assert budget.n_rows == n_rows

    beyond = dataclasses.replace(query, budget=joins.RowBudget(n_rows - 1))
    with pytest.raises(joins.RowBudgetExceeded, match=f"{n_rows - 1:,} rows"):
        list(joins.iter_answers(beyond))


def test_a_budget_ends_joins_at_its_deadline():
    now = [0.0]
    deadline = Deadline(at=1.0, clock=lambda: now[0])
    budget = joins.RowBudget(10, overhead=0, deadline=deadline)
    budget.spend_join(3)
    now[0] = 1.0
    with pytest.raises(joins.RowBudgetExceeded, match="more time"):
        budget.spend_join(3)


# -- test rules

N_RULE_CONSTANTS = 2
rule_terms = st.lists(
    st.integers(1, N_RULE_CONSTANTS + 4), min_size=3, max_size=3
)


def test_a_chain_of_variables_becomes_one():
    unifier = joins.most_general_unifier((1, 3, 4, 5), (1, 4, 5, 2), 2)
    assert unifier == {3: 2, 4: 2, 5: 2}
    assert joins.most_general_unifier((1, 3, 3), (1, 1, 2), 2) is None
    assert joins.most_general_unifier((1, 3), (2, 3), 2) is None
    # predicates are no variables
    assert joins.most_general_unifier((4, 1), (5, 1), 2) is None


@given(rule_terms, rule_terms)
def test_the_unifier_is_a_most_general_one(left, right):
    left, right = (1, *left), (1, *right)
    same = joins.most_general_unifier(left, right, N_RULE_CONSTANTS)
    known = sld.unify(left, right, N_RULE_CONSTANTS)
    assert (same is None) == (known is None)
    if same is not None and known is not None:
        rule = joins.substitute_rule(joins.Rule(0, left, (right,)), same)
        assert rule.body == (rule.head,)
        # no variable was bound without need
        assert len(set(rule.head)) == len(set(sld.apply(left, known)))
