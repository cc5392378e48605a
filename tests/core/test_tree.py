"""Trees: leaves, paths, selection, loops and stacked trees."""

from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch

from funcppo.core import tree
from funcppo.core.tree import graph_scan, scan
from funcppo.nets.networks import Dense
from funcppo.rollout import EpisodeStats
from tests.learning import assert_trees_equal


def params() -> tuple[Dense, torch.Tensor]:
    weight = torch.arange(6.0).view(2, 3)
    return Dense(weight, torch.arange(3.0) + 6), torch.tensor(9.0)


def test_ravel_by_hand_and_unravel_undoes_it():
    flat = tree.ravel(params())
    assert flat.tolist() == list(range(10))
    back = tree.unravel(params(), flat)
    assert tree.paths(back) == tree.paths(params())
    assert all(
        torch.equal(a, b) and a.shape == b.shape
        for a, b in zip(tree.leaves(back), tree.leaves(params()))
    )


@tree.register_dataclass
@dataclass
class Pair:
    """A dataclass that is a tree."""

    a: torch.Tensor
    b: Dense


def test_a_registered_dataclass_is_a_tree_for_optree_and_for_pytorch():
    pair = Pair(torch.ones(2), params()[0])
    tree.check_tree(pair, "pair")
    assert tree.paths(pair) == ["a", "b.weight", "b.bias"]
    doubled = tree.map(lambda x: 2 * x, pair)
    assert isinstance(doubled, Pair) and doubled.a.tolist() == [2, 2]
    grads = torch.func.grad(lambda p: (p.a**2).sum() + p.b.weight.sum())(pair)
    assert grads.a.tolist() == [2, 2]
    assert grads.b.weight.tolist() == [[1, 1, 1]] * 2


def test_only_a_dataclass_is_registered():
    with pytest.raises(TypeError, match="expected a dataclass, got int"):
        tree.register_dataclass(int)


@pytest.mark.parametrize(
    "good", [params(), torch.ones(1), [torch.ones(1)], (torch.ones(1), ())]
)
def test_trees_of_tensors_pass(good):
    tree.check_tree(good, "it")


@pytest.mark.parametrize(
    ("bad", "got"),
    [
        ({"a": torch.ones(1)}, "got dict"),
        (OrderedDict(a=torch.ones(1)), "got OrderedDict"),
        ((torch.ones(1), {"a": torch.ones(1)}), r"got dict at \[1\]"),
        ((torch.ones(1), None), r"got NoneType at \[1\]"),
        (Dense(torch.ones(1), 1.0), r"got float at \.bias"),
        ("text", "got str"),
    ],
)
def test_another_value_is_refused_with_its_place(bad, got):
    problem = rf"^it: expected a tensor, or a NamedTuple, tuple or list of such.*, {got}$"
    with pytest.raises(TypeError, match=problem):
        tree.check_tree(bad, "it")


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (
            Dense(torch.ones(1), torch.ones(1, dtype=torch.float64)),
            "expected torch.float32 in every tensor, got torch.float64 at bias",
        ),
        (torch.ones(1, dtype=torch.int64), "expected torch.float32 in every tensor, got torch.int64"),
        ((), "expected a tensor, got an empty tree"),
    ],
)  # fmt: skip
def test_dtypes_that_raveling_would_promote_are_refused(bad, problem):
    with pytest.raises(TypeError, match=f"^it: {problem}$"):
        tree.check_common_dtype(bad, "it")


def test_scan_by_hand():
    carry, ys = scan(
        lambda c, x: (c + x, c * x), torch.tensor(1), torch.tensor([2, 3, 4])
    )
    assert int(carry) == 10 and ys.tolist() == [2, 9, 24]


def test_a_scan_in_a_graph_equals_the_loop():
    """A running sum and product of 1 to 5, the carry a NamedTuple."""

    def step(carry, x):
        stats = EpisodeStats(carry.total_reward + x, carry.length * x.long())
        return stats, carry.total_reward

    start = EpisodeStats(torch.zeros(2), torch.ones(2, dtype=torch.int64))
    xs = torch.arange(1.0, 6.0)
    run = lambda: graph_scan(step, start, xs)
    got = torch.compile(run, fullgraph=True, backend="eager")()
    assert_trees_equal(got, scan(step, start, xs), rtol=0, atol=0)
