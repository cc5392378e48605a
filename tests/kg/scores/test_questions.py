"""Question episodes: the reward, the policy over the candidates of one question, and what both objectives learn."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import funcppo as fp
from funcppo.core import random
from funcppo.kg.config import Penalty
from funcppo.kg.scores import learned
from funcppo.kg.scores.learned import PolicyConfig, QuestionState, QuestionWorld
from tests.kg.logic.test_derive import HEAD, TAIL, ask_all
from tests.kg.scores.test_evidence import KNOWS, VILLAGE
from tests.kg.scores.test_learned import problem

# Who knows 1, and whom does 1 know? The answer that is left out is 2.
ASKED = ask_all([(KNOWS, HEAD, 1, 2), (KNOWS, TAIL, 1, 2)])


def make_world():
    cfg, world, _, found = problem(VILLAGE, ASKED)
    rows = torch.arange(len(found.label))
    policy = PolicyConfig(
        aggregation=cfg, capacity=learned.capacity(found, rows)
    )
    none = torch.zeros_like(found.base_score)
    return policy, QuestionWorld(world, found, rows, none)


def state_of(*question):
    rows = torch.tensor(question)
    return QuestionState(rows, torch.zeros_like(rows, dtype=torch.bool))


def test_the_answer_is_rewarded_once_and_ends_the_episode():
    policy, world = make_world()
    env = learned.environment(policy.capacity)
    place = [
        world.evidence.entity[world.evidence.question == q].tolist().index(2)
        for q in (0, 1)
    ]
    state = state_of(0, 1, 0)
    action = torch.tensor([place[0], place[1], 1 - place[0]])
    key = random.split(random.key(0), 3)
    after, step = env.step_functional(env.cfg, world, state, action, key)
    assert step.reward.tolist() == [1.0, 1.0, 0.0]
    assert step.terminated.all() and not step.truncated.any()
    again, step = env.step_functional(env.cfg, world, after, action, key)
    assert step.reward.tolist() == [0.0, 0.0, 0.0] and step.terminated.all()
    assert torch.equal(again.question, state.question)


def test_the_policy_is_a_softmax_over_the_candidates_of_the_question():
    policy, world = make_world()
    params = learned.init_params(policy, random.key(0))
    obs = learned.observe(policy.capacity, world, state_of(0, 1))
    n_candidates = torch.diff(world.evidence.candidate_offsets)
    assert obs.action_mask.sum(1).tolist() == n_candidates.tolist()
    output = learned.apply(policy, world, params, obs)
    p = torch.softmax(output.logits, -1)
    assert (p[~obs.action_mask] == 0).all()
    whole = learned.score(
        policy.aggregation,
        world.aggregation,
        params.score,
        learned.whole(world.evidence),
    )
    for q in (0, 1):
        mine = torch.softmax(whole[world.evidence.question == q], 0)
        torch.testing.assert_close(p[q, : len(mine)], mine)
        assert float(output.value[q]) == pytest.approx(float((mine**2).sum()))

    # the loss of the warm start, and its penalty
    answer = world.evidence.answer - world.evidence.candidate_offsets[:-1]
    log_p = [math.log(float(p[q, answer[q]])) for q in (0, 1)]
    loss = learned.listwise_loss(
        policy, world, Penalty(), params, world.question
    )
    assert float(loss) == pytest.approx(-sum(log_p) / 2, abs=1e-5)
    heavy = params._replace(
        score=params.score._replace(
            rule_weight=torch.full_like(params.score.rule_weight, 3.0)
        )
    )
    weighed, free = (
        float(learned.listwise_loss(policy, world, c, heavy, world.question))
        for c in (Penalty(rule_weight=0.5), Penalty(rule_weight=0.0))
    )
    n_weights = heavy.score.rule_weight.numel()
    assert weighed - free == pytest.approx(0.5 * 9 * n_weights, rel=1e-4)


def test_the_prior_of_features_worked_by_hand():
    """One weight of each kind moves by 0.5; a quarter each over twice the questions and the variance."""
    policy, world = make_world()
    start = replace(policy.aggregation, odds_power=2.0)
    policy = replace(policy, aggregation=start)
    params = learned.init_params(policy, random.key(0))
    score = params.score
    feature = score.feature_weight.clone()
    degree = score.own_degree_weight.clone()
    feature[0, 0, 0] += 0.5
    feature[0, 0, 1] -= 0.5
    degree[0, 0] += 0.5
    score = score._replace(
        feature_weight=feature,
        own_degree_weight=degree,
        linked_weight=score.linked_weight.index_fill(0, torch.tensor([0]), 0.5),
    )
    moved = params._replace(score=score)
    tight, wide = (
        float(learned.listwise_loss(policy, world, c, moved, world.question))
        for c in (
            Penalty(feature_deviation=0.1),
            Penalty(feature_deviation=1e6),
        )
    )
    assert tight - wide == pytest.approx(4 * 0.25 / (2 * 2 * 0.01), rel=1e-4)


def test_candidates_that_were_drawn_stand_for_those_that_were_not():
    policy, world = make_world()
    chance = torch.zeros_like(world.evidence.log_listed)
    chance[0] = math.log(0.25)
    drawn = world._replace(evidence=world.evidence._replace(log_listed=chance))
    params = learned.init_params(policy, random.key(0))
    obs = learned.observe(policy.capacity, world, state_of(0, 1))
    before, after = (
        learned.apply(policy, w, params, obs).logits for w in (world, drawn)
    )
    difference = (after - before)[obs.action_mask]
    assert difference[0] == pytest.approx(math.log(4))
    assert (difference[1:] == 0).all()


def test_ppo_learns_the_answers():
    policy, world = make_world()
    learner = fp.ppo(
        env=learned.environment(policy.capacity),
        network=learned.agent(policy),
        world=world,
        n_envs=64,
        n_steps=1,
        n_updates=40,
        n_minibatches=1,
        learning_rate=0.05,
        entropy_coef=0.0,
        value_loss="plain",
    )
    state = learner.init(random.key(0))
    returns = []
    for _ in range(40):
        state, metrics = learner.step(state)
        rollout = metrics.rollout
        returns.append(float(rollout.episode_return_sum / rollout.n_episodes))
    assert returns[0] < 0.9 and returns[-1] > 0.95
