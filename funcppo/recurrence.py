"""Networks with memory and without, applied alike: one step, a sequence of steps, and what a new episode remembers.

The memory of a network without one is the empty tuple.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcppo import tree
from funcppo.interfaces import Agent, AnyAgent, Memory, Output
from funcppo.types import Bool, Obs, Params, World


def initial_memory(
    agent: AnyAgent, n_rows: int, device: torch.device
) -> Memory:
    """The memory of `n_rows` rows at the start of an episode."""
    if agent.initial_memory is None:
        return ()
    return agent.initial_memory(agent.cfg, n_rows, device)


def reset_memory(
    agent: AnyAgent, done: Bool[Tensor, "B"], memory: Memory
) -> Memory:
    """The memory with that of finished rows as at the start of an episode."""
    if agent.initial_memory is None:
        return ()
    first = initial_memory(agent, done.shape[0], done.device)
    return tree.where(done, first, memory)


def apply_agent(
    agent: Agent[World, Params, Obs, Output],
    world: World,
    params: Params,
    obs: Obs,
    memory: Memory,
) -> tuple[Output, Memory]:
    """The network's output for the observations of one step, and the memory after them.

    Args:
      memory: before the observations.
    """
    if agent.apply_recurrent is None:
        return agent.apply(agent.cfg, world, params, obs), ()
    return agent.apply_recurrent(agent.cfg, world, params, obs, memory)


def apply_sequence(
    agent: AnyAgent,
    world: object,
    params: object,
    obs: Any,
    done: Bool[Tensor, "T B"],
    memory: Memory,
) -> Any:
    """The output of a network with memory for T steps of B rows, flattened to T * B rows.

    Args:
      obs: a tree of tensors [T, B, ...].
      done: an episode ends with the step; the memory is reset after it.
      memory: before the first step.
    """
    if agent.apply_sequence is not None:
        return agent.apply_sequence(agent.cfg, world, params, obs, done, memory)

    outputs: list[Any] = []
    steps = zip(*(leaf.unbind() for leaf in tree.leaves(obs)))
    for leaves, done_now in zip(steps, done.unbind()):
        obs_now = tree.unflatten(obs, list(leaves))
        output, memory = apply_agent(agent, world, params, obs_now, memory)
        memory = reset_memory(agent, done_now, memory)
        outputs.append(output)
    return tree.map(_concatenate, *outputs)


def _concatenate(*leaves: Tensor) -> Tensor:
    return torch.cat(leaves)
