"""Six updates of PureJaxRL's ppo.py on CartPole, from the same key and initial weights, number by number.

Only `sample_randomness` is replaced: the order of random numbers is a matter of taste, and ours are sampled at once.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from funcppo.core import random, tree
from funcppo.nets import networks
from funcppo.nets.networks import Dense
from funcppo.rollout import sample_random_inputs
from funcppo.train_step import EAGER_PARTS, UpdateRandomness, init, train_step
from tests.learning import WORLD, cartpole_config, oracle

PARTS = ("sample_randomness", "rollout_step", "build_batch", "minibatch_step")


def chained_randomness(cfg, world, key):
    """PureJaxRL's order: one split after another through steps and epochs, and in each row's step one more."""
    ppo, actions, rows, orders = cfg.ppo, [], [], []
    for _ in range(ppo.n_steps):
        key, action_key = random.split(key)
        key, env_key = random.split(key)
        actions.append(action_key)
        rows.append(random.split(random.split(env_key, ppo.n_envs)))
    for _ in range(ppo.n_epochs):
        key, order_key = random.split(key)
        order = random.permutation(order_key, ppo.n_envs * ppo.n_steps)
        orders.append(order.view(ppo.n_minibatches, -1))
    _, _, minibatches = EAGER_PARTS.sample_randomness(cfg, world, key)
    keys = torch.stack(actions), *torch.stack(rows).unbind(-2)
    random_inputs = sample_random_inputs(cfg.env, world, *keys)
    minibatches = minibatches._replace(rows=torch.cat(orders))
    return UpdateRandomness(key, random_inputs, minibatches)


PUREJAXRL = replace(EAGER_PARTS, sample_randomness=chained_randomness)


def weights(run, prefix, update=...):
    """The recorded layers 0-2 (actor) and 3-5 (critic) in the shape of our network."""

    def layer(i):
        place = f"{prefix}/params/Dense_{i}"
        named = (run[f"{place}/{x}"][update] for x in ("kernel", "bias"))
        return Dense(*map(torch.tensor, named))

    def stacked(a, b):
        return Dense(
            torch.stack([a.weight, b.weight]),
            torch.stack([a.bias, b.bias]).unsqueeze(1),
        )

    hidden = (stacked(layer(0), layer(3)), stacked(layer(1), layer(4)))
    heads = networks.stack_heads(layer(2), layer(5))
    return networks.MLPParams(hidden=hidden, heads=heads)


def replay(run):
    """Each update's outputs of every part, and the state after it."""
    sizes = run["config"].tolist()
    seed, n_envs, n_steps, n_updates, n_epochs, n_minibatches = sizes
    cfg = cartpole_config(
        n_envs=n_envs,
        n_steps=n_steps,
        n_updates=n_updates,
        n_epochs=n_epochs,
        n_minibatches=n_minibatches,
        advantage_ddof=0,
        bootstrap_truncated=False,
    )
    state = init(cfg, WORLD, random.key(seed))
    motion = state.env_state.motion.numpy()
    np.testing.assert_array_equal(motion, run["init_obs"])
    state = state._replace(params=weights(run, "init_params"))
    for _ in range(n_updates):
        log: dict[str, list[Any]] = {name: [] for name in PARTS}

        def recorded(name, log=log):
            def call(*args):
                log[name].append(getattr(PUREJAXRL, name)(*args))
                return log[name][-1]

            return call

        with torch.no_grad():
            parts = {name: recorded(name) for name in PARTS}
            parts = replace(PUREJAXRL, **parts)
            state, _ = train_step(cfg, WORLD, state, parts)
        yield log, state


@pytest.fixture(scope="module")
def updates():
    run = oracle("purejaxrl_cartpole.npz")
    return run, list(replay(run))


def stacked(log, name):
    steps = [transition for _, transition in log["rollout_step"]]
    return torch.stack([getattr(x, name) for x in steps]).numpy()


def test_resets_actions_ends_and_permutations_are_equal(updates):
    run, steps = updates
    for u, (log, _) in enumerate(steps):
        np.testing.assert_array_equal(stacked(log, "action"), run["action"][u])
        is_over = stacked(log, "terminated") | stacked(log, "truncated")
        np.testing.assert_array_equal(is_over, run["done"][u])
        rows = log["sample_randomness"][0].minibatches.rows
        order = run["permutation"][u]
        found = rows.reshape(order.shape).numpy()
        np.testing.assert_array_equal(found, order)
        obs, done = stacked(log, "obs"), run["done"][u]
        np.testing.assert_array_equal(
            obs[1:][done[:-1]], run["obs"][u][1:][done[:-1]]
        )  # straight after a reset


def test_observations_values_advantages_and_losses_agree_within_1e_4(updates):
    run, steps = updates
    close = lambda got, want: np.testing.assert_allclose(
        got, want, rtol=0, atol=1e-4
    )
    for u, (log, _) in enumerate(steps):
        for name in ("obs", "value", "log_prob", "reward"):
            close(stacked(log, name), run[name][u])
        batch = log["build_batch"][0][0]
        for got, name in (
            (batch.advantage, "advantages"),
            (batch.value_target, "targets"),
        ):
            close(got.view(run[name][u].shape).numpy(), run[name][u])
        losses = [learnt.loss for _, learnt in log["minibatch_step"]]
        for name, key in (
            ("loss", "0"),
            ("value_loss", "1/0"),
            ("policy_loss", "1/1"),
            ("entropy", "1/2"),
        ):
            want = run[f"loss/{key}"][u]
            found = torch.stack([getattr(m, name) for m in losses])
            close(found.view(want.shape).numpy(), want)


def test_parameters_agree_within_1e_6_after_every_update(updates):
    """A hundred times tighter than asked; an update moves them by up to 2e-3."""
    run, steps = updates
    for u, (_, state) in enumerate(steps):
        for got, want in zip(
            tree.leaves(state.params), tree.leaves(weights(run, "params", u))
        ):
            np.testing.assert_allclose(
                got.numpy(), want.numpy(), rtol=0, atol=1e-6
            )
