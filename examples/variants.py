"""Variants of PPO, each a loss or an estimator of advantages of a few lines.

    python examples/variants.py simple

A loss has the arguments and results of `fp.losses.loss_fn`, an estimator those of `fp.advantages.estimate_gae`.
"""

import sys
from functools import partial
from typing import NamedTuple

import torch

import funcppo as fp
from funcppo.nets.networks import Dense, dense, init_dense


def simple_loss(cfg, world, params, batch, scalars):
    """Penalise the distance of the ratio from 1 (Xie et al. 2024, arXiv:2401.16025)."""
    rows = fp.losses.evaluate_batch(cfg, world, params, batch)
    advantage = rows.batch.advantage
    penalty = advantage.abs() / (2 * scalars.clip_eps) * (rows.ratio - 1) ** 2
    policy_loss = -rows.mean(rows.ratio * advantage - penalty)
    return fp.losses.total_loss(cfg, rows, policy_loss, scalars)


def actor_critic_loss(cfg, world, params, batch, scalars):
    """Follow the policy gradient of one pass (A2C: Mnih et al. 2016, arXiv:1602.01783)."""
    rows = fp.losses.evaluate_batch(cfg, world, params, batch)
    log_prob = rows.log_ratio + rows.batch.log_prob
    policy_loss = -rows.mean(log_prob * rows.batch.advantage)
    return fp.losses.total_loss(cfg, rows, policy_loss, scalars)


ONE_PASS = {
    "n_epochs": 1,
    "n_minibatches": 1,
    "advantage_ddof": None,
    "value_loss": "plain",
}


def discovered_loss(cfg, world, params, batch, scalars):
    """Use the drift that was found by meta-learning (Lu et al. 2022, arXiv:2210.05639)."""
    rows = fp.losses.evaluate_batch(cfg, world, params, batch)
    advantage = rows.batch.advantage
    gain = (rows.ratio - 1) * advantage
    loss = rows.log_ratio * advantage
    drift = torch.where(
        advantage >= 0,
        torch.relu(gain - 2.0 * torch.tanh(gain / 2.0)),
        torch.relu(loss - 0.6 * torch.tanh(loss / 0.6)),
    )
    policy_loss = -rows.mean(rows.ratio * advantage - drift)
    return fp.losses.total_loss(cfg, rows, policy_loss, scalars)


def v_trace(cfg, world, params, steps, scalars):
    """Correct returns for a policy that is not the rollout's (Espeholt et al. 2018, arXiv:1802.01561)."""
    t, agent = steps.trajectory, cfg.agent
    obs, action = fp.tree.map(lambda x: x.flatten(0, 1), (t.obs, t.action))
    output = agent.apply(agent.cfg, world, params, obs)
    log_prob = agent.distribution.log_prob(output, action)
    rho = (log_prob.view_as(t.log_prob) - t.log_prob).exp().clamp(max=1.0)

    discount = scalars.gamma * (~steps.terminated).to(rho.dtype)
    delta = rho * (t.reward + discount * steps.next_value - t.value)
    decay = discount * scalars.gae_lambda * rho * ~t.truncated
    target = t.value + fp.advantages.discounted_sum(delta, decay)
    after = torch.cat([target[1:], steps.next_value[-1:]])
    after = torch.where(t.truncated, steps.next_value, after)
    advantage = rho * (t.reward + discount * after - t.value)
    return fp.advantages.Estimate(advantage, target)


def with_logits(params_of, cfg, world, params, steps, scalars):
    """Estimate advantages, and keep the logits of some policy for the loss."""
    estimate = fp.advantages.estimate_gae(cfg, world, params, steps, scalars)
    obs = fp.tree.map(lambda x: x.flatten(0, 1), steps.trajectory.obs)
    params = params_of(world, params)
    logits = cfg.agent.apply(cfg.agent.cfg, world, params, obs).logits
    logits = logits.view(*steps.next_value.shape, -1)
    return fp.advantages.Estimate(*estimate[:2], extras=logits)


class Reference(NamedTuple):
    """World of a learner that stays near another policy."""

    params: tuple


class Distance(NamedTuple):
    """Measure that is logged beside those of PPO."""

    distance: torch.Tensor


def distance_to(rows, logits):
    """Mean of KL(logits, policy)."""
    p, q = logits.log_softmax(-1), rows.output.logits.log_softmax(-1)
    return rows.mean((p.exp() * (p - q)).sum(-1))


def of_reference(world, params):
    """Parameters of the reference."""
    return world.params


def of_rollout(world, params):
    """Parameters that the rollout was made with."""
    return params


