"""Train a run in a folder: begin it, make its updates where it learns from proofs, stop and resume it, and rank test.

`train_run` makes a run from its settings to its last update, without a terminal. What it does step by step:

run = begin(run_config, folder, run_time)     # or resume(run_config, folder) for one that exists
step, record = prepare_train_step(run)        # where the run learns from proofs
for run, metrics in train(run, folder, step, should_stop, monitor):
    ...
run, results = rank_results(run, run_time)
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from funcppo import learner, logs, train_step
from funcppo.config import Config
from funcppo.core import files, tree
from funcppo.core.files import Json
from funcppo.core.host import NO_DEADLINE, Deadline
from funcppo.core.settings import (
    METRICS_FILE,
    check_resumed,
    write_config,
)
from funcppo.core.types import Bool
from funcppo.kg.config import (
    CHECKPOINT_FILE,
    MINED_RULES_FILE,
    RESULTS_FILE,
    RUN_FILES,
    START_FOLDER,
    Note,
    RunConfig,
    finish_start,
    read_config,
)
from funcppo.kg.graph import loaders
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.mining import MiningConfig
from funcppo.kg.run import budget, choices, fit, held_out, rule_files
from funcppo.kg.run.budget import Choice, RunTime
from funcppo.kg.run.choices import (
    Candidate,
    Stage,
    choose,
    describe_choice,
    is_better,
)
from funcppo.kg.run.run import (
    Run,
    RunState,
    init_train_state,
    last_logged_update,
    repair_checkpoint,
    resume_run,
    save_checkpoint,
    saved_update,
    with_valid_evidence,
    write_graph,
)
from funcppo.kg.run.subject import describe_default_score
from funcppo.kg.search import network
from funcppo.kg.search import task as prover_task
from funcppo.kg.search.beam import ProgressCallback, ignore_progress
from funcppo.kg.search.env import World
from funcppo.kg.search.task import PhaseCallback, ignore_phase
from funcppo.logs import (
    LogFn,
    LoggerName,
    check_loggers,
    open_loggers,
    take_folder,
)
from funcppo.runtime import distributed
from funcppo.runtime.capture import CapturedStep, ReasonCode
from funcppo.runtime.compile import (
    BF16_TOLERANCE,
    DEFAULT_TOLERANCE,
    StrategyRecord,
)
from funcppo.runtime.compile import choices as strategy_choices
from funcppo.runtime.distributed import Processes
from funcppo.train_step import EAGER_PARTS, Metrics, TrainState

# Monitor imports Dynamo, which the evaluation of a run does without.
if TYPE_CHECKING:
    from funcppo.kg.run.telemetry import Telemetry
    from funcppo.runtime.monitor import Monitor


# -- a validation

# What follows mining and ranks a few queries without learning takes about as many times as long as reading
# (FB15k-237, CoDEx-S).
UNTRAINED_WORK = 5.0


def validate(
    run: Run, on_progress: ProgressCallback = ignore_progress
) -> tuple[Run, float | None]:
    """Rank the valid queries, and keep the current parameters as the best if they rank better beyond chance.

    The first validation, and every one without valid queries, keeps the current parameters.

    Args:
      run: at the parameters to validate.
      on_progress: called several times a second; what it raises ends the validation.

    Returns:
      The run, and the metric of the current parameters on valid; None without valid queries.
    """
    state = run.state
    assert state.train_state is not None, "the run learns from proofs"
    if not len(run.task.dataset.valid):
        return replace(
            run, state=_with_best(run, state.best_valid_metric)
        ), None

    began = time.monotonic()
    params = state.train_state.params
    if run.task.is_guide:
        ranks = held_out.rank_guide(run, params)
        value = float(ranks.mean())
    else:
        ranked = held_out.rank_valid(run, params, on_progress)
        ranks = fit.reciprocal_ranks(ranked)
        value = held_out.metric_of(run, ranked)
    metric = torch.full_like(state.best_valid_metric, value)
    is_first = float(state.best_valid_metric) < 0
    if is_first or is_better(ranks, state.best_ranks):
        best = _with_best(run, metric)._replace(best_ranks=ranks)
        run = replace(run, state=best)
    seconds = time.monotonic() - began
    row = _with_row(run, float(ranks.mean()), seconds)
    return row, float(metric)


def _with_best(run: Run, metric: Tensor) -> RunState:
    """Return the state with the current parameters as the best."""
    trained = run.state.train_state
    assert trained is not None, "the run learns from proofs"
    # Clones, because the next update overwrites the leaves of the training state.
    return run.state._replace(
        best_params=tree.map(torch.clone, trained.params),
        best_valid_metric=metric,
        best_update=trained.update.clone(),
    )


def _with_row(run: Run, metric: float, seconds: float) -> Run:
    """Return the run with another validation in the row of PPO in the table of choices."""
    *others, last = run.choices or (None,)
    row = last
    if row is None or row.stage != "PPO":
        others = list(run.choices)
        row = Choice("PPO", valid_before=metric)
    best_update = int(run.state.best_update)
    row = row._replace(
        chosen=f"update {best_update}",
        is_kept=best_update > 0,
        seconds=row.seconds + seconds,
        valid_after=float(run.state.best_ranks.mean()),
        tried=row.tried | {f"update {run.update}": metric},
    )
    return replace(run, choices=(*others, row))


# -- processes that share the training of a run


@dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
    """This process among those that share the training of a run; each makes the updates of some shards.

    Rank 0 reads the data, chooses the settings, fits the weights that PPO starts from, validates, writes and prints. It
    tells the others after each update whether the state is gathered for a checkpoint, and whether another update
    follows.
    """

    group: Processes
    _decisions: count[int] = field(default_factory=count)

    def gather(self, state: TrainState) -> TrainState:
        """Gather the whole state from the parts of all processes, each of which calls this."""
        update = int(state.update)
        with self.group.collective(f"gathering update {update}"):
            return train_step.gather_shards(state, self.group.all_gather)

    def step(self, captured: CapturedStep[TrainState, Metrics]) -> Metrics:
        """Make an update with the other processes, and wait for the device.

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

    def decide(self, decision: bool = False) -> bool:
        """Return rank 0's decision; the argument of every other rank is ignored.

        Raises:
          PeerError: another process has ended with an error.
          StalledError: no process made progress for too long.
        """
        number = next(self._decisions)
        return self.group.share(f"decision/{number}", decision)


