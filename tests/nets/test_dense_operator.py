"""The operators of two hidden layers: the network of `feedforward`, its derivative by autograd, and `torch.vmap`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from funcppo.core import random, tree
from funcppo.nets import dense_operator, feedforward
from funcppo.nets.dense_operator import Settings

SETTINGS = (Settings("tanh", False), Settings("relu", False))


def make_layers(
    n_learners: int = 1,
    n_obs: int = 5,
    hidden: tuple[int, int] = (8, 6),
    n_outputs: int = 3,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> Any:
    """The params of some learners, all of a learner in one vector; of one, without an axis of learners."""
    cfg = feedforward.MLPConfig(n_obs=n_obs, n_actions=n_outputs, hidden=hidden)
    keys = random.split(random.key(3), n_learners)
    each = [feedforward.init(cfg, key) for key in keys]
    flat = torch.stack([tree.ravel(params) for params in each])
    noise = random.normal(random.key(4), flat.shape)
    flat = (flat + 0.1 * noise).to(device, dtype)
    if n_learners == 1:
        return tree.unravel(each[0], flat[0])
    return torch.vmap(lambda x: tree.unravel(each[0], x))(flat)


def draw(seed: int, *shape: int, like: Any) -> torch.Tensor:
    numbers = random.normal(random.key(seed), shape)
    return numbers.to(tree.leaves(like)[0])


def by_autograd(
    params: Any, x: torch.Tensor, of_heads: torch.Tensor, activation: str
) -> tuple[torch.Tensor, Any]:
    """The outputs of the heads, and the gradient of params."""

    def heads(params: Any) -> torch.Tensor:
        y = x.expand(2, *x.shape)
        for layer in params.hidden:
            y = feedforward.activate(activation, y @ layer.weight + layer.bias)
        return y @ params.heads.weight + params.heads.bias

    outputs, vjp = torch.func.vjp(heads, params)
    return outputs, vjp(of_heads)[0]


def assert_trees_close(got: Any, want: Any, **tolerance: float) -> None:
    assert tree.paths(got) == tree.paths(want)
    for a, b in zip(tree.leaves(got), tree.leaves(want)):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("settings", SETTINGS)
def test_layers_and_gradient_equal_autograd(settings: Settings) -> None:
    params = make_layers()
    x = draw(0, 7, 5, like=params)
    of_heads = draw(1, 2, 7, 3, like=params)
    outputs = dense_operator.apply(params, x, settings)
    gradient = dense_operator.gradient(params, x, outputs, of_heads, settings)
    heads, expected = by_autograd(params, x, of_heads, settings.activation)
    torch.testing.assert_close(outputs.heads, heads)
    assert_trees_close(gradient, expected)


def test_the_outputs_are_those_of_the_network() -> None:
    cfg = feedforward.MLPConfig(n_obs=5, n_actions=3, hidden=(8, 6))
    params = make_layers(dtype=torch.float32)
    x = draw(0, 7, 5, like=params)
    outputs = dense_operator.apply(params, x, Settings("tanh", False))
    expected = feedforward.apply(cfg, None, params, x)
    torch.testing.assert_close(outputs.heads[0], expected.logits)
    torch.testing.assert_close(outputs.heads[1, :, 0], expected.value)

    is_needed = torch.arange(7) % 3 == 0
    values = dense_operator.values(
        params, x, is_needed, Settings("tanh", False)
    )
    torch.testing.assert_close(
        values, torch.where(is_needed, expected.value, 0.0)
    )


def test_bfloat16_rounds_the_operands_of_products() -> None:
    cfg = feedforward.MLPConfig(
        n_obs=5, n_actions=3, hidden=(8, 6), matmul_dtype=torch.bfloat16
    )
    params = make_layers(dtype=torch.float32)
    x = draw(0, 7, 5, like=params)
    rounded = dense_operator.apply(params, x, Settings("tanh", True)).heads[0]
    exact = dense_operator.apply(params, x, Settings("tanh", False)).heads[0]
    assert torch.equal(rounded, feedforward.apply(cfg, None, params, x).logits)
    assert not torch.allclose(rounded, exact, rtol=1e-4)


@pytest.mark.parametrize("shares_rows", [False, True])
def test_vmap_computes_each_learner(shares_rows: bool) -> None:
    settings = SETTINGS[0]
    params = make_layers(n_learners=3)
    x = draw(0, 3, 7, 5, like=params)
    of_heads = draw(1, 3, 2, 7, 3, like=params)

    def all_three(params: Any, x: torch.Tensor, of_heads: torch.Tensor) -> Any:
        outputs = dense_operator.apply(params, x, settings)
        gradient = dense_operator.gradient(
            params, x, outputs, of_heads, settings
        )
        is_needed = of_heads[0, :, 0] > 0
        values = dense_operator.values(params, x, is_needed, settings)
        return outputs, gradient, values

    of_one = [
        all_three(
            tree.map(lambda v, i=i: v[i], params),
            x[0 if shares_rows else i],
            of_heads[i],
        )
        for i in range(3)
    ]
    in_dims = (0, None if shares_rows else 0, 0)
    rows = x[0] if shares_rows else x
    got = torch.vmap(all_three, in_dims=in_dims)(params, rows, of_heads)
    assert_trees_close(got, tree.map(lambda *v: torch.stack(v), *of_one))


@pytest.mark.parametrize("n_learners", [1, 3])
def test_shapes_without_numbers_are_those_of_results(n_learners: int) -> None:
    params = make_layers(n_learners)
    learners = (n_learners,) if n_learners > 1 else ()
    x = draw(0, *learners, 7, 5, like=params)
    of_heads = draw(1, *learners, 2, 7, 3, like=params)

    def results_of(
        leaves: list[torch.Tensor], x: Any, of_heads: Any
    ) -> list[Any]:
        forward = torch.ops.funcppo.dense_forward(x, leaves, "tanh", False)
        w2, w3 = leaves[2], leaves[4]
        return [
            *forward,
            torch.ops.funcppo.dense_backward(
                of_heads, x, *forward[1:], w2, w3, "tanh", False
            ),
            torch.ops.funcppo.dense_values(
                x, x[..., 0] > 0, leaves, "tanh", False
            ),
        ]

    leaves = [v.contiguous() for v in tree.leaves(params)]
    shapes = [(v.shape, v.dtype) for v in results_of(leaves, x, of_heads)]
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(v) for v in (*leaves, x, of_heads)]
        results = results_of(fake[:-2], *fake[-2:])
    assert [(v.shape, v.dtype) for v in results] == shapes


@pytest.mark.parametrize(
    ("n_learners", "n_rows", "expected"),
    [
        (1, 1, (32, 1)),
        (1, 128, (32, 4)),
        (1, 129, (32, 5)),
        (1, 65536, (512, 128)),
        (64, 128, (64, 2)),
        (1024, 128, (128, 1)),
        (1024, 1, (32, 1)),
    ],
)
def test_programs_cover_the_rows_of_every_learner(
    n_learners: int, n_rows: int, expected: tuple[int, int]
) -> None:
    x = torch.zeros(n_learners, n_rows, 1)
    n_rows_of_program, n_programs = dense_operator._backward_programs(x)
    assert (n_rows_of_program, n_programs) == expected
    assert (n_programs - 1) * n_rows_of_program < n_rows
    assert n_rows <= n_programs * n_rows_of_program


@pytest.mark.parametrize(
    ("n_obs", "expected"), [(64, (32, 32)), (65, (64, 16))]
)
def test_programs_have_more_rows_of_wide_observations(
    n_obs: int, expected: tuple[int, int]
) -> None:
    x = torch.zeros(1024, n_obs)
    assert dense_operator._backward_programs(x) == expected
