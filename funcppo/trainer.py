"""The loop above the training step: `train` and `evaluate_policy`.

    result = fp.train(learner, 100_000, evaluate_every=10, checkpoint="run.npz")
    result.state, result.evaluations

Training is `Learner.step` again and again: a run that is stopped and continued from its checkpoint equals one that was
not, bit for bit.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from funcppo import random, train_step, tree
from funcppo.config import PPOConfig
from funcppo.envs import base
from funcppo.envs.wrappers import evaluation_env
from funcppo.experiment import checkpoint as checkpoints
from funcppo.experiment import loggers, metrics_log
from funcppo.experiment.config import METRICS_FILE
from funcppo.experiment.loggers import LoggerName
from funcppo.interfaces import AnyEnvironment
from funcppo.learner import Learner, compile, settings_text
from funcppo.runtime.distributed import launched_size
from funcppo.train_step import Metrics, TrainState
from funcppo.types import F32, I64, Bool

N_EPISODES = 32  # of an evaluation, for each of the two policies
MAX_EVALUATION_STEPS = 10_000
CONFIDENCE = 0.95
N_RESAMPLES = 2000  # of a bootstrap
PREVIOUS_NAME = "previous-{name}"  # of the checkpoint before the latest

State = TrainState[Any, Any]


class ReturnEstimate(NamedTuple):
    """The mean undiscounted return of a policy, with a bootstrap interval of 95 %."""

    mean: float
    low: float
    high: float
    mean_length: float  # steps
    n_episodes: int
    # Episodes that had not ended after the largest number of steps; their return so far counts.
    n_unfinished: int

    def __str__(self) -> str:
        unfinished = (
            f", {self.n_unfinished} unfinished" if self.n_unfinished else ""
        )
        return f"{self.mean:.1f} [{self.low:.1f}, {self.high:.1f}]{unfinished}"


class PolicyEvaluation(NamedTuple):
    """Returns of the policy that takes the most probable action, and of the one that samples."""

    update: int  # updates made before it
    greedy: ReturnEstimate
    sampled: ReturnEstimate


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What a callback receives after each update."""

    learner: Learner[Any, Any]
    state: State  # valid during the call; copy what must outlive it
    metrics: Metrics  # of the update
    update: int  # updates made so far
    n_updates: int  # of the whole run
    seconds: float  # of this call of `train`
    # environment steps a second of this call, evaluation and callbacks included
    steps_per_second: float
    evaluation: PolicyEvaluation | None  # made after this update

    @property
    def n_steps(self) -> int:
        """Environment steps made so far."""
        return self.update * _batch_size(self.learner.cfg.ppo)

    @property
    def mean_return(self) -> float:
        """Mean return of the episodes that ended in the update's rollout; NaN if none did."""
        rollout = self.metrics.rollout
        return float(rollout.episode_return_sum / rollout.n_episodes)


# Called after each update; a true result stops the run.
Callback = Callable[[Progress], object]


class TrainResult(NamedTuple):
    """A run of `train`."""

    state: State
    evaluations: tuple[PolicyEvaluation, ...]  # of this call
    update: int  # updates made, those before the checkpoint included
    is_stopped: bool  # a callback stopped it
    # what was made do with: the checkpoint before a damaged one
    notes: tuple[str, ...] = ()


def print_progress(progress: Progress) -> None:
    """A callback that prints one line an update."""
    line = (
        f"update {progress.update}/{progress.n_updates}  steps {progress.n_steps}  "
        f"{progress.steps_per_second:.0f} steps/s  mean return {progress.mean_return:.1f}"
    )
    if progress.evaluation is not None:
        line += f"  greedy {progress.evaluation.greedy}  sampled {progress.evaluation.sampled}"
    print(line)