def connect(processes: Processes, run: Run) -> Peers:
    """Connect the processes, all of which have opened the same run; return this process's `Peers`.

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


def prepare_train_step(
    run: Run,
    earlier: Json | None = None,
    peers: Peers | None = None,
    deadline: Deadline = NO_DEADLINE,
) -> tuple[CapturedStep[TrainState, Metrics], StrategyRecord]:
    """Compile or capture the training step of a run, starting from its state.

    With strategy auto, a run too short to repay compilation is not compiled.

    Args:
      earlier: the record of the strategy of a run that is resumed, as a dictionary. Auto decides as it did then:
        another strategy would give other bits.
      peers: the processes that share the shards of the run, each of which calls this. None: this one is alone.
      deadline: when training ends, whatever updates are left.

    Returns:
      The step, and the record of the strategy that it uses and why.

    Raises:
      Exception: whatever a strategy raises that was set by name and fails.
    """
    run_config = run.run_config
    # before anything is compiled: code for another precision is other code
    torch.set_float32_matmul_precision(
        "high" if run_config.precision == "high" else "highest"
    )
    world = prover_task.training_world(run.task)

    # The capacity depends on the first state of the run, so that a resumed run has the same.
    cfg, state = run.cfg, run.state.train_state
    assert state is not None, "the run learns from proofs"
    first = init_train_state(run_config, cfg, world)
    cfg = with_capacity(cfg, world, first)
    if peers is not None:
        group = peers.group
        peers.check_agent(cfg)
        cfg = replace(cfg, gather_shards=group.all_gather)
        state = train_step.take_shards(state, group.rank, group.world_size)
    is_rounded = run_config.precision == "bfloat16"

    def decide(repays: bool) -> bool:
        if earlier is not None:
            codes = [failure["code"] for failure in earlier["failures"]]
            repays = ReasonCode.SHORT_RUN not in codes
        return peers.decide(repays) if peers else repays

    prepare = partial(
        learner.prepare_step,
        cfg,
        world,
        state,
        EAGER_PARTS,
        run_config.strategy,
        BF16_TOLERANCE if is_rounded else DEFAULT_TOLERANCE,
        deadline=deadline,
        decide=decide,
    )
    if peers is None:
        return prepare()
    # The processes agree on each attempt, within the deadline.
    with peers.group.deadline("preparing the training step"):
        captured, record = prepare(agree=peers.group.first_failure)
        peers.group.check_equal(strategy_choices(record))
    return captured, record


def with_capacity(cfg: Config, world: World, state: TrainState) -> Config:
    """Return the config with a capacity for minibatches, if that spares the network half of the successor slots.

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
    network_config = replace(cfg.agent.cfg, capacity=capacity)
    return replace(cfg, update_agent=network.agent(network_config))


