"""Environments of Gymnasium, which step on the host: `gymnasium`.

    env = fp.envs.gymnasium("LunarLander-v3", n_envs=8)
    ppo = fp.ppo(env=env, network=fp.nets.mlp(64, 64))

What such an environment is in lies in Python objects. Its state here is what was observed last, and a clock: only the
latest state can be stepped. Rollouts call it step by step; what learns from them knows its stand-in, which is pure
(`interfaces.HostEnvironment`). Under `torch.vmap` the rows of all learners are stepped together.

The observation after a step is the last one of an episode that ends. Vector environments made here have autoreset
disabled, and finished rows are reset at once, so that no step is lost; others reset in their own way (`_Restart`).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Gymnasium is optional, and imported where it is used.

from __future__ import annotations

import importlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from funcppo.core import random, tree
from funcppo.core.host import import_extra
from funcppo.core.settings import Size, check_fields, check_value
from funcppo.core.types import I64, Bool
from funcppo.interfaces import (
    AnyEnvironment,
    Environment,
    EnvironmentSpec,
    HostEnvironment,
    MaskedObservation,
    Timestep,
    do_nothing,
)
from funcppo.runtime.memory import to_device, to_host

# Objects of Gymnasium, and what its environments observe, act by and tell.
Space: TypeAlias = Any
VectorEnv: TypeAlias = Any
Values: TypeAlias = Any
Infos: TypeAlias = dict[str, Any]

VectorizationMode = Literal["sync", "async", "vector_entry_point"]

# How a finished row of a vector environment begins its next episode. On demand: by `options={"reset_mask": ...}`, or by
# the numbers of rows (envpool). By itself: in the step that ends the episode, or in a step of its own, which ignores
# the action.
_Restart = Literal["mask", "ids", "same-step", "next-step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservationPart:
    """Format of an observation, or of one of the tensors of a Dict or Tuple observation."""

    shape: tuple[Size, ...]  # of one row of the state
    dtype: torch.dtype
    # of each of several discrete numbers, which become one-hot; None: others
    n_values: tuple[Size, ...] | None = None

    @property
    def size(self) -> int:
        """Return how many numbers of a row are observed."""
        return sum(self.n_values or ()) or math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class GymnasiumConfig:
    """Name of the bridged environment, and the format of its observations."""

    name: str  # Gymnasium's id, or the name of the function that makes the environment
    make_options: str  # keyword arguments of `gymnasium.make`
    vectorization_mode: VectorizationMode
    n_envs: Size | None  # None: as many rows as a learner asks for
    parts: tuple[ObservationPart, ...]
    scale_images: bool  # bytes of images become numbers of [0, 1]
    mask_size: (
        Size | None
    )  # actions of `info["action_mask"]`, if it is observed

    __post_init__ = check_fields


class EnvState(NamedTuple):
    """Last observation and flags of each row."""

    # [B, ...], as Gymnasium returned it; float32 in place of other numbers than uint8 and int64. A tuple of a Dict's or
    # a Tuple's parts, in the order of the space.
    obs: Tensor | tuple[Tensor, ...]
    action_mask: Bool[Tensor, "B S"]  # S is 0 where it is not observed
    terminated: Bool[Tensor, "B"]
    truncated: Bool[Tensor, "B"]
    # Calls of the host environments so far; equal in all rows, and different in each state.
    clock: I64[Tensor, "B"]


def _state_of(leaves: Sequence[Tensor]) -> EnvState:
    """Build a state of its tensors, those of the observation first."""
    *obs, mask, terminated, truncated, clock = leaves
    one_or_all = obs[0] if len(obs) == 1 else tuple(obs)
    return EnvState(one_or_all, mask, terminated, truncated, clock)


def observe(cfg: GymnasiumConfig, world: object, state: EnvState) -> Any:
    """Return the observation [B, ...], a tuple of a Dict's or a Tuple's parts; with the mask of legal actions if the
    bridge observes one.
    """
    obs = state.obs
    if isinstance(obs, Tensor):
        features = _features(cfg, cfg.parts[0], obs)
    else:
        features = tuple(_features(cfg, *x) for x in zip(cfg.parts, obs))
    if cfg.mask_size is None:
        return features
    return MaskedObservation(cast(Any, features), state.action_mask)


def _features(cfg: GymnasiumConfig, part: ObservationPart, x: Tensor) -> Tensor:
    """Return the observation's numbers: one-hot if discrete; by default images are scaled to [0, 1]."""
    if part.n_values is not None:
        values = [torch.arange(n, device=x.device) for n in part.n_values]
        one_hot = [a.unsqueeze(-1) == b for a, b in zip(x.unbind(-1), values)]
        return torch.cat(one_hot, -1).to(torch.float32)
    if part.dtype == torch.uint8 and cfg.scale_images:
        return x.to(torch.float32) / 255  # the largest pixel
    return x