class MetricsLog:
    """A callback that writes the metrics of each update to FOLDER/metrics.jsonl and to other places.

    A run that continues from its checkpoint continues them: what they hold of later updates is dropped.
    """

    def __init__(self, folder: str | Path, *names: LoggerName) -> None:
        """Prepare the log; its files are opened at the first update.

        Args:
          folder: created if it is missing.
          names: csv, tensorboard or wandb, which go to the folder too.

        Raises:
          FieldError: a name is unknown or a package is missing.
        """
        loggers.check_loggers(names)
        self._path = Path(folder) / METRICS_FILE
        self._names = names
        self._open = ExitStack()
        self._loggers: list[loggers.MetricsLogger] | None = None

    def __call__(self, progress: Progress) -> None:
        """Log an update."""
        if self._loggers is None:
            self._loggers = self._start(progress)
        row = _log_row(progress)
        metrics_log.append(self._path, row)
        for logger in self._loggers:
            logger.log(row)

    def close(self) -> None:
        """Write what is held back."""
        self._open.close()

    def _start(self, progress: Progress) -> list[loggers.MetricsLogger]:
        """Open the files, which go on after the update before this one."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        metrics_log.truncate(self._path, progress.update - 1)
        opened = loggers.open_loggers(
            self._names,
            self._path.parent,
            metrics_log.read(self._path),
            settings_text(progress.learner.cfg),
        )
        return self._open.enter_context(opened)


def _log_row(progress: Progress) -> metrics_log.Row:
    """The metrics of an update, and the mean returns of the evaluation that followed."""
    row = {
        "update": progress.update,
        "steps": progress.n_steps,
        "seconds": progress.seconds,
        **metrics_log.to_scalars(progress.metrics),
    }
    if progress.evaluation is not None:
        row["greedy_return"] = progress.evaluation.greedy.mean
        row["sampled_return"] = progress.evaluation.sampled.mean
    return row


def train(
    learner: Learner[Any, Any],
    total_steps: int,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    compile_step: bool = False,
    callbacks: Sequence[Callback] = (),
    evaluate_every: int | None = None,
    n_episodes: int = N_EPISODES,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
) -> TrainResult:
    """Train a policy for a number of environment steps, in whole updates.

    The schedules of the learner end with the run: `n_updates` is set from `total_steps`.

    Of several processes (`fp.distribute`) each calls it with the same arguments. Rank 0 alone reads and writes files,
    and calls the callbacks; another number of processes may continue a checkpoint.

    Args:
      learner: of `fp.ppo`.
      total_steps: environment steps in all; the last update is made whole.
      seed: of the first state.
      device: of the first state.
      compile_step: make updates by `fp.compile(learner, state)`.
      callbacks: called in turn after each update; one that returns true stops the run after the others were called. A
        `MetricsLog` is closed at the end.
      evaluate_every: updates between two evaluations; the last update is evaluated, too. None: no evaluation.
      n_episodes: episodes of each policy in an evaluation.
      checkpoint: file that holds the state and the settings; if it exists, the run continues from it. If it is damaged
        or missing, the one before serves, which stands beside it; a warning and the result's notes say so.
      checkpoint_every: updates between two writes of it; None: it is written at the end alone.

    Returns:
      The state after the run, and its evaluations.

    Raises:
      ValueError: a number is out of range, the checkpoint is damaged or of another learner, or torchrun started several
        processes, and the learner is not of `fp.distribute`.
    """
    n_processes = launched_size()
    if n_processes > 1 and learner.group is None:
        raise ValueError(
            f"learner: expected one of fp.distribute, which {n_processes} processes of torchrun share, "
            "got one of a single process"
        )
    _check_positive(
        total_steps=total_steps,
        evaluate_every=evaluate_every,
        n_episodes=n_episodes,
        checkpoint_every=checkpoint_every,
    )
    learner = _with_length(learner, total_steps)
    path = None if checkpoint is None else Path(checkpoint)
    state, notes = _first_state(learner, random.key(seed, device), path)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    is_finished = int(state.update) >= learner.cfg.ppo.n_updates
    is_compiled = compile_step and not is_finished
    stepper = compile(learner, state) if is_compiled else learner

    with ExitStack() as stack:
        for callback in callbacks:
            if isinstance(callback, MetricsLog):
                stack.callback(callback.close)

        def evaluate(state: State) -> PolicyEvaluation:
            whole = learner.gather(state)
            return evaluate_policy(
                learner, whole, n_episodes=n_episodes, seed=seed
            )

        def save(state: State) -> None:
            if path is not None:
                _save(path, learner, learner.gather(state))

        schedule = _Schedule(evaluate_every, checkpoint_every, evaluate, save)
        result = _make_updates(learner, stepper, state, schedule, callbacks)
        return result._replace(notes=notes)


@dataclass(frozen=True, slots=True)
class _Schedule:
    """What is done between updates, and how often."""

    evaluate_every: int | None  # updates
    checkpoint_every: int | None
    evaluate: Callable[[State], PolicyEvaluation]
    save: Callable[[State], None]


def _make_updates(
    learner: Learner[Any, Any],
    stepper: Any,
    state: State,
    schedule: _Schedule,
    callbacks: Sequence[Callback],
) -> TrainResult:
    """Update a state until the last update, or until a callback stops it.

    Args:
      stepper: the learner, or the same compiled.
    """
    n_updates = learner.cfg.ppo.n_updates
    first_update = int(state.update)
    evaluations: list[PolicyEvaluation] = []
    is_stopped, update, start = False, first_update, time.perf_counter()
    while update < n_updates and not is_stopped:
        state, metrics = stepper.step(state)
        update += 1
        evaluation = None
        if _is_due(update, schedule.evaluate_every, n_updates):
            evaluation = schedule.evaluate(state)
            evaluations.append(evaluation)
        # before the callbacks, one of which may raise
        if _is_due(update, schedule.checkpoint_every or n_updates, n_updates):
            schedule.save(state)
        progress = _progress(
            learner, state, metrics, update, first_update, start, evaluation
        )
        is_stopped = _call(callbacks, progress)
    if is_stopped:
        schedule.save(state)
    state = tree.map(torch.clone, state)  # a compiled step would overwrite it
    return TrainResult(state, tuple(evaluations), update, is_stopped)


def _call(callbacks: Sequence[Callback], progress: Progress) -> bool:
    """Whether a callback stops the run. Of several processes rank 0 calls them and decides for all."""
    group = progress.learner.group
    is_stopped = False
    if _is_main(progress.learner):
        is_stopped = any([bool(callback(progress)) for callback in callbacks])
    if group is None or not callbacks:
        return is_stopped
    return group.agree(is_stopped)


def _first_state(
    learner: Learner[Any, Any], key: Tensor, path: Path | None
) -> tuple[State, tuple[str, ...]]:
    """The state of the checkpoint if there is one, or of the one before; otherwise a new one. And notes on it.

    Of several processes rank 0 reads it.
    """
    state = train_step.init(learner.cfg, learner.world, key)
    notes: list[str] = []
    if path is not None and _is_main(learner):
        previous = PREVIOUS_NAME.format(name=path.name)
        if path.exists() or path.with_name(previous).exists():
            readable, notes = checkpoints.find_readable(path, previous)
            state = _restore(readable, learner, state)
    return learner.scatter(state), tuple(notes)


def _is_main(learner: Learner[Any, Any]) -> bool:
    """Whether this process reads and writes files."""
    return learner.group is None or learner.group.is_main


def _progress(
    learner: Learner[Any, Any],
    state: State,
    metrics: Metrics,
    update: int,
    first_update: int,
    start: float,
    evaluation: PolicyEvaluation | None,
) -> Progress:
    seconds = time.perf_counter() - start
    n_steps = (update - first_update) * _batch_size(learner.cfg.ppo)
    return Progress(
        learner=learner,
        state=state,
        metrics=metrics,
        update=update,
        n_updates=learner.cfg.ppo.n_updates,
        seconds=seconds,
        steps_per_second=n_steps / seconds,
        evaluation=evaluation,
    )


def _check_positive(**counts: object) -> None:
    for name, count in counts.items():
        if count is None:
            continue
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(
                f"{name}: expected an integer of 1 or more, got {count!r}"
            )


def _batch_size(ppo: PPOConfig) -> int:
    return ppo.n_envs * ppo.n_steps


def _with_length(
    learner: Learner[Any, Any], total_steps: int
) -> Learner[Any, Any]:
    """The learner whose schedules end after `total_steps`."""
    cfg = learner.cfg
    n_updates = math.ceil(total_steps / _batch_size(cfg.ppo))
    ppo = replace(cfg.ppo, n_updates=n_updates)
    return replace(learner, cfg=replace(cfg, ppo=ppo))


def _is_due(update: int, every: int | None, n_updates: int) -> bool:
    """Whether something is done after an update: every so often, and after the last one. None: never."""
    if every is None:
        return False
    return update % every == 0 or update == n_updates


# Checkpoints


def _save(path: Path, learner: Learner[Any, Any], state: State) -> None:
    """Write the checkpoint of a whole state. Of several processes rank 0 writes it."""
    if not _is_main(learner):
        return
    meta: Any = {"settings": settings_text(learner.cfg)}
    previous = PREVIOUS_NAME.format(name=path.name)
    checkpoints.save(path, state, meta, previous)


def _restore(path: Path, learner: Learner[Any, Any], like: State) -> State:
    stored = cast(Any, checkpoints.read(path).meta).get("settings", {})
    # A checkpoint of a version without shards does not name them.
    stored = {"n_shards": "1"} | stored
    for name, value in settings_text(learner.cfg).items():
        if stored.get(name) != value:
            raise ValueError(
                f"{path}: made with other settings: {name}: expected {value}, got {stored.get(name)}"
            )
    return checkpoints.restore(path, like)[0]


# Evaluation


def evaluate_policy(
    learner: Learner[Any, Any],
    state: State,
    *,
    n_episodes: int = N_EPISODES,
    max_steps: int = MAX_EVALUATION_STEPS,
    seed: int = 0,
) -> PolicyEvaluation:
    """Play whole episodes in environments of their own, greedily and by sampling; `state` stays as it is.

    Rewards are those before `normalize_reward`. Running moments are those of training, and stay as they are.

    Args:
      n_episodes: played side by side, for each of the two policies.
      max_steps: steps after which an episode is given up; `n_unfinished` counts these.
      seed: of the episodes, which have nothing in common with those of training.

    Raises:
      ValueError: a number is out of range.
    """
    _check_positive(n_episodes=n_episodes, max_steps=max_steps)
    key = random.key(seed, state.key.device)
    estimates = [
        _estimate_return(learner, state, key, n_episodes, max_steps, greedy)
        for greedy in (True, False)
    ]
    return PolicyEvaluation(int(state.update), *estimates)


class _Episodes(NamedTuple):
    """Episodes that are played side by side."""

    env_state: Any
    total_reward: F32[Tensor, "B"]
    length: I64[Tensor, "B"]
    finished: Bool[Tensor, "B"]


def _estimate_return(
    learner: Learner[Any, Any],
    state: State,
    key: I64[Tensor, "2"],
    n_episodes: int,
    max_steps: int,
    greedy: bool,
) -> ReturnEstimate:
    world, env = learner.world, evaluation_env(learner.cfg.env)
    reset_key, play_key, resample_key = random.split(key, 3).unbind()
    episodes = _begin_episodes(
        env, world, state.env_state, reset_key, n_episodes
    )
    with torch.no_grad():
        for t in range(max_steps):
            step_key = random.fold_in(play_key, t)
            episodes = _step_episodes(
                learner, env, state.params, episodes, step_key, greedy
            )
            if bool(episodes.finished.all()):
                break

    returns = episodes.total_reward.to(torch.float64)
    low, high = bootstrap_interval(resample_key, returns)
    return ReturnEstimate(
        mean=float(returns.mean()),
        low=low,
        high=high,
        mean_length=float(episodes.length.to(torch.float64).mean()),
        n_episodes=n_episodes,
        n_unfinished=int((~episodes.finished).sum()),
    )


def _begin_episodes(
    env: AnyEnvironment,
    world: object,
    env_state: Any,
    key: I64[Tensor, "2"],
    n_episodes: int,
) -> _Episodes:
    """First states, with what outlives an episode (running moments) taken from the environments of training."""
    fresh = env.reset(env.cfg, world, random.split(key, n_episodes))
    if env.restart is not None:
        n_rows = tree.leaves(env_state)[0].shape[0]
        rows = torch.arange(n_episodes, device=key.device) % n_rows
        from_training = tree.map(lambda x: x[rows], env_state)
        is_new = torch.ones_like(rows, dtype=torch.bool)
        fresh = base.restart(env, world, from_training, is_new, fresh)
    zero = torch.zeros(n_episodes, device=key.device)
    return _Episodes(fresh, zero, zero.to(torch.int64), zero.to(torch.bool))


def _step_episodes(
    learner: Learner[Any, Any],
    env: AnyEnvironment,
    params: object,
    episodes: _Episodes,
    key: I64[Tensor, "2"],
    greedy: bool,
) -> _Episodes:
    """One step of each episode; those that have finished stay as they are."""
    agent, world = learner.cfg.agent, learner.world
    action_key, env_key = random.split(key).unbind()
    obs = env.observe(env.cfg, world, episodes.env_state)
    output = agent.apply(agent.cfg, world, params, obs)
    distribution = agent.distribution
    action = (
        distribution.mode(output)
        if greedy
        else distribution.sample(action_key, output)
    )

    env_keys = random.split(env_key, episodes.length.shape[0])
    env_state, timestep = env.step_functional(
        env.cfg, world, episodes.env_state, action, env_keys
    )
    active = ~episodes.finished
    return _Episodes(
        env_state=env_state,
        total_reward=episodes.total_reward
        + torch.where(active, timestep.reward, 0.0),
        length=episodes.length + active.to(torch.int64),
        finished=episodes.finished | timestep.terminated | timestep.truncated,
    )


def bootstrap_interval(
    key: I64[Tensor, "2"], values: Tensor
) -> tuple[float, float]:
    """The percentile bootstrap interval of a mean, of 95 %.

    Source: Efron & Tibshirani 1993, "An introduction to the bootstrap", chapter 13.
    """
    n = values.shape[0]
    resample_keys = random.split(key, N_RESAMPLES)
    unit = random.uniform(resample_keys, (n,))
    means = values[(unit * n).to(torch.int64)].mean(-1)
    tails = torch.tensor(
        [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2],
        dtype=means.dtype,
        device=means.device,
    )
    low, high = torch.quantile(means, tails).tolist()
    return low, high
