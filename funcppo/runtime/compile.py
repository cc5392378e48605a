"""How a training step is compiled: whole, in parts, or not at all, and why not faster.

    one-graph   forward, loss, backward, clipping and Adam of a minibatch in one graph
    forward     forward and loss compiled, backward by autograd, fused Adam
    eager       nothing of the minibatch update compiled

`select_strategy` tries them in this order, and takes the first one whose update equals the eager update, because some
compilers are fast and wrong. The rollout parts (random inputs, rollout step, advantages) are compiled one by one,
whatever the strategy. All functions tried are pure, so trials leave the user's state as it was.

`compile_function` compiles a single function. `check_update` and `check_output` compare compiled functions with eager
ones, every leaf at its own scale: in one norm over the whole update state, the optimizer's step count is large and
right and would hide wrong parameters.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.optim.adam import adam

from funcppo.core import tree
from funcppo.core.settings import FieldError
from funcppo.runtime import (
    cache,
    operators,  # noqa: F401  # registers them
)
from funcppo.runtime.cache import CompiledFunction
from funcppo.runtime.capture import (
    CapturedStep,
    ReplayMode,
    TreeFunction,
    are_trees_demanded,
)
from funcppo.runtime.distributed import (
    Agree,
    alone,
    attempt_together,
    backend_options,
)
from funcppo.runtime.reasons import ReasonCode, error_line, failure_code

# from the fastest to the most robust
STRATEGIES = ("one-graph", "forward", "eager")
# Fields of `train_step.StepFunctions`.
ROLLOUT_PARTS = ("rollout_step", "sample_randomness", "build_batch")

# Tolerances are relative: to the change that an update makes to a leaf, or to the size of an output.
# In float32 compilers reorder sums, and that is all. Largest errors of all strategies for CartPole and the prover
# on a CPU: 3e-6 of a change, 8e-6 of an output. An iteration of 16 minibatches on an H200: 2e-5 of its change.
DEFAULT_TOLERANCE = 3e-5
TF32_TOLERANCE = 0.01  # for TF32 matrix products: 11 significant bits
# for matrix products in bfloat16, which has 8 significant bits
BF16_TOLERANCE = 0.1

logger = logging.getLogger("funcppo.compile")

Args = ParamSpec("Args")
Result = TypeVar("Result")
Parts = TypeVar("Parts")  # `train_step.StepFunctions`
Params = TypeVar("Params")
Moments = TypeVar("Moments")  # `optim.AdamState`
Carry = TypeVar("Carry")
Inputs = TypeVar("Inputs")
State = TypeVar("State")
Minibatch = TypeVar("Minibatch")

# the arguments of some calls of each part, by the part's name
_Calls = Mapping[str, list[tuple[Any, ...]]]


class EquivalenceError(RuntimeError):
    """Error for a compiled function that runs but returns other numbers than the eager one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Strategy or part that is not in use, and the reason."""

    name: str  # of the strategy, the rollout part or the replay mode
    error_type: str  # class of the exception
    message: str  # first line of its text
    torch_version: str = torch.__version__
    code: ReasonCode = ReasonCode.OTHER


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyRecord:
    """Record of how the training step runs on this machine, and why not faster."""

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


def reason_against_compiling(device_type: str = "") -> str:
    """Return why Inductor compiles nothing here; empty if it does.

    An environment variable or a stance turns PyTorch's compiler off, or there is no C++ compiler.

    Args:
      device_type: of the tensors that are computed; only "cpu" needs a C++ compiler.
    """
    off = "turns the compiler off"
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        if os.environ.get(name, "0") == "1":
            return f"{name}=1 {off}"
    if "torch._dynamo" in sys.modules:  # an import takes seconds
        if torch._dynamo.config.disable:
            return f"torch._dynamo.config.disable {off}"
        # PyTorch has no public function that returns the stance.
        stance = getattr(torch._dynamo.eval_frame, "_stance", None)
        if getattr(stance, "stance", "default") == "force_eager":
            return f'torch.compiler.set_stance("force_eager") {off}'

    # as Inductor looks for it
    default = "clang++" if sys.platform == "darwin" else "g++"
    compiler = os.environ.get("CXX", default)
    is_installed = (
        shutil.which(compiler) or "TORCH_INDUCTOR_INSTALL_GXX" in os.environ
    )
    if device_type == "cpu" and sys.platform != "win32" and not is_installed:
        return f"no C++ compiler is found: expected {compiler}; install it, or name one by CXX"
    return ""


def compile_function(
    fn: Callable[Args, Result],
    backend: str = "inductor",
    **inductor_options: object,
) -> Callable[Args, Result]:
    """Compile a function as one graph of fixed shapes; a graph break is an error.
    Return the function itself if compiling is off.

    The function itself is returned where PyTorch's compiler is turned off (`reason_against_compiling`).

    Args:
      fn: a pure function of trees of tensors and frozen settings, called with positional arguments only.
      backend: a backend of `torch.compile`; only Inductor rewrites matrix products (`inductor.py`), only its
        code is saved for later processes, and only it records CUDA graphs where `cudagraph_trees_only` asks for them.
      **inductor_options: further options of Inductor.
    """
    if reason_against_compiling():
        return fn
    if backend != "inductor":
        options = backend_options(backend)
        return torch.compile(fn, fullgraph=True, dynamic=False, **options)
    # a softmax over few actions would be a kernel of its own otherwise
    options: dict[str, Any] = {"online_softmax": False}
    if torch.cuda.is_available():
        # Inductor copies what a kernel overwrites before each trial of its block sizes. Copies take longer than
        # small kernels, so that all sizes seem equal, and a slow one may be chosen.
        options["inplace_buffers"] = False
    options |= inductor_options
    compiled: Any = (
        TreeFunction(fn, load_passes() | options)
        if are_trees_demanded()
        else CompiledFunction(fn, options, load_passes)
    )
    return cast("Callable[Args, Result]", compiled)


@contextmanager
def show_progress() -> Iterator[None]:
    """Print what is compiled and its seconds within the context, if a person sees it and no logger is set up."""
    if not sys.stderr.isatty() or logger.hasHandlers():
        yield
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("funcppo: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def load_passes() -> dict[str, Any]:
    """Return Inductor's options with this package's graph pass; also register the lowering of its random bits.

    The import takes seconds and 75 MB, which a process that compiles nothing does without.
    """
    from funcppo.runtime.inductor import MatmulPass

    return {"post_grad_custom_pre_pass": MatmulPass()}


# ---- The choice of a strategy.


def check_available(strategy: str) -> None:
    """Raise an error if a strategy cannot be used here, before any work for it.

    Raises:
      FieldError: as of `select_strategy`.
    """
    _reason_to_stay_eager(strategy)


def select_strategy(
    collect: Callable[..., Any],
    parts: Parts,
    cfg: Any,
    world: object,
    state: Any,
    strategy: str = "auto",
    backend: str = "inductor",
    tolerance: float = DEFAULT_TOLERANCE,
    rollout_parts: tuple[str, ...] = ROLLOUT_PARTS,
    agree: Agree = alone,
) -> tuple[Parts, StrategyRecord]:
    """Compile the functions of a training step by the fastest strategy that works here; return them and a record.

    Args:
      collect: `train_step.collect`.
      parts: the eager parts, `train_step.EAGER_PARTS`.
      cfg: the configuration of the training step.
      world: data that the training step reads.
      state: a training state. Trials compute a rollout and minibatch updates from it and drop the results.
      strategy: the only candidate; "auto": all of them, in the order of `STRATEGIES`.
      backend: a backend of `torch.compile`.
      tolerance: largest relative difference from eager: see `check_update`. At least `TF32_TOLERANCE` where PyTorch
        may use TF32. Above that, for products of lower precision, the rollout parts are not compared, because rounding
        changes some of the random choices.
      rollout_parts: which of `ROLLOUT_PARTS` to compile; the others stay eager.
      agree: of several processes that learn together, so that all use one strategy.

    Returns:
      The parts to run instead of the eager ones; and the strategy in use, with the failures of others.

    Raises:
      FieldError: there is no such strategy; or it compiles, is asked for by name, and PyTorch's compiler is turned off;
        or it compiles nothing, and `cudagraph_trees_only` asks for graphs of compiled functions.
      ValueError: the folder of compiled code is refused.
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
    needs = device.type if backend == "inductor" else ""
    reason, code = _reason_to_stay_eager(strategy, agree, needs)
    if code is not None:
        return parts, dataclasses.replace(
            record, skip_reason=reason, skip_code=code
        )

    folder = cache.use_folder()
    logger.info(
        "compiling a training step, which later starts find: %s", folder
    )
    precision = torch.get_float32_matmul_precision()
    if device.type == "cuda" and precision != "highest":
        tolerance = max(tolerance, TF32_TOLERANCE)
    candidates = STRATEGIES if strategy == "auto" else (strategy,)
    if strategy == "auto" and are_trees_demanded():
        candidates = STRATEGIES[:-1]  # there are graphs of compiled ones only
    trial = _Trial(parts, backend, tolerance, agree, strategy != "auto")
    if device.type == "cuda" and backend == "inductor":
        trial.find_kernels(device, cfg, candidates)

    calls = _record_calls(collect, parts, cfg, world, state)
    compiled = trial.compile_rollout(calls, rollout_parts)
    collected = collect(cfg, world, state, compiled)
    args = (cfg, world, state.params, collected.batch, collected.scalars)
    step = trial.compile_update(candidates, args, collected)
    compiled = dataclasses.replace(compiled, minibatch_step=step)
    record = dataclasses.replace(
        record, failures=tuple(trial.failures), **trial.found
    )
    return compiled, record


