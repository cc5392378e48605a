"""An item of stacked trees is the tree that was stacked there."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from funcppo.core import stacked, tree
from tests.learning import assert_trees_equal
from tests.runtime.test_capture import Pair


def pair(i: int) -> Pair:
    return Pair(torch.tensor(float(i)), torch.tensor([i, -i]))


@given(n=st.integers(1, 5), index=st.integers(0, 4))
def test_items_are_the_trees_that_were_stacked(n, index):
    trees = tree.map(
        lambda *leaves: torch.stack(leaves), *[pair(i) for i in range(n)]
    )
    assert stacked.length(trees) == n
    assert_trees_equal(
        stacked.item(trees, index % n), pair(index % n), rtol=0, atol=0
    )
    assert stacked.item(trees, 0).b.data_ptr() == trees.b.data_ptr()
