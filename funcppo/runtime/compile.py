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
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.optim.adam import adam

from funcppo.core import tree
from funcppo.core.settings import FieldError
from funcppo.runtime import cache
from funcppo.runtime.cache import CompiledFunction
from funcppo.runtime.capture import (
    CapturedStep,
    ReasonCode,
    ReplayMode,
    TreeFunction,
    are_trees_demanded,
    failure_code,
)
from funcppo.runtime.distributed import (
    Agree,
    alone,
    attempt_together,
    backend_options,
    error_line,
)

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


def _stable_argsort(x: Tensor, dim: int, descending: bool) -> Tensor:
    """Return the indices of a stable sort of x, [.., n] int64."""
    return torch.argsort(x, dim=dim, descending=descending, stable=True)


def _empty_order(x: Tensor, dim: int, descending: bool) -> Tensor:
    return torch.empty_like(x, dtype=torch.int64)


# An operator that Inductor leaves to PyTorch: `inductor.MatmulPass` calls it. Inductor writes a kernel of its own for
# rows of up to some hundred numbers. For thousands of rows PyTorch's sort is faster, for few it is as fast, and Triton
# takes seconds to compile the kernel. Declared by hand, because `torch.library.custom_op` imports Dynamo.
_LIBRARY = torch.library.Library("funcppo", "FRAGMENT")
_LIBRARY.define("stable_argsort(Tensor x, int dim, bool descending) -> Tensor")
_LIBRARY.impl("stable_argsort", _stable_argsort, "CompositeExplicitAutograd")
torch.library.register_fake(
    "funcppo::stable_argsort", _empty_order, lib=_LIBRARY
)
stable_argsort: Any = torch.ops.funcppo.stable_argsort.default


class EquivalenceError(RuntimeError):
    """Error for a compiled function that runs but returns other numbers than the eager one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Part of a fast training step that is not in use, and the reason."""

    # a strategy, a rollout part, "rollout" or "network" for the kernels of Triton, "cuda-graph"; "compiling": all
    name: str
    error_type: str = ""  # class of the exception, where one was raised
    message: str  # first line of its text
    code: ReasonCode = ReasonCode.OTHER

    def __str__(self) -> str:
        parts = (f"not {self.name}", self.error_type, self.message)
        return ": ".join(filter(None, parts))


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyRecord:
    """Record of how the training step runs on this machine, and why not faster."""

    strategy: str  # the one in use
    failures: tuple[Failure, ...]  # in the order of trial
    torch_version: str
    device: str
    backend: str  # of torch.compile
    # how the compiled step is replayed: see `capture.CapturedStep`
    replay_mode: ReplayMode = "none"
    # "kernel": the rollout is one kernel of Triton; "steps": its steps are called one by one
    rollout: Literal["kernel", "steps"] = "steps"
    # "kernels": kernels of Triton compute the network of the update and its gradient; "operators": those of PyTorch do
    network: Literal["kernels", "operators"] = "operators"


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
        cache.raise_recompile_limit()
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


def check_available(strategy: str, device: str = "") -> str:
    """Return in one line why nothing is compiled here; empty where it is, or where eager is asked for.

    Raises:
      FieldError: the strategy cannot be used here, as of `select_strategy`.
    """
    device_type = device.partition(":")[0]
    failure = _reason_to_stay_eager(strategy, device_type=device_type)
    return str(failure) if failure and strategy != "eager" else ""


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
    candidates = _candidates(parts, strategy)
    needs = device.type if backend == "inductor" else ""
    reason = _reason_to_stay_eager(strategy, agree, needs)
    if reason is not None:
        return parts, dataclasses.replace(record, failures=(reason,))

    folder = cache.use_folder()
    logger.info(
        "compiling a training step, which later starts find: %s", folder
    )
    precision = torch.get_float32_matmul_precision()
    if device.type == "cuda" and precision != "highest":
        tolerance = max(tolerance, TF32_TOLERANCE)
    if strategy == "auto" and are_trees_demanded():
        candidates = candidates[:-1]  # there are graphs of compiled ones only
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


def _candidates(parts: object, strategy: str) -> tuple[str, ...]:
    """Return the strategies to try.

    Raises:
      FieldError: forward is asked for by several learners (`train_step.vmap_parts`), which it does not serve.
    """
    step = getattr(parts, "minibatch_step", None)
    if not hasattr(step, "__wrapped__"):
        return STRATEGIES if strategy == "auto" else (strategy,)
    if strategy == "forward":
        expected = "auto, one-graph or eager where several seeds learn at once"
        raise FieldError("strategy", expected, strategy)
    return ("one-graph", "eager") if strategy == "auto" else (strategy,)


