"""Environments of Gymnasium, which step on the host: `gymnasium`.

    env = fp.envs.gymnasium("LunarLander-v3", n_envs=8)
    ppo = fp.ppo(env=env, network=fp.nets.mlp(64, 64))

What such an environment is in lies in Python objects. Its state here is what was observed last, and a clock: only the
latest state can be stepped. Rollouts call it step by step; what learns from them knows its stand-in, which is pure
(`interfaces.HostEnvironment`).

Vector environments of Gymnasium run with autoreset disabled: the observation after a step is the last one of an episode
that ends, and finished rows are reset at once, so that no step is lost.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Gymnasium is optional, and imported where it is used.

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo.core import random
from funcppo.core.settings import Size, check_fields
from funcppo.core.types import I64, Bool
from funcppo.interfaces import (
    AnyEnvironment,
    Environment,
    EnvironmentSpec,
    HostEnvironment,
    MaskedObservation,
    Timestep,
)
from funcppo.runtime.memory import to_device, to_host

VectorizationMode = Literal["sync", "async"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GymnasiumConfig:
    """Name of the bridged environment, and the format of its observations."""

    name: str  # Gymnasium's id, or the name of the function that makes the environment
    make_options: str  # keyword arguments of `gymnasium.make`
    vectorization_mode: VectorizationMode
    n_envs: Size | None  # None: as many rows as a learner asks for
    observation_shape: tuple[Size, ...]  # of one row of the state
    observation_dtype: torch.dtype
    n_values: Size | None  # of a discrete observation, which becomes one-hot
    scale_images: bool  # bytes of images become numbers of [0, 1]
    mask_size: (
        Size | None
    )  # actions of `info["action_mask"]`, if it is observed

    __post_init__ = check_fields


class EnvState(NamedTuple):
    """Last observation and flags of each row."""

    obs: Tensor  # [B, ...], as Gymnasium returned it; float32 in place of other numbers than uint8 and int64
    action_mask: Bool[Tensor, "B S"]  # S is 0 where it is not observed
    terminated: Bool[Tensor, "B"]
    truncated: Bool[Tensor, "B"]
    # Calls of the host environments so far; equal in all rows, and different in each state.
    clock: I64[Tensor, "B"]


def observe(
    cfg: GymnasiumConfig, world: object, state: EnvState
) -> Tensor | MaskedObservation:
    """Return the observation [B, ...], with the mask of legal actions if the bridge observes one."""
    features = _features(cfg, state)
    if cfg.mask_size is None:
        return features
    return MaskedObservation(features, state.action_mask)


def _features(cfg: GymnasiumConfig, state: EnvState) -> Tensor:
    """Return the observation's numbers: one-hot if discrete; by default uint8 is scaled to [0, 1]."""
    if cfg.n_values is not None:
        values = torch.arange(cfg.n_values, device=state.obs.device)
        return (state.obs.unsqueeze(-1) == values).to(torch.float32)
    if cfg.observation_dtype == torch.uint8 and cfg.scale_images:
        return state.obs.to(torch.float32) / 255  # the largest pixel
    return state.obs


# The stand-in


def _sample_reset(
    cfg: GymnasiumConfig, world: object, key: I64[Tensor, "B 2"]
) -> I64[Tensor, "B 2"]:
    """Return the keys, whose number of rows is all that is needed: the host samples resets when it resets a row."""
    return key


def _blank_state(
    cfg: GymnasiumConfig, world: object, key: I64[Tensor, "B 2"]
) -> EnvState:
    """Build a state of zeros with the right shapes."""
    n_rows, zero = len(key), torch.zeros_like(key[:, 0])
    dtype = cfg.observation_dtype
    return EnvState(
        obs=zero.new_zeros(n_rows, *cfg.observation_shape, dtype=dtype),
        action_mask=zero.new_ones(n_rows, cfg.mask_size or 0, dtype=torch.bool),
        terminated=zero.to(torch.bool),
        truncated=zero.to(torch.bool),
        clock=zero,
    )


def _make_up_step(
    cfg: GymnasiumConfig,
    world: object,
    state: EnvState,
    action: Tensor,
    key: I64[Tensor, "B 2"],
) -> tuple[EnvState, Timestep]:
    """Return the same observation with random rewards and ends: the step of the stand-in."""
    reward_key, end_key = random.split(key).unbind(-2)
    terminated = random.uniform(end_key, ()) < 0.1
    truncated = torch.zeros_like(terminated)
    reached = state._replace(terminated=terminated, truncated=truncated)
    reward = random.normal(reward_key, ())
    return reached, Timestep(reward, terminated, truncated)


