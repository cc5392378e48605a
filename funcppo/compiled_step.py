"""The training step as it runs: compiled and captured, or neither where a run is too short to repay it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from funcppo import train_step
from funcppo.config import Config, PPOConfig
from funcppo.core.host import Deadline
from funcppo.runtime import compile as compilation
from funcppo.runtime.capture import (
    CapturedStep,
    are_trees_demanded,
    capture,
    capture_loop_bodies,
    clear_graph_pools,
)
from funcppo.runtime.compile import (
    DEFAULT_TOLERANCE,
    StrategyRecord,
    with_capture,
)
from funcppo.runtime.distributed import Agree, alone
from funcppo.runtime.reasons import ReasonCode
from funcppo.train_step import Metrics, StepFunctions, TrainState

# Seconds that the updates of a run take uncompiled, from which compiling repays, by type of device. On a GPU compiling
# takes about as long, and saves most of an update of many small kernels.
COMPILE_MIN_SECONDS = {"cuda": 36.0}
# Rollout steps and minibatch updates from which it repays where no update is measured. Compiling takes a minute or two,
# and saves 1.5 ms on each of them on a GPU, 8 ms on a CPU.
COMPILE_MIN_CALLS = 40_000
CHECKPOINT_SECONDS = 60.0  # between two checkpoints, validations aside


def prepare_step(
    cfg: Config,
    world: object,
    state: TrainState[Any, Any],
    parts: StepFunctions,
    strategy: str,
    tolerance: float = DEFAULT_TOLERANCE,
    agree: Agree = alone,
    deadline: Deadline | None = None,
    uncompiled_seconds: float | None = None,
    decide: Callable[[bool], bool] = bool,
) -> tuple[CapturedStep[TrainState[Any, Any], Metrics], StrategyRecord]:
    """Compile or capture a training step; with strategy auto, one of a run too short to repay that is not compiled.

    Args:
      state: the first state; it is copied.
      parts: `EAGER_PARTS`, or `vmap_parts` of them for stacked states.
      strategy: as of `runtime.compile.select_strategy`.
      tolerance, agree: likewise.
      deadline: of the updates, one of which auto measures on a GPU; None: it measures none.
      uncompiled_seconds: of all updates, as measured at an earlier start.
      decide: what the processes that share the step agree on.

    Returns:
      The step, and the record of the strategy that it uses and why.

    Raises:
      Exception: whatever a strategy raises that was set by name and fails.
    """
    step = partial(train_step.train_step, cfg, world)
    ppo = cfg.ppo
    device_type = state.key.device.type
    # Recording all kernels of an uncompiled iteration takes seconds, so a short run records one step of each loop.
    capture_bodies = partial(
        capture_loop_bodies, step, parts, state, agree=agree
    )

    # Where graphs of compiled functions are asked for, nothing is decided.
    decides = strategy == "auto" and not are_trees_demanded()
    bodies = None
    if decides and device_type in COMPILE_MIN_SECONDS:
        bodies, seconds = _measure_updates(
            ppo.n_updates,
            COMPILE_MIN_SECONDS[device_type],
            deadline,
            decide,
            capture_bodies,
        )
        uncompiled_seconds = seconds if deadline else uncompiled_seconds
    repays, numbers = decide_to_compile(ppo, device_type, uncompiled_seconds)
    is_short = decides and not decide(repays)
    if bodies and not is_short:
        bodies = None  # frees their memory
        clear_graph_pools()

    # Where the compiler is turned off, that is the reason.
    is_reason = is_short and not compilation.reason_against_compiling()
    parts, record = compilation.select_strategy(
        train_step.collect,
        parts,
        cfg,
        world,
        state,
        "eager" if is_reason else strategy,
        tolerance=tolerance,
        agree=agree,
    )

    if is_short and device_type != "cpu":
        captured = bodies or capture_bodies()
    else:
        captured = capture(partial(step, parts=parts), state, agree=agree)
    record = dataclasses.replace(
        with_capture(record, captured), uncompiled_seconds=uncompiled_seconds
    )
    if is_reason:
        reason = f"compiling would take longer than it saves: {numbers} (--strategy one-graph compiles)"
        record = dataclasses.replace(
            record, skip_reason=reason, skip_code=ReasonCode.SHORT_RUN
        )
    return captured, record


def _measure_updates(
    n_updates: int,
    min_seconds: float,
    deadline: Deadline | None,
    decide: Callable[[bool], bool],
    capture_bodies: Callable[[], CapturedStep[Any, Any]],
) -> tuple[CapturedStep[Any, Any] | None, float]:
    """The step that was timed, and the seconds of all updates within the deadline; None where that is too near."""
    seconds = deadline.seconds_left if deadline else 0.0
    if not decide(seconds >= min_seconds):
        return None, seconds
    bodies = capture_bodies()  # makes an update, which loads code
    update_seconds = _time_call(bodies.fn, bodies.state)
    return bodies, min(seconds, n_updates * update_seconds)


def _time_call(fn: Callable[..., object], *args: object) -> float:
    """Seconds of a call, up to the end of what it starts on a GPU."""
    _wait_for_gpu()
    start = time.perf_counter()
    fn(*args)
    _wait_for_gpu()
    return time.perf_counter() - start


def _wait_for_gpu() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def decide_to_compile(
    ppo: PPOConfig, device_type: str, uncompiled_seconds: float | None
) -> tuple[bool, str]:
    """Whether compiling repays in a run, and the numbers by which it does or does not.

    Args:
      uncompiled_seconds: the time of all updates, by which a GPU decides; None if it was not measured.
    """
    min_seconds = COMPILE_MIN_SECONDS.get(device_type)
    if uncompiled_seconds is None or min_seconds is None:
        calls = n_calls(ppo)
        numbers = f"{calls:,} rollout steps and minibatches, repaid from {COMPILE_MIN_CALLS:,} on"
        return calls >= COMPILE_MIN_CALLS, numbers
    numbers = f"{uncompiled_seconds:.3g} s of updates, repaid from {min_seconds:g} s on"
    return uncompiled_seconds >= min_seconds, numbers


def n_calls(ppo: PPOConfig) -> int:
    """Number of rollout steps and microbatches in a whole run."""
    microbatches_per_update = (
        ppo.n_epochs * ppo.n_minibatches * ppo.n_microbatches
    )
    return ppo.n_updates * (ppo.n_steps + microbatches_per_update)


def describe_strategy(record: StrategyRecord) -> str:
    """Return a line that says which strategy is used, and why not another."""
    line = f"strategy {record.strategy} on {record.device}, replayed by: {record.replay_mode}"
    if record.skip_reason:
        line += f"; others not tried: {record.skip_reason}"
    elif record.uncompiled_seconds is not None:
        line += f"; uncompiled its updates would take {record.uncompiled_seconds:.3g} s"
    if record.rollout == "kernel":
        line += "; the rollout is one kernel"
    elif record.rollout_reason:
        line += f"; the rollout is no kernel: {record.rollout_reason}"
    if record.network == "kernels":
        line += "; kernels compute the network of the update"
    elif record.network_reason:
        line += f"; no kernels compute the network of the update: {record.network_reason}"
    failures = [
        f"not {failure.name}: {failure.error_type}: {failure.message}"
        for failure in record.failures
    ]
    if failures:
        line += f" ({'; '.join(failures)})"
    return line
