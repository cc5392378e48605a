"""Acting, exporting and imitating, beside what the environment and the network do in training."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import funcppo as fp
from funcppo.core import tree
from funcppo.envs import wrappers
from tests.forked import printed_by
from tests.learning import WORLD, assert_trees_equal, refused

SMALL = {"n_envs": 4, "n_steps": 16, "n_minibatches": 2}


def pendulum(network):
    """Moments, clipping and scaling lie between the sensor and the network."""
    env = wrappers.rescale_action(fp.envs.pendulum(), (-2.0,), (2.0,))
    env = wrappers.normalize_observation(env)
    env = wrappers.clip_observation(env, -0.5, 0.5)
    return fp.ppo(env=env, network=network, **SMALL)


def masked():
    cartpole = fp.envs.cartpole()

    def observe(cfg, world, state):
        x = cartpole.observe(cfg, world, state)
        mask = torch.stack([x[:, 0] > -9, x[:, 1] > 0], -1)
        return fp.MaskedObservation(x, mask)

    return replace(cartpole, observe=observe, step_with_autoreset=None)


LEARNERS = {
    "moments": lambda: pendulum(fp.nets.mlp(8)),
    "memory": lambda: pendulum(fp.nets.lstm(8)),
    "mask": lambda: fp.ppo(env=masked(), network=fp.nets.mlp(8), **SMALL),
}


def trained(name):
    learner = LEARNERS[name]()
    return learner, fp.train(learner, 128).state


def raw_observation(learner, state):
    """What the innermost environment observes."""
    env, env_state = learner.cfg.env, state.env_state
    while isinstance(env.cfg, wrappers.Wrapped):
        env, env_state = env.cfg.env, env_state.inner
    return env.observe(env.cfg, WORLD, env_state)


@pytest.mark.parametrize("name", LEARNERS)
def test_an_action_is_the_one_that_the_environment_inside_gets(name):
    learner, state = trained(name)
    agent, env = learner.cfg.agent, learner.cfg.env
    obs = env.observe(env.cfg, WORLD, state.env_state)
    raw = raw_observation(learner, state)
    acted = fp.act(learner, state, raw, memory=state.memory)
    if name == "memory":
        args = agent.cfg, WORLD, state.params
        read = agent.encode(*args, obs), state.memory
        output, memory = agent.apply_recurrent(*args, *read)
        acted, after = acted
        assert torch.equal(after.c, memory.c)
    else:
        output = agent.apply(agent.cfg, WORLD, state.params, obs)
    want = agent.distribution.mode(output)
    scaled = -2.0 + (want + 1.0) * 2.0  # as `rescale_action` does
    assert torch.equal(acted, want if name == "mask" else scaled)
    sampled = fp.act(
        learner, state, raw, memory=state.memory, key=fp.random.key(1)
    )
    sampled = sampled[0] if name == "memory" else sampled
    assert sampled.shape == want.shape
    assert name == "mask" or not torch.equal(sampled, acted)


@pytest.mark.parametrize(
    ("fn", "arguments", "problem"),
    [
        (fp.act, [torch.zeros(2, 4)], r"obs: expected torch.float32 \[2, 3\], got torch.float32 \[2, 4\]"),
        (fp.act, [torch.zeros(2, 3).double()], r"obs: expected torch.float32 \[2, 3\], got torch.float64 "),
        (fp.act, [np.zeros((2, 3))], "obs: expected a Tensor, got a ndarray"),
        (fp.export, ["policy", "tf"], "format: expected torch or onnx"),
        (fp.export, ["/proc/none/policy"], "path: /proc/none/policy: expected a file that can be written, got: "),
    ],
)  # fmt: skip
def test_what_no_policy_reads_or_writes_is_one_line(fn, arguments, problem):
    learner, state = trained("moments")
    refused(problem, fn, learner, state, *arguments)


RUNS = {
    "torch": """
import json, sys, torch
policy = torch.export.load({path!r}).module()
for inputs in torch.load({data!r}):
    print(json.dumps([x.tolist() for x in policy(*inputs)]))
assert "funcppo" not in sys.modules
""",
    "onnx": """
import json, sys, numpy, onnxruntime
session = onnxruntime.InferenceSession({path!r})
names = [x.name for x in session.get_inputs()]
assert names == {names!r}, names
data = numpy.load({data!r} + ".npz")
for i in range(2):
    inputs = {{name: data[f"{{i}}_{{j}}"] for j, name in enumerate(names)}}
    print(json.dumps([x.tolist() for x in session.run(None, inputs)]))
