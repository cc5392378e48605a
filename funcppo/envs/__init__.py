"""Environments; the contract of one of your own is in `funcppo.interfaces`.

Names:
    make(name)    an environment by Gymnasium's id, e.g. "CartPole-v1"
    cartpole, pendulum, acrobot, mountain_car, mountain_car_continuous
    gymnasium("LunarLander-v3")    an environment of Gymnasium itself, which steps on the host
    jax(env, params)               one of gymnax or Brax, which XLA steps
    asterix, breakout, freeway, space_invaders (MinAtar)
    recall        repeat a cue after some steps: needs a memory
    wrappers      time limit, normalisation, frame stack, sticky actions, statistics
    check(env)    raises an error that names what is wrong with an environment
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from typing import TYPE_CHECKING, Any

from funcppo.core.settings import check_kind

if TYPE_CHECKING:
    from funcppo.envs import wrappers
    from funcppo.envs.checks import check
    from funcppo.envs.classic import (
        acrobot,
        cartpole,
        mountain_car,
        mountain_car_continuous,
        pendulum,
        recall,
    )
    from funcppo.envs.gymnasium_bridge import gymnasium
    from funcppo.envs.jax_bridge import jax
    from funcppo.envs.minatar import (
        asterix,
        breakout,
        freeway,
        space_invaders,
    )
    from funcppo.interfaces import AnyEnvironment

__all__ = [
    "acrobot",
    "asterix",
    "breakout",
    "cartpole",
    "check",
    "freeway",
    "gymnasium",
    "jax",
    "make",
    "mountain_car",
    "mountain_car_continuous",
    "pendulum",
    "recall",
    "space_invaders",
    "wrappers",
]

# Where each name is defined.
_SOURCES = {
    "acrobot": "classic",
    "asterix": "minatar",
    "breakout": "minatar",
    "freeway": "minatar",
    "space_invaders": "minatar",
    "cartpole": "classic",
    "check": "checks",
    "gymnasium": "gymnasium_bridge",
    "jax": "jax_bridge",
    "mountain_car": "classic",
    "mountain_car_continuous": "classic",
    "pendulum": "classic",
    "recall": "classic",
}


def __getattr__(name: str) -> Any:
    """Import an environment when it is first used, so that `import funcppo` stays light; return it."""
    if name == "wrappers":
        return importlib.import_module("funcppo.envs.wrappers")
    if name in _SOURCES:
        module = importlib.import_module(f"funcppo.envs.{_SOURCES[name]}")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


GYMNASIUM = "gymnasium:"  # before an id of Gymnasium
# The function of `funcppo.envs` that builds each environment.
ENVIRONMENTS = {
    "CartPole-v1": "cartpole",
    "Pendulum-v1": "pendulum",
    "Acrobot-v1": "acrobot",
    "MountainCar-v0": "mountain_car",
    "MountainCarContinuous-v0": "mountain_car_continuous",
    # Version 0 has all six actions, version 1 those that do something.
    "MinAtar/Asterix-v1": "asterix",
    "MinAtar/Breakout-v1": "breakout",
    "MinAtar/Freeway-v1": "freeway",
    "MinAtar/SpaceInvaders-v1": "space_invaders",
    "MinAtar/Asterix-v0": "asterix",
    "MinAtar/Breakout-v0": "breakout",
    "MinAtar/Freeway-v0": "freeway",
    "MinAtar/SpaceInvaders-v0": "space_invaders",
}


def make(name: str, **options: Any) -> AnyEnvironment:
    """Build the environment with a name such as `CartPole-v1`, `MinAtar/Breakout-v1` or `gymnasium:LunarLander-v3`.

    Args:
      name: one of `ENVIRONMENTS`; or gymnasium: and an id, for `gymnasium`.
      options: keyword arguments of the function that builds it, e.g. `max_steps=200`.

    Raises:
      ValueError: there is no environment of that name, or an option is out of range.
      TypeError: the name is no string, or the environment has no such option.
    """
    check_kind(name, str, "name: expected a string such as CartPole-v1")
    if name.startswith(GYMNASIUM):
        build = __getattr__("gymnasium")
        return build(name.removeprefix(GYMNASIUM), **options)
    if name not in ENVIRONMENTS:
        raise ValueError(
            f"{name}: expected an environment, got none of that name; {_nearest(name)}"
        )
    build = __getattr__(ENVIRONMENTS[name])
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
    """Format a hint on the environment whose name is most similar to an unknown name, or on all names."""
    by_lower_case = {known.lower(): known for known in ENVIRONMENTS}
    found = difflib.get_close_matches(name.lower(), by_lower_case, 1, 0.6)
    if found:
        return f"the nearest is {by_lower_case[found[0]]}"
    return (
        f"there are {', '.join(ENVIRONMENTS)}; "
        f"{GYMNASIUM}ID is one of Gymnasium"
    )
