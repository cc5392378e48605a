"""How many successors a minibatch of the prover has, so that the network runs on those and not on every slot.

Most goals have far fewer successors than a goal may have. `with_capacity` measures a few rollout steps and gives the
network of the update a capacity, as a mixture of experts has one for each expert.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from funcppo import train_step
from funcppo.config import Config
from funcppo.core.types import Bool
from funcppo.kg.search import network
from funcppo.kg.search.env import World
from funcppo.train_step import TrainState

PROFILE_STEPS = 8  # rollout steps that are measured
# capacity over measured successors: the distribution of states shifts during training
CAPACITY_FACTOR = 1.25
# standard deviations of a minibatch's total that are added to the mean
CAPACITY_MARGIN_DEVIATIONS = 4.0


def with_capacity(cfg: Config, world: World, state: TrainState) -> Config:
    """The config with a capacity for minibatches, if that spares the network half of the successor slots or more.

    Rows of a minibatch that exceed the capacity are left out of its loss and counted, as
    `LossMetrics.dropped_fraction`.

    Args:
      cfg: a learning problem of the prover.
      world: what it reads.
      state: the first training state of the run, also when the run is resumed: the capacity is then the same.
    """
    # With the oracle, successors have no goals, and every rule is embedded once for the whole batch.
    if cfg.env.cfg.fact_selection == "oracle":
        return cfg

    ppo = cfg.ppo
    # of one forward pass: a shard's share of a microbatch
    n_rows = ppo.n_envs * ppo.n_steps // ppo.n_minibatches
    n_rows //= ppo.n_microbatches * ppo.n_shards
    successor_mask = _profile_successors(cfg, world, state)
    n_slots = successor_mask.shape[1]
    n_successors = successor_mask.sum(1).double()

    # Totals of independent rows: the mean grows with their number, the standard deviation with its root.
    expected_total = CAPACITY_FACTOR * float(n_successors.mean()) * n_rows
    deviation = float(n_successors.std(correction=0))
    margin = CAPACITY_MARGIN_DEVIATIONS * deviation * math.sqrt(n_rows)

    # A single row must fit in any case.
    capacity = max(n_slots, math.ceil(expected_total + margin))
    if 2 * capacity > n_rows * n_slots:
        return cfg
    network_config = replace(cfg.agent.cfg, capacity=capacity)
    return replace(cfg, update_agent=network.agent(network_config))


def _profile_successors(
    cfg: Config, world: World, state: TrainState
) -> Bool[Tensor, "N S"]:
    """Which successor slots are filled, in the states of a few rollout steps."""
    ppo = replace(
        cfg.ppo,
        n_steps=min(PROFILE_STEPS, cfg.ppo.n_steps),
        n_minibatches=1,
        n_microbatches=1,
    )
    profile = train_step.collect(replace(cfg, ppo=ppo), world, state)
    batches = cast(Any, profile.batch)
    if ppo.n_shards == 1:
        batches = (batches,)
    return torch.cat([batch.obs.action_mask[:, :-1] for batch in batches])
