"""Runs of PPO on an environment by its name: published settings, the learner, and the returns of several seeds.

`published_settings(name)` returns the settings with their source. Where ours must differ from the source, the source
says so. `make_learner` builds the learner. `read_returns` reads what a run of `funcppo rl` reached from its metrics
log, and `summarize` gives it with intervals over seeds. The command line's help needs this module, so it imports
PyTorch only where it builds a learner.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from funcppo import logs
from funcppo.config import PPOConfig, Schedule
from funcppo.core import files
from funcppo.core.files import Json
from funcppo.core.settings import (
    CONFIG_FILE,
    METRICS_FILE,
    DeviceName,
    FieldError,
    LogStd,
    PositiveInt,
    Seed,
    Size,
    check_fields,
    from_json,
)

# PyTorch takes seconds to import, and --help does not wait for it.
if TYPE_CHECKING:
    from funcppo.core.types import F64, I64
    from funcppo.interfaces import AnyEnvironment
    from funcppo.learner import Learner

    Statistic = Callable[[F64[np.ndarray, "... K"]], F64[np.ndarray, "..."]]

# Settings for gSDE alone, and what they are without it.
GSDE_DEFAULTS = {"noise_steps": None, "first_log_std": 0.0, "orthogonal": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class RLSettings:
    """Settings of training on an environment, without its seeds and device."""

    source: str
    """Where the settings are published that no option names, and what differs there."""

    steps: PositiveInt
    """Environment steps of each seed, rounded up to whole rollouts. Default: as published."""

    hidden: tuple[Size, ...] = (64, 64)
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

    normalize_observation: bool = False
    """Shift and scale observations by their running moments."""

    normalize_reward: bool = False
    """Divide rewards by the running deviation of the discounted return."""

    clip_action: bool = False
    """Clip continuous actions to [-1, 1] before the environment sees them."""

    ppo: PPOConfig
    """Settings of proximal policy optimisation (PPO)."""

    __post_init__ = check_fields


_CONSTANT = Schedule()
_LINEAR = Schedule(kind="linear")

# DLR-RM/rl-baselines3-zoo, hyperparams/ppo.yml. What it leaves out are the defaults of Stable-Baselines3: batches of 64
# rows, a constant learning rate of 3e-4, an unclipped squared error of values, no entropy bonus. Its `normalize` is
# VecNormalize of observations and rewards, which also clips both at 10; ours do not clip.
_ZOO = "RL Baselines3 Zoo, hyperparams/ppo.yml"
_SB3 = PPOConfig(
    learning_rate=3e-4,
    learning_rate_schedule=_CONSTANT,
    entropy_coef=0.0,
    value_loss="plain",
    half_value_loss=False,
)
# luchris429/purejaxrl, purejaxrl/ppo.py and examples/brax_minatar.ipynb. An episode that its time limit cuts counts as
# terminated there, and advantages are divided by the population deviation.
_PUREJAXRL = PPOConfig(advantage_ddof=0, bootstrap_truncated=False)
_MINATAR = RLSettings(
    source="PureJaxRL, examples/brax_minatar.ipynb; there with episodes of at most 1000 steps",
    steps=10_000_000,
    activation="relu",
    ppo=replace(_PUREJAXRL, n_envs=64, n_minibatches=8, learning_rate=5e-3),
)

PUBLISHED = {
    "CartPole-v1": RLSettings(
        source="PureJaxRL, purejaxrl/ppo.py",
        steps=500_000,
        ppo=_PUREJAXRL,
    ),
    "Acrobot-v1": RLSettings(
        source=_ZOO,
        steps=1_000_000,
        normalize_observation=True,
        normalize_reward=True,
        ppo=replace(
            _SB3, n_envs=16, n_steps=256, n_minibatches=64, gae_lambda=0.94
        ),
    ),
    "MountainCar-v0": RLSettings(
        source=_ZOO,
        steps=1_000_000,
        normalize_observation=True,
        normalize_reward=True,
        ppo=replace(_SB3, n_envs=16, n_steps=16, gae_lambda=0.98),
    ),
    "Pendulum-v1": RLSettings(
        source=_ZOO,
        steps=100_000,
        exploration="gsde",
        noise_steps=4,
        ppo=replace(
            _SB3,
            n_steps=1024,
            n_epochs=10,
            n_minibatches=64,
            learning_rate=1e-3,
            gamma=0.9,
        ),
    ),
    "MountainCarContinuous-v0": RLSettings(
        source=_ZOO,
        steps=20_000,
        exploration="gsde",
        first_log_std=-3.29,
        orthogonal=False,
        normalize_observation=True,
        normalize_reward=True,
        clip_action=True,
        ppo=replace(
            _SB3,
            n_envs=1,
            n_steps=8,
            n_epochs=10,
            n_minibatches=1,
            learning_rate=7.77e-5,
            gamma=0.9999,
            gae_lambda=0.9,
            clip_eps=0.1,
            value_coef=0.19,
            entropy_coef=0.00429,
            max_grad_norm=5.0,
        ),
    ),
    **{
        f"MinAtar/{game}-v{version}": _MINATAR
        for game in (
            "Asterix",
            "Breakout",
            "Freeway",
            "SpaceInvaders",
        )
        for version in (0, 1)
    },
}


def published_settings(name: str) -> RLSettings:
    """Return the published settings of an environment; the defaults of `PPOConfig` if there are none."""
    default = RLSettings(
        source="the defaults of PPOConfig: none are published for it",
        steps=500_000,
        ppo=PPOConfig(),
    )
    return PUBLISHED.get(name, default)


@dataclass(frozen=True, kw_only=True, slots=True)
class RLConfig(RLSettings):
    """Settings of one run; the contents of config.json."""

    env: str
    """Environment: CartPole-v1, Acrobot-v1, MountainCar-v0, MountainCarContinuous-v0, Pendulum-v1, a
    game such as MinAtar/Breakout-v1, or one of Gymnasium, as gymnasium:LunarLander-v3. (required unless --resume)"""

    seeds: Size = 1
    """Number of seeds, which are trained at once in one step."""

    seed: Seed = 0
    """First of the random seeds; the others follow it."""

    device: DeviceName = "cpu"
    """Device to train on: cpu, cuda, or cuda:N for GPU number N."""

    threads: PositiveInt = 1
    """Number of CPU threads of an operation."""

    strategy: Literal["auto", "one-graph", "forward", "eager"] = "auto"
    """How the training step is executed, as of `funcppo train`; auto compiles it in a run long enough to repay that."""

    evaluate_every: PositiveInt | None = None
    """Updates between two evaluations; None: a twentieth of the run."""

    episodes: Size = 32
    """Episodes of each seed, greedy and sampled, in an evaluation."""


def read_config(folder: Path) -> RLConfig:
    """Load the config.json of a run of `funcppo rl`.

    Raises:
      ValueError: the folder holds no such run, a newer version of funcppo wrote it, or a field is missing, unknown, of
        another type or out of range.
    """
    path = folder / CONFIG_FILE
    if not is_rl_run(folder):
        raise ValueError(
            f"{folder}: expected a folder that `funcppo rl` wrote, got another or none"
        )
    raw = files.read_object(path)
    files.check_format(path, raw.pop(files.FORMAT_KEY, None))
    try:
        if isinstance(raw.get("hidden"), list):
            raw["hidden"] = tuple(raw["hidden"])
        return from_json(RLConfig, raw, prefix="")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def is_rl_run(folder: Path) -> bool:
    """Return whether a folder holds a run of `funcppo rl`.

    Raises:
      ValueError: its config.json is no object of JSON.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        return False
    return "env" in files.read_object(path)


