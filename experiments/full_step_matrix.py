"""Claim: the whole PPO step - forward, loss, backward, clipping, Adam - compiles into one graph, and here is how.

    python experiments/full_step_matrix.py                       run every cell, compare with the committed record
    python experiments/full_step_matrix.py --jobs 16 --time none inductor
                                                                 16 cells at a time, some of them timed one by one
    python experiments/full_step_matrix.py --only 6/ --fresh     run some cells again
    python experiments/full_step_matrix.py --out experiments/results
                                                                 make the committed record anew, and the tables
    python experiments/full_step_matrix.py --report              rewrite the tables only

Writes full_step_matrix-<torch>-<device>.json, and a table of it, into --out. Exits 1 when a cell does not end as the
committed record for this version and device says: status, graphs or parity; times are not compared. Exits 3 when no
committed record has any of the cells, so that there is nothing to compare with. An interrupted run goes on where it
stopped at the same commit, but not with the record of another machine.

One cell at a time, a whole run takes about the minutes in the first table of experiments/results/full_step_matrix.md,
and what timing the cells takes (--time chooses which).
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # project root

from experiments import paths
from experiments.matrix import (  # noqa: F401
    approaches,
    fused_kernel,
    ingredients,
    loops,
    measure,
    polyfills,
    pool,
    record,
    registry,
    routes,
    tables,
)
from experiments.provenance import current_commit

NOTHING_TO_COMPARE = 3  # exit status


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0, 1 when a cell has changed, or 3 when there is nothing to compare with."""
    parser = arguments()
    args = parser.parse_args(argv)
    if args.worker:
        return worker(args.worker, args.device)
    if args.report:
        tables.publish(paths.MATRIX_DOCUMENTS, record.RESULTS)
        return 0
    file = record.path(args.out, torch.__version__, record.device())
    committed = record.load(
        record.path(record.RESULTS, torch.__version__, record.device())
    )
    cells = chosen(args, args.only)
    if not cells:
        parser.error(f"no cell is named by --only {' '.join(args.only)}")
    try:
        now = record.resumed(file)
    except ValueError as error:
        parser.error(str(error))
    todo = [
        name
        for name in cells
        if args.fresh or not record.holds(now, cells[name], current_commit())
    ]
    print(
        f"{len(cells)} cells, {len(cells) - len(todo)} of them in the record already"
    )
    if args.list:
        print("\n".join(todo))
        return 0
    now = run(args, file, {name: cells[name] for name in todo})
    if args.out.resolve() == record.RESULTS:
        tables.publish(paths.MATRIX_DOCUMENTS, record.RESULTS)
    else:
        file.with_suffix(".md").write_text(tables.whole(now))
    if not committed["cells"].keys() & now["cells"].keys():
        print(
            f"{len(now['cells'])} cells in {file}, nothing to compare with: no committed record of torch "
            f"{torch.__version__} on {record.device()} has them"
        )
        return NOTHING_TO_COMPARE
    changed = record.changes(committed, now)
    for line in changed:
        print(f"changed: {line}")
    print(
        f"{len(now['cells'])} cells in {file}, {len(changed)} changed from the committed record"
    )
    return 1 if changed else 0


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = paths.make_parser(__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        default=paths.ROOT / "runs" / "matrix",
        help="folder of the record",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=["*"],
        metavar="PATTERN",
        help="part of a cell's name, or * ? [ ]",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="run cells that the record has, too",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=240.0,
        help="seconds that one cell may take",
    )
    parser.add_argument(
        "--time",
        nargs="+",
        default=["*"],
        metavar="PATTERN",
        help="of those, cells to time",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="cells examined at a time"
    )
    parser.add_argument(
        "--wave",
        type=int,
        default=12,
        help="cells that are timed in turns, at most: as many processes wait",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="name the cells that would run, and stop",
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="rewrite the tables of INVESTIGATION.md and results/full_step_matrix.md, and stop",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help=argparse.SUPPRESS,
    )
    return parser


def chosen(
    args: argparse.Namespace, patterns: list[str]
) -> dict[str, registry.Cell]:
    """The cells of this machine that one of the patterns names."""
    return {
        cell.id: cell
        for cell in registry.cells(args.device == "cuda", tuple(patterns))
    }


def run(
    args: argparse.Namespace, file: Path, todo: dict[str, registry.Cell]
) -> dict[str, Any]:
    """The record with these cells in it, saved after each."""
    args.out.mkdir(parents=True, exist_ok=True)
    commit, progress = current_commit(), Progress(len(todo))

    def done(name: str, result: dict[str, Any]) -> None:
        now = record.load(file)  # another run may have added to it
        now["cells"][name] = {
            **record.describe(todo[name]),
            **result,
            "commit": commit,
        }
        record.save(file, now)
        progress(name, result)

    plan = pool.Plan(
        args.device,
        args.limit,
        args.jobs,
        args.wave,
        chosen(args, args.time).__contains__,
    )
    pool.run(list(todo), plan, done)
    return record.load(file)


class Progress:
    """One line for every finished cell."""

    def __init__(self, total: int) -> None:
        self.total, self.n, self.start = total, 0, time.perf_counter()

    def __call__(self, name: str, result: dict[str, Any]) -> None:
        """Print it."""
        self.n += 1
        left = (
            (time.perf_counter() - self.start) / self.n * (self.total - self.n)
        )
        bar = "#" * (20 * self.n // self.total)
        line = f"[{bar:<20}] {self.n}/{self.total}  {result['status']:<14} {name}  {result['seconds']:.0f} s"
        print(f"{line}; about {left / 60:.0f} min left", flush=True)


def worker(cell_id: str, device: str) -> int:
    """Examine one cell, print what was found, and time a block whenever the parent says so."""
    torch.set_num_threads(1)
    polyfills.register()
    cell = registry.by_id(cell_id)
    send: Callable[[Any], None] = lambda result: print(
        f"{pool.MARK}{json.dumps(result)}", flush=True
    )
    result, ready = measure.examine(cell, device)
    send(result)
    clock = None
    for _ in sys.stdin if ready else ():  # a line asks for a block
        clock = clock or measure.Clock(ready, cell, device)
        send(clock.block())
    return 0


if __name__ == "__main__":
    sys.exit(main())
