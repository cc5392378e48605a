"""What several cells are made of: training steps, and how their results reach the state."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value
from torch.optim.adam import adam as functional_adam

from experiments.matrix.problem import Policy, Problem
from experiments.matrix.registry import Compiler, Training
from funcppo import optim
from funcppo.core import tree
from funcppo.losses import Batch

Step = Callable[[Any, Any, Batch], tuple[Any, Any]]


def pure_step(problem: Problem, loss: Callable[..., Any] | None = None) -> Step:
    """Forward, loss, backward, clip and Adam: reads and returns.

    Args:
      loss: that of the problem by default.
    """
    loss = loss or problem.loss

    def step(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any]:
        grads, _ = grad_and_value(loss, has_aux=True)(params, batch)
        return problem.finish(params, opt_state, grads)

    return step


def training(problem: Problem, step: Step, **options: Any) -> Training:
    """A pure step whose results are written back in place, outside what is compiled."""
    params = tree.map(torch.clone, problem.params)
    state = (params, optim.init(params))
    return Training(
        step=written_back(state, step),
        params=lambda: tree.leaves(params),
        **options,
    )


def written_back(
    state: tuple[Any, ...], step: Callable[..., Any]
) -> Callable[[Batch], None]:
    """What learns from a batch: the step, whose results overwrite the state."""

    def train(batch: Batch) -> None:
        torch._foreach_copy_(
            tree.leaves(state), tree.leaves(step(*state, batch))
        )

    return train


def fed_back(problem: Problem, compiler: Compiler, first: Any) -> Training:
    """A pure step that is given its own results."""
    state = [(first, optim.init(problem.params))]
    compiled = compiler(pure_step(problem))

    def train(batch: Batch) -> None:
        state[0] = compiled(*state[0], batch)

    return Training(
        step=train,
        params=lambda: [p.detach() for p in tree.leaves(state[0][0])],
    )


def eager_over_compiled(
    problem: Problem, compiler: Compiler, fullgraph: bool
) -> Training:
    """An eager transform over a compiled loss."""
    loss = compiler(problem.loss, fullgraph=fullgraph)
    return training(problem, pure_step(problem, loss))


def module_training(
    policy: Policy, step: Callable[[Batch], Any], **options: Any
) -> Training:
    """What trains a module in place."""
    return Training(
        step=step,
        params=lambda: [p.detach() for p in policy.parameters()],
        **options,
    )


def torch_adam(
    problem: Problem, params: list[Tensor]
) -> Callable[[list[Any]], None]:
    """torch.optim's Adam as a function of gradients; it overwrites `params`."""
    mu, nu = (
        [torch.zeros_like(p) for p in params],
        [torch.zeros_like(p) for p in params],
    )
    steps = [torch.zeros((), device=p.device) for p in params]
    cfg = problem.cfg.ppo
    options = dict(
        amsgrad=False,
        weight_decay=0.0,
        maximize=False,
        capturable=True,
        foreach=True,
        fused=False,
    )

    def update(grads: list[Any]) -> None:
        with torch.no_grad():
            functional_adam(
                params,
                grads,
                mu,
                nu,
                [],
                steps,
                beta1=cfg.adam.b1,
                beta2=cfg.adam.b2,
                lr=cfg.learning_rate,
                eps=cfg.adam.eps,
                **options,
            )

    return update


class LossModule(nn.Module):
    """A module whose forward is the loss, so that functional_call reaches it."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, batch: Batch) -> Tensor:
        """The loss."""
        return self.policy.loss(batch)
