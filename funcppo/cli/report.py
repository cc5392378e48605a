"""`funcppo report`: a page on one run or several, in one file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from funcppo.cli.common import (
    GraphsChoice,
    JsonObject,
    check_output_path,
    check_overwrites,
    graphs_allowed,
    select_device,
    write_json,
)
from funcppo.cli.console import make_console, show_status
from funcppo.cli.options import DeviceOption, JsonOutput
from funcppo.cli.target import data_files, set_target_threads
from funcppo.core.settings import NonNegativeInt, PositiveInt
from funcppo.kg.run.config import read_config

# PyTorch takes seconds to import, and --help is not to wait for it
if TYPE_CHECKING:
    from funcppo.kg.show.report.measurement import RunReport
    from funcppo.kg.show.report.tables import RunMeasurements

RunArguments = Annotated[Positional[tuple[str, ...]], arg(metavar="RUN...")]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write a page on trained runs: results, learning curves, ranks, reliability, rules, queries with proofs.

    The page is one HTML file that needs no other and asks no server. Several runs on the same data give means, with a
    standard deviation as a band; the queries are those of the first run. Ranks, scores and proofs are those of the
    programs evaluate and predict.

    An unfinished run and one without a test split have a page that says so. Needs the extra `plot`.

    Exit status: 0 written, 2 bad input, 130 interrupted by Ctrl-C, 143 by SIGTERM.
    """

    runs: RunArguments
    """Folders of training runs on the same data."""
    out: Annotated[str, arg(metavar="FILE")]
    """File to write; one that exists is replaced."""
    queries: NonNegativeInt = 100
    """Number of test queries that are shown with their proofs, spread over relations."""
    ranked: PositiveInt | None = None
    """Rank at most N test queries, spread over relations. Default: those that the end of the training ranks."""
    device: DeviceOption = "cpu"
    """Device to score on: cpu, cuda, or cuda:N for GPU number N."""
    graphs: GraphsChoice = "auto"
    """Replay the search of a policy as CUDA graphs on a GPU. auto: where they can be recorded; off: never, to rule them
    out; trees: those that PyTorch records of the compiled search (mode reduce-overhead), to compare with; manual:
    always, and it is an error where one cannot be recorded."""
    threads: PositiveInt | None = None
    """Number of CPU threads of an operation. Default: as many as the first run was trained with."""
    json: JsonOutput = None
    """Write the tables of the page as JSON to FILE; - writes them to standard output. Default: no JSON."""

    def run(self) -> int:
        """Measure the runs and write the page.

        Returns:
          The exit status.
        """
        check_runs(self.runs, self.out, self.json)
        select_device(self.device)
        from funcppo.core.atomic_io import write_atomically
        from funcppo.kg.show.report import page

        set_target_threads(self.runs[0], self.threads)
        with graphs_allowed(self.graphs, self.device):
            reports = measure_runs(
                self.runs,
                self.ranked,
                self.queries,
                self.device,
                has_entries=True,
            )
        content = page.render(reports).encode()
        write_atomically(Path(self.out), lambda file: file.write(content))

        write_json(self.json, self._to_json(reports))
        if self.json != "-":
            first = reports[0]
            print(
                f"{self.out}: {len(content) / 1e6:,.1f} MB, {len(first.entries):,} of {first.measured.n_test:,} test "
                "queries"
            )
        return 0

    def _to_json(self, reports: list[RunReport]) -> JsonObject:
        """The JSON of --json."""
        from funcppo.kg.show.report import figures, tables

        runs = [report.measured for report in reports]
        found: JsonObject = {}
        for kind in figures.KINDS:
            try:
                found[kind] = tables.to_json(figures.draw(kind, runs).table)
            except ValueError as error:
                found[kind] = {"problem": str(error)}
        return {
            "runs": list(self.runs),
            "out": self.out,
            **replay_record(self.graphs, runs),
            "tables": found,
        }


def replay_record(
    graphs: GraphsChoice, runs: Iterable[RunMeasurements]
) -> JsonObject:
    """What --graphs said, and how the searches of the runs were replayed, for the JSON of --json."""
    replays = [run.search_replay._asdict() for run in runs]
    return {"graphs": graphs, "replays": replays}


def check_runs(
    runs: tuple[str, ...],
    out: str,
    json: str | None,
    read_run: Callable[[Path], object] = read_config,
    inputs: Callable[[str], Iterable[Path]] = data_files,
) -> None:
    """Check packages, runs and outputs, before any work.

    Args:
      read_run: raises ValueError where a folder is no run of the right kind.
      inputs: the files that are read of a run.

    Raises:
      ValueError: a package is missing, a run is none or given twice, or an output would overwrite what is read.
    """
    from funcppo.kg.show.report import figures

    figures.check_packages()
    if not runs:
        raise ValueError("RUN: expected the folder of a run, got none")
    folders = [Path(run).resolve() for run in runs]
    for i, folder in enumerate(folders):
        if folder in folders[:i]:
            raise ValueError(f"{runs[i]}: expected each run once, got it twice")

    check_output_path("--out", Path(out))
    for run in runs:
        read_run(Path(run))
        check_overwrites([("--out", out), ("--json", json)], inputs(run))


def measure_runs(
    runs: tuple[str, ...],
    max_ranked: int | None,
    n_queries: int,
    device: str,
    *,
    has_entries: bool = False,
) -> list[RunReport]:
    """Measure runs one after the other, showing so.

    Args:
      has_entries: single queries of the first run are wanted.

    Raises:
      ValueError: a run is bad, or two are on different data.
    """
    from funcppo.kg.run import run_start
    from funcppo.kg.show.report import measurement

    folders = [Path(run) for run in runs]
    reports: list[RunReport] = []
    with show_status(make_console(use_stderr=True), "reading data") as status:
        measurement.check_same_data(folders)
        for folder in folders:
            report = measurement.measure(
                run_start.open_run(folder, device, status.update),
                folder,
                max_ranked=max_ranked,
                n_queries=n_queries,
                with_entries=has_entries and not reports,
                on_phase=status.update,
            )
            reports.append(report)
    return reports
