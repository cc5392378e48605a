"""How a training step is compiled: whole, in parts, or not at all, and why not faster.

    one-graph   forward, loss, backward, clipping and Adam of a minibatch in one graph
    forward     forward and loss compiled, backward by autograd, fused Adam
    eager       nothing of the minibatch update compiled

`select_strategy` tries them in this order, and takes the first one whose update equals the eager update, because some
compilers are fast and wrong. The rollout parts (random inputs, rollout step, advantages) are compiled one by one,
whatever the strategy. All functions tried are pure, so trials leave the user's state as it was.

`compile_function` compiles a single function.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.optim.adam import adam

from funcppo.core import tree
from funcppo.core.settings import FieldError
from funcppo.runtime import cache, reasons
from funcppo.runtime.cache import CompiledFunction
from funcppo.runtime.capture import (
    CapturedStep,
    ReplayMode,
    TreeFunction,
    are_trees_demanded,
)
from funcppo.runtime.collectives import (
    Agree,
    alone,
    attempt_together,
    backend_options,
)
from funcppo.runtime.equivalence import (
    DEFAULT_TOLERANCE,
    TF32_TOLERANCE,
    check_output,
    check_update,
)
from funcppo.runtime.reasons import ReasonCode

# from the fastest to the most robust
STRATEGIES = ("one-graph", "forward", "eager")
# Fields of `train_step.StepFunctions`.
ROLLOUT_PARTS = ("rollout_step", "sample_randomness", "build_batch")
MAX_CHECKED_STEPS = 4  # of a rollout, over which rollout parts are compared

Args = ParamSpec("Args")
Result = TypeVar("Result")
Params = TypeVar("Params")
Moments = TypeVar("Moments")  # `optim.AdamState`
Carry = TypeVar("Carry")
Inputs = TypeVar("Inputs")

# the arguments of some calls of each part, by the part's name
_Calls = Mapping[str, list[tuple[Any, ...]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A strategy or a part that is not in use, and why."""

    name: str  # of the strategy, the rollout part or the replay mode
    error_type: str  # class of the exception
    message: str  # first line of its text
    torch_version: str = torch.__version__
    code: ReasonCode = ReasonCode.OTHER


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyRecord:
    """How the training step runs on this machine, and why not faster."""

    strategy: str  # the one in use
    # of faster strategies, in the order of trial, and of rollout parts that run eagerly
    failures: tuple[Failure, ...]
    torch_version: str
    device: str
    backend: str  # of torch.compile
    # how the compiled step is replayed: see `capture.CapturedStep`
    replay_mode: ReplayMode = "none"
    # why nothing is compiled; empty if something is
    skip_reason: str = ""
    skip_code: ReasonCode | None = None  # the same as a code
    # why a step on a GPU is not replayed; None if it is, and on a CPU
    fallback_code: ReasonCode | None = None
    # of all updates of a run, at most the time left for them, by which auto decided whether to compile; None if that
    # was not measured
    uncompiled_seconds: float | None = None
    # "kernel": the rollout is one kernel of Triton; "steps": its steps are called one by one
    rollout: Literal["kernel", "steps"] = "steps"
    # why it is no kernel; empty if it is one, and where there is no GPU
    rollout_reason: str = ""
    rollout_code: ReasonCode | None = None  # the same as a code
    # "kernels": kernels of Triton compute the network of the update and its gradient; "operators": those of PyTorch do
    network: Literal["kernels", "operators"] = "operators"
    # why these are no kernels; empty if they are, and where there is no GPU
    network_reason: str = ""
    network_code: ReasonCode | None = None  # the same as a code


class SelectedStrategy(NamedTuple):
    """The outcome of `select_strategy`."""

    parts: Any  # the parts to run, some of them compiled
    record: StrategyRecord  # the strategy in use, and the failures of others


def reason_against_compiling() -> str:
    """What turns the compiler of PyTorch off: an environment variable or a stance; empty if nothing does."""
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        if os.environ.get(name, "0") == "1":
            return f"{name}=1"
    if "torch._dynamo" not in sys.modules:  # an import takes seconds
        return ""
    if torch._dynamo.config.disable:
        return "torch._dynamo.config.disable"
    # PyTorch has no public function that returns the stance.
    stance = getattr(torch._dynamo.eval_frame, "_stance", None)
    if getattr(stance, "stance", "default") == "force_eager":
        return 'torch.compiler.set_stance("force_eager")'
    return ""


