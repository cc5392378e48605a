"""The learner on classic control: CartPole-v1 and Pendulum-v1, all seeds at once as one vectorised training step.

    python experiments/learn_control.py cartpole      # 10 seeds, 500,000 steps each, published settings
    python experiments/learn_control.py pendulum      # 5 seeds, 300,000 steps each
    python experiments/learn_control.py cartpole --seeds 100 101 102

Writes results/learn_<name>.json: for each seed the mean return of the last 100 episodes (and those that ended in the
same update as the hundredth), the learning curve, hardware, versions and commit. Exits 1 when a seed misses the claim.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funcppo import random, tree
from funcppo.config import Config, PPOConfig
from funcppo.envs.base import NoWorld
from funcppo.envs.classic_control import cartpole, pendulum
from funcppo.nets import feedforward as mlp
from funcppo.runtime.compile import STRATEGIES, StrategyRecord, select_strategy
from funcppo.train_step import EAGER_PARTS, collect, init, train_step, vmap_parts

RESULTS = Path(__file__).parent / "results"
REWARD_SCALE = 0.1  # Pendulum's rewards reach -16 a step


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What is learnt, and how well at least by every seed."""

    cfg: Config
    at_least: float  # mean return of the last 100 episodes
    scale: float  # of the reward that the learner saw
    seeds: tuple[int, ...]
    source: str


CLAIMS = {
    "cartpole": Claim(
        cfg=Config(
            ppo=PPOConfig(),
            env=cartpole.environment(cartpole.CartPoleConfig()),
            agent=mlp.agent(mlp.MLPConfig(n_obs=4, n_actions=2)),
        ),
        at_least=475.0,
        scale=1.0,
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
            env=pendulum.environment(pendulum.PendulumConfig(reward_scale=REWARD_SCALE)),
            agent=mlp.gaussian_agent(mlp.MLPConfig(n_obs=3, n_actions=1)),
        ),
        at_least=-250.0,
        scale=REWARD_SCALE,
        seeds=tuple(range(5)),
        source="gamma, epochs and learning rate of RL Baselines3 Zoo's Pendulum-v1",
    ),
}


def learn(claim: Claim, seeds: tuple[int, ...], device: str, rung: str) -> tuple[Tensor, Tensor, float, StrategyRecord]:
    """Episodes and their summed returns [update, seed], seconds without compiling, and how the step was run."""
    cfg, world = claim.cfg, NoWorld()
    state = tree.map(lambda *x: torch.stack(x), *[init(cfg, world, random.key(seed, device)) for seed in seeds])
    with torch.no_grad():
        parts, record = select_strategy(collect, vmap_parts(EAGER_PARTS), cfg, world, state, rung)
        start, rows = time.perf_counter(), []
        for update in range(cfg.ppo.n_updates):
            state, metrics = train_step(cfg, world, state, parts)
            rows.append((metrics.rollout.n_episodes, metrics.rollout.episode_return_sum / claim.scale))
            if update % 50 == 49:
                shown = " ".join(f"{float(x):.0f}" for x in last_returns(*map(torch.stack, zip(*rows)), 100))
                print(
                    f"update {update + 1}/{cfg.ppo.n_updates}, {time.perf_counter() - start:.0f} s: {shown}", flush=True
                )
    episodes, returns = (torch.stack(x).cpu() for x in zip(*rows))
    return episodes, returns, time.perf_counter() - start, record


def last_returns(episodes: Tensor, returns: Tensor, n: int) -> list[float]:
    """The mean return of each seed's last `n` episodes; whole updates, so a few more."""
    means = []
    for count, total in zip(episodes.T.flip(1), returns.T.flip(1)):
        enough = int((count.cumsum(0) < n).sum()) + 1
        means.append(float(total[:enough].sum() / count[:enough].sum()))
    return means


def curve(episodes: Tensor, returns: Tensor, points: int = 20) -> list[list[float]]:
    """Mean return of the episodes that ended in each twentieth of the run, a list a seed."""
    pairs = zip(returns.tensor_split(points), episodes.tensor_split(points))
    return torch.stack([r.sum(0) / n.sum(0) for r, n in pairs], 1).tolist()


def machine(device: str) -> dict[str, Any]:
    """Where the numbers were made."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), "unknown")
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip(),
    }


def main() -> int:
    """Learn, write, and say whether the claim holds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", choices=CLAIMS)
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--strategy", default="auto", choices=("auto", *STRATEGIES))
    parser.add_argument("--out", type=Path, help="default: results/learn_<name>.json")
    args = parser.parse_args()
    torch.set_num_threads(1)  # small tensors: a second thread costs more than it brings
    claim = CLAIMS[args.name]
    seeds = tuple(args.seeds or claim.seeds)
    episodes, returns, seconds, record = learn(claim, seeds, args.device, args.strategy)
    means, ppo = last_returns(episodes, returns, 100), claim.cfg.ppo
    result = {
        "claim": f"mean return of the last 100 episodes at least {claim.at_least} for every seed",
        "holds": min(means) >= claim.at_least,
        "settings": claim.source,
        "environment_steps": ppo.n_updates * ppo.n_envs * ppo.n_steps,
        "last_100_returns": dict(zip(map(str, seeds), means)),
        "seconds_all_seeds": seconds,
        "record": asdict(record),
        "ppo": asdict(ppo),
        "machine": machine(args.device),
        "curve": dict(zip(map(str, seeds), curve(episodes, returns))),
    }
    out = args.out or RESULTS / f"learn_{args.name}.json"
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{args.name}: worst seed {min(means):.1f}, mean {sum(means) / len(means):.1f}; written to {out}")
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
