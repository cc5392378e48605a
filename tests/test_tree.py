"""Flat vectors and trees are two views of the same numbers."""

from __future__ import annotations

import torch

from funcppo import optim, tree
from funcppo.nets.base import Dense


def params() -> tuple[Dense, torch.Tensor]:
    return Dense(
        torch.arange(6.0).view(2, 3), torch.arange(3.0) + 6
    ), torch.tensor(9.0)


def test_ravel_by_hand_and_unravel_undoes_it():
    flat = tree.ravel(params())
    assert flat.tolist() == list(range(10))
    back = tree.unravel(params(), flat)
    assert tree.paths(back) == tree.paths(params())
    assert all(
        torch.equal(a, b) and a.shape == b.shape
        for a, b in zip(tree.leaves(back), tree.leaves(params()))
    )


def test_raveling_goes_with_vmap():
    many = tree.map(lambda x: torch.stack([x, x + 1]), params())
    flat = torch.vmap(tree.ravel)(many)
    assert torch.equal(flat[1], flat[0] + 1)
    assert torch.equal(
        tree.leaves(torch.vmap(tree.unravel)(many, flat))[0], many[0].weight
    )


def test_adam_over_a_flat_vector_is_adam_over_the_tree():
    grads = tree.map(torch.sin, params())
    want, _ = optim.update(
        optim.AdamConfig(), grads, optim.init(params()), params(), 0.1
    )
    flat = tree.ravel(params())
    got, _ = optim.update(
        optim.AdamConfig(), tree.ravel(grads), optim.init(flat), flat, 0.1
    )
    assert torch.equal(got, tree.ravel(want))
