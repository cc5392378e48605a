"""Routes D and F: the graph is made ahead of time, without Dynamo, and then compiled."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from experiments.matrix.problem import Policy, Problem
from experiments.matrix.registry import Compiler, Training, way
from experiments.matrix.steps import LossModule, pure_step, training
from funcppo import optim
from funcppo.core import tree
from funcppo.losses import Batch

D, F = "the step traced ahead of time", "aot_export_module(trace_joint=True)"
AHEAD = ("default", "manual graph")


def flat_step(
    problem: Problem,
) -> tuple[Callable[..., list[Tensor]], list[Tensor]]:
    """The pure step over a list of tensors, and such a list.

    The scalars are among them: a tensor from outside would be baked in, or refused.
    """
    structure = (
        problem.params,
        optim.init(problem.params),
        problem.batches[0],
        problem.scalars,
    )

    def step(*leaves: Tensor) -> list[Tensor]:
        *state, scalars = tree.unflatten(structure, list(leaves))
        return tree.leaves(pure_step(replace(problem, scalars=scalars))(*state))

    return step, tree.leaves(structure)


def train_flat(
    problem: Problem, compiled: Callable[..., Any], **options: Any
) -> Training:
    """A training around a compiled function of leaves."""
    like = (problem.params, optim.init(problem.params))
    step = lambda *args: tree.unflatten(
        like, list(compiled(*tree.leaves(args), *problem.scalars))
    )
    return training(problem, step, **options)


@way("D", D, "make_fx + torch.compile")
def traced_and_compiled(problem: Problem, compiler: Compiler) -> Training:
    """The graph of operators, gradient included, as a module that Dynamo traces again."""
    fn, leaves = flat_step(problem)
    return train_flat(problem, compiler(make_fx(fn)(*leaves)))


@way("D", D, "make_fx + compile_fx_inner", backends=("inductor",), modes=AHEAD)
def traced_and_lowered(problem: Problem, compiler: Compiler) -> Training:
    """The same graph given to Inductor's innermost function, which wants fake tensors and a list."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode

    fn, leaves = flat_step(problem)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(leaf) for leaf in leaves]
        lowered = compile_fx_inner(
            make_fx(fn, decomposition_table=select_decomp_table())(*fake), fake
        )
    return train_flat(problem, lambda *leaves: lowered(list(leaves)), graphs=1)


@way(
    "D", D, "make_fx + standalone_compile", backends=("inductor",), modes=AHEAD
)
def traced_standalone(problem: Problem, compiler: Compiler) -> Training:
    """The same graph as an artefact that can be saved."""
    fn, leaves = flat_step(problem)
    artefact = torch._inductor.standalone_compile(
        make_fx(fn, tracing_mode="fake")(*leaves), leaves
    )
    return train_flat(problem, artefact, graphs=1)


class StepModule(nn.Module):
    """A module whose forward is the pure step over leaves, as torch.export wants it."""

    def __init__(self, fn: Callable[..., list[Tensor]]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, leaves: list[Tensor]) -> list[Tensor]:
        """The new leaves."""
        return self.fn(*leaves)


def exported(problem: Problem) -> Any:
    """torch.export of the training step, gradient and Adam included."""
    fn, leaves = flat_step(problem)
    return torch.export.export(StepModule(make_fx(fn)(*leaves)), (leaves,))


@way(
    "D",
    D,
    "make_fx + export + AOTInductor",
    backends=("inductor",),
    modes=AHEAD,
)
def traced_packaged(problem: Problem, compiler: Compiler) -> Training:
    """The same graph exported, compiled to a package and loaded again."""
    return packaged(problem, exported(problem))


def packaged(problem: Problem, program: Any) -> Training:
    """An exported step as an AOTInductor package."""
    path = tempfile.mkdtemp(prefix="step-") + "/step.pt2"
    torch._inductor.aoti_compile_and_package(program, package_path=path)
    loaded = torch._inductor.aoti_load_package(path)
    return train_flat(problem, lambda *leaves: loaded(list(leaves)), graphs=1)


@way("F", F, "joint graph + functional Adam")
def joint_graph(problem: Problem, compiler: Compiler) -> Training:
    """AOTAutograd's graph of loss and gradients, compiled together with the update."""
    from torch._functorch.aot_autograd import aot_export_module

    module = FlatLoss(problem)
    data = tree.leaves((problem.batches[0], problem.scalars))
    graph, signature = aot_export_module(
        module, data, trace_joint=True, output_loss_index=0
    )
    names = [name for name, _ in module.named_parameters()]
    grad_of = {
        name: node
        for node, name in signature.backward_signature.gradients_to_parameters.items()
    }
    outputs = [
        node.name
        for node in next(n for n in graph.graph.nodes if n.op == "output").args[
            0
        ]
    ]
    places = [outputs.index(grad_of[name]) for name in names]

    def step(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any]:
        out = graph(*tree.leaves((params, batch, problem.scalars)))
        return problem.finish(
            params, opt_state, tree.unflatten(params, [out[i] for i in places])
        )

    return training(problem, compiler(step))


class FlatLoss(LossModule):
    """The loss as a tuple, of a batch and scalars given as leaves: export wants no tensor from outside."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(Policy(problem))

    def forward(self, *leaves: Tensor) -> tuple[Tensor]:
        """The loss."""
        given = self.policy.problem
        batch, scalars = tree.unflatten(
            (given.batches[0], given.scalars), list(leaves)
        )
        return (
            replace(given, scalars=scalars).loss(self.policy.tree(), batch)[0],
        )
