"""`funcppo warm`: compile the training step of a run, or the search of its evaluation, ahead of it."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from tyro.conf import arg

from funcppo.cli.common import (
    JsonObject,
    graphs_allowed,
    select_device,
    set_caches,
    set_threads,
    write_json,
)
from funcppo.cli.console import make_console, print_notes, show_status
from funcppo.cli.evaluate import Evaluate
from funcppo.cli.evaluation_setup import prepare_evaluation
from funcppo.cli.options import JsonOutput, TargetArgument
from funcppo.cli.target import is_run_folder
from funcppo.cli.train import Train, set_matmul_precision
from funcppo.core.settings import iter_differences
from funcppo.kg.run.config import RunConfig, read_config
from funcppo.kg.run.run_time import RunTime

# PyTorch takes seconds to import, and --help does not wait for it.
if TYPE_CHECKING:
    from rich.console import Console

    from funcppo.kg.run.run import Run
    from funcppo.runtime.compile_cache import CompileEvent


@dataclass(frozen=True, kw_only=True)
class Warm(Train):
    """Compile the training step of a run ahead of it, so that `funcppo train` finds the code on disk.

    A run is prepared as `funcppo train` prepares it from the same options, and then not trained. Code is found again
    by the shapes and settings that it was compiled for, --steps and --threads among them, on the same kind of machine.
    With --search it is prepared as `funcppo evaluate RUN --compile on` prepares it, whose batch size is measured anew
    by each process: one that takes another compiles anew.

    Exit status: 0 compiled or found, 2 bad input.
    """

    HIDDEN_OPTIONS: ClassVar[set[str]] = {
        *("out", "resume", "overwrite", "debug", "graphs", "checkpoint_every"),
        *("metrics_port", "metrics_file", "log", "log_compiles"),
    }

    dataset: TargetArgument = ""
    """Folder of a training run, whose settings are taken, or a data set as `funcppo train` takes it. (required)"""
    out: Annotated[Path, arg(metavar="RUN")] = Path()
    """Not an option."""
    search: bool = False
    """Compile the search of `funcppo evaluate RUN` in place of the training step. Default: off."""
    json: JsonOutput = None
    """Write the report as JSON to FILE; - writes it to standard output in place of the text. Default: no JSON."""

    def stored_options(self) -> Train | None:
        """The options of the run to compile for, or of --config; None without them."""
        if not is_run_folder(self.dataset):
            return super().stored_options()
        if self.config:
            raise ValueError(
                f"--config: {self.dataset} is a trained run, which has its own settings"
            )
        return self.with_settings(read_config(Path(self.dataset)))

    def run(self) -> int:
        """Compile what is not on disk, and print where and how long.

        Returns:
          The exit status.
        """
        if not self.dataset:
            raise ValueError(
                "RUN|DATASET: expected a run or a data set, got none (see --help)"
            )
        set_caches(self.cache_dir)
        set_threads(self._run_config().threads)
        select_device(self.device)
        console = make_console(self.json == "-")
        with (
            tempfile.TemporaryDirectory() as folder,
            graphs_allowed("off", self.device),
        ):
            if self.search:
                report = self._compile_search(console)
            else:
                run = self._prepare_run(console, Path(folder))
                report = _compile(run, console)
        write_json(self.json, report)
        _print_report(report, console)
        return 0

    def _compile_search(self, console: Console) -> JsonObject:
        """Compile the search of a run's evaluation; the JSON of --json.

        Raises:
          ValueError: there is no trained run, or its score needs no search.
        """
        if not is_run_folder(self.dataset):
            raise ValueError(
                f"--search: expected a trained run, whose policy searches, got {self.dataset}"
            )
        self._check_settings(read_config(Path(self.dataset)))
        options = Evaluate(
            target=self.dataset,
            device=self.device,
            compile="on",
            threads=self.threads,
        )
        with (
            _compiled_functions() as report,
            show_status(console, "compiling the search") as status,
        ):
            setup = prepare_evaluation(options, status.update)
        if setup.uncompiled:
            raise ValueError(
                f"--search: expected a run whose score needs a search, got {self.dataset}, whose score ({setup.score}) "
                "follows from the rules that derive a candidate"
            )
        return report | {"notes": setup.notes}

    def _prepare_run(self, console: Console, folder: Path) -> Run:
        """The run of the target with what it trains on; a new one leaves its files in the folder."""
        from funcppo.kg.run import run_build, run_start

        with show_status(console, "reading data") as status:
            if is_run_folder(self.dataset):
                self._check_settings(read_config(Path(self.dataset)))
                run = run_start.open_run(Path(self.dataset), self.device)
            else:
                run = dataclasses.replace(self, out=folder)._start_run(
                    console, status.update, RunTime(self.seconds)
                )
            return run_build.with_training_data(run, status.update)

    def _check_settings(self, stored: RunConfig) -> None:
        """Check that no option differs from the settings of the run.

        Raises:
          ValueError: one does.
        """
        given = dataclasses.replace(self._run_config(), dataset=stored.dataset)
        for name, old, new in iter_differences(stored, given):
            if name != "ppo.n_updates":
                option = "--" + name.replace("_", "-")
                raise ValueError(
                    f"{option}: expected {old} as in {self.dataset}, got {new}"
                )


def _compile(run: Run, console: Console) -> JsonObject:
    """Compile the training step of a run; the JSON of --json."""
    from funcppo.kg.run import training

    # Code for another precision is other code.
    set_matmul_precision(run.run_config)
    with (
        _compiled_functions() as report,
        show_status(console, "compiling the training step"),
    ):
        _, record = training.prepare_train_step(run)
    return report | {"strategy": dataclasses.asdict(record)}


@contextmanager
def _compiled_functions() -> Iterator[JsonObject]:
    """A report, filled when the block ends: what it compiled, what it found, where, and how long it took."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    from funcppo.runtime.compile_cache import (
        compile_events,
        uncached_codes,
        uncached_reasons,
    )

    n_before = len(compile_events)
    start = time.perf_counter()
    report: JsonObject = {}
    yield report
    events = compile_events[n_before:]
    report |= {
        "cache_dir": cache_dir(),
        "compiled": _seconds(events, cache_hit=False),
        "found": _seconds(events, cache_hit=True),
        "uncached_reasons": dict(uncached_reasons),
        "uncached_codes": dict(uncached_codes),
        "seconds": time.perf_counter() - start,
    }


def _seconds(
    events: list[CompileEvent], *, cache_hit: bool
) -> dict[str, float]:
    """Seconds of each function that was compiled, or that was on disk."""
    return {
        event.name: event.seconds
        for event in events
        if event.cache_hit == cache_hit
    }


def _print_report(report: JsonObject, console: Console) -> None:
    """Print what was compiled, where to, and how long it took."""
    strategy = report.get("strategy")
    reason = strategy["skip_reason"] if strategy else ""
    if strategy and strategy["strategy"] == "eager" and reason:
        print_notes(console, [f"nothing to compile: {reason}"])
        return

    for name, seconds in report["compiled"].items():
        console.print(f"compiled {name} in {seconds:.1f} s")
    for name in report["found"]:
        console.print(f"found {name}")
    notes = [
        f"{name} is compiled anew by each process: {reason}"
        for name, reason in report["uncached_reasons"].items()
    ]
    print_notes(console, [*report.get("notes", []), *notes])

    what = (
        f"strategy {strategy['strategy']} on {strategy['device']}"
        if strategy
        else "search"
    )
    console.print(
        f"{what}, ready in {report['seconds']:.0f} s: {report['cache_dir']}"
    )
