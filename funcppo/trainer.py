"""The loop above the training step: `train` and `evaluate_policy`.

    result = fp.train(learner, 100_000, evaluate_every=10, checkpoint="run.npz")
    result.state, result.evaluations

Training is `Learner.step` again and again: a run that is stopped and continued from its checkpoint equals one that was
not, bit for bit.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
import time
import warnings
from collections.abc import (
    Callable,
    Generator,
    Mapping,
    Sequence,
    Sized,
)
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import (
    Any,
    Generic,
    NamedTuple,
    TypeVar,
    cast,
)

import torch
from torch import Tensor

from funcppo import checkpoint as checkpoints
from funcppo import logs, train_step
from funcppo.checkpoint import text_of
from funcppo.config import PPOConfig
from funcppo.core import files, random, tree
from funcppo.core.files import Json
from funcppo.core.settings import (
    METRICS_FILE,
    FieldError,
    PositiveInt,
    check_kind,
    check_value,
)
from funcppo.core.types import F32, I64, Bool
from funcppo.envs import wrappers
from funcppo.envs.wrappers import evaluation_env, stand_in_env
from funcppo.interfaces import AnyEnvironment
from funcppo.learner import (
    CHECKPOINT_SECONDS,
    AnyLearner,
    AnyState,
    CompiledLearner,
    Learner,
    check_functions,
    check_vectorised,
    compile,
    own_state,
    prepare_step,
    settings_text,
)
from funcppo.logs import LoggerName
from funcppo.losses import Scalars
from funcppo.rollout import apply_agent, choose_action, init_rollout_state
from funcppo.runtime.capture import CapturedStep, ReasonCode, capture
from funcppo.runtime.compile import StrategyRecord
from funcppo.runtime.distributed import launched_size
from funcppo.train_step import EAGER_PARTS, Metrics, vmap_parts

KEYS_AT_ONCE = 64  # steps of an evaluation whose keys are made together

State = AnyState
EvaluationT = TypeVar("EvaluationT")


class TrainingNote(UserWarning):
    """Warning about a fallback that a run took, or data that it did not learn from; also in `TrainResult.notes`."""


class ReturnEstimate(NamedTuple):
    """Mean undiscounted return of a policy, with its 95 % bootstrap interval."""

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
    """Returns of the greedy policy and of the sampling policy in one evaluation."""

    update: int  # updates made before it
    greedy: ReturnEstimate
    sampled: ReturnEstimate


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress(Generic[EvaluationT]):
    """State, metrics and timing that a callback receives after each update."""

    learner: AnyLearner
    # The seeds of `train_many`: state and metrics then have a first axis of them, and there are as many evaluations.
    seeds: tuple[int, ...] | None
    state: State  # valid during the call; copy what must outlive it
    metrics: Metrics  # of the update
    update: int  # updates made so far
    n_new_updates: int  # of this call of `train`
    seconds: float  # of this call of `train`
    evaluation: EvaluationT | None  # made after this update
    # how the step is run; None where it is eager
    record: StrategyRecord | None

    @property
    def n_updates(self) -> int:
        """Return the number of updates of the whole run."""
        return self.learner.cfg.ppo.n_updates

    @property
    def steps_per_second(self) -> float:
        """Return the environment steps a second of this call, of all seeds, evaluation and callbacks included."""
        n_steps = self.n_new_updates * batch_size(self.learner.cfg.ppo)
        return n_steps * len(self.seeds or (0,)) / self.seconds

    @property
    def n_steps(self) -> int:
        """Return the number of environment steps so far, of each seed."""
        return self.update * batch_size(self.learner.cfg.ppo)

    @property
    def mean_return(self) -> float:
        """Return the mean return of the episodes that ended in the update's rollout; NaN if no episode ended."""
        rollout = self.metrics.rollout
        total = rollout.episode_return_sum.sum()
        return float(total / rollout.n_episodes.sum())


StepFn = Callable[[State], tuple[State, Metrics]]
# Called after each update; a true result stops the run.
Callback = Callable[[Progress[Any]], object]


class TrainResult(NamedTuple, Generic[EvaluationT]):
    """Result of `train` or `train_many`."""

    state: State
    evaluations: tuple[EvaluationT, ...]  # of this call
    update: int  # updates made, those before the checkpoint included
    is_stopped: bool  # a callback stopped it
    # what was made do with, or not learnt from: the checkpoint before a damaged one, an evaluation that cannot be
    # captured, minibatches of NaN
    notes: tuple[str, ...] = ()
    # how the step was run; None where it was eager
    record: StrategyRecord | None = None


def print_progress(progress: Progress[PolicyEvaluation]) -> None:
    """Print one line about an update; a callback for `train`."""
    line = (
        f"update {progress.update}/{progress.n_updates}  steps {progress.n_steps}  "
        f"{progress.steps_per_second:.0f} steps/s  mean return {progress.mean_return:.1f}"
    )
    if progress.evaluation is not None:
        line += f"  greedy {progress.evaluation.greedy}  sampled {progress.evaluation.sampled}"
    print(line)


