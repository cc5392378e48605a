"""What each rung of the ladder is worth: one training iteration, eager and compiled, and whether numbers agree.

    python experiments/bench_rungs.py --device cuda --out experiments/results/bench_rungs-h200.json

Rows: a CartPole iteration (4 and 2048 environments x 128 steps, 4 epochs x 4 minibatches, 64-64 tanh) and a prover
iteration (embedded Countries S3, 64 x 64, 2 epochs, minibatch 128) under every rung; each with its cold start, the
median and spread of the iteration, and its parity: the largest difference of params from the eager rung after one
update from the same state, as a share of the change. With a GPU, also: random bits, and the scores of the evaluator, on
the GPU against the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from funcppo import data, random, train_step, tree
from funcppo.config import Config, PPOConfig
from funcppo.envs.base import NoWorld
from funcppo.envs.classic_control import cartpole
from funcppo.evaluation import scorers
from funcppo.evaluation.slot_scheduler import evaluate_step
from funcppo.nets import feedforward as mlp
from funcppo.prover import task as prover_task
from funcppo.prover.config import ProverTaskConfig
from funcppo.runtime.compile import STRATEGIES, select_strategy


def main() -> None:
    """Run the rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--work", nargs="*", default=list(WORK), choices=list(WORK))
    parser.add_argument("--rungs", nargs="*", default=list(reversed(STRATEGIES)), choices=STRATEGIES)
    args = parser.parse_args()
    out: dict[str, Any] = {"machine": machine(args.device), "rows": []}
    if args.device == "cuda":
        out["parity"] = parity()
    for name in args.work:
        cfg, world = WORK[name](args.device)
        state = train_step.init(cfg, world, random.key(0, args.device))
        for rung in args.rungs:
            torch._dynamo.reset()
            row = {"work": name, "rung": rung} | measure(cfg, world, state, rung, args.repeats)
            out["rows"].append(row)
            print(json.dumps(row), flush=True)
            args.out.write_text(json.dumps(out, indent=1) + "\n")


def cartpole_work(n_envs: int) -> Callable[[str], tuple[Config, Any]]:
    """CartPole with the published settings."""
    return lambda device: (
        Config(
            ppo=PPOConfig(n_envs=n_envs, n_steps=128),
            env=cartpole.environment(cartpole.CartPoleConfig()),
            agent=mlp.agent(mlp.MLPConfig(n_obs=4, n_actions=2)),
        ),
        NoWorld(),
    )


def prover_work(device: str) -> tuple[Config, Any]:
    """Countries S3 to height 2."""
    ready = prover_task.build_task(data.load("countries_s3"), ProverTaskConfig(max_height=2), device)
    return prover_task.build_config(
        ready, PPOConfig(n_envs=64, n_steps=64, n_epochs=2, n_minibatches=32)
    ), prover_task.training_world(ready)


WORK = {"cartpole 4x128": cartpole_work(4), "cartpole 2048x128": cartpole_work(2048), "prover 64x64": prover_work}


def measure(cfg: Config, world: Any, state: Any, rung: str, repeats: int) -> dict[str, Any]:
    """One rung: seconds to the end of the first iteration, milliseconds of the next ones, parity with eager."""
    try:
        start = time.perf_counter()
        parts, _ = select_strategy(train_step.collect, train_step.EAGER_PARTS, cfg, world, state, rung)
        after, _ = train_step.train_step(cfg, world, state, parts)
        synchronise(state)
        cold = time.perf_counter() - start
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            train_step.train_step(cfg, world, state, parts)
            synchronise(state)
            times.append(1e3 * (time.perf_counter() - start))
        want, _ = train_step.train_step(cfg, world, state, train_step.EAGER_PARTS)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    off = max(float((a - b).abs().max()) for a, b in pairs(after, want))
    change = max(float((a - b).abs().max()) for a, b in pairs(want, state))
    quartiles = statistics.quantiles(times, n=4)
    return {
        "cold_s": cold,
        "iteration_ms": statistics.median(times),
        "spread_ms": quartiles[2] - quartiles[0],
        "max_difference_from_eager": off,
        "max_change": change,
    }


def pairs(a: Any, b: Any) -> list[tuple[Any, Any]]:
    """Matching params of two states."""
    return list(zip(tree.leaves(a.params), tree.leaves(b.params)))


def synchronise(state: Any) -> None:
    """Wait for the device."""
    if state.key.is_cuda:
        torch.cuda.synchronize()


def parity() -> dict[str, Any]:
    """Random bits and evaluator scores, GPU against CPU."""
    bits = [random.bits(random.key(7, device), (10_000,)).cpu() for device in ("cpu", "cuda")]
    scores = []
    for device in ("cpu", "cuda"):
        ready = prover_task.build_task(data.load("countries_s3"), ProverTaskConfig(max_height=2), device)
        cfg = prover_task.build_config(ready, PPOConfig())
        params = cfg.agent.init(cfg.agent.cfg, random.key(1, device))
        params = tree.map(lambda x: x + 0.2 * torch.sin(torch.arange(x.numel(), device=x.device).view(x.shape)), params)
        how = scorers.search_config(ready, cfg, "success", slots=64, beam=64, rows=256, window=256)
        atoms = torch.from_numpy(ready.dataset.test).to(device)
        scores.append(scorers.make_policy_scorer(how, ready, params, evaluate_step)(atoms).cpu())
    finite = torch.isfinite(scores[0])
    return {
        "bits_equal": bool(torch.equal(*bits)),
        "same_atoms_proved": bool(torch.equal(finite, torch.isfinite(scores[1]))),
        "atoms_proved": int(finite.sum()),
        "largest_log_score_difference": float((scores[0] - scores[1])[finite].abs().max()),
    }


def machine(device: str) -> dict[str, Any]:
    """Where the numbers come from."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    commit = os.environ.get("FUNCPPO_COMMIT") or git  # FUNCPPO_COMMIT names it where there is no checkout
    return {"device": name, "torch": torch.__version__, "python": platform.python_version(), "commit": commit}


if __name__ == "__main__":
    main()
