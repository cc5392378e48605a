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
from funcppo.runtime import ahead
from funcppo.runtime.kept import Kept, made
from funcppo.runtime.parity import PARITY, check_learning, check_output

RUNGS = ("one-graph", "two-graphs", "forward", "eager")
ACTING = ("rollout_step", "plan", "learning_batch")
LONGEST = "rollout_step"  # to compile
FUSE = {"online_softmax": False}  # a softmax over a few actions is a kernel of its own otherwise


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a rung, or a part of acting, is not in use."""

    name: str
    error: str  # exception class
    message: str  # its first line
    torch: str  # version


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """How the training step runs on this machine, and why not better."""

    rung: str  # in use
    failures: tuple[Failure, ...]  # of the rungs above it, from the top, and of parts of acting that run eagerly
    torch: str
    device: str
    backend: str
    replay: str = "none"  # how the compiled step is replayed: as `Captured.replay`


def compiled(fn: Callable[..., Any], backend: str = "inductor", tuned: bool = True, **more: Any) -> Callable[..., Any]:
    """`fn` as one graph of fixed shapes; a graph break is an error. One process may compile it 64 times.

    Args:
      tuned: rewrite products (`runtime/products.py`) and fuse more than Inductor does by itself.
      more: options of Inductor.
    """
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    if backend == "inductor":
        return _by_inductor(fn, tuned, **more)
    return torch.compile(fn, fullgraph=True, dynamic=False, backend=backend)


def _by_inductor(fn: Callable[..., Any], tuned: bool = True, **more: Any) -> Kept:
    from funcppo.runtime import threefry  # noqa: F401  # both here: an eager run can do without Inductor's 75 MB
    from funcppo.runtime.products import Products

    return Kept(fn, (({"post_grad_custom_pre_pass": Products(), **FUSE} if tuned else {}) | more) or None)


def strategy(
    collect: Callable[..., Any],
    parts: Any,
    cfg: Any,
    world: Any,
    state: Any,
    name: str = "auto",
    backend: str = "inductor",
    parity: float = PARITY,
) -> tuple[Any, Record]:
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
    if name not in ("auto", *RUNGS):
        raise ValueError(f"strategy {name!r}: want auto, {', '.join(RUNGS)}")
    record = partial(Record, torch=torch.__version__, device=str(state.key.device), backend=backend)
    if name == "eager":
        return parts, record(rung=name, failures=())
    calls = _first_calls(collect, parts, cfg, world, state)
    rungs = _ladder(cfg) if name == "auto" else (name,)
    trial = _Trial(backend=backend, parity=parity, forced=name != "auto")
    with _side_by_side(parts, calls if rungs[0] == "one-graph" else _only(calls, ACTING), backend) as wait:
        parts = trial.acting(parts, calls, wait)
        got = collect(cfg, world, state, parts)
        parts, rung = trial.learning(parts, rungs, (cfg, world, state.params, got.batch, got.scalars), got)
    return parts, record(rung=rung, failures=tuple(trial.failures))


def _ladder(cfg: Any) -> tuple[str, ...]:
    return RUNGS if cfg.ppo.n_microbatches == 1 else RUNGS[1:]


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

    got = collect(cfg, world, state, dataclasses.replace(parts, scan=once, **{n: recorded(n) for n in ACTING}))
    first = tree.map(lambda x: x[0], got.minibatches)
    return calls | {"minibatch_step": (cfg, world, state.params, got.batch, got.scalars, got.learner, first)}


def _only(calls: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: calls[name] for name in names}


@contextmanager
def _side_by_side(parts: Any, calls: dict[str, tuple[Any, ...]], backend: str) -> Iterator[Callable[[], None]]:
    """Other processes compile all parts but the longest that are not on disk; what is yielded waits for them."""
    if backend != "inductor" or not ahead.AFFORDABLE:
        yield lambda: None
        return
    asked = [(getattr(parts, name), args) for name, args in calls.items() if name != LONGEST]
    with ahead.compiling([(fn, args) for fn, args in asked if not _by_inductor(fn).at_hand(*args)]) as wait:
        yield wait


def _n_compiled() -> int:
    """Graphs that were not found on disk."""
    return sum(not m.found for m in made) + torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """What is tried, how near to eager it must come, and what it met."""

    backend: str
    parity: float
    forced: bool  # a failure is raised
    failures: list[Failure] = field(default_factory=list)

    def acting(self, parts: Any, calls: dict[str, tuple[Any, ...]], wait: Callable[[], None]) -> Any:
        """The parts of acting compiled; where one fails it stays eager, or raises if a rung is forced."""
        before = _n_compiled()
        for name in ACTING:
            try:
                parts = self.tuned_or_plain(partial(self._acting, name, parts, calls[name]), name)
            except Exception as error:
                self._failed(name, error)
            if name == LONGEST and _n_compiled() > before:  # what was started would else be waited for in vain
                wait()
        return parts

    def learning(self, parts: Any, rungs: tuple[str, ...], args: tuple[Any, ...], got: Any) -> tuple[Any, str]:
        """The parts with the minibatch step of the first rung that works, and its name."""
        for rung in rungs:
            try:
                return self.tuned_or_plain(partial(self._learning, rung, parts, args, got), rung), rung
            except Exception as error:
                self._failed(rung, error)
        raise AssertionError("eager learning failed")  # which raises by itself

    def tuned_or_plain(self, attempt: Callable[..., Any], name: str) -> Any:
        """What `attempt(tuned=...)` makes: tuned where that works; otherwise the failure is recorded, and plain."""
        if self.backend == "inductor" and name != "eager":
            try:
                return attempt(tuned=True)
            except Exception as error:
                self.failures.append(_failure(f"{name}, tuned", error))
        return attempt(tuned=False)

    def _failed(self, name: str, error: Exception) -> None:
        if self.forced or name == "eager":
            raise error
        self.failures.append(_failure(name, error))

    def _acting(self, name: str, parts: Any, args: tuple[Any, ...], tuned: bool) -> Any:
        """The parts with one of acting compiled, tried on `args`."""
        part = compiled(getattr(parts, name), self.backend, tuned)
        got = part(*args)
        if self.parity <= PARITY:
            check_output(got, getattr(parts, name)(*args), self.parity)
        return dataclasses.replace(parts, **{name: part})

    def _learning(self, rung: str, parts: Any, args: tuple[Any, ...], got: Any, tuned: bool) -> Any:
        """The parts with the minibatch step of a rung, tried on what was collected."""
        step = _rung(rung, parts, partial(compiled, backend=self.backend, tuned=tuned))
        eager = partial(parts.minibatch_step, *args)
        check_learning(partial(step, *args), eager, got.learner, got.minibatches, self.parity)
        return dataclasses.replace(parts, minibatch_step=step)


def _rung(name: str, parts: Any, compiled: Callable[..., Any]) -> Callable[..., Any]:
    if name == "one-graph":
        return compiled(parts.minibatch_step)
    if name == "two-graphs":
        gradient = partial(parts.gradient, of=compiled(parts.loss_gradient))
        return partial(parts.minibatch_step, gradient=gradient, apply_gradient=compiled(parts.apply_gradient))
    if name == "forward":
        gradient = partial(parts.gradient, of=partial(_autograd, compiled(parts.minibatch_loss)))
        return partial(
            parts.minibatch_step, gradient=gradient, apply_gradient=partial(parts.apply_gradient, adam=fused_adam)
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
        decoupled_weight_decay=cfg.decoupled,
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
    return Failure(name=name, error=type(error).__name__, message=lines[0], torch=torch.__version__)
