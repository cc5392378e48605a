"""Where the time of a resolution step goes: operators and kernels, uncompiled, compiled and as CUDA graphs.

    python experiments/benchmarks/profile_resolve.py --device cuda --out experiments/results/resolve-h200.json

`resolve` alone, the unification of a prover's step, without a policy: goals of train facts after one random successor.
Modes:

    eager           PyTorch's operators, one after another
    graph           the same, replayed as a CUDA graph (on a GPU)
    compiled        as one graph by Inductor
    compiled graph  the same, replayed as a CUDA graph (on a GPU): what a compiled training step or search runs

The successors of all modes are equal, or the program ends with an error. A row holds the median microseconds a call, as
the host sees them; the kernels of a call and their time; and the operators, or the kernels of a GPU, with the most time
of their own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import Row, write_record
from experiments.provenance import describe_machine
from funcppo.core import tree
from funcppo.kg.graph import loaders
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.logic import resolve
from funcppo.kg.logic.kb import KBSizes, build
from funcppo.runtime import compile as strategies
from funcppo.runtime.capture import capture

N_PROFILED = 10  # calls

Step = Callable[[], resolve.Successors]


class Work(NamedTuple):
    """A call of `resolve`."""

    cfg: resolve.ResolveConfig
    call: Step
    arguments: tuple[Any, ...]


def main() -> None:
    """Profile each mode of each graph and batch, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--graphs",
        nargs="+",
        default=["countries_s3", "family_tree:2000:1"],
        help="embedded data sets, or folders",
    )
    parser.add_argument("--height", type=int, default=2)
    parser.add_argument("--batch", nargs="+", type=int, default=[512, 16384])
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument(
        "--top", type=int, default=8, help="operators or kernels of a row"
    )
    parser.add_argument("--out", type=Path, help="record to write")
    args = parser.parse_args()

    machine = describe_machine(args.device)
    rows: list[Row] = []
    for name in args.graphs:
        for batch in args.batch:
            for row in profile_modes(args, name, batch):
                rows.append(row)
                print_row(row)
                if args.out is not None:
                    record = {"machine": machine, "seed": 0, "rows": rows}
                    write_record(args.out, record)


def profile_modes(
    args: argparse.Namespace, name: str, batch: int
) -> Iterator[Row]:
    """Yield the row of each mode.

    Raises:
      RuntimeError: the successors of a mode are others than the eager ones, or no CUDA graph is recorded.
    """
    work = make_work(name, args.height, batch, args.device)
    expected = tree.leaves(work.call())
    steps = {"eager": work.call}
    if not args.eager:
        steps["compiled"] = compile_call(work)
    if args.device != "cpu":
        steps["graph"] = replay_call(work.call, args.device)
        if not args.eager:
            steps["compiled graph"] = replay_call(
                steps["compiled"], args.device
            )

    for mode, step in steps.items():
        found = tree.leaves(step())
        pairs = zip(expected, found, strict=True)
        if not all(torch.equal(one, other) for one, other in pairs):
            raise RuntimeError(
                f"{name}, {batch} rows, {mode}: expected the eager successors"
            )
        yield {
            "graph": name,
            "height": args.height,
            "rows": batch,
            "max_successors": work.cfg.max_successors,
            "max_goals": work.cfg.max_goals,
            "mode": mode,
            "microseconds": time_calls(step, args.device, args.repeats),
            **profile_calls(step, args.device, args.top),
        }


def make_work(name: str, height: int, batch: int, device: str) -> Work:
    """The second step of searches of train facts."""
    torch.manual_seed(0)
    dataset = loaders.load(name)
    kb, sizes = build(
        dataset.facts,
        dataset.rules,
        n_constants=dataset.n_constants,
        n_predicates=dataset.n_predicates,
    )
    cfg = resolve.make_resolve_config(kb, sizes, height)
    root, goals = draw_searches(dataset, cfg, sizes, batch)
    goals = random_successor(resolve.resolve(cfg, kb, goals, root))
    on_device = tree.map(lambda x: x.to(device), (kb, goals, root))
    return Work(cfg, partial(resolve.resolve, cfg, *on_device), on_device)


