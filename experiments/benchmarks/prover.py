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

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks import side_by_side
from experiments.benchmarks.cartpole import (
    MODES,
    StepCase,
    cells_parser,
    time_steps,
)
from experiments.benchmarks.side_by_side import Row
from experiments.paths import DATA
from funcppo import train_step
from funcppo.config import PPOConfig
from funcppo.core import random
from funcppo.kg.config import ProverTaskConfig
from funcppo.kg.graph import loaders
from funcppo.kg.run.train import with_capacity
from funcppo.kg.search import task as prover_task

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
    modes = ["captured", "compiled", "eager"]
    parser = cells_parser(__doc__, WORK, MODES, modes)
    parser.add_argument(
        "--data", default=str(DATA), help="folder of the standard data sets"
    )
    args = parser.parse_args()
    if args.cell:
        case = ProverCase(*args.cell)
        return side_by_side.run_cell(case.prepare, case.measure)

    cells = {}
    for work, mode in itertools.product(args.work, args.mode):
        name = f"{work} {mode} {args.device} packed"
        cells[name] = [work, mode, args.device, args.data]
    side_by_side.run_cells(__file__, cells, 8, args.device, args.out)


class ProverCase(StepCase):
    """One work, run in one mode; its rollout apart too."""

    def __init__(
        self, work: str, mode: str, device: str, data_folder: str
    ) -> None:
        dataset, settings, ppo = WORK[work]
        task = prover_task.build_task(
            loaders.load(dataset.format(data=data_folder)), settings, device
        )
        cfg = prover_task.build_config(task, ppo)
        world = prover_task.training_world(task)
        state = train_step.init(cfg, world, random.key(0, device))
        cfg = with_capacity(cfg, world, state)
        super().__init__(mode, device, cfg, world, state)

    def prepare(self) -> Row:
        """Prepare the rollout too."""
        row = super().prepare()
        self.rollout_step = self.capture(self.rollout).step
        return row

    def measure(self) -> Row:
        """Median and spread of an iteration and of its rollout, and kernels."""
        row = super().measure()
        rollout = time_steps(self.rollout_step, self.synchronise)
        n_steps = self.cfg.ppo.n_envs * self.cfg.ppo.n_steps
        return row | {
            "rollout_ms": rollout["iteration_ms"],
            "steps_per_s": 1e3 * n_steps / row["iteration_ms"],
            "rollout_steps_per_s": 1e3 * n_steps / rollout["iteration_ms"],
        }

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


if __name__ == "__main__":
    main()
