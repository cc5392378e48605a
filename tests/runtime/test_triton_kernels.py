"""The kernels of two hidden layers: their code run on numpy, equal to PyTorch's; on a GPU the kernels themselves."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from funcppo import runtime
from funcppo.core import tree
from funcppo.nets import cells, fused_mlp
from tests.nets.test_fused_mlp import by_autograd, draw, make_layers
from tests.runtime.env_kernel import numpy_triton

SOURCE = Path(runtime.__file__).with_name("triton_kernels.py")
SIZES = [
    (1, (8, 6), 1),
    (5, (33, 64), 3),
    (17, (64, 32), 16),
    (64, (64, 64), 2),
    (65, (16, 8), 3),
    (300, (64, 33), 2),
]


@pytest.fixture
def on_numpy(monkeypatch):
    """The kernels run on numpy."""
    source = SOURCE.read_text()
    kernels = SimpleNamespace(
        **{
            name: numpy_triton.Kernel(source, name)
            for name in (
                *("forward_kernel", "backward_kernel"),
                *("memories_kernel", "adjoints_kernel"),
            )
        },
        shared_memory=lambda _: 232_448,  # of an H100
    )
    monkeypatch.setattr(runtime, "triton_kernels", kernels, raising=False)
    monkeypatch.setattr(
        torch, "get_float32_matmul_precision", lambda: "highest"
    )


def problem(n_learners, n_rows, sizes, device="cpu"):
    """Params in float32, rows, and the gradient of the heads."""
    n_obs, hidden, n_outputs = sizes
    params = make_layers(
        n_learners, n_obs, hidden, n_outputs, torch.float32, device
    )
    learners = (n_learners,) if n_learners > 1 else ()
    x = draw(0, *learners, n_rows, n_obs, like=params)
    of_heads = draw(1, *learners, 2, n_rows, n_outputs, like=params)
    return params, x, of_heads


def expected_of(params, x, of_heads, activation):
    """The outputs of the heads and the gradient as a vector, in float64."""
    params, x, of_heads = tree.map(lambda v: v.double(), (params, x, of_heads))

    def of_one(params, x, of_heads):
        heads, gradient = by_autograd(params, x, of_heads, activation)
        return heads, tree.ravel(gradient)

    if x.ndim == 3:
        return torch.vmap(of_one)(params, x, of_heads)
    return of_one(params, x, of_heads)


def assert_equals_pytorch(problem, settings, tolerance):
    params, x, of_heads = problem
    leaves = tree.leaves(params)
    heads, y1, y2 = fused_mlp._forward_on_gpu(x, leaves, *settings)
    sums = fused_mlp._backward_on_gpu(
        of_heads, x, y1, y2, leaves[2], leaves[4], *settings
    )
    expected = expected_of(*problem, settings[0])
    for got, want in zip((heads, sums.sum(-2)), expected):
        error = (got - want).norm() / want.norm()
        assert error < tolerance, error

    # Of the first rows of some tiles; a tile has 64 rows at most.
    is_needed = torch.arange(x.shape[-2], device=x.device) % 200 < 3
    is_needed = is_needed.expand(x.shape[:-1])
    got = fused_mlp._values_on_gpu(x, is_needed, leaves, *settings)
    want = torch.where(is_needed, expected[0][..., 1, :, 0], 0.0)
    assert (got == 0).equal(~is_needed)
    # By all heads of these rows: a value alone may be near 0, as a sum of large terms.
    heads = expected[0] * is_needed[..., None, :, None]
    assert (got - want).norm() / heads.norm() < tolerance


@pytest.mark.usefixtures("on_numpy")
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("sizes", [*SIZES[:3], *SIZES[4:]])
@pytest.mark.parametrize(("n_learners", "n_rows"), [(1, 1), (1, 70), (3, 45)])
def test_the_code_of_the_kernels_equals_pytorch(
    n_learners, n_rows, sizes, activation
):
    assert_equals_pytorch(
        problem(n_learners, n_rows, sizes), (activation, False), 1e-5
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("sizes", "activation"),
    list(zip(SIZES, ("relu", "tanh", "relu", "tanh", "tanh", "tanh"))),
)
@pytest.mark.parametrize(
    ("n_learners", "n_rows"),
    [(1, 1), (1, 100), (1, 4097), (1, 65536), (3, 45), (300, 128)],
)
def test_the_kernels_equal_pytorch_on_a_gpu(
    n_learners, n_rows, sizes, activation
):
    # A relu near 0 may be on or off.
    tolerance = 2e-6 if activation == "tanh" else 1e-3
    args = problem(n_learners, n_rows, sizes, "cuda")
    assert_equals_pytorch(args, (activation, False), tolerance)
    assert_equals_pytorch(args, (activation, True), 0.05)
    torch.set_float32_matmul_precision("high")
    try:
        assert_equals_pytorch(args, (activation, False), 0.02)
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_kernels_give_the_same_bits_again():
    params, x, of_heads = problem(1, 65536, SIZES[-1], "cuda")
    settings = ("tanh", False)

    def gradient():
        outputs = fused_mlp.mlp_outputs(params, x, settings)
        return tree.ravel(
            fused_mlp.mlp_gradient(params, x, outputs, of_heads, settings)
        )

    first = gradient()
    assert all(torch.equal(first, gradient()) for _ in range(5))


@pytest.mark.parametrize("n_kinds", [1, 2], ids=["gru", "lstm"])
def test_the_loops_of_recurrent_cells_equal_autograd(
    n_kinds, on_numpy, monkeypatch
):
    """Of 18 rows in two programs, with a number of units that is padded; episodes end at random. 1e-5."""
    given = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=given)
    n_gates = (2 + n_kinds) * 9
    x, done = normal(4, 18, n_gates), normal(4, 18) > 1
    weight, bias = normal(9, n_gates) / 3, normal(n_gates)
    memory, grads = normal(n_kinds, 18, 9), normal(n_kinds, 4, 18, 9)
    recurrent = cells.Dense(weight, bias)
    steps = [memory.requires_grad_()]
    for inputs, is_last in zip(x, done):
        given = cells._as_memory(steps[-1])
        after = torch.stack(cells.cell_step(recurrent, inputs, given))
        steps.append(after.masked_fill(is_last[:, None], 0.0))
    before = torch.stack(steps[:-1], 1)
    of_later = torch.autograd.grad((before * grads).sum(), steps[1:-1])
    expected = torch.stack([*of_later, torch.zeros_like(memory)], 1)
    before, memory = before.detach(), memory.detach()
    args = recurrent, x, done
    assert done.any() and expected.any()
    close = {"rtol": 0, "atol": 1e-5}
    for _ in range(2):  # by PyTorch, and by the kernels
        found = cells.memories(*args, cells._as_memory(memory))
        torch.testing.assert_close(torch.stack(found), before, **close)
        found = cells.adjoints(*args, cells._as_memory(before), [*grads])
        torch.testing.assert_close(torch.stack(found), expected, **close)
        monkeypatch.setattr(cells, "_memories", cells._memories_on_gpu)
        monkeypatch.setattr(cells, "_adjoints", cells._adjoints_on_gpu)