# The environments on the host


class _Results(NamedTuple):
    """Results that the host environments returned last, for each row."""

    obs: np.ndarray
    action_mask: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


class HostRows:
    """Vector environment behind a bridge, with its latest results."""

    def __init__(
        self,
        make_env: Callable[[], Any],
        observations: _Observations,
        actions: _Actions,
        n_envs: int | None,
    ) -> None:
        """Store how to make environments; the first reset makes them.

        Args:
          make_env: makes one environment of Gymnasium.
          observations: how its observations are held.
          actions: how its actions are made.
          n_envs: rows that a reset must ask for; None for any number.
        """
        self._make_env = make_env
        self._to_observation = observations.convert
        self._to_action = actions.convert
        self._n_envs = n_envs
        self._vector_env: Any = None
        self._clock = 0
        # Of the states returned last; a finished row stays so until it restarts.
        self._results: _Results
        # Rows whose episode on the host is over; those cannot be stepped.
        self._must_reset: np.ndarray

    def reset(
        self, cfg: GymnasiumConfig, world: object, key: I64[Tensor, "B 2"]
    ) -> EnvState:
        """Reset all rows with seeds from the keys; states returned earlier can no longer be stepped.

        Raises:
          ValueError: not as many rows as the bridge was made for.
        """
        n_rows = len(key)
        if self._n_envs not in (None, n_rows):
            raise ValueError(
                f"n_envs: expected {self._n_envs} as given to fp.envs.gymnasium, got {n_rows}"
            )
        if self._vector_env is None or self._vector_env.num_envs != n_rows:
            self.close()
            self._vector_env = _make_vector_env(
                self._make_env, n_rows, cfg.vectorization_mode
            )

        seeds = random.bits(key, ()) >> 1  # 31 bits
        obs, infos = self._vector_env.reset(seed=seeds.tolist())
        never = np.zeros(n_rows, dtype=np.bool_)
        self._must_reset = never
        return self._take(cfg, key.device, ~never, obs, infos, never, never)

    def step(
        self,
        cfg: GymnasiumConfig,
        world: object,
        state: EnvState,
        action: Tensor,
        key: I64[Tensor, "B 2"],
    ) -> tuple[EnvState, Timestep]:
        """Step all rows on the host; rows that had finished stay as they are.

        Raises:
          ValueError: not the state that was returned last, or the call is part of a graph or under `torch.vmap`.
        """
        actions = self._read(state, action)
        if self._must_reset.any():  # of rows that had finished
            self._vector_env.reset(options={"reset_mask": self._must_reset})
        obs, reward, terminated, truncated, infos = self._vector_env.step(
            self._to_action(actions)
        )
        self._must_reset = terminated | truncated

        device = state.obs.device
        goes_on = ~(self._results.terminated | self._results.truncated)
        reached = self._take(
            cfg, device, goes_on, obs, infos, terminated, truncated
        )
        paid = np.where(goes_on, reward, 0).astype(np.float32)
        return reached, Timestep(
            to_device(torch.from_numpy(paid), device),
            reached.terminated,
            reached.truncated,
        )

    def restart(
        self,
        cfg: GymnasiumConfig,
        world: object,
        state: EnvState,
        finished: Bool[Tensor, "B"],
        reset_state: EnvState,
    ) -> EnvState:
        """Reset finished rows on the host; return the state."""
        is_finished: np.ndarray = to_host(finished).numpy()
        if not is_finished.any():
            return state
        obs, infos = self._vector_env.reset(
            options={"reset_mask": is_finished.copy()}
        )
        self._must_reset = self._must_reset & ~is_finished
        never = np.zeros_like(is_finished)
        return self._take(
            cfg, state.obs.device, is_finished, obs, infos, never, never
        )

    def close(self) -> None:
        """Close the vector environment, if it was made."""
        if self._vector_env is not None:
            self._vector_env.close()

    def _read(self, state: EnvState, action: Tensor) -> np.ndarray:
        """Copy the actions to the host, and check that the state is the one that was returned last."""
        try:
            if torch.compiler.is_compiling():
                raise RuntimeError("got a call in a compiled function")
            actions, clock = to_host((action, state.clock))
            latest = int(clock.max())
            on_host: np.ndarray = actions.numpy()
        except RuntimeError as error:
            line = str(error).partition("\n")[0]
            raise ValueError(
                "step: expected a call outside of compiled functions, torch.vmap and CUDA graphs: "
                f"the environment steps on the host: {line}"
            ) from None

        if self._vector_env is None or latest != self._clock:
            raise ValueError(
                "state: expected the one that the environments on the host returned last, got another: they cannot "
                "go back; take env_state, episode_stats and memory of a new `init`"
            )
        return on_host

    def _take(
        self,
        cfg: GymnasiumConfig,
        device: torch.device,
        rows: np.ndarray,
        obs: Any,
        infos: dict[str, Any],
        terminated: np.ndarray,
        truncated: np.ndarray,
    ) -> EnvState:
        """Store what the environments returned for some rows; return the results of all as a state on the device."""
        mask = _read_mask(cfg, infos, rows & ~(terminated | truncated))
        results = _Results(
            self._to_observation(obs), mask, terminated, truncated
        )
        if not rows.all():
            pairs = zip(results, self._results)
            results = _Results(*(_select(rows, a, b) for a, b in pairs))
        self._results = results
        self._clock += 1
        clock = torch.full((len(rows),), self._clock)
        tensors = map(torch.from_numpy, results)
        return to_device(EnvState(*tensors, clock=clock), device)


