"""`funcppo train`: train a prover on a knowledge graph."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from funcppo.cli.common import (
    Interrupt,
    JsonObject,
    WorkDisplay,
    check_overwrites,
    data_files,
    debug_files,
    debug_mode,
    defer_interrupt,
    graphs_allowed,
    lock_folder,
    make_console,
    memory_limit,
    metrics_exported,
    metrics_table,
    print_notes,
    print_table,
    select_device,
    set_caches,
    set_threads,
    write_json,
)
from funcppo.cli.options import (
    HIDDEN,
    CacheFolder,
    CudaGraphs,
    JsonOutput,
    LoggerNames,
    MemoryOption,
    MetricsPort,
    Opt,
    OptionalFile,
)
from funcppo.core.deadline import NO_DEADLINE, Deadline
from funcppo.core.settings import (
    CONFIG_FILE,
    METRICS_FILE,
    PositiveFloat,
)
from funcppo.kg.mining.config import MiningConfig
from funcppo.kg.run.config import (
    MINED_RULES_FILE,
    RESULTS_FILE,
    RUN_FILES,
    Note,
    RunConfig,
    read_config,
    read_settings,
)
from funcppo.logs import check_loggers, open_loggers
from funcppo.runtime import distributed
from funcppo.runtime.distributed import Processes

# PyTorch takes seconds to import, and --help does not wait for it.
if TYPE_CHECKING:
    from rich.console import Console

    from funcppo.kg.logic.proof import Proof
    from funcppo.kg.run.budget import RunTime
    from funcppo.kg.run.run import Run
    from funcppo.kg.run.telemetry import Exporter
    from funcppo.kg.run.training import Peers
    from funcppo.kg.search.task import PhaseCallback
    from funcppo.runtime.capture import CapturedStep
    from funcppo.runtime.compile import StrategyRecord
    from funcppo.runtime.monitor import Monitor
    from funcppo.train_step import Metrics, TrainState

MAX_PROOF_QUERIES = 20  # queries that are searched for a proof to print
_DEFAULT = RunConfig(dataset="")
_MINING = MiningConfig()


class _TrainingResult(NamedTuple):
    """Where training ended."""

    run: Run
    is_finished: bool  # False after an interrupt
    exit_status: int  # of the interrupt
    strategy: StrategyRecord


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a prover on a knowledge graph with PPO and write the run to a folder.

    RUN receives config.json, metrics.jsonl (one line per update), checkpoint.npz and results.json. Ctrl-C or
    SIGTERM saves a checkpoint after the current update, a second one ends at once; --resume continues bit for bit.

    Exit status: 0 trained, 2 bad input, 130 interrupted by Ctrl-C, 143 by SIGTERM.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "funcppo train countries_s1 --out runs/s1",
        "funcppo train graph.tsv --split-ratios 0.8,0.1,0.1 --out runs/graph --seconds 60",
    )
    FIRST_OPTIONS: ClassVar[tuple[str, ...]] = (
        *("out", "rules", "split_ratios", "columns", "seconds", "seed"),
        *("device", "resume", "overwrite", "verbose"),
    )

    settings: Annotated[
        RunConfig,
        Opt(
            shown=(
                *("dataset", "rules", "data.columns", "data.split_ratios"),
                *("steps", "seconds", "seed", "device", "threads"),
                *("strategy", "precision", "learner"),
            )
        ),
    ] = _DEFAULT
    """Settings of the run."""
    out: Annotated[Path, Opt("RUN")]
    """Folder that the run is written to; created if it is missing."""
    config: OptionalFile = None
    """Read settings from FILE: the config.json of a run, or YAML with the same names, some or all of them. The command
    line wins. Default: no file."""
    resume: bool = False
    """Continue from the checkpoint in RUN with the settings in its config.json; only --steps and --seconds may be given
    another value. Default: off."""
    overwrite: bool = False
    """Start a new run in a folder that already holds one, replacing its files. Default: off."""
    memory: MemoryOption = None
    """Memory limit of this process, or of the GPU: a number of bytes or with a unit, such as 2GB or 512MiB. All phases
    plan the parts in which they compute within it. A process that is about to exceed a limit that is set ends with an
    error and keeps its last checkpoint. Default: three quarters of what is free."""
    cuda_graphs: CudaGraphs = "auto"
    """Replay the training step, and the search of validations, as CUDA graphs on a GPU. auto: where they can be
    recorded; off: never, to rule them out; manual: always, and it is an error where one cannot be recorded."""
    cache_dir: CacheFolder = None
    """Folder for compiled code and mined rules, reused by later runs. Default:
    $XDG_CACHE_HOME/funcppo."""
    log: LoggerNames = ()
    """Where the metrics of each update go beside RUN/metrics.jsonl: csv writes RUN/metrics.csv, tensorboard
    RUN/tensorboard, wandb logs to Weights & Biases (WANDB_MODE=offline: to RUN/wandb); several may be given. Default:
    nowhere."""
    metrics_port: MetricsPort = None
    """Serve metrics in Prometheus' format at http://127.0.0.1:PORT/metrics while the program runs. Of several processes
    the n-th of a host serves at PORT + n, from 0 on. Default: not served."""
    metrics_file: OptionalFile = None
    """Write the same metrics to FILE, every second or at the next update after it, as the textfile collector of the
    node exporter reads them. Default: no file."""
    debug: bool = False
    """Run as a bug report needs it: compile and record nothing, wait for each kernel, use deterministic algorithms,
    print tracebacks, and say what to attach. It does not change the settings of the run. Default: off."""
    log_compiles: bool = False
    """Print compilations, recompilations and their reasons, CUDA-graph captures and fallbacks, moved buffers and times
    (ms). Default: off."""
    json: JsonOutput = None
    """Also write the results as JSON to FILE; - writes them to standard output in place of the text. Default: only
    RUN/results.json."""
    verbose: Annotated[bool, Opt(short="-v")] = False
    """Print every note on what was chosen, left out or estimated; results.json has them all. Default: off."""
    quiet: Annotated[bool, Opt(short="-q")] = False
    """Print the table of results alone. Default: off."""
    checkpoint_every: Annotated[PositiveFloat, HIDDEN] = 60.0
    """Save a checkpoint after the update that ends this many seconds after the last one; validations save too. It does
    not change the result."""
    mining_seconds: Annotated[PositiveFloat, HIDDEN] = _MINING.seconds
    """Time limit of mining in seconds, if the data set has no rules; as --seconds of `funcppo mine`."""

    def run(self) -> int:
        """Train, evaluate on the test split, and print the results.

        Returns:
          The exit status.
        """
        if not self.settings.dataset:
            raise ValueError(
                "DATASET: expected a data set, got none (see --help)"
            )
        set_caches(self.cache_dir)
        processes = distributed.current_processes()
        if processes is not None and not processes.is_main:
            with (
                graphs_allowed(self.cuda_graphs, self.settings.device),
                metrics_exported(self.metrics_port, None, "train") as exporter,
            ):
                return self._assist(processes, exporter)
        check_loggers(self.log)
        self._check_outputs()
        with (
            lock_folder(self.out),
            debug_mode(self.debug, debug_files(self.out)),
            graphs_allowed(self.cuda_graphs, self.settings.device),
            self._memory_limited(),
            metrics_exported(
                self.metrics_port, self.metrics_file, "train"
            ) as exporter,
        ):
            self._check_strategy()
            status = self._run(exporter)
            if exporter and status == 0:
                exporter.telemetry.finish()
            return status

    def _check_strategy(self) -> None:
        """Check that the strategy is not refused, before any work; --debug uses none."""
        from funcppo.runtime.compile import check_available

        if not self.debug:
            check_available(self.settings.strategy)

    @property
    def _memory_limit(self) -> int:
        """The bytes that the run may take."""
        return memory_limit(self.memory, self.settings.device)

    @contextmanager
    def _memory_limited(self) -> Iterator[None]:
        """Let the process allocate no more than --memory meanwhile, where that is set."""
        from funcppo.kg.run import budget

        limit = None if self.memory is None else self._memory_limit
        with budget.within_memory(limit, self.settings.device):
            yield

    def _run(self, exporter: Exporter | None) -> int:
        """Train in a folder that no other process writes to; the exit status."""
        from funcppo.kg.run import run_build
        from funcppo.kg.run.budget import RunTime

        start = time.perf_counter()
        run_time = RunTime(self.settings.seconds, device=self.settings.device)
        screen = _Screen(
            make_console(self.json == "-"), self.verbose, self.quiet
        )
        set_threads(self.settings.threads)
        run = self._open_run(screen, run_time)
        screen.show_run(run)
        with WorkDisplay("listing questions", screen.console) as status:
            run = run_build.with_training_data(run, status.update)

        trained = self._train(run, screen, exporter, run_time)
        if not trained.is_finished:
            self._print_interrupted(screen.console)
            return trained.exit_status

        run, results = self._rank(trained, start, screen, run_time)
        results |= {
            "strategy": dataclasses.asdict(trained.strategy),
            "graphs": self.cuda_graphs,
            "total_seconds": time.perf_counter() - start,
        }
        write_json(str(self.out / RESULTS_FILE), results)
        write_json(self.json, results)
        screen.show_results(run, results)
        if self.verbose:
            with WorkDisplay("looking for a proof to print", screen.console):
                screen.show_proof(run, run_time.until(run_time.TEST))
        screen.print(f"done in {results['total_seconds']:.0f} s: {self.out}")
        return 0

    def _rank(
        self,
        trained: _TrainingResult,
        start: float,
        screen: _Screen,
        run_time: RunTime,
    ) -> tuple[Run, JsonObject]:
        """The run as it answers, and its results; the run began at a time of the performance counter."""
        from funcppo.kg.run import finish

        training_seconds = time.perf_counter() - start
        try:
            with WorkDisplay("ranking valid", screen.console) as status:
                return finish.rank_results(
                    trained.run, training_seconds, run_time, status.update
                )
        except KeyboardInterrupt:
            self._print_interrupted(screen.console)
            raise

    def _open_run(self, screen: _Screen, run_time: RunTime) -> Run:
        """The run, new or at its checkpoint, whose files all processes may read from now on."""
        from funcppo.kg.run.begin import Begin, check_continues

        settings = self.settings
        seconds = self.mining_seconds
        if settings.seconds is not None:
            seconds = min(seconds, run_time.MINING * settings.seconds)
        has_run = self.resume and _has_run_to_resume(settings.dataset, self.out)
        config = dataclasses.replace(
            settings,
            dataset=absolute_or_name(settings.dataset),
            rules=settings.rules and absolute_or_name(settings.rules),
        )
        if has_run:
            check_continues(read_config(self.out), config, self.out)
        select_device(config.device)
        with WorkDisplay("reading data", screen.console) as status:
            begin = Begin(
                config=config,
                out=self.out,
                memory_limit=self._memory_limit,
                mining_seconds=seconds,
                cache_dir=self.cache_dir,
                on_phase=_tell_others(status.update),
                on_notes=screen.add,
            )
            if has_run:
                run = begin.resume()
            else:
                run = begin.start(
                    run_time,
                    overwrite=self.overwrite,
                    was_resumed=self.resume,
                )
        processes = distributed.current_processes()
        if processes is not None:
            processes.share("run", True)
        return run

    def _assist(self, processes: Processes, exporter: Exporter | None) -> int:
        """Make updates of a part of the run that rank 0 trains; the exit status."""
        from funcppo.kg.run import run_build, run_start, training
        from funcppo.runtime.monitor import Monitor

        # Rank 0 has written the run, with the settings that it chose and the state to go on from.
        processes.share("run")
        config = read_config(self.out)
        set_threads(config.threads)
        select_device(config.device)
        training.set_matmul_precision(config)
        run = run_start.prepare_run(config, self.out, resume=True)
        run = run_build.with_training_data(run, for_validation=False)
        peers = training.connect(processes, run)
        with defer_interrupt(), Monitor() as monitor:
            captured, record = training.prepare_train_step(run, peers=peers)
            if exporter is None:
                training.assist(captured, peers)
                return 0
            monitor.record_capture(captured)
            _describe_run(exporter, monitor, run, record, captured)
            _assist_counted(exporter, run, captured, peers)
        return 0

    def _print_interrupted(self, console: Console) -> None:
        """Print what the checkpoint holds, and how to continue from it."""
        from funcppo.kg.run.run import saved_update

        words = (
            "funcppo",
            "train",
            self.settings.dataset,
            "--out",
            str(self.out),
        )
        command = f"{shlex.join(words)} --resume"
        console.print(
            f"interrupted after update {saved_update(self.out)}; `{command}` continues"
        )

    def _check_outputs(self) -> None:
        """Check the files to write, before any work. Mined rules are written only where no rules are read."""
        run_files = [
            ("--out", self.out / name)
            for name in RUN_FILES
            if name != MINED_RULES_FILE
        ]
        outputs = [
            *run_files,
            ("--json", self.json),
            ("--metrics-file", self.metrics_file),
        ]
        check_overwrites(
            outputs, data_files(self.settings.dataset, self.settings.rules)
        )

    @classmethod
    def stored_settings(cls, given: Mapping[str, Any]) -> RunConfig | None:
        """The settings of the run to resume or of --config; None without them."""
        is_resumed, config = given.get("resume", False), given.get("config")
        if is_resumed and (given.get("overwrite") or config):
            other = "--config" if config else "--overwrite"
            raise ValueError(f"--resume, {other}: expected one of them")
        dataset, out = given.get("dataset", ""), given.get("out", Path())
        if is_resumed and _has_run_to_resume(dataset, out):
            return read_config(out)
        if config is None:
            return None
        base = dataclasses.replace(_DEFAULT, dataset=dataset)
        return read_settings(Path(config), base)

    def _train(
        self,
        run: Run,
        screen: _Screen,
        exporter: Exporter | None,
        run_time: RunTime,
    ) -> _TrainingResult:
        """Train until the last update, the end of the time or an interrupt; these take effect after an update."""
        from funcppo import logs
        from funcppo.kg.run import training
        from funcppo.runtime.monitor import Monitor

        training.set_matmul_precision(run.run_config)
        is_bounded = self.settings.steps is None
        deadline = run_time.until(run_time.PPO) if is_bounded else NO_DEADLINE
        with Monitor() as monitor:
            log = logs.read_header(self.out / METRICS_FILE)
            captured, record, peers = _prepare_train_step(
                _with_eager_strategy(run) if self.debug else run,
                monitor,
                screen,
                log.get("strategy"),
                deadline,
            )
            _write_header(run, self.out, record, self.cuda_graphs)
            if exporter:
                _describe_run(exporter, monitor, run, record, captured)
            logger = _CompileLogger(
                monitor, screen.console, self.log_compiles, exporter
            )

            rows = logs.read(self.out / METRICS_FILE)
            settings = dataclasses.asdict(run.run_config)
            with (
                open_loggers(self.log, self.out, rows, settings) as loggers,
                WorkDisplay("training", screen.console, deadline) as status,
                defer_interrupt() as interrupt,
            ):
                updates = training.train(
                    run,
                    self.out,
                    captured,
                    lambda: interrupt.requested or deadline.is_over,
                    monitor,
                    partial(_tell_others(status.update), "validating"),
                    self.checkpoint_every,
                    exporter and exporter.telemetry,
                    loggers,
                    peers,
                )
                # A repeated signal ends the update or validation in progress.
                with suppress(KeyboardInterrupt):
                    for run, numbers in updates:
                        logger.report_changes(run.state.train_state, numbers)
                        update = int(run.state.train_state.update)
                        status.update(
                            "training",
                            update,
                            run.cfg.ppo.n_updates,
                            note=_training_note(run, numbers),
                        )
        run_time.end_phase("training", is_set=not is_bounded)
        return _end_training(run, interrupt, deadline.is_over, record)


def _has_run_to_resume(dataset: str, out: Path) -> bool:
    """Whether --resume finds a run; a supervisor gives it from the start, and a run that was ended before its first
    files begins again.

    Raises:
      ValueError: DATASET is missing, which only a stored run can say.
    """
    is_stored = (out / CONFIG_FILE).is_file()
    if not is_stored and not dataset:
        read_config(out)  # raises what is missing
    return is_stored


def _with_eager_strategy(run: Run) -> Run:
    """The run with nothing to compile, whatever strategy it is trained by."""
    config = dataclasses.replace(run.run_config, strategy="eager")
    return dataclasses.replace(run, run_config=config)


def _tell_others(on_phase: PhaseCallback) -> PhaseCallback:
    """The callback, which also tells the processes that wait, if there are some, how far this one is."""
    processes = distributed.current_processes()
    if processes is None:
        return on_phase

    def tell(
        text: str,
        done: int = 0,
        total: int | None = None,
        deadline: Deadline = NO_DEADLINE,
        /,
    ) -> None:
        processes.report(f"{text} {done} of {total}" if total else text)
        on_phase(text, done, total, deadline)

    return tell


def _end_training(
    run: Run,
    interrupt: Interrupt,
    is_over: bool,
    record: StrategyRecord,
) -> _TrainingResult:
    """Where training ended.

    Args:
      is_over: its time is.
    """
    from funcppo.kg.run import finish, training

    # An interrupt may have left out the last validation.
    is_finished = is_over or training.is_finished(run)
    is_finished = is_finished and not interrupt.requested
    if is_finished:
        run = finish.with_late_note(run)
    return _TrainingResult(run, is_finished, interrupt.exit_status, record)


def _assist_counted(
    exporter: Exporter,
    run: Run,
    captured: CapturedStep[TrainState, Metrics],
    peers: Peers,
) -> None:
    """Make the updates of this process's shards; the metrics record them."""
    from funcppo.kg.run import training

    telemetry = exporter.telemetry
    n_env_steps = run.cfg.ppo.n_envs * run.cfg.ppo.n_steps

    def count_update(seconds: float) -> None:
        telemetry.record_shared_update(seconds, n_env_steps)
        exporter.refresh()

    training.assist(
        captured, peers, count_update, telemetry.record_shared_checkpoint
    )
    telemetry.finish()


