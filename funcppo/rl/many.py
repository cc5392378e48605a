"""Several policies trained in one step: `train_many`, a population of seeds and of numbers in `Scalars`.

result = fp.train_many(learner, 100_000, seeds=8)
result.state.params                      # every tensor has a first axis of 8
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack, cast

import torch

from funcppo import trainer
from funcppo.compiled_step import CHECKPOINT_SECONDS, prepare_step
from funcppo.core import random, tree
from funcppo.learner import Learner, check_functions, check_vectorised
from funcppo.losses import Scalars
from funcppo.runtime.capture import CapturedStep
from funcppo.train_step import EAGER_PARTS, Metrics, TrainState, vmap_parts
from funcppo.trainer import (
    Evaluator,
    LoopOptions,
    PolicyEvaluation,
    Stepper,
    TrainResult,
    UpdateIntervals,
)

State = TrainState[Any, Any]
Evaluations = tuple[PolicyEvaluation, ...]  # one for each seed


def train_many(
    learner: Learner[Any, Any],
    total_steps: int,
    *,
    seeds: int | Sequence[int] = 8,
    scalars: Mapping[str, Sequence[float]] | None = None,
    device: torch.device | str = "cpu",
    strategy: str = "eager",
    checkpoint: str | Path | None = None,
    **options: Unpack[LoopOptions],
) -> TrainResult[Evaluations]:
    """Train a policy for each of several seeds, all of them in one step (`torch.vmap`).

    Each policy is that of `train` with its seed, but for rounding. Checkpoints are written every minute and at the end.

    Args:
      learner: of `fp.ppo`.
      total_steps: environment steps of each seed; the last update is made whole.
      seeds: of the first states and of evaluations; a number N stands for 0 to N - 1.
      scalars: by name of a field of `losses.Scalars`, such as learning_rate, a number for each seed.
      device: of the first states.
      strategy: how the step is run: eager; auto, which compiles it where the run is long enough to repay that; or
        another of `runtime.compile.STRATEGIES`.
      checkpoint: as that of `train`.
      callbacks: as those of `train`; what they receive has a first axis of seeds.
      log: as that of `train`, with a line for each seed.
      evaluate_every: as that of `train`.
      n_episodes: episodes of each seed, greedy and sampled, in an evaluation.

    Returns:
      The states after the run, stacked, and its evaluations, each one of all seeds.

    Raises:
      ValueError: a number is out of range, the environment steps on the host, PyTorch has no such device, the
        checkpoint is damaged or of another learner, or a function of the environment or the network overwrites an
        argument, differs when it is called again with the same key, or cannot be mapped by `torch.vmap`.
      TypeError: seeds are no integers, a scalar is one number for all, or an option is unknown or of the wrong kind.
    """
    if not isinstance(seeds, int | Iterable):
        raise TypeError(
            f"seeds: expected an integer or a sequence of integers, got {seeds!r}"
        )
    seeds = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    trainer.check_positive(total_steps=total_steps, seeds=len(seeds))
    settings = trainer.loop_settings(options)
    if learner.cfg.env.host is not None:
        raise ValueError(
            "learner: expected an environment that can be vectorised, got one that steps on the host; "
            "fp.train trains one seed after the other"
        )
    trainer.check_device(device)
    learner = trainer.with_length(learner, total_steps)
    path = trainer.checkpoint_path(checkpoint)
    first = init_many(learner, seeds, device, scalars)
    state, notes = trainer.restore_latest(learner, first, path)

    evaluator = Evaluator(learner=learner, n_episodes=settings.n_episodes)
    schedule = UpdateIntervals(
        evaluate_every=settings.evaluate_every,
        evaluate=partial(evaluator.evaluate_many, seeds=seeds),
        checkpoint_seconds=CHECKPOINT_SECONDS,
        save=partial(trainer.save_checkpoint, path, learner),
    )
    stepper = prepare_many(learner, seeds, state, strategy)
    callbacks = settings.all_callbacks()
    result = trainer.make_updates(stepper, state, schedule, callbacks)
    return result._replace(notes=(*notes, *result.notes, *evaluator.notes()))


def init_many(
    learner: Learner[Any, Any],
    seeds: Sequence[int],
    device: torch.device | str = "cpu",
    scalars: Mapping[str, Sequence[float]] | None = None,
) -> State:
    """The first states of some seeds, stacked, with some of their scalars replaced.

    Args:
      scalars: by name of a field of `losses.Scalars`, a number for each seed.

    Raises:
      ValueError: there is no such scalar, it has not one number for each seed, or one is out of range.
      TypeError: they have no names, or a scalar is one number for all.
    """
    states = [learner.init(random.key(seed, device)) for seed in seeds]
    state = tree.map(lambda *leaves: torch.stack(leaves), *states)
    if not isinstance(scalars, Mapping | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"scalars: expected numbers by their names, got {scalars!r}"
        )
    for name, numbers in (scalars or {}).items():
        if name not in Scalars._fields:
            names = ", ".join(Scalars._fields)
            raise ValueError(f"scalars: expected one of {names}, got {name}")
        if not isinstance(cast(object, numbers), Sized):
            raise TypeError(
                f"scalars: {name}: expected a sequence of {len(seeds)} numbers, got {numbers!r}"
            )
        if len(numbers) != len(seeds):
            raise ValueError(
                f"scalars: {name}: expected {len(seeds)} numbers, got {len(numbers)}"
            )
        for number in numbers:
            replace(learner.cfg.ppo, **{name: number})  # checks its range
        values = torch.tensor(numbers, dtype=torch.float32, device=device)
        changed = state.scalars._replace(**{name: values})
        state = state._replace(scalars=changed)
    return state


def prepare_many(
    learner: Learner[Any, Any],
    seeds: tuple[int, ...],
    state: State,
    strategy: str,
) -> Stepper:
    """The step of stacked states; of a finished run it is not compiled.

    Raises:
      ValueError: environment or network is not pure, or cannot be vectorised, which is tried on one step.
    """
    cfg = learner.cfg
    is_finished = int(state.update[0]) >= cfg.ppo.n_updates
    check_functions(learner, tree.item(state, 0))
    check_vectorised(learner, state)
    captured, record = prepare_step(
        cfg,
        learner.world,
        state,
        vmap_parts(EAGER_PARTS),
        "eager" if is_finished else strategy,
    )
    return Stepper(
        learner=learner,
        seeds=seeds,
        step=partial(_step, captured),
        record=record,
    )


def _step(
    captured: CapturedStep[State, Metrics], state: State
) -> tuple[State, Metrics]:
    """Make an update, in the buffers of a CUDA graph where there is one."""
    if captured.replay_mode == "none":
        return captured.fn(state)
    if state is not captured.state:
        captured.load(state)
    metrics = captured.step()
    return captured.state, tree.map(torch.clone, metrics)
