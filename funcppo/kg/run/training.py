"""Train a run in a folder: validate, keep the best parameters, stop, and resume bit for bit.

run = prepare_run(run_config, folder, resume=False)     # or open_run(folder) for one that exists (run_start)
run = with_training_data(run)                           # (run_build)
step, record = prepare_train_step(run)
for run, metrics in train(run, folder, step, should_stop, monitor):
    ...
evaluate_policy(run, run.state.best_params, run.task.dataset.test, protocol)     # (validation)
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from funcppo import compiled_step, metrics_log
from funcppo.config import Config
from funcppo.core.deadline import Deadline
from funcppo.core.settings import METRICS_FILE
from funcppo.kg.run.capacity import with_capacity
from funcppo.kg.run.config import CHECKPOINT_FILE, RunConfig
from funcppo.kg.run.peers import NoPeers, Peers
from funcppo.kg.search.slot_scheduler import ProgressCallback, ignore_progress
from funcppo.loggers import MetricsLogger
from funcppo.runtime import compile as compilation
from funcppo.runtime.capture import CapturedStep
from funcppo.runtime.compile import StrategyRecord
from funcppo.runtime.equivalence import BF16_TOLERANCE, DEFAULT_TOLERANCE
from funcppo.runtime.reasons import UntimedCode
from funcppo.train_step import EAGER_PARTS, Metrics, TrainState

# it imports Dynamo, which the evaluation of a run does without
if TYPE_CHECKING:
    from funcppo.runtime.monitor import Monitor


from funcppo.kg.run.run import (
    Run,
    initial_train_state,
    last_logged_update,
    save_checkpoint,
    saved_update,
    training_world,
)
from funcppo.kg.run.validation import validate

NO_PEERS = NoPeers()


class StopRequest(Protocol):
    """Whether training should save and stop after the current update."""

    def __call__(self) -> bool:
        """True to stop."""
        ...


class TrainingObserver(Protocol):
    """Receives what happens in a run: see `telemetry.Telemetry`."""

    def record_update(self, row: metrics_log.Row, n_env_steps: int, /) -> None:
        """An update was made, of so many environment steps; its line of the metrics log."""
        ...

    def record_validation(
        self, row: metrics_log.Row, seconds: float, /
    ) -> None:
        """A validation was made, in so many seconds; the line of the metrics log that it completes."""
        ...

    def record_checkpoint(self, seconds: float, path: Path, /) -> None:
        """A checkpoint was written, in so many seconds."""
        ...


class _NoObserver:
    """An observer that does nothing."""

    def record_update(self, row: metrics_log.Row, n_env_steps: int, /) -> None:
        """Do nothing."""

    def record_validation(
        self, row: metrics_log.Row, seconds: float, /
    ) -> None:
        """Do nothing."""

    def record_checkpoint(self, seconds: float, path: Path, /) -> None:
        """Do nothing."""


class ValidationStopped(Exception):
    """A validation was asked to stop before its end."""


class DivergenceError(ValueError):
    """A run whose loss or gradient stays infinite or not a number."""


def set_matmul_precision(config: RunConfig) -> None:
    """Set the precision of matrix products."""
    torch.set_float32_matmul_precision(
        "high" if config.precision == "high" else "highest"
    )


def prepare_train_step(
    run: Run,
    earlier: Mapping[str, Any] | None = None,
    peers: Peers | None = None,
    deadline: Deadline | None = None,
) -> tuple[CapturedStep[TrainState, Metrics], StrategyRecord]:
    """Compile or capture the training step of a run, starting from its state.

    With strategy auto, a run too short to repay compilation is not compiled, and one long enough to repay a comparison
    takes the fastest strategy.

    Args:
      earlier: the record of the strategy of a run that is resumed, as a dictionary. What was measured then is not
        measured again: other times would give another strategy, and other bits.
      peers: the processes that share the shards of the run, each of which calls this; nothing is compared, because
        each would measure other times. None: this one is alone.
      deadline: when training ends, whatever updates are left. On a GPU auto decides by an update that it measures at
        the first start; None: by the number of rollout steps and minibatches, as it does on a CPU.

    Returns:
      The step, and the record of the strategy that it uses and why.

    Raises:
      Exception: whatever a strategy raises that was set by name and fails.
    """
    run_config = run.run_config
    world = training_world(run)

    # The capacity depends on the first state of the run, so that a resumed run has the same.
    cfg = run.cfg
    if run.questions is None:
        first = initial_train_state(cfg, run.task, run_config)
        cfg = with_capacity(cfg, world, first)
    state = run.state.train_state
    if peers is not None:
        peers.check_agent(cfg)
        cfg = peers.share(cfg)
        state = peers.take(state)
    is_rounded = run_config.precision == "bfloat16"
    earlier = earlier or {}
    times_ms = earlier.get("times_ms", {})
    strategy: str | tuple[str, ...] = run_config.strategy
    if strategy == "auto" and peers is None:
        strategy = _strategies_to_try(cfg, earlier)

    prepare = partial(
        compiled_step.prepare_step,
        cfg,
        world,
        state,
        EAGER_PARTS,
        strategy,
        BF16_TOLERANCE if is_rounded else DEFAULT_TOLERANCE,
        deadline=None if earlier or int(state.update) else deadline,
        uncompiled_seconds=earlier.get("uncompiled_seconds"),
        decide=peers.decide if peers else bool,
    )
    captured, record = peers.prepare(prepare) if peers else prepare()
    if strategy == "auto" and peers is None and record.untimed_reason:
        reason = "comparing strategies would take longer than it saves"
        record = dataclasses.replace(
            record, untimed_reason=reason, untimed_code=UntimedCode.SHORT_RUN
        )
    elif times_ms and not record.times_ms and peers is None:
        # They choose at the next start too, whatever this one may use.
        record = dataclasses.replace(
            record, times_ms=times_ms, untimed_reason="", untimed_code=None
        )
    return captured, record


def _strategies_to_try(
    cfg: Config, earlier: Mapping[str, Any]
) -> str | tuple[str, ...]:
    """What `auto` means: those compared in an earlier run, the fastest of a long run, or the first that works."""
    times_ms: Mapping[str, float] = earlier.get("times_ms", {})
    if times_ms:
        # A start with the compiler turned off, as by --debug, compiled none of them.
        is_set_aside = earlier.get("skip_code") is not None
        first = (
            compilation.select_fastest(times_ms)
            if is_set_aside
            else earlier["strategy"]
        )
        return (first, *(name for name in times_ms if name != first))
    is_long = compiled_step.n_calls(cfg.ppo) >= compiled_step.COMPARE_MIN_CALLS
    return "fastest" if is_long else "auto"


def _begin(
    run: Run,
    saver: _Saver,
    captured: CapturedStep[TrainState, Metrics],
    on_validation: ProgressCallback,
    monitor: Monitor,
) -> Run:
    """The run with its state in the step's buffers, its metrics log as it was, and no validation due.

    Raises:
      ValidationStopped: a validation was due, and `on_validation` stops it.
    """
    metrics_log.truncate(saver.folder / METRICS_FILE, last_logged_update(run))
    run = dataclasses.replace(
        run, state=run.state._replace(train_state=captured.state)
    )
    if run.pending_row is None:
        return run
    return _validate_and_save(run, saver, on_validation, monitor)


def train(
    run: Run,
    folder: Path,
    captured: CapturedStep[TrainState, Metrics],
    should_stop: StopRequest,
    monitor: Monitor,
    on_validation: ProgressCallback = ignore_progress,
    checkpoint_seconds: float = compiled_step.CHECKPOINT_SECONDS,
    observer: TrainingObserver | None = None,
    loggers: Sequence[MetricsLogger] = (),
    peers: Peers | NoPeers = NO_PEERS,
) -> Iterator[tuple[Run, dict[str, float]]]:
    """Train to the end or until stopped; yield the run after each update, with the metrics of the update.

    The last update of a resumed run whose validation was stopped is yielded after the validation. The training state of
    a yielded run is the buffers of the step, which the next update overwrites. The metrics log gets a line at every
    update, and one before the first update for the validation of the initial parameters. The checkpoint is written
    before and after every validation, after an update that ends `checkpoint_seconds` or more after the last one, at a
    stop, and when a KeyboardInterrupt ends an update.

    Args:
      run: the run, at its start or resumed.
      folder: where its files are.
      captured: the training step, from `prepare_train_step`.
      should_stop: called after each update and often in a validation; if true, training ends with a checkpoint, and a
        resumed run makes the validation anew.
      monitor: times the steps, and reports compilations at each validation.
      on_validation: receives the candidates of a validation that are started, and all of them.
      checkpoint_seconds: time after which the next update is saved. It does not change what is computed.
      observer: receives updates, validations and checkpoints.
      loggers: receive each line of the metrics log too.
      peers: the processes that share the shards, of which rank 0 calls this and the others `assist`.

    Raises:
      DivergenceError: `max_nonfinite_updates` updates in a row met a number that is not finite. None of these is saved.
    """
    n_bad_updates = 0  # consecutive updates with a number that is not finite
    report_or_stop = partial(_report_or_stop, should_stop, on_validation)
    saver = _Saver(
        folder, checkpoint_seconds, observer or _NoObserver(), loggers
    )
    saver.whole_state = peers.gather(captured.state)
    with suppress(ValidationStopped):
        pending = run.pending_row
        run = _begin(run, saver, captured, report_or_stop, monitor)
        if pending is not None and is_finished(run):
            yield run, pending

        n_made = int(run.state.train_state.update)
        for update in range(n_made + 1, run.cfg.ppo.n_updates + 1):
            if stopped_early(run):
                break
            peers.decide(True)
            is_broken = n_bad_updates > 0 or saver.whole_state is not None
            with _saved_at_interrupt(update, run, folder, is_broken):
                row, metrics = _step(
                    update, run, captured, saver, monitor, peers
                )
            stopping = should_stop()
            n_bad_updates = (
                n_bad_updates + 1 if metrics["n_nonfinite_minibatches"] else 0
            )

            run = _record_update(
                run,
                row,
                captured,
                saver,
                peers,
                report_or_stop,
                monitor,
                stopping=stopping,
                is_bad=n_bad_updates > 0,
            )

            yield run, metrics
            _check_divergence(run, folder, update, n_bad_updates)
            if stopping or run.pending_row is not None:
                break
    peers.decide(False)


def _record_update(
    run: Run,
    row: metrics_log.Row,
    captured: CapturedStep[TrainState, Metrics],
    saver: _Saver,
    peers: Peers | NoPeers,
    on_validation: ProgressCallback,
    monitor: Monitor,
    *,
    stopping: bool,
    is_bad: bool,
) -> Run:
    """The run after an update, which is logged, and validated and saved if that is due; pending where that is stopped.

    Args:
      row: the metrics of the update.
      is_bad: it met a number that is not finite; then it is neither validated nor saved.
    """
    saves = (stopping or saver.is_due()) and not is_bad
    validates = _is_validation_due(run, int(row["update"])) and not is_bad
    if peers.decide(validates or saves):
        saver.whole_state = peers.gather(captured.state)
    if not validates:
        saver.append(row)
        if saves:
            saver.save(run)
        return run
    run = dataclasses.replace(run, pending_row=row)
    saver.save(run)
    try:
        return _validate_and_save(run, saver, on_validation, monitor)
    except ValidationStopped:
        return run


def assist(
    captured: CapturedStep[TrainState, Metrics],
    peers: Peers,
    on_update: Callable[[float], object] = lambda seconds: None,
    on_checkpoint: Callable[[], object] = lambda: None,
) -> None:
    """Make the updates of this process's shards until rank 0, which calls `train`, ends the run.

    Args:
      captured: the training step, from `prepare_train_step`.
      on_update: receives the seconds of each update.
      on_checkpoint: called when the state is gathered for a checkpoint.
    """
    peers.gather(captured.state)
    while peers.decide():
        start = time.perf_counter()
        peers.step(captured)
        on_update(time.perf_counter() - start)
        if peers.decide():
            peers.gather(captured.state)
            on_checkpoint()


def _validation_interval(run: Run) -> int:
    """Updates from one validation to the next."""
    return max(1, run.cfg.ppo.n_updates // run.run_config.n_validations)


def _is_validation_due(run: Run, update: int) -> bool:
    """Whether the parameters after an update are validated; those after the last one are."""
    is_last = update == run.cfg.ppo.n_updates
    return is_last or update % _validation_interval(run) == 0


def stopped_early(run: Run) -> bool:
    """Whether so many validations in a row have ranked valid no better that the run ends before its last update."""
    patience = run.run_config.early_stop_validations
    if patience is None or run.pending_row is not None:
        return False
    if not len(run.task.dataset.valid):
        return False
    interval = _validation_interval(run)
    update = int(run.state.train_state.update)
    best_update = int(run.state.best_update)
    return update // interval - best_update // interval >= patience


def is_finished(run: Run) -> bool:
    """Whether a run has made its last update, or was stopped early."""
    is_last = int(run.state.train_state.update) >= run.cfg.ppo.n_updates
    return is_last or stopped_early(run)


class _Saver:
    """Writes the lines and checkpoints of a run, and tells when the next checkpoint is due by time."""

    def __init__(
        self,
        folder: Path,
        interval: float,
        observer: TrainingObserver,
        loggers: Sequence[MetricsLogger],
    ) -> None:
        """Begin the time.

        Args:
          folder: of the run.
          interval: seconds until a checkpoint is due.
          observer: receives checkpoints.
          loggers: receive lines of the metrics log.
        """
        self.folder = folder
        self.loggers = loggers
        self.observer = observer
        self._interval = interval
        # of all processes; None where the run's own is whole
        self.whole_state: TrainState | None = None
        self._saved_at = time.monotonic()

    def append(self, row: metrics_log.Row) -> None:
        """Add a line to the metrics log, and log it."""
        metrics_log.append(self.folder / METRICS_FILE, row)
        for logger in self.loggers:
            logger.log(row)

    def save(self, run: Run) -> None:
        """Write a checkpoint, and begin the time anew."""
        start = time.monotonic()
        if self.whole_state is not None:
            state = run.state._replace(train_state=self.whole_state)
            run = dataclasses.replace(run, state=state)
        save_checkpoint(run, self.folder)
        self._saved_at = time.monotonic()
        self.observer.record_checkpoint(
            self._saved_at - start, self.folder / CHECKPOINT_FILE
        )

    def is_due(self) -> bool:
        """Whether the last checkpoint is as old as the interval."""
        return time.monotonic() - self._saved_at >= self._interval


def _step(
    update: int,
    run: Run,
    captured: CapturedStep[TrainState, Metrics],
    saver: _Saver,
    monitor: Monitor,
    peers: Peers | NoPeers,
) -> tuple[metrics_log.Row, dict[str, float]]:
    """Make one update; its line of the metrics log, and its metrics alone."""
    start = time.perf_counter()
    with monitor.timer("replay"):
        device_metrics = peers.step(captured)
    metrics = metrics_log.to_scalars(device_metrics)  # waits for the device
    seconds = time.perf_counter() - start
    row = {"update": update, "seconds": seconds} | metrics
    ppo = run.cfg.ppo
    saver.observer.record_update(row, ppo.n_envs * ppo.n_steps)
    return row, metrics


def _report_or_stop(
    should_stop: StopRequest,
    on_validation: ProgressCallback,
    n_started: int,
    n_candidates: int,
    /,
) -> None:
    """Report the progress of a validation.

    Raises:
      ValidationStopped: `should_stop` says so.
    """
    if should_stop():
        raise ValidationStopped
    on_validation(n_started, n_candidates)


@contextmanager
def _saved_at_interrupt(
    update: int, run: Run, folder: Path, is_bad: bool
) -> Generator[None, None, None]:
    """Save the state before an update that a KeyboardInterrupt ends midway.

    On a CPU a step overwrites its buffers all at once, at its end. On a GPU it may have changed a part of them, so the
    last checkpoint stays; there steps are short.

    Args:
      is_bad: that state has met a number that is not finite, or it is only a part of the whole.
    """
    try:
        yield
    except KeyboardInterrupt:
        is_whole = run.run_config.device == "cpu" and not is_bad
        if is_whole and int(run.state.train_state.update) == update - 1:
            save_checkpoint(run, folder)
        raise


def _validate_and_save(
    run: Run, saver: _Saver, on_validation: ProgressCallback, monitor: Monitor
) -> Run:
    """The run after the validation that is due, whose metrics complete the pending line of the log.

    Raises:
      ValidationStopped: `on_validation` stops it.
    """
    row = dict(run.pending_row or {})
    start = time.monotonic()
    run, valid_metric = validate(run, on_validation)
    seconds = time.monotonic() - start
    row |= {
        "valid_metric": valid_metric,
        "best_valid_metric": float(run.state.best_valid_metric),
        "best_update": int(run.state.best_update),
    }
    saver.observer.record_validation(row, seconds)
    if row["update"] > 0:
        row |= monitor.report()
    saver.append(row)
    run = dataclasses.replace(run, pending_row=None)
    saver.save(run)
    return run


def _check_divergence(
    run: Run, folder: Path, update: int, n_bad_updates: int
) -> None:
    """Check that not too many updates in a row met a number that is not finite.

    Raises:
      DivergenceError: why the run ends, and what its checkpoint still holds.
    """
    if n_bad_updates < run.run_config.max_nonfinite_updates:
        return
    raise DivergenceError(
        f"{folder}: expected finite numbers, got a loss or gradient not finite in each of the {n_bad_updates} updates "
        f"up to {update}; none of them was saved, and {CHECKPOINT_FILE} holds update {saved_update(folder)}"
    )
