"""Train a run in a folder: validate, keep the best parameters, stop, and resume bit for bit.

`fit` makes a run from its settings to its last update, without a terminal. What it does step by step:

run = prepare_run(run_config, folder, resume=False)     # or open_run(folder) for one that exists (run_start)
run = with_training_data(run)                           # (run_build)
step, record = prepare_train_step(run)
for run, metrics in train(run, folder, step, should_stop, monitor):
    ...
evaluate_policy(run, run.state.best_params, run.task.dataset.test, protocol)     # (validation)
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from funcppo import compiled_step, logs, train_step
from funcppo.config import Config
from funcppo.core.deadline import Deadline
from funcppo.core.settings import CONFIG_FILE, METRICS_FILE, write_config
from funcppo.core.types import Bool
from funcppo.kg.run import run_build, run_start
from funcppo.kg.run.config import CHECKPOINT_FILE, RunConfig
from funcppo.kg.run.run import (
    Run,
    initial_train_state,
    last_logged_update,
    save_checkpoint,
    saved_update,
    training_world,
)
from funcppo.kg.run.validation import validate
from funcppo.kg.search import network
from funcppo.kg.search.env import World
from funcppo.kg.search.slot_scheduler import ProgressCallback, ignore_progress
from funcppo.kg.search.task import PhaseCallback, ignore_phase
from funcppo.logs import LogFn, LoggerName, check_loggers, open_loggers
from funcppo.runtime import distributed
from funcppo.runtime.capture import CapturedStep
from funcppo.runtime.compile import (
    BF16_TOLERANCE,
    DEFAULT_TOLERANCE,
    StrategyRecord,
    choices,
)
from funcppo.runtime.distributed import Processes
from funcppo.train_step import EAGER_PARTS, Metrics, TrainState

# Monitor imports Dynamo, which the evaluation of a run does without.
if TYPE_CHECKING:
    from funcppo.kg.run.telemetry import Telemetry
    from funcppo.runtime.monitor import Monitor


# -- processes that share the training of a run


@dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
    """This process among those that share the training of a run: each makes the updates of some shards.

    Rank 0 reads the data, chooses the settings, fits the weights that PPO starts from, validates, writes and prints. It
    tells the others after each update whether the state is gathered for a checkpoint, and whether another update
    follows.
    """

    group: Processes
    _decisions: count[int] = field(default_factory=count)

    def share(self, cfg: Config) -> Config:
        """The learning problem whose shards are gathered from all processes."""
        return dataclasses.replace(cfg, gather_shards=self.group.all_gather)

    def take(self, state: TrainState) -> TrainState:
        """The part of a whole state that this process works on."""
        group = self.group
        return train_step.take_shards(state, group.rank, group.world_size)

    def gather(self, state: TrainState) -> TrainState:
        """The whole state, from the part that this process works on. All processes call it."""
        update = int(state.update)
        with self.group.collective(f"gathering update {update}"):
            return train_step.gather_shards(state, self.group.all_gather)

    def step(self, captured: CapturedStep[TrainState, Metrics]) -> Metrics:
        """Make an update with the others, and wait for the device.

        A process that hangs ends the others: see `Processes.deadline`.
        """
        update = int(captured.state.update) + 1
        with self.group.collective(f"in update {update}"):
            metrics = captured.step()
            int(captured.state.update)  # waits for the device
        return metrics

    def check_agent(self, cfg: Config) -> None:
        """Check that all processes have measured the same capacity for the learning problem.

        Raises:
          ValueError: one has measured another; the message names it.
        """
        agent = cfg.update_agent
        # Not its functions: where they lie in memory differs by process.
        self.group.check_equal({"agent": agent and repr(agent.cfg)})

    def prepare(
        self,
        prepare: Callable[
            ..., tuple[CapturedStep[TrainState, Metrics], StrategyRecord]
        ],
    ) -> tuple[CapturedStep[TrainState, Metrics], StrategyRecord]:
        """Compile and capture a step with the others, which agree on each attempt, within the deadline.

        Args:
          prepare: takes the keyword `agree`.

        Raises:
          ValueError: a process has chosen another way to compute it.
        """
        group = self.group
        with group.deadline("preparing the training step"):
            captured, record = prepare(agree=group.first_failure)
            group.check_equal(choices(record))
        return captured, record

    def decide(self, decision: bool = False) -> bool:
        """What rank 0 has decided; the others give nothing.

        Raises:
          PeerError: another process has ended with an error.
          StalledError: no process made progress for too long.
        """
        number = next(self._decisions)
        return self.group.share(f"decision/{number}", decision)


def connect(processes: Processes, run: Run) -> Peers:
    """Connect the processes, which have opened the same run.

    Raises:
      ValueError: data, settings, threads or kinds of GPU differ; the message names the rank.
    """
    facts = {
        "data": run.task.dataset.fingerprint,
        "settings": repr(run.run_config),
        "threads": torch.get_num_threads(),
        **distributed.gpu_facts(run.run_config.device),
    }
    return Peers(group=distributed.connect(processes, facts))


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


# -- the training step


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

    With strategy auto, a run too short to repay compilation is not compiled.

    Args:
      earlier: the record of the strategy of a run that is resumed, as a dictionary. What was measured then is not
        measured again: another time would give another strategy, and other bits.
      peers: the processes that share the shards of the run, each of which calls this. None: this one is alone.
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
    prepare = partial(
        compiled_step.prepare_step,
        cfg,
        world,
        state,
        EAGER_PARTS,
        run_config.strategy,
        BF16_TOLERANCE if is_rounded else DEFAULT_TOLERANCE,
        deadline=None if earlier or int(state.update) else deadline,
        uncompiled_seconds=earlier.get("uncompiled_seconds"),
        decide=peers.decide if peers else bool,
    )
    return peers.prepare(prepare) if peers else prepare()


def with_capacity(cfg: Config, world: World, state: TrainState) -> Config:
    """The config with a capacity for minibatches, if that spares the network half of the successor slots or more.

    Most goals have far fewer successors than a goal may have. A few rollout steps are measured, and the network of the
    update has a capacity, as a mixture of experts has one for each expert. Rows of a minibatch that exceed the capacity
    are left out of its loss and counted, as `LossMetrics.dropped_fraction`.

    Args:
      cfg: a learning problem of the prover.
      world: what it reads.
      state: the first training state of the run, also when the run is resumed: the capacity is then the same.
    """
    # With the oracle, successors have no goals, and every rule is embedded once for the whole batch.
    if cfg.env.cfg.fact_selection == "oracle":
        return cfg

    ppo = cfg.ppo
    # of one forward pass: a shard's share of a microbatch
    n_rows = ppo.n_envs * ppo.n_steps // ppo.n_minibatches
    n_rows //= ppo.n_microbatches * ppo.n_shards
    successor_mask = _profile_successors(cfg, world, state)
    n_slots = successor_mask.shape[1]
    n_successors = successor_mask.sum(1).double()

    # Totals of independent rows: the mean grows with their number, the standard deviation with its root. A quarter is
    # added to the mean, because the distribution of states shifts during training.
    expected_total = 1.25 * float(n_successors.mean()) * n_rows
    deviation = float(n_successors.std(correction=0))
    margin = 4.0 * deviation * math.sqrt(n_rows)

    # A single row must fit in any case.
    capacity = max(n_slots, math.ceil(expected_total + margin))
    if 2 * capacity > n_rows * n_slots:
        return cfg
    network_config = dataclasses.replace(cfg.agent.cfg, capacity=capacity)
    return dataclasses.replace(cfg, update_agent=network.agent(network_config))


def _profile_successors(
    cfg: Config, world: World, state: TrainState
) -> Bool[Tensor, "N S"]:
    """Which successor slots are filled, in the states of a few rollout steps."""
    ppo = dataclasses.replace(
        cfg.ppo,
        n_steps=min(8, cfg.ppo.n_steps),
        n_minibatches=1,
        n_microbatches=1,
    )
    profile = train_step.collect(
        dataclasses.replace(cfg, ppo=ppo), world, state
    )
    batches = cast(Any, profile.batch)
    if ppo.n_shards == 1:
        batches = (batches,)
    return torch.cat([batch.obs.action_mask[:, :-1] for batch in batches])


# -- the loop over updates


class ValidationStopped(Exception):
    """A validation was asked to stop before its end."""


class DivergenceError(ValueError):
    """A run whose loss or gradient stays infinite or not a number."""


def train(
    run: Run,
    folder: Path,
    captured: CapturedStep[TrainState, Metrics],
    should_stop: Callable[[], bool],
    monitor: Monitor,
    on_validation: ProgressCallback = ignore_progress,
    checkpoint_seconds: float = compiled_step.CHECKPOINT_SECONDS,
    observer: Telemetry | None = None,
    loggers: Sequence[LogFn] = (),
    peers: Peers | None = None,
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
      peers: the processes that share the shards, of which rank 0 calls this and the others `assist`; None: this one is
        alone.

    Raises:
      DivergenceError: `max_nonfinite_updates` updates in a row met a number that is not finite. None of these is saved.
    """
    n_bad_updates = 0  # consecutive updates with a number that is not finite
    loop = _Loop(
        folder=folder,
        captured=captured,
        monitor=monitor,
        should_stop=should_stop,
        on_validation=on_validation,
        checkpoint_seconds=checkpoint_seconds,
        observer=observer,
        loggers=loggers,
        peers=peers,
    )
    loop.gather()
    with suppress(ValidationStopped):
        pending = run.pending_row
        run = loop.begin(run)
        if pending is not None and is_finished(run):
            yield run, pending

        n_made = int(run.state.train_state.update)
        for update in range(n_made + 1, run.cfg.ppo.n_updates + 1):
            if stopped_early(run):
                break
            loop.decide(True)
            with loop.saved_at_interrupt(update, run, n_bad_updates > 0):
                row, metrics = loop.step(update, run)
            stopping = should_stop()
            n_bad_updates = (
                n_bad_updates + 1 if metrics["n_nonfinite_minibatches"] else 0
            )
            run = loop.record_update(
                run, row, stopping=stopping, is_bad=n_bad_updates > 0
            )

            yield run, metrics
            _check_divergence(run, folder, update, n_bad_updates)
            if stopping or run.pending_row is not None:
                break
    loop.decide(False)


