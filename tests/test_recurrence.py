"""Networks with memory are applied step by step or by the sequence, with equal results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import funcppo as fp
from funcppo import recurrence
from funcppo.core import random, tree
from funcppo.core.tree import graph_scan
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
    assert agent.encode is not None and done.any() and not done.all()
    whole = recurrence.apply_sequence(agent, WORLD, params, obs, done, memory)
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
        memories = recurrence.step_memories(*given, memory, graph_scan)
        ones = [torch.ones_like(memories.memory)]
        return recurrence.backpropagate(*given, memories, ones, graph_scan)

    def loss(weight, *sequence):
        memories = recurrence.step_memories(agent, WORLD, weight, *sequence)
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
