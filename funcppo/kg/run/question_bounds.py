"""How much of the listwise fit and of PPO a run that learns from questions has time for.

Both weigh evidence and move weights. Their work is counted before they begin, in firings that are weighed: a gradient
costs some forward passes, and an optimizer step some firings. The bounds on it do not depend on the speed of the
machine, unless the time of the run ends before them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from funcppo.config import PPOConfig
from funcppo.kg.run.config import Note, RunConfig
from funcppo.kg.scores import aggregation
from funcppo.kg.scores.aggregation import AggregationConfig
from funcppo.kg.scores.question_config import (
    MAX_LISTWISE_STEPS,
    MAX_VALID_FIRINGS,
    ListwiseConfig,
    batch_size,
)
from funcppo.kg.scores.questions import PolicyConfig, QuestionWorld

# firings and links whose gradients the listwise fits take together if no bound is set, some two minutes on one core
MAX_FIT_FIRINGS = 1e8
# weighed firings of PPO in a run whose steps are not set, about a minute or two on one core
MAX_PPO_FIRINGS = 6e8
# how much more of both, and of the evidence of a validation, a GPU does in the same time
GPU_FACTOR = 16
# firings that PPO weighs, and whose gradients the listwise fit takes, in a second of one core
PPO_FIRINGS_PER_SECOND = 5e6
GRADIENTS_PER_SECOND = 8e5
# what the gradient of a firing costs, in forward passes
GRADIENT_COST = 3
# weights that an optimizer step moves in the time that the gradient of a firing takes
WEIGHTS_PER_GRADIENT = 40


class FitPlan(NamedTuple):
    """What the listwise fit has time for."""

    cfg: ListwiseConfig
    degrees: tuple[bool, ...]  # whether to weigh degrees, each value to try
    notes: list[Note]  # what it leaves out


def plan_fit(
    cfg: ListwiseConfig,
    policy: PolicyConfig,
    world: QuestionWorld,
    degrees: Sequence[bool],
    seconds: float = math.inf,
    metric_seconds: float = 0.0,
    time_factor: float = 1.0,
    min_epochs: int = 1,
) -> FitPlan:
    """Choose the kinds of evidence and the epochs that the bounds allow, at least one of each.

    Args:
      degrees: whether to weigh degrees, each value to try if there is time.
      seconds: of the fits with all their validations.
      metric_seconds: of one validation.
      time_factor: how many times the usual gradients to take where their number is not set.
      min_epochs: whatever the bounds; 2 where the learning rate does not fall in the first one.
    """
    size = batch_size(cfg, len(world.question))
    steps_per_epoch = max(1, len(world.question) // size)
    max_steps = cfg.max_steps or MAX_LISTWISE_STEPS
    n_epochs = min(cfg.n_epochs, max(min_epochs, max_steps // steps_per_epoch))
    reason = f"{max_steps:,} gradient steps (--listwise.max-steps)"
    notes: list[Note] = []

    cost_of_steps = {
        uses_degrees: steps_per_epoch
        * _n_weights(policy.aggregation, uses_degrees)
        / WEIGHTS_PER_GRADIENT
        for uses_degrees in degrees
    }
    budget = cfg.max_gradients or (
        time_factor * work_factor(world.question.device) * MAX_FIT_FIRINGS
    )
    most = budget / len(degrees)
    if len(degrees) > 1 and n_epochs * cost_of_steps[True] > most:
        n_weights = _n_weights(policy.aggregation, True)
        notes.append(
            Note(
                "cut",
                f"degrees are not weighed: a fit of their {n_weights:,} weights would take too long "
                "(--questions.degrees True weighs them)",
            )
        )
        degrees = (False,)

    _, n_firings, n_links = aggregation.question_sizes(
        world.evidence, world.question
    )
    cost = sum(cost_of_steps[uses_degrees] for uses_degrees in degrees)
    cost += len(degrees) * int(n_firings.sum() + n_links.sum())
    speed = work_factor(world.question.device) * GRADIENTS_PER_SECOND
    epoch_seconds = cost / speed + len(degrees) * metric_seconds
    for share, bound in (
        (
            budget / max(cost, 1),
            f"the time of {budget:.0e} gradients of firings (--listwise.max-gradients)",
        ),
        (
            seconds / max(epoch_seconds, 1e-9),
            f"{seconds:.0f} seconds, all that is left for it (--seconds)",
        ),
    ):
        if share < n_epochs:
            n_epochs, reason = max(min_epochs, int(share)), bound
    if n_epochs < cfg.n_epochs:
        notes.append(
            Note(
                "cut",
                f"listwise fit: {n_epochs} of {cfg.n_epochs} epochs, because more would take over {reason}",
            )
        )
    cfg = dataclasses.replace(cfg, n_epochs=n_epochs)
    return FitPlan(cfg, tuple(degrees), notes)


def max_valid_firings(run_config: RunConfig) -> int:
    """The most firings of the queries that every validation scores."""
    if run_config.questions.max_valid_firings is not None:
        return run_config.questions.max_valid_firings
    return MAX_VALID_FIRINGS * work_factor(torch.device(run_config.device))


def work_factor(device: torch.device) -> int:
    """How many times the bounds apply on a device."""
    return 1 if device.type == "cpu" else GPU_FACTOR


def n_updates_within(
    ppo: PPOConfig,
    policy: PolicyConfig,
    device: torch.device,
    seconds: float = math.inf,
) -> int:
    """How many updates of PPO cost no more than `MAX_PPO_FIRINGS` on a CPU, and take no more seconds; at least one."""
    n_passes = 1 + GRADIENT_COST * ppo.n_epochs
    n_questions = ppo.n_envs * ppo.n_steps * n_passes
    size = policy.capacity

    # Batches are padded. Links are cheaper than firings, and cost time where they are the most.
    cost = n_questions * max(size.n_firings, size.n_links)
    n_steps = ppo.n_epochs * ppo.n_minibatches * ppo.n_microbatches
    weights = policy.aggregation
    n_moved = n_steps * _n_weights(weights, weights.uses_degrees)
    cost += (1 + GRADIENT_COST) * n_moved // WEIGHTS_PER_GRADIENT
    most = min(MAX_PPO_FIRINGS, PPO_FIRINGS_PER_SECOND * seconds)
    return max(1, int(work_factor(device) * most / cost))


def _n_weights(cfg: AggregationConfig, uses_degrees: bool) -> int:
    """The number of weights that grow with the square of the relations."""
    n_labels = aggregation.n_labels(cfg.sizes)
    per_label = n_labels * (1 + aggregation.N_BUCKETS * uses_degrees)
    return n_labels * per_label
