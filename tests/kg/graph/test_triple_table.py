"""Tables of triples: numbers of names, the order of first occurrence, and what is dropped as repeated."""

from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.graph import triples
from funcppo.kg.graph.triples import (
    NameTable,
    drop_duplicates,
    order_of_occurrence,
)

NUMBERS = st.integers(0, 5)


def test_names_are_numbered_as_they_come():
    table = NameTable()
    assert table.number(["b", "a", "b"]).tolist() == [0, 1, 0]
    rows = table.number_triples([("a", "r", "b"), ("c", "r", "a")])
    assert rows.tolist() == [[1, 2, 0], [3, 2, 1]]
    assert (table.names(), len(table)) == (["b", "a", "r", "c"], 4)
    assert table.number_triples([]).shape == (0, 3)


@given(st.lists(NUMBERS))
def test_the_order_of_occurrence_is_that_of_a_dictionary(numbers):
    with patch.object(triples, "_BLOCK_ROWS", 3):
        order = order_of_occurrence(np.array(numbers, np.int32), 6)
    assert order.tolist() == list(dict.fromkeys(numbers))


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS)), st.booleans())
def test_rows_that_repeat_another_are_dropped(rows, has_large_numbers):
    """A code of three numbers near 2^31 needs more than 64 bits."""
    if has_large_numbers:
        rows = [tuple(2**31 - 1 - number for number in row) for row in rows]
    table = np.array(rows, np.int32).reshape(-1, 3)
    distinct = [tuple(row) for row in drop_duplicates(table).tolist()]
    assert distinct == list(dict.fromkeys(rows))