@dataclass(kw_only=True)
class _Loop:
    """What the updates of a training share: where a run is written, and with whom it is computed."""

    folder: Path
    captured: CapturedStep[TrainState, Metrics]
    monitor: Monitor
    should_stop: Callable[[], bool]
    on_validation: ProgressCallback
    checkpoint_seconds: float
    observer: Telemetry | None
    loggers: Sequence[LogFn]
    peers: Peers | None
    # of all processes; None where the run's own is whole
    whole_state: TrainState | None = None
    saved_at: float = field(default_factory=time.monotonic)

    def decide(self, decision: bool) -> bool:
        """The decision itself, which the other processes are told."""
        return self.peers.decide(decision) if self.peers else decision

    def gather(self) -> None:
        """Gather the whole state from all processes."""
        if self.peers:
            self.whole_state = self.peers.gather(self.captured.state)

    def begin(self, run: Run) -> Run:
        """The run with its state in the step's buffers, its metrics log as it was, and no validation due.

        Raises:
          ValidationStopped: a validation was due, and was stopped.
        """
        logs.truncate(self.folder / METRICS_FILE, last_logged_update(run))
        state = run.state._replace(train_state=self.captured.state)
        run = dataclasses.replace(run, state=state)
        return run if run.pending_row is None else self._validate(run)

    def step(self, update: int, run: Run) -> tuple[logs.Row, dict[str, float]]:
        """Make one update; its line of the metrics log, and its metrics alone."""
        start = time.perf_counter()
        with self.monitor.timer("replay"):
            device_metrics = (
                self.peers.step(self.captured)
                if self.peers
                else self.captured.step()
            )
        metrics = logs.to_scalars(device_metrics)  # waits for the device
        seconds = time.perf_counter() - start
        row = {"update": update, "seconds": seconds} | metrics
        if self.observer:
            ppo = run.cfg.ppo
            self.observer.record_update(row, ppo.n_envs * ppo.n_steps)
        return row, metrics

    def record_update(
        self, run: Run, row: logs.Row, *, stopping: bool, is_bad: bool
    ) -> Run:
        """The run after an update, logged, and validated and saved if that is due; pending where that is stopped.

        Args:
          row: the metrics of the update.
          is_bad: it met a number that is not finite; then it is neither validated nor saved.
        """
        age = time.monotonic() - self.saved_at
        saves = (stopping or age >= self.checkpoint_seconds) and not is_bad
        validates = _is_validation_due(run, int(row["update"])) and not is_bad
        if self.decide(validates or saves):
            self.gather()
        if not validates:
            self._append(row)
            if saves:
                self._save(run)
            return run
        run = dataclasses.replace(run, pending_row=row)
        self._save(run)
        try:
            return self._validate(run)
        except ValidationStopped:
            return run

    @contextmanager
    def saved_at_interrupt(
        self, update: int, run: Run, is_bad: bool
    ) -> Generator[None, None, None]:
        """Save the state before an update that a KeyboardInterrupt ends midway.

        On a CPU a step overwrites its buffers all at once, at its end. On a GPU it may have changed a part of them, so
        the last checkpoint stays; there steps are short.

        Args:
          is_bad: that state has met a number that is not finite.
        """
        try:
            yield
        except KeyboardInterrupt:
            is_whole = run.run_config.device == "cpu" and not is_bad
            is_whole = is_whole and self.whole_state is None
            if is_whole and int(run.state.train_state.update) == update - 1:
                save_checkpoint(run, self.folder)
            raise

    def _validate(self, run: Run) -> Run:
        """The run after the validation that is due, whose metrics complete the pending line of the log.

        Raises:
          ValidationStopped: it was stopped.
        """
        row = dict(run.pending_row or {})
        start = time.monotonic()
        run, valid_metric = validate(run, self._report_or_stop)
        seconds = time.monotonic() - start
        row |= {
            "valid_metric": valid_metric,
            "best_valid_metric": float(run.state.best_valid_metric),
            "best_update": int(run.state.best_update),
        }
        if self.observer:
            self.observer.record_validation(row, seconds)
        if row["update"] > 0:
            row |= self.monitor.report()
        self._append(row)
        run = dataclasses.replace(run, pending_row=None)
        self._save(run)
        return run

    def _report_or_stop(self, n_started: int, n_candidates: int, /) -> None:
        """Report the progress of a validation, or raise `ValidationStopped`."""
        if self.should_stop():
            raise ValidationStopped
        self.on_validation(n_started, n_candidates)

    def _append(self, row: logs.Row) -> None:
        """Add a line to the metrics log, and log it."""
        logs.append(self.folder / METRICS_FILE, row)
        for log in self.loggers:
            log(row)

    def _save(self, run: Run) -> None:
        """Write a checkpoint, and begin the time until the next one anew."""
        start = time.monotonic()
        if self.whole_state is not None:
            state = run.state._replace(train_state=self.whole_state)
            run = dataclasses.replace(run, state=state)
        save_checkpoint(run, self.folder)
        self.saved_at = time.monotonic()
        if self.observer:
            self.observer.record_checkpoint(
                self.saved_at - start, self.folder / CHECKPOINT_FILE
            )


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