def check_available(strategy: str) -> None:
    """Check that a strategy is not refused, before any work for it.

    Raises:
      FieldError: it compiles, is asked for by name, and PyTorch's compiler is turned off; or it compiles nothing, and
        `cudagraph_trees_only` asks for graphs of compiled functions.
    """
    _reason_to_stay_eager(strategy)


def compile_function(
    fn: Callable[Args, Result],
    backend: str = "inductor",
    use_custom_passes: bool = True,
    **inductor_options: object,
) -> Callable[Args, Result]:
    """Compile a function as one graph of fixed shapes; a graph break is an error.

    The function itself is returned where PyTorch's compiler is turned off (`reason_against_compiling`).

    Args:
      fn: a pure function of trees of tensors and frozen settings, called with positional arguments only.
      backend: a backend of `torch.compile`; only Inductor's code is saved for later processes, and only Inductor
        records CUDA graphs where `cudagraph_trees_only` asks for them.
      use_custom_passes: rewrite matrix products (`inductor/matmul_pass.py`), and fuse more than Inductor by default.
      **inductor_options: further options of Inductor.
    """
    if reason_against_compiling():
        return fn
    if backend != "inductor":
        options = backend_options(backend)
        return torch.compile(fn, fullgraph=True, dynamic=False, **options)
    options: dict[str, Any] = {}
    if use_custom_passes:
        # a softmax over few actions would be a kernel of its own otherwise
        options["online_softmax"] = False
        if torch.cuda.is_available():
            # Inductor copies what a kernel overwrites before each trial of its block sizes. Copies take longer than
            # small kernels, so that all sizes seem equal, and a slow one may be chosen.
            options["inplace_buffers"] = False
    options.update(inductor_options)
    prepare = _load_passes if use_custom_passes else _load_lowering
    compiled: Any = (
        TreeFunction(fn, {**prepare(), **options})
        if are_trees_demanded()
        else CompiledFunction(fn, options, prepare)
    )
    return cast("Callable[Args, Result]", compiled)


def _load_lowering() -> dict[str, Any]:
    """Teach Inductor this package's random bits. A run that compiles nothing can do without its 75 MB."""
    # The first import registers the lowering.
    from funcppo.runtime.inductor import threefry_lowering  # noqa: F401

    return {}


def _load_passes() -> dict[str, Any]:
    """As `_load_lowering`; options with this package's pass over graphs."""
    from funcppo.runtime.inductor.matmul_pass import MatmulPass

    _load_lowering()
    return {"post_grad_custom_pre_pass": MatmulPass()}


def select_strategy(
    collect: Callable[..., Any],
    parts: Any,
    cfg: Any,
    world: object,
    state: Any,
    strategy: str = "auto",
    backend: str = "inductor",
    tolerance: float = DEFAULT_TOLERANCE,
    rollout_parts: tuple[str, ...] = ROLLOUT_PARTS,
    agree: Agree = alone,
) -> SelectedStrategy:
    """Compile the parts of a training step by the fastest strategy that works here.

    Args:
      collect: `train_step.collect`.
      parts: the eager parts, `train_step.EAGER_PARTS`.
      cfg: the configuration of the training step.
      world: data that the training step reads.
      state: a training state. Trials compute a rollout and minibatch updates from it and drop the results.
      strategy: the only candidate; "auto": all of them, in the order of `STRATEGIES`.
      backend: a backend of `torch.compile`.
      tolerance: largest relative difference from eager: see `equivalence.py`. At least `TF32_TOLERANCE` where PyTorch
        may use TF32. Above that, for products of lower precision, the rollout parts are not compared, because rounding
        changes some of the random choices.
      rollout_parts: which of `ROLLOUT_PARTS` to compile; the others stay eager.
      agree: of several processes that learn together, so that all use one strategy.

    Returns:
      parts: the parts to run instead of the eager ones.
      record: the strategy in use, and the failures of others.

    Raises:
      ValueError: there is no such strategy, or it compiles and PyTorch's compiler is turned off, or it compiles nothing
        and `cudagraph_trees_only` asks for graphs of compiled functions; or the folder of compiled code is refused.
      Exception: whatever a strategy that is chosen by name raises.
    """
    device: torch.device = state.key.device
    record = StrategyRecord(
        strategy="eager",
        failures=(),
        torch_version=torch.__version__,
        device=str(device),
        backend=backend,
    )
    reason, code = _common_reason_to_stay_eager(strategy, agree)
    if code is not None:
        skipped = {"skip_reason": reason, "skip_code": code}
        return SelectedStrategy(parts, dataclasses.replace(record, **skipped))

    cache.use_folder()
    if _may_use_tf32(device):
        tolerance = max(tolerance, TF32_TOLERANCE)
    trial = _Trial(
        backend=backend,
        tolerance=tolerance,
        raise_on_failure=strategy != "auto",
        agree=agree,
        strategies=_strategies_to_try(strategy),
        on_gpu=device.type == "cuda",
    )
    if trial.may_use_kernels:
        from funcppo.runtime.env_kernel import rollout_kernel

        rollout_kernel.prepare_triton(device)
        trial.find_kernels(parts, cfg)
    calls = _record_calls(collect, parts, cfg, world, state)
    compiled = trial.compile_rollout(parts, calls, rollout_parts)
    collected = collect(cfg, world, state, compiled)
    args = (cfg, world, state.params, collected.batch, collected.scalars)
    compiled = trial.compile_update(compiled, args, collected)
    record = dataclasses.replace(
        record, failures=tuple(trial.failures), **trial.found
    )
    return SelectedStrategy(compiled, record)