def _describe_run(
    exporter: Exporter,
    monitor: Monitor,
    run: Run,
    record: StrategyRecord,
    captured: CapturedStep[TrainState, Metrics],
) -> None:
    """Tell the metrics what runs, and how."""
    exporter.monitor = monitor
    telemetry = exporter.telemetry
    telemetry.describe(
        "run",
        program="train",
        dataset=run.task.dataset.name,
        device=record.device,
        strategy=record.strategy,
        replay=record.replay_mode,
        precision=run.run_config.precision,
    )
    telemetry.record_strategy(record, captured)
    exporter.refresh(at_once=True)


def _training_note(run: Run, numbers: dict[str, float]) -> str:
    """The mean return of an update, and the best metric on valid so far."""
    from funcppo.kg.ranking.ranking import selection_metric

    note = f"return {numbers['episode_return']:.3f}"
    if len(run.task.dataset.valid):
        best = float(run.state.best_valid_metric)
        note += f"  best valid {selection_metric(run.task)} {best:.4f}"
    return note


def _write_header(
    run: Run, folder: Path, record: StrategyRecord, graphs: CudaGraphs
) -> None:
    """Write to the first line of the metrics log how the updates after it are computed."""
    from funcppo import logs
    from funcppo.kg.run.run import last_logged_update

    header = {**logs.run_header(record), "graphs": graphs}
    logs.truncate(folder / METRICS_FILE, last_logged_update(run), header)


