"""Each flag beside the arithmetic of the implementation that it is named after."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from funcppo import losses
from funcppo.config import PPOConfig
from funcppo.core import random, tree
from funcppo.train_step import init
from tests.learning import assert_trees_equal, cartpole_config, double

CLIP = torch.tensor(0.2)
equal = partial(torch.testing.assert_close, rtol=1e-7, atol=0)


def problem(seed: int = 0, N: int = 32, **ppo):
    """A config, params, a batch whose behaviour policy differs from the current one, and scalars; float64."""
    cfg = cartpole_config(**ppo)
    keys = random.split(random.key(seed), 7)
    params = double(cfg.agent.init(cfg.agent.cfg, keys[0]))
    params = params._replace(
        heads=tree.map(
            lambda x: x * torch.tensor([100, 1]).view(2, 1, 1), params.heads
        )
    )
    batch = losses.Batch(
        obs=random.normal(keys[1], (N, 4)).double(),
        action=(random.uniform(keys[2], (N,)) < 0.5).long(),
        log_prob=torch.log(random.uniform(keys[3], (N,), 0.3, 0.7)).double(),
        value=random.normal(keys[4], (N,)).double(),
        advantage=(3 * random.normal(keys[5], (N,)) + 1).double(),
        value_target=random.normal(keys[6], (N,)).double(),
    )
    scalars = double(init(cfg, (), random.key(0)).scalars)
    return cfg, params, batch, scalars


def test_no_gradient_flows_where_the_ratio_is_clipped():
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5], requires_grad=True)
    advantage = torch.tensor([1.0, -1.0, -1.0, 1.0])
    (grad,) = torch.autograd.grad(
        losses.policy_loss(ratio, advantage, CLIP), ratio
    )
    assert grad.tolist() == [0.0, 0.0, 0.25, -0.25]


def in_torch(cfg, params, batch):
    """The output, its distribution, normalised advantages and log ratios, as both implementations have them."""
    out = cfg.agent.apply(cfg.agent.cfg, (), params, batch.obs)
    probs = torch.distributions.Categorical(logits=out.logits)
    adv = batch.advantage
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    return out, probs, adv, probs.log_prob(batch.action) - batch.log_prob


def test_the_loss_equals_cleanrl():
    """CleanRL's ppo.py: sample deviation, the larger of two value errors, half of their mean, minus the entropy."""
    cfg, params, batch, scalars = problem()
    loss, metrics = losses.loss_fn(cfg, (), params, batch, scalars)
    out, probs, adv, logratio = in_torch(cfg, params, batch)
    ratio = logratio.exp()
    clamped = torch.clamp(ratio, 1 - 0.2, 1 + 0.2)
    pg = torch.max(-adv * ratio, -adv * clamped).mean()
    clipped = batch.value + torch.clamp(out.value - batch.value, -0.2, 0.2)
    errors = [(x - batch.value_target) ** 2 for x in (out.value, clipped)]
    v = 0.5 * torch.max(*errors).mean()
    entropy = probs.entropy().mean()
    want = pg - 0.01 * entropy + v * 0.5
    equal(loss, want)  # the scalars were rounded to float32
    equal(metrics.approx_kl, ((ratio - 1) - logratio).mean())
    clipped = ((ratio - 1).abs() > 0.2).double().mean()
    torch.testing.assert_close(metrics.clip_fraction, clipped)
    equal(metrics.entropy, entropy)


def test_the_loss_equals_stable_baselines():
    """Stable-Baselines3's ppo.py: the error of the clipped value alone, its whole mean."""
    cfg, params, batch, scalars = problem(
        value_loss="clipped_only", half_value_loss=False
    )
    loss, _ = losses.loss_fn(cfg, (), params, batch, scalars)
    out, probs, adv, logratio = in_torch(cfg, params, batch)
    ratio = logratio.exp()
    clamped = torch.clamp(ratio, 1 - 0.2, 1 + 0.2)
    policy = -torch.min(adv * ratio, adv * clamped).mean()
    predicted = batch.value + torch.clamp(out.value - batch.value, -0.2, 0.2)
    value = torch.nn.functional.mse_loss(batch.value_target, predicted)
    equal(loss, policy + 0.01 * -torch.mean(probs.entropy()) + 0.5 * value)


