from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from funcppo import random, tree
from funcppo.nets import feedforward as mlp
from funcppo.nets.base import (
    CATEGORICAL,
    DIAGONAL_GAUSSIAN,
    GaussianPolicyValue,
    PolicyValue,
    dense,
    init_dense,
)
from tests.learning import WORLD, double

CFG = mlp.MLPConfig(n_obs=3, n_actions=2, hidden=(8, 5))


def test_a_dense_layer_by_hand():
    layer = init_dense(random.key(0), 2, 1)._replace(weight=torch.tensor([[1.0], [2.0]]), bias=torch.tensor([0.5]))
    assert dense(layer, torch.tensor([[3.0, 4.0]])).tolist() == [[11.5]]


def test_a_dense_layer_keeps_the_variance_of_unit_inputs():
    """300 inputs, 300 outputs: within 5 % of `scale` squared."""
    layer = init_dense(random.key(1), 300, 300, scale=0.5)
    assert float(dense(layer, random.normal(random.key(2), (500, 300))).var()) == pytest.approx(0.25, rel=0.05)


@pytest.mark.parametrize(("n_in", "n_out"), [(4, 4), (3, 7), (9, 2), (5, 1)])
def test_orthogonal_weights_have_orthogonal_rows_or_columns(n_in, n_out):
    w = mlp.orthogonal(random.key(3), n_in, n_out, 2.0)
    assert w.shape == (n_in, n_out) and w.is_contiguous()
    gram = w.T @ w if n_in >= n_out else w @ w.T
    torch.testing.assert_close(gram, 4 * torch.eye(min(n_in, n_out)), rtol=0, atol=1e-5)


def test_the_stacked_mlp_equals_two_separate_ones():
    params = mlp.init(CFG, random.key(4))
    obs = random.normal(random.key(5), (6, 3))
    outs = []
    for i in range(2):
        x = obs
        for layer in params.hidden:
            x = torch.tanh(x @ layer.weight[i] + layer.bias[i])
        outs.append(x @ params.heads.weight[i] + params.heads.bias[i])
    out = mlp.apply(CFG, WORLD, params, obs)
    torch.testing.assert_close(out.logits, outs[0])
    torch.testing.assert_close(out.value, outs[1][:, 0])


def test_what_fills_up_the_critic_s_head_is_zero_and_has_no_gradient():
    params = mlp.init(CFG, random.key(4))
    loss = lambda p: sum(x.square().sum() for x in mlp.apply(CFG, WORLD, p, random.normal(random.key(5), (6, 3))))
    for head in (params.heads, torch.func.grad(loss)(params).heads):
        used, unused = head.weight[1].split([1, CFG.n_actions - 1], dim=1)
        assert used.all() and unused.numel() and not unused.any() and not head.bias[1, :, 1:].any()


def test_actor_and_critic_start_different_and_with_the_published_gains():
    params = mlp.init(CFG, random.key(6))
    assert not torch.equal(params.hidden[0].weight[0], params.hidden[0].weight[1])
    norm = lambda w: float(torch.linalg.matrix_norm(w, 2))
    weights = [params.hidden[0].weight[0], *params.heads.weight]
    assert [norm(w) for w in weights] == pytest.approx([2**0.5, 0.01, 1.0], rel=1e-5)


def test_the_categorical_equals_torch_distributions():
    out = double(PolicyValue(logits=3 * random.normal(random.key(7), (5, 4)), value=torch.zeros(5)))
    want, action = torch.distributions.Categorical(logits=out.logits), torch.tensor([0, 1, 2, 3, 0])
    torch.testing.assert_close(CATEGORICAL.log_prob(out, action), want.log_prob(action))
    torch.testing.assert_close(CATEGORICAL.entropy(out), want.entropy())
    assert torch.equal(CATEGORICAL.mode(out), want.probs.argmax(-1))


def test_a_masked_action_has_probability_zero_and_no_entropy():
    lowest = torch.finfo(torch.float32).min
    out = PolicyValue(logits=torch.tensor([[1.0, lowest, 1.0]], requires_grad=True), value=torch.zeros(1))
    assert float(CATEGORICAL.log_prob(out, torch.tensor([1])).exp()) == 0
    assert float(CATEGORICAL.entropy(out)) == pytest.approx(torch.tensor(2.0).log().item())
    (grad,) = torch.autograd.grad(CATEGORICAL.entropy(out).sum(), out.logits)
    assert grad.isfinite().all()


def test_a_row_with_one_legal_action_has_entropy_zero():
    lowest = torch.finfo(torch.float32).min
    out = PolicyValue(logits=torch.tensor([[lowest, 5.0, lowest]]), value=torch.zeros(1))
    assert float(CATEGORICAL.entropy(out)) == 0 and int(CATEGORICAL.sample(random.key(0), out)) == 1


def test_the_diagonal_normal_equals_torch_distributions():
    mean, log_std, action = (random.normal(k, (5, 3)).double() for k in random.split(random.key(8), 3))
    out = GaussianPolicyValue(mean=mean, log_std=log_std, value=torch.zeros(5))
    want = torch.distributions.Independent(torch.distributions.Normal(mean, log_std.exp()), 1)
    torch.testing.assert_close(DIAGONAL_GAUSSIAN.log_prob(out, action), want.log_prob(action))
    torch.testing.assert_close(DIAGONAL_GAUSSIAN.entropy(out), want.entropy())
    assert torch.equal(DIAGONAL_GAUSSIAN.mode(out), mean)


def test_samples_have_the_mean_and_deviation_of_the_normal():
    """20,000 draws, within five standard errors."""
    n = 20_000
    out = GaussianPolicyValue(mean=torch.full((n, 1), 3.0), log_std=torch.full((n, 1), 0.5), value=torch.zeros(n))
    draws = DIAGONAL_GAUSSIAN.sample(random.key(9), out)
    std = torch.tensor(0.5).exp().item()
    assert abs(float(draws.mean()) - 3) < 5 * std / n**0.5
    assert float(draws.std()) == pytest.approx(std, rel=5 / (2 * n) ** 0.5)


def test_the_gaussian_network_starts_with_unit_deviation():
    cfg = mlp.MLPConfig(n_obs=3, n_actions=2)
    out = mlp.apply_gaussian(cfg, WORLD, mlp.init_gaussian(cfg, random.key(0)), torch.ones(4, 3))
    assert out.mean.shape == out.log_std.shape == (4, 2) and not out.log_std.any()


@pytest.mark.parametrize("hidden", [(64, 64), (512, 512)])
def test_products_in_bfloat16_are_within_their_rounding(hidden):
    """8 bits a factor: outputs and gradients within 1 % of float32's, by norm; params and outputs stay float32."""
    cfg = mlp.MLPConfig(n_obs=32, n_actions=6, hidden=hidden)
    params, obs = mlp.init(cfg, random.key(0)), random.normal(random.key(1), (256, 32))

    def found(cfg):
        leaves = [x.clone().requires_grad_() for x in tree.leaves(params)]
        out = mlp.apply(cfg, (), tree.unflatten(params, leaves), obs)
        (torch.log_softmax(out.logits, -1)[:, 0] + out.value**2).mean().backward()
        return tree.ravel([out.logits, out.value]).detach(), tree.ravel([x.grad for x in leaves])

    for got, want in zip(found(replace(cfg, matmul_dtype=torch.bfloat16)), found(cfg)):
        assert got.dtype == torch.float32
        assert 1e-5 < float((got - want).norm() / want.norm()) < 0.01