def _strategies_to_try(strategy: str) -> tuple[str, ...]:
    """The strategies to try, in this order."""
    if strategy != "auto":
        return (strategy,)
    # There are graphs of compiled functions only.
    needs_compiler = are_trees_demanded()
    return STRATEGIES[:-1] if needs_compiler else STRATEGIES


def with_capture(
    record: StrategyRecord, captured: CapturedStep[Any, Any]
) -> StrategyRecord:
    """The record of a strategy, extended by how its step is replayed, and why not as a CUDA graph if it is on a GPU."""
    if captured.replay_mode == "none" and record.device.startswith("cuda"):
        failure = Failure(
            name="cuda-graph",
            error_type="CaptureError",
            message=captured.fallback_reason,
            code=ReasonCode.NOT_CAPTURED,
        )
        record = dataclasses.replace(
            record,
            failures=(*record.failures, failure),
            fallback_code=captured.fallback_code,
        )
    return dataclasses.replace(record, replay_mode=captured.replay_mode)


def choices(record: StrategyRecord) -> dict[str, str]:
    """What processes that learn together must have in common, by name."""
    return {
        "strategy": record.strategy,
        "rollout": record.rollout,
        "network": record.network,
        "replay mode": record.replay_mode,
    }


def with_host_environment(record: StrategyRecord) -> StrategyRecord:
    """The record of a strategy, extended by why the rollout step runs eagerly where environments step on the host."""
    failure = Failure(
        name="rollout_step",
        error_type="HostEnvironment",
        message="the environment steps on the host, which can be neither compiled nor captured",
        code=ReasonCode.HOST_ENVIRONMENT,
    )
    return dataclasses.replace(record, failures=(failure, *record.failures))


def _common_reason_to_stay_eager(
    strategy: str, agree: Agree
) -> tuple[str, ReasonCode | None]:
    """As `_reason_to_stay_eager`, of this process or of another that learns with it."""
    reason, code = _reason_to_stay_eager(strategy)
    found = agree("compiling", reason)
    if found and code is None:
        return f"another process stays eager: {found}", ReasonCode.DISABLED
    return reason, code


def _reason_to_stay_eager(strategy: str) -> tuple[str, ReasonCode | None]:
    """Why nothing is compiled for a strategy that is asked for, as text and as code; empty and None if something is.

    Raises:
      FieldError: there is no such strategy; or it compiles, is asked for by name, and the compiler is turned off; or it
        compiles nothing, and CUDAGraph Trees are asked for.
    """
    choices = ("auto", *STRATEGIES)
    if strategy not in choices:
        raise FieldError("strategy", ", ".join(choices), strategy)
    reason = reason_against_compiling()
    if are_trees_demanded() and (strategy == "eager" or reason):
        expected = "one that compiles, for CUDAGraph Trees"
        if reason:
            expected = f"{expected}, but {reason} turns the compiler off"
        raise FieldError("strategy", expected, strategy)
    if strategy == "eager":
        return "eager was asked for", ReasonCode.NOT_REQUESTED
    if reason and strategy != "auto":
        expected = f"auto or eager, since {reason} turns the compiler off"
        raise FieldError("strategy", expected, strategy)
    if reason:
        return f"{reason} turns the compiler off", ReasonCode.DISABLED
    return "", None


def _may_use_tf32(device: torch.device) -> bool:
    """Return whether float32 matrix products may be of lower precision."""
    precision = torch.get_float32_matmul_precision()
    return device.type == "cuda" and precision != "highest"