def _select(rows: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Select rows of `a` where `rows` is true, of `b` elsewhere, as a new array."""
    return np.where(rows.reshape(-1, *[1] * (a.ndim - 1)), a, b)


def _read_mask(
    cfg: GymnasiumConfig, infos: dict[str, Any], goes_on: np.ndarray
) -> np.ndarray:
    """Return the mask of legal actions [B, S]; all true if no mask is observed.

    Args:
      infos: of a vector environment.
      goes_on: rows that are stepped next, which need a legal action; others may have none.

    Raises:
      ValueError: a row has no mask, or no legal action.
    """
    shape = len(goes_on), cfg.mask_size or 0
    if cfg.mask_size is None:
        return np.ones(shape, np.bool_)
    has_mask = infos.get("_action_mask", np.zeros_like(goes_on))
    _require(cfg, goes_on & ~has_mask, "a mask in its info")
    if not has_mask.any():
        return np.ones(shape, np.bool_)

    mask = np.asarray(infos["action_mask"]).reshape(len(goes_on), -1) != 0
    if mask.shape != shape:
        raise ValueError(
            f"{cfg.name}: action_mask: expected {shape[1]} numbers, got {mask.shape[1]}"
        )
    is_empty = ~mask.any(1)
    _require(cfg, goes_on & is_empty, "a legal action")
    return mask | is_empty[:, None]


def _require(cfg: GymnasiumConfig, lacks: np.ndarray, what: str) -> None:
    """Raise ValueError naming the first row for which `lacks` is true."""
    if lacks.any():
        row = int(np.flatnonzero(lacks)[0])
        raise ValueError(
            f"{cfg.name}: action_mask: expected {what}, row {row} has none"
        )


def _make_vector_env(
    make_env: Callable[[], Any], n_rows: int, mode: VectorizationMode
) -> Any:
    vector = importlib.import_module("gymnasium.vector")
    classes = {"sync": vector.SyncVectorEnv, "async": vector.AsyncVectorEnv}
    return classes[mode](
        [make_env] * n_rows, autoreset_mode=vector.AutoresetMode.DISABLED
    )


# Spaces


class _Observations(NamedTuple):
    """Format of the observations of a space."""

    shape: tuple[int, ...]  # of one row
    dtype: torch.dtype
    n_values: int | None  # of a discrete space
    convert: Callable[[Any], np.ndarray]  # from Gymnasium


class _Actions(NamedTuple):
    """Format of the actions of a space."""

    size: int
    sizes: tuple[int, ...] | None  # of each of several discrete actions
    is_continuous: bool
    convert: Callable[[np.ndarray], np.ndarray]  # to Gymnasium


def _read_observation_space(name: str, space: Any) -> _Observations:
    """Describe the observations of a Box or Discrete space, and how to convert them.

    Raises:
      ValueError: of any other space.
    """
    spaces = importlib.import_module("gymnasium.spaces")
    if isinstance(space, spaces.Discrete):
        first = int(space.start)

        def count_from_0(obs: Any) -> np.ndarray:
            return np.asarray(obs, np.int64) - first

        return _Observations((), torch.int64, int(space.n), count_from_0)
    if not isinstance(space, spaces.Box):
        raise ValueError(
            f"{name}: expected observations of a Box or a Discrete space, got {type(space).__name__}; "
            "hand in a function that makes the environment in gymnasium.wrappers.FlattenObservation"
        )

    # Other bytes, such as the cells of a board, are numbers.
    is_image = space.dtype == np.uint8 and bool(
        (space.low == 0).all() and (space.high == 255).all()
    )
    dtype, tensor_dtype = np.float32, torch.float32
    if is_image:
        dtype, tensor_dtype = np.uint8, torch.uint8
    shape = tuple(space.shape) or (1,)

    def in_rows(obs: Any) -> np.ndarray:
        return np.asarray(obs, dtype).reshape(-1, *shape)

    return _Observations(shape, tensor_dtype, None, in_rows)


def _read_action_space(name: str, space: Any) -> _Actions:
    """Describe the actions of a discrete space, or of a Box of floats, to whose bounds actions are clipped.

    Raises:
      ValueError: of any other space.
    """
    spaces = importlib.import_module("gymnasium.spaces")
    shape, dtype = space.shape or (), space.dtype
    n_numbers = math.prod(shape)
    if isinstance(space, spaces.Box) and dtype.kind == "f":
        low, high = space.low, space.high

        def within(x: np.ndarray) -> np.ndarray:
            return np.clip(x.reshape(-1, *shape), low, high).astype(dtype)

        return _Actions(n_numbers, None, True, within)

    if isinstance(space, spaces.Discrete):
        sizes = (int(space.n),)
    elif isinstance(space, spaces.MultiDiscrete):
        sizes = tuple(int(n) for n in space.nvec.flatten())
    elif isinstance(space, spaces.MultiBinary):
        sizes = (2,) * n_numbers
    else:
        raise ValueError(
            f"{name}: expected actions of a Discrete, MultiDiscrete or MultiBinary space or floats, got {space}"
        )
    start = getattr(space, "start", 0)

    def count_from_start(x: np.ndarray) -> np.ndarray:
        return (x.reshape(-1, *shape) + start).astype(dtype)

    is_one = isinstance(space, spaces.Discrete)
    return _Actions(
        sum(sizes), None if is_one else sizes, False, count_from_start
    )


def gymnasium(
    env: str | Callable[[], Any],
    *,
    n_envs: int | None = None,
    vectorization_mode: VectorizationMode = "sync",
    scale_images: bool = True,
    action_mask: bool = False,
    **make_options: Any,
) -> AnyEnvironment:
    """Build an environment of Gymnasium, stepped on the host by its vector environments.

    A bridge serves one learner at a time: each reset of all rows begins anew, and only the state that was returned last
    can be stepped. Evaluation has environments of its own. Observations are those of a Box, as float32 or uint8, or of
    a Discrete space, as one-hot vectors; actions those of a Discrete, MultiDiscrete or MultiBinary space, or of a Box,
    to whose bounds they are clipped.

    Args:
      env: Gymnasium's id, or a function without arguments that makes one environment, in whatever wrappers.
      n_envs: rows, which `fp.ppo` then takes by default; None: as many as the learner has.
      vectorization_mode: "sync" steps rows in turn, "async" each in a process of its own.
      scale_images: observe uint8 numbers with bounds 0 and 255 as float32 of [0, 1]; else they stay uint8. Those with
        other bounds are float32 as they are.
      action_mask: observe `info["action_mask"]` too, as `fp.MaskedObservation`; illegal actions are then never made.
      make_options: keyword arguments of `gymnasium.make`, e.g. `max_episode_steps=200`.

    Raises:
      ModuleNotFoundError: Gymnasium is not installed.
      ValueError: Gymnasium cannot make the environment, its spaces are others, or actions that are not discrete shall
        be masked.
      TypeError: `env` is neither an id nor a function that makes an environment, or there are options for one that is
        handed in as a function.

    Source: Towers et al. 2024, "Gymnasium: a standard interface for reinforcement learning environments",
    arXiv:2407.17032.
    """
    make_env = _environment_maker(env, make_options)
    name = env if isinstance(env, str) else _function_name(env)
    first = make_env()
    if not hasattr(first, "observation_space"):
        raise TypeError(
            f"env: expected a function that makes an environment, got one that makes a {type(first).__name__}"
        )
    observations = _read_observation_space(name, first.observation_space)
    actions = _read_action_space(name, first.action_space)
    first.close()
    if action_mask and actions.is_continuous:
        raise ValueError(
            f"action_mask: expected discrete actions, those of {name} are continuous"
        )

    cfg = GymnasiumConfig(
        name=name,
        make_options=", ".join(f"{k}={v!r}" for k, v in make_options.items()),
        vectorization_mode=vectorization_mode,
        n_envs=n_envs,
        observation_shape=observations.shape,
        observation_dtype=observations.dtype,
        n_values=observations.n_values,
        scale_images=scale_images,
        mask_size=actions.size if action_mask else None,
    )
    make_rows = partial(HostRows, make_env, observations, actions)
    evaluation = _environment(cfg, actions, make_rows(None))
    stand_in = replace(
        evaluation,
        reset=_blank_state,
        step_functional=_make_up_step,
        restart=None,
    )
    return replace(
        _environment(cfg, actions, make_rows(n_envs)),
        host=HostEnvironment(
            stand_in=stand_in,
            evaluation=evaluation,
            n_envs=n_envs,
            check=partial(check_environment, name, make_env, cfg.mask_size),
        ),
    )


def _environment_maker(
    env: str | Callable[[], Any], make_options: dict[str, Any]
) -> Callable[[], Any]:
    """Return a function that makes one environment from an id or a user's function."""
    try:
        gym = importlib.import_module("gymnasium")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"fp.envs.gymnasium needs {error.name} (pip install 'funcppo[gymnasium]')"
        ) from None
    if callable(env) and not make_options:
        return env
    if not isinstance(env, str):
        raise TypeError(
            "env: expected an id, or a function without options that makes one environment for each row, "
            f"got a {type(env).__name__}"
        )

    def make() -> Any:
        try:
            return gym.make(env, **make_options)
        except gym.error.Error as error:
            line = " ".join(str(error).split())
            raise ValueError(f"{env}: {line}") from error

    return make


