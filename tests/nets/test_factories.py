"""A network that is no function of a spec is named by the argument that it was handed in as."""

from __future__ import annotations

import pytest

import funcppo as fp
from funcppo import nets
from funcppo.envs.minatar import breakout
from funcppo.nets import networks

SPEC = fp.EnvironmentSpec(observation_size=4, action_size=2)


@pytest.mark.parametrize("name", nets.__all__)
def test_a_network_of_the_package_that_is_not_called_is_named(name):
    problem = rf"^network: expected fp\.nets\.{name}\([0-9, ]*\), a call, got the function$"
    with pytest.raises(TypeError, match=problem):
        fp.ppo(env=fp.envs.cartpole(), network=getattr(nets, name))


def test_the_call_that_is_named_is_one_that_works():
    assert set(networks.ARGUMENTS) == set(nets.__all__)
    spec = breakout().spec
    for name in ("cnn", "nature_cnn"):
        assert callable(getattr(nets, name)(*networks.ARGUMENTS[name]))
    assert isinstance(fp.nets.cnn(*networks.ARGUMENTS["cnn"])(spec), fp.Agent)
    for name in ("mlp", "gru", "lstm"):
        network = getattr(nets, name)(*networks.ARGUMENTS[name])
        assert isinstance(network(SPEC), fp.Agent)


@pytest.mark.parametrize("network", [fp.nets.gru, fp.nets.lstm, fp.nets.cnn])
@pytest.mark.parametrize(
    ("then", "problem"),
    [
        (3, "expected a function of an EnvironmentSpec, got int"),
        (0, "expected a function of an EnvironmentSpec, got int"),
        (
            fp.nets.mlp,
            r"expected fp\.nets\.mlp\(64, 64\), a call, got the function",
        ),
        (
            fp.nets.mlp(8)(SPEC),
            "expected a function of an EnvironmentSpec, got Agent",
        ),
        (lambda spec: 3, "expected a function that returns an Agent, got int"),
    ],
    ids=["number", "zero", "function", "agent", "result"],
)
def test_what_follows_a_network_is_named(network, then, problem):
    spec = SPEC if network is not fp.nets.cnn else breakout().spec
    with pytest.raises(TypeError, match=f"^then: {problem}$"):
        network(then=then)(spec)


def test_a_function_of_other_arguments_is_named():
    line = "^network: expected a function of an EnvironmentSpec, got the function .*: "
    for function in (lambda: None, lambda spec, size: None):
        with pytest.raises(TypeError, match=line):
            fp.ppo(env=fp.envs.cartpole(), network=function)


def test_a_function_of_ones_own_builds_its_agent():
    agent = fp.nets.mlp(8)(SPEC)
    assert networks.build_agent("network", lambda spec: agent, SPEC) is agent
