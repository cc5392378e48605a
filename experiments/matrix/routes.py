"""Routes A, B, C, E, G: the whole step traced by Dynamo."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from experiments.matrix.problem import SIZE, Policy, Problem, adam
from experiments.matrix.registry import Compiler, Training, way
from experiments.matrix.steps import (
    fed_back,
    module_training,
    pure_step,
    torch_adam,
    training,
)
from funcppo import optim
from funcppo.core import tree
from funcppo.losses import Batch

MINIBATCHES, LEARNERS = 4, 3
A, B, C = (
    "func.grad_and_value + functional Adam",
    "module API, the flag, the optimizer's bare step",
    "autograd.grad",
)
E, G = "scan over minibatches", "vmap over learners"


@way("A", A, "written back outside")
def functional(problem: Problem, compiler: Compiler) -> Training:
    """A pure function; its caller overwrites the state."""
    return training(problem, compiler(pure_step(problem)))


@way("A", A, "fed back", modes=("default", "reduce-overhead"))
def functional_fed_back(problem: Problem, compiler: Compiler) -> Training:
    """A pure function that is given its own results."""
    return fed_back(problem, compiler, problem.params)


@way("A", A, "written back inside")
def functional_in_place(problem: Problem, compiler: Compiler) -> Training:
    """The state overwritten by the compiled function itself."""
    params = tree.map(torch.clone, problem.params)
    state, step = (params, optim.init(params)), pure_step(problem)

    def in_place(state: Any, batch: Batch) -> None:
        for old, new in zip(
            tree.leaves(state), tree.leaves(step(*state, batch))
        ):
            old.copy_(new)

    compiled = compiler(in_place)
    return Training(
        step=lambda batch: compiled(state, batch),
        params=lambda: tree.leaves(params),
    )


@way("B", B, "gradients copied into p.grad")
def module_api(problem: Problem, compiler: Compiler) -> Training:
    """autograd.grad, clip_grad_norm_ and Adam.step without its decorators, which break the graph on purpose.

    The gradients must be there before: the optimizer's state is made while the step is traced.
    """
    torch._dynamo.config.trace_autograd_ops = True
    policy = Policy(problem)
    params = list(policy.parameters())
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer = adam(
        problem, params, foreach=True, capturable=params[0].is_cuda
    )
    bare_step = inspect.unwrap(torch.optim.Adam.step)

    def step(batch: Batch) -> None:
        grads = torch.autograd.grad(policy.loss(batch), params)
        with torch.no_grad():
            for p, g in zip(params, grads):
                p.grad.copy_(g)
            nn.utils.clip_grad_norm_(params, problem.cfg.ppo.max_grad_norm)
            bare_step(optimizer)

    return module_training(policy, compiler(step))


@way("C", C, "torch's functional Adam")
def functional_torch_adam(problem: Problem, compiler: Compiler) -> Training:
    """autograd.grad with the flag, torch.optim.adam.adam after it."""
    torch._dynamo.config.trace_autograd_ops = True
    policy = Policy(problem)
    params = list(policy.parameters())
    update, max_norm = (
        torch_adam(problem, params),
        problem.scalars.max_grad_norm,
    )

    def step(batch: Batch) -> None:
        grads, _ = optim.clip_by_global_norm(
            torch.autograd.grad(policy.loss(batch), params), max_norm
        )
        update(list(grads))

    return module_training(policy, compiler(step))


def over_minibatches(
    problem: Problem, compiler: Compiler, scan: Any
) -> Training:
    """One call, several updates, each on its share of the rows.

    The scan sees lists: its body may return tensors only, no NamedTuples, and no two of them may be one.
    """
    step, start = (
        pure_step(problem),
        (problem.params, optim.init(problem.params)),
    )
    like = tree.map(
        torch.clone, problem.batches[0]
    )  # not a tensor that may be handed in: Dynamo guards on identity

    def body(
        carry: list[Tensor], leaves: list[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        new = step(*tree.unflatten(start, carry), tree.unflatten(like, leaves))
        return [leaf.clone() for leaf in tree.leaves(new)], new[1].step.clone()

    def epoch(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any]:
        rows = [
            x.view(MINIBATCHES, SIZE.rows // MINIBATCHES, *x.shape[1:])
            for x in tree.leaves(batch)
        ]
        return tree.unflatten(
            start, list(scan(body, tree.leaves((params, opt_state)), rows)[0])
        )

    return training(problem, compiler(epoch), minibatches=MINIBATCHES)


@way("E", E, "scan")
def scanned(problem: Problem, compiler: Compiler) -> Training:
    """torch's scan operator: the body is compiled once."""
    from torch._higher_order_ops.scan import scan

    return over_minibatches(problem, compiler, scan)


@way("E", E, "unrolled loop", modes=("default", "manual graph"))
def unrolled(problem: Problem, compiler: Compiler) -> Training:
    """A Python loop, which Dynamo unrolls."""

    def scan(
        body: Any, carry: list[Tensor], rows: list[Tensor]
    ) -> tuple[list[Tensor], None]:
        for i in range(MINIBATCHES):
            carry, _ = body(carry, [x[i] for x in rows])
        return carry, None

    return over_minibatches(problem, compiler, scan)


@way("G", G, "vmap")
def many_learners(problem: Problem, compiler: Compiler) -> Training:
    """Copies of the step over a leading axis of the state, one graph for all."""
    step = vmap(pure_step(problem), in_dims=(0, 0, None))
    stacked = tree.map(lambda p: torch.stack([p] * LEARNERS), problem.params)
    state = (
        stacked,
        tree.map(
            lambda x: torch.stack([x] * LEARNERS), optim.init(problem.params)
        ),
    )
    compiled = compiler(step)

    def train(batch: Batch) -> None:
        torch._foreach_copy_(
            tree.leaves(state), tree.leaves(compiled(*state, batch))
        )

    return Training(
        step=train, params=lambda: tree.leaves(stacked), learners=LEARNERS
    )