class MetricsLog:
    """Callback that writes the metrics of each update to FOLDER/metrics.jsonl and to the named loggers.

    A run that continues from its checkpoint continues them: what they hold of later updates is dropped. Of several
    seeds each has a line of its own in metrics.jsonl; the other places get the means over seeds. The first line of
    metrics.jsonl says how the step is run (null: eager), and the versions.
    """

    def __init__(self, folder: str | Path, *names: LoggerName) -> None:
        """Prepare the log; its files are opened at the first update.

        Args:
          folder: created if it is missing.
          names: csv, tensorboard, wandb or mlflow, which go to the folder too.

        Raises:
          FieldError: a name is unknown or a package is missing.
        """
        logs.check_loggers(names)
        self._path = Path(folder) / METRICS_FILE
        self.names = names
        self._header: Json = {}
        self._open = ExitStack()
        self._loggers: list[logs.LogFn] | None = None

    def claim(self, header: Json, continues: bool) -> None:
        """Take the folder for a run.

        Args:
          header: of the run, for the first line of metrics.jsonl.
          continues: the run may continue a log, if that has the same header.

        Raises:
          ValueError: the folder holds the log of another run or program.
        """
        stored = logs.read_header(self._path) if continues else {}
        if any(stored.get(name) != value for name, value in header.items()):
            logs.check_no_logs(self.folder, self.names)
        self._header = header
        self._loggers = None

    def __call__(self, progress: Progress[Any]) -> None:
        """Write the metrics of an update to the log."""
        if self._loggers is None:
            self._loggers = self._start(progress)
        rows = _log_rows(progress)
        logs.append(self._path, *rows)
        for log in self._loggers:
            log(logs.mean_over_seeds(rows)[0])

    @property
    def folder(self) -> Path:
        """Return the folder of the log's files."""
        return self._path.parent

    def close(self) -> None:
        """Write buffered rows and close all loggers."""
        self._open.close()

    def _start(self, progress: Progress[Any]) -> list[logs.LogFn]:
        """Open the loggers, keeping earlier rows up to the update before this one."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        logs.truncate(
            self._path,
            progress.update - 1,
            logs.run_header(progress.record) | self._header,
        )
        opened = logs.open_loggers(
            self.names,
            self._path.parent,
            logs.mean_over_seeds(logs.read(self._path)),
            settings_text(progress.learner.cfg),
        )
        return self._open.enter_context(opened)


def _log_rows(progress: Progress[Any]) -> list[logs.Row]:
    """Return the log rows of an update with its evaluation: one row, or one for each seed."""
    # One wait for the device.
    numbers = torch.stack(tree.leaves(progress.metrics)).cpu()
    metrics = tree.unflatten(progress.metrics, list(numbers))
    if progress.seeds is None:
        return [_log_row(progress, metrics, progress.evaluation)]
    return [
        {"seed": seed}
        | _log_row(
            progress,
            tree.item(metrics, i),
            progress.evaluation and progress.evaluation[i],
        )
        for i, seed in enumerate(progress.seeds)
    ]


def _log_row(
    progress: Progress[Any],
    metrics: Metrics,
    evaluation: PolicyEvaluation | None,
) -> logs.Row:
    """Return the log row of one training state."""
    row = {
        "update": progress.update,
        "steps": progress.n_steps,
        "seconds": progress.seconds,
        **logs.to_scalars(metrics),
    }
    if evaluation is not None:
        row["greedy_return"] = evaluation.greedy.mean
        row["sampled_return"] = evaluation.sampled.mean
        row["n_unfinished_episodes"] = (
            evaluation.greedy.n_unfinished + evaluation.sampled.n_unfinished
        )
    return row


def _read_options(
    options: dict[str, Any],
) -> tuple[list[Callback], int | None, int]:
    """Check the options of `train`; return all callbacks, the updates between evaluations, and episodes an evaluation.

    The log comes first, so that what a callback raises loses no row. Its folder is created: an error comes before the
    first update.

    Raises:
      TypeError: an option is unknown or of the wrong kind.
      ValueError: a number is out of range, or no log can be written in its folder.
    """
    defaults: dict[str, Any] = {
        "callbacks": (),
        "log": None,
        "evaluate_every": None,
        "n_episodes": 32,
    }
    for name in options:
        if name not in defaults:
            raise TypeError(
                f"{name}: expected an option of the function, or one of {', '.join(defaults)}"
            )

    callbacks, log, evaluate_every, n_episodes = (defaults | options).values()
    check_value("evaluate_every", PositiveInt | None, evaluate_every)
    check_value("n_episodes", PositiveInt, n_episodes)
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise TypeError(
            f"callbacks: expected a list of functions, got {callbacks!r}"
        )
    given = log if isinstance(log, list | tuple) else [log]
    logs_first = [_read_log(x) for x in given if x is not None]
    return [*logs_first, *callbacks], evaluate_every, n_episodes


def _read_log(log: object) -> MetricsLog:
    """Return the log that an option names; its folder is created if it is missing."""
    if not isinstance(log, str | Path | MetricsLog):
        raise TypeError(
            f"log: expected a folder, an fp.MetricsLog or a list of such, got {log!r}"
        )
    log = log if isinstance(log, MetricsLog) else MetricsLog(log)
    _make_folder(
        log.folder, f"log: {log.folder}: expected a folder that can be written"
    )
    return log


def train(
    learner: AnyLearner,
    total_steps: int,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    state: State | None = None,
    params: object = None,
    compile_step: bool = False,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    **options: Any,
) -> TrainResult[PolicyEvaluation]:
    """Train a policy for a number of environment steps, in whole updates.

    The schedules of the learner end with the run: `n_updates` is set from `total_steps`.

    Of several processes (`fp.distribute`) each calls it with the same arguments. Rank 0 alone reads and writes files,
    and calls the callbacks; another number of processes may continue a checkpoint.

    Args:
      learner: of `fp.ppo`.
      total_steps: environment steps in all; the last update is made whole.
      seed: of the first state.
      device: of the first state; the world of the learner is moved there.
      state: of another run, to start from in place of a new one: its parameters, moments, environments and key. The
        update is counted from 0, and the scalars are those of the learner.
      params: of another run, to start from with new moments and environments.
      compile_step: make updates by `fp.compile(learner, state)`.
      checkpoint: file that holds the state and the settings; if it exists, the run continues from it, with more
        `total_steps` if no schedule ends with them. If it is damaged or missing, the one before serves, which stands
        beside it; a warning and the result's notes say so.
      checkpoint_every: updates between two writes of it; None: it is written at the end alone.
      callbacks: list of functions that are called with a `Progress` after each update; one that returns true stops the
        run after the others were called. A `MetricsLog` is closed at the end.
      log: a folder, where `metrics.jsonl` gets a line for each update and is continued with the run; a `MetricsLog`; or
        a list of such. A folder with the log of another run is refused.
      evaluate_every: updates between two evaluations; the last update is evaluated, too. None: no evaluation.
      n_episodes: episodes of each policy in an evaluation.

    Returns:
      The state after the run, and its evaluations.

    Raises:
      TypeError: an option is unknown, or of the wrong kind.
      ValueError: a number is out of range, PyTorch has no such device, the checkpoint is damaged or of another learner,
        or torchrun started several processes, and the learner is not of `fp.distribute`.
    """
    n_processes = launched_size()
    if n_processes > 1 and learner.group is None:
        raise ValueError(
            f"learner: expected one of fp.distribute, which {n_processes} processes of torchrun share, "
            "got one of a single process"
        )
    learner = _on_device(with_length(learner, total_steps), device)

    def prepare(state: State) -> tuple[StepFn, StrategyRecord | None]:
        if not compile_step or _is_finished(learner, state):
            return learner.step, None
        compiled = compile(learner, state)
        return compiled.step, compiled.record

    return _run(
        learner,
        _first_state(learner, random.key(seed, device), state, params),
        seed,
        prepare,
        _settings(learner, seed=seed, state=state, params=params),
        options,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
    )


def _run(
    learner: AnyLearner,
    first: State,
    seeds: int | tuple[int, ...],
    prepare: Callable[[State], tuple[StepFn, StrategyRecord | None]],
    settings: dict[str, str],
    options: dict[str, Any],
    *,
    checkpoint: str | Path | None,
    checkpoint_every: int | None = None,
    checkpoint_seconds: float = math.inf,
) -> TrainResult[Any]:
    """Make the updates of a run, from its checkpoint or its first state.

    Args:
      seeds: several for stacked states.
      prepare: returns the step, and how it is run.
      settings: that the checkpoint is compared with.
      options: of `train`.

    Returns:
      The result, with notes on all that was made do with.
    """
    callbacks, evaluate_every, n_episodes = _read_options(options)
    check_value("checkpoint_every", PositiveInt | None, checkpoint_every)
    path = checkpoint_path(checkpoint)
    # Of several processes rank 0 reads the checkpoint.
    whole, notes = restore_latest(
        learner, first, path if _is_main(learner) else None, settings
    )
    state = learner.scatter(whole)
    notes += _begin(learner, state, path, settings, callbacks)

    step, record = prepare(state)
    evaluator = Evaluator(learner=learner, n_episodes=n_episodes)
    loop = Loop(
        learner=learner,
        seeds=seeds,
        step=step,
        record=record,
        callbacks=callbacks,
        evaluator=evaluator,
        evaluate_every=evaluate_every,
        path=path,
        settings=settings,
        checkpoint_every=checkpoint_every or learner.cfg.ppo.n_updates,
        checkpoint_seconds=checkpoint_seconds,
    )
    result = make_updates(loop, state)
    notes = (*notes, *result.notes, *evaluator.notes())
    return result._replace(notes=notes, record=record)


def _first_state(
    learner: AnyLearner,
    key: I64[Tensor, "2"],
    state: State | None,
    params: object,
) -> State:
    """Build the state that a run starts from: a new one, with the params or the rest of another run if given.

    Raises:
      ValueError: both are given, or one names a tensor of another shape or dtype than the learner's.
    """
    new = learner.init_whole(key)
    if state is not None and params is not None:
        raise ValueError("state, params: expected one of them, got both")

    def moved(part: str, value: Any, like: Any) -> Any:
        tree.check_layout(value, like, part, ValueError)
        return tree.map(lambda x: x.to(key.device).clone(), value)

    if params is not None:
        return new._replace(params=moved("params", params, new.params))
    if state is None:
        return new
    if _is_state_on_host(learner):
        raise ValueError(
            "state: expected an environment that is pure, got one on the host; "
            "params=state.params starts with new environments"
        )
    given = moved("state", state, new)
    return given._replace(update=new.update, scalars=new.scalars)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Functions and settings of a training run's loop over updates."""

    learner: AnyLearner
    seeds: int | tuple[int, ...]  # several: of stacked states
    step: StepFn
    record: StrategyRecord | None  # how the step is run; None: eagerly
    callbacks: Sequence[Callback]
    evaluator: Evaluator
    evaluate_every: int | None  # updates
    path: Path | None  # of the checkpoint
    settings: dict[str, str]  # that the checkpoint is compared with
    checkpoint_every: int  # updates; the last one is saved too
    checkpoint_seconds: float  # after the last checkpoint

    def is_due(self, update: int, every: int | None) -> bool:
        """Return whether something is due after an update: every `every` updates and after the last one.
        None means never.
        """
        is_last = update == self.learner.cfg.ppo.n_updates
        return every is not None and (update % every == 0 or is_last)

    def evaluate(self, state: State, update: int) -> Any:
        """Evaluate a state after an update if that is due, else return None. All processes call it."""
        if not self.is_due(update, self.evaluate_every):
            return None
        return self.evaluator.evaluate(self.learner.gather(state), self.seeds)

    def save(self, state: State) -> None:
        """Write a checkpoint if the run has a path for it. All processes call it, and rank 0 writes."""
        if self.path is None:
            return
        state = self.learner.gather(state)
        if _is_main(self.learner):
            meta: Json = {"settings": self.settings}
            checkpoints.save(self.path, state, meta)


