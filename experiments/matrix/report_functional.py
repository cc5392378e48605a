"""Approaches 4-8: gradients by `torch.func`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value

from experiments.matrix.problem import Policy, Problem, adam, eager_step, heads
from experiments.matrix.registry import Compiler, Training, way
from experiments.matrix.steps import (
    LossModule,
    eager_over_compiled,
    pure_step,
    training,
)
from funcppo.core import tree
from funcppo.losses import Batch
from funcppo.nets.base import PolicyValue, dense

FOUR, FIVE = (
    "func.grad + functional_call on a method",
    "forward(actions=) with an in-place residual",
)
SIX, SEVEN = "func.grad_and_value, single forward", "the same with aot_eager"
EIGHT = "compilation disabled on the minibatch function"


def called(
    problem: Problem,
    compiler: Callable[[Callable[..., Any]], Callable[..., Any]],
    module: nn.Module,
    judged: bool,
) -> Training:
    """func.grad of functional_call over the module's parameters, and the update, compiled together.

    Args:
      judged: the call names the actions to judge.
    """
    names = [name for name, _ in module.named_parameters()]

    def step(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any]:
        extra = {"actions": batch.action} if judged else {}
        loss = lambda weights: functional_call(module, weights, (batch,), extra)
        grads = grad(loss)(dict(zip(names, tree.leaves(params))))
        return problem.finish(
            params,
            opt_state,
            tree.unflatten(params, [grads[name] for name in names]),
        )

    return training(problem, compiler(step))


@way("4", FOUR, "as written")
def method_called(problem: Problem, compiler: Compiler) -> Training:
    """functional_call given the arguments of a method other than forward."""
    return called(problem, compiler, Policy(problem), judged=True)


@way(
    "4",
    FOUR,
    "not compiled at all",
    backends=("none",),
    modes=("default",),
    compiled=False,
)
def method_called_eagerly(problem: Problem, compiler: Compiler) -> Training:
    """The same call, transformed by eager `torch.func`."""
    return called(problem, lambda step: step, Policy(problem), judged=True)


@way("4", FOUR, "repaired")
def wrapper_called(problem: Problem, compiler: Compiler) -> Training:
    """A wrapper whose forward is that method."""
    return called(problem, compiler, LossModule(Policy(problem)), judged=False)


class ActionsPolicy(Policy):
    """One forward for acting and, given actions, for learning."""

    def forward(self, batch: Batch, actions: Tensor | None = None) -> Any:
        """The network's output; the loss where actions are given."""
        return (
            super().forward(batch.obs)
            if actions is None
            else self.loss(batch._replace(action=actions))
        )


def in_place_apply(
    cfg: Any, world: Any, params: Any, obs: Tensor
) -> PolicyValue:
    """`residual_apply`, its sum made in place: what tanh kept for its backward is overwritten."""
    x = dense(params.hidden[0], obs.expand(2, *obs.shape))
    hidden = torch.tanh(x)
    hidden += x
    return heads(params, hidden)


def in_place(problem: Problem) -> Problem:
    """The problem with the network that overwrites."""
    agent = replace(problem.cfg.agent, apply=in_place_apply)
    return replace(problem, cfg=replace(problem.cfg, agent=agent))


@way("5", FIVE, "as written", residual=True)
def residual_in_place(problem: Problem, compiler: Compiler) -> Training:
    """The residual added in place."""
    return called(
        problem, compiler, ActionsPolicy(in_place(problem)), judged=True
    )


@way(
    "5",
    FIVE,
    "not compiled at all",
    residual=True,
    backends=("none",),
    modes=("default",),
    compiled=False,
)
def residual_in_place_eager(problem: Problem, compiler: Compiler) -> Training:
    """The same module trained by plain eager autograd."""
    policy = ActionsPolicy(in_place(problem))
    optimizer = adam(problem, list(policy.parameters()))
    step = lambda batch: eager_step(
        policy, optimizer, lambda b: policy(b, actions=b.action), batch
    )
    return Training(
        step=step, params=lambda: [p.detach() for p in policy.parameters()]
    )


@way("5", FIVE, "repaired", residual=True)
def residual_out_of_place(problem: Problem, compiler: Compiler) -> Training:
    """The residual added out of place."""
    return called(problem, compiler, ActionsPolicy(problem), judged=True)


@way("6", SIX, "as written: transform eager, loss compiled")
def transform_outside(problem: Problem, compiler: Compiler) -> Training:
    """The report's call, its network compiled."""
    return eager_over_compiled(problem, compiler, fullgraph=True)


@way("6", SIX, "the same, graph breaks allowed")
def transform_outside_broken(problem: Problem, compiler: Compiler) -> Training:
    """As above, without the demand for a full graph."""
    return eager_over_compiled(problem, compiler, fullgraph=False)


@way("6", SIX, "repaired: transform inside the compiled function")
def transform_inside(problem: Problem, compiler: Compiler) -> Training:
    """One compiled function around transform and update."""
    return training(problem, compiler(pure_step(problem)))


@way(
    "7",
    SEVEN,
    "as written: transform eager, loss compiled",
    backends=("aot_eager",),
)
def transform_outside_aot(problem: Problem, compiler: Compiler) -> Training:
    """As 6."""
    return eager_over_compiled(problem, compiler, fullgraph=True)


@way(
    "7",
    SEVEN,
    "repaired: transform inside the compiled function",
    backends=("aot_eager",),
)
def transform_inside_aot(problem: Problem, compiler: Compiler) -> Training:
    """As 6."""
    return training(problem, compiler(pure_step(problem)))


@way("8", EIGHT, "as written")
def minibatch_disabled(problem: Problem, compiler: Compiler) -> Training:
    """A compiled caller, a minibatch function kept out of it, a compiled loss inside."""
    loss = compiler(problem.loss)

    @torch.compiler.disable
    def minibatch(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any]:
        grads, _ = grad_and_value(loss, has_aux=True)(params, batch)
        return problem.finish(params, opt_state, grads)

    return training(
        problem, compiler(lambda *args: minibatch(*args), fullgraph=False)
    )


@way("8", EIGHT, "repaired: gradient and update compiled apart")
def minibatch_of_two_graphs(problem: Problem, compiler: Compiler) -> Training:
    """The minibatch function stays eager and calls a compiled gradient and a compiled update."""
    gradient = compiler(
        lambda params, batch: grad_and_value(problem.loss, has_aux=True)(
            params, batch
        )[0]
    )
    update = compiler(problem.finish)

    @torch.compiler.disable
    def minibatch(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any]:
        return update(params, opt_state, gradient(params, batch))

    return training(problem, minibatch)
