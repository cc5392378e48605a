"""I, continued: what a training loop asks of its step - memory, schedules, accumulation, scatters, code on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad

from experiments.matrix.approaches import eager_with
from experiments.matrix.ingredients import (
    DRAWN,
    DROPOUT,
    GENERATOR,
    SHIP,
    generator_dropout,
    loss_in,
    trained_by,
    with_network,
)
from experiments.matrix.problem import Policy, Problem, adam, heads
from experiments.matrix.registry import Compiler, Training, way
from experiments.matrix.steps import (
    LossModule,
    Step,
    module_training,
    pure_step,
    training,
)
from funcppo.core import tree
from funcppo.losses import Batch
from funcppo.nets.networks import MLPParams, PolicyValue, dense

RECURRENT, RATE = "a loop over time inside the loss", "an annealed rate"
ACCUMULATION, SCATTERS = "gradient accumulation", "gradients of scatters"
STEPS = 8  # of time, that the rows of a batch are
DECAY = 0.5  # of the memory from step to step

Layer = Callable[[Tensor], Tensor]


def with_layer(problem: Problem, layer: Layer) -> Problem:
    """The problem with a function of the hidden layer's inputs [2, rows, units] in place of tanh."""

    def apply(
        cfg: Any, world: Any, params: MLPParams, obs: Tensor
    ) -> PolicyValue:
        return heads(params, layer(inputs_of_layer(params, obs)))

    return with_network(problem, apply)


def inputs_of_layer(params: MLPParams, obs: Tensor) -> Tensor:
    """The hidden layer before its non-linear function."""
    return dense(params.hidden[0], obs.expand(2, *obs.shape))


def accumulate(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Batch], Tensor],
    parts: list[Batch],
) -> None:
    """The usual step over parts of a batch, whose gradients add up in `p.grad`."""
    optimizer.zero_grad()
    for part in parts:
        (loss(part) / len(parts)).backward()
    nn.utils.clip_grad_norm_(
        policy.parameters(), policy.problem.cfg.ppo.max_grad_norm
    )
    optimizer.step()


def halves(batch: Batch) -> list[Batch]:
    """Two parts of a batch."""
    n = len(batch.action) // 2
    parts = slice(n), slice(n, None)
    return [tree.map(lambda x, part=part: x[part], batch) for part in parts]


def usual_steps(
    layer: Layer | None, split: Callable[[Batch], list[Batch]]
) -> dict[str, Any]:
    """The oracle that takes the usual step eagerly: with a layer, over the parts of each batch."""

    def oracle(problem: Problem, batches: list[Batch]) -> list[Tensor]:
        given = with_layer(problem, layer) if layer else problem
        policy = Policy(given)
        optimizer = adam(given, list(policy.parameters()), foreach=False)
        for batch in batches:
            accumulate(policy, optimizer, policy.loss, split(batch))
        return [p.detach() for p in policy.parameters()]

    return {"oracle": oracle}


def whole(batch: Batch) -> list[Batch]:
    """A batch as its only part."""
    return [batch]


# a loop over time, and scatters


def by_time(x: Tensor) -> Tensor:
    """[2, rows, units] as [STEPS, 2, rows of a step, units]."""
    return x.unflatten(1, (STEPS, -1)).transpose(0, 1)


def by_row(x: Tensor) -> Tensor:
    """The inverse of `by_time`."""
    return x.transpose(0, 1).flatten(1, 2)


def unrolled(x: Tensor) -> Tensor:
    """Memories after each step, by a loop of Python."""
    memory, after = torch.zeros_like(by_time(x)[0]), []
    for step in by_time(x).unbind():
        memory = torch.tanh(step + DECAY * memory)
        after.append(memory)
    return by_row(torch.stack(after))


def scan_steps(body: Callable[..., Any], first: Tensor, xs: Any) -> Any:
    """`scan` of PyTorch."""
    from torch._higher_order_ops.scan import scan

    return scan(body, first, xs)


