"""Settings of a run of `funcppo rl`, and its config.json. This module imports no PyTorch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from funcppo.config import PPOConfig
from funcppo.core import files
from funcppo.core.settings import (
    CONFIG_FILE,
    DeviceName,
    LogStd,
    PositiveInt,
    Seed,
    Size,
    check_fields,
    from_json,
)
from funcppo.rl.settings import RLSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class RLConfig:
    """Settings of one run; the contents of config.json."""

    env: str
    """Name of the environment, one of `fp.envs.make`."""

    seeds: Size = 1
    """Number of seeds, which train at once."""

    seed: Seed = 0
    """The first of the seeds; the others follow it."""

    steps: PositiveInt
    """Environment steps of each seed, rounded up to whole rollouts."""

    device: DeviceName = "cpu"
    """Device to train on: cpu, cuda, or cuda:N for GPU number N."""

    threads: PositiveInt = 1
    """Number of CPU threads of an operation."""

    strategy: Literal["auto", "one-graph", "two-graphs", "forward", "eager"] = (
        "auto"
    )
    """How the training step is executed: auto, one-graph, two-graphs, forward or eager."""

    hidden: tuple[Size, ...]
    """Units of each hidden layer of actor and critic."""

    activation: Literal["tanh", "relu"] = "tanh"
    """Activation of the hidden layers."""

    exploration: Literal["independent", "gsde"] = "independent"
    """Noise of continuous actions: independent from step to step, or gSDE, a random function of the state."""

    noise_steps: Size | None = None
    """Steps for which the random function of gSDE stays the same; None: a whole rollout."""

    first_log_std: LogStd = 0.0
    """Log deviation of each number of the noise matrix of gSDE before the first update."""

    orthogonal: bool = True
    """Orthogonal weights and zero biases at first; off, with gSDE: both uniform, as those of PyTorch's layers."""

    normalize_observation: bool
    """Shift and scale observations by their running moments."""

    normalize_reward: bool
    """Divide rewards by the running deviation of the discounted return."""

    clip_action: bool
    """Clip continuous actions to [-1, 1] before the environment sees them."""

    evaluate_every: PositiveInt | None = None
    """Updates between two evaluations; None: a twentieth of the run."""

    episodes: Size = 32
    """Episodes of each seed, greedy and sampled, in an evaluation."""

    source: str
    """Where the settings are from that no option names."""

    ppo: PPOConfig
    """Settings of proximal policy optimisation (PPO)."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


def settings_of(config: RLConfig) -> RLSettings:
    """What the run does, whatever its seeds and its device."""
    names = [field.name for field in dataclasses.fields(RLSettings)]
    return RLSettings(**{name: getattr(config, name) for name in names})


def read_config(folder: Path) -> RLConfig:
    """Read the config.json of a run of `funcppo rl`.

    Raises:
      ValueError: the folder holds no such run, a newer version of funcppo wrote it, or a field is missing, unknown, of
        another type or out of range.
    """
    path = folder / CONFIG_FILE
    if not is_rl_run(folder):
        found = "none"
        if folder.is_dir():
            kind = "without" if not path.is_file() else "with another"
            found = f"one {kind} {CONFIG_FILE}"
        raise ValueError(
            f"{folder}: expected a folder that `funcppo rl` wrote, got {found}"
        )
    raw = files.parse_object(path, path.read_bytes())
    files.check_format(path, raw.pop(files.FORMAT_KEY, None))
    try:
        if isinstance(raw.get("hidden"), list):
            raw["hidden"] = tuple(raw["hidden"])
        return from_json(RLConfig, raw, prefix="")
    except KeyError as error:
        reason = f"expected the settings of a run, got a file without {error}"
        raise ValueError(f"{path}: {reason}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def is_rl_run(folder: Path) -> bool:
    """Whether a folder holds a run of `funcppo rl`.

    Raises:
      ValueError: its config.json is no object of JSON.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        return False
    return "env" in files.parse_object(path, path.read_bytes())
