"""I: what else a training step may hold - autocast, dropout, batch normalisation, DDP - and other ways to ship it."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad_and_value
from torch.nn.functional import batch_norm, dropout
from torch.nn.parallel import DistributedDataParallel

from experiments.matrix.approaches import eager_with
from experiments.matrix.problem import (
    WORLD,
    Policy,
    Problem,
    adam,
    eager_step,
    heads,
)
from experiments.matrix.registry import Build, Compiler, Oracle, Training, way
from experiments.matrix.routes import EXPORTED, ONCE, exported, train_flat
from experiments.matrix.steps import (
    LossModule,
    Step,
    module_training,
    pure_step,
    training,
    written_back,
)
from funcppo import optim
from funcppo.core import random, tree
from funcppo.interfaces import Agent
from funcppo.losses import Batch, loss_fn
from funcppo.nets import networks as mlp
from funcppo.nets.networks import PolicyValue, dense

KEEP = 0.75  # probability that dropout keeps a unit
AUTOCAST, DROPOUT, NORM = "autocast", "dropout", "batch normalisation"
DDP, SHIP = "DistributedDataParallel", "other ways to run it"


def trained_by(make_step: Callable[[Problem], Step]) -> Oracle:
    """The oracle that takes one eager pure step a batch, where the problem's own does not describe it."""

    def oracle(problem: Problem, batches: list[Batch]) -> list[Tensor]:
        state = (problem.params, optim.init(problem.params))
        for batch in batches:
            state = make_step(problem)(*state, batch)
        return tree.leaves(state[0])

    return oracle


# autocast


def autocast_step(problem: Problem) -> Step:
    """The pure step, its loss under autocast in bfloat16; float64 is not cast."""
    device = problem.batches[0].obs.device.type
    loss = torch.autocast(device, torch.bfloat16, cache_enabled=False)(
        problem.loss
    )
    return pure_step(problem, loss)


@way(
    "I",
    AUTOCAST,
    "bfloat16 around the loss, inside the compiled step",
    oracle=trained_by(autocast_step),
)
def autocast_inside(problem: Problem, compiler: Compiler) -> Training:
    """Inductor rounds where eager code does, so that the two can be compared."""
    import torch._inductor.config

    torch._inductor.config.emulate_precision_casts = True
    return training(problem, compiler(autocast_step(problem)))


# dropout


def with_network(
    problem: Problem, apply: Callable[..., PolicyValue]
) -> Problem:
    """The problem with another network of the same parameters."""
    cfg = problem.cfg
    agent = Agent(cfg=cfg.agent.cfg, init=mlp.init_mlp, apply=apply)
    return replace(problem, cfg=replace(cfg, agent=agent))


def loss_in(
    problem: Problem, world: object, params: Any, batch: Batch
) -> tuple[Tensor, Any]:
    """`Problem.loss` with tensors that the network reads beside its parameters."""
    return loss_fn(problem.cfg, world, params, batch, problem.scalars)


def torch_dropout(
    cfg: Any, world: Any, params: mlp.MLPParams, obs: Tensor
) -> PolicyValue:
    """`mlp.apply` with dropout by torch's generator."""
    x = torch.tanh(dense(params.hidden[0], obs.expand(2, *obs.shape)))
    return heads(params, dropout(x, 1 - KEEP))


def seeded(step: Step) -> Step:
    """The step after its generator is set to the same seed."""

    def run(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any]:
        torch.manual_seed(0)
        return step(params, opt_state, batch)

    return run


def dropout_step(problem: Problem) -> Step:
    """The pure step with dropout by torch's generator."""
    return pure_step(with_network(problem, torch_dropout))


def generator_dropout(option: str = "") -> Build:
    """The step with an option of Inductor to draw as eager code does; without one it draws other numbers."""

    def build(problem: Problem, compiler: Compiler) -> Training:
        import torch._inductor.config as config

        if option and not hasattr(config, option):
            raise ValueError(f"no option {option}")
        if option:
            setattr(config, option, True)
        return training(problem, seeded(compiler(dropout_step(problem))))

    return build


DRAWN = {
    "modes": ("default",),
    "oracle": trained_by(lambda problem: seeded(dropout_step(problem))),
}
GENERATOR = "torch's generator"
way("I", DROPOUT, GENERATOR, **DRAWN)(generator_dropout())
fallback = way("I", DROPOUT, f"{GENERATOR}, fallback_random", **DRAWN)
fallback(generator_dropout("fallback_random"))