PROFILE_STEPS = 8  # rollout steps that are measured
# capacity over measured successors: the distribution of states shifts during training
CAPACITY_FACTOR = 1.25
# standard deviations of a minibatch's total that are added to the mean
CAPACITY_MARGIN_DEVIATIONS = 4.0


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


# -- a whole run


def check_new_folder(folder: Path) -> None:
    """Check that a folder holds no run.

    Raises:
      ValueError: it does.
    """
    if (folder / CONFIG_FILE).exists():
        raise ValueError(
            f"{folder}: holds a run already: expected another folder"
        )


def fit(
    run_config: RunConfig,
    folder: Path,
    on_phase: PhaseCallback = ignore_phase,
    on_update: Callable[[int, dict[str, float]], object] = lambda *_: None,
    log: Sequence[LoggerName] = (),
    memory_limit: int | None = None,
) -> Run:
    """Train a new run to its last update.

    An interrupt ends it with a checkpoint, which `funcppo train --resume` continues from.

    Args:
      run_config: the settings; those of the prover that are open are chosen on the valid split.
      folder: receives config.json, metrics.jsonl and checkpoint.npz; created if it is missing.
      on_phase: receives what is being done before the first update.
      on_update: receives the number and the metrics of each update.
      log: where the lines of metrics.jsonl go too: csv, tensorboard, wandb.
      memory_limit: of the parts in which the run computes, in bytes; None for no limit.

    Returns:
      The run with the parameters that rank valid best.

    Raises:
      ValueError: bad data or settings, the folder holds a run, a package of `log` is missing, or torchrun started
        several processes.
    """
    # It imports Dynamo, which the evaluation of a run does without.
    from funcppo.runtime.monitor import Monitor

    n_processes = distributed.launched_size()
    if n_processes > 1:
        raise ValueError(
            f"fit: expected one process, got {n_processes} of torchrun, which would write into one folder"
        )
    check_new_folder(folder)
    check_loggers(log)
    run = run_start.prepare_run(
        run_config,
        folder,
        resume=False,
        on_phase=on_phase,
        memory_limit=memory_limit,
    )
    folder.mkdir(parents=True, exist_ok=True)
    # A folder with a config is a run, so the config comes last.
    save_checkpoint(run, folder)
    write_config(run.run_config, folder)

    run = run_build.with_training_data(run, on_phase)
    settings = dataclasses.asdict(run.run_config)
    with (
        Monitor() as monitor,
        open_loggers(log, folder, (), settings) as loggers,
    ):
        captured, _ = prepare_train_step(run)
        monitor.record_capture(captured)
        updates = train(
            run, folder, captured, lambda: False, monitor, loggers=loggers
        )
        for run, metrics in updates:
            on_update(int(run.state.train_state.update), metrics)
    return run