# The stand-in


def sample_reset(
    cfg: GymnasiumConfig, world: object, key: I64[Tensor, "B 2"]
) -> I64[Tensor, "B 2"]:
    """Return the keys, whose number of rows is all that is needed: the host samples resets when it resets a row."""
    return key


def on_host(
    env: AnyEnvironment,
    evaluation: AnyEnvironment,
    blank_state: Callable[..., Any],
    **facts: Any,
) -> AnyEnvironment:
    """Return an environment of the host with its `HostEnvironment`.

    Args:
      evaluation: the same in host objects of its own.
      blank_state: the stand-in's `reset`.
      facts: other fields of `HostEnvironment`.
    """
    stand_in = replace(
        env,
        reset=blank_state,
        reset_from_sample=blank_state,
        step_functional=_make_up_step,
        step_with_autoreset=None,
        restart=None,
    )
    host = HostEnvironment(stand_in=stand_in, evaluation=evaluation, **facts)
    return replace(env, host=host)


def spec_of_host(
    shapes: Sequence[tuple[int, ...]], size: int, **actions: Any
) -> EnvironmentSpec:
    """Describe observations of tensors of some shapes and `size` numbers in all, and actions.

    Args:
      actions: other fields of `EnvironmentSpec`.
    """
    is_image = len(shapes) == 1 and len(shapes[0]) > 1
    return EnvironmentSpec(
        observation_size=size,
        observation_shape=shapes[0] if is_image else None,
        **actions,
    )


def _blank_state(
    cfg: GymnasiumConfig, world: object, key: I64[Tensor, "B 2"]
) -> EnvState:
    """Build a state of zeros with the right shapes."""
    n_rows, zero = len(key), torch.zeros_like(key[:, 0])
    obs = [
        zero.new_zeros(n_rows, *part.shape, dtype=part.dtype)
        for part in cfg.parts
    ]
    mask = zero.new_ones(n_rows, cfg.mask_size or 0, dtype=torch.bool)
    never = zero.to(torch.bool)
    return _state_of([*obs, mask, never, never, zero])


def _make_up_step(
    cfg: object,
    world: object,
    state: Any,
    action: Tensor,
    key: I64[Tensor, "B 2"],
) -> tuple[Any, Timestep]:
    """Return the same observation with random rewards and ends: the step of the stand-in."""
    reward_key, end_key = random.split(key).unbind(-2)
    terminated = random.uniform(end_key, ()) < 0.1
    truncated = torch.zeros_like(terminated)
    reached = state._replace(terminated=terminated, truncated=truncated)
    reward = random.normal(reward_key, ())
    return reached, Timestep(reward, terminated, truncated)


# The environments on the host


