"""Compilation strategies of a training step: which one runs on this machine, and why no faster one does.

    one-graph   forward, loss, backward, clipping and Adam of a minibatch in one graph
    two-graphs  the gradient in one graph, called once a microbatch; clipping and Adam in another
    forward     forward and loss compiled, backward by autograd, fused Adam
    eager       nothing of the minibatch update compiled

`select_strategy` tries these candidates in this order. It takes the first one whose update equals the eager update,
because some compilers are fast and wrong; or, asked for the fastest, the one of those whose minibatch step takes the
least time. The rollout parts (random inputs, rollout step, advantages) are compiled one
by one, whatever the strategy. All functions tried are pure, so trials leave the user's state as it was.

`compile_function` compiles a single function.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import (
    Any,
    Generic,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    cast,
)

import torch
from torch import Tensor
from torch.optim.adam import adam

from funcppo.config import as_compiled
from funcppo.core import tree
from funcppo.core.settings import FieldError
from funcppo.runtime import (
    cudagraph_trees,
    parallel_compile,
    reasons,
    strategy_cache,
)
from funcppo.runtime.agreement import (
    Agree,
    alone,
    attempt_together,
    backend_options,
)
from funcppo.runtime.capture import capture
from funcppo.runtime.compile_cache import (
    CachedFunction,
    InductorOptions,
    prepare_triton,
    raise_recompile_limit,
)
from funcppo.runtime.compile_job import serialize_job
from funcppo.runtime.equivalence import (
    DEFAULT_TOLERANCE,
    TF32_TOLERANCE,
    check_output,
    check_update,
)
from funcppo.runtime.protocols import (
    CaptureOutcome,
    Collect,
    CollectedData,
    ReplayMode,
    TensorFunction,
    TrainingConfig,
    TrainingParts,
    TrainingState,
)
from funcppo.runtime.reasons import FailureCode, FallbackCode, UntimedCode

# from the fastest to the most robust
STRATEGIES = ("one-graph", "two-graphs", "forward", "eager")
# Fields of `Parts`. The first takes longest to compile: this process compiles it where no other does.
ROLLOUT_PARTS = ("rollout_step", "sample_randomness", "build_batch")
# a softmax over few actions would be a kernel of its own otherwise
FUSION_OPTIONS = {"online_softmax": False}
# Inductor copies what a kernel overwrites before each trial of its block sizes. Copies take longer than small kernels,
# so that all sizes seem equal, and a slow one may be chosen.
GPU_OPTIONS = {"inplace_buffers": False}
COMPILER_MODULES = (
    "torch._functorch._aot_autograd.autograd_cache",
    "torch._inductor.codegen.wrapper",
    "torch._inductor.select_algorithm",
)
PEER_IS_EAGER = "another process stays eager"
MICROBATCHES_REASON = (
    "one-graph: it may hold the activations of all microbatches at once"
)
MAX_CHECKED_STEPS = 4  # of a rollout, over which rollout parts are compared
N_TIMED_STEPS = 5  # minibatch steps of each strategy, where they are compared
# a strategy is taken in place of one before it in STRATEGIES if it is faster by this factor: less is noise
MIN_GAIN = 1.05

clock = time.perf_counter  # seconds, by which strategies are compared

Args = ParamSpec("Args")
Result = TypeVar("Result")
Compiled = TypeVar("Compiled", covariant=True)
Config = TypeVar("Config", bound=TrainingConfig)
World = TypeVar("World")
State = TypeVar("State", bound=TrainingState)
Parts = TypeVar("Parts", bound=TrainingParts)
Params = TypeVar("Params")
Carry = TypeVar("Carry")
Inputs = TypeVar("Inputs")

# the arguments of some calls of each part, by the part's name
_Calls = Mapping[str, list[tuple[object, ...]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A strategy or a part that is not in use, and why."""

    name: str  # of the strategy, the rollout part or the replay mode
    error_type: str  # class of the exception
    message: str  # first line of its text
    torch_version: str
    code: FailureCode = FailureCode.OTHER


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
    # why faster strategies were not tried; empty if all were
    skip_reason: str = ""
    skip_code: FailureCode | None = None  # the same as a code
    # an earlier process with the same code, settings and kind of machine tried the strategies
    tried_earlier: bool = False
    # why a step on a GPU is not replayed; None if it is, and on a CPU
    fallback_code: FallbackCode | None = None
    # of all updates of a run, at most the time left for them, by which auto decided whether to compile; None if that
    # was not measured
    uncompiled_seconds: float | None = None
    # milliseconds of a minibatch step, by strategy; empty if none were compared
    times_ms: dict[str, float] = field(default_factory=dict)
    # why strategies that may be faster were not compared; empty if they were
    untimed_reason: str = ""
    untimed_code: UntimedCode | None = None  # the same as a code
    # "kernel": the rollout is one kernel of Triton; "steps": its steps are called one by one
    rollout: Literal["kernel", "steps"] = "steps"
    # why it is no kernel; empty if it is one, and where there is no GPU
    rollout_reason: str = ""
    rollout_code: FailureCode | None = None  # the same as a code
    # "kernels": kernels of Triton compute the network of the update and its gradient; "operators": those of PyTorch do
    network: Literal["kernels", "operators"] = "operators"
    # why these are no kernels; empty if they are, and where there is no GPU
    network_reason: str = ""
    network_code: FailureCode | None = None  # the same as a code


