"""Rows of fixed tables: expansion, which questions fit, and merging."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.logic import fixed_rows, joins

COUNTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=9
)


def expand(rows, capacities, stages=None, n_questions=3):
    """Expand rows of (question, count), whose positions start at 10 times their number."""
    question, count = torch.tensor(rows).unbind(1)
    stages = stages or fixed_rows.no_stages(n_questions, question.device)
    start = 10 * torch.arange(len(rows))
    return fixed_rows.expand(stages, capacities, question, start, count)


def pairs(expanded, n_questions=3):
    """The rows that are no empty places."""
    columns = (column.tolist() for column in expanded)
    return [row for row in zip(*columns, strict=True) if row[0] < n_questions]


def test_the_questions_with_the_fewest_rows_fit():
    rows = [(0, 4), (1, 1), (0, 2), (2, 2)]
    stages, expanded = expand(rows, (4,))
    assert stages.overflow.tolist() == [True, False, False, False]
    assert pairs(expanded) == [(1, 1, 10), (2, 3, 30), (2, 3, 31)]
    assert stages.demands[0].tolist() == [6, 1, 2, 0]

    # A question that has overflowed has no rows any more.
    stages, expanded = expand([(0, 1), (1, 2)], (9, 2), stages)
    assert stages.overflow.tolist() == [True, False, False, False]
    assert pairs(expanded) == [(1, 1, 10), (1, 1, 11)]
    assert stages.demands[1].tolist() == [0, 2, 0, 0]


@given(COUNTS)
def test_expanded_rows_are_those_of_ragged_ranges(rows):
    question, count = torch.tensor(rows).unbind(1)
    kept = torch.where(question < 3, count, 0)
    expected = joins.expand_ranges(10 * torch.arange(len(rows)), kept)
    for capacities in (1000, (int(kept.sum()) + 1,)):
        stages, expanded = expand(rows, capacities)
        found = [row[1:] for row in pairs(expanded)]
        assert found == list(zip(*(x.tolist() for x in expected), strict=True))
        assert not stages.overflow.any()


@given(COUNTS, st.integers(1, 12))
def test_a_question_has_all_its_rows_or_none(rows, capacity):
    stages, expanded = expand(rows, (capacity,))
    of_question = [sum(n for q, n in rows if q == i) for i in range(3)]
    found = [row[0] for row in pairs(expanded)]
    for i, n in enumerate(of_question):
        assert found.count(i) == (0 if stages.overflow[i] else n)
    # none is left out that has no more rows than one that is not
    left_out = [n for n, o in zip(of_question, stages.overflow[:3]) if o]
    kept = [n for n, o in zip(of_question, stages.overflow[:3]) if not o]
    if left_out:
        assert max(kept, default=0) <= min(left_out)
        assert sum(kept) + min(left_out) > capacity


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 9)),
        min_size=1,
        max_size=9,
    )
)
def test_equal_rows_are_added(rows):
    question, value, weight = torch.tensor(rows).unbind(1)
    merged = fixed_rows.merge((question, value), (2, 2), [weight], 3)
    expected: dict = {}
    for q, v, n in rows:
        if q < 3:
            expected[q, v] = expected.get((q, v), 0) + n
    columns = (c.tolist() for c in (*merged.columns, *merged.totals))
    found = list(zip(*columns, strict=True))
    assert found[: len(expected)] == [
        (*k, expected[k]) for k in sorted(expected)
    ]
    assert found[len(expected) :] == [(3, 0, 0)] * (len(rows) - len(expected))