class _OnHost(torch.autograd.Function):
    """Call of a function of the host; `torch.vmap` calls it once, with the rows of all learners one after another."""

    @staticmethod
    def forward(call: Callable[..., Any], *tensors: Tensor) -> Any:
        """Return the tensors that the function makes of the rows of others."""
        return call(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing: there are no gradients."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        """Return the tensors that the function makes of the rows of all learners."""
        n, call = info.batch_size, args[0]
        rows = [
            x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(args[1:], in_dims[1:])
        ]
        made = _OnHost.apply(call, *(x.flatten(0, 1) for x in rows))
        each = tuple(x.unflatten(0, (n, -1)) for x in cast(Any, made))
        return each, (0,) * len(each)


def call_on_host(
    call: Callable[..., Sequence[Tensor]], *tensors: Tensor
) -> list[Tensor]:
    """Call a function of the host, outside of compiled functions; under `torch.vmap` once, with all rows.

    Raises:
      ValueError: the call is part of a graph.
    """
    if tree.is_eager():
        return list(call(*tensors))
    if torch.compiler.is_compiling():
        raise ValueError(
            "step: expected a call outside of compiled functions and CUDA graphs: the environment steps on the host"
        )

    def call_for_tuple(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(call(*tensors))

    return list(cast(Any, _OnHost.apply(call_for_tuple, *tensors)))


class HostRows:
    """Vector environment behind a bridge, with its latest results."""

    def __init__(
        self,
        make_rows: Callable[[int], VectorEnv],
        to_arrays: Callable[[Values], list[np.ndarray]],
        to_action: Callable[[np.ndarray], Values],
        n_envs: int | None,
    ) -> None:
        """Store how to make environments; the first reset makes them.

        Args:
          make_rows: makes a vector environment with a number of rows.
          to_arrays: converts observations to those of a state, as new arrays.
          to_action: converts actions to those of the environment.
          n_envs: rows that a reset must ask for; None for any number.
        """
        self._make_rows = make_rows
        self._to_arrays = to_arrays
        self._to_action = to_action
        self._n_envs = n_envs
        self._vector_env: VectorEnv = None
        self._restart: _Restart = "mask"
        self._clock = 0
        # Observation, action mask, and flags of the states returned last; a finished row stays so until it restarts.
        self._results: list[np.ndarray] = []
        # Rows whose episode on the host is over.
        self._ended: np.ndarray = np.zeros(0, np.bool_)
        # What the environments returned last.
        self._observed: list[np.ndarray] = []
        self._infos: Infos = {}

    def reset(
        self, cfg: GymnasiumConfig, world: object, key: I64[Tensor, "B 2"]
    ) -> EnvState:
        """Reset all rows with seeds from the keys; states returned earlier can no longer be stepped.

        Raises:
          ValueError: not as many rows as the bridge was made for.
        """
        if self._n_envs not in (None, len(key)):
            raise ValueError(
                f"n_envs: expected {self._n_envs}, for which the environment was made, got {len(key)}"
            )

        return _state_of(call_on_host(partial(self._reset, cfg), key))

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
          ValueError: not the state that was returned last, or the call is part of a graph.
        """

        step = partial(self._step, cfg)
        *reached, reward = call_on_host(step, action, state.clock)
        next_state = _state_of(reached)
        return next_state, Timestep(
            reward, next_state.terminated, next_state.truncated
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

        restart = partial(self._restart_rows, cfg)
        return _state_of(call_on_host(restart, finished, *tree.leaves(state)))

    def step_with_autoreset(
        self,
        cfg: GymnasiumConfig,
        world: object,
        state: EnvState,
        action: Tensor,
        key: I64[Tensor, "B 2"],
        reset_sample: object,
    ) -> tuple[EnvState, Timestep, EnvState]:
        """Step all rows and reset those that finish, whose first state the host knows."""
        reached, timestep = self.step(cfg, world, state, action, key)
        finished = timestep.terminated | timestep.truncated
        restarted = self.restart(cfg, world, reached, finished, reached)
        return reached, timestep, restarted

    def close(self) -> None:
        """Close the vector environment, if it was made."""
        if self._vector_env is not None:
            self._vector_env.close()
        self._vector_env = None

    def _reset(self, cfg: GymnasiumConfig, key: Tensor) -> list[Tensor]:
        """Reset all rows; return the tensors of a state."""
        n_rows = len(key)
        if len(self._ended) != n_rows or self._vector_env is None:
            self.close()
            self._vector_env = made = self._make_rows(n_rows)
            self._restart = _restart_of(made)
            _check_rows(made, n_rows)
        seeds: list[int] = (random.bits(key, ()) >> 1).tolist()  # 31 bits
        never = np.zeros(n_rows, dtype=np.bool_)
        self._ended = never
        self._keep(_reset_all(self._vector_env, seeds))
        return self._take(cfg, key.device, ~never, never, never)

    def _step(
        self, cfg: GymnasiumConfig, action: Tensor, clock: Tensor
    ) -> list[Tensor]:
        """Step all rows; return the tensors of a state, and the rewards."""
        actions = self._read(action, clock)
        if self._restart in ("mask", "ids") and self._ended.any():
            self._reset_rows(self._ended)
        returned = self._vector_env.step(self._to_action(actions))
        if self._restart == "ids":
            returned = _by_row(returned, len(actions))
        obs, reward, terminated, truncated, infos = returned
        terminated = np.array(terminated, np.bool_)
        truncated = np.array(truncated, np.bool_)
        self._keep((obs, infos))

        *_, was_terminated, was_truncated = self._results
        goes_on = ~(was_terminated | was_truncated)
        paid = np.where(goes_on, reward, 0).astype(np.float32)
        over = terminated | truncated
        if self._restart == "next-step":
            # This step of a row has begun its episode, whatever the action: there is nothing to learn from it.
            paid[self._ended & goes_on] = np.nan
            terminated = terminated | self._ended
        self._ended = over
        last = self._last_observation() if over.any() else None
        device = action.device
        state = self._take(cfg, device, goes_on, terminated, truncated, last)
        return [*state, to_device(torch.from_numpy(paid), device)]

    def _restart_rows(
        self, cfg: GymnasiumConfig, finished: Tensor, *leaves: Tensor
    ) -> list[Tensor]:
        """Begin new episodes in finished rows; return the tensors of a state, given those of the state before."""
        rows: np.ndarray = to_host(finished).numpy()
        if not rows.any():
            return [x.clone() for x in leaves]
        if self._restart in ("mask", "ids"):
            self._reset_rows(rows)
        never = np.zeros_like(rows)
        return self._take(cfg, finished.device, rows, never, never)

    def _read(self, action: Tensor, clock: Tensor) -> np.ndarray:
        """Copy the actions to the host, and check that the state is the one that was returned last."""
        try:
            actions, clock = to_host((action, clock))
        except RuntimeError as error:
            line = str(error).partition("\n")[0]
            raise ValueError(
                f"step: expected a call outside of CUDA graphs: the environment steps on the host: {line}"
            ) from None
        if self._vector_env is None or int(clock.max()) != self._clock:
            raise ValueError(
                "state: expected the one that the environments on the host returned last, got another: they cannot "
                "go back; take env_state, episode_stats and memory of a new `init`"
            )
        return actions.numpy()

    def _reset_rows(self, rows: np.ndarray) -> None:
        """Reset some rows of environments that reset on demand."""
        if self._restart == "ids":
            returned = self._vector_env.reset(np.flatnonzero(rows))
            self._keep(_by_row(returned, len(rows)))
        else:
            options = {"reset_mask": rows.copy()}
            self._keep(self._vector_env.reset(options=options))
        self._ended = self._ended & ~rows

    def _keep(self, returned: tuple[Values, Infos]) -> None:
        """Keep the observation, and the infos, that the environments returned."""
        obs, self._infos = returned
        self._observed = self._to_arrays(obs)

    def _last_observation(self) -> list[np.ndarray] | None:
        """Return the observation with the last one of each episode that has ended, in place of the first of the next.

        Raises:
          ValueError: the environments do not tell it.
        """
        if self._restart != "same-step":
            return None
        final = self._infos.get(
            "final_obs", self._infos.get("final_observation")
        )
        if final is None:
            raise ValueError(
                f"{type(self._vector_env).__name__}: expected final_obs in the infos of a step that begins the next "
                f"episode, got {', '.join(self._infos) or 'no infos'}"
            )
        last = [x.copy() for x in self._observed]
        for row in np.flatnonzero(self._ended):
            one = tree.map(_as_row, final[row])
            for whole, part in zip(last, self._to_arrays(one)):
                whole[row] = part[0]
        return last

    def _take(
        self,
        cfg: GymnasiumConfig,
        device: torch.device,
        rows: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        obs: list[np.ndarray] | None = None,
    ) -> list[Tensor]:
        """Store what the environments returned for some rows; return the results of all as tensors of a state.

        Args:
          obs: in place of the observation that they returned last.
        """
        mask = _read_mask(cfg, self._infos, rows & ~self._ended)
        results = [*(obs or self._observed), mask, terminated, truncated]
        if not rows.all():
            pairs = zip(results, self._results)
            results = [_select(rows, a, b) for a, b in pairs]
        self._results = results
        self._clock += 1
        clock = torch.full((len(rows),), self._clock)
        return to_device([*map(torch.from_numpy, results), clock], device)


def _as_row(x: Values) -> Values:
    return np.asarray(x)[None]


def _select(rows: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Select rows of `a` where `rows` is true, of `b` elsewhere, as a new array."""
    return np.where(rows.reshape(-1, *[1] * (a.ndim - 1)), a, b)


def _check_rows(vector_env: VectorEnv, n_rows: int) -> None:
    """Raise ValueError unless a vector environment has as many rows."""
    n_made = getattr(vector_env, "num_envs", n_rows)
    if n_made != n_rows:
        raise ValueError(
            f"env: expected a function that makes as many rows as it is asked for, {n_rows}, got {n_made}"
        )


def _restart_of(vector_env: VectorEnv) -> _Restart:
    """Return how finished rows of a vector environment begin their next episode."""
    if hasattr(vector_env, "all_env_ids"):
        return "ids"
    metadata: Infos = getattr(vector_env, "metadata", None) or {}
    mode = metadata.get("autoreset_mode")
    kinds: dict[Any, _Restart] = {"Disabled": "mask", "SameStep": "same-step"}
    return kinds.get(getattr(mode, "value", mode), "next-step")


def _reset_all(vector_env: VectorEnv, seeds: list[int]) -> tuple[Values, Infos]:
    """Reset a vector environment; only those of single environments have a seed for each row, and envpool has none."""
    vector = importlib.import_module("gymnasium.vector")
    if isinstance(vector_env, vector.SyncVectorEnv | vector.AsyncVectorEnv):
        return vector_env.reset(seed=seeds)
    if hasattr(vector_env, "all_env_ids"):
        return _by_row(vector_env.reset(), len(seeds))
    return vector_env.reset(seed=seeds[0])


def _by_row(returned: Values, n_rows: int) -> Values:
    """Return what envpool returned for some rows, by the number of the row, with zeros for all further rows."""
    rows = returned[-1]["env_id"]

    def place(x: Values) -> Values:
        whole = np.zeros((n_rows, *x.shape[1:]), x.dtype)
        whole[rows] = x
        return whole

    return tree.map(place, returned)


def _read_mask(
    cfg: GymnasiumConfig, infos: Infos, goes_on: np.ndarray
) -> np.ndarray:
    """Return the mask of legal actions [B, S]; all true if no mask is observed.

    Args:
      infos: of a vector environment.
      goes_on: rows that are stepped next, which need a legal action; others may have none.

    Raises:
      ValueError: a row has no mask, or no legal action.
    """
    mask = np.ones((len(goes_on), cfg.mask_size or 0), np.bool_)
    if cfg.mask_size is None:
        return mask
    given = infos.get("action_mask", ())
    all_or_none = np.full_like(goes_on, "action_mask" in infos)
    has_mask = infos.get("_action_mask", all_or_none)
    _require(cfg, goes_on & ~has_mask, "a mask in its info")
    if isinstance(given, dict):
        raise ValueError(
            f"{cfg.name}: action_mask: expected numbers, or a tuple of such in the order of the actions, got a dict"
        )

    # A mask of several actions may be a tuple of masks.
    for row, value in enumerate(given):
        if value is None:
            continue
        numbers = np.concatenate([*map(np.ravel, tree.leaves(value))])
        if len(numbers) != cfg.mask_size:
            raise ValueError(
                f"{cfg.name}: action_mask: expected {cfg.mask_size} numbers, got {len(numbers)}"
            )
        mask[row] = numbers != 0
    is_empty = mask.sum(-1) == 0
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
    make_env: Callable[[], VectorEnv], mode: VectorizationMode, n_rows: int
) -> Any:
    vector = importlib.import_module("gymnasium.vector")
    classes = {"sync": vector.SyncVectorEnv, "async": vector.AsyncVectorEnv}
    return classes[mode](
        [make_env] * n_rows, autoreset_mode=vector.AutoresetMode.DISABLED
    )


# Spaces


def _space_of_row(env: VectorEnv, name: str) -> Space:
    """Return a space of one row of a vector environment, or of an environment."""
    return getattr(env, f"single_{name}", None) or getattr(env, name)


class _Actions(NamedTuple):
    """Format of the actions of a space."""

    size: int
    sizes: tuple[int, ...] | None  # of each of several discrete actions
    is_continuous: bool
    convert: Callable[[np.ndarray], Values]  # to Gymnasium


def _simple_spaces(
    space: Space, value: Values
) -> Iterator[tuple[Space, Values]]:
    """Yield each space within Dict and Tuple spaces, with its part of a value, or of the space itself."""
    spaces = importlib.import_module("gymnasium.spaces")
    if isinstance(space, spaces.Dict):
        for key, part in space.items():
            yield from _simple_spaces(part, value[key])
    elif isinstance(space, spaces.Tuple):
        for part, x in zip(space.spaces, value):
            yield from _simple_spaces(part, x)
    else:
        yield space, value


def _to_arrays(
    space: Space, parts: tuple[ObservationPart, ...], obs: Values
) -> list[np.ndarray]:
    """Return the tensors of a state's observation, as new arrays, given what a vector environment returned."""
    arrays: list[np.ndarray] = []
    for part, (simple, x) in zip(parts, _simple_spaces(space, obs)):
        numbers = np.asarray(x) - getattr(simple, "start", 0)
        dtype = torch.empty(0, dtype=part.dtype).numpy().dtype
        numbers = numbers.astype(dtype, copy=False)
        arrays.append(numbers.reshape(-1, *part.shape))
    return arrays


def _discrete_sizes(space: Space) -> tuple[int, ...] | None:
    """Return how many values each number of a discrete space has; None for another space."""
    spaces = importlib.import_module("gymnasium.spaces")
    if isinstance(space, spaces.Discrete):
        return (int(space.n),)
    if isinstance(space, spaces.MultiDiscrete):
        return tuple(int(n) for n in space.nvec.flatten())
    if isinstance(space, spaces.MultiBinary):
        return (2,) * math.prod(space.shape)
    return None


def _read_part(name: str, space: Space) -> ObservationPart:
    """Describe the observations of a simple space.

    Raises:
      ValueError: it has no numbers of a fixed shape.
    """
    spaces = importlib.import_module("gymnasium.spaces")
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        sizes = _discrete_sizes(space) or ()
        return ObservationPart(
            shape=(len(sizes),), dtype=torch.int64, n_values=sizes
        )
    if not isinstance(space, spaces.Box | spaces.MultiBinary):
        raise ValueError(
            f"{name}: expected observations of Box, Discrete, MultiDiscrete or MultiBinary spaces, "
            f"also in a Dict or a Tuple, got {type(space).__name__}; "
            "hand in a function that makes the environment in gymnasium.wrappers.FlattenObservation"
        )
    # Other bytes, such as the cells of a board, are numbers.
    is_image = space.dtype == np.uint8 and bool(
        (space.low == 0).all() and (space.high == 255).all()
    )
    dtype = torch.uint8 if is_image else torch.float32
    return ObservationPart(shape=tuple(space.shape) or (1,), dtype=dtype)


def _read_action_space(name: str, space: Space) -> _Actions:
    """Describe the actions of a space: discrete ones, or floats, which are clipped to their bounds.

    Raises:
      ValueError: they are neither, or of both kinds.
    """
    spaces = importlib.import_module("gymnasium.spaces")
    simple = [part for part, _ in _simple_spaces(space, space)]
    sizes = [_discrete_sizes(part) for part in simple]
    is_continuous = all(
        isinstance(x, spaces.Box) and x.dtype.kind == "f" for x in simple
    )
    if not is_continuous and None in sizes:
        raise ValueError(
            f"{name}: expected actions of a Discrete, MultiDiscrete or MultiBinary space or floats, "
            f"or several of one kind, got {space}"
        )
    widths = [math.prod(part.shape) for part in simple]
    ends = np.cumsum(widths)[:-1]

    def convert(x: np.ndarray) -> Values:
        return _assemble(space, iter(np.split(x.reshape(len(x), -1), ends, 1)))

    if is_continuous:
        return _Actions(sum(widths), None, True, convert)
    each = tuple(n for x in sizes for n in x or ())
    is_one = simple[0] is space and len(space.shape) == 0
    return _Actions(sum(each), None if is_one else each, False, convert)


def _assemble(space: Space, columns: Iterator[np.ndarray]) -> Values:
    """Build actions of a vector environment of the columns of each simple space, floats clipped to their bounds."""
    spaces = importlib.import_module("gymnasium.spaces")
    if isinstance(space, spaces.Dict):
        return {key: _assemble(part, columns) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_assemble(part, columns) for part in space.spaces)
    x = next(columns).reshape(-1, *space.shape)
    if isinstance(space, spaces.Box):
        return np.clip(x, space.low, space.high).astype(space.dtype)
    return (x + getattr(space, "start", 0)).astype(space.dtype)


def gymnasium(
    env: str | Callable[..., Any],
    *,
    n_envs: int | None = None,
    vectorization_mode: VectorizationMode = "sync",
    scale_images: bool = True,
    action_mask: bool = False,
    **make_options: object,
) -> AnyEnvironment:
    """Build an environment of Gymnasium, stepped on the host by its vector environments.

    A bridge serves one learner at a time: each reset of all rows begins anew, and only the state that was returned last
    can be stepped. Evaluation has environments of its own. Observations are those of a Box, as float32 or uint8, of
    discrete spaces, as one-hot vectors, or of a Dict or a Tuple of such, as a tuple; actions those of discrete spaces,
    or of a Box, to whose bounds they are clipped, or of a Dict or a Tuple of either.

    A step in which a vector environment only resets a row is not learnt from: its reward is NaN.

    Args:
      env: Gymnasium's id; a function without arguments that makes one environment, in whatever wrappers; or a function
        of the number of rows that makes a vector environment, such as envpool's.
      n_envs: rows, which `fp.ppo` then takes by default; None: as many as the learner has.
      vectorization_mode: "sync" steps rows in turn, "async" each in a process of its own; "vector_entry_point" is the
        vector environment that belongs to the id.
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
    make = _environment_maker(env, vectorization_mode, make_options)
    name = env if isinstance(env, str) else _function_name(env)
    first = make(1)
    if not hasattr(first, "observation_space"):
        raise TypeError(
            f"env: expected a function that makes an environment, got one that makes a {type(first).__name__}"
        )
    is_vector = hasattr(first, "num_envs") or hasattr(first, "all_env_ids")
    if is_vector and n_envs is None and getattr(first, "num_envs", 1) > 1:
        n_envs = first.num_envs  # a function that makes no other number
    space = _space_of_row(first, "observation_space")
    parts = tuple(_read_part(name, x) for x, _ in _simple_spaces(space, space))
    actions = _read_action_space(name, _space_of_row(first, "action_space"))
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
        parts=parts,
        scale_images=scale_images,
        mask_size=actions.size if action_mask else None,
    )
    make_rows, check = make, do_nothing
    if not is_vector:
        make_one = partial(make, 1)
        make_rows = partial(_make_vector_env, make_one, vectorization_mode)
        # Gymnasium's check makes illegal actions.
        if not action_mask:
            check = partial(check_environment, name, make_one)

    rows, evaluation_rows = (
        HostRows(
            make_rows, partial(_to_arrays, space, parts), actions.convert, n
        )
        for n in (n_envs, None)
    )
    return on_host(
        _environment(cfg, actions, rows),
        _environment(cfg, actions, evaluation_rows),
        _blank_state,
        n_envs=n_envs,
        check=check,
        close=evaluation_rows.close,
    )


def _environment_maker(
    env: str | Callable[..., Any],
    mode: VectorizationMode,
    make_options: dict[str, object],
) -> Callable[[int], VectorEnv]:
    """Return a function of a number of rows that makes a vector environment, or one environment whatever the number."""
    gym = import_extra("gymnasium", "gymnasium", "fp.envs.gymnasium")
    check_value("vectorization_mode", VectorizationMode, mode)
    if callable(env) and not make_options:
        return env if _n_required(env) else lambda n_rows: env()
    if not isinstance(env, str):
        raise TypeError(
            "env: expected an id, or a function without options that makes one environment for each row, or a vector "
            f"environment with as many rows as it is given, got a {type(env).__name__}"
        )

    def make(n_rows: int) -> Any:
        try:
            if mode == "vector_entry_point":
                return gym.make_vec(env, n_rows, mode, **make_options)
            return gym.make(env, **make_options)
        except gym.error.Error as error:
            line = " ".join(str(error).split())
            raise ValueError(f"{env}: {line}") from error

    return make


def _n_required(fn: Callable[..., Any]) -> int:
    """Count the arguments that a function must be given."""
    return sum(
        x.default is x.empty and x.kind <= x.POSITIONAL_OR_KEYWORD
        for x in inspect.signature(fn).parameters.values()
    )


def _function_name(make_env: Callable[..., Any]) -> str:
    return getattr(make_env, "__qualname__", type(make_env).__name__)


def _environment(
    cfg: GymnasiumConfig, actions: _Actions, rows: HostRows
) -> AnyEnvironment:
    spec = spec_of_host(
        [part.shape for part in cfg.parts],
        sum(part.size for part in cfg.parts),
        action_size=actions.size,
        action_sizes=actions.sizes,
        continuous_actions=actions.is_continuous,
    )
    return Environment(
        cfg=cfg,
        reset=rows.reset,
        step_functional=rows.step,
        observe=observe,
        restart=rows.restart,
        step_with_autoreset=rows.step_with_autoreset,
        sample_reset=sample_reset,
        reset_from_sample=_blank_state,
        spec=spec,
    )


# Checks


def check_environment(name: str, make_env: Callable[[], VectorEnv]) -> None:
    """Run Gymnasium's `check_env`; raise ValueError with its first complaint.

    Of what it only warns of, rewards that are no finite numbers and flags that are no bools are errors.

    Args:
      name: begins each line.

    Raises:
      ValueError: one line that says what is wrong.
    """
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
