"""One minibatch: autograd and torch.optim.Adam as the oracle, microbatches, the KL limit, non-finite numbers."""

import threading
from dataclasses import replace
from functools import partial

import pytest
import torch

from funcppo import losses, minibatch
from funcppo.config import AdamConfig
from funcppo.core import random, tree
from funcppo.minibatch import MinibatchIndices
from funcppo.train_step import collect, init, minibatch_step, train_step
from tests import learning
from tests.learning import (
    WORLD,
    assert_trees_equal,
    cartpole_config,
    compiled,
    double,
    pendulum_config,
)

SMALL = learning.SMALL | {"n_epochs": 3, "learning_rate": 1e-2}


def learning_problem(cfg, seed=0):
    """A learner about to learn from a real trajectory, float64: (params, batch, scalars, learner, minibatches)."""
    state = double(init(cfg, WORLD, random.key(seed)))
    got = collect(cfg, WORLD, state)
    learner = got.update_state, got.minibatches
    return state.params, got.batch, got.scalars, *learner


def torch_learner(cfg, params, batch, scalars, rows, stop=lambda *_: False):
    """The same minibatches by autograd and torch.optim.Adam, with `break` where `stop` says so."""
    leaves = [p.clone().requires_grad_() for p in tree.leaves(params)]
    adam = torch.optim.Adam(
        leaves, lr=float(scalars.learning_rate), eps=cfg.ppo.adam.eps
    )
    for i, index in enumerate(rows):
        minibatch = tree.map(lambda x, index=index: x[index], batch)
        loss, metrics = losses.loss_fn(
            cfg, WORLD, tree.unflatten(params, leaves), minibatch, scalars
        )
        kl = float(metrics.approx_kl)
        if stop(i, kl, "before"):
            break
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves, float(scalars.max_grad_norm))
        adam.step()
        if stop(i, kl, "after"):
            break
    return tree.ravel([p.detach() for p in leaves])