class SelectedStrategy(NamedTuple, Generic[Parts]):
    """The outcome of `select_strategy`."""

    parts: Parts  # the parts to run, some of them compiled
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
      fn: a pure function of trees of tensors and frozen settings.
      backend: a backend of `torch.compile`; only Inductor's code is cached on disk, and only Inductor records CUDA
        graphs where `cudagraph_trees_only` asks for them.
      use_custom_passes: rewrite matrix products (`inductor/matmul_pass.py`), and fuse more than Inductor by default.
      **inductor_options: further options of Inductor.
    """
    if reason_against_compiling():
        return fn
    if backend == "inductor":
        # Called with positional arguments only.
        return cast(
            "Callable[Args, Result]",
            _compile_with_inductor(fn, use_custom_passes, **inductor_options),
        )
    raise_recompile_limit()
    return torch.compile(
        fn, fullgraph=True, dynamic=False, **backend_options(backend)
    )


def _compile_with_inductor(
    fn: Callable[..., Result],
    use_custom_passes: bool = True,
    **inductor_options: object,
) -> CachedFunction[Result] | cudagraph_trees.TreeFunction[Result]:
    options: InductorOptions = {}
    if use_custom_passes:
        options.update(FUSION_OPTIONS)
        if torch.cuda.is_available():
            options.update(GPU_OPTIONS)
    options.update(inductor_options)
    prepare = _load_passes if use_custom_passes else _load_lowering
    if cudagraph_trees.are_demanded():
        return cudagraph_trees.TreeFunction(fn, {**prepare(), **options})
    return CachedFunction(fn, options or None, prepare)


def _load_lowering() -> InductorOptions:
    """Teach Inductor this package's random bits. A run that compiles nothing can do without its 75 MB."""
    # The first import registers the lowering.
    from funcppo.runtime.inductor import threefry_lowering  # noqa: F401

    return {}


def _load_passes() -> InductorOptions:
    """As `_load_lowering`; options with this package's pass over graphs."""
    from funcppo.runtime.inductor.matmul_pass import MatmulPass

    _load_lowering()
    return {"post_grad_custom_pre_pass": MatmulPass()}


def select_strategy(
    collect: Collect[Config, World, State, Parts],
    parts: Parts,
    cfg: Config,
    world: World,
    state: State,
    strategy: str | tuple[str, ...] = "auto",
    backend: str = "inductor",
    tolerance: float = DEFAULT_TOLERANCE,
    rollout_parts: tuple[str, ...] = ROLLOUT_PARTS,
    agree: Agree = alone,
) -> SelectedStrategy[Parts]:
    """Compile the parts of a training step by the fastest strategy that works here.

    Args:
      collect: `train_step.collect`.
      parts: the eager parts, `train_step.EAGER_PARTS`.
      cfg: the configuration of the training step.
      world: data that the training step reads.
      state: a training state. Trials compute a rollout and minibatch updates from it and drop the results.
      strategy: the only candidate, or several, of which the first that works is used. "auto": all of them, in the order
        of `STRATEGIES`; "fastest": all of them, of which the one that takes the least time is used, unless several
        processes learn together. Both leave one-graph out if there are microbatches: in one graph a compiler may hold
        the activations of all microbatches at once.
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
        and `cudagraph_trees_only` asks for graphs of compiled functions.
      Exception: whatever a strategy that is chosen by name raises.
    """
    _check_strategy(strategy)
    record = StrategyRecord(
        strategy="eager",
        failures=(),
        torch_version=torch.__version__,
        device=str(state.key.device),
        backend=backend,
    )
    skip_reason, skip_code = _common_reason_to_stay_eager(strategy, agree)
    if skip_code is not None:
        parallel_compile.stop_idle_workers()
        return SelectedStrategy(
            parts,
            dataclasses.replace(
                record, skip_reason=skip_reason, skip_code=skip_code
            ),
        )

    prepare_triton(state.key.device)
    if _may_use_tf32(state.key.device):
        tolerance = max(tolerance, TF32_TOLERANCE)
    candidates = _candidates(strategy, cfg)
    selector = _StrategySelector(
        backend=backend,
        tolerance=tolerance,
        raise_on_failure=strategy in STRATEGIES,
        take_fastest=strategy == "fastest" and agree is alone,
        agree=agree,
        kernels=_find_kernels(parts, cfg, record, candidates[0]),
    )
    path = None
    if backend == "inductor" and agree is alone:
        path = strategy_cache.outcome_path(
            collect,
            as_compiled(_compiled_parts(parts), (parts, cfg, world, state)),
            (
                strategy,
                tolerance,
                rollout_parts,
                cudagraph_trees.are_demanded(),
            ),
        )
    outcome = strategy_cache.load(path)
    if outcome is not None:
        return selector.rebuild(parts, outcome)

    parts, found = selector.try_all(
        collect, parts, cfg, world, state, candidates, rollout_parts
    )
    record = dataclasses.replace(
        _with_left_out(record, strategy, cfg, candidates), **found
    )
    record = selector.with_untimed_reason(record, candidates)
    selector.keep(path, parts, record)
    return SelectedStrategy(parts, record)


