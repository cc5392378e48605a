"""What a CartPole training iteration costs: whole iterations as one CUDA graph beside other ways to run them.

    python experiments/bench_cartpole.py --out experiments/results/bench_cartpole-h200.json

Work: 4 and 2048 environments x 128 steps, 4 epochs x 4 minibatches, 64-64 tanh; 64 and 1024 learners under vmap, 4 x
128 each; and `update`, one minibatch update at batch 256. How: `captured` (compiled parts, one graph launch an
iteration), `whole` (one compiled call an iteration, its loops kept as loops, large minibatches in microbatches that fit
into a cache: for a CPU), `parts` (compiled parts, a graph launch a rollout step and a minibatch), `compiled` (the parts
called one by one), `eager-graph` (eager parts, one graph: LeanRL's way), `eager-parts` (eager, launched as `parts`),
`forward` (compiled forward and loss, eager backward, fused Adam: the fallback rung), `eager`; and, where they are
installed, `sb3`, Stable-Baselines3, and `jax`, one jitted call an iteration (jax_peer.py). Every row has its cold start
and the median and spread of the iteration; those that are ours also their kernels, and their parity: the difference of
params from the eager step's after one update, as a share of the change; and the most memory held until then. For one
thread set OMP_NUM_THREADS=1, for JAX XLA_FLAGS="--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
which its row repeats.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import side_by_side
import torch
from torch.utils.flop_counter import FlopCounterMode

from funcppo import random, train_step, tree
from funcppo.config import Config, PPOConfig
from funcppo.envs.base import NoWorld
from funcppo.envs.classic_control import cartpole
from funcppo.nets import feedforward as mlp
from funcppo.runtime import compile as ladder
from funcppo.runtime import memory
from funcppo.runtime.capture import CapturedStep, capture
from funcppo.runtime.equivalence import BF16_TOLERANCE, DEFAULT_TOLERANCE
from funcppo.runtime.graphed import capture_loop_bodies
from funcppo.runtime.whole_iteration import compile_iteration

WORK = {"4x128": (4, 0), "2048x128": (2048, 0), "64 learners": (4, 64), "1024 learners": (4, 1024), "update": (2, 0)}
HOW = ("captured", "whole", "parts", "compiled", "eager-graph", "eager-parts", "forward", "eager")
TURNS = ("parts", "eager-parts")
PEERS = ("sb3", "jax")
SETTINGS = partial(PPOConfig, n_steps=128, n_epochs=4, n_minibatches=4)
REPEATS = 7
# What an H200 can do at most, for the distance to it: multiplications and additions a second, bytes a second, and
# how long a kernel in a graph takes that does nothing.
RATES = {"highest": 67e12, "high": 495e12, "bfloat16": 990e12}
BANDWIDTH, LAUNCH = 4.8e12, 1.5e-6
PRODUCTS = {"bfloat16": torch.bfloat16}
JAX_PRODUCTS = {"highest": "highest", "high": "tensorfloat32", "bfloat16": "bfloat16"}  # by itself it takes TF32
SECONDS = 0.2  # of each repeat, at least
CACHED = 2048  # rows of a microbatch whose activations (1 MB a layer) stay in a core's cache


def main() -> None:
    """Run the cells and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", nargs="*", default=list(WORK), choices=list(WORK))
    parser.add_argument("--how", nargs="*", default=list(HOW), choices=[*HOW, *PEERS], help="default: all but peers")
    parser.add_argument("--precision", nargs="*", default=["highest"], choices=list(RATES), help="high: TF32")
    parser.add_argument("--microbatches", nargs="*", type=int, default=[0], help="of a minibatch; 0: as `how` has it")
    parser.add_argument("--width", type=int, default=8, help="processes that compile at once")
    parser.add_argument("--cell", nargs="+", metavar="WORK HOW DEVICE PRECISION", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        work, how, device, precision = args.cell[:4]
        torch.set_float32_matmul_precision("high" if precision == "high" else "highest")
        peers = {"sb3": partial(StableBaselines, work), "jax": partial(Jax, work, device, precision)}
        case = peers.get(how, partial(Case, *args.cell))()
        return side_by_side.cell(case.ready, case.timed)
    many = itertools.product(args.precision, args.microbatches, args.work, args.how)
    cells = [[work, how, args.device, precision, *([str(n)] if n else [])] for precision, n, work, how in many]
    side_by_side.run(__file__, cells, args.width, args.device, args.out)


class Case:
    """One kind of work, run one way."""

    def __init__(self, work: str, how: str, device: str, precision: str, microbatches: str = "0") -> None:
        self.work, self.how, self.device, self.precision = work, how, device, precision
        n_envs, self.learners = WORK[work]
        self.microbatches = int(microbatches) or (max(1, 32 * n_envs // CACHED) if how == "whole" else 1)
        self.cfg = Config(
            ppo=SETTINGS(n_envs=n_envs, n_microbatches=self.microbatches),
            env=cartpole.environment(cartpole.CartPoleConfig()),
            agent=mlp.agent(mlp.MLPConfig(n_obs=4, n_actions=2, matmul_dtype=PRODUCTS.get(precision))),
        )
        keys = random.split(random.key(0, device), max(self.learners, 1))
        make = partial(train_step.init, self.cfg, NoWorld())
        self.state = tree.map(torch.clone, torch.vmap(make)(keys)) if self.learners else make(keys[0])
        self.eager = train_step.vmap_parts(train_step.EAGER_PARTS) if self.learners else train_step.EAGER_PARTS
        self.step: Callable[[], Any] = lambda: None

    def ready(self) -> dict[str, Any]:
        """Compile, capture, take one step and compare it with the eager one."""
        eager, captured = self.eager, self.captured()
        captured.step()
        self.synchronise()
        peak = memory.peak_bytes(self.device)
        cold, self.step = side_by_side.since_start(), captured.step
        self.how = "eager"
        with FlopCounterMode(display=False) as counter:
            want, out = self.fn(eager)(self.start())
        self.least = least(counter.get_total_flops(), self.start(), out, self.precision)
        row = {"replay": captured.replay_mode, "cold_s": cold, "capture_ms": captured.capture_ms}
        row |= {"microbatches": self.microbatches, "peak_bytes": peak}
        return row | {"difference_from_eager": strayed(captured.state, want, self.start())}

    def captured(self) -> CapturedStep[Any, Any]:
        """The step as this way runs it."""
        parts = self.parts(self.eager)
        memory.reset_peak(self.device)
        if self.how in TURNS:
            if self.work == "update":
                raise ValueError(f"{self.work}: {self.how} has whole iterations")
            step = partial(train_step.train_step, self.cfg, NoWorld())
            return capture_loop_bodies(step, parts, self.start(), strict=self.device == "cuda")
        graph = self.how in ("captured", "eager-graph") and self.device == "cuda"
        return capture(self.fn(parts), self.start(), use_cuda_graph=graph, strict=graph)

    def parts(self, eager: train_step.Parts) -> train_step.Parts:
        """The parts that this way calls."""
        top = "one-graph" if self.microbatches == 1 else "two-graphs"
        compiled = dict.fromkeys(("captured", "parts", "compiled"), top)
        rung = (compiled | {"forward": "forward"}).get(self.how, "eager")
        parity = BF16_TOLERANCE if self.precision == "bfloat16" else DEFAULT_TOLERANCE
        return ladder.select_strategy(
            train_step.collect, eager, self.cfg, NoWorld(), self.state, rung, tolerance=parity
        )[0]

    def fn(self, parts: train_step.Parts) -> Callable[[Any], tuple[Any, Any]]:
        """The step that is timed: an iteration, or one minibatch update."""
        if self.how == "whole":
            scanned = compile_iteration(train_step.train_step, parts)
            return lambda state: scanned(self.cfg, NoWorld(), state)
        if self.work != "update":
            return lambda state: train_step.train_step(self.cfg, NoWorld(), state, parts)
        got = train_step.collect(self.cfg, NoWorld(), self.state)
        minibatch = tree.map(lambda x: torch.cat([x[0], x[1]]) if x.ndim > 1 else x[0], got.minibatches)
        learn = partial(parts.minibatch_step, self.cfg, NoWorld(), self.state.params, got.batch, got.scalars)
        return lambda learner: learn(learner, minibatch)

    def start(self) -> Any:
        """The state that the step threads."""
        return self.state if self.work != "update" else train_step.collect(self.cfg, NoWorld(), self.state).update_state

    def synchronise(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def timed(self) -> dict[str, Any]:
        """Median and spread of an iteration, and its kernels."""
        row = repeated(self.step, self.synchronise)
        return row | (kernels(self.step) | {"least_ms": self.least} if self.device == "cuda" else {})


def strayed(got: Any, want: Any, before: Any) -> float:
    """How far params are from where they should be, as a share of the way there."""
    a, b, c = (tree.leaves(x.params) for x in (got, want, before))
    off, change = (tree.global_norm([x - y for x, y in zip(*pair)]) for pair in ((a, b), (b, c)))
    return float(off / change)


class StableBaselines:
    """Stable-Baselines3's PPO on the same work, on the CPU; for want of it the cell is an error."""

    def __init__(self, work: str) -> None:
        self.work, self.learn = work, lambda: None

    def ready(self) -> dict[str, Any]:
        """Make the learner and have it learn once."""
        from stable_baselines3 import PPO  # pyright: ignore[reportMissingImports]
        from stable_baselines3.common.env_util import make_vec_env  # pyright: ignore[reportMissingImports]

        n_envs, learners = WORK[self.work]
        if learners or self.work == "update":
            raise ValueError(f"{self.work}: Stable-Baselines3 has one learner, and whole iterations")
        rows = n_envs * 128
        options = {"n_steps": 128, "batch_size": rows // 4, "n_epochs": 4, "policy_kwargs": {"net_arch": [64, 64]}}
        model = PPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs), device="cpu", **options)
        self.learn = lambda: model.learn(rows, reset_num_timesteps=False)
        self.learn()
        return {"replay": "none", "cold_s": side_by_side.since_start()}

    def timed(self) -> dict[str, Any]:
        """Median and spread of an iteration."""
        return repeated(self.learn, lambda: None)


class Jax:
    """The same work as one jitted JAX call; for want of JAX, or of the device in it, the cell is an error."""

    def __init__(self, work: str, device: str, precision: str) -> None:
        self.work, self.device, self.precision, self.iterations = work, device, precision, 0
        self.shown: deque[Any] = deque(maxlen=10)
        self.state: Any = None
        self.iteration: Callable[[Any], tuple[Any, Any]] = lambda state: (state, None)
        self.synchronise = lambda: None

    def ready(self) -> dict[str, Any]:
        """Compile and take one step."""
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other cells are made ready beside this one
        import jax  # pyright: ignore[reportMissingImports]
        import jax_peer

        n_envs, learners = WORK[self.work]
        if self.work == "update":
            raise ValueError(f"{self.work}: the JAX run has whole iterations")
        device = jax.devices(self.device)[0]
        jax.config.update("jax_default_device", device)
        jax.config.update("jax_default_matmul_precision", JAX_PRODUCTS[self.precision])
        self.state, self.iteration = jax_peer.jitted(SETTINGS(n_envs=n_envs), learners)
        self.synchronise = lambda: jax.block_until_ready(self.state)
        self.step()
        self.synchronise()
        row = {"replay": "none", "cold_s": side_by_side.since_start(), "platform": device.platform}
        row |= {"jax": jax.__version__, "xla_flags": os.environ.get("XLA_FLAGS", "")}
        return row | {"products": JAX_PRODUCTS[self.precision]}

    def step(self) -> None:
        """One iteration."""
        self.state, shown = self.iteration(self.state)
        self.shown.append(shown)
        self.iterations += 1

    def timed(self) -> dict[str, Any]:
        """Median and spread of an iteration, and the mean return of episodes that ended in the last ten."""
        row = repeated(self.step, self.synchronise)
        episodes, total = (sum(float(x.sum()) for x in column) for column in zip(*self.shown))
        return row | {"iterations": self.iterations, "mean_return": total / episodes}


def least(flops: int, state: Any, out: Any, precision: str) -> dict[str, float]:
    """Milliseconds that the arithmetic of products takes at least, and reading and writing the state once."""
    n_bytes = sum(x.numel() * x.element_size() for x in tree.leaves((state, state, out)))
    return {"flops": 1e3 * flops / RATES[precision], "bytes": 1e3 * n_bytes / BANDWIDTH}


def repeated(step: Callable[[], Any], synchronise: Callable[[], None]) -> dict[str, Any]:
    """Median and spread of a step, and of its processor time the median, over repeats that take SECONDS at least."""
    times, busy, n = [], [], 1
    while len(times) < REPEATS:
        start, start_busy = time.perf_counter(), time.process_time()
        for _ in range(n):
            step()
        synchronise()
        seconds, seconds_busy = time.perf_counter() - start, time.process_time() - start_busy
        if seconds < SECONDS and not times:
            n = max(n + 1, int(n * min(10.0, 1.2 * SECONDS / seconds)))
            continue
        times.append(1e3 * seconds / n)
        busy.append(1e3 * seconds_busy / n)
    quartiles = statistics.quantiles(times, n=4)
    row = {"iteration_ms": statistics.median(times), "spread_ms": quartiles[2] - quartiles[0], "steps_a_repeat": n}
    return row | {"processor_ms": statistics.median(busy)}


def kernels(step: Callable[[], Any]) -> dict[str, Any]:
    """How many kernels a step launches, their summed time, and the costliest."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    by_name: dict[str, list[float]] = {}
    for event in events:
        by_name.setdefault(event.name[:70], []).append(event.device_time)
    table = sorted(((sum(t), len(t), name) for name, t in by_name.items()), reverse=True)
    return {
        "kernels": len(events),
        "launches_ms": 1e3 * LAUNCH * len(events),
        "kernels_ms": sum(t for t, _, _ in table) / 1e3,
        "costliest": [f"{n} x {t / n:.1f} us {name}" for t, n, name in table[:12]],
    }


if __name__ == "__main__":
    main()
