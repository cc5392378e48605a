"""Training link embeddings on known facts, within a time that is counted before it starts."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from funcppo import optim
from funcppo.core import random
from funcppo.core.deadline import NO_DEADLINE, Deadline
from funcppo.core.settings import is_cuda
from funcppo.kg.logic.question_types import LeftOut
from funcppo.kg.scores import evidence, link_embedding
from funcppo.kg.scores.link_embedding import Links, TrainState
from funcppo.kg.scores.question_config import EMBEDDING_SECONDS, EmbeddingConfig
from funcppo.kg.search.task import PhaseCallback, ProverTask, ignore_phase

# With fewer passes over the facts there is little to gain.
MIN_EPOCHS = 8
# products of the logits and of their gradient, for each number of a vector and each entity
PRODUCTS_PER_LOGIT = 3
# operations for each number that a step looks up or moves
OPERATIONS_PER_LOOKUP = 100
OPERATIONS_PER_MOVED = 20
# operations in a second, and seconds of a step that does next to nothing; on an H100 WN18RR and FB15k-237 with vectors
# of rank 256 took 1.5e13 and 1.4e13 (phases of `experiments/results/tuned_results.json`)
CPU_OPERATIONS_PER_SECOND = 3e9
GPU_OPERATIONS_PER_SECOND = 1e13
STEP_SECONDS = 3e-3


class EmbeddingPlan(NamedTuple):
    """What there is time for."""

    cfg: EmbeddingConfig
    seconds: float  # that it takes, by count
    most_seconds: float  # that it may take
    is_too_long: (
        bool  # fewer than `MIN_EPOCHS` passes take more time than there is
    )


def plan_training(
    task: ProverTask, cfg: EmbeddingConfig, device: str, seconds: float
) -> EmbeddingPlan:
    """Choose the passes over the facts that there is time for, by a count of the work.

    Args:
      seconds: that are left for it; its own bound is in the settings.
    """
    n_links = 2 * len(evidence.binary_facts(task.kb))
    n_rows = min(cfg.batch_size, max(n_links, 1))
    n_steps = max(1, n_links // n_rows)
    n_entities, n_labels = task.sizes.n_constants, evidence.n_labels(task.sizes)
    width = 2 * cfg.rank * (cfg.n_folds + 1)

    operations = PRODUCTS_PER_LOGIT * n_rows * n_entities
    operations += OPERATIONS_PER_LOOKUP * n_rows
    operations += OPERATIONS_PER_MOVED * (n_entities + n_labels)
    speed = CPU_OPERATIONS_PER_SECOND
    if is_cuda(device):
        speed = GPU_OPERATIONS_PER_SECOND
    per_epoch = n_steps * (STEP_SECONDS + operations * width / speed)

    most_seconds = min(seconds, cfg.seconds or EMBEDDING_SECONDS)
    n_epochs = max(1, min(cfg.n_epochs, int(most_seconds / per_epoch)))
    return EmbeddingPlan(
        cfg=dataclasses.replace(cfg, n_epochs=n_epochs),
        seconds=n_epochs * per_epoch,
        most_seconds=most_seconds,
        is_too_long=n_epochs < min(MIN_EPOCHS, cfg.n_epochs),
    )


def train(
    task: ProverTask,
    cfg: EmbeddingConfig,
    left_out: LeftOut,
    seed: int,
    device: str,
    on_phase: PhaseCallback = ignore_phase,
    deadline: Deadline = NO_DEADLINE,
) -> link_embedding.Params:
    """Train all models on the known facts of two arguments, nothing of valid or test.

    Args:
      left_out: what a training question leaves out, which its model must not have seen.
      seed: of the initial vectors and of the order of the questions.
      deadline: ends the training after the epoch in progress.
    """
    asked = evidence.training_questions(evidence.binary_facts(task.kb))
    label = evidence.make_label(asked.predicate, asked.side)
    links = link_embedding.training_links(asked, label, cfg.n_folds, left_out)
    links = Links(*(column.to(device) for column in links))

    init_key, key = random.split(random.key(seed, device)).unbind(-2)
    n_labels = evidence.n_labels(task.sizes)
    params = link_embedding.init(
        cfg, task.sizes.n_constants, n_labels, init_key
    )
    state = TrainState(params, optim.init(params))

    n_links = len(links.label)
    batch_size = min(cfg.batch_size, n_links)
    n_steps = cfg.n_epochs * (n_links // batch_size)
    step = 0
    for epoch in range(cfg.n_epochs):
        on_phase("training link embeddings", epoch, cfg.n_epochs)
        order = random.permutation(random.fold_in(key, epoch), n_links)
        for rows in order.split(batch_size):
            if len(rows) < batch_size:  # beside others
                continue
            batch = Links(*(column[rows] for column in links))
            rate = cfg.learning_rate * (1.0 - step / n_steps)
            state = link_embedding.train_step(cfg.penalty, state, batch, rate)
            step += 1
        if deadline.is_over:
            break
    return state.params


def blank(
    task: ProverTask, cfg: EmbeddingConfig, device: str
) -> link_embedding.Params:
    """Vectors of zeros, as many as training gives."""
    n_labels = evidence.n_labels(task.sizes)
    key = random.key(0, device)
    params = link_embedding.init(cfg, task.sizes.n_constants, n_labels, key)
    return link_embedding.Params(*(torch.zeros_like(x) for x in params))
