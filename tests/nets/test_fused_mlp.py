"""The fused network equals the layers one by one, and the gradient of PPO's loss by automatic differentiation."""

from functools import partial
from typing import Any

import pytest
import torch

import funcppo as fp
from funcppo import minibatch, train_step
from funcppo.core import random, tree
from funcppo.nets import fused_mlp, networks
from funcppo.rollout import RolloutState
from funcppo.runtime import compile
from funcppo.runtime.capture import ReasonCode
from tests.learning import WORLD, assert_trees_equal, double
from tests.nets.guessing import guessing

SETTINGS = (("tanh", False), ("relu", False))


# The operators by PyTorch, of one learner or of several [L, ...], which there are on a GPU alone otherwise.


def _forward(x: Any, leaves: Any, activation: Any, is_bfloat16: bool) -> Any:
    w1, b1, w2, b2, w3, b3 = leaves
    y1 = networks.activate(activation, x[..., None, :, :] @ w1 + b1)
    y2 = networks.activate(activation, y1 @ w2 + b2)
    return y2 @ w3 + b3, y1, y2


def _backward(g: Any, x: Any, *others: Any) -> Any:
    """The sums of all programs [..., P, NP]: those of the first one, and zeros."""
    y1, y2, w2, w3, activation, _ = others

    def slope(y: torch.Tensor) -> torch.Tensor:
        return 1 - y * y if activation == "tanh" else (y > 0).to(y.dtype)

    g2 = g @ w3.mT * slope(y2)
    g1 = g2 @ w2.mT * slope(y1)
    sums = torch.zeros_like(fused_mlp._empty_sums(g, x, y1, y2))
    gradients = []
    for y, of_layer in ((x[..., None, :, :], g1), (y1, g2), (y2, g)):
        gradients += [y.mT @ of_layer, of_layer.sum(-2)]
    flat = [v.reshape(*x.shape[:-2], -1) for v in gradients]
    sums[..., 0, :] = torch.cat(flat, -1)
    return sums


def _values(x: Any, is_needed: Any, *others: Any) -> Any:
    heads, _, _ = _forward(x, *others)
    return torch.where(is_needed, heads[..., 1, :, 0], 0.0)


_LIBRARY = torch.library.Library("funcppo", "IMPL")
_LIBRARY.impl("dense_forward", _forward, "CPU")
_LIBRARY.impl("dense_backward", _backward, "CPU")
_LIBRARY.impl("dense_values", _values, "CPU")


def make_layers(
    n_learners=1,
    n_obs=5,
    hidden=(8, 6),
    n_outputs=3,
    dtype=torch.float64,
    device="cpu",
):
    """The params of some learners, all of a learner in one vector; of one, without an axis of learners."""
    cfg = networks.MLPConfig(n_obs=n_obs, n_actions=n_outputs, hidden=hidden)
    keys = random.split(random.key(3), n_learners)
    each = [networks.init_mlp(cfg, key) for key in keys]
    flat = torch.stack([tree.ravel(params) for params in each])
    noise = random.normal(random.key(4), flat.shape)
    flat = (flat + 0.1 * noise).to(device, dtype)
    if n_learners == 1:
        return tree.unravel(each[0], flat[0])
    return torch.vmap(lambda x: tree.unravel(each[0], x))(flat)


def draw(seed, *shape, like):
    numbers = random.normal(random.key(seed), shape)
    return numbers.to(tree.leaves(like)[0])


def by_autograd(params, x, of_heads, activation):
    """The outputs of the heads, and the gradient of params."""

    def heads(params):
        y = x.expand(2, *x.shape)
        for layer in params.hidden:
            y = networks.activate(activation, y @ layer.weight + layer.bias)
        return y @ params.heads.weight + params.heads.bias

    outputs, vjp = torch.func.vjp(heads, params)
    return outputs, vjp(of_heads)[0]


