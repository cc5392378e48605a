"""Pure functions whose repeated calls replay CUDA graphs: of one step, or of one body of a loop.

    step = GraphedStep(evaluate_step)                               # step(cfg, world, ..., state): one launch a call
    captured = capture_loop_bodies(train_step, EAGER_PARTS, state)  # one launch for each step of each loop

A graph is captured at the first call, and again for every other cfg, world and shape of the inputs. The world must
stay at its addresses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from funcppo.core import tree
from funcppo.runtime.agreement import Agree, alone
from funcppo.runtime.capture import CapturedStep, capture, clear_graph_pools

State = TypeVar("State")
Output = TypeVar("Output")
Carry = TypeVar("Carry")

_Capture = CapturedStep[Any, tuple[()]]  # states of several types in one table


class _GraphCache:
    """Captures of pure functions, each made at its first call."""

    def __init__(self, *, strict: bool = False, agree: Agree = alone) -> None:
        """Capture nothing yet; `strict` and `agree` are those of `capture`."""
        self._strict = strict
        self._agree = agree
        self._captures: dict[tuple[object, ...], _Capture] = {}

    def captures(self) -> list[_Capture]:
        """All captures so far."""
        return list(self._captures.values())

    def fallback_reasons(self) -> list[str]:
        """Why calls do not replay graphs; empty if all do."""
        reasons = {captured.fallback_reason for captured in self.captures()}
        return sorted(reasons - {""})

    def _get_or_capture(
        self,
        key: tuple[object, ...],
        fn: Callable[[State], tuple[State, tuple[()]]],
        make_initial_state: Callable[[], State],
    ) -> CapturedStep[State, tuple[()]]:
        if key not in self._captures:
            self._captures[key] = capture(
                fn,
                make_initial_state(),
                strict=self._strict,
                agree=self._agree,
            )
        return self._captures[key]


def _capture_key(
    cfg: object, world: object, inputs: object
) -> tuple[object, ...]:
    """What a graph is captured for: the settings, the addresses of the world, and the shapes of the inputs."""
    world_leaves = tree.leaves(world)
    input_leaves = tree.leaves(inputs)
    world_key = [(x.data_ptr(), x.shape) for x in world_leaves]
    input_key = [(x.shape, x.dtype) for x in input_leaves]
    return (cfg, *world_key, *input_key)


class GraphedStep(_GraphCache, Generic[State]):
    """A pure `step(cfg, world, *inputs, state) -> state` whose calls on a GPU replay a CUDA graph.

    It returns its buffers, which the next call overwrites. A call with the state that the last call returned, and with
    the same other arguments, continues in place. Any other call copies its arguments into the buffers first.
    """

    def __init__(self, step: Callable[..., State]) -> None:
        """Capture nothing yet.

        Args:
          step: the pure function.
        """
        super().__init__()
        self._step = step
        # the arguments of a call that continues in place
        self._in_place_args: tuple[object, ...] = ()

    def __call__(self, cfg: object, world: object, *inputs: object) -> State:
        """Return the next state.

        Args:
          cfg: frozen settings.
          world: data that stays at its addresses.
          *inputs: the other arguments of the step; the state is the last one.

        Raises:
          CaptureError: as by `capture`.
        """
        args = (cfg, world, *inputs)
        if not _are_identical(args, self._in_place_args):
            key = _capture_key(cfg, world, inputs)
            self._captured = self._get_or_capture(
                key, partial(self._advance, cfg, world), lambda: inputs
            )
            self._captured.load(inputs)
            state = self._captured.state[-1]
            self._in_place_args = (*args[:-1], state)
        self._captured.step()
        return self._captured.state[-1]

    def release(self) -> None:
        """Let go of all graphs and their buffers; later calls capture anew."""
        self._captures.clear()
        self._in_place_args = ()
        if hasattr(self, "_captured"):
            del self._captured
        clear_graph_pools()

    def _advance(
        self, cfg: object, world: object, inputs: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], tuple[()]]:
        """The inputs with the state replaced by the next one."""
        state = self._step(cfg, world, *inputs)
        return (*inputs[:-1], state), ()


def _are_identical(
    args: tuple[object, ...], others: tuple[object, ...]
) -> bool:
    if len(args) != len(others):
        return False
    return all(a is b for a, b in zip(args, others))


class ScanState(NamedTuple):
    """Buffers of a loop between two steps."""

    # arguments of the body that are the same in every step
    inputs: tuple[object, ...]
    carry: Any  # what the body passes on
    xs: object  # inputs of all n steps [n, ...]
    # outputs of all n steps [n, ...]; those of steps to come are not filled
    ys: Any
    step_index: Tensor  # number of the next step [1]


class GraphedScan(_GraphCache):
    """A `scan` over parts of a training step; on a GPU its body is captured once, and launched for each step.

    As `tree.scan` it is a pure function: what it returns is not overwritten by later calls.
    """

    def __call__(
        self, fn: partial[tuple[Carry, Output]], carry: Carry, xs: object
    ) -> tuple[Carry, Output]:
        """Return the last carry, and the outputs of all steps stacked.

        Args:
          fn: `partial(part, cfg, world, *inputs)`, where `part(cfg, world, *inputs, carry, x) -> (carry, y)`.
          carry: the carry before the first step.
          xs: inputs of the steps, along the leading axis of every leaf.

        Raises:
          CaptureError: as by `capture`.
        """
        cfg, world, *inputs = fn.args
        inputs = tuple(inputs)
        body = partial(fn.func, cfg, world, **fn.keywords)
        key = (
            fn.func,
            *fn.keywords.items(),
            *_capture_key(cfg, world, (inputs, carry, xs)),
        )
        make_initial_state = partial(
            _initial_scan_state, body, inputs, carry, xs
        )
        loop = self._get_or_capture(
            key, partial(_run_body, body), make_initial_state
        )

        # The step index begins at 0 at every call, also after one that was interrupted.
        first_index = torch.zeros_like(loop.state.step_index)
        ys = loop.state.ys
        loop.load(ScanState(inputs, carry, xs, ys, step_index=first_index))
        for _ in range(tree.length(xs)):
            loop.step()
        result = (loop.state.carry, loop.state.ys)
        return tree.map(torch.clone, result)


def _initial_scan_state(
    body: Callable[..., tuple[Any, Any]],
    inputs: tuple[object, ...],
    carry: object,
    xs: object,
) -> ScanState:
    """The loop before its first step; the body runs once, for the shapes of its output."""
    n_steps = tree.length(xs)
    _, y = body(*inputs, carry, tree.item(xs, 0))
    device = tree.leaves(carry)[0].device
    step_index = torch.zeros(1, dtype=torch.int64, device=device)

    def make_rows(leaf: Tensor) -> Tensor:
        return leaf.new_zeros((n_steps, *leaf.shape))

    ys = tree.map(make_rows, y)
    return ScanState(inputs, carry, xs, ys=ys, step_index=step_index)


def _run_body(
    body: Callable[..., tuple[Any, Any]], loop: ScanState
) -> tuple[ScanState, tuple[()]]:
    """The loop after one more step.

    The outputs are written into their rows of `ys` here. As new tensors, all rows would be copied in every step.
    """
    index = loop.step_index

    def read_row(rows: Tensor) -> Tensor:
        return rows.index_select(0, index)[0]

    def write_row(rows: Tensor, row: Tensor) -> Tensor:
        return rows.index_copy_(0, index, row[None])

    x = tree.map(read_row, loop.xs)
    carry, y = body(*loop.inputs, loop.carry, x)
    tree.map(write_row, loop.ys, y)
    next_loop = loop._replace(carry=carry, step_index=index + 1)
    return next_loop, ()


def capture_loop_bodies(
    step: Callable[..., tuple[State, Output]],
    parts: Any,
    state: State,
    *,
    strict: bool = False,
    agree: Agree = alone,
) -> CapturedStep[State, Output]:
    """Capture the body of each loop of a training step as a CUDA graph, instead of the whole step as one.

    Warm-up and capture then take a few loop bodies instead of all of them, which saves seconds with eager kernels. The
    price is one launch for each step of a loop, and the few hundred kernels between the loops launched one by one.

    Args:
      step: `step(state, parts=...)`; its loops are `parts.scan` over functions of `parts`.
      parts: the parts to run, except their scan, `train_step.Parts`.
      state: the first state. One step from it is computed and dropped, to capture the loop bodies.
      strict: raise instead of falling back to calls of the bodies.
      agree: as of `capture`.

    Returns:
      The step and its buffers; `n_graphs` and `capture_ms` are those of the loop bodies.

    Raises:
      CaptureError: as by `capture`.
    """
    scan = GraphedScan(strict=strict, agree=agree)
    graphed_parts = dataclasses.replace(parts, scan=scan)
    captured = capture(
        partial(step, parts=graphed_parts), state, use_cuda_graph=False
    )
    captured.fn(captured.state)

    reasons = scan.fallback_reasons()
    captures = scan.captures()
    codes = [body.fallback_code for body in captures if body.fallback_code]
    return dataclasses.replace(
        captured,
        replay_mode="none" if reasons else "cuda-graph-per-loop-body",
        fallback_reason="; ".join(reasons),
        fallback_code=codes[0] if codes else None,
        n_graphs=sum(body.n_graphs for body in captures),
        capture_ms=sum(body.capture_ms for body in captures),
    )