def _reason_to_stay_eager(
    strategy: str, agree: Agree = alone, device_type: str = ""
) -> Failure | None:
    """Return why nothing is compiled for a strategy; None if it compiles.

    Raises:
      FieldError: as of `select_strategy`.
    """
    names = ("auto", *STRATEGIES)
    if strategy not in names:
        raise FieldError("strategy", ", ".join(names), strategy)
    reason = reason_against_compiling(device_type)
    if are_trees_demanded() and (strategy == "eager" or reason):
        but = f", but {reason}" if reason else ""
        expected = f"one that compiles, for CUDAGraph Trees{but}"
        raise FieldError("strategy", expected, strategy)
    if reason and strategy not in ("auto", "eager"):
        expected = f"auto or eager, since {reason}"
        raise FieldError("strategy", expected, strategy)

    code = ReasonCode.DISABLED
    if strategy == "eager":
        reason, code = "eager was asked for", ReasonCode.NOT_REQUESTED
    peer_reason = agree("compiling", reason)
    if peer_reason and not reason:
        reason = f"another process stays eager: {peer_reason}"
    if not reason:
        return None
    return Failure(name="compiling", message=reason, code=code)


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
    carry, ys = tree.scan(fn, carry, tree.map(lambda x: x[:4], xs))
    rows = [min(t, 3) for t in range(tree.length(xs))]
    return carry, tree.map(lambda y: y[rows], ys)


