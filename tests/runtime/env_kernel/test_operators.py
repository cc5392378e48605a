"""Operators run on numpy compute what PyTorch does, on few numbers a row and on tiles; what cannot be is refused."""

import pytest
import torch

from funcppo.core import random
from funcppo.runtime.env_kernel import writer
from funcppo.runtime.env_kernel.rollout import (
    BEFORE_STEP,
    HEADER,
    INDENT,
    load_rows,
    store_rows,
    threefry_source,
    write_program,
)
from tests.runtime.env_kernel import numpy_triton


def run(fn, x, *shared):
    """A function of rows [ROWS, ...] and of what they share, by its program."""
    example = torch.ones(writer.TRACED_ROWS, *x.shape[1:], dtype=x.dtype)
    inputs = [
        writer.named_tensor("x", example),
        *(writer.memory_tensor(f"p{i}", y) for i, y in enumerate(shared)),
    ]
    program = write_program(
        lambda *args: [fn(*args)], [example, *shared], inputs
    )
    like = fn(x, *shared)
    lines = [
        "t, n_learners, n_rows = 0, 1, 0",
        "place = (tl.program_id(0) * R).to(tl.int64)",
        "places = place + tl.arange(0, R)",
        "rows = places",
        f"mask = rows < {len(x)}",
        *program.preamble,
        *load_rows("x", x),
        *program.body,
        *store_rows("y_ptr", program.outputs[0], BEFORE_STEP),
    ]
    shared_names = [f"p{i}" for i in range(len(shared))]
    names = ", ".join(["x_ptr", "y_ptr", *shared_names, "R"])
    source = (
        f"{HEADER}{threefry_source()}def kernel({names}):\n{INDENT}"
        + f"\n{INDENT}".join(lines)
    )
    y = torch.empty(like.shape, dtype=like.dtype)
    in_memory = (
        y.bfloat16().float() if f"p{i}" in program.rounded else y
        for i, y in enumerate(shared)
    )
    memory = map(numpy_triton.pointer, (x, y, *in_memory))
    numpy_triton.run(source, "kernel", (-(-len(x) // 8),), *memory, R=8)
    return y


N_ROWS = 6
NUMBERS = 3
WEIGHTS = torch.linspace(-1, 1, NUMBERS * 4).view(NUMBERS, 4)
WIDE = torch.linspace(-1, 1, NUMBERS * 17).view(NUMBERS, 17).sin()
HIDDEN = torch.linspace(-2, 3, 17 * 20).view(17, 20).cos()


ROW_OPERATORS = {
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


def rows(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N_ROWS, NUMBERS, generator=generator)


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
def test_matrix_products_with_shared_ones(fn):
    shared = (WEIGHTS, WIDE, HIDDEN)
    actual = run(fn, rows(1), *shared)
    expected = fn(rows(1), *shared)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: x.sum(0), "over the rows"),
        (lambda x: x[0], "some of the rows"),
        (lambda x: x[:2], "some of the rows"),
        (lambda x: x + x.mean(), "aten.mean|several axes|over the rows"),
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
def test_what_no_program_of_rows_can_do_is_refused(fn, reason):
    with pytest.raises(writer.UnsupportedError, match=reason):
        run(fn, rows())


def cells(x):
    """Maps of 12 x 10 cells, of which one is marked if it is there."""
    y, z = (x * 10).to(torch.int64)[:, :2].unsqueeze(-1).unbind(1)
    is_row, is_column = y == torch.arange(-2, 10), z == torch.arange(4, 14)
    return (is_row.unsqueeze(-1) & is_column.unsqueeze(-2)).float()


def test_maps_of_cells_whose_numbers_begin_anywhere():
    x = torch.linspace(-0.5, 1.4, N_ROWS * NUMBERS).view(N_ROWS, NUMBERS)
    expected = cells(x)
    assert 0 < expected.sum() < N_ROWS
    torch.testing.assert_close(run(cells, x), expected)


ROWS = 5
SIZE = (
    11  # of a side, so that a row has more numbers than have an expression each
)
CELLS = torch.arange(SIZE)


def grids(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, SIZE, SIZE, generator=generator)


def at(x, column):
    """Maps that are true where a number of each row says."""
    y = (x[:, 0, column] * 3 + 5).to(torch.int64)
    is_row = (y[:, None] == CELLS)[:, :, None]
    return is_row & (y[:, None] + 1 == CELLS)[:, None]


OPERATORS = {
    "numbers": lambda x: x * 2 + 1,
    "a row of each": lambda x: x + x[:, :1],
    "a column of each": lambda x: x * x[:, :, 2:3],
    "one number of each": lambda x: x - x[:, 3, 4].view(-1, 1, 1),
    "flattened": lambda x: x.flatten(1) + 1,
    "transposed": lambda x: x.transpose(1, 2) + x,
    "flipped": lambda x: x.flip(1) - x.flip((1, 2)),
    "a part": lambda x: x[:, 1:10] + 1,
    "every other": lambda x: x[:, ::2, 1:] * 2,
    "a view": lambda x: x[:, 2:, :].transpose(1, 2),
    "rolled": lambda x: torch.roll(x, 3, 2),
    "rolled twice": lambda x: torch.roll(x, (1, -2), (1, 2)) + x,
    "one of a stack": lambda x: torch.stack([x, -x], -1)[..., 1],
    "stacked": lambda x: torch.stack([x, x > 0, -x], -1),
    "stacked and flattened": lambda x: torch.stack([x, -x], -1).flatten(1) + 1,
    "stacked first": lambda x: torch.stack([x, 2 * x, 3 * x], 1),
    "mixed": lambda x: torch.stack([x, -x], 2).flatten(1, 2),
    "mixed, and more": lambda x: (
        torch.stack([x, -x], 2).flatten(1, 2) + x[:, :1]
    ),
    "joined": lambda x: torch.cat([x, x[:, :2]], 1),
    "joined at the end": lambda x: torch.cat([x, x], 2),
    "flat, beside few": lambda x: torch.cat([x.flatten(1), x[:, 0, :2]], 1),
    "few beside them, flat": lambda x: torch.cat(
        [x[:, 0, :3], x.flatten(1), x[:, :1, 0]], 1
    ),
    "joined with few": lambda x: torch.cat([x[:, :, :1], x], 2),
    "shifted": lambda x: torch.cat([x[:, 1:], 0 * x[:, :1]], 1),
    "where": lambda x: torch.where(x > 0, x, x.flip(1)),
    "bools": lambda x: (x > 0) & ~(x > 1) | (x < -1),
    "sum": lambda x: x.flatten(1).sum(1),
    "sum of rows": lambda x: x.sum(2),
    "sum of columns, kept": lambda x: x.sum(1, keepdim=True) + x,
    "any": lambda x: (x > 2).flatten(1).any(1),
    "sums of a tile without padding": lambda x: (
        x.flatten(1)[:, :64].reshape(-1, 8, 8).sum(2)
        + x.flatten(1)[:, :64].sum(1, keepdim=True)
    ),
    "any of rows": lambda x: (x > 1).any(1),
    "largest": lambda x: x.amax(2) - x.flatten(1).amin(1, keepdim=True),
    "maps": lambda x: at(x, 0),
    "maps over each other": lambda x: (at(x, 1) | at(x, 2)).to(torch.float32),
    "any of a map": lambda x: (at(x, 1) & (x > 0)).flatten(1).any(1),
    "constants": lambda x: (
        x + (CELLS < 4).view(1, SIZE, 1).expand(1, SIZE, SIZE)
    ),
    "full": lambda x: torch.zeros_like(x) + torch.ones(SIZE) * x,
    "of no row": lambda x: torch.full((len(x), SIZE, SIZE), 2.0),
    "a quotient": lambda x: (x / (x - x)).isnan().flatten(1).sum(1),
    "integers": lambda x: (x * 10).to(torch.int64) & 6,
    "several maps": lambda x: (
        (x[:, :, :3].transpose(1, 2) > 0).unsqueeze(-1) & (x > 0).unsqueeze(1)
    ).any(1),
}


INTEGERS = {
    "sign": lambda x: x.sign(),
    "remainder as of C": lambda x: torch.fmod(x, 3),
    "remainder": lambda x: torch.remainder(x, 3),
    "quotient": lambda x: x // 3,
    "running sums": lambda x: x.cumsum(1),
    "least": lambda x: x.argmin(1),
    "chosen": lambda x: x.index_select(1, torch.tensor([2, 0, 0])),
    "flipped": lambda x: x.flip(1),
    "largest": lambda x: x.amax(1) - x.amin(1),
    "running sums of bools": lambda x: (x > 0).cumsum(1),
}


FEW = torch.tensor([[-7, 5, 0], [3, -3, 8], [-1, -1, 4]])
ON = {
    f"{name} of {kind}": (fn, x)
    for kind, operators, x in (
        ("rows", ROW_OPERATORS, rows()),
        ("tiles", OPERATORS, grids()),
        ("integers", INTEGERS, FEW),
    )
    for name, fn in operators.items()
}


@pytest.mark.parametrize("name", ON)
def test_an_operator_computes_what_pytorch_does(name):
    fn, x = ON[name]
    actual, expected = run(fn, x), fn(x)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, equal_nan=True)


def weights(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) / 10


PRODUCTS = {
    "wide": lambda x, wide, many, few: x.flatten(1) @ wide,
    "narrow": lambda x, wide, many, few: x.flatten(1) @ few,
    "two layers": lambda x, wide, many, few: (
        (x.flatten(1) @ wide).tanh() @ wide[:20]
    ),
    "channels": lambda x, wide, many, few: (
        torch.stack([x, -x, x > 0], -1).flatten(1) @ many
    ),
    "narrow, of channels": lambda x, wide, many, few: (
        torch.stack([x, x > 0], -1).flatten(1) @ many[:242, :2]
    ),
    "a part": lambda x, wide, many, few: x[:, 2:].flatten(1) @ wide[:99],
    "a quotient": lambda x, wide, many, few: (
        (x / (1 + x * x)).flatten(1) @ wide
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_tiles_with_what_rows_share(name):
    n = SIZE * SIZE
    shared = (weights(0, n, 20), weights(1, 3 * n, 33), weights(2, n, 3))
    actual = run(PRODUCTS[name], grids(1), *shared)
    expected = PRODUCTS[name](grids(1), *shared)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_indices_in_memory_are_refused():
    with pytest.raises(writer.UnsupportedError, match="indices in memory"):
        run(lambda x, i: x.index_select(1, i), grids(), torch.tensor([1, 0]))


def table(*shape):
    return torch.arange(torch.Size(shape).numel()).view(shape)


MOVES = torch.tensor([[-1, 0], [1, 0], [0, -1], [0, 1]])
LOOK_UPS = {
    "a number": lambda x, t: t[:, 0, 0][x[:, 0]],
    "some numbers": lambda x, t: t[x[:, 0]][:, 1, :4],
    "many numbers": lambda x, t: t[x[:, 0]] * 2,
    "many numbers, flat": lambda x, t: t[x[:, 0]].flatten(1).sum(1),
    "two indices": lambda x, t: t[x[:, 0], x[:, 1]],
    "three indices": lambda x, t: t[x[:, 0], x[:, 1], x[:, 2]],
    "several for each row": lambda x, t: t[:, :, 0][x[:, :2], x[:, 1:2]],
    "one index for all": lambda x, t: t[x[:, 0], 2],
    "turned": lambda x, t: t.transpose(0, 1)[x[:, 1]][:, 2],
    "bools": lambda x, t: t[x[:, 0], 1],
    "of constants": lambda x, t: MOVES[x[:, 1]],
    "one row of constants": lambda x, t: MOVES[:1][x[:, 1] * 0],
    "constant indices": lambda x, t: x[:, torch.tensor([2, 0])],
    "constant indices before the rows": lambda x, t: x.t()[
        torch.tensor([[1, 0], [0, 2]])
    ].permute(2, 0, 1),
    "a constant index of a table": lambda x, t: (
        t[torch.tensor([3, 1])][:, 2, 3].sum(0) + x
    ),
}


@pytest.mark.parametrize("name", LOOK_UPS)
def test_numbers_by_indices(name):
    """Indices of a row may be negative, where they count from the end."""
    x = torch.tensor([[0, 1, 2], [5, 0, -1], [-6, -1, 10], [3, 3, -11]])
    t = table(6, 4, SIZE)
    t = t > 50 if name == "bools" else t
    fn = LOOK_UPS[name]
    expected = fn(x, t)
    actual = run(fn, x, t)
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("fn", "x"),
    [
        (lambda x, t: t[x[:, 0]], [[6, 0]]),
        (lambda x, t: t[x[:, 0]], [[-7, 0]]),
        (lambda x, t: t[x[:, 0], x[:, 1]], [[0, 4]]),
        (lambda x, t: MOVES[x[:, 0]], [[4, 0]]),
    ],
)
def test_an_index_out_of_bounds_is_an_error(fn, x):
    """As in PyTorch, which cannot be asked for the shape of the result then."""
    within = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(AssertionError, match="index out of bounds"):
        run(
            lambda rows, t: fn(rows, t) if len(rows) > 1 else fn(within, t),
            torch.tensor(x),
            table(6, 4),
        )