def _compiled_parts(parts: TrainingParts) -> list[Callable[..., object]]:
    """The functions that strategies compile, or put in the places of such."""
    pieces = parts.minibatch_parts
    return [
        *(getattr(parts, name) for name in ROLLOUT_PARTS),
        parts.minibatch_step,
        parts.kernel_rollout_step,
        parts.kernel_build_batch,
        parts.kernel_minibatch_step,
        pieces.accumulate_gradients,
        pieces.apply_gradients,
        pieces.loss_gradient,
        pieces.minibatch_loss,
    ]


def _check_strategy(strategy: str | tuple[str, ...]) -> None:
    """Check the name of a strategy, or several.

    Raises:
      FieldError: there is no such strategy.
    """
    choices = ("auto", "fastest", *STRATEGIES)
    names = (strategy,) if isinstance(strategy, str) else strategy
    for name in names:
        if name not in choices:
            raise FieldError("strategy", ", ".join(choices), name)


def with_capture(
    record: StrategyRecord, captured: CaptureOutcome
) -> StrategyRecord:
    """The record of a strategy, extended by how its step is replayed, and why not as a CUDA graph if it is on a GPU."""
    if captured.replay_mode == "none" and record.device.startswith("cuda"):
        failure = Failure(
            name="cuda-graph",
            error_type="CaptureError",
            message=captured.fallback_reason,
            torch_version=torch.__version__,
            code=FailureCode.NOT_CAPTURED,
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
        torch_version=torch.__version__,
        code=FailureCode.HOST_ENVIRONMENT,
    )
    return dataclasses.replace(record, failures=(failure, *record.failures))


def _common_reason_to_stay_eager(
    strategy: str | tuple[str, ...], agree: Agree
) -> tuple[str, FailureCode | None]:
    """As `_reason_to_stay_eager`, of this process or of another that learns with it."""
    reason, code = _reason_to_stay_eager(strategy)
    found = agree("compiling", reason)
    if found and code is None:
        return f"{PEER_IS_EAGER}: {found}", FailureCode.DISABLED
    return reason, code


def _reason_to_stay_eager(
    strategy: str | tuple[str, ...],
) -> tuple[str, FailureCode | None]:
    """Why nothing is compiled for a strategy that is asked for, as text and as code; empty and None if something is.

    Raises:
      FieldError: the strategy compiles, is asked for by name, and the compiler is turned off; or it compiles nothing,
        and CUDAGraph Trees are asked for.
    """
    reason = reason_against_compiling()
    if cudagraph_trees.are_demanded() and (strategy == "eager" or reason):
        expected = "one that compiles, for CUDAGraph Trees"
        if reason:
            expected = f"{expected}, but {reason} turns the compiler off"
        raise FieldError("strategy", expected, strategy)
    if strategy == "eager":
        return "eager was asked for", FailureCode.NOT_REQUESTED
    if reason and strategy in STRATEGIES:
        expected = f"auto or eager, since {reason} turns the compiler off"
        raise FieldError("strategy", expected, strategy)
    if reason:
        return f"{reason} turns the compiler off", FailureCode.DISABLED
    return "", None


def _may_use_tf32(device: torch.device) -> bool:
    """Return whether float32 matrix products may be of lower precision."""
    return (
        device.type == "cuda"
        and torch.get_float32_matmul_precision() != "highest"
    )


def _candidates(
    strategy: str | tuple[str, ...], cfg: TrainingConfig
) -> tuple[str, ...]:
    """The strategies to try, in this order."""
    if not isinstance(strategy, str):
        return strategy
    if strategy in STRATEGIES:
        return (strategy,)
    first = 0 if cfg.ppo.n_microbatches == 1 else 1
    # graphs of what is compiled
    last = -1 if cudagraph_trees.are_demanded() else None
    return STRATEGIES[first:last]


