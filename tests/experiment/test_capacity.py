"""Learning on the successors that there are is learning on a place for each."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from funcppo import data, minibatch, random, train_step, tree
from funcppo.config import PPOConfig
from funcppo.experiment import metrics_log
from funcppo.experiment.capacity import with_capacity
from funcppo.prover import network as net
from funcppo.prover import task as prover_task
from funcppo.prover.config import ProverTaskConfig
from tests.learning import assert_trees_equal, compiled, one_thread

pytestmark = pytest.mark.usefixtures(one_thread.__name__)

PPO = PPOConfig(n_envs=16, n_steps=8, n_epochs=1, n_minibatches=2, learning_rate=1e-3)
SETTINGS = ProverTaskConfig(max_height=2, max_depth=5, embed_dim=4, hidden_dim=8)


@cache
def learning(ppo: PPOConfig = PPO, **settings):
    """After three updates, that every head is somewhere else than at zero."""
    made = prover_task.build_task(data.load("countries_s3"), replace(SETTINGS, **settings))
    cfg, world = prover_task.build_config(made, ppo), prover_task.training_world(made)
    first = state = train_step.init(cfg, world, random.key(1))
    for _ in range(3):
        state, _ = train_step.train_step(cfg, world, state)
    return cfg, world, first, state


def with_room(cfg, capacity: int):
    return replace(cfg, update_agent=net.agent(replace(cfg.agent.cfg, capacity=capacity)))


@pytest.mark.parametrize("n_microbatches", [1, 2])
def test_an_update_on_packed_successors_is_the_update(n_microbatches):
    """1e-6: of float32 sums; params move by 1e-3 each minibatch."""
    cfg, world, first, state = learning(replace(PPO, n_microbatches=n_microbatches))
    packing = with_capacity(cfg, world, first)
    want, shown = train_step.train_step(cfg, world, state)
    got, also = train_step.train_step(packing, world, state)
    assert packing.update_agent.cfg.capacity <= 64 // n_microbatches * cfg.env.cfg.resolve.max_successors / 2
    assert float(also.loss.dropped_fraction) == 0.0
    assert_trees_equal(got, want, rtol=0, atol=1e-6)
    assert_trees_equal(also._replace(loss=also.loss._replace(dropped_fraction=())), shown, rtol=1e-4, atol=1e-5)
    assert (
        "dropped_fraction" not in metrics_log.to_scalars(shown)
        and metrics_log.to_scalars(also)["dropped_fraction"] == 0.0
    )


def test_a_packed_minibatch_is_one_graph_and_equals_eager():
    """1e-6: params move by 1e-3."""
    cfg, world, first, state = learning()
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
    learner, shown = compiled(minibatch.minibatch_step, backend="aot_eager")(*args)
    want, expected = minibatch.minibatch_step(*args)
    assert_trees_equal((learner, shown), (want, expected), rtol=1e-4, atol=1e-6)


def test_the_loss_is_that_of_the_rows_that_have_room_and_the_others_are_counted():
    """Room for half of the successors; the gradient is that of a batch of these rows alone. 1e-6: float32 sums."""
    cfg, world, _, state = learning(replace(PPO, advantage_ddof=None))
    got = train_step.collect(cfg, world, state)
    mask, rows = got.batch.obs.action_mask, got.minibatches.rows[0]
    small = with_room(cfg, int(mask[rows, :-1].sum()) // 2)
    within_capacity = ~net.exceeds_capacity(small.update_agent.cfg, mask[rows])
    assert 0.2 < within_capacity.double().mean() < 0.8
    gradient = partial(
        minibatch.accumulate_gradients, world=world, params=state.params, batch=got.batch, scalars=got.scalars
    )
    grads, shown = gradient(small, rows=rows)
    want, expected = gradient(cfg, rows=rows[within_capacity])
    assert float(shown.dropped_fraction) == pytest.approx(1.0 - float(within_capacity.double().mean()))
    assert_trees_equal(grads, want, rtol=1e-4, atol=1e-6)
    assert_trees_equal(shown._replace(dropped_fraction=()), expected, rtol=1e-4, atol=1e-6)


def test_a_minibatch_without_room_for_any_row_moves_nothing_and_is_finite():
    cfg, world, _, state = learning()
    got = train_step.collect(cfg, world, state)
    obs = got.batch.obs._replace(action_mask=torch.ones_like(got.batch.obs.action_mask))
    grads, shown = minibatch.accumulate_gradients(
        with_room(cfg, 3), world, state.params, got.batch._replace(obs=obs), got.minibatches.rows[0], got.scalars
    )
    assert float(shown.dropped_fraction) == 1.0 and float(tree.global_norm(grads)) == 0.0


def test_where_successors_have_no_goals_or_fill_most_places_nothing_is_packed():
    for settings in ({"max_height": 1}, {"max_successors": 4}):
        made = prover_task.build_task(data.load("countries_s1"), replace(SETTINGS, **settings))
        cfg, world = prover_task.build_config(made, PPO), prover_task.training_world(made)
        assert cfg.env.cfg.fact_selection == ("oracle" if "max_height" in settings else "policy")
        assert with_capacity(cfg, world, train_step.init(cfg, world, random.key(1))) is cfg
