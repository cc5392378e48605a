"""The training step: what it is made of, what stops it, and that it learns."""

from dataclasses import fields, replace
from functools import partial

import pytest
import torch

from funcppo import rollout
from funcppo.config import Schedule
from funcppo.core import random, tree
from funcppo.rollout import RolloutState
from funcppo.train_step import (
    EAGER_PARTS,
    StepFunctions,
    apply_schedules,
    build_batch,
    init,
    sample_randomness,
    train_step,
)
from tests import learning
from tests.learning import WORLD, assert_trees_equal, cartpole_config

SMALL = learning.SMALL | {"n_epochs": 3, "learning_rate": 1e-2}


def acted(cfg, state):
    """The actor and the trajectory of the state's next rollout."""
    _, draws, _ = sample_randomness(cfg, WORLD, state.key)
    act = partial(rollout.rollout_step, cfg, WORLD, state.params)
    first = RolloutState(state.env_state, state.episode_stats)
    return tree.scan(act, first, draws)


def fails(*_):
    raise ZeroDivisionError


@pytest.mark.parametrize(
    "name",
    sorted(
        {f.name for f in fields(StepFunctions)} - {"minibatch_loss", "kernels"}
    ),
)
def test_a_training_step_calls_each_of_its_parts(name):
    cfg = cartpole_config(**SMALL)
    parts = replace(EAGER_PARTS, **{name: fails})
    with pytest.raises(ZeroDivisionError):
        train_step(cfg, WORLD, init(cfg, WORLD, random.key(0)), parts)


def test_every_row_is_learnt_from_once_an_epoch_and_in_another_order_each_time():
    cfg = cartpole_config(**SMALL)
    key, _, minibatches = sample_randomness(cfg, WORLD, random.key(0))
    epochs = minibatches.rows.view(3, 32)
    assert torch.equal(epochs.sort().values, torch.arange(32).expand(3, 32))
    assert minibatches.ends_epoch.tolist() == [False, True] * 3
    last = sample_randomness(cfg, WORLD, key)[2].rows.view(3, 32)
    orders = torch.cat([epochs, last])
    assert len(orders.unique(dim=0)) == 6


def test_metrics_count_what_was_skipped_and_show_no_loss_where_nothing_was_applied():
    """NaN: a loss of 0 would look like one that has converged."""
    cfg = cartpole_config(**SMALL)
    state = init(cfg, WORLD, random.key(0))
    infinite = torch.tensor(float("inf"))
    scalars = state.scalars._replace(value_coef=infinite)
    broken = state._replace(scalars=scalars)
    after, metrics = train_step(cfg, WORLD, broken)
    assert float(metrics.n_nonfinite_minibatches) == 6
    assert float(metrics.n_applied_minibatches) == 0
    means = [*tree.leaves(metrics.loss), metrics.grad_norm]
    assert len(means) == 8 and torch.stack(means).isnan().all()
    assert torch.stack(tree.leaves(metrics.rollout)).isfinite().all()
    assert_trees_equal(after.params, state.params, rtol=0, atol=0)
    assert float(train_step(cfg, WORLD, state)[1].n_nonfinite_minibatches) == 0


def test_metrics_by_hand():
    """Episodes of at most 5 steps in 4 x 8: return and length sums count finished episodes only."""
    cfg = cartpole_config(max_steps=5, **SMALL)
    _, metrics = train_step(cfg, WORLD, init(cfg, WORLD, random.key(0)))
    shown = metrics.rollout
    assert (
        float(shown.n_episodes) == float(shown.n_truncated_episodes) == 4
    )  # one ends in each row at step 5, none before step 8
    assert (
        float(shown.episode_return_sum) == float(shown.episode_length_sum) == 20
    )
    assert float(metrics.n_applied_minibatches) == 6


def test_without_bootstrapping_a_truncation_counts_as_an_end():
    """Targets of the last step of a cut episode: its reward alone, or with gamma V of the last state."""
    for bootstrap in (True, False):
        cfg = cartpole_config(
            max_steps=5, **SMALL, bootstrap_truncated=bootstrap
        )
        state = init(cfg, WORLD, random.key(0))
        actor, traj = acted(cfg, state)
        batch, _ = build_batch(
            cfg, WORLD, state.params, actor.env_state, traj, state.scalars
        )
        args = cfg, WORLD, state.params, traj
        final_value = rollout.estimate_final_value(*args)
        want = 1 + (0.99 * final_value[4] if bootstrap else torch.zeros(4))
        torch.testing.assert_close(batch.value_target.view(8, 4)[4], want)
        assert final_value[4].any() == bootstrap


def test_an_environment_that_truncates_against_its_word_is_learnt_as_if_it_terminated():
    cfg = cartpole_config(max_steps=5, **SMALL)
    state = init(cfg, WORLD, random.key(0))
    denied = replace(cfg, env=replace(cfg.env, truncates=False))
    off = replace(cfg, ppo=replace(cfg.ppo, bootstrap_truncated=False))
    got, metrics = train_step(denied, WORLD, state)
    want, _ = train_step(off, WORLD, state)
    assert_trees_equal(got, want, rtol=0, atol=0)
    assert float(metrics.rollout.n_truncated_episodes) == 4


def test_scheduled_scalars_follow_their_schedules_and_leave_the_state_alone():
    ppo = SMALL | {"entropy_coef_schedule": Schedule(kind="cosine")}
    ppo |= {"clip_eps_schedule": Schedule(warmup_updates=1)}
    cfg = cartpole_config(**ppo)
    base = init(cfg, WORLD, random.key(0)).scalars
    later = apply_schedules(cfg, torch.tensor(5), base)
    assert float(later.learning_rate) == pytest.approx(1e-2 * 0.5)
    assert float(later.entropy_coef) == pytest.approx(0.01 * 0.5)
    first = apply_schedules(cfg, torch.tensor(0), base)
    assert float(first.clip_eps) == pytest.approx(0.1)
    state = init(cfg, WORLD, random.key(0))._replace(update=torch.tensor(5))
    state, metrics = train_step(cfg, WORLD, state)
    assert float(metrics.learning_rate) == pytest.approx(5e-3)
    assert torch.equal(state.scalars.learning_rate, base.learning_rate)
    assert int(state.update) == 6
