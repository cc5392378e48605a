"""The MLP: published initialisation, two networks in one stack, products of few bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from funcppo import random, tree
from funcppo.interfaces import EnvironmentSpec, MaskedObservation
from funcppo.nets import feedforward
from tests.learning import WORLD

CFG = feedforward.MLPConfig(n_obs=3, n_actions=2, hidden=(8, 5))


@pytest.mark.parametrize(("n_in", "n_out"), [(4, 4), (3, 7), (9, 2), (5, 1)])
def test_orthogonal_weights_have_orthogonal_rows_or_columns(n_in, n_out):
    w = feedforward.orthogonal(random.key(3), n_in, n_out, 2.0)
    assert w.shape == (n_in, n_out) and w.is_contiguous()
    gram = w.T @ w if n_in >= n_out else w @ w.T
    torch.testing.assert_close(
        gram, 4 * torch.eye(min(n_in, n_out)), rtol=0, atol=1e-5
    )


def test_the_stacked_mlp_equals_two_separate_ones():
    params = feedforward.init(CFG, random.key(4))
    obs = random.normal(random.key(5), (6, 3))
    outs = []
    for i in range(2):
        x = obs
        for layer in params.hidden:
            x = torch.tanh(x @ layer.weight[i] + layer.bias[i])
        outs.append(x @ params.heads.weight[i] + params.heads.bias[i])
    out = feedforward.apply(CFG, WORLD, params, obs)
    torch.testing.assert_close(out.logits, outs[0])
    torch.testing.assert_close(out.value, outs[1][:, 0])


def test_an_action_that_the_observation_masks_is_never_taken():
    params = feedforward.init(CFG, random.key(4))
    features = random.normal(random.key(5), (6, 3))
    mask = torch.tensor([[True, False], [True, True]]).repeat(3, 1)
    plain = feedforward.apply(CFG, WORLD, params, features)
    masked = feedforward.apply(
        CFG, WORLD, params, MaskedObservation(features, mask)
    )
    assert torch.equal(masked.logits[mask], plain.logits[mask])
    assert (masked.logits[~mask] == -torch.inf).all()
    assert torch.equal(masked.value, plain.value)


def test_what_fills_up_the_critic_s_head_is_zero_and_has_no_gradient():
    params = feedforward.init(CFG, random.key(4))
    loss = lambda p: sum(
        x.square().sum()
        for x in feedforward.apply(
            CFG, WORLD, p, random.normal(random.key(5), (6, 3))
        )
    )
    for head in (params.heads, torch.func.grad(loss)(params).heads):
        used, unused = head.weight[1].split([1, CFG.n_actions - 1], dim=1)
        assert (
            used.all()
            and unused.numel()
            and not unused.any()
            and not head.bias[1, :, 1:].any()
        )


def test_actor_and_critic_start_different_and_with_the_published_gains():
    params = feedforward.init(CFG, random.key(6))
    assert not torch.equal(
        params.hidden[0].weight[0], params.hidden[0].weight[1]
    )
    norm = lambda w: float(torch.linalg.matrix_norm(w, 2))
    weights = [params.hidden[0].weight[0], *params.heads.weight]
    assert [norm(w) for w in weights] == pytest.approx(
        [2**0.5, 0.01, 1.0], rel=1e-5
    )


def test_the_gaussian_network_starts_with_unit_deviation():
    cfg = feedforward.MLPConfig(n_obs=3, n_actions=2)
    out = feedforward.apply_gaussian(
        cfg,
        WORLD,
        feedforward.init_gaussian(cfg, random.key(0)),
        torch.ones(4, 3),
    )
    assert (
        out.mean.shape == out.log_std.shape == (4, 2) and not out.log_std.any()
    )


@pytest.mark.parametrize("hidden", [(64, 64), (512, 512)])
def test_products_in_bfloat16_are_within_their_rounding(hidden):
    """8 bits a factor: outputs and gradients within 1 % of float32's, by norm; params and outputs stay float32."""
    cfg = feedforward.MLPConfig(n_obs=32, n_actions=6, hidden=hidden)
    params, obs = (
        feedforward.init(cfg, random.key(0)),
        random.normal(random.key(1), (256, 32)),
    )

    def found(cfg):
        leaves = [x.clone().requires_grad_() for x in tree.leaves(params)]
        out = feedforward.apply(cfg, (), tree.unflatten(params, leaves), obs)
        (
            torch.log_softmax(out.logits, -1)[:, 0] + out.value**2
        ).mean().backward()
        return tree.ravel([out.logits, out.value]).detach(), tree.ravel(
            [x.grad for x in leaves]
        )

    for got, want in zip(
        found(replace(cfg, matmul_dtype=torch.bfloat16)), found(cfg)
    ):
        assert got.dtype == torch.float32
        assert 1e-5 < float((got - want).norm() / want.norm()) < 0.01


def test_a_network_is_built_for_the_sizes_and_actions_of_an_environment():
    factory = feedforward.mlp(8, 5)
    discrete = factory(EnvironmentSpec(observation_size=3, action_size=2))
    assert discrete.cfg == CFG and discrete.apply is feedforward.apply
    spec = EnvironmentSpec(
        observation_size=3, action_size=2, continuous_actions=True
    )
    assert factory(spec).apply is feedforward.apply_gaussian