def _record_calls(
    collect: Callable[..., Any],
    parts: Any,
    cfg: object,
    world: object,
    state: object,
) -> _Calls:
    """Arguments of the first calls of each rollout part, from a short eager rollout."""
    calls: dict[str, list[tuple[Any, ...]]] = {}

    def with_recording(name: str) -> Callable[..., Any]:
        part = getattr(parts, name)

        def record_and_call(*args: object) -> object:
            calls.setdefault(name, []).append(args)
            return part(*args)

        return record_and_call

    recording_parts = {name: with_recording(name) for name in ROLLOUT_PARTS}
    short_parts = dataclasses.replace(
        parts, scan=_scan_first_steps, **recording_parts
    )
    collect(cfg, world, state, short_parts)
    return calls


def _scan_first_steps(
    fn: Callable[[Carry, Inputs], tuple[Carry, Result]],
    carry: Carry,
    xs: Inputs,
) -> tuple[Carry, Result]:
    """As a scan, but the outputs of the last of a few steps stand for all that follow."""
    n_steps = tree.length(xs)
    outputs: list[Result] = []
    for t in range(min(MAX_CHECKED_STEPS, n_steps)):
        carry, y = fn(carry, tree.item(xs, t))
        outputs.append(y)
    outputs += [outputs[-1]] * (n_steps - len(outputs))
    return carry, _stack(outputs)