def _with_left_out(
    record: StrategyRecord,
    strategy: str | tuple[str, ...],
    cfg: TrainingConfig,
    candidates: tuple[str, ...],
) -> StrategyRecord:
    """The record, extended by why one-graph is not tried where microbatches leave it out."""
    is_chosen = strategy in STRATEGIES
    if is_chosen or cfg.ppo.n_microbatches == 1 or "one-graph" in candidates:
        return record
    return dataclasses.replace(
        record,
        skip_reason=MICROBATCHES_REASON,
        skip_code=FailureCode.MICROBATCHES,
    )


def _record_calls(
    collect: Collect[Config, World, State, Parts],
    parts: Parts,
    cfg: Config,
    world: World,
    state: State,
) -> _Calls:
    """Arguments of the first calls of each rollout part and of the minibatch step, from a short eager rollout."""
    calls: dict[str, list[tuple[object, ...]]] = {}

    def with_recording(name: str) -> TensorFunction[object]:
        part = getattr(parts, name)

        def record_and_call(*args: object) -> object:
            calls.setdefault(name, []).append(args)
            return part(*args)

        return record_and_call

    recording_parts = {name: with_recording(name) for name in ROLLOUT_PARTS}
    short_parts = dataclasses.replace(
        parts, scan=_scan_first_steps, **recording_parts
    )
    collected = collect(cfg, world, state, short_parts)

    first_minibatch = tree.item(collected.minibatches, 0)
    update_args = (cfg, world, state.params, collected.batch, collected.scalars)
    calls["minibatch_step"] = [
        (*update_args, collected.update_state, first_minibatch)
    ]
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


def _subset(
    calls: _Calls, names: tuple[str, ...]
) -> dict[str, list[tuple[object, ...]]]:
    return {name: calls[name] for name in names if name in calls}


def _may_compile_in_background(backend: str) -> bool:
    """Return whether other processes can compile ahead: what they leave is Inductor's cache."""
    return backend == "inductor" and not cudagraph_trees.are_demanded()


def _import_compiler() -> None:
    """Import what loads compiled code: seconds, in which other processes may compile it."""
    for name in COMPILER_MODULES:
        with suppress(ImportError):  # another version of PyTorch
            importlib.import_module(name)


class CompileAttempt(Protocol[Compiled]):
    """An attempt to compile something."""

    def __call__(self, *, use_custom_passes: bool) -> Compiled:
        """Return what is compiled, or raise why not."""
        ...


class CompilePart(Protocol):
    """A compiler whose backend and options are chosen."""

    def __call__(self, fn: TensorFunction[Result], /) -> TensorFunction[Result]:
        """Return the function compiled."""
        ...


@dataclass(slots=True)
class _NetworkKernels:
    """Kernels for the network of the update and its gradient."""

    # with a minibatch step whose network they compute; None where there are none
    parts: TrainingParts | None = None
    # why they are not in use; None where they are, and where none are looked for
    failure: Failure | None = None

    def record_fields(self, strategy: str) -> dict[str, Any]:
        """What the record of a strategy says about them."""
        if strategy != "one-graph":
            return {}
        if self.failure is not None:
            return {
                "network_reason": self.failure.message,
                "network_code": self.failure.code,
            }
        return {"network": "kernels"} if self.parts is not None else {}


def _find_kernels(
    parts: TrainingParts,
    cfg: TrainingConfig,
    record: StrategyRecord,
    strategy: str,
) -> _NetworkKernels:
    """The kernels for the network, or why there are none.

    There is no reason where there is no GPU, or the minibatch step is not to be compiled as a whole.
    """
    is_compiled = record.backend == "inductor" and strategy == "one-graph"
    if not record.device.startswith("cuda") or not is_compiled:
        return _NetworkKernels()
    reason = parts.reason_against_kernels(cfg)
    code = FailureCode.UNSUPPORTED
    if not reason and cudagraph_trees.are_demanded():
        reason = "CUDAGraph Trees are asked for"
        code = FailureCode.NOT_REQUESTED
    if not reason:
        with_kernels = dataclasses.replace(
            parts,
            rollout_step=parts.kernel_rollout_step,
            build_batch=parts.kernel_build_batch,
            minibatch_step=parts.kernel_minibatch_step,
        )
        return _NetworkKernels(with_kernels)
    failure = Failure(
        name="network",
        error_type="",
        message=reason,
        torch_version=torch.__version__,
        code=code,
    )
    return _NetworkKernels(failure=failure)


