"""A limited capacity for successors changes no update, and rows beyond it are left out and counted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from funcppo import metrics_log, minibatch, train_step
from funcppo.config import PPOConfig
from funcppo.core import random, tree
from funcppo.kg.graph import loaders
from funcppo.kg.run import capacity as capacity_module
from funcppo.kg.run.capacity import with_capacity
from funcppo.kg.search import network as net
from funcppo.kg.search import task as prover_task
from funcppo.kg.search.config import ProverTaskConfig
from tests.learning import assert_trees_equal, compiled

PPO = PPOConfig(
    n_envs=16, n_steps=8, n_epochs=1, n_minibatches=2, learning_rate=1e-3
)
SETTINGS = ProverTaskConfig(
    max_height=2, max_depth=5, embed_dim=4, hidden_dim=8
)


@cache
def trained_problem(ppo: PPOConfig = PPO, **settings):
    """Config, world, first state, and the state after three updates, when no head is zero any more."""
    task = prover_task.build_task(
        loaders.load("countries_s3"), replace(SETTINGS, **settings)
    )
    cfg, world = (
        prover_task.build_config(task, ppo),
        prover_task.training_world(task),
    )
    first = state = train_step.init(cfg, world, random.key(1))
    for _ in range(3):
        state, _ = train_step.train_step(cfg, world, state)
    return cfg, world, first, state


def limited_to(cfg, capacity: int):
    return replace(
        cfg, update_agent=net.agent(replace(cfg.agent.cfg, capacity=capacity))
    )


@pytest.mark.parametrize(
    ("n_microbatches", "n_shards"), [(1, 1), (2, 1), (1, 2)]
)
def test_an_update_with_a_capacity_equals_the_update_without(
    n_microbatches, n_shards
):
    """1e-6: of float32 sums; params move by 1e-3 each minibatch."""
    cfg, world, first, state = trained_problem(
        replace(PPO, n_microbatches=n_microbatches, n_shards=n_shards)
    )
    limited = with_capacity(cfg, world, first)
    want, metrics = train_step.train_step(cfg, world, state)
    got, limited_metrics = train_step.train_step(limited, world, state)
    assert (
        limited.update_agent.cfg.capacity
        <= 64
        // n_microbatches
        // n_shards
        * cfg.env.cfg.resolve.max_successors
        / 2
    )
    assert float(limited_metrics.loss.dropped_fraction) == 0.0
    assert_trees_equal(got, want, rtol=0, atol=1e-6)
    assert_trees_equal(
        limited_metrics._replace(
            loss=limited_metrics.loss._replace(dropped_fraction=())
        ),
        metrics,
        rtol=1e-4,
        atol=1e-5,
    )
    assert (
        "dropped_fraction" not in metrics_log.to_scalars(metrics)
        and metrics_log.to_scalars(limited_metrics)["dropped_fraction"] == 0.0
    )


def test_a_minibatch_with_a_capacity_compiles_fullgraph_and_equals_eager():
    """1e-6: params move by 1e-3."""
    cfg, world, first, state = trained_problem()
    cfg = with_capacity(cfg, world, first)
    got = train_step.collect(cfg, world, state)
    args = (
        cfg,
        world,
        state.params,
        got.batch,
        got.scalars,
        got.update_state,
        tree.map(lambda x: x[0], got.minibatches),
    )
    learner, metrics = compiled(minibatch.minibatch_step, backend="aot_eager")(
        *args
    )
    want, expected = minibatch.minibatch_step(*args)
    assert_trees_equal(
        (learner, metrics), (want, expected), rtol=1e-4, atol=1e-6
    )


def test_the_loss_is_over_the_rows_within_capacity_and_the_others_are_counted():
    """Capacity for half of the successors; the gradient is that of a batch of these rows alone. 1e-6: float32 sums."""
    cfg, world, _, state = trained_problem(replace(PPO, advantage_ddof=None))
    got = train_step.collect(cfg, world, state)
    mask, rows = got.batch.obs.action_mask, got.minibatches.rows[0]
    small = limited_to(cfg, int(mask[rows, :-1].sum()) // 2)
    within_capacity = ~net.exceeds_capacity(small.update_agent.cfg, mask[rows])
    assert 0.2 < within_capacity.double().mean() < 0.8
    gradient = partial(
        minibatch.accumulate_gradients,
        world=world,
        params=state.params,
        batch=got.batch,
        scalars=got.scalars,
    )
    grads, metrics = gradient(small, rows=rows)
    want, expected = gradient(cfg, rows=rows[within_capacity])
    assert float(metrics.dropped_fraction) == pytest.approx(
        1.0 - float(within_capacity.double().mean())
    )
    assert_trees_equal(grads, want, rtol=1e-4, atol=1e-6)
    assert_trees_equal(
        metrics._replace(dropped_fraction=()), expected, rtol=1e-4, atol=1e-6
    )


def test_a_minibatch_without_any_row_within_capacity_has_gradient_zero():
    cfg, world, _, state = trained_problem()
    got = train_step.collect(cfg, world, state)
    obs = got.batch.obs._replace(
        action_mask=torch.ones_like(got.batch.obs.action_mask)
    )
    grads, metrics = minibatch.accumulate_gradients(
        limited_to(cfg, 3),
        world,
        state.params,
        got.batch._replace(obs=obs),
        got.minibatches.rows[0],
        got.scalars,
    )
    assert (
        float(metrics.dropped_fraction) == 1.0
        and float(tree.global_norm(grads)) == 0.0
    )


def test_no_capacity_is_set_if_successors_have_no_goals_or_fill_most_slots():
    for settings in ({"max_height": 1}, {"max_successors": 4}):
        task = prover_task.build_task(
            loaders.load("countries_s1"), replace(SETTINGS, **settings)
        )
        cfg, world = (
            prover_task.build_config(task, PPO),
            prover_task.training_world(task),
        )
        assert cfg.env.cfg.fact_selection == (
            "oracle" if "max_height" in settings else "policy"
        )
        assert (
            with_capacity(
                cfg, world, train_step.init(cfg, world, random.key(1))
            )
            is cfg
        )


def test_the_capacity_is_the_measured_mean_with_a_margin(monkeypatch):
    """By hand: 16 * 8 / 2 = 64 rows with 1 or 3 of 20 slots filled: mean 2, deviation 1; 1.25 * 2 * 64 + 4 * 1 * 8."""
    cfg, world, first, _ = trained_problem()
    mask = torch.zeros((128, 20), dtype=torch.bool)
    mask[:64, :1] = True
    mask[64:, :3] = True
    monkeypatch.setattr(capacity_module, "_profile_successors", lambda *_: mask)
    assert with_capacity(cfg, world, first).update_agent.cfg.capacity == 192
    wide = torch.zeros((128, 500), dtype=torch.bool)
    monkeypatch.setattr(capacity_module, "_profile_successors", lambda *_: wide)
    # one row fits in any case
    assert with_capacity(cfg, world, first).update_agent.cfg.capacity == 500
    monkeypatch.setattr(
        capacity_module, "_profile_successors", lambda *_: torch.ones_like(mask)
    )
    assert with_capacity(cfg, world, first) is cfg
