"""`funcppo report`: a page on one run or several, or one of its pictures, in one file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from funcppo.cli.common import (
    JsonObject,
    WorkDisplay,
    check_outputs,
    data_files,
    print_text,
    select_device,
    set_target_threads,
    write_json,
)
from funcppo.cli.options import HIDDEN, JsonOutput, Opt
from funcppo.core.settings import (
    CONFIG_FILE,
    METRICS_FILE,
    DeviceName,
    NonNegativeInt,
    PositiveInt,
)
from funcppo.kg.config import RESULTS_FILE, read_config

# PyTorch takes seconds to import, and --help is not to wait for it
if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from funcppo.kg.show.measure import RunMeasurements


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write a page on trained runs, or one of its pictures: results, curves, reliability, rules, proofs.

    The page is one HTML file that needs no other and asks no server. Several runs on the same data give means, with a
    standard deviation as a band; the queries are those of the first run. Ranks, scores and proofs are those of the
    programs evaluate and predict.

    With --plot one picture of the page is written in place of it. Of runs of `funcppo rl` there is `returns`: the
    interquartile mean over seeds with its interval of 95 %, a curve for each run.

    An unfinished run and one without a test split have a page that says so. Needs the extra `plot`.

    Exit status: 0 written, 2 bad input, 130 interrupted by Ctrl-C, 143 by SIGTERM.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "funcppo report runs/s1 --out report.html",
        "funcppo report runs/s1 --plot curves --out curves.svg",
    )

    runs: tuple[str, ...]
    """Folders of training runs on the same data; for returns, of runs of `funcppo rl`."""
    out: Annotated[str, Opt("FILE")]
    """File to write, with --plot FILE.svg or FILE.png; one that exists is replaced."""
    plot: (
        Literal[
            "results",
            "curves",
            "relations",
            "reliability",
            "rules",
            "returns",
        ]
        | None
    ) = None
    """Write this picture in place of the page. Default: the page."""
    shown: NonNegativeInt = 100
    """Number of test queries that are shown with proofs, or over which rules are counted, spread over relations."""
    max_queries: PositiveInt | None = None
    """Rank at most N test queries, spread over relations. Default: those that the end of the training ranks."""
    device: DeviceName = "cpu"
    """Device to score on: cpu, cuda, or cuda:N for GPU number N."""
    threads: Annotated[PositiveInt | None, HIDDEN] = None
    """Number of CPU threads of an operation. Default: as many as the first run was trained with."""
    json: JsonOutput = None
    """Write the tables of the page as JSON to FILE; - writes them to standard output. Default: no JSON."""

    def run(self) -> int:
        """Measure the runs and write the page or the picture; return the exit status.

        Returns:
          The exit status.
        """
        suffix = Path(self.out).suffix.lower()
        if self.plot is not None and suffix not in (".svg", ".png"):
            raise ValueError(
                f"--out {self.out}: expected a name that ends in .svg or .png"
            )
        from funcppo.core.files import write_atomically
        from funcppo.kg.show import report

        found: JsonObject = {
            "runs": list(self.runs),
            "out": self.out,
            "plot": self.plot,
        }
        if self.plot == "returns":
            figure, tables = self._draw_returns()
        else:
            check_runs(self.runs, self.out, self.json)
            runs = self._measure()
            if self.plot is None:
                figure, tables = report.render(runs)
            else:
                figure, tables = report.draw(self.plot, runs)
        if isinstance(figure, str):  # the page
            content = figure.encode()
        elif suffix == ".png":
            content = report.to_png(figure)
        else:
            content = report.to_svg(figure)
        write_atomically(Path(self.out), lambda file: file.write(content))
        write_json(self.json, found | {"tables": report.to_json(tables)})
        if self.json != "-":
            print_text(f"{self.out}: {len(content) / 1e6:,.1f} MB")
        return 0

    def _draw_returns(self) -> tuple[Figure, list[JsonObject]]:
        """Draw the returns of runs of `funcppo rl`; return the picture and its tables."""
        from funcppo.kg.show import report
        from funcppo.rl import POLICIES, read_config, read_returns

        check_runs(self.runs, self.out, self.json, read_config, _log_of)
        tables: list[JsonObject] = []
        for folder in (Path(run).resolve() for run in self.runs):
            returns, env = read_returns(folder), read_config(folder).env
            for policy in POLICIES:
                curve = report.return_curve(folder.name, env, returns, policy)
                tables.append(curve)
        return report.draw_returns(tables), tables

    def _measure(self) -> list[RunMeasurements]:
        """Measure the runs one after another as far as the page or the picture needs it, with a display.

        Raises:
          ValueError: a run is bad, or two are on different data.
        """
        select_device(self.device)
        from funcppo.kg.run.run import open_run
        from funcppo.kg.show import measure

        set_target_threads(self.runs[0], self.threads)
        folders = [Path(run) for run in self.runs]
        runs: list[RunMeasurements] = []
        status = WorkDisplay("reading data")
        with status as shown:
            measure.check_same_data(folders)
            for folder in folders:
                run = measure.measure(
                    open_run(folder, self.device, shown.update),
                    folder,
                    max_ranked=0 if self.plot == "curves" else self.max_queries,
                    n_queries=self.shown if self.plot in (None, "rules") else 0,
                    with_entries=self.plot is None and not runs,
                    on_phase=shown.update,
                )
                runs.append(run)
        return runs


def check_runs(
    runs: tuple[str, ...],
    out: str,
    json: str | None,
    read_run: Callable[[Path], object] = read_config,
    inputs: Callable[[str], Iterable[Path]] = data_files,
) -> None:
    """Check packages, runs and outputs before any work.

    Args:
      read_run: raises ValueError where a folder is no run of the right kind.
      inputs: the files that are read of a run.

    Raises:
      ValueError: a package is missing, a run is none or given twice, or an output would overwrite what is read.
    """
    from funcppo.kg.show import report

    report.check_packages()
    if not runs:
        raise ValueError("RUN: expected the folder of a run, got none")
    folders = [Path(run).resolve() for run in runs]
    for i, folder in enumerate(folders):
        if folder in folders[:i]:
            raise ValueError(f"{runs[i]}: expected each run once, got it twice")

    for run in runs:
        read_run(Path(run))
        check_outputs([("--out", out), ("--json", json)], inputs(run))


def _log_of(run: str) -> list[Path]:
    """List the files from which the returns of a run are read."""
    names = (METRICS_FILE, CONFIG_FILE, RESULTS_FILE)
    return [Path(run) / name for name in names]