def seeds_of(config: RLConfig) -> tuple[int, ...]:
    """Return the seeds of a run."""
    return tuple(range(config.seed, config.seed + config.seeds))


def n_updates(config: RLConfig) -> int:
    """Return the number of updates of the whole run."""
    batch_size = config.ppo.n_envs * config.ppo.n_steps
    return math.ceil(config.steps / batch_size)


def evaluation_interval(config: RLConfig) -> int:
    """Return the updates between two evaluations: `evaluate_every`, or 20 evaluations a run if it is None."""
    interval = max(1, n_updates(config) // 20)
    return config.evaluate_every or interval


# ---- The learner.


def _wrap(
    env: AnyEnvironment, settings: RLSettings, flattens: bool
) -> AnyEnvironment:
    """Return an environment in the wrappers that its settings name."""
    from funcppo.envs import wrappers

    if flattens:
        env = wrappers.flatten_observation(env)
    if settings.clip_action:
        env = wrappers.clip_action(env)
    if settings.normalize_observation:
        env = wrappers.normalize_observation(env)
    if settings.normalize_reward:
        env = wrappers.normalize_reward(env, gamma=settings.ppo.gamma)
    return env


def make_learner(env: str, settings: RLSettings) -> Learner[Any, Any]:
    """Build the learner of an environment by its name; images are flattened, or read by `nature_cnn` if they are large.

    Raises:
      ValueError: there is no environment of that name, its actions are discrete and the exploration is gSDE, or a
        setting is for gSDE without gSDE.
    """
    from funcppo import envs, learner, nets

    made = envs.make(env)
    spec: Any = made.spec
    shape = spec.observation_shape or ()
    # as many pixels as `nature_cnn` needs
    is_large = len(shape) == 3 and sorted(shape)[1] >= 36
    wrapped = _wrap(made, settings, bool(shape) and not is_large)
    network, options = nets.mlp, dict[str, Any]()
    gsde = {name: getattr(settings, name) for name in GSDE_DEFAULTS}
    if settings.exploration == "gsde":
        network, options = nets.gsde, gsde
        if not spec.continuous_actions:
            expected = f"independent for the discrete actions of {env}"
            raise FieldError("exploration", expected, settings.exploration)
    elif gsde != GSDE_DEFAULTS:
        name = next(x for x, value in gsde.items() if value != GSDE_DEFAULTS[x])
        expected = f"{GSDE_DEFAULTS[name]} without exploration gsde"
        raise FieldError(name, expected, gsde[name])
    reader = network(
        *settings.hidden, activation=settings.activation, **options
    )
    if is_large:
        reader = nets.nature_cnn(then=reader)
    built = learner.ppo(env=wrapped, network=reader)
    return replace(built, cfg=replace(built.cfg, ppo=settings.ppo))


# ---- What a run reached.


class Estimate(NamedTuple):
    """Statistic of returns with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1f} [{self.low:.1f}, {self.high:.1f}]"


def mean_return(returns: F64[np.ndarray, "... K"]) -> F64[np.ndarray, "..."]:
    """Compute the mean return over seeds."""
    return returns.mean(-1)


def interquartile_mean(
    returns: F64[np.ndarray, "... K"],
) -> F64[np.ndarray, "..."]:
    """Compute the mean of the middle half of the returns of K seeds.

    A quarter of them, rounded down, is left out at either end.
    """
    n_seeds = returns.shape[-1]
    n_trimmed = n_seeds // 4
    ordered = np.sort(returns, axis=-1)
    return ordered[..., n_trimmed : n_seeds - n_trimmed].mean(-1)


def estimate(
    returns: F64[np.ndarray, "K"],
    statistic: Statistic = interquartile_mean,
    seed: int = 0,
) -> Estimate:
    """Compute a statistic with its percentile interval by the bootstrap over seeds.

    Args:
      returns: of K seeds.
      seed: of the resampling.
    """
    n_seeds = len(returns)
    rows = np.random.default_rng(seed).integers(0, n_seeds, (2000, n_seeds))
    tails = [(1 - 0.95) / 2, (1 + 0.95) / 2]
    low, high = np.quantile(statistic(returns[rows]), tails)
    return Estimate(float(statistic(returns)), float(low), float(high))


POLICIES = ("greedy", "sampled")


class Returns(NamedTuple):
    """Mean returns of K seeds in the E evaluations of a run."""

    seeds: tuple[int, ...]
    steps: I64[np.ndarray, "E"]  # environment steps of each seed before it
    greedy: F64[np.ndarray, "K E"]
    sampled: F64[np.ndarray, "K E"]
    n_unfinished: I64[np.ndarray, "E"]  # episodes that had not ended


def read_returns(folder: Path) -> Returns:
    """Read the evaluations from the metrics log of a run.

    Raises:
      ValueError: it holds none, or a line is no row.
    """
    path = folder / METRICS_FILE
    rows = logs.read(path) if path.exists() else []
    of = {
        (row["seed"], row["steps"]): row
        for row in rows
        if row.get("greedy_return") is not None
    }
    if not of:
        raise ValueError(
            f"{path}: expected an evaluation, got none: the run has just begun"
        )
    # Evaluations for which all seeds have a row.
    seeds = tuple(dict.fromkeys(seed for seed, _ in of))
    steps = sorted({n for _, n in of})
    steps = [n for n in steps if all((seed, n) in of for seed in seeds)]

    def table(name: str) -> F64[np.ndarray, "K E"]:
        numbers = [[of[seed, n][name] for n in steps] for seed in seeds]
        return np.array(numbers, dtype=np.float64)

    return Returns(
        seeds=seeds,
        steps=np.array(steps, dtype=np.int64),
        greedy=table("greedy_return"),
        sampled=table("sampled_return"),
        n_unfinished=table("n_unfinished_episodes").sum(0).astype(np.int64),
    )


def summarize(returns: Returns) -> Json:
    """Summarise the last evaluation: for each policy the mean, the interquartile mean, and each seed's return."""
    summary: Json = {}
    for policy in POLICIES:
        last = getattr(returns, policy)[:, -1]
        mean = estimate(last, mean_return)
        iqm = estimate(last, interquartile_mean)
        summary[policy] = {
            "mean": mean.value,
            "mean_interval": [mean.low, mean.high],
            "iqm": iqm.value,
            "iqm_interval": [iqm.low, iqm.high],
            "by_seed": dict(zip(map(str, returns.seeds), last.tolist())),
        }
    return summary
