"""Learning curves of every environment of `fp.envs.make`, with its published settings, beside published returns.

    python experiments/benchmarks/learning_curves.py --device cuda
    python experiments/benchmarks/learning_curves.py --only CartPole-v1 Acrobot-v1 --seeds 10
    python experiments/benchmarks/learning_curves.py --only CartPole-v1 --seeds 2 --steps 20000 --out /tmp/curves.json

Writes experiments/results/learning_curves.json: a row for each environment, which is written anew after each of its
evaluations and kept when other environments are run later. A row holds the returns of each seed at each evaluation
(greedy and sampled, on environments of their own), their interquartile mean with its interval, the seconds, how the
step was run, and what others have published. PureJaxRL has published curves of MinAtar as pictures, without numbers.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import write_record
from experiments.paths import RESULTS, make_parser
from experiments.provenance import describe_machine
from funcppo import rl
from funcppo.envs import ENVIRONMENTS
from funcppo.rl import POLICIES, make_learner, published_settings
from funcppo.trainer import Evaluations, Progress, batch_size, train_many

Row = dict[str, Any]

# Returns that others report: mean, deviation, environment steps.
# vwxyzjn/cleanrl: docs/rl-algorithms/ppo.md, returns of training, three seeds each.
CLEANRL = "CleanRL, docs/rl-algorithms/ppo.md"
# DLR-RM/rl-baselines3-zoo: benchmark.md, greedy policy, one run each, the deviation is that of its episodes.
ZOO = "RL Baselines3 Zoo (Stable-Baselines3), benchmark.md"
PUBLISHED_RETURNS = {
    "CartPole-v1": (
        (CLEANRL, 490.04, 6.12, 500_000),
        (ZOO, 500.0, 0.0, 100_000),
    ),
    "Acrobot-v1": (
        (CLEANRL, -86.36, 1.32, 500_000),
        (ZOO, -73.506, 18.201, 1_000_000),
    ),
    "MountainCar-v0": (
        (CLEANRL, -200.0, 0.0, 500_000),
        (ZOO, -110.423, 19.473, 1_000_000),
    ),
    "Pendulum-v1": ((ZOO, -172.225, 104.159, 100_000),),
    "MountainCarContinuous-v0": ((ZOO, 88.343, 2.572, 20_000),),
}


def main() -> int:
    """Train, and write the record."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=ENVIRONMENTS, metavar="ENV"
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, help="default: as published")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "learning_curves.json"
    )
    args = parser.parse_args()
    # Small tensors: a second thread costs more than it brings.
    torch.set_num_threads(1)

    for name in args.only or ENVIRONMENTS:
        Curve(name, args).train()
    return 0


class Curve:
    """The row of an environment, which its training fills."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.settings = published_settings(name)
        self.steps = args.steps or self.settings.steps
        self.args = args
        self.evaluations: list[Evaluations] = []
        self.row: Row = {
            "env": name,
            "seeds": args.seeds,
            "episodes": 32,
            "settings": self.settings.source,
            "ppo": dataclasses.asdict(self.settings.ppo),
            "published": [
                dict(zip(("source", "mean", "deviation", "steps"), one))
                for one in PUBLISHED_RETURNS.get(name, ())
            ],
            "machine": describe_machine(args.device.partition(":")[0]),
            "is_complete": False,
            "steps": [],
            "seconds": [],
        }

    def train(self) -> None:
        """Train all seeds in one step, and write the row after each evaluation."""
        start = time.perf_counter()
        learner = make_learner(self.row["env"], self.settings)
        n_updates = -(-self.steps // batch_size(self.settings.ppo))
        train_many(
            learner,
            self.steps,
            seeds=self.args.seeds,
            device=self.args.device,
            strategy="auto",
            callbacks=[self.record],
            evaluate_every=max(1, n_updates // 20),
            n_episodes=self.row["episodes"],
        )
        self.row["is_complete"] = True
        self.row["seconds_in_all"] = time.perf_counter() - start
        write_row(self.args.out, self.row)

    def record(self, progress: Progress[Evaluations]) -> None:
        """Add an evaluation to the row, and print it."""
        if progress.evaluation is None:
            return
        self.evaluations.append(progress.evaluation)
        self.row["strategy"] = progress.record and dataclasses.asdict(
            progress.record
        )
        self.row["steps"].append(progress.n_steps)
        # Of updates and evaluations, without compiling.
        self.row["seconds"].append(progress.seconds)
        for policy in POLICIES:
            self.row[policy] = returns_of(self.evaluations, policy)
        write_row(self.args.out, self.row)
        shown = {
            policy: f"{self.row[policy]['iqm'][-1]:.1f}" for policy in POLICIES
        }
        line = {"env": self.row["env"], "steps": progress.n_steps, **shown}
        print(json.dumps(line), flush=True)


def returns_of(evaluations: list[Evaluations], policy: str) -> Row:
    """Returns of all seeds at each evaluation, and their interquartile means with intervals."""
    by_seed = np.array(
        [[getattr(one, policy).mean for one in seeds] for seeds in evaluations]
    )
    estimates = [rl.estimate(returns) for returns in by_seed]
    unfinished = [
        sum(getattr(one, policy).n_unfinished for one in seeds)
        for seeds in evaluations
    ]
    return {
        "iqm": [one.value for one in estimates],
        "low": [one.low for one in estimates],
        "high": [one.high for one in estimates],
        "by_seed": by_seed.T.tolist(),
        "n_unfinished_episodes": unfinished,
    }


def write_row(out: Path, row: Row) -> None:
    """Put a row in place of the one of its environment in a record, which keeps the others."""
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    rows = [other for other in rows if other["env"] != row["env"]]
    write_record(out, {"rows": [*rows, row]})


if __name__ == "__main__":
    sys.exit(main())
