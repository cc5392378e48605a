"""What the games share: the grid, the action sets, the settings, and how a transition becomes an environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcppo.core import tree
from funcppo.core.settings import UnitInterval, check_fields
from funcppo.core.types import F32, I64, Bool
from funcppo.envs.wrappers import sticky_actions
from funcppo.interfaces import (
    AnyEnvironment,
    Environment,
    EnvironmentSpec,
    Timestep,
)

SIZE = 10  # cells of a side
ALL_ACTIONS = "nlurdf"  # nothing, left, up, right, down, fire
STICKY_PROBABILITY = 0.1  # MinAtar's


@dataclass(frozen=True, kw_only=True, slots=True)
class GameConfig:
    """Settings of a game."""

    # Letters of the actions, of `ALL_ACTIONS`; the number of an action is the place of its letter.
    actions: str = ALL_ACTIONS
    ramping: bool = True  # the game becomes faster with time, where it can
    # probability that the last action is repeated
    sticky_probability: UnitInterval = STICKY_PROBABILITY

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


def is_action(
    cfg: GameConfig, action: I64[Tensor, "B"], letter: str
) -> Bool[Tensor, "B"]:
    """Which rows do the action of a letter; none if the action set is without it."""
    return action == cfg.actions.find(letter)


def at(
    y: I64[Tensor, "B ..."], x: I64[Tensor, "B ..."]
) -> Bool[Tensor, "B ... 10 10"]:
    """Maps that are true in one cell; in none where it is off the grid."""
    cells = torch.arange(SIZE, device=x.device)
    is_row = y.unsqueeze(-1) == cells
    is_column = x.unsqueeze(-1) == cells
    return is_row.unsqueeze(-1) & is_column.unsqueeze(-2)


def image(*channels: Bool[Tensor, "B 10 10"]) -> F32[Tensor, "B 10 10 F"]:
    """The observation: one channel for each map, 1 where it is true."""
    return torch.stack(channels, -1).to(torch.float32)


def finish(state: Any, next_state: Any, reward: Tensor) -> tuple[Any, Timestep]:
    """The result of a step: rows that had finished before stay as they are. States have a field `terminal`."""
    active = ~state.terminal
    kept = tree.where(active, next_state, state)
    timestep = Timestep(
        reward=torch.where(active, reward, 0).to(torch.float32),
        terminated=kept.terminal,
        truncated=torch.zeros_like(kept.terminal),
    )
    return kept, timestep


def game(cfg: GameConfig, n_channels: int, **functions: Any) -> AnyEnvironment:
    """A game with sticky actions.

    Args:
      n_channels: of the observation.
      functions: `reset`, `step_functional` and `observe`.
    """
    env: AnyEnvironment = Environment(
        cfg=cfg,
        **functions,
        truncates=False,
        spec=EnvironmentSpec(
            observation_size=SIZE * SIZE * n_channels,
            observation_shape=(SIZE, SIZE, n_channels),
            action_size=len(cfg.actions),
        ),
    )
    if cfg.sticky_probability == 0.0:
        return env
    return sticky_actions(env, cfg.sticky_probability)
