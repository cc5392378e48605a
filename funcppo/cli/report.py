"""`funcppo report`: a page on a run, or one of its pictures, in one file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from funcppo.cli.common import (
    WorkDisplay,
    check_outputs,
    data_files,
    print_text,
    select_device,
    set_target_threads,
    write_json,
)
from funcppo.cli.options import HIDDEN, JsonOutput, Opt
from funcppo.core.settings import DeviceName, NonNegativeInt, PositiveInt
from funcppo.kg.config import read_config

# PyTorch takes seconds to import, and --help is not to wait for it
if TYPE_CHECKING:
    from funcppo.kg.show.measure import RunMeasurements


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write a page on a trained run, or one of its pictures: results, curves, reliability, rules, proofs.

    The page is one HTML file that needs no other and asks no server. Metrics are those of results.json; ranks, scores
    and proofs of single queries those of the programs evaluate and predict.

    With --plot one picture of the page is written in place of it.

    An unfinished run and one without a test split have a page that says so. Needs the extra `plot`.

    Exit status: 0 written, 2 bad input, 130 interrupted by Ctrl-C, 143 by SIGTERM.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "funcppo report runs/s1 --out report.html",
        "funcppo report runs/s1 --plot curves --out curves.svg",
    )

    run_folder: str
    """Folder of a training run."""
    out: Annotated[str, Opt("FILE")]
    """File to write, with --plot FILE.svg or FILE.png; one that exists is replaced."""
    plot: (
        Literal["results", "curves", "relations", "reliability", "rules"] | None
    ) = None
    """Write this picture in place of the page. Default: the page."""
    shown: NonNegativeInt = 100
    """Number of test queries that are shown with proofs, or over which rules are counted, spread over relations."""
    device: DeviceName = "cpu"
    """Device to score on: cpu, cuda, or cuda:N for GPU number N."""
    threads: Annotated[PositiveInt | None, HIDDEN] = None
    """Number of CPU threads of an operation. Default: as many as the run was trained with."""
    json: JsonOutput = None
    """Write the tables of the page as JSON to FILE; - writes them to standard output. Default: no JSON."""

    def run(self) -> int:
        """Measure the run and write the page or the picture; return the exit status.

        Returns:
          The exit status.
        """
        suffix = Path(self.out).suffix.lower()
        if self.plot is not None and suffix not in (".svg", ".png"):
            raise ValueError(
                f"--out {self.out}: expected a name that ends in .svg or .png"
            )
        from funcppo.core.files import write_file
        from funcppo.kg.show import report

        report.check_packages()
        read_config(Path(self.run_folder))
        outputs = [("--out", self.out), ("--json", self.json)]
        check_outputs(outputs, data_files(self.run_folder))
        measured = self._measure()
        if self.plot is None:
            page, tables = report.render(measured)
            content = page
        else:
            figure, tables = report.draw(self.plot, measured)
            to_file = report.to_png if suffix == ".png" else report.to_svg
            content = to_file(figure)
        write_file(Path(self.out), content)
        found = {"run": self.run_folder, "out": self.out, "plot": self.plot}
        write_json(self.json, {**found, "tables": report.to_json(tables)})
        if self.json != "-":
            print_text(f"{self.out}: {len(content) / 1e6:,.1f} MB")
        return 0

    def _measure(self) -> RunMeasurements:
        """Measure the run as far as the page or the picture needs it, with a display."""
        select_device(self.device)
        from funcppo.kg.run.run import open_run
        from funcppo.kg.show.measure import measure

        set_target_threads(self.run_folder, self.threads)
        folder = Path(self.run_folder)
        with WorkDisplay("reading data") as shown:
            return measure(
                open_run(folder, self.device, shown.update),
                folder,
                n_queries=self.shown if self.plot in (None, "rules") else 0,
                with_entries=self.plot is None,
                on_phase=shown.update,
            )
