"""Rollouts, and networks with memory applied step by step and to sequences."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import funcppo as fp
from funcppo import rollout
from funcppo.core import random, tree
from funcppo.core.tree import graph_scan, scan
from funcppo.envs.classic import cartpole, pendulum
from funcppo.interfaces import Agent, EnvironmentSpec, MaskedObservation
from funcppo.nets import networks
from funcppo.rollout import rollout_keys, rollout_step, sample_random_inputs
from funcppo.train_step import init
from tests.learning import (
    WORLD,
    assert_trees_equal,
    cartpole_config,
    pendulum_config,
)

CONFIGS = {
    "cartpole": cartpole_config(max_steps=9),
    "pendulum": pendulum_config(max_steps=9),
}


def trajectory(cfg, n_envs=6, n_steps=30, seed=0):
    key, params_key, reset_key = random.split(random.key(seed), 3)
    params = cfg.agent.init(cfg.agent.cfg, params_key)
    first = rollout.init_rollout_state(cfg, WORLD, reset_key, n_envs)
    keys = rollout_keys(key, n_steps, n_envs)
    random_inputs = sample_random_inputs(cfg.env, WORLD, *keys)
    step = partial(rollout_step, cfg, WORLD, params)
    return params, first, keys, *scan(step, first, random_inputs)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_trajectory_equals_a_loop_over_single_rows(name):
    """The same keys, one environment at a time, restarted by an if."""
    cfg = CONFIGS[name]
    env, agent = cfg.env, cfg.agent
    params, actor, (_, step_keys, reset_keys), _, traj = trajectory(cfg)
    final_value = rollout.estimate_final_value(cfg, WORLD, params, traj)
    close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)
    for b in range(6):
        state = tree.map(lambda x, b=b: x[b : b + 1], actor.env_state)
        total = 0.0
        for t in range(30):
            step_key, reset_key = step_keys[t, b], reset_keys[t, b]
            obs = env.observe(env.cfg, WORLD, state)
            close(traj.obs[t, b], obs[0])
            out = agent.apply(agent.cfg, WORLD, params, obs)
            action = traj.action[t, b : b + 1]
            log_prob = agent.distribution.log_prob(out, action)
            close(traj.log_prob[t, b], log_prob[0])
            close(traj.value[t, b], out.value[0])
            state, step = env.step_functional(
                env.cfg, WORLD, state, action, step_key[None]
            )
            total += float(step.reward)
            close(traj.reward[t, b], step.reward[0])
            got_total = float(traj.episode_stats.total_reward[t, b])
            assert got_total == pytest.approx(total, rel=1e-5, abs=1e-5)
            last = env.observe(env.cfg, WORLD, state)
            value = agent.apply(agent.cfg, WORLD, params, last).value[0]
            close(final_value[t, b], value if step.truncated else 0.0 * value)
            if step.terminated or step.truncated:
                state, total = env.reset(env.cfg, WORLD, reset_key[None]), 0.0


def test_the_network_is_called_once_a_step_and_last_observations_kept_only_where_they_count():
    for truncates, bootstrap, kept in (
        (True, True, True),
        (True, False, False),
        (False, True, False),
    ):
        cfg, seen = cartpole_config(bootstrap_truncated=bootstrap), []
        apply = cfg.agent.apply
        counted = lambda *args, seen=seen, apply=apply: (
            seen.append(1) or apply(*args)
        )
        agent = replace(cfg.agent, apply=counted)
        env = replace(cfg.env, truncates=truncates)
        traj = trajectory(replace(cfg, agent=agent, env=env), n_steps=3)[-1]
        assert len(seen) == 3
        assert isinstance(traj.final_obs, torch.Tensor) == kept


def changed(field, change):
    """CartPole with a field of its timestep, its next state or its network's output changed."""
    cfg = cartpole_config()
    env, agent = cfg.env, cfg.agent

    def with_change(record):
        if field not in record._fields:
            return record
        return record._replace(**{field: change(getattr(record, field))})

    def step(*args):
        state, timestep = env.step_functional(*args)
        return with_change(state), with_change(timestep)

    def apply(*args):
        return with_change(agent.apply(*args))

    env_of = replace(env, step_functional=step)
    return replace(cfg, env=env_of, agent=replace(agent, apply=apply))


@pytest.mark.parametrize(
    ("field", "change", "text"),
    [
        ("reward", torch.Tensor.double, "torch.float32 .*, got torch.float64"),
        ("truncated", lambda x: x[:1], r"torch.bool \[4\], got .*bool \[1\]"),
        ("value", lambda x: x[:, None], r".*float32 \[4\], got .* \[4, 1\]"),
        ("steps", torch.Tensor.float, "torch.int64 .*, got torch.float32"),
    ],
)
def test_what_promotion_or_broadcasting_hides_is_refused(field, change, text):
    problem = rf"^(step_functional: \w+\.)?{field}.*: expected {text}"
    with pytest.raises(TypeError, match=problem):
        init(changed(field, change), WORLD, random.key(0))


