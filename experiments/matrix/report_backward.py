"""Approaches 1-3: the autograd engine called inside the compiled function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from experiments.matrix.problem import Policy, Problem, adam, learn
from experiments.matrix.registry import Compiler, Training, way
from experiments.matrix.steps import module_training, torch_adam
from funcppo import optim
from funcppo.core import tree
from funcppo.losses import Batch

ONE, TWO, THREE = (
    "backward + optimizer.step",
    "compiled_autograd = True",
    "autograd.grad + functional Adam",
)


def whole_step(
    problem: Problem, compiler: Compiler, fullgraph: bool
) -> Training:
    """Loss, backward, clip and step in one compiled function."""
    policy = Policy(problem)
    optimizer = adam(problem, list(policy.parameters()))
    compiled = compiler(
        lambda batch: learn(policy, optimizer, policy.loss, batch),
        fullgraph=fullgraph,
    )

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        compiled(batch)

    return module_training(policy, step)


@way("1", ONE, "as written")
def backward_and_step(problem: Problem, compiler: Compiler) -> Training:
    """The usual step, compiled whole."""
    return whole_step(problem, compiler, fullgraph=True)


@way("1", ONE, "graph breaks allowed")
def backward_and_step_broken(problem: Problem, compiler: Compiler) -> Training:
    """The same in as many graphs as it takes."""
    return whole_step(problem, compiler, fullgraph=False)


@way("1", ONE, "repaired")
def backward_traced(problem: Problem, compiler: Compiler) -> Training:
    """backward() traced because the flag says so; Adam as a function, since the optimizer's method breaks the graph."""
    torch._dynamo.config.trace_autograd_ops = True
    policy = Policy(problem)
    params = list(policy.parameters())
    update = torch_adam(problem, params)

    def step(batch: Batch) -> None:
        for p in params:
            p.grad = None
        policy.loss(batch).backward()
        nn.utils.clip_grad_norm_(params, problem.cfg.ppo.max_grad_norm)
        update([p.grad for p in params])

    return module_training(policy, compiler(step))


@way("2", TWO, "as written")
def compiled_autograd_inside(problem: Problem, compiler: Compiler) -> Training:
    """The setting switched on, backward() still inside the compiled function."""
    torch._dynamo.config.compiled_autograd = True
    return whole_step(problem, compiler, fullgraph=True)


@way("2", TWO, "repaired")
def compiled_autograd_outside(problem: Problem, compiler: Compiler) -> Training:
    """Compiled autograd as it is meant: backward() is called by eager code, its graph compiled; the update apart."""
    from torch._dynamo import compiled_autograd

    policy = Policy(problem)
    params = list(policy.parameters())
    optimizer = adam(problem, params)
    loss, update = (
        compiler(policy.loss),
        compiler(
            lambda: clip_and_step(problem, params, optimizer), fullgraph=False
        ),
    )

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        value = loss(batch)
        with compiled_autograd._enable(compiler):
            value.backward()
        update()

    return module_training(policy, step)


def clip_and_step(
    problem: Problem, params: list[Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """Clip the gradients in place and apply them."""
    nn.utils.clip_grad_norm_(params, problem.cfg.ppo.max_grad_norm)
    optimizer.step()


def engine_and_function(problem: Problem, compiler: Compiler) -> Training:
    """autograd.grad inside the compiled function, funcppo's Adam after it, the module overwritten at the end."""
    policy = Policy(problem)
    params = list(policy.parameters())
    state = [optim.init(problem.params)]

    def step(opt_state: Any, batch: Batch) -> Any:
        grads = torch.autograd.grad(policy.loss(batch), params)
        with torch.no_grad():
            structured = tree.unflatten(problem.params, list(grads))
            new, opt_state = problem.finish(
                policy.tree(), opt_state, structured
            )
        return [p.detach() for p in tree.leaves(new)], opt_state

    compiled = compiler(step)

    def train(batch: Batch) -> None:
        new, opt_state = compiled(state[0], batch)
        with torch.no_grad():
            torch._foreach_copy_(
                params + tree.leaves(state[0]), new + tree.leaves(opt_state)
            )

    return module_training(policy, train)


@way("3", THREE, "as written")
def grad_as_shipped(problem: Problem, compiler: Compiler) -> Training:
    """With the default settings."""
    return engine_and_function(problem, compiler)


@way("3", THREE, "repaired")
def grad_traced(problem: Problem, compiler: Compiler) -> Training:
    """With the flag."""
    torch._dynamo.config.trace_autograd_ops = True
    return engine_and_function(problem, compiler)