@pytest.mark.parametrize("shares_rows", [False, True])
def test_vmap_computes_each_learner(shares_rows):
    settings = SETTINGS[0]
    params = make_layers(n_learners=3)
    x = draw(0, 3, 7, 5, like=params)
    of_heads = draw(1, 3, 2, 7, 3, like=params)

    def all_three(params, x, of_heads):
        outputs = fused_mlp.mlp_outputs(params, x, settings)
        seen = outputs, of_heads, settings
        gradient = fused_mlp.mlp_gradient(params, x, *seen)
        is_needed = of_heads[0, :, 0] > 0
        values = fused_mlp.critic_values(params, x, is_needed, settings)
        return outputs, gradient, values

    of_one = [
        all_three(tree.item(params, i), x[0 if shares_rows else i], of_heads[i])
        for i in range(3)
    ]
    in_dims = (0, None if shares_rows else 0, 0)
    rows = x[0] if shares_rows else x
    got = torch.vmap(all_three, in_dims=in_dims)(params, rows, of_heads)
    expected = tree.map(lambda *v: torch.stack(v), *of_one)
    assert_trees_equal(got, expected, rtol=1e-7, atol=1e-7)


NETWORKS = [
    ("CartPole-v1", {}),
    ("CartPole-v1", {"activation": "relu"}),
    ("Pendulum-v1", {}),
    ("Pendulum-v1", {"log_std": "state", "squash": True}),
]
# of several actions, legal or not
SEVERAL_ACTIONS = [("guessing several", {}), ("guessing masked", {})]


def make_learner(name, network, *hidden, **ppo):
    settings = {"n_envs": 4, "n_steps": 8, "n_minibatches": 2, "n_updates": 2}
    is_guessing, _, kind = name.partition("guessing ")
    env = fp.envs.make(name) if is_guessing else guessing(kind)
    policy = fp.nets.mlp(*(hidden or (8, 6)), **network)
    return fp.ppo(env=env, network=policy, **(settings | ppo))


def first_state(cfg, n_learners):
    """The parts and the state, in float64, of one learner or of several."""
    keys = random.split(random.key(1), n_learners)
    states = [train_step.init(cfg, WORLD, key) for key in keys]
    if n_learners == 1:
        return train_step.EAGER_PARTS, double(states[0])
    state = tree.map(lambda *x: torch.stack(x), *states)
    return train_step.vmap_parts(train_step.EAGER_PARTS), double(state)


def collected(learner, seed=0):
    """Params and what is learnt from, in float64."""
    state = double(learner.init(random.key(seed)))
    return state.params, double(train_step.collect(learner.cfg, WORLD, state))


def both_gradients(learner, params, data):
    """The gradient and the metrics by autograd and by kernels, of the first minibatch."""
    rows = tree.item(data.minibatches, 0).rows
    args = (learner.cfg, WORLD, params, data.batch, rows, data.scalars)
    return minibatch.loss_gradient(*args), fused_mlp.loss_gradient(*args)


