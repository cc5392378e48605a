"""Further ways: A to G make one graph of the whole step, H are the APIs that the report hoped for."""

import inspect
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

from experiments.matrix.problem import SIZE, Policy, Problem, adam, learn
from experiments.matrix.registry import Compiler, Training, way
from experiments.matrix.steps import (
    LossModule,
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
    stacked, opt_state = tree.map(
        lambda x: torch.stack([x] * LEARNERS),
        (problem.params, optim.init(problem.params)),
    )
    return Training(
        step=written_back((stacked, opt_state), compiler(step)),
        params=lambda: tree.leaves(stacked),
        learners=LEARNERS,
    )


D, F = "the step traced ahead of time", "aot_export_module(trace_joint=True)"
AHEAD = {"backends": ("inductor",), "modes": ("default", "manual graph")}


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


@way("D", D, "make_fx + compile_fx_inner", **AHEAD)
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


@way("D", D, "make_fx + standalone_compile", **AHEAD)
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


@way("D", D, "make_fx + export + AOTInductor", **AHEAD)
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


ONCE = {"backends": ("inductor",), "modes": ("default",)}
EXPORTED = ONCE | {"backends": ("eager",)}
HOPE = "hoped-for API"


def with_option(problem: Problem, compiler: Compiler, option: str) -> Training:
    """The usual step, compiled with an option of that name."""
    policy = Policy(problem)
    optimizer = adam(problem, list(policy.parameters()))
    step = compiler(
        lambda batch: learn(policy, optimizer, policy.loss, batch),
        **{option: True},
    )
    return module_training(policy, step)


# The report's first and second solution.
for option in ("trace_backward", "trace_grad_and_opt"):
    use = partial(with_option, option=option)
    way("H", HOPE, f"torch.compile({option}=True)", **ONCE)(use)


class UsualStep(nn.Module):
    """The usual step as a module, for torch.export."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.policy = Policy(problem)
        self.optimizer = adam(problem, list(self.policy.parameters()))

    def forward(self, leaves: list[Tensor]) -> Tensor:
        """Changes the parameters; returns one of them, since something must be returned."""
        batch = tree.unflatten(self.policy.problem.batches[0], leaves)
        learn(self.policy, self.optimizer, self.policy.loss, batch)
        return next(self.policy.parameters()).detach().clone()


@way("H", HOPE, "export of the usual step", **EXPORTED)
def export_usual(problem: Problem, compiler: Compiler) -> Training:
    """torch.export of backward() and optimizer.step()."""
    module = UsualStep(problem)
    program = torch.export.export(
        module, (tree.leaves(problem.batches[0]),)
    ).module()
    return module_training(
        module.policy, lambda batch: program(tree.leaves(batch)), graphs=1
    )


def export_as_it_stands(problem: Problem) -> torch.export.ExportedProgram:
    """torch.export tracing the pure step itself."""
    fn, leaves = flat_step(problem)
    return torch.export.export(StepModule(fn), (leaves,), strict=True)


@way("H", HOPE, "export of the pure step", **EXPORTED)
def export_pure(problem: Problem, compiler: Compiler) -> Training:
    """torch.export of func.grad_and_value and Adam as they stand."""
    program = export_as_it_stands(problem).module()
    return train_flat(problem, lambda *leaves: program(list(leaves)), graphs=1)


@way("H", HOPE, "AOTInductor package of the pure step", **AHEAD)
def package_pure(problem: Problem, compiler: Compiler) -> Training:
    """That export, compiled to a package and loaded again."""
    return packaged(problem, export_as_it_stands(problem))