def _stack(trees: Sequence[Result]) -> Result:
    """One tree whose leaves are those of several, stacked."""
    return tree.map(lambda *leaves: torch.stack(leaves), *trees)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """Settings of the trials of strategies, and what they have found so far."""

    backend: str
    tolerance: float
    # the strategy is chosen by name, so that its failure is an error
    raise_on_failure: bool
    agree: Agree
    strategies: tuple[str, ...]  # to try, in this order
    on_gpu: bool
    failures: list[Failure] = field(default_factory=list)
    # of the record
    found: dict[str, Any] = field(default_factory=dict)
    # functions of the step, `train_step.KernelFunctions`; empty, or one element
    kernels: list[Any] = field(default_factory=list)

    @property
    def may_use_kernels(self) -> bool:
        """Whether kernels of Triton may take the place of what Inductor compiles."""
        return self.on_gpu and self.backend == "inductor"

    def find_kernels(self, parts: Any, cfg: object) -> None:
        """Find kernels for the network of the update, where the minibatch step is to be compiled as a whole."""
        if self.strategies[0] != "one-graph":
            return
        reason = parts.kernels.reason_against(cfg)
        code = ReasonCode.UNSUPPORTED
        if not reason and are_trees_demanded():
            reason = "CUDAGraph Trees are asked for"
            code = ReasonCode.NOT_REQUESTED
        if reason:
            self._note_no_kernel("network", reason, code)
        else:
            self.kernels.append(parts.kernels)

    def compile_rollout(
        self, parts: Any, calls: _Calls, names: tuple[str, ...]
    ) -> Any:
        """The parts with those of the rollout compiled that can be."""
        compiled = {}
        if "rollout_step" in names and self.may_use_kernels:
            unroll = self._compile_unroll(parts, calls["rollout_step"])
            if unroll is not None:
                compiled["unroll"] = unroll
        for name in names:
            if name == "rollout_step" and "unroll" in compiled:
                continue
            attempts = self._rollout_attempts(name, parts, calls[name])
            try:
                compiled[name] = self._first_that_works(attempts)
            except Exception:
                if self.raise_on_failure:
                    raise
        return dataclasses.replace(parts, **compiled)

    def _first_that_works(
        self, attempts: Iterable[tuple[str, Callable[[], Result]]]
    ) -> Result:
        """The result of the first attempt that succeeds in all processes; the failures of others are recorded.

        Args:
          attempts: the name of each, and what it calls; at least one.

        Raises:
          Exception: that of the last one, if all fail.
        """
        last_error: Exception | None = None
        for name, attempt in attempts:
            try:
                with attempt_together(self.agree, name):
                    return attempt()
            except Exception as error:
                self.failures.append(_failure(name, error))
                last_error = error
        assert last_error is not None
        raise last_error

    def _rollout_attempts(
        self, name: str, parts: Any, calls: list[tuple[Any, ...]]
    ) -> Iterator[tuple[str, Callable[[], Callable[..., Any]]]]:
        """Ways to compile a rollout part, each with a check on the arguments of some calls."""
        part = getattr(parts, name)
        # Rounding changes some of the random choices of the others.
        is_exact = self.tolerance <= TF32_TOLERANCE
        for kernels in self.kernels:
            by_kernels = getattr(kernels, name, None)
            if by_kernels is None:
                continue
            checked, compare = calls, is_exact
            if name == "build_batch":
                checked = [*calls, *map(_with_truncations, calls)]
                compare = True
            attempt = partial(self._compile_and_check, part, checked)
            yield (
                f"{name} by kernels",
                partial(attempt, by_kernels, True, compare),
            )
        attempt = partial(self._compile_and_check, part, calls, part)
        if self.backend == "inductor":
            yield (
                f"{name} with custom passes",
                partial(attempt, True, is_exact),
            )
        yield name, partial(attempt, False, is_exact)

    def _compile_and_check(
        self,
        eager: Callable[..., Any],
        calls: list[tuple[Any, ...]],
        fn: Callable[..., Any],
        use_custom_passes: bool,
        compare: bool,
    ) -> Callable[..., Any]:
        """A function compiled in place of the eager one, after some calls of it."""
        compiled = compile_function(fn, self.backend, use_custom_passes)
        for args in calls:
            actual = compiled(*args)  # compiles at the first call
            if compare:
                check_output(actual, eager(*args), self.tolerance)
        return compiled

    def _compile_unroll(
        self, parts: Any, steps: list[tuple[Any, ...]]
    ) -> Callable[..., Any] | None:
        """The whole rollout as one kernel, after a check on its first steps; None if there is none."""
        if are_trees_demanded():
            reason = "CUDAGraph Trees are asked for"
            self._note_no_kernel("rollout", reason, ReasonCode.NOT_REQUESTED)
            return None
        # Each with what computes the values afterwards, or None if the step does.
        forms = [(x.actor_step, x.values) for x in self.kernels]
        forms.append((parts.rollout_step, None))
        attempts = [
            ("rollout", partial(self._unroll_by_kernel, parts, steps, *form))
            for form in forms
        ]
        try:
            unroll = self._first_that_works(attempts)
        except Exception:
            self._note_failed_kernel("rollout")
            return None
        self.found["rollout"] = "kernel"
        return unroll

    def _unroll_by_kernel(
        self,
        parts: Any,
        steps: list[tuple[Any, ...]],
        step: Any,
        values: Callable[..., Any] | None,
    ) -> Callable[..., Any]:
        """The kernel of a rollout, of a step and of what computes the values afterwards."""
        from funcppo.runtime.env_kernel import rollout_kernel

        cfg, *args = steps[0]
        first = rollout_kernel.StepArguments(*args)
        kernel = rollout_kernel.compile_unroll(step, cfg, first, values)

        states, transitions = zip(*(parts.rollout_step(*x) for x in steps))
        random_inputs = [args[-1] for args in steps]
        actual = kernel(cfg, *first[:-1], _stack(random_inputs))
        expected = (states[-1], _stack(transitions))
        if self.tolerance <= TF32_TOLERANCE:
            check_output(actual, expected, self.tolerance)
        return kernel

    def compile_update(
        self, parts: Any, args: tuple[Any, ...], collected: Any
    ) -> Any:
        """The parts with the minibatch step of the first strategy that works.

        Args:
          args: of the minibatch step, but for the update state and the minibatch.
          collected: the inputs of the minibatch updates, `train_step.RolloutResult`.
        """
        attempts = self._update_attempts(parts, args, collected)
        step, found = self._first_that_works(attempts)
        self.found.update(found)
        if found["strategy"] == "one-graph" and "network" not in found:
            self._note_failed_kernel("network")
        return dataclasses.replace(parts, minibatch_step=step)

    def _update_attempts(
        self, parts: Any, args: tuple[Any, ...], collected: Any
    ) -> Iterator[tuple[str, Callable[[], tuple[Any, dict[str, Any]]]]]:
        """Ways to make the minibatch step: each returns it, and fields of the record, after a check on minibatches."""

        def attempt(
            strategy: str, step: Any, use_custom_passes: bool, **found: str
        ) -> tuple[Any, dict[str, Any]]:
            compile_part = partial(
                compile_function,
                backend=self.backend,
                use_custom_passes=use_custom_passes,
            )
            compiled = _build_minibatch_step(
                strategy, step, parts.minibatch_loss, compile_part
            )
            check_update(
                partial(compiled, *args),
                partial(parts.minibatch_step, *args),
                collected.update_state,
                collected.minibatches,
                self.tolerance,
            )
            return compiled, {"strategy": strategy, **found}

        eager = parts.minibatch_step
        for strategy in self.strategies:
            for kernels in self.kernels if strategy == "one-graph" else ():
                by_kernels = kernels.minibatch_step
                yield (
                    "network",
                    partial(
                        attempt, strategy, by_kernels, True, network="kernels"
                    ),
                )
            if self.backend == "inductor" and strategy != "eager":
                name = f"{strategy} with custom passes"
                yield name, partial(attempt, strategy, eager, True)
            yield strategy, partial(attempt, strategy, eager, False)

    def _note_no_kernel(
        self, place: str, reason: str, code: ReasonCode
    ) -> None:
        """Note why no kernel has the place of the rollout or of the network."""
        self.found[f"{place}_reason"] = reason
        self.found[f"{place}_code"] = code

    def _note_failed_kernel(self, place: str) -> None:
        """Move the failure of a kernel, if there is one, from the failures to the fields of its place."""
        for failure in [x for x in self.failures if x.name == place]:
            self.failures.remove(failure)
            self._note_no_kernel(place, failure.message, failure.code)