def key_dropout_apply(
    cfg: Any, key: Tensor, params: mlp.MLPParams, obs: Tensor
) -> PolicyValue:
    """`mlp.apply` with dropout by a key, which comes as the world."""
    x = torch.tanh(dense(params.hidden[0], obs.expand(2, *obs.shape)))
    kept = random.uniform(key, x.shape) < KEEP
    return heads(params, torch.where(kept, x / KEEP, 0.0))


def key_step(problem: Problem) -> Step:
    """A step whose dropout is a function of a key, which is made of the number of steps so far."""
    problem = with_network(problem, key_dropout_apply)

    def step(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any]:
        n_steps = opt_state.step.reshape(1).to(torch.int64)
        key = torch.cat([torch.zeros_like(n_steps), n_steps])
        grads, _ = grad_and_value(loss_in, argnums=2, has_aux=True)(
            problem, key, params, batch
        )
        return problem.finish(params, opt_state, grads)

    return step


@way("I", DROPOUT, "a function of an explicit key", oracle=trained_by(key_step))
def key_dropout(problem: Problem, compiler: Compiler) -> Training:
    """Random numbers as a function of an argument: the same ones compiled, eager and captured."""
    return training(problem, compiler(key_step(problem)))


# batch normalisation


class Moments(NamedTuple):
    """The buffers of batch normalisation."""

    mean: Tensor
    variance: Tensor


class NormalisedPolicy(Policy):
    """The policy with batch normalisation of its hidden layer."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        width = problem.params.hidden[0].bias.numel()
        like = self.weights[0].detach()
        self.register_buffer("mean", like.new_zeros(width))
        self.register_buffer("variance", like.new_ones(width))

    def loss(self, batch: Batch) -> Tensor:
        """It writes into the buffers."""
        normalised = with_network(self.problem, normalise)
        moments = Moments(self.mean, self.variance)
        return loss_in(normalised, moments, self.tree(), batch)[0]


def normalise(
    cfg: Any, moments: Moments, params: mlp.MLPParams, obs: Tensor
) -> PolicyValue:
    """`mlp.apply` with batch normalisation, which writes into its buffers; they come as the world."""
    x = dense(params.hidden[0], obs.expand(2, *obs.shape))
    by_unit = x.transpose(0, 1).flatten(1)
    by_unit = batch_norm(by_unit, moments.mean, moments.variance, training=True)
    return heads(params, by_unit.view(x.shape[1], 2, -1).transpose(0, 1).tanh())


def norm_oracle(problem: Problem, batches: list[Batch]) -> list[Tensor]:
    """The module, eager: its parameters, then its buffers."""
    policy = NormalisedPolicy(problem)
    optimizer = adam(problem, list(policy.parameters()))
    for batch in batches:
        eager_step(policy, optimizer, policy.loss, batch)
    return [*map(torch.detach, policy.parameters()), *policy.buffers()]


@way("I", NORM, "buffers written inside", oracle=norm_oracle)
def norm_in_place(problem: Problem, compiler: Compiler) -> Training:
    """The transform over a network that writes into tensors from outside."""
    return normalised_training(problem, compiler, copied=False)


@way("I", NORM, "buffers in, buffers out", oracle=norm_oracle)
def norm_returned(problem: Problem, compiler: Compiler) -> Training:
    """The network writes into copies, which the loss returns beside its value."""
    return normalised_training(problem, compiler, copied=True)


def normalised_training(
    problem: Problem, compiler: Compiler, copied: bool
) -> Training:
    """A pure step whose state holds the buffers; `copied`: it leaves those that it is given alone."""
    params = tree.map(torch.clone, problem.params)
    policy = NormalisedPolicy(problem)
    moments = Moments(*(b.clone() for b in policy.buffers()))
    state = (params, optim.init(params), moments)
    network = with_network(problem, normalise)

    def step(
        params: Any, opt_state: Any, moments: Moments, batch: Batch
    ) -> Any:
        def loss(params: Any, batch: Batch) -> tuple[Tensor, Moments]:
            new = tree.map(torch.clone, moments) if copied else moments
            return loss_in(network, new, params, batch)[0], new

        grads, (_, new) = grad_and_value(loss, has_aux=True)(params, batch)
        return *problem.finish(params, opt_state, grads), new

    return Training(
        step=written_back(state, compiler(step)),
        params=lambda: tree.leaves((state[0], state[2])),
    )


# several processes


def join_group_of_one(problem: Problem) -> None:
    """Make a process group of this process alone."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if problem.batches[0].obs.is_cuda else "gloo",
            store=dist.HashStore(),
            rank=0,
            world_size=1,
        )


