"""Learning the score of candidates from question episodes: the questions, the listwise warm start, and PPO.

`collect_questions` lists the evidence of training questions within a bound, `fit_listwise` yields the params after each
epoch of the warm start, and `refine_with_ppo` those after each update of PPO.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from funcppo import optim, random, train_step
from funcppo.config import AdamConfig, Config, PPOConfig
from funcppo.logic import triple_index
from funcppo.logic.firings import LeftOut
from funcppo.prover import aggregation, evidence, questions
from funcppo.prover.aggregation import AggregationConfig
from funcppo.prover.evidence import EvidenceConfig, FactIndex
from funcppo.prover.questions import (
    Params,
    Penalty,
    PolicyConfig,
    QuestionWorld,
)
from funcppo.prover.task import ProverTask
from funcppo.ranges import (
    NonNegativeFloat,
    Seed,
    Size,
    UnitInterval,
    check_fields,
)
from funcppo.types import I64

# Questions of similar size share a batch; they are sorted within this many batches.
SORTED_BATCHES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionConfig:
    """Which questions are asked, and with which candidates."""

    left_out: LeftOut = "fact"
    """What is unknown while a question is answered: its own fact, or all facts between its two entities."""
    n_best: Size = 60
    """Candidates of each question, the best by noisy-or@3."""
    n_sampled: Size = 30
    """Candidates beside them, drawn from the others."""
    max_questions: Size = 50_000
    """Questions at most, drawn from those of all facts."""
    max_size_quantile: UnitInterval = 0.995
    """Questions with more firings than this share of the questions are left out, so that batches stay small."""
    seed: Seed = 0
    """Of what is drawn."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ListwiseConfig:
    """Settings of the warm start."""

    n_epochs: Size = 8
    """Passes over the questions."""
    batch_size: Size = 256
    """Questions of a gradient step."""
    learning_rate: NonNegativeFloat = 0.02
    """Initial learning rate of Adam, which falls to 0 along a line."""
    penalty: Penalty = field(default_factory=Penalty)
    """Priors of the weights."""
    seed: Seed = 0
    """Of the order of the questions."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class Collected(NamedTuple):
    """The questions to learn from."""

    world: QuestionWorld
    policy: PolicyConfig
    notes: tuple[str, ...]  # which questions were left out


def collect_questions(
    task: ProverTask,
    facts: FactIndex,
    cfg: QuestionConfig,
    *,
    uses_degrees: bool,
) -> Collected:
    """List the evidence of training questions: those of a sample of the facts, each without its own.

    Returns:
      The questions whose answer is derived without its own fact.

    Raises:
      ValueError: there are none.
    """
    known = evidence.binary_facts(task.kb)  # nothing of valid or test
    asked = evidence.training_questions(known)
    n_all = len(asked.entity)
    key = random.key(cfg.seed, asked.entity.device)
    order = random.permutation(key, n_all)[: cfg.max_questions]
    parts = evidence.iter_evidence(
        task.kb,
        task.sizes,
        facts,
        evidence.select_questions(asked, order),
        triple_index.build_triple_index(known, task.sizes.n_constants),
        EvidenceConfig(
            left_out=cfg.left_out,
            object_identity=task.least_model.object_identity,
            n_best=cfg.n_best,
            n_sampled=cfg.n_sampled,
            seed=cfg.seed,
        ),
    )
    listed = evidence.concatenate(list(parts))
    rows = (listed.answer >= 0).nonzero().squeeze(1)
    if not len(rows):
        raise ValueError("no rule derives a known fact from the others")
    _, n_firings, _ = aggregation.question_sizes(listed, rows)
    most = torch.quantile(n_firings.double(), cfg.max_size_quantile)
    fits = n_firings <= most
    notes = (
        f"{len(order):,} of {n_all:,} questions asked; the rules derive the answers of {len(rows):,} without their "
        f"own fact; {int((~fits).sum()):,} of these have more than {int(most):,} firings and were left out",
    )
    rows = rows[fits]
    world = aggregation.make_world(task.kb, task.sizes, facts)
    return Collected(
        world=QuestionWorld(world, listed, rows),
        policy=PolicyConfig(
            aggregation=AggregationConfig(
                sizes=task.sizes,
                n_shapes=aggregation.n_shapes(world),
                uses_degrees=uses_degrees,
            ),
            capacity=aggregation.capacity(listed, rows),
        ),
        notes=notes,
    )


def fit_listwise(
    policy: PolicyConfig,
    world: QuestionWorld,
    params: Params,
    cfg: ListwiseConfig,
) -> Iterator[Params]:
    """Yield the params after each epoch of steps down the listwise loss."""
    adam = AdamConfig()
    state = optim.init(params)
    n_batches = max(1, len(world.question) // cfg.batch_size)
    n_steps = cfg.n_epochs * n_batches
    step = 0
    for epoch in range(cfg.n_epochs):
        key = random.fold_in(random.key(cfg.seed, world.question.device), epoch)
        for question in _batches(world, key, cfg.batch_size):
            size = aggregation.capacity(world.evidence, question)
            gradient = grad(questions.listwise_loss, argnums=3)(
                replace(policy, capacity=size),
                world,
                cfg.penalty,
                params,
                question,
            )
            rate = cfg.learning_rate * (1.0 - step / n_steps)
            params, state = optim.update(adam, gradient, state, params, rate)
            step += 1
        yield params


def _batches(
    world: QuestionWorld, key: I64[Tensor, "2"], size: int
) -> Iterator[I64[Tensor, "B"]]:
    """Yield the questions in random order; those of similar size together, and no incomplete batch beside others."""
    order = random.permutation(key, len(world.question))
    rows = world.question[order]
    rows = rows[: max(1, len(rows) // size) * size]
    for group in rows.split(SORTED_BATCHES * size):
        _, n_firings, _ = aggregation.question_sizes(world.evidence, group)
        yield from group[torch.argsort(n_firings, stable=True)].split(size)


def refine_with_ppo(
    policy: PolicyConfig,
    world: QuestionWorld,
    params: Params,
    ppo: PPOConfig,
    seed: int,
) -> Iterator[tuple[Params, train_step.Metrics]]:
    """Yield the params and the metrics after each update of PPO, from given params on."""
    cfg = Config(
        ppo=ppo,
        env=questions.environment(policy.capacity),
        agent=questions.agent(policy),
    )
    key = random.key(seed, world.question.device)
    state = train_step.init(cfg, world, key)._replace(params=params)
    for _ in range(ppo.n_updates):
        state, metrics = train_step.train_step(cfg, world, state)
        yield state.params, metrics