@dataclass(frozen=True, kw_only=True, slots=True)
class _StrategySelector:
    """Settings of the trials, and the failures met so far."""

    backend: str
    tolerance: float
    # the strategy is chosen by name, so that its failure is an error
    raise_on_failure: bool
    kernels: _NetworkKernels = field(default_factory=_NetworkKernels)
    take_fastest: bool = False
    agree: Agree = alone
    failures: list[Failure] = field(default_factory=list)
    # of a minibatch step, by strategy, where they are compared
    times_ms: dict[str, float] = field(default_factory=dict)
    # how rollout parts and strategies that work are compiled, by name
    built: dict[str, strategy_cache.Built] = field(default_factory=dict)

    def try_all(
        self,
        collect: Collect[Config, World, State, Parts],
        parts: Parts,
        cfg: Config,
        world: World,
        state: State,
        candidates: tuple[str, ...],
        rollout_parts: tuple[str, ...],
    ) -> tuple[Parts, dict[str, Any]]:
        """The parts to run, and the fields of the record that say what they are."""
        eager_unroll = parts.unroll
        with parallel_compile.in_background() as background:
            if _may_compile_in_background(self.backend):
                parallel_compile.start_workers()
            calls = _record_calls(collect, parts, cfg, world, state)
            parts, no_kernel = self.compile_rollout(
                background, parts, calls, candidates[0], rollout_parts
            )
            collected = collect(cfg, world, state, parts)
            background.wait("minibatch_step")
            parts, selected = self.compile_update_part(
                parts,
                candidates,
                (cfg, world, state.params, collected.batch, collected.scalars),
                collected,
            )
        return parts, {
            "strategy": selected,
            "failures": tuple(self.failures),
            "times_ms": self.times_ms,
            "rollout": "steps" if parts.unroll is eager_unroll else "kernel",
            "rollout_reason": no_kernel.message if no_kernel else "",
            "rollout_code": no_kernel and no_kernel.code,
            **self.kernels.record_fields(selected),
        }

    def compile_rollout(
        self,
        background: parallel_compile.Background,
        parts: Parts,
        calls: _Calls,
        strategy: str,
        rollout_parts: tuple[str, ...],
    ) -> tuple[Parts, Failure | None]:
        """The parts with the rollout compiled, and why it is no kernel.

        Other processes compile what they can, the minibatch step of a strategy that compiles it as a whole, too.
        """
        submit = partial(
            self.compile_in_background,
            background,
            self.kernels.parts or parts,
            calls,
        )
        names = [name for name in ROLLOUT_PARTS[1:] if name in rollout_parts]
        whole_update = ["minibatch_step"] if strategy == "one-graph" else []
        submitted = submit([*names, *whole_update])

        eager_unroll = parts.unroll
        parts, no_kernel = self.unroll_by_kernel(
            parts, _subset(calls, rollout_parts)
        )
        if "rollout_step" in rollout_parts and parts.unroll is eager_unroll:
            # Waited for last, or compiled here.
            is_submitted = submit(["rollout_step"])
            names.insert(len(names) if is_submitted else 0, "rollout_step")

        if submitted:
            self.load_meanwhile(parts, calls, submitted)
        for name in names:
            background.wait(name)
            parts = self.compile_rollout_part(parts, name, calls)
        return parts, no_kernel

    def compile_in_background(
        self,
        background: parallel_compile.Background,
        parts: TrainingParts,
        calls: _Calls,
        names: Sequence[str],
    ) -> list[str]:
        """Let other processes compile parts that are not cached; the names of those that they compile."""
        submitted: list[str] = []
        if not _may_compile_in_background(self.backend):
            return submitted
        for name in names:
            part = getattr(parts, name)
            args = calls[name][0]
            function = _compile_with_inductor(part)
            if not isinstance(function, CachedFunction) or function.is_cached(
                *args
            ):
                continue
            if background.submit(name, serialize_job(part, args)):
                submitted.append(name)
        return submitted

    def load_meanwhile(
        self, parts: TrainingParts, calls: _Calls, submitted: list[str]
    ) -> None:
        """Import the compiler and compile the kernels of the network, while other processes compile."""
        _import_compiler()
        by_kernels = self.kernels.parts
        for name in submitted if by_kernels is not None else ():
            part = getattr(by_kernels, name)
            if part is not getattr(parts, name):
                # An error shows again where the part is tried.
                with suppress(Exception):
                    part(*calls[name][0])

    def rebuild(
        self, parts: Parts, outcome: strategy_cache.Outcome
    ) -> SelectedStrategy[Parts]:
        """The parts that earlier trials found, not compiled yet, and their record."""
        record = cast(StrategyRecord, outcome.record)
        eager = parts
        for name in (*ROLLOUT_PARTS, record.strategy):
            if name not in outcome.built:
                continue
            how = outcome.built[name]
            source = self.kernels.parts if how.by_kernels else eager
            assert source is not None

            def compile_part(
                fn: TensorFunction[Result], how: strategy_cache.Built = how
            ) -> TensorFunction[Result]:
                return compile_function(fn, self.backend, how.use_custom_passes)

            if name == record.strategy:
                step = _build_minibatch_step(name, source, compile_part)
                parts = dataclasses.replace(parts, minibatch_step=step)
            else:
                compiled = compile_part(getattr(source, name))
                parts = dataclasses.replace(parts, **{name: compiled})
        if outcome.rollout is not None:
            from funcppo.runtime.env_kernel import rollout_kernel

            # of the first that was tried: an outcome is kept where nothing failed
            (_, values), *_ = self.rollout_functions(parts)
            unroll = rollout_kernel.RolloutKernel(outcome.rollout, values)
            parts = dataclasses.replace(parts, unroll=unroll)
        record = dataclasses.replace(record, tried_earlier=True)
        return SelectedStrategy(parts, record)

    def keep(
        self, path: Path | None, parts: TrainingParts, record: StrategyRecord
    ) -> None:
        """Keep what the trials found for later processes, unless something failed that may work another time."""
        reasons_against = {record.rollout_code, record.network_code}
        final = {None, FailureCode.UNSUPPORTED, FailureCode.NOT_REQUESTED}
        if path is None or record.failures or not reasons_against <= final:
            return
        unroll: Any = parts.unroll
        rollout = unroll.code if record.rollout == "kernel" else None
        outcome = strategy_cache.Outcome(record, self.built, rollout)
        strategy_cache.save(path, outcome)

    def unroll_by_kernel(
        self, parts: Parts, calls: _Calls
    ) -> tuple[Parts, Failure | None]:
        """The parts with the whole rollout as one kernel, or as they are, and why it is none.

        There is no reason where there is no GPU, or the steps of the rollout are not to be compiled.
        """
        steps = calls.get("rollout_step", [])
        on_gpu = steps and tree.leaves(steps[0][1:])[0].is_cuda
        if not on_gpu or self.backend != "inductor":
            return parts, None
        if cudagraph_trees.are_demanded():
            return parts, Failure(
                name="rollout",
                error_type="",
                message="CUDAGraph Trees are asked for",
                torch_version=torch.__version__,
                code=FailureCode.NOT_REQUESTED,
            )
        failure = None
        for step, values in self.rollout_functions(parts):
            attempt = partial(self._compile_unroll, parts, steps, step, values)
            try:
                kernel = self._try(attempt, "rollout", use_custom_passes=False)
                return dataclasses.replace(parts, unroll=kernel), None
            except Exception as error:
                failure = _failure("rollout", error)
            if failure.code is FailureCode.UNSUPPORTED or values is None:
                break
            self.failures.append(failure)
        return parts, failure

    def rollout_functions(
        self, parts: TrainingParts
    ) -> list[tuple[Any, Callable[..., Any] | None]]:
        """The steps that a kernel may make: each with what computes the values afterwards, or None if the step does."""
        whole = (parts.rollout_step, None)
        if self.kernels.parts is None:
            return [whole]
        return [(parts.kernel_actor_step, parts.kernel_values), whole]

    def _compile_unroll(
        self,
        parts: TrainingParts,
        steps: list[tuple[object, ...]],
        step: Any,
        values: Callable[..., Any] | None,
        use_custom_passes: bool,
    ) -> Callable[..., object]:
        """The kernel of a rollout, after a check on its first steps: see `rollout_functions`."""
        from funcppo.runtime.env_kernel import rollout_kernel

        cfg, *args = steps[0]
        first = rollout_kernel.StepArguments(*args)
        kernel = rollout_kernel.compile_unroll(step, cfg, first, values)

        whole_step: Any = parts.rollout_step
        states, transitions = zip(*(whole_step(*args) for args in steps))
        random_inputs = [args[-1] for args in steps]
        actual = kernel(cfg, *first[:-1], _stack(random_inputs))
        expected = (states[-1], _stack(transitions))
        if self.tolerance <= TF32_TOLERANCE:
            check_output(actual, expected, self.tolerance)
        return kernel

    def compile_rollout_part(
        self, parts: Parts, name: str, calls: _Calls
    ) -> Parts:
        """The parts with one rollout part compiled, or as they are if it fails."""
        by_kernels = self.kernels.parts
        if by_kernels and getattr(by_kernels, name) is not getattr(parts, name):
            checked = calls[name]
            if name == "build_batch":
                checked = [*checked, *map(_with_truncations, checked)]
            attempt = partial(
                self._compile_rollout_part,
                name,
                parts,
                checked,
                built_from=by_kernels,
            )
            try:
                return self._try(attempt, name, use_custom_passes=True)
            except Exception as error:
                self.failures.append(_failure(f"{name} by kernels", error))
        try:
            attempt = partial(
                self._compile_rollout_part, name, parts, calls[name]
            )
            return self.compile_with_fallback(attempt, name)
        except Exception as error:
            self._handle_failure(name, error)
            return parts

    def compile_update_part(
        self,
        parts: Parts,
        candidates: tuple[str, ...],
        args: tuple[object, ...],
        collected: CollectedData,
    ) -> tuple[Parts, str]:
        """Compile the minibatch step by the first candidate that works, or by the fastest; the parts, and its name."""
        working: dict[str, Parts] = {}
        for strategy in candidates:
            try:
                working[strategy] = self._compile_candidate(
                    strategy, parts, args, collected
                )
            except Exception as error:
                if strategy == candidates[-1] and not working:
                    raise
                self.failures.append(_failure(strategy, error))
            if working and not self.take_fastest:
                break

        if len(working) > 1:
            for strategy, choice in working.items():
                step = partial(choice.minibatch_step, *args)
                self.times_ms[strategy] = _time_step(step, collected)
        selected = (
            select_fastest(self.times_ms)
            if self.times_ms
            else next(iter(working))
        )
        return working[selected], selected

    def _compile_candidate(
        self,
        strategy: str,
        parts: Parts,
        args: tuple[object, ...],
        collected: CollectedData,
    ) -> Parts:
        """The parts with the minibatch step of a strategy: one-graph with network kernels, where they work."""
        compile_update = partial(
            self._compile_update, strategy, parts, args, collected
        )
        kernels = self.kernels
        if strategy == "one-graph" and kernels.parts is not None:
            attempt = partial(compile_update, built_from=kernels.parts)
            try:
                return self._try(attempt, "network", use_custom_passes=True)
            except Exception as error:
                kernels.failure = _failure("network", error)
        return self.compile_with_fallback(compile_update, strategy)

    def with_untimed_reason(
        self, record: StrategyRecord, candidates: tuple[str, ...]
    ) -> StrategyRecord:
        """The record, with why the candidates after the one in use were not compared with it, where there are any."""
        if self.take_fastest or record.strategy == candidates[-1]:
            return record
        reason = "the first that works was asked for"
        code = UntimedCode.NOT_REQUESTED
        if self.agree is not alone:
            reason = "several processes learn together, and would measure different times"
            code = UntimedCode.SEVERAL_PROCESSES
        return dataclasses.replace(
            record, untimed_reason=reason, untimed_code=code
        )

    def compile_with_fallback(
        self, attempt: CompileAttempt[Result], name: str
    ) -> Result:
        """The result of `attempt` with custom passes; if that fails, record the failure and try without them."""
        if self.backend == "inductor" and name != "eager":
            try:
                return self._try(attempt, name, use_custom_passes=True)
            except Exception as error:
                self.failures.append(
                    _failure(f"{name} with custom passes", error)
                )
        return self._try(attempt, name, use_custom_passes=False)

    def _try(
        self,
        attempt: CompileAttempt[Result],
        name: str,
        use_custom_passes: bool,
    ) -> Result:
        """The result of an attempt that succeeds in all processes."""
        with attempt_together(self.agree, name):
            return attempt(use_custom_passes=use_custom_passes)

    def _handle_failure(self, name: str, error: Exception) -> None:
        if self.raise_on_failure:
            raise error
        self.failures.append(_failure(name, error))

    def _compile_rollout_part(
        self,
        name: str,
        parts: Parts,
        calls: list[tuple[object, ...]],
        use_custom_passes: bool,
        built_from: TrainingParts | None = None,
    ) -> Parts:
        """The parts with one rollout part compiled, after a check on the arguments of some calls.

        Args:
          built_from: parts with another one to compile; None for the same.
        """
        # Rounding changes some of the random choices of the others.
        is_compared = name == "build_batch" and built_from is not None
        eager: TensorFunction[object] = getattr(parts, name)
        compiled = compile_function(
            getattr(built_from or parts, name), self.backend, use_custom_passes
        )
        for args in calls:
            actual = compiled(*args)  # compiles at the first call
            if is_compared or self.tolerance <= TF32_TOLERANCE:
                check_output(actual, eager(*args), self.tolerance)
        self._note(name, built_from, use_custom_passes)
        return dataclasses.replace(parts, **{name: compiled})

    def _compile_update(
        self,
        strategy: str,
        parts: Parts,
        args: tuple[object, ...],
        collected: CollectedData,
        use_custom_passes: bool,
        built_from: TrainingParts | None = None,
    ) -> Parts:
        """The parts with the minibatch step of a strategy, after a check on the collected minibatches.

        Args:
          built_from: parts with another minibatch step to compile; None for the same.
        """

        def compile_part(fn: TensorFunction[Result]) -> TensorFunction[Result]:
            return compile_function(fn, self.backend, use_custom_passes)

        step = _build_minibatch_step(
            strategy, built_from or parts, compile_part
        )
        check_update(
            partial(step, *args),
            partial(parts.minibatch_step, *args),
            collected.update_state,
            collected.minibatches,
            self.tolerance,
        )
        self._note(strategy, built_from, use_custom_passes)
        return dataclasses.replace(parts, minibatch_step=step)

    def _note(
        self,
        name: str,
        built_from: TrainingParts | None,
        use_custom_passes: bool,
    ) -> None:
        """Note how a rollout part or a strategy that works is compiled."""
        self.built[name] = strategy_cache.Built(
            by_kernels=built_from is not None,
            use_custom_passes=use_custom_passes,
        )


