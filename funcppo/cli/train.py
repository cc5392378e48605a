"""`funcppo train`: train a prover on a knowledge graph."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias

from funcppo.cli.common import (
    JsonObject,
    OutputFolder,
    Screen,
    WorkDisplay,
    check_outputs,
    data_files,
    defer_interrupt,
    describe_task,
    graphs_allowed,
    lock_folder,
    make_console,
    memory_limit,
    metrics_exported,
    metrics_table,
    print_interrupted,
    print_table,
    resolve_device,
    select_device,
    set_caches,
    set_threads,
    tell_others,
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
from funcppo.core.host import NO_DEADLINE, Deadline
from funcppo.core.settings import (
    CONFIG_FILE,
    METRICS_FILE,
    PositiveFloat,
)
from funcppo.kg.config import (
    GUIDE_ENTROPY,
    RESULTS_FILE,
    RUN_FILES,
    Note,
    RunConfig,
    finish_start,
    read_config,
)
from funcppo.kg.mining import MiningConfig
from funcppo.logs import LogFn, check_loggers, take_folder
from funcppo.runtime import distributed
from funcppo.runtime.distributed import Processes

# PyTorch takes seconds to import, and --help does not wait for it.
if TYPE_CHECKING:
    from rich.console import Console

    from funcppo.kg.run.budget import RunTime
    from funcppo.kg.run.run import Run
    from funcppo.kg.run.telemetry import Exporter
    from funcppo.kg.run.train import Peers
    from funcppo.runtime.capture import CapturedStep
    from funcppo.runtime.compile import StrategyRecord
    from funcppo.runtime.monitor import Monitor
    from funcppo.train_step import Metrics, TrainState

    TrainingStep: TypeAlias = CapturedStep[TrainState, Metrics]

_DEFAULT = RunConfig(dataset="")
_MINING = MiningConfig()


@dataclass(frozen=True, kw_only=True)
class Train:
    """Learn to rank the missing links of a knowledge graph, and write the run to a folder.

    RUN receives config.json, checkpoint.npz and results.json, and metrics.jsonl (one line per update of PPO). Ctrl-C or
    SIGTERM saves a checkpoint after the current update, a second one ends at once; --resume continues bit for bit.

    Exit status: 0 trained, 2 bad input, 3 test was not ranked by what was learnt, 130 interrupted by Ctrl-C, 143 by
    SIGTERM.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "funcppo train countries_s1 --out runs/s1",
        "funcppo train graph.tsv --split-ratios 0.8,0.1,0.1 --out runs/graph --seconds 60",
    )
    FIRST_OPTIONS: ClassVar[tuple[str, ...]] = (
        *("out", "rules", "split_ratios", "columns", "seconds", "seed"),
        *("device", "resume", "overwrite"),
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
    """Where the metrics of each update go beside RUN/metrics.jsonl: csv writes RUN/metrics.csv at the end, tensorboard
    RUN/tensorboard, wandb logs to Weights & Biases (WANDB_MODE=offline: to RUN/wandb), mlflow to MLFLOW_TRACKING_URI,
    or else RUN/mlflow.db; several may be given. Default: nowhere."""
    metrics_port: MetricsPort = None
    """Serve metrics in Prometheus' format at http://127.0.0.1:PORT/metrics while the program runs. Of several processes
    the n-th of a host serves at PORT + n, from 0 on. Default: not served."""
    metrics_file: OptionalFile = None
    """Write the same metrics to FILE, every second or at the next update after it, as the textfile collector of the
    node exporter reads them. Default: no file."""
    log_compiles: bool = False
    """Print compilations, recompilations and their reasons, CUDA-graph captures and fallbacks, moved buffers and times
    (ms). Default: off."""
    json: JsonOutput = None
    """Also write the results as JSON to FILE; - writes them to standard output in place of the text. Default: only
    RUN/results.json."""
    checkpoint_every: Annotated[PositiveFloat, HIDDEN] = 60.0
    """Save a checkpoint after the update that ends this many seconds after the last one; validations save too. It does
    not change the result."""
    mining_seconds: Annotated[PositiveFloat, HIDDEN] = _MINING.seconds
    """Time limit of mining in seconds, if the data set has no rules; as --seconds of `funcppo mine`."""

    def run(self) -> int:
        """Train, evaluate on the test split, and print the results; return the exit status.

        Returns:
          The exit status.
        """
        began = time.monotonic()
        if not self.settings.dataset:
            raise ValueError(
                "DATASET: expected a data set, got none (see --help)"
            )
        set_caches(self.cache_dir)
        device = resolve_device(self.settings.device)
        settings = dataclasses.replace(self.settings, device=device)
        program = dataclasses.replace(self, settings=settings)
        return program._run_on_device(began)

    def _run_on_device(self, began: float) -> int:
        """Train on a device that is chosen; return the exit status.

        Args:
          began: when the program began, by the clock of the run.
        """
        settings = self.settings
        processes = distributed.current_processes()
        if processes is not None and not processes.is_main:
            with (
                graphs_allowed(self.cuda_graphs, settings.device),
                metrics_exported(self.metrics_port, None, "train") as exporter,
            ):
                self._assist(processes, exporter)
            return 0
        check_loggers(self.log)
        self._check_outputs()
        from funcppo.kg.run.budget import within_memory
        from funcppo.runtime.compile import check_available

        with (
            lock_folder(self.out),
            graphs_allowed(self.cuda_graphs, settings.device),
            within_memory(
                None if self.memory is None else self._memory_limit,
                settings.device,
            ),
            metrics_exported(
                self.metrics_port, self.metrics_file, "train"
            ) as exporter,
        ):
            check_available(settings.strategy, settings.device)
            status = self._run(exporter, began)
            if exporter and status == 0:
                exporter.telemetry.finish()
            return status

    @property
    def _memory_limit(self) -> int:
        """Return the bytes that the run may use."""
        return memory_limit(self.memory, self.settings.device)

    def _run(self, exporter: Exporter | None, began: float) -> int:
        """Train in a folder that no other process writes to; return the exit status."""
        from funcppo.kg.run.budget import RunTime

        settings = self.settings
        run_time = RunTime(
            settings.seconds, device=settings.device, began=began
        )
        console = make_console(self.json == "-")
        screen = Screen(console)
        set_threads(settings.threads)
        run = self._open_run(screen, run_time)
        _show_run(screen, run)
        learnt = {}
        if run.questions is None:
            run, record, interrupted_by = self._train(
                run, screen, exporter, run_time
            )
            learnt = {"strategy": dataclasses.asdict(record)}
            if interrupted_by is not None:
                self._print_interrupted(console)
                return interrupted_by
        run, results = self._rank(run, console, run_time)
        results |= {
            **learnt,
            "graphs": self.cuda_graphs,
            "total_seconds": run_time.seconds,
        }
        write_json(str(self.out / RESULTS_FILE), results)
        write_json(self.json, results)
        _show_results(screen, run, results)
        screen.print(f"done in {results['total_seconds']:.0f} s: {self.out}")
        if _is_whole(run, results):
            return 0
        screen.console.print(
            "test is ranked by rules alone: no time was left for what was learnt (--seconds)"
        )
        return 3

    def _rank(
        self, run: Run, console: Console, run_time: RunTime
    ) -> tuple[Run, JsonObject]:
        """Rank valid and test after training; return the run as it answers, and its results."""
        from funcppo.kg.run import train

        try:
            with WorkDisplay("ranking valid", console) as status:
                run_time.on_phase = status.update
                return train.rank_results(run, run_time)
        except KeyboardInterrupt:
            self._print_interrupted(console)
            raise

    def _open_run(self, screen: Screen, run_time: RunTime) -> Run:
        """Open the run, new or at its checkpoint; from then on all processes may read its files."""
        from funcppo.kg.run import train

        settings = self.settings
        has_run = self.resume and _has_run_to_resume(settings.dataset, self.out)
        config = dataclasses.replace(
            settings,
            dataset=_absolute_or_name(settings.dataset),
            rules=settings.rules and _absolute_or_name(settings.rules),
        )
        if has_run:
            train.check_continues(read_config(self.out), config, self.out)
        elif not self.overwrite:
            take_folder(self.out, self.log, RUN_FILES)
        select_device(config.device)
        with WorkDisplay("reading data", screen.console) as status:
            run_time.on_phase = tell_others(status.update)
            if self.resume and not has_run:
                new = f"{self.out}: held no run to resume: a new one"
                run_time.note(new)
                screen.add([Note("data", new)], "data")
            if has_run:
                run = train.resume(config, self.out, run_time.on_phase)
            else:
                run = train.begin(
                    config,
                    self.out,
                    run_time,
                    memory_limit=self._memory_limit,
                    mining_seconds=self.mining_seconds,
                    cache_dir=self.cache_dir,
                )
        if self.overwrite and not has_run:  # once the new run is written
            take_folder(self.out, self.log, (), overwrite=True)
        _let_others_open()
        return run

    def _train(
        self,
        run: Run,
        screen: Screen,
        exporter: Exporter | None,
        run_time: RunTime,
    ) -> tuple[Run, StrategyRecord, int | None]:
        """Train until the last update, the time limit or an interrupt.
        Return the run, the strategy record, and the exit status of an interrupt or None.

        Returns:
          The run; how its updates were made; the exit status of an interrupt, or None.
        """
        from funcppo.kg.run import train
        from funcppo.runtime.monitor import Monitor

        is_bounded = self.settings.steps is None
        deadline = run_time.part() if is_bounded else NO_DEADLINE
        with Monitor() as monitor:
            captured, record, peers = self._prepare(
                run, monitor, screen, deadline
            )
            if exporter:
                _describe_run(exporter, monitor, run, record, captured)
            with (
                self._loggers(run) as loggers,
                WorkDisplay("training", screen.console, deadline) as status,
                defer_interrupt() as interrupt,
            ):
                updates = train.train(
                    run,
                    self.out,
                    captured,
                    lambda: interrupt.requested or deadline.is_over,
                    monitor,
                    partial(tell_others(status.update), "validating"),
                    self.checkpoint_every,
                    exporter and exporter.telemetry,
                    loggers,
                    peers,
                )
                # A repeated signal ends the update or validation in progress.
                with suppress(KeyboardInterrupt):
                    for run, numbers in _watched(
                        updates,
                        monitor,
                        screen.console,
                        self.log_compiles,
                        exporter,
                    ):
                        status.update(
                            "training",
                            run.update,
                            run.n_updates,
                            note=_describe_update(run, numbers),
                        )
        run_time.end_phase("training")
        # An interrupt may have left out the last validation.
        is_whole = deadline.is_over or run.is_finished
        if interrupt.requested or not is_whole:
            return run, record, interrupt.exit_status
        return run, record, None

    def _prepare(
        self,
        run: Run,
        monitor: Monitor,
        screen: Screen,
        deadline: Deadline,
    ) -> tuple[TrainingStep, StrategyRecord, Peers | None]:
        """Compile and capture the training step by the run's strategy; return it, its record and the other processes.

        Returns:
          The step, how it is computed, and the processes that share it.
        """
        from funcppo import learner, logs
        from funcppo.kg.run import train
        from funcppo.kg.run.run import last_logged_update
        from funcppo.runtime.compile import check_available

        config = run.run_config
        if problem := check_available(config.strategy, config.device):
            screen.print(problem)
        path = self.out / METRICS_FILE
        processes = distributed.current_processes()
        peers = train.connect(processes, run) if processes else None
        with WorkDisplay("preparing the training step", screen.console):
            captured, record = train.prepare_train_step(
                run, logs.read_header(path).get("strategy"), peers, deadline
            )
        monitor.record_capture(captured)
        screen.add([Note("detail", learner.describe_strategy(record))])
        header = {**logs.run_header(record), "graphs": self.cuda_graphs}
        logs.truncate(path, last_logged_update(run), header)
        return captured, record, peers

    def _loggers(self, run: Run) -> AbstractContextManager[Sequence[LogFn]]:
        """Open the loggers that also get each line of the metrics log."""
        from funcppo import logs

        rows = logs.read(self.out / METRICS_FILE)
        settings = dataclasses.asdict(run.run_config)
        return logs.open_loggers(self.log, self.out, rows, settings)

    def _assist(self, processes: Processes, exporter: Exporter | None) -> None:
        """Make updates of this process's share of a run that rank 0 trains, and record them in the metrics."""
        from funcppo.kg.run import train
        from funcppo.kg.run.run import resume_run
        from funcppo.runtime.monitor import Monitor

        # Rank 0 has written the run, with the settings that it chose and the state to go on from.
        processes.share("run")
        config = read_config(self.out)
        set_threads(config.threads)
        select_device(config.device)
        run = resume_run(config, self.out)
        if run.questions is not None:  # rank 0 alone learns from them
            return
        peers = train.connect(processes, run)
        with defer_interrupt(), Monitor() as monitor:
            captured, record = train.prepare_train_step(run, peers=peers)
            if exporter is None:
                train.assist(captured, peers)
                return
            monitor.record_capture(captured)
            _describe_run(exporter, monitor, run, record, captured)
            telemetry = exporter.telemetry
            n_env_steps = run.cfg.ppo.n_envs * run.cfg.ppo.n_steps

            def count_update(seconds: float) -> None:
                telemetry.record_shared_update(seconds, n_env_steps)
                exporter.refresh()

            train.assist(
                captured,
                peers,
                count_update,
                telemetry.record_checkpoint,
            )
            telemetry.finish()

    def _print_interrupted(self, console: Console) -> None:
        """Print the last saved update and the command that continues from it."""
        from funcppo.kg.run.run import saved_update

        words = ("train", self.settings.dataset, "--out", self.out)
        print_interrupted(console, saved_update(self.out), *words)

    def _check_outputs(self) -> None:
        """Check the output files before any work, and that the data can be read again."""
        if self.settings.dataset == "-":
            raise ValueError(
                "DATASET -: expected a file or a name, with which the run is opened again, got standard input"
            )
        check_outputs(
            [("--json", self.json), ("--metrics-file", self.metrics_file)],
            data_files(self.settings.dataset, self.settings.rules),
            OutputFolder("--out", self.out, RUN_FILES, "dataset"),
        )

    @classmethod
    def stored_settings(cls, given: Mapping[str, Any]) -> RunConfig | None:
        """Return the settings of the run to resume, or of a guide; None without either."""
        is_resumed = given.get("resume", False)
        if is_resumed and given.get("overwrite"):
            raise ValueError("--resume, --overwrite: expected one of them")
        dataset, out = given.get("dataset", ""), given.get("out", Path())
        if is_resumed and _has_run_to_resume(dataset, out):
            return read_config(out)
        if given.get("learner") != "guide":
            return None
        ppo = dataclasses.replace(_DEFAULT.ppo, entropy_coef=GUIDE_ENTROPY)
        return dataclasses.replace(_DEFAULT, ppo=ppo)


def _has_run_to_resume(dataset: str, out: Path) -> bool:
    """Return whether --resume finds a run; without one, a named data set starts a new run.

    Raises:
      ValueError: DATASET is missing, which only a stored run can say.
    """
    finish_start(out)
    is_stored = (out / CONFIG_FILE).is_file()
    if not is_stored and not dataset:
        read_config(out)  # raises what is missing
    return is_stored


def _let_others_open() -> None:
    """Tell the other processes, if there are some, that the run may be opened."""
    processes = distributed.current_processes()
    if processes is not None:
        processes.share("run", True)


def _absolute_or_name(name: str) -> str:
    """Return the absolute path of an existing file or folder; else the name, which is that of an embedded data set."""
    path = Path(name)
    return str(path.absolute()) if path.exists() else name


# -- the updates


def _describe_run(
    exporter: Exporter,
    monitor: Monitor,
    run: Run,
    record: StrategyRecord,
    captured: TrainingStep,
) -> None:
    """Export to the metrics what runs, and by which strategy."""
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


def _describe_update(run: Run, numbers: dict[str, float]) -> str:
    """Format the mean return of an update and the best metric on valid so far."""
    from funcppo.kg.ranking.ranking import selection_metric

    note = f"return {numbers['episode_return']:.3f}"
    if len(run.task.dataset.valid):
        best = float(run.state.best_valid_metric)
        note += f"  best valid {selection_metric(run.task)} {best:.4f}"
    return note


def _watched(
    updates: Iterator[tuple[Run, dict[str, float]]],
    monitor: Monitor,
    console: Console,
    log_compiles: bool,
    exporter: Exporter | None,
) -> Iterator[tuple[Run, dict[str, float]]]:
    """Yield updates, and warn of recompilation, new captures, moved buffers and skipped minibatches.

    Args:
      log_compiles: print the monitor's counts whenever they change.
    """
    counts: JsonObject = {}
    is_first = True
    for run, numbers in updates:
        state = run.state.train_state
        assert state is not None, "the run learns from proofs"
        if is_first:
            monitor.end_warmup()
            monitor.watch_addresses(state)
        is_first = False
        n_moved = _warn(monitor, state, numbers, console)
        report = monitor.report() if log_compiles else {}
        # Times alone always change.
        now = {x: y for x, y in report.items() if not x.endswith("_ms")}
        if now != counts:
            parts = [f"{x} {_describe_count(y)}" for x, y in report.items()]
            console.print(f"compiles and graphs: {', '.join(parts)}")
            counts = now
        if exporter:
            if n_moved:
                exporter.telemetry.add("leaves_moved", n_moved)
            exporter.refresh()
        yield run, numbers


def _warn(
    monitor: Monitor,
    state: TrainState,
    numbers: dict[str, float],
    console: Console,
) -> int:
    """Print a warning for each problem of an update; return the number of buffers that have moved."""
    warnings = [monitor.warning() or ""]
    moved = monitor.moved_leaves(state)
    if moved:
        warnings.append(f"moved in memory: {', '.join(moved)}")
        monitor.watch_addresses(state)
    n_skipped = numbers["n_nonfinite_minibatches"]
    if n_skipped:
        warnings.append(
            f"{n_skipped:.0f} minibatches skipped: loss or gradient not finite"
        )
    for warning in filter(None, warnings):
        console.print(f"warning: {warning}", style="yellow")
    return len(moved)


def _describe_count(value: object) -> str:
    """Format a count, time or reason of the monitor."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return "none" if value == "" else str(value)


# -- what is printed


def _is_whole(run: Run, results: JsonObject) -> bool:
    """Return whether test, if there is one, is ranked by rules and by what was learnt."""
    from funcppo.kg.run import held_out

    rows = {*held_out.policies(run), results["rule_score"]}
    return not len(run.task.dataset.test) or rows <= set(results["test"])


def _show_run(screen: Screen, run: Run) -> None:
    """Print what the run trains on."""
    dataset = run.task.dataset
    screen.print(describe_task(run.task, run.score))
    screen.show_data(dataset)
    screen.add(run.notes, "rules")
    if not len(dataset.test):
        hint = (
            "" if dataset.is_program else " (--split-ratios holds triples out)"
        )
        screen.print(f"no test split; the test evaluation is skipped{hint}")


def _show_results(screen: Screen, run: Run, results: JsonObject) -> None:
    """Print the table of test metrics, what was left out, and what ranks answers."""
    from funcppo.kg.ranking import scoring

    notes = results["notes"]
    screen.show_cut(notes)
    screen.add(notes, "rules")
    if results["test"]:
        title = _table_title(run, results)
        row = results["answering_row"]
        table = metrics_table(title, results["test"], row)
        print_table(screen.console, table)
    replay = scoring.graph_fallback_notes(run.search_step)
    screen.add([*notes, *_closing_notes(run), *replay], "answers")


def _table_title(run: Run, results: JsonObject) -> str:
    """Format the title of the table of results: the split, the candidates and how ties count."""
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


def _closing_notes(run: Run) -> list[str]:
    """Format a note where training changed nothing."""
    if run.questions is not None or int(run.state.best_update) > 0:
        return []
    if not run.update:
        return ["no update of PPO was made: 'trained' is the untrained policy"]
    return [
        "no update of PPO ranked valid better than the untrained policy beyond chance: its parameters are kept"
    ]
