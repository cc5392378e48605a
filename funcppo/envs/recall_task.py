"""A task that needs a memory: repeat at the end of an episode the cue that was shown at its start.

The cue is shown in the first observation alone, so that a policy that acts on the present observation is right once in
`n_cues` episodes, whatever it does.

Source: the memory chain of Osband et al. 2020, "Behaviour suite for reinforcement learning", arXiv:1908.03568.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core import random
from funcppo.core.settings import Size, check_fields
from funcppo.core.types import F32, I64
from funcppo.interfaces import Environment, EnvironmentSpec, NoWorld, Timestep


@dataclass(frozen=True, kw_only=True, slots=True)
class RecallConfig:
    """Lengths and sizes."""

    n_steps: Size = 8  # of an episode; the last one counts
    n_cues: Size = 2  # cues, and actions

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class RecallState(NamedTuple):
    """One row for each environment."""

    cue: I64[Tensor, "B"]
    step: I64[Tensor, "B"]  # steps made


def reset(
    cfg: RecallConfig, world: NoWorld, key: I64[Tensor, "B 2"]
) -> RecallState:
    """A cue, each with the same probability."""
    cue = random.integer_from_key(key, cfg.n_cues)
    return RecallState(cue=cue, step=torch.zeros_like(cue))


def step_functional(
    cfg: RecallConfig,
    world: NoWorld,
    state: RecallState,
    action: I64[Tensor, "B"],
    key: I64[Tensor, "B 2"],
) -> tuple[RecallState, Timestep]:
    """Reward 1 in the last step if the action is the cue, and -1 if not; 0 before."""
    is_active = state.step < cfg.n_steps
    is_last = state.step == cfg.n_steps - 1
    payment = torch.where(action == state.cue, 1.0, -1.0)
    next_state = RecallState(cue=state.cue, step=state.step + is_active)
    terminated = next_state.step >= cfg.n_steps
    return next_state, Timestep(
        reward=torch.where(is_last, payment, 0.0),
        terminated=terminated,
        truncated=torch.zeros_like(terminated),
    )


def observe(
    cfg: RecallConfig, world: NoWorld, state: RecallState
) -> F32[Tensor, "B F"]:
    """The cue in the first step, one number for each, and whether this step is the last one."""
    cues = torch.arange(cfg.n_cues, device=state.cue.device)
    is_shown = (state.cue[:, None] == cues) & (state.step == 0)[:, None]
    is_last = (state.step == cfg.n_steps - 1)[:, None]
    return torch.cat([is_shown, is_last], 1).to(torch.float32)


def environment(
    cfg: RecallConfig,
) -> Environment[NoWorld, RecallState, Tensor, RecallState]:
    """The environment with these settings."""
    return Environment(
        cfg=cfg,
        reset=reset,
        step_functional=step_functional,
        observe=observe,
        truncates=False,
        spec=EnvironmentSpec(
            observation_size=cfg.n_cues + 1, action_size=cfg.n_cues
        ),
    )


def recall(
    n_steps: int = 8, n_cues: int = 2
) -> Environment[NoWorld, RecallState, Tensor, RecallState]:
    """An environment whose first observation says what the last action must be.

    Args:
      n_steps: steps of an episode.
      n_cues: how many cues there are, each with an action of its own.
    """
    return environment(RecallConfig(n_steps=n_steps, n_cues=n_cues))
