"""Environments of JAX, whose steps XLA compiles: `jax`.

    env = fp.envs.jax(*gymnax.make("Pendulum-v1"))
    env = fp.envs.jax(brax.envs.create("ant", auto_reset=False))

They are pure: a state holds the tensors of theirs, which PyTorch and JAX share by DLPack, and any state can be stepped
again. Rollouts call them step by step; what learns from them knows a stand-in (`interfaces.HostEnvironment`).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# JAX is optional, and imported where it is used.

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcppo.core import tree
from funcppo.core.host import import_extra
from funcppo.core.types import I64, Bool
from funcppo.envs.gymnasium_bridge import (
    call_on_host,
    on_host,
    sample_reset,
    spec_of_host,
)
from funcppo.interfaces import (
    AnyEnvironment,
    Environment,
    Timestep,
)

# Objects of JAX: arrays of one row, trees of such, functions and environments.
Array: TypeAlias = Any
Function: TypeAlias = Any


class JaxState(NamedTuple):
    """Observation and state of each row, and how its episode ended."""

    obs: tuple[Tensor, ...]  # [B, ...]
    inner: tuple[Tensor, ...]  # [B, ...]; uint32 as int32 of the same bits
    terminated: Bool[Tensor, "B"]
    truncated: Bool[Tensor, "B"]


def _functions(env: Function, params: Array) -> tuple[Function, Function]:
    """Return reset and step of one row, of gymnax's functions or Brax's.

        reset(key) -> (obs, state)
        step(key, state, action) -> (obs, state), reward, done, truncated

    Raises:
      TypeError: the environment has neither.
    """
    if hasattr(env, "reset_env") and hasattr(env, "step_env"):
        return partial(_reset_gymnax, env, params), partial(
            _step_gymnax, env, params
        )
    if hasattr(env, "reset") and hasattr(env, "step"):
        return partial(_reset_brax, env), partial(_step_brax, env)
    raise TypeError(
        f"env: expected reset_env and step_env as of gymnax, or reset and step as of Brax, got {type(env).__name__}"
    )


def _reset_gymnax(env: Function, params: Array, key: Array) -> Array:
    return env.reset_env(key, params)


def _step_gymnax(
    env: Function, params: Array, key: Array, state: Array, action: Array
) -> Array:
    obs, after, reward, done, _ = env.step_env(key, state, action, params)
    late = done & False
    # Versions before 1 know no truncation: a time limit ends the episode.
    if hasattr(env, "is_truncated"):
        late = env.is_truncated(after, params) & ~done
    return (obs, after), reward, done | late, late


def _reset_brax(env: Function, key: Array) -> Array:
    state = env.reset(key)
    return state.obs, state


def _step_brax(env: Function, key: Array, state: Array, action: Array) -> Array:
    after = env.step(state, action)
    late = after.info.get("truncation", 0 * after.done) > 0
    return (after.obs, after), after.reward, after.done > 0, late


class JaxRows:
    """Environment of JAX over rows, on tensors of PyTorch that share the memory of its arrays."""

    def __init__(
        self,
        reset: Function,
        step: Function,
        action_dtype: torch.dtype,
        action_shape: tuple[int, ...],
    ) -> None:
        """Prepare `_functions`; XLA compiles them for each number of rows.

        Args:
          reset, step: of `_functions`.
          action_dtype, action_shape: of a row's action.
        """
        self._jax: Function = importlib.import_module("jax")
        self._action = action_dtype, action_shape
        key = self._jax.ShapeDtypeStruct((2,), "uint32")
        self._layout: Array = self._jax.eval_shape(reset, key)
        self._reset = self._on_rows(partial(self._reset_row, reset))
        self._step = self._on_rows(partial(self._step_row, step))

    def reset(
        self, cfg: str, world: object, key: I64[Tensor, "B 2"]
    ) -> JaxState:
        """Reset a row for each key, which is JAX's key of the same bits."""
        return self._to_state(self._reset(key.to(torch.int32)))

    def step(
        self,
        cfg: str,
        world: object,
        state: JaxState,
        action: Tensor,
        key: I64[Tensor, "B 2"],
    ) -> tuple[JaxState, Timestep]:
        """Step all rows; rows that had finished stay as they are."""
        dtype, shape = self._action
        action = action.to(dtype).reshape(len(action), *shape)
        *reached, reward = self._step(
            action, key.to(torch.int32), *tree.leaves(state)
        )
        after = self._to_state(reached)
        return after, Timestep(reward, after.terminated, after.truncated)

    def _on_rows(self, fn: Function) -> Callable[..., list[Tensor]]:
        """Return a function of rows of tensors, of one of arrays of one row."""
        from_torch: Function = self._jax.dlpack.from_dlpack
        compiled = self._jax.jit(self._jax.vmap(fn))

        def call(*tensors: Tensor) -> list[Tensor]:
            arrays = [from_torch(x.detach().contiguous()) for x in tensors]
            return [torch.from_dlpack(x) for x in compiled(*arrays)]

        return partial(call_on_host, call)

    def _to_state(self, leaves: list[Tensor]) -> JaxState:
        n_obs = len(self._jax.tree.leaves(self._layout[0]))
        *inner, terminated, truncated = leaves[n_obs:]
        return JaxState(
            tuple(leaves[:n_obs]), tuple(inner), terminated, truncated
        )

    def _pack(self, value: Array, *others: Array) -> list[Array]:
        """Return the arrays of (observation, state), uint32 as int32, with which PyTorch computes; then others."""
        leaves = [*self._jax.tree.leaves(value), *others]
        arrays = map(self._jax.numpy.asarray, leaves)
        return [x.astype("int32") if x.dtype == "uint32" else x for x in arrays]

    def _reset_row(self, reset: Function, bits: Array) -> list[Array]:
        return self._pack(reset(bits.astype("uint32")), False, False)

    def _step_row(
        self, step: Function, action: Array, bits: Array, *before: Array
    ) -> list[Array]:
        jnp = self._jax.numpy
        like, structure = self._jax.tree.flatten(self._layout)
        arrays = [x.astype(y.dtype) for x, y in zip(before, like)]
        _, state = self._jax.tree.unflatten(structure, arrays)
        reached, reward, done, late = step(bits.astype("uint32"), state, action)
        after = self._pack(reached, done & ~late, late, reward)
        is_over = before[-1] | before[-2]
        pairs = zip(after, (*before, jnp.float32(0)))
        return [jnp.where(is_over, b, a).astype(b.dtype) for a, b in pairs]


