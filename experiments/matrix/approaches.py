"""The baselines, and the eleven approaches of the report: as written, and repaired."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value

from experiments.matrix.problem import (
    Policy,
    Problem,
    adam,
    eager_step,
    heads,
    learn,
)
from experiments.matrix.registry import Build, Compiler, Training, way
from experiments.matrix.steps import (
    LossModule,
    eager_over_compiled,
    fed_back,
    module_training,
    pure_step,
    torch_adam,
    training,
    written_back,
)
from funcppo import optim
from funcppo.core import tree
from funcppo.losses import Batch
from funcppo.nets.networks import PolicyValue, dense

TITLE = "baseline"
EAGERLY = {"backends": ("none",), "modes": ("default",), "compiled": False}


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
    **EAGERLY | {"modes": ("default", "manual graph")},
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


for variant, is_whole in (
    ("as written", True),
    ("graph breaks allowed", False),
):
    way("1", ONE, variant)(partial(whole_step, fullgraph=is_whole))


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


way("3", THREE, "as written")(engine_and_function)


@way("3", THREE, "repaired")
def grad_traced(problem: Problem, compiler: Compiler) -> Training:
    """With the flag."""
    torch._dynamo.config.trace_autograd_ops = True
    return engine_and_function(problem, compiler)


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


@way("4", FOUR, "not compiled at all", **EAGERLY)
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


@way("5", FIVE, "not compiled at all", residual=True, **EAGERLY)
def residual_in_place_eager(problem: Problem, compiler: Compiler) -> Training:
    """The same module trained by plain eager autograd."""
    policy = ActionsPolicy(in_place(problem))
    optimizer = adam(problem, list(policy.parameters()))
    step = lambda batch: eager_step(
        policy, optimizer, lambda b: policy(b, actions=b.action), batch
    )
    return module_training(policy, step)


@way("5", FIVE, "repaired", residual=True)
def residual_out_of_place(problem: Problem, compiler: Compiler) -> Training:
    """The residual added out of place."""
    return called(problem, compiler, ActionsPolicy(problem), judged=True)


OUTSIDE = "as written: transform eager, loss compiled"
INSIDE = "repaired: transform inside the compiled function"
transform_outside = partial(eager_over_compiled, fullgraph=True)
way("6", SIX, OUTSIDE)(transform_outside)
way("6", SIX, "the same, graph breaks allowed")(
    partial(eager_over_compiled, fullgraph=False)
)


@way("6", SIX, INSIDE)
def transform_inside(problem: Problem, compiler: Compiler) -> Training:
    """One compiled function around transform and update."""
    return training(problem, compiler(pure_step(problem)))


for variant, build in (
    (OUTSIDE, transform_outside),
    (INSIDE, transform_inside),
):
    way("7", SEVEN, variant, backends=("aot_eager",))(build)


@way("8", EIGHT, "as written")
def minibatch_disabled(problem: Problem, compiler: Compiler) -> Training:
    """A compiled caller, a minibatch function kept out of it, a compiled loss inside."""
    loss = compiler(problem.loss)
    minibatch = torch.compiler.disable(pure_step(problem, loss))
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


def compiled_at(by: Callable[..., Training], is_inside: bool) -> Build:
    """The whole step compiled, or its loss alone under an eager transform."""

    def build(problem: Problem, compiler: Compiler) -> Training:
        wraps = (plain, compiler) if is_inside else (compiler, plain)
        return by(problem, *wraps)

    return build


for name, by in (("dict", by_dict), ("positional", by_position)):
    outside = f"as written: {name}, transform eager, loss compiled"
    way("10", TEN, outside)(compiled_at(by, is_inside=False))
    way("10", TEN, name)(compiled_at(by, is_inside=True))


@way("10", TEN, "flat vector")
def by_flat_vector(problem: Problem, compiler: Compiler) -> Training:
    """All leaves in one vector: so are the gradient and the moments."""
    shapes = [p.shape for p in tree.leaves(problem.params)]
    flat = (torch.cat([p.reshape(-1) for p in tree.leaves(problem.params)]),)
    loss = lambda vector, batch: problem.loss(
        tree.unflatten(problem.params, split(vector[0], shapes)), batch
    )
    step = compiler(pure_step(problem, loss))
    return Training(
        step=written_back((flat, optim.init(flat)), step),
        params=lambda: split(flat[0], shapes),
    )


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

    return module_training(policy, train)


@way("10", TEN, "Parameters first, tensors later", modes=("default",))
def parameters_first(problem: Problem, compiler: Compiler) -> Training:
    """The first call is given Parameters, the next ones tensors: another graph."""
    return fed_back(problem, compiler, Policy(problem).tree())


@way("11", ELEVEN, "as written: transform eager, inner function compiled")
def outer_eager(problem: Problem, compiler: Compiler) -> Training:
    """An eager step that transforms a plain function around a compiled loss."""
    loss = compiler(problem.loss)
    step = pure_step(problem, lambda p, b: loss(p, b))
    return training(problem, step)


@way("11", ELEVEN, "not compiled at all", **EAGERLY)
def nothing_compiled(problem: Problem, compiler: Compiler) -> Training:
    """The pure step, eager: the transform itself needs no compiler."""
    return training(problem, pure_step(problem))


way("11", ELEVEN, "inner function eager")(transform_inside)


@way("11", ELEVEN, "inner function compiled too")
def inner_compiled(problem: Problem, compiler: Compiler) -> Training:
    """A compiled step that transforms a compiled loss: Dynamo inlines it."""
    loss = compiler(problem.loss)
    step = pure_step(problem, lambda p, b: loss(p, b))
    return training(problem, compiler(step))
