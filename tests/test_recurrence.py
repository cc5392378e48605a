"""Networks with memory are applied step by step or by the sequence, with equal results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import funcppo as fp
from funcppo import random, recurrence, tree
from funcppo.interfaces import Agent, EnvironmentSpec, MaskedObservation
from tests.learning import WORLD, assert_trees_equal

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
    memory = recurrence.initial_memory(agent, B, torch.device("cpu"))
    memory = tree.map(lambda x: x + 0.5, memory)
    return agent, agent.init(agent.cfg, keys[3]), obs, done, memory


@pytest.mark.parametrize("name", AGENTS)
def test_a_sequence_equals_its_steps_one_row_at_a_time(name):
    """With memories that start again after an end; float32."""
    agent, params, obs, done, memory = sequence(name)
    assert agent.apply_sequence is not None and done.any() and not done.all()
    whole = recurrence.apply_sequence(agent, WORLD, params, obs, done, memory)
    by_step = recurrence.apply_sequence(
        replace(agent, apply_sequence=None), WORLD, params, obs, done, memory
    )
    rows = []
    for b in range(B):
        own = tree.map(lambda x, b=b: x[b : b + 1], memory)
        for t in range(T):
            now = tree.map(lambda x, b=b, t=t: x[t, b : b + 1], obs)
            output, own = recurrence.apply_agent(agent, WORLD, params, now, own)
            own = recurrence.reset_memory(agent, done[t, b : b + 1], own)
            rows.append(output)
    want = tree.map(
        lambda *x: (
            torch.cat(x).unflatten(0, (B, T)).transpose(0, 1).flatten(0, 1)
        ),
        *rows,
    )
    assert_trees_equal(whole, want, rtol=1e-5, atol=1e-6)
    assert_trees_equal(by_step, want, rtol=1e-5, atol=1e-6)


def test_a_network_without_memory_is_applied_alike():
    agent = fp.nets.mlp(4)(replace(SPEC, observation_shape=None))
    params = agent.init(agent.cfg, random.key(0))
    obs = random.normal(random.key(1), (B, 75))
    memory = recurrence.initial_memory(agent, B, torch.device("cpu"))
    done = torch.ones(B, dtype=torch.bool)
    assert memory == recurrence.reset_memory(agent, done, memory) == ()
    output, memory = recurrence.apply_agent(agent, WORLD, params, obs, memory)
    assert memory == ()
    want = agent.apply(agent.cfg, WORLD, params, obs)
    assert_trees_equal(output, want, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ((), "initial_memory: expected a function, got None"),
        (("initial_memory",), "apply_recurrent: expected a function, got None"),
        (("apply", "initial_memory"), "initial_memory: expected none beside"),
    ],
)
def test_an_agent_has_either_apply_or_what_a_memory_needs(fields, missing):
    with pytest.raises(TypeError, match=f"^{missing}"):
        Agent(cfg=None, init=print, **dict.fromkeys(fields, print))


def test_the_step_without_memory_of_a_network_with_one_is_refused():
    agent, params, obs, _, _ = sequence("gru")
    with pytest.raises(TypeError, match="expected a network without memory"):
        agent.apply(agent.cfg, WORLD, params, obs)
