"""Networks; the pieces of a network of your own are in `funcppo.nets.base`.

Names:
    mlp           dense layers, for vectors
    cnn           convolutions, then dense layers: for images
    nature_cnn    the same in the sizes for frames of Atari
    gru, lstm     dense layers and a memory of the episode
    gsde          dense layers, continuous actions: noise that depends on the state and goes on for several steps
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from funcppo.nets.convolutional import cnn, nature_cnn
    from funcppo.nets.exploration import gsde
    from funcppo.nets.feedforward import mlp
    from funcppo.nets.recurrent import gru, lstm

__all__ = ["cnn", "gru", "gsde", "lstm", "mlp", "nature_cnn"]

# Where each name is defined.
_SOURCES = {
    "cnn": "convolutional",
    "gru": "recurrent",
    "gsde": "exploration",
    "lstm": "recurrent",
    "mlp": "feedforward",
    "nature_cnn": "convolutional",
}


def __getattr__(name: str) -> object:
    """Import a network when it is first used, so that `import funcppo` stays light."""
    if name in _SOURCES:
        module = importlib.import_module(f"funcppo.nets.{_SOURCES[name]}")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
