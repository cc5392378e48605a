"""How much room learning to prove needs for successors: most goals have far fewer than a goal may have."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from funcppo import train_step
from funcppo.config import Config
from funcppo.prover import network as net
from funcppo.train_step import TrainState

PROFILE_STEPS = 8  # rollout steps that are looked at
CAPACITY_FACTOR = 1.25  # times as many successors as were seen: a policy that learns comes to other goals
CAPACITY_MARGIN_DEVIATIONS = 4.0  # by which a minibatch may differ from the mean by chance


def with_capacity(cfg: Config, world: Any, state: TrainState) -> Config:
    """The problem with minibatches whose network runs on the successors that there are, where that spares half or more.

    Rows of a minibatch that find no room are left out of its losses and counted, as `LossMetrics.dropped_fraction`.

    Args:
      state: the first of a run, so that a run that goes on has the same room.
    """
    ppo = cfg.ppo
    if cfg.env.cfg.fact_selection == "oracle":  # successors without goals are embedded once for all
        return cfg
    short = replace(ppo, n_steps=min(PROFILE_STEPS, ppo.n_steps), n_minibatches=1, n_microbatches=1)
    mask = train_step.collect(replace(cfg, ppo=short), world, state).batch.obs.action_mask[:, :-1]
    filled, places = mask.sum(1).double(), mask.shape[1]
    rows = ppo.n_envs * ppo.n_steps // ppo.n_minibatches // ppo.n_microbatches
    chance = CAPACITY_MARGIN_DEVIATIONS * float(filled.std(correction=0)) * math.sqrt(rows)
    capacity = max(places, math.ceil(CAPACITY_FACTOR * float(filled.mean()) * rows + chance))
    if 2 * capacity > rows * places:
        return cfg
    return replace(cfg, update_agent=net.agent(replace(cfg.agent.cfg, capacity=capacity)))
