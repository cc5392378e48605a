"""Images of one step, in which no pixel alone tells anything: does a bar of two pixels lie or stand?"""

from __future__ import annotations

from typing import NamedTuple

import torch

import funcppo as fp
from funcppo.core import random


class State(NamedTuple):
    """A bar of two pixels: where it begins, which way it points, and whether the episode is over."""

    row: torch.Tensor
    column: torch.Tensor
    is_upright: torch.Tensor
    finished: torch.Tensor


SIZE = 5


def reset(cfg, world, key):
    draw = random.split(key, 3).unbind(-2)
    row, column = (random.integer_from_key(k, SIZE).float() for k in draw[:2])
    is_upright = random.integer_from_key(draw[2], 2).bool()
    return State(row, column, is_upright, torch.zeros_like(is_upright))


def observe(cfg, world, state):
    """A bar that leaves the image comes back on the other side, so that every pixel is as likely for both."""
    second_row = (state.row + state.is_upright) % SIZE
    second_column = (state.column + ~state.is_upright) % SIZE
    lines = torch.arange(SIZE)
    at = lambda row, column: (
        (lines == row[:, None])[:, :, None]
        & (lines == column[:, None])[:, None]
    )
    image = at(state.row, state.column) | at(second_row, second_column)
    return image.unsqueeze(-1).to(state.row.dtype)


def step(cfg, world, state, action, key):
    right = (action == state.is_upright) & ~state.finished
    over = torch.ones_like(state.finished)
    timestep = fp.Timestep(right.to(state.row.dtype), over, ~over)
    return State(*state[:-1], over), timestep


BARS = fp.Environment(
    cfg=None,
    reset=reset,
    step_functional=step,
    observe=observe,
    truncates=False,
    spec=fp.EnvironmentSpec(
        observation_size=SIZE**2,
        observation_shape=(SIZE, SIZE, 1),
        action_size=2,
    ),
)
