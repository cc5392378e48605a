"""Gradient steps down the listwise loss, and a first epoch of them that needs no complete list of questions.

Questions are listed in a random order, so that those that come next are a random batch. `begin` starts a first epoch,
`learn` takes the steps that a listed part allows, and `finish` those that are left. Steps depend on the questions and
their order, not on the parts that they are listed in: `make_first_epoch` takes the same ones on a complete list.
`question_training.fit_listwise` goes on with further epochs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from funcppo import optim
from funcppo.config import AdamConfig
from funcppo.core import tree
from funcppo.core.deadline import NO_DEADLINE, Deadline
from funcppo.core.settings import Size, UnitInterval
from funcppo.core.types import I64
from funcppo.kg.run import budget
from funcppo.kg.scores import aggregation, evidence, questions
from funcppo.kg.scores.aggregation import AggregationWorld
from funcppo.kg.scores.evidence import Evidence
from funcppo.kg.scores.question_config import ListwiseConfig
from funcppo.kg.scores.questions import Params, PolicyConfig, QuestionWorld
from funcppo.optim import AdamState

# questions of a complete list between two looks at the time
PART_QUESTIONS = 1024
# batches of the first epoch, after its first one, that are listed before their steps, to sort their questions by size
GROUP_BATCHES = 4


class FitState(NamedTuple):
    """Weights in the middle of a listwise fit."""

    params: Params
    adam: AdamState[Params]
    n_steps: int  # so far


def ignore_first_step() -> None:
    """Do nothing before the first gradient step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstEpochSetup:
    """How the first epoch is fitted."""

    policy: PolicyConfig
    """Which evidence is weighed."""
    listwise: ListwiseConfig
    """Settings of the fit; the learning rate does not fall in the first epoch, whose end is unknown."""
    world: AggregationWorld
    """What the score reads beside evidence."""
    params: Params
    """The weights to start from."""
    batch_size: Size
    """Number of questions of a gradient step."""
    max_size_quantile: UnitInterval
    """Questions with more firings than this share of their group are left out."""
    on_first_step: Callable[[], None] = ignore_first_step
    """Called before the first gradient step."""


class FirstEpoch(NamedTuple):
    """A first epoch so far."""

    fit: FitState
    pending: tuple[Evidence, ...]  # listed since the last step
    n_questions: int  # that steps were taken on, the largest ones included


def init_fit(params: Params) -> FitState:
    """The state of a fit before its first step."""
    return FitState(params, optim.init(params), 0)


def take_step(
    policy: PolicyConfig,
    world: QuestionWorld,
    fit: FitState,
    cfg: ListwiseConfig,
    question: I64[Tensor, "B"],
    rate: float,
) -> FitState:
    """The fit after one step of Adam on some questions."""
    gradient = batch_gradient(policy, world, fit.params, cfg, question)
    params, adam = optim.update(
        AdamConfig(), gradient, fit.adam, fit.params, rate
    )
    return FitState(params, adam, fit.n_steps + 1)