@pytest.mark.parametrize(("name", "network"), NETWORKS + SEVERAL_ACTIONS)
def test_gradient_and_metrics_equal_those_of_the_loss(name, network):
    learner = make_learner(name, network)
    assert fused_mlp.reason_against(learner.cfg) == ""
    expected, got = both_gradients(learner, *collected(learner))
    assert_trees_equal(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "ppo", [{"n_microbatches": 2}, {"n_shards": 2}, {}], ids=str
)
def test_a_minibatch_step_equals_that_of_operators(ppo):
    learner = make_learner("CartPole-v1", {}, **ppo)
    params, data = collected(learner)
    args = (learner.cfg, WORLD, params, data.batch, data.scalars)
    args += data.update_state, tree.item(data.minibatches, 0)
    expected = minibatch.minibatch_step(*args)
    got = train_step.EAGER_PARTS.kernels.minibatch_step(*args)
    assert_trees_equal(got, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("n_learners", [1, 3])
@pytest.mark.parametrize(("name", "network"), NETWORKS + SEVERAL_ACTIONS)
def test_a_rollout_step_equals_that_of_operators(name, network, n_learners):
    cfg = make_learner(name, network).cfg
    parts, state = first_state(cfg, n_learners)
    inputs = parts.sample_randomness(cfg, WORLD, state.key).random_inputs
    first = RolloutState(state.env_state, state.episode_stats, state.memory)
    args = cfg, WORLD, state.params, first, tree.item(inputs, 0)
    expected = parts.rollout_step(*args)
    got = parts.kernels.rollout_step(*args)
    assert_trees_equal(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("n_learners", [1, 3])
@pytest.mark.parametrize("bootstraps", [True, False])
def test_a_batch_with_truncated_episodes_equals_that_of_operators(
    n_learners, bootstraps
):
    settings = {"n_steps": 32, "n_minibatches": 1}
    settings["bootstrap_truncated"] = bootstraps
    cfg = make_learner("MountainCar-v0", {}, **settings).cfg
    parts, state = first_state(cfg, n_learners)
    rollout = train_step.roll_out(cfg, WORLD, state, parts)
    trajectory = double(rollout.trajectory)
    # as if the time limit had cut some episodes
    index = torch.arange(trajectory.truncated.numel())
    truncated = (index % 5 == 0).view_as(trajectory.truncated)
    before = cfg, WORLD, state.params, double(rollout.rollout_state.env_state)
    after = state.scalars, ((), ())
    args = *before, trajectory._replace(truncated=truncated), *after
    expected = parts.build_batch(*args)
    got = parts.kernels.build_batch(*args)
    assert_trees_equal(got, expected, rtol=1e-9, atol=1e-12)
    uncut = parts.build_batch(*before, trajectory, *after)
    assert not torch.equal(uncut[0].advantage, expected[0].advantage)


@pytest.mark.parametrize(
    ("hidden", "network", "reason"),
    [
        ((8,), {}, "the network has 1 hidden layers, not 2"),
        ((8, 8, 8), {}, "the network has 3 hidden layers, not 2"),
        ((8, 65), {}, "a layer of 65 units, more than 64"),
        ((8, 8), {"shared_trunk": True}, "actor and critic share their hidden layers"),
        ((8, 8), {"matmul_dtype": torch.float64}, "products of torch.float64"),
    ],
)  # fmt: skip
def test_other_networks_have_no_kernels(hidden, network, reason):
    learner = make_learner("CartPole-v1", network, *hidden)
    assert fused_mlp.reason_against(learner.cfg) == reason


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("name", "network"), NETWORKS)
def test_a_compiled_learner_on_a_gpu_has_kernels(name, network):
    learner = make_learner(name, network, 64, 64)
    state = learner.init(random.key(0, "cuda"))
    fast = fp.compile(learner, state, strategy="one-graph")
    assert fast.record.network == "kernels"
    assert "network" not in {failure.name for failure in fast.record.failures}
    got, _ = fast.step(state)
    expected, _ = learner.step(learner.init(random.key(0, "cuda")))
    for a, b in zip(tree.leaves(got.params), tree.leaves(expected.params)):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_kernels_that_compute_other_numbers_are_not_used(monkeypatch):
    learner = make_learner("CartPole-v1", {}, 64, 64)
    gradient, double = minibatch.loss_gradient, lambda x: 2 * x
    twice = lambda *args: tree.map(double, gradient(*args))
    wrong = partial(minibatch.minibatch_step, gradient_fn=twice)
    kernels = train_step.KernelFunctions(minibatch_step=wrong)
    parts = train_step.StepFunctions(kernels=kernels)
    state = learner.init(random.key(0, "cuda"))
    args = train_step.collect, parts, learner.cfg, WORLD, state, "one-graph"
    _, record = compile.select_strategy(*args)
    assert record.strategy == "one-graph" and record.network == "operators"
    (code,) = (x.code for x in record.failures if x.name == "network")
    assert code == ReasonCode.WRONG_RESULT
