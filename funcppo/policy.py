"""A policy outside of training: `act` on observations, `export` it, and `imitate` the actions of another.

    action = fp.act(learner, state, obs)
    fp.export(learner, state, "policy.onnx", format="onnx")
    result = fp.train(learner, 100_000, params=fp.imitate(learner, obs, action))

A policy reads what the environment inside all wrappers observes: running moments are those of the state, and
observations and actions are clipped, scaled and flattened as the wrappers do. Frames are stacked by the caller: it
reads what `wrappers.frame_stack`, or another wrapper with an `observe` of its own, observes.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor

from funcppo import optim
from funcppo.core import files, random, tree
from funcppo.core.host import import_extra
from funcppo.core.settings import FieldError
from funcppo.core.types import I64
from funcppo.envs import wrappers
from funcppo.envs.wrappers import MomentsConfig, Wrapped
from funcppo.interfaces import AnyEnvironment, Memory
from funcppo.learner import AnyLearner, AnyState, own_state
from funcppo.rollout import apply_agent, choose_action, initial_memory

# Returns actions and the memory after them, for observations and the memory before.
Policy: TypeAlias = Callable[..., tuple[Tensor, Memory]]


# Wrappers from the inside out, with the first row of their states.
Wrappers: TypeAlias = list[tuple[Wrapped, Any]]


def _unwrap(
    env: AnyEnvironment, env_state: Any
) -> tuple[AnyEnvironment, Any, Wrappers]:
    """Return the environment that a policy reads, its state, and the wrappers around it.

    Raises:
      ValueError: rows are normalised by moments of their own.
    """
    if not isinstance(env.cfg, Wrapped) or env.observe is not wrappers.observe:
        return env, env_state, []
    cfg = env.cfg
    if isinstance(cfg.settings, MomentsConfig) and not cfg.settings.shared:
        raise ValueError(
            "env: expected running moments that all rows share, got shared=False"
        )
    inner, inner_state, around = _unwrap(cfg.env, env_state.inner)
    first_row = tree.map(lambda x: x[:1].clone(), env_state)
    return inner, inner_state, [*around, (cfg, first_row)]


def _policy(learner: AnyLearner, state: AnyState, around: Wrappers) -> Policy:
    agent, world = learner.cfg.agent, learner.world

    def policy(
        obs: Any, memory: Memory, key: I64[Tensor, "2"] | None = None
    ) -> tuple[Tensor, Memory]:
        for cfg, wrapper_state in around:
            if cfg.to_observation is not None:
                obs = cfg.to_observation(cfg, wrapper_state, obs)
        output, memory = apply_agent(agent, world, state.params, obs, memory)
        action = choose_action(agent, output, key)
        for cfg, _ in reversed(around):
            if cfg.to_action is not None:
                action = cfg.to_action(cfg, action)
        return action, memory

    return policy


def act(
    learner: AnyLearner,
    state: AnyState,
    obs: Any,
    *,
    memory: Memory = None,
    key: I64[Tensor, "2"] | None = None,
) -> Any:
    """Return the action of each row of observations, for the environment inside all wrappers.

    Args:
      state: of the learner, with the parameters and the running moments.
      obs: [B, ...], as the environment inside all wrappers observes it.
      memory: of a network with memory, before the observations. None: that of the start of an episode.
      key: samples actions; None: the most probable ones.

    Returns:
      The actions [B, ...]; of a network with memory, the actions and the memory after them.

    Raises:
      ValueError: observations have other shapes or dtypes than those of the environment, or the state is of another
        learner.
      TypeError: what is handed in is no state.
    """
    agent = learner.cfg.agent
    with own_state(learner, state, "act"), torch.no_grad():
        env, env_state, around = _unwrap(learner.cfg.env, state.env_state)
        like = env.observe(env.cfg, learner.world, env_state)
        n_rows = _check_rows("obs", obs, like)
        if memory is None:
            device = tree.leaves(obs)[0].device
            memory = initial_memory(agent, n_rows, device)
        action, memory = _policy(learner, state, around)(obs, memory, key)
    return action if agent.initial_memory is None else (action, memory)


def _check_rows(name: str, value: object, like: object) -> int:
    """Check that a tree has rows as another has; return their number.

    Raises:
      ValueError: one line that names the tensor that differs.
    """
    leaves = tree.leaves(value)
    first: object = leaves[0] if leaves else None
    n_rows = len(first) if isinstance(first, Tensor) and first.ndim else 1

    def resize(x: Tensor) -> Tensor:
        return x[:1].expand(n_rows, *x.shape[1:])

    tree.check_layout(value, tree.map(resize, like), name, ValueError)
    return n_rows


class _Exported(torch.nn.Module):
    """Policy as a module of plain tensors: observations, then of a network with memory `is_first` and the memory."""

    def __init__(
        self, policy: Policy, obs: Any, first_memory: Callable[..., Memory]
    ) -> None:
        super().__init__()
        self._policy, self._obs = policy, obs
        self._first_memory = first_memory

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the actions, then the memory after them."""
        n_obs = len(tree.leaves(self._obs))
        obs = tree.unflatten(self._obs, list(inputs[:n_obs]))
        memory = first = self._first_memory(
            inputs[0].shape[0], inputs[0].device
        )
        if inputs[n_obs:]:
            is_first, *given = inputs[n_obs:]
            memory = tree.where(is_first, first, tree.unflatten(first, given))
        action, memory = self._policy(obs, memory)
        return action, *tree.leaves(memory)


