"""What a CartPole training iteration costs: as one CUDA graph, other ways to run it, and JAX.

    python experiments/benchmarks/cartpole.py --mode captured jax --precision highest high bfloat16 --out FILE

Work: 4 and 2048 environments x 128 steps, 4 epochs x 4 minibatches, 64-64 tanh; 64 and 1024 learners under vmap, 4 x
128 each. Ways to run it (`--mode`):

    captured     compiled parts; the whole iteration is one CUDA graph
    compiled     compiled parts, called from Python
    eager-graph  eager parts in one CUDA graph, as LeanRL does it
    forward      compiled forward and loss, eager backward, fused Adam: the `forward` strategy
    eager        nothing compiled
    jax          where it is installed: one jitted JAX call (jax_peer.py)

A row holds the seconds of a cold start, and the median and spread of an iteration. Rows of funcppo also hold the number
of kernels, the most memory held, and the difference of their params from the eager step's after one update, as a share
of the change that the update makes. For one thread set OMP_NUM_THREADS=1, for JAX
XLA_FLAGS="--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1", which its row repeats.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks import side_by_side
from experiments.benchmarks.side_by_side import Row
from experiments.paths import make_parser
from funcppo import train_step
from funcppo.config import Config, PPOConfig
from funcppo.core import random, tree
from funcppo.envs import classic
from funcppo.interfaces import NoWorld
from funcppo.nets import networks as mlp
from funcppo.runtime import compile as strategies
from funcppo.runtime import memory
from funcppo.runtime.capture import CapturedStep, capture
from funcppo.runtime.compile import BF16_TOLERANCE, DEFAULT_TOLERANCE

# Environments and learners of each work; 0 learners: one, without vmap.
WORK = {
    "4x128": (4, 0),
    "2048x128": (2048, 0),
    "64 learners": (4, 64),
    "1024 learners": (4, 1024),
}
MODES = ("captured", "compiled", "eager-graph", "forward", "eager")
N_STEPS = 128
N_MINIBATCHES = 4
ppo_config = partial(
    PPOConfig, n_steps=N_STEPS, n_epochs=4, n_minibatches=N_MINIBATCHES
)

# Precisions, and their names in JAX, which takes TF32 by default.
PRECISIONS = {
    "highest": "highest",
    "high": "tensorfloat32",
    "bfloat16": "bfloat16",
}

REPEATS = 7
MIN_REPEAT_SECONDS = 0.2


def main() -> None:
    """Run the cells and write them."""
    parser = cells_parser(__doc__, WORK, [*MODES, "jax"], MODES)
    parser.add_argument(
        "--precision",
        nargs="*",
        default=["highest"],
        choices=PRECISIONS,
        help="high: TF32",
    )
    args = parser.parse_args()
    if args.cell:
        return run_cell(*args.cell)

    cells = {}
    for precision, work, mode in itertools.product(
        args.precision, args.work, args.mode
    ):
        arguments = [work, mode, args.device, precision]
        cells[" ".join(arguments)] = arguments
    side_by_side.run_cells(__file__, cells, 8, args.device, args.out)


def cells_parser(
    doc: str | None,
    works: Iterable[str],
    modes: Iterable[str],
    default_modes: Iterable[str],
) -> argparse.ArgumentParser:
    """A parser of options that choose cells."""
    parser = make_parser(doc)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--out", type=Path, help="record to write")
    for name, values, default in (
        ("--work", works, works),
        ("--mode", modes, default_modes),
    ):
        parser.add_argument(
            name, nargs="*", default=list(default), choices=list(values)
        )
    parser.add_argument("--cell", nargs=4, help=argparse.SUPPRESS)
    return parser


def run_cell(work: str, mode: str, device: str, precision: str) -> None:
    """Run one cell in this process."""
    torch.set_float32_matmul_precision(
        "high" if precision == "high" else "highest"
    )
    case: StepCase | Jax
    case = (
        Jax(work, device, precision)
        if mode == "jax"
        else make_case(work, mode, device, precision)
    )
    side_by_side.run_cell(case.prepare, case.measure)


def make_case(work: str, mode: str, device: str, precision: str) -> StepCase:
    """The training step of a work."""
    n_envs, n_learners = WORK[work]
    is_bfloat16 = precision == "bfloat16"
    network = mlp.MLPConfig(
        n_obs=4,
        n_actions=2,
        matmul_dtype=torch.bfloat16 if is_bfloat16 else None,
    )
    cfg = Config(
        ppo=ppo_config(n_envs=n_envs),
        env=classic.cartpole(),
        agent=mlp.mlp_agent(network),
    )
    keys = random.split(random.key(0, device), max(n_learners, 1))
    init = partial(train_step.init, cfg, NoWorld())
    parts = train_step.EAGER_PARTS
    if n_learners:
        state = tree.map(torch.clone, torch.vmap(init)(keys))
        parts = train_step.vmap_parts(parts)
    else:
        state = init(keys[0])
    case = StepCase(mode, device, cfg, NoWorld(), state, parts)
    if is_bfloat16:
        case.tolerance = BF16_TOLERANCE
    return case


class StepCase:
    """A training step, run in one mode."""

    tolerance = DEFAULT_TOLERANCE

    def __init__(
        self,
        mode: str,
        device: str,
        cfg: Config,
        world: Any,
        state: Any,
        eager_parts: train_step.StepFunctions = train_step.EAGER_PARTS,
    ) -> None:
        self.mode, self.device = mode, device
        self.cfg, self.world, self.state = cfg, world, state
        self.eager_parts = eager_parts
        self.iteration = partial(train_step.train_step, cfg, world)

    def prepare(self) -> Row:
        """Compile, capture, take one step and compare it with the eager one."""
        captured = self.capture(self.iteration)
        captured.step()
        self.synchronise()
        row = {
            "replay_mode": captured.replay_mode,
            "peak_bytes": memory.peak_bytes(self.device),
            "cold_s": side_by_side.seconds_since_start(),
            "compiles": side_by_side.compile_seconds(),
            "capture_ms": captured.capture_ms,
        }
        self.step = captured.step

        want, _ = self.iteration(self.state, self.eager_parts)
        row["difference_from_eager"] = relative_difference(
            captured.state, want, self.state
        )
        return row

    def measure(self) -> Row:
        """Median and spread of an iteration, and its kernels."""
        row = time_steps(self.step, self.synchronise)
        if self.device == "cuda":
            row["kernels"] = count_kernels(self.step)
        return row

    def capture(
        self, step: Callable[..., tuple[Any, Any]]
    ) -> CapturedStep[Any, Any]:
        """A step, which calls the parts that it is given, as this mode runs it."""
        parts, on_gpu = self.parts, self.device == "cuda"
        memory.reset_peak(self.device)
        use_graph = on_gpu and self.mode in ("captured", "eager-graph")
        return capture(
            partial(step, parts=parts),
            self.state,
            use_cuda_graph=use_graph,
            strict=use_graph,
        )

    @cached_property
    def parts(self) -> train_step.StepFunctions:
        """The parts of the training step that this mode calls."""
        strategy = "one-graph"
        if self.mode == "forward" or self.mode.startswith("eager"):
            strategy = self.mode.partition("-")[0]
        return strategies.select_strategy(
            train_step.collect,
            self.eager_parts,
            self.cfg,
            self.world,
            self.state,
            strategy,
            tolerance=self.tolerance,
        )[0]

    def synchronise(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()


class Jax:
    """The same work as one jitted JAX call; the cell is an error where JAX, or the device in it, is missing."""

    def __init__(self, work: str, device: str, precision: str) -> None:
        self.work, self.device, self.precision = work, device, precision
        self.iterations = 0
        self.last_metrics: deque[Any] = deque(maxlen=10)
        self.state: Any = None

    def prepare(self) -> Row:
        """Compile and take one step."""
        os.environ.setdefault(
            "XLA_PYTHON_CLIENT_PREALLOCATE", "false"
        )  # other cells are prepared beside this one
        import jax  # pyright: ignore[reportMissingImports]

        from experiments.benchmarks import jax_peer

        n_envs, n_learners = WORK[self.work]
        device = jax.devices(self.device)[0]
        jax.config.update("jax_default_device", device)
        jax.config.update(
            "jax_default_matmul_precision", PRECISIONS[self.precision]
        )

        self.state, self.iteration = jax_peer.make_learner(
            ppo_config(n_envs=n_envs), n_learners, jax_peer.CARTPOLE
        )
        self.synchronise = lambda: jax.block_until_ready(self.state)
        self.step()
        self.synchronise()
        return {
            "replay_mode": "none",
            "cold_s": side_by_side.seconds_since_start(),
            "platform": device.platform,
            "jax": jax.__version__,
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "products": PRECISIONS[self.precision],
        }

    def step(self) -> None:
        """One iteration."""
        self.state, metrics = self.iteration(self.state)
        self.last_metrics.append(metrics)
        self.iterations += 1

    def measure(self) -> Row:
        """Median and spread of an iteration, and the mean return of episodes that ended in the last ten."""
        row = time_steps(self.step, self.synchronise)
        n_episodes, total_return = (
            sum(float(x.sum()) for x in column)
            for column in zip(*self.last_metrics)
        )
        return row | {
            "iterations": self.iterations,
            "mean_return": total_return / n_episodes,
        }


def relative_difference(got: Any, want: Any, before: Any) -> float:
    """|got - want| / |want - before| of the params of three training states."""
    params = [tree.leaves(state.params) for state in (got, want, before)]
    difference = tree.global_norm([a - b for a, b in zip(params[0], params[1])])
    change = tree.global_norm([a - b for a, b in zip(params[1], params[2])])
    return float(difference / change)


def time_steps(step: Callable[[], Any], synchronise: Callable[[], Any]) -> Row:
    """Median and spread of a step in milliseconds.

    Each of REPEATS repeats runs as many steps as MIN_REPEAT_SECONDS take.
    """
    wall_ms: list[float] = []
    n = 1
    while len(wall_ms) < REPEATS:
        start = time.perf_counter()
        for _ in range(n):
            step()
        synchronise()
        seconds = time.perf_counter() - start
        if seconds < MIN_REPEAT_SECONDS and not wall_ms:
            # too short: not counted
            factor = min(10.0, 1.2 * MIN_REPEAT_SECONDS / seconds)
            n = max(n + 1, int(n * factor))
            continue
        wall_ms.append(1e3 * seconds / n)

    quartiles = statistics.quantiles(wall_ms, n=4)
    return {
        "iteration_ms": statistics.median(wall_ms),
        "spread_ms": quartiles[2] - quartiles[0],
        "steps_a_repeat": n,
    }


def count_kernels(step: Callable[[], Any]) -> int:
    """How many kernels a step launches."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        step()
        torch.cuda.synchronize()
    events = profile.events() or ()
    return sum(event.device_type == DeviceType.CUDA for event in events)


if __name__ == "__main__":
    main()
