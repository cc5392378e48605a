"""What trials of strategies found, on disk: a later process with the same code, settings and machine makes none.

Trials compare compiled parts with eager ones, which imports PyTorch's compiler, for gradients too. The same code on the
same kind of processor gives the same, so they are made once. An outcome is kept only if nothing failed: what failed is
tried again.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from funcppo.core.files import write_atomically
from funcppo.runtime.compile_cache import NoKeyError, cache_path

if TYPE_CHECKING:  # an import of row programs that few need
    from funcppo.runtime.env_kernel.rollout_kernel import RolloutCode

SUFFIX = ".strategy"


class Built(NamedTuple):
    """How a part is compiled."""

    by_kernels: bool  # of a network that kernels compute
    use_custom_passes: bool


class Outcome(NamedTuple):
    """What the trials found."""

    record: object  # `compile.StrategyRecord`
    # by the name of the rollout part, and of the strategy
    built: dict[str, Built]
    rollout: RolloutCode | None  # where it is one kernel


def outcome_path(
    collect: Callable[..., object],
    args: tuple[object, ...],
    settings: tuple[object, ...],
) -> Path | None:
    """The file of trials; None if what they depend on cannot be told to a later process.

    Args:
      collect: `train_step.collect`.
      args: parts, configuration, world and state.
      settings: of the trials.
    """
    try:
        return cache_path(collect, args, settings).with_suffix(SUFFIX)
    except NoKeyError:
        return None


def load(path: Path | None) -> Outcome | None:
    """The outcome in a file; None if there is none, or if it cannot be read."""
    if path is None:
        return None
    try:
        return pickle.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except Exception as error:
        warnings.warn(
            f"{path}: tried again, because it cannot be read: {error}",
            stacklevel=2,
        )
        return None


def save(path: Path, outcome: Outcome) -> None:
    """Write an outcome; a warning says why it cannot be written."""
    data = pickle.dumps(outcome)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(data), durable=False)
    except OSError as error:
        warnings.warn(
            f"{path}: not kept for the next process: {error}", stacklevel=2
        )