def test_value_errors_by_hand():
    """V = 2, old 1, target 3, eps .2: plain 1, clipped to 1.2 so 3.24; half of each where it is asked for."""
    value, old, target = (torch.tensor([x]) for x in (2.0, 1.0, 3.0))
    cases = {
        ("plain", True): 0.5,
        ("plain", False): 1.0,
        ("clipped_only", False): 3.24,
        ("clipped_max", True): 1.62,
    }
    for (kind, half), want in cases.items():
        cfg = PPOConfig(value_loss=kind, half_value_loss=half)
        got = losses.value_loss(cfg, value, old, target, CLIP)
        assert float(got) == pytest.approx(want)


@pytest.mark.parametrize("value_loss_name", ["clipped_max", "clipped_only"])
def test_the_value_may_have_a_clip_range_of_its_own(value_loss_name):
    """As `clip_range_vf` of Stable-Baselines3. By hand: 1 + 0.5 is left of a change of 2, so the error is 1.5^2."""
    value, old, target = (torch.tensor([x]) for x in (3.0, 1.0, 3.0))
    cfg = PPOConfig(value_loss=value_loss_name, half_value_loss=False)
    loss = partial(losses.value_loss, cfg, value, old, target)
    assert float(loss(CLIP, value_clip_eps=0.5)) == 1.5**2
    assert loss(CLIP, value_clip_eps=float(CLIP)) == loss(CLIP)


def test_rows_beyond_the_capacity_are_in_no_mean_but_that_of_the_advantages():
    """By hand: advantages are normalised over all rows, and what is left is learnt from; float64, 1e-12."""
    cfg, params, batch, scalars = problem(advantage_ddof=0)
    is_within = torch.arange(32) % 3 > 0
    agent = replace(cfg.agent, within_capacity=lambda *_: is_within)
    limited = replace(cfg, agent=agent)
    loss, metrics = losses.loss_fn(limited, (), params, batch, scalars)

    unnormalised = replace(cfg, ppo=replace(cfg.ppo, advantage_ddof=None))
    advantage = losses.normalize_advantages(cfg.ppo, batch.advantage)
    rows = tree.map(lambda x: x[is_within], batch._replace(advantage=advantage))
    want, expected = losses.loss_fn(unnormalised, (), params, rows, scalars)
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        metrics.policy_loss, expected.policy_loss, rtol=1e-12, atol=0
    )
    assert float(metrics.dropped_fraction) == pytest.approx(11 / 32)


@pytest.mark.parametrize(
    "field", ["log_prob", "value", "advantage", "value_target", "obs"]
)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_leaves_the_others_alone(field, bad):
    """Equal to the loss without the row, 1e-12; advantages are normalised over what is left."""
    cfg, params, batch, scalars = problem(N=9)
    is_bad = torch.arange(9) == 4
    mask = is_bad[:, None] if field == "obs" else is_bad
    values = torch.where(mask, bad, getattr(batch, field))
    spoilt = batch._replace(**{field: values})
    if field != "log_prob":  # as a rollout and `gae` would make of it
        unknown = torch.where(is_bad, bad, batch.advantage)
        spoilt = spoilt._replace(advantage=unknown)
    if field == "log_prob":
        cfg = replace(cfg, ppo=replace(cfg.ppo, advantage_ddof=None))
    left = tree.map(lambda x: x[~is_bad], batch)

    def gradient_of(rows):
        loss = partial(losses.loss_fn, cfg, ())
        return torch.func.grad_and_value(loss, has_aux=True)(
            params, rows, scalars
        )

    gradient, (loss, metrics) = gradient_of(spoilt)
    expected_gradient, (expected_loss, expected) = gradient_of(left)
    assert float(metrics.nonfinite_fraction) == pytest.approx(1 / 9)
    assert float(expected.nonfinite_fraction) == 0
    assert_trees_equal(gradient, expected_gradient, rtol=0, atol=1e-12)
    assert_trees_equal(loss, expected_loss, rtol=0, atol=1e-12)
    assert_trees_equal(
        metrics._replace(nonfinite_fraction=torch.zeros(())),
        expected._replace(nonfinite_fraction=torch.zeros(())),
        rtol=0,
        atol=1e-12,
    )