def make_updates(loop: Loop, state: State) -> TrainResult[Any]:
    """Update a state until the last update or until a callback stops the run, then close the callbacks' logs.

    A state is saved after the callbacks have seen it, so that what they write is never behind a checkpoint. On a CPU a
    KeyboardInterrupt saves the last such state; on a GPU the update may have overwritten a part of it.
    """
    ppo = loop.learner.cfg.ppo
    seeds = loop.seeds if isinstance(loop.seeds, tuple) else None
    first_update = update = _update_of(state)
    start, saved_at = time.perf_counter(), 0.0
    evaluations: list[Any] = []
    is_stopped = False
    lost: Tensor | float = 0.0

    with _closing_logs(loop.callbacks):
        while update < ppo.n_updates and not is_stopped:
            with _saved_at_interrupt(loop, state, update):
                update += 1
                state, metrics = _make_update(loop, state, update)
                lost = lost + _count_lost(metrics)
                evaluation = loop.evaluate(state, update)
                evaluations.append(evaluation)

                seconds = time.perf_counter() - start
                progress = Progress(
                    learner=loop.learner,
                    seeds=seeds,
                    state=state,
                    metrics=metrics,
                    update=update,
                    n_new_updates=update - first_update,
                    seconds=seconds,
                    evaluation=evaluation,
                    record=loop.record,
                )
                is_save_due = (
                    loop.is_due(update, loop.checkpoint_every)
                    or seconds - saved_at > loop.checkpoint_seconds
                )
                is_stopped = _call(loop, progress, is_save_due)

            if is_save_due or is_stopped:
                loop.save(state)
                saved_at = time.perf_counter() - start

    state = tree.map(torch.clone, state)  # a compiled step would overwrite it
    made = tuple(x for x in evaluations if x is not None)
    return TrainResult(
        state, made, update, is_stopped, _describe_lost(loop.learner, lost)
    )


