import itertools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from funcppo import optim
from funcppo.config import AdamConfig, Schedule
from funcppo.core import random, tree


class Params(NamedTuple):
    w: Tensor
    b: Tensor


def draw(key) -> Params:
    a, b = random.split(key)
    return Params(
        random.normal(a, (4, 3)).double(), random.normal(b, (3,)).double()
    )


BETAS = ((0.9, 0.999), (0.0, 0.5), (0.95, 0.99))
VALUES = (1e-4, 0.1), BETAS, (1e-8, 1e-3), (0.0, 0.1), (True, False)
GRID = list(itertools.product(*VALUES))


@pytest.mark.parametrize(("lr", "betas", "eps", "decay", "decoupled"), GRID)
def test_fifty_steps_equal_torch_adams(lr, betas, eps, decay, decoupled):
    """float64; the change of the weights agrees to 1e-10 of its size."""
    keys = random.split(random.key(0), 51)
    start = params = draw(keys[0])
    reference = [p.clone().requires_grad_() for p in params]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    adam = kind(reference, lr=lr, betas=betas, eps=eps, weight_decay=decay)
    decays = {"weight_decay": decay, "decoupled_weight_decay": decoupled}
    cfg = AdamConfig(b1=betas[0], b2=betas[1], eps=eps, **decays)
    state = optim.init(params)
    for key in keys[1:]:
        grads = draw(key)
        for p, g in zip(reference, grads):
            p.grad = g.clone()
        adam.step()
        params, state = optim.update(cfg, grads, state, params, lr)
    for p, q, s in zip(params, reference, start):
        torch.testing.assert_close(
            p - s, q.detach() - s, rtol=1e-10, atol=1e-13
        )


def test_bias_correction_does_not_drift_in_float32():
    """200 steps of float32 stay within 5e-6 of float64 over a change of about 1: the rounding of the sums."""
    keys = random.split(random.key(1), 201)
    start = draw(keys[0])
    ends = []
    for dtype in (torch.float32, torch.float64):
        params = tree.map(lambda x, dtype=dtype: x.to(dtype), start)
        state = optim.init(params)
        for key in keys[1:]:
            grads = tree.map(lambda g, dtype=dtype: g.to(dtype) + 1, draw(key))
            params, state = optim.update(
                AdamConfig(), grads, state, params, 5e-3
            )
        ends.append(params)
    for a, b in zip(*ends):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=5e-6)


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 100.0])
def test_clipping_equals_torch_clip_grad_norm(max_norm):
    grads = draw(random.key(2))
    reference = [torch.zeros_like(g).requires_grad_() for g in grads]
    for p, g in zip(reference, grads):
        p.grad = g.clone()
    norm = torch.nn.utils.clip_grad_norm_(reference, max_norm)
    clipped, before = optim.clip_by_global_norm(grads, max_norm)
    torch.testing.assert_close(before, norm)
    for g, p in zip(clipped, reference):
        torch.testing.assert_close(g, p.grad, rtol=1e-12, atol=0)


def test_a_zero_gradient_is_clipped_to_zero():
    zeros = Params(torch.zeros(2), torch.zeros(1))
    clipped, norm = optim.clip_by_global_norm(zeros, 0.5)
    assert float(norm) == 0 and not any(g.any() for g in clipped)


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("end", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_schedules_equal_torch(kind, end, warmup):
    n, lr = 12, torch.optim.lr_scheduler
    adam = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    if kind == "linear":
        ends = {"start_factor": 1.0, "end_factor": max(end, 1e-12)}
        decay = lr.LinearLR(adam, total_iters=n - warmup, **ends)
    else:
        decay = lr.CosineAnnealingLR(adam, T_max=n - warmup, eta_min=end)
    schedule = decay
    if warmup:
        first = 1 / (warmup + 1)
        rise = lr.LinearLR(adam, start_factor=first, total_iters=warmup)
        schedule = lr.SequentialLR(adam, [rise, decay], milestones=[warmup])
    want = []
    for _ in range(n):
        want.append(adam.param_groups[0]["lr"])
        adam.step()
        schedule.step()
    ours = Schedule(kind=kind, end_factor=end, warmup_updates=warmup)
    got = [optim.schedule_factor(ours, torch.tensor(u), n) for u in range(n)]
    assert [float(x) for x in got] == pytest.approx(want, abs=1e-6)
