"""Distinct cells: the same groups as a dictionary of their bytes finds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.graph import text as cells
from funcppo.kg.graph.text import Cells, find_distinct

PARTS = st.one_of(
    st.binary(max_size=3),
    st.sampled_from([b"a" * n for n in (7, 8, 9, 15, 16, 17, 300)]),
    st.binary(min_size=8, max_size=8).map(lambda word: b"12345678" + word),
)


def check(parts: list[bytes]) -> None:
    content = b"\t".join(parts)
    length = np.array([len(part) for part in parts], np.int64)
    start = np.cumsum(length + 1) - length - 1
    chosen, inverse = find_distinct(content, Cells(start, length))
    assert [parts[i] for i in chosen[inverse]] == parts
    assert len(chosen) == len(set(parts))


@given(st.lists(PARTS, min_size=1, max_size=40))
def test_cells_are_grouped_by_their_content(parts):
    check(parts)


@pytest.mark.parametrize("n_slots_shared", [1, 5])
def test_contents_that_share_a_slot_are_told_apart(monkeypatch, n_slots_shared):
    """A hash of few values, as the worst that can be."""
    hash_cells = cells._hash_cells

    def few_hashes(words, part):
        return hash_cells(words, part) % np.uint64(n_slots_shared)

    monkeypatch.setattr(cells, "_hash_cells", few_hashes)
    check([b"%d" % (i % 50) for i in range(200)])


def test_cells_of_several_blocks(monkeypatch):
    monkeypatch.setattr(cells, "_BLOCK_CELLS", 3)
    check([b"name %d" % (i * i % 23) for i in range(100)])
