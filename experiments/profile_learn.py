"""Where an iteration's time goes: Python, operators, kernels, recordings and waits for the device.

    python experiments/profile_learn.py --compile-mode captured --n-envs 4 --n-steps 128 --n-epochs 4 --batch-size 128

Learns CartPole. Modes: `captured` (compiled parts, one graph launch each), `compiled`, `forward`, `eager`. Prints
what was compiled and recorded and why anything was skipped, the calls that wait for the device, a table of PyTorch's
profiler and one of cProfile, each over `--iterations` iterations after the first.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from funcppo import random, train_step
from funcppo.config import Config, PPOConfig
from funcppo.envs.base import NoWorld
from funcppo.envs.classic_control import cartpole
from funcppo.nets import feedforward as mlp
from funcppo.runtime import compile as ladder
from funcppo.runtime.capture import capture
from funcppo.runtime.monitor import Monitor

RUNG = {"captured": "one-graph", "compiled": "one-graph", "forward": "forward", "eager": "eager"}
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "aten::item", "cudaMemcpy")


def main() -> None:
    """Profile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile-mode", default="captured", choices=list(RUNG))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--n-steps", type=int, default=128)
    parser.add_argument("--n-envs", type=int, default=4)
    parser.add_argument("--n-epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--rows", type=int, default=15)
    args = parser.parse_args()
    with Monitor() as monitor:
        step = learner(args, monitor)
        with monitor.timer("first iteration"):
            step()
        monitor.end_warmup()
        many = lambda: [step() for _ in range(args.iterations)]
        kernels(many, args)
        python(many, args)
        print(json.dumps(monitor.report(), indent=1))
        print(monitor.warning() or "nothing was compiled or recorded after the first iteration")


def learner(args: argparse.Namespace, monitor: Monitor) -> Callable[[], Any]:
    """An iteration in the mode asked for."""
    ppo = PPOConfig(
        n_envs=args.n_envs,
        n_steps=args.n_steps,
        n_epochs=args.n_epochs,
        n_minibatches=args.n_envs * args.n_steps // args.batch_size,
    )
    env = cartpole.environment(cartpole.CartPoleConfig())
    cfg = Config(ppo=ppo, env=env, agent=mlp.agent(mlp.MLPConfig(n_obs=4, n_actions=2)))
    state = train_step.init(cfg, NoWorld(), random.key(0, args.device))
    rung = RUNG[args.compile_mode]
    parts, _ = ladder.select_strategy(train_step.collect, train_step.EAGER_PARTS, cfg, NoWorld(), state, rung)
    step = lambda state: train_step.train_step(cfg, NoWorld(), state, parts)
    captured = capture(step, state, use_cuda_graph=args.compile_mode == "captured")
    monitor.record_capture(captured)
    return captured.step


def kernels(many: Callable[[], Any], args: argparse.Namespace) -> None:
    """PyTorch's profiler: operators, kernels and waits."""
    with torch.profiler.profile() as profile:
        many()
        if args.device == "cuda":
            torch.cuda.synchronize()
    order = "self_device_time_total" if args.device == "cuda" else "self_cpu_time_total"
    print(profile.key_averages().table(sort_by=order, row_limit=args.rows, max_name_column_width=60))
    waits = Counter(event.name for event in profile.events() if event.name in WAITS)
    print(f"waits for the device, the closing one included: {dict(waits) or 'none'}")


def python(many: Callable[[], Any], args: argparse.Namespace) -> None:
    """cProfile: Python's own share."""
    profile = cProfile.Profile()
    profile.runcall(many)
    pstats.Stats(profile).sort_stats("tottime").print_stats(args.rows)


if __name__ == "__main__":
    main()
