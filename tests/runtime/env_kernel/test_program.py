"""Programs of rows: every operator, run on numpy, computes what PyTorch does; what mixes rows is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from funcppo.core import random
from funcppo.runtime.env_kernel.writer import UnsupportedError
from tests.runtime.env_kernel.kernels import run

ROWS = 6
NUMBERS = 3
WEIGHTS = torch.linspace(-1, 1, NUMBERS * 4).view(NUMBERS, 4)
WIDE = torch.linspace(-1, 1, NUMBERS * 17).view(NUMBERS, 17).sin()
HIDDEN = torch.linspace(-2, 3, 17 * 20).view(17, 20).cos()


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "views": lambda x: x.unsqueeze(1).expand(-1, 2, -1).reshape(-1, 6)[:, 1::2],
    "transposed": lambda x: x.T[1:].T.contiguous(),
    "stacked": lambda x: torch.stack([x, x + 1], -1).flatten(1),
    "joined": lambda x: torch.cat([x[:, :1], 2 * x], 1),
    "selected": lambda x: x[:, -1] - x[:, 0],
    "of a row in two": lambda x: x.reshape(-1).view(len(x), 3) * 2,
    "where": lambda x: torch.where(x > 0, x, 5.0),
    "bools": lambda x: ((x > 0) & ~(x < 1)) | (x == x),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp of NaN": lambda x: (x / 0 * 0).clamp_min(1),
    "remainder": lambda x: torch.remainder(x, -0.7),
    "integers": lambda x: (x * 10).to(torch.int64) % 7 + (1 << 40),
    "powers": lambda x: x**2 + x**3,
    "functions": lambda x: torch.exp(x).log1p().sqrt() + x.sin() * x.cos(),
    "one-hot": lambda x: torch.nn.functional.one_hot(
        (x * 10).to(torch.int64).abs() % 4, 4
    ).float(),
    "erfinv": lambda x: torch.erfinv(x.tanh() * 0.9),
    "rounding": lambda x: x.floor() - x.ceil(),
    "maximum": lambda x: torch.maximum(x, -x) + torch.minimum(x, 0 * x),
    "relu": lambda x: torch.relu(x),
    "sum": lambda x: x.sum(-1),
    "sum, kept": lambda x: x / x.abs().sum(1, keepdim=True),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "argmax": lambda x: x.argmax(-1),
    "argmax, kept": lambda x: x.argmax(1, keepdim=True),
    "argmax of NaN": lambda x: torch.where(x > 0, torch.nan, x).argmax(-1),
    "gather": lambda x: x.gather(-1, x.argmax(-1, keepdim=True)).squeeze(-1),
    "constants": lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
    "full": lambda x: torch.zeros_like(x) + torch.ones(3) * x,
    "casts": lambda x: (x > 0).to(torch.float32) + x.to(torch.float64).float(),
    "random numbers": lambda x: (
        random.uniform(random.key(7), (len(x), 3)) + 0 * x
    ),
}


def rows(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, NUMBERS, generator=generator)


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_computes_what_pytorch_does(name: str) -> None:
    x = rows()
    expected = OPERATORS[name](x)
    actual = run(OPERATORS[name], x)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, equal_nan=True)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, narrow, wide, hidden: x @ narrow,
        lambda x, narrow, wide, hidden: (x @ wide).tanh() @ wide.T,
        lambda x, narrow, wide, hidden: (
            torch.relu((x @ wide) @ hidden) @ hidden.T[:, :2]
        ),
        lambda x, narrow, wide, hidden: ((x @ wide) * x[:, :1]) @ wide[:2].T,
        lambda x, narrow, wide, hidden: (x @ wide + wide[0]) @ wide[:2].T,
    ],
    ids=["narrow", "wide", "two layers", "times a column", "bias"],
)
def test_matrix_products_with_what_rows_share(
    fn: Callable[..., Tensor],
) -> None:
    shared = (WEIGHTS, WIDE, HIDDEN)
    actual = run(fn, rows(1), *shared)
    expected = fn(rows(1), *shared)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, narrow, wide, hidden: half(x) @ half(narrow),
        lambda x, narrow, wide, hidden: (
            half(torch.relu((half(x) @ half(wide)).float()))
            @ half(hidden[:, :2])
        ),
        lambda x, narrow, wide, hidden: (
            half(x) @ half(wide) @ half(hidden) @ half(hidden.T[:, :3])
        ),
    ],
    ids=["narrow", "two layers", "three layers"],
)
def test_matrix_products_in_bfloat16(fn: Callable[..., Tensor]) -> None:
    """Of rounded numbers, summed as float32, and rounded again."""
    shared = (WEIGHTS, WIDE, HIDDEN)
    float_of = lambda *x: fn(*x).float()
    actual = run(float_of, rows(1), *shared)
    expected = float_of(rows(1), *shared)
    # Sums in another order are rarely rounded to another number.
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)
    assert (actual == expected).double().mean() > 0.95
    assert torch.equal(actual, actual.bfloat16().float())


def half(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16)


def test_params_in_bfloat16_and_beside_it_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="read both in bfloat16 and in"):
        run(
            lambda x, narrow: (half(x) @ half(narrow)).float() + narrow[0],
            rows(),
            WEIGHTS,
        )


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: x.sum(0), "over the rows"),
        (lambda x: x[0], "some of the rows"),
        (lambda x: x[:2], "some of the rows"),
        (
            lambda x: x + x.mean(),
            "operator aten.mean|several axes|over the rows",
        ),
        (lambda x: x @ x.T, "matrix product"),
        (lambda x: torch.cat([x, x]), "along their rows"),
        (lambda x: x.cumsum(0), "over the rows"),
        (lambda x: x.cumprod(1), "operator aten.cumprod"),
        (lambda x: x**0.5, "a power of 0.5"),
        (lambda x: x.to(torch.float16), "float16"),
        (lambda x: x * x[:, 0].amax(0).item(), "over the rows|item|scalar"),
        (lambda x: x if x[0, 0] > 0 else -x, "it cannot be traced: "),
    ],
)
def test_what_no_program_of_rows_can_do_is_refused(
    fn: Callable[[Tensor], Tensor], reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        run(fn, rows())


def cells(x: Tensor) -> Tensor:
    """Maps of 12 x 10 cells, of which one is marked if it is there."""
    y, z = (x * 10).to(torch.int64)[:, :2].unsqueeze(-1).unbind(1)
    is_row, is_column = y == torch.arange(-2, 10), z == torch.arange(4, 14)
    return (is_row.unsqueeze(-1) & is_column.unsqueeze(-2)).float()


def test_maps_of_cells_whose_numbers_begin_anywhere() -> None:
    x = torch.linspace(-0.5, 1.4, ROWS * NUMBERS).view(ROWS, NUMBERS)
    expected = cells(x)
    assert 0 < expected.sum() < ROWS
    torch.testing.assert_close(run(cells, x), expected)