def _closing_logs(callbacks: Sequence[Callback]) -> ExitStack:
    """Return a context that closes the logs among the callbacks at its end."""
    stack = ExitStack()
    for callback in callbacks:
        if isinstance(callback, MetricsLog):
            stack.callback(callback.close)
    return stack


def _count_lost(metrics: Metrics) -> Tensor:
    """Count an update's applied and skipped minibatches, rows left out in units of minibatches, and their causes.

    They stay on the device, one of each for each learner, so that counting waits for nothing.
    """
    n_applied = metrics.n_applied_minibatches
    rollout = metrics.rollout
    counts = (
        n_applied,
        metrics.n_nonfinite_minibatches,
        (metrics.loss.nonfinite_fraction * n_applied).nan_to_num(),
        rollout.n_nonfinite_observations,
        rollout.n_nonfinite_rewards,
        rollout.n_empty_masks,
    )
    return torch.stack(counts)


def _describe_lost(
    learner: AnyLearner, lost: Tensor | float
) -> tuple[str, ...]:
    """Format, and issue as warnings, one line for each kind of data that was not learnt from; empty if all was."""
    if not isinstance(lost, Tensor):  # no update was made
        return ()
    counts: list[float] = lost.reshape(len(lost), -1).sum(1).tolist()
    n_applied, n_skipped, n_left_out, *causes = counts
    kinds = (
        "observations were not finite",
        "rewards were not finite"
        + " or of steps that only reset a row" * _is_state_on_host(learner),
        "observations had no legal action",
    )
    why = " and ".join(f"{n:.0f} {kind}" for n, kind in zip(causes, kinds) if n)

    notes: list[str] = []
    if n_skipped:
        notes.append(
            f"{n_skipped:.0f} minibatches were skipped and {n_applied:.0f} applied: "
            f"{why or 'a loss or a gradient was not finite'}"
        )
    if n_left_out:
        spreads = any(causes[:2])
        # A memory of a bad observation lasts to the end of its episode.
        has_memory = learner.cfg.agent.initial_memory is not None
        after = " and after" * (has_memory and causes[0] > 0)
        notes.append(
            f"{n_left_out / n_applied:.2%} of the rows were left out: "
            f"{why or 'an output of the network was not finite'}"
            + f", with the steps before{after} them in their episodes"
            * spreads
        )
    for note in notes:
        warnings.warn(note, TrainingNote, stacklevel=4)
    return tuple(notes)


def _make_update(
    loop: Loop, state: State, update: int
) -> tuple[State, Metrics]:
    """Make one update; return the state and its metrics. With several processes, a deadline covers it."""
    group = loop.learner.group
    if group is None:
        return loop.step(state)
    with group.collective(f"in update {update}"):
        state, metrics = loop.step(state)
        _update_of(state)  # waits for the device
    return state, metrics


@contextmanager
def _saved_at_interrupt(
    loop: Loop, state: State, update: int
) -> Generator[None, None, None]:
    """Save the state before an update if a KeyboardInterrupt ends the update midway; see `make_updates`."""
    try:
        yield
    except KeyboardInterrupt:
        # A gather of several processes would wait for those that go on.
        is_alone = loop.learner.group is None
        is_on_cpu = state.key.device.type == "cpu"
        if is_alone and is_on_cpu and _update_of(state) == update:
            loop.save(state)
        raise


def _call(loop: Loop, progress: Progress[Any], is_save_due: bool) -> bool:
    """Call the callbacks; return whether one stops the run. If one raises, a checkpoint that is due is saved first.

    Of several processes rank 0 calls them and decides for all.
    """
    group = loop.learner.group
    is_stopped = False
    try:
        if _is_main(loop.learner):
            is_stopped = any(
                [bool(callback(progress)) for callback in loop.callbacks]
            )
    except Exception:
        # The others wait in the next collective: they cannot take part in a gather.
        if is_save_due and group is None:
            loop.save(progress.state)
        raise
    if group is None or not loop.callbacks:
        return is_stopped
    return group.agree(is_stopped)


def _is_main(learner: AnyLearner) -> bool:
    """Return whether this process reads and writes files."""
    return learner.group is None or learner.group.is_main


def _update_of(state: State) -> int:
    """Return the number of updates of a state; for stacked states, of the first, which all share."""
    return int(state.update.flatten()[0])


def saved_update(path: Path) -> int:
    """Return the number of updates of the latest readable checkpoint; 0 without one."""
    try:
        readable, _ = checkpoints.find_readable(path)
        return int(checkpoints.read(readable)[0]["update"].flat[0])
    except checkpoints.DamagedCheckpointError:
        return 0


