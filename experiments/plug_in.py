"""Plug your own environment and network into funcppo: a walk to the right end of a corridor, and a table of logits.

    python experiments/plug_in.py

An environment is a frozen dataclass of settings, a NamedTuple of state tensors with the leading axis B, and the three
functions of `funcppo/envs/base.py`. A network is `init` and `apply`. Rules: write with `torch.where`, never in place;
keep a finished row as it is and pay it nothing; draw from the key given, one for each row (`random.uniform(key, ())`,
`normal`; `fold_in(key, 1)` for a second draw); return a mask's illegal actions as the smallest finite number. An action
is a number [B]; for continuous ones [B, D] return a `GaussianValue` and give the agent `distribution=DIAGONAL_NORMAL`
(`funcppo/nets/base.py`). The training step then compiles, vectorises and resumes with no further work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo import random
from funcppo.config import Config, PPOConfig
from funcppo.envs.base import Environment, NoWorld, Timestep
from funcppo.nets.base import Agent, PolicyValue
from funcppo.train_step import init, train_step


@dataclass(frozen=True, kw_only=True, slots=True)
class Corridor:
    n_cells: int  # the right-most one is the goal
    max_steps: int


class State(NamedTuple):
    cell: Tensor  # [B]
    steps: Tensor  # [B]


def reset(cfg: Corridor, world: NoWorld, key: Tensor) -> State:
    cell = (random.uniform(key, ()) * (cfg.n_cells // 2)).long()
    return State(cell, torch.zeros_like(cell))


def step_functional(
    cfg: Corridor, world: NoWorld, state: State, action: Tensor, key: Tensor
) -> tuple[State, Timestep]:
    active = (state.cell < cfg.n_cells - 1) & (state.steps < cfg.max_steps)
    cell = torch.where(active, state.cell + 2 * action - 1, state.cell)
    after = State(cell, torch.where(active, state.steps + 1, state.steps))
    at_goal = cell == cfg.n_cells - 1
    reward = torch.where(active & at_goal, 1.0, 0.0)
    return after, Timestep(
        reward,
        terminated=at_goal,
        truncated=~at_goal & (after.steps >= cfg.max_steps),
    )


def observe(cfg: Corridor, world: NoWorld, state: State) -> Tensor:
    return state.cell


class Table(NamedTuple):
    logits: Tensor  # [cells, 2]: left, right
    value: Tensor  # [cells]


def init_table(cfg: Corridor, key: Tensor) -> Table:
    return Table(
        torch.zeros(cfg.n_cells, 2, device=key.device),
        torch.zeros(cfg.n_cells, device=key.device),
    )


def apply_table(
    cfg: Corridor, world: NoWorld, params: Table, cell: Tensor
) -> PolicyValue:
    wall = (cell.unsqueeze(-1) == 0) & (
        torch.arange(2, device=cell.device) == 0
    )  # no way left of cell 0
    lowest = torch.finfo(params.logits.dtype).min
    return PolicyValue(
        logits=torch.where(wall, lowest, params.logits[cell]),
        value=params.value[cell],
    )


def config(corridor: Corridor) -> Config:
    env = Environment(
        cfg=corridor,
        reset=reset,
        step_functional=step_functional,
        observe=observe,
        truncates=True,
    )
    ppo = PPOConfig(
        n_envs=32,
        n_steps=32,
        n_updates=20,
        learning_rate=0.05,
        entropy_coef=0.0,
        gamma=0.95,
    )
    return Config(
        ppo=ppo,
        env=env,
        agent=Agent(cfg=corridor, init=init_table, apply=apply_table),
    )


def main() -> list[float]:
    """Mean steps to the goal in each update."""
    cfg, world, lengths = (
        config(Corridor(n_cells=9, max_steps=50)),
        NoWorld(),
        [],
    )
    state = init(cfg, world, random.key(0))
    for update in range(cfg.ppo.n_updates):
        state, metrics = train_step(cfg, world, state)
        lengths.append(
            float(
                metrics.rollout.episode_length_sum / metrics.rollout.n_episodes
            )
        )
        print(f"update {update:2}  steps to the goal {lengths[-1]:5.1f}")
    return lengths


if __name__ == "__main__":
    main()