@pytest.mark.parametrize(
    ("env", "network", "problem"),
    [
        (cartpole, {"n_obs": 4, "n_actions": 3}, "logits .*: expected rows of"),
        (cartpole, {"n_obs": 5, "n_actions": 2}, "network: expected one that"),
        (pendulum, {"n_obs": 3, "n_actions": 2}, "action .*: expected rows of"),
    ],
)
def test_a_network_of_other_spaces_is_refused(env, network, problem):
    make = networks.mlp_agent if env is cartpole else networks.gaussian_agent
    cfg = replace(
        CONFIGS[env.__name__.rpartition(".")[2]],
        agent=make(networks.MLPConfig(**network)),
    )
    with pytest.raises(ValueError, match=f"^{problem}") as error:
        init(cfg, WORLD, random.key(0))
    assert "\n" not in str(error.value)


T, B = 6, 3
SPEC = EnvironmentSpec(
    observation_size=75, observation_shape=(5, 5, 3), action_size=2
)
AGENTS = {
    "gru": fp.nets.gru(4, hidden=(5,)),
    "lstm": fp.nets.lstm(4, hidden=()),
    "images and gru": fp.nets.cnn((2, 3, 1), then=fp.nets.gru(4)),
}


def sequence(name):
    """An agent, its parameters, and T steps of B rows with masks; episodes end at some of them."""
    is_image = name.startswith("images")
    spec = SPEC if is_image else replace(SPEC, observation_shape=None)
    agent = AGENTS[name](spec)
    keys = random.split(random.key(0), 4)
    obs = MaskedObservation(
        random.normal(keys[0], (T, B, *spec.shape)),
        random.uniform(keys[1], (T, B, 2)) < 0.8,
    )
    obs = obs._replace(action_mask=obs.action_mask | (torch.arange(2) == 0))
    done = random.uniform(keys[2], (T, B)) < 0.3
    memory = rollout.initial_memory(agent, B, torch.device("cpu"))
    memory = tree.map(lambda x: x + 0.5, memory)
    return agent, agent.init(agent.cfg, keys[3]), obs, done, memory


@pytest.mark.parametrize("name", AGENTS)
def test_a_sequence_equals_its_steps_one_row_at_a_time(name):
    """With memories that start again after an end; float32."""
    agent, params, obs, done, memory = sequence(name)
    assert agent.encode is not None and done.any() and not done.all()
    whole = rollout.apply_sequence(agent, WORLD, params, obs, done, memory)
    rows = []
    for b in range(B):
        own = tree.map(lambda x, b=b: x[b : b + 1], memory)
        for t in range(T):
            now = tree.map(lambda x, b=b, t=t: x[t, b : b + 1], obs)
            output, own = rollout.apply_agent(agent, WORLD, params, now, own)
            own = rollout.reset_memory(agent, done[t, b : b + 1], own)
            rows.append(output)
    by_row = lambda *x: torch.cat(x).unflatten(0, (B, T))
    want = tree.map(lambda *x: by_row(*x).transpose(0, 1).flatten(0, 1), *rows)
    assert_trees_equal(whole, want, rtol=1e-5, atol=1e-6)


def counting(n_nodes):
    """A backend that appends the size of a graph, loop bodies included, and runs it as it is."""

    def backend(graph, _):
        modules = [m for m in graph.modules() if hasattr(m, "graph")]
        n_nodes.append(sum(len(m.graph.nodes) for m in modules))
        return graph.forward

    return backend


def test_a_graph_of_many_steps_is_as_small_as_one_of_few():
    """The gradient of all memories' sum, beside that by automatic differentiation of the unrolled loop; 1e-5."""

    def apply(cfg, world, weight, obs, memory):
        memory = torch.tanh(memory @ weight + obs)
        return memory, memory

    agent = Agent(
        cfg=None,
        init=print,
        initial_memory=lambda _, n, device: torch.zeros(n, 2, device=device),
        apply_recurrent=apply,
    )

    def gradient(weight, obs, done, memory):
        given = (agent, WORLD, weight, obs, done)
        memories = rollout.step_memories(*given, memory, graph_scan)
        ones = [torch.ones_like(memories.memory)]
        (of_next,) = rollout.adjoints(*given, memories, ones, graph_scan)

        def through_time(weight):
            given = (agent, WORLD, weight, obs, done)
            return (rollout.next_memories(*given, memories)[0] * of_next).sum()

        return torch.func.grad(through_time)(weight)

    def loss(weight, *sequence):
        given = (agent, WORLD, weight, *sequence)
        memories = rollout.step_memories(*given, scan)
        return memories.memory.sum()

    n_nodes = []
    compiled = torch.compile(
        gradient, fullgraph=True, dynamic=False, backend=counting(n_nodes)
    )
    for n_steps in (3, 6):
        obs = random.normal(random.key(n_steps), (n_steps, B, 2))
        done = torch.arange(n_steps)[:, None] == torch.arange(B)
        arguments = (torch.full((2, 2), 0.5), obs, done, obs[0])
        got = compiled(*arguments)
        want = torch.func.grad(loss)(*arguments)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert len(n_nodes) == 2 and n_nodes[0] == n_nodes[1]


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ((), "initial_memory: expected a function: an"),
        (("initial_memory",), "apply_recurrent: expected a function: an"),
        (("apply", "initial_memory"), "initial_memory: expected none beside"),
    ],
)
def test_an_agent_has_either_apply_or_what_a_memory_needs(fields, missing):
    with pytest.raises(TypeError, match=f"^{missing}"):
        Agent(cfg=None, init=print, **dict.fromkeys(fields, print))
