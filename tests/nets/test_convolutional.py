"""Networks for images beside convolutions of torch.nn, and that one learns what no single pixel tells."""

from __future__ import annotations

import pytest
import torch

import funcppo as fp
from funcppo.core import random, tree
from funcppo.interfaces import EnvironmentSpec, MaskedObservation
from funcppo.nets import networks
from tests.learning import WORLD

SPEC = EnvironmentSpec(
    observation_size=11 * 10 * 3, observation_shape=(11, 10, 3), action_size=4
)
LAYERS = ((6, 3, 2), (5, 2, 1))


def modules(agent, params):
    """The convolutions as modules of torch with the same weights."""
    found, n_in = [], agent.cfg.image_shape[2]
    for layer, (n_out, size, stride) in zip(
        params.convolutions, agent.cfg.convolutions
    ):
        conv = torch.nn.Conv2d(n_in, n_out, size, stride)
        conv.weight, conv.bias = map(torch.nn.Parameter, layer)
        found += [conv, torch.nn.ReLU()]
        n_in = n_out
    return torch.nn.Sequential(*found, torch.nn.Flatten())


@pytest.mark.parametrize("layers", [(), LAYERS])
def test_a_cnn_equals_convolutions_of_torch_and_the_network_that_follows(
    layers,
):
    agent = fp.nets.cnn(*layers)(SPEC)
    params = agent.init(agent.cfg, random.key(0))
    image = random.normal(random.key(1), (7, 11, 10, 3))
    features = modules(agent, params)(image.permute(0, 3, 1, 2))
    reader = agent.cfg.reader
    assert features.shape == (7, reader.cfg.n_obs)
    want = reader.apply(reader.cfg, WORLD, params.reader, features)
    got = agent.apply(agent.cfg, WORLD, params, image)
    torch.testing.assert_close(got, want)

    mask = torch.tensor([True, False, True, True]).expand(7, -1)
    masked = agent.apply(
        agent.cfg, WORLD, params, MaskedObservation(image, mask)
    )
    assert (masked.logits[:, 1] == -torch.inf).all()
    torch.testing.assert_close(masked.logits[mask], want.logits[mask])


def test_the_published_networks_have_their_sizes():
    """MinAtar's for Breakout: 16 channels of 3 x 3 over 4, 1024 features, 128 units; Nature's for 6 actions."""
    breakout = fp.envs.breakout().spec
    agent = fp.nets.cnn()(breakout)
    params = agent.init(agent.cfg, random.key(0))
    count = lambda x: sum(leaf.numel() for leaf in tree.leaves(x))
    assert count(params.convolutions) == 16 * 4 * 9 + 16
    assert count(params.reader.hidden) == 1024 * 128 + 128
    atari = EnvironmentSpec(
        observation_size=84 * 84 * 4,
        observation_shape=(84, 84, 4),
        action_size=6,
    )
    agent = fp.nets.nature_cnn()(atari)
    assert agent.cfg.reader.cfg.n_obs == 3136
    params = agent.init(agent.cfg, random.key(0))
    n_unused = 512 * 5 + 5  # what fills up the critic's head
    assert count(params) - n_unused == 1_687_719


@pytest.mark.parametrize(
    ("layers", "spec", "problem"),
    [
        (
            (),
            EnvironmentSpec(observation_size=4, action_size=2),
            r"env.spec: expected images .* got observations of \(4,\)",
        ),
        (
            ((8, 8, 4), (8, 3, 1)),
            SPEC,
            r"convolutions: expected kernels .* 3 x 3 where 1 x 1 are left",
        ),
        (((0, 3, 1),), SPEC, "n_channels: expected 1 or more, got 0"),
        (
            ((16, 3),),
            SPEC,
            r"convolutions: expected \(channels, kernel size, stride\), got \(16, 3\)",
        ),
        (
            (16,),
            SPEC,
            r"convolutions: expected \(channels, kernel size, stride\), got 16",
        ),
    ],
)
def test_images_that_do_not_fit_are_refused_in_one_line(layers, spec, problem):
    with pytest.raises(ValueError, match=f"^{problem}$"):
        fp.nets.cnn(*layers)(spec)


def test_n_features_counts_what_the_convolutions_make():
    layers = fp.nets.cnn(*LAYERS)(SPEC).cfg.convolutions
    assert networks.n_features((11, 10, 3), layers) == 4 * 3 * 5
