"""Environments by name: `make`. Those of Gymnasium and MinAtar have the names that they have there."""

from __future__ import annotations

import difflib
import importlib
import inspect
from typing import Any, cast

from funcppo.interfaces import AnyEnvironment

# The module and the function that build each environment.
ENVIRONMENTS = {
    "CartPole-v1": ("classic_control.cartpole", "cartpole"),
    "Pendulum-v1": ("classic_control.pendulum", "pendulum"),
    "Acrobot-v1": ("classic_control.acrobot", "acrobot"),
    "MountainCar-v0": ("classic_control.mountain_car", "mountain_car"),
    "MountainCarContinuous-v0": (
        "classic_control.mountain_car",
        "mountain_car_continuous",
    ),
    # Of this package alone.
    "funcppo/Reacher-v0": ("two_link_arm", "reacher"),
    # Version 0 has all six actions, version 1 those that do something.
    "MinAtar/Asterix-v1": ("minatar.asterix", "asterix"),
    "MinAtar/Breakout-v1": ("minatar.breakout", "breakout"),
    "MinAtar/Freeway-v1": ("minatar.freeway", "freeway"),
    "MinAtar/Seaquest-v1": ("minatar.seaquest", "seaquest"),
    "MinAtar/SpaceInvaders-v1": ("minatar.space_invaders", "space_invaders"),
    "MinAtar/Asterix-v0": ("minatar.asterix", "asterix"),
    "MinAtar/Breakout-v0": ("minatar.breakout", "breakout"),
    "MinAtar/Freeway-v0": ("minatar.freeway", "freeway"),
    "MinAtar/Seaquest-v0": ("minatar.seaquest", "seaquest"),
    "MinAtar/SpaceInvaders-v0": ("minatar.space_invaders", "space_invaders"),
}


def make(name: str, **options: Any) -> AnyEnvironment:
    """The environment of a name, such as `CartPole-v1` or `MinAtar/Breakout-v1`.

    Args:
      name: Gymnasium's id of the environment, MinAtar's, or one of `ENVIRONMENTS`.
      options: keyword arguments of the function that builds it, e.g. `max_steps=200`.

    Raises:
      ValueError: there is no environment of that name, or an option is out of range.
      TypeError: the name is no string, or the environment has no such option.
    """
    if not isinstance(cast(object, name), str):
        raise TypeError(
            f"name: expected a string such as CartPole-v1, got {type(name).__name__}"
        )
    if name not in ENVIRONMENTS:
        raise ValueError(
            f"{name}: expected an environment, got none of that name; {_nearest(name)}"
        )
    module, function = ENVIRONMENTS[name]
    build = getattr(importlib.import_module(f"funcppo.envs.{module}"), function)
    known = inspect.signature(build).parameters
    for option in options:
        if option not in known:
            raise TypeError(
                f"{option}: expected one of the options {', '.join(known)} of {name}"
            )
    if name.startswith("MinAtar/"):
        options = {"minimal_actions": name.endswith("-v1")} | options
    return build(**options)


def _nearest(name: str) -> str:
    """The names that are spelt like an unknown one, or all."""
    by_lower_case = {known.lower(): known for known in ENVIRONMENTS}
    found = difflib.get_close_matches(name.lower(), by_lower_case, 1, 0.6)
    if found:
        return f"the nearest is {by_lower_case[found[0]]}"
    return (
        f"there are {', '.join(ENVIRONMENTS)}; "
        f"fp.envs.gymnasium makes those of Gymnasium"
    )
