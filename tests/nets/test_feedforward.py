"""The MLP: published initialisation, two networks in one stack, products of few bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import funcppo as fp
from funcppo.core import random, tree
from funcppo.interfaces import EnvironmentSpec, MaskedObservation
from funcppo.nets import networks
from tests.learning import WORLD
from tests.nets.guessing import SPECS, mean_reward

CFG = networks.MLPConfig(n_obs=3, n_actions=2, hidden=(8, 5))


@pytest.mark.parametrize(("n_in", "n_out"), [(4, 4), (3, 7), (9, 2), (5, 1)])
def test_orthogonal_weights_have_orthogonal_rows_or_columns(n_in, n_out):
    w = networks.orthogonal(random.key(3), n_in, n_out, 2.0)
    assert w.shape == (n_in, n_out) and w.is_contiguous()
    gram = w.T @ w if n_in >= n_out else w @ w.T
    torch.testing.assert_close(
        gram, 4 * torch.eye(min(n_in, n_out)), rtol=0, atol=1e-5
    )


def test_the_stacked_mlp_equals_two_separate_ones():
    params = networks.init_mlp(CFG, random.key(4))
    obs = random.normal(random.key(5), (6, 3))
    outs = []
    for i in range(2):
        x = obs
        for layer in params.hidden:
            x = torch.tanh(x @ layer.weight[i] + layer.bias[i])
        outs.append(x @ params.heads.weight[i] + params.heads.bias[i])
    out = networks.apply_mlp(CFG, WORLD, params, obs)
    torch.testing.assert_close(out.logits, outs[0])
    torch.testing.assert_close(out.value, outs[1][:, 0])


def test_actor_and_critic_start_different_and_with_the_published_gains():
    params = networks.init_mlp(CFG, random.key(6))
    assert not torch.equal(
        params.hidden[0].weight[0], params.hidden[0].weight[1]
    )
    norm = lambda w: float(torch.linalg.matrix_norm(w, 2))
    weights = [params.hidden[0].weight[0], *params.heads.weight]
    assert [norm(w) for w in weights] == pytest.approx(
        [2**0.5, 0.01, 1.0], rel=1e-5
    )


ACTIVATIONS = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}


def module(params, trunk, head, activation, used):
    """The actor (0) or the critic (1) as modules of torch, with the weights of the stack."""
    layers = []
    for layer in params.hidden:
        layers += [linear(layer.weight[trunk], layer.bias[trunk, 0])]
        layers += [ACTIVATIONS[activation]()]
    heads = params.heads
    last = linear(heads.weight[head, :, :used], heads.bias[head, 0, :used])
    return torch.nn.Sequential(*layers, last)


def linear(weight, bias):
    layer = torch.nn.Linear(*weight.shape)
    layer.weight, layer.bias = (
        torch.nn.Parameter(x.clone()) for x in (weight.T, bias)
    )
    return layer


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("shared_trunk", [False, True])
def test_each_activation_and_sharing_equals_modules_of_torch(
    activation, shared_trunk
):
    cfg = replace(CFG, activation=activation, shared_trunk=shared_trunk)
    params = networks.init_mlp(cfg, random.key(4))
    assert params.hidden[0].weight.shape == (1 if shared_trunk else 2, 3, 8)
    critic_trunk = 0 if shared_trunk else 1
    actor = module(params, 0, 0, activation, 2)
    critic = module(params, critic_trunk, 1, activation, 1)
    obs = random.normal(random.key(5), (6, 3))
    out = networks.apply_mlp(cfg, WORLD, params, obs)
    torch.testing.assert_close(out.logits, actor(obs))
    torch.testing.assert_close(out.value, critic(obs)[:, 0])


def test_log_deviations_of_the_state_are_outputs_of_the_actor_in_their_range():
    cfg = replace(CFG, log_std="state")
    params = networks.init_gaussian(cfg, random.key(4))
    actor = module(params.net, 0, 0, "tanh", 4)
    obs = random.normal(random.key(5), (6, 3))
    out = networks.apply_gaussian(cfg, WORLD, params, obs)
    mean, log_std = actor(obs).split(2, -1)
    torch.testing.assert_close((out.mean, out.log_std), (mean, log_std))
    assert log_std.std() > 0 and log_std.abs().max() < 0.1
    huge = tree.map(lambda x: 1e4 * x, params)
    out = networks.apply_gaussian(cfg, WORLD, huge, obs)
    assert out.log_std.min() == -20.0 and out.log_std.max() == 2.0


def test_masks_of_several_actions_lie_side_by_side():
    cfg = replace(CFG, n_actions=5, action_sizes=(3, 2))
    params = networks.init_mlp(cfg, random.key(4))
    features = random.normal(random.key(5), (2, 3))
    flat = networks.apply_mlp(
        replace(cfg, action_sizes=None), WORLD, params, features
    ).logits
    inf = torch.full((2, 1), -torch.inf)
    plain = networks.apply_mlp(cfg, WORLD, params, features).logits
    assert torch.equal(plain[:, 0], flat[:, :3])
    assert torch.equal(plain[:, 1], torch.cat([flat[:, 3:], inf], 1))
    mask = torch.tensor([[True, False, True, True, False]]).expand(2, -1)
    masked = networks.apply_mlp(
        cfg, WORLD, params, MaskedObservation(features, mask)
    ).logits
    assert torch.equal(masked[:, 0, [0, 2]], flat[:, [0, 2]])
    assert torch.equal(masked[:, 1, 0], flat[:, 3])
    illegal = torch.stack([masked[:, 0, 1], masked[:, 1, 1]])
    assert (illegal == -torch.inf).all()


LEARNERS = {
    "shared relu": ("several", {"activation": "relu", "shared_trunk": True}),
    "several": ("several", {}),
    "masked": ("masked", {}),
    "squashed": ("continuous", {"squash": True}),
    "state": ("continuous", {"log_std": "state"}),
    "squashed state": ("continuous", {"squash": True, "log_std": "state"}),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_each_kind_of_policy_learns(name):
    """The share of right actions rises above 0.9; the squared error falls below a quarter of its first."""
    kind, options = LEARNERS[name]
    n_updates = 30 if kind == "continuous" else 12
    first, last = mean_reward(kind, fp.nets.mlp(16, **options), n_updates)
    if kind == "continuous":
        assert last > 0.25 * first
    else:
        assert first < 0.8 and last > 0.9


@pytest.mark.parametrize(
    ("kind", "options", "problem"),
    [
        ("several", {"squash": True}, "squash: expected an environment with"),
        ("masked", {"log_std": "state"}, "log_std: expected an environment"),
        ("several", {"activation": "gelu"}, "activation: expected one of"),
        ("continuous", {"log_std": "none"}, "log_std: expected one of"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(kind, options, problem):
    with pytest.raises(ValueError, match=f"^{problem}"):
        fp.nets.mlp(4, **options)(SPECS[kind])


def test_sizes_of_several_actions_add_up():
    with pytest.raises(ValueError, match=r"^action_sizes: .* action_size = 4"):
        EnvironmentSpec(observation_size=1, action_size=4, action_sizes=(3, 2))
