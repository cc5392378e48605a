"""How a training step is compiled here: a ladder of rungs, tried from the top, and a record of what each one met.

    one-graph   forward, loss, backward, clip and Adam of a minibatch in one graph
    two-graphs  the gradient in one graph, launched for each microbatch; clip and Adam in another
    forward     forward and loss compiled, backward by autograd, fused Adam
    eager       nothing of the learning compiled

A rung counts only if its step equals the eager one: some compilers are fast and wrong. Acting (drawing keys and
orders, rollout, advantages) is compiled part by part beside the ladder. Only pure functions are tried on a user's
state, so a trial leaves no trace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from funcppo import tree
from funcppo.runtime import parallel_compile
from funcppo.runtime.compile_cache import CachedFunction, compile_events
from funcppo.runtime.equivalence import DEFAULT_TOLERANCE, check_output, check_update

STRATEGIES = ("one-graph", "two-graphs", "forward", "eager")
ROLLOUT_PARTS = ("rollout_step", "sample_randomness", "build_batch")
SLOWEST_TO_COMPILE = "rollout_step"  # to compile
FUSION_OPTIONS = {"online_softmax": False}  # a softmax over a few actions is a kernel of its own otherwise


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a rung, or a part of acting, is not in use."""

    name: str
    error_type: str  # exception class
    message: str  # its first line
    torch_version: str  # version


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyRecord:
    """How the training step runs on this machine, and why not better."""

    strategy: str  # in use
    failures: tuple[Failure, ...]  # of the rungs above it, from the top, and of parts of acting that run eagerly
    torch_version: str
    device: str
    backend: str
    replay_mode: str = "none"  # how the compiled step is replayed: as `Captured.replay`


def compile_function(
    fn: Callable[..., Any], backend: str = "inductor", use_custom_passes: bool = True, **inductor_options: Any
) -> Callable[..., Any]:
    """`fn` as one graph of fixed shapes; a graph break is an error. One process may compile it 64 times.

    Args:
      tuned: rewrite products (`runtime/inductor/matmul_pass.py`) and fuse more than Inductor does by itself.
      more: options of Inductor.
    """
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    if backend == "inductor":
        return _by_inductor(fn, use_custom_passes, **inductor_options)
    return torch.compile(fn, fullgraph=True, dynamic=False, backend=backend)


def _by_inductor(fn: Callable[..., Any], tuned: bool = True, **more: Any) -> CachedFunction:
    from funcppo.runtime.inductor import threefry_lowering  # noqa: F401  # registers the lowering
    from funcppo.runtime.inductor.matmul_pass import MatmulPass

    return CachedFunction(
        fn, (({"post_grad_custom_pre_pass": MatmulPass(), **FUSION_OPTIONS} if tuned else {}) | more) or None
    )


def select_strategy(
    collect: Callable[..., Any],
    parts: Any,
    cfg: Any,
    world: Any,
    state: Any,
    strategy: str = "auto",
    backend: str = "inductor",
    tolerance: float = DEFAULT_TOLERANCE,
) -> tuple[Any, StrategyRecord]:
    """The parts of the training step as fast as they run here, and the record of what was tried.

    Args:
      collect: `train_step.collect`.
      parts: the eager parts, `train_step.EAGER`.
      state: a training state; the trials act and learn from it and drop the result.
      name: a rung to force, or "auto", which begins with two-graphs where minibatches come in microbatches: in one
        graph a compiler may hold the activations of all of them at once.
      parity: how far compiled numbers may be from eager ones. Where it is more than PARITY, since products round to
        few bits, acting is not looked at: draws may fall otherwise.
    Errors: ValueError when there is no such rung; whatever a forced rung raises.
    """
    if strategy not in ("auto", *STRATEGIES):
        raise ValueError(f"strategy {strategy!r}: want auto, {', '.join(STRATEGIES)}")
    record = partial(StrategyRecord, torch_version=torch.__version__, device=str(state.key.device), backend=backend)
    if strategy == "eager":
        return parts, record(strategy=strategy, failures=())
    calls = _first_calls(collect, parts, cfg, world, state)
    rungs = _ladder(cfg) if strategy == "auto" else (strategy,)
    trial = _StrategySelector(backend=backend, tolerance=tolerance, raise_on_failure=strategy != "auto")
    with _side_by_side(parts, calls if rungs[0] == "one-graph" else _only(calls, ROLLOUT_PARTS), backend) as wait:
        parts = trial.compile_rollout_parts(parts, calls, wait)
        got = collect(cfg, world, state, parts)
        parts, rung = trial.compile_update_part(parts, rungs, (cfg, world, state.params, got.batch, got.scalars), got)
    return parts, record(strategy=rung, failures=tuple(trial.failures))


