"""Claim: PPO learns CartPole-v1 and Pendulum-v1; all seeds at once as one vectorised training step.

    python experiments/benchmarks/learn_control.py cartpole      # 10 seeds, 500,000 steps each, published settings
    python experiments/benchmarks/learn_control.py pendulum      # 5 seeds, 300,000 steps each
    python experiments/benchmarks/learn_control.py cartpole --seeds 100 101 102

Writes experiments/results/learn_control-<name>.json: for each seed the mean return of the last 100 episodes (and those
that ended in the same update as the hundredth), the learning curve, hardware, versions and commit. Exits 1 when a seed
misses the claim.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import write_record
from experiments.paths import RESULTS
from experiments.provenance import describe_machine
from funcppo.config import Config, PPOConfig
from funcppo.core import random, tree
from funcppo.envs.base import NoWorld
from funcppo.envs.classic_control import cartpole, pendulum
from funcppo.nets import feedforward as mlp
from funcppo.runtime.compile import STRATEGIES, StrategyRecord, select_strategy
from funcppo.train_step import (
    EAGER_PARTS,
    collect,
    init,
    train_step,
    vmap_parts,
)

PENDULUM_REWARD_SCALE = 0.1  # its rewards reach -16 a step
N_LAST_EPISODES = 100
N_CURVE_POINTS = 20
PRINT_EVERY_UPDATES = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A task, and the return that every seed must reach."""

    cfg: Config
    min_return: float  # mean of the last 100 episodes
    reward_scale: float  # of the reward that the learner sees
    seeds: tuple[int, ...]
    source: str  # of the settings


class Curves(NamedTuple):
    """Episodes of each update and seed."""

    n_episodes: Tensor  # [U, N], that ended in the update
    return_sum: Tensor  # [U, N], of their returns


CLAIMS = {
    "cartpole": Claim(
        cfg=Config(
            ppo=PPOConfig(),
            env=cartpole.environment(cartpole.CartPoleConfig()),
            agent=mlp.agent(mlp.MLPConfig(n_obs=4, n_actions=2)),
        ),
        min_return=475.0,
        reward_scale=1.0,
        seeds=tuple(range(10)),
        source="the settings of CleanRL's ppo.py, which reports 490 +- 6",
    ),
    "pendulum": Claim(
        cfg=Config(
            ppo=PPOConfig(
                n_steps=256,
                n_updates=292,
                n_epochs=10,
                n_minibatches=16,
                learning_rate=1e-3,
                gamma=0.9,
                entropy_coef=0.0,
                value_loss="plain",
            ),
            env=pendulum.environment(
                pendulum.PendulumConfig(reward_scale=PENDULUM_REWARD_SCALE)
            ),
            agent=mlp.gaussian_agent(mlp.MLPConfig(n_obs=3, n_actions=1)),
        ),
        min_return=-250.0,
        reward_scale=PENDULUM_REWARD_SCALE,
        seeds=tuple(range(5)),
        source="gamma, epochs and learning rate of RL Baselines3 Zoo's Pendulum-v1",
    ),
}


def main() -> int:
    """Train, write the record, and return the exit status: 1 when a seed misses the claim."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=CLAIMS)
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument(
        "--n-updates",
        type=int,
        help="fewer than the claim is about, to try the program",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--strategy", default="auto", choices=("auto", *STRATEGIES)
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="default: experiments/results/learn_control-<name>.json",
    )
    args = parser.parse_args()
    torch.set_num_threads(
        1
    )  # small tensors: a second thread costs more than it brings
    claim = CLAIMS[args.name]
    seeds = tuple(args.seeds or claim.seeds)
    ppo = claim.cfg.ppo
    n_updates = args.n_updates or ppo.n_updates

    start = time.perf_counter()
    curves, record = train_seeds(
        claim, seeds, n_updates, args.device, args.strategy
    )
    seconds = time.perf_counter() - start
    returns = last_returns(curves, N_LAST_EPISODES)

    holds = min(returns) >= claim.min_return
    out = args.out or RESULTS / f"learn_control-{args.name}.json"
    result = {
        "claim": f"mean return of the last {N_LAST_EPISODES} episodes at least {claim.min_return} for every seed",
        "holds": holds,
        "settings": claim.source,
        "environment_steps": n_updates * ppo.n_envs * ppo.n_steps,
        "last_100_returns": dict(zip(map(str, seeds), returns)),
        "seconds_all_seeds": seconds,
        "record": asdict(record),
        "ppo": asdict(ppo),
        "machine": describe_machine(args.device),
        "curve": dict(zip(map(str, seeds), learning_curves(curves))),
    }
    write_record(out, result)
    print(
        f"{args.name}: worst seed {min(returns):.1f}, mean {sum(returns) / len(returns):.1f}; written to {out}"
    )
    return 0 if holds else 1


def train_seeds(
    claim: Claim,
    seeds: tuple[int, ...],
    n_updates: int,
    device: str,
    strategy: str,
) -> tuple[Curves, StrategyRecord]:
    """The episodes of every update and seed, and how the step was run."""
    cfg, world = claim.cfg, NoWorld()
    state = tree.map(
        lambda *x: torch.stack(x),
        *[init(cfg, world, random.key(seed, device)) for seed in seeds],
    )
    rows: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        parts, record = select_strategy(
            collect, vmap_parts(EAGER_PARTS), cfg, world, state, strategy
        )
        for update in range(n_updates):
            state, metrics = train_step(cfg, world, state, parts)
            rows.append(
                (
                    metrics.rollout.n_episodes,
                    metrics.rollout.episode_return_sum / claim.reward_scale,
                )
            )
            if (update + 1) % PRINT_EVERY_UPDATES == 0:
                returns = last_returns(stack_rows(rows), N_LAST_EPISODES)
                print(
                    f"update {update + 1}/{n_updates}: {' '.join(f'{x:.0f}' for x in returns)}",
                    flush=True,
                )
    return stack_rows(rows), record


def stack_rows(rows: list[tuple[Tensor, Tensor]]) -> Curves:
    """The numbers of all updates, on the host."""
    n_episodes, return_sum = (
        torch.stack(column).cpu() for column in zip(*rows)
    )
    return Curves(n_episodes, return_sum)


def last_returns(curves: Curves, n: int) -> list[float]:
    """The mean return of each seed's last `n` episodes; whole updates, so a few more."""
    means = []
    for n_episodes, return_sum in zip(
        curves.n_episodes.T.flip(1), curves.return_sum.T.flip(1)
    ):
        n_updates = int((n_episodes.cumsum(0) < n).sum()) + 1
        means.append(
            float(return_sum[:n_updates].sum() / n_episodes[:n_updates].sum())
        )
    return means


def learning_curves(curves: Curves) -> list[list[float]]:
    """Mean return of the episodes that ended in each twentieth of the run, a list a seed."""
    parts = zip(
        curves.return_sum.tensor_split(N_CURVE_POINTS),
        curves.n_episodes.tensor_split(N_CURVE_POINTS),
    )
    means = [
        return_sum.sum(0) / n_episodes.sum(0)
        for return_sum, n_episodes in parts
    ]
    return torch.stack(means, 1).tolist()


if __name__ == "__main__":
    sys.exit(main())