def _profile_successors(
    cfg: Config, world: World, state: TrainState
) -> Bool[Tensor, "N S"]:
    """Return which successor slots are filled in the states of a few rollout steps."""
    ppo = replace(
        cfg.ppo,
        n_steps=min(8, cfg.ppo.n_steps),
        n_minibatches=1,
        n_microbatches=1,
    )
    profile = train_step.collect(replace(cfg, ppo=ppo), world, state)
    batches = cast(Any, profile.batch)
    if ppo.n_shards == 1:
        batches = (batches,)
    return torch.cat([batch.obs.action_mask[:, :-1] for batch in batches])


# -- the loop over updates


class ValidationStopped(Exception):
    """Raised where a validation is asked to stop before its end."""


class DivergenceError(ValueError):
    """Raised where the loss or gradient of a run stays infinite or not a number."""


def train(
    run: Run,
    folder: Path,
    captured: CapturedStep[TrainState, Metrics],
    should_stop: Callable[[], bool],
    monitor: Monitor,
    on_validation: ProgressCallback = ignore_progress,
    checkpoint_seconds: float = learner.CHECKPOINT_SECONDS,
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
        if pending is not None and run.is_finished:
            yield run, pending

        for update in range(run.update + 1, run.n_updates + 1):
            if run.stopped_early:
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
            if n_bad_updates >= run.run_config.max_nonfinite_updates:
                raise DivergenceError(
                    f"{folder}: expected finite numbers, got a loss or gradient not finite in each of the "
                    f"{n_bad_updates} updates up to {update}; none of them was saved, and {CHECKPOINT_FILE} holds "
                    f"update {saved_update(folder)}"
                )
            if stopping or run.pending_row is not None:
                break
    loop.decide(False)


@dataclass(kw_only=True)
class _Loop:
    """State that the updates of a training share: files, callbacks, and the other processes."""

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
        """Tell the other processes a decision, and return it."""
        return self.peers.decide(decision) if self.peers else decision

    def gather(self) -> None:
        """Gather the whole state from all processes; nothing to do for one process."""
        if self.peers:
            self.whole_state = self.peers.gather(self.captured.state)

    def begin(self, run: Run) -> Run:
        """Return the run on the step's buffers, with its log cut to the checkpoint and any pending validation done.

        Raises:
          ValidationStopped: a validation was due, and was stopped.
        """
        logs.truncate(self.folder / METRICS_FILE, last_logged_update(run))
        state = run.state._replace(train_state=self.captured.state)
        run = replace(run, state=state)
        return run if run.pending_row is None else self._validate(run)

    def step(self, update: int, run: Run) -> tuple[logs.Row, dict[str, float]]:
        """Make one update; return its line of the metrics log, and its metrics alone."""
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
        """Log an update, and validate and save the run if that is due; the row stays pending if validation is stopped.

        Args:
          row: the metrics of the update.
          is_bad: it met a number that is not finite; then it is neither validated nor saved.
        """
        age = time.monotonic() - self.saved_at
        saves = (stopping or age >= self.checkpoint_seconds) and not is_bad
        update = int(row["update"])
        is_due = (
            update == run.n_updates or update % run.validation_interval == 0
        )
        validates = is_due and not is_bad

        if self.decide(validates or saves):
            self.gather()
        if not validates:
            self._append(row)
            if saves:
                self._save(run)
            return run
        run = replace(run, pending_row=row)
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
            if is_whole and run.update == update - 1:
                save_checkpoint(run, self.folder)
            raise

    def _validate(self, run: Run) -> Run:
        """Make the validation that is due, and complete the pending line of the log with its metrics.

        Raises:
          ValidationStopped: it was stopped.
        """

        def report_or_stop(n_started: int, n_candidates: int, /) -> None:
            if self.should_stop():
                raise ValidationStopped
            self.on_validation(n_started, n_candidates)

        row = dict(run.pending_row or {})
        start = time.monotonic()
        run, valid_metric = validate(run, report_or_stop)
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
        run = replace(run, pending_row=None)
        self._save(run)
        return run

    def _append(self, row: logs.Row) -> None:
        """Append a line to the metrics log, and pass it to the loggers."""
        logs.append(self.folder / METRICS_FILE, row)
        for log in self.loggers:
            log(row)

    def _save(self, run: Run) -> None:
        """Write a checkpoint, and restart the time until the next checkpoint."""
        start = time.monotonic()
        if self.whole_state is not None:
            state = run.state._replace(train_state=self.whole_state)
            run = replace(run, state=state)
        save_checkpoint(run, self.folder)
        self.saved_at = time.monotonic()
        if self.observer:
            self.observer.record_checkpoint(
                self.saved_at - start, self.folder / CHECKPOINT_FILE
            )


# -- begin a run in its folder, which the caller has locked


def begin(
    config: RunConfig,
    out: Path,
    run_time: RunTime,
    *,
    memory_limit: int | None = None,
    mining_seconds: float | None = None,
    cache_dir: Path | None = None,
    dataset: Dataset | None = None,
    rules_file: Path | None = None,
) -> Run:
    """Start a run: write its config and checkpoint to the folder, and remove the files of an earlier run.

    Args:
      config: its settings, with absolute paths.
      out: its folder.
      run_time: gets notes on what was chosen.
      memory_limit: bytes that it may take; None for no limit.
      mining_seconds: time limit of mining, where no rules are set and the data set has none; None for the default. It
        has at most a share of the run's time.
      cache_dir: where mined rules are kept; None for the default.
      dataset: triples and rules; None to read those that the settings name.
      rules_file: the rules of the data set, which the folder keeps; None for those that the settings name.

    Raises:
      ValueError: a setting does not fit, or the facts support no rule.
    """
    _check_shards(config)
    config = budget.with_device(config)
    if dataset is None:
        run_time.on_phase("reading data")
        dataset = loaders.load(config.dataset, config.rules, cfg=config.data)
        run_time.end_phase("reading")
    if config.rules is None and not len(dataset.rules):
        cfg = rule_files.mining_config(dataset)
        most = choices.MINING_SHARE * (config.seconds or math.inf)
        seconds = min(mining_seconds or cfg.seconds, most)
        cfg = replace(cfg, seconds=seconds)
        if memory_limit is not None:
            rule_files.check_memory(
                dataset, memory_limit, config.device, cfg.max_length
            )
        rules_file = _mine(dataset, cfg, config, run_time, cache_dir)
        dataset = loaders.with_rule_file(dataset, rules_file)
    if rules_file is not None:
        config = replace(config, rules=str(rules_file))

    run = choices.start_run(config, dataset, run_time, memory_limit)
    run = _with_details(run, _remove_stale_parts(out))
    if rules_file is not None:
        config = replace(run.run_config, rules=MINED_RULES_FILE)
        run = replace(run, run_config=config)
    _write_start(run, out, rules_file)
    return run


def _mine(
    dataset: Dataset,
    cfg: MiningConfig,
    config: RunConfig,
    run_time: RunTime,
    cache_dir: Path | None,
) -> Path:
    """Return the file of the rules that are mined for a run.

    Args:
      config: settings of the run.

    Raises:
      ValueError: the facts support no rule.
    """

    def show_mining(stage: str, done: float, total: float) -> None:
        text = f"mining rules: {stage}"
        run_time.on_phase(text, round(done), round(total) or None)

    reading = run_time.phases.get("reading", 0.0)
    left = run_time.part().seconds_left - UNTRAINED_WORK * reading
    file = rule_files.get_or_mine_rules(
        dataset,
        cfg,
        config.device,
        show_mining,
        cache_dir,
        max(choices.MINING_SHARE * left, 1e-3),
    )
    run_time.end_phase("mining")
    run_time.notes.append(Note("rules", file.message))
    run_time.notes += [Note("detail", note) for note in file.notes]
    return file.path


def resume(
    given: RunConfig, out: Path, on_phase: PhaseCallback = ignore_phase
) -> Run:
    """Open the run in a folder at its checkpoint, to continue it with the given steps and time.

    Args:
      given: the settings, of which the steps may be more and the time other than in the folder.

    Raises:
      ValueError: other settings differ, or the steps are fewer.
    """
    stored = read_config(out)
    config = check_continues(stored, given, out)
    _check_shards(config)
    damage_notes = repair_checkpoint(out)
    run = with_valid_evidence(resume_run(config, out, on_phase))
    notes = [*damage_notes, *_remove_stale_parts(out)]
    if run.questions is None:
        # The metrics log ends where the checkpoint does; what learns from questions has none.
        notes += logs.truncate(out / METRICS_FILE, last_logged_update(run))
    is_extended = (config.steps or 0) > (stored.steps or 0)
    if is_extended:
        notes.append(
            f"extended after update {run.update} from {stored.steps:,} to {config.steps:,} "
            "steps: schedules and validations span the new total"
        )
    run = _with_details(run, notes)

    # Results of fewer steps are no longer those of the run.
    if is_extended:
        save_checkpoint(run, out)
        write_config(run.run_config, out)
        (out / RESULTS_FILE).unlink(missing_ok=True)
    return run


def check_continues(
    stored: RunConfig, given: RunConfig, out: Path
) -> RunConfig:
    """Return the stored settings with the steps and time of the command line, the only settings that may differ.

    Raises:
      ValueError: another differs, or the steps are fewer.
    """
    check_resumed(stored, given, out, ("steps", "seconds", "ppo.n_updates"))
    return replace(stored, steps=given.steps, seconds=given.seconds)


def _check_shards(config: RunConfig) -> None:
    """Raise ValueError if several processes cannot share the shards of the run."""
    n, n_shards = max(1, distributed.launched_size()), config.ppo.n_shards
    if n_shards % n:
        raise ValueError(
            f"--set ppo.n_shards: expected a multiple of the {n} processes, got {n_shards}"
        )


def _write_start(run: Run, out: Path, rules_file: Path | None) -> None:
    """Write the files of a new run; they replace those of an earlier run at once, when all of them are written.

    Args:
      rules_file: to copy into the folder; None if there is none.
    """
    with tempfile.TemporaryDirectory(
        dir=out, prefix="start-", suffix=".part"
    ) as name:
        folder = Path(name)
        if rules_file is not None:
            with files.named_errors(out / MINED_RULES_FILE):
                shutil.copyfile(rules_file, folder / MINED_RULES_FILE)
        write_graph(run.task, folder)
        save_checkpoint(run, folder)
        write_config(run.run_config, folder)

        # One rename replaces the earlier run: a process that is killed before it loses nothing, and after it the next
        # one that reads the folder moves the files.
        finish_start(out)
        folder.replace(out / START_FOLDER)
        files.sync_folder(out)
    finish_start(out)


def _remove_stale_parts(out: Path) -> list[str]:
    """Remove half-written files that killed processes left in the folder; return a note for each."""
    names = files.remove_stale_parts(out, RUN_FILES)
    for path in sorted(out.glob("start-*.part")):
        shutil.rmtree(path)
        names.append(path.name)
    return [f"removed {name}, left by a killed process" for name in names]


def _with_details(run: Run, texts: Sequence[str]) -> Run:
    """Return the run with more notes for results.json and a verbose screen."""
    notes = [Note("detail", text) for text in texts]
    return replace(run, notes=(*run.notes, *notes))


def train_run(
    run_config: RunConfig,
    folder: Path,
    on_phase: PhaseCallback = ignore_phase,
    on_update: Callable[[int, dict[str, float]], object] = lambda *_: None,
    log: Sequence[LoggerName] = (),
    memory_limit: int | None = None,
    dataset: Dataset | None = None,
    rules_file: Path | None = None,
) -> Run:
    """Train a new run to its last update; return it.

    An interrupt ends it with a checkpoint, which `funcppo train --resume` continues from.

    Args:
      run_config: the settings; those of the prover that are open are chosen on the valid split.
      folder: receives config.json, metrics.jsonl and checkpoint.npz; created if it is missing.
      on_phase: receives what is being done before the first update.
      on_update: receives the number and the metrics of each update.
      log: where the lines of metrics.jsonl go too: csv, tensorboard, wandb, mlflow.
      memory_limit: of the parts in which the run computes, in bytes; None for no limit.
      dataset: triples and rules; None to read those that the settings name.
      rules_file: see `begin`.

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
    check_loggers(log)
    take_folder(folder, log, RUN_FILES)
    folder.mkdir(parents=True, exist_ok=True)
    run_time = RunTime(run_config.seconds, on_phase=on_phase)
    run = begin(
        run_config,
        folder,
        run_time,
        memory_limit=memory_limit,
        dataset=dataset,
        rules_file=rules_file,
    )
    if run.questions is not None:
        return run
    settings = dataclasses.asdict(run.run_config)
    with (
        Monitor() as monitor,
        open_loggers(log, folder, (), settings) as loggers,
    ):
        captured, record = prepare_train_step(run)
        logs.truncate(folder / METRICS_FILE, -1, logs.run_header(record))
        monitor.record_capture(captured)
        deadline = NO_DEADLINE if run_config.steps else run_time.part()
        updates = train(
            run,
            folder,
            captured,
            lambda: deadline.is_over,
            monitor,
            loggers=loggers,
        )
        for run, metrics in updates:
            on_update(run.update, metrics)
    return run


# -- the end of a run


def rank_results(run: Run, run_time: RunTime) -> tuple[Run, Json]:
    """Rank test; return the run with its choice of score, and the contents of results.json without the total time."""
    training_seconds = run_time.seconds
    # What was chosen at the start is in the run.
    run_time.choices, run_time.notes = [], []
    run = _compare_with_rules(run, run_time)
    task, config = run.task, run.run_config
    _note_end(run, run_time)

    n_all = len(task.dataset.test)
    test = run.ranked_test or held_out.TestRanking(held_out.rule_rows(run))
    if n_all:
        writing = run_time.end.share(0.9)
        test.rank_by_all(run, writing, run_time.on_phase)
    run_time.end_phase("ranking of test")
    if test.n_queries < n_all:
        run_time.note_cut(
            f"test: the metrics are those of a random sample, {test.n_queries:,} of {n_all:,} queries: all would take "
            "too long (--seconds; `funcppo evaluate` ranks all)"
        )
    metrics = test.metrics(run)
    chosen = [*run.choices, *run_time.choices]
    has_valid = len(task.dataset.valid) > 0
    return run, {
        "dataset": config.dataset,
        "rules": len(task.dataset.rules),
        "height": task.max_height,
        "learner": config.learner,
        "score": run.score,
        "default_score": run.default_score,
        "default_score_reason": run.default_score_reason,
        "rule_score": config.rule_score,
        "rule_valid_metric": run.rule_metric,
        "seed": config.seed,
        "steps": run.update * config.ppo.n_envs * config.ppo.n_steps,
        "stopped_early": run.stopped_early,
        "best_update": int(run.state.best_update),
        "best_valid_metric": float(run.state.best_valid_metric)
        if has_valid
        else None,
        "choices": [choice._asdict() for choice in chosen],
        "test": metrics,
        "answering_row": held_out.answering_row(run),
        "n_test_queries": test.n_queries,
        "test_is_sample": test.n_queries < n_all,
        "seconds_limit": config.seconds,
        "seconds": training_seconds,
        "phase_seconds": run_time.phases,
        "phase_peak_bytes": run_time.peak_bytes,
        "notes": [
            *run.notes,
            *(Note("detail", describe_choice(choice)) for choice in chosen),
            *run_time.notes,
        ],
        "versions": logs.package_versions(),
        "device": config.device,
    }


def _compare_with_rules(run: Run, run_time: RunTime) -> Run:
    """Return the run with whether what PPO has learnt ranks valid better than rules beyond chance, with its row."""
    ranks = run.state.best_ranks
    ranked = None
    if run.questions is None and len(ranks):
        ranked = held_out.rank_valid_by_rules(run)
    if ranked is None:
        return run
    rules = Candidate(
        run.run_config.rule_score, False, fit.reciprocal_ranks(ranked)
    )
    learnt = Candidate(run.score, True, ranks)
    stage = Stage("what ranks answers", lambda *_: [learnt])
    best = choose(stage, rules, run_time)
    return replace(run, is_learnt_better=best.value)


def _note_end(run: Run, run_time: RunTime) -> None:
    """Add notes on how the run ended, and the choice of the score that ranks answers."""
    update, n_updates = run.update, run.n_updates
    if not run.is_finished:
        run_time.note_cut(
            f"the time of the run (--seconds) ended training after update {update} of {n_updates}; --resume continues"
        )
    if run.stopped_early:
        run_time.note(
            f"stopped early after update {update} of {n_updates}: none of the last "
            f"{run.run_config.early_stop_validations} validations was better than that of update "
            f"{int(run.state.best_update)} (early_stop_validations)"
        )

    if run.rule_metric is not None:
        run_time.notes.append(Note("answers", describe_default_score(run)))
