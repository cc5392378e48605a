"""What an iteration of learning to prove costs, and its rollout alone.

    python experiments/benchmarks/prover.py --out experiments/results/prover-h200-family.json

Work:

    s3                         embedded Countries S3 to height 2, 64 x 64, 2 epochs, minibatches of 128
    family                     Family, 41 rules, height 2, 128 x 128, 5 epochs x 16 minibatches
    family-large               the same with 250-d atoms and 512 hidden units
    family-130                 that with 8 residual layers and 130 places for successors, of which at most 22 are filled

Modes are those of cartpole.py (`--mode`). Minibatches run on the successors that there are. Rows are as those of
cartpole.py, with rollout_ms, steps a second, and where the seconds of the cold start went.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks import side_by_side
from experiments.benchmarks.cartpole import (
    LOOP_BODY_MODES,
    MODES,
    profile_kernels,
    relative_difference,
    time_steps,
)
from experiments.benchmarks.side_by_side import Row
from experiments.paths import DATA, make_parser
from funcppo import train_step
from funcppo.config import PPOConfig
from funcppo.core import random
from funcppo.kg.config import ProverTaskConfig
from funcppo.kg.graph import loaders
from funcppo.kg.run.train import with_capacity
from funcppo.kg.search import task as prover_task
from funcppo.runtime import compile as strategies
from funcppo.runtime import memory
from funcppo.runtime.capture import CapturedStep, capture, capture_loop_bodies

SMALL_PPO = PPOConfig(n_envs=64, n_steps=64, n_epochs=2, n_minibatches=32)
LARGE_PPO = PPOConfig(n_envs=128, n_steps=128, n_epochs=5, n_minibatches=16)
SMALL_TASK = ProverTaskConfig(max_height=2)
LARGE_TASK = ProverTaskConfig(max_height=2, embed_dim=250, hidden_dim=512)
DEEP_TASK = dataclasses.replace(
    LARGE_TASK, n_residual_blocks=8, max_successors=130
)
WORK = {
    "s3": ("countries_s3", SMALL_TASK, SMALL_PPO),
    "family": ("{data}/family", SMALL_TASK, LARGE_PPO),
    "family-large": ("{data}/family", LARGE_TASK, LARGE_PPO),
    "family-130": ("{data}/family", DEEP_TASK, LARGE_PPO),
}


def main() -> None:
    """Run the cells and write them."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--data", default=str(DATA), help="folder of the standard data sets"
    )
    parser.add_argument("--out", type=Path, help="record to write")
    parser.add_argument(
        "--work", nargs="*", default=list(WORK), choices=list(WORK)
    )
    parser.add_argument(
        "--mode",
        nargs="*",
        default=["captured", "compiled", "eager"],
        choices=MODES,
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=8,
        help="processes that compile at once",
    )
    parser.add_argument(
        "--cell",
        nargs=4,
        metavar=("WORK", "MODE", "DEVICE", "DATA"),
        help=argparse.SUPPRESS,
    )
    args = parser.parse_args()
    if args.cell:
        case = ProverCase(*args.cell)
        return side_by_side.run_cell(case.prepare, case.measure)

    cells = {}
    for work, mode in itertools.product(args.work, args.mode):
        name = f"{work} {mode} {args.device} packed"
        cells[name] = [work, mode, args.device, args.data]
    side_by_side.run_cells(
        __file__, cells, args.processes, args.device, args.out
    )


class ProverCase:
    """One work, run in one mode."""

    def __init__(
        self, work: str, mode: str, device: str, data_folder: str
    ) -> None:
        dataset, settings, ppo = WORK[work]
        self.mode, self.device = mode, device
        task = prover_task.build_task(
            loaders.load(dataset.format(data=data_folder)), settings, device
        )
        self.cfg = prover_task.build_config(task, ppo)
        self.world = prover_task.training_world(task)
        self.state = train_step.init(
            self.cfg, self.world, random.key(0, device)
        )
        self.cfg = with_capacity(self.cfg, self.world, self.state)

    def prepare(self) -> Row:
        """Compile, capture, take one step and compare it with the eager one."""
        iteration = partial(train_step.train_step, self.cfg, self.world)
        parts = self.compile_parts()
        memory.reset_peak(self.device)
        captured = self.capture(iteration, parts)
        captured.step()
        row = {
            "replay_mode": captured.replay_mode,
            "peak_bytes": memory.peak_bytes(self.device),
            "cold_s": side_by_side.seconds_since_start(),
            "compiles": side_by_side.compile_seconds(),
            "capture_ms": captured.capture_ms,
        }
        self.step = captured.step

        eager_state, _ = iteration(self.state)
        row["difference_from_eager"] = relative_difference(
            captured.state, eager_state, self.state
        )
        self.rollout_step = self.capture(self.rollout, parts).step
        return row

    def measure(self) -> Row:
        """Median and spread of an iteration and of its rollout, and kernels."""
        row = time_steps(self.step, self.synchronise)
        rollout_ms = time_steps(self.rollout_step, self.synchronise)[
            "iteration_ms"
        ]
        n_steps = self.cfg.ppo.n_envs * self.cfg.ppo.n_steps
        row |= {
            "rollout_ms": rollout_ms,
            "steps_per_s": 1e3 * n_steps / row["iteration_ms"],
            "rollout_steps_per_s": 1e3 * n_steps / rollout_ms,
        }
        if self.device == "cuda":
            row |= profile_kernels(self.step)
        return row

    def compile_parts(self) -> train_step.StepFunctions:
        """The parts of the training step that this mode calls."""
        return strategies.select_strategy(
            train_step.collect,
            train_step.EAGER_PARTS,
            self.cfg,
            self.world,
            self.state,
            self.strategy(),
        )[0]

    def strategy(self) -> str:
        """How the parts are compiled in this mode."""
        if self.mode.startswith("eager"):
            return "eager"
        if self.mode == "forward":
            return "forward"
        return "one-graph"

    def capture(
        self,
        step: Callable[..., tuple[Any, Any]],
        parts: train_step.StepFunctions,
    ) -> CapturedStep[Any, Any]:
        """A step as this mode runs it."""
        if self.mode in LOOP_BODY_MODES:
            return capture_loop_bodies(
                step, parts, self.state, strict=self.device == "cuda"
            )
        use_graph = (
            self.mode in ("captured", "eager-graph") and self.device == "cuda"
        )
        return capture(
            partial(step, parts=parts),
            self.state,
            use_cuda_graph=use_graph,
            strict=use_graph,
        )

    def rollout(
        self, state: Any, parts: train_step.StepFunctions
    ) -> tuple[Any, Any]:
        """Rollout and advantages alone."""
        collected = train_step.collect(self.cfg, self.world, state, parts)
        after = state._replace(
            env_state=collected.rollout_state.env_state,
            episode_stats=collected.rollout_state.episode_stats,
            key=collected.key,
        )
        return after, collected.batch

    def synchronise(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    main()
