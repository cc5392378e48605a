"""Where the time of a training iteration goes: Python, operators, kernels, recordings and waits for the device.

    python experiments/benchmarks/profile_update.py --mode captured --n-envs 4 --n-steps 128 --batch-size 128

Trains on CartPole. Modes: `captured` (compiled parts, one graph launch each), `compiled`, `forward`, `eager`. Prints
what was compiled and recorded and why anything was skipped, the calls that wait for the device, a table of PyTorch's
profiler and one of cProfile, each over `--iterations` iterations after the first.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from funcppo import train_step
from funcppo.config import Config, PPOConfig
from funcppo.core import random
from funcppo.envs import classic
from funcppo.envs.base import NoWorld
from funcppo.nets import networks as mlp
from funcppo.runtime.capture import capture
from funcppo.runtime.compile import select_strategy
from funcppo.runtime.monitor import Monitor

# calls in which the host waits for a GPU
WAITING_CALLS = (
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaDeviceSynchronize",
    "aten::item",
    "cudaMemcpy",
)
STRATEGY_OF_MODE = {
    "captured": "one-graph",
    "compiled": "one-graph",
    "forward": "forward",
    "eager": "eager",
}


def main() -> None:
    """Profile and print."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--mode", default="captured", choices=list(STRATEGY_OF_MODE)
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--n-steps", type=int, default=128)
    parser.add_argument("--n-envs", type=int, default=4)
    parser.add_argument("--n-epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument(
        "--rows", type=int, default=15, help="of the printed tables"
    )
    args = parser.parse_args()
    with Monitor() as monitor:
        step = make_step(args, monitor)
        with monitor.timer("first iteration"):
            step()
        monitor.end_warmup()

        def run_iterations() -> None:
            for _ in range(args.iterations):
                step()

        print_operators(run_iterations, args.device, args.rows)
        print_python(run_iterations, args.rows)
        print(json.dumps(monitor.report(), indent=1))
        print(
            monitor.warning()
            or "nothing was compiled or recorded after the first iteration"
        )


def make_step(args: argparse.Namespace, monitor: Monitor) -> Callable[[], Any]:
    """An iteration in the mode of the command line."""
    ppo = PPOConfig(
        n_envs=args.n_envs,
        n_steps=args.n_steps,
        n_epochs=args.n_epochs,
        n_minibatches=args.n_envs * args.n_steps // args.batch_size,
    )
    env = classic.cartpole()
    cfg = Config(
        ppo=ppo,
        env=env,
        agent=mlp.mlp_agent(mlp.MLPConfig(n_obs=4, n_actions=2)),
    )
    state = train_step.init(cfg, NoWorld(), random.key(0, args.device))
    strategy = STRATEGY_OF_MODE[args.mode]
    parts, _ = select_strategy(
        train_step.collect,
        train_step.EAGER_PARTS,
        cfg,
        NoWorld(),
        state,
        strategy,
    )

    def step(
        state: train_step.TrainState,
    ) -> tuple[train_step.TrainState, train_step.Metrics]:
        return train_step.train_step(cfg, NoWorld(), state, parts)

    captured = capture(step, state, use_cuda_graph=args.mode == "captured")
    monitor.record_capture(captured)
    return captured.step


def print_operators(
    run_iterations: Callable[[], None], device: str, n_rows: int
) -> None:
    """PyTorch's profiler: operators, kernels and waits."""
    with torch.profiler.profile() as profile:
        run_iterations()
        if device == "cuda":
            torch.cuda.synchronize()
    order = (
        "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    )
    print(
        profile.key_averages().table(
            sort_by=order, row_limit=n_rows, max_name_column_width=60
        )
    )
    waits = Counter(
        event.name
        for event in profile.events() or ()
        if event.name in WAITING_CALLS
    )
    print(
        f"waits for the device, the closing one included: {dict(waits) or 'none'}"
    )


def print_python(run_iterations: Callable[[], None], n_rows: int) -> None:
    """cProfile: Python's own share."""
    profile = cProfile.Profile()
    profile.runcall(run_iterations)
    pstats.Stats(profile).sort_stats("tottime").print_stats(n_rows)


if __name__ == "__main__":
    main()
