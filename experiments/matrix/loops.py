"""I, continued: what a training loop asks of its step - memory, schedules, accumulation, scatters, code on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp

from experiments.matrix.approaches import eager_with
from experiments.matrix.ingredients import (
    DROPOUT,
    SHIP,
    seeded,
    torch_dropout,
    torch_dropout_oracle,
    trained,
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
        x = dense(params.hidden[0], obs.expand(2, *obs.shape))
        return heads(params, layer(x))

    return with_network(problem, apply)


def of_layer(layer: Layer) -> dict[str, Any]:
    """The oracle of ways with this layer: eager steps, by autograd."""

    def oracle(problem: Problem, batches: list[Batch]) -> list[Tensor]:
        given = with_layer(problem, layer)
        policy = Policy(given)
        optimizer = adam(given, list(policy.parameters()), foreach=False)
        for batch in batches:
            accumulate(policy, optimizer, policy.loss, [batch])
        return [p.detach() for p in policy.parameters()]

    return {"oracle": oracle}


# a loop over time


def step_of_memory(memory: Tensor, x: Tensor) -> Tensor:
    """The memory after a step."""
    return torch.tanh(x + DECAY * memory)


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
        memory = step_of_memory(memory, step)
        after.append(memory)
    return by_row(torch.stack(after))


def scan_steps(body: Callable[..., Any], first: Tensor, xs: Any) -> Any:
    """`scan` of PyTorch."""
    from torch._higher_order_ops.scan import scan

    return scan(body, first, xs)


def scanned(x: Tensor) -> Tensor:
    """Memories after each step, by `scan`."""

    def body(memory: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        after = step_of_memory(memory, step)
        return after, after.clone()

    steps = by_time(x).contiguous()
    return by_row(scan_steps(body, torch.zeros_like(steps[0]), steps)[1])


IN_TIME = of_layer(unrolled)


@way("I", RECURRENT, "unrolled by the compiler", **IN_TIME)
def recurrent_unrolled(problem: Problem, compiler: Compiler) -> Training:
    """A loop of Python: as many copies of its body as there are steps."""
    step = pure_step(with_layer(problem, unrolled))
    return training(problem, compiler(step))


@way("I", RECURRENT, "scan under func.grad", **IN_TIME)
def recurrent_scan(problem: Problem, compiler: Compiler) -> Training:
    """The transform around the operator."""
    step = pure_step(with_layer(problem, scanned))
    return training(problem, compiler(step))


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

    def step(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any]:
        return step_by_hand(problem, params, opt_state, batch)

    return training(problem, compiler(step))


def step_by_hand(
    problem: Problem, params: Any, opt_state: Any, batch: Batch
) -> tuple[Any, Any]:
    """A pure step whose gradient through time is written out."""

    def layer_in(params: MLPParams) -> Tensor:
        return dense(params.hidden[0], batch.obs.expand(2, *batch.obs.shape))

    def loss(params: MLPParams, memories: Tensor) -> Tensor:
        return with_layer(problem, lambda _: memories).loss(params, batch)[0]

    x, to_params = vjp(layer_in, params)
    memories = scanned(x)
    value, to_both = vjp(loss, params, memories)
    grads, memory_grads = to_both(torch.ones_like(value))

    def back(d: Tensor, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        after, grad = x
        inputs = (grad + d) * (1 - after * after)
        return DECAY * inputs, inputs.clone()

    steps = tree.map(lambda y: by_time(y).flip(0), (memories, memory_grads))
    last = torch.zeros_like(steps[0][0])
    _, inputs = scan_steps(back, last, steps)
    (more,) = to_params(by_row(inputs.flip(0)))
    return problem.finish(params, opt_state, tree.map(torch.add, grads, more))


# schedules


def annealed(problem: Problem, step: Any) -> Problem:
    """The problem with the rate of a step: a number, or a tensor where the step's number is one."""
    rate = problem.cfg.ppo.learning_rate * (1 - 0.2 * step)
    return replace(
        problem, scalars=problem.scalars._replace(learning_rate=rate)
    )