def test_a_compiled_minibatch_step_is_one_graph_and_equals_autograd_and_torch_adam():
    """Three updates in float64, 1e-10: one graph, no break, nothing compiled again."""
    cfg = cartpole_config(**SMALL)
    params, batch, scalars, learner, minibatches = learning_problem(cfg)
    want = torch_learner(cfg, params, batch, scalars, minibatches.rows[:3])
    first, *rest = (tree.item(minibatches, i) for i in range(3))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = compiled(minibatch_step, backend="aot_eager")
    with torch.no_grad():
        learner, _ = step(cfg, WORLD, params, batch, scalars, learner, first)
        with torch.compiler.set_stance("fail_on_recompile"):
            for minibatch in rest:
                learner, _ = step(
                    cfg, WORLD, params, batch, scalars, learner, minibatch
                )
    torch.testing.assert_close(learner.flat_params, want, rtol=0, atol=1e-10)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_the_gradient_of_microbatches_is_that_of_their_minibatch():
    """In float64, 1e-12; advantages are normalised over the whole minibatch, whose parts have other means."""
    cfg = cartpole_config(**SMALL)
    params, batch, scalars, _, minibatches = learning_problem(cfg)
    want, *others = (
        minibatch.accumulate_gradients(
            replace(cfg, ppo=replace(cfg.ppo, n_microbatches=n)),
            *(WORLD, params, batch, minibatches.rows[0], scalars),
        )
        for n in (1, 2, 16)
    )
    for got in others:
        assert_trees_equal(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("target_kl", [1e-9, 0.002, 0.01, 1e9])
@pytest.mark.parametrize("kl_stop", ["epoch", "minibatch"])
def test_the_kl_limit_stops_where_a_break_would(kl_stop, target_kl):
    """CleanRL breaks after an epoch whose last estimate is beyond; Stable-Baselines3 before the step itself."""
    cfg = cartpole_config(**SMALL, target_kl=target_kl, kl_stop=kl_stop)
    params, batch, scalars, learner, minibatches = learning_problem(cfg)

    def stop(i, kl, when):
        ends = {"before": True, "after": bool(minibatches.ends_epoch[i])}
        is_here = when == ("before" if kl_stop == "minibatch" else "after")
        return is_here and ends[when] and kl > target_kl

    want = torch_learner(cfg, params, batch, scalars, minibatches.rows, stop)
    step = partial(minibatch_step, cfg, WORLD, params, batch, scalars)
    got, _ = tree.scan(step, learner, minibatches)
    torch.testing.assert_close(got.flat_params, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_minibatch_that_is_not_finite_moves_nothing(value):
    """The third of six meets it; the other five end where they end without it."""
    cfg = cartpole_config(**SMALL)
    params, batch, scalars, learner, minibatches = learning_problem(cfg)
    step = partial(minibatch_step, cfg, WORLD, params)
    got = want = learner
    target = torch.full_like(batch.value_target, value)
    bad = batch._replace(value_target=target)
    for i in range(6):
        minibatch = tree.item(minibatches, i)
        given = bad if i == 2 else batch
        before, (got, learnt) = got, step(given, scalars, got, minibatch)
        assert bool(learnt.is_finite) == bool(learnt.is_applied) == (i != 2)
        if i == 2:
            assert_trees_equal(got, before, rtol=0, atol=0)
        else:
            want, _ = step(batch, scalars, want, minibatch)
    assert_trees_equal(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("size", [1e17, 1e19, 3e38])
@pytest.mark.parametrize("b2", [0.0, 0.999])
def test_no_step_makes_a_moment_that_is_not_finite(size, b2):
    """As the check before an update takes for granted, of gradients whose squares overflow, too."""
    adam = AdamConfig(b2=b2)
    cfg = cartpole_config(**SMALL, adam=adam)
    _, _, scalars, update_state, minibatches = learning_problem(cfg)
    single = lambda x: x.float() if x.is_floating_point() else x
    update_state = tree.map(single, update_state)
    scalars = scalars._replace(max_grad_norm=torch.tensor(torch.inf))
    grads = size * torch.linspace(-1, 1, len(update_state.flat_params))
    no_loss = losses.LossMetrics(*[torch.zeros(())] * 8)
    given = grads.float(), no_loss, minibatches.ends_epoch[0], scalars
    for _ in range(3):
        update_state, _ = minibatch.apply_gradients(cfg, update_state, *given)
        again = minibatch.ravel_update_state(
            update_state.flat_params, update_state.opt_state
        )
        assert again.has_finite_moments


@pytest.mark.parametrize("n_microbatches", [1, 16])
def test_a_minibatch_learns_from_its_rows_that_are_good(n_microbatches):
    """One row a microbatch is the hardest: it has nothing but the bad row."""
    cfg = cartpole_config(**SMALL)
    params, batch, scalars, update_state, minibatches = learning_problem(cfg)
    cfg = replace(cfg, ppo=replace(cfg.ppo, n_microbatches=n_microbatches))
    first = tree.map(lambda x: x[0], minibatches)
    row = torch.arange(batch.advantage.shape[0])
    for is_bad, share in ((row == first.rows[3], 1 / 16), (row >= 0, 1.0)):
        spoilt = torch.where(is_bad, torch.nan, batch.advantage)
        bad = batch._replace(advantage=spoilt)
        after, metrics = minibatch_step(
            cfg, WORLD, params, bad, scalars, update_state, first
        )
        assert float(metrics.loss.nonfinite_fraction) == pytest.approx(share)
        assert bool(metrics.is_applied) == (share < 1)
        assert after.flat_params.isfinite().all()
        moved = not after.flat_params.equal(update_state.flat_params)
        assert moved == (share < 1)


EIGHT_ROWS = learning.SMALL | {"n_envs": 8, "learning_rate": 1e-2}
# episodes short enough that some end in a rollout
sharded = partial(cartpole_config, max_steps=5, **EIGHT_ROWS)


def moments(values):
    x = torch.tensor(values, dtype=torch.float64)
    return minibatch.masked_moments(x.isfinite(), x)


@pytest.mark.parametrize(
    "values",
    [
        [[1.0, 5.0], [1e6, 2.0], [-3.0, 0.25]],
        [[1.0, torch.nan], [torch.inf, torch.nan], [7.0, 2.0]],
        [[torch.nan], [torch.nan]],
    ],
)
def test_moments_of_shards_are_those_of_all_their_numbers(values):
    merged = minibatch.merge_moments([moments(x) for x in values])
    together = moments([x for shard in values for x in shard])
    for got, want in zip(merged, together):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


def collected(cfg, seed=0):
    """A rollout, float64, and the step of a minibatch that learns from it."""
    state = double(init(cfg, WORLD, random.key(seed)))
    got = collect(cfg, WORLD, state)
    return state, got


def as_one_shard(cfg, got):
    """The same rollout and minibatches as of one shard: its config, batch and minibatches."""
    batch = tree.map(lambda *x: torch.cat(x), *got.batch)
    n_rows = got.batch[0].advantage.shape[0]
    offsets = n_rows * torch.arange(len(got.batch))
    rows = got.minibatches.rows + offsets[:, None]
    minibatches = MinibatchIndices(rows.flatten(1), got.minibatches.ends_epoch)
    ppo = replace(cfg.ppo, n_shards=1)
    return replace(cfg, ppo=ppo), batch, minibatches


def learn(cfg, state, got, batch, minibatches):
    step = partial(
        minibatch.minibatch_step, cfg, WORLD, state.params, batch, got.scalars
    )
    return tree.scan(step, got.update_state, minibatches)


@pytest.mark.parametrize(
    "ppo",
    [
        {},
        {"advantage_ddof": 0, "value_loss": "plain"},
        {"advantage_ddof": None},
        {"n_microbatches": 2},
        {"target_kl": 1e-9},
        {"target_kl": 0.002, "kl_stop": "minibatch"},
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [cartpole_config, pendulum_config])
def test_a_minibatch_of_shards_equals_the_same_rows_of_one_shard(make, ppo):
    """Four minibatches, float64, 1e-12: a mean over rows is the weighted mean of the shards' means."""
    cfg = make(max_steps=5, **EIGHT_ROWS, **ppo, n_shards=4)
    state, got = collected(cfg)
    one, rows, indices = as_one_shard(cfg, got)
    want = learn(one, state, got, rows, indices)
    found = learn(cfg, state, got, got.batch, got.minibatches)
    assert_trees_equal(found, want, rtol=1e-9, atol=1e-12)


def test_bad_rows_count_in_no_shard_and_a_shard_may_have_nothing_else():
    """Of 4 shards one has a bad row, another only such; float64, 1e-12."""
    cfg = sharded(n_shards=4)
    state, got = collected(cfg)
    row = torch.arange(got.batch[0].advantage.shape[0])
    is_bad = (row < 0, row == 3, row >= 0, row < 0)
    batch = tuple(
        b._replace(advantage=torch.where(bad, torch.nan, b.advantage))
        for b, bad in zip(got.batch, is_bad)
    )
    spoilt = got._replace(batch=batch)
    shards = zip(batch, got.minibatches.rows.unbind(1))
    own = [b.advantage[rows] for b, rows in shards]
    moments = [minibatch.masked_moments(x.isfinite(), x) for x in own]
    advantage = minibatch.merge_moments(moments)
    minibatches = got.minibatches._replace(advantage=advantage)
    update, metrics = learn(cfg, state, got, batch, minibatches)
    one, all_rows, indices = as_one_shard(cfg, spoilt)
    want = learn(one, state, got, all_rows, indices)
    assert_trees_equal((update, metrics), want, rtol=1e-9, atol=1e-12)
    assert metrics.is_applied.all()
    assert metrics.loss.nonfinite_fraction.sum() == 2 * (0.25 + 1 / 64) * 2


def test_a_shard_rolls_out_as_if_it_were_alone():
    """Each shard's batch is that of a learner of 2 environments that begins in its state."""
    cfg = sharded(n_shards=4)
    state = init(cfg, WORLD, random.key(0))
    got = collect(cfg, WORLD, state)
    alone = replace(cfg, ppo=replace(cfg.ppo, n_envs=2, n_shards=1))
    for i, batch in enumerate(got.batch):
        rows = (state.env_state, state.episode_stats)
        env_state, stats = tree.map(lambda x, i=i: x[2 * i : 2 * i + 2], rows)
        own = state._replace(
            env_state=env_state, episode_stats=stats, key=state.key[i]
        )
        want = collect(alone, WORLD, own)
        assert_trees_equal(batch, want.batch, rtol=0, atol=0)
        assert torch.equal(got.key[i], want.key)


class Exchange:
    """The shards of some threads, in the order of the threads."""

    def __init__(self, n):
        self.barrier = threading.Barrier(n, timeout=60)
        self.shares = [None] * n

    def gather(self, i, share):
        self.shares[i] = share
        self.barrier.wait()
        table = torch.cat(self.shares)
        self.barrier.wait()  # none writes before all have read
        return table


def run_divided(cfg, n, n_updates=2):
    """The states and metrics of threads that hold an equal number of the shards each."""
    whole = init(cfg, WORLD, random.key(0))
    exchange, results = Exchange(n), [None] * n

    def run(i):
        torch.set_num_threads(1)
        own = replace(cfg, gather_shards=partial(exchange.gather, i))
        share = lambda x: x.chunk(n)[i].clone()
        state = whole._replace(
            env_state=tree.map(share, whole.env_state),
            episode_stats=tree.map(share, whole.episode_stats),
            key=share(whole.key),
        )
        for _ in range(n_updates):
            state, metrics = train_step(own, WORLD, state)
        results[i] = state, metrics

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("make", [cartpole_config, pendulum_config])
def test_who_holds_the_shards_changes_no_bit(make):
    cfg = make(max_steps=5, **EIGHT_ROWS, n_shards=4, target_kl=0.02)
    state = init(cfg, WORLD, random.key(0))
    for _ in range(2):
        state, metrics = train_step(cfg, WORLD, state)
    for n in (2, 4):
        results = run_divided(cfg, n)
        want = state.params, state.opt_state, metrics
        for own, own_metrics in results:
            got = own.params, own.opt_state, own_metrics
            assert_trees_equal(got, want, rtol=0, atol=0)
        rows = [(x.env_state, x.episode_stats, x.key) for x, _ in results]
        got = tree.map(lambda *x: torch.cat(x), *rows)
        want = state.env_state, state.episode_stats, state.key
        assert_trees_equal(got, want, rtol=0, atol=0)


def test_a_process_that_holds_too_many_shards_is_refused():
    twice = lambda x: torch.cat([x, x])
    cfg = replace(sharded(n_shards=4), gather_shards=twice)
    state = init(cfg, WORLD, random.key(0))
    with pytest.raises(ValueError, match=r"state: expected 4 shards .* got 8"):
        train_step(cfg, WORLD, state)
