"""The APIs that the report hoped for: do they exist, and do they work?"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.matrix.problem import Policy, Problem, adam, learn
from experiments.matrix.registry import Compiler, Training, way
from experiments.matrix.routes_traced import (
    StepModule,
    flat_step,
    packaged,
    train_flat,
)
from experiments.matrix.steps import module_training
from funcppo.core import tree

ONCE = {"backends": ("inductor",), "modes": ("default",)}
HOPE = "hoped-for API"


def with_option(problem: Problem, compiler: Compiler, option: str) -> Training:
    """The usual step, compiled with an option of that name."""
    policy = Policy(problem)
    optimizer = adam(problem, list(policy.parameters()))
    step = compiler(
        lambda batch: learn(policy, optimizer, policy.loss, batch),
        **{option: True},
    )
    return module_training(policy, step)


@way("H", HOPE, "torch.compile(trace_backward=True)", **ONCE)
def trace_backward(problem: Problem, compiler: Compiler) -> Training:
    """The report's first solution."""
    return with_option(problem, compiler, "trace_backward")


@way("H", HOPE, "torch.compile(trace_grad_and_opt=True)", **ONCE)
def trace_grad_and_opt(problem: Problem, compiler: Compiler) -> Training:
    """The report's second solution."""
    return with_option(problem, compiler, "trace_grad_and_opt")


class UsualStep(nn.Module):
    """The usual step as a module, for torch.export."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.policy = Policy(problem)
        self.optimizer = adam(problem, list(self.policy.parameters()))

    def forward(self, leaves: list[Tensor]) -> Tensor:
        """Changes the parameters; returns one of them, since something must be returned."""
        batch = tree.unflatten(self.policy.problem.batches[0], leaves)
        learn(self.policy, self.optimizer, self.policy.loss, batch)
        return next(self.policy.parameters()).detach().clone()


@way(
    "H",
    HOPE,
    "export of the usual step",
    backends=("eager",),
    modes=("default",),
)
def export_usual(problem: Problem, compiler: Compiler) -> Training:
    """torch.export of backward() and optimizer.step()."""
    module = UsualStep(problem)
    program = torch.export.export(
        module, (tree.leaves(problem.batches[0]),)
    ).module()
    return module_training(
        module.policy, lambda batch: program(tree.leaves(batch)), graphs=1
    )


def export_as_it_stands(problem: Problem) -> torch.export.ExportedProgram:
    """torch.export tracing the pure step itself."""
    fn, leaves = flat_step(problem)
    return torch.export.export(StepModule(fn), (leaves,), strict=True)


@way(
    "H",
    HOPE,
    "export of the pure step",
    backends=("eager",),
    modes=("default",),
)
def export_pure(problem: Problem, compiler: Compiler) -> Training:
    """torch.export of func.grad_and_value and Adam as they stand."""
    program = export_as_it_stands(problem).module()
    return train_flat(problem, lambda *leaves: program(list(leaves)), graphs=1)


@way(
    "H",
    HOPE,
    "AOTInductor package of the pure step",
    backends=("inductor",),
    modes=("default", "manual graph"),
)
def package_pure(problem: Problem, compiler: Compiler) -> Training:
    """That export, compiled to a package and loaded again."""
    return packaged(problem, export_as_it_stands(problem))