def _ladder(cfg: Any) -> tuple[str, ...]:
    return STRATEGIES if cfg.ppo.n_microbatches == 1 else STRATEGIES[1:]


def _first_calls(
    collect: Callable[..., Any], parts: Any, cfg: Any, world: Any, state: Any
) -> dict[str, tuple[Any, ...]]:
    """What the parts of acting and the minibatch step are first called with; the first rollout step stands for all."""
    calls: dict[str, tuple[Any, ...]] = {}

    def recorded(name: str) -> Callable[..., Any]:
        return lambda *args: getattr(parts, name)(*calls.setdefault(name, args))

    def once(fn: Callable[..., Any], carry: Any, xs: Any) -> tuple[Any, Any]:
        carry, y = fn(carry, tree.map(lambda x: x[0], xs))
        return carry, tree.map(lambda leaf: torch.stack([leaf] * len(tree.leaves(xs)[0])), y)

    got = collect(cfg, world, state, dataclasses.replace(parts, scan=once, **{n: recorded(n) for n in ROLLOUT_PARTS}))
    first = tree.map(lambda x: x[0], got.minibatches)
    return calls | {"minibatch_step": (cfg, world, state.params, got.batch, got.scalars, got.update_state, first)}


def _only(calls: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: calls[name] for name in names}


@contextmanager
def _side_by_side(parts: Any, calls: dict[str, tuple[Any, ...]], backend: str) -> Iterator[Callable[[], None]]:
    """Other processes compile all parts but the longest that are not on disk; what is yielded waits for them."""
    if backend != "inductor" or not parallel_compile.MAX_WORKERS:
        yield lambda: None
        return
    asked = [(getattr(parts, name), args) for name, args in calls.items() if name != SLOWEST_TO_COMPILE]
    with parallel_compile.compile_in_background(
        [(fn, args) for fn, args in asked if not _by_inductor(fn).is_cached(*args)]
    ) as wait:
        yield wait


