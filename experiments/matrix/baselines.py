"""What the others are compared with."""

from __future__ import annotations

import torch

from experiments.matrix.problem import Policy, Problem, adam, eager_step
from experiments.matrix.registry import Compiler, Training, way
from experiments.matrix.steps import module_training

TITLE = "baseline"


def eager_with(
    problem: Problem, fused: bool
) -> tuple[Policy, torch.optim.Adam]:
    """A policy and its optimizer, which may be captured where there is a GPU."""
    policy = Policy(problem)
    params = list(policy.parameters())
    return policy, adam(
        problem, params, fused=fused, capturable=params[0].is_cuda
    )


@way(
    "0",
    TITLE,
    "eager, fused Adam",
    backends=("none",),
    modes=("default", "manual graph"),
    compiled=False,
)
def eager_fused(problem: Problem, compiler: Compiler) -> Training:
    """The usual step, nothing compiled; as a manual graph, the way of LeanRL without its compiled parts."""
    policy, optimizer = eager_with(problem, fused=True)
    return module_training(
        policy, lambda batch: eager_step(policy, optimizer, policy.loss, batch)
    )


@way("0", TITLE, "loss compiled, eager backward, fused Adam")
def loss_compiled(problem: Problem, compiler: Compiler) -> Training:
    """What the report settled for."""
    policy, optimizer = eager_with(problem, fused=True)
    loss = compiler(policy.loss)
    return module_training(
        policy, lambda batch: eager_step(policy, optimizer, loss, batch)
    )
