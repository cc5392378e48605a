"""`funcppo plot`: a picture of one run or several."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from funcppo.cli.common import (
    GraphsChoice,
    JsonObject,
    graphs_allowed,
    select_device,
    write_json,
)
from funcppo.cli.options import DeviceOption, JsonOutput
from funcppo.cli.report import (
    RunArguments,
    check_runs,
    measure_runs,
    replay_record,
)
from funcppo.cli.target import set_target_threads
from funcppo.core.settings import (
    CONFIG_FILE,
    METRICS_FILE,
    NonNegativeInt,
    PositiveInt,
)
from funcppo.kg.run.config import RESULTS_FILE

# PyTorch takes seconds to import, and --help is not to wait for it
if TYPE_CHECKING:
    from funcppo.kg.show.report.figures import Picture


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Draw curves, ranks, gains by relation, reliability, rules or weights of trained runs as SVG or PNG.

    The pictures are those of `funcppo report`, which says what they mean. Several runs on the same data give means,
    with a standard deviation as a band. Of runs of `funcppo rl` there is `returns`: the interquartile mean over
    seeds with its interval of 95 %, a curve for each run. Needs the extra `plot`.

    Exit status: 0 written, 2 bad input, 130 interrupted by Ctrl-C, 143 by SIGTERM.
    """

    runs: RunArguments
    """Folders of training runs on the same data; for returns, of runs of `funcppo rl`."""
    kind: Literal[
        "curves",
        "ranks",
        "relations",
        "gains",
        "reliability",
        "rules",
        "weights",
        "returns",
    ]
    """Which of the pictures is drawn."""
    out: Annotated[str, arg(metavar="FILE")]
    """File to write, FILE.svg or FILE.png; one that exists is replaced."""
    queries: NonNegativeInt = 100
    """Number of test queries over which rules are counted, spread over relations."""
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
        from funcppo.core.atomic_io import write_atomically
        from funcppo.kg.show.report import figures, tables

        replays: JsonObject = {}
        if self.kind == "returns":
            picture = self._draw_returns()
        else:
            picture, replays = self._draw_measured()
        write = figures.to_png if suffix == ".png" else figures.to_svg
        content = write(picture)
        write_atomically(Path(self.out), lambda file: file.write(content))
        write_json(
            self.json,
            {
                "runs": list(self.runs),
                "kind": self.kind,
                **replays,
                "table": tables.to_json(picture.table),
            },
        )
        if self.json != "-":
            print(self.out)
        return 0

    def _draw_measured(self) -> tuple[Picture, JsonObject]:
        """The picture of runs that learnt to rank, and how their searches were replayed."""
        from funcppo.kg.show.report import figures

        check_runs(self.runs, self.out, self.json)
        select_device(self.device)
        set_target_threads(self.runs[0], self.threads)
        with graphs_allowed(self.graphs, self.device):
            reports = measure_runs(
                self.runs,
                0 if self.kind in ("curves", "weights") else self.ranked,
                self.queries if self.kind == "rules" else 0,
                self.device,
            )
        measured = [one.measured for one in reports]
        picture = figures.draw(self.kind, measured)
        return picture, replay_record(self.graphs, measured)

    def _draw_returns(self) -> Picture:
        """The picture of runs that learnt to act."""
        from funcppo.kg.show.report import return_curves
        from funcppo.rl.config import read_config
        from funcppo.rl.run import read_returns

        check_runs(self.runs, self.out, self.json, read_config, _log_of)
        runs: list[return_curves.RunReturns] = []
        for folder in (Path(run).resolve() for run in self.runs):
            config = read_config(folder)
            returns = read_returns(folder)
            run = return_curves.RunReturns(folder.name, config.env, returns)
            runs.append(run)
        return return_curves.draw(runs)


def _log_of(run: str) -> list[Path]:
    """The files that the returns of a run are read from."""
    names = (METRICS_FILE, CONFIG_FILE, RESULTS_FILE)
    return [Path(run) / name for name in names]
