"""Loops of recurrent cells, by PyTorch and by kernels, beside steps of a cell; test_recurrent.py has those of torch."""

import pytest
import torch

from funcppo.nets import cells
from funcppo.nets.cells import Dense, GRUMemory, LSTMMemory

KINDS = [GRUMemory, LSTMMemory]


def drawn(kind, n_steps, n_rows, n_units):
    """Arguments of the loops in float64, where episodes end at random, and gradients of the memories."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    n_kinds = len(kind._fields)
    n_gates = (2 + n_kinds) * n_units
    recurrent = Dense(normal(n_units, n_gates) / n_units, normal(n_gates))
    x, done = normal(n_steps, n_rows, n_gates), normal(n_steps, n_rows) > 1
    memory = kind(*normal(n_kinds, n_rows, n_units))
    return recurrent, x, done, memory, normal(n_kinds, n_steps, n_rows, n_units)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loops_equal_steps_of_a_cell_and_their_gradient(kind):
    """The gradient in zeros that are added to the memory after each step, by autograd. 1e-12."""
    recurrent, x, done, memory, grads = drawn(kind, 7, 5, 6)
    given = memory
    before, added, loss = [], [], torch.zeros(())
    for t in range(7):
        before.append(torch.stack(memory))
        loss = loss + (before[t] * grads[:, t]).sum()
        memory = cells.cell_step(recurrent, x[t], memory)
        zero = torch.zeros(before[t].shape, dtype=x.dtype, requires_grad=True)
        kept = torch.stack(memory).masked_fill(done[t][:, None], 0.0)
        memory = kind(*(kept + zero))
        added.append(zero)
    want = torch.autograd.grad(
        loss, added, allow_unused=True, materialize_grads=True
    )
    found = cells.memories(recurrent, x, done, given)
    after = cells.adjoints(recurrent, x, done, found, [*grads])
    close = {"rtol": 0, "atol": 1e-12}
    assert done.any() and want[0].any()
    torch.testing.assert_close(
        torch.stack(found), torch.stack(before, 1).detach(), **close
    )
    torch.testing.assert_close(
        torch.stack(after), torch.stack(want, 1), **close
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (7, 5, 8), (64, 70, 33), (9, 16, 64), (3, 4, 65)]
)
def test_on_a_gpu_they_equal_the_loops_by_torch(kind, shape):
    """Those in float64; 2e-5 of numbers near 1."""
    recurrent, x, done, memory, grads = drawn(kind, *shape)
    before = cells.memories(recurrent, x, done, memory)
    after = cells.adjoints(recurrent, x, done, before, [*grads])

    on_gpu = lambda v: v.cuda() if v.dtype == torch.bool else v.float().cuda()
    recurrent, memory = (
        Dense(*map(on_gpu, recurrent)),
        kind(*map(on_gpu, memory)),
    )
    x, done, grads = map(on_gpu, (x, done, grads))
    found = cells.memories(recurrent, x, done, memory)
    close = {"rtol": 2e-5, "atol": 2e-5, "check_dtype": False}
    torch.testing.assert_close(
        torch.stack(found).cpu(), torch.stack(before), **close
    )
    found = cells.adjoints(recurrent, x, done, found, [*grads])
    torch.testing.assert_close(
        torch.stack(found).cpu(), torch.stack(after), **close
    )