def _settings(learner: AnyLearner, **others: object) -> dict[str, str]:
    """Return {name: text} of everything that the result of a run depends on."""
    named = {"world": learner.world, **others}
    texts = {name: text_of(value) for name, value in named.items()}
    return settings_text(learner.cfg) | texts


def _is_finished(learner: AnyLearner, state: State) -> bool:
    """Return whether no update is left to make."""
    return _update_of(state) >= learner.cfg.ppo.n_updates


def _begin(
    learner: AnyLearner,
    state: State,
    path: Path | None,
    settings: dict[str, str],
    callbacks: Sequence[Callback],
) -> tuple[str, ...]:
    """Let the logs among the callbacks take their folders; return a note, also a warning, if no update is left.

    A log is continued by the run that a checkpoint continues, and by one that begins again before its first checkpoint.

    Raises:
      ValueError: a folder holds the log of another run.
    """
    update, n_updates = _update_of(state), learner.cfg.ppo.n_updates
    if _is_finished(learner, state):
        note = f"{path}: holds all {update} updates of the run: nothing was trained"
        warnings.warn(note, TrainingNote, stacklevel=3)
        return (note,)
    text = repr(sorted((settings | {"n_updates": ""}).items()))
    run = {"run": hashlib.sha256(text.encode()).hexdigest()[:16]}
    length = {} if update else {"n_updates": n_updates}
    for callback in callbacks:
        if isinstance(callback, MetricsLog):
            callback.claim(run | length, continues=bool(update or path))
    return ()


def restore_latest(
    learner: AnyLearner,
    state: State,
    path: Path | None,
    settings: Mapping[str, str],
) -> tuple[State, tuple[str, ...]]:
    """Load the latest readable checkpoint, or return the given state if there is none; also return notes.

    Args:
      settings: texts that must be those of the checkpoint.

    Returns:
      The state, and notes on it, which are warnings too.

    Raises:
      ValueError: the checkpoint is damaged or of another learner.
    """
    if path is None:
        return state, ()
    if not path.exists() and not checkpoints.previous_path(path).exists():
        return state, ()
    readable, notes = checkpoints.find_readable(path)
    state = _restore(readable, learner, state, settings)
    if _is_state_on_host(learner):
        state = _restart_environments(learner, state)
        notes.append(
            f"{path}: the environments step on the host and are not in the checkpoint: new episodes begin, "
            "so that the run does not continue bit for bit"
        )
    for note in notes:
        warnings.warn(note, TrainingNote, stacklevel=4)
    return state, tuple(notes)


def _is_state_on_host(learner: AnyLearner) -> bool:
    """Return whether environments keep their state in host objects."""
    host = learner.cfg.env.host
    return host is not None and not host.is_pure


def _restart_environments(learner: AnyLearner, state: State) -> State:
    """Begin a new episode in each row of a state; running moments, which outlive episodes, are kept."""
    if state.key.ndim > 1:
        return torch.vmap(partial(_restart_environments, learner))(state)
    cfg, world = learner.cfg, learner.world
    # a child of the key that no update uses
    key = random.fold_in(state.key, 2**31)
    new = init_rollout_state(cfg, world, key, cfg.ppo.n_envs)
    is_new = torch.ones_like(new.episode_stats.length, dtype=torch.bool)
    env_state = wrappers.restart(
        cfg.env, world, state.env_state, is_new, new.env_state
    )
    return state._replace(
        env_state=env_state,
        episode_stats=new.episode_stats,
        memory=new.memory,
    )


def _on_device(learner: AnyLearner, device: torch.device | str) -> AnyLearner:
    """Return the learner with its world on a device, which is checked."""
    check_device(device)
    world = tree.map(lambda x: x.to(device), learner.world)
    return replace(learner, world=world)


def check_device(device: object) -> None:
    """Check that tensors with numbers can be made on a device.

    Raises:
      ValueError: PyTorch has no such device, or it holds no numbers.
    """
    problem = ""
    try:
        place = torch.empty(0, device=cast(Any, device)).device
        problem = "which holds no numbers" if place.type == "meta" else ""
    # PyTorch without CUDA raises an AssertionError.
    except (AssertionError, RuntimeError, TypeError) as error:
        problem = str(error).partition("\n")[0]
    if problem:
        raise ValueError(
            f"device: expected one that PyTorch has here, such as cpu or cuda, got {device!r}: {problem}"
        )


def checkpoint_path(checkpoint: str | Path | None) -> Path | None:
    """Return the path of a checkpoint and create its folder if missing; None if no checkpoint is asked for.

    Raises:
      ValueError: no file can be written there. The message is one line.
    """
    if checkpoint is None:
        return None
    path = Path(checkpoint)
    _make_folder(
        path.parent, f"checkpoint: {path}: expected a file that can be written"
    )
    return path


def _make_folder(folder: Path, expectation: str) -> None:
    """Create a folder if it is missing, and check that files can be written in it.

    Raises:
      ValueError: it does not; the message begins with the expectation, and is one line.
    """
    with files.expecting(expectation):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def batch_size(ppo: PPOConfig) -> int:
    """Count the environment steps of one update."""
    return ppo.n_envs * ppo.n_steps


def with_length(learner: AnyLearner, total_steps: int) -> AnyLearner:
    """Return the learner with the number of updates that make `total_steps` steps, over which its schedules run.

    Raises:
      TypeError: it is none of `fp.ppo`.
      ValueError: there are no steps to make.
    """
    check_kind(learner, Learner, "learner: expected one of fp.ppo")
    check_value("total_steps", PositiveInt, total_steps)
    cfg = learner.cfg
    n_updates = math.ceil(total_steps / batch_size(cfg.ppo))
    ppo = replace(cfg.ppo, n_updates=n_updates)
    return replace(learner, cfg=replace(cfg, ppo=ppo))


