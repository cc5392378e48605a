"""An eager update of PPO on a CPU beside Stable-Baselines3's, in turns in one process.

    python experiments/benchmarks/eager_update.py --out experiments/results/eager_update.json

CartPole by one thread, a 64-64 tanh network each of actor and critic, the settings of both libraries equal: Stable-
Baselines3's defaults, and those of CleanRL. Of funcppo: its own CartPole, and Gymnasium's, which Stable-Baselines3
steps. An update is a rollout and its epochs. A ratio is of funcppo's seconds to those of Stable-Baselines3 in the same
turn, since a machine that others use is slower at times; a row has the quartiles over the turns, and the lowest time.
Needs stable-baselines3 beside what funcppo needs.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

import funcppo as fp
from experiments.benchmarks.side_by_side import write_record
from experiments.paths import make_parser
from experiments.provenance import describe_machine

# Environments, steps, minibatches and epochs.
SETTINGS = {
    "Stable-Baselines3's defaults": (1, 2048, 32, 10),
    "CleanRL's defaults": (4, 128, 4, 4),
}
Update = Callable[[], object]


def main() -> None:
    """Time the updates of all settings, and write them."""
    parser = make_parser(__doc__)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--out", type=Path, help="record to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name, sizes in SETTINGS.items():
        updates = {
            "sb3": by_stable_baselines(*sizes),
            "funcppo": by_funcppo(fp.envs.cartpole(), *sizes),
            "funcppo, gymnasium": by_funcppo(gymnasium_cartpole(), *sizes),
        }
        seconds = time_in_turns(updates, args.turns)
        for library, own in seconds.items():
            ratios = [x / y for x, y in zip(own, seconds["sb3"])]
            row = {"settings": name, "library": library}
            row |= {"n_envs": sizes[0], "n_steps": sizes[1]}
            row |= {"lowest_ms": 1e3 * min(own)}
            rows.append(row | {"ratio": statistics.median(ratios)})
            rows[-1]["ratios"] = statistics.quantiles(ratios)
            print(json.dumps(rows[-1]), flush=True)
    if args.out:
        write_record(args.out, {"machine": describe_machine(), "rows": rows})


def time_in_turns(
    updates: dict[str, Update], n_turns: int
) -> dict[str, list[float]]:
    """Seconds of each update in each turn, after one that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    for turn in range(1 + n_turns):
        for name, update in updates.items():
            start = time.perf_counter()
            update()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def gymnasium_cartpole() -> Any:
    """Gymnasium's CartPole, by the bridge."""
    import gymnasium

    return fp.envs.gymnasium(lambda: gymnasium.make("CartPole-v1"))


def by_funcppo(
    env: Any, n_envs: int, n_steps: int, n_minibatches: int, n_epochs: int
) -> Update:
    """Return a function that makes one update."""
    ppo = fp.ppo(
        env=env,
        network=fp.nets.mlp(64, 64),
        n_envs=n_envs,
        n_steps=n_steps,
        n_minibatches=n_minibatches,
        n_epochs=n_epochs,
        value_loss="plain",
        half_value_loss=False,
    )
    state = ppo.init(fp.random.key(0))

    def update() -> None:
        nonlocal state
        state, _ = ppo.step(state)

    return update


def by_stable_baselines(
    n_envs: int, n_steps: int, n_minibatches: int, n_epochs: int
) -> Update:
    """As `by_funcppo`, by Stable-Baselines3."""
    from stable_baselines3 import PPO  # pyright: ignore[reportMissingImports]
    from stable_baselines3.common.env_util import make_vec_env  # pyright: ignore[reportMissingImports]

    model = PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs),
        n_steps=n_steps,
        batch_size=n_envs * n_steps // n_minibatches,
        n_epochs=n_epochs,
        ent_coef=0.01,
        device="cpu",
    )
    n = n_envs * n_steps
    return lambda: model.learn(n, reset_num_timesteps=False)


if __name__ == "__main__":
    main()