def absolute_or_name(name: str) -> str:
    """Return the absolute path of a file or folder that exists, or else the name itself: that of an embedded set."""
    path = Path(name)
    return str(path.absolute()) if path.exists() else name


def _prepare_train_step(
    run: Run,
    monitor: Monitor,
    screen: _Screen,
    earlier: JsonObject | None,
    deadline: Deadline,
) -> tuple[CapturedStep[TrainState, Metrics], StrategyRecord, Peers | None]:
    """Compile and capture the training step as the run's strategy asks for, or as was measured at its start.

    Returns:
      The step, how it is computed, and the processes that share it.
    """
    from funcppo import compiled_step
    from funcppo.kg.run import training

    processes = distributed.current_processes()
    peers = training.connect(processes, run) if processes else None
    with WorkDisplay("preparing the training step", screen.console):
        captured, record = training.prepare_train_step(
            run, earlier, peers, deadline
        )
    monitor.record_capture(captured)
    strategy = compiled_step.describe_strategy(record)
    screen.add([Note("detail", strategy)])
    return captured, record, peers


class _CompileLogger:
    """Prints once if the training step is compiled or captured again; all that the monitor counts, with --log-compiles.

    Attributes:
      log_compiles: whether to print the monitor's counts whenever they change.
      counts: the monitor's counts when they were last printed.
    """

    def __init__(
        self,
        monitor: Monitor,
        console: Console,
        log_compiles: bool,
        exporter: Exporter | None = None,
    ) -> None:
        self.monitor = monitor
        self.exporter = exporter
        self.console = console
        self.log_compiles = log_compiles
        self.counts: JsonObject = {}
        self.is_first_update = True

    def report_changes(
        self, state: TrainState, numbers: dict[str, float]
    ) -> None:
        """Print what has changed since the last update.

        Args:
          state: the training state after an update.
          numbers: metrics of the update.
        """
        if self.is_first_update:
            self.is_first_update = False
            self.monitor.end_warmup()
            self.monitor.watch_addresses(state)
        self._print_warnings(state, numbers)
        if self.log_compiles:
            self._print_counts()
        if self.exporter:
            self.exporter.refresh()

    def _print_warnings(
        self, state: TrainState, numbers: dict[str, float]
    ) -> None:
        """Print warnings on compilations, buffers that have moved, and minibatches that were skipped."""
        warnings = []
        recompilation = self.monitor.warning()
        if recompilation:
            warnings.append(recompilation)

        moved = self.monitor.moved_leaves(state)
        if moved:
            warnings.append(f"moved in memory: {', '.join(moved)}")
            self.monitor.watch_addresses(state)
            if self.exporter:
                self.exporter.telemetry.record_moved_leaves(len(moved))

        n_skipped = numbers["n_nonfinite_minibatches"]
        if n_skipped:
            warnings.append(
                f"{n_skipped:.0f} minibatches skipped: loss or gradient not finite"
            )
        for warning in warnings:
            self.console.print(f"warning: {warning}", style="yellow")

    def _print_counts(self) -> None:
        """Print the monitor's report if a count has changed; times alone always change."""
        report = self.monitor.report()
        counts = {
            name: value
            for name, value in report.items()
            if not name.endswith("_ms")
        }
        if counts == self.counts:
            return
        self.counts = counts
        text = ", ".join(
            f"{name} {_format_value(value)}" for name, value in report.items()
        )
        self.console.print(f"compiles and graphs: {text}")