def _observe(cfg: str, world: object, state: JaxState) -> Any:
    """Return the observation as float32, of several arrays as a tuple."""
    obs = tuple(x.to(torch.float32) for x in state.obs)
    return obs[0] if len(obs) == 1 else obs


def _blank_state(
    template: JaxState, cfg: str, world: object, key: I64[Tensor, "B 2"]
) -> JaxState:
    """Build a state of zeros with the shapes of another."""
    n = len(key)
    return tree.map(
        lambda x: x.new_zeros(n, *x.shape[1:], device=key.device), template
    )


def jax(env: Function, params: Array = None) -> AnyEnvironment:
    """Build an environment of JAX, in the interface of gymnax or of Brax; XLA compiles its steps.

    A row's key has the bits of JAX's, so that it steps as in JAX. Actions are not clipped.

    Args:
      env: gymnax's, or Brax's without auto-reset; `EpisodeWrapper` truncates episodes of the latter.
      params: of gymnax; None: the environment's own.

    Raises:
      ModuleNotFoundError: JAX is not installed.
      TypeError: it has another interface.

    Source: Lange 2022, "gymnax"; Freeman et al. 2021, "Brax", arXiv:2106.13281; DLPack.
    """
    import_extra("jax", "jax", "fp.envs.jax")
    if params is None:
        params = getattr(env, "default_params", None)
    functions = _functions(env, params)
    # Brax says of actions how many numbers they have.
    space = env.action_space(params) if hasattr(env, "action_space") else None
    n_actions = getattr(space, "n", None)
    shape = (env.action_size,) if space is None else tuple(space.shape)
    dtype = torch.float32 if n_actions is None else torch.int32
    rows = JaxRows(*functions, dtype, shape)
    template = rows.reset("", None, torch.zeros(1, 2, dtype=torch.int64))
    spec = spec_of_host(
        [tuple(x.shape[1:]) for x in template.obs],
        sum(x.numel() for x in template.obs),
        action_size=int(n_actions or math.prod(shape)),
        continuous_actions=n_actions is None,
    )
    built: AnyEnvironment = Environment(
        cfg=f"{type(env).__qualname__} {params!r}",
        reset=rows.reset,
        step_functional=rows.step,
        observe=_observe,
        sample_reset=sample_reset,
        reset_from_sample=rows.reset,
        spec=spec,
    )
    blank = partial(_blank_state, template)
    return on_host(built, built, blank, n_envs=None, is_pure=True)