def scanned(x: Tensor) -> Tensor:
    """Memories after each step, by `scan`, whose body may not return a tensor twice."""

    def body(memory: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        inputs = step + DECAY * memory
        return torch.tanh(inputs), inputs

    steps = by_time(x).contiguous()
    _, inputs = scan_steps(body, torch.zeros_like(steps[0]), steps)
    return torch.tanh(by_row(inputs))


def sliced(x: Tensor) -> Tensor:
    """A layer with a `slice_scatter`."""
    x = torch.tanh(x)
    return torch.slice_scatter(x, 0.5 * x[..., :8], -1, 0, 8)


def diagonal(x: Tensor) -> Tensor:
    """A layer with a `diagonal_scatter`."""
    x = torch.tanh(x)
    return torch.diagonal_scatter(x, 0.5 * x.diagonal(0, 1, 2), 0, 1, 2)


def indexed(x: Tensor) -> Tensor:
    """A layer with a `scatter_add` whose indices meet."""
    x = torch.tanh(x)
    index = torch.arange(x.shape[-1], device=x.device) // 2
    return x.scatter_add(-1, index.expand_as(x), 0.5 * x)


def under_grad(layer: Layer) -> Callable[[Problem, Compiler], Training]:
    """The pure step with a layer, the transform inside the compiled function."""

    def build(problem: Problem, compiler: Compiler) -> Training:
        step = pure_step(with_layer(problem, layer))
        return training(problem, compiler(step))

    return build


IN_TIME = usual_steps(unrolled, whole)
for title, variant, layer, eager in (
    (RECURRENT, "unrolled by the compiler", unrolled, unrolled),
    (RECURRENT, "scan under func.grad", scanned, unrolled),
    (SCATTERS, "slice_scatter", sliced, sliced),
    (SCATTERS, "diagonal_scatter", diagonal, diagonal),
    (SCATTERS, "scatter_add", indexed, indexed),
):
    oracle = usual_steps(eager, whole)
    way("I", title, variant, **oracle)(under_grad(layer))


@way("I", RECURRENT, "scan in the compiled loss, eager backward", **IN_TIME)
def recurrent_backward(problem: Problem, compiler: Compiler) -> Training:
    """Autograd around the operator."""
    given = with_layer(problem, scanned)
    policy, optimizer = eager_with(given, fused=True)
    loss = compiler(LossModule(policy))
    return module_training(
        policy, lambda batch: accumulate(policy, optimizer, loss, [batch])
    )


@way("I", RECURRENT, "two scans, the gradient by hand", **IN_TIME)
def recurrent_by_hand(problem: Problem, compiler: Compiler) -> Training:
    """One scan makes the memories, one goes back through time; no transform is around either."""

    def read(
        cfg: Any, memories: Any, params: MLPParams, obs: Tensor
    ) -> PolicyValue:
        return heads(params, memories)

    reading = with_network(problem, read)

    def step(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any]:
        memories = scanned(inputs_of_layer(params, batch.obs))
        loss = lambda m, p: loss_in(reading, m, p, batch)[0]
        at_memories, grads = grad(loss, (0, 1))(memories, params)
        at_inputs = through_time(memories, at_memories)
        product = lambda p: (inputs_of_layer(p, batch.obs) * at_inputs).sum()
        grads = tree.map(torch.add, grads, grad(product)(params))
        return problem.finish(params, opt_state, grads)

    return training(problem, compiler(step))


def through_time(memories: Tensor, gradient: Tensor) -> Tensor:
    """The gradient at the layer's inputs of what has this gradient at the memories."""

    def back(d: Tensor, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        after, at_after = x
        inputs = (at_after + d) * (1 - after * after)
        return DECAY * inputs, inputs

    steps = tuple(by_time(y).flip(0) for y in (memories, gradient))
    _, inputs = scan_steps(back, torch.zeros_like(steps[0][0]), steps)
    return by_row(inputs.flip(0))


# schedules


def annealed(problem: Problem, step: Any) -> Problem:
    """The problem with the rate of a step: a number, or a tensor where the step's number is one."""
    rate = problem.cfg.ppo.learning_rate * (1 - 0.2 * step)
    scalars = problem.scalars._replace(learning_rate=rate)
    return replace(problem, scalars=scalars)


def rate_of_count(problem: Problem) -> Step:
    """A step whose rate is a function of the optimizer's count, a tensor."""

    def step(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any]:
        given = annealed(problem, opt_state.step.to(batch.obs.dtype))
        return pure_step(given)(params, opt_state, batch)

    return step


ANNEALED = {"oracle": trained_by(rate_of_count)}


@way("I", RATE, "a tensor of the step count", **ANNEALED)
def rate_tensor(problem: Problem, compiler: Compiler) -> Training:
    """What a graph reads again in every step."""
    return training(problem, compiler(rate_of_count(problem)))


@way("I", RATE, "a Python float", **ANNEALED)
def rate_float(problem: Problem, compiler: Compiler) -> Training:
    """An argument that is another number in every step."""
    compiled = compiler(
        lambda i, *given: pure_step(annealed(problem, i))(*given)
    )
    counts = iter(range(1000))
    return training(
        problem, lambda *given: compiled(float(next(counts)), *given)
    )


@way(
    "I",
    ACCUMULATION,
    "two backward() of the compiled loss",
    modes=("default", "reduce-overhead"),
    **usual_steps(None, halves),
)
def accumulated(problem: Problem, compiler: Compiler) -> Training:
    """The second gradient is added to the first, which graph trees may have overwritten."""
    policy, optimizer = eager_with(problem, fused=True)
    loss = compiler(LossModule(policy))
    return module_training(
        policy, lambda batch: accumulate(policy, optimizer, loss, halves(batch))
    )


# dropout, and code on disk


@way("I", DROPOUT, f"{GENERATOR}, align_random_eager", **DRAWN)
def aligned_dropout(problem: Problem, compiler: Compiler) -> Training:
    """With the option of later versions to draw as eager code does."""
    return generator_dropout("align_random_eager")(problem, compiler)


@way("I", SHIP, "aot_compile of the pure step, saved and loaded")
def saved_ahead(problem: Problem, compiler: Compiler) -> Training:
    """Compiled for one batch, written to a file and read again."""
    from torch._dynamo import config

    path = tempfile.mkdtemp(prefix="step-") + "/step"
    step, arguments = pure_step(problem), []

    def keep(*given: Any) -> Any:
        arguments.append(given)
        return step(*given)

    training(problem, keep).step(problem.batches[0])
    with config.patch(enable_aot_compile=True):
        compiled: Any = compiler(step)
        code = compiled.aot_compile((arguments[0], {}))
        code.save_compiled_function(path)
    with open(path, "rb") as file:
        loaded = torch.compiler.load_compiled_function(file)
    return training(problem, loaded, graphs=1)
