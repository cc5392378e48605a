"""Networks beside modules of torch.nn, and what holds for every one: updates vectorise, and each part is a graph."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

import funcppo as fp
from funcppo.core import random, tree
from funcppo.interfaces import EnvironmentSpec, MaskedObservation
from funcppo.nets import networks
from funcppo.rollout import rollout_keys
from funcppo.train_step import EAGER_PARTS, collect, train_step, vmap_parts
from tests.learning import WORLD, assert_trees_equal, compiled, double
from tests.nets.guessing import SPECS, guessing, mean_reward

MLP_CFG = networks.MLPConfig(n_obs=3, n_actions=2, hidden=(8, 5))


@pytest.mark.parametrize(("n_in", "n_out"), [(4, 4), (3, 7), (9, 2), (5, 1)])
def test_orthogonal_weights_have_orthogonal_rows_or_columns(n_in, n_out):
    w = networks.orthogonal(random.key(3), n_in, n_out, 2.0)
    assert w.shape == (n_in, n_out) and w.is_contiguous()
    gram = w.T @ w if n_in >= n_out else w @ w.T
    want = 4 * torch.eye(min(n_in, n_out))
    torch.testing.assert_close(gram, want, rtol=0, atol=1e-5)


def test_actor_and_critic_start_different_and_with_the_published_gains():
    params = networks.init_mlp(MLP_CFG, random.key(6))
    actor, critic = params.hidden[0].weight
    assert not torch.equal(actor, critic)
    weights = actor, *params.heads.weight
    norms = [float(torch.linalg.matrix_norm(w, 2)) for w in weights]
    assert norms == pytest.approx([2**0.5, 0.01, 1.0], rel=1e-5)


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
    copied = (torch.nn.Parameter(x.clone()) for x in (weight.T, bias))
    layer.weight, layer.bias = copied
    return layer


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("shared_trunk", [False, True])
def test_activations_and_sharing_equal_modules(activation, shared_trunk):
    cfg = replace(MLP_CFG, activation=activation, shared_trunk=shared_trunk)
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
    cfg = replace(MLP_CFG, log_std="state")
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
    cfg = replace(MLP_CFG, n_actions=5, action_sizes=(3, 2))
    params = networks.init_mlp(cfg, random.key(4))
    features = random.normal(random.key(5), (2, 3))
    logits = lambda cfg, x: networks.apply_mlp(cfg, WORLD, params, x).logits
    flat = logits(replace(cfg, action_sizes=None), features)
    inf = torch.full((2, 1), -torch.inf)
    plain = logits(cfg, features)
    assert torch.equal(plain[:, 0], flat[:, :3])
    assert torch.equal(plain[:, 1], torch.cat([flat[:, 3:], inf], 1))
    mask = torch.tensor([[True, False, True, True, False]]).expand(2, -1)
    masked = logits(cfg, MaskedObservation(features, mask))
    assert torch.equal(masked[:, 0, [0, 2]], flat[:, [0, 2]])
    assert torch.equal(masked[:, 1, 0], flat[:, 3])
    illegal = torch.stack([masked[:, 0, 1], masked[:, 1, 1]])
    assert (illegal == -torch.inf).all()


POLICIES = {
    "shared relu": ("several", {"activation": "relu", "shared_trunk": True}),
    "several": ("several", {}),
    "masked": ("masked", {}),
    "squashed": ("continuous", {"squash": True}),
    "state": ("continuous", {"log_std": "state"}),
    "squashed state": ("continuous", {"squash": True, "log_std": "state"}),
}


@pytest.mark.parametrize("name", POLICIES)
def test_each_kind_of_policy_learns(name):
    """The share of right actions rises above 0.9; the squared error falls below a quarter of its first."""
    kind, options = POLICIES[name]
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


def image_spec(shape, n_actions):
    sizes = {"observation_size": math.prod(shape), "action_size": n_actions}
    return EnvironmentSpec(observation_shape=shape, **sizes)


IMAGE_SPEC = image_spec((11, 10, 3), 4)
LAYERS = ((6, 3, 2), (5, 2, 1))


def convolutions_of(agent, params):
    """The convolutions as convolutions_of of torch with the same weights."""
    found, n_in = [], agent.cfg.image_shape[2]
    layers = zip(params.convolutions, agent.cfg.convolutions)
    for layer, (n_out, size, stride) in layers:
        conv = torch.nn.Conv2d(n_in, n_out, size, stride)
        conv.weight, conv.bias = map(torch.nn.Parameter, layer)
        found += [conv, torch.nn.ReLU()]
        n_in = n_out
    return torch.nn.Sequential(*found, torch.nn.Flatten())


@pytest.mark.parametrize("layers", [(), LAYERS])
def test_a_cnn_equals_convolutions_of_torch_and_what_follows(layers):
    agent = fp.nets.cnn(*layers)(IMAGE_SPEC)
    params = agent.init(agent.cfg, random.key(0))
    image = random.normal(random.key(1), (7, 11, 10, 3))
    features = convolutions_of(agent, params)(image.permute(0, 3, 1, 2))
    reader = agent.cfg.reader
    assert features.shape == (7, reader.cfg.n_obs)
    want = reader.apply(reader.cfg, WORLD, params.reader, features)
    got = agent.apply(agent.cfg, WORLD, params, image)
    torch.testing.assert_close(got, want)

    mask = torch.tensor([True, False, True, True]).expand(7, -1)
    seen = MaskedObservation(image, mask)
    masked = agent.apply(agent.cfg, WORLD, params, seen)
    assert (masked.logits[:, 1] == -torch.inf).all()
    torch.testing.assert_close(masked.logits[mask], want.logits[mask])


@pytest.mark.parametrize("shape", [(3, 12, 16), (1, 4, 4)])
def test_images_with_their_channels_first_are_the_same_images(shape):
    """A quarter of the other axes says so, and an option says it of any."""
    last = (*shape[1:], shape[0])
    image = random.uniform(random.key(0), (2, *shape))
    outputs = []
    for build, x, axes in (
        (fp.nets.cnn(), image, shape),
        (fp.nets.cnn(), image.permute(0, 2, 3, 1), last),
        (fp.nets.cnn(channels_first=False), image.permute(0, 2, 3, 1), last),
    ):
        agent = build(image_spec(axes, 2))
        params = agent.init(agent.cfg, random.key(1))
        outputs.append(agent.apply(agent.cfg, WORLD, params, x))
    for output in outputs[1:]:
        assert_trees_equal(output, outputs[0], rtol=0, atol=0)


def test_the_published_networks_have_their_sizes():
    """MinAtar's for Breakout: 16 channels of 3 x 3 over 4, 1024 features, 128 units; Nature's for 6 actions."""
    breakout = fp.envs.breakout().spec
    agent = fp.nets.cnn()(breakout)
    params = agent.init(agent.cfg, random.key(0))
    count = lambda x: sum(leaf.numel() for leaf in tree.leaves(x))
    assert count(params.convolutions) == 16 * 4 * 9 + 16
    assert count(params.reader.hidden) == 1024 * 128 + 128
    agent = fp.nets.nature_cnn()(image_spec((84, 84, 4), 6))
    assert agent.cfg.reader.cfg.n_obs == 3136
    params = agent.init(agent.cfg, random.key(0))
    n_unused = 512 * 5 + 5  # what fills up the critic's head
    assert count(params) - n_unused == 1_687_719


@pytest.mark.parametrize(
    ("layers", "spec", "problem"),
    [
        ((), SPECS["several"], r"env.spec: expected images .* got observations of \(1,\)"),
        (((8, 8, 4), (8, 3, 1)), IMAGE_SPEC, r"convolutions: expected kernels .* 3 x 3 where 1 x 1 are left"),
        (((0, 3, 1),), IMAGE_SPEC, r"convolutions: expected 1 or more, got \(0, 3, 1\)"),
        (((16, 3),), IMAGE_SPEC, r"convolutions: expected \(channels, kernel size, stride\), got \(16, 3\)"),
        ((16,), IMAGE_SPEC, r"convolutions: expected \(channels, kernel size, stride\), got 16"),
    ],
)  # fmt: skip
def test_images_that_do_not_fit_are_refused_in_one_line(layers, spec, problem):
    with pytest.raises(ValueError, match=f"^{problem}$"):
        fp.nets.cnn(*layers)(spec)


GSDE_CFG = networks.GSDEConfig(mlp=MLP_CFG, first_log_std=-1.0)


def output_of(cfg, n_rows, seed=0):
    params = networks.init_gsde(cfg, random.key(seed))
    obs = random.normal(random.key(seed + 1), (n_rows, cfg.mlp.n_obs))
    return networks.apply_gsde(cfg, WORLD, params, obs)


def test_the_density_of_an_example_worked_by_hand():
    """Without hidden layers features are the observation, (1, 2).

    Deviations of 1 and 1/2 give the action the variance 1 + 4/4 = 2 about a mean of 1 * 3 + 2 * 4 = 11, so that an
    action of 13 has the log-density -1 - log(4 pi) / 2.
    """
    heads = networks.Dense(
        torch.tensor([[[3.0], [4.0]], [[5.0], [6.0]]]), torch.zeros(2, 1, 1)
    )
    log_std = torch.tensor([[0.0], [math.log(0.5)]])
    mlp = networks.MLPConfig(n_obs=2, n_actions=1, hidden=())
    cfg = networks.GSDEConfig(mlp=mlp)
    params = networks.GaussianParams(networks.MLPParams((), heads), log_std)
    output = networks.apply_gsde(cfg, WORLD, params, torch.tensor([[1.0, 2.0]]))
    assert output.mean.tolist() == [[11.0]] and output.value.tolist() == [17.0]
    got = networks.GSDE.log_prob(output, torch.tensor([[13.0]]))
    want = -1 - 0.5 * math.log(4 * math.pi)
    assert float(got) == pytest.approx(want, abs=1e-5)
    entropy = 0.5 * math.log(2 * math.pi * math.e * 2)
    found = float(networks.GSDE.entropy(output))
    assert found == pytest.approx(entropy, abs=1e-5)


def test_actions_have_the_moments_of_their_density():
    """20,000 matrices: means within 5 standard errors, deviations within 3 %."""
    n = 20_000
    is_row = lambda x: x.shape[0] == 1 and x.ndim == 2
    repeated = lambda x: x.expand(n, -1) if is_row(x) else x
    output = tree.map(repeated, output_of(GSDE_CFG, 1))
    action = networks.GSDE.sample(random.key(9), output)
    std = output.log_std[0].exp()
    assert ((action.mean(0) - output.mean[0]).abs() < 5 * std / n**0.5).all()
    torch.testing.assert_close(action.std(0), std, rtol=0.03, atol=0)


@pytest.mark.parametrize(
    ("held", "want"),
    [(1, [*range(7)]), (3, [0, 0, 0, 3, 3, 3, 6])]
    + [(n, [0] * 7) for n in (7, 9, None)],
)
def test_keys_of_actions_are_held_and_others_are_not(held, want):
    plain = rollout_keys(random.key(0), 7, 5)
    keys = rollout_keys(random.key(0), 7, 5, held)
    assert torch.equal(keys[0], plain[0][want])
    assert torch.equal(keys[1], plain[1]) and torch.equal(keys[2], plain[2])


OPTIONS = {"n_envs": 4, "n_steps": 3, "n_updates": 4}
OPTIONS |= {"n_epochs": 2, "n_minibatches": 2, "learning_rate": 1e-2}
SQUASHED = fp.nets.mlp(4, squash=True, log_std="state")
GSDE_NET = fp.nets.gsde(4, noise_steps=2, orthogonal=False)
LEARNERS = {
    "discrete": (fp.envs.cartpole(max_steps=2), fp.nets.mlp(4)),
    "continuous": (fp.envs.pendulum(max_steps=2), fp.nets.mlp(4)),
    "masked": (guessing("masked"), fp.nets.mlp(4, shared_trunk=True)),
    "squashed": (guessing("continuous"), SQUASHED),
    "lstm": (fp.envs.cartpole(max_steps=2), fp.nets.lstm(4, hidden=(4,))),
    "gsde": (guessing("continuous"), GSDE_NET),
    "images and gru": (
        guessing("image"),
        fp.nets.cnn((2, 2, 1), then=fp.nets.gru(4)),
    ),
}


def learner(name):
    env, network = LEARNERS[name]
    return fp.ppo(env=env, network=network, **OPTIONS)


@pytest.mark.parametrize("name", LEARNERS)
def test_learners_under_vmap_equal_their_single_runs(name):
    """Two learners of different seeds and learning rates, float64, 1e-10 after two updates."""
    cfg = learner(name).cfg
    states = []
    for seed in range(2):
        state = double(fp.train_step.init(cfg, WORLD, random.key(seed)))
        rate = state.scalars.learning_rate * (1 + seed)
        scalars = state.scalars._replace(learning_rate=rate)
        states.append(state._replace(scalars=scalars))
    mapped = vectors = tree.map(lambda *x: torch.stack(x), *states)
    for _ in range(2):
        mapped, metrics = torch.vmap(partial(train_step, cfg, WORLD))(mapped)
        parts = vmap_parts(EAGER_PARTS)
        vectors, shown = train_step(cfg, WORLD, vectors, parts)
        pairs = [train_step(cfg, WORLD, state) for state in states]
        states = [state for state, _ in pairs]
        want = tree.map(lambda *x: torch.stack(x), *pairs)
        assert_trees_equal((mapped, metrics), want, rtol=0, atol=1e-10)
        assert_trees_equal((vectors, shown), want, rtol=0, atol=1e-10)


@pytest.mark.long
@pytest.mark.parametrize("name", ["squashed", "gsde", "images and gru"])
def test_rollout_step_and_minibatch_step_are_one_graph_that_equals_eager(name):
    cfg = learner(name).cfg
    state = fp.train_step.init(cfg, WORLD, random.key(0))
    collected = collect(cfg, WORLD, state)
    inputs = EAGER_PARTS.sample_randomness(cfg, WORLD, state.key).random_inputs
    first = tree.item(inputs, 0), tree.item(collected.minibatches, 0)
    batch = collected.batch, collected.scalars, collected.update_state
    calls = {
        "rollout_step": (collected.rollout_state, first[0]),
        "minibatch_step": (*batch, first[1]),
    }
    for part, more in calls.items():
        arguments = cfg, WORLD, state.params, *more
        eager = getattr(EAGER_PARTS, part)
        got = compiled(eager, backend="aot_eager")(*arguments)
        assert_trees_equal(got, eager(*arguments), rtol=1e-5, atol=1e-6)
