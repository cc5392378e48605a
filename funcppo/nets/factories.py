"""Agents of the functions that build them for the sizes of an environment."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import cast

from funcppo.interfaces import Agent, AnyAgent, EnvironmentSpec

# of a call of each network of the package, as an error shows it
ARGUMENTS: dict[str, tuple[int, ...]] = {
    "cnn": (),
    "gru": (64,),
    "gsde": (64, 64),
    "lstm": (64,),
    "mlp": (64, 64),
    "nature_cnn": (),
}


def build_agent(name: str, network: object, spec: EnvironmentSpec) -> AnyAgent:
    """The agent that a function builds for the sizes of an environment.

    Args:
      name: of the argument that the function was handed in as, for an error.

    Raises:
      TypeError: it is no such function.
      ValueError: of the function, which cannot build a network with its options for these sizes.
    """
    if not callable(network):
        raise TypeError(
            f"{name}: expected a function of an EnvironmentSpec, got {describe(network)}"
        )
    function = str(getattr(network, "__qualname__", ""))
    module = str(getattr(network, "__module__", ""))
    if function in ARGUMENTS and module.startswith("funcppo.nets."):
        call = f"{function}({', '.join(map(str, ARGUMENTS[function]))})"
        raise TypeError(
            f"{name}: expected fp.nets.{call}, a call, got the function"
        )

    try:
        inspect.signature(network).bind(spec)
    except ValueError:  # some have no signature
        pass
    except TypeError as error:
        raise TypeError(
            f"{name}: expected a function of an EnvironmentSpec, got {describe(network)}: {error}"
        ) from None

    agent = cast(Callable[[EnvironmentSpec], object], network)(spec)
    if not isinstance(agent, Agent):
        raise TypeError(
            f"{name}: expected a function that returns an Agent, got {describe(agent)}"
        )
    return cast(AnyAgent, agent)


def describe(value: object) -> str:
    """What a value is, for an error: the name of a function or class, else the type."""
    name = getattr(value, "__qualname__", None)
    kind = type(value).__name__
    return f"the {kind} {name}" if isinstance(name, str) else kind