def reference_loss(cfg, world, params, batch, scalars):
    """Stay near the reference, as fine-tuning does."""
    rows = fp.losses.evaluate_batch(cfg, world, params, batch)
    distance = distance_to(rows, rows.batch.extras)
    policy_loss = fp.losses.policy_loss(
        rows.ratio, rows.batch.advantage, scalars.clip_eps, rows.mean
    )
    return fp.losses.total_loss(
        cfg, rows, policy_loss + distance, scalars, Distance(distance)
    )


def auxiliary_loss(cfg, world, params, batch, scalars):
    """Fit the value alone, and keep the policy: a phase of PPG (Cobbe et al. 2020, arXiv:2009.04416)."""
    rows = fp.losses.evaluate_batch(cfg, world, params, batch)
    distance = distance_to(rows, rows.batch.extras)
    return fp.losses.total_loss(
        cfg, rows, distance, scalars, Distance(distance)
    )


class Distillation(NamedTuple):
    """Parameters of random network distillation, beside those of the policy."""

    target: tuple[Dense, Dense]  # stays as it begins
    predictor: tuple[Dense, Dense]


def init_distillation(spec, key):
    """Build two networks of two layers."""
    sizes = (spec.observation_size, 32), (32, 16)
    keys = fp.random.split(key, 4).unbind()
    layers = [init_dense(k, *sizes[i % 2]) for i, k in enumerate(keys)]
    return Distillation(tuple(layers[:2]), tuple(layers[2:]))


def novelty(params, obs):
    """Squared error with which the predictor knows the target's features of each observation."""
    target, predicted = (
        dense(second, dense(first, obs).tanh()) for first, second in params
    )
    return ((predicted - target.detach()) ** 2).mean(-1)


def novelty_advantages(cfg, world, params, steps, scalars):
    """Reward what is new (Burda et al. 2018, arXiv:1810.12894)."""
    bonus = novelty(params.extra, steps.trajectory.obs)
    bonus = 0.1 * bonus / (bonus.std() + 1e-8)
    trajectory = steps.trajectory._replace(
        reward=steps.trajectory.reward + bonus
    )
    steps = fp.advantages.Steps(trajectory, *steps[1:])
    return fp.advantages.estimate_gae(cfg, world, params, steps, scalars)


def novelty_loss(cfg, world, params, batch, scalars):
    """Learn the predictor beside the policy."""
    rows = fp.losses.evaluate_batch(cfg, world, params, batch)
    error = rows.mean(novelty(params.extra, rows.batch.obs))
    policy_loss = fp.losses.policy_loss(
        rows.ratio, rows.batch.advantage, scalars.clip_eps, rows.mean
    )
    return fp.losses.total_loss(
        cfg, rows, policy_loss + error, scalars, Distance(error)
    )


NETWORK = fp.nets.mlp(32, shared_trunk=True)
VARIANTS = {
    "simple": {"loss": simple_loss},
    "a2c": {"loss": actor_critic_loss, "gae_lambda": 1.0, **ONE_PASS},
    "discovered": {"loss": discovered_loss},
    "v-trace": {"advantages": v_trace},
    "reference": {
        "loss": reference_loss,
        "advantages": partial(with_logits, of_reference),
    },
    "auxiliary": {
        "loss": auxiliary_loss,
        "advantages": partial(with_logits, of_rollout),
    },
    "novelty": {
        "loss": novelty_loss,
        "advantages": novelty_advantages,
        "network": fp.nets.with_extra(NETWORK, init_distillation),
    },
}


def make(name, **options):
    """Build the learner of a variant; that of `reference` stays near a random policy."""
    options = {
        "env": fp.envs.cartpole(),
        "network": NETWORK,
        "n_envs": 8,
        "learning_rate": 3e-3,
    } | options
    if name == "reference":
        params = fp.ppo(**options).init(fp.random.key(9)).params
        options["world"] = Reference(params)
    return fp.ppo(**(options | VARIANTS[name]))


def train_in_phases(n_cycles, steps_of_phase, **options):
    """Alternate PPO and the auxiliary phase on one state."""
    phases = [make("simple", **options), make("auxiliary", **options)]
    state = None
    for phase in phases * n_cycles:
        state = fp.train(phase, steps_of_phase, state=state).state
    return state


if __name__ == "__main__":
    learner = make(sys.argv[1] if sys.argv[1:] else "simple")
    result = fp.train(learner, 40_000, evaluate_every=10, n_episodes=16)
    for evaluation in result.evaluations:
        print(evaluation.update, evaluation.greedy)