# Checkpoints


def _restore(
    path: Path, learner: AnyLearner, like: State, settings: Mapping[str, str]
) -> State:
    """Load a checkpoint of a run with these settings; it may go on to another length if no schedule ends with it."""
    stored: dict[str, str] = checkpoints.read(path)[1].get("settings", {})
    for name, value in settings.items():
        found = str(stored.get(name))
        if found != value and name != "n_updates":
            expected, got = _first_difference(value, found)
            raise ValueError(
                f"{path}: made with other settings: {name}: expected {expected}, got {got}"
            )
    state = checkpoints.restore(path, like)[0]

    ppo = learner.cfg.ppo
    n_made, n_steps = _update_of(state), batch_size(ppo)
    schedule, n_updates = find_ending_schedule(ppo), int(stored["n_updates"])
    expected = ""
    if n_made > ppo.n_updates:
        expected = f"at least {n_made * n_steps}, of which this is a checkpoint"
    if schedule and n_updates != ppo.n_updates:
        expected = f"{n_updates * n_steps}, where its {schedule} ends"
    if expected:
        raise ValueError(
            f"{path}: total_steps: expected {expected}, got {ppo.n_updates * n_steps}"
        )
    return state


def _first_difference(expected: str, got: str) -> list[str]:
    """Cut two setting texts to a line that begins at the setting where they first differ."""
    prefix = os.path.commonprefix([expected, got])  # noqa: RUF071
    start = prefix.rfind(" ") + 1
    return [text[start : start + 60] for text in (expected, got)]


def find_ending_schedule(ppo: PPOConfig) -> str:
    """Return the name of a schedule that ends with the run, which then cannot be extended; empty if there is none."""
    for name in ("learning_rate", "clip_eps", "entropy_coef"):
        schedule = f"{name}_schedule"
        if getattr(ppo, schedule).kind != "constant":
            return schedule
    return ""


# Evaluation