def _with_truncations(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of `build_batch` with all episodes truncated at each step: a short rollout has hardly any."""
    *before, trajectory, scalars, memory = args
    truncated = ~trajectory.terminated
    return *before, trajectory._replace(truncated=truncated), scalars, memory


def _build_minibatch_step(
    strategy: str,
    step: Callable[..., Any],
    loss: Callable[..., Any],
    compile_part: Callable[..., Any],
) -> Callable[..., Any]:
    """The minibatch step of a strategy, not called yet.

    Args:
      step: the eager one.
      loss: of a minibatch, which `forward` compiles.
    """
    if strategy == "one-graph":
        return compile_part(step)
    if strategy == "eager":
        return step
    gradient_fn = partial(_gradient_by_autograd, compile_part(loss))
    return partial(step, gradient_fn=gradient_fn, adam_update=fused_adam)


def _gradient_by_autograd(
    loss: Callable[..., tuple[Tensor, Result]],
    cfg: object,
    world: object,
    params: Params,
    *args: object,
) -> tuple[Params, Result]:
    """The gradient of `loss` in `params` by the autograd engine, and the metrics of the loss."""
    leaves = [x.detach().requires_grad_() for x in tree.leaves(params)]
    with torch.enable_grad():
        variables = tree.unflatten(params, leaves)
        value, metrics = loss(cfg, world, variables, *args)

    leaf_grads = torch.autograd.grad(value, leaves, materialize_grads=True)
    grads = tree.unflatten(params, list(leaf_grads))
    metrics = tree.map(torch.Tensor.detach, metrics)
    return grads, metrics


def fused_adam(
    cfg: Any,
    grads: Params,
    state: Moments,
    params: Params,
    learning_rate: Tensor,
) -> tuple[Params, Moments]:
    """The new parameters and the new state after one step, as `optim.update`, by PyTorch's fused kernel.

    The kernel updates in place, so it works on copies.

    Args:
      cfg: settings of Adam, `config.AdamConfig`.
      grads: the gradient, a tree like `params`.
      state: step count and running means, `optim.AdamState`.
      params: the parameters, a tree.
      learning_rate: step size, a scalar on the device.
    """
    moments: Any = state
    new_params = [x.clone() for x in tree.leaves(params)]
    mu = [x.clone() for x in tree.leaves(moments.mu)]
    nu = [x.clone() for x in tree.leaves(moments.nu)]
    steps = [moments.step.to(torch.float32, copy=True) for _ in new_params]
    adam(
        new_params,
        tree.leaves(grads),
        mu,
        nu,
        [],
        steps,
        fused=True,
        decoupled_weight_decay=cfg.decoupled_weight_decay,
        amsgrad=False,
        beta1=cfg.b1,
        beta2=cfg.b2,
        lr=learning_rate,
        weight_decay=cfg.weight_decay,
        eps=cfg.eps,
        maximize=False,
    )

    new_state = moments._replace(
        step=moments.step + 1,
        mu=tree.unflatten(params, mu),
        nu=tree.unflatten(params, nu),
    )
    return tree.unflatten(params, new_params), new_state


def _failure(name: str, error: Exception) -> Failure:
    return Failure(
        name=name,
        error_type=type(error).__name__,
        message=reasons.error_line(error),
        code=reasons.failure_code(error),
    )
