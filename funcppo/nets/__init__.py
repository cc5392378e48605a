"""Networks; the pieces of a network of your own are in `funcppo.nets.networks`.

Names:
    mlp           dense layers, for vectors
    cnn           convolutions, then dense layers: for images
    nature_cnn    the same in the sizes for frames of Atari
    gru, lstm     dense layers and a memory of the episode
    gsde          dense layers, continuous actions: noise that depends on the state and goes on for several steps
    with_extra    a network with parameters beside its own, for a loss of the user's
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from funcppo.nets.networks import (
        cnn,
        gru,
        gsde,
        lstm,
        mlp,
        nature_cnn,
        with_extra,
    )

__all__ = ["cnn", "gru", "gsde", "lstm", "mlp", "nature_cnn", "with_extra"]


def __getattr__(name: str) -> object:
    """Import a network when it is first used, so that `import funcppo` stays light; return it."""
    if name in __all__:
        module = importlib.import_module("funcppo.nets.networks")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