def evaluate_policy(
    learner: AnyLearner,
    state: State,
    *,
    n_episodes: int = 32,
    max_steps: int = 10_000,
    seed: int = 0,
) -> PolicyEvaluation:
    """Play whole episodes in separate environments, greedily and by sampling; return both mean returns.
    `state` is unchanged.

    Rewards are those before `normalize_reward`. Running moments are those of training, and stay as they are.

    Args:
      n_episodes: played side by side, for each of the two policies.
      max_steps: steps after which an episode is given up; `n_unfinished` counts these.
      seed: of the episodes, which have nothing in common with those of training.

    Raises:
      ValueError: a number is out of range, or the state is that of another learner, with which this one fails.
      TypeError: what is handed in is no state.
    """
    check_value("n_episodes", PositiveInt, n_episodes)
    check_value("max_steps", PositiveInt, max_steps)
    evaluator = Evaluator(
        learner=learner, n_episodes=n_episodes, max_steps=max_steps
    )
    with own_state(learner, state, "evaluate_policy"):
        return evaluator.evaluate(state, seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluator:
    """Evaluator of a learner's states, for repeated use; on a GPU a step of the episodes is one CUDA graph."""

    learner: AnyLearner
    n_episodes: int
    max_steps: int = 10_000
    # by (greedy, axes of the key), recorded at the first evaluation
    _steps: dict[tuple[bool, int], CapturedStep[_Play, tuple[()]]] = field(
        default_factory=dict
    )

    def evaluate(self, state: State, seeds: int | tuple[int, ...]) -> Any:
        """Evaluate a state's policy like `evaluate_policy`; of several seeds, each of stacked states with its own.

        Returns:
          A `PolicyEvaluation`; of several seeds a tuple of one for each.
        """
        device, update = state.key.device, _update_of(state)
        if isinstance(seeds, int):
            key = random.key(seeds, device)
        else:
            key = torch.stack([random.key(seed, device) for seed in seeds])
        try:
            played = [
                self._play(state, key, is_greedy) for is_greedy in (True, False)
            ]
        finally:
            host = self.learner.cfg.env.host
            if host is not None:
                host.close()

        def compare(
            key: I64[Tensor, "2"], episodes: list[_Episodes]
        ) -> PolicyEvaluation:
            greedy, sampled = (_estimate_return(key, x) for x in episodes)
            return PolicyEvaluation(update, greedy, sampled)

        if key.ndim == 1:
            return compare(key, played)
        return tuple(
            compare(k, [tree.item(x, i) for x in played])
            for i, k in enumerate(key)
        )

    def notes(self) -> tuple[str, ...]:
        """Explain why a step on a GPU is not replayed as a CUDA graph; empty if it is, and on a CPU."""
        expected = (None, ReasonCode.NO_GPU, ReasonCode.DISABLED)
        steps = self._steps.values()
        reasons = {
            x.fallback_reason for x in steps if x.fallback_code not in expected
        }
        return tuple(
            f"evaluation is not replayed as a CUDA graph: {reason}"
            for reason in sorted(reasons)
        )

    def _play(
        self, state: State, key: I64[Tensor, "... 2"], is_greedy: bool
    ) -> _Episodes:
        """Play whole episodes of one state, or of each of stacked states; return the finished episodes."""
        learner = self.learner
        env = evaluation_env(learner.cfg.env)
        batched = torch.vmap if key.ndim > 1 else lambda fn: fn
        reset_key, play_key, _ = random.split(key, 3).unbind(-2)
        begin = batched(partial(_begin_episodes, learner, env, self.n_episodes))
        play = _Play(
            state.params,
            begin(state.env_state, reset_key),
            self._step_keys(play_key, 0),
            place=torch.zeros(1, dtype=torch.int64, device=key.device),
        )

        kind = is_greedy, key.ndim
        if kind in self._steps:
            self._steps[kind].load(play)
        else:
            step = batched(partial(_step_episodes, learner, env, is_greedy))
            self._steps[kind] = capture(
                partial(_step_play, step, key.ndim - 1),
                play,
                use_cuda_graph=learner.cfg.env.host is None,
            )
        self._step_to_the_end(self._steps[kind], play_key)
        return self._steps[kind].state.episodes

    def _step_keys(
        self, key: I64[Tensor, "... 2"], first: int
    ) -> tuple[I64[Tensor, "... N 2"], I64[Tensor, "... N B 2"]]:
        """Return action keys and environment keys of N steps from `first`; action keys are held as in a rollout."""
        n_held = self.learner.cfg.agent.action_key_steps
        if n_held is None:
            n_held = self.learner.cfg.ppo.n_steps
        steps = torch.arange(first, first + KEYS_AT_ONCE, device=key.device)
        key = key.unsqueeze(-2)
        env_key = random.split(random.fold_in(key, steps)).select(-2, 1)
        held = random.fold_in(key, steps // n_held * n_held)
        action_key = random.split(held).select(-2, 0)
        return action_key, random.split(env_key, self.n_episodes)

    def _step_to_the_end(
        self,
        captured: CapturedStep[_Play, tuple[()]],
        play_key: I64[Tensor, "... 2"],
    ) -> None:
        """Step all episodes until each has finished or max_steps is reached; finished episodes stay unchanged.

        A graph is replayed faster than the host reads a flag, so that the flag is read once for all steps whose keys
        are made together.
        """
        is_graph = captured.replay_mode == "cuda-graph"
        for t in range(self.max_steps):
            place = t % KEYS_AT_ONCE
            if t and not place:
                keys = self._step_keys(play_key, t)
                start = torch.zeros_like(captured.state.place)
                captured.load(captured.state._replace(keys=keys, place=start))
            captured.step()
            is_read = not is_graph or place == KEYS_AT_ONCE - 1
            if is_read and bool(captured.state.episodes.finished.all()):
                break


class _Episodes(NamedTuple):
    """Episodes that are played side by side, with their returns and lengths."""

    env_state: Any
    total_reward: F32[Tensor, "B"]
    length: I64[Tensor, "B"]
    finished: Bool[Tensor, "B"]
    memory: Any  # of the network, of the episode so far


class _Play(NamedTuple):
    """Inputs and outputs of one step of the episodes."""

    params: Any
    episodes: _Episodes
    keys: tuple[I64[Tensor, "... N 2"], I64[Tensor, "... N B 2"]]
    place: I64[Tensor, "1"]  # of the next step among them


def _step_play(
    step: Callable[..., _Episodes], key_axis: int, play: _Play
) -> tuple[_Play, tuple[()]]:
    """Make one step of each episode with the keys at its place; return the play after it.

    Args:
      step: `_step_episodes`, or the same of stacked states.
      key_axis: of keys, along which the steps lie.
    """
    keys = [
        keys.index_select(key_axis, play.place).squeeze(key_axis)
        for keys in play.keys
    ]
    with torch.no_grad():
        episodes = step(play.params, play.episodes, *keys)
    return play._replace(episodes=episodes, place=play.place + 1), ()


def _estimate_return(
    key: I64[Tensor, "2"], episodes: _Episodes
) -> ReturnEstimate:
    """Compute the mean return of episodes with its bootstrap interval."""
    resample_key = random.split(key, 3)[2]
    returns = episodes.total_reward.to(torch.float64)
    low, high = bootstrap_interval(resample_key, returns)
    return ReturnEstimate(
        mean=float(returns.mean()),
        low=low,
        high=high,
        mean_length=float(episodes.length.to(torch.float64).mean()),
        n_episodes=len(returns),
        n_unfinished=int((~episodes.finished).sum()),
    )


def _begin_episodes(
    learner: AnyLearner,
    env: AnyEnvironment,
    n_episodes: int,
    env_state: Any,
    key: I64[Tensor, "2"],
) -> _Episodes:
    """Reset all episodes, with running moments, which outlive episodes, copied from the training environments."""
    cfg, world = learner.cfg, learner.world
    # Of several rollouts' first states: the network's memory, and episodes without a reward.
    first = init_rollout_state(replace(cfg, env=env), world, key, n_episodes)
    reward, length = first.episode_stats
    fresh = first.env_state
    if env.restart is not None:
        n_rows = tree.leaves(env_state)[0].shape[0]
        rows = torch.arange(n_episodes, device=key.device) % n_rows
        from_training = tree.map(lambda x: x[rows], env_state)
        is_new = torch.ones_like(rows, dtype=torch.bool)
        fresh = wrappers.restart(env, world, from_training, is_new, fresh)
    finished = torch.zeros_like(length, dtype=torch.bool)
    return _Episodes(fresh, reward, length, finished, first.memory)


def _step_episodes(
    learner: AnyLearner,
    env: AnyEnvironment,
    greedy: bool,
    params: object,
    episodes: _Episodes,
    action_key: I64[Tensor, "2"],
    env_keys: I64[Tensor, "B 2"],
) -> _Episodes:
    """Make one step of each episode; finished episodes stay as they are."""
    agent, world = learner.cfg.agent, learner.world
    obs = env.observe(env.cfg, world, episodes.env_state)
    output, memory = apply_agent(agent, world, params, obs, episodes.memory)
    action = choose_action(agent, output, None if greedy else action_key)

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
        memory=memory,
    )


def bootstrap_interval(
    key: I64[Tensor, "2"], values: Tensor
) -> tuple[float, float]:
    """Compute the 95 % percentile bootstrap interval of a mean.

    Source: Efron & Tibshirani 1993, "An introduction to the bootstrap", chapter 13.
    """
    n = values.shape[0]
    unit = random.uniform(random.split(key, 2000), (n,))  # resamples
    means = values[(unit * n).to(torch.int64)].mean(-1)
    tails = means.new_tensor([(1 - 0.95) / 2, (1 + 0.95) / 2])
    low, high = torch.quantile(means, tails).tolist()
    return low, high


Evaluations = tuple[PolicyEvaluation, ...]  # one for each seed


def train_many(
    learner: AnyLearner,
    total_steps: int,
    *,
    seeds: int | Sequence[int] = 8,
    scalars: Mapping[str, Sequence[float]] | None = None,
    device: torch.device | str = "cpu",
    params: object = None,
    strategy: str = "eager",
    checkpoint: str | Path | None = None,
    **options: Any,
) -> TrainResult[Evaluations]:
    """Train a policy for each of several seeds, all seeds in one step by `torch.vmap`.

    Each policy is that of `train` with its seed, but for rounding. Checkpoints are written every minute and at the end.

    Args:
      learner: of `fp.ppo`.
      total_steps: environment steps of each seed; the last update is made whole.
      seeds: of the first states and of evaluations; a number N stands for 0 to N - 1.
      scalars: a number for each seed, by the name of a number of `PPOConfig` that is no size, such as learning_rate,
        target_kl, adam.b1 or learning_rate_schedule.end_factor.
      device: of the first states.
      params: of another run, which all seeds start from.
      strategy: how the step is run: eager, as with environments on the host; auto, which compiles it where the run is
        long enough to repay that; or another of `runtime.compile.STRATEGIES`.
      checkpoint: as that of `train`.
      callbacks: as those of `train`; what they receive has a first axis of seeds.
      log: as that of `train`, with a line for each seed.
      evaluate_every: as that of `train`.
      n_episodes: episodes of each seed, greedy and sampled, in an evaluation.

    Returns:
      The states after the run, stacked, and its evaluations, each one of all seeds.

    Raises:
      ValueError: a number is out of range, PyTorch has no such device, the checkpoint is damaged or of another
        learner, or a function of the environment or the network overwrites an argument, differs when it is called again
        with the same key, or cannot be mapped by `torch.vmap`.
      TypeError: seeds are no integers, a scalar is one number for all, or an option is unknown or of the wrong kind.
    """
    seeds = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    check_value("seeds", PositiveInt, len(seeds))
    learner = with_length(learner, total_steps)
    learner = _on_device(learner, device)
    first = init_many(learner, seeds, device, scalars, params)
    return _run(
        learner,
        first,
        seeds,
        partial(prepare_many, learner, strategy=strategy),
        _settings(learner, seed=seeds, scalars=first.scalars, params=params),
        options,
        checkpoint=checkpoint,
        checkpoint_seconds=CHECKPOINT_SECONDS,
    )


def init_many(
    learner: AnyLearner,
    seeds: Sequence[int],
    device: torch.device | str = "cpu",
    scalars: Mapping[str, Sequence[float]] | None = None,
    params: object = None,
) -> State:
    """Build the first states of several seeds, stacked, with the given scalars replaced.

    Args:
      scalars: as of `train_many`.
      params: likewise.

    Raises:
      ValueError: there is no such scalar, it has not one number for each seed, or one is out of range.
      TypeError: they have no names.
    """
    cfg = learner.cfg
    pure = replace(learner, cfg=replace(cfg, env=stand_in_env(cfg.env)))
    keys = [random.key(seed, device) for seed in seeds]
    states = [_first_state(pure, key, None, params) for key in keys]
    state = tree.map(lambda *leaves: torch.stack(leaves), *states)
    if cfg.env.host is not None:
        # The rows of all seeds are reset at once: a bridge knows its latest reset alone.
        begin = torch.vmap(partial(train_step.init_rollout, cfg, learner.world))
        state = state._replace(env_state=begin(torch.stack(keys)).env_state)
    if not isinstance(scalars, Mapping | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"scalars: expected numbers by their names, got {scalars!r}"
        )

    fields_by_path = {_path_of(name): name for name in Scalars._fields}
    changed: dict[str, Tensor] = {}
    for name, numbers in (scalars or {}).items():
        if name not in fields_by_path:
            names = ", ".join(fields_by_path)
            raise ValueError(
                f"scalars: expected one of {names}, got {name}, which all seeds share"
            )
        if isinstance(numbers, Tensor):
            numbers = numbers.tolist()
        is_several = isinstance(cast(object, numbers), Sized)
        if not is_several or len(numbers) != len(seeds) or None in numbers:
            raise ValueError(
                f"scalars: {name}: expected {len(seeds)} numbers, got {numbers!r}"
            )
        for number in numbers:
            learner.cfg.ppo.with_value(name, number)  # checks its range
        changed[fields_by_path[name]] = torch.tensor(
            numbers, dtype=torch.float32, device=device
        )
    return state._replace(scalars=state.scalars._replace(**changed))


def _path_of(field: str) -> str:
    """Return the path in `PPOConfig` of a field of `Scalars`, such as adam.b1."""
    path = field.replace("adam_", "adam.")
    return path.replace("_schedule_end", "_schedule.end")


def prepare_many(
    learner: AnyLearner, state: State, strategy: str
) -> tuple[StepFn, StrategyRecord | None]:
    """Prepare the step of stacked states, compiled unless the run is finished; return it and its strategy record.

    Raises:
      ValueError: environment or network is not pure, or cannot be vectorised, which is tried on one step.
    """
    check_functions(learner, tree.item(state, 0))
    check_vectorised(learner, state)
    if learner.cfg.env.host is not None:
        if strategy not in ("eager", "auto"):
            expected = "eager or auto where environments step on the host"
            raise FieldError("strategy", expected, strategy)
        parts = vmap_parts(EAGER_PARTS)
        step = partial(train_step.train_step, learner.cfg, learner.world)
        return partial(step, parts=parts), None
    captured, record = prepare_step(
        learner.cfg,
        learner.world,
        state,
        vmap_parts(EAGER_PARTS),
        "eager" if _is_finished(learner, state) else strategy,
    )
    if captured.replay_mode == "none":
        return captured.fn, record
    return CompiledLearner(captured=captured, record=record).step, record