def _reason_to_stay_eager(
    strategy: str, agree: Agree = alone, device_type: str = ""
) -> tuple[str, ReasonCode | None]:
    """Return why nothing is compiled for a strategy, as text and code; empty and None if it compiles.

    Raises:
      FieldError: as of `select_strategy`.
    """
    names = ("auto", *STRATEGIES)
    if strategy not in names:
        raise FieldError("strategy", ", ".join(names), strategy)
    reason = reason_against_compiling(device_type)
    if are_trees_demanded() and (strategy == "eager" or reason):
        expected = "one that compiles, for CUDAGraph Trees"
        if reason:
            expected = f"{expected}, but {reason}"
        raise FieldError("strategy", expected, strategy)
    if reason and strategy not in ("auto", "eager"):
        expected = f"auto or eager, since {reason}"
        raise FieldError("strategy", expected, strategy)

    code: ReasonCode | None = None
    if strategy == "eager":
        reason, code = "eager was asked for", ReasonCode.NOT_REQUESTED
    elif reason:
        code = ReasonCode.DISABLED
    peer_reason = agree("compiling", reason)
    if peer_reason and code is None:
        reason = f"another process stays eager: {peer_reason}"
        code = ReasonCode.DISABLED
    return reason, code


def _record_calls(
    collect: Callable[..., Any],
    parts: Any,
    cfg: object,
    world: object,
    state: object,
) -> _Calls:
    """Record the arguments of the first calls of each rollout function, in a short eager rollout."""
    calls: dict[str, list[tuple[Any, ...]]] = {}

    def record_and_call(name: str, *args: object) -> object:
        calls.setdefault(name, []).append(args)
        return getattr(parts, name)(*args)

    recording = {name: partial(record_and_call, name) for name in ROLLOUT_PARTS}
    short_parts = dataclasses.replace(
        parts, scan=_scan_first_steps, **recording
    )
    collect(cfg, world, state, short_parts)
    return calls


