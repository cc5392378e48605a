"""The learner at any size, dtype and flag: what was finite stays so, and each structure, shape and dtype stays too."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import funcppo as fp
from funcppo.config import AdamConfig, PPOConfig, Schedule
from funcppo.core import random, tree
from funcppo.losses import SCALARS, loss_fn
from funcppo.runtime import compile
from funcppo.train_step import EAGER_PARTS, collect, init, train_step
from tests.learning import (
    WORLD,
    assert_trees_equal,
    cartpole_config,
    double,
    pendulum_config,
)

# Each example is a whole update.
few = settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
SEEDS = st.integers(0, 2**31)
BAD = st.sampled_from([math.nan, math.inf, -math.inf])
SCHEDULES = st.builds(
    Schedule,
    kind=st.sampled_from(["constant", "linear", "cosine"]),
    warmup_updates=st.integers(0, 3),
)


@st.composite
def ppo_configs(draw, max_shards):
    """Settings of small sizes with every flag; each minibatch has 1 to 12 rows a shard."""
    n_microbatches = draw(st.integers(1, 2))
    n_minibatches = draw(st.integers(1, 3))
    n_shards = draw(st.integers(1, max_shards))
    n_envs = n_shards * n_microbatches * draw(st.integers(1, 2))
    n_steps = n_minibatches * draw(st.integers(1, 3))
    is_single = n_envs * n_steps == n_minibatches
    return PPOConfig(
        n_envs=n_envs,
        n_steps=n_steps,
        n_updates=draw(st.integers(1, 3)),
        n_epochs=draw(st.integers(1, 2)),
        n_minibatches=n_minibatches,
        n_microbatches=n_microbatches,
        n_shards=n_shards,
        learning_rate=draw(st.sampled_from([0.0, 1e-2])),
        gamma=draw(st.sampled_from([0.0, 0.9, 1.0])),
        gae_lambda=draw(st.sampled_from([0.0, 0.9, 1.0])),
        clip_eps=draw(st.sampled_from([0.0, 0.2])),
        learning_rate_schedule=draw(SCHEDULES),
        adam=AdamConfig(
            b1=draw(st.sampled_from([0.0, 0.9])),
            weight_decay=draw(st.sampled_from([0.0, 0.1])),
            decoupled_weight_decay=draw(st.booleans()),
        ),
        advantage_ddof=None
        if is_single
        else draw(st.sampled_from([None, 0, 1])),
        value_loss=draw(
            st.sampled_from(["plain", "clipped_max", "clipped_only"])
        ),
        value_clip_eps=draw(st.sampled_from([None, 0.0, 0.1])),
        half_value_loss=draw(st.booleans()),
        target_kl=draw(st.sampled_from([None, 1e-6, 1.0])),
        kl_stop=draw(st.sampled_from(["epoch", "minibatch"])),
        bootstrap_truncated=draw(st.booleans()),
    )


@st.composite
def problems(draw, max_shards=2):
    """A config and its first state; episodes end within a rollout or beyond it."""
    make = draw(st.sampled_from([cartpole_config, pendulum_config]))
    cfg = replace(
        make(draw(st.integers(1, 9))), ppo=draw(ppo_configs(max_shards))
    )
    state = init(cfg, WORLD, random.key(draw(SEEDS)))
    return cfg, state


def assert_like(got, before):
    """Structure, shapes and dtypes are the same, and every number is finite."""
    assert tree.structure(got) == tree.structure(before)
    for leaf, like in zip(tree.leaves(got), tree.leaves(before)):
        assert leaf.shape == like.shape and leaf.dtype == like.dtype
        assert leaf.isfinite().all()


@few
@given(problem=problems())
def test_an_update_of_any_size_is_finite_and_counts_minibatches(problem):
    cfg, state = problem
    after, metrics = train_step(cfg, WORLD, state)
    assert_like(after, state)
    n_applied = int(metrics.n_applied_minibatches)
    n_minibatches = cfg.ppo.n_epochs * cfg.ppo.n_minibatches
    assert metrics.n_nonfinite_minibatches == 0
    if cfg.ppo.target_kl is None:
        assert n_applied == n_minibatches
    assert int(after.opt_state.step) == n_applied
    if n_applied:
        assert torch.stack(tree.leaves(metrics.loss)).isfinite().all()


@few
@given(problem=problems(max_shards=1), bad=BAD, index=st.integers(0, 99))
def test_one_number_that_is_not_finite_leaves_a_row_out(problem, bad, index):
    cfg, state = problem
    collected = collect(cfg, WORLD, state)
    batch = double(collected.batch)
    n_rows = batch.advantage.shape[0]
    is_bad = torch.arange(n_rows) == index % n_rows
    spoilt = batch._replace(advantage=torch.where(is_bad, bad, batch.advantage))

    def loss(params):
        return loss_fn(cfg, WORLD, params, spoilt, double(collected.scalars))

    grads, (value, metrics) = torch.func.grad_and_value(loss, has_aux=True)(
        double(state.params)
    )
    assert float(metrics.nonfinite_fraction) == pytest.approx(1 / n_rows)
    assert value.isfinite() and tree.ravel(grads).isfinite().all()


@few
@given(problem=problems(), bad=BAD, name=st.sampled_from(SCALARS))
def test_an_infinite_scalar_never_reaches_the_parameters(problem, bad, name):
    cfg, state = problem
    scalars = state.scalars._replace(**{name: torch.tensor(bad)})
    after, _ = train_step(cfg, WORLD, state._replace(scalars=scalars))
    assert_like(after.params, state.params)
    assert_like(after.opt_state, state.opt_state)


ENVIRONMENTS = (
    *("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0"),
    "MountainCarContinuous-v0",
)


@few
@given(
    name=st.sampled_from(ENVIRONMENTS),
    hidden=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    rows=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=SEEDS,
)
def test_a_network_fits_its_environment(name, hidden, rows, dtype, seed):
    env = fp.envs.make(name)
    agent = fp.nets.mlp(*hidden)(env.spec)
    keys = random.split(random.key(seed), 3)
    state = env.reset(env.cfg, WORLD, random.split(keys[0], rows))
    obs = env.observe(env.cfg, WORLD, state).to(dtype)
    params = agent.init(agent.cfg, keys[1])
    params = tree.map(lambda x: x.to(dtype), params)
    output = agent.apply(agent.cfg, WORLD, params, obs)
    action = agent.distribution.sample(keys[2], output)
    assert output.value.shape == (rows,) and output.value.dtype == dtype
    assert action.shape[0] == rows
    log_prob = agent.distribution.log_prob(output, action)
    assert log_prob.shape == (rows,) and log_prob.isfinite().all()
    entropy = agent.distribution.entropy(output)
    assert entropy.shape == (rows,) and entropy.isfinite().all()


@few
@given(problem=problems(), strategy=st.sampled_from(["one-graph", "forward"]))
def test_every_strategy_is_composed_to_the_eager_update(problem, strategy):
    """With the functions themselves in place of compiled ones. The last uses PyTorch's fused Adam: 1e-4 of a step."""
    cfg, state = problem
    step = compile.build_minibatch_step(
        strategy,
        EAGER_PARTS.minibatch_step,
        EAGER_PARTS.minibatch_loss,
        lambda fn: fn,
    )
    parts = replace(EAGER_PARTS, minibatch_step=step)
    got, metrics = train_step(cfg, WORLD, state, parts)
    expected, expected_metrics = train_step(cfg, WORLD, state)
    if cfg.ppo.target_kl is not None:  # rounding may pass the limit
        n_applied = expected_metrics.n_applied_minibatches
        assume(metrics.n_applied_minibatches == n_applied)
    assert_trees_equal(got.params, expected.params, rtol=0, atol=1e-6)
    assert_trees_equal(got.opt_state, expected.opt_state, rtol=1e-4, atol=1e-6)