def _stack(trees: Sequence[Result]) -> Result:
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
        self.tolerance = tolerance
        self.agree = agree
        self.raise_on_failure = raise_on_failure
        self._compile = partial(compile_function, backend=backend)
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
        reason, code = "CUDAGraph Trees are asked for", ReasonCode.NOT_REQUESTED
        absent = ["rollout", "network"]
        if not are_trees_demanded():
            self.may_use_kernels = True
            if candidates[0] != "one-graph":
                return
            code = ReasonCode.UNSUPPORTED
            reason = self.parts.kernels.reason_against(cfg)
            absent = ["network"] if reason else []
            self.kernels = [] if reason else [self.parts.kernels]
        self.failures += [
            Failure(name=name, message=reason, code=code) for name in absent
        ]

    def compile_rollout(self, calls: _Calls, names: tuple[str, ...]) -> Any:
        """Compile those of the named rollout functions that can be; return all step functions."""
        compiled = {}
        for name in names:
            attempts = [(name, self._rollout_attempts(name, calls[name]))]
            if name == "rollout_step" and self.may_use_kernels:
                attempts.insert(
                    0, ("unroll", self._unroll_attempts(calls[name]))
                )
            for field, ways in attempts:
                try:
                    _, compiled[field] = self._first_that_works(ways)
                    break
                except Exception:
                    if self.raise_on_failure and field == name:
                        raise
        if "unroll" in compiled:
            self.found["rollout"] = "kernel"
        return dataclasses.replace(self.parts, **compiled)

    def compile_update(
        self, candidates: tuple[str, ...], args: tuple[Any, ...], collected: Any
    ) -> Callable[..., Any]:
        """Return the minibatch step of the first strategy that works.

        Args:
          args: of the minibatch step, but for the update state and the minibatch.
          collected: the inputs of the minibatch updates, `train_step.RolloutResult`.
        """
        attempt = partial(self._attempt_update, args, collected)
        eager = self.parts.minibatch_step
        attempts = [
            (name, partial(attempt, name, eager)) for name in candidates
        ]
        if candidates[0] == "one-graph":
            attempts[:0] = [
                ("network", partial(attempt, "one-graph", x.minibatch_step))
                for x in self.kernels
            ]
        name, step = self._first_that_works(attempts)
        self.found["strategy"] = name
        if name == "network":
            self.found |= {"strategy": "one-graph", "network": "kernels"}
        return step

    def _attempt_update(
        self,
        args: tuple[Any, ...],
        collected: Any,
        strategy: str,
        step: Callable[..., Any],
    ) -> Callable[..., Any]:
        """Compile a minibatch step by a strategy, and check it on minibatches."""
        loss = self.parts.minibatch_loss
        compiled = build_minibatch_step(strategy, step, loss, self._compile)
        eager = self.parts.minibatch_step
        check_update(
            partial(compiled, *args),
            partial(eager, *args),
            collected.update_state,
            collected.minibatches,
            self.tolerance,
        )
        return compiled

    def _first_that_works(
        self, attempts: Iterable[tuple[str, Callable[[], Result]]]
    ) -> tuple[str, Result]:
        """Return the name and result of the first attempt that succeeds in all processes; record failures before it.

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
            except Exception as error:
                last_error = error
            else:
                seconds = time.perf_counter() - start
                logger.info("%s is compiled: %.1f s", name, seconds)
                return name, result
            failure = Failure(
                name=name,
                error_type=type(last_error).__name__,
                message=error_line(last_error),
                code=failure_code(last_error),
            )
            self.failures.append(failure)
            seconds = time.perf_counter() - start
            logger.info("no %s: %s; %.1f s", name, failure.message, seconds)
        raise last_error

    def _rollout_attempts(
        self, name: str, calls: list[tuple[Any, ...]]
    ) -> Iterator[tuple[str, Callable[[], Callable[..., Any]]]]:
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
        compiled = self._compile(fn)
        for args in calls:
            actual = compiled(*args)  # compiles at the first call
            if compare:
                check_output(actual, eager(*args), self.tolerance)
        return compiled

    def _unroll_attempts(
        self, steps: list[tuple[Any, ...]]
    ) -> Iterator[tuple[str, Callable[[], Callable[..., Any]]]]:
        """Yield ways to make the whole rollout one kernel: the values after it, or in each step."""
        for kernels in self.kernels:
            form = (kernels.actor_step, kernels.values)
            yield "rollout", partial(self._unroll_by_kernel, steps, *form)
        step = self.parts.rollout_step
        yield "rollout", partial(self._unroll_by_kernel, steps, step)

    def _unroll_by_kernel(
        self,
        steps: list[tuple[Any, ...]],
        step: Callable[..., Any],
        values: Callable[..., Any] | None = None,
    ) -> Callable[..., Any]:
        """Build the rollout kernel of a step, checked on some steps; `values`, if given, computes the values later."""
        from funcppo.runtime.env_kernel import rollout

        cfg, *args = steps[0]
        first = rollout.StepArguments(*args)
        kernel = rollout.compile_unroll(step, cfg, first, values)
        states, transitions = zip(*(self.parts.rollout_step(*x) for x in steps))
        random_inputs = _stack([x[-1] for x in steps])
        actual = kernel(cfg, *first[:-1], random_inputs)
        if self.is_exact:
            expected = (states[-1], _stack(transitions))
            check_output(actual, expected, self.tolerance)
        return kernel


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
    grads, (_, metrics) = tree.grad_and_value(
        lambda variables: loss(cfg, world, variables, *args), params
    )
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


def with_failure(
    record: StrategyRecord, name: str, reason: str, code: ReasonCode
) -> StrategyRecord:
    """Return the record with one more part that is not in use, before the others."""
    failure = Failure(name=name, message=reason, code=code)
    return dataclasses.replace(record, failures=(failure, *record.failures))


def with_capture(
    record: StrategyRecord, captured: CapturedStep[Any, Any]
) -> StrategyRecord:
    """Return the record with how the step is replayed and, on a GPU without a CUDA graph, the reason."""
    code = captured.fallback_code
    if code is not None and record.device.startswith("cuda"):
        reason = captured.fallback_reason
        record = with_failure(record, "cuda-graph", reason, code)
    return dataclasses.replace(record, replay_mode=captured.replay_mode)


def choices(record: StrategyRecord) -> dict[str, str]:
    """Return {name: choice} that processes which learn together must share."""
    return {
        "strategy": record.strategy,
        "rollout": record.rollout,
        "network": record.network,
        "replay mode": record.replay_mode,
    }


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
    actual = expected = state
    for i in range(min(4, tree.length(minibatches))):
        minibatch = tree.item(minibatches, i)
        actual, metrics = step(actual, minibatch)
        expected, expected_metrics = eager(expected, minibatch)
        check_output(metrics, expected_metrics, tolerance)

    leaves = map(tree.leaves, (actual, expected, state))
    for name, *triple in zip(tree.paths(expected), *leaves):
        is_float = triple[1].is_floating_point()
        actual_leaf, expected_leaf, initial_leaf = (x.double() for x in triple)
        error = _distance(actual_leaf, expected_leaf)
        change = _distance(expected_leaf, initial_leaf)
        # A change smaller than the rounding of what it changes is lost in it.
        size = float(
            torch.where(expected_leaf.isfinite(), expected_leaf, 0.0).norm()
        )
        bound = tolerance * change + 2.0**-23 * size
        if not error <= is_float * bound:  # true for NaN as well
            raise EquivalenceError(
                f"differs from eager by {error:.3g} in {name}, where that changes by {change:.3g}"
            )


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
    leaves = map(tree.leaves, (actual, expected))
    for name, actual_leaf, expected_leaf in zip(tree.paths(expected), *leaves):
        # 1 less a quotient: near 0 too its rounding is that of 1
        least_size = float(name.endswith("explained_variance"))
        is_wrong = _wrong_elements(
            actual_leaf, expected_leaf, tolerance, least_size
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
    if not expected.is_floating_point() or not expected.numel():
        return wrong

    both_nan = actual.isnan() & expected.isnan()
    size = torch.where(expected.isfinite(), expected, 0.0).abs()
    typical_size = float(size.square().mean().sqrt())
    size = size.clamp_min(max(typical_size, least_size))
    # that of a difference of numbers near 1, in float32; larger for products of lower precision, as the tolerance is
    rounding = 1e-6 * max(1.0, tolerance / DEFAULT_TOLERANCE)
    is_close = (actual - expected).abs() <= tolerance * size + rounding
    return wrong & ~both_nan & ~is_close


def _distance(a: Tensor, b: Tensor) -> float:
    """Compute the L2 norm of a - b; equal infinities and pairs of NaN count as 0."""
    is_equal = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(is_equal, 0.0, a - b).norm())