def _with_truncations(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of `build_batch` with all episodes truncated at each step: a short rollout has hardly any."""
    *before, trajectory, scalars, memory = args
    truncated = ~trajectory.terminated
    return *before, trajectory._replace(truncated=truncated), scalars, memory


def _time_step(
    step: TensorFunction[tuple[Any, object]], collected: CollectedData
) -> float:
    """The shortest of some minibatch steps in milliseconds, replayed as a CUDA graph where one can be recorded."""
    minibatch = tree.item(collected.minibatches, 0)
    captured = capture(
        lambda state: step(state, minibatch), collected.update_state
    )
    captured.step()  # the first may load code

    times = [time_call(captured.step) for _ in range(N_TIMED_STEPS)]
    return 1e3 * min(times)


def time_call(fn: Callable[..., object], *args: object) -> float:
    """Seconds of a call, up to the end of what it starts on a GPU."""
    _wait_for_gpu()
    start = clock()
    fn(*args)
    _wait_for_gpu()
    return clock() - start


def _wait_for_gpu() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def select_fastest(times_ms: Mapping[str, float]) -> str:
    """The strategy that takes the least time, or one before it that is nearly as fast; of at least one, in order."""
    limit = MIN_GAIN * min(times_ms.values())
    return next(name for name, ms in times_ms.items() if ms <= limit)


def _build_minibatch_step(
    strategy: str, parts: TrainingParts, compile_part: CompilePart
) -> TensorFunction[tuple[object, object]]:
    """The minibatch step of a strategy, not called yet."""
    if strategy == "one-graph":
        return compile_part(parts.minibatch_step)

    pieces = parts.minibatch_parts
    if strategy == "two-graphs":
        gradient_fn = compile_part(pieces.loss_gradient)
        return partial(
            parts.minibatch_step,
            accumulate_gradients=partial(
                pieces.accumulate_gradients, gradient_fn=gradient_fn
            ),
            apply_gradients=compile_part(pieces.apply_gradients),
        )

    if strategy == "forward":
        gradient_fn = partial(
            _gradient_by_autograd, compile_part(pieces.minibatch_loss)
        )
        return partial(
            parts.minibatch_step,
            accumulate_gradients=partial(
                pieces.accumulate_gradients, gradient_fn=gradient_fn
            ),
            apply_gradients=partial(
                pieces.apply_gradients, adam_update=fused_adam
            ),
        )

    return parts.minibatch_step


def _gradient_by_autograd(
    loss: TensorFunction[tuple[Tensor, Result]],
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


class AdamSettings(Protocol):
    """Settings of Adam: see `config.AdamConfig`."""

    @property
    def b1(self) -> float:
        """Decay of the mean of the gradient."""
        ...

    @property
    def b2(self) -> float:
        """Decay of the mean of the squared gradient."""
        ...

    @property
    def eps(self) -> float:
        """Number added to the denominator."""
        ...

    @property
    def weight_decay(self) -> float:
        """Coefficient of the decay."""
        ...

    @property
    def decoupled_weight_decay(self) -> bool:
        """Whether the decay acts on the parameters (AdamW) or on the gradient."""
        ...


class AdamMoments(Protocol):
    """The state of Adam, a NamedTuple: see `optim.AdamState`."""

    @property
    def step(self) -> Tensor:
        """Number of updates made."""
        ...

    @property
    def mu(self) -> object:
        """Running mean of the gradient."""
        ...

    @property
    def nu(self) -> object:
        """Running mean of the squared gradient."""
        ...

    def _replace(self, **fields: object) -> Self: ...


Moments = TypeVar("Moments", bound=AdamMoments)


def fused_adam(
    cfg: AdamSettings,
    grads: Params,
    state: Moments,
    params: Params,
    learning_rate: Tensor,
) -> tuple[Params, Moments]:
    """The new parameters and the new state after one step, as `optim.update`, by PyTorch's fused kernel.

    The kernel updates in place, so it works on copies.

    Args:
      cfg: settings of Adam.
      grads: the gradient, a tree like `params`.
      state: step count and running means; a NamedTuple.
      params: the parameters, a tree.
      learning_rate: step size, a scalar on the device.
    """
    new_params = [x.clone() for x in tree.leaves(params)]
    mu = [x.clone() for x in tree.leaves(state.mu)]
    nu = [x.clone() for x in tree.leaves(state.nu)]
    steps = [state.step.to(torch.float32, copy=True) for _ in new_params]
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

    new_state = state._replace(
        step=state.step + 1,
        mu=tree.unflatten(params, mu),
        nu=tree.unflatten(params, nu),
    )
    return tree.unflatten(params, new_params), new_state


def _failure(name: str, error: Exception) -> Failure:
    return Failure(
        name=name,
        error_type=type(error).__name__,
        message=reasons.error_line(error),
        torch_version=torch.__version__,
        code=reasons.failure_code(error),
    )
