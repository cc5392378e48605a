"""Environments; the contract of one of your own is in `funcppo.interfaces`.

Names:
    make(name)    an environment by Gymnasium's id, e.g. "CartPole-v1"
    cartpole, pendulum, acrobot, mountain_car, mountain_car_continuous, reacher
    gymnasium("LunarLander-v3")    an environment of Gymnasium itself, which steps on the host
    asterix, breakout, freeway, seaquest, space_invaders (MinAtar)
    recall        repeat a cue after some steps: needs a memory
    wrappers      time limit, normalisation, frame stack, sticky actions, statistics
    check(env)    raises an error that names what is wrong with an environment
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from funcppo.envs import wrappers
    from funcppo.envs.checks import check
    from funcppo.envs.classic_control.acrobot import acrobot
    from funcppo.envs.classic_control.cartpole import cartpole
    from funcppo.envs.classic_control.mountain_car import (
        mountain_car,
        mountain_car_continuous,
    )
    from funcppo.envs.classic_control.pendulum import pendulum
    from funcppo.envs.gymnasium_bridge import gymnasium
    from funcppo.envs.minatar.asterix import asterix
    from funcppo.envs.minatar.breakout import breakout
    from funcppo.envs.minatar.freeway import freeway
    from funcppo.envs.minatar.seaquest import seaquest
    from funcppo.envs.minatar.space_invaders import space_invaders
    from funcppo.envs.recall_task import recall
    from funcppo.envs.registry import make
    from funcppo.envs.two_link_arm import reacher

__all__ = [
    "acrobot",
    "asterix",
    "breakout",
    "cartpole",
    "check",
    "freeway",
    "gymnasium",
    "make",
    "mountain_car",
    "mountain_car_continuous",
    "pendulum",
    "reacher",
    "recall",
    "seaquest",
    "space_invaders",
    "wrappers",
]

# Where each name is defined.
_SOURCES = {
    "acrobot": "classic_control.acrobot",
    "asterix": "minatar.asterix",
    "breakout": "minatar.breakout",
    "freeway": "minatar.freeway",
    "reacher": "two_link_arm",
    "seaquest": "minatar.seaquest",
    "space_invaders": "minatar.space_invaders",
    "cartpole": "classic_control.cartpole",
    "check": "checks",
    "gymnasium": "gymnasium_bridge",
    "make": "registry",
    "mountain_car": "classic_control.mountain_car",
    "mountain_car_continuous": "classic_control.mountain_car",
    "pendulum": "classic_control.pendulum",
    "recall": "recall_task",
}


def __getattr__(name: str) -> object:
    """Import an environment when it is first used, so that `import funcppo` stays light."""
    if name == "wrappers":
        return importlib.import_module("funcppo.envs.wrappers")
    if name in _SOURCES:
        module = importlib.import_module(f"funcppo.envs.{_SOURCES[name]}")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
