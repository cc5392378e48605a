"""Networks: `mlp` here, the pieces of a network of your own in `funcppo.nets.base`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from funcppo.nets.feedforward import mlp

__all__ = ["mlp"]


def __getattr__(name: str) -> object:
    """Import a network when it is first used, so that `import funcppo` stays light."""
    if name == "mlp":
        from funcppo.nets.feedforward import mlp

        return mlp
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