def _scan_first_steps(
    fn: Callable[[Carry, Inputs], tuple[Carry, Result]],
    carry: Carry,
    xs: Inputs,
) -> tuple[Carry, Result]:
    """Scan only the first four steps; the fourth output stands for all later ones."""
    n_steps = tree.length(xs)
    outputs: list[Result] = []
    for t in range(min(4, n_steps)):
        carry, y = fn(carry, tree.item(xs, t))
        outputs.append(y)
    outputs += [outputs[-1]] * (n_steps - len(outputs))
    return carry, _stack(outputs)


def _stack(trees: Iterable[Result]) -> Result:
    """Stack several trees leaf by leaf into one tree."""
    return tree.map(lambda *leaves: torch.stack(leaves), *trees)


class _Trial:
    """Trials of strategies, and their findings so far.

    Attributes:
      failures: what failed.
      found: fields of the record.
    """

    def __init__(
        self,
        parts: Any,
        backend: str,
        tolerance: float,
        agree: Agree,
        raise_on_failure: bool,
    ) -> None:
        """Start with no trials made.

        Args:
          parts: the eager parts.
          raise_on_failure: the strategy is chosen by name, so that its failure is an error.
        """
        self.parts = parts
        self.backend = backend
        self.tolerance = tolerance
        self.agree = agree
        self.raise_on_failure = raise_on_failure
        # Rounding of less precise products changes some of the random choices.
        self.is_exact = tolerance <= TF32_TOLERANCE
        self.failures: list[Failure] = []
        self.found: dict[str, Any] = {}
        self.may_use_kernels = False
        # functions of the step, `train_step.KernelFunctions`; empty, or one element
        self.kernels: list[Any] = []

    def find_kernels(
        self, device: torch.device, cfg: object, candidates: tuple[str, ...]
    ) -> None:
        """Find Triton kernels for the rollout and, in one-graph, the network; note a reason where there is none."""
        cache.share_triton_cache(device)
        if are_trees_demanded():
            reason = "CUDAGraph Trees are asked for"
            self._note_no_kernel("rollout", reason, ReasonCode.NOT_REQUESTED)
            self._note_no_kernel("network", reason, ReasonCode.NOT_REQUESTED)
            return
        self.may_use_kernels = True
        if candidates[0] != "one-graph":
            return
        reason = self.parts.kernels.reason_against(cfg)
        if reason:
            self._note_no_kernel("network", reason, ReasonCode.UNSUPPORTED)
        else:
            self.kernels.append(self.parts.kernels)

    def compile_rollout(self, calls: _Calls, names: tuple[str, ...]) -> Any:
        """Compile those of the named rollout functions that can be; return all step functions."""
        compiled = {}
        if "rollout_step" in names and self.may_use_kernels:
            unroll = self._compile_unroll(calls["rollout_step"])
            if unroll is not None:
                compiled["unroll"] = unroll
        for name in names:
            if name == "rollout_step" and "unroll" in compiled:
                continue
            attempts = self._rollout_attempts(name, calls[name])
            try:
                compiled[name] = self._first_that_works(attempts)
            except Exception:
                if self.raise_on_failure:
                    raise
        return dataclasses.replace(self.parts, **compiled)

    def compile_update(
        self, candidates: tuple[str, ...], args: tuple[Any, ...], collected: Any
    ) -> Callable[..., Any]:
        """Return the minibatch step of the first strategy that works.

        Args:
          args: of the minibatch step, but for the update state and the minibatch.
          collected: the inputs of the minibatch updates, `train_step.RolloutResult`.
        """
        eager = self.parts.minibatch_step
        # name of the attempt, strategy, step
        forms = [(name, name, eager) for name in candidates]
        if candidates[0] == "one-graph":
            forms[:0] = [
                ("network", "one-graph", x.minibatch_step) for x in self.kernels
            ]

        step, found = self._first_that_works(
            (form[0], partial(self._attempt_update, args, collected, *form))
            for form in forms
        )
        self.found |= found
        if found == {"strategy": "one-graph"}:
            self._note_failed_kernel("network")
        return step

    def _attempt_update(
        self,
        args: tuple[Any, ...],
        collected: Any,
        name: str,
        strategy: str,
        step: Any,
    ) -> tuple[Callable[..., Any], dict[str, str]]:
        """Compile the minibatch step by a strategy and check it on minibatches; return it and fields of the record."""
        compiled = build_minibatch_step(
            strategy,
            step,
            self.parts.minibatch_loss,
            partial(compile_function, backend=self.backend),
        )
        eager = self.parts.minibatch_step
        if strategy == "forward":
            # which networks that `torch.func` cannot differentiate have, too
            gradient = partial(_gradient_by_autograd, self.parts.minibatch_loss)
            eager = partial(eager, gradient_fn=gradient)
        check_update(
            partial(compiled, *args),
            partial(eager, *args),
            collected.update_state,
            collected.minibatches,
            self.tolerance,
        )
        found = {"strategy": strategy}
        if name == "network":
            found["network"] = "kernels"
        return compiled, found

    def _first_that_works(
        self, attempts: Iterable[tuple[str, Callable[[], Result]]]
    ) -> Result:
        """Return the result of the first attempt that succeeds in all processes; record the failures before it.

        Args:
          attempts: the name of each, and what it calls; at least one.

        Raises:
          Exception: that of the last one, if all fail.
        """
        last_error: Exception = RuntimeError("expected an attempt, got none")
        for name, attempt in attempts:
            start = time.perf_counter()
            try:
                with attempt_together(self.agree, name):
                    result = attempt()
                seconds = time.perf_counter() - start
                logger.info("%s is compiled: %.1f s", name, seconds)
                return result
            except Exception as error:
                seconds = time.perf_counter() - start
                line = error_line(error)
                logger.info("no %s: %s; %.1f s", name, line, seconds)
                failure = Failure(
                    name=name,
                    error_type=type(error).__name__,
                    message=line,
                    code=failure_code(error),
                )
                self.failures.append(failure)
                last_error = error
        raise last_error

    def _rollout_attempts(
        self, name: str, calls: list[tuple[Any, ...]]
    ) -> Iterable[tuple[str, Callable[[], Callable[..., Any]]]]:
        """Yield ways to compile a rollout function by name, each checked on some recorded calls."""
        part = getattr(self.parts, name)
        attempt = partial(self._attempt_part, part)
        for kernels in self.kernels:
            by_kernels = getattr(kernels, name, None)
            if by_kernels is None:
                continue
            is_batch = name == "build_batch"
            cut = [_with_truncations(x) for x in calls] if is_batch else []
            compare = is_batch or self.is_exact
            yield (
                f"{name} by kernels",
                partial(attempt, by_kernels, [*calls, *cut], compare),
            )
        yield name, partial(attempt, part, calls, self.is_exact)

    def _attempt_part(
        self,
        eager: Callable[..., Any],
        fn: Callable[..., Any],
        calls: list[tuple[Any, ...]],
        compare: bool,
    ) -> Callable[..., Any]:
        """Compile a function in place of the eager one; check it on the given calls."""
        compiled = compile_function(fn, self.backend)
        for args in calls:
            actual = compiled(*args)  # compiles at the first call
            if compare:
                check_output(actual, eager(*args), self.tolerance)
        return compiled

    def _compile_unroll(
        self, steps: list[tuple[Any, ...]]
    ) -> Callable[..., Any] | None:
        """Compile the whole rollout as one kernel, checked on its first steps; None if no kernel works."""
        # Each with what computes the values afterwards, or None if the step does.
        forms = [(x.actor_step, x.values) for x in self.kernels]
        forms.append((self.parts.rollout_step, None))
        try:
            unroll = self._first_that_works(
                ("rollout", partial(self._unroll_by_kernel, steps, *form))
                for form in forms
            )
        except Exception:
            self._note_failed_kernel("rollout")
            return None
        self.found["rollout"] = "kernel"
        return unroll

    def _unroll_by_kernel(
        self,
        steps: list[tuple[Any, ...]],
        step: Any,
        values: Callable[..., Any] | None,
    ) -> Callable[..., Any]:
        """Build and check the rollout kernel of a step function; `values`, unless None, computes the values later."""
        from funcppo.runtime.env_kernel import rollout

        cfg, *args = steps[0]
        first = rollout.StepArguments(*args)
        kernel = rollout.compile_unroll(step, cfg, first, values)
        states, transitions = zip(*(self.parts.rollout_step(*x) for x in steps))
        random_inputs = _stack(args[-1] for args in steps)
        actual = kernel(cfg, *first[:-1], random_inputs)
        expected = (states[-1], _stack(transitions))
        if self.is_exact:
            check_output(actual, expected, self.tolerance)
        return kernel

    def _note_no_kernel(
        self, place: str, reason: str, code: ReasonCode
    ) -> None:
        """Note why no kernel computes the rollout or the network."""
        self.found[f"{place}_reason"] = reason
        self.found[f"{place}_code"] = code

    def _note_failed_kernel(self, place: str) -> None:
        """Move a kernel's failure, if any, from the failures to the record's fields for its place."""
        for failure in [x for x in self.failures if x.name == place]:
            self.failures.remove(failure)
            self._note_no_kernel(place, failure.message, failure.code)


