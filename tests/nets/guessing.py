"""An environment of one step for any action space: observe a sign, act, and be paid for the action of that sign."""

from typing import Any, NamedTuple

import torch

import funcppo as fp
from funcppo.core import random


class State(NamedTuple):
    sign: torch.Tensor  # -1 or 1
    finished: torch.Tensor


def reset(cfg: Any, world: Any, key: Any) -> State:
    sign = torch.where(random.unit_from_key(key) < 0.5, -1.0, 1.0)
    return State(sign, torch.zeros_like(sign, dtype=torch.bool))


def observe(cfg: Any, world: Any, state: State) -> Any:
    features = state.sign.unsqueeze(-1)
    if cfg == "image":
        return features[:, None, None].expand(-1, 2, 3, 1)
    if cfg != "masked":
        return features
    first = state.sign > 0
    # Of the first action 0 and 1 are legal, or 2 and 3; of the second both.
    always = torch.ones_like(first)
    mask = torch.stack([first, first, ~first, ~first, always, always], -1)
    return fp.MaskedObservation(features, mask)


def step(
    cfg: Any, world: Any, state: State, action: Any, key: Any
) -> tuple[State, fp.Timestep]:
    reward = (
        -(action - 0.5 * state.sign.unsqueeze(-1)).square().sum(-1)
        if cfg == "continuous"
        else _share_right(action, state.sign > 0)
    )
    reward = torch.where(state.finished, 0.0, reward).to(state.sign.dtype)
    over = torch.ones_like(state.finished)
    return State(state.sign, over), fp.Timestep(reward, over, ~over)


def _share_right(action: Any, first: Any) -> Any:
    """The right actions are (0, 1) for one sign and (2, 0) for the other."""
    right = torch.where(
        first.unsqueeze(-1), torch.tensor([0, 1]), torch.tensor([2, 0])
    )
    return (action == right).float().mean(-1)


SPECS = {
    "continuous": fp.EnvironmentSpec(
        observation_size=1, action_size=2, continuous_actions=True
    ),
    "several": fp.EnvironmentSpec(
        observation_size=1, action_size=6, action_sizes=(4, 2)
    ),
    "image": fp.EnvironmentSpec(
        observation_size=6,
        observation_shape=(2, 3, 1),
        action_size=6,
        action_sizes=(4, 2),
    ),
    "masked": fp.EnvironmentSpec(
        observation_size=1, action_size=6, action_sizes=(4, 2)
    ),
}


def guessing(kind: str) -> Any:
    """The environment with the actions of a kind, one of SPECS."""
    return fp.Environment(
        cfg=kind,
        reset=reset,
        step_functional=step,
        observe=observe,
        truncates=False,
        spec=SPECS[kind],
    )


def mean_reward(
    kind: str, network: Any, n_updates: int, **options: Any
) -> tuple[float, float]:
    """Mean reward in the first and in the last rollout of a short run."""
    options = {
        "n_envs": 64,
        "n_steps": 2,
        "learning_rate": 3e-2,
        "entropy_coef": 0.0,
    } | options
    learner = fp.ppo(env=guessing(kind), network=network, **options)
    state = learner.init(random.key(0))
    rewards: list[float] = []
    for _ in range(n_updates):
        state, metrics = learner.step(state)
        shown = metrics.rollout
        rewards.append(float(shown.episode_return_sum / shown.n_episodes))
    return rewards[0], rewards[-1]
