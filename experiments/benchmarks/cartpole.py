"""What a CartPole training iteration costs: as one CUDA graph, other ways to run it, and JAX.

    python experiments/benchmarks/cartpole.py --mode captured jax --precision highest high bfloat16 --out FILE

Work: 4 and 2048 environments x 128 steps, 4 epochs x 4 minibatches, 64-64 tanh; 64 and 1024 learners under vmap, 4 x
128 each. Ways to run it (`--mode`):

    captured                  compiled parts; the whole iteration is one CUDA graph
    loop-body-graphs          compiled parts; one CUDA graph a rollout step and one a minibatch
    compiled                  compiled parts, called from Python
    eager-graph               eager parts in one CUDA graph, as LeanRL does it
    eager-loop-body-graphs    eager parts, graphs as `loop-body-graphs`
    forward                   compiled forward and loss, eager backward, fused Adam: the `forward` strategy
    eager                     nothing compiled
    jax                       where it is installed: one jitted JAX call (jax_peer.py)

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
from collections.abc import Callable
from functools import partial
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
from funcppo.runtime.capture import CapturedStep, capture, capture_loop_bodies
from funcppo.runtime.compile import BF16_TOLERANCE, DEFAULT_TOLERANCE

# Environments and learners of each work; 0 learners: one, without vmap.
WORK = {
    "4x128": (4, 0),
    "2048x128": (2048, 0),
    "64 learners": (4, 64),
    "1024 learners": (4, 1024),
}
MODES = (
    "captured",
    "loop-body-graphs",
    "compiled",
    "eager-graph",
    "eager-loop-body-graphs",
    "forward",
    "eager",
)
LOOP_BODY_MODES = ("loop-body-graphs", "eager-loop-body-graphs")
N_STEPS = 128
N_MINIBATCHES = 4
ppo_config = partial(
    PPOConfig, n_steps=N_STEPS, n_epochs=4, n_minibatches=N_MINIBATCHES
)

PRECISIONS = ("highest", "high", "bfloat16")

MATMUL_DTYPE = {"bfloat16": torch.bfloat16}
JAX_PRECISION = {
    "highest": "highest",
    "high": "tensorfloat32",
    "bfloat16": "bfloat16",
}  # JAX takes TF32 by default

REPEATS = 7
MIN_REPEAT_SECONDS = 0.2


def main() -> None:
    """Run the cells and write them."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--out", type=Path, help="record to write")
    parser.add_argument(
        "--work", nargs="*", default=list(WORK), choices=list(WORK)
    )
    parser.add_argument(
        "--mode",
        nargs="*",
        default=list(MODES),
        choices=[*MODES, "jax"],
        help="default: all but JAX",
    )
    parser.add_argument(
        "--precision",
        nargs="*",
        default=["highest"],
        choices=PRECISIONS,
        help="high: TF32",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=8,
        help="processes that compile at once",
    )
    parser.add_argument(
        "--cell",
        nargs="+",
        metavar="WORK MODE DEVICE PRECISION",
        help=argparse.SUPPRESS,
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
    side_by_side.run_cells(
        __file__, cells, args.processes, args.device, args.out
    )


def run_cell(work: str, mode: str, device: str, precision: str) -> None:
    """Run one cell in this process."""
    torch.set_float32_matmul_precision(
        "high" if precision == "high" else "highest"
    )
    case: CartPoleCase | Jax
    case = (
        Jax(work, device, precision)
        if mode == "jax"
        else CartPoleCase(work, mode, device, precision)
    )
    side_by_side.run_cell(case.prepare, case.measure)


class CartPoleCase:
    """One work, run in one mode."""

    def __init__(
        self, work: str, mode: str, device: str, precision: str
    ) -> None:
        self.mode, self.device, self.precision = mode, device, precision
        n_envs, self.n_learners = WORK[work]
        self.cfg = Config(
            ppo=ppo_config(n_envs=n_envs),
            env=classic.cartpole(),
            agent=mlp.mlp_agent(
                mlp.MLPConfig(
                    n_obs=4,
                    n_actions=2,
                    matmul_dtype=MATMUL_DTYPE.get(precision),
                )
            ),
        )

        keys = random.split(random.key(0, device), max(self.n_learners, 1))
        init = partial(train_step.init, self.cfg, NoWorld())
        if self.n_learners:
            self.state = tree.map(torch.clone, torch.vmap(init)(keys))
            self.eager_parts = train_step.vmap_parts(train_step.EAGER_PARTS)
        else:
            self.state = init(keys[0])
            self.eager_parts = train_step.EAGER_PARTS

    def prepare(self) -> Row:
        """Compile, capture, take one step and compare it with the eager one."""
        captured = self.capture()
        captured.step()
        self.synchronise()
        peak_bytes = memory.peak_bytes(self.device)
        cold_seconds = side_by_side.seconds_since_start()
        self.step = captured.step

        want, _ = self.step_function(self.eager_parts)(self.state)
        return {
            "replay_mode": captured.replay_mode,
            "cold_s": cold_seconds,
            "capture_ms": captured.capture_ms,
            "peak_bytes": peak_bytes,
            "difference_from_eager": relative_difference(
                captured.state, want, self.state
            ),
        }

    def measure(self) -> Row:
        """Median and spread of an iteration, and its kernels."""
        row = time_steps(self.step, self.synchronise)
        if self.device == "cuda":
            row |= profile_kernels(self.step)
        return row

    def capture(self) -> CapturedStep[Any, Any]:
        """The step as this mode runs it."""
        parts = self.compile_parts()
        memory.reset_peak(self.device)
        if self.mode in LOOP_BODY_MODES:
            step = partial(train_step.train_step, self.cfg, NoWorld())
            return capture_loop_bodies(
                step, parts, self.state, strict=self.device == "cuda"
            )
        use_graph = (
            self.mode in ("captured", "eager-graph") and self.device == "cuda"
        )
        step = self.step_function(parts)
        return capture(
            step, self.state, use_cuda_graph=use_graph, strict=use_graph
        )

    def compile_parts(self) -> train_step.StepFunctions:
        """The parts of the training step that this mode calls."""
        if self.mode in ("captured", "loop-body-graphs", "compiled"):
            strategy = "one-graph"
        else:
            strategy = "forward" if self.mode == "forward" else "eager"
        tolerance = (
            BF16_TOLERANCE
            if self.precision == "bfloat16"
            else DEFAULT_TOLERANCE
        )
        return strategies.select_strategy(
            train_step.collect,
            self.eager_parts,
            self.cfg,
            NoWorld(),
            self.state,
            strategy,
            tolerance=tolerance,
        )[0]

    def step_function(
        self, parts: train_step.StepFunctions
    ) -> Callable[[Any], tuple[Any, Any]]:
        """Return what is timed: an iteration."""
        return lambda state: train_step.train_step(
            self.cfg, NoWorld(), state, parts
        )

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
            "jax_default_matmul_precision", JAX_PRECISION[self.precision]
        )

        self.state, self.iteration = jax_peer.make_learner(
            ppo_config(n_envs=n_envs), n_learners
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
            "products": JAX_PRECISION[self.precision],
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
    """Median and spread of a step in milliseconds, and the median of its processor time.

    Each of REPEATS repeats runs as many steps as MIN_REPEAT_SECONDS take.
    """
    wall_ms: list[float] = []
    processor_ms: list[float] = []
    n = 1
    while len(wall_ms) < REPEATS:
        wall_start, processor_start = time.perf_counter(), time.process_time()
        for _ in range(n):
            step()
        synchronise()
        wall_seconds = time.perf_counter() - wall_start
        processor_seconds = time.process_time() - processor_start

        if (
            wall_seconds < MIN_REPEAT_SECONDS and not wall_ms
        ):  # too short: not counted
            n = max(
                n + 1,
                int(n * min(10.0, 1.2 * MIN_REPEAT_SECONDS / wall_seconds)),
            )
            continue
        wall_ms.append(1e3 * wall_seconds / n)
        processor_ms.append(1e3 * processor_seconds / n)

    quartiles = statistics.quantiles(wall_ms, n=4)
    return {
        "iteration_ms": statistics.median(wall_ms),
        "spread_ms": quartiles[2] - quartiles[0],
        "steps_a_repeat": n,
        "processor_ms": statistics.median(processor_ms),
    }


def profile_kernels(step: Callable[[], Any]) -> Row:
    """How many kernels a step launches, their time in all, and the costliest."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        step()
        torch.cuda.synchronize()
    events = [
        event
        for event in profile.events() or ()
        if event.device_type == DeviceType.CUDA
    ]
    microseconds: dict[str, list[float]] = {}
    for event in events:
        microseconds.setdefault(event.name[:70], []).append(event.device_time)
    by_cost = sorted(
        (
            (sum(times), len(times), name)
            for name, times in microseconds.items()
        ),
        reverse=True,
    )
    return {
        "kernels": len(events),
        "kernels_ms": sum(total for total, _, _ in by_cost) / 1e3,
        "costliest": [
            f"{n} x {total / n:.1f} us {name}"
            for total, n, name in by_cost[:12]
        ],
    }


if __name__ == "__main__":
    main()