def _with_truncations(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return `build_batch` arguments with truncations in all steps that do not terminate, which are rare otherwise."""
    *before, trajectory, scalars, memory = args
    truncated = ~trajectory.terminated
    return *before, trajectory._replace(truncated=truncated), scalars, memory


def build_minibatch_step(
    strategy: str,
    step: Callable[..., Any],
    loss: Callable[..., Any],
    compile_part: Callable[..., Any],
) -> Callable[..., Any]:
    """Build the minibatch step of a strategy, without calling it.

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
    """Compute the gradient of `loss` in `params` by the autograd engine, and the loss metrics."""
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
    """Make one Adam step like `optim.update` by PyTorch's fused kernel; return the new parameters and state.

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


# ---- Extensions of a record.


def with_capture(
    record: StrategyRecord, captured: CapturedStep[Any, Any]
) -> StrategyRecord:
    """Return the record with how the step is replayed and, on a GPU without a CUDA graph, the reason."""
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
    """Return {name: choice} that processes which learn together must share."""
    return {
        "strategy": record.strategy,
        "rollout": record.rollout,
        "network": record.network,
        "replay mode": record.replay_mode,
    }


def with_host_environment(record: StrategyRecord) -> StrategyRecord:
    """Return the record with a note that the rollout step runs eagerly because environments step on the host."""
    failure = Failure(
        name="rollout_step",
        error_type="HostEnvironment",
        message="the environment steps on the host, which can be neither compiled nor captured",
        code=ReasonCode.HOST_ENVIRONMENT,
    )
    return dataclasses.replace(record, failures=(failure, *record.failures))


# ---- Equality of compiled and eager functions.


def check_update(
    step: Callable[[State, Minibatch], tuple[State, object]],
    eager: Callable[[State, Minibatch], tuple[State, object]],
    state: State,
    minibatches: Minibatch,
    tolerance: float = DEFAULT_TOLERANCE,
) -> None:
    """Compare two minibatch steps over the first minibatches, each continuing from its own state.

    One minibatch is not enough: while a network's last layer is zero, all other gradients are zero too.

    Args:
      step: the step to check, `(state, minibatch) -> (state, metrics)`.
      eager: the step to compare with.
      state: the update state before the first minibatch.
      minibatches: a tree whose leaves have a leading axis of minibatches.
      tolerance: the largest L2 distance of a leaf between both, relative to the distance that eager moves it, beyond
        the rounding of the leaf. Integers and booleans are equal. Metrics are compared as by `check_output`.

    Raises:
      EquivalenceError: a leaf of the update state or of the metrics differs by more.
    """
    actual = state
    expected = state
    shown: list[tuple[object, object]] = []
    for i in range(min(4, tree.length(minibatches))):
        minibatch = tree.item(minibatches, i)
        actual, metrics = step(actual, minibatch)
        expected, expected_metrics = eager(expected, minibatch)
        shown.append((metrics, expected_metrics))

    names = tree.paths(expected)
    leaves = zip(tree.leaves(actual), tree.leaves(expected), tree.leaves(state))
    for name, (actual_leaf, expected_leaf, initial_leaf) in zip(names, leaves):
        error = _distance(actual_leaf, expected_leaf)
        change = _distance(expected_leaf, initial_leaf)
        bound = _bound(expected_leaf, change, tolerance)
        if not error <= bound:  # true for NaN as well
            raise EquivalenceError(
                f"differs from eager by {error:.3g} in {name}, where that changes by {change:.3g}"
            )
    for metrics, expected_metrics in shown:
        check_output(metrics, expected_metrics, tolerance)


def check_output(
    actual: object, expected: object, tolerance: float = DEFAULT_TOLERANCE
) -> None:
    """Compare two outputs leaf by leaf, for example of one rollout function.

    Rounding may change a random choice, which changes all numbers of its row. So a few elements of large leaves may
    differ, one in a thousand; all elements of a leaf with fewer are equal, or close if they are floats.

    Args:
      actual: output of the compiled part, a tree.
      expected: output of the eager part.
      tolerance: a float differs when its error exceeds this share of its size, or of the root mean square of its leaf
        where that is larger; of 1 in `explained_variance`.

    Raises:
      EquivalenceError: too many elements of a leaf differ.
    """
    names = tree.paths(expected)
    leaves = zip(tree.leaves(actual), tree.leaves(expected))
    for name, (actual_leaf, expected_leaf) in zip(names, leaves):
        # 1 less a quotient: near 0 too its rounding is that of 1
        is_less = name.endswith("explained_variance")
        is_wrong = _wrong_elements(
            actual_leaf, expected_leaf, tolerance, 1.0 if is_less else 0.0
        )
        n_wrong = int(is_wrong.sum())
        n = expected_leaf.numel()
        # Rounding changes a random choice about once in a million rows.
        if n_wrong > 1e-3 * n:
            raise EquivalenceError(
                f"{n_wrong} of {n} numbers differ from eager in {name}"
            )


def _wrong_elements(
    actual: Tensor, expected: Tensor, tolerance: float, least_size: float
) -> Tensor:
    """Return the mask of elements that differ by more than rounding; sizes below `least_size` count as `least_size`."""
    wrong = actual != expected
    if not expected.dtype.is_floating_point:
        return wrong

    both_nan = actual.isnan() & expected.isnan()
    finite = torch.where(expected.isfinite(), expected, 0.0)
    typical_size = (
        float(finite.square().mean().sqrt()) if expected.numel() else 0.0
    )
    size = finite.abs().clamp_min(max(typical_size, least_size))
    error = (actual - expected).abs()
    # that of a difference of numbers near 1, in float32; larger for products of lower precision, as the tolerance is
    rounding = 1e-6 * max(1.0, tolerance / DEFAULT_TOLERANCE)
    is_close = error <= tolerance * size + rounding
    return wrong & ~both_nan & ~is_close


def _bound(expected: Tensor, change: float, tolerance: float) -> float:
    """Compute the largest allowed error of a leaf whose change has the given norm; 0 for integers."""
    if not expected.dtype.is_floating_point:
        return 0.0
    # A change smaller than the rounding of what it changes is lost in it.
    size = float(expected.double().norm())
    rounding = 2.0**-23 * size if math.isfinite(size) else 0.0
    return tolerance * change + rounding


def _distance(a: Tensor, b: Tensor) -> float:
    """Compute the L2 norm of a - b; equal infinities and pairs of NaN count as 0."""
    a = a.double()
    b = b.double()
    both_nan = a.isnan() & b.isnan()
    is_equal = (a == b) | both_nan
    difference = torch.where(is_equal, 0.0, a - b)
    return float(difference.norm())