def annealed_oracle(problem: Problem, batches: list[Batch]) -> list[Tensor]:
    """Eager steps, each at its rate."""
    return trained(problem, rate_of_count(problem), batches)


def rate_of_count(problem: Problem) -> Step:
    """A step whose rate is a function of the optimizer's count, a tensor."""

    def step(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any]:
        count = opt_state.step.to(params.heads.bias.dtype)
        given = annealed(problem, count)
        return pure_step(given)(params, opt_state, batch)

    return step


@way("I", RATE, "a tensor of the step count", oracle=annealed_oracle)
def rate_tensor(problem: Problem, compiler: Compiler) -> Training:
    """What a graph reads again in every step."""
    return training(problem, compiler(rate_of_count(problem)))


@way("I", RATE, "a Python float", oracle=annealed_oracle)
def rate_float(problem: Problem, compiler: Compiler) -> Training:
    """An argument that is another number in every step."""

    def step_at(
        i: float, params: Any, opt_state: Any, batch: Batch
    ) -> tuple[Any, Any]:
        return pure_step(annealed(problem, i))(params, opt_state, batch)

    compiled, counts = compiler(step_at), iter(range(1000))

    def step(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any]:
        return compiled(float(next(counts)), params, opt_state, batch)

    return training(problem, step)


# gradient accumulation


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
    return [
        tree.map(lambda x: x[:n], batch),
        tree.map(lambda x: x[n:], batch),
    ]


def accumulated_oracle(problem: Problem, batches: list[Batch]) -> list[Tensor]:
    """The same, eager."""
    policy = Policy(problem)
    optimizer = adam(problem, list(policy.parameters()), foreach=False)
    for batch in batches:
        accumulate(policy, optimizer, policy.loss, halves(batch))
    return [p.detach() for p in policy.parameters()]


@way(
    "I",
    ACCUMULATION,
    "two backward() of the compiled loss",
    modes=("default", "reduce-overhead"),
    oracle=accumulated_oracle,
)
def accumulated(problem: Problem, compiler: Compiler) -> Training:
    """The second gradient is added to the first, which graph trees may have overwritten."""
    policy, optimizer = eager_with(problem, fused=True)
    loss = compiler(LossModule(policy))
    return module_training(
        policy,
        lambda batch: accumulate(policy, optimizer, loss, halves(batch)),
    )


# scatters


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


@way("I", SCATTERS, "slice_scatter", **of_layer(sliced))
def slice_scatter(problem: Problem, compiler: Compiler) -> Training:
    """In the loss, under func.grad."""
    return training(problem, compiler(pure_step(with_layer(problem, sliced))))


@way("I", SCATTERS, "diagonal_scatter", **of_layer(diagonal))
def diagonal_scatter(problem: Problem, compiler: Compiler) -> Training:
    """In the loss, under func.grad."""
    return training(problem, compiler(pure_step(with_layer(problem, diagonal))))


@way("I", SCATTERS, "scatter_add", **of_layer(indexed))
def scatter_add(problem: Problem, compiler: Compiler) -> Training:
    """In the loss, under func.grad."""
    return training(problem, compiler(pure_step(with_layer(problem, indexed))))


# dropout, and code on disk


@way(
    "I",
    DROPOUT,
    "torch's generator, align_random_eager",
    modes=("default",),
    oracle=torch_dropout_oracle,
)
def aligned_dropout(problem: Problem, compiler: Compiler) -> Training:
    """With the option of later versions to draw as eager code does."""
    import torch._inductor.config

    if not hasattr(torch._inductor.config, "align_random_eager"):
        raise ValueError("no option align_random_eager")
    torch._inductor.config.align_random_eager = True
    step = compiler(pure_step(with_network(problem, torch_dropout)))
    return training(problem, seeded(step))


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
        code = compiler(step).aot_compile((arguments[0], {}))
        code.save_compiled_function(path)
    with open(path, "rb") as file:
        loaded = torch.compiler.load_compiled_function(file)
    return training(problem, loaded, graphs=1)
