"""`funcppo plot`: a picture of one run or several."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from funcppo.cli.common import write_json
from funcppo.cli.options import DeviceOption, JsonOutput
from funcppo.cli.report import RunArguments, check_runs, measure_runs
from funcppo.cli.target import set_target_threads
from funcppo.ranges import NonNegativeInt, PositiveInt


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Draw learning curves, ranks, MRR by relation, reliability or rules of trained runs as SVG or PNG.

    The pictures are those of `funcppo report`, which says what they mean. Several runs on the same data give means,
    with a standard deviation as a band. Needs the extra `plot`.

    Exit status: 0 written, 2 bad input, 130 interrupted by Ctrl-C, 143 by SIGTERM.
    """

    runs: RunArguments
    """Folders of training runs on the same data."""
    kind: Literal["curves", "ranks", "relations", "reliability", "rules"]
    """Which of the pictures is drawn."""
    out: Annotated[str, arg(metavar="FILE")]
    """File to write, FILE.svg or FILE.png; one that exists is replaced."""
    queries: NonNegativeInt = 100
    """Number of test queries over which rules are counted, spread over relations."""
    ranked: PositiveInt | None = None
    """Rank at most N test queries, spread over relations. Default: those that the end of the training ranks."""
    device: DeviceOption = "cpu"
    """Device to score on: cpu, cuda, or cuda:N for GPU number N."""
    threads: PositiveInt | None = None
    """Number of CPU threads of an operation. Default: as many as the first run was trained with."""
    json: JsonOutput = None
    """Write what is drawn as JSON to FILE; - writes it to standard output. Default: no JSON."""

    def run(self) -> int:
        """Measure the runs and write the picture.

        Returns:
          The exit status.
        """
        suffix = Path(self.out).suffix.lower()
        if suffix not in (".svg", ".png"):
            raise ValueError(
                f"--out {self.out}: expected a name that ends in .svg or .png"
            )
        check_runs(self.runs, self.out, self.json, self.device)
        from funcppo.atomic_io import write_atomically
        from funcppo.report import figures, tables

        set_target_threads(self.runs[0], self.threads)
        reports = measure_runs(
            self.runs,
            0 if self.kind == "curves" else self.ranked,
            self.queries if self.kind == "rules" else 0,
            self.device,
        )
        picture = figures.draw(self.kind, [one.measured for one in reports])
        write = figures.to_png if suffix == ".png" else figures.to_svg
        content = write(picture)
        write_atomically(Path(self.out), lambda file: file.write(content))
        write_json(
            self.json,
            {
                "runs": list(self.runs),
                "kind": self.kind,
                "table": tables.to_json(picture.table),
            },
        )
        if self.json != "-":
            print(self.out)
        return 0
