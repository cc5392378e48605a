"""Environments: `cartpole` and `pendulum` here, the contract of one of your own in `funcppo.interfaces`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from funcppo.envs.classic_control.cartpole import cartpole
    from funcppo.envs.classic_control.pendulum import pendulum

__all__ = ["cartpole", "pendulum"]


def __getattr__(name: str) -> object:
    """Import an environment when it is first used, so that `import funcppo` stays light."""
    if name == "cartpole":
        from funcppo.envs.classic_control.cartpole import cartpole

        return cartpole
    if name == "pendulum":
        from funcppo.envs.classic_control.pendulum import pendulum

        return pendulum
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
