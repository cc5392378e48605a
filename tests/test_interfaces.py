"""What users build: environments and agents by name, refused when a piece is missing."""

from __future__ import annotations

import dataclasses

import pytest

import funcppo as fp
from funcppo.distributions import CATEGORICAL, DIAGONAL_GAUSSIAN
from funcppo.interfaces import Agent, Environment, EnvironmentSpec
from tests.learning import cartpole_config, pendulum_config


def nothing(*args):
    raise AssertionError("never called")


def test_what_may_be_left_out_of_an_environment():
    env = Environment(
        cfg=None,
        reset=nothing,
        step_functional=nothing,
        observe=nothing,
    )
    assert env.truncates
    assert (
        env.sample_reset,
        env.reset_from_sample,
        env.step_with_autoreset,
        env.spec,
    ) == (None,) * 4
    with pytest.raises(TypeError, match="observe"):
        Environment(cfg=None, reset=nothing, step_functional=nothing)


def test_an_agent_is_categorical_unless_it_says_otherwise():
    agent = Agent(cfg=None, init=nothing, apply=nothing)
    assert agent.distribution is CATEGORICAL and agent.within_capacity is None
    assert pendulum_config().agent.distribution is DIAGONAL_GAUSSIAN


@pytest.mark.parametrize(
    "record",
    [
        cartpole_config().env,
        cartpole_config().agent,
        EnvironmentSpec(observation_size=1, action_size=2),
    ],
)
def test_a_record_is_a_static_key(record):
    """Hashable, equal by value, and frozen: compiled graphs are looked up by it."""
    same = dataclasses.replace(record)
    assert same == record and hash(same) == hash(record) and same is not record
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, dataclasses.fields(record)[0].name, None)


@pytest.mark.parametrize(
    ("sizes", "got"),
    [
        ({"observation_size": 2.0}, "observation_size: expected an integer"),
        ({"observation_size": -2}, "observation_size: expected 0 or more"),
        ({"action_size": 0}, "action_size: expected 1 or more, got 0"),
        ({"observation_shape": (3, 0)}, "observation_shape: expected 1 or"),
        ({"action_sizes": (2, True)}, "action_sizes: expected an integer"),
        ({"continuous_actions": 1}, "continuous_actions: expected true or"),
    ],
)
def test_spaces_that_cannot_be_meant_are_refused_by_name(sizes, got):
    with pytest.raises(ValueError, match=got):
        EnvironmentSpec(**{"observation_size": 1, "action_size": 2} | sizes)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "4"])
def test_an_agent_holds_its_key_for_whole_steps(steps):
    with pytest.raises(ValueError, match="action_key_steps: expected a num"):
        Agent(cfg=None, init=nothing, apply=nothing, action_key_steps=steps)


def test_the_world_of_an_environment_that_needs_none_holds_no_tensor():
    assert fp.tree.leaves(fp.NoWorld()) == []
