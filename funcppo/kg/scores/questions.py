"""Questions as episodes: which of the candidates that rules derive is the answer?

A state is a question about a known fact that is left out of the evidence, an action one of its candidates, and the
reward 1 for the answer and 0 for any other. An episode has one step. The policy is a softmax over the scores of
`aggregation`, which compares the candidates of one question, as a ranking does.

`listwise_loss` is the negative expected log-probability of the answer: the exact objective of a warm start, by
gradient steps on the same params that PPO refines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core import random
from funcppo.core.types import F32, I64, Bool
from funcppo.interfaces import (
    KL_REGULARISED_CATEGORICAL,
    Agent,
    Environment,
    Timestep,
)
from funcppo.kg.scores import learned
from funcppo.kg.scores.evidence import Evidence, n_labels
from funcppo.kg.scores.learned import (
    AggregationConfig,
    AggregationWorld,
    Capacity,
)
from funcppo.kg.scores.question_config import Penalty


class QuestionWorld(NamedTuple):
    """The questions to learn from and their evidence, which training never writes."""

    aggregation: AggregationWorld
    evidence: Evidence
    question: I64[Tensor, "Q"]  # rows of the evidence to ask, at least one
    # score of each candidate by the weights that PPO starts from
    prior_score: F32[Tensor, "L"]


class QuestionState(NamedTuple):
    """A question in each row."""

    question: I64[Tensor, "B"]  # row of the evidence
    is_answered: Bool[Tensor, "B"]


class Observation(NamedTuple):
    """A question, whose evidence the network reads from the world, and its candidates."""

    question: I64[Tensor, "B"]
    action_mask: Bool[Tensor, "B S"]  # the candidates that there are


class Output(NamedTuple):
    """The policy and the value of each question."""

    logits: F32[Tensor, "B S"]  # the lowest number where there is no candidate
    # of the policy that PPO starts from, which the entropy is relative to
    prior_logits: F32[Tensor, "B S"]
    value: F32[Tensor, "B"]


class Params(NamedTuple):
    """The weights of the policy and of its value."""

    score: learned.Params
    # by label: a constant, and a factor of the chance to be right that the policy gives itself
    value_weight: F32[Tensor, "B 2"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    """Settings of the policy."""

    aggregation: AggregationConfig
    """Which evidence is weighed."""
    capacity: Capacity
    """The most candidates, firings and links of a question."""


# -- the environment


def blank_world(world: AggregationWorld) -> QuestionWorld:
    """One question without evidence: what a training state is, but for its numbers, does not depend on questions."""
    none = world.shape.new_zeros(0)
    one, two = world.shape.new_zeros(1), world.shape.new_zeros(2)
    score = world.support.new_zeros(1)

    return QuestionWorld(
        aggregation=world,
        evidence=Evidence(
            label=one,
            given=one,
            left_out=one,
            candidate_offsets=torch.arange(2, device=one.device),
            answer=one - 1,
            question=one,
            entity=one,
            own_degree=one,
            log_listed=score,
            base_score=score,
            embedding_score=score,
            path_score=score,
            firing_offsets=two,
            link_offsets=two,
            rule=none,
            is_left_out=none.bool(),
            n_groundings=none,
            fan_out=none,
            n_all_groundings=none,
            walk=score[:0],
            link_label=none,
        ),
        question=one,
        prior_score=score,
    )


def reset(
    cfg: Capacity, world: QuestionWorld, key: I64[Tensor, "B 2"]
) -> QuestionState:
    """A question drawn uniformly for each key."""
    n_questions = torch.full_like(key[:, 0], len(world.question))
    question = world.question[random.integer_from_key(key, n_questions)]
    return QuestionState(question, torch.zeros_like(question, dtype=torch.bool))


def step_functional(
    cfg: Capacity,
    world: QuestionWorld,
    state: QuestionState,
    action: I64[Tensor, "B"],
    key: I64[Tensor, "B 2"],
) -> tuple[QuestionState, Timestep]:
    """Answer each row's question, which ends its episode; a row that is answered stays as it is.

    Args:
      action: the place of a candidate among those of its question.
      key: unused, because an answer is right or wrong.
    """
    is_right = action == _answer_place(world.evidence, state.question)
    reward = torch.where(is_right & ~state.is_answered, 1.0, 0.0)
    done = torch.ones_like(state.is_answered)
    timestep = Timestep(
        reward=reward, terminated=done, truncated=torch.zeros_like(done)
    )
    return QuestionState(state.question, done), timestep


def observe(
    cfg: Capacity, world: QuestionWorld, state: QuestionState
) -> Observation:
    """The questions and the places of their candidates."""
    offsets = world.evidence.candidate_offsets
    count = offsets[state.question + 1] - offsets[state.question]
    place = torch.arange(cfg.n_candidates, device=count.device)
    return Observation(state.question, place < count[:, None])


def environment(
    size: Capacity,
) -> Environment[QuestionWorld, QuestionState, Observation, QuestionState]:
    """Questions as an `Environment`.

    Args:
      size: no question has more.
    """
    return Environment(
        cfg=size,
        reset=reset,
        step_functional=step_functional,
        observe=observe,
        truncates=False,
    )


def _answer_place(
    evidence: Evidence, question: I64[Tensor, "B"]
) -> I64[Tensor, "B"]:
    """The place of the answer among the candidates of its question; negative if it is none of them."""
    answer = evidence.answer[question]
    first = evidence.candidate_offsets[question]
    return torch.where(answer < 0, -1, answer - first)


# -- the policy


def agent(
    cfg: PolicyConfig,
) -> Agent[QuestionWorld, Params, Observation, Output]:
    """The scores of the candidates as a policy, and the chance to be right as its value.

    The entropy is relative to the policy that PPO starts from.
    """
    return Agent(
        cfg=cfg,
        init=init,
        apply=apply,
        distribution=KL_REGULARISED_CATEGORICAL,
    )


def init(cfg: PolicyConfig, key: I64[Tensor, "2"]) -> Params:
    """The weights before training; the value is the chance to be right that the policy gives itself."""
    n = n_labels(cfg.aggregation.sizes)
    value_weight = torch.tensor([0.0, 1.0], device=key.device)
    return Params(
        score=learned.init(cfg.aggregation, key),
        value_weight=value_weight.repeat(n, 1),
    )


def apply(
    cfg: PolicyConfig, world: QuestionWorld, params: Params, obs: Observation
) -> Output:
    """The logits of the candidates of each question, and the value.

    The candidates that were drawn from a larger number stand for them all: their logits grow accordingly.
    """
    size = cfg.capacity
    batch = learned.gather(world.evidence, obs.question, size)
    scores = learned.score(
        cfg.aggregation, world.aggregation, params.score, batch
    )
    first = world.evidence.candidate_offsets[obs.question]
    place = torch.arange(size.n_candidates, device=first.device)
    log_listed = world.evidence.log_listed
    position = (first[:, None] + place).clamp_max(len(log_listed) - 1)
    correction = log_listed[position]
    logits = scores.view(position.shape) - correction
    prior_logits = world.prior_score[position] - correction
    lowest = torch.finfo(logits.dtype).min
    logits = torch.where(obs.action_mask, logits, lowest)

    probability = torch.softmax(logits.detach(), -1)
    constant, factor = params.value_weight[
        world.evidence.label[obs.question]
    ].unbind(-1)
    value = constant + factor * (probability**2).sum(-1)
    return Output(
        logits=logits,
        prior_logits=torch.where(obs.action_mask, prior_logits, lowest),
        value=value,
    )


# -- the listwise objective


def listwise_loss(
    cfg: PolicyConfig,
    world: QuestionWorld,
    penalty: Penalty,
    params: Params,
    question: I64[Tensor, "B"],
) -> F32[Tensor, ""]:
    """The mean of -log p(answer) over some questions, plus the penalty of the weights.

    Args:
      question: rows of the evidence whose answers are candidates.
    """
    place = _answer_place(world.evidence, question)
    state = QuestionState(question, torch.zeros_like(question > 0))
    obs = observe(cfg.capacity, world, state)
    logits = apply(cfg, world, params, obs).logits
    log_p = torch.log_softmax(logits, -1).gather(1, place[:, None])
    weights = params.score
    squares = (
        penalty.rule_weight * (weights.rule_weight**2).sum()
        + penalty.link_weight * (weights.link_weight**2).sum()
        + penalty.degree_weight * (weights.degree_weight**2).sum()
    )
    moved = learned.squares_moved(cfg.aggregation, weights)
    n_questions = len(world.question)
    prior = moved / (2 * n_questions * penalty.feature_deviation**2)
    return squares + prior - log_p.mean()