assert "funcppo" not in sys.modules
""",
}


@pytest.mark.parametrize("format", RUNS)
@pytest.mark.parametrize("name", LEARNERS)
def test_an_exported_policy_acts_alone(name, format, tmp_path):
    """A process without funcppo makes the actions of `act`, one row or many; PyTorch to the last digit."""
    if format == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    learner, state = trained(name)
    path = str(tmp_path / "policy")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        names = fp.export(learner, state, path, format=format)
    raw, data, expected = raw_observation(learner, state), [], []
    for rows in (slice(0, 1), slice(0, 4)):
        obs = tree.map(lambda x, rows=rows: x[rows], raw)
        memory = tree.map(lambda x, rows=rows: x[rows], state.memory)
        given = memory if name == "memory" else None
        acted = fp.act(learner, state, obs, memory=given)
        acted = acted if name == "memory" else (acted, ())
        inputs = tree.leaves(obs)
        if name == "memory":
            begins = torch.zeros(len(inputs[0]), dtype=torch.bool)
            inputs += [begins, *tree.leaves(memory)]
        data.append(inputs)
        expected.append([x.tolist() for x in tree.leaves(acted)])
    torch.save(data, tmp_path / "data")
    arrays = {
        f"{i}_{j}": x.numpy()
        for i, inputs in enumerate(data)
        for j, x in enumerate(inputs)
    }
    np.savez(str(tmp_path / "data.npz"), **arrays)
    program = RUNS[format].format(
        path=path, data=str(tmp_path / "data"), names=[*names]
    )
    printed = [json.loads(line) for line in printed_by(program)]
    if format == "torch" or name == "mask":
        assert printed == expected
    else:  # kernels of another library
        for a, b in zip(printed, expected):
            for x, y in zip(a, b):
                np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_imitated_actions_are_a_start():
    """The expert pushes the cart towards the side to which the pole falls."""
    learner = fp.ppo(env=fp.envs.cartpole(), network=fp.nets.mlp(16), **SMALL)
    obs = fp.random.normal(fp.random.key(0), (2048, 4))
    action = (obs[:, 2] + obs[:, 3] > 0).long()
    params = fp.imitate(learner, obs, action, learning_rate=1e-2)
    state = learner.init(fp.random.key(1))._replace(params=params)
    assert (fp.act(learner, state, obs) == action).float().mean() > 0.95
    started = fp.train(learner, 64, params=params).state
    assert int(started.opt_state.step) == 8
    assert fp.evaluate_policy(learner, started).greedy.mean > 100
    still = {"seeds": 2, "scalars": {"learning_rate": [0.0, 0.0]}}
    several = fp.train_many(learner, 64, params=params, **still).state.params
    for i in range(2):
        assert_trees_equal(tree.item(several, i), params, rtol=0, atol=0)
    for problem, obs_, action_ in (
        ("action: expected 2048", obs, action[:5]),
        ("action: expected some", obs[:0], action[:0]),
        (r"action: .*int64 \[2048\], got torch.float32", obs, action.float()),
        ("action: expected numbers from 0 to below 2, got 2", obs, action + 1),
        (r"obs: .* \[2048, 4\], got .* \[2048, 3\]", obs[:, :3], action),
        ("obs: expected a Tensor, got a ndarray", obs.numpy(), action),
    ):
        refused(problem, fp.imitate, learner, obs_, action_)


def test_a_run_starts_from_the_state_of_another():
    """Other settings, the same parameters, moments and environments; updates are counted anew."""
    learner, state = trained("moments")
    parts = {"env": learner.cfg.env, "network": fp.nets.mlp(8)}
    slow = fp.ppo(learning_rate=0.0, **parts, **SMALL)
    after = fp.train(slow, 64, state=state).state
    for a, b in zip(tree.leaves(after.params), tree.leaves(state.params)):
        assert torch.equal(a, b)
    assert int(after.update) == 1 and float(after.scalars.learning_rate) == 0
    assert int(after.opt_state.step) == int(state.opt_state.step) + 8
    moments = after.env_state.inner.moments
    assert float(moments.n[0]) > float(state.env_state.inner.moments.n[0])
    other = fp.ppo(env=learner.cfg.env, network=fp.nets.mlp(9), **SMALL)
    for start in ({"state": state}, {"params": state.params}):
        with pytest.raises(ValueError, match=r"hidden.* expected .*9.*got .*8"):
            fp.train(other, 64, **start)
    with pytest.raises(ValueError, match="state, params: expected one"):
        fp.train(learner, 64, state=state, params=state.params)
