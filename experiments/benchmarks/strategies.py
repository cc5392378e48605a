"""What each compilation strategy is worth: one training iteration under each, and whether the numbers agree.

    python experiments/benchmarks/strategies.py --device cuda --out experiments/results/strategies-h100.json

Rows: a CartPole iteration (4 and 2048 environments x 128 steps, 4 epochs x 4 minibatches, 64-64 tanh) and a prover
iteration (embedded Countries S3, 64 x 64, 2 epochs, minibatches of 128) under every strategy of `runtime/compile.py`;
each with its cold start, the median and spread of the iteration, and the largest difference of params from the eager
strategy after one update from the same state, beside the largest change. On a GPU also: random bits and the scores of
an evaluation, on the GPU against the CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import Row, write_record
from experiments.provenance import describe_machine
from funcppo import train_step
from funcppo.config import Config, PPOConfig
from funcppo.core import random, tree
from funcppo.envs.base import NoWorld
from funcppo.envs.classic_control import cartpole
from funcppo.kg.graph import loaders
from funcppo.kg.ranking import scorers
from funcppo.kg.search import task as prover_task
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.kg.search.slot_scheduler import evaluate_step
from funcppo.nets import feedforward as mlp
from funcppo.runtime.compile import STRATEGIES, select_strategy

PROVER_PPO = PPOConfig(n_envs=64, n_steps=64, n_epochs=2, n_minibatches=32)


def main() -> None:
    """Run the rows and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="record to write"
    )
    parser.add_argument(
        "--repeats", type=int, default=7, help="timed iterations, two or more"
    )
    parser.add_argument(
        "--work", nargs="*", default=list(WORK), choices=list(WORK)
    )
    parser.add_argument(
        "--strategies",
        nargs="*",
        default=list(reversed(STRATEGIES)),
        choices=STRATEGIES,
    )
    args = parser.parse_args()

    record: dict[str, Any] = {
        "machine": describe_machine(args.device),
        "rows": [],
    }
    if args.device == "cuda":
        record["parity"] = compare_devices()
    for name in args.work:
        cfg, world = WORK[name](args.device)
        state = train_step.init(cfg, world, random.key(0, args.device))
        for strategy in args.strategies:
            torch._dynamo.reset()
            row = {"work": name, "strategy": strategy}
            try:
                row |= measure(cfg, world, state, strategy, args.repeats)
            except Exception as error:
                lines = str(error).splitlines() or [""]
                row["error"] = f"{type(error).__name__}: {lines[0]}"
            record["rows"].append(row)
            print(json.dumps(row), flush=True)
            write_record(args.out, record)


def cartpole_work(n_envs: int, device: str) -> tuple[Config, Any]:
    """CartPole with the published settings."""
    cfg = Config(
        ppo=PPOConfig(n_envs=n_envs, n_steps=128),
        env=cartpole.environment(cartpole.CartPoleConfig()),
        agent=mlp.agent(mlp.MLPConfig(n_obs=4, n_actions=2)),
    )
    return cfg, NoWorld()


def prover_work(device: str) -> tuple[Config, Any]:
    """Countries S3 to height 2."""
    task = prover_task.build_task(
        loaders.load("countries_s3"), ProverTaskConfig(max_height=2), device
    )
    return prover_task.build_config(
        task, PROVER_PPO
    ), prover_task.training_world(task)


WORK: dict[str, Callable[[str], tuple[Config, Any]]] = {
    "cartpole 4x128": partial(cartpole_work, 4),
    "cartpole 2048x128": partial(cartpole_work, 2048),
    "prover 64x64": prover_work,
}


def measure(
    cfg: Config, world: Any, state: Any, strategy: str, repeats: int
) -> Row:
    """One strategy: seconds to the end of the first iteration, milliseconds of the next, difference from eager."""
    start = time.perf_counter()
    parts, _ = select_strategy(
        train_step.collect, train_step.EAGER_PARTS, cfg, world, state, strategy
    )
    after, _ = train_step.train_step(cfg, world, state, parts)
    synchronise(state)
    cold_seconds = time.perf_counter() - start

    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        train_step.train_step(cfg, world, state, parts)
        synchronise(state)
        times.append(1e3 * (time.perf_counter() - start))
    quartiles = statistics.quantiles(times, n=4)

    eager, _ = train_step.train_step(cfg, world, state, train_step.EAGER_PARTS)
    return {
        "cold_s": cold_seconds,
        "iteration_ms": statistics.median(times),
        "spread_ms": quartiles[2] - quartiles[0],
        "max_difference_from_eager": largest_difference(after, eager),
        "max_change": largest_difference(eager, state),
    }


def largest_difference(a: Any, b: Any) -> float:
    """The largest difference of a number in the params of two states."""
    return max(
        float((x - y).abs().max())
        for x, y in zip(tree.leaves(a.params), tree.leaves(b.params))
    )


def synchronise(state: Any) -> None:
    """Wait for the device."""
    if state.key.is_cuda:
        torch.cuda.synchronize()


def compare_devices() -> dict[str, Any]:
    """Random bits, and the scores of test triples by untrained params, GPU against CPU."""
    bits = [
        random.bits(random.key(7, device), (10_000,)).cpu()
        for device in ("cpu", "cuda")
    ]
    scores = [score_test_triples(device) for device in ("cpu", "cuda")]
    proved = [torch.isfinite(score) for score in scores]
    return {
        "bits_equal": bool(torch.equal(*bits)),
        "same_atoms_proved": bool(torch.equal(*proved)),
        "atoms_proved": int(proved[0].sum()),
        "largest_log_odds_difference": float(
            (scores[0] - scores[1])[proved[0]].abs().max()
        ),
    }


def score_test_triples(device: str) -> torch.Tensor:
    """The log-odds of test triples of Countries S3 by params away from their first values, on the host."""
    task = prover_task.build_task(
        loaders.load("countries_s3"), ProverTaskConfig(max_height=2), device
    )
    cfg = prover_task.build_config(task, PPOConfig())
    params = cfg.agent.init(cfg.agent.cfg, random.key(1, device))
    params = tree.map(
        lambda x: (
            x
            + 0.2
            * torch.sin(torch.arange(x.numel(), device=x.device).view(x.shape))
        ),
        params,
    )
    search = scorers.search_config(
        task,
        cfg,
        "success",
        slots=64,
        beam=64,
        rows_per_step=256,
        chunk_size=256,
    )
    atoms = torch.from_numpy(task.dataset.test).to(device)
    return scorers.make_policy_scorer(search, task, params, evaluate_step)(
        atoms
    ).cpu()


if __name__ == "__main__":
    main()