def _n_compiled() -> int:
    """Graphs that were not found on disk."""
    return sum(not m.cache_hit for m in compile_events) + torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _StrategySelector:
    """What is tried, how near to eager it must come, and what it met."""

    backend: str
    tolerance: float
    raise_on_failure: bool  # a failure is raised
    failures: list[Failure] = field(default_factory=list)

    def compile_rollout_parts(self, parts: Any, calls: dict[str, tuple[Any, ...]], wait: Callable[[], None]) -> Any:
        """The parts of acting compiled; where one fails it stays eager, or raises if a rung is forced."""
        before = _n_compiled()
        for name in ROLLOUT_PARTS:
            try:
                parts = self.compile_with_fallback(partial(self._acting, name, parts, calls[name]), name)
            except Exception as error:
                self._failed(name, error)
            if (
                name == SLOWEST_TO_COMPILE and _n_compiled() > before
            ):  # what was started would else be waited for in vain
                wait()
        return parts

    def compile_update_part(
        self, parts: Any, rungs: tuple[str, ...], args: tuple[Any, ...], got: Any
    ) -> tuple[Any, str]:
        """The parts with the minibatch step of the first rung that works, and its name."""
        for rung in rungs:
            try:
                return self.compile_with_fallback(partial(self._learning, rung, parts, args, got), rung), rung
            except Exception as error:
                self._failed(rung, error)
        raise AssertionError("eager learning failed")  # which raises by itself

    def compile_with_fallback(self, attempt: Callable[..., Any], name: str) -> Any:
        """What `attempt(tuned=...)` makes: tuned where that works; otherwise the failure is recorded, and plain."""
        if self.backend == "inductor" and name != "eager":
            try:
                return attempt(tuned=True)
            except Exception as error:
                self.failures.append(_failure(f"{name}, tuned", error))
        return attempt(tuned=False)

    def _failed(self, name: str, error: Exception) -> None:
        if self.raise_on_failure or name == "eager":
            raise error
        self.failures.append(_failure(name, error))

    def _acting(self, name: str, parts: Any, args: tuple[Any, ...], tuned: bool) -> Any:
        """The parts with one of acting compiled, tried on `args`."""
        part = compile_function(getattr(parts, name), self.backend, tuned)
        got = part(*args)
        if self.tolerance <= DEFAULT_TOLERANCE:
            check_output(got, getattr(parts, name)(*args), self.tolerance)
        return dataclasses.replace(parts, **{name: part})

    def _learning(self, rung: str, parts: Any, args: tuple[Any, ...], got: Any, tuned: bool) -> Any:
        """The parts with the minibatch step of a rung, tried on what was collected."""
        step = _rung(rung, parts, partial(compile_function, backend=self.backend, use_custom_passes=tuned))
        eager = partial(parts.minibatch_step, *args)
        check_update(partial(step, *args), eager, got.update_state, got.minibatches, self.tolerance)
        return dataclasses.replace(parts, minibatch_step=step)


def _rung(name: str, parts: Any, compiled: Callable[..., Any]) -> Callable[..., Any]:
    if name == "one-graph":
        return compiled(parts.minibatch_step)
    if name == "two-graphs":
        gradient = partial(parts.accumulate_gradients, gradient_fn=compiled(parts.loss_gradient))
        return partial(
            parts.minibatch_step, accumulate_gradients=gradient, apply_gradients=compiled(parts.apply_gradients)
        )
    if name == "forward":
        gradient = partial(parts.accumulate_gradients, gradient_fn=partial(_autograd, compiled(parts.minibatch_loss)))
        return partial(
            parts.minibatch_step,
            accumulate_gradients=gradient,
            apply_gradients=partial(parts.apply_gradients, adam_update=fused_adam),
        )
    return parts.minibatch_step


def _autograd(loss: Callable[..., Any], cfg: Any, world: Any, params: Any, *args: Any) -> tuple[Any, Any]:
    """The gradient of `loss` by the autograd engine, and its metrics."""
    leaves = [x.detach().requires_grad_() for x in tree.leaves(params)]
    with torch.enable_grad():
        value, metrics = loss(cfg, world, tree.unflatten(params, leaves), *args)
    grads = torch.autograd.grad(value, leaves, materialize_grads=True)
    return tree.unflatten(params, list(grads)), tree.map(torch.Tensor.detach, metrics)


def fused_adam(cfg: Any, grads: Any, state: Any, params: Any, learning_rate: Tensor) -> tuple[Any, Any]:
    """As `optim.update`, by PyTorch's fused kernel on copies."""
    new, mu, nu = ([x.clone() for x in tree.leaves(t)] for t in (params, state.mu, state.nu))
    steps = [state.step.to(torch.float32, copy=True) for _ in new]
    adam(
        new,
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
    after = state._replace(step=state.step + 1, mu=tree.unflatten(params, mu), nu=tree.unflatten(params, nu))
    return tree.unflatten(params, new), after


def _failure(name: str, error: Exception) -> Failure:
    lines = str(error).strip().splitlines() or [""]
    return Failure(name=name, error_type=type(error).__name__, message=lines[0], torch_version=torch.__version__)
