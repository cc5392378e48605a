"""What an iteration of learning to prove costs, and the rollout alone.

    python experiments/bench_prover.py --data ../shared/data --out experiments/results/bench_prover-h200.json

Work: `s3` (embedded Countries S3 to height 2, 64 x 64, 2 epochs, minibatch 128), `family` (Family, 41 rules, height 2,
128 x 128, 5 epochs x 16 minibatches), `family-large` (the same with 250-d atoms and 512 hidden), `family-130` (that
with 8 residual layers and room for 130 successors, of which at most 22 are ever filled) and `family-130-microbatches`
(that with minibatches in 8 parts). How: `captured` (compiled parts, one graph launch), `parts` (a graph launch a
rollout step and a minibatch), `eager-graph` and `eager-parts` (likewise, nothing compiled), `compiled`, `eager`. Room:
`packed` (minibatches run on the successors that there are) or `padded` (on a place for each that there may be). Rows as
those of bench_cartpole.py, with rollout_ms, steps a second, the share of places that are filled, where the cold start
went, how many actions of a rollout are not the eager ones, and how far learning eagerly from the same rollout differs.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from experiments.benchmarks import side_by_side
import torch
from experiments.benchmarks.cartpole import HOW, TURNS, kernels, least, repeated, strayed
from torch.utils.flop_counter import FlopCounterMode

from funcppo import data, random, train_step
from funcppo.config import PPOConfig
from funcppo.experiment.capacity import with_capacity
from funcppo.prover import task as prover_task
from funcppo.prover.config import ProverTaskConfig
from funcppo.runtime import compile as ladder
from funcppo.runtime import memory
from funcppo.runtime.capture import CapturedStep, capture
from funcppo.runtime.graphed import capture_loop_bodies

SMALL = PPOConfig(n_envs=64, n_steps=64, n_epochs=2, n_minibatches=32)
LARGE = PPOConfig(n_envs=128, n_steps=128, n_epochs=5, n_minibatches=16)
PREDECESSORS = ProverTaskConfig(max_height=2, embed_dim=250, hidden_dim=512, n_residual_blocks=8, max_successors=130)
WORK = {
    "s3": ("countries_s3", ProverTaskConfig(max_height=2), SMALL),
    "family": ("{data}/family", ProverTaskConfig(max_height=2), LARGE),
    "family-large": ("{data}/family", ProverTaskConfig(max_height=2, embed_dim=250, hidden_dim=512), LARGE),
    "family-130": ("{data}/family", PREDECESSORS, LARGE),
    "family-130-microbatches": ("{data}/family", PREDECESSORS, dataclasses.replace(LARGE, n_microbatches=8)),
}


def main() -> None:
    """Run the cells and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", default="../shared/data")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", nargs="*", default=list(WORK), choices=list(WORK))
    parser.add_argument("--how", nargs="*", default=["captured", "compiled", "eager"], choices=HOW)
    parser.add_argument("--room", nargs="*", default=["packed"], choices=["packed", "padded"])
    parser.add_argument("--width", type=int, default=8, help="processes that compile at once")
    parser.add_argument("--cell", nargs=5, metavar=("WORK", "HOW", "DEVICE", "DATA", "ROOM"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        case = Case(*args.cell)
        return side_by_side.cell(case.ready, case.timed)
    cells = [[work, how, args.device, args.data, r] for work in args.work for how in args.how for r in args.room]
    side_by_side.run(__file__, cells, args.width, args.device, args.out)


class Case:
    """One kind of work, run one way."""

    def __init__(self, work: str, how: str, device: str, folder: str, room: str) -> None:
        dataset, settings, ppo = WORK[work]
        self.how, self.device = how, device
        ready = prover_task.build_task(data.load(dataset.format(data=folder)), settings, device)
        self.cfg, self.world = prover_task.build_config(ready, ppo), prover_task.training_world(ready)
        self.state = train_step.init(self.cfg, self.world, random.key(0, device))
        if room == "packed":
            self.cfg = with_capacity(self.cfg, self.world, self.state)

    def ready(self) -> dict[str, Any]:
        """Compile, capture, take one step and compare it with the eager one."""
        top = "one-graph" if self.cfg.ppo.n_microbatches == 1 else "two-graphs"
        rung = "eager" if self.how.startswith("eager") else "forward" if self.how == "forward" else top
        parts, _ = ladder.select_strategy(
            train_step.collect, train_step.EAGER_PARTS, self.cfg, self.world, self.state, rung
        )
        step = partial(train_step.train_step, self.cfg, self.world)
        memory.reset_peak(self.device)
        whole = self.captured(step, parts)
        whole.step()
        peak = memory.peak_bytes(self.device)
        cold, compiles, self.step = side_by_side.since_start(), side_by_side.compiles(), whole.step
        acted = dataclasses.replace(parts, minibatch_step=train_step.EAGER_PARTS.minibatch_step)
        with FlopCounterMode(display=False) as counter:
            eager, shown = step(self.state)
        learnt = step(self.state, parts=acted)[0]
        self.roll_out = self.captured(self.roll, parts).step
        row = {"replay": whole.replay_mode, "cold_s": cold, "compiles": compiles, "capture_ms": whole.capture_ms}
        floor = least(counter.get_total_flops(), self.state, shown, "highest") if self.device == "cuda" else None
        row |= {"peak_bytes": peak, "least_ms": floor}
        row |= {"difference_from_eager": strayed(whole.state, eager, self.state), "actions_differ": self.differ(parts)}
        return row | {"learning_differs": strayed(whole.state, learnt, self.state)} | self.room()

    def differ(self, parts: train_step.Parts) -> int:
        """Actions of the first rollout that are not the eager ones: a tie decided otherwise, and what follows."""
        acted = (train_step.collect(self.cfg, self.world, self.state, p) for p in (parts, train_step.EAGER_PARTS))
        one, other = (got.batch.action for got in acted)
        return int((one != other).sum())

    def captured(self, step: Callable[..., tuple[Any, Any]], parts: train_step.Parts) -> CapturedStep[Any, Any]:
        """A step as this way runs it."""
        if self.how in TURNS:
            return capture_loop_bodies(step, parts, self.state, strict=self.device == "cuda")
        graph = self.how in ("captured", "eager-graph") and self.device == "cuda"
        return capture(partial(step, parts=parts), self.state, use_cuda_graph=graph, strict=graph)

    def roll(self, state: Any, parts: train_step.Parts) -> tuple[Any, Any]:
        """Rollout and advantages alone."""
        got = train_step.collect(self.cfg, self.world, state, parts)
        return state._replace(
            env_state=got.rollout_state.env_state, episode_stats=got.rollout_state.episode_stats, key=got.key
        ), got.batch

    def room(self) -> dict[str, float | None]:
        """Successors of a state at most, of a minibatch where these are packed, and the share of places filled."""
        agent, mask = self.cfg.update_agent or self.cfg.agent, self.roll(self.state, train_step.EAGER_PARTS)[1].obs.mask
        row = {"successors": mask.shape[1] - 1, "capacity": agent.cfg.capacity}
        return row | {"filled": float(mask[:, :-1].float().mean())}

    def synchronise(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def timed(self) -> dict[str, Any]:
        """Median and spread of an iteration and of its rollout, and kernels."""
        whole, rollout = (repeated(step, self.synchronise) for step in (self.step, self.roll_out))
        n = self.cfg.ppo.n_envs * self.cfg.ppo.n_steps
        row = whole | {"rollout_ms": rollout["iteration_ms"], "steps_per_s": 1e3 * n / whole["iteration_ms"]}
        row |= {"rollout_steps_per_s": 1e3 * n / rollout["iteration_ms"]}
        return row | (kernels(self.step) if self.device == "cuda" else {})


if __name__ == "__main__":
    main()