def draw_searches(
    dataset: Dataset,
    cfg: resolve.ResolveConfig,
    sizes: KBSizes,
    n_searches: int,
) -> tuple[Tensor, resolve.Goals]:
    """Searches of train facts of which some rule could derive one, at their start: the queries, and the goals."""
    with_rule = dataset.train[
        np.isin(dataset.train[:, 0], dataset.rules[:, 0, 0])
    ]
    root = torch.from_numpy(
        with_rule[np.random.default_rng(0).choice(len(with_rule), n_searches)]
    )
    padding = torch.zeros(
        (n_searches, cfg.max_goals, sizes.atom_width), dtype=torch.int32
    )
    return root, resolve.Goals(
        torch.cat([root[:, None], padding[:, 1:]], 1), padding[..., 0]
    )


def random_successor(successors: resolve.Successors) -> resolve.Goals:
    """The goals of a random successor of each row; no goals where it has none."""
    alive = successors.mask.any(1)
    weights = torch.where(alive[:, None], successors.mask.float(), 1.0)
    slot = weights.multinomial(1).squeeze(1)
    row = torch.arange(len(slot))
    atoms = torch.where(
        alive[:, None, None], successors.goals.atoms[row, slot], 0
    )
    return resolve.Goals(atoms, successors.goals.height[row, slot])


def compile_call(work: Work) -> Step:
    """The call as one compiled graph, which has run."""
    step = partial(
        strategies.compile_function(resolve.resolve),
        work.cfg,
        *work.arguments,
    )
    step()
    return step


def replay_call(call: Step, device: str) -> Step:
    """A call as a CUDA graph, which has run.

    Raises:
      CaptureError: none can be recorded.
    """

    def step(state: Tensor) -> tuple[Tensor, resolve.Successors]:
        return state, call()

    return capture(step, torch.zeros((), device=device), strict=True).step


def time_calls(step: Step, device: str, n_repeats: int) -> float:
    """The median microseconds of a call, the wait for the device included."""
    times = []
    for _ in range(n_repeats):
        synchronise(device)
        start = time.perf_counter()
        step()
        synchronise(device)
        times.append(1e6 * (time.perf_counter() - start))
    return round(statistics.median(times), 1)


def profile_calls(step: Step, device: str, n_rows: int) -> Row:
    """The operators or kernels of a call with the most time of their own."""
    averages = profile_step(step, device).key_averages()
    on_device = device != "cpu"

    def own_time(event: Any) -> float:
        return (
            event.self_device_time_total
            if on_device
            else event.self_cpu_time_total
        )

    kernels = [
        event
        for event in averages
        if event.self_device_time_total > 0 and event.self_cpu_time_total == 0
    ]
    kernel_time = sum(event.self_device_time_total for event in kernels)
    shown = kernels if on_device else averages
    return {
        "n_kernels": sum(event.count for event in kernels) / N_PROFILED,
        "kernel_microseconds": round(kernel_time / N_PROFILED, 1),
        "costliest": [
            {
                "name": event.key[:70],
                "calls": event.count / N_PROFILED,
                "microseconds": round(own_time(event) / N_PROFILED, 1),
            }
            for event in sorted(shown, key=own_time, reverse=True)[:n_rows]
        ],
    }


def profile_step(step: Step, device: str) -> torch.profiler.profile:
    """The profile of some calls, after others that warm the profiler up."""

    def profile_again() -> torch.profiler.profile:
        with torch.profiler.profile(acc_events=True) as profile:
            for _ in range(N_PROFILED):
                step()
            synchronise(device)
        return profile

    profile_again()
    return profile_again()


def synchronise(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize()


def print_row(row: Row) -> None:
    """Print a row: the call, its operators or kernels."""
    print(
        f"{row['graph']}, {row['rows']:,} rows, {row['mode']}: {row['microseconds']:,.0f} µs; "
        f"{row['n_kernels']:g} kernels, {row['kernel_microseconds']:,.0f} µs",
        flush=True,
    )
    for event in row["costliest"]:
        print(
            f"  {event['name']:46} {event['calls']:6g} x {event['microseconds']:10,.0f} µs"
        )


if __name__ == "__main__":
    main()
