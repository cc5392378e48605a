"""Problems so small that a learner that fails one has a fault in a place that the problem names.

Each is learnt from scratch in seconds; tolerances are on values and probabilities that have an exact answer.

Source: the idea of probe environments is A. L. Jones, "Debugging reinforcement learning systems", 2021.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from funcppo.config import Config, PPOConfig
from funcppo.core import random
from funcppo.interfaces import Environment, Timestep
from funcppo.nets import networks
from funcppo.nets.networks import CATEGORICAL, DIAGONAL_GAUSSIAN, Agent
from funcppo.train_step import init, train_step
from tests.learning import WORLD, one_thread

pytestmark = pytest.mark.usefixtures(one_thread.__name__)

NET = networks.MLPConfig(n_obs=2, n_actions=3, hidden=(16,))
AGENT = networks.mlp_agent(NET)
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeConfig:
    """`reward` is paid at the last of `horizon` steps, for (sign, action)."""

    reward: Callable[[Tensor, Tensor], Tensor]
    horizon: int = 1
    cuts: bool = False  # the horizon truncates


class State(NamedTuple):
    sign: Tensor  # -1 or 1, drawn at a reset and observed
    steps: Tensor


def reset(cfg: ProbeConfig, world: Any, key: Tensor) -> State:
    sign = torch.where(random.uniform(key, ()) < 0.5, -1.0, 1.0)
    return State(sign, torch.zeros_like(sign))


def step_functional(
    cfg: ProbeConfig, world: Any, state: State, action: Tensor, key: Tensor
) -> tuple[State, Timestep]:
    after = State(state.sign, state.steps + 1)
    done = after.steps >= cfg.horizon
    never = torch.zeros_like(done)
    reward = torch.where(done, cfg.reward(state.sign, action), 0.0)
    return after, Timestep(
        reward, *((never, done) if cfg.cuts else (done, never))
    )


def observe(cfg: ProbeConfig, world: Any, state: State) -> Tensor:
    return torch.stack([state.sign, state.steps % cfg.horizon], -1)


def masked(cfg: Any, world: Any, params: Any, obs: Tensor) -> Any:
    """The MLP with action 2 illegal."""
    out = networks.apply_mlp(cfg, world, params, obs)
    return out._replace(
        logits=torch.where(torch.arange(3) == 2, LOWEST, out.logits)
    )


def learnt(
    probe: ProbeConfig,
    agent: Agent = AGENT,
    updates: int = 40,
    **ppo: Any,
) -> Callable[..., Any]:
    """The network learnt on a probe, as a function of (sign, steps)."""
    env = Environment(
        cfg=probe,
        reset=reset,
        step_functional=step_functional,
        observe=observe,
        truncates=probe.cuts,
    )
    settings = {
        "n_envs": 64,
        "n_steps": 2,
        "n_minibatches": 2,
        "n_updates": updates,
        "learning_rate": 2e-2,
    }
    cfg = Config(
        ppo=PPOConfig(
            **(
                settings
                | {
                    "value_loss": "plain",
                    "max_grad_norm": 10.0,
                    "entropy_coef": 0.0,
                }
                | ppo
            )
        ),
        env=env,
        agent=agent,
    )
    state = init(cfg, WORLD, random.key(0))
    with torch.no_grad():
        for _ in range(updates):
            state, _ = train_step(cfg, WORLD, state)
    return lambda sign, steps: agent.apply(
        agent.cfg,
        WORLD,
        state.params,
        torch.tensor([[float(sign), float(steps)]]),
    )


def probability(out: Any, action: int) -> float:
    return float(CATEGORICAL.log_prob(out, torch.tensor([action])).exp())


def test_a_reward_that_the_observation_tells_is_valued_by_it():
    """Fails when the value does not see what was observed: V = sign."""
    net = learnt(ProbeConfig(reward=lambda sign, action: sign), updates=30)
    assert [float(net(s, 0).value) for s in (-1, 1)] == pytest.approx(
        [-1.0, 1.0], abs=0.1
    )


def test_a_cut_episode_is_worth_what_would_have_followed():
    """Fails when truncation is taken for an end: 1 a step for ever is worth 1 / (1 - gamma) = 2."""
    probe = ProbeConfig(
        reward=lambda sign, action: torch.ones_like(sign), cuts=True
    )
    free = learnt(probe, updates=60, gamma=0.5)
    assert float(free(1, 0).value) == pytest.approx(2.0, abs=0.3)
    ended = learnt(probe, updates=30, gamma=0.5, bootstrap_truncated=False)
    assert float(ended(1, 0).value) == pytest.approx(1.0, abs=0.1)


def test_the_action_that_pays_is_chosen():
    """Fails when the policy loss or the advantage has the wrong sign."""
    net = learnt(ProbeConfig(reward=lambda sign, action: (action == 1).float()))
    assert probability(net(1, 0), 1) > 0.95


def test_the_best_legal_action_is_chosen_and_the_masked_one_never():
    """Action 2 would pay 10, action 1 pays 1."""
    taken = []

    def reward(sign: Tensor, action: Tensor) -> Tensor:
        taken.append(int((action == 2).sum()))
        return torch.where(action == 2, 10.0, (action == 1).float())

    net = learnt(
        ProbeConfig(reward=reward),
        agent=Agent(cfg=NET, init=networks.init_mlp, apply=masked),
    )
    assert sum(taken) == 0
    assert probability(net(1, 0), 1) > 0.95 and probability(net(1, 0), 2) == 0


def test_a_continuous_action_finds_its_target():
    """-(a - 0.5)^2 is greatest at 0.5: the mean moves there and the deviation shrinks."""
    cfg = networks.MLPConfig(n_obs=2, n_actions=1, hidden=(16,))
    agent = Agent(
        cfg=cfg,
        init=networks.init_gaussian,
        apply=networks.apply_gaussian,
        distribution=DIAGONAL_GAUSSIAN,
    )
    net = learnt(
        ProbeConfig(reward=lambda sign, action: -((action[:, 0] - 0.5) ** 2)),
        agent=agent,
    )
    assert float(net(1, 0).mean) == pytest.approx(0.5, abs=0.15)
    assert float(net(1, 0).log_std) < -0.3
