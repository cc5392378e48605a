"""Bounds of what a run does before PPO, by the time that it may take, where they are not set.

A run of the default time, of less, or without a limit has those of `prover.question_config`; in a longer one they grow
with the time. They are settings of the run, which a resumed run keeps.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from funcppo.kg.run import question_bounds
from funcppo.kg.run.config import RunConfig
from funcppo.kg.scores.question_config import (
    EMBEDDING_SECONDS,
    LISTING_SECONDS,
    MAX_FIRINGS,
    MAX_LISTWISE_STEPS,
    MAX_VALID_FIRINGS,
    N_NETWORK_STEPS,
    NETWORK_SECONDS,
)

# the default time of a run
BASE_SECONDS = 300.0
# of a firing, with what is computed from it, twice
BYTES_PER_FIRING = 200


def time_factor(seconds: float | None) -> float:
    """The time of a run in units of the default, at least 1.

    Args:
      seconds: of the run; None for no limit, which counts as the default.
    """
    return max(1.0, (seconds or BASE_SECONDS) / BASE_SECONDS)


def with_time_bounds(run_config: RunConfig, spare_bytes: float) -> RunConfig:
    """The settings with the bounds that are not set.

    Args:
      spare_bytes: memory that more firings than the usual ones may take.
    """
    factor = time_factor(run_config.seconds)
    # In whole units: what is free differs a little from run to run.
    spare = spare_bytes / (MAX_FIRINGS * BYTES_PER_FIRING)
    if math.isfinite(spare):
        spare = math.floor(max(spare, 0.0))
    of_firings = min(factor, 1 + spare)
    max_firings = int(MAX_FIRINGS * of_firings)
    work = question_bounds.work_factor(torch.device(run_config.device))
    max_valid_firings = int(MAX_VALID_FIRINGS * max(work, of_firings))
    questions, listwise = run_config.questions, run_config.listwise
    embedding, network = run_config.embedding, run_config.bellman_ford
    is_network_tried = questions.bellman_ford
    if is_network_tried is None:
        is_network_tried = "auto" if factor > 1 else False
    return dataclasses.replace(
        run_config,
        questions=dataclasses.replace(
            questions,
            seconds=questions.seconds or factor * LISTING_SECONDS,
            max_firings=questions.max_firings or max_firings,
            max_valid_firings=questions.max_valid_firings or max_valid_firings,
            bellman_ford=is_network_tried,
        ),
        listwise=dataclasses.replace(
            listwise,
            max_steps=listwise.max_steps or int(factor * MAX_LISTWISE_STEPS),
        ),
        embedding=dataclasses.replace(
            embedding, seconds=embedding.seconds or factor * EMBEDDING_SECONDS
        ),
        bellman_ford=dataclasses.replace(
            network,
            n_steps=network.n_steps or int(factor * N_NETWORK_STEPS),
            seconds=network.seconds or factor * NETWORK_SECONDS,
        ),
    )
