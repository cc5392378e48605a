"""Approaches 9-11: variations on a compiled functional step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value

from experiments.matrix.problem import Policy, Problem
from experiments.matrix.registry import Compiler, Training, way
from experiments.matrix.steps import (
    eager_over_compiled,
    fed_back,
    pure_step,
    training,
)
from funcppo import optim
from funcppo.core import tree
from funcppo.losses import Batch

NINE, TEN, ELEVEN = (
    "no_grad wrappers",
    "ways to pass parameters",
    "eager or compiled inner functions",
)


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function as it is, where another way compiles it."""
    return fn


@way("9", NINE, "as written: around an eager transform, loss compiled")
def no_grad_over_compiled_loss(
    problem: Problem, compiler: Compiler
) -> Training:
    """no_grad changes nothing about who may transform whom."""
    inner = eager_over_compiled(problem, compiler, fullgraph=True)
    return inner._replace(step=torch.no_grad()(inner.step))


@way("9", NINE, "around the compiled step")
def no_grad_around(problem: Problem, compiler: Compiler) -> Training:
    """no_grad in the caller."""
    return training(problem, torch.no_grad()(compiler(pure_step(problem))))


@way("9", NINE, "inside the compiled step")
def no_grad_inside(problem: Problem, compiler: Compiler) -> Training:
    """no_grad traced."""
    return training(problem, compiler(torch.no_grad()(pure_step(problem))))


def by_dict(problem: Problem, inner: Wrap, outer: Wrap) -> Training:
    """Parameters as a dict of names; `inner` wraps the loss, `outer` the step."""
    names = tree.paths(problem.params)
    structured = lambda weights: tree.unflatten(
        problem.params, [weights[name] for name in names]
    )
    loss = inner(
        lambda weights, batch: problem.loss(structured(weights), batch)
    )

    def step(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any]:
        grads, _ = grad_and_value(loss, has_aux=True)(
            dict(zip(names, tree.leaves(params))), batch
        )
        return problem.finish(params, opt_state, structured(grads))

    return training(problem, outer(step))


@way("10", TEN, "as written: dict, transform eager, loss compiled")
def by_dict_outside(problem: Problem, compiler: Compiler) -> Training:
    """An eager transform over a compiled loss of a dict."""
    return by_dict(problem, compiler, plain)


@way("10", TEN, "dict")
def by_dict_inside(problem: Problem, compiler: Compiler) -> Training:
    """The transform inside the compiled step."""
    return by_dict(problem, plain, compiler)


def by_position(problem: Problem, inner: Wrap, outer: Wrap) -> Training:
    """Every leaf an argument of its own; `inner` wraps the loss, `outer` the step."""
    n = len(tree.leaves(problem.params))
    loss = inner(
        lambda *args: problem.loss(
            tree.unflatten(problem.params, list(args[:n])), args[n]
        )
    )

    def step(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any]:
        grads, _ = grad_and_value(loss, argnums=tuple(range(n)), has_aux=True)(
            *tree.leaves(params), batch
        )
        return problem.finish(
            params, opt_state, tree.unflatten(params, list(grads))
        )

    return training(problem, outer(step))


@way("10", TEN, "as written: positional, transform eager, loss compiled")
def by_position_outside(problem: Problem, compiler: Compiler) -> Training:
    """An eager transform over a compiled loss of many arguments."""
    return by_position(problem, compiler, plain)


@way("10", TEN, "positional")
def by_position_inside(problem: Problem, compiler: Compiler) -> Training:
    """The transform inside the compiled step."""
    return by_position(problem, plain, compiler)


@way("10", TEN, "flat vector")
def by_flat_vector(problem: Problem, compiler: Compiler) -> Training:
    """All leaves in one vector: so are the gradient and the moments."""
    shapes = [p.shape for p in tree.leaves(problem.params)]
    flat = (torch.cat([p.reshape(-1) for p in tree.leaves(problem.params)]),)
    state = (flat, optim.init(flat))
    compiled = compiler(
        lambda params, opt_state, batch: flat_step(
            problem, params, opt_state, batch
        )
    )

    def train(batch: Batch) -> None:
        torch._foreach_copy_(
            tree.leaves(state), tree.leaves(compiled(*state, batch))
        )

    return Training(step=train, params=lambda: split(flat[0], shapes))


def flat_step(
    problem: Problem, params: Any, opt_state: Any, batch: Batch
) -> tuple[Any, Any]:
    """`pure_step` over one vector."""
    shapes = [p.shape for p in tree.leaves(problem.params)]
    loss = lambda vector, batch: problem.loss(
        tree.unflatten(problem.params, split(vector[0], shapes)), batch
    )
    grads, _ = grad_and_value(loss, has_aux=True)(params, batch)
    return problem.finish(params, opt_state, grads)


def split(vector: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    """Views of a vector."""
    return [
        part.view(shape)
        for part, shape in zip(
            vector.split([s.numel() for s in shapes]), shapes
        )
    ]


@way("10", TEN, "module + copy_")
def by_module(problem: Problem, compiler: Compiler) -> Training:
    """A module's Parameters go in detached; the results are copied into them."""
    policy = Policy(problem)
    opt_state = optim.init(problem.params)
    compiled = compiler(pure_step(problem))

    @torch.no_grad()
    def train(batch: Batch) -> None:
        params = tree.map(torch.detach, policy.tree())
        new = compiled(params, opt_state, batch)
        torch._foreach_copy_(tree.leaves((params, opt_state)), tree.leaves(new))

    return Training(
        step=train, params=lambda: [p.detach() for p in policy.parameters()]
    )


@way("10", TEN, "Parameters first, tensors later", modes=("default",))
def parameters_first(problem: Problem, compiler: Compiler) -> Training:
    """The first call is given Parameters, the next ones tensors: another graph."""
    return fed_back(problem, compiler, Policy(problem).tree())


@way("11", ELEVEN, "as written: transform eager, inner function compiled")
def outer_eager(problem: Problem, compiler: Compiler) -> Training:
    """An eager step that transforms a plain function around a compiled loss."""
    loss = compiler(problem.loss)

    def step(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any]:
        grads, _ = grad_and_value(lambda p, b: loss(p, b), has_aux=True)(
            params, batch
        )
        return problem.finish(params, opt_state, grads)

    return training(problem, step)


@way(
    "11",
    ELEVEN,
    "not compiled at all",
    backends=("none",),
    modes=("default",),
    compiled=False,
)
def nothing_compiled(problem: Problem, compiler: Compiler) -> Training:
    """The pure step, eager: the transform itself needs no compiler."""
    return training(problem, pure_step(problem))


@way("11", ELEVEN, "inner function eager")
def inner_eager(problem: Problem, compiler: Compiler) -> Training:
    """A compiled step that calls a plain function."""
    return training(problem, compiler(pure_step(problem)))


@way("11", ELEVEN, "inner function compiled too")
def inner_compiled(problem: Problem, compiler: Compiler) -> Training:
    """A compiled step that transforms a compiled loss: Dynamo inlines it."""
    loss = compiler(problem.loss)

    def step(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any]:
        grads, _ = grad_and_value(lambda p, b: loss(p, b), has_aux=True)(
            params, batch
        )
        return problem.finish(params, opt_state, grads)

    return training(problem, compiler(step))