def export(
    learner: AnyLearner,
    state: AnyState,
    path: str | Path,
    format: Literal["torch", "onnx"] = "torch",
) -> tuple[str, ...]:
    """Write the greedy policy to a file that runs without funcppo, for any number of rows.

        policy = torch.export.load("policy.pt2").module()
        (action,) = policy(obs)

    Args:
      learner: whose environment and network the state is of.
      state: with the parameters and the running moments, which are written.
      path: the file to write.
      format: torch, of `torch.export`; or onnx (extra `onnx`).

    Returns:
      The names of the inputs in their order: the observation as `act` reads it, a tensor for each of its parts; of a
      network with memory `is_first`, true for rows whose episode begins, and the memory that the last call returned
      beside the actions.

    Raises:
      ValueError: there is no such format, the state is of another learner, or the file cannot be written.
    """
    if format not in ("torch", "onnx"):
        raise FieldError("format", "torch or onnx", format)
    with own_state(learner, state, "export"), torch.no_grad():
        # PyTorch warns of tensors that are parts of others.
        state = tree.contiguous_copy(state)
        env, env_state, around = _unwrap(learner.cfg.env, state.env_state)
        agent = learner.cfg.agent
        obs = env.observe(env.cfg, learner.world, env_state)
        first_memory = partial(initial_memory, agent)
        module = _Exported(_policy(learner, state, around), obs, first_memory)
        two_rows = tree.map(lambda x: torch.cat([x[:1], x[:1]]), obs)
        inputs = tree.leaves(two_rows)
        names = [name or "obs" for name in tree.paths(obs)]

        if agent.initial_memory is not None:
            memory = first_memory(2, inputs[0].device)
            inputs += [inputs[0].new_ones(2, dtype=torch.bool)]
            inputs += tree.leaves(memory)
            names += ["is_first", *(f"memory_{x}" for x in tree.paths(memory))]
        names = [name.replace(".", "_") for name in names]
        content = _to_bytes(module, inputs, names, format)
    with files.expecting(f"path: {path}: expected a file that can be written"):
        files.write_file(Path(path), content)
    return tuple(names)


def _to_bytes(
    module: torch.nn.Module, inputs: list[Tensor], names: list[str], format: str
) -> bytes:
    """Export a module with any number of rows; return the content of its file."""
    rows = torch.export.Dim("rows", min=1)
    shapes = {"inputs": tuple({0: rows} for _ in inputs)}
    program = torch.export.export(
        module, tuple(inputs), dynamic_shapes=shapes, strict=False
    )
    if format == "torch":
        file = io.BytesIO()
        torch.export.save(program, file)
        return file.getvalue()

    import_extra("onnxscript", "onnx", "fp.export")
    exported = torch.onnx.export(
        program,
        input_names=names,
        output_names=["action", *(f"next_{x}" for x in names if "mem" in x)],
        dynamo=True,
        verbose=False,
    )
    return cast(Any, exported).model_proto.SerializeToString()


def imitate(
    learner: AnyLearner,
    obs: Any,
    action: Tensor,
    *,
    n_epochs: int = 10,
    batch_size: int = 256,
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> Any:
    """Return parameters that give the actions of transitions a high probability, for `fp.train(params=...)`.

    Args:
      learner: with a network without memory.
      obs: [N, ...], as the network reads them.
      action: [N, ...], as the network makes them.
      n_epochs: passes over the transitions.
      batch_size: transitions of a step of Adam.
      learning_rate: of Adam.
      seed: of the first parameters and of the order.

    Raises:
      ValueError: the network has memory, or one line that names the observation or action of another shape, dtype or
        range than in the environment, or number of rows.

    Source: Pomerleau 1991, "Efficient training of artificial neural networks for autonomous navigation".
    """
    cfg, agent = learner.cfg, learner.cfg.agent
    if agent.initial_memory is not None:
        raise ValueError(
            "learner: expected a network without memory, got one with"
        )
    key = random.key(seed, getattr(action, "device", "cpu"))
    params = _check_transitions(learner, learner.init(key), obs, action)
    n_rows = len(action)
    opt_state = optim.init(params)

    def loss(params: Any, rows: I64[Tensor, "MB"]) -> Tensor:
        some = tree.map(lambda x: x[rows], obs)
        output = agent.apply(agent.cfg, learner.world, params, some)
        return -agent.distribution.log_prob(output, action[rows]).mean()

    for epoch_key in random.split(random.fold_in(key, 1), n_epochs).unbind():
        for rows in random.permutation(epoch_key, n_rows).split(batch_size):
            grads = torch.func.grad(loss)(params, rows)
            params, opt_state = optim.update(
                cfg.ppo.adam, grads, opt_state, params, learning_rate
            )
    return params


def _check_transitions(
    learner: AnyLearner, state: AnyState, obs: object, action: Tensor
) -> Any:
    """Check transitions to imitate beside those of a learner's first state; return the first parameters.

    Raises:
      ValueError: one line that names what differs.
    """
    cfg, agent, world = learner.cfg, learner.cfg.agent, learner.world
    like = cfg.env.observe(cfg.env.cfg, world, state.env_state)
    n_rows = _check_rows("obs", obs, like)
    output = agent.apply(agent.cfg, world, state.params, like)
    made = choose_action(agent, output, None)
    if _check_rows("action", action, made) != n_rows or not n_rows:
        raise ValueError(
            f"action: expected {n_rows or 'some'}, one for each observation, got {len(action)}"
        )
    spec = cfg.env.spec
    if spec is not None and not spec.continuous_actions:
        sizes = torch.tensor(spec.action_sizes or spec.action_size)
        is_wrong = (action < 0) | (action >= sizes.to(action.device))
        if is_wrong.any():
            raise ValueError(
                f"action: expected numbers from 0 to below {sizes.tolist()}, got {int(action[is_wrong][0])}"
            )
    return state.params
