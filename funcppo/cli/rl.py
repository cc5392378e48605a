"""`funcppo rl`: train a policy on an environment by its name."""

from __future__ import annotations

import dataclasses
import tempfile
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from funcppo.cli.common import (
    JsonObject,
    OutputFolder,
    WorkDisplay,
    check_outputs,
    defer_interrupt,
    graphs_allowed,
    is_verbose,
    lock_folder,
    make_console,
    make_table,
    print_interrupted,
    print_notes,
    print_table,
    select_device,
    set_threads,
    write_json,
)
from funcppo.cli.options import (
    CudaGraphs,
    JsonOutput,
    LoggerNames,
    Opt,
)
from funcppo.core.files import remove_stale_parts
from funcppo.core.settings import (
    CONFIG_FILE,
    METRICS_FILE,
    check_resumed,
    iter_differences,
    write_config,
)
from funcppo.kg.config import (
    CHECKPOINT_FILE,
    PREVIOUS_CHECKPOINT_FILE,
    RESULTS_FILE,
)
from funcppo.logs import LoggerName, check_loggers, take_folder
from funcppo.rl import (
    GSDE_DEFAULTS,
    RLConfig,
    published_settings,
    read_config,
)

# PyTorch takes seconds to import, and --help does not wait for it.
if TYPE_CHECKING:
    from rich.console import Console

    from funcppo.learner import Learner
    from funcppo.trainer import Evaluations, Progress

RUN_FILES = (
    CONFIG_FILE,
    METRICS_FILE,
    RESULTS_FILE,
    CHECKPOINT_FILE,
    PREVIOUS_CHECKPOINT_FILE,
)


def published_config(env: str) -> RLConfig:
    """Build the settings of a run from those published for its environment."""
    published = published_settings(env or "CartPole-v1")
    names = [field.name for field in dataclasses.fields(published)]
    return RLConfig(env=env, **{x: getattr(published, x) for x in names})


_DEFAULT = published_config("")


