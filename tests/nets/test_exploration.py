"""Noise that depends on the state: its density, how long it stays the same, and what it learns."""

from __future__ import annotations

import math

import pytest
import torch

import funcppo as fp
from funcppo.core import random, tree
from funcppo.nets import networks
from funcppo.nets.networks import GSDE, Dense, GSDEConfig, MLPConfig
from funcppo.nets.networks import GaussianParams as Params
from funcppo.nets.networks import MLPParams as MLPParams
from funcppo.rollout import rollout_keys
from tests.learning import WORLD
from tests.nets.guessing import guessing

MLP = MLPConfig(n_obs=3, n_actions=2, hidden=(8, 5))
CFG = GSDEConfig(mlp=MLP, first_log_std=-1.0)


def output_of(cfg, n_rows, seed=0):
    params = networks.init_gsde(cfg, random.key(seed))
    obs = random.normal(random.key(seed + 1), (n_rows, cfg.mlp.n_obs))
    return networks.apply_gsde(cfg, WORLD, params, obs)


def test_the_density_of_an_example_worked_by_hand():
    """Without hidden layers features are the observation, (1, 2).

    Deviations of 1 and 1/2 give the action the variance 1 + 4/4 = 2 about a mean of 1 * 3 + 2 * 4 = 11, so that an
    action of 13 has the log-density -1 - log(4 pi) / 2.
    """
    heads = Dense(
        torch.tensor([[[3.0], [4.0]], [[5.0], [6.0]]]), torch.zeros(2, 1, 1)
    )
    log_std = torch.tensor([[0.0], [math.log(0.5)]])
    cfg = GSDEConfig(mlp=MLPConfig(n_obs=2, n_actions=1, hidden=()))
    output = networks.apply_gsde(
        cfg,
        WORLD,
        Params(MLPParams((), heads), log_std),
        torch.tensor([[1.0, 2.0]]),
    )
    assert output.mean.tolist() == [[11.0]] and output.value.tolist() == [17.0]
    got = GSDE.log_prob(output, torch.tensor([[13.0]]))
    want = -1 - 0.5 * math.log(4 * math.pi)
    assert float(got) == pytest.approx(want, abs=1e-5)
    entropy = 0.5 * math.log(2 * math.pi * math.e * 2)
    assert float(GSDE.entropy(output)) == pytest.approx(entropy, abs=1e-5)


def test_actions_have_the_moments_of_their_density():
    """20,000 matrices: means within 5 standard errors, deviations within 3 %."""
    n = 20_000
    output = tree.map(
        lambda x: x.expand(n, -1) if x.shape[0] == 1 and x.ndim == 2 else x,
        output_of(CFG, 1),
    )
    action = GSDE.sample(random.key(9), output)
    std = output.log_std[0].exp()
    assert ((action.mean(0) - output.mean[0]).abs() < 5 * std / n**0.5).all()
    torch.testing.assert_close(action.std(0), std, rtol=0.03, atol=0)


@pytest.mark.parametrize(
    ("held", "want"),
    [
        (1, [0, 1, 2, 3, 4, 5, 6]),
        (3, [0, 0, 0, 3, 3, 3, 6]),
        (7, [0] * 7),
        (9, [0] * 7),
        (None, [0] * 7),
    ],
)
def test_keys_of_actions_are_held_and_others_are_not(held, want):
    plain = rollout_keys(random.key(0), 7, 5)
    keys = rollout_keys(random.key(0), 7, 5, held)
    assert torch.equal(keys[0], plain[0][want])
    assert torch.equal(keys[1], plain[1]) and torch.equal(keys[2], plain[2])


def test_a_run_that_is_continued_ends_with_the_bits_of_one_that_was_not(
    tmp_path,
):
    """Stopped after one of three updates of five steps, of which matrices last for two."""
    learner = fp.ppo(
        env=guessing("continuous"),
        network=fp.nets.gsde(4, noise_steps=2),
        n_envs=2,
        n_steps=5,
        n_minibatches=1,
    )
    whole = fp.train(learner, 30).state
    checkpoint = tmp_path / "run.npz"
    stop = lambda progress: progress.update == 1
    fp.train(learner, 30, callbacks=[stop], checkpoint=checkpoint)
    continued = fp.train(learner, 30, checkpoint=checkpoint).state
    assert int(continued.update) == 3
    for x, y in zip(tree.leaves(continued), tree.leaves(whole)):
        assert torch.equal(x, y)


def test_an_option_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match="gsde: expected an environment with"):
        fp.ppo(env=fp.envs.cartpole(), network=fp.nets.gsde(4))
    for options in ({"first_log_std": 3.0}, {"noise_steps": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            fp.ppo(
                env=guessing("continuous"), network=fp.nets.gsde(4, **options)
            )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("noise_steps", [None, 4])
def test_on_a_gpu_an_update_is_one_cuda_graph_and_equals_eager(noise_steps):
    """Two updates, float32; the rollout is no kernel, and the record says why."""
    learner = fp.ppo(
        env=fp.envs.make("Pendulum-v1"),
        network=fp.nets.gsde(16, noise_steps=noise_steps),
        n_envs=4,
        n_steps=8,
        n_minibatches=2,
        n_updates=2,
    )
    state = eager = learner.init(random.key(0, "cuda"))
    fast = fp.compile(learner, state)
    assert fast.record.strategy == "one-graph"
    assert fast.record.replay_mode == "cuda-graph"
    assert fast.record.rollout == "steps" and fast.record.rollout_reason
    assert fast.record.rollout_code is not None
    for _ in range(2):
        state, _ = fast.step(state)
        eager, _ = learner.step(eager)
    for x, y in zip(tree.leaves(state), tree.leaves(eager)):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)
