"""Pure functions whose calls replay CUDA graphs: of a step that is called again and again, of a turn of a loop.

    step = Replayed(evaluate_step)                        # a search goes on in place, one launch a step
    captured = capture_turns(train_step, EAGER, state)    # one turn of each loop is recorded, launched T and n times

What is recorded is kept for each cfg, world and shapes of what is given. The world must stay where it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from funcppo import tree
from funcppo.runtime.capture import CapturedStep, capture

S = TypeVar("S")
O = TypeVar("O")


class _GraphCache:
    """Captures of pure functions, made when they are first called for."""

    def __init__(self, *, strict: bool = False) -> None:
        """Nothing recorded yet; `strict` as in `capture`."""
        self._strict, self._held = strict, dict[Any, CapturedStep[Any, tuple[()]]]()

    def captures(self) -> list[CapturedStep[Any, tuple[()]]]:
        """What was captured so far."""
        return list(self._held.values())

    def fallback_reasons(self) -> list[str]:
        """Why calls are no replays; empty where all are."""
        return sorted({captured.fallback_reason for captured in self.captures()} - {""})

    def _at(
        self, key: Any, fn: Callable[[S], tuple[S, tuple[()]]], first: Callable[[], S]
    ) -> CapturedStep[S, tuple[()]]:
        """The capture under `key`, from the state `first()` where there is none yet."""
        if key not in self._held:
            self._held[key] = capture(fn, first(), strict=self._strict)
        return self._held[key]


def _key(cfg: Any, world: Any, given: Any) -> tuple[Any, ...]:
    places = ((x.data_ptr(), x.shape) for x in tree.leaves(world))
    return cfg, *places, *((x.shape, x.dtype) for x in tree.leaves(given))


class GraphedStep(_GraphCache, Generic[S]):
    """A pure `step(cfg, world, *inputs, state) -> state`, whose calls on a GPU replay a CUDA graph.

    What it returns are buffers that the next call overwrites. A call with them goes on in place; one with another state
    or other inputs copies these over the buffers first.
    """

    def __init__(self, step: Callable[..., S]) -> None:
        """`step`, nothing recorded yet."""
        super().__init__()
        self._step = step
        self._last: tuple[Any, ...] = ()  # what a call that goes on in place is given

    def __call__(self, cfg: Any, world: Any, *given: Any) -> S:
        """As `step`. Errors: those of `capture`."""
        asked = (cfg, world, *given)
        if len(asked) != len(self._last) or any(a is not b for a, b in zip(asked, self._last)):
            self._going = self._at(_key(cfg, world, given), partial(self._moved, cfg, world), lambda: given)
            self._going.load(given)
            self._last = (*asked[:-1], self._going.state[-1])
        self._going.step()
        return self._last[-1]

    def _moved(self, cfg: Any, world: Any, given: Any) -> tuple[Any, tuple[()]]:
        return (*given[:-1], self._step(cfg, world, *given)), ()


class _ScanState(NamedTuple):
    """A loop between two turns."""

    inputs: Any  # the same in every turn
    carry: Any
    xs: Any  # [n, ...]
    ys: Any  # [n, ...]: those of turns to come are not filled
    step_index: Tensor  # [1], the number of the next


class GraphedScan(_GraphCache):
    """As `rollout.scan`, over parts of a training step: on a GPU a turn is recorded once, and launched for each x.

    A pure function: what it returns is the caller's.
    """

    def __call__(self, fn: partial[tuple[Any, Any]], carry: Any, xs: Any) -> tuple[Any, Any]:
        """The last carry, and the outputs stacked. Errors: those of `capture`.

        Args:
          fn: `partial(part, cfg, world, *inputs)`, where `part(cfg, world, *inputs, carry, x) -> (carry, y)`.
        """
        (cfg, world), inputs = fn.args[:2], fn.args[2:]
        part = partial(fn.func, cfg, world, **fn.keywords)
        key = (fn.func, *fn.keywords.items(), *_key(cfg, world, (inputs, carry, xs)))
        loop = self._at(key, partial(_turn, part), lambda: _first(part, inputs, carry, xs))
        start = torch.zeros_like(loop.state.step_index)
        loop.load(_ScanState(inputs=inputs, carry=carry, xs=xs, ys=loop.state.ys, step_index=start))
        for _ in range(len(tree.leaves(xs)[0])):
            loop.step()
        return tree.map(torch.clone, (loop.state.carry, loop.state.ys))


def _first(part: Callable[..., Any], inputs: Any, carry: Any, xs: Any) -> _ScanState:
    """The loop before its first turn; what a turn gives is made once to see its shapes."""
    n = len(tree.leaves(xs)[0])
    _, like = part(*inputs, carry, tree.map(lambda x: x[0], xs))
    turn = torch.zeros(1, dtype=torch.int64, device=tree.leaves(carry)[0].device)
    return _ScanState(inputs, carry, xs, ys=tree.map(lambda y: y.new_zeros((n, *y.shape)), like), step_index=turn)


def _turn(part: Callable[..., Any], loop: _ScanState) -> tuple[_ScanState, tuple[()]]:
    """The loop one turn on. Its outputs are written into their place here: new stacks would be copies of the whole."""
    x = tree.map(lambda leaf: leaf.index_select(0, loop.step_index)[0], loop.xs)
    carry, y = part(*loop.inputs, loop.carry, x)
    tree.map(lambda stack, one: stack.index_copy_(0, loop.step_index, one[None]), loop.ys, y)
    return loop._replace(carry=carry, step_index=loop.step_index + 1), ()


def capture_loop_bodies(
    step: Callable[..., tuple[S, O]], parts: Any, state: S, *, strict: bool = False
) -> CapturedStep[S, O]:
    """As `capture(partial(step, parts=parts), state)`, but each loop of the step is as many launches as it has turns.

    To warm up and to record takes a few turns in place of all: seconds less for eager kernels. What lies between the
    loops, a few hundred kernels, is launched one by one. One step is made and dropped, to see what it records.

    Args:
      step: `step(state, parts=...)`, whose loops are `parts.scan`, of parts alone.
    """
    looped = GraphedScan(strict=strict)
    captured = capture(partial(step, parts=dataclasses.replace(parts, scan=looped)), state, use_cuda_graph=False)
    captured.fn(captured.state)
    reasons, held = looped.fallback_reasons(), looped.captures()
    return dataclasses.replace(
        captured,
        replay_mode="none" if reasons else "manual graph a turn",
        fallback_reason="; ".join(reasons),
        n_graphs=sum(x.n_graphs for x in held),
        capture_ms=sum(x.capture_ms for x in held),
    )