@dataclass(frozen=True, kw_only=True)
class Rl:
    """Train a policy on an environment with PPO and published settings, for several seeds at once.

    Settings that are not given are those published for the environment; their source is printed. RUN receives
    config.json, metrics.jsonl (a line for each update and seed), checkpoint.npz and results.json. Ctrl-C or SIGTERM
    saves a checkpoint after the current update, a second one ends at once; --resume continues bit for bit.

    Exit status: 0 trained, 2 bad input, 130 interrupted by Ctrl-C, 143 by SIGTERM.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "funcppo rl CartPole-v1 --out runs/cartpole",
        "funcppo rl MinAtar/Breakout-v1 --seeds 5 --set ppo.learning_rate=1e-3",
    )

    settings: Annotated[
        RLConfig,
        Opt(shown=("env", "seeds", "seed", "steps", "device", "strategy")),
    ] = _DEFAULT
    """Settings of the run. What is published for ENV comes before the defaults shown here."""
    out: Annotated[Path | None, Opt("RUN")] = None
    """Folder that the run is written to; created if it is missing. Default: nothing is kept."""
    cuda_graphs: CudaGraphs = "auto"
    """Replay the training step as a CUDA graph on a GPU. auto: where it can be recorded; off: never; manual: always,
    and it is an error where it cannot be recorded."""
    resume: bool = False
    """Continue from the checkpoint in RUN with the settings in its config.json; only --steps may be given another
    value, a greater one, where no schedule ends with the run. Default: off."""
    overwrite: bool = False
    """Start a new run in a folder that already holds one, replacing its files. Default: off."""
    log: LoggerNames = ()
    """Where the metrics of each update go beside RUN/metrics.jsonl, as means over seeds: csv writes RUN/metrics.csv at
    the end, tensorboard RUN/tensorboard, wandb logs to Weights & Biases (WANDB_MODE=offline: to RUN/wandb), mlflow to
    MLFLOW_TRACKING_URI, or else RUN/mlflow.db; several may be given. Default: nowhere."""
    json: JsonOutput = None
    """Also write the results as JSON to FILE; - writes them to standard output in place of the text. Default: only
    RUN/results.json."""

    @classmethod
    def stored_settings(cls, given: Mapping[str, Any]) -> RLConfig:
        """Return the settings of the run to resume, or else those published for the environment."""
        if not given.get("resume"):
            return published_config(given.get("env", ""))
        if given.get("overwrite"):
            raise ValueError("--resume, --overwrite: expected one of them")
        if given.get("out") is None:
            raise ValueError("--resume: expected --out RUN too, got none")
        return read_config(given["out"])

    def run(self) -> int:
        """Train and print the returns; return the exit status."""
        if not self.settings.env:
            raise ValueError(
                "ENV: expected an environment, got none (see --help)"
            )
        self._check_options()
        with tempfile.TemporaryDirectory(prefix="funcppo-rl-") as nowhere:
            folder = self.out or Path(nowhere)
            device = self.settings.device
            with lock_folder(folder), graphs_allowed(self.cuda_graphs, device):
                return self._run(folder)

    def _check_options(self) -> None:
        """Raise ValueError for options that exclude each other or would have no effect."""
        # A run of wandb is kept elsewhere.
        files = [name for name in self.log if name != "wandb"]
        if files and self.out is None:
            raise ValueError(
                f"--log {files[0]}: expected --out RUN too, got none"
            )
        check_loggers(self.log)
        folder = None
        if self.out is not None:
            folder = OutputFolder("--out", self.out, RUN_FILES, "env")
        check_outputs([("--json", self.json)], (), folder)

    def _run(self, folder: Path) -> int:
        """Train in a folder that no other process writes to; return the exit status."""
        from funcppo import rl
        from funcppo.runtime.compile import check_available

        start = time.perf_counter()
        problem = check_available(self.settings.strategy, self.settings.device)
        console = make_console(self.json == "-")
        set_threads(self.settings.threads)
        select_device(self.settings.device)
        config = self._config()
        learner = rl.make_learner(config.env, config)
        notes: list[str] = []
        if self.resume:
            notes = _resume(config, folder)
        else:
            self._begin(config, folder)
        _print_settings(config, console)
        removed = remove_stale_parts(folder, RUN_FILES)
        notes += [problem] * bool(problem)
        notes += [f"removed {x}, left by a killed process" for x in removed]
        print_notes(notes, console)

        update, exit_status = _train(config, learner, self.log, folder, console)
        if update < rl.n_updates(config):
            words = ("rl", "--out", self.out) if self.out else ()
            print_interrupted(console, update, *words)
            return exit_status
        self._finish(_results(config, folder), folder, start, console)
        return 0

    def _finish(
        self, results: JsonObject, folder: Path, start: float, console: Console
    ) -> None:
        """Write and print the results of a run with its seconds since `start`."""
        seconds = time.perf_counter() - start
        results |= {"graphs": self.cuda_graphs, "seconds": seconds}
        write_json(str(folder / RESULTS_FILE), results)
        write_json(self.json, results)
        _print_results(results, console)
        where = f": {self.out}" if self.out else ""
        console.print(f"done in {seconds:.0f} s{where}")

    def _config(self) -> RLConfig:
        """Return the settings of the run; published gSDE settings are reset if exploration is not gsde."""
        config = self.settings
        if config.exploration == "gsde":
            return config
        # What is published for gSDE is of no use then.
        theirs = published_settings(config.env)
        unused = {
            name: value
            for name, value in GSDE_DEFAULTS.items()
            if getattr(config, name) == getattr(theirs, name)
        }
        return dataclasses.replace(config, **unused)

    def _begin(self, config: RLConfig, folder: Path) -> None:
        """Write the settings of a new run, replacing the files of an earlier run.

        Raises:
          ValueError: there is an earlier one, which is not to be replaced.
        """
        take_folder(folder, self.log, RUN_FILES, self.overwrite)
        for name in RUN_FILES:
            (folder / name).unlink(missing_ok=True)
        write_config(config, folder)


def _resume(config: RLConfig, folder: Path) -> list[str]:
    """Check the settings of a run that is resumed, and store them if it is extended; return notes.

    Raises:
      ValueError: another setting was given, or other steps than it can have.
    """
    from funcppo import rl, trainer

    stored = read_config(folder)
    check_resumed(stored, config, folder, ("source", "steps"))
    notes: list[str] = []
    if rl.n_updates(config) > rl.n_updates(stored):
        schedule = trainer.find_ending_schedule(config.ppo)
        if schedule:
            raise ValueError(
                f"{folder}: --steps: expected {stored.steps}, where its {schedule} ends, got {config.steps}"
            )
        # Results of fewer steps are no longer those of the run.
        (folder / RESULTS_FILE).unlink(missing_ok=True)
        write_config(config, folder)
        notes.append(
            f"extended from {stored.steps:,} to {config.steps:,} steps"
        )

    names = (CHECKPOINT_FILE, PREVIOUS_CHECKPOINT_FILE)
    if not any((folder / name).exists() for name in names):
        log = f", and {METRICS_FILE} anew"
        has_log = (folder / METRICS_FILE).exists()
        notes.append(
            f"{folder}: expected a checkpoint, got none: the run begins at update 0{log if has_log else ''}"
        )
    return notes


def _print_settings(config: RLConfig, console: Console) -> None:
    """Print what is trained, where its settings were published, and which were changed."""
    seeds = f"{config.seeds} seed" + "s" * (config.seeds > 1)
    console.print(
        f"{config.env}: {seeds} from {config.seed}, {config.steps:,} steps each, {config.device}"
    )
    console.print(f"settings: {config.source}")
    changes = [
        f"{name} {new} (published: {old})"
        for name, old, new in iter_differences(
            published_settings(config.env), config
        )
        if name != "source"
    ]
    if changes:
        console.print(f"changed: {', '.join(changes)}")


def _train(
    config: RLConfig,
    learner: Learner[Any, Any],
    log: tuple[LoggerName, ...],
    folder: Path,
    console: Console,
) -> tuple[int, int]:
    """Train until the last update or an interrupt; return the update of the checkpoint, and the exit status."""
    from funcppo import rl, trainer
    from funcppo.learner import describe_strategy

    checkpoint = folder / CHECKPOINT_FILE
    with (
        WorkDisplay("preparing the training step", console) as status,
        defer_interrupt() as interrupt,
        warnings.catch_warnings(),
    ):
        returns = ""

        def show(progress: Progress[Evaluations]) -> bool:
            nonlocal returns
            if progress.evaluation is not None:
                means = [x.sampled.mean for x in progress.evaluation]
                returns = f"return {sum(means) / len(means):.1f}, "
            status.update(
                "training",
                progress.update,
                progress.n_updates,
                note=f"{returns}{progress.steps_per_second:,.0f} steps/s",
            )
            return interrupt.requested

        # Notes on the checkpoint are warnings, too.
        warnings.simplefilter("ignore", UserWarning)
        # A repeated signal ends an update or evaluation in progress.
        with suppress(KeyboardInterrupt):
            result = trainer.train_many(
                learner,
                config.steps,
                seeds=rl.seeds_of(config),
                device=config.device,
                strategy=config.strategy,
                callbacks=[trainer.MetricsLog(folder, *log), show],
                evaluate_every=rl.evaluation_interval(config),
                n_episodes=config.episodes,
                checkpoint=checkpoint,
            )
            notes = list(result.notes)
            if is_verbose() and result.record is not None:
                notes = [describe_strategy(result.record), *notes]
            print_notes(notes, console, 1)
    return trainer.saved_update(checkpoint), interrupt.exit_status


def _results(config: RLConfig, folder: Path) -> JsonObject:
    """Build the contents of results.json, without the seconds."""
    from funcppo import logs, rl

    returns = rl.read_returns(folder)
    return {
        "env": config.env,
        "settings": config.source,
        "seeds": list(returns.seeds),
        "steps": int(returns.steps[-1]),
        "episodes": config.episodes,
        "returns": rl.summarize(returns),
        "n_unfinished_episodes": int(returns.n_unfinished[-1]),
        "strategy": logs.read_header(folder / METRICS_FILE).get("strategy"),
        "versions": logs.package_versions(),
        "device": config.device,
    }


def _print_results(results: JsonObject, console: Console) -> None:
    """Print the returns of the last evaluation, over the seeds and for each seed."""
    returns = results["returns"]
    table = make_table(
        f"return after {results['steps']:,} steps, {results['episodes']} episodes a seed",
        ("actions", *returns),
    )
    summaries = returns.values()
    for seed in map(str, results["seeds"]):
        cells = [f"{x['by_seed'][seed]:.1f}" for x in summaries]
        table.add_row(f"seed {seed}", *cells)
    for text, name in {"mean": "mean", "interquartile mean": "iqm"}.items():
        table.add_row(text, *(f"{x[name]:.1f}" for x in summaries))
    intervals = [
        "{:.1f} to {:.1f}".format(*x["iqm_interval"]) for x in summaries
    ]
    table.add_row("its 95 % interval", *intervals)
    print_table(console, table)

    n_unfinished = results["n_unfinished_episodes"]
    if n_unfinished:
        note = (
            f"{n_unfinished} episodes had not ended; their return so far counts"
        )
        print_notes([note], console)