def _format_value(value: object) -> str:
    """A count, time or reason of the monitor as text."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return "none" if value == "" else str(value)


class _Screen:
    """What a run prints: six lines at most beside its table; all notes with --verbose, the table alone with --quiet."""

    def __init__(
        self, console: Console, is_verbose: bool, is_quiet: bool
    ) -> None:
        self.console = console
        self._is_verbose = is_verbose
        self._is_quiet = is_quiet
        self._told: list[str] = []

    def print(self, line: str) -> None:
        """Print a line, unless the table alone is wanted."""
        if not self._is_quiet:
            self.console.print(line)

    def add(self, notes: Sequence[str]) -> None:
        """Print notes that were not printed yet: all of them, or those on rules."""
        for note in notes:
            is_shown = self._is_verbose or _kind(note) == "rules"
            if note in self._told or not is_shown:
                continue
            self._told.append(note)
            if self._is_verbose:
                print_notes([note], self.console)
            else:
                self.print(note)

    def show_run(self, run: Run) -> None:
        """Print what the run trains on."""
        dataset = run.task.dataset
        self.print(
            f"{dataset.name}: {dataset.n_constants:,} entities, {dataset.n_predicates:,} relations, "
            f"{len(dataset.train):,} train / {len(dataset.valid):,} valid / {len(dataset.test):,} test, "
            f"{len(dataset.rules):,} rules, height {run.task.max_height}, score {run.score}"
        )
        self.add(run.notes)
        if not len(dataset.test):
            hint = " (--split-ratios holds triples out)"
            note = "no test split; the test evaluation is skipped"
            self.print(note + ("" if dataset.is_program else hint))

    def show_results(self, run: Run, results: JsonObject) -> None:
        """Print the table of test metrics, what was left out, and what ranks answers."""
        from funcppo.kg.ranking import policy_score
        from funcppo.kg.run import finish

        cut = [note for note in results["notes"] if _kind(note) == "cut"]
        if cut and not self._is_verbose:
            more = f" (and {len(cut) - 1} more: -v)" if len(cut) > 1 else ""
            self.print(f"left out: {cut[0]}{more}")
        self.add(results["notes"])
        if results["test"]:
            table = metrics_table(
                _table_title(run, results),
                results["test"],
                finish.default_row(run),
            )
            print_table(self.console, table)
        if self._is_verbose:
            print_notes(_closing_notes(run, results), self.console)
            replay = policy_score.graph_fallback_notes(run.search_step)
            print_notes(replay, self.console)
            return
        for note in results["notes"]:
            if _kind(note) == "answers":
                self.print(note)

    def show_proof(self, run: Run, deadline: Deadline) -> None:
        """Print the longest of the most probable proofs of the first queries, of those that there is time for."""
        from funcppo.kg.graph.rules import proof_names
        from funcppo.kg.logic import proof

        longest, n_searched = _longest_proof(run, deadline)
        if longest is None:
            line = f"none of the first {n_searched} queries has a proof"
            self.console.print(line, style="dim")
            return
        names = proof_names(run.task.dataset)
        text = proof.to_text(longest, names.format_atom, names.format_rule)
        self.console.print("a proof:")
        self.console.print(text)


def _kind(note: str) -> str:
    """What a note is about; notes of files that say nothing of it are details."""
    return note.kind if isinstance(note, Note) else "detail"


def _table_title(run: Run, results: JsonObject) -> str:
    """What the table of results ranks."""
    candidates = "filtered, all entities, both sides"
    if run.task.is_countries:
        candidates = "tails among the five regions"
    split = "test"
    if results["test_is_sample"]:
        last = list(results["test"].values())[-1]
        low, high = last.get("mrr_interval", [0.0, 1.0])
        split = (
            f"random sample of test: {results['n_test_queries']:,} queries, 95 % interval of the last MRR "
            f"{low:.4f} to {high:.4f}"
        )
    return f"{split} ({candidates}, expected ties)"


def _closing_notes(run: Run, results: JsonObject) -> list[str]:
    """Notes on negatives and on what training changed."""
    notes: list[str] = []
    rate = results["false_negative_rate"]
    if rate is not None:
        notes.append(
            f"false-negative rate of provable negatives: {rate:.1%} (true in valid or test)"
        )
    if int(run.state.best_update) == 0:
        start = "the untrained policy"
        if run.questions:
            start = "the weights that it started from"
        notes.append(
            f"no update of PPO ranked valid better than {start}, whose parameters are kept"
            if int(run.state.train_state.update)
            else f"no update of PPO was made: 'trained' is {start}"
        )
    return notes


def _longest_proof(run: Run, deadline: Deadline) -> tuple[Proof | None, int]:
    """The longest of the most probable proofs of the first queries, or None; and how many queries were searched."""
    import torch

    from funcppo.kg.answers import most_probable_proof
    from funcppo.kg.ranking import explain

    dataset = run.task.dataset
    split = dataset.test if len(dataset.test) else dataset.train
    program = explain.build_program(run.task)
    longest: Proof | None = None
    n_searched = 0
    for row in split[:MAX_PROOF_QUERIES]:
        if n_searched and deadline.is_over:
            break
        n_searched += 1
        candidate = most_probable_proof(
            run, torch.from_numpy(row).long(), program
        )
        if candidate is None:
            continue
        if longest is None or len(candidate.nodes) > len(longest.nodes):
            longest = candidate
    return longest, n_searched