def wrapped(
    problem: Problem, wrap: Callable[[nn.Module], Callable[[Batch], Tensor]]
) -> Training:
    """The usual step, the loss of its policy in some wrapping of DDP."""
    join_group_of_one(problem)
    policy, optimizer = eager_with(problem, fused=True)
    loss = wrap(LossModule(policy))
    return module_training(
        policy, lambda batch: eager_step(policy, optimizer, loss, batch)
    )


@way("I", DDP, "the wrapped loss compiled, eager backward, fused Adam")
def compiled_around_ddp(problem: Problem, compiler: Compiler) -> Training:
    """torch.compile of the wrapper."""
    return wrapped(
        problem, lambda module: compiler(DistributedDataParallel(module))
    )


@way("I", DDP, "the compiled loss wrapped, eager backward, fused Adam")
def ddp_around_compiled(problem: Problem, compiler: Compiler) -> Training:
    """The wrapper of a compiled module; hooks of the eager backward reduce the gradients."""
    return wrapped(
        problem, lambda module: DistributedDataParallel(compiler(module))
    )


@way("I", DDP, "a collective of the gradient inside the compiled step")
def collective_inside(problem: Problem, compiler: Compiler) -> Training:
    """Without the wrapper: the mean over processes as an operator of the pure step."""
    import torch.distributed as dist

    join_group_of_one(problem)
    ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name

    def mean(g: Tensor) -> Tensor:
        total = ops.wait_tensor(ops.all_reduce(g, "sum", name))
        return total / dist.get_world_size()

    def step(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any]:
        grads, _ = grad_and_value(problem.loss, has_aux=True)(params, batch)
        return problem.finish(params, opt_state, tree.map(mean, grads))

    return training(problem, compiler(step))


# other ways to run it


@way(
    "I",
    SHIP,
    "make_graphed_callables",
    backends=("none",),
    modes=("graphed callables",),
    compiled=False,
)
def graphed_callables(problem: Problem, compiler: Compiler) -> Training:
    """torch records forward and backward of the loss as a CUDA graph each; the optimizer stays outside."""
    policy, optimizer = eager_with(problem, fused=True)
    flat = FlatLossModule(policy)
    sample = tuple(x.clone() for x in tree.leaves(problem.batches[0]))
    graphed = torch.cuda.make_graphed_callables(flat, sample)
    loss = lambda batch: graphed(*tree.leaves(batch))
    return module_training(
        policy, lambda batch: eager_step(policy, optimizer, loss, batch)
    )


class FlatLossModule(LossModule):
    """The loss of the leaves of a batch."""

    def forward(self, *leaves: Tensor) -> Tensor:
        """The loss."""
        like = self.policy.problem.batches[0]
        return self.policy.loss(tree.unflatten(like, list(leaves)))


@way("I", SHIP, "ExecuTorch program of the pure step", **EXPORTED)
def executorch(problem: Problem, compiler: Compiler) -> Training:
    """The exported graph of the step, run by ExecuTorch's portable operators."""
    from executorch.exir import to_edge
    from executorch.runtime import Runtime

    core = exported(problem).run_decompositions()
    program = to_edge(core).to_executorch()
    method = Runtime.get().load_program(program.buffer).load_method("forward")
    return train_flat(
        problem, lambda *leaves: method.execute(list(leaves)), graphs=1
    )


def network_oracle(problem: Problem, batches: list[Batch]) -> list[Tensor]:
    """What the network makes of the last batch."""
    agent = problem.cfg.agent
    return tree.leaves(
        agent.apply(agent.cfg, WORLD, problem.params, batches[-1].obs)
    )


class FlatNetwork(LossModule):
    """A network whose output is a plain tuple."""

    def forward(self, obs: Tensor) -> tuple[Tensor, ...]:
        """Logits and value."""
        return tuple(self.policy(obs))


@way(
    "I",
    SHIP,
    "AOTInductor package of the network, for inference",
    **ONCE,
    oracle=network_oracle,
)
def packaged_network(problem: Problem, compiler: Compiler) -> Training:
    """No training: the policy exported, compiled to a package and loaded again."""
    program = torch.export.export(
        FlatNetwork(Policy(problem)), (problem.batches[0].obs,)
    )
    path = tempfile.mkdtemp(prefix="network-") + "/network.pt2"
    torch._inductor.aoti_compile_and_package(program, package_path=path)
    loaded = torch._inductor.aoti_load_package(path)
    output: list[Tensor] = []

    def act(batch: Batch) -> None:
        output[:] = tree.leaves(loaded(batch.obs))

    return Training(step=act, params=lambda: output, graphs=1)