def batch_gradient(
    policy: PolicyConfig,
    world: QuestionWorld,
    params: Params,
    cfg: ListwiseConfig,
    question: I64[Tensor, "B"],
) -> Params:
    """The gradient of the listwise loss of some questions, computed in parts where they do not fit together."""
    size = aggregation.capacity(world.evidence, question)
    per_question = budget.batch_firings(1, size)
    n_together = max(1, cfg.max_batch_firings // per_question)

    total: Params | None = None
    for part in question.split(n_together):
        gradient = grad(questions.listwise_loss, argnums=3)(
            replace(policy, capacity=size), world, cfg.penalty, params, part
        )
        if len(part) == len(question):
            return gradient
        share = len(part) / len(question)
        weighted = tree.map(lambda x: share * x, gradient)  # noqa: B023
        total = (
            weighted if total is None else tree.map(torch.add, total, weighted)
        )
    assert total is not None, "there are questions"
    return total


def fitting_questions(
    listed: Evidence, quantile: float
) -> tuple[I64[Tensor, "n"], int, int]:
    """The questions whose answer is derived and whose firings are no more than some quantile of theirs.

    Returns:
      Their rows; the quantile, in firings; and the number of larger ones.
    """
    rows = derived_questions(listed)
    _, n_firings, _ = aggregation.question_sizes(listed, rows)
    most = torch.quantile(n_firings.double(), quantile)
    fits = n_firings <= most
    return rows[fits], int(most), int((~fits).sum())


def derived_questions(listed: Evidence) -> I64[Tensor, "n"]:
    """The rows of the questions whose answer is derived."""
    return (listed.answer >= 0).nonzero().squeeze(1)


# -- the first epoch


def begin(cfg: FirstEpochSetup) -> FirstEpoch:
    """The first epoch before anything is listed."""
    return FirstEpoch(init_fit(cfg.params), (), 0)


def learn(
    cfg: FirstEpochSetup, epoch: FirstEpoch, part: Evidence
) -> FirstEpoch:
    """The epoch after the steps for which a part and those before hold enough questions.

    Args:
      part: the questions that are listed next.
    """
    epoch = epoch._replace(pending=(*epoch.pending, part))
    while True:
        # The first step waits for no other batch.
        n_batches = GROUP_BATCHES if epoch.fit.n_steps else 1
        n_grouped = n_batches * cfg.batch_size
        if _count_derived(epoch.pending) < n_grouped:
            return epoch
        listed = evidence.concatenate(epoch.pending)
        stop = int(derived_questions(listed)[n_grouped - 1]) + 1
        group = evidence.slice_questions(listed, 0, stop)
        rest = evidence.slice_questions(listed, stop, len(listed.label))
        epoch = _learn_group(cfg, epoch, group, n_batches)
        epoch = epoch._replace(pending=(rest,))


def finish(cfg: FirstEpochSetup, epoch: FirstEpoch) -> FirstEpoch | None:
    """The whole epoch, without an incomplete batch; None where there is no complete one."""
    n_batches = _count_derived(epoch.pending) // cfg.batch_size
    if n_batches:
        group = evidence.concatenate(epoch.pending)
        epoch = _learn_group(cfg, epoch, group, n_batches)
    return epoch._replace(pending=()) if epoch.fit.n_steps else None


def make_first_epoch(
    cfg: FirstEpochSetup, listed: Evidence, deadline: Deadline = NO_DEADLINE
) -> FirstEpoch | None:
    """The epoch over listed questions, in their order; None where there are fewer than a batch.

    Args:
      deadline: ends it after its first part.
    """
    epoch = begin(cfg)
    for start in range(0, len(listed.label), PART_QUESTIONS):
        part = evidence.slice_questions(listed, start, start + PART_QUESTIONS)
        epoch = learn(cfg, epoch, part)
        if deadline.is_over:
            break
    return finish(cfg, epoch)


def _count_derived(parts: tuple[Evidence, ...]) -> int:
    """The questions of some parts whose answer is derived."""
    return sum(int((part.answer >= 0).sum()) for part in parts)


def _learn_group(
    cfg: FirstEpochSetup, epoch: FirstEpoch, group: Evidence, n_batches: int
) -> FirstEpoch:
    """The epoch after a step on each of so many batches of a group, questions of similar size together."""
    fit = epoch.fit
    if not fit.n_steps:
        cfg.on_first_step()
    n_questions = epoch.n_questions + len(derived_questions(group))
    rows, _, _ = fitting_questions(group, cfg.max_size_quantile)
    group_world = QuestionWorld(
        cfg.world, group, rows, torch.zeros_like(group.base_score)
    )
    device = cfg.params.value_weight.device
    group_world = tree.map(lambda x: x.to(device), group_world)

    # The prior of the weights counts once for all questions so far, not once for each group.
    penalty = cfg.listwise.penalty
    deviation = penalty.feature_deviation * (n_questions / len(rows)) ** 0.5
    listwise = replace(
        cfg.listwise, penalty=replace(penalty, feature_deviation=deviation)
    )

    _, n_firings, _ = aggregation.question_sizes(group, rows)
    by_size = rows[torch.argsort(n_firings, stable=True)].to(device)
    for question in by_size.tensor_split(n_batches):
        fit = take_step(
            cfg.policy,
            group_world,
            fit,
            listwise,
            question,
            cfg.listwise.learning_rate,
        )
    return FirstEpoch(fit, (), n_questions)