def _function_name(make_env: Callable[[], Any]) -> str:
    return getattr(make_env, "__qualname__", type(make_env).__name__)


def _environment(
    cfg: GymnasiumConfig, actions: _Actions, rows: HostRows
) -> AnyEnvironment:
    shape = cfg.observation_shape
    n_features = cfg.n_values or math.prod(shape)
    spec = EnvironmentSpec(
        observation_size=n_features,
        action_size=actions.size,
        action_sizes=actions.sizes,
        continuous_actions=actions.is_continuous,
        observation_shape=shape if len(shape) > 1 else None,
    )
    return Environment(
        cfg=cfg,
        reset=rows.reset,
        step_functional=rows.step,
        observe=observe,
        restart=rows.restart,
        sample_reset=_sample_reset,
        reset_from_sample=_blank_state,
        spec=spec,
    )


# Checks


def check_environment(
    name: str, make_env: Callable[[], Any], mask_size: int | None = None
) -> None:
    """Run Gymnasium's `check_env`; raise ValueError with its first complaint. Skipped with an action mask.

    Of what it only warns of, rewards that are no finite numbers and flags that are no bools are errors. Environments
    whose actions are masked are not checked: it makes illegal actions.

    Args:
      name: begins each line.
      mask_size: actions of `info["action_mask"]`, if it is observed.

    Raises:
      ValueError: one line that says what is wrong.
    """
    if mask_size is not None:
        return

    checker = importlib.import_module("gymnasium.utils.env_checker")
    env = make_env()
    lines: list[str] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checker.check_env(
                env, skip_render_check=True, skip_close_check=True
            )
        texts = [str(warning.message) for warning in caught]
        lines = [x for x in texts if "Expects `" in x or "The reward" in x]
    except Exception as error:  # whatever an environment raises
        lines = [f"{type(error).__name__}: {error}"]
    finally:
        env.close()
    if lines:
        line = " ".join(lines[0].split())
        raise ValueError(
            f"{name}: expected an environment that gymnasium.utils.env_checker.check_env accepts, got {line}"
        )
